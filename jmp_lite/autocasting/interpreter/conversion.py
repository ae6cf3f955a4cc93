"""Converts sub-jaxprs for the states of their inputs, and remembers the results.

JAX does not check a jaxpr that is bound to operands of other dtypes. So each jaxpr is
converted for exactly the dtypes of its operands.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from jmp_lite.autocasting.decide.decisions import (
    Decision,
    DecisionRecord,
    RecordsInside,
    run_alike,
)
from jmp_lite.autocasting.decide.facts import (
    Input,
    InputRoot,
    Kind,
    Lineage,
    Origin,
    Readers,
    Spec,
    State,
)
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.readers import UseAnalysis
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.passes import upcasts
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr

Given: TypeAlias = tuple[tuple[Spec, ...], tuple[Lineage | None, ...]]
"""The specs and the lineages of the inputs of a jaxpr."""


class Walk(Protocol):
    """The part of the interpreter that the handlers need."""

    rules: Rules
    at: RuleLookup
    casts: Casts
    uses: UseAnalysis
    memo: "dict[object, tuple[Jaxpr, dict[Given, Converted]]]"

    def record(self, item: DecisionRecord | RecordsInside) -> None:
        """Adds a decision to the records."""

    def note_pass(self, name: str, has_changed: bool) -> None:
        """Counts a pass that has changed something."""

    def recording(
        self,
    ) -> contextlib.AbstractContextManager[list[DecisionRecord | RecordsInside]]:
        """Yields the list of decisions that are made inside of the block."""
        ...

    def run(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        outside: Sequence[Readers],
        path: str,
        region: str | None = None,
    ) -> list[Value]:
        """Runs a jaxpr."""
        ...


class Call(NamedTuple):
    """An equation that contains a jaxpr, with its operands and its path.

    Attributes:
      eqn: the equation.
      operands: the values of its operands.
      result_readers: the readers of its results.
      path: its path.
    """

    eqn: Eqn
    operands: Sequence[Value]
    result_readers: Sequence[Readers]
    path: str


class Converted(NamedTuple):
    """A jaxpr in mixed precision.

    Attributes:
      jaxpr: the jaxpr, closed.
      specs: the states and kinds of its results.
      made: the specs that the results would have if none were forced.
      origins: the origins of the results, as ``Value.origin`` inside of the jaxpr.
      records: the decisions inside.
      raised: the low inputs that it takes in float32, because it only casts them to
        float32.
      lineages: the lineages of the results. Their roots are numbers of inputs of a
        mere call. Of another equation, a result that is computed from 16-bit values
        but is undecided has a root of its own.
    """

    jaxpr: Jaxpr
    specs: tuple[Spec, ...]
    made: tuple[Spec, ...]
    origins: Sequence[Origin]
    records: Sequence[DecisionRecord | RecordsInside]
    raised: frozenset[int] = frozenset()
    lineages: Sequence[Lineage | None] = ()


def convert(
    walk: Walk,
    jaxpr: Jaxpr,
    operands: Sequence[Value],
    result_readers: Sequence[Readers],
    path: str,
    name: str = "",
    forced: Mapping[int, Spec] | None = None,
    is_call: bool = False,
) -> Converted:
    """Returns a jaxpr in mixed precision.

    A jaxpr with the same rules, operands and readers is converted once, so a block that
    is called many times is lowered once.

    Args:
      walk: the interpreter.
      jaxpr: the jaxpr, closed or open.
      operands: the operands of the call.
      result_readers: the readers of its results.
      path: the path of the equation that contains it.
      name: the scope of the jaxpr itself, if it has a name.
      forced: the required specs of some results, by number.
      is_call: whether the equation is a mere call. Then a function of one 16-bit value
        may begin outside of it and end inside, or the reverse.
    """
    inside, region = source.join(path, name), walk.at.region(path)
    states = tuple(value.spec for value in operands)
    rules_inside = walk.at.inside(jaxpr, inside)
    result_readers = tuple(readers.that_decide for readers in result_readers)
    forced = forced or {}
    as_forced = tuple(forced.items())
    key = (id(jaxpr), result_readers, rules_inside, region is None, as_forced)
    # The jaxpr is stored with the result, so that its id is not reused.
    _, known = walk.memo.setdefault(key, (jaxpr, {}))
    lineages = (_lineages_inside if is_call else _own_roots)(operands)
    given = (states, lineages)
    if given not in known:

        def run(*arrays: Array) -> list[Value]:
            values = as_values(arrays, states, [Input(i) for i in range(len(arrays))])
            for value, lineage in zip(values, lineages, strict=True):
                value.lineage = lineage
            results = walk.run(jaxpr, values, result_readers, inside, region)
            return (
                results if is_call else leave_functions(walk, results, result_readers)
            )

        new = _converted(walk, jaxpr, states, run, forced)
        if not is_call:
            # Negative numbers: none of an input.
            own = [
                _own_root(~i) if spec[0] is State.SOFT and lineage else None
                for i, (spec, lineage) in enumerate(
                    zip(new.specs, new.lineages, strict=True)
                )
            ]
            new = new._replace(lineages=own)
        if name and "upcasts" in walk.rules.passes:
            new = _raised_outside(walk, new, states)
            # A checkpoint would save an upcast input in float32.
            if not any(params.op_of(e) in params.REMAT for e, _ in equations(jaxpr)):
                new = _shared(new, states, known)
        known[given] = new
    return known[given]


def _converted(
    walk: Walk,
    jaxpr: Jaxpr,
    states: Sequence[Spec],
    run: Callable[..., list[Value]],
    forced: Mapping[int, Spec],
) -> Converted:
    """Returns the jaxpr in mixed precision for operands in these states."""
    specs: list[Spec] = []
    made: list[Spec] = []
    origins: list[Origin] = []
    lineages: list[Lineage | None] = []

    def run_to_arrays(*arrays: Array) -> list[Array]:
        results = run(*arrays)
        made[:] = [value.spec for value in results]
        specs[:] = [forced.get(i, spec) for i, spec in enumerate(made)]
        origins[:] = [value.origin for value in results]
        lineages[:] = [
            Lineage(value.roots, value.is_rejoined) if value.has_lineage else None
            for value in results
        ]
        return as_specs(walk, results, specs)

    avals = [
        structure.retyped(var.aval, walk.casts.low_dtype)
        if state is State.LOW
        else structure.type_of(var)
        for var, (state, _) in zip(structure.parts(jaxpr).invars, states, strict=True)
    ]
    with walk.recording() as records:
        traced = structure.trace(run_to_arrays, avals, jaxpr)
    return Converted(
        traced, tuple(specs), tuple(made), origins, records, lineages=lineages
    )


def _raised_outside(walk: Walk, new: Converted, states: Sequence[Spec]) -> Converted:
    """Returns a conversion whose caller casts some inputs to float32.

    These are the inputs that the jaxpr only casts to float32.
    """
    # The upcast is outside, once, so the gradients of all uses add up in float32.
    are_low = {i for i, (state, _) in enumerate(states) if state is State.LOW}
    raised = upcasts.only_raised(new.jaxpr) & are_low
    walk.note_pass("upcasts", bool(raised))
    return new._replace(jaxpr=upcasts.with_raised(new.jaxpr, raised), raised=raised)


def leave_functions(
    walk: Walk, values: Sequence[Value], result_readers: Sequence[Readers]
) -> list[Value]:
    """Casts the results of functions of one 16-bit value to 16 bits.

    A value that its readers demand in float32 stays float32. One of which a reader
    amplifies an error stays so too, but is no longer deliberate float32.
    """
    return [
        leave_function(walk.casts, value, readers)
        if value.is_rejoined and not readers.want_float32
        else value
        for value, readers in zip(values, result_readers, strict=True)
    ]


def leave_function(casts: Casts, value: Value, readers: Readers) -> Value:
    """Returns a result of a function of 16-bit values as its readers take it."""
    if readers.amplify:
        return Value(casts.full(value), State.SOFT, origin=value.origin)
    return Value(casts.low(value), State.LOW, origin=value.origin)


def _lineages_inside(operands: Sequence[Value]) -> tuple[Lineage | None, ...]:
    """Returns the lineages of operands inside of a call, with numbers as roots."""
    numbers: dict[object, InputRoot] = {}
    found: list[Lineage | None] = []
    for value in operands:
        roots = value.roots
        if not value.has_lineage:
            found.append(None)
            continue
        for root in roots or ():
            numbers.setdefault(root, InputRoot(len(numbers)))
        inside = roots and frozenset[object](numbers[root] for root in roots)
        found.append(Lineage(inside, value.is_rejoined))
    return tuple(found)


def _own_roots(operands: Sequence[Value]) -> tuple[Lineage | None, ...]:
    """Returns the lineages of operands inside of an equation that is not a mere call.

    Each 16-bit value is a root of its own there, and so is an undecided value that is
    computed from 16-bit values.
    """
    return tuple(
        _own_root(i) if value.state is State.SOFT and value.has_lineage else None
        for i, value in enumerate(operands)
    )


def _own_root(number: int) -> Lineage:
    return Lineage(frozenset([InputRoot(number)]))


def _lineages_outside(
    lineages: Sequence[Lineage | None], operands: Sequence[Value]
) -> list[Lineage | None]:
    """Returns the lineages of a call's results outside of it."""
    outside: dict[object, object] = {}
    for value, inside in zip(operands, _lineages_inside(operands), strict=True):
        if inside is not None:
            pairs = zip(inside.roots or (), value.roots or (), strict=True)
            outside.update(pairs)
    found: list[Lineage | None] = []
    for lineage in lineages:
        if lineage is not None and lineage.roots is not None:
            # Each call makes new 16-bit values inside.
            roots = [outside.setdefault(root, object()) for root in lineage.roots]
            lineage = lineage._replace(roots=frozenset(roots))
        found.append(lineage)
    return found


def _shared(
    new: Converted,
    states: tuple[Spec, ...],
    known: Mapping[Given, Converted],
) -> Converted:
    """Returns a conversion, with the jaxpr of an earlier equivalent one.

    The first block of a stack has a float32 input, and the others have 16-bit inputs.
    If each equation runs alike in both conversions, the caller casts the input of the
    others to float32, and JAX lowers all blocks as one function.
    """
    for (others, _), old in known.items():
        differing = [
            i
            for i, (mine, other) in enumerate(zip(states, others, strict=True))
            if mine != other
        ]
        are_raised = all(
            (states[i][0], others[i][0]) == (State.LOW, State.SOFT)
            and states[i][1].is_cast_once
            and others[i][1].is_cast_once
            for i in differing
        )
        is_same = old.specs == new.specs and run_alike(old.records, new.records)
        if are_raised and is_same:
            return new._replace(jaxpr=old.jaxpr, raised=old.raised.union(differing))
    return new


def as_values(
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    origins: Sequence[Origin] | None = None,
) -> list[Value]:
    """Returns arrays as values with the given specs."""
    return [
        Value(array, state, kind, origin=origin)
        for array, (state, kind), origin in zip(
            arrays, specs, origins or [None] * len(specs), strict=True
        )
    ]


def results_of_call(
    walk: Walk,
    call: Call,
    arrays: Sequence[Array],
    converted: Converted,
    times: int | None = 1,
) -> list[Value]:
    """Returns the results of an equation, and records the decisions inside of it."""
    origins = [value.origin for value in call.operands]
    walk.record(RecordsInside(call.eqn, converted.records, origins, times))
    outer = [origin_outside(origin, call.operands) for origin in converted.origins]
    values = as_values(arrays, converted.specs, outer)
    if converted.lineages:
        lineages = _lineages_outside(converted.lineages, call.operands)
        for value, lineage in zip(values, lineages, strict=True):
            value.lineage = lineage
    return values


def origin_outside(origin: Origin, operands: Sequence[Value]) -> Origin:
    """Returns the origin outside of a jaxpr for an origin inside of it."""
    return operands[origin.number].origin if isinstance(origin, Input) else origin


def arrays_of(operands: Sequence[Value]) -> list[Array]:
    """Returns the arrays of values, in the dtypes of their states."""
    return [value.array for value in operands]


def as_spec(walk: Walk, value: Value, spec: Spec) -> Array:
    """Returns the array of a value, cast to a spec."""
    return walk.casts.low(value) if spec[0] is State.LOW else walk.casts.full(value)


def as_specs(walk: Walk, values: Sequence[Value], specs: Sequence[Spec]) -> list[Array]:
    """Returns the arrays of values, each cast to its spec."""
    return [as_spec(walk, v, spec) for v, spec in zip(values, specs, strict=True)]


def join_all(rows: Sequence[Sequence[Spec]]) -> tuple[Spec, ...]:
    """Returns the joined specs of branches; each row is one branch."""
    return tuple(_join(column) for column in zip(*rows, strict=True))


def _join(specs: Sequence[Spec]) -> Spec:
    states = [state for state, _ in specs if state is not None]
    kinds = {kind for _, kind in specs}
    return max(states, default=None), kinds.pop() if len(kinds) == 1 else Kind.COMPUTED


def keep(walk: Walk, call: Call, decision: Decision) -> list[Value]:
    """Binds an equation, and everything inside of it, as traced."""
    walk.record(DecisionRecord(call.eqn, decision))
    arrays = params.bind(call.eqn, [walk.casts.full(value) for value in call.operands])
    return [
        Value(array, State.HARD if structure.is_float32(var) else None, origin=call.eqn)
        for var, array in zip(call.eqn.outvars, arrays, strict=True)
    ]
