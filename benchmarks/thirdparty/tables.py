"""What was measured of the collection, as text."""

import math
from collections.abc import Sequence

from benchmarks.thirdparty.measure import Row, Trained
from benchmarks.thirdparty.settings import NOT_HERE, NOT_IN_FLOAT32, Tried


def measured_table(rows: Sequence[Row]) -> str:
    """Returns a line for each program: errors in percent, and what they cost."""
    lines = [
        f"{'':38}{'':20}{'':>6}{'share in':>10}{'bfloat16':>17}{'float16':>17}"
        f"{'loss':>7}{'trace':>7}",
        f"{'program':38}{'of':20}{'runs':>6}{'16 bits':>10}{'error':>8}{'by hand':>9}"
        f"{'error':>8}{'by hand':>9}{'scale':>7}{'':>7}",
    ]
    notes: list[str] = []
    for name in dict.fromkeys(row.program for row in rows):
        both = [row for row in rows if row.program == name]
        first = both[0]
        found = dict.fromkeys(filter(None, map(_complaint, both)))
        notes += [f"{name}: {one}" for one in found]
        errors = "".join(f"{_percent(r):>8}{_by_hand(r):>9}" for r in both)
        share = "-" if first.share is None else f"{first.share:.0%}"
        trace = "-" if first.trace is None else f"{first.trace:.1f}x"
        packages = ", ".join(
            one.split()[0] for one in first.packages.split(", ") if one
        )
        lines.append(
            f"{name:38}{packages or 'written out':20}{'no' if found else 'yes':>6}"
            f"{share:>10}{errors}{both[-1].scale:>7.0f}{trace:>7}"
        )
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def packages_of(rows: Sequence[Row]) -> str:
    """Returns the packages of programs with their versions, in lines."""
    found = sorted({one for row in rows for one in row.packages.split(", ") if one})
    lines, line = list[str](), ""
    for one in found:
        joined = f"{line}, {one}" if line else one
        line, done = (joined, None) if len(joined) < 100 else (one, line + ",")
        lines += [done] if done else []
    return "\n".join([*lines, line])


def trained_table(rows: Sequence[Trained]) -> str:
    """Returns a line for each program: losses before and after training."""
    lines = [
        f"{'mean loss of the last steps':38}{'at the start':>14}{'float32':>10}"
        f"{'bfloat16':>10}{'float16':>10}"
    ]
    for name in dict.fromkeys(row.program for row in rows):
        both = {row.dtype: row for row in rows if row.program == name}
        first = next(iter(both.values()))
        ends = "".join(
            f"{both[dtype].low:>10.4f}" if dtype in both else f"{'-':>10}"
            for dtype in ("bfloat16", "float16")
        )
        lines.append(f"{name:38}{first.start:>14.4f}{first.exact:>10.4f}{ends}")
    return "\n".join(lines)


def settings_table(rows: Sequence[Tried]) -> str:
    """Returns a line for each setting, a column for each program."""
    programs = list(dict.fromkeys(row.program for row in rows))
    lines: list[str] = []
    for jax in dict.fromkeys(row.jax for row in rows):
        head = "".join(f"  {program}" for program in programs)
        lines += ["", f"{f'jax {jax}':40}{head}"]
        found = {(r.setting, r.program): r.outcome for r in rows if r.jax == jax}
        for setting in dict.fromkeys(setting for setting, _ in found):
            outcomes = (found.get((setting, p), NOT_HERE) for p in programs)
            cells = (
                f"  {_SHORT.get(outcome, outcome):>{len(program)}}"
                for outcome, program in zip(outcomes, programs, strict=True)
            )
            lines.append(f"{setting:40}{''.join(cells)}".rstrip())
    return "\n".join(lines[1:])


_SHORT = {NOT_IN_FLOAT32: "-", NOT_HERE: ""}


def _complaint(row: Row) -> str:
    if row.failure:
        return f"{row.dtype}: {row.failure}"
    if not row.is_finite:
        return f"{row.dtype}: not finite where float32 is"
    return "" if row.is_exact else f"{row.dtype}: other integers than in float32"


def _percent(row: Row) -> str:
    return _number(row.error) if not row.failure else "-"


def _by_hand(row: Row) -> str:
    if row.by_hand is None:
        return "-" if row.failure else "fails"
    return _number(row.by_hand) + ("*" if row.option else " ")


def _number(error: float | None) -> str:
    if error is None:
        return "-"
    if not math.isfinite(error):
        return "nan"
    return f"{100 * error:.2f}" if error < 0.1 else f"{100 * error:.0f}"
