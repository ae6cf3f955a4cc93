"""Rounds float32 numbers to fewer bits, to the nearest or stochastically.

It rounds by arithmetic or by bits, because XLA removes a cast to 16 bits and back. A
finite number out of range becomes the largest number of the format: no update would
repair an infinity.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.casting.types import AnyArray, Array, Dtype


class Grid(NamedTuple):
    """The numbers of a format.

    Attributes:
      mantissa_bits: the bits of the mantissa, without the leading one.
      least: the spacing of its smallest numbers.
      largest: the largest number.
    """

    mantissa_bits: int
    least: float
    largest: float


def grid_of(dtype: Dtype) -> Grid:
    """Returns the numbers of a floating-point dtype."""
    info = jnp.finfo(dtype)
    return Grid(info.nmant, float(info.smallest_subnormal), float(info.max))


def round_to_nearest(x: AnyArray, grid: Grid) -> Array:
    """Rounds to the nearest number of a format, in the dtype of ``x``."""
    clipped = _clip(x, grid)
    spacing = _spacing(clipped, grid)
    steps = lax.round(clipped / spacing, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.isfinite(x), steps * spacing, x)


def split(master: AnyArray) -> tuple[Array, Array]:
    """Splits float32 numbers into bfloat16 numbers and the 16 bits that these lack.

    A number is rounded to the nearest, and a tie away from zero. The remainder is then
    from -2**15 to 2**15 - 1, in units of the last place of float32. After a tie to
    even, both ends would mean the same 16 bits.

    For example, 1 + 2**-9 is 0x3F804000. The upper half is 0x3F80, which is 1 in
    bfloat16, and the remainder is 0x4000. 1 + 2**-8 is 0x3F808000, a tie: it is rounded
    up to 0x3F81, and the remainder is -0x8000, half a unit below.

    Args:
      master: float32 numbers. A finite one that would round to infinity counts as the
        largest one that does not, about 3.396e38. A NaN may lose its payload.

    Returns:
      A bfloat16 array and an int16 array, in the shape of ``master``. ``join`` makes
      ``master`` of them, bit for bit.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    size = bits & ~_SIGN
    is_too_large = (size > _LARGEST) & (size < _INFINITY)
    bits = jnp.where(is_too_large, bits & _SIGN | _LARGEST, bits)
    # The sum may leave the NaNs.
    upper = jnp.where(size > _INFINITY, bits >> 16 | _QUIET, (bits + _HALF) >> 16)
    param = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return param, lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)


def join(param: AnyArray, remainder: AnyArray) -> Array:
    """Returns the float32 numbers that ``split`` split into a pair.

    Any pair gives a number that ``split`` rounds to ``param``, also a pair that
    ``split`` never makes, such as zero with a negative remainder.

    Args:
      param: bfloat16 numbers.
      remainder: int16 numbers, in the shape of ``param``.
    """
    upper = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << 16
    size = upper & ~_SIGN
    is_alone = (size >= _INFINITY) | ((size == 0) & (remainder < 0))
    lower = lax.bitcast_convert_type(remainder.astype(jnp.int32), jnp.uint32)
    bits = jnp.where(is_alone, upper, upper + lower)
    return lax.bitcast_convert_type(bits, jnp.float32)


def round_by_chance(x: AnyArray, grid: Grid, random_bits: Array) -> Array:
    """Rounds stochastically to one of the two neighbors in a format, in float32.

    Args:
      x: float32 numbers.
      grid: the format.
      random_bits: 32 random bits for each number, in the shape of ``x``.
    """
    rounded = round_in_range(_clip(x, grid), grid, random_bits)
    is_rounded = jnp.isfinite(x) & (x != 0)  # A zero keeps its sign.
    return jnp.where(is_rounded, rounded, x)


def round_in_range(x: AnyArray, grid: Grid, random_bits: Array) -> Array:
    """Rounds as ``round_by_chance`` numbers that are not too large for the format.

    Random bits are added to those that the format lacks, and what is then in their
    place is dropped. So the chance to carry is their share of the spacing, exactly.

    For example, 1 + 2**-9 is 0x3F804000, a quarter of the spacing 2**-7 of bfloat16
    above 1. Random 16 bits of at least 0xC000 carry to 0x3F81, and others do not.

    Below its normal numbers a format has one spacing. There, the smallest normal number
    is added before and subtracted afterwards, so that float32 has that spacing too.
    """
    dropped = np.uint32(jnp.finfo(jnp.float32).nmant - grid.mantissa_bits)
    normal = np.float32(grid.least * 2.0**grid.mantissa_bits)

    def carry(x: AnyArray) -> Array:
        bits = lax.bitcast_convert_type(x, jnp.uint32) + (random_bits >> (32 - dropped))
        return lax.bitcast_convert_type(bits >> dropped << dropped, jnp.float32)

    if normal <= jnp.finfo(jnp.float32).tiny:  # It has the exponents of float32.
        return carry(x)
    added = jnp.where(x < 0, -normal, normal)
    added = jnp.where(jnp.abs(x) < normal, added, np.float32(0))
    return carry(x + added) - added


def _spacing(x: Array, grid: Grid) -> Array:
    """Returns the spacing of a format's numbers near ``x``."""
    wide = jnp.finfo(x.dtype)
    infinity = np.asarray(np.inf, x.dtype)
    exponents = infinity.view(f"uint{wide.bits}")  # Its bits are the exponent mask.
    exponent = lax.bitcast_convert_type(x, exponents.dtype) & exponents
    power = lax.bitcast_convert_type(exponent, x.dtype)
    least = np.asarray(max(grid.least, float(wide.tiny)), x.dtype)
    return jnp.maximum(power * np.asarray(2.0**-grid.mantissa_bits, x.dtype), least)


def _clip(x: AnyArray, grid: Grid) -> Array:
    largest = np.asarray(grid.largest, x.dtype)
    return jnp.clip(x, -largest, largest)


# Bits of float32 numbers: the sign, an infinity, the largest number that does not round
# to an infinity in bfloat16, and half a unit in bfloat16's last place.
_SIGN, _INFINITY = np.uint32(1 << 31), np.uint32(0x7F80 << 16)
_LARGEST, _HALF = np.uint32(0x7F7F7FFF), np.uint32(1 << 15)
_QUIET = np.uint32(0x40)  # A bit of a bfloat16 NaN, so that some bit is set.
