"""All that this library uses of JAX and JAX does not promise, seen on 0.10.2 and 0.12.

The rest of the library reads jaxprs and parameters of equations through these names
alone. Where versions differ, a feature is asked for, never a version number.
"""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src.ad_util import Zero
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax import lax
from jax._src.source_info_util import user_frames
from jax._src.util import weakref_lru_cache
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


class Parts(NamedTuple):
    """A jaxpr, whichever class it is of, with its constants beside it."""

    constvars: Sequence[Var]
    consts: Sequence[Array]
    invars: Sequence[Var]
    eqns: Sequence[Eqn]
    outvars: Sequence[Var]


def parts(jaxpr: Jaxpr) -> Parts:
    """Takes a closed or an open jaxpr apart; an open one has no constants."""
    # 0.10 has two classes, of which the closed one holds the other; 0.12 has one.
    inner = _open(jaxpr)
    consts = getattr(jaxpr, "consts", ())
    return Parts(inner.constvars, consts, inner.invars, inner.eqns, inner.outvars)


def trace(fun: Function, avals: Sequence[Aval], like: Jaxpr) -> Jaxpr:
    """Traces a function of arrays to a closed jaxpr.

    Args:
      fun: takes one tracer per aval and returns a list of arrays.
      avals: the types of its arguments.
      like: a jaxpr that the new one stands in for, of which its name is taken.
    """
    debug_info = _open(like).debug_info.with_unknown_names()
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    # 0.12 has the constants as the first inputs; 0.10 keeps them apart.
    return _closed(jaxpr, consts)


def _closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    if hasattr(jaxpr, "with_consts"):
        return jaxpr.with_consts(consts)
    return core.ClosedJaxpr(_open(jaxpr), list(consts))


def with_consts_as_inputs(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a closed jaxpr whose constants are its first inputs, and them."""
    consts = parts(jaxpr).consts
    n_consts = len(consts)
    avals = [var.aval for var in (*parts(jaxpr).constvars, *parts(jaxpr).invars)]

    def run(*arrays: Array) -> list[Array]:
        closed = _closed(jaxpr, arrays[:n_consts])
        return evaluate(closed, arrays[n_consts:])

    return trace(run, avals, jaxpr), consts


def evaluate(jaxpr: Jaxpr, arrays: Sequence[Array]) -> list[Array]:
    """Runs a closed jaxpr."""
    run: Any = core.jaxpr_as_fun
    return run(jaxpr)(*arrays)


def has_effects(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a closed jaxpr has effects."""
    return bool(_open(jaxpr).effects)


def _open(jaxpr: Jaxpr) -> Any:
    """Returns JAX's own open jaxpr of one that is closed or open."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def without_consts(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the open jaxpr of a closed one that has no constants."""
    consts = parts(jaxpr).consts
    assert not consts, "a rematerialized function may not gain constants"
    return _open(jaxpr)


def is_literal(atom: Var) -> TypeGuard[Literal]:
    """Whether an atom is a number written into the jaxpr."""
    kinds: Any = core.Literal
    return isinstance(atom, kinds)


def dtype_of(atom: Var) -> Any:
    """Returns the dtype that an atom was traced with; None for what has none."""
    return getattr(atom.aval, "dtype", None)


def is_float32(atom: Var) -> bool:
    """Whether an atom was traced as an array of float32 (a Ref is no array)."""
    return isinstance(atom.aval, jax.core.ShapedArray) and dtype_of(atom) == np.float32


def is_float(atom: Var) -> bool:
    """Whether an atom was traced as an array of floats of any width (no Ref)."""
    is_array = isinstance(atom.aval, jax.core.ShapedArray)
    return is_array and jnp.issubdtype(dtype_of(atom), jnp.inexact)


def is_integer(atom: Var) -> bool:
    """Whether an atom was traced as an array of integers."""
    dtype = dtype_of(atom)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def name_of(jaxpr: Jaxpr) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return _open(jaxpr).debug_info.func_name


def is_tracer(array: Array) -> bool:
    """Whether the numbers of an array are not known yet."""
    return isinstance(array, jax.core.Tracer)


def is_zero(item: object) -> bool:
    """Whether an item is a zero that is no array."""
    return type(item).__name__ in ("SymbolicZero", "Zero")


def is_symbolic_zero(item: object) -> bool:
    """Whether an item is a zero that a rule of a user's may be given."""
    return type(item).__name__ == "SymbolicZero"


def op_of(eqn: Eqn) -> str:
    """Returns the name of an equation's op, under JAX's newest flags too."""
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
    """Returns what an equation names a value, if it does."""
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
"""Ops that users write, and that only call the jaxpr they hold."""

WRAPPERS = {
    **dict.fromkeys(("compute_on", "xla_metadata_call"), "jaxpr"),
    **dict.fromkeys(("closed_call", "eval_jaxpr"), "call_jaxpr"),
}
"""Other ops that only call a jaxpr, and the parameter that holds it."""

CALLED = {
    **dict.fromkeys(CALLS, "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
    **WRAPPERS,
}
"""All ops that only call a jaxpr, and the parameter that holds it."""


def called(eqn: Eqn) -> Jaxpr | None:
    """Returns the jaxpr that an equation does no more than call, or None."""
    op = op_of(eqn)
    if op not in CALLED:
        return None
    if eqn.primitive.name != _HIGH:
        return eqn.params[CALLED[op]]
    return _called_high(eqn.params["_prim"])


@weakref_lru_cache
def _called_high(primitive: Any) -> Jaxpr:
    params = primitive.params
    if "jaxpr" in params:
        return params["jaxpr"]
    if "traced" in params:
        return params["traced"].jaxpr
    like = _unbatched(primitive).traced.jaxpr
    return trace(_high_fun(primitive), primitive.in_avals_flat, like)


def is_call(eqn: Eqn) -> bool:
    """Whether an equation only calls a jaxpr, and has no rule of its own."""
    return op_of(eqn) in (*CALLS, *WRAPPERS)


def trips(eqn: Eqn) -> int | None:
    """Returns how often what an equation holds is run; None where it is not known."""
    if op_of(eqn) == "while":
        return None
    return eqn.params["length"] if op_of(eqn) == "scan" else 1


def live_equations(jaxpr: Jaxpr) -> list[Eqn]:
    """Returns the equations of a jaxpr of which anything is read, in order."""
    of = parts(jaxpr)
    read = {atom for atom in of.outvars if not is_literal(atom)}
    found: list[Eqn] = []
    for eqn in reversed(of.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(atom for atom in eqn.invars if not is_literal(atom))
    return found[::-1]


def retyped(aval: Aval, dtype: Any) -> Aval:
    """Returns a type with another dtype, or itself."""
    if getattr(aval, "dtype", None) == dtype:
        return aval
    # NumPy does not know the dtype of keys.
    made = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    return aval.update(dtype=made, weak_type=False)


def flag_beside(aval: Aval) -> Any:
    """Returns the type of a boolean that varies as an array of some type does."""
    dtype = np.dtype(bool)
    if not isinstance(aval, jax.core.ShapedArray):  # A reference.
        return jax.core.ShapedArray((), dtype)
    sharding = aval.sharding.update(spec=jax.P())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def scopes(eqn: Eqn) -> tuple[str, ...]:
    """Returns the names of the scopes that an equation stands in, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return tuple(item.name for item in stack if isinstance(item, _Scope))


def is_transposed(eqn: Eqn) -> bool:
    """Returns whether an equation belongs to the backward pass of something."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(item, "name", "") == "transpose" for item in stack)


def source(eqn: Eqn, caller: str = "") -> str:
    """Returns where an equation stands in the user's code: file, line, (function).

    Args:
      eqn: the equation.
      caller: where the equation stands that holds it, if one does. What a package has
        wrapped in ``jit``, as most of ``jax.numpy`` is, does not know its caller.

    Returns:
      The innermost line that is the user's, else that of the caller, else that of an
      installed package; an empty text if there is no line at all.
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
        place = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if not _PACKAGES.search(frame.file_name):
            return place, of_a_package
        of_a_package = of_a_package or place
    return "", of_a_package


_THIS_LIBRARY = os.path.join(pathlib.Path(__file__).parents[2], "")

_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")

_Scope = type(source_info_util.new_name_stack("a").stack[0])


def join(*names: str) -> str:
    """Returns a path of those names that there are."""
    return "/".join(filter(None, names))


def path_of(eqn: Eqn, path: str) -> str:
    """Returns the path that an equation stands in, of a jaxpr that stands in one.

    That of what is inside of it, if it is a call with a name.
    """
    return join(path, *scopes(eqn), call_name(eqn))


@contextlib.contextmanager
def context_of(eqn: Eqn) -> Generator[None]:
    """Everything bound inside stands where the equation stood, in its settings."""
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
      bound: the ops that were bound before, to which this one is added: JAX
        differentiates an op that comes again once.
      changed: parameters that are not the equation's.
    """
    if eqn.primitive.name == _HIGH and op_of(eqn) == "name":
        name = _unbatched(eqn.params["_prim"])
        return [type(name)(name.name, jax.typeof(operands[0]))(*operands)]
    params = {**eqn.params, **changed}
    run = functools.partial(_bind, eqn.primitive, tuple(params.items()))
    # An op that contains a jaxpr is not kept: it may close over arrays and tracers.
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
    """Returns an op as a function of ``jit``, which leaves no trace of it.

    JAX takes a function of jit apart for ``grad`` once, which takes longer than for an
    op, and an op again at every use: a model of equal layers is traced in less time.
    (What jax.numpy is made of is wrapped so for the same reason.)
    """
    function = functools.partial(_bind, primitive, params)
    return jax.jit(function, inline=getattr(jax, "Inline", _Inline).JAX_EARLY)


def _type_of(array: Any) -> object:
    return np.shape(array), getattr(array, "dtype", type(array))


class _Inline:
    JAX_EARLY = True  # Before 0.12.


def _is_being_linearized(operand: Any) -> bool:
    """Whether an operand is differentiated in reverse, while something else traces."""
    if type(operand).__name__ != "LinearizeTracer":
        return False
    return is_tracer(operand.primal)


def bind_remat(
    eqn: Eqn, operands: Sequence[Any], jaxpr: Jaxpr, saved: str = ""
) -> list[Array]:
    """Binds a rematerialized function to other operands, with another closed jaxpr.

    Args:
      eqn: the equation.
      operands: what to bind it to.
      jaxpr: what to run.
      saved: a ``checkpoint_name`` of what is kept besides what its policy keeps.
    """
    if eqn.primitive.name == _HIGH:
        # Forward mode does not know what its policies save by name (jax 0.12).
        high = eqn.params["_prim"]
        return list(type(high)(**{**high.params, "jaxpr": jaxpr})(*operands))
    changed: dict[str, Any] = {}
    if saved:
        policies = jax.checkpoint_policies
        changed["policy"] = policies.save_from_both_policies(
            eqn.params["policy"] or policies.nothing_saveable,
            policies.save_only_these_names(saved),
        )
    return bind(eqn, operands, jaxpr=without_consts(jaxpr), **changed)


def bind_custom(eqn: Eqn, operands: Sequence[Any], replace: Function) -> list[Array]:
    """Binds a function with a custom derivative rule, its functions replaced.

    Args:
      eqn: a ``custom_jvp_call`` or a ``custom_vjp_call``.
      operands: what to bind it to.
      replace: takes ``(fun, jvp)`` or ``(fun, fwd, bwd)`` as plain functions and
        returns as many.
    """
    if eqn.primitive.name == _HIGH:
        is_jvp = op_of(eqn) == "custom_jvp_call"
        build = _high_custom_jvp if is_jvp else _high_custom_vjp
        return list(build(eqn.params["_prim"], replace)(*operands))
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


def _high_fun(primitive: Any) -> Callable[..., list[Array]]:
    return lambda *arrays: primitive.out_tree.flatten_up_to(
        primitive.expand(*primitive.in_tree.unflatten(arrays))
    )


def _high_custom_jvp(primitive: Any, replace: Function) -> Any:
    """Returns a function with a ``custom_jvp`` like a primitive's, of flat arrays."""
    inputs, outputs = primitive.in_tree, primitive.out_tree

    def jvp(*arrays: Array) -> list[Array]:
        n = len(arrays) // 2
        pair = primitive.jvp_rule(
            inputs.unflatten(arrays[:n]), inputs.unflatten(arrays[n:])
        )
        return [x for tree in pair for x in outputs.flatten_up_to(tree)]

    new_fun, new_jvp = replace(_high_fun(primitive), jvp)

    def rule(primals: Any, tangents: Any) -> Any:
        out = [ad.instantiate_zeros(x) for x in new_jvp(*primals, *tangents)]
        return out[: len(out) // 2], out[len(out) // 2 :]

    function = jax.custom_jvp(lambda *arrays: new_fun(*arrays))
    function.defjvp(rule, symbolic_zeros=primitive.symbolic_zeros)
    return function


def _high_custom_vjp(primitive: Any, replace: Function) -> Any:
    """Returns a function with a ``custom_vjp`` like a primitive's, of flat arrays."""
    inputs, outputs = primitive.in_tree, primitive.out_tree
    has_zeros = _unbatched(primitive).symbolic_zeros
    # On 0.12 the first input is what the function closes over. JAX refuses to
    # differentiate with regard to it, so what is differentiated has to be known.
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
        given = arrays[n:] if has_zeros else map(_instantiated, arrays[n:])
        cotangents = outputs.unflatten(given)
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
    function.defvjp(rule_fwd, rule_bwd, symbolic_zeros=has_zeros or closes_over)
    return function


def bind_custom_vmap(
    eqn: Eqn, operands: Sequence[Any], jaxpr: Jaxpr, replace: Function
) -> list[Array]:
    """Binds a function with a rule for ``vmap``, the rule replaced.

    Args:
      eqn: a ``custom_vmap_call``.
      operands: what to bind it to.
      jaxpr: what it calls, closed.
      replace: is given the rule as a function of batched arrays, and these; returns a
        list of batched results.
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
    if type(array).__name__ == "SymbolicZero":
        return jnp.zeros(array.aval.shape, array.aval.dtype)
    return array


def forwarded_residuals(eqn: Eqn, n_residuals: int) -> Sequence[int | None]:
    """Returns which operand of a ``custom_vjp_call`` each of its residuals is, if any.

    It is known once the forward function has been run.

    Args:
      eqn: the equation.
      n_residuals: how many residuals it returned itself.
    """
    if eqn.primitive.name == _HIGH:
        return [None] * n_residuals
    _, _, forwards = eqn.params["out_trees"]()
    return forwards


def body_of(eqn: Eqn) -> Jaxpr:
    """Returns the jaxpr of a scan, of a shard_map, or that an equation calls."""
    inner = called(eqn)
    return eqn.params["jaxpr"] if inner is None else inner


def branches_of(eqn: Eqn) -> Sequence[Jaxpr]:
    """Returns the branches of a cond."""
    return eqn.params["branches"]


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """Returns how many constants and how many carries a scan has."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(eqn.invars).unpack()
    return len(list(consts)), len(list(carry))


def scan_options(eqn: Eqn) -> dict[str, Any]:
    """Returns the length, the direction and the unrolling of a scan."""
    return params_named(eqn, ("length", "reverse", "unroll"))


class While(NamedTuple):
    """The two jaxprs of a while, and how many constants each has."""

    cond: Jaxpr
    body: Jaxpr
    n_cond: int
    n_body: int


def while_parts(eqn: Eqn) -> While:
    """Takes a while apart."""
    names = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    return While(*params_named(eqn, names).values())


class ProductParams(NamedTuple):
    """What a matrix product asks for.

    Attributes:
      precision: its precision or its algorithm; None where it asks for none.
      result_dtype: the dtype of its result; None where that is its operands'.
    """

    precision: Any
    result_dtype: Any


def product_params(eqn: Eqn) -> ProductParams | None:
    """Returns what a matrix product asks for; None for any other op."""
    if op_of(eqn) not in PRODUCTS:
        return None
    params = eqn.params
    dtype = params.get("preferred_element_type")
    return ProductParams(params.get("precision"), dtype)


def contracts_nothing(eqn: Eqn) -> bool:
    """Whether each number of a matrix product's result is one product of two."""
    if op_of(eqn) != "dot_general":
        return False
    (contracted, _), _ = dot_dimensions(eqn)
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def dot_dimensions(eqn: Eqn) -> Any:
    """Returns the contracted and the batch axes of a dot_general, of both operands."""
    return eqn.params["dimension_numbers"]


def params_named(eqn: Eqn, names: Iterable[str]) -> dict[str, Any]:
    """Returns those of some parameters that an equation has."""
    return {name: eqn.params[name] for name in names if name in eqn.params}


def call_name(eqn: Eqn) -> str:
    """Returns the name of a jitted function that an equation calls, else nothing."""
    return eqn.params["name"] if op_of(eqn) == "jit" else ""


def is_custom_root(eqn: Eqn) -> bool:
    """Whether a custom_jvp is JAX's own for a root."""
    return "_custom_root" in name_of(body_of(eqn))


def shard_map_arguments(eqn: Eqn) -> dict[str, Any]:
    """Returns what ``jax.shard_map`` has to be given to make an equation again."""
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

    Unlike a ``custom_jvp``, whose rule JAX may drop where a loop is differentiated
    twice, it keeps its derivative: see ``pass_last_tangent`` and ``set_transpose``.

    Args:
      name: of the primitive.
      fun: computes its result. Under ``vmap`` its operands have more axes in front,
        all as many.
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
    """Returns the precision or algorithm that a dot gets which asks for none."""
    name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    algorithms = jax.lax.DotAlgorithmPreset.__members__
    if name in algorithms:
        return algorithms[name]
    return None if name is None else jax.lax.Precision(name)


def has_only_axis_effects(eqn: Eqn) -> bool:
    """Whether an equation does nothing but talk over named axes."""
    inside = called(eqn) if eqn.primitive.name == _HIGH else None
    effects = eqn.effects | (set() if inside is None else _open(inside).effects)
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in effects)


def retraced(
    jaxpr: Jaxpr, avals: Sequence[Aval], steps: Callable[[dict[Var, Any]], None]
) -> Jaxpr:
    """Returns a closed jaxpr, traced again with its equations run another way.

    Args:
      jaxpr: the jaxpr.
      avals: the types of its inputs, which may be other ones.
      steps: is given what the inputs are, by variable, and adds the results.
    """
    old = parts(jaxpr)

    def run(*arrays: Array) -> list[Array]:
        env = dict(zip(old.constvars, old.consts, strict=True))
        env.update(zip(old.invars, arrays, strict=True))
        steps(env)
        return [read(env, atom) for atom in old.outvars]

    return trace(run, avals, jaxpr)


def run_equations(eqns: Sequence[Eqn], env: dict[Var, Array]) -> None:
    """Runs equations, and adds their results to what is known by variable."""
    for eqn in eqns:
        with context_of(eqn):
            results = bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: dict[Var, Array], atom: Var) -> Any:
    """Returns what an atom is, given what is known by variable."""
    return as_array(atom.val) if is_literal(atom) else env[atom]


def as_typed(value: Any, aval: Aval) -> Any:
    """Returns a value as an array of a type, which may be a weak one."""
    value = value if isinstance(value, jax.Array) else jnp.asarray(value, aval.dtype)
    if getattr(aval, "weak_type", False) and not value.weak_type:
        return lax._convert_element_type(value, aval.dtype, weak_type=True)  # pyright: ignore[reportPrivateUsage]
    return value


def as_array(value: Any) -> Any:
    """Returns a literal's or a constant's value as something that has a dtype."""
    return value if hasattr(value, "dtype") else jnp.asarray(value)
