"""``watch``: counts the numbers that each op of a function makes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.insight import statistics
from jmp_lite.insight.report import dtype_that_overflows
from jmp_lite.insight.tables import Uncalled, short, text_table
from jmp_lite.insight.watcher import FlaggedValue, Slot, Source, WatchedOp, Watcher
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.sharding import gathered
from jmp_lite.jaxprs.trace import trace_function
from jmp_lite.jaxprs.types import PyTree
from jmp_lite.mutables import check_function, returning_changes, write_changes


@dataclasses.dataclass(frozen=True)
class OpNumerics(statistics.Numbers):
    """The numbers that one op made, in all trips of all loops.

    Attributes:
      scope: the path of its scopes.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      is_first: whether, in any trip, its result was not finite although its operands
        were.
    """

    scope: str
    op: str
    source: str
    is_first: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedNumerics:
    """The numbers that each op of a function made; a pytree that prints as a table.

    Attributes:
      counts: arrays with one element for each op, by the name of the count.
      ops: the ops, in the order in which they run.
      dtype: the dtype that the shares are given for.
      results: the sources of the function's results: numbers of ops, or slots.
      slots: the sources of the inputs of loops and branches.
    """

    counts: Mapping[str, PyTree]
    ops: tuple[WatchedOp, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    results: tuple[Source, ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )
    slots: tuple[tuple[Slot, tuple[Source, ...]], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )

    @property
    def rows(self) -> tuple[OpNumerics, ...]:
        """A row for each op, on the host, summed over the axes of vmap and scan.

        Ops that never ran have no row.
        """
        return tuple(row for _, row in _rows_by_op(self))

    def __str__(self) -> str:
        titles = ("elements", "op", *statistics.headers(self.dtype), "scope", "where")
        rows = [
            (f"{r.elements}", r.op, *statistics.cells(r), r.scope, short(r.source))
            for r in self.rows
        ]
        return text_table(titles, [("", rows)], right=(0, 2, 3, 4, 5, 6, 7, 8))


def _rows_by_op(stats: WatchedNumerics) -> Iterator[tuple[WatchedOp, OpNumerics]]:
    """Yields each op that ran, with its row."""
    columns = statistics.fetch_counts(stats.counts)
    for i, op in enumerate(stats.ops):
        if columns["elements"][i]:
            found: dict[str, Any] = dict(vars(statistics.numbers(columns, i)))
            found.update(scope=op.scope, op=op.op, source=op.source)
            yield op, OpNumerics(**found, is_first=bool(columns["is_first"][i]))


Args = ParamSpec("Args")

Result = TypeVar("Result")


def watch(
    fun: Callable[Args, Result],
    dtype: DTypeLike = "float16",
    elements: int | None = None,
) -> Callable[Args, tuple[Result, WatchedNumerics]]:
    """Returns a function that also counts the numbers which each op of ``fun`` makes.

    The program itself counts: under ``jit``, in loops, on any device. The results of
    ``fun`` do not change. ``watch(grad(fun))`` counts the backward pass too. Inside of
    ``shard_map`` the numbers of all devices are counted, and ``out_specs`` of the
    statistics is ``P()``.

    To look for a NaN, count all numbers, which is the default. To watch a training run
    on a GPU, count a sample (``elements=65_536``), which moves few bytes. On a TPU a
    sample moves more bytes than all numbers.

    Args:
      fun: any function of pytrees that JAX can trace. Kernels, and functions with
        effects under a custom derivative rule, are watched by their results. So is a
        ``while`` under ``vmap`` whose lanes end at different steps (``vmap`` the
        watched function instead).
      dtype: the format that shares are given for: of overflow, underflow and
        subnormal numbers. An 8-bit format is judged with scales, as in
        ``numerics_report``: each result of an op is divided by its own scale, at each
        call.
      elements: the largest number of elements to count of one result. A larger result
        is represented by so many of its elements, evenly spaced; a NaN elsewhere is
        not seen. All elements are counted by default.

    Returns:
      A function that returns ``(fun(...), stats)``, with ``stats`` a pytree of arrays
      that prints as a table.

    Raises:
      ValueError: ``dtype`` is unknown, not floating, or has no infinity and no NaN, or
        ``elements`` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> x = jnp.array([0.0, 100.0])
      >>> _, stats = jmp.watch(lambda x: jnp.log(jnp.exp(x) - 1))(x)
      >>> first = jmp.first_nonfinite(stats)
      >>> first.op, first.inf
      ('exp', 1)
      >>> x = jnp.array([1e-9, 1e6])
      >>> _, stats = jmp.watch(jnp.negative, "float8_e4m3fn")(x)
      >>> [(row.op, row.overflow, row.underflow) for row in stats.rows]
      [('neg', 0.0, 0.5)]
    """
    check_function(fun)
    target = dtype_that_overflows(dtype)
    if elements is not None:
        statistics.check_elements(elements)

    def watched(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Result, WatchedNumerics]:
        traced = trace_function(returning_changes(fun), args, kwargs)
        watcher = Watcher(target, elements)
        seen = watcher.run(traced.jaxpr, list(map(FlaggedValue, traced.arrays)))
        ops, counts = watcher.found()
        results_from = frozenset[Source]().union(*(value.sources for value in seen))
        order = np.argsort([op.number for op in ops])
        counts = jax.tree.map(lambda column: gathered(column[order]), counts)
        # Tuples, for the structure of a pytree.
        slots = tuple((s, tuple(made)) for s, made in watcher.graph.of_slots.items())
        ordered, reaching = tuple(ops[i] for i in order), tuple(results_from)
        stats = WatchedNumerics(counts, ordered, target.name, reaching, slots)
        results = [
            structure.as_typed(x.array, var.aval)
            for x, var in zip(seen, structure.parts(traced.jaxpr).outvars, strict=True)
        ]
        out, changes = jax.tree.unflatten(traced.treedef, results)
        write_changes(args, kwargs, changes)
        return out, stats

    return Uncalled("watch", fun, watched)


def first_nonfinite(stats: WatchedNumerics) -> OpNumerics | None:
    """Returns the first op whose infinity or NaN reaches a result of the function.

    It made it from finite operands. An infinity that the program drops on purpose, as
    ``where(mask, x, -inf)`` in a softmax does, is passed over.

    The order is that of the program. Of two ops in a loop, the upper one is returned,
    even if the lower one failed in an earlier trip.

    Args:
      stats: the second result of a watched function, outside ``jit``.

    Returns:
      The row of the op; None if nothing harmful was found: all results of the function
      are finite, or what is not comes from its arguments.

    Raises:
      TypeError: ``stats`` has another type, or is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> _, stats = jmp.watch(lambda x: 1 / x + 2)(jnp.array([0.0, 1.0]))
      >>> jmp.first_nonfinite(stats).op
      'div'
    """
    if not isinstance(stats, WatchedNumerics):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            "Expected the second result of a watched function, got "
            f"{type(stats).__name__}."
        )
    rows = list(_rows_by_op(stats))
    # An infinity is followed from op to op as long as each result contains an infinity
    # or a NaN. A select that drops it ends its way.
    broken = {op.number: op for op, row in rows if row.inf or row.nan}
    of_slots = dict(stats.slots)
    reaching, left = set[Source](), list(stats.results)
    while left:
        one = left.pop()
        if one in reaching or (isinstance(one, int) and one not in broken):
            continue
        reaching.add(one)
        left += broken[one].reads if isinstance(one, int) else of_slots[one]
    harmful = (row for op, row in rows if op.number in reaching and row.is_first)
    return next(harmful, None)
