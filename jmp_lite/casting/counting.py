"""How large the numbers of an array are, counted.

The law of this file: numbers are counted by their own size, never by a cast, which a
compiler may leave out. What is counted can be added up over arrays and over steps.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What there is to know of some numbers.

    Attributes:
      elements: how many there are.
      nan: how many are NaN.
      inf: how many are infinite.
      max_abs: the largest finite size.
      min_abs: the smallest size that is not zero; infinite where there is none.
      overflow: which share is finite and would not be in the dtype asked for.
      underflow: which share is not zero and would be.
      subnormal: which share would lose digits, being too small.
    """

    elements: int
    nan: int
    inf: int
    max_abs: float
    min_abs: float
    overflow: float
    underflow: float
    subnormal: float


class Ends(NamedTuple):
    """Where a dtype ends: what is beyond is rounded to something else.

    Attributes:
      overflow: from this size on a number becomes infinite, or NaN.
      underflow: up to this size a number becomes zero.
      normal: from this size on a number keeps all its digits.
    """

    overflow: float
    underflow: float
    normal: float

    @classmethod
    def of(cls, dtype: DTypeLike) -> "Ends":
        """Returns the ends of a dtype, to the nearest of whose numbers one rounds."""
        info = jnp.finfo(dtype)
        largest, smallest = float(info.max), float(info.smallest_subnormal)
        spacing = 2.0 ** (math.floor(math.log2(largest)) - info.nmant)
        normal = float(info.tiny) - smallest / 2
        return cls(largest + spacing / 2, smallest / 2, normal)


COUNTS = ("nan", "inf", "max_abs", "min_abs", "overflow", "underflow", "subnormal")
_NAMES = (*COUNTS, "is_first", "elements")  # Of an op, too.


def counted(array: Any, dtype: DTypeLike) -> dict[str, Any]:
    """Returns what there is to know of an array's numbers, as float32 scalars."""
    wide = array.dtype if jnp.finfo(array.dtype).bits >= 32 else jnp.float32
    sizes = jnp.abs(jnp.asarray(array).astype(wide))
    is_finite, is_zero = jnp.isfinite(sizes), sizes == 0
    with np.errstate(over="ignore"):  # An end may be infinite in float32.
        overflow, underflow, normal = (
            np.asarray(end).astype(wide) for end in Ends.of(dtype)
        )

    def count(is_so: Any) -> Any:
        return jnp.sum(is_so, dtype=jnp.float32)

    largest = jnp.max(jnp.where(is_finite, sizes, 0), initial=0)
    smallest = jnp.min(jnp.where(is_finite & ~is_zero, sizes, jnp.inf), initial=jnp.inf)
    is_small = (sizes > underflow) & (sizes < normal)
    return {
        "nan": count(jnp.isnan(sizes)),
        "inf": count(jnp.isinf(sizes)),
        "max_abs": largest.astype(jnp.float32),
        "min_abs": smallest.astype(jnp.float32),
        "overflow": count(is_finite & (sizes >= overflow)),
        "underflow": count(~is_zero & (sizes <= underflow)),
        "subnormal": count(is_small),
    }


def added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the counts of two arrays, or of two steps."""
    return {name: _JOINS.get(name, jnp.add)(a[name], b[name]) for name in a}


_JOINS = {"max_abs": jnp.maximum, "min_abs": jnp.minimum, "is_first": jnp.maximum}


def nothing() -> dict[str, Any]:
    """Returns what is counted where there is nothing."""
    zeros = {name: jnp.float32(0) for name in _NAMES}
    return {**zeros, "min_abs": jnp.float32(jnp.inf)}


def stacked(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns counts by what is counted, one number for each that is given."""
    names = counts[0] if counts else _NAMES
    none = jnp.zeros(0, jnp.float32)
    return {
        name: jnp.stack([one[name] for one in counts]) if counts else none
        for name in names
    }


def on_host(counts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns counts as arrays of NumPy."""
    return {name: np.asarray(jax.device_get(array)) for name, array in counts.items()}


def numbers(columns: Mapping[str, Any], i: int, elements: int) -> dict[str, Any]:
    """Returns the fields of a row: whole numbers, sizes, and shares."""
    row: dict[str, Any] = {name: float(columns[name][i]) for name in COUNTS}
    row.update({name: int(row[name]) for name in ("nan", "inf")})
    shares = ("overflow", "underflow", "subnormal")
    row.update({name: row[name] / max(elements, 1) for name in shares})
    return {**row, "elements": elements}


def headers(dtype: str | None) -> Sequence[str]:
    """Returns the titles of the columns that ``cells`` fills."""
    told = f" in {dtype}" if dtype else ""
    ends = [f"{name}{told}" for name in ("overflow", "underflow", "subnormal")]
    return ("nan", "inf", "max |x|", "min |x|", *ends)


def cells(row: Any) -> Sequence[str]:
    """Returns what a row says of its numbers, as text; zeros are left out."""
    smallest = "" if math.isinf(row.min_abs) else f"{row.min_abs:.2g}"
    sizes = (f"{row.max_abs:.2g}", smallest)
    return (
        *(f"{row.nan or ''}", f"{row.inf or ''}", *sizes),
        *(
            f"{s:.1%}" if s else ""
            for s in (row.overflow, row.underflow, row.subnormal)
        ),
    )
