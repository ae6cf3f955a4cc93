"""Handles the ``FULL_INSIDE`` scopes of one jaxpr.

Such a scope is float32 inside. Its result is low if a low value entered, unless all
readers outside of the scope run in float32 anyway.
"""

from collections.abc import Mapping, Sequence

from jmp_lite.autocasting.decide import leaving
from jmp_lite.autocasting.decide.facts import Readers, State, is_from_16_bits
from jmp_lite.autocasting.interpreter.conversion import Converter, Site
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.jaxprs import source, structure
from jmp_lite.jaxprs.dataflow import readers_of
from jmp_lite.jaxprs.types import Eqn, Var


class Regions:
    """Follows the values of one jaxpr into such scopes and out of them.

    Args:
      converter: converts the jaxprs inside.
      parts: the jaxpr.
      site: its site.
      readers: the readers of each of its values.
    """

    def __init__(
        self,
        converter: Converter,
        parts: structure.Parts,
        site: Site,
        readers: Mapping[Var, Readers],
    ) -> None:
        self._converter = converter
        self._parts = parts
        self._site = site
        self._readers = readers
        self._read_by: Mapping[Var, list[Eqn | None]] | None = None

    def enter(self, operands: Sequence[Value]) -> list[Value]:
        """Returns the operands of an op inside of the scope: float32."""
        return [
            Value(
                self._converter.casts.full(value),
                State.HARD,
                is_from_low=True,
                origin=value.origin,
            )
            if value.is_rejoined or is_from_16_bits(value.state, value.roots)
            else value
            for value in operands
        ]

    def leave(self, atom: Var, value: Value) -> Value:
        """Returns a value as it is outside of its scope."""
        readers = self._readers_outside(atom, value.region)
        state = leaving.state_after_scope(value.state, value.is_from_low, readers)
        if value.is_from_low and state is not value.state:
            return self._converter.casts.cast_to_state(value, state)
        return Value(value.array, state, value.kind, value.held, origin=value.origin)

    def _readers_outside(self, atom: Var, region: str | None) -> Readers:
        if self._read_by is None:
            self._read_by = readers_of(self._parts)
        found = Readers.NOBODY
        for eqn in self._read_by[atom]:
            if eqn is None:
                continue
            where = source.join(self._site.path, *source.scopes(eqn))
            if self._converter.lookup.region(where) == region:
                continue
            results = [self._readers[var] for var in eqn.outvars]
            of_operands = self._converter.uses.equation_facts(
                eqn, results, self._site.path
            )
            for other, readers in zip(eqn.invars, of_operands, strict=True):
                found |= readers if other is atom else Readers.NOBODY
        for other, readers in zip(self._parts.outvars, self._site.readers, strict=True):
            found |= readers if other is atom else Readers.NOBODY
        return found
