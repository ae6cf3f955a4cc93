"""What several of Flax's examples use."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def apply(module: nn.Module, *args: Any) -> Any:
    """Returns what a module makes of variables and arguments, of no static type."""
    return module.apply(*args)


def ints(*shape: int) -> Any:
    """Returns the shape of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> Any:
    """Returns the shape of float32 numbers."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def smoothed_cross_entropy(logits: Any, targets: Any, smoothing: float = 0.1) -> Any:
    """Returns the mean over targets that are no padding, zero where it is least."""
    classes = logits.shape[-1]
    on, off = 1.0 - smoothing, smoothing / (classes - 1)
    least = -(on * math.log(on) + (classes - 1) * off * math.log(off + 1e-20))
    hot = targets[..., None] == jnp.arange(classes)
    wanted = jnp.where(hot, jnp.float32(on), jnp.float32(off))
    logits = logits.astype(jnp.float32)
    each = -jnp.sum(wanted * jax.nn.log_softmax(logits), -1) - least
    weights = (targets > 0).astype(jnp.float32)
    return jnp.sum(each * weights) / jnp.sum(weights)
