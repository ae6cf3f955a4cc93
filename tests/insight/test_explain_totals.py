"""Totals, comparisons and text of ``explain``, and its rows of the backward pass."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from flax import nnx
from helpers import live_equations, products
from jax import export, lax
from programs import BLOCK, BLOCK_PARAMS, LAYERS, W, X

import jmp_lite as jmp
import jmp_lite.nnx
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain

LOW, FULL = "bfloat16", "float32"


def block_loss(params, x):
    return jnp.mean(BLOCK.apply(params, x) ** 2)


# ----------------------------------------------------------------------------- totals


def test_work_is_counted_in_all_trips_and_products_once():
    def fun(x, stack):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        return jnp.matmul(h, W, precision="highest") @ W[:, :3]

    totals = explain(fun)(X, LAYERS).totals
    assert totals.products == {LOW: 2, FULL: 1}
    a_product, the_last = 2 * 4 * 8 * 8, 2 * 4 * 8 * 3
    assert totals.flops == {LOW: 3 * a_product + the_last, FULL: a_product}
    assert sum(totals.equations.values()) == len(explain(fun)(X, LAYERS).rows)


def test_a_loop_of_zero_trips_is_no_work_and_one_of_unknown_trips_counts_once():
    step = lambda h: jnp.tanh(h @ W)

    def times(n):
        return lambda x: lax.scan(lambda h, _: (step(h), None), x, None, length=n)[0]

    def counted(x, n):
        return lax.fori_loop(0, n, lambda i, h: step(h), x)

    a_product = 2 * 4 * 8 * 8
    none = explain(times(0))(X).totals
    assert none.flops == {LOW: 0}
    # Before the loop the carry is rounded, and behind it raised.
    assert none.casts == 2
    once = explain(times(1))(X).totals
    assert (once.flops, once.casts) == ({LOW: a_product}, 3)
    totals = explain(counted)(X, jnp.int32(3)).totals
    assert totals.flops == {LOW: a_product}
    # In each step the carry and the weights, and the result of the product.
    assert totals.casts == 3
    # All branches count, as if each were taken.
    either = lambda x: lax.cond(x.sum() > 0, step, lambda x: step(step(x)), x)
    totals = explain(either)(X).totals
    assert totals.flops == {LOW: 3 * a_product}
    assert totals.products == {LOW: 3}


def test_the_work_of_a_backward_pass_is_that_of_its_products():
    def strided(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=numbers
        )

    args = jnp.ones((1, 16, 16, 8)), jnp.ones((3, 3, 8, 8))
    once = explain(strided)(*args).totals.flops[LOW]
    # Zeros between the numbers of a gradient are no work.
    assert explain(strided, backward=True)(*args).totals.flops == {LOW: 3 * once}
    z = jnp.ones((4, 5), "complex64")
    totals = explain(lambda x: x @ x.T)(z).totals
    real_flops = 8  # Four products and four sums.
    assert totals.flops == {"complex64": real_flops * 4 * 5 * 4}


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
    numbers = X.size + W.size + fun(X, W).size
    assert (totals.casts, totals.cast_bytes) == (3, (4 + 2) * numbers)
    mixed = lambda x, w: (x.astype(LOW) @ w.astype(LOW)).astype(FULL)
    assert (
        explain(mixed)(X, W).totals.casts,
        explain(fun, "O0")(X, W).totals.casts,
    ) == (
        0,
        0,
    )
    stacked = lambda x, stack: lax.scan(lambda h, w: (h @ w, None), x, stack)[0] @ W
    start, layers, last_weights, result = 1, len(LAYERS), 1, 1
    expected = start + layers + last_weights + result
    assert explain(stacked)(X, LAYERS).totals.casts == expected


def test_residuals_are_counted_if_the_backward_pass_is_explained():
    explanation = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    assert 0 < explanation.totals.kept_run < explanation.totals.kept_traced
    identity = explain(block_loss, "O0", backward=True)(BLOCK_PARAMS, X).totals
    assert identity.kept_run == identity.kept_traced == explanation.totals.kept_traced
    assert explain(block_loss)(BLOCK_PARAMS, X).totals.kept_run is None
    # A product keeps its operands. As traced they are arguments, under autocast casts.
    fun = lambda x, w: jnp.sum(x @ w)
    assert explain(fun, "O0", backward=True)(X, W).totals.kept_run == 0
    assert explain(fun, backward=True)(X, W).totals.kept_run == 2 * (X.size + W.size)


def test_the_backward_pass_has_the_rows_of_the_gradient_that_runs():
    explanation = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    forward = [row for row in explanation.rows if not row.is_backward]
    assert tuple(forward) == explain(block_loss)(BLOCK_PARAMS, X).rows
    assert explanation.share_low("dot_general") == 1.0
    grad = jax.grad(jmp.autocast(block_loss), (0, 1))
    counted = products(live_equations(grad, BLOCK_PARAMS, X))
    assert explanation.totals.products == {LOW: sum(counted.values())}
    backward = [row for row in explanation.rows if row.is_backward]
    sums = {row.precision for row in backward if row.op == "reduce_sum"}
    assert sums == {FULL}, "the gradients of biases add up in float32"
    scopes = {row.scope for row in backward}
    assert "Block/Dense_1" in scopes
    assert not any("__autocast__" in scope for scope in scopes)


@jax.custom_vjp
def with_a_costly_forward(x, w):
    return x @ w


def _forward(x, w):
    return x @ w, (x, w, (x @ w) @ w)


def _backward(residuals, grad):
    x, w, z = residuals
    return grad @ w.T + 0 * z, x.T @ grad


with_a_costly_forward.defvjp(_forward, _backward)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jnp.tanh(x @ w).sum(),
        lambda x, w: jnp.sin(x @ w).sum(),
        lambda x, w: jax.nn.softmax(jax.jit(lambda x: x @ w)(x)).max(),
        jax.checkpoint(lambda x, w: jnp.sum(jnp.exp(x @ w) @ w)),
        lambda x, w: with_a_costly_forward(x, w).sum(),
    ],
)
def test_the_rows_and_the_casts_are_those_of_the_gradient(fun):
    explanation = explain(fun, backward=True)(X, W)
    eqns = live_equations(jax.value_and_grad(jmp.autocast(fun), (0, 1)), X, W)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert sum(explanation.totals.products.values()) == len(products)
    ends = {np.dtype(LOW), np.dtype(FULL)}
    casts = [
        eqn
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and {eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype} == ends
    ]
    assert explanation.totals.casts == len(casts)


def test_an_op_that_only_the_derivative_adds_has_a_row():
    explanation = explain(lambda x: jnp.sin(x).sum(), backward=True)(X)
    assert [(row.op, row.is_backward) for row in explanation.rows[:3]] == [
        ("sin", False),
        ("reduce_sum", False),
        ("cos", True),
    ]


def test_a_loss_is_differentiated_and_results_beside_it_are_not():
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    def with_aux(w, x):
        return loss(w, x), {"statistics": x @ w @ w}

    def products(fun):
        rows = explain(fun, backward=True)(W, X).rows
        return sum(row.is_backward and row.op == "dot_general" for row in rows)

    assert products(loss) == products(with_aux) == 2
    # A loss is a scalar that comes first; any other result is differentiated.
    assert products(lambda w, x: with_aux(w, x)[::-1]) == 6
    assert products(lambda w, x: {"loss": loss(w, x), "more": x @ w}) == 4
    assert products(lambda w, x: (jnp.argmax(x), x @ w)) == 2
    # The state of an nnx module comes after its results.
    module = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    of_module = lambda module, x: (module(x).sum(), module(x) @ W)
    rows = jmp_lite.nnx.explain(of_module, backward=True)(module, X).rows
    assert sum(r.is_backward and r.op == "dot_general" for r in rows) == 2


def test_bytes_of_the_backward_pass_are_those_that_were_traced():
    def mixed(w, x):
        w, x = w.astype(LOW), x.astype(LOW)
        return jnp.sum(jnp.tanh(x @ w).astype(FULL))

    args = W, X
    for rules in ("O0", "mixed"):
        rows = explain(mixed, rules, backward=True)(*args).rows
        rows = [r for r in rows if r.op != "reduce_sum"]
        assert rows
        assert all(r.bytes_traced == r.bytes_run for r in rows)
    rows = explain(lambda w, x: jnp.sum(jnp.tanh(x @ w)), backward=True)(W, X).rows
    dots = [row for row in rows if row.is_backward and row.op == "dot_general"]
    assert [(row.bytes_traced, row.bytes_run) for row in dots] == [
        (4 * 64, 2 * 64),
        (4 * 32, 2 * 32),
    ]


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


def test_a_function_without_a_gradient_is_an_error_with_a_reason():
    with pytest.raises(ValueError, match="has no floating-point result"):
        explain(lambda x: x > 0, backward=True)(X)
    with pytest.raises(ValueError, match="no backward pass"):
        explain(lambda n: n + 1, backward=True)(3)


def test_a_whole_train_step_can_be_explained():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params) ** 2), (model_state, None)

    init, step = jmp.build_train_step(
        loss_fn, lenient(optax.adam(1e-2)), get_rules("mixed", "float16"), ema=0.9
    )
    explanation = explain(step)(init(W), X)
    assert explanation.share_low("dot_general") == 1.0
    assert explanation.totals.products == {"float16": 2}
    assert explanation.dtype_of(op="sqrt") == FULL
    assert any("loss_scale" in row.scope for row in explanation.rows)


# -------------------------------------------------------------------------- questions


def test_a_user_can_query_the_precision_of_an_op_or_a_scope():
    explanation = explain(BLOCK.apply)(BLOCK_PARAMS, X)
    assert explanation.share_low("dot_general") == 1.0
    assert explanation.share_low("reduce_sum") == 0.0
    assert 0 < explanation.share_low() < 1
    assert explanation.dtype_of("LayerNorm", "reduce_sum") == FULL
    assert explanation.dtype_of(scope="Dense_1", op="dot_general") == LOW
    with pytest.raises(ValueError, match=r"no equation of the op 'cumsum'.*are .*tanh"):
        explanation.share_low("cumsum")
    with pytest.raises(ValueError, match=r"Unknown op 'dot_genral'.*'dot_general'"):
        explanation.share_low("dot_genral")
    with pytest.raises(ValueError, match="Unknown op 'conv'"):
        explanation.dtype_of(op="conv")
    with pytest.raises(ValueError, match=r"matches 'LayreNorm_0'.*'Block/LayerNorm"):
        explanation.dtype_of("LayreNorm_0")
    with pytest.raises(ValueError, match="Expected a regular expression"):
        explanation.dtype_of("([")
    with pytest.raises(TypeError, match="Expected an Explanation, got int"):
        explanation.diff(3)
    with pytest.raises(ValueError, match=r"dtypes: \d+ in .*bfloat16.*Narrow"):
        explanation.dtype_of("Block")


def test_a_share_counts_only_ops_with_floating_point_numbers():
    ints = explain(lambda n: jnp.sort(n) + 1)(jnp.arange(3))
    with pytest.raises(
        ValueError, match="No sort in this function has a floating-point"
    ):
        ints.share_low("sort")
    with pytest.raises(
        ValueError, match="No equation in this function has a floating-point"
    ):
        ints.share_low()
    with pytest.raises(ValueError, match=r"No equation exists\.$"):
        explain(lambda: None)().dtype_of()
    tiny = explain(lambda x: jnp.exp(x @ x), compute_dtype="float16")(W)
    assert tiny.share_low("dot_general") == 1.0
    assert tiny.share_low() == 0.5


def test_two_explanations_are_compared_row_by_row():
    fun, args = BLOCK.apply, (BLOCK_PARAMS, X)
    mixed, o1 = explain(fun)(*args), explain(fun, "O1")(*args)
    assert not mixed.diff(explain(fun)(*args))
    assert str(mixed.diff(mixed)) == "no difference"
    difference = mixed.diff(o1)
    assert difference
    assert {(a.precision, b.precision) for a, b in difference.changed} == {(LOW, FULL)}
    for a, b in difference.changed:
        assert (a.scope, a.op, a.source) == (b.scope, b.op, b.source)
        assert (a.precision, a.bytes_run) != (b.precision, b.bytes_run)
    changed = {a.op for a, _ in difference.changed}
    assert "integer_pow" in changed
    assert not {"dot_general", "exp"} & changed
    assert "FULL: the default of the rules" in str(difference)
    backward = explain(fun, backward=True)(*args)
    assert mixed.diff(backward).only_right
    assert backward.diff(mixed).only_left
    assert "reduce_sum" in str(mixed.diff(backward))


def test_a_difference_has_its_scope_and_equal_ops_of_a_line_are_listed_separately():
    def fun(x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ W) @ W + jnp.tanh(x)  # Of one line.

    full = get_rules("mixed").full("dot_general")
    difference = explain(fun)(X).diff(explain(fun, full)(X))
    changed = [(a.op, a.precision, b.precision) for a, b in difference.changed]
    assert changed == [
        ("dot_general", LOW, FULL),
        ("tanh", LOW, FULL),
        ("dot_general", LOW, FULL),
    ]
    assert str(difference).splitlines()[1] == "head"
    # Rows of the same ops on larger arrays are listed with their bytes.
    larger = explain(fun)(X).diff(explain(fun)(jnp.ones((8, 8))))
    assert "float32, 128 B  float32, 256 B" in str(larger)
    assert "bfloat16, 64 B  bfloat16, 128 B" in re.sub(" {3,}", "  ", str(larger))


def test_unused_rules_are_listed_with_the_nearest_name():
    rules = get_rules("mixed").scope("LayerNrom_0", "full").full("tan")
    rules = rules.scope("Dense_1", "full").carry("decoder", "full").full("tanh")
    explanation = explain(BLOCK.apply, rules)(BLOCK_PARAMS, X)
    assert explanation.unused == (
        "scope 'LayerNrom_0' matches nothing. Did you mean 'LayerNorm_0'?",
        "carry 'decoder' matches nothing.",
        "op 'tan' matches nothing. Did you mean 'tanh'?",
    )
    assert "unused: scope 'LayerNrom_0' matches nothing." in str(explanation)
    for preset in ("mixed", "O0", "O1", "O2", "O3", "torch"):
        assert explain(BLOCK.apply, preset)(BLOCK_PARAMS, X).unused == ()


def test_rules_that_can_decide_nothing_are_listed():
    def loops(x):
        with jax.named_scope("Dense_0"):
            x = x @ W
        with jax.named_scope("Layers_0"):
            x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, LAYERS)
        return jnp.tanh(x @ W)

    def unused(rules):
        return explain(loops, rules)(X).unused

    mixed = get_rules("mixed")
    (message,) = unused(mixed.carry("Dense_0", "full"))
    assert message.startswith("carry 'Dense_0' matches nothing.")
    assert unused(mixed.carry("Layers_0", "full")) == ()
    assert unused(mixed.scope("Dense_0", "full").scope("Dense", "low")) == (
        "scope 'Dense' has no effect: 'Dense_0' comes first.",
    )
    assert unused(mixed.scope("Dense_0", "full").scope("s_0|Den", "low")) == ()


def test_a_rule_behind_one_for_products_has_an_effect_on_other_ops():
    def head(x):
        with jax.named_scope("head"):
            return jnp.tanh(x @ W) @ W

    rules = get_rules("mixed").scope("head", "wide").scope("he", "full")
    explanation = explain(head, rules)(X)
    assert explanation.unused == ()
    assert explanation.dtype_of(op="tanh") == "float32"
    products = [row for row in explanation.rows if row.op == "dot_general"]
    assert {row.number_format for row in products} == {"wide"}


# ------------------------------------------------------------------------------ text


def test_a_long_table_is_shortened_and_any_depth_can_be_requested():
    def model(params, x):
        for i in range(12):
            with jax.named_scope(f"layer_{i}"):
                x = BLOCK.apply(params, x)
        return x

    explanation = explain(model, backward=True)(BLOCK_PARAMS, X)
    lines = str(explanation).splitlines()
    assert len(lines) < 80
    assert lines[0] == f"autocast to bfloat16: {len(explanation.rows)} equations"
    assert "layer_*/Block" in lines or "layer_*" in lines
    assert len(explanation.table().splitlines()) > 400
    assert "layer_11/Block/Dense_1" in explanation.table()
    titles = [
        line for line in explanation.table(2).splitlines() if not line.startswith(" ")
    ]
    assert len(titles) == len(set(titles)), "each scope once"
    assert "layer_*/Block" in titles
    # A short function is shown equation by equation.
    assert "16-bit operand: dot_general at" in str(
        explain(lambda x: jnp.tanh(x @ W) @ W)(X)
    )


def test_a_block_that_a_rule_treats_differently_is_named_beside_similar_blocks():
    def model(x):
        for i in range(12):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ W)
        return x @ W

    rules = get_rules("mixed").scope("layer_7", "full")
    lines = explain(model, rules)(X).table(1).splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert cells[1:6] == [
        "layer_*",
        "11 dot_general bfloat16",
        "10 tanh bfloat16",
        # The tanh before the float32 block is float32 too.
        "2 tanh float32 layer_6, layer_7",
        "1 dot_general float32 layer_7",
    ]
    # Where no block differs, no block is named.
    plain = explain(model)(X).table(1)
    assert "layer_7" not in plain
    # Nor where more than a few blocks differ, or at least half of them.
    rules = get_rules("mixed").scope(r"layer_[0-3]$", "full")
    assert "layer_0" not in explain(model, rules)(X).table(1)
    rules = get_rules("mixed").scope(r"layer_(\d|10)$", "full")
    assert "layer_11" in explain(model, rules)(X).table(1)


def test_blocks_are_compared_with_those_that_have_the_op():
    def model(x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ W)
                x = jnp.exp(x) if i == 3 else x
        return x

    table = explain(model, get_rules("mixed").scope("layer_[0-2]", "full"))(X).table(1)
    # The product of one of four is low; three of four and the only exp are not few.
    assert {line.split()[-1] for line in table.splitlines() if "layer_" in line} == {
        "layer_*",
        "layer_3",
    }
    (exp,) = (line.split() for line in table.splitlines() if " exp " in line)
    assert exp == ["1", "exp", "float32"]


def test_totals_are_shown_below_the_table():
    text = explain(lambda x, w: jnp.tanh(x @ w), backward=True)(X, W).summary()
    equations, *lines, kept = text.splitlines()
    pattern = r"equations: \d+ (float32|bfloat16), \d+ (float32|bfloat16)"
    assert re.fullmatch(pattern, equations)
    assert lines == [
        "products: 3 bfloat16",
        "work: 1.54 kflop in bfloat16 (100%)",
        "casts: 6 (1.54 kB read and written)",
    ]
    pattern = r"saved for the backward pass: (\d+) B, without autocast (\d+) B"
    low, _ = map(int, re.fullmatch(pattern, kept).groups())
    # The operands, in 16 bits, and the slope of tanh.
    assert low == 2 * (X.size + W.size) + 4 * X.size


def test_json_and_html_contain_all_rows_and_totals():
    explanation = explain(block_loss, backward=True)(BLOCK_PARAMS, X)
    read = json.loads(explanation.to_json())
    assert len(read["rows"]) == len(explanation.rows)
    assert read["rows"][0]["op"] == explanation.rows[0].op
    assert read["totals"]["casts"] == explanation.totals.casts
    assert jmp.Rules.from_json(json.dumps(read["rules"])) == explanation.rules
    page = explanation._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 2
    assert "dot_general" in page
    odd = explain(jax.jit(lambda x: x @ x, static_argnames=()))(jnp.ones((2, 2)))
    assert "&lt;lambda&gt;" in odd._repr_html_()


def test_an_empty_function_can_be_explained():
    explanation = explain(lambda: None)()
    assert explanation.rows == ()
    assert str(explanation).startswith("autocast to bfloat16: 0 equations")
    assert explanation.totals.casts == 0
    assert explanation._repr_html_()
    assert not explanation.diff(explanation)
    with pytest.raises(
        ValueError, match="No equation in this function has a floating-point"
    ):
        explanation.share_low()


def test_an_explanation_is_a_value_and_its_table_shows_any_name():
    def fun(x):
        with jax.named_scope("two\nlines"):
            return x @ W

    explanation = explain(fun)(X)
    assert explanation == explain(fun)(X)
    assert hash(explanation) == hash(explain(fun)(X))
    _, headers, scope, row, *_ = str(explanation).splitlines()
    assert scope == "two lines"
    assert row.index("dot_general") == headers.index("op")


def test_symbolic_shapes_are_shown():
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 12), jnp.float32)
    fun = lambda x, w: jnp.sum(jnp.tanh(x @ w))
    explanation = explain(fun, backward=True)(x, jnp.ones((12, 8)))
    dot = explanation.rows[0]
    unknown = 1  # A size that is not known counts as one.
    assert (dot.shapes, dot.flops) == (("float32[batch,8]",), 2 * unknown * 12 * 8)
    assert (dot.bytes_traced, dot.bytes_run) == (4 * unknown * 8, 2 * unknown * 8)
    assert (
        json.loads(explanation.to_json())["totals"]["flops"] == explanation.totals.flops
    )
    (lint,) = explanation.lints
    assert "in a product of sizes batch x 8 x 12" in lint.message
    assert lint.message.startswith("12 is not a multiple")
    assert str(explanation)
