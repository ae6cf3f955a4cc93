"""The states of optimizers and of trainings, as their ``init`` makes them.

Each is defined beside the function that makes it. Importing this module registers them
and the loss scales, the pytrees that a training step takes and returns, for programs
that ``jax.export`` writes to a file, under names that do not change between versions.
Register the states of optax optimizers yourself, with
``jax.export.register_namedtuple_serialization``.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from jax import export

from jmp_lite.optimizers.compensated import CompensatedState
from jmp_lite.optimizers.low_precision_state import LowPrecisionState
from jmp_lite.optimizers.master_weights import MasterWeightsState
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
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

Static = TypeVar("Static")
"""The auxiliary data of a loss scale."""


def _register_scale(
    scale: type,
    numbers_of: Callable[[Static], list[float | None]],
    from_numbers: Callable[[list[float | None]], Static],
) -> None:
    """Registers a loss scale by the numbers in its auxiliary data."""
    export.register_pytree_node_serialization(
        scale,
        serialized_name=f"jmp_lite.{scale.__name__}",
        serialize_auxdata=lambda static: json.dumps(numbers_of(static)).encode(),
        deserialize_auxdata=lambda text: from_numbers(json.loads(text.decode())),
    )


for _name in __all__:
    export.register_namedtuple_serialization(
        globals()[_name], serialized_name=f"jmp_lite.{_name}"
    )

_register_scale(DynamicLossScale, list, tuple)
# The auxiliary data of these is the loss scale itself.
_register_scale(
    StaticLossScale,
    lambda scale: [float(scale.loss_scale)],
    lambda numbers: StaticLossScale(*numbers),
)
_register_scale(NoOpLossScale, lambda _: [], lambda _: NoOpLossScale())
