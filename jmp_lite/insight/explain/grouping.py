"""Groups rows by scope, and sums them up to some depth."""

import re
from collections.abc import Sequence

from jmp_lite.insight.explain.rows import Row, runs_in
from jmp_lite.insight.places import short
from jmp_lite.insight.tables import RowGroups

_HEADERS = ("times", "op", "runs in", "traced as", "why", "where")

_HEADERS_OF_A_SUM = ("times", "op", "runs in", "only in")

_NAMED = 3
"""The number of blocks that are named if an op runs differently in them."""

_LINES = 60
"""The number of lines on a terminal."""


def depth_that_fits(rows: Sequence[Row]) -> int | None:
    """Returns the greatest depth whose table fits on a terminal."""
    deepest = max((row.scope.count("/") + 1 for row in rows), default=0)
    for depth in (None, *range(deepest, 0, -1)):
        _, groups = grouped(rows, depth)
        if sum(1 + len(cells) for _, cells in groups) <= _LINES:
            return depth
    return 1


def grouped(rows: Sequence[Row], depth: int | None) -> tuple[Sequence[str], RowGroups]:
    """Returns the headers and the rows of a table, by scope."""
    counted: dict[tuple[str, ...], list[Row]] = {}
    of_op: dict[object, list[Row]] = {}
    for row in rows:
        cells, scope = _cells(row, depth), _cut(row.scope, depth)
        counted.setdefault((scope, *cells), []).append(row)
        of_op.setdefault((scope, row.op), []).append(row)
    if depth is not None:  # Each scope once.
        order = list(dict.fromkeys(key[0] for key in counted))
        by_scope = sorted(counted, key=lambda key: order.index(key[0]))
        counted = {key: counted[key] for key in by_scope}
    groups: list[tuple[str, list[Sequence[str]]]] = []
    above = ""
    for (scope, *cells), same in counted.items():
        if not groups or scope != above:
            above = scope
            groups.append((scope or ("(no scope)" if groups else ""), []))
        times = [row.times for row in same]
        number = "?" if None in times else str(sum(t for t in times if t))
        if depth is not None:
            cells.append(_blocks_that_differ(same, of_op[scope, cells[0]], depth))
        groups[-1][1].append((number, *cells))
    headers = _HEADERS if depth is None else _HEADERS_OF_A_SUM
    return headers, groups


def _cells(row: Row, depth: int | None) -> Sequence[str]:
    if depth is not None:
        return (row.op, runs_in(row))
    texts = (" ".join(row.shapes), row.reason, short(row.source))
    return (row.op, runs_in(row), *texts)


def _blocks_that_differ(rows: Sequence[Row], among: Sequence[Row], depth: int) -> str:
    """Returns the few numbered blocks in which an op runs differently."""
    ours, all_ = (
        {_first(row.scope, depth): None for row in some} for some in (rows, among)
    )
    is_few = 2 * len(ours) <= len(all_) and len(ours) <= _NAMED
    return ", ".join(ours) if is_few else ""


def _first(scope: str, depth: int) -> str:
    return "/".join(scope.split("/")[:depth])


def _cut(scope: str, depth: int | None) -> str:
    """Returns the start of a path, with numbered blocks as one."""
    return scope if depth is None else re.sub(r"\d+", "*", _first(scope, depth))
