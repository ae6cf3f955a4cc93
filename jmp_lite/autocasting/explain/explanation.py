"""``explain``: what autocast does with a function, before anything is run.

It reads the ``Decision``s that the interpreter takes, and decides nothing. It makes
rows first, and text of those.
"""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.explain.arguments import argument_name, arrays_in
from jmp_lite.autocasting.explain.backward import backward_of, rows_of_backward
from jmp_lite.autocasting.explain.difference import Difference
from jmp_lite.autocasting.explain.grouping import depth_that_fits, grouped
from jmp_lite.autocasting.explain.lints import Lint, Looked, find_lints
from jmp_lite.autocasting.explain.rows import (
    Row,
    Totals,
    casts_in,
    is_low,
    seen_in,
    totals_of,
)
from jmp_lite.autocasting.explain.tables import count, html_table, text_table
from jmp_lite.autocasting.explain.unused import nearest, unused
from jmp_lite.autocasting.interpreter.api import trace
from jmp_lite.autocasting.interpreter.validation import check_function, choose_rules
from jmp_lite.autocasting.interpreter.walk import Interpreter
from jmp_lite.autocasting.jaxprs.types import PyTree
from jmp_lite.autocasting.rules.rules import Rules, check_pattern
from jmp_lite.casting.dtypes import unknown_name


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast does with a function; ``print`` shows it as a table.

    Attributes:
      rules: the rules that decided.
      rows: one ``Row`` per equation, in the order in which they run. What a loop or an
        inner ``jit`` holds follows where that stands; the backward pass, if it was
        asked for, stands at the end.
      totals: sums over the rows, casts, and the residuals of the backward pass.
      lints: what is worth a second look, each with a place and a remedy.
      unused: what of the rules matched nothing, with what comes nearest.
      passes: how many loops or calls each pass of the rules has rewritten.
    """

    rules: Rules
    rows: tuple[Row, ...]
    totals: Totals
    lints: tuple[Lint, ...] = ()
    unused: tuple[str, ...] = ()
    passes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def share_low(self, op: str | None = None, *, bits: int = 16) -> float:
        """Returns which part of the equations runs in 16 bits or fewer.

        Args:
          op: the name of a primitive; None for all that hold a float.
          bits: 8 for those in float8 alone.

        Raises:
          ValueError: there is no such op in the function, or it holds no float; or
            ``bits`` is neither 8 nor 16.

        Example:
          >>> import jax.numpy as jnp
          >>> explain(lambda x: jnp.exp(x @ x))(jnp.ones((2, 2))).share_low()
          0.5
        """
        if bits not in (8, 16):
            raise ValueError(f"Expected bits=8 or bits=16, got {bits!r}.")
        rows = [row for row in self._rows_of(op) if row.precision != "as traced"]
        if not rows:
            raise ValueError(f"No {op or 'equation'} of the function holds a float.")
        return sum(is_low(row, bits) for row in rows) / len(rows)

    def precision_of(self, scope: str | None = None, op: str | None = None) -> str:
        """Returns the one dtype that some equations of the function run in.

        Args:
          scope: a regular expression in their path; None for any.
          op: the name of their primitive; None for any.

        Raises:
          ValueError: there is no such equation, or some run in one dtype and some in
            another; ``scope`` is no regular expression.

        Example:
          >>> import jax.numpy as jnp
          >>> explain(lambda x: jnp.exp(x @ x))(jnp.ones((2, 2))).precision_of(op="exp")
          'float32'
        """
        check_pattern(scope or "")
        found = [r for r in self._rows_of(op) if re.search(scope or "", r.scope)]
        if not found:
            hint = nearest(str(scope), self._names(lambda row: row.scope))
            what = f"{op!r}" if op else "equation"
            where = f" in a scope like {scope!r}" if scope else ""
            raise ValueError(f"There is no {what}{where}.{hint}")
        precisions = Counter(r.precision for r in found if r.precision != "as traced")
        if len(precisions) > 1:
            found = ", ".join(
                f"{n} in {dtype}" for dtype, n in precisions.most_common()
            )
            raise ValueError(
                f"They run in several: {found}. Narrow it down by scope= or op=."
            )
        return next(iter(precisions), "as traced")

    def diff(self, other: "Explanation") -> Difference:
        """Returns what this explanation and another one of the function say otherwise.

        Args:
          other: for instance of the same function under other rules.

        Raises:
          TypeError: ``other`` is no explanation.
        """
        if not isinstance(other, Explanation):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Expected an Explanation, got {type(other).__name__}.")
        return Difference(self.rows, other.rows)

    def table(self, depth: int | None = None) -> str:
        """Returns the rows as text.

        Args:
          depth: how many names of a path are shown. Deeper rows, and those of blocks
            that differ in a number alone, are summed up. Where an op runs otherwise in
            a few of those blocks, they are named. None for every equation on its own.
        """
        return text_table(*grouped(self.rows, depth), right=(0,))

    def summary(self) -> str:
        """Returns all but the rows as text."""
        return "\n".join(
            f"{name}{text}" for name, texts in self._lines() for text in texts
        )

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        return json.dumps(
            {
                "rules": json.loads(self.rules.to_json()),
                "rows": [row._asdict() for row in self.rows],
                "totals": dataclasses.asdict(self.totals),
                "lints": [dataclasses.asdict(lint) for lint in self.lints],
                "unused": self.unused,
                "passes": dict(self.passes),
            }
        )

    def __str__(self) -> str:
        depth = depth_that_fits(self.rows)
        return "\n".join([self._title(), self.table(depth), self.summary()])

    def _repr_html_(self) -> str:
        depth = depth_that_fits(self.rows)
        lines = [(name, [(text,) for text in texts]) for name, texts in self._lines()]
        return "\n".join(
            [
                html_table([self._title()], lines),
                html_table(*grouped(self.rows, depth)),
            ]
        )

    def _title(self) -> str:
        title = f"autocast to {np.dtype(self.rules.compute_dtype).name}"
        return f"{title}: {len(self.rows)} equations"

    def _lines(self) -> Sequence[tuple[str, Sequence[str]]]:
        totals = self.totals
        products = totals.flops.items()
        lines: list[tuple[str, Sequence[str]]] = [
            ("equations: ", [_shares(totals.equations)]),
            ("products: ", [_shares(totals.products)] if products else []),
            ("work: ", [_flops(products)] if any(totals.flops.values()) else []),
            (
                "casts: ",
                [f"{totals.casts} ({count(totals.cast_bytes)}B read and written)"],
            ),
        ]
        if totals.kept_run is not None and totals.kept_traced is not None:
            run, traced = count(totals.kept_run), count(totals.kept_traced)
            kept = f"{run}B, without autocast {traced}B"
            lines.append(("saved for the backward pass: ", [kept]))
        passes = ", ".join(f"{name} ({n})" for name, n in self.passes.items())
        lines.append(("passes: ", [passes] if passes else []))
        lines.append(("unused: ", self.unused))
        lines.append(("lint: ", tuple(map(str, self.lints))))
        return lines

    def _rows_of(self, op: str | None) -> Sequence[Row]:
        if op is None:
            return self.rows
        rows = [row for row in self.rows if row.op == op]
        if not rows:
            raise unknown_name("op", op, self._names(lambda row: row.op))
        return rows

    def _names(self, of: Callable[[Row], str]) -> list[str]:
        return list(dict.fromkeys(map(of, self.rows)))


Params = ParamSpec("Params")


def explain(
    fun: Callable[Params, Any],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
) -> Callable[Params, Explanation]:
    """Returns a function that explains what ``autocast(fun, rules)`` does.

    Args:
      fun: any function of pytrees that JAX can trace.
      rules: a preset's name or a ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own.
      backward: whether to explain the backward pass too, and its residuals: what
        ``value_and_grad(autocast(fun))`` runs for the gradients of all arguments that
        are floats. A scalar is a loss, and so is one that a tuple of results begins
        with: it alone is differentiated, as with ``has_aux``. Of other results all
        floats are.

    Returns:
      A function of ``fun``'s arguments, for whose arrays ``ShapeDtypeStruct`` do. It
      computes nothing and returns an ``Explanation``.

    Raises:
      ValueError: there is no such preset or dtype; in the function, nothing is there to
        differentiate though ``backward`` says so.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> explanation = explain(lambda x: jnp.exp(x @ x))(x)
      >>> for row in explanation.rows:
      ...     print(row.op, row.precision, row.shapes)
      dot_general bfloat16 ('float32[4,4]',)
      exp float32 ('float32[4,4]',)
      >>> explanation.totals.flops
      {'bfloat16': 128}
    """
    check_function(fun)
    chosen = choose_rules(rules, compute_dtype)

    @functools.wraps(fun)
    def explained(*args: PyTree, **kwargs: PyTree) -> Explanation:
        walk = Interpreter(chosen())
        traced, arrays, structure = trace(fun, args, kwargs)
        names = [argument_name(path) for path, _ in arrays_in(args, kwargs)]
        run = jax.make_jaxpr(lambda *xs: walk.run_function(traced, xs, names))(*arrays)
        low = walk.at.low_dtype
        seen = list(seen_in(walk.records, walk.rules))
        rows, kept = [one.row for one in seen], None
        programs = [[jaxpr] for jaxpr in (traced, run)]
        if backward:
            passes = [backward_of(jaxpr, structure) for jaxpr in (traced, run)]
            kept = tuple(one.kept for one in passes)
            rows += rows_of_backward(passes[1], passes[0])
            programs = [[one.forward, one.backward] for one in passes]
        as_traced, as_run = (casts_in(each, low) for each in programs)
        added = tuple(n - m for n, m in zip(as_run, as_traced, strict=True))
        forward = [one for one in seen if not one.row.is_backward]
        looked = Looked(
            forward,
            walk.results,
            walk.rules,
            has_gradients=backward or len(forward) < len(seen),
            jaxpr=traced,
            alone=_alone(args, kwargs),
        )
        return Explanation(
            walk.rules,
            tuple(rows),
            totals_of(rows, added, kept),
            find_lints(looked),
            tuple(unused(walk.rules, rows, traced)),
            {
                name: walk.passes[name]
                for name in walk.rules.passes
                if walk.passes[name]
            },
        )

    return explained


def _alone(args: PyTree, kwargs: PyTree) -> frozenset[int]:
    """Returns which of the arrays are float32, and arguments by themselves."""
    arrays = arrays_in(args, kwargs)
    is_alone = [len(path) == 2 and leaf.dtype == "float32" for path, leaf in arrays]
    return frozenset(i for i, yes in enumerate(is_alone) if yes)


def _shares(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {name}" for name, n in ordered)


def _flops(flops: Iterable[tuple[str, int]]) -> str:
    flops = sorted(flops, key=lambda item: -item[1])
    total = sum(n for _, n in flops)
    texts = [f"{count(n)}flop in {name} ({n / total:.0%})" for name, n in flops]
    return ", ".join(texts)
