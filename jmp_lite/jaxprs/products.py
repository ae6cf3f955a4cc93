"""Reads matrix products: their parameters, their sizes and costs, and their axes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jmp_lite.jaxprs import sharding
from jmp_lite.jaxprs.params import op_of
from jmp_lite.jaxprs.structure import dtype_of
from jmp_lite.jaxprs.types import Array, Dtype, Eqn, Pair

PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
"""The ops that are matrix products: they sum over an axis of both operands."""


class ProductParams(NamedTuple):
    """The requests of a matrix product.

    Attributes:
      precision: its precision or its algorithm; None if it requests none.
      result_dtype: the dtype of its result; None for the dtype of its operands.
    """

    precision: lax.PrecisionLike
    result_dtype: Dtype | None


def product_params(eqn: Eqn) -> ProductParams | None:
    """Returns the requests of a matrix product; None for any other op."""
    if op_of(eqn) not in PRODUCTS:
        return None
    dtype = eqn.params.get("preferred_element_type")
    return ProductParams(eqn.params.get("precision"), dtype)


def precision_of(eqn: Eqn) -> lax.PrecisionLike:
    """Returns the precision or the algorithm that a product requests."""
    return eqn.params.get("precision")


def contracts_nothing(eqn: Eqn) -> bool:
    """Whether a matrix product contracts no axis, so that it is a multiplication."""
    if op_of(eqn) != "dot_general":
        return False
    (contracted, _), _ = dot_dimensions(eqn)
    # ``positions[:, None] @ rates[None]`` contracts an axis of size 1.
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def dot_dimensions(eqn: Eqn) -> lax.DotDimensionNumbers:
    """Returns the contracted and the batch axes of both operands of a product.

    The product is a ``dot_general`` or a ``ragged_dot_general``.
    """
    if "ragged_dot_dimension_numbers" in eqn.params:
        return ragged_axes(eqn).dot_dimension_numbers
    return eqn.params["dimension_numbers"]


def ragged_axes(eqn: Eqn) -> lax.RaggedDotDimensionNumbers:
    """Returns the dimension numbers of a product of groups, with their axes."""
    return eqn.params["ragged_dot_dimension_numbers"]


def out_sharding(eqn: Eqn) -> NamedSharding | None:
    """Returns the sharding that a product requests for its result, or None."""
    return eqn.params.get("out_sharding")


def dot_options(eqn: Eqn, dtype: Dtype) -> dict[str, Any]:
    """Returns the options of a dot_general, for a function in its place.

    Args:
      eqn: the equation.
      dtype: the dtype of the result.
    """
    options: dict[str, Any] = {"precision": None, "preferred_element_type": dtype}
    # Only where the program states one: a user's function may not know it.
    if (sharding := out_sharding(eqn)) is not None:
        options["out_sharding"] = sharding
    return options


def conv_axes(eqn: Eqn) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers of a convolution."""
    return eqn.params["dimension_numbers"]


def inserted_zeros(eqn: Eqn) -> Sequence[int]:
    """Returns the factors by which a product dilates its left operand with zeros."""
    return eqn.params.get("lhs_dilation", ())


def ambient_precision() -> lax.PrecisionLike:
    """Returns the precision or algorithm of a product that requests none."""
    # JAX accepts the names of precisions there, and those of algorithms.
    name: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    algorithms = jax.lax.DotAlgorithmPreset.__members__
    if name in algorithms:
        return algorithms[name]
    return None if name is None else jax.lax.Precision(name)


# ------------------------------------------------------------ sizes and operations


def product_sizes(eqn: Eqn) -> tuple[Any, ...]:
    """Returns the sizes M, N and K of a matrix product.

    For a convolution it returns the numbers of channels, and for other ops nothing. A
    size may be symbolic.
    """
    if op_of(eqn) not in PRODUCTS:
        return ()
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    if op_of(eqn) == "conv_general_dilated":
        channels_out, channels_in, *_ = (rhs[i] for i in conv_axes(eqn).rhs_spec)
        return channels_in, channels_out
    (summed, of_rhs), (batch, of_rhs_batch) = dot_dimensions(eqn)
    is_ragged = op_of(eqn) == "ragged_dot_general"
    groups = ragged_axes(eqn).rhs_group_dimensions if is_ragged else ()
    rest = [
        math.prod(n for i, n in enumerate(shape) if i not in bound)
        for shape, bound in (
            (lhs, {*summed, *batch}),
            (rhs, {*of_rhs, *of_rhs_batch, *groups}),
        )
    ]
    return *rest, math.prod(lhs[i] for i in summed)


def product_flops(eqn: Eqn) -> int:
    """Returns the operations of a matrix product, two for each multiplication."""
    if op_of(eqn) not in PRODUCTS:
        return 0
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    n_times = 1
    if op_of(eqn) == "conv_general_dilated":
        summed = [n for i, n in enumerate(rhs) if i != conv_axes(eqn).rhs_spec[0]]
        # The derivative of a stride inserts zeros, which are not work.
        n_times = math.prod(inserted_zeros(eqn))
    else:
        (axes, _), _ = dot_dimensions(eqn)
        summed = [lhs[i] for i in axes]
        if op_of(eqn) == "ragged_dot_general" and {*axes} & {
            *ragged_axes(eqn).lhs_ragged_dimensions
        }:
            # Each group contracts its own rows.
            n_times = known_size(eqn.invars[2].aval.shape[-1:])
    (out,) = eqn.outvars
    # A complex multiplication is four real ones, and two more sums.
    each = 8 if jnp.issubdtype(dtype_of(out), jnp.complexfloating) else 2
    return each * known_size(out.aval.shape) * known_size(summed) // max(n_times, 1)


def is_at_most(one: Any, other: Any) -> bool:
    """Whether a size is at most another; False if a symbolic size leaves it open."""
    try:
        return one <= other
    # ``jax.export`` of a batch of any size: whether n is at most 8 is not known.
    except jax.errors.InconclusiveDimensionOperation:
        return False


def known_size(shape: Iterable[object]) -> int:
    """Returns the number of elements of an array; a symbolic size counts as one."""
    return math.prod(n for n in shape if isinstance(n, int))


# ---------------------------------------- axes: transposed, mapped and scaled


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

    def product(
        self,
        lhs: Array,
        rhs: Array,
        precision: lax.PrecisionLike,
        dtype: Dtype,
        out_sharding: NamedSharding | None,
    ) -> Array:
        """Returns the product of two arrays in a dtype."""
        return lax.dot_general(
            lhs,
            rhs,
            (self.contracted, self.batch),
            precision,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
        )

    def transposed(self, side: int, ranks: Sequence[int]) -> "Transposed":
        """Returns the product that is the cotangent of an operand.

        Args:
          side: 0 for the left operand, 1 for the right one.
          ranks: the number of axes of both operands.
        """
        left, right = (self.free(i, rank) for i, rank in enumerate(ranks))
        other, n_batch = 1 - side, len(self.batch[side])
        kept, kept_of_other = (left, right) if side == 0 else (right, left)
        first = n_batch + (len(kept) if side == 0 else 0)
        in_result = range(first, first + len(kept_of_other))
        new = Dimensions(
            contracted=((*in_result,), (*kept_of_other,)),
            batch=((*range(n_batch),), self.batch[other]),
        )
        # The free axes of the other operand in the product are in ascending order.
        pairs = zip(self.contracted[other], self.contracted[side], strict=True)
        summed = (mine for _, mine in sorted(pairs))
        return Transposed(new, [*self.batch[side], *kept, *summed])

    def mapped(
        self, is_mapped: Sequence[bool], shape: Sequence[int]
    ) -> tuple["Dimensions", int]:
        """Returns the product that is mapped over the first axes of its operands.

        Args:
          is_mapped: whether each operand has a new first axis.
          shape: of the left operand, with its new axis.

        Returns:
          The axes, and the new axis of the result: a batch axis if both operands have
          it, else a free axis of one of them.
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
            n_contracted = len(self.contracted[0])
            at = len(self.batch[0]) if left else len(shape) - n_contracted
        contracted = moved(self.contracted, ())
        return Dimensions(contracted, moved(self.batch, first)), at

    def times_rows(self, result: Array, scales: Array, side: int) -> Array:
        """Returns a product times a number for each row of an operand.

        Args:
          result: the product.
          scales: an array with the axes of the operand; contracted ones have size 1.
          side: 0 for the left operand, 1 for the right one.
        """
        batch, free = self.batch[side], self.free(side, scales.ndim)
        order = [*batch, *free, *self.contracted[side]]
        n_kept = len(batch) + len(free)
        contracted = range(n_kept, scales.ndim)
        kept = lax.squeeze(lax.transpose(scales, order), contracted)
        first = n_kept if side == 0 else len(batch)
        spread = lax.expand_dims(kept, range(first, first + result.ndim - n_kept))
        return result * sharding.match_sharding(spread, result)


class Transposed(NamedTuple):
    """The product that is the cotangent of an operand.

    Attributes:
      axes: its axes; its left operand is the cotangent of the result, and its right
        operand is the other operand.
      order: the axis of the operand that each axis of the product is.
    """

    axes: Dimensions
    order: Sequence[int]


def axes_of(eqn: Eqn) -> Dimensions:
    """Returns the axes of a ``dot_general``."""
    return Dimensions(*dot_dimensions(eqn))
