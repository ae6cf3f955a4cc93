"""The tables of the README, the guides and the results, made of the benchmarks' files.

    python -m benchmarks.tables        # Writes them anew; --check only compares.

No figure of a benchmark is typed by hand. In Markdown a comment names the table, or the
sentences, that follow it.
"""

import argparse
import json
import pathlib
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import (
    accuracy,
    autocast,
    clock,
    code_bases,
    gpu,
    growth,
    head,
    insight,
    loss_scaling,
    moments,
    optimizer_peers,
    saved_arrays,
    state_training,
    steps,
    training_steps,
    wrapped_training,
)
from benchmarks.ablation import rows as ablation
from benchmarks.formats import (
    chips,
    experts,
    flax_modules,
    outliers,
    recipes,
    sums,
    training,
    transformers,
    wire,
)
from benchmarks.report import WIDTH, joined
from benchmarks.sweep import measure as sweep
from benchmarks.sweep import tables as sweep_tables
from benchmarks.thirdparty import measure, settings
from benchmarks.thirdparty import tables as thirdparty

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TEXTS = (
    ROOT / "README.md",
    ROOT / "docs" / "checkpoints.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "memory.md",
    ROOT / "docs" / "compatibility.md",
    ROOT / "docs" / "semantics.md",
    RESULTS / "README.md",
)

_BLOCK = re.compile(
    r"(<!-- table: (\S+) -->\n```text\n|<!-- sentences: (\S+) -->\n)(.*?)"
    r"(```\n|<!-- end -->\n)",
    re.DOTALL,
)
_LEAN = ("float32 default", "bfloat16, autocast", *training_steps.LEAN)
_NOT_MEASURED = "Not measured on a device yet."


def _rows(results: Mapping[str, Any], name: str, row: Callable[..., Any]) -> list[Any]:
    return [row(**one) for one in results[name]]


def _is_lean(row: steps.Predicted) -> bool:
    return row.model.startswith("transformer") and row.variant in _LEAN


def _by_model(rows: Sequence[Any], table: Callable[[Sequence[Any]], str]) -> str:
    models = dict.fromkeys(row.model for row in rows)
    each = ([row for row in rows if row.model == model] for model in models)
    return "\n\n".join(map(table, each))


def against_hand(rows: Sequence[autocast.Row]) -> str:
    """Returns ratios of ``mixed`` to the same models by hand, as text."""
    found = {(row.model, row.target, row.variant): row for row in rows}
    names = ("moved", "peak", "roofline", "error", "trace")
    titles = ("bytes moved", "peak memory", "roofline", "error", "ms trace")
    head = "".join(f"  {title}" for title in titles)
    lines = [f"{'mixed / by hand':28}{'target':>6}{head}"]
    for (model, target, variant), row in found.items():
        if variant == "mixed":
            hand = found[model, target, "by hand"]
            ratios = (getattr(row, name) / getattr(hand, name) for name in names)
            cells = "".join(
                f"{ratio:>{len(title) + 2}.2f}"
                for title, ratio in zip(titles, ratios, strict=True)
            )
            lines.append(f"{model:28}{target:>6}{cells}")
    return "\n".join(lines)


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns four sentences about cost and gain, as a list in Markdown."""
    rows = _rows(results["steps"], "rows", steps.Predicted)
    first = rows[0].model
    step = {row.variant: row for row in rows if row.model == first}
    low, tf32 = step["bfloat16, autocast"], step["float32 default"]
    scaled, unscaled = step["float16, with loss scaling"], step["float16, autocast"]
    gradients = _rows(results["autocast"], "rows", autocast.Row)
    of = {(row.model, row.target, row.variant): row.moved for row in gradients}
    moved = sorted(
        (row.moved / of[row.model, row.target, "by hand"], row.model)
        for row in gradients
        if row.variant == "mixed"
    )
    median = statistics.median(ratio for ratio, _ in moved)
    (least, best), (most, worst) = moved[0], moved[-1]
    trained = _rows(results["accuracy"], "rows", accuracy.Trained)
    models, seeds = ({row[i] for row in trained} for i in (0, 2))
    above = max(
        row.noise
        for row in accuracy.summarize(trained)
        if row.variant in ("bfloat16, mixed", "float16, mixed")
    )
    sentences = (
        f"In bfloat16, {_name(first)} trains in {low.roofline / tf32.roofline:.2f} of "
        f"the time and {low.memory / tf32.memory:.2f} of the memory of float32, "
        "calculated from train steps that XLA compiled for an H100 (where JAX's "
        "float32 products are TF32).",
        f"Compared with casts written by hand, autocast moves {median:.2f} times the "
        f"bytes (median of {len(moved)} compiled gradients; {least:.2f} times for "
        f"`{best}`, {most:.2f} times for `{worst}`).",
        "Loss scaling, which only float16 needs, adds "
        f"{_more(scaled.roofline, unscaled.roofline)} to the time and "
        f"{_more(scaled.memory, unscaled.memory)} to the memory of a step, skipped or "
        f"not. It also adds {scaled.kernels - unscaled.kernels} small kernels to "
        f"{unscaled.kernels}; the time does not include their launches.",
        f"Trained in bfloat16 or float16 from {len(seeds)} seeds, each of "
        f"{len(models)} small models ends with a mean test loss at most {above:.1f} "
        "standard deviations above that of float32.",
    )
    return "\n".join(map(_bullet, sentences))


def _name(model: str) -> str:
    """Returns what is in brackets after the kind of a model."""
    return re.sub(r".*\((.*)\)", r"\1", model)


def _more(number: float, base: float) -> str:
    return f"{100 * (number / base - 1):.1f} %"


def _bullet(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")


def _thirdparty(rows: Sequence[measure.Row]) -> str:
    return f"{thirdparty.measured_table(rows)}\n\n{thirdparty.packages_of(rows)}"


def _gpu(results: Mapping[str, Any]) -> str:
    ceilings = gpu.ceilings_table(gpu.Ceilings(**results["ceilings"]))
    rows = gpu.table(_rows(results, "rows", gpu.Measured))
    return f"{results['device']}\n{ceilings}\n\n{rows}"


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "accuracy": lambda results: accuracy.table(
        accuracy.summarize(_rows(results, "rows", accuracy.Trained))
    ),
    "autocast": lambda results: autocast.table(_rows(results, "rows", autocast.Row)),
    "autocast.traced": lambda results: autocast.traced_table(
        _rows(results, "rows", autocast.Row)
    ),
    "autocast.mixed": lambda results: against_hand(
        _rows(results, "rows", autocast.Row)
    ),
    "formats.chips": lambda results: chips.table(_rows(results, "chips", chips.OnChip)),
    **{
        f"formats.{name}": lambda results, name=name: transformers.models_table(
            _rows(results, name, transformers.Compared)
        )
        for name in ("models", "widths", "lengths")
    },
    "formats.recipes": lambda results: recipes.recipes_table(
        _rows(results, "recipes", recipes.Recipe)
    ),
    "formats.stacked": lambda results: recipes.recipes_table(
        _rows(results, "stacked", recipes.Recipe), recipes.STACK
    ),
    "formats.sent": lambda results: wire.sent_table(_rows(results, "sent", wire.Sent)),
    "formats.experts": lambda results: experts.mixtures_table(
        _rows(results, "experts", experts.Mixture)
    ),
    "formats.trained": lambda results: training.trained_table(
        _rows(results, "trained", training.Trained)
    ),
    "optimizer_peers": lambda results: optimizer_peers.peers_table(
        _rows(results, "peers", optimizer_peers.Peer)
    ),
    "formats.flax": lambda results: flax_modules.compiled_table(
        _rows(results, "flax", flax_modules.Compiled)
    ),
    "formats.outliers": lambda results: outliers.outliers_table(
        _rows(results, "outliers", outliers.Outlier)
    ),
    "sums": lambda results: sums.sums_table(_rows(results, "sums", sums.Sums)),
    "gpu": _gpu,
    "h200": clock.table,
    "h200.short": clock.short_table,
    "growth.depths": lambda results: growth.depth_table(
        _rows(results, "depths", growth.Depth)
    ),
    "growth.widths": lambda results: growth.width_table(
        _rows(results, "widths", growth.Width)
    ),
    **{
        f"head.{name}": lambda results, name=name, row=row, table=table: table(
            _rows(results, name, row)
        )
        for name, row, table in (
            ("accuracy", head.Accuracy, head.accuracy_table),
            ("losses", head.OfLoss, head.losses_table),
            ("models", head.OfModel, head.models_table),
            ("tails", head.OfTail, head.tails_table),
        )
    },
    "insight.explained": lambda results: insight.explained_table(
        _rows(results, "explained", insight.Explained)
    ),
    "insight.watched": lambda results: insight.watched_table(
        _rows(results, "watched", insight.Watched)
    ),
    "insight.compared": lambda results: insight.compared_table(
        _rows(results, "compared", insight.Compared)
    ),
    "loss_scaling.skipping": lambda results: loss_scaling.skipping_table(
        _rows(results, "skipping", loss_scaling.Skipping)
    ),
    "loss_scaling.times": lambda results: loss_scaling.times_table(results["step_ms"]),
    "loss_scaling.training": lambda results: loss_scaling.training_table(
        _rows(results, "training", loss_scaling.Training)
    ),
    "moments.formats": lambda results: moments.table(
        _rows(results, "formats", moments.Row)
    ),
    "settings.tried": lambda results: thirdparty.settings_table(
        _rows(results, "tried", settings.Tried)
    ),
    "saved_arrays": lambda results: saved_arrays.table(
        _rows(results, "rows", saved_arrays.Row)
    ),
    "wrapped_training": lambda results: wrapped_training.table(
        _rows(results, "rows", wrapped_training.Row)
    ),
    "state_training": lambda results: state_training.table(
        _rows(results, "rows", state_training.Row)
    ),
    "steps": lambda results: _by_model(
        [
            r
            for r in _rows(results, "rows", steps.Predicted)
            if r.variant not in training_steps.LEAN
        ],
        steps.table,
    ),
    "steps.memory": lambda results: steps.table(
        [row for row in _rows(results, "rows", steps.Predicted) if _is_lean(row)]
    ),
    "summary": summary,
    "code_bases": lambda results: code_bases.table(
        _rows(results, "rows", code_bases.Row)
    ),
    "ablation": lambda results: ablation.table(ablation.rows_of(results["rows"])),
    "sweep.summary": lambda results: sweep_tables.summary_table(
        sweep.rows_of(results["programs"])
    ),
    "sweep.programs": lambda results: sweep_tables.programs_table(
        sweep.rows_of(results["programs"])
    ),
    "thirdparty.summary": lambda results: thirdparty.summary_table(
        _rows(results, "measured", measure.Row)
    ),
    "thirdparty.programs": lambda results: thirdparty.programs_list(
        _rows(results, "measured", measure.Row)
    ),
    "thirdparty.measured": lambda results: _thirdparty(
        _rows(results, "measured", measure.Row)
    ),
    "thirdparty_trained.trained": lambda results: thirdparty.trained_table(
        _rows(results, "trained", measure.Trained)
    ),
}
"""Table -> what makes it of the file that is named before the first dot."""
SUMMARIZED = ("accuracy", "autocast", "steps")
"""The files that the sentences ``summary`` are made of."""


def table(name: str, folder: pathlib.Path = RESULTS) -> str:
    """Returns a table as text, and below it what its figures belong to.

    Args:
      name: one of ``TABLES``.
      folder: the folder that the benchmarks wrote to.

    Raises:
      KeyError: there is no such table.
      FileNotFoundError: its benchmark wrote nothing (but for the one that needs a GPU:
        its table says so).
    """
    stem = name.partition(".")[0]
    if stem == "summary":
        return summary({one: _read(folder, one) for one in SUMMARIZED})
    if stem == "gpu" and not (folder / "gpu.json").exists():
        return _NOT_MEASURED
    results = _read(folder, stem)
    versions = (f"{package} {v}" for package, v in results["versions"].items())
    lines = TABLES[name](results).strip("\n")
    return f"{lines}\n\n{joined(versions, start=results['date'] + ': ')}"


def _read(folder: pathlib.Path, stem: str) -> Mapping[str, Any]:
    return json.loads((folder / f"{stem}.json").read_text())


def filled(text: str, folder: pathlib.Path = RESULTS) -> str:
    """Returns Markdown with its tables and sentences made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{table(m[2] or m[3], folder)}\n{m[5]}", text)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the tables into the texts that show them, or compares."""
    parser = argparse.ArgumentParser("python -m benchmarks.tables")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    for path in TEXTS:
        before = path.read_text()
        after = filled(before)
        if after == before:
            continue
        if options.check:
            raise SystemExit(f"{path.name} is out of date: python -m benchmarks.tables")
        path.write_text(after)
        print(f"{path.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
