"""Runs a jaxpr, and counts the numbers that each op makes.

Results and derivatives do not change. Counts add up over the steps of a loop. Each
value has a flag: whether it is finite. Loops carry the flags, so that no number is read
twice. Which op reads which is noted while tracing, so that an infinity can be followed
to the results, or to where it is dropped.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp_lite.autocasting.rules.match import of_the_user
from jmp_lite.insight import statistics
from jmp_lite.insight.counting import Body, CountingEvaluator
from jmp_lite.insight.statistics import Counts
from jmp_lite.insight.tables import Place
from jmp_lite.jaxprs import params, sharding, structure
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Jaxpr
from jmp_lite.ops import KEEPING_NUMBERS


class Slot(NamedTuple):
    """An input of a jaxpr inside of another: of a loop, a branch, a checkpoint.

    Attributes:
      body: the number of the jaxpr.
      number: the number of the input.
    """

    body: int
    number: int


Source = int | Slot
"""Where a value comes from: the number of an op, or a slot."""


class Graph:
    """The numbers of ops, and where the values in slots and of jaxprs come from."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.of_slots: dict[Slot, set[Source]] = {}
        # By the id of the list of ops, which is kept so that its id is not reused.
        self._bodies: dict[int, tuple[object, list[Slot], list[set[Source]]]] = {}

    def enter(self, n: int) -> list[Slot]:
        """Returns the slots of a new jaxpr with some inputs."""
        body = len(self.of_slots)
        slots = [Slot(body, i) for i in range(n)]
        self.of_slots[Slot(body, -1)] = set()  # So that each body has a number.
        self.of_slots.update((slot, set()) for slot in slots)
        return slots

    def leave(
        self, ops: object, slots: list[Slot], results: Sequence["FlaggedValue"]
    ) -> None:
        """Notes where the results of a jaxpr come from, by its list of ops."""
        self._bodies[id(ops)] = ops, slots, [set(value.sources) for value in results]

    def bind(
        self, ops: object, operands: Sequence["FlaggedValue"], carries: slice | None
    ) -> list[set[Source]]:
        """Connects a jaxpr to its operands; returns the sources of its results.

        Args:
          ops: its list of ops.
          operands: its operands.
          carries: the inputs that are the first results of the step before.
        """
        _, slots, results = self._bodies[id(ops)]
        for slot, value in zip(slots, operands, strict=True):
            self.of_slots[slot] |= value.sources
        for slot, made in zip(slots[carries] if carries else (), results, strict=False):
            self.of_slots[slot] |= made
        return results


class WatchedOp(NamedTuple):
    """An op and its place.

    Attributes:
      scope: the path of its scopes.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      number: its position among all ops.
      reads: the sources of its operands.
    """

    scope: str
    op: str
    source: str
    number: int
    reads: tuple[Source, ...] = ()


@dataclasses.dataclass(eq=False)
class CountedArray:
    """The numbers of an array, which are counted when they are read.

    Attributes:
      array: the array.
      count: counts this array, together with others.
      known: the counts, once they are taken.
    """

    array: Array
    count: Callable[[], None]
    known: Counts | None = None

    @property
    def counts(self) -> Counts:
        """The counts."""
        if self.known is None:
            self.count()
        assert self.known is not None
        return self.known


@dataclasses.dataclass(eq=False)
class FlaggedValue:
    """A value and a flag: are all its numbers finite?

    Attributes:
      array: the value.
      flag: the flag; None if it is not computed yet.
      steps: a flag for each element of the first axis, if a loop stacked them.
      counted: the counts of the value, if they are taken.
      sources: the ops that made it, or the slots that hold it.
    """

    array: Array
    flag: Array | np.bool_ | None = None
    steps: Array | None = None
    counted: CountedArray | None = None
    sources: frozenset[Source] = frozenset()

    @property
    def is_finite(self) -> Array | np.bool_:
        """Whether all its numbers are finite; True if they are not floats."""
        if self.flag is None and self.counted is not None:
            self.flag = statistics.are_finite(self.counted.counts)
        elif self.flag is None and self.steps is not None:
            self.flag = self.steps.all()
        elif self.flag is None:
            self.flag = _are_all_finite(self.array)
        return self.flag

    @property
    def finite_steps(self) -> Array:
        """Whether the numbers of each element of its first axis are finite."""
        if self.steps is None:
            array = jnp.asarray(self.array)
            self.steps = _are_all_finite(array, tuple(range(1, array.ndim)))
        return self.steps


class Note(NamedTuple):
    """A counted op.

    Attributes:
      op: the op.
      results: the counts of its floating results.
      operands: its operands.
    """

    op: WatchedOp
    results: Sequence[CountedArray]
    operands: Sequence[FlaggedValue]


class Watcher(CountingEvaluator[FlaggedValue, WatchedOp]):
    """Runs jaxprs and counts the numbers of all results.

    Args:
      dtype: the dtype that shares are given for.
      elements: the largest number of elements of a result to count; None for all.
      graph: the numbers of ops, and the sources of values in slots.
    """

    def __init__(
        self, dtype: Dtype, elements: int | None = None, graph: Graph | None = None
    ) -> None:
        super().__init__(FlaggedValue)
        self.graph = Graph() if graph is None else graph
        self._dtype, self._elements = dtype, elements
        self._uncounted: list[CountedArray] = []
        self._notes: list[Note] = []

    def inner(self) -> "Watcher":
        """Returns a watcher for a jaxpr inside."""
        return Watcher(self._dtype, self._elements, self.graph)

    # ------------------------------------------------------------------ the equations

    def equation(
        self, eqn: Eqn, operands: Sequence[FlaggedValue], site: Place
    ) -> Sequence[FlaggedValue]:
        """Runs an equation, and counts the numbers of its results."""
        name = params.op_of(eqn)
        results = params.bind(eqn, [value.array for value in operands])
        # The counts of its operand are known.
        if name in KEEPING_NUMBERS or _is_cast_in_range(eqn):
            return [dataclasses.replace(operands[0], array=results[0], steps=None)]
        each = [
            CountedArray(self._sample(array), self._count) if _is_float(array) else None
            for array in results
        ]
        made = [counted for counted in each if counted is not None]
        self._uncounted += made
        read = frozenset[Source]().union(*(value.sources for value in operands))
        sources = read  # A number of another kind, such as a flag, tells of them.
        if made:
            place = (of_the_user(site.path), name, site.source)
            op = WatchedOp(*place, next(self.graph.numbers), tuple(read))
            sources = frozenset[Source]([op.number])
            self._notes.append(Note(op, made, operands))
        for value in operands:  # An op may write into a reference.
            if not structure.is_of_numbers(jax.typeof(value.array)):
                value.sources |= sources | read
        return [
            FlaggedValue(
                array,
                np.True_ if counted is None else None,
                counted=counted,
                sources=sources,
            )
            for array, counted in zip(results, each, strict=True)
        ]

    def _sample(self, array: Array) -> Array:
        array = lax.stop_gradient(jnp.asarray(array))
        if self._elements is None:
            return array
        return statistics.sample(array, self._elements)

    def call(
        self, eqn: Eqn, operands: Sequence[FlaggedValue], site: Place
    ) -> Sequence[FlaggedValue]:
        """Runs a call; a checkpoint stays one.

        An equation with rules keeps them, and its jaxpr runs once more.
        """
        op = params.op_of(eqn)
        if op in params.MERE_CALLS:
            return self.run(params.body_of(eqn), operands, site)
        if op in params.REMAT:
            body = self.body(params.body_of(eqn), operands, site)
            arrays = self.unpack_all(operands, body.operands)
            arrays = params.bind_remat(eqn, arrays, body.jaxpr)
            return self.collect_results(eqn, [(body, operands)], arrays)
        if not params.has_only_axis_effects(eqn):  # They must happen once.
            return self.equation(eqn, operands, site)
        stopped = [
            FlaggedValue(lax.stop_gradient(x.array), x.is_finite, sources=x.sources)
            for x in operands
        ]
        seen = self.run(params.body_of(eqn), stopped, site)
        arrays = params.bind(eqn, [value.array for value in operands])
        return [
            FlaggedValue(array, value.is_finite, sources=value.sources)
            for array, value in zip(arrays, seen, strict=True)
        ]

    # ------------------------------------------------------------------ jaxprs inside

    def _run_inside(
        self,
        jaxpr: Jaxpr,
        arrays: Sequence[Array],
        forms: Sequence[bool],
        site: Place,
        ops: list[WatchedOp],
    ) -> tuple[list[FlaggedValue], Counts]:
        """Runs a jaxpr inside, whose inputs are slots."""
        tool = self.inner()
        operands = tool.pack_all(arrays, forms)
        slots = self.graph.enter(len(operands))
        for slot, operand in zip(slots, operands, strict=True):
            operand.sources = frozenset[Source]([slot])
        results = tool.run(jaxpr, operands, site)
        ops[:], sums = tool.found()
        self.graph.leave(ops, slots, results)
        return results, sums

    def collect_results(
        self,
        eqn: Eqn,
        bodies: Sequence[tuple[Body[WatchedOp], Sequence[FlaggedValue]]],
        arrays: Sequence[Array],
        number: int = 0,
    ) -> list[FlaggedValue]:
        """Returns the results of an equation, with their sources."""
        results = super().collect_results(eqn, bodies, arrays, number)
        made = [
            self.graph.bind(body.ops, operands, _carries(eqn) if i == number else None)
            for i, (body, operands) in enumerate(bodies)
        ]
        is_while = params.op_of(eqn) == "while"
        more = made.pop(0)[0] if is_while else frozenset[Source]()  # Of its condition.
        for i, result in enumerate(results):
            result.sources = frozenset[Source](more).union(*(one[i] for one in made))
        return results

    def converted(
        self, values: Sequence[FlaggedValue], forms: Sequence[bool]
    ) -> list[FlaggedValue]:
        """Returns the carries of a loop: they have one form."""
        return list(values)

    # --------------------------------------------------------------------- the counts

    def _count(self) -> None:
        """Counts all results since the last count together."""
        arrays = [counted.array for counted in self._uncounted]
        each = statistics.counted_together(arrays, self._dtype)
        for one, counts in zip(self._uncounted, each, strict=True):
            one.known = counts
        self._uncounted.clear()

    def found(self) -> tuple[list[WatchedOp], Counts]:
        """Returns the ops that ran, and their counts."""
        if self._notes:
            each = [[result.counts for result in note.results] for note in self._notes]
            sums = [functools.reduce(statistics.added, counts) for counts in each]
            columns = statistics.stacked(sums)
            columns["is_first"] = self._are_first(statistics.are_finite(columns))
            self.note([note.op for note in self._notes], columns)
        return super().found()

    def nothing(self, n: int) -> Counts:
        """Returns the counts of ops that did not run."""
        return statistics.nothing(n)

    def add(self, one: Counts, other: Counts) -> Counts:
        """Returns the counts of two steps."""
        return statistics.added(one, other)

    def _are_first(self, is_finite: Array) -> Array:
        """Returns which ops have non-finite results of finite operands.

        One computation answers for all ops: a kernel for each would cost more.
        """
        rows = {
            id(note.results[0]): i
            for i, note in enumerate(self._notes)
            if len(note.results) == 1
        }
        outside: dict[int, tuple[int, Array | np.bool_]] = {}
        reads: list[tuple[int, int]] = []
        for i, note in enumerate(self._notes):
            for value in note.operands:
                column = rows.get(id(value.counted))
                if column is None:
                    flag = value.is_finite
                    if flag is np.True_:
                        continue
                    known = outside.setdefault(id(flag), (len(outside), flag))
                    column = len(self._notes) + known[0]
                reads.append((i, column))
        flags = [jnp.reshape(flag, 1) for _, flag in outside.values()]
        known = jnp.concatenate([is_finite, *flags])
        is_read = np.zeros((len(self._notes), len(known)), bool)
        is_read[tuple(zip(*reads, strict=True)) or ()] = bool(reads)
        return ~is_finite & jnp.all(known | ~is_read, axis=1)

    # --------------------------------------------------------------------- the values

    def form(self, value: FlaggedValue) -> bool:
        """Returns True: each value is an array and a flag."""
        return True

    def unpack(self, value: FlaggedValue, form: bool) -> tuple[Array, Array]:
        """Returns an array and its flag."""
        flag = jnp.asarray(value.is_finite)
        axes = sharding.mapped_axes_of(value.array)
        return value.array, sharding.as_varying(flag, axes)

    def second_type(self, aval: Aval) -> Aval:
        """Returns the type of a flag."""
        return structure.flag_type(aval)

    def second_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns the spec of a flag, which all devices share."""
        return jax.P()

    def unpack_rows(self, value: FlaggedValue, form: bool) -> tuple[Array, Array]:
        """Returns an array and a flag for each of its rows."""
        return value.array, value.finite_steps

    def pack_rows(self, *arrays: Array) -> FlaggedValue:
        """Returns the value of an array with a flag for each of its rows."""
        array, steps = arrays
        return FlaggedValue(array, steps=steps)

    def unpack_device(
        self, value: FlaggedValue, form: bool, axes: frozenset[str]
    ) -> tuple[Array, Array]:
        """Returns an array, and one flag for all devices."""
        array, flag = self.unpack(value, form)
        return array, sharding.gathered(flag, axes).all(0)


def _carries(eqn: Eqn) -> slice | None:
    """Returns the inputs of a loop's body that are carries; None for other ops."""
    is_loop = params.op_of(eqn) in params.LOOPS
    return params.loop_of(eqn).carries if is_loop else None


def _is_cast_in_range(eqn: Eqn) -> bool:
    """Whether an op casts floats to a floating dtype with at least their range."""
    if params.op_of(eqn) != "convert_element_type":
        return False
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not structure.is_float(atom) or not structure.is_float(var):
        return False
    before, after = (jnp.finfo(structure.dtype_of(x)) for x in (atom, var))
    return after.maxexp >= before.maxexp and after.minexp <= before.minexp


def _is_float(array: Array) -> bool:
    aval = jax.typeof(array)  # Of a Ref, only what an op reads from it is counted.
    return structure.is_of_numbers(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _are_all_finite(array: Array, axes: tuple[int, ...] | None = None) -> Array:
    if not _is_float(array):
        shape = np.shape(array)[:1] if axes is not None else ()
        return jnp.ones(shape, bool)
    return jnp.all(jnp.isfinite(lax.stop_gradient(array)), axis=axes)
