"""Where numbers overflow, vanish or stop being finite.

The law of this file: numbers are counted where they are, those of JAX in the graph, in
which a function may return them; rows and tables are made of that on the host.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.compat import gathered
from jmp_lite.autocasting.door import check_function
from jmp_lite.autocasting.interpreter import trace
from jmp_lite.autocasting.rows import short
from jmp_lite.autocasting.tables import text_table
from jmp_lite.autocasting.watching import Op, Watcher
from jmp_lite.casting.counting import (
    Ends,
    Numbers,
    cells,
    counted,
    fetched,
    headers,
    numbers,
    on_host,
    sizes_of,
    stacked,
)
from jmp_lite.casting.dtypes import is_inexact, parse_dtype
from jmp_lite.casting.mutables import returning_changes, write_changes

# ---------------------------------------------------------------------- pytrees


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
    """
    wanted = None if dtype is None else _dtype_that_overflows(dtype)
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
    return NumericsReport(_of_all_devices(counts), tuple(leaves), name)


def _of_all_devices(counts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
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


def _dtype_that_overflows(dtype: DTypeLike) -> np.dtype[Any]:
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
      dtype: what the backward pass computes in.
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
    ends = Ends.of(_dtype_that_overflows(dtype))
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


# ------------------------------------------------------------------------ functions


@dataclasses.dataclass(frozen=True)
class OpNumerics(Numbers):
    """What there is to know of the results of one op, in all trips of all loops.

    Attributes:
      scope: the path that it stands in.
      op: the name of its primitive.
      source: where it stands in the code: file, line and function.
      is_first: whether something was not finite although all that it read was, in any
        trip.
    """

    scope: str
    op: str
    source: str
    is_first: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts"],
    meta_fields=["ops", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class WatchedNumerics:
    """The numbers of a function, op by op; a pytree, and prints as a table.

    Attributes:
      counts: by what is counted, an array of one number an op.
      ops: the ops, in the order in which they run.
      dtype: what the shares are of.
    """

    counts: Mapping[str, Any]
    ops: tuple[Op, ...]
    dtype: str

    @property
    def rows(self) -> tuple[OpNumerics, ...]:
        """One for each op, on the host, over all that vmap or scan has stacked.

        What was never run is left out.
        """
        columns = on_host(self.counts)
        return tuple(
            OpNumerics(
                **vars(numbers(columns, i)),
                **op._asdict(),
                is_first=bool(columns["is_first"][i]),
            )
            for i, op in enumerate(self.ops)
            if columns["elements"][i]
        )

    def __str__(self) -> str:
        titles = ("elements", "op", *headers(self.dtype), "scope", "where")
        rows = [
            (f"{r.elements}", r.op, *cells(r), r.scope, short(r.source))
            for r in self.rows
        ]
        return text_table(titles, [("", rows)], right=(0, 2, 3, 4, 5, 6, 7, 8))


Params = ParamSpec("Params")
Result = TypeVar("Result")


def watch(
    fun: Callable[Params, Result], dtype: DTypeLike = "float16"
) -> Callable[Params, tuple[Result, WatchedNumerics]]:
    """Returns ``fun`` with the numbers of all its ops beside its results.

    They are counted in the graph: under ``jit``, in loops, on any device. A function
    that is not watched costs nothing; one that is computes as before, and counts, for
    which a compiler takes several times as long. ``watch(grad(fun))`` sees the backward
    pass too. Inside of ``shard_map`` the numbers of all devices are counted, and
    ``out_specs`` of the stats is ``P()``.

    Args:
      fun: any function of pytrees that JAX can trace. What is under ``shard_map``, in
        a kernel, or in a custom derivative rule's function that has effects is seen
        from outside; so is a ``while`` under ``vmap`` whose lanes end by themselves
        (``vmap`` the watched function instead).
      dtype: what the numbers might be held in.

    Returns:
      A function that returns ``(fun(...), stats)``.

    Raises:
      ValueError: ``dtype`` is unknown, not floating, or has no infinity and no NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> _, stats = watch(lambda x: jnp.log(jnp.exp(x) - 1))(jnp.array([0.0, 100.0]))
      >>> first = first_nonfinite(stats)
      >>> first.op, first.inf
      ('exp', 1)
    """
    check_function(fun)
    wanted = _dtype_that_overflows(dtype)

    @functools.wraps(fun)
    def watched(*args: Any, **kwargs: Any) -> tuple[Any, WatchedNumerics]:
        traced, arrays, treedef = trace(returning_changes(fun), args, kwargs)
        watcher = Watcher(wanted)
        results = watcher.run(traced, arrays, "")
        stats = WatchedNumerics(
            _of_all_devices(watcher.counts), tuple(watcher.ops), wanted.name
        )
        out, changes = jax.tree.unflatten(treedef, results)
        write_changes(args, kwargs, changes)
        return out, stats

    return watched


def first_nonfinite(stats: WatchedNumerics) -> OpNumerics | None:
    """Returns the first op that made something infinite or NaN of finite numbers.

    The first as the program is written: of two ops in one loop it is the upper one,
    even if the lower one broke in an earlier trip.

    Args:
      stats: what a watched function has returned, concrete.

    Returns:
      The op; None where all is finite, or was not from the start.

    Raises:
      TypeError: ``stats`` is something else, or is being traced.
    """
    if not isinstance(stats, WatchedNumerics):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "Expected the second result of a watched function, got "
            f"{type(stats).__name__}."
        )
    return next((row for row in stats.rows if row.is_first), None)
