"""Optax wrappers whose state holds a loss scale and that skip overflowed steps.

The inner transformation sees finite gradients only. A step with non-finite gradients
leaves its state unchanged. The wrappers take true gradients, as
``jmp_lite.value_and_grad`` returns them.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_inexact,
    is_number,
    upcast_tree,
)
from jmp_lite.scaling.loss_scale import (
    AxisName,
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    all_finite,
    check_is_loss_scale,
    select_tree,
    type_of,
)
from jmp_lite.scaling.states import LossScalingState, check_state, kept_in_16_bits

Tree = TypeVar("Tree")


class LossScaleError(ValueError):
    """Too many steps in a row were skipped: the parameters no longer change.

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


def loss_scaling(
    inner: Any,
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

    def init(params: Any) -> Any:
        start = DynamicLossScale() if loss_scale is None else loss_scale
        inner_state = strongly_typed(inner.init(_as_seen_by_init(inner, params)))
        if not isinstance(start, NoOpLossScale):
            _refuse_a_second_scale(inner_state)
        return LossScalingState(
            loss_scale=_fresh(start),
            inner_state=inner_state,
            grads_finite=jnp.array(True),
            skipped=jnp.zeros([], jnp.int32),
            consecutive_skipped=jnp.zeros([], jnp.int32),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_state(state, LossScalingState, "loss_scaling")
        grads_finite = all_finite(updates, axis_name)
        if skip:
            return update_if(
                grads_finite, inner, updates, state, params, extra_args, axis_name
            )
        new_updates, _, inner_state = _update_inner(
            inner, updates, state.inner_state, params, extra_args
        )
        return new_updates, _counted(state, grads_finite, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def skip_nonfinite(
    inner: Any, *, axis_name: AxisName | None = None
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
    grads_finite: jax.Array,
    inner: Any,
    updates: Any,
    state: LossScalingState,
    params: Any,
    extra_args: dict[str, Any],
    axis_name: AxisName | None = None,
) -> tuple[Any, LossScalingState]:
    """Runs ``inner.update`` and keeps its results only if they are finite.

    They are if the gradients are. An exception is an optimizer that calls a function
    among the extra arguments, such as ``grad_fn``: what the function returns may
    overflow, too. Then the decision includes the updates and the new inner state.

    It selects and does not branch. On accelerators, ``lax.cond`` moves more bytes and
    holds temporaries. It also refuses an inner transformation whose weak types change.
    """
    called: list[str] = []
    grads, extra_args = _finite_or_ones(grads_finite, (updates, extra_args))
    new_updates, inner_state, new_inner_state = _update_inner(
        inner, grads, state.inner_state, params, _noting_calls(extra_args, called)
    )
    is_kept = grads_finite
    if called:
        # Otherwise the check would read all of them once more.
        is_new = _stays_finite(inner_state, new_inner_state)
        is_kept &= all_finite((new_updates, is_new), axis_name)
    no_updates = jax.tree.map(_negative_zeros, new_updates)
    return select_tree(is_kept, new_updates, no_updates), _counted(
        state,
        is_kept,
        inner_state=select_tree(is_kept, new_inner_state, inner_state),
    )


def _noting_calls(extra_args: dict[str, Any], called: list[str]) -> dict[str, Any]:
    """Returns extra arguments whose functions add their name to a list if called."""

    def noting(name: str, fun: Any) -> Any:
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


def _stays_finite(before: Any, after: Any) -> Any:
    """Returns numbers that are not finite where a state has lost a finite number.

    Some states start with an infinity, such as the best loss so far.
    """

    def lost(old: Any, new: Any) -> Any:
        if not (is_inexact(old) and is_inexact(new)):
            return None
        return jnp.where(jnp.isfinite(old), new, 0)

    return jax.tree.map(lost, before, after)


# ---------------------------------------------------------------- reading the state


def get_loss_scale(opt_state: Any) -> LossScale:
    """Returns the loss scale in an optimizer state.

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
    found = _loss_scaling_states(opt_state)
    if len(found) > 1:
        listed = "\n".join(f"  {path}: {state.loss_scale}" for path, state in found)
        raise ValueError(
            f"Expected one loss scale, found {len(found)}:\n{listed}\nPass the part "
            "of the state that contains the right one."
        )
    return found[0][1].loss_scale


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
    new = _fresh(loss_scale)

    def replace(node: Any) -> Any:
        if not _is_scaling_state(node):
            return node
        stacked = functools.partial(_stacked, jnp.shape(node.consecutive_skipped))
        return node._replace(loss_scale=jax.tree.map(stacked, new))

    return jax.tree.map(replace, opt_state, is_leaf=_is_scaling_state)


def _stacked(stack: tuple[int, ...], leaf: jax.Array) -> jax.Array:
    """Returns a number of a loss scale for each of some stacked states."""
    is_stacked = leaf.shape[: len(stack)] == stack
    return leaf if is_stacked else jnp.broadcast_to(leaf, stack + leaf.shape)


def check_loss_scale(opt_state: Any, max_consecutive_skips: int = 50) -> None:
    """Raises an error if too many steps in a row were skipped.

    Call it on the host, between steps.

    Args:
      opt_state: as for ``get_loss_scale``, but it may contain several loss scales.
      max_consecutive_skips: the number of skipped steps in a row that is tolerated.

    Raises:
      LossScaleError: more steps in a row were skipped, and the message names likely
        causes. Or ``optax.MultiSteps`` is around ``loss_scaling`` and has accumulated
        an overflow, which it never drops.
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
    states = _loss_scaling_states(opt_state)
    _check_nesting(opt_state)
    for path, state in states:
        in_a_row = int(_on_host(state.consecutive_skipped).max())
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
                f"{_on_host(state.skipped).max()}). The state is at {path}, and its "
                f"loss scale is {_on_host(state.loss_scale.loss_scale)}. Likely "
                f"causes: {causes}."
            )


def _causes(state: LossScalingState, others: list[str]) -> list[str]:
    """Returns likely causes of skipped steps, the likeliest first."""
    causes = [
        "parameters or inputs already contain NaN or infinity: check them with "
        "all_finite",
        "training diverged: lower the learning rate or clip gradients",
        "the forward pass overflows the compute dtype at any scale: compute that "
        "part in float32",
    ]
    scale = state.loss_scale
    if isinstance(scale, DynamicLossScale):
        if np.all(_on_host(scale.loss_scale) <= max(scale.min_loss_scale, _TINY)):
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


def _check_nesting(opt_state: Any) -> None:
    """Raises an error if ``optax.MultiSteps`` has accumulated an overflow."""

    def is_multi_steps(node: Any) -> bool:
        return isinstance(node, optax.MultiStepsState)

    for path, node in jax.tree.leaves_with_path(opt_state, is_leaf=is_multi_steps):
        if not is_multi_steps(node) or not _find_states(node.inner_opt_state, ()):
            continue
        if not _on_host(all_finite(node.acc_grads)):
            raise LossScaleError(
                "optax.MultiSteps is around loss_scaling at "
                f"{jax.tree_util.keystr(path) or 'the root'}, and its accumulated "
                "gradients are not finite. It keeps them forever, so no later step "
                "changes a parameter. Put loss_scaling around it, as in "
                "loss_scaling(optax.MultiSteps(optimizer, 4)), and restart from a "
                "state before the overflow."
            )


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            "check_loss_scale reads numbers on the host: call it between steps, "
            "outside of jit."
        ) from None


def _loss_scaling_states(tree: Any) -> list[tuple[str, LossScalingState]]:
    """Returns each ``LossScalingState`` in a tree with its path; at least one."""
    found = _find_states(tree, ())
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


def _find_states(
    tree: Any, prefix: tuple[Any, ...]
) -> list[tuple[tuple[Any, ...], LossScalingState]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_scaling_state)
    found: list[tuple[tuple[Any, ...], LossScalingState]] = []
    for path, leaf in leaves:
        if _is_scaling_state(leaf):
            inner_prefix = (*prefix, *path, jax.tree_util.GetAttrKey("inner_state"))
            found.append(((*prefix, *path), leaf))
            found += _find_states(leaf.inner_state, inner_prefix)
    return found


def _is_scaling_state(node: Any) -> bool:
    return isinstance(node, LossScalingState)


# ----------------------------------------------------------- what update is made of


def _fresh(loss_scale: LossScale) -> LossScale:
    # A copy, because the state may be donated and the scale used again.
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), loss_scale)


def _update_inner(
    inner: Any, grads: Any, inner_state: Any, params: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns the updates, and the inner state before and after, of the same types."""
    check_grads(grads, params)
    # A user may have put a Python number into it, such as a new learning rate.
    inner_state = strongly_typed(inner_state)
    try:
        updates, new_inner_state = inner.update(
            upcast_tree(grads),
            inner_state,
            _as_seen(kept_in_16_bits(inner_state), params),
            **upcast_tree(extra_args),
        )
    except (TypeError, ValueError) as error:
        _check_structure(grads, grads, params, error)
        error.add_note(
            "This error comes from the wrapped optimizer. If it needs more than "
            "gradients, such as the loss, pass that to update: "
            "optimizer.update(grads, opt_state, params, value=loss)."
        )
        raise
    if jax.tree.structure(grads) != jax.tree.structure(params):
        _check_structure(updates, grads, params)
    return updates, inner_state, _like(inner_state, new_inner_state)


def _counted(
    state: LossScalingState, grads_finite: jax.Array, inner_state: Any
) -> LossScalingState:
    """Returns the state after a step."""
    consecutive_skipped = jnp.where(grads_finite, 0, state.consecutive_skipped + 1)
    return LossScalingState(
        loss_scale=state.loss_scale.adjust(grads_finite),
        inner_state=inner_state,
        grads_finite=grads_finite,
        # Computed from the other count, so that a GPU computes both in one kernel.
        skipped=state.skipped + jnp.minimum(consecutive_skipped, 1),
        consecutive_skipped=consecutive_skipped,
    )


def _negative_zeros(update: Any) -> Any:
    """Returns updates that change no bit of a parameter: -0.0 + 0.0 would be 0.0."""
    zeros = jnp.zeros_like(update)
    return -zeros if is_inexact(update) else zeros


def check_grads(grads: Any, params: Any) -> None:
    """Raises a TypeError for ``(loss, grads)`` in place of gradients."""
    if params is None or not isinstance(grads, tuple) or len(grads) != 2:
        return
    expected = jax.tree.structure(params)
    parts = map(jax.tree.structure, grads)
    if jax.tree.structure(grads) != expected and expected in parts:
        raise TypeError(
            "Expected gradients, got a pair (loss, grads), as value_and_grad returns "
            "it. Unpack it: loss, grads = value_and_grad(...)(...), then call "
            "optimizer.update(grads, opt_state, params)."
        )


def _check_structure(
    updates: Any, grads: Any, params: Any, cause: Exception | None = None
) -> None:
    """Raises a TypeError for updates that do not match the parameters.

    Either the gradients or the updates match: the gradients of ``optax.lookahead`` are
    those of half of its parameters, and the update of ``optax.measure_with_ema`` is
    what it measures.
    """
    if params is None or jax.tree.structure(updates) == jax.tree.structure(params):
        return
    # A None in one tree may be anything in the other, as in Equinox.
    update_paths, param_paths = (
        {
            jax.tree_util.keystr(path) or "the root"
            for path, _ in jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
        }
        for tree in (updates, params)
    )
    differ = [
        f"no {name} at {', '.join(sorted(paths)[:3])}"
        for name, paths in (
            ("gradient", param_paths - update_paths),
            ("parameter", update_paths - param_paths),
        )
        if paths
    ]
    if differ:
        raise TypeError(
            "Expected gradients with the structure of the parameters, but there is "
            f"{' and '.join(differ)}: differentiate with respect to all "
            f"parameters.\nGradients: {jax.tree.structure(grads)}\nParameters: "
            f"{jax.tree.structure(params)}"
        ) from cause


# The inner optimizer sees 16-bit parameters in float32, except those that an inner
# wrapper rounds. The wrapper's state names them, also inside of a chain or a mask.


def _as_seen_by_init(inner: Any, params: Any) -> Any:
    if not any(map(is_16_bit, jax.tree.leaves(params))):
        return params
    kept = []
    # Only the structure of the state is needed, so no numbers are computed.
    jax.eval_shape(lambda: kept.append(kept_in_16_bits(inner.init(params))))
    return _as_seen(kept[0], params)


def _as_seen(kept: Any, params: Any) -> Any:
    if kept is None:
        return params
    if not kept <= {path for path, _ in jax.tree.leaves_with_path(params)}:
        return params  # A wrapper in between has changed their structure.
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if path in kept else upcast_tree(leaf), params
    )


def with_extra_args(inner: Any) -> Any:
    """Returns a transformation that accepts extra arguments."""
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    # Used unchanged: with_extra_args_support would treat it as a transformation without
    # extra arguments, and drop them.
    if isinstance(inner, optax.MultiSteps):
        return inner
    name = getattr(inner, "__name__", type(inner).__name__)
    hint = f" Did you mean {name}(...)?" if callable(inner) else ""
    raise TypeError(f"Expected an optax.GradientTransformation, got {name}.{hint}")


def _refuse_a_second_scale(inner_state: Any) -> None:
    """Raises a ValueError if an inner wrapper holds a loss scale, too."""

    def is_scaled(node: Any) -> bool:
        has_scale = isinstance(node, LossScalingState)
        return has_scale and not isinstance(node.loss_scale, NoOpLossScale)

    if any(map(is_scaled, jax.tree.leaves(inner_state, is_leaf=is_scaled))):
        raise ValueError(
            "loss_scaling is applied twice: the wrapped optimizer already holds a loss "
            "scale. Remove one of the two wrappers."
        )


def _finite_or_ones(grads_finite: jax.Array, tree: Tree) -> Tree:
    """Replaces floating-point leaves by ones on a non-finite step.

    Ones, not zeros: a normalizing optimizer would divide 0 by 0.
    """

    def replace(leaf: Any) -> Any:
        if not is_inexact(leaf):
            return leaf
        return jnp.where(grads_finite, leaf, jnp.ones_like(leaf))

    return jax.tree.map(replace, tree)


def strongly_typed(state: Tree) -> Tree:
    """Removes weak types from the numbers of an initial state."""

    def strengthen(leaf: Any) -> Any:
        if not is_number(leaf):
            return leaf
        array = jnp.asarray(leaf)
        return array.astype(array.dtype)

    return jax.tree.map(strengthen, state)


def _like(old_state: Any, new_state: Any) -> Any:
    """Returns the new inner state in the dtypes of the old one."""
    check_same_structure(old_state, new_state, "a skipped step cannot keep the old one")
    return jax.tree_util.tree_map_with_path(_leaf_like, old_state, new_state)


def check_same_structure(old_state: Any, new_state: Any, effect: str) -> None:
    """Raises a TypeError for an optimizer that changes the structure of its state."""
    old, new = map(jax.tree.structure, (old_state, new_state))
    if old != new:
        raise TypeError(
            "The wrapped optimizer changes the structure of its state in update (as "
            f"optax.monitor does), so {effect}. Wrap the optimizer without that part."
            f"\nBefore: {old}\nAfter: {new}"
        )


_OF_INTEGERS = (
    " If a parameter is an integer, exclude it with optax.masked: it has no gradient."
)


def _leaf_like(path: Any, before: Any, after: Any) -> Any:
    if not is_array(before) or not (is_array(after) or is_number(after)):
        return after
    after = jnp.asarray(after)
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    same_kind = any(is_number(before, k) and is_number(after, k) for k in kinds)
    same_type = after.dtype == before.dtype or same_kind
    if not same_type or after.shape != before.shape:
        raise TypeError(
            f"The wrapped optimizer changes its state at {jax.tree_util.keystr(path)} "
            f"from {type_of(before)} to {type_of(after)} in update, so a skipped step "
            "cannot keep the old state. Its init has to return the types that its "
            "update returns." + (_OF_INTEGERS if is_number(before, jnp.integer) else "")
        )
    return after.astype(before.dtype) if same_kind else after
