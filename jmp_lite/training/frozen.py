"""Finds the parameters that an optimizer never updates."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.losses import Prepare, set_float32_loss, with_float32_loss
from jmp_lite.casting.types import LossFn, OptimizerExtraArgs, Params, Tree
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import PyTree
from jmp_lite.scaling.value_and_grad import filled_in
from jmp_lite.training.loss_at import WithAux


def find_frozen(
    optimizer: OptimizerExtraArgs, parameters: Params, state: PyTree
) -> list[bool]:
    """Returns whether each parameter is frozen, as by ``optax.set_to_zero``.

    The update of such a parameter depends on nothing: on no gradient, parameter or
    state. A part of the parameters can be frozen by ``optax.masked`` and by
    transformations that use it, such as ``optax.partition``. Without these, or if a
    wrapper such as ``compensated`` stands around them, or for an optimizer that
    computes gradients by itself, no parameter counts as frozen.

    Args:
      optimizer: the optimizer.
      parameters: the parameters.
      state: its state for them.

    Example:
      >>> import optax
      >>> labels = {"base": "frozen", "adapter": "trained"}
      >>> optimizer = optax.partition(
      ...     {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)}, labels
      ... )
      >>> params = {"base": jnp.ones(4), "adapter": jnp.ones(2)}
      >>> find_frozen(optimizer, params, optimizer.init(params))  # adapter, base
      [False, True]
    """
    n_leaves = len(jax.tree.leaves(parameters))
    if not any(map(_is_masked, jax.tree.leaves(state, is_leaf=_is_masked))):
        return [False] * n_leaves

    def updates(grads: PyTree, state: PyTree, current: PyTree) -> PyTree:
        return optimizer.update(grads, state, current)[0]

    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), parameters
    )
    try:
        with jax.numpy_dtype_promotion("standard"):  # Some optimizers need it.
            jaxpr = jax.make_jaxpr(updates)(grads, state, parameters)
    except Exception:  # It needs the loss, or other arguments.
        return [False] * n_leaves
    parts = structure.parts(jaxpr)
    found = {*parts.invars}  # What depends on an input.
    for eqn in parts.eqns:
        if any(not structure.is_literal(x) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return [structure.is_literal(x) or x not in found for x in parts.outvars]


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedState)


def trained_part(
    loss_fn: LossFn, params: Params, frozen: list[bool]
) -> tuple[Params, LossFn]:
    """Returns the parameters that are not frozen, and the loss as their function."""
    if not any(frozen):
        return params, loss_fn

    def prepared(prepare: Prepare) -> LossFn:
        loss = with_float32_loss(loss_fn, prepare)

        def of_trained(trained: Params, *others: PyTree) -> WithAux:
            return loss(filled_in(trained, params), *others)

        return of_trained

    loss_of_trained = prepared(lambda fun: fun)
    set_float32_loss(loss_of_trained, prepared)
    return without(params, frozen), loss_of_trained


def without(tree: Tree, frozen: Sequence[bool]) -> Tree:
    """Returns a tree of the parameters with None in place of each frozen one."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: node is None)
    kept = zip(leaves, frozen, strict=True)
    return treedef.unflatten([None if cold else leaf for leaf, cold in kept])
