"""The formats ``int8`` and ``float8_rows``: operands with one scale for each row."""

import dataclasses
import itertools
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    equations,
    live_equations_of,
    mostly_slow,
    one_of_each,
    relative_error,
)
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from weight_products import (
    LAYERS,
    PROGRAMS,
    SMALL,
    SOME_DERIVATIVES,
    TRANSFORMS,
    V,
    W,
    X,
    block,
    net,
    not_defined,
)

import jmp_lite as jmp
from jmp_lite.formats.rows import ByRows
from jmp_lite.formats.table import FORMATS
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.products import Dimensions

NAMES = ("int8", "float8_rows")
EVERY_SIZE = {name: jmp.get_format(name, smallest=0) for name in NAMES}
RULES = {name: jmp.get_rules("mixed").product(EVERY_SIZE[name]) for name in NAMES}
ERROR = {"int8": 0.04, "float8_rows": 0.15}
"""The largest relative error of a gradient."""
BOTH = pytest.mark.parametrize("name", NAMES)


def autocast(fun, name):
    return jmp.autocast(fun, RULES[name])


def explained(fun, name, *args):
    rows = jmp.explain(fun, RULES[name])(*args).rows
    return [(r.number_format, r.code) for r in rows if r.op == "dot_general"]


# ------------------------------------------------------------------------------- rules


def test_the_preset_int8_is_mixed_with_its_products_in_int8():
    assert jmp.get_rules("int8") == jmp.get_rules("mixed").product("int8")
    assert jmp.get_rules("int8").precision_of("dot_general") is FORMATS["int8"]
    assert jmp.get_rules("int8").precision_of("conv_general_dilated") is (
        jmp.ops.Precision.LOW
    )


@BOTH
def test_products_of_weights_have_the_format_and_explain_shows_why_others_do_not(name):
    assert explained(block, name, X, W, V) == [
        *([(name, "op")] * 2),
        ("low", f"{name}_read_in_float32"),
    ]
    odd = lambda x, w: jnp.tanh(x[:, :40] @ w[:40]) @ w.T
    assert explained(odd, name, X, W)[0] == ("low", f"{name}_size")
    alike = lambda x: jnp.tanh(jnp.tanh(x) @ jnp.tanh(x.T)) @ x
    assert explained(alike, name, X)[0] == ("low", f"{name}_no_weight")
    small = jmp.get_rules("mixed").product(name)
    rows = jmp.explain(block, small)(X, W, V).rows
    assert f"{name}_small" in {row.code for row in rows}
    lints = jmp.explain(block, small.scope("^", name))(X, W, V).lints
    assert f"small {name} product" in {lint.name for lint in lints}


def test_explain_advises_against_int8_on_a_gpu(monkeypatch):
    def lints(name):
        return [lint.name for lint in jmp.explain(block, RULES[name])(X, W, V).lints]

    assert lints("int8") == []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert {*lints("int8")} == {"int8 on a GPU"}
    assert lints("float8_rows") == []


def test_float8_by_rows_is_for_bfloat16_and_int8_for_both():
    for name, code in (("int8", "op"), ("float8_rows", "float8_rows_compute_dtype")):
        rules = dataclasses.replace(RULES[name], compute_dtype="float16")
        rows = jmp.explain(block, rules)(X, W, V).rows
        assert code in {row.code for row in rows if row.op == "dot_general"}


@BOTH
def test_json_keeps_the_name_and_the_options(name):
    for rules in (RULES[name], jmp.get_rules("mixed").scope("mlp", name)):
        assert jmp.Rules.from_json(rules.to_json()) == rules


# ---------------------------------------------------------------- what it computes


def by_rows(array, axis, name):
    """Quantizes an array by rows, in NumPy and in float64."""
    array = np.asarray(jnp.asarray(array, "bfloat16"), np.float64)
    largest = np.abs(array).max(axis, keepdims=True)
    if name == "int8":
        scale = np.where(largest == 0, 1, largest / 127)
        return np.round(array / scale) * scale
    scale = np.where(largest == 0, 1, 2.0 ** np.ceil(np.log2(largest / 448)))
    rounded = jnp.asarray(array / scale, "float32").astype("float8_e4m3fn")
    return np.asarray(rounded, np.float64) * scale


@pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False),
    reason="JAX's coming checkpoint applies policies elsewhere: products run again",
)
@pytest.mark.parametrize(
    "policy", ["dots_saveable", "dots_with_no_batch_dims_saveable"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_checkpoint_policies_recognize_products_by_rows(name, policy):
    rules = jmp.get_rules("mixed").scope("", FORMATS[name])
    if name in RULES:
        rules = RULES[name]

    def products(rules, policy):
        again = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
        traced = jax.make_jaxpr(jax.value_and_grad(jmp.autocast(again, rules), 1))(
            X, W, V
        )
        names = [eqn.primitive.name for eqn in live_equations_of(traced)]
        return names.count("dot_general")

    kept = products("mixed", policy)
    assert products(rules, policy) == kept < products(rules, "nothing_saveable")


@BOTH
def test_a_product_is_that_of_its_rounded_rows(name):
    found = jax.jit(autocast(lambda x, w: jnp.tanh(x @ w) @ w.T, name))(X, W)
    low = jnp.tanh(jnp.asarray(by_rows(X, 1, name) @ by_rows(W, 0, name), "bfloat16"))
    exact = np.asarray(low, np.float64) @ np.asarray(W, "bfloat16").astype("float64").T
    np.testing.assert_allclose(found, exact, atol=0.03, rtol=0.02)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    dims=st.sampled_from(
        [
            *("ij,jk->ik", "ij,kj->ik", "ij,kj->ki", "bij,jk->bik", "bij,bjk->bik"),
            *("ijb,bjk->bik", "aij,jib->ab", "ebij,ejk->ebik", "abcd,dcef->eafb"),
        ]
    ),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
)
def test_any_product_and_its_gradients_are_close_to_float32s(dims, name, seed):
    lhs, rhs = dims.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(seed))
    sizes = dict.fromkeys("abcdefijk", 16)
    x, w = (
        jax.random.normal(key, [sizes[axis] for axis in axes])
        for key, axes in zip(keys, (lhs, rhs), strict=True)
    )

    def loss(x, w):
        h = jnp.einsum(dims, jnp.tanh(x), w)
        return jnp.sum(jnp.tanh(jnp.einsum("...i,i->...", h, jnp.ones(16)) / 16))

    low = autocast(loss, name)
    assert explained(loss, name, x, w)[0] == (name, "op")
    exact, found = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (loss, low))
    assert relative_error(found, exact) < 2 * ERROR[name]


@BOTH
def test_all_three_products_have_8_bits_and_add_up_as_they_should(name):
    text = (
        jax.jit(jax.grad(autocast(block, name), (0, 1, 2)))
        .trace(X, W, V)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    kinds = Counter(line.rsplit(":", 1)[1].strip() for line in dots)
    eight = [kind for kind in kinds.elements() if "xi8" in kind or "xf8" in kind]
    assert (len(eight), len(dots)) == (6, 9)
    if name == "int8":
        assert all(kind.count("xi8") == 2 and "xi32" in kind for kind in eight)
    else:
        assert all(kind.endswith("xbf16>") for kind in eight)
        assert not any("f8E5M2" in kind for kind in eight)
        precise = [line for line in dots if "HIGHEST" in line]
        assert len(precise) == 4


def test_cotangents_have_a_dtype_of_their_own():
    number_format = jmp.get_format("float8_rows", smallest=0, backward="float8_e5m2")
    rules = jmp.get_rules("mixed").product(number_format)
    rows = jmp.explain(block, rules, backward=True)(X, W, V).rows
    found = Counter(row.precision for row in rows if row.op == "dot_general")
    assert found == {"float8_e4m3fn": 2, "float8_e5m2": 4, "bfloat16": 3}


@pytest.mark.parametrize(
    ("name", "program", "transform"),
    mostly_slow(
        itertools.product(NAMES, PROGRAMS, TRANSFORMS),
        [
            (name, *derivative)
            for name, derivative in one_of_each(NAMES, SOME_DERIVATIVES)
        ],
    ),
)
def test_derivatives_of_any_order_are_near_float32s(name, program, transform):
    fun, change = PROGRAMS[program], TRANSFORMS[transform]
    x = jnp.stack([SMALL, 2 * SMALL]) if "vmap" in transform else SMALL
    if reason := not_defined(program, transform):
        pytest.skip(reason)
    low = change(autocast(fun, name))
    found, expected = (jax.jit(f)(x, LAYERS) for f in (low, change(fun)))
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
        jnp.result_type, expected
    )
    assert relative_error(found, expected) < 0.2


@BOTH
def test_a_power_of_two_scales_gradients_exactly(name):
    gradient = jax.jit(
        lambda scale: jax.grad(lambda w: scale * autocast(block, name)(X, w, V))(W)
    )
    for scale in (2.0**15, 2.0**-30):
        np.testing.assert_array_equal(gradient(scale) / scale, gradient(1.0))


@BOTH
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinities_and_nans_stay_in_their_row_and_the_step_is_skipped(name, bad):
    fun = autocast(lambda x, w, v: jnp.tanh(net(x, w, v)) @ w, name)
    out = jax.jit(fun)(X.at[3, 5].set(bad), W, V)
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, 0)).all()
    gradient = jax.jit(jax.grad(autocast(block, name), 1))
    bad_gradient = gradient(X.at[3, 5].set(bad), W, V)
    assert not np.isfinite(bad_gradient).all()
    optimizer = jmp.skip_nonfinite(optax.sgd(1e-3))
    updates, _ = optimizer.update(bad_gradient, optimizer.init(W), W)
    np.testing.assert_array_equal(updates, 0)


@BOTH
def test_rows_of_zeros_and_rows_of_tiny_numbers_keep_their_digits(name):
    x = X.at[0].set(0).at[1].multiply(2.0**-40).at[2].multiply(2.0**40)
    fun = lambda x, w, v: jnp.abs(x @ w) @ v
    found, exact = (np.asarray(jax.jit(f)(x, W, V)) for f in (autocast(fun, name), fun))
    np.testing.assert_array_equal(found[0], 0)
    for i in (1, 2, 3):
        assert relative_error(found[i], exact[i]) < ERROR[name]


@BOTH
def test_a_row_of_zeros_divides_nothing_by_zero(name):
    form = ByRows(*[np.dtype(RULES[name].precision_of("dot_general").forward)] * 3)
    zeros, weight = (ProductOperand(jnp.asarray(x, jnp.bfloat16)) for x in (0 * X, W))
    axes = Dimensions(((1,), (0,)), ((), ()))
    with jax.debug_nans(True):  # Op by op, so that JAX sees each quotient.
        out = form.multiply(zeros, weight, axes, None)
    np.testing.assert_array_equal(out, 0)
    jitted = jax.jit(autocast(lambda x, w, v: jnp.abs(x @ w) @ v, name))
    np.testing.assert_array_equal(jitted(0 * X, W, V), 0)


@pytest.mark.slow
@BOTH
def test_sums_of_many_terms_do_not_overflow(name):
    x, ones = jnp.ones((196_608, 16)), jnp.ones((16, 16))
    mean = lambda w: jnp.mean(autocast(lambda x, w: jnp.tanh(x @ w) @ ones, name)(x, w))
    grad = jax.jit(jax.grad(mean))(jnp.zeros((16, 16)))
    np.testing.assert_allclose(grad, 1.0, rtol=0.1)


@pytest.mark.parametrize("format_", [*NAMES, "wide", "own"])
def test_a_product_with_integers_is_low(format_):
    own = jmp.Format("own", lax.dot_general)
    chosen = {**EVERY_SIZE, "own": own}.get(format_, format_)
    rules = jmp.get_rules("mixed").scope("", chosen)
    integers = jnp.arange(256).reshape(16, 16) % 3

    def fun(x):
        dims = (((1,), (0,)), ((), ()))
        return lax.dot_general(integers, x, dims, preferred_element_type=jnp.float32)

    (row,) = (r for r in jmp.explain(fun, rules)(X[:16, :16]).rows if r.flops)
    code = f"{format_}_an_operand_has_integers"
    assert (row.number_format, row.code) == ("low", code)
    results = [jmp.autocast(fun, r)(X[:16, :16]) for r in (rules, "mixed")]
    np.testing.assert_array_equal(*results)


# ----------------------------------------------------------------------------- insight


@BOTH
def test_explain_counts_the_products_of_both_passes(name):
    explanation = jmp.explain(block, RULES[name], backward=True)(X, W, V)
    rows = [row for row in explanation.rows if row.op == "dot_general"]
    found = Counter((row.precision, row.is_backward) for row in rows)
    forward = "int8" if name == "int8" else "float8_e4m3fn"
    assert found == {
        (forward, False): 2,
        ("bfloat16", False): 1,
        (forward, True): 4,
        ("bfloat16", True): 2,
    }
    assert explanation.share_low("dot_general", bits=8) == pytest.approx(6 / 9)


@BOTH
def test_explain_shows_the_products_that_run(name):
    for fun in PROGRAMS.values():
        shown = [f for f, _ in explained(fun, name, SMALL, LAYERS)].count(name)
        eqns = equations(jax.make_jaxpr(autocast(fun, name))(SMALL, LAYERS).jaxpr)
        assert sum("form" in eqn.params for eqn in eqns) == shown, fun


@pytest.mark.slow
@BOTH
def test_compare_and_tune_accept_formats_by_rows(name):
    comparison = jmp.compare(net, RULES[name])(X, W, V)
    low = jmp.compare(net)(X, W, V)
    assert comparison.errors["result"] > 1.2 * low.errors["result"] > 0
    _, report = jmp.tune(net, RULES[name], tolerance=1.0, progress=lambda line: None)(
        X, W, V
    )
    error = report.error.largest
    found = jmp.tune(
        net, RULES[name], tolerance=0.7 * error, progress=lambda line: None
    )(X, W, V)
    assert [f for f, _ in explained(net, name, X, W, V)] == [name, "low"]
    rows = jmp.explain(net, found.rules)(X, W, V).rows
    assert name not in {row.number_format for row in rows}


# ----------------------------------------------------------------------------- devices


SPLITS, KINDS = ("rows", "weights too"), (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize(
    ("split", "kind", "name"),
    mostly_slow(
        itertools.product(SPLITS, KINDS, NAMES), one_of_each(SPLITS, KINDS, NAMES)
    ),
)
def test_a_sharded_gradient_is_that_of_one_device(name, kind, split):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    rows, everywhere = (NamedSharding(mesh, P(*axes)) for axes in (["data"], []))
    of_weights = everywhere if split == "rows" else rows
    gradient = jax.jit(jax.grad(autocast(block, name), 1))
    alone = gradient(X, W, V)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, rows)
        w, v = (jax.device_put(a, of_weights) for a in (W, V))
        sharded = gradient(x, w, v)
    assert relative_error(sharded, alone) < 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_can_be_mapped_on_a_mesh_that_splits_the_axis_it_contracts(name):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
    rules = jmp.get_rules("mixed").scope("", EVERY_SIZE.get(name, name))

    def product(x, w):
        return jnp.exp(jnp.dot(x, w, out_sharding=P(None, None)) / 50)

    def loss(xs, w):
        return jnp.sum(jax.vmap(jmp.autocast(product, rules), (0, None))(xs, w))

    xs = jnp.stack([X, X[::-1]])
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with jax.set_mesh(mesh):
        split = jax.device_put(xs, P(None, None, "model"))
        found = gradient(split, jax.device_put(W, P("model", None)))
    exact = jax.value_and_grad(lambda xs, w: jnp.sum(jnp.exp(xs @ w / 50)), (0, 1))(
        xs, W
    )
    assert relative_error(found, exact) < 0.1


@BOTH
def test_in_shard_map_rows_have_the_scales_of_their_device(name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x, w, v: lax.pmean(autocast(block, name)(x, w, v), "data"),
        mesh=mesh,
        in_specs=(P("data"), P(), P()),
        out_specs=P(),
    )
    found = jax.jit(jax.grad(mapped, (0, 1)))(X, W, V)
    expected = jax.grad(
        lambda x, w: (block(x[:16], w, V) + block(x[16:], w, V)) / 2, (0, 1)
    )(X, W)
    assert relative_error(found, expected) < ERROR[name]


@BOTH
def test_a_gradient_is_exported_and_has_the_same_bits(name):
    gradient = jax.jit(jax.grad(autocast(block, name), (0, 1)))
    exported = export.export(gradient)(X, W, V)
    again = export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, again.call(X, W, V), gradient(X, W, V))


@BOTH
def test_a_batch_of_weights_has_a_scale_for_each_row_of_each(name):
    sizes = jnp.array([1, 2.0**20, 2.0**-20])[:, None, None]
    weights = jnp.stack([W, W, W]) * sizes

    def experts(x, ws):
        return jnp.tanh(jnp.einsum("ebk,ekn->ebn", x, ws) / sizes) @ V

    rows = jnp.stack([X, X[::-1], X])
    assert explained(experts, name, rows, weights)[0] == (name, "op")
    low, exact = (
        jax.jit(lambda x, ws, f=f: jax.vjp(f, x, ws)[1](jnp.ones((3, 32, 48))))(
            rows, weights
        )
        for f in (autocast(experts, name), experts)
    )
    assert relative_error(low[0], exact[0]) < 2 * ERROR[name]
    for found, expected in zip(low[1], exact[1], strict=True):
        assert relative_error(found, expected) < 2 * ERROR[name]
