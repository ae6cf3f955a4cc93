"""What the preset "float8" changes in transformers, beside "mixed".

For an H100, a B200 and a TPU v5e; by the width of the model, and by the length of its
sequences, of which attention has no float8 products.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

import jmp_lite as jmp
from benchmarks import accuracy, models
from benchmarks.compiled import Program, compile_for

EVERY_SIZE = accuracy.VARIANTS["float8"].rules
TOKENS = 8192


class Compared(NamedTuple):
    """The gradient of a model, in float8 and in 16 bits.

    Attributes:
      model: its layout and depth.
      target: what it is compiled for.
      width: of its layers.
      length: of a sequence; all sequences have 8,192 tokens together.
      smallest: the least harmonic mean of a float8 product's sizes.
      roofline: the least time, as a ratio of float8 to 16 bits.
      moved: the same of the bytes that are moved.
      peak: the same of the memory that is held at most.
      kernels: the same of the number of kernels.
      share: of the arithmetic of products, in float8.
    """

    model: str
    target: str
    width: int
    length: int
    smallest: float
    roofline: float
    moved: float
    peak: float
    kernels: float
    share: float


def float8_products(program: Program) -> int:
    """Returns how many products of a program run in float8."""
    return sum(n for dtypes, n in program.matmuls.items() if dtypes.startswith("f8"))


def float8_share(program: Program) -> float:
    """Returns the share of float8 in the arithmetic of a program's products."""
    flops = program.matmul_flops
    in_float8 = sum(n for dtypes, n in flops.items() if dtypes.startswith("f8"))
    return in_float8 / sum(flops.values())


def compile_model(
    rules: jmp.Rules | str,
    layout: str = "scan",
    depth: int = 4,
    width: int = 2048,
    length: int = 1024,
    target: str = "h100",
) -> Program:
    """Compiles the gradient of a transformer with heads of 128, of 8,192 tokens."""
    model = models.transformer(
        layout=layout,
        depth=depth,
        width=width,
        heads=max(width // 128, 1),
        batch=(TOKENS // length, length),
    )
    gradient = jax.grad(jmp.autocast(model.loss, rules))
    return compile_for(target, gradient, model.params, model.batch)


def compare(
    layout: str = "scan",
    depth: int = 4,
    width: int = 2048,
    length: int = 1024,
    target: str = "h100",
    rules: jmp.Rules | None = None,
) -> Compared:
    """Returns what float8 changes in the gradient of a transformer."""
    rules = rules or jmp.get_rules("float8")
    requested: Any = rules.precision_of("dot_general")
    size = (layout, depth, width, length, target)
    ours, mixed = (compile_model(each, *size) for each in (rules, "mixed"))
    return Compared(
        f"{depth} blocks, {layout}",
        target,
        width,
        length,
        requested.options.smallest,
        ours.roofline_seconds / mixed.roofline_seconds,
        ours.bytes_moved / mixed.bytes_moved,
        ours.peak_memory / mixed.peak_memory,
        ours.kernels / mixed.kernels,
        float8_share(ours),
    )


MODELS: Sequence[dict[str, Any]] = (
    {"depth": 24},
    {"depth": 24, "layout": "scan + remat"},
    {"width": 4096},
    {"layout": "unrolled"},
    {"width": 768},
    {"target": "b200"},
    {"target": "v5e"},
)


def models_table(rows: Sequence[Compared]) -> str:
    """Returns ratios of float8 to 16 bits as text.

    What all rows share is in a line above them.
    """
    names = ("target", "width", "length", "smallest")
    shared = {
        name: getattr(rows[0], name)
        for name in names
        if len({getattr(row, name) for row in rows}) == 1
    }
    own = [name for name in names if name not in shared]
    above = ", ".join(f"{name} {value}" for name, value in shared.items())
    head = "".join(f"{name:>{len(name) + 2}}" for name in own)
    lines = [*([f"{above}:"] if above else [])]
    lines.append(
        f"{'float8 / mixed':23}{head}{'roofline':>10}{'bytes':>7}{'peak':>6}"
        f"{'kernels':>9}{'float8':>8}"
    )
    for row in rows:
        cells = "".join(f"{getattr(row, name):>{len(name) + 2}}" for name in own)
        lines.append(
            f"{row.model:23}{cells}{row.roofline:>10.2f}{row.moved:>7.2f}"
            f"{row.peak:>6.2f}{row.kernels:>9.2f}{row.share:>8.0%}"
        )
    return "\n".join(lines)


def draw(
    widths: Sequence[Compared], lengths: Sequence[Compared], path: pathlib.Path
) -> None:
    """Draws ratios over the width and over the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    drawn = {
        "roofline": ("roofline", "black", "o"),
        "moved": ("bytes moved", "#2f7fc1", "s"),
        "peak": ("peak memory", "#e08a1e", "^"),
    }
    titles = ("by width, 1,024 tokens in a sequence", "by length, width 2,048")
    pairs = zip(panels, (widths, lengths), ("width", "length"), titles, strict=True)
    for axes, rows, x, title in pairs:
        at = [getattr(row, x) for row in rows]
        for name, (label, color, marker) in drawn.items():
            values = [getattr(row, name) for row in rows]
            axes.plot(at, values, color=color, marker=marker, label=label)
        axes.axhline(1, color="grey", lw=0.8, ls=":")
        axes.set(xlabel=x, title=title, xscale="log")
        axes.set_xticks(at, [f"{n:,}" for n in at])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("float8 / mixed, H100")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)
