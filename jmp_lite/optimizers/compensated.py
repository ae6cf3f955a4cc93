"""An optax wrapper that stores the digits that 16-bit parameters lack."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_lite.casting.dtypes import is_16_bit, is_array, place_of, type_of, upcast_tree
from jmp_lite.casting.types import AnyArray, Array, Dtype, Leaf, Optimizer, Path, PyTree
from jmp_lite.jaxprs.primitives import straight_through
from jmp_lite.optimizers.rounding import (
    check_16_bit,
    check_16_bit_as_before,
    join,
    split,
    to_float32,
    update_to,
)
from jmp_lite.scaling.wrapping import initial_state, with_extra_args, wrapper


class CompensatedState(NamedTuple):
    """The state of ``compensated``.

    Attributes:
      remainder: what 16-bit parameters lack of their float32 masters: for each dtype of
        theirs a tree of the structure of the parameters, with an ``optax.MaskedNode``
        for each parameter of another dtype. An int16 array for a bfloat16 parameter,
        the lower half of the master's bits; a uint16 array for a float16 parameter. The
        names of the dtypes are a part of the structure, so that no checkpoint is
        restored into the state of parameters of another dtype.
      inner_state: the state of the wrapped transformation, for the masters.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.compensated(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.remainder
      {'bfloat16': Array([0], dtype=int16)}
    """

    remainder: dict[str, PyTree]
    inner_state: PyTree

    def _rounded_parameters(self) -> set[Path] | None:
        """Returns the key paths of the parameters that ``update`` rounds."""
        return {path[1:] for path, _ in jax.tree.leaves_with_path(self.remainder)}


def compensated(inner: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters keep the digits that they lack.

    The state stores 16 more bits of each parameter. Parameter and remainder together
    are a float32 number, the master, bit for bit. It trains as under
    ``master_weights``, and takes 2 bytes a parameter less.

    The master of a float16 parameter below 7.6e-6 is a multiple of 9.1e-13: float16 has
    few bits there.

    Memory: 2 bytes a parameter, in addition to the parameter's 2 bytes;
    ``master_weights`` takes 4. A parameter stops at the largest finite number, and a
    master just above it.

    You may change parameters between two steps: load weights, clip or project them, or
    apply a mask. The remainder stays. It is never more than half a unit in the last
    place of the new parameter.

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
        ``(loss, grads)``, or the state of parameters of other dtypes.
      ValueError: ``update`` gets no parameters; or, in ``init``, no parameter has 16
        bits. (A part that ``optax.masked`` or ``optax.partition`` selects may have
        none.)

    Source: Megatron-LM's ``store_param_remainders``, for bfloat16.

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

    def init(params: PyTree) -> CompensatedState:
        check_16_bit(params, "compensated")
        zeros = jax.tree.map(
            lambda x: jnp.zeros_like(x, remainder_dtype(x)) if is_16_bit(x) else x,
            params,
        )
        inner_state = initial_state(inner, upcast_tree(params))
        return CompensatedState(by_dtype(zeros, params), inner_state)

    def update(
        updates: PyTree, state: CompensatedState, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, CompensatedState]:
        before = remainders_of(state, params)
        masters = jax.tree.map(add_remainder, params, before)
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
        others = map(treedef.flatten_up_to, (before, steps, masters))
        pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
        moved, remainder = (
            treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1)
        )
        return moved, CompensatedState(by_dtype(remainder, params), inner_state)

    return wrapper("compensated", CompensatedState, init, update, needs_params=True)


def remainder_dtype(param: AnyArray) -> Dtype:
    """Returns the dtype of the remainder of a 16-bit parameter, as ``split`` does."""
    return np.dtype("int16" if param.dtype == jnp.bfloat16 else "uint16")


def add_remainder(param: Leaf, remainder: Leaf) -> Leaf:
    """Returns the master of a 16-bit parameter, and any other parameter as it is.

    Args:
      param: the parameter.
      remainder: what it lacks of its master.
    """
    if not is_16_bit(param):
        return param
    return straight_through(join(param, remainder), to_float32(param))


def _move_to_master(param: AnyArray, master: AnyArray) -> tuple[Array, Array]:
    """Returns the update of a 16-bit parameter to a master, and the new remainder."""
    target, remainder = split(master, param.dtype)
    update = update_to(straight_through(to_float32(target), master), param)
    # The sum may miss the target, by a difference near the smallest normal number.
    # Another number with this remainder would be another master.
    # Added as optax.apply_updates does, so that XLA computes the sum once for both:
    # otherwise a TPU would run two kernels.
    total = (to_float32(param) + update).astype(param.dtype)
    is_target = _bits(total) == _bits(target)
    # Selected as floats: a TPU runs two kernels for a step that selects integers.
    kept = jnp.where(is_target, remainder.astype(jnp.float32), 0)
    return update, kept.astype(remainder.dtype)


def _bits(param: AnyArray) -> Array:
    return lax.bitcast_convert_type(param, jnp.uint16)


def by_dtype(remainder: PyTree, params: PyTree) -> dict[str, PyTree]:
    """Returns a tree of remainders for each 16-bit dtype, by the name of the dtype."""

    def part(name: str) -> PyTree:
        def in_part(param: Leaf, remainder: Leaf) -> Leaf:
            is_in_part = is_16_bit(param) and param.dtype.name == name
            return remainder if is_in_part else optax.MaskedNode()

        return jax.tree.map(in_part, params, remainder)

    names = {leaf.dtype.name for leaf in jax.tree.leaves(params) if is_16_bit(leaf)}
    return {name: part(name) for name in sorted(names)}


def remainders_of(state: CompensatedState, params: PyTree) -> PyTree:
    """Returns the remainders in one tree of the structure of the parameters.

    A parameter that has no remainder has an ``optax.MaskedNode``.

    Raises:
      TypeError: the state belongs to parameters of other dtypes.
    """
    leaves, treedef = jax.tree.flatten_with_path(params)
    parts = {
        name: treedef.flatten_up_to(part) for name, part in state.remainder.items()
    }

    def one(number: int, path: Path, param: Leaf) -> PyTree:
        found = {name: x for name, part in parts.items() if is_array(x := part[number])}
        if found:
            check_16_bit_as_before(path, param)
        if not is_16_bit(param):
            return optax.MaskedNode()
        name, expected = param.dtype.name, remainder_dtype(param)
        if name in found and found[name].dtype == expected:
            return found[name]
        came = [f"{type_of(x)} for {dtype}" for dtype, x in found.items()] or ["none"]
        raise TypeError(
            f"Expected a remainder of {expected} for {type_of(param)} at "
            f"{place_of(path)}, got {came[0]}. "
            "Causes: (a) the parameters were cast after init: let "
            "jmp_lite.convert_state cast them; (b) a checkpoint was restored into the "
            "state of parameters of other dtypes: restore it into that of its own."
        )

    found = [one(number, *leaf) for number, leaf in enumerate(leaves)]
    return treedef.unflatten(found)
