"""Random numbers for stochastic rounding: a hash of a key, an array's number, an index.

Rounding needs no cryptography. The twenty rounds of JAX's threefry would stand in the
kernel of each array: thirty arrays took XLA for GPUs 12 to 19 seconds to compile, and
an optimizer without noise takes one. So threefry makes one key for each step, and a
hash of few operations mixes its words with the number of the array and the index of
each element.

Source: Chris Wellons, "Prospecting for Hash Functions", 2018: the constants and shifts
of ``lowbias32``. The second word enters in the middle: words that only enter at the
start could give two arrays the same bits in another order.
"""

import jax
import numpy as np
from jax import lax

from jmp_lite.casting.types import AnyArray, Array, Key
from jmp_lite.jaxprs import sharding

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
