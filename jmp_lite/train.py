"""One train step out of all the parts, in the order of the paper.

The law of this file: a function over pytrees. ``build_train_step`` puts together what
the rest of the library offers, and nothing a user could not write by hand; the caller
jits it, donates to it and loops over it.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_lite.autocasting.compat import as_varying
from jmp_lite.autocasting.door import choose_rules
from jmp_lite.autocasting.interpreter import autocast
from jmp_lite.autocasting.rules import Rules
from jmp_lite.casting.dtypes import is_16_bit, is_array, is_inexact, upcast_tree
from jmp_lite.scaling.gradients import value_and_grad
from jmp_lite.scaling.loss_scale import (
    AxisName,
    LossScale,
    NoOpLossScale,
    all_finite,
    check_is_loss_scale,
    default_loss_scale,
    select_tree,
    type_of,
)
from jmp_lite.scaling.masters import (
    CompensatedState,
    MasterWeightsState,
    StochasticRoundingState,
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
    loss_scale: LossScale | None = None,
    accumulate: int = 1,
    ema: float | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Callable[..., TrainingState], Callable[..., tuple[TrainingState, Any]]]:
    """Builds ``init`` and ``step`` of a training loop.

    A step whose loss or gradients are not finite changes nothing but the loss scale and
    the counts of skipped steps: parameters, optimizer state, schedules, model state,
    EMA and step count stay as they were, bit for bit.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, (model_state,
        aux))``, with None for what there is none of. It is written in float32.
      optimizer: an optax transformation, without ``loss_scaling``: it is wrapped here.
        It is also given the loss as ``value``, which some optimizers ask for. For
        parameters of 16 bits: ``master_weights``, ``compensated`` or
        ``stochastic_rounding`` of one.
      rules: in which precision the loss is computed, as for ``autocast``: the name of a
        preset (``"mixed"``, MindSpore's ``"O0"`` to ``"O3"``, ...) or a ``Rules``;
        ``get_rules("mixed", "float16")`` for another compute dtype.
      loss_scale: the loss scale to start from; None for what the compute dtype needs:
        ``DynamicLossScale()`` for float16, else none.
      accumulate: into how many micro-batches a batch is split, along the first axis of
        its arrays. Their gradients are averaged in float32; the model state goes from
        one to the next, each gets a key of its own, and one decision is taken for all.
      ema: the decay of a moving average of the parameters; None for none.
      axis_name: the mapped axis (or axes) over which each device has a part of the
        batch: gradients, loss and the floats of the model state are averaged over it,
        each device gets a key of its own, and all skip where one has to.

    Returns:
      ``init(params, model_state=None, rng=None) -> TrainingState``, whose arrays are
      copies, because the state may be donated, and
      ``step(state, batch) -> (state, metrics)``. ``metrics`` is a dictionary of
      ``loss``, ``grad_norm``, ``grads_finite`` (of the loss too), ``loss_scale`` (that
      the step used), ``skipped`` (in all) and ``aux`` (of each micro-batch, stacked up,
      where there are several).

    Raises:
      ValueError: ``ema`` is not in [0, 1), ``accumulate`` is less than 1, or there is
        no preset of such a name; in ``init``, the optimizer carries a loss scale
        already; in ``step``, a batch cannot be split into ``accumulate`` parts.
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
    is_whole = isinstance(accumulate, int | np.integer)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or accumulate < 1:
        raise ValueError(f"Expected accumulate to be 1 or more, got {accumulate!r}.")
    if loss_scale is not None:
        check_is_loss_scale(loss_scale)
    chosen = choose_rules(rules, None)
    inner = with_extra_args(optimizer)

    def init(params: Any, model_state: Any = None, rng: Any = None) -> TrainingState:
        wrapped = loss_scaling(optimizer, _scale_at_start(loss_scale, chosen()))
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

    # The loss in mixed precision: parameters are float32, and cast where they are used.
    @autocast(rules=rules)
    def low_loss_fn(params: Any, model_state: Any, *args: Any) -> Any:
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
        if axis_name is not None:
            rng = None if rng is None else _key_of_this_device(rng, axis_name)

        # The loss in float32, scaled; the gradients unscaled, in float32.
        grad_fn = value_and_grad(low_loss_fn, opt_state.loss_scale, has_aux=True)
        if accumulate > 1:
            grad_fn = _accumulated(grad_fn, int(accumulate))
        local = params if axis_name is None else _of_this_device(params, axis_name)
        (loss, (model_state, aux)), grads = grad_fn(
            local, state.model_state, batch, rng
        )
        if axis_name is not None:
            loss, model_state, grads = _averaged((loss, model_state, grads), axis_name)

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


def _scale_at_start(loss_scale: LossScale | None, rules: Rules) -> LossScale:
    dtype = np.dtype("float32") if rules.is_identity else np.dtype(rules.compute_dtype)
    needed = default_loss_scale(dtype)
    if loss_scale is None:
        return needed
    if isinstance(loss_scale, NoOpLossScale) and not isinstance(needed, NoOpLossScale):
        warnings.warn(
            f"The loss is computed in {dtype} without a loss scale: gradients below "
            f"{float(jnp.finfo(dtype).smallest_subnormal):.1e} are lost. Leave "
            "loss_scale out, or pass DynamicLossScale().",
            stacklevel=3,
        )
    return loss_scale


def _accumulated(grad_fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """Returns a gradient function that goes through its batch in parts."""

    def accumulated(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        leaves, treedef = jax.tree.flatten_with_path(batch)
        is_split = [is_array(leaf) and jnp.ndim(leaf) > 0 for _, leaf in leaves]
        parts = [
            _split(path, leaf, times)
            for (path, leaf), yes in zip(leaves, is_split, strict=True)
            if yes
        ]

        def one(carry: Any, now: Any) -> Any:
            model_state, total = carry
            i, parts = now
            given = iter(parts)
            merged = [
                next(given) if yes else leaf
                for (_, leaf), yes in zip(leaves, is_split, strict=True)
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
        (model_state, total), (losses, aux) = lax.scan(
            one, (model_state, zeros), (jnp.arange(times), parts)
        )
        grads = jax.tree.map(lambda x: x / times, total)
        return (jnp.mean(losses), (model_state, aux)), grads

    return accumulated


def _split(path: Any, leaf: Any, times: int) -> Any:
    if leaf.shape[0] % times:
        raise ValueError(
            f"Expected the first axis of every array of the batch to be a multiple of "
            f"accumulate={times}, got {leaf.shape} at batch"
            f"{jax.tree_util.keystr(path)}."
        )
    return jnp.reshape(leaf, (times, leaf.shape[0] // times, *leaf.shape[1:]))


def _check_types(before: Any, after: Any) -> None:
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        given, returned = type_of(old), type_of(new)
        if given != returned:
            where = f".model_state{jax.tree_util.keystr(path)}"
            raise TypeError(
                "loss_fn returned another type of model state than it was given: "
                f"{returned} at {where}, given {given}."
            )


def _key_of_this_device(rng: Any, axis_name: AxisName) -> Any:
    return jax.random.fold_in(rng, lax.axis_index(axis_name))


def _of_this_device(params: Any, axis_name: AxisName) -> Any:
    """Returns parameters whose gradient is that of this device's part of the batch.

    Where ``shard_map`` checks types, a gradient with regard to what all devices share
    would be summed over them already, in the dtype that it has there.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name

    def local(x: Any) -> Any:
        return as_varying(x, names) if is_array(x) else x

    return jax.tree.map(local, params)


def _averaged(tree: Any, axis_name: AxisName) -> Any:
    def average(x: Any) -> Any:
        return lax.pmean(x, axis_name) if is_inexact(x) else x

    return jax.tree.map(average, tree)


def _init_optimizer(wrapped: Any, params: Any) -> LossScalingState:
    opt_state = wrapped.init(params)
    _warn_of_rounding(params, opt_state)

    def is_state(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    if any(map(is_state, jax.tree.leaves(opt_state.inner_state, is_leaf=is_state))):
        raise ValueError(
            "The optimizer carries a loss scale already: pass it without loss_scaling "
            "or skip_nonfinite, and the scale as loss_scale=..."
        )
    return opt_state


_REMEMBERING = (MasterWeightsState, CompensatedState, StochasticRoundingState)


def _warn_of_rounding(params: Any, opt_state: Any) -> None:
    """Warns where updates that are small beside 16-bit parameters would be lost."""

    def remembers(node: Any) -> bool:
        return isinstance(node, _REMEMBERING)

    narrow = [
        f"{leaf.dtype} at params{jax.tree_util.keystr(path)}"
        for path, leaf in jax.tree.leaves_with_path(params)
        if is_16_bit(leaf)
    ]
    nodes = jax.tree.leaves(opt_state, is_leaf=remembers)
    if narrow and not any(map(remembers, nodes)):
        warnings.warn(
            f"Parameters have 16 bits ({narrow[0]}), and an update of less than some "
            "thousandth of one is lost. Keep them in float32, or wrap the optimizer in "
            "master_weights, compensated or stochastic_rounding.",
            stacklevel=4,
        )


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
