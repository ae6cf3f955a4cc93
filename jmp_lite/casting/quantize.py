"""Quantizes arrays to 8 bits: division by a power of two, then rounding to float8."""

from collections.abc import Sequence
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
      scale: what multiplies the numbers: a float32 scalar, or an array with one scale
        for each block. ``quantize`` makes powers of two; a scale is NaN if an element
        is not finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> weight = jnp.ones((4, 4), "float8_e4m3fn")  # Of a model that others saved.
      >>> stored = jmp.formats.Quantized(weight, jnp.array([[0.5], [1], [2], [4]]))
      >>> jmp.formats.dequantize(stored, "bfloat16")[:, 0]
      Array([0.5, 1, 2, 4], dtype=bfloat16)
    """

    numbers: jax.Array
    scale: jax.Array


def scale_for(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the power of two that scales an array into the range of a format.

    The largest number of the array, divided by this scale, is at most the format's
    largest number and more than half of it.

    Args:
      largest: the largest absolute value of the array, a scalar; or of each of its
        parts, an array.
      dtype: a float8 dtype.

    Returns:
      Float32 scales in the shape of ``largest``, at least 2**-100. A scale is 1 for
      zeros. It is NaN if ``largest`` is not finite, so that an infinity never becomes a
      finite number.

    Example:
      >>> import jax.numpy as jnp
      >>> float(scale_for(jnp.float32(448), "float8_e4m3fn"))
      1.0
      >>> float(scale_for(jnp.float32(449), "float8_e4m3fn"))
      2.0
    """
    ratio = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    up = (bits + _MANTISSA) & ~_MANTISSA  # A power of two has no mantissa.
    scale = lax.bitcast_convert_type(up, jnp.float32)
    scale = jnp.where(ratio == 0, 1.0, jnp.maximum(scale, _LEAST_SCALE))
    return jnp.where(jnp.isfinite(ratio), scale, jnp.nan)


_MANTISSA = np.uint32(0x007FFFFF)


def quantize(
    array: jax.Array,
    dtype: DTypeLike = "float8_e4m3fn",
    block: Sequence[int] | None = None,
) -> Quantized:
    """Quantizes an array to a float8 format, with one scale for it or for each block.

    Args:
      array: a floating-point array of any shape.
      dtype: a float8 dtype.
      block: the sizes of a block along each axis, such as ``(128, 128)``. The last
        blocks of an axis may be smaller. None takes one scale for the whole array.

    Returns:
      A ``Quantized``, whose scale is a scalar or has one element for each block. Its
      numbers are at most the format's largest number, so that none overflows.

    Raises:
      ValueError: ``block`` does not have one positive size for each axis.

    Source: TransformerEngine's "current scaling", with powers of two as scales, which
    add no rounding error.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> numbers, scale = jmp.formats.quantize(jnp.array([0.0, 1.0, 896.0]))
      >>> numbers.astype(jnp.float32), float(scale)
      (Array([  0. ,   0.5, 448. ], dtype=float32), 2.0)
      >>> jmp.formats.quantize(jnp.ones((256, 300)), block=(128, 128)).scale.shape
      (2, 3)
    """
    sizes = jnp.abs(array)
    if block is None:
        scale = checkpoint_name(scale_for(jnp.max(sizes, initial=0), dtype), SCALE_NAME)
        spread = scale
    else:
        scale = scale_for(_largest_of_blocks(sizes, block), dtype)
        spread = _spread(scale, array.shape, block)
    # Not a product with the inverse, which would be a kernel of its own.
    numbers = array / spread.astype(array.dtype)
    return Quantized(to_float8(numbers, dtype), scale)


def _largest_of_blocks(sizes: jax.Array, block: Sequence[int]) -> jax.Array:
    if len(block) != sizes.ndim or min(block, default=1) < 1:
        raise ValueError(
            f"Expected a positive size of a block for each of {sizes.ndim} axes, got "
            f"block={tuple(block)}."
        )
    pads = [(0, -n % size) for n, size in zip(sizes.shape, block, strict=True)]
    padded = jnp.pad(sizes, pads)
    pairs = zip(padded.shape, block, strict=True)
    parts = padded.reshape([x for n, size in pairs for x in (n // size, size)])
    return jnp.max(parts, axis=tuple(range(1, parts.ndim, 2)), initial=0)


def _spread(scale: jax.Array, shape: Sequence[int], block: Sequence[int]) -> jax.Array:
    """Returns the scale of each number; an axis of one block stays of size 1."""
    for axis, (n, size) in enumerate(zip(shape, block, strict=True)):
        if scale.shape[axis] > 1 and size > 1:
            scale = jnp.repeat(scale, size, axis)
            scale = lax.slice_in_dim(scale, 0, n, axis=axis)
    return scale


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


def dequantize(
    quantized: Quantized, dtype: DTypeLike, block: Sequence[int] | None = None
) -> jax.Array:
    """Returns the numbers of a quantized array, times their scale.

    Args:
      quantized: the array. Its scale is a scalar, or has one element for each block.
      dtype: the dtype of the result, in which the product is computed.
      block: the sizes of a block along each axis, as for ``quantize``. None if each
        axis has one scale, or one for each index.

    Returns:
      An array of the dtype, in the shape of the numbers.

    Raises:
      ValueError: the scale does not fit the numbers: ``block`` makes another number of
        blocks, or is missing.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> w = jnp.arange(6.0).reshape(2, 3)
      >>> stored = jmp.formats.quantize(w, block=(1, 2))
      >>> stored.scale.shape
      (2, 2)
      >>> bool(jnp.all(jmp.formats.dequantize(stored, "float32", block=(1, 2)) == w))
      True
    """
    numbers, scale = quantized
    scale = jnp.asarray(scale)
    if scale.ndim:
        scale = _spread(scale, numbers.shape, _checked_block(numbers, scale, block))
    return numbers.astype(dtype) * scale.astype(dtype)


def _checked_block(
    numbers: jax.Array, scale: jax.Array, block: Sequence[int] | None
) -> Sequence[int]:
    """Returns the sizes of a block along each axis."""
    shapes = f"numbers of shape {numbers.shape} and a scale of shape {scale.shape}"
    if scale.ndim != numbers.ndim:
        raise ValueError(f"Expected a scale with {numbers.ndim} axes, got {shapes}.")
    if block is None:
        pairs = [*zip(numbers.shape, scale.shape, strict=True)]
        if any(blocks not in (1, n) for n, blocks in pairs):
            raise ValueError(
                f"Blocks of several sizes fit {shapes}: pass the sizes of a block, "
                "such as block=(128, 128)."
            )
        return [n if blocks == 1 else 1 for n, blocks in pairs]
    expected = tuple(
        -(-n // size) for n, size in zip(numbers.shape, block, strict=True)
    )
    if expected != scale.shape:
        raise ValueError(
            f"Expected a scale of shape {expected} for block={tuple(block)}, got "
            f"{shapes}."
        )
    return block
