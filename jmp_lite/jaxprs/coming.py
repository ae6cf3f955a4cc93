"""Reads the primitives that JAX makes under its newest flags.

These are ``jax_remat3``, ``jax_custom_vjp3`` and ``jax_custom_jvp3``. One primitive,
``call_hi_primitive``, then stands for checkpoints and derivative rules.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.util import weakref_lru_cache

from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, PyTree

# Under the flags jax_remat3, jax_custom_vjp3 and jax_custom_jvp3.
HIGH = "call_hi_primitive"


HIGH_OPS = {
    "RematTraced": "checkpoint",
    "CustomVJPTraced": "custom_vjp_call",
    "CustomJVPTraced": "custom_jvp_call",
    "CheckpointName": "name",
}


def high_name(eqn: Eqn) -> str:
    """Returns the class of an equation's primitive; empty if it has other rules too."""
    primitive = unbatched(eqn.params["_prim"])
    more = ("with_logs", "remat_rules", "bwd_accums")  # Rules of other kinds.
    has_more = any(primitive.params.get(name) for name in more)
    return "" if has_more else type(primitive).__name__


def unbatched(primitive: Any) -> Any:
    """Returns a primitive without the ``vmap`` calls around it (0.10)."""
    while type(primitive).__name__ == "VmapOf":  # 0.10
        primitive = primitive.prim
    return primitive


class _Batching(NamedTuple):
    """A ``vmap`` of a primitive. Trees are stored as leaves and a structure.

    Attributes:
      options: its keyword arguments.
      in_dims: the batched axes of the operands.
      out_dim: the batched axes of the results.
    """

    options: tuple[tuple[str, Any], ...]
    in_dims: tuple[tuple[int, ...], PyTree]
    out_dim: tuple[tuple[int, ...], PyTree]


def batchings(primitive: Any) -> Iterator[_Batching]:
    """Yields the ``vmap`` calls of a primitive, the outermost first (0.10)."""
    while primitive is not unbatched(primitive):
        # As leaves and a structure: a list of axes, which ``vmap`` accepts, has no
        # hash.
        trees = (primitive.in_dims, primitive.out_dim)
        flat = [(tuple(leaves), tree) for leaves, tree in map(jax.tree.flatten, trees)]
        yield _Batching(tuple(primitive._vmap_params.items()), *flat)
        primitive = primitive.prim


@weakref_lru_cache
def called_batched(
    primitive: Any, batchings: Sequence[_Batching], avals: Sequence[Aval]
) -> Jaxpr:
    """Returns the jaxpr of a primitive under ``vmap``.

    The arguments can be hashed; JAX's own primitive cannot if its axes are in a list.
    """
    fun = primitive.expand
    for options, *dims in reversed(batchings):
        in_dims, out_dim = (tree.unflatten(leaves) for leaves, tree in dims)
        fun = jax.vmap(fun, in_axes=in_dims, out_axes=out_dim, **dict(options))

    def run(*arrays: Array) -> list[Array]:
        results = fun(*primitive.in_tree.unflatten(arrays))
        return primitive.out_tree.flatten_up_to(results)

    return structure.trace(run, avals, primitive.traced.jaxpr)
