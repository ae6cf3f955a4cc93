"""All that this library knows of JAX and JAX does not promise, seen on 0.10.2 and 0.12.

The law of this file: the rest of the library reads a jaxpr through these names alone.
Where versions differ, a feature is asked for, never a version number.
"""

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import partial_eval
from jax._src.lax import lax
from jax._src.source_info_util import user_frames
from jax.extend import core, linear_util, source_info_util

from jmp_lite.autocasting.rules import PRODUCTS

Jaxpr = Any
Equation = Any
Atom = Any
Aval = Any


class Parts(NamedTuple):
    """A jaxpr, whichever class it is of, with its constants beside it."""

    constvars: Sequence[Atom]
    consts: Sequence[Any]
    invars: Sequence[Atom]
    eqns: Sequence[Equation]
    outvars: Sequence[Atom]


def parts(jaxpr: Jaxpr) -> Parts:
    """Takes a closed or an open jaxpr apart; an open one has no constants."""
    # 0.10 has two classes, of which the closed one holds the other; 0.12 has one.
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return Parts(inner.constvars, consts, inner.invars, inner.eqns, inner.outvars)


def trace(fun: Callable[..., Any], avals: Sequence[Aval], like: Jaxpr) -> Jaxpr:
    """Traces a function of arrays to a closed jaxpr.

    Args:
      fun: takes one tracer per aval and returns a list of arrays.
      avals: the types of its arguments.
      like: a jaxpr that the new one stands in for, of which its name is taken.
    """
    debug_info = getattr(like, "jaxpr", like).debug_info.with_unknown_names()
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    # 0.12 has the constants as the first inputs; 0.10 keeps them apart.
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(consts)
    return core.ClosedJaxpr(jaxpr, consts)


def with_consts_as_inputs(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a closed jaxpr whose constants are its first inputs, and them."""
    consts = list(jaxpr.consts)
    n_consts = len(consts)
    avals = [var.aval for var in (*parts(jaxpr).constvars, *parts(jaxpr).invars)]

    def run(*arrays: Any) -> list[Any]:
        fresh = arrays[:n_consts]
        if hasattr(jaxpr, "with_consts"):
            closed = jaxpr.with_consts(fresh)
        else:
            closed = core.ClosedJaxpr(jaxpr.jaxpr, fresh)
        return evaluate(closed, arrays[n_consts:])

    return trace(run, avals, jaxpr), consts


def evaluate(jaxpr: Jaxpr, arrays: Sequence[Any]) -> list[Any]:
    """Runs a closed jaxpr."""
    return core.jaxpr_as_fun(jaxpr)(*arrays)


def without_consts(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the open jaxpr of a closed one that has no constants."""
    assert not jaxpr.consts, "a rematerialized function may not gain constants"
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(atom: Atom) -> bool:
    """Whether an atom is a number written into the jaxpr."""
    return isinstance(atom, core.Literal)


def dtype_of(atom: Atom) -> Any:
    """Returns the dtype that an atom was traced with; None for what has none."""
    return getattr(atom.aval, "dtype", None)


def is_float32(atom: Atom) -> bool:
    """Whether an atom was traced as an array of float32 (a Ref is no array)."""
    return isinstance(atom.aval, jax.core.ShapedArray) and dtype_of(atom) == np.float32


def is_float(atom: Atom) -> bool:
    """Whether an atom was traced as an array of floats of any width (no Ref)."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(dtype_of(atom), jnp.inexact)


def is_integer(atom: Atom) -> bool:
    """Whether an atom was traced as an array of integers."""
    dtype = dtype_of(atom)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def name_of(jaxpr: Jaxpr) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_name


def is_tracer(array: Any) -> bool:
    """Whether the numbers of an array are not known yet."""
    return isinstance(array, jax.core.Tracer)


def inner_jaxprs(eqn: Equation) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters."""
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


CALLS = ("jit", "checkpoint", "remat", "remat2")
"""Ops that do no more than call what they hold."""


def called(eqn: Equation) -> Jaxpr | None:
    """Returns the jaxpr that an equation does no more than call, or None."""
    if eqn.primitive.name in CALLS:
        return eqn.params["jaxpr"]
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn.params["call_jaxpr"]
    return None


def trips(eqn: Equation) -> int | None:
    """Returns how often what an equation holds is run; None where it is not known."""
    if eqn.primitive.name == "while":
        return None
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def live_equations(jaxpr: Jaxpr) -> list[Equation]:
    """Returns the equations of a jaxpr of which anything is read, in order."""
    of = parts(jaxpr)
    read = {atom for atom in of.outvars if not is_literal(atom)}
    found: list[Equation] = []
    for eqn in reversed(of.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(atom for atom in eqn.invars if not is_literal(atom))
    return found[::-1]


def product_sizes(eqn: Equation) -> tuple[Any, ...]:
    """Returns the sizes of a matrix product: of a result's sides, and what is summed.

    Of a convolution those of its channels. Nothing for any other op. A size may be
    symbolic.
    """
    if eqn.primitive.name not in PRODUCTS:
        return ()
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "dot_general":
        (summed, of_rhs), (batch, of_rhs_batch) = numbers
        rest = [
            math.prod(n for i, n in enumerate(shape) if i not in {*one, *other})
            for shape, one, other in (
                (lhs, summed, batch),
                (rhs, of_rhs, of_rhs_batch),
            )
        ]
        return *rest, math.prod(lhs[i] for i in summed)
    if eqn.primitive.name == "conv_general_dilated":
        channels_out, channels_in, *_ = (rhs[i] for i in numbers.rhs_spec)
        return channels_in, channels_out
    return lhs[-2], rhs[-1], lhs[-1]  # Ragged: the groups share the rows.


def product_flops(eqn: Equation) -> int:
    """Returns the operations of a matrix product, two for each multiplication."""
    if eqn.primitive.name not in PRODUCTS:
        return 0
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "dot_general":
        summed = [lhs[i] for i in numbers[0][0]]
    elif eqn.primitive.name == "conv_general_dilated":
        summed = [n for i, n in enumerate(rhs) if i != numbers.rhs_spec[0]]
    else:
        summed = [lhs[-1]]
    (out,) = eqn.outvars
    # A complex multiplication is four, and two more sums.
    each = 8 if jnp.issubdtype(dtype_of(out), jnp.complexfloating) else 2
    # The derivative of a stride spreads numbers out: what it fills in is no work.
    spread = math.prod(eqn.params.get("lhs_dilation", ()))
    return each * known_size(out.aval.shape) * known_size(summed) // spread


def known_size(shape: Iterable[Any]) -> int:
    """Returns how many numbers an array holds; a symbolic size counts as one."""
    return math.prod(n for n in shape if isinstance(n, int))


def retyped(aval: Aval, dtype: Any) -> Aval:
    """Returns a type with another dtype, or itself."""
    if getattr(aval, "dtype", None) == dtype:
        return aval
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


def scopes(eqn: Equation) -> tuple[str, ...]:
    """Returns the names of the scopes that an equation stands in, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return tuple(item.name for item in stack if isinstance(item, _Scope))


def is_transposed(eqn: Equation) -> bool:
    """Returns whether an equation belongs to the backward pass of something."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(item, "name", "") == "transpose" for item in stack)


def source(eqn: Equation, caller: str = "") -> str:
    """Returns where an equation stands in the user's code: file, line, (function).

    Args:
      eqn: the equation.
      caller: where the equation stands that holds it, if one does. What a package has
        wrapped in ``jit``, as most of ``jax.numpy`` is, knows not who calls it.

    Returns:
      The innermost line that is the user's, else that of the caller, else that of an
      installed package; nothing where there is none.
    """
    own, of_a_package = _sources(eqn.source_info.traceback)
    return own or caller or of_a_package


@functools.lru_cache(maxsize=4096)
def _sources(traceback: Any) -> tuple[str, str]:
    """Returns the innermost lines that are the user's, and an installed package's."""
    of_a_package = ""
    for frame in user_frames(traceback):
        if frame.file_name.startswith(_THIS_LIBRARY):
            continue
        told = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if not _PACKAGES.search(frame.file_name):
            return told, of_a_package
        of_a_package = of_a_package or told
    return "", of_a_package


_THIS_LIBRARY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


_Scope = type(source_info_util.new_name_stack("a").stack[0])


def join(*names: str) -> str:
    """Returns a path of those names that there are."""
    return "/".join(filter(None, names))


def path_of(eqn: Equation, path: str) -> str:
    """Returns the path that an equation stands in, of a jaxpr that stands in one.

    That of what is inside of it, if it is a call with a name.
    """
    name = eqn.params["name"] if eqn.primitive.name == "jit" else ""
    return join(path, *scopes(eqn), name)


@contextlib.contextmanager
def context_of(eqn: Equation) -> Generator[None]:
    """Everything bound inside stands where the equation stood, in its settings."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with (
        source_info_util.user_context(traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


def bind(eqn: Equation, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Binds an equation's primitive to other operands, with some parameters changed."""
    params = {**eqn.params, **changed}
    run = functools.partial(_bind, eqn.primitive, tuple(params.items()))
    # What holds a jaxpr is not held on to: it may close over arrays and tracers.
    is_plain = not eqn.effects and next(inner_jaxprs(eqn), None) is None
    if is_plain and any(map(_is_being_linearized, operands)):
        with contextlib.suppress(TypeError):  # Its parameters cannot be hashed.
            run = _one_op(eqn.primitive, tuple(params.items()))
    out = run(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind(primitive: Any, params: tuple[tuple[str, Any], ...], *operands: Any) -> Any:
    return primitive.bind(*operands, **primitive.get_bind_params(dict(params)))


@functools.lru_cache(maxsize=4096)
def _one_op(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    """Returns an op as a function of ``jit``, which leaves no trace of it.

    JAX takes a function of jit apart for ``grad`` once, and an op again at every use: a
    model of equal layers is traced in a third less time. (What jax.numpy is made of is
    wrapped so for the same reason.)
    """
    function = functools.partial(_bind, primitive, params)
    return jax.jit(function, inline=getattr(jax, "Inline", _Inline).JAX_EARLY)


class _Inline:
    JAX_EARLY = True  # Before 0.12.


def _is_being_linearized(operand: Any) -> bool:
    """Whether an operand is differentiated in reverse, while something else traces."""
    if type(operand).__name__ != "LinearizeTracer":
        return False
    return is_tracer(operand.primal)


def bind_custom(
    eqn: Equation, operands: Sequence[Any], replace: Callable[..., Any]
) -> list[Any]:
    """Binds a function with a custom derivative rule, its functions replaced.

    Args:
      eqn: a ``custom_jvp_call`` or a ``custom_vjp_call``.
      operands: what to bind it to.
      replace: takes ``(fun, jvp)`` or ``(fun, fwd, bwd)`` as plain functions and
        returns as many.
    """
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    wrapped = params["subfuns"]
    # On 0.12 a backward function may be of a kind that is no function: it stays.
    plain = replace(*(getattr(fun, "call_wrapped", fun) for fun in wrapped))
    params["subfuns"] = tuple(
        linear_util.wrap_init(new, debug_info=old.debug_info)
        if hasattr(old, "call_wrapped")
        else old
        for new, old in zip(plain, wrapped, strict=True)
    )
    return list(eqn.primitive.bind(*operands, **params))


def forwarded_residuals(eqn: Equation) -> Sequence[int | None]:
    """Returns which operand of a ``custom_vjp_call`` each of its residuals is, if any.

    It is known once the forward function has been run.
    """
    _, _, forwards = eqn.params["out_trees"]()
    return forwards


def scan_counts(eqn: Equation) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants, and how many carries."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def shard_map_arguments(eqn: Equation) -> dict[str, Any]:
    """Returns what ``jax.shard_map`` has to be given to make an equation again."""
    params = eqn.params
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "out_specs": list(params["out_specs"]),
        "axis_names": set(params["newly_manual_axes"]),
        "check_vma": params["check_vma"],
    }


def ambient_precision() -> Any:
    """Returns the precision or algorithm that a dot gets which asks for none."""
    name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    algorithms = jax.lax.DotAlgorithmPreset.__members__
    if name in algorithms:
        return algorithms[name]
    return None if name is None else jax.lax.Precision(name)


def has_only_axis_effects(eqn: Equation) -> bool:
    """Whether an equation does nothing but talk over named axes."""
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects)


def retraced(
    jaxpr: Jaxpr, avals: Sequence[Aval], steps: Callable[[dict[Atom, Any]], None]
) -> Jaxpr:
    """Returns a closed jaxpr, traced again with its equations run another way.

    Args:
      jaxpr: the jaxpr.
      avals: the types of its inputs, which may be other ones.
      steps: is given what the inputs are, by variable, and adds the results.
    """
    old = parts(jaxpr)

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(old.constvars, old.consts, strict=True))
        env.update(zip(old.invars, arrays, strict=True))
        steps(env)
        return [read(env, atom) for atom in old.outvars]

    return trace(run, avals, jaxpr)


def run_equations(eqns: Sequence[Equation], env: dict[Atom, Any]) -> None:
    """Runs equations, and adds their results to what is known by variable."""
    for eqn in eqns:
        with context_of(eqn):
            results = bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: dict[Atom, Any], atom: Atom) -> Any:
    """Returns what an atom is, given what is known by variable."""
    return as_array(atom.val) if is_literal(atom) else env[atom]


def zeros(aval: Aval, length: int) -> Any:
    """Returns zeros of a type with one more axis in front."""
    array = jnp.zeros((length, *aval.shape), aval.dtype)
    return as_varying(array, aval.manual_axis_type.varying)


def as_varying(array: Any, axes: Iterable[str]) -> Any:
    """Returns an array whose type says that it may differ over some mapped axes.

    Only ``shard_map`` has them in its types: anywhere else it is the array itself.
    """
    aval = jax.typeof(array)
    inside = aval.sharding.mesh.manual_axes
    missing = {*axes}.intersection(inside) - aval.manual_axis_type.varying
    if not missing:
        return array
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying")


def varying_axes(atoms: Iterable[Atom]) -> frozenset[str]:
    """Returns the mapped axes over which some of the atoms may differ."""
    return frozenset().union(*(a.aval.manual_axis_type.varying for a in atoms))


def as_typed(value: Any, aval: Aval) -> Any:
    """Returns a value as an array of a type, which may be a weak one."""
    value = value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)
    if getattr(aval, "weak_type", False) and not value.weak_type:
        return lax._convert_element_type(value, aval.dtype, weak_type=True)  # pyright: ignore[reportPrivateUsage]
    return value


def as_array(value: Any) -> Any:
    """Returns a literal's or a constant's value as something that has a dtype."""
    return value if hasattr(value, "dtype") else jnp.asarray(value)
