"""Whether gradients are finite, and the selection between the results of two steps."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_16_bit, is_array, is_inexact
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Array, AxisName, Leaf, Path, PyTree, Tree
from jmp_lite.scaling.numbers import boolean_scalar, is_selectable


def all_finite(tree: PyTree, axis_name: AxisName | None = None) -> Array:
    """Returns whether every number in a pytree is finite.

    Args:
      tree: a pytree. Its real and complex arrays and its Python floats are checked.
        Other leaves count as finite, and so does an empty tree.
      axis_name: a mapped axis or several. The result then covers all devices or batch
        elements of these axes.

    Returns:
      A boolean scalar.

    Raises:
      NameError: ``axis_name`` is not a mapped axis here.

    Source: jmp 0.0.4. MindSpore and Megatron-LM also decide over all devices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.all_finite({"w": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    checks = (
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if is_inexact(leaf)
    )
    finite = functools.reduce(jnp.logical_and, checks, jnp.array(True))
    if axis_name is None:
        return finite
    try:
        return lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call this inside "
            "jax.shard_map over that axis, or inside jax.vmap or jax.pmap with that "
            "axis_name. Under jit alone, leave axis_name out: jit sees whole arrays, "
            "even if they are sharded."
        ) from error


def select_tree(pred: ArrayLike, a: Tree, b: Tree) -> Tree:
    """Returns ``a`` if ``pred`` is true, else ``b``.

    Args:
      pred: a boolean scalar.
      a: a pytree.
      b: a pytree of the same structure, shapes and dtypes. Leaves that are neither
        arrays nor numbers must be equal in both.

    Returns:
      A pytree like ``a`` and ``b``.

    Raises:
      AssertionError: ``pred`` is not a boolean scalar.
      TypeError: two leaves differ in shape or dtype. The message names the leaf.

    Source: jmp 0.0.4.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> old, new = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
      >>> jmp.select_tree(jnp.array(False), new, old)
      {'w': Array([0.], dtype=float32)}
    """
    pred = boolean_scalar(pred)
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, pred), a, b)


def _select_leaf(pred: Array, path: Path, a: Leaf, b: Leaf) -> Leaf:
    if a is b:
        return a
    if not (is_selectable(a) and is_selectable(b)):
        if type(a) is type(b) and a == b:
            return a
        raise TypeError(_differ(path, repr(a), repr(b)))
    a, b = (leaf if is_array(leaf) else jnp.asarray(leaf) for leaf in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        raise TypeError(_differ(path, type_of(a), type_of(b)))
    if a.dtype == jax.dtypes.float0:
        return a
    if is_16_bit(a):
        # XLA for a TPU does not fuse a 16-bit selection with the rounding before it.
        full = (leaf.astype(jnp.float32) for leaf in (a, b))
        return lax.select(pred, *full).astype(a.dtype)
    return lax.select(pred, jnp.asarray(a), jnp.asarray(b))


def _differ(path: Path, a: str, b: str) -> str:
    where = jax.tree_util.keystr(path) or "the root"
    return (
        f"Cannot select between {a} and {b} at {where}: expected the same shape and "
        "dtype in both trees; cast one of them."
    )
