"""What autocast costs, beside the same models with their precision written by hand.

For each model and each way to lower it: what the program moves, holds and runs that
XLA compiles for an H100 (or a TPU v5e), how large the error of its gradient is, and how
long it takes to trace and lower. The programs are exact: no device, no clock.

    make targets && .venv/bin/python -m benchmarks.autocast --json benchmarks/results
    .venv/bin/python -m benchmarks.autocast --models lstm mlp --target v5e
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks import models
from benchmarks.compiled import TARGETS, compile_for, missing

Make = Callable[..., models.Model]

# At full size, to be compiled, and as small, to be run on a CPU.
MODELS: Mapping[str, tuple[Make, dict[str, Any]]] = {
    **{
        f"transformer 4, {layout}": (
            functools.partial(models.transformer, layout=layout),
            {"width": 32, "heads": 2, "vocabulary": 64, "batch": (2, 16)},
        )
        for layout in models.LAYOUTS
    },
    **{
        f"transformer 24, {layout}": (
            functools.partial(models.transformer, layout=layout, depth=24),
            {"width": 32, "heads": 2, "vocabulary": 64, "batch": (2, 16)},
        )
        for layout in ("jit", "scan", "scan + remat")
    },
    "resnet": (models.resnet, {"batch": 8}),
    "lstm": (models.lstm, {"width": 32, "batch": (4, 64)}),
    "mlp": (models.mlp, {"width": 64, "batch": 64}),
    "nnx": (models.nnx_model, {"width": 32, "batch": 32}),
}
LOOPS = [name for name in MODELS if "scan" in name]


def _by_policy(make: Make, **options: Any) -> models.Model:
    """The loss with parameters and batch cast, as jmp does it."""
    model = make(None, **options)
    cast = functools.partial(jmp.cast_tree, dtype="bfloat16")

    def loss(params: Any, batch: Any) -> Any:
        return model.loss(*cast((params, batch))).astype(jnp.float32)

    return model._replace(loss=loss)


def _by_autocast(make: Make, rules: str = "mixed", **options: Any) -> models.Model:
    model = make(None, **options)
    return model._replace(loss=jmp.autocast(model.loss, rules))


def _compressed(make: Make, **options: Any) -> models.Model:
    return make(None, wrap=jmp.compress_residuals, **options)


def _compressed_in_autocast(make: Make, **options: Any) -> models.Model:
    def wrap(block: Any) -> Any:
        return jmp.compress_residuals(jmp.autocast(block))

    model = make(None, wrap=wrap, **options)
    return model._replace(loss=jmp.autocast(model.loss))


VARIANTS: Mapping[str, Callable[..., models.Model]] = {
    "float32": lambda make, **options: make(None, **options),
    "by hand": lambda make, **options: make(jnp.bfloat16, **options),
    "jmp's casting": _by_policy,
    "mixed": _by_autocast,
    "O1": functools.partial(_by_autocast, rules="O1"),
    "O2": functools.partial(_by_autocast, rules="O2"),
    "torch": functools.partial(_by_autocast, rules="torch"),
    "float32, compressed": _compressed,
    "mixed, compressed": _compressed_in_autocast,
}


class Row(NamedTuple):
    """One model, lowered in one way.

    Attributes:
      model: its name.
      variant: how it is lowered.
      moved: gigabytes that the compiled gradient moves.
      peak: gigabytes that it holds at most.
      kernels: how many kernels it runs.
      roofline: milliseconds that it takes at least.
      share: of its matrix products, those on 16-bit operands.
      error: of the gradient against float32, relative, median over seeds.
      trace: milliseconds to trace and lower the gradient, the least of some runs.
      lines: of its StableHLO.
    """

    model: str
    variant: str
    moved: float
    peak: float
    kernels: int
    roofline: float
    share: float
    error: float
    trace: float
    lines: int


def measure(name: str, variant: str, target: str, seeds: int, repeats: int) -> Row:
    """Measures one variant of one model."""
    make, small = MODELS[name]
    full = VARIANTS[variant](make)
    program = compile_for(target, jax.grad(full.loss), full.params, full.batch)
    low = sum(n for key, n in program.matmuls.items() if key.startswith(("bf", "f16")))
    trace, lines = lowered(full, repeats)
    return Row(
        model=name,
        variant=variant,
        moved=program.bytes_moved / 1e9,
        peak=program.peak_memory / 1e9,
        kernels=program.kernels,
        roofline=program.roofline_seconds * 1e3,
        share=low / max(1, sum(program.matmuls.values())),
        error=gradient_error(make, variant, small, seeds),
        trace=trace,
        lines=lines,
    )


def lowered(model: models.Model, repeats: int) -> tuple[float, int]:
    """Returns the milliseconds to trace and lower a gradient, and its size."""
    times, text = [], ""
    for _ in range(repeats):
        jax.clear_caches()
        start = time.perf_counter()
        traced = jax.jit(jax.grad(model.loss)).trace(model.params, model.batch)
        low = traced.lower(lowering_platforms=("cuda",))
        times.append((time.perf_counter() - start) * 1e3)
        text = low.as_text()
    return min(times), text.count("\n")


def gradient_error(make: Make, variant: str, small: Any, seeds: int) -> float:
    """Returns the relative error of a small model's gradient, median over seeds."""
    exact, low = (VARIANTS[v](make, **small) for v in ("float32", variant))
    errors = []
    for seed in range(seeds):
        params, batch = fill((exact.params, exact.batch), seed)
        expected, actual = (
            jax.tree.leaves(jax.jit(jax.grad(m.loss))(params, batch))
            for m in (exact, low)
        )
        pairs = list(zip(actual, expected, strict=True))
        off = sum(float(jnp.sum((a - e) ** 2)) for a, e in pairs)
        errors.append((off / sum(float(jnp.sum(e**2)) for e in expected)) ** 0.5)
    return statistics.median(errors)


def fill(tree: Any, seed: int) -> Any:
    """Returns arrays of the given shapes: small numbers, and indices up to nine."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def one(key: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.random.randint(key, leaf.shape, 0, 10).astype(leaf.dtype)
        fan_in = leaf.shape[-2] if len(leaf.shape) > 1 else 1.0
        noise = jax.random.normal(key, leaf.shape) / fan_in**0.5
        return noise if len(leaf.shape) > 1 else 1 + 0.1 * noise

    return jax.tree.unflatten(treedef, list(map(one, keys, leaves)))


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text, ratios to the variant by hand in brackets."""
    lines = [
        f"{'':44}{'GB moved':>16}{'GB peak':>16}{'kernels':>9}{'ms roofline':>17}"
        f"{'16 bit':>8}{'gradient error':>18}{'ms trace':>15}{'StableHLO':>15}"
    ]
    by_hand = {row.model: row for row in rows if row.variant == "by hand"}
    for row in rows:
        hand = by_hand.get(row.model)

        def against(name: str, form: str, row: Row = row, hand: Any = hand) -> str:
            value = getattr(row, name)
            other = getattr(hand, name, 0)
            ratio = f" ({value / other:.2f}x)" if other else ""
            return f"{value:{form}}{ratio}"

        lines.append(
            f"{row.model:22}{row.variant:22}{against('moved', '.2f'):>16}"
            f"{against('peak', '.2f'):>16}{row.kernels:>9}"
            f"{against('roofline', '.2f'):>17}{row.share:>8.0%}"
            f"{against('error', '.1e'):>18}{against('trace', '.0f'):>15}"
            f"{against('lines', 'd'):>15}"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns the versions that the figures belong to."""
    names = ("jax", "jaxlib", "flax", "jmp_lite")
    return {name: importlib.metadata.version(name) for name in names}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.autocast")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--target", choices=TARGETS, default="h100")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    if missing(options.target):
        raise SystemExit(missing(options.target))
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    rows = []
    for name in options.models:
        for variant in options.variants:
            if "compressed" in variant and name not in LOOPS:
                continue  # It is for the body of a loop.
            rows.append(
                measure(name, variant, options.target, options.seeds, options.repeats)
            )
            print(table(rows).splitlines()[-1], flush=True)
    print()
    print(table(rows))
    if options.json:
        options.json.mkdir(parents=True, exist_ok=True)
        told = {
            "target": options.target,
            "date": datetime.date.today().isoformat(),
            "versions": versions(),
            "rows": [row._asdict() for row in rows],
        }
        path = options.json / f"autocast_{options.target}.json"
        path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
