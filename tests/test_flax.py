"""Flax's own training states carry a loss scale without losing a bit of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from optimizers import lenient

import jmp_lite as jmp

X, Y = jnp.linspace(-1, 1, 8).reshape(4, 2), jnp.linspace(0, 1, 4).reshape(4, 1)


def test_a_linen_train_state_skips_overflows_and_trains_in_float16():
    def loss_fn(params, x):
        low = jmp.cast_tree({"params": params, "x": x}, "float16")
        y = low["x"] @ low["params"]["w"]
        return jnp.mean((y.astype(jnp.float32) - Y) ** 2)

    optimizer = jmp.loss_scaling(
        lenient(optax.adam(0.05)), jmp.DynamicLossScale(2.0**20)
    )
    state = TrainState.create(
        apply_fn=None, params={"w": jnp.ones((2, 1))}, tx=optimizer
    )

    @jax.jit
    def step(state, x):
        scale = jmp.get_loss_scale(state.opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, scale)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(40):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert int(state.opt_state.skipped) > 0
    assert int(state.opt_state.inner_state[0].count) == 40 - int(
        state.opt_state.skipped
    )
    assert losses[-1] < 0.5 * losses[0]


def test_an_nnx_optimizer_holds_variables_where_the_leaves_were():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    scale = jmp.DynamicLossScale(8.0, period=2, hysteresis=2)
    optimizer = nnx.Optimizer(
        model, jmp.loss_scaling(optax.sgd(0.1), scale), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return jnp.mean((model(x) - Y) ** 2)

        scale = jmp.get_loss_scale(optimizer.opt_state)
        grads = nnx.grad(lambda model: scale.scale(loss_fn(model)))(model)
        optimizer.update(model, scale.unscale(grads))
        return loss_fn(model)

    first = step(model, optimizer, X)
    kernel = np.asarray(model.kernel[...])
    step(model, optimizer, X.at[0, 0].set(jnp.inf))
    np.testing.assert_array_equal(model.kernel[...], kernel)
    for _ in range(5):
        last = step(model, optimizer, X)
    assert last < first
    state = optimizer.opt_state
    found = jmp.get_loss_scale(state)
    assert (found.period, found.hysteresis) == (2, 2)
    assert float(found.scale(jnp.float32(1.0))) == 32.0
    assert int(jnp.asarray(state.skipped)) == 1
    jmp.check_loss_scale(state)
