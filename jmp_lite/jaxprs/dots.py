"""The axes of products, and ``bilinear_dot``, a product in another form.

``bilinear_dot`` is for products of rounded operands. Its derivative with respect to an
operand is the same kind of product, with the tangent in place of the operand. The
transpose of that is the same kind of product with the cotangent. So all derivatives, of
any order, consist of such products.

An operand may be rounded before the product. Then the product saves the rounded numbers
for the backward pass, and other products can read them too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.lax import dot_general_p
from jax.extend import core

from jmp_lite.jaxprs import primitives, sharding, structure
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


def times_rows(
    result: Array, scales: Array, dimensions: Dimensions, side: int
) -> Array:
    """Returns a product times a number for each row of an operand.

    Args:
      result: the product.
      scales: an array with the axes of the operand; contracted ones have size 1.
      dimensions: the axes of the product.
      side: 0 for the left operand, 1 for the right one.
    """
    rank = result.ndim
    batch, free = dimensions.batch[side], dimensions.free(side, scales.ndim)
    order = [*batch, *free, *dimensions.contracted[side]]
    n_kept = len(batch) + len(free)
    contracted = range(n_kept, scales.ndim)
    kept = lax.squeeze(lax.transpose(scales, order), contracted)
    first = n_kept if side == 0 else len(batch)
    spread = lax.expand_dims(kept, range(first, first + rank - n_kept))
    return result * sharding.beside(spread, result)


# --------------------------------------------------------- rules of bilinear primitives


def tangents_of_product(
    product: Callable[[Any, Any], Any],
    primals: Sequence[Any],
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


class Operand(NamedTuple):
    """An operand of a ``bilinear_dot``.

    Attributes:
      array: the operand. If it has parts, zeros in its shape and dtype, which no
        compiled program reads; their tangent is that of the operand.
      parts: what a form has made of the operand, such as rounded numbers and a scale:
        arrays without a derivative. Under ``vmap`` all have the same new leading axes.
        Empty for an operand that the form has not rounded.
    """

    array: Array
    parts: tuple[Array, ...] = ()


class Form(Protocol):
    """How a product is computed; a hashable value."""

    @property
    def dtype(self) -> Dtype | None:
        """The dtype in which operands are multiplied; None for that of operands."""
        ...

    def multiply(
        self,
        lhs: Operand,
        rhs: Operand,
        dimensions: Dimensions,
        out_sharding: Any,
        is_tpu: bool,
    ) -> Array:
        """Returns the product, in the dtype of its operands.

        Args:
          lhs: the left operand.
          rhs: the right operand.
          dimensions: their axes.
          out_sharding: the sharding of the result, as for ``dot_general``.
          is_tpu: whether it is lowered for a TPU.
        """
        ...

    def of_tangent(self) -> "Form":
        """Returns the form of the product with the tangent of an operand."""
        ...

    def transposed(self, side: int) -> "Form":
        """Returns the form of the product that is the cotangent of an operand."""
        ...

    def received(self, cotangent: Array) -> Operand:
        """Returns the cotangent of the result as an operand."""
        ...


def rounded(array: Array, parts: Sequence[Array]) -> Operand:
    """Returns an operand that has an array's derivative, and numbers of its own."""
    return Operand(_tangent_of.bind(array), tuple(parts))


def bilinear_dot(
    lhs: Operand,
    rhs: Operand,
    form: Form,
    dimensions: Any,
    out_sharding: Any = None,
) -> Array:
    """Returns a product of matrices in a form, in the dtype of its operands.

    Args:
      lhs: the left operand, in 16 bits.
      rhs: the right operand, in the same dtype.
      form: computes the product.
      dimensions: the dimension numbers of ``dot_general``.
      out_sharding: the sharding of the result, as for ``dot_general``.
    """
    return _bind(
        lhs,
        rhs,
        form,
        {
            "dimension_numbers": dimensions,
            "out_sharding": out_sharding,
            "precision": None,
            "preferred_element_type": lhs.array.dtype,
        },
    )


def dtype_of(eqn: Eqn) -> Dtype | None:
    """Returns the dtype in which a form multiplies operands; None for other equations.

    None also for a product of 16-bit operands.
    """
    return eqn.params["form"].dtype if eqn.primitive is _bilinear_dot else None


def unrounded(eqn: Eqn, arrays: Sequence[Array]) -> list[Array] | None:
    """Runs an equation in float32 without the rounding of its form.

    On a lane of float32, the array of an operand with parts is the operand itself, and
    not zeros. So the parts are not read.

    Args:
      eqn: the equation.
      arrays: its operands; floats in float32.

    Returns:
      Its results; None for an equation without a form.
    """
    if eqn.primitive is _tangent_of:
        return [*arrays]
    if eqn.primitive is not _bilinear_dot:
        return None
    lhs, rhs, *_ = arrays
    dtype = np.dtype("float32")
    params = {**eqn.params, "preferred_element_type": dtype}
    params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    for name in ("form", "n_parts"):
        del params[name]
    return [dot_general_p.bind(lhs, rhs, **params)]


def are_tangents(eqn: Eqn) -> list[bool]:
    """Returns for each operand of an equation whether it only carries a tangent."""
    if eqn.primitive is not _bilinear_dot:
        return [eqn.primitive is _tangent_of] * len(eqn.invars)
    arrays = range(2, len(eqn.invars))
    lhs, rhs = _operands([0, 1, *arrays], eqn.params["n_parts"])
    return [bool(lhs.parts), bool(rhs.parts), *(False for _ in arrays)]


def dimensions_of(params: Any) -> Dimensions:
    """Returns the axes of a product, given its parameters."""
    return Dimensions(*params["dimension_numbers"])


def _bind(lhs: Operand, rhs: Operand, form: Form, params: Any) -> Array:
    arrays = lhs.array, rhs.array, *lhs.parts, *rhs.parts
    changed = {"form": form, "n_parts": len(lhs.parts)}
    return _bilinear_dot.bind(*arrays, **{**params, **changed})


def _operands(arrays: Sequence[Any], n_parts: int) -> tuple[Operand, Operand]:
    lhs, rhs, *parts = arrays
    return Operand(lhs, (*parts[:n_parts],)), Operand(rhs, (*parts[n_parts:],))


def _multiply(
    *arrays: Array, form: Form, n_parts: int, is_tpu: bool, **params: Any
) -> Array:
    lhs, rhs = _operands(arrays, n_parts)
    dimensions, out_sharding = dimensions_of(params), params["out_sharding"]
    return form.multiply(lhs, rhs, dimensions, out_sharding, is_tpu)


def _type(lhs: Any, rhs: Any, *parts: Any, form: Form, n_parts: int, **params: Any):
    del parts, form, n_parts
    return dot_general_p.abstract_eval(lhs, rhs, **params)


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    form: Form,
    n_parts: int,
    **params: Any,
) -> tuple[Array, Any]:
    def product(lhs: Operand | Array, rhs: Operand | Array) -> Array:
        lhs, rhs = (
            each if isinstance(each, Operand) else Operand(each) for each in (lhs, rhs)
        )
        return _bind(lhs, rhs, form.of_tangent(), params)

    operands = _operands(primals, n_parts)
    terms = tangents_of_product(product, operands, tangents[:2])
    return _bind(*operands, form, params), functools.reduce(lax.add, terms)


def _transpose(
    cotangent: Any, *arrays: Any, form: Form, n_parts: int, **params: Any
) -> list[Any]:
    operands = _operands(arrays, n_parts)

    def pull(side: int, aval: Any) -> Any:
        other = operands[1 - side]
        ranks = [aval.ndim, other.array.ndim]
        dimensions = dimensions_of(params)
        product = transposed(dimensions, side, ranks if side == 0 else ranks[::-1])
        made = bilinear_dot(
            form.received(cotangent),
            other,
            form.transposed(side),
            tuple(product.dimensions),
            sharding.in_order(aval, product.axes),
        )
        return lax.transpose(made, np.argsort(product.axes))

    of_operands = cotangents_of_product(cotangent, arrays[:2], pull)
    return of_operands + [None] * (len(arrays) - 2)


def _map(
    arrays: Sequence[Array], axes: Sequence[int | None], *, n_parts: int, **params: Any
) -> tuple[Array, int]:
    groups = zip(_operands(arrays, n_parts), _operands(axes, n_parts), strict=True)
    (lhs, rhs), mapped = zip(*(_in_front(*group) for group in groups), strict=True)
    new = [0 if is_mapped else None for is_mapped in mapped]
    ends = lhs.array, rhs.array
    parts = *lhs.parts, *rhs.parts
    return map_product(_bilinear_dot, ends, new, *parts, n_parts=n_parts, **params)


def _in_front(operand: Operand, axes: Any) -> tuple[Operand, bool]:
    """Returns an operand with the mapped axis in front of all its arrays, if any."""
    arrays = operand.array, *operand.parts
    pairs = [*zip(arrays, (axes.array, *axes.parts), strict=True)]
    sizes = [array.shape[axis] for array, axis in pairs if axis is not None]
    if not sizes:
        return operand, False
    array, *parts = (batching.bdim_at_front(*pair, sizes[0]) for pair in pairs)
    return Operand(array, tuple(parts)), True


def map_product(
    primitive: Any,
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *others: Array,
    **params: Any,
) -> tuple[Array, int]:
    """Maps a product over one operand or both, and returns the new axis of its result.

    Args:
      primitive: the product.
      operands: its operands.
      axes: the mapped axis of each operand; None if it is not mapped.
      *others: what else the primitive takes, as it takes it.
      **params: the parameters of the product.
    """
    is_mapped = [axis is not None for axis in axes]
    in_front = [
        operand if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    rank = in_front[0].ndim - is_mapped[0]
    dimensions, at = batched(dimensions_of(params), is_mapped, rank)
    (mapped, *_) = (
        array for array, is_new in zip(in_front, is_mapped, strict=True) if is_new
    )
    changed = {
        "dimension_numbers": tuple(dimensions),
        "out_sharding": sharding.with_axis(params["out_sharding"], at, mapped),
    }
    return primitive.bind(*in_front, *others, **{**params, **changed}), at


_bilinear_dot = core.Primitive("dot_general")
_bilinear_dot.def_impl(functools.partial(dispatch.apply_primitive, _bilinear_dot))
_bilinear_dot.def_effectful_abstract_eval(_type)
for _platform in (None, "tpu"):
    # The form fits the chip for which a program is lowered, not the one where it is
    # traced: an exported program may be for several.
    _lowered = functools.partial(_multiply, is_tpu=_platform == "tpu")
    mlir.register_lowering(
        _bilinear_dot, mlir.lower_fun(_lowered, multiple_results=False), _platform
    )
ad.primitive_jvps[_bilinear_dot] = _jvp
ad.primitive_transposes[_bilinear_dot] = _transpose
batching.primitive_batchers[_bilinear_dot] = _map
primitives.take_for(_bilinear_dot, dot_general_p)

TANGENT_OF = "tangent_of"
"""A primitive that does not read the numbers of its operand."""

_tangent_of = primitives.primitive(
    TANGENT_OF, lambda array: sharding.zeros(jax.typeof(array))
)
primitives.pass_last_tangent(_tangent_of)
