"""``build_train_step``: one training step made from the parts of this library.

The step is a function of pytrees. A user could write each part of it by hand. The
caller jits it, donates its state, and calls it in a loop.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.interpreter.api import autocast
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.dtypes import is_16_bit, is_array, is_inexact, upcast_tree
from jmp_lite.casting.losses import with_float32_loss
from jmp_lite.casting.type_of import type_of
from jmp_lite.frozen import find_frozen
from jmp_lite.jaxprs.sharding import as_varying, is_sharded
from jmp_lite.optimizers.compensated import CompensatedState
from jmp_lite.optimizers.master_weights import MasterWeightsState
from jmp_lite.optimizers.parameters import check_key
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.optimizers.updates import apply_updates
from jmp_lite.scaling.dynamic import default_loss_scale
from jmp_lite.scaling.finite import AxisName, all_finite, select_tree
from jmp_lite.scaling.gradients import (
    filled_in,
    parse_grad_dtype,
    rounded_gradients,
    value_and_grad,
)
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale, check_is_loss_scale
from jmp_lite.scaling.loss_scaling import loss_scaling, update_if
from jmp_lite.scaling.state import LossScalingState
from jmp_lite.scaling.wrapping import strongly_typed, with_extra_args


class TrainingState(NamedTuple):
    """Everything that changes during training.

    Attributes:
      params: the parameters.
      model_state: the state that the loss function takes and returns, such as batch
        statistics.
      opt_state: the optimizer's ``LossScalingState``.
      ema: the exponential moving average of the parameters, in float32, or None.
      rng: the key from which each step derives its keys, or None.
      step: the number of applied steps, an int32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> init, _ = jmp.build_train_step(lambda *args: args, optax.sgd(0.1), ema=0.9)
      >>> state = init({"w": jnp.ones(2)})
      >>> state.params["w"].dtype, state.ema["w"].dtype, state.step.dtype
      (dtype('float32'), dtype('float32'), dtype('int32'))
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
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    loss_scale: LossScale | None = None,
    accumulate: int = 1,
    batch_axes: Any = 0,
    ema: float | None = None,
    axis_name: AxisName | None = None,
    grad_dtype: DTypeLike = "float32",
) -> tuple[Callable[..., TrainingState], Callable[..., tuple[TrainingState, Any]]]:
    """Builds ``init`` and ``step`` for a training loop in mixed precision.

    A step whose loss or gradients are not finite is skipped. Some optimizers compute
    gradients by themselves, such as ``optax.contrib.sophia``. With them, a step is also
    skipped if its updates or the new optimizer state are not finite. A skipped step
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

        Its ``update`` also receives the extra arguments that some optimizers of optax
        need: the loss as ``value``, its gradients as ``grad``, and two functions,
        ``value_fn(params)`` (also as ``obj_fn``) and ``grad_fn(params, i)``. These
        compute the loss and its gradients for other parameters, with the same batch,
        model state and key. An ``update`` without ``**extra_args`` (that of
        ``optax.contrib.sam``) receives the arguments that it names; such an optimizer
        has to be the outermost one.
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
        the batch, like ``in_axes`` of ``jax.vmap``. Scalars are never split.
      ema: the decay of a moving average of the parameters, in [0, 1); None for no
        average.
      axis_name: the mapped axis (or axes) on which each device has a part of the batch.
        Gradients, loss, and the floats of the model state are averaged over it. Each
        device has a key of its own. All devices skip the same steps.
      grad_dtype: the dtype of the gradients that the optimizer receives: ``"float32"``,
        or ``"bfloat16"`` in half the memory. The optimizer computes in float32 all the
        same. Averages over micro-batches and devices are taken in float32 and rounded
        once.

    Returns:
      A pair of functions, ``init`` and ``step``.

      ``init(params, model_state=None, rng=None)`` returns a ``TrainingState``. Its
      arrays are copies, because the state may be donated.

      ``step(state, batch)`` returns ``(state, metrics)``. ``metrics`` is a dictionary:
      ``loss``, ``grad_norm``, ``grads_finite`` (whether loss and gradients are finite),
      ``loss_scale`` (the scale of this step), ``skipped`` (the number of skipped
      steps), and ``aux`` (stacked along a new first axis if there are several
      micro-batches).

    Raises:
      ValueError: ``ema`` is not in [0, 1), ``accumulate`` is not a whole number of at
        least 1, ``grad_dtype`` is another dtype, or the preset or dtype is unknown. In
        ``init``: the optimizer already carries a loss scale. In ``step``: a batch
        cannot be split into ``accumulate`` parts, or its arrays differ in size along
        the split axis.
      TypeError: ``loss_fn`` does not take four arguments, ``optimizer`` is not a
        transformation, ``loss_scale`` is not a ``LossScale``, or ``batch_axes`` holds
        something other than axes. In ``init``: a parameter is not a floating-point
        array, or ``rng`` is not a key. In ``step``: ``loss_fn`` does not return what is
        described above, or changes the structure, a shape or a dtype of the model
        state.
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
    if ema is not None and not 0 <= float(ema) < 1:
        raise ValueError(f"Expected a decay in [0, 1) for ema, got {ema}.")
    _check_loss_fn(loss_fn)
    _check_accumulation(accumulate, batch_axes)
    if loss_scale is not None:
        check_is_loss_scale(loss_scale)
    chosen, of_grads = choose_rules(rules, compute_dtype), parse_grad_dtype(grad_dtype)
    inner = with_extra_args(optimizer)

    def init(params: Any, model_state: Any = None, rng: Any = None) -> TrainingState:
        _check_trainable(params)
        if rng is not None:
            check_key(rng)
        wrapped = loss_scaling(optimizer, _scale_at_start(loss_scale, chosen()))
        return _fresh(
            TrainingState(
                params=params,
                model_state=model_state,
                opt_state=_init_optimizer(wrapped, inner, params),
                ema=None if ema is None else upcast_tree(params),
                rng=rng,
                step=jnp.zeros([], jnp.int32),
            )
        )

    # The loss in mixed precision: each use of a parameter casts it.
    @autocast(rules=rules, compute_dtype=compute_dtype)
    def low_loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        try:
            result = loss_fn(params, model_state, batch, rng)
        except Exception as error:
            if rng is None:
                error.add_note(_NO_KEY)
            raise
        _check_result(result, model_state)
        return result

    def step(state: TrainingState, batch: Any) -> tuple[TrainingState, Any]:
        if not isinstance(state, TrainingState):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "Expected the TrainingState that init returns, got "
                f"{type(state).__name__}: call step(init(params), batch)."
            )
        params, opt_state = state.params, state.opt_state
        # A skipped step does not change the key, but the next step draws new numbers.
        attempt = state.step + opt_state.skipped
        rng = None if state.rng is None else jax.random.fold_in(state.rng, attempt)
        if axis_name is not None:
            _check_is_mapped(axis_name)
            rng = None if rng is None else _key_of_this_device(rng, axis_name)

        frozen = find_frozen(inner, params, opt_state.inner_state)

        def evaluate(params: Any) -> Any:
            local = _of_this_device(params, axis_name)
            trained, loss_of_trained = _trained_part(low_loss_fn, local, frozen)
            # The loss is scaled in float32, and the gradients are unscaled in float32.
            grad_fn = value_and_grad(
                loss_of_trained, opt_state.loss_scale, has_aux=True
            )
            if accumulate > 1:
                grad_fn = _accumulated(grad_fn, int(accumulate), batch_axes, axis_name)
            (loss, (model_state, aux)), grads = grad_fn(
                trained, state.model_state, batch, rng
            )
            loss, model_state, grads = _averaged((loss, model_state, grads), axis_name)
            if any(frozen):
                grads = filled_in(grads, jax.tree.map(jnp.zeros_like, params))
            return loss, model_state, aux, rounded_gradients(grads, of_grads)

        loss, model_state, aux, grads = evaluate(params)
        value_fn, grad_fn = _at_other_params(evaluate, params)

        # One decision on overflow for the whole state.
        finite = all_finite((loss, grads))
        extra_args = {
            "value": upcast_tree(loss),
            "grad": grads,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": grad_fn,
        }
        updates, new_opt_state = update_if(
            finite, inner, grads, opt_state, params, _accepted(inner, extra_args)
        )
        # The optimizer may have computed further gradients, which overflow by
        # themselves.
        finite = new_opt_state.grads_finite
        # The scale multiplies the loss later, so it does not cause a non-finite loss.
        new_opt_state = new_opt_state._replace(
            loss_scale=select_tree(
                all_finite(loss), new_opt_state.loss_scale, opt_state.loss_scale
            )
        )
        new_params = apply_updates(params, updates)
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
            "grad_norm": optax.tree.norm(upcast_tree(grads)),
            "grads_finite": finite,
            "loss_scale": jnp.asarray(opt_state.loss_scale.loss_scale),
            "skipped": new_opt_state.skipped,
            "aux": aux,
        }
        return select_tree(finite, new_state, kept), metrics

    return init, step


def _scale_at_start(loss_scale: LossScale | None, rules: Rules) -> LossScale:
    dtype = np.dtype("float32") if rules.is_identity else np.dtype(rules.compute_dtype)
    needed = default_loss_scale(dtype)
    if loss_scale is None:
        return needed
    if isinstance(loss_scale, NoOpLossScale) and not isinstance(needed, NoOpLossScale):
        warnings.warn(
            f"The loss is computed in {dtype} without a loss scale: gradients below "
            f"{float(jnp.finfo(dtype).smallest_subnormal):.1e} become zero. Leave "
            "loss_scale out, or pass DynamicLossScale().",
            stacklevel=3,
        )
    return loss_scale


def _accumulated(
    grad_fn: Callable[..., Any], times: int, batch_axes: Any, axis_name: AxisName | None
) -> Callable[..., Any]:
    """Returns a gradient function that runs its batch in micro-batches."""

    def accumulated(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        axes = _split_axes(batch, batch_axes, times)
        parts = [
            _split(leaf, axis, times)
            for leaf, axis in zip(leaves, axes, strict=True)
            if axis is not None
        ]

        def one(carry: Any, now: Any) -> Any:
            model_state, total = carry
            i, parts = now
            given = iter(parts)
            merged = [
                leaf if axis is None else next(given)
                for leaf, axis in zip(leaves, axes, strict=True)
            ]
            key = None if rng is None else jax.random.fold_in(rng, i)
            (loss, (new_state, aux)), grads = grad_fn(
                params, model_state, jax.tree.unflatten(treedef, merged), key
            )
            new_state = strongly_typed(new_state)
            _check_types(model_state, new_state)
            total = jax.tree.map(jnp.add, total, grads)
            return (new_state, total), (upcast_tree(loss), aux)

        zeros = upcast_tree(jax.tree.map(jnp.zeros_like, params))
        # Of this device, like the results of the micro-batches.
        carry = _of_this_device((model_state, zeros), axis_name)
        (model_state, total), (losses, aux) = lax.scan(
            one, carry, (jnp.arange(times), parts)
        )
        grads = jax.tree.map(lambda x: x / times, total)
        return (jnp.mean(losses), (model_state, aux)), grads

    return accumulated


def _split_axes(batch: Any, batch_axes: Any, times: int) -> list[int | None]:
    """Returns the axis along which each leaf is split; None for a whole leaf."""
    axes: list[int | None] = []
    sizes: dict[str, int] = {}
    leaves = jax.tree.leaves_with_path(batch)
    for (path, leaf), axis in zip(leaves, _broadcast(batch_axes, batch), strict=True):
        if axis is None or not is_array(leaf) or not jnp.ndim(leaf):
            axes.append(None)
            continue
        where = f"batch{jax.tree_util.keystr(path)}"
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"The array at {where} has the shape {leaf.shape}, and no axis {axis} "
                "to split: correct batch_axes."
            )
        axes.append(axis % leaf.ndim)
        sizes[where] = leaf.shape[axis]
        if sizes[where] % times:
            _check_one_size(sizes, times)
            raise ValueError(
                f"Expected the size of axis {axis} to be a multiple of "
                f"accumulate={times} in every array of the batch, got {leaf.shape} at "
                f"{where}."
            )
    _check_one_size(sizes, times)
    return axes


def _broadcast(batch_axes: Any, batch: Any) -> list[int | None]:
    """Returns an axis for each leaf of a batch."""
    axes: list[int | None] = []

    def add(axis: int | None, part: Any) -> None:
        axes.extend([axis] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(add, batch_axes, batch, is_leaf=lambda node: node is None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Expected batch_axes to be an axis, None, or a pytree of them that is a "
            f"prefix of the batch, got {batch_axes!r} for a batch of the structure "
            f"{jax.tree.structure(batch)}."
        ) from error
    return axes


def _check_one_size(sizes: dict[str, int], times: int) -> None:
    first, *others = sizes or [""]
    for other in others:
        if sizes[other] != sizes[first]:
            raise ValueError(
                f"accumulate={times} splits the arrays of a batch into micro-batches "
                f"and expects the same size in all of them, got {sizes[first]} at "
                f"{first} and {sizes[other]} at {other}. If every micro-batch needs "
                "one of them whole, pass None for it in batch_axes, such as "
                f"batch_axes={{'x': 0, 'class_weights': None}}, or let loss_fn close "
                "over it."
            )


def _split(leaf: Any, axis: int, times: int) -> Any:
    shape, rows = leaf.shape, leaf.shape[axis] // times
    if is_sharded(leaf):
        devices = shape[axis] // jax.typeof(leaf).sharding.shard_shape(shape)[axis]
        if rows % devices:
            raise ValueError(
                f"Expected micro-batches that divide evenly among {devices} devices, "
                f"got {rows} rows: a batch of {shape[axis]} in {times} parts. Use a "
                "larger batch or a smaller accumulate."
            )
    # Strided: neighboring rows stay on one device, which has rows of each part. With
    # (times, rows), a part would be on few devices and be sent to all.
    parts = jnp.reshape(leaf, (*shape[:axis], rows, times, *shape[axis + 1 :]))
    return jnp.moveaxis(parts, axis + 1, 0)


def _check_types(before: Any, after: Any) -> None:
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        given, returned = type_of(old), type_of(new)
        if given != returned:
            where = f".model_state{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"loss_fn changes the type of the model state: it returns {returned} "
                f"at {where}, given {given}."
            )


def _key_of_this_device(rng: Any, axis_name: AxisName) -> Any:
    return jax.random.fold_in(rng, lax.axis_index(axis_name))


def _of_this_device(tree: Any, axis_name: AxisName | None) -> Any:
    """Returns a tree whose real and complex arrays belong to this device only.

    With type checks, ``shard_map`` would sum a gradient with respect to shared values
    over all devices, in the dtype that the gradient has at that point.
    """
    if axis_name is None:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else axis_name

    def local(x: Any) -> Any:
        return as_varying(x, names) if is_inexact(x) else x

    return jax.tree.map(local, tree)


def _averaged(tree: Any, axis_name: AxisName | None) -> Any:
    if axis_name is None:
        return tree

    def average(x: Any) -> Any:
        return lax.pmean(x, axis_name) if is_inexact(x) else x

    return jax.tree.map(average, tree)


def _at_other_params(
    evaluate: Callable[..., Any], params: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the loss and its gradient as functions of the parameters.

    Args:
      evaluate: ``evaluate(params) -> (loss, model_state, aux, grads)``.
      params: the parameters of this step; other parameters are cast to their dtypes.
    """

    def evaluate_like(others: Any) -> Any:
        cast = jax.tree.map(lambda new, old: new.astype(old.dtype), others, params)
        loss, _, _, grads = evaluate(cast)
        # An overflow makes all gradients NaN: clipping would hide an infinity.
        poison = jnp.where(all_finite(grads), 1.0, jnp.nan)
        grads = jax.tree.map(lambda g: g * poison.astype(g.dtype), upcast_tree(grads))
        return upcast_tree(loss), grads

    @jax.custom_jvp
    def loss_of(others: Any) -> Any:
        return evaluate_like(others)[0]

    # A caller that differentiates the loss gets these gradients: without a loss scale,
    # 16-bit ones would become zero.
    @loss_of.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        loss, grads = evaluate_like(*primals)
        terms = jax.tree.map(
            lambda g, t: jnp.sum(jnp.real(g * t.astype(g.dtype))).astype(loss.dtype),
            grads,
            *tangents,
        )
        return loss, sum(jax.tree.leaves(terms), jnp.zeros_like(loss))

    # optax's line searches refuse extra arguments that value_fn does not name.
    def value_fn(params: Any, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        del obj_fn, grad_fn
        return loss_of(params)

    def grad_fn(params: Any, i: Any = 0) -> Any:
        del i  # The step number of sam: all steps use this batch.
        return evaluate_like(params)[1]

    return value_fn, grad_fn


def _accepted(optimizer: Any, extra_args: dict[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments that an optimizer's update accepts."""
    accepted = inspect.signature(optimizer.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        return extra_args
    return {name: arg for name, arg in extra_args.items() if name in accepted}


def _trained_part(
    loss_fn: Callable[..., Any], params: Any, frozen: list[bool]
) -> tuple[Any, Callable[..., Any]]:
    """Returns the parameters that are not frozen, and the loss as their function."""
    if not any(frozen):
        return params, loss_fn
    leaves, treedef = jax.tree.flatten(params)
    trained = [
        None if is_frozen else leaf
        for leaf, is_frozen in zip(leaves, frozen, strict=True)
    ]

    def loss_of_trained(trained: Any, *others: Any) -> Any:
        return with_float32_loss(loss_fn)(filled_in(trained, params), *others)

    return jax.tree.unflatten(treedef, trained), loss_of_trained


def _init_optimizer(wrapped: Any, inner: Any, params: Any) -> LossScalingState:
    opt_state = wrapped.init(params)
    _warn_of_rounding(
        params, opt_state, find_frozen(inner, params, opt_state.inner_state)
    )

    def is_state(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    if any(map(is_state, jax.tree.leaves(opt_state.inner_state, is_leaf=is_state))):
        raise ValueError(
            "The optimizer already carries a loss scale: pass it without "
            "loss_scaling or skip_nonfinite, and pass the scale as loss_scale=..."
        )
    return opt_state


_REMEMBERING = (MasterWeightsState, CompensatedState, StochasticRoundingState)


def _warn_of_rounding(params: Any, opt_state: Any, frozen: list[bool]) -> None:
    """Warns if 16-bit parameters would lose small updates."""

    def remembers(node: Any) -> bool:
        return isinstance(node, _REMEMBERING)

    narrow = [
        f"{leaf.dtype} at params{jax.tree_util.keystr(path)}"
        for (path, leaf), is_frozen in zip(
            jax.tree.leaves_with_path(params), frozen, strict=True
        )
        if is_16_bit(leaf) and not is_frozen
    ]
    nodes = jax.tree.leaves(opt_state, is_leaf=remembers)
    if narrow and not any(map(remembers, nodes)):
        warnings.warn(
            f"Parameters have 16 bits ({narrow[0]}): an update below some thousandth "
            "of a parameter is lost. Keep them in float32, or wrap the optimizer in "
            "master_weights, compensated or stochastic_rounding.",
            stacklevel=4,
        )


def _fresh(state: TrainingState) -> TrainingState:
    """Copies all arrays: two of them may be one object, or belong to the caller."""

    def copy(leaf: Any) -> Any:
        return jnp.array(leaf, copy=True) if is_array(leaf) else leaf

    return jax.tree.map(copy, strongly_typed(state))


def _moving_average(decay: float, average: Any, params: Any) -> Any:
    # In float32: in 16 bits it would stall when (1 - decay) rounds away.
    def mix(old: Any, new: Any) -> Any:
        return decay * old + (1 - decay) * new.astype(old.dtype)

    return jax.tree.map(mix, average, params)


# --------------------------------------------------------------------------- checks


def _check_loss_fn(loss_fn: Any) -> None:
    check_convertible(loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:
        return  # Written in C: its signature is unknown.
    try:
        signature.bind(*["params", "model_state", "batch", "rng"])
    except TypeError:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            "Expected loss_fn(params, model_state, batch, rng) -> (loss, "
            f"(model_state, aux)), got {name}{signature}. Take all four arguments, "
            "even unused ones. Put other inputs in batch, which may be any pytree."
        ) from None


def _check_accumulation(accumulate: Any, batch_axes: Any) -> None:
    if not isinstance(accumulate, int | np.integer) or accumulate < 1:
        is_whole = isinstance(accumulate, float) and accumulate.is_integer()
        cure = f": pass {int(accumulate)}" if is_whole and accumulate >= 1 else ""
        raise ValueError(
            "Expected a whole number of at least 1 for accumulate, got "
            f"{accumulate!r}{cure}."
        )
    for axis in jax.tree.leaves(batch_axes):
        if not isinstance(axis, int | np.integer):
            raise TypeError(
                "Expected batch_axes to be an axis, None, or a pytree of them, got "
                f"{axis!r} in {batch_axes!r}."
            )


def _check_trainable(params: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not is_inexact(leaf):
            raise TypeError(
                f"Expected floating-point parameters, got {type_of(leaf)} at "
                f"params{jax.tree_util.keystr(path)}, which has no gradient. Put such "
                "an array in the model state: init(params, model_state). Let loss_fn "
                "close over other objects. nnx.split and equinox.partition separate "
                "them."
            )


def _check_is_mapped(axis_name: AxisName) -> None:
    try:
        lax.axis_index(axis_name)
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call step inside "
            "jax.shard_map or jax.vmap with that axis. In a jit with sharded "
            "arguments, leave axis_name out."
        ) from error


_NO_KEY = (
    "rng is None in loss_fn, because init got no key. If loss_fn needs one, call "
    "init(params, model_state, jax.random.key(0))."
)


def _check_result(result: Any, model_state: Any) -> None:
    def is_pair(node: Any) -> bool:
        return isinstance(node, tuple | list) and len(node) == 2

    if not (is_pair(result) and is_pair(result[1])):
        raise TypeError(
            "Expected loss_fn to return (loss, (model_state, aux)), with None for a "
            f"missing part, got {_in_words(result)}."
        )
    before, after = jax.tree.structure(model_state), jax.tree.structure(result[1][0])
    if before != after:
        raise TypeError(
            "loss_fn changes the structure of the model state: pass the initial "
            f"model state to init(params, model_state).\nGiven: {before}\nReturned: "
            f"{after}"
        )


def _in_words(result: Any) -> str:
    if result is None:
        return "None"
    name = f"{result.dtype} array" if is_array(result) else type(result).__name__
    if isinstance(result, tuple | list):
        name += f" of {len(result)} ({', '.join(map(_in_words, result))})"
    return f"an {name}" if name[0] in "aeio" else f"a {name}"
