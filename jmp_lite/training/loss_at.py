"""The loss and its gradients for other parameters, as some optimizers compute them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jmp_lite.casting.dtypes import upcast_tree
from jmp_lite.casting.types import (
    Array,
    Key,
    OptimizerExtraArgs,
    Params,
    PyTree,
    Updates,
)
from jmp_lite.scaling.finite import all_finite

WithAux: TypeAlias = tuple[Array, tuple[PyTree, PyTree]]
"""The result of a loss function: ``(loss, (model_state, aux))``."""
GradFn: TypeAlias = Callable[
    [Params, PyTree, PyTree, Key | None], tuple[WithAux, Updates]
]
"""A function with the arguments of a loss function: its result, and gradients."""
Evaluate: TypeAlias = Callable[[Params], tuple[Array, PyTree, PyTree, Updates]]
"""Returns the loss, the new model state, ``aux`` and the gradients for parameters."""


def functions_of_parameters(
    evaluate: Evaluate, params: Params
) -> tuple[Callable[..., Array], Callable[..., Updates]]:
    """Returns the loss and its gradient as functions of the parameters.

    Args:
      evaluate: ``evaluate(params) -> (loss, model_state, aux, grads)``.
      params: the parameters of this step; other parameters are cast to their dtypes.
    """

    def evaluate_like(others: Params) -> tuple[Array, Updates]:
        cast = jax.tree.map(lambda new, old: new.astype(old.dtype), others, params)
        loss, _, _, grads = evaluate(cast)
        # An overflow makes all gradients NaN: clipping would hide an infinity.
        poison = jnp.where(all_finite(grads), 1.0, jnp.nan)
        grads = jax.tree.map(lambda g: g * poison.astype(g.dtype), upcast_tree(grads))
        return upcast_tree(loss), grads

    @jax.custom_jvp
    def loss_of(others: Params) -> Array:
        return evaluate_like(others)[0]

    # A caller that differentiates the loss gets these gradients: without a loss scale,
    # 16-bit ones would become zero.
    @loss_of.defjvp
    def _(primals: tuple[Params], tangents: tuple[Updates]) -> tuple[Array, Array]:  # pyright: ignore[reportUnusedFunction]
        loss, grads = evaluate_like(*primals)
        terms = jax.tree.map(
            lambda g, t: jnp.sum(jnp.real(g * t.astype(g.dtype))).astype(loss.dtype),
            grads,
            *tangents,
        )
        return loss, sum(jax.tree.leaves(terms), jnp.zeros_like(loss))

    # optax's line searches refuse extra arguments that value_fn does not name.
    def value_fn(
        params: Params,
        obj_fn: PyTree = None,
        grad_fn: PyTree = None,
        loss: PyTree = None,
        grad_norm: PyTree = None,
    ) -> Array:
        del obj_fn, grad_fn, loss, grad_norm
        return loss_of(params)

    def grad_fn(params: Params, i: Array | int = 0) -> Updates:
        del i  # The step number of sam: all steps use this batch.
        return evaluate_like(params)[1]

    return value_fn, grad_fn


def accepted_arguments(
    optimizer: OptimizerExtraArgs,
    given: Mapping[str, Any],
    extra_args: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the extra arguments for an optimizer's update.

    Args:
      optimizer: the optimizer.
      given: those of every step. They are left out if its update does not accept them.
      extra_args: those that the caller of the step adds.

    Raises:
      TypeError: the update does not accept one of the caller's, or each step has it.
    """
    accepted = inspect.signature(optimizer.update).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    for name in extra_args:
        if name in given:
            raise TypeError(f"The step itself passes {name} to the optimizer.")
        if not takes_all and name not in accepted:
            raise TypeError(
                f"The optimizer's update has no argument {name}, which step got. It "
                f"has {', '.join(accepted)}."
            )
    taken = {name: x for name, x in given.items() if takes_all or name in accepted}
    return {**taken, **extra_args}
