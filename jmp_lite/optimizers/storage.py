"""Stores float32 arrays in 16 or 8 bits, where needed with a scale for each row.

bfloat16 has the range of float32. float16 and the 8-bit formats do not: gradients below
6e-8 would become zero. A power of two for each row moves its numbers into the range.

In 8 bits, numbers of both signs are float8. Averages of squares have a format of their
own, without a sign: 5 exponent bits and 3 mantissa bits, in a uint8. Only a zero is
stored as zero: an update divided by the square root of zero would be huge.

A row has one scale, however long it is: both formats are floating-point, so small
numbers are as accurate as large ones. In float8 this is true down to 2**-14 of the
row's largest number, and the smallest number is 2**-17 of it. For squares it is true
down to 2**-31, which is less than 2**-15 of a gradient. Shorter blocks, as in
bitsandbytes, make XLA copy arrays (`benchmarks.moments`).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp_lite.casting.quantize import power_of_two_for
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import AnyArray, Array, Dtype, Leaf, PyTree
from jmp_lite.jaxprs.straight_through import straight_through
from jmp_lite.optimizers.rounding import (
    Grid,
    grid_of,
    round_by_chance,
    round_to_nearest,
)

SQUARES = np.dtype("uint8")
"""The 8-bit dtype that stores averages of squares."""


_LARGEST_SQUARE = np.float32(2.0**126)
_SHORTEST_ROW = 128
"""The scale of a shorter row would take more than 3 % of the row's memory."""


class Stored(NamedTuple):
    """A stored array.

    Attributes:
      numbers: the stored numbers, in the array's shape.
      scale: powers of two, one for each row, that multiply the numbers; None without
        scales.
    """

    numbers: Leaf
    scale: Array | None = None


def is_stored(node: PyTree) -> TypeGuard[Stored]:
    """Whether a node of a pytree is a stored array."""
    return isinstance(node, Stored)


def spacing_of(dtype: Dtype) -> float:
    """Returns the largest relative spacing between neighbors in a format."""
    return 2.0 ** -_grid_of(dtype).mantissa_bits


def store(
    x: AnyArray, dtype: Dtype, noise: Array | None = None, *, is_scaled: bool = True
) -> Stored:
    """Stores an array in a format.

    Args:
      x: a float32 array.
      dtype: a floating-point dtype of 16 or 8 bits, or ``SQUARES``.
      noise: uniform numbers in [0, 1), in the shape of ``x``, for stochastic rounding;
        None rounds to the nearest.
      is_scaled: whether each row has a scale.
    """
    grid = _grid_of(dtype)

    def rounded(x: AnyArray) -> Array:
        return (
            round_to_nearest(x, grid)
            if noise is None
            else round_by_chance(x, grid, noise)
        )

    if not is_scaled:
        return Stored(straight_through(rounded(x), x).astype(dtype))
    if dtype == SQUARES:
        # The square of a gradient of 1e20 is infinite, and the moment is not.
        x = jnp.where(x > _LARGEST_SQUARE, _LARGEST_SQUARE, x)
    # XLA for CPUs drops NaN from a maximum.
    sizes = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))
    largest = jnp.max(sizes, _row_axis(x.shape), keepdims=True)
    scale = power_of_two_for(largest, grid.largest)
    numbers = rounded(x / scale)
    if dtype != SQUARES:
        return Stored(numbers.astype(dtype), scale)
    return Stored(jnp.where(x > 0, _encoded(numbers), SQUARES.type(0)), scale)


def refuse_derivatives(
    arrays: list[Leaf], before: Sequence[Stored | None]
) -> list[Leaf]:
    """Returns the arrays; differentiating a function of those with scales raises.

    JAX computes the derivative of a float16 or a float8 number in the same dtype, in
    which that of a moment vanishes. The derivative of a code is zero.

    Args:
      arrays: the new arrays.
      before: for each array the stored one that it replaces, or None.

    Raises:
      TypeError: an array with scales is differentiated.
    """
    numbers = [i for i, low in enumerate(before) if low and low.scale is not None]
    checked = _without_derivative([arrays[i] for i in numbers])
    new = dict(zip(numbers, checked, strict=True))
    return [new.get(number, array) for number, array in enumerate(arrays)]


@jax.custom_jvp
def _without_derivative(arrays: list[AnyArray]) -> list[AnyArray]:
    return arrays


@functools.partial(_without_derivative.defjvp, symbolic_zeros=True)
def _(_: PyTree, tangents: PyTree) -> NoReturn:
    # JAX calls it only if some array depends on what is differentiated.
    moved = [t for t in tangents[0] if not isinstance(t, SymbolicZero)]
    raise TypeError(
        "A state in float16 or 8 bits has no derivative, and an array "
        f"{type_of(moved[0])} of it depends on the arguments that are differentiated. "
        "To differentiate through updates, use low_precision_state(..., 'bfloat16'), "
        "or the optimizer alone."
    )


def restore(stored: Stored) -> AnyArray:
    """Returns the float32 numbers of a stored array."""
    numbers, scale = stored
    is_square = numbers.dtype == SQUARES
    full = _decoded(numbers) if is_square else numbers.astype(jnp.float32)
    return full if scale is None else full * scale


def _row_axis(shape: tuple[int, ...]) -> int:
    """Returns the last axis, or the longest axis if the last one is short."""
    axes = range(len(shape))
    return max(axes, key=lambda axis: (min(shape[axis], _SHORTEST_ROW), axis))


def _grid_of(dtype: Dtype) -> Grid:
    return _SQUARE if dtype == SQUARES else grid_of(dtype)


# A code has the bits of the float32 number from its exponent to the third bit of its
# mantissa, minus the code of the number that represents zero.
_MANTISSA_BITS, _LEAST_EXPONENT = 3, -31
_SHIFT = np.uint32(jnp.finfo(jnp.float32).nmant - _MANTISSA_BITS)
_ZERO = np.float32(2.0**_LEAST_EXPONENT).view(np.uint32) >> _SHIFT

_SQUARE = Grid(
    _MANTISSA_BITS,
    math.ldexp(1.0, _LEAST_EXPONENT - _MANTISSA_BITS),
    float(((_ZERO + np.uint32(255)) << _SHIFT).view(np.float32)),
)


def _encoded(x: Array) -> Array:
    """Returns the codes of positive numbers; small ones get the smallest code."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) >> _SHIFT
    return (jnp.maximum(bits, _ZERO + np.uint32(1)) - _ZERO).astype(SQUARES)


def _decoded(code: AnyArray) -> Array:
    bits = (code.astype(jnp.uint32) + _ZERO) << _SHIFT
    return jnp.where(code == 0, 0.0, lax.bitcast_convert_type(bits, jnp.float32))
