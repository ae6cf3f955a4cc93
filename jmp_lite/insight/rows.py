"""Turns decisions, and the program that they lead to, into rows and totals.

A row describes one equation. Lints judge it.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.decisions import Decision, Plan, Reason, Run
from jmp_lite.autocasting.decide.facts import (
    Input,
    Origin,
    State,
    is_equation,
    origin_outside,
)
from jmp_lite.autocasting.rules.rules import (
    Rules,
)
from jmp_lite.autocasting.rules.scopes import AUTOCAST_SCOPE, FULL_SCOPE, LOW_SCOPE
from jmp_lite.formats.number_format import LOW
from jmp_lite.formats.table import options_of
from jmp_lite.insight import reasons
from jmp_lite.insight.reasons import DecisionRecord
from jmp_lite.insight.tables import Place, short
from jmp_lite.jaxprs import bilinear, params, products, source, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype, Eqn, Jaxpr, Var
from jmp_lite.ops import HIGHER_ORDER


class Row(NamedTuple):
    """One equation of a function.

    Attributes:
      scope: its path, such as ``"LM/Block_0/Dense_0"``.
      op: the name of its primitive; for a carry of a loop, the name of the loop.
      precision: the dtype that it runs in: ``"bfloat16"``, ``"float16"``,
        ``"float32"`` or another; ``"as traced"`` if it has no floats. For a float8
        product it is the format of its operands, or of the cotangent in the backward
        pass.
      code: the reason as a name, for code to compare. It is the id of an op group
        (``"product"``); the kind of a rule (``"op"``, ``"scope"``, ``"mark"``,
        ``"default"``); or a property of the equation or its operands
        (``"follows_low"``).
      reason: the reason in words.
      source: its line of code: file, line and function. It is the innermost line
        outside of installed packages, if there is one.
      shapes: the traced types of its results, such as ``"float32[4,8]"``; in the
        backward pass, their types as they run.
      times: how often it runs; None inside of a ``while`` loop. Each branch of a
        ``cond`` has rows.
      bytes_traced: the bytes of its results, as traced. For an equation that only
        autocast adds to the backward pass, the bytes as they run. A symbolic size
        counts as one.
      bytes_run: the bytes of its results, as they run.
      flops: the operations of a matrix product, two for each multiplication of real
        numbers; 0 for other ops.
      is_backward: whether it belongs to a backward pass.
      number_format: the number format of a matrix product that runs low: ``"low"``,
        ``"float8"`` or another. Empty for other ops, and where ``is_backward``.
      sums: how a float8 product is added up, ``"fast"`` or ``"promoted"``, see
        ``Float8``. Empty for other ops.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> row, *_ = jmp.explain(lambda x: x @ x)(jnp.ones((4, 4))).rows
      >>> row.op, row.precision, row.shapes, row.bytes_run, row.flops
      ('dot_general', 'bfloat16', ('float32[4,4]',), 32, 128)
    """

    scope: str
    op: str
    precision: str
    code: str
    reason: str
    source: str
    shapes: tuple[str, ...]
    times: int | None
    bytes_traced: int
    bytes_run: int
    flops: int = 0
    is_backward: bool = False
    number_format: str = ""
    sums: str = ""


def runs_in(row: Row) -> str:
    """Returns the dtype that an equation runs in, and its format if it has another."""
    is_named = row.precision.startswith(row.number_format)
    if is_named or row.number_format == LOW.name:
        return row.precision
    return f"{row.precision}, {row.number_format}"


def is_low(row: Row, bits: int = 16) -> bool:
    """Whether an equation runs in this number of bits or fewer."""
    is_float = row.precision != "as traced"
    return is_float and 8 * np.dtype(row.precision).itemsize <= bits


def is_decided_inside(row: Row) -> bool:
    """Whether an inner autocast decided the equation."""
    return AUTOCAST_SCOPE in row.scope.split("/")


class DecidedRow(NamedTuple):
    """A row, with its decision.

    Attributes:
      row: the row.
      record: the decision.
      origin: the operand that decided, in words; otherwise empty.
    """

    row: Row
    record: DecisionRecord
    origin: str = ""


def times_or_once(times: int | None) -> int:
    """Returns how often a row counts in a total: once if the number is unknown."""
    return 1 if times is None else times


def decided_rows(plan: Plan, rules: Rules) -> Iterator[DecidedRow]:
    """Yields the rows of the decisions of a plan, in the order of execution."""
    return _RowMaker(rules).make(plan, Place(), [])


class _RowMaker:
    """Makes rows; a program that is called often is processed once.

    Args:
      rules: the rules.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[int, list[tuple[DecisionRecord, Row]]] = {}
        self._sources: dict[int, str] = {}
        self._words: dict[tuple[int, str], str] = {}
        self._type_in_words = functools.cache(operator.methodcaller("str_short"))

    def make(
        self, plan: Plan, place: Place, origins: Sequence[Origin]
    ) -> Iterator[DecidedRow]:
        """Yields the rows of the decisions in one jaxpr.

        Args:
          plan: its plan.
          place: the place of the jaxpr.
          origins: the origins of its inputs.
        """
        for step in plan.steps:
            if id(step) not in self._known:
                records = reasons.records_of(step)
                self._known[id(step)] = [(one, self._row(one)) for one in records]
            for record, row in self._known[id(step)]:
                there = _record_outside(record, origins)
                yield self._place_row(row, there, place)
                if record.decision.run is Run.AS_TRACED:
                    yield from self._kept(there, place)
            for inside, inner in zip(step.inside, step.origins, strict=True):
                outside = [origin_outside(origin, origins) for origin in inner]
                times = params.trips(step.eqn)
                yield from self.make(inside, place.enter(step.eqn, times), outside)

    def _kept(self, record: DecisionRecord, place: Place) -> Iterator[DecidedRow]:
        """Yields the rows inside of an equation that runs as traced."""
        jaxprs = list(params.inner_jaxprs(record.eqn))
        if not jaxprs:
            return
        op = params.op_of(record.eqn)
        kept = dataclasses.replace(record.decision, reason=Reason.INSIDE, within=op)
        there = place.enter(record.eqn, params.trips(record.eqn))
        for jaxpr in jaxprs:
            for eqn in structure.parts(jaxpr).eqns:
                inner = DecisionRecord(eqn, kept)
                yield self._place_row(self._row(inner), inner, there)
                yield from self._kept(inner, there)

    def _place_row(self, row: Row, record: DecisionRecord, place: Place) -> DecidedRow:
        """Returns a row at a place, with the origin outside of its jaxpr."""
        line = source.source(record.eqn, place.source)
        self._sources[id(record.eqn)] = line
        origin = self._describe_origin(record.origin)
        placed = row._replace(
            scope=source.join(place.path, row.scope),
            reason=f"{row.reason}: {origin}" if origin else row.reason,
            source=line,
            times=place.times,
            is_backward=place.is_backward or row.is_backward,
        )
        return DecidedRow(placed, record, origin)

    def _row(self, record: DecisionRecord) -> Row:
        """Returns a row without the place of its equation."""
        low = np.dtype(self._rules.compute_dtype)
        eqn, decision = record.eqn, record.decision
        results = eqn.outvars if record.result is None else [eqn.outvars[record.result]]
        dtype = low if decision.state is State.LOW else decision.stored
        return Row(
            scope=source.join(*source.scopes(eqn)),
            op=params.op_of(eqn),
            precision=_precision(eqn, decision, low),
            code=reasons.code_of(record),
            reason=reasons.reason_in_words(record),
            source="",
            shapes=tuple(self._type_in_words(var.aval) for var in results),
            times=1,
            bytes_traced=sum(map(bytes_of, results)),
            bytes_run=sum(bytes_of(var, dtype) for var in results),
            flops=products.product_flops(eqn),
            is_backward=source.is_transposed(eqn),
            number_format=_number_format(eqn, decision),
            sums=_sums(eqn, decision, low),
        )

    def _describe_origin(self, origin: Origin) -> str:
        """Returns the origin of a value in words."""
        if not is_equation(origin):
            return reasons.origin_in_words(origin)
        # It has a row already, unless a loop carries it from step to step.
        line = self._sources.get(id(origin)) or source.source(origin)
        key = (id(origin), line)
        if key not in self._words:
            mark = _MARK_NAMES.get(params.checkpoint_name_of(origin))
            op = mark or params.op_of(origin)
            place = short(line)
            self._words[key] = op + (place and f" at {place}")
        return self._words[key]


_MARK_NAMES = {FULL_SCOPE: "as_full", LOW_SCOPE: "as_low"}
"""The names of marks, by the names in the program."""


def _record_outside(
    record: DecisionRecord, origins: Sequence[Origin]
) -> DecisionRecord:
    """Returns a decision with its origins outside of the jaxpr."""
    operands = record.operands
    is_inside = [isinstance(operand.origin, Input) for operand in operands]
    if not (True in is_inside or isinstance(record.origin, Input)):
        return record
    return record._replace(
        origin=origin_outside(record.origin, origins),
        operands=tuple(
            o._replace(origin=origin_outside(o.origin, origins)) if inside else o
            for o, inside in zip(operands, is_inside, strict=True)
        ),
    )


def _precision(eqn: Eqn, decision: Decision, low: Dtype) -> str:
    if decision.run is Run.LOW:
        return decision.number_format.dtype(low).name
    if decision.stored is not None:
        return decision.stored.name
    return precision_as_traced(eqn)


def _number_format(eqn: Eqn, decision: Decision) -> str:
    is_low = decision.run is Run.LOW and params.op_of(eqn) in PRODUCTS
    return decision.number_format.name if is_low else ""


def _sums(eqn: Eqn, decision: Decision, low: Dtype) -> str:
    """Returns how a float8 product is added up."""
    if not _number_format(eqn, decision):
        return bilinear.sums_of(eqn)
    is_of_floats = jnp.issubdtype(decision.number_format.dtype(low), jnp.floating)
    return options_of(decision.number_format).get("sums", "") if is_of_floats else ""


def precision_as_traced(eqn: Eqn) -> str:
    """Returns the widest float of an equation; for a product, of its operands."""
    if (dtype := bilinear.dtype_of(eqn)) is not None:
        return dtype.name
    atoms = eqn.invars[:2] if params.op_of(eqn) in PRODUCTS else ()
    atoms = atoms or (*eqn.invars, *eqn.outvars)
    floats = [structure.dtype_of(atom) for atom in atoms if structure.is_float(atom)]
    return max(floats, key=lambda d: d.itemsize).name if floats else "as traced"


def bytes_of(var: Var, low: Dtype | None = None) -> int:
    """Returns the bytes of a variable; a float32 one may be in another dtype."""
    dtype = (
        low
        if low is not None and structure.is_float32(var)
        else structure.dtype_of(var)
    )
    size = products.known_size(getattr(var.aval, "shape", ()))
    return size * getattr(dtype, "itemsize", 0)


def placed_equations(jaxpr: Jaxpr, place: Place) -> Iterator[tuple[Eqn, Place]]:
    """Yields the live equations of a program, each with its place."""
    for eqn in structure.live_equations(jaxpr):
        yield eqn, place
        if params.op_of(eqn) in HIGHER_ORDER:
            there = place.enter(eqn, params.trips(eqn))
            for inner in params.inner_jaxprs(eqn):
                yield from placed_equations(inner, there)


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
    number, n_bytes = casts
    kept_traced, kept_run = kept or (None, None)
    return Totals(
        dict(equations),
        dict(products),
        dict(flops),
        casts=max(number, 0),
        cast_bytes=max(n_bytes, 0),
        kept_traced=kept_traced,
        kept_run=kept_run,
    )


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
                elif _is_cast_between(eqn, low):
                    number += 1
                    size = products.known_size(eqn.outvars[0].aval.shape)
                    n_bytes += size * (4 + low.itemsize)
            known[id(jaxpr)] = number, n_bytes
        return known[id(jaxpr)]

    numbers, sizes = zip(*map(count_casts, programs), strict=True)
    return sum(numbers), sum(sizes)


def _is_cast_between(eqn: Eqn, low: Dtype) -> bool:
    if params.op_of(eqn) != "convert_element_type":
        return False
    ends = {structure.dtype_of(eqn.invars[0]), structure.dtype_of(eqn.outvars[0])}
    return ends == {np.dtype("float32"), low}
