"""Evaluates one equation with its operands cast as its ``Decision`` says."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.autocasting.decide.decisions import Decision, Run
from jmp_lite.autocasting.decide.facts import Kind, Origin, State
from jmp_lite.autocasting.decide.result import kind_of_result, state_of_result
from jmp_lite.autocasting.interpreter import float8
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.jaxprs import cost, params, structure
from jmp_lite.jaxprs.types import Array, Eqn, Var
from jmp_lite.ops import BROADCASTING, MOVING


def evaluate(
    casts: Casts,
    eqn: Eqn,
    operands: Sequence[Value],
    decision: Decision,
    origin: Origin,
) -> list[Value]:
    """Evaluates an equation as its decision says.

    Args:
      casts: casts values.
      eqn: the equation.
      operands: the values of its operands.
      decision: the decision.
      origin: the origin of the state of its results.
    """
    op = params.op_of(eqn)
    if op == "convert_element_type":
        return [_cast(casts, eqn, operands[0], decision, origin)]
    if decision.run is Run.PASS:
        arrays = params.bind(eqn, [value.array for value in operands], casts.bound)
        return [
            dataclasses.replace(
                value, array=array, cast=None, raised=None, quantized=None
            )
            for array, value in zip(arrays, params.passed(eqn, operands), strict=True)
        ]
    kind = kind_of_result(eqn, [value.kind for value in operands])
    if decision.run is Run.LOW:
        arrays = _in_low(casts, eqn, operands)
    elif decision.run is Run.FLOAT8:
        arrays = [_in_float8(casts, eqn, operands)]
    elif decision.run is Run.FULL and decision.state is State.LOW:
        arrays = _in_full_then_low(casts, eqn, operands)
    else:
        arrays = params.bind(
            eqn, [casts.full(value) for value in operands], casts.bound
        )
    return [
        _value(casts, var, array, decision.state, kind, origin)
        for var, array in zip(eqn.outvars, arrays, strict=True)
    ]


def _in_full_then_low(casts: Casts, eqn: Eqn, operands: Sequence[Value]) -> list[Array]:
    saturates = any(value.saturates for value in operands)

    def in_full(*full: Array) -> list[Array]:
        return [
            casts.cast(array, saturates) if structure.is_float32(var) else array
            for var, array in zip(
                eqn.outvars, params.bind(eqn, full, casts.bound), strict=True
            )
        ]

    if params.op_of(eqn) in MOVING:
        return in_full(*map(casts.full, operands))

    def from_arrays(*arrays: Array) -> list[Array]:
        return in_full(
            *(
                casts.full(Value(array, value.state))
                for array, value in zip(arrays, operands, strict=True)
            )
        )

    # The residuals are its operands in 16 bits.
    again = jax.checkpoint(from_arrays, prevent_cse=False)
    return again(*(value.array for value in operands))


def _in_low(casts: Casts, eqn: Eqn, operands: Sequence[Value]) -> list[Array]:
    op, shape = params.op_of(eqn), eqn.outvars[0].aval.shape
    arrays: list[Array] = []
    for value in operands:
        is_spread = op in BROADCASTING and not value.is_number
        if value.state is not None and is_spread and value.array.shape != shape:
            # In float32, with a cast after it: its transpose in JAX is a sum.
            full = _spread(casts.full(value), shape)
            arrays.append(casts.cast(full, value.saturates))
        else:
            arrays.append(casts.low(value))
    if op in params.SCATTERS:
        return [params.bind_scatter(eqn, arrays)]
    algorithm = None
    if casts.low_dtype == jnp.bfloat16 and _is_of_matrices(eqn):
        # Without an algorithm the compiler chooses the dtype of the sum; a TPU v7x
        # chooses bfloat16. No algorithm for float16 runs on every platform.
        algorithm = lax.DotAlgorithmPreset.BF16_BF16_F32
    return params.bind_in(eqn, arrays, casts.low_dtype, algorithm, casts.bound)


def _in_float8(casts: Casts, eqn: Eqn, operands: Sequence[Value]) -> Array:
    lhs, rhs = map(casts.quantized, operands)
    if operands[1].kind is Kind.GIVEN:
        lhs = float8.apart(lhs, rhs)
    else:
        rhs = float8.apart(rhs, lhs)
    backward = casts.float8_format.backward_dtype
    dimensions = params.dot_dimensions(eqn)
    return float8.product(lhs, rhs, dimensions, backward)


def _is_of_matrices(eqn: Eqn) -> bool:
    """Whether a product is one of matrices, or a batch of matrix-vector products.

    XLA for CPUs fuses the product of a vector with the ops that make its matrix, and
    that fusion accepts no algorithm (jax 0.10). XLA also aborts on some products with
    an algorithm, three batch axes and a contracted size of 1 (jax 0.12 too). The
    derivative of a product with a vector has such a size.
    """
    if params.op_of(eqn) != "dot_general":
        return False
    *sides, summed = cost.product_sizes(eqn)
    if summed == 1 or all(side == 1 for side in sides):
        return False
    _, (batch, _) = params.dot_dimensions(eqn)
    n_copies = math.prod(eqn.invars[0].aval.shape[i] for i in batch)
    are_vectors = any(side == 1 for side in sides)
    return not are_vectors or (n_copies != 1 and len(batch) < 3)


def _value(
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


def _cast(
    casts: Casts, eqn: Eqn, value: Value, decision: Decision, origin: Origin
) -> Value:
    """Returns the result of an existing cast."""
    (var,), atom = eqn.outvars, eqn.invars[0]
    if not structure.is_float32(var):
        if value.state is State.LOW and structure.dtype_of(var) == casts.low_dtype:
            return Value(value.array)
        (array,) = params.bind(eqn, [casts.full(value)], casts.bound)
        return Value(array, None, value.kind)
    if decision.run is Run.PASS and value.state is State.LOW:
        return value
    if decision.run is Run.LOW:
        if value.state is State.LOW or structure.dtype_of(atom) == casts.low_dtype:
            return Value(value.array, State.LOW, origin=eqn)
        (array,) = params.bind(eqn, [value.array], casts.bound)
        saturates = value.saturates or structure.is_integer(atom)
        return Value(casts.cast(array, saturates), State.LOW, origin=eqn)
    (array,) = params.bind(eqn, [casts.full(value)], casts.bound)
    is_counted = structure.is_integer(atom) and decision.state is State.HARD
    kind = Kind.INTEGER if is_counted else value.kind
    return Value(array, decision.state, kind, origin=origin)


def _spread(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts a scalar, or axes of size 1, to a shape."""
    dims = range(len(shape)) if jnp.ndim(array) else ()
    return lax.broadcast_in_dim(array, shape, tuple(dims))
