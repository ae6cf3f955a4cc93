"""The errors of rules on a sample, and the search among formats of products."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from jmp_lite.autocasting.rules.match import (
    AnyPrecision,
    format_of,
    in_json_or_name,
    name_of,
)
from jmp_lite.autocasting.rules.rules import (
    Rules,
    Scope,
    requested_formats,
)
from jmp_lite.insight.candidates import Rule, rules_with, scopes_of_products
from jmp_lite.insight.explanation import explain
from jmp_lite.insight.measured import (
    WAYS_TO_COMPILE,
    Error,
    Kept,
    Sample,
    Step,
    in_words,
)
from jmp_lite.insight.rows import Row
from jmp_lite.ops import Precision


class Trials:
    """The errors of rules on a sample, each measured once.

    Args:
      sample: the function and its arguments.
      tolerance: the largest tolerated error.
      progress: a function that receives a line at each new measurement, or None.

    Attributes:
      sample: the function and its arguments.
      tolerance: the largest tolerated error.
      steps: the steps so far.
    """

    def __init__(
        self,
        sample: Sample,
        tolerance: float,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.sample, self.tolerance = sample, tolerance
        self.steps: list[Step] = []
        self._progress = progress or (lambda _: None)
        self._errors: dict[Rules, Error] = {}
        self._most = 0
        self._growth: Mapping[tuple[str, str], float] | None = None

    def announce(self, n_more: int) -> None:
        """Reports how many trials may follow."""
        self._most = len(self._errors) + n_more
        self._progress(
            f"tune: at most {n_more} trials follow; each compiles and runs the "
            "function and its gradient"
        )

    def error(self, rules: Rules, kept: Iterable[Rule] = ()) -> Error:
        """Returns the error under some rules, with more rules for float32."""
        rules = rules_with(rules, kept)
        if rules not in self._errors:
            error = Error(0.0, 0.0, "")
            for options in WAYS_TO_COMPILE:
                error = error.joined(self.sample.error(rules, options))
                if error.largest > self.tolerance:
                    break
            self._errors[rules] = error
            most = f" of at most {self._most}" if self._most else ""
            n = len(self._errors)
            self._progress(f"tune: {n}{most} tried, error {in_words(error)}")
        return self._errors[rules]

    def is_enough(self, rules: Rules, kept: Iterable[Rule] = ()) -> bool:
        """Whether the error under some rules is tolerated."""
        return self.error(rules, kept).largest <= self.tolerance

    def lowers(
        self,
        group: Sequence[str],
        rules: Rules,
        kept: Sequence[Rule],
        precision: AnyPrecision = Precision.LOW,
    ) -> bool:
        """Notes a step that lowers some units; returns whether it is tolerated."""
        error, is_tolerated = self.error(rules, kept), self.is_enough(rules, kept)
        self.steps.append(Step(tuple(group), error, is_tolerated, precision))
        return is_tolerated

    def growth(self, rules: Rules) -> Mapping[tuple[str, str], float]:
        """Returns the growth of errors under some rules, by scope and op.

        The scope of a recomputed op is that of its first computation.
        """
        if self._growth is None:
            found: dict[tuple[str, str], float] = {}
            for row in self.sample.comparison(rules).rows:
                key = row.scope.replace(_AGAIN, ""), row.op
                found[key] = max(row.error_out - row.error_in, found.get(key, 0.0))
            self._growth = found
        return self._growth

    def rows(self, rules: Rules, kept: Iterable[Rule] = ()) -> Sequence[Row]:
        """Returns how each equation runs under some rules."""
        explained = explain(self.sample.fun, rules_with(rules, kept))
        return explained(*self.sample.args, **self.sample.kwargs).rows


_AGAIN = "rematted_computation/"


def without_formats(rules: Rules) -> Rules:
    """Returns rules without any request for a number format of fewer digits."""
    return dataclasses.replace(
        rules,
        ops=tuple(one for one in rules.ops if not _is_searched(one[1])),
        scopes=tuple(one for one in rules.scopes if not _is_searched(one[1])),
    )


def _is_searched(precision: AnyPrecision) -> bool:
    found = format_of(precision)
    return found is not None and found.has_fewer_digits


def searched_format(trials: Trials, rules: Rules) -> AnyPrecision | None:
    """Returns the number format that rules request; None if no product has it.

    Raises:
      ValueError: the rules request several.
    """
    requested = list(filter(_is_searched, requested_formats(rules)))
    if len(requested) > 1:
        names = ", ".join(str(in_json_or_name(one)) for one in requested)
        raise ValueError(
            "tune searches for the products of one number format at a time, and the "
            f"rules request {names}. Leave all but one out of the rules."
        )
    rows = trials.rows(rules) if requested else ()
    return next((one for one in requested if any(_products_in(one, rows))), None)


def _products_in(precision: AnyPrecision, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.number_format == name_of(precision)]


class ProductSearch:
    """The search for the products that tolerate a number format.

    Args:
      trials: the measurements.
      start: rules that request the format.
      kept: the rules for float32. With them, and without the format, the error is
        tolerated.
      precision: the format.
    """

    def __init__(
        self,
        trials: Trials,
        start: Rules,
        kept: Sequence[Rule],
        precision: AnyPrecision,
    ) -> None:
        self._trials = trials
        self._start = start
        self._kept = kept
        self._precision = precision
        rows = self._products(start)
        self._ops = sorted({row.op for row in rows})
        asked = Counter(row.scope for row in rows)
        by_name = self._rules_with_scopes([("", precision)])
        named = Counter(row.scope for row in self._products(by_name))
        others = [s for s in {**asked, **named} if asked[s] != named[s]]
        self._units = scopes_of_products(rows, precision, others)
        self._has_names = all(scope in self._units.costs for scope in asked)
        self._given: set[str] = set()

    def found(self) -> Rules:
        """Returns rules with most products in the format."""
        if not self._units.costs and self._has_names:
            return without_formats(self._start)  # The kept rules include all products.
        if self._lowers(self._ops, self._start):
            self._given, self._has_names = set(self._units.costs), True
            return self._start
        if self._units.costs:
            self._units.lower(list(self._units.costs), self._gave)
        # A group may be tolerated now, although it was not before.
        for group in self._left_out().values():
            rules = self._rules({*self._given, *group})
            if self._trials.is_enough(rules, self._kept):
                self._gave(group)
        return self._rules(self._given)

    def left_out(self) -> list[Kept]:
        """Returns the products without the format, with the errors if they had it."""
        left = [
            ("scope", pattern, self._rules({*self._given, *group}))
            for pattern, group in self._left_out().items()
        ]
        if not self._has_names:
            left += [("op", op, self._start) for op in self._ops]
        return [
            Kept(kind, name, Precision.LOW, self._trials.error(rules, self._kept))
            for kind, name, rules in left
        ]

    def _left_out(self) -> dict[str, list[str]]:
        """Returns the scopes without the format, by their patterns."""
        left = [scope for scope in self._units.costs if scope not in self._given]
        patterns = [rule.name for rule in self._units.rules(left)]
        return {pattern: self._units.matched(pattern) for pattern in patterns}

    def _gave(self, group: Sequence[str]) -> bool:
        """Gives the products of some scopes the format if the error is tolerated."""
        more = {*self._given, *group}
        is_tolerated = self._lowers(group, self._rules(more))
        if is_tolerated:
            self._given = more
        return is_tolerated

    def _lowers(self, group: Sequence[str], rules: Rules) -> bool:
        return self._trials.lowers(group, rules, self._kept, self._precision)

    def _products(self, rules: Rules) -> list[Row]:
        """Returns the products that have the format under some rules."""
        return _products_in(self._precision, self._trials.rows(rules, self._kept))

    def _rules(self, given: Collection[str]) -> Rules:
        """Returns rules that give the products of these scopes the format."""
        if self._has_names and len(given) == len(self._units.costs):
            return self._start
        rules = self._units.rules(given)
        return self._rules_with_scopes([(one.name, one.precision) for one in rules])

    def _rules_with_scopes(self, scopes: Sequence[Scope]) -> Rules:
        """Returns rules that request the format in these scopes only.

        The scopes take the place of the first scope that does, or follow the user's
        scopes.
        """
        before = 0
        for scope in self._start.scopes:
            if _is_searched(scope[1]):
                break
            before += 1
        rules = without_formats(self._start)
        placed = (*rules.scopes[:before], *scopes, *rules.scopes[before:])
        return dataclasses.replace(rules, scopes=placed)
