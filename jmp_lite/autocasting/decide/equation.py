"""Decides the precision of an equation.

Each function here is pure. It reads the rules, an equation, the states of its operands,
the readers of its results, and its path.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.decisions import (
    Decision,
    Reason,
    Run,
)
from jmp_lite.autocasting.decide.ending import ends_by_a_float
from jmp_lite.autocasting.decide.facts import (
    Facts,
    Kind,
    Mark,
    NumberOrigin,
    Readers,
    State,
    is_equation,
)
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.special_ops import (
    decide_cast,
    decide_collective,
    decide_format,
    decide_product,
)
from jmp_lite.autocasting.decide.values import (
    is_inside_function,
    is_one_function,
    roots_of,
)
from jmp_lite.autocasting.rules.match import AnyPrecision, RuleMatch, RuleSource
from jmp_lite.jaxprs import gathers, params, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype, Eqn
from jmp_lite.ops import (
    ADDED_UP,
    ADDING,
    INSIDE_OF_FUNCTIONS,
    MOVING,
    PASSING,
    POSITIONAL,
    POWERS,
    SATURATING,
    SELECTING,
    Precision,
)

# ---------------------------------------------------------------------- equations


def decide(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Facts],
    readers: Readers,
    path: str,
) -> Decision:
    """Decides how an equation runs, if no jaxpr in it is planned.

    Args:
      rules: the rules, by path.
      eqn: the equation.
      operands: its operands.
      readers: the readers of its results.
      path: its path.
    """
    op = rules.op_decided_as(eqn, path)
    if op == "convert_element_type":
        return decide_cast(rules, eqn, operands[0], path)
    match = rules.match(op, path)
    # ``optimization_barrier`` returns operands of several states, each in its own.
    if op in PASSING and not match.is_explicit:
        return Decision(Run.PASS, None, Reason.PASSES_ON)
    has_float32_results = any(map(structure.is_float32, eqn.outvars))
    if not has_float32_results and not any(map(structure.is_float32, eqn.invars)):
        return _NOT_FLOAT32
    # ``as_low`` of a draw is an op of its own, ``name``: it casts what was drawn in
    # float32.
    is_marked = match.precision is Precision.FULL or op == "name"
    # A normal from a uniform number that 16 bits round to 1 is infinite, and bfloat16
    # has 128 different normals.
    if Mark.RANDOM in rules.mark(eqn) and not (match.is_explicit and is_marked):
        return Decision(Run.AS_TRACED, State.SOFT, Reason.RANDOM)
    if not params.has_only_axis_effects(eqn):
        return Decision(Run.AS_TRACED, State.HARD, Reason.OPAQUE)
    if params.applies_function(eqn):
        return Decision(Run.AS_TRACED, State.HARD, Reason.OPAQUE)
    if _has_other_floats(eqn, rules.low_dtype):
        return Decision(Run.AS_TRACED, State.HARD, Reason.OTHER_FLOATS)
    # A product of integers with a float32 result would be infinite in float16, and one
    # of int32 is a TypeError in 16 bits.
    if op in PRODUCTS and not any(map(structure.is_float, eqn.invars)):
        return Decision(Run.AS_TRACED, State.HARD, Reason.NOT_FLOAT32)
    # A comparison has no float32 result. Without a reader it would count as demanded in
    # float32, although it may compare 16-bit numbers.
    if not has_float32_results:
        readers |= Readers.OTHER
    floats, stored = [o for o in operands if o.state is not None], None
    # ``take(..., fill_value=1e9)``: the number would be infinite in float16.
    if op in MOVING and not gathers.fills_with_number(eqn):
        stored = _dtype_of_all(floats, rules.low_dtype)
    decision = (
        decide_product(rules, eqn, floats, readers, path)
        or decide_format(rules, eqn, operands, readers, match)
        or decide_collective(rules, op, match, floats, readers, path)
        or _decide_by_class(rules, op, match, floats, readers, stored)
    )
    # JAX's slope of tanh is ``1 - y**2``: 0 if 16 bits round ``y`` to 1.
    if _loses_slope(op, floats, decision.run):
        # One that runs in float32 has a float32 result: the cast would be a second one.
        is_full = decision.run is Run.FULL and decision.state is State.LOW
        state = State.HARD if is_full else decision.state
        return dataclasses.replace(decision, state=state, keeps_slope=True)
    return decision


def _loses_slope(op: str, operands: Sequence[Facts], run: Run) -> bool:
    """Whether JAX's derivative of an op would lose digits, or save a float32 result."""
    if op == "logistic":  # XLA saves a float32 result in place of the operand.
        return run is Run.LOW
    return op == "tanh" and (run is Run.LOW or bool(operands[0].roots))


def runs_low(rules: RuleLookup, eqn: Eqn, path: str) -> bool:
    """Whether the rules run an equation low, for any operands."""
    op = rules.op_decided_as(eqn, path)
    if not rules.match(op, path).precision.lowers:
        return False
    if op in PRODUCTS and not any(map(structure.is_float, eqn.invars)):
        return False
    return decide_product(rules, eqn, (), Readers.OTHER, path) is None


def follows(match: RuleMatch) -> bool:
    """Whether an op follows, and runs in float32 if all that reads its result does.

    An op with the default precision of the rules does, even if that is ``LOW``.
    """
    if match.precision in (Precision.FOLLOW, Precision.WIDEST):
        return True
    return match.precision is Precision.LOW and match.source is RuleSource.DEFAULT


_NOT_FLOAT32 = Decision(Run.AS_TRACED, None, Reason.NOT_FLOAT32)


def _decide_by_class(
    rules: RuleLookup,
    op: str,
    match: RuleMatch,
    operands: Sequence[Facts],
    readers: Readers,
    stored: Dtype | None,
) -> Decision:
    """Decides by the class of an op, then by its operands and its readers.

    Args:
      rules: the rules, by path.
      op: the name of the op.
      match: the rule that decides it.
      operands: its operands that were traced in float32.
      readers: the readers of its results.
      stored: the 16-bit dtype of all operands of a move of arguments, or None.
    """
    precision = match.precision
    if precision is Precision.KEEP:
        return Decision(Run.AS_TRACED, State.HARD, Reason.RULE, match=match)
    if precision is Precision.LOW and follows(match) and op in MOVING:
        precision = Precision.FOLLOW  # Nothing is computed.
    if precision is Precision.LOW:
        # A rule that names the op or its place is literal: ``erf``, ``div`` and
        # ``sort`` have no late cast then.
        if match.is_explicit:
            return Decision(Run.LOW, State.LOW, Reason.RULE, match=match)
        # Under "O2" ops are low by default. A loss is float32 there, too.
        of_default = follows(match) and _decide_full_by_default(op, operands, readers)
        return of_default or _decide_low(op, operands, Reason.RULE, match=match)
    if precision is Precision.FULL:
        # A rule that says FULL is literal: its result is float32 on purpose.
        of_table = match.source is RuleSource.TABLE
        is_undecided = of_table and _is_undecided(op, operands)
        kept = State.SOFT if is_undecided else State.HARD
        return Decision(Run.FULL, kept, Reason.RULE, match=match)
    state, leader = _join_states(op, precision, operands)
    if op in POSITIONAL and not match.is_explicit:
        # The operand (a position) needs its digits, the result does not.
        return Decision(Run.FULL, State.SOFT, Reason.POSITION)
    # Literal, too: a rule that lets ``exp`` follow, as Ascend's lists do for each op
    # that they do not name.
    if match.is_explicit and state is State.LOW and not readers.demand_float32:
        return Decision(Run.LOW, state, Reason.FOLLOWS, leader)
    if state is State.LOW and _rounds_nothing(op, operands, rules.low_dtype):
        return _decide_low(op, operands, Reason.ROUNDS_NOTHING, leader)
    if state is State.LOW and stored is not None:
        return Decision(Run.LOW, state, Reason.MOVES_16_BITS, leader)
    if state is not State.LOW and stored is not None:
        return Decision(Run.FULL, state, Reason.MOVES_16_BITS, stored=stored)
    if readers.demand_float32:
        kept = State.SOFT if state is State.SOFT else State.HARD
        return Decision(Run.FULL, kept, Reason.READ_IN_FLOAT32)
    if state is State.LOW:
        # The square of an ordinary number leaves a narrow range.
        is_narrow = rules.is_narrow
        return (
            precision is Precision.FOLLOW
            and _decide_full(op, operands, readers, is_narrow)
        ) or _decide_low(op, operands, Reason.FOLLOWS, leader, is_narrow=is_narrow)
    # The end of a norm, ``y * scale``, reads float32 alone. It is marked as a part of
    # the function, so that what leaves it is 16-bit.
    if precision is Precision.FOLLOW and is_one_function(operands):
        return Decision(Run.FULL, State.HARD, Reason.ONE_FUNCTION)
    if state is State.HARD:
        return Decision(Run.FULL, state, Reason.FOLLOWS, leader)
    return Decision(Run.FULL, state, Reason.UNDECIDED)


def _decide_full_by_default(
    op: str, operands: Sequence[Facts], readers: Readers
) -> Decision | None:
    """Decides that an op, low by default, runs in float32; else returns None."""
    if readers.demand_float32:
        return Decision(Run.FULL, State.HARD, Reason.READ_IN_FLOAT32)
    if _is_amplified(op, operands, readers.without_shifts):
        return Decision(Run.FULL, State.SOFT, Reason.AMPLIFIED)
    if _is_undecided(op, operands):
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED)
    # The mean that a norm of ``x`` subtracts is ``sum(x) / n``: under "O2" the quotient
    # would be 16-bit.
    full = [o for o in operands if o.state is State.HARD]
    origins = [params.op_of(o.origin) for o in full if is_equation(o.origin)]
    is_of_norm = bool(origins) and INSIDE_OF_FUNCTIONS.issuperset([op, *origins])
    if is_of_norm and roots_of(operands):
        return Decision(Run.FULL, State.HARD, Reason.FOLLOWS, full[0])
    if is_one_function(operands):
        return Decision(Run.FULL, State.HARD, Reason.ONE_FUNCTION)
    return None


def _is_undecided(op: str, operands: Sequence[Facts]) -> bool:
    """Whether an op is a part of a norm of undecided values alone.

    The norm of an embedding is as undecided as the embedding, and so is the scale that
    a batch norm makes of its running variance: they must not widen a stream.
    """
    return op in INSIDE_OF_FUNCTIONS and all(
        o.state is State.SOFT and o.lineage.roots == frozenset() for o in operands
    )


def _dtype_of_all(operands: Sequence[Facts], low_dtype: Dtype) -> Dtype | None:
    """Returns the dtype of 16 bits or fewer that all operands have, or None.

    At least one of them is stored in it. Numbers that the compute dtype represents
    count as numbers of this dtype.
    """
    if all(o.stored is None for o in operands):
        return None
    found = {low_dtype if _has_16_bits(o) else o.stored for o in operands}
    return found.pop() if len(found) == 1 else None


def _decide_full(
    op: str, operands: Sequence[Facts], readers: Readers, is_narrow: bool
) -> Decision | None:
    """Decides that an op with 16-bit operands runs in float32; else returns None."""
    if _is_amplified(op, operands, readers):
        return Decision(Run.FULL, State.SOFT, Reason.AMPLIFIED)
    if is_narrow and _is_power(op, operands):
        return Decision(Run.FULL, State.HARD, Reason.ONE_FUNCTION)
    states = {o.state for o in operands}
    # A factor that is float32 for its own digits alone, such as ``1 + tanh(...)`` in a
    # gelu, is read in 16 bits: XLA would save it in float32.
    is_scaled = op == "mul" and State.HARD not in states
    if State.LOW in states and not is_scaled and is_one_function(operands):
        return Decision(Run.FULL, State.HARD, Reason.ONE_FUNCTION)
    return None


def _is_amplified(op: str, operands: Sequence[Facts], readers: Readers) -> bool:
    """Whether a reader amplifies the rounding error that 16 bits make in a result.

    A move or a choice of 16-bit numbers makes none. The weaker demands end at a sum of
    two arrays, and that of a shift is for additions alone.
    """
    # The reshape in ``exp(h.reshape(-1))``, the mask of an attention.
    if op in SELECTING and all(map(_has_16_bits, operands)):
        return False
    if readers & Readers.AMPLIFIER or not readers.amplify:
        return readers.amplify
    if op in ADDING:
        # ``tanh(h + 5)`` has a slope of 2e-4: 16 bits lose it in the sum.
        adds_number = any(isinstance(o.origin, NumberOrigin) for o in operands)
        adds_bias = len({operand.shape for operand in operands}) > 1
        return adds_number or (adds_bias and readers.amplify_shifts)
    # bfloat16 rounds ``sigmoid(4)`` = 0.982 to a multiple of 0.004: one digit is left
    # of ``1 - g``.
    is_near_bound = op in SATURATING and bool(readers & Readers.COMPLEMENT)
    return bool(readers & Readers.FACTOR) or is_near_bound


def _has_16_bits(operand: Facts) -> bool:
    return operand.state is State.LOW or operand.kind in (Kind.EXACT, Kind.END)


def _is_power(op: str, operands: Sequence[Facts]) -> bool:
    """Whether an op multiplies functions of one 16-bit value.

    In ``tanh(x * x * x)`` the products leave float16's range for numbers above 255,
    although the result does not. Each is a part of a function of ``x``.
    """
    is_power = op in POWERS
    is_power |= op == "mul" and all(o.lineage.roots for o in operands)
    return is_power and bool(roots_of(operands))


def _decide_low(
    op: str,
    operands: Sequence[Facts],
    reason: Reason,
    leader: Facts | None = None,
    match: RuleMatch | None = None,
    is_narrow: bool = False,
) -> Decision:
    # In float32, with a cast of the result, where 16 bits would be infinite although
    # the result is not: in the derivative of some ops and of a quotient, or in the cast
    # of a computed operand to a dtype of small range. But a float32 operand of a
    # quotient would be a residual in float32.
    computed = [o for o in operands if o.kind.is_cast_once]
    are_low = all(o.state is State.LOW for o in computed)
    is_quotient = op == "div" and not isinstance(operands[-1].origin, NumberOrigin)
    is_cast_late = (
        op in ADDED_UP or (is_quotient and are_low) or (is_narrow and not are_low)
    )
    run = Run.FULL if is_cast_late else Run.LOW
    return Decision(run, State.LOW, reason, leader, match)


def _join_states(
    op: str, precision: AnyPrecision, operands: Sequence[Facts]
) -> tuple[State, Facts | None]:
    """Returns the state of an op that follows, and the operand that it follows.

    The largest state wins: HARD over LOW, LOW over SOFT. Some operands count as less,
    or as more, than their own state.

    Example, in which ``b`` is a float32 bias, ``m`` is ``finfo(float32).min``, and
    ``ids`` are integers::

        x = dot_general h w   a product: LOW
        y = add x b           LOW and SOFT: LOW. A parameter widens no stream
        z = select_n k m y    m is a number that 16 bits cannot represent, and so HARD.
                              As a branch of a selection it means the end of the range,
                              and counts as SOFT: LOW
        t = float32(ids)      deliberate float32: HARD
        q = mul z t           LOW and HARD: HARD
        s = softplus(y)       float32 inside: see ``is_one_function``. An op that reads
                              s and another 16-bit value is no part of that function:
        r = add s x2          s counts as LOW, and r is LOW

    With WIDEST, as in ordinary type promotion, ``b`` counts as HARD, and y is HARD.

    Args:
      op: the name of the op.
      precision: FOLLOW or WIDEST.
      operands: its operands that were traced in float32.
    """
    joined, leader = State.SOFT, None
    # A branch that is the largest or smallest float32 takes the dtype of the other
    # branch, and becomes the largest or smallest number of that dtype.
    ends = op == "select_n" and any(o.state is State.LOW for o in operands)
    leaves = not is_inside_function(op, operands)
    for operand in operands:
        state, kind = operand.state or State.SOFT, operand.kind
        if kind is Kind.END and ends:
            state = State.SOFT
        if operand.lineage.is_rejoined and leaves and precision is Precision.FOLLOW:
            state = State.LOW
        # PyTorch, whose lists the preset "torch" has, widens no tensor for a number.
        widens = kind not in (Kind.LITERAL, Kind.EXACT, Kind.END)
        if precision is Precision.WIDEST and state is State.SOFT and widens:
            state = State.HARD
        if state > joined:
            joined, leader = state, operand
    return joined, leader


def _rounds_nothing(op: str, operands: Sequence[Facts], low_dtype: Dtype) -> bool:
    """Whether an op on 16-bit operands has the same result as in float32.

    This is the case for a choice among 16-bit numbers. In bfloat16, which has float32's
    exponents, it is also the case for a scale by a power of two.
    """
    # The mask of the scores of an attention, which float32 ops alone read: it moves
    # half the bytes in 16 bits.
    if op == "select_n":
        return all(map(_has_16_bits, operands))
    if op not in ("mul", "div") or low_dtype != jnp.bfloat16:
        return False
    if len(operands) < 2:  # The function itself casts the other one to 16 bits.
        return False
    one, other = operands
    if op == "mul" and isinstance(one.origin, NumberOrigin):
        one, other = other, one
    if not isinstance(other.origin, NumberOrigin) or other.kind is not Kind.EXACT:
        return False
    is_power_of_two = abs(np.frexp(other.origin.value)[0]) == 0.5
    return one.state is State.LOW and is_power_of_two


def _has_other_floats(eqn: Eqn, low_dtype: Dtype) -> bool:
    """Whether an op has floating-point operands of another dtype than float32.

    The compute dtype is allowed next to float32.
    """
    others = [
        structure.dtype_of(atom)
        for atom in eqn.invars
        if structure.is_float(atom) and not structure.is_float32(atom)
    ]
    if not others:
        return False
    # Ops of 16-bit arrays alone are the user's: arrays that a function captures, or
    # casts itself.
    has_float32 = any(map(structure.is_float32, eqn.invars))
    return not has_float32 or any(dtype != low_dtype for dtype in others)


# ----------------------------------------------- equations that contain a jaxpr


def decide_to_keep(rules: RuleLookup, eqn: Eqn, path: str) -> Decision | None:
    """Decides whether an equation, and everything inside of it, runs as traced.

    Args:
      rules: the rules, by path.
      eqn: an equation that contains jaxprs.
      path: its path.

    Returns:
      The decision; None if the ops inside are decided one by one.
    """
    # Conjugate gradients to a tolerance take 24 steps in float32, and do not end in
    # bfloat16. The user may know better: a carry rule lets the loop follow.
    op, reason = params.op_of(eqn), None
    if op == "while" and rules.carry(path) != "follow":
        is_low = functools.partial(runs_low, rules)
        reason = Reason.ITERATES if ends_by_a_float(eqn, path, is_low) else None
    # Its solver may end at a tolerance, and its result needs all digits that it has in
    # float32.
    if op == "custom_jvp_call" and params.is_custom_root(eqn):
        reason = Reason.ITERATES
    return Decision(Run.AS_TRACED, State.HARD, reason) if reason else None
