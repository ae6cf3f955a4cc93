"""Makes primitives of this library."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax._src.interpreters import ad, batching, mlir
from jax.extend import core

from jmp_lite.casting.types import AnyArray
from jmp_lite.jaxprs import sharding
from jmp_lite.jaxprs.types import Array, Primitive, Tangent


def primitive(name: str, fun: Callable[..., Array]) -> core.Primitive:
    """Returns a primitive whose result has the type of its last operand.

    Unlike a ``custom_jvp``, whose rule JAX may drop if a loop is differentiated twice,
    it keeps its derivative: see ``pass_last_tangent``.

    Args:
      name: the name of the primitive.
      fun: computes its result. Under ``vmap`` all operands have the same number of
        additional leading axes.
    """
    _NAMES.add(name)
    made = core.Primitive(name)
    made.def_impl(fun)
    made.def_abstract_eval(lambda *avals: avals[-1])
    mlir.register_lowering(made, mlir.lower_fun(fun, multiple_results=False))

    def batch(
        operands: Sequence[Array], axes: Sequence[int | None]
    ) -> tuple[Array, int]:
        size = next(
            operand.shape[axis]
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        )
        in_front = (
            batching.bdim_at_front(operand, axis, size)
            for operand, axis in zip(operands, axes, strict=True)
        )
        return made.bind(*in_front), 0

    batching.primitive_batchers[made] = batch
    return made


_NAMES: set[str] = set()


def is_of_this_library(op: str) -> bool:
    """Whether ``primitive`` made an op; such an op accepts operands of any dtype."""
    return op in _NAMES


_TAKEN_FOR: dict[Primitive, Primitive] = {}


def take_for(made: Primitive, known: Primitive) -> None:
    """Makes checkpoint policies treat a primitive as one of JAX that they know."""
    _TAKEN_FOR[made] = known


def taken_for(given: Primitive) -> Primitive:
    """Returns the primitive that checkpoint policies receive in place of one."""
    return _TAKEN_FOR.get(given, given)


def pass_last_tangent(made: core.Primitive) -> None:
    """Sets the derivative of a primitive: its tangent is that of its last operand."""

    def rule(
        primals: Sequence[Array], tangents: Sequence[Tangent]
    ) -> tuple[Array, Tangent]:
        return made.bind(*primals), tangents[-1]

    ad.primitive_jvps[made] = rule


# ------------------------------------------ the derivative of the exact array

_primitive = primitive("straight_through", lambda rounded, _: rounded)
pass_last_tangent(_primitive)


def straight_through(rounded: AnyArray, exact: AnyArray) -> Array:
    """Returns rounded numbers, with the derivative of the exact ones.

    Args:
      rounded: the numbers.
      exact: an array of the same shape and dtype. Its numbers are not read.
    """
    rounded, exact = jnp.asarray(rounded), jnp.asarray(exact)
    # The result has the type of ``exact``: in ``shard_map`` it has to vary over the
    # axes of ``rounded``, too.
    axes = sharding.mapped_axes_of(rounded)
    return _primitive.bind(rounded, sharding.as_varying(exact, axes))
