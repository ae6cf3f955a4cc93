"""The units that rules can name: ops, blocks, kinds of layers, scopes of products.

This module knows names and costs, and measures nothing. A rule matches only the units
that it was made for.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jmp_lite.autocasting.rules.match import (
    AS_WRITTEN_SCOPE,
    LOW_SCOPE,
    AnyPrecision,
    format_of,
)
from jmp_lite.autocasting.rules.rules import Rules, fields_of
from jmp_lite.insight.rows import Row, is_low, times_or_once
from jmp_lite.ops import EDITABLE, EXACT, Precision, record_of

NUMBER = "\0"
"""The placeholder for a number in a name; no name contains it."""


class Rule(NamedTuple):
    """A rule that keeps a unit in float32, or gives its products a number format.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      name: the pattern of the scope, or the op.
      precision: ``FULL`` or a number format such as ``float8``.
    """

    kind: str
    name: str
    precision: AnyPrecision


class Units(NamedTuple):
    """The scopes or ops that rules can name.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      precision: the precision of their rules.
      costs: the operations and bytes of each unit, in the order of execution.
      kind_of: returns the groups of a unit, from the largest on.
      others: more scopes, which a pattern must not match.
    """

    kind: str
    precision: AnyPrecision
    costs: Mapping[str, tuple[int, int]]
    kind_of: Callable[[str], Sequence[str]]
    others: tuple[str, ...] = ()

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Returns units in the order of execution."""
        selected = set(names)
        return [name for name in self.costs if name in selected]

    def by_growth(self, growth: Mapping[tuple[str, str], float]) -> list[str]:
        """Returns the units, those in which an error grows most first.

        Args:
          growth: the growth of errors, by scope and op.
        """
        index = 0 if self.kind == "scope" else 1
        largest: dict[str, float] = {}
        for key, by in growth.items():
            largest[key[index]] = max(by, largest.get(key[index], 0.0))
        return sorted(self.costs, key=lambda name: -largest.get(name, 0.0))

    def parts(self, group: Sequence[str]) -> list[list[str]]:
        """Returns the halves of a group, the more expensive one first."""
        kinds = {name: tuple(self.kind_of(name)) for name in group}
        shared = _shared(kinds.values())
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, kind in kinds.items():
            alike.setdefault(kind[: shared + 1], []).append(name)
        parts = [[name] for name in group] if len(alike) == 1 else alike.values()
        dearest = sorted(parts, key=self._cost, reverse=True)
        middle = len(dearest) // 2
        halves = dearest[:middle], dearest[middle:]
        return [[name for part in half for name in part] for half in halves]

    def lower(
        self, group: Sequence[str], lowers: Callable[[Sequence[str]], bool]
    ) -> None:
        """Lowers a group of units, or else each half of it in turn.

        Args:
          group: the units.
          lowers: lowers some units, and returns whether that is tolerated.
        """
        if not lowers(group) and len(group) > 1:
            for part in self.parts(group):
                self.lower(part, lowers)

    def rules(self, kept: Iterable[str]) -> list[Rule]:
        """Returns rules that name these units and no others."""
        kept = set(kept)
        if self.kind == "op":
            named = self.ordered(kept)
        else:
            by_place = self._patterns(list(self.costs), kept)
            named = min(by_place, self._patterns_of_kinds(kept), key=len)
        return [Rule(self.kind, name, self.precision) for name in named]

    def matched(self, pattern: str) -> list[str]:
        """Returns the scopes that a pattern matches, ``others`` included."""
        return [n for n in (*self.costs, *self.others) if re.search(pattern, n)]

    def _patterns_of_kinds(self, kept: set[str]) -> list[str]:
        """Returns one pattern for each group of scopes that differ only in numbers.

        Scopes have patterns of their own if their group is not kept as a whole. If most
        of a group have a number format, the pattern names its exceptions instead.
        """
        kinds = dict.fromkeys(map(without_numbers, self.ordered(kept)))
        patterns: list[str] = []
        for kind in kinds:
            inside = re.escape(kind).replace(NUMBER, r"\d+")
            pattern = f"^{inside}(/|$)"
            own = [name for name in self.ordered(kept) if without_numbers(name) == kind]
            one_by_one = [f"^{re.escape(name)}$" for name in own]
            left_out = [name for name in self.matched(pattern) if name not in kept]
            if left_out and format_of(self.precision) is not None:
                names = "|".join(f"{re.escape(name)}$" for name in left_out)
                pattern = f"^(?!{names}){inside}(/|$)"
                is_short = len(left_out) < len(own)
            else:
                is_short = not left_out
            patterns += [pattern] if is_short else one_by_one
        return patterns

    def _patterns(self, group: Sequence[str], kept: set[str]) -> list[str]:
        if not kept.intersection(group):
            return []
        if len(group) == 1:
            return [f"^{re.escape(group[0])}$"]
        if kept.issuperset(group):
            kinds = [tuple(self.kind_of(name)) for name in group]
            shared = kinds[0][: _shared(kinds)]
            inside = re.escape("/".join(shared)).replace(NUMBER, r"\d+")
            pattern = f"^{inside}(/|$)" if shared else ""
            if kept.issuperset(self.matched(pattern)):
                return [pattern]
        return [p for part in self.parts(group) for p in self._patterns(part, kept)]

    def _cost(self, group: Sequence[str]) -> tuple[int, int]:
        costs = [self.costs[name] for name in group]
        return sum(flops for flops, _ in costs), sum(size for _, size in costs)


def ways_to_keep(rows: Iterable[Row], rules: Rules) -> list[Units]:
    """Returns the units that rules can keep in float32, in several ways.

    Args:
      rows: the rows of a function under the rules.
      rules: the rules.
    """
    marked = {LOW_SCOPE, AS_WRITTEN_SCOPE}  # A mark is stronger than a rule.
    rows = [r for r in rows if is_low(r) and marked.isdisjoint(r.scope.split("/"))]
    rounding = [
        row
        for row in rows
        if row.op in EDITABLE
        and not (row.op in EXACT and not rules.precision_of(row.op).lowers)
    ]
    ops, scopes = _costs(rounding, "op"), _costs(rows, "scope")
    return [
        Units("op", Precision.FULL, ops, _kind_of_op),
        # Single blocks, and kinds of layers.
        Units("scope", Precision.FULL, scopes, lambda path: path.split("/")),
        Units("scope", Precision.FULL, scopes, _kind_of_scope),
    ]


def scopes_of_products(
    rows: Iterable[Row], precision: AnyPrecision, others: Iterable[str]
) -> Units:
    """Returns the scopes of products, for rules that give them a number format.

    Args:
      rows: the products.
      precision: the number format.
      others: scopes of products that rules must not name.
    """
    others = tuple(others)
    costs = _costs((row for row in rows if row.scope not in others), "scope")
    return Units("scope", precision, costs, _kind_of_scope, others)


def rules_with(rules: Rules, kept: Iterable[Rule]) -> Rules:
    """Returns rules with more rules for float32."""
    kept = list(kept)
    scopes = tuple((r.name, r.precision) for r in kept if r.kind == "scope")
    ops = [rule.name for rule in kept if rule.kind == "op"]
    plain = Rules(**fields_of(rules)).full(*ops)
    return dataclasses.replace(plain, scopes=(*scopes, *plain.scopes))


def without_formats(rules: Rules) -> Rules:
    """Returns rules without any request for a number format of fewer digits."""
    return dataclasses.replace(
        rules,
        ops=tuple(one for one in rules.ops if not is_searched(one[1])),
        scopes=tuple(one for one in rules.scopes if not is_searched(one[1])),
    )


def is_searched(precision: AnyPrecision) -> bool:
    """Whether a precision is a number format of fewer digits, which tune searches."""
    found = format_of(precision)
    return found is not None and found.has_fewer_digits


def without_numbers(name: str) -> str:
    """Returns a name with its numbers replaced by a placeholder."""
    return re.sub(r"\d+", NUMBER, name)


def _costs(rows: Iterable[Row], kind: str) -> Mapping[str, tuple[int, int]]:
    """Returns the operations and bytes of rows, summed by their scope or op."""
    costs: dict[str, tuple[int, int]] = {}
    for row in rows:
        name, times = getattr(row, kind), times_or_once(row.times)
        flops, size = costs.get(name, (0, 0))
        costs[name] = flops + times * row.flops, size + times * row.bytes_traced
    return costs


def _kind_of_op(op: str) -> Sequence[str]:
    known = record_of(op)
    return (known.group if known else "", op)


def _kind_of_scope(path: str) -> Sequence[str]:
    """Returns the names in a path, without numbers."""
    return without_numbers(path).split("/")


def _shared(kinds: Iterable[Sequence[str]]) -> int:
    """Returns the number of leading names that all kinds share."""
    columns = zip(*kinds, strict=False)
    same = [len(set(column)) == 1 for column in columns]
    return same.index(False) if False in same else len(same)
