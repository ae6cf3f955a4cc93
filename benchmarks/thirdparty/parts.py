"""What several programs are made of."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def normal(seed: int, *shape: int) -> jax.Array:
    """Returns normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def layers(seed: int, *sizes: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the weights and biases of dense layers."""
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=False)
    return [(jax.random.normal(k, (n, m)) / n**0.5, jnp.zeros(m)) for k, n, m in shapes]


def mlp(layers: Sequence[Any], x: jax.Array, activation: Any = jnp.tanh) -> jax.Array:
    """Returns what dense layers make of an array."""
    for w, b in layers[:-1]:
        x = activation(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of labels."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))
