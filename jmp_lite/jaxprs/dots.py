"""The axes of products, and ``bilinear_dot``, a product in another form.

``bilinear_dot`` is for products of rounded operands. Its derivative with respect to an
operand is the same kind of product, with the tangent in place of the operand. The
transpose of that is the same kind of product with the cotangent. So all derivatives, of
any order, consist of such products.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.lax import dot_general_p
from jax.extend import core

from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.types import Array, Dtype, Eqn

Pair = tuple[tuple[int, ...], tuple[int, ...]]


class Dimensions(NamedTuple):
    """The axes of both operands of a product, the dimension numbers of ``dot_general``.

    Attributes:
      contracted: the contracted axes of the left and of the right operand.
      batch: their batch axes.
    """

    contracted: Pair
    batch: Pair

    def free(self, side: int, rank: int) -> list[int]:
        """Returns the axes of one operand that are neither contracted nor batch axes.

        Args:
          side: 0 for the left operand, 1 for the right one.
          rank: the number of its axes.
        """
        bound = {*self.contracted[side], *self.batch[side]}
        return [axis for axis in range(rank) if axis not in bound]


def batched(
    dimensions: Dimensions, is_mapped: Sequence[bool], rank: int
) -> tuple[Dimensions, int]:
    """Returns a product that is mapped over the first axes of its operands.

    Args:
      dimensions: the axes of the product.
      is_mapped: whether each operand has a new first axis.
      rank: the number of axes of the left operand, without the new one.

    Returns:
      The axes, and the new axis of the result: a batch axis if both operands have it,
      else a free axis of one of them.
    """
    left, right = is_mapped

    def moved(axes: Sequence[Sequence[int]], first: tuple[int, ...]) -> Pair:
        one, other = axes
        return (
            (*first, *(axis + left for axis in one)),
            (*first, *(axis + right for axis in other)),
        )

    first, at = (), 0
    if left and right:
        first = (0,)
    else:
        n_contracted = len(dimensions.contracted[0])
        at = len(dimensions.batch[0]) if left else rank - n_contracted
    contracted = moved(dimensions.contracted, ())
    return Dimensions(contracted, moved(dimensions.batch, first)), at


class Transposed(NamedTuple):
    """The product that is the cotangent of an operand.

    Attributes:
      dimensions: its axes; its left operand is the cotangent of the result, and its
        right operand is the other operand.
      axes: the axis of the operand that each axis of the product is.
    """

    dimensions: Dimensions
    axes: Sequence[int]


def transposed(dimensions: Dimensions, side: int, ranks: Sequence[int]) -> Transposed:
    """Returns the product that is the cotangent of an operand.

    Args:
      dimensions: the axes of the product.
      side: 0 for the left operand, 1 for the right one.
      ranks: the number of axes of both operands.
    """
    other = 1 - side
    batch, n_batch = dimensions.batch[side], len(dimensions.batch[side])
    kept, kept_of_other = (dimensions.free(i, ranks[i]) for i in (side, other))
    first = n_batch + (len(kept) if side == 0 else 0)
    in_result = range(first, first + len(kept_of_other))
    new = Dimensions(
        contracted=((*in_result,), (*kept_of_other,)),
        batch=((*range(n_batch),), dimensions.batch[other]),
    )
    # The free axes of the other operand in the product are in ascending order.
    pairs = zip(dimensions.contracted[other], dimensions.contracted[side], strict=True)
    return Transposed(new, [*batch, *kept, *(mine for _, mine in sorted(pairs))])


# --------------------------------------------------------- rules of bilinear primitives


def tangents_of_product(
    product: Callable[[Any, Any], Any],
    primals: Sequence[Array],
    tangents: Sequence[Any],
) -> list[Any]:
    """Returns the products with the tangent of one operand; zeros have none."""
    (lhs, rhs), (of_lhs, of_rhs) = primals, tangents
    terms: list[Any] = []
    if not structure.is_zero(of_lhs):
        terms.append(product(of_lhs, rhs))
    if not structure.is_zero(of_rhs):
        terms.append(product(lhs, of_rhs))
    return terms


def cotangents_of_product(
    cotangent: Any, operands: Sequence[Any], pull: Callable[[int, Any], Any]
) -> list[Any]:
    """Returns the cotangents of both operands, of which one is unknown.

    Args:
      cotangent: the cotangent of the result.
      operands: the operands.
      pull: returns the cotangent of the unknown operand, given its side and its type.
    """
    side = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[side].aval
    is_zero = structure.is_zero(cotangent)
    found: list[Any] = [None, None]
    found[side] = type(cotangent)(aval) if is_zero else pull(side, aval)
    return found


# ---------------------------------------------------------------------------- bilinear


class Form(Protocol):
    """How a product is computed; a hashable value."""

    @property
    def dtype(self) -> Dtype:
        """The dtype in which operands are multiplied."""
        ...

    def multiply(
        self, lhs: Array, rhs: Array, dimensions: Dimensions, out_sharding: Any
    ) -> Array:
        """Returns the product, in the dtype of its operands.

        Args:
          lhs: the left operand.
          rhs: the right operand.
          dimensions: their axes.
          out_sharding: the sharding of the result, as for ``dot_general``.
        """
        ...

    def transposed(self, side: int) -> "Form":
        """Returns the form of the product that is the cotangent of an operand."""
        ...


def bilinear_dot(eqn: Eqn, operands: Sequence[Array], form: Form) -> Array:
    """Returns a ``dot_general`` in another form.

    Args:
      eqn: an equation with its axes.
      operands: its two operands, in one 16-bit dtype.
      form: computes the product.
    """
    changed = {"precision": None, "preferred_element_type": operands[0].dtype}
    return _bilinear_dot.bind(*operands, **{**eqn.params, **changed}, form=form)


def form_of(eqn: Eqn) -> Form | None:
    """Returns the form of a ``bilinear_dot``; None for any other equation."""
    return eqn.params.get("form") if eqn.primitive is _bilinear_dot else None


def dimensions_of(params: Any) -> Dimensions:
    """Returns the axes of a product, given its parameters."""
    return Dimensions(*params["dimension_numbers"])


def _multiply(lhs: Array, rhs: Array, *, form: Form, **params: Any) -> Array:
    return form.multiply(lhs, rhs, dimensions_of(params), params["out_sharding"])


def _type(lhs: Any, rhs: Any, *, form: Form, **params: Any) -> Any:
    del form
    return dot_general_p.abstract_eval(lhs, rhs, **params)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[Array, Any]:
    product = functools.partial(_bilinear_dot.bind, **params)
    terms = tangents_of_product(product, primals, tangents)
    return product(*primals), functools.reduce(lax.add, terms)


def _transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    def pull(side: int, aval: Any) -> Any:
        other = operands[1 - side]
        ranks = [aval.ndim, other.ndim] if side == 0 else [other.ndim, aval.ndim]
        product = transposed(dimensions_of(params), side, ranks)
        changed = {
            "dimension_numbers": tuple(product.dimensions),
            "out_sharding": sharding.in_order(aval, product.axes),
            "form": params["form"].transposed(side),
        }
        made = _bilinear_dot.bind(cotangent, other, **{**params, **changed})
        return lax.transpose(made, np.argsort(product.axes))

    return cotangents_of_product(cotangent, operands, pull)


def map_product(
    primitive: Any,
    operands: Sequence[Array],
    axes: Sequence[int | None],
    **params: Any,
) -> tuple[Array, int]:
    """Maps a product over one operand or both, and returns the new axis of its result.

    Args:
      primitive: the product.
      operands: its operands.
      axes: the mapped axis of each operand; None if it is not mapped.
      **params: the parameters of the product.
    """
    is_mapped = [axis is not None for axis in axes]
    in_front = [
        operand if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    rank = in_front[0].ndim - is_mapped[0]
    dimensions, at = batched(dimensions_of(params), is_mapped, rank)
    changed = {"dimension_numbers": tuple(dimensions), "out_sharding": None}
    return primitive.bind(*in_front, **{**params, **changed}), at


_bilinear_dot = core.Primitive("dot_general")
_bilinear_dot.def_impl(_multiply)
_bilinear_dot.def_effectful_abstract_eval(_type)
mlir.register_lowering(_bilinear_dot, mlir.lower_fun(_multiply, multiple_results=False))
ad.primitive_jvps[_bilinear_dot] = _jvp
ad.primitive_transposes[_bilinear_dot] = _transpose
batching.primitive_batchers[_bilinear_dot] = functools.partial(
    map_product, _bilinear_dot
)
