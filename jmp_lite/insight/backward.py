"""Differentiates a traced function, and makes the rows of its backward pass."""

import contextlib
import copy
import enum
import functools
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.rules.match import of_the_user
from jmp_lite.insight.rows import Row, bytes_of, placed_equations, row_as_traced
from jmp_lite.jaxprs import bilinear, params, source, structure
from jmp_lite.jaxprs.dataflow import Backward
from jmp_lite.jaxprs.trace import argument_name, arrays_in
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, PyTree, Var
from jmp_lite.ops import HIGHER_ORDER

ArgNums = int | Sequence[int] | None
"""Positional arguments, by number, as in ``jax.grad``; None for all arguments."""


def check_argnums(argnums: object, backward: bool = True) -> None:
    """Raises an error for what cannot be the numbers of arguments.

    Args:
      argnums: the numbers.
      backward: whether anything is differentiated.
    """
    if argnums is None:
        return
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(
                "Expected the numbers of positional arguments as argnums, as in "
                f"jax.grad, got {argnums!r}."
            )
    if not backward:
        raise ValueError(
            "argnums chooses the arguments to differentiate: pass backward=True, too."
        )


class Differentiable:
    """A traced function, and which of its arguments and results are differentiated.

    Args:
      traced: its jaxpr.
      treedef: the tree structure of its results.
      args: its arguments.
      kwargs: its keyword arguments.
      argnums: the positional arguments to differentiate; None for all arguments.
      written: its jaxpr with the types that its arguments and results have, if it was
        traced with other ones.

    Attributes:
      traced: its jaxpr.
      types: the types of its results.
      names_of_results: the names of its results, such as ``result['loss']``.
      names_of_gradients: the names of its gradients.
      avals: the types of its arguments.
      floats: the arguments to differentiate.
      losses: the results to differentiate. A scalar result that is alone, or first in a
        tuple, is the loss. Otherwise all floating-point results are differentiated.

    Raises:
      ValueError: there is no argument of a number.
    """

    def __init__(
        self,
        traced: Jaxpr,
        treedef: PyTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        argnums: ArgNums = None,
        written: Jaxpr | None = None,
    ) -> None:
        parts = structure.parts(traced if written is None else written)
        self.traced = traced
        self.types = [var.aval for var in parts.outvars]
        self.avals = [var.aval for var in parts.invars]
        self._argnums = _counted_from_zero(argnums, len(args))
        paths = [path for path, _ in arrays_in(args, kwargs)]
        # The positional argument of each array; None for keyword arguments.
        self._owners = [None if path[0].idx else path[1].idx for path in paths]
        self.floats = [
            i
            for i in floats_in(parts.invars)
            if self._argnums is None or self._owners[i] in self._argnums
        ]
        self._names = [argument_name(paths[i]) for i in self.floats]
        self.names_of_gradients = [f"gradient of {name}" for name in self._names]
        self.losses = _losses_in(parts.outvars, treedef)
        results = jax.tree.unflatten(treedef, range(len(parts.outvars)))
        self.names_of_results = [
            f"result{jax.tree_util.keystr(path)}"
            for path, _ in jax.tree.leaves_with_path(results)
        ]

    def check(self) -> None:
        """Raises a ValueError for a function without a gradient."""
        if self._argnums is not None and not self.floats:
            raise ValueError(
                "There is no backward pass: the arguments of argnums="
                f"{self._argnums} have no floating-point array."
            )
        for found, what in ((self.floats, "argument"), (self.losses, "result")):
            if not found:
                raise ValueError(
                    "There is no backward pass: the function has no floating-point "
                    f"{what}. Leave backward out."
                )

    @contextlib.contextmanager
    def advised(self) -> Generator[None]:
        """Adds to an error of differentiation which argument to leave out."""
        try:
            yield
        except Exception as error:
            owners = [self._owners[i] for i in self.floats]
            able = sorted(k for k in {*owners} if k is not None and self._is_able(k))
            pairs = zip(owners, self._names, strict=True)
            unable = [name for owner, name in pairs if owner not in able]
            if self._argnums is not None or not able or not unable:
                raise
            numbers = able[0] if len(able) == 1 else tuple(able)
            raise ValueError(
                f"The function has no derivative with respect to {unable[0]}: "
                f"{str(error).splitlines()[0]} Without argnums, all floating-point "
                "arguments are differentiated. Name those that training "
                f"differentiates: argnums={numbers}."
            ) from error

    def _is_able(self, number: int) -> bool:
        """Whether the function has a derivative with respect to one argument."""
        alone = copy.copy(self)
        alone.floats = [i for i in self.floats if self._owners[i] == number]
        run = alone.with_gradients(functools.partial(structure.evaluate, self.traced))
        with contextlib.suppress(Exception):
            jax.make_jaxpr(run)(*self.avals)
            return True
        return False

    def differentiated(
        self, fun: Function, arrays: Sequence[Array]
    ) -> tuple[list[Array], Function, list[Array]]:
        """Returns the losses of the function, its backward pass, and its results.

        Args:
          fun: runs the function, or one with the same arguments and results, on a
            list of arrays.
          arrays: its arguments.
        """

        def fun_of_floats(*given: Array) -> tuple[list[Array], list[Array]]:
            merged = list(arrays)
            for i, array in zip(self.floats, given, strict=True):
                merged[i] = array
            results = fun(merged)
            return [results[i] for i in self.losses], results

        return jax.vjp(fun_of_floats, *(arrays[i] for i in self.floats), has_aux=True)

    def with_gradients(self, fun: Function) -> Function:
        """Returns a function of arrays that returns gradients after its results.

        These are the gradients of the loss. Without a loss, they are those of a fixed
        random combination of all results.

        Args:
          fun: as in ``differentiated``.
        """
        types = [self.types[i] for i in self.losses]
        generator = np.random.default_rng(0)
        cotangents = [
            jnp.asarray(generator.standard_normal(x.shape)).astype(x.dtype)
            for x in types
        ]
        if len(types) == 1 and not types[0].shape:  # A loss.
            cotangents = [jnp.ones((), types[0].dtype)]

        def run(*arrays: Array) -> list[Array]:
            _, back, results = self.differentiated(fun, arrays)
            return [*results, *back(cotangents)]

        return run


def _counted_from_zero(argnums: ArgNums, n: int) -> tuple[int, ...] | None:
    """Returns the numbers of some of n arguments, of which a negative one is last."""
    if argnums is None:
        return None
    numbers = [argnums] if isinstance(argnums, int | np.integer) else argnums
    for number in numbers:
        if not -n <= number < n:
            raise ValueError(
                f"Expected argnums below {n}, the number of positional arguments, "
                f"got {argnums!r}."
            )
    return tuple(int(number) % n for number in numbers)


def floats_in(atoms: Sequence[Var]) -> list[int]:
    """Returns which inputs or results of a program are real or complex floats."""
    return [i for i, atom in enumerate(atoms) if structure.is_float(atom)]


def _losses_in(results: Sequence[Var], treedef: PyTree) -> list[int]:
    floats = floats_in(results)
    first: PyTree = jax.tree.unflatten(treedef, range(len(results)))
    while isinstance(first, tuple) and first:
        first = first[0]
    if isinstance(first, int) and first in floats and not results[first].aval.shape:
        return [first]
    return floats


class ProgramGradient(NamedTuple):
    """A program and its gradient.

    Attributes:
      program: the program itself.
      forward: the forward pass that replaces it: to its results and residuals.
      backward: the backward pass: from residuals and cotangents to gradients.
      kept: the bytes of its residuals. Arguments do not count, because they exist
        anyway. Neither do zeros that only carry a tangent: no compiled program reads
        them.
    """

    program: Jaxpr
    forward: Jaxpr
    backward: Jaxpr
    kept: int


def backward_of(function: Differentiable) -> ProgramGradient:
    """Returns the backward pass of a function, without running it.

    Raises:
      ValueError: it has no floating-point argument or no floating-point result.
    """
    function.check()

    def forward(*arrays: Array) -> tuple[list[Array], tuple[Function, list[Array]]]:
        run = functools.partial(structure.evaluate, function.traced)
        out, back, results = function.differentiated(run, arrays)
        return results, (back, out)

    with function.advised():
        trace = jax.make_jaxpr(forward, return_shape=True)
        traced, (results, kept) = trace(*function.avals)
        backward = jax.make_jaxpr(lambda back, out: back(out))(*kept)
    of_forward = structure.parts(traced)
    there = {*of_forward.invars, *of_forward.constvars}
    n_kept = len(jax.tree.leaves(kept[0]))
    returned = of_forward.outvars[len(results) :][:n_kept]
    n_out = len(structure.parts(backward).outvars)
    uses = _ResidualUseAnalysis().inputs(backward, [_ResidualUse.NUMBERS] * n_out)
    residuals = {
        var
        for var, use in zip(returned, uses[:n_kept], strict=True)
        if use is not _ResidualUse.TANGENT and not structure.is_literal(var)
    } - there
    n_bytes = sum(map(bytes_of, residuals))
    return ProgramGradient(function.traced, traced, backward, n_bytes)


class _ResidualUse(enum.IntEnum):
    """The use of a residual; the largest of several uses decides."""

    NONE = 0
    TANGENT = 1
    NUMBERS = 2


class _ResidualUseAnalysis(Backward[_ResidualUse]):
    """Finds which residuals are read as numbers, and which only carry a tangent."""

    def nothing(self) -> _ResidualUse:
        """An unread value has no use."""
        return _ResidualUse.NONE

    def join(self, one: _ResidualUse, other: _ResidualUse) -> _ResidualUse:
        """Returns the larger of two uses."""
        return max(one, other)

    def predicate_fact(self) -> _ResidualUse:
        """A predicate is read as a number."""
        return _ResidualUse.NUMBERS

    def transfer(
        self, eqn: Eqn, facts: Sequence[_ResidualUse], path: str
    ) -> Sequence[_ResidualUse]:
        """Returns the use of each operand of an op."""
        del facts, path
        return [
            _ResidualUse.TANGENT if is_tangent else _ResidualUse.NUMBERS
            for is_tangent in bilinear.are_tangents(eqn)
        ]


def rows_of_backward(run: ProgramGradient, traced: ProgramGradient) -> Iterator[Row]:
    """Yields the rows that run only for the backward pass.

    Args:
      run: the backward pass, as it runs.
      traced: the backward pass without autocast.
    """

    def likeness(row: Row) -> tuple[str, ...]:
        # A shape without its dtype.
        return row.scope, row.op, *(shape.partition("[")[2] for shape in row.shapes)

    as_traced: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in _rows_for(traced):
        as_traced[likeness(row)].append(row.bytes_run)
    for row in _rows_for(run):
        if found := as_traced[likeness(row)]:
            row = row._replace(bytes_traced=found.pop(0))
        yield row


def _rows_for(passes: ProgramGradient) -> Iterator[Row]:
    """Yields the rows that the program itself does not run.

    It does not compare source lines: a custom rule may recompute a value on its own
    line.
    """
    there = Counter(row._replace(source="") for row in _rows_of(passes.program))
    for row in _rows_of(passes.forward):
        found = row._replace(source="")
        if there[found]:
            there[found] -= 1
        else:
            yield row._replace(
                code="for_backward",
                reason="forward pass: needed only by the backward pass",
            )
    yield from _rows_of(passes.backward)


def _rows_of(jaxpr: Jaxpr) -> Iterator[Row]:
    made: dict[int, Row] = {}
    for eqn, place in placed_equations(jaxpr):
        if params.op_of(eqn) in (*HIGHER_ORDER, "convert_element_type"):
            continue
        if id(eqn) not in made:
            how = "runs in the dtype of its operands"
            if bilinear.dtype_of(eqn) is not None:
                how = "multiplies rounded operands"
            reason = f"backward pass: {how}"
            made[id(eqn)] = row_as_traced(eqn, eqn.outvars, "backward", reason)
        row = made[id(eqn)]
        yield row._replace(
            scope=of_the_user(source.join(place.path, row.scope)),
            source=source.source(eqn, place.source),
            times=place.times,
            is_backward=True,
        )
