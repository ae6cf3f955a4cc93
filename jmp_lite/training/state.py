"""The state of a training."""

from typing import NamedTuple, Protocol, TypedDict

import jax
import jax.numpy as jnp

from jmp_lite.casting.dtypes import is_array
from jmp_lite.casting.types import Array, Key, Leaf, PyTree, Tree
from jmp_lite.scaling.find_state import LossScalingState
from jmp_lite.scaling.wrapping import strongly_typed


class TrainingState(NamedTuple):
    """Everything that changes during training.

    Attributes:
      params: the parameters.
      model_state: the state that the loss function takes and returns, such as batch
        statistics.
      opt_state: the optimizer's ``LossScalingState``.
      ema: the exponential moving average of the parameters, in float32, or None.
      rng: the key from which each step derives its keys, or None.
      step: the number of applied steps, an int32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> init, _ = jmp.build_train_step(lambda *args: args, optax.sgd(0.1), ema=0.9)
      >>> state = init({"w": jnp.ones(2)})
      >>> state.params["w"].dtype, state.ema["w"].dtype, state.step.dtype
      (dtype('float32'), dtype('float32'), dtype('int32'))
    """

    params: PyTree
    model_state: PyTree
    opt_state: LossScalingState
    ema: PyTree
    rng: Key | None
    step: Array


class Metrics(TypedDict):
    """What a step measures; see ``build_train_step``."""

    loss: Array
    grad_norm: Array
    grads_finite: Array
    loss_scale: Array
    skipped: Array
    aux: PyTree


class Init(Protocol):
    """Returns the state before the first step; see ``build_train_step``."""

    def __call__(
        self, params: PyTree, model_state: PyTree = None, rng: Key | None = None
    ) -> TrainingState:
        """Returns the state for parameters."""
        ...


def copied(state: TrainingState) -> TrainingState:
    """Copies all arrays: two of them may be one object, or belong to the caller."""

    def copy(leaf: Leaf) -> Leaf:
        return jnp.array(leaf, copy=True) if is_array(leaf) else leaf

    return jax.tree.map(copy, strongly_typed(state))


def moving_average(decay: float, average: Tree, params: PyTree) -> Tree:
    """Returns the moving average of parameters after a step."""

    # In float32: in 16 bits it would stall when (1 - decay) rounds away.
    def mix(old: Array, new: Array) -> Array:
        return decay * old + (1 - decay) * new.astype(old.dtype)

    return jax.tree.map(mix, average, params)
