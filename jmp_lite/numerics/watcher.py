"""Runs a jaxpr as it is, and counts the numbers of each op beside it.

Results and derivatives are those of the function. Counts add up over a loop's steps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.jaxprs import compat, sharding
from jmp_lite.autocasting.rules.rules import of_the_user
from jmp_lite.numerics.statistics import added, counted, nothing, stacked


class Op(NamedTuple):
    """An op, and where it stands."""

    scope: str
    op: str
    source: str


class Watched(NamedTuple):
    """A jaxpr that counts.

    Attributes:
      jaxpr: it, closed, with the counts behind its results.
      ops: the ops that are counted.
      axes: the mapped axes over which the counts differ.
    """

    jaxpr: Any
    ops: Sequence[Op]
    axes: frozenset[str]

    def __call__(self, *arrays: Any) -> tuple[list[Any], dict[str, Any]]:
        """Returns the results and the counts."""
        return self.apart(compat.evaluate(self.jaxpr, arrays))

    def apart(self, results: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns what it has returned as results and counts."""
        structure = jax.tree.structure(jax.eval_shape(lambda: nothing(0)))
        n = len(results) - structure.num_leaves
        return list(results[:n]), jax.tree.unflatten(structure, results[n:])

    def nothing(self) -> dict[str, Any]:
        """Returns the counts of its ops before it is run."""
        return _varying(nothing(len(self.ops)), self.axes)


class Watcher:
    """Runs jaxprs and counts the numbers of all results.

    Args:
      dtype: what the numbers might be held in.

    Attributes:
      ops: what was run, in order.
      counts: the counts of all ops, some of one op and some of several.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.ops: list[Op] = []
        self.counts: list[dict[str, Any]] = []

    def run(
        self, jaxpr: Any, arrays: Sequence[Any], path: str, source: str = ""
    ) -> list[Any]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          arrays: what it is given.
          path: the scopes that it stands in.
          source: where it is called, for the ops of which nothing better is known.
        """
        parts = compat.parts(jaxpr)
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, arrays, strict=True))
        for eqn in parts.eqns:
            operands = [compat.read(env, atom) for atom in eqn.invars]
            with compat.context_of(eqn):
                results = self._equation(eqn, operands, path, source)
            env.update(zip(eqn.outvars, results, strict=True))
        return [compat.read(env, atom) for atom in parts.outvars]

    def _equation(
        self, eqn: Any, operands: Sequence[Any], path: str, source: str
    ) -> list[Any]:
        name, inside = compat.op_of(eqn), compat.path_of(eqn, path)
        source = compat.source(eqn, source)
        if name == "jit":
            return self.run(compat.called(eqn), operands, inside, source)
        is_custom = name in ("custom_jvp_call", "custom_vjp_call")
        if is_custom and compat.has_only_axis_effects(eqn):
            # Its own derivative is kept; what is inside is run once more, to be seen.
            seen = [lax.stop_gradient(array) for array in operands]
            self.run(compat.called(eqn), seen, inside, source)
            return compat.bind_custom(eqn, list(operands), lambda *funs: funs)
        if name in compat.REMAT:
            return self._remat(eqn, operands, inside, source)
        if name == "scan":
            return self._scan(eqn, operands, inside, source)
        if name == "while" and not _has_lanes(eqn):
            return self._while(eqn, operands, inside, source)
        if name == "cond":
            return self._cond(eqn, operands, inside, source)
        results = compat.bind(eqn, operands)
        scope = compat.join(path, *compat.scopes(eqn))
        self._note(eqn, operands, results, Op(of_the_user(scope), name, source))
        return results

    def _note(
        self, eqn: Any, operands: Sequence[Any], results: Sequence[Any], op: Op
    ) -> None:
        given = _floats(eqn.invars, operands)
        made = [lax.stop_gradient(x) for x in _floats(eqn.outvars, results)]
        if not made:
            return
        counts = functools.reduce(added, [counted(x, self._dtype) for x in made])
        counts["is_first"] = _are_finite(given) & ~_are_finite(made)
        self._add([op], counts)

    def _add(self, ops: Sequence[Op], counts: dict[str, Any]) -> None:
        self.ops += ops
        self.counts.append(counts)

    def _watched(self, jaxpr: Any, path: str, source: str) -> Watched:
        ops: list[Op] = []

        def run(*arrays: Any) -> list[Any]:
            inner = Watcher(self._dtype)
            results = inner.run(jaxpr, arrays, path, source)
            ops[:] = inner.ops
            return [*results, *jax.tree.leaves(stacked(inner.counts))]

        avals = [var.aval for var in compat.parts(jaxpr).invars]
        traced = compat.trace(run, avals, jaxpr)
        n_results = len(compat.parts(jaxpr).outvars)
        axes = sharding.varying_axes(compat.parts(traced).outvars[n_results:])
        return Watched(traced, ops, axes)

    def _remat(
        self, eqn: Any, operands: Sequence[Any], path: str, source: str
    ) -> list[Any]:
        body = self._watched(compat.called(eqn), path, source)
        results, counts = body.apart(compat.bind_remat(eqn, operands, body.jaxpr))
        self._add(body.ops, counts)
        return results

    def _scan(
        self, eqn: Any, operands: Sequence[Any], path: str, source: str
    ) -> list[Any]:
        n_consts, n_carry = compat.scan_counts(eqn)
        n, body = n_consts + n_carry, self._watched(compat.body_of(eqn), path, source)
        consts, carry, xs = operands[:n_consts], operands[n_consts:n], operands[n:]

        def step(carry: Any, xs: Any) -> Any:
            arrays, counts = carry
            results, new = body(*consts, *arrays, *xs)
            return (results[:n_carry], added(counts, new)), results[n_carry:]

        (carry, counts), ys = lax.scan(
            step,
            (list(carry), body.nothing()),
            list(xs),
            **compat.scan_options(eqn),
        )
        self._add(body.ops, counts)
        return [*carry, *ys]

    def _while(
        self, eqn: Any, operands: Sequence[Any], path: str, source: str
    ) -> list[Any]:
        loop = compat.while_parts(eqn)
        n_test, n_consts = loop.n_cond, loop.n_cond + loop.n_body
        test = self._watched(loop.cond, path, source)
        body = self._watched(loop.body, path, source)

        def tested(arrays: Sequence[Any], counts: dict[str, Any]) -> Any:
            (goes_on,), new = test(*operands[:n_test], *arrays)
            return goes_on, added(counts, new)

        def step(carry: Any) -> Any:
            arrays, counts, (_, of_test) = carry
            results, new = body(*operands[n_test:n_consts], *arrays)
            return results, added(counts, new), tested(results, of_test)

        arrays = list(operands[n_consts:])
        # What the condition says is carried along, so that it runs as often as it did.
        start = (arrays, body.nothing(), tested(arrays, test.nothing()))
        results, counts, (_, of_test) = lax.while_loop(lambda c: c[2][0], step, start)
        self._add(test.ops, of_test)
        self._add(body.ops, counts)
        return results

    def _cond(
        self, eqn: Any, operands: Sequence[Any], path: str, source: str
    ) -> list[Any]:
        branches = [
            self._watched(branch, path, source) for branch in compat.branches_of(eqn)
        ]
        axes = frozenset[str]().union(*(branch.axes for branch in branches))

        def taken(i: int) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                results, new = branches[i](*arrays)
                counts = [branch.nothing() for branch in branches]
                counts[i] = new
                total = _varying(stacked(counts), axes)
                return [*results, *jax.tree.leaves(total)]

            return run

        avals = [atom.aval for atom in eqn.invars[1:]]
        jaxprs = tuple(
            compat.trace(taken(i), avals, branch.jaxpr)
            for i, branch in enumerate(branches)
        )
        out = compat.bind(eqn, operands, branches=jaxprs)
        results, counts = branches[0].apart(out)
        self._add([op for branch in branches for op in branch.ops], counts)
        return results


def _floats(atoms: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    pairs = zip(atoms, arrays, strict=True)
    # A number that is written into the jaxpr is no array of JAX yet.
    return [jnp.asarray(array) for atom, array in pairs if compat.is_float(atom)]


def _are_finite(arrays: Sequence[Any]) -> Any:
    each = [jnp.all(jnp.isfinite(array)) for array in arrays]
    return functools.reduce(jnp.logical_and, each, np.True_)


def _has_lanes(loop: Any) -> bool:
    """Whether vmap has made one condition for each lane of a while loop."""
    return bool(compat.parts(compat.while_parts(loop).cond).outvars[0].aval.shape)


def _varying(counts: dict[str, Any], axes: frozenset[str]) -> dict[str, Any]:
    return jax.tree.map(lambda array: sharding.as_varying(array, axes), counts)
