"""The carries of loops: which may be low, and which have to be float32."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    compiled,
    equations,
    initialized,
    live_equations,
    products,
    relative_error,
)
from jax import lax
from programs import LAYERS, LSTM, LSTM_PARAMS, W, X

import jmp_lite
from benchmarks.compiled import compile_for, missing
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import full_precision, low_precision
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain

LOW, FULL = "bfloat16", "float32"


def carries(fun, *args, rules="mixed"):
    """Returns the dtype of each carry of the scans that is float32 as traced."""
    return [
        row.precision for row in explain(fun, rules)(*args).rows if row.op == "scan"
    ]


def layers(x, stack, after=lambda h: h @ W):
    """A stack of layers over which a scan runs."""
    h, _ = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, stack)
    return after(h)


# -------------------------------------- (1) what only low products read is low


def test_the_hidden_state_of_an_lstm_is_low_and_its_cell_is_float32():
    """Products cast the hidden state anyway. The cell is a sum: it needs digits."""
    assert carries(LSTM.apply, LSTM_PARAMS, X[None]) == [FULL, LOW]
    long = jnp.ones((1, 1000, 8)) * 0.1
    actual, expected = (
        f(LSTM_PARAMS, long) for f in (autocast(LSTM.apply), LSTM.apply)
    )
    assert relative_error(actual, expected) < 0.01


def test_a_state_that_only_products_read_is_low_whatever_it_starts_from():
    step = lambda h, x: (jnp.tanh((h.T @ W.T).T + x @ W), None)
    for start in (lambda x: x, lambda x: x @ W, jnp.exp):
        fun = lambda x, xs, start=start: lax.scan(step, start(x), xs)[0]
        assert carries(fun, W, jnp.ones((3, 8, 8))) == [LOW]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_call_between_carry_and_product_changes_nothing(wrap):
    step = wrap(lambda h: jnp.tanh(h @ W))
    fun = lambda x: lax.scan(lambda h, _: (step(h), None), x, length=3)[0]
    assert carries(fun, X) == [LOW]


def test_a_carry_that_another_op_than_a_product_reads_is_float32():
    fun = lambda x: lax.scan(lambda h, _: (jnp.tanh(h @ W), h.sum()), x, length=3)[0]
    assert carries(fun, X) == [FULL]


def test_a_product_that_is_marked_float32_does_not_make_its_carry_low():
    @full_precision
    def exact(h):
        return h @ W

    fun = lambda x: lax.scan(lambda h, _: (jnp.tanh(exact(h)), None), x, length=3)[0]
    assert carries(fun, X) == [FULL]


# ------------------------------------------------- (2) a stack of layers follows


@pytest.mark.parametrize("start", [lambda x: x, lambda x: x @ W, lambda x: x + 0])
def test_a_stack_of_layers_is_low_from_a_float32_and_from_a_low_start(start):
    fun = lambda x, stack: layers(start(x), stack)
    assert carries(fun, X, LAYERS) == [LOW]
    eqns = live_equations(jax.grad(lambda x, s: autocast(fun)(x, s).sum()), X, LAYERS)
    assert set(products(eqns)) == {(LOW,) * 3}


def test_a_stack_of_layers_is_float32_where_its_body_adds_a_float32_value():
    assert carries(lambda x, s: layers(jnp.exp(x), s), X, LAYERS) == [LOW]

    def body(h, w):
        return h + jnp.tanh(h @ w) + jnp.exp(h), None

    fun = lambda x, s: lax.scan(body, x, s)[0] @ W
    assert carries(fun, X, LAYERS) == [FULL]
    (row,) = (row for row in explain(fun)(X, LAYERS).rows if row.op == "scan")
    assert "exp at test_carries.py:" in row.reason


def pre_norm(h, w):
    with jax.named_scope("LayerNorm"):
        n = (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True)
    return h + jnp.tanh(n @ w)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("start", [lambda x: x, lambda x: x + 1, lambda x: x @ W])
def test_any_part_of_a_stack_of_layers_may_be_in_a_call(wrap, start):
    def stacked(wrapped):
        def fun(x):
            x = start(x)
            for w, is_wrapped in zip(LAYERS, wrapped, strict=True):
                x = (wrap(pre_norm) if is_wrapped else pre_norm)(x, w)
            return x @ W

        return fun

    def decisions(fun):
        rows = jmp_lite.explain(fun)(X).rows
        return [(row.op, row.precision, row.code, row.shapes) for row in rows]

    plain, *others = map(stacked, itertools.product([False, True], repeat=len(LAYERS)))
    expected = decisions(plain), autocast(plain)(X)
    assert {p for op, p, *_ in expected[0] if op == "dot_general"} == {LOW}
    for other in others:
        assert decisions(other) == expected[0]
        np.testing.assert_array_equal(autocast(other)(X), expected[1])
        grads = (
            jax.grad(lambda x, f=f: autocast(f)(x).sum())(X) for f in (other, plain)
        )
        assert relative_error(*grads) < 0.01


def test_a_block_is_converted_again_for_a_16_bit_input():
    block = jax.jit(lambda h, w: jnp.tanh(h) @ w)

    def fun(x):
        x = x + 1
        for w in LAYERS:
            x = block(x, w)
        return x

    eqns = live_equations(autocast(fun), X)
    tanh = [str(e.outvars[0].aval.dtype) for e in eqns if e.primitive.name == "tanh"]
    assert tanh == [FULL] + [LOW] * (len(LAYERS) - 1)


def test_weights_that_are_trained_in_a_loop_are_float32():
    def train(w, x):
        return w - 1e-3 * (x.T @ (x @ w)), None

    samples = jnp.stack([X, -X, 2 * X])
    assert carries(lambda w: lax.scan(train, w, samples)[0], W) == [FULL]


def test_an_auxiliary_loss_beside_a_stack_of_layers_is_float32():
    def body(carry, w):
        h, loss = carry
        h = h + jnp.tanh(h @ w)
        return (h, loss + (h @ w).mean()), None

    def fun(x, stack):
        (h, loss), _ = lax.scan(body, (x, jnp.float32(0)), stack)
        return h @ W, loss, loss * (x @ W)  # A product reads the loss too.

    assert carries(fun, X, LAYERS) == [LOW, FULL]


TAKE = {
    "dynamic_index_in_dim": lambda ws, i: lax.dynamic_index_in_dim(ws, i, 0, False),
    "dynamic_slice": lambda ws, i: lax.dynamic_slice_in_dim(ws, i, 1)[0],
    "by index": lambda ws, i: ws[i],
    "take": lambda ws, i: jnp.take(ws, i, axis=0),
    "take, clipped": lambda ws, i: jnp.take(ws, i, axis=0, mode="clip"),
    "gather": lambda ws, i: jnp.stack([ws, ws], 1)[i, 0],
    "backwards": lambda ws, i: ws[len(ws) - 1 - i],
    "called": jax.jit(lambda ws, i: ws[i]),
}


@pytest.mark.parametrize("take", TAKE)
def test_a_loop_is_a_stack_of_layers_however_it_selects_its_weights(take):
    def step(i, h, stack):
        return h + jnp.tanh(h @ TAKE[take](stack, i))

    def counted(x, stack):
        return lax.fori_loop(0, 3, lambda i, h: step(i, h, stack), x) @ W

    def scanned(x, stack):
        of_steps = lambda h, i: (step(i, h, stack), None)
        return lax.scan(of_steps, x, jnp.arange(3))[0] @ W

    def sliced(x, stack):
        layers = lambda h, w: (h + jnp.tanh(h @ w), None)
        return lax.scan(layers, x, stack[::-1] if take == "backwards" else stack)[0] @ W

    assert carries(counted, X, LAYERS) == [LOW]
    assert carries(scanned, X, LAYERS) == [LOW]
    results = [compiled(autocast(f), X, LAYERS) for f in (scanned, sliced)]
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_weights_that_every_step_reads_are_no_stack_of_layers():
    def fun(x, stack, index):
        step = lambda h, _: (h + jnp.tanh(h @ stack[index]), None)
        return lax.scan(step, x, length=3)[0] @ W

    assert carries(fun, X, LAYERS, jnp.int32(1)) == [FULL]


def test_linen_s_own_scan_over_blocks_is_a_stack_of_layers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
            return x + nn.Dense(8)(h), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return nn.Dense(4)(nn.LayerNorm()(scan()(x, None)[0]))

    params = initialized(Stack(), X)
    assert carries(Stack().apply, params, X) == [LOW]
    loss = lambda f: lambda p: jnp.mean(f(p, X) ** 2)
    both = autocast(Stack().apply), Stack().apply
    actual, expected = (compiled(jax.grad(loss(f)), params) for f in both)
    assert relative_error(actual, expected) < 0.03


# ------------------------------------------------------------- (3) else it is float32


def test_sums_averages_integrators_and_inner_optimizers_are_float32():
    def running_sum(x, xs):
        return lax.scan(lambda c, x: (c + x @ W, None), x @ W, xs)[0] @ W

    def average(x, xs):
        return lax.scan(lambda c, x: (0.99 * c + 0.01 * (x @ W), None), x @ W, xs)[0]

    def integrator(x, xs):
        return lax.scan(lambda c, x: (c + 0.01 * jnp.tanh(c @ W), None), x, xs)[0]

    def descent(w, xs):
        def step(w, x):
            grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
            return w - 1e-4 * grad, None

        return lax.scan(step, w, xs)[0]

    xs = jnp.ones((500, 4, 8)) * 0.1
    for fun, start in (
        *((running_sum, X), (average, X), (integrator, X), (descent, W)),
    ):
        assert carries(fun, start, xs) == [FULL], fun
        actual, expected = autocast(fun)(start, xs), fun(start, xs)
        assert relative_error(actual, expected) < 0.01, fun
        # With low carries it would be wrong, which shows that the rule is needed.
        if fun is not descent:
            continue
        rules = get_rules("mixed").carry(".*", "follow")
        moved, wanted = autocast(fun, rules)(start, xs) - start, expected - start
        assert relative_error(moved, wanted) > 0.5
        assert relative_error(actual - start, wanted) < 0.05


def test_a_stack_whose_last_value_is_only_returned_is_float32():
    assert carries(lambda x, s: layers(x, s, lambda h: h), X, LAYERS) == [FULL]


def two_streams(a, b, stack, after=lambda a, b: a @ W):
    """A stack of layers with two streams, of which one may be dropped."""

    def body(carry, w):
        a, b = carry
        return (jnp.tanh(a @ w) + b, jnp.tanh(b @ w)), None

    (a, b), _ = lax.scan(body, (a, b), stack)
    return after(a, b)


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint, jax.vmap])
def test_a_stream_whose_last_value_nobody_reads_is_no_result(wrap):
    fun = wrap(two_streams)
    stack = jnp.stack([LAYERS] * len(X)) if wrap is jax.vmap else LAYERS
    assert carries(fun, X, X, stack) == [LOW, LOW]
    both = wrap(functools.partial(two_streams, after=lambda a, b: (a @ W, b)))
    assert carries(both, X, X, stack) == [LOW, FULL], "it is a result here"
    gradient = jax.grad(lambda *args: jnp.sum(autocast(fun)(*args) ** 2), 2)
    exact = jax.grad(lambda *args: jnp.sum(fun(*args) ** 2), 2)
    assert relative_error(gradient(X, X, stack), exact(X, X, stack)) < 0.03


@pytest.mark.targets
def test_a_dropped_stream_holds_no_more_memory_than_with_a_rule(standard_promotion):
    if missing("h100"):
        pytest.skip(missing("h100"))
    x = jax.ShapeDtypeStruct((4096, 512), FULL)
    stack = jax.ShapeDtypeStruct((8, 512, 512), FULL)

    def temporaries(rules):
        loss = lambda x, stack: jnp.sum(
            two_streams(x, x, stack, lambda a, b: a @ stack[0]) ** 2
        )
        gradient = jax.grad(autocast(loss, rules), 1)
        return compile_for("h100", gradient, x, stack).temporaries

    low = temporaries("mixed")
    assert low == temporaries(get_rules("mixed").carry(".*", "follow"))
    assert low < 0.8 * temporaries("O0")


def test_each_call_of_a_stack_is_decided_by_the_readers_of_its_last_value():
    stack = jax.jit(lambda x: layers(x, LAYERS, lambda h: h))
    fun = lambda x: (stack(x) @ W, stack(x))
    assert carries(fun, X) == [LOW, FULL]
    assert carries(lambda x: fun(x)[::-1], X) == [LOW, FULL]


@pytest.mark.parametrize(("choice", "precision"), [("follow", LOW), ("full", FULL)])
def test_a_carry_rule_decides_by_path(choice, precision):
    def fun(x, stack):
        with jax.named_scope("encoder"):
            return layers(x, stack, lambda h: h @ W if choice == "full" else h)

    rules = get_rules("mixed").carry("encoder", choice)
    assert carries(fun, X, LAYERS, rules=rules) == [precision]
    other = get_rules("mixed").carry("decoder", choice)
    assert carries(fun, X, LAYERS, rules=other) != [precision]


@pytest.mark.parametrize("part", ["all of it", "a product", "a reshape"])
def test_a_call_around_part_of_a_body_changes_no_carry(part):
    def make(wrap):
        whole, product, move = (
            wrap if part == name else lambda f: f
            for name in ("all of it", "a product", "a reshape")
        )
        times_w = product(lambda h: h @ W)
        flat = move(lambda h: h.reshape(8))
        step = whole(lambda h, x: jax.nn.softmax(x @ W + times_w(flat(h))))
        return lambda x: lax.scan(lambda h, x: (step(h, x), None), x[0], x)[0]

    plain, wrapped = make(lambda f: f), make(jax.jit)
    assert carries(plain, X) == carries(wrapped, X) == [LOW]
    np.testing.assert_array_equal(
        compiled(autocast(plain), X), compiled(autocast(wrapped), X)
    )


def test_a_rule_for_one_path_does_not_reach_another_call_of_the_same_block():
    block = jax.jit(lambda x, stack: layers(x, stack, lambda h: h))

    def fun(x, stack):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = block(x, stack) @ W
        return x

    assert carries(fun, X, LAYERS) == [LOW, LOW]
    rules = get_rules("mixed").carry("second", "full")
    assert carries(fun, X, LAYERS, rules=rules) == [LOW, FULL]


@pytest.mark.parametrize("rules", ["mixed", "O0", "O1", "O2"])
def test_a_mark_around_a_loop_decides_its_carries(rules):
    def fun(x, xs):
        average = lambda m, x: (0.9 * m + 0.1 * x, m)
        return lax.scan(average, x, xs)[0] @ x.T

    args = (X, jnp.ones((3, *X.shape)))
    for wrap in (lambda f: f, jax.jit):
        low, full = (mark(wrap(fun)) for mark in (low_precision, full_precision))
        assert carries(low, *args, rules=rules) == [LOW]
        assert carries(full, *args, rules=rules) == [FULL]
        # A mark wins over a carry rule too.
        assert carries(low, *args, rules=get_rules(rules).carry("", "full")) == [LOW]


# ------------------------------------------------------------ what every step reads


def test_the_gradient_of_a_value_that_every_step_reads_adds_up_in_float32():
    """Weights are cast at each use, also those that were computed in 16 bits."""
    xs = jax.random.normal(jax.random.key(0), (2048, 1, 8)) * 0.1 + 0.3
    a = jax.random.normal(jax.random.key(1), (8, 2)) / 3
    b = jax.random.normal(jax.random.key(2), (2, 8)) / 3

    def adapted(w, a, b):
        w = w + a @ b
        return lax.scan(lambda c, x: (c + jnp.sum(jnp.tanh(x @ w)), None), 0.0, xs)[0]

    def attended(w, a, b):
        memory = jnp.tanh(a @ b @ w)
        read = lambda c, q: (c + jnp.sum(jax.nn.softmax(q @ memory.T) @ memory), None)
        return lax.scan(read, 0.0, xs)[0]

    for loss in (adapted, attended):
        actual, expected = (
            compiled(jax.grad(f, (0, 1, 2)), W, a, b) for f in (autocast(loss), loss)
        )
        assert relative_error(actual, expected) < 0.02, loss


def test_the_gradient_of_a_value_that_every_step_scales_with_adds_up_in_float32():
    xs = jax.random.normal(jax.random.key(0), (2048, 4, 8)) * 0.1 + 0.3

    def loss(x):
        gate = jnp.tanh(x @ W)
        step = lambda c, q: (c + jnp.sum(jnp.tanh((q * gate) @ W)), None)
        return lax.scan(step, 0.0, xs)[0]

    actual, expected = (compiled(jax.grad(f), X) for f in (autocast(loss), loss))
    assert relative_error(actual, expected) < 0.02


def test_a_sum_beside_the_state_of_a_stack_of_layers_is_float32():
    def fun(x, stack):
        def body(carry, w):
            h, total = carry
            h = jnp.tanh(h @ w)
            return (h, total + h), None

        h, total = lax.scan(body, (x, jnp.zeros_like(x)), stack)[0]
        return (h + total) @ W

    assert carries(fun, X, LAYERS) == [LOW, FULL]


# ---------------------------------------------------------- caches, written and read

POSITIONS = 16
CACHE = (4, POSITIONS, 8)


def ask(x, cache):
    scores = jnp.einsum("bd,btd->bt", x @ W, cache)
    return x + jnp.tanh(scores[:, :8] / 9)


def written(cache, x, i):
    cache = cache.at[:, i].set(x @ W)
    scores = jnp.einsum("bd,btd->bt", x @ W, cache)
    weights = jax.nn.softmax(jnp.where(jnp.arange(POSITIONS) <= i, scores, -1e9))
    return cache, jnp.einsum("bt,btd->bd", weights, cache)


def updated(cache, x, i):
    cache = lax.dynamic_update_slice(cache, (x @ W)[:, None], (0, i, 0))
    return cache, ask(x, cache)


def shifted(cache, x, i):
    cache = jnp.concatenate([cache[:, 1:], (x @ W)[:, None]], 1)
    return cache, ask(x, cache)


def scanned(write, x):
    def step(carry, i):
        return write(*carry, i), None

    return lax.scan(step, (jnp.zeros(CACHE), x), jnp.arange(POSITIONS))[0]


def until_the_last_token(write, x):
    """Generates text until its end, or until the last position."""

    def step(carry):
        i, cache, x, is_done = carry
        cache, x = write(cache, x, i)
        return i + 1, cache, x, is_done | (jnp.argmax(x, -1) == 9)

    def goes_on(carry):
        return (carry[0] < POSITIONS) & ~jnp.all(carry[3])

    start = (0, jnp.zeros(CACHE), x, jnp.zeros(4, bool))
    return lax.while_loop(goes_on, step, start)[1:3]


def casts(eqns):
    """Returns the shapes of the arrays that are cast."""
    is_cast = lambda eqn: eqn.primitive.name == "convert_element_type"
    return {eqn.outvars[0].aval.shape for eqn in eqns if is_cast(eqn)}


def casts_in_loops(fun, *args):
    return set().union(
        *(
            casts(equations(eqn.params.get("body_jaxpr", eqn.params.get("jaxpr"))))
            for eqn in live_equations(fun, *args)
            if eqn.primitive.name in ("scan", "while")
        )
    )


@pytest.mark.parametrize("write", [written, updated, shifted])
def test_a_cache_in_a_while_is_low_and_never_cast_as_a_whole(write):
    loop = until_the_last_token
    fun = functools.partial(loop, write)
    eqns = live_equations(autocast(fun), X)
    assert set(products(eqns)) == {(LOW,) * 3}
    assert CACHE not in casts_in_loops(autocast(fun), X)
    for actual, expected in zip(autocast(fun)(X), fun(X), strict=True):
        assert actual.dtype == expected.dtype == FULL
        assert relative_error(actual, expected) < 0.03
    # A value that is float32 on purpose is written to the cache in float32.
    exact = lambda cache, x, i: write(jnp.exp(cache), x, i)
    assert CACHE in casts_in_loops(autocast(functools.partial(loop, exact)), X)


@pytest.mark.parametrize("value", [jnp.exp, lambda x: x, lambda x: jnp.asarray(X)])
def test_a_cache_keeps_the_digits_of_values_that_are_not_low_by_themselves(value):
    def keep(cache, x, i):
        return cache.at[:, i].set(value(x)), ask(x, cache)

    fun = functools.partial(until_the_last_token, keep)
    kept = autocast(fun)(X)[0]
    np.testing.assert_array_equal(kept[:, 0], value(X))


def test_the_gradient_of_a_cache_that_every_step_reads_adds_up_in_float32():
    """The backward pass of a scan passes the gradient in the dtype of the carry."""

    def read(x, prompt):
        cache = jnp.zeros((4, 8, 8)).at[:, 0].set(prompt)

        def step(carry, i):
            cache, h = carry
            cache = cache.at[:, 1 + i % 7].set(h @ W)
            h = jnp.tanh(jnp.einsum("bd,btd->bt", x, cache))
            return (cache, h), jnp.sum(h[:, 0])

        return lax.scan(step, (cache, x), jnp.arange(1024))[1].sum()

    actual, expected = (
        jax.jit(jax.grad(f, 1))(X, X / 4) for f in (autocast(read), read)
    )
    assert relative_error(actual, expected) < 0.05
    weight = lambda x, w: lax.scan(
        lambda c, _: ((lax.optimization_barrier(c[0]), jnp.tanh(c[1] @ c[0])), c[1]),
        (w, x),
        length=2048,
    )[1].sum()
    actual, expected = (
        jax.jit(jax.grad(f, 1))(X, W) for f in (autocast(weight), weight)
    )
    assert relative_error(actual, expected) < 0.02


def test_a_16_bit_cache_in_a_scan_stays_16_bit():
    def fun(x, cache):
        def step(carry, i):
            cache, x = carry
            full, x = written(cache.astype(FULL), x, i)
            return (full.astype(cache.dtype), x), None

        return lax.scan(step, (cache, x), jnp.arange(POSITIONS))[0]

    cache, _ = autocast(fun)(X, jnp.zeros(CACHE, LOW))
    assert cache.dtype == LOW
    expected, _ = scanned(written, X)
    assert relative_error(cache, expected) < 0.03


def test_a_step_with_a_16_bit_cache_never_casts_all_of_it():
    """A server calls the step for each token, with the cache as argument and result."""

    def step(cache, x, i):
        cache = cache.at[:, i].set((x @ W).astype(cache.dtype))
        return cache, jnp.einsum("bd,btd->bt", x @ W, cache)

    cache = jnp.zeros(CACHE, LOW)

    with jax.numpy_dtype_promotion("standard"):
        for fun in (step, lambda *args: jax.jit(step)(*args)):
            low = autocast(fun)
            assert CACHE not in casts(live_equations(low, cache, X, 3))
            assert low(cache, X, 3)[0].dtype == LOW
    # Where it is float32 outside, it is cast.
    assert CACHE in casts(live_equations(low, jnp.zeros(CACHE), X, 3))


# ------------------------------------------------------------------------ while loops


def test_a_while_on_integers_is_converted_and_its_carry_is_float32():
    def fun(x, n):
        step = lambda c: (c[0] + 1, c[1] + 0.01 * jnp.tanh(c[1] @ W))
        return lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]

    eqns = live_equations(autocast(fun), X, 200)
    assert products(eqns) == {(LOW,) * 3: 1}
    assert relative_error(autocast(fun)(X, 200), fun(X, 200)) < 0.01
    mapped = jax.vmap(autocast(fun), (None, 0))(X, jnp.arange(3))
    assert relative_error(mapped, jax.vmap(fun, (None, 0))(X, jnp.arange(3))) < 0.01


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_float_decides_only_where_the_end_depends_on_it(wrap):
    """A float beside the counter decides nothing, even where both share a call."""
    body = wrap(lambda n, h: (n + 1, jnp.tanh(h @ W)))
    counted = lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: body(*c), (0, x))
    assert products(live_equations(autocast(counted), X)) == {(LOW,) * 3: 1}
    # Here the float decides the end, through another carry.
    body = wrap(lambda n, h: (n + (h.max() > 1e-3).astype(int), jnp.tanh(h @ W) / 9))
    by_a_float = lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: body(*c), (0, x)
    )
    assert products(live_equations(autocast(by_a_float), X)) == {(FULL,) * 3: 1}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_time_that_grows_by_fixed_steps_is_no_tolerance(wrap):
    @wrap
    def euler(t, y):
        dt = jnp.minimum(0.1, 1 - t)
        return t + dt, y + dt * jnp.tanh(y @ W)

    def adaptive(t, y):
        dt = 0.01 + 0.1 * jnp.abs(jnp.mean(y @ W))
        return t + dt, y + dt * jnp.tanh(y @ W)

    def integrated(step):
        def forward(y):
            start = (jnp.int32(0), 0.0, y)
            count = lambda s: (s[0] + 1, *step(*s[1:]))
            return lax.while_loop(lambda s: s[1] < 1, count, start)

        return forward

    assert not decides_when_it_ends(integrated(euler))
    assert decides_when_it_ends(integrated(adaptive))
    assert decides_when_it_ends(lambda y: autocast(integrated(euler), "O3")(y))
    actual, expected = autocast(integrated(euler))(X), integrated(euler)(X)
    assert actual[0] == expected[0] == 10
    assert actual[1] == expected[1]
    assert relative_error(actual[2], expected[2]) < 0.01


def ends(condition, step, *start):
    """Returns a function of ``x`` that runs ``step`` from ``(0, *start, x)``."""
    return lambda x: lax.while_loop(condition, step, (0, *start, x))[-1]


def decides_when_it_ends(fun):
    """Whether autocast keeps a loop in float32 because a float decides its end."""
    eqns = equations(jax.make_jaxpr(autocast(fun))(X).jaxpr)
    return not any(
        var.aval.dtype == LOW for eqn in eqns for var in (*eqn.invars, *eqn.outvars)
    )


def test_a_token_that_is_the_most_likely_one_is_no_tolerance():
    def sampled(n, h):
        values, numbers = lax.top_k(h @ W, 3)
        chosen = jax.random.categorical(jax.random.key(n), values)
        return jnp.take_along_axis(numbers, chosen[:, None], 1)[:, 0]

    def token(c, pick):
        n, done, h = c
        return n + 1, done | (pick(n, h) == 5), jnp.tanh(h @ W)

    def goes_on(c):
        return jnp.logical_and(c[0] < 9, ~jnp.all(c[1]))

    for pick in (lambda n, h: jnp.argmax(h @ W, -1), sampled):
        step = functools.partial(token, pick=pick)
        fun = ends(goes_on, step, jnp.zeros(4, bool))
        assert not decides_when_it_ends(fun)
        assert set(products(live_equations(autocast(fun), X))) == {(LOW,) * 3}
        # Without the count, two tokens that are equally likely may alternate for ever.
        until = lambda c: ~jnp.all(c[1])
        assert decides_when_it_ends(ends(until, step, jnp.zeros(4, bool)))


def test_the_number_of_a_float_that_is_compared_is_a_tolerance():
    def step(c):
        h = jnp.tanh(c[2] @ W)
        return c[0] + 1, jnp.argmax(jnp.abs(h).max(0) < 1e-3), h

    assert decides_when_it_ends(ends(lambda c: (c[0] < 9) & (c[1] < 1), step, 0))

    # So is the largest number, if its index is read too.
    def value(c):
        n, best, h = c
        best, number = lax.top_k(h.ravel() @ h.ravel()[:, None], 1)
        return n + 1 + 0 * number[0], best[0], jnp.tanh(h @ W)

    assert decides_when_it_ends(ends(lambda c: (c[0] < 9) & (c[1] > 1e-3), value, 1.0))


def test_a_carry_rule_decides_for_a_while_that_a_float_ends():
    def search(x):
        with jax.named_scope("beam"):
            step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ W))
            return lax.while_loop(lambda c: (c[0] < 5) & (c[1].max() > 0), step, (0, x))

    assert decides_when_it_ends(search)
    rules = get_rules("mixed").carry("beam", "follow")
    assert products(live_equations(autocast(search, rules), X)) == {(LOW,) * 3: 1}
    (row,) = (r for r in explain(search, rules)(X).rows if r.op == "while")
    assert row.precision == LOW
    # With the rule ``full``, the loop still runs to its tolerance in float32.
    cautious = get_rules("mixed").carry("beam", "full")
    eqns = live_equations(autocast(search, cautious), X)
    assert products(eqns) == {(FULL,) * 3: 1}


def test_the_state_of_a_while_is_float32_whatever_multiplies_it():
    """The stack may contain layers, but also batches for steps of SGD."""

    def fun(x, n):
        def layer(i, h):
            w = lax.dynamic_index_in_dim(LAYERS, i, keepdims=False)
            return h + jnp.tanh(h @ w)

        return lax.fori_loop(0, n, layer, x) @ W

    (row,) = (row for row in explain(fun)(X, jnp.array(2)).rows if row.op == "while")
    assert row.precision == FULL
    assert relative_error(autocast(fun)(X, jnp.array(2)), fun(X, 2)) < 0.02
    unchanged = autocast(lambda x, n: lax.fori_loop(0, n, lambda i, h: h @ W, x))
    np.testing.assert_array_equal(unchanged(X, jnp.array(0)), X)


def test_a_condition_inside_of_a_call_is_analyzed():
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ W))
    tested = lambda c: (c[0] < 9) & (jnp.argmax(c[1][0] @ W) != 5)
    for condition in (tested, jax.jit(tested)):
        assert not decides_when_it_ends(
            lambda x, condition=condition: lax.while_loop(condition, step, (0, x))
        )

    def shown(c):
        jax.debug.callback(lambda i: None, c[0])
        return c[0] < 3

    assert not decides_when_it_ends(lambda x: lax.while_loop(shown, step, (0, x)))


def test_only_a_count_bounds_the_number_of_steps_of_a_loop():
    """A flag does not, nor does a choice that may never come."""
    token = lambda h: jnp.argmax(h @ W, -1)[0]
    step = lambda c: (c[0] + 1, token(c[2]), jnp.tanh(c[2] @ W))
    start = lambda x: (0, 9, x)
    ends_at = lambda goes_on, step=step: decides_when_it_ends(
        lambda x: lax.while_loop(goes_on, step, start(x))
    )
    assert not ends_at(lambda c: (c[0] < 5) & (c[1] != 2))
    assert not ends_at(lambda c: (c[0] < 5) & ~(c[1] == 2))
    flag = lambda c: (c[0], token(c[2]), jnp.tanh(c[2] @ W))
    assert ends_at(lambda c: (c[0] < 5) & (c[1] != 2), flag)
    # As in k-means: until a step chooses the same as the step before.
    settled = lambda c: (c[0] + 1, token(c[2]), c[2] + c[2])
    same = lambda c: (c[0] < 5) & (token(c[2]) != c[1])
    assert ends_at(same, settled)
    doubled = lambda c: (2 * c[0], token(c[2]), jnp.tanh(c[2] @ W))
    assert ends_at(lambda c: (c[0] < 5) & (c[1] != 2), doubled)
    # A number that is sorted along with floats may be the result of a comparison.
    hidden = lambda c: (
        c[0] + 1,
        lax.sort((c[2][0], (c[2][0] < 1e-3).astype(int)), num_keys=1)[1][0],
        jnp.tanh(c[2] @ W),
    )
    assert ends_at(lambda c: (c[0] < 5) & (c[1] < 1), hidden)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}])
def test_short_reversed_and_unrolled_scans(length, options):
    def fun(x, stack):
        h, ys = lax.scan(
            lambda h, w: (h + jnp.tanh(h @ w), h.sum()), x, stack, **options
        )
        return h @ W, ys

    stack = LAYERS[:length]
    for actual, expected in zip(autocast(fun)(X, stack), fun(X, stack), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        if actual.size:
            assert relative_error(actual, expected) < 0.02


def test_a_scan_in_a_scan_is_decided_inside_and_outside():
    def fun(x, stack):
        def outer(h, w):
            h, _ = lax.scan(lambda h, _: (h + jnp.tanh(h @ w), None), h, length=2)
            return h, None

        return lax.scan(outer, x, stack)[0] @ W

    actual, expected = autocast(fun)(X, LAYERS), fun(X, LAYERS)
    assert relative_error(actual, expected) < 0.02
    assert set(products(live_equations(autocast(fun), X, LAYERS))) == {(LOW,) * 3}
    np.testing.assert_equal(carries(fun, X, LAYERS)[-1], FULL)
