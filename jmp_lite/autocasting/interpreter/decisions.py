"""What a decision is: how an equation runs, and why, as data.

A reason is a code. What it means in words is in ``explain/reasons.py`` alone.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from jmp_lite.autocasting.interpreter.values import Kind, Lineage, Origin, State
from jmp_lite.autocasting.jaxprs.types import Eqn
from jmp_lite.autocasting.rules.precision import RuleMatch


class Run(enum.Enum):
    """The dtype that an equation runs in.

    ``LOW``: the compute dtype. ``FULL``: float32. ``AS_TRACED``: those it was traced
    in. ``PASS``: each result is its operand, in whatever that is held. ``FLOAT8``: on
    quantized operands, with a result in the compute dtype.
    """

    LOW = "low"
    FLOAT8 = "float8"
    FULL = "full"
    AS_TRACED = "as traced"
    PASS = "pass"

    @property
    def lowers(self) -> bool:
        """Whether it takes 16 bits, or fewer, of each operand."""
        return self in (Run.LOW, Run.FLOAT8)


class Reason(enum.Enum):
    """Why an equation runs as it does, or why the carry of a loop is what it is."""

    # What the rules say alone; the decision's ``match`` is the rule.
    RULE = enum.auto()
    HIGHEST_PRECISION = enum.auto()
    CAST_TO_INTEGERS = enum.auto()
    SOLVED = enum.auto()
    PHASE = enum.auto()
    # Why a product is 16-bit although float8 was asked for.
    FLOAT8_COMPUTE_DTYPE = enum.auto()
    FLOAT8_NO_WEIGHT = enum.auto()
    FLOAT8_BATCH = enum.auto()
    FLOAT8_SIZE = enum.auto()
    FLOAT8_SMALL = enum.auto()
    FLOAT8_READ_IN_FLOAT32 = enum.auto()
    # One that is in float8 because a scope names it.
    FLOAT8_THOUGH_READ_IN_FLOAT32 = enum.auto()
    # What an equation is.
    NOT_FLOAT32 = enum.auto()
    EFFECTS = enum.auto()
    OTHER_FLOATS = enum.auto()
    PASSES_ON = enum.auto()
    POSITION = enum.auto()
    # Its operands and its readers.
    ROUNDS_NOTHING = enum.auto()
    READ_IN_FLOAT32 = enum.auto()
    ONE_FUNCTION = enum.auto()
    FOLLOWS_LOW = enum.auto()
    FOLLOWS_FLOAT32 = enum.auto()
    UNDECIDED = enum.auto()
    # Casts that are written in the function.
    CAST_TO_OTHER = enum.auto()
    CAST_OF_FLOAT32 = enum.auto()
    CAST_OF_GIVEN = enum.auto()
    CAST_OF_NUMBER = enum.auto()
    CAST_OF_COMPUTED = enum.auto()
    # Equations that are run with all they hold as they were traced.
    INSIDE = enum.auto()
    ENDS_BY_A_FLOAT = enum.auto()
    ROOT = enum.auto()
    # Carries of loops.
    CARRY_RULE = enum.auto()
    CARRY_MARK = enum.auto()
    CARRY_PRODUCTS = enum.auto()
    CARRY_STATE = enum.auto()
    CARRY_SUM = enum.auto()
    CARRY_RESULT = enum.auto()
    CARRY_LAYERS = enum.auto()
    CARRY_CACHE = enum.auto()
    CARRY_WHILE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one equation runs, what its float32 results are, and why.

    Attributes:
      run: the dtype it runs in.
      state: what its float32 results are held in; None where it has none.
      reason: why.
      leader: which of its float32 operands decided, if one did.
      match: the rule that decided; None where the equation itself, its operands or its
        readers did.
      within: the op whose jaxpr is run as it was traced, around this equation.
    """

    run: Run
    state: State | None
    reason: Reason
    leader: int | None = None
    match: RuleMatch | None = None
    within: str = ""


class Operand(NamedTuple):
    """What stood for an operand or a result.

    Attributes:
      state: what it was held in; None for what was not traced in float32.
      kind: where it came from.
      origin: what made it what it was held in.
      shape: its shape.
      lineage: what it is a function of.
    """

    state: State | None
    kind: Kind
    origin: Origin
    shape: tuple[int, ...]
    lineage: Lineage = Lineage()


class DecisionRecord(NamedTuple):
    """One decision of an interpretation.

    Attributes:
      eqn: the equation that was decided.
      decision: what was decided of it.
      origin: where the operand comes from that decided it, if one did.
      result: which of its results, where those are decided one by one: the carries of
        a loop.
      operands: its operands that were traced in float32.
    """

    eqn: Eqn
    decision: Decision
    origin: Origin = None
    result: int | None = None
    operands: tuple[Operand, ...] = ()


class RecordsInside(NamedTuple):
    """The decisions along a jaxpr that an equation holds.

    Attributes:
      eqn: the equation.
      records: the decisions, in order.
      origins: where the inputs of the jaxpr come from.
      times: how often the jaxpr is run; None where that is not known.
    """

    eqn: Eqn
    records: "Sequence[DecisionRecord | RecordsInside]"
    origins: Sequence[Origin]
    times: int | None = 1


def run_alike(
    some: "Sequence[DecisionRecord | RecordsInside]",
    others: "Sequence[DecisionRecord | RecordsInside]",
) -> bool:
    """Whether the equations of a jaxpr run alike, whatever the reasons."""

    def key(item: DecisionRecord | RecordsInside) -> object:
        if isinstance(item, RecordsInside):
            return id(item.eqn)
        return id(item.eqn), item.result, item.decision.run, item.decision.state

    if list(map(key, some)) != list(map(key, others)):
        return False
    return all(
        run_alike(one.records, other.records)
        for one, other in zip(some, others, strict=True)
        if isinstance(one, RecordsInside) and isinstance(other, RecordsInside)
    )
