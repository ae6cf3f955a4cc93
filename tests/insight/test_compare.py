"""Mixed precision beside float32, op by op."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled, mostly_slow, one_of_each
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import BLOCK, BLOCK_PARAMS, LAYERS, PROGRAMS, W, X, each_program

import jmp_lite as jmp
from jmp_lite.autocasting.api import run_function
from jmp_lite.insight.comparer import Comparer, StagedCasts, Twin
from jmp_lite.jaxprs.trace import trace_function


def lanes(fun, *args, rules="mixed"):
    """Returns the results of a function on both lanes."""
    as_traced, arrays, structure, _ = trace_function(fun, args, {})
    rules = jmp.get_rules(rules) if isinstance(rules, str) else rules
    run = functools.partial(run_function, rules, as_traced, casts=StagedCasts)
    traced = jax.make_jaxpr(lambda *xs: run(xs))(*arrays)

    def on_both(*arrays):
        results = Comparer(2**16).run(traced, list(map(Twin, arrays)))
        return [twin.low for twin in results], [twin.full for twin in results]

    each = compiled(on_both, *arrays)
    return [jax.tree.unflatten(structure, lane) for lane in each]


def assert_alike(actual, expected, **tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected
    )


def in_highest(fun):
    """Returns a function whose products are as exact as those of the other lane."""

    def run(*args):
        with jax.default_matmul_precision("highest"):
            return fun(*args)

    return run


# --------------------------------------------------------------------------- two lanes


@each_program
def test_one_lane_is_the_function_under_autocast_and_the_other_one_is_float32(name):
    fun, args = PROGRAMS[name]
    low, exact = lanes(fun, *args)
    assert_alike(low, compiled(jmp.autocast(fun), *args), rtol=0.02, atol=0.02)
    assert_alike(exact, compiled(in_highest(fun), *args), rtol=1e-4, atol=1e-5)


DIFFERENTIATED = ("a linen block", "scanned_layers", "custom_vjp_in_a_scan", "for_loop")
ALL_RULES = ("mixed", "O2", "float8")


@pytest.mark.parametrize(
    ("name", "rules"),
    mostly_slow(
        itertools.product(DIFFERENTIATED, ALL_RULES),
        one_of_each(DIFFERENTIATED, ALL_RULES),
    ),
)
def test_one_lane_of_a_gradient_is_autocast_and_the_other_one_is_float32(name, rules):
    fun, args = PROGRAMS[name]
    scalar = lambda f: lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args))))
    low, exact = (jax.grad(scalar(f)) for f in (jmp.autocast(fun, rules), fun))
    found, twin = lanes(low, *args, rules="O0")
    assert_alike(found, compiled(low, *args), rtol=0.02, atol=0.02)
    assert_alike(twin, compiled(in_highest(exact), *args), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["float8", "float8_rows", "int8"])
def test_a_format_of_8_bits_is_undone_on_the_lane_of_float32(name):
    rules = jmp.Rules().scope("", jmp.get_format(name, smallest=0))
    w = jax.random.normal(jax.random.key(3), (64, 64))
    weights = jnp.stack([w / 8, w.T / 8])

    def straight(w):
        return jnp.tanh(w @ w) @ w

    def looping(w):
        step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return lax.scan(step, w, weights)[0] @ w

    for fun in (straight, looping):
        low, exact = lanes(fun, w, rules=rules)
        assert_alike(exact, in_highest(fun)(w), rtol=1e-4, atol=1e-4)
        assert np.abs(low - exact).max() > 0.02
        rows = [
            row for row in jmp.compare(fun, rules)(w).rows if row.op == "dot_general"
        ]
        kind = "int8" if name == "int8" else "float8_e4m3fn"
        assert {row.dtype for row in rows} == {kind}


def test_a_value_before_any_rounding_is_computed_once():
    def fun(x, key):
        noise = jnp.exp(jax.random.normal(key, x.shape))
        return x @ x.T + noise[:, :1], noise

    compared = jmp.compare(fun)
    jaxpr = jax.make_jaxpr(lambda x, k: compared(x, k).sums)(X, jax.random.key(0))
    ops = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert (ops.count("exp"), ops.count("dot_general")) == (1, 2)
    comparison = compared(X, jax.random.key(0))
    assert [row.op for row in comparison.rows] == ["dot_general", "add"]
    assert comparison.errors["result[1]"] == 0.0


def test_both_lanes_take_the_branches_and_the_steps_of_the_first():
    def fun(x):
        y = jnp.sum(jnp.dot(x, x))
        return lax.cond(y > 1, jnp.exp, jnp.sin, y), lax.while_loop(
            lambda c: c[0] < y, lambda c: (c[0] + 1.0, c[1] * 1.5), (0.0, y)
        )

    x = jnp.full(3, 0.578)  # 1.0022 in float32, and 1.0 in bfloat16.
    rules = jmp.get_rules("O3")
    low, exact = lanes(fun, x, rules=rules)
    assert_alike(low, jmp.autocast(fun, rules)(x), rtol=1e-6)
    np.testing.assert_allclose(exact[0], np.sin(3 * 0.578**2), rtol=1e-5)
    np.testing.assert_allclose(exact[1][1], 3 * 0.578**2 * 1.5, rtol=1e-5)


# -------------------------------------------------------------------- what is measured


def cancelling(x):
    with jax.named_scope("harmless"):
        y = x @ x
    with jax.named_scope("delicate"):
        return jnp.tanh((y + 100) - 100) @ x


def test_the_op_that_amplifies_comes_first_though_others_are_as_wrong():
    comparison = jmp.compare(cancelling, "O3")(jnp.linspace(-1, 1, 16).reshape(4, 4))
    first, second, *_ = comparison.amplified()
    assert (first.op, first.scope, first.dtype) == ("sub", "delicate", "bfloat16")
    assert first.amplification > 30 > 2 > second.amplification
    tanh = next(row for row in comparison.rows if row.op == "tanh")
    assert tanh.error_in == pytest.approx(first.error_out)
    assert tanh.error_out > 0.1
    text = str(comparison)
    assert "delicate" in text.splitlines()[1]
    assert "test_compare.py:" in text
    assert text.splitlines()[-1].startswith("result: ")


def test_errors_are_those_of_the_arrays():
    x = jax.random.normal(jax.random.key(0), (32, 32))
    (row,) = jmp.compare(lambda x: jnp.dot(x, x))(x).rows
    low, exact = jmp.autocast(jnp.dot)(x, x), np.dot(x, x)
    expected = np.abs(low - exact).sum() / np.abs(exact).sum()
    assert (row.error_in, row.op) == (0.0, "dot_general")
    assert row.error_out == pytest.approx(expected, rel=1e-3)
    assert row.amplification == pytest.approx(expected / 2**-8, rel=1e-3)


def test_the_error_of_integers_and_booleans_is_the_share_that_differs():
    x = jnp.linspace(1, 1.02, 64)
    fun = lambda x: (jnp.argsort(-x @ jnp.diag(x)), x @ jnp.diag(x) > 1.01)
    rows = {row.op: row for row in jmp.compare(fun, "O3")(x).rows}
    low = jmp.autocast(fun, "O3")(x)
    differing = [np.mean(a != b) for a, b in zip(low, fun(x), strict=True)]
    assert min(differing) > 0
    assert rows["gt"].error_out == pytest.approx(differing[1])


def test_an_overflow_is_an_infinite_error():
    fun = lambda x: jnp.dot(x, x) * 1.0
    comparison = jmp.compare(fun, "O3", compute_dtype="float16")(jnp.full(4, 300.0))
    assert comparison.amplified()[0].error_out == np.inf
    assert comparison.errors == {"result": np.inf}


def test_a_nan_on_one_lane_is_an_infinite_error():
    fun = lambda x: (square := jnp.dot(x, x)) - 0.5 * square
    comparison = jmp.compare(fun, "O3", compute_dtype="float16")(jnp.full(4, 300.0))
    assert comparison.errors == {"result": np.inf}


def test_infinities_and_nans_that_float32_has_too_are_no_errors():
    fun = lambda x: jnp.exp(jnp.where(x > 0, x @ W, -jnp.inf))
    rows = {row.op: row for row in jmp.compare(fun)(X).rows}
    assert rows["exp"].error_out < 0.02
    nan = jmp.compare(lambda x: jnp.log(x @ W - 1e9))(X)
    assert "dot_general" in [row.op for row in nan.rows]
    assert all(row.error_out < 0.1 for row in nan.rows)


def test_code_that_was_written_in_16_bits_is_compared_to_itself_in_float32():
    def by_hand(x, w):
        low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.sum(low.astype(jnp.float32) ** 2)

    comparison = jmp.compare(by_hand, "O0", backward=True)(X, W)
    assert comparison.errors.keys() == {
        *("result", "gradient of args[0]", "gradient of args[1]")
    }
    assert min(comparison.errors.values()) > 0
    assert max(comparison.errors.values()) < 0.05
    assert not jmp.compare(lambda x: x @ W, "O0")(X).rows


def test_a_loop_is_one_row_an_op_however_often_it_runs():
    comparison = jax.jit(jmp.compare(PROGRAMS["scanned_layers"][0]))(X, LAYERS)
    ops = [row.op for row in comparison.rows]
    assert ops == ["dot_general", "tanh", "add", "dot_general"]
    unrolled = jmp.compare(lambda x, ws: [x := x + jnp.tanh(x @ w) for w in ws][-1])
    rows = [row for row in unrolled(X, LAYERS).rows if row.op == "dot_general"]
    found = comparison.rows[0].error_out
    assert min(r.error_out for r in rows) <= found <= max(r.error_out for r in rows)
    last_is_exact = LAYERS.at[-1].set(0)
    of_all = jmp.compare(PROGRAMS["scanned_layers"][0])(X, last_is_exact)
    assert of_all.rows[0].op == "dot_general", "of the steps before"


def test_the_backward_pass_is_compared_too():
    loss = lambda params, x: jnp.mean(BLOCK.apply(params, x) ** 2)
    comparison = compiled(jmp.compare(loss, backward=True), BLOCK_PARAMS, X)
    assert {row.is_backward for row in comparison.rows} == {False, True}
    expected = compiled(jax.grad(loss), BLOCK_PARAMS, X)
    low = compiled(jax.grad(jmp.autocast(loss)), BLOCK_PARAMS, X)
    for path, leaf in jax.tree.leaves_with_path(low):
        name = f"gradient of args[0]{jax.tree_util.keystr(path)}"
        exact = dict(jax.tree.leaves_with_path(expected))[path]
        error = np.abs(leaf - exact).sum() / max(np.abs(exact).sum(), 1e-30)
        assert comparison.errors[name] == pytest.approx(error, rel=0.05, abs=1e-4)


def test_a_large_result_is_sampled():
    x = jax.random.normal(jax.random.key(0), (1000, 256)).at[:50].set(0)
    of_all, of_few = (
        jmp.compare(lambda x: jnp.tanh(x @ x.T), elements=n)(x) for n in (10**9, 2**12)
    )
    for full, few in zip(of_all.rows, of_few.rows, strict=True):
        assert few.error_out == pytest.approx(full.error_out, rel=0.2)
        assert few.error_out != full.error_out
    assert of_few.errors == pytest.approx(of_all.errors)


# ------------------------------------------------------------------------ transforms


@pytest.mark.slow
def test_compare_runs_under_jit_vmap_scan_and_shard_map():
    compared = jmp.compare(lambda x, w: jnp.tanh(x @ w))
    alone = [jax.jit(compared)(x[None], W).rows for x in X]
    mapped = jax.vmap(lambda x: compared(x[None], W))(X)
    assert [row.op for row in mapped.rows] == [row.op for row in alone[0]]
    low, high = (f(rows[0].error_out for rows in alone) for f in (min, max))
    assert low <= mapped.rows[0].error_out <= high
    stacked = lax.scan(lambda c, x: (c, compared(x[None], W)), 0, X)[1]
    assert stacked.rows[0].error_out == pytest.approx(mapped.rows[0].error_out, rel=0.3)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    sharded = jax.shard_map(
        lambda x: compared(x, W), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    assert sharded(X).rows[0].error_out == pytest.approx(
        compared(X, W).rows[0].error_out
    )


def test_nested_loops_take_no_longer_with_each_level():
    def nested(depth):
        def fun(x):
            if not depth:
                return jnp.tanh(x @ W)
            return lax.scan(lambda c, _: (nested(depth - 1)(c), None), x, length=2)[0]

        return fun

    sizes = [
        len(str(jax.make_jaxpr(lambda x, d=d: jmp.compare(nested(d))(x).sums)(X)))
        for d in (2, 4)
    ]
    assert sizes[1] < 4 * sizes[0]


# ----------------------------------------------------------------------------- errors


def test_bad_arguments_are_errors_that_name_them():
    with pytest.raises(TypeError, match="Expected a function"):
        jmp.compare(3)
    with pytest.raises(ValueError, match="preset"):
        jmp.compare(jnp.tanh, "mixd")
    with pytest.raises(ValueError, match="no floating-point argument"):
        jmp.compare(lambda n: n + 1, backward=True)(3)
    with pytest.raises(ValueError, match="elements"):
        jmp.compare(jnp.tanh, elements=0)
    with pytest.raises(TypeError, match="got tracers"):
        jax.jit(lambda x: len(jmp.compare(jnp.tanh)(x).rows))(X)


def test_a_result_that_is_nan_in_float32_has_no_error_of_zero():
    comparison = jmp.compare(lambda x: (jnp.log(x @ x), x))(-jnp.ones((2, 2)) * jnp.nan)
    assert np.isnan(comparison.errors["result[0]"])
    assert np.isnan(comparison.errors["result[1]"])


def test_a_function_without_ops_and_an_empty_array_have_no_error():
    comparison = jmp.compare(lambda: ())()
    assert (comparison.rows, dict(comparison.errors)) == ((), {})
    assert "amplified" in str(comparison)
    empty = jmp.compare(lambda x: x @ x.T)(jnp.zeros((0, 4)))
    assert empty.errors == {"result": 0.0}
