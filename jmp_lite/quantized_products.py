"""Matrix products in float8, which JAX can differentiate any number of times.

An operand is quantized (e4m3), and the product reads its dequantized numbers in
bfloat16: ``dot(numbers * scale, ...)``. On a GPU with float8 matrix units, XLA compiles
this to one float8 kernel. Elsewhere the same numbers are multiplied in bfloat16. The
cotangent of the result is quantized too (e5m2), so both products of the backward pass
are float8. The derivative of rounding counts as the identity.

A product saves its quantized operands for the backward pass, one byte per element, and
dequantizes them again. The quantized numbers have no derivative. Next to them, an
operand has zeros, which no compiled program reads and whose tangent is the operand's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jmp_lite.casting.quantize import Quantized, dequantize, quantize
from jmp_lite.jaxprs import primitives, sharding
from jmp_lite.jaxprs.types import Array, Dtype


class QuantizedOperand(NamedTuple):
    """An operand of a float8 product.

    Attributes:
      quantized: the quantized array, which has no derivative.
      tangent: zeros in its shape and dtype, whose tangent is that of the operand.
    """

    quantized: Quantized
    tangent: Array


def quantize_operand(array: Array, dtype: Dtype) -> QuantizedOperand:
    """Returns an array as a quantized operand.

    Args:
      array: a 16-bit array.
      dtype: a float8 dtype.
    """
    quantized = _quantize(lax.stop_gradient(array), dtype)
    return QuantizedOperand(quantized, _tangent_of.bind(array))


def apart(operand: QuantizedOperand, weight: QuantizedOperand) -> QuantizedOperand:
    """Returns an operand that XLA treats as a different one in each product.

    XLA merges small products of one operand, such as those for queries, keys and
    values, and has no float8 kernel for a merged product.
    """
    quantized = operand.quantized
    scale = quantized.scale + 0 * weight.quantized.scale
    return operand._replace(quantized=quantized._replace(scale=scale))


@functools.partial(jax.jit, static_argnames=["dimensions", "backward"])
def product(
    lhs: QuantizedOperand,
    rhs: QuantizedOperand,
    dimensions: Any,
    backward: Dtype,
) -> Array:
    """Returns a product of matrices, in the 16-bit dtype of its operands.

    Args:
      lhs: the left operand.
      rhs: the right operand.
      dimensions: the dimension numbers of ``dot_general``.
      backward: the float8 dtype of cotangents.
    """

    def of_quantized(lhs: QuantizedOperand, rhs: QuantizedOperand) -> Array:
        return _dot(_dequantized(lhs), _dequantized(rhs), dimensions, backward)

    return jax.checkpoint(of_quantized, prevent_cse=False)(lhs, rhs)


_quantize = jax.jit(quantize, static_argnames="dtype")


def _zeros(array: Array) -> Array:
    return sharding.zeros(jax.typeof(array))


def _stands_for(numbers: Array, scale: Array, tangent: Array) -> Array:
    scale = scale.reshape(*scale.shape, *[1] * (numbers.ndim - scale.ndim))
    return dequantize(Quantized(numbers, scale), tangent.dtype)


TANGENT_OF, DEQUANTIZE = "tangent_of", "dequantize"
"""Primitives that do not read the numbers of their last operand."""

_tangent_of = primitives.primitive(TANGENT_OF, _zeros)
_dequantize = primitives.primitive(DEQUANTIZE, _stands_for)
primitives.pass_last_tangent(_tangent_of)
primitives.pass_last_tangent(_dequantize)


def _dequantized(operand: QuantizedOperand) -> Array:
    """Returns the numbers of an operand, with the tangent of the operand."""
    return _dequantize.bind(*operand.quantized, operand.tangent)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _dot(lhs: Array, rhs: Array, dimensions: Any, backward: Dtype) -> Array:
    """Returns a product whose cotangent is quantized."""
    del backward
    result = _plain_dot(lhs, rhs, dimensions, None)
    # XLA would compute a gelu in the product's kernel and also return the product,
    # which its float8 kernels cannot do, so compilation fails. This op changes no
    # number, and separates the two.
    finfo = jax.numpy.finfo(result.dtype)
    return lax.reduce_precision(result, finfo.nexp, finfo.nmant)


@_dot.defjvp
def _(
    dimensions: Any, backward: Dtype, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    (lhs, rhs), (of_lhs, of_rhs) = primals, tangents
    # By default a float8 kernel accumulates with fewer digits than float32.
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
    received = primitives.primitive(f"cotangent_in_{dtype.name}", lambda array: array)
    primitives.set_transpose(
        received, lambda cotangent: _dequantized(quantize_operand(cotangent, dtype))
    )
    return received.bind
