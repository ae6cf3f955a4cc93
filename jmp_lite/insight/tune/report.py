"""``Tuned``: the rules that ``tune`` finds, and the report of how it found them.

A report is a value, and every error in it was measured. Its text and its JSON contain
its fields.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from jmp_lite.autocasting.rules.match import AnyPrecision, name_of
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.insight.tables import text_table
from jmp_lite.insight.tune.candidates import NUMBER, without_numbers
from jmp_lite.insight.tune.measure import Error, in_words
from jmp_lite.ops import Precision


class Kept(NamedTuple):
    """A scope or an op that stays in a wider precision than at the start.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      name: the pattern of the scope, or the op.
      precision: ``FULL`` or ``FULL_INSIDE`` for a rule that keeps it in float32.
        ``LOW`` for products that stay in 16 bits instead of float8, or of another
        number format. They have no rule of their own: the rules name the products in
        float8.
      without: the error without this entry. For ``LOW``, the error with these products
        in float8 too. If the op itself is ``LOW``, scopes cannot name some products,
        and this is the error with all products in float8.
    """

    kind: str
    name: str
    precision: AnyPrecision
    without: Error


class Step(NamedTuple):
    """One step of the search: it tries to lower some more scopes or ops.

    Attributes:
      lowered: the scopes or ops.
      error: the error with these, and all that were lowered before.
      is_tolerated: whether they stay low.
      precision: ``LOW`` for a step from float32, the number format (``FLOAT8``) for one
        from 16 bits.
    """

    lowered: tuple[str, ...]
    error: Error
    is_tolerated: bool
    precision: AnyPrecision = Precision.LOW


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """The report of a search.

    ``print`` shows what the rules keep in float32; ``table`` shows the steps.

    Attributes:
      tolerance: the largest tolerated error.
      error: the error of the rules found.
      error_before: the error of the initial rules.
      kept: the scopes or ops that the rules keep in float32, or out of float8, with
        their errors.
      steps: the steps of the search, in order.
      not_judged: the results and gradients that float32 does not determine: a change in
        the last bit of the arguments changes them by more than a tenth.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> x = jnp.linspace(-1, 1, 16).reshape(4, 4)
      >>> fun, quiet = lambda x: jnp.tanh(x @ x) @ x, lambda line: None
      >>> rules, report = jmp.tune(fun, tolerance=0.1, progress=quiet)(x)
      >>> report.kept, report.error.largest < 0.1
      ((), True)
    """

    tolerance: float
    error: Error
    error_before: Error
    kept: tuple[Kept, ...] = ()
    steps: tuple[Step, ...] = ()
    not_judged: tuple[str, ...] = ()

    def table(self) -> str:
        """Returns the steps as a table of text."""
        headers = ("lowered", "error", "worst in", "outcome")
        rows = [
            (_names(step.lowered), *_cells(step.error), _outcome(step))
            for step in self.steps
        ]
        return text_table(headers, [("", rows)], right=(1,))

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(_plain(vars(self)), indent=2)

    def __str__(self) -> str:
        lines = [
            f"error {in_words(self.error)}, tolerance {self.tolerance:.2g}",
            f"before tuning: {in_words(self.error_before)}",
        ]
        if self.kept:
            headers = ("kept", "", "as", "error without it", "worst in")
            rows = [
                (
                    k.kind,
                    k.name or "(all)",
                    name_of(k.precision).upper(),
                    *_cells(k.without),
                )
                for k in self.kept
            ]
            lines.append(text_table(headers, [("", rows)], right=(3,)))
        if self.not_judged:
            lines.append(f"not judged: {', '.join(self.not_judged)}")
        return "\n".join(lines)


class Tuned(NamedTuple):
    """What ``tune`` finds: rules, and the report of the search.

    Attributes:
      rules: the rules.
      report: how they were found, and the errors.
    """

    rules: Rules
    report: TuningReport


_SHOWN = 3
"""The number of names on one line."""


def _cells(error: Error) -> tuple[str, str]:
    return f"{error.largest:.2g}", error.worst


def _outcome(step: Step) -> str:
    if not step.is_tolerated:
        return "too large"  # Its halves are tried next.
    return "16 bits" if step.precision is Precision.LOW else name_of(step.precision)


def _names(names: Sequence[str]) -> str:
    """Returns some names as text; names that differ only in a number appear once."""
    alike = list(dict.fromkeys(map(without_numbers, names)))
    shown = names if len(names) <= _SHOWN else alike
    more = len(shown) - _SHOWN
    names = [name.replace(NUMBER, "*") for name in shown[:_SHOWN]]
    listed = ", ".join(name or "(no scope)" for name in names)
    return listed + (f" and {more} more" if more > 0 else "")


def _plain(value: object) -> object:
    """Returns a value with JSON types only."""
    if isinstance(value, Precision | NumberFormat):
        return name_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Error | Kept | Step):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
