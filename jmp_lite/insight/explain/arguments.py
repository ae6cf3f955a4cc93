"""Finds and names the arrays among the arguments of a function."""

import jax

from jmp_lite.casting.dtypes import is_traceable
from jmp_lite.jaxprs.types import Array, PyTree


def arrays_in(args: PyTree, kwargs: PyTree) -> list[tuple[PyTree, Array]]:
    """Returns the arrays among the arguments of a function, each with its path."""
    leaves, _ = jax.tree.flatten_with_path((args, kwargs))
    return [(path, leaf) for path, leaf in leaves if is_traceable(leaf)]


def argument_name(path: PyTree) -> str:
    """Returns the name of an argument, such as ``args[0]['w']``."""
    (place, *inside) = path
    return ("args", "kwargs")[place.idx] + jax.tree_util.keystr(tuple(inside))
