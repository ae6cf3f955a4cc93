"""Runs a jaxpr equation by equation: each is decided first and then evaluated."""

import contextlib
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from jmp_lite.autocasting.interpreter.carries import unrolled
from jmp_lite.autocasting.interpreter.casts import Casts
from jmp_lite.autocasting.interpreter.control_flow import start
from jmp_lite.autocasting.interpreter.conversion import Call
from jmp_lite.autocasting.interpreter.decide import decide
from jmp_lite.autocasting.interpreter.decisions import (
    DecisionRecord,
    Operand,
    RecordsInside,
    Run,
)
from jmp_lite.autocasting.interpreter.evaluate import evaluate
from jmp_lite.autocasting.interpreter.handlers import HANDLERS
from jmp_lite.autocasting.interpreter.lookup import RuleLookup
from jmp_lite.autocasting.interpreter.scopes import Regions
from jmp_lite.autocasting.interpreter.uses import UseAnalysis, union
from jmp_lite.autocasting.interpreter.values import Readers, Value
from jmp_lite.autocasting.jaxprs import compat
from jmp_lite.autocasting.rules.rules import Rules


class Interpreter:
    """Runs jaxprs under rules; one for each call of an autocast function.

    Args:
      rules: the rules, with the compute dtype of a device.

    Attributes:
      rules: the same.
      at: what they say, by path.
      casts: what makes and casts values.
      uses: who reads each value.
      memo: the converted jaxprs.
      records: what was decided, in order.
      results: what stood for the results of the function, once all was run.
      passes: how many loops or calls each pass has changed.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.at = RuleLookup(rules)
        self.casts = Casts(self.at.low_dtype)
        self.uses = UseAnalysis(self.at)
        self.memo: dict[Any, Any] = {}
        self.records: list[DecisionRecord | RecordsInside] = []
        self.results: list[Operand] = []
        self.passes = Counter[str]()

    def record(self, item: DecisionRecord | RecordsInside) -> None:
        """Adds a decision to the records."""
        self.records.append(item)

    def note_pass(self, name: str, has_changed: bool) -> None:
        """Counts a pass that has changed something."""
        self.passes[name] += has_changed

    @contextlib.contextmanager
    def recording(self) -> Generator[list[DecisionRecord | RecordsInside]]:
        """Yields the list of what is decided inside, apart from what was before."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            self.records = outer

    def run_function(self, traced: Any, arrays: Sequence[Any]) -> list[Any]:
        """Runs a traced function, and returns its results in their traced dtypes.

        Args:
          traced: its jaxpr, closed.
          arrays: its arguments.
        """
        parts = compat.parts(traced)
        values = [
            self.casts.given(var, array, "an argument")
            for var, array in zip(parts.invars, arrays, strict=True)
        ]
        outside = [Readers.OUTPUT] * len(parts.outvars)
        results = self.run(traced, values, outside, "")
        self.results = list(map(_operand, results))
        return [
            compat.as_typed(self.casts.full(value), var.aval)
            for value, var in zip(results, parts.outvars, strict=True)
        ]

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        outside: Sequence[Readers],
        path: str,
        region: str | None = None,
    ) -> list[Value]:
        """Runs a jaxpr.

        Args:
          jaxpr: a jaxpr, closed or open.
          values: what stands for its inputs.
          outside: the readers of its outputs.
          path: the scopes that it stands in.
          region: the ``FULL_INSIDE`` scope that it is called from, if any.
        """
        parts = compat.parts(jaxpr)
        readers = self.uses.variables(jaxpr, outside, path)
        env: dict[Any, Value] = {}
        for var, const in zip(parts.constvars, parts.consts, strict=True):
            env[var] = self.casts.constant(var, const)
        env.update(zip(parts.invars, values, strict=True))
        regions = Regions(self, parts, path, readers, outside)
        starts = unrolled(parts)

        def read(atom: Any, region: str | None) -> Value:
            if compat.is_literal(atom):
                return self.casts.literal(atom)
            if env[atom].region not in (None, region):
                env[atom] = regions.leave(atom, env[atom])
            return env[atom]

        for eqn in parts.eqns:
            where = compat.join(path, *compat.scopes(eqn))
            here = self.at.region(where)
            wanted = [readers[var] or Readers.OUTPUT for var in eqn.outvars]
            with compat.context_of(eqn):
                operands = [read(atom, here) for atom in eqn.invars]
                if here:
                    operands = regions.enter(operands)
                if id(eqn) in starts:
                    call, loop = Call(eqn, operands, wanted, where), starts[id(eqn)]
                    last = [readers[v] or Readers.OUTPUT for v in loop.last.outvars]
                    operands = start(self, loop, call, last)
                results = self._equation(Call(eqn, operands, wanted, where))
            is_from_low = any(value.is_from_low for value in operands)
            for var, result in zip(eqn.outvars, results, strict=True):
                if here and result.state is not None:
                    result.region, result.is_from_low = here, is_from_low
                env[var] = result
        return [read(atom, region) for atom in parts.outvars]

    def _equation(self, call: Call) -> list[Value]:
        """Decides and evaluates one equation."""
        eqn, operands, wanted, path = call
        op = compat.op_of(eqn)
        if op in HANDLERS:
            return HANDLERS[op](self, call)
        given = list(map(_operand, operands))
        decision = decide(self.at, eqn, given, union(wanted), path)
        given = tuple(one for one in given if one.state is not None)
        origin = None if decision.leader is None else given[decision.leader].origin
        if decision.run is not Run.PASS:
            self.record(DecisionRecord(eqn, decision, origin, operands=given))
        made_by = eqn if origin is None else origin
        return evaluate(self.casts, eqn, operands, decision, made_by)


def _operand(value: Value) -> Operand:
    return Operand(value.state, value.kind, value.origin, np.shape(value.array))
