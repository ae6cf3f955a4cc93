"""Reports on the numbers of pytrees: gradients, parameters, activations."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmp_lite.casting.dtypes import is_inexact, parse_dtype, refuse_raw_bytes
from jmp_lite.insight import statistics
from jmp_lite.insight.tables import text_table
from jmp_lite.jaxprs.sharding import gathered
from jmp_lite.jaxprs.types import Dtype, PyTree


@dataclasses.dataclass(frozen=True)
class LeafNumerics(statistics.Numbers):
    """The numbers of one array.

    Attributes:
      path: the path of the array in the pytree.
      dtype: its dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> row, = jmp.numerics.numerics_report({"w": jnp.array([1.0, jnp.inf])}).rows
      >>> row.path, row.dtype, row.elements, row.inf
      ("['w']", 'float32', 2, 1)
    """

    path: str
    dtype: str


class CountedLeaf(NamedTuple):
    """An array whose numbers are counted.

    Attributes:
      path: its path in the pytree.
      dtype: its dtype.
      known: the counts, if the array was on the host.
    """

    path: str
    dtype: str
    known: statistics.Numbers | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NumericsReport:
    """The numbers of a pytree, leaf by leaf. It is a pytree, and prints as a table.

    Attributes:
      counts: for each statistic, an array with one number for each JAX array.
      leaves: the arrays. That of a NumPy array contains its counts.
      dtype: the dtype that the shares refer to; None means the dtype of each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> report = jmp.numerics.numerics_report({"w": jnp.array([1.0, 1e6])}, "float16")
      >>> report.rows[0].dtype, report.rows[0].overflow
      ('float32', 0.5)
    """

    counts: Mapping[str, PyTree]
    leaves: tuple[CountedLeaf, ...] = dataclasses.field(metadata={"static": True})
    dtype: str | None = dataclasses.field(metadata={"static": True})

    @property
    def rows(self) -> tuple[LeafNumerics, ...]:
        """One ``LeafNumerics`` for each leaf, on the host.

        A report that ``vmap`` or ``scan`` has stacked counts as one.
        """
        columns, traced = statistics.fetch_counts(self.counts), itertools.count()
        return tuple(
            LeafNumerics(
                **vars(leaf.known or statistics.numbers(columns, next(traced))),
                path=leaf.path,
                dtype=leaf.dtype,
            )
            for leaf in self.leaves
        )

    def __str__(self) -> str:
        titles = ("elements", "dtype", *statistics.headers(self.dtype), "where")
        rows = [
            (f"{r.elements}", r.dtype, *statistics.cells(r), r.path) for r in self.rows
        ]
        return text_table(titles, [("", rows)], right=(0, 2, 3, 4, 5, 6, 7, 8))


def numerics_report(tree: PyTree, dtype: DTypeLike | None = None) -> NumericsReport:
    """Counts non-finite numbers in a pytree, and numbers that another dtype would lose.

    JAX arrays are counted on their device. Most devices, CPUs included, treat a number
    below 1.2e-38 as zero, and so does this function. NumPy arrays are counted on the
    host without this flush to zero.

    Inside of ``shard_map`` the report counts the arrays of all devices; its
    ``out_specs`` is ``P()``.

    Args:
      tree: gradients, activations, parameters or an optimizer state. Floating-point
        arrays are counted; of a complex number, its larger part.
      dtype: a candidate dtype, such as ``"float16"``; None means the dtype of each
        array.

        An 8-bit format is judged with a scale for each array, because float8 products
        divide an array by a scale before they round it. The scale fits the largest
        finite number, so nothing overflows. ``max_abs`` and ``min_abs`` are those of
        the unscaled array. An array that already has this format is judged without a
        scale.

    Returns:
      A ``NumericsReport``. It is a pytree of arrays, so a jit-compiled function may
      return it. ``rows`` and ``print`` work on the host only.

    Raises:
      ValueError: ``dtype`` is unknown, not floating-point, or has neither infinity nor
        NaN.
      TypeError: a leaf is a ``ShapeDtypeStruct``, or bytes without a dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> grads = {"w": jnp.array([0.0, 1e-9, 1.0, 1e6]), "b": jnp.array([jnp.nan])}
      >>> b, w = jmp.numerics.numerics_report(grads, "float16").rows
      >>> b.nan, w.overflow, w.underflow, w.max_abs
      (1, 0.25, 0.25, 1000000.0)

      With the scale 4096 of float8, the largest number fits, and 1.0 becomes zero too:

      >>> b, w = jmp.numerics.numerics_report(grads, "float8_e4m3fn").rows
      >>> w.dtype, w.overflow, w.underflow, w.max_abs
      ('float32', 0.0, 0.5, 1000000.0)
    """
    target = None if dtype is None else dtype_that_overflows(dtype)
    counts: list[statistics.Counts] = []
    leaves: list[CountedLeaf] = []
    for path, array in _floats_in(tree):
        own = np.dtype(getattr(array, "dtype", type(array)))
        found, known = statistics.counted(array, target or own), None
        if isinstance(array, jax.Array):
            counts.append(found)
        else:
            known = statistics.numbers(statistics.fetch_counts(found), 0)
        leaves.append(CountedLeaf(path, own.name, known))
    name = None if target is None else target.name
    columns = statistics.stacked(counts or [statistics.nothing(0)])
    # Otherwise out_specs=P() would return the counts of the first device.
    of_all_devices = jax.tree.map(gathered, columns)
    return NumericsReport(of_all_devices, tuple(leaves), name)


def _floats_in(tree: PyTree) -> Iterator[tuple[str, ArrayLike]]:
    """Yields the floating-point arrays of a pytree, each with its path."""
    refuse_raw_bytes(tree)
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"Expected arrays, got {leaf}, which holds no numbers.")
        if is_inexact(leaf):
            yield jax.tree_util.keystr(path), leaf


def dtype_that_overflows(dtype: DTypeLike) -> Dtype:
    """Returns a dtype that has infinities or NaN; raises for other dtypes."""
    target = parse_dtype(dtype)
    if jnp.finfo(target).bits < 8:
        raise ValueError(
            f"{target.name} has neither infinities nor NaNs: a number that is too "
            "large becomes its largest number and does not overflow. Choose another "
            "dtype."
        )
    return target


class NonfiniteReport(tuple[LeafNumerics, ...]):
    """The arrays of a pytree with a NaN or an infinity; prints as a list."""

    def __str__(self) -> str:
        """Returns a line for each array, or "all finite"."""
        lines = [
            f"{row.path or 'the array'}: {row.nan} NaN, {row.inf} infinite "
            f"of {row.elements}"
            for row in self
        ]
        return "\n".join(lines) or "all finite"


def nonfinite_report(tree: PyTree) -> NonfiniteReport:
    """Finds the arrays of a pytree that contain a NaN or an infinity.

    Args:
      tree: a pytree of concrete arrays.

    Returns:
      A ``NonfiniteReport`` with a row for each such array. If all numbers are finite,
      it is empty and false.

    Raises:
      TypeError: a leaf is a tracer or a ``ShapeDtypeStruct``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> tree = {"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}
      >>> report = jmp.numerics.nonfinite_report(tree)
      >>> print(report)
      ['w']: 0 NaN, 1 infinite of 2
      >>> report[0].dtype
      'float32'
    """
    rows = numerics_report(tree).rows
    return NonfiniteReport(row for row in rows if row.nan or row.inf)


class SuggestedLossScale(NamedTuple):
    """A loss scale for some gradients.

    Attributes:
      loss_scale: the scale, a power of two.
      lost: the share of nonzero gradients that become zero without it.
      rescued: the share of these that do not become zero with it.
    """

    loss_scale: float
    lost: float
    rescued: float


def suggest_loss_scale(
    grads: PyTree, dtype: DTypeLike = "float16", headroom: float = 16.0
) -> SuggestedLossScale:
    """Returns the largest power of two that keeps gradients finite, with headroom.

    The result is at most 2**24; above it, the scaled loss itself overflows. It fits the
    given gradients only: those of another training step may be a thousand times larger.
    A ``DynamicLossScale`` follows them. Use this scale as its start.

    Args:
      grads: unscaled gradients, concrete arrays.
      dtype: the dtype of the backward pass. An 8-bit format is judged without a scale
        for each array. (Float8 products have such scales, and need no loss scale.)
      headroom: how many times larger a number may become, 1 or more.

    Returns:
      A ``SuggestedLossScale``.

    Raises:
      ValueError: no gradient is finite and nonzero, ``dtype`` is unknown or has no
        infinity, or ``headroom`` is below 1.
      TypeError: a gradient is a tracer or a ``ShapeDtypeStruct``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> grads = {"w": jnp.array([1e-9, 1e-3], jnp.float32)}
      >>> jmp.numerics.suggest_loss_scale(grads, "float16")
      SuggestedLossScale(loss_scale=2097152.0, lost=0.5, rescued=1.0)
    """
    if not 1 <= headroom < math.inf:
        raise ValueError(
            f"Expected a number of at least 1 for headroom, got {headroom!r}."
        )
    ends = statistics.Ends.compute(dtype_that_overflows(dtype))
    arrays = statistics.fetched([array for _, array in _floats_in(grads)])
    sizes = [statistics.sizes_of(array).ravel() for array in arrays]
    found = np.concatenate([np.zeros(0), *sizes])
    found = found[np.isfinite(found) & (found > 0)]
    if not found.size:
        raise ValueError("Expected a gradient that is finite and nonzero, got none.")
    # The overflow limit of float64 is infinite in float64.
    exponent = min(math.log2(ends.overflow / headroom / float(found.max())), 24)
    scale = 2.0 ** math.floor(exponent)
    lost = found <= ends.underflow
    rescued = found[lost] * scale > ends.underflow
    share = float(rescued.mean()) if lost.any() else 1.0
    return SuggestedLossScale(scale, float(lost.mean()), share)
