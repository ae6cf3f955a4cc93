"""Runs a jaxpr on two lanes, and measures the error of each op.

One lane runs the jaxpr as it is. The other lane runs it in float32, with the predicates
and trip counts of the first.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jmp_lite.autocasting.rules.scopes import of_the_user
from jmp_lite.insight.compare import twins
from jmp_lite.insight.compare.twins import Twin, TwinError
from jmp_lite.insight.counting import CountingEvaluator
from jmp_lite.insight.places import Place
from jmp_lite.jaxprs import bilinear, params, structure
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Var
from jmp_lite.ops import KEEPING_ERRORS


class ComparedOp(NamedTuple):
    """An op and its place.

    Attributes:
      scope: the path of its scopes.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      dtype: the narrowest floating dtype that it reads or returns.
      rounding: the largest relative error of rounding to ``dtype``.
      is_backward: whether it belongs to a backward pass.
    """

    scope: str
    op: str
    source: str
    dtype: str
    rounding: float
    is_backward: bool


class Sums(NamedTuple):
    """Sums from which the errors of ops are computed, one element for each op.

    Attributes:
      off: the sum of absolute errors of the results.
      size: the sum of absolute values of the float32 results.
      given: the relative error of the operands (the largest of several), weighted by
        ``size``. Divided by ``size``, the sum over all trips is a weighted mean.
    """

    off: Array
    size: Array
    given: Array


class Comparer(CountingEvaluator[Twin, bool, ComparedOp]):
    """Runs jaxprs on two lanes. The form of a value is whether it has a twin.

    Args:
      elements: the largest number of elements of a result to compare.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def inner(self) -> "Comparer":
        """Returns a comparer for a jaxpr inside."""
        return Comparer(self._elements)

    # ------------------------------------------------------------------ the equations

    def equation(
        self, eqn: Eqn, operands: Sequence[Twin], site: Place
    ) -> Sequence[Twin]:
        """Runs an equation on both lanes, and measures the error of its results."""
        results = twins.run_twice(eqn, operands)
        # The rounding of a cast counts for the op that reads its result.
        if params.op_of(eqn) in _KEEPING:
            for result, operand in zip(results, operands, strict=False):
                result.error = operand.measured(self._elements) or twins.NO_ERROR
        else:
            self._measure(eqn, operands, results, site)
        return results

    def _measure(
        self, eqn: Eqn, operands: Sequence[Twin], results: Sequence[Twin], site: Place
    ) -> None:
        made = self._errors(results)
        if not made:
            return
        off, size = (sum(each) for each in zip(*made, strict=True))
        # An operand that only carries a tangent consists of zeros on the low lane. Its
        # error is known only if an earlier op has passed it on.
        pairs = zip(operands, bilinear.are_tangents(eqn), strict=True)
        read = [one for one, is_tangent in pairs if one.error or not is_tangent]
        given = [error.relative for error in self._errors(read)]
        largest = functools.reduce(jnp.maximum, given, jnp.float32(0))
        dtype = twins.running_dtype(eqn)
        op = ComparedOp(
            of_the_user(site.path),
            params.op_of(eqn),
            site.source,
            dtype.name,
            _half_a_unit(dtype),
            site.is_backward,
        )
        weighted = jnp.where(size > 0, largest * size, 0)
        self.note([op], Sums(*(jnp.atleast_1d(x) for x in (off, size, weighted))))

    def _errors(self, values: Sequence[Twin]) -> list[TwinError]:
        """Returns the errors of the values that have one."""
        errors = [twin.measured(self._elements) for twin in values]
        return [error for error in errors if error is not None]

    def nothing(self, n: int) -> Sums:
        """Returns the sums of ops that did not run."""
        zeros = jnp.zeros(n, jnp.float32)
        return Sums(zeros, zeros, zeros)

    def add(self, one: Sums, other: Sums) -> Sums:
        """Returns the sums of two steps."""
        return Sums(*(a + b for a, b in zip(one, other, strict=True)))

    # --------------------------------------------------------------------- the values

    def constant(self, var: Var, array: Array) -> Twin:
        """Returns a constant, which no rounding affects."""
        del var
        return Twin(array)

    def form(self, value: Twin) -> bool:
        """Returns whether a value has a twin."""
        return value.exact is not None

    def join(self, forms: Sequence[bool]) -> bool:
        """Returns whether a value has a twin in any of several cases."""
        return any(forms)

    def width(self, form: bool) -> int:
        """Returns the number of arrays: two for a value with a twin."""
        return 1 + form

    def unpack(self, value: Twin, form: bool) -> list[Array]:
        """Returns the array of the first lane, then the twin."""
        return [value.low, value.full] if form else [value.low]

    def pack(self, arrays: Sequence[Array], form: bool) -> Twin:
        """Returns the value of an array of the first lane, and its twin."""
        return Twin(arrays[0], arrays[1] if form else None)

    def types(self, aval: Aval, form: bool) -> list[Aval]:
        """Returns the types of the first lane and of the twin."""
        if not form:
            return [aval]
        is_narrow = twins.is_narrow(aval.dtype)
        return [aval, structure.retyped(aval, jnp.float32) if is_narrow else aval]

    def specs(self, spec: PartitionSpec, form: bool) -> list[PartitionSpec]:
        """Returns the specs of the first lane and of the twin."""
        return [spec] * self.width(form)


_KEEPING = KEEPING_ERRORS | {bilinear.TANGENT_OF}


def _half_a_unit(dtype: Dtype) -> float:
    """Returns the relative error of rounding to a dtype, at most.

    For integers it is that of the largest number.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return 0.5 / float(jnp.iinfo(dtype).max)
    return float(jnp.finfo(dtype).eps) / 2
