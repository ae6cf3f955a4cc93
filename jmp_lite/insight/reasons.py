"""Reads the decisions of a plan, and writes the reason of each in words."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jmp_lite.autocasting.arguments import is_narrow
from jmp_lite.autocasting.decide import facts
from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run, Step
from jmp_lite.autocasting.decide.special_ops import has_raised_precision
from jmp_lite.autocasting.rules import scopes
from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource, name_of
from jmp_lite.jaxprs.products import PRODUCTS, op_of
from jmp_lite.jaxprs.types import Eqn
from jmp_lite.ops import OPS

_WORDS: Mapping[Reason, str] = MappingProxyType(
    {
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
)

_MARK_REASONS: Mapping[str, str] = MappingProxyType(
    {
        scopes.AUTOCAST_SCOPE: "decided by an inner autocast",
        scopes.FULL_SCOPE: "marked by full_precision or as_full",
        scopes.LOW_SCOPE: "marked by low_precision or as_low",
        scopes.AS_WRITTEN_SCOPE: "inside low_call: runs as written",
    }
)

_GROUP_REASONS: Mapping[str, str] = MappingProxyType(
    {op.group: op.reason for op in OPS}
)


class DecisionRecord(NamedTuple):
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
    origin: facts.Origin = None
    result: int | None = None
    operands: tuple[facts.Facts, ...] = ()


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
        words = _verdict_in_words(record, decision.match)
    elif decision.reason is Reason.FOLLOWS:
        is_low = decision.state is facts.State.LOW
        words = f"follows a {'16-bit' if is_low else 'float32'} operand"
    else:
        words = _WORDS[decision.reason]
    if record.result is not None:
        raised = (
            ", but the loop body makes it float32" if record.origin is not None else ""
        )
        return f"carry {record.result}: {words}{raised}"
    if decision.run is Run.FULL and decision.state is facts.State.LOW:
        return f"float32 for its derivative, then cast; {words}"
    is_product = op_of(record.eqn) in PRODUCTS
    if is_product and has_raised_precision(record.eqn, decision):
        return f"{words}, in the highest precision"
    return words


def _verdict_in_words(record: DecisionRecord, match: RuleMatch) -> str:
    """Returns whether a product has the number format of a rule, and why."""
    requested, verdict = record.decision.requested, record.decision.verdict
    words = requested.words(verdict.code, record.eqn)
    if verdict.qualifies:
        return f"{_rule_in_words(match)}, {words}"
    return f"LOW, not {requested.name}: {words}"


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
    return f"{name_of(match.precision).upper()}: {_source_in_words(match)}"


def _source_in_words(match: RuleMatch) -> str:
    by_source = {
        RuleSource.TABLE: _GROUP_REASONS.get(match.name, ""),
        RuleSource.UNKNOWN: f"unknown op {match.name!r}",
        RuleSource.OP: f"op rule {match.name!r}",
        RuleSource.DEFAULT: "the default of the rules",
        RuleSource.SCOPE: f"scope rule {match.name!r}",
        RuleSource.MARK: _MARK_REASONS.get(match.name, ""),
    }
    return by_source[match.source]


def origin_in_words(origin: facts.Origin) -> str:
    """Returns the origin of a value in words; nothing if that is an equation."""
    if isinstance(origin, facts.Argument):
        return f"argument {origin.path}" if origin.path else "an argument"
    if isinstance(origin, facts.Constant):
        return "a constant"
    if isinstance(origin, facts.RangeEnd):
        return "the largest or smallest float32"
    if isinstance(origin, facts.NumberOrigin):
        number = f"the number {origin.value}"
        return "a constant too large for 16 bits" if origin.is_element else number
    return ""
