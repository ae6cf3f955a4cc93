"""The axes of matrix products: the product itself, transposed, mapped and scaled."""

from collections.abc import Sequence
from typing import NamedTuple

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
    return Dimensions(*params.dot_dimensions(eqn))
