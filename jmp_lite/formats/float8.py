"""The format ``float8``: operands of 8 bits, one scale for each array.

An operand is quantized (e4m3), and so is the cotangent of the result (e5m2), so all
three products are float8. The derivative of rounding counts as the identity. A product
saves its quantized operands for the backward pass, one byte per element.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jmp_lite.casting import quantize
from jmp_lite.casting.dtypes import Device, default_device, parse_dtype
from jmp_lite.casting.quantize import Quantized
from jmp_lite.formats import eight_bits
from jmp_lite.formats.number_format import check_option
from jmp_lite.jaxprs import bilinear
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.products import Dimensions
from jmp_lite.jaxprs.types import Array, Dtype

OF_DEVICE = "device"
"""The formats in which the default device multiplies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """The formats of float8 matrix products, and the smallest product that qualifies.

    An operand is divided by a scale and rounded. The scale is a power of two that
    brings the operand's largest number near the largest number of the format. A product
    qualifies under these conditions:

    - The compute dtype is bfloat16.
    - One operand is a weight: an argument, a constant, or a slice of one in a scan.
    - It is no product of groups (``ragged_dot``).
    - Its sizes are multiples of 16.
    - It is large enough, see ``smallest``.
    - An op that takes 16 bits reads its result. Logits and the result of a router are
      read only by float32 ops. (A scope rule for float8 includes these too.)

    Attributes:
      forward: the format of both operands: ``"e4m3fn"``, ``"e4m3fnuz"`` or
        ``"e4m3b11fnuz"``. ``"device"`` is the one in which the default device
        multiplies, when the function is called: see ``on``. A program that is compiled
        or exported for another device needs a name.
      backward: the format of cotangents: ``"e5m2"``, ``"e5m2fnuz"``, or a format of
        ``forward``, with more digits and less range; or ``"device"``.
      smallest: the smallest harmonic mean of the sizes M, K and N. This mean measures
        the arithmetic of a product relative to the bytes that it reads and writes.
        Below it, quantization costs as much as the product gains: on an H100, some ten
        kernels for each weight.
      sums: how an H100 adds the products of the forward pass up: ``"fast"``, with 13
        bits after the leading one and without rounding; or ``"promoted"``, which adds
        every 128 products to a float32 sum. Products of one sign need the second: see
        docs/float8.md. Those of the backward pass are always promoted.

    Raises:
      ValueError: a format is unknown, or matrix units do not multiply in it;
        ``smallest`` is negative or not a number; ``sums`` is unknown.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scales are
    those of TransformerEngine's "current scaling" and torchao's "tensorwise".

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.Float8(smallest=0)
      Float8(forward='device', backward='device', smallest=0, sums='fast')
      >>> jmp.Float8(forward="e4m3fn").forward_dtype
      dtype(float8_e4m3fn)
    """

    forward: str = OF_DEVICE
    backward: str = OF_DEVICE
    smallest: float = 2000
    sums: str = eight_bits.FAST

    def __post_init__(self) -> None:
        forward, backward = eight_bits.FORWARD_DTYPES, eight_bits.BACKWARD_DTYPES
        check_option("forward format", self.forward, [OF_DEVICE, *forward])
        check_option("backward format", self.backward, [OF_DEVICE, *backward])
        smallest = eight_bits.parse_smallest(self.smallest)
        object.__setattr__(self, "smallest", smallest)
        check_option("sums", self.sums, eight_bits.SUMS)

    @property
    def forward_dtype(self) -> Dtype:
        """The dtype of operands, a ``np.dtype``."""
        return parse_dtype(f"float8_{self._here.forward}")

    @property
    def backward_dtype(self) -> Dtype:
        """The dtype of cotangents, a ``np.dtype``."""
        return parse_dtype(f"float8_{self._here.backward}")

    @property
    def _here(self) -> "Float8":
        # At each use, never at import: that would start a backend.
        is_open = OF_DEVICE in (self.forward, self.backward)
        return self.on(default_device()) if is_open else self

    def on(self, device: Device) -> "Float8":
        """Returns these formats, with those in which a device multiplies for "device".

        Args:
          device: a device of JAX, such as ``jax.devices()[0]``.
        """
        forward, backward, _ = formats_of(device)
        return dataclasses.replace(
            self,
            forward=forward if self.forward == OF_DEVICE else self.forward,
            backward=backward if self.backward == OF_DEVICE else self.backward,
        )


_V5E_V6E = ("e4m3b11fnuz", "e4m3b11fnuz")
_UNITS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), _V5E_V6E),
        "gfx94": ("e4m3fnuz", "e5m2fnuz"),  # MI300.
    }
)
"""The formats in which a device multiplies, by a part of its name."""


def formats_of(device: Device) -> tuple[str, str, str]:
    """Returns the formats of operands and of cotangents on a device, and why."""
    names = (
        getattr(device, name, "") for name in ("device_kind", "compute_capability")
    )
    kind = " ".join(map(str, names)).strip()
    for part, (forward, backward) in _UNITS.items():
        if part in kind:
            return forward, backward, f"a {kind} multiplies these"
    return "e4m3fn", "e5m2", f"the choice for a {kind or 'device'}, as for an H100"


def describe_formats(formats: Float8, device: Device) -> str:
    """Returns the formats of float8 products, and why a device has them."""
    forward, backward, why = formats_of(device)
    formats = formats.on(device)
    text = f"operands in {formats.forward}, cotangents in {formats.backward}"
    is_choice = (formats.forward, formats.backward) == (forward, backward)
    return f"{text}: {why}" if is_choice else text


@dataclasses.dataclass(frozen=True)
class Float8Format(eight_bits.EightBits):
    """The format ``float8``, with its options; see ``Scaled``."""

    options: Float8 = Float8()

    # Computed again, a scale would be a pass over its array.
    saved = (quantize.SCALE_NAME,)
    options_in_words = "jmp_lite.Float8("

    @property
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""
        return self.options.smallest

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        return self.options.forward_dtype

    def round(self, array: Array) -> ProductOperand:
        """Returns an operand of a product, quantized."""
        return quantize_operand(array, self.options.forward_dtype)

    def form(self) -> "Scaled":
        """Returns how a product is computed."""
        forward, backward = self.options.forward_dtype, self.options.backward_dtype
        return Scaled(forward, forward, backward, self.options.sums)


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


# Under jit, so that each shape is traced once.
_quantize = jax.jit(quantize.quantize, static_argnames="dtype")


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A product of quantized operands, see ``ProductForm``.

    The product reads the 8-bit numbers, and its result is multiplied with both scales.
    They are powers of two, so nothing is rounded. This form is float8 on every chip and
    under all flags of XLA. A product of dequantized operands is not: XLA for GPUs turns
    it into a float8 kernel only without Triton's products, and drops its roundings to
    float8 otherwise (jax 0.10 to 0.12).

    Attributes:
      lhs: the dtype of the left operand; None for an operand that is not quantized,
        such as a tangent.
      rhs: the dtype of the right operand.
      cotangent: the dtype of the cotangent of the result.
      sums: how products are added up; in a derivative they are promoted.
    """

    lhs: Dtype | None
    rhs: Dtype | None
    cotangent: Dtype
    sums: str = eight_bits.FAST

    @property
    def dtype(self) -> Dtype | None:
        """The dtype of the products, the one with the larger range of two."""
        if self.lhs is None or self.rhs is None:
            return None
        return max(self.lhs, self.rhs, key=lambda dtype: float(jnp.finfo(dtype).max))

    def with_tangent(self, side: int) -> "Scaled":
        """Returns the form of the product with the tangent of an operand."""
        # A tangent is not rounded, so that the derivative is linear in it.
        of_operand = {"lhs": None} if side == 0 else {"rhs": None}
        return dataclasses.replace(self, sums=eight_bits.PROMOTED, **of_operand)

    def transposed(self, side: int) -> "Scaled":
        """Returns the form of the product that is the cotangent of an operand."""
        other = self.rhs if side == 0 else self.lhs
        rounds_to = None if other is None else self.cotangent
        return Scaled(rounds_to, other, self.cotangent, eight_bits.PROMOTED)

    def cotangent_operand(self, cotangent: Array) -> ProductOperand:
        """Returns the left operand of a transposed product, quantized."""
        if self.lhs is None:
            return ProductOperand(cotangent)
        return quantize_operand(cotangent, self.lhs)

    def multiply(
        self,
        lhs: ProductOperand,
        rhs: ProductOperand,
        axes: Dimensions,
        out_sharding: NamedSharding | None,
    ) -> Array:
        """Returns the product, in the dtype of its operands."""
        dtype = lhs.array.dtype
        if self.lhs is None or self.rhs is None:
            # Beside a tangent, which has 16 bits, the other operand has 16 bits, too.
            left, right = (
                quantize.dequantize(_scaled(each, to), dtype)
                if to is not None and each.parts
                else each.array
                for each, to in ((lhs, self.lhs), (rhs, self.rhs))
            )
            return axes.product(left, right, None, dtype, out_sharding)
        on_left, on_right = axes.contracted
        left = _with_one_scale(_scaled(lhs, self.lhs), on_left)
        right = _with_one_scale(_scaled(rhs, self.rhs), on_right)
        precision = eight_bits.sum_precision(self.sums)
        result = axes.product(
            left.numbers, right.numbers, precision, dtype, out_sharding
        )
        # That of a cotangent, the left operand, comes last: under a loss scale it may
        # be so large that its product with the numbers alone would overflow.
        for side, each in ((1, right), (0, left)):
            result = axes.times_rows(result, each.scale.astype(result.dtype), side)
        return result


def _with_one_scale(quantized: Quantized, contracted: Sequence[int]) -> Quantized:
    """Returns an array with one scale along its contracted axes."""
    # ``vmap`` gives each example a scale, and the gradient of a shared weight adds up
    # over all examples. Their numbers are divided by powers of two, to the largest one.
    numbers, scale = quantized
    axes = [axis for axis in contracted if scale.shape[axis] > 1]
    if not axes:
        return quantized
    largest = jnp.max(scale, axes, keepdims=True)  # NaN if one of them is.
    ratio = (scale / largest).astype(jnp.bfloat16)
    shifted = quantize.to_float8(numbers.astype(jnp.bfloat16) * ratio, numbers.dtype)
    return Quantized(shifted, largest)


def _scaled(operand: ProductOperand, dtype: Dtype) -> Quantized:
    """Returns the numbers of an operand, and their scale with as many axes."""
    bits, scale = operand.parts
    shape = *scale.shape, *[1] * (bits.ndim - scale.ndim)
    return Quantized(lax.bitcast_convert_type(bits, dtype), scale.reshape(shape))
