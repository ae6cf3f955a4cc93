"""What is lost without a rule, and its table."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Lost(NamedTuple):
    """What some programs lose without a rule.

    Attributes:
      changed: how many traces change.
      not_finite: how many become NaN or infinite.
      worse: how many have an error that is ``WORSE`` times as large, by dtype.
      worst: the largest ratio of errors.
      one: the program that has it.
    """

    changed: int
    not_finite: int
    worse: Mapping[str, int]
    worst: float
    one: str


class Cost(NamedTuple):
    """What a compiled model costs without a rule, relative to the same with it."""

    model: str
    moved: float
    peak: float
    roofline: float


class Row(NamedTuple):
    """A rule, and what is lost without it.

    Attributes:
      rule: its name.
      says: what it says.
      sweep: what the programs of the sweep lose.
      search: what those of the search lose.
      models: what compiled models cost that change.
    """

    rule: str
    says: str
    sweep: Lost
    search: Lost
    models: Sequence[Cost]


def rows_of(written: Sequence[dict[str, Any]]) -> list[Row]:
    """Returns rows from JSON, where a tuple is a list."""
    return [
        Row(
            row["rule"],
            row["says"],
            Lost(*row["sweep"]),
            Lost(*row["search"]),
            [Cost(*cost) for cost in row["models"]],
        )
        for row in written
    ]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text: of the programs that change, how many are worse."""
    lines = [f"{'without':20}{'the sweep':>22}{'the search':>24}{'bytes, peak':>15}"]
    for row in rows:
        dearest = max(row.models, key=lambda cost: cost.moved, default=None)
        costs = f"{dearest.moved:.2f} {dearest.peak:.2f}" if dearest else "="
        lines.append(
            f"{row.rule:20}{_lost(row.sweep):>22}{_lost(row.search):>24}{costs:>15}"
        )
        lines.append(f"  {row.says}")
    return "\n".join(lines)


def _lost(lost: Lost) -> str:
    if not lost.changed:
        return "="
    worse = sum(lost.worse.values()) + lost.not_finite
    how = "NaN" if lost.not_finite else f"{lost.worst:,.1f}x"
    return f"{worse} of {lost.changed}" + (f", {how}" if worse else "")
