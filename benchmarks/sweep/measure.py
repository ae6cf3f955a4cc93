"""Measures gradients of a program in 16 bits against float32, in three ways."""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jmp_lite as jmp
from benchmarks.sweep.program import Entry, Products, Random

DTYPES = ("bfloat16", "float16")
SEEDS = tuple(range(7))
LARGEST_SCALE = 2.0**15
"""Where a loss scale starts: ``jmp.DynamicLossScale`` does too."""
SMALL = {"bfloat16": 2.0**-10, "float16": 2.0**-13}
"""Errors below a quarter of the dtype's precision are not compared."""
LAW_7 = {"bfloat16": 0.005, "float16": 0.001}
"""What ``"mixed"`` may lose beyond three times the error of ``"O1"``."""

_OPTIONS = {
    "xla_allow_excess_precision": False,  # Round wherever the program does.
    # What takes XLA most of its time on CPUs; jaxlib 0.10 has another compiler of
    # fusions, a sixth as slow.
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    **(
        {"xla_cpu_use_fusion_emitters": False}
        if jax.__version__.startswith("0.10.")
        else {}
    ),
}


class Errors(NamedTuple):
    """How far gradients are from float32's: medians over the seeds.

    Attributes:
      all: by norms over all leaves; NaN where one is not finite.
      leaf: the same of the worst leaf, of those that are not negligible.
    """

    all: float
    leaf: float


class Row(NamedTuple):
    """A program in one dtype.

    Attributes:
      field: the file that the program is in.
      program: its name.
      dtype: the 16-bit dtype.
      mixed: the errors under ``"mixed"``.
      o1: the same under ``"O1"``.
      by_hand: the same of products cast by hand.
      share: of the work of products, what ``"mixed"`` runs in 16 bits; None where there
        are no products.
      scale: the smallest loss scale that a seed needs under ``"mixed"``.
      exact: the error of float32 itself, against float64.
    """

    field: str
    program: str
    dtype: str
    mixed: Errors
    o1: Errors
    by_hand: Errors
    share: float | None
    scale: float
    exact: float


def rows_of(written: Iterable[dict[str, Any]]) -> list[Row]:
    """Returns rows from JSON, where a tuple is a list."""
    errors = ("mixed", "o1", "by_hand")
    return [Row(**row | {key: Errors(*row[key]) for key in errors}) for row in written]


def measure(field: str, entry: Entry, dtypes: Sequence[str] = DTYPES) -> list[Row]:
    """Returns the errors of a program: a row for each dtype.

    Raises:
      ValueError: the program is not finite in float32.
    """
    program = entry.program()
    inputs = [program.make(Random(seed)) for seed in SEEDS]
    full = functools.partial(program.loss, Products())
    expected = in_float32(full, inputs)
    if not all(map(_is_finite, expected)):
        raise ValueError(f"{entry.name} is not finite in float32.")
    wide = _in_float64(full, inputs)
    rows: list[Row] = []
    for dtype in dtypes:
        ways = (
            jmp.autocast(full, "mixed", compute_dtype=dtype),
            jmp.autocast(full, "O1", compute_dtype=dtype),
            functools.partial(program.loss, Products(dtype)),
        )
        found = [_scaled(_gradient(way), inputs, dtype) for way in ways]
        rows.append(
            Row(
                field,
                entry.name,
                dtype,
                *(_errors(gradients, expected) for gradients, _ in found),
                share=share_low(full, dtype, inputs[0]),
                scale=found[0][1],
                exact=_errors(expected, wide).all,
            )
        )
    return rows


def in_float32(loss: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns values and gradients."""
    run = _gradient(loss)
    return [run(*one, np.float32(1)) for one in inputs]


def errors_of(
    low: Callable[..., Any], inputs: Sequence[Any], dtype: str, expected: Sequence[Any]
) -> Errors:
    """Returns the errors of a program in 16 bits.

    Args:
      low: its loss.
      inputs: its inputs, one for each seed.
      dtype: the 16-bit dtype.
      expected: what ``in_float32`` returns.
    """
    return _errors(_scaled(_gradient(low), inputs, dtype)[0], expected)


def _gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function that returns ``(value, gradient)``.

    It rounds wherever the program does.
    """

    def run(params: Any, data: Any, scale: Any) -> Any:
        grad_fn = jax.value_and_grad(lambda params: loss(params, data) * scale)
        return jax.tree.map(lambda x: x / scale, grad_fn(params))

    return jax.jit(run, compiler_options=_OPTIONS)


def _scaled(
    run: Callable[..., Any], inputs: Sequence[Any], dtype: str
) -> tuple[list[Any], float]:
    """Returns values and gradients, each under the largest scale that is finite."""
    found: list[Any] = []
    smallest = LARGEST_SCALE if dtype == "float16" else 1.0
    for one in inputs:
        scale = LARGEST_SCALE if dtype == "float16" else 1.0
        result = run(*one, np.float32(scale))
        while scale > 1 and not _is_finite(result):
            scale /= 2
            result = run(*one, np.float32(scale))
        found.append(result)
        smallest = min(smallest, scale)
    return found, smallest


def _in_float64(loss: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    with jax.enable_x64(True):
        run = _gradient(loss)
        wide = jax.tree.map(_wide, inputs)
        return [jax.tree.map(np.asarray, run(*one, np.float64(1))) for one in wide]


def share_low(loss: Callable[..., Any], dtype: str, inputs: Any) -> float | None:
    """Returns the share of the products' work that ``"mixed"`` runs in 16 bits."""
    flops = jmp.explain(loss, "mixed", compute_dtype=dtype)(*inputs).totals.flops
    total = sum(flops.values())
    return flops.get(dtype, 0) / total if total else None


# ---------------------------------------------------------------------------- errors


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _is_finite(tree: Any) -> bool:
    return all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(tree)))


def _pairs(actual: Any, expected: Any) -> list[tuple[float, float]]:
    """Returns for each leaf the norms of the difference and of what is expected."""
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    pairs = [(_wide(a), _wide(e)) for a, e in leaves]
    return [(float(np.linalg.norm(a - e)), float(np.linalg.norm(e))) for a, e in pairs]


def _errors(actual: Sequence[Any], expected: Sequence[Any]) -> Errors:
    pairs = [_pairs(a[1], e[1]) for a, e in zip(actual, expected, strict=True)]
    return Errors(_median(map(_of_all, pairs)), _median(map(_of_worst, pairs)))


def _of_all(pairs: Sequence[tuple[float, float]]) -> float:
    off, size = np.array(pairs).T
    return float(np.linalg.norm(off) / np.linalg.norm(size))


def _of_worst(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the largest error of a leaf that has a thousandth of the gradient."""
    least = 1e-3 * float(np.linalg.norm([size for _, size in pairs]))
    return float(np.max([off / size for off, size in pairs if size >= least]))


def _median(errors: Iterable[float]) -> float:
    errors = list(errors)
    return statistics.median(errors) if np.isfinite(errors).all() else float("nan")


# ----------------------------------------------------------------------------- flags


def flags(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Returns where ``"mixed"`` is worse than both other ways, and how.

    Returns:
      (program, dtype) -> a reason. ``"not finite"``: a gradient is NaN or infinite.
      ``"gradient"``, ``"leaf"``: the error of the gradient, or of its worst leaf, is
      more than twice that of ``"O1"`` and that of products cast by hand.
    """
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        others = (row.o1, row.by_hand)
        if not np.isfinite(row.mixed.all):
            found[row.program, row.dtype] = "not finite"
        elif _is_worse(row.mixed.all, [one.all for one in others], row.dtype):
            found[row.program, row.dtype] = "gradient"
        elif _is_worse(row.mixed.leaf, [one.leaf for one in others], row.dtype):
            found[row.program, row.dtype] = "leaf"
    return found


def breaches(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Returns the programs, with dtypes, in which ``"mixed"`` loses what O1 keeps.

    Law 7: its error is at most three times that of ``"O1"``, and a little more, for the
    gradient and for its worst leaf.
    """
    return [
        (row.program, row.dtype)
        for row in rows
        if not all(
            one <= 3 * other + LAW_7[row.dtype]
            for one, other in zip(row.mixed, row.o1, strict=True)
        )
    ]


def _is_worse(error: float, others: Sequence[float], dtype: str) -> bool:
    # A comparison with NaN is false: another way that fails excuses any error.
    return error > SMALL[dtype] and all(error > 2 * other for other in others)
