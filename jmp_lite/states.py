"""The states of optimizers and of trainings, as their ``init`` makes them.

Public names only: each is defined beside the function that makes it.
"""

from jmp_lite.optimizers.compensated import CompensatedState
from jmp_lite.optimizers.low_precision_state import LowPrecisionState
from jmp_lite.optimizers.master_weights import MasterWeightsState
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.scaling.skipping import LossScalingState
from jmp_lite.training.state import TrainingState

__all__ = [
    "CompensatedState",
    "LossScalingState",
    "LowPrecisionState",
    "MasterWeightsState",
    "StochasticRoundingState",
    "TrainingState",
]
