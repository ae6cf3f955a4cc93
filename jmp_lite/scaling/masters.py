"""Optax transformations for parameters that are 16 bits themselves.

The law of this file: what an update is too small to change in 16 bits is not lost. The
wrapped optimizer sees parameters that have the digits, and the 16-bit ones follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import is_floating, parse_dtype, upcast_tree
from jmp_lite.scaling.transforms import strongly_typed, with_extra_args


class MasterWeightsState(NamedTuple):
    """The state of ``master_weights``.

    Attributes:
      masters: the parameters as they are trained, in float32.
      inner_state: the state of the wrapped transformation, of the masters.

    Example:
      >>> state = master_weights(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.masters.dtype
      dtype('float32')
    """

    masters: Any
    inner_state: Any


def master_weights(
    inner: Any, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it trains float32 copies of 16-bit parameters.

    The copies, the masters, live in the state. After ``optax.apply_updates`` each
    parameter is its master, rounded once: nothing that an update adds is lost, however
    small it is beside the parameter. Memory: 4 bytes for each parameter, beside its 2;
    as much as float32 parameters of which a 16-bit copy is kept.

    It stands inside of ``loss_scaling`` or around it, which skips all the same.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and the masters.
      dtype: the dtype of the masters.

    Returns:
      A transformation whose state is a ``MasterWeightsState``. ``init`` takes the
      parameters: in float32, which are then the masters exactly, or rounded already.
      ``update`` needs the parameters. The updates are in ``dtype``: to be added by
      ``optax.apply_updates``, under JAX's standard dtype promotion.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: ``dtype`` is unknown, or ``update`` is not given the parameters.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; MXNet's
    ``multi_precision=True``.

    Example:
      >>> optimizer = master_weights(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> with jax.numpy_dtype_promotion("standard"):  # JAX's own default.
      ...     for _ in range(4):  # One such step rounds away in bfloat16.
      ...         updates, state = optimizer.update(jnp.full(1, -(2.0**-9)), state, w)
      ...         w = optax.apply_updates(w, updates)
      >>> w, state.masters
      (Array([1.00781], dtype=bfloat16), Array([1.0078125], dtype=float32))
    """
    inner, parsed = with_extra_args(inner), parse_dtype(dtype)

    def cast(leaf: Any) -> Any:
        # Copied, because parameters and state may both be donated.
        return jnp.array(leaf, parsed, copy=True) if is_floating(leaf) else leaf

    def init(params: Any) -> Any:
        masters = jax.tree.map(cast, params)
        return MasterWeightsState(masters, strongly_typed(inner.init(masters)))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "master_weights needs the parameters: optimizer.update(grads, "
                "opt_state, params)."
            )
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, state.masters, **extra_args
        )
        masters = optax.apply_updates(state.masters, steps)

        # What lies between is exact in float32, but for the largest of steps.
        def to_master(master: Any, param: Any) -> Any:
            return master - jnp.asarray(param).astype(master.dtype)

        moved = jax.tree.map(to_master, masters, params)
        return moved, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
