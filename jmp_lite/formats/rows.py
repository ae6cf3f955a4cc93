"""Formats of 8 bits with one scale for each row: ``int8`` and ``float8_rows``.

A row consists of the numbers of an operand that are multiplied with one column of the
other operand, and added up. Each row has a scale, and the result is multiplied with the
scales. The products of the backward pass contract other axes, so they have other rows:
they quantize their operands anew, from 16 bits.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jmp_lite.casting.quantize import scale_for, to_float8
from jmp_lite.formats import eight_bits
from jmp_lite.formats.number_format import Advice, check_option
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.products import Dimensions
from jmp_lite.jaxprs.types import Array, Dtype


@dataclasses.dataclass(frozen=True)
class RowsFormat(eight_bits.EightBits):
    """Operands of 8 bits with one scale for each row; see ``ByRows``.

    Attributes:
      forward: the dtype of operands.
      backward: the dtype of cotangents.
      smallest: the smallest harmonic mean of the sizes M, K and N, see ``Float8``.
      sums: how float8 products are added up, see ``Float8``. Sums of int8 are exact.
    """

    forward: str
    backward: str
    smallest: float
    sums: str = eight_bits.FAST

    options_in_words = "jmp_lite.get_format(..., "

    def __post_init__(self) -> None:
        is_int8 = self.name == "int8"
        for field, value, dtypes in (
            ("forward", self.forward, eight_bits.FORWARD_DTYPES),
            ("backward", self.backward, eight_bits.BACKWARD_DTYPES),
        ):
            names = ["int8"] if is_int8 else [f"float8_{each}" for each in dtypes]
            check_option(f"{field} dtype of {self.name}", value, names)
        smallest = eight_bits.parse_smallest(self.smallest)
        object.__setattr__(self, "smallest", smallest)
        # int8 products add up exactly, in 32-bit integers: there is nothing to choose.
        sums = [eight_bits.FAST] if is_int8 else eight_bits.SUMS
        check_option(f"sums of {self.name}", self.sums, sums)

    @property
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""
        return self.smallest

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the compute dtype has to be bfloat16."""
        # In int8 numbers are scaled in float32, so a float16 array has room for that.
        return self.forward != "int8"

    def advice(self, code: str) -> Advice | None:
        """Returns the lint for products with the code of a verdict, or None."""
        # Measured, see docs/formats.md: programs promise a gain that is not there.
        if not code and self.forward == "int8" and jax.default_backend() == "gpu":
            return Advice(
                "int8 on a GPU",
                'Use the preset "float8" or "mixed"',
                "an H200 takes 1.7 times as long for MLP blocks of width 4,096 with "
                "products in int8 as with products in 16 bits",
            )
        return super().advice(code)

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        del low
        return np.dtype(self.forward)

    def form(self) -> "ByRows":
        """Returns how a product is computed."""
        forward, backward = np.dtype(self.forward), np.dtype(self.backward)
        return ByRows(forward, forward, backward, self.sums)


@dataclasses.dataclass(frozen=True)
class ByRows:
    """A product of operands that are quantized by rows, see ``ProductForm``.

    Attributes:
      lhs: the dtype of the left operand, of 8 bits.
      rhs: the dtype of the right operand.
      cotangent: the dtype of the cotangent of the result.
      sums: how float8 products are added up; in the backward pass they are promoted.
    """

    lhs: Dtype
    rhs: Dtype
    cotangent: Dtype
    sums: str = eight_bits.FAST

    @property
    def dtype(self) -> Dtype:
        """The dtype in which operands are multiplied."""
        return self.lhs

    def with_tangent(self, side: int) -> "ByRows":
        """Returns the form of the product with the tangent of an operand: the same."""
        del side
        return self

    def transposed(self, side: int) -> "ByRows":
        """Returns the form of the product that is the cotangent of an operand."""
        other = self.rhs if side == 0 else self.lhs
        return ByRows(self.cotangent, other, self.cotangent, eight_bits.PROMOTED)

    def cotangent_operand(self, cotangent: Array) -> ProductOperand:
        """Returns a cotangent as an operand; each product rounds its own rows."""
        return ProductOperand(cotangent)

    def multiply(
        self,
        lhs: ProductOperand,
        rhs: ProductOperand,
        axes: Dimensions,
        out_sharding: NamedSharding | None,
    ) -> Array:
        """Returns the product, in the dtype of its operands."""
        dtype = lhs.array.dtype
        is_integer = np.issubdtype(self.lhs, np.integer)
        n_terms = math.prod(lhs.array.shape[axis] for axis in axes.contracted[0])
        # A sum of this many products is at most the largest int32.
        limit = min(127, math.isqrt(np.iinfo(np.int32).max // max(n_terms, 1)))
        pairs = enumerate([(lhs, self.lhs), (rhs, self.rhs)])
        (left, left_scales), (right, right_scales) = (
            _quantized(each.array, axes.contracted[side], to, limit)
            for side, (each, to) in pairs
        )
        precision = None if is_integer else eight_bits.sum_precision(self.sums)
        # For a GPU a float32 result of float8 numbers would be a pass of its own.
        result_dtype = np.dtype("int32") if is_integer else dtype
        product = axes.product(left, right, precision, result_dtype, out_sharding)
        result = axes.times_rows(product.astype(np.float32), left_scales, 0)
        return axes.times_rows(result, right_scales, 1).astype(dtype)


def _quantized(
    array: Array, contracted: Sequence[int], dtype: Dtype, limit: int
) -> tuple[Array, Array]:
    """Returns an array in a dtype of 8 bits, and the scale of each row.

    Args:
      array: the array.
      contracted: the axes along which its rows lie.
      dtype: the dtype.
      limit: the largest magnitude of an integer.
    """
    largest = jnp.max(jnp.abs(array), contracted, keepdims=True, initial=0)
    if not np.issubdtype(dtype, np.integer):
        scale = scale_for(largest, dtype)
        # Exact: a power of two.
        return to_float8(array / scale.astype(array.dtype), dtype), scale
    # No power of two: it would leave up to one of seven bits unused.
    scale = largest.astype(np.float32) / limit
    is_finite = jnp.isfinite(scale)
    # A row of zeros would be divided by zero.
    divisor = jnp.where((scale == 0) | ~is_finite, 1, scale)
    ratio = array.astype(np.float32) / divisor
    numbers = lax.round(ratio, lax.RoundingMethod.TO_NEAREST_EVEN)
    # A scale of NaN makes the row NaN: no infinity becomes a finite number.
    numbers = jnp.where(is_finite, numbers, 0).astype(dtype)
    return numbers, jnp.where(is_finite, divisor, jnp.nan)
