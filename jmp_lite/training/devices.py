"""Keys and arrays of each device on a mapped axis, and averages over devices."""

import jax
from jax import lax

from jmp_lite.casting.dtypes import is_inexact
from jmp_lite.casting.types import AxisName, Key, Leaf, Tree
from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.sharding import as_varying


def key_of_this_device(rng: Key, axis_name: AxisName | None) -> Key:
    """Returns a key that differs from device to device on a mapped axis."""
    if not axis_name:
        return rng
    return jax.random.fold_in(rng, lax.axis_index(axis_name))


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
    if axis_name is None:
        _warn_inside_shard_map()
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


def _warn_inside_shard_map() -> None:
    if axes := jax.sharding.get_abstract_mesh().manual_axes:
        names = ", ".join(map(repr, axes))
        source.warn(
            f"step runs inside of shard_map over {names} without an axis_name, so "
            "gradients, loss and statistics are not averaged over devices. Pass "
            f"axis_name={axes[0]!r} to build_train_step, or axis_name=() if these axes "
            "split no batch.",
        )
