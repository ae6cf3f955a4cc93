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

    # The program asks for it, as spectral transforms do: ``precision="highest"``.
    HIGHEST_PRECISION = enum.auto()
    # In bfloat16, 765 of 1,000 looked-up integers were wrong, and a Cholesky
    # factorization of a Gram matrix was NaN. A power of a matrix adds up errors.
    DIGITS = enum.auto()
    # Fourier features: bfloat16 rounds a phase near 3,000 to a multiple of 16.
    PHASE = enum.auto()
    # ``one_hot(ids) @ table`` is a table's row, whose digits float32 readers want.
    LOOKUP = enum.auto()
    # ``log(exp(a) @ exp(b))`` is infinite in float16 for exponents above 11.
    SPREAD = enum.auto()
    # For cost: XLA pads batches of 3 x 3 rotations to 8 x 8 in 16 bits on a GPU.
    SMALL = enum.auto()
    FORMAT = enum.auto()

    # The equation itself decides.

    # Integers, keys, float64, and what the user has cast to 16 bits.
    NOT_FLOAT32 = enum.auto()
    # A callback gets the dtypes of the trace. ``x.at[i].apply(f)`` has traced ``f``.
    OPAQUE = enum.auto()
    # After a Fourier transform operands are complex, and under x64 float64.
    OTHER_FLOATS = enum.auto()
    # Rounding a number in [1, 2) before 1 is subtracted makes infinite normals.
    RANDOM = enum.auto()
    # A cast from weak to strong float32 is no cast that a user has written.
    PASSES_ON = enum.auto()
    # Rotary embeddings: bfloat16 cannot tell position 257 from 256.
    POSITION = enum.auto()
    # Integers become float32: bfloat16 cannot count past 256.
    CAST = enum.auto()

    # Its operands and its readers decide.

    # A transposed 16-bit parameter, or a weight that FSDP gathers for a product.
    MOVES_16_BITS = enum.auto()
    # The mask of an attention: in 16 bits it moves half the bytes.
    ROUNDS_NOTHING = enum.auto()
    # A squared loss of numbers near 100 lost 18 % when 16 bits subtracted them.
    READ_IN_FLOAT32 = enum.auto()
    # ``log(1 - gate)`` is infinite if 16 bits round the gate to 1.
    AMPLIFIED = enum.auto()
    # A norm, a softplus or an elu, whatever its name: float32 inside, 16-bit outside.
    ONE_FUNCTION = enum.auto()
    # Arithmetic, relu and others, in the precision of the operand that wins.
    FOLLOWS = enum.auto()
    # Of parameters alone: an op of these must not widen a stream of 16 bits.
    UNDECIDED = enum.auto()

    # Equations that run as traced, with everything inside of them.

    # A product of a kernel: only ``explain`` looks inside, and makes such decisions.
    INSIDE = enum.auto()
    # A fixed point to 1e-5 took 11 steps in float32, and did not end in float16.
    ITERATES = enum.auto()

    # Carries of loops.

    # The hidden state of an LSTM: each product would cast it anyway.
    CARRY_PRODUCTS = enum.auto()
    # A transformer in a scan with remat kept 9.4 MB with a float32 stream, by hand 5.2.
    CARRY_LAYERS = enum.auto()
    # A running sum of 2,048 halves ended at 256 in bfloat16, and not at 1,026.
    CARRY_STATE = enum.auto()
    # SGD over batches in a scan has the products of a stack. Its result is returned.
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
      stored: the dtype of 16 bits or fewer that a move or a cast runs in, and that its
        result has, although it was traced in float32. Its derivative is float32, even
        if the result is LOW. For example, ``w.T`` of a bfloat16 argument ``w`` runs in
        bfloat16, and so does the ``all_gather`` of a float32 ``w`` that only a product
        reads. None for all other equations.
      lowers_sum: whether its derivative, a sum over devices, runs in ``stored``, too.
        It does if a rule lowers ``reduce_scatter`` or ``psum``.
      keeps_slope: whether the derivative of a tanh or of a logistic function is
        computed from its operand, not from its result.
    """

    run: Run
    state: State | None
    reason: Reason
    leader: Facts | None = None
    match: RuleMatch | None = None
    within: str = ""
    requested: NumberFormat = LOW
    verdict: Verdict = QUALIFIES
    stored: Dtype | None = None
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
      raised_by: the origin of the value that makes a carry float32 which would follow:
        the ``exp`` in a block that returns ``h + exp(h)``. None if none does.
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
      raised: the numbers of the 16-bit results that are cast to float32 once, for all
        readers, such as the scores that a softmax reads twice.
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
      results: the facts of its results, as its last equations make them.
      result_specs: the specs to which its results are cast. A body of a loop whose
        carry is float32 may result in a 16-bit value: its spec here is float32. Empty
        for a whole function, whose results get the types of the trace.
      lineages: the lineages of the results, as ``leave_call`` reads them.
      name: the name of the function that it is, if an equation only calls it.
      others: all plans of this jaxpr for the same rules and readers, this one too, by
        the facts of the operands: of a block whose first call has a float32 input, and
        whose other calls have a 16-bit one, there are two.
    """

    jaxpr: Jaxpr
    parts: structure.Parts
    inputs: Sequence[Facts]
    constants: Sequence[Facts]
    steps: Sequence[Step]
    results: Sequence[Facts]
    result_specs: Sequence[Spec] = ()
    lineages: Sequence[Lineage | None] = ()
    name: str = ""
    others: "Mapping[object, Plan]" = dataclasses.field(default_factory=dict)

    @property
    def input_specs(self) -> tuple[Spec, ...]:
        """The specs of its inputs, to which the caller casts its operands."""
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
        # Undecided and deliberate float32 are one dtype. The first of 24 jit-compiled
        # blocks has an undecided input, the others a 16-bit one that is upcast.
        how = [
            (d.run, d.state is State.LOW, d.stored, d.number_format) for d in decided
        ]
        return step.eqn, how, len(step.inside)

    return list(map(key, some.steps)) == list(map(key, others.steps)) and all(
        run_alike(one, other)
        for mine, its in zip(some.steps, others.steps, strict=True)
        for one, other in zip(mine.inside, its.inside, strict=True)
    )
