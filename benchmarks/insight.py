"""What it costs to look: ``explain``, ``watch`` and ``compare``.

``explain`` runs nothing: its cost is the time to trace, beside that of the function, of
its gradient, and of both under autocast. ``watch`` counts in the program: its cost is
what the program that XLA compiles for an H100 and a TPU v5e moves, runs and takes more,
beside the same program that is not watched. ``compare`` runs mixed precision and
float32 in one program: its cost is what that moves more than mixed precision alone, and
beside it stands what float32 alone moves. The programs are exact; times are medians of
runs that take turns, and their ratios are what to read.

    .venv/bin/python -m benchmarks.insight --json benchmarks/results
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

import jmp_lite as jmp
from benchmarks.autocast import MODELS, ON_TARGET
from benchmarks.compiled import TARGETS, compile_for, missing
from benchmarks.report import stamp, write

EXPLAINED = (
    *("transformer 4, unrolled", "transformer 24, jit", "transformer 24, scan"),
    *("resnet", "lstm", "mlp"),
)
WATCHED = ("transformer 24, scan", "resnet", "lstm", "mlp")
SAMPLE = 65_536
"""How many numbers of a result are counted where not all are."""

COMPARED = ("transformer 4, unrolled", "resnet", "lstm", "mlp")


class Explained(NamedTuple):
    """What it costs to explain a model: milliseconds.

    Attributes:
      model: its name.
      trace: to trace its loss.
      autocast: to trace that under autocast.
      explain: to explain it.
      gradient: to trace the gradient of its loss.
      autocast_gradient: to trace that under autocast.
      explain_backward: to explain it with its backward pass.
    """

    model: str
    trace: float
    autocast: float
    explain: float
    gradient: float
    autocast_gradient: float
    explain_backward: float


class Watched(NamedTuple):
    """What it costs to watch a gradient: what is more, as a ratio to not watching.

    Attributes:
      target: what the gradient is compiled for.
      model: its name.
      elements: how many numbers of a result are counted, at most; all if None.
      ops: how many ops are watched.
      moved: bytes that the program moves.
      peak: bytes that it holds at most.
      kernels: kernels that it runs.
      roofline: seconds that it takes at least.
    """

    target: str
    model: str
    elements: int | None
    ops: int
    moved: float
    peak: float
    kernels: float
    roofline: float


class Compared(NamedTuple):
    """What it costs to compare a gradient with float32's, as ratios to mixed precision.

    Attributes:
      target: what the gradient is compiled for.
      model: its name.
      ops: how many ops are compared, once for each that is written.
      moved: bytes that are moved.
      peak: the memory that is held at most.
      kernels: how many kernels run.
      float32: the bytes that the gradient in float32 alone moves.
    """

    target: str
    model: str
    ops: int
    moved: float
    peak: float
    kernels: float
    float32: float


def explained(name: str, runs: int) -> Explained:
    """Measures what it costs to explain one model."""
    make, _ = MODELS[name]
    model = make(None)

    def loss(params: Any, batch: Any) -> Any:
        return model.loss(params, batch)

    def tracing(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.make_jaxpr(lambda *args: fun(*args))

    ways: dict[str, Callable[[], Callable[..., Any]]] = {
        "trace": lambda: tracing(loss),
        "autocast": lambda: tracing(jmp.autocast(loss)),
        "explain": lambda: jmp.explain(loss),
        "gradient": lambda: tracing(jax.grad(loss)),
        "autocast_gradient": lambda: tracing(jax.grad(jmp.autocast(loss))),
        "explain_backward": lambda: jmp.explain(loss, backward=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs):
        for way, make_way in ways.items():
            jax.clear_caches()
            start = time.perf_counter()
            make_way()(model.params, model.batch)
            times[way].append((time.perf_counter() - start) * 1e3)
    medians = {way: statistics.median(each) for way, each in times.items()}
    return Explained(name, **medians)


def watched(name: str, target: str) -> list[Watched]:
    """Compares programs of a watched gradient with that of the same unwatched."""
    make, _ = MODELS[name]
    model = make(None)
    gradient = jax.grad(jmp.autocast(model.loss))
    plain = compile_for(target, gradient, model.params, model.batch)
    rows = list[Watched]()
    for elements in (None, SAMPLE):
        fun = jmp.watch(gradient, elements=elements)
        seen = compile_for(target, fun, model.params, model.batch)
        _, stats = jax.eval_shape(fun, model.params, model.batch)
        row = Watched(
            target=target,
            model=name,
            elements=elements,
            ops=len(stats.ops),
            moved=seen.bytes_moved / plain.bytes_moved,
            peak=seen.peak_memory / plain.peak_memory,
            kernels=seen.kernels / plain.kernels,
            roofline=seen.roofline_seconds / plain.roofline_seconds,
        )
        rows.append(row)
    return rows


def compared(name: str, target: str) -> list[Compared]:
    """Compares the program of a compared gradient with that of the same gradient."""
    make, _ = MODELS[name]
    model = make(None)
    both = jmp.compare(model.loss, backward=True)
    gradients = (jax.grad(jmp.autocast(model.loss)), jax.grad(model.loss))
    mixed, full, two = (
        compile_for(target, fun, model.params, model.batch)
        for fun in (*gradients, both)
    )
    row = Compared(
        target=target,
        model=name,
        ops=len(jax.eval_shape(both, model.params, model.batch).ops),
        moved=two.bytes_moved / mixed.bytes_moved,
        peak=two.peak_memory / mixed.peak_memory,
        kernels=two.kernels / mixed.kernels,
        float32=full.bytes_moved / mixed.bytes_moved,
    )
    return [row]


def explained_table(rows: Sequence[Explained]) -> str:
    """Returns what it costs to explain, as text."""
    lines = [
        f"{'explain':25}{'ms':>6}{'/ trace':>9}{'/ autocast':>12}"
        f"{'backward: ms':>15}{'/ gradient':>12}{'/ autocast':>12}"
    ]
    lines += [
        f"{r.model:25}{r.explain:>6.0f}{r.explain / r.trace:>9.2f}"
        f"{r.explain / r.autocast:>12.2f}{r.explain_backward:>15.0f}"
        f"{r.explain_backward / r.gradient:>12.2f}"
        f"{r.explain_backward / r.autocast_gradient:>12.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def watched_table(rows: Sequence[Watched]) -> str:
    """Returns what it costs to watch, as text."""
    lines = [
        f"{'watch, of the gradient':33}{'counted':>9}{'ops':>6}{'moved':>8}{'peak':>8}"
        f"{'kernels':>9}{'roofline':>10}"
    ]
    lines += [
        f"{f'{r.model}, {r.target}':33}{r.elements or 'all':>9}{r.ops:>6}"
        f"{r.moved:>8.2f}{r.peak:>8.2f}"
        f"{r.kernels:>9.2f}{r.roofline:>10.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def compared_table(rows: Sequence[Compared]) -> str:
    """Returns what it costs to compare, as text."""
    lines = [
        f"{'compare, with the gradient':33}{'ops':>6}{'moved':>8}{'peak':>8}"
        f"{'kernels':>9}{'float32 alone moves':>21}"
    ]
    lines += [
        f"{f'{r.model}, {r.target}':33}{r.ops:>6}{r.moved:>8.2f}{r.peak:>8.2f}"
        f"{r.kernels:>9.2f}{r.float32:>21.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.insight")
    parser.add_argument("--explained", nargs="*", choices=MODELS, default=EXPLAINED)
    parser.add_argument("--watched", nargs="*", choices=MODELS, default=WATCHED)
    parser.add_argument("--compared", nargs="*", choices=MODELS, default=COMPARED)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    for target in options.targets:
        if (options.watched or options.compared) and missing(target):
            raise SystemExit(missing(target))
    # Flax promotes by itself.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    told = stamp(runs=options.runs)
    explanations = [explained(name, options.runs) for name in options.explained]
    print(explained_table(explanations), flush=True)
    watches, comparisons = (
        [
            row
            for name in names
            for target in options.targets
            if name in ON_TARGET[target]
            for row in measure(name, target)
        ]
        for measure, names in (
            (watched, options.watched),
            (compared, options.compared),
        )
    )
    print("\n" + watched_table(watches))
    print("\n" + compared_table(comparisons))
    write(
        options.json,
        "insight",
        told,
        explained=explanations,
        watched=watches,
        compared=comparisons,
    )


if __name__ == "__main__":
    main()
