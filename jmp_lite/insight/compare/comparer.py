"""Runs a jaxpr on two lanes, and measures the error of each op.

One lane runs the jaxpr as it is. The other lane runs it in float32, with the predicates
and trip counts of the first.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmp_lite.autocasting.rules.rules import of_the_user
from jmp_lite.insight.compare import twins
from jmp_lite.insight.compare.twins import Twin
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.evaluate import Evaluator, Place
from jmp_lite.jaxprs.types import Array, Aval, Eqn


class Op(NamedTuple):
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
      given: the largest relative error of an operand, times ``size``.
    """

    off: Any
    size: Any
    given: Any


class Comparer(Evaluator[Twin, bool, Op]):
    """Runs jaxprs on two lanes. The form of a value is whether it has a twin.

    Args:
      elements: the largest number of elements of a result to compare.
    """

    keeps_calls = False

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def inner(self) -> "Comparer":
        """Returns a comparer for a jaxpr inside."""
        return Comparer(self._elements)

    # ------------------------------------------------------------------ the equations

    def equation(
        self, eqn: Eqn, operands: Sequence[Twin], place: Place
    ) -> Sequence[Twin]:
        """Runs an equation on both lanes, and measures the error of its results."""
        results = twins.run_twice(eqn, operands)
        if twins.keeps_errors(eqn):
            for result, operand in zip(results, operands, strict=False):
                result.error = operand.measured(self._elements) or twins.NO_ERROR
        else:
            self._measure(eqn, operands, results, place)
        return results

    def _measure(
        self,
        eqn: Eqn,
        operands: Sequence[Twin],
        results: Sequence[Twin],
        place: Place,
    ) -> None:
        made = [
            error
            for twin in results
            if (error := twin.measured(self._elements)) is not None
        ]
        if not made:
            return
        off, size = (sum(each) for each in zip(*made, strict=True))
        errors = [twin.measured(self._elements) for twin in operands]
        given = [error.relative for error in errors if error is not None]
        largest = jnp.float32(0)
        for each in given:
            largest = jnp.maximum(largest, each)
        dtype = twins.dtype_it_runs_in(eqn)
        op = Op(
            of_the_user(source.join(place.path, *source.scopes(eqn))),
            params.op_of(eqn),
            source.source(eqn, place.source),
            dtype.name,
            float(jnp.finfo(dtype).eps) / 2,
            place.is_backward or source.is_transposed(eqn),
        )
        weighted = jnp.where(size > 0, largest * size, 0)
        self.note([op], Sums(*(jnp.atleast_1d(x) for x in (off, size, weighted))))

    def nothing(self, n: int) -> Sums:
        """Returns the sums of ops that did not run."""
        zeros = jnp.zeros(n, jnp.float32)
        return Sums(zeros, zeros, zeros)

    def add(self, one: Sums, other: Sums) -> Sums:
        """Returns the sums of two steps."""
        return Sums(*(a + b for a, b in zip(one, other, strict=True)))

    # --------------------------------------------------------------------- the values

    def constant(self, array: Any) -> Twin:
        """Returns a constant, which no rounding affects."""
        return Twin(array)

    def form(self, value: Twin) -> bool:
        """Returns whether a value has a twin."""
        return value.exact is not None

    def join(self, one: bool, other: bool) -> bool:
        """Returns whether a value has a twin that has one in some cases."""
        return one or other

    def array(self, value: Twin) -> Array:
        """Returns the array on the first lane."""
        return value.low

    def arrays(self, values: Sequence[Twin], forms: Sequence[bool]) -> list[Array]:
        """Returns the arrays of the first lane, then the twins."""
        full = [value.full for value in itertools.compress(values, forms)]
        return [*(value.low for value in values), *full]

    def values(self, arrays: Sequence[Array], forms: Sequence[bool]) -> list[Twin]:
        """Returns values of the arrays of the first lane, followed by the twins."""
        exact = iter(arrays[len(forms) :])
        return [
            Twin(low, next(exact) if has_twin else None)
            for low, has_twin in zip(arrays, forms, strict=False)
        ]

    def types(self, avals: Sequence[Aval], forms: Sequence[bool]) -> list[Aval]:
        """Returns the types of the first lane, then those of the twins."""
        wide = [
            structure.retyped(aval, jnp.float32)
            if twins.is_narrow(aval.dtype)
            else aval
            for aval in itertools.compress(avals, forms)
        ]
        return [*avals, *wide]

    def specs(self, specs: Sequence[Any], forms: Sequence[bool]) -> list[Any]:
        """Returns the specs of the first lane, then those of the twins."""
        return [*specs, *itertools.compress(specs, forms)]
