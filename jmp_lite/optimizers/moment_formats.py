"""Chooses the format in which each array of an optimizer's state is stored."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.casting.dtypes import is_array, is_floating
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Dtype, Leaf, Optimizer, OptState, Params
from jmp_lite.optimizers.moments import Moment, known_moments
from jmp_lite.optimizers.storage import SQUARES, spacing_of
from jmp_lite.optimizers.trial import Tried, try_optimizer

SMALLEST = 4096
"""Arrays with fewer elements stay in float32: they take little memory."""


def is_large(leaf: Leaf) -> bool:
    """Whether an array is large enough to be stored in fewer bits."""
    return is_array(leaf) and is_floating(leaf) and leaf.size >= SMALLEST


def choose_formats(
    inner: Optimizer,
    params: Params,
    state: OptState,
    dtype: Dtype,
    is_by_chance: bool,
) -> list[Dtype | None]:
    """Returns the format of each array of the inner state; None for float32.

    Raises:
      ValueError: the dtype cannot store a moment.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if is_array(leaf)}
    leaves = jax.tree.leaves_with_path(state)
    known: list[Moment] = jax.tree.leaves(known_moments(state))

    def may_be_stored(x: Leaf, moment: Moment) -> bool:
        is_wider = is_large(x) and dtype.itemsize < x.dtype.itemsize < 8
        return is_wider and x.shape in shapes and moment != Moment.EXACT

    candidates = {
        number: moment
        for number, ((_, x), moment) in enumerate(zip(leaves, known, strict=True))
        if may_be_stored(x, moment)
    }
    judged, error = _judged(inner, params, len(leaves), candidates, is_by_chance)
    names = {
        number: f"inner_state{jax.tree_util.keystr(leaves[number][0])}"
        for number in judged
    }
    formats: list[Any] = [None] * len(leaves)
    unsure: list[str] = []
    _check_range({names[i]: moment for i, (moment, _) in judged.items()}, dtype)
    for i, (moment, kept) in judged.items():
        if moment == Moment.UNKNOWN or (kept is None and not is_by_chance):
            unsure.append(f"{type_of(leaves[i][1])} at {names[i]}")
        elif moment != Moment.EXACT:
            is_8_bit_square = moment != Moment.AVERAGE and dtype.itemsize == 1
            formats[i] = SQUARES if is_8_bit_square else dtype
            if not is_by_chance:
                _check_steps(names[i], kept, formats[i], dtype)
    if unsure:
        _warn_of_float32(unsure, error, is_by_chance)
    return formats


def _judged(
    inner: Optimizer,
    params: Params,
    count: int,
    candidates: dict[int, Moment],
    is_by_chance: bool,
) -> tuple[dict[int, Tried], Exception | None]:
    """Returns the ``Tried`` of each candidate, and the error of the trial, if any.

    Args:
      inner: the optimizer.
      params: its parameters.
      count: how many leaves its state has.
      candidates: the ``Moment`` of each array in the table, by the number of its leaf.
      is_by_chance: whether they are rounded stochastically, so that any decay is
        accepted.
    """
    tried, error = [Tried(Moment.UNKNOWN, None)] * count, None
    if any(m == Moment.UNKNOWN or not is_by_chance for m in candidates.values()):
        tried, error = _try(inner, params, count)

    def judge(number: int, known: Moment) -> Tried:
        found, kept = tried[number]
        if known == Moment.UNKNOWN:
            return Tried(found, kept)
        return Tried(known, 1.0 if known == Moment.GROWING_SQUARES else kept)

    return {i: judge(i, moment) for i, moment in candidates.items()}, error


def _try(
    inner: Optimizer, params: Params, count: int
) -> tuple[list[Tried], Exception | None]:
    """Tries an optimizer; returns the error if it cannot be tried."""
    unknown = [Tried(Moment.UNKNOWN, None)] * count
    try:
        tried = try_optimizer(inner, params)
    except Exception as error:
        # Such as a missing extra argument. The arrays then stay in float32.
        return unknown, error
    return (tried if len(tried) == count else unknown), None


def _check_range(moments: dict[str, Moment], dtype: Dtype) -> None:
    """Raises a ValueError for squares in float16."""
    squares = [
        name
        for name, moment in moments.items()
        if moment in (Moment.SQUARES, Moment.GROWING_SQUARES)
    ]
    if squares and dtype == jnp.float16:
        raise ValueError(
            f"float16 cannot store averages of squared gradients, as at {squares[0]}: "
            "a gradient of 1e-4 has a square of 1e-8, below the smallest number of "
            "float16. Use dtype='bfloat16'."
        )


_TOLERATED = 0.1
"""The part of a constant gradient that an average may lose to rounding."""


def _check_steps(where: str, kept: Any, stored_in: Dtype, dtype: Dtype) -> None:
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


def _warn_of_float32(
    unsure: list[str], error: Exception | None, is_by_chance: bool
) -> None:
    more = f" and {len(unsure) - 3} more" if len(unsure) > 3 else ""
    failed = f", which raises {type(error).__name__}: {error}" if error else ""
    what = "what they are" if is_by_chance else "how much of them each step keeps"
    cure = "" if is_by_chance else " Or pass a key, which suits all averages."
    warnings.warn(
        f"low_precision_state keeps {', '.join(unsure[:3])}{more} in float32. It does "
        f"not know {what}: neither from the class of the state, nor from a trial of "
        f"the optimizer on small parameters{failed}. To save their memory, use an "
        f"optimizer of optax for this part.{cure}",
        stacklevel=3,
    )
