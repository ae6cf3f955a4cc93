"""What ``tune`` returns: rules, and how they were found.

A report is a value, and every error in it was measured. Its text and its JSON contain
its fields.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmp_lite.autocasting.explain.tables import text_table
from jmp_lite.autocasting.rules.precision import Precision
from jmp_lite.autocasting.rules.rules import Rules, fields_of
from jmp_lite.autocasting.tune.candidates import NUMBER, without_numbers
from jmp_lite.autocasting.tune.measure import Error, in_words


class Kept(NamedTuple):
    """Something that is kept in a wider precision than at the start.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      name: the scope's pattern, or the op.
      precision: of a rule that keeps it in float32, ``FULL``; or ``FULL_INSIDE``, where
        that is enough. ``LOW`` of products that are kept out of float8, in 16 bits: no
        rule names them, since the rules found name the products that are in float8.
      without: the error of the rules without this one; of ``LOW`` that of the rules in
        which these products are in float8 too. Where the op is ``LOW``, some products
        cannot be named by scopes: that is the error with all of them in float8.
    """

    kind: str
    name: str
    precision: Precision
    without: Error


class Step(NamedTuple):
    """Something that was tried: to lower ``lowered`` too.

    Attributes:
      lowered: the scopes or ops.
      error: of the rules in which they, and all that was lowered before, are low.
      is_tolerated: whether they stay low.
      precision: ``LOW``, from float32; or ``FLOAT8``, from 16 bits.
    """

    lowered: tuple[str, ...]
    error: Error
    is_tolerated: bool
    precision: Precision = Precision.LOW


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """How rules were found; ``print`` shows what they keep, ``table`` what was tried.

    Attributes:
      tolerance: the largest error that was allowed.
      error: of the rules found.
      error_before: of the rules that the search started from.
      kept: what the rules found keep in float32, or out of float8, besides, and what
        each one is for.
      steps: what was tried, in order.
      not_judged: results and gradients that float32 itself does not know: the last bit
        of the arguments changes them by more than a tenth.
    """

    tolerance: float
    error: Error
    error_before: Error
    kept: tuple[Kept, ...] = ()
    steps: tuple[Step, ...] = ()
    not_judged: tuple[str, ...] = ()

    def table(self) -> str:
        """Returns what was tried as text."""
        headers = ("lowered", "error", "worst in", "outcome")
        rows = [
            (_names(step.lowered), *_cells(step.error), _outcome(step))
            for step in self.steps
        ]
        return text_table(headers, [("", rows)], right=(1,))

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(_plain(fields), indent=2)

    def __str__(self) -> str:
        lines = [
            f"error {in_words(self.error)}, tolerance {self.tolerance:.2g}",
            f"before tuning: {in_words(self.error_before)}",
        ]
        if self.kept:
            headers = ("kept", "", "as", "error without it", "worst in")
            rows = [
                (k.kind, k.name or "(all)", k.precision.name, *_cells(k.without))
                for k in self.kept
            ]
            lines.append(text_table(headers, [("", rows)], right=(3,)))
        if self.not_judged:
            lines.append(f"not judged: {', '.join(self.not_judged)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TunedRules(Rules):
    """Rules that ``tune`` has found: a ``Rules``, equal to one that says the same.

    Attributes:
      report: how they were found.
    """

    report: TuningReport

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and fields_of(self) == fields_of(other)

    __hash__ = Rules.__hash__


_SHOWN = 3
"""How many names one line shows."""


def _cells(error: Error) -> tuple[str, str]:
    return f"{error.largest:.2g}", error.worst


def _outcome(step: Step) -> str:
    if not step.is_tolerated:
        return "too large"  # Its halves are tried next.
    return "float8" if step.precision is Precision.FLOAT8 else "16 bits"


def _names(names: Sequence[str]) -> str:
    """Returns some names; if they are many, those that differ in a number once."""
    alike = list(dict.fromkeys(map(without_numbers, names)))
    shown = names if len(names) <= _SHOWN else alike
    more = len(shown) - _SHOWN
    names = [name.replace(NUMBER, "*") for name in shown[:_SHOWN]]
    listed = ", ".join(name or "(no scope)" for name in names)
    return listed + (f" and {more} more" if more > 0 else "")


def _plain(value: Any) -> Any:
    """Returns a value as JSON knows it, named fields by their names."""
    if isinstance(value, Precision):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Error | Kept | Step):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
