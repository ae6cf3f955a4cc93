"""Matrix products of operands that are quantized by rows.

A row consists of the numbers of an operand that are multiplied with one column of the
other operand, and added up. Each row has a scale, and the result is multiplied with the
scales. The products of the backward pass contract other axes, so they have other rows:
they quantize their operands anew, from 16 bits.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.casting.quantize import power_of_two_for
from jmp_lite.jaxprs.dots import Dimensions
from jmp_lite.jaxprs.types import Array, Dtype


@dataclasses.dataclass(frozen=True)
class ByRows:
    """A product of operands that are quantized by rows, see ``jaxprs.dots.Form``.

    Attributes:
      lhs: the dtype of the left operand, of 8 bits.
      rhs: the dtype of the right operand.
      cotangent: the dtype of the cotangent of the result.
      is_backward: whether it is a product of the backward pass.
    """

    lhs: Dtype
    rhs: Dtype
    cotangent: Dtype
    is_backward: bool = False

    @property
    def dtype(self) -> Dtype:
        """The dtype in which operands are multiplied."""
        return self.lhs

    def transposed(self, side: int) -> "ByRows":
        """Returns the form of the product that is the cotangent of an operand."""
        other = self.rhs if side == 0 else self.lhs
        return ByRows(self.cotangent, other, self.cotangent, is_backward=True)

    def multiply(
        self, lhs: Array, rhs: Array, dimensions: Dimensions, out_sharding: Any
    ) -> Array:
        """Returns the product, in the dtype of its operands."""
        left, right = dimensions.contracted
        is_integer = np.issubdtype(self.lhs, np.integer)
        n_terms = math.prod(lhs.shape[axis] for axis in left)
        # A sum of this many products is at most the largest int32.
        largest = min(127, math.isqrt(np.iinfo(np.int32).max // max(n_terms, 1)))
        numbers, scales = _quantized(lhs, left, self.lhs, largest)
        others, other_scales = _quantized(rhs, right, self.rhs, largest)
        # By default a float8 kernel accumulates with fewer digits than float32.
        is_precise = self.is_backward and not is_integer
        product = lax.dot_general(
            numbers,
            others,
            (dimensions.contracted, dimensions.batch),
            lax.Precision.HIGHEST if is_precise else None,
            preferred_element_type=np.dtype("int32") if is_integer else lhs.dtype,
            out_sharding=out_sharding,
        )
        result = product.astype(np.float32)
        result *= _beside(scales, dimensions, 0, product.ndim)
        result *= _beside(other_scales, dimensions, 1, product.ndim)
        return result.astype(lhs.dtype)


def _quantized(
    array: Array, contracted: tuple[int, ...], dtype: Dtype, limit: int
) -> tuple[Array, Array]:
    """Returns an array in a dtype of 8 bits, and the scale of each row.

    A row that is not finite has the scale NaN, so that no infinity becomes a finite
    number. A row of zeros has the scale 1.

    Args:
      array: the array.
      contracted: the axes along which its rows lie.
      dtype: the dtype.
      limit: the largest magnitude of an integer.
    """
    largest = jnp.max(jnp.abs(array), contracted, keepdims=True, initial=0)
    if not np.issubdtype(dtype, np.integer):
        scale = power_of_two_for(largest, float(jnp.finfo(dtype).max))
        # Exact: a power of two.
        return (array / scale.astype(array.dtype)).astype(dtype), scale
    # No power of two: it would leave up to one of seven bits unused.
    scale = largest.astype(np.float32) / limit
    is_finite = jnp.isfinite(scale)
    divisor = jnp.where((scale == 0) | ~is_finite, 1, scale)
    ratio = array.astype(np.float32) / divisor
    numbers = lax.round(ratio, lax.RoundingMethod.TO_NEAREST_EVEN)
    numbers = jnp.where(is_finite, numbers, 0).astype(dtype)
    return numbers, jnp.where(is_finite, divisor, jnp.nan)


def _beside(scales: Array, dimensions: Dimensions, side: int, rank: int) -> Array:
    """Returns the scales of an operand with the axes of the result."""
    batch, free = dimensions.batch[side], dimensions.free(side, scales.ndim)
    order = [*batch, *free, *dimensions.contracted[side]]
    n_kept = len(batch) + len(free)
    contracted = range(n_kept, scales.ndim)
    kept = lax.squeeze(lax.transpose(scales, order), contracted)
    first = n_kept if side == 0 else len(batch)
    return lax.expand_dims(kept, range(first, first + rank - n_kept))
