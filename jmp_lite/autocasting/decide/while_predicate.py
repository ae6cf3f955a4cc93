"""Analyses whether the end of a ``while`` depends on a float that 16 bits change.

A loop whose condition is not understood counts as one that does, and runs as traced: a
tolerance that float32 reaches may never be reached in 16 bits. A time that grows by
fixed steps is computed in float32 in any case. The analysis compares the identity of
values through calls, and follows the condition backward only as far as a comparison
needs, so it has a traversal of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.params import called
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var
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
    loop = _Loop(eqn, path, runs_low)
    conditions = list(loop.conditions(loop.test.results[0]))
    is_counted = any(map(loop.is_count, conditions))
    return any(loop.reads_a_float(one, is_counted) for one in conditions)


Name = TypeVar("Name", int, object)


class _Step(NamedTuple):
    """One equation, with unique names of its operands and results."""

    eqn: Eqn
    path: str
    operands: Sequence[object]
    results: Sequence[object]


class _Flat(NamedTuple):
    """A jaxpr with its calls inlined.

    Attributes:
      inputs: the names of its inputs.
      steps: its equations, in order.
      results: the names of its results.
    """

    inputs: Sequence[object]
    steps: Sequence[_Step]
    results: Sequence[object]

    @classmethod
    def of(cls, jaxpr: Jaxpr, path: str) -> "_Flat":
        """Inlines the calls of a jaxpr at a path."""
        parts = structure.parts(jaxpr)
        inputs = [object() for _ in parts.invars]
        names = dict(zip(parts.invars, inputs, strict=True))
        steps: list[_Step] = []
        results = _take_apart(parts, names, steps, path)
        return cls(inputs, steps, results)

    def made_by(self, name: object) -> _Step | None:
        """Returns the equation that computes a value, or None."""
        for step in self.steps:
            if any(name is result for result in step.results):
                return step
        return None


def _take_apart(
    parts: structure.Parts, names: dict[Var, object], steps: list[_Step], path: str
) -> list[object]:
    def name(atom: Var) -> object:
        return None if structure.is_literal(atom) else names.setdefault(atom, object())

    for eqn in parts.eqns:
        operands = [name(atom) for atom in eqn.invars]
        inner = called(eqn)
        if inner is None:
            results = [object() for _ in eqn.outvars]
            steps.append(_Step(eqn, path, operands, results))
        else:
            inside = structure.parts(inner)
            given = dict(zip(inside.invars, operands, strict=True))
            results = _take_apart(inside, given, steps, source.path_of(eqn, path))
        names.update(zip(eqn.outvars, results, strict=True))
    return [name(atom) for atom in parts.outvars]


class _Loop:
    """The condition and the body of a ``while``."""

    def __init__(
        self, eqn: Eqn, path: str, runs_low: Callable[[Eqn, str], bool]
    ) -> None:
        loop = params.while_parts(eqn)
        self._runs_low = runs_low
        self.test, self.body = _Flat.of(loop.cond, path), _Flat.of(loop.body, path)
        self._of_test = self.test.inputs[loop.n_cond :]
        self._of_body = self.body.inputs[loop.n_body :]
        outvars = structure.parts(loop.body).outvars
        self._is_float = [structure.is_float(var) for var in outvars]
        handed_on = zip(self._of_body, self.body.results, strict=True)
        self._changes = [name is not result for name, result in handed_on]

    def conditions(self, result: object) -> Iterator[object]:
        """Yields the values that must all be true for the condition to be true."""
        made_by = self.test.made_by(result)
        # A cast of booleans changes nothing.
        if made_by is None or params.op_of(made_by.eqn) not in (
            "and",
            "convert_element_type",
        ):
            yield result
            return
        for operand in made_by.operands:
            yield from self.conditions(operand)

    def is_count(self, condition: object) -> bool:
        """Whether a condition compares a count of steps with a loop-invariant value."""
        compared = self.test.made_by(condition)
        if compared is None or params.op_of(compared.eqn) not in COMPARING:
            return False
        left, right = (self._carry(name) for name in compared.operands)
        for count, limit, name in (
            (left, right, compared.operands[1]),
            (right, left, compared.operands[0]),
        ):
            is_limit = self._is_the_same(self.test, name) or (
                limit is not None and not self._changes[limit]
            )
            if count is not None and is_limit and self._counts(count):
                return True
        return False

    def _carry(self, name: object) -> int | None:
        found = [i for i, carry in enumerate(self._of_test) if carry is name]
        return found[0] if found else None

    def _counts(self, carry: int) -> bool:
        """Whether each step adds the same value to a carry."""
        added = self.body.made_by(self.body.results[carry])
        if added is None or params.op_of(added.eqn) not in ("add", "sub"):
            return False
        here = self._of_body[carry]
        others = [name for name in added.operands if name is not here]
        return len(others) == 1 and self._is_the_same(self.body, others[0])

    def _is_the_same(self, flat: _Flat, name: object) -> bool:
        """Whether a value is a number, or computed from loop-invariant values."""
        if name is None:
            return True
        carries = self._of_test if flat is self.test else self._of_body
        reads = _reads(flat, {name: False}, lambda _: False)
        return not any(
            changes and carry in reads
            for carry, changes in zip(carries, self._changes, strict=True)
        )

    def reads_a_float(self, condition: object, may_pick: bool) -> bool:
        """Whether a condition depends on a float that the body computes in 16 bits.

        Args:
          condition: a value of the condition's jaxpr.
          may_pick: whether to ignore the index of the largest float, compared with a
            loop-invariant value.
        """
        same_in_test = lambda name: self._is_the_same(self.test, name)
        same_in_body = lambda name: self._is_the_same(self.body, name)
        reads = _reads(self.test, {condition: False}, same_in_test, may_pick)
        deciding = _among(self._of_test, reads)
        steps = _makers(self.test, reads)
        while True:
            values: dict[object, bool] = {}
            for i, is_judged in deciding.items():
                _note(values, self.body.results[i], is_judged)
            more = dict(deciding)
            reads = _reads(self.body, values, same_in_body, may_pick)
            for i, judged in _among(self._of_body, reads).items():
                _note(more, i, judged)
            if more == deciding:
                break
            deciding = more
        if not any(self._is_float[i] and self._changes[i] for i in deciding):
            return False
        return any(map(self._is_low, [*steps, *_makers(self.body, reads)]))

    def _is_low(self, step: _Step) -> bool:
        """Whether 16 bits change what a step, or something inside of it, computes."""
        eqn, inner = step.eqn, list(params.inner_jaxprs(step.eqn))
        if not inner:
            path = source.join(step.path, *source.scopes(eqn))
            return _has_floats(eqn) and self._runs_low(eqn, path)
        inside = source.path_of(eqn, step.path)
        return any(
            _has_floats(one) and self._runs_low(one, path)
            for jaxpr in inner
            for one, path in equations(jaxpr, inside)
        )


def _has_floats(eqn: Eqn) -> bool:
    return any(map(structure.is_float32, (*eqn.invars, *eqn.outvars)))


def _makers(flat: _Flat, found: Mapping[object, bool]) -> list[_Step]:
    """Returns the steps that compute some values."""
    return [step for step in flat.steps if any(name in found for name in step.results)]


def _among(names: Sequence[object], found: Mapping[object, bool]) -> dict[int, bool]:
    return {i: found[name] for i, name in enumerate(names) if name in found}


def _note(found: dict[Name, bool], name: Name, is_judged: bool) -> None:
    if name is not None:
        found[name] = is_judged and found.get(name, True)


def _reads(
    flat: _Flat,
    values: Mapping[object, bool],
    stays: Callable[[object], bool],
    may_pick: bool = True,
) -> dict[object, bool]:
    """Returns the values that some values are computed from.

    Args:
      flat: the jaxpr.
      values: the values, and whether each is judged: read only by a comparison with a
        loop-invariant value.
      stays: returns whether a value is loop-invariant.
      may_pick: whether to stop at a judged index of the largest float.

    Returns:
      The names, and whether each is judged.
    """
    found: dict[object, bool] = {}
    for name, is_judged in values.items():
        _note(found, name, is_judged)
    for eqn, _, operands, results in reversed(flat.steps):
        judged = [found[name] for name in results if name in found]
        if not judged:
            continue
        op, is_judged = params.op_of(eqn), all(judged)
        if (
            op in PICKING
            and may_pick
            and is_judged
            and _picks_a_float(eqn, results, found)
        ):
            continue
        for i, name in enumerate(operands):
            compares = op in COMPARING and stays(operands[1 - i])
            _note(found, name, is_judged or compares)
    return found


def _picks_a_float(
    eqn: Eqn, results: Sequence[object], found: Mapping[object, bool]
) -> bool:
    """Whether only the index of a choice among floats is read."""
    if not structure.is_float(eqn.invars[0]):
        return False
    pairs = zip(results, eqn.outvars, strict=True)
    return not any(name in found and structure.is_float(var) for name, var in pairs)
