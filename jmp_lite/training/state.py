"""The state of a training: how it starts, what is checked before, and how it moves."""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypedDict, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jmp_lite.autocasting.api import Check, has_float16_product
from jmp_lite.autocasting.rules.presets import check_convertible
from jmp_lite.autocasting.rules.rules import Rules, is_identity
from jmp_lite.casting.dtypes import is_16_bit, is_array, is_inexact, refuse_raw_bytes
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import (
    Array,
    Key,
    Leaf,
    LossFn,
    OptimizerExtraArgs,
    Params,
    PyTree,
    Tree,
)
from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.types import Jaxpr
from jmp_lite.scaling.dynamic import default_loss_scale
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale
from jmp_lite.scaling.state import LossScalingState
from jmp_lite.scaling.wrapping import Rounding, strongly_typed
from jmp_lite.training.gradients import find_frozen

Batch = TypeVar("Batch", contravariant=True)


class TrainingState(NamedTuple):
    """Everything that changes during training.

    Attributes:
      params: the parameters.
      model_state: the state that the loss function takes and returns, such as batch
        statistics.
      opt_state: the optimizer's ``LossScalingState``.
      ema: the exponential moving average of the parameters after each step, in float32,
        or None. Before the first step, it is the parameters.
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

    params: PyTree
    model_state: PyTree
    opt_state: LossScalingState
    ema: PyTree
    rng: Key | None
    step: Array


class Metrics(TypedDict):
    """What a step measures; see ``build_train_step``."""

    loss: Array
    grad_norm: Array
    grads_finite: Array
    loss_scale: Array
    skipped: Array
    aux: PyTree


class Init(Protocol):
    """Returns the state before the first step; see ``build_train_step``."""

    def __call__(
        self, params: PyTree, model_state: PyTree = None, rng: Key | None = None
    ) -> TrainingState:
        """Returns the state for parameters."""
        ...


class Step(Protocol[Batch]):
    """Returns the state after a step, and its metrics; see ``build_train_step``."""

    def __call__(
        self, state: TrainingState, batch: Batch, **extra_args: PyTree
    ) -> tuple[TrainingState, Metrics]:
        """Trains on a batch."""
        ...


def copied(state: TrainingState) -> TrainingState:
    """Copies all arrays: two of them may be one object, or belong to the caller."""

    def copy(leaf: Leaf) -> Leaf:
        return jnp.array(leaf, copy=True) if is_array(leaf) else leaf

    return jax.tree.map(copy, strongly_typed(state))


def steps_that_move(
    before: PyTree, after: PyTree, step: Array
) -> tuple[Array | None, Array]:
    """Returns whether a step moved the parameters, and how many steps so far did.

    None is for an optimizer whose steps all move them.

    ``optax.MultiSteps`` moves them once in several steps, and its state counts.

    Args:
      before: the optimizer's state before the step.
      after: that after the step.
      step: the number of this step, from 1.
    """
    old, new = map(_accumulators, (before, after))
    if not new:
        return None, step
    n_before, n_after = (jnp.asarray(each[0].gradient_step) for each in (old, new))
    return n_after != n_before, n_after


def check_moves(opt_state: PyTree) -> None:
    """Raises a ValueError if it is unknown which steps move the parameters."""

    def is_apply_every(node: PyTree) -> bool:
        return isinstance(node, optax.ApplyEvery)

    leaves = jax.tree.leaves(opt_state, is_leaf=is_apply_every)
    found = "optax.apply_every" if any(map(is_apply_every, leaves)) else None
    if len(_accumulators(opt_state)) > 1:
        found = "several optax.MultiSteps"
    if found:
        raise ValueError(
            f"ema averages parameters after each step that moves them, and {found} "
            "does not say which do. Use one optax.MultiSteps(optimizer, k) around the "
            "whole optimizer, or accumulate=k, or leave ema out."
        )


def _accumulators(opt_state: PyTree) -> list[optax.MultiStepsState]:
    def is_accumulator(node: PyTree) -> TypeGuard[optax.MultiStepsState]:
        return isinstance(node, optax.MultiStepsState)

    leaves = jax.tree.leaves(opt_state, is_leaf=is_accumulator)
    return list(filter(is_accumulator, leaves))


def moving_average(decay: float, average: Tree, params: PyTree, step: Array) -> Tree:
    """Returns the moving average of the parameters after each step so far.

    The parameters ``k`` steps ago have the weight ``decay**k``, and the weights of all
    steps add up to one. So the parameters before the first step, often random, have no
    part in it. This is ``optax.ema(decay, debias=True)``, without its division.

    Args:
      decay: the decay.
      average: the average after the step before, in float32.
      params: the parameters after this step.
      step: the number of this step, from 1.

    Example:
      >>> start, one, two = map(jnp.float32, (7, 1, 2))
      >>> first = moving_average(0.9, start, one, step=jnp.int32(1))
      >>> second = moving_average(0.9, first, two, step=jnp.int32(2))
      >>> print(first, second)  # The second is (0.9 * 1 + 2) / 1.9.
      1.0 1.5263158
    """
    # decay * (1 - decay**(step - 1)) / (1 - decay**step), without cancellation.
    kept: ArrayLike = 0.0
    if decay:
        n, log = step.astype(jnp.float32), math.log(decay)
        kept = decay * jnp.expm1((n - 1) * log) / jnp.expm1(n * log)

    # In float32: in 16 bits it would stall when (1 - decay) rounds away.
    def mix(old: Array, new: Array) -> Array:
        share = jnp.asarray(kept, old.dtype)
        return share * old + (1 - share) * new.astype(old.dtype)

    return jax.tree.map(mix, average, params)


def check_loss_fn(loss_fn: LossFn) -> None:
    """Raises a TypeError for a function that does not take the four arguments."""
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


def check_accumulation(accumulate: float | np.integer, batch_axes: PyTree) -> None:
    """Raises an error for a wrong number of micro-batches, or wrong axes."""
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


def check_trainable(params: PyTree) -> None:
    """Raises a TypeError for parameters without a gradient."""
    refuse_raw_bytes(params)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not is_inexact(leaf):
            raise TypeError(
                f"Expected floating-point parameters, got {type_of(leaf)} at "
                f"params{jax.tree_util.keystr(path)}, which has no gradient. Put such "
                "an array in the model state: init(params, model_state). Let loss_fn "
                "close over other objects. nnx.split and equinox.partition separate "
                "them."
            )


_NO_KEY = (
    "rng is None in loss_fn, because init got no key. If loss_fn needs one, call "
    "init(params, model_state, jax.random.key(0))."
)


def explain_missing_key(error: Exception) -> None:
    """Raises a TypeError if an error is about the key that a loss did not get.

    Any other error gets a note.
    """
    if isinstance(error, TypeError | ValueError) and "PRNG" in str(error):
        raise TypeError(_NO_KEY) from error
    error.add_note(_NO_KEY)


def check_result(result: PyTree, model_state: PyTree) -> None:
    """Raises a TypeError if a loss function returns something else."""

    def is_pair(node: PyTree) -> bool:
        return isinstance(node, tuple | list) and len(node) == 2

    if not (is_pair(result) and is_pair(result[1])):
        raise TypeError(
            "Expected loss_fn to return (loss, (model_state, aux)), with None for a "
            f"missing part, got {_describe(result)}."
        )
    before, after = jax.tree.structure(model_state), jax.tree.structure(result[1][0])
    if before != after:
        raise TypeError(
            "loss_fn changes the structure of the model state: pass the initial "
            f"model state to init(params, model_state).\nGiven: {before}\nReturned: "
            f"{after}"
        )


def _describe(result: PyTree) -> str:
    if result is None:
        return "None"
    name = f"{result.dtype} array" if is_array(result) else type(result).__name__
    if isinstance(result, tuple | list):
        name += f" of {len(result)} ({', '.join(map(_describe, result))})"
    return f"an {name}" if name[0] in "aeio" else f"a {name}"


def scale_at_start(loss_scale: LossScale | None, rules: Rules) -> LossScale:
    """Returns the loss scale of the first step; warns if float16 has none."""
    dtype = np.dtype("float32") if is_identity(rules) else np.dtype(rules.compute_dtype)
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


def float16_check(loss_scale: LossScale | None, chosen: Callable[[], Rules]) -> Check:
    """Returns a check that warns of a loss which is in float16 by itself.

    Args:
      loss_scale: the loss scale that the caller chose, or None.
      chosen: returns the rules, whose compute dtype chooses the scale otherwise.
    """

    def check(jaxpr: Jaxpr) -> None:
        if loss_scale is not None or not has_float16_product(jaxpr):
            return
        if isinstance(scale_at_start(None, chosen()), NoOpLossScale):
            source.warn(
                "The loss computes matrix products in float16 by itself, such as by an "
                "autocast inside of it, and has no loss scale: gradients below 6.0e-08 "
                "become zero. Pass compute_dtype='float16' to build_train_step in "
                "place of the inner autocast, or loss_scale=DynamicLossScale().",
            )

    return check


def init_optimizer(
    wrapped: Any, inner: OptimizerExtraArgs, params: Params
) -> LossScalingState:
    """Returns the state of an optimizer; warns of parameters that lose updates."""
    opt_state = wrapped.init(params)
    _warn_of_rounding(
        params, opt_state, find_frozen(inner, params, opt_state.inner_state)
    )

    def is_state(node: PyTree) -> bool:
        return isinstance(node, LossScalingState)

    if any(map(is_state, jax.tree.leaves(opt_state.inner_state, is_leaf=is_state))):
        raise ValueError(
            "The optimizer already carries a loss scale: pass it without "
            "loss_scaling or skip_nonfinite, and pass the scale as loss_scale=..."
        )
    return opt_state


def _warn_of_rounding(params: Params, opt_state: PyTree, frozen: list[bool]) -> None:
    """Warns if 16-bit parameters would lose small updates."""

    def rounds(node: PyTree) -> bool:
        return isinstance(node, Rounding)

    narrow = [
        f"{leaf.dtype} at params{jax.tree_util.keystr(path)}"
        for (path, leaf), is_frozen in zip(
            jax.tree.leaves_with_path(params), frozen, strict=True
        )
        if is_16_bit(leaf) and not is_frozen
    ]
    nodes = jax.tree.leaves(opt_state, is_leaf=rounds)
    if narrow and not any(map(rounds, nodes)):
        warnings.warn(
            f"Parameters have 16 bits ({narrow[0]}): an update below some thousandth "
            "of a parameter is lost. Keep them in float32, or wrap the optimizer in "
            "master_weights, compensated or stochastic_rounding. Freeze those that are "
            "not trained with optax.set_to_zero: optax.masked alone adds their "
            "gradients to them.",
            stacklevel=4,
        )
