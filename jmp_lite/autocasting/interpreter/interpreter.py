"""Runs a function under rules: for each equation the decision, then the evaluation."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jmp_lite.autocasting.decide.decisions import (
    Decision,
    DecisionRecord,
    Operand,
    Operands,
    Run,
)
from jmp_lite.autocasting.decide.equation import decide, decide_to_keep
from jmp_lite.autocasting.decide.facts import Argument, Lineage, Readers, State
from jmp_lite.autocasting.decide.function import is_inside_function, lineage_of
from jmp_lite.autocasting.decide.readers import readers_of_floats, readers_of_results
from jmp_lite.autocasting.interpreter import custom_rules
from jmp_lite.autocasting.interpreter.conversion import Converted, Site
from jmp_lite.autocasting.interpreter.evaluate import evaluate
from jmp_lite.autocasting.interpreter.loops import LoopConverter
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.rules.rules import requested_formats
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.evaluate import Frame
from jmp_lite.jaxprs.params import PRODUCTS
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, Var
from jmp_lite.ops import HIGHER_ORDER, PASSING, Precision


class Interpreter(LoopConverter):
    """Runs jaxprs under rules; one for each call of an autocast function.

    Attributes:
      results: the results of the function as operands, after the run.
    """

    results: Sequence[Operand] = ()

    def run_function(
        self,
        traced: Jaxpr,
        arrays: Sequence[Array],
        paths: Sequence[str] = (),
        types: Sequence[Aval] = (),
    ) -> list[Array]:
        """Runs a traced function, and returns its results.

        Args:
          traced: its jaxpr, closed.
          arrays: its arguments. Some that were traced in float32 may have 16 bits.
          paths: the path of each argument.
          types: the types of its results; by default their traced types.
        """
        parts = structure.parts(traced)
        values = [
            self.casts.given(var, array, Argument(path))
            for var, array, path in zip(
                parts.invars, arrays, paths or [""] * len(arrays), strict=True
            )
        ]
        readers = [Readers.OUTPUT] * len(parts.outvars)
        results = self.run(traced, values, Site("", readers))
        self.results = list(map(_operand, results))
        # A derivative rule in a remembered jaxpr refers to this object: a cycle, which
        # would keep the captured arrays alive.
        self._start_memories()
        types = types or [var.aval for var in parts.outvars]
        return [
            structure.as_typed(self.casts.typed(value, aval), aval)
            for value, aval in zip(results, types, strict=True)
        ]

    def frame(
        self, jaxpr: Jaxpr, operands: Sequence[Value], site: Site
    ) -> "_InterpreterFrame":
        """Returns the values of a jaxpr before it runs."""
        return _InterpreterFrame(self, jaxpr, operands, site)

    def step(self, eqn: Eqn, operands: Sequence[Value], site: Site) -> Sequence[Value]:
        """Runs an equation of any kind."""
        if decision := decide_to_keep(self.lookup, eqn, site.path):
            return self._keep(eqn, operands, decision)
        return super().step(eqn, operands, site)

    def equation(
        self, eqn: Eqn, operands: Sequence[Value], site: Site
    ) -> Sequence[Value]:
        """Decides and evaluates an equation that contains no jaxpr to convert."""
        given = Operands.collect(list(map(_operand, operands)))
        readers = readers_of_floats(eqn, site.readers)
        if self.is_in_rule:
            readers |= Readers.TRANSPOSED
        decision = decide(self.lookup, eqn, given, readers, site.path)
        origin = None if decision.leader is None else decision.leader.origin
        if decision.run is not Run.PASS:
            record = DecisionRecord(eqn, decision, origin, operands=given.floats)
            self.records.append(record)
        made_by = eqn if origin is None else origin
        results = evaluate(self.casts, eqn, operands, decision, made_by)
        lineage = lineage_of(decision, given.floats)
        for result in results:
            if result.state is not None and result.lineage is None:
                result.lineage = lineage
        return results

    def _keep(
        self, eqn: Eqn, operands: Sequence[Value], decision: Decision
    ) -> list[Value]:
        """Binds an equation, and everything inside of it, as traced."""
        self.records.append(DecisionRecord(eqn, decision))
        arrays = params.bind(eqn, [self.casts.full(value) for value in operands])
        pairs = zip(eqn.outvars, arrays, strict=True)
        states = [
            (array, State.HARD if structure.is_float32(var) else None)
            for var, array in pairs
        ]
        return [Value(array, state, origin=eqn) for array, state in states]

    def bind_call(
        self, eqn: Eqn, arrays: Sequence[Array], body: Converted
    ) -> Sequence[Array]:
        """Binds a call.

        A checkpoint also saves the values that ``NumberFormat.saved`` names, such as
        the scales of float8: one number for each operand.
        """
        if params.op_of(eqn) not in params.REMAT:
            return super().bind_call(eqn, arrays, body)
        requested = requested_formats(self.rules)
        saved = [name for one in requested for name in one.saved] if requested else None
        return params.bind_remat(eqn, arrays, body.jaxpr, saved)

    def custom(
        self, eqn: Eqn, operands: Sequence[Value], site: Site
    ) -> Sequence[Value]:
        """Runs a function with rules of its own."""
        return custom_rules.run(self, eqn, operands, site)

    def shard_map(
        self, eqn: Eqn, operands: Sequence[Value], site: Site
    ) -> Sequence[Value]:
        """Runs the function of each device, mapped again."""
        jaxpr, call = params.body_of(eqn), params.shard_map_of(eqn)
        operands = [
            self.cast_to_spec(value, value.spec._replace(held=None))
            if value.held is not None and call.adds_up_gradient(i)
            else value
            for i, value in enumerate(operands)
        ]
        given = tuple(map(self.form, operands))
        # Not the values, whose tracers end with the trace.
        inside: list[Converted] = []
        with self.recording() as records:

            def run(*arrays: Array) -> list[Array]:
                results = self.run(jaxpr, self._inputs(arrays, given), site)
                results = self.leave_functions(results, site.readers)
                made = tuple(map(self.form, results))
                origins = [value.origin for value in results]
                inside[:] = [Converted(jaxpr, given, made, made, origins, records)]
                return self.unpack_all(results, made)

            mapped = call.map(run, call.in_specs, call.out_specs)
            arrays = mapped(*self.unpack_all(operands, given))
        return self.collect_results(eqn, [(inside[0], operands)], arrays)


class _InterpreterFrame(Frame[Value, Site]):
    """The values of one jaxpr while it runs."""

    def __init__(
        self,
        converter: Interpreter,
        jaxpr: Jaxpr,
        operands: Sequence[Value],
        site: Site,
    ) -> None:
        super().__init__(converter, jaxpr, operands, site)
        self._converter = converter
        if "labels" in converter.rules.passes:
            self.parts = self._replace_label_gathers()
        self._readers: Mapping[Var, Readers] = converter.uses.variables(
            jaxpr, site.readers, site.path
        )
        self._left: dict[Var, Value] = {}
        self._count_readers(self.parts.invars, operands)

    def _replace_label_gathers(self) -> structure.Parts:
        at, labels = self._converter.lookup, self._converter.labels

        def is_kept(eqn: Eqn) -> bool:
            path = source.join(self.site.path, *source.scopes(eqn))
            return at.match("gather", path).precision is Precision.KEEP

        before = labels.n_replaced
        parts = labels.replaced(self.parts, is_kept)
        self._converter.passes["labels"] += labels.n_replaced - before
        return parts

    def _count_readers(self, variables: Sequence[Var], values: Sequence[Value]) -> None:
        """Finds out which held values are shared; see ``Value``."""
        for var, value in zip(variables, values, strict=True):
            if value.held is None:
                continue
            n, is_stored = self._n_readers[var], value.held.itemsize < 2
            is_read_twice = n > 1 and not self._readers[var].take_16_bits
            has_gradient = jnp.issubdtype(value.held, jnp.floating)
            value.is_shared = is_read_twice and has_gradient if is_stored else n > 2

    def _raised(self, var: Var, value: Value) -> Value:
        """Returns a 16-bit value that several float32 ops alone read in float32.

        In ``h / norm(where(h != 0, h, 1))`` each would upcast it, or a choice of it.
        The gradients of the upcasts would be rounded before they are added. Where they
        cancel, little would be left.
        """
        if value.state is not State.LOW or self._n_readers[var] < 2:
            return value
        if not self._readers[var].demand_float32:
            return value
        full = Value(self._converter.casts.full(value), State.HARD, value.kind)
        full.origin, full.lineage = value.origin, Lineage(value.roots)
        return full

    @functools.cached_property
    def _n_readers(self) -> Counter[Var]:
        atoms = (atom for eqn in self.parts.eqns for atom in eqn.invars)
        return Counter(atom for atom in atoms if not structure.is_literal(atom))

    def enter(self, eqn: Eqn) -> tuple[Sequence[Value], Site]:
        """Returns the operands of an equation, and its site."""
        path = source.join(self.site.path, *source.scopes(eqn))
        operands = list(map(self.read, eqn.invars))
        of_results = [self._readers[var] for var in eqn.outvars]
        readers = readers_of_results(eqn, of_results)
        if any(value.is_rejoined for value in operands):
            operands = self._leave_functions(eqn, operands, readers)
        return operands, Site(path, readers)

    def _leave_functions(
        self, eqn: Eqn, operands: Sequence[Value], readers: Sequence[Readers]
    ) -> Sequence[Value]:
        """Returns the operands of an op that ends functions of one 16-bit value.

        The results of such functions have 16 bits there, even if the op is float32.
        Otherwise the result of a norm that a product and a loss read would be stored
        twice, in 16 bits and in float32.
        """
        op = params.op_of(eqn)
        if op in _CUSTOM_OR_CONTROL:
            of_operands = self._converter.uses.equation_facts(
                eqn, readers, self.site.path
            )
            return self._converter.leave_functions(operands, of_operands)
        floats = [_operand(value) for value in operands if value.state is not None]
        is_low = not readers_of_floats(eqn, readers).demand_float32
        if is_low or op in _READ_AS_THEY_ARE or is_inside_function(op, floats):
            return operands
        found = list(operands)
        for i, (atom, value) in enumerate(zip(eqn.invars, operands, strict=True)):
            if value.is_rejoined:
                if atom not in self._left:
                    of_value = [self._readers[atom]]
                    (left,) = self._converter.leave_functions([value], of_value)
                    self._left[atom] = left
                found[i] = self._left[atom]
        return found

    def write(self, eqn: Eqn, results: Sequence[Value]) -> None:
        """Stores the results of an equation."""
        results = list(map(self._raised, eqn.outvars, results))
        super().write(eqn, results)
        self._count_readers(eqn.outvars, results)


_CUSTOM_OR_CONTROL = frozenset([*params.CUSTOM, *params.CONTROL])

_READ_AS_THEY_ARE = HIGHER_ORDER | PASSING | PRODUCTS | {"convert_element_type"}
"""Ops that end no function: calls, and ops that cast their operands themselves."""


def _operand(value: Value) -> Operand:
    lineage = Lineage(value.roots, value.is_rejoined)
    shape = structure.shape_of(value.array)
    return Operand(value.state, value.kind, value.origin, shape, lineage, value.held)
