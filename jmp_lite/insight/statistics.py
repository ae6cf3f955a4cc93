"""Counts numbers that overflow, vanish or are not finite, and samples arrays."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_lite.casting.quantize import scale_for
from jmp_lite.casting.types import Tree
from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.types import Array, Dtype, PyTree


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Counts and shares of some numbers.

    Attributes:
      elements: the number of elements.
      nan: the number of NaNs.
      inf: the number of infinities.
      max_abs: the largest finite absolute value.
      min_abs: the smallest absolute value above zero; infinity if all numbers are zero.
      overflow: the share of finite numbers that would overflow in the dtype.
      underflow: the share of nonzero numbers that would become zero.
      subnormal: the share of numbers that would become subnormal and lose digits.
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
    """The ends of the range of a dtype, for absolute values.

    Attributes:
      overflow: at this value and above, a number becomes infinite or NaN.
      underflow: at this value and below, a number becomes zero.
      normal: at this value and above, a number keeps all its digits.
    """

    overflow: float
    underflow: float
    normal: float

    @classmethod
    def compute(cls, dtype: DTypeLike) -> "Ends":
        """Returns the ends of a dtype under rounding to nearest."""
        info = jnp.finfo(dtype)
        largest, smallest = float(info.max), float(info.smallest_subnormal)
        spacing = 2.0 ** (math.floor(math.log2(largest)) - info.nmant)
        normal = float(info.tiny) - smallest / 2
        return cls(largest + spacing / 2, smallest / 2, normal)


class Count(NamedTuple):
    """A whole number below 2**64 in two halves: JAX has no 64-bit integers by default.

    Attributes:
      low: the low 32 bits.
      high: the high 32 bits.
    """

    low: Array | np.ndarray | np.uint32
    high: Array | np.ndarray | np.uint32

    @classmethod
    def split(cls, number: int) -> "Count":
        """Returns a Python integer as a count."""
        return cls(np.uint32(number % 2**32), np.uint32(number // 2**32))


Counts: TypeAlias = dict[str, PyTree]
"""Counts by name: each a ``Count``, or an array of sizes or flags; see ``_JOINS``."""


def is_scaled(dtype: DTypeLike) -> bool:
    """Whether arrays are divided by a scale before they are cast to a dtype."""
    return jnp.finfo(dtype).bits == 8


_SHARES = ("overflow", "underflow", "subnormal")

_COUNT_NAMES = ("nan", "inf", *_SHARES, "elements")

# Columns that are not counts: how to join them, and their value for no elements.
_JOINS = {
    "max_abs": ("maximum", 0.0),
    "min_abs": ("minimum", math.inf),
    "is_first": ("logical_or", False),  # Of an op alone.
}


def sizes_of(array: Any) -> Array | np.ndarray:
    """Returns absolute values; for a complex number, that of its larger part.

    They have at least 32 bits in the graph, and 64 on the host.
    """
    xp = jnp if isinstance(array, jax.Array) else np
    array = xp.asarray(array)
    is_narrow = jnp.finfo(array.dtype).bits < 32
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    parts = (array.real, array.imag) if is_complex else (array,)
    wide = np.float64 if xp is np else np.float32 if is_narrow else parts[0].dtype
    return functools.reduce(xp.maximum, [xp.abs(part.astype(wide)) for part in parts])


def counted(array: ArrayLike, dtype: DTypeLike) -> Counts:
    """Returns the counts of some numbers.

    JAX arrays are counted in the graph, NumPy arrays and Python numbers on the host.

    For an 8-bit format the numbers are first divided by a scale, as for float8
    products: that of the largest finite number. An array that already has this format
    is not divided again.
    """
    sizes = sizes_of(array)
    parts = [sizes]
    if isinstance(array, jax.Array) and sizes.size >= 2**32:  # A sum has 32 bits.
        n = -(-sizes.size // 2**31)
        parts = jnp.array_split(sizes, n, int(np.argmax(sizes.shape)))
    ends = _ends_for(sizes, dtype, _has_scale(array, dtype), range(sizes.ndim))
    counts = [_reduce_counts(_classify(part, ends), range(part.ndim)) for part in parts]
    return {**functools.reduce(added, counts), "elements": Count.split(sizes.size)}


def check_elements(elements: int) -> None:
    """Raises a ValueError if ``elements`` is not a whole number of at least 1."""
    is_whole = isinstance(elements, int | np.integer) and not isinstance(elements, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or elements < 1:
        raise ValueError(
            f"Expected a whole number of at least 1 for elements, got {elements!r}."
        )


def sample(array: Array, elements: int) -> Array:
    """Returns at most so many elements of an array, evenly spaced.

    Rows of the last axis stay whole if they fit: memory is read in rows. An array that
    is sharded over Explicit axes is returned whole.
    """
    array = structure.as_array(array)
    if sharding.is_sharded(array):  # Its parts are on several devices.
        return array
    sizes, strides = list(array.shape), [1] * array.ndim
    while math.prod(sizes) > elements:
        rows = sizes[:-1] if max(sizes[:-1], default=1) > 1 else sizes
        axis = rows.index(max(rows))
        strides[axis] *= 2
        sizes[axis] = -(-array.shape[axis] // strides[axis])
    return lax.slice(array, [0] * array.ndim, array.shape, strides)


_SMALL_SIZE = 2**18
"""Reading an array of at most so many elements takes less time than a kernel launch."""


def counted_together(arrays: Sequence[Array], dtype: DTypeLike) -> list[Counts]:
    """Returns the counts of each of several arrays.

    Small arrays of similar sizes are counted in one kernel, as the rows of one array.
    """
    groups: dict[int | tuple[object, ...], list[int]] = {}
    for i, array in enumerate(arrays):
        is_alone = array.size > _SMALL_SIZE or sharding.is_sharded(array)
        likeness = (
            jnp.finfo(array.dtype).bits > 32,
            *(_has_scale(array, dtype), (array.size - 1).bit_length() // 2),
            sharding.mapped_axes_of(array),
        )
        groups.setdefault(i if is_alone else likeness, []).append(i)
    counts = dict[int, Counts]()
    for group in groups.values():
        if len(group) == 1:
            counts[group[0]] = counted(arrays[group[0]], dtype)
            continue
        # As rows of one array, with zeros at the end, which do not count.
        most = max(arrays[i].size for i in group)
        rows = [jnp.ravel(sizes_of(arrays[i])) for i in group]
        sizes = jnp.stack([jnp.pad(row, (0, most - row.size)) for row in rows])
        ends = _ends_for(sizes, dtype, _has_scale(arrays[group[0]], dtype), [1])
        columns = _reduce_counts(_classify(sizes, ends), [1])
        for at, i in enumerate(group):
            found = jax.tree.map(lambda column, at=at: column[at], columns)
            counts[i] = {**found, "elements": Count.split(arrays[i].size)}
    return [counts[i] for i in range(len(arrays))]


def _has_scale(array: ArrayLike, dtype: DTypeLike) -> bool:
    """Whether the numbers of an array are divided by a scale."""
    given = np.dtype(getattr(array, "dtype", float))
    return is_scaled(dtype) and np.dtype(dtype) != given


def _ends_for(
    sizes: Array | np.ndarray, dtype: DTypeLike, has_scale: bool, axes: Sequence[int]
) -> np.ndarray | list[Array | np.ndarray]:
    """Returns the ends of a dtype, times the scale of the numbers along some axes."""
    with np.errstate(over="ignore"):  # An end may be infinite in float32.
        ends = np.asarray(Ends.compute(dtype)).astype(sizes.dtype)
    if not has_scale:
        return ends
    xp = jnp if isinstance(sizes, jax.Array) else np
    finite = xp.where(xp.isfinite(sizes), sizes, 0)
    largest = xp.max(finite, axis=tuple(axes), keepdims=True, initial=0)
    # A float64 beyond float32 overflows under the largest scale.
    largest = xp.minimum(largest, float(jnp.finfo(jnp.float32).max))
    if isinstance(largest, jax.Array):
        scale = scale_for(largest, dtype)
    else:
        with jax.ensure_compile_time_eval():  # Under jit it would be traced.
            scale = np.asarray(scale_for(jnp.float32(largest), dtype))
    return [end * scale.astype(sizes.dtype) for end in ends]


def _classify(
    sizes: Array | np.ndarray, ends: np.ndarray | Sequence[Array | np.ndarray]
) -> dict[str, Array | np.ndarray]:
    """Returns a flag of each element for each count, and the absolute values.

    In the graph the numbers are compared, and returned, as their bits, which are in the
    same order: compared as floats, subnormal numbers may be zeros.
    """
    xp = jnp if isinstance(sizes, jax.Array) else np
    # By the floats: where the bits decide these, too, XLA fuses less.
    is_finite, is_nan = xp.isfinite(sizes), xp.isnan(sizes)
    infinity = np.asarray(np.inf, sizes.dtype)
    if xp is jnp:
        sizes, infinity, *ends = map(_bits, (sizes, infinity, *ends))
    overflow, underflow, normal = ends
    is_zero = sizes == 0
    return {
        "nan": is_nan,
        "inf": sizes == infinity,
        "overflow": (sizes < infinity) & (sizes >= overflow),
        "underflow": ~is_zero & (sizes <= underflow),
        "subnormal": (sizes > underflow) & (sizes < normal),
        "max_abs": xp.where(is_finite, sizes, 0),
        "min_abs": xp.where(is_finite & ~is_zero, sizes, infinity),
    }


def _bits(sizes: Array | np.ndarray | np.floating[Any]) -> Array | np.ndarray:
    unsigned = np.dtype(f"uint{8 * sizes.dtype.itemsize}")
    if isinstance(sizes, jax.Array):
        return lax.bitcast_convert_type(sizes, unsigned)
    return np.asarray(sizes).view(unsigned)


def _reduce_counts(each: Mapping[str, Any], axes: Sequence[int]) -> Counts:
    """Returns the counts, the largest and the smallest value along some axes."""
    *counted_names, largest, smallest = each
    if not isinstance(each[largest], jax.Array):
        return {
            **{n: Count.split(int(np.count_nonzero(each[n]))) for n in counted_names},
            largest: np.max(each[largest], initial=0).astype(np.float64),
            smallest: np.min(each[smallest], initial=np.inf).astype(np.float64),
        }
    # One reduction of several arrays is one kernel; XLA compiles several reductions to
    # several kernels. The initial values are hidden behind a barrier: XLA would spend
    # minutes on folding the reductions of constants.
    zero, start = lax.optimization_barrier((np.uint32(0), each[largest].dtype.type(0)))
    operands = [each[name].astype(np.uint32) for name in counted_names]
    operands += [each[largest], each[smallest]]  # Their bits.
    dtype = np.dtype(f"float{8 * start.dtype.itemsize}")
    infinity = start + _bits(np.asarray(np.inf, dtype))
    starts = [zero] * len(counted_names) + [start, infinity]
    varying = sharding.mapped_axes_of(each[largest])
    starts = [sharding.as_varying(x, varying) for x in starts]

    def join(some: Sequence[Array], others: Sequence[Array]) -> tuple[Array, ...]:
        *sums, _, _ = (a + b for a, b in zip(some, others, strict=True))
        ends = lax.max(some[-2], others[-2]), lax.min(some[-1], others[-1])
        return (*sums, *ends)

    *sums, most, least = lax.reduce(tuple(operands), tuple(starts), join, axes)
    return {
        **{
            name: Count(x, jnp.zeros_like(x))
            for name, x in zip(counted_names, sums, strict=True)
        },
        largest: lax.bitcast_convert_type(most, dtype).astype(_widest()),
        smallest: lax.bitcast_convert_type(least, dtype).astype(_widest()),
    }


def _widest() -> Dtype:
    return jax.dtypes.canonicalize_dtype(np.float64)


def added(a: Counts, b: Counts) -> Counts:
    """Returns the sum of the counts of two arrays or two steps."""
    joined: Counts = {}
    for name, one in a.items():
        if name in _JOINS:
            joined[name] = getattr(jnp, _JOINS[name][0])(one, b[name])
            continue
        low = one.low + b[name].low  # It wraps around.
        is_over = (low < one.low).astype(np.uint32)
        joined[name] = Count(low, one.high + b[name].high + is_over)
    return joined


def are_finite(counts: Counts) -> Array:
    """Whether all counted numbers are finite."""
    halves = [half for name in ("nan", "inf") for half in counts[name]]
    return functools.reduce(jnp.bitwise_or, halves) == 0


def nothing(n: int) -> Counts:
    """Returns the counts of ops that did not run yet."""
    none, sizes = jnp.zeros(n, jnp.uint32), jnp.zeros(n, _widest())
    return {
        **{name: Count(none, none) for name in _COUNT_NAMES},
        "max_abs": sizes,
        "min_abs": jnp.full_like(sizes, jnp.inf),
        "is_first": jnp.zeros(n, bool),
    }


def stacked(sums: Sequence[Tree]) -> Tree:
    """Returns the counts or sums of several ops, each column in one array."""

    def stack(*arrays: Array) -> Array:
        return jnp.concatenate([jnp.ravel(array) for array in arrays])

    return jax.tree.map(stack, *sums)


def fetched(tree: PyTree) -> PyTree:
    """Returns a pytree of JAX arrays as NumPy arrays on the host.

    Raises:
      TypeError: an array is a tracer.
    """
    try:
        return jax.tree.map(np.asarray, jax.device_get(tree))
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            "Expected concrete arrays, got tracers (of jit, vmap, scan or grad). "
            "Rows, tables, rules and loss scales are made on the host: return the "
            "arrays or the report from the traced function, and make this call "
            "outside of it."
        ) from error


def fetch_counts(counts: Mapping[str, PyTree]) -> dict[str, np.ndarray]:
    """Returns counts as NumPy arrays, joined over the axes of vmap and scan."""
    found: dict[str, np.ndarray] = {}
    for name, column in fetched(counts).items():
        join, start = _JOINS.get(name, ("add", 0))
        if isinstance(column, Count):
            column = column.low + (column.high.astype(np.uint64) << np.uint64(32))
        column = np.atleast_1d(column)
        stacks = tuple(range(column.ndim - 1))
        found[name] = getattr(np, join).reduce(column, axis=stacks, initial=start)
    return found


def numbers(columns: Mapping[str, np.ndarray], i: int) -> Numbers:
    """Returns the counts and shares of one array or one op."""
    names = (field.name for field in dataclasses.fields(Numbers))
    row = {name: columns[name][i].item() for name in names}
    row.update({name: row[name] / max(row["elements"], 1) for name in _SHARES})
    return Numbers(**row)


def headers(dtype: str | None) -> Sequence[str]:
    """Returns the titles of the columns that ``cells`` fills."""
    suffix = f" in {dtype}" if dtype else ""
    suffix += ", scaled" if dtype and is_scaled(dtype) else ""
    ends = [f"{name}{suffix}" for name in _SHARES]
    return ("nan", "inf", "max |x|", "min |x|", *ends)


def cells(row: Numbers) -> Sequence[str]:
    """Returns the cells of a row as text; zero counts and shares are empty."""
    smallest = "" if math.isinf(row.min_abs) else f"{row.min_abs:.2g}"
    shares = [getattr(row, name) for name in _SHARES]
    sizes = (f"{row.max_abs:.2g}", smallest)
    ends = [f"{share:.1%}" if share else "" for share in shares]
    return (f"{row.nan or ''}", f"{row.inf or ''}", *sizes, *ends)
