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
from typing import NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp_lite.casting.dtypes import is_floating, type_of
from jmp_lite.casting.types import AnyArray, Array, Dtype, Leaf, PyTree
from jmp_lite.jaxprs.primitives import straight_through
from jmp_lite.optimizers.rounding import (
    Grid,
    Words,
    grid_of,
    random_bits,
    round_by_chance,
    round_in_range,
    round_to_nearest,
)

SQUARES = np.dtype("uint8")
"""The 8-bit dtype that stores averages of squares."""


_LARGEST_SQUARE = np.float32(2.0**126)
# Bits of float32 numbers.
_MANTISSA, _SIGN = np.int32(0x007FFFFF), np.int32(-(2**31))
_LEAST_SCALE, _INFINITY = (np.float32(x).view(np.int32) for x in (2.0**-100, np.inf))
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
    x: AnyArray,
    dtype: Dtype,
    random_bits: Array | None = None,
    scale: Array | None = None,
) -> Stored:
    """Stores an array in a format.

    Args:
      x: a float32 array.
      dtype: a floating-point dtype of 16 or 8 bits, or ``SQUARES``.
      random_bits: 32 for each number, in the shape of ``x``, for stochastic rounding;
        None rounds to the nearest.
      scale: what ``row_scales`` returns; None stores the numbers without a scale.
    """
    grid = _grid_of(dtype)
    if scale is None:
        if random_bits is None:
            rounded = round_to_nearest(x, grid)
        else:
            rounded = round_by_chance(x, grid, random_bits)
        return Stored(straight_through(rounded, x).astype(dtype))
    numbers = _bounded(x, dtype)
    # Powers of two are inverted by their bits, which is exact. An infinity, the scale
    # of a row whose numbers do not count, gives some number.
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    numbers *= lax.bitcast_convert_type(np.uint32(254 << 23) - bits, jnp.float32)
    if random_bits is None:
        numbers = round_to_nearest(numbers, grid)
    else:
        numbers = round_in_range(numbers, grid, random_bits)
    if dtype != SQUARES:
        return Stored(numbers.astype(dtype), scale)
    return Stored(jnp.where(x > 0, _encoded(numbers), SQUARES.type(0)), scale)


def store_nearest(x: AnyArray, dtype: Dtype, is_scaled: bool) -> Stored:
    """Stores an array rounded to the nearest, with a scale for each row or without."""
    full = x.astype(jnp.float32)
    return store(full, dtype, scale=row_scales(full, dtype) if is_scaled else None)


def row_scales(x: AnyArray, dtype: Dtype) -> Array:
    """Returns the powers of two that scale each row of an array for a format.

    They are at least 2**-100, and infinite for a row with a number that is not finite:
    ``restore`` then returns NaN for all its numbers.

    Each number's scale comes first, by integer arithmetic, and then the maximum. An op
    after the maximum would be one more kernel for each array, and XLA for TPUs joins a
    maximum of integers with nothing. For example, the largest number of e4m3fn, 448,
    has the bits 0x43E00000. The difference of 500's bits, 0x43FA0000, has a mantissa
    that is not zero: the next exponent is that of 2.
    """
    bits = lax.bitcast_convert_type(_bounded(x, dtype), jnp.int32) & ~_SIGN
    limit, one = (np.float32(y).view(np.int32) for y in (_grid_of(dtype).largest, 1))
    scales = (bits + (one - limit + _MANTISSA)) & ~_MANTISSA
    scales = jnp.maximum(scales, _LEAST_SCALE)
    scales = jnp.where(bits >= _INFINITY, _INFINITY, scales)
    of_each = lax.bitcast_convert_type(scales, jnp.float32)
    # A row is along the last axis, or along the longest one if the last one is short.
    sizes = [min(size, _SHORTEST_ROW) for size in x.shape]
    axis = max(range(x.ndim), key=lambda axis: (sizes[axis], axis))
    return jnp.max(of_each, axis, keepdims=True)


def store_again(after: PyTree, before: PyTree, words: Words | None) -> PyTree:
    """Stores the arrays of a state as those that they replace.

    Args:
      after: the new state.
      before: the old one, with a ``Stored`` for some of its arrays.
      words: those of the step for stochastic rounding; None rounds to the nearest.

    Raises:
      TypeError: an array with scales is differentiated.
    """
    new, structure = jax.tree.flatten(after)
    old = jax.tree.leaves(before, is_leaf=is_stored)
    scaled = [i for i, x in enumerate(old) if is_stored(x) and x.scale is not None]
    checked = _without_derivative([new[i] for i in scaled])
    for i, x in zip(scaled, checked, strict=True):
        new[i] = x
    # All are there before any number is stored. XLA for GPUs would otherwise join the
    # maxima of one moment with the numbers of the other, and read each gradient once
    # more: 6.5 arrays for adamw in 8 bits, not 5.5.
    scales = lax.optimization_barrier(
        {
            i: row_scales(new[i].astype(jnp.float32), old[i].numbers.dtype)
            for i in scaled
        }
    )

    def one(number: int, x: Leaf, low: Leaf) -> Leaf:
        if not is_stored(low) or not is_floating(x):
            return x
        bits = None if words is None else random_bits(words, number, x)
        full = x.astype(jnp.float32)
        return store(full, low.numbers.dtype, bits, scales.get(number))

    return structure.unflatten(map(one, range(len(new)), new, old))


def _bounded(x: AnyArray, dtype: Dtype) -> AnyArray:
    """Returns an array without squares that are infinite.

    The square of a gradient of 1e20 is infinite, and the moment is not.
    """
    if dtype != SQUARES:
        return x
    return jnp.where(x > _LARGEST_SQUARE, _LARGEST_SQUARE, x)


@jax.custom_jvp
def _without_derivative(arrays: list[AnyArray]) -> list[AnyArray]:
    """Returns arrays that will have scales; differentiating them raises.

    JAX computes the derivative of a float16 or a float8 number in the same dtype, in
    which that of a moment vanishes. The derivative of a code is zero.
    """
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
    if scale is None:
        return full
    # XLA for CPUs drops NaN from a maximum, so the scale was an infinity.
    return full * jnp.where(scale < jnp.inf, scale, jnp.nan)


def _grid_of(dtype: Dtype) -> Grid:
    return _SQUARE if dtype == SQUARES else grid_of(dtype)


# A code has the bits of the float32 number from its exponent to the third bit of its
# mantissa, minus the code of the number that represents zero.
_MANTISSA_BITS, _LEAST_EXPONENT = 3, -31
_SHIFT = np.uint32(jnp.finfo(jnp.float32).nmant - _MANTISSA_BITS)
_ZERO = np.float32(2.0**_LEAST_EXPONENT).view(np.uint32) >> _SHIFT

# What is below the smallest code becomes this code.
_SQUARE = Grid(
    _MANTISSA_BITS,
    0.0,
    float(((_ZERO + np.uint32(255)) << _SHIFT).view(np.float32)),
)


def _encoded(x: Array) -> Array:
    """Returns the codes of positive numbers; small ones get the smallest code."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) >> _SHIFT
    return (jnp.maximum(bits, _ZERO + np.uint32(1)) - _ZERO).astype(SQUARES)


def _decoded(code: AnyArray) -> Array:
    bits = (code.astype(jnp.uint32) + _ZERO) << _SHIFT
    return jnp.where(code == 0, 0.0, lax.bitcast_convert_type(bits, jnp.float32))
