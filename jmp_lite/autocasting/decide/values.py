"""Finds the facts of values: of arguments, constants and numbers, and of results.

Some results are functions of one 16-bit value that are computed in float32. A LayerNorm
or a softplus reads a 16-bit value, computes in float32, and reads the value again. Its
result is 16 bits, as the value is; what it computes inside is float32.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import (
    Argument,
    Constant,
    Facts,
    Kind,
    Lineage,
    NumberOrigin,
    Origin,
    RangeEnd,
    Readers,
    Spec,
    State,
)
from jmp_lite.autocasting.rules.match import RuleSource
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Literal, Var
from jmp_lite.ops import INSIDE_OF_FUNCTIONS, MOVING, SCALING, TAKING_SLICES

# --------------------------------------------------- what a program is given


def of_argument(var: Var, aval: Aval, path: str = "") -> Facts:
    """Returns the facts of an argument.

    Args:
      var: its variable.
      aval: the type that it has.
      path: its path in the tree of arguments.
    """
    is_float32 = structure.is_float32(var)
    # A bfloat16 parameter is traced in float32, and its array stays in bfloat16.
    stored = (
        aval.dtype if is_float32 and aval.dtype != structure.dtype_of(var) else None
    )
    spec = Spec(State.SOFT if is_float32 else None, Kind.GIVEN, stored)
    return Facts.of(spec, Argument(path), structure.shape_of(var.aval))


def of_constant(var: Var, array: Array, low_dtype: Dtype) -> Facts:
    """Returns the facts of a constant; HARD if an element is too large for 16 bits.

    Like a number of the program, such a constant saturates if everything is low.
    """
    shape = structure.shape_of(var.aval)
    is_float32 = structure.is_float32(var)
    # For example, an additive mask of -1e9. The numbers of a tracer are not known.
    if is_float32 and not structure.is_tracer(array):
        numbers = np.asarray(array)
        with np.errstate(over="ignore"):
            low = numbers.astype(low_dtype).astype(np.float32)
        too_large = numbers[np.isfinite(numbers) & ~np.isfinite(low)]
        if too_large.size:
            element = NumberOrigin(float(too_large.flat[0]), is_element=True)
            return Facts.of(Spec(State.HARD, Kind.LITERAL), element, shape)
    spec = Spec(State.SOFT if is_float32 else None, Kind.GIVEN)
    return Facts.of(spec, Constant(), shape)


def of_literal(atom: Literal, low_dtype: Dtype) -> Facts:
    """Returns the facts of a number; HARD if 16 bits cannot represent it."""
    shape = structure.shape_of(atom.aval)
    is_real = jnp.issubdtype(structure.dtype_of(atom), jnp.floating)
    # ``where(mask, scores, -100000)`` has an integer, which a cast follows.
    is_real |= structure.is_integer(atom)
    number: Any = as_float32(atom.val) if is_real else None
    fits = not is_real or _fits(number, low_dtype)
    is_exact = is_real and fits and np.float32(number.astype(low_dtype)) == number
    kind = Kind.EXACT if is_exact else Kind.LITERAL
    if not structure.is_float32(atom):
        # A number that does not fit the compute dtype is HARD.
        return Facts.of(Spec(None, kind if fits else Kind.COMPUTED), None, shape)
    # Cast to bfloat16 ``finfo(float32).min`` is -inf, and -inf less -inf is NaN.
    if number in _RANGE_ENDS:
        return Facts.of(Spec(State.HARD, Kind.END), RangeEnd(), shape)
    spec = Spec(State.SOFT if fits else State.HARD, kind)
    return Facts.of(spec, NumberOrigin(float(number)), shape)


_RANGE_ENDS = frozenset(
    map(np.float32, (jnp.finfo("float32").min, jnp.finfo("float32").max))
)


def as_float32(number: float) -> np.float32:
    """Returns a number of the program in float32."""
    with np.errstate(over="ignore"):  # One of 64 bits may be infinite then.
        return np.float32(number)


def _fits(number: np.float32, dtype: Dtype) -> bool:
    """Whether a number does not become infinite, zero or one in a dtype."""
    with np.errstate(over="ignore"):
        low = np.float32(number.astype(dtype))
    if not np.isfinite(number):
        return True
    # ``clip(p, 1e-7, 1 - 1e-7)`` would clip to 0 and 1, of which the logarithm of a
    # cross-entropy is infinite.
    return bool(
        np.isfinite(low) and (low != 0 or number == 0) and (low != 1 or number == 1)
    )


# --------------------------------------------------------------------- results


def of_results(
    eqn: Eqn, operands: Sequence[Facts], decision: Decision, low_dtype: Dtype
) -> list[Facts]:
    """Returns the facts of the results of an equation that has one decision.

    Args:
      eqn: the equation.
      operands: the facts of its operands.
      decision: how it runs.
      low_dtype: the compute dtype.
    """
    leader = decision.leader
    origin = eqn if leader is None else leader.origin
    lineage = lineage_of(decision, [o for o in operands if o.state is not None])
    if params.op_of(eqn) == "convert_element_type":
        return [_of_cast(eqn, operands[0], decision, low_dtype, origin, lineage)]
    if decision.run is Run.PASS:
        return list(params.returned_items(eqn, operands))
    kind = kind_of_results(eqn, [operand.kind for operand in operands])

    def of(var: Var) -> Facts:
        shape = structure.shape_of(var.aval)
        if decision.stored is not None:
            stored = None if decision.state is State.LOW else decision.stored
            spec = Spec(decision.state, kind, stored)
        elif structure.is_float32(var):
            spec = Spec(_state_of_result(eqn, operands, decision), kind)
        else:
            return Facts.of(Spec(None, kind), None, shape)
        return Facts.of(spec, origin, shape, lineage)

    return list(map(of, eqn.outvars))


def _state_of_result(
    eqn: Eqn, operands: Sequence[Facts], decision: Decision
) -> State | None:
    """Returns the state of a float32 result.

    An op without operands of float32, such as a ``bitcast_convert_type``, has the dtype
    of its parameters, whatever was decided.
    """
    is_cast = decision.run is Run.FULL or params.op_of(eqn) in PRODUCTS
    if decision.state is not State.LOW or is_cast:
        return decision.state
    has_floats = any(operand.state is not None for operand in operands)
    return State.LOW if has_floats else State.HARD


def _of_cast(
    eqn: Eqn,
    operand: Facts,
    decision: Decision,
    low_dtype: Dtype,
    origin: Origin,
    lineage: Lineage | None,
) -> Facts:
    """Returns the facts of the result of an existing cast."""
    (var,), (atom,) = eqn.outvars, eqn.invars
    shape = structure.shape_of(var.aval)
    if not structure.is_float32(var):
        is_low = operand.state is State.LOW and structure.dtype_of(var) == low_dtype
        kind = Kind.COMPUTED if is_low else operand.kind
        return Facts.of(Spec(None, kind), None, shape)
    # It is cast once for all readers of both, so it is one value.
    if decision.run is Run.PASS and operand.is_narrow:
        return operand
    if decision.run is Run.LOW:
        return Facts.of(Spec(State.LOW), eqn, shape, lineage)
    is_wide = structure.is_integer(atom) and decision.stored is None
    is_counted = is_wide and decision.state is State.HARD
    kind = Kind.INTEGER if is_counted else operand.kind
    return Facts.of(Spec(decision.state, kind, decision.stored), origin, shape, lineage)


def kind_of_results(eqn: Eqn, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of an equation's results.

    Args:
      eqn: the equation.
      kinds: the kinds of its operands.
    """
    op, found = params.op_of(eqn), set(kinds)
    takes_rows = op in TAKING_SLICES and not structure.is_float32(eqn.outvars[0])
    are_16_bits = takes_rows and structure.is_float(eqn.outvars[0])
    if _takes_one_slice(op, eqn) or are_16_bits:
        # One layer's weights of a stack; many rows of a table are activations, but
        # rows of 16 bits are as exact as the table.
        found = {kinds[0]}
    # Positions: beyond 65,504 they end there in float16, and are not infinite.
    if op == "iota":
        return Kind.INTEGER
    # The phases of the second layer of a SIREN are of sines: their product is 16-bit.
    if Kind.COMPUTED in found or not found:
        return Kind.COMPUTED
    if op in SCALING:
        return Kind.INTEGER if Kind.INTEGER in found else Kind.SCALED
    if op not in MOVING:
        # A table of frequencies, ``2**arange(n)``, by which coordinates are multiplied
        # before a sine.
        are_numbers = found.isdisjoint([Kind.GIVEN, Kind.SCALED])
        is_table = are_numbers and op not in PRODUCTS
        return Kind.SCALED if is_table else Kind.COMPUTED
    order = (Kind.INTEGER, Kind.SCALED, Kind.GIVEN, Kind.END, Kind.LITERAL)
    return next((kind for kind in order if kind in found), Kind.EXACT)


def _takes_one_slice(op: str, eqn: Eqn) -> bool:
    """Whether an op takes one slice of its first operand, at any position."""
    is_one = op == "gather" and len(eqn.invars[1].aval.shape) == 1
    return op == "dynamic_slice" or is_one


# -------------------------------------------------- functions of one 16-bit value


def is_one_function(operands: Sequence[Facts]) -> bool:
    """Whether an op with these operands is part of a function of one 16-bit value.

    In a norm or a softplus, a float32 value is computed from a 16-bit one, and an op
    reads both. That op is part of the function, and so are ops on its result. The
    16-bit value itself is float32 and undecided if an op amplifies its error.

    Example: a LayerNorm of a 16-bit ``x`` that no scope names. The roots of a value
    are the 16-bit values that it is a function of::

        m = mean(x)          FULL: float32, root x
        d = sub x m          reads x (16-bit) and m (float32): one function of x, so
                             float32 and rejoined, although an operand is 16-bit
        v = mean(square(d))  FULL: float32, root x
        r = rsqrt(v + eps)   FULL: float32, root x
        n = mul d r          an operand is rejoined: still one function, float32
        y = mul n g          g is a parameter, which has no roots: float32, rejoined
        z = dot_general y w  a product reads y in 16 bits

    Without the rule, ``d`` would follow ``x``, and lose the digits of the mean. In a
    softplus, ``max(x, 0) + log1p(exp(-abs(x)))``, the sum reads ``max(x, 0)``, which is
    16-bit with root x, and the logarithm, which is float32 with root x: one function of
    x. A sum of functions of two 16-bit values is no such function: it is 16-bit.

    Args:
      operands: the operands that were traced in float32.
    """
    computed = [
        o
        for o in operands
        # In the mask of an attention it is no number, but the end of the range.
        if o.kind is not Kind.END
        and (o.state is not State.SOFT or o.lineage.roots != frozenset())
    ]
    states = {o.state for o in computed}
    is_joined = len(states) > 1 or any(o.lineage.is_rejoined for o in computed)
    # ``tanh(exp(h)) @ w`` reads ``h`` once: no function ends there, and it is float32.
    return is_joined and bool(roots_of(computed))


def is_inside_function(op: str, operands: Sequence[Facts]) -> bool:
    """Whether an op that reads parts of a function is a part of it, too.

    Its arithmetic is, and what reads the 16-bit value again. An activation that reads
    the result of a norm is not.

    Args:
      op: the name of the op.
      operands: the operands that were traced in float32.
    """
    may_be = op in INSIDE_OF_FUNCTIONS or any(o.state is State.LOW for o in operands)
    return may_be and is_one_function(operands)


def roots_of(operands: Iterable[Facts]) -> frozenset[object] | None:
    """Returns the only 16-bit value that operands are functions of, or an empty set.

    None if there are several, or if an operand is float32 for other reasons.
    """
    found = frozenset[object]()
    for operand in operands:
        if operand.lineage.roots is None:
            return None
        found |= operand.lineage.roots
    # ``tanh(exp(x @ w) * (x @ u))`` is a function of two products: float32.
    return found if len(found) <= 1 else None


def lineage_of(decision: Decision, floats: Sequence[Facts]) -> Lineage | None:
    """Returns the lineage of the float32 results of an equation.

    Args:
      decision: the decision for the equation.
      floats: its operands that were traced in float32.
    """
    if decision.run is Run.PASS:  # A cast to float32, or a barrier of several values.
        return floats[0].lineage if decision.leader else None
    roots, match = roots_of(floats), decision.match
    if decision.state is State.SOFT:
        return Lineage(roots) if decision.reason in _TRACKED else None
    if roots is None:
        return None
    if decision.reason is Reason.ONE_FUNCTION:
        return Lineage(roots, is_rejoined=True)
    is_tracked = decision.reason in _TRACKED or (
        decision.reason is Reason.RULE
        and (match and match.source, decision.run) in _TRACKED_RULES
    )
    return Lineage(roots) if is_tracked else None


_TRACKED = (
    Reason.FOLLOWS,
    Reason.ROUNDS_NOTHING,
    Reason.READ_IN_FLOAT32,
    Reason.AMPLIFIED,
    Reason.UNDECIDED,
)

# Under other rules, as ``rules.full("exp")``, float32 is on purpose: no function of 16
# bits ends there.
_TRACKED_RULES = ((RuleSource.TABLE, Run.FULL), (RuleSource.DEFAULT, Run.LOW))


def leave_functions(
    operands: Sequence[Facts], readers: Sequence[Readers]
) -> list[Facts]:
    """Returns values of which the results of functions of one 16-bit value are 16-bit.

    A value that its readers demand in float32 stays float32. So does one that a reader
    amplifies an error of, but it is no longer deliberate.
    """
    return [
        Facts.of(
            Spec(State.SOFT if each.amplify else State.LOW), value.origin, value.shape
        )
        if value.lineage.is_rejoined and not each.demand_float32
        else value
        for value, each in zip(operands, readers, strict=True)
    ]
