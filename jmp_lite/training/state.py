"""The state of a training: how it starts, how it moves, and what is frozen in it."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_inexact,
    refuse_raw_bytes,
    type_of,
)
from jmp_lite.casting.types import Array, Key, OptimizerExtraArgs, PyTree, Tree
from jmp_lite.jaxprs import structure
from jmp_lite.scaling.skipping import LossScalingState, find_states
from jmp_lite.scaling.wrapping import Rounding, nodes_of

Batch = TypeVar("Batch", contravariant=True)


class TrainingState(NamedTuple):
    """Everything that changes during training.

    Attributes:
      params: the parameters.
      model_state: the state that the loss function takes and returns, such as batch
        statistics.
      opt_state: the optimizer's ``LossScalingState``.
      ema: the exponential moving average of the parameters after each step, in float32,
        or None. Before the first step, it is the parameters.
      rng: the key from which each step derives its keys, or None.
      step: the number of applied steps, an int32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> init, _ = jmp.build_train_step(lambda *args: args, optax.sgd(0.1), ema=0.9)
      >>> state = init({"w": jnp.ones(2)})
      >>> state.params["w"].dtype, state.ema["w"].dtype, state.step.dtype
      (dtype('float32'), dtype('float32'), dtype('int32'))
    """

    params: PyTree
    model_state: PyTree
    opt_state: LossScalingState
    ema: PyTree
    rng: Key | None
    step: Array


class Metrics(TypedDict):
    """What a step measures; see ``build_train_step``."""

    loss: Array
    grad_norm: Array
    grads_finite: Array
    loss_scale: Array
    skipped: Array
    aux: PyTree


class Init(Protocol):
    """Returns the state before the first step; see ``build_train_step``."""

    def __call__(
        self, params: PyTree, model_state: PyTree = None, rng: Key | None = None
    ) -> TrainingState:
        """Returns the state for parameters."""
        ...


class Step(Protocol[Batch]):
    """Returns the state after a step, and its metrics; see ``build_train_step``."""

    def __call__(
        self, state: TrainingState, batch: Batch, **extra_args: PyTree
    ) -> tuple[TrainingState, Metrics]:
        """Trains on a batch."""
        ...


def steps_that_move(
    before: PyTree, after: PyTree, step: Array
) -> tuple[Array | None, Array]:
    """Returns whether a step moved the parameters, and how many steps so far did.

    None is for an optimizer whose steps all move them.

    ``optax.MultiSteps`` moves them once in several steps, and its state counts.

    Args:
      before: the optimizer's state before the step.
      after: that after the step.
      step: the number of this step, from 1.
    """
    old, new = (nodes_of(each, optax.MultiStepsState) for each in (before, after))
    if not new:
        return None, step
    n_before, n_after = (jnp.asarray(each[0][1].gradient_step) for each in (old, new))
    return n_after != n_before, n_after


def check_moves(opt_state: PyTree) -> None:
    """Raises a ValueError if it is unknown which steps move the parameters."""
    found = "optax.apply_every" if nodes_of(opt_state, optax.ApplyEvery) else None
    if len(nodes_of(opt_state, optax.MultiStepsState)) > 1:
        found = "several optax.MultiSteps"
    if found:
        raise ValueError(
            f"ema averages parameters after each step that moves them, and {found} "
            "does not say which do. Use one optax.MultiSteps(optimizer, k) around the "
            "whole optimizer, or accumulate=k, or leave ema out."
        )


def moving_average(decay: float, average: Tree, params: PyTree, step: Array) -> Tree:
    """Returns the moving average of the parameters after each step so far.

    The parameters ``k`` steps ago have the weight ``decay**k``, and the weights of all
    steps add up to one. So the parameters before the first step, often random, have no
    part in it. This is ``optax.ema(decay, debias=True)``, without its division.

    Args:
      decay: the decay.
      average: the average after the step before, in float32.
      params: the parameters after this step.
      step: the number of this step, from 1.

    Example:
      >>> start, one, two = map(jnp.float32, (7, 1, 2))
      >>> first = moving_average(0.9, start, one, step=jnp.int32(1))
      >>> second = moving_average(0.9, first, two, step=jnp.int32(2))
      >>> print(first, second)  # The second is (0.9 * 1 + 2) / 1.9.
      1.0 1.5263158
    """
    # decay * (1 - decay**(step - 1)) / (1 - decay**step), without cancellation.
    kept: ArrayLike = 0.0
    if decay:
        n, log = step.astype(jnp.float32), math.log(decay)
        kept = decay * jnp.expm1((n - 1) * log) / jnp.expm1(n * log)

    # In float32: in 16 bits it would stall when (1 - decay) rounds away.
    def mix(old: Array, new: Array) -> Array:
        share = jnp.asarray(kept, old.dtype)
        return share * old + (1 - share) * new.astype(old.dtype)

    return jax.tree.map(mix, average, params)


def check_trainable(params: PyTree) -> None:
    """Raises a TypeError for parameters without a gradient."""
    refuse_raw_bytes(params)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not is_inexact(leaf):
            raise TypeError(
                f"Expected floating-point parameters, got {type_of(leaf)} at "
                f"params{jax.tree_util.keystr(path)}, which has no gradient. Put such "
                "an array in the model state: init(params, model_state). Let loss_fn "
                "close over other objects. nnx.split and equinox.partition separate "
                "them."
            )


def init_optimizer(
    wrapped: Any, inner: OptimizerExtraArgs, params: PyTree
) -> LossScalingState:
    """Returns the state of an optimizer; warns of parameters that lose updates."""
    opt_state = wrapped.init(params)
    frozen = find_frozen(inner, params, opt_state.inner_state)
    narrow = [
        f"{leaf.dtype} at params{jax.tree_util.keystr(path)}"
        for (path, leaf), is_frozen in zip(
            jax.tree.leaves_with_path(params), frozen, strict=True
        )
        if is_16_bit(leaf) and not is_frozen
    ]
    if narrow and not nodes_of(opt_state, Rounding):
        warnings.warn(
            f"Parameters have 16 bits ({narrow[0]}): an update below some thousandth "
            "of a parameter is lost. Keep them in float32, or wrap the optimizer in "
            "master_weights, compensated or stochastic_rounding. Freeze those that are "
            "not trained with optax.set_to_zero: optax.masked alone adds their "
            "gradients to them.",
            stacklevel=3,
        )
    if find_states(opt_state.inner_state):
        raise ValueError(
            "The optimizer already carries a loss scale: pass it without "
            "loss_scaling or skip_nonfinite, and pass the scale as loss_scale=..."
        )
    return opt_state


def find_frozen(
    optimizer: OptimizerExtraArgs, parameters: PyTree, state: PyTree
) -> list[bool]:
    """Returns whether each parameter is frozen, as by ``optax.set_to_zero``.

    The update of such a parameter depends on nothing: on no gradient, parameter or
    state. A part of the parameters can be frozen by ``optax.masked`` and by
    transformations that use it, such as ``optax.partition``.

    No parameter counts as frozen without these, if a wrapper such as ``compensated``
    stands around them, for an optimizer that computes gradients by itself, and for one
    whose ``update`` is jit-compiled: a call counts as one op.

    Args:
      optimizer: the optimizer.
      parameters: the parameters.
      state: its state for them.

    Example:
      >>> import optax
      >>> labels = {"base": "frozen", "adapter": "trained"}
      >>> optimizer = optax.partition(
      ...     {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)}, labels
      ... )
      >>> params = {"base": jnp.ones(4), "adapter": jnp.ones(2)}
      >>> find_frozen(optimizer, params, optimizer.init(params))  # adapter, base
      [False, True]
    """
    n_leaves = len(jax.tree.leaves(parameters))
    if not nodes_of(state, optax.MaskedState):
        return [False] * n_leaves

    def updates(grads: PyTree, state: PyTree, current: PyTree) -> PyTree:
        return optimizer.update(grads, state, current)[0]

    grads = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), parameters
    )
    try:
        with jax.numpy_dtype_promotion("standard"):  # Some optimizers need it.
            jaxpr = jax.make_jaxpr(updates)(grads, state, parameters)
    except Exception:  # It needs the loss, or other arguments.
        return [False] * n_leaves
    parts = structure.parts(jaxpr)
    found = {*parts.invars}  # What depends on an input.
    for eqn in parts.eqns:
        if any(not structure.is_literal(x) and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return [structure.is_literal(x) or x not in found for x in parts.outvars]


def without(tree: Tree, frozen: Sequence[bool]) -> Tree:
    """Returns a tree of the parameters with None in place of each frozen one."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: node is None)
    kept = zip(leaves, frozen, strict=True)
    return treedef.unflatten([None if cold else leaf for leaf, cold in kept])


def accepted_arguments(
    optimizer: OptimizerExtraArgs,
    given: Mapping[str, Any],
    extra_args: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the extra arguments for an optimizer's update.

    Args:
      optimizer: the optimizer.
      given: those of every step. They are left out if its update does not accept them.
      extra_args: those that the caller of the step adds.

    Raises:
      TypeError: the update does not accept one of the caller's, or each step has it.
    """
    accepted = inspect.signature(optimizer.update).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    for name in extra_args:
        # An optimizer that monitors another loss would silently get this step's.
        if name in given:
            raise TypeError(f"The step itself passes {name} to the optimizer.")
        if not takes_all and name not in accepted:
            raise TypeError(
                f"The optimizer's update has no argument {name}, which step got. It "
                f"has {', '.join(accepted)}."
            )
    taken = {name: x for name, x in given.items() if takes_all or name in accepted}
    return {**taken, **extra_args}
