"""Cheap ops in the body of a loop, run again in its backward pass rather than kept.

The law of this file: results do not change. What a loop keeps for its backward pass is
stacked up, step by step. Where cheap ops stand between matrix products (a softmax, a
norm, a gelu, the cell of an LSTM), what goes in and comes out is kept, and what is
between is computed again: most of it is float32, or would be kept many times over.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.rules import CHEAP, LINEAR

Run = list[Any]


def rematerialize(jaxpr: Any) -> Any:
    """Returns the closed jaxpr of a loop's body with its islands rematerialized."""
    parts = compat.parts(jaxpr)
    plan = _plan(parts)
    if not any(isinstance(item, list) for item in plan):
        return jaxpr
    raises = {eqn.outvars[0]: eqn for eqn in parts.eqns if _is_raise(eqn)}

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, arrays, strict=True))
        for item in plan:
            if isinstance(item, list):
                _run_island(item, _wanted(item, parts), raises, env)
            else:
                _run([item], env)
        return [_read(env, atom) for atom in parts.outvars]

    return compat.trace(run, [var.aval for var in parts.invars], jaxpr)


def only_raised(jaxpr: Any) -> frozenset[int]:
    """Returns which 16-bit inputs of a jaxpr are read by nothing but raises."""
    parts = compat.parts(jaxpr)
    raised = {eqn.invars[0] for eqn in parts.eqns if _is_raise(eqn)}
    read = {
        atom
        for eqn in parts.eqns
        for atom in eqn.invars
        if not compat.is_literal(atom) and not _is_raise(eqn)
    }
    read.update(atom for atom in parts.outvars if not compat.is_literal(atom))
    return frozenset(
        i for i, var in enumerate(parts.invars) if var in raised and var not in read
    )


def with_raised(jaxpr: Any, raised: frozenset[int]) -> Any:
    """Returns a jaxpr that takes some of its inputs in float32 already."""
    if not raised:
        return jaxpr
    parts = compat.parts(jaxpr)
    given = {parts.invars[i] for i in raised}

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, arrays, strict=True))
        for eqn in parts.eqns:
            if _is_raise(eqn) and eqn.invars[0] in given:
                env[eqn.outvars[0]] = env[eqn.invars[0]]
            else:
                _run([eqn], env)
        return [_read(env, atom) for atom in parts.outvars]

    avals = [
        compat.retyped(var.aval, "float32") if var in given else var.aval
        for var in parts.invars
    ]
    return compat.trace(run, avals, jaxpr)


def _plan(parts: compat.Parts) -> list[Any]:
    """Returns the equations in an order to run them, those of an island in a list.

    An island is a run of cheap ops. An equation that does not read
    what the run has made goes before it; one that does ends it.
    """
    plan: list[Any] = []
    island: Run = []
    made: set[Any] = set()

    def flush() -> None:
        is_worth_it = any(eqn.primitive.name not in LINEAR for eqn in island)
        plan.extend([list(island)] if is_worth_it else island)
        island.clear()
        made.clear()

    for eqn in parts.eqns:
        if _is_cheap(eqn):
            island.append(eqn)
            made.update(eqn.outvars)
            continue
        if any(not compat.is_literal(a) and a in made for a in eqn.invars):
            flush()
        plan.append(eqn)
    flush()
    return plan


def _is_raise(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    (atom,), (var,) = eqn.invars, eqn.outvars
    is_low = compat.is_float(atom) and not compat.is_literal(atom)
    return is_low and compat.is_float32(var) and compat.dtype_of(atom).itemsize == 2


def _is_cheap(eqn: Any) -> bool:
    """Whether an equation of floats is one pass over memory, or a call of such."""
    has_floats = any(map(compat.is_float, (*eqn.invars, *eqn.outvars)))
    return has_floats and _is_light(eqn)


def _is_light(eqn: Any) -> bool:
    if eqn.effects:
        return False
    if eqn.primitive.name in ("jit", "custom_jvp_call"):
        inside = [e for j in compat.inner_jaxprs(eqn) for e in compat.parts(j).eqns]
        return bool(inside) and all(map(_is_light, inside))
    return eqn.primitive.name in CHEAP


def _wanted(island: Run, parts: compat.Parts) -> list[Any]:
    """Returns the results of an island that are read outside of it."""
    inside = set(map(id, island))
    read = {id(atom) for atom in parts.outvars}
    for eqn in parts.eqns:
        if id(eqn) not in inside:
            read.update(map(id, eqn.invars))
    return [var for eqn in island for var in eqn.outvars if id(var) in read]


def _run_island(
    island: Run, wanted: Sequence[Any], maker: Mapping[Any, Any], env: dict[Any, Any]
) -> None:
    made = {var for eqn in island for var in eqn.outvars}
    atoms = [a for eqn in island for a in eqn.invars if not compat.is_literal(a)]
    needed = dict.fromkeys(atom for atom in atoms if atom not in made)
    # What was raised before is raised again: it is kept in 16 bits.
    raises = [maker[atom] for atom in needed if atom in maker]
    island = [*raises, *island]
    atoms = [*(eqn.invars[0] for eqn in raises), *(a for a in needed if a not in maker)]
    inputs = list(dict.fromkeys(atoms))

    def run(*arrays: Any) -> list[Any]:
        inner = dict(zip(inputs, arrays, strict=True))
        _run(island, inner)
        return [inner[var] for var in wanted]

    # In a loop XLA has nothing to eliminate: what is kept is stacked already.
    again = jax.checkpoint(run, prevent_cse=False)
    env.update(zip(wanted, again(*(env[a] for a in inputs)), strict=True))


def _run(eqns: Sequence[Any], env: dict[Any, Any]) -> None:
    for eqn in eqns:
        with compat.context_of(eqn):
            results = compat.bind(eqn, [_read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return compat.as_array(atom.val) if compat.is_literal(atom) else env[atom]
