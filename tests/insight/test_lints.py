"""Lints of ``explain``, each with a similar program that has no lint."""

import collections
import functools
import inspect
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from helpers import initialized
from jax import lax
from programs import BLOCK, BLOCK_PARAMS, LAYERS, W, X

import jmp_lite as jmp
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain

HERE = "test_lints.py"


def lints(fun, *args, name=None, rules="mixed", **options):
    found = explain(fun, rules, **options)(*args).lints
    return [lint for lint in found if name in (None, lint.name)]


def only(fun, *args, name, **options):
    (lint,) = lints(fun, *args, name=name, **options)
    assert HERE in lint.source or not lint.source
    assert lint.remedy
    return lint


def line_of(fun, text):
    """Returns the number of the line of a function that contains a text."""
    first = fun.__code__.co_firstlineno
    lines = pathlib.Path(__file__).read_text().splitlines()[first - 1 :]
    return first + next(i for i, at in enumerate(lines) if text in at)


def test_a_block_and_a_training_loss_have_no_lints():
    def loss(params, table, tokens):
        logits = BLOCK.apply(params, table[tokens])
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    tokens = jnp.array([0, 3, 1, 2])
    assert lints(loss, BLOCK_PARAMS, X, tokens, backward=True) == []


def test_a_single_float32_op_between_products_has_no_lint():
    """The cast of its result fuses with it."""

    def fun(x, w, ids):
        return (x @ w * ids.astype(jnp.float32)) @ w

    assert lints(fun, X, W, jnp.arange(8)) == []


ATTENTION = nn.MultiHeadDotProductAttention(2)
ATTENTION_PARAMS = initialized(ATTENTION, X)
LSTM = nn.RNN(nn.LSTMCell(8))
LSTM_PARAMS = initialized(LSTM, X[None])


def hand_written_norm(x, w):
    h = x @ w
    centred = h - h.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * w[0]


@pytest.mark.parametrize(
    "fun",
    [
        hand_written_norm,
        lambda x, w: jax.nn.softmax(x @ w),
        lambda x, w: jax.nn.softplus(x @ w),
        lambda x, w: jax.nn.elu(x @ w),
        lambda x, w: jax.nn.gelu(x @ w, approximate=False),
        lambda x, w: (x @ w) / jnp.linalg.norm(x @ w, axis=-1, keepdims=True),
        jax.jit(lambda x, w: jax.nn.softplus(x @ w)),
        lambda x, w: x @ w + jnp.exp(x @ w.T),  # One op, and the cast fuses with it.
        lambda x, w: ATTENTION.apply(ATTENTION_PARAMS, x @ w),
        lambda x, w: LSTM.apply(LSTM_PARAMS, x[None] @ w)[0],
    ],
)
@pytest.mark.parametrize("rules", ["mixed", "torch", "O1"])
def test_ops_that_are_float32_on_purpose_have_no_lint_and_gradients_have_none(
    fun, rules
):
    def model(x, w):
        return jnp.sum(jnp.tanh(fun(x, w) @ w) @ w)

    for explained in (model, jax.grad(model), jax.jit(jax.grad(model, (0, 1)))):
        assert lints(explained, X, W, rules=rules) == []


def test_an_op_that_widens_a_stream_is_named_with_its_cost():
    def model(x, w):
        angle = jnp.arange(8.0) * jnp.exp(jnp.arange(8.0))  # Sinusoidal positions.
        h = x @ w + angle  # Here.
        h = jnp.tanh(h) * 2
        return h @ w

    lint = only(model, X, W, name="widened stream")
    assert f":{line_of(model, '# Here.')} " in lint.source
    assert "3 ops (384 B) from here on run in float32" in lint.message
    assert "as_low" in lint.remedy
    fixed = lambda x, w: jnp.tanh(x @ w + jmp.as_low(jnp.exp(jnp.arange(8.0)))) @ w
    assert lints(fixed, X, W, name="widened stream") == []
    # The result of a function of one value is 16-bit; one of two values is float32.
    residual = lambda x, w: jnp.tanh(x @ w + jax.nn.softplus(x @ w @ w)) @ w
    assert lints(residual, X, W, name="widened stream") == []
    residual = lambda x, w: jnp.tanh(x @ w + jnp.log1p(jnp.exp(x @ w @ w))) @ w
    lint = only(residual, X, W, name="widened stream")
    assert lint.message.startswith(f"log1p at {HERE}:")
    # The tail of a loss is float32 on purpose.
    tail = lambda x, w: jnp.sum(jnp.log(jnp.abs(x)) + x @ w)
    assert lints(tail, X, W, name="widened stream") == []


def test_a_float32_input_whose_digits_may_matter_is_pointed_to():
    coordinates = lambda x, t, w: jnp.tanh(x @ w + t) @ w
    lint = only(coordinates, X, X, W, name="float32 input")
    assert "as_full" in lint.remedy
    bias = lambda x, b, w: jnp.tanh(x @ w + b) @ w
    assert lints(bias, X, W[0], W, name="float32 input") == []
    spread = lambda x, b, w: jnp.tanh(x @ w + jnp.broadcast_to(b, (4, 8))) @ w
    assert lints(spread, X, W[0], W, name="float32 input") == []
    marked = lambda x, t, w: jnp.tanh(x @ w + jmp.as_full(t)) @ w
    assert lints(marked, X, X, W, name="float32 input") == []
    part = lambda x, t, w: jnp.tanh(x @ w + t[:4]) @ w
    either = lambda f: lambda *args: lax.cond(args[0][0, 0] > 0, f, f, *args)
    for wrap in (lambda f: f, jax.jit, either):
        assert only(wrap(part), X, jnp.ones((9, 8)), W, name="float32 input")
    steps = lambda x, ts, w: (
        lax.scan(lambda h, t: (jnp.tanh(h @ w + t), None), x, ts)[0] @ w
    )
    assert only(steps, X, jnp.ones((3, 4, 8)), W, name="float32 input")


def test_an_input_that_is_no_more_than_rounded_anyway_is_not_pointed_to():
    residual = lambda x, w: (x + jnp.tanh(x @ w)) @ w
    assert lints(residual, X, W, name="float32 input") == []
    # Parameters come in a tree; they have no digits to lose.
    embedded = lambda params, x: (x @ params["w"] + params["positions"]) @ params["w"]
    params = {"w": W, "positions": X}
    assert lints(embedded, params, X, name="float32 input") == []
    # Under these rules the user requests low precision for all ops.
    centred = lambda x: x - x.mean(-1, keepdims=True)
    added = lambda x, t, w: (x @ w + t) @ w
    for rules in ("O2", "O3"):
        assert lints(centred, X, rules=rules, name="float32 input") == []
        assert lints(added, X, X, W, rules=rules, name="float32 input") == []


def test_a_carry_that_could_be_low_is_pointed_to():
    def returned(x, stack):
        step = lambda h, w: (jnp.tanh(h @ w), h.sum())
        return lax.scan(step, x, stack)

    lint = only(returned, X, LAYERS, name="float32 carry")
    assert "carry 0: a result" in lint.message
    assert 'carry(scope, "follow")' in lint.remedy

    def widened(x, stack):
        step = lambda h, w: (h + jnp.tanh(h @ w) + jnp.exp(h), None)
        return lax.scan(step, x, stack)[0] @ W

    lint = only(widened, X, LAYERS, name="float32 carry")
    assert "the loop body makes it float32: exp at" in lint.message

    def low(x, stack):
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, stack)[0] @ W

    assert lints(low, X, LAYERS, name="float32 carry") == []
    total = lambda x: lax.scan(lambda s, x: (s + x.sum(), None), 0.0, x)
    assert lints(total, X, name="float32 carry") == []
    # In rules that keep all ops but products in float32, carries are float32.
    assert lints(widened, X, LAYERS, rules="O1", name="float32 carry") == []


def test_weights_that_a_loop_trains_are_no_stack_of_layers():
    loss = lambda w, x: jnp.mean((x @ w) ** 2)

    def sgd(w, batches):
        step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x))
        return lax.scan(step, w, batches)

    batches = jnp.ones((3, 4, 8))
    assert lints(sgd, W, batches) == []
    assert lints(lambda w, xs: lax.scan(jax.jit(sgd), w, xs), W, batches[None]) == []


def test_a_product_that_a_precision_keeps_is_pointed_to():
    exact = lambda x, w: jnp.matmul(x, w, precision="highest")
    assert "precision=" in only(exact, X, W, name="float32 product").remedy
    assert lints(lambda x, w: x @ w, X, W, name="float32 product") == []


@pytest.mark.parametrize(
    ("m", "k", "n", "odd"),
    [
        *((16, 24, 17, "17"), (16, 100, 8, "100"), (16, 24, 8, None)),
        *((16, 24, 1, None), (16, 17, 1, None)),
    ],
)
def test_sizes_that_miss_tensor_cores_get_a_lint(m, k, n, odd):
    found = lints(jnp.matmul, jnp.ones((m, k)), jnp.ones((k, n)), name="tensor cores")
    assert bool(found) == bool(odd)
    if odd:
        assert found[0].message.startswith(f"{odd} is not a multiple of 8, in")
        assert f"{m} x {n} x {k}" in found[0].message


@pytest.mark.parametrize(
    ("channels", "out", "groups", "sizes"),
    [(3, 64, 1, None), (32, 32, 32, None), (16, 64, 1, None), (12, 20, 1, "12 x 20")],
)
def test_channels_that_miss_tensor_cores_get_a_lint(channels, out, groups, sizes):
    conv = nn.Conv(out, (3, 3), feature_group_count=groups)
    image = jnp.ones((2, 8, 8, channels))
    params = conv.init(jax.random.key(0), image)
    found = lints(conv.apply, params, image, name="tensor cores")
    assert bool(found) == bool(sizes)
    assert [lint.message for lint in found] == [
        f"{size} is not a multiple of 8, in a product of sizes {sizes}"
        for size in ((12, 20) if sizes else ())
    ]


def test_each_size_gets_one_lint_with_the_largest_of_its_products():
    layers = lambda x: [
        x @ jnp.full((8, 12), 0.5),
        (x @ jnp.full((8, 12), 0.5))[:, :8] @ jnp.full((8, 20), 0.5),
        jnp.full((64, 8), 0.5) @ jnp.full((8, 12), 0.5),  # The largest.
    ]
    first, second = lints(layers, X, name="tensor cores")
    assert first.message == (
        "12 is not a multiple of 8, in 3 products, the largest of sizes 64 x 12 x 8"
    )
    lines, start = inspect.getsourcelines(layers)
    (at,) = (i for i, line in enumerate(lines, start) if "# The largest." in line)
    assert f"test_lints.py:{at} " in first.source
    assert second.message.startswith("20 is not a multiple of 8, in a product of sizes")


def test_fifty_lints_that_say_the_same_are_one():
    def fun(x):
        for i in range(50):
            with jax.named_scope(f"{'abc'[i % 3]}{i}"):
                x = jnp.tanh(x @ jnp.ones((x.shape[1], 9 + i % 2)))
        return x

    found = lints(fun, X)
    assert [lint.name for lint in found] == ["tensor cores", "tensor cores"]
    assert all(
        "in 49 products" in lint.message or "50" in lint.message for lint in found
    )
    low = explain(fun, get_rules("O1").scope("", "full"))(X).lints
    assert len(low) < 5


def test_products_inside_of_a_function_that_is_kept_are_pointed_to():
    composite = functools.partial(lax.composite, name="its.product")
    kept = composite(lambda x, w: jnp.tanh(x @ w) @ w)
    lint = only(lambda x: kept(jnp.sin(x), W), X, name="kept product")
    assert "composite runs as traced, with 2 float32 matrix products" in lint.message
    assert "jmp_lite.autocast to the function inside" in lint.remedy
    low = composite(jmp.autocast(lambda x, w: jnp.tanh(x @ w) @ w))
    assert lints(lambda x: low(jnp.sin(x), W), X, name="kept product") == []

    grows = lambda x: lax.while_loop(
        lambda c: c.sum() < 1e4, lambda c: c + jnp.tanh(c @ W), x
    )
    lint = only(grows, X, name="kept product")
    assert "while runs as traced, with a float32 matrix product" in lint.message
    # A solution needs its digits.
    solve = lambda x: jax.scipy.sparse.linalg.cg(lambda v: W @ v, x[0])[0]
    assert lints(solve, X, name="kept product") == []


def test_an_opaque_op_that_16_bits_are_raised_for_is_pointed_to():
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    kernel = lambda x: jax.pure_callback(np.tanh, shape, x)
    lint = only(lambda x: kernel(x @ W) @ W, X, name="opaque op")
    assert lint.message.startswith("pure_callback runs as traced")
    assert "low_call" in lint.remedy
    assert lints(lambda x: kernel(x) @ W, X, name="opaque op") == []
    inner = jmp.autocast(jnp.tanh, "O0")
    assert lints(lambda x: inner(x @ W), X, name="opaque op") == []

    def until_small(x):
        return lax.while_loop(
            lambda h: h.max() > 1e-3, lambda h: jnp.tanh(h @ W / 99), x
        )

    lint = only(lambda x: until_small(x @ W) @ W, X, name="opaque op")
    assert lint.message.startswith("while runs as traced")
    assert 'rules.carry(scope, "follow")' in lint.remedy
    assert lints(lambda x: until_small(x) @ W, X, name="opaque op") == []


@pytest.mark.parametrize(
    "fun",
    [
        lambda h: jnp.linalg.solve(h.T @ h, W),
        lambda h: lax.reduce_precision(h, 5, 10),
        lambda h: jax.debug.print("{}", h) or h,
    ],
)
def test_an_op_without_a_form_in_16_bits_is_not_pointed_to(fun):
    assert lints(lambda x: fun(x @ W) @ W, X, name="opaque op") == []


@pytest.mark.parametrize("number", [0.1, 1e-30, 1e9])
def test_a_number_that_is_marked_is_float32_by_choice(number):
    def fun(x):
        scale = jmp.as_full(jnp.float32(number))
        return (x @ W * scale) @ W

    assert lints(fun, X, name="literal out of range", rules="mixed") == []
    rows = explain(fun)(X).rows
    (mul,) = (row for row in rows if row.op == "mul")
    assert mul.precision == "float32"
    assert "as_full" in mul.reason


def test_a_literal_that_does_not_fit_is_pointed_to():
    def masked(x, w, end=-1e9):
        return jnp.tanh(jnp.where(x > 0, x @ w, end) * 1.5) @ w

    def shifted(x, w):
        return jnp.tanh((x @ w) + 1e9) @ w

    f16 = {"name": "literal out of range", "compute_dtype": "float16"}
    lint = only(shifted, X, W, **f16)
    assert "the number 1000000000.0 does not fit float16" in lint.message
    assert "For a mask" in lint.remedy
    assert lints(shifted, X, W, name="literal out of range") == []
    assert "the number -1000000000.0" in only(masked, X, W, **f16).message
    assert lints(functools.partial(masked, end=-jnp.inf), X, W, **f16) == []
    table = lambda x, w: jnp.tanh(x @ w + np.full(8, 1e9, np.float32)) @ w
    lint = only(table, X, W, **f16)
    assert "a constant too large for 16 bits does not fit float16" in lint.message
    # The numbers of an argument are unknown when a program is traced.
    bias = lambda x, w, b: jnp.tanh(x @ w + b) @ w
    assert lints(bias, X, W, W[0], rules="torch", name="literal out of range") == []


def test_a_literal_that_vanishes_or_becomes_one_is_pointed_to():
    guarded = lambda x, w: jnp.tanh((x @ w) / (jnp.abs(x @ w) + 1e-8)) @ w
    decayed = lambda x, w: jnp.tanh((x @ w) * 0.9999) @ w
    name = "literal out of range"
    lint = only(guarded, X, W, name=name, compute_dtype="float16")
    assert "e-09 is 0 in float16, so this op runs in float32" in lint.message
    assert lint.remedy == "Use 6.1e-05 or more if it is an epsilon"
    lint = only(decayed, X, W, name=name)
    assert "the number 0.9998999834060669 is 1 in bfloat16" in lint.message
    assert lint.remedy == "Apply jmp_lite.as_low to the result if 1 suffices"
    assert lints(guarded, X, W, name=name) == []
    assert lints(lambda x, w: jnp.tanh((x @ w) * 0.99) @ w, X, W, name=name) == []


def test_float16_without_a_loss_scale_is_pointed_to():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    f16 = {"compute_dtype": "float16", "name": "no loss scale"}
    assert "below 6e-8 become zero" in only(loss, W, X, backward=True, **f16).message
    assert lints(jax.grad(loss), W, X, **f16)
    assert lints(loss, W, X, **f16) == [], "nothing is differentiated"
    assert lints(loss, W, X, backward=True, name="no loss scale") == []
    scaled = jmp.grad(loss, loss_scale=jmp.StaticLossScale(1024))
    assert lints(scaled, W, X, **f16) == []
    init, step = jmp.build_train_step(
        lambda params, state, batch, rng: (loss(params, batch), (state, None)),
        lenient(optax.sgd(0.1)),
        get_rules("mixed", "float16"),
    )
    assert lints(step, init(W), X, name="no loss scale") == []


def test_a_mark_that_only_16_bit_products_read_is_pointed_to():
    name = "useless mark"
    lint = only(lambda x, w: jmp.as_full(x) @ w, X, W, name=name)
    assert "jmp_lite.full_precision" in lint.remedy

    def in_float32(x, w):
        with jmp.full_precision():
            return jmp.as_full(x) @ w

    def read_twice(x, w):
        y = jmp.as_full(x)
        return y @ w + y

    for right in (
        in_float32,
        read_twice,
        lambda x, w: (jmp.as_full(x), x @ w),
        lambda x, w: jmp.as_full(x @ w) + 1,
        lambda x, w: jmp.as_low(x) @ w,
    ):
        assert lints(right, X, W, name=name) == []
    assert lints(lambda x, w: jmp.as_full(x) @ w, X, W, name=name, rules="O0") == []


def test_an_inner_autocast_function_gets_a_lint_with_a_remedy():
    @jax.named_scope("block")
    def model(x):
        return jnp.tanh(x @ W) @ W

    inner = jmp.autocast(model, "O1")
    found = only(lambda x: inner(x) * 2, X, name="inner autocast")
    assert "decides 3 equations and hides" in found.message
    assert "fun.__wrapped__" in found.remedy
    outer = explain(lambda x: inner(x) @ W, compute_dtype="float16")(X)
    (found,) = [lint for lint in outer.lints if lint.name == "inner autocast"]
    assert (
        "3 equations, with products in bfloat16 instead of float16, and hides"
        in found.message
    )
    assert inner.__wrapped__ is model
    assert lints(model, X, name="inner autocast") == []


def test_a_lint_reads_as_a_sentence_with_its_place():
    def model(x, w):
        return jnp.matmul(x, w, precision="highest")

    explanation = explain(model)(X, W)
    place = f"{HERE}:{line_of(model, 'precision=')}"
    assert f"lint: {place}: a matrix product requests" in str(explanation)
    assert collections.Counter(lint.name for lint in explanation.lints) == {
        "float32 product": 1
    }
    nowhere = explain(jnp.matmul)(jnp.ones((16, 8)), jnp.ones((8, 12)))
    assert "lint: 12 is not a multiple of 8, in a product of sizes 16 x 12 x 8" in str(
        nowhere
    )


# ------------------------------------------------- products whose digits are needed


def distances(x, y):
    """Pairs of points, by the binomial formula."""
    squares = (x * x).sum(-1)[:, None] + (y * y).sum(-1)
    return squares - 2 * (x @ y.T)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_difference_of_products_under_a_root_or_a_pick_is_pointed_to(wrap):
    reads = (
        lambda d: jnp.sqrt(jnp.maximum(d, 0)),
        lambda d: lax.top_k(-d, 2)[1],
        lambda d: jnp.argmin(d, -1),
    )
    for read in reads:
        fun = lambda x, y, read=read: read(wrap(distances)(x, y))
        lint = only(fun, X, W, name="cancellation")
        assert "differences" in lint.remedy
    plain = lambda x, w: (lax.top_k(x @ w, 2)[1], jnp.sqrt((x @ w) ** 2 + 1))
    assert lints(plain, X, W, name="cancellation") == []

    @jmp.full_precision
    def careful(x, y):
        return jnp.sqrt(jnp.maximum(distances(x, y), 0))

    assert lints(careful, X, W, name="cancellation") == []


def test_a_16_bit_product_under_a_sine_is_pointed_to():
    hidden = lambda x, w: jnp.cos(30 * (jnp.tanh(x @ w) @ w) + 1) @ w
    assert only(hidden, X, W, name="low phase").message.startswith("sin or cos")
    given = lambda x, w: jnp.cos(30 * (x @ w) + 1) @ w
    assert lints(given, X, W, name="low phase") == []
    bounded = lambda x, w: jnp.cos(jnp.tanh(x @ w @ w)) @ w
    assert lints(bounded, X, W, name="low phase") == []


def test_integers_that_a_product_looks_up_are_pointed_to():
    def looked_up(x, w, ids):
        one_hot = jax.nn.one_hot(ids, 1000)
        numbers = jnp.arange(1000).astype(jnp.float32)
        return jnp.tanh(one_hot @ numbers)[:, None] * (x @ w) @ w

    ids = jnp.arange(4)
    assert only(looked_up, X, W, ids, name="low lookup").remedy.startswith(
        "Use an index"
    )
    learned = lambda x, w, ids: jax.nn.one_hot(ids, 8) @ w @ (x @ w).T
    assert lints(learned, X, W, ids, name="low lookup") == []
    expected = lambda x, w: jax.nn.softmax(x @ w) @ jnp.arange(8.0)
    assert "averages them" in only(expected, X, W, name="low lookup").message
    masked = lambda x, w: jnp.tril(jnp.ones((8, 8))) @ jnp.tanh(x @ w).T @ x
    assert lints(masked, X, W, name="low lookup") == []


def test_what_is_left_of_a_subtracted_product_is_pointed_to():
    def delta_rule(state, keys, values):
        def step(state, pair):
            key, value = pair
            return state + jnp.outer(value - state @ key, key), state @ key

        return lax.scan(step, state, (keys, values))

    lint = only(delta_rule, W, X, X, name="residue")
    assert "what is left" in lint.message
    assert "full_precision" in lint.remedy
    returned = lambda x, w: x[:, :1] - x @ w
    assert only(returned, X, W, name="residue")

    def regression(x, w):
        return jnp.mean((x[:, :1] - x @ w) ** 2)

    def layers(x, w):
        step = lambda h, _: (h - jnp.tanh(h @ w) @ w, None)
        return lax.scan(step, x, length=3)[0].sum()

    one_minus = lambda x, w: jax.nn.relu(1 - x @ w)
    for fun in (regression, layers, one_minus):
        assert lints(fun, X, W, name="residue") == []


def test_a_quotient_of_nearly_equal_products_is_pointed_to():
    def scaled(x, w):
        h = x @ w
        low, high = h.min(-1, keepdims=True), h.max(-1, keepdims=True)
        return (h - low) / (high - low + 1e-6)

    assert "a difference of 16-bit products" in (
        only(scaled, X, W, name="low range").message
    )
    sums = lambda x, w: (x @ w) / (1 + (x @ w).sum(-1, keepdims=True))
    assert lints(sums, X, W, name="low range") == []


@pytest.mark.parametrize(
    ("dtype", "fun"),
    [
        ("complex64", lambda x: jnp.fft.ifft(jnp.fft.fft(x) * (1 + 2j)).real),
        ("float64", lambda x: x.astype("float64") @ x.T.astype("float64")),
    ],
)
def test_work_that_autocast_leaves_alone_is_pointed_to(dtype, fun):
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(dtype == "float64"):
        lint = only(fun, X, name="wide work")
        assert re.match(r"[0-9]+% of the bytes that ops compute are", lint.message)
        small = lambda x: (x[:, :1] @ x[:1]).sum() + fun(x[:1, :1]).sum()
        ones = jnp.ones((32, 32), "float32")
        assert lints(small, ones, name="wide work") == []


DRAWS = {
    "normal": lambda key, dtype: jax.random.normal(key, (4,), dtype),
    "bernoulli": lambda key, dtype: jax.random.bernoulli(key, jnp.ones(4, dtype) / 9),
    "categorical": lambda key, dtype: jax.random.categorical(key, jnp.ones(4, dtype)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_draws_in_16_bits_are_pointed_to(name, dtype):
    draw, key = DRAWS[name], jax.random.key(0)
    lint = only(lambda key: draw(key, dtype), key, name="low sampling")
    assert f"drawn in {dtype}" in lint.message
    assert lints(lambda key: draw(key, "float32"), key, name="low sampling") == []
    bits = lambda x: lax.bitcast_convert_type(x.astype("uint16"), dtype)
    assert lints(bits, jnp.arange(4), name="low sampling") == []


def test_a_filter_has_no_lint_for_its_state():
    def filtered(state, measured):
        def step(carry, z):
            x, p = carry
            gain = jnp.linalg.solve(p + jnp.eye(12), p)
            return (x + gain @ (z - x), p - gain @ p), x

        return lax.scan(step, state, measured)

    state = jnp.ones(12), jnp.eye(12)
    assert lints(filtered, state, jnp.ones((9, 12)), name="float32 carry") == []

    def small(x, stack):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, stack)

    four = jnp.ones((3, 4, 4))
    assert lints(small, four[0], four, name="float32 carry") == []
    assert only(small, X, LAYERS, name="float32 carry")


def test_a_lint_in_a_package_names_its_line_and_the_users():
    dense = nn.Dense(9)
    params = dense.init(jax.random.key(0), X)
    lint = only(lambda x: dense.apply(params, x), X, name="tensor cores")
    assert lint.package.startswith("flax/linen/linear.py:")
    assert re.search(r"test_lints.py:\d+, in flax/linen/linear.py:\d+: 9 is", str(lint))
    own = only(lambda x: x @ jnp.full((8, 9), 0.5), X, name="tensor cores")
    assert own.package == ""


@pytest.mark.parametrize(
    "read",
    [
        lambda g: jnp.log(1 - g),
        lambda g: jnp.sqrt(jnp.maximum(1 - g**2, 0)),
        lambda g: 1 / (2 * (1 - g)).T,
        lambda g: jnp.round(g - 0.25),
    ],
)
def test_a_16_bit_difference_whose_error_an_op_amplifies_is_pointed_to(read):
    def gated(x, w, read=read):
        gate = jax.nn.sigmoid(x @ w)
        return (gate * (x @ w)) @ w, read(gate)

    lowered = get_rules("mixed").low("sub")
    lint = only(gated, X, W, name="amplified rounding", rules=lowered)
    assert lint.remedy == "Compute it under jmp_lite.full_precision"
    assert lints(gated, X, W, name="amplified rounding") == []
    squared = lambda x, w: gated(x, w, lambda g: jnp.log(((1 - g) ** 2).sum()))
    assert lints(squared, X, W, name="amplified rounding", rules=lowered) == []
