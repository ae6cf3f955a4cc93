"""Loss scales: none, one that stays, one that grows and shrinks; and their numbers."""

import abc
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_lite.casting.dtypes import (
    is_array,
    is_inexact,
    needs_loss_scale,
    parse_dtype,
    refuse_unknown,
    type_of,
)
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.casting.types import Array, Leaf, Scalar, Tree, TypedScalar

LARGEST_SCALE = 2.0**126
"""The largest loss scale. The reciprocal of a larger one is a subnormal float32 number,
which accelerators replace by zero."""


def is_selectable(leaf: Leaf) -> bool:
    """Whether a leaf is an array or a number."""
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def boolean_scalar(pred: ArrayLike) -> Array:
    """Returns a boolean scalar.

    Raises:
      AssertionError: the argument is not a boolean scalar.
    """
    # jmp raises AssertionError, and code written for jmp catches it.
    if not is_selectable(pred):
        raise AssertionError(f"expected boolean scalar, got {type(pred).__name__}")
    array = jnp.asarray(pred)
    if array.ndim != 0 or array.dtype != jnp.bool_:
        raise AssertionError(f"expected boolean scalar, got {type_of(array)}")
    return array


def as_number(
    value: Scalar,
    dtype: type[np.float32] | type[np.int32],
    name: str,
    stack: tuple[int, ...] | None,
) -> TypedScalar:
    """Returns a strongly typed number: on the host if it was a host number.

    A loss scale that is made at import then starts no backend.

    Args:
      value: a number, or an array of the shape ``stack``.
      dtype: the dtype of the result.
      name: the name of the argument.
      stack: the shape of the result; None allows any.
    """
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.asarray(value).astype(dtype)[()]
    else:
        try:
            array = jnp.asarray(value).astype(dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected a number for {name}, got {value!r}.") from error
    if stack is None or array.shape == stack:
        return array
    if array.ndim != 0:
        expected = f"a scalar {name}"
        if stack:
            expected = f"a {name} of the counter's shape {stack}"
        raise ValueError(f"Expected {expected}, got the shape {array.shape}.")
    return jnp.broadcast_to(array, stack)


def number_on_host(value: Scalar, name: str) -> float:
    """Returns a number whose value is known; otherwise raises a TypeError."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected a concrete number for {name}, got {value!r}. Only the "
            "loss_scale of a DynamicLossScale changes during training."
        ) from error


def as_whole_number(value: Scalar, name: str, at_least: int) -> int:
    """Returns a whole number; raises a ValueError for any other."""
    number = number_on_host(value, name)
    if not at_least <= number < 2**31 or number != int(number):
        raise ValueError(
            f"Expected a whole number from {at_least} to 2**31 - 1 for {name}, got "
            f"{value}."
        )
    return int(number)


def as_counter(
    value: Scalar, name: str, stack: tuple[int, ...] | None = None
) -> TypedScalar:
    """Returns an int32 number, or an array of them; see ``as_number``."""
    if isinstance(value, bool | int | float):
        value = as_whole_number(value, name, at_least=0)
    return as_number(value, np.int32, name, stack)


def warn_if_not_floating(value: Scalar, name: str) -> None:
    """Warns of a number without a fraction, as jmp does."""
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        return  # Not a number: the conversion raises an error.
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"Expected a real number for {name}, got {value!r}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        is_known = isinstance(value, int | np.integer)
        cure = f"{name}={float(value)}" if is_known else "a float"
        # The level of the line that makes the scale.
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}: pass {cure}.",
            stacklevel=3,
        )


class LossScale(abc.ABC):
    """The base class of loss scales: scale a loss, unscale gradients, adjust the scale.

    To write your own loss scale, subclass this class and register the subclass as a
    pytree. Its leaves are the numbers that change during training.

    Source: jmp 0.0.4.

    Example:
      >>> import jmp_lite as jmp
      >>> scale = jmp.DynamicLossScale()
      >>> isinstance(scale, jmp.LossScale), scale.loss_scale.dtype
      (True, dtype('float32'))
    """

    loss_scale: Any
    """The factor, a float32 scalar."""

    @abc.abstractmethod
    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves of a pytree by the scale, in float32."""

    @abc.abstractmethod
    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves of a pytree by the scale, in float32."""

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> "LossScale":
        """Returns the scale of the next step.

        Args:
          grads_finite: whether the gradients of this step were finite, a boolean
            scalar.
        """

    def __format__(self, spec: str) -> str:
        """Returns the factor as text, such as ``f"{scale:.0f}"``; the scale without it.

        Example:
          >>> import jmp_lite as jmp
          >>> f"{jmp.DynamicLossScale():.0f}"
          '32768'
        """
        return format(float(self.loss_scale), spec) if spec else str(self)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """No loss scaling, for bfloat16 and float32: trees are returned unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> grads = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> jmp.NoOpLossScale().unscale(grads)["w"].dtype
      dtype(bfloat16)
    """

    loss_scale: ClassVar[np.float32] = np.float32(1)  # pyright: ignore[reportIncompatibleVariableOverride]

    def scale(self, tree: Tree) -> Tree:
        """Returns ``tree`` itself."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Returns ``tree`` itself."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Returns this scale."""
        boolean_scalar(grads_finite)
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A loss scale that never changes, such as the 128 of MXNet and MindSpore.

    Attributes:
      loss_scale: the factor, a positive number. With a power of two, scaling is exact.
        The factor is part of the pytree structure: a new factor causes a new trace.

    Raises:
      ValueError: the factor is negative, above 2**126 or NaN; or, when used, zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.StaticLossScale(128).scale(jnp.float16(3.0))
      Array(384., dtype=float32)
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        factor = np.float32(number_on_host(self.loss_scale, "loss_scale"))
        if not 0 <= factor <= LARGEST_SCALE:
            raise ValueError(
                f"Expected a positive loss_scale up to 2**126, got {factor}."
            )
        object.__setattr__(self, "loss_scale", factor)

    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves by the scale and returns float32."""
        return multiplied(tree, self._positive())

    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves by the scale and returns float32."""
        return divided(tree, self._positive())

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Returns this scale."""
        boolean_scalar(grads_finite)
        return self

    def _positive(self) -> np.float32:
        if self.loss_scale == 0:
            raise ValueError(
                "Expected a positive loss_scale, got 0, which makes "
                "every gradient zero."
            )
        return self.loss_scale


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
        after = jnp.where(
            finite,
            jnp.where(counter == 0, grown, loss_scale),
            jnp.where(backs_off, shrunk, loss_scale),
        )
        _, static = _flatten_dynamic(self)
        return _unflatten_dynamic(static, (after, counter, overflows))

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


_FLOAT32 = np.finfo(np.float32)
_DYNAMIC_LEAVES = ("loss_scale", "counter", "overflows")
_DYNAMIC_STATIC = tuple(
    field.name
    for field in dataclasses.fields(DynamicLossScale)
    if field.name not in _DYNAMIC_LEAVES
)


def _flatten_dynamic(
    scale: DynamicLossScale,
) -> tuple[list[tuple[Any, Leaf]], tuple[float | None, ...]]:
    leaves = [
        (jax.tree_util.GetAttrKey(name), getattr(scale, name))
        for name in _DYNAMIC_LEAVES
    ]
    return leaves, tuple(getattr(scale, name) for name in _DYNAMIC_STATIC)


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
    DynamicLossScale, _flatten_dynamic, _unflatten_dynamic
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


def check_is_loss_scale(loss_scale: object) -> None:
    """Raises a TypeError for an object that is not a ``LossScale`` or not a pytree."""
    if not isinstance(loss_scale, LossScale):
        if isinstance(loss_scale, type):
            name = loss_scale.__name__
            raise TypeError(
                f"Expected a LossScale, got the class {name}: did you mean {name}()?"
            )
        scale = loss_scale if isinstance(loss_scale, int | float) else 128.0
        raise TypeError(
            f"Expected a LossScale, got {type(loss_scale).__name__}: pass "
            f"StaticLossScale({scale}) or DynamicLossScale({scale}), or where a step "
            "has a state of the optimizer get_loss_scale(opt_state)."
        )
    if any(leaf is loss_scale for leaf in jax.tree.leaves(loss_scale)):
        raise TypeError(
            f"{type(loss_scale).__name__} is not registered as a pytree: use "
            "jax.tree_util.register_dataclass."
        )


def multiplied(tree: Tree, factor: Scalar) -> Tree:
    """Multiplies real and complex leaves by a factor, in 32 bits or more."""

    def multiply(leaf: Leaf) -> Leaf:
        if not is_inexact(leaf):
            return leaf
        array = jnp.asarray(leaf)
        if jnp.iscomplexobj(array):
            # Each part by itself: inf + 0j times a complex factor would be NaN in both.
            return lax.complex(multiply(array.real), multiply(array.imag))
        dtype = np.dtype(f"float{max(jnp.finfo(array.dtype).bits, 32)}")
        return jnp.multiply(array.astype(dtype), jnp.asarray(factor).astype(dtype))

    with jax.named_scope(LOSS_SCALE_SCOPE):
        return jax.tree.map(multiply, tree)


def divided(tree: Tree, loss_scale: Scalar) -> Tree:
    """Divides real and complex leaves by a loss scale, in 32 bits or more."""
    # By its reciprocal, which is the quotient for a power of two; other factors round
    # once more. XLA's CPU backend repeats the operation in each loop that reads a
    # gradient, and a division takes longer.
    with jax.named_scope(LOSS_SCALE_SCOPE):
        reciprocal = jnp.float32(1) / jnp.asarray(loss_scale, jnp.float32)
    return multiplied(tree, reciprocal)
