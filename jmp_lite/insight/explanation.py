"""``explain``: shows what autocast does with a function, without computing anything.

It reads the decisions of a plan and decides nothing itself. It makes
rows first, and text from the rows.
"""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ParamSpec

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.arguments import read_function
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.rules.match import (
    AnyPrecision,
    in_json_or_name,
    unused_scopes,
)
from jmp_lite.autocasting.rules.presets import PRESETS, check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import (
    Rules,
    check_pattern,
    fields_of,
    requested_formats,
)
from jmp_lite.autocasting.rules.serialization import fields_for_json
from jmp_lite.autocasting.run import Runner
from jmp_lite.casting.dtypes import default_device, hint_for, unknown_name
from jmp_lite.formats.float8 import Float8Format, describe_formats
from jmp_lite.insight import provenance
from jmp_lite.insight.backward import (
    ArgNums,
    Differentiable,
    backward_of,
    check_argnums,
    rows_of_backward,
)
from jmp_lite.insight.lints import Lint, LintInput, find_lints
from jmp_lite.insight.rows import Row, decided_rows, is_low
from jmp_lite.insight.summaries import (
    Difference,
    Totals,
    casts_in,
    depth_that_fits,
    grouped,
    totals_of,
)
from jmp_lite.insight.tables import Uncalled, count, html_table, text_table
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.trace import argument_names, arrays_in
from jmp_lite.jaxprs.types import Jaxpr, PyTree
from jmp_lite.ops import Precision, record_of


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast does with a function; ``print`` shows it as a table.

    Attributes:
      rules: the rules.
      rows: one ``Row`` for each equation, in the order of execution. The rows inside of
        a loop or an inner ``jit`` follow the loop or the call. The rows of the backward
        pass, if requested, are at the end.
      totals: the sums over the rows, the casts, and the bytes of residuals.
      lints: probable problems, each with a place and a remedy.
      unused: the rules that match nothing, each with the nearest name.
      passes: the number of loops or calls that each pass has rewritten.
      held: the arguments that are traced in float32 and held in 16 bits: the name of
        each, with its dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> explanation = jmp.explain(lambda x: x @ x)(jnp.ones((2, 2)))
      >>> explanation.rows[0].precision, explanation.rules.compute_dtype
      ('bfloat16', dtype(bfloat16))
    """

    rules: Rules
    rows: tuple[Row, ...]
    totals: Totals
    lints: tuple[Lint, ...] = ()
    unused: tuple[str, ...] = ()
    passes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    held: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def share_low(self, op: str | None = None, *, bits: int = 16) -> float:
        """Returns the share of equations that run in 16 bits or fewer.

        Args:
          op: the name of a primitive; None for all equations with a float.
          bits: 8 counts float8 equations only.

        Returns:
          A number from 0 to 1.

        Raises:
          ValueError: the function has no such op, no equation holds a float, or
            ``bits`` is neither 8 nor 16.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_lite as jmp
          >>> jmp.explain(lambda x: jnp.exp(x @ x))(jnp.ones((2, 2))).share_low()
          0.5
        """
        if bits not in (8, 16):
            raise ValueError(f"Expected bits=8 or bits=16, got {bits!r}.")
        rows = [row for row in self._rows_of(op) if row.precision != "as traced"]
        if not rows:
            raise ValueError(
                f"No {op or 'equation'} in this function has a "
                "floating-point operand or result."
            )
        return sum(is_low(row, bits) for row in rows) / len(rows)

    def dtype_of(self, scope: str | None = None, op: str | None = None) -> str:
        """Returns the dtype that matching equations run in.

        Args:
          scope: a regular expression for their path; None matches every path.
          op: the name of their primitive; None matches every op.

        Returns:
          The name of the dtype, as in ``Row.precision``.

        Raises:
          ValueError: no equation matches, matching equations run in different dtypes,
            or ``scope`` is not a regular expression.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_lite as jmp
          >>> explanation = jmp.explain(lambda x: jnp.exp(x @ x))(jnp.ones((2, 2)))
          >>> explanation.dtype_of(op="exp")
          'float32'
        """
        check_pattern(scope or "")
        found = [r for r in self._rows_of(op) if re.search(scope or "", r.scope)]
        if not found:
            hint = hint_for(str(scope), self._names(lambda row: row.scope))
            what = f"{op!r}" if op else "equation"
            where = f" has a path that matches {scope!r}" if scope else " exists"
            raise ValueError(f"No {what}{where}.{hint}")
        precisions = Counter(r.precision for r in found if r.precision != "as traced")
        if len(precisions) > 1:
            found = ", ".join(
                f"{n} in {dtype}" for dtype, n in precisions.most_common()
            )
            raise ValueError(
                f"The matching equations run in different dtypes: {found}. Narrow the "
                "match with scope= or op=, or read rows, of which each has is_backward."
            )
        return next(iter(precisions), "as traced")

    def diff(self, other: "Explanation") -> Difference:
        """Returns the differences between two explanations of a function.

        Args:
          other: another explanation, for example under other rules.

        Returns:
          A ``Difference``; ``print`` shows it as a table.

        Raises:
          TypeError: ``other`` is not an ``Explanation``.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_lite as jmp
          >>> fun, x = lambda x: jnp.tanh(x @ x) @ x, jnp.ones((2, 2))
          >>> difference = jmp.explain(fun)(x).diff(jmp.explain(fun, "O1")(x))
          >>> [(a.op, a.precision, b.precision) for a, b in difference.changed]
          [('tanh', 'bfloat16', 'float32')]
        """
        if not isinstance(other, Explanation):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Expected an Explanation, got {type(other).__name__}.")
        return Difference(self.rows, other.rows)

    def table(self, depth: int | None = None) -> str:
        """Returns the rows as a table of text.

        Args:
          depth: the number of path components to show. Deeper rows are summed up, and
            so are blocks whose names differ only in a number. If an op runs differently
            in a few of these blocks, the table names them. None shows every equation.
        """
        return text_table(*grouped(self.rows, depth), right=(0,))

    def summary(self) -> str:
        """Returns all but the rows as text: totals, passes, unused rules and lints."""
        return "\n".join(
            f"{name}{text}" for name, texts in self._lines() for text in texts
        )

    def to_json(self) -> str:
        """Returns the explanation as JSON, with your own number formats by name."""
        return json.dumps(
            {
                "rules": fields_for_json(fields_of(self.rules), in_json_or_name),
                "rows": [row._asdict() for row in self.rows],
                "totals": dataclasses.asdict(self.totals),
                "lints": [dataclasses.asdict(lint) for lint in self.lints],
                "unused": self.unused,
                "passes": dict(self.passes),
                "held": dict(self.held),
            }
        )

    def __str__(self) -> str:
        depth = depth_that_fits(self.rows)
        return "\n".join([self._title(), self.table(depth), self.summary()])

    def _repr_html_(self) -> str:
        depth = depth_that_fits(self.rows)
        lines = [(name, [(text,) for text in texts]) for name, texts in self._lines()]
        return "\n".join(
            [html_table([self._title()], lines), html_table(*grouped(self.rows, depth))]
        )

    def _title(self) -> str:
        title = f"autocast to {np.dtype(self.rules.compute_dtype).name}"
        return f"{title}: {len(self.rows)} equations"

    def _lines(self) -> Sequence[tuple[str, Sequence[str]]]:
        totals = self.totals
        casts = f"{totals.casts} ({count(totals.cast_bytes)}B read and written)"
        lines: list[tuple[str, Sequence[str]]] = [
            ("equations: ", [_shares(totals.equations)]),
            ("products: ", [_shares(totals.products)] if totals.products else []),
            ("work: ", [_flops(totals.flops)] if any(totals.flops.values()) else []),
            ("casts: ", [casts]),
        ]
        if totals.kept_run is not None and totals.kept_traced is not None:
            run, traced = count(totals.kept_run), count(totals.kept_traced)
            kept = f"{run}B, without autocast {traced}B"
            lines.append(("saved for the backward pass: ", [kept]))
        passes = ", ".join(f"{name} ({n})" for name, n in self.passes.items())
        lines.append(("passes: ", [passes] if passes else []))
        if any(row.number_format == "float8" for row in self.rows):
            of_float8 = [
                describe_formats(requested.options, default_device())
                for requested in requested_formats(self.rules)
                if isinstance(requested, Float8Format)
            ]
            lines.append(("float8: ", tuple(dict.fromkeys(of_float8))))
        sums = Counter(row.sums for row in self.rows if row.sums)
        in_words = ", ".join(f"{n} {name}" for name, n in sums.items())
        lines.append(("sums of float8: ", [in_words] if sums else []))
        lines.append(("arguments: ", list(_held(self.held))))
        lines.append(("unused: ", self.unused))
        lines.append(("lint: ", tuple(map(str, self.lints))))
        return lines

    def _rows_of(self, op: str | None) -> Sequence[Row]:
        if op is None:
            return self.rows
        rows = [row for row in self.rows if row.op == op]
        if not rows:
            names = self._names(lambda row: row.op)
            if record_of(op) is not None:
                raise ValueError(
                    f"The function has no equation of the op {op!r}. Its ops are "
                    f"{', '.join(names)}."
                )
            raise unknown_name("op", op, names)
        return rows

    def _names(self, of: Callable[[Row], str]) -> list[str]:
        return list(dict.fromkeys(map(of, self.rows)))


Args = ParamSpec("Args")


def explain(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
    argnums: ArgNums = None,
) -> Callable[Args, Explanation]:
    """Returns a function that explains what ``autocast(fun, rules)`` does.

    Args:
      fun: a function of pytrees that JAX can trace.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      backward: whether to explain the backward pass too, with its residuals. It
        explains ``value_and_grad(autocast(fun), argnums)``. A scalar result is the
        loss. So is a scalar at the start of a tuple of results, as with ``has_aux``.
        Without one, all floating-point results are differentiated.
      argnums: which positional arguments the backward pass differentiates, as in
        ``jax.grad``; None for all floating-point arguments.

    Returns:
      A function of ``fun``'s arguments, which may be ``ShapeDtypeStruct`` objects. It
      traces ``fun``, computes nothing, and returns an ``Explanation``.

    Raises:
      ValueError: the preset or the dtype is unknown; or, in a call, ``backward`` is
        True and there is nothing to differentiate.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
      >>> explanation = jmp.explain(lambda x: jnp.exp(x @ x))(x)
      >>> for row in explanation.rows:
      ...     print(row.op, row.precision, row.shapes)
      dot_general bfloat16 ('float32[4,4]',)
      exp float32 ('float32[4,4]',)
      >>> explanation.totals.flops
      {'bfloat16': 128}
    """
    check_convertible(fun)
    check_argnums(argnums, backward)
    chosen = choose_rules(rules, compute_dtype)

    def explained(*args: PyTree, **kwargs: PyTree) -> Explanation:
        planner = Planner(rules := chosen())
        program = read_function(fun, args, kwargs, rules)
        traced, treedef = program.jaxpr, program.treedef
        names = argument_names(args, kwargs)
        plan = planner.function(traced, program.avals, names)
        run_plan = functools.partial(Runner(planner).function, plan)
        run = structure.trace(
            lambda *xs: run_plan(xs, program.types), program.avals, traced
        )
        low = planner.lookup.low_dtype
        decided = list(decided_rows(plan, rules))
        rows, kept = [one.row for one in decided], None
        programs = [[jaxpr] for jaxpr in (traced, run)]
        if backward:
            of_all = traced, run, program.as_written
            passes = [
                backward_of(Differentiable(one, treedef, args, kwargs, argnums))
                for one in (of_all if program.held else of_all[:2])
            ]
            kept = passes[-1 if program.held else 0].kept, passes[1].kept
            rows += rows_of_backward(passes[1], passes[0])
            programs = [[one.forward, one.backward] for one in passes[:2]]
        as_traced, as_run = (casts_in(each, low) for each in programs)
        added = tuple(n - m for n, m in zip(as_run, as_traced, strict=True))
        forward = [one for one in decided if not one.row.is_backward]
        inputs = LintInput(
            forward,
            plan.results,
            rules,
            has_gradients=backward or len(forward) < len(decided),
            program=program,
            added=provenance.addends_in(traced, _alone(args, kwargs)),
            closely_read=provenance.closely_read(traced),
        )
        counts = {} if program.is_unchanged else planner.passes
        return Explanation(
            rules,
            tuple(rows),
            totals_of(rows, added, kept),
            find_lints(inputs),
            tuple(_unused(rules, rows, traced)),
            {p: counts[p] for p in rules.passes if counts.get(p)},
            {names[i]: dtype.name for i, dtype in program.held.items()},
        )

    return Uncalled("explain", fun, explained)


def _alone(args: PyTree, kwargs: PyTree) -> set[int]:
    """Returns the float32 arrays that are whole arguments, not leaves of a pytree."""
    arrays = arrays_in(args, kwargs)
    wholes = [len(path) == 2 and leaf.dtype == "float32" for path, leaf in arrays]
    return {i for i, is_whole in enumerate(wholes) if is_whole}


def _unused(rules: Rules, rows: Sequence[Row], jaxpr: Jaxpr) -> Iterable[str]:
    """Yields a message for each rule of the user that decides nothing."""
    places = [(row.scope, row.op) for row in rows]
    yield from _unused_scopes("scope", rules.scopes, places)
    if rules.carries:
        # As rules of a precision that applies to every op: a carry has no format.
        carries = [(pattern, Precision.FULL) for pattern, _ in rules.carries]
        inside = ((path, params.op_of(eqn)) for eqn, path in equations(jaxpr))
        loops = [(path, op) for path, op in inside if op in ("scan", "while")]
        yield from _unused_scopes("carry", carries, loops)
    ops = list(dict.fromkeys(row.op for row in rows))
    # ``product`` names all products, of which a program has few.
    used = [precision for op, precision in rules.ops if op in ops and op in PRODUCTS]
    for pair in rules.ops:
        op, precision = pair
        is_used = op in ops or (op in PRODUCTS and precision in used)
        if pair not in _OPS_OF_PRESETS and not is_used:
            yield f"op {op!r} matches nothing.{hint_for(op, ops)}"


_OPS_OF_PRESETS = frozenset(pair for preset in PRESETS.values() for pair in preset.ops)


def _unused_scopes(
    kind: str,
    scopes: Sequence[tuple[str, AnyPrecision]],
    ops: Sequence[tuple[str, str]],
) -> Iterable[str]:
    """Yields a message for each rule that matches no path, or comes too late."""
    names = dict.fromkeys(name for path, _ in ops for name in path.split("/"))
    for pattern, earlier in unused_scopes(scopes, ops):
        if earlier is None:
            yield f"{kind} {pattern!r} matches nothing.{hint_for(pattern, names)}"
        else:
            yield f"{kind} {pattern!r} has no effect: {earlier!r} comes first."


def _held(arguments: Mapping[str, str]) -> Iterator[str]:
    """Yields how many arguments are held in each 16-bit dtype."""
    for dtype, n in Counter(arguments.values()).most_common():
        first = next(name for name, other in arguments.items() if other == dtype)
        names = f"{first}, and {n - 1} more" if n > 1 else first
        yield f"traced in float32, held in {dtype}: {names}"


def _shares(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in Counter(counts).most_common())


def _flops(flops: Mapping[str, int]) -> str:
    total = sum(flops.values())
    texts = [
        f"{count(n)}flop in {name} ({n / total:.0%})"
        for name, n in Counter(flops).most_common()
    ]
    return ", ".join(texts)
