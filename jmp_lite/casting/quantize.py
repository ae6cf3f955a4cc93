"""Arrays in 8 bits: rounded to a float8 format after division by a power of two."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

SCALE_NAME = "float8_scale"
"""The ``checkpoint_name`` of scales, for policies of ``jax.checkpoint``.

A scale is one number, and costs a pass over its array to compute again.
"""

_LEAST_SCALE = 2.0**-100


class Quantized(NamedTuple):
    """An array in a float8 format.

    Attributes:
      numbers: the array divided by the scale and rounded, in the float8 dtype.
      scale: a power of two, a float32 scalar; NaN where the array is not finite.
    """

    numbers: jax.Array
    scale: jax.Array


def scale_for(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the power of two that brings the numbers of an array into a format.

    Divided by it, the largest number is at most the largest of the format, and more
    than half of that.

    Args:
      largest: the largest absolute value of the array, a scalar.
      dtype: a float8 dtype.

    Returns:
      A float32 scalar of at least 2**-100: 1 for zeros, and NaN for what is not finite,
      so that infinities are never clipped to a finite number.

    Example:
      >>> float(scale_for(jnp.float32(448), "float8_e4m3fn"))
      1.0
      >>> float(scale_for(jnp.float32(449), "float8_e4m3fn"))
      2.0
    """
    return power_of_two_for(largest, float(jnp.finfo(dtype).max))


def power_of_two_for(largest: jax.Array, limit: float) -> jax.Array:
    """Returns the powers of two that bring numbers below a limit.

    Args:
      largest: the largest absolute values, of any shape.
      limit: what each of them is at most, divided by its scale.

    Returns:
      Float32 scales, as those of ``scale_for``.
    """
    ratio = largest.astype(jnp.float32) / limit
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    up = (bits + _MANTISSA) & ~_MANTISSA  # A power of two has no mantissa.
    scale = lax.bitcast_convert_type(up, jnp.float32)
    scale = jnp.where(ratio == 0, 1.0, jnp.maximum(scale, _LEAST_SCALE))
    return jnp.where(jnp.isfinite(ratio), scale, jnp.nan)


_MANTISSA = np.uint32(0x007FFFFF)


def quantize(array: jax.Array, dtype: DTypeLike) -> Quantized:
    """Returns an array in a float8 format, with one scale for all of it.

    Args:
      array: a float array of any shape.
      dtype: a float8 dtype.

    Source: the recipe is that of TransformerEngine's "current scaling"; powers of two
    round nothing by themselves.

    Example:
      >>> quantized = quantize(jnp.array([0.0, 1.0, 896.0]), "float8_e4m3fn")
      >>> quantized.numbers.astype(jnp.float32), float(quantized.scale)
      (Array([  0. ,   0.5, 448. ], dtype=float32), 2.0)
    """
    largest = jnp.max(jnp.abs(array), initial=0)
    scale = checkpoint_name(scale_for(largest, dtype), SCALE_NAME)
    # Not times the inverse, which would be a kernel of its own.
    numbers = array / scale.astype(array.dtype)
    return Quantized(numbers.astype(dtype), scale)


def dequantize(quantized: Quantized, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers that a quantized array stands for."""
    scale = quantized.scale.astype(dtype)
    return quantized.numbers.astype(dtype) * scale
