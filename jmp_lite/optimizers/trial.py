"""Judges the arrays of an optimizer's state by trying the optimizer.

It judges by derivatives. They are the same behind transformations that shift, center or
clip gradients: a shift has no derivative, and the gradients here are too small to be
clipped.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.casting.dtypes import is_array, is_floating, is_number
from jmp_lite.casting.types import Array, Leaf, Optimizer, OptState, Params
from jmp_lite.optimizers.moments import Moment

_GRADIENT_SIZE = 2.0**-10
"""The size of the gradients."""


_LATE = 1000
"""A step at which decays that depend on the step are near their final values."""


class Tried(NamedTuple):
    """The behavior of an array of the inner state.

    Attributes:
      moment: its kind; ``UNKNOWN`` if the trial does not show it.
      kept: the part of its value that it keeps at each step; None if the trial does not
        show it, because the array does not depend on the gradients of the step.
    """

    moment: Moment
    kept: float | None


def try_optimizer(inner: Optimizer, params: Params) -> list[Tried]:
    """Tries an optimizer on small parameters.

    Args:
      inner: the optimizer.
      params: its parameters, of which only shapes and dtypes are used.

    Returns:
      One entry for each leaf of the state.
    """

    def small(leaf: Leaf) -> Array:
        dtype = leaf.dtype if is_floating(leaf) else jnp.float32
        return jnp.ones((2,) * jnp.ndim(leaf), dtype)

    with (
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
        jax.debug_nans(False),
    ):
        ones = jax.tree.map(small, params)
        fresh = inner.init(ones)
        others = inner.init(jax.tree.map(lambda x: 2 * x, ones))

        def run_step(state: OptState, more: Array, size: Array) -> Array:
            """Returns the numbers after a step from a state with more in each array."""
            leaves, structure = jax.tree.flatten(state)
            filled = [
                (leaf + number).astype(leaf.dtype) if _is_tried(leaf) else leaf
                for leaf, number in zip(leaves, more, strict=True)
            ]
            grads = jax.tree.map(lambda x: size * _unequal(x), ones)
            return _numbers(inner.update(grads, structure.unflatten(filled), ones)[1])

        starts = fresh, jax.tree.map(_late, fresh)
        start = _numbers(fresh)

        # Op by op it takes ten seconds. What does not depend on an argument is computed
        # op by op.
        @jax.jit
        def run(small: Array, ones: Array) -> tuple[list[Array], list[Array]]:
            at_first = functools.partial(run_step, fresh, 0 * ones)
            return _measure_step(at_first, small), [
                _kept(functools.partial(run_step, state), ones, small)
                for state in starts
            ]

        steps, kept = run(jnp.float32(_GRADIENT_SIZE), jnp.ones_like(start))
        is_of_params = start != _numbers(others)
        steps, kept, is_of_params = jax.tree.map(
            np.asarray, (steps, kept, is_of_params)
        )
    return [
        _tried(_moment(_Results(*step)), *each)
        for step, *each in zip(
            zip(*steps, strict=True), *kept, is_of_params, strict=True
        )
    ]


def _tried(moment: Moment, at_first: float, later: float, is_of_params: bool) -> Tried:
    """Returns the behavior of an array.

    Args:
      moment: its kind, judged after one step from the start.
      at_first: the part of its value that a step from the start keeps; NaN if the array
        does not depend on gradients then.
      later: the same of a later step.
      is_of_params: whether its initial value depends on the parameters.
    """
    kept = max((float(x) for x in (at_first, later) if not np.isnan(x)), default=None)
    if is_of_params:
        return Tried(Moment.EXACT, kept)
    if kept is not None and kept >= 1:  # A sum.
        of_sum = {Moment.AVERAGE: Moment.EXACT, Moment.SQUARES: Moment.GROWING_SQUARES}
        return Tried(of_sum.get(moment, moment), kept)
    return Tried(moment, kept)


def _measure_step(run_step: Callable[[Array], Array], small: Array) -> list[Array]:
    """Returns values, first and second derivatives for small gradients.

    Args:
      run_step: returns the numbers after a step, given the size of the gradients.
      small: the size.

    Returns:
      Eight arrays: these three for positive gradients, then for negative ones, and at
      last the values for gradients near 1 and -1.
    """
    slope = _derivative(run_step)
    funs = run_step, slope, _derivative(slope)
    near = [fun(size) for size in (small, -small) for fun in funs]
    return [*near, *(run_step(far * small / _GRADIENT_SIZE) for far in (1, -1))]


def _derivative(fun: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: jax.jvp(fun, (x,), (jnp.ones_like(x),))[1]


class _Results(NamedTuple):
    """A number of an array after a step, and its derivatives by the gradients' size.

    Attributes:
      plus, slope, bend: the number, the first and the second derivative, for small
        positive gradients.
      minus, slope_below, bend_below: the same for negative ones.
      far, far_below: the number for gradients near 1 and -1.
    """

    plus: float
    slope: float
    bend: float
    minus: float
    slope_below: float
    bend_below: float
    far: float
    far_below: float


def _moment(at: _Results) -> Moment:
    """Judges an array by a number of it after one step."""
    is_positive = min(at.plus, at.minus, at.far, at.far_below) >= 0
    # A positive array may look linear behind a shift, but it has one sign everywhere.
    is_linear = at.bend == at.bend_below == 0 and at.slope == at.slope_below != 0
    if is_linear and at.far * at.far_below < 0:
        return Moment.AVERAGE
    if is_positive and at.bend == at.bend_below > 0:
        return Moment.SQUARES
    if is_positive and at.plus == at.minus and at.slope == -at.slope_below > 0:
        return Moment.SQUARES  # An average of absolute values.
    return Moment.UNKNOWN


def _kept(
    run_step: Callable[[Array, Array], Array], ones: Array, small: Array
) -> Array:
    """Returns the derivative of each number with respect to its value before.

    It is NaN for a number that does not depend on the gradients.
    """
    # The sign of a gradient has no derivative; a small square is lost in a sum.
    moves = (run_step(ones, small) != run_step(ones, 0 * small)) | (
        _derivative(lambda size: run_step(ones, size))(small) != 0
    )

    def derivative_along(direction: Array) -> Array:
        return jax.jvp(lambda more: run_step(more, small), (ones,), (direction,))[1]

    kept = jnp.diagonal(jax.vmap(derivative_along)(jnp.diag(ones)))
    return jnp.where(moves, kept, jnp.nan)


def _numbers(state: OptState) -> Array:
    """Returns one number of each leaf; 0 for a leaf that is not tried."""
    leaves = jax.tree.leaves(state)
    return jnp.stack([jnp.float32(x.ravel()[0] if _is_tried(x) else 0) for x in leaves])


def _unequal(leaf: Array) -> Array:
    """Returns unequal numbers: ``optax.centralize`` subtracts their mean."""
    numbers = 1 / (1 + jnp.arange(leaf.size, dtype=leaf.dtype))
    return numbers.reshape(leaf.shape)


def _is_tried(leaf: Leaf) -> bool:
    is_float = is_array(leaf) and is_floating(leaf)
    return is_float and leaf.ndim > 0 and leaf.size > 0


def _late(leaf: Leaf) -> Leaf:
    is_count = is_number(leaf, jnp.integer) and jnp.ndim(leaf) == 0
    return jnp.full_like(leaf, _LATE) if is_count else leaf
