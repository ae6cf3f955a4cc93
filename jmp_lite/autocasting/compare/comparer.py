"""Runs a jaxpr on two lanes, and measures the error of each op.

One lane runs the jaxpr as it is. The other lane runs it in float32, with the predicates
and trip counts of the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.autocasting.compare import twins
from jmp_lite.autocasting.compare.twins import Twin
from jmp_lite.autocasting.explain.rows import Place
from jmp_lite.autocasting.jaxprs import compat, sharding
from jmp_lite.autocasting.jaxprs.dataflow import has_lanes
from jmp_lite.autocasting.jaxprs.types import Array, Eqn, Jaxpr
from jmp_lite.autocasting.rules.rules import of_the_user


class Op(NamedTuple):
    """An op and its place.

    Attributes:
      scope: the path of its scopes.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      dtype: the narrowest floating dtype that it reads or returns.
      rounding: the largest relative error of rounding to ``dtype``.
      is_backward: whether it belongs to a backward pass.
    """

    scope: str
    op: str
    source: str
    dtype: str
    rounding: float
    is_backward: bool


class Sums(NamedTuple):
    """Sums from which the errors of ops are computed, one element for each op.

    Attributes:
      off: the sum of absolute errors of the results.
      size: the sum of absolute values of the float32 results.
      given: the largest relative error of an operand, times ``size``.
    """

    off: Any
    size: Any
    given: Any

    def plus(self, other: "Sums") -> "Sums":
        """Returns the sums of two runs."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


class Body(NamedTuple):
    """A jaxpr on two lanes.

    Attributes:
      jaxpr: the closed jaxpr. It takes the operands of the first lane, then the twins.
        It returns the results of the first lane, then the twins, then the sums.
      given: which inputs have a twin.
      made: which results have a twin.
      ops: the ops that are measured.
    """

    jaxpr: Jaxpr
    given: tuple[bool, ...]
    made: tuple[bool, ...]
    ops: Sequence[Op]

    def __call__(self, operands: Sequence[Twin]) -> tuple[list[Twin], Sums]:
        """Returns its results, and the sums of its ops."""
        arrays = _arrays(operands, self.given)
        return self.apart(compat.evaluate(self.jaxpr, arrays))

    def apart(self, arrays: Sequence[Array]) -> tuple[list[Twin], Sums]:
        """Splits what the jaxpr returns into results and sums."""
        n = len(arrays) - len(Sums._fields)
        return _twins(arrays[:n], self.made), Sums(*arrays[n:])

    def nothing(self) -> Sums:
        """Returns the sums of its ops before it runs."""
        zeros = jnp.zeros(len(self.ops), jnp.float32)
        axes = sharding.varying_axes(
            compat.parts(self.jaxpr).outvars[-len(Sums._fields) :]
        )
        zeros = sharding.as_varying(zeros, axes)
        return Sums(zeros, zeros, zeros)


_TOP = Place()


class Comparer:
    """Runs jaxprs on two lanes.

    Args:
      elements: the largest number of elements of a result to compare.

    Attributes:
      ops: the measured ops, in order.
      sums: the sums of these ops; an item may belong to one op or to several.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self.ops: list[Op] = []
        self.sums: list[Sums] = []

    def run(
        self, jaxpr: Jaxpr, operands: Sequence[Twin], place: Place = _TOP
    ) -> list[Twin]:
        """Returns the results of a jaxpr.

        Args:
          jaxpr: the jaxpr.
          operands: its operands.
          place: its place.
        """
        parts = compat.parts(jaxpr)
        env = dict(zip(parts.constvars, map(Twin, parts.consts), strict=True))
        env.update(zip(parts.invars, operands, strict=True))

        def read(atom: Any) -> Twin:
            is_literal = compat.is_literal(atom)
            return Twin(compat.as_array(atom.val)) if is_literal else env[atom]

        for eqn in parts.eqns:
            given = list(map(read, eqn.invars))
            with compat.context_of(eqn):
                results = self._equation(eqn, given, place)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, parts.outvars))

    def total(self) -> Sums:
        """Returns the sums of all ops, each in one array."""
        if not self.sums:
            nothing = jnp.zeros(0, jnp.float32)
            return Sums(nothing, nothing, nothing)
        columns = zip(*self.sums, strict=True)
        return Sums(*(jnp.concatenate([jnp.ravel(x) for x in c]) for c in columns))

    def _equation(self, eqn: Eqn, operands: Sequence[Twin], place: Place) -> list[Twin]:
        op, inside = compat.op_of(eqn), place.inside(eqn, compat.trips(eqn))
        if (called := compat.called(eqn)) is not None:
            return self.run(called, operands, inside)
        if op == "scan":
            return self._scan(eqn, operands, inside)
        if op == "while" and not has_lanes(eqn):
            return self._while(eqn, operands, inside)
        if op == "cond":
            return self._cond(eqn, operands, inside)
        if op == "shard_map":
            results = self._shard_map(eqn, operands, inside)
        else:
            results = twins.run_twice(eqn, operands)
        if twins.keeps_errors(eqn):
            for result, operand in zip(results, operands, strict=False):
                result.error = operand.measured(self._elements) or twins.NO_ERROR
        else:
            self._note(eqn, operands, results, place)
        return results

    def _note(
        self,
        eqn: Eqn,
        operands: Sequence[Twin],
        results: Sequence[Twin],
        place: Place,
    ) -> None:
        made = [
            error
            for twin in results
            if (error := twin.measured(self._elements)) is not None
        ]
        if not made:
            return
        off, size = (sum(each) for each in zip(*made, strict=True))
        errors = [twin.measured(self._elements) for twin in operands]
        given = [error.relative for error in errors if error is not None]
        largest = jnp.float32(0)
        for each in given:
            largest = jnp.maximum(largest, each)
        dtype = twins.dtype_it_runs_in(eqn)
        op = Op(
            of_the_user(compat.join(place.path, *compat.scopes(eqn))),
            compat.op_of(eqn),
            compat.source(eqn, place.source),
            dtype.name,
            float(jnp.finfo(dtype).eps) / 2,
            place.is_backward or compat.is_transposed(eqn),
        )
        weighted = jnp.where(size > 0, largest * size, 0)
        self._add([op], Sums(*(jnp.atleast_1d(x) for x in (off, size, weighted))))

    def _add(self, ops: Sequence[Op], sums: Sums) -> None:
        self.ops += ops
        self.sums.append(sums)

    def _body(
        self,
        jaxpr: Jaxpr,
        given: Sequence[bool],
        made: Sequence[bool],
        place: Place,
    ) -> Body:
        """Returns a jaxpr on two lanes.

        Args:
          jaxpr: the jaxpr.
          given: which of its inputs have a twin.
          made: which of its results must have one; others may have one.
          place: its place.
        """
        parts, found, ops = compat.parts(jaxpr), list[bool](), list[Op]()

        def run(*arrays: Array) -> list[Array]:
            inner = Comparer(self._elements)
            results = inner.run(jaxpr, _twins(arrays, given), place)
            found[:] = [
                twin.exact is not None or has_to
                for twin, has_to in zip(results, made, strict=True)
            ]
            ops[:] = inner.ops
            return [*_arrays(results, found), *inner.total()]

        avals = [var.aval for var in parts.invars]
        wide = [
            compat.retyped(aval, jnp.float32) if twins.is_narrow(aval.dtype) else aval
            for aval, has_twin in zip(avals, given, strict=True)
            if has_twin
        ]
        traced = compat.trace(run, [*avals, *wide], jaxpr)
        return Body(traced, tuple(given), tuple(found), ops)

    def _loop_body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Twin],
        carries: slice,
        place: Place,
    ) -> Body:
        """Returns the body of a loop; a carry has a twin if any step gives it one."""
        given = [twin.exact is not None for twin in operands]
        n_more = len(compat.parts(jaxpr).outvars) - len(given[carries])
        while True:
            made = [*given[carries], *[False] * n_more]
            body = self._body(jaxpr, given, made, place)
            found = list(body.made[: len(given[carries])])
            if found == given[carries]:
                return body
            given[carries] = found

    def _scan(self, eqn: Eqn, operands: Sequence[Twin], place: Place) -> list[Twin]:
        n_consts, n_carry = compat.scan_counts(eqn)
        n = n_consts + n_carry
        at = slice(n_consts, n)
        body = self._loop_body(compat.body_of(eqn), operands, at, place)
        carried, stacked = body.made[:n_carry], body.made[n_carry:]

        def step(carry: Any, xs: Any) -> Any:
            arrays, sums = carry
            given = [
                *operands[:n_consts],
                *_twins(arrays, carried),
                *_twins(xs, body.given[n:]),
            ]
            results, new = body(given)
            return (
                (_arrays(results[:n_carry], carried), sums.plus(new)),
                _arrays(results[n_carry:], stacked),
            )

        start = _arrays(operands[at], carried), body.nothing()
        xs = _arrays(operands[n:], body.given[n:])
        (last, sums), ys = lax.scan(step, start, xs, **compat.scan_options(eqn))
        self._add(body.ops, sums)
        return [*_twins(last, carried), *_twins(ys, stacked)]

    def _while(self, eqn: Eqn, operands: Sequence[Twin], place: Place) -> list[Twin]:
        loop = compat.while_parts(eqn)
        n_test, n_consts = loop.n_cond, loop.n_cond + loop.n_body
        at = slice(loop.n_body, None)
        body = self._loop_body(loop.body, operands[n_test:], at, place)
        of_test = [*operands[:n_test], *operands[n_consts:]]
        given = [twin.exact is not None for twin in of_test[:n_test]]
        test = self._body(loop.cond, [*given, *body.made], [False], place)

        def tested(carried: Sequence[Twin], sums: Sums) -> Any:
            (goes_on,), new = test([*operands[:n_test], *carried])
            return goes_on.low, sums.plus(new)

        def step(carry: Any) -> Any:
            arrays, sums, (_, of_test) = carry
            carried = _twins(arrays, body.made)
            results, new = body([*operands[n_test:n_consts], *carried])
            after = _arrays(results, body.made)
            return after, sums.plus(new), tested(results, of_test)

        first = _arrays(operands[n_consts:], body.made)
        # The predicate is carried along, so that it is computed once a step.
        start = first, body.nothing(), tested(operands[n_consts:], test.nothing())
        last, sums, (_, tests) = lax.while_loop(lambda c: c[2][0], step, start)
        self._add(test.ops, tests)
        self._add(body.ops, sums)
        return _twins(last, body.made)

    def _cond(self, eqn: Eqn, operands: Sequence[Twin], place: Place) -> list[Twin]:
        index, *given = operands
        have = [twin.exact is not None for twin in given]
        made = [False] * len(eqn.outvars)
        traced = compat.branches_of(eqn)
        for branch in traced:
            made = self._body(branch, have, made, place).made
        branches = [self._body(each, have, made, place) for each in traced]

        def taken(i: int) -> Callable[..., Any]:
            def run(*arrays: Array) -> Any:
                results, new = branches[i](_twins(arrays, have))
                sums = [branch.nothing() for branch in branches]
                sums[i] = new
                return _arrays(results, made), sums

            return run

        arrays = _arrays(given, have)
        options = [taken(i) for i in range(len(branches))]
        results, sums = lax.switch(_as_index(index.low), options, *arrays)
        for branch, each in zip(branches, sums, strict=True):
            self._add(branch.ops, each)
        return _twins(results, made)

    def _shard_map(
        self, eqn: Eqn, operands: Sequence[Twin], place: Place
    ) -> list[Twin]:
        """Runs both lanes on each device, and measures only the results."""
        have = [twin.exact is not None for twin in operands]
        options, found = compat.shard_map_arguments(eqn), list[bool]()

        def run(*arrays: Array) -> list[Array]:
            results = Comparer(self._elements).run(
                compat.body_of(eqn), _twins(arrays, have), place
            )
            found[:] = [twin.exact is not None for twin in results]
            return _arrays(results, [True] * len(results))

        options["in_specs"] = tuple(_specs(options["in_specs"], have))
        options["out_specs"] = [*options["out_specs"], *options["out_specs"]]
        arrays = jax.shard_map(run, **options)(*_arrays(operands, have))
        results = _twins(arrays, [True] * len(found))
        return [
            twin if has_twin else Twin(twin.low)
            for twin, has_twin in zip(results, found, strict=True)
        ]


def _twins(arrays: Sequence[Any], have: Sequence[bool]) -> list[Twin]:
    """Returns arrays of both lanes as values, of which some have a twin."""
    exact = iter(arrays[len(have) :])
    return [
        Twin(low, next(exact) if has_twin else None)
        for low, has_twin in zip(arrays, have, strict=False)
    ]


def _arrays(values: Sequence[Twin], have: Sequence[bool]) -> list[Any]:
    """Returns values as arrays of both lanes, of which some have a twin."""
    pairs = list(zip(values, have, strict=True))
    return [*(t.low for t, _ in pairs), *(t.full for t, has_twin in pairs if has_twin)]


def _specs(specs: Sequence[Any], have: Sequence[bool]) -> list[Any]:
    pairs = zip(specs, have, strict=True)
    return [*specs, *(spec for spec, has_twin in pairs if has_twin)]


def _as_index(index: Any) -> Any:
    return jnp.asarray(index).astype(jnp.int32)
