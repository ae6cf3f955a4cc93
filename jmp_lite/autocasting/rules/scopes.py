"""Scope rules: which of them matches a path, and the reserved scopes of marks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jmp_lite.autocasting.rules.match import (
    AnyPrecision,
    RuleMatch,
    RuleSource,
    format_of,
)
from jmp_lite.ops import Precision

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
