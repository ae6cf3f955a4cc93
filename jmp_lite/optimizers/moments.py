"""The kinds of the arrays in the states of optimizers, and their formats in fewer bits.

A table has the kinds by class and field. An array that it does not name stays in
float32, unless the user names its field. The names are text, because a version of optax
may lack some of the classes.
"""

import enum
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_array, is_floating, is_number
from jmp_lite.casting.types import Array, Dtype, Leaf, Optimizer, Path, PyTree
from jmp_lite.optimizers.storage import SQUARES, spacing_of


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


_AVERAGE, _SQUARES = Moment.AVERAGE, Moment.SQUARES
_GROWING, _EXACT = Moment.GROWING_SQUARES, Moment.EXACT


def _exact(*fields: str) -> Mapping[str, Moment]:
    return dict.fromkeys(fields, Moment.EXACT)


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
    "ScaleByAdanState": {"m": _AVERAGE, "v": _AVERAGE, "n": _SQUARES, "g": _AVERAGE},
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
    "ScaleByRStdDevState": _exact("mu", "nu"),
    "ScaleByRStdDevWithCountState": _exact("mu", "nu"),
    # Estimates of the curvature have both signs, and updates are divided by them.
    "SophiaState": {"mu": _AVERAGE, "nu": _EXACT},
    # The sums decide the learning rate.
    "DAdaptAdamWState": {
        "exp_avg": _AVERAGE,
        "exp_avg_sq": _SQUARES,
        **_exact("grad_sum"),
    },
    "ProdigyState": {
        "exp_avg": _AVERAGE,
        "exp_avg_sq": _SQUARES,
        **_exact("grad_sum", "params0"),
    },
    # The parameters are computed anew from the sums.
    "COCOBState": {
        **_exact("init_particles", "cumulative_gradients", "scale", "subgradients"),
        **_exact("reward"),
    },
    "MadgradState": _exact("grad_sum_sq", "s", "x0"),
    # Parameters, and what 16-bit parameters lack.
    "CompensatedState": _exact("remainder"),
    "DoGState": _exact("init_params"),
    "DoWGState": _exact("init_params"),
    "MasterWeightsState": _exact("masters"),
    "MechanicState": _exact("x0"),
    "SAMState": _exact("cache"),
    "ScaleByDistanceOverGradientsState": _exact("init_params"),
    "ScheduleFreeState": _exact("z"),
    # Gradients that the next step uses, sums of them, step sizes, and others.
    "AccumulateAvgUpdatesState": _exact("avg_grad"),
    "ApplyEvery": _exact("grad_acc"),
    "GaLoreState": _exact("projector"),
    "MonitorState": _exact("measurements"),
    "MultiStepsState": _exact("acc_grads"),
    "PerElementMeanAndSumSqDiffGradsState": _exact("mean_grads", "sum_sq_diff_grads"),
    "PerElementMeanAndVarianceEMAState": _exact("mean_grads_ema", "variance_grads_ema"),
    "ScaleByBacktrackingLinesearchState": _exact("grad"),
    "ScaleByLBFGSState": {
        **_exact("params", "updates", "weights_memory"),
        **_exact("diff_params_memory", "diff_updates_memory"),
    },
    "ScaleByRpropState": _exact("step_sizes", "prev_updates"),
    "ScaleByZoomLinesearchState": _exact("grad"),
    "SnapshotState": _exact("measurement"),
}
"""The arrays of a state. A field that is not listed holds scalars or other states."""


def known_moments(state: PyTree) -> PyTree:
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


SMALLEST = 4096
"""Arrays with fewer elements stay in float32: they take little memory."""


def is_large(leaf: Leaf) -> bool:
    """Whether an array is large enough to be stored in fewer bits."""
    return is_array(leaf) and is_floating(leaf) and leaf.size >= SMALLEST


def choose_formats(
    inner: Optimizer,
    params: PyTree,
    state: PyTree,
    dtype: Dtype,
    is_by_chance: bool,
    fields: Mapping[str, Moment],
) -> list[Dtype | None]:
    """Returns the format of each array of the inner state; None for float32.

    Args:
      inner: the optimizer.
      params: its parameters.
      state: its state.
      dtype: the dtype of averages.
      is_by_chance: whether they are rounded stochastically, so that any decay is
        accepted.
      fields: what the user says of fields that the table does not know.

    Raises:
      ValueError: the dtype cannot store a moment.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if is_array(leaf)}

    def moment_of(path: Path, x: Leaf, known: Moment) -> Moment:
        is_wider = is_large(x) and dtype.itemsize < x.dtype.itemsize < 8
        if not is_wider or x.shape not in shapes:
            return Moment.EXACT
        if known != Moment.UNKNOWN:
            return known
        named = (fields[name] for name in map(_name, path) if name in fields)
        return next(named, Moment.UNKNOWN)

    known: list[Moment] = jax.tree.leaves(known_moments(state))
    pairs = zip(jax.tree.leaves_with_path(state), known, strict=True)
    found = [
        (f"inner_state{jax.tree_util.keystr(path)}", moment_of(path, x, moment))
        for (path, x), moment in pairs
    ]
    squares = [name for name, moment in found if moment in _ALL_SQUARES]
    if squares and dtype == jnp.float16:
        raise ValueError(
            f"float16 cannot store averages of squared gradients, as at {squares[0]}: "
            "a gradient of 1e-4 has a square of 1e-8, below the smallest number of "
            "float16. Use dtype='bfloat16'."
        )
    _warn_of_unknown([name for name, moment in found if moment == Moment.UNKNOWN])

    def format_of(moment: Moment) -> Dtype | None:
        if moment in _ALL_SQUARES and dtype.itemsize == 1:
            return SQUARES
        return dtype if moment in (Moment.AVERAGE, *_ALL_SQUARES) else None

    formats = [format_of(moment) for _, moment in found]
    if not is_by_chance and any(one is not None for one in formats):
        kept = _decays(inner, params)
        for (name, moment), stored_in, part in zip(found, formats, kept, strict=True):
            if stored_in is not None:
                is_growing = moment == Moment.GROWING_SQUARES
                _check_steps(name, 1.0 if is_growing else part, stored_in, dtype)
    return formats


_ALL_SQUARES = (Moment.SQUARES, Moment.GROWING_SQUARES)


def _name(key: Any) -> Any:
    """Returns the name of a field or a key of a dictionary."""
    return getattr(key, "name", getattr(key, "key", None))


def _decays(inner: Optimizer, params: PyTree) -> list[float]:
    """Returns the part of its value that each array of a state keeps at a step.

    It is what a step makes of ones, less what it makes of zeros: at the first step, and
    at a late one, for decays that depend on the step.

    Raises:
      ValueError: the optimizer needs more than gradients for a step.
    """

    def small(leaf: Leaf) -> Array:
        dtype = leaf.dtype if is_floating(leaf) else jnp.float32
        return jnp.ones((2,) * jnp.ndim(leaf), dtype)

    def filled(leaf: Leaf, number: ArrayLike, count: ArrayLike) -> Leaf:
        if is_array(leaf) and is_floating(leaf) and leaf.ndim:
            return jnp.full_like(leaf, number)
        is_count = is_number(leaf, jnp.integer) and jnp.ndim(leaf) == 0
        return jnp.full_like(leaf, count) if is_count else leaf

    @jax.jit
    def run(number: ArrayLike, count: ArrayLike) -> list[Array]:
        state = jax.tree.map(lambda x: filled(x, number, count), inner.init(ones))
        _, state = inner.update(jax.tree.map(jnp.zeros_like, ones), state, ones)
        return [
            jnp.float32(jnp.ravel(x)[0] if is_floating(x) else 0)
            for x in jax.tree.leaves(state)
        ]

    ones = jax.tree.map(small, params)
    with (
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
    ):
        try:
            each = [
                np.subtract(run(1.0, count), run(0.0, count)) for count in (0, _LATE)
            ]
        except Exception as error:
            raise ValueError(
                "Rounding to the nearest is for averages that change fast enough, and "
                f"a step of this optimizer on small parameters raises "
                f"{type(error).__name__}: {error}. Use stochastic rounding: "
                "low_precision_state(..., key=jax.random.key(0))."
            ) from error
    return np.maximum(*each).tolist()


_LATE = 1000
"""A step at which decays that depend on the step are near their final values."""


_TOLERATED = 0.1
"""The part of a constant gradient that an average may lose to rounding."""


def _check_steps(where: str, kept: float, stored_in: Dtype, dtype: Dtype) -> None:
    """Raises a ValueError for an average that rounding to the nearest stops early."""
    # It stops where a step changes it by less than half of the spacing.
    spacing = spacing_of(stored_in)
    changed = max(1 - kept, 0)
    short = spacing / 2 / changed if changed else np.inf
    if short / (1 + short) <= _TOLERATED:
        return
    stops = (
        "never change"
        if short >= 1
        else f"stop up to {short / (1 + short):.0%} short of a constant gradient"
    )
    raise ValueError(
        f"A moment that keeps {kept:.6g} of its value at each step would {stops} in "
        f"{dtype.name}: smaller changes than half of the spacing are lost, and the "
        f"spacing is {spacing:.3g} of the value. It is at {where}. Use stochastic "
        "rounding: low_precision_state(..., key=jax.random.key(0))."
    )


def _warn_of_unknown(names: Sequence[str]) -> None:
    if not names:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warnings.warn(
        f"low_precision_state keeps {', '.join(names[:3])}{more} in float32: it does "
        "not know this state. To store it in fewer bits, name its fields, as in "
        "low_precision_state(..., fields={'m': 'average', 'v': 'squares'}); 'exact' "
        "keeps float32 without this warning.",
        stacklevel=3,
    )
