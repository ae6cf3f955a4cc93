"""What formats of 8 bits share: options, and which products qualify."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.formats.number_format import (
    INTEGERS,
    QUALIFIES,
    Advice,
    NumberFormat,
    Product,
    Verdict,
    are_floats,
)
from jmp_lite.jaxprs import bilinear, params, products
from jmp_lite.jaxprs.bilinear import ProductForm, ProductOperand
from jmp_lite.jaxprs.products import axes_of
from jmp_lite.jaxprs.types import Array, Eqn

# Operands have more digits; cotangents may have more range.
FORWARD_DTYPES = ("e4m3fn", "e4m3fnuz", "e4m3b11fnuz")
"""The float8 dtypes of operands, without ``float8_``."""

BACKWARD_DTYPES = ("e5m2", "e5m2fnuz", *FORWARD_DTYPES)
"""Those of cotangents."""


FAST, PROMOTED = "fast", "promoted"
SUMS = (FAST, PROMOTED)
"""How a GPU's kernel adds float8 products up, see ``Float8``."""


def sum_precision(sums: str) -> lax.Precision | None:
    """Returns the precision that asks a compiler for these sums."""
    # XLA for GPUs then adds every 128 products to a float32 sum, see docs/float8.md.
    return lax.Precision.HIGHEST if sums == PROMOTED else None


def parse_smallest(smallest: Any) -> float:
    """Returns the smallest mean as a number of Python, which JSON can describe.

    Raises:
      ValueError: it is not a number of at least 0.
    """
    number = smallest.item() if isinstance(smallest, np.number) else smallest
    is_number = isinstance(number, int | float) and number >= 0
    if not is_number or isinstance(number, bool):  # A bool is an int of Python.
        raise ValueError(
            f"Expected a number of at least 0 for smallest, got {smallest!r}."
        )
    return number


@dataclasses.dataclass(frozen=True)
class EightBits(NumberFormat, abc.ABC):
    """A format of 8 bits for products of weights that are large enough.

    Attributes:
      options_in_words: the call that sets its options, without its arguments, for a
        message.
    """

    ops = ("dot_general", "ragged_dot_general")
    why_these_ops = "XLA has no kernels of 8 bits for convolutions."
    options_in_words: ClassVar[str]

    @abc.abstractmethod
    def form(self) -> ProductForm:
        """Returns how a product is computed."""

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the compute dtype has to be bfloat16."""
        return True

    @property
    @abc.abstractmethod
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies.

        ``Float8`` lists the conditions. A subclass may take other compute dtypes.
        """
        code = self._refusal(product)
        if code is not None:
            return Verdict(False, code)
        # Only float32 ops read logits, a router's result, and what a loss is made of. A
        # scope names such a product, while an op rule names all products.
        if is_last and is_named:
            return Verdict(True, "though_read_in_float32")
        return Verdict(False, "read_in_float32") if is_last else QUALIFIES

    def _refusal(self, product: Product) -> str | None:
        if not are_floats(product.eqn):
            return INTEGERS.code
        # XLA for GPUs multiplies all rows with the weights of all groups (jax 0.10).
        if params.op_of(product.eqn) != "dot_general":
            return "groups"
        # An array is divided in its own dtype, and float16 has no room for most scales.
        if self.needs_bfloat16 and product.dtype != jnp.bfloat16:
            return "compute_dtype"
        # Both products of attention stay in 16 bits.
        if not any(product.weights):
            return "no_weight"
        sizes = products.product_sizes(product.eqn)
        if not all(map(_fits, sizes)):
            return "size"
        # Below it, quantization costs as much as the product gains.
        return "small" if _harmonic_mean(sizes) < self.smallest_mean else None

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product; the products of its derivative are quantized too."""
        del bound
        # A format by rows rounds in the product, which knows what a row is.
        lhs, rhs = (
            each if isinstance(each, ProductOperand) else ProductOperand(each)
            for each in operands
        )
        axes, sharding = axes_of(product.eqn), products.out_sharding(product.eqn)
        return bilinear.bilinear(lhs, rhs, self.form(), axes, sharding)

    def words(self, code: str, eqn: Eqn) -> str:
        """Returns the code of a verdict in words."""
        sizes = dict(zip("MNK", products.product_sizes(eqn), strict=True))
        if code == "size":
            name, size = next(item for item in sizes.items() if not _fits(item[1]))
            verb = "is not" if isinstance(size, int) else "may not be"
            return f"{name} = {size} {verb} a multiple of 16"
        if code == "small":
            text = " x ".join(map(str, sizes.values()))
            mean = _harmonic_mean([*sizes.values()])
            return f"{text} is too small (harmonic mean {mean:.0f})"
        return _EIGHT_BIT_WORDS.get(code) or super().words(code, eqn)

    def advice(self, code: str) -> Advice | None:
        """Returns the lint for products with the code of a verdict, or None."""
        if code == "size":
            remedy = "needs multiples of 16: pad, or choose another width"
            return Advice(f"{self.name} sizes", f"{self.name.capitalize()} {remedy}")
        if code == "small":
            return Advice(
                f"small {self.name} product",
                "Leave it out of the scope, or lower "
                f"{self.options_in_words}smallest=...)",
                is_for_scopes=True,
            )
        if code == "though_read_in_float32":
            return Advice(
                f"last {self.name} product",
                f'Add rules.scope(..., "low") before the {self.name} scope',
                f"only float32 ops read the result of this {self.name} product "
                "(logits, for example)",
            )
        return None


_EIGHT_BIT_WORDS = {
    "compute_dtype": "the compute dtype is not bfloat16",
    "no_weight": "no operand is a weight",
    "groups": "a product of groups",
    "read_in_float32": "read only by float32 ops",
    "though_read_in_float32": "read only by float32 ops",
}


def _fits(size: object) -> bool:
    """Whether matrix units accept a size in float8."""
    # Whether a symbolic size is a multiple of 16 is not known.
    return isinstance(size, int) and size > 0 and size % 16 == 0


def _harmonic_mean(sizes: Sequence[int]) -> float:
    # For the sizes of a product, it is three times the multiplications divided by the
    # elements of operands and result: the ratio of arithmetic to memory traffic.
    return len(sizes) / sum(1 / size for size in sizes)
