"""16-bit parameters that follow float32 masters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, lenient, loss_fn, make_params

import jmp_lite as jmp


@pytest.fixture(autouse=True)
def by_jax_s_own_promotion():
    """Updates in float32 are added to 16-bit parameters by optax itself."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def assert_follow(params, masters):
    def same(param, master):
        assert master.dtype == np.float32
        np.testing.assert_array_equal(param, master.astype(param.dtype))

    jax.tree.map(same, params, masters)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_their_masters_rounded_under_every_optimizer(name, dtype):
    case = OPTIMIZERS[name]
    optimizer, plain = jmp.master_weights(case.make()), case.make()
    masters = make_params()
    params = jmp.cast_tree(masters, dtype)
    state, plain_state = optimizer.init(masters), plain.init(masters)
    plain = optax.with_extra_args_support(plain)
    for _ in range(3):
        grads = jax.tree.map(jnp.float32, jax.grad(loss_fn)(params))
        args = case.extra_args(masters, grads)
        updates, state = optimizer.update(grads, state, params, **args)
        params = optax.apply_updates(params, updates)
        assert_follow(params, state.masters)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
        # Which are those of the optimizer by itself, in float32.
        updates, plain_state = plain.update(grads, plain_state, masters, **args)
        masters = optax.apply_updates(masters, updates)
        chex.assert_trees_all_equal(state.masters, masters)


def test_what_is_too_small_for_16_bits_is_not_lost():
    optimizer = jmp.master_weights(optax.sgd(1.0))
    masters, params = jnp.ones(2), jnp.ones(2, jnp.bfloat16)
    state = optimizer.init(masters)
    step = jax.jit(optimizer.update)
    for _ in range(512):
        updates, state = step(jnp.full(2, -(2.0**-12)), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params, jnp.full(2, 1.125, jnp.bfloat16))


def test_masters_start_from_float32_exactly_or_from_what_is_rounded():
    optimizer = jmp.master_weights(optax.sgd(0.1))
    w = jnp.float32([0.1, 1 / 3])
    np.testing.assert_array_equal(optimizer.init(w).masters, w)
    low = w.astype("float16")
    np.testing.assert_array_equal(optimizer.init(low).masters, low.astype("float32"))
    # A parameter that somebody has changed meets its master again.
    updates, _ = optimizer.update(jnp.zeros(2), optimizer.init(w), low + 1)
    np.testing.assert_array_equal(optax.apply_updates(low + 1, updates), low)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: jmp.loss_scaling(jmp.master_weights(inner)),
        lambda inner: jmp.master_weights(jmp.loss_scaling(inner)),
        lambda inner: jmp.skip_nonfinite(
            optax.chain(optax.clip_by_global_norm(1.0), jmp.master_weights(inner))
        ),
    ],
)
def test_an_overflow_moves_neither_masters_nor_parameters(wrap):
    optimizer = wrap(lenient(optax.adam(0.1)))
    params = jmp.cast_tree(make_params(), "float16")
    state = optimizer.init(make_params())

    def masters_in(state):
        leaves = jax.tree.leaves_with_path(state)
        return [x for path, x in leaves if ".masters" in jax.tree_util.keystr(path)]

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(4):
        grads = jax.tree.map(jnp.ones_like, params)
        if i == 2:
            grads["w"] = grads["w"].at[0, 0].set(jnp.nan)
        before = params, masters_in(state)
        params, state = step(params, state, grads)
        if i == 2:
            chex.assert_trees_all_equal(before, (params, masters_in(state)))
        assert_follow(jax.tree.leaves(params), masters_in(state))
    assert jmp.all_finite(params)


def test_masters_lie_where_their_parameters_lie():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    params = jax.device_put(jnp.ones((4, 8), jnp.bfloat16), rows)
    optimizer = jmp.master_weights(lenient(optax.adam(0.1)))
    state = jax.jit(optimizer.init)(params)
    assert state.masters.sharding.is_equivalent_to(rows, 2)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert state.masters.sharding.is_equivalent_to(rows, 2)
    assert updates.sharding.is_equivalent_to(rows, 2)


def test_other_leaves_pass_and_nothing_is_shared_with_the_parameters():
    optimizer = jmp.master_weights(
        optax.masked(optax.sgd(0.1), {"w": True, "n": False})
    )
    params = {"w": jnp.ones(2), "n": jnp.int32([3])}
    state = optimizer.init(params)
    assert state.masters["w"] is not params["w"]
    grads = {"w": jnp.ones(2), "n": jnp.int32([0])}
    updates, state = optimizer.update(grads, state, params)
    assert state.masters["n"].dtype == jnp.int32
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["n"], [3])
    assert jmp.master_weights(optax.sgd(0.1)).init({}).masters == {}


def test_build_train_step_trains_16_bit_parameters_by_their_masters():
    def fun(params, model_state, batch, rng):
        return jnp.sum(params["w"].astype(jnp.float32) * batch), (model_state, None)

    init, step = jmp.build_train_step(fun, jmp.master_weights(optax.sgd(2.0**-12)))
    state = init({"w": jnp.ones(2, jnp.bfloat16)})
    for _ in range(128):
        state, _ = jax.jit(step)(state, jnp.float32(-1))
    np.testing.assert_array_equal(state.params["w"], jnp.full(2, 1.03125))
    assert_follow(state.params, state.opt_state.inner_state.masters)


def test_bad_input_is_refused_at_the_door():
    with pytest.raises(TypeError, match="Did you mean adam"):
        jmp.master_weights(optax.adam)
    with pytest.raises(ValueError, match="Unknown dtype 'flaot32'"):
        jmp.master_weights(optax.sgd(0.1), "flaot32")
    optimizer = jmp.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))
