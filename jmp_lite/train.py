"""One train step out of all the parts, in the order of the paper.

The law of this file: a function over pytrees. ``build_train_step`` puts together what
the rest of the library offers, and nothing a user could not write by hand; the caller
jits it, donates to it and loops over it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.dtypes import is_array, upcast_tree
from jmp_lite.scaling.gradients import value_and_grad
from jmp_lite.scaling.loss_scale import (
    LossScale,
    NoOpLossScale,
    all_finite,
    select_tree,
)
from jmp_lite.scaling.transforms import (
    LossScalingState,
    loss_scaling,
    strongly_typed,
    update_if,
    with_extra_args,
)


class TrainingState(NamedTuple):
    """All that changes during training.

    Attributes:
      params: the parameters.
      model_state: what the loss function returns and gets back, such as batch
        statistics.
      opt_state: the optimizer's ``LossScalingState``.
      ema: the exponential moving average of the parameters, in float32, or None.
      rng: the key that the keys of all steps are derived from, or None.
      step: how many steps were applied, an int32 scalar.

    Example:
      >>> init, _ = build_train_step(lambda *args: args, optax.sgd(0.1), ema=0.9)
      >>> state = init({"w": jnp.ones(2, jnp.bfloat16)})
      >>> state.params["w"].dtype, state.ema["w"].dtype, state.step.dtype
      (dtype(bfloat16), dtype('float32'), dtype('int32'))
    """

    params: Any
    model_state: Any
    opt_state: LossScalingState
    ema: Any
    rng: Any
    step: Any


def build_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    loss_scale: LossScale | None = None,
    ema: float | None = None,
) -> tuple[Callable[..., TrainingState], Callable[..., tuple[TrainingState, Any]]]:
    """Builds ``init`` and ``step`` of a training loop.

    A step whose loss or gradients are not finite changes nothing but the loss scale and
    the counts of skipped steps: parameters, optimizer state, schedules, model state,
    EMA and step count stay as they were, bit for bit.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, (model_state,
        aux))``. It casts what it computes in 16 bits.
      optimizer: an optax transformation, without ``loss_scaling``: it is wrapped here.
        It is also given the loss as ``value``, which some optimizers ask for.
      loss_scale: the loss scale to start from; None for no scaling, which suits
        bfloat16 and float32. For float16 pass ``DynamicLossScale()``.
      ema: the decay of a moving average of the parameters; None for none.

    Returns:
      ``init(params, model_state=None, rng=None) -> TrainingState``, whose arrays are
      copies, because the state may be donated, and
      ``step(state, batch) -> (state, metrics)``. ``metrics`` is a dictionary of
      ``loss``, ``grad_norm``, ``grads_finite`` (of the loss too), ``loss_scale`` (that
      the step used), ``skipped`` (in all) and ``aux``.

    Raises:
      ValueError: ``ema`` is not in [0, 1); in ``init``, the optimizer carries a loss
        scale already.
      TypeError: ``optimizer`` is no transformation or ``loss_scale`` no ``LossScale``;
        in ``step``, ``loss_fn`` returned something else than said above, or a model
        state of another structure, shape or dtype than it was given.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; the seven steps of
    MindSpore's mixed-precision training.

    Example:
      >>> def loss_fn(params, model_state, batch, rng):
      ...     return jnp.mean((batch @ params["w"]) ** 2), (model_state, None)
      >>> init, step = build_train_step(loss_fn, optax.sgd(0.1))
      >>> state = init({"w": jnp.ones(3)})
      >>> state, metrics = jax.jit(step, donate_argnums=0)(state, jnp.ones((8, 3)))
      >>> metrics["loss"], state.step
      (Array(9., dtype=float32), Array(1, dtype=int32))
    """
    if ema is not None and not 0 <= float(ema) < 1:
        raise ValueError(f"Expected a decay in [0, 1) for ema, got {ema}.")
    scale_at_start = NoOpLossScale() if loss_scale is None else loss_scale
    inner = with_extra_args(optimizer)
    wrapped = loss_scaling(optimizer, scale_at_start)

    def init(params: Any, model_state: Any = None, rng: Any = None) -> TrainingState:
        return _fresh(
            TrainingState(
                params=params,
                model_state=model_state,
                opt_state=_init_optimizer(wrapped, params),
                ema=None if ema is None else upcast_tree(params),
                rng=rng,
                step=jnp.zeros([], jnp.int32),
            )
        )

    def checked_loss_fn(params: Any, model_state: Any, *args: Any) -> Any:
        result = loss_fn(params, model_state, *args)
        _check_result(result, model_state)
        return result

    def step(state: TrainingState, batch: Any) -> tuple[TrainingState, Any]:
        if not isinstance(state, TrainingState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Expected the TrainingState of init, got {type(state).__name__}."
            )
        params, opt_state = state.params, state.opt_state
        # A skipped step leaves the key alone too, yet the next one draws anew.
        attempt = state.step + opt_state.skipped
        rng = None if state.rng is None else jax.random.fold_in(state.rng, attempt)

        # The loss in float32, scaled; the gradients unscaled, in float32.
        (loss, (model_state, aux)), grads = value_and_grad(
            checked_loss_fn, opt_state.loss_scale, has_aux=True
        )(params, state.model_state, batch, rng)

        # Overflow or not: one decision for all that is state.
        finite = all_finite((loss, grads))
        updates, new_opt_state = update_if(
            finite, inner, grads, opt_state, params, value=upcast_tree(loss)
        )
        new_params = _apply_updates(params, updates)
        new_state = TrainingState(
            params=new_params,
            model_state=model_state,
            opt_state=new_opt_state,
            ema=None if ema is None else _moving_average(ema, state.ema, new_params),
            rng=state.rng,
            step=state.step + 1,
        )
        kept = state._replace(opt_state=new_opt_state)

        metrics = {
            "loss": upcast_tree(loss),
            "grad_norm": optax.tree.norm(grads),
            "grads_finite": finite,
            "loss_scale": jnp.asarray(opt_state.loss_scale.loss_scale),
            "skipped": new_opt_state.skipped,
            "aux": aux,
        }
        return select_tree(finite, new_state, kept), metrics

    return init, step


def _init_optimizer(wrapped: Any, params: Any) -> LossScalingState:
    opt_state = wrapped.init(params)

    def is_state(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    if any(map(is_state, jax.tree.leaves(opt_state.inner_state, is_leaf=is_state))):
        raise ValueError(
            "The optimizer carries a loss scale already: pass it without loss_scaling "
            "or skip_nonfinite, and the scale as loss_scale=..."
        )
    return opt_state


def _fresh(state: TrainingState) -> TrainingState:
    """Copies all arrays, which may be one and the same, or somebody else's."""

    def copy(leaf: Any) -> Any:
        return jnp.array(leaf, copy=True) if is_array(leaf) else leaf

    return jax.tree.map(copy, strongly_typed(state))


def _check_result(result: Any, model_state: Any) -> None:
    def is_pair(node: Any) -> bool:
        return isinstance(node, tuple | list) and len(node) == 2

    if not (is_pair(result) and is_pair(result[1])):
        raise TypeError(
            "Expected loss_fn to return (loss, (model_state, aux)), with None for what "
            f"there is none of, got {jax.tree.structure(result)}."
        )
    before, after = jax.tree.structure(model_state), jax.tree.structure(result[1][0])
    if before != after:
        raise TypeError(
            "loss_fn was given one structure of model state and returned another: "
            "pass what it starts from to init(params, model_state).\n"
            f"Given: {before}\nReturned: {after}"
        )


def _apply_updates(params: Any, updates: Any) -> Any:
    # The sum in float32, rounded once to the parameters' dtype.
    summed = optax.apply_updates(upcast_tree(params), updates)
    return jax.tree.map(lambda old, new: new.astype(old.dtype), params, summed)


def _moving_average(decay: float, average: Any, params: Any) -> Any:
    # In float32: with 16 bits it would stall where (1 - decay) rounds away.
    def mix(old: Any, new: Any) -> Any:
        return decay * old + (1 - decay) * new.astype(old.dtype)

    return jax.tree.map(mix, average, params)
