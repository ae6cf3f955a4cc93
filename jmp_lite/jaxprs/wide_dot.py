"""A matrix product with 16-bit operands and a float32 result, as an own primitive.

JAX's derivative of such a product multiplies the float32 cotangent, in float32. This
one casts the cotangent to the dtype of the operands. A ``custom_jvp`` does not suffice:
the second derivative of a loop transposes the product itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.lax import dot_general_p
from jax.extend import core

from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.dots import map_product
from jmp_lite.jaxprs.types import Array, Eqn


def wide_dot(eqn: Eqn, operands: Sequence[Array], precision: Any) -> Array:
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
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[Array, Any]:
    tangent = None
    low = {**params, "preferred_element_type": primals[0].dtype}
    for side in (0, 1):
        if structure.is_zero(tangents[side]):
            continue
        operands = [*primals]
        operands[side] = tangents[side]
        term = sharding.cast(dot_general_p.bind(*operands, **low), np.float32)
        tangent = term if tangent is None else lax.add(tangent, term)
    return _wide_dot.bind(*primals, **params), tangent


def _transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    """Returns the cotangent of the operand in which the product is linear."""
    found: list[Any] = [None, None]
    side = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval, low = operands[side].aval, {**params}
    if structure.is_zero(cotangent):
        found[side] = type(cotangent)(aval)
        return found
    low["preferred_element_type"] = aval.dtype

    def product(operand: Array) -> Array:
        every = [operand, operands[1]] if side == 0 else [operands[0], operand]
        return dot_general_p.bind(*every, **low)

    pull = jax.linear_transpose(product, aval)
    (found[side],) = pull(sharding.cast(cotangent, aval.dtype))
    return found


def _in_float32(lhs: Array, rhs: Array, **params: Any) -> Any:
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
    _wide_dot, mlir.lower_fun(_in_float32, multiple_results=False), platform="cpu"
)
ad.primitive_jvps[_wide_dot] = _jvp
ad.primitive_transposes[_wide_dot] = _transpose
batching.primitive_batchers[_wide_dot] = functools.partial(map_product, _wide_dot)
