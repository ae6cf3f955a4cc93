"""The errors of the sweep as text."""

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.sweep.measure import DTYPES, Row, breaches, flags

_MARKS = {"not finite": "!", "gradient": "*", "leaf": "+"}
ILL_CONDITIONED = 1e-3


def summary_table(rows: Sequence[Row]) -> str:
    """Returns how many programs there are, and how exact ``"mixed"`` is, as text."""
    marks = flags(rows)
    lines = [
        f"{f'{len(rows) // len(DTYPES)} programs':50}{'bfloat16':>10}{'float16':>10}"
    ]

    def line(title: str, cells: Sequence[object]) -> None:
        lines.append(f"{title:50}" + "".join(f"{cell:>10}" for cell in cells))

    columns = [[row for row in rows if row.dtype == dtype] for dtype in DTYPES]
    for title, errors in (
        ("median error of their gradients, mixed", lambda row: row.mixed),
        ("  O1", lambda row: row.o1),
        ("  products by hand", lambda row: row.by_hand),
    ):
        found = [[errors(row).all for row in column] for column in columns]
        medians = [statistics.median(filter(math.isfinite, one)) for one in found]
        line(title, [f"{median:.2%}" for median in medians])
    line(
        "mixed is more than twice as far as both",
        [sum(where[1] == dtype for where in marks) for dtype in DTYPES],
    )
    line(
        "more than three times as far as O1 (law 7)",
        [sum(where[1] == dtype for where in breaches(rows)) for dtype in DTYPES],
    )
    return "\n".join(lines)


def programs_table(rows: Sequence[Row]) -> str:
    """Returns a line for each program: errors in percent, by dtype and way.

    ``*`` marks where ``"mixed"`` is more than twice as far as both other ways, ``+``
    the same of the worst leaf, ``!`` what is not finite, ``~`` a program whose gradient
    in float32 is itself more than 0.1 percent off that in float64.
    """
    marks = flags(rows)
    lines = [
        f"{'':28}{'16-bit':>7}{'bfloat16':>16}{'':7}{'float16':>16}{'':7}{'loss':>7}",
        f"{'program':28}{'share':>7}"
        + f"{'mixed ':>8}{'O1':>7}{'by hand':>8}" * 2
        + f"{'scale':>7}",
    ]
    for field in dict.fromkeys(row.field for row in rows):
        lines.append(field.replace("_", " "))
        of_field = [row for row in rows if row.field == field]
        for name in dict.fromkeys(row.program for row in of_field):
            lines.append(_line([row for row in of_field if row.program == name], marks))
    return "\n".join(lines)


def _line(rows: Sequence[Row], marks: Mapping[tuple[str, str], str]) -> str:
    cells = ""
    for row in rows:
        mark = _MARKS.get(marks.get((row.program, row.dtype), ""), " ")
        others = f"{_percent(row.o1.all):>7}{_percent(row.by_hand.all):>8}"
        cells += f"{_percent(row.mixed.all):>7}{mark}{others}"
    first, last = rows[0], rows[-1]
    is_rough = first.exact > ILL_CONDITIONED
    title = f"{first.program} ~" if is_rough else first.program
    share = "-" if first.share is None else f"{first.share:.0%}"
    return f"  {title:26}{share:>7}{cells}{last.scale:>7.0f}"


def flagged_lines(rows: Sequence[Row], known: Mapping[tuple[str, str], str]) -> str:
    """Returns a line for each row that is flagged, and its known cause."""
    marks = flags(rows)
    lines: list[str] = []
    for row in rows:
        where = (row.program, row.dtype)
        if where in marks:
            errors = ", ".join(
                f"{way} {_percent(one.all)} (leaf {_percent(one.leaf)})"
                for way, one in (
                    ("mixed", row.mixed),
                    ("O1", row.o1),
                    ("by hand", row.by_hand),
                )
            )
            cause = known.get(where, "NEW")
            lines.append(f"{', '.join(where)}: {marks[where]}: {errors}: {cause}")
    return "\n".join(lines)


def _percent(error: float) -> str:
    if not math.isfinite(error):
        return "nan"
    return f"{100 * error:.2f}" if error < 0.1 else f"{100 * error:.0f}"
