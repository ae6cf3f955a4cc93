"""What waits for the backward pass, in 16 bits."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import compiled, initialized, live_equations, relative_error
from jax import lax
from programs import BLOCK, BLOCK_PARAMS, LAYERS, W, X

from jmp_lite.autocasting.interpreter.api import autocast
from jmp_lite.autocasting.marks import full_precision
from jmp_lite.autocasting.residuals import compress_residuals


def block(x, w):
    h = jnp.tanh(x @ w)
    return h * jnp.exp(-h) + x


def kept(fun, *args):
    """The dtypes of what waits for the backward pass, but for the arguments."""
    _, backward = jax.vjp(fun, *args)
    given = set(map(id, jax.tree.leaves(args)))
    return sorted(str(x.dtype) for x in jax.tree.leaves(backward) if id(x) not in given)


def gradients(fun, *args, argnums=(0, 1)):
    return jax.grad(lambda *a: jnp.sum(fun(*a) ** 2), argnums)(*args)


NESTS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda h, _: (f(h, w), None), x, length=3)[0]
    ),
    "scan of remat": lambda f: (
        lambda x, w: lax.scan(
            lambda h, _: (jax.checkpoint(f)(h, w), None), x, length=3
        )[0]
    ),
    "autocast around": autocast,
    "keyword arguments": lambda f: lambda x, w: f(x, w=w),
}


@pytest.mark.parametrize("nest", NESTS)
def test_results_are_the_same_bit_for_bit_and_gradients_within_rounding(nest):
    low, full = NESTS[nest](compress_residuals(block)), NESTS[nest](block)
    np.testing.assert_array_equal(compiled(low, X, W), compiled(full, X, W))
    actual, expected = (
        compiled(functools.partial(gradients, f), X, W) for f in (low, full)
    )
    assert all(x.dtype == np.float32 for x in actual)
    assert relative_error(actual, expected) < 0.02
    if nest != "autocast around":
        assert relative_error(actual, expected) > 0


def test_float32_is_kept_in_16_bits_but_for_what_is_there_anyway():
    assert kept(block, X, W) == ["float32"] * 3
    assert kept(compress_residuals(block), X, W) == ["bfloat16"]
    assert kept(compress_residuals(block, "float16"), X, W) == ["float16"]
    # What is closed over is no copy either, in or out of another transform.
    closed = compress_residuals(lambda x: block(x, W))
    assert kept(closed, X) == ["bfloat16", "float32"]
    outer = lambda w: jnp.sum(compress_residuals(lambda x: block(x, w))(X))
    expected = jax.grad(lambda w: jnp.sum(block(X, w)))(W)
    assert relative_error(jax.grad(outer)(W), expected) < 0.02


def test_what_cheap_ops_make_is_computed_again_and_not_kept():
    """A norm, a softmax, a gelu; but not where full precision is asked for."""

    def attention(x, w):
        n = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True))
        return jax.nn.gelu(jax.nn.softmax(n @ w) @ w)

    # What goes in and comes out of two products: n, n @ w, p and p @ w.
    assert kept(compress_residuals(attention), X, W) == ["bfloat16"] * 4
    assert len(kept(attention, X, W)) > 8

    def marked(x, w):
        return full_precision(jnp.tanh)(jnp.exp(x @ w))

    assert set(kept(compress_residuals(marked), X, W)) == {"bfloat16", "float32"}


def test_the_stack_of_a_loop_is_halved():
    def stacked(f):
        fun = lambda x, ws: lax.scan(lambda h, w: (f(h, w), None), x, ws)[0]
        grad = jax.grad(lambda x, ws: jnp.sum(fun(x, ws)), (0, 1))
        (scan, *_) = (
            e for e in live_equations(grad, X, LAYERS) if e.primitive.name == "scan"
        )
        return [v.aval for v in scan.outvars if v.aval.shape == (3, 4, 8)]

    full, low = (
        sum(a.size * a.dtype.itemsize for a in stacked(f))
        for f in (block, compress_residuals(block))
    )
    assert low < 0.7 * full


def test_values_out_of_range_saturate():
    def large(x):
        return jnp.sum(jnp.sin((x @ (1e6 * W)) * 1e-6))

    actual = jax.grad(compress_residuals(large, "float16"))(X)
    assert np.all(np.isfinite(actual))
    assert (
        relative_error(jax.grad(compress_residuals(large))(X), jax.grad(large)(X))
        < 0.01
    )

    def masked(x):
        mask = jnp.tril(jnp.ones((4, 4), bool), -1)
        scores = jnp.where(mask, x @ x.T, jnp.finfo(jnp.float32).min)
        return jnp.sum(jax.nn.softmax(scores * 1.0) @ x)

    for dtype in ("bfloat16", "float16"):
        actual = jax.grad(compress_residuals(masked, dtype))(X)
        assert np.all(np.isfinite(actual))
        assert relative_error(actual, jax.grad(masked)(X)) < 0.02


def test_a_variance_at_a_large_mean_needs_full_precision():
    x = 1000 + jax.random.normal(jax.random.key(0), (64,))
    rotation = 1.0001 * jnp.eye(64)

    def deviation(x):
        y = x @ rotation  # What a matrix product makes waits in 16 bits.
        return jnp.sqrt(jnp.mean(y * y) - jnp.mean(y) ** 2)

    expected = jax.grad(deviation)(x)
    assert relative_error(jax.grad(compress_residuals(deviation))(x), expected) > 0.5
    cured = compress_residuals(full_precision(deviation))
    assert relative_error(jax.grad(cured)(x), expected) < 1e-4
    inside = compress_residuals(jax.jit(full_precision(deviation)))
    assert relative_error(jax.grad(inside)(x), expected) < 1e-4


def test_integers_keys_and_other_results_pass():
    def fun(x, n, key, name, nothing=None):
        assert (name, nothing) == ("a", None)
        noise = jax.random.normal(key, x.shape)
        return jnp.sum(jnp.tanh(x[n] @ W)) + jnp.sum(noise * x), {"n": n, "h": x @ W}

    n, key = jnp.array([1, 2]), jax.random.key(0)
    run = lambda f: jax.value_and_grad(lambda x: f(x, n, key, "a"), has_aux=True)(X)
    (loss, aux), grad = run(compress_residuals(fun))
    (loss_, aux_), grad_ = run(fun)
    assert loss == loss_
    np.testing.assert_array_equal(aux["n"], aux_["n"])
    np.testing.assert_array_equal(aux["h"], aux_["h"])
    assert relative_error(grad, grad_) < 0.02


def test_it_is_differentiated_twice_and_complex_numbers_have_gradients():
    low = compress_residuals(lambda x: jnp.sum(block(x, W) ** 2))
    full = lambda x: jnp.sum(block(x, W) ** 2)
    twice = lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(X)
    assert relative_error(twice(low), twice(full)) < 0.02
    fun = lambda z: jnp.sum(jnp.abs(z) ** 2)
    z = lax.complex(X[0], X[1])
    actual, expected = jax.grad(compress_residuals(fun))(z), jax.grad(fun)(z)
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)


def test_forward_mode_is_refused_and_says_so():
    low = compress_residuals(lambda x: block(x, W))
    with pytest.raises(
        TypeError, match=r"supports reverse mode only.*original function"
    ):
        jax.jvp(low, (X,), (X,))
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        compress_residuals(block, "bf61")


def test_one_block_of_a_linen_model_and_of_an_nnx_model():
    loss = lambda f: lambda p: jnp.sum(f(p, X) ** 2)
    low = compress_residuals(BLOCK.apply)
    actual, expected = (
        compiled(jax.grad(loss(f)), BLOCK_PARAMS) for f in (low, BLOCK.apply)
    )
    assert relative_error(actual, expected) < 0.03

    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8)
            dense(x)  # Parameters are made outside of what is traced.
            return compress_residuals(lambda x: nn.gelu(dense(x)))(x)

    params = initialized(Inside(), X)
    assert jax.grad(loss(Inside().apply))(params)["params"]["Dense_0"][
        "bias"
    ].shape == (8,)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    apply = lambda state, x: jnp.tanh(nnx.merge(graphdef, state)(x))
    grads = [jax.grad(loss(f))(state) for f in (compress_residuals(apply), apply)]
    assert relative_error(*grads) < 0.03


@pytest.mark.parametrize("wrap", [compress_residuals, lambda f: f])
def test_a_linen_stack_scans_over_compressed_blocks(wrap):
    """Its parameters are made by the module; the block is a function of them."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            block = BLOCK.clone(parent=None)
            params = self.param("block", block.init, x)
            return wrap(block.apply)(params, x), None

    stack = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    params = initialized(stack, X, None)
    loss = lambda p: jnp.sum(stack.apply(p, X, None)[0] ** 2)
    grads = compiled(jax.grad(loss), params)
    scans = [
        e for e in live_equations(jax.grad(loss), params) if e.primitive.name == "scan"
    ]
    stacked = {str(v.aval.dtype) for v in scans[0].outvars if v.aval.shape[0] == 3}
    assert ("bfloat16" in stacked) == (wrap is compress_residuals)
    step = lambda x, p: (BLOCK.apply(p, x), None)
    plain = lambda p: jnp.sum(lax.scan(step, X, p["params"]["block"])[0] ** 2)
    expected = compiled(jax.grad(plain), params)
    assert relative_error(grads, expected) < 0.03


def test_autocast_stands_inside_of_it():
    low = compress_residuals(autocast(block))
    assert set(kept(low, X, W)) == {"bfloat16"}
    actual, expected = gradients(low, X, W), gradients(block, X, W)
    assert relative_error(actual, expected) < 0.03
