"""Training in float16: the smallest complete step."""

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp

optimizer = jmp.loss_scaling(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
)


@jmp.autocast(compute_dtype="float16")
def loss_fn(params, x, y):
    prediction = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return jnp.mean((prediction - y) ** 2)


@jax.jit
def train_step(params, opt_state, x, y):
    loss_scale = jmp.get_loss_scale(opt_state)
    loss, grads = jmp.value_and_grad(loss_fn, loss_scale=loss_scale)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


keys = jax.random.split(jax.random.key(0), 3)
params = {
    "w1": jax.random.normal(keys[0], (8, 64)) / 8**0.5,
    "w2": jax.random.normal(keys[1], (64, 1)) / 64**0.5,
}
x = jax.random.normal(keys[2], (256, 8))
y = jnp.sin(x[:, :1])

opt_state = optimizer.init(params)
for i in range(300):
    params, opt_state, loss = train_step(params, opt_state, x, y)
    if i % 50 == 0:
        jmp.check_loss_scale(opt_state)
        print(f"step {i:3d}  loss {loss:.4f}  skipped {opt_state.skipped}")
