"""Loss scales, and the checks of their numbers."""

import abc
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_array, is_inexact
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.casting.type_of import type_of
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


def check_is_loss_scale(loss_scale: object) -> None:
    """Raises a TypeError for an object that is not a ``LossScale`` or not a pytree."""
    if not isinstance(loss_scale, LossScale):
        if isinstance(loss_scale, type):
            name = loss_scale.__name__
            raise TypeError(
                f"Expected a LossScale, got the class {name}: did you mean {name}()?"
            )
        raise TypeError(
            f"Expected a LossScale, got {type(loss_scale).__name__}: pass "
            "get_loss_scale(opt_state), StaticLossScale(128.0) or DynamicLossScale()."
        )
    if any(leaf is loss_scale for leaf in jax.tree.leaves(loss_scale)):
        raise TypeError(
            f"{type(loss_scale).__name__} is not registered as a pytree: use "
            "jax.tree_util.register_dataclass."
        )


def multiplied(tree: Tree, loss_scale: Scalar) -> Tree:
    """Multiplies the floating-point leaves by a factor, in float32."""
    with jax.named_scope(LOSS_SCALE_SCOPE):
        return _map_inexact(jnp.multiply, tree, loss_scale)


def divided(tree: Tree, loss_scale: Scalar) -> Tree:
    """Divides the floating-point leaves by a factor, in float32.

    It multiplies by the reciprocal. For a power of two, that is the quotient. For other
    factors, it rounds once more. XLA's CPU backend repeats the operation in each loop
    that reads a gradient, and a division takes longer.
    """
    with jax.named_scope(LOSS_SCALE_SCOPE):
        reciprocal = jnp.float32(1) / jnp.asarray(loss_scale, jnp.float32)
        return _map_inexact(jnp.multiply, tree, reciprocal)


def _map_inexact(
    op: Callable[[Array, Array], Array], tree: Tree, loss_scale: Scalar
) -> Tree:
    """Applies ``op(leaf, loss_scale)`` to real and complex leaves, in >= 32 bits."""

    def apply(leaf: Leaf) -> Leaf:
        if not is_inexact(leaf):
            return leaf
        array = jnp.asarray(leaf)
        if jnp.iscomplexobj(array):
            # Each part by itself: inf + 0j times a complex factor would be NaN in both.
            return lax.complex(apply(array.real), apply(array.imag))
        width = max(jnp.finfo(array.dtype).bits, 32)
        dtype = np.dtype(f"float{width}")
        return op(array.astype(dtype), jnp.asarray(loss_scale).astype(dtype))

    return jax.tree.map(apply, tree)
