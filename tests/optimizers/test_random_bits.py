"""Random bits for stochastic rounding: are they as good as coins?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_lite.optimizers.rounding import draw_words, random_bits

SHAPES = [(200_000,), (400, 500), (512, 400), (8, 125, 200)]
"""Shapes of 200,000 numbers or a few more."""


def keys_of_steps(n_steps=20):
    """Returns the keys that an optimizer draws words from, step after step."""
    keys, later = [], jax.random.key(7)
    for _ in range(n_steps):
        now, later = jax.random.split(later)
        keys.append(now)
    return jnp.stack(keys)


def draw(shape, number=0):
    """Returns the bits of twenty steps for one array: ``[20, *shape]``."""
    like = jnp.zeros(shape)
    draw_one = lambda key: random_bits(draw_words(key), number, like)
    return np.asarray(jax.jit(jax.vmap(draw_one))(keys_of_steps()))


def uniform(bits):
    """Returns numbers of mean 0 and variance 1, a row for each step."""
    return ((bits.reshape(len(bits), -1) + 0.5) / 2**32 - 0.5) * 12**0.5


def z_of_products(x, y):
    """Returns for each step how many deviations the mean of products is from 0."""
    return np.sqrt(x.shape[-1]) * np.mean(x * y, axis=-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_are_uniform_and_no_neighbor_knows_another(shape):
    bits = draw(shape)
    x = uniform(bits)
    z = {
        "mean": np.sqrt(x.shape[-1]) * np.mean(x, axis=-1),
        # The square of a uniform number has the variance 4/5.
        "variance": np.sqrt(x.shape[-1] / 0.8) * np.mean(x * x - 1, axis=-1),
    }
    for lag in {1, 2, 3, 4, 32, 128, 4096, *shape[1:]}:
        z[f"lag {lag}"] = z_of_products(x[:, lag:], x[:, :-lag])
    flat = bits.reshape(len(bits), -1)
    for place in range(32):
        ones = np.mean((flat >> np.uint32(place)) & 1, axis=-1)
        z[f"bit {place}"] = 2 * np.sqrt(flat.shape[-1]) * (ones - 0.5)
    for part in (0, 8, 16, 24):
        count = lambda row, part=part: np.bincount((row >> part) & 255, minlength=256)
        counts = np.stack([count(row) for row in flat])
        expected = flat.shape[-1] / 256
        chi_squared = np.sum((counts - expected) ** 2 / expected, axis=-1)
        z[f"byte at {part}"] = (chi_squared - 255) / np.sqrt(2 * 255)
    for name, each in z.items():
        assert np.max(np.abs(each)) < 4.7, name
        # Too even would be no chance, either.
        assert 0.3 < np.sqrt(np.mean(np.square(each))) < 1.8, name


def test_arrays_and_steps_have_bits_of_their_own():
    x = uniform(draw((200_000,)))
    others = {
        "the next step": np.roll(x, 1, axis=0),
        "the next array": uniform(draw((200_000,), 1)),
        "an array of another shape": uniform(draw((400, 500), 2)),
        "an array far away": uniform(draw((200_000,), 1000)),
    }
    for name, other in others.items():
        assert np.max(np.abs(z_of_products(x, other))) < 4.7, name


def test_the_same_key_gives_the_same_bits_however_an_array_is_split():
    words = draw_words(jax.random.key(3))
    alone = random_bits(words, 5, jnp.zeros((64, 32)))
    np.testing.assert_array_equal(random_bits(words, 5, jnp.zeros((64, 32))), alone)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        for spec in (P("d"), P(None, "d")):
            with jax.set_mesh(mesh):
                like = jax.device_put(jnp.zeros((64, 32)), NamedSharding(mesh, spec))
                split = jax.jit(lambda like: random_bits(words, 5, like))(like)
                np.testing.assert_array_equal(split, alone)
                first, second = (shard.data for shard in split.addressable_shards)
                if kind is AxisType.Explicit:
                    assert not np.array_equal(first, second)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_kind_of_key_makes_words(impl):
    now, later = jax.random.split(jax.random.key(0, impl=impl))
    words = [draw_words(key) for key in (now, later)]
    assert all(word.dtype == jnp.uint32 and word.shape == () for word in words[0])
    assert words[0] != words[1]
