"""Matrix products in float8: which ones, what they compute, and their derivatives."""

import dataclasses
import functools
import itertools
import types
from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import equations, live_equations, mostly_slow
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from weight_products import (
    DIRECTION,
    LAYERS,
    MANY_FORMS,
    PROGRAMS,
    SMALL,
    SOME_DERIVATIVES,
    TRANSFORMS,
    V,
    W,
    X,
    again,
    block,
    gradient_and_shapes,
    layers,
    looping,
    net,
    not_defined,
)

import jmp_lite as jmp
from benchmarks.compiled import missing
from benchmarks.formats import transformers, wire
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.rules import is_identity
from jmp_lite.formats.float8 import Scaled, describe_formats, quantize_operand
from jmp_lite.jaxprs.products import Dimensions

EVERY_SIZE = jmp.Float8(smallest=0)
MIXED = jmp.get_rules("mixed")
RULES = MIXED.product(EVERY_SIZE)
E4, E5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def autocast(fun, rules=RULES):
    return jmp.autocast(fun, rules)


def codes(fun, *args, rules=RULES):
    rows = jmp.explain(fun, rules)(*args).rows
    return [row.code for row in rows if row.op == "dot_general"]


def precisions(fun, *args, rules=RULES):
    rows = jmp.explain(fun, rules)(*args).rows
    return [row.precision for row in rows if row.op == "dot_general"]


# ------------------------------------------------------------------------------ rules


def test_float8_is_for_matrix_products_alone():
    rules = jmp.get_rules("mixed").float8("dot_general", "ragged_dot_general")
    assert rules.precision_of("dot_general") == jmp.get_format("float8")
    assert rules == jmp.get_rules("float8")
    with pytest.raises(ValueError, match="'conv_general_dilated' cannot be FLOAT8"):
        jmp.Rules().float8("conv_general_dilated")
    with pytest.raises(ValueError, match=r"'tanh' cannot be FLOAT8: .* 'dot_general'"):
        jmp.Rules(ops=(("tanh", "float8"),))


def test_a_float8_scope_decides_matrix_products_and_nothing_else():
    rules = jmp.get_rules("mixed").scope("mlp", "float8").scope("mlp/out", "full")
    match = RuleLookup(rules).match("dot_general", "mlp")
    assert match.precision == jmp.get_format("float8")
    assert RuleLookup(rules).match("exp", "mlp").precision is jmp.ops.Precision.FULL
    assert (
        RuleLookup(rules).match("conv_general_dilated", "mlp").precision
        is jmp.ops.Precision.LOW
    )
    assert (
        RuleLookup(rules).match("tanh", "mlp/out").precision is jmp.ops.Precision.FULL
    )
    assert rules.precision_in("mlp") is None


def test_rules_with_float8_travel_as_json():
    rules = jmp.Rules().float8("dot_general")
    rules = rules.scope("a", jmp.Float8(backward="e4m3fn", smallest=100.5))
    assert jmp.Rules.from_json(rules.to_json()) == rules
    assert hash(rules) == hash(jmp.Rules.from_json(rules.to_json()))
    wrong = '{"scopes": [["a", {"format": "float8", "forwards": "e4m3fn"}]]}'
    with pytest.raises(ValueError, match=r"of float8 'forwards'\. Did you mean"):
        jmp.Rules.from_json(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": "e5m2"}, "Unknown forward format 'e5m2'.*e4m3fn"),
        ({"forward": "e4m3"}, "Did you mean 'e4m3fn'"),
        ({"backward": "bfloat16"}, "Unknown backward format 'bfloat16'"),
        ({"smallest": -1}, "at least 0 for smallest, got -1"),
        ({"smallest": "large"}, "at least 0 for smallest, got 'large'"),
        ({"smallest": True}, "at least 0 for smallest, got True"),
        ({"smallest": float("nan")}, "at least 0 for smallest, got nan"),
        ({"sums": "promote"}, "Unknown sums 'promote'. Did you mean 'promoted'"),
    ],
)
def test_formats_that_matrix_units_do_not_have_are_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        jmp.Float8(**options)


def test_float8_is_no_default():
    with pytest.raises(ValueError, match="FLOAT8 is for matrix products"):
        jmp.Rules(default="float8")
    assert not is_identity(jmp.Rules().keep("dot_general").float8("dot_general"))


# -------------------------------------------------------------------------- decisions


def test_a_product_that_a_later_product_reads_is_float8_and_the_last_one_is_not():
    assert codes(net, X, W, V) == ["op", "float8_read_in_float32"]
    assert precisions(net, X, W, V) == ["float8_e4m3fn", "bfloat16"]
    assert codes(block, X, W, V) == ["op", "op", "float8_read_in_float32"]


def test_a_router_and_logits_are_not_float8_and_gates_are():
    def mixture(x, gate, router, w):
        probabilities = jax.nn.softmax(x @ router)
        _, chosen = lax.top_k(x @ router, 2)
        h = jax.nn.silu(x @ gate) * (x @ w)
        return jax.nn.log_softmax(h @ w.T), probabilities, chosen

    found = codes(mixture, X, W, W[:, :16], W)
    last = "float8_read_in_float32"
    assert found == [last, last, "op", "op", last]


@pytest.mark.parametrize(
    ("fun", "args", "code", "words"),
    [
        (
            lambda x, w: (x @ w) @ w.T,
            (X, W[:, :50]),
            "float8_size",
            "LOW, not float8: N = 50 is not a multiple of 16",
        ),
        (
            lambda x, w: (x @ w) @ w.T,
            (X[:20], W),
            "float8_size",
            "M = 20 is not a multiple of 16",
        ),
        (
            lambda x, w: (x[:, :40] @ w[:40]) @ w.T,
            (X, W),
            "float8_size",
            "K = 40 is not a multiple of 16",
        ),
        (
            lambda x, w: (jnp.tanh(x) @ jnp.tanh(w)) @ w.T,
            (X, W),
            "float8_no_weight",
            "no operand is a weight",
        ),
        (
            lambda x, w: (x[0] @ w) @ w.T,
            (X, W),
            "float8_size",
            "M = 1 is not a multiple",
        ),
    ],
)
def test_a_product_that_cannot_be_float8_is_16_bit_and_explain_shows_why(
    fun, args, code, words
):
    row = next(r for r in jmp.explain(fun, RULES)(*args).rows if r.op == "dot_general")
    assert (row.code, row.precision) == (code, "bfloat16")
    assert words in row.reason
    alike = jmp.autocast(fun, "mixed")
    a, b = jax.make_jaxpr(autocast(fun))(*args), jax.make_jaxpr(alike)(*args)
    assert str(a) == str(b)


def test_a_batch_of_weights_is_float8():
    experts, rows = jnp.stack([W, 2 * W]), jnp.stack([X, X / 4])

    def batched(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w.mT)

    assert precisions(batched, rows, experts)[0] == "float8_e4m3fn"
    found, full = (f(rows, experts) for f in (autocast(batched), batched))
    assert relative_error(found, full) < 0.06
    gradient = lambda f: jax.grad(lambda w: jnp.sum(f(rows, w) ** 2))(experts)
    assert relative_error(gradient(autocast(batched)), gradient(batched)) < 0.1


def test_a_product_that_is_too_small_to_gain_is_16_bit():
    rules = MIXED.product(jmp.Float8(smallest=45))
    assert codes(net, X, W, V, rules=rules)[0] == "float8_small"
    rules = MIXED.product(jmp.Float8(smallest=44))
    assert codes(net, X, W, V, rules=rules)[0] == "op"
    assert codes(net, X, W, V, rules="float8")[0] == "float8_small"


def test_products_as_wide_as_2048_are_float8_by_default_and_those_of_768_are_not():
    def two(x, w):
        return jnp.tanh(x @ w) @ w.T

    def of(width):
        x = jax.ShapeDtypeStruct((8192, width), jnp.float32)
        w = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
        return codes(two, x, w, rules="float8")[0]

    assert (of(768), of(1024), of(2048)) == ("float8_small", "op", "op")


def test_float8_is_for_bfloat16_alone():
    rules = dataclasses.replace(RULES, compute_dtype="float16")
    assert codes(net, X, W, V, rules=rules)[0] == "float8_compute_dtype"


MARKS = {
    "full": jmp.full_precision,
    "low": jmp.low_precision,
    "off": functools.partial(jmp.autocast, rules="O0"),
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_marks_and_inner_autocasts_come_before_float8(mark):
    found = jax.make_jaxpr(autocast(lambda x, w: mark(jnp.dot)(x, w) @ w.T))(X, W)
    assert "f8_" not in str(found)


def test_products_that_need_digits_are_float32_though_a_rule_requests_float8():
    def lookup(x, w):
        return jnp.round(x @ w).astype(jnp.int32)

    assert codes(lookup, X, W) == ["digits"]
    assert codes(lookup, X, W, rules=RULES.scope("", "float8")) == ["digits"]
    highest = functools.partial(jnp.dot, precision="highest")
    assert codes(lambda x, w: highest(x, w) @ w.T, X, W)[0] == "highest_precision"


def test_the_last_product_of_a_float8_scope_is_float8_and_gets_a_lint():
    def scoped(x, w, v):
        with jax.named_scope("mlp"):
            return net(x, w, v)

    rules = MIXED.scope("mlp", EVERY_SIZE)
    explanation = jmp.explain(scoped, rules)(X, W, V)
    assert explanation.dtype_of(op="dot_general") == "float8_e4m3fn"
    (lint,) = explanation.lints
    assert lint.name == "last float8 product"
    assert "logits" in str(lint)


def test_jitting_a_part_changes_no_decision():
    def jitted(x, w, v):
        return jnp.sum(jnp.tanh(jax.jit(net)(x, w, v) @ w) ** 2)

    assert codes(jitted, X, W, V) == codes(block, X, W, V)
    results = [jax.jit(autocast(f))(X, W, V) for f in (jitted, block)]
    np.testing.assert_array_equal(*results)


def test_a_function_called_in_and_out_of_a_float8_scope_is_converted_for_each():
    dense = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(x, w):
        for name in ("before", "mlp", "after"):
            with jax.named_scope(name):
                x = dense(x, w)
        return x @ w

    rules = MIXED.scope("mlp", EVERY_SIZE)
    found = precisions(fun, SMALL, LAYERS[0], rules=rules)
    assert found == ["bfloat16", "float8_e4m3fn", "bfloat16", "bfloat16"]


def test_weights_of_scans_jits_branches_and_remat_are_weights():
    def loop(x, ws):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] @ ws[0]

    def branches(x, ws):
        return lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, ws[0]) @ ws[1]

    def again(x, ws):
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, ws[0]) @ ws[1]

    def indexed(x, ws):
        return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ ws[i]), x) @ ws[0]

    def taken(x, ws):
        def step(h, i):
            return jnp.tanh(h @ jnp.take(ws, i, axis=0)), None

        return lax.scan(step, x, jnp.arange(3))[0] @ ws[0]

    x = X @ W[:, :48]
    for fun in (loop, branches, again, indexed, taken):
        assert codes(fun, x, LAYERS)[0] == "op", fun


# ------------------------------------------------------------------------ what it runs


def rounded(array, dtype):
    """Returns the numbers of a quantized array, by NumPy, in float32."""
    array = np.asarray(jnp.asarray(array, jnp.bfloat16), np.float32)
    ratio = np.abs(array).max() / float(ml_dtypes.finfo(dtype).max)
    scale = np.float32(2.0) ** np.ceil(np.log2(ratio))
    return (array / scale).astype(dtype).astype(np.float32) * scale


def by_hand(x, w):
    """Returns a product and its gradients for a cotangent of 2 * y, by NumPy."""
    low, high = rounded(x, E4), rounded(w, E4)
    y = np.asarray(jnp.asarray(low @ high, jnp.bfloat16), np.float32)
    cotangent = rounded(2 * y, E5)
    return y, cotangent @ high.T, low.T @ cotangent


@jax.jit
def product_and_gradients(x, w):
    def product(x, w):
        # A product reads it, so that it is not the last one.
        return (x @ w) @ jnp.eye(w.shape[1])

    y, back = jax.vjp(autocast(product), x, w)
    return y, *back(2 * y)


def test_a_product_and_its_gradients_are_those_by_hand():
    for found, expected in zip(product_and_gradients(X, W), by_hand(X, W), strict=True):
        # But for the order of sums, and one rounding to bfloat16.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 2.0**30])
def test_values_that_float8_has_give_the_results_of_float32_bit_for_bit(factor):
    # Sums of few small integers are exact in bfloat16 too.
    x = factor * (jnp.arange(16.0 * 32).reshape(16, 32) % 3 - 1)
    w = (jnp.arange(32 * 16).reshape(32, 16) % 16 == 3).astype(jnp.float32)

    def loss(x, w):
        return jnp.sum((x @ w) @ jnp.eye(16))

    both = [
        jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (autocast(loss), loss)
    ]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_both_operands_and_both_backward_products_are_float8():
    def numbers(fun):
        eqns = live_equations(fun, X, W, V)
        casts = (e for e in eqns if e.primitive.name == "convert_element_type")
        return Counter(str(eqn.outvars[0].aval.dtype) for eqn in casts)

    assert numbers(autocast(block))["float8_e4m3fn"] == 4
    gradient = numbers(jax.grad(autocast(block), (0, 1, 2)))
    # Each backward product rounds its cotangent; XLA merges the two of one cotangent.
    assert (gradient["float8_e4m3fn"], gradient["float8_e5m2"]) == (4, 4)


def products_for(fun, args, platform):
    """Returns the StableHLO lines of the products of a function, lowered."""
    lowered = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,))
    text = lowered.as_text().splitlines()
    return [line for line in text if "stablehlo.dot_general" in line]


def operands_of(line):
    """Returns the dtypes of the operands of a product in StableHLO."""
    types = line.partition(": (")[2].partition(")")[0]
    return tuple(one.rpartition("x")[2].strip(">") for one in types.split(", "))


def test_backward_products_add_up_in_full():
    lines = products_for(jax.grad(autocast(block), (0, 1, 2)), (X, W, V), "cuda")
    assert sum("precision = [HIGHEST, HIGHEST]" in line for line in lines) == 4


def with_sums(sums, name="float8", rules="mixed"):
    return jmp.get_rules(rules).product(jmp.get_format(name, smallest=0, sums=sums))


@pytest.mark.parametrize("name", ["float8", "float8_rows"])
@pytest.mark.parametrize(("sums", "n_promoted"), [("fast", 4), ("promoted", 6)])
def test_products_of_the_forward_pass_are_added_up_as_asked(sums, n_promoted, name):
    rules = with_sums(sums, name)
    gradient = jax.grad(autocast(block, rules), (0, 1, 2))
    lines = products_for(gradient, (X, W, V), "cuda")
    of_8_bits = [line for line in lines if line.count("f8E") == 2]
    assert len(of_8_bits) == 6
    assert sum("[HIGHEST, HIGHEST]" in line for line in of_8_bits) == n_promoted
    explanation = jmp.explain(block, rules, backward=True)(X, W, V)
    found = Counter(row.sums for row in explanation.rows if row.sums)
    assert found == Counter(fast=6 - n_promoted, promoted=n_promoted)
    expected = "2 fast, 4 promoted" if sums == "fast" else "6 promoted"
    assert f"sums of float8: {expected}" in explanation.summary().splitlines()
    assert jmp.Rules.from_json(rules.to_json()) == rules


SQUARE = jnp.full((48, 48), 0.1)


def test_a_scope_has_formats_of_its_own():
    def fun(x, w):
        with jax.named_scope("gate"):
            gate = jax.nn.sigmoid(x @ w)
        with jax.named_scope("out"):
            return jnp.mean((jnp.tanh(gate @ w) @ w) ** 2)

    formats = jmp.Float8(smallest=0, sums="promoted", backward="e4m3fn")
    rules = RULES.scope("out", formats)
    rows = jmp.explain(fun, rules)(X, SQUARE).rows
    assert [(r.scope, r.sums) for r in rows if r.sums] == [
        ("gate", "fast"),
        ("out", "promoted"),
        ("out", "promoted"),
    ]
    lines = products_for(jax.grad(autocast(fun, rules)), (X, SQUARE), "cuda")
    of_8_bits = [line for line in lines if line.count("f8E") == 2]
    assert sum("f8E5M2" in line for line in of_8_bits) == 1
    assert jmp.Rules.from_json(rules.to_json()) == rules
    usual = RULES.scope("out", jmp.Float8())
    assert jmp.Rules.from_json(usual.to_json()) == usual == RULES.scope("out", "float8")
    assert [r.sums for r in jmp.explain(fun, usual)(X, SQUARE).rows if r.sums] == [
        "fast"
    ]
    assert rules.scope("out", jmp.get_format("float8", smallest=0)) == rules.scope(
        "out", EVERY_SIZE
    )


def test_sums_of_int8_are_exact_and_have_no_option():
    with pytest.raises(ValueError, match="Unknown sums of int8 'promoted'"):
        jmp.get_format("int8", sums="promoted")
    rows = jmp.explain(block, with_sums("fast", "int8"), backward=True)(X, W, V).rows
    assert not any(row.sums for row in rows)


def float8_rows(gradient, shapes):
    """Returns the rows that ``explain`` shows as products in float8."""
    rows = jmp.explain(gradient, "O0")(*shapes).rows
    return [r for r in rows if r.op == "dot_general" and "float8" in r.precision]


@pytest.mark.parametrize("name", MANY_FORMS)
def test_a_gpu_gets_as_many_products_of_8_bit_numbers_as_explain_shows(name):
    gradient, shapes = gradient_and_shapes(name, rows=32, width=16)
    lowered = {
        platform: products_for(gradient, shapes, platform)
        for platform in ("cuda", "tpu", "rocm", "cpu")
    }
    of_8_bits = [
        line
        for line in lowered["cuda"]
        if all(dtype.startswith("f8") for dtype in operands_of(line))
    ]
    n_shown = len(float8_rows(gradient, shapes))
    assert len(of_8_bits) == n_shown > 4
    # One form for every chip: an exported program can be for several.
    dtypes = {
        platform: Counter(map(operands_of, lines))
        for platform, lines in lowered.items()
    }
    assert dtypes["tpu"] == dtypes["rocm"] == dtypes["cpu"] == dtypes["cuda"]


FORMS = {
    "one scale": ((0, 0), (((1,), (0,)), ((), ()))),
    "batches": ((1, 1), (((2,), (1,)), ((0,), (0,)))),
    "a free axis": ((1, 0), (((2,), (0,)), ((), ()))),
    "a contracted axis": ((1, 0), (((0, 2), (0, 1)), ((), ()))),
    "two axes": ((2, 1), (((3,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize(
    "name", mostly_slow(FORMS, ("one scale", "a contracted axis", "two axes"))
)
def test_a_product_is_that_of_the_dequantized_numbers(name):
    (left, right), axes = FORMS[name]
    shapes = {
        "one scale": ((16, 32), (32, 8)),
        "batches": ((3, 16, 32), (3, 32, 8)),
        "a free axis": ((3, 16, 32), (32, 8)),
        "a contracted axis": ((3, 16, 32), (3, 32, 8)),
        "two axes": ((3, 2, 16, 32), (3, 32, 8)),
    }[name]
    made = []
    keys = jax.random.split(jax.random.key(0))
    for key, shape, n_axes in zip(keys, shapes, (left, right), strict=True):
        size = jnp.exp2(jnp.arange(shape[0])).reshape(-1, *[1] * (len(shape) - 1))
        array = (size * jax.random.normal(key, shape)).astype(jnp.bfloat16)
        fun = functools.partial(quantize_operand, dtype=np.dtype(E4))
        for _ in range(n_axes):
            fun = jax.vmap(fun)
        made.append(fun(array))
    form = Scaled(*[np.dtype(E4)] * 2, np.dtype(E5))
    found = form.multiply(*made, Dimensions(*axes), None)
    numbers = [
        (
            lax.bitcast_convert_type(bits, E4),
            jnp.expand_dims(scale, [*range(scale.ndim, bits.ndim)]),
        )
        for _, (bits, scale) in made
    ]
    exact = [np.float64(array) * np.float64(scale) for array, scale in numbers]
    expected = lax.dot_general(*map(jnp.float32, exact), axes, precision="highest")
    assert found.dtype == jnp.bfloat16
    # Of a contracted axis the numbers have the largest scale, and four times smaller
    # ones round again, below the normal numbers of e4m3fn.
    assert relative_error(found, expected) < 2**-8


def test_examples_of_any_size_add_up_under_vmap():
    """Their scales differ, and NaN of one example reaches the gradient."""

    def gradient(x):
        each = jax.vmap(autocast(net), (0, None, None))
        return jax.grad(lambda w: jnp.sum(each(x, w, V)))(W)

    x = jnp.stack([X[:16], X[16:] * 2.0**-12])
    exact = jax.grad(lambda w: jnp.sum(net(x, w, V)))(W)
    assert relative_error(jax.jit(gradient)(x), exact) < 0.1
    assert np.isnan(jax.jit(gradient)(x.at[1, 0, 0].set(np.nan))).any()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_cotangents_of_any_size_stay_in_range(scale):
    """Scales far from the numbers of a product overflow nowhere, and do not vanish."""
    gradient = jax.jit(jax.grad(lambda w, s: s * autocast(block)(X, w, V)))
    np.testing.assert_array_equal(gradient(W, scale) / scale, gradient(W, 1.0))


def test_an_exported_program_serves_every_platform():
    gradient = jax.jit(jax.grad(autocast(block), 1))
    exported = jax.export.export(gradient, platforms=("tpu", "cuda", "cpu"))(X, W, V)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(X, W, V), gradient(X, W, V))


def test_an_operand_of_several_products_is_quantized_once():
    def three(x, w):
        h = jnp.tanh(x)
        return (h @ w + h @ (2 * w) + h @ w) @ w.T

    found = str(jax.make_jaxpr(autocast(three))(X, W))
    # The operand of three products once, and a weight at each of its two uses.
    assert found.count("jit[name=quantize") == 3


def test_other_formats_may_be_chosen():
    formats = jmp.Float8(forward="e4m3fnuz", backward="e4m3fnuz", smallest=0)
    rules = MIXED.product(formats)
    found = str(jax.make_jaxpr(jax.grad(autocast(block, rules)))(X, W, V))
    assert "f8_e4m3fnuz" in found
    assert "f8_e5m2" not in found
    assert "f8_e4m3fn[" not in found


DEVICES = {
    "TPU v5 lite": ("e4m3b11fnuz", "e4m3b11fnuz"),
    "TPU v5e": ("e4m3b11fnuz", "e4m3b11fnuz"),
    "TPU v6 lite": ("e4m3b11fnuz", "e4m3b11fnuz"),
    "TPU7x": ("e4m3fn", "e5m2"),
    "TPU v5": ("e4m3fn", "e5m2"),
    "NVIDIA H100 80GB HBM3": ("e4m3fn", "e5m2"),
    "AMD Instinct MI300X": ("e4m3fnuz", "e5m2fnuz"),
    "cpu": ("e4m3fn", "e5m2"),
}


def device(kind):
    capability = {"compute_capability": "gfx942"} if "AMD" in kind else {}
    return types.SimpleNamespace(platform="any", device_kind=kind, **capability)


@pytest.mark.parametrize("kind", DEVICES)
def test_the_formats_are_those_in_which_the_device_multiplies(kind):
    here = jmp.Float8(smallest=0).on(device(kind))
    assert (here.forward, here.backward) == DEVICES[kind]
    assert here.smallest == 0
    named = jmp.Float8(forward="e4m3fn", backward="e5m2")
    assert named.on(device(kind)) == named
    half = jmp.Float8(forward="e4m3fn").on(device(kind))
    assert (half.forward, half.backward) == ("e4m3fn", DEVICES[kind][1])
    assert kind in describe_formats(jmp.Float8(), device(kind))
    assert describe_formats(named, device("TPU v5e")) == (
        "operands in e4m3fn, cotangents in e5m2"
    )


def test_rules_ask_the_device_at_each_use_and_explain_says_what_it_answered():
    rules = jmp.get_rules("float8")
    assert jmp.Float8().forward == "device"
    assert jmp.Rules.from_json(rules.to_json()) == rules
    assert jmp.Float8().forward_dtype == jnp.float8_e4m3fn
    assert jmp.Float8().backward_dtype == jnp.float8_e5m2
    text = jmp.explain(block, RULES)(X, W, V).summary()
    assert (
        "float8: operands in e4m3fn, cotangents in e5m2: the choice for a cpu" in text
    )
    assert "float8:" not in jmp.explain(block, "mixed")(X, W, V).summary()


def test_numbers_that_are_not_finite_reach_the_loss_in_the_format_of_a_v5e():
    rules = MIXED.product(jmp.Float8(smallest=0).on(device("TPU v5e")))
    low = autocast(block, rules)
    for bad in (jnp.inf, jnp.nan, -jnp.inf):
        assert jnp.isnan(low(X.at[0, 0].set(bad), W, V))
    gradient = jax.grad(low, (0, 1, 2))(X, W, V)
    exact = jax.grad(block, (0, 1, 2))(X, W, V)
    assert relative_error(gradient, exact) < 0.15


# ------------------------------------------------------------------------- transforms


def relative_error(found, expected):
    found, expected = (
        np.concatenate([np.ravel(np.float64(leaf)) for leaf in jax.tree.leaves(tree)])
        for tree in (found, expected)
    )
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("program", "transform"),
    mostly_slow(itertools.product(PROGRAMS, TRANSFORMS), SOME_DERIVATIVES),
)
def test_derivatives_of_any_order_are_near_float32s(program, transform):
    fun, change = PROGRAMS[program], TRANSFORMS[transform]
    x = jnp.stack([SMALL, 2 * SMALL]) if "vmap" in transform else SMALL
    if reason := not_defined(program, transform):
        pytest.skip(reason)
    found = jax.jit(change(autocast(fun)))(x, LAYERS)
    expected = jax.jit(change(fun))(x, LAYERS)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
        jnp.result_type, expected
    )
    assert relative_error(found, expected) < 0.2
    assert "f8_e4m3fn" in str(jax.make_jaxpr(change(autocast(fun)))(x, LAYERS))


def test_a_while_loop_has_its_derivative_forward():
    found, expected = (
        jax.jit(lambda x, f=f: jax.jvp(f, (x, LAYERS), (DIRECTION, LAYERS)))(SMALL)
        for f in (autocast(looping), looping)
    )
    assert relative_error(found, expected) < 0.2


@pytest.mark.parametrize(
    "program",
    mostly_slow(["a scan", "remat, written out", "a branch"], ["a scan", "a branch"]),
)
def test_op_by_op_is_as_under_jit(program):
    gradient = jax.grad(autocast(PROGRAMS[program]), (0, 1))
    found, expected = gradient(SMALL, LAYERS), jax.jit(gradient)(SMALL, LAYERS)
    assert relative_error(found, expected) < 0.03


def test_derivatives_do_not_depend_on_the_size_of_a_tangent():
    @jax.jit
    def product(x, tangent):
        fun = autocast(lambda x: jnp.sum(jax.grad(block, 1)(x, W, V)))
        return jax.jvp(fun, (x,), (tangent,))[1]

    results = [float(product(X, X * s)) / s for s in (1.0, 2.0**-60, 2.0**60)]
    np.testing.assert_allclose(results, results[0], rtol=0.02)


def test_a_power_of_two_scales_gradients_exactly():
    gradient = jax.jit(
        lambda scale: jax.grad(lambda w: scale * autocast(block)(X, w, V))(W)
    )
    for scale in (2.0**15, 2.0**-30, 2.0**-90, 2.0**110):
        np.testing.assert_array_equal(gradient(scale) / scale, gradient(1.0))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinities_and_nans_reach_the_gradients_and_the_step_is_skipped(bad):
    gradient = jax.jit(jax.grad(autocast(block), 1))
    assert np.isnan(gradient(X.at[3, 5].set(bad), W, V)).all()
    overflow = jax.jit(jax.grad(lambda w: autocast(block)(X, w, V) * jnp.float32(bad)))
    assert not np.isfinite(overflow(W)).any()
    optimizer = jmp.skip_nonfinite(optax.sgd(1e-3))
    state = optimizer.init(W)
    updates, _ = optimizer.update(overflow(W), state, W)
    np.testing.assert_array_equal(updates, 0)


def test_a_loop_keeps_one_byte_for_each_number():
    def kept(rules):
        totals = jmp.explain(layers, rules, backward=True)(SMALL, LAYERS).totals
        return totals.kept_run

    by_op = dataclasses.replace(RULES, ops=())
    # In each of three steps one byte less for a number, and two scales of four bytes.
    numbers, scales = 3 * SMALL.size + LAYERS.size, 3 * 2
    assert kept(by_op) - kept(RULES) == numbers - 4 * scales


REMAT_SAVES_BY_NAME = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="JAX's coming checkpoint has no forward mode for what is saved by name",
)


@REMAT_SAVES_BY_NAME
def test_remat_with_offloading_follows_its_policy_and_computes_no_scale_twice():
    policies, memories = jax.checkpoint_policies, ("device", "pinned_host")
    by_name = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src=memories[0],
        offload_dst=memories[1],
    )

    def body(x, w):
        hidden = jax.ad_checkpoint.checkpoint_name(x @ w, "hidden")
        return jnp.tanh(hidden) @ w

    def ops_of(policy, rules):
        again = jax.checkpoint(body, policy=policy)
        loss = autocast(lambda x, w: jnp.sum(again(x, w)), rules)
        found = jax.make_jaxpr(jax.grad(loss, (0, 1)))(SMALL, LAYERS[0])
        return Counter(eqn.primitive.name for eqn in equations(found.jaxpr))

    for policy in (by_name, policies.offload_dot_with_no_batch_dims(*memories)):
        # Two operands of one product, and its cotangent for two products.
        assert ops_of(policy, RULES)["reduce_max"] == 4
    offloaded = [ops_of(by_name, rules)["device_put"] for rules in (RULES, "mixed")]
    assert offloaded == [2, 2]


@REMAT_SAVES_BY_NAME
def test_remat_computes_no_scale_twice():
    def maxima(fun):
        found = jax.make_jaxpr(jax.grad(fun, (0, 1)))(SMALL, LAYERS)
        eqns = equations(found.jaxpr)
        return sum(eqn.primitive.name == "reduce_max" for eqn in eqns)

    # Two operands of one product, and its cotangent for two products.
    assert maxima(autocast(again(None))) == 4


def test_a_shape_is_traced_once():
    traces = Counter()

    def counted(x, w, v):
        traces[x.shape] += 1
        return block(x, w, v)

    fun = jax.jit(autocast(counted))
    for _ in range(3):
        fun(X, W, V)
    assert traces == {X.shape: 1}


# ---------------------------------------------------------------------------- explain


def test_explain_shows_both_formats_and_counts_8_bits_apart():
    explanation = jmp.explain(block, RULES, backward=True)(X, W, V)
    rows = [row for row in explanation.rows if row.op == "dot_general"]
    found = Counter((row.precision, row.is_backward) for row in rows)
    assert found == {
        ("float8_e4m3fn", False): 2,
        ("bfloat16", False): 1,
        ("float8_e5m2", True): 4,
        ("bfloat16", True): 2,
    }
    assert explanation.totals.products == {
        "float8_e4m3fn": 2,
        "bfloat16": 3,
        "float8_e5m2": 4,
    }
    work = 2 * 32 * 48 * 64
    assert explanation.totals.flops == {
        "float8_e4m3fn": 2 * work,
        "bfloat16": 3 * work,
        "float8_e5m2": 4 * work,
    }
    assert explanation.share_low("dot_general") == 1
    assert explanation.share_low("dot_general", bits=8) == pytest.approx(6 / 9)
    with pytest.raises(ValueError, match="bits=8 or bits=16, got 4"):
        explanation.share_low(bits=4)
    assert "float8_e5m2" in str(explanation)


def test_explain_counts_residuals_of_one_byte():
    def kept(rules):
        return jmp.explain(net, rules, backward=True)(X, W, V).totals.kept_run

    by_hand = dataclasses.replace(RULES, ops=())
    less = kept(by_hand) - kept(RULES)
    # The operands of the first product take one byte less for a number, and two
    # scales of four bytes.
    assert less == X.size + W.size - 2 * 4


def lints(fun, *args, rules=RULES):
    return [lint.name for lint in jmp.explain(fun, rules)(*args).lints]


def test_lints_treat_float8_as_low():
    assert lints(block, X, W, V) == []
    odd = lambda x, w: jnp.tanh(jnp.tanh(x[:, :40] @ w[:40]) @ w.T) @ w
    assert lints(odd, X, W) == ["float8 sizes"]
    only = lambda x, w: jnp.tanh(x @ w)
    assert lints(only, X, W) == ["no float8 product"]
    scope = jmp.get_rules("mixed").scope("^", "float8")
    assert {*lints(net, X, W, V, rules=scope)} == {
        "small float8 product",
        "no float8 product",
    }
    assert lints(net, X, W, V, rules="mixed") == []


def test_explain_shows_the_float8_products_that_run():
    for fun in PROGRAMS.values():
        shown = jmp.explain(fun, RULES)(SMALL, LAYERS).totals.products
        eqns = equations(jax.make_jaxpr(autocast(fun))(SMALL, LAYERS).jaxpr)
        runs = sum("form" in eqn.params for eqn in eqns)
        assert runs == shown.get("float8_e4m3fn", 0), fun


# ----------------------------------------------------------------------------- devices


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_gradient_is_that_of_one_device(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    gradient = jax.jit(jax.grad(autocast(block), 1))
    alone = gradient(X, W, V)
    with jax.set_mesh(mesh):
        x, w, v = (
            jax.device_put(X, rows),
            *(jax.device_put(a, everywhere) for a in (W, V)),
        )
        sharded = gradient(x, w, v)
    # One scale for all of the array, wherever its parts are. The order of sums may
    # round a number of three digits to another one.
    assert relative_error(sharded, alone) < 0.03


@pytest.mark.parametrize("is_split", [False, True])
def test_in_shard_map_each_device_has_its_own_scale(is_split):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def loss(x, w, v):
        if is_split:
            w = lax.all_gather(w, "data", tiled=True)
        return lax.pmean(autocast(block)(x, w, v), "data")

    weight = P("data") if is_split else P()
    mapped = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("data"), weight, P()), out_specs=P()
    )
    # The second device's rows are tiny: they keep their digits by their own scale.
    x = X.at[16:].multiply(2.0**-12)
    found = jax.jit(jax.grad(mapped, (0, 1)))(x, W, V)
    expected = jax.grad(
        lambda x, w: (block(x[:16], w, V) + block(x[16:], w, V)) / 2, (0, 1)
    )(x, W)
    assert relative_error(found[1], expected[1]) < 0.1
    assert relative_error(found[0][16:], expected[0][16:]) < 0.1
    jaxpr = jax.make_jaxpr(jax.grad(mapped, (0, 1)))(x, W, V)
    eqns = equations(jaxpr.jaxpr)
    assert any("form" in eqn.params for eqn in eqns)
    names = {eqn.primitive.name for eqn in eqns}
    assert not names & {"pmax", "pmax_invariant"}


# ----------------------------------------------------------------- what XLA makes of it


@pytest.mark.targets
@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        ({"depth": 24}, (0.83, 0.96, 0.90, 1.64)),
        (
            {"depth": 24, "layout": "scan + remat"},
            (0.82, 1.0 if jax.__version__.startswith("0.10.") else 1.01, 1.1, 1.57),
        ),
        ({"width": 4096}, (0.79, 0.97, 0.94, 1.65)),
        ({"width": 768}, (1.0, 1.0, 1.0, 1.0)),
        ({"target": "b200"}, (0.87, 0.98, 0.92, 1.6)),
    ],
)
def test_a_transformer_takes_less_time_on_a_gpu(size, bounds):
    if missing("h100"):
        pytest.skip(missing("h100"))
    with jax.numpy_dtype_promotion("standard"):  # Flax's own promotion.
        found = transformers.compare(**size)
    assert (found.share == 0) == ("width" in size and size["width"] == 768)
    ratios = (found.roofline, found.moved, found.peak, found.kernels)
    assert all(ratio <= bound for ratio, bound in zip(ratios, bounds, strict=True))


@pytest.mark.targets
def test_devices_send_each_other_weights_in_float8():
    if missing("h100"):
        pytest.skip(missing("h100"))
    with jax.numpy_dtype_promotion("standard"):
        found = wire.measure_sent("FSDP, jit", "float8").megabytes
        low = wire.measure_sent("FSDP, jit", "mixed").megabytes
    assert sum(found.values()) < 0.8 * sum(low.values())
    # Two blocks of two weights, once for both passes.
    assert found["f8e4m3fn"] == pytest.approx(4 * (2048 * 8192) / 1e6, rel=0.01)
