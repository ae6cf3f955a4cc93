"""Finds the readers of each value, in one backward pass.

A value is demanded in float32 if all its readers demand it. Such readers are ops that
run in float32, comparisons, outputs, and ops that follow whose own results are demanded
in float32. One other reader, such as a matrix product, removes the demand.

An op that amplifies a rounding error of its operand, such as a logarithm, demands
float32 by itself. It demands it also of the ops on the way to it that follow, such as
``1 - g`` and ``g`` in ``log(1 - g)``, up to a product or a sum.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jmp_lite.autocasting.decide.ancestry import Ancestry
from jmp_lite.autocasting.decide.contents import ContentAnalysis
from jmp_lite.autocasting.decide.decisions import Reason, Run
from jmp_lite.autocasting.decide.equation import decide_to_keep, follows
from jmp_lite.autocasting.decide.facts import Mark, Readers
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.loops import CarryDecision, Slot, classify
from jmp_lite.autocasting.decide.special_ops import decide_product
from jmp_lite.autocasting.rules.match import RuleMatch
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import Backward, equations
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var
from jmp_lite.ops import (
    ADDING,
    AMPLIFYING,
    AMPLIFYING_DIVISORS,
    COMPARING,
    DISCERNING,
    KEEPING_DIGITS,
    MOVING,
    ORDERING,
    PICKING,
    POSITIONAL,
    SATURATING,
    SENDING,
    SOLVING,
    Precision,
)


class UseAnalysis(Backward[Readers]):
    """Finds the readers of every value in a jaxpr, and remembers them.

    Args:
      rules: the rules, by path.
    """

    def __init__(self, rules: RuleLookup) -> None:
        self._rules = rules
        self._known: dict[object, Mapping[Var, Readers]] = {}
        self._carries: dict[object, list[CarryDecision]] = {}
        self._analyses = Ancestry(rules.marks), ContentAnalysis(rules.marks)
        self._sends: dict[Jaxpr, bool] = {}

    def variables(
        self, jaxpr: Jaxpr, outputs: Sequence[Readers], path: str = ""
    ) -> Mapping[Var, Readers]:
        """Returns the readers of each variable, found once for equal paths."""
        for analysis in self._analyses:
            analysis.read(jaxpr, path)
        outputs = self.readers_of_outputs(jaxpr, outputs)
        key = jaxpr, tuple(outputs), self._rules.rules_inside(jaxpr, path)
        if key not in self._known:
            self._known[key] = super().variables(jaxpr, outputs, path)
        return self._known[key]

    def readers_of_outputs(
        self, jaxpr: Jaxpr, readers: Sequence[Readers]
    ) -> list[Readers]:
        """Returns the readers of a jaxpr's outputs, as far as they decide inside.

        An output that was not traced in float32 does not demand float32. What reads it
        after which moves matters only where something is sent.
        """
        if jaxpr not in self._sends:
            ops = (params.op_of(eqn) for eqn, _ in equations(jaxpr))
            self._sends[jaxpr] = any(op in SENDING for op in ops)
        # Else two calls of a block that differ in it would have two plans.
        always = Readers.NOBODY if self._sends[jaxpr] else Readers.EARLIER
        return [
            (each | always if structure.is_float32(atom) else _LOW).deciding
            for atom, each in zip(structure.parts(jaxpr).outvars, readers, strict=True)
        ]

    def nothing(self) -> Readers:
        """An unread value has no readers."""
        return Readers.NOBODY

    def join(self, one: Readers, other: Readers) -> Readers:
        """Returns both kinds of readers."""
        return one | other

    def predicate_fact(self) -> Readers:
        """A predicate does not demand float32."""
        return _LOW

    def equation_facts(
        self, eqn: Eqn, results: Sequence[Readers], path: str
    ) -> Sequence[Readers]:
        """Returns the kind of reader that an equation is for each of its operands.

        Args:
          eqn: an equation of a jaxpr.
          results: the readers of its results.
          path: the path of the jaxpr.
        """
        if params.op_of(eqn) == "while":
            inside = source.path_of(eqn, path)
            # A loop to a tolerance runs as traced: what enters it must not be rounded.
            if decide_to_keep(self._rules, eqn, inside):
                return [Readers.FULL] * len(eqn.invars)
        return super().equation_facts(eqn, readers_of_results(eqn, results), path)

    def transfer(
        self, eqn: Eqn, facts: Sequence[Readers], path: str
    ) -> Sequence[Readers]:
        """Returns the kind of reader that an op is for each of its operands."""
        op, readers = (
            self._rules.op_decided_as(eqn, path),
            readers_of_floats(eqn, facts),
        )
        kind = self._reader(eqn, op, readers, path)
        marks = self._rules.mark(eqn)
        # ``one_hot(ids) @ all_gather(table)`` may read the table in float32.
        if _changes_if_rounded(op, kind, readers) or marks & _BINARY:
            kind |= Readers.EARLIER
        # In a product of 2,048 factors ``1 + 0.01 * h`` the sums with 1 end no demand.
        if Mark.NUMBER not in marks:
            kind &= ~_ended_by(eqn, op)
        if _demands(self._rules.match(op, path)):
            for mark in _OF_MARKS.keys() & marks:
                kind |= _OF_MARKS[mark]
            # ``gelu(h - 4)`` has a small slope, which 16 bits of the sum change.
            kind |= Readers.SHIFTER if op in SATURATING else Readers.NOBODY
        found = [kind] * len(eqn.invars)
        for i in self._amplified(eqn, op, path):
            found[i] |= Readers.AMPLIFIER
        return found

    def _amplified(self, eqn: Eqn, op: str, path: str) -> Sequence[int]:
        """Returns the operands whose rounding errors an op amplifies."""
        # Places in a table: ``(8 * gate).astype(int)`` beside a product of the gate.
        if op == "convert_element_type" and structure.is_integer(eqn.outvars[0]):
            return [0]
        # 16 bits make ties of neighbours, in ``maximum(h, roll(h))`` or ``sort(h)``:
        # the gradient is that of another choice.
        if _orders(eqn, op) and _demands(self._rules.match(op, path)):
            return range(len(eqn.invars))
        if op not in AMPLIFYING or not _demands(self._rules.match(op, path)):
            return []
        # ``a / b`` has the relative error of ``a``; that of a small ``b`` is
        # multiplied.
        return range(op in AMPLIFYING_DIVISORS, len(eqn.invars))

    def _reader(self, eqn: Eqn, op: str, readers: Readers, path: str) -> Readers:
        match = self._rules.match(op, path)
        # A Cholesky factorization of a 16-bit Gram matrix is NaN.
        if op in SOLVING:
            return Readers.DIGITS
        if op == "convert_element_type" and structure.is_integer(eqn.outvars[0]):
            return Readers.DIGITS
        # A sort of several arrays compares the first and moves the others.
        discerns = op in DISCERNING or (op == "sort" and len(eqn.invars) > 1)
        if discerns and _demands(match):
            return Readers.FULL
        if not any(map(structure.is_float32, eqn.outvars)):
            # A Fourier transform, or a cast to complex numbers or to float64.
            is_wide = any(map(structure.is_wide_float, eqn.outvars))
            return Readers.FULL if is_wide else Readers.OTHER
        if op in PRODUCTS and match.precision.lowers:
            # Chains of cameras: ``floor(b @ (a @ x))`` wants float32 of both products.
            decided = decide_product(self._rules, eqn, (), readers, path)
            if decided is None or decided.run is not Run.FULL:
                return Readers.OTHER
            return _OF_PRODUCTS.get(decided.reason, Readers.FULL)
        is_full = match.precision is Precision.FULL
        if op in POSITIONAL and _demands(match):
            # The sine in a hidden layer of a SIREN is read by a product, so 16 bits
            # will do.
            is_demanded = is_full or readers.demand_float32
            return Readers.PHASE if is_demanded else Readers.LOW_PHASE
        if op not in KEEPING_DIGITS or readers & Readers.OTHER:
            # A phase keeps its digits, whatever else reads the value: in the activation
            # snake, ``h + sin(20 * h) ** 2 / 20``, the stream does.
            phases = readers & _PHASES if op in KEEPING_DIGITS else Readers.NOBODY
            readers = readers.generalized | phases
        if is_full:
            return readers.full_reader
        follows_readers = follows(match) or op == "convert_element_type"
        return readers if follows_readers else Readers.OTHER

    def loop_facts(
        self, eqn: Eqn, loop: params.Loop, results: Sequence[Readers], path: str
    ) -> Sequence[Readers]:
        """Returns the readers of a loop's operands; a carry's depend on its slot."""
        carries = self.carries(eqn, results[: loop.n_carry], path)
        outputs = [*readers_of_carries(carries), *results[loop.n_carry :]]
        readers = self.inputs(loop.body, outputs, path)
        for i, (slot, _) in enumerate(carries, loop.n_consts):
            # The start of a float32 carry is float32, too: it is a part of the sum.
            readers[i] = Readers.FULL if slot is Slot.FULL else _LOW
        return readers

    def carries(
        self, eqn: Eqn, results: Sequence[Readers], path: str
    ) -> list[CarryDecision]:
        """Returns the slot of each carry of a loop, with the reason, found once.

        Args:
          eqn: the loop.
          results: the readers of the last values of its carries.
          path: its path.
        """
        # By anything but outputs and float32 ops.
        is_read = [not readers.demand_float32 for readers in results]
        key = eqn, tuple(is_read), path
        if key not in self._carries:
            found = classify(self._rules, params.loop_of(eqn), is_read, path)
            self._carries[key] = found
        return self._carries[key]


def _changes_if_rounded(op: str, kind: Readers, readers: Readers) -> bool:
    """Whether the result of an op changes if an operand is rounded before the op.

    Args:
      op: the name of the op.
      kind: the kind of reader that it is.
      readers: the readers of its results.
    """
    if op in MOVING:
        return bool(readers & Readers.EARLIER)
    # A product that a sine reads is float32 if its operands are given.
    may_be_full = kind != Readers.OTHER or readers & _PHASES
    return op not in PRODUCTS or bool(may_be_full)


_LOW = Readers.OTHER | Readers.EARLIER
_BINARY = Mark.BINARY_LEFT | Mark.BINARY_RIGHT
_PHASES = Readers.PHASE | Readers.LOW_PHASE


def _orders(eqn: Eqn, op: str) -> bool:
    """Whether the result of an op depends on which of two computed numbers is larger.

    A comparison with a number of the program, as in a relu, is no such op.
    """
    orders = op in ORDERING or op in COMPARING or op in PICKING
    # Rounding changes no sign, which a relu asks for.
    return orders and not any(map(structure.is_literal, eqn.invars))


def _ended_by(eqn: Eqn, op: str) -> Readers:
    """Returns the demands that an op ends: it adds two arrays, or sends one.

    The sum of a branch and a stream, of one shape, ends more than that of a bias.
    """
    shifts = Readers.SHIFTER | Readers.COMPLEMENT
    # A norm behind a collective would double the bytes that are sent.
    if op in SENDING:
        return shifts
    if op not in ADDING:
        return Readers.NOBODY
    # ``h + f(h)`` ends the demand of a norm: in float32, the stream of each residual
    # network would move more bytes. A bias does not end it.
    is_stream = len({atom.aval.shape for atom in eqn.invars}) == 1
    return Readers.FACTOR | shifts if is_stream else Readers.FACTOR


_OF_MARKS: Mapping[Mark, Readers] = MappingProxyType(
    {
        Mark.DIFFERENCE: Readers.AMPLIFIER,
        Mark.FACTOR: Readers.FACTOR,
        Mark.NUMBER: Readers.COMPLEMENT,
        Mark.SHIFT: Readers.COMPLEMENT,
    }
)


_OF_PRODUCTS: Mapping[Reason, Readers] = MappingProxyType(
    {
        # A product that is float32 for its digits needs those of its operands, and so
        # on: the last of two cameras, and the first.
        Reason.DIGITS: Readers.DIGITS,
        # It is float32 only for given operands. Here they are not known.
        Reason.PHASE: Readers.OTHER,
        Reason.LOOKUP: Readers.OTHER,
    }
)


def _demands(match: RuleMatch) -> bool:
    """Whether an op that needs the digits of its operands demands float32 of them."""
    is_full = match.precision is Precision.FULL
    return is_full or (follows(match) and not match.is_explicit)


def readers_of_results(eqn: Eqn, readers: Sequence[Readers]) -> list[Readers]:
    """Returns the readers of an equation's results, of which some may be unread.

    An unread value counts as returned. The last value of a carry does not: in a stack
    of layers with two streams, whose results are those of one stream, the other stream
    is no result that would have to be float32.
    """
    n_carry = params.loop_of(eqn).n_carry if params.op_of(eqn) == "scan" else 0
    return [
        kinds or (Readers.OTHER if i < n_carry else Readers.OUTPUT)
        for i, kinds in enumerate(readers)
    ]


def readers_of_carries(carries: Sequence[CarryDecision]) -> list[Readers]:
    """Returns the readers of the value that a loop's body returns for each carry.

    A carry that is float32 from step to step counts as an output of each step.
    """
    is_full = [slot is Slot.FULL for slot, _ in carries]
    return [Readers.OUTPUT if yes else Readers.OTHER for yes in is_full]


def readers_of_floats(eqn: Eqn, readers: Sequence[Readers]) -> Readers:
    """Returns all kinds of readers of the float32 results of an equation."""
    pairs = zip(readers, eqn.outvars, strict=True)
    found = [kinds for kinds, var in pairs if structure.is_float32(var)]
    return functools.reduce(operator.or_, found) if found else Readers.NOBODY
