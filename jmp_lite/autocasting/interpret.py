"""Plans a traced function, and runs the plan."""

from collections.abc import Mapping, Sequence

from jmp_lite.autocasting.decide.facts import Facts, Readers
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.values import of_argument
from jmp_lite.autocasting.plan import Planner, Records, Site
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.autocasting.run import Runner
from jmp_lite.autocasting.values import Casts
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Array, Aval, Jaxpr


class Interpreter:
    """Runs a traced function under rules; one for each call of an autocast function.

    Args:
      rules: the rules, with the compute dtype of a device.
      casts: the class that casts values.

    Attributes:
      rules: the rules.
      records: the decisions, in order, after the run.
      results: the facts of the function's results, after the run.
    """

    records: Records
    results: Sequence[Facts] = ()

    def __init__(self, rules: Rules, casts: type[Casts] = Casts) -> None:
        self.rules = rules
        self._planner = Planner(rules)
        self._runner = Runner(self._planner, casts)

    @property
    def lookup(self) -> RuleLookup:
        """The rules, by path."""
        return self._planner.lookup

    @property
    def passes(self) -> Mapping[str, int]:
        """The number of loops, calls or gathers that each pass has changed."""
        return self._planner.passes

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
        dtypes = [
            structure.type_of_value(array).dtype if structure.is_float32(var) else None
            for var, array in zip(parts.invars, arrays, strict=True)
        ]
        paths = paths or [""] * len(arrays)
        inputs = list(map(of_argument, parts.invars, dtypes, paths))
        site = Site("", [Readers.OUTPUT] * len(parts.outvars))
        plan = self._planner.plan(traced, inputs, site)
        self.records, self.results = plan.records, plan.results
        results = self._runner.run(plan, arrays)
        # A derivative rule in a remembered jaxpr refers to this object: a cycle, which
        # would keep the captured arrays alive.
        self._runner.forget()
        types = types or [var.aval for var in parts.outvars]
        return [
            structure.as_typed(self._runner.casts.typed(value, aval), aval)
            for value, aval in zip(results, types, strict=True)
        ]
