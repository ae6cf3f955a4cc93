"""A run that saves every step, and goes on from what it finds; it is killed in a test.

python tests/resumable_run.py CHECKPOINT STEPS MOMENTS

MOMENTS is the dtype that the optimizer stores its large moments in.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from flax import serialization

import jmp_lite as jmp
import jmp_lite.linen


def loss_fn(params, model_state, batch, rng):
    h = jnp.tanh(batch @ params["w"])
    h = h * jax.random.bernoulli(rng, 0.9, h.shape)
    seen = {"mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch)}
    return jnp.mean((h @ params["v"] - 1) ** 2), (seen, None)


def main(path, steps, moments):
    # A key of numbers, which Flax can write.
    key = jax.random.PRNGKey(3)
    adam = jmp.low_precision_state(optax.adam(1e-2), moments, key=key)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    init, step = jmp.build_train_step(
        loss_fn,
        optimizer,
        jmp.get_rules("mixed", "float16"),
        loss_scale=jmp.DynamicLossScale(2.0**22, period=4),
        accumulate=2,
        ema=0.9,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (8, 512)) / 3,
        "v": jax.random.normal(keys[1], (512, 1)) / 4,
    }
    state = init(params, {"mean": jnp.float32(0)}, jax.random.PRNGKey(7))
    if path.exists():
        state = serialization.from_bytes(state, path.read_bytes())
    step = jax.jit(step, donate_argnums=0)
    # What is done is what was applied and what was skipped.
    for i in range(int(state.step + state.opt_state.skipped), steps):
        batch = jax.random.normal(jax.random.fold_in(keys[2], i), (32, 8))
        state, _ = step(state, batch)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(serialization.to_bytes(state))
        os.replace(fresh, path)
        print(i, flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
