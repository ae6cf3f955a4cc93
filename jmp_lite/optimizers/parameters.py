"""Checks and updates of parameters, which the wrappers for 16 bits share."""

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_floating,
    place_of,
    refuse_raw_bytes,
    type_of,
)
from jmp_lite.casting.types import (
    AnyArray,
    Array,
    Leaf,
    Params,
    Path,
    PyTree,
    Tree,
    Updates,
)
from jmp_lite.jaxprs.primitives import straight_through
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
        f"{place_of(path)}, as init got it, and got "
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
