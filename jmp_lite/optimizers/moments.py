"""The kinds of the arrays in the states of optimizers, by class and field.

An array that the table does not name stays in float32, unless the user names its field.
The names are text, because a version of optax may lack some of the classes.
"""

import enum
from collections.abc import Mapping

import jax

from jmp_lite.casting.types import OptState, PyTree


class Moment(enum.Enum):
    """The kind of an array in an optimizer's state."""

    AVERAGE = enum.auto()
    """An average of gradients, a sum that decays, or the last gradient: any sign."""

    SQUARES = enum.auto()
    """An average of squares, or another positive array that updates are divided by."""

    GROWING_SQUARES = enum.auto()
    """A sum of squares, or an average whose decay tends to one."""

    EXACT = enum.auto()
    """An array that needs all its digits.

    Examples are parameters, sums of gradients, arrays that parameters are computed
    from, and arrays whose small differences count.
    """

    UNKNOWN = enum.auto()
    """An array that the table does not name."""


_AVERAGE, _SQUARES, _GROWING, _EXACT = (
    Moment.AVERAGE,
    Moment.SQUARES,
    Moment.GROWING_SQUARES,
    Moment.EXACT,
)

MOMENTS: Mapping[str, Mapping[str, Moment]] = {
    # Momentum.
    "EmaState": {"ema": _AVERAGE},
    "MomoState": {"exp_avg": _AVERAGE},
    "MuonState": {"mu": _AVERAGE, "ns_coeffs": _EXACT},
    "ScaleByLionState": {"mu": _AVERAGE},
    "ScaleByNovogradState": {"mu": _AVERAGE},
    "ScaleByOptimisticGradientState": {"previous_gradient": _AVERAGE},
    "TraceState": {"trace": _AVERAGE},
    # Momentum and squares.
    "MomoAdamState": {"exp_avg": _AVERAGE, "exp_avg_sq": _SQUARES},
    "ScaleByAdamState": {"mu": _AVERAGE, "nu": _SQUARES},
    "ScaleByAdanState": {
        "m": _AVERAGE,
        "v": _AVERAGE,
        "n": _SQUARES,
        "g": _AVERAGE,
    },
    "ScaleByAdemamixState": {"m1": _AVERAGE, "m2": _AVERAGE, "nu": _SQUARES},
    "ScaleByAmsgradState": {"mu": _AVERAGE, "nu": _SQUARES, "nu_max": _GROWING},
    "ScaleByBeliefState": {"mu": _AVERAGE, "nu": _SQUARES},
    "ScaleBySimplifiedAdEMAMixState": {"m": _AVERAGE, "n": _SQUARES},
    "ScaleBySM3State": {"mu": _GROWING, "nu": _AVERAGE},
    # Squares.
    "FactoredState": {"v_row": _GROWING, "v_col": _GROWING, "v": _GROWING},
    "ScaleByAdaDeltaState": {"e_g": _SQUARES, "e_x": _SQUARES},
    "ScaleByRmsState": {"nu": _SQUARES},
    "ScaleByRmsWithCountState": {"nu": _SQUARES},
    "ScaleByRssState": {"sum_of_squares": _GROWING},
    # The difference nu - mu**2 loses the digits that both have in common.
    "ScaleByRStdDevState": {"mu": _EXACT, "nu": _EXACT},
    "ScaleByRStdDevWithCountState": {"mu": _EXACT, "nu": _EXACT},
    # Estimates of the curvature have both signs, and updates are divided by them.
    "SophiaState": {"mu": _AVERAGE, "nu": _EXACT},
    # The sums decide the learning rate.
    "DAdaptAdamWState": {
        "exp_avg": _AVERAGE,
        "exp_avg_sq": _SQUARES,
        "grad_sum": _EXACT,
    },
    "ProdigyState": {
        "exp_avg": _AVERAGE,
        "exp_avg_sq": _SQUARES,
        "grad_sum": _EXACT,
        "params0": _EXACT,
    },
    # The parameters are computed anew from the sums.
    "COCOBState": {
        "init_particles": _EXACT,
        "cumulative_gradients": _EXACT,
        "scale": _EXACT,
        "subgradients": _EXACT,
        "reward": _EXACT,
    },
    "MadgradState": {"grad_sum_sq": _EXACT, "s": _EXACT, "x0": _EXACT},
    # Parameters, and what 16-bit parameters lack.
    "CompensatedState": {"remainder": _EXACT},
    "DoGState": {"init_params": _EXACT},
    "DoWGState": {"init_params": _EXACT},
    "MasterWeightsState": {"masters": _EXACT},
    "MechanicState": {"x0": _EXACT},
    "SAMState": {"cache": _EXACT},
    "ScaleByDistanceOverGradientsState": {"init_params": _EXACT},
    "ScheduleFreeState": {"z": _EXACT},
    # Gradients that the next step uses, sums of them, step sizes, and others.
    "AccumulateAvgUpdatesState": {"avg_grad": _EXACT},
    "ApplyEvery": {"grad_acc": _EXACT},
    "GaLoreState": {"projector": _EXACT},
    "MonitorState": {"measurements": _EXACT},
    "MultiStepsState": {"acc_grads": _EXACT},
    "PerElementMeanAndSumSqDiffGradsState": {
        "mean_grads": _EXACT,
        "sum_sq_diff_grads": _EXACT,
    },
    "PerElementMeanAndVarianceEMAState": {
        "mean_grads_ema": _EXACT,
        "variance_grads_ema": _EXACT,
    },
    "ScaleByBacktrackingLinesearchState": {"grad": _EXACT},
    "ScaleByLBFGSState": {
        "params": _EXACT,
        "updates": _EXACT,
        "diff_params_memory": _EXACT,
        "diff_updates_memory": _EXACT,
        "weights_memory": _EXACT,
    },
    "ScaleByRpropState": {"step_sizes": _EXACT, "prev_updates": _EXACT},
    "ScaleByZoomLinesearchState": {"grad": _EXACT},
    "SnapshotState": {"measurement": _EXACT},
}
"""The arrays of a state. A field that is not listed holds scalars or other states."""


def known_moments(state: OptState) -> PyTree:
    """Returns a state with a ``Moment`` in place of each leaf."""

    def fill(node: PyTree) -> PyTree:
        if not _is_known(node):
            return Moment.UNKNOWN
        moments = MOMENTS[type(node).__name__]
        return node._replace(
            **{
                name: jax.tree.map(lambda _, found=moments[name]: found, part)
                if name in moments
                else known_moments(part)
                for name, part in node._asdict().items()
            }
        )

    return jax.tree.map(fill, state, is_leaf=_is_known)


def _is_known(node: PyTree) -> bool:
    package = type(node).__module__.partition(".")[0]
    return type(node).__name__ in MOMENTS and package in ("jmp_lite", "optax")
