"""The precisions that a rule may give an op, a scope or a part of a function."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_lite.casting.dtypes import parse_dtype, unknown_name


class Precision(enum.Enum):
    """How an op, or all that a scope holds, is run.

    ``LOW``: operands are cast to the compute dtype, and so is the result.
    ``FULL``: in float32; the result is float32 on purpose, and what follows stays so.
    ``FOLLOW``: in the precision that the operands already have.
    ``WIDEST``: as ``FOLLOW``, but any float32 operand widens: ordinary promotion.
    ``KEEP``: in the dtypes that were traced.
    ``FULL_INSIDE``: for scopes: float32 inside, and what leaves is low again if
    something low entered. What a norm layer is.
    ``FLOAT8``: for matrix products: operands are quantized to 8 bits, and the result is
    in the compute dtype. A product that does not qualify is ``LOW``; see ``Float8``.
    """

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    WIDEST = "widest"
    KEEP = "keep"
    FULL_INSIDE = "full_inside"
    FLOAT8 = "float8"

    @property
    def lowers(self) -> bool:
        """Whether results are in the compute dtype, whatever the operands are."""
        return self in (Precision.LOW, Precision.FLOAT8)

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """How a matrix product in float8 is made, and which ones qualify.

    An operand is divided by a scale, a power of two, so that its largest number is near
    the largest of the format, and is rounded. A product qualifies if

    - the compute dtype is bfloat16,
    - one operand is a weight: an argument, a constant, or a slice of one in a scan,
    - it has no batch axes,
    - its sizes are multiples of 16,
    - it is large enough to gain, see ``smallest``,
    - and an op that takes 16 bits reads its result. Logits and the result of a router
      are read in float32 alone. (A scope that asks for float8 includes these.)

    Attributes:
      forward: the format of both operands: ``"e4m3fn"``, or ``"e4m3fnuz"`` on AMD's
        MI300.
      backward: the format of cotangents: ``"e5m2"``, ``"e5m2fnuz"``, or one with more
        digits and less range, as ``forward``.
      smallest: the least harmonic mean of the three sizes M, K and N, which is what a
        product computes for what it reads and writes. Below it, quantizing costs what
        the product gains: on an H100 some ten kernels for each weight.

    Raises:
      ValueError: there is no such format, or matrix units do not multiply in it;
        ``smallest`` is negative or no number.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scales are
    those of TransformerEngine's "current scaling" and torchao's "tensorwise".

    Example:
      >>> Float8(smallest=0)
      Float8(forward='e4m3fn', backward='e5m2', smallest=0)
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
                f"Expected smallest as a size, at least 0, got {self.smallest!r}."
            )

    @property
    def forward_dtype(self) -> np.dtype[Any]:
        """The dtype of operands."""
        return parse_dtype(f"float8_{self.forward}")

    @property
    def backward_dtype(self) -> np.dtype[Any]:
        """The dtype of cotangents."""
        return parse_dtype(f"float8_{self.backward}")


_FORWARD = ("e4m3fn", "e4m3fnuz")

_BACKWARD = ("e5m2", "e5m2fnuz", *_FORWARD)


def _check_format(field: str, name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        raise unknown_name(f"{field} format", str(name), accepted)


class RuleSource(enum.Enum):
    """Where a rule comes from.

    ``TABLE``: the table of ops. ``UNKNOWN``: the op is in no table. ``OP``, ``DEFAULT``
    and ``SCOPE``: those fields of ``Rules``. ``MARK``: the code of the function.
    """

    TABLE = "table"
    UNKNOWN = "unknown"
    OP = "op"
    DEFAULT = "default"
    SCOPE = "scope"
    MARK = "mark"


class RuleMatch(NamedTuple):
    """The rule that matches an op where it stands.

    Attributes:
      precision: what it says.
      source: where it comes from.
      name: of a table the id of the group, of a scope the pattern, of a mark its
        reserved scope; else the op.
    """

    precision: Precision
    source: RuleSource
    name: str


def parse_precision(precision: "Precision | str") -> Precision:
    """Returns the precision of a name, in any case."""
    if isinstance(precision, Precision):
        return precision
    names = {member.value: member for member in Precision}
    if str(precision).lower() not in names:
        raise unknown_name("precision", str(precision), names)
    return names[str(precision).lower()]
