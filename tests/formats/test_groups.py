"""Products of groups (``ragged_dot``) in the formats of 8 bits."""

import dataclasses
import itertools
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mostly_slow, relative_error
from jax import lax
from jax.sharding import AxisType

import jmp_lite as jmp
from benchmarks.compiled import missing
from benchmarks.formats import experts

NAMES = ("float8", "float8_rows", "int8")
MIXED = jmp.get_rules("mixed")
EVERY_SIZE = dataclasses.replace(MIXED, float8_format=jmp.Float8(smallest=0))
RULES = {
    "float8": EVERY_SIZE.scope("", "float8"),
    **{name: MIXED.scope("", jmp.get_format(name, smallest=0)) for name in NAMES[1:]},
}
ERROR = {"float8": 0.1, "float8_rows": 0.1, "int8": 0.02}
"""The largest relative error of a product, and half of that of a gradient."""
FORMATS = pytest.mark.parametrize("name", NAMES)

X = jax.random.normal(jax.random.key(0), (64, 32))
W = jax.random.normal(jax.random.key(1), (3, 32, 48))
SIZES = jnp.array([10, 30, 24])
OF_WEIGHTS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
"""A product that contracts the rows of each group."""


def autocast(fun, name):
    return jmp.autocast(fun, RULES[name])


def product(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


def loss_of(fun):
    def loss(x, w, *sizes):
        return jnp.sum(jnp.tanh(fun(x, w, *sizes).astype(jnp.float32) / 8) ** 2)

    return loss


def by_hand(x, w, sizes):
    """Returns each row times the weights of its group, and zeros for rows of none."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = [x[i] @ w[group] for i, group in enumerate(groups)]
    return jnp.stack([*rows, *[jnp.zeros(w.shape[-1])] * (len(x) - len(rows))])


@FORMATS
def test_products_and_gradients_are_close_to_float32s(name):
    low = autocast(product, name)
    error = ERROR[name]
    assert relative_error(low(X, W, SIZES), by_hand(X, W, SIZES)) < error
    found = jax.jit(jax.grad(loss_of(low), (0, 1)))(X, W, SIZES)
    expected = jax.grad(loss_of(by_hand), (0, 1))(X, W, np.array(SIZES))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == jnp.float32
        assert relative_error(mine, theirs) < 2 * error


@FORMATS
def test_all_three_products_are_in_8_bits(name):
    gradient = jax.grad(loss_of(autocast(product, name)), (0, 1))
    text = jax.jit(gradient).trace(X, W, SIZES).lower(lowering_platforms=("cuda",))
    lines = [line for line in text.as_text().splitlines() if "ragged_dot" in line]
    given = [line.rsplit(":", 1)[1].split("->")[0] for line in lines]
    kinds = Counter(
        tuple(kind for kind in ("f8E4M3FN", "f8E5M2", "i8") if kind + ">" in operands)
        for operands in given
    )
    expected = {
        "int8": {("i8",): 3},
        "float8": {("f8E4M3FN",): 1, ("f8E4M3FN", "f8E5M2"): 2},
        "float8_rows": {("f8E4M3FN",): 3},
    }
    assert kinds == expected[name]


@FORMATS
def test_explain_shows_the_format_and_counts_each_row_once(name):
    rows = jmp.explain(jax.grad(loss_of(product), (0, 1)), RULES[name])(X, W, SIZES)
    explained = jmp.explain(product, RULES[name])(X, W, SIZES)
    (row,) = explained.rows
    assert row.number_format == name
    assert row.code == f"{name}_though_read_in_float32"
    n_rows, contracted, columns = 64, 32, 48
    assert row.flops == 2 * n_rows * contracted * columns
    assert "ragged_dot_general" in str(rows)


def test_groups_that_are_products_of_a_batch_stay_low_with_a_reason():
    batch = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
    fun = lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, batch)
    x, w = jnp.ones((4, 16, 16)), jnp.ones((4, 16, 16))
    (row,) = jmp.explain(fun, RULES["int8"])(x, w, jnp.array([1, 3])).rows
    assert row.precision == "bfloat16"
    assert "its groups consist of whole products of a batch" in row.reason


@FORMATS
def test_a_product_that_contracts_rows_has_the_formats_too(name):
    """As in a gradient that is written by hand."""
    fun = lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, OF_WEIGHTS)
    y = jax.random.normal(jax.random.key(2), (64, 16))
    (row,) = jmp.explain(fun, RULES[name])(X, y, SIZES).rows
    assert row.number_format == name
    ends = np.cumsum(np.array(SIZES))
    starts = ends - np.array(SIZES)
    expected = jnp.stack([X[a:b].T @ y[a:b] for a, b in zip(starts, ends, strict=True)])
    assert relative_error(autocast(fun, name)(X, y, SIZES), expected) < ERROR[name]


@pytest.mark.parametrize(
    ("n_axes", "name"),
    mostly_slow(
        itertools.product((1, 3), NAMES),
        [(3, "float8"), (1, "float8_rows"), (3, "int8")],
    ),
)
def test_rows_may_have_axes_around_them(name, n_axes):
    """A batch axis, free axes on both sides of the rows, and axes in any order."""
    dims = lax.RaggedDotDimensionNumbers((((0,), (1,)), ((1,), (2,))), [3], [3])
    x = jax.random.normal(jax.random.key(3), (16, 2, 4, 20, 3))
    w = jax.random.normal(jax.random.key(4), (16, 16, 2, 3))
    sizes = jnp.array([[[7, 2, 11], [20, 0, 0], [1, 1, 1], [6, 7, 7]]] * 2)
    if n_axes == 1:
        sizes = sizes[0, 0]
    fun = lambda x, w, sizes: lax.ragged_dot_general(x, w, sizes, dims)
    low = autocast(fun, name)
    (row,) = jmp.explain(fun, RULES[name])(x, w, sizes).rows
    assert row.number_format == name
    assert relative_error(low(x, w, sizes), fun(x, w, sizes)) < ERROR[name]
    found = jax.grad(loss_of(low), (0, 1))(x, w, sizes)
    expected = jax.grad(loss_of(fun), (0, 1))(x, w, sizes)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 2 * ERROR[name]


@pytest.mark.parametrize("name", NAMES[1:])
def test_each_group_of_weights_has_scales_of_its_own(name):
    sizes = jnp.array([20, 20, 24])
    tiny = W * jnp.array([1.0, 1e-4, 1e4])[:, None, None]
    found = autocast(product, name)(X, tiny, sizes)
    expected = by_hand(X, tiny, np.array(sizes))
    for rows in (slice(0, 20), slice(20, 40), slice(40, 64)):
        assert relative_error(found[rows], expected[rows]) < ERROR[name]


AXES = st.sampled_from([0, 1, None])


@pytest.mark.slow
@FORMATS
@hypothesis.given(axes=st.tuples(AXES, AXES, st.sampled_from([0, 1, None])))
@hypothesis.settings(max_examples=12, deadline=None)
def test_a_mapped_product_is_that_of_each(name, axes):
    """JAX maps its own products of groups only if all operands are mapped over 0."""
    hypothesis.assume(any(axis is not None for axis in axes))
    low = autocast(product, name)
    gradient = jax.value_and_grad(loss_of(low), (0, 1))
    pairs = (X, X[::-1] / 2), (W, W / 4), (SIZES, jnp.array([5, 5, 50]))
    args = [
        one if axis is None else jnp.stack([one, other], axis)
        for (one, other), axis in zip(pairs, axes, strict=True)
    ]
    mapped = jax.vmap(gradient, axes)(*args)
    for i in range(2):
        each = [
            pair[0 if axis is None else i]
            for pair, axis in zip(pairs, axes, strict=True)
        ]
        alone = gradient(*each)
        for found, expected in zip(
            jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True
        ):
            assert relative_error(found[i], expected) < 1e-5

    def total(x, w):
        results = jax.vmap(loss_of(low), axes)(x, w, args[2])
        return jnp.sum(results)

    of_total = jax.grad(total, (0, 1))(*args[:2])
    for found, expected, axis in zip(of_total, mapped[1], axes[:2], strict=True):
        summed = (
            jnp.sum(expected, 0) if axis is None else jnp.moveaxis(expected, 0, axis)
        )
        # A contraction over the mapped axis rounds once for both.
        assert relative_error(found, summed) < ERROR[name] / 2


@FORMATS
def test_a_product_of_groups_can_be_mapped_twice(name):
    low = autocast(product, name)
    xs = jnp.stack([X, X / 2, X * 3])
    ws = jnp.stack([W, W / 4])
    sizes = jnp.stack([SIZES, jnp.array([5, 5, 50])])
    inner = jax.vmap(low, (None, 0, 0))
    found = jax.vmap(inner, (0, None, None))(xs, ws, sizes)
    for i in range(3):
        for j in range(2):
            expected = low(xs[i], ws[j], sizes[j])
            assert relative_error(found[i, j], expected) < 1e-5


@FORMATS
def test_cotangents_of_rows_of_no_group_are_not_read(name):
    sizes = jnp.array([10, 30, 4])
    low = autocast(product, name)
    _, pull = jax.vjp(lambda x, w: low(x, w, sizes), X, W)
    cotangent = jnp.ones((64, 48))
    found = pull(cotangent.at[44:].set(jnp.nan))
    expected = pull(cotangent.at[44:].set(0))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@FORMATS
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_row_of_no_group_is_not_read(name, bad):
    sizes = jnp.array([10, 30, 4])
    low = autocast(product, name)
    x = X.at[50:].set(bad)
    np.testing.assert_array_equal(low(x, W, sizes), low(X.at[50:].set(0), W, sizes))
    assert not low(x, W, sizes)[44:].any()
    of_x, of_w = jax.grad(loss_of(low), (0, 1))(x, W, sizes)
    assert not of_x[44:].any()
    assert jnp.isfinite(of_w).all()


@FORMATS
def test_infinities_and_nans_stay_in_the_result(name):
    low = autocast(product, name)
    assert not jnp.isfinite(low(X.at[3, 4].set(jnp.inf), W, SIZES)[3]).any()
    assert not jnp.isfinite(low(X, W.at[1].set(jnp.nan), SIZES)[10:40]).any()


@FORMATS
@pytest.mark.parametrize(
    ("n_rows", "sizes"), [(0, [0, 0, 0]), (16, [0, 0, 0]), (16, [0, 16, 0])]
)
def test_groups_may_be_empty(name, n_rows, sizes):
    x, sizes = X[:n_rows], jnp.array(sizes)
    low = autocast(product, name)
    found = low(x, W, sizes)
    assert found.shape == (n_rows, 48)
    assert relative_error(found, product(x, W, sizes)) < ERROR[name]
    gradients = jax.grad(loss_of(low), (0, 1))(x, W, sizes)
    assert all(jnp.isfinite(each).all() for each in gradients)
    assert not gradients[1][0].any()


@FORMATS
def test_forward_mode_works_over_the_gradient_and_reverse_mode_is_an_error(
    name,
):
    loss = loss_of(autocast(product, name))
    gradient = jax.grad(loss, 1)
    along = jnp.ones_like(X)
    _, moved = jax.jvp(lambda x: gradient(x, W, SIZES), (X,), (along,))
    _, exact = jax.jvp(
        lambda x: jax.grad(loss_of(product), 1)(x, W, SIZES), (X,), (along,)
    )
    assert relative_error(moved, exact) < 4 * ERROR[name]
    with pytest.raises(NotImplementedError, match="contracts its rows"):
        jax.grad(lambda x: jnp.sum(gradient(x, W, SIZES)))(X)


@FORMATS
def test_layers_of_experts_run_in_a_scan_with_remat(name):
    ws = jnp.stack([W[:, :, :32]] * 3) / 6

    def net(x, ws, sizes):
        def layer(x, w):
            return x + jnp.tanh(lax.ragged_dot(x, w, sizes)), None

        x, _ = lax.scan(jax.checkpoint(layer), x, ws)
        return x

    found = jax.grad(loss_of(autocast(net, name)), (0, 1))(X, ws, SIZES)
    expected = jax.grad(loss_of(net), (0, 1))(X, ws, SIZES)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 3 * ERROR[name]


@pytest.mark.parametrize("name", mostly_slow(NAMES, ("float8_rows", "int8")))
def test_compare_runs_products_of_groups_in_float32_too(name):
    report = jmp.compare(product, RULES[name])(X, W, SIZES)
    (row,) = [row for row in report.rows if row.op == "ragged_dot_general"]
    assert 1e-4 < row.error_out < ERROR[name]


@pytest.mark.targets
def test_on_an_h100_float8_takes_three_quarters_of_groups_in_16_bits():
    if missing("h100"):
        pytest.skip(missing("h100"))
    low, mixed = (
        experts.measure_mixture("h100", 256, 1024, f"groups, {name}")
        for name in ("float8", "mixed")
    )
    assert low.cost < 0.75 * mixed.cost


@pytest.mark.targets
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@FORMATS
def test_all_products_of_groups_compile_for_tpus(chip, name):
    """Its kernels for groups reject some precisions and dtypes (jax 0.10)."""
    if missing(chip):
        pytest.skip(missing(chip))
    assert experts.measure_mixture(chip, 32, 128, f"groups, {name}").kernels


@FORMATS
def test_in_shard_map_each_device_has_groups_of_its_own(name):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(5), (2 * 64, 32))
    sizes = jnp.concatenate([SIZES, jnp.array([50, 0, 7])])
    gradient = jax.value_and_grad(loss_of(autocast(product, name)), (0, 1))

    def on_device(x, w, sizes):
        loss, (of_x, of_w) = gradient(x, w, sizes)
        return loss[None], of_x, of_w

    spec = jax.P("d")
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(spec, jax.P(), spec),
        out_specs=(spec, spec, jax.P()),
    )
    losses, of_x, of_w = jax.jit(mapped)(x, W, sizes)
    alone = [
        gradient(x[64 * i : 64 * (i + 1)], W, sizes[3 * i : 3 * (i + 1)])
        for i in range(2)
    ]
    assert relative_error(losses, jnp.stack([loss for loss, _ in alone])) < 1e-5
    assert relative_error(of_x, jnp.concatenate([g for _, (g, _) in alone])) < 1e-5
    assert relative_error(of_w, sum(g for _, (_, g) in alone)) < 1e-5
