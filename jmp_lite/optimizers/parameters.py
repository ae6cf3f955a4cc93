"""Checks and updates that the wrappers for 16-bit parameters share."""

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.dtypes import is_16_bit, is_array, refuse_raw_bytes
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import (
    AnyArray,
    Array,
    Leaf,
    Params,
    Path,
    PyTree,
    Updates,
)
from jmp_lite.jaxprs.straight_through import straight_through
from jmp_lite.scaling.wrapping import check_grads


def to_float32(leaf: AnyArray) -> AnyArray:
    """Returns an array in float32."""
    return leaf.astype(jnp.float32)


def update_to(target: AnyArray, param: AnyArray) -> Array:
    """Returns the update that turns a parameter into ``target``.

    Args:
      target: numbers of the parameter's dtype, in float32 or wider.
      param: the parameter. The sum of parameter and update is the target, or rounds to
        it.
    """
    before = param.astype(target.dtype)
    difference = target - before
    # The update is the target itself if that is not finite, or the parameter is zero.
    is_sum = (before == 0) | ~jnp.isfinite(target)
    return straight_through(jnp.where(is_sum, target, difference), difference)


def check_16_bit(params: PyTree, name: str) -> None:
    """Raises a ValueError if no parameter has 16 bits."""
    refuse_raw_bytes(params)
    leaves, is_part = whole_or_part(params)
    if leaves and not is_part and not any(map(is_16_bit, leaves)):
        raise ValueError(
            f"{name} is for 16-bit parameters, but got only {types_of(leaves)}. "
            "Causes: (a) the parameters have 32 bits: cast them with cast_tree, or "
            "leave the wrapper out; (b) a wrapper around it casts them to float32: put "
            f"that wrapper inside, as in {name}(wrapper(...)); (c) {NOT_ROUNDED}."
        )


def check_16_bit_as_before(path: Path, param: Leaf) -> None:
    """Raises a TypeError for a parameter that had 16 bits in ``init``."""
    if is_16_bit(param):
        return
    raise TypeError(
        "Expected a 16-bit parameter at "
        f"{jax.tree_util.keystr(path) or 'the root'}, as init got it, and got "
        f"{type_of(param)}. Causes: (a) {NOT_ROUNDED}; (b) the parameters were cast "
        "after init: let jmp_lite.convert_state cast them, or call init with the new "
        "ones."
    )


NOT_ROUNDED = (
    "updates were added without a cast, as by eqx.apply_updates, so 16-bit parameters "
    "became float32: use jmp_lite.apply_updates(params, updates)"
)


def whole_or_part(params: PyTree) -> tuple[list[Leaf], bool]:
    """Returns the leaves, and whether optax.masked or partition has selected them."""
    leaves = jax.tree.leaves(params, is_leaf=is_left_out)
    return leaves, any(map(is_left_out, leaves))


def is_left_out(node: PyTree) -> bool:
    """Whether a node stands for what optax.masked or optax.partition leaves out."""
    return isinstance(node, optax.MaskedNode)


def types_of(leaves: list[Leaf]) -> str:
    """Returns the types of some leaves as text, at most three."""
    return ", ".join(sorted({type_of(leaf) for leaf in leaves})[:3])


def check_params(updates: Updates, params: Params | None, name: str) -> None:
    """Raises an error for missing parameters, and for a pair in place of gradients."""
    if params is None:
        raise ValueError(
            f"{name} needs the parameters: call optimizer.update(grads, opt_state, "
            "params)."
        )
    check_grads(updates, params)


def check_key(key: Leaf) -> None:
    """Raises a TypeError for an object that is not one key of ``jax.random``."""
    is_typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not is_raw and not (is_typed and key.ndim == 0):
        hint = key if isinstance(key, int) else 0
        raise TypeError(
            f"Expected one key of jax.random, got {type_of(key)}: pass "
            f"jax.random.key({hint})."
        )
