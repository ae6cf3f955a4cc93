"""A matrix product with 16-bit operands and a float32 result, as an own primitive.

JAX's derivative of such a product multiplies the float32 cotangent, in float32. This
one casts the cotangent to the dtype of the operands. A ``custom_jvp`` does not suffice:
the second derivative of a loop transposes the product itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.lax import dot_general_p
from jax.extend import core

from jmp_lite.jaxprs import primitives, sharding
from jmp_lite.jaxprs.bilinear import cotangents_of_product, tangents_of_product
from jmp_lite.jaxprs.products import Dimensions
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Tangent


def wide_dot(
    eqn: Eqn, operands: Sequence[Array], precision: lax.PrecisionLike
) -> Array:
    """Returns a ``dot_general`` of 16-bit operands in float32.

    Args:
      eqn: an equation with its dimensions.
      operands: its operands.
      precision: its precision or algorithm.
    """
    changed = {
        "precision": precision,
        "preferred_element_type": np.dtype("float32"),
    }
    return _wide_dot.bind(*operands, **{**eqn.params, **changed})


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Tangent], **params: Any
) -> tuple[Array, Array]:
    low = {**params, "preferred_element_type": primals[0].dtype}
    product = functools.partial(dot_general_p.bind, **low)
    terms = tangents_of_product(product, primals, tangents)
    full = (sharding.cast(term, np.float32) for term in terms)
    return _wide_dot.bind(*primals, **params), functools.reduce(lax.add, full)


def _transpose(
    cotangent: Any, *operands: Array | ad.UndefinedPrimal, **params: Any
) -> list[Tangent | None]:
    def pull(side: int, aval: Aval) -> Array:
        def product(operand: Array) -> Array:
            every = [operand, operands[1]] if side == 0 else [operands[0], operand]
            low = {**params, "preferred_element_type": aval.dtype}
            return dot_general_p.bind(*every, **low)

        transpose = jax.linear_transpose(product, aval)
        (found,) = transpose(sharding.cast(cotangent, aval.dtype))
        return found

    return cotangents_of_product(cotangent, operands, pull)


def _map(
    operands: Sequence[Array], mapped: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    is_mapped = [axis is not None for axis in mapped]
    in_front = [
        operand if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, mapped, strict=True)
    ]
    axes = Dimensions(*params["dimension_numbers"])
    new, at = axes.mapped(is_mapped, in_front[0].shape)
    first = in_front[is_mapped.index(True)]
    changed = {
        "dimension_numbers": tuple(new),
        "out_sharding": sharding.insert_axis(params["out_sharding"], at, first),
    }
    return _wide_dot.bind(*in_front, **{**params, **changed}), at


def _multiply_float32(lhs: Array, rhs: Array, **params: Any) -> Array:
    full = (operand.astype(np.float32) for operand in (lhs, rhs))
    return dot_general_p.bind(*full, **{**params, "precision": None})


_wide_dot = core.Primitive("dot_general")
_wide_dot.def_impl(functools.partial(dispatch.apply_primitive, _wide_dot))
_wide_dot.def_effectful_abstract_eval(dot_general_p.abstract_eval)
mlir.register_lowering(
    _wide_dot, mlir.lower_fun(dot_general_p.bind, multiple_results=False)
)
# XLA for CPUs lacks some of these products. Products of float32 are the same numbers.
mlir.register_lowering(
    _wide_dot, mlir.lower_fun(_multiply_float32, multiple_results=False), platform="cpu"
)
ad.primitive_jvps[_wide_dot] = _jvp
ad.primitive_transposes[_wide_dot] = _transpose
# ``dots_saveable`` compares the primitive itself.
primitives.take_for(_wide_dot, dot_general_p)
batching.primitive_batchers[_wide_dot] = _map
