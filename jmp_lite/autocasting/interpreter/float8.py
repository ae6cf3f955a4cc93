"""Matrix products in float8, made of parts that JAX can differentiate any number of times.

An operand is quantized (e4m3), and the product reads the numbers that it then stands
for, in bfloat16: ``dot(q * scale, ...)``. XLA for a GPU with float8 matrix units makes
one float8 kernel of that; elsewhere the same numbers are multiplied in bfloat16. The
cotangent of the result is quantized too (e5m2), so that both products of the backward
pass are float8. Rounding counts as the identity in derivatives.

What a product keeps for its backward pass is the quantized operands, a byte a number.
For that the dequantized ones are computed again, and derivatives go another way than
numbers do: beside the numbers and their scale an operand has a zero, which no op ever
reads, and whose tangent is that of the operand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jmp_lite.autocasting.jaxprs import compat, sharding
from jmp_lite.autocasting.jaxprs.types import Array, Dtype
from jmp_lite.casting.quantize import Quantized, dequantize, quantize


class QuantizedOperand(NamedTuple):
    """An operand of a float8 product.

    Attributes:
      quantized: what it is, which has no derivative.
      tangent: zeros in its shape and dtype, whose tangent is that of the operand.
    """

    quantized: Quantized
    tangent: Array


def quantize_operand(array: Array, dtype: Dtype) -> QuantizedOperand:
    """Returns an array as an operand.

    Args:
      array: a 16-bit array.
      dtype: a float8 dtype.
    """
    quantized = _quantize(lax.stop_gradient(array), dtype)
    # Not inside of the jitted function: a loop would stack its zeros step by step.
    return QuantizedOperand(quantized, _tangent_of.bind(array))


def apart(operand: QuantizedOperand, weight: QuantizedOperand) -> QuantizedOperand:
    """Returns an operand that XLA takes for another one in each product.

    XLA merges small products of one operand, such as those for queries, keys and
    values, and has no float8 kernel for a merged product.
    """
    quantized = operand.quantized
    scale = quantized.scale + 0 * weight.quantized.scale
    return operand._replace(quantized=quantized._replace(scale=scale))


@functools.partial(jax.jit, static_argnames=["dimensions", "dtype", "backward"])
def product(
    lhs: QuantizedOperand,
    rhs: QuantizedOperand,
    dimensions: Any,
    dtype: Dtype,
    backward: Dtype,
) -> Array:
    """Returns a product of matrices.

    Args:
      lhs: the left operand.
      rhs: the right operand.
      dimensions: the dimension numbers of ``dot_general``.
      dtype: the 16-bit dtype of the result.
      backward: the float8 dtype of cotangents.
    """

    def of_quantized(lhs: QuantizedOperand, rhs: QuantizedOperand) -> Array:
        operands = (_dequantized(*operand, dtype) for operand in (lhs, rhs))
        return _dot(*operands, dimensions, backward)

    return jax.checkpoint(of_quantized, prevent_cse=False)(lhs, rhs)


_quantize = jax.jit(quantize, static_argnames="dtype")


def _zeros(array: Array) -> Array:
    return sharding.zeros(jax.typeof(array))


_tangent_of = compat.elementwise_primitive("tangent_of", _zeros)
compat.set_jvp(_tangent_of, lambda array, tangent: (_zeros(array), tangent))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _dequantized(quantized: Quantized, tangent: Array, dtype: Dtype) -> Array:
    """Returns the numbers of an operand, whose tangent is that of the operand."""
    del tangent
    return dequantize(quantized, dtype)


@_dequantized.defjvp
def _(dtype: Dtype, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _dequantized(*primals, dtype), tangents[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _dot(lhs: Array, rhs: Array, dimensions: Any, backward: Dtype) -> Array:
    """Returns a product whose cotangent is quantized."""
    del backward
    return _plain_dot(lhs, rhs, dimensions, None)


@_dot.defjvp
def _(
    dimensions: Any, backward: Dtype, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    (lhs, rhs), (of_lhs, of_rhs) = primals, tangents
    # By default a float8 kernel adds up in fewer digits than float32's.
    precise = lax.Precision.HIGHEST
    tangent = _plain_dot(of_lhs, rhs, dimensions, precise)
    tangent += _plain_dot(lhs, of_rhs, dimensions, precise)
    return _dot(lhs, rhs, dimensions, backward), _received_in(backward)(tangent)


def _plain_dot(
    lhs: Array, rhs: Array, dimensions: Any, precision: lax.Precision | None
) -> Array:
    return lax.dot_general(
        lhs, rhs, dimensions, precision, preferred_element_type=lhs.dtype
    )


@functools.cache
def _received_in(dtype: Dtype) -> Callable[[Array], Array]:
    """Returns the identity, whose transpose quantizes to a float8 dtype."""
    primitive = compat.elementwise_primitive(f"cotangent_in_{dtype.name}", lambda x: x)

    @jax.custom_jvp
    def rounded(cotangent: Array) -> Array:
        return dequantize(_quantize(cotangent, dtype), cotangent.dtype)

    @rounded.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
        return rounded(*primals), primitive.bind(*tangents)

    compat.set_transpose(primitive, rounded)
    return primitive.bind
