"""An optax wrapper that trains float32 copies of 16-bit parameters.

A small update is not lost: the wrapped optimizer sees parameters with all their digits,
and the 16-bit parameters follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    is_floating,
    parse_dtype,
    refuse_raw_bytes,
    upcast_tree,
)
from jmp_lite.casting.types import AnyArray, Dtype, Leaf, Optimizer, Path, PyTree
from jmp_lite.jaxprs.primitives import straight_through
from jmp_lite.optimizers.rounding import (
    NOT_ROUNDED,
    apply_updates,
    grid_of,
    round_to_nearest,
    split,
    to_float32,
    types_of,
    update_to,
    whole_or_part,
)
from jmp_lite.scaling.wrapping import initial_state, with_extra_args, wrapper


class MasterWeightsState(NamedTuple):
    """The state of ``master_weights``.

    Attributes:
      masters: the float32 parameters that the optimizer trains.
      inner_state: the state of the wrapped transformation, for the masters.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.master_weights(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.masters.dtype
      dtype('float32')
    """

    masters: PyTree
    inner_state: PyTree

    def _rounded_parameters(self) -> set[Path] | None:
        """Returns the key paths of the parameters that ``update`` rounds."""
        return {path for path, _ in jax.tree.leaves_with_path(self.masters)}


def master_weights(
    inner: Optimizer, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it trains float32 copies of 16-bit parameters.

    The state contains the copies, the masters. After ``jmp_lite.apply_updates`` each
    parameter is its master, rounded once. No update is lost, however small it is
    compared with the parameter.

    Memory: 4 bytes a parameter, in addition to the parameter's 2 bytes. Float32
    parameters with a 16-bit copy take the same.

    Three cases differ from plain rounding:

    - While a finite master is out of the parameter's range, the parameter is the
      largest finite number. A non-finite master stays visible in the parameter. No
      update repairs a parameter that is infinite from the start.
    - Differences below 2**-126 are not corrected.
    - A parameter that becomes zero loses the sign of the zero.

    You may change parameters between two steps: load weights, clip or project them, or
    apply a mask. A parameter that is not its master rounded is the new master. An
    element that did not change keeps its master, with all its digits.

    Some parameters may be as wide as the masters, such as float32 ones. They are
    trained as by ``inner`` alone.

    Put it inside of ``loss_scaling`` or around it; both skip the same steps.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and the masters.
      dtype: the dtype of the masters, of at least 32 bits.

    Returns:
      A transformation whose state is a ``MasterWeightsState``.

      ``init`` takes the parameters: float32 ones, which become the masters, or rounded
      ones. ``update`` requires the parameters. Its updates are in ``dtype``, for
      ``jmp_lite.apply_updates``. (``optax.apply_updates`` does the same under JAX's
      standard dtype promotion. ``eqx.apply_updates`` makes parameters float32.)

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``.
      ValueError: ``dtype`` is unknown or narrower than 32 bits, or ``update`` gets no
        parameters, or none that is narrower than its master.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; MXNet's
    ``multi_precision=True``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.master_weights(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> step = jnp.full(1, -(2.0**-9))  # One such step rounds away in bfloat16.
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(step, state, w)
      ...     w = jmp.apply_updates(w, updates)
      >>> w, state.masters
      (Array([1.00781], dtype=bfloat16), Array([1.0078125], dtype=float32))
    """
    inner, parsed = with_extra_args(inner), parse_dtype(dtype)
    if jnp.finfo(parsed).bits < 32:
        raise ValueError(
            f"Expected masters of at least 32 bits, got dtype={parsed.name!r}: "
            "narrower masters lose the digits that they should keep. Leave dtype "
            "out, or use compensated, which stores 16 more bits of each parameter."
        )

    def cast(leaf: Leaf) -> Leaf:
        if not is_floating(leaf):
            return leaf
        is_wider = jnp.finfo(leaf.dtype).bits > jnp.finfo(parsed).bits
        # A copy, because parameters and state may both be donated.
        return jnp.array(leaf, leaf.dtype if is_wider else parsed, copy=True)

    def init(params: PyTree) -> MasterWeightsState:
        refuse_raw_bytes(params)
        masters = jax.tree.map(cast, params)
        return MasterWeightsState(masters, initial_state(inner, masters))

    def update(
        updates: PyTree, state: MasterWeightsState, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, MasterWeightsState]:
        check_narrower(
            params,
            state.masters,
            f"Causes: (a) {NOT_ROUNDED}; (b) the parameters have 32 bits: cast them "
            "with cast_tree, or leave the wrapper out.",
        )
        masters = jax.tree.map(master_of, params, state.masters)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, masters, **extra_args
        )
        masters = apply_updates(masters, steps)

        def to_master(master: Leaf, step: Leaf, param: Leaf) -> Leaf:
            if step is None or not is_narrower(param, master):
                return step
            target = straight_through(rounded_to(master, param.dtype), master)
            return update_to(target, param)

        moved = jax.tree.map(to_master, masters, steps, params)
        return moved, MasterWeightsState(masters, inner_state)

    return wrapper(
        "master_weights", MasterWeightsState, init, update, needs_params=True
    )


_TINY = float(jnp.finfo(jnp.float32).tiny)


def rounded_to(master: AnyArray, dtype: Dtype) -> AnyArray:
    """Rounds a master to the numbers of a parameter's dtype, in its own dtype."""
    if jnp.finfo(dtype).bits == 16 and master.dtype == jnp.float32:
        return to_float32(split(master, dtype)[0])
    return round_to_nearest(master, grid_of(dtype))


def master_of(param: Leaf, master: Leaf) -> Leaf:
    """Returns the master, or the parameter if it is not the master rounded."""
    if not is_narrower(param, master):
        return param
    wide = param.astype(master.dtype)
    off = wide - rounded_to(master, param.dtype)
    # A cast may have rounded a tie in the other direction.
    is_tie = round_to_nearest(master, grid_of(param.dtype)) == wide
    # No update removes a difference below the smallest normal number.
    return jnp.where((jnp.abs(off) <= _TINY) | is_tie, master, wide)


def is_narrower(param: Leaf, master: Leaf) -> bool:
    """Whether both are floating-point arrays, and the first has fewer bits."""
    is_pair = is_floating(param) and is_floating(master)
    return is_pair and jnp.finfo(param.dtype).bits < jnp.finfo(master.dtype).bits


def check_narrower(params: PyTree, masters: PyTree, advice: str) -> None:
    """Raises a ValueError if there are parameters, and none is narrower.

    Args:
      params: the parameters.
      masters: the masters. Those of a part that optax.masked or optax.partition has
        selected may all be as wide.
      advice: the end of the message.
    """
    leaves, is_part = whole_or_part(masters)
    pairs = [*zip(jax.tree.leaves(params), leaves, strict=False)]
    floats = [param for param, _ in pairs if is_floating(param)]
    if floats and not is_part and not any(is_narrower(*pair) for pair in pairs):
        raise ValueError(
            "master_weights is for parameters that are narrower than their masters, "
            f"but got only {types_of(floats)}. {advice}"
        )
