"""How the cost of autocast grows, with the depth of a model and with its width.

By depth: the time to trace and lower the gradient of a stack of transformer blocks, and
the lines of its StableHLO. By width: what the program moves and holds that XLA compiles
for an H100. Both beside the same model with its precision written by hand. Programs are
exact; times are medians of runs that take turns.

    .venv/bin/python -m benchmarks.growth --json benchmarks/results --picture docs
"""

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import models
from benchmarks.autocast import VARIANTS, stablehlo, trace_times
from benchmarks.compiled import compile_for, missing
from benchmarks.report import stamp, write

LAYOUTS = ("unrolled", "jit", "scan")
TARGET = "h100"
_BOTH = ("by hand", "mixed")


class Depth(NamedTuple):
    """What a stack of layers costs to lower.

    Attributes:
      layout: how the layers stand: written out, each jitted, or in a scan.
      depth: how many there are.
      by_hand: milliseconds to trace and lower the gradient by hand.
      mixed: the same under autocast.
      lines_by_hand: lines of StableHLO by hand.
      lines: the same under autocast.
    """

    layout: str
    depth: int
    by_hand: float
    mixed: float
    lines_by_hand: int
    lines: int


class Width(NamedTuple):
    """What the gradient of a stack of layers moves and holds.

    Attributes:
      layout: how the layers stand.
      width: of the layers.
      moved_by_hand: gigabytes that the compiled gradient moves, by hand.
      moved: the same under autocast.
      peak_by_hand: gigabytes that it holds at most, by hand.
      peak: the same under autocast.
    """

    layout: str
    width: int
    moved_by_hand: float
    moved: float
    peak_by_hand: float
    peak: float


def by_depth(layout: str, depth: int, runs: int) -> Depth:
    """Measures what one stack costs to lower: its width is of no account."""
    make = functools.partial(models.transformer, layout=layout, depth=depth)
    full = {name: VARIANTS[name](make) for name in _BOTH}
    times = trace_times(full, runs)
    lines = {name: len(stablehlo(model).splitlines()) for name, model in full.items()}
    return Depth(
        layout,
        depth,
        times["by hand"],
        times["mixed"],
        lines["by hand"],
        lines["mixed"],
    )


def by_width(layout: str, width: int) -> Width:
    """Compiles a stack of four layers of one width, whose heads are 64 wide."""
    make = functools.partial(
        models.transformer, layout=layout, width=width, heads=width // 64
    )
    by_hand, mixed = (VARIANTS[name](make) for name in _BOTH)
    programs = [
        compile_for(TARGET, jax.grad(model.loss), model.params, model.batch)
        for model in (by_hand, mixed)
    ]
    moved = [program.bytes_moved / 1e9 for program in programs]
    peak = [program.peak_memory / 1e9 for program in programs]
    return Width(layout, width, *moved, *peak)


# ------------------------------------------------------------------------------ tables


def depth_table(rows: Sequence[Depth]) -> str:
    """Returns what stacks cost to lower, as text."""
    lines = [
        f"{'blocks':16}{'ms trace':>10}{'by hand':>9}{'ratio':>7}"
        f"{'StableHLO':>12}{'by hand':>9}{'ratio':>7}"
    ]
    lines += [
        f"{row.depth:>4} {row.layout:11}{row.mixed:>10.0f}{row.by_hand:>9.0f}"
        f"{row.mixed / row.by_hand:>7.2f}{row.lines:>12}{row.lines_by_hand:>9}"
        f"{row.lines / row.lines_by_hand:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def width_table(rows: Sequence[Width]) -> str:
    """Returns what gradients move and hold, as text."""
    lines = [
        f"{'width':16}{'GB moved':>10}{'by hand':>9}{'ratio':>7}"
        f"{'GB peak':>12}{'by hand':>9}{'ratio':>7}"
    ]
    lines += [
        f"{row.width:>4} {row.layout:11}{row.moved:>10.2f}{row.moved_by_hand:>9.2f}"
        f"{row.moved / row.moved_by_hand:>7.2f}{row.peak:>12.2f}"
        f"{row.peak_by_hand:>9.2f}{row.peak / row.peak_by_hand:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def draw(depths: Sequence[Depth], widths: Sequence[Width], path: pathlib.Path) -> None:
    """Draws both, autocast beside what is written by hand."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    panels: Any = figure.subplots(2, 2)
    drawn = (
        (panels[0, 0], depths, "depth", "mixed", "by_hand", "ms to trace and lower"),
        (panels[0, 1], depths, "depth", "lines", "lines_by_hand", "lines of StableHLO"),
        (panels[1, 0], widths, "width", "moved", "moved_by_hand", "GB moved"),
        (panels[1, 1], widths, "width", "peak", "peak_by_hand", "GB held at most"),
    )
    markers = {"unrolled": "o", "jit": "s", "scan": "^"}
    colors = {"unrolled": "black", "jit": "#2f7fc1", "scan": "#e08a1e"}
    lines = {"autocast": "-", "by hand": ":"}
    for axes, rows, x, ours, by_hand, label in drawn:
        for layout in dict.fromkeys(row.layout for row in rows):
            of_layout = [row for row in rows if row.layout == layout]
            at = [getattr(row, x) for row in of_layout]
            style = {"marker": markers[layout], "color": colors[layout]}
            for name, text in ((ours, "autocast"), (by_hand, "by hand")):
                values = [getattr(row, name) for row in of_layout]
                told = f"{layout}, {text}"
                axes.plot(at, values, lines[text], label=told, **style)
        axes.set(xlabel=x, ylabel=label)
        if rows:
            axes.set(xscale="log", yscale="log")
        ticks = sorted({getattr(row, x) for row in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, writes JSON and a picture where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.growth")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--depths", nargs="*", type=int, default=[4, 8, 16, 32, 64])
    widths = [256, 512, 1024, 2048]
    parser.add_argument("--widths", nargs="*", type=int, default=widths)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    parser.add_argument("--picture", type=pathlib.Path, help="folder to draw to")
    options = parser.parse_args(argv)
    if options.widths and missing(TARGET):
        raise SystemExit(missing(TARGET))
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    told = stamp(runs=options.runs, target=TARGET)
    deep = [
        by_depth(at, n, options.runs) for at in options.layouts for n in options.depths
    ]
    print(depth_table(deep), flush=True)
    wide = [by_width(at, n) for at in options.layouts for n in options.widths]
    print("\n" + width_table(wide))
    write(options.json, "growth", told, depths=deep, widths=wide)
    if options.picture:
        options.picture.mkdir(parents=True, exist_ok=True)
        draw(deep, wide, options.picture / "growth.png")


if __name__ == "__main__":
    main()
