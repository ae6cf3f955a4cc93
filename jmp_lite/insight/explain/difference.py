"""Compares two explanations of one function."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jmp_lite.insight.explain.rows import Row
from jmp_lite.insight.places import short
from jmp_lite.insight.tables import count, text_table


class Difference:
    """The differences between two explanations of a function; ``print`` shows a table.

    Attributes:
      changed: pairs of rows of the same equation that run in different dtypes or hold
        different numbers of bytes.
      only_left: the equations of the first explanation only.
      only_right: the equations of the second explanation only.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> fun, x = lambda x: x @ x, jnp.ones((2, 2))
      >>> difference = jmp.explain(fun, "O0")(x).diff(jmp.explain(fun)(x))
      >>> [(a.precision, b.precision) for a, b in difference.changed]
      [('float32', 'bfloat16')]
    """

    def __init__(self, left: Sequence[Row], right: Sequence[Row]) -> None:
        ours, theirs = _index_by_place(left), _index_by_place(right)
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
    """Returns the dtypes of two rows, with their bytes if the dtypes are equal."""
    if a.precision != b.precision:
        return a.precision, b.precision
    first, second = (f"{r.precision}, {count(r.bytes_run)}B" for r in (a, b))
    return first, second


def _index_by_place(rows: Iterable[Row]) -> Mapping[object, Row]:
    """Returns rows by keys that are the same in each explanation of a function."""
    seen: Counter[object] = Counter()
    found: dict[object, Row] = {}
    for row in rows:
        key = (row.scope, row.op, row.source, row.is_backward)
        found[*key, seen[key]] = row
        seen[key] += 1
    return found


def _times(row: Row) -> str:
    return "?" if row.times is None else str(row.times)
