"""Decides the states of what a program is given: arguments, constants, and numbers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.facts import (
    Constant,
    Kind,
    NumberOrigin,
    Origin,
    RangeEnd,
    State,
)
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Array, Dtype, Literal, Var


class GivenFacts(NamedTuple):
    """What is known of a given value.

    Attributes:
      state: its state; None if it was not traced in float32.
      kind: its kind.
      origin: its origin.
    """

    state: State | None
    kind: Kind
    origin: Origin = None


def argument(var: Var, origin: Origin) -> GivenFacts:
    """Returns what is known of an argument."""
    state = State.SOFT if structure.is_float32(var) else None
    return GivenFacts(state, Kind.GIVEN, origin)


def constant(var: Var, array: Array, low_dtype: Dtype) -> GivenFacts:
    """Returns what is known of a constant; HARD if an element is too large for 16 bits.

    Like a number of the program, such a constant saturates if everything is low.
    """
    given = argument(var, Constant())
    if given.state is not State.SOFT or structure.is_tracer(array):
        return given
    numbers = np.asarray(array)
    with np.errstate(over="ignore"):
        low = numbers.astype(low_dtype).astype(np.float32)
    too_large = numbers[np.isfinite(numbers) & ~np.isfinite(low)]
    if not too_large.size:
        return given
    element = NumberOrigin(float(too_large.flat[0]), is_element=True)
    return GivenFacts(State.HARD, Kind.LITERAL, element)


def literal(atom: Literal, low_dtype: Dtype) -> GivenFacts:
    """Returns what is known of a literal; HARD if 16 bits cannot represent it."""
    is_real = jnp.issubdtype(structure.dtype_of(atom), jnp.floating)
    is_real |= structure.is_integer(atom)
    number: Any = as_float32(atom.val) if is_real else None
    fits = not is_real or _fits(number, low_dtype)
    is_exact = is_real and fits and np.float32(number.astype(low_dtype)) == number
    kind = Kind.EXACT if is_exact else Kind.LITERAL
    if not structure.is_float32(atom):
        # A number that does not fit the compute dtype is HARD.
        return GivenFacts(None, kind if fits else Kind.COMPUTED)
    if number in _RANGE_ENDS:
        return GivenFacts(State.HARD, Kind.END, RangeEnd())
    return GivenFacts(
        State.SOFT if fits else State.HARD, kind, NumberOrigin(float(number))
    )


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
    return bool(
        np.isfinite(low) and (low != 0 or number == 0) and (low != 1 or number == 1)
    )
