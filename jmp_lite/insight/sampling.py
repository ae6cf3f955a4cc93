"""Samples elements of an array."""

import math

import numpy as np
from jax import lax

from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.types import Array


def check_elements(elements: int) -> None:
    """Raises a ValueError if ``elements`` is not a whole number of at least 1."""
    is_whole = isinstance(elements, int | np.integer) and not isinstance(elements, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or elements < 1:
        raise ValueError(
            f"Expected a whole number of at least 1 for elements, got {elements!r}."
        )


def sample(array: Array, elements: int) -> Array:
    """Returns at most so many elements of an array, evenly spaced.

    Rows of the last axis stay whole if they fit: memory is read in rows. An array that
    is sharded over Explicit axes is returned whole.
    """
    array = structure.as_array(array)
    if sharding.is_sharded(array):  # Its parts are on several devices.
        return array
    sizes, strides = list(array.shape), [1] * array.ndim
    while math.prod(sizes) > elements:
        rows = sizes[:-1] if max(sizes[:-1], default=1) > 1 else sizes
        axis = rows.index(max(rows))
        strides[axis] *= 2
        sizes[axis] = -(-array.shape[axis] // strides[axis])
    return lax.slice(array, [0] * array.ndim, array.shape, strides)
