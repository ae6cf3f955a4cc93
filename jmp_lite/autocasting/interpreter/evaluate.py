"""Evaluates one equation in the dtype that its ``Decision`` names."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.decide.decisions import Decision, Run
from jmp_lite.autocasting.decide.facts import Kind, Origin, State
from jmp_lite.autocasting.decide.product import decided_precision
from jmp_lite.autocasting.decide.result import kind_of_result, state_of_result
from jmp_lite.autocasting.interpreter import slopes
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.formats.number_format import NumberFormat, Product
from jmp_lite.jaxprs import params, sharding, structure
from jmp_lite.jaxprs.params import PRODUCTS
from jmp_lite.jaxprs.types import Array, Dtype, Eqn, Var
from jmp_lite.ops import ADDED_UP, BROADCASTING, KEEPING_NUMBERS, MOVING


def evaluate(
    casts: Casts,
    eqn: Eqn,
    operands: Sequence[Value],
    decision: Decision,
    origin: Origin,
) -> list[Value]:
    """Evaluates an equation in the dtype that was decided.

    Args:
      casts: casts values.
      eqn: the equation.
      operands: the values of its operands.
      decision: the decision.
      origin: the origin of the state of its results.
    """
    op = params.op_of(eqn)
    if op == "convert_element_type":
        return [_run_cast(casts, eqn, operands[0], decision, origin)]
    if decision.run is Run.PASS:
        arrays = params.bind(eqn, [value.array for value in operands], casts.bound)
        return [
            dataclasses.replace(value, array=array, cast=None, upcast=None, rounded={})
            for array, value in zip(
                arrays, params.returned_items(eqn, operands), strict=True
            )
        ]
    kind = kind_of_result(eqn, [value.kind for value in operands])
    if (held := decision.held) is not None:
        moved = _run_move(casts, eqn, operands, held, decision.lowers_sum)
        if decision.state is State.LOW:
            held = None
        return [
            Value(array, decision.state, kind, held, origin=origin) for array in moved
        ]
    if slopes.are_lost(op, operands, decision.run):
        read = casts.low if decision.run is Run.LOW else casts.full
        arrays = [slopes.bind(eqn, read(operands[0]), casts.bound)]
    elif decision.run is Run.LOW and op in PRODUCTS:
        arrays = [_run_product(casts, eqn, operands, decision.number_format)]
    elif decision.run is Run.LOW:
        arrays = _run_low(casts, eqn, operands)
    elif decision.run is Run.FULL and decision.state is State.LOW:
        arrays = _run_full_then_cast(casts, eqn, operands)
    else:
        full = [casts.full(value) for value in operands]
        if op in PRODUCTS and decision.run is Run.FULL:
            precision = decided_precision(eqn, decision)
            arrays = params.bind_in(eqn, full, None, precision, casts.bound)
        else:
            arrays = params.bind(eqn, full, casts.bound)
    return [
        _make_result(casts, var, array, decision.state, kind, origin)
        for var, array in zip(eqn.outvars, arrays, strict=True)
    ]


def _run_move(
    casts: Casts, eqn: Eqn, operands: Sequence[Value], held: Dtype, lowers_sum: bool
) -> list[Array]:
    """Returns moves in 16 bits.

    Args:
      casts: casts values.
      eqn: the equation.
      operands: the values of its operands.
      held: the dtype.
      lowers_sum: whether the derivative is in 16 bits, although it is a sum.
    """
    op = params.op_of(eqn)
    has_sum, is_spread = op in ADDED_UP and not lowers_sum, op in KEEPING_NUMBERS
    has_sum &= jnp.issubdtype(held, jnp.floating)
    # Numbers of 8 bits would be rounded to them again.
    if has_sum and is_spread and held.itemsize > 1:
        # Broadcast in float32, then cast: JAX's transpose of it is a sum.
        full = params.bind(eqn, [casts.full(value) for value in operands], casts.bound)
        return [sharding.cast(array, held) for array in full]
    if has_sum:
        arrays = [
            casts.narrowed(value, held) if value.is_narrow else value.array
            for value in operands
        ]
        return _run_linear_move(casts, eqn, arrays, held)
    arrays = [
        value.array if value.state is None else casts.narrowed(value, held)
        for value in operands
    ]
    return params.bind_in(eqn, arrays, held, bound=casts.bound)


def _run_linear_move(
    casts: Casts, eqn: Eqn, arrays: Sequence[Array], held: Dtype
) -> list[Array]:
    """Returns a move in 16 bits whose transpose, a sum, is float32."""
    numbers = [i for i, atom in enumerate(eqn.invars) if structure.is_float32(atom)]

    @jax.custom_jvp
    def move(*arrays: Array) -> list[Array]:
        low = list(arrays)
        for i in numbers:
            low[i] = sharding.cast(low[i], held)
        return params.bind_in(eqn, low, held, bound=casts.bound)

    @move.defjvp
    def jvp(  # pyright: ignore[reportUnusedFunction]
        primals: Sequence[Array], tangents: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        along = list(primals)
        for i in numbers:
            along[i] = sharding.cast(tangents[i], np.float32)
        moved = params.bind(eqn, along)  # A move is its own derivative.
        return move(*primals), [sharding.cast(tangent, held) for tangent in moved]

    return move(*arrays)


def _run_full_then_cast(
    casts: Casts, eqn: Eqn, operands: Sequence[Value]
) -> list[Array]:
    saturates = any(value.saturates for value in operands)

    def run_full(*full: Array) -> list[Array]:
        return [
            casts.cast(array, saturates) if structure.is_float32(var) else array
            for var, array in zip(
                eqn.outvars, params.bind(eqn, full, casts.bound), strict=True
            )
        ]

    if params.op_of(eqn) in MOVING:
        return run_full(*map(casts.full, operands))

    def run_arrays(*arrays: Array) -> list[Array]:
        return run_full(
            *(
                casts.full(Value(array, value.state, held=value.held))
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
        is_spread = op in BROADCASTING and not value.is_number
        if value.state is not None and is_spread and value.array.shape != shape:
            # Broadcast in float32, then cast: JAX's transpose of it is a sum.
            full = _broadcast(casts.full(value), shape)
            arrays.append(casts.cast(full, value.saturates))
        else:
            arrays.append(casts.low(value))
    if op in params.SCATTERS:
        return [params.bind_scatter(eqn, arrays)]
    return params.bind_in(eqn, arrays, casts.low_dtype, bound=casts.bound)


def _run_product(
    casts: Casts, eqn: Eqn, operands: Sequence[Value], number_format: NumberFormat
) -> Array:
    weights = tuple(value.kind is Kind.GIVEN for value in operands)
    rounded = [casts.rounded(value, number_format) for value in operands[:2]]
    others = [value.array for value in operands[2:]]  # The sizes of groups.
    product = Product(eqn, casts.low_dtype, weights)
    return number_format.multiply(product, [*rounded, *others], casts.bound)


def _make_result(
    casts: Casts,
    var: Var,
    array: Array,
    state: State | None,
    kind: Kind,
    origin: Origin,
) -> Value:
    if not structure.is_float32(var):
        return Value(array, None, kind)
    state = state_of_result(state, array.dtype == casts.low_dtype)
    return Value(array, state, kind, origin=origin)


def _run_cast(
    casts: Casts, eqn: Eqn, value: Value, decision: Decision, origin: Origin
) -> Value:
    """Returns the result of an existing cast."""
    (var,), atom = eqn.outvars, eqn.invars[0]
    if not structure.is_float32(var):
        dtype = structure.dtype_of(var)
        if value.state is State.LOW and dtype == casts.low_dtype:
            return Value(value.array)
        if value.held is not None and dtype == value.held:
            return Value(casts.narrowed(value, value.held), None, value.kind)
        (array,) = params.bind(eqn, [casts.full(value)], casts.bound)
        return Value(array, None, value.kind)
    if decision.run is Run.PASS and value.is_narrow:
        return value
    if decision.run is Run.LOW:
        if value.state is State.LOW or structure.dtype_of(atom) == casts.low_dtype:
            return Value(value.array, State.LOW, origin=eqn)
        (array,) = params.bind(eqn, [value.array], casts.bound)
        saturates = value.saturates or structure.is_integer(atom)
        return Value(casts.cast(array, saturates), State.LOW, origin=eqn)
    array = value.array
    if decision.held is None:
        (array,) = params.bind(eqn, [casts.full(value)], casts.bound)
    is_wide = structure.is_integer(atom) and decision.held is None
    is_counted = is_wide and decision.state is State.HARD
    kind = Kind.INTEGER if is_counted else value.kind
    return Value(array, decision.state, kind, decision.held, origin=origin)


def _broadcast(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts a scalar, or axes of size 1, to a shape."""
    dims = range(len(shape)) if jnp.ndim(array) else ()
    return lax.broadcast_in_dim(array, shape, tuple(dims))
