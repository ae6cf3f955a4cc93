"""The errors of the sweep as text."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.sweep.measure import DTYPES, WAYS, Row, flags

_MARKS = {"not finite": "!", "gradient": "*", "leaf": "+"}
_ILL_CONDITIONED = 1e-3


def table(rows: Sequence[Row]) -> str:
    """Returns a line for each program: errors in percent, by dtype and way.

    ``*`` marks where ``mixed`` is more than twice as far as both other ways, ``+`` the
    same of the worst leaf, ``!`` what is not finite, ``~`` a program whose gradient in
    float32 is itself more than 0.1 percent off that in float64.
    """
    of = {(row.program, row.dtype, row.way): row for row in rows}
    marks = flags(rows)
    lines = [
        f"{'':28}{'16-bit':>7}{'bfloat16':>14}{'':11}{'float16':>14}{'':6}{'loss':>11}",
        f"{'program':28}{'share':>7}"
        + f"{'mixed':>8}{'O1':>7}{'by hand':>8}" * 2
        + f"{'scale':>7}",
    ]
    for field in dict.fromkeys(row.field for row in rows):
        lines.append(field.replace("_", " "))
        for name in dict.fromkeys(row.program for row in rows if row.field == field):
            lines.append(_line(name, of, marks))
    return "\n".join(lines)


def _line(
    name: str,
    of: Mapping[tuple[str, str, str], Row],
    marks: Mapping[tuple[str, str], str],
) -> str:
    cells = ""
    for dtype in DTYPES:
        errors = [_number(of[name, dtype, way].error) for way in WAYS]
        mark = _MARKS[marks[name, dtype]] if (name, dtype) in marks else " "
        cells += f"{errors[0]:>7}{mark}{errors[1]:>7}{errors[2]:>8}"
    row = of[name, "float16", "mixed"]
    title = f"{name} ~" if row.exact > _ILL_CONDITIONED else name
    share = "-" if row.share is None else f"{row.share:.0%}"
    return f"  {title:26}{share:>7}{cells}{row.scale:>7.0f}"


def flagged_lines(rows: Sequence[Row], reasons: Mapping[tuple[str, str], str]) -> str:
    """Returns a line for each row that is flagged, and what is known of it."""
    of = {(row.program, row.dtype, row.way): row for row in rows}
    lines: list[str] = []
    for (program, dtype), why in flags(rows).items():
        errors = ", ".join(
            f"{way} {_number(of[program, dtype, way].error)}"
            f" (leaf {_number(of[program, dtype, way].leaf)})"
            for way in WAYS
        )
        known = reasons.get((program, dtype), "NEW")
        lines.append(f"{program}, {dtype}: {why}: {errors}: {known}")
    return "\n".join(lines)


def _number(error: float) -> str:
    if not math.isfinite(error):
        return "nan"
    return f"{100 * error:.2f}" if error < 0.1 else f"{100 * error:.0f}"
