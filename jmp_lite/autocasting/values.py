"""Values: traced arrays while a program runs, cast where an op reads another dtype.

A value is cast when an op reads it in the other dtype, not earlier. A computed value is
cast once for all its readers.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.decide.cast import is_exact_in
from jmp_lite.autocasting.decide.facts import Facts, Spec, State
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.types import Array, Aval, Dtype


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A traced value.

    Attributes:
      array: the array, in the compute dtype if its state is LOW.
      facts: what is known of it.
      cast: the array in the compute dtype, after the first use that needs it.
      upcast: an array of 16 bits in float32, after the first use that needs it.
      rounded: the array as an operand of products, by their number formats, after the
        first such use.
    """

    array: Array
    facts: Facts
    cast: Array | None = None
    upcast: Array | None = None
    rounded: dict[NumberFormat, Array | ProductOperand] = dataclasses.field(
        default_factory=dict
    )


class Casts:
    """Casts values.

    Args:
      low_dtype: the compute dtype.

    Attributes:
      low_dtype: the compute dtype.
      bound: the ops that were bound so far; see ``params.bind``.
    """

    def __init__(self, low_dtype: DTypeLike) -> None:
        self.low_dtype = np.dtype(low_dtype)
        self.bound: set[object] = set()

    def full(self, value: Value) -> Array:
        """Returns the array of a value in its traced dtype."""
        if not value.facts.is_narrow:
            return value.array
        if value.upcast is None:  # Once: the gradients of its uses add up in float32.
            value.upcast = sharding.cast(value.array, jnp.float32)
        return value.upcast

    def low(self, value: Value) -> Array:
        """Returns the array of a value; if it is float32, in the compute dtype."""
        facts, held = value.facts, value.facts.held
        if facts.state is None or facts.state is State.LOW:
            return value.array
        if held is not None and held == self.low_dtype:
            return self.narrowed(value, held)
        if held is not None and is_exact_in(held, self.low_dtype):
            return self._from_few_bits(value, held)
        if not facts.kind.is_cast_once:
            return self.cast(self.full(value), facts.saturates)
        if value.cast is None:  # Once for all uses: each would be kept for backward.
            value.cast = self.cast(self.full(value))
        return value.cast

    def _from_few_bits(self, value: Value, held: Dtype) -> Array:
        """Returns an array that is stored in 8 bits or fewer in the compute dtype.

        XLA fuses one cast into a product, and not two.
        """
        if value.facts.is_shared:
            return self.cast(self.full(value))
        if not jnp.issubdtype(held, jnp.floating):
            return sharding.cast(value.array, self.low_dtype)
        if value.cast is None:  # Once: the gradients of its uses add up in 16 bits.
            value.cast = sharding.cast(value.array, self.low_dtype)
        return value.cast

    def narrowed(self, value: Value, dtype: Dtype) -> Array:
        """Returns the array of a value in a 16-bit dtype."""
        facts = value.facts
        is_low = facts.state is State.LOW and dtype == self.low_dtype
        if is_low or (facts.held == dtype and not facts.is_shared):
            return value.array
        return sharding.cast(self.full(value), dtype)

    def as_spec(self, value: Value, spec: Spec) -> Array:
        """Returns the array of a value with another spec."""
        if spec.held is not None:
            return self.narrowed(value, spec.held)
        return (self.low if spec.state is State.LOW else self.full)(value)

    def typed(self, value: Value, aval: Aval) -> Array:
        """Returns the array of a result; in another dtype if its type has another."""
        if value.facts.state is None or aval.dtype == np.float32:
            return self.full(value)
        return self.narrowed(value, aval.dtype)

    def rounded(
        self, value: Value, number_format: NumberFormat
    ) -> Array | ProductOperand:
        """Returns a value as an operand of a product in a number format."""
        cast = self.full if number_format.takes_float32 else self.low
        if not value.facts.kind.is_cast_once:
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
