"""Registers training states for programs that ``jax.export`` writes to a file.

Importing this module registers the pytrees that a training step takes and returns,
under names that do not change between versions. Register the states of optax
optimizers yourself, with ``jax.export.register_namedtuple_serialization``.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from jax import export

from jmp_lite import states
from jmp_lite.scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale

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


for _name in states.__all__:
    export.register_namedtuple_serialization(
        getattr(states, _name), serialized_name=f"jmp_lite.{_name}"
    )

_register_scale(DynamicLossScale, list, tuple)
# The auxiliary data of these is the loss scale itself.
_register_scale(
    StaticLossScale,
    lambda scale: [float(scale.loss_scale)],
    lambda numbers: StaticLossScale(*numbers),
)
_register_scale(NoOpLossScale, lambda _: [], lambda _: NoOpLossScale())
