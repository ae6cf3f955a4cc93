"""A sub-jaxpr converted for what its inputs are held in, and remembered.

Rebinding a jaxpr with operands of other dtypes is not checked by JAX, so each one is
converted for exactly the dtypes that it is bound to.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.decisions import (
    Decision,
    DecisionRecord,
    RecordsInside,
    run_alike,
)
from jmp_lite.autocasting.interpreter.lookup import RuleLookup
from jmp_lite.autocasting.interpreter.uses import UseAnalysis
from jmp_lite.autocasting.interpreter.values import (
    Input,
    InputRoot,
    Kind,
    Lineage,
    Origin,
    Readers,
    Spec,
    State,
    Value,
)
from jmp_lite.autocasting.jaxprs import compat
from jmp_lite.autocasting.jaxprs.dataflow import equations
from jmp_lite.autocasting.jaxprs.types import Array, Eqn, Jaxpr
from jmp_lite.autocasting.passes import upcasts
from jmp_lite.autocasting.rules.rules import Rules

Given: TypeAlias = tuple[tuple[Spec, ...], tuple[Lineage | None, ...]]
"""What the inputs of a jaxpr are held in, and what they are functions of."""


class Walk(Protocol):
    """What the files below need of the interpreter, which imports them."""

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
        """Yields the list of what is decided inside."""
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
    """An equation that holds a jaxpr, and where and on what it is met.

    Attributes:
      eqn: the equation.
      operands: the values of its operands.
      wanted: the readers of its results.
      path: the scopes that it stands in.
    """

    eqn: Eqn
    operands: Sequence[Value]
    wanted: Sequence[Readers]
    path: str


class Converted(NamedTuple):
    """A jaxpr in mixed precision.

    Attributes:
      jaxpr: the jaxpr, closed.
      specs: what its results are.
      made: what they would be if nothing were forced.
      origins: where they come from, as ``Value.origin`` says it inside of the jaxpr.
      records: what was decided in it.
      raised: the inputs that it takes in float32 although they are low, because all
        that it does with them is to raise them.
      lineages: what its results are functions of, with the numbers of inputs for their
        roots; empty if the equation is no mere call.
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
    wanted: Sequence[Readers],
    path: str,
    name: str = "",
    forced: Mapping[int, Spec] | None = None,
    is_call: bool = False,
) -> Converted:
    """Returns a jaxpr in mixed precision.

    The same jaxpr under the same rules, operands and readers is converted once, so that
    a block which is called many times is lowered once.

    Args:
      walk: the walk that comes to it.
      jaxpr: the jaxpr, closed or open.
      operands: what it will be bound to.
      wanted: the readers of its results.
      path: the scopes that the equation stands in which holds it.
      name: the scope that it is itself, if it has a name.
      forced: what some of its results have to be, by number.
      is_call: whether the equation is a mere call: a function of one 16-bit value may
        then begin outside of it and end inside, or the other way round.
    """
    inside, region = compat.join(path, name), walk.at.region(path)
    states = tuple(value.spec for value in operands)
    rules_inside = walk.at.inside(jaxpr, inside)
    wanted = tuple(Readers.OTHER if r & Readers.OTHER else r for r in wanted)
    forced = forced or {}
    as_forced = tuple(forced.items())
    key = (id(jaxpr), wanted, rules_inside, region is None, as_forced)
    # The jaxpr is kept with the answer, so that its id stays its own.
    _, known = walk.memo.setdefault(key, (jaxpr, {}))
    lineages = _lineages_inside(operands) if is_call else (None,) * len(operands)
    given = (states, lineages)
    if given not in known:

        def run(*arrays: Array) -> list[Value]:
            values = as_values(arrays, states, [Input(i) for i in range(len(arrays))])
            for value, lineage in zip(values, lineages, strict=True):
                value.lineage = lineage
            results = walk.run(jaxpr, values, wanted, inside, region)
            return results if is_call else leave_functions(walk, results, wanted)

        new = _converted(walk, jaxpr, states, run, forced)
        new = new if is_call else new._replace(lineages=())
        if name and "upcasts" in walk.rules.passes:
            new = _raised_outside(walk, new, states)
            # A checkpoint would keep a raised input in float32.
            if not any(compat.op_of(e) in compat.REMAT for e, _ in equations(jaxpr)):
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
    """Returns what running a jaxpr on values of some states makes of it."""
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
            Lineage(value.roots, value.is_rejoined)
            if value.state in (State.LOW, State.HARD)
            else None
            for value in results
        ]
        return as_specs(walk, results, specs)

    avals = [
        compat.retyped(var.aval, walk.casts.low_dtype)
        if state is State.LOW
        else var.aval
        for var, (state, _) in zip(compat.parts(jaxpr).invars, states, strict=True)
    ]
    with walk.recording() as records:
        traced = compat.trace(run_to_arrays, avals, jaxpr)
    return Converted(
        traced, tuple(specs), tuple(made), origins, records, lineages=lineages
    )


def _raised_outside(walk: Walk, new: Converted, states: Sequence[Spec]) -> Converted:
    """Returns a conversion whose caller raises the inputs that it would only raise."""
    # Outside they are raised once, and the gradients of all uses add up in float32.
    are_low = {i for i, (state, _) in enumerate(states) if state is State.LOW}
    raised = upcasts.only_raised(new.jaxpr) & are_low
    walk.note_pass("upcasts", bool(raised))
    return new._replace(jaxpr=upcasts.with_raised(new.jaxpr, raised), raised=raised)


def leave_functions(
    walk: Walk, values: Sequence[Value], wanted: Sequence[Readers]
) -> list[Value]:
    """Casts the results of functions of one 16-bit value to 16 bits.

    A value that its readers demand in float32 stays float32.
    """
    return [
        Value(walk.casts.low(value), State.LOW, origin=value.origin)
        if value.is_rejoined and not readers.want_float32
        else value
        for value, readers in zip(values, wanted, strict=True)
    ]


def _lineages_inside(operands: Sequence[Value]) -> tuple[Lineage | None, ...]:
    """Returns the lineages of operands inside of a call, where roots are numbers."""
    numbers: dict[object, InputRoot] = {}
    found: list[Lineage | None] = []
    for value in operands:
        roots = value.roots
        if value.state in (None, State.SOFT) or roots is None:
            found.append(None)
            continue
        for root in roots:
            numbers.setdefault(root, InputRoot(len(numbers)))
        inside = frozenset[object](numbers[root] for root in roots)
        found.append(Lineage(inside, value.is_rejoined))
    return tuple(found)


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
            # Each call makes the 16-bit values inside of it anew.
            roots = [outside.setdefault(root, object()) for root in lineage.roots]
            lineage = lineage._replace(roots=frozenset(roots))
        found.append(lineage)
    return found


def _shared(
    new: Converted,
    states: tuple[Spec, ...],
    known: Mapping[Given, Converted],
) -> Converted:
    """Returns a conversion, with the jaxpr of an earlier one that computes the same.

    The first block of a stack has a float32 input, and the others have 16-bit ones. If
    each equation runs alike in both conversions, the caller raises the input of the
    others to float32, and JAX lowers all blocks as one function.
    """
    for (others, _), old in known.items():
        differing = [
            i
            for i, (mine, other) in enumerate(zip(states, others, strict=True))
            if mine != other
        ]
        are_raised = all(
            states[i] == (State.LOW, others[i][1]) and others[i][0] is State.SOFT
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
    """Returns arrays as values that are what the specs say."""
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
    """Returns the results of an equation, and notes what was decided inside of it."""
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
    """Returns where a value comes from that inside is the number of an input."""
    return operands[origin.number].origin if isinstance(origin, Input) else origin


def arrays_of(operands: Sequence[Value]) -> list[Array]:
    """Returns the arrays of values, in the dtypes that those are held in."""
    return [value.array for value in operands]


def as_spec(walk: Walk, value: Value, spec: Spec) -> Array:
    """Returns the array of a value, cast to what a spec says."""
    return walk.casts.low(value) if spec[0] is State.LOW else walk.casts.full(value)


def as_specs(walk: Walk, values: Sequence[Value], specs: Sequence[Spec]) -> list[Array]:
    """Returns the arrays of values, each cast to what its spec says."""
    return [as_spec(walk, v, spec) for v, spec in zip(values, specs, strict=True)]


def join_all(rows: Sequence[Sequence[Spec]]) -> tuple[Spec, ...]:
    """Returns what values are where branches join, of which each row is one."""
    return tuple(_join(column) for column in zip(*rows, strict=True))


def _join(specs: Sequence[Spec]) -> Spec:
    states = [state for state, _ in specs if state is not None]
    kinds = {kind for _, kind in specs}
    return max(states, default=None), kinds.pop() if len(kinds) == 1 else Kind.COMPUTED


def keep(walk: Walk, call: Call, decision: Decision) -> list[Value]:
    """Binds an equation as it was traced, with all that it holds."""
    walk.record(DecisionRecord(call.eqn, decision))
    arrays = compat.bind(call.eqn, [walk.casts.full(value) for value in call.operands])
    return [
        Value(array, State.HARD if compat.is_float32(var) else None, origin=call.eqn)
        for var, array in zip(call.eqn.outvars, arrays, strict=True)
    ]
