"""Decides the precision that a carry keeps from step to step of a loop.

It reads what the body of the loop does with the carry.
"""

import enum
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from jmp_lite.autocasting.decide.decisions import Reason
from jmp_lite.autocasting.decide.equation import runs_low
from jmp_lite.autocasting.decide.facts import Spec, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import RuleSource
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import Backward, Forward
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn
from jmp_lite.ops import ADDING, MOVING, MOVING_OR_CASTING, TAKING_SLICES, Precision


class Slot(enum.Enum):
    """The possible precisions of a carry."""

    # Low, whatever its initial value is: the hidden state of an LSTM.
    LOW = "low"
    # Low unless the body makes it hard: the stream of a stack of layers. (An op of the
    # class ``Precision.FOLLOW`` is float32 next to a hard value, and soft by itself.)
    FOLLOW = "follow"
    # Low if the body writes low values into it: a cache of keys in a ``while``.
    WRITTEN = "written"
    # Float32: sums, averages, the cell of an LSTM, an integrator.
    FULL = "full"


class CarryDecision(NamedTuple):
    """The slot of a carry, and the reason."""

    slot: Slot
    reason: Reason


class CarryFacts(NamedTuple):
    """What the body of a loop does with one carry.

    Attributes:
      is_multiplied: whether only low products read it in a step, and the step replaces
        it, as the hidden state of an LSTM.
      is_multiplied_later: whether only low products read it in this step or later ones,
        as a cache of keys, of which each step passes most on.
      has_gradient: whether the loop has a backward pass.
      is_of_layers: whether the loop is a stack of layers: a step multiplies what comes
        from a carry by a slice of this step, such as its weights.
      is_added_to: whether each step adds another value to it, as to an auxiliary loss.
      last_is_read: whether anything but an output reads its last value.
    """

    is_multiplied: bool
    is_multiplied_later: bool
    has_gradient: bool = True
    is_of_layers: bool = False
    is_added_to: bool = False
    last_is_read: bool = False


def decide_carry(rules: RuleLookup, facts: CarryFacts, path: str) -> CarryDecision:
    """Decides the slot of a carry: float32, unless there is a reason for a low one.

    Args:
      rules: the rules, by path.
      facts: what the body of the loop does with it.
      path: the path of the loop.
    """
    match, rule = rules.scope(path), rules.carry(path)
    # A mark wins over a carry rule: under ``low_precision`` an average is 16-bit.
    if match and match.source is RuleSource.MARK and match.precision is Precision.LOW:
        return CarryDecision(Slot.FOLLOW, Reason.RULE)
    if rule is not None:
        return CarryDecision(Slot(rule), Reason.RULE)
    if not facts.has_gradient:
        # Each step writes some rows into a cache of keys, and products read all. (In a
        # backward pass the gradients of all steps would add up in 16 bits.)
        if facts.is_multiplied_later and not facts.is_multiplied:
            return CarryDecision(Slot.WRITTEN, Reason.CARRY_PRODUCTS)
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    # Low products would cast it anyway, as the hidden state of an LSTM.
    if facts.is_multiplied:
        return CarryDecision(Slot.LOW, Reason.CARRY_PRODUCTS)
    # A running sum of 2,048 halves that starts at a product ended at 256 in bfloat16;
    # SGD of 200 steps in a loop moved its weights by 0.
    if not facts.is_of_layers:
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    # An auxiliary loss, which each layer adds to, is a sum over the layers.
    if facts.is_added_to:
        return CarryDecision(Slot.FULL, Reason.CARRY_STATE)
    # SGD over batches in a scan has the products of a stack of layers. Its last value,
    # the weights, is returned.
    if not facts.last_is_read:
        return CarryDecision(Slot.FULL, Reason.CARRY_RESULT)
    # In float32, a scan over layers with remat kept 9.4 MB, by hand 5.2.
    return CarryDecision(Slot.FOLLOW, Reason.CARRY_LAYERS)


def carry_spec(spec: Spec, is_low: bool) -> Spec:
    """Returns the spec of a carry, given that of its initial value."""
    if spec.state is None:
        return Spec(None)
    return Spec(State.LOW if is_low else State.HARD)


# ------------------------------------------ what the body of a loop does with a carry


def classify(
    rules: RuleLookup, loop: params.Loop, last_is_read: Sequence[bool], path: str
) -> list[CarryDecision]:
    """Returns the slot of each carry of a loop, with the reason.

    Args:
      rules: the rules, by path.
      loop: the loop.
      last_is_read: for each carry, whether anything but an output reads its last value.
      path: the path of the loop.
    """
    in_one_step, in_any_step = _uses_of_carries(rules, loop, path)
    # JAX has no reverse mode for a ``while``: no gradients add up in its carries.
    flow = _Flow(rules, loop, path) if loop.cond is None else None

    def facts(carry: int) -> CarryFacts:
        return CarryFacts(
            is_multiplied=in_one_step[carry] is _CarryUse.PRODUCT,
            is_multiplied_later=in_any_step[carry] is _CarryUse.PRODUCT,
            has_gradient=flow is not None,
            is_of_layers=flow is not None and flow.is_stack_of_layers,
            is_added_to=flow is not None and flow.is_added_to(carry),
            last_is_read=last_is_read[carry],
        )

    return [decide_carry(rules, facts(i), path) for i in range(loop.n_carry)]


class _Source(NamedTuple):
    """The origin of a value in the body of a loop.

    Attributes:
      inputs: the inputs of the body that it is computed from.
      around: the carries among them from which it is computed without a low product.
      added: the sums on the way from such a carry, as pairs: the carry, and the inputs
        of the other addend.
      is_moved: whether it is an input, a slice of one, or a number, and not computed.
      is_sliced: whether it depends on a slice of this step.
    """

    inputs: frozenset[int] = frozenset()
    around: frozenset[int] = frozenset()
    added: frozenset[tuple[int, frozenset[int]]] = frozenset()
    is_moved: bool = True
    is_sliced: bool = False


class _Flow(Forward[_Source]):
    """Follows the body of a loop from its inputs to its results."""

    def __init__(self, rules: RuleLookup, loop: params.Loop, path: str) -> None:
        invars = structure.parts(loop.body).invars
        self._rules = rules
        of_body = range(len(invars))
        self._carries = of_body[loop.carries]
        self._float_carries = frozenset(
            i for i in self._carries if structure.is_float(invars[i])
        )
        self._varying = frozenset(of_body[loop.n_consts :])
        self.is_stack_of_layers = False
        sources = [
            _Source(
                inputs=frozenset([i]),
                around=frozenset([i]) & self._float_carries,
                is_sliced=i >= self._carries.stop,
            )
            for i in of_body
        ]
        self._results = self.outputs(loop.body, sources, path)

    def is_added_to(self, carry: int) -> bool:
        """Whether each step adds a value to a carry that is independent of it."""
        at = self._carries[carry]
        return any(
            at not in self._inputs_of_all_steps(inputs)
            for added_to, inputs in self._results[carry].added
            if added_to == at
        )

    def _inputs_of_all_steps(self, inputs: frozenset[int]) -> frozenset[int]:
        """Returns the inputs of values, in this step and earlier ones."""
        # In a reversible network each stream adds what is computed from the other one,
        # which depends on it in turn.
        while True:
            more = inputs.union(
                *(
                    result.inputs
                    for i, result in zip(self._carries, self._results, strict=False)
                    if i in inputs
                )
            )
            if more == inputs:
                return inputs
            inputs = more

    def nothing(self) -> _Source:
        """A number has no inputs."""
        return _Source()

    def join(self, one: _Source, other: _Source) -> _Source:
        """Returns the origin of a value that is one of two."""
        return _Source(
            one.inputs | other.inputs,
            one.around | other.around,
            one.added | other.added,
            one.is_moved and other.is_moved,
            one.is_sliced or other.is_sliced,
        )

    def transfer(
        self, eqn: Eqn, facts: Sequence[_Source], path: str
    ) -> Sequence[_Source]:
        """Returns the origins of the results of an op."""
        return [self._op_source(eqn, facts, path)] * len(eqn.outvars)

    def _op_source(self, eqn: Eqn, operands: Sequence[_Source], path: str) -> _Source:
        op = params.op_of(eqn)
        joined = functools.reduce(self.join, operands, _Source())
        # ``ws[i]``, ``take`` and a gather select the weights of a layer as ``xs`` does.
        is_sliced = joined.is_sliced or self._takes_a_slice(op, operands)
        if op in PRODUCTS and runs_low(self._rules, eqn, path):
            self._see_product(operands)
            # What passes a product is no sum over the steps: the product rounds it.
            return _Source(joined.inputs, is_moved=False, is_sliced=is_sliced)
        added = joined.added
        if op in ADDING:
            added |= {
                (carry, other.inputs)
                for one, other in (operands, operands[::-1])
                for carry in one.around
                # In ``h + b + tanh(h @ w)`` a bias or a number is no sum over steps.
                if not other.is_moved
            }
        is_moved = op in MOVING_OR_CASTING and joined.is_moved
        return _Source(joined.inputs, joined.around, added, is_moved, is_sliced)

    def _takes_a_slice(self, op: str, operands: Sequence[_Source]) -> bool:
        """Whether an op takes a slice of a loop constant that depends on the step."""
        if op not in TAKING_SLICES:
            return False
        # ``stack[index]`` of one index, in each step, is no stack of layers.
        return any(index.inputs & self._varying for index in operands[1:])

    def _see_product(self, operands: Sequence[_Source]) -> None:
        """Records a product of a carry's value and a slice of this step."""
        for one, other in (operands[:2], operands[1::-1]):
            # The weights of a particle filter depend on the particles, and on this
            # step's measurement: they are no weights of a layer.
            weights = other.is_sliced and not other.inputs & self._float_carries
            if weights and one.inputs & self._float_carries:
                self.is_stack_of_layers = True


class _CarryUse(enum.Flag):
    """The uses of a value, also after moves."""

    NONE = 0
    PRODUCT = 1
    OTHER = 2


class _CarryUseAnalysis(Backward[_CarryUse]):
    """Finds the uses of the inputs of a loop's body."""

    def __init__(self, rules: RuleLookup) -> None:
        self._rules = rules

    def nothing(self) -> _CarryUse:
        """An unread value has no use."""
        return _CarryUse.NONE

    def join(self, one: _CarryUse, other: _CarryUse) -> _CarryUse:
        """Returns both uses."""
        return one | other

    def predicate_fact(self) -> _CarryUse:
        """A predicate is another use than a product."""
        return _CarryUse.OTHER

    def transfer(
        self, eqn: Eqn, facts: Sequence[_CarryUse], path: str
    ) -> Sequence[_CarryUse]:
        """Returns how an op uses its operands."""
        op, n_in = params.op_of(eqn), len(eqn.invars)
        # The hidden state is concatenated with the input before the product of an LSTM.
        if op in MOVING:
            return [functools.reduce(operator.or_, facts)] * n_in
        is_product = op in PRODUCTS and runs_low(self._rules, eqn, path)
        return [_CarryUse.PRODUCT if is_product else _CarryUse.OTHER] * n_in


def _uses_of_carries(
    rules: RuleLookup, loop: params.Loop, path: str
) -> tuple[list[_CarryUse], list[_CarryUse]]:
    """Returns the uses of each carry: in one step, and in that step or later ones.

    In the first result, a use in the next step counts as another use.
    """
    parts, analysis = structure.parts(loop.body), _CarryUseAnalysis(rules)
    stacked = [_CarryUse.OTHER] * (len(parts.outvars) - loop.n_carry)

    def uses(outside: Sequence[_CarryUse]) -> list[_CarryUse]:
        found = analysis.inputs(loop.body, [*outside, *stacked], path)
        pairs = zip(parts.invars[loop.carries], found[loop.carries], strict=True)
        return [
            use if structure.is_float32(var) else _CarryUse.OTHER for var, use in pairs
        ]

    in_one_step = uses([_CarryUse.OTHER] * loop.n_carry)
    later = [_CarryUse.NONE] * loop.n_carry
    while True:
        in_any_step = uses(later)
        joined = [a | b for a, b in zip(later, in_any_step, strict=True)]
        if joined == later:
            return in_one_step, in_any_step
        later = joined
