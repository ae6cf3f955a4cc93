"""Reads and makes jaxprs, and the types of their variables.

If versions of JAX differ, the code checks for a feature, never for a version number.
"""

import functools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src.interpreters import partial_eval
from jax._src.lax import lax
from jax.extend import core, linear_util
from jax.typing import DTypeLike

from jmp_lite.casting.types import Leaf
from jmp_lite.jaxprs.types import (
    Array,
    Aval,
    Dtype,
    Eqn,
    Function,
    Jaxpr,
    Literal,
    Var,
)


class Parts(NamedTuple):
    """The parts of a jaxpr of any class, with its constants."""

    constvars: Sequence[Var]
    consts: Sequence[Array]
    invars: Sequence[Var]
    eqns: Sequence[Eqn]
    outvars: Sequence[Var]


def parts(jaxpr: Jaxpr) -> Parts:
    """Returns the parts of a closed or open jaxpr; an open one has no constants."""
    # 0.10 has two classes, and the closed one contains the other; 0.12 has one.
    inner = open_jaxpr(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return Parts(inner.constvars, consts, inner.invars, inner.eqns, inner.outvars)


def trace(fun: Function, avals: Sequence[Aval], like: Jaxpr) -> Jaxpr:
    """Traces a function of arrays to a closed jaxpr.

    Args:
      fun: a function that takes one tracer for each aval and returns a list of arrays.
      avals: the types of its arguments.
      like: the jaxpr that the new one replaces; the new one takes its name.
    """
    # ``jax.enable_checks`` compares the names with the arguments, which may be others
    # here.
    debug_info = open_jaxpr(like).debug_info.with_unknown_names()
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    # Unlike ``jax.make_jaxpr`` it takes any types, those of tokens and of hijax too,
    # and its tracers are checked for leaks.
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    # In 0.12 constants are the first inputs; 0.10 stores them separately.
    return closed(jaxpr, consts)


def closed(jaxpr: Any, consts: Sequence[Array]) -> Jaxpr:
    """Returns a jaxpr with its constants."""
    # Since 0.12, which has one class.
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(consts)
    return core.ClosedJaxpr(open_jaxpr(jaxpr), list(consts))


def with_consts_as_inputs(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns a closed jaxpr with its constants as first inputs, and the constants."""
    consts = parts(jaxpr).consts
    n_consts = len(consts)
    if not consts:
        return jaxpr, consts
    avals = list(map(type_of, (*parts(jaxpr).constvars, *parts(jaxpr).invars)))

    def run(*arrays: Array) -> list[Array]:
        return evaluate(closed(jaxpr, arrays[:n_consts]), arrays[n_consts:])

    return trace(run, avals, jaxpr), consts


def evaluate(jaxpr: Jaxpr, arrays: Sequence[Array]) -> list[Array]:
    """Runs a closed jaxpr."""
    run: Any = core.jaxpr_as_fun
    return run(jaxpr)(*arrays)


def effects_of(jaxpr: Jaxpr) -> AbstractSet[core.Effect]:
    """Returns the side effects of the equations of a jaxpr."""
    return open_jaxpr(jaxpr).effects


def open_jaxpr(jaxpr: Jaxpr) -> Any:
    """Returns JAX's open jaxpr of a closed or open one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(atom: Var) -> TypeGuard[Literal]:
    """Whether an atom is a number in the jaxpr."""
    kinds: Any = core.Literal
    return isinstance(atom, kinds)


def dtype_of(atom: Var) -> Any:
    """Returns the traced dtype of an atom; None if it has no dtype."""
    return getattr(atom.aval, "dtype", None)


def type_of(var: Var) -> Aval:
    """Returns the type of an input of a jaxpr, for a new trace."""
    # The type of a mutable object (hijax, 0.10) is that of its content, too.
    content = getattr(var, "initial_qdd", None)
    of_content: Any = jax_core
    return var.aval if content is None else of_content.AvalQDD(var.aval, content)


def type_of_value(value: Array) -> Aval:
    """Returns the type of a value, for a new trace; see ``type_of``."""
    if is_symbolic_zero(value):
        return value.aval
    aval = jax.typeof(value)
    of_content: Any = jax_core
    has_content = getattr(aval, "has_qdd", False)
    return of_content.cur_aval_qdd(value) if has_content else aval


def is_of_numbers(aval: Aval) -> bool:
    """Whether a type is that of an array of numbers, not of keys, a Ref or a token."""
    is_array = isinstance(aval, jax.core.ShapedArray)
    return is_array and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def shape_of(value: object) -> tuple[int, ...]:
    """Returns the shape of an array; an empty one for any other value."""
    return getattr(value, "shape", ())


def is_float32(atom: Var) -> bool:
    """Whether an atom was traced as a float32 array. A Ref is not an array."""
    aval = atom.aval
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype == np.float32


def is_float(atom: Var) -> bool:
    """Whether an atom was traced as a floating-point array. A Ref is not an array."""
    aval = atom.aval
    return isinstance(aval, jax.core.ShapedArray) and _is_kind(aval.dtype, jnp.inexact)


def is_wide_float(atom: Var) -> bool:
    """Whether an atom is an array of complex numbers or of 64-bit floats."""
    return is_float(atom) and dtype_of(atom).itemsize > 4


def is_integer(atom: Var) -> bool:
    """Whether an atom was traced as an array of integers."""
    dtype = dtype_of(atom)
    return dtype is not None and _is_kind(dtype, jnp.integer)


@functools.cache
def _is_kind(dtype: Dtype, kind: type[np.generic]) -> bool:
    """Whether a dtype is of a kind; there are few dtypes, and JAX takes long."""
    return jnp.issubdtype(dtype, kind)


def name_of(jaxpr: Jaxpr) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return open_jaxpr(jaxpr).debug_info.func_name


def is_tracer(array: Array) -> bool:
    """Whether the numbers of an array are unknown."""
    return isinstance(array, jax.core.Tracer)


def is_zero(item: object) -> bool:
    """Whether an item is a zero that is not an array."""
    # By name: the first is for users' rules, and the other is JAX's own.
    return type(item).__name__ in ("SymbolicZero", "Zero")


def is_symbolic_zero(item: object) -> bool:
    """Whether an item is a zero that JAX may pass to a user's rule."""
    return type(item).__name__ == "SymbolicZero"


def live_equations(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of a jaxpr whose results are read, in order."""
    of = parts(jaxpr)
    read = {atom for atom in of.outvars if not is_literal(atom)}
    found: list[Eqn] = []
    for eqn in reversed(of.eqns):
        # A check of ``checkify`` has no result that anything reads.
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(atom for atom in eqn.invars if not is_literal(atom))
    return found[::-1]


def retyped(aval: Aval, dtype: DTypeLike) -> Aval:
    """Returns a type with another dtype."""
    if getattr(aval, "dtype", None) == dtype:
        return aval
    # As ``astype`` does: it makes a strong type of a weak one.
    return aval.update(dtype=np.dtype(dtype), weak_type=False)


def flag_type(aval: Aval) -> Any:
    """Returns the type of a boolean that varies over the same axes as an array."""
    dtype = np.dtype(bool)
    if not isinstance(aval, jax.core.ShapedArray):  # A reference.
        return jax.core.ShapedArray((), dtype)
    sharding = aval.sharding.update(spec=jax.P())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def as_typed(value: Leaf, aval: Aval) -> Leaf:
    """Returns a value as an array of a type, which may be weak.

    A value of another kind, such as a token, is returned unchanged.
    """
    if not is_of_numbers(aval):
        return value
    if is_tracer(value):  # A tracer of ``jvp`` may hold a Python number.
        value = jnp.asarray(value)
    elif not isinstance(value, jax.Array):
        value = jnp.asarray(value, aval.dtype)
    if getattr(aval, "weak_type", False) and not value.weak_type:
        # No public function of JAX casts to a weak type (0.10, 0.12).
        return lax._convert_element_type(value, aval.dtype, weak_type=True)  # pyright: ignore[reportPrivateUsage]
    return value


def as_array(value: Leaf) -> Leaf:
    """Returns the value of a literal or a constant as an object with a dtype."""
    # A literal may be a Python number, whose dtype depends on x64.
    return value if hasattr(value, "dtype") else jnp.asarray(value)
