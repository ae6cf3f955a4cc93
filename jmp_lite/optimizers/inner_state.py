"""The states of wrappers, which may be nested, and what is inside of them.

All have a field ``inner_state``, the state of the wrapped optimizer. It is found,
compared and cast.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.casting.dtypes import is_array, is_number
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Dtype, Leaf, OptState, Path, PyTree
from jmp_lite.optimizers.compensated import CompensatedState
from jmp_lite.optimizers.low_precision_state import LowPrecisionState, unpacked
from jmp_lite.optimizers.master_weights import MasterWeightsState
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.optimizers.storage import Stored, is_stored, restore, store_nearest
from jmp_lite.scaling.state import LossScalingState

WrapperState: TypeAlias = (
    LossScalingState
    | MasterWeightsState
    | CompensatedState
    | StochasticRoundingState
    | LowPrecisionState
)


def is_wrapper_state(node: PyTree) -> TypeGuard[WrapperState]:
    """Whether a node of a pytree is the state of one of the wrappers."""
    return isinstance(node, WrapperState)


def remove_wrappers(state: PyTree) -> OptState:
    """Returns a state with each wrapper's state replaced by its inner state.

    An array that ``low_precision_state`` stores is a ``Stored``.
    """

    def replace(node: PyTree) -> PyTree:
        return remove_wrappers(inner_state_of(node)) if is_wrapper_state(node) else node

    return jax.tree.map(replace, state, is_leaf=is_node)


def inner_state_of(state: WrapperState) -> PyTree:
    """Returns the inner state, with a ``Stored`` for each array of 16 or 8 bits."""
    is_low = isinstance(state, LowPrecisionState)
    return unpacked(state) if is_low else state.inner_state


def is_node(node: PyTree) -> bool:
    """Whether a node of a pytree is the state of a wrapper, or a stored array."""
    return is_wrapper_state(node) or is_stored(node)


def leaves(state: OptState) -> list[Leaf]:
    """Returns the leaves of a state, with each ``Stored`` as one leaf."""
    return jax.tree.leaves(state, is_leaf=is_stored)


def wrappers(state: PyTree) -> Iterator[WrapperState]:
    """Yields the states of wrappers, from the outside in."""
    for node in jax.tree.leaves(state, is_leaf=is_wrapper_state):
        if is_wrapper_state(node):
            yield node
            yield from wrappers(node.inner_state)


def converted(old: Leaf, new: Leaf) -> Leaf:
    """Returns an array of the old state in the format of the new one."""
    if is_stored(old) and is_stored(new) and _format(old) == _format(new):
        return jax.tree.map(copied, old)
    full = restore(old) if is_stored(old) else old
    if is_stored(new):
        return store_nearest(as_array(full), *_format(new))
    return copied(full, new) if is_array(new) else new


def _format(stored: Stored) -> tuple[Dtype, bool]:
    return stored.numbers.dtype, stored.scale is not None


def check_same_optimizer(old: OptState, new: OptState) -> None:
    """Raises a TypeError for states that differ in more than dtypes.

    Args:
      old: the old state, without wrappers.
      new: the new one.
    """
    found = _difference(old, new, ())
    if found is None:
        return
    path, came, expected = found
    raise TypeError(
        f"The old state is that of another optimizer. At {named(path)} it has {came}, "
        f"and that of the new optimizer has {expected}. (The wrappers of jmp_lite are "
        "left out.) Causes: (a) the optimizer inside of the wrappers differs in more "
        "than numbers: take the same one; (b) a checkpoint was restored without the "
        "structure of its optimizer: restore it into the old optimizer's init(params); "
        "(c) params are not those of the old state."
    )


def _difference(old: PyTree, new: PyTree, path: Path) -> tuple[Path, str, str] | None:
    """Returns the first path at which two states differ, and what each has there."""
    if _is_leaf(old) and _is_leaf(new):
        is_same = _kind(old) == _kind(new)
        return None if is_same else (path, _leaf_name(old), _leaf_name(new))
    (old_parts, old_type), (new_parts, new_type) = map(_parts, (old, new))
    if old_type != new_type:
        return path, _node_name(old), _node_name(new)
    pairs = zip(old_parts, new_parts, strict=True)
    differences = (_difference(a, b, (*path, *key)) for (key, a), (_, b) in pairs)
    return next(filter(None, differences), None)


def _parts(node: PyTree) -> tuple[list[tuple[Path, PyTree]], Any]:
    """Returns the children of a node with their keys, and the type of the node."""
    if is_stored(node):
        node = node.numbers
    return jax.tree_util.tree_flatten_with_path(node, lambda child: child is not node)


def _is_leaf(node: PyTree) -> bool:
    return is_stored(node) or jax.tree_util.all_leaves([node])


def _kind(leaf: Leaf) -> tuple[type[np.generic] | Dtype, tuple[int, ...]] | None:
    """Returns a key that is equal for two leaves if one can replace the other."""
    if is_stored(leaf):
        return jnp.floating, leaf.numbers.shape
    if not is_array(leaf) and not is_number(leaf):
        return None
    leaf = as_array(leaf)
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    kind = next((kind for kind in kinds if is_number(leaf, kind)), leaf.dtype)
    return kind, leaf.shape


def _leaf_name(leaf: Leaf) -> str:
    return type_of(leaf.numbers if is_stored(leaf) else leaf)


def _node_name(node: PyTree) -> str:
    if _is_leaf(node):
        return _leaf_name(node)
    keys = ", ".join(jax.tree_util.keystr(path) for path, _ in _parts(node)[0])
    return f"{type(node).__name__}({keys})"


def as_array(leaf: Leaf) -> Leaf:
    """Returns a number, such as one of NumPy, as an array of JAX."""
    return jnp.asarray(leaf) if is_number(leaf) else leaf


def copied(leaf: Leaf, like: Leaf = None) -> Leaf:
    """Returns a copy of an array, in the dtype of another one."""
    if not is_array(leaf) and not is_number(leaf):
        return leaf
    is_cast = is_number(like) and is_number(leaf)
    return jnp.array(leaf, like.dtype if is_cast else None, copy=True)


def named(path: Path) -> str:
    """Returns a key path as text."""
    return jax.tree_util.keystr(path) or "the root"
