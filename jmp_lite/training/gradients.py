"""The loss of a train step and its gradients: of micro-batches and of devices."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.api import build_autocast, has_float16_product
from jmp_lite.autocasting.rules.presets import check_convertible
from jmp_lite.autocasting.rules.rules import Rules, is_identity
from jmp_lite.casting.dtypes import (
    is_array,
    is_inexact,
    is_traceable,
    type_of,
    upcast_tree,
)
from jmp_lite.casting.types import Array, AxisName, Key, Leaf, LossFn, PyTree, Tree
from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.sharding import as_varying, is_sharded
from jmp_lite.jaxprs.types import Jaxpr
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale, default_loss_scale
from jmp_lite.scaling.wrapping import strongly_typed

WithAux: TypeAlias = tuple[Array, tuple[PyTree, PyTree]]
"""The result of a loss function: ``(loss, (model_state, aux))``."""
GradFn: TypeAlias = Callable[
    [PyTree, PyTree, PyTree, Key | None], tuple[WithAux, PyTree]
]
"""A function with the arguments of a loss function: its result, and gradients."""


# -------------------------------------------------------------------- the loss function


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


def lower_loss(
    loss_fn: LossFn, chosen: Callable[[], Rules], loss_scale: LossScale | None
) -> LossFn:
    """Returns the loss in mixed precision: each use of a parameter casts it."""

    @functools.wraps(loss_fn)
    def checked(
        params: PyTree, model_state: PyTree, batch: PyTree, rng: Key | None
    ) -> WithAux:
        try:
            result = loss_fn(params, model_state, batch, rng)
        except Exception as error:
            if rng is not None:
                raise
            # Is it about the key that the loss did not get? Any other gets a note.
            if isinstance(error, TypeError | ValueError) and "PRNG" in str(error):
                raise TypeError(_NO_KEY) from error
            error.add_note(_NO_KEY)
            raise
        _check_result(result, model_state)
        return result

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

    return build_autocast(checked, chosen, check)


_NO_KEY = (
    "rng is None in loss_fn, because init got no key. If loss_fn needs one, call "
    "init(params, model_state, jax.random.key(0))."
)


def _check_result(result: PyTree, model_state: PyTree) -> None:
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


# ----------------------------------------------------------------------- micro-batches


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


def accumulated_gradients(
    grad_fn: GradFn, times: int, batch_axes: PyTree, axis_name: AxisName | None
) -> GradFn:
    """Returns a gradient function that runs its batch in micro-batches."""

    def accumulated(
        params: PyTree, model_state: PyTree, batch: PyTree, rng: Key | None
    ) -> tuple[WithAux, PyTree]:
        leaves, treedef = jax.tree.flatten(batch)
        axes = _split_axes(batch, batch_axes, times)
        parts = [
            None if axis is None else _split(leaf, axis, times)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]

        def one(
            carry: tuple[PyTree, PyTree], now: tuple[Array, list[Array | None]]
        ) -> tuple[tuple[PyTree, PyTree], tuple[Array, PyTree]]:
            model_state, total = carry
            i, parts = now
            pairs = zip(leaves, parts, strict=True)
            merged = [leaf if part is None else part for leaf, part in pairs]
            # Or dropout would draw the same mask in each micro-batch.
            key = None if rng is None else jax.random.fold_in(rng, i)
            (loss, (new_state, aux)), grads = grad_fn(
                params, model_state, jax.tree.unflatten(treedef, merged), key
            )
            new_state = strongly_typed(new_state)
            _check_types(model_state, new_state)
            total = jax.tree.map(jnp.add, total, grads)
            return (new_state, total), (upcast_tree(loss), aux)

        zeros = upcast_tree(jax.tree.map(jnp.zeros_like, params))
        # Local to this device, like the results of the micro-batches.
        carry = localize((model_state, zeros), axis_name)
        (model_state, total), (losses, aux) = lax.scan(
            one, carry, (jnp.arange(times), parts)
        )
        grads = jax.tree.map(lambda x: x / times, total)
        return (jnp.mean(losses), (model_state, aux)), grads

    return accumulated


def _split_axes(batch: PyTree, batch_axes: PyTree, times: int) -> list[int | None]:
    """Returns the axis along which each leaf is split; None for a whole leaf."""
    axes: list[int | None] = []
    # The first array under each entry of ``batch_axes``, and its size.
    firsts: dict[int, tuple[str, int]] = {}
    leaves = jax.tree.leaves_with_path(batch)
    entries = _broadcast(batch_axes, batch)
    for (path, leaf), (entry, axis) in zip(leaves, entries, strict=True):
        if axis is None or not is_traceable(leaf) or not jnp.ndim(leaf):
            axes.append(None)
            continue
        where = f"batch{jax.tree_util.keystr(path)}"
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"The array at {where} has the shape {leaf.shape}, and no axis {axis} "
                "to split: correct batch_axes."
            )
        axes.append(axis % leaf.ndim)
        first, size = firsts.setdefault(entry, (where, leaf.shape[axis]))
        if leaf.shape[axis] != size:
            raise ValueError(
                f"accumulate={times} splits the arrays of a batch into micro-batches "
                f"and expects the same size in all of them, got {size} at {first} and "
                f"{leaf.shape[axis]} at {where}. If both are to be split, give each "
                "its own axis, such as batch_axes={'inner': 0, 'boundary': 0}. If "
                "every micro-batch needs one of them whole, pass None for it, such as "
                "batch_axes={'x': 0, 'class_weights': None}, or let loss_fn close over "
                "it."
            )
        if size % times:
            raise ValueError(
                f"Expected the size of axis {axis} to be a multiple of "
                f"accumulate={times} in every array of the batch, got {leaf.shape} at "
                f"{where}."
            )
    return axes


def _broadcast(batch_axes: PyTree, batch: PyTree) -> list[tuple[int, int | None]]:
    """Returns for each leaf the number of its entry in ``batch_axes``, and its axis."""
    axes, treedef = jax.tree.flatten(batch_axes, is_leaf=lambda node: node is None)
    try:
        whole = jax.tree.broadcast(treedef.unflatten(range(len(axes))), batch)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Expected batch_axes to be an axis, None, or a pytree of them that is a "
            f"prefix of the batch, got {batch_axes!r} for a batch of the structure "
            f"{jax.tree.structure(batch)}."
        ) from error
    return [(number, axes[number]) for number in jax.tree.leaves(whole)]


def _split(leaf: Array, axis: int, times: int) -> Array:
    shape, rows = leaf.shape, leaf.shape[axis] // times
    if is_sharded(leaf):
        devices = shape[axis] // jax.typeof(leaf).sharding.shard_shape(shape)[axis]
        if rows % devices:
            raise ValueError(
                f"Expected micro-batches that divide evenly among {devices} devices, "
                f"got {rows} rows: a batch of {shape[axis]} in {times} parts. Use a "
                "larger batch or a smaller accumulate."
            )
    # Strided: neighboring rows stay on one device, which has rows of each part. With
    # (times, rows), a part would be on few devices and be sent to all.
    parts = jnp.reshape(leaf, (*shape[:axis], rows, times, *shape[axis + 1 :]))
    return jnp.moveaxis(parts, axis + 1, 0)


def _check_types(before: PyTree, after: PyTree) -> None:
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        given, returned = type_of(old), type_of(new)
        if given != returned:
            where = f".model_state{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"loss_fn changes the type of the model state: it returns {returned} "
                f"at {where}, given {given}."
            )


# ---------------------------------------------------------------------------- devices


def localize(tree: Tree, axis_name: AxisName | None) -> Tree:
    """Returns a tree whose real and complex arrays belong to this device only.

    With type checks, ``shard_map`` would sum a gradient with respect to shared values
    over all devices, in the dtype that the gradient has at that point.
    """
    if not axis_name:
        return tree
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)

    def local(x: Leaf) -> Leaf:
        return as_varying(x, names) if is_inexact(x) else x

    return jax.tree.map(local, tree)


def averaged(tree: Tree, axis_name: AxisName | None) -> Tree:
    """Returns the mean over devices of the floating-point arrays of a tree."""
    if not axis_name:
        return tree

    def average(x: Leaf) -> Leaf:
        return lax.pmean(x, axis_name) if is_inexact(x) else x

    return jax.tree.map(average, tree)


def check_axes(axis_name: AxisName | None) -> None:
    """Raises a NameError for an axis that is not mapped here; warns if none is named.

    Whether ``loss_fn`` averages over devices by itself is not known.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if axis_name is None and manual:
        names = ", ".join(map(repr, manual))
        source.warn(
            f"step runs inside of shard_map over {names} without an axis_name, so "
            "gradients, loss and statistics are not averaged over devices. Pass "
            f"axis_name={manual[0]!r} to build_train_step, or axis_name=() if these "
            "axes split no batch.",
        )
    if not axis_name:
        return
    try:
        lax.axis_index(axis_name)
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call step inside "
            "jax.shard_map or jax.vmap with that axis. In a jit with sharded "
            "arguments, leave axis_name out."
        ) from error
