"""The start of a training: its loss scale, and the state of its optimizer."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.interpreter.api import Check
from jmp_lite.autocasting.interpreter.mistakes import has_float16_product
from jmp_lite.autocasting.rules.rules import Rules, is_identity
from jmp_lite.casting.dtypes import is_16_bit
from jmp_lite.casting.types import OptimizerExtraArgs, Params, PyTree
from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.types import Jaxpr
from jmp_lite.scaling.dynamic import default_loss_scale
from jmp_lite.scaling.find_state import LossScalingState
from jmp_lite.scaling.inner_update import Rounding
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale
from jmp_lite.training.frozen import find_frozen


def scale_at_start(loss_scale: LossScale | None, rules: Rules) -> LossScale:
    """Returns the loss scale of the first step; warns if float16 has none."""
    dtype = np.dtype("float32") if is_identity(rules) else np.dtype(rules.compute_dtype)
    needed = default_loss_scale(dtype)
    if loss_scale is None:
        return needed
    if isinstance(loss_scale, NoOpLossScale) and not isinstance(needed, NoOpLossScale):
        warnings.warn(
            f"The loss is computed in {dtype} without a loss scale: gradients below "
            f"{float(jnp.finfo(dtype).smallest_subnormal):.1e} become zero. Leave "
            "loss_scale out, or pass DynamicLossScale().",
            stacklevel=3,
        )
    return loss_scale


def float16_check(loss_scale: LossScale | None, chosen: Callable[[], Rules]) -> Check:
    """Returns a check that warns of a loss which is in float16 by itself.

    Args:
      loss_scale: the loss scale that the caller chose, or None.
      chosen: returns the rules, whose compute dtype chooses the scale otherwise.
    """

    def check(jaxpr: Jaxpr) -> None:
        if loss_scale is not None or not has_float16_product(jaxpr):
            return
        if isinstance(scale_at_start(None, chosen()), NoOpLossScale):
            source.warn(
                "The loss computes matrix products in float16 by itself, such as by an "
                "autocast inside of it, and has no loss scale: gradients below 6.0e-08 "
                "become zero. Pass compute_dtype='float16' to build_train_step in "
                "place of the inner autocast, or loss_scale=DynamicLossScale().",
            )

    return check


def init_optimizer(
    wrapped: Any, inner: OptimizerExtraArgs, params: Params
) -> LossScalingState:
    """Returns the state of an optimizer; warns of parameters that lose updates."""
    opt_state = wrapped.init(params)
    _warn_of_rounding(
        params, opt_state, find_frozen(inner, params, opt_state.inner_state)
    )

    def is_state(node: PyTree) -> bool:
        return isinstance(node, LossScalingState)

    if any(map(is_state, jax.tree.leaves(opt_state.inner_state, is_leaf=is_state))):
        raise ValueError(
            "The optimizer already carries a loss scale: pass it without "
            "loss_scaling or skip_nonfinite, and pass the scale as loss_scale=..."
        )
    return opt_state


def _warn_of_rounding(params: Params, opt_state: PyTree, frozen: list[bool]) -> None:
    """Warns if 16-bit parameters would lose small updates."""

    def rounds(node: PyTree) -> bool:
        return isinstance(node, Rounding)

    narrow = [
        f"{leaf.dtype} at params{jax.tree_util.keystr(path)}"
        for (path, leaf), is_frozen in zip(
            jax.tree.leaves_with_path(params), frozen, strict=True
        )
        if is_16_bit(leaf) and not is_frozen
    ]
    nodes = jax.tree.leaves(opt_state, is_leaf=rounds)
    if narrow and not any(map(rounds, nodes)):
        warnings.warn(
            f"Parameters have 16 bits ({narrow[0]}): an update below some thousandth "
            "of a parameter is lost. Keep them in float32, or wrap the optimizer in "
            "master_weights, compensated or stochastic_rounding. Freeze those that are "
            "not trained with optax.set_to_zero: optax.masked alone adds their "
            "gradients to them.",
            stacklevel=4,
        )
