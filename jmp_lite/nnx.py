"""Flax nnx: modules under autocast, and modules with parameters in 16 bits.

Under autocast, a module is split into its state and merged inside of the trace. Its
changes are written back to the original object, as in ``nnx.jit``. Modules are
traversed as graphs, in Flax's tree mode too, because parts of a model may share
variables.
"""

from jmp_lite.flax.nnx_autocast import autocast, scoped
from jmp_lite.flax.nnx_tools import compare, explain, tune, value_and_grad, watch
from jmp_lite.flax.nnx_variables import (
    ModelDtypes,
    ModuleDtypes,
    cast,
    dtype_summary,
    restore_if_skipped,
    to_float,
)

__all__ = [
    "ModelDtypes",
    "ModuleDtypes",
    "autocast",
    "cast",
    "compare",
    "dtype_summary",
    "explain",
    "restore_if_skipped",
    "scoped",
    "to_float",
    "tune",
    "value_and_grad",
    "watch",
]
