"""The rule that decides an op at a path, and the precision that it names."""

import enum
from typing import NamedTuple, TypeAlias

from jmp_lite import formats
from jmp_lite.casting.dtypes import dtype_names, parse_dtype, unknown_name
from jmp_lite.formats import Format
from jmp_lite.ops import Precision

AnyPrecision: TypeAlias = Precision | Format
"""What a rule names: a precision, or a number format without a ``Precision``."""


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

    precision: AnyPrecision
    source: RuleSource
    name: str


def format_of(precision: AnyPrecision) -> Format | None:
    """Returns the number format of products that a precision is, or None."""
    if isinstance(precision, Format):
        return precision
    return formats.FORMATS.get(precision.value)


def name_of(precision: AnyPrecision) -> str:
    """Returns the name of a precision, in lower case as in rules."""
    return precision.name if isinstance(precision, Format) else precision.value


def parse_precision(precision: AnyPrecision | str) -> AnyPrecision:
    """Returns the precision for a name, in upper or lower case."""
    if isinstance(precision, AnyPrecision):
        return precision
    members = {member.value: member for member in Precision}
    names: dict[str, AnyPrecision] = {**formats.FORMATS, **members}
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
