"""Which carries of a loop may be low, and which loops are run as they were traced.

The law of this file: it reads the body of a loop and decides, before anything of it is
run. A carry is float32 unless there is a reason to let it be low. Calls of one
function, each on what the one before has made, are a loop too.
"""

import enum
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.compat import CALLS, called
from jmp_lite.autocasting.endings import ends_by_a_float
from jmp_lite.autocasting.rules import MOVING, PRODUCTS, Precision, Rules


class Slot(enum.Enum):
    """What a carry may be.

    ``LOW``: low, whatever it starts from. ``FOLLOW``: low unless the body makes it
    hard. ``WRITTEN``: low if what the body writes into it is. ``FULL``: float32.
    """

    LOW = "low"
    FOLLOW = "follow"
    WRITTEN = "written"
    FULL = "full"


class Carry(NamedTuple):
    """What one carry may be, and why in words."""

    slot: Slot
    reason: str


class Loop(NamedTuple):
    """What is run again and again.

    Attributes:
      body: the jaxpr of a step.
      carries: the result that each carry, an input of the body, is in the next step.
      sliced: the inputs that are others in each step.
      has_gradient: whether it has a backward pass, which hands a gradient from step to
        step in the dtype of the carry.
    """

    body: Any
    carries: Mapping[int, int]
    sliced: frozenset[int]
    has_gradient: bool = True

    @classmethod
    def of_scan(cls, eqn: Any) -> "Loop":
        """Returns the loop that a ``scan`` is."""
        n_consts, n_carry = compat.scan_counts(eqn)
        carries = {n_consts + i: i for i in range(n_carry)}
        sliced = frozenset(range(n_consts + n_carry, len(eqn.invars)))
        return cls(eqn.params["jaxpr"], carries, sliced)

    @classmethod
    def of_while(cls, eqn: Any) -> "Loop":
        """Returns the loop that a ``while`` is."""
        n_consts = eqn.params["body_nconsts"]
        carries = {n_consts + i: i for i in range(len(eqn.outvars))}
        return cls(eqn.params["body_jaxpr"], carries, frozenset(), has_gradient=False)


class Unrolled(NamedTuple):
    """A loop that is written out, as calls.

    Attributes:
      loop: the loop.
      last: the last call.
    """

    loop: Loop
    last: Any


def unrolled(parts: compat.Parts) -> dict[int, Unrolled]:
    """Returns the loops that are written out in a jaxpr, by id of the first call."""
    calls: dict[int, list[Any]] = defaultdict(list)
    for eqn in parts.eqns:
        if compat.op_of(eqn) in CALLS:
            calls[id(called(eqn))].append(eqn)
    found: dict[int, Unrolled] = {}
    for first, *later in calls.values():
        pairs = list(zip([first, *later], later, strict=False))
        inputs = range(len(first.invars))
        carries = {
            i: k
            for i in inputs
            for k in range(len(first.outvars))
            if pairs and all(b.invars[i] is a.outvars[k] for a, b in pairs)
        }
        if carries:
            shared = {
                i for i in inputs if all(a.invars[i] is b.invars[i] for a, b in pairs)
            }
            sliced = frozenset(inputs) - shared - {*carries}
            loop = Loop(called(first), carries, sliced)
            found[id(first)] = Unrolled(loop, later[-1])
    return found


# What the rules say of an equation that stands in a path.
PrecisionOf = Callable[[Any, str], Precision]


def classify(
    rules: Rules,
    precision_of: PrecisionOf,
    loop: Loop,
    last_is_read: Sequence[bool],
    path: str,
) -> list[Carry]:
    """Returns what each carry of a loop may be.

    Args:
      rules: the carries that the user decides.
      precision_of: what the rules say of an equation that stands in a path.
      loop: the loop.
      last_is_read: for each carry, whether something else than an output reads its last
        value.
      path: the scopes that the loop stands in.
    """
    said = rules.carry_in(path)
    if said is not None:
        return [Carry(Slot(said), "a carry rule")] * len(loop.carries)
    read_by, in_any_step = _readers(precision_of, loop, path)
    if not loop.has_gradient:
        return [
            _of_a_while(read_by[carry], in_any_step[carry]) for carry in loop.carries
        ]
    flow = _Flow(precision_of, loop, path)

    def classified(carry: int, is_read: bool) -> Carry:
        # Low products would cast it anyway: the hidden state of an LSTM.
        if read_by[carry] is _Use.PRODUCT:
            return Carry(Slot.LOW, "only low matrix products read it")
        if not flow.is_stack_of_layers:
            return Carry(Slot.FULL, "a state: the loop is no stack of layers")
        if flow.is_added_to(carry):
            return Carry(Slot.FULL, "a sum: something else is added to it at each step")
        if not is_read:
            return Carry(Slot.FULL, "a result: nothing but an output reads its last")
        return Carry(Slot.FOLLOW, "a stack of layers: it follows")

    return list(map(classified, loop.carries, last_is_read))


def is_kept(rules: Rules, eqn: Any, path: str) -> bool:
    """Whether a ``while`` that stands in a path is run as it was traced.

    A float ends it, and no rule says that its carries follow nevertheless.
    """
    return rules.carry_in(path) != "follow" and ends_by_a_float(eqn)


def _of_a_while(read_by: "_Use", in_any_step: "_Use") -> Carry:
    """Returns what a carry of a ``while`` may be: low, if it is a cache of keys.

    Each step writes some into it, and products read all. (In a loop that has a backward
    pass, the gradients of all steps would add up in 16 bits.)
    """
    if in_any_step is _Use.PRODUCT and read_by is not _Use.PRODUCT:
        return Carry(Slot.WRITTEN, "only low matrix products read it, then or later")
    return Carry(Slot.FULL, "a state of a while loop")


class _Source(NamedTuple):
    """Where a value of a loop's body comes from.

    Attributes:
      inputs: the inputs of the body that it is computed from.
      around: the carries among them that reach it without passing a low op.
      added: what was added to such a carry on the way: the carry, and the inputs that
        the addend is computed from.
      is_moved: whether it is an input, a slice of one, or a number: nothing computed.
      is_sliced: whether this step's slice of something is in it.
    """

    inputs: frozenset[int] = frozenset()
    around: frozenset[int] = frozenset()
    added: frozenset[tuple[int, frozenset[int]]] = frozenset()
    is_moved: bool = True
    is_sliced: bool = False


class _Flow:
    """Follows a loop's body from its inputs to its results."""

    def __init__(self, precision_of: PrecisionOf, loop: Loop, path: str) -> None:
        parts = compat.parts(loop.body)
        self._precision_of = precision_of
        self._carries = loop.carries
        self._float_carries = frozenset(
            i for i in self._carries if compat.is_float(parts.invars[i])
        )
        self.is_stack_of_layers = False
        self._results = self._through(
            parts,
            [
                _Source(
                    inputs=frozenset([i]),
                    around=frozenset([i]) & self._float_carries,
                    is_sliced=i in loop.sliced,
                )
                for i in range(len(parts.invars))
            ],
            path,
        )

    def is_added_to(self, carry: int) -> bool:
        """Whether something is added to a carry, step by step, that is not its own."""
        return any(
            carry not in self._in_any_step(inputs)
            for added_to, inputs in self._results[self._carries[carry]].added
            if added_to == carry
        )

    def _in_any_step(self, inputs: frozenset[int]) -> frozenset[int]:
        """Returns what inputs are computed from, in this step and those before."""
        while True:
            more = inputs.union(
                *(
                    self._results[self._carries[i]].inputs
                    for i in inputs
                    if i in self._carries
                )
            )
            if more == inputs:
                return inputs
            inputs = more

    def _through(
        self, parts: compat.Parts, sources: Sequence[_Source], path: str
    ) -> list[_Source]:
        known = dict(zip(parts.invars, sources, strict=True))

        def read(atom: Any) -> _Source:
            return _NUMBER if compat.is_literal(atom) else known.get(atom, _NUMBER)

        for eqn in parts.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inner, where = called(eqn), compat.path_of(eqn, path)
            if inner is not None:
                results = self._through(compat.parts(inner), operands, where)
            else:
                results = [self._of_op(eqn, operands, where)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in parts.outvars]

    def _of_op(self, eqn: Any, operands: Sequence[_Source], path: str) -> _Source:
        op = compat.op_of(eqn)
        inputs = frozenset[int]().union(*(o.inputs for o in operands))
        is_sliced = any(o.is_sliced for o in operands) or op == "dynamic_slice"
        if op in PRODUCTS and self._precision_of(eqn, path) is Precision.LOW:
            self._see_product(operands)
            return _Source(inputs, is_moved=False, is_sliced=is_sliced)
        added = frozenset[tuple[int, frozenset[int]]]().union(
            *(o.added for o in operands)
        )
        if op in ("add", "sub", "add_any"):
            added |= {
                (carry, other.inputs)
                for one, other in (operands, operands[::-1])
                for carry in one.around
                if not other.is_moved
            }
        around = frozenset[int]().union(*(o.around for o in operands))
        is_moved = op in _MOVING and all(o.is_moved for o in operands)
        return _Source(inputs, around, added, is_moved, is_sliced)

    def _see_product(self, operands: Sequence[_Source]) -> None:
        """Notes a product of what comes from a carry and this step's slice."""
        for one, other in (operands[:2], operands[1::-1]):
            weights = other.is_sliced and not other.inputs & self._float_carries
            if weights and one.inputs & self._float_carries:
                self.is_stack_of_layers = True


_NUMBER = _Source()
_MOVING = MOVING | {"convert_element_type"}


class _Use(enum.Flag):
    """What a value is used for, perhaps moved."""

    NONE = 0
    PRODUCT = 1
    OTHER = 2


def _readers(
    precision_of: PrecisionOf, loop: Loop, path: str
) -> tuple[Mapping[int, _Use], Mapping[int, _Use]]:
    """Returns what each carry is used for: in one step, and in that or a later one.

    In the first answer, handing it on to the next step counts as an unknown use.
    """
    parts = compat.parts(loop.body)

    def uses(outside: Sequence[_Use]) -> dict[int, _Use]:
        found = _uses_of_inputs(precision_of, parts, outside, path)
        return {
            i: found[i] if compat.is_float32(parts.invars[i]) else _Use.OTHER
            for i in loop.carries
        }

    outside = [_Use.OTHER] * len(parts.outvars)
    in_one_step = uses(outside)
    for k in loop.carries.values():
        outside[k] = _Use.NONE
    while True:
        before, in_any_step = list(outside), uses(outside)
        for i, k in loop.carries.items():
            outside[k] |= in_any_step[i]
        if outside == before:
            return in_one_step, in_any_step


def _uses_of_inputs(
    precision_of: PrecisionOf, parts: compat.Parts, outside: Sequence[_Use], path: str
) -> list[_Use]:
    """Returns what the inputs of a jaxpr are used for, given that of its outputs."""
    uses: dict[Any, _Use] = defaultdict(lambda: _Use.NONE)

    def note(atoms: Sequence[Any], each: Sequence[_Use]) -> None:
        for atom, use in zip(atoms, each, strict=True):
            if not compat.is_literal(atom):
                uses[atom] |= use

    note(parts.outvars, outside)
    for eqn in reversed(parts.eqns):
        op, inner, where = compat.op_of(eqn), called(eqn), compat.path_of(eqn, path)
        results = [uses[var] for var in eqn.outvars]
        n_in = len(eqn.invars)
        if inner is not None:
            each = _uses_of_inputs(precision_of, compat.parts(inner), results, where)
        elif op in MOVING:
            each = [functools.reduce(operator.or_, results)] * n_in
        elif op in PRODUCTS and precision_of(eqn, where) is Precision.LOW:
            each = [_Use.PRODUCT] * n_in
        else:
            each = [_Use.OTHER] * n_in
        note(eqn.invars, each)
    return [uses[var] for var in parts.invars]
