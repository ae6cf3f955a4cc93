"""The state of ``loss_scaling``: found in an optimizer's state, read, and set."""

from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from jmp_lite.casting.types import Array, Path, PyTree, Tree
from jmp_lite.mutables import stored_like, values_in
from jmp_lite.scaling.loss_scale import LossScale, check_is_loss_scale


class LossScalingState(NamedTuple):
    """The state of ``loss_scaling``.

    Attributes:
      loss_scale: the ``LossScale`` of the next step.
      inner_state: the state of the wrapped transformation.
      grads_finite: whether the last step's gradients were finite, a boolean scalar.
      skipped: the number of skipped steps, an int32 scalar. With ``skip=False`` it is
        the number of steps with non-finite gradients.
      consecutive_skipped: the number of skipped steps in a row up to now, an int32
        scalar.
      consecutive_zero: the number of steps in a row, up to now, whose gradients were
        all zero, an int32 scalar. ``check_loss_scale`` reads it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.loss_scaling(optax.sgd(0.1)).init(jnp.ones(1))
      >>> state.skipped.dtype, state.loss_scale.loss_scale.dtype
      (dtype('int32'), dtype('float32'))
    """

    loss_scale: LossScale
    inner_state: PyTree
    grads_finite: Array
    skipped: Array
    consecutive_skipped: Array
    consecutive_zero: Array


def get_loss_scale(opt_state: PyTree) -> LossScale:
    """Returns the loss scale in an optimizer state.

    It is a value: the scale of an ``nnx.Optimizer``, too, stays what it is when the
    optimizer goes on.

    Args:
      opt_state: the state of an optimizer with ``loss_scaling`` anywhere in it, or any
        pytree that contains one such state.

    Raises:
      ValueError: the state contains no loss scale, or more than one. The message lists
        the paths.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = optax.chain(optax.clip(1.0), jmp.loss_scaling(optax.sgd(0.1)))
      >>> jmp.get_loss_scale(optimizer.init(jnp.ones(1))).loss_scale
      Array(32768., dtype=float32)
    """
    found = loss_scaling_states(opt_state)
    if len(found) > 1:
        listed = "\n".join(f"  {path}: {state.loss_scale}" for path, state in found)
        raise ValueError(
            f"Expected one loss scale, found {len(found)}:\n{listed}\nPass the part "
            "of the state that contains the right one."
        )
    return values_in(found[0][1].loss_scale)


def set_loss_scale(opt_state: Tree, loss_scale: LossScale) -> Tree:
    """Returns an optimizer state with another loss scale.

    Args:
      opt_state: as for ``get_loss_scale``.
      loss_scale: the scale of the next step. Another class of scale, or another setting
        such as ``period``, changes the pytree structure: a jit-compiled step then
        compiles again. If ``vmap`` has stacked several states, each gets this scale; a
        stacked scale holds one for each.

    Returns:
      ``opt_state`` with the scale replaced.

    Raises:
      TypeError: ``loss_scale`` is not a ``LossScale``.
      ValueError: ``opt_state`` contains no loss scale, or more than one. The message
        lists the paths.

    Example:
      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> opt_state = jmp.loss_scaling(optax.sgd(0.1)).init(jnp.ones(1))
      >>> scale = jmp.get_loss_scale(opt_state)
      >>> lower = dataclasses.replace(scale, loss_scale=2.0**10)
      >>> jmp.get_loss_scale(jmp.set_loss_scale(opt_state, lower)).loss_scale
      Array(1024., dtype=float32)
    """
    check_is_loss_scale(loss_scale)
    get_loss_scale(opt_state)  # Raises unless there is exactly one.
    new = copied_scale(loss_scale)

    def replace(node: PyTree) -> PyTree:
        if not _is_scaling_state(node):
            return node
        stack = jnp.shape(node.skipped)

        def stored(leaf: Array) -> PyTree:
            return stored_like(_stacked(stack, leaf), node.skipped)

        return node._replace(loss_scale=jax.tree.map(stored, new))

    return jax.tree.map(replace, opt_state, is_leaf=_is_scaling_state)


def copied_scale(loss_scale: LossScale) -> LossScale:
    """Returns a copy: the state may be donated, and the scale used again."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), loss_scale)


def _stacked(stack: tuple[int, ...], leaf: Array) -> Array:
    """Returns a number of a loss scale for each of some stacked states."""
    is_stacked = leaf.shape[: len(stack)] == stack
    return leaf if is_stacked else jnp.broadcast_to(leaf, stack + leaf.shape)


def loss_scaling_states(tree: PyTree) -> list[tuple[str, LossScalingState]]:
    """Returns each ``LossScalingState`` in a tree with its path; at least one."""
    found = find_states(tree, ())
    if not found:
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        names = [jax.tree_util.keystr(path) or "the root" for path, _ in paths]
        looked = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"No LossScalingState in this {type(tree).__name__}: looked at "
            f"{looked or 'a tree without leaves'}. Pass the state of an optimizer "
            "that is wrapped in loss_scaling(...) or skip_nonfinite(...). Restore a "
            "state from a checkpoint into the structure of optimizer.init(params)."
        )
    return [(jax.tree_util.keystr(path) or "the root", state) for path, state in found]


def find_states(tree: PyTree, prefix: Path) -> list[tuple[Path, LossScalingState]]:
    """Returns each ``LossScalingState`` in a tree with its path.

    Args:
      tree: a pytree.
      prefix: the path of the tree.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_scaling_state)
    found: list[tuple[Path, LossScalingState]] = []
    for path, leaf in leaves:
        if _is_scaling_state(leaf):
            inner_prefix = (*prefix, *path, jax.tree_util.GetAttrKey("inner_state"))
            found.append(((*prefix, *path), leaf))
            found += find_states(leaf.inner_state, inner_prefix)
    return found


def _is_scaling_state(node: PyTree) -> TypeGuard[LossScalingState]:
    return isinstance(node, LossScalingState)
