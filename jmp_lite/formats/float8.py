"""The format ``float8``: operands of 8 bits, one scale for each array.

An operand is quantized (e4m3), and so is the cotangent of the result (e5m2), so all
three products are float8. The derivative of rounding counts as the identity. A product
saves its quantized operands for the backward pass, one byte per element.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jmp_lite.casting.dtypes import parse_dtype, unknown_name
from jmp_lite.casting.quantize import SCALE_NAME, Quantized, dequantize, quantize
from jmp_lite.formats.eight_bits import (
    BACKWARD_DTYPES,
    FORWARD_DTYPES,
    EightBits,
    parse_smallest,
)
from jmp_lite.formats.number_format import Product
from jmp_lite.jaxprs import bilinear, params
from jmp_lite.jaxprs.axes import Dimensions, Groups, axes_of
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.types import Array, Dtype, Eqn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """The formats of float8 matrix products, and the smallest product that qualifies.

    An operand is divided by a scale and rounded. The scale is a power of two that
    brings the operand's largest number near the largest number of the format. A product
    qualifies under these conditions:

    - The compute dtype is bfloat16.
    - One operand is a weight: an argument, a constant, or a slice of one in a scan.
    - Its groups, if it has any, consist of rows, not of whole products of a batch.
    - Its sizes are multiples of 16.
    - It is large enough, see ``smallest``.
    - An op that takes 16 bits reads its result. Logits and the result of a router are
      read only by float32 ops. (A scope rule for float8 includes these too.)

    Attributes:
      forward: the format of both operands: ``"e4m3fn"``, or ``"e4m3fnuz"`` on AMD's
        MI300.
      backward: the format of cotangents: ``"e5m2"``, ``"e5m2fnuz"``, or a format of
        ``forward``, with more digits and less range.
      smallest: the smallest harmonic mean of the sizes M, K and N. This mean measures
        the arithmetic of a product relative to the bytes that it reads and writes.
        Below it, quantization costs as much as the product gains: on an H100, some ten
        kernels for each weight.

    Raises:
      ValueError: a format is unknown, or matrix units do not multiply in it;
        ``smallest`` is negative or not a number.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scales are
    those of TransformerEngine's "current scaling" and torchao's "tensorwise".

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.Float8(smallest=0)
      Float8(forward='e4m3fn', backward='e5m2', smallest=0)
      >>> jmp.Float8().forward_dtype
      dtype(float8_e4m3fn)
    """

    forward: str = "e4m3fn"
    backward: str = "e5m2"
    smallest: float = 2000

    def __post_init__(self) -> None:
        _check_format("forward", self.forward, FORWARD_DTYPES)
        _check_format("backward", self.backward, BACKWARD_DTYPES)
        object.__setattr__(self, "smallest", parse_smallest(self.smallest))

    @property
    def forward_dtype(self) -> Dtype:
        """The dtype of operands, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.forward}")

    @property
    def backward_dtype(self) -> Dtype:
        """The dtype of cotangents, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.backward}")


def _check_format(field: str, name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        raise unknown_name(f"{field} format", str(name), accepted)


@dataclasses.dataclass(frozen=True)
class Float8Format(EightBits):
    """The format ``float8``, with its options; see ``Scaled``."""

    options: Float8 = Float8()

    saved = (SCALE_NAME,)
    options_in_words = "jmp_lite.Float8("

    @property
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""
        return self.options.smallest

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        return self.options.forward_dtype

    def rounds_before(self, eqn: Eqn) -> bool:
        """Whether operands are quantized before; not if rows may be in no group."""
        return params.op_of(eqn) == "dot_general"

    def round(self, array: Array) -> ProductOperand:
        """Returns an operand of a product, quantized."""
        return quantize_operand(array, self.options.forward_dtype)

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product, whose cotangent is quantized too."""
        del bound
        lhs, rhs, *others = operands
        axes, sharding = axes_of(product.eqn, others), params.out_sharding(product.eqn)
        if not self.rounds_before(product.eqn):
            # Rows of no group have no part in the scale.
            lhs, rhs = (
                self.round(axes.mask_unread(array, side))
                for side, array in enumerate((lhs, rhs))
            )
        if product.weights[1]:
            lhs = separate(lhs, rhs)
        else:
            rhs = separate(rhs, lhs)
        forward, backward = self.options.forward_dtype, self.options.backward_dtype
        form = Scaled(forward, forward, backward)
        return bilinear.bilinear(lhs, rhs, form, axes, sharding)


# ------------------------------------------------------------------------ how they run


def quantize_operand(array: Array, dtype: Dtype) -> ProductOperand:
    """Returns an array as an operand: its float8 numbers, and their scale.

    Args:
      array: a 16-bit array.
      dtype: a float8 dtype.
    """
    numbers, scale = _quantize(lax.stop_gradient(array), dtype)
    # As bits. ``jax.checkpoint`` passes saved floats through ``reduce_precision``, and
    # that makes NaN of e4m3fn's numbers above 240 (jax 0.12 too).
    return bilinear.rounded(array, [lax.bitcast_convert_type(numbers, np.uint8), scale])


_quantize = jax.jit(quantize, static_argnames="dtype")


def separate(operand: ProductOperand, weight: ProductOperand) -> ProductOperand:
    """Returns an operand that XLA treats as a different one in each product.

    XLA merges small products of one operand, such as those for queries, keys and
    values, and has no float8 kernel for a merged product.
    """
    (bits, scale), (_, of_weight) = operand.parts, weight.parts
    return operand._replace(parts=(bits, scale + 0 * of_weight))


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A product of quantized operands, see ``ProductForm``.

    On a TPU the product reads the 8-bit numbers, and its result is multiplied with both
    scales. On other devices this is the form of groups, and of a batch with a scale for
    each of its products. All other products read dequantized numbers in 16 bits there.
    On a GPU with float8 matrix units XLA compiles that to one float8 kernel.

    Attributes:
      lhs: the dtype of the left operand.
      rhs: the dtype of the right operand.
      cotangent: the dtype of the cotangent of the result.
      use: whether it is a product of the forward pass, a product with the tangent of
        an operand, which is not quantized, or a product of the backward pass.
    """

    lhs: Dtype
    rhs: Dtype
    cotangent: Dtype
    use: Literal["forward", "tangent", "backward"] = "forward"

    @property
    def dtype(self) -> Dtype | None:
        """The dtype of the products, the one with the larger range of two."""
        if self.use == "tangent":
            return None
        return max(self.lhs, self.rhs, key=lambda dtype: float(jnp.finfo(dtype).max))

    def tangent_form(self) -> "Scaled":
        """Returns the form of the product with the tangent of an operand."""
        return dataclasses.replace(self, use="tangent")

    def transposed(self, side: int) -> "Scaled":
        """Returns the form of the product that is the cotangent of an operand."""
        other = self.rhs if side == 0 else self.lhs
        return Scaled(self.cotangent, other, self.cotangent, "backward")

    def cotangent_operand(self, cotangent: Array) -> ProductOperand:
        """Returns a cotangent as an operand, quantized."""
        return quantize_operand(cotangent, self.cotangent)

    def multiply(
        self,
        lhs: ProductOperand,
        rhs: ProductOperand,
        axes: Dimensions | Groups,
        out_sharding: NamedSharding | None,
        is_tpu: bool,
    ) -> Array:
        """Returns the product, in the dtype of its operands."""
        is_forward, dtype = self.use == "forward", lhs.array.dtype
        # By default a GPU's float8 kernel accumulates with fewer digits than float32.
        precision = None if is_forward or is_tpu else lax.Precision.HIGHEST
        operands, dtypes = (lhs, rhs), (self.lhs, self.rhs)
        is_uniform = all(map(_is_scaled_as_one, operands, axes.contracted))
        # A GPU has no float8 kernel for groups of dequantized operands, nor for a batch
        # of them with a scale for each.
        scales_follow = is_tpu or isinstance(axes, Groups)
        if is_uniform and (
            scales_follow or any(each.parts[1].ndim for each in operands)
        ):
            scaled = [*map(_scaled, operands, dtypes)]
            left, right = (each.numbers for each in scaled)
            # For a GPU a float32 result would be a pass of its own.
            result_dtype = np.dtype("float32") if is_tpu else dtype
            result = axes.product(left, right, precision, result_dtype, out_sharding)
            for side, each in enumerate(scaled):
                scale = each.scale.astype(result.dtype)
                result = axes.times_rows(result, scale, side)
            return result.astype(dtype)
        left, right = map(_dequantized, operands, dtypes)
        result = axes.product(left, right, precision, dtype, out_sharding)
        if not is_forward:
            return result
        # XLA would compute a gelu in the product's kernel and also return the product,
        # which its float8 kernels cannot do, so compilation fails. This op changes no
        # number, and separates the two.
        finfo = jnp.finfo(dtype)
        return lax.reduce_precision(result, finfo.nexp, finfo.nmant)


def _is_scaled_as_one(operand: ProductOperand, contracted: Sequence[int]) -> bool:
    """Whether an operand has one scale along its contracted axes."""
    # ``vmap`` gives a scale the leading axes of its numbers.
    return bool(operand.parts) and all(
        axis >= operand.parts[1].ndim for axis in contracted
    )


def _dequantized(operand: ProductOperand, dtype: Dtype) -> Array:
    """Returns an operand in 16 bits."""
    if not operand.parts:
        return operand.array
    return dequantize(_scaled(operand, dtype), operand.array.dtype)


def _scaled(operand: ProductOperand, dtype: Dtype) -> Quantized:
    """Returns the numbers of an operand, and their scale with as many axes."""
    bits, scale = operand.parts
    shape = *scale.shape, *[1] * (bits.ndim - scale.ndim)
    return Quantized(lax.bitcast_convert_type(bits, dtype), scale.reshape(shape))
