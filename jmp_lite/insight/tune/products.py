"""Finds the matrix products that tolerate a number format, after the float32 ops.

The rules found name the scopes whose products have the format, and change no other op
there. In a named scope, a product is in float8 even if only float32 ops read it; an op
rule leaves such a product in 16 bits. A scope with such a product is not named: its
other products are in float8 only if all products are.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from jmp_lite.autocasting.rules.match import (
    AnyPrecision,
    format_of,
    in_json_or_name,
    name_of,
)
from jmp_lite.autocasting.rules.rules import (
    NORM_LAYERS,
    Rules,
    Scope,
    requested_formats,
)
from jmp_lite.insight.explain.rows import Row
from jmp_lite.insight.tune.candidates import Rule, scopes_of_products
from jmp_lite.insight.tune.report import Kept
from jmp_lite.insight.tune.trials import Trials
from jmp_lite.ops import Precision


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
    requested = list(filter(_is_searched, requested_formats(rules).values()))
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
            if scope == NORM_LAYERS or _is_searched(scope[1]):
                break
            before += 1
        rules = without_formats(self._start)
        placed = (*rules.scopes[:before], *scopes, *rules.scopes[before:])
        return dataclasses.replace(rules, scopes=placed)
