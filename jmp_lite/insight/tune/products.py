"""Finds the matrix products that tolerate a number format, after the float32 ops.

The rules found name the scopes whose products have the format, and change no other op
there. In a named scope, a product is in float8 even if only float32 ops read it; an op
rule leaves such a product in 16 bits. A scope with such a product is not named: its
other products are in float8 only if all products are.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jmp_lite.autocasting.rules.match import AnyPrecision, format_of, name_of
from jmp_lite.autocasting.rules.rules import (
    NORM_LAYERS,
    Rules,
    Scope,
    requested_formats,
)
from jmp_lite.insight.explain.rows import Row
from jmp_lite.insight.tune.candidates import Rule, rules_with, scopes_of_products
from jmp_lite.insight.tune.measure import Error, Trials
from jmp_lite.insight.tune.report import Kept, Step
from jmp_lite.ops import Precision


def without_formats(rules: Rules) -> Rules:
    """Returns rules without any request for a number format."""
    return dataclasses.replace(
        rules,
        ops=tuple(one for one in rules.ops if format_of(one[1]) is None),
        scopes=tuple(one for one in rules.scopes if format_of(one[1]) is None),
    )


def searched_format(trials: Trials, rules: Rules) -> AnyPrecision | None:
    """Returns the number format that rules request; None if no product has it.

    Raises:
      ValueError: the rules request several.
    """
    requested = list(requested_formats(rules).values())
    if len(requested) > 1:
        raise ValueError(
            "tune searches for the products of one number format at a time, and the "
            f"rules request {', '.join(map(name_of, requested))}. Leave all but one "
            "out of the rules."
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

    Attributes:
      steps: the steps so far.
    """

    def __init__(
        self,
        trials: Trials,
        start: Rules,
        kept: Sequence[Rule],
        precision: AnyPrecision,
    ) -> None:
        self.steps: list[Step] = []
        self._trials = trials
        self._start = start
        self._kept = kept
        self._precision = precision
        requested = format_of(precision)
        self._ops = requested.ops if requested else ()
        rows = self._products(start)
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
        if self._is_tolerated(self._ops, self._start):
            self._given, self._has_names = set(self._units.costs), True
            return self._start
        everything = self._units.ordered(self._units.costs)
        queue = [everything] if everything else []
        while queue:
            group = queue.pop()
            if not self._gave(group) and len(group) > 1:
                queue += reversed(self._units.parts(group))
        # A group may be tolerated now, although it was not before.
        for group in self._left_out().values():
            if self._is_enough(self._rules({*self._given, *group})):
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
        low = Precision.LOW
        return [Kept(kind, name, low, self._error(rules)) for kind, name, rules in left]

    def _left_out(self) -> dict[str, list[str]]:
        """Returns the scopes without the format, by their patterns."""
        left = [scope for scope in self._units.costs if scope not in self._given]
        patterns = [rule.name for rule in self._units.rules(left)]
        return {pattern: self._units.matched(pattern) for pattern in patterns}

    def _gave(self, group: Sequence[str]) -> bool:
        """Gives the products of some scopes the format if the error is tolerated."""
        more = {*self._given, *group}
        if self._is_tolerated(group, self._rules(more)):
            self._given = more
            return True
        return False

    def _is_tolerated(self, group: Sequence[str], rules: Rules) -> bool:
        is_tolerated = self._is_enough(rules)
        step = Step(tuple(group), self._error(rules), is_tolerated, self._precision)
        self.steps.append(step)
        return is_tolerated

    def _products(self, rules: Rules) -> list[Row]:
        """Returns the products that have the format under some rules."""
        rows = self._trials.rows(rules_with(rules, self._kept))
        return _products_in(self._precision, rows)

    def _is_enough(self, rules: Rules) -> bool:
        return self._trials.is_enough(rules_with(rules, self._kept))

    def _error(self, rules: Rules) -> Error:
        return self._trials.error(rules_with(rules, self._kept))

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
            if scope == NORM_LAYERS or format_of(scope[1]) is not None:
                break
            before += 1
        rules = without_formats(self._start)
        placed = (*rules.scopes[:before], *scopes, *rules.scopes[before:])
        return dataclasses.replace(rules, scopes=placed)
