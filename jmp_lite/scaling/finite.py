"""Whether gradients are finite, and the selection between the results of two steps."""

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_inexact,
    refuse_raw_bytes,
    upcast_tree,
)
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Array, AxisName, Leaf, Path, PyTree, Tree, Updates
from jmp_lite.scaling.loss_scale import boolean_scalar, is_selectable


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
      TypeError: a leaf consists of bytes without a dtype, as from ``np.load``.

    Source: jmp 0.0.4. MindSpore and Megatron-LM also decide over all devices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.all_finite({"w": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    refuse_raw_bytes(tree)
    checks = (
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if is_inexact(leaf)
    )
    finite = functools.reduce(jnp.logical_and, checks, jnp.array(True))
    if axis_name is None:
        return finite
    with _naming_axes(axis_name):
        return lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)


@contextlib.contextmanager
def _naming_axes(axis_name: AxisName) -> Generator[None]:
    """Explains JAX's error about an axis that is not mapped."""
    try:
        yield
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call this inside "
            "jax.shard_map over that axis, or inside jax.vmap or jax.pmap with that "
            "axis_name. Under jit alone, leave axis_name out: jit sees whole arrays, "
            "even if they are sharded."
        ) from error


class Judged(NamedTuple):
    """What the gradients of a step are.

    Attributes:
      finite: whether every number is finite, a boolean scalar.
      zero: whether there are numbers, and all of them are zero, a boolean scalar.
    """

    finite: Array
    zero: Array


def judged(grads: Updates, axis_name: AxisName | None = None) -> Judged:
    """Returns whether gradients are finite, and whether they are all zero.

    Both come from the size of the largest number, in one reduction.

    Args:
      grads: as for ``all_finite``.
      axis_name: as for ``all_finite``.

    Example:
      >>> import jax.numpy as jnp
      >>> [bool(x) for x in judged({"w": jnp.zeros(2), "b": jnp.array([0.0, 1.0])})]
      [True, False]
    """
    leaves = list(filter(is_inexact, jax.tree.leaves(grads)))
    if not leaves:
        return Judged(jnp.array(True), jnp.array(False))
    both = Judged(*_judge(leaves))
    if not axis_name:
        return both
    with _naming_axes(axis_name):
        counts = lax.pmin(jnp.stack(both).astype(jnp.int32), axis_name)
    return Judged(*counts.astype(jnp.bool_))


# Under jit, jax_debug_nans looks at the results alone, which are booleans.
@functools.partial(jax.jit, inline=True)
def _judge(leaves: Sequence[Leaf]) -> tuple[Array, Array]:
    is_wide = any(jnp.finfo(jnp.result_type(leaf)).bits > 32 for leaf in leaves)
    dtype = np.float64 if is_wide else np.float32
    # One comparison after all maxima, and each maximum beside its array: of the forms
    # that were tried, XLA for a GPU makes the fewest kernels of this one, as
    # benchmarks.steps counts them.
    sizes = (_largest_size(leaf).astype(dtype) for leaf in leaves)
    largest = functools.reduce(jnp.maximum, sizes)
    return largest < jnp.inf, largest == 0


def _largest_size(leaf: Leaf) -> Array:
    """Returns the size of the largest number; an infinity if there is a NaN.

    So the result depends on no backend's maximum of a NaN.
    """
    is_nan = jnp.isnan(leaf)
    if jnp.iscomplexobj(leaf):  # Its own size may be an infinity.
        sizes = jnp.maximum(jnp.abs(leaf.real), jnp.abs(leaf.imag))
    else:
        sizes = jnp.abs(leaf)
    return jnp.max(jnp.where(is_nan, jnp.inf, upcast_tree(sizes)), initial=0)


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
