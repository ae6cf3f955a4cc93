"""Handles arrays whose types state their sharding, or the axes over which they vary."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Function, PyTree, Var


def zeros(aval: Aval, length: int | None = None) -> Array:
    """Returns zeros of a type, with a new leading axis if a length is given."""
    more = () if length is None else (length,)
    zero, shape = jnp.zeros((), aval.dtype), (*more, *aval.shape)
    # ``jax.make_mesh`` makes Explicit axes: zeros without the sharding of what they are
    # added to are an error.
    sharding = None
    if is_type_sharded(aval):
        spec = (*(None for _ in more), *aval.sharding.spec)
        sharding = aval.sharding.update(spec=jax.P(*spec))
    array = jax.lax.broadcast(zero, shape, out_sharding=sharding)
    return as_varying(array, aval.manual_axis_type.varying)


def spread(array: Array, axes: Sequence[int], aval: Aval) -> Array:
    """Returns an array broadcast to the shape and the sharding of a type.

    Args:
      array: the array.
      axes: for each axis of the array, the axis of the type, in ascending order.
      aval: the type.
    """
    sharding = aval.sharding if is_type_sharded(aval) else None
    return jax.lax.broadcast_in_dim(array, aval.shape, axes, out_sharding=sharding)


def permuted_sharding(aval: Aval, axes: Sequence[int]) -> NamedSharding | None:
    """Returns the sharding of an array with the axes of a type in another order.

    None if there is no mesh.
    """
    if aval.sharding.mesh.empty:
        return None
    spec = aval.sharding.spec
    return aval.sharding.update(spec=jax.P(*(spec[axis] for axis in axes)))


def match_sharding(array: Array, other: Array) -> Array:
    """Returns an array with the sharding of another of its rank, to multiply them.

    Axes of size 1 are not sharded. Without a mesh it is the array itself.
    """
    if not is_sharded(array):
        return array
    sharding = jax.typeof(other).sharding
    pairs = zip(array.shape, sharding.spec, strict=True)
    # An axis of size 1 cannot be split.
    spec = (None if size == 1 else axis for size, axis in pairs)
    return jax.sharding.reshard(array, sharding.update(spec=jax.P(*spec)))


def insert_axis(
    sharding: NamedSharding | None, at: int, array: Array
) -> NamedSharding | None:
    """Returns a sharding with a new axis, sharded as the first axis of an array.

    Args:
      sharding: the sharding, or None.
      at: the index of the new axis.
      array: an array that has it in front.
    """
    if sharding is None:
        return None
    (axis, *_), spec = jax.typeof(array).sharding.spec, [*sharding.spec]
    return sharding.update(spec=jax.P(*spec[:at], axis, *spec[at:]))


def iota(dtype: Dtype, axis: int, aval: Aval) -> Array:
    """Returns the positions along an axis, in the shape and the sharding of a type."""
    sharding = aval.sharding if is_type_sharded(aval) else None
    return jax.lax.broadcasted_iota(dtype, aval.shape, axis, out_sharding=sharding)


def is_sharded(array: Array) -> bool:
    """Whether the type of an array states its sharding, as on an Explicit mesh."""
    return is_type_sharded(jax.typeof(array))


def is_type_sharded(aval: Aval) -> bool:
    """Whether a type states its sharding."""
    return any(axis is not None for axis in aval.sharding.spec)


def cast(array: Array, dtype: DTypeLike) -> Array:
    """Returns an array in another dtype.

    At the end of ``auto_axes``, for example, an op has an operand on another mesh. The
    operand is cast on its own mesh.
    """
    mesh, inside = jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    if mesh.empty or inside.empty or mesh == inside:
        if not structure.is_tracer(array) or array.dtype == dtype:
            return array.astype(dtype)
        # What ``astype`` does for a tracer, after many calls.
        options = {"new_dtype": np.dtype(dtype), "weak_type": False, "sharding": None}
        return jax.lax.convert_element_type_p.bind(array, **options)
    with jax.sharding.use_abstract_mesh(mesh):
        return array.astype(dtype)


def as_varying(array: Array, axes: Iterable[str]) -> Array:
    """Returns an array whose type states that it may differ over some mapped axes.

    Only ``shard_map`` has such types. Elsewhere the array is returned unchanged.
    """
    # From the context: the types of captured arrays have no axes.
    inside = jax.sharding.get_abstract_mesh().manual_axes
    missing = {*axes}.intersection(inside) - jax.typeof(array).manual_axis_type.varying
    if not missing:
        return array
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying")


def mapped_axes_of(array: Array) -> frozenset[str]:
    """Returns the mapped axes over which an array may differ."""
    return jax.typeof(array).manual_axis_type.varying


def gathered(array: Array, axes: Iterable[str] | None = None) -> Array:
    """Returns the stacked arrays of all devices of a ``shard_map``.

    The result is the same on each device. Outside of ``shard_map`` it is the array
    itself.

    Args:
      array: the array of this device.
      axes: the mapped axes to gather over; all by default.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in manual if axes is None or axis in axes)
    if not axes:
        return array
    mine = jnp.asarray(array)
    dtype = jnp.int32 if mine.dtype == jnp.bool_ else mine.dtype
    everyone = jnp.zeros((jax.lax.axis_size(axes), *mine.shape), dtype)
    mine = as_varying(mine.astype(dtype), axes)
    # psum: shard_map treats the result of all_gather as different on each device.
    own = as_varying(everyone, axes).at[jax.lax.axis_index(axes)].set(mine)
    return jax.lax.psum(own, axes).astype(jnp.asarray(array).dtype)


def varying_axes(atoms: Iterable[Var]) -> frozenset[str]:
    """Returns the mapped axes over which some of the atoms may differ."""
    return frozenset().union(*(a.aval.manual_axis_type.varying for a in atoms))


# ---------------------------------------------------------------------- shard_map


class ShardMap(NamedTuple):
    """A ``shard_map``.

    Attributes:
      mesh: its mesh.
      in_specs: the specs of its operands.
      out_specs: the specs of its results.
      axes: the mapped axes.
      check_vma: whether types state over which axes arrays vary.
    """

    mesh: Mesh | AbstractMesh
    in_specs: tuple[PartitionSpec, ...]
    out_specs: Sequence[PartitionSpec]
    axes: frozenset[str]
    check_vma: bool

    def adds_up_gradient(self, number: int) -> bool:
        """Whether the transpose of this op adds up an operand's gradient over devices.

        The operand is the same on several devices. If types state over which axes
        arrays vary, an op inside adds up the gradient.
        """
        names = (name for name in self.in_specs[number] if name is not None)
        axes = {axis for n in names for axis in ((n,) if isinstance(n, str) else n)}
        # With ``check_vma`` JAX inserts a ``pvary``, whose derivative is that sum.
        return not self.check_vma and not self.axes <= axes

    def map(
        self, fun: Function, in_specs: Sequence[PartitionSpec], out_specs: PyTree
    ) -> Function:
        """Maps another function over the same axes, with other specs."""
        return jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.axes,
            check_vma=self.check_vma,
        )


def shard_map_of(eqn: Eqn) -> ShardMap:
    """Returns the ``shard_map`` of an equation, to map another function with."""
    return ShardMap(
        eqn.params["mesh"],
        tuple(eqn.params["in_specs"]),
        list(eqn.params["out_specs"]),
        # Of several mapped axes, an outer ``shard_map`` may have mapped some.
        frozenset(eqn.params["newly_manual_axes"]),
        eqn.params["check_vma"],
    )
