"""Decides the precision that a carry keeps from step to step of a loop."""

import enum
from typing import NamedTuple

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import Spec, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import RuleSource
from jmp_lite.ops import Precision


class Slot(enum.Enum):
    """The possible precisions of a carry.

    ``LOW``: low, whatever its initial value is. ``FOLLOW``: low unless the body makes
    it hard. ``WRITTEN``: low if the body writes low values into it. ``FULL``: float32.
    """

    LOW = "low"
    FOLLOW = "follow"
    WRITTEN = "written"
    FULL = "full"


class CarryDecision(NamedTuple):
    """The slot of a carry, and the reason."""

    slot: Slot
    reason: Reason


class CarryFacts(NamedTuple):
    """What the body of a loop does with one carry.

    Attributes:
      is_multiplied: whether only low products read it in a step.
      is_multiplied_later: whether only low products read it in this step or later ones.
      has_gradient: whether the loop has a backward pass.
      is_of_layers: whether the loop is a stack of layers.
      is_added_to: whether each step adds another value to it.
      last_is_read: whether anything but an output reads its last value.
    """

    is_multiplied: bool
    is_multiplied_later: bool
    has_gradient: bool = True
    is_of_layers: bool = False
    is_added_to: bool = False
    last_is_read: bool = False


def decide_carry(rules: RuleLookup, facts: CarryFacts, path: str) -> CarryDecision:
    """Decides the slot of a carry: float32, unless there is a reason for a low one.

    Args:
      rules: the rules, by path.
      facts: what the body of the loop does with it.
      path: the path of the loop.
    """
    match, rule = rules.scope(path), rules.carry(path)
    if match and match.source is RuleSource.MARK and match.precision is Precision.LOW:
        return CarryDecision(Slot.FOLLOW, Reason.RULE)
    if rule is not None:
        return CarryDecision(Slot(rule), Reason.RULE)
    if not facts.has_gradient:
        # Each step writes some rows into a cache of keys, and products read all. (In a
        # backward pass the gradients of all steps would add up in 16 bits.)
        if facts.is_multiplied_later and not facts.is_multiplied:
            return CarryDecision(Slot.WRITTEN, Reason.CARRY_PRODUCTS)
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    # Low products would cast it anyway, as the hidden state of an LSTM.
    if facts.is_multiplied:
        return CarryDecision(Slot.LOW, Reason.CARRY_PRODUCTS)
    if not facts.is_of_layers:
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    if facts.is_added_to:
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    if not facts.last_is_read:
        return CarryDecision(Slot.FULL, Reason.CARRY_RESULT)
    return CarryDecision(Slot.FOLLOW, Reason.CARRY_LAYERS)


def final_decision(carry: CarryDecision, state: State) -> Decision:
    """Returns the decision for a carry whose state is a fixed point of the loop."""
    run = Run.LOW if state is State.LOW else Run.FULL
    return Decision(run, state, carry.reason)


def first_spec(spec: Spec, slot: Slot) -> Spec:
    """Returns the spec of a carry in the first attempt to convert a loop.

    Args:
      spec: the spec of its initial value.
      slot: its slot.
    """
    return _spec(spec, slot is not Slot.FULL)


def _spec(spec: Spec, is_low: bool) -> Spec:
    if spec.state is None:
        return Spec(None)
    return Spec(State.LOW if is_low else State.HARD)


def trial_spec(spec: Spec, slot: Slot) -> Spec:
    """Returns the spec of a carry for a trial conversion of the body."""
    is_written = slot is Slot.WRITTEN and spec.state is not None
    return Spec(State.SOFT) if is_written else spec


def spec_after_trial(spec: Spec, slot: Slot, made: Spec) -> Spec:
    """Returns the spec of a carry, given its spec after a step of the trial."""
    return _spec(spec, made.state is State.LOW) if slot is Slot.WRITTEN else spec


def must_rise(slot: Slot, before: Spec, made: Spec) -> bool:
    """Whether a carry has to become float32, because the body of the loop makes it so.

    The loop is converted again until no carry rises, since one may raise another.

    Example: in an LSTM, ``h`` is read by products alone. Its slot is LOW, so it never
    rises, even if a step returns float32. The cell ``c`` is a state: its slot is FULL,
    and it starts in float32. In a stack of blocks, ``x`` has the slot FOLLOW. It starts
    low. If a step returns ``x + as_full(f(x))``, its result is deliberate float32:
    ``x`` rises, and the body is converted again for a float32 ``x``.

    Args:
      slot: the slot of the carry.
      before: its spec when a step begins.
      made: its spec when a step ends, before it is cast.
    """
    rises = before.state is State.LOW and made.state is State.HARD
    return rises and slot in (Slot.FOLLOW, Slot.WRITTEN)


RAISED = Spec(State.HARD)
"""The spec of a carry that has risen."""
