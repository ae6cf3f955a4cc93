"""Runs a function in mixed precision and in float32, equation by equation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp_lite.autocasting.binding import Casts
from jmp_lite.autocasting.rules.match import of_the_user
from jmp_lite.insight.counting import CountingEvaluator
from jmp_lite.insight.statistics import sample
from jmp_lite.insight.tables import Place
from jmp_lite.jaxprs import bilinear, params, primitives, products, structure
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn
from jmp_lite.ops import EDITABLE, EXACT, KEEPING_ERRORS


class StagedCasts(Casts):
    """Casts constants inside the program, where each lane has its own."""

    def cast(self, array: Array, saturates: bool = False) -> Array:
        """Returns an array in the compute dtype."""
        if not structure.is_tracer(array):
            array = lax.optimization_barrier(structure.as_array(array))
        return super().cast(array, saturates)


class TwinError(NamedTuple):
    """The error of an array against float32.

    Attributes:
      off: the sum of absolute errors; for integers, the number of elements that differ.
      size: the sum of absolute float32 values; for integers, the number of elements.
    """

    off: Array | np.float32
    size: Array | np.float32

    @property
    def relative(self) -> Array:
        """The relative error; infinite if all float32 values are zero."""
        of_zeros = jnp.where(self.off > 0, jnp.inf, 0.0)
        unit = jnp.where(self.size > 0, self.size, 1)
        return jnp.where(self.size > 0, self.off / unit, of_zeros)


NO_ERROR = TwinError(np.float32(0), np.float32(1))


@dataclasses.dataclass(eq=False, slots=True)
class Twin:
    """A value on both lanes.

    Attributes:
      low: the value in its own precision.
      exact: the value in float32; None if no rounding affects it.
      error: their difference, once it is computed.
    """

    low: Array
    exact: Array | None = None
    error: TwinError | None = None

    @property
    def full(self) -> Array:
        """The value on the lane of float32."""
        return upcast(self.low) if self.exact is None else self.exact

    def measured(self, elements: int) -> TwinError | None:
        """Returns the error; None if there is no twin, or the dtype is not numeric.

        Args:
          elements: the largest number of elements to compare.
        """
        is_numeric = isinstance(structure.as_array(self.low).dtype, np.dtype)
        if self.error is None and self.exact is not None and is_numeric:
            self.error = error(*(sample(x, elements) for x in (self.low, self.exact)))
        return self.error


def is_narrow(dtype: Dtype) -> bool:
    """Whether a dtype is a float of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def upcast(array: Array) -> Array:
    """Casts floats of fewer than 32 bits to float32, and returns others unchanged."""
    array = structure.as_array(array)
    return array.astype(jnp.float32) if is_narrow(array.dtype) else array


def _running_dtype(eqn: Eqn) -> Dtype:
    """Returns the narrowest floating dtype that an equation reads or returns.

    For a product in a number format it is the dtype of the rounded operands.
    """
    if (dtype := bilinear.dtype_of(eqn)) is not None:
        return np.dtype(dtype)
    atoms = [*eqn.invars, *eqn.outvars]
    floats = [np.dtype(structure.dtype_of(a)) for a in atoms if structure.is_float(a)]
    return min(floats, key=lambda d: jnp.finfo(d).bits, default=np.dtype("float32"))


def _differs(eqn: Eqn, operands: Sequence[Twin]) -> bool:
    """Whether the result of an equation differs in float32."""
    if any(twin.exact is not None for twin in operands):
        return True
    if params.op_of(eqn) == "convert_element_type":
        (atom,), (var,) = eqn.invars, eqn.outvars
        if not is_narrow(structure.dtype_of(var)):
            return False
        if not structure.is_float(atom):
            return structure.dtype_of(atom) != np.bool_
        before, after = (jnp.finfo(structure.dtype_of(x)) for x in (atom, var))
        return after.nmant < before.nmant or after.nexp < before.nexp
    if params.op_of(eqn) in EXACT:
        return False
    return any(
        is_narrow(structure.dtype_of(a)) for a in eqn.outvars if structure.is_float(a)
    )


def _run_float32(eqn: Eqn, operands: Sequence[Twin]) -> list[Array]:
    """Returns the results of an equation on the lane of float32."""
    op, full = params.op_of(eqn), [twin.full for twin in operands]
    if (results := bilinear.unrounded(eqn, full)) is not None:
        return results
    dtypes = [structure.dtype_of(a) for a in (*eqn.invars, *eqn.outvars)]
    if op == "convert_element_type":
        array, dtype = full[0], dtypes[-1]
        if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
            array = lax.real(array)
        return [array.astype(np.float32 if is_narrow(dtype) else dtype)]
    if not any(map(is_narrow, dtypes)):
        return params.bind_in(eqn, full, None, _highest(eqn))
    if op == "reduce_precision":
        return full[:1]
    if op in params.SCATTERS:
        return [params.bind_scatter(eqn, full)]
    is_known = op in EDITABLE or primitives.is_of_this_library(op)
    if not is_known or any(params.inner_jaxprs(eqn)):
        # It accepts only the dtypes of its trace, so both lanes round alike.
        pairs = zip(full, eqn.invars, strict=True)
        given = [lax.convert_element_type(x, structure.dtype_of(a)) for x, a in pairs]
        return [upcast(x) for x in params.bind(eqn, given)]
    return params.bind_in(eqn, full, np.dtype("float32"), _highest(eqn))


def _highest(eqn: Eqn) -> lax.Precision | None:
    return None if products.product_params(eqn) is None else lax.Precision.HIGHEST


def error(low: Array, exact: Array) -> TwinError:
    """Returns the error of numbers against exact ones."""
    low = upcast(low)
    if not jnp.issubdtype(exact.dtype, jnp.inexact):
        differ = jnp.sum(low != exact, dtype=jnp.float32)
        return TwinError(differ, np.float32(low.size))
    is_equal = (low == exact) | (jnp.isnan(low) & jnp.isnan(exact))
    off = jnp.where(is_equal, 0, jnp.abs(low - exact))
    # The error is infinite if one lane is finite and the other is not.
    off = jnp.where(jnp.isnan(off), jnp.inf, off)
    size = jnp.where(jnp.isfinite(exact), jnp.abs(exact), 0)
    return TwinError(*(jnp.sum(x, dtype=jnp.float32) for x in (off, size)))


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


class Comparer(CountingEvaluator[Twin, ComparedOp]):
    """Runs jaxprs on two lanes. The form of a value is whether it has a twin.

    Args:
      elements: the largest number of elements of a result to compare.
    """

    def __init__(self, elements: int) -> None:
        super().__init__(Twin)
        self._elements = elements

    def inner(self) -> "Comparer":
        """Returns a comparer for a jaxpr inside."""
        return Comparer(self._elements)

    # ------------------------------------------------------------------ the equations

    def equation(
        self, eqn: Eqn, operands: Sequence[Twin], site: Place
    ) -> Sequence[Twin]:
        """Runs an equation on both lanes, and measures the error of its results."""
        low = params.bind(eqn, [twin.low for twin in operands])
        results = list(map(Twin, low))
        # An effect, such as a callback, must happen once.
        if _differs(eqn, operands) and params.has_only_axis_effects(eqn):
            results = list(map(Twin, low, _run_float32(eqn, operands)))
        # The rounding of a cast counts for the op that reads its result.
        if params.op_of(eqn) in _KEEPING:
            for result, operand in zip(results, operands, strict=False):
                result.error = operand.measured(self._elements) or NO_ERROR
        else:
            self._measure(eqn, operands, results, site)
        return results

    def _measure(
        self, eqn: Eqn, operands: Sequence[Twin], results: Sequence[Twin], site: Place
    ) -> None:
        made = self._errors(results)
        if not made:
            return
        off, size = map(sum, zip(*made, strict=True))
        # An operand that only carries a tangent consists of zeros on the low lane. Its
        # error is known only if an earlier op has passed it on.
        pairs = zip(operands, bilinear.are_tangents(eqn), strict=True)
        read = [one for one, is_tangent in pairs if one.error or not is_tangent]
        given = [error.relative for error in self._errors(read)]
        largest = functools.reduce(jnp.maximum, given, jnp.float32(0))
        dtype = _running_dtype(eqn)
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

    def form(self, value: Twin) -> bool:
        """Returns whether a value has a twin."""
        return value.exact is not None

    def unpack(self, value: Twin, form: bool) -> list[Array]:
        """Returns the array of the first lane, then the twin."""
        return [value.low, value.full] if form else [value.low]

    def second_type(self, aval: Aval) -> Aval:
        """Returns the type of a twin."""
        is_cast = is_narrow(aval.dtype)
        return structure.retyped(aval, jnp.float32) if is_cast else aval

    def second_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of a twin: that of the first lane."""
        return spec


_KEEPING = KEEPING_ERRORS | {bilinear.TANGENT_OF}


def _half_a_unit(dtype: Dtype) -> float:
    """Returns the relative error of rounding to a dtype, at most.

    For integers it is that of the largest number.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    unit = 1 / jnp.iinfo(dtype).max if is_integer else float(jnp.finfo(dtype).eps)
    return unit / 2
