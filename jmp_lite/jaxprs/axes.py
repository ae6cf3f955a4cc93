"""The axes of products: of matrices (``Dimensions``), and of groups (``Groups``).

Both classes compute a product, its transposes, the product under ``vmap``, and a
product times a scale for each row. So each form of products (``bilinear.py``) is
written once for both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jmp_lite.jaxprs import params, sharding
from jmp_lite.jaxprs.types import Array, Dtype, Eqn, Pair


class Dimensions(NamedTuple):
    """The axes of both operands of a product, the dimension numbers of ``dot_general``.

    Attributes:
      contracted: the contracted axes of the left and of the right operand.
      batch: their batch axes.
    """

    contracted: Pair
    batch: Pair

    @property
    def numbers(self) -> Any:
        """The dimension numbers of ``dot_general``."""
        return tuple(self)

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
            self.numbers,
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
        return Transposed(*self.transposed_with(side, left, right))

    def transposed_with(
        self, side: int, left: Sequence[int], right: Sequence[int]
    ) -> tuple["Dimensions", list[int]]:
        """Returns the fields of ``Transposed``, given the free axes of each."""
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
        return new, [*self.batch[side], *kept, *summed]

    def mapped(
        self, is_mapped: Sequence[bool], shape: Sequence[int], sizes: None = None
    ) -> tuple["Dimensions", int]:
        """Returns the product that is mapped over the first axes of its operands.

        Args:
          is_mapped: whether each operand has a new first axis.
          shape: of the left operand, with its new axis.
          sizes: see ``Groups``.

        Returns:
          The axes, and the new axis of the result: a batch axis if both operands have
          it, else a free axis of one of them.
        """
        del sizes
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

    def mask_unread(self, array: Array, side: int) -> Array:
        """Returns an operand with zeros in place of elements that are not read."""
        del side
        return array

    def times_rows(self, result: Array, scales: Array, side: int) -> Array:
        """Returns a product times a number for each row of an operand.

        Args:
          result: the product.
          scales: an array with the axes of the operand; contracted ones have size 1.
          side: 0 for the left operand, 1 for the right one.
        """
        spread = self.spread(scales, side, result.ndim)
        return result * sharding.match_sharding(spread, result)

    def spread(self, scales: Array, side: int, rank: int) -> Array:
        """Returns numbers for each row with the axes of the product.

        Args:
          scales: an array with the axes of an operand; contracted ones have size 1.
          side: 0 for the left operand, 1 for the right one.
          rank: the number of axes of the product.
        """
        batch, free = self.batch[side], self.free(side, scales.ndim)
        order = [*batch, *free, *self.contracted[side]]
        n_kept = len(batch) + len(free)
        contracted = range(n_kept, scales.ndim)
        kept = lax.squeeze(lax.transpose(scales, order), contracted)
        first = n_kept if side == 0 else len(batch)
        return lax.expand_dims(kept, range(first, first + rank - n_kept))


class Groups(NamedTuple):
    """The axes of a product of groups, a ``ragged_dot_general``.

    The rows of the left operand are in groups of different sizes. The product
    multiplies each with the weights of its group. The cotangent of the weights is a
    product of another kind: it contracts the rows of each group separately, and the
    groups are the first axis of its result.

    For example, sizes ``[1, 0, 2]`` of rows ``x`` (``[4, k]``) and weights ``w``
    (``[3, k, n]``) give ``[x[0] @ w[0], x[1] @ w[2], x[2] @ w[2], 0]``: the last row is
    in no group. With the cotangent ``c`` (``[4, n]``), that of the weights is
    ``[x[:1].T @ c[:1], 0, x[1:3].T @ c[1:3]]``.

    Attributes:
      dimensions: the contracted and the batch axes.
      rows: the axis of the left operand along which the groups lie.
      group: the axis of groups of the right operand; None if rows are contracted.
      sizes: how many rows each group has: ``[groups]``; or, if groups differ from batch
        to batch, ``[*before, groups]``, see ``axes_before_rows``.
    """

    dimensions: Dimensions
    rows: int
    group: int | None
    sizes: Array

    @classmethod
    def read(cls, numbers: lax.RaggedDotDimensionNumbers, sizes: Array) -> "Groups":
        """Returns the axes of a product, given its dimension numbers."""
        (rows,) = numbers.lhs_ragged_dimensions
        contracted, batch = numbers.dot_dimension_numbers
        (group,) = numbers.rhs_group_dimensions or (None,)
        return cls(Dimensions(contracted, batch), rows, group, sizes)

    @property
    def numbers(self) -> lax.RaggedDotDimensionNumbers:
        """The dimension numbers of ``ragged_dot_general``."""
        group = () if self.group is None else (self.group,)
        return lax.RaggedDotDimensionNumbers(tuple(self.dimensions), [self.rows], group)

    @property
    def contracted(self) -> Pair:
        """The contracted axes of both operands."""
        return self.dimensions.contracted

    def product(
        self,
        lhs: Array,
        rhs: Array,
        precision: lax.PrecisionLike,
        dtype: Dtype,
        out_sharding: NamedSharding | None,
    ) -> Array:
        """Returns the product of two arrays in a dtype."""
        return lax.ragged_dot_general(
            lhs,
            rhs,
            self.sizes,
            self.numbers,
            precision,
            preferred_element_type=dtype,
            out_sharding=out_sharding,
        )

    def transposed(self, side: int, ranks: Sequence[int]) -> "Transposed":
        """Returns the product that is the cotangent of an operand.

        Raises:
          NotImplementedError: rows are contracted; JAX does not have it either.
        """
        if self.group is None:
            raise NotImplementedError(
                "JAX has no reverse-mode derivative of a ragged_dot_general that "
                "contracts its rows, which the gradient of the weights is."
            )
        left = self.dimensions.free(0, ranks[0])
        right = [i for i in self.dimensions.free(1, ranks[1]) if i != self.group]
        new, order = self.dimensions.transposed_with(side, left, right)
        rows = len(self.dimensions.batch[0]) + left.index(self.rows)
        if side == 0:
            return Transposed(Groups(new, rows, self.group, self.sizes), order)
        return Transposed(Groups(new, rows, None, self.sizes), [self.group, *order])

    def mapped(
        self,
        is_mapped: Sequence[bool],
        shape: Sequence[int],
        sizes: Array | None = None,
    ) -> tuple["Groups", int]:
        """Returns the product that is mapped over the first axes of its operands.

        Args:
          is_mapped: whether each operand has a new first axis.
          shape: of the left operand, with its new axis.
          sizes: the sizes of the groups, with a new first axis; None if they have none.

        Returns:
          The axes, and the new axis of the result.
        """
        dimensions, at = self.dimensions.mapped(is_mapped, shape)
        left, right = is_mapped
        group = None if self.group is None else self.group + right
        new = Groups(dimensions, self.rows + left, group, self.sizes)
        before = new.axes_before_rows(0)
        wide = self.sizes
        if sizes is not None:
            missing = range(1, len(before) + 2 - sizes.ndim)
            wide = jnp.moveaxis(lax.expand_dims(sizes, missing), 0, before.index(0))
        elif wide.ndim > 1 and left and 0 in before:
            wide = lax.expand_dims(wide, [before.index(0)])
        if wide.ndim > 1:
            lengths = [shape[axis] for axis in before]
            wide = jnp.broadcast_to(wide, (*lengths, wide.shape[-1]))
        # The groups are the first axis of a product that contracts rows.
        return new._replace(sizes=wide), at + (self.group is None)

    def axes_before_rows(self, side: int) -> list[int]:
        """Returns the axes of an operand along which the sizes of groups may differ."""
        batch, contracted = self.dimensions.batch, self.contracted
        if self.group is None:
            before = contracted[0].index(self.rows)
            return [*batch[side], *contracted[side][:before]]
        free = self.dimensions.free(0, self.rows)
        return [*batch[0], *free]

    def mask_unread(self, array: Array, side: int) -> Array:
        """Returns an operand with zeros in place of the rows that are in no group."""
        if self.group is not None:
            if side == 1:
                return array
            rows = self.rows
        else:
            rows = self.contracted[side][self.contracted[0].index(self.rows)]
        is_in_a_group = self._group_of_rows(array.shape[rows]) < self.sizes.shape[-1]
        axes = [*(self.axes_before_rows(side) if self.sizes.ndim > 1 else ()), rows]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        mask = lax.transpose(is_in_a_group, order)
        missing = [axis for axis in range(array.ndim) if axis not in axes]
        return jnp.where(lax.expand_dims(mask, missing), array, jnp.zeros_like(array))

    def times_rows(self, result: Array, scales: Array, side: int) -> Array:
        """Returns a product times a number for each row of an operand.

        Args:
          result: the product.
          scales: an array with the axes of the operand; contracted ones have size 1,
            and so may the axis of groups.
          side: 0 for the left operand, 1 for the right one.
        """
        if self.group is None:
            one_group = self.dimensions.times_rows
            return jax.vmap(lambda each: one_group(each, scales, side))(result)
        if side == 0:
            return self.dimensions.times_rows(result, scales, 0)
        # The axes of the weights of one group.
        group, (contracted, batch) = self.group, self.dimensions
        weights = Dimensions(
            (contracted[0], (*(axis - (axis > group) for axis in contracted[1]),)),
            (batch[0], (*(axis - (axis > group) for axis in batch[1]),)),
        )
        of_groups = jnp.moveaxis(scales, group, 0)
        if len(of_groups) == 1:
            return weights.times_rows(result, of_groups[0], 1)
        spread = jax.vmap(lambda each: weights.spread(each, 1, result.ndim))(of_groups)
        n_before = len(self.axes_before_rows(0))
        found = self._group_of_rows(result.shape[n_before])
        missing = range(n_before + 1, result.ndim)
        if self.sizes.ndim == 1:
            missing = (*range(n_before), *missing)
        of_rows = lax.expand_dims(found, (0, *(1 + axis for axis in missing)))
        # A row in no group consists of zeros. It is multiplied with the last scale.
        of_rows = jnp.minimum(of_rows, len(of_groups) - 1)
        return result * jnp.take_along_axis(spread, of_rows, 0)[0]

    def _group_of_rows(self, n_rows: int) -> Array:
        """Returns each row's group by index; the number of groups for a row in none."""
        ends = jnp.expand_dims(jnp.cumsum(self.sizes, -1), -2)
        rows = jnp.arange(n_rows, dtype=ends.dtype)[:, None]
        return jnp.sum(rows >= ends, -1, dtype=np.int32)


class Transposed(NamedTuple):
    """The product that is the cotangent of an operand.

    Attributes:
      axes: its axes; its left operand is the cotangent of the result, and its right
        operand is the other operand.
      order: the axis of the operand that each axis of the product is.
    """

    axes: Dimensions | Groups
    order: Sequence[int]


def axes_of(eqn: Eqn, others: Sequence[Array] = ()) -> Dimensions | Groups:
    """Returns the axes of a ``dot_general`` or a ``ragged_dot_general``.

    Args:
      eqn: the equation.
      others: its operands after the first two: the sizes of groups.
    """
    if others:
        return Groups.read(params.ragged_axes(eqn), *others)
    return Dimensions(*params.dot_dimensions(eqn))
