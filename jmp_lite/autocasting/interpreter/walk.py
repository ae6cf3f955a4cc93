"""Runs a jaxpr equation by equation: first the decision, then the evaluation."""

import contextlib
from collections import Counter
from collections.abc import Generator, Sequence

from jmp_lite.autocasting.decide.decisions import (
    DecisionRecord,
    Operand,
    RecordsInside,
    Run,
)
from jmp_lite.autocasting.decide.equation import decide, lineage_of
from jmp_lite.autocasting.decide.facts import Argument, Lineage, Readers
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.readers import UseAnalysis, of_floats
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.conversion import (
    Call,
    Converted,
    Given,
    leave_functions,
)
from jmp_lite.autocasting.interpreter.evaluate import evaluate
from jmp_lite.autocasting.interpreter.handlers import HANDLERS
from jmp_lite.autocasting.interpreter.scopes import Regions
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, Var


class Interpreter:
    """Runs jaxprs under rules; one for each call of an autocast function.

    Args:
      rules: the rules, with the compute dtype of a device.
      casts: the class that makes and casts values.

    Attributes:
      rules: the rules.
      at: the rules, by path.
      casts: makes and casts values.
      uses: the readers of each value.
      memo: the converted jaxprs.
      records: the decisions, in order.
      results: the results of the function as operands, after the run.
      passes: the number of loops or calls that each pass has changed.
    """

    def __init__(self, rules: Rules, casts: type[Casts] = Casts) -> None:
        self.rules = rules
        self._start_memories()
        self.casts = casts(self.at.low_dtype)
        self.records: list[DecisionRecord | RecordsInside] = []
        self.results: list[Operand] = []
        self.passes = Counter[str]()

    def _start_memories(self) -> None:
        self.at = RuleLookup(self.rules)
        self.uses = UseAnalysis(self.at)
        self.memo: dict[object, tuple[Jaxpr, dict[Given, Converted]]] = {}

    def record(self, item: DecisionRecord | RecordsInside) -> None:
        """Adds a decision to the records."""
        self.records.append(item)

    def note_pass(self, name: str, has_changed: bool) -> None:
        """Counts a pass that has changed something."""
        self.passes[name] += has_changed

    @contextlib.contextmanager
    def recording(self) -> Generator[list[DecisionRecord | RecordsInside]]:
        """Yields the list of decisions that are made inside of the block."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            self.records = outer

    def run_function(
        self, traced: Jaxpr, arrays: Sequence[Array], paths: Sequence[str] = ()
    ) -> list[Array]:
        """Runs a traced function, and returns its results in their traced dtypes.

        Args:
          traced: its jaxpr, closed.
          arrays: its arguments.
          paths: the path of each argument.
        """
        parts = structure.parts(traced)
        values = [
            self.casts.given(var, array, Argument(path))
            for var, array, path in zip(
                parts.invars, arrays, paths or [""] * len(arrays), strict=True
            )
        ]
        outside = [Readers.OUTPUT] * len(parts.outvars)
        results = self.run(traced, values, outside, "")
        self.results = list(map(_operand, results))
        # A derivative rule in a remembered jaxpr refers to this object: a cycle, which
        # would keep the captured arrays alive.
        self._start_memories()
        return [
            structure.as_typed(self.casts.full(value), var.aval)
            for value, var in zip(results, parts.outvars, strict=True)
        ]

    def run(
        self,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        outside: Sequence[Readers],
        path: str,
        region: str | None = None,
    ) -> list[Value]:
        """Runs a jaxpr.

        Args:
          jaxpr: a jaxpr, closed or open.
          values: the values of its inputs.
          outside: the readers of its outputs.
          path: its path.
          region: the ``FULL_INSIDE`` scope of the caller, or None.
        """
        frame = _Frame(self, jaxpr, values, outside, path)
        for eqn in frame.parts.eqns:
            where = source.join(path, *source.scopes(eqn))
            here = self.at.region(where)
            with source.context_of(eqn):
                call = frame.call_of(eqn, where, here)
                results = self._equation(call)
            frame.write(call, results, here)
        return [frame.read(atom, region) for atom in frame.parts.outvars]

    def _equation(self, call: Call) -> list[Value]:
        """Decides and evaluates one equation."""
        eqn, operands, result_readers, path = call
        op = params.op_of(eqn)
        if op in HANDLERS:
            return HANDLERS[op](self, call)
        given = list(map(_operand, operands))
        decision = decide(self.at, eqn, given, of_floats(eqn, result_readers), path)
        given = tuple(one for one in given if one.state is not None)
        origin = None if decision.leader is None else given[decision.leader].origin
        if decision.run is not Run.PASS:
            self.record(DecisionRecord(eqn, decision, origin, operands=given))
        made_by = eqn if origin is None else origin
        results = evaluate(self.casts, eqn, operands, decision, made_by)
        lineage = lineage_of(decision, given)
        for result in results:
            if result.state is not None and result.lineage is None:
                result.lineage = lineage
        return results


class _Frame:
    """The values of one jaxpr while it runs.

    Args:
      walk: the interpreter.
      jaxpr: the jaxpr.
      values: the values of its inputs.
      outside: the readers of its outputs.
      path: its path.
    """

    def __init__(
        self,
        walk: Interpreter,
        jaxpr: Jaxpr,
        values: Sequence[Value],
        outside: Sequence[Readers],
        path: str,
    ) -> None:
        self.parts = structure.parts(jaxpr)
        self._walk = walk
        self._path = path
        self._readers = walk.uses.variables(jaxpr, outside, path)
        self._regions = Regions(walk, self.parts, path, self._readers, outside)
        self._env: dict[Var, Value] = {}
        for var, const in zip(self.parts.constvars, self.parts.consts, strict=True):
            self._env[var] = walk.casts.constant(var, const)
        self._env.update(zip(self.parts.invars, values, strict=True))

    def read(self, atom: Var, region: str | None) -> Value:
        """Returns the value of a variable for an equation in a scope.

        Args:
          atom: the variable, or a literal.
          region: the ``FULL_INSIDE`` scope of the equation, or None.
        """
        if structure.is_literal(atom):
            return self._walk.casts.literal(atom)
        value = self._env[atom]
        if value.region not in (None, region):
            value = self._env[atom] = self._regions.leave(atom, value)
        return value

    def call_of(self, eqn: Eqn, path: str, region: str | None) -> Call:
        """Returns an equation with its operands and the readers of its results."""
        operands = [self.read(atom, region) for atom in eqn.invars]
        if region:
            operands = self._regions.enter(operands)
        result_readers = [self._readers[var] or Readers.OUTPUT for var in eqn.outvars]
        is_entered = params.op_of(eqn) in HANDLERS and not params.is_call(eqn)
        if is_entered and any(value.is_rejoined for value in operands):
            readers = self._walk.uses.of_equation(eqn, result_readers, self._path)
            operands = leave_functions(self._walk, operands, readers)
        return Call(eqn, operands, result_readers, path)

    def write(self, call: Call, results: Sequence[Value], region: str | None) -> None:
        """Stores the results of an equation."""
        is_from_low = any(value.is_from_low for value in call.operands)
        for var, result in zip(call.eqn.outvars, results, strict=True):
            if region and result.state is not None:
                result.region, result.is_from_low = region, is_from_low
            self._env[var] = result


def _operand(value: Value) -> Operand:
    lineage = Lineage(value.roots, value.is_rejoined)
    shape = structure.shape_of(value.array)
    return Operand(value.state, value.kind, value.origin, shape, lineage)
