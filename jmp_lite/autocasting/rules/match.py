"""The rule that decides an op at a path, and the precision that it names."""

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from jmp_lite.casting.dtypes import dtype_names, parse_dtype, unknown_name
from jmp_lite.formats.float8 import Float8, Float8Format
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.formats.own import Format, OwnFormat
from jmp_lite.formats.table import FORMATS, get_format, options_of
from jmp_lite.ops import Precision

AnyPrecision: TypeAlias = Precision | NumberFormat
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

    @property
    def is_explicit(self) -> bool:
        """Whether the user names the op or its place, and not the op table alone.

        Such a rule has the effect that it names, whatever the op table knows of the op.
        """
        return self.source in (RuleSource.OP, RuleSource.SCOPE, RuleSource.MARK)


def format_of(precision: AnyPrecision) -> NumberFormat | None:
    """Returns the number format of products that a precision is, or None."""
    return precision if isinstance(precision, NumberFormat) else None


def name_of(precision: AnyPrecision) -> str:
    """Returns the name of a precision, in lower case as in rules."""
    return precision.name if isinstance(precision, NumberFormat) else precision.value


def in_json(precision: AnyPrecision) -> str | dict[str, Any]:
    """Returns a precision for JSON: its name, and options of its own.

    Raises:
      ValueError: JSON cannot describe the format.
    """
    if not isinstance(precision, NumberFormat):
        return precision.value
    if not _is_known(precision):
        raise ValueError(
            f"The format {precision.name!r} cannot be written as JSON, because it is "
            "not one of this library's. Write the rules without it, and add it to "
            "those that you read: rules.scope(pattern, format)."
        )
    options = options_of(precision)
    usual = options_of(FORMATS[precision.name])
    options = {name: one for name, one in options.items() if one != usual[name]}
    return {"format": precision.name, **options} if options else precision.name


def in_json_or_name(precision: AnyPrecision) -> str | dict[str, Any]:
    """Returns a precision for JSON; of a user's own format, the name."""
    is_own = isinstance(precision, NumberFormat) and not _is_known(precision)
    return precision.name if is_own else in_json(precision)


def _is_known(precision: NumberFormat) -> bool:
    """Whether a number format is one of this library's."""
    return type(FORMATS.get(precision.name)) is type(precision)


def parse_precision(
    precision: "AnyPrecision | Float8 | Format | str | Mapping[str, Any]",
) -> AnyPrecision:
    """Returns the precision for a name, in upper or lower case."""
    if isinstance(precision, AnyPrecision):
        return precision
    if isinstance(precision, Format):
        return OwnFormat(precision.name, precision)
    if isinstance(precision, Float8):
        return Float8Format("float8", precision)
    if isinstance(precision, Mapping):  # As ``in_json`` writes it.
        options = {**precision}
        if "format" not in options:
            raise ValueError(
                'Expected a number format as {"format": its name, ...}, got '
                f"{options!r}."
            )
        return get_format(options.pop("format"), **options)
    if callable(precision) and not isinstance(precision, type):
        raise ValueError(
            f"Expected a precision or a number format, got the function {precision!r}. "
            'Give it a name: jmp_lite.Format("name", dot_general=function).'
        )
    members = {member.value: member for member in Precision}
    names: dict[str, AnyPrecision] = {**FORMATS, **members}
    name = str(precision).lower()
    if name not in names and name in dtype_names():
        bits = parse_dtype(name).itemsize * 8
        meant = "full" if bits == 32 else "float8" if bits == 8 else "low"
        raise ValueError(
            f"Expected a precision, got the dtype {precision!r}. Did you mean "
            f"{meant!r}? The precision 'low' is the compute dtype, 'full' is float32."
        )
    if name == "full_inside":
        raise ValueError(
            "The precision 'full_inside' is gone: norms are found by what they "
            "compute, so they need no rule. For other scopes use 'full', and "
            "jmp_lite.as_low(result) where 16 bits should leave."
        )
    if name not in names:
        raise unknown_name("precision", str(precision), names)
    return names[name]


# ------------------------------------------------------------------- scopes and marks

AUTOCAST_SCOPE = "__autocast__"
FULL_SCOPE = "__full_precision__"
LOW_SCOPE = "__low_precision__"
AS_WRITTEN_SCOPE = "__low_call__"

_MARKS: Mapping[str, Precision] = MappingProxyType(
    {
        # Of two autocasts the inner one decides: ``autocast(fun, "O0")`` inside of
        # another.
        AUTOCAST_SCOPE: Precision.KEEP,
        FULL_SCOPE: Precision.FULL,
        LOW_SCOPE: Precision.LOW,
        AS_WRITTEN_SCOPE: Precision.KEEP,
    }
)
"""Reserved names of scopes, which win over all others, the innermost first."""


def match_scope(
    scopes: Iterable[tuple[str, AnyPrecision]], path: str, op: str = ""
) -> RuleMatch | None:
    """Returns the mark or the scope rule that matches a path, or None.

    Args:
      scopes: the scope rules, the first match wins.
      path: the path.
      op: an op; a scope for a number format matches the products that have it. Empty
        for all ops.
    """
    # From the innermost: ``low_precision`` in a function that is ``full_precision``.
    for name in reversed(path.split("/")):
        if name in _MARKS:
            return RuleMatch(_MARKS[name], RuleSource.MARK, name)
    for pattern, precision in scopes:
        if _applies(precision, op) and re.search(pattern, path):
            return RuleMatch(precision, RuleSource.SCOPE, pattern)
    return None


def _applies(precision: AnyPrecision, op: str) -> bool:
    """Whether a scope rule for a precision applies to an op."""
    requested = format_of(precision)
    return requested is None or op in requested.ops


class UnusedScope(NamedTuple):
    """A scope rule that decides nothing in a function.

    Attributes:
      pattern: its pattern.
      earlier: the pattern of a rule that comes first at one of its paths. None if its
        pattern matches no path.
    """

    pattern: str
    earlier: str | None


def unused_scopes(
    scopes: Sequence[tuple[str, AnyPrecision]], ops: Iterable[tuple[str, str]]
) -> Iterator[UnusedScope]:
    """Yields each scope rule that matches no path, or always comes too late.

    Args:
      scopes: the scope rules, the first match wins.
      ops: the path and the name of each op of the function.

    Example:
      >>> full, low = Precision.FULL, Precision.LOW
      >>> scopes = [("head", full), ("norm", full), ("he", low)]
      >>> for pattern, earlier in unused_scopes(scopes, [("block/head", "exp")]):
      ...     print(pattern, earlier)
      norm None
      he head
    """
    used: set[str] = set()
    earlier: dict[str, str] = {}
    for path, op in dict.fromkeys(ops):
        first = None
        for pattern, precision in scopes:
            if not re.search(pattern, path):
                continue
            if first is not None:
                earlier[pattern] = first
                continue
            used.add(pattern)
            # A scope for float8 decides products alone, so a later rule for other ops
            # has an effect, too.
            if _applies(precision, op):
                first = pattern
    for pattern, _ in scopes:
        if pattern not in used:
            yield UnusedScope(pattern, earlier.get(pattern))


def of_the_user(path: str) -> str:
    """Returns a path without the reserved scope in which autocast binds."""
    return "/".join(name for name in path.split("/") if name != AUTOCAST_SCOPE)
