"""Rounds float32 numbers to fewer bits, to the nearest or stochastically.

It rounds by arithmetic, because XLA removes a cast to 16 bits and back. A finite number
out of range becomes the largest number of the format: no update would repair an
infinity.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Grid(NamedTuple):
    """The numbers of a format.

    Attributes:
      mantissa_bits: the bits of the mantissa, without the leading one.
      least: the spacing of its smallest numbers.
      largest: the largest number.
    """

    mantissa_bits: int
    least: float
    largest: float


def grid_of(dtype: Any) -> Grid:
    """Returns the numbers of a floating-point dtype."""
    info = jnp.finfo(dtype)
    return Grid(info.nmant, float(info.smallest_subnormal), float(info.max))


def nearest(x: Any, grid: Grid) -> Any:
    """Rounds to the nearest number of a format, in the dtype of ``x``."""
    inside = _inside(x, grid)
    spacing = _spacing(inside, grid)
    steps = lax.round(inside / spacing, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.isfinite(x), steps * spacing, x)


def by_chance(x: Any, grid: Grid, noise: Any) -> Any:
    """Rounds stochastically to one of the two neighbors in a format, in float32.

    Args:
      x: float32 numbers.
      grid: the format.
      noise: uniform numbers in [0, 1), in the shape of ``x``.
    """
    inside = _inside(x, grid)
    spacing = _spacing(inside, grid)
    steps = inside / spacing
    below = jnp.floor(steps)
    up = (noise < steps - below).astype(jnp.float32)
    is_rounded = jnp.isfinite(x) & (x != 0)  # A zero keeps its sign.
    return jnp.where(is_rounded, (below + up) * spacing, x)


def noise(key: Any, number: int, shape: tuple[int, ...]) -> Any:
    """Returns uniform numbers in [0, 1) for the array with this number."""
    return jax.random.uniform(jax.random.fold_in(key, number), shape)


def _spacing(x: Any, grid: Grid) -> Any:
    """Returns the spacing of a format's numbers near ``x``."""
    wide = jnp.finfo(x.dtype)
    infinity = np.asarray(np.inf, x.dtype)
    exponents = infinity.view(f"uint{wide.bits}")  # Its bits are the exponent mask.
    exponent = lax.bitcast_convert_type(x, exponents.dtype) & exponents
    power = lax.bitcast_convert_type(exponent, x.dtype)
    least = np.asarray(max(grid.least, float(wide.tiny)), x.dtype)
    return jnp.maximum(power * np.asarray(2.0**-grid.mantissa_bits, x.dtype), least)


def _inside(x: Any, grid: Grid) -> Any:
    largest = np.asarray(grid.largest, x.dtype)
    return jnp.clip(x, -largest, largest)
