"""Explains the backward pass: the equations that the gradient of a program adds.

The rows come from the jaxpr of the gradient, which is traced and never run.
"""

import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jmp_lite.autocasting.rules.scopes import of_the_user
from jmp_lite.insight.explain.rows import (
    Row,
    bytes_of,
    placed_equations,
    precision_as_traced,
)
from jmp_lite.insight.gradients import Arguments, Differentiable
from jmp_lite.insight.places import Place
from jmp_lite.jaxprs import bilinear, cost, params, source, structure
from jmp_lite.jaxprs.dataflow import Backward
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, PyTree
from jmp_lite.ops import HIGHER_ORDER


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
    with gradient.advised():
        return _passes_of(gradient)


def _passes_of(gradient: Differentiable) -> ProgramGradient:
    program = gradient.traced

    def forward(*arrays: Array) -> tuple[list[Array], tuple[Function, list[Array]]]:
        run = functools.partial(structure.evaluate, program)
        out, back, results = gradient.differentiated(run, arrays)
        return results, (back, out)

    traced, (results, kept) = jax.make_jaxpr(forward, return_shape=True)(
        *gradient.avals
    )
    of_forward = structure.parts(traced)
    there = {*of_forward.invars, *of_forward.constvars}
    n_kept = len(jax.tree.leaves(kept[0]))
    returned = of_forward.outvars[len(results) :][:n_kept]
    backward = jax.make_jaxpr(lambda back, out: back(out))(*kept)
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
            made[id(eqn)] = _row_as_it_runs(eqn)
        scope = source.join(place.path, *source.scopes(eqn))
        yield made[id(eqn)]._replace(
            scope=of_the_user(scope),
            source=source.source(eqn, place.source),
            times=place.times,
        )


def _row_as_it_runs(eqn: Eqn) -> Row:
    n_bytes = sum(map(bytes_of, eqn.outvars))
    how = "runs in the dtype of its operands"
    if bilinear.dtype_of(eqn) is not None:
        how = "multiplies rounded operands"
    return Row(
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
        flops=cost.product_flops(eqn),
        is_backward=True,
        sums=bilinear.sums_of(eqn),
    )
