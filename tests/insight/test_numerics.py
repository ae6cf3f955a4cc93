"""Numbers that overflow, vanish or stop being finite, located by name and line."""

import dataclasses
import functools
import pathlib

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import params_of
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import BLOCK, BLOCK_PARAMS, LAYERS, PROGRAMS, W, X, each_program

import jmp_lite as jmp
from jmp_lite.casting.quantize import scale_for
from jmp_lite.insight.statistics import (
    Count,
    added,
    counted,
    counted_together,
    fetch_counts,
)
from jmp_lite.numerics import nonfinite_report, numerics_report, suggest_loss_scale

F8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]
HERE = pathlib.Path(__file__)


def line_with(text):
    lines = HERE.read_text().splitlines()
    (found,) = (i for i, line in enumerate(lines, 1) if line.endswith(text))
    return f"{HERE.name}:{found} "


# ------------------------------------------------------------------------- reports


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *F8])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_counts_are_those_of_an_actual_cast(dtype, wrap):
    """A cast by NumPy, which rounds to the nearest and flushes nothing.

    To 8 bits it is a cast of what is divided by the scale.
    """
    dtype = np.dtype(dtype)
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(0)
    ends = [float(info.max), float(info.tiny), float(info.smallest_subnormal)]
    near = [end * factor for end in ends for factor in (0.49, 0.5, 0.51, 0.999, 1, 1.1)]
    low, high = (max(-30, np.log2(ends[2]) - 3), min(30, np.log2(ends[0]) + 3))
    near = [size for size in near if size < 3.4e38]
    sizes = np.float32([*near, 0.0, *(2.0 ** rng.uniform(low, high, 5000))])
    sizes = sizes[(sizes == 0) | (sizes > 1e-37)]  # CPUs flush what is smaller.
    x = sizes * rng.choice([-1, 1], sizes.size).astype(np.float32)
    scale = 1 if dtype.itemsize > 1 else np.asarray(scale_for(jnp.abs(x).max(), dtype))
    with np.errstate(over="ignore"):
        cast = np.abs((x / scale).astype(dtype).astype(np.float32))
    (row,) = wrap(functools.partial(numerics_report, dtype=dtype))(x).rows
    total = x.size
    assert round(row.overflow * total) == np.sum(~np.isfinite(cast))
    assert round(row.underflow * total) == np.sum((cast == 0) & (x != 0))
    is_small = (cast > 0) & (cast < np.float32(info.tiny))
    assert round(row.subnormal * total) == np.sum(is_small)
    assert row.max_abs == np.abs(x).max()
    assert row.min_abs == np.abs(x[x != 0]).min()
    assert (row.nan, row.inf, row.elements) == (0, 0, total)


@pytest.mark.parametrize("bits", [np.float32, np.float64, jnp.float32, jnp.bfloat16])
def test_float8_is_counted_under_each_array_s_own_scale(bits):
    numbers = np.array([1.0, 0.25, -0.75, 2.0**-20])
    array = jnp.asarray(numbers, bits) if bits in (jnp.bfloat16,) else bits(numbers)
    tree = {"a": array, "b": array * bits(2.0**60), "c": array * bits(2.0**-60)}
    report = numerics_report(tree, "float8_e4m3fn")
    for row in report.rows:
        assert (row.overflow, row.underflow, row.subnormal) == (0, 0.25, 0)
    assert [row.max_abs for row in report.rows] == [1, 2.0**60, 2.0**-60]
    assert "underflow in float8_e4m3fn, scaled" in str(report)


def test_infinities_and_nans_do_not_count_for_a_scale():
    array = jnp.array([jnp.inf, jnp.nan, 1.0, 0.5])
    (row,) = numerics_report(array, "float8_e5m2").rows
    assert (row.inf, row.nan, row.overflow, row.underflow) == (1, 1, 0, 0)


REPORTS_IN_FLOAT8 = {
    dtype: jax.jit(functools.partial(numerics_report, dtype=dtype)) for dtype in F8
}
FLOATS = st.floats(width=32, allow_subnormal=False)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.lists(FLOATS, min_size=4, max_size=4), st.sampled_from(F8))
def test_float8_is_counted_the_same_on_the_host_and_in_the_graph(values, dtype):
    array = np.float32(values)
    with np.errstate(invalid="ignore"):
        on_host = [array, array.astype(np.float64)]
    in_graph = REPORTS_IN_FLOAT8[dtype](jnp.asarray(array)).rows
    for each in on_host:
        (row,) = numerics_report(each, dtype).rows
        assert (dataclasses.replace(row, dtype="float32"),) == in_graph
        assert row.overflow == 0


def test_numpy_arrays_are_counted_in_float8_under_jit():
    arrays = {"a": np.array([1.0, 2.0**-20]), "b": np.float32([0.0, 2.0**-20])}
    report = lambda: numerics_report(arrays, "float8_e4m3fn")
    a, b = jax.jit(report)().rows
    assert (a.dtype, b.dtype) == ("float64", "float32")
    assert (a.underflow, b.underflow) == (0.5, 0)
    assert (a, b) == report().rows


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_number_beyond_float32_overflows_under_the_largest_scale(in_graph):
    array = np.array([1e300, -1.0, 1e38, 0.0])
    with jax.enable_x64(in_graph):
        given = jnp.asarray(array) if in_graph else array
        (row,) = numerics_report(given, "float8_e4m3fn").rows
    assert (row.dtype, row.max_abs) == ("float64", 1e300)
    assert (row.overflow, row.underflow, row.subnormal) == (0.25, 0.25, 0)


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_float8_array_is_counted_without_a_scale(dtype, on_host):
    array = jnp.array([2.0**-8, 1.0, 4.0], jnp.float8_e4m3fn)
    report = numerics_report(np.asarray(array) if on_host else array, dtype)
    (row,) = report.rows
    assert (row.max_abs, row.subnormal) == (4, pytest.approx(1 / 3))
    assert ("scaled" in str(report)) == (dtype is not None)


def test_watch_counts_float8_op_by_op():
    def fun(x):
        return jnp.sum(x * 2.0**40) + jnp.sum(x * 2.0**-40)

    x = jnp.array([1.0, 2.0**-25])
    _, stats = jax.jit(jmp.watch(fun, "float8_e4m3fn"))(x)
    rows = [row for row in stats.rows if row.op == "mul"]
    assert [row.underflow for row in rows] == [0.5, 0.5]
    assert "underflow in float8_e4m3fn, scaled" in str(stats)


def test_a_report_names_the_leaves_and_counts_what_is_not_finite():
    tree = {
        "w": np.float32([[np.nan, np.inf], [-np.inf, 2.0]]),
        "low": jnp.full(3, 0.5, jnp.bfloat16),
        "n": jnp.arange(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 2)),
        "none": None,
    }
    report = jax.jit(numerics_report)(tree)
    empty, low, w = report.rows
    assert (empty.path, empty.elements, empty.overflow) == ("['empty']", 0, 0.0)
    assert (low.path, low.dtype, low.max_abs, low.min_abs) == (
        *("['low']", "bfloat16"),
        *(0.5, 0.5),
    )
    assert (w.nan, w.inf, w.max_abs, w.elements) == (1, 2, 2.0, 4)
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["elements", "dtype", "nan", "inf"]
    assert len(lines) == 4
    assert "underflow in float16" in str(numerics_report(tree, "float16"))
    assert numerics_report({}).rows == ()
    (titles,) = str(numerics_report({})).splitlines()
    assert titles.split()[:4] == ["elements", "dtype", "nan", "inf"]
    with pytest.raises(ValueError, match=r"Unknown dtype 'flaot16'.*'float16'"):
        numerics_report(tree, "flaot16")


def test_nonfinite_report_names_the_leaves_that_are_not_finite():
    tree = {"a": jnp.ones(2), "b": [jnp.float32([1, np.nan, -np.inf])]}
    report = nonfinite_report(tree)
    assert [row.path for row in report] == ["['b'][0]"]
    assert str(report) == "['b'][0]: 1 NaN, 1 infinite of 3"
    assert [row.inf for row in nonfinite_report([jnp.ones(2), jnp.inf])] == [1]
    assert not nonfinite_report({"a": jnp.ones(2)})
    assert str(nonfinite_report(())) == "all finite"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.float8_e5m2])
def test_a_suggested_scale_keeps_its_headroom_and_rescues_the_share_that_it_reports(
    dtype,
):
    rng = np.random.default_rng(0)
    sizes = np.float32(2.0 ** rng.uniform(-30, -8, 4000))
    grads = {"a": jnp.asarray(sizes[:1000]), "b": sizes[1000:], "n": jnp.arange(3)}
    scale, lost, rescued = suggest_loss_scale(grads, dtype)
    assert np.log2(scale) % 1 == 0
    largest = float(jnp.finfo(dtype).max)
    if scale < 2**24:
        assert largest / 33 < scale * sizes.max() <= 1.2 * largest / 16
    assert (scale == 2**24) == (dtype == "bfloat16")
    zero = sizes.astype(np.dtype(dtype)).astype(np.float32) == 0
    assert lost == pytest.approx(zero.mean())
    if zero.any():
        with np.errstate(over="ignore"):
            scaled = (sizes[zero] * np.float32(scale)).astype(np.dtype(dtype))
        assert rescued == pytest.approx((scaled != 0).mean())
    with pytest.raises(
        ValueError, match="Expected a gradient that is finite and nonzero"
    ):
        suggest_loss_scale({"a": jnp.zeros(3), "b": jnp.full(2, jnp.nan)})


def test_complex_numbers_and_python_floats_count_as_they_do_for_all_finite():
    bad = jnp.array([1 + 1j * jnp.nan, -jnp.inf + 1j, 3 - 4j])
    for tree in ({"z": bad}, {"loss": float("nan")}, {"z": np.complex64(1j * np.inf)}):
        assert not jmp.all_finite(tree)
        assert nonfinite_report(tree)
    fine = {"z": bad[2:], "loss": 2.0, "n": 3, "yes": True}
    assert jmp.all_finite(fine)
    assert not nonfinite_report(fine)
    (row,) = numerics_report(bad, "float16").rows
    assert (row.nan, row.inf, row.max_abs, row.elements) == (1, 1, 4.0, 3)
    (row,) = numerics_report([1e9], "float16").rows
    assert (row.dtype, row.overflow) == ("float64", 1.0)


@pytest.mark.parametrize("wrap", [lambda f: f(), lambda f: jax.jit(f)()])
def test_numpy_arrays_are_counted_on_the_host_and_lose_nothing(wrap):
    tree = {
        "a": np.array([1e300, 1e-310, 0.0]),
        "b": jnp.ones(2),
        "c": np.float32([1e-39, 1e-41]),
    }
    assert not nonfinite_report(tree)
    a, b, c = wrap(lambda: numerics_report(tree, "bfloat16")).rows
    assert (a.inf, a.max_abs, a.min_abs) == (0, 1e300, 1e-310)
    assert (a.overflow, a.underflow) == (1 / 3, 1 / 3)
    assert (b.max_abs, b.elements, b.dtype) == (1.0, 2, "float32")
    assert (c.subnormal, c.underflow) == (0.5, 0.5), "no number is flushed"


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_subnormal_numbers_are_counted_alike_on_the_host_and_in_the_graph(dtype, wrap):
    """A CPU takes them for zeros in a comparison of floats."""
    tiny = float(jnp.finfo(dtype).tiny)
    small = [tiny / 4, tiny / 2, -tiny / 4]
    x = np.array([*small, 0.0, -0.0, tiny, 1.0, np.inf, np.nan]).astype(dtype)
    report = numerics_report({"x": wrap(x), "more": [wrap(x[:3]), wrap(x[3:])]})
    rows = {row.path: row for row in report.rows}
    assert [row.subnormal * row.elements for row in rows.values()] == [3, 0, 3]
    (row,) = (row for path, row in rows.items() if "['x']" in path)
    assert (row.nan, row.inf, row.max_abs, row.min_abs) == (1, 1, 1.0, tiny / 4)
    assert (row.overflow, row.underflow) == (0, 0)


def test_sizes_stay_in_float64_where_jax_has_it():
    with jax.enable_x64(True):
        x = jnp.array([1e300, 1e-300])
        for report in (
            numerics_report(x),
            jax.jit(jmp.watch(jnp.negative))(x)[1],
        ):
            (row,) = report.rows
            assert (row.inf, row.max_abs, row.min_abs) == (0, 1e300, 1e-300)
        mixed = {"wide": x, "low": jnp.ones(2, jnp.bfloat16)}
        low, wide = numerics_report(mixed, "float32").rows
        assert (low.max_abs, wide.max_abs, wide.overflow) == (1.0, 1e300, 0.5)


@pytest.mark.parametrize("dtype", ["float16", *F8])
def test_small_arrays_have_the_same_counts_together_and_alone(dtype):
    sizes = 10.0 ** jax.random.uniform(jax.random.key(0), (999,), minval=-12, maxval=6)
    arrays = [
        sizes,
        sizes.astype(jnp.bfloat16).reshape(27, 37),
        lax.complex(sizes, 2 * sizes)[:700],
        jnp.minimum(sizes[:600], 1).astype(F8[0]),  # Its scale is not 1.
        sizes.at[3].set(jnp.nan).at[5].set(jnp.inf),
        jnp.zeros((0, 3)),
        jnp.ones(()),
        jnp.array(-jnp.inf),
    ]
    together = jax.jit(lambda xs: counted_together(xs, dtype))(arrays)
    alone = jax.jit(lambda xs: [counted(x, dtype) for x in xs])(arrays)
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    assert fetch_counts(together[4])["nan"].item() == 1


def test_small_results_are_counted_in_one_kernel_and_large_ones_alone():
    def reductions(n):
        def fun(x):
            return jnp.tanh(x * 2) + x

        jaxpr = jax.make_jaxpr(jmp.watch(fun))(jnp.ones(n)).jaxpr
        return sum(
            eqn.primitive.name == "reduce" and len(eqn.invars) > 2 for eqn in jaxpr.eqns
        )

    assert (reductions(1000), reductions(2**19)) == (1, 3)


def test_counts_are_whole_numbers_however_large():
    n = 2**24 + 3
    (row,) = numerics_report(jnp.full(n, jnp.inf)).rows
    assert (row.inf, row.elements) == (n, n)
    (row,) = numerics_report(jnp.full(n, 1e9), "float16").rows
    assert row.overflow == 1.0
    count = lambda number: {"elements": Count.split(number)}
    total = jax.jit(added)(jax.jit(added)(count(2**32 - 1), count(3)), count(2**40))
    assert fetch_counts(total)["elements"] == [2**40 + 2**32 + 2]
    huge = jax.ShapeDtypeStruct((2**17, 2**16), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: numerics_report(x).counts)(huge)
    summed = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce"]
    assert {eqn.invars[0].aval.size for eqn in summed} == {2**31}


def test_reports_that_vmap_or_scan_has_stacked_are_shown_as_one():
    x = jnp.float32([[1, jnp.nan, 3], [0.5, 1e9, jnp.inf]])
    report = functools.partial(numerics_report, dtype="float16")
    expected = report(x).rows
    assert jax.vmap(report)(x).rows == expected
    scanned = lax.scan(lambda c, row: (c, report(row)), 0, x)[1]
    assert scanned.rows == expected
    assert str(scanned) == str(report(x))
    watched = jmp.watch(jnp.exp, "float16")
    for stacked in (
        lambda x: jax.vmap(watched)(x)[1],
        lambda x: jax.vmap(jax.vmap(watched))(x)[1],
        lambda x: lax.scan(lambda c, each: (c, watched(each)[1]), 0, x)[1],
    ):
        stats = jax.jit(stacked)(x)
        (row,) = stats.rows
        (alone,) = watched(x)[1].rows
        # The op is the first in its lane, and is called from another line.
        lane = {"source": row.source, "is_first": row.is_first}
        assert row == dataclasses.replace(alone, **lane)
        assert "exp" in str(stats)
    breaks = jax.vmap(watched)(jnp.float32([[1.0], [1e3]]))[1]
    assert jmp.first_nonfinite(breaks).inf == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: numerics_report(x).rows,
        lambda x: str(numerics_report(x)),
        nonfinite_report,
        lambda x: jmp.first_nonfinite(jmp.watch(jnp.exp)(x)[1]),
        suggest_loss_scale,
    ],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_rows_of_a_traced_report_are_an_error_with_a_remedy(ask, transform):
    with pytest.raises(TypeError, match=r"got tracers.*return the arrays"):
        transform(ask)(X)


def test_arguments_that_cannot_be_counted_are_errors_that_name_them():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    for ask in (
        numerics_report,
        nonfinite_report,
        suggest_loss_scale,
    ):
        with pytest.raises(TypeError, match=r"Expected arrays, got ShapeDtypeStruct"):
            ask({"w": shape})
    for headroom in (0, -1, 0.5, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=f"at least 1 for headroom, got {headroom}"
        ):
            suggest_loss_scale(X, headroom=headroom)
    assert suggest_loss_scale(X, "float64").loss_scale == 2**24
    assert suggest_loss_scale(np.array([5e-324])).loss_scale == 2**24
    saturating = "float4_e2m1fn"
    for ask in (numerics_report, suggest_loss_scale):
        with pytest.raises(ValueError, match="float4_e2m1fn has neither infinities"):
            ask(X, saturating)
    with pytest.raises(ValueError, match="float4_e2m1fn has neither infinities"):
        jmp.watch(jnp.tanh, saturating)
    (row,) = numerics_report(X.astype(saturating)).rows
    assert (row.overflow, row.underflow, row.elements) == (0.0, 0.0, 32)
    assert str(nonfinite_report(jnp.nan)) == "the array: 1 NaN, 0 infinite of 1"
    with pytest.raises(TypeError, match=r"Got an nnx object, a Linear, as an argument"):
        jmp.watch(lambda m, x: m(x))(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X)


# --------------------------------------------------------------------------- watch


# One program for each kind of higher-order primitive.
WATCHED = [
    *("mlp", "integers_and_booleans", "nested_jits", "rematerialized", "switch"),
    *("scanned_layers_with_an_auxiliary_loss", "for_loop", "reversed_recurrence"),
    *("custom_jvp", "custom_vjp_in_a_scan", "sharded", "a linen block"),
]


@each_program
def test_a_watched_function_keeps_its_types(name):
    fun, args = PROGRAMS[name]
    assert jax.eval_shape(jmp.watch(fun), *args)[0] == jax.eval_shape(fun, *args)


@pytest.mark.parametrize("name", WATCHED)
def test_a_watched_function_keeps_its_results(name):
    fun, args = PROGRAMS[name]
    expected = jax.jit(fun)(*args)
    actual, stats = jax.jit(jmp.watch(fun))(*args)
    # Not bit by bit: XLA fuses other ops where all are read.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        *(actual, expected),
    )
    floats = [
        eqn
        for eqn in jax.make_jaxpr(fun)(*args).eqns
        if any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.outvars)
    ]
    assert bool(stats.rows) == bool(floats)


def block_loss(params, x):
    return jnp.mean(BLOCK.apply(params, x) ** 2)


def test_a_watched_function_keeps_its_gradient_and_a_gradient_can_be_watched():
    loss = lambda params, x: jmp.watch(block_loss)(params, x)[0]
    actual, expected = (
        jax.jit(jax.grad(f))(BLOCK_PARAMS, X) for f in (loss, block_loss)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *(actual, expected),
    )
    of_grad, forward = (
        jax.eval_shape(jmp.watch(f), BLOCK_PARAMS, X)
        for f in (jax.grad(block_loss), block_loss)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(of_grad[0], expected)
    dots = [
        sum(op.op == "dot_general" for op in stats.ops)
        for _, stats in (forward, of_grad)
    ]
    assert dots[1] > 2 * dots[0]
    watched = jax.jit(jmp.watch(jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))))
    found, stats = watched(W)
    np.testing.assert_allclose(
        found, jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W), rtol=1e-5, atol=1e-6
    )
    assert sum(row.op == "dot_general" for row in stats.rows) == 2


def test_a_watched_function_keeps_its_derivative_rule():
    @jax.custom_vjp
    def straight_through(x):
        return jnp.round(jnp.exp(x))

    straight_through.defvjp(
        lambda x: (straight_through(x), None), lambda _, g: (3 * g,)
    )
    fun = lambda x: jnp.sum(straight_through(x))
    watched = lambda x: jmp.watch(fun)(x)[0]
    np.testing.assert_array_equal(jax.grad(watched)(X), jnp.full_like(X, 3.0))
    ops = {row.op for row in jmp.watch(fun)(X)[1].rows}
    assert "exp" in ops, "what is inside is seen"


def test_an_op_that_is_run_again_to_be_counted_needs_no_derivative():
    @jax.custom_vjp
    def fun(x):
        return jax.pure_callback(np.sin, jax.typeof(x), x)

    fun.defvjp(lambda x: (fun(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))
    watched = lambda x: jnp.sum(jmp.watch(fun)(x)[0])
    chex.assert_trees_all_close(jax.grad(watched)(X), jnp.cos(X))


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_effects_of_a_watched_function_happen_as_often_as_without_watch(kind):
    seen = []

    @kind
    def noisy(x):
        jax.debug.callback(seen.append, x)
        return jnp.exp(x)

    if kind is jax.custom_jvp:
        noisy.defjvps(lambda g, out, x: 3 * g)
    else:
        noisy.defvjp(lambda x: (jnp.exp(x), None), lambda _, g: (3 * g,))
    for run in (jmp.watch(noisy), jax.jit(jmp.watch(noisy))):
        _, stats = run(jnp.float32(1))
        jax.effects_barrier()
        assert len(seen) == 1
        assert [row.elements for row in stats.rows] == [1]
        seen.clear()
    assert jax.grad(lambda x: jmp.watch(noisy)(x)[0])(1.0) == 3


def bytes_kept(fun, *args):
    """Returns the bytes that are kept for the backward pass."""
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(None, marks=pytest.mark.slow),
        jax.checkpoint_policies.dots_saveable,
    ],
)
def test_a_watched_checkpoint_keeps_its_policy(policy):
    def loss(layers, x, wrap):
        block = wrap(lambda h, w: jnp.sin(jnp.sin(h @ w)))
        return lax.scan(lambda h, w: (block(h, w), None), x, layers)[0].sum()

    remat = functools.partial(jax.checkpoint, policy=policy)
    plain, light = (functools.partial(loss, wrap=w) for w in (lambda f: f, remat))
    watched = lambda *args: jmp.watch(light)(*args)[0]
    few = bytes_kept(light, LAYERS, X)
    assert bytes_kept(watched, LAYERS, X) == few < bytes_kept(plain, LAYERS, X)
    rows = jmp.watch(light)(LAYERS, X)[1].rows
    assert [row.op for row in rows] == ["dot_general", "sin", "sin", "reduce_sum"]
    assert [row.elements for row in rows] == [96, 96, 96, 1]
    found, expected = jax.grad(watched)(LAYERS, X), jax.grad(light)(LAYERS, X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    jaxpr = jax.make_jaxpr(jmp.watch(jax.checkpoint(jnp.sin, prevent_cse=False)))(X)
    (params,) = (p for p in map(params_of, jaxpr.eqns) if "policy" in p)
    assert params["prevent_cse"] is False


def test_a_scan_stays_unrolled():
    fun = lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x, unroll=2)
    for f in (fun, jmp.watch(fun)):
        (eqn,) = (e for e in jax.make_jaxpr(f)(X).eqns if e.primitive.name == "scan")
        assert eqn.params["unroll"] == 2


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        *((jax.jit, name) for name in ("scan", "while", "cond", "checkpoint")),
        # Op by op, each compiled, for ten seconds.
        pytest.param(lambda f: f, "scan", marks=pytest.mark.slow, id="eager"),
    ],
)
def test_watch_works_inside_of_shard_map(wrap, name):
    of_name = {
        "scan": lambda x: lax.scan(lambda c, y: (c + jnp.sin(y), c), x[0], x)[0],
        "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, jnp.exp, x),
        "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.exp, lambda x: x, x),
        "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    }
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )

    def watched(x):
        out, stats = jmp.watch(of_name[name])(x)
        return out, jax.tree.map(lambda counts: counts[None], stats)

    out, stats = wrap(mapped(watched))(X)
    np.testing.assert_allclose(out, wrap(mapped(of_name[name]))(X), rtol=1e-6)
    _, alone = wrap(jmp.watch(of_name[name]))(X)
    counted = [{(row.op, row.elements) for row in s.rows} for s in (alone, stats)]
    assert counted[0] <= counted[1], "there are casts of types too"


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_nan_on_any_device_is_reported(check_vma):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jnp.stack([jnp.ones(4), jnp.array([-1.0, 2.0, 3.0, 4.0])])

    def both(x):
        out, stats = jmp.watch(jnp.log)(x)
        return (
            out,
            stats,
            numerics_report({"y": out}),
            numerics_report(x[0, 0]),
        )

    mapped = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P("data"), P(), P(), P()),
        check_vma=check_vma,
    )
    _, stats, report, scalar = jax.jit(mapped)(x)
    row = jmp.first_nonfinite(stats)
    assert (row.op, row.nan, row.elements) == ("log", 1, x.size)
    (row,) = report.rows
    assert (row.nan, row.elements) == (1, x.size)
    assert row.max_abs == np.log(np.float32(4))
    assert scalar.rows[0].elements == 2


def test_only_the_branch_of_the_platform_is_compiled():
    fun = lambda x: lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)
    for f in (fun, jmp.watch(fun)):
        text = jax.jit(f).lower(X).as_text()
        assert "stablehlo.sine" in text
        assert "stablehlo.cosine" not in text
    out, stats = jmp.watch(fun)(X)
    np.testing.assert_allclose(out, jnp.sin(X), rtol=1e-6)
    assert [row.op for row in stats.rows] == ["sin"]


def test_a_loop_whose_lanes_end_at_different_steps_is_counted_by_its_results():
    loop = lambda x: lax.while_loop(lambda c: c < 100, lambda c: c * 2, x)
    starts = jnp.float32([1, 30, 200])
    expected = jnp.float32([128, 120, 200])
    out, stats = jmp.watch(jax.vmap(loop))(starts)
    np.testing.assert_array_equal(out, expected)
    assert [(row.op, row.elements) for row in stats.rows] == [("while", 3)]
    out, stats = jax.vmap(jmp.watch(loop))(starts)
    np.testing.assert_array_equal(out, expected)
    steps = 7 + 2  # From 1 and from 30; 200 is past the end at once.
    assert [(row.op, row.elements) for row in stats.rows] == [("mul", steps)]


def test_the_condition_of_a_loop_is_watched_too():
    fun = lambda x: lax.while_loop(lambda c: jnp.log(c) < 3, lambda c: c * 2, x)
    for wrap in (lambda f: f, jax.jit):
        out, stats = wrap(jmp.watch(fun))(jnp.float32(1))
        assert out == 32
        counted = {row.op: row.elements for row in stats.rows}
        assert counted == {"log": 6, "mul": 5}
    assert jmp.first_nonfinite(jmp.watch(fun)(jnp.float32(0.0) + 1)[1]) is None
    assert jmp.first_nonfinite(jmp.watch(fun)(jnp.float32(-1))[1]).op == "log"


def test_nested_branches_are_traced_once_for_each_level():
    traced = []
    probe = Primitive("probe")
    probe.def_abstract_eval(lambda x: traced.append(1) or x)

    def nested(depth):
        if not depth:
            return probe.bind
        inner = nested(depth - 1)
        return lambda x: lax.cond(x[0, 0] > depth, inner, lambda x: x * 2, x)

    times = []
    for depth in (1, 5):
        traced.clear()
        jax.make_jaxpr(jmp.watch(nested(depth)), return_shape=True)(X)
        times.append(len(traced))
    assert times[1] - times[0] <= 4


def test_loops_are_counted_over_all_trips():
    def fun(x, stack, n):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        h = lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, h)
        )[1]
        return lax.cond(n > 100, jnp.cos, jnp.sqrt, h)

    n = 5
    _, stats = jax.jit(jmp.watch(fun))(X, LAYERS, n)
    rows = {row.op: row for row in stats.rows}
    assert rows["tanh"].elements == len(LAYERS) * X.size
    assert rows["sin"].elements == n * X.size
    assert "cos" not in rows, "it was not run"
    assert rows["sqrt"].elements == 32
    assert rows["sqrt"].is_first, "of negative numbers"
    (line,) = (line for line in str(stats).splitlines() if " sin " in line)
    assert line.split()[:2] == ["160", "sin"]


def test_the_first_op_that_stops_being_finite_is_named_with_its_line():
    def model(x):
        with jax.named_scope("good"):
            h = jnp.tanh(x @ W)
        with jax.named_scope("bad"):
            h = jnp.exp(100 * h + 50)  # It overflows here.
        return jnp.mean(h - h) + jnp.sum(h)

    for wrap in (lambda f: f, jax.jit):
        loss, stats = wrap(jmp.watch(model))(X)
        assert not jnp.isfinite(loss)
        first = jmp.first_nonfinite(stats)
        assert (first.op, first.scope) == ("exp", "bad")
        assert first.inf > 0
        assert line_with("# It overflows here.") in first.source
    assert jmp.first_nonfinite(jmp.watch(jnp.tanh)(X)[1]) is None
    # Infinite from the start: nothing in the function is to blame.
    bad = X.at[0, 0].set(jnp.inf)
    assert jmp.first_nonfinite(jmp.watch(lambda x: 2 * x + 1)(bad)[1]) is None


MASK = jnp.tril(jnp.ones((4, 8), bool))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.nn.softmax(jnp.where(MASK, x, -jnp.inf)),
        lambda x: jnp.where(MASK, x, jnp.full_like(x, -jnp.inf)).max(),
        lambda x: jnp.where(MASK, x, jnp.nan)[0, 0],
        lambda x: jax.nn.dot_product_attention(*3 * [x[None, :, None]], is_causal=True),
        lambda x: jnp.clip(x, -jnp.inf, 1),
        lambda x: x + jnp.array([0, -jnp.inf] * 4),
        lambda x: jnp.max(x, initial=-jnp.inf),
        *(jnp.std, jnp.median),
    ],
)
def test_a_mask_of_infinities_or_nans_is_not_to_blame(fun):
    def broken(x):
        value_and_grad = jax.value_and_grad(lambda x: jnp.sum(fun(x)))(x)
        return value_and_grad, jnp.log(x - 100)  # Of negative numbers.

    first = jmp.first_nonfinite(jax.jit(jmp.watch(broken))(X)[1])
    assert (first.op, first.nan) == ("log", 32)
    assert line_with("# Of negative numbers.") in first.source


def test_a_complex_result_that_breaks_is_found():
    fun = lambda x: jnp.exp(x.astype(jnp.complex64)).real
    _, stats = jmp.watch(fun)(1000 + jnp.abs(X))
    assert jmp.first_nonfinite(stats).op == "exp"


def test_an_op_inside_of_jax_is_shown_with_the_line_that_calls_it():
    def fun(x):
        return jnp.std(x * 1e19)  # The squares overflow.

    first = jmp.first_nonfinite(jax.jit(jmp.watch(fun))(X)[1])
    assert first.scope == "_std/_var"
    assert line_with("# The squares overflow.") in first.source


def test_a_sample_of_each_result_is_counted_on_request():
    x = 10.0 ** jax.random.uniform(jax.random.key(0), (512, 64), minval=-9, maxval=6)

    def fun(x):
        return lax.scan(lambda c, x: (c, x * 3), 0, jnp.stack([x, x]))[1]

    rows = [
        jax.jit(jmp.watch(fun, elements=n))(x)[1].rows[-1] for n in (None, 2**12, 1)
    ]
    every, few, one = rows
    assert (every.elements, few.elements, one.elements) == (2 * x.size, 2 * 2**12, 2)
    for share in ("overflow", "underflow", "subnormal"):
        assert getattr(few, share) == pytest.approx(getattr(every, share), abs=0.03)
        assert getattr(few, share) != getattr(every, share)
    for elements in (0, 2.5, True, "all"):
        with pytest.raises(ValueError, match=f"for elements, got {elements!r}"):
            jmp.watch(fun, elements=elements)


def test_the_step_of_a_loop_that_overflows_is_found():
    grow = lambda x, _: (x * 1e10, jnp.sum(x))
    _, stats = jax.jit(jmp.watch(lambda x: lax.scan(grow, x, length=9)))(X)
    first = jmp.first_nonfinite(stats)
    assert first.op == "mul"
    assert first.inf > 0


def test_gradients_that_would_vanish_in_float16_are_found_by_layer():
    def loss(params, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ params[0]) * 1e-9  # Its gradients vanish in float16.
        with jax.named_scope("second"):
            return jnp.sum(h @ params[1]) + jnp.sum(jnp.tanh(x @ params[1]))

    _, stats = jax.jit(jmp.watch(jax.grad(loss), "float16"))((W, W), X)
    lost = {
        row.scope.split("/")[-1]
        for row in stats.rows
        if row.op == "dot_general" and row.underflow > 0.5 and row.max_abs > 0
    }
    assert "first" in lost
    grads = jax.grad(loss)((W, W), X)
    first, second = numerics_report(grads, "float16").rows
    assert first.underflow > 0.5 > second.underflow
    assert suggest_loss_scale(grads).rescued > 0


def test_watch_composes_with_vmap_and_bad_arguments_are_errors():
    values, stats = jax.vmap(jmp.watch(jnp.tanh))(X)
    np.testing.assert_array_equal(values, jnp.tanh(X))
    assert stats.counts["max_abs"].shape == (4, 1)
    out, stats = jmp.watch(lambda n, name: n + len(name))(3, "abc")
    assert (int(out), stats.rows) == (6, ())
    assert jmp.watch(lambda: None)()[0] is None
    with pytest.raises(TypeError, match="Expected a function"):
        jmp.watch(3)
    with pytest.raises(ValueError, match="Unknown dtype"):
        jmp.watch(jnp.tanh, "int8")
    with pytest.raises(TypeError, match="second result of a watched function, got int"):
        jmp.first_nonfinite(3)
    half = jmp.autocast(jnp.dot, compute_dtype="float16")
    low, stats = jmp.watch(half, "float16")(X, W)
    assert low.dtype == np.float32
    assert {row.op for row in stats.rows} == {"convert_element_type", "dot_general"}


def test_ops_that_only_move_numbers_are_not_counted():
    """A cast to fewer exponents can make an infinity."""
    fun = lambda x, w: (x.T.reshape(-1, 4) @ w[:4])[None]
    _, stats = jmp.watch(jmp.autocast(fun))(X, W)
    assert [row.op for row in stats.rows] == ["slice", "dot_general"]
    _, stats = jmp.watch(lambda x: 2 * x.astype(jnp.float16))(jnp.float32([1e5]))
    assert [(row.op, row.inf, row.is_first) for row in stats.rows] == [
        ("convert_element_type", 1, True),
        ("mul", 1, False),
    ]


def test_ops_that_autocast_adds_have_the_scopes_of_the_user():
    def fun(x):
        with jax.named_scope("block"):
            return jnp.tanh(x @ x)

    _, stats = jmp.watch(jmp.autocast(fun))(jnp.ones((4, 4)))
    assert {row.scope for row in stats.rows} == {"block"}
    _, stats = jmp.watch(jmp.autocast(lambda x: x @ x))(jnp.ones((4, 4)))
    assert {row.scope for row in stats.rows} == {""}


def test_a_stack_with_one_step_that_is_not_finite_is_not_finite():
    """The op that reads the stack is not the first one with a number not finite."""

    def fun(xs):
        _, stack = lax.scan(lambda c, x: (c, jnp.sqrt(x)), 0, xs)
        return jnp.cos(stack)

    _, stats = jmp.watch(fun)(jnp.float32([1, -1, 4]))
    first = {row.op: row.is_first for row in stats.rows}
    assert first == {"sqrt": True, "cos": False}


def test_a_ref_is_not_counted_but_what_is_read_from_it():
    def write(x, given):
        made = jax.new_ref(jnp.zeros_like(x))
        made[...] = x @ x
        given[...] = jnp.log(made[...] - 100)
        return given[...] * 2

    x, ref = jnp.ones((4, 4)), jax.new_ref(jnp.zeros((4, 4)))
    for fun in (jmp.watch(write), jax.jit(jmp.watch(write))):
        out, stats = fun(x, ref)
        assert np.isnan(out).all()
        assert np.isnan(ref[...]).all()
        assert jmp.first_nonfinite(stats).op == "log"
        assert [row.elements for row in stats.rows if row.op == "dot_general"] == [16]


def test_watched_results_are_arrays_of_jax_like_those_of_a_compiled_function():
    given = np.ones(2, np.float32)

    def fun(x, y):
        return jnp.exp(x), {"rate": 1e-3, "n": 3, "c": np.ones(3), "y": y, "none": None}

    results, _ = jmp.watch(fun)(jnp.ones(2), given)
    expected = jax.jit(fun)(jnp.ones(2), given)
    chex.assert_trees_all_equal_shapes_and_dtypes(results, expected)
    for leaf in jax.tree.leaves(results):
        assert isinstance(leaf, jax.Array)


# ------------------------------------------------------- infinities dropped on purpose

RECIPROCALS = 1 - jnp.eye(4)
OFF_DIAGONAL = {
    "triu": lambda d: jnp.triu(1 / d, k=1),
    "where": lambda d: jnp.where(d == 0, 0.0, 1 / d),
    "a masked softmax": lambda d: jax.nn.softmax(jnp.where(d > 0, d, jnp.log(0 * d))),
    "a loop": lambda d: lax.scan(
        lambda c, row: (c + jnp.sum(jnp.where(row > 0, 1 / row, 0)), None), 0.0, d
    )[0],
    "a branch": lambda d: lax.cond(
        d[0, 1] > 0, lambda d: jnp.triu(1 / d, k=1), lambda d: d, d
    ),
    "a checkpoint": jax.checkpoint(lambda d: jnp.triu(1 / d, k=1)),
    "vmap": lambda d: jax.vmap(lambda row: jnp.where(row > 0, 1 / row, 0))(d),
    "a custom rule": lambda d: jnp.triu(jax.nn.relu(1 / d), k=1),
}


@pytest.mark.parametrize("name", OFF_DIAGONAL)
@pytest.mark.parametrize("run", [lambda fun: fun, jax.jit])
def test_an_infinity_that_the_program_drops_is_not_the_culprit(name, run):
    fun = OFF_DIAGONAL[name]
    _, stats = run(jmp.watch(fun))(RECIPROCALS)
    assert any(row.is_first for row in stats.rows), "it is counted"
    assert jmp.first_nonfinite(stats) is None

    def overflowing(d):
        weights = fun(d)
        return jnp.sum(weights) + jnp.sum(jnp.exp(100 * d) @ d)

    first = jmp.first_nonfinite(run(jmp.watch(overflowing))(RECIPROCALS)[1])
    assert first.op == "exp"


def test_the_culprit_is_found_through_loops_branches_and_the_gradient():
    def looped(x):
        halved = lambda i, v: jnp.log(v - 1)
        return lax.fori_loop(0, 3, halved, x)

    def in_a_branch(x):
        return lax.cond(x > 0, lambda x: jnp.log(x - 2), lambda x: x, x)

    def stacked(x):
        step = lambda carry, _: (carry / 2, jnp.log(carry - 1))
        return lax.scan(step, x, None, length=3)[1]

    def until(x):
        return lax.while_loop(lambda v: v > 1, lambda v: jnp.sqrt(1 - v), x)

    x = jnp.float32(1.5)
    for fun, op in (
        (looped, "log"),
        (in_a_branch, "log"),
        (stacked, "log"),
        (until, "sqrt"),
        (jax.grad(lambda x: jnp.sqrt(x - x) + jnp.exp(x)), "div"),
    ):
        assert jmp.first_nonfinite(jmp.watch(fun)(x)[1]).op == op


def test_a_step_that_is_skipped_still_names_its_overflow():
    """The parameters are finite; what says that the step was skipped leads to it."""
    optimizer = jmp.loss_scaling(optax.sgd(0.1), jmp.StaticLossScale(1))

    def step(w, state, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.exp(x * w)))(w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones(3)
    (w, _), stats = jmp.watch(step)(w, optimizer.init(w), jnp.full(3, 1000.0))
    assert jnp.isfinite(w).all()
    assert jmp.first_nonfinite(stats).op == "exp"
