"""Runs jaxprs on a tool's values, and adds up numbers for each op, over all steps.

A value is the array of the program, or that and a second one: a flag, or the same array
on another lane. A tool, which is a subclass, defines what a value is, and how an
equation without a jaxpr inside runs. This module runs each primitive that contains
jaxprs.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jmp_lite.insight.statistics import stacked
from jmp_lite.insight.tables import TOP, Place
from jmp_lite.jaxprs import params, sharding, source, structure
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, PyTree, Var

ValueT = TypeVar("ValueT")
OpT = TypeVar("OpT")
AnyT = TypeVar("AnyT")


@dataclasses.dataclass(frozen=True)
class Body(Generic[OpT]):
    """A jaxpr inside of an equation, as a jaxpr of a tool's arrays.

    Attributes:
      jaxpr: the closed jaxpr. It takes the arrays of its operands, and returns those of
        its results, and then sums.
      operands: whether each operand has a second array.
      results: whether each result has one.
      ops: the ops inside.
      axes: the mapped axes over which the sums differ.
    """

    jaxpr: Jaxpr
    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    ops: Sequence[OpT]
    axes: frozenset[str]


class CountingEvaluator(abc.ABC, Generic[ValueT, OpT]):
    """Runs jaxprs, and notes ops with their sums.

    The form of a value is whether it has a second array.

    Args:
      value: returns the value of one array or of two.
    """

    def __init__(self, value: Callable[..., ValueT]) -> None:
        self._value = value
        self._noted: list[tuple[Sequence[OpT], PyTree]] = []

    # ----------------------------------------------------------- what a tool defines

    @abc.abstractmethod
    def inner(self) -> "CountingEvaluator[ValueT, OpT]":
        """Returns a new tool, without ops, for a jaxpr inside."""

    @abc.abstractmethod
    def equation(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs an equation, without entering any jaxpr in it."""

    @abc.abstractmethod
    def form(self, value: ValueT) -> bool:
        """Returns whether a value has a second array."""

    @abc.abstractmethod
    def unpack(self, value: ValueT, form: bool) -> Sequence[Array]:
        """Returns the arrays of a value; the first is that of the program."""

    @abc.abstractmethod
    def second_type(self, aval: Aval) -> Aval:
        """Returns the type of a second array, for the type that the program has."""

    @abc.abstractmethod
    def second_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of a second array in a ``shard_map``."""

    @abc.abstractmethod
    def nothing(self, n: int) -> PyTree:
        """Returns the sums of some ops before they run."""

    @abc.abstractmethod
    def add(self, one: PyTree, other: PyTree) -> PyTree:
        """Returns the sums of two runs of the same ops."""

    def unpack_rows(self, value: ValueT, form: bool) -> Sequence[Array]:
        """Returns stacked arrays, with a row for each step."""
        return self.unpack(value, form)

    def pack_rows(self, *arrays: Array) -> ValueT:
        """Returns the value of stacked arrays of the steps of a loop."""
        return self._value(*arrays)

    def unpack_device(
        self, value: ValueT, form: bool, axes: frozenset[str]
    ) -> Sequence[Array]:
        """Returns the arrays of a result of a ``shard_map``, which fit its specs."""
        del axes
        return self.unpack(value, form)

    # ------------------------------------------------------------------ what is noted

    def note(self, ops: Sequence[OpT], sums: PyTree) -> None:
        """Adds ops with their sums."""
        self._noted.append((ops, sums))

    def found(self) -> tuple[list[OpT], PyTree]:
        """Returns the ops and their sums, each column in one array."""
        ops = [op for ops, _ in self._noted for op in ops]
        return ops, stacked([sums for _, sums in self._noted] or [self.nothing(0)])

    # ------------------------------------------------------------------------- values

    def unpack_all(
        self, values: Sequence[ValueT], forms: Sequence[bool]
    ) -> list[Array]:
        """Returns the arrays of several values, one value after the other."""
        pairs = zip(values, forms, strict=True)
        return [array for value, form in pairs for array in self.unpack(value, form)]

    def pack_all(
        self,
        arrays: Sequence[Array],
        forms: Sequence[bool],
        pack: Callable[..., ValueT] | None = None,
    ) -> list[ValueT]:
        """Returns the values of the arrays that ``unpack_all`` returns.

        Args:
          arrays: the arrays.
          forms: the forms of the values.
          pack: returns the value of one array or of two.
        """
        left = iter(arrays)
        return [
            (pack or self._value)(*itertools.islice(left, 1 + form)) for form in forms
        ]

    def converted(
        self, values: Sequence[ValueT], forms: Sequence[bool]
    ) -> list[ValueT]:
        """Returns the carries of a loop in other forms."""
        return self.pack_all(self.unpack_all(values, forms), forms)

    # ------------------------------------------------------------------ the equations

    def run(
        self, jaxpr: Jaxpr, operands: Sequence[ValueT], site: Place = TOP
    ) -> list[ValueT]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          operands: the values of its inputs.
          site: its place; by default it is a whole program.
        """
        parts = structure.parts(jaxpr)
        consts = map(self._value, parts.consts)
        env = dict(zip(parts.constvars, consts, strict=True))
        env.update(zip(parts.invars, operands, strict=True))

        def read(atom: Var) -> ValueT:
            if structure.is_literal(atom):
                return self._value(structure.as_array(atom.val))
            return env[atom]

        for eqn in parts.eqns:
            with source.context_of(eqn):
                here = site.enter(eqn, params.trips(eqn))
                results = self._step(eqn, list(map(read, eqn.invars)), here)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, parts.outvars))

    def _step(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs an equation of any kind."""
        op = params.op_of(eqn)
        if op in params.CALLED:
            return self.call(eqn, operands, site)
        if op == "cond":
            return self._cond(eqn, operands, site)
        if op == "shard_map":
            return self._shard_map(eqn, operands, site)
        if op in params.LOOPS:
            return self._loop(eqn, operands, site)
        return self.equation(eqn, operands, site)

    def call(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the jaxpr of a call in its place, without a rule of its own."""
        return self.run(params.body_of(eqn), operands, site)

    # ------------------------------------------------------------------ jaxprs inside

    def body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[ValueT],
        site: Place,
        required: Sequence[bool] = (),
    ) -> Body[OpT]:
        """Returns a jaxpr inside of an equation as a jaxpr of the tool's arrays.

        Args:
          jaxpr: the jaxpr.
          operands: the values of its operands.
          site: the place of the equation.
          required: the forms of its first results.
        """
        forms = tuple(map(self.form, operands))
        of_results: list[bool] = []
        ops: list[OpT] = []

        def run(*arrays: Array) -> list[Array]:
            results, sums = self._run_inside(jaxpr, arrays, forms, site, ops)
            of_results[:] = map(self.form, results)
            pairs = zip(of_results, required, strict=False)
            of_results[: len(required)] = map(any, pairs)
            return [*self.unpack_all(results, of_results), *jax.tree.leaves(sums)]

        types = map(structure.type_of, structure.parts(jaxpr).invars)
        avals = _with_seconds(types, forms, self.second_type)
        traced = structure.trace(run, avals, jaxpr)
        n_sums = jax.tree.structure(self.nothing(0)).num_leaves
        axes = sharding.varying_axes(structure.parts(traced).outvars[-n_sums:])
        return Body(traced, forms, tuple(of_results), ops, axes)

    def _run_inside(
        self,
        jaxpr: Jaxpr,
        arrays: Sequence[Array],
        forms: Sequence[bool],
        site: Place,
        ops: list[OpT],
    ) -> tuple[list[ValueT], PyTree]:
        """Runs a jaxpr inside; returns its results and sums, and adds its ops."""
        tool = self.inner()
        results = tool.run(jaxpr, tool.pack_all(arrays, forms), site)
        ops[:], sums = tool.found()
        return results, sums

    def collect_results(
        self,
        eqn: Eqn,
        bodies: Sequence[tuple[Body[OpT], Sequence[ValueT]]],
        arrays: Sequence[Array],
        number: int = 0,
    ) -> list[ValueT]:
        """Returns the results of a bound equation, and notes the sums after them.

        Args:
          eqn: the equation.
          bodies: the jaxprs inside, each with its operands.
          arrays: the arrays of the results, then the sums of each jaxpr.
          number: the number of the jaxpr whose results they are.
        """
        of_sums = jax.tree.structure([self.nothing(0)] * len(bodies))
        n = len(arrays) - of_sums.num_leaves
        for (body, _), sums in zip(bodies, of_sums.unflatten(arrays[n:]), strict=True):
            self.note(body.ops, sums)
        of, _ = bodies[number]
        if params.op_of(eqn) != "scan":
            return self.pack_all(arrays[:n], of.results)
        n_carry = params.loop_of(eqn).n_carry
        whole, rows = of.results[:n_carry], of.results[n_carry:]
        at = len(whole) + sum(whole)
        stacked = self.pack_all(arrays[at:n], rows, self.pack_rows)
        return [*self.pack_all(arrays[:at], whole), *stacked]

    def _split(
        self, body: Body[OpT], arrays: Sequence[Array]
    ) -> tuple[list[Array], PyTree]:
        """Runs a body; returns the arrays of its results, and its sums."""
        of_sums = jax.tree.structure(self.nothing(0))
        out = structure.evaluate(body.jaxpr, arrays)
        n = len(out) - of_sums.num_leaves
        return out[:n], of_sums.unflatten(out[n:])

    def _start_sums(self, body: Body[OpT]) -> PyTree:
        """Returns the sums of a body before it runs."""
        return _varying(self.nothing(len(body.ops)), body.axes)

    # -------------------------------------------------------------- how sums add up

    def _cond(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the branches of a cond; each returns the sums of all."""
        index, *others = operands
        traced = params.branches_of(eqn)
        branches = [self.body(branch, others, site) for branch in traced]
        rows = [branch.results for branch in branches]
        forms = tuple(map(any, zip(*rows, strict=True)))
        branches = [
            branch if branch.results == forms else self.body(jaxpr, others, site, forms)
            for branch, jaxpr in zip(branches, traced, strict=True)
        ]

        def run(i: int, *arrays: Array) -> list[Array]:
            results, new = self._split(branches[i], arrays)
            sums = list(map(self._start_sums, branches))
            sums[i] = _varying(new, branches[i].axes)
            return [*results, *jax.tree.leaves(sums)]

        arrays = self.unpack_all(others, branches[0].operands)
        avals = list(map(structure.type_of_value, arrays))
        jaxprs = [
            structure.trace(functools.partial(run, i), avals, branch.jaxpr)
            for i, branch in enumerate(branches)
        ]
        which = self.unpack(index, self.form(index))[0]
        out = params.bind_cond(eqn, [which, *arrays], jaxprs)
        return self.collect_results(eqn, [(branch, others) for branch in branches], out)

    def _loop(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs a loop."""
        loop = params.loop_of(eqn)
        if loop.cond is not None and _has_lanes(loop.cond):
            return self.equation(eqn, operands, site)
        of_test, of_step = operands[: loop.n_cond], list(operands[loop.n_cond :])
        step = self._settle(loop, of_step, site)
        if loop.cond is None:
            out = self._scan(eqn, loop, of_step, step)
            return self.collect_results(eqn, [(step, of_step)], out)
        of_test = [*of_test, *of_step[loop.carries]]
        test = self.body(loop.cond, of_test, site)
        out = self._while(loop, of_test[: loop.n_cond], of_step, test, step)
        bodies = [(test, of_test), (step, of_step)]
        return self.collect_results(eqn, bodies, out, number=1)

    def _settle(
        self, loop: params.Loop, operands: list[ValueT], site: Place
    ) -> Body[OpT]:
        """Returns the body of a loop, traced until its carries keep their forms.

        Args:
          loop: the loop.
          operands: the operands of its body; the carries change their forms.
          site: the place of the loop.
        """
        first = operands[loop.carries]
        forms = list(map(self.form, first))
        while True:
            operands[loop.carries] = self.converted(first, forms)
            body = self.body(loop.body, operands, site, forms)
            found = list(body.results[: loop.n_carry])
            if found == forms:
                return body
            forms = found

    def _scan(
        self,
        eqn: Eqn,
        loop: params.Loop,
        operands: Sequence[ValueT],
        body: Body[OpT],
    ) -> Sequence[Array]:
        """Runs a scan, which carries the sums."""
        n_consts, at, n = loop.n_consts, loop.carries, loop.carries.stop
        consts = self.unpack_all(operands[:n_consts], body.operands[:n_consts])
        start = self.unpack_all(operands[at], body.operands[at])
        pairs = zip(operands[n:], body.operands[n:], strict=True)
        rows = [array for pair in pairs for array in self.unpack_rows(*pair)]

        def step(
            carry: tuple[Sequence[Array], PyTree], rows: Sequence[Array]
        ) -> tuple[tuple[list[Array], PyTree], list[Array]]:
            arrays, sums = carry
            out, new = self._split(body, [*consts, *arrays, *rows])
            return (out[: len(start)], self.add(sums, new)), out[len(start) :]

        options = params.scan_options(eqn)
        first = start, self._start_sums(body)
        (last, sums), stacks = lax.scan(step, first, rows, **options)
        return [*last, *stacks, *jax.tree.leaves(sums)]

    def _while(
        self,
        loop: params.Loop,
        consts: Sequence[ValueT],
        operands: Sequence[ValueT],
        test: Body[OpT],
        step: Body[OpT],
    ) -> Sequence[Array]:
        """Runs a while, which carries the sums of its condition and of its body."""
        n, at = loop.n_consts, loop.carries
        of_test = self.unpack_all(consts, test.operands[: loop.n_cond])
        of_step = self.unpack_all(operands[:n], step.operands[:n])
        first = self.unpack_all(operands[at], step.operands[at])

        def tested(carry: Sequence[Array], sums: PyTree) -> tuple[Array, PyTree]:
            (goes_on, *_), new = self._split(test, [*of_test, *carry])
            return goes_on, self.add(sums, new)

        def run(
            state: tuple[Sequence[Array], PyTree, tuple[Array, PyTree]],
        ) -> tuple[list[Array], PyTree, tuple[Array, PyTree]]:
            carry, sums, (_, sums_of_test) = state
            after, new = self._split(step, [*of_step, *carry])
            return after, self.add(sums, new), tested(after, sums_of_test)

        # The predicate is carried along, so that it is computed once for each step.
        start = first, self._start_sums(step), tested(first, self._start_sums(test))
        last, sums, (_, of_tests) = lax.while_loop(lambda s: s[2][0], run, start)
        return [*last, *jax.tree.leaves([of_tests, sums])]

    def _shard_map(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the function of each device; sums add up over the devices."""
        jaxpr, forms = params.body_of(eqn), tuple(map(self.form, operands))
        call = sharding.shard_map_of(eqn)
        axes = call.axes
        arrays = self.unpack_all(operands, forms)
        of_results: list[bool] = []
        ops: list[OpT] = []

        def run(*arrays: Array) -> tuple[list[Array], PyTree]:
            results, sums = self._run_inside(jaxpr, arrays, forms, site, ops)
            of_results[:] = map(self.form, results)
            pairs = zip(results, of_results, strict=True)
            out = [array for pair in pairs for array in self.unpack_device(*pair, axes)]
            return out, self._add_over_devices(sums, axes)

        def trace_once(*arrays: Array) -> tuple[()]:
            run(*arrays)
            return ()

        in_specs = tuple(_with_seconds(call.in_specs, forms, self.second_spec))
        # The specs of the results depend on their forms, which a first trace finds.
        jax.eval_shape(call.map(trace_once, in_specs, ()), *arrays)
        out_specs = _with_seconds(call.out_specs, of_results, self.second_spec)
        mapped = call.map(run, in_specs, (out_specs, jax.P()))
        # Outside of jit, JAX would compile each op for all devices.
        out, sums = jax.jit(mapped)(*arrays)
        self.note(ops, sums)
        return self.pack_all(out, of_results)

    def _add_over_devices(self, sums: PyTree, axes: frozenset[str]) -> PyTree:
        rows = jax.tree.map(lambda column: sharding.gathered(column, axes), sums)
        first, others = (
            jax.tree.map(lambda column, at=at: column[at], rows)
            for at in (0, slice(1, None))
        )
        return lax.scan(lambda sums, row: (self.add(sums, row), None), first, others)[0]


def _with_seconds(
    of_program: Iterable[AnyT], forms: Sequence[bool], second: Callable[[AnyT], AnyT]
) -> list[AnyT]:
    """Returns the types or the specs of all arrays, given those of the program."""
    found: list[AnyT] = []
    for one, form in zip(of_program, forms, strict=True):
        found += [one, second(one)] if form else [one]
    return found


def _varying(sums: PyTree, axes: frozenset[str]) -> PyTree:
    """Returns sums whose types state that they may differ over some mapped axes."""
    return jax.tree.map(lambda column: sharding.as_varying(column, axes), sums)


def _has_lanes(cond: Jaxpr) -> bool:
    """Whether vmap has given a while loop one predicate for each batch element."""
    (predicate,) = structure.parts(cond).outvars
    return bool(predicate.aval.shape)
