"""Programs lowered to StableHLO for accelerators: this needs no device."""

import collections
import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from programs import PROGRAMS, total

from jmp_lite.autocasting.api import autocast

PRODUCT = re.compile(
    r"stablehlo\.(?:dot_general|convolution).*: "
    r"\(tensor<[^>]*?(\w+)>, tensor<[^>]*?(\w+)>\) -> tensor<[^>]*?(\w+)>"
)


def lower(fun, *args, platform="cuda"):
    return jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def products(text):
    """Counts the matrix products that run, by the dtypes of operands and result.

    Those of a function count as often as it is called, those of a loop once.
    """
    parts = re.split(r"func\.func \w+ @([^(]+)", text)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    @functools.cache
    def run(name):
        found = (match.groups() for match in PRODUCT.finditer(bodies[name]))
        dtypes = (tuple(d.rpartition("x")[2] for d in group) for group in found)
        calls = re.findall(r"call @([^(]+)", bodies[name])
        return sum(map(run, calls), collections.Counter(dtypes))

    return run("main")


# One program for each kind of product and of higher-order primitive.
LOWERED = [
    *("mlp", "convolution", "nested_jits", "switch", "rematerialized", "for_loop"),
    *("scanned_layers", "recurrent", "custom_jvp", "custom_vjp_in_a_scan", "sharded"),
    "a linen LSTM",
]


@pytest.mark.parametrize(
    ("name", "platform"), [*((name, "cuda") for name in LOWERED), ("mlp", "tpu")]
)
def test_products_are_16_bit_in_what_is_lowered_forward_and_backward(name, platform):
    fun, args = PROGRAMS[name]
    low, traced = (
        products(
            lower(jax.grad(lambda args, f=f: total(f(*args))), args, platform=platform)
        )
        for f in (autocast(fun), fun)
    )
    assert set(low) <= {("bf16",) * 3}
    assert set(traced) <= {("f32",) * 3}
    assert low.total() == traced.total()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("preset", ["mixed", "O1", "O3"])
def test_matrix_products_in_bfloat16_are_added_up_in_float32(preset, platform):
    """Without this algorithm, a TPU v7x adds up in bfloat16."""
    fun, args = PROGRAMS["scanned_layers"]
    gradient = jax.grad(lambda args: total(autocast(fun, preset)(*args)))
    text = lower(gradient, args, platform=platform)
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    low = [line for line in found if "bf16>" in line]
    assert len(low) == len(found) > 2
    pinned = r"lhs_precision_type = bf16, .*accumulation_type = f32"
    assert all(re.search(pinned, line) for line in low)


def test_a_dot_without_a_matrix_product_is_lowered_without_an_algorithm():
    vectors = lambda x, y: (x @ y, jnp.outer(x, y).sum())
    x = jnp.ones(8)
    for dtype in ("bfloat16", "float16"):
        low = autocast(lambda x, y: x @ y, compute_dtype=dtype)
        assert "algorithm" not in lower(low, x, x)
        jax.jit(autocast(vectors, compute_dtype=dtype))(x, x)
        # A compiler fuses the product with the slice: it has to compile.
        sliced = autocast(lambda x, y: x[:8].T @ y, compute_dtype=dtype)
        assert "algorithm" not in lower(sliced, jnp.ones((16, 4)), x)
        chex.assert_shape(jax.jit(sliced)(jnp.ones((16, 4)), x), (4,))
        of_many = jax.vmap(lambda x, y: x[:8].T @ y)
        low = autocast(of_many, compute_dtype=dtype)
        has_one = "algorithm" in lower(low, jnp.ones((3, 16, 4)), jnp.ones((3, 8)))
        assert has_one == (dtype == "bfloat16")
        # XLA for CPUs aborts on some derivatives of it that have one.
        of_vectors = autocast(lambda x, y: x @ y, compute_dtype=dtype)
        arrays = [jnp.ones((8, 8, 8, *rest)) for rest in ((1, 8), (8, 5))]
        assert "algorithm" not in lower(of_vectors, *arrays)
    low = autocast(lambda x: x @ x, compute_dtype="float16")
    assert "algorithm" not in lower(low, jnp.ones((8, 8)))


class Block(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x, is_training):
        options = {"dtype": self.dtype}
        width = x.shape[-1]
        h = nn.LayerNorm(**options)(x)
        h = nn.MultiHeadDotProductAttention(num_heads=4, **options)(h, h)
        x = x + nn.Dropout(0.1, deterministic=not is_training)(h)
        h = nn.Dense(4 * width, **options)(nn.LayerNorm(**options)(x))
        h = nn.Dense(width, **options)(nn.gelu(h))
        return x + nn.Dropout(0.1, deterministic=not is_training)(h)


class Model(nn.Module):
    """A language model, in which each block is jitted."""

    depth: int = 24
    dtype: object = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32, dtype=self.dtype)(tokens)
        block = nn.jit(Block, static_argnums=2)
        for _ in range(self.depth):
            x = block(dtype=self.dtype)(x, True)
        return nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def loss_of(model):
    def loss(params, tokens, key):
        logits = model.apply(params, tokens, rngs={"dropout": key})
        losses = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(losses[..., 0])

    return loss


def test_a_model_of_jitted_blocks_is_lowered_to_about_as_many_functions():
    model = Model()
    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    params = jax.eval_shape(model.init, keys, TOKENS)
    loss = loss_of(model)
    args = params, TOKENS, jax.eval_shape(lambda: jax.random.key(0))

    def functions(fun):
        return lower(fun, *args).count("func.func")

    traced, low = (functions(jax.grad(f)) for f in (loss, autocast(loss)))
    assert low == traced
    assert products(lower(jax.grad(autocast(loss)), *args)).keys() == {("bf16",) * 3}


def test_there_are_as_many_products_as_in_the_model_written_by_hand():
    params = jax.eval_shape(
        Model(depth=2).init,
        {name: jax.random.key(0) for name in ("params", "dropout")},
        TOKENS,
    )
    args = params, TOKENS, jax.eval_shape(lambda: jax.random.key(0))
    by_hand = loss_of(Model(depth=2, dtype=jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"):
        expected = products(lower(jax.grad(by_hand), *args))
    actual = products(lower(jax.grad(autocast(loss_of(Model(depth=2)))), *args))
    # Flax gives its own casts to the loss; each product is there once.
    assert actual.total() == expected.total()
    assert set(actual) == {("bf16",) * 3}
