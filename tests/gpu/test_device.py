"""Laws that hold on the device itself: `make gpu-tests`, about two minutes on a GPU.

XLA for GPUs keeps more digits than a program asks for where it fuses, and adds in
another order. What only holds on a CPU is no law. CI rehearses these tests on a CPU.
"""

import functools
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import relative_error
from jax import lax
from weight_products import SMALL, V, W, X, block, layers

import jmp_lite as jmp

HAS_GPU = jax.default_backend() == "gpu"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not HAS_GPU and os.environ.get("GPU_TESTS") != "rehearse",
        reason="no GPU is here",
    ),
]
LAYERS = jnp.stack([W[:, :48], W[:, 16:], V[:48]])


def attention(x, w):
    q, k, v = (x @ w[:, i : i + 48] for i in (0, 8, 16))
    return jnp.sum((jax.nn.softmax(q @ k.T / 7) @ v) ** 2)


def recurrent(x, w):
    def step(carry, row):
        h, c = carry
        gate = jax.nn.sigmoid(row @ w[:, :48] + h)
        c = gate * c + (1 - gate) * jnp.tanh(row @ w[:, 16:])
        return (jnp.tanh(c), c), h

    return jnp.sum(lax.scan(step, (jnp.zeros(48), jnp.zeros(48)), x)[1] ** 2)


PROGRAMS = {
    "a net": (lambda x, w: block(x, w, V), (X, W)),
    "layers in a scan": (layers, (SMALL, LAYERS)),
    "attention": (attention, (X, W)),
    "a recurrent net": (recurrent, (X, W)),
}
EVERY = pytest.mark.parametrize("name", PROGRAMS)


# ------------------------------------------------------------------------------- laws


@EVERY
def test_results_have_the_types_of_the_function_and_are_near_to_float32(name):
    fun, args = PROGRAMS[name]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(fun, (0, 1)))(*args)
    for dtype, error in (("bfloat16", 0.03), ("float16", 0.01)):
        low = jmp.autocast(fun, compute_dtype=dtype)
        found = jax.jit(jax.value_and_grad(low, (0, 1)))(*args)
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
            jnp.result_type, expected
        )
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert relative_error(a, b) < error


@EVERY
def test_jitting_all_of_a_function_inside_changes_no_bit(name):
    fun, args = PROGRAMS[name]
    results = [jax.jit(jmp.autocast(f))(*args) for f in (fun, jax.jit(fun))]
    np.testing.assert_array_equal(*results)


def test_values_that_16_bits_hold_give_the_results_of_float32_bit_for_bit():
    x = jnp.arange(16.0 * 32).reshape(16, 32) % 3 - 1
    w = (jnp.arange(32 * 16).reshape(32, 16) % 16 == 3).astype(jnp.float32)
    fun = lambda x, w: jnp.sum(jnp.abs(x @ w) @ w.T)
    found, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (jmp.autocast(fun), fun)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@EVERY
def test_the_preset_o0_changes_nothing(name):
    fun, args = PROGRAMS[name]
    found, expected = (jax.jit(f)(*args) for f in (jmp.autocast(fun, "O0"), fun))
    np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------------- loss scaling


def test_a_skipped_step_changes_no_bit_but_its_counts_and_its_scale(standard_promotion):
    params = {"w": W, "v": V}
    optimizer = jmp.loss_scaling(optax.adamw(1e-2))
    update = jax.jit(optimizer.update)
    _, state = update(params, optimizer.init(params), params)
    bad = {**params, "w": W.at[3, 4].set(jnp.inf)}
    updates, after = update(bad, state, params)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_array_equal(leaf, 0)
    before, later = (jax.device_get(s.inner_state) for s in (state, after))
    jax.tree.map(np.testing.assert_array_equal, later, before)
    scales = [float(jmp.get_loss_scale(s).loss_scale) for s in (state, after)]
    assert scales[1] == scales[0] / 2
    assert int(after.skipped) == 1


def test_a_loss_scale_changes_no_bit_of_a_gradient():
    fun = jmp.autocast(lambda w: block(X, w, V))
    scaled = jmp.value_and_grad(fun, loss_scale=jmp.StaticLossScale(2.0**10))
    found, expected = jax.jit(scaled)(W), jax.jit(jax.value_and_grad(fun))(W)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ---------------------------------------------------------------- parameters in 16 bits


@pytest.mark.parametrize("wrap", [jmp.master_weights, jmp.compensated])
def test_parameters_are_their_masters_rounded(wrap):
    """Against float32 parameters that take the same steps."""
    optimizer, plain = wrap(optax.sgd(1e-3)), optax.sgd(1e-3)
    low, full = W.astype(jnp.bfloat16), W.astype(jnp.bfloat16).astype(jnp.float32)
    state, plain_state = optimizer.init(low), plain.init(full)
    update, plain_update = jax.jit(optimizer.update), jax.jit(plain.update)
    for i in range(20):
        grads = jnp.cos(W * (i + 1))
        updates, state = update(grads, state, low)
        low = jmp.apply_updates(low, updates)
        updates, plain_state = plain_update(grads, plain_state, full)
        full = jmp.apply_updates(full, updates)
    found, exact = np.float64(low), np.float64(full)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert np.all(np.abs(found - exact) <= 0.5001 * spacing)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_is_right_on_average(dtype):
    n = 1 << 20
    params = jnp.ones(n, dtype)
    spacing = float(jnp.finfo(dtype).eps)
    optimizer = jmp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    grads = jnp.full(n, -0.3 * spacing)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    moved = (np.float64(jmp.apply_updates(params, updates)) - 1) / spacing
    assert set(np.round(moved, 3)) == {0.0, 1.0}
    assert abs(moved.mean() - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5


# -------------------------------------------------------------------------- formats


def in_low(x):
    return np.float64(jnp.asarray(x, jnp.bfloat16))


def in_float8(x, axis=None):
    """Returns the numbers of e4m3 with one scale, or one for each row, in float64."""
    low = in_low(x)
    largest = np.abs(low).max(axis, keepdims=axis is not None)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    numbers = np.float32(low / scale).astype(ml_dtypes.float8_e4m3fn)
    return np.float64(numbers) * scale


def in_int8(x, axis):
    low = in_low(x)
    scale = np.abs(low).max(axis, keepdims=True) / 127
    return np.round(low / scale) * scale


EXACT = {
    "low": lambda x, w: in_low(x) @ in_low(w),
    "wide": lambda x, w: in_low(x) @ in_low(w),
    "float8": lambda x, w: in_float8(x) @ in_float8(w),
    "float8_rows": lambda x, w: in_float8(x, 1) @ in_float8(w, 0),
    "int8": lambda x, w: in_int8(x, 1) @ in_int8(w, 0),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_product_in_a_format_is_what_the_format_says(name):
    size = 512
    keys = jax.random.split(jax.random.key(1))
    x, w = (jax.random.normal(key, (size, size)) for key in keys)
    rules = jmp.get_rules("mixed")
    if name != "low":
        made = name if name == "wide" else jmp.get_format(name, smallest=0)
        rules = rules.scope("", made)
    found = jax.jit(jmp.autocast(jnp.dot, rules))(x, w)
    exact = EXACT[name](x, w)
    # A result in 16 bits has eight of them, and a GPU's fast sums of float8 some more.
    assert relative_error(found, exact) < (1e-4 if name == "wide" else 4e-3)
    if "float8" in name or name == "int8":
        assert relative_error(found, np.float64(x) @ np.float64(w)) > 4e-3


# ------------------------------------------------------------------------------- tools


def test_the_label_that_a_selection_picks_is_that_of_an_index():
    labels = jnp.arange(32) * 7 % 64

    def loss(w):
        log_probs = jax.nn.log_softmax(X @ w)
        return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], 1))

    without = jmp.get_rules("mixed").without_pass("labels")
    found, expected = (
        jax.jit(jax.value_and_grad(jmp.autocast(loss, rules)))(W)
        for rules in ("mixed", without)
    )
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-2


def test_low_call_gives_a_kernel_16_bits(standard_promotion):
    shape = (2, 128, 4, 64)
    q, k, v = (
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(2), 3)
    )
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    kernel = jmp.low_call(
        functools.partial(attend, implementation="cudnn" if HAS_GPU else "xla")
    )

    def loss(attend, q):
        return jnp.sum(attend(q, k, v) ** 2)

    low = jax.jit(jax.value_and_grad(jmp.autocast(functools.partial(loss, kernel))))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(functools.partial(loss, attend)))(q)
    for a, b in zip(low(q), expected, strict=True):
        assert relative_error(a, b) < 0.02


def test_watch_finds_an_overflow_of_float16():
    def fun(x):
        return jnp.abs((300 * x) @ (300 * W)) @ V

    low = jmp.autocast(fun, compute_dtype="float16")
    _, stats = jax.jit(jmp.watch(low))(X)
    assert jmp.first_nonfinite(stats).op == "dot_general"
    _, stats = jax.jit(jmp.watch(jmp.autocast(fun)))(X)
    assert jmp.first_nonfinite(stats) is None
