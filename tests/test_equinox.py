"""Equinox's modules and its filtered transforms, under autocast."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from helpers import (
    DTYPES,
    live_equations,
    mostly_slow,
    one_of_each,
    products,
    relative_error,
)

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(0), (4, 8))
LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3


class Net(eqx.Module):
    """Modules, an activation among the leaves, and what is static."""

    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x):
        return self.head(x + self.mlp(self.norm(x)))


@pytest.fixture
def net():
    keys = jax.random.split(jax.random.key(1))
    mlp = eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=keys[0])
    return Net(eqx.nn.LayerNorm(8), mlp, eqx.nn.Linear(8, 3, key=keys[1]))


def loss_fn(net, x):
    return jnp.mean(jax.vmap(net)(x) ** 2)


@pytest.mark.parametrize("order", ["autocast inside", "autocast outside"])
def test_filtered_transforms_work_inside_and_outside(net, order):
    if order == "autocast inside":
        grad = eqx.filter_jit(eqx.filter_grad(jmp.autocast(loss_fn)))
    else:
        # A function of its own: Equinox rejects wrappers of its modules.
        def low_grad(net, x):
            return jmp.autocast(eqx.filter_grad(loss_fn))(net, x)

        grad = eqx.filter_jit(low_grad)
    actual, expected = grad(net, X), eqx.filter_jit(eqx.filter_grad(loss_fn))(net, X)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert {str(g.dtype) for g in jax.tree.leaves(actual)} == {"float32"}
    assert relative_error(actual, expected) < 0.03
    assert relative_error(actual, expected) > 0


def test_products_are_low_and_its_scopes_are_found(net):
    arrays, rest = eqx.partition(net, eqx.is_array)
    loss = lambda arrays, x: loss_fn(eqx.combine(arrays, rest), x)
    assert set(products(live_equations(jax.grad(jmp.autocast(loss)), arrays, X))) == {
        LOW
    }
    rows = jmp.explain(loss_fn)(net, X).rows
    norms = [row for row in rows if "LayerNorm" in row.scope]
    assert norms
    assert {row.precision for row in norms if row.op == "rsqrt"} == {"float32"}
    rules = jmp.get_rules("mixed").scope("eqx.nn.MLP", "full")
    found = [
        row.precision
        for row in jmp.explain(loss_fn, rules)(net, X).rows
        if row.op == "dot_general"
    ]
    assert sorted(found) == ["bfloat16", "float32", "float32"]


def test_a_training_step_in_float16(net):
    optimizer = jmp.loss_scaling(lenient(optax.adam(1e-2)))
    low = jmp.autocast(loss_fn, compute_dtype="float16")
    opt_state = optimizer.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit
    def step(net, opt_state, x):
        arrays, rest = eqx.partition(net, eqx.is_array)
        scale = jmp.get_loss_scale(opt_state)
        loss = lambda arrays: low(eqx.combine(arrays, rest), x)
        value, grads = jmp.value_and_grad(loss, loss_scale=scale)(arrays)
        updates, opt_state = optimizer.update(grads, opt_state, arrays)
        return eqx.apply_updates(net, updates), opt_state, value

    values = []
    for i in range(20):
        before = net
        bad = X.at[0, 0].set(jnp.inf)
        net, opt_state, value = step(net, opt_state, bad if i == 5 else X)
        values.append(float(value))
        if i == 5:
            jax.tree.map(
                np.testing.assert_array_equal,
                eqx.filter(before, eqx.is_array),
                eqx.filter(net, eqx.is_array),
            )
    assert values[-1] < 0.5 * values[0]
    assert int(opt_state.skipped) == 1


KEY = jax.random.key(2)
WRAPPERS = {
    "master_weights": jmp.master_weights,
    "compensated": jmp.compensated,
    "stochastic_rounding": lambda inner: jmp.stochastic_rounding(inner, KEY),
}
AROUND = (jmp.loss_scaling, lambda inner: inner)


def one_step(optimizer, net, opt_state, apply):
    @eqx.filter_jit
    def step(net, opt_state):
        value, grads = jmp.value_and_grad(loss_fn, loss_scale=jmp.NoOpLossScale())(
            net, X
        )
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return apply(net, updates), opt_state, value

    return step(net, opt_state)


@pytest.mark.parametrize(
    ("name", "outer", "dtype"),
    mostly_slow(
        itertools.product(WRAPPERS, AROUND, DTYPES),
        one_of_each(("master_weights", "stochastic_rounding"), AROUND, DTYPES),
    ),
)
def test_a_module_in_16_bits_stays_in_16_bits(net, name, outer, dtype):
    """Its parameters are those of optax, and an addition in float32 is refused."""
    optimizer = outer(WRAPPERS[name](lenient(optax.adam(1e-2))))
    net = jmp.cast_tree(net, dtype)
    start = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    by_ours, opt_state, _ = one_step(optimizer, net, start, jmp.apply_updates)

    def by_optax(net, updates):
        params, rest = eqx.partition(net, eqx.is_inexact_array)
        return eqx.combine(optax.apply_updates(params, updates), rest)

    expected, *_ = one_step(optimizer, net, start, by_optax)
    assert eqx.tree_equal(by_ours, expected)
    assert not eqx.tree_equal(by_ours, net)
    arrays = jax.tree.leaves(eqx.filter(by_ours, eqx.is_array))
    assert {str(x.dtype) for x in arrays} == {dtype}
    one_step(optimizer, by_ours, opt_state, jmp.apply_updates)
    wide, opt_state, _ = one_step(optimizer, net, start, eqx.apply_updates)
    assert wide.head.weight.dtype == np.float32
    with pytest.raises((TypeError, ValueError), match=r"jmp_lite\.apply_updates"):
        one_step(optimizer, wide, opt_state, jmp.apply_updates)


def test_updates_may_be_a_prefix_of_a_module_under_strict_promotion(net):
    net = jmp.cast_tree(net, "bfloat16")
    updates = jax.tree.map(jnp.ones_like, eqx.filter(net, eqx.is_array))
    updates = eqx.tree_at(lambda net: net.mlp, jmp.cast_to_full(updates), None)
    with jax.numpy_dtype_promotion("strict"):
        new = jmp.apply_updates(net, updates)
    assert new.mlp is net.mlp
    assert new.head.weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new.head.bias, net.head.bias + 1)


@pytest.mark.parametrize(
    "scale",
    [jmp.NoOpLossScale(), jmp.DynamicLossScale(2.0**10)],
    ids=["none", "dynamic"],
)
def test_a_module_is_differentiated_as_it_is(net, scale):
    """As in Equinox: None where there is no gradient, also for activation functions."""
    assert jax.tree.leaves(eqx.filter(net, eqx.is_array, inverse=True))
    value, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(net, X)
    expected_value, expected = eqx.filter_value_and_grad(loss_fn)(net, X)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}
    assert value == expected_value
    assert relative_error(grads, expected) < 1e-6


def test_a_training_step_of_a_module_needs_no_partition(net):
    optimizer = jmp.loss_scaling(lenient(optax.adam(1e-2)))
    low = jmp.autocast(loss_fn, compute_dtype="float16")
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(net, opt_state, x):
        scale = jmp.get_loss_scale(opt_state)
        value, grads = jmp.value_and_grad(low, loss_scale=scale)(net, x)
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(net, updates), opt_state, value

    values = []
    for _ in range(5):
        net, opt_state, value = step(net, opt_state, X)
        values.append(float(value))
    assert values[-1] < values[0]
    assert int(opt_state.skipped) == 0
