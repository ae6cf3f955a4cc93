"""``explain``: what autocast does with a function, told before anything is run.

The law of this file: it reads the very ``Decision``s that the interpreter takes, and
decides nothing. Rows first, text second.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.decisions import Decision, Run, Told, ToldInside
from jmp_lite.autocasting.door import (
    check_function,
    choose_rules,
    function_of_arrays,
)
from jmp_lite.autocasting.interpreter import Walk, run
from jmp_lite.autocasting.rules import Rules


@dataclasses.dataclass(frozen=True)
class Row:
    """How one equation of a function runs.

    Attributes:
      scope: the path that it stands in, such as ``"LM/Block_0/Dense_0"``.
      op: the name of its primitive; for a carry of a loop that of the loop.
      precision: the dtype that its float32 operands are given in and that its float32
        results have: ``"bfloat16"``, ``"float16"`` or ``"float32"``; ``"as traced"``
        where it has none.
      reason: why, in words.
      source: where it stands in the code: file, line and function.
      shapes: what its results were traced as, such as ``"float32[4,8]"``.
      times: how often it is run; None inside of a ``while`` loop.
    """

    scope: str
    op: str
    precision: str
    reason: str
    source: str
    shapes: tuple[str, ...]
    times: int | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast does with a function; ``print`` shows it as a table.

    Attributes:
      rules: the rules that decided.
      rows: one ``Row`` per equation, in the order in which they run. What a loop or an
        inner ``jit`` holds follows where that stands.
    """

    rules: Rules
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        title = f"autocast to {np.dtype(self.rules.compute_dtype).name}"
        lines = [f"{title}: {len(self.rows)} equations"]
        counted = Counter(self.rows)  # In the order in which each was met first.
        cells = [_cells(row, count) for row, count in counted.items()]
        widths = [
            max(map(len, column)) for column in zip(_HEADERS, *cells, strict=True)
        ]
        lines.append(_line(_HEADERS, widths))
        scope = ""
        for row, texts in zip(counted, cells, strict=True):
            if row.scope != scope:
                scope = row.scope
                lines.append(scope or "(no scope)")
            lines.append(_line(texts, widths))
        return "\n".join(lines)


def explain(
    fun: Callable[..., Any],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., Explanation]:
    """Returns a function that tells what ``autocast(fun, rules)`` does.

    Args:
      fun: any function of pytrees that JAX can trace.
      rules: a preset's name or a ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own.

    Returns:
      A function of ``fun``'s arguments, for whose arrays ``ShapeDtypeStruct``s do. It
      computes nothing and returns an ``Explanation``.

    Raises:
      ValueError: there is no such preset or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> for row in explain(lambda x: jnp.exp(x @ x))(x).rows:
      ...     print(row.op, row.precision, row.shapes)
      dot_general bfloat16 ('float32[4,4]',)
      exp float32 ('float32[4,4]',)
    """
    check_function(fun)
    chosen = choose_rules(rules, compute_dtype)

    @functools.wraps(fun)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        walk = Walk(chosen())

        def walked(*args: Any, **kwargs: Any) -> None:
            run(walk, fun, args, kwargs)

        of_arrays, arrays = function_of_arrays(walked, args, kwargs)
        jax.eval_shape(of_arrays, *arrays)
        rows = tuple(_rows(walk.told, "", [], 1, np.dtype(walk.low_dtype).name))
        return Explanation(walk.rules, rows)

    return explained


# ------------------------------------------------------------------------------ rows


def _rows(
    told: Sequence[Told | ToldInside],
    path: str,
    origins: Sequence[Any],
    times: int | None,
    low: str,
) -> Iterator[Row]:
    """Yields the rows of what was told along one jaxpr.

    Args:
      told: what was told.
      path: the scopes that the jaxpr stands in.
      origins: where its inputs come from.
      times: how often it is run.
      low: the name of the compute dtype.
    """
    for item in told:
        if isinstance(item, ToldInside):
            outside = [origins[o] if isinstance(o, int) else o for o in item.origins]
            more = times and item.times and times * item.times
            inner = compat.path_of(item.eqn, path)
            yield from _rows(item.told, inner, outside, more, low)
            continue
        eqn, decision, origin, result = item
        origin = origins[origin] if isinstance(origin, int) else origin
        reason = _told_reason(decision.reason, origin)
        yield _row(eqn, path, decision, reason, times, low, result)
        if decision.run is Run.AS_TRACED:
            yield from _kept_rows(eqn, path, decision, times, low)


def _kept_rows(
    eqn: Any, path: str, decision: Decision, times: int | None, low: str
) -> Iterator[Row]:
    """Yields the rows of what an equation holds that is run as it was traced."""
    reason = f"inside of {eqn.primitive.name}, which is run as traced"
    kept = dataclasses.replace(decision, reason=reason)
    inner_path = compat.path_of(eqn, path)
    for jaxpr in compat.inner_jaxprs(eqn):
        for inner in compat.parts(jaxpr).eqns:
            yield _row(inner, inner_path, kept, reason, times, low)
            yield from _kept_rows(inner, inner_path, kept, times, low)


def _row(
    eqn: Any,
    path: str,
    decision: Decision,
    reason: str,
    times: int | None,
    low: str,
    result: int | None = None,
) -> Row:
    vars_ = eqn.outvars if result is None else [eqn.outvars[result]]
    return Row(
        scope=compat.join(path, *compat.scopes(eqn)),
        op=eqn.primitive.name,
        precision=_precision(eqn, decision, low),
        reason=reason,
        source=compat.source(eqn),
        shapes=tuple(var.aval.str_short() for var in vars_),
        times=times,
    )


def _precision(eqn: Any, decision: Decision, low: str) -> str:
    if decision.run is Run.LOW:
        return low
    has_float32 = any(map(compat.is_float32, (*eqn.invars, *eqn.outvars)))
    return "float32" if has_float32 else "as traced"


def _told_reason(reason: str, origin: Any) -> str:
    """Returns a reason with where the operand comes from that decided."""
    if origin is None:
        return reason
    if isinstance(origin, str):
        return f"{reason}: {origin}"
    place = _short(compat.source(origin))
    return f"{reason}: {origin.primitive.name}" + (place and f" at {place}")


def _short(source: str) -> str:
    """Returns a source without its folder and function."""
    return source.split(" ")[0].rpartition("/")[-1]


# ------------------------------------------------------------------------------ text

_HEADERS = ("times", "op", "runs in", "results", "why", "where")


def _cells(row: Row, count: int) -> Sequence[str]:
    times = "?" if row.times is None else f"{row.times * count}"
    return (
        times,
        row.op,
        row.precision,
        " ".join(row.shapes),
        row.reason,
        _short(row.source),
    )


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    times, *rest = texts
    padded = [t.ljust(w) for t, w in zip(rest, widths[1:], strict=True)]
    return "  ".join(["", times.rjust(widths[0]), *padded]).rstrip()
