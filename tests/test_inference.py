"""Text written token by token: 16-bit parameters, a 16-bit cache, float32 code."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mostly_slow, relative_error
from jax import lax

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, compile_for, missing

HALF = "bfloat16"


class Decoder(nn.Module):
    width: int = 32
    heads: int = 4
    vocabulary: int = 64
    dtype: str | None = None  # As an author would write it by hand.

    @nn.compact
    def __call__(self, tokens, position):
        options = {"dtype": self.dtype}
        embed = nn.Embed(self.vocabulary, self.width, **options)
        x = embed(tokens) + nn.Embed(4096, self.width, name="at", **options)(position)
        for _ in range(2):
            attend = nn.MultiHeadDotProductAttention(self.heads, decode=True, **options)
            x = x + attend(nn.LayerNorm(**options)(x))
            h = nn.Dense(4 * self.width, **options)(nn.LayerNorm(**options)(x))
            x = x + nn.Dense(self.width, **options)(nn.gelu(h))
        return embed.attend(nn.LayerNorm(**options)(x))


def initialize(model, batch, length):
    where = jnp.zeros((batch, length), int)
    variables = model.init(jax.random.key(0), where, where)
    return variables["params"], variables["cache"]


compiled_initialize = jax.jit(initialize, static_argnums=(0, 1, 2))


def step_of(model, full=lambda tree: tree, low=lambda tree: tree):
    def step(params, cache, token, position):
        variables = {"params": full(params), "cache": full(cache)}
        position = jnp.full((1, 1), position)
        logits, new = model.apply(variables, token, position, mutable=["cache"])
        return logits[:, -1].astype(jnp.float32), low(new["cache"])

    return step


def compile_step(target, step, *args):
    return compile_for(target, step, *args, donate_argnums=1)


def cycles(program):
    """Returns the cycles that the compiler for a TPU estimates for its fusions."""
    return sum(map(int, re.findall(r'estimated_cycles":"(\d+)"', program.text)))


def to_half(tree):
    return jmp.cast_tree(tree, HALF)


def low_step_of(model):
    return jmp.autocast(step_of(model, jmp.cast_to_full, to_half))


def generate_with(step, cache, length):
    """The loop that picks the most likely token, from an empty cache."""

    def generate(params, token):
        def one(carry):
            i, cache, token, all_logits = carry
            logits, cache = step(params, cache, token, i)
            token = jnp.argmax(logits, -1)[:, None]
            return i + 1, cache, token, all_logits.at[i].set(logits)

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
        logits, _ = jax.eval_shape(step, params, empty, token, 0)
        all_logits = jnp.zeros((length, *logits.shape))
        carry = (0, empty, token, all_logits)
        return lax.while_loop(lambda c: c[0] < jnp.array(length), one, carry)[3]

    return generate


@pytest.mark.parametrize(
    "layout", mostly_slow(["token by token", "in one loop"], ["in one loop"])
)
def test_logits_are_near_to_those_of_float32(layout):
    model, length = Decoder(), 12
    params, cache = compiled_initialize(model, 2, length)
    token = jnp.array([[3], [5]])
    if layout == "in one loop":
        step = step_of(model, jmp.cast_to_full)
        low = jmp.autocast(generate_with(step, cache, length))
    else:
        low = generate_with(low_step_of(model), to_half(cache), length)
    expected = generate_with(step_of(model), cache, length)(params, token)
    actual = low(to_half(params), token)
    assert actual.dtype == expected.dtype == np.float32
    # Both runs picked the same tokens: otherwise the logits are of different texts.
    np.testing.assert_array_equal(actual.argmax(-1), expected.argmax(-1))
    assert relative_error(actual, expected) < 0.02


@pytest.mark.targets
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["token by token", "in one loop"])
def test_the_compiled_step_converts_no_cache_and_moves_what_code_by_hand_does(
    target, layout
):
    if missing(target):
        pytest.skip(missing(target))
    size = {"width": 256, "heads": 4, "vocabulary": 512}
    model, by_hand = Decoder(**size), Decoder(**size, dtype=HALF)
    batch, length = 8, 2048
    shapes = jax.eval_shape(lambda: initialize(model, batch, length))
    params, cache = map(to_half, shapes)
    token = jnp.zeros((batch, 1), int)
    with jax.numpy_dtype_promotion("standard"):  # Flax's own promotion.
        if layout == "token by token":
            low = compile_step(target, low_step_of(model), params, cache, token, 3)
            hand = compile_step(target, step_of(by_hand), params, cache, token, 3)
            # A cache that is float32 outside of the loop is converted.
            converted = jmp.autocast(step_of(model))
            other = compile_step(target, converted, *shapes, token, 3)
            assert other.bytes_moved > 1.5 * hand.bytes_moved
        else:
            traced = generate_with(step_of(model, jmp.cast_to_full), shapes[1], 64)
            low, hand = (
                compile_for(target, generate, params, token)
                for generate in (
                    jmp.autocast(traced),
                    generate_with(step_of(by_hand), cache, 64),
                )
            )
    # One query times the cache, in two layers: without an algorithm the compiler for a
    # v5e makes a sum in bfloat16 of such a product, and estimates more cycles for it.
    n_steps = 64 if layout == "in one loop" else 1
    n_sums = 4 * n_steps if target == "v5e" else 0
    assert sum(low.matmuls.values()) == sum(hand.matmuls.values()) + n_sums
    assert {dtypes.split("->")[0] for dtypes in low.matmuls} == {"bf16"}
    if (target, layout) == ("v5e", "token by token"):
        assert 1.5 * cycles(low) < cycles(hand)
    assert low.bytes_moved <= 1.06 * hand.bytes_moved
    assert low.peak_memory <= 1.02 * hand.peak_memory
