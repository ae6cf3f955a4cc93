"""The loss scales in an optimizer's state: read, set, and checked on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite.casting.dtypes import place_of
from jmp_lite.casting.types import Array, PyTree, Scalar, Tree
from jmp_lite.mutables import stored_like, values_in
from jmp_lite.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    check_is_loss_scale,
)
from jmp_lite.scaling.skipping import (
    LossScalingState,
    all_finite,
    find_states,
)
from jmp_lite.scaling.wrapping import copied, nodes_of


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
    found = _states_in(opt_state)
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
    new = copied(loss_scale)

    def replace(node: PyTree) -> PyTree:
        if not isinstance(node, LossScalingState):
            return node
        stack = jnp.shape(node.skipped)

        def stored(leaf: Array) -> PyTree:
            # ``vmap`` may have stacked the states, and the scale may be that of one.
            is_stacked = leaf.shape[: len(stack)] == stack
            each = leaf if is_stacked else jnp.broadcast_to(leaf, stack + leaf.shape)
            return stored_like(each, node.skipped)

        return node._replace(loss_scale=jax.tree.map(stored, new))

    return jax.tree.map(
        replace, opt_state, is_leaf=lambda node: isinstance(node, LossScalingState)
    )


def _states_in(tree: PyTree) -> list[tuple[str, LossScalingState]]:
    """Returns each ``LossScalingState`` in a tree with its path; at least one."""
    found = find_states(tree)
    if not found:
        paths, _ = jax.tree_util.tree_flatten_with_path(tree)
        names = [place_of(path) for path, _ in paths]
        looked = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"No LossScalingState in this {type(tree).__name__}: looked at "
            f"{looked or 'a tree without leaves'}. Pass the state of an optimizer "
            "that is wrapped in loss_scaling(...) or skip_nonfinite(...). Restore a "
            "state from a checkpoint into the structure of optimizer.init(params)."
        )
    return [(place_of(path), state) for path, state in found]


class LossScaleError(ValueError):
    """Too many steps in a row changed no parameter: skipped, or without a gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.skip_nonfinite(optax.sgd(0.1)).init(jnp.ones(1))
      >>> stuck = state._replace(consecutive_skipped=jnp.int32(51))
      >>> try:
      ...     jmp.check_loss_scale(stuck)
      ... except jmp.LossScaleError as error:
      ...     print(str(error)[:39])
      The last 51 steps in a row were skipped
    """


def check_loss_scale(opt_state: PyTree, max_consecutive_skips: int = 50) -> None:
    """Raises an error if too many steps in a row changed no parameter.

    Call it on the host, between steps.

    Args:
      opt_state: as for ``get_loss_scale``, but it may contain several loss scales.
      max_consecutive_skips: the number of skipped steps in a row that is tolerated.
        So many steps in a row may also have gradients that are all zero, under a loss
        scale.

    Raises:
      LossScaleError: more steps in a row were skipped, or had no gradient but zeros,
        and the message names likely causes. Or ``optax.MultiSteps`` is around
        ``loss_scaling`` and has accumulated an overflow, which it never drops. Or
        ``optax.apply_if_finite`` is around it, and hides overflows from it.
      ValueError: ``opt_state`` contains no ``LossScalingState``, or
        ``max_consecutive_skips`` is negative.
      TypeError: the call is inside ``jit``, where numbers are not known.

    Source: MindSpore's ``DynamicLossScaleManager`` and DeepSpeed also stop training.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> opt_state = jmp.loss_scaling(optax.sgd(0.1)).init(jnp.ones(1))
      >>> jmp.check_loss_scale(opt_state)
      >>> opt_state.consecutive_skipped.dtype
      dtype('int32')
    """
    if max_consecutive_skips < 0:
        raise ValueError(
            "Expected max_consecutive_skips of at least 0, got "
            f"{max_consecutive_skips}."
        )
    states = _states_in(opt_state)
    _check_around(opt_state)
    for path, state in states:
        in_a_row = int(_fetch(state.consecutive_skipped).max())
        if in_a_row > max_consecutive_skips:
            others = [name for name, other in states if other is not state]
            causes = "; ".join(
                f"({letter}) {cause}"
                for letter, cause in zip("abcde", _causes(state, others), strict=False)
            )
            raise LossScaleError(
                f"The last {in_a_row} steps in a row were skipped, because gradients "
                "or the loss were not finite (tolerated in a row: "
                f"{max_consecutive_skips}; skipped in all: "
                f"{_fetch(state.skipped).max()}). The state is at {path}, and its "
                f"loss scale is {_fetch(state.loss_scale.loss_scale)}. Likely "
                f"causes: {causes}."
            )
        _check_zeros(path, state, max_consecutive_skips)


def _check_zeros(path: str, state: LossScalingState, tolerated: int) -> None:
    """Raises an error if gradients under a loss scale were zero for too long."""
    in_a_row = int(_fetch(state.consecutive_zero).max())
    if in_a_row <= tolerated or isinstance(state.loss_scale, NoOpLossScale):
        return
    raise LossScaleError(
        f"All gradients of the last {in_a_row} steps were zero (tolerated in a row: "
        f"{tolerated}). The state is at {path}. Likely causes: (a) the loss was "
        "differentiated without its scale, as by jax.grad, and the gradients became "
        "zero in 16 bits: use jmp_lite.value_and_grad(loss_fn, "
        "loss_scale=get_loss_scale(opt_state)); (b) the loss does not depend on these "
        "parameters, as behind jax.lax.stop_gradient; (c) an infinity was divided to "
        "zero: look for it in the column inf of watch(loss_fn)(...)[1]."
    )


def _causes(state: LossScalingState, others: list[str]) -> list[str]:
    """Returns likely causes of skipped steps, the likeliest first."""
    causes = [
        "parameters or inputs already contain NaN or infinity: check them with "
        "all_finite",
        "training diverged: lower the learning rate or clip gradients",
        "the forward pass overflows the compute dtype at any scale: find the op with "
        "first_nonfinite(watch(loss_fn)(...)[1]), and compute it in float32 (None: a "
        "number is not finite before the first op)",
    ]
    scale = state.loss_scale
    if isinstance(scale, DynamicLossScale):
        causes.append("loss_fn multiplies the loss by the scale, too: leave it out")
        if np.all(_fetch(scale.loss_scale) <= max(scale.min_loss_scale, _TINY)):
            named = f" (others here: {', '.join(others)})" if others else ""
            causes.insert(
                0,
                "this scale is at its minimum, so another scale may multiply the "
                f"loss{named}, and that one never backs off: pass "
                "get_loss_scale(opt_state) of this state to value_and_grad at each "
                "step; for one loss and two optimizers put one loss_scaling around "
                "optax.partition",
            )
    elif not jax.tree.leaves(scale) and not isinstance(scale, NoOpLossScale):
        causes.insert(
            0,
            f"a {type(scale).__name__} never backs off: lower it, or pass "
            "DynamicLossScale()",
        )
    return causes


_TINY = float(np.finfo(np.float32).tiny)


def _check_around(opt_state: PyTree) -> None:
    """Raises an error if a wrapper of optax around ``loss_scaling`` has an overflow."""
    for path, node in nodes_of(opt_state, optax.MultiStepsState):
        is_around = bool(find_states(node.inner_opt_state))
        if is_around and not _fetch(all_finite(node.acc_grads)):
            raise LossScaleError(
                f"optax.MultiSteps is around loss_scaling at {place_of(path)}, and its "
                "accumulated gradients are not finite. It keeps them forever, so no "
                "later step changes a parameter. Put loss_scaling around it, as in "
                "loss_scaling(optax.MultiSteps(optimizer, 4)), and restart from a "
                "state before the overflow."
            )
    for path, node in nodes_of(opt_state, optax.ApplyIfFiniteState):
        hidden = int(_fetch(node.total_notfinite).max())
        if hidden and find_states(node.inner_state):
            raise LossScaleError(
                f"optax.apply_if_finite is around loss_scaling at {place_of(path)}, "
                f"and has skipped steps with an overflow ({hidden} so far). "
                "loss_scaling knows nothing of them, so the loss scale never backs "
                "off. Leave optax.apply_if_finite out: loss_scaling skips such steps."
            )


def _fetch(value: Scalar) -> np.ndarray:
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            "check_loss_scale reads numbers on the host: call it between steps, "
            "outside of jit."
        ) from None
