"""The train step in mixed precision, with a loss scale, micro-batches and an EMA."""

import dataclasses
from collections.abc import Callable
from typing import Never, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.presets import choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.dtypes import is_number, upcast_tree
from jmp_lite.casting.types import (
    Array,
    AxisName,
    Dtype,
    Key,
    LossFn,
    Optimizer,
    OptimizerExtraArgs,
    PyTree,
    Scalar,
)
from jmp_lite.mutables import refusing_modules
from jmp_lite.optimizers.rounding import apply_updates, check_key
from jmp_lite.scaling.loss_scale import LossScale, check_is_loss_scale
from jmp_lite.scaling.skipping import (
    LossScalingState,
    all_finite,
    judged,
    loss_scaling,
    select_tree,
    update_if,
)
from jmp_lite.scaling.value_and_grad import (
    build_value_and_grad,
    filled_in,
    parse_grad_dtype,
    rounded_gradients,
)
from jmp_lite.scaling.wrapping import (
    check_classes,
    copied,
    strongly_typed,
    with_extra_args,
)
from jmp_lite.training.gradients import (
    GradFn,
    WithAux,
    accumulated_gradients,
    averaged,
    check_accumulation,
    check_axes,
    check_loss_fn,
    localize,
    lower_loss,
    scale_at_start,
)
from jmp_lite.training.state import (
    Init,
    Metrics,
    Step,
    TrainingState,
    accepted_arguments,
    check_moves,
    check_trainable,
    find_frozen,
    init_optimizer,
    moving_average,
    steps_that_move,
    without,
)

Batch = TypeVar("Batch")


def build_train_step(
    loss_fn: Callable[
        [PyTree, PyTree, Batch, PyTree], tuple[Scalar, tuple[PyTree, PyTree]]
    ],
    optimizer: Optimizer,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    loss_scale: LossScale | None = None,
    accumulate: int = 1,
    batch_axes: PyTree = 0,
    ema: float | None = None,
    axis_name: AxisName | None = None,
    grad_dtype: DTypeLike = "float32",
) -> tuple[Init, Step[Batch]]:
    """Builds ``init`` and ``step`` for a training loop in mixed precision.

    A step whose loss or gradients are not finite is skipped. A skipped step
    changes only the loss scale and the counts of skipped steps. Parameters, optimizer
    state, schedules, model state, EMA and step count stay unchanged, bit for bit.

    The loss scale backs off if gradients overflow. It stays unchanged if the loss
    itself is not finite, because a smaller scale would not help.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, (model_state,
        aux))``, written in float32. Use None for a part that you do not need.
      optimizer: an optax transformation without ``loss_scaling``, which this function
        adds. For 16-bit parameters, wrap it in ``master_weights``, ``compensated`` or
        ``stochastic_rounding``.

        Parameters that it never updates, such as those that ``optax.partition`` gives
        to ``optax.set_to_zero``, have no gradient: none is computed, and
        ``grad_norm`` is that of the others.

        Its ``update`` also receives the extra arguments that some optimizers need: the
        loss as ``value`` and ``loss``, its gradients as ``grad``, and their norm as
        ``grad_norm``. Further arguments are those of ``step``. An ``update`` without
        ``**extra_args`` receives the arguments that it names. An optimizer that
        evaluates the loss by itself, such as ``optax.lbfgs``, is refused.
      rules: the precision of the loss, as for ``autocast``: the name of a preset
        (``"mixed"``, MindSpore's ``"O0"`` to ``"O3"``, ...) or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      loss_scale: the initial loss scale. None means ``DynamicLossScale()`` for float16,
        and no scale otherwise.
      accumulate: the number of micro-batches that a batch is split into. Micro-batch
        ``i`` gets the rows ``i``, ``i + accumulate``, and so on, so that each device of
        a sharded batch has a part of every micro-batch. Gradients are averaged in
        float32. The model state passes from one micro-batch to the next, and each has a
        key of its own. One overflow skips the whole step.
      batch_axes: the axis along which ``accumulate`` splits the arrays of a batch. None
        gives an array to every micro-batch whole. It is one axis, or a pytree prefix of
        the batch, like ``in_axes`` of ``jax.vmap``. Arrays under one entry have one
        size along it, and those under another entry may have another: with
        ``{"inner": 0, "boundary": 0}`` each micro-batch gets its share of both. Scalars
        are never split.
      ema: the decay of a moving average of the parameters, in [0, 1); None for no
        average. It is that of the parameters after each step that moves them (with
        ``optax.MultiSteps``, one in several): those before the first have no part in
        it.
      axis_name: the mapped axis (or axes) on which each device has a part of the batch.
        Gradients, loss, and the floats of the model state are averaged over it. Each
        device has a key of its own. All devices skip the same steps. ``()`` in
        ``shard_map`` says that the axes split no batch.
      grad_dtype: the dtype of the gradients that the optimizer receives: ``"float32"``,
        or ``"bfloat16"`` in half the memory. The optimizer computes in float32 all the
        same. Averages over micro-batches and devices are taken in float32 and rounded
        once.

    Returns:
      A pair of functions, ``init`` and ``step``.

      ``init(params, model_state=None, rng=None)`` returns a ``TrainingState``. Its
      arrays are copies, because the state may be donated.

      ``step(state, batch, **extra_args)`` returns ``(state, metrics)``; ``extra_args``
      are for the optimizer's ``update``. ``metrics`` is a dictionary:
      ``loss``, ``grad_norm``, ``grads_finite`` (whether loss and gradients are finite),
      ``loss_scale`` (the scale of this step), ``skipped`` (the number of skipped
      steps), and ``aux`` (stacked along a new first axis if there are several
      micro-batches).

    Raises:
      ValueError: ``ema`` is not in [0, 1), ``accumulate`` is not a whole number of at
        least 1, ``grad_dtype`` is another dtype, or the preset or dtype is unknown. In
        ``init``: the optimizer already carries a loss scale. In ``step``: a batch
        cannot be split into ``accumulate`` parts, or arrays under one entry of
        ``batch_axes`` differ in size along the split axis.
      TypeError: ``loss_fn`` does not take four arguments, ``optimizer`` is not a
        transformation, ``loss_scale`` is not a ``LossScale``, or ``batch_axes`` holds
        something other than axes. In ``init``: a parameter is not a floating-point
        array, or ``rng`` is not a key. In ``step``: ``loss_fn`` does not return what is
        described above, or changes the structure, a shape or a dtype of the model
        state; or an extra argument has a name of those above.
      NameError: in ``step``, ``axis_name`` is not a mapped axis.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; the seven steps of
    MindSpore's mixed-precision training.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> def loss_fn(params, model_state, batch, rng):
      ...     return jnp.mean((batch @ params["w"]) ** 2), (model_state, None)
      >>> init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1))
      >>> state = init({"w": jnp.ones(3)})
      >>> state, metrics = jax.jit(step, donate_argnums=0)(state, jnp.ones((8, 3)))
      >>> metrics["loss"], state.step
      (Array(9., dtype=float32), Array(1, dtype=int32))
    """
    is_real = is_number(ema, jnp.floating) or is_number(ema, jnp.integer)
    if ema is not None and not (is_real and 0 <= float(ema) < 1):
        raise ValueError(f"Expected a decay in [0, 1) for ema, got {ema!r}.")
    check_loss_fn(loss_fn)
    check_accumulation(accumulate, batch_axes)
    if loss_scale is not None:
        check_is_loss_scale(loss_scale)
    chosen = choose_rules(rules, compute_dtype)
    training = _Training(
        loss_fn=lower_loss(loss_fn, chosen, loss_scale),
        optimizer=with_extra_args(optimizer),
        rules=chosen,
        loss_scale=loss_scale,
        times=int(accumulate),
        batch_axes=batch_axes,
        ema=ema,
        axis_name=axis_name,
        grad_dtype=parse_grad_dtype(grad_dtype),
    )
    return training.init, training.step


# Compared by identity: ``batch_axes`` may be a pytree that has no hash.
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Training:
    """The settings of a training; see ``build_train_step``.

    Attributes:
      loss_fn: the loss, in mixed precision.
      optimizer: the optimizer, which accepts extra arguments.
      rules: returns the rules of the loss.
      times: the number of micro-batches.
    """

    loss_fn: LossFn
    optimizer: OptimizerExtraArgs
    rules: Callable[[], Rules]
    loss_scale: LossScale | None
    times: int
    batch_axes: PyTree
    ema: float | None
    axis_name: AxisName | None
    grad_dtype: Dtype

    def init(
        self, params: PyTree, model_state: PyTree = None, rng: Key | None = None
    ) -> TrainingState:
        """Returns the state before the first step; its arrays are copies."""
        check_trainable(params)
        if rng is not None:
            check_key(rng)
        scale = scale_at_start(self.loss_scale, self.rules())
        wrapped = loss_scaling(self.optimizer, scale)
        opt_state = init_optimizer(wrapped, self.optimizer, params)
        if self.ema is not None:
            check_moves(opt_state)
        state = TrainingState(
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=None if self.ema is None else upcast_tree(params),
            rng=rng,
            step=jnp.zeros([], jnp.int32),
        )
        # Two arrays may be one object, or belong to the caller.
        return copied(strongly_typed(state))

    def step(
        self, state: TrainingState, batch: PyTree, **extra_args: PyTree
    ) -> tuple[TrainingState, Metrics]:
        """Returns the state after a step, and its metrics."""
        if not isinstance(state, TrainingState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "Expected the TrainingState that init returns, got "
                f"{type(state).__name__}: call step(init(params), batch)."
            )
        check_classes(state.opt_state, "the opt_state that init returns")
        params, opt_state = state.params, state.opt_state
        frozen = find_frozen(self.optimizer, params, opt_state.inner_state)
        rng = self._key(state)

        loss, model_state, aux, grads = self._evaluate(state, batch, rng, frozen)
        grad_norm = optax.tree.norm(upcast_tree(grads))
        given = {
            "value": upcast_tree(loss),
            "loss": upcast_tree(loss),
            "grad": grads,
            "grad_norm": grad_norm,
            # Line searches, sophia and sam call one of them, and are refused.
            **dict.fromkeys(("value_fn", "obj_fn", "grad_fn"), _refuse_to_evaluate),
        }
        accepted = accepted_arguments(self.optimizer, given, extra_args)
        updates, new_opt_state = self._update(loss, grads, opt_state, params, accepted)
        # A sum with zero would change the bits of a negative zero.
        new_params = apply_updates(params, without(updates, frozen))
        average = None
        if self.ema is not None:
            moved, n = steps_that_move(opt_state, new_opt_state, state.step + 1)
            average = moving_average(self.ema, state.ema, new_params, n)
            if moved is not None:
                average = select_tree(moved, average, state.ema)
        kept = state._replace(opt_state=new_opt_state)
        new_state = kept._replace(
            params=new_params, model_state=model_state, ema=average, step=state.step + 1
        )
        finite = new_opt_state.grads_finite
        metrics: Metrics = {
            "loss": upcast_tree(loss),
            "grad_norm": grad_norm,
            "grads_finite": finite,
            "loss_scale": jnp.asarray(opt_state.loss_scale.loss_scale),
            "skipped": new_opt_state.skipped,
            "aux": aux,
        }
        return select_tree(finite, new_state, kept), metrics

    def _key(self, state: TrainingState) -> Key | None:
        """Returns the key of this step, on this device."""
        check_axes(self.axis_name)
        if state.rng is None:
            return None
        # A skipped step does not change the key, but the next step draws new numbers.
        attempt = state.step + state.opt_state.skipped
        rng = jax.random.fold_in(state.rng, attempt)
        if not self.axis_name:
            return rng
        return jax.random.fold_in(rng, lax.axis_index(self.axis_name))

    def _evaluate(
        self, state: TrainingState, batch: PyTree, rng: Key | None, frozen: list[bool]
    ) -> tuple[Array, PyTree, PyTree, PyTree]:
        """Returns the loss, the new model state, ``aux``, and the gradients."""
        local = localize(state.params, self.axis_name)

        def of_trained(fun: LossFn, has_aux: bool) -> LossFn:
            def fun_of_trained(trained: PyTree, *others: PyTree) -> WithAux:
                return fun(filled_in(trained, local), *others)

            return jax.value_and_grad(fun_of_trained, has_aux=has_aux)

        # The loss is scaled in float32, and the gradients are unscaled in float32.
        scale = state.opt_state.loss_scale
        grad_fn: GradFn = refusing_modules(
            build_value_and_grad(of_trained, self.loss_fn, scale, True, "float32"),
            "jmp_lite.nnx.value_and_grad",
        )
        if self.times > 1:
            grad_fn = accumulated_gradients(
                grad_fn, self.times, self.batch_axes, self.axis_name
            )
        (loss, (model_state, aux)), grads = grad_fn(
            without(local, frozen), state.model_state, batch, rng
        )
        on_device = loss, model_state, grads
        loss, model_state, grads = averaged(on_device, self.axis_name)
        if any(frozen):
            grads = filled_in(grads, jax.tree.map(jnp.zeros_like, state.params))
        return loss, model_state, aux, rounded_gradients(grads, self.grad_dtype)

    def _update(
        self,
        loss: Array,
        grads: PyTree,
        opt_state: LossScalingState,
        params: PyTree,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, LossScalingState]:
        """Returns the updates, and the optimizer's state after them.

        ``grads_finite`` of the state decides whether the step is skipped. It covers the
        loss and the gradients.
        """
        found = judged(grads)
        found = found._replace(finite=found.finite & all_finite(loss))
        updates, new = update_if(
            found, self.optimizer, grads, opt_state, params, extra_args
        )
        # The scale multiplies the loss later, so it does not cause a non-finite loss.
        scale = select_tree(all_finite(loss), new.loss_scale, opt_state.loss_scale)
        return updates, new._replace(loss_scale=scale)


def _refuse_to_evaluate(
    params: PyTree,
    value_fn: PyTree = None,
    obj_fn: PyTree = None,
    grad_fn: PyTree = None,
    loss: PyTree = None,
    grad_norm: PyTree = None,
) -> Never:
    """Raises a TypeError. optax's line searches ask for the names of all arguments."""
    raise TypeError(_EVALUATES)


_EVALUATES = """\
This optimizer evaluates the loss or its gradient by itself, and a step computes them \
once, for its parameters. Write the step, for tx = jmp_lite.loss_scaling(optimizer):
  fun = jmp_lite.autocast(lambda params: loss(params, batch))
  value, grads = jmp_lite.value_and_grad(fun, loss_scale=state.loss_scale)(params)
  updates, state = tx.update(
      grads, state, params, value=value, grad=grads, value_fn=fun)
grad_fn is lambda params, i: jmp_lite.grad(fun, loss_scale=state.loss_scale)(params)."""
