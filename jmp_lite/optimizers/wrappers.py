"""The states of wrappers, which may be nested.

All have a field ``inner_state``, the state of the wrapped optimizer.
"""

from typing import TypeAlias, TypeGuard

from jmp_lite.casting.types import PyTree
from jmp_lite.optimizers.compensated import CompensatedState
from jmp_lite.optimizers.low_precision_state import LowPrecisionState
from jmp_lite.optimizers.master_weights import MasterWeightsState
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.scaling.find_state import LossScalingState

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
