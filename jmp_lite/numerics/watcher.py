"""Runs a jaxpr, and counts the numbers that each op makes.

Results and derivatives do not change. Counts add up over the steps of a loop. Each
value carries a flag that says whether it is finite, into loops and out of them, so that
no number is read twice.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.jaxprs import compat, sharding
from jmp_lite.autocasting.jaxprs.dataflow import has_lanes
from jmp_lite.autocasting.jaxprs.sampling import sample
from jmp_lite.autocasting.rules.rules import of_the_user
from jmp_lite.numerics.counter import Counted, Counter
from jmp_lite.numerics.statistics import (
    added,
    are_finite,
    nothing,
    stacked,
)


class Op(NamedTuple):
    """An op and its place.

    Attributes:
      scope: the path of its scopes.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      number: its position among all ops.
    """

    scope: str
    op: str
    source: str
    number: int


class Seen:
    """A value and a flag: are all its numbers finite?

    Args:
      array: the value.
      is_finite: the flag; None if it is not computed yet.
      of_steps: a flag for each element of the first axis, if a loop stacked them.
      counted: the counts of the value, if they are taken.
    """

    def __init__(
        self,
        array: Any,
        is_finite: Any = None,
        of_steps: Any = None,
        counted: Counted | None = None,
    ) -> None:
        self.array = array
        self.counted = counted
        self._is_finite = is_finite
        self._of_steps = of_steps

    @property
    def is_finite(self) -> Any:
        """Whether all its numbers are finite; True if they are not floats."""
        if self._is_finite is None and self.counted is not None:
            self._is_finite = are_finite(self.counted.counts)
        if self._is_finite is None and self._of_steps is not None:
            self._is_finite = self._of_steps.all()
        if self._is_finite is None:
            self._is_finite = _all_finite(self.array)
        return self._is_finite

    def of_steps(self) -> Any:
        """Whether the numbers of each element of its first axis are finite."""
        if self._of_steps is None:
            array = jnp.asarray(self.array)
            self._of_steps = _all_finite(array, tuple(range(1, array.ndim)))
        return self._of_steps

    def with_array(self, array: Any) -> "Seen":
        """Returns a value with the same numbers in another array."""
        return Seen(array, self._is_finite, counted=self.counted)


class Note(NamedTuple):
    """A counted op.

    Attributes:
      op: the op.
      results: the counts of its floating results.
      operands: its operands.
    """

    op: Op
    results: Sequence[Counted]
    operands: Sequence[Seen]

    @property
    def counts(self) -> dict[str, Any]:
        """The counts of its results, without ``is_first``."""
        return functools.reduce(added, [result.counts for result in self.results])


class Watched(NamedTuple):
    """A jaxpr that counts.

    Attributes:
      jaxpr: the closed jaxpr. It takes arrays, then their flags. It returns arrays,
        then their flags, then the counts.
      ops: the counted ops.
      axes: the mapped axes over which the counts differ.
    """

    jaxpr: Any
    ops: Sequence[Op]
    axes: frozenset[str]

    def __call__(self, values: Sequence[Seen]) -> tuple[list[Seen], dict[str, Any]]:
        """Returns the results and the counts."""
        return self.apart(compat.evaluate(self.jaxpr, _flat(values)))

    def apart(self, results: Sequence[Any]) -> tuple[list[Seen], dict[str, Any]]:
        """Splits what the jaxpr returns into results and counts."""
        structure = jax.tree.structure(jax.eval_shape(lambda: nothing(0)))
        n = len(results) - structure.num_leaves
        return _values(results[:n]), jax.tree.unflatten(structure, results[n:])

    def nothing(self) -> dict[str, Any]:
        """Returns the counts of its ops before it runs."""
        return _varying(nothing(len(self.ops)), self.axes)


class Watcher:
    """Runs jaxprs and counts the numbers of all results.

    Args:
      dtype: the dtype that shares are given for.
      elements: the largest number of elements of a result to count; None for all.
      numbers: an iterator that numbers the ops.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        elements: int | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._dtype, self._elements = dtype, elements
        self._counter = Counter(dtype)
        self._numbers = itertools.count() if numbers is None else numbers
        self._notes: list[Note] = []
        self._inside: list[tuple[Sequence[Op], dict[str, Any]]] = []

    def found(self) -> tuple[list[Op], dict[str, Any]]:
        """Returns the ops that ran, and their counts."""
        parts = list(self._inside)
        if self._notes:
            columns = stacked([note.counts for note in self._notes])
            columns["is_first"] = self._are_first(are_finite(columns))
            parts.insert(0, ([note.op for note in self._notes], columns))
        ops = [op for ops, _ in parts for op in ops]
        return ops, stacked([columns for _, columns in parts])

    def _are_first(self, is_finite: Any) -> Any:
        """Returns which ops have non-finite results of finite operands.

        One computation answers for all ops: a kernel for each would cost more.
        """
        rows = {
            id(note.results[0]): i
            for i, note in enumerate(self._notes)
            if len(note.results) == 1
        }
        outside: dict[int, Any] = {}
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

    def run(
        self, jaxpr: Any, values: Sequence[Seen], path: str, source: str = ""
    ) -> list[Seen]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          values: its operands.
          path: the scopes around it.
          source: its call site, for ops that have no source line of their own.
        """
        parts = compat.parts(jaxpr)
        env = dict(zip(parts.constvars, map(Seen, parts.consts), strict=True))
        env.update(zip(parts.invars, values, strict=True))

        def read(atom: Any) -> Seen:
            is_literal = compat.is_literal(atom)
            return Seen(compat.as_array(atom.val)) if is_literal else env[atom]

        for eqn in parts.eqns:
            operands = list(map(read, eqn.invars))
            with compat.context_of(eqn):
                results = self._equation(eqn, operands, path, source)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, parts.outvars))

    def _equation(
        self, eqn: Any, operands: Sequence[Seen], path: str, source: str
    ) -> list[Seen]:
        name, inside = compat.op_of(eqn), compat.path_of(eqn, path)
        source = compat.source(eqn, source)
        if name == "jit":
            return self.run(compat.called(eqn), operands, inside, source)
        arrays = [value.array for value in operands]
        is_custom = name in ("custom_jvp_call", "custom_vjp_call")
        if is_custom and compat.has_only_axis_effects(eqn):
            # The rule keeps its derivative; its function runs once more to be counted.
            seen = [_stopped(value) for value in operands]
            inner = self.run(compat.called(eqn), seen, inside, source)
            results = compat.bind_custom(eqn, arrays, lambda *funs: funs)
            return [
                Seen(array, value.is_finite)
                for array, value in zip(results, inner, strict=True)
            ]
        if name in compat.REMAT:
            return self._remat(eqn, operands, inside, source)
        if name == "scan":
            return self._scan(eqn, operands, inside, source)
        if name == "while" and not has_lanes(eqn):
            return self._while(eqn, operands, inside, source)
        if name == "cond":
            return self._cond(eqn, operands, inside, source)
        results = compat.bind(eqn, arrays)
        if name in _SAME_NUMBERS or _is_cast_in_range(eqn):
            return [operands[0].with_array(results[0])]
        scope = of_the_user(compat.join(path, *compat.scopes(eqn)))
        return self._noted(operands, results, (scope, name, source))

    def _noted(
        self, operands: Sequence[Seen], results: Sequence[Any], op: tuple[str, str, str]
    ) -> list[Seen]:
        """Counts the numbers of results, and returns the results with their flags."""
        each = [
            self._counter.add(self._sample(array)) if _is_float(array) else None
            for array in results
        ]
        made = [counted for counted in each if counted is not None]
        if made:
            self._notes.append(Note(Op(*op, next(self._numbers)), made, operands))
        return [
            Seen(array, np.True_ if counted is None else None, counted=counted)
            for array, counted in zip(results, each, strict=True)
        ]

    def _sample(self, array: Any) -> Any:
        array = lax.stop_gradient(jnp.asarray(array))
        return array if self._elements is None else sample(array, self._elements)

    def _add(self, ops: Sequence[Op], counts: dict[str, Any]) -> None:
        self._inside.append((ops, counts))

    def _watched(self, jaxpr: Any, path: str, source: str) -> Watched:
        ops: list[Op] = []

        def run(*arrays: Any) -> list[Any]:
            inner = Watcher(self._dtype, self._elements, self._numbers)
            results = inner.run(jaxpr, _values(arrays), path, source)
            ops[:], counts = inner.found()
            return [*_flat(results), *jax.tree.leaves(counts)]

        avals = [var.aval for var in compat.parts(jaxpr).invars]
        flags = list(map(compat.flag_beside, avals))
        traced = compat.trace(run, [*avals, *flags], jaxpr)
        n_results = 2 * len(compat.parts(jaxpr).outvars)
        axes = sharding.varying_axes(compat.parts(traced).outvars[n_results:])
        return Watched(traced, ops, axes)

    def _remat(
        self, eqn: Any, operands: Sequence[Seen], path: str, source: str
    ) -> list[Seen]:
        body = self._watched(compat.called(eqn), path, source)
        jaxpr, consts = compat.with_consts_as_inputs(body.jaxpr)
        out = compat.bind_remat(eqn, [*consts, *_flat(operands)], jaxpr)
        results, counts = body.apart(out)
        self._add(body.ops, counts)
        return results

    def _scan(
        self, eqn: Any, operands: Sequence[Seen], path: str, source: str
    ) -> list[Seen]:
        n_consts, n_carry = compat.scan_counts(eqn)
        n, body = n_consts + n_carry, self._watched(compat.body_of(eqn), path, source)
        consts, carry, xs = operands[:n_consts], operands[n_consts:n], operands[n:]
        known = [Seen(value.array, value.is_finite) for value in consts]

        def step(carry: Any, xs: Any) -> Any:
            arrays, counts = carry
            results, new = body([*known, *_values(arrays), *_values(xs)])
            after = _flat(results[:n_carry]), added(counts, new)
            return after, _flat(results[n_carry:])

        (last, counts), ys = lax.scan(
            step,
            (_flat(carry), body.nothing()),
            [*(x.array for x in xs), *(x.of_steps() for x in xs)],
            **compat.scan_options(eqn),
        )
        self._add(body.ops, counts)
        half = len(ys) // 2
        stacks = zip(ys[:half], ys[half:], strict=True)
        return [*_values(last), *(Seen(y, of_steps=flags) for y, flags in stacks)]

    def _while(
        self, eqn: Any, operands: Sequence[Seen], path: str, source: str
    ) -> list[Seen]:
        loop = compat.while_parts(eqn)
        n_test, n_consts = loop.n_cond, loop.n_cond + loop.n_body
        test = self._watched(loop.cond, path, source)
        body = self._watched(loop.body, path, source)
        known = [Seen(value.array, value.is_finite) for value in operands[:n_consts]]

        def tested(values: Sequence[Seen], counts: dict[str, Any]) -> Any:
            (goes_on,), new = test([*known[:n_test], *values])
            return goes_on.array, added(counts, new)

        def step(carry: Any) -> Any:
            arrays, counts, (_, of_test) = carry
            results, new = body([*known[n_test:], *_values(arrays)])
            return _flat(results), added(counts, new), tested(results, of_test)

        values = list(operands[n_consts:])
        # The predicate is carried along, so that it is computed once for each step.
        start = (_flat(values), body.nothing(), tested(values, test.nothing()))
        last, counts, (_, of_test) = lax.while_loop(lambda c: c[2][0], step, start)
        self._add(test.ops, of_test)
        self._add(body.ops, counts)
        return _values(last)

    def _cond(
        self, eqn: Any, operands: Sequence[Seen], path: str, source: str
    ) -> list[Seen]:
        branches = [
            self._watched(branch, path, source) for branch in compat.branches_of(eqn)
        ]
        axes = frozenset[str]().union(*(branch.axes for branch in branches))

        def taken(i: int) -> Callable[..., list[Any]]:
            def run(*arrays: Any) -> list[Any]:
                results, new = branches[i](_values(arrays))
                counts = [branch.nothing() for branch in branches]
                counts[i] = new
                total = _varying(stacked(counts), axes)
                return [*_flat(results), *jax.tree.leaves(total)]

            return run

        index, *given = operands
        arrays = _flat(given)
        avals = [jax.typeof(array) for array in arrays]
        jaxprs = tuple(
            compat.trace(taken(i), avals, branch.jaxpr)
            for i, branch in enumerate(branches)
        )
        out = compat.bind(eqn, [index.array, *arrays], branches=jaxprs)
        results, counts = branches[0].apart(out)
        self._add([op for branch in branches for op in branch.ops], counts)
        return results


_SAME_NUMBERS = frozenset(
    ["reshape", "transpose", "squeeze", "expand_dims", "rev", "broadcast_in_dim"]
)
"""Ops that make no new numbers: the counts of their operand are known."""


def _is_cast_in_range(eqn: Any) -> bool:
    """Whether an op casts floats to a floating dtype with at least their range."""
    if compat.op_of(eqn) != "convert_element_type":
        return False
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not compat.is_float(atom) or not compat.is_float(var):
        return False
    before, after = (jnp.finfo(compat.dtype_of(x)) for x in (atom, var))
    return after.maxexp >= before.maxexp and after.minexp <= before.minexp


def _values(arrays: Sequence[Any]) -> list[Seen]:
    """Returns values of arrays that are followed by their flags."""
    half = len(arrays) // 2
    pairs = zip(arrays[:half], arrays[half:], strict=True)
    return [Seen(array, is_finite) for array, is_finite in pairs]


def _flat(values: Sequence[Seen]) -> list[Any]:
    """Returns the arrays of values, followed by their flags."""
    flags = [
        sharding.as_varying(jnp.asarray(v.is_finite), sharding.axes_of(v.array))
        for v in values
    ]
    return [*(value.array for value in values), *flags]


def _stopped(value: Seen) -> Seen:
    return Seen(lax.stop_gradient(value.array), value.is_finite)


def _is_float(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact)


def _all_finite(array: Any, axes: tuple[int, ...] | None = None) -> Any:
    if not _is_float(array):
        shape = np.shape(array)[:1] if axes is not None else ()
        return jnp.ones(shape, bool)
    return jnp.all(jnp.isfinite(lax.stop_gradient(array)), axis=axes)


def _varying(counts: dict[str, Any], axes: frozenset[str]) -> dict[str, Any]:
    return jax.tree.map(lambda array: sharding.as_varying(array, axes), counts)
