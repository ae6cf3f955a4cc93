"""The rule that decides an op at a path."""

import enum
from typing import NamedTuple

from jmp_lite.casting.dtypes import dtype_names, parse_dtype, unknown_name
from jmp_lite.ops import Precision


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
