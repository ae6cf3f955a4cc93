"""Mixed precision for JAX: autocast, policies, and loss scaling as an optax transform.

Code that was written for jmp 0.0.4 also runs with ``import jmp_lite as jmp``.
"""

from jmp_lite import formats as formats
from jmp_lite import numerics as numerics
from jmp_lite import ops as ops
from jmp_lite import results as results
from jmp_lite import states as states
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import (
    as_full,
    as_low,
    full_precision,
    low_call,
    low_precision,
)
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.dtypes import (
    Policy,
    cast_to_full,
    cast_to_half,
    cast_tree,
    dtype_summary,
    get_policy,
    half_dtype,
)
from jmp_lite.formats.float8 import Float8
from jmp_lite.formats.own import Format
from jmp_lite.formats.table import get_format
from jmp_lite.insight.comparison import compare
from jmp_lite.insight.explanation import explain
from jmp_lite.insight.tune import tune
from jmp_lite.insight.watch import first_nonfinite, watch
from jmp_lite.optimizers.compensated import compensated
from jmp_lite.optimizers.convert import convert_state
from jmp_lite.optimizers.low_precision_state import low_precision_state
from jmp_lite.optimizers.master_weights import master_weights
from jmp_lite.optimizers.rounding import apply_updates
from jmp_lite.optimizers.stochastic_rounding import stochastic_rounding
from jmp_lite.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    default_loss_scale,
)
from jmp_lite.scaling.skipping import (
    all_finite,
    loss_scaling,
    select_tree,
    skip_nonfinite,
)
from jmp_lite.scaling.state import (
    LossScaleError,
    check_loss_scale,
    get_loss_scale,
    set_loss_scale,
)
from jmp_lite.scaling.value_and_grad import grad, value_and_grad
from jmp_lite.training.step import build_train_step

__version__ = "0.1.0"

__all__ = [
    "DynamicLossScale",
    "Float8",
    "Format",
    "LossScale",
    "LossScaleError",
    "NoOpLossScale",
    "Policy",
    "Rules",
    "StaticLossScale",
    "all_finite",
    "apply_updates",
    "as_full",
    "as_low",
    "autocast",
    "build_train_step",
    "cast_to_full",
    "cast_to_half",
    "cast_tree",
    "check_loss_scale",
    "compare",
    "compensated",
    "convert_state",
    "default_loss_scale",
    "dtype_summary",
    "explain",
    "first_nonfinite",
    "full_precision",
    "get_format",
    "get_loss_scale",
    "get_policy",
    "get_rules",
    "grad",
    "half_dtype",
    "loss_scaling",
    "low_call",
    "low_precision",
    "low_precision_state",
    "master_weights",
    "select_tree",
    "set_loss_scale",
    "skip_nonfinite",
    "stochastic_rounding",
    "tune",
    "value_and_grad",
    "watch",
]
