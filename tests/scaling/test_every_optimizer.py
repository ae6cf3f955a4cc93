"""Loss scaling around every optimizer of optax: a skipped step leaves no trace."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import (
    OPTIMIZERS,
    each_in_turn,
    each_optimizer,
    lenient,
    loss_fn,
    make_params,
    param,
)

import jmp_lite as jmp


def bits(tree):
    """The leaves as bytes: equal in every bit, NaN and the sign of zero included."""
    as_data = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return [
        (x.dtype, x.shape, np.asarray(as_data(x)).tobytes())
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]


def overflowed(grads):
    """The same gradients with one NaN and one infinity."""
    w = np.array(grads["w"])
    w.flat[0], w.flat[-1] = np.nan, np.inf
    return {**grads, "w": w}


def setup(name):
    case, params = OPTIMIZERS[name], make_params()
    optimizer = jmp.loss_scaling(lenient(case.make()))
    return case, params, jax.grad(loss_fn)(params), optimizer, optimizer.init(params)


def test_the_table_contains_every_alias_of_optax():
    optimizer_module = optax.adam.__module__
    aliases = {
        name
        for name, value in vars(optax).items()
        if getattr(value, "__module__", None) == optimizer_module
        and name.islower()
        and callable(value)
    }
    assert aliases - set(OPTIMIZERS) == set()
    assert "adam" in aliases


@each_optimizer
def test_an_overflow_leaves_no_trace_and_a_finite_step_is_the_bare_optimizer_s(name):
    case, params, grads, optimizer, state = setup(name)
    zero, after = optimizer.update(
        overflowed(grads), state, params, **case.extra_args(params, overflowed(grads))
    )
    chex.assert_trees_all_equal(zero, jax.tree.map(jnp.zeros_like, params))
    assert bits(after.inner_state) == bits(state.inner_state)
    assert not after.grads_finite
    assert (int(after.skipped), int(after.consecutive_skipped)) == (1, 1)
    assert float(after.loss_scale.loss_scale) == 2.0**14

    bare = lenient(case.make())
    bare_state = bare.init(params)
    for _ in range(3):
        extra_args = case.extra_args(params, grads)
        expected, bare_state = bare.update(grads, bare_state, params, **extra_args)
        updates, after = optimizer.update(grads, after, params, **extra_args)
        assert bits(updates) == bits(expected)
        assert bits(after.inner_state) == bits(bare_state)
        params = optax.apply_updates(params, updates)
        grads = jax.grad(loss_fn)(params)
    assert (int(after.skipped), int(after.consecutive_skipped)) == (1, 0)


@each_optimizer
def test_the_state_is_a_scan_carry_traced_once(name):
    case, params, _, optimizer, state = setup(name)

    def step(carry, is_finite):
        params, state = carry
        grads = jax.grad(loss_fn)(params)
        grads = jax.tree.map(lambda g: jnp.where(is_finite, g, jnp.nan), grads)
        extra_args = case.extra_args(params, grads)
        updates, state = optimizer.update(grads, state, params, **extra_args)
        return (optax.apply_updates(params, updates), state), None

    (moved, after), _ = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, state), jnp.array([True, False, False, True])
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert int(after.skipped) == 2
    assert jmp.all_finite((moved, after))


# Those that raise by themselves, and one of each kind of those that do not.
@pytest.mark.parametrize(
    "name",
    [
        *("adam", "adafactor", "lamb", "fromage", "novograd", "rprop", "sm3"),
        *("polyak_sgd", "noisy_sgd", "contrib.muon", "contrib.prodigy", "contrib.sam"),
        *(
            param(name)
            for name, case in OPTIMIZERS.items()
            if case.debug_nans != "always"
        ),
    ],
)
def test_under_debug_nans_only_what_the_bare_optimizer_raises_is_raised(name):
    case, params, grads, optimizer, state = setup(name)
    bad, extra_args = overflowed(grads), case.extra_args(params, grads)
    jitted = jax.jit(lambda g: optimizer.update(g, state, params, **extra_args))
    with jax.debug_nans(True):
        if case.debug_nans == "always":
            _, after = optimizer.update(bad, state, params, **extra_args)
            assert bits(after.inner_state) == bits(state.inner_state)
        else:
            bare = lenient(case.make())
            with pytest.raises(FloatingPointError):
                bare.update(grads, bare.init(params), params, **extra_args)
        if case.debug_nans != "never":
            jitted(bad)


@pytest.mark.parametrize(("name", "dtype"), each_in_turn(("float16",), ("bfloat16",)))
def test_with_16_bit_parameters_the_state_is_float32_s(name, dtype):
    case = OPTIMIZERS[name]
    low = make_params(dtype)
    full = jmp.cast_to_full(low)
    optimizer = jmp.loss_scaling(lenient(case.make()))
    state = optimizer.init(low)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(full))
    grads = jax.grad(loss_fn)(low)
    updates, after = optimizer.update(
        grads, state, low, **case.extra_args(full, jmp.cast_to_full(grads))
    )
    expected, _ = optimizer.update(
        jmp.cast_to_full(grads),
        state,
        full,
        **case.extra_args(full, jmp.cast_to_full(grads)),
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert bits(updates) == bits(expected)
    with jax.numpy_dtype_promotion("standard"):
        new_params = optax.apply_updates(low, updates)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_params, low)
