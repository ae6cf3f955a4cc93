"""What was measured of the collection, as text."""

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence

from benchmarks.report import WIDTH, joined
from benchmarks.thirdparty.measure import Row, Trained
from benchmarks.thirdparty.settings import NOT_HERE, NOT_IN_FLOAT32, Tried


def summary_table(rows: Sequence[Row]) -> str:
    """Returns how many programs run, and how exact they are, as text."""
    programs = {row.program for row in rows}
    of_packages = {row.program for row in rows if row.packages}
    packages = {one for row in rows for one in row.packages.split(", ") if one}
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    columns = [[row for row in rows if row.dtype == dtype] for dtype in dtypes]

    def line(title: str, cells: Iterable[object]) -> str:
        return f"{title:46}" + "".join(f"{cell:>10}" for cell in cells)

    def median(column: list[Row]) -> str:
        errors = [row.error for row in column if row.error is not None]
        return f"{statistics.median(filter(math.isfinite, errors)):.2%}"

    def count(is_one: Callable[[Row], bool]) -> list[int]:
        return [sum(map(is_one, column)) for column in columns]

    title = (
        f"{len(programs)} programs, {len(of_packages)} of them of "
        f"{len(packages)} packages"
    )
    return "\n".join(
        [
            line(title, dtypes),
            line("run under autocast", count(lambda row: not _complaint(row))),
            line("median error of their gradients", map(median, columns)),
            line("run with precision by hand", count(_runs_by_hand)),
            line("  of these, autocast's error is not larger in", count(_is_no_worse)),
        ]
    )


def _runs_by_hand(row: Row) -> bool:
    return row.by_hand is not None and math.isfinite(row.by_hand)


def _is_no_worse(row: Row) -> bool:
    if row.error is None or row.by_hand is None:
        return False
    return _runs_by_hand(row) and row.error <= row.by_hand


def measured_table(rows: Sequence[Row]) -> str:
    """Returns a line for each program: errors in percent, and what they cost.

    Programs of the same packages are below the names of these.
    """
    lines = [
        f"{'':40}{'16-bit':>7}{'bfloat16':>14}{'float16':>14}{'loss':>7}",
        f"{'program':35}{'runs':>5}{'share':>7}{'error':>6}{'by hand':>8}"
        f"{'error':>6}{'by hand':>8}{'scale':>7}{'trace':>6}",
    ]
    notes: list[str] = []
    for packages in dict.fromkeys(map(_names_of_packages, rows)):
        lines.append(packages)
        own = [row for row in rows if _names_of_packages(row) == packages]
        for name in dict.fromkeys(row.program for row in own):
            both = [row for row in own if row.program == name]
            first = both[0]
            found = dict.fromkeys(filter(None, map(_complaint, both)))
            notes += [f"{name}: {one}" for one in found]
            errors = "".join(f"{_percent(r):>6}{_by_hand(r):>8}" for r in both)
            share = "-" if first.share is None else f"{first.share:.0%}"
            trace = "-" if first.trace is None else f"{first.trace:.1f}x"
            if len(name) > 33:  # Its figures are in the next line.
                lines.append(f"  {name}")
                name = ""
            lines.append(
                f"  {name:33}{'no' if found else 'yes':>5}{share:>7}{errors}"
                f"{both[-1].scale:>7.0f}{trace:>6}"
            )
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def programs_list(rows: Sequence[Row]) -> str:
    """Returns the programs of each package; a star marks one that fails."""
    lines: list[str] = []
    for packages in dict.fromkeys(map(_names_of_packages, rows)):
        own = [row for row in rows if _names_of_packages(row) == packages]
        failing = {row.program for row in own if _complaint(row)}
        names = dict.fromkeys(row.program for row in own)
        told = "; ".join(f"{name}*" if name in failing else name for name in names)
        lines += [packages, textwrap.indent(textwrap.fill(told, WIDTH - 2), "  ")]
    return "\n".join(lines)


def _names_of_packages(row: Row) -> str:
    names = (one.split()[0] for one in row.packages.split(", ") if one)
    return ", ".join(names) or "written out"


def packages_of(rows: Sequence[Row]) -> str:
    """Returns the packages of programs with their versions, in lines."""
    found = {one for row in rows for one in row.packages.split(", ") if one}
    return joined(sorted(found))


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
    # Of a name of several words the last is in the second line.
    heads = [(" ".join(p.split()[:-1]), p.split()[-1]) for p in programs]
    sizes = [2 + max(3, *map(len, head)) for head in heads]
    first, second = (
        "".join(f"{head[i]:>{size}}" for head, size in zip(heads, sizes, strict=True))
        for i in (0, 1)
    )
    lines: list[str] = []
    for jax in dict.fromkeys(row.jax for row in rows):
        above = [f"{'':39}{first}".rstrip()] if first.strip() else []
        lines += ["", *above, f"{f'jax {jax}':39}{second}"]
        found = {(r.setting, r.program): r.outcome for r in rows if r.jax == jax}
        for setting in dict.fromkeys(setting for setting, _ in found):
            outcomes = (found.get((setting, p), NOT_HERE) for p in programs)
            cells = (
                f"{_SHORT.get(outcome, outcome):>{size}}"
                for outcome, size in zip(outcomes, sizes, strict=True)
            )
            lines.append(f"{setting:39}{''.join(cells)}".rstrip())
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
