"""An optax wrapper that stores the digits that 16-bit parameters lack."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_lite.casting.dtypes import is_16_bit, is_array, upcast_tree
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import (
    AnyArray,
    Array,
    Leaf,
    Optimizer,
    Params,
    Path,
    PyTree,
    Updates,
)
from jmp_lite.jaxprs.straight_through import straight_through
from jmp_lite.optimizers.parameters import (
    check_16_bit,
    check_16_bit_as_before,
    check_params,
    to_float32,
    update_to,
)
from jmp_lite.optimizers.rounding import grid_of, join, round_to_nearest, split
from jmp_lite.scaling.wrapping import (
    CONVERT,
    check_state,
    initial_state,
    with_extra_args,
)


class CompensatedState(NamedTuple):
    """The state of ``compensated``.

    Attributes:
      remainder: what each 16-bit parameter lacks; an ``optax.MaskedNode`` for any other
        parameter. For a bfloat16 parameter, an int16 array: the lower half of the bits
        of its float32 master. For a float16 parameter, its rounding error in float16.
      inner_state: the state of the wrapped transformation, for the masters.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.compensated(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.remainder.dtype
      dtype('int16')
    """

    remainder: PyTree
    inner_state: PyTree

    def _rounded_parameters(self) -> set[Path] | None:
        """Returns the key paths of the parameters that ``update`` rounds."""
        return {path for path, _ in jax.tree.leaves_with_path(self.remainder)}


def compensated(inner: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters keep the digits that they lack.

    The state stores 16 more bits of each parameter. For a bfloat16 parameter they are
    the lower half of a float32 number, the master. Parameter and remainder together are
    the master, bit for bit. It trains as under ``master_weights``, and takes 2 bytes a
    parameter less.

    A float16 parameter keeps its rounding error, which the next update adds again
    (Kahan summation): 22 mantissa bits, nearly those of float32.

    Memory: 2 bytes a parameter, in addition to the parameter's 2 bytes;
    ``master_weights`` takes 4. A parameter stops at the largest finite number, and a
    master just above it.

    You may change parameters between two steps: load weights, clip or project them, or
    apply a mask. The remainder of a bfloat16 parameter stays. It is never more than
    half a unit in the last place of the new parameter, and vanishes beside a zero. The
    rounding error of a float16 parameter is dropped if it is larger than that.

    Put it inside of ``loss_scaling`` or around it. If it is inside, a ``chain``,
    ``masked``, ``partition`` or ``MultiSteps`` of optax may be between the two. The
    other parts of such a chain then also see 16-bit parameters.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients, and the masters.

    Returns:
      A transformation whose state is a ``CompensatedState``. ``update`` requires the
      parameters. Its updates are in float32, for ``jmp_lite.apply_updates`` (see
      ``master_weights``). ``inner`` trains parameters of 32 bits as usual.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``, or a state that an older version saved.
      ValueError: ``update`` gets no parameters; or, in ``init``, no parameter has 16
        bits. (A part that ``optax.masked`` or ``optax.partition`` selects may have
        none.)

    Source: for bfloat16, Megatron-LM's ``store_param_remainders``; for float16, Kahan,
    "Further remarks on reducing truncation errors", 1965, and Zamirai et al.,
    "Revisiting BFloat16 Training", 2020.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.compensated(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> step = jnp.full(1, -(2.0**-9))  # One such step rounds away in bfloat16.
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(step, state, w)
      ...     w = jmp.apply_updates(w, updates)
      >>> w
      Array([1.00781], dtype=bfloat16)
    """
    inner = with_extra_args(inner)

    def init(params: Params) -> CompensatedState:
        check_16_bit(params, "compensated")
        remainder = jax.tree.map(_zero_remainder, params)
        inner_state = initial_state(inner, upcast_tree(params))
        return CompensatedState(remainder, inner_state)

    def update(
        updates: Updates,
        state: PyTree,
        params: Params | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, CompensatedState]:
        check_state(state, CompensatedState, "compensated")
        check_params(updates, params, "compensated")
        _check_remainder(state.remainder, params)
        masters = jax.tree.map(add_remainder, params, state.remainder)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, masters, **extra_args
        )

        def add(
            param: Leaf, remainder: Leaf, step: Leaf, master: Leaf
        ) -> tuple[Leaf, Leaf]:
            if step is None or not is_16_bit(param):
                return step, remainder
            return _move_to_master(param, to_float32(master + step))

        leaves, treedef = jax.tree.flatten(params)
        others = map(treedef.flatten_up_to, (state.remainder, steps, masters))
        pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
        moved, remainder = (
            treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1)
        )
        return moved, CompensatedState(remainder, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _zero_remainder(param: Leaf) -> Array | optax.MaskedNode:
    """Returns the remainder of a parameter that equals its master."""
    if not is_16_bit(param):
        return optax.MaskedNode()
    is_exact = param.dtype == jnp.bfloat16
    return jnp.zeros_like(param, jnp.int16 if is_exact else None)


def add_remainder(param: Leaf, remainder: Leaf) -> Leaf:
    """Returns the master of a 16-bit parameter, and any other parameter as it is.

    Args:
      param: the parameter.
      remainder: the lower half of the bits of its master, or its rounding error.
    """
    if not is_16_bit(param):
        return param
    if remainder.dtype == jnp.int16:
        return straight_through(join(param, remainder), to_float32(param))
    wide, error = to_float32(param), to_float32(remainder)
    # Adding a zero would change the sign of a zero.
    is_added = may_differ_by(error, param) & (error != 0)
    return jnp.where(is_added, wide + error, wide)


def may_differ_by(error: AnyArray, param: AnyArray) -> Array:
    """Whether a parameter plus an error, in float32, rounds to the parameter."""
    wide = to_float32(param)
    # A little less, because a rounding error of half a unit is a tie.
    less = error * (1 - float(jnp.finfo(param.dtype).epsneg))
    return round_to_nearest(wide + less, grid_of(param.dtype)) == wide


def remainder_of(param: AnyArray, master: AnyArray) -> Array:
    """Returns the remainder of a 16-bit parameter, which is its master rounded."""
    if param.dtype == jnp.bfloat16:
        return split(master)[1]
    wide = to_float32(param)
    error = jnp.where(jnp.isfinite(wide), master - wide, 0)
    return round_to_nearest(error, grid_of(param.dtype)).astype(param.dtype)


def _move_to_master(param: AnyArray, master: AnyArray) -> tuple[Array, Array]:
    """Returns the update of a 16-bit parameter to a master, and the new remainder."""
    if param.dtype == jnp.bfloat16:
        target, remainder = split(master)
        update = update_to(straight_through(to_float32(target), master), param)
        # The sum may miss the target, by a difference near the smallest normal number.
        # Another number with this remainder would be another master.
        is_target = _bits(_sum(param, update)) == _bits(target)
        # Selected as floats: a TPU runs two kernels for a step that selects integers.
        kept = jnp.where(is_target, remainder.astype(jnp.float32), 0)
        return update, kept.astype(jnp.int16)
    target = round_to_nearest(master, grid_of(param.dtype))
    update = update_to(straight_through(target, master), param)
    return update, remainder_of(_sum(param, update), master)


def _sum(param: AnyArray, update: Array) -> AnyArray:
    """Adds as optax.apply_updates does, so that XLA computes the sum once for both.

    Otherwise a TPU would run two kernels.
    """
    return (to_float32(param) + update).astype(param.dtype)


def _bits(param: AnyArray) -> Array:
    return lax.bitcast_convert_type(param, jnp.uint16)


def _check_remainder(remainder: PyTree, params: PyTree) -> None:
    """Raises a TypeError for remainders of parameters of another dtype."""
    leaves, treedef = jax.tree.flatten_with_path(params)
    found = treedef.flatten_up_to(remainder)
    for (path, param), bits in zip(leaves, found, strict=True):
        if is_array(bits):
            check_16_bit_as_before(path, param)
        elif not is_16_bit(param):
            continue
        is_exact = param.dtype == jnp.bfloat16
        expected = jnp.dtype(jnp.int16 if is_exact else param.dtype)
        if not is_array(bits) or bits.dtype != expected:
            raise TypeError(
                f"Expected a remainder of {expected} for {type_of(param)} at "
                f"{jax.tree_util.keystr(path) or 'the root'}, got {type_of(bits)}. "
                "Causes: (a) an older version saved the state, with rounding errors: "
                f"{CONVERT}; (b) the parameters were cast to another dtype after init: "
                "let jmp_lite.convert_state cast them."
            )
