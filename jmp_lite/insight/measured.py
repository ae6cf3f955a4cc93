"""What tune measures of rules, and its report."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.api import run_function
from jmp_lite.autocasting.arguments import read_function
from jmp_lite.autocasting.rules.match import AnyPrecision, name_of
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.insight.backward import ArgNums, Differentiable, floats_in
from jmp_lite.insight.candidates import NUMBER, without_numbers
from jmp_lite.insight.comparison import Comparison, compared_with_float32
from jmp_lite.insight.statistics import fetched
from jmp_lite.insight.tables import text_table
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.trace import refuse_shapes
from jmp_lite.jaxprs.types import Array, Function, PyTree
from jmp_lite.ops import Precision

# First with every rounding, even if this compiler could fuse it away; then with this
# compiler's defaults.
WAYS_TO_COMPILE = ({"xla_allow_excess_precision": False}, {})


class Error(NamedTuple):
    """The errors of results and gradients, relative to float32.

    Attributes:
      outputs: the largest relative error of a result, ``|x - x32| / |x32|`` by norms.
      gradients: the largest relative error of a gradient.
      worst: the result or gradient with the largest error; empty if there is no error.
    """

    outputs: float
    gradients: float
    worst: str

    @property
    def largest(self) -> float:
        """The larger of both errors."""
        return max(self.outputs, self.gradients)

    def joined(self, other: "Error") -> "Error":
        """Returns the larger error of results, and the larger error of gradients."""
        return Error(
            outputs=max(self.outputs, other.outputs),
            gradients=max(self.gradients, other.gradients),
            worst=self.worst if self.largest >= other.largest else other.worst,
        )


class Sample:
    """A function with its arguments: its results and gradients under any rules.

    Args:
      fun: the function.
      args: its arguments, concrete.
      kwargs: its keyword arguments, concrete.
      argnums: the positional arguments to differentiate; None for all.

    Attributes:
      fun: the function.
      args: its arguments.
      kwargs: its keyword arguments.
      not_judged: the names of results and gradients that float32 does not determine.
    """

    def __init__(
        self,
        fun: Function,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        argnums: ArgNums = None,
    ) -> None:
        refuse_shapes(args, kwargs, "tune")
        self.fun, self.args, self.kwargs = fun, tuple(args), dict(kwargs)
        rules = get_rules("mixed")
        program = read_function(fun, self.args, self.kwargs, rules)
        with jax.default_matmul_precision("highest"):
            highest = read_function(fun, self.args, self.kwargs, rules)
        traced, treedef, written = program.jaxpr, program.treedef, program.as_written
        self._function = Differentiable(
            traced, treedef, self.args, self.kwargs, argnums, written
        )
        self._arrays = jax.device_put(list(program.arrays))
        floats = floats_in(structure.parts(written).invars)
        fetched([self._arrays[i] for i in floats])  # They have to be concrete.
        outputs = floats_in(structure.parts(written).outvars)
        self._n_outputs = len(outputs)
        results = self._function.names_of_results
        names = [*results, *self._function.names_of_gradients]
        self._measured = [*outputs, *range(len(results), len(names))]
        self._names = [names[i] for i in self._measured]

        self._exact = self._run(highest.evaluate_in_float32, self._arrays)
        self._check_exact()
        nearby = list(self._arrays)
        for i in floats:
            nearby[i] = _in_the_last_bit(nearby[i])
        changed = self._run(highest.evaluate_in_float32, nearby)
        pairs = zip(changed, self._exact, strict=True)
        self._is_judged = [_distance(a, b) <= 0.1 for a, b in pairs]
        judged = zip(self._names, self._is_judged, strict=True)
        self.not_judged = tuple(name for name, is_judged in judged if not is_judged)
        if not any(self._is_judged[: self._n_outputs]):
            raise ValueError(
                "There is nothing to compare: the function has no floating-point "
                "result, or float32 determines none of them to within a tenth. (A "
                "change in the last bit of the arguments changes each one by more.)"
            )

    def error(self, rules: Rules, options: Mapping[str, bool]) -> Error:
        """Returns the error under some rules, with some compiler options."""
        traced, types = self._function.traced, self._function.types
        run = functools.partial(run_function, rules, traced, types=types)
        found = self._run(run, self._arrays, options)
        errors = [
            # Infinities and NaN count even in a result that is not judged.
            _distance(a, b) if is_judged or (~np.isfinite(a) & (a != b)).any() else 0.0
            for a, b, is_judged in zip(found, self._exact, self._is_judged, strict=True)
        ]
        worst = self._names[int(np.argmax(errors))] if any(errors) else ""
        outputs, gradients = errors[: self._n_outputs], errors[self._n_outputs :]
        return Error(max(outputs, default=0.0), max(gradients, default=0.0), worst)

    def comparison(self, rules: Rules) -> Comparison:
        """Compares the function and its gradients with float32, op by op."""
        run = jax.jit(lambda *xs: compared_with_float32(self._function, rules, xs))
        return run(*self._arrays)

    def _run(
        self,
        fun: Function,
        arrays: Sequence[Array],
        options: Mapping[str, bool] = WAYS_TO_COMPILE[0],
    ) -> list[np.ndarray]:
        """Returns the floating-point results of a function, and its gradients."""
        both = self._function.with_gradients(fun)

        def measured(*arrays: Array) -> list[Array]:
            found = both(*arrays)
            return [found[i] for i in self._measured]

        try:
            with self._function.advised():
                results = jax.jit(measured, compiler_options=dict(options))(*arrays)
        except ValueError as error:
            error.add_note(
                "tune also measures gradients. If the function is for inference "
                "only, apply jax.lax.stop_gradient inside it."
            )
            raise
        complex_or_real = np.complex128, np.float64
        return [
            np.asarray(x).astype(complex_or_real[not np.iscomplexobj(x)])
            for x in jax.device_get(results)
        ]

    def _check_exact(self) -> None:
        for name, array in zip(self._names, self._exact, strict=True):
            if np.isnan(array).any():
                raise ValueError(
                    f"The {name} is NaN on this sample, even in float32. Apply "
                    "jmp_lite.watch to the function or to its gradient to find the "
                    "first NaN. Apply jax.lax.stop_gradient to parts that are not "
                    "trained, and pass the loss function, not a whole training step."
                )


def in_words(error: Error) -> str:
    """Returns an error as a line of text."""
    return f"{error.outputs:.2g} (results), {error.gradients:.2g} (gradients)"


def _in_the_last_bit(array: Array) -> Array:
    """Changes floats in their last bit.

    Whole numbers stay: they may be labels, counts or masks.
    """
    info = jnp.finfo(array.dtype)
    wide = jnp.float32 if info.bits < 32 else array.dtype
    signs = np.random.default_rng(1).choice([-1.0, 1.0], array.shape)
    changed = array.astype(wide) * jnp.asarray(1 + float(info.eps) * signs, wide)
    is_whole = array == jnp.round(array)
    return jnp.where(is_whole, array, changed.astype(array.dtype))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the relative distance between numbers and a reference.

    Both may be infinite at the same positions.
    """
    if (a == b).all():
        return 0.0
    finite = np.where(np.isfinite(b), b, 0).ravel()
    unit = np.abs(finite).max()  # Squares of very small numbers are zero.
    if not unit:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.linalg.norm(np.where(a == b, 0, (a - b) / unit).ravel())
    size = np.linalg.norm(finite / unit)
    return float(far / size) if np.isfinite(far) else math.inf


class Kept(NamedTuple):
    """A scope or an op that stays in a wider precision than at the start.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      name: the pattern of the scope, or the op.
      precision: ``FULL`` for a rule that keeps it in float32.
        ``LOW`` for products that stay in 16 bits instead of float8, or of another
        number format. They have no rule of their own: the rules name the products in
        float8.
      without: the error without this entry. For ``LOW``, the error with these products
        in float8 too. If the op itself is ``LOW``, scopes cannot name some products,
        and this is the error with all products in float8.
    """

    kind: str
    name: str
    precision: AnyPrecision
    without: Error


class Step(NamedTuple):
    """One step of the search: it tries to lower some more scopes or ops.

    Attributes:
      lowered: the scopes or ops.
      error: the error with these, and all that were lowered before.
      is_tolerated: whether they stay low.
      precision: ``LOW`` for a step from float32, the number format (``float8``) for one
        from 16 bits.
    """

    lowered: tuple[str, ...]
    error: Error
    is_tolerated: bool
    precision: AnyPrecision = Precision.LOW


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """The report of a search.

    ``print`` shows what the rules keep in float32; ``table`` shows the steps.

    Attributes:
      tolerance: the largest tolerated error.
      error: the error of the rules found.
      error_before: the error of the initial rules.
      kept: the scopes or ops that the rules keep in float32, or out of float8, with
        their errors.
      steps: the steps of the search, in order.
      not_judged: the results and gradients that float32 does not determine: a change in
        the last bit of the arguments changes them by more than a tenth.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> x = jnp.linspace(-1, 1, 16).reshape(4, 4)
      >>> fun, quiet = lambda x: jnp.tanh(x @ x) @ x, lambda line: None
      >>> rules, report = jmp.tune(fun, tolerance=0.1, progress=quiet)(x)
      >>> report.kept, report.error.largest < 0.1
      ((), True)
    """

    tolerance: float
    error: Error
    error_before: Error
    kept: tuple[Kept, ...] = ()
    steps: tuple[Step, ...] = ()
    not_judged: tuple[str, ...] = ()

    def table(self) -> str:
        """Returns the steps as a table of text."""
        headers = ("lowered", "error", "worst in", "outcome")
        rows: list[Sequence[str]] = []
        for step in self.steps:
            is_low = step.precision is Precision.LOW
            outcome = "16 bits" if is_low else name_of(step.precision)
            if not step.is_tolerated:
                outcome = "too large"  # Its halves are tried next.
            rows.append((_names(step.lowered), *_cells(step.error), outcome))
        return text_table(headers, [("", rows)], right=(1,))

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(_plain(vars(self)), indent=2)

    def __str__(self) -> str:
        lines = [
            f"error {in_words(self.error)}, tolerance {self.tolerance:.2g}",
            f"before tuning: {in_words(self.error_before)}",
        ]
        if self.kept:
            headers = ("kept", "", "as", "error without it", "worst in")
            rows = [
                (kind, name or "(all)", name_of(precision).upper(), *_cells(error))
                for kind, name, precision, error in self.kept
            ]
            lines.append(text_table(headers, [("", rows)], right=(3,)))
        if self.not_judged:
            lines.append(f"not judged: {', '.join(self.not_judged)}")
        return "\n".join(lines)


class Tuned(NamedTuple):
    """What ``tune`` finds: rules, and the report of the search.

    Attributes:
      rules: the rules.
      report: how they were found, and the errors.
    """

    rules: Rules
    report: TuningReport


_SHOWN = 3
"""The number of names on one line."""


def _cells(error: Error) -> tuple[str, str]:
    return f"{error.largest:.2g}", error.worst


def _names(names: Sequence[str]) -> str:
    """Returns some names as text; names that differ only in a number appear once."""
    alike = list(dict.fromkeys(map(without_numbers, names)))
    shown = names if len(names) <= _SHOWN else alike
    more = len(shown) - _SHOWN
    names = [name.replace(NUMBER, "*") for name in shown[:_SHOWN]]
    listed = ", ".join(name or "(no scope)" for name in names)
    return listed + (f" and {more} more" if more > 0 else "")


def _plain(value: object) -> object:
    """Returns a value with JSON types only."""
    if isinstance(value, Precision | NumberFormat):
        return name_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Error | Kept | Step):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
