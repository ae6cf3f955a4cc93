"""Turns the decisions of a plan into rows, with the reason of each in words.

A row describes one equation. Lints judge it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.arguments import is_narrow
from jmp_lite.autocasting.decide.decisions import Decision, Plan, Reason, Run, Step
from jmp_lite.autocasting.decide.facts import (
    Argument,
    Constant,
    Facts,
    NumberOrigin,
    Origin,
    RangeEnd,
    State,
    is_equation,
    origin_outside,
)
from jmp_lite.autocasting.decide.special_ops import has_raised_precision
from jmp_lite.autocasting.rules.match import (
    AS_WRITTEN_SCOPE,
    AUTOCAST_SCOPE,
    FULL_SCOPE,
    LOW_SCOPE,
    RuleMatch,
    RuleSource,
    name_of,
)
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.formats.number_format import LOW
from jmp_lite.formats.table import options_of
from jmp_lite.insight.tables import TOP, Place, short
from jmp_lite.jaxprs import bilinear, params, products, source, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype, Eqn, Jaxpr, Var
from jmp_lite.ops import HIGHER_ORDER, OPS


class Row(NamedTuple):
    """One equation of a function.

    Attributes:
      scope: its path, such as ``"LM/Block_0/Dense_0"``.
      op: the name of its primitive; for a carry of a loop, the name of the loop.
      precision: the dtype that it runs in: ``"bfloat16"``, ``"float16"``,
        ``"float32"`` or another; ``"as traced"`` if it has no floats. For a float8
        product it is the format of its operands, or of the cotangent in the backward
        pass.
      code: the reason as a name, for code to compare. It is the id of an op group
        (``"product"``); the kind of a rule (``"op"``, ``"scope"``, ``"mark"``,
        ``"default"``); or a property of the equation or its operands
        (``"follows_low"``).
      reason: the reason in words.
      source: its line of code: file, line and function. It is the innermost line
        outside of installed packages, if there is one.
      shapes: the traced types of its results, such as ``"float32[4,8]"``; in the
        backward pass, their types as they run.
      times: how often it runs; None inside of a ``while`` loop. Each branch of a
        ``cond`` has rows.
      bytes_traced: the bytes of its results, as traced. For an equation that only
        autocast adds to the backward pass, the bytes as they run. A symbolic size
        counts as one.
      bytes_run: the bytes of its results, as they run.
      flops: the operations of a matrix product, two for each multiplication of real
        numbers; 0 for other ops.
      is_backward: whether it belongs to a backward pass.
      number_format: the number format of a matrix product that runs low: ``"low"``,
        ``"float8"`` or another. Empty for other ops, and where ``is_backward``.
      sums: how a float8 product is added up, ``"fast"`` or ``"promoted"``, see
        ``Float8``. Empty for other ops.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> row, *_ = jmp.explain(lambda x: x @ x)(jnp.ones((4, 4))).rows
      >>> row.op, row.precision, row.shapes, row.bytes_run, row.flops
      ('dot_general', 'bfloat16', ('float32[4,4]',), 32, 128)
    """

    scope: str
    op: str
    precision: str
    code: str
    reason: str
    source: str
    shapes: tuple[str, ...]
    times: int | None
    bytes_traced: int
    bytes_run: int
    flops: int = 0
    is_backward: bool = False
    number_format: str = ""
    sums: str = ""


def runs_in(row: Row) -> str:
    """Returns the dtype that an equation runs in, and its format if it has another."""
    is_named = row.precision.startswith(row.number_format)
    if is_named or row.number_format == LOW.name:
        return row.precision
    return f"{row.precision}, {row.number_format}"


def is_low(row: Row, bits: int = 16) -> bool:
    """Whether an equation runs in this number of bits or fewer."""
    is_float = row.precision != "as traced"
    return is_float and 8 * np.dtype(row.precision).itemsize <= bits


def is_decided_inside(row: Row) -> bool:
    """Whether an inner autocast decided the equation."""
    return AUTOCAST_SCOPE in row.scope.split("/")


@dataclasses.dataclass(eq=False)
class DecisionRecord:
    """A decision, as ``explain`` shows it.

    Attributes:
      eqn: the equation.
      decision: the decision.
      origin: the origin of the operand that decided; None if none did.
      result: the number of the result, if results are decided one by one (carries).
      operands: its operands that were traced in float32.
    """

    eqn: Eqn
    decision: Decision
    origin: Origin = None
    result: int | None = None
    operands: tuple[Facts, ...] = ()


@dataclasses.dataclass(eq=False, kw_only=True)
class DecidedRow(DecisionRecord):
    """A decision with its row.

    Attributes:
      row: the row.
      leader: the operand that decided, in words; otherwise empty.
    """

    row: Row
    leader: str = ""


def times_or_once(times: int | None) -> int:
    """Returns how often a row counts in a total: once if the number is unknown."""
    return 1 if times is None else times


def decided_rows(plan: Plan, rules: Rules) -> Iterator[DecidedRow]:
    """Yields the rows of the decisions of a plan, in the order of execution."""
    return _RowMaker(rules).make(plan, TOP, [])


class _RowMaker:
    """Makes rows; a program that is called often is processed once.

    Args:
      rules: the rules.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[int, list[tuple[DecisionRecord, Row]]] = {}
        self._sources: dict[int, str] = {}

    def make(
        self, plan: Plan, place: Place, origins: Sequence[Origin]
    ) -> Iterator[DecidedRow]:
        """Yields the rows of the decisions in one jaxpr.

        Args:
          plan: its plan.
          place: the place of the jaxpr.
          origins: the origins of its inputs.
        """
        for step in plan.steps:
            if id(step) not in self._known:
                records = records_of(step)
                self._known[id(step)] = [(one, self._row(one)) for one in records]
            for record, row in self._known[id(step)]:
                yield self._place_row(row, record, place, origins)
                if record.decision.run is Run.AS_TRACED:
                    yield from self._kept(record, place)
            for inside, inner in zip(step.inside, step.origins, strict=True):
                outside = [origin_outside(origin, origins) for origin in inner]
                times = params.trips(step.eqn)
                yield from self.make(inside, place.enter(step.eqn, times), outside)

    def _kept(self, record: DecisionRecord, place: Place) -> Iterator[DecidedRow]:
        """Yields the rows inside of an equation that runs as traced."""
        jaxprs = params.inner_jaxprs(record.eqn)
        eqns = [eqn for jaxpr in jaxprs for eqn in structure.parts(jaxpr).eqns]
        if not eqns:
            return
        op = params.op_of(record.eqn)
        kept = dataclasses.replace(record.decision, reason=Reason.INSIDE, within=op)
        there = place.enter(record.eqn, params.trips(record.eqn))
        for eqn in eqns:
            inner = DecisionRecord(eqn, kept)
            yield self._place_row(self._row(inner), inner, there, ())
            yield from self._kept(inner, there)

    def _place_row(
        self, row: Row, record: DecisionRecord, place: Place, origins: Sequence[Origin]
    ) -> DecidedRow:
        """Returns a row at a place, with the origins outside of its jaxpr."""
        line = source.source(record.eqn, place.source)
        self._sources[id(record.eqn)] = line
        origin = origin_outside(record.origin, origins)
        operands = tuple(
            facts._replace(origin=origin_outside(facts.origin, origins))
            for facts in record.operands
        )
        leader = self._describe_origin(origin)
        placed = row._replace(
            scope=source.join(place.path, row.scope),
            reason=f"{row.reason}: {leader}" if leader else row.reason,
            source=line,
            times=place.times,
            is_backward=place.is_backward or row.is_backward,
        )
        outside = record.eqn, record.decision, origin, record.result, operands
        return DecidedRow(*outside, row=placed, leader=leader)

    def _row(self, record: DecisionRecord) -> Row:
        """Returns a row without the place of its equation."""
        low = np.dtype(self._rules.compute_dtype)
        eqn, decision = record.eqn, record.decision
        results = eqn.outvars if record.result is None else [eqn.outvars[record.result]]
        code, words = code_of(record), reason_in_words(record)
        row = row_as_traced(eqn, results, code, words)
        dtype = low if decision.state is State.LOW else decision.stored
        row = row._replace(bytes_run=sum(bytes_of(var, dtype) for var in results))
        if decision.run is not Run.LOW:
            stored = decision.stored
            return row if stored is None else row._replace(precision=stored.name)
        running = decision.number_format.dtype(low)
        row = row._replace(precision=running.name)
        if row.op not in PRODUCTS:
            return row
        options = options_of(decision.number_format)
        is_of_floats = jnp.issubdtype(running, jnp.floating)
        return row._replace(
            number_format=decision.number_format.name,
            sums=options.get("sums", "") if is_of_floats else "",
        )

    def _describe_origin(self, origin: Origin) -> str:
        """Returns the origin of a value in words."""
        if not is_equation(origin):
            return origin_in_words(origin)
        # It has a row already, unless a loop carries it from step to step.
        line = short(self._sources.get(id(origin)) or source.source(origin))
        mark = _MARK_NAMES.get(params.checkpoint_name_of(origin))
        return (mark or params.op_of(origin)) + (line and f" at {line}")


_MARK_NAMES = {FULL_SCOPE: "as_full", LOW_SCOPE: "as_low"}
"""The names of marks, by the names in the program."""


def row_as_traced(eqn: Eqn, results: Sequence[Var], code: str, reason: str) -> Row:
    """Returns the row of some results of an equation as it is, without its place."""
    n_bytes = sum(map(bytes_of, results))
    return Row(
        scope=source.join(*source.scopes(eqn)),
        op=params.op_of(eqn),
        precision=_precision_as_traced(eqn),
        code=code,
        reason=reason,
        source="",
        shapes=tuple(var.aval.str_short() for var in results),
        times=1,
        bytes_traced=n_bytes,
        bytes_run=n_bytes,
        flops=products.product_flops(eqn),
        is_backward=source.is_transposed(eqn),
        sums=bilinear.sums_of(eqn),
    )


def _precision_as_traced(eqn: Eqn) -> str:
    """Returns the widest float of an equation; for a product, of its operands."""
    if (dtype := bilinear.dtype_of(eqn)) is not None:
        return dtype.name
    atoms = eqn.invars[:2] if params.op_of(eqn) in PRODUCTS else ()
    atoms = atoms or (*eqn.invars, *eqn.outvars)
    floats = [structure.dtype_of(atom) for atom in atoms if structure.is_float(atom)]
    return max(floats, key=lambda d: d.itemsize).name if floats else "as traced"


def bytes_of(var: Var, low: Dtype | None = None) -> int:
    """Returns the bytes of a variable; a float32 one may be in another dtype."""
    is_low = low is not None and structure.is_float32(var)
    dtype = low if is_low else structure.dtype_of(var)
    size = products.known_size(getattr(var.aval, "shape", ()))
    return size * getattr(dtype, "itemsize", 0)


def placed_equations(jaxpr: Jaxpr, place: Place = TOP) -> Iterator[tuple[Eqn, Place]]:
    """Yields the live equations of a program, each with its place."""
    for eqn in structure.live_equations(jaxpr):
        yield eqn, place
        if params.op_of(eqn) in HIGHER_ORDER:
            there = place.enter(eqn, params.trips(eqn))
            for inner in params.inner_jaxprs(eqn):
                yield from placed_equations(inner, there)


# --------------------------------------------------- the reason of each, in words

_WORDS = {
    Reason.RULE: "set by a carry rule or a mark",
    Reason.HIGHEST_PRECISION: "FULL: requests a specific precision",
    Reason.DIGITS: "FULL: for an index, a solver, or a power of one matrix",
    Reason.PHASE: "FULL: read by sin or cos, and its operands are given",
    Reason.LOOKUP: "FULL: zeros and ones look up or count, for float32 ops",
    Reason.SPREAD: "FULL: exponentials, read by a logarithm or a quotient",
    Reason.SMALL: "FULL: a batch of products of small matrices",
    Reason.RANDOM: "as traced: computed from random bits alone",
    Reason.NOT_FLOAT32: "as traced: not from float32 to float32",
    Reason.OPAQUE: "KEEP: has side effects, or applies a function to elements",
    Reason.OTHER_FLOATS: "KEEP: an operand has another float dtype",
    Reason.PASSES_ON: "returns its operands",
    Reason.POSITION: "the operand may be a position or a phase",
    Reason.MOVES_16_BITS: "moves or sends what has 16 bits or fewer",
    Reason.ROUNDS_NOTHING: "exact in 16 bits",
    Reason.READ_IN_FLOAT32: "read only by float32 ops, or returned",
    Reason.AMPLIFIED: "read by an op that amplifies rounding errors",
    Reason.ONE_FUNCTION: "part of a function of one 16-bit value",
    Reason.UNDECIDED: "undecided: no operand is 16-bit or deliberate float32",
    Reason.CAST: "existing cast to float32: deliberate",
    Reason.ITERATES: "KEEP: iterates until a float tells it to end",
    Reason.CARRY_PRODUCTS: "read only by 16-bit matrix products",
    Reason.CARRY_STATE: "a state or a sum: not one of a stack of layers",
    Reason.CARRY_RESULT: "a result: only an output reads its last value",
    Reason.CARRY_LAYERS: "a stack of layers: follows its start and its steps",
}

_MARK_REASONS = {
    AUTOCAST_SCOPE: "decided by an inner autocast",
    FULL_SCOPE: "marked by full_precision or as_full",
    LOW_SCOPE: "marked by low_precision or as_low",
    AS_WRITTEN_SCOPE: "inside low_call: runs as written",
}

_GROUP_REASONS = {op.group: op.reason for op in OPS}


def records_of(step: Step) -> list[DecisionRecord]:
    """Returns the decisions of a step: one, or one for each carry of a loop."""
    eqn, decision = step.eqn, step.decision
    if decision is None:
        return [
            DecisionRecord(eqn, carry.decision, carry.raised_by, carry.number)
            for carry in step.carries
        ]
    if decision.run is Run.PASS:
        return []
    if decision.reason is Reason.ITERATES:  # A whole loop.
        return [DecisionRecord(eqn, decision)]
    origin = None if decision.leader is None else decision.leader.origin
    floats = tuple(o for o in step.operands if o.state is not None)
    return [DecisionRecord(eqn, decision, origin, None, floats)]


def reason_in_words(record: DecisionRecord) -> str:
    """Returns the reason of a decision in words.

    Args:
      record: the decision. If an operand from outside of the jaxpr decided, the words
        do not name it.
    """
    decision = record.decision
    if decision.reason is Reason.NOT_FLOAT32:
        own = {v.aval.dtype.name for v in record.eqn.invars if is_narrow(v.aval)}
        if own:
            return f"as traced: your code made it {' and '.join(sorted(own))}"
    if decision.reason is Reason.INSIDE:
        return f"inside {decision.within}, which runs as traced"
    if decision.reason is Reason.RULE and decision.match is not None:
        words = _rule_in_words(decision.match)
    elif decision.reason is Reason.FORMAT and decision.match is not None:
        requested, verdict = decision.requested, decision.verdict
        is_low = f"LOW, not {requested.name}: "
        rule = f"{_rule_in_words(decision.match)}, " if verdict.qualifies else is_low
        words = rule + requested.words(verdict.code, record.eqn)
    elif decision.reason is Reason.FOLLOWS:
        is_low = decision.state is State.LOW
        words = f"follows a {'16-bit' if is_low else 'float32'} operand"
    else:
        words = _WORDS[decision.reason]
    if record.result is not None:
        is_raised = record.origin is not None
        raised = ", but the loop body makes it float32" if is_raised else ""
        return f"carry {record.result}: {words}{raised}"
    if decision.run is Run.FULL and decision.state is State.LOW:
        return f"float32 for its derivative, then cast; {words}"
    is_product = params.op_of(record.eqn) in PRODUCTS
    if is_product and has_raised_precision(record.eqn, decision):
        return f"{words}, in the highest precision"
    return words


def code_of(record: DecisionRecord) -> str:
    """Returns the reason of a decision as a name, for code to compare.

    It is the id of the op group, the kind of the rule, or the name of the ``Reason`` in
    lower case. For the verdict of a number format it is the name of the format, then
    the code of the verdict.
    """
    decision = record.decision
    if decision.reason is Reason.FORMAT:
        return f"{decision.requested.name}_{decision.verdict.code}"
    if decision.reason is not Reason.RULE or decision.match is None:
        return decision.reason.name.lower()
    match = decision.match
    return match.name if match.source is RuleSource.TABLE else match.source.value


def _rule_in_words(match: RuleMatch) -> str:
    by_source = {
        RuleSource.TABLE: _GROUP_REASONS.get(match.name, ""),
        RuleSource.UNKNOWN: f"unknown op {match.name!r}",
        RuleSource.OP: f"op rule {match.name!r}",
        RuleSource.DEFAULT: "the default of the rules",
        RuleSource.SCOPE: f"scope rule {match.name!r}",
        RuleSource.MARK: _MARK_REASONS.get(match.name, ""),
    }
    return f"{name_of(match.precision).upper()}: {by_source[match.source]}"


def origin_in_words(origin: Origin) -> str:
    """Returns the origin of a value in words; nothing if that is an equation."""
    if isinstance(origin, Argument):
        return f"argument {origin.path}" if origin.path else "an argument"
    if isinstance(origin, Constant):
        return "a constant"
    if isinstance(origin, RangeEnd):
        return "the largest or smallest float32"
    if isinstance(origin, NumberOrigin):
        number = f"the number {origin.value}"
        return "a constant too large for 16 bits" if origin.is_element else number
    return ""
