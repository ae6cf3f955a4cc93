"""Rounds float32 numbers to fewer bits, and moves and checks rounded parameters.

It rounds to the nearest or stochastically, by arithmetic or by bits: XLA removes a cast
to 16 bits and back. A finite number out of range becomes the largest number of the
format, because no update would repair an infinity.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_floating,
    place_of,
    refuse_raw_bytes,
    type_of,
)
from jmp_lite.casting.types import AnyArray, Array, Dtype, Key, Leaf, Path, PyTree, Tree
from jmp_lite.jaxprs import sharding
from jmp_lite.jaxprs.primitives import straight_through


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


def split(master: AnyArray, dtype: Dtype) -> tuple[Array, Array]:
    """Splits float32 numbers into 16-bit numbers and the bits that these lack.

    ``join`` makes the float32 numbers of the pair again, bit for bit. In float16 that
    is true from 2**-17, about 8e-6; below, a number is rounded to a multiple of 2**-40.

    Args:
      master: float32 numbers. A finite one that would round to infinity counts as the
        largest one that does not, about 3.396e38 in bfloat16 and 65,520 in float16. A
        NaN may lose its payload.
      dtype: bfloat16 or float16.

    Returns:
      An array of the dtype, and the remainder, in the shape of ``master``: int16 for
      bfloat16 and uint16 for float16, so that the two are not mistaken for each other.
    """
    if dtype == jnp.bfloat16:
        return _split_bfloat16(master)
    return _split_float16(master)


def join(param: AnyArray, remainder: AnyArray) -> Array:
    """Returns the float32 numbers that ``split`` split into a pair.

    Any pair gives a number that ``split`` rounds to ``param``, also a pair that
    ``split`` never makes, such as zero with a negative remainder.

    Args:
      param: bfloat16 or float16 numbers.
      remainder: what they lack, in the shape of ``param``.
    """
    if param.dtype == jnp.bfloat16:
        return _join_bfloat16(param, remainder)
    return _join_float16(param, remainder)


def _split_bfloat16(master: AnyArray) -> tuple[Array, Array]:
    """Splits as ``split``: the remainder is the lower half of the bits.

    A number is rounded to the nearest, and a tie away from zero. The remainder is then
    from -2**15 to 2**15 - 1, in units of the last place of float32. After a tie to
    even, both ends would mean the same 16 bits.

    For example, 1 + 2**-9 is 0x3F804000. The upper half is 0x3F80, which is 1 in
    bfloat16, and the remainder is 0x4000. 1 + 2**-8 is 0x3F808000, a tie: it is rounded
    up to 0x3F81, and the remainder is -0x8000, half a unit below.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    size = bits & ~_SIGN
    is_too_large = (size > _LARGEST) & (size < _INFINITY)
    bits = jnp.where(is_too_large, bits & _SIGN | _LARGEST, bits)
    # The sum may leave the NaNs.
    upper = jnp.where(size > _INFINITY, bits >> 16 | _QUIET, (bits + _HALF) >> 16)
    param = lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return param, lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)


def _join_bfloat16(param: AnyArray, remainder: AnyArray) -> Array:
    upper = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) << 16
    size = upper & ~_SIGN
    is_alone = (size >= _INFINITY) | ((size == 0) & (remainder < 0))
    lower = lax.bitcast_convert_type(remainder.astype(jnp.int32), jnp.uint32)
    bits = jnp.where(is_alone, upper, upper + lower)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _split_float16(master: AnyArray) -> tuple[Array, Array]:
    """Splits as ``split``: the remainder counts what is above the float16 number.

    A number is rounded to the nearest, and a tie up, so the remainder is from -2**15 to
    2**15 - 1. Where float16 has normal numbers, it counts eighths of float32's last
    place, 2**13 of which are float16's. At 2**-14 and below, float16 has one spacing,
    2**-24, and the remainder counts 2**-40.

    For example, 1 + 2**-13 is an eighth of the spacing above 1, or 2**10 of the last
    place, and the remainder is 2**13.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    size = bits & ~_SIGN
    is_negative, is_finite = bits >= _SIGN, size < _INFINITY
    clipped = jnp.where(is_finite, jnp.minimum(size, _LARGEST_16), size)
    # A tie goes up, so that of a negative number to the smaller size.
    half = jnp.where(is_negative, _HALF_16 - 1, _HALF_16)
    upper = (clipped + half) & ~(2 * _HALF_16 - 1)
    lacks = lax.bitcast_convert_type(clipped - upper, jnp.int32)
    number = lax.bitcast_convert_type(bits & _SIGN | upper, jnp.float32)
    remainder = jnp.where(is_negative, -lacks, lacks) << 3

    # Beside zero: the remainder has a sign of its own.
    exact = master * _STEPS
    steps = lax.round(exact, lax.RoundingMethod.TO_NEAREST_EVEN)
    small = jnp.where(exact - steps == 0.5, steps + 1, steps) / _STEPS
    rest = lax.round((master - small) * _PARTS, lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = jnp.minimum(rest, 2.0**15 - 1)

    is_small = size < _NORMAL_16 + _HALF_16
    number = jnp.where(is_small, small, jnp.where(is_finite, number, master))
    remainder = jnp.where(is_small, rest.astype(jnp.int32), remainder)
    remainder = jnp.where(is_finite, remainder, 0)
    number, remainder = number.astype(jnp.float16), remainder.astype(jnp.int16)
    return number, lax.bitcast_convert_type(remainder, jnp.uint16)


def _join_float16(param: AnyArray, remainder: AnyArray) -> Array:
    remainder = lax.bitcast_convert_type(remainder, jnp.int16)
    wide = lax.stop_gradient(param).astype(jnp.float32)  # nextafter has no derivative.
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    size, above = bits & ~_SIGN, remainder.astype(jnp.int32) >> 3
    above = jnp.where(bits >= _SIGN, -above, above)
    normal = bits + lax.bitcast_convert_type(above, jnp.uint32)
    small = wide + remainder.astype(jnp.float32) / _PARTS
    # Float32 may lack the digits of a remainder that split does not make.
    small = jnp.minimum(small, jnp.nextafter(wide + 0.5 / _STEPS, -jnp.inf))
    joined = lax.bitcast_convert_type(normal, jnp.float32)
    joined = jnp.where(size <= _NORMAL_16, small, joined)
    # Adding a zero would change the sign of a zero.
    return jnp.where((size >= _INFINITY) | (remainder == 0), wide, joined)


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
# The same for float16, and its smallest normal number, 2**-14.
_LARGEST_16, _HALF_16 = np.uint32(0x477FEFFF), np.uint32(1 << 12)
_NORMAL_16 = np.uint32(0x38800000)
# What float16 and a remainder count beside zero, in 1.
_STEPS, _PARTS = np.float32(2.0**24), np.float32(2.0**40)


Words = tuple[Array, Array]
"""Two random words of 32 bits."""


def draw_words(key: Key) -> Words:
    """Returns the words of a step, from a key that ``jax.random.split`` made."""
    first, second = jax.random.key_data(key)[:2]
    # Otherwise XLA draws them again in the kernels of each array.
    return lax.optimization_barrier((first, second))


def random_bits(words: Words, number: int, like: AnyArray) -> Array:
    """Returns 32 random bits for each element of an array, as uint32.

    The same arguments give the same bits, however an array is split over devices.

    Args:
      words: those of the step.
      number: of the array in its tree.
      like: an array of the same shape and sharding.
    """
    mine = np.random.SeedSequence(number).generate_state(2)
    first, second = (word + own for word, own in zip(words, mine, strict=True))
    x = _index(like, first) ^ first
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = x ^ second
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _index(like: AnyArray, start: Array) -> Array:
    """Returns the row-major index of each element, from some start, modulo 2**32.

    Without a start of its own, arrays of one shape would share a part of the sum. XLA
    would store that part, and join the kernels of all these arrays to read it.
    """
    aval, index = jax.typeof(like), start
    for axis, size in enumerate(aval.shape):
        of_axis = sharding.iota(np.dtype("uint32"), axis, aval)
        index = index * np.uint32(size % 2**32) + of_axis
    return index


# ------------------------------------------------------------------ rounded parameters


def to_float32(leaf: AnyArray) -> AnyArray:
    """Returns an array in float32."""
    return leaf.astype(jnp.float32)


def update_to(target: AnyArray, param: AnyArray) -> Array:
    """Returns the update that turns a parameter into ``target``.

    Args:
      target: numbers of the parameter's dtype, in float32 or wider.
      param: the parameter. The sum of parameter and update is the target, or rounds to
        it.
    """
    before = param.astype(target.dtype)
    difference = target - before
    # The update is the target itself if that is not finite, or the parameter is zero.
    is_sum = (before == 0) | ~jnp.isfinite(target)
    return straight_through(jnp.where(is_sum, target, difference), difference)


def check_16_bit(params: PyTree, name: str) -> None:
    """Raises a ValueError if no parameter has 16 bits."""
    refuse_raw_bytes(params)
    leaves, is_part = whole_or_part(params)
    if leaves and not is_part and not any(map(is_16_bit, leaves)):
        raise ValueError(
            f"{name} is for 16-bit parameters, but got only {types_of(leaves)}. "
            "Causes: (a) the parameters have 32 bits: cast them with cast_tree, or "
            "leave the wrapper out; (b) a wrapper around it casts them to float32: put "
            f"that wrapper inside, as in {name}(wrapper(...)); (c) {NOT_ROUNDED}."
        )


def check_16_bit_as_before(path: Path, param: Leaf) -> None:
    """Raises a TypeError for a parameter that had 16 bits in ``init``."""
    if is_16_bit(param):
        return
    raise TypeError(
        "Expected a 16-bit parameter at "
        f"{place_of(path)}, as init got it, and got "
        f"{type_of(param)}. Causes: (a) {NOT_ROUNDED}; (b) the parameters were cast "
        "after init: let jmp_lite.convert_state cast them, or call init with the new "
        "ones."
    )


NOT_ROUNDED = (
    "updates were added without a cast, as by eqx.apply_updates, so 16-bit parameters "
    "became float32: use jmp_lite.apply_updates(params, updates)"
)


def whole_or_part(params: PyTree) -> tuple[list[Leaf], bool]:
    """Returns the leaves, and whether optax.masked or partition has selected them."""
    leaves = jax.tree.leaves(params, is_leaf=is_left_out)
    return leaves, any(map(is_left_out, leaves))


def is_left_out(node: PyTree) -> bool:
    """Whether a node stands for what optax.masked or optax.partition leaves out."""
    return isinstance(node, optax.MaskedNode)


def types_of(leaves: list[Leaf]) -> str:
    """Returns the types of some leaves as text, at most three."""
    return ", ".join(sorted({type_of(leaf) for leaf in leaves})[:3])


def check_key(key: Leaf) -> None:
    """Raises a TypeError for an object that is not one key of ``jax.random``."""
    is_typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not is_raw and not (is_typed and key.ndim == 0):
        hint = key if isinstance(key, int) else 0
        raise TypeError(
            f"Expected one key of jax.random, got {type_of(key)}: pass "
            f"jax.random.key({hint})."
        )


def apply_updates(params: Tree, updates: PyTree) -> Tree:
    """Adds updates to parameters, which keep their dtypes.

    A sum is computed in the wider of the two dtypes (in float32 for 8 bits), and
    rounded once to the dtype of the parameter. ``optax.apply_updates`` does so, too,
    but for 8 bits. ``eqx.apply_updates`` does not round, so its 16-bit parameters
    become float32 at the first float32 update.

    Args:
      params: a pytree of parameters, such as an Equinox module.
      updates: the updates of an optimizer, a pytree prefix of ``params``. A part for
        which the update is None is returned as it is.

    Returns:
      A pytree with the structure, shapes and dtypes of ``params``. It is the same under
      strict dtype promotion.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> params = {"w": jnp.ones(1, jnp.bfloat16), "name": "dense"}
      >>> jmp.apply_updates(params, {"w": jnp.full(1, 0.25), "name": None})
      {'name': 'dense', 'w': Array([1.25], dtype=bfloat16)}
    """

    def add(update: Leaf, param: PyTree) -> PyTree:
        if update is None:
            return param
        total = jnp.asarray(_promotable(param) + _promotable(update))
        return total.astype(jnp.asarray(param).dtype)

    refuse_raw_bytes(params)
    refuse_raw_bytes(updates)
    # Strict promotion refuses a sum of bfloat16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(add, updates, params, is_leaf=lambda node: node is None)


def _promotable(leaf: Leaf) -> Leaf:
    """Returns numbers of 8 bits or fewer, which JAX never promotes, in float32."""
    is_small = is_floating(leaf) and leaf.dtype.itemsize == 1
    return leaf.astype(jnp.float32) if is_small else leaf
