"""Checks and conversions of the wrapped optimizer, which all wrappers share."""

import functools
from typing import Any, overload

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.dtypes import is_16_bit, is_number, refuse_raw_bytes
from jmp_lite.casting.types import (
    Leaf,
    OptimizerExtraArgs,
    Params,
    PyTree,
    Tree,
    Updates,
)


@overload
def with_extra_args(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs: ...


@overload
def with_extra_args(inner: optax.MultiSteps) -> optax.MultiSteps: ...


def with_extra_args(inner: object) -> OptimizerExtraArgs:
    """Returns a transformation that accepts extra arguments."""
    if isinstance(inner, optax.GradientTransformation):
        return _explaining(optax.with_extra_args_support(inner))
    # Used unchanged: with_extra_args_support would treat it as a transformation without
    # extra arguments, and drop them.
    if isinstance(inner, optax.MultiSteps):
        return inner
    name = getattr(inner, "__name__", type(inner).__name__)
    hint = f" Did you mean {name}(...)?" if callable(inner) else ""
    raise TypeError(f"Expected an optax.GradientTransformation, got {name}.{hint}")


def _explaining(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that explains an error about a state of other types."""

    @functools.wraps(inner.update)  # Its signature tells what it asks for.
    def update(
        updates: Updates, state: PyTree, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, PyTree]:
        try:
            return inner.update(updates, state, params, **extra_args)
        except AttributeError as error:
            if isinstance(state, dict | list):
                error.add_note(f"A likely cause: {WITHOUT_CLASSES}.")
            raise

    return optax.GradientTransformationExtraArgs(inner.init, update)


WITHOUT_CLASSES = (
    "a checkpoint was restored without the classes of its states, as dicts and lists: "
    "restore it into a template, such as jax.eval_shape(optimizer.init, params)"
)


def strongly_typed(state: Tree) -> Tree:
    """Removes weak types from the numbers of an initial state."""

    def strengthen(leaf: Leaf) -> Leaf:
        if not is_number(leaf):
            return leaf
        array = jnp.asarray(leaf)
        return array.astype(array.dtype)

    return jax.tree.map(strengthen, state)


def initial_state(inner: OptimizerExtraArgs, params: PyTree) -> PyTree:
    """Returns the initial state of a wrapped optimizer, without weak types.

    Raises:
      ValueError: it contains 16-bit hyperparameters.
    """
    state = strongly_typed(inner.init(params))

    def is_injected(node: PyTree) -> bool:
        return isinstance(getattr(node, "hyperparams", None), dict)

    for node in filter(is_injected, jax.tree.leaves(state, is_leaf=is_injected)):
        low = [name for name, x in node.hyperparams.items() if is_16_bit(x)]
        if low:
            raise ValueError(
                f"The hyperparameter {low[0]!r} is {node.hyperparams[low[0]].dtype}: "
                "optax.inject_hyperparams stores numbers in the dtype of the "
                "parameters, in which 0.999 may be 1. Put a wrapper for 16-bit "
                "parameters around it, as in "
                "master_weights(optax.inject_hyperparams(optax.adam)(...)), or pass "
                "inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
            )
    return state


def check_grads(grads: PyTree, params: PyTree) -> None:
    """Raises a TypeError for ``(loss, grads)`` in place of gradients."""
    if params is None or not isinstance(grads, tuple) or len(grads) != 2:
        return
    expected = jax.tree.structure(params)
    parts = map(jax.tree.structure, grads)
    if jax.tree.structure(grads) != expected and expected in parts:
        raise TypeError(
            "Expected gradients, got a pair (loss, grads), as value_and_grad returns "
            "it. Unpack it: loss, grads = value_and_grad(...)(...), then call "
            "optimizer.update(grads, opt_state, params)."
        )


def check_same_structure(old_state: PyTree, new_state: PyTree, effect: str) -> None:
    """Raises a TypeError for an optimizer that changes the structure of its state."""
    old, new = map(jax.tree.structure, (old_state, new_state))
    if old != new:
        raise TypeError(
            "The wrapped optimizer changes the structure of its state in update (as "
            f"optax.monitor does), so {effect}. Wrap the optimizer without that part. "
            "If a gradient is None, as that of an integer, mask its parameter with "
            "optax.masked: optax.adam drops its moments."
            f"\nBefore: {old}\nAfter: {new}"
        )


def check_classes(node: PyTree, name: str) -> None:
    """Raises a TypeError for a dict or a list in place of a state of this library.

    Args:
      node: what should be an object of a class.
      name: what it should be, for the message.
    """
    if isinstance(node, dict | list):
        raise TypeError(
            f"Expected {name}, got {type(node).__name__}. A likely cause: "
            f"{WITHOUT_CLASSES}."
        )


def check_state(state: PyTree, expected: type, name: str) -> None:
    """Raises a TypeError for a state that a wrapper does not make, or for raw bytes.

    Args:
      state: the state that ``update`` got.
      expected: the class of the wrapper's state.
      name: the name of the wrapper.
    """
    refuse_raw_bytes(state)
    if isinstance(state, expected):
        return
    raise TypeError(
        f"Expected the {expected.__name__} that {name} makes in init, got "
        f"{type(state).__name__}. Causes: (a) the arguments have another order: call "
        "optimizer.update(grads, opt_state, params); (b) an optimizer with other "
        f"wrappers made the state: {CONVERT}; (c) {WITHOUT_CLASSES}."
    )


CONVERT = (
    "convert it once, before the first update, with params, opt_state = "
    "jmp_lite.convert_state(opt_state, optimizer, params)"
)
