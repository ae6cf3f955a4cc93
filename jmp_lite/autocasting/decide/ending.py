"""Analyses whether the end of a ``while`` depends on a float that 16 bits change.

Such a loop runs as traced: a tolerance that float32 reaches may never be reached in
16 bits. A time that grows by fixed steps is computed in float32 in any case.

A forward analysis makes a graph of the values of a step. A fact is a node: it knows the
nodes that it is computed from, so that equal facts are the same value.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import Forward, equations
from jmp_lite.jaxprs.types import Eqn, Var
from jmp_lite.ops import COMPARING, PICKING


def ends_by_a_float(eqn: Eqn, path: str, runs_low: Callable[[Eqn, str], bool]) -> bool:
    """Whether the end of a ``while`` depends on a float that its body computes low.

    The index of the largest float (the most likely token) is no such float if a count
    also ends the loop.

    Args:
      eqn: the loop.
      path: its path.
      runs_low: returns whether an equation without a jaxpr runs in 16 bits at a path.
    """
    loop = _WhileGraph(eqn, path)
    conditions = list(_conditions(loop.predicate))
    # Without a count, two tokens that are equally likely in 16 bits may alternate for
    # ever.
    is_counted = any(map(loop.is_count, conditions))
    for condition in conditions:
        values = loop.decisive(condition, may_pick=is_counted)
        if any(map(loop.is_changing_float, values)) and _are_low(values, runs_low):
            return True
    return False


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """A value in one step of a loop.

    Attributes:
      var: its variable; None for a number.
      eqn: the equation that computes it; None for an input.
      operands: the values that it is computed from.
      path: the path of the jaxpr of the equation.
    """

    var: Var | None = None
    eqn: Eqn | None = None
    operands: Sequence["_Node"] = ()
    path: str = ""

    @property
    def op(self) -> str:
        """The name of the op that computes it; nothing for an input."""
        return "" if self.eqn is None else params.op_of(self.eqn)

    @property
    def is_pick(self) -> bool:
        """Whether it is the index of the largest of some floats."""
        if self.eqn is None or self.op not in PICKING:
            return False
        # ``argmax(abs(h) < 1e-3)`` is a tolerance, and so is the first result of
        # ``top_k``, a float.
        return structure.is_float(self.eqn.invars[0]) and not self.is_float

    @property
    def is_float(self) -> bool:
        """Whether it is a float."""
        return self.var is not None and structure.is_float(self.var)


_INVARIANT = _Node()
"""Any number, and any value from outside of the loop."""


class _Graph(Forward[_Node]):
    """Connects values to their operands, through calls.

    Attributes:
      computed: the values that equations compute, in order.
    """

    def __init__(self) -> None:
        self.computed: list[_Node] = []

    def nothing(self) -> _Node:
        """A number is computed from nothing."""
        return _INVARIANT

    def join(self, one: _Node, other: _Node) -> _Node:
        """Returns a value that depends on both."""
        return _Node(operands=(one, other))

    def equation_facts(
        self, eqn: Eqn, operands: Sequence[_Node], path: str
    ) -> Sequence[_Node]:
        """Enters calls; results of any other equation depend on all its operands."""
        if params.called_jaxpr(eqn) is not None:
            return super().equation_facts(eqn, operands, path)
        return self.transfer(eqn, operands, path)

    def transfer(self, eqn: Eqn, facts: Sequence[_Node], path: str) -> Sequence[_Node]:
        """Returns the results of an equation in a jaxpr at a path."""
        results = [_Node(var, eqn, facts, path) for var in eqn.outvars]
        self.computed += results
        return results


class _WhileGraph:
    """The values of a ``while``.

    Attributes:
      predicate: the value that decides whether another step runs.
    """

    def __init__(self, eqn: Eqn, path: str) -> None:
        loop, self._graph = params.loop_of(eqn), _Graph()
        carries = [_Node(var) for var in eqn.outvars]
        operands = [*[_INVARIANT] * loop.n_consts, *carries]
        results = self._graph.outputs(loop.body, operands, path)
        pairs = zip(carries, results, strict=True)
        # A carry that no step changes is loop-invariant, as a limit that the loop
        # passes on.
        self._next = {carry: result for carry, result in pairs if carry is not result}
        operands = [*[_INVARIANT] * loop.n_cond, *carries]
        assert loop.cond is not None
        (self.predicate,) = self._graph.outputs(loop.cond, operands, path)

    @functools.cached_property
    def _varying(self) -> AbstractSet[_Node]:
        """The values that are not loop-invariant."""
        found = set(self._next)
        for value in self._graph.computed:
            if not found.isdisjoint(value.operands):
                found.add(value)
        return found

    def is_count(self, condition: _Node) -> bool:
        """Whether a condition compares a count of steps with a loop-invariant value."""
        return condition.op in COMPARING and any(
            # A limit that grows in each step may never be reached.
            limit not in self._varying and self._counts(count)
            for count, limit in _pairs(condition)
        )

    def _counts(self, carry: _Node) -> bool:
        """Whether each step adds the same value to a carry, or subtracts it."""
        after = self._next.get(carry, _INVARIANT)
        if after.op not in ("add", "sub"):
            return False
        one, other = after.operands
        # Not ``9 - n``, which alternates: 1, 8, 1, 8.
        is_added_to = after.op == "add" and other is carry and one not in self._varying
        return is_added_to or (one is carry and other not in self._varying)

    def decisive(self, condition: _Node, may_pick: bool) -> AbstractSet[_Node]:
        """Returns the values that a condition depends on, in this step or earlier ones.

        Args:
          condition: a value.
          may_pick: whether to stop at the index of the largest float where it is
            compared with a loop-invariant value.
        """
        found: set[tuple[_Node, bool]] = set()
        waiting = [(condition, False)]
        while waiting:
            one = waiting.pop()
            if one in found:
                continue
            found.add(one)
            value, is_compared = one
            if value in self._next:
                waiting.append((self._next[value], is_compared))
            elif not (may_pick and is_compared and value.is_pick):
                waiting += self._operands(value, is_compared)
        return {value for value, _ in found}

    def _operands(
        self, value: _Node, is_compared: bool
    ) -> Iterator[tuple[_Node, bool]]:
        """Yields operands, and whether a comparison with an invariant reads each."""
        if value.op not in COMPARING:
            yield from ((operand, is_compared) for operand in value.operands)
            return
        for operand, other in _pairs(value):
            # k-means ends where two steps choose alike: 16 bits may choose in turns.
            yield operand, is_compared or other not in self._varying

    def is_changing_float(self, value: _Node) -> bool:
        """Whether a value is a float that the loop carries and changes."""
        return value in self._next and value.is_float


def _pairs(value: _Node) -> list[tuple[_Node, _Node]]:
    """Returns each of the two operands of a value with the other one."""
    one, other = value.operands
    return [(one, other), (other, one)]


def _conditions(value: _Node) -> Iterator[_Node]:
    """Yields the values that must all be true for a value to be true."""
    # A cast of booleans changes nothing.
    # An ``or`` has no such parts: with ``(n < 9) | goes_on`` the count alone ends
    # nothing.
    if value.op not in ("and", "convert_element_type"):
        yield value
        return
    for operand in value.operands:
        yield from _conditions(operand)


def _are_low(values: AbstractSet[_Node], runs_low: Callable[[Eqn, str], bool]) -> bool:
    """Whether an op that computes some of the values runs low."""
    # An inner loop computes many of them.
    made_by = {(one.eqn, one.path) for one in values if one.eqn}
    return any(
        # A rule may lower ``sub``: on integers this changes no time.
        any(map(structure.is_float32, (*op.invars, *op.outvars))) and runs_low(op, path)
        for eqn, outside in made_by
        for op, path in _ops(eqn, outside)
    )


def _ops(eqn: Eqn, outside: str) -> Iterator[tuple[Eqn, str]]:
    """Yields an equation, or the equations inside of it, with their paths."""
    path, inner = source.path_of(eqn, outside), list(params.inner_jaxprs(eqn))
    if not inner:
        yield eqn, path
    for jaxpr in inner:
        yield from equations(jaxpr, path)
