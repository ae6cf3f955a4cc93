"""The precisions that a rule gives to an op, a scope, or part of a function."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_lite.casting.dtypes import dtype_names, parse_dtype, unknown_name


class Precision(enum.Enum):
    """The precision of an op, or of all ops in a scope.

    - ``LOW``: the op runs in the compute dtype, and its result has this dtype.
    - ``FULL``: the op runs in float32. Its result is deliberate float32: an op that
      follows it runs in float32, too.
    - ``FOLLOW``: the op runs in the precision of its operands.
    - ``WIDEST``: like ``FOLLOW``, but any float32 operand makes the op float32, as in
      ordinary type promotion.
    - ``KEEP``: the op runs in the dtypes of the trace.
    - ``FULL_INSIDE``: for scopes, such as norm layers. All ops run in float32. A result
      is low again if a low value entered the scope.
    - ``FLOAT8``: for matrix products. Operands are quantized to 8 bits, and the result
      is in the compute dtype. A product that does not qualify is ``LOW``; see
      ``Float8``.

    Example:
      >>> import jmp_lite as jmp
      >>> rules = jmp.get_rules("mixed")
      >>> rules.precision_of("dot_general"), rules.compute_dtype
      (Precision.LOW, dtype(bfloat16))
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
        """Whether results are always in the compute dtype."""
        return self in (Precision.LOW, Precision.FLOAT8)

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


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


class RuleSource(enum.Enum):
    """The part of the rules that a rule comes from.

    ``TABLE``: the op table. ``UNKNOWN``: the op is not in the table. ``OP``,
    ``DEFAULT`` and ``SCOPE``: those fields of ``Rules``. ``MARK``: a mark in the
    function.
    """

    TABLE = "table"
    UNKNOWN = "unknown"
    OP = "op"
    DEFAULT = "default"
    SCOPE = "scope"
    MARK = "mark"


class RuleMatch(NamedTuple):
    """The rule that matches an op at a path.

    Attributes:
      precision: the precision that it gives.
      source: the part of the rules that it comes from.
      name: the id of the op group, the pattern of the scope, the reserved scope of the
        mark, or the op.
    """

    precision: Precision
    source: RuleSource
    name: str


def parse_precision(precision: "Precision | str") -> Precision:
    """Returns the precision for a name, in upper or lower case."""
    if isinstance(precision, Precision):
        return precision
    names = {member.value: member for member in Precision}
    name = str(precision).lower()
    if name not in names and name in dtype_names():
        bits = parse_dtype(name).itemsize * 8
        meant = "full" if bits == 32 else "float8" if bits == 8 else "low"
        raise ValueError(
            f"Expected a precision, got the dtype {precision!r}. Did you mean "
            f"{meant!r}? The precision 'low' is the compute dtype, 'full' is float32."
        )
    if name not in names:
        raise unknown_name("precision", str(precision), names)
    return names[name]
