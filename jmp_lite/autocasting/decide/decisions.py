"""Decisions as data: how an equation runs, and why; the plan of a jaxpr.

A reason is a code. Only ``insight/rows.py`` has its text.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jmp_lite.autocasting.decide.facts import (
    Facts,
    Lineage,
    Origin,
    Readers,
    Spec,
    State,
)
from jmp_lite.autocasting.rules.match import RuleMatch
from jmp_lite.formats.number_format import LOW, QUALIFIES, NumberFormat, Verdict
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.types import Dtype, Eqn, Jaxpr


class Run(enum.Enum):
    """The dtype that an equation runs in.

    ``LOW``: the compute dtype. ``FULL``: float32. ``AS_TRACED``: the dtypes of the
    trace. ``PASS``: each result is its operand, in its state.
    """

    LOW = "low"
    FULL = "full"
    AS_TRACED = "as traced"
    PASS = "pass"


class Reason(enum.Enum):
    """The reason of a decision for an equation or for a carry."""

    # The rules alone decide; for an equation, the decision's ``match`` is the rule.
    RULE = enum.auto()
    # What a product is, or who reads it; FORMAT: see the decision's verdict.
    HIGHEST_PRECISION = enum.auto()
    DIGITS = enum.auto()
    PHASE = enum.auto()
    LOOKUP = enum.auto()
    SPREAD = enum.auto()
    SMALL = enum.auto()
    FORMAT = enum.auto()
    # The equation itself decides.
    NOT_FLOAT32 = enum.auto()
    OPAQUE = enum.auto()
    OTHER_FLOATS = enum.auto()
    RANDOM = enum.auto()
    PASSES_ON = enum.auto()
    POSITION = enum.auto()
    CAST = enum.auto()
    # Its operands and its readers decide.
    MOVES_16_BITS = enum.auto()
    ROUNDS_NOTHING = enum.auto()
    READ_IN_FLOAT32 = enum.auto()
    AMPLIFIED = enum.auto()
    ONE_FUNCTION = enum.auto()
    FOLLOWS = enum.auto()
    UNDECIDED = enum.auto()
    # Equations that run as traced, with everything inside of them.
    INSIDE = enum.auto()
    ITERATES = enum.auto()
    # Carries of loops.
    CARRY_PRODUCTS = enum.auto()
    CARRY_LAYERS = enum.auto()
    CARRY_STATE = enum.auto()
    CARRY_RESULT = enum.auto()


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one equation runs, the state of its float32 results, and the reason.

    Attributes:
      run: the dtype that it runs in.
      state: the state of its float32 results; None if it has none.
      reason: the reason.
      leader: the operand that decided; None if none did.
      match: the rule that decided; None if the equation itself, its operands or its
        readers did.
      within: the op around this equation whose jaxpr runs as traced.
      requested: the number format that the rules request for a low product.
      verdict: whether the product qualifies for this format; if not, it is ``low``.
      held: the 16-bit dtype that a move runs in, and its result has, although it was
        traced in float32. Its derivative is float32, even if the result is LOW.
      lowers_sum: whether its derivative, a sum over devices, runs in ``held``, too.
      keeps_slope: whether its derivative is computed from its operand; see
        ``passes/slopes.py``.
    """

    run: Run
    state: State | None
    reason: Reason
    leader: Facts | None = None
    match: RuleMatch | None = None
    within: str = ""
    requested: NumberFormat = LOW
    verdict: Verdict = QUALIFIES
    held: Dtype | None = None
    lowers_sum: bool = False
    keeps_slope: bool = False

    @property
    def number_format(self) -> NumberFormat:
        """The number format of a low product."""
        return self.requested if self.verdict.qualifies else LOW


class Site(NamedTuple):
    """The site of an equation, or of a jaxpr.

    Attributes:
      path: its path.
      readers: the readers of its results.
      is_in_rule: whether it is in a ``custom_jvp`` rule, which JAX transposes.
    """

    path: str
    readers: Sequence[Readers]
    is_in_rule: bool = False


class Carry(NamedTuple):
    """How a carry of a loop is kept between two steps.

    Attributes:
      number: its number.
      decision: the decision.
      raised_by: the origin of the value that makes it float32; None if none does.
    """

    number: int
    decision: Decision
    raised_by: Origin


class Step(NamedTuple):
    """How one equation runs.

    Attributes:
      eqn: the equation.
      site: its site.
      operands: the facts of its operands, as it reads them.
      results: the facts of its results.
      raised: the numbers of the results that are cast to float32 once, for all readers.
      decision: how it runs; None if the ops inside of it are decided one by one.
      inside: the plans of its jaxprs: the branches of a cond, the condition and the
        body of a while, or the only one.
      origins: for each of these, the origins of its inputs.
      carries: the carries of a loop that are floats.
    """

    eqn: Eqn
    site: Site
    operands: Sequence[Facts]
    results: Sequence[Facts]
    raised: frozenset[int] = frozenset()
    decision: Decision | None = None
    inside: "Sequence[Plan]" = ()
    origins: Sequence[Sequence[Origin]] = ()
    carries: Sequence[Carry] = ()


@dataclasses.dataclass(eq=False)
class Plan:
    """How a jaxpr runs.

    Attributes:
      jaxpr: the jaxpr.
      parts: its parts, after the passes over it.
      inputs: the facts of its inputs.
      constants: the facts of its constants.
      steps: one for each equation.
      results: the facts of its results.
      made: the specs to which its results are cast.
      lineages: the lineages of the results, as ``leave_call`` reads them.
      name: the name of the function that it is, if an equation only calls it.
      others: the plans of the same jaxpr for operands with other facts.
    """

    jaxpr: Jaxpr
    parts: structure.Parts
    inputs: Sequence[Facts]
    constants: Sequence[Facts]
    steps: Sequence[Step]
    results: Sequence[Facts]
    made: Sequence[Spec] = ()
    lineages: Sequence[Lineage | None] = ()
    name: str = ""
    others: "Mapping[object, Plan]" = dataclasses.field(default_factory=dict)

    @property
    def given(self) -> tuple[Spec, ...]:
        """The specs of its inputs."""
        return tuple(facts.spec for facts in self.inputs)

    def __str__(self) -> str:
        """Returns a line for each step: the states, how it runs, and why."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for step in self.steps:
            op, decision = params.op_of(step.eqn), step.decision
            states = [
                ", ".join("-" if f.state is None else f.state.name for f in values)
                for values in (step.operands, step.results)
            ]
            raised = ", raised" if step.raised else ""
            line = f"{op}({states[0]}) -> {states[1]}{raised}"
            how = "enters" if decision is None else decision.run.value
            why = "" if decision is None else decision.reason.name
            yield f"{line:46} {how:8} {why}".rstrip()
            for plan in step.inside:
                yield from (f"  {line}" for line in plan._lines())


def run_alike(some: Plan, others: Plan) -> bool:
    """Whether the equations of two jaxprs run alike, whatever the reasons."""

    def key(step: Step) -> object:
        decided = [carry.decision for carry in step.carries]
        if step.decision is not None and step.decision.run is not Run.PASS:
            decided = [step.decision]
        # Undecided and deliberate float32 are one dtype.
        how = [(d.run, d.state is State.LOW, d.held, d.number_format) for d in decided]
        return step.eqn, how, len(step.inside)

    return list(map(key, some.steps)) == list(map(key, others.steps)) and all(
        run_alike(one, other)
        for mine, its in zip(some.steps, others.steps, strict=True)
        for one, other in zip(mine.inside, its.inside, strict=True)
    )
