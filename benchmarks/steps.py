"""Whole training steps as XLA compiles them for an H100, where there is none.

The models and variants of `benchmarks.training_steps`, whose times only a device can
tell: the least that the compiled step takes, and what it needs. Exact: no clock, no
device.

    .venv/bin/python -m benchmarks.steps --json benchmarks/results
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from benchmarks.compiled import compile_for, missing
from benchmarks.report import stamp, write
from benchmarks.training_steps import (
    BASE,
    MODELS,
    TINY,
    VARIANTS,
    Size,
    step_and_shapes,
)

TARGET = "h100"


class Predicted(NamedTuple):
    """What a compiled training step comes to.

    Attributes:
      model: the name of the model.
      variant: how it is trained.
      roofline: milliseconds that it takes at least.
      moved: gigabytes that it moves.
      memory: gigabytes that it needs.
      kernels: how many kernels it runs.
    """

    model: str
    variant: str
    roofline: float
    moved: float
    memory: float
    kernels: int


def predict(name: str, variant: str, size: Size) -> Predicted:
    """Compiles a training step and reads its program."""
    step, *shapes = step_and_shapes(VARIANTS[variant], size, size.batch)
    program = compile_for(TARGET, step, *shapes, donate_argnums=(0, 1))
    return Predicted(
        model=name,
        variant=variant,
        roofline=program.roofline_seconds * 1e3,
        moved=program.bytes_moved / 1e9,
        memory=program.peak_memory / 1e9,
        kernels=program.kernels,
    )


def table(rows: Sequence[Predicted]) -> str:
    """Returns the rows of one model as text, with what they gain."""
    by_name = {row.variant: row for row in rows}
    lines = [
        f"{rows[0].model:28}{'ms roofline':>12}{'speed-up':>10}{'GB moved':>10}"
        f"{'GB':>8}{'of f32':>8}{'kernels':>9}"
    ]
    for row in rows:
        base, f32 = by_name.get(BASE), by_name.get("float32 default")
        speed = f"{base.roofline / row.roofline:.2f}" if base else ""
        share = f"{row.memory / f32.memory:.2f}" if f32 else ""
        lines.append(
            f"  {row.variant:26}{row.roofline:>12.2f}{speed:>10}{row.moved:>10.2f}"
            f"{row.memory:>8.2f}{share:>8}{row.kernels:>9}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.steps")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    if missing(TARGET):
        raise SystemExit(missing(TARGET))
    # Flax promotes by itself.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    told = stamp(target=TARGET, tiny=options.tiny)
    rows: list[Predicted] = []
    for name in options.models:
        size = (TINY if options.tiny else MODELS)[name]
        found = [predict(name, variant, size) for variant in options.variants]
        print(table(found) + "\n", flush=True)
        rows += found
    write(options.json, "steps", told, rows=rows)


if __name__ == "__main__":
    main()
