"""Runs a jaxpr on values of another kind, and enters each primitive that contains one.

A value may be one array or several, such as an array with a flag, or an array on two
lanes. A tool, which is a subclass, defines what a value is, how an equation without a
jaxpr inside runs, and how a jaxpr inside becomes one of the tool's arrays. This module
knows how each primitive that contains jaxprs runs.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, Literal, Var

ValueT = TypeVar("ValueT")
FormT = TypeVar("FormT")
SiteT = TypeVar("SiteT")
BodyT = TypeVar("BodyT", bound="Body[Any]")


@dataclasses.dataclass(frozen=True)
class Body(Generic[FormT]):
    """A jaxpr of a tool's arrays.

    Attributes:
      jaxpr: the closed jaxpr. It takes the arrays of its operands, and returns those of
        its results. A tool may add more results.
      given: the forms of its operands.
      made: the forms of its results.
    """

    jaxpr: Jaxpr
    given: tuple[FormT, ...]
    made: tuple[FormT, ...]


class Frame(abc.ABC, Generic[ValueT, SiteT]):
    """The values of one jaxpr while it runs.

    Args:
      tool: the tool that runs it.
      jaxpr: the jaxpr.
      operands: the values of its inputs.
      site: its site.
    """

    def __init__(
        self,
        tool: "Evaluator[ValueT, Any, SiteT, Any]",
        jaxpr: Jaxpr,
        operands: Sequence[ValueT],
        site: SiteT,
    ) -> None:
        self.parts = structure.parts(jaxpr)
        self.site = site
        self.env: dict[Var, ValueT] = {}
        self._tool = tool
        for var, const in zip(self.parts.constvars, self.parts.consts, strict=True):
            self.env[var] = tool.constant(var, const)
        self.env.update(zip(self.parts.invars, operands, strict=True))

    def read(self, atom: Var) -> ValueT:
        """Returns the value of a variable or a literal."""
        is_literal = structure.is_literal(atom)
        return self._tool.literal(atom) if is_literal else self.env[atom]

    @abc.abstractmethod
    def enter(self, eqn: Eqn) -> tuple[Sequence[ValueT], SiteT]:
        """Returns the operands of an equation, and its site."""

    def write(self, eqn: Eqn, results: Sequence[ValueT]) -> None:
        """Stores the results of an equation."""
        self.env.update(zip(eqn.outvars, results, strict=True))

    def results(self) -> list[ValueT]:
        """Returns the values of the jaxpr's outputs."""
        return list(map(self.read, self.parts.outvars))


class Evaluator(abc.ABC, Generic[ValueT, FormT, SiteT, BodyT]):
    """Runs jaxprs. A subclass defines what a value is, and how an equation runs."""

    # -------------------------------------------------------------- values and forms

    @abc.abstractmethod
    def constant(self, var: Var, array: Array) -> ValueT:
        """Returns the value of a constant."""

    @abc.abstractmethod
    def literal(self, atom: Literal) -> ValueT:
        """Returns the value of a literal."""

    @abc.abstractmethod
    def form(self, value: ValueT) -> FormT:
        """Returns the form of a value: which arrays it consists of."""

    @abc.abstractmethod
    def join(self, forms: Sequence[FormT]) -> FormT:
        """Returns the form of a value that has one of several forms."""

    @abc.abstractmethod
    def unpack(self, value: ValueT, form: FormT) -> Sequence[Array]:
        """Returns the arrays of a value; the first is that of the program."""

    @abc.abstractmethod
    def pack(self, arrays: Sequence[Array], form: FormT) -> ValueT:
        """Returns the value of arrays."""

    def width(self, form: FormT) -> int:
        """Returns the number of arrays of a value."""
        del form
        return 1

    def unpack_all(
        self, values: Sequence[ValueT], forms: Sequence[FormT]
    ) -> list[Array]:
        """Returns the arrays of several values, one value after the other."""
        pairs = zip(values, forms, strict=True)
        return [array for value, form in pairs for array in self.unpack(value, form)]

    def pack_all(
        self,
        arrays: Sequence[Array],
        forms: Sequence[FormT],
        pack: Callable[[Sequence[Array], FormT], ValueT] | None = None,
    ) -> list[ValueT]:
        """Returns the values of the arrays that ``unpack_all`` returns.

        Args:
          arrays: the arrays.
          forms: the forms of the values.
          pack: returns the value of arrays; by default ``self.pack``.
        """
        values: list[ValueT] = []
        at = 0
        for form in forms:
            n = self.width(form)
            values.append((pack or self.pack)(arrays[at : at + n], form))
            at += n
        return values

    def converted(
        self, values: Sequence[ValueT], forms: Sequence[FormT]
    ) -> list[ValueT]:
        """Returns the carries of a loop in other forms."""
        return self.pack_all(self.unpack_all(values, forms), forms)

    # --------------------------------------------------------- equations and jaxprs

    @abc.abstractmethod
    def equation(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs an equation, without entering any jaxpr in it."""

    @abc.abstractmethod
    def custom(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs a function with a derivative or a batching rule of its own."""

    @abc.abstractmethod
    def body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[ValueT],
        site: SiteT,
        required: Sequence[FormT] = (),
    ) -> BodyT:
        """Returns a jaxpr inside of an equation as a jaxpr of the tool's arrays.

        Args:
          jaxpr: the jaxpr.
          operands: the values of its operands.
          site: the site of the equation.
          required: the forms of its first results.
        """

    @abc.abstractmethod
    def collect_results(
        self,
        eqn: Eqn,
        bodies: Sequence[tuple[BodyT, Sequence[ValueT]]],
        arrays: Sequence[Array],
        number: int = 0,
    ) -> list[ValueT]:
        """Returns the results of a bound equation as values.

        Args:
          eqn: the equation.
          bodies: the jaxprs inside, each with its operands.
          arrays: the arrays of the results, then those that the tool has added.
          number: the number of the jaxpr whose results they are.
        """

    # ------------------------------------------------------------------------ the run

    @abc.abstractmethod
    def frame(
        self, jaxpr: Jaxpr, operands: Sequence[ValueT], site: SiteT
    ) -> Frame[ValueT, SiteT]:
        """Returns the values of a jaxpr before it runs."""

    def run(
        self, jaxpr: Jaxpr, operands: Sequence[ValueT], site: SiteT
    ) -> list[ValueT]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          operands: the values of its inputs.
          site: its site.
        """
        frame = self.frame(jaxpr, operands, site)
        for eqn in frame.parts.eqns:
            with source.context_of(eqn):
                given, here = frame.enter(eqn)
                results = self.step(eqn, given, here)
            frame.write(eqn, results)
        return frame.results()

    def step(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs an equation of any kind."""
        op = params.op_of(eqn)
        if op in params.CUSTOM:
            return self.custom(eqn, operands, site)
        if params.is_call(eqn):
            return self.call(eqn, operands, site)
        if op not in params.CONTROL:
            return self.equation(eqn, operands, site)
        others = {
            "cond": self.cond,
            "scan": self.scan,
            "while": self.while_loop,
            "shard_map": self.shard_map,
        }
        return others[op](eqn, operands, site)

    def call(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs an op that only calls its jaxpr."""
        body = self.body(params.body_of(eqn), operands, site)
        arrays = self.unpack_all(operands, body.given)
        is_remat = params.op_of(eqn) in params.REMAT
        bind = params.bind_remat if is_remat else params.bind_call
        out = bind(eqn, arrays, body.jaxpr)
        return self.collect_results(eqn, [(body, operands)], out)

    def cond(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs the branches of a cond, and joins their results."""
        index, *others = operands
        traced = params.branches_of(eqn)
        branches = [self.body(branch, others, site) for branch in traced]
        rows = [branch.made for branch in branches]
        made = tuple(map(self.join, zip(*rows, strict=True)))
        branches = [
            branch if branch.made == made else self.body(jaxpr, others, site, made)
            for branch, jaxpr in zip(branches, traced, strict=True)
        ]
        arrays = self.unpack_all(others, branches[0].given)
        which = self.unpack(index, self.form(index))[0]
        out = self.bind_cond(eqn, [which, *arrays], branches)
        return self.collect_results(eqn, [(branch, others) for branch in branches], out)

    @abc.abstractmethod
    def bind_cond(
        self, eqn: Eqn, arrays: Sequence[Array], branches: Sequence[BodyT]
    ) -> Sequence[Array]:
        """Binds a cond to other branches."""

    def settle(
        self, jaxpr: Jaxpr, operands: list[ValueT], at: slice, site: SiteT
    ) -> BodyT:
        """Returns the body of a loop, converted until its carries keep their forms.

        Args:
          jaxpr: the body.
          operands: its operands; the carries change their forms.
          at: the positions of the carries.
          site: the site of the loop.
        """
        first, forms = operands[at], list(map(self.form, operands[at]))
        while True:
            operands[at] = self.converted(first, forms)
            body = self.body(jaxpr, operands, site, forms)
            found = list(body.made[: len(forms)])
            if found == forms:
                return body
            forms = found

    def scan(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs a scan."""
        n_consts, n_carry = params.scan_counts(eqn)
        at, given = slice(n_consts, n_consts + n_carry), list(operands)
        body = self.settle(params.body_of(eqn), given, at, site)
        out = self.bind_scan(eqn, given, body)
        return self.collect_results(eqn, [(body, given)], out)

    @abc.abstractmethod
    def bind_scan(
        self, eqn: Eqn, operands: Sequence[ValueT], body: BodyT
    ) -> Sequence[Array]:
        """Binds a scan to another body."""

    def while_loop(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs a while."""
        loop = params.while_parts(eqn)
        given, at = list(operands[loop.n_cond :]), slice(loop.n_body, None)
        step = self.settle(loop.body, given, at, site)
        of_test = [*operands[: loop.n_cond], *given[at]]
        test = self.body(loop.cond, of_test, site)
        out = self.bind_while(eqn, [*operands[: loop.n_cond], *given], test, step)
        return self.collect_results(
            eqn, [(test, of_test), (step, given)], out, number=1
        )

    @abc.abstractmethod
    def bind_while(
        self, eqn: Eqn, operands: Sequence[ValueT], test: BodyT, step: BodyT
    ) -> Sequence[Array]:
        """Binds a while to another condition and another body."""

    @abc.abstractmethod
    def shard_map(
        self, eqn: Eqn, operands: Sequence[ValueT], site: SiteT
    ) -> Sequence[ValueT]:
        """Runs the function of each device."""
