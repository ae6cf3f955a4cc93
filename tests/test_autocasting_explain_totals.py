"""What ``explain`` sums up, compares and tells of the backward pass."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optimizers import lenient
from programs import BLOCK, BLOCK_PARAMS, LAYERS, W, X
from test_autocasting_interpreter import live_equations, products

import jmp_lite as jmp
from jmp_lite.autocasting.explain import explain
from jmp_lite.autocasting.rules import get_rules

LOW, FULL = "bfloat16", "float32"


def block_loss(params, x):
    return jnp.mean(BLOCK.apply(params, x) ** 2)


# ----------------------------------------------------------------------------- totals


def test_work_is_counted_in_all_trips_and_products_once():
    def fun(x, stack):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        return jnp.matmul(h, W, precision="highest") @ jnp.ones((8, 3))

    totals = explain(fun)(X, LAYERS).totals
    assert totals.products == {LOW: 2, FULL: 1}
    a_product = 2 * 4 * 8 * 8
    assert totals.flops == {LOW: 3 * a_product + 2 * 4 * 8 * 3, FULL: a_product}
    assert sum(totals.equations.values()) == len(explain(fun)(X, LAYERS).rows)


@pytest.mark.parametrize(
    ("groups", "strides", "padding"),
    [(1, (1, 1), "SAME"), (2, (2, 2), "VALID"), (4, (1, 1), "SAME")],
)
def test_the_work_of_a_convolution_is_that_of_its_window(groups, strides, padding):
    x, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4 // groups, 8))
    numbers = ("NHWC", "HWIO", "NHWC")

    def fun(x, kernel):
        return lax.conv_general_dilated(
            *(x, kernel, strides, padding),
            dimension_numbers=numbers,
            feature_group_count=groups,
        )

    size = np.prod(jax.eval_shape(fun, x, kernel).shape)
    expected = {LOW: 2 * size * 3 * 3 * (4 // groups)}
    assert explain(fun)(x, kernel).totals.flops == expected


def test_casts_are_those_that_autocast_adds_with_their_bytes():
    fun = lambda x, w: jnp.tanh(x @ w)
    totals = explain(fun)(X, W).totals
    # Both operands are rounded, and the result is raised.
    assert (totals.casts, totals.cast_bytes) == (3, 6 * (32 + 64 + 32))
    mixed = lambda x, w: (x.astype(LOW) @ w.astype(LOW)).astype(FULL)
    assert (
        explain(mixed)(X, W).totals.casts,
        explain(fun, "O0")(X, W).totals.casts,
    ) == (
        0,
        0,
    )
    stacked = lambda x, stack: lax.scan(lambda h, w: (h @ w, None), x, stack)[0] @ W
    # The start, a layer in each of three trips, the last weights, and the result.
    assert explain(stacked)(X, LAYERS).totals.casts == 1 + 3 * 1 + 1 + 1


def test_what_waits_for_the_backward_pass_is_told_where_it_is_asked_for():
    told = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    assert 0 < told.totals.kept_run < told.totals.kept_traced
    identity = explain(block_loss, "O0", backward=True)(BLOCK_PARAMS, X).totals
    assert identity.kept_run == identity.kept_traced == told.totals.kept_traced
    assert explain(block_loss)(BLOCK_PARAMS, X).totals.kept_run is None
    # A product keeps its operands, which are arguments: there anyway, but in 16 bits.
    fun = lambda x, w: jnp.sum(x @ w)
    assert explain(fun, "O0", backward=True)(X, W).totals.kept_run == 0
    assert explain(fun, backward=True)(X, W).totals.kept_run == 2 * (32 + 64)


def test_the_backward_pass_has_rows_as_it_runs():
    told = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    forward = [row for row in told.rows if not row.is_backward]
    assert tuple(forward) == explain(block_loss)(BLOCK_PARAMS, X).rows
    assert told.share_low("dot_general") == 1.0
    grad = jax.grad(jmp.autocast(block_loss), (0, 1))
    counted = products(live_equations(grad, BLOCK_PARAMS, X))
    assert told.totals.products == {LOW: sum(counted.values())}
    sums = {r.precision for r in told.rows if r.is_backward and r.op == "reduce_sum"}
    assert sums == {FULL}, "the gradients of biases add up in float32"
    scopes = {row.scope for row in told.rows if row.is_backward}
    assert "Block/Dense_1" in scopes
    assert not any("__autocast__" in scope for scope in scopes)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_a_backward_pass_in_a_loop_has_its_trips(wrap):
    step = wrap(lambda h, w: jnp.tanh(h @ w))

    def loss(x, stack):
        h, _ = lax.scan(lambda h, w: (step(h, w), None), x, stack)
        return jnp.sum(h @ W)

    rows = explain(loss, backward=True)(X, LAYERS).rows
    dots = [row for row in rows if row.is_backward and row.op == "dot_general"]
    assert {row.times for row in dots} == {1, 3}
    assert {row.precision for row in dots} == {LOW}


def test_what_has_no_gradient_is_refused_in_words():
    with pytest.raises(ValueError, match="no backward pass: no float among"):
        explain(lambda x: x > 0, backward=True)(X)
    with pytest.raises(ValueError, match="no backward pass"):
        explain(lambda n: n + 1, backward=True)(3)


def test_whole_train_steps_are_told():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params) ** 2), (model_state, None)

    init, step = jmp.build_train_step(
        loss_fn, lenient(optax.adam(1e-2)), get_rules("mixed", "float16"), ema=0.9
    )
    told = explain(step)(init(W), X)
    assert told.share_low("dot_general") == 1.0
    assert told.totals.products == {"float16": 2}
    assert told.precision_of(op="sqrt") == FULL
    assert any("loss_scale" in row.scope for row in told.rows)


# -------------------------------------------------------------------------- questions


def test_a_test_can_ask_what_runs_in_what():
    told = explain(BLOCK.apply)(BLOCK_PARAMS, X)
    assert told.share_low("dot_general") == 1.0
    assert told.share_low("reduce_sum") == 0.0
    assert 0 < told.share_low() < 1
    assert told.precision_of("LayerNorm", "reduce_sum") == FULL
    assert told.precision_of(scope="Dense_1", op="dot_general") == LOW
    with pytest.raises(ValueError, match=r"Unknown op 'dot_genral'.*'dot_general'"):
        told.share_low("dot_genral")
    with pytest.raises(ValueError, match="Unknown op 'conv'"):
        told.precision_of(op="conv")
    with pytest.raises(ValueError, match=r"scope like 'LayreNorm_0'.*'Block/LayerNorm"):
        told.precision_of("LayreNorm_0")
    with pytest.raises(ValueError, match="Expected a regular expression"):
        told.precision_of("([")
    with pytest.raises(TypeError, match="Expected an Explanation, got int"):
        told.diff(3)
    with pytest.raises(ValueError, match=r"several: \d+ in .*bfloat16.*Narrow it down"):
        told.precision_of("Block")


def test_two_explanations_are_compared_row_by_row():
    fun, args = BLOCK.apply, (BLOCK_PARAMS, X)
    mixed, o1 = explain(fun)(*args), explain(fun, "O1")(*args)
    assert not mixed.diff(explain(fun)(*args))
    assert str(mixed.diff(mixed)) == "no difference"
    difference = mixed.diff(o1)
    assert difference
    assert {b.precision for _, b in difference.changed} <= {LOW, FULL}
    for a, b in difference.changed:
        assert (a.scope, a.op, a.source) == (b.scope, b.op, b.source)
        assert (a.precision, a.bytes_run) != (b.precision, b.bytes_run)
    changed = {a.op for a, _ in difference.changed}
    assert "tanh" in changed
    assert not {"dot_general", "exp"} & changed
    assert "FULL: the rules' default" in str(difference)
    backward = explain(fun, backward=True)(*args)
    assert mixed.diff(backward).only_right
    assert backward.diff(mixed).only_left
    assert "reduce_sum" in str(mixed.diff(backward))


def test_unused_rules_are_told_with_the_nearest_name():
    rules = get_rules("mixed").scope("LayerNrom_0", "full").full("tan")
    rules = rules.scope("Dense_1", "full").carry("decoder", "full").full("tanh")
    told = explain(BLOCK.apply, rules)(BLOCK_PARAMS, X)
    assert told.unused == (
        "scope 'LayerNrom_0' matches nothing. Did you mean 'LayerNorm_0' or "
        "'RMSNorm_0'?",
        "carry 'decoder' matches nothing.",
        "op 'tan' matches nothing. Did you mean 'tanh'?",
    )
    assert "unused: scope 'LayerNrom_0' matches nothing." in str(told)
    for preset in ("mixed", "O0", "O1", "O2", "O3", "torch"):
        assert explain(BLOCK.apply, preset)(BLOCK_PARAMS, X).unused == ()


# ------------------------------------------------------------------------------ text


def test_a_long_table_is_cut_and_any_depth_can_be_asked_for():
    def model(params, x):
        for i in range(12):
            with jax.named_scope(f"layer_{i}"):
                x = BLOCK.apply(params, x)
        return x

    told = explain(model, backward=True)(BLOCK_PARAMS, X)
    lines = str(told).splitlines()
    assert len(lines) < 80
    assert lines[0] == f"autocast to bfloat16: {len(told.rows)} equations"
    assert "layer_*/Block" in lines or "layer_*" in lines
    assert len(told.table().splitlines()) > 400
    assert "layer_11/Block/Dense_1" in told.table()
    titles = [line for line in told.table(2).splitlines() if not line.startswith(" ")]
    assert len(titles) == len(set(titles)), "each scope once"
    assert "layer_*/Block" in titles
    # Short functions are told equation by equation.
    assert "16 bits: dot_general at" in str(explain(lambda x: jnp.tanh(x @ W) @ W)(X))


def test_the_sums_stand_below_the_table():
    text = explain(lambda x, w: jnp.tanh(x @ w), backward=True)(X, W).summary()
    equations, *lines, kept = text.splitlines()
    # How JAX differentiates a tanh depends on its version.
    assert re.fullmatch(r"equations: \d+ bfloat16, \d+ float32", equations)
    assert lines == [
        "products: 3 bfloat16",
        "work: 1.54 kflop in bfloat16 (100%)",
        "casts: 3, of 768 B",
    ]
    told = r"kept for the backward pass: (\d+) B, in float32 (\d+) B"
    low, full = map(int, re.fullmatch(told, kept).groups())
    # Operands in 16 bits; of the tanh as much.
    assert low - full == 2 * (32 + 64)


def test_json_and_html_hold_all_of_it():
    told = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    read = json.loads(told.to_json())
    assert len(read["rows"]) == len(told.rows)
    assert read["rows"][0]["op"] == told.rows[0].op
    assert read["totals"]["casts"] == told.totals.casts
    assert jmp.Rules.from_json(json.dumps(read["rules"])) == told.rules
    page = told._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert "dot_general" in page
    odd = explain(jax.jit(lambda x: x @ x, static_argnames=()))(jnp.ones((2, 2)))
    assert "&lt;lambda&gt;" in odd._repr_html_()


def test_an_empty_function_is_told_too():
    told = explain(lambda: None)()
    assert told.rows == ()
    assert str(told).startswith("autocast to bfloat16: 0 equations")
    assert told.totals.casts == 0
    assert told._repr_html_()
    assert not told.diff(told)
    with pytest.raises(ValueError, match="Unknown op"):
        told.share_low()
