"""Applies updates to parameters of any precision."""

import jax
import jax.numpy as jnp

from jmp_lite.casting.dtypes import is_floating, refuse_raw_bytes
from jmp_lite.casting.types import Leaf, PyTree, Tree


def apply_updates(params: Tree, updates: PyTree) -> Tree:
    """Adds updates to parameters, which keep their dtypes.

    A sum is computed in the wider of the two dtypes (in float32 for 8 bits), and
    rounded once to the dtype of the parameter. ``optax.apply_updates`` does so, too,
    but for 8 bits. ``eqx.apply_updates`` does not round, so its 16-bit parameters
    become float32 at the first float32 update.

    Args:
      params: a pytree of parameters, such as an Equinox module.
      updates: the updates of an optimizer, a pytree prefix of ``params``. A part for
        which the update is None is returned as it is.

    Returns:
      A pytree with the structure, shapes and dtypes of ``params``. It is the same under
      strict dtype promotion.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> params = {"w": jnp.ones(1, jnp.bfloat16), "name": "dense"}
      >>> jmp.apply_updates(params, {"w": jnp.full(1, 0.25), "name": None})
      {'name': 'dense', 'w': Array([1.25], dtype=bfloat16)}
    """

    def add(update: Leaf, param: PyTree) -> PyTree:
        if update is None:
            return param
        total = jnp.asarray(_promotable(param) + _promotable(update))
        return total.astype(jnp.asarray(param).dtype)

    refuse_raw_bytes(params)
    refuse_raw_bytes(updates)
    # Strict promotion refuses a sum of bfloat16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(add, updates, params, is_leaf=lambda node: node is None)


def _promotable(leaf: Leaf) -> Leaf:
    """Returns numbers of 8 bits or fewer, which JAX never promotes, in float32."""
    is_small = is_floating(leaf) and leaf.dtype.itemsize == 1
    return leaf.astype(jnp.float32) if is_small else leaf
