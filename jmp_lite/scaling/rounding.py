"""Float32 numbers rounded to a narrower dtype, to the nearest or by chance.

Rounded by arithmetic: XLA elides a cast to 16 bits and back. A finite number out of
range becomes the largest one in it: no update would bring an infinity back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def nearest(x: Any, dtype: Any) -> Any:
    """Returns the finite numbers of a dtype that are nearest, in the dtype of ``x``."""
    inside = _inside(x, dtype)
    spacing = _spacing(inside, dtype)
    steps = lax.round(inside / spacing, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.isfinite(x), steps * spacing, x)


def by_chance(x: Any, dtype: Any, noise: Any) -> Any:
    """Returns one of the two neighbours in a dtype, in float32.

    Args:
      x: float32 numbers.
      dtype: the dtype.
      noise: uniform in [0, 1).
    """
    inside = _inside(x, dtype)
    spacing = _spacing(inside, dtype)
    steps = inside / spacing
    below = jnp.floor(steps)
    up = (noise < steps - below).astype(jnp.float32)
    is_rounded = jnp.isfinite(x) & (x != 0)  # A zero keeps its sign.
    return jnp.where(is_rounded, (below + up) * spacing, x)


def noise(key: Any, number: int, shape: tuple[int, ...]) -> Any:
    """Returns uniform numbers in [0, 1), others for each number of an array."""
    return jax.random.uniform(jax.random.fold_in(key, number), shape)


def _spacing(x: Any, dtype: Any) -> Any:
    """Returns how far the numbers of a dtype lie apart where ``x`` is."""
    info, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    infinity = np.asarray(np.inf, x.dtype)
    exponents = infinity.view(f"uint{wide.bits}")  # Its bits are those of the exponent.
    exponent = lax.bitcast_convert_type(x, exponents.dtype) & exponents
    power = lax.bitcast_convert_type(exponent, x.dtype)
    smallest = max(float(info.smallest_subnormal), float(wide.tiny))
    least = np.asarray(smallest, x.dtype)
    return jnp.maximum(power * np.asarray(2.0**-info.nmant, x.dtype), least)


def _inside(x: Any, dtype: Any) -> Any:
    largest = np.asarray(float(jnp.finfo(dtype).max), x.dtype)
    return jnp.clip(x, -largest, largest)
