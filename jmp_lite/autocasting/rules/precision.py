"""The precisions that a rule may give an op, a scope or a part of a function."""

import enum
from typing import NamedTuple

from jmp_lite.casting.dtypes import unknown_name


class Precision(enum.Enum):
    """How an op, or all that a scope holds, is run.

    ``LOW``: operands are cast to the compute dtype, and so is the result.
    ``FULL``: in float32; the result is float32 on purpose, and what follows stays so.
    ``FOLLOW``: in the precision that the operands already have.
    ``WIDEST``: as ``FOLLOW``, but any float32 operand widens: ordinary promotion.
    ``KEEP``: in the dtypes that were traced.
    ``FULL_INSIDE``: for scopes: float32 inside, and what leaves is low again if
    something low entered. What a norm layer is.
    """

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    WIDEST = "widest"
    KEEP = "keep"
    FULL_INSIDE = "full_inside"

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


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
