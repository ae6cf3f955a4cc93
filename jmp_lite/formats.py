"""The number formats of matrix products."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp_lite.casting.dtypes import parse_dtype, unknown_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """The formats of float8 matrix products, and the smallest product that qualifies.

    An operand is divided by a scale and rounded. The scale is a power of two that
    brings the operand's largest number near the largest number of the format. A product
    qualifies under these conditions:

    - The compute dtype is bfloat16.
    - One operand is a weight: an argument, a constant, or a slice of one in a scan.
    - It has no batch axes.
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
        _check_format("forward", self.forward, _FORWARD)
        _check_format("backward", self.backward, _BACKWARD)
        smallest: Any = self.smallest
        is_number = isinstance(smallest, int | float) and smallest >= 0
        if not is_number or isinstance(smallest, bool):
            raise ValueError(
                f"Expected a number of at least 0 for smallest, got {self.smallest!r}."
            )

    @property
    def forward_dtype(self) -> np.dtype[Any]:
        """The dtype of operands, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.forward}")

    @property
    def backward_dtype(self) -> np.dtype[Any]:
        """The dtype of cotangents, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.backward}")


_FORWARD = ("e4m3fn", "e4m3fnuz")

_BACKWARD = ("e5m2", "e5m2fnuz", *_FORWARD)


def _check_format(field: str, name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        raise unknown_name(f"{field} format", str(name), accepted)
