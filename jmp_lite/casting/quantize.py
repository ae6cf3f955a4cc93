"""Quantizes arrays to 8 bits: division by a power of two, then rounding to float8."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

SCALE_NAME = "float8_scale"
"""The ``checkpoint_name`` of scales, for policies of ``jax.checkpoint``.

A scale is one number, but recomputing it takes a pass over its array.
"""

_LEAST_SCALE = 2.0**-100


class Quantized(NamedTuple):
    """An array in a float8 format.

    Attributes:
      numbers: the array divided by the scale and rounded, in the float8 dtype.
      scale: a float32 scalar, a power of two; NaN if an element is not finite.
    """

    numbers: jax.Array
    scale: jax.Array


def scale_for(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the power of two that scales an array into the range of a format.

    The largest number of the array, divided by this scale, is at most the format's
    largest number and more than half of it.

    Args:
      largest: the largest absolute value of the array, a scalar.
      dtype: a float8 dtype.

    Returns:
      A float32 scalar, at least 2**-100. It is 1 for zeros. It is NaN if ``largest`` is
      not finite, so that an infinity never becomes a finite number.

    Example:
      >>> import jax.numpy as jnp
      >>> float(scale_for(jnp.float32(448), "float8_e4m3fn"))
      1.0
      >>> float(scale_for(jnp.float32(449), "float8_e4m3fn"))
      2.0
    """
    return power_of_two_for(largest, float(jnp.finfo(dtype).max))


def power_of_two_for(largest: jax.Array, limit: float) -> jax.Array:
    """Returns powers of two that scale numbers to at most a limit.

    Args:
      largest: the largest absolute values, of any shape.
      limit: the largest allowed value of ``largest / scale``.

    Returns:
      Float32 scales of the same shape, as ``scale_for`` returns them.
    """
    ratio = largest.astype(jnp.float32) / limit
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    up = (bits + _MANTISSA) & ~_MANTISSA  # A power of two has no mantissa.
    scale = lax.bitcast_convert_type(up, jnp.float32)
    scale = jnp.where(ratio == 0, 1.0, jnp.maximum(scale, _LEAST_SCALE))
    return jnp.where(jnp.isfinite(ratio), scale, jnp.nan)


_MANTISSA = np.uint32(0x007FFFFF)


def quantize(array: jax.Array, dtype: DTypeLike) -> Quantized:
    """Quantizes an array to a float8 format, with one scale for the whole array.

    Args:
      array: a floating-point array of any shape.
      dtype: a float8 dtype.

    Source: TransformerEngine's "current scaling", with powers of two as scales, which
    add no rounding error.

    Example:
      >>> import jax.numpy as jnp
      >>> quantized = quantize(jnp.array([0.0, 1.0, 896.0]), "float8_e4m3fn")
      >>> quantized.numbers.astype(jnp.float32), float(quantized.scale)
      (Array([  0. ,   0.5, 448. ], dtype=float32), 2.0)
    """
    largest = jnp.max(jnp.abs(array), initial=0)
    scale = checkpoint_name(scale_for(largest, dtype), SCALE_NAME)
    # Not a product with the inverse, which would be a kernel of its own.
    numbers = array / scale.astype(array.dtype)
    return Quantized(to_float8(numbers, dtype), scale)


def to_float8(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds an array to a float8 dtype.

    A format without a negative zero (``fnuz``) has a NaN in its place. In a loop, XLA
    for CPUs makes that NaN of a negative number that rounds to zero (jax 0.10 to 0.12).
    So such a number becomes a positive zero before.
    """
    info = jnp.finfo(dtype)
    if str(info.dtype).endswith("fnuz"):
        tie = float(info.smallest_subnormal) / 2
        array = jnp.where(jnp.abs(array) <= tie, 0, array)
    return array.astype(dtype)


def dequantize(quantized: Quantized, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers of a quantized array in a dtype."""
    scale = quantized.scale.astype(dtype)
    return quantized.numbers.astype(dtype) * scale
