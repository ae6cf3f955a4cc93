"""What autocast costs, beside the same models with their precision written by hand.

For each model and each way to lower it: what the program moves, holds and runs that
XLA compiles for an H100 and a TPU v5e, how large the error of its gradient is, what
waits for the backward pass across a loop, and how long it takes to trace and lower.
The programs are exact: no device, no clock. Times to trace are medians of runs that
take turns; ratios to the model written by hand are what to read.

    make benchmarks
    .venv/bin/python -m benchmarks.autocast --models lstm mlp --targets v5e
"""

import argparse
import functools
import importlib.util
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
from benchmarks.examples import EXAMPLES
from benchmarks.report import stamp, write
from jmp_lite.jaxprs import params, structure

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
    **{f"flax {name}": example for name, example in EXAMPLES.items()},
}
ON_TARGET = {"h100": list(MODELS), "v5e": ["resnet", "lstm", "mlp", "nnx"]}


def _by_policy(make: Make, **options: Any) -> models.Model:
    """The loss with parameters and batch cast, as the jmp package does it."""
    policy = importlib.import_module("jmp").get_policy("params=f32,compute=bf16")
    model = make(None, **options)

    def loss(params: Any, batch: Any) -> Any:
        return model.loss(*policy.cast_to_compute((params, batch))).astype(jnp.float32)

    return model._replace(loss=loss)


def _by_mpx(make: Make, **options: Any) -> models.Model:
    """The same as the mpx package does it."""
    mpx = importlib.import_module("mpx")
    model = make(None, **options)
    return model._replace(
        loss=mpx.cast_function(model.loss, jnp.bfloat16, return_dtype=jnp.float32)
    )


def _by_autocast(
    make: Make,
    rules: jmp.Rules | str = "mixed",
    compute_dtype: str = "bfloat16",
    **options: Any,
) -> models.Model:
    model = make(None, **options)
    fun = jmp.autocast(model.loss, rules, compute_dtype=compute_dtype)
    return model._replace(loss=fun)


VARIANTS: Mapping[str, Callable[..., models.Model]] = {
    "float32": lambda make, **options: make(None, **options),
    "by hand": lambda make, **options: make(jnp.bfloat16, **options),
    "jmp": _by_policy,
    "mpx": _by_mpx,
    "mixed": _by_autocast,
    "O1": functools.partial(_by_autocast, rules="O1"),
    "O2": functools.partial(_by_autocast, rules="O2"),
    "torch": functools.partial(_by_autocast, rules="torch"),
    "mixed, low tanh": functools.partial(
        _by_autocast, rules=jmp.get_rules("mixed").low("tanh")
    ),
    "float16 by hand": lambda make, **options: make(jnp.float16, **options),
    "mixed, float16": functools.partial(_by_autocast, compute_dtype="float16"),
}
OF_EXAMPLES = ("float32", "by hand", "mixed", "float16 by hand", "mixed, float16")
PEERS = ("jmp", "mpx")  # Packages of these names.


def is_measured(model: str, variant: str) -> bool:
    """Returns whether a model is measured in a variant."""
    if "tanh" in variant:  # For attention whose scores have a soft cap.
        return model == "flax gemma"
    if model.startswith("flax "):
        return variant in OF_EXAMPLES
    return "float16" not in variant


# -------------------------------------------------------------------------- measures


class Row(NamedTuple):
    """One model, lowered in one way, for one target.

    Attributes:
      target: what it is compiled for.
      model: its name.
      variant: how it is lowered.
      moved: gigabytes that the compiled gradient moves.
      peak: gigabytes that it holds at most.
      kernels: how many kernels it runs.
      roofline: milliseconds that it takes at least.
      share: of its matrix products, those on 16-bit operands.
      error: of the gradient against float32, relative, median over seeds.
      kept: gigabytes that its loops stack up for loops and products after them.
      trace: milliseconds to trace and lower the gradient, median over runs.
      lines: of its StableHLO.
    """

    target: str
    model: str
    variant: str
    moved: float
    peak: float
    kernels: int
    roofline: float
    share: float
    error: float
    kept: float
    trace: float
    lines: int


def measure(
    name: str, variants: Sequence[str], targets: Sequence[str], seeds: int, runs: int
) -> list[Row]:
    """Measures one model in all its variants."""
    make, small = MODELS[name]
    full = {variant: VARIANTS[variant](make) for variant in variants}
    times = trace_times(full, runs)
    rows: list[Row] = []
    for variant, model in full.items():
        error = gradient_error(make, variant, small, seeds)
        kept, lines = kept_across_loops(model), len(stablehlo(model).splitlines())
        for target in targets:
            program = compile_for(
                target, jax.grad(model.loss), model.params, model.batch
            )
            products = program.matmuls
            low = sum(n for key, n in products.items() if key.startswith(("bf", "f16")))
            row = Row(
                target=target,
                model=name,
                variant=variant,
                moved=program.bytes_moved / 1e9,
                peak=program.peak_memory / 1e9,
                kernels=program.kernels,
                roofline=program.roofline_seconds * 1e3,
                share=low / max(1, sum(products.values())),
                error=error,
                kept=kept / 1e9,
                trace=times[variant],
                lines=lines,
            )
            rows.append(row)
    return rows


def stablehlo(model: models.Model) -> str:
    """Returns what a gradient is lowered to."""
    traced = jax.jit(jax.grad(model.loss)).trace(model.params, model.batch)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def trace_times(full: Mapping[str, models.Model], runs: int) -> dict[str, float]:
    """Returns the milliseconds to trace and lower gradients, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in full}
    for _ in range(runs):
        for name, model in full.items():
            jax.clear_caches()
            start = time.perf_counter()
            traced = jax.jit(jax.grad(model.loss)).trace(model.params, model.batch)
            traced.lower(lowering_platforms=("cuda",))
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def kept_across_loops(model: models.Model) -> int:
    """Returns the bytes that the loops of a gradient stack up for what comes after."""
    traced = jax.jit(jax.grad(model.loss)).trace(model.params, model.batch)

    def kept(jaxpr: Any) -> int:
        stacks: dict[Any, Any] = {}  # What is stacked up, and what that is moved to.
        read: set[Any] = set()
        inside = 0
        for eqn in structure.parts(jaxpr).eqns:
            op = eqn.primitive.name
            atoms = [atom for atom in eqn.invars if not structure.is_literal(atom)]
            found = [stacks[atom] for atom in atoms if atom in stacks]
            if op in ("scan", "dot_general"):
                read.update(found)
            elif op in ("reshape", "transpose") and found:
                stacks[eqn.outvars[0]] = found[0]
            if op == "scan":
                stacked = eqn.outvars[params.loop_of(eqn).n_carry :]
                stacks.update(zip(stacked, stacked, strict=True))
            else:
                inside += sum(map(kept, params.inner_jaxprs(eqn)))
        return inside + sum(var.aval.size * var.aval.dtype.itemsize for var in read)

    return kept(traced.jaxpr)


def gradient_error(make: Make, variant: str, small: Any, seeds: int) -> float:
    """Returns the relative error of a small model's gradient, median over seeds."""
    exact, low = (VARIANTS[v](make, **small) for v in ("float32", variant))
    gradients = [jax.jit(jax.grad(model.loss)) for model in (exact, low)]
    errors = []
    for seed in range(seeds):
        params, batch = fill((exact.params, exact.batch), seed)
        expected, actual = (jax.tree.leaves(grad(params, batch)) for grad in gradients)
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


# ---------------------------------------------------------------------------- tables


def table(rows: Sequence[Row]) -> str:
    """Returns what the compiled gradients cost, as text.

    Ratios to the variant by hand are in brackets.
    """
    lines: list[str] = []
    found = {(r.target, r.model, r.variant): r for r in rows}
    for i, row in enumerate(rows):
        if not i or rows[i - 1][:2] != row[:2]:
            lines += [
                f"\n{row.model}, {row.target}",
                f"{'':21}{'GB moved':>15}{'GB peak':>14}{'kernels':>8}"
                f"{'ms roofline':>15}{'error':>15}",
            ]
        hand = found.get((row.target, row.model, _by_hand(row)))
        lines.append(
            f"  {row.variant:19}{_against(row, hand, 'moved', '.2f'):>15}"
            f"{_against(row, hand, 'peak', '.2f'):>14}{row.kernels:>8}"
            f"{_against(row, hand, 'roofline', '.2f'):>15}"
            f"{_against(row, hand, 'error', '.1e'):>15}"
        )
    return "\n".join(lines)


def traced_table(rows: Sequence[Row]) -> str:
    """Returns what is traced and lowered, as text: one table for all targets.

    Ratios to the variant by hand are in brackets.
    """
    lines: list[str] = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        targets = list(dict.fromkeys(row.target for row in own))
        by_name = {(row.target, row.variant): row for row in own}
        head = "".join(f"{f'16 bit, {target}':>13}" for target in targets)
        lines += [
            f"\n{model}",
            f"{'':21}{'GB kept':>13}{'ms trace':>13}{'StableHLO':>14}{head}",
        ]
        for row in own:
            if row.target != targets[0]:
                continue
            hand = by_name.get((row.target, _by_hand(row)))
            shares = "".join(
                f"{by_name[target, row.variant].share:>13.0%}" for target in targets
            )
            lines.append(
                f"  {row.variant:19}{_against(row, hand, 'kept', '.2f'):>13}"
                f"{_against(row, hand, 'trace', '.0f'):>13}"
                f"{_against(row, hand, 'lines', 'd'):>14}{shares}"
            )
    return "\n".join(lines)


def _by_hand(row: Row) -> str:
    return "float16 by hand" if "float16" in row.variant else "by hand"


def _against(row: Row, hand: Row | None, name: str, form: str) -> str:
    """Returns a figure, and its ratio to the one by hand where there is one."""
    value, other = getattr(row, name), getattr(hand, name, 0)
    ratio = f" ({value / other:.2f})" if other else ""
    return f"{value:{form}}{ratio}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.autocast")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    for target in options.targets:
        if missing(target):
            raise SystemExit(missing(target))
    for peer in PEERS:
        if peer in options.variants and importlib.util.find_spec(peer) is None:
            print(f"{peer} is not installed: its rows are left out")
            options.variants.remove(peer)
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    rows: list[Row] = []
    for name in options.models:
        variants = [v for v in options.variants if is_measured(name, v)]
        targets = [t for t in options.targets if name in ON_TARGET[t]]
        found = measure(name, variants, targets, options.seeds, options.runs)
        found.sort(key=lambda row: targets.index(row.target))
        print(table(found), traced_table(found), sep="\n", flush=True)
        rows += found
    told = stamp(seeds=options.seeds, runs=options.runs)
    print("\n" + ", ".join(f"{name} {v}" for name, v in told["versions"].items()))
    write(options.json, "autocast", told, rows=rows)


if __name__ == "__main__":
    main()
