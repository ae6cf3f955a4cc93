"""Makes the values of arguments, constants and numbers, and casts them.

A value is cast when an op reads it in the other dtype, not earlier. A computed value is
cast once for all its readers.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.decide import given
from jmp_lite.autocasting.decide.cast import is_exact_in
from jmp_lite.autocasting.decide.facts import (
    Origin,
    State,
)
from jmp_lite.autocasting.decide.given import GivenFacts
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Literal, Var


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
        """Returns the value of an argument."""
        value = _make_value(array, given.argument(var, origin))
        if value.state is not None:
            dtype = structure.type_of_value(array).dtype
            value.held = None if dtype == structure.dtype_of(var) else dtype
        return value

    def constant(self, var: Var, array: Array) -> Value:
        """Returns the value of a constant."""
        return _make_value(array, given.constant(var, array, self.low_dtype))

    def literal(self, atom: Literal) -> Value:
        """Returns the value of a literal."""
        found = given.literal(atom, self.low_dtype)
        is_float32 = found.state is not None
        number = given.as_float32(atom.val) if is_float32 else atom.val
        return _make_value(structure.as_array(number), found)

    def full(self, value: Value) -> Array:
        """Returns the array of a value in its traced dtype."""
        if value.state is not State.LOW and value.held is None:
            return value.array
        if value.upcast is None:  # Once: the gradients of its uses add up in float32.
            value.upcast = sharding.cast(value.array, jnp.float32)
        return value.upcast

    def low(self, value: Value) -> Array:
        """Returns the array of a value; if it is float32, in the compute dtype."""
        if value.state is None or value.state is State.LOW:
            return value.array
        if value.held is not None and value.held == self.low_dtype:
            return self.narrowed(value, value.held)
        if value.held is not None and is_exact_in(value.held, self.low_dtype):
            return self._from_few_bits(value, value.held)
        if not value.kind.is_cast_once:
            return self.cast(self.full(value), value.saturates)
        if value.cast is None:  # Once for all uses: each would be kept for backward.
            value.cast = self.cast(self.full(value))
        return value.cast

    def _from_few_bits(self, value: Value, held: Dtype) -> Array:
        """Returns an array that is stored in 8 bits or fewer in the compute dtype.

        XLA fuses one cast into a product, and not two.
        """
        if value.is_shared:
            return self.cast(self.full(value))
        if not jnp.issubdtype(held, jnp.floating):
            return sharding.cast(value.array, self.low_dtype)
        if value.cast is None:  # Once: the gradients of its uses add up in 16 bits.
            value.cast = sharding.cast(value.array, self.low_dtype)
        return value.cast

    def narrowed(self, value: Value, dtype: Dtype) -> Array:
        """Returns the array of a value in a 16-bit dtype."""
        is_low = value.state is State.LOW and dtype == self.low_dtype
        if is_low or (value.held == dtype and not value.is_shared):
            return value.array
        return sharding.cast(self.full(value), dtype)

    def typed(self, value: Value, aval: Aval) -> Array:
        """Returns the array of a result; in another dtype if its type has another."""
        if value.state is None or aval.dtype == np.float32:
            return self.full(value)
        return self.narrowed(value, aval.dtype)

    def cast_to_state(self, value: Value, state: State | None) -> Value:
        """Returns a value in another state, without its kind and its lineage."""
        array = self.low(value) if state is State.LOW else self.full(value)
        return Value(array, state, origin=value.origin)

    def rounded(
        self, value: Value, number_format: NumberFormat
    ) -> Array | ProductOperand:
        """Returns a value as an operand of a product in a number format."""
        cast = self.full if number_format.takes_float32 else self.low
        if not value.kind.is_cast_once:
            return number_format.round(cast(value))
        if number_format not in value.rounded:  # Once for all uses, as its cast.
            value.rounded[number_format] = number_format.round(cast(value))
        return value.rounded[number_format]

    def cast(self, array: Array, saturates: bool = False) -> Array:
        """Returns an array in the compute dtype."""
        if saturates:
            ends = jnp.finfo(self.low_dtype)
            array = lax.clamp(np.float32(ends.min), array, np.float32(ends.max))
        return sharding.cast(structure.as_array(array), self.low_dtype)


def _make_value(array: Array, found: GivenFacts) -> Value:
    return Value(array, found.state, found.kind, origin=found.origin)
