import dataclasses
import functools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    NEVER_LOW,
    TOLERANCE,
    compiled,
    floats,
    live_equations,
    live_equations_of,
    mostly_slow,
    ops,
    products,
    relative_error,
)
from jax import lax
from jax.experimental import hijax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import (
    BLOCK,
    BLOCK_PARAMS,
    FORWARD,
    LAYERS,
    PROGRAMS,
    QUICK,
    REVERSE_ONLY,
    TRANSFORMS,
    W,
    X,
    each_program,
    in_float32,
    traced,
)

import jmp_lite.nnx
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain

# ------------------------------------------------------------------------ the battery


BATTERY = [
    (name, transform, dtype)
    for name in PROGRAMS
    for transform in TRANSFORMS
    if transform != "eager"  # Traced, it is the same as jit.
    for dtype in DTYPES
    if not (name in REVERSE_ONLY and transform in FORWARD)
    and (dtype == "bfloat16" or transform == "grad")
]


@pytest.mark.parametrize(
    ("name", "transform", "dtype"),
    mostly_slow(BATTERY, [b for b in BATTERY if b[0] in QUICK or b[1] == "grad"]),
)
def test_a_program_keeps_its_types_and_multiplies_in_16_bits(name, transform, dtype):
    """Structure, shapes and dtypes: tracing is enough."""
    fun, args = PROGRAMS[name]
    low = TRANSFORMS[transform](autocast(fun, compute_dtype=dtype))
    expected, types = traced(name, transform)
    actual, types_found = jax.make_jaxpr(low, return_shape=True)(*args)
    assert_same_types(types_found, types)
    eqns = live_equations_of(actual)
    assert set(products(eqns)) <= {(dtype,) * 3}
    assert products(eqns).total() == products(live_equations_of(expected)).total()
    for eqn in eqns:
        # Outside of autocast, vmap broadcasts what it does not map, in the dtype that
        # it was cast to: autocast does not see the sum that is the transpose of that.
        is_vmap_s = transform == "grad of vmap" and eqn.primitive.name == "reduce_sum"
        if eqn.primitive.name in NEVER_LOW and not is_vmap_s:
            assert eqn.outvars[0].aval.dtype != dtype, eqn


def assert_same_types(actual, expected):
    """Asserts that two pytrees agree in structure, shapes, dtypes and weak types."""
    chex.assert_trees_all_equal_structs(actual, expected)
    types = [
        [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
        for tree in (actual, expected)
    ]
    assert types[0] == types[1]


OP_BY_OP = ("recurrent", "branches", "custom_vjp_in_a_scan", "custom_jvp", "sharded")
# Executed: each program op by op and under grad, and under each other transform those
# that hold a derivative rule or a loop.
EXECUTED = [
    *((name, transform) for name in PROGRAMS for transform in ("eager", "grad")),
    *(
        (name, transform)
        for name in ("custom_jvp", "custom_vjp_in_a_scan", "recurrent")
        for transform in ("jvp", "grad of vmap", "grad of scan", "remat", "linearize")
        if not (name in REVERSE_ONLY and transform in FORWARD)
    ),
]


@pytest.mark.parametrize(
    ("name", "transform"),
    mostly_slow(EXECUTED, [e for e in EXECUTED if e[0] in OP_BY_OP or e[1] != "eager"]),
)
def test_a_program_keeps_its_values(name, transform):
    fun, args = PROGRAMS[name]
    low = TRANSFORMS[transform](autocast(fun))
    low = low if transform == "eager" else jax.jit(low)
    actual, expected = low(*args), in_float32(name, transform)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    error = relative_error(floats(actual), floats(expected))
    assert error < TOLERANCE["bfloat16"]


# --------------------------------------------------------------------------- the laws


@functools.cache
def in_16_bits(name):
    """The results of a program under autocast."""
    fun, args = PROGRAMS[name]
    return compiled(autocast(fun), *args)


def decisions(fun, *args):
    """Returns the ops with their dtypes, in order, without the calls of jit."""
    return [
        (eqn.primitive.name, *(str(v.aval) for v in (*eqn.invars, *eqn.outvars)))
        for eqn in live_equations(fun, *args)
        if eqn.primitive.name != "jit"
    ]


@each_program
def test_wrapping_a_program_in_jit_changes_no_decision_and_no_bit(name):
    fun, args = PROGRAMS[name]
    plain, wrapped = autocast(fun), autocast(jax.jit(fun))
    assert decisions(plain, *args) == decisions(wrapped, *args)
    chex.assert_trees_all_equal(in_16_bits(name), compiled(wrapped, *args))


@pytest.mark.parametrize("name", PROGRAMS)
def test_o0_is_the_identity(name):
    fun, args = PROGRAMS[name]
    for rules in ("O0", get_rules("O0")):
        assert decisions(autocast(fun, rules), *args) == decisions(fun, *args)


@each_program
def test_autocast_of_an_autocast_function_changes_nothing(name):
    fun, args = PROGRAMS[name]
    once, twice = (
        live_equations(f, *args) for f in (autocast(fun), autocast(autocast(fun)))
    )
    assert products(once) == products(twice)
    result = compiled(autocast(autocast(fun)), *args)
    chex.assert_trees_all_equal(in_16_bits(name), result)


def test_returning_one_more_value_changes_no_other_result():
    def hidden_states(x, layers):
        states = [x]
        for w in layers:
            states.append(jnp.tanh(states[-1] @ w))
        return states

    last = compiled(autocast(lambda x, w: hidden_states(x, w)[-1]), X, LAYERS)
    every = compiled(autocast(hidden_states), X, LAYERS)
    chex.assert_trees_all_equal(last, every[-1])


SMALL = st.integers(-2, 2)
STEPS = {
    "matmul": lambda h, w: jnp.clip(h @ w, -4, 4),
    "add": lambda h, w: jnp.clip(h + w[0], -4, 4),
    "relu": lambda h, w: jax.nn.relu(h),
    "where": lambda h, w: jnp.where(h > 0, h, 0),
    "double": lambda h, w: jnp.clip(2 * h, -4, 4),
    "transpose": lambda h, w: h.T,
    "sum": lambda h, w: jnp.clip(h - h.sum(0), -4, 4),
    "maximum": lambda h, w: jnp.maximum(h, h.max(1, keepdims=True) - 1),
    "square": lambda h, w: jnp.clip(h**2 - 1, -4, 4),
}
NESTS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda h, w: lax.scan(lambda h, _: (f(h, w), None), h, length=2)[0]
    ),
    "cond": lambda f: lambda h, w: lax.cond(h.sum() > 0, f, lambda h, w: h + 1, h, w),
    "fori": lambda f: lambda h, w: lax.fori_loop(0, 2, lambda i, h: f(h, w), h),
    "vmap": lambda f: lambda h, w: jax.vmap(f, (0, None))(h[None], w)[0],
    "while": lambda f: (
        lambda h, w: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], w)), (0, h)
        )[1]
    ),
    "switch": lambda f: lambda h, w: lax.switch(1, [lambda h, w: h, f], h, w),
    "custom_jvp": lambda f: _with_a_jvp_rule(f),
    "custom_vjp": lambda f: _with_a_vjp_rule(f),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=Mesh(np.array(jax.devices()[:1]), ("i",)), in_specs=P(), out_specs=P()
    ),
    "jvp": lambda f: lambda h, w: jax.jvp(lambda h: f(h, w), (h,), (h,))[0],
}


def _with_a_jvp_rule(f):
    rule = jax.custom_jvp(lambda h, w: f(h, w))
    rule.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return rule


def _with_a_vjp_rule(f):
    rule = jax.custom_vjp(lambda h, w: f(h, w))
    rule.defvjp(lambda h, w: (f(h, w), (h, w)), lambda kept, g: jax.vjp(f, *kept)[1](g))
    return rule


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(sorted(NESTS)), st.sampled_from(sorted(STEPS))),
        min_size=1,
        max_size=5,
    ),
    st.lists(SMALL, min_size=18, max_size=18),
    st.sampled_from(["bfloat16", "float16"]),
    st.sampled_from(["mixed", "O1", "O2", "torch"]),
)
def test_a_program_on_small_integers_gives_float32_s_results_bit_for_bit(
    steps, numbers, dtype, rules
):
    h, w = np.array(numbers, np.float32).reshape(2, 3, 3)

    def program(h, w):
        for nest, step in steps:
            h = NESTS[nest](STEPS[step])(h, w)
        return h

    low = autocast(program, rules, compute_dtype=dtype)
    both = lambda h, w: (low(h, w), program(h, w))
    np.testing.assert_array_equal(*compiled(both, h, w))
    # What the transform does not reach forward, it reaches backward, where one step
    # leaves numbers small enough.
    if len(steps) == 1 and steps[0][0] not in ("fori", "while", "jvp"):
        total = lambda f: lambda h, w: jnp.sum(f(h, w))
        grads = [jax.grad(total(f), (0, 1)) for f in (low, program)]
        actual, expected = compiled(lambda h, w: [grad(h, w) for grad in grads], h, w)
        chex.assert_trees_all_equal(actual, expected)


# --------------------------------------------------------------- single decisions


def test_the_stream_stays_low_and_norms_are_float32_inside():
    found = ops(autocast(lambda p, x: BLOCK.apply(p, x @ W) @ W), BLOCK_PARAMS, X)
    assert found["dot_general"] == {"bfloat16"}
    assert found["rsqrt"] == {"float32"}
    assert found["integer_pow"] == {"bfloat16"}
    norm_inputs = [
        eqn.invars[0].aval.dtype
        for eqn in live_equations(autocast(BLOCK.apply), BLOCK_PARAMS, X)
        if eqn.primitive.name == "square"
    ]
    assert set(map(str, norm_inputs)) == {"float32"}


def test_a_bias_does_not_widen_the_stream_and_its_gradient_adds_up_in_float32():
    def loss(b, x):
        return jnp.sum(jax.nn.relu(x @ W + b) @ W)

    x = jax.random.normal(jax.random.key(5), (4096, 8))
    assert ops(autocast(loss), W[0], x)["add"] == {"bfloat16"}
    actual, expected = (jax.grad(f)(W[0], x) for f in (autocast(loss), loss))
    assert relative_error(actual, expected) < 0.005
    assert ops(jax.grad(autocast(loss)), W[0], x)["reduce_sum"] == {"float32"}


def test_a_weight_reused_over_a_scan_adds_up_its_gradient_in_float32():
    def loss(w, xs):
        return lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, xs)[0]

    xs = jnp.full((2048, 1, 8), 0.01)
    actual, expected = (jax.grad(f)(W, xs) for f in (autocast(loss), loss))
    assert relative_error(actual, expected) < 0.005


def test_a_running_sum_that_starts_at_a_dot_does_not_stall():
    def total(x, w):
        step = lambda c, _: (c + 0.5, None)
        return lax.scan(step, (x @ w)[0, 0], length=2048)[0]

    actual, expected = autocast(total)(X, W), total(X, W)
    np.testing.assert_allclose(actual, expected, rtol=1e-3)


def test_sgd_inside_a_scan_moves_its_weights():
    def train(w, xs):
        def step(w, x):
            grads = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
            return w - 1e-4 * grads, None

        return lax.scan(step, w, xs)[0]

    xs = jnp.ones((200, 4, 8))
    moved, expected = autocast(train)(W, xs) - W, train(W, xs) - W
    assert relative_error(moved, expected) < 0.05


def test_a_loop_to_a_tolerance_takes_as_many_steps_as_in_float32():
    def fixed_point(x):
        def step(state):
            n, _, x = state
            return n + 1, x, jnp.cos(x @ W * 0.1)

        def go_on(state):
            return jnp.max(jnp.abs(state[1] - state[2])) > 1e-5

        return lax.while_loop(go_on, step, (0, x, x + 1))[0]

    assert int(autocast(fixed_point)(X)) == int(fixed_point(X))


def test_large_masks_small_epsilons_and_far_positions_survive_float16():
    def attention(x):
        scores = jnp.where(jnp.zeros((4, 4), bool), x @ x.T, -1e9)
        masked = jax.nn.softmax(scores) @ x
        safe = x / (jnp.sqrt((x * 0) ** 2) + 1e-8)
        return masked, jnp.isfinite(safe), jnp.arange(1000.0)[:, None] @ x[:1, :1]

    masked, safe, positions = autocast(attention, compute_dtype="float16")(X)
    assert np.all(np.isfinite(masked))
    np.testing.assert_array_equal(safe, attention(X)[1])
    assert np.all(np.isfinite(positions))
    clipped = lambda p: jnp.log(jnp.clip(p, 1e-7, 1 - 1e-7))
    assert np.isfinite(autocast(clipped)(jnp.float32(1.0)))


def test_random_bits_are_those_of_float32():
    def dropout(key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return keep, jnp.where(keep, x @ W, 0), jax.random.normal(key, (3,))

    key = jax.random.key(3)
    actual, expected = autocast(dropout)(key, X), dropout(key, X)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[2], expected[2])


def test_only_float32_is_changed():
    half = jnp.ones((2, 2), jnp.float16)

    def program(tree):
        return jax.tree.map(lambda x: x + x, tree) | {"dot": half @ half}

    tree = {"int": jnp.arange(3), "complex": jnp.ones(2, jnp.complex64)}
    actual = autocast(program)(tree)
    chex.assert_trees_all_equal(actual, program(tree))
    found = live_equations(autocast(program), tree)
    assert products(found) == {("float16",) * 3: 1}


def test_arguments_that_are_no_arrays_reach_the_function_as_they_are():
    seen = []

    def program(x, flag, name, scale, *, activation, nothing=None):
        seen.append((flag, name, scale, activation, nothing))
        return activation(x @ x.T) * scale if flag else x

    out = autocast(program)(X, True, "name", 2.0, activation=jnp.tanh)
    assert seen == [(True, "name", 2.0, jnp.tanh, None)]
    assert out.dtype == np.float32


def test_autocast_is_a_decorator_with_and_without_arguments():
    @autocast
    def plain(x):
        "Doc."
        return x @ x

    @autocast(rules="O2", compute_dtype="float16")
    def chosen(x):
        return jnp.tanh(x + x) @ x

    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    assert products(live_equations(plain, W)) == {("bfloat16",) * 3: 1}
    assert ops(chosen, W)["tanh"] == {"float16"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "is_low"),
    [("BF16_BF16_F32", True), ("F16_F16_F32", True), ("BF16_BF16_F32_X3", False)],
)
def test_a_dot_algorithm_with_16_bit_operands_does_not_keep_a_dot_in_float32(
    name, is_low, dtype
):
    algorithm = lax.DotAlgorithmPreset[name]
    fun = lambda x: jnp.matmul(x, x, precision=algorithm)
    x = jnp.ones((4, 4))
    expected = (dtype if is_low else "float32",) * 3
    low = autocast(fun, compute_dtype=dtype)
    assert products(live_equations(low, x)) == {expected: 1}


def test_bad_rules_are_an_error_when_the_function_is_made():
    with pytest.raises(ValueError, match=r"Unknown preset 'mixde'.*'mixed'"):
        autocast(jnp.sin, "mixde")
    with pytest.raises(ValueError, match="compute_dtype='float16'"):
        autocast(jnp.sin, "float16")
    with pytest.raises(TypeError, match="Pass a dtype as compute_dtype"):
        autocast(jnp.sin, jnp.float16)
    with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
        autocast(jnp.sin, compute_dtype="bf61")
    for dtype in ("float8_e4m3fn", "float4_e2m1fn", "float64"):
        for refuses in (
            lambda dtype=dtype: autocast(jnp.sin, compute_dtype=dtype),
            lambda dtype=dtype: get_rules("mixed", dtype),
        ):
            with pytest.raises(ValueError, match=f"dtype of 16 bits.*got {dtype}"):
                refuses()


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (3, "Expected a function, got int: 3"),
        ("O2", "Expected a function, got str: 'O2'. Pass rules by keyword: rules='O2'"),
        (get_rules("O2"), "Pass rules by keyword: rules="),
    ],
)
def test_an_argument_that_is_no_function_is_an_error_when_it_is_passed(fun, message):
    for transform in (
        *(autocast, explain),
        *(jmp_lite.nnx.autocast, jmp_lite.nnx.explain),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            transform(fun)


def test_a_dot_that_asks_for_the_highest_precision_stays_float32():
    dot = lambda x: jnp.dot(x, x, precision="highest")
    assert products(live_equations(autocast(dot), W)) == {("float32",) * 3: 1}
    with jax.default_matmul_precision("tensorfloat32"):
        plain = lambda x: x @ x
        assert products(live_equations(autocast(plain), W)) == {("bfloat16",) * 3: 1}


def test_a_block_that_is_called_often_is_lowered_as_often_as_in_float32():
    block = jax.jit(lambda x, w: jnp.tanh(x @ w) + x)

    def model(x):
        for _ in range(24):
            x = block(x, W)
        return x

    def functions(fun):
        return jax.jit(fun).lower(X).as_text().count("func.func")

    # Once for the first, whose x is an argument, once for the last, once between.
    assert functions(autocast(model)) <= functions(model) + 3


def test_a_value_that_only_float32_ops_or_outputs_read_is_float32():
    assert ops(autocast(lambda x: jax.nn.softmax(x @ W) @ W), X)["sub"] == {"float32"}
    assert ops(autocast(lambda x, b: x @ W + b), X, W[0])["add"] == {"float32"}
    assert ops(autocast(lambda x, b: (x @ W + b) @ W), X, W[0])["add"] == {"bfloat16"}


def test_a_low_value_that_is_broadcast_adds_up_its_gradient_in_float32():
    def loss(x):
        return jnp.sum(jnp.broadcast_to((x @ W)[0], (64, 8)) @ W)

    assert ops(jax.grad(autocast(loss)), X)["reduce_sum"] == {"float32"}


def test_sine_and_cosine_are_float32_and_what_follows_is_not():
    found = ops(autocast(lambda x: (jnp.sin(x @ W @ W) + x @ W) @ W), X)
    assert found["sin"] == {"float32"}
    assert found["add"] == {"bfloat16"}
    assert found["dot_general"] == {"bfloat16"}


def test_a_weight_is_cast_at_each_use():
    loss = lambda w: jnp.sum((X @ w) @ w)
    sums = [
        str(eqn.outvars[0].aval)
        for eqn in live_equations(jax.grad(autocast(loss)), W)
        if eqn.primitive.name == "add_any"
    ]
    assert sums == ["float32[8,8]"]


def test_numbers_that_become_one_in_16_bits_keep_an_op_in_float32():
    found = ops(autocast(lambda x: jnp.minimum(x @ W, 1 - 1e-7) @ W), X)
    assert found["min"] == {"float32"}
    found = ops(autocast(lambda x: jnp.minimum(x @ W, 0.5) @ W), X)
    assert found["min"] == {"bfloat16"}


def test_a_mask_of_booleans_widens_nothing():
    fun = lambda x: ((x > 0).astype(np.float32) * (x @ W)) @ W
    assert ops(autocast(fun), X)["mul"] == {"bfloat16"}


def read_by_products(x):
    h = jnp.exp(x)
    return h @ W, h @ -W, h @ W.T


def added_to_16_bits(x):
    angles = jnp.sin(x * jnp.arange(32.0).reshape(X.shape))
    return (jnp.tanh(W[:4] @ W) + angles) @ W, (jnp.tanh(W[4:] @ W) + angles) @ W


@pytest.mark.parametrize("fun", [read_by_products, added_to_16_bits])
def test_a_computed_value_is_cast_once_for_all_its_uses(fun):
    eqns = live_equations(autocast(fun), X)
    made = [e.outvars[0] for e in eqns if e.primitive.name in ("exp", "sin")]
    casts = [e for e in eqns if e.primitive.name == "convert_element_type"]
    assert [e.invars[0] for e in casts if e.invars[0] in made] == made


def test_an_operand_that_is_raised_for_a_derivative_is_kept_in_16_bits():
    _, backward = jax.vjp(autocast(lambda x: jax.lax.erf(x @ W) @ W), X)
    given = {id(X), id(W)}
    kept = [x.dtype for x in jax.tree.leaves(backward) if id(x) not in given]
    assert set(map(str, kept)) == {"bfloat16"}


def test_a_16_bit_product_that_the_user_adds_up_in_float32_stays_so():
    def fun(x):
        x, w = (y.astype(jnp.bfloat16) for y in (x, W))
        return lax.dot(x, w, preferred_element_type=np.float32)

    assert products(live_equations(autocast(fun), X)) == {
        ("bfloat16", "bfloat16", "float32"): 1
    }


# -------------------------------------------------------- what went wrong once


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_of_16_bits_are_multiplied_in_them_and_widen_nothing(dtype):
    def loss(params, x):
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(x @ W)

    def kept(params):
        """Returns the bytes of the float32 residuals, without the arguments."""
        _, backward = jax.vjp(autocast(loss, compute_dtype=dtype), params, X)
        given = set(map(id, jax.tree.leaves((params, X))))
        kept = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in given}
        return sum(x.nbytes for x in kept.values() if x.dtype == np.float32)

    full = [(W, W[0])] * 3
    low = jax.tree.map(lambda p: p.astype(dtype), full)
    with jax.numpy_dtype_promotion("standard"):
        fun = jax.grad(autocast(loss, compute_dtype=dtype))
        assert set(products(live_equations(fun, low, X))) == {(dtype,) * 3}
        assert jax.tree.map(lambda g: str(g.dtype), fun(low, X)) == [(dtype, dtype)] * 3
        assert kept(low) <= kept(full)
        # One of another 16-bit dtype is cast at its use, as a float32 one.
        other = DTYPES[dtype == DTYPES[0]]
        mixed = autocast(lambda x, w: x @ w, compute_dtype=other)
        assert set(products(live_equations(mixed, X, low[0][0]))) == {(other,) * 3}


# A constant of the program; it allows nothing in the first row.
ADDITIVE_MASK = jnp.where(jnp.tril(jnp.ones((4, 4), bool), -1), 0, -1e9)


@pytest.mark.parametrize(
    ("rules", "dtype"),
    mostly_slow(
        [
            *((rules, "float16") for rules in ("mixed", "O1", "O2", "O3", "torch")),
            ("mixed", "bfloat16"),
        ],
        [("mixed", "float16"), ("O3", "float16")],
    ),
)
@pytest.mark.parametrize(
    "mask",
    [
        lambda s, m: s + jnp.where(m, 0.0, jnp.finfo(jnp.float32).min),
        lambda s, m: s + lax.select(m, s * 0, s * 0 + jnp.finfo(jnp.float32).min),
        lambda s, m: jnp.where(m, s, jnp.finfo(jnp.float32).min),
        lambda s, m: jnp.where(m, s, jnp.finfo(s.dtype).min / 2),
        lambda s, m: jnp.where(m, s, -1e9),
        lambda s, m: jnp.where(m, s, -100000),
        lambda s, m: jnp.where(m, s, -70000.0),
        lambda s, m: s + (1 - m.astype(np.float32)) * -1e9,
        lambda s, m: jnp.clip(jnp.where(m, s, -(2**30)), -(2**30), 100),
        lambda s, m: s + ADDITIVE_MASK,
    ],
)
def test_masks_of_every_kind_leave_no_nan_in_a_fully_masked_row(mask, rules, dtype):
    allowed = jnp.tril(jnp.ones((4, 4), bool), -1)  # None in the first row.

    def attention(x):
        return jax.nn.softmax(mask((x @ W) @ x.T, allowed)) @ x

    def loss(x):
        out = autocast(attention, rules, compute_dtype=dtype)(x)
        return out.sum(), out

    gradient, out = compiled(jax.grad(loss, has_aux=True), X)
    assert np.all(np.isfinite(out))
    assert np.all(np.isfinite(gradient))
    assert relative_error(out, attention(X)) < TOLERANCE[dtype]


def test_the_gradient_of_a_gather_adds_up_in_float32():
    weights = jnp.linspace(0, 1, 4096)[:, None]
    rows = jnp.zeros(4096, int)
    loss = lambda x: jnp.sum(jnp.tanh((x @ W)[rows] @ W) * weights)
    actual, expected = jax.grad(autocast(loss))(X), jax.grad(loss)(X)
    assert relative_error(actual, expected) < 0.02


def test_the_gradient_of_a_maximum_counts_its_ties_in_float32():
    loss = lambda x: jnp.sum(jnp.max(x @ W[:, :2], axis=0) @ W[:2])
    x = jnp.ones((70000, 8))
    low = autocast(loss, compute_dtype="float16")
    assert relative_error(jax.grad(low)(x), jax.grad(loss)(x)) < 0.02


def test_a_default_dot_algorithm_does_not_switch_autocast_off():
    for name in ("BF16_BF16_F32", "TF32_TF32_F32", "highest", "float32"):
        with jax.default_matmul_precision(name):
            found = products(live_equations(autocast(lambda x: x @ x), W))
            assert found == {("bfloat16",) * 3: 1}, name
    asked = lambda x: jnp.dot(x, x, precision="TF32_TF32_F32")
    assert products(live_equations(autocast(asked), W)) == {("float32",) * 3: 1}


@pytest.mark.parametrize("op", ["scatter_add", "scatter_sub", "scatter_mul"])
def test_scatters_have_a_low_form(op):
    dimensions = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def fun(x):
        y = x @ W
        return getattr(lax, op)(y, jnp.array([[0]]), y[:1], dimensions)

    actual, expected = autocast(fun, "O3")(X), fun(X)
    assert relative_error(actual, expected) < 0.03


def test_two_layers_of_one_name_are_decided_separately():
    def norm(x):
        with jax.named_scope("layer_norm"):
            return x / jnp.sqrt(jnp.mean(x**2))

    def fun(x, second):
        a, b = norm(x), second(x @ W)
        return jnp.tanh(a), jnp.tanh(b) @ W, jnp.tanh(a) @ W

    plain, wrapped = (
        compiled(autocast(lambda x, f=f: fun(x, f)), X) for f in (norm, jax.jit(norm))
    )
    chex.assert_trees_all_equal(plain, wrapped)


@pytest.mark.parametrize(
    "angles",
    [
        lambda pos, rate: jnp.einsum("i,j->ij", pos, rate),
        lambda pos, rate: jnp.outer(pos, rate),
        lambda pos, rate: pos[:, None] * rate,
        lambda pos, rate: pos[:, None] @ rate[None],
        lambda pos, rate: jnp.einsum("i,j->ij", pos / 2, rate),
    ],
)
def test_rotary_positions_keep_their_digits(angles):
    def rotate(x):
        pos = jnp.arange(1000, 1004).astype(np.float32)
        rate = 1 / 100 ** (jnp.arange(0, 8, 2) / 8)
        a = angles(pos, rate)
        one, two = jnp.split(x @ W, 2, axis=-1)
        return jnp.concatenate(
            [one * jnp.cos(a) - two * jnp.sin(a), one * jnp.sin(a) + two * jnp.cos(a)],
            axis=-1,
        )

    for dtype in DTYPES:
        actual = autocast(rotate, compute_dtype=dtype)(X)
        assert relative_error(actual, rotate(X)) < TOLERANCE[dtype]


def test_scaled_positions_end_where_16_bits_end():
    def places(x, w):
        return (x @ w) @ (w * (jnp.arange(8).astype(jnp.float32) * 20000.0))

    actual = autocast(places, compute_dtype="float16")(jnp.ones((4, 8)), jnp.eye(8))
    largest = float(jnp.finfo(jnp.float16).max)
    expected = [0, 20000, 40000, 60000, *[largest] * 4]
    np.testing.assert_allclose(actual[0], expected)


@pytest.mark.parametrize("rules", ["mixed", "O0"])
def test_results_are_arrays_of_the_types_that_were_traced_weak_ones_too(rules):
    def fun(x, weak):
        constants = jnp.float32(0.5), 3, 0.25, np.float32(2), np.ones(2, np.float32)
        return x @ W, *constants, weak * 2, weak.astype(int), x

    args = X, jnp.asarray(1.5)
    actual, expected = autocast(fun, rules)(*args), jax.jit(fun)(*args)
    for one, other in zip(actual, expected, strict=True):
        assert isinstance(one, jax.Array)
        assert jax.typeof(one) == jax.typeof(other)


@pytest.mark.parametrize("rules", ["mixed", "O0"])
def test_results_that_are_arguments_are_arrays_in_jvp_too(rules):
    results = jax.jvp(autocast(jnp.asarray, rules), (1.0,), (2.0,))
    for one, other in zip(results, jax.jvp(jnp.asarray, (1.0,), (2.0,)), strict=True):
        assert isinstance(one, jax.Array)
        assert one == other
        assert jax.typeof(one) == jax.typeof(other)


class Pair:
    """A value that is no array, of a type of its own."""

    def __init__(self, *arrays):
        self.arrays = arrays


@dataclasses.dataclass(frozen=True)
class PairType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        return 2 * [jax.core.ShapedArray(self.shape, jnp.dtype("float32"))]

    def lower_val(self, pair):
        return list(pair.arrays)

    def raise_val(self, *arrays):
        return Pair(*arrays)

    def to_tangent_aval(self):
        return self


hijax.register_hitype(Pair, lambda pair: PairType(pair.arrays[0].shape))


@pytest.mark.parametrize("rules", ["mixed", "O0"])
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
@pytest.mark.parametrize("make", [lambda: Pair(X, X), lambda: lax.create_token(0)])
def test_values_that_are_no_arrays_pass_as_they_are(make, jit, rules):
    value = make()

    def fun(x):
        return jax.jit(lambda value, x: (value, x @ W))(value, x)

    found, y = jit(autocast(fun, rules))(X)
    assert isinstance(found, type(value))
    for array in getattr(found, "arrays", ()):
        np.testing.assert_array_equal(array, X)
    assert relative_error(y, X @ W) < TOLERANCE["bfloat16"]


def test_tokens_order_what_a_function_computes():
    def fun(x):
        token = lax.after_all(lax.create_token(x), lax.create_token(x @ W))
        return token, x @ W

    _, y = autocast(fun)(X)
    assert relative_error(y, X @ W) < TOLERANCE["bfloat16"]


def test_arrays_that_jax_has_no_dtype_for_pass_as_they_are():
    seen = []

    def fun(x, *rest):
        seen.extend(rest)
        return x @ W

    rest = np.array(["a"]), np.array([None]), np.datetime64("2020-01-01")
    assert autocast(fun)(X, *rest).shape == (4, 8)
    assert all(one is other for one, other in zip(seen, rest, strict=True))
