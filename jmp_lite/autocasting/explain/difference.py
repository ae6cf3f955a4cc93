"""What two explanations of one function say otherwise."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jmp_lite.autocasting.explain.rows import Row, short
from jmp_lite.autocasting.explain.tables import count, text_table


class Difference:
    """What two explanations of a function say otherwise; ``print`` shows a table.

    Attributes:
      changed: pairs of rows of the same equation that run in different dtypes.
      only_left: equations that the first alone has.
      only_right: equations that the second alone has.
    """

    def __init__(self, left: Sequence[Row], right: Sequence[Row]) -> None:
        ours, theirs = _by_place(left), _by_place(right)
        both = [(row, theirs[key]) for key, row in ours.items() if key in theirs]
        self.changed = tuple(
            (a, b)
            for a, b in both
            if (a.precision, a.bytes_run) != (b.precision, b.bytes_run)
        )
        self.only_left = tuple(row for key, row in ours.items() if key not in theirs)
        self.only_right = tuple(row for key, row in theirs.items() if key not in ours)

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_left or self.only_right)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        rows = [(a, *_precisions_of(a, b), b.reason) for a, b in self.changed]
        rows += [(row, row.precision, "-", "") for row in self.only_left]
        rows += [(row, "-", row.precision, row.reason) for row in self.only_right]
        like: dict[str, Counter[Sequence[str]]] = {}
        for row, *cells in rows:
            line = (_times(row), row.op, *cells, short(row.source))
            like.setdefault(row.scope, Counter())[line] += 1
        groups = [
            (scope, [(f"{n}" if n > 1 else "", *cells) for cells, n in counted.items()])
            for scope, counted in like.items()
        ]
        headers = ("", "times", "op", "before", "after", "why", "where")
        return text_table(headers, groups, right=(0, 1))


def _precisions_of(a: Row, b: Row) -> tuple[str, str]:
    """Returns what two rows run in, and how much they hold where that is the same."""
    if a.precision != b.precision:
        return a.precision, b.precision
    first, second = (f"{r.precision}, {count(r.bytes_run)}B" for r in (a, b))
    return first, second


def _by_place(rows: Iterable[Row]) -> Mapping[object, Row]:
    """Returns rows by what distinguishes them in each explanation of a function."""
    seen: Counter[object] = Counter()
    found: dict[object, Row] = {}
    for row in rows:
        key = (row.scope, row.op, row.source, row.is_backward)
        found[*key, seen[key]] = row
        seen[key] += 1
    return found


def _times(row: Row) -> str:
    return "?" if row.times is None else str(row.times)
