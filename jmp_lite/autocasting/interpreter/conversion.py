"""Converts sub-jaxprs for the states of their inputs, and remembers the results.

JAX does not check a jaxpr that is bound to operands of other dtypes. So each jaxpr is
converted for exactly the dtypes of its operands.
"""

import abc
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jmp_lite.autocasting.decide.decisions import (
    DecisionRecord,
    RecordsInside,
    run_alike,
)
from jmp_lite.autocasting.decide.facts import (
    Input,
    Kind,
    Lineage,
    Origin,
    Readers,
    Spec,
    State,
)
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.readers import UseAnalysis
from jmp_lite.autocasting.interpreter import lineages
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.passes import upcasts
from jmp_lite.autocasting.passes.labels import LabelGathers
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.evaluate import Body, Evaluator
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, Literal, Var

InputFacts: TypeAlias = tuple[tuple[Spec, ...], tuple[Lineage | None, ...]]
"""The specs and the lineages of the inputs of a jaxpr."""

Records: TypeAlias = list[DecisionRecord | RecordsInside]


class Site(NamedTuple):
    """The site of an equation, or of a jaxpr.

    Attributes:
      path: its path.
      readers: the readers of its results.
    """

    path: str
    readers: Sequence[Readers]


@dataclasses.dataclass(frozen=True)
class Converted(Body[Spec]):
    """A jaxpr in mixed precision.

    Attributes:
      unforced: the specs of the results before they are cast to the required ones.
      origins: the origins of the results, as ``Value.origin`` inside of the jaxpr.
      records: the decisions inside.
      lineages: the lineages of the results. In a mere call, their roots are the
        ``InputRoot`` objects of the operands. In any other equation, an undecided
        result that is computed from 16-bit values is a root of its own.
    """

    unforced: tuple[Spec, ...]
    origins: Sequence[Origin]
    records: Sequence[DecisionRecord | RecordsInside]
    lineages: Sequence[Lineage | None] = ()


class Converter(Evaluator[Value, Spec, Site, Converted], abc.ABC):
    """Converts jaxprs; one for each call of an autocast function.

    Args:
      rules: the rules, with the compute dtype of a device.
      casts: the class that makes and casts values.

    Attributes:
      rules: the rules.
      lookup: the rules, by path.
      casts: makes and casts values.
      uses: the readers of each value.
      labels: replaces the gathers of labels.
      records: the decisions, in order.
      passes: the number of loops, calls or gathers that each pass has changed.
      is_in_rule: whether a ``custom_jvp`` rule runs.
    """

    is_in_rule = False

    def __init__(self, rules: Rules, casts: type[Casts] = Casts) -> None:
        self.rules = rules
        self._start_memories()
        self.casts = casts(self.lookup.low_dtype)
        self.records: Records = []
        self.passes = Counter[str]()

    def _start_memories(self) -> None:
        self.lookup = RuleLookup(self.rules)
        self.uses = UseAnalysis(self.lookup)
        self.labels = LabelGathers()
        self._memo: dict[object, tuple[Jaxpr, dict[InputFacts, Converted]]] = {}

    @contextlib.contextmanager
    def recording(self) -> Generator[Records]:
        """Yields the list of decisions that are made inside of the block."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            self.records = outer

    @contextlib.contextmanager
    def rule(self) -> Generator[None]:
        """Runs the block as a ``custom_jvp`` rule."""
        outer, self.is_in_rule = self.is_in_rule, True
        try:
            yield
        finally:
            self.is_in_rule = outer

    # ---------------------------------------------------------------------- values

    def constant(self, var: Var, array: Array) -> Value:
        """Returns the value of a constant."""
        return self.casts.constant(var, array)

    def literal(self, atom: Literal) -> Value:
        """Returns the value of a literal."""
        return self.casts.literal(atom)

    def form(self, value: Value) -> Spec:
        """Returns the state and the kind of a value."""
        return value.spec

    def join(self, forms: Sequence[Spec]) -> Spec:
        """Returns the spec of a value that has one of several specs."""
        states = [form.state for form in forms if form.state is not None]
        kinds = {form.kind for form in forms}
        dtypes = {form.held for form in forms}
        kind = kinds.pop() if len(kinds) == 1 else Kind.COMPUTED
        held = dtypes.pop() if len(dtypes) == 1 else None
        return Spec(max(states, default=None), kind, held)

    def unpack(self, value: Value, form: Spec) -> tuple[Array]:
        """Returns the array of a value, cast to a spec."""
        if form.held is not None:
            return (self.casts.narrowed(value, form.held),)
        is_low = form.state is State.LOW
        return ((self.casts.low if is_low else self.casts.full)(value),)

    def pack(self, arrays: Sequence[Array], form: Spec) -> Value:
        """Returns an array as a value with a spec."""
        return Value(arrays[0], *form)

    def cast_to_spec(self, value: Value, spec: Spec) -> Value:
        """Returns a value cast to a spec, without its lineage."""
        result = self.pack(self.unpack(value, spec), spec)
        result.origin = value.origin
        return result

    def converted(
        self, eqn: Eqn, values: Sequence[Value], forms: Sequence[Spec]
    ) -> list[Value]:
        """Returns carries cast to specs; the loop is the origin of a changed value."""
        results = list(map(self.cast_to_spec, values, forms))
        for result, value in zip(results, values, strict=True):
            if result.state is not value.state:
                result.origin = eqn
        return results

    # ------------------------------------------------------------------ conversion

    def body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Value],
        site: Site,
        required: Sequence[Spec] = (),
        name: str | None = None,
    ) -> Converted:
        """Returns a jaxpr in mixed precision; see ``Evaluator``.

        A jaxpr with the same rules, operands and readers is converted once, so a block
        that is called many times is lowered once. A function of one 16-bit value may
        extend across a mere call. For example, a norm calls ``jnp.var``, which is a
        ``jit``.
        """
        path, is_call = source.join(site.path, name or ""), name is not None
        readers = tuple(self.uses.readers_of_outputs(jaxpr, site.readers))
        rules = self.lookup.rules_inside(jaxpr, path)
        key = (id(jaxpr), readers, rules, self.is_in_rule, tuple(required))
        # The jaxpr is stored with the result, so that its id is not reused.
        _, known = self._memo.setdefault(key, (jaxpr, {}))
        inside = lineages.enter_call if is_call else lineages.enter_others
        given = tuple(map(self.form, operands)), inside(operands)
        if given not in known:
            new = self._convert(jaxpr, given, Site(path, readers), required, is_call)
            if name and "upcasts" in self.rules.passes:
                new = self._upcast_outside(new)
                # A checkpoint would save an upcast input in float32.
                ops = (params.op_of(eqn) for eqn, _ in equations(jaxpr))
                if not any(op in params.REMAT for op in ops):
                    new = _shared(new, given[0], known)
            known[given] = new
        return known[given]

    def _convert(
        self,
        jaxpr: Jaxpr,
        given: InputFacts,
        site: Site,
        required: Sequence[Spec],
        is_call: bool,
    ) -> Converted:
        """Returns the jaxpr in mixed precision for operands in these states."""
        specs, of_operands = given
        # Not the values, whose tracers end with this trace.
        unforced: list[Spec] = []
        origins: list[Origin] = []
        found: list[Lineage | None] = []

        def run(*arrays: Array) -> list[Array]:
            values = self._inputs(arrays, specs)
            for value, lineage in zip(values, of_operands, strict=True):
                value.lineage = lineage
            results = self.run(jaxpr, values, site)
            if not is_call:
                results = self.leave_functions(results, site.readers)
            unforced[:] = map(self.form, results)
            origins[:] = [value.origin for value in results]
            found[:] = [
                Lineage(value.roots, value.is_rejoined) if value.has_lineage else None
                for value in results
            ]
            return self.unpack_all(results, _required(unforced, required))

        invars = structure.parts(jaxpr).invars
        avals = [
            structure.type_of(var)
            if spec.state is None
            else structure.retyped(var.aval, spec.dtype(self.casts.low_dtype))
            for var, spec in zip(invars, specs, strict=True)
        ]
        with self.recording() as records:
            traced = structure.trace(run, avals, jaxpr)
        made = _required(unforced, required)
        return Converted(
            jaxpr=traced,
            given=specs,
            made=tuple(made),
            unforced=tuple(unforced),
            origins=origins,
            records=records,
            lineages=found if is_call else lineages.leave_others(made, found),
        )

    def _inputs(self, arrays: Sequence[Array], specs: Sequence[Spec]) -> list[Value]:
        """Returns the inputs of a jaxpr as values."""
        values = self.pack_all(arrays, specs)
        for i, value in enumerate(values):
            value.origin = Input(i)
        return values

    def _upcast_outside(self, new: Converted) -> Converted:
        """Returns a conversion whose caller casts some inputs to float32.

        These are the inputs that the jaxpr only casts to float32.
        """
        # The upcast is outside, once, so the gradients of all uses add up in float32.
        are_low = {i for i, spec in enumerate(new.given) if spec.state is State.LOW}
        upcast = upcasts.find_upcast_inputs(new.jaxpr) & are_low
        self.passes["upcasts"] += bool(upcast)
        given = [
            Spec(State.SOFT, spec.kind) if i in upcast else spec
            for i, spec in enumerate(new.given)
        ]
        jaxpr = upcasts.upcast_inputs(new.jaxpr, upcast)
        return dataclasses.replace(new, jaxpr=jaxpr, given=tuple(given))

    def leave_functions(
        self, values: Sequence[Value], readers: Sequence[Readers]
    ) -> list[Value]:
        """Casts the results of functions of one 16-bit value to 16 bits.

        A value that its readers demand in float32 stays float32. So does one that a
        reader amplifies an error of, but it is no longer deliberate.
        """
        states = [State.SOFT if each.amplify else State.LOW for each in readers]
        return [
            self.casts.cast_to_state(value, state)
            if value.is_rejoined and not each.demand_float32
            else value
            for value, state, each in zip(values, states, readers, strict=True)
        ]

    # --------------------------------------------------------------------- results

    def collect_results(
        self,
        eqn: Eqn,
        bodies: Sequence[tuple[Converted, Sequence[Value]]],
        arrays: Sequence[Array],
        number: int = 0,
    ) -> list[Value]:
        """Returns the results of an equation, and records the decisions inside."""
        for body, operands in bodies:
            origins = [value.origin for value in operands]
            times = params.trips(eqn)
            self.records.append(RecordsInside(eqn, body.records, origins, times))
        body, operands = bodies[number]
        values = self.pack_all(arrays, body.made)
        for value, origin in zip(values, body.origins, strict=True):
            value.origin = origin_outside(origin, operands)
        if body.lineages:
            found = lineages.leave_call(body.lineages, operands)
            for value, lineage in zip(values, found, strict=True):
                value.lineage = lineage
        return values


def _required(made: Sequence[Spec], required: Sequence[Spec]) -> list[Spec]:
    """Returns specs, with the required ones in place of the first."""
    return [*required, *made[len(required) :]]


def _shared(
    new: Converted, states: Sequence[Spec], known: Mapping[InputFacts, Converted]
) -> Converted:
    """Returns a conversion, with the jaxpr of an earlier equivalent one.

    The first block of a stack has a float32 input, and the others have 16-bit inputs.
    If each equation runs alike in both conversions, the caller casts the input of the
    others to float32, and JAX lowers all blocks as one function.
    """
    for (others, _), old in known.items():
        are_upcast = all(
            (mine.state, other.state) == (State.LOW, State.SOFT)
            and mine.kind.is_cast_once
            and other.kind.is_cast_once
            and other.held is None
            for mine, other in zip(states, others, strict=True)
            if mine != other
        )
        is_same = old.made == new.made and run_alike(old.records, new.records)
        if are_upcast and is_same:
            return dataclasses.replace(new, jaxpr=old.jaxpr, given=old.given)
    return new


def origin_outside(origin: Origin, operands: Sequence[Value]) -> Origin:
    """Returns the origin outside of a jaxpr for an origin inside of it."""
    return operands[origin.number].origin if isinstance(origin, Input) else origin
