"""Decides ops that move numbers between devices, where each byte costs time.

Such a move changes no bit. So the values that 16-bit products alone read are cast
before they are sent, and not after. The derivative of some of these ops is a sum over
devices. It is float32, unless a rule lowers the op that adds up.
"""

from collections.abc import Sequence

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import Facts, Readers, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import RuleMatch
from jmp_lite.ops import (
    ADDED_UP,
    ADDING_UP_BACKWARD,
    SENDING,
    Precision,
    base_of,
)


def decide_collective(
    rules: RuleLookup,
    op: str,
    match: RuleMatch,
    operands: Sequence[Facts],
    readers: Readers,
    path: str,
) -> Decision | None:
    """Decides that an op sends 16 bits; else returns None.

    Example, of parameters that are split over devices, in ``shard_map``::

        w = all_gather part    part is a float32 parameter, and only the product reads
        y = dot_general x w    w: cast, then gathered. The gradient of part is added up
                               over the devices in float32
        n = all_gather scale   a norm reads the scale in float32: gathered in float32

    Args:
      rules: the rules, by path.
      op: the name of the op.
      match: the rule that decides it.
      operands: its operands that were traced in float32.
      readers: the readers of its results.
      path: its path.
    """
    lowers_sum = _lowers_sum(rules, op, path)
    if op not in SENDING and not lowers_sum:
        return None
    if match.is_explicit or match.precision not in (Precision.FOLLOW, Precision.LOW):
        return None
    # JAX transposes the ops of a rule one by one, so the sum would be 16-bit.
    is_transposed = bool(readers & Readers.TRANSPOSED) and op in ADDED_UP
    if is_transposed or readers.demand_float32 or not operands:
        return None
    is_low = any(o.state is State.LOW for o in operands)
    if not (is_low or readers.take_16_bits or match.precision is Precision.LOW):
        return None
    # A parameter stays one: no op runs in 16 bits because it was sent in 16 bits.
    is_soft = all(o.state is State.SOFT for o in operands)
    return Decision(
        Run.FULL if is_soft else Run.LOW,
        State.SOFT if is_soft else State.LOW,
        Reason.MOVES_16_BITS,
        held=rules.low_dtype,
        lowers_sum=lowers_sum,
    )


def _lowers_sum(rules: RuleLookup, op: str, path: str) -> bool:
    """Whether a rule names, and lowers, the sum that is the derivative of an op."""
    if (adds_up := ADDING_UP_BACKWARD.get(base_of(op))) is None:
        return False
    match = rules.match(adds_up, path)
    return match.is_explicit and match.precision is Precision.LOW
