"""Computes the derivative of tanh and of the logistic function from their operand.

JAX computes it from the result, as ``1 - y**2`` or ``y * (1 - y)``. A 16-bit result
close to 1 has lost the digits of ``1 - y``. A float32 result would be saved for the
backward pass, beside the 16-bit value that the operand is computed from.
"""

import jax
import numpy as np
from jax import lax

from jmp_lite.jaxprs import params, sharding
from jmp_lite.jaxprs.types import Array, Eqn


def bind(eqn: Eqn, operand: Array, bound: set[object] | None) -> Array:
    """Returns tanh or the logistic function of an operand, with that derivative.

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
