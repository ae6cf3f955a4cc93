"""Gradients of a batch that is split into micro-batches."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.casting.dtypes import is_traceable, upcast_tree
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Array, AxisName, Key, Params, PyTree, Updates
from jmp_lite.jaxprs.sharding import is_sharded
from jmp_lite.scaling.wrapping import strongly_typed
from jmp_lite.training.devices import localize
from jmp_lite.training.loss_at import GradFn, WithAux


def accumulated_gradients(
    grad_fn: GradFn, times: int, batch_axes: PyTree, axis_name: AxisName | None
) -> GradFn:
    """Returns a gradient function that runs its batch in micro-batches."""

    def accumulated(
        params: Params, model_state: PyTree, batch: PyTree, rng: Key | None
    ) -> tuple[WithAux, Updates]:
        leaves, treedef = jax.tree.flatten(batch)
        axes = _split_axes(batch, batch_axes, times)
        parts = [
            _split(leaf, axis, times)
            for leaf, axis in zip(leaves, axes, strict=True)
            if axis is not None
        ]

        def one(
            carry: tuple[PyTree, Updates], now: tuple[Array, list[Array]]
        ) -> tuple[tuple[PyTree, Updates], tuple[Array, PyTree]]:
            model_state, total = carry
            i, parts = now
            given = iter(parts)
            merged = [
                leaf if axis is None else next(given)
                for leaf, axis in zip(leaves, axes, strict=True)
            ]
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
    # By entry of ``batch_axes``.
    sizes: dict[int, dict[str, int]] = {}
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
        alike = sizes.setdefault(entry, {})
        alike[where] = leaf.shape[axis]
        _check_one_size(alike, times)
        if alike[where] % times:
            raise ValueError(
                f"Expected the size of axis {axis} to be a multiple of "
                f"accumulate={times} in every array of the batch, got {leaf.shape} at "
                f"{where}."
            )
    return axes


def _broadcast(batch_axes: PyTree, batch: PyTree) -> list[tuple[int, int | None]]:
    """Returns for each leaf the number of its entry in ``batch_axes``, and its axis."""
    axes: list[tuple[int, int | None]] = []
    entries = itertools.count()

    def add(axis: int | None, part: PyTree) -> None:
        axes.extend([(next(entries), axis)] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(add, batch_axes, batch, is_leaf=lambda node: node is None)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "Expected batch_axes to be an axis, None, or a pytree of them that is a "
            f"prefix of the batch, got {batch_axes!r} for a batch of the structure "
            f"{jax.tree.structure(batch)}."
        ) from error
    return axes


def _check_one_size(sizes: dict[str, int], times: int) -> None:
    first, *others = sizes
    for other in others:
        if sizes[other] != sizes[first]:
            raise ValueError(
                f"accumulate={times} splits the arrays of a batch into micro-batches "
                f"and expects the same size in all of them, got {sizes[first]} at "
                f"{first} and {sizes[other]} at {other}. If both are to be split, give "
                "each its own axis, such as batch_axes={'inner': 0, 'boundary': 0}. If "
                "every micro-batch needs one of them whole, pass None for it, such as "
                "batch_axes={'x': 0, 'class_weights': None}, or let loss_fn close over "
                "it."
            )


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
