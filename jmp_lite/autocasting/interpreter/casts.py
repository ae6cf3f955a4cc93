"""Makes the values of arguments, constants and numbers, and casts them.

A value is cast when an op reads it in the other dtype, not earlier. A computed value is
cast once for all its readers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.decide.facts import (
    Constant,
    Kind,
    Number,
    Origin,
    RangeEnd,
    State,
)
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.formats import Format
from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.types import Array, Dtype, Literal, Var


class Casts:
    """Makes values, and casts them.

    Args:
      low_dtype: the compute dtype.

    Attributes:
      low_dtype: the compute dtype.
      bound: the ops that were bound so far; see ``params.bind``.
    """

    def __init__(self, low_dtype: DTypeLike) -> None:
        self.low_dtype = np.dtype(low_dtype)
        self.bound: set[object] = set()

    def given(self, var: Var, array: Array, origin: Origin) -> Value:
        """Returns the value of an argument or a constant."""
        state = State.SOFT if structure.is_float32(var) else None
        return Value(array, state, Kind.GIVEN, origin=origin)

    def constant(self, var: Var, array: Array) -> Value:
        """Returns a constant's value; HARD if an element is too large for 16 bits."""
        value = self.given(var, array, Constant())
        if value.state is State.SOFT and not structure.is_tracer(array):
            numbers = np.asarray(array)
            with np.errstate(over="ignore"):
                low = numbers.astype(self.low_dtype).astype(np.float32)
            too_large = numbers[np.isfinite(numbers) & ~np.isfinite(low)]
            if too_large.size:
                # Like a number of the program, it saturates if everything is low.
                value.state, value.kind = State.HARD, Kind.LITERAL
                value.origin = Number(float(too_large.flat[0]), is_element=True)
        return value

    def literal(self, atom: Literal) -> Value:
        """Returns the value of a literal; HARD if 16 bits cannot represent it."""
        is_real = jnp.issubdtype(structure.dtype_of(atom), jnp.floating)
        is_real |= structure.is_integer(atom)
        fits = not is_real or _fits(_as_float32(atom.val), self.low_dtype)
        if not structure.is_float32(atom):
            # A number that does not fit the compute dtype is HARD.
            kind = Kind.LITERAL if fits else Kind.COMPUTED
            return Value(structure.as_array(atom.val), None, kind)
        number: Any = _as_float32(atom.val)
        if number in _ENDS:
            return Value(number, State.HARD, Kind.END, origin=RangeEnd())
        state = State.SOFT if fits else State.HARD
        is_exact = fits and np.float32(number.astype(self.low_dtype)) == number
        kind = Kind.EXACT if is_exact else Kind.LITERAL
        return Value(number, state, kind, origin=Number(float(number)))

    def full(self, value: Value) -> Array:
        """Returns the array of a value in its traced dtype."""
        if value.state is not State.LOW:
            return value.array
        if value.raised is None:  # Once: the gradients of its uses add up in float32.
            value.raised = sharding.cast(value.array, jnp.float32)
        return value.raised

    def low(self, value: Value) -> Array:
        """Returns the array of a value; if it is float32, in the compute dtype."""
        if value.state is None or value.state is State.LOW:
            return value.array
        if not value.kind.is_cast_once:
            return self.cast(value.array, value.saturates)
        if value.cast is None:  # Once for all uses: each would be kept for backward.
            value.cast = self.cast(value.array)
        return value.cast

    def rounded(self, value: Value, number_format: Format) -> Any:
        """Returns a value as an operand of a product in a number format."""
        if not value.kind.is_cast_once:
            return number_format.round(self.low(value))
        if number_format not in value.rounded:  # Once for all uses, as its cast.
            value.rounded[number_format] = number_format.round(self.low(value))
        return value.rounded[number_format]

    def cast(self, array: Array, saturates: bool = False) -> Array:
        """Returns an array in the compute dtype."""
        if saturates:
            ends = jnp.finfo(self.low_dtype)
            array = lax.clamp(np.float32(ends.min), array, np.float32(ends.max))
        return sharding.cast(structure.as_array(array), self.low_dtype)


_ENDS = frozenset(map(np.float32, (jnp.finfo("float32").min, jnp.finfo("float32").max)))


def _as_float32(number: float) -> np.float32:
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
