"""Measures gradients of a program in 16 bits against float32, in three ways."""

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jmp_lite as jmp
from benchmarks.sweep.program import Entry, Products, Program, Random

DTYPES = ("bfloat16", "float16")
WAYS = ("mixed", "O1", "by hand")
SEEDS = (0, 1, 2)
LARGEST_SCALE = 2.0**15
"""Where a loss scale starts: ``jmp.DynamicLossScale`` does too."""
SMALL = {"bfloat16": 2.0**-10, "float16": 2.0**-13}
"""Errors below a quarter of the dtype's precision are not compared."""

_OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
}


class Row(NamedTuple):
    """A program in one dtype, in one way. Errors are medians over the seeds.

    Attributes:
      field: the file that the program is in.
      program: its name.
      dtype: the 16-bit dtype.
      way: ``"mixed"``, ``"O1"`` or ``"by hand"``.
      error: of the gradient, by norms over all leaves; NaN where one is not finite.
      leaf: the same of the worst leaf, of those that are not negligible.
      value: of the loss.
      share: of the work of products, what ``mixed`` runs in 16 bits; None where there
        are no products, and of the other ways.
      scale: the smallest loss scale that a seed needs.
      exact: the error of float32 itself, against float64.
    """

    field: str
    program: str
    dtype: str
    way: str
    error: float
    leaf: float
    value: float
    share: float | None
    scale: float
    exact: float


def measure(field: str, entry: Entry, dtypes: Sequence[str] = DTYPES) -> list[Row]:
    """Returns the errors of a program: a row for each dtype and way."""
    program = entry.program()
    inputs = [program.make(Random(seed)) for seed in SEEDS]
    full = functools.partial(program.loss, Products())
    run = _gradient(full)
    expected = [run(*one, np.float32(1)) for one in inputs]
    if not all(map(_is_finite, expected)):
        raise ValueError(f"{entry.name} is not finite in float32.")
    exact = statistics.median(
        _error(e[1], d[1])
        for e, d in zip(expected, _in_float64(full, inputs), strict=True)
    )
    rows: list[Row] = []
    for dtype in dtypes:
        for way in WAYS:
            run = _gradient(_loss(program, way, dtype))
            found = [_scaled(run, one, dtype) for one in inputs]
            pairs = [(f, e) for (f, _), e in zip(found, expected, strict=True)]
            rows.append(
                Row(
                    field,
                    entry.name,
                    dtype,
                    way,
                    _median(_error(f[1], e[1]) for f, e in pairs),
                    _median(_worst_leaf(f[1], e[1]) for f, e in pairs),
                    _median(_error(f[0], e[0]) for f, e in pairs),
                    share_low(program, dtype, inputs[0]) if way == "mixed" else None,
                    min(scale for _, scale in found),
                    exact,
                )
            )
    return rows


def _loss(program: Program, way: str, dtype: str) -> Callable[..., Any]:
    if way == "by hand":
        return functools.partial(program.loss, Products(dtype))
    full = functools.partial(program.loss, Products())
    return jmp.autocast(full, way, compute_dtype=dtype)


def _gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled function that returns ``(value, gradient)``.

    It rounds wherever the program does.
    """

    def run(params: Any, data: Any, scale: Any) -> Any:
        grad_fn = jax.value_and_grad(lambda params: loss(params, data) * scale)
        return jax.tree.map(lambda x: x / scale, grad_fn(params))

    return jax.jit(run, compiler_options=_OPTIONS)


def _scaled(run: Callable[..., Any], inputs: Any, dtype: str) -> tuple[Any, float]:
    """Returns value and gradient under the largest loss scale that is finite."""
    scale = LARGEST_SCALE if dtype == "float16" else 1.0
    while True:
        found = run(*inputs, np.float32(scale))
        if scale == 1 or _is_finite(found):
            return found, scale
        scale /= 2


def _in_float64(loss: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    with jax.enable_x64(True):
        run = _gradient(loss)
        wide = jax.tree.map(_wide, inputs)
        return [jax.tree.map(np.asarray, run(*one, np.float64(1))) for one in wide]


def share_low(program: Program, dtype: str, inputs: Any) -> float | None:
    """Returns the share of the products' work that ``mixed`` runs in 16 bits."""
    loss = functools.partial(program.loss, Products())
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


def _error(actual: Any, expected: Any) -> float:
    off, size = np.array(_pairs(actual, expected)).T
    return float(np.linalg.norm(off) / np.linalg.norm(size))


def _worst_leaf(actual: Any, expected: Any) -> float:
    """Returns the largest error of a leaf that has a thousandth of the gradient."""
    pairs = _pairs(actual, expected)
    least = 1e-3 * float(np.linalg.norm([size for _, size in pairs]))
    return float(np.max([off / size for off, size in pairs if size >= least]))


def _median(numbers: Any) -> float:
    numbers = list(numbers)
    return statistics.median(numbers) if np.isfinite(numbers).all() else float("nan")


# ----------------------------------------------------------------------------- flags


def flags(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Returns where ``mixed`` is worse than both other ways, and how.

    Returns:
      (program, dtype) -> a reason. ``"not finite"``: a gradient in ``mixed`` is NaN or
      infinite. ``"gradient"``, ``"leaf"``: the error of the gradient, or of its worst
      leaf, is more than twice that of ``"O1"`` and that of products cast by hand.
    """
    of = {(row.program, row.dtype, row.way): row for row in rows}
    found: dict[tuple[str, str], str] = {}
    for (program, dtype, way), row in of.items():
        if way != "mixed":
            continue
        others = [of[program, dtype, other] for other in WAYS[1:]]
        if not np.isfinite(row.error):
            found[program, dtype] = "not finite"
        elif _is_worse(row.error, [o.error for o in others], dtype):
            found[program, dtype] = "gradient"
        elif _is_worse(row.leaf, [o.leaf for o in others], dtype):
            found[program, dtype] = "leaf"
    return found


def _is_worse(error: float, others: Sequence[float], dtype: str) -> bool:
    finite = [one for one in others if np.isfinite(one)]
    worst = max(finite) if len(finite) == len(others) else float("inf")
    return error > SMALL[dtype] and error > 2 * worst
