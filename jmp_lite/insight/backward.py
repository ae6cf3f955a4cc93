"""The rows of a backward pass, of a difference of two explanations, and of scopes."""

import enum
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from jmp_lite.autocasting.rules.scopes import of_the_user
from jmp_lite.insight.gradients import Arguments, Differentiable
from jmp_lite.insight.rows import (
    Row,
    bytes_of,
    placed_equations,
    precision_as_traced,
    runs_in,
)
from jmp_lite.insight.tables import Place, RowGroups, count, short, text_table
from jmp_lite.jaxprs import bilinear, params, products, source, structure
from jmp_lite.jaxprs.dataflow import Backward
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, PyTree
from jmp_lite.ops import HIGHER_ORDER

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
        cells, scope = _cells(row, depth), _cut(row.scope, depth)
        counted.setdefault((scope, *cells), []).append(row)
        of_op.setdefault((scope, row.op), []).append(row)
    if depth is not None:  # Each scope once.
        order = list(dict.fromkeys(key[0] for key in counted))
        by_scope = sorted(counted, key=lambda key: order.index(key[0]))
        counted = {key: counted[key] for key in by_scope}
    groups: list[tuple[str, list[Sequence[str]]]] = []
    above = ""
    for (scope, *cells), same in counted.items():
        if not groups or scope != above:
            above = scope
            groups.append((scope or ("(no scope)" if groups else ""), []))
        times = [row.times for row in same]
        number = "?" if None in times else str(sum(t for t in times if t))
        if depth is not None:
            cells.append(_blocks_that_differ(same, of_op[scope, cells[0]], depth))
        groups[-1][1].append((number, *cells))
    headers = _HEADERS if depth is None else _HEADERS_OF_A_SUM
    return headers, groups


def _cells(row: Row, depth: int | None) -> Sequence[str]:
    if depth is not None:
        return (row.op, runs_in(row))
    texts = (" ".join(row.shapes), row.reason, short(row.source))
    return (row.op, runs_in(row), *texts)


def _blocks_that_differ(rows: Sequence[Row], among: Sequence[Row], depth: int) -> str:
    """Returns the few numbered blocks in which an op runs differently."""
    ours, all_ = (
        {_first(row.scope, depth): None for row in some} for some in (rows, among)
    )
    is_few = 2 * len(ours) <= len(all_) and len(ours) <= _NAMED
    return ", ".join(ours) if is_few else ""


def _first(scope: str, depth: int) -> str:
    return "/".join(scope.split("/")[:depth])


def _cut(scope: str, depth: int | None) -> str:
    """Returns the start of a path, with numbered blocks as one."""
    return scope if depth is None else re.sub(r"\d+", "*", _first(scope, depth))


class ProgramGradient(NamedTuple):
    """A program and its gradient.

    Attributes:
      program: the program itself.
      forward: the forward pass that replaces it: to its results and residuals.
      backward: the backward pass: from residuals and cotangents to gradients.
      kept: the bytes of its residuals. Arguments do not count, because they exist
        anyway. Neither do zeros that only carry a tangent: no compiled program reads
        them.
    """

    program: Jaxpr
    forward: Jaxpr
    backward: Jaxpr
    kept: int


def backward_of(
    program: Jaxpr, treedef: PyTree, arguments: Arguments
) -> ProgramGradient:
    """Returns the backward pass of a program, without running it.

    Args:
      program: a jaxpr.
      treedef: the pytree structure of its results.
      arguments: its arguments.

    Raises:
      ValueError: the program has no floating-point input or no floating-point result.
    """
    gradient = Differentiable(program, treedef, arguments)
    gradient.check()

    def forward(*arrays: Array) -> tuple[list[Array], tuple[Function, list[Array]]]:
        run = functools.partial(structure.evaluate, program)
        out, back, results = gradient.differentiated(run, arrays)
        return results, (back, out)

    with gradient.advised():
        trace = jax.make_jaxpr(forward, return_shape=True)
        traced, (results, kept) = trace(*gradient.avals)
        backward = jax.make_jaxpr(lambda back, out: back(out))(*kept)
    of_forward = structure.parts(traced)
    there = {*of_forward.invars, *of_forward.constvars}
    n_kept = len(jax.tree.leaves(kept[0]))
    returned = of_forward.outvars[len(results) :][:n_kept]
    n_out = len(structure.parts(backward).outvars)
    uses = _ResidualUseAnalysis().inputs(backward, [_ResidualUse.NUMBERS] * n_out)
    residuals = {
        var
        for var, use in zip(returned, uses[:n_kept], strict=True)
        if use is not _ResidualUse.TANGENT and not structure.is_literal(var)
    } - there
    return ProgramGradient(program, traced, backward, sum(map(bytes_of, residuals)))


class _ResidualUse(enum.IntEnum):
    """The use of a residual; the largest of several uses decides."""

    NONE = 0
    TANGENT = 1
    NUMBERS = 2


class _ResidualUseAnalysis(Backward[_ResidualUse]):
    """Finds which residuals are read as numbers, and which only carry a tangent."""

    def nothing(self) -> _ResidualUse:
        """An unread value has no use."""
        return _ResidualUse.NONE

    def join(self, one: _ResidualUse, other: _ResidualUse) -> _ResidualUse:
        """Returns the larger of two uses."""
        return max(one, other)

    def predicate_fact(self) -> _ResidualUse:
        """A predicate is read as a number."""
        return _ResidualUse.NUMBERS

    def transfer(
        self, eqn: Eqn, facts: Sequence[_ResidualUse], path: str
    ) -> Sequence[_ResidualUse]:
        """Returns the use of each operand of an op."""
        del facts, path
        return [
            _ResidualUse.TANGENT if is_tangent else _ResidualUse.NUMBERS
            for is_tangent in bilinear.are_tangents(eqn)
        ]


def rows_of_backward(run: ProgramGradient, traced: ProgramGradient) -> Iterator[Row]:
    """Yields the rows that run only for the backward pass.

    Args:
      run: the backward pass, as it runs.
      traced: the backward pass without autocast.
    """

    def likeness(row: Row) -> tuple[str, ...]:
        # A shape without its dtype.
        return row.scope, row.op, *(shape.partition("[")[2] for shape in row.shapes)

    as_traced: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in _rows_for(traced):
        as_traced[likeness(row)].append(row.bytes_run)
    for row in _rows_for(run):
        if found := as_traced[likeness(row)]:
            row = row._replace(bytes_traced=found.pop(0))
        yield row


def _rows_for(passes: ProgramGradient) -> Iterator[Row]:
    """Yields the rows that the program itself does not run.

    It does not compare source lines: a custom rule may recompute a value on its own
    line.
    """
    there = Counter(row._replace(source="") for row in _rows_of(passes.program))
    for row in _rows_of(passes.forward):
        found = row._replace(source="")
        if there[found]:
            there[found] -= 1
        else:
            yield row._replace(
                code="for_backward",
                reason="forward pass: needed only by the backward pass",
            )
    yield from _rows_of(passes.backward)


def _rows_of(jaxpr: Jaxpr) -> Iterator[Row]:
    made: dict[int, Row] = {}
    for eqn, place in placed_equations(jaxpr, Place()):
        if params.op_of(eqn) in (*HIGHER_ORDER, "convert_element_type"):
            continue
        if id(eqn) not in made:
            n_bytes = sum(map(bytes_of, eqn.outvars))
            how = "runs in the dtype of its operands"
            if bilinear.dtype_of(eqn) is not None:
                how = "multiplies rounded operands"
            made[id(eqn)] = Row(
                scope="",
                op=params.op_of(eqn),
                precision=precision_as_traced(eqn),
                code="backward",
                reason=f"backward pass: {how}",
                source="",
                shapes=tuple(var.aval.str_short() for var in eqn.outvars),
                times=1,
                bytes_traced=n_bytes,
                bytes_run=n_bytes,
                flops=products.product_flops(eqn),
                is_backward=True,
                sums=bilinear.sums_of(eqn),
            )
        scope = source.join(place.path, *source.scopes(eqn))
        yield made[id(eqn)]._replace(
            scope=of_the_user(scope),
            source=source.source(eqn, place.source),
            times=place.times,
        )


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
