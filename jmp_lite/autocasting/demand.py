"""Who reads each value: the one pass against the stream, before the walk along it.

The law of this file: a value is demanded in float32 where every one of its readers is
an op that runs in float32 anyway, or hands it on to the outside. One other reader, such
as a matrix product, and it is not.
"""

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.rules import EXACT, Precision, Rules

Atom = Any


class Readers(enum.IntFlag):
    """What kinds of readers a value has; a value that nobody reads has ``OUTPUT``."""

    NOBODY = 0
    FULL = 1
    OUTPUT = 2
    OTHER = 4

    @property
    def want_float32(self) -> bool:
        """Whether no reader would rather have the value in 16 bits."""
        return not self & Readers.OTHER


class Demands:
    """Finds the readers of every value in a jaxpr, and remembers them.

    Args:
      rules: the classes of ops. Scopes are not asked: an op inside one is judged by
        the table.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[Any, tuple[Any, Mapping[Atom, Readers]]] = {}

    def inside(self, jaxpr: Any, outside: Sequence[Readers]) -> Mapping[Atom, Readers]:
        """Returns the readers of each variable.

        Args:
          jaxpr: a jaxpr, closed or open.
          outside: the readers of each of its outputs.
        """
        key = (id(jaxpr), tuple(outside))
        if key not in self._known:
            # The jaxpr is kept with the answer, so that its id stays its own.
            self._known[key] = (jaxpr, self._find(compat.parts(jaxpr), outside))
        return self._known[key][1]

    def of_inputs(self, jaxpr: Any, outside: Sequence[Readers]) -> list[Readers]:
        """Returns the readers of each input of a jaxpr."""
        found = self.inside(jaxpr, outside)
        return [found[var] for var in compat.parts(jaxpr).invars]

    def _find(
        self, parts: compat.Parts, outside: Sequence[Readers]
    ) -> Mapping[Atom, Readers]:
        found: dict[Atom, Readers] = defaultdict(lambda: Readers.NOBODY)
        for atom, readers in zip(parts.outvars, outside, strict=True):
            if not compat.is_literal(atom):
                # A result that was not traced in float32 is no reader's float32.
                is_output = compat.is_float32(atom)
                found[atom] |= readers if is_output else Readers.OTHER
        for eqn in reversed(parts.eqns):
            results = [found[var] or Readers.OUTPUT for var in eqn.outvars]
            for atom, readers in zip(
                eqn.invars, self.as_reader(eqn, results), strict=True
            ):
                if not compat.is_literal(atom):
                    found[atom] |= readers
        return found

    def as_reader(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        """Returns what an equation is to each of its operands, as a reader."""
        op, params = eqn.primitive.name, eqn.params
        others = [Readers.OTHER] * len(eqn.invars)
        if op in ("jit", "checkpoint", "remat", "remat2"):
            return self.of_inputs(params["jaxpr"], results)
        if op == "custom_jvp_call":
            return self.of_inputs(params["call_jaxpr"], results)
        if op == "cond":
            branches = [self.of_inputs(b, results) for b in params["branches"]]
            joined = [_union(column) for column in zip(*branches, strict=True)]
            return [Readers.OTHER, *joined]
        if not any(map(compat.is_float32, eqn.outvars)):
            return others
        precision, wanted = self._rules.precision_of(op), _union(results)
        if precision is Precision.FULL:
            return [Readers.FULL] * len(eqn.invars)
        # An output equation is an output to what it reads; an exact op is nothing but
        # what reads its result.
        is_exact = op in EXACT or op == "convert_element_type"
        follows = precision in (Precision.FOLLOW, Precision.WIDEST)
        if is_exact or (follows and wanted == Readers.OUTPUT):
            return [wanted] * len(eqn.invars)
        return others


def _union(readers: Sequence[Readers]) -> Readers:
    union = Readers.NOBODY
    for one in readers:
        union |= one
    return union
