"""Runs a jaxpr on values of another kind, and enters each primitive that contains one.

A value may be one array or several, such as an array with a flag, or an array on two
lanes. A tool, which is a subclass, says which arrays a value is and how an equation
without a jaxpr inside runs. It may note ops, with sums of numbers for each of them,
which add up over the steps of loops and over devices.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.jaxprs import params, sharding, source, structure
from jmp_lite.jaxprs.dataflow import has_lanes
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, PyTree

Value = TypeVar("Value")
Form = TypeVar("Form")
Op = TypeVar("Op")


class Place(NamedTuple):
    """The place of a program inside of another.

    Attributes:
      path: the scopes around it.
      source: the line of user code that calls it.
      times: how often it runs; None if unknown.
      is_backward: whether it belongs to a backward pass.
    """

    path: str = ""
    source: str = ""
    times: int | None = 1
    is_backward: bool = False

    def inside(self, eqn: Eqn, trips: int | None) -> "Place":
        """Returns the place of a program that an equation runs."""
        return Place(
            path=source.path_of(eqn, self.path),
            source=source.source(eqn, self.source),
            times=self.times and trips and self.times * trips,
            is_backward=self.is_backward or source.is_transposed(eqn),
        )


TOP = Place()


class Body(NamedTuple, Generic[Form, Op]):
    """A jaxpr of a tool's arrays.

    Attributes:
      jaxpr: the closed jaxpr. It takes the arrays of its operands. It returns the
        arrays of its results, then those of the sums.
      given: the forms of its operands.
      made: the forms of its results.
      ops: the ops inside.
      axes: the mapped axes over which the sums differ.
    """

    jaxpr: Jaxpr
    given: tuple[Form, ...]
    made: tuple[Form, ...]
    ops: Sequence[Op]
    axes: frozenset[str]


class Evaluator(abc.ABC, Generic[Value, Form, Op]):
    """Runs jaxprs; what a value is, and how an equation runs, is up to a subclass.

    Attributes:
      keeps_calls: whether checkpoints, derivative rules and the like stay. Otherwise
        their jaxprs run in their place.
    """

    keeps_calls = True

    def __init__(self) -> None:
        self._noted: list[tuple[Sequence[Op], PyTree]] = []

    # ----------------------------------------------------------- what a tool defines

    @abc.abstractmethod
    def equation(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        """Runs an equation whose jaxprs, if it has some, are not entered."""

    @abc.abstractmethod
    def constant(self, array: Any) -> Value:
        """Returns the value of a constant or a literal."""

    @abc.abstractmethod
    def inner(self) -> "Evaluator[Value, Form, Op]":
        """Returns the tool for a jaxpr inside, without ops."""

    @abc.abstractmethod
    def form(self, value: Value) -> Form:
        """Returns which arrays a value is."""

    @abc.abstractmethod
    def join(self, one: Form, other: Form) -> Form:
        """Returns the form of a value that has one of two forms."""

    @abc.abstractmethod
    def array(self, value: Value) -> Array:
        """Returns the array that the program has in a value's place."""

    @abc.abstractmethod
    def arrays(self, values: Sequence[Value], forms: Sequence[Form]) -> list[Array]:
        """Returns the arrays of values: first those of the program, then others."""

    @abc.abstractmethod
    def values(self, arrays: Sequence[Array], forms: Sequence[Form]) -> list[Value]:
        """Returns the values of arrays; see ``arrays``."""

    @abc.abstractmethod
    def types(self, avals: Sequence[Aval], forms: Sequence[Form]) -> list[Aval]:
        """Returns the types of ``arrays``, for the types that the program has."""

    @abc.abstractmethod
    def specs(self, specs: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
        """Returns the specs of ``arrays`` in a ``shard_map``, for the program's."""

    @abc.abstractmethod
    def nothing(self, n: int) -> PyTree:
        """Returns the sums of some ops before they run."""

    @abc.abstractmethod
    def add(self, one: PyTree, other: PyTree) -> PyTree:
        """Returns the sums of two runs of the same ops."""

    def slices(self, values: Sequence[Value], forms: Sequence[Form]) -> list[Array]:
        """Returns arrays whose rows are the ``arrays`` of a step."""
        return self.arrays(values, forms)

    def stacked(self, arrays: Sequence[Array], forms: Sequence[Form]) -> list[Value]:
        """Returns the values of stacked ``arrays`` of the steps of a loop."""
        return self.values(arrays, forms)

    def from_devices(
        self, arrays: Sequence[Array], axes: frozenset[str]
    ) -> Sequence[Array]:
        """Returns ``arrays`` of results of a ``shard_map`` that fit ``specs``."""
        del axes
        return arrays

    def beside(self, array: Array, value: Value) -> Value:
        """Returns a value with another array of the same numbers, which is derived."""
        del array
        return value

    def stopped(self, value: Value) -> Value:
        """Returns a value without derivatives."""
        return value

    # ------------------------------------------------------------------ what is noted

    def note(self, ops: Sequence[Op], sums: PyTree) -> None:
        """Adds ops with their sums."""
        self._noted.append((ops, sums))

    def found(self) -> tuple[list[Op], PyTree]:
        """Returns the ops and their sums, each column in one array."""
        return self.joined(self._noted)

    def joined(
        self, parts: Sequence[tuple[Sequence[Op], PyTree]]
    ) -> tuple[list[Op], PyTree]:
        """Returns several lists of ops as one, with their sums."""

        def join(*columns: Array) -> Array:
            return jnp.concatenate([jnp.ravel(column) for column in columns])

        ops = [op for ops, _ in parts for op in ops]
        columns = [sums for _, sums in parts]
        return ops, jax.tree.map(join, *columns) if columns else self.nothing(0)

    # ------------------------------------------------------------------------ the run

    def run(
        self, jaxpr: Jaxpr, operands: Sequence[Value], place: Place = TOP
    ) -> list[Value]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          operands: the values of its inputs.
          place: its place.
        """
        parts = structure.parts(jaxpr)
        env = dict(zip(parts.constvars, map(self.constant, parts.consts), strict=True))
        env.update(zip(parts.invars, operands, strict=True))

        def read(atom: Any) -> Value:
            is_literal = structure.is_literal(atom)
            return (
                self.constant(structure.as_array(atom.val)) if is_literal else env[atom]
            )

        for eqn in parts.eqns:
            given = list(map(read, eqn.invars))
            with source.context_of(eqn):
                results = self._equation(eqn, given, place)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, parts.outvars))

    def _equation(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        op, called = params.op_of(eqn), params.called(eqn)
        inside = place.inside(eqn, params.trips(eqn))
        if op == "scan":
            return self._scan(eqn, operands, inside)
        if op == "while" and not has_lanes(eqn):
            return self._while(eqn, operands, inside)
        if op == "cond":
            return self._cond(eqn, operands, inside)
        if op == "shard_map":
            return self._shard_map(eqn, operands, inside)
        if called is None:
            return self.equation(eqn, operands, place)
        if op in params.MERE_CALLS or not self.keeps_calls:
            return self.run(called, operands, inside)
        if op in params.REMAT:
            return self._remat(eqn, operands, inside)
        if not params.has_only_axis_effects(eqn):  # They must happen once.
            return self.equation(eqn, operands, place)
        # The equation keeps its rules; its jaxpr runs once more, to be looked at.
        seen = self.run(called, list(map(self.stopped, operands)), inside)
        arrays = params.bind(eqn, list(map(self.array, operands)))
        return list(map(self.beside, arrays, seen))

    def _body(
        self,
        jaxpr: Jaxpr,
        given: Sequence[Form],
        place: Place,
        least: Sequence[Form] = (),
    ) -> Body[Form, Op]:
        """Returns a jaxpr as a jaxpr of the tool's arrays.

        Args:
          jaxpr: the jaxpr.
          given: the forms of its operands.
          place: its place.
          least: the forms that its first results must have, or a larger one.
        """
        made: list[Form] = []
        ops: list[Op] = []

        def run(*arrays: Array) -> list[Array]:
            tool = self.inner()
            results = tool.run(jaxpr, self.values(arrays, given), place)
            made[:] = map(self.form, results)
            made[: len(least)] = map(self.join, made, least)
            ops[:], sums = tool.found()
            return [*self.arrays(results, made), *jax.tree.leaves(sums)]

        avals = [structure.type_of(var) for var in structure.parts(jaxpr).invars]
        traced = structure.trace(run, self.types(avals, given), jaxpr)
        n_sums = jax.tree.structure(self.nothing(0)).num_leaves
        axes = sharding.varying_axes(structure.parts(traced).outvars[-n_sums:])
        return Body(traced, tuple(given), tuple(made), ops, axes)

    def _results(
        self, body: Body[Form, Op], arrays: Sequence[Array]
    ) -> tuple[list[Value], PyTree]:
        """Returns what the jaxpr of a body returns as results and sums."""
        of_sums = jax.tree.structure(self.nothing(0))
        n = len(arrays) - of_sums.num_leaves
        sums = jax.tree.unflatten(of_sums, arrays[n:])
        return self.values(arrays[:n], body.made), sums

    def _before(self, body: Body[Form, Op]) -> PyTree:
        """Returns the sums of a body before it runs."""
        return _varying(self.nothing(len(body.ops)), body.axes)

    def _remat(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        body = self._body(params.body_of(eqn), list(map(self.form, operands)), place)
        jaxpr, consts = structure.with_consts_as_inputs(body.jaxpr)
        arrays = self.arrays(operands, body.given)
        out = params.bind_remat(eqn, [*consts, *arrays], jaxpr)
        results, sums = self._results(body, out)
        self.note(body.ops, sums)
        return results

    def _loop_body(
        self, jaxpr: Jaxpr, operands: Sequence[Value], carries: slice, place: Place
    ) -> Body[Form, Op]:
        """Returns the body of a loop, whose carries have one form in all steps."""
        given = list(map(self.form, operands))
        while True:
            body = self._body(jaxpr, given, place, given[carries])
            found = list(body.made[: len(given[carries])])
            if found == given[carries]:
                return body
            given[carries] = found

    def _scan(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        n_consts, n_carry = params.scan_counts(eqn)
        n = n_consts + n_carry
        body = self._loop_body(params.body_of(eqn), operands, slice(n_consts, n), place)
        of_carry, of_rows = body.made[:n_carry], body.made[n_carry:]
        known = self._known(operands[:n_consts], body.given[:n_consts])

        def step(carry: Any, rows: Any) -> Any:
            arrays, sums = carry
            given = [
                *known,
                *self.values(arrays, of_carry),
                *self.values(rows, body.given[n:]),
            ]
            results, new = self._run_body(body, given)
            after = self.arrays(results[:n_carry], of_carry), self.add(sums, new)
            return after, self.arrays(results[n_carry:], of_rows)

        start = self.arrays(operands[n_consts:n], of_carry), self._before(body)
        rows = self.slices(operands[n:], body.given[n:])
        options = params.scan_options(eqn)
        (last, sums), stacks = lax.scan(step, start, rows, **options)
        self.note(body.ops, sums)
        return [*self.values(last, of_carry), *self.stacked(stacks, of_rows)]

    def _while(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        loop = params.while_parts(eqn)
        n_test, n_consts = loop.n_cond, loop.n_cond + loop.n_body
        carries = slice(loop.n_body, None)
        body = self._loop_body(loop.body, operands[n_test:], carries, place)
        of_test = [*map(self.form, operands[:n_test]), *body.made]
        test = self._body(loop.cond, of_test, place)
        known = self._known(operands[:n_consts], [*of_test[:n_test], *body.given])

        def tested(carry: Sequence[Value], sums: PyTree) -> Any:
            (goes_on,), new = self._run_body(test, [*known[:n_test], *carry])
            return self.array(goes_on), self.add(sums, new)

        def step(state: Any) -> Any:
            arrays, sums, (_, sums_of_test) = state
            carry = self.values(arrays, body.made)
            results, new = self._run_body(body, [*known[n_test:], *carry])
            after = self.arrays(results, body.made)
            return after, self.add(sums, new), tested(results, sums_of_test)

        first = list(operands[n_consts:])
        # The predicate is carried along, so that it is computed once for each step.
        start = (
            self.arrays(first, body.made),
            self._before(body),
            tested(first, self._before(test)),
        )
        last, sums, (_, sums_of_test) = lax.while_loop(lambda s: s[2][0], step, start)
        self.note(test.ops, sums_of_test)
        self.note(body.ops, sums)
        return self.values(last, body.made)

    def _known(self, values: Sequence[Value], forms: Sequence[Form]) -> list[Value]:
        """Returns values that a loop does not change, computed outside of it."""
        forms = forms[: len(values)]
        return self.values(self.arrays(values, forms), forms)

    def _run_body(
        self, body: Body[Form, Op], operands: Sequence[Value]
    ) -> tuple[list[Value], PyTree]:
        arrays = self.arrays(operands, body.given)
        return self._results(body, structure.evaluate(body.jaxpr, arrays))

    def _cond(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        index, *others = operands
        given, traced = list(map(self.form, others)), params.branches_of(eqn)
        branches = [self._body(branch, given, place) for branch in traced]
        made = list(branches[0].made)
        for branch in branches[1:]:
            made = list(map(self.join, made, branch.made))
        branches = [
            branch
            if list(branch.made) == made
            else self._body(jaxpr, given, place, made)
            for branch, jaxpr in zip(branches, traced, strict=True)
        ]
        arrays = self.arrays(others, given)
        avals = list(map(structure.type_of_value, arrays))
        jaxprs = tuple(
            structure.trace(self._taken(branches, i), avals, branch.jaxpr)
            for i, branch in enumerate(branches)
        )
        out = params.bind_cond(eqn, [self.array(index), *arrays], jaxprs)
        of_sums = jax.tree.structure([self.nothing(0)] * len(branches))
        n = len(out) - of_sums.num_leaves
        sums = jax.tree.unflatten(of_sums, out[n:])
        for branch, each in zip(branches, sums, strict=True):
            self.note(branch.ops, each)
        return self.values(out[:n], made)

    def _taken(
        self, branches: Sequence[Body[Form, Op]], i: int
    ) -> Callable[..., list[Array]]:
        """Returns a function that runs one branch, with sums for all branches."""

        def run(*arrays: Array) -> list[Array]:
            results, new = self._results(
                branches[i], structure.evaluate(branches[i].jaxpr, arrays)
            )
            sums = list(map(self._before, branches))
            sums[i] = _varying(new, branches[i].axes)
            made = self.arrays(results, branches[i].made)
            return [*made, *jax.tree.leaves(sums)]

        return run

    def _shard_map(
        self, eqn: Eqn, operands: Sequence[Value], place: Place
    ) -> Sequence[Value]:
        jaxpr, given = params.body_of(eqn), list(map(self.form, operands))
        options = params.shard_map_arguments(eqn)
        axes = frozenset[str](options["axis_names"])
        specs = options["out_specs"]
        options["in_specs"] = tuple(self.specs(options["in_specs"], given))
        arrays = self.arrays(operands, given)
        made: list[Form] = []
        ops: list[Op] = []

        def run(*arrays: Array) -> tuple[list[Array], PyTree]:
            tool = self.inner()
            results = tool.run(jaxpr, self.values(arrays, given), place)
            made[:] = map(self.form, results)
            ops[:], sums = tool.found()
            made_arrays = self.from_devices(self.arrays(results, made), axes)
            return list(made_arrays), self._of_all_devices(sums, axes)

        def look(*arrays: Array) -> tuple[()]:
            run(*arrays)
            return ()

        # The specs of the results depend on their forms, which a first trace finds.
        options["out_specs"] = ()
        jax.eval_shape(jax.shard_map(look, **options), *arrays)
        options["out_specs"] = (self.specs(specs, made), jax.P())
        # Outside of jit, JAX would compile each op for all devices.
        results, sums = jax.jit(jax.shard_map(run, **options))(*arrays)
        self.note(ops, sums)
        return self.values(results, made)

    def _of_all_devices(self, sums: PyTree, axes: frozenset[str]) -> PyTree:
        rows = jax.tree.map(lambda column: sharding.gathered(column, axes), sums)
        first, others = (
            jax.tree.map(lambda column, at=at: column[at], rows)
            for at in (0, slice(1, None))
        )
        return lax.scan(lambda sums, row: (self.add(sums, row), None), first, others)[0]


def _varying(sums: PyTree, axes: frozenset[str]) -> PyTree:
    """Returns sums whose types state that they may differ over some mapped axes."""
    return jax.tree.map(lambda column: sharding.as_varying(column, axes), sums)
