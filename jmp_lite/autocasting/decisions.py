"""How one equation runs, and why.

The law of this file: a decision is a value, made from values alone: what the rules say
of the op where it stands, the states of its operands, and who reads its results.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmp_lite.autocasting.demand import Readers
from jmp_lite.autocasting.rules import ADDED_UP, POSITIONAL, Precision, Said
from jmp_lite.autocasting.values import Kind, State


class Run(enum.Enum):
    """The dtype that an equation runs in."""

    LOW = "low"
    FULL = "full"
    AS_TRACED = "as traced"


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one equation runs, what its float32 results are, and why.

    Attributes:
      run: the dtype it runs in.
      state: what its float32 results are held in; None where it has none.
      reason: why, in words.
      leader: which of the operands that it follows decided, if one did.
      said: what the rules said of it, where they alone decided; None where its
        operands, its effects or those that read its results did.
    """

    run: Run
    state: State | None
    reason: str
    leader: int | None = None
    said: Precision | None = None


NOT_FLOAT32 = Decision(Run.AS_TRACED, None, "nothing in it is float32")
HAS_EFFECTS = Decision(Run.AS_TRACED, State.HARD, "KEEP: it has effects")
MIXED_BY_THE_USER = Decision(
    Run.AS_TRACED, State.HARD, "KEEP: another float than float32 is among its operands"
)


def decide(
    op: str, said: Said, operands: Sequence[tuple[State, Kind]], readers: Readers
) -> Decision:
    """Decides how an equation runs.

    Args:
      op: the name of its primitive.
      said: what the rules say of it, where it stands.
      operands: state and kind of each operand that was traced in float32.
      readers: who reads its results.
    """
    precision, reason = said.precision, f"{said.precision.name}: {said.reason}"
    if precision is Precision.KEEP:
        return Decision(Run.AS_TRACED, State.HARD, reason, said=precision)
    if precision is Precision.LOW:
        return _low(op, reason, said=precision)
    if precision in (Precision.FULL, Precision.FULL_INSIDE):
        return Decision(Run.FULL, State.HARD, reason, said=precision)
    state, leader = _joined(op, precision, operands)
    if op in POSITIONAL:
        # Positions need their digits going in, not coming out.
        return Decision(Run.FULL, State.SOFT, "its argument may be a position")
    if op == "select_n" and state is State.LOW and _are_16_bit(operands):
        return _low(op, "chooses among numbers of 16 bits", leader)
    if readers.want_float32:
        held = State.SOFT if state is State.SOFT else State.HARD
        return Decision(Run.FULL, held, "all that read it are float32 or results")
    if state is State.LOW:
        return _low(op, "follows an operand in 16 bits", leader)
    if state is State.HARD:
        return Decision(Run.FULL, state, "follows an operand in float32", leader)
    return Decision(Run.FULL, state, "undecided: arguments and numbers")


class Operand(NamedTuple):
    """What stood for an operand or a result.

    Attributes:
      state: what it was held in; None for what was not traced in float32.
      kind: where it came from.
      origin: what made it what it was held in.
      shape: its shape.
    """

    state: State | None
    kind: Kind
    origin: Any
    shape: tuple[int, ...]


class Told(NamedTuple):
    """One decision of a walk.

    Attributes:
      eqn: the equation that was decided.
      decision: what was decided of it.
      origin: where the operand comes from that decided it, if one did.
      result: which of its results, where those are decided one by one: the carries of
        a loop.
      operands: its operands that were traced in float32.
    """

    eqn: Any
    decision: Decision
    origin: Any = None
    result: int | None = None
    operands: tuple[Operand, ...] = ()


class ToldInside(NamedTuple):
    """The decisions of a walk along a jaxpr that an equation holds.

    Attributes:
      eqn: the equation.
      told: the decisions, in order.
      origins: where the inputs of the jaxpr come from.
      times: how often the jaxpr is run; None where that is not known.
    """

    eqn: Any
    told: "Sequence[Told | ToldInside]"
    origins: Sequence[Any]
    times: int | None = 1


def _are_16_bit(operands: Sequence[tuple[State, Kind]]) -> bool:
    """Whether nothing is rounded where all operands are in 16 bits."""
    return all(
        state is State.LOW or kind in (Kind.EXACT, Kind.END) for state, kind in operands
    )


def _low(
    op: str, reason: str, leader: int | None = None, said: Precision | None = None
) -> Decision:
    if op in ADDED_UP:
        reason = f"in float32 for its derivative, then cast; {reason}"
        return Decision(Run.FULL, State.LOW, reason, leader, said)
    return Decision(Run.LOW, State.LOW, reason, leader, said)


def _joined(
    op: str, precision: Precision, operands: Sequence[tuple[State, Kind]]
) -> tuple[State, int | None]:
    """Returns the state of an op that follows, and which operand it follows."""
    joined, leader = State.SOFT, None
    # As a branch of a selection, the end of the range is that of the other branch.
    ends = op == "select_n" and any(state is State.LOW for state, _ in operands)
    for i, (state, kind) in enumerate(operands):
        if kind is Kind.END and ends:
            state = State.SOFT
        widens = kind not in (Kind.LITERAL, Kind.EXACT, Kind.END)
        if precision is Precision.WIDEST and state is State.SOFT and widens:
            state = State.HARD
        if state > joined:
            joined, leader = state, i
    return joined, leader
