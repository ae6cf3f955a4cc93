"""Every decision there is: in which precision an equation runs, and what a carry is.

Each function here is pure: it reads the rules, an equation, what its operands are held
in, who reads its results and the path that it stands in, and returns a value.
``autocast`` and ``explain`` both go through them.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.interpreter.decisions import (
    Decision,
    Operand,
    Reason,
    Run,
)
from jmp_lite.autocasting.interpreter.lookup import RuleLookup
from jmp_lite.autocasting.interpreter.values import Kind, Readers, State
from jmp_lite.autocasting.interpreter.while_predicate import ends_by_a_float
from jmp_lite.autocasting.jaxprs import compat
from jmp_lite.autocasting.jaxprs.types import Dtype, Eqn
from jmp_lite.autocasting.rules.op_table import ADDED_UP, PASSING, POSITIONAL
from jmp_lite.autocasting.rules.precision import Precision, RuleMatch, RuleSource
from jmp_lite.autocasting.rules.rules import LOW_SCOPE, Rules, asks_for_low


def changes_nothing(rules: Rules, paths: Iterable[str]) -> bool:
    """Whether rules leave a whole program as it was traced.

    Args:
      rules: the rules.
      paths: those of the program's equations.
    """
    # Marks win over rules that lower nothing; one that asks for float32 changes none.
    return rules.is_identity and not any(LOW_SCOPE in p.split("/") for p in paths)


# ---------------------------------------------------------------------- equations


def decide(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Operand],
    readers: Readers,
    path: str,
) -> Decision:
    """Decides how an equation runs that holds no jaxpr to enter.

    Args:
      rules: what the rules say, by path.
      eqn: the equation.
      operands: the states and origins of its operands.
      readers: who reads its results.
      path: the scopes that it stands in.
    """
    op = compat.op_of(eqn)
    if op == "convert_element_type":
        return _of_cast(rules, eqn, operands[0], path)
    if op in PASSING and rules.scope(path) is None:
        return Decision(Run.PASS, None, Reason.PASSES_ON)
    has_float32_results = any(map(compat.is_float32, eqn.outvars))
    if not has_float32_results and not any(map(compat.is_float32, eqn.invars)):
        return _NOT_FLOAT32
    if not compat.has_only_axis_effects(eqn):
        return Decision(Run.AS_TRACED, State.HARD, Reason.EFFECTS)
    if _has_other_floats(eqn, rules.low_dtype):
        return Decision(Run.AS_TRACED, State.HARD, Reason.OTHER_FLOATS)
    if not has_float32_results:
        readers |= Readers.OTHER
    specs = [(o.state, o.kind) for o in operands if o.state is not None]
    special = _of_product(rules, eqn, specs, path)
    return special or _by_class(op, rules.match(op, path), specs, readers)


def runs_low(rules: RuleLookup, eqn: Eqn, path: str) -> bool:
    """Whether the rules run an equation low, whatever its operands are."""
    op = compat.op_of(eqn)
    if rules.match(op, path).precision is not Precision.LOW:
        return False
    return _of_product(rules, eqn, (), path) is None


_NOT_FLOAT32 = Decision(Run.AS_TRACED, None, Reason.NOT_FLOAT32)

Specs = Sequence[tuple[State, Kind]]


def _by_class(op: str, match: RuleMatch, specs: Specs, readers: Readers) -> Decision:
    """Decides by the class of an op, then by its operands and its readers."""
    precision = match.precision
    if precision is Precision.KEEP:
        return Decision(Run.AS_TRACED, State.HARD, Reason.RULE, match=match)
    if precision is Precision.LOW:
        return _low(op, Reason.RULE, match=match)
    if precision in (Precision.FULL, Precision.FULL_INSIDE):
        return Decision(Run.FULL, State.HARD, Reason.RULE, match=match)
    state, leader = _joined(op, precision, specs)
    if op in POSITIONAL:
        # Positions need their digits going in, not coming out.
        return Decision(Run.FULL, State.SOFT, Reason.POSITION)
    if op == "select_n" and state is State.LOW and _are_16_bit(specs):
        return _low(op, Reason.CHOOSES_16_BIT, leader)
    if readers.want_float32:
        held = State.SOFT if state is State.SOFT else State.HARD
        return Decision(Run.FULL, held, Reason.READ_IN_FLOAT32)
    if state is State.LOW:
        return _low(op, Reason.FOLLOWS_LOW, leader)
    if state is State.HARD:
        return Decision(Run.FULL, state, Reason.FOLLOWS_FLOAT32, leader)
    return Decision(Run.FULL, state, Reason.UNDECIDED)


def _low(
    op: str, reason: Reason, leader: int | None = None, match: RuleMatch | None = None
) -> Decision:
    # In float32 for its derivative, and its result is cast.
    run = Run.FULL if op in ADDED_UP else Run.LOW
    return Decision(run, State.LOW, reason, leader, match)


def _joined(op: str, precision: Precision, specs: Specs) -> tuple[State, int | None]:
    """Returns the state of an op that follows, and which operand it follows."""
    joined, leader = State.SOFT, None
    # As a branch of a selection, the end of the range is that of the other branch.
    ends = op == "select_n" and any(state is State.LOW for state, _ in specs)
    for i, (state, kind) in enumerate(specs):
        if kind is Kind.END and ends:
            state = State.SOFT
        widens = kind not in (Kind.LITERAL, Kind.EXACT, Kind.END)
        if precision is Precision.WIDEST and state is State.SOFT and widens:
            state = State.HARD
        if state > joined:
            joined, leader = state, i
    return joined, leader


def _are_16_bit(specs: Specs) -> bool:
    """Whether nothing is rounded where all operands are in 16 bits."""
    return all(
        state is State.LOW or kind in (Kind.EXACT, Kind.END) for state, kind in specs
    )


def _has_other_floats(eqn: Eqn, low_dtype: Dtype) -> bool:
    """Whether an op is given other floats than float32.

    Those of the compute dtype are welcome beside float32 ones.
    """
    others = [
        compat.dtype_of(atom)
        for atom in eqn.invars
        if compat.is_float(atom) and not compat.is_float32(atom)
    ]
    if not others:
        return False
    has_float32 = any(map(compat.is_float32, eqn.invars))
    return not has_float32 or any(dtype != low_dtype for dtype in others)


# ----------------------------------------------------------------------- products


def _of_product(
    rules: RuleLookup, eqn: Eqn, specs: Specs, path: str
) -> Decision | None:
    """Decides of a product that is float32 although its class is low; else None."""
    params = compat.product_params(eqn)
    if params is None:
        return None
    match = rules.match(compat.op_of(eqn), path)
    if match.precision is not Precision.LOW or match.source is RuleSource.MARK:
        return None
    has_positions = any(kind is Kind.INTEGER for _, kind in specs)
    if (
        has_positions
        and params.sums_nothing
        and not asks_for_low(rules.rules, compat.op_of(eqn), path)
    ):
        return Decision(Run.FULL, State.HARD, Reason.SCALES_POSITIONS)
    if _asks_for_float32(params):
        return Decision(Run.FULL, State.HARD, Reason.HIGHEST_PRECISION)
    return None


def _asks_for_float32(params: compat.ProductParams) -> bool:
    """Whether a matrix product asks for more than every other one here gets."""
    if params.result_dtype not in (None, np.dtype("float32")):
        return True
    asked, usual = params.precision, compat.ambient_precision()
    if isinstance(asked, tuple):
        return lax.Precision.HIGHEST in asked and usual is not lax.Precision.HIGHEST
    return asked not in (None, usual, *_IN_16_BITS)  # An algorithm.


_IN_16_BITS = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.BF16_BF16_BF16,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.DotAlgorithmPreset.F16_F16_F16,
)


# -------------------------------------------------------------------------- casts


def _of_cast(rules: RuleLookup, eqn: Eqn, operand: Operand, path: str) -> Decision:
    """Decides of a cast that the user has written, or JAX for them."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not compat.is_float32(var):
        is_float32 = compat.is_float32(atom)
        reason = Reason.CAST_TO_OTHER if is_float32 else Reason.NOT_FLOAT32
        return Decision(Run.AS_TRACED, None, reason)
    match = rules.scope(path)
    precision = match.precision if match else None
    if precision is Precision.LOW:
        return Decision(Run.LOW, State.LOW, Reason.RULE, match=match)
    if precision is Precision.FULL:
        return Decision(Run.FULL, State.HARD, Reason.RULE, match=match)
    if operand.state is not None:
        return Decision(Run.PASS, operand.state, Reason.CAST_OF_FLOAT32, leader=0)
    if compat.dtype_of(atom) == np.bool_:
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_NUMBER)
    if operand.kind in (Kind.LITERAL, Kind.EXACT) and not operand.shape:
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_NUMBER)
    is_given = operand.kind is Kind.GIVEN
    if is_given and jnp.issubdtype(compat.dtype_of(atom), jnp.floating):
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_GIVEN)
    return Decision(Run.FULL, State.HARD, Reason.CAST_OF_COMPUTED)


# -------------------------------------------------- equations that hold a jaxpr


def decide_to_keep(rules: RuleLookup, eqn: Eqn, path: str) -> Decision | None:
    """Decides whether an equation is run with all it holds as it was traced.

    Args:
      rules: what the rules say, by path.
      eqn: an equation that holds jaxprs.
      path: the scopes that it stands in.

    Returns:
      The decision; None where what it holds is decided op by op.
    """
    op, reason = compat.op_of(eqn), None
    if op == "while" and rules.carry(path) != "follow" and ends_by_a_float(eqn):
        reason = Reason.ENDS_BY_A_FLOAT
    if op == "custom_jvp_call" and compat.is_custom_root(eqn):
        reason = Reason.ROOT
    return Decision(Run.AS_TRACED, State.HARD, reason) if reason else None


class Slot(enum.Enum):
    """What a carry of a loop may be.

    ``LOW``: low, whatever it starts from. ``FOLLOW``: low unless the body makes it
    hard. ``WRITTEN``: low if what the body writes into it is. ``FULL``: float32.
    """

    LOW = "low"
    FOLLOW = "follow"
    WRITTEN = "written"
    FULL = "full"


class Carry(NamedTuple):
    """What one carry may be, and why."""

    slot: Slot
    reason: Reason


class CarryFacts(NamedTuple):
    """What the body of a loop does with one carry.

    Attributes:
      is_multiplied: whether low products alone read it in a step.
      is_multiplied_later: whether they alone do in this step or a later one.
      has_gradient: whether the loop has a backward pass.
      is_of_layers: whether the loop is a stack of layers.
      is_added_to: whether something else is added to it at each step.
      last_is_read: whether something besides an output reads its last value.
    """

    is_multiplied: bool
    is_multiplied_later: bool
    has_gradient: bool = True
    is_of_layers: bool = False
    is_added_to: bool = False
    last_is_read: bool = False


def decide_carry(rules: RuleLookup, facts: CarryFacts, path: str) -> Carry:
    """Decides what a carry may be: float32, unless there is a reason that it is low.

    Args:
      rules: what the rules say, by path.
      facts: what the body of the loop does with it.
      path: the scopes that the loop stands in.
    """
    match, rule = rules.scope(path), rules.carry(path)
    if match and match.source is RuleSource.MARK and match.precision is Precision.LOW:
        return Carry(Slot.FOLLOW, Reason.CARRY_MARK)
    if rule is not None:
        return Carry(Slot(rule), Reason.CARRY_RULE)
    if not facts.has_gradient:
        # Each step writes some rows into a cache of keys, and products read all. (In a
        # backward pass the gradients of all steps would add up in 16 bits.)
        if facts.is_multiplied_later and not facts.is_multiplied:
            return Carry(Slot.WRITTEN, Reason.CARRY_CACHE)
        return Carry(Slot.FULL, Reason.CARRY_WHILE)
    # Low products would cast it anyway: the hidden state of an LSTM.
    if facts.is_multiplied:
        return Carry(Slot.LOW, Reason.CARRY_PRODUCTS)
    if not facts.is_of_layers:
        return Carry(Slot.FULL, Reason.CARRY_STATE)
    if facts.is_added_to:
        return Carry(Slot.FULL, Reason.CARRY_SUM)
    if not facts.last_is_read:
        return Carry(Slot.FULL, Reason.CARRY_RESULT)
    return Carry(Slot.FOLLOW, Reason.CARRY_LAYERS)


def carry_settled(carry: Carry, state: State) -> Decision:
    """Returns the decision for a carry, once its state is a fixed point of the loop."""
    run = Run.LOW if state is State.LOW else Run.FULL
    return Decision(run, state, carry.reason)
