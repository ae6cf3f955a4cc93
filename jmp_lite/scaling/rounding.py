"""Float32 numbers rounded to fewer bits, to the nearest or by chance.

Rounded by arithmetic: XLA elides a cast to 16 bits and back. A finite number out of
range becomes the largest one in it: no update would bring an infinity back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Grid(NamedTuple):
    """The numbers of a format.

    Attributes:
      mantissa_bits: the bits of a number behind its leading one.
      least: how far its smallest numbers lie apart.
      largest: the largest number.
    """

    mantissa_bits: int
    least: float
    largest: float


def grid_of(dtype: Any) -> Grid:
    """Returns the numbers of a floating dtype."""
    info = jnp.finfo(dtype)
    return Grid(info.nmant, float(info.smallest_subnormal), float(info.max))


def nearest(x: Any, grid: Grid) -> Any:
    """Returns the numbers of a format that are nearest, in the dtype of ``x``."""
    inside = _inside(x, grid)
    spacing = _spacing(inside, grid)
    steps = lax.round(inside / spacing, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.isfinite(x), steps * spacing, x)


def by_chance(x: Any, grid: Grid, noise: Any) -> Any:
    """Returns one of the two neighbours in a format, in float32.

    Args:
      x: float32 numbers.
      grid: the format.
      noise: uniform in [0, 1).
    """
    inside = _inside(x, grid)
    spacing = _spacing(inside, grid)
    steps = inside / spacing
    below = jnp.floor(steps)
    up = (noise < steps - below).astype(jnp.float32)
    is_rounded = jnp.isfinite(x) & (x != 0)  # A zero keeps its sign.
    return jnp.where(is_rounded, (below + up) * spacing, x)


def noise(key: Any, number: int, shape: tuple[int, ...]) -> Any:
    """Returns uniform numbers in [0, 1), others for each number of an array."""
    return jax.random.uniform(jax.random.fold_in(key, number), shape)


def _spacing(x: Any, grid: Grid) -> Any:
    """Returns how far the numbers of a format lie apart where ``x`` is."""
    wide = jnp.finfo(x.dtype)
    infinity = np.asarray(np.inf, x.dtype)
    exponents = infinity.view(f"uint{wide.bits}")  # Its bits are those of the exponent.
    exponent = lax.bitcast_convert_type(x, exponents.dtype) & exponents
    power = lax.bitcast_convert_type(exponent, x.dtype)
    least = np.asarray(max(grid.least, float(wide.tiny)), x.dtype)
    return jnp.maximum(power * np.asarray(2.0**-grid.mantissa_bits, x.dtype), least)


def _inside(x: Any, grid: Grid) -> Any:
    largest = np.asarray(grid.largest, x.dtype)
    return jnp.clip(x, -largest, largest)
