"""Runs an op on two lanes: in its own precision, and in float32.

A value has a float32 twin if some rounding affects it. A value that no rounding affects
has no twin, and is computed once.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.insight.statistics import sample
from jmp_lite.jaxprs import bilinear, params, primitives, structure
from jmp_lite.jaxprs.types import Array, Dtype, Eqn
from jmp_lite.ops import EDITABLE, EXACT


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
        is_off = self.off > 0
        unit = jnp.where(self.size > 0, self.size, 1)
        return jnp.where(
            self.size > 0, self.off / unit, jnp.where(is_off, jnp.inf, 0.0)
        )


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
        if self.error is None and self.exact is not None and _has_numbers(self.low):
            self.error = error(*(sample(x, elements) for x in (self.low, self.exact)))
        return self.error


def is_narrow(dtype: Dtype) -> bool:
    """Whether a dtype is a float of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def upcast(array: Array) -> Array:
    """Casts floats of fewer than 32 bits to float32, and returns others unchanged."""
    array = structure.as_array(array)
    return array.astype(jnp.float32) if is_narrow(array.dtype) else array


def run_twice(eqn: Eqn, operands: Sequence[Twin]) -> list[Twin]:
    """Runs an equation on both lanes, without entering a jaxpr that it contains."""
    low = params.bind(eqn, [twin.low for twin in operands])
    if not _differs(eqn, operands) or not params.has_only_axis_effects(eqn):
        # An effect, such as a callback, must happen once.
        return list(map(Twin, low))
    exact = _run_float32(eqn, operands)
    return list(map(Twin, low, exact))


def running_dtype(eqn: Eqn) -> Dtype:
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
        return is_narrow(structure.dtype_of(eqn.outvars[0])) and not _is_exact_cast(eqn)
    if params.op_of(eqn) in EXACT:
        return False
    return any(
        is_narrow(structure.dtype_of(a)) for a in eqn.outvars if structure.is_float(a)
    )


def _is_exact_cast(eqn: Eqn) -> bool:
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not structure.is_float(atom):
        return structure.dtype_of(atom) == np.bool_
    before, after = (jnp.finfo(structure.dtype_of(x)) for x in (atom, var))
    return after.nmant >= before.nmant and after.nexp >= before.nexp


def _run_float32(eqn: Eqn, operands: Sequence[Twin]) -> list[Array]:
    """Returns the results of an equation on the lane of float32."""
    op, full = params.op_of(eqn), [twin.full for twin in operands]
    if (results := bilinear.unrounded(eqn, full)) is not None:
        return results
    dtypes = [structure.dtype_of(a) for a in (*eqn.invars, *eqn.outvars)]
    if op == "convert_element_type":
        return [_cast(full[0], dtypes[-1])]
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
    return None if params.product_params(eqn) is None else lax.Precision.HIGHEST


def _cast(array: Array, dtype: Dtype) -> Array:
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        array = lax.real(array)
    return array.astype(np.dtype("float32") if is_narrow(dtype) else dtype)


def _has_numbers(array: Array) -> bool:
    return isinstance(structure.as_array(array).dtype, np.dtype)


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
