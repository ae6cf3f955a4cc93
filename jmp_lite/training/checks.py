"""Checks the arguments of ``build_train_step``, and what a loss function returns."""

import inspect

import jax
import numpy as np

from jmp_lite.autocasting.rules.presets import check_convertible
from jmp_lite.casting.dtypes import is_array, is_inexact, refuse_raw_bytes
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import LossFn, PyTree


def check_loss_fn(loss_fn: LossFn) -> None:
    """Raises a TypeError for a function that does not take the four arguments."""
    check_convertible(loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:
        return  # Written in C: its signature is unknown.
    try:
        signature.bind(*["params", "model_state", "batch", "rng"])
    except TypeError:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            "Expected loss_fn(params, model_state, batch, rng) -> (loss, "
            f"(model_state, aux)), got {name}{signature}. Take all four arguments, "
            "even unused ones. Put other inputs in batch, which may be any pytree."
        ) from None


def check_accumulation(accumulate: float | np.integer, batch_axes: PyTree) -> None:
    """Raises an error for a wrong number of micro-batches, or wrong axes."""
    if not isinstance(accumulate, int | np.integer) or accumulate < 1:
        is_whole = isinstance(accumulate, float) and accumulate.is_integer()
        cure = f": pass {int(accumulate)}" if is_whole and accumulate >= 1 else ""
        raise ValueError(
            "Expected a whole number of at least 1 for accumulate, got "
            f"{accumulate!r}{cure}."
        )
    for axis in jax.tree.leaves(batch_axes):
        if not isinstance(axis, int | np.integer):
            raise TypeError(
                "Expected batch_axes to be an axis, None, or a pytree of them, got "
                f"{axis!r} in {batch_axes!r}."
            )


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


_NO_KEY = (
    "rng is None in loss_fn, because init got no key. If loss_fn needs one, call "
    "init(params, model_state, jax.random.key(0))."
)


def explain_missing_key(error: Exception) -> None:
    """Raises a TypeError if an error is about the key that a loss did not get.

    Any other error gets a note.
    """
    if isinstance(error, TypeError | ValueError) and "PRNG" in str(error):
        raise TypeError(_NO_KEY) from error
    error.add_note(_NO_KEY)


def check_result(result: PyTree, model_state: PyTree) -> None:
    """Raises a TypeError if a loss function returns something else."""

    def is_pair(node: PyTree) -> bool:
        return isinstance(node, tuple | list) and len(node) == 2

    if not (is_pair(result) and is_pair(result[1])):
        raise TypeError(
            "Expected loss_fn to return (loss, (model_state, aux)), with None for a "
            f"missing part, got {_describe(result)}."
        )
    before, after = jax.tree.structure(model_state), jax.tree.structure(result[1][0])
    if before != after:
        raise TypeError(
            "loss_fn changes the structure of the model state: pass the initial "
            f"model state to init(params, model_state).\nGiven: {before}\nReturned: "
            f"{after}"
        )


def _describe(result: PyTree) -> str:
    if result is None:
        return "None"
    name = f"{result.dtype} array" if is_array(result) else type(result).__name__
    if isinstance(result, tuple | list):
        name += f" of {len(result)} ({', '.join(map(_describe, result))})"
    return f"an {name}" if name[0] in "aeio" else f"a {name}"
