"""``bilinear``, a product in another form, as a primitive.

It is for products of rounded operands. Its derivative with respect to an operand is the
same kind of product, with the tangent in place of the operand. The transpose of that is
the same kind of product with the cotangent. So all derivatives, of any order, consist
of such products.

An operand may be rounded before the product. Then the product saves the rounded numbers
for the backward pass, and other products can read them too.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax import lax
from jax._src import dispatch
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.lax import dot_general_p
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core
from jax.sharding import NamedSharding

from jmp_lite.jaxprs import primitives, sharding, structure
from jmp_lite.jaxprs.products import Dimensions
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Tangent

Item = TypeVar("Item")

# --------------------------------------------------------- rules of bilinear primitives


def tangents_of_product(
    product: Callable[[Item, Item], Array],
    primals: Sequence[Item],
    tangents: Sequence[Any],
) -> list[Array]:
    """Returns the product of each nonzero tangent and the other operand."""
    (lhs, rhs), (of_lhs, of_rhs) = primals, tangents
    terms: list[Array] = []
    if not structure.is_zero(of_lhs):
        terms.append(product(of_lhs, rhs))
    if not structure.is_zero(of_rhs):
        terms.append(product(lhs, of_rhs))
    return terms


def cotangents_of_product(
    cotangent: Any,
    operands: Sequence[Array | ad.UndefinedPrimal],
    pull: Callable[[int, Aval], Array],
) -> list[Tangent | None]:
    """Returns the cotangents of both operands, of which one is unknown.

    Args:
      cotangent: the cotangent of the result.
      operands: the operands.
      pull: returns the cotangent of the unknown operand, given its side and its type.
    """
    side = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[side].aval
    is_zero = structure.is_zero(cotangent)
    found: list[Tangent | None] = [None, None]
    found[side] = type(cotangent)(aval) if is_zero else pull(side, aval)
    return found


# ---------------------------------------------------------------------------- bilinear


class ProductOperand(NamedTuple):
    """An operand of ``bilinear``.

    Attributes:
      array: the operand. If it has parts, this array only carries its tangent: it
        consists of zeros, which no compiled program reads.
      parts: the arrays that a form has made of the operand, such as rounded numbers and
        a scale, without a derivative. Under ``vmap`` all have the same new leading
        axes. Empty for an operand that the form has not rounded.
    """

    array: Array
    parts: tuple[Array, ...] = ()


class ProductForm(Protocol):
    """How a product is computed; a hashable value."""

    @property
    def dtype(self) -> Dtype | None:
        """The dtype in which operands are multiplied; None for that of operands."""
        ...

    @property
    def sums(self) -> str:
        """How products are added up."""
        ...

    def multiply(
        self,
        lhs: ProductOperand,
        rhs: ProductOperand,
        axes: Dimensions,
        out_sharding: NamedSharding | None,
    ) -> Array:
        """Returns the product, in the dtype of its operands.

        Args:
          lhs: the left operand.
          rhs: the right operand.
          axes: the axes of the product.
          out_sharding: the sharding of the result, as for ``dot_general``.
        """
        ...

    def with_tangent(self, side: int) -> "ProductForm":
        """Returns the form of the product with the tangent of an operand."""
        ...

    def transposed(self, side: int) -> "ProductForm":
        """Returns the form of the product that is the cotangent of an operand."""
        ...

    def cotangent_operand(self, cotangent: Array) -> ProductOperand:
        """Returns a cotangent as the left operand of a transposed product."""
        ...


def rounded(array: Array, parts: Sequence[Array]) -> ProductOperand:
    """Returns an operand with an array's tangent, and with ``parts`` as its numbers."""
    return ProductOperand(_tangent_of.bind(array), tuple(parts))


def bilinear(
    lhs: ProductOperand,
    rhs: ProductOperand,
    form: ProductForm,
    axes: Dimensions,
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Returns a product in a form, in the dtype of its operands.

    Args:
      lhs: the left operand, in 16 bits.
      rhs: the right operand, in the same dtype.
      form: computes the product.
      axes: the axes of the product.
      out_sharding: the sharding of the result, as for ``dot_general``.
    """
    parts = *lhs.parts, *rhs.parts
    return _bilinear.bind(
        lhs.array,
        rhs.array,
        *parts,
        dimension_numbers=tuple(axes),
        out_sharding=out_sharding,
        precision=None,
        # Read by the type rule of ``dot_general``, which is used, too.
        preferred_element_type=lhs.array.dtype,
        form=form,
        n_parts=len(lhs.parts),
    )


def dtype_of(eqn: Eqn) -> Dtype | None:
    """Returns the dtype in which a form multiplies operands; None for other equations.

    None also for a product of 16-bit operands.
    """
    return eqn.params["form"].dtype if eqn.primitive is _bilinear else None


def sums_of(eqn: Eqn) -> str:
    """Returns how a form adds 8-bit floats up; "" for other equations."""
    dtype = dtype_of(eqn)
    is_of_floats = dtype is not None and not np.issubdtype(dtype, np.integer)
    return eqn.params["form"].sums if is_of_floats else ""


def unrounded(eqn: Eqn, arrays: Sequence[Array]) -> list[Array] | None:
    """Runs an equation in float32 without the rounding of its form.

    In the float32 run of ``compare``, the array of an operand with parts holds its
    numbers and not zeros. So the parts are not read.

    Args:
      eqn: the equation.
      arrays: its operands; floats in float32.

    Returns:
      Its results; None for an equation without a form.
    """
    if eqn.primitive is _tangent_of:
        return [*arrays]
    if eqn.primitive is not _bilinear:
        return None
    lhs, rhs, axes = _unpacked(arrays, eqn.params)
    # At the default precision an accelerator would round the operands.
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    out_sharding = eqn.params["out_sharding"]
    dtype = np.dtype("float32")
    return [axes.product(lhs.array, rhs.array, highest, dtype, out_sharding)]


def are_tangents(eqn: Eqn) -> list[bool]:
    """Returns for each operand of an equation whether it only carries a tangent."""
    if eqn.primitive is not _bilinear:
        return [eqn.primitive is _tangent_of] * len(eqn.invars)
    lhs, rhs, _ = _unpacked(eqn.invars, eqn.params)
    others = [False] * (len(eqn.invars) - 2)
    return [bool(lhs.parts), bool(rhs.parts), *others]


def _unpacked(
    arrays: Sequence[Any], params: Mapping[str, Any]
) -> tuple[ProductOperand, ProductOperand, Dimensions]:
    """Returns the operands and the axes of a product, given all its arrays."""
    lhs, rhs, *parts = arrays
    n_parts = params["n_parts"]
    return (
        ProductOperand(lhs, (*parts[:n_parts],)),
        ProductOperand(rhs, (*parts[n_parts:],)),
        Dimensions(*params["dimension_numbers"]),
    )


def _multiply(*arrays: Array, **params: Any) -> Array:
    lhs, rhs, axes = _unpacked(arrays, params)
    return params["form"].multiply(lhs, rhs, axes, params["out_sharding"])


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
    """Lowers a product whose rounded operands are stored with the last axis innermost.

    A GPU's kernels for 8 bits read both operands along contracted axes. In a scan, XLA
    would for that transpose the stack of float32 weights that an operand is made of: it
    held 1.23 times the memory of 16 bits, not 1.04 (8 blocks with ``jax.checkpoint``,
    H100). But JAX exports no program that states a layout, and XLA gathers an array
    that is split over devices to give it one.
    """
    module = ctx.module_context
    n_devices = getattr(module.axis_context, "num_devices", None)
    is_stated = n_devices == 1 and not module.lowering_parameters.for_export

    def multiply(lhs: Array, rhs: Array, *parts: Array) -> Array:
        if is_stated:
            parts = tuple(
                with_layout_constraint(part, Layout(tuple(range(part.ndim))))
                for part in parts
            )
        return _multiply(lhs, rhs, *parts, **params)

    return mlir.lower_fun(multiply, multiple_results=False)(ctx, *values)


def _type(
    lhs: Aval, rhs: Aval, *parts: Aval, form: ProductForm, n_parts: int, **params: Any
):
    # The type is that of a ``dot_general``, which knows none of these.
    del parts, form, n_parts
    return dot_general_p.abstract_eval(lhs, rhs, **params)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Tangent], **params: Any
) -> tuple[Array, Array]:
    form, out_sharding = params["form"], params["out_sharding"]
    lhs, rhs, axes = _unpacked(primals, params)

    def product(left: ProductOperand | Array, right: ProductOperand | Array) -> Array:
        changed = form.with_tangent(0 if isinstance(right, ProductOperand) else 1)
        left, right = (
            each if isinstance(each, ProductOperand) else ProductOperand(each)
            for each in (left, right)
        )
        return bilinear(left, right, changed, axes, out_sharding)

    terms = tangents_of_product(product, [lhs, rhs], tangents[:2])
    result = bilinear(lhs, rhs, form, axes, out_sharding)
    return result, functools.reduce(lax.add, terms)


def _transpose(
    cotangent: Tangent, *arrays: Array | ad.UndefinedPrimal, **params: Any
) -> list[Tangent | None]:
    lhs, rhs, axes = _unpacked(arrays, params)
    form = params["form"]
    given: Any = cotangent  # ``pull`` is not called for a zero.

    def pull(side: int, aval: Aval) -> Array:
        other = rhs if side == 0 else lhs
        ranks = [aval.ndim, other.array.ndim]
        product = axes.transposed(side, ranks if side == 0 else ranks[::-1])
        transposed = form.transposed(side)
        made = bilinear(
            transposed.cotangent_operand(given),
            other,
            transposed,
            product.axes,
            sharding.permuted_sharding(aval, product.order),
        )
        return lax.transpose(made, np.argsort(product.order))

    of_operands = cotangents_of_product(cotangent, arrays[:2], pull)
    return of_operands + [None] * (len(arrays) - 2)


def _map(
    arrays: Sequence[Array], mapped: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    lhs, rhs, axes = _unpacked(arrays, params)
    of_lhs, of_rhs, _ = _unpacked(mapped, params)
    length = next(
        array.shape[axis]
        for array, axis in zip(arrays, mapped, strict=True)
        if axis is not None
    )
    lhs, is_left = _move_axis_first(lhs, of_lhs, length)
    rhs, is_right = _move_axis_first(rhs, of_rhs, length)
    new, at = axes.mapped([is_left, is_right], lhs.array.shape)
    first = lhs if is_left else rhs
    out_sharding = sharding.insert_axis(params["out_sharding"], at, first.array)
    return bilinear(lhs, rhs, params["form"], new, out_sharding), at


def _move_axis_first(
    operand: ProductOperand, axes: Any, length: int
) -> tuple[ProductOperand, bool]:
    """Moves the mapped axis of an operand, if any, to the front of all its arrays.

    Args:
      operand: the operand.
      axes: the mapped axis of each of its arrays.
      length: of the mapped axis.

    Returns:
      The operand, and whether it has the axis.
    """
    mapped = axes.array, *axes.parts
    if all(axis is None for axis in mapped):
        return operand, False
    pairs = zip((operand.array, *operand.parts), mapped, strict=True)
    array, *parts = (batching.bdim_at_front(*pair, length) for pair in pairs)
    return ProductOperand(array, tuple(parts)), True


# With JAX's name: ``explain`` and users count the products of a jaxpr by name.
_bilinear = core.Primitive(dot_general_p.name)
_bilinear.def_impl(functools.partial(dispatch.apply_primitive, _bilinear))
_bilinear.def_effectful_abstract_eval(_type)
mlir.register_lowering(_bilinear, _lower)
ad.primitive_jvps[_bilinear] = _jvp
ad.primitive_transposes[_bilinear] = _transpose
batching.primitive_batchers[_bilinear] = _map
# ``dots_saveable`` compares the primitive itself.
primitives.take_for(_bilinear, dot_general_p)

TANGENT_OF = "tangent_of"
"""A primitive that does not read the numbers of its operand."""

_tangent_of = primitives.primitive(
    TANGENT_OF, lambda array: sharding.zeros(jax.typeof(array))
)
primitives.pass_last_tangent(_tangent_of)
