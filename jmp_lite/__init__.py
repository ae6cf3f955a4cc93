"""Mixed precision for JAX: policies that cast, loss scaling that travels through optax.

``import jmp_lite as jmp`` also runs code that was written for jmp 0.0.4.
"""

from jmp_lite.casting.dtypes import DtypeSummary as DtypeSummary
from jmp_lite.casting.dtypes import DtypeTotals as DtypeTotals
from jmp_lite.casting.dtypes import cast_to_full as cast_to_full
from jmp_lite.casting.dtypes import cast_to_half as cast_to_half
from jmp_lite.casting.dtypes import cast_tree as cast_tree
from jmp_lite.casting.dtypes import dtype_summary as dtype_summary
from jmp_lite.casting.dtypes import dtype_to_names as dtype_to_names
from jmp_lite.casting.dtypes import half_dtype as half_dtype
from jmp_lite.casting.policy import Policy as Policy
from jmp_lite.casting.policy import get_policy as get_policy
from jmp_lite.scaling.gradients import grad as grad
from jmp_lite.scaling.gradients import value_and_grad as value_and_grad
from jmp_lite.scaling.loss_scale import DynamicLossScale as DynamicLossScale
from jmp_lite.scaling.loss_scale import LossScale as LossScale
from jmp_lite.scaling.loss_scale import NoOpLossScale as NoOpLossScale
from jmp_lite.scaling.loss_scale import StaticLossScale as StaticLossScale
from jmp_lite.scaling.loss_scale import all_finite as all_finite
from jmp_lite.scaling.loss_scale import default_loss_scale as default_loss_scale
from jmp_lite.scaling.loss_scale import select_tree as select_tree
from jmp_lite.scaling.transforms import LossScaleError as LossScaleError
from jmp_lite.scaling.transforms import LossScalingState as LossScalingState
from jmp_lite.scaling.transforms import check_loss_scale as check_loss_scale
from jmp_lite.scaling.transforms import get_loss_scale as get_loss_scale
from jmp_lite.scaling.transforms import loss_scaling as loss_scaling
from jmp_lite.scaling.transforms import skip_nonfinite as skip_nonfinite
from jmp_lite.train import TrainingState as TrainingState
from jmp_lite.train import build_train_step as build_train_step

__version__ = "0.1.0"
