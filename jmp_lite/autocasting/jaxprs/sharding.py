"""Arrays whose types say how they are sharded, or over which axes they vary."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite.autocasting.jaxprs.types import Array, Aval, Var


def zeros(aval: Aval, length: int | None = None) -> Any:
    """Returns zeros of a type; with a length, with an axis of that in front."""
    more = () if length is None else (length,)
    zero, shape = jnp.zeros((), aval.dtype), (*more, *aval.shape)
    sharding = None
    if _is_sharded(aval):
        spec = (*(None for _ in more), *aval.sharding.spec)
        sharding = aval.sharding.update(spec=jax.P(*spec))
    array = jax.lax.broadcast(zero, shape, out_sharding=sharding)
    return as_varying(array, aval.manual_axis_type.varying)


def is_sharded(array: Array) -> bool:
    """Whether the type of an array says how it is sharded, as on an Explicit mesh."""
    return _is_sharded(jax.typeof(array))


def _is_sharded(aval: Aval) -> bool:
    return any(axis is not None for axis in aval.sharding.spec)


def as_varying(array: Array, axes: Iterable[str]) -> Any:
    """Returns an array whose type says that it may differ over some mapped axes.

    Only ``shard_map`` has them in its types: anywhere else it is the array itself.
    """
    # From the context: the type of what a mapped function closes over has no axes.
    inside = jax.sharding.get_abstract_mesh().manual_axes
    missing = {*axes}.intersection(inside) - jax.typeof(array).manual_axis_type.varying
    if not missing:
        return array
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying")


def axes_of(array: Array) -> frozenset[str]:
    """Returns the mapped axes over which an array may differ."""
    return jax.typeof(array).manual_axis_type.varying


def gathered(array: Array) -> Any:
    """Returns what all devices of a ``shard_map`` have, stacked up, the same on each.

    Outside of one it is the array itself.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes:
        return array
    mine = jnp.asarray(array)
    dtype = jnp.int32 if mine.dtype == jnp.bool_ else mine.dtype
    everyone = jnp.zeros((jax.lax.axis_size(axes), *mine.shape), dtype)
    mine = as_varying(mine.astype(dtype), axes)
    # psum, because shard_map takes what all_gather returns for different on each.
    own = as_varying(everyone, axes).at[jax.lax.axis_index(axes)].set(mine)
    return jax.lax.psum(own, axes).astype(jnp.asarray(array).dtype)


def varying_axes(atoms: Iterable[Var]) -> frozenset[str]:
    """Returns the mapped axes over which some of the atoms may differ."""
    return frozenset().union(*(a.aval.manual_axis_type.varying for a in atoms))
