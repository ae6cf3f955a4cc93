"""Reports on the numbers of pytrees: gradients, parameters, activations."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.explain.tables import text_table
from jmp_lite.autocasting.jaxprs.sharding import gathered
from jmp_lite.casting.dtypes import is_inexact, parse_dtype
from jmp_lite.casting.host import fetched
from jmp_lite.numerics.statistics import (
    Ends,
    Numbers,
    cells,
    counted,
    headers,
    numbers,
    on_host,
    sizes_of,
    stacked,
)


@dataclasses.dataclass(frozen=True)
class LeafNumerics(Numbers):
    """What there is to know of the numbers of one array.

    Attributes:
      path: where it is.
      dtype: its dtype.
    """

    path: str
    dtype: str


class Leaf(NamedTuple):
    """An array of which the numbers are counted.

    Attributes:
      path: where it is.
      dtype: its dtype.
      known: what there is to know of its numbers, if they were on the host.
    """

    path: str
    dtype: str
    known: Numbers | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts"],
    meta_fields=["leaves", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class NumericsReport:
    """The numbers of a pytree, leaf by leaf; a pytree itself, and prints as a table.

    Attributes:
      counts: by what is counted, an array of one number for each array of JAX.
      leaves: the arrays, those of NumPy with what is counted in them.
      dtype: what the shares are of; None for the dtype of each leaf.
    """

    counts: Mapping[str, Any]
    leaves: tuple[Leaf, ...]
    dtype: str | None

    @property
    def rows(self) -> tuple[LeafNumerics, ...]:
        """One for each leaf, on the host, over all that vmap or scan has stacked."""
        columns, traced = on_host(self.counts), itertools.count()
        return tuple(
            LeafNumerics(
                **vars(leaf.known or numbers(columns, next(traced))),
                path=leaf.path,
                dtype=leaf.dtype,
            )
            for leaf in self.leaves
        )

    def __str__(self) -> str:
        titles = ("elements", "dtype", *headers(self.dtype), "where")
        rows = [
            (f"{row.elements}", row.dtype, *cells(row), row.path) for row in self.rows
        ]
        return text_table(titles, [("", rows)], right=(0, 2, 3, 4, 5, 6, 7, 8))


def numerics_report(tree: Any, dtype: DTypeLike | None = None) -> NumericsReport:
    """Counts what is not finite in a pytree, and what another dtype would lose.

    Arrays of JAX are counted where they are. Most devices, CPUs among them, take a
    number below 1.2e-38 for zero: what they flush is a zero here too. NumPy flushes
    nothing.

    Inside of ``shard_map`` the arrays of all devices are counted, and ``out_specs`` of
    the report is ``P()``.

    Args:
      tree: gradients, activations, parameters, an optimizer's state: its floats are
        counted, of complex numbers the larger part.
      dtype: what they might be held in, such as ``"float16"``; None for what they are.
        Float8 products divide an array by a scale before they round it. A format of 8
        bits is therefore judged with scales: each array is divided by the scale for its
        largest finite number, so that none overflows. ``max_abs`` and ``min_abs`` are
        of the array itself. An array of that very format is judged as it is.

    Returns:
      A report. It is a pytree of arrays, so that a jitted function may return it;
      ``rows`` and ``print`` are for the host.

    Raises:
      ValueError: ``dtype`` is unknown, not floating, or has no infinity and no NaN.
      TypeError: a leaf is the shape of an array.

    Example:
      >>> import jax.numpy as jnp
      >>> grads = {"w": jnp.array([0.0, 1e-9, 1.0, 1e6]), "b": jnp.array([jnp.nan])}
      >>> b, w = numerics_report(grads, "float16").rows
      >>> b.nan, w.overflow, w.underflow, w.max_abs
      (1, 0.25, 0.25, 1000000.0)

      With the scale 4096, the largest number fits, and 1.0 vanishes too:

      >>> b, w = numerics_report(grads, "float8_e4m3fn").rows
      >>> w.overflow, w.underflow, w.max_abs
      (0.0, 0.5, 1000000.0)
    """
    wanted = None if dtype is None else dtype_that_overflows(dtype)
    counts: list[Mapping[str, Any]] = []
    leaves: list[Leaf] = []
    for path, array in _floats_in(tree):
        own = np.dtype(getattr(array, "dtype", type(array)))
        found, known = counted(array, wanted or own), None
        if isinstance(array, jax.Array):
            counts.append(found)
        else:
            known = numbers(on_host(found), 0)
        leaves.append(Leaf(path, own.name, known))
    name = None if wanted is None else wanted.name
    return NumericsReport(of_all_devices(counts), tuple(leaves), name)


def of_all_devices(counts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Stacks counts up; inside of ``shard_map`` those of all devices, the same on each.

    Otherwise ``out_specs=P()`` would show those of the first device.
    """
    return jax.tree.map(gathered, stacked(counts))


def _floats_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a pytree that hold floats, each with its path."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"Expected arrays, got {leaf}: there are no numbers in a shape."
            )
        if is_inexact(leaf):
            yield jax.tree_util.keystr(path), leaf


def dtype_that_overflows(dtype: DTypeLike) -> np.dtype[Any]:
    """Returns a dtype that has infinities, such as bfloat16; others are refused."""
    wanted = parse_dtype(dtype)
    if jnp.finfo(wanted).bits < 8:
        raise ValueError(
            f"{wanted.name} has neither infinities nor NaNs: what is too large for it "
            "becomes its largest number, and does not overflow."
        )
    return wanted


class NonfiniteReport(tuple[LeafNumerics, ...]):
    """The arrays of a pytree that hold a NaN or an infinity; prints as a list."""

    def __str__(self) -> str:
        """Returns a line for each, or says that there is none."""
        lines = [
            f"{row.path or 'the array'}: {row.nan} NaN, {row.inf} infinite "
            f"of {row.elements}"
            for row in self
        ]
        return "\n".join(lines) or "all finite"


def nonfinite_report(tree: Any) -> NonfiniteReport:
    """Finds the arrays of a pytree that are not finite throughout, on the host.

    Args:
      tree: any pytree of arrays.

    Returns:
      A row for each such array; empty, and so false, where all are finite.

    Example:
      >>> import jax.numpy as jnp
      >>> print(nonfinite_report({"w": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}))
      ['w']: 0 NaN, 1 infinite of 2
    """
    rows = numerics_report(tree).rows
    return NonfiniteReport(row for row in rows if row.nan or row.inf)


class SuggestedLossScale(NamedTuple):
    """A loss scale for some gradients.

    Attributes:
      loss_scale: a power of two.
      lost: which share of the gradients that are not zero vanishes without it.
      rescued: which share of those that vanish does not with it.
    """

    loss_scale: float
    lost: float
    rescued: float


def suggest_loss_scale(
    grads: Any, dtype: DTypeLike = "float16", headroom: float = 16.0
) -> SuggestedLossScale:
    """Returns the largest power of two that leaves gradients finite, with headroom.

    Not more than 2**24, above which a loss overflows by itself. It fits the gradients
    that it is given; those of another moment of training may be a thousand times
    larger. A ``DynamicLossScale`` follows them: take this for its start.

    Args:
      grads: unscaled gradients, concrete.
      dtype: what the backward pass computes in. A format of 8 bits is judged as it is,
        without a scale for each array. Float8 products have such scales, and need no
        loss scale.
      headroom: how many times larger than the largest of them a number may get, 1 or
        more.

    Raises:
      ValueError: no gradient is finite and not zero, ``dtype`` is unknown or has no
        infinity, or there is no headroom.
      TypeError: the gradients are being traced, or are shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> suggest_loss_scale({"w": jnp.array([1e-9, 1e-3])})
      SuggestedLossScale(loss_scale=2097152.0, lost=0.5, rescued=1.0)
    """
    if not 1 <= headroom < math.inf:
        raise ValueError(f"Expected a headroom of 1 or more, got {headroom!r}.")
    ends = Ends.of(dtype_that_overflows(dtype))
    arrays = fetched([array for _, array in _floats_in(grads)])
    found = np.concatenate([np.zeros(0), *(sizes_of(x).ravel() for x in arrays)])
    found = found[np.isfinite(found) & (found > 0)]
    if not found.size:
        raise ValueError("There is no gradient that is finite and not zero.")
    # The end of float64 is infinite in float64.
    exponent = min(math.log2(ends.overflow / headroom / float(found.max())), 24)
    scale = 2.0 ** math.floor(exponent)
    lost = found <= ends.underflow
    rescued = found[lost] * scale > ends.underflow
    share = float(rescued.mean()) if lost.any() else 1.0
    return SuggestedLossScale(scale, float(lost.mean()), share)
