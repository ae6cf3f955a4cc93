"""Scope rules: which of them matches a path, and the reserved scopes of marks."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

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
    for name in reversed(path.split("/")):
        if name in _MARKS:
            return RuleMatch(_MARKS[name], RuleSource.MARK, name)
    for pattern, precision in scopes:
        requested = format_of(precision)
        is_for_op = requested is None or op in requested.ops
        if is_for_op and re.search(pattern, path):
            return RuleMatch(precision, RuleSource.SCOPE, pattern)
    return None


def of_the_user(path: str) -> str:
    """Returns a path without the reserved scope in which autocast binds."""
    return "/".join(name for name in path.split("/") if name != AUTOCAST_SCOPE)
