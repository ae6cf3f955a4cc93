"""Attention as packages and papers write it: tiled, in a ring, with a custom rule."""

import jax
import jax.numpy as jnp

from benchmarks.thirdparty.program import Entry, Program


def flash_attention() -> Program:
    """flash-attention-jax: tiles in two scans, with a custom_vjp."""
    from flash_attention_jax import causal_flash_attention

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "qkv": jax.random.normal(keys[0], (64, 3 * 64)) / 8,
        "out": jax.random.normal(keys[1], (64, 64)) / 8,
    }
    x = jax.random.normal(keys[2], (2, 256, 64))

    def loss(params, x):
        split = (x @ params["qkv"]).reshape(2, 256, 3, 4, 16)
        q, k, v = jnp.moveaxis(split, (2, 3), (0, 2))
        attended = causal_flash_attention(q, k, v)
        attended = jnp.moveaxis(attended, 1, 2).reshape(x.shape)
        return jnp.mean((x + attended @ params["out"]) ** 2), ()

    return Program(loss, params, x)


ENTRIES = (Entry("flash attention", ["flash-attention-jax"], flash_attention),)
