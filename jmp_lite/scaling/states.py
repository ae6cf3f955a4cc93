"""The states of the five optimizer wrappers, and what other code asks them.

All have a field ``inner_state``, the state of the wrapped optimizer.
"""

from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax

from jmp_lite.scaling.loss_scale import LossScale


class LossScalingState(NamedTuple):
    """The state of ``loss_scaling``.

    Attributes:
      loss_scale: the ``LossScale`` of the next step.
      inner_state: the state of the wrapped transformation.
      grads_finite: whether the last step's gradients were finite, a boolean scalar.
      skipped: the number of skipped steps, an int32 scalar. With ``skip=False`` it is
        the number of steps with non-finite gradients.
      consecutive_skipped: the number of skipped steps in a row up to now, an int32
        scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.loss_scaling(optax.sgd(0.1)).init(jnp.ones(1))
      >>> state.skipped.dtype, state.loss_scale.loss_scale.dtype
      (dtype('int32'), dtype('float32'))
    """

    loss_scale: LossScale
    inner_state: Any
    grads_finite: Any
    skipped: Any
    consecutive_skipped: Any


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

    masters: Any
    inner_state: Any


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

    remainder: Any
    inner_state: Any


class StochasticRoundingState(NamedTuple):
    """The state of ``stochastic_rounding``.

    Attributes:
      key: the key of the next update.
      inner_state: the state of the wrapped transformation.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
      >>> optimizer.init(jnp.ones(1, jnp.bfloat16)).key.dtype
      key<fry>
    """

    key: Any
    inner_state: Any


class LowPrecisionState(NamedTuple):
    """The state of ``low_precision_state``.

    Attributes:
      inner_state: the state of the wrapped transformation, with its large arrays in 16
        or 8 bits.
      key: the key of the next update for stochastic rounding; None for rounding to the
        nearest.
      scales: one entry for each array of ``inner_state``: the scales of its rows, or
        None for an array without scales. In bfloat16, None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(5000))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: Any
    key: Any
    scales: Any


WrapperState: TypeAlias = (
    LossScalingState
    | MasterWeightsState
    | CompensatedState
    | StochasticRoundingState
    | LowPrecisionState
)


def is_wrapper_state(node: Any) -> TypeGuard[WrapperState]:
    """Whether a node of a pytree is the state of one of the wrappers."""
    return isinstance(node, WrapperState)


def check_state(state: Any, expected: type[Any], name: str) -> None:
    """Raises a TypeError for a state that a wrapper does not make.

    Args:
      state: what ``update`` got.
      expected: the class of the wrapper's state.
      name: the name of the wrapper.
    """
    if isinstance(state, expected):
        return
    raise TypeError(
        f"Expected the {expected.__name__} that {name} makes in init, got "
        f"{type(state).__name__}. Causes: (a) the arguments have another order: call "
        "optimizer.update(grads, opt_state, params); (b) an optimizer with other "
        f"wrappers made the state: {CONVERT}."
    )


CONVERT = (
    "convert it once, before the first update, with params, opt_state = "
    "jmp_lite.convert_state(opt_state, optimizer, params)"
)


def kept_in_16_bits(state: Any) -> Any:
    """Returns the key paths of the parameters that wrappers in a state round.

    None means all of them.
    """

    def rounds(node: Any) -> TypeGuard[_Rounding]:
        return isinstance(node, _Rounding)

    paths: set[Any] = set()
    for node in filter(rounds, jax.tree.leaves(state, is_leaf=rounds)):
        if isinstance(node, StochasticRoundingState):
            return None  # It does not know which.
        is_with_masters = isinstance(node, MasterWeightsState)
        tree = node.masters if is_with_masters else node.remainder
        paths.update(path for path, _ in jax.tree.leaves_with_path(tree))
    return paths


_Rounding: TypeAlias = MasterWeightsState | CompensatedState | StochasticRoundingState
