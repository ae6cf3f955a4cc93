"""Who reads each value: the one pass against the stream, before the walk along it.

The law of this file: a value is demanded in float32 where every one of its readers is
an op that runs in float32 anyway, or hands it on to the outside. One other reader, such
as a matrix product, and it is not.
"""

import enum
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmp_lite.autocasting import compat, loops
from jmp_lite.autocasting.rules import ADDING, EXACT, Precision, Rules

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
        self._inside: dict[str, AsReader] = {
            **dict.fromkeys(compat.CALLED, self._call),
            "shard_map": self._shard_map,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
        }

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
        op, others = compat.op_of(eqn), [Readers.OTHER] * len(eqn.invars)
        if op in self._inside:
            return self._inside[op](eqn, results)
        if not any(map(compat.is_float32, eqn.outvars)):
            return others
        precision, wanted = self._rules.precision_of(op), union(results)
        if precision is Precision.FULL:
            return [Readers.FULL] * len(eqn.invars)
        # An output equation is an output to what it reads; an exact op is nothing but
        # what reads its result; and so is a sum that float32 alone reads.
        is_exact = op in EXACT or op == "convert_element_type"
        follows = precision in (Precision.FOLLOW, Precision.WIDEST)
        is_summed = op in ADDING and wanted.want_float32
        if is_exact or (follows and (is_summed or wanted == Readers.OUTPUT)):
            return [wanted] * len(eqn.invars)
        return others

    def _call(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        return self.of_inputs(compat.called(eqn), results)

    def _shard_map(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        return self.of_inputs(eqn.params["jaxpr"], results)

    def _cond(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        branches = [self.of_inputs(b, results) for b in eqn.params["branches"]]
        joined = [union(column) for column in zip(*branches, strict=True)]
        return [Readers.OTHER, *joined]

    def _scan(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        return self._of_loop(loops.Loop.of_scan(eqn), results)

    def _while(self, eqn: Any, results: Sequence[Readers]) -> Sequence[Readers]:
        cond, n_cond = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
        if loops.is_kept(self._rules, eqn, ""):
            return [Readers.FULL] * len(eqn.invars)
        of_cond = self.of_inputs(cond, [Readers.OTHER])[:n_cond]
        return [*of_cond, *self._of_loop(loops.Loop.of_while(eqn), results)]

    def _of_loop(
        self, loop: loops.Loop, results: Sequence[Readers]
    ) -> Sequence[Readers]:
        n_carry = len(loop.carries)
        is_read = are_read(results[:n_carry])
        carries = loops.classify(self._rules, self._by_table, loop, is_read, "")
        readers = self.of_inputs(loop.body, [*of_carries(carries), *results[n_carry:]])
        for i, (slot, _) in zip(loop.carries, carries, strict=True):
            readers[i] = Readers.FULL if slot is loops.Slot.FULL else Readers.OTHER
        return readers

    def _by_table(self, eqn: Any, path: str) -> Precision:
        del path
        return self._rules.precision_of(compat.op_of(eqn))


AsReader = Callable[[Any, Sequence[Readers]], Sequence[Readers]]


def are_read(wanted: Sequence[Readers]) -> list[bool]:
    """Returns, for each value, whether more than outputs and float32 ops read it."""
    return [not readers.want_float32 for readers in wanted]


def of_carries(carries: Sequence[loops.Carry]) -> list[Readers]:
    """Returns the readers of what the body of a loop makes of each carry.

    What is float32 from step to step is a result, step by step.
    """
    is_full = [slot is loops.Slot.FULL for slot, _ in carries]
    return [Readers.OUTPUT if yes else Readers.OTHER for yes in is_full]


def union(readers: Sequence[Readers]) -> Readers:
    """Returns all kinds of readers that some values have."""
    return functools.reduce(operator.or_, readers, Readers.NOBODY)
