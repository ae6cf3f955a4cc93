"""The format ``wide``: 16-bit operands and a float32 result."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jmp_lite.formats.number_format import (
    INTEGERS,
    QUALIFIES,
    NumberFormat,
    Product,
    Verdict,
    algorithm,
    are_floats,
)
from jmp_lite.jaxprs import wide_dot
from jmp_lite.jaxprs.types import Array, Eqn


@dataclasses.dataclass(frozen=True)
class WideFormat(NumberFormat):
    """The format ``wide``: operands in the compute dtype, and a float32 result.

    It is for products that float32 ops alone read, such as the logits of a language
    model. The cotangent is cast to the compute dtype, so that all three products have
    16-bit operands.
    """

    ops = ("dot_general",)
    why_these_ops = (
        "It is a form of matrix products; XLA for GPUs runs a convolution with a "
        "float32 result in float32."
    )
    has_fewer_digits = False

    @property
    def returns_float32(self) -> bool:
        """Its results are float32."""
        return True

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies: only float32 ops read its result."""
        del is_named
        if not are_floats(product.eqn):
            return INTEGERS
        # An op that takes 16 bits would round a float32 result at once.
        return QUALIFIES if is_last else Verdict(False, "read_in_16_bits")

    def words(self, code: str, eqn: Eqn) -> str:
        """Returns the code of a verdict in words."""
        if code == "read_in_16_bits":
            return "an op that takes 16 bits reads it"
        return super().words(code, eqn)

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product, in float32."""
        del bound
        # Its cotangent is rounded to 16 bits, which ``lax.dot_general`` does not do.
        return wide_dot.wide_dot(product.eqn, operands, algorithm(product))
