"""The ``FULL_INSIDE`` scopes of one jaxpr: what enters them, and what leaves.

The law of this file: inside, such a scope is float32. What leaves it is low if anything
low has entered, unless all that reads it outside is float32 anyway.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.demand import Readers
from jmp_lite.autocasting.values import State, Value

Walk = Any  # The interpreter's, which imports this file.


class Regions:
    """Follows the values of one jaxpr into such scopes and out of them.

    Args:
      walk: the walk along the jaxpr.
      parts: the jaxpr.
      inside: for each equation, the scope that it stands in, if it is in one.
      readers: the readers of each of its values.
      outside: the readers of its outputs.
    """

    def __init__(
        self,
        walk: Walk,
        parts: compat.Parts,
        inside: Sequence[str | None],
        readers: Mapping[Any, Readers],
        outside: Sequence[Readers],
    ) -> None:
        self._walk = walk
        self._parts = parts
        self._inside = inside
        self._readers = readers
        self._outside = outside
        self._uses: Mapping[Any, list[int]] | None = None

    def enter(self, operands: Sequence[Value]) -> list[Value]:
        """Returns what the operands of an op are inside: float32."""
        return [
            Value(
                self._walk.full(value),
                State.HARD,
                is_from_low=True,
                origin=value.origin,
            )
            if value.state is State.LOW
            else value
            for value in operands
        ]

    def leave(self, atom: Any, value: Value) -> Value:
        """Returns what a value is outside of its region."""
        array, state, kind = value.array, value.state, value.kind
        if self._readers_outside(atom, value.region).want_float32:
            return Value(array, state, kind, origin=value.origin)
        if value.is_from_low:
            return Value(self._walk.low(value), State.LOW, origin=value.origin)
        return Value(array, State.SOFT, kind, origin=value.origin)

    def _readers_outside(self, atom: Any, region: str | None) -> Readers:
        if self._uses is None:
            self._uses = _uses(self._parts)
        found = Readers.NOBODY
        for i in self._uses[atom]:
            eqn = self._parts.eqns[i]
            if self._inside[i] == region:
                continue
            results = [self._readers[var] or Readers.OUTPUT for var in eqn.outvars]
            as_reader = self._walk.demands.as_reader(eqn, results)
            for other, readers in zip(eqn.invars, as_reader, strict=True):
                found |= readers if other is atom else Readers.NOBODY
        for other, readers in zip(self._parts.outvars, self._outside, strict=True):
            found |= readers if other is atom else Readers.NOBODY
        return found


def _uses(parts: compat.Parts) -> Mapping[Any, list[int]]:
    """Returns which equations read each variable."""
    uses: Mapping[Any, list[int]] = defaultdict(list)
    for i, eqn in enumerate(parts.eqns):
        for atom in eqn.invars:
            if not compat.is_literal(atom):
                uses[atom].append(i)
    return uses
