"""``compare``: the relative error of each op against float32."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.api import run_function
from jmp_lite.autocasting.arguments import read_function
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.insight.backward import ArgNums, Differentiable, check_argnums
from jmp_lite.insight.comparer import (
    ComparedOp,
    Comparer,
    StagedCasts,
    Sums,
    Twin,
    TwinError,
    error,
)
from jmp_lite.insight.statistics import check_elements, fetched, stacked
from jmp_lite.insight.tables import Uncalled, short, text_table
from jmp_lite.jaxprs import sharding, structure
from jmp_lite.jaxprs.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class OpError:
    """The relative error of one op against float32, over all trips of all loops.

    A relative error is ``sum(|x - x32|) / sum(|x32|)``. For integers and booleans it is
    the share of the elements that differ.

    Attributes:
      scope: the path of scopes of the op.
      op: the name of its primitive.
      source: its place in the code: file, line and function.
      dtype: the narrowest floating dtype that the op reads or returns.
      is_backward: whether the op belongs to the backward pass.
      error_in: the relative error of its operands; the largest of several.
      error_out: the relative error of its result.
      amplification: ``error_out / error_in``. An ``error_in`` below the rounding error
        of ``dtype`` counts as that rounding error.
    """

    scope: str
    op: str
    source: str
    dtype: str
    is_backward: bool
    error_in: float
    error_out: float
    amplification: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of a function in mixed precision; a pytree that prints as a table.

    Attributes:
      sums: the sums that errors are computed from: arrays with one element for each op.
      results: the same sums with one element for each result and gradient.
      ops: the ops, in the order in which they run.
      names: the names of the results and gradients.
    """

    sums: Sums
    results: TwinError
    ops: tuple[ComparedOp, ...] = dataclasses.field(metadata={"static": True})
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def errors(self) -> Mapping[str, float]:
        """The relative error of each result and each gradient, by name.

        It is NaN if the result contains a NaN in float32, too.
        """
        off, size = (_joined(column) for column in fetched(self.results))
        return dict(zip(self.names, map(float, _ratio(off, size)), strict=True))

    @property
    def rows(self) -> tuple[OpError, ...]:
        """A row for each op whose result differs from float32, in program order.

        Casts, ops that move numbers, and ops that never ran have no row.
        """
        off, size, given = (_joined(column) for column in fetched(self.sums))
        error_in, error_out = _ratio(given, size), _ratio(off, size)
        rows: list[OpError] = []
        errors = zip(error_in.tolist(), error_out.tolist(), strict=True)
        for op, (before, after) in zip(self.ops, errors, strict=True):
            # An infinite error does not grow.
            growth = after / max(before, op.rounding) if np.isfinite(before) else 1.0
            rows.append(OpError(*op[:4], op.is_backward, before, after, growth))
        return tuple(row for row in rows if row.error_out)

    def amplified(self) -> tuple[OpError, ...]:
        """Returns the rows by falling amplification."""
        return tuple(sorted(self.rows, key=lambda row: -row.amplification))

    def table(self, n: int | None = None) -> str:
        """Returns rows by falling amplification, and errors of results, as text.

        Args:
          n: the number of rows; None for all.
        """
        titles = ("amplified", "error in", "error out", "op", "runs in", "scope")
        rows = [
            (
                f"{row.amplification:.3g}x",
                f"{row.error_in:.1e}",
                f"{row.error_out:.1e}",
                row.op + (" (backward)" if row.is_backward else ""),
                row.dtype,
                row.scope,
                short(row.source),
            )
            for row in self.amplified()
        ]
        left_out = [] if n is None else rows[n:]
        lines = [text_table((*titles, "where"), [("", rows[:n])], right=(0, 1, 2))]
        if left_out:
            lines.append(f"and {len(left_out)} ops that amplify less")
        lines += [f"{name}: {error:.1e}" for name, error in self.errors.items()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table(_N_SHOWN)


_N_SHOWN = 20

Args = ParamSpec("Args")

ELEMENTS = 2**16


def compare(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
    argnums: ArgNums = None,
    elements: int = ELEMENTS,
) -> Callable[Args, Comparison]:
    """Returns a function that compares ``autocast(fun, rules)`` with float32, op by op.

    One program computes both, and measures the relative error of each op. It answers
    the question: which op turns a small error into a large one?

    The reference computes everything in float32, also where ``fun`` itself casts to 16
    bits. With the rules ``"O0"``, code that was written by hand in 16 bits is compared
    with itself in float32. Constants that were rounded while tracing stay rounded. The
    reference takes the same branches and runs loops as long as mixed precision does.

    A cast has no row. Its rounding counts for the op that reads its result.

    Args:
      fun: any function of pytrees that JAX can trace. Kernels are compared by their
        results, and so is a ``while`` under ``vmap`` whose lanes end at different steps
        (``vmap`` the compared function instead). A kernel that accepts 16 bits only
        runs in 16 bits on both sides.
      rules: the name of a preset, or a ``Rules``.
      compute_dtype: a dtype that replaces the compute dtype of the rules.
      backward: whether to compare the backward pass too, as ``explain`` does. If the
        result is a loss, or a tuple that begins with a loss, its gradients with respect
        to its arguments are compared. Otherwise those of a fixed random combination of
        all results are.
      argnums: which positional arguments the backward pass differentiates, as in
        ``jax.grad``; None for all floating-point arguments.
      elements: the largest number of elements of a result to compare, in evenly spaced
        rows. A result that is mostly zero, such as the gradient of an embedding, may
        need more. Results of ``fun``, its gradients, and arrays that are sharded over
        Explicit axes are compared as a whole.

    Returns:
      A function with the arguments of ``fun`` that returns a ``Comparison``. It runs
      faster under ``jit``.

    Raises:
      ValueError: there is no such preset or dtype, or ``elements`` is less than 1. The
        returned function raises it if ``backward`` is set and no argument is floating.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> def fun(x):
      ...     y = x @ x
      ...     return jnp.tanh((y + 100) - 100) @ x
      >>> x = jnp.linspace(-1, 1, 16).reshape(4, 4)
      >>> worst = jmp.compare(fun, "O3")(x).amplified()[0]
      >>> worst.op, worst.dtype, worst.amplification > 30
      ('sub', 'bfloat16', True)
    """
    check_convertible(fun)
    check_elements(elements)
    check_argnums(argnums, backward)
    chosen = choose_rules(rules, compute_dtype)

    def compared(*args: PyTree, **kwargs: PyTree) -> Comparison:
        program = read_function(fun, args, kwargs, rules := chosen())
        traced, treedef, written = program.jaxpr, program.treedef, program.as_written
        function = Differentiable(traced, treedef, args, kwargs, argnums, written)
        arrays = program.arrays
        return compared_with_float32(function, rules, arrays, backward, elements)

    return Uncalled("compare", fun, compared)


def compared_with_float32(
    function: Differentiable,
    rules: Rules,
    arrays: Sequence[Array],
    backward: bool = True,
    elements: int = ELEMENTS,
) -> Comparison:
    """Runs a traced function under some rules and in float32.

    Args:
      function: the function.
      rules: the rules.
      arrays: its arguments.
      backward: whether its gradients are compared too.
      elements: the largest number of elements of a result to compare.
    """
    traced, types = function.traced, function.types
    low = functools.partial(run_function, rules, traced, types=types, casts=StagedCasts)
    program = jax.make_jaxpr(lambda *xs: low(xs))(*arrays)
    names = function.names_of_results
    if backward:
        function.check()
        names = [*names, *function.names_of_gradients]
        run = functools.partial(structure.evaluate, program)
        with function.advised():
            program = jax.make_jaxpr(function.with_gradients(run))(*function.avals)
    comparer = Comparer(elements)
    results = comparer.run(program, list(map(Twin, arrays)))
    empty = jnp.zeros(0, jnp.float32)
    errors = [TwinError(empty, empty)]  # There may be no result.
    for twin in results:
        found, full = error(twin.low, twin.full), twin.full
        if jnp.issubdtype(jnp.result_type(full), jnp.inexact):
            off = jnp.where(jnp.any(jnp.isnan(full)), jnp.nan, found.off)
            found = found._replace(off=off)
        errors.append(found)
    ops, columns = comparer.found()
    sums: Sums = jax.tree.map(sharding.gathered, columns)
    of_results = jax.tree.map(sharding.gathered, stacked(errors))
    return Comparison(sums, of_results, tuple(ops), tuple(names))


def _joined(column: np.ndarray) -> np.ndarray:
    """Returns sums over the axes that vmap, scan or devices have stacked."""
    column = np.asarray(column, np.float64)
    return column.sum(axis=tuple(range(column.ndim - 1)))


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        of_zeros = np.where(part > 0, np.inf, part)
        return np.where(whole > 0, part / whole, of_zeros)
