"""Analyses that follow facts along jaxprs, forward and backward.

An analysis defines a fact, the join of two facts, and their transfer across an
equation. The classes here carry facts into the jaxprs of equations, iterate loops to a
fixed point, and know the path of each equation. Repeated joins must reach a fixed
point.
"""

import abc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var

Fact = TypeVar("Fact")


def jaxprs(jaxpr: Jaxpr, path: str = "") -> Iterator[tuple[str, Jaxpr]]:
    """Yields a jaxpr and the jaxprs inside of it, each with its path."""
    yield path, jaxpr
    for eqn in structure.parts(jaxpr).eqns:
        for inner in params.inner_jaxprs(eqn):
            yield from jaxprs(inner, source.path_of(eqn, path))


def equations(jaxpr: Jaxpr, path: str = "") -> Iterator[tuple[Eqn, str]]:
    """Yields each equation of a jaxpr and of the jaxprs inside of it, with its path."""
    for where, each in jaxprs(jaxpr, path):
        for eqn in structure.parts(each).eqns:
            yield eqn, source.join(where, *source.scopes(eqn))


def readers_of(parts: structure.Parts) -> Mapping[Var, list[Eqn | None]]:
    """Returns the equations that read each variable, in order; None for an output."""
    readers: dict[Var, list[Eqn | None]] = defaultdict(list)
    for eqn in (*parts.eqns, None):
        for atom in parts.outvars if eqn is None else eqn.invars:
            if not structure.is_literal(atom):
                readers[atom].append(eqn)
    return readers


_ONE_BODY = frozenset([*params.CALLED, "shard_map"])
"""Ops with the operands and results of the one jaxpr that they contain."""

_ENTERED = _ONE_BODY.union(params.CONTROL)
"""All ops whose jaxprs an analysis enters."""


class _Analysis(abc.ABC, Generic[Fact]):
    """The common part of both directions."""

    @abc.abstractmethod
    def nothing(self) -> Fact:
        """Returns the least fact: for a number, or for an unread value."""

    @abc.abstractmethod
    def join(self, one: Fact, other: Fact) -> Fact:
        """Returns the fact of a value that has one of two facts, as after a branch."""

    @abc.abstractmethod
    def transfer(self, eqn: Eqn, facts: Sequence[Fact], path: str) -> Sequence[Fact]:
        """Transfers facts across an equation whose jaxprs are not entered.

        Args:
          eqn: the equation.
          facts: the facts of its operands; in a backward analysis, of its results.
          path: its path.

        Returns:
          The facts of its results; in a backward analysis, of its operands.
        """

    def _join_all(self, rows: Sequence[Sequence[Fact]]) -> list[Fact]:
        joined = list(rows[0])
        for row in rows[1:]:
            joined = [self.join(a, b) for a, b in zip(joined, row, strict=True)]
        return joined


class Forward(_Analysis[Fact]):
    """Follows facts from the inputs of a jaxpr to its outputs."""

    def literal(self, atom: Var) -> Fact:
        """Returns the fact of a number in a jaxpr."""
        del atom
        return self.nothing()

    def constant(self, var: Var) -> Fact:
        """Returns the fact of an array that a jaxpr captures."""
        del var
        return self.nothing()

    def outputs(
        self, jaxpr: Jaxpr, inputs: Sequence[Fact], path: str = ""
    ) -> list[Fact]:
        """Returns the facts of the outputs of a jaxpr.

        Args:
          jaxpr: a jaxpr, closed or open.
          inputs: the facts of its inputs.
          path: its path.
        """
        parts = structure.parts(jaxpr)
        known = {var: self.constant(var) for var in parts.constvars}
        known.update(zip(parts.invars, inputs, strict=True))
        nothing = self.nothing()

        def read(atoms: Sequence[Var]) -> list[Fact]:
            return [
                self.literal(a) if structure.is_literal(a) else known.get(a, nothing)
                for a in atoms
            ]

        for eqn in parts.eqns:
            results = self.equation_facts(eqn, read(eqn.invars), path)
            known.update(zip(eqn.outvars, results, strict=True))
        return read(parts.outvars)

    def equation_facts(
        self, eqn: Eqn, operands: Sequence[Fact], path: str
    ) -> Sequence[Fact]:
        """Returns the facts of an equation's results.

        Args:
          eqn: an equation of a jaxpr.
          operands: the facts of its operands.
          path: the path of the jaxpr.
        """
        op = params.op_of(eqn)
        if op not in _ENTERED:
            return self.transfer(eqn, operands, source.join(path, *source.scopes(eqn)))
        inside = source.path_of(eqn, path)
        if op in _ONE_BODY:
            return self.outputs(params.body_of(eqn), operands, inside)
        if op == "cond":
            branches = params.branches_of(eqn)
            rows = [self.outputs(branch, operands[1:], inside) for branch in branches]
            return self._join_all(rows)
        loop = params.loop_of(eqn)
        results = self.loop_facts(loop, operands[loop.n_cond :], inside)
        if loop.cond is not None:
            # Nothing leaves a condition. But analyses that mark ops have to see those
            # in it.
            self.outputs(loop.cond, [*operands[: loop.n_cond], *results], inside)
        return results

    def loop_facts(
        self, loop: params.Loop, operands: Sequence[Fact], path: str
    ) -> Sequence[Fact]:
        """Returns the facts of a loop's results, given those of its body's operands."""
        inputs = list(operands)
        while True:
            results = self.outputs(loop.body, inputs, path)
            carries = inputs[loop.carries]
            joined = self._join_all([carries, results[: loop.n_carry]])
            if joined == carries:
                return [*carries, *results[loop.n_carry :]]
            inputs[loop.carries] = joined


class ForwardAnywhere(Forward[Fact]):
    """Follows facts that do not depend on paths.

    It follows a jaxpr once for equal inputs, however often the jaxpr is called. So
    ``transfer`` may depend on nothing but the equation and the facts.
    """

    def __init__(self) -> None:
        self._known: dict[object, list[Fact]] = {}

    def outputs(
        self, jaxpr: Jaxpr, inputs: Sequence[Fact], path: str = ""
    ) -> list[Fact]:
        """Returns the facts of the outputs of a jaxpr; see ``Forward``."""
        key = jaxpr, tuple(inputs)
        if key not in self._known:
            self._known[key] = super().outputs(jaxpr, inputs, path)
        return self._known[key]


class Backward(_Analysis[Fact]):
    """Follows facts from the outputs of a jaxpr to its inputs."""

    def variables(
        self, jaxpr: Jaxpr, outputs: Sequence[Fact], path: str = ""
    ) -> Mapping[Var, Fact]:
        """Returns the fact of each variable of a jaxpr.

        Args:
          jaxpr: a jaxpr, closed or open.
          outputs: the facts of its outputs.
          path: its path.
        """
        parts = structure.parts(jaxpr)
        # Not the bound method: an analysis that stores its results would refer to
        # itself.
        nothing = self.nothing()
        known: dict[Var, Fact] = defaultdict(lambda: nothing)

        def note(atoms: Sequence[Var], facts: Sequence[Fact]) -> None:
            for atom, fact in zip(atoms, facts, strict=True):
                if not structure.is_literal(atom):
                    # Most values have one reader, so most need no join.
                    is_first = atom not in known
                    known[atom] = fact if is_first else self.join(known[atom], fact)

        note(parts.outvars, outputs)
        for eqn in reversed(parts.eqns):
            results = [known[var] for var in eqn.outvars]
            note(eqn.invars, self.equation_facts(eqn, results, path))
        return known

    def inputs(
        self, jaxpr: Jaxpr, outputs: Sequence[Fact], path: str = ""
    ) -> list[Fact]:
        """Returns the facts of the inputs of a jaxpr; see ``variables``."""
        known = self.variables(jaxpr, outputs, path)
        return [known[var] for var in structure.parts(jaxpr).invars]

    def equation_facts(
        self, eqn: Eqn, results: Sequence[Fact], path: str
    ) -> Sequence[Fact]:
        """Returns the facts of an equation's operands.

        Args:
          eqn: an equation of a jaxpr.
          results: the facts of its results.
          path: the path of the jaxpr.
        """
        op = params.op_of(eqn)
        if op not in _ENTERED:
            return self.transfer(eqn, results, source.join(path, *source.scopes(eqn)))
        inside = source.path_of(eqn, path)
        if op in _ONE_BODY:
            return self.inputs(params.body_of(eqn), results, inside)
        if op == "cond":
            branches = params.branches_of(eqn)
            rows = [self.inputs(branch, results, inside) for branch in branches]
            return [self.predicate_fact(), *self._join_all(rows)]
        loop = params.loop_of(eqn)
        if loop.cond is None:
            return self.loop_facts(eqn, loop, results, inside)
        of_cond = self.inputs(loop.cond, [self.predicate_fact()], inside)
        # The condition reads each carry, also the last one.
        read = self._join_all([results, of_cond[loop.n_cond :]])
        of_body = self.loop_facts(eqn, loop, read, inside)
        return [*of_cond[: loop.n_cond], *of_body]

    @abc.abstractmethod
    def predicate_fact(self) -> Fact:
        """Returns the fact of a value that selects a branch or ends a loop."""

    def loop_facts(
        self, eqn: Eqn, loop: params.Loop, results: Sequence[Fact], path: str
    ) -> Sequence[Fact]:
        """Returns the facts of the operands of a loop's body.

        Args:
          eqn: the equation.
          loop: its parts.
          results: the facts of its results.
          path: the path of the body.
        """
        del eqn
        carries = list(results[: loop.n_carry])
        while True:
            outputs = [*carries, *results[loop.n_carry :]]
            found = self.inputs(loop.body, outputs, path)
            joined = self._join_all([carries, found[loop.carries]])
            if joined == carries:
                return found
            carries = joined
