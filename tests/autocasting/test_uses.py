"""Who reads a value decides: optimizers, averages and statistics stay float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from helpers import compiled, live_equations, ops, products, relative_error
from jax import lax
from programs import LAYERS, MIXED, W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import full_precision
from jmp_lite.insight.explanation import explain

OPTIMIZER = lenient(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8, use_bias=False)(x))
        return nn.Dense(1)(nn.relu(x))


def train_step(state, x):
    """A whole step, with all that a user could wrap by mistake."""
    variables, opt_state, ema, count = state

    def loss_fn(params):
        out, updated = Net().apply(
            {**variables, "params": params}, x, mutable=["batch_stats"]
        )
        return jnp.mean((out - 1) ** 2), updated

    params = variables["params"]
    (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p, ema, params)
    return ({"params": params, **updated}, opt_state, ema, count + 1), loss


def first_state():
    variables = Net().init(jax.random.key(0), X)
    params = variables["params"]
    return variables, OPTIMIZER.init(params), params, jnp.int32(0)


def scanned(state, x):
    return lax.scan(lambda state, x: train_step(state, x), state, jnp.stack([x] * 3))


@pytest.mark.parametrize("fun", [train_step, scanned, jax.jit(train_step)])
def test_a_whole_training_step_keeps_its_state_in_float32(fun):
    state = first_state()
    rows = explain(fun)(state, X).rows
    model = [row for row in rows if "Net" in row.scope]
    rest = [row for row in rows if "Net" not in row.scope]
    assert {row.precision for row in model if row.code == "product"} == {"bfloat16"}
    # Outside of the model there is the loss, whose difference follows its low output,
    # and what is float32: clipping, the optimizer, the average.
    low = {(row.op, row.source.split("(")[-1]) for row in rest if "16" in row.precision}
    assert {place for _, place in low} <= {"train_step.<locals>.loss_fn)"}
    (actual, _), (expected, _) = (compiled(f, state, X) for f in (autocast(fun), fun))
    for name in ("mean", "var"):
        one, other = (
            s[0]["batch_stats"]["BatchNorm_0"][name] for s in (actual, expected)
        )
        assert relative_error(one, other) < 5e-3
    # Small changes are not lost to rounding: those of the average are a thousandth.
    for one, other, start in zip(
        *(jax.tree.leaves(tree) for tree in (actual[2], expected[2], state[2])),
        strict=True,
    ):
        if np.linalg.norm(other - start) > 1e-6:
            assert relative_error(one - start, other - start) < 0.2


def test_running_statistics_are_those_of_the_input_of_the_layer():
    """The input of the layer is low, and the layer averages it in float32."""
    x = 100 + jax.random.normal(jax.random.key(1), (4096, 8))

    def statistics(x):
        model = nn.BatchNorm(use_running_average=False, momentum=0.9)
        variables = model.init(jax.random.key(0), x)
        out, updated = model.apply(variables, x @ jnp.eye(8), mutable=["batch_stats"])
        return updated["batch_stats"], out @ W

    actual, expected = (f(x)[0] for f in (autocast(statistics), statistics))
    # 16-bit sums of 4096 numbers near 100 would be wrong in the first digit.
    np.testing.assert_allclose(actual["mean"], expected["mean"], rtol=2e-3)
    assert autocast(statistics)(x)[1].dtype == np.float32


def test_an_average_and_a_gradient_accumulator_do_not_stall():
    def accumulate(total, average, x):
        def step(carry, x):
            total, average = carry
            g = x @ W
            return (total + g, 0.999 * average + 0.001 * g), None

        return lax.scan(step, (total, average), x)[0]

    xs = jnp.ones((2000, 4, 8)) * 0.01
    zeros = jnp.zeros((4, 8))
    actual, expected = (f(zeros, zeros, xs) for f in (autocast(accumulate), accumulate))
    assert relative_error(actual[0], expected[0]) < 0.01
    assert relative_error(actual[1], expected[1]) < 0.01


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda *a: lax.cond(True, f, f, *a),
        lambda f: lambda *a: lax.scan(lambda c, _: (c, f(*a)), 0, length=1)[1][0],
    ],
)
def test_demand_looks_into_calls(wrap):
    """A difference that a float32 op reads inside of a call is float32 outside."""
    inside = wrap(lambda y: jnp.sum(jnp.exp(y)))
    low = wrap(lambda y: jnp.sum(y @ W))
    assert ops(autocast(lambda x: inside(x @ W - x)), X)["sub"] == {"float32"}
    assert ops(autocast(lambda x: low(x @ W - x)), X)["sub"] == {"bfloat16"}


def test_demand_looks_into_loops_and_custom_rules():
    @jax.custom_vjp
    def total(y):
        return jnp.sum(jnp.exp(y))

    total.defvjp(lambda y: (total(y), y), lambda y, g: (g * jnp.exp(y),))

    def counted(y):
        return lax.fori_loop(0, 3, lambda i, c: c + jnp.sum(jnp.exp(y)), 0.0)

    def to_a_tolerance(y):
        return lax.while_loop(lambda c: c.max() > 0.1, lambda c: c / 2, y)

    for inside in (total, counted, to_a_tolerance):
        fun = lambda x, f=inside: f(x @ W - x)
        assert ops(autocast(fun), X)["sub"] == {"float32"}, inside


def test_a_state_that_is_returned_and_read_stays_low():
    def layers(x, last_only):
        states = [x]
        for w in LAYERS:
            states.append(jnp.tanh(states[-1] @ w))
        return states[-1] if last_only else states

    for last_only in (True, False):
        rows = explain(lambda x, only=last_only: layers(x, only))(X).rows
        found = [row.precision for row in rows if row.op == "tanh"]
        assert found == ["bfloat16", "bfloat16", "float32"]


def test_logits_and_their_bias_are_float32_and_gelu_before_a_norm_is_not():
    fun = lambda x, b: jax.nn.gelu(x @ W) @ W + b
    rows = explain(fun)(X, W[0]).rows
    assert [r.precision for r in rows if r.op == "integer_pow"] == ["bfloat16"]
    assert [r.precision for r in rows if r.op == "add"][-1] == "float32"
    assert products(live_equations(autocast(fun), X, W[0])) == {("bfloat16",) * 3: 2}


def test_new_parameters_that_the_same_call_multiplies_with_are_kept_by_a_mark():
    """They look the same as a hidden state that is returned and read."""

    def step(w, update):
        grads = jax.grad(lambda w: jnp.mean((jnp.tanh(X @ w) - 1) ** 2))(w)
        w = update(w, grads)
        return w, jnp.mean((jnp.tanh(X @ w) - 1) ** 2)

    plain = lambda w, g: w - 1e-3 * g
    marked = full_precision(plain)
    for update, is_kept in ((plain, False), (marked, True)):
        rows = explain(lambda w, u=update: step(w, u))(W).rows
        (new,) = (r for r in rows if r.op == "sub" and r.shapes == ("float32[8,8]",))
        assert (new.precision == "float32") == is_kept
        w, expected = W, W
        for _ in range(20):
            w, _ = autocast(lambda w, u=update: step(w, u))(w)
            expected, _ = step(expected, plain)
        assert (relative_error(w - W, expected - W) < 0.05) == is_kept


def test_a_value_that_nothing_reads_counts_as_returned():
    def fun(x):
        unused = jnp.tanh(x @ W + x)
        del unused
        return x @ W

    rows = explain(fun)(X).rows
    assert [r.precision for r in rows if r.op in ("add", "tanh")] == ["float32"] * 2
    np.testing.assert_array_equal(
        compiled(autocast(fun), X), compiled(autocast(lambda x: x @ W), X)
    )


@pytest.mark.parametrize("other", [0.0, 0.5, -np.inf, np.finfo("float32").min])
def test_a_selection_among_numbers_of_16_bits_stays_low_though_float32_reads_it(other):
    """It rounds nothing, and moves half the bytes: the mask of an attention."""

    def fun(x, w):
        return jax.nn.softmax(jnp.where(x > 0, x @ w, other))

    assert ops(autocast(fun), X, W)["select_n"] == {"bfloat16"}

    def by_hand(x, w):
        scores = (x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32")
        return jax.nn.softmax(jnp.where(x > 0, scores, other))

    loss = lambda f: lambda x, w: jnp.sum(f(x, w)[:, 0])
    for low, full in (
        (autocast(fun), by_hand),
        *((jax.grad(loss(f), i) for f in (autocast(fun), by_hand)) for i in (0, 1)),
    ):
        np.testing.assert_array_equal(compiled(low, X, W), compiled(full, X, W))


def test_a_selection_of_numbers_that_16_bits_would_round_is_float32():
    fun = lambda x, w: jax.nn.softmax(jnp.where(x > 0, x @ w, 0.1))
    assert ops(autocast(fun), X, W)["select_n"] == {"float32"}
    fun = lambda x, w: jax.nn.softmax(jnp.where(x > 0, x @ w, x))
    assert ops(autocast(fun), X, W)["select_n"] == {"float32"}


def test_a_result_that_nobody_reads_demands_nothing_of_its_own():
    fun = lambda x: lax.top_k(x @ W + x, 2)[0]
    assert ops(autocast(fun), X)["add"] == {"float32"}


def test_an_operand_of_a_product_in_any_branch_is_low():
    def fun(x):
        y = x @ W + x
        return lax.cond(x.sum() > 0, lambda y: y @ W, lambda y: jnp.cumsum(y, 0), y)

    assert ops(autocast(fun), X)["add"] == {"bfloat16"}


def test_each_call_of_a_block_is_demanded_by_its_own_readers():
    block = jax.jit(lambda h: h + W[0])
    fun = lambda x: (block(x @ W) @ W, block(x @ W))
    assert ops(autocast(fun), X)["add"] == {"bfloat16", "float32"}


@pytest.mark.parametrize("slot", ["full", "follow"])
def test_a_carry_rule_of_a_path_does_in_the_demand_pass_what_one_of_all_paths_does(
    slot,
):
    def fun(x, layers):
        x = jnp.tanh(x @ layers[0]) * 2
        with jax.named_scope("loop"):
            return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0]

    one, other = (
        str(jax.make_jaxpr(autocast(fun, MIXED.carry(pattern, slot)))(X, LAYERS))
        for pattern in ("loop", "")
    )
    assert one == other
    # The start of a float32 carry is float32 before the loop too.
    rows = explain(fun, MIXED.carry("loop", slot))(X, LAYERS).rows
    (mul,) = (row for row in rows if row.op == "mul")
    assert mul.precision == ("float32" if slot == "full" else "bfloat16")


def test_a_scope_rule_holds_in_the_demand_pass():
    def fun(x, w):
        y = jnp.tanh(x @ w) * 2
        with jax.named_scope("head"):
            return jnp.tanh(y @ w)

    def precision_of_mul(rules):
        (mul,) = (row for row in explain(fun, rules)(X, W).rows if row.op == "mul")
        return mul.precision

    assert precision_of_mul(MIXED) == "bfloat16"
    assert precision_of_mul(MIXED.scope("head", "full")) == "float32"
