"""Copies arrays to the host."""

from typing import Any

import jax
import numpy as np


def fetched(tree: Any) -> Any:
    """Returns a pytree of JAX arrays as NumPy arrays on the host.

    Raises:
      TypeError: an array is a tracer.
    """
    try:
        return jax.tree.map(np.asarray, jax.device_get(tree))
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            "Expected concrete arrays, got tracers (of jit, vmap, scan or grad). "
            "Rows, tables, rules and loss scales are made on the host: return the "
            "arrays or the report from the traced function, and make this call "
            "outside of it."
        ) from error
