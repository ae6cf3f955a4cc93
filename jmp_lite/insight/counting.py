"""Runs jaxprs, and adds up sums of numbers for each op, over steps and devices."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jmp_lite.insight.statistics import stacked
from jmp_lite.insight.tables import TOP, Place
from jmp_lite.jaxprs import params, sharding, structure
from jmp_lite.jaxprs.dataflow import has_lanes
from jmp_lite.jaxprs.evaluate import Body, Evaluator, Frame
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, Literal, PyTree, Var

ValueT = TypeVar("ValueT")
OpT = TypeVar("OpT")
AnyT = TypeVar("AnyT")


@dataclasses.dataclass(frozen=True)
class CountedBody(Body[bool], Generic[OpT]):
    """A jaxpr of a tool's arrays, which returns sums after its results.

    Attributes:
      ops: the ops inside.
      axes: the mapped axes over which the sums differ.
    """

    ops: Sequence[OpT]
    axes: frozenset[str]


class _CountingFrame(Frame[ValueT, Place]):
    """The values of one jaxpr."""

    def enter(self, eqn: Eqn) -> tuple[Sequence[ValueT], Place]:
        """Returns the operands of an equation, and its place."""
        operands = list(map(self.read, eqn.invars))
        return operands, self.site.enter(eqn, params.trips(eqn))


class CountingEvaluator(
    Evaluator[ValueT, bool, Place, CountedBody[OpT]], Generic[ValueT, OpT]
):
    """Runs jaxprs, and notes ops with their sums.

    A value is the array of the program, or that and a second one. Its form is whether
    it has a second array.

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

    def pack_rows(self, arrays: Sequence[Array], form: bool) -> ValueT:
        """Returns the value of stacked arrays of the steps of a loop."""
        return self.pack(arrays, form)

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

    # --------------------------------------------------------------------- the values

    def constant(self, var: Var, array: Array) -> ValueT:
        """Returns the value of a constant, of which nothing else is known."""
        del var
        return self._value(array)

    def literal(self, atom: Literal) -> ValueT:
        """Returns the value of a literal, which is that of a constant."""
        return self.constant(atom, structure.as_array(atom.val))

    def join(self, forms: Sequence[bool]) -> bool:
        """Returns whether a value has a second array in any of several cases."""
        return any(forms)

    def width(self, form: bool) -> int:
        """Returns the number of arrays of a value."""
        return 1 + form

    def pack(self, arrays: Sequence[Array], form: bool) -> ValueT:
        """Returns the value of one array or of two."""
        del form
        return self._value(*arrays)

    # ------------------------------------------------------------------ the equations

    def run_program(self, jaxpr: Jaxpr, operands: Sequence[ValueT]) -> list[ValueT]:
        """Returns the results of a whole program."""
        return self.run(jaxpr, operands, TOP)

    def frame(
        self, jaxpr: Jaxpr, operands: Sequence[ValueT], site: Place
    ) -> Frame[ValueT, Place]:
        """Returns the values of a jaxpr before it runs."""
        return _CountingFrame(self, jaxpr, operands, site)

    def step(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs an equation of any kind."""
        if params.op_of(eqn) == "while" and has_lanes(eqn):
            return self.equation(eqn, operands, site)
        return super().step(eqn, operands, site)

    def call(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the jaxpr of a call in its place."""
        return self.run(params.body_of(eqn), operands, site)

    def custom(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the jaxpr of a function in its place, without its rules."""
        return self.run(params.body_of(eqn), operands, site)

    # ------------------------------------------------------------------ jaxprs inside

    def body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[ValueT],
        site: Place,
        required: Sequence[bool] = (),
    ) -> CountedBody[OpT]:
        """Returns a jaxpr of the tool's arrays; see ``Evaluator``."""
        given = tuple(map(self.form, operands))
        made: list[bool] = []
        ops: list[OpT] = []

        def run(*arrays: Array) -> list[Array]:
            results, sums = self._run_inside(jaxpr, arrays, given, site, ops)
            made[:] = map(self.form, results)
            pairs = zip(made, required, strict=False)
            made[: len(required)] = map(self.join, pairs)
            return [*self.unpack_all(results, made), *jax.tree.leaves(sums)]

        types = map(structure.type_of, structure.parts(jaxpr).invars)
        avals = _with_seconds(types, given, self.second_type)
        traced = structure.trace(run, avals, jaxpr)
        n_sums = jax.tree.structure(self.nothing(0)).num_leaves
        axes = sharding.varying_axes(structure.parts(traced).outvars[-n_sums:])
        return CountedBody(traced, given, tuple(made), ops, axes)

    def _run_inside(
        self,
        jaxpr: Jaxpr,
        arrays: Sequence[Array],
        given: Sequence[bool],
        site: Place,
        ops: list[OpT],
    ) -> tuple[list[ValueT], PyTree]:
        """Runs a jaxpr inside; returns its results and sums, and adds its ops."""
        tool = self.inner()
        results = tool.run(jaxpr, tool.pack_all(arrays, given), site)
        ops[:], sums = tool.found()
        return results, sums

    def collect_results(
        self,
        eqn: Eqn,
        bodies: Sequence[tuple[CountedBody[OpT], Sequence[ValueT]]],
        arrays: Sequence[Array],
        number: int = 0,
    ) -> list[ValueT]:
        """Returns the results of an equation, and notes the sums after them."""
        of_sums = jax.tree.structure([self.nothing(0)] * len(bodies))
        n = len(arrays) - of_sums.num_leaves
        for (body, _), sums in zip(bodies, of_sums.unflatten(arrays[n:]), strict=True):
            self.note(body.ops, sums)
        of, _ = bodies[number]
        if params.op_of(eqn) != "scan":
            return self.pack_all(arrays[:n], of.made)
        _, n_carry = params.scan_counts(eqn)
        whole, rows = of.made[:n_carry], of.made[n_carry:]
        at = sum(map(self.width, whole))
        stacked = self.pack_all(arrays[at:n], rows, self.pack_rows)
        return [*self.pack_all(arrays[:at], whole), *stacked]

    def _split(
        self, body: CountedBody[OpT], arrays: Sequence[Array]
    ) -> tuple[list[Array], PyTree]:
        """Runs a body; returns the arrays of its results, and its sums."""
        of_sums = jax.tree.structure(self.nothing(0))
        out = structure.evaluate(body.jaxpr, arrays)
        n = len(out) - of_sums.num_leaves
        return out[:n], of_sums.unflatten(out[n:])

    def _start_sums(self, body: CountedBody[OpT]) -> PyTree:
        """Returns the sums of a body before it runs."""
        return _varying(self.nothing(len(body.ops)), body.axes)

    # -------------------------------------------------------------- how sums add up

    def bind_cond(
        self,
        eqn: Eqn,
        arrays: Sequence[Array],
        branches: Sequence[CountedBody[OpT]],
    ) -> Sequence[Array]:
        """Binds a cond; each branch returns the sums of all."""

        def run(i: int, *arrays: Array) -> list[Array]:
            results, new = self._split(branches[i], arrays)
            sums = list(map(self._start_sums, branches))
            sums[i] = _varying(new, branches[i].axes)
            return [*results, *jax.tree.leaves(sums)]

        avals = list(map(structure.type_of_value, arrays[1:]))
        jaxprs = [
            structure.trace(functools.partial(run, i), avals, branch.jaxpr)
            for i, branch in enumerate(branches)
        ]
        return params.bind_cond(eqn, arrays, jaxprs)

    def bind_scan(
        self, eqn: Eqn, operands: Sequence[ValueT], body: CountedBody[OpT]
    ) -> Sequence[Array]:
        """Binds a scan, which carries the sums."""
        n_consts, n_carry = params.scan_counts(eqn)
        n = n_consts + n_carry
        consts = self.unpack_all(operands[:n_consts], body.given[:n_consts])
        start = self.unpack_all(operands[n_consts:n], body.given[n_consts:n])
        pairs = zip(operands[n:], body.given[n:], strict=True)
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

    def bind_while(
        self,
        eqn: Eqn,
        operands: Sequence[ValueT],
        test: CountedBody[OpT],
        step: CountedBody[OpT],
    ) -> Sequence[Array]:
        """Binds a while, which carries the sums of its condition and of its body."""
        loop = params.while_parts(eqn)
        n, n_consts = loop.n_cond, loop.n_cond + loop.n_body
        of_test = self.unpack_all(operands[:n], test.given[:n])
        of_step = self.unpack_all(operands[n:n_consts], step.given[: loop.n_body])
        first = self.unpack_all(operands[n_consts:], step.given[loop.n_body :])

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

    def shard_map(
        self, eqn: Eqn, operands: Sequence[ValueT], site: Place
    ) -> Sequence[ValueT]:
        """Runs the function of each device; sums add up over the devices."""
        jaxpr, given = params.body_of(eqn), tuple(map(self.form, operands))
        call = sharding.shard_map_of(eqn)
        axes = call.axes
        arrays = self.unpack_all(operands, given)
        made: list[bool] = []
        ops: list[OpT] = []

        def run(*arrays: Array) -> tuple[list[Array], PyTree]:
            results, sums = self._run_inside(jaxpr, arrays, given, site, ops)
            made[:] = map(self.form, results)
            pairs = zip(results, made, strict=True)
            out = [array for pair in pairs for array in self.unpack_device(*pair, axes)]
            return out, self._add_over_devices(sums, axes)

        def trace_once(*arrays: Array) -> tuple[()]:
            run(*arrays)
            return ()

        in_specs = tuple(_with_seconds(call.in_specs, given, self.second_spec))
        # The specs of the results depend on their forms, which a first trace finds.
        jax.eval_shape(call.map(trace_once, in_specs, ()), *arrays)
        out_specs = _with_seconds(call.out_specs, made, self.second_spec)
        mapped = call.map(run, in_specs, (out_specs, jax.P()))
        # Outside of jit, JAX would compile each op for all devices.
        out, sums = jax.jit(mapped)(*arrays)
        self.note(ops, sums)
        return self.pack_all(out, made)

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
