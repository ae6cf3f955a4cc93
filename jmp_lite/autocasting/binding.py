"""Casts values, and runs one equation in the dtype that its ``Decision`` names.

A value is cast when an op reads it in the other dtype, not earlier. A computed value is
cast once for all its readers.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting.decide.decisions import Decision, Run
from jmp_lite.autocasting.decide.facts import Facts, Spec, State
from jmp_lite.autocasting.decide.special_ops import decided_precision, is_exact_in
from jmp_lite.formats.number_format import NumberFormat, Product
from jmp_lite.jaxprs import params, sharding, structure
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn
from jmp_lite.ops import ADDED_UP, BROADCASTING, KEEPING_NUMBERS, MOVING

# ---------------------------------------------------------------------------- values


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
        facts, stored = value.facts, value.facts.stored
        if facts.state is None or facts.state is State.LOW:
            return value.array
        if stored is not None and stored == self.low_dtype:
            return self.narrowed(value, stored)
        if stored is not None and is_exact_in(stored, self.low_dtype):
            return self._from_few_bits(value, stored)
        # A parameter, at each use: with one cast for all 2,048 steps of a scan, the
        # gradient of a weight was 41 % wrong, and 0.17 % with a cast at each use.
        if not facts.kind.is_cast_once:
            return self.cast(self.full(value), facts.saturates)
        if value.cast is None:  # Once for all uses: each would be kept for backward.
            value.cast = self.cast(self.full(value))
        return value.cast

    def _from_few_bits(self, value: Value, stored: Dtype) -> Array:
        """Returns an array that is stored in 8 bits or fewer in the compute dtype.

        XLA fuses one cast into a product, and not two.
        """
        if value.facts.is_shared:
            return self.cast(self.full(value))
        # Integers have no gradients that could add up in 16 bits.
        if not jnp.issubdtype(stored, jnp.floating):
            return sharding.cast(value.array, self.low_dtype)
        if value.cast is None:  # Once: the gradients of its uses add up in 16 bits.
            value.cast = sharding.cast(value.array, self.low_dtype)
        return value.cast

    def narrowed(self, value: Value, dtype: Dtype) -> Array:
        """Returns the array of a value in a 16-bit dtype."""
        facts = value.facts
        is_low = facts.state is State.LOW and dtype == self.low_dtype
        if is_low or (facts.stored == dtype and not facts.is_shared):
            return value.array
        return sharding.cast(self.full(value), dtype)

    def as_spec(self, value: Value, spec: Spec) -> Array:
        """Returns the array of a value with another spec."""
        if spec.stored is not None:
            return self.narrowed(value, spec.stored)
        return (self.low if spec.state is State.LOW else self.full)(value)

    def typed(self, value: Value, aval: Aval) -> Array:
        """Returns the array of a result; in another dtype if its type has another."""
        # A function of 16-bit arguments has 16-bit results, as without autocast.
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
        # A mask of -1e9 or 70,000 in float16: infinities would make NaN of masked rows.
        if saturates:
            ends = jnp.finfo(self.low_dtype)
            array = lax.clamp(np.float32(ends.min), array, np.float32(ends.max))
        return sharding.cast(structure.as_array(array), self.low_dtype)


# ------------------------------------------------------------------------- equations


def evaluate(
    casts: Casts, eqn: Eqn, decision: Decision, operands: Sequence[Value]
) -> list[Array]:
    """Returns the results of an equation that contains no jaxpr with a plan.

    Args:
      casts: casts values.
      eqn: the equation.
      decision: how it runs.
      operands: its operands.
    """
    op, run = params.op_of(eqn), decision.run
    if op == "convert_element_type":
        return [_run_cast(casts, eqn, operands[0], decision)]
    if run is Run.PASS:
        return params.bind(eqn, [value.array for value in operands], casts.bound)
    if decision.stored is not None:
        lowers_sum = decision.lowers_sum
        return _run_move(casts, eqn, operands, decision.stored, lowers_sum)
    if decision.keeps_slope:
        read = casts.low if run is Run.LOW else casts.full
        return [_run_tanh_or_logistic(eqn, read(operands[0]), casts.bound)]
    if run is Run.LOW and op in PRODUCTS:
        return [_run_product(casts, eqn, operands, decision.number_format)]
    if run is Run.LOW:
        return _run_low(casts, eqn, operands)
    # For example a quotient, in whose derivative ``b**-2`` leaves float16's range.
    if run is Run.FULL and decision.state is State.LOW:
        return _run_full_then_cast(casts, eqn, operands)
    full = [casts.full(value) for value in operands]
    # At the default precision a TPU multiplies bfloat16, and an H100 TF32.
    if op in PRODUCTS and run is Run.FULL:
        precision = decided_precision(eqn, decision)
        return params.bind_in(eqn, full, None, precision, casts.bound)
    return params.bind(eqn, full, casts.bound)


def _run_move(
    casts: Casts, eqn: Eqn, operands: Sequence[Value], stored: Dtype, lowers_sum: bool
) -> list[Array]:
    """Returns moves in 16 bits.

    Args:
      casts: casts values.
      eqn: the equation.
      operands: the values of its operands.
      stored: the dtype.
      lowers_sum: whether the derivative is in 16 bits, although it is a sum.
    """
    op = params.op_of(eqn)
    has_sum, is_spread = op in ADDED_UP and not lowers_sum, op in KEEPING_NUMBERS
    has_sum &= jnp.issubdtype(stored, jnp.floating)
    # Numbers of 8 bits would be rounded to them again.
    if has_sum and is_spread and stored.itemsize > 1:
        # Broadcast in float32, then cast: JAX's transpose of it is a sum.
        full = params.bind(eqn, [casts.full(value) for value in operands], casts.bound)
        return [sharding.cast(array, stored) for array in full]
    # Rows of a bfloat16 table: the gradient of a frequent token would stop at 256.
    if has_sum:
        arrays = [
            casts.narrowed(value, stored) if value.facts.is_narrow else value.array
            for value in operands
        ]
        return _run_linear_move(casts, eqn, arrays, stored)
    arrays = [
        value.array if value.facts.state is None else casts.narrowed(value, stored)
        for value in operands
    ]
    return params.bind_in(eqn, arrays, stored, bound=casts.bound)


def _run_linear_move(
    casts: Casts, eqn: Eqn, arrays: Sequence[Array], stored: Dtype
) -> list[Array]:
    """Returns a move in 16 bits whose transpose, a sum, is float32."""
    # Not the indices of a gather.
    numbers = [i for i, atom in enumerate(eqn.invars) if structure.is_float32(atom)]

    @jax.custom_jvp
    def move(*arrays: Array) -> list[Array]:
        low = list(arrays)
        for i in numbers:
            low[i] = sharding.cast(low[i], stored)
        return params.bind_in(eqn, low, stored, bound=casts.bound)

    @move.defjvp
    def jvp(  # pyright: ignore[reportUnusedFunction]
        primals: Sequence[Array], tangents: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        along = list(primals)
        for i in numbers:
            along[i] = sharding.cast(tangents[i], np.float32)
        moved = params.bind(eqn, along)  # A move is its own derivative.
        return move(*primals), [sharding.cast(tangent, stored) for tangent in moved]

    return move(*arrays)


def _run_full_then_cast(
    casts: Casts, eqn: Eqn, operands: Sequence[Value]
) -> list[Array]:
    saturates = any(value.facts.saturates for value in operands)

    def run_full(*full: Array) -> list[Array]:
        return [
            casts.cast(array, saturates) if structure.is_float32(var) else array
            for var, array in zip(
                eqn.outvars, params.bind(eqn, full, casts.bound), strict=True
            )
        ]

    # A move saves no operand for its derivative.
    if params.op_of(eqn) in MOVING:
        return run_full(*map(casts.full, operands))

    def run_arrays(*arrays: Array) -> list[Array]:
        return run_full(
            *(
                casts.full(Value(array, value.facts))
                for array, value in zip(arrays, operands, strict=True)
            )
        )

    # The residuals are its operands in 16 bits.
    again = jax.checkpoint(run_arrays, prevent_cse=False)
    return again(*(value.array for value in operands))


def _run_low(casts: Casts, eqn: Eqn, operands: Sequence[Value]) -> list[Array]:
    op, shape = params.op_of(eqn), eqn.outvars[0].aval.shape
    arrays: list[Array] = []
    for value in operands:
        facts = value.facts
        is_spread = op in BROADCASTING and not facts.is_number
        if facts.state is not None and is_spread and value.array.shape != shape:
            # Broadcast in float32, then cast: JAX's transpose of it is a sum.
            full = _broadcast(casts.full(value), shape)
            arrays.append(casts.cast(full, facts.saturates))
        else:
            arrays.append(casts.low(value))
    # JAX has traced their combiner for float32.
    if op in params.SCATTERS:
        return [params.bind_scatter(eqn, arrays)]
    return params.bind_in(eqn, arrays, casts.low_dtype, bound=casts.bound)


def _run_product(
    casts: Casts, eqn: Eqn, operands: Sequence[Value], number_format: NumberFormat
) -> Array:
    weights = tuple(value.facts.is_weight for value in operands)
    rounded = [casts.rounded(value, number_format) for value in operands[:2]]
    others = [value.array for value in operands[2:]]  # The sizes of groups.
    product = Product(eqn, casts.low_dtype, weights)
    return number_format.multiply(product, [*rounded, *others], casts.bound)


def _run_cast(casts: Casts, eqn: Eqn, value: Value, decision: Decision) -> Array:
    """Returns the result of an existing cast, which changes no 16-bit value."""
    (var,), (atom,), facts = eqn.outvars, eqn.invars, value.facts
    dtype, is_low = structure.dtype_of(var), facts.state is State.LOW
    if not structure.is_float32(var):
        if is_low and dtype == casts.low_dtype:
            return value.array
        if facts.stored is not None and dtype == facts.stored:
            return casts.narrowed(value, facts.stored)
    elif decision.run is Run.LOW:
        if is_low or structure.dtype_of(atom) == casts.low_dtype:
            return value.array
        (array,) = params.bind(eqn, [value.array], casts.bound)
        # An integer beyond 65,504 ends there in float16.
        return casts.cast(array, facts.saturates or structure.is_integer(atom))
    elif decision.stored is not None:
        return value.array
    (array,) = params.bind(eqn, [casts.full(value)], casts.bound)
    return array


def _broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts a scalar, or axes of size 1, to a shape."""
    dims = range(len(shape)) if jnp.ndim(array) else ()
    return lax.broadcast_in_dim(array, shape, tuple(dims))


def _run_tanh_or_logistic(eqn: Eqn, operand: Array, bound: set[object] | None) -> Array:
    """Returns tanh or the logistic function, with a derivative from the operand.

    JAX computes it from the result, as ``1 - y**2`` or ``y * (1 - y)``. A 16-bit result
    close to 1 has lost the digits of ``1 - y``. A float32 result would be saved for the
    backward pass, beside the 16-bit value that the operand is computed from.

    Args:
      eqn: the equation.
      operand: its operand, in float32 or the compute dtype.
      bound: see ``params.bind``.
    """
    dtype = operand.dtype

    @jax.custom_jvp
    def function(x: Array) -> Array:
        return params.bind_in(eqn, [x], dtype, bound=bound)[0]

    @function.defjvp
    def jvp(  # pyright: ignore[reportUnusedFunction]
        primals: tuple[Array], tangents: tuple[Array]
    ) -> tuple[Array, Array]:
        (x,), (tangent,) = primals, tangents
        full = sharding.cast(x, np.float32)
        is_tanh = params.op_of(eqn) == "tanh"
        slope = 4 * _slope(2 * full) if is_tanh else _slope(full)
        # The slope is saved for the backward pass, in the dtype of the operand.
        return function(x), tangent * sharding.cast(slope, dtype)

    return function(operand)


@jax.custom_jvp
def _slope(x: Array) -> Array:
    """The slope of the logistic function, without cancellation or overflow.

    It has one exponential. With two, XLA for GPUs writes a float32 array of them.
    """
    small = lax.exp(-lax.abs(x))
    return small / ((1 + small) * (1 + small))


@_slope.defjvp
def _slope_jvp(  # pyright: ignore[reportUnusedFunction]
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    # Not that of abs, whose second derivative at 0 would be lost.
    ((x,), (tangent,)), slope = (primals, tangents), _slope(*primals)
    return slope, -tangent * slope * lax.tanh(x / 2)
