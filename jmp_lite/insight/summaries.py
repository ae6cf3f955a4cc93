"""Sums up rows: totals, tables by scope, and the difference of two explanations."""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jmp_lite.insight.rows import Row, runs_in, times_or_once
from jmp_lite.insight.tables import RowGroups, count, short, text_table
from jmp_lite.jaxprs import params, products, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype, Jaxpr
from jmp_lite.ops import HIGHER_ORDER


@dataclasses.dataclass(frozen=True)
class Totals:
    """The sums over a function, and over its backward pass if requested.

    The body of a loop of unknown length counts once. Each branch of a ``cond`` counts.

    Attributes:
      equations: the number of equations, by precision.
      products: the number of matrix products and convolutions, by precision.
      flops: the operations of these products in all trips of all loops, by precision.
      casts: the number of casts between float32 and the compute dtype that autocast
        adds, in all trips of all loops.
      cast_bytes: the bytes that these casts read and write, without fusion.
      kept_traced: the bytes of the residuals without autocast; None if not requested.
      kept_run: the bytes of the residuals with autocast; None if not requested.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.explain(lambda x: x @ x)(jnp.ones((4, 4))).totals.products
      {'bfloat16': 1}
    """

    equations: Mapping[str, int] = dataclasses.field(hash=False)
    products: Mapping[str, int] = dataclasses.field(hash=False)
    flops: Mapping[str, int] = dataclasses.field(hash=False)
    casts: int
    cast_bytes: int
    kept_traced: int | None = None
    kept_run: int | None = None


def totals_of(
    rows: Iterable[Row], casts: Sequence[int], kept: Sequence[int] | None
) -> Totals:
    """Returns the totals of rows.

    Args:
      rows: the rows.
      casts: the number of added casts, and their bytes.
      kept: the bytes of the residuals, as traced and as run.
    """
    equations, products, flops = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        equations[row.precision] += 1
        if row.op in PRODUCTS:
            products[row.precision] += 1
            flops[row.precision] += row.flops * times_or_once(row.times)
    counts = dict(equations), dict(products), dict(flops)
    return Totals(*counts, *(max(n, 0) for n in casts), *(kept or ()))


def casts_in(programs: Iterable[Jaxpr], low: Dtype) -> tuple[int, int]:
    """Counts the casts between float32 and a dtype, and the bytes that they move."""
    known: dict[int, tuple[int, int]] = {}

    def count_casts(jaxpr: Jaxpr) -> tuple[int, int]:
        # A jaxpr that is called in many places is counted once.
        if id(jaxpr) not in known:
            number = n_bytes = 0
            for eqn in structure.live_equations(jaxpr):
                if params.op_of(eqn) in HIGHER_ORDER:
                    times = times_or_once(params.trips(eqn))
                    for inner in params.inner_jaxprs(eqn):
                        n, size = count_casts(inner)
                        number, n_bytes = number + times * n, n_bytes + times * size
                elif params.op_of(eqn) == "convert_element_type":
                    ends = {structure.dtype_of(x) for x in (*eqn.invars, *eqn.outvars)}
                    if ends != {np.dtype("float32"), low}:
                        continue
                    number += 1
                    size = products.known_size(eqn.outvars[0].aval.shape)
                    n_bytes += size * (4 + low.itemsize)
            known[id(jaxpr)] = number, n_bytes
        return known[id(jaxpr)]

    numbers, sizes = zip(*map(count_casts, programs), strict=True)
    return sum(numbers), sum(sizes)


# ------------------------------------------------------------------ tables by scope

_HEADERS = ("times", "op", "runs in", "traced as", "why", "where")

_HEADERS_OF_A_SUM = ("times", "op", "runs in", "only in")

_NAMED = 3
"""The number of blocks that are named if an op runs differently in them."""

_LINES = 60
"""The number of lines on a terminal."""


def depth_that_fits(rows: Sequence[Row]) -> int | None:
    """Returns the greatest depth whose table fits on a terminal."""
    deepest = max((row.scope.count("/") + 1 for row in rows), default=0)
    for depth in (None, *range(deepest, 0, -1)):
        _, groups = grouped(rows, depth)
        if sum(1 + len(cells) for _, cells in groups) <= _LINES:
            return depth
    return 1


def grouped(rows: Sequence[Row], depth: int | None) -> tuple[Sequence[str], RowGroups]:
    """Returns the headers and the rows of a table, by scope."""
    counted: dict[tuple[str, ...], list[Row]] = {}
    of_op: dict[object, list[Row]] = {}
    for row in rows:
        cells, scope = [row.op, runs_in(row)], row.scope
        if depth is None:
            cells += [" ".join(row.shapes), row.reason, short(row.source)]
        else:  # Numbered blocks are one.
            scope = re.sub(r"\d+", "*", _first(scope, depth))
        counted.setdefault((scope, *cells), []).append(row)
        of_op.setdefault((scope, row.op), []).append(row)
    if depth is not None:  # Each scope once.
        order = list(dict.fromkeys(key[0] for key in counted))
        counted = dict(sorted(counted.items(), key=lambda one: order.index(one[0][0])))
    groups: list[tuple[str, list[Sequence[str]]]] = []
    for scope, alike in itertools.groupby(counted.items(), lambda one: one[0][0]):
        groups.append((scope or ("(no scope)" if groups else ""), []))
        for (_, *cells), same in alike:
            times = [row.times for row in same]
            number = "?" if None in times else str(sum(t for t in times if t))
            if depth is not None:
                cells.append(_blocks_that_differ(same, of_op[scope, cells[0]], depth))
            groups[-1][1].append((number, *cells))
    return (_HEADERS if depth is None else _HEADERS_OF_A_SUM), groups


def _blocks_that_differ(rows: Sequence[Row], among: Sequence[Row], depth: int) -> str:
    """Returns the few numbered blocks in which an op runs differently."""
    ours, all_ = (
        dict.fromkeys(_first(row.scope, depth) for row in some)
        for some in (rows, among)
    )
    is_few = 2 * len(ours) <= len(all_) and len(ours) <= _NAMED
    return ", ".join(ours) if is_few else ""


def _first(scope: str, depth: int) -> str:
    return "/".join(scope.split("/")[:depth])


class Difference:
    """The differences between two explanations of a function; ``print`` shows a table.

    Attributes:
      changed: pairs of rows of the same equation that run in different dtypes or hold
        different numbers of bytes.
      only_left: the equations of the first explanation only.
      only_right: the equations of the second explanation only.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> fun, x = lambda x: x @ x, jnp.ones((2, 2))
      >>> difference = jmp.explain(fun, "O0")(x).diff(jmp.explain(fun)(x))
      >>> [(a.precision, b.precision) for a, b in difference.changed]
      [('float32', 'bfloat16')]
    """

    def __init__(self, left: Sequence[Row], right: Sequence[Row]) -> None:
        ours, theirs = _index_by_place(left), _index_by_place(right)
        both = [(row, theirs[key]) for key, row in ours.items() if key in theirs]
        self.changed = tuple(
            (a, b)
            for a, b in both
            if (a.precision, a.bytes_run) != (b.precision, b.bytes_run)
        )
        self.only_left = tuple(row for key, row in ours.items() if key not in theirs)
        self.only_right = tuple(row for key, row in theirs.items() if key not in ours)

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_left or self.only_right)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        rows: list[tuple[Row, str, str, str]] = []
        for a, b in self.changed:
            before, after = a.precision, b.precision
            if before == after:  # They hold different numbers of bytes.
                before, after = (f"{before}, {count(r.bytes_run)}B" for r in (a, b))
            rows.append((a, before, after, b.reason))
        rows += [(row, row.precision, "-", "") for row in self.only_left]
        rows += [(row, "-", row.precision, row.reason) for row in self.only_right]
        like: dict[str, Counter[Sequence[str]]] = {}
        for row, *cells in rows:
            times = "?" if row.times is None else str(row.times)
            line = (times, row.op, *cells, short(row.source))
            like.setdefault(row.scope, Counter())[line] += 1
        groups = [
            (scope, [(f"{n}" if n > 1 else "", *cells) for cells, n in counted.items()])
            for scope, counted in like.items()
        ]
        headers = ("", "times", "op", "before", "after", "why", "where")
        return text_table(headers, groups, right=(0, 1))


def _index_by_place(rows: Iterable[Row]) -> Mapping[object, Row]:
    """Returns rows by keys that are the same in each explanation of a function."""
    seen: Counter[object] = Counter()
    found: dict[object, Row] = {}
    for row in rows:
        key = (row.scope, row.op, row.source, row.is_backward)
        found[*key, seen[key]] = row
        seen[key] += 1
    return found
