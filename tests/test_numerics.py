"""Where numbers overflow, vanish or stop being finite, told by name and line."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import BLOCK, BLOCK_PARAMS, LAYERS, PROGRAMS, W, X

import jmp_lite as jmp
from jmp_lite.autocasting.compat import is_float

F8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]
HERE = pathlib.Path(__file__)


def line_with(text):
    lines = HERE.read_text().splitlines()
    (found,) = (i for i, line in enumerate(lines, 1) if line.endswith(text))
    return f"{HERE.name}:{found} "


# ------------------------------------------------------------------------- reports


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *F8])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_what_is_counted_is_what_a_cast_would_do(dtype, wrap):
    """A cast by NumPy, which rounds to the nearest and flushes nothing."""
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
    with np.errstate(over="ignore"):
        cast = np.abs(x.astype(dtype).astype(np.float32))
    (row,) = wrap(functools.partial(jmp.numerics_report, dtype=dtype))(x).rows
    total = x.size
    assert round(row.overflow * total) == np.sum(~np.isfinite(cast))
    assert round(row.underflow * total) == np.sum((cast == 0) & (x != 0))
    is_small = (cast > 0) & (cast < np.float32(info.tiny))
    assert round(row.subnormal * total) == np.sum(is_small)
    assert row.max_abs == np.abs(x).max()
    assert row.min_abs == np.abs(x[x != 0]).min()
    assert (row.nan, row.inf, row.elements) == (0, 0, total)


def test_a_report_names_the_leaves_and_counts_what_is_not_finite():
    tree = {
        "w": np.float32([[np.nan, np.inf], [-np.inf, 2.0]]),
        "low": jnp.full(3, 0.5, jnp.bfloat16),
        "n": jnp.arange(3),
        "key": jax.random.key(0),
        "empty": jnp.zeros((0, 2)),
        "none": None,
    }
    report = jax.jit(jmp.numerics_report)(tree)
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
    assert "underflow in float16" in str(jmp.numerics_report(tree, "float16"))
    assert jmp.numerics_report({}).rows == ()
    assert str(jmp.numerics_report({}))
    with pytest.raises(ValueError, match=r"Unknown dtype 'flaot16'.*'float16'"):
        jmp.numerics_report(tree, "flaot16")


def test_the_quick_question_has_a_quick_answer():
    tree = {"a": jnp.ones(2), "b": [jnp.float32([1, np.nan, -np.inf])]}
    report = jmp.nonfinite_report(tree)
    assert [row.path for row in report] == ["['b'][0]"]
    assert str(report) == "['b'][0]: 1 NaN, 1 infinite of 3"
    assert not jmp.nonfinite_report({"a": jnp.ones(2)})
    assert str(jmp.nonfinite_report(())) == "all finite"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", jnp.float8_e5m2])
def test_a_suggested_scale_keeps_its_headroom_and_rescues_what_it_says(dtype):
    rng = np.random.default_rng(0)
    sizes = np.float32(2.0 ** rng.uniform(-30, -8, 4000))
    grads = {"a": jnp.asarray(sizes[:1000]), "b": sizes[1000:], "n": jnp.arange(3)}
    scale, lost, rescued = jmp.suggest_loss_scale(grads, dtype)
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
    with pytest.raises(ValueError, match="no gradient that is finite and not zero"):
        jmp.suggest_loss_scale({"a": jnp.zeros(3), "b": jnp.full(2, jnp.nan)})


# --------------------------------------------------------------------------- watch


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_watched_function_computes_what_it_did(name):
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
        if any(map(is_float, eqn.outvars))
    ]
    assert bool(stats.rows) == bool(floats)


def block_loss(params, x):
    return jnp.mean(BLOCK.apply(params, x) ** 2)


def test_its_gradient_is_the_gradient_and_the_backward_pass_can_be_watched():
    loss = lambda params, x: jmp.watch(block_loss)(params, x)[0]
    actual, expected = (jax.grad(f)(BLOCK_PARAMS, X) for f in (loss, block_loss))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *(actual, expected),
    )
    grads, stats = jmp.watch(jax.grad(block_loss))(BLOCK_PARAMS, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        *(grads, expected),
    )
    _, forward = jmp.watch(block_loss)(BLOCK_PARAMS, X)
    dots = [
        sum(row.op == "dot_general" for row in one.rows) for one in (forward, stats)
    ]
    assert dots[1] > 2 * dots[0]


def test_a_derivative_of_its_own_stays_its_own():
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


def test_loops_are_counted_over_all_trips():
    def fun(x, stack, n):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)
        h = lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, h)
        )[1]
        return lax.cond(n > 100, jnp.cos, jnp.sqrt, h)

    _, stats = jax.jit(jmp.watch(fun))(X, LAYERS, 5)
    rows = {row.op: row for row in stats.rows}
    assert rows["tanh"].elements == 3 * 32
    assert rows["sin"].elements == 5 * 32
    assert "cos" not in rows, "it was not run"
    assert rows["sqrt"].elements == 32
    assert rows["sqrt"].is_first, "of negative numbers"
    assert "elements" in str(stats)


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

    _, stats = jmp.watch(jax.grad(loss), "float16")((W, W), X)
    lost = {
        row.scope.split("/")[-1]
        for row in stats.rows
        if row.op == "dot_general" and row.underflow > 0.5 and row.max_abs > 0
    }
    assert "first" in lost
    grads = jax.grad(loss)((W, W), X)
    first, second = jmp.numerics_report(grads, "float16").rows
    assert first.underflow > 0.5 > second.underflow
    assert jmp.suggest_loss_scale(grads).rescued > 0


def test_it_composes_and_refuses_what_is_no_function():
    values, stats = jax.vmap(jmp.watch(jnp.tanh))(X)
    np.testing.assert_array_equal(values, jnp.tanh(X))
    assert stats.counts["nan"].shape == (4, 1)
    out, stats = jmp.watch(lambda n, name: n + len(name))(3, "abc")
    assert (int(out), stats.rows) == (6, ())
    assert jmp.watch(lambda: None)()[0] is None
    with pytest.raises(TypeError, match="Expected a function"):
        jmp.watch(3)
    with pytest.raises(ValueError, match="Unknown dtype"):
        jmp.watch(jnp.tanh, "int8")
    with pytest.raises(TypeError, match="second result of a watched function, got int"):
        jmp.first_nonfinite(3)
    low, stats = jmp.watch(jmp.autocast(jnp.dot), "float16")(X, W)
    assert low.dtype == np.float32
    assert {row.op for row in stats.rows} == {"convert_element_type", "dot_general"}
