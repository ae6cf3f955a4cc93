"""Runs a program in float32, by hand in 16 bits, and under autocast."""

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks.thirdparty.program import Entry, Loss, Program, cast_by_hand

DTYPES = ("bfloat16", "float16")
LARGEST_SCALE = 2.0**15
"""Where a loss scale starts: ``jmp.DynamicLossScale`` does too."""


class Row(NamedTuple):
    """One program in one 16-bit dtype.

    Attributes:
      program: its name.
      packages: what it is from, with versions.
      dtype: the 16-bit dtype.
      failure: the first line of the error that it fails with; empty where it runs.
      is_finite: whether all is finite that is finite in float32.
      error: the relative error of the gradient, of all parameters together.
      by_hand: the same of the library's own 16-bit option, or of parameters and batch
        cast by hand; NaN where that is not finite, None where it fails.
      option: whether ``by_hand`` is the library's own option.
      share: which share of the work of matrix products and convolutions is in 16 bits;
        None where there is none.
      trace: the time to trace and lower the gradient, as a ratio to float32.
      is_exact: whether integers are those of float32: counts, random bits, indices.
      scale: the loss scale, of float16 alone.
    """

    program: str
    packages: str
    dtype: str
    failure: str
    is_finite: bool = False
    error: float | None = None
    by_hand: float | None = None
    option: bool = False
    share: float | None = None
    trace: float | None = None
    is_exact: bool = False
    scale: float = 1.0


class Trained(NamedTuple):
    """A program trained in float32 and under autocast from the same seed.

    Attributes:
      program: its name.
      dtype: the 16-bit dtype.
      start: the loss in float32 before the first step.
      exact: the mean of the last losses in float32.
      low: the same under autocast.
    """

    program: str
    dtype: str
    start: float
    exact: float
    low: float


def measure(entry: Entry, dtypes: Sequence[str] = DTYPES, runs: int = 3) -> list[Row]:
    """Returns what autocast makes of a program, a row for each dtype.

    Args:
      entry: the program.
      dtypes: the 16-bit dtypes.
      runs: how often each is traced, in turns with float32.
    """
    program = entry.make()
    expected = _gradient(program.loss, 1.0)(program.params, program.batch)
    if not _is_finite(expected):
        raise ValueError(f"{entry.name} is not finite in float32.")
    rows: list[Row] = []
    for dtype in dtypes:
        row = Row(entry.name, _versions(entry.packages), dtype, "")
        try:
            rows.append(_measured(row, program, expected, runs))
        except Exception as error:
            rows.append(row._replace(failure=_first_line(error)))
    return rows


def _measured(row: Row, program: Program, expected: Any, runs: int) -> Row:
    rules = _rules(program)
    low = jmp.autocast(program.loss, rules, compute_dtype=row.dtype)
    actual, scale = _scaled(low, program, row.dtype)
    own = program.by_hand is not None
    by_hand = (
        program.by_hand(row.dtype) if own else cast_by_hand(program.loss, row.dtype)
    )
    explanation = jmp.explain(program.loss, rules, compute_dtype=row.dtype)(
        program.params, program.batch
    )
    return row._replace(
        is_finite=_is_finite(actual),
        error=relative_error(actual[1], expected[1]),
        by_hand=_error_by_hand(by_hand, program, row.dtype, expected),
        option=own,
        share=_share(explanation),
        trace=_trace(program, low, runs),
        is_exact=_are_equal(actual[0][1], expected[0][1]),
        scale=scale,
    )


def _gradient(loss: Loss, scale: float) -> Callable[..., Any]:
    """Returns a jitted function that returns ``((loss, exact), gradient)``."""

    def scaled(params: Any, batch: Any) -> Any:
        value, exact = loss(params, batch)
        return value * scale, exact

    def run(params: Any, batch: Any) -> Any:
        grad_fn = jax.value_and_grad(scaled, has_aux=True, allow_int=True)
        (value, exact), gradient = grad_fn(params, batch)
        return (value / scale, exact), [x / scale for x in _floats(gradient)]

    return jax.jit(run)


def _scaled(loss: Loss, program: Program, dtype: str) -> tuple[Any, float]:
    """Returns value and gradient under the largest loss scale that is finite."""
    scale = LARGEST_SCALE if dtype == "float16" else 1.0
    while True:
        found = _gradient(loss, scale)(program.params, program.batch)
        if scale == 1 or _is_finite(found):
            return found, scale
        scale /= 8


def _error_by_hand(
    loss: Loss, program: Program, dtype: str, expected: Any
) -> float | None:
    try:
        found, _ = _scaled(loss, program, dtype)
    except Exception:  # Whatever it fails with, it does not run.
        return None
    return relative_error(found[1], expected[1]) if _is_finite(found) else float("nan")


def _share(explanation: jmp.results.Explanation) -> float | None:
    flops = explanation.totals.flops
    low = sum(n for dtype, n in flops.items() if dtype in DTYPES)
    return low / sum(flops.values()) if sum(flops.values()) else None


def _trace(program: Program, low: Loss, runs: int) -> float:
    ratios: list[float] = []
    for _ in range(runs):
        each: list[float] = []
        for loss in (program.loss, low):
            jax.clear_caches()
            start = time.perf_counter()
            _gradient(loss, 1.0).trace(program.params, program.batch).lower()
            each.append(time.perf_counter() - start)
        ratios.append(each[1] / each[0])
    return statistics.median(ratios)


def train(entry: Entry, dtype: str, steps: int = 200) -> Trained:
    """Trains a program in float32 and under autocast, from the same start."""
    program = entry.make()
    low = jmp.autocast(program.loss, _rules(program), compute_dtype=dtype)
    exact, mixed = (
        _losses(loss, program, dtype, steps) for loss in (program.loss, low)
    )
    last = slice(-max(steps // 10, 1), None)
    return Trained(
        entry.name,
        dtype,
        float(exact[0]),
        float(np.mean(exact[last])),
        float(np.mean(mixed[last])),
    )


def _losses(loss: Loss, program: Program, dtype: str, steps: int) -> np.ndarray:
    scale = jmp.NoOpLossScale()
    if dtype == "float16":
        scale = jmp.DynamicLossScale(jnp.float32(LARGEST_SCALE))
    optimizer = jmp.loss_scaling(optax.adam(program.learning_rate), scale)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grad_fn = jmp.value_and_grad(
            loss, loss_scale=jmp.get_loss_scale(state), has_aux=True
        )
        (value, _), gradient = grad_fn(params, program.batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state, losses = program.params, optimizer.init(program.params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(value)
    return np.asarray(losses)


# ----------------------------------------------------------------------------- parts


def _rules(program: Program) -> jmp.Rules:
    rules = jmp.get_rules("mixed")
    return program.rules(rules) if program.rules else rules


def _floats(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _is_finite(found: Any) -> bool:
    (value, _), gradient = found
    return all(bool(jnp.isfinite(x).all()) for x in [value, *gradient])


def relative_error(actual: Any, expected: Any) -> float:
    """Returns how far the floats of a tree are from another's, all of them together."""
    pairs = list(zip(_floats(actual), _floats(expected), strict=True))
    off = sum(float(jnp.sum((_wide(a) - _wide(e)) ** 2)) for a, e in pairs)
    size = sum(float(jnp.sum(_wide(e) ** 2)) for _, e in pairs)
    return (off / size) ** 0.5


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _are_equal(actual: Any, expected: Any) -> bool:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return all(bool(jnp.array_equal(a, e)) for a, e in pairs)


def _versions(packages: Sequence[str]) -> str:
    return ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
