"""Finds the matrix products that tolerate float8: the second half of the search.

The rules found name the scopes whose products are in float8, and change no other op
there. In a named scope, a product is in float8 even if only float32 ops read it; an op
rule leaves such a product in 16 bits. A scope with such a product is not named: its
other products are in float8 only if all products are.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from jmp_lite.autocasting.rules.rules import NORM_LAYERS, Rules, Scope
from jmp_lite.insight.tune.candidates import (
    Rule,
    is_in_float8,
    products_in_float8,
    rules_with,
)
from jmp_lite.insight.tune.measure import Error, Trials
from jmp_lite.insight.tune.report import Kept, Step
from jmp_lite.ops import FLOAT8_OPS, Precision


def without_float8(rules: Rules) -> Rules:
    """Returns rules without any request for float8."""
    return dataclasses.replace(
        rules,
        ops=tuple(one for one in rules.ops if one[1] is not Precision.FLOAT8),
        scopes=tuple(one for one in rules.scopes if one[1] is not Precision.FLOAT8),
    )


def has_float8(trials: Trials, rules: Rules) -> bool:
    """Whether rules run any product of a function in float8."""
    return rules.asks_for_float8 and any(map(is_in_float8, trials.rows(rules)))


class Float8Search:
    """The search for the products that tolerate float8.

    Args:
      trials: the measurements.
      start: rules that request float8.
      kept: the rules for float32. With them, and without float8, the error is
        tolerated.

    Attributes:
      steps: the steps so far.
    """

    def __init__(self, trials: Trials, start: Rules, kept: Sequence[Rule]) -> None:
        self.steps: list[Step] = []
        self._trials = trials
        self._start = start
        self._kept = kept
        rows = trials.rows(rules_with(start, kept))
        asked = Counter(row.scope for row in rows if is_in_float8(row))
        by_name = self._rules_with_scopes([("", Precision.FLOAT8)])
        named = Counter(
            row.scope
            for row in trials.rows(rules_with(by_name, kept))
            if is_in_float8(row)
        )
        others = [s for s in {**asked, **named} if asked[s] != named[s]]
        self._units = products_in_float8(rows, others)
        self._has_names = all(scope in self._units.costs for scope in asked)
        self._given: set[str] = set()

    def found(self) -> Rules:
        """Returns rules with most products in float8."""
        if not self._units.costs and self._has_names:
            return without_float8(self._start)  # The kept rules include all products.
        if self._is_tolerated(FLOAT8_OPS, self._start):
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
        """Returns the products that are not in float8, with the errors if they were."""
        left = [
            ("scope", pattern, self._rules({*self._given, *group}))
            for pattern, group in self._left_out().items()
        ]
        if not self._has_names:
            left += [("op", op, self._start) for op in FLOAT8_OPS]
        low = Precision.LOW
        return [Kept(kind, name, low, self._error(rules)) for kind, name, rules in left]

    def _left_out(self) -> dict[str, list[str]]:
        """Returns the scopes that are not in float8, by their patterns."""
        left = [scope for scope in self._units.costs if scope not in self._given]
        patterns = [rule.name for rule in self._units.rules(left)]
        return {pattern: self._units.matched(pattern) for pattern in patterns}

    def _gave(self, group: Sequence[str]) -> bool:
        """Puts the products of some scopes in float8 if the error is tolerated."""
        more = {*self._given, *group}
        if self._is_tolerated(group, self._rules(more)):
            self._given = more
            return True
        return False

    def _is_tolerated(self, group: Sequence[str], rules: Rules) -> bool:
        is_tolerated = self._is_enough(rules)
        step = Step(tuple(group), self._error(rules), is_tolerated, Precision.FLOAT8)
        self.steps.append(step)
        return is_tolerated

    def _is_enough(self, rules: Rules) -> bool:
        return self._trials.is_enough(rules_with(rules, self._kept))

    def _error(self, rules: Rules) -> Error:
        return self._trials.error(rules_with(rules, self._kept))

    def _rules(self, given: Collection[str]) -> Rules:
        """Returns rules with the products of these scopes in float8."""
        if self._has_names and len(given) == len(self._units.costs):
            return self._start
        rules = self._units.rules(given)
        return self._rules_with_scopes([(one.name, one.precision) for one in rules])

    def _rules_with_scopes(self, scopes: Sequence[Scope]) -> Rules:
        """Returns rules that request float8 in these scopes only.

        The scopes take the place of the first float8 scope, or follow the user's
        scopes.
        """
        before = 0
        for scope in self._start.scopes:
            if scope == NORM_LAYERS or scope[1] is Precision.FLOAT8:
                break
            before += 1
        rules = without_float8(self._start)
        placed = (*rules.scopes[:before], *scopes, *rules.scopes[before:])
        return dataclasses.replace(rules, scopes=placed)
