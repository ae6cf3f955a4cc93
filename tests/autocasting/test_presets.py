"""Presets, and rules of the user for ops, scopes and dtypes."""

import types
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    NEVER_LOW,
    compiled,
    floats,
    live_equations,
    live_equations_of,
    mostly_slow,
    one_of_each,
    ops,
    products,
    relative_error,
)
from programs import (
    BLOCK,
    BLOCK_PARAMS,
    PROGRAMS,
    W,
    X,
    each_program,
    gradient,
    in_float32,
    traced,
)

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules, warn_of_emulation
from jmp_lite.insight.explanation import explain

LOW, FULL = "bfloat16", "float32"
PRESETS = ["O1", "O2", "O3", "torch"]
# O3 runs sums and exponentials in 16 bits on purpose.
TOLERANCE = {"O3": 0.3}


def test_float16_on_a_tpu_is_warned_of():
    with pytest.warns(UserWarning, match="A TPU emulates float16"):
        warn_of_emulation(types.SimpleNamespace(platform="tpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulation(types.SimpleNamespace(platform="gpu"))
        jax.jit(autocast(jnp.tanh, compute_dtype="float16"))(1.0)


@pytest.mark.parametrize("rules", PRESETS)
@each_program
def test_every_preset_keeps_the_types_of_every_program_and_lowers_products(name, rules):
    """Structure and dtypes: tracing is enough."""
    fun, args = PROGRAMS[name]
    expected, types = traced(name, "grad")
    low = gradient(autocast(fun, rules))
    actual, types_found = jax.make_jaxpr(low, return_shape=True)(*args)
    chex.assert_trees_all_equal_structs(types_found, types)
    chex.assert_trees_all_equal_shapes_and_dtypes(types_found, types)
    eqns = live_equations_of(actual)
    n_products = products(live_equations_of(expected)).total()
    assert products(eqns) == ({(LOW,) * 3: n_products} if n_products else {})
    low_ops = {e.primitive.name for e in eqns if e.outvars[0].aval.dtype == LOW}
    assert rules == "O3" or not low_ops & NEVER_LOW


# Those with an op that a preset may spoil: a sum, an exponential, a norm, a mask.
DELICATE = [
    *("softmax_attention", "additive_mask", "cross_entropy", "variance", "cumulative"),
    *("scanned_layers_with_an_auxiliary_loss", "smooth_functions", "pooling"),
    *("a linen block", "a linen LSTM"),
]


@pytest.mark.parametrize(
    ("name", "rules"),
    mostly_slow(
        [
            *((name, rules) for name in DELICATE for rules in ("O2", "O3")),
            *(("a linen block", rules) for rules in ("O1", "torch")),
        ],
        [
            *one_of_each(DELICATE[:5], ("O2", "O3")),
            *(("a linen block", rules) for rules in PRESETS),
        ],
    ),
)
def test_every_preset_keeps_the_gradients_of_delicate_programs(name, rules):
    fun, args = PROGRAMS[name]
    actual = jax.jit(gradient(autocast(fun, rules)))(*args)
    error = relative_error(floats(actual), floats(in_float32(name, "grad")))
    assert error < TOLERANCE.get(rules, 0.06)


@pytest.mark.parametrize("rules", ["mixed", "O1", "torch"])
def test_positions_keep_their_digits_but_where_everything_is_low(rules):
    fun, args = PROGRAMS["positions"]
    assert relative_error(autocast(fun, rules)(*args), fun(*args)) < 0.02
    assert relative_error(autocast(fun, "O2")(*args), fun(*args)) > 0.1


def precisions(rules):
    """Returns the precision of each op of a small network."""

    def fun(x, w, b):
        with jax.named_scope("LayerNorm_0"):
            x = x / jnp.sqrt(jnp.mean(x**2) + 1e-6)
        return jnp.exp(jnp.abs(x @ w + b) @ w) * 2.0 @ w

    return {
        row.op: row.precision
        for row in explain(fun, rules)(X, W, W[0]).rows
        if "LayerNorm" not in row.scope
    }


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("mixed", {"dot_general": LOW, "add": LOW, "abs": LOW, "exp": FULL}),
        ("O0", {"dot_general": FULL, "add": FULL, "abs": FULL, "exp": FULL}),
        ("O1", {"dot_general": LOW, "add": FULL, "abs": FULL, "exp": FULL}),
        ("O2", {"dot_general": LOW, "add": LOW, "abs": LOW, "exp": FULL}),
        ("O3", {"dot_general": LOW, "add": LOW, "abs": LOW, "exp": LOW, "mul": LOW}),
        # A float32 bias widens, as ordinary promotion would.
        ("torch", {"dot_general": LOW, "add": FULL, "abs": FULL, "exp": FULL}),
        ("allow_mix_precision", {"dot_general": LOW, "add": LOW, "exp": FULL}),
        ("must_keep_origin_dtype", {"dot_general": FULL}),
        ("allow_fp32_to_fp16", {"dot_general": FULL, "add": FULL}),
        ("force_fp16", {"dot_general": "float16", "exp": "float16"}),
    ],
)
def test_a_preset_runs_each_op_in_the_precision_that_it_names(rules, expected):
    found = precisions(rules)
    assert {op: found[op] for op in expected} == expected


@pytest.mark.parametrize("rules", ["mixed", "O2"])
def test_norms_are_float32_inside_and_not_in_o3(rules):
    def precisions(rules, *ops):
        rows = explain(BLOCK.apply, rules)(BLOCK_PARAMS, X).rows
        return {r.precision for r in rows if "Norm" in r.scope and r.op in ops}

    assert precisions(rules, "reduce_sum", "square", "sub", "rsqrt") == {FULL}
    assert LOW in precisions("O3", "reduce_sum", "square", "sub", "rsqrt")


def test_in_torch_numbers_do_not_widen_and_arrays_do():
    for other, precision in ((1.0, LOW), (W[0], FULL), (jnp.float32(1), FULL)):
        fun = lambda x, other=other: jnp.tanh(x @ W + other) @ W
        rows = explain(fun, "torch")(X).rows
        assert [r.precision for r in rows if r.op == "tanh"] == [precision]


def test_ops_are_edited_one_by_one():
    fun = lambda x: jnp.tanh(jnp.sin(jnp.exp(x @ W) @ W) @ W) @ W
    for edit, op, dtype in (
        (lambda r: r.full("tanh"), "tanh", FULL),
        (lambda r: r.low("sin"), "sin", LOW),
        (lambda r: r.full("dot_general"), "dot_general", FULL),
        (lambda r: r.keep("dot_general"), "dot_general", FULL),
        (lambda r: r.follow("exp"), "exp", LOW),
        (lambda r: r.widest("exp"), "exp", LOW),
    ):
        rules = edit(get_rules("mixed"))
        assert ops(autocast(fun, rules), X)[op] == {dtype}, (op, dtype)


def test_a_scope_rule_reaches_a_flax_module_and_its_backward_pass():
    rules = get_rules("mixed").scope("Dense_1", "full")
    loss = lambda p, x: jnp.sum(BLOCK.apply(p, x))
    found = products(live_equations(jax.grad(autocast(loss, rules)), BLOCK_PARAMS, X))
    # Dense_1 is the first of two: forward, and one of its two backward products is for
    # an input that is not differentiated.
    assert found[(LOW,) * 3] == 3
    assert found[(FULL,) * 3] == 3
    every = products(live_equations(jax.grad(autocast(loss)), BLOCK_PARAMS, X))
    assert set(every) == {(LOW,) * 3}


def test_a_scope_of_the_user_comes_before_the_preset_s_norms():
    rules = get_rules("mixed").scope("LayerNorm_0", "low")
    rows = explain(BLOCK.apply, rules)(BLOCK_PARAMS, X).rows
    assert {
        r.precision for r in rows if "LayerNorm_0" in r.scope and r.op == "mul"
    } == {LOW}
    assert {r.precision for r in rows if "RMSNorm_0" in r.scope} == {FULL}


def test_half_is_the_device_s_half_dtype_at_each_call():
    fun = autocast(lambda x: x @ x, compute_dtype="half")
    assert products(live_equations(fun, W)) == {("bfloat16",) * 3: 1}
    rows = explain(lambda x: x @ x, compute_dtype="half")(W).rows
    assert [row.precision for row in rows] == ["bfloat16"]


def test_with_float32_as_the_compute_dtype_nothing_changes():
    fun = lambda x: jnp.tanh(x @ W)
    low = autocast(fun, compute_dtype="float32")
    np.testing.assert_array_equal(compiled(low, X), compiled(fun, X))
