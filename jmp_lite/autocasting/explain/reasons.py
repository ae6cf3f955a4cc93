"""What the codes of decisions mean in words, for people alone."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeGuard

from jmp_lite.autocasting.interpreter.decide import fits_float8, harmonic_mean
from jmp_lite.autocasting.interpreter.decisions import DecisionRecord, Reason, Run
from jmp_lite.autocasting.interpreter.values import (
    Argument,
    Constant,
    Input,
    Number,
    Origin,
    RangeEnd,
    State,
)
from jmp_lite.autocasting.jaxprs import cost
from jmp_lite.autocasting.jaxprs.types import Eqn
from jmp_lite.autocasting.rules.op_table import GROUPS
from jmp_lite.autocasting.rules.precision import RuleMatch, RuleSource
from jmp_lite.autocasting.rules.rules import (
    AS_WRITTEN_SCOPE,
    AUTOCAST_SCOPE,
    FULL_SCOPE,
    LOW_SCOPE,
)

_ASKED = "LOW: float8 was asked for, but"

_WORDS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.HIGHEST_PRECISION: "FULL: it asks for the highest precision",
        Reason.CAST_TO_INTEGERS: "FULL: a cast to integers reads it",
        Reason.SOLVED: "FULL: a factorization or a solver reads it",
        Reason.PHASE: "FULL: a sine or a cosine reads it, and no operand is 16-bit",
        Reason.FLOAT8_COMPUTE_DTYPE: f"{_ASKED} the compute dtype is not bfloat16",
        Reason.FLOAT8_NO_WEIGHT: f"{_ASKED} no operand is a weight",
        Reason.FLOAT8_BATCH: f"{_ASKED} it has batch axes",
        Reason.FLOAT8_READ_IN_FLOAT32: f"{_ASKED} all that read it are float32",
        Reason.NOT_FLOAT32: "nothing in it is float32",
        Reason.EFFECTS: "KEEP: it has effects",
        Reason.OTHER_FLOATS: ("KEEP: another float than float32 is among its operands"),
        Reason.POSITION: "its argument may be a position",
        Reason.ROUNDS_NOTHING: "rounds nothing in 16 bits",
        Reason.READ_IN_FLOAT32: "all that read it are float32 or results",
        Reason.ONE_FUNCTION: "inside of a function of one 16-bit value",
        Reason.FOLLOWS_LOW: "follows an operand in 16 bits",
        Reason.FOLLOWS_FLOAT32: "follows an operand in float32",
        Reason.UNDECIDED: "undecided: arguments and numbers",
        Reason.CAST_TO_OTHER: "a cast in the function, to another dtype",
        Reason.CAST_OF_GIVEN: "a cast in the function: undecided, of an argument",
        Reason.CAST_OF_NUMBER: "a cast in the function: undecided, of a number",
        Reason.CAST_OF_COMPUTED: "a cast in the function: float32 on purpose",
        Reason.ENDS_BY_A_FLOAT: "KEEP: a float decides when it ends",
        Reason.ROOT: "KEEP: a root is found to a tolerance",
        Reason.CARRY_RULE: "a carry rule",
        Reason.CARRY_MARK: "marked by low_precision",
        Reason.CARRY_PRODUCTS: "only low matrix products read it",
        Reason.CARRY_STATE: "a state: the loop is no stack of layers",
        Reason.CARRY_SUM: "a sum: something else is added to it at each step",
        Reason.CARRY_RESULT: "a result: nothing but an output reads its last",
        Reason.CARRY_LAYERS: "a stack of layers: it follows",
        Reason.CARRY_CACHE: "only low matrix products read it, then or later",
        Reason.CARRY_WHILE: "a state of a while loop",
    }
)

_MARKS: Mapping[str, str] = MappingProxyType(
    {
        AUTOCAST_SCOPE: "an inner autocast has decided it",
        FULL_SCOPE: "marked by full_precision or as_full",
        LOW_SCOPE: "marked by low_precision or as_low",
        AS_WRITTEN_SCOPE: "inside of low_call, as it was written",
    }
)

_GROUPS: Mapping[str, str] = MappingProxyType({g.id: g.reason for g in GROUPS})


def reason_in_words(record: DecisionRecord) -> str:
    """Returns why an equation runs as it does.

    Args:
      record: what was decided; where an operand decided it, what comes from outside of
        its jaxpr is not in the words.
    """
    decision = record.decision
    if decision.reason is Reason.INSIDE:
        return f"inside of {decision.within}, which is run as traced"
    if decision.reason is Reason.RULE and decision.match is not None:
        words = f"{decision.match.precision.name}: {_rule_in_words(decision.match)}"
    elif decision.reason is Reason.FLOAT8_THOUGH_READ_IN_FLOAT32 and decision.match:
        words = f"FLOAT8: {_rule_in_words(decision.match)}, though float32 ops read it"
    elif decision.reason in (Reason.FLOAT8_SIZE, Reason.FLOAT8_SMALL):
        words = f"{_ASKED} {_of_sizes(decision.reason, record.eqn)}"
    else:
        words = _WORDS[decision.reason]
    if record.result is not None:
        raised = ", but its body makes it float32" if record.origin is not None else ""
        return f"carry {record.result}: {words}{raised}"
    if decision.run is Run.FULL and decision.state is State.LOW:
        return f"in float32 for its derivative, then cast; {words}"
    return words


def _of_sizes(reason: Reason, product: Eqn) -> str:
    """Returns why a product of such sizes is not in float8."""
    sizes = dict(zip("MNK", cost.product_sizes(product), strict=True))
    if reason is Reason.FLOAT8_SIZE:
        name, size = next(item for item in sizes.items() if not fits_float8(item[1]))
        what = "no" if isinstance(size, int) else "not known to be a"
        return f"{name} = {size} is {what} multiple of 16"
    text = " x ".join(map(str, sizes.values()))
    mean = harmonic_mean([*sizes.values()])
    return f"{text} is too small to gain (harmonic mean {mean:.0f})"


def code_of(record: DecisionRecord) -> str:
    """Returns why an equation runs as it does, as a name that code may compare.

    It is the id of the group of ops that decided, else what kind of rule did, else the
    ``Reason``, in lower case.
    """
    decision = record.decision
    if decision.reason is not Reason.RULE or decision.match is None:
        return decision.reason.name.lower()
    match = decision.match
    return match.name if match.source is RuleSource.TABLE else match.source.value


def _rule_in_words(match: RuleMatch) -> str:
    by_source = {
        RuleSource.TABLE: _GROUPS.get(match.name, ""),
        RuleSource.UNKNOWN: f"nothing is known of {match.name!r}",
        RuleSource.OP: f"the rules say so of {match.name!r}",
        RuleSource.DEFAULT: "the rules' default",
        RuleSource.SCOPE: f"scope rule {match.name!r}",
        RuleSource.MARK: _MARKS.get(match.name, ""),
    }
    return by_source[match.source]


def origin_in_words(origin: Origin) -> str:
    """Returns what made a value what it is held in, if that is no equation."""
    if isinstance(origin, Argument):
        return f"the argument {origin.path}" if origin.path else "an argument"
    if isinstance(origin, Constant):
        return "a constant"
    if isinstance(origin, RangeEnd):
        return "the end of the range"
    if isinstance(origin, Number):
        is_element = origin.is_element
        too_large = "a constant too large for 16 bits"
        return too_large if is_element else f"the number {origin.value}"
    return ""


def is_equation(origin: Origin) -> TypeGuard[Eqn]:
    """Whether an origin is an equation."""
    others = Argument | Constant | Number | RangeEnd | Input | None
    return not isinstance(origin, others)
