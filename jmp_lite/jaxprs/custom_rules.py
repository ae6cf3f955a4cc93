"""Binds functions with derivative or batching rules of their own."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.ad_util import Zero
from jax.custom_derivatives import SymbolicZero
from jax.extend import linear_util

from jmp_lite.jaxprs import coming, params, structure
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, PyTree, Tangent


def are_of_jax(eqn: Eqn) -> bool:
    """Whether JAX has written a function with rules, such as ``relu``, and its rules.

    Args:
      eqn: an equation that calls such a function.
    """
    has_functions = params.op_of(eqn) in ("custom_jvp_call", "custom_vjp_call")
    if not has_functions or eqn.primitive.name == coming.HIGH:
        return False  # Their rules do not tell.
    functions = eqn.primitive.get_bind_params(dict(eqn.params))["subfuns"]
    infos = [getattr(each, "debug_info", None) for each in functions]
    files = [getattr(info, "func_filename", None) or "" for info in infos]
    # All of them: a user may write a rule for a function of JAX, with products in it.
    return all(file.startswith(_JAX) for file in files)


_JAX = os.path.join(os.path.dirname(jax.__file__), "")


def bind_custom(eqn: Eqn, operands: Sequence[Array], replace: Function) -> list[Array]:
    """Binds a function with a custom derivative rule, with its functions replaced.

    Args:
      eqn: a ``custom_jvp_call`` or a ``custom_vjp_call``.
      operands: the operands.
      replace: takes ``(fun, jvp)`` or ``(fun, fwd, bwd)`` as plain functions and
        returns as many.
    """
    if eqn.primitive.name == coming.HIGH:
        is_jvp = params.op_of(eqn) == "custom_jvp_call"
        build = _high_custom_jvp if is_jvp else _high_custom_vjp
        return list(build(eqn.params["_prim"], replace)(*operands))
    # The functions are in ``subfuns`` on 0.10 and on 0.12, though the parameters
    # differ.
    changed = dict(eqn.primitive.get_bind_params(eqn.params))
    wrapped = changed["subfuns"]
    # On 0.12 a backward function may be an object that is not a function: it stays.
    plain = replace(*(getattr(fun, "call_wrapped", fun) for fun in wrapped))
    changed["subfuns"] = tuple(
        linear_util.wrap_init(new, debug_info=old.debug_info)
        if hasattr(old, "call_wrapped")
        else old
        for new, old in zip(plain, wrapped, strict=True)
    )
    return list(eqn.primitive.bind(*operands, **changed))


def _high_fun(primitive: Any) -> Callable[..., list[Array]]:
    return lambda *arrays: primitive.out_tree.flatten_up_to(
        primitive.expand(*primitive.in_tree.unflatten(arrays))
    )


def _high_custom_jvp(primitive: Any, replace: Function) -> Function:
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

    def rule(
        primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
    ) -> tuple[Sequence[Array | SymbolicZero], Sequence[Array | SymbolicZero]]:
        out = [
            SymbolicZero(x.aval) if isinstance(x, Zero) else x
            for x in new_jvp(*primals, *tangents)
        ]
        return out[: len(out) // 2], out[len(out) // 2 :]

    function = jax.custom_jvp(lambda *arrays: new_fun(*arrays))
    function.defjvp(rule, symbolic_zeros=primitive.symbolic_zeros)
    return function


def _high_custom_vjp(primitive: Any, replace: Function) -> Function:
    """Returns a function of flat arrays with a ``custom_vjp`` like a primitive's."""
    inputs, outputs = primitive.in_tree, primitive.out_tree
    has_zeros = coming.unbatched(primitive).symbolic_zeros
    # On 0.12 the first input holds the captured arrays. JAX refuses to differentiate
    # with respect to it, so the differentiated inputs have to be known.
    is_closed = hasattr(primitive, "drop_fwd_consts")
    closes_over = is_closed and bool(jax.tree.leaves(primitive.in_avals[0]))
    structure: list[PyTree] = []

    def fwd(*pairs: Array | bool) -> list[Array]:
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
            grads, _ = primitive.bwd(residuals, cotangents)  # And logs, on 0.12.
            consts = jax.tree.map(
                lambda aval: Zero(aval.to_ct_aval()), primitive.in_avals[:2]
            )
            grads = (*consts, *grads)
        else:
            grads = primitive.vjp_bwd_retval(residuals, cotangents)
        return inputs.flatten_up_to(grads)

    new_fun, new_fwd, new_bwd = replace(_high_fun(primitive), fwd, bwd)

    def rule_fwd(*primals: Any) -> tuple[list[Array], list[Array]]:
        pairs = [
            (x.value, x.perturbed) if hasattr(x, "perturbed") else (x, True)
            for x in primals
        ]
        out = new_fwd(*(item for pair in pairs for item in pair))
        n = len(out) - outputs.num_leaves
        return out[n:], out[:n]

    def rule_bwd(
        residuals: Sequence[Array], cotangents: Sequence[Array | SymbolicZero]
    ) -> tuple[Array | None, ...]:
        grads = new_bwd(*residuals, *cotangents)
        return tuple(None if isinstance(g, Zero) else g for g in grads)

    function = jax.custom_vjp(lambda *arrays: new_fun(*arrays))
    takes_zeros = has_zeros or closes_over
    function.defvjp(
        rule_fwd,
        rule_bwd,
        symbolic_zeros=takes_zeros,
        # JAX does not allow both.
        optimize_remat=coming.unbatched(primitive).opt_remat and not takes_zeros,
    )
    return function


def bind_custom_vmap(
    eqn: Eqn, operands: Sequence[Array], jaxpr: Jaxpr, replace: Function
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

    def rule(
        axis_size: int, is_batched: Sequence[bool], *arrays: Array
    ) -> tuple[list[Array], list[bool]]:
        batched: list[bool] = []

        def run(*arrays: Array) -> list[Array]:
            out, is_out_batched = eqn.params["rule"](
                axis_size, inputs.unflatten(is_batched), *inputs.unflatten(arrays)
            )
            batched[:] = outputs.flatten_up_to(is_out_batched)
            return outputs.flatten_up_to(out)

        return replace(run, *arrays), batched

    function = jax.custom_batching.custom_vmap(
        lambda *arrays: structure.evaluate(jaxpr, arrays)
    )
    function.def_vmap(rule)
    return list(function(*operands))


def bind_remat_opt(
    eqn: Eqn, operands: Sequence[Array], jaxpr: Jaxpr, replace: Function
) -> list[Array]:
    """Binds the forward function of a ``custom_vjp`` with ``optimize_remat``.

    Args:
      eqn: a ``remat_opt``.
      operands: the operands.
      jaxpr: the forward function to run, closed.
      replace: takes the function that the ``custom_vjp`` is, as a closed jaxpr of the
        last operands, and the numbers of first operands and of first results that it
        does not have. Returns the closed jaxpr to run in its place.
    """
    p = eqn.params
    n_consts, n_residuals = p["num_consts"], p["num_res"]
    # What the function captures is an operand: constants have no derivative.
    forward, consts = structure.with_consts_as_inputs(jaxpr)

    @functools.cache
    def function() -> tuple[Jaxpr, Sequence[Array]]:
        found = structure.closed(*p["fun_jaxpr_thunk"]())
        new = replace(found, n_consts, n_residuals)
        return structure.open_jaxpr(new), structure.parts(new).consts

    return eqn.primitive.bind(
        *consts,
        *operands,
        num_consts=n_consts + len(consts),
        num_res=n_residuals,
        fwd_jaxpr=forward,
        fun_jaxpr_thunk=function,
    )


def _instantiated(array: Any) -> Array:
    if structure.is_symbolic_zero(array):
        return jnp.zeros(array.aval.shape, array.aval.dtype)
    return array


def _internal_zero(array: Any) -> Tangent:
    """Returns a user's symbolic zero as JAX's own, which ``vmap`` accepts."""
    return Zero(array.aval) if structure.is_symbolic_zero(array) else array


def forwarded_residuals(eqn: Eqn, n_residuals: int) -> Sequence[int | None]:
    """Returns, for each residual of a ``custom_vjp_call``, the operand that it is.

    JAX knows this once the forward function has run.

    Args:
      eqn: the equation.
      n_residuals: the number of residuals that it returned itself.
    """
    if eqn.primitive.name == coming.HIGH:
        return [None] * n_residuals
    _, _, forwards = eqn.params["out_trees"]()
    return forwards
