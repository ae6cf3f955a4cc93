"""Decides the state and the kind of the results of an equation that has run."""

from collections.abc import Sequence

from jmp_lite.autocasting.decide.facts import Kind, State
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.params import PRODUCTS
from jmp_lite.jaxprs.types import Eqn
from jmp_lite.ops import MOVING, SCALING, TAKING_SLICES


def state_of_result(state: State | None, is_low: bool) -> State | None:
    """Returns the state of a float32 result, given the dtype that it has.

    Some ops choose the dtype of their result, whatever was decided.

    Args:
      state: the state that was decided.
      is_low: whether the result is in the compute dtype.
    """
    if is_low == (state is State.LOW):
        return state
    return State.LOW if is_low else State.HARD


def kind_of_result(eqn: Eqn, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of an equation's results.

    Args:
      eqn: the equation.
      kinds: the kinds of its operands.
    """
    op, found = params.op_of(eqn), set(kinds)
    if _takes_one_slice(op, eqn) or _takes_rows_of_16_bits(op, eqn):
        # One layer's weights of a stack; many rows of a table are activations, but
        # rows of 16 bits are as exact as the table.
        found = {kinds[0]}
    if op == "iota":
        return Kind.INTEGER
    if Kind.COMPUTED in found or not found:
        return Kind.COMPUTED
    if op in SCALING:
        return Kind.INTEGER if Kind.INTEGER in found else Kind.SCALED
    if op not in MOVING:
        are_numbers = found.isdisjoint([Kind.GIVEN, Kind.SCALED])
        is_table = are_numbers and op not in PRODUCTS
        return Kind.SCALED if is_table else Kind.COMPUTED
    order = (Kind.INTEGER, Kind.SCALED, Kind.GIVEN, Kind.END, Kind.LITERAL)
    return next((kind for kind in order if kind in found), Kind.EXACT)


def _takes_rows_of_16_bits(op: str, eqn: Eqn) -> bool:
    if op not in TAKING_SLICES:
        return False
    (var,) = eqn.outvars
    return structure.is_float(var) and not structure.is_float32(var)


def _takes_one_slice(op: str, eqn: Eqn) -> bool:
    """Whether an op takes one slice of its first operand, at any position."""
    is_one = op == "gather" and len(eqn.invars[1].aval.shape) == 1
    return op == "dynamic_slice" or is_one
