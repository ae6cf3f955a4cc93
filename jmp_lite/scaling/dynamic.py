"""The loss scale that grows while gradients are finite, and shrinks on an overflow."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmp_lite.casting.dtypes import needs_loss_scale, parse_dtype, refuse_unknown
from jmp_lite.casting.types import Array, Leaf, Scalar, TypedScalar
from jmp_lite.scaling.loss_scale import (
    LARGEST_SCALE,
    LossScale,
    NoOpLossScale,
    Tree,
    as_counter,
    as_number,
    as_whole_number,
    boolean_scalar,
    divided,
    multiplied,
    number_on_host,
    warn_if_not_floating,
)

_NAMES_ELSEWHERE = {
    # PyTorch's GradScaler, DeepSpeed, Flax and Keras, MindSpore, Paddle.
    **dict.fromkeys(
        ("init_scale", "initial_scale", "init_loss_scale", "init_loss_scaling"),
        "loss_scale",
    ),
    **dict.fromkeys(("growth_factor", "scale_factor", "incr_ratio"), "factor"),
    "decr_ratio": "backoff_factor",
    **dict.fromkeys(
        (
            *("growth_interval", "scale_window", "loss_scale_window"),
            *("dynamic_growth_steps", "incr_every_n_steps"),
        ),
        "period",
    ),
    **dict.fromkeys(("backoff_interval", "decr_every_n_nan_or_inf"), "hysteresis"),
    **dict.fromkeys(("min_scale", "minimum_scale"), "min_loss_scale"),
    "max_scale": "max_loss_scale",
}


@dataclasses.dataclass(frozen=True, init=False)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and shrinks on an overflow.

    The scale grows on exactly the ``period``-th finite step in a row. It backs off on a
    non-finite step. Its leaves are strongly typed float32 and int32 scalars, so a step
    that takes and returns it compiles once. ``vmap`` may stack several scales into one,
    whose leaves are arrays of one shape; call its methods inside of ``vmap``.

    Attributes:
      loss_scale: the current factor. A start value outside of the bounds moves inside
        them at its next change.
      counter: the number of finite steps in a row since the last change.
      period: the number of finite steps in a row after which the scale grows.
      factor: the factor of growth and, without ``backoff_factor``, of backoff. With 2,
        the scale stays a power of two, so scaling changes exponents only.
      min_loss_scale: the lower bound of backoff.
      max_loss_scale: the upper bound of growth, at most 2**126.
      hysteresis: the number of non-finite steps in a row before the scale backs off.
        Each further one backs off too. A finite step resets the count.
      overflows: the number of non-finite steps in a row, up to ``hysteresis``. It is
        None, and not a leaf, if ``hysteresis`` is 1.
      backoff_factor: the factor of backoff, in (0, 1). None means ``1 / factor``.

    Raises:
      ValueError: a number is out of range.
      TypeError: an argument is unknown. The message suggests the right name, also for
        the names of PyTorch's ``GradScaler`` and other libraries.

    Source: jmp 0.0.4 (names and order of the arguments); Micikevicius et al., "Mixed
    Precision Training", 2017; hysteresis as in Megatron-LM and DeepSpeed.

    Example:
      >>> import jmp_lite as jmp
      >>> scale = jmp.DynamicLossScale(period=2)
      >>> scale = scale.adjust(False)
      >>> scale.loss_scale
      Array(16384., dtype=float32)
      >>> scale.adjust(True).adjust(True).loss_scale
      Array(32768., dtype=float32)
    """

    loss_scale: TypedScalar
    counter: TypedScalar
    period: int
    factor: float
    min_loss_scale: float
    max_loss_scale: float
    hysteresis: int
    overflows: TypedScalar | None
    backoff_factor: float | None

    def __init__(
        self,
        loss_scale: Scalar = 2.0**15,
        counter: Scalar = 0,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
        *,
        hysteresis: int = 1,
        overflows: Scalar | None = None,
        backoff_factor: float | None = None,
        **unknown: Never,
    ) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        refuse_unknown("DynamicLossScale", unknown, names, _NAMES_ELSEWHERE)
        warn_if_not_floating(loss_scale, "loss_scale")
        warn_if_not_floating(min_loss_scale, "min_loss_scale")
        # A scale that vmap has stacked: all of its numbers have the counter's shape.
        counter = as_counter(counter, "counter")
        stack = counter.shape
        hysteresis = as_whole_number(hysteresis, "hysteresis", at_least=1)
        if hysteresis == 1:
            overflows = None
        else:
            before = 0 if overflows is None else overflows
            overflows = as_counter(before, "overflows", stack)
        if backoff_factor is not None:
            backoff_factor = number_on_host(backoff_factor, "backoff_factor")
        vars(self).update(
            loss_scale=as_number(loss_scale, np.float32, "loss_scale", stack),
            counter=counter,
            period=as_whole_number(period, "period", at_least=1),
            factor=number_on_host(factor, "factor"),
            min_loss_scale=number_on_host(min_loss_scale, "min_loss_scale"),
            max_loss_scale=number_on_host(max_loss_scale, "max_loss_scale"),
            hysteresis=hysteresis,
            overflows=overflows,
            backoff_factor=backoff_factor,
        )
        self._check_ranges()

    def _check_ranges(self) -> None:
        low, high = self.min_loss_scale, self.max_loss_scale
        largest = float(_FLOAT32.max)
        if not 1 < self.factor <= largest:
            raise ValueError(f"Expected a finite factor above 1, got {self.factor}.")
        if self.backoff_factor is not None and not 0 < self.backoff_factor < 1:
            raise ValueError(
                "Expected a backoff_factor between 0 and 1, which the scale is "
                f"multiplied by, got {self.backoff_factor}."
            )
        if not 0 <= low <= high <= LARGEST_SCALE:
            raise ValueError(
                "Expected 0 <= min_loss_scale <= max_loss_scale <= 2**126, "
                f"got min_loss_scale={low} and max_loss_scale={high}."
            )
        try:
            start = np.asarray(self.loss_scale)
        except jax.errors.TracerArrayConversionError:
            return  # A tracer, whose value is unknown.
        if not np.all((start > 0) & (start <= LARGEST_SCALE)):
            raise ValueError(
                f"Expected a positive loss_scale up to 2**126, got {start}."
            )

    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves by the scale and returns float32."""
        return multiplied(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves by the scale and returns float32."""
        return divided(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Returns the scale of the next step.

        Args:
          grads_finite: a boolean scalar, such as ``all_finite(grads)``.

        Raises:
          AssertionError: ``grads_finite`` is not a boolean scalar.
        """
        finite = boolean_scalar(grads_finite)
        loss_scale = jnp.asarray(self.loss_scale)
        counter = jnp.where(finite, jnp.asarray(self.counter) + 1, 0)
        counter = jnp.where(counter >= self.period, 0, counter)
        overflows, backs_off = self._count_overflow(finite)

        # The scale could not grow from zero again.
        floor = max(self.min_loss_scale, float(_FLOAT32.tiny))
        grown = jnp.minimum(loss_scale * self.factor, self.max_loss_scale)
        lower = (
            loss_scale / self.factor
            if self.backoff_factor is None
            else loss_scale * self.backoff_factor
        )
        shrunk = jnp.maximum(lower, floor)
        # After a finite step, the new counter is 0 at the end of a period. Reading the
        # new value lets a GPU compute the counter and the scale in one kernel.
        return self._replace_leaves(
            jnp.where(
                finite,
                jnp.where(counter == 0, grown, loss_scale),
                jnp.where(backs_off, shrunk, loss_scale),
            ),
            counter,
            overflows,
        )

    def _count_overflow(self, finite: Array) -> tuple[Array | None, Array | bool]:
        """Returns the overflows in a row, and whether the scale backs off."""
        if self.hysteresis == 1:
            return None, True
        # A checkpoint of a scale without hysteresis has no such number.
        none = jnp.zeros_like(jnp.asarray(self.counter))
        before = none if self.overflows is None else jnp.asarray(self.overflows)
        more = jnp.minimum(before + 1, self.hysteresis)
        overflows = jnp.where(finite, 0, more)
        return overflows, overflows >= self.hysteresis

    def _replace_leaves(self, *leaves: Array | None) -> "DynamicLossScale":
        return _unflatten_dynamic(_flatten_dynamic(self)[1], leaves)


_FLOAT32 = np.finfo(np.float32)
_DYNAMIC_LEAVES = ("loss_scale", "counter", "overflows")

_DYNAMIC_STATIC = tuple(
    field.name
    for field in dataclasses.fields(DynamicLossScale)
    if field.name not in _DYNAMIC_LEAVES
)


def _flatten_dynamic(
    scale: DynamicLossScale,
) -> tuple[tuple[Leaf, ...], tuple[float | None, ...]]:
    return (
        tuple(getattr(scale, name) for name in _DYNAMIC_LEAVES),
        tuple(getattr(scale, name) for name in _DYNAMIC_STATIC),
    )


def _flatten_dynamic_with_keys(
    scale: DynamicLossScale,
) -> tuple[tuple[tuple[Any, Leaf], ...], tuple[float | None, ...]]:
    leaves, static = _flatten_dynamic(scale)
    keys = map(jax.tree_util.GetAttrKey, _DYNAMIC_LEAVES)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten_dynamic(
    static: tuple[float | None, ...], leaves: Iterable[Leaf]
) -> DynamicLossScale:
    # Not through __init__: JAX and its libraries also use shapes, shardings and bare
    # objects as leaves, which must stay unchanged.
    scale = object.__new__(DynamicLossScale)
    vars(scale).update(zip(_DYNAMIC_LEAVES, leaves, strict=True))
    vars(scale).update(zip(_DYNAMIC_STATIC, static, strict=True))
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_dynamic_with_keys, _unflatten_dynamic, _flatten_dynamic
)


def default_loss_scale(compute_dtype: DTypeLike) -> LossScale:
    """Returns the loss scale that a compute dtype needs.

    Args:
      compute_dtype: a floating-point dtype or its name.

    Returns:
      ``DynamicLossScale()`` if the dtype has fewer exponents than float32 (float16,
      float8). ``NoOpLossScale()`` otherwise (bfloat16, float32, float64).

    Raises:
      ValueError: ``compute_dtype`` is unknown or not floating-point.

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.default_loss_scale("bfloat16")
      NoOpLossScale()
      >>> jmp.default_loss_scale("float16").loss_scale
      np.float32(32768.0)
    """
    dtype = parse_dtype(compute_dtype)
    return DynamicLossScale() if needs_loss_scale(dtype) else NoOpLossScale()
