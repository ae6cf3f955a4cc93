"""The optax wrappers that decide whether a step is skipped, and keep the state then."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_inexact, refuse_raw_bytes
from jmp_lite.casting.types import (
    Array,
    AxisName,
    Leaf,
    Optimizer,
    OptimizerExtraArgs,
    Params,
    PyTree,
    Tree,
    Updates,
)
from jmp_lite.scaling.dynamic import DynamicLossScale
from jmp_lite.scaling.finite import Judged, all_finite, judged, select_tree
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale, check_is_loss_scale
from jmp_lite.scaling.state import LossScalingState, copied_scale
from jmp_lite.scaling.wrapping import (
    check_classes,
    check_state,
    initial_state,
    params_for_init,
    update_inner,
    with_extra_args,
)


def loss_scaling(
    inner: Optimizer,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName | None = None,
    skip: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it carries a loss scale and skips overflowed steps.

    ``update`` takes true gradients: ``jmp_lite.value_and_grad`` scales and unscales. It
    checks them and adjusts the scale. If a gradient is not finite, the step is skipped:

    - The updates are -0.0, which changes no bit of a parameter.
    - The inner state stays unchanged, schedules included.
    - ``inner`` receives ones in place of the gradients, never a NaN or an infinity. Its
      results are dropped.

    If ``inner`` calls a function among its extra arguments, such as ``grad_fn``, the
    step is also skipped if its updates or its new state are not finite.

    Where to put it:

    - Wrap the whole chain, and wrap ``optax.MultiSteps``. Inside ``MultiSteps``, one
      overflow would stay in optax's accumulator forever.
    - Inside ``optax.partition`` or ``optax.masked``, a wrapper checks its own leaves
      only.
    - For one loss and two optimizers, put one ``loss_scaling`` around
      ``optax.partition``. With one wrapper around each optimizer, one state scales the
      loss, and an overflow in the other optimizer's gradients never lowers that scale::

        labels = {"encoder": "slow", "head": "fast"}
        optimizers = {"slow": optax.sgd(1e-4), "fast": optax.adam(1e-3)}
        optimizer = jmp.loss_scaling(optax.partition(optimizers, labels))

    Under ``jax_debug_nans`` the wrapper adds no error. Some optimizers raise one
    themselves: ``optax.lbfgs`` outside of jit, and ``optax.contrib.schedule_free``,
    which contains a constant NaN.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``.
      loss_scale: the initial scale; None means ``DynamicLossScale()``.
      axis_name: a mapped axis or several. All replicas on these axes skip together.
      skip: False also applies the updates of overflowed gradients, and counts them. It
        requires a scale that does not change, such as ``StaticLossScale``. (MindSpore
        calls it ``FixedLossScaleManager(drop_overflow_update=False)``.)

    Returns:
      A transformation whose state is a ``LossScalingState``. ``update`` takes gradients
      of any floating-point dtype, and passes extra arguments to ``inner``.

      16-bit gradients and parameters reach ``inner`` in float32, so its state and
      updates are those of float32 parameters. There is one exception: parameters stay
      in 16 bits if ``master_weights``, ``compensated`` or ``stochastic_rounding``
      inside rounds them.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``loss_scale`` is not a
        ``LossScale``. In ``update``: ``inner`` changes the structure or a shape of its
        state, an extra argument is missing, or the gradients do not match the
        parameters.
      ValueError: ``skip`` is False with a scale that changes.
      NameError: in ``update``, ``axis_name`` is not a mapped axis.

    Source: Micikevicius et al., "Mixed Precision Training", 2017.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.loss_scaling(optax.sgd(0.5), jmp.DynamicLossScale(8.0))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> overflowed = {"w": jnp.array([1.0, jnp.inf])}
      >>> updates, state = optimizer.update(overflowed, state, params)
      >>> updates["w"], state.loss_scale.loss_scale, int(state.skipped)
      (Array([-0., -0.], dtype=float32), Array(4., dtype=float32), 1)
    """
    inner = with_extra_args(inner)
    if loss_scale is not None:
        check_is_loss_scale(loss_scale)
    if not skip and (loss_scale is None or jax.tree.leaves(loss_scale)):
        given = "DynamicLossScale" if loss_scale is None else type(loss_scale).__name__
        raise ValueError(
            "Expected a loss scale that does not change with skip=False, got "
            f"{given}, which would adjust to steps that are not skipped. Pass "
            "StaticLossScale(128.0) or NoOpLossScale(), or leave skip=False out."
        )

    def init(params: Params) -> PyTree:
        refuse_raw_bytes(params)
        start = DynamicLossScale() if loss_scale is None else loss_scale
        inner_state = initial_state(inner, params_for_init(inner, params))
        if not isinstance(start, NoOpLossScale):
            _refuse_a_second_scale(inner_state)
        return LossScalingState(
            loss_scale=copied_scale(start),
            inner_state=inner_state,
            grads_finite=jnp.array(True),
            skipped=jnp.zeros([], jnp.int32),
            consecutive_skipped=jnp.zeros([], jnp.int32),
            consecutive_zero=jnp.zeros([], jnp.int32),
        )

    def update(
        updates: Updates,
        state: PyTree,
        params: Params | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, PyTree]:
        check_state(state, LossScalingState, "loss_scaling")
        check_classes(state.loss_scale, "a LossScale in the state")
        refuse_raw_bytes(updates)
        refuse_raw_bytes(params)
        grads = judged(updates, axis_name)
        if skip:
            return update_if(
                grads,
                inner,
                updates,
                state,
                params,
                extra_args,
                axis_name=axis_name,
            )
        new_updates, _, inner_state = update_inner(
            inner, updates, state.inner_state, params, extra_args
        )
        return new_updates, _state_after_step(state, grads, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def skip_nonfinite(
    inner: Optimizer, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it skips steps with non-finite gradients.

    It is ``loss_scaling`` without a scale, for bfloat16 and float32. Unlike
    ``optax.apply_if_finite``, it never applies a NaN after too many skips. Call
    ``check_loss_scale`` to decide whether to stop.

    Args:
      inner: see ``loss_scaling``.
      axis_name: see ``loss_scaling``.

    Returns:
      A transformation whose state is a ``LossScalingState`` with ``NoOpLossScale()``.

    Raises:
      TypeError: see ``loss_scaling``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.skip_nonfinite(optax.sgd(0.5))
      >>> state = optimizer.init(jnp.ones(1))
      >>> optimizer.update(jnp.array([jnp.nan]), state)[0]
      Array([-0.], dtype=float32)
    """
    return loss_scaling(inner, NoOpLossScale(), axis_name=axis_name)


def update_if(
    judged_grads: Judged,
    inner: OptimizerExtraArgs,
    updates: Updates,
    state: LossScalingState,
    params: Params | None,
    extra_args: dict[str, Any],
    *,
    axis_name: AxisName | None = None,
) -> tuple[Updates, LossScalingState]:
    """Runs ``inner.update`` and keeps its results only if they are finite.

    They are if the gradients are. An exception is an optimizer that calls a function
    among the extra arguments, such as ``grad_fn``: the result of the function may
    overflow, too. Then the decision includes the updates and the new inner state.

    It selects and does not branch. On accelerators, ``lax.cond`` moves more bytes and
    holds temporaries. It also refuses an inner transformation whose weak types change.
    """
    called: list[str] = []
    grads_finite = judged_grads.finite
    grads, extra_args = _finite_or_ones(grads_finite, (updates, extra_args))
    new_updates, inner_state, new_inner_state = update_inner(
        inner, grads, state.inner_state, params, _noting_calls(extra_args, called)
    )
    is_kept = grads_finite
    if called:
        # Without such a call the gradients decide, and this check would read all arrays
        # again.
        is_new = _stays_finite(inner_state, new_inner_state)
        is_kept &= all_finite((new_updates, is_new), axis_name)
    no_updates = jax.tree.map(_negative_zeros, new_updates)
    return select_tree(is_kept, new_updates, no_updates), _state_after_step(
        state,
        judged_grads._replace(finite=is_kept),
        inner_state=select_tree(is_kept, new_inner_state, inner_state),
    )


def _noting_calls(extra_args: dict[str, Any], called: list[str]) -> dict[str, Any]:
    """Returns extra arguments whose functions add their name to a list if called."""

    def noting(name: str, fun: PyTree) -> PyTree:
        if not callable(fun) or not jax.tree_util.treedef_is_leaf(
            jax.tree.structure(fun)
        ):
            return fun

        @functools.wraps(fun)  # optax's line searches read the signature.
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return fun(*args, **kwargs)

        return call

    return {name: noting(name, arg) for name, arg in extra_args.items()}


def _stays_finite(before: PyTree, after: PyTree) -> PyTree:
    """Returns numbers that are not finite where a state has lost a finite number.

    Some states start with an infinity, such as the best loss so far.
    """

    def lost(old: Leaf, new: Leaf) -> Array | None:
        if not (is_inexact(old) and is_inexact(new)):
            return None
        return jnp.where(jnp.isfinite(old), new, 0)

    return jax.tree.map(lost, before, after)


def _state_after_step(
    state: LossScalingState, grads: Judged, inner_state: PyTree
) -> LossScalingState:
    """Returns the state after a step."""
    consecutive_skipped = jnp.where(grads.finite, 0, state.consecutive_skipped + 1)
    # Each count is computed from the one before, so that a GPU computes all of them in
    # one kernel.
    skipped = state.skipped + jnp.minimum(consecutive_skipped, 1)
    is_zero = grads.zero & (skipped == state.skipped)
    return LossScalingState(
        loss_scale=state.loss_scale.adjust(grads.finite),
        inner_state=inner_state,
        grads_finite=grads.finite,
        skipped=skipped,
        consecutive_skipped=consecutive_skipped,
        consecutive_zero=jnp.where(is_zero, state.consecutive_zero + 1, 0),
    )


def _negative_zeros(update: ArrayLike) -> Array:
    """Returns updates that change no bit of a parameter: -0.0 + 0.0 would be 0.0."""
    zeros = jnp.zeros_like(update)
    return -zeros if is_inexact(update) else zeros


def _refuse_a_second_scale(inner_state: PyTree) -> None:
    """Raises a ValueError if an inner wrapper holds a loss scale, too."""

    def is_scaled(node: PyTree) -> bool:
        has_scale = isinstance(node, LossScalingState)
        return has_scale and not isinstance(node.loss_scale, NoOpLossScale)

    if any(map(is_scaled, jax.tree.leaves(inner_state, is_leaf=is_scaled))):
        raise ValueError(
            "loss_scaling is applied twice: the wrapped optimizer already holds a loss "
            "scale. Remove one of the two wrappers."
        )


def _finite_or_ones(grads_finite: Array, tree: Tree) -> Tree:
    """Replaces floating-point leaves by ones on a non-finite step.

    Ones, not zeros: a normalizing optimizer would divide 0 by 0.
    """

    def replace(leaf: Leaf) -> Leaf:
        if not is_inexact(leaf):
            return leaf
        return jnp.where(grads_finite, leaf, jnp.ones_like(leaf))

    return jax.tree.map(replace, tree)
