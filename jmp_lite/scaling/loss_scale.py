"""Loss scales: factors that move gradients into the range of a narrow float format.

A scale is a strongly typed float32 scalar. Scaling and unscaling run in float32 or a
wider dtype, whatever the input dtype. A scale is a value: ``adjust`` returns the next
one. Only real and complex numbers are scaled.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_inexact
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.casting.types import Array, Leaf, Scalar, Tree
from jmp_lite.scaling.numbers import LARGEST_SCALE, boolean_scalar, number_on_host


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
