"""Everything this library uses of JAX that JAX does not promise (0.10.2 and 0.12).

The rest of the library reads jaxprs and parameters of equations only through these
names. If versions differ, the code checks for a feature, never for a version number.
"""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src import core as jax_core
from jax._src.ad_util import Zero
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax import lax
from jax._src.source_info_util import user_frames
from jax._src.util import weakref_lru_cache
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, linear_util, source_info_util

from jmp_lite.autocasting.jaxprs.types import (
    Array,
    Aval,
    Eqn,
    Function,
    Jaxpr,
    Literal,
    PyTree,
    Var,
)
from jmp_lite.autocasting.rules.op_table import PRODUCTS

Item = TypeVar("Item")


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
    inner = _open(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return Parts(inner.constvars, consts, inner.invars, inner.eqns, inner.outvars)


def trace(fun: Function, avals: Sequence[Aval], like: Jaxpr) -> Jaxpr:
    """Traces a function of arrays to a closed jaxpr.

    Args:
      fun: a function that takes one tracer for each aval and returns a list of arrays.
      avals: the types of its arguments.
      like: the jaxpr that the new one replaces; the new one takes its name.
    """
    debug_info = _open(like).debug_info.with_unknown_names()
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    # In 0.12 constants are the first inputs; 0.10 stores them separately.
    return _closed(jaxpr, consts)


def _closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(consts)
    return core.ClosedJaxpr(_open(jaxpr), list(consts))


def with_consts_as_inputs(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a closed jaxpr with its constants as first inputs, and the constants."""
    consts = parts(jaxpr).consts
    n_consts = len(consts)
    avals = list(map(type_of, (*parts(jaxpr).constvars, *parts(jaxpr).invars)))

    def run(*arrays: Array) -> list[Array]:
        closed = _closed(jaxpr, arrays[:n_consts])
        return evaluate(closed, arrays[n_consts:])

    return trace(run, avals, jaxpr), consts


def evaluate(jaxpr: Jaxpr, arrays: Sequence[Array]) -> list[Array]:
    """Runs a closed jaxpr."""
    run: Any = core.jaxpr_as_fun
    return run(jaxpr)(*arrays)


def has_effects(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a closed jaxpr has side effects."""
    return bool(_open(jaxpr).effects)


def _open(jaxpr: Jaxpr) -> Any:
    """Returns JAX's open jaxpr of a closed or open one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def without_consts(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the open jaxpr of a closed one without constants."""
    consts = parts(jaxpr).consts
    assert not consts, "a rematerialized function may not gain constants"
    return _open(jaxpr)


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


def type_of_value(value: Any) -> Aval:
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
    """Returns the shape of an array; of anything that is no array, an empty one."""
    return getattr(value, "shape", ())


def is_float32(atom: Var) -> bool:
    """Whether an atom was traced as a float32 array. A Ref is not an array."""
    return isinstance(atom.aval, jax.core.ShapedArray) and dtype_of(atom) == np.float32


def is_float(atom: Var) -> bool:
    """Whether an atom was traced as a floating-point array. A Ref is not an array."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(dtype_of(atom), jnp.inexact)


def is_wide_float(atom: Var) -> bool:
    """Whether an atom is an array of complex numbers or of 64-bit floats."""
    return is_float(atom) and dtype_of(atom).itemsize > 4


def is_integer(atom: Var) -> bool:
    """Whether an atom was traced as an array of integers."""
    dtype = dtype_of(atom)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def name_of(jaxpr: Jaxpr) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return _open(jaxpr).debug_info.func_name


def is_tracer(array: Array) -> bool:
    """Whether the numbers of an array are unknown."""
    return isinstance(array, jax.core.Tracer)


def is_zero(item: object) -> bool:
    """Whether an item is a zero that is not an array."""
    return type(item).__name__ in ("SymbolicZero", "Zero")


def is_symbolic_zero(item: object) -> bool:
    """Whether an item is a zero that JAX may pass to a user's rule."""
    return type(item).__name__ == "SymbolicZero"


def op_of(eqn: Eqn) -> str:
    """Returns the name of an equation's op, also under JAX's newest flags."""
    name = eqn.primitive.name
    return _HIGH_OPS.get(_high_name(eqn), name) if name == _HIGH else name


# Under the flags jax_remat3, jax_custom_vjp3 and jax_custom_jvp3.
_HIGH = "call_hi_primitive"

_HIGH_OPS = {
    "RematTraced": "checkpoint",
    "CustomVJPTraced": "custom_vjp_call",
    "CustomJVPTraced": "custom_jvp_call",
    "CheckpointName": "name",
}


def _high_name(eqn: Eqn) -> str:
    primitive = _unbatched(eqn.params["_prim"])
    more = ("with_logs", "remat_rules", "bwd_accums")  # Rules of other kinds.
    has_more = any(primitive.params.get(name) for name in more)
    return "" if has_more else type(primitive).__name__


def _unbatched(primitive: Any) -> Any:
    while type(primitive).__name__ == "VmapOf":  # 0.10
        primitive = primitive.prim
    return primitive


def checkpoint_name_of(eqn: Eqn) -> str:
    """Returns the ``checkpoint_name`` that an equation gives to a value, or None."""
    if op_of(eqn) != "name":
        return ""
    params = eqn.params
    return _unbatched(params["_prim"]).name if "_prim" in params else params["name"]


def inner_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters."""
    if eqn.primitive.name == _HIGH:
        jaxpr = called(eqn)
        yield from () if jaxpr is None else (jaxpr,)
        return
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


REMAT = ("checkpoint", "remat", "remat2")

CALLS = ("jit", *REMAT)
"""Ops that users write and that only call their jaxpr."""

WRAPPERS = {
    **dict.fromkeys(("compute_on", "xla_metadata_call"), "jaxpr"),
    **dict.fromkeys(("closed_call", "eval_jaxpr"), "call_jaxpr"),
}
"""Other ops that only call a jaxpr, with the parameter that contains it."""

MERE_CALLS = ("jit", "closed_call", "eval_jaxpr")
"""Ops whose jaxpr may run in their place."""

CALLED = {
    **dict.fromkeys(CALLS, "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
    **WRAPPERS,
}
"""All ops that only call a jaxpr, with the parameter that contains it."""


def called(eqn: Eqn) -> Jaxpr | None:
    """Returns the jaxpr that an equation only calls, or None."""
    op = op_of(eqn)
    if op not in CALLED:
        return None
    if eqn.primitive.name != _HIGH:
        return eqn.params[CALLED[op]]
    primitive = eqn.params["_prim"]
    if "jaxpr" in primitive.params:
        return primitive.params["jaxpr"]
    if "traced" in primitive.params:
        return primitive.params["traced"].jaxpr
    batchings, avals = tuple(_batchings(primitive)), tuple(primitive.in_avals_flat)
    return _called_batched(_unbatched(primitive), batchings, avals)


class _Batching(NamedTuple):
    """A ``vmap`` of a primitive. Trees are stored as leaves and a structure.

    Attributes:
      options: its keyword arguments.
      in_dims: the batched axes of the operands.
      out_dim: the batched axes of the results.
    """

    options: tuple[tuple[str, Any], ...]
    in_dims: Any
    out_dim: Any


def _batchings(primitive: Any) -> Iterator[_Batching]:
    """Yields the ``vmap`` calls of a primitive, the outermost first (0.10)."""
    while primitive is not _unbatched(primitive):
        trees = (primitive.in_dims, primitive.out_dim)
        flat = [(tuple(leaves), tree) for leaves, tree in map(jax.tree.flatten, trees)]
        yield _Batching(tuple(primitive._vmap_params.items()), *flat)
        primitive = primitive.prim


@weakref_lru_cache
def _called_batched(
    primitive: Any, batchings: Sequence[_Batching], avals: Sequence[Aval]
) -> Jaxpr:
    """Returns the jaxpr of a primitive under ``vmap``.

    The arguments can be hashed; JAX's own primitive cannot if its axes are in a list.
    """
    fun = primitive.expand
    for options, *dims in reversed(batchings):
        in_dims, out_dim = (tree.unflatten(leaves) for leaves, tree in dims)
        fun = jax.vmap(fun, in_axes=in_dims, out_axes=out_dim, **dict(options))

    def of_arrays(*arrays: Array) -> list[Array]:
        results = fun(*primitive.in_tree.unflatten(arrays))
        return primitive.out_tree.flatten_up_to(results)

    return trace(of_arrays, avals, primitive.traced.jaxpr)


def is_call(eqn: Eqn) -> bool:
    """Whether an equation only calls a jaxpr, without a rule of its own."""
    return op_of(eqn) in (*CALLS, *WRAPPERS)


def trips(eqn: Eqn) -> int | None:
    """Returns how often the jaxpr of an equation runs; None if unknown."""
    if op_of(eqn) == "while":
        return None
    return eqn.params["length"] if op_of(eqn) == "scan" else 1


def live_equations(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of a jaxpr whose results are read, in order."""
    of = parts(jaxpr)
    read = {atom for atom in of.outvars if not is_literal(atom)}
    found: list[Eqn] = []
    for eqn in reversed(of.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(atom for atom in eqn.invars if not is_literal(atom))
    return found[::-1]


def retyped(aval: Aval, dtype: Any) -> Aval:
    """Returns a type with another dtype."""
    if getattr(aval, "dtype", None) == dtype:
        return aval
    # NumPy does not know the dtype of keys.
    made = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    return aval.update(dtype=made, weak_type=False)


def flag_beside(aval: Aval) -> Any:
    """Returns the type of a boolean that varies over the same axes as an array."""
    dtype = np.dtype(bool)
    if not isinstance(aval, jax.core.ShapedArray):  # A reference.
        return jax.core.ShapedArray((), dtype)
    sharding = aval.sharding.update(spec=jax.P())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def scopes(eqn: Eqn) -> tuple[str, ...]:
    """Returns the names of the scopes of an equation, the outermost first."""
    stack = eqn.source_info.name_stack.stack
    return tuple(item.name for item in stack if isinstance(item, _Scope))


def is_transposed(eqn: Eqn) -> bool:
    """Returns whether an equation belongs to a backward pass."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(item, "name", "") == "transpose" for item in stack)


def source(eqn: Eqn, caller: str = "") -> str:
    """Returns the line of an equation in the user's code: file, line, (function).

    Args:
      eqn: the equation.
      caller: the source of the equation that contains it, if there is one. A function
        that a package has wrapped in ``jit``, as most of ``jax.numpy`` is, does not
        know its caller.

    Returns:
      The innermost line of the user's code, else the caller's line, else a line of an
      installed package; an empty string if there is no line.
    """
    own, of_a_package = _sources(eqn.source_info.traceback)
    return own or caller or of_a_package


@functools.lru_cache(maxsize=4096)
def _sources(traceback: Any) -> tuple[str, str]:
    """Returns the innermost line of the user's code, and that of installed packages."""
    of_a_package = ""
    for frame in user_frames(traceback):
        if frame.file_name.startswith(_THIS_LIBRARY):
            continue
        place = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if not _PACKAGES.search(frame.file_name):
            return place, of_a_package
        of_a_package = of_a_package or place
    return "", of_a_package


_THIS_LIBRARY = os.path.join(pathlib.Path(__file__).parents[2], "")

_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

_Scope = type(source_info_util.new_name_stack("a").stack[0])


def join(*names: str) -> str:
    """Joins names that are not empty to a path."""
    return "/".join(filter(None, names))


def path_of(eqn: Eqn, path: str) -> str:
    """Returns the path of an equation in a jaxpr at a path.

    For a call with a name, it is the path of the equations inside.
    """
    return join(path, *scopes(eqn), call_name(eqn))


@contextlib.contextmanager
def context_of(eqn: Eqn) -> Generator[None]:
    """Gives the ops of a block the source line, scopes and settings of an equation."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with (
        source_info_util.user_context(traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


def bind(
    eqn: Eqn,
    operands: Sequence[Any],
    bound: set[object] | None = None,
    /,
    **changed: Any,
) -> list[Array]:
    """Binds an equation's primitive to other operands.

    Args:
      eqn: the equation.
      operands: the operands.
      bound: the ops that were bound before; this op is added. JAX differentiates a
        repeated op once.
      changed: parameters that replace the equation's.
    """
    if eqn.primitive.name == _HIGH and op_of(eqn) == "name":
        name = _unbatched(eqn.params["_prim"])
        return [type(name)(name.name, jax.typeof(operands[0]))(*operands)]
    params = {**eqn.params, **changed}
    run = functools.partial(_bind, eqn.primitive, tuple(params.items()))
    # An op that contains a jaxpr is not stored: it may capture arrays and tracers.
    is_plain = not eqn.effects and next(inner_jaxprs(eqn), None) is None
    if bound is not None and is_plain and any(map(_is_being_linearized, operands)):
        with contextlib.suppress(TypeError):  # Its parameters cannot be hashed.
            op = (eqn.primitive, tuple(params.items()))
            key = (*op, *map(_type_of, operands))
            if key in bound:
                run = _one_op(*op)
            bound.add(key)
    out = run(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind(primitive: Any, params: tuple[tuple[str, Any], ...], *operands: Any) -> Any:
    return primitive.bind(*operands, **primitive.get_bind_params(dict(params)))


@functools.lru_cache(maxsize=4096)
def _one_op(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Any:
    """Returns an op as a ``jit`` function that leaves no trace of itself.

    For ``grad``, JAX analyses a jit function once, which takes longer than for an op,
    and an op at every use. So a model of equal layers is traced in less time. (The
    functions of ``jax.numpy`` are wrapped for the same reason.)
    """
    function = functools.partial(_bind, primitive, params)
    return jax.jit(function, inline=getattr(jax, "Inline", _Inline).JAX_EARLY)


def _type_of(array: Any) -> object:
    return shape_of(array), getattr(array, "dtype", type(array))


class _Inline:
    JAX_EARLY = True  # Before 0.12.


def _is_being_linearized(operand: Any) -> bool:
    """Whether an operand is differentiated in reverse while another trace is active."""
    if type(operand).__name__ != "LinearizeTracer":
        return False
    return is_tracer(operand.primal)


def bind_remat(
    eqn: Eqn, operands: Sequence[Any], jaxpr: Jaxpr, saved: str = ""
) -> list[Array]:
    """Binds a rematerialized function to other operands, with another closed jaxpr.

    Args:
      eqn: the equation.
      operands: the operands.
      jaxpr: the jaxpr to run.
      saved: the ``checkpoint_name`` of values that are saved in addition to its policy.
    """
    if eqn.primitive.name == _HIGH:
        # Forward mode does not support policies that save by name (jax 0.12).
        high = eqn.params["_prim"]
        return list(type(high)(**{**high.params, "jaxpr": jaxpr})(*operands))
    changed: dict[str, Any] = {}
    if saved:
        changed["policy"] = _saving(saved, eqn.params["policy"])
    return bind(eqn, operands, jaxpr=without_consts(jaxpr), **changed)


def _saving(name: str, policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns a checkpoint policy that also saves the values of a name.

    JAX combines policies only if both answer yes or no; one that offloads does not.
    """
    policies = jax.checkpoint_policies
    is_named, others = policies.save_only_these_names(name), policy

    def either(*args: Any, **params: Any) -> Any:
        if is_named(*args, **params):
            return True
        return False if others is None else others(*args, **params)

    return either


def bind_custom(eqn: Eqn, operands: Sequence[Any], replace: Function) -> list[Array]:
    """Binds a function with a custom derivative rule, with its functions replaced.

    Args:
      eqn: a ``custom_jvp_call`` or a ``custom_vjp_call``.
      operands: the operands.
      replace: takes ``(fun, jvp)`` or ``(fun, fwd, bwd)`` as plain functions and
        returns as many.
    """
    if eqn.primitive.name == _HIGH:
        is_jvp = op_of(eqn) == "custom_jvp_call"
        build = _high_custom_jvp if is_jvp else _high_custom_vjp
        return list(build(eqn.params["_prim"], replace)(*operands))
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    wrapped = params["subfuns"]
    # On 0.12 a backward function may be an object that is not a function: it stays.
    plain = replace(*(getattr(fun, "call_wrapped", fun) for fun in wrapped))
    params["subfuns"] = tuple(
        linear_util.wrap_init(new, debug_info=old.debug_info)
        if hasattr(old, "call_wrapped")
        else old
        for new, old in zip(plain, wrapped, strict=True)
    )
    return list(eqn.primitive.bind(*operands, **params))


def _high_fun(primitive: Any) -> Callable[..., list[Array]]:
    return lambda *arrays: primitive.out_tree.flatten_up_to(
        primitive.expand(*primitive.in_tree.unflatten(arrays))
    )


def _high_custom_jvp(primitive: Any, replace: Function) -> Any:
    """Returns a function of flat arrays with a ``custom_jvp`` like a primitive's."""
    inputs, outputs = primitive.in_tree, primitive.out_tree

    def jvp(*arrays: Array) -> list[Array]:
        n = len(arrays) // 2
        tangents = map(_internal_zero, arrays[n:])
        pair = primitive.jvp_rule(
            inputs.unflatten(arrays[:n]), inputs.unflatten(tangents)
        )
        return [x for tree in pair for x in outputs.flatten_up_to(tree)]

    new_fun, new_jvp = replace(_high_fun(primitive), jvp)

    def rule(primals: Any, tangents: Any) -> Any:
        out = [
            SymbolicZero(x.aval) if isinstance(x, Zero) else x
            for x in new_jvp(*primals, *tangents)
        ]
        return out[: len(out) // 2], out[len(out) // 2 :]

    function = jax.custom_jvp(lambda *arrays: new_fun(*arrays))
    function.defjvp(rule, symbolic_zeros=primitive.symbolic_zeros)
    return function


def _high_custom_vjp(primitive: Any, replace: Function) -> Any:
    """Returns a function of flat arrays with a ``custom_vjp`` like a primitive's."""
    inputs, outputs = primitive.in_tree, primitive.out_tree
    has_zeros = _unbatched(primitive).symbolic_zeros
    # On 0.12 the first input holds the captured arrays. JAX refuses to differentiate
    # with respect to it, so the differentiated inputs have to be known.
    is_closed = hasattr(primitive, "drop_fwd_consts")
    closes_over = is_closed and bool(jax.tree.leaves(primitive.in_avals[0]))
    structure: list[Any] = []

    def fwd(*pairs: Any) -> list[Array]:
        arrays, perturbed = pairs[::2], pairs[1::2]
        out, residuals, *_ = primitive.vjp_fwd(
            inputs.unflatten(perturbed), *inputs.unflatten(arrays)
        )
        leaves, tree = jax.tree.flatten(residuals)
        structure[:] = [tree]
        return [*leaves, *outputs.flatten_up_to(out)]

    def bwd(*arrays: Array) -> list[Array]:
        n = structure[0].num_leaves
        residuals = structure[0].unflatten(arrays[:n])
        zero = _internal_zero if has_zeros else _instantiated
        cotangents = outputs.unflatten(map(zero, arrays[n:]))
        if is_closed:
            grads, _ = primitive.bwd(residuals, cotangents)
            consts = jax.tree.map(
                lambda aval: Zero(aval.to_ct_aval()), primitive.in_avals[:2]
            )
            grads = (*consts, *grads)
        else:
            grads = primitive.vjp_bwd_retval(residuals, cotangents)
        return inputs.flatten_up_to(grads)

    new_fun, new_fwd, new_bwd = replace(_high_fun(primitive), fwd, bwd)

    def rule_fwd(*primals: Any) -> Any:
        pairs = [
            (x.value, x.perturbed) if hasattr(x, "perturbed") else (x, True)
            for x in primals
        ]
        out = new_fwd(*(item for pair in pairs for item in pair))
        n = len(out) - outputs.num_leaves
        return out[n:], out[:n]

    def rule_bwd(residuals: Any, cotangents: PyTree) -> Any:
        grads = new_bwd(*residuals, *cotangents)
        return tuple(None if isinstance(g, Zero) else g for g in grads)

    function = jax.custom_vjp(lambda *arrays: new_fun(*arrays))
    takes_zeros = has_zeros or closes_over
    function.defvjp(
        rule_fwd,
        rule_bwd,
        symbolic_zeros=takes_zeros,
        # JAX does not allow both.
        optimize_remat=_unbatched(primitive).opt_remat and not takes_zeros,
    )
    return function


def bind_custom_vmap(
    eqn: Eqn, operands: Sequence[Any], jaxpr: Jaxpr, replace: Function
) -> list[Array]:
    """Binds a function with a rule for ``vmap``, with the rule replaced.

    Args:
      eqn: a ``custom_vmap_call``.
      operands: the operands.
      jaxpr: the jaxpr that it calls, closed.
      replace: takes the rule as a function of batched arrays, and these arrays; returns
        a list of batched results.
    """
    inputs, outputs = eqn.params["in_tree"], eqn.params["out_tree"]

    def rule(axis_size: int, is_batched: Any, *arrays: Array) -> Any:
        batched: list[Any] = []

        def of_arrays(*arrays: Array) -> list[Array]:
            out, is_out_batched = eqn.params["rule"](
                axis_size, inputs.unflatten(is_batched), *inputs.unflatten(arrays)
            )
            batched[:] = outputs.flatten_up_to(is_out_batched)
            return outputs.flatten_up_to(out)

        return replace(of_arrays, *arrays), batched

    function = jax.custom_batching.custom_vmap(lambda *arrays: evaluate(jaxpr, arrays))
    function.def_vmap(rule)
    return list(function(*operands))


def _instantiated(array: Array) -> Any:
    if is_symbolic_zero(array):
        return jnp.zeros(array.aval.shape, array.aval.dtype)
    return array


def _internal_zero(array: Array) -> Any:
    """Returns a user's symbolic zero as JAX's own, which ``vmap`` accepts."""
    return Zero(array.aval) if is_symbolic_zero(array) else array


def forwarded_residuals(eqn: Eqn, n_residuals: int) -> Sequence[int | None]:
    """Returns, for each residual of a ``custom_vjp_call``, the operand that it is.

    JAX knows this once the forward function has run.

    Args:
      eqn: the equation.
      n_residuals: the number of residuals that it returned itself.
    """
    if eqn.primitive.name == _HIGH:
        return [None] * n_residuals
    _, _, forwards = eqn.params["out_trees"]()
    return forwards


def body_of(eqn: Eqn) -> Jaxpr:
    """Returns the jaxpr of a scan, of a shard_map, or of a call."""
    inner = called(eqn)
    return eqn.params["jaxpr"] if inner is None else inner


def branches_of(eqn: Eqn) -> Sequence[Jaxpr]:
    """Returns the branches of a cond."""
    return eqn.params["branches"]


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def scan_options(eqn: Eqn) -> dict[str, Any]:
    """Returns the length, the direction and the unrolling of a scan."""
    return params_named(eqn, ("length", "reverse", "unroll"))


class While(NamedTuple):
    """The two jaxprs of a while, and their numbers of constants."""

    cond: Jaxpr
    body: Jaxpr
    n_cond: int
    n_body: int


def while_parts(eqn: Eqn) -> While:
    """Returns the parts of a while."""
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    return While(*params_named(eqn, names).values())


class ProductParams(NamedTuple):
    """The requests of a matrix product.

    Attributes:
      precision: its precision or its algorithm; None if it requests none.
      result_dtype: the dtype of its result; None for the dtype of its operands.
    """

    precision: Any
    result_dtype: Any


def product_params(eqn: Eqn) -> ProductParams | None:
    """Returns the requests of a matrix product; None for any other op."""
    if op_of(eqn) not in PRODUCTS:
        return None
    params = eqn.params
    dtype = params.get("preferred_element_type")
    return ProductParams(params.get("precision"), dtype)


def contracts_nothing(eqn: Eqn) -> bool:
    """Whether a matrix product contracts no axis, so that it is a multiplication."""
    if op_of(eqn) != "dot_general":
        return False
    (contracted, _), _ = dot_dimensions(eqn)
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def dot_dimensions(eqn: Eqn) -> Any:
    """Returns the contracted and the batch axes of both operands of a dot_general."""
    return eqn.params["dimension_numbers"]


def exponent_of(eqn: Eqn) -> int:
    """Returns the exponent of an ``integer_pow``."""
    return eqn.params["y"]


def passed(eqn: Eqn, items: Sequence[Item]) -> list[Item]:
    """Returns the items of those operands that an ``optimization_barrier`` returns.

    Args:
      eqn: the equation.
      items: an item for each operand.
    """
    if len(eqn.outvars) == len(items):
        return list(items)
    # A reference is an operand, and no result (0.12).
    pairs = zip(items, eqn.invars, strict=True)
    return [item for item, atom in pairs if type(atom.aval).__name__ != "AbstractRef"]


def params_named(eqn: Eqn, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of the named parameters that an equation has."""
    return {name: eqn.params[name] for name in names if name in eqn.params}


def call_name(eqn: Eqn) -> str:
    """Returns the name of the jit-compiled function in an equation, or nothing."""
    return eqn.params["name"] if op_of(eqn) == "jit" else ""


def is_custom_root(eqn: Eqn) -> bool:
    """Whether a custom_jvp is JAX's own for a root."""
    return "_custom_root" in name_of(body_of(eqn))


def shard_map_arguments(eqn: Eqn) -> dict[str, Any]:
    """Returns the arguments of ``jax.shard_map`` that make an equation again."""
    params = eqn.params
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "out_specs": list(params["out_specs"]),
        "axis_names": set(params["newly_manual_axes"]),
        "check_vma": params["check_vma"],
    }


def primitive(name: str, fun: Callable[..., Any]) -> Any:
    """Returns a primitive whose result has the type of its last operand.

    Unlike a ``custom_jvp``, whose rule JAX may drop if a loop is differentiated twice,
    it keeps its derivative: see ``pass_last_tangent`` and ``set_transpose``.

    Args:
      name: the name of the primitive.
      fun: computes its result. Under ``vmap`` all operands have the same number of
        additional leading axes.
    """
    made = core.Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals: avals[-1])
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))

    def batch(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
        size = next(
            operand.shape[axis]
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        )
        in_front = (
            batching.bdim_at_front(operand, axis, size)
            for operand, axis in zip(operands, axes, strict=True)
        )
        return made.bind(*in_front), 0

    batching.primitive_batchers[made] = batch
    return made


def pass_last_tangent(made: Any) -> None:
    """Sets the derivative of a primitive: its tangent is that of its last operand."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        return made.bind(*primals), tangents[-1]

    ad.primitive_jvps[made] = rule


def set_transpose(made: Any, transpose: Callable[[Any], Any]) -> None:
    """Makes a primitive linear, with a function of its cotangent as its transpose."""
    ad.deflinear2(made, lambda cotangent, _: [transpose(cotangent)])


def ambient_precision() -> Any:
    """Returns the precision or algorithm of a product that requests none."""
    name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    algorithms = jax.lax.DotAlgorithmPreset.__members__
    if name in algorithms:
        return algorithms[name]
    return None if name is None else jax.lax.Precision(name)


def has_only_axis_effects(eqn: Eqn) -> bool:
    """Whether an equation has no side effects except communication over named axes."""
    inside = called(eqn) if eqn.primitive.name == _HIGH else None
    effects = eqn.effects | (set() if inside is None else _open(inside).effects)
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in effects)


def retraced(
    jaxpr: Jaxpr, avals: Sequence[Aval], steps: Callable[[dict[Var, Any]], None]
) -> Jaxpr:
    """Returns a closed jaxpr, traced again with its equations run in another way.

    Args:
      jaxpr: the jaxpr.
      avals: the types of its inputs, which may be new ones.
      steps: takes the inputs by variable, and adds the results.
    """
    old = parts(jaxpr)

    def run(*arrays: Array) -> list[Array]:
        env = dict(zip(old.constvars, old.consts, strict=True))
        env.update(zip(old.invars, arrays, strict=True))
        steps(env)
        return [read(env, atom) for atom in old.outvars]

    return trace(run, avals, jaxpr)


def run_equations(eqns: Sequence[Eqn], env: dict[Var, Array]) -> None:
    """Runs equations, and adds their results by variable."""
    for eqn in eqns:
        with context_of(eqn):
            results = bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: dict[Var, Array], atom: Var) -> Any:
    """Returns the value of an atom, given values by variable."""
    return as_array(atom.val) if is_literal(atom) else env[atom]


def as_typed(value: Any, aval: Aval) -> Any:
    """Returns a value as an array of a type, which may be weak.

    A value of another kind, such as a token, stays what it is.
    """
    if not is_of_numbers(aval):
        return value
    if is_tracer(value):  # A tracer of ``jvp`` may hold a Python number.
        value = jnp.asarray(value)
    elif not isinstance(value, jax.Array):
        value = jnp.asarray(value, aval.dtype)
    if getattr(aval, "weak_type", False) and not value.weak_type:
        return lax._convert_element_type(value, aval.dtype, weak_type=True)  # pyright: ignore[reportPrivateUsage]
    return value


def as_array(value: Any) -> Any:
    """Returns the value of a literal or a constant as an object with a dtype."""
    return value if hasattr(value, "dtype") else jnp.asarray(value)
