"""Functions that others wrote, from JAX's and optax's own packages, under autocast."""

import collections
import contextlib
import gc
import itertools
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from helpers import (
    compiled,
    live_equations,
    mostly_slow,
    one_of_each,
    products,
    relative_error,
)
from jax import lax
from jax.experimental import checkify
from jax.experimental.ode import odeint
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.decide.facts import State
from jmp_lite.autocasting.marks import (
    as_full,
    as_low,
    full_precision,
    low_call,
    low_precision,
)
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.rules.presets import PRESETS, get_rules
from jmp_lite.autocasting.rules.rules import is_identity
from jmp_lite.insight.explanation import explain

X = jax.random.normal(jax.random.key(0), (4, 4))
POSITIVE = X @ X.T + 4 * jnp.eye(4)
ACTIVATIONS = (
    *(jax.nn.silu, jax.nn.gelu, jax.nn.softplus, jax.nn.elu, jax.nn.selu),
    *(jax.nn.glu, jax.nn.log_sigmoid, jax.nn.hard_swish, jax.nn.celu, jax.nn.mish),
)
DIFFERENTIABLE = {
    "cholesky": lambda x: jnp.linalg.cholesky(POSITIVE + 0.01 * x @ x.T),
    "solve": lambda x: jnp.linalg.solve(POSITIVE, x @ x),
    "svd": lambda x: jnp.linalg.svd(x)[1],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x @ x)),
    "conjugate gradients": lambda x: jax.scipy.sparse.linalg.cg(
        lambda v: POSITIVE @ v, x[0]
    )[0],
    "odeint": lambda x: odeint(lambda y, t: -0.1 * y @ x, x[0], jnp.arange(4.0) / 4),
    "custom_root": lambda x: lax.custom_root(
        lambda v: v**2 - jnp.abs(x[0, 0]) - 1,
        1.0,
        lambda f, v: lax.fori_loop(0, 8, lambda i, v: v - f(v) / (2 * v), v),
        lambda g, y: y / g(1.0),
    ),
    "resize": lambda x: jax.image.resize(x, (8, 8), "bicubic"),
    "gammaln": lambda x: jax.scipy.special.gammaln(jnp.abs(x @ x) + 1),
    "norm.logpdf": lambda x: jax.scipy.stats.norm.logpdf(x @ x),
    "huber_loss": lambda x: optax.losses.huber_loss(x @ x),
    "cosine_similarity": lambda x: optax.losses.cosine_similarity(x @ x, x),
    "focal loss": lambda x: optax.losses.sigmoid_focal_loss(x @ x, jnp.ones((4, 4))),
    "ctc_loss": lambda x: optax.ctc_loss(
        (x @ x)[None], jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
    ),
    "scatters": lambda x: (x @ x).at[0].set(1.0).at[1].add(2.0).at[2].max(0.0) @ x,
    "segment_sum": lambda x: jax.ops.segment_sum(x @ x, jnp.array([0, 0, 1, 1]), 2),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x @ x),
    "map": lambda x: lax.map(lambda row: row @ x, x),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "average pooling": lambda x: lax.reduce_window(
        x @ x, 0.0, lax.add, (2, 2), (1, 1), "VALID"
    ),
    "max pooling": lambda x: lax.reduce_window(
        x @ x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"
    ),
    "saved dots": jax.checkpoint(
        lambda x: jnp.tanh(x @ x), policy=jax.checkpoint_policies.dots_saveable
    ),
    "inner jit": lambda x: jax.jit(lambda x, n: x @ x * n, static_argnums=1)(
        x + 1, 3.0
    ),
    **{f.__name__: lambda x, f=f: f(x @ x) for f in ACTIVATIONS},
}
OTHERS = {
    "callback": lambda x: jax.pure_callback(
        lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((4, 4), jnp.float32), x @ x
    ),
    "a donated argument": lambda x: jax.jit(lambda y: y @ y, donate_argnums=0)(x + 1),
    "generic reduce": lambda x: lax.reduce(
        x @ x, np.float32(1), lambda a, b: a * b + 1, (0,)
    ),
    "eigh": lambda x: jnp.linalg.eigh(POSITIVE)[0] + (x @ x)[0],
    "a new ref": lambda x: _through_a_ref(x),
    "adam": lambda x: lenient(optax.adam(1e-3)).update(
        x @ x, lenient(optax.adam(1e-3)).init(x), x
    ),
}


def _through_a_ref(x):
    ref = jax.new_ref(jnp.zeros((4, 4)))
    ref[...] += x @ x
    return ref[...]


# Gradients are tested of all that have one.
SOME = ("cholesky", "svd", "fft", "odeint", "scatters", "average pooling", "inner jit")


@pytest.mark.parametrize(
    "name", mostly_slow([*DIFFERENTIABLE, *OTHERS], [*SOME, *OTHERS])
)
def test_results_are_those_of_float32_within_rounding(name):
    fun = {**DIFFERENTIABLE, **OTHERS}[name]
    expected = jax.jit(fun)(X)
    actual = jax.jit(autocast(fun))(X)
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize("name", ["odeint", "custom_root", "silu", *OTHERS])
def test_an_autocast_function_runs_op_by_op_too(name):
    fun = {**DIFFERENTIABLE, **OTHERS}[name]
    assert relative_error(autocast(fun)(X), fun(X)) < 0.03


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_float32_within_rounding(name):
    loss = lambda fun: lambda x: jnp.sum(fun(x))
    fun = DIFFERENTIABLE[name]
    both = autocast(fun), fun
    actual, expected = compiled(lambda x: [jax.grad(loss(f))(x) for f in both], X)
    assert actual.dtype == np.float32
    # A pool's winner may be another one after rounding; all else is smooth.
    assert relative_error(actual, expected) < 0.1


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_mapped_function_keeps_its_types(name):
    fun, batch = DIFFERENTIABLE[name], jnp.stack([X, X / 2])
    both = autocast(fun), fun
    actual, expected = (jax.eval_shape(jax.vmap(f), batch) for f in both)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)


@pytest.mark.parametrize("name", ["odeint", "custom_root", "scatters", "saved dots"])
def test_a_mapped_function_has_the_values_of_float32_within_rounding(name):
    fun, batch = DIFFERENTIABLE[name], jnp.stack([X, X / 2])
    both = autocast(fun), fun
    actual, expected = compiled(lambda x: [jax.vmap(f)(x) for f in both], batch)
    assert relative_error(actual, expected) < 0.03


def test_refs_that_are_closed_over_or_arguments_are_written():
    closed, given = jax.new_ref(jnp.zeros((4, 4))), jax.new_ref(jnp.zeros((4, 4)))

    def write(ref, x):
        ref[...] += x @ x
        closed[...] = ref[...] + 1
        return x.sum()

    jax.jit(autocast(write))(given, X)
    assert relative_error(given[...], X @ X) < 0.03
    np.testing.assert_array_equal(closed[...], given[...] + 1)


def test_closed_over_tracers_of_outer_transforms_are_found():
    def loss(fun):
        return lambda w: fun(lambda x: jnp.sum(jnp.tanh(x @ w)))(X)

    for transform in (jax.grad, lambda f: lambda w: jax.vmap(f)(jnp.stack([w, -w]))):
        actual = transform(loss(autocast))(X)
        expected = transform(loss(lambda f: f))(X)
        assert relative_error(actual, expected) < 0.03


@pytest.mark.parametrize(
    "transform",
    [jax.hessian, jax.jacrev, jax.jacfwd, lambda f: jax.vmap(jax.grad(f), in_axes=0)],
)
def test_every_derivative_and_map_is_that_of_float32_within_rounding(transform):
    fun = lambda x: jnp.sum(jnp.tanh(x @ X))
    args = jnp.stack([X, X / 2]) if transform not in (jax.hessian,) else X
    both = transform(autocast(fun)), transform(fun)
    actual, expected = compiled(lambda x: [f(x) for f in both], args)
    assert actual.dtype == np.float32
    assert relative_error(actual, expected) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_that_is_applied_at_an_index_runs_as_traced(dtype):
    x = jnp.arange(24.0).reshape(4, 6)

    def fun(x, w):
        h = (x @ w).at[1].apply(jnp.sin)
        return h @ w, x.at[jnp.array([0, 2])].apply(lambda row: row * 2)

    args = x.astype(dtype), jnp.eye(6, dtype=dtype)
    results = jax.jit(autocast(fun))(*args)
    assert relative_error(results, fun(x, jnp.eye(6))) < 0.02
    rows = explain(fun)(*args).rows
    assert {row.code for row in rows if row.op == "scatter"} == {"opaque"}


def test_collectives_over_named_axes_work():
    def mean(v):
        return lax.pmean(jnp.tanh(v @ X), "i")

    batch = jnp.stack([X, -X / 2])
    for mapping in (jax.vmap, jax.pmap):
        actual = mapping(autocast(mean), axis_name="i")(batch)
        expected = mapping(mean, axis_name="i")(batch)
        assert relative_error(actual, expected) < 0.03


def relu_loop(x):
    def step(h, _):
        return jax.nn.relu(jnp.where(h > 0, h @ x, 0)), None

    return lax.scan(step, x, length=2)[0].sum()


@pytest.mark.parametrize(
    "setting",
    [
        # It empties all of JAX's caches, and what comes after is compiled again.
        pytest.param(lambda: jax.checking_leaks(), marks=pytest.mark.slow),
        lambda: jax.enable_checks(True),
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_dtype_promotion("standard"),
        contextlib.nullcontext,
    ],
)
def test_jax_s_own_checks_find_nothing(setting):
    """They look at what is traced and lowered."""
    with setting():
        lowered = jax.jit(jax.grad(autocast(relu_loop))).lower(X)
    actual = lowered.compile()(X)
    assert actual.dtype == np.float32
    assert relative_error(actual, jax.jit(jax.grad(relu_loop))(X)) < 0.03


@jax.custom_vjp
def with_a_rule(x):
    return jnp.tanh(x @ x)


with_a_rule.defvjp(lambda x: (with_a_rule(x), x), lambda x, g: (g * x,))


def on_each_device(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P(), out_specs=P())(x)


@pytest.mark.slow  # It empties all of JAX's caches, as above.
@pytest.mark.parametrize("fun", [with_a_rule, on_each_device])
def test_no_tracer_outlives_its_trace(fun):
    def checked(x):
        checkify.check(jnp.all(x < 10), "too large")
        return jnp.sum(fun(x))

    with jax.checking_leaks():
        expected = jax.jit(lambda x: jnp.sum(fun(x)))(X)
        for transform in (lambda f: f, jax.value_and_grad):
            low = autocast(lambda x: jnp.sum(fun(x)))
            jax.tree.map(np.asarray, jax.jit(transform(low))(X))
        error, actual = jax.jit(checkify.checkify(autocast(checked)))(X)
    assert error.get() is None
    assert relative_error(actual, expected) < 0.03


def test_an_equation_without_results_is_run():
    def checked(x):
        checkify.check(jnp.all(x < 1), "too large")
        return x @ x.T

    error, _ = checkify.checkify(autocast(checked))(X)
    assert "too large" in error.get()


def captures(x):
    return lambda y: jnp.sum(jnp.tanh(x @ y))


def captures_in_a_loop(x):
    step = lambda y, _: (jnp.tanh(jax.jit(jnp.matmul)(x, y)), None)
    return lambda y: jnp.sum(lax.scan(step, y, length=2)[0])


def captures_in_a_rule(x):
    return lambda y: jnp.sum(jax.checkpoint(lambda y: with_a_rule(x + y))(y))


CAPTURING = (captures, captures_in_a_loop, captures_in_a_rule)
CAPTURED_UNDER = ("mixed", "O3", "O0")


@pytest.mark.parametrize(
    ("capturing", "rules"),
    mostly_slow(
        itertools.product(CAPTURING, CAPTURED_UNDER),
        one_of_each(CAPTURING, CAPTURED_UNDER),
    ),
)
def test_captured_arrays_are_freed_with_the_function(capturing, rules):
    captured = jnp.asarray(X) + 1
    alive = weakref.ref(captured)
    low = autocast(capturing(captured), rules)
    del captured
    gc.collect()
    gc.disable()
    try:
        low(X)
        jax.grad(low)(X)
        assert alive() is not None
        del low
        assert alive() is None
    finally:
        gc.enable()


def test_an_autocast_function_runs_where_jit_is_disabled():
    with jax.disable_jit():
        actual = jax.jit(jax.grad(autocast(relu_loop)))(X)
    assert relative_error(actual, jax.jit(jax.grad(relu_loop))(X)) < 0.03


def test_one_trace_per_shape_under_jit():
    traces = []

    @jax.jit
    @autocast
    def fun(x):
        traces.append(None)
        return x @ x

    for _ in range(3):
        fun(X)
    fun(X[:2, :2])
    assert len(traces) == 2


# ------------------------------------------------------------------------------ marks


def dots(fun, *args):
    return products(live_equations(autocast(fun), *args))


FULL, LOW = ("float32",) * 3, ("bfloat16",) * 3


def test_a_marked_function_runs_in_float32_and_so_does_its_backward_pass():
    @full_precision
    def exact(x):
        return x @ x

    assert dots(exact, X) == {FULL: 1}
    assert dots(lambda x: exact(x) + x @ x, X) == {FULL: 1, LOW: 1}
    loss = lambda x: jnp.sum(exact(x))
    assert products(live_equations(jax.grad(autocast(loss)), X)) == {FULL: 2}
    assert exact.__name__ == "exact"


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.scan(lambda h, _: (f(h), None), x, length=2)[0],
        lambda f: lambda x: lax.cond(x.sum() > 0, f, f, x),
        lambda f: lambda x: jax.vmap(f)(x[None])[0],
    ],
)
def test_a_marked_block_reaches_through_every_transform(wrap):
    def block(x):
        with full_precision():
            return x @ x

    found = dots(lambda x: jnp.sum(wrap(block)(x)), X)
    assert set(found) == {FULL}
    gradient = jax.grad(autocast(lambda x: jnp.sum(wrap(block)(x))))
    assert set(products(live_equations(gradient, X))) == {FULL}


def test_an_op_without_a_16_bit_form_stays_float32_where_all_is_marked_low():
    @low_precision
    def fun(x):
        return jnp.linalg.cholesky(x) @ jnp.abs(jnp.fft.rfft(x))

    actual, expected = (compiled(f, POSITIVE) for f in (autocast(fun), fun))
    assert relative_error(actual, expected) < 0.03
    assert dots(fun, POSITIVE) == {LOW: 1}


def test_the_innermost_mark_wins_and_blocks_may_be_nested():
    def fun(x):
        with full_precision():
            with low_precision():
                y = jnp.exp(x)
            return y @ x

    eqns = live_equations(autocast(fun), X)
    (exp,) = (e for e in eqns if e.primitive.name == "exp")
    assert exp.outvars[0].aval.dtype == jnp.bfloat16
    assert products(eqns) == {FULL: 1}


@pytest.mark.parametrize("rules", ["O0", "must_keep_origin_dtype"])
def test_marks_win_over_a_preset_that_changes_nothing(rules):
    def fun(x):
        with low_precision():
            y = x @ x
        return jnp.tanh(y) @ x

    assert products(live_equations(autocast(fun, rules), X)) == {LOW: 1, FULL: 1}
    rows = explain(fun, rules)(X).rows
    assert [row.precision for row in rows] == ["bfloat16", "float32", "float32"]
    # And nothing but the marked op is changed.
    one, same = autocast(fun, rules)(X), jnp.tanh(lower(X @ X)) @ X
    assert relative_error(one, same) < 0.01
    expected = jax.make_jaxpr(lambda x: jnp.tanh(x @ x) @ x)(X)
    unmarked = jax.make_jaxpr(autocast(lambda x: jnp.tanh(x @ x) @ x, rules))(X)
    assert str(unmarked) == str(expected)


def highest(x):
    return jnp.matmul(x, x, precision="highest")


def barrier(x):
    return lax.optimization_barrier(x)


def upcast(x):
    return x.astype("bfloat16").astype(np.float32)


def from_integers(x):
    return jnp.asarray(x > 0, int).astype(np.float32)


def is_held_low(fun, rules):
    """Whether the result of a function is held in the compute dtype where it ends."""
    plan = Planner(rules).function(jax.make_jaxpr(fun)(X), [jax.typeof(X)])
    return plan.results[0].state is State.LOW


@pytest.mark.parametrize("rules", PRESETS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("marked", [highest, barrier, upcast, from_integers])
def test_marks_win_over_every_preset_rule_and_special_case(marked, jit, rules):
    for first in (
        get_rules(rules),
        get_rules(rules).scope("", "full"),
        get_rules(rules).scope("", "low"),
    ):
        for mark, is_low in ((low_precision, True), (full_precision, False)):
            fun = jit(mark(marked))
            assert is_held_low(lambda x, fun=fun: fun(x @ x), first) == is_low
            precisions = {
                row.precision
                for row in explain(fun, first)(X).rows
                if row.op == "dot_general"
            }
            half = np.dtype(first.compute_dtype).name
            expected = {half if is_low else "float32"}
            assert precisions == (expected if marked is highest else set())


def lower(x):
    return x.astype("bfloat16").astype(np.float32)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("mixed", FULL),
        ("O2", FULL),
        ("O3", LOW),
        (get_rules("mixed").scope("rotary", "low"), LOW),
        (get_rules("mixed").low("dot_general"), LOW),
        (get_rules("O3").scope("rotary", "full"), FULL),
    ],
)
def test_an_outer_product_of_positions_is_float32_unless_it_is_marked_low(
    rules, expected
):
    def phases(rates):
        with jax.named_scope("rotary"):
            positions = jnp.arange(8).astype(np.float32)
            return jnp.einsum("i,j->ij", positions, rates)

    marked = low_precision(phases)
    for fun, dtypes in ((phases, expected), (marked, LOW)):
        low = autocast(lambda rates, f=fun: f(rates).sum(), rules)
        assert products(live_equations(low, X[0])) == {dtypes: 1}
        rows = explain(fun, rules)(X[0]).rows
        (precision,) = (row.precision for row in rows if row.op == "dot_general")
        assert precision == dtypes[0]


def test_marked_values_widen_or_narrow_what_they_are_added_to():
    def dtype_of_add(mark):
        fun = lambda x: (mark(x) + x @ x) @ x
        (add,) = (
            eqn
            for eqn in live_equations(autocast(fun), X)
            if eqn.primitive.name == "add"
        )
        return add.outvars[0].aval.dtype

    assert dtype_of_add(lambda x: x) == jnp.bfloat16
    assert dtype_of_add(as_full) == np.float32
    assert dtype_of_add(jnp.exp) == np.float32
    assert dtype_of_add(lambda x: as_low(jnp.exp(x))) == jnp.bfloat16


def test_marks_do_nothing_outside_of_autocast_and_leave_other_leaves_alone():
    tree = {"x": X, "n": jnp.arange(2), "key": jax.random.key(0), "text": "a"}
    for mark in (as_full, as_low):
        marked = mark(tree)
        chex.assert_trees_all_equal(marked["x"], X)
        assert all(marked[name] is tree[name] for name in ("n", "key", "text"))
    chex.assert_trees_all_equal(full_precision(jnp.sin)(X), jnp.sin(X))
    assert low_precision()(jnp.sin)(X).dtype == np.float32


def test_a_kernel_for_16_bits_is_given_16_bits_and_its_result_is_low():
    seen = []

    def kernel(a, n):
        seen.append((a.dtype, n))
        return a @ a

    fun = lambda x: low_call(kernel)(x @ x, 3) @ x
    assert dots(fun, X) == {LOW: 3}
    assert seen == [(jnp.bfloat16, 3)]
    assert low_call(kernel, "float16")(X, 1).dtype == np.float32
    low_call(lambda *, a: kernel(a, 4))(a=X)
    assert seen[-1] == (jnp.bfloat16, 4)
    with pytest.raises(ValueError, match="Unknown dtype 'int8'"):
        low_call(kernel, "int8")


@pytest.mark.parametrize("rules", ["mixed", "O0", "O1", "O3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_runs_as_it_is_written_and_its_result_is_low(rules, dtype):
    @jax.custom_vjp
    def kernel(a):
        scores = jnp.exp((a @ a).astype(np.float32) / 100)
        return (scores @ scores).astype(a.dtype)

    kernel.defvjp(lambda a: (kernel(a), a), lambda a, g: (g @ a.T,))
    called = low_call(kernel)
    rules = get_rules(rules, dtype)
    eqns = live_equations(autocast(lambda x: called(x) @ x, rules), X)
    inside = {("bfloat16",) * 3: 1, FULL: 1}
    outside = FULL if is_identity(rules) else (dtype,) * 3
    assert products(eqns) == collections.Counter(inside) + collections.Counter(
        [outside]
    )
    assert {e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "exp"} == {
        np.dtype("float32")
    }
    gradient = jax.grad(autocast(lambda x: jnp.sum(called(x) @ x), rules))
    assert gradient(X / 9).dtype == np.float32


def test_an_outer_autocast_changes_no_decision_of_an_inner_one():
    inner = autocast(lambda x: x @ x, "O0")
    assert dots(lambda x: inner(x) @ x, X) == {FULL: 1, LOW: 1}
    other = autocast(lambda x: x @ x, compute_dtype="float16")
    assert dots(lambda x: other(x) @ x, X) == {("float16",) * 3: 1, LOW: 1}


def test_a_node_that_converts_what_it_holds_may_be_returned():
    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, array):
            self.array = jnp.asarray(array)

        def tree_flatten(self):
            return (self.array,), None

        @classmethod
        def tree_unflatten(cls, _, leaves):
            return cls(*leaves)

    x = jnp.ones((2, 2))
    out = autocast(lambda x: Node(x @ x))(x)
    assert isinstance(out, Node)
    assert out.array.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("rules", ["mixed", "O1"])
def test_a_key_among_the_operands_of_a_jvp_rule_has_a_tangent_without_numbers(rules):
    @jax.custom_jvp
    def noisy(x, key):
        return x @ x * jax.random.normal(key)

    @noisy.defjvp
    def rule(primals, tangents):
        (x, key), (x_dot, key_dot) = primals, tangents
        assert key_dot.dtype == jax.dtypes.float0
        noise = jax.random.normal(key)
        return x @ x * noise, (x_dot @ x + x @ x_dot) * noise

    key = jax.random.key(1)
    plain = lambda x: jnp.sum(x @ x * jax.random.normal(key))
    with jax.enable_checks(True):
        actual = jax.grad(autocast(lambda x: jnp.sum(noisy(x, key)), rules))(X)
    assert relative_error(actual, jax.grad(plain)(X)) < 0.02


def test_a_barrier_around_a_reference_and_a_value_returns_the_value():
    def fun(ref, x):
        ref[...] = x @ x
        _, y = lax.optimization_barrier((ref, x + 1))
        return ref[...] @ y

    ref = jax.new_ref(jnp.zeros((4, 4)))
    try:
        jax.jit(fun)(ref, X)
    except NotImplementedError:
        pytest.skip("This JAX has no barrier for references.")
    actual = jax.jit(autocast(fun))(ref, X)
    assert relative_error(actual, X @ X @ (X + 1)) < 0.02


def test_a_mapped_jvp_rule_gets_and_returns_zeros_without_numbers():
    zero, seen = jax.custom_derivatives.SymbolicZero, list[bool]()

    @jax.custom_jvp
    def second(x, y):
        return y

    def rule(primals, tangents):
        (x, y), (_, y_dot) = primals, tangents
        seen.append(isinstance(y_dot, zero))
        return second(x, y), y_dot

    second.defjvp(rule, symbolic_zeros=True)
    fun = jax.vmap(lambda x: second(x, second(x, 1.0)))
    tangent = jax.jvp(autocast(fun), (X,), (X,))[1]
    np.testing.assert_array_equal(tangent, jnp.zeros(4))
    assert seen
    assert all(seen)
