"""``tune``: the fewest float32 ops for a tolerated error, found on a sample.

The law of this file: nothing is estimated. Rules are tried on the sample, results and
gradients are compared with float32's, and what is returned has been measured as it is.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.backward import losses_of
from jmp_lite.autocasting.door import check_function, choose_rules
from jmp_lite.autocasting.explain import explain, is_low
from jmp_lite.autocasting.interpreter import Walk, trace, walk_along
from jmp_lite.autocasting.rows import Row
from jmp_lite.autocasting.rules import (
    EXACT,
    HIGHER_ORDER,
    LOW_SCOPE,
    Precision,
    Rules,
    fields_of,
    group_of,
)
from jmp_lite.autocasting.tables import text_table
from jmp_lite.casting.counting import fetched

# --------------------------------------------------------------------------- results


class Error(NamedTuple):
    """How far results and gradients are from float32's.

    Attributes:
      outputs: the largest relative error of a result, ``|x - x32| / |x32|`` by norms.
      gradients: the same of the gradients.
      worst: the result or gradient that is furthest; empty where there is no error.
    """

    outputs: float
    gradients: float
    worst: str

    @property
    def largest(self) -> float:
        """The larger one of both."""
        return max(self.outputs, self.gradients)


class Kept(NamedTuple):
    """A rule that keeps something in float32.

    Attributes:
      kind: ``"scope"`` or ``"op"``.
      name: the scope's pattern, or the op.
      precision: ``FULL``; or ``FULL_INSIDE``, where that is enough.
      without: the error of the rules without this one.
    """

    kind: str
    name: str
    precision: Precision
    without: Error


class Step(NamedTuple):
    """Something that was tried: to take ``lowered`` out of float32 too.

    Attributes:
      lowered: the scopes or ops.
      error: of the rules in which they, and all that was lowered before, are low.
      is_tolerated: whether they stay low.
    """

    lowered: tuple[str, ...]
    error: Error
    is_tolerated: bool


@dataclasses.dataclass(frozen=True)
class TuningReport:
    """How rules were found; ``print`` shows what they keep, ``table`` what was tried.

    Attributes:
      tolerance: the largest error that was allowed.
      error: of the rules found.
      error_before: of the rules that the search started from.
      kept: what the rules found keep in float32 besides, and what each one is for.
      steps: what was tried, in order.
      not_judged: results and gradients that float32 itself does not know: the last bit
        of the arguments changes them by more than a tenth.
    """

    tolerance: float
    error: Error
    error_before: Error
    kept: tuple[Kept, ...] = ()
    steps: tuple[Step, ...] = ()
    not_judged: tuple[str, ...] = ()

    def table(self) -> str:
        """Returns what was tried as text."""
        headers = ("lowered", "error", "of", "")
        rows = [
            (
                _names(step.lowered),
                *_cells(step.error),
                "" if step.is_tolerated else "kept, or in part",
            )
            for step in self.steps
        ]
        return text_table(headers, [("", rows)], right=(1,))

    def to_json(self) -> str:
        """Returns all of it as JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(_plain(fields), indent=2)

    def __str__(self) -> str:
        lines = [
            f"error {_told(self.error)}, tolerance {self.tolerance:.2g}",
            f"before: {_told(self.error_before)}",
        ]
        if self.kept:
            headers = ("kept", "", "as", "error without it", "of")
            rows = [
                (k.kind, k.name or "(all)", k.precision.name, *_cells(k.without))
                for k in self.kept
            ]
            lines.append(text_table(headers, [("", rows)], right=(3,)))
        if self.not_judged:
            lines.append(f"not judged: {', '.join(self.not_judged)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TunedRules(Rules):
    """Rules that ``tune`` has found: a ``Rules``, equal to one that says the same.

    Attributes:
      report: how they were found.
    """

    report: TuningReport

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and fields_of(self) == fields_of(other)

    __hash__ = Rules.__hash__


# ------------------------------------------------------------------------------ tune


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tune(
    fun: Callable[..., Any],
    args: Sequence[Any],
    tolerance: float,
    rules: Rules | str = "mixed",
    *,
    progress: Callable[[str], None] = _to_stderr,
) -> TunedRules:
    """Finds rules that keep the fewest ops in float32 for a tolerated error.

    It raises what the given rules run low, and lowers nothing that they do not: to
    search further down, start from ``"O2"`` or ``"O3"``. First all is float32; then
    the dearer half, its dearer half, and so on, is low again as long as the error is
    tolerated. This is done with ops, with blocks (``FULL_INSIDE``) and with kinds of
    layers (``FULL``); what leaves the fewest equations in float32 is returned. Each
    step compiles and runs the function and its gradient; on the same machine the same
    rules are found again.

    Gradients are those of the result, or of the first of several, where that is a
    scalar (a loss and what comes with it), otherwise of a fixed random combination of
    all results. They are measured as they are: if the loss is scaled in training, let
    ``fun`` scale it, or what vanishes in float16 without a scale counts as an error.
    Of a function for inference alone, stop the gradient inside.

    Args:
      fun: a function of pytrees that JAX can trace and differentiate. It gets the same
        arguments each time: randomness is in keys.
      args: a tuple of its arguments, concrete: a sample.
      tolerance: the largest relative error of any result and any gradient, by norms,
        against float32 with products in the highest precision.
      rules: the preset's name or the ``Rules`` to start from.
      progress: called with a line of text at each step.

    Returns:
      Rules, with a ``report`` of what each kept scope or op contributes.

    Raises:
      TypeError: ``args`` is no tuple of concrete arguments.
      ValueError: not even float32 is within the tolerance; on this sample something is
        NaN in float32, or nothing is there to compare.

    Example:
      >>> import jax.numpy as jnp
      >>> def fun(x):
      ...     for name, offset in (("robust", 0), ("delicate", 300)):
      ...         with jax.named_scope(name):
      ...             x = jnp.tanh((x @ x + offset) - offset)
      ...     return x @ x
      >>> x = jnp.linspace(-1, 1, 16).reshape(4, 4)
      >>> rules = tune(fun, (x,), tolerance=0.02, progress=lambda line: None)
      >>> [(one.kind, one.name) for one in rules.report.kept]
      [('scope', '^delicate$')]
      >>> Rules.from_json(rules.to_json()) == rules
      True

    Source: the search is delta debugging (Zeller and Hildebrandt, 2002), which
    Precimonious (Rubio-Gonzalez et al., 2013) brought to floating-point precision.
    """
    check_function(fun)
    start = choose_rules(rules, None)()
    tolerance = _positive(tolerance)
    search = _Search(_Sample(fun, args), start, tolerance, progress)
    before = search.error(())
    kept = [] if search.is_enough(()) else search.kept()
    report = TuningReport(
        tolerance=tolerance,
        error=search.error(kept),
        error_before=before,
        kept=tuple(
            Kept(*one, without=search.error(_without(kept, one))) for one in kept
        ),
        steps=tuple(search.steps),
        not_judged=search.sample.not_judged,
    )
    return TunedRules(**fields_of(search.rules_with(kept)), report=report)


def _positive(tolerance: Any) -> float:
    is_number = isinstance(tolerance, int | float | np.floating | np.integer)
    if not is_number or isinstance(tolerance, bool) or not 0 < tolerance < math.inf:
        raise ValueError(
            f"Expected the tolerance as a positive number, such as 1e-2, got "
            f"{tolerance!r}."
        )
    return float(tolerance)


# ---------------------------------------------------------------------- the measuring

# Every rounding happens, whatever a compiler could fuse here and not elsewhere; and
# what this compiler makes of it.
_WAYS_TO_COMPILE = ({"xla_allow_excess_precision": False}, {})


class _Sample:
    """A function on its sample: what it returns and its gradients, under any rules.

    Args:
      fun: the function.
      args: its arguments.

    Attributes:
      not_judged: the names of what float32 itself does not know.
    """

    def __init__(self, fun: Callable[..., Any], args: Any) -> None:
        if not isinstance(args, tuple | list):
            raise TypeError(
                "Expected a tuple of the function's arguments, got "
                f"{type(args).__name__}. Write (x,) for a single one."
            )
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
            raise TypeError(
                "tune runs the function: expected arrays, got a ShapeDtypeStruct."
            )
        self.fun, self.args = fun, tuple(args)
        self._traced, arrays, structure = trace(fun, self.args, {})
        with jax.default_matmul_precision("highest"):
            highest, _, _ = trace(fun, self.args, {})
        outs = [var.aval for var in compat.parts(self._traced).outvars]
        self._arrays = jax.device_put(list(arrays))
        self._floats = [i for i, x in enumerate(self._arrays) if _is_float(x)]
        fetched([self._arrays[i] for i in self._floats])  # They have to be known.
        self._losses = losses_of(outs, structure)
        self._cotangents = _cotangents([outs[i] for i in self._losses])
        self._outputs = [i for i, aval in enumerate(outs) if _is_float(aval)]
        self._names = self._named(structure, len(outs))

        def exactly(*arrays: Any) -> Any:
            return compat.evaluate(highest, arrays)

        self._exact = self._run(exactly, self._arrays)
        self._check_exact()
        changed = self._run(exactly, list(map(_in_the_last_bit, self._arrays)))
        pairs = list(zip(self._exact, changed, strict=True))
        self._is_judged = [_distance(b, a) <= 0.1 for a, b in pairs]
        self.not_judged = tuple(
            name
            for name, is_judged in zip(self._names, self._is_judged, strict=True)
            if not is_judged
        )
        if not any(self._is_judged[: len(self._outputs)]):
            raise ValueError(
                "There is nothing to compare: the function has no floating result, or "
                "none that float32 knows to a tenth: the last bit of the arguments "
                "changes it by more."
            )

    def error(self, rules: Rules, options: Mapping[str, Any]) -> Error:
        """Returns the error under some rules, compiled with some options."""

        def run(*arrays: Any) -> Any:
            return walk_along(Walk(rules), self._traced, arrays)

        found = self._run(run, self._arrays, options)
        errors = [
            _distance(a, b) if is_judged or _is_broken(a, b) else 0.0
            for a, b, is_judged in zip(found, self._exact, self._is_judged, strict=True)
        ]
        worst = self._names[int(np.argmax(errors))] if any(errors) else ""
        n_outputs = len(self._outputs)
        outputs, gradients = errors[:n_outputs], errors[n_outputs:]
        return Error(max(outputs, default=0.0), max(gradients, default=0.0), worst)

    def _run(
        self,
        fun: Callable[..., Any],
        arrays: Sequence[Any],
        options: Mapping[str, Any] = _WAYS_TO_COMPILE[0],
    ) -> list[Any]:
        """Returns the floating results of a function of arrays, and the gradients."""

        def measured(*arrays: Any) -> Any:
            def of_floats(*floats: Any) -> Any:
                merged = list(arrays)
                for i, array in zip(self._floats, floats, strict=True):
                    merged[i] = array
                results = fun(*merged)
                return [results[i] for i in self._losses], results

            given = (arrays[i] for i in self._floats)
            _, back, results = jax.vjp(of_floats, *given, has_aux=True)
            outputs = [results[i] for i in self._outputs]
            return [*outputs, *back(self._cotangents)]

        try:
            results = jax.jit(measured, compiler_options=dict(options))(*arrays)
        except ValueError as error:
            if "everse-mode" in str(error):
                error.add_note(
                    "tune measures gradients too. Of a function for inference alone, "
                    "stop the gradient inside: jax.lax.stop_gradient."
                )
            raise
        return [_wide(x) for x in jax.device_get(results)]

    def _named(self, structure: Any, n_results: int) -> list[str]:
        """Returns names for the floating results and for the gradients."""
        given = jax.tree.leaves_with_path(self.args)
        arguments = [path for path, leaf in given if _is_float(leaf)]
        tree = jax.tree.unflatten(structure, range(n_results))
        results = [path for path, _ in jax.tree.leaves_with_path(tree)]
        name = jax.tree_util.keystr
        return [
            *(f"result{name(results[i])}" for i in self._outputs),
            *(f"{_GRADIENT}{name(path)}" for path in arguments),
        ]

    def _check_exact(self) -> None:
        for name, array in zip(self._names, self._exact, strict=True):
            if np.isnan(array).any():
                raise ValueError(
                    f"In float32 itself the {name} is NaN on this sample: "
                    "jmp_lite.watch of the function, or of its gradient, tells where "
                    "that begins. Of what is not trained, stop the gradient in the "
                    "function (jax.lax.stop_gradient), and give the loss rather than a "
                    "whole training step."
                )


_GRADIENT = "gradient of args"


def _cotangents(losses: Sequence[Any]) -> list[Any]:
    """Returns what the gradients are taken of: the loss, or a mixture of all."""
    if len(losses) == 1 and not losses[0].shape:
        return [jnp.ones((), losses[0].dtype)]
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.standard_normal(x.shape)).astype(x.dtype) for x in losses
    ]


def _in_the_last_bit(array: Any) -> Any:
    """Returns an array whose numbers are others in their last bit.

    But for whole numbers, which may be labels, counts or masks.
    """
    if not _is_float(array):
        return array
    info = jnp.finfo(array.dtype)
    wide = jnp.float32 if info.bits < 32 else array.dtype
    signs = np.random.default_rng(1).choice([-1.0, 1.0], array.shape)
    changed = array.astype(wide) * jnp.asarray(1 + float(info.eps) * signs, wide)
    is_whole = array == jnp.round(array)
    return jnp.where(is_whole, array, changed.astype(array.dtype))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.dtype(bool)), np.inexact)


def _wide(array: Any) -> Any:
    array = np.asarray(array)
    is_complex = np.issubdtype(array.dtype, np.complexfloating)
    return array.astype(np.complex128 if is_complex else np.float64)


def _is_broken(a: Any, b: Any) -> bool:
    """Whether numbers are infinite or NaN where others are not."""
    return bool((~np.isfinite(a) & (a != b)).any())


def _distance(a: Any, b: Any) -> float:
    """Returns how far numbers are from others, in terms of the others' size.

    Both may be infinite in the same places.
    """
    if (a == b).all():
        return 0.0
    finite = np.where(np.isfinite(b), b, 0).ravel()
    unit = np.abs(finite).max()  # Squares of what is very small are zero.
    if not unit:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.linalg.norm(np.where(a == b, 0, (a - b) / unit).ravel())
    size = np.linalg.norm(finite / unit)
    return float(far / size) if np.isfinite(far) else math.inf


# ----------------------------------------------------------------------- the searching


class _Rule(NamedTuple):
    """A rule that keeps something in float32."""

    kind: str
    name: str
    precision: Precision = Precision.FULL


class _Search:
    """The search for what has to stay in float32.

    Args:
      sample: what measures.
      start: the rules that it starts from.
      tolerance: the largest error.
      progress: is told of each step.

    Attributes:
      steps: what was tried.
    """

    def __init__(
        self,
        sample: _Sample,
        start: Rules,
        tolerance: float,
        progress: Callable[[str], None],
    ) -> None:
        self.sample = sample
        self.steps: list[Step] = []
        self._start = start
        self._tolerance = tolerance
        self._progress = progress
        self._errors: dict[Rules, Error] = {}

    def rules_with(self, kept: Iterable[_Rule]) -> Rules:
        """Returns the rules with which the search has begun, and some more before."""
        kept = list(kept)
        scopes = tuple((r.name, r.precision) for r in kept if r.kind == "scope")
        ops = [rule.name for rule in kept if rule.kind == "op"]
        plain = Rules(**fields_of(self._start)).full(*ops)
        return dataclasses.replace(plain, scopes=(*scopes, *plain.scopes))

    def error(self, kept: Iterable[_Rule]) -> Error:
        """Returns the error of the rules with some more."""
        rules = self.rules_with(kept)
        if rules not in self._errors:
            error = Error(0.0, 0.0, "")
            for options in _WAYS_TO_COMPILE:
                error = max(error, self.sample.error(rules, options), key=_largest)
                if error.largest > self._tolerance:
                    break
            self._errors[rules] = error
            n = len(self._errors)
            self._progress(f"tune: {n} tried, error {_told(error)}")
        return self._errors[rules]

    def is_enough(self, kept: Iterable[_Rule]) -> bool:
        """Whether the error of the rules with some more is tolerated."""
        return self.error(kept).largest <= self._tolerance

    def kept(self) -> list[_Rule]:
        """Returns the fewest rules that are enough."""
        everything = [_Rule("scope", "")]
        if not self.is_enough(everything):
            raise ValueError(
                f"The tolerance of {self._tolerance:.2g} is out of reach. With all in "
                f"float32 the error is {_told(self.error(everything))}, against "
                "products in the highest precision. What stays low is marked in the "
                "function (as_low, low_precision, low_call), or is what the device "
                "makes of float32 products (jax_default_matmul_precision)."
            )
        rows = [row for row in self._explained(()) if _is_raisable(row)]
        ops = _costs(filter(self._rounds, rows), _op_of)
        scopes = _costs(rows, _scope_of)
        ways = [
            _Units("op", Precision.FULL, ops, _kind_of_op),
            # A block at a time, whose ends are low; and a kind of layer at a time,
            # between which all is float32.
            _Units("scope", Precision.FULL_INSIDE, scopes, _place_of_scope),
            _Units("scope", Precision.FULL, scopes, _kind_of_scope),
        ]
        found = [rules for way in ways if (rules := self._smallest(way)) is not None]
        return min(map(self._weakened, [*found, everything]), key=self._in_float32)

    def _smallest(self, units: "_Units") -> list[_Rule] | None:
        """Returns rules for the units that have to be kept; None if all are too few."""
        kept = set(units.costs)
        if not self.is_enough(units.rules(kept)):
            return None
        waiting = [units.ordered(kept)]
        while waiting:
            group = waiting.pop()
            fewer = kept - set(group)
            if self._tried(group, units.rules(fewer)):
                kept = fewer
            elif len(group) > 1:
                waiting += reversed(units.parts(group))
        return units.rules(kept)

    def _weakened(self, kept: list[_Rule]) -> list[_Rule]:
        """Drops what is not needed after all, and keeps the rest inside alone."""
        for rule in list(kept):
            weaker = [_without(kept, rule)]
            if rule.kind == "scope":
                inside = rule._replace(precision=Precision.FULL_INSIDE)
                weaker.append([inside if one == rule else one for one in kept])
            fits = (w for w in weaker if self._in_float32(w) < self._in_float32(kept))
            kept = next(filter(self.is_enough, fits), kept)
        return kept

    def _tried(self, group: Sequence[str], kept: Sequence[_Rule]) -> bool:
        step = Step(tuple(group), self.error(kept), self.is_enough(kept))
        self.steps.append(step)
        return step.is_tolerated

    def _rounds(self, row: Row) -> bool:
        """Whether an op can be kept, and is not exact."""
        if row.op in HIGHER_ORDER:
            return False
        is_low = self._start.precision_of(row.op) is Precision.LOW
        return is_low or row.op not in EXACT

    def _explained(self, kept: Iterable[_Rule]) -> Sequence[Row]:
        return explain(self.sample.fun, self.rules_with(kept))(*self.sample.args).rows

    def _in_float32(self, kept: Sequence[_Rule]) -> tuple[int, ...]:
        """Returns how much runs in float32: equations, then products, then rules."""
        rows = [r for r in self._explained(kept) if r.precision == "float32"]
        times = sum(row.times or 1 for row in rows)
        return times, sum(row.flops * (row.times or 1) for row in rows), len(kept)


class _Units(NamedTuple):
    """What can be kept in float32: scopes, or ops.

    Attributes:
      kind: which.
      precision: how they are kept.
      costs: what each one costs in float32, in the order in which they are run.
      kind_of: what puts units together that are alike: names from the widest on.
    """

    kind: str
    precision: Precision
    costs: Mapping[str, tuple[int, int]]
    kind_of: Callable[[str], Sequence[str]]

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Returns units in the order in which they are run."""
        wanted = set(names)
        return [name for name in self.costs if name in wanted]

    def parts(self, group: Sequence[str]) -> list[list[str]]:
        """Returns the halves of a group, the dearer one first."""
        kinds = {name: tuple(self.kind_of(name)) for name in group}
        shared = _shared(kinds.values())
        alike: dict[Any, list[str]] = {}
        for name, kind in kinds.items():
            alike.setdefault(kind[: shared + 1], []).append(name)
        parts = [[name] for name in group] if len(alike) == 1 else alike.values()
        dearest = sorted(parts, key=self._cost, reverse=True)
        middle = len(dearest) // 2
        halves = dearest[:middle], dearest[middle:]
        return [[name for part in half for name in part] for half in halves]

    def rules(self, kept: Iterable[str]) -> list[_Rule]:
        """Returns rules that keep these, and none of the others."""
        kept = set(kept)
        if self.kind == "op":
            named = self.ordered(kept)
        else:
            named = self._patterns(list(self.costs), kept)
        return [_Rule(self.kind, name, self.precision) for name in named]

    def _patterns(self, group: Sequence[str], kept: set[str]) -> list[str]:
        if not kept.intersection(group):
            return []
        if len(group) == 1:
            return [f"^{re.escape(group[0])}$"]
        if kept.issuperset(group):
            kinds = [tuple(self.kind_of(name)) for name in group]
            shared = kinds[0][: _shared(kinds)]
            inside = "/".join(shared)
            number = re.escape(_NUMBER)
            inside = re.escape(inside).replace(number, r"\d+")
            pattern = f"^{inside}(/|$)" if shared else ""
            matched = {name for name in self.costs if re.search(pattern, name)}
            if set(group) <= matched <= kept:
                return [pattern]
        return [p for part in self.parts(group) for p in self._patterns(part, kept)]

    def _cost(self, group: Sequence[str]) -> tuple[int, int]:
        costs = [self.costs[name] for name in group]
        return sum(flops for flops, _ in costs), sum(size for _, size in costs)


def _shared(kinds: Iterable[Sequence[str]]) -> int:
    """Returns how many names all kinds begin with alike."""
    columns = zip(*kinds, strict=False)
    same = [len(set(column)) == 1 for column in columns]
    return same.index(False) if False in same else len(same)


_NUMBER = "\0"
"""Stands for a number in names that are alike but for it; no name holds it."""


def _alike(name: str) -> str:
    """Returns what names have in common that differ in a number alone."""
    return re.sub(r"\d+", _NUMBER, name)


def _kind_of_scope(path: str) -> Sequence[str]:
    """Returns the names in a path, without numbers."""
    return _alike(path).split("/")


def _place_of_scope(path: str) -> Sequence[str]:
    """Returns the names in a path."""
    return path.split("/")


def _kind_of_op(op: str) -> Sequence[str]:
    group = group_of(op)
    return (group.reason if group else "", op)


def _op_of(row: Row) -> str:
    return row.op


def _scope_of(row: Row) -> str:
    return row.scope


def _costs(
    rows: Iterable[Row], name_of: Callable[[Row], str]
) -> Mapping[str, tuple[int, int]]:
    costs: dict[str, tuple[int, int]] = {}
    for row in rows:
        times = row.times or 1
        flops, size = costs.get(name_of(row), (0, 0))
        more = times * row.flops, times * row.bytes_traced
        costs[name_of(row)] = flops + more[0], size + more[1]
    return costs


def _is_raisable(row: Row) -> bool:
    """Whether rules can raise what an equation runs in."""
    return is_low(row) and LOW_SCOPE not in row.scope.split("/")


def _without(kept: Sequence[_Rule], rule: _Rule) -> list[_Rule]:
    return [one for one in kept if one != rule]


# ------------------------------------------------------------------------------- text

_SHOWN = 3
"""How many names one line tells."""


def _largest(error: Error) -> float:
    return error.largest


def _told(error: Error) -> str:
    return f"{error.outputs:.2g} (results), {error.gradients:.2g} (gradients)"


def _cells(error: Error) -> tuple[str, str]:
    return f"{error.largest:.2g}", error.worst


def _names(names: Sequence[str]) -> str:
    """Returns some names; if they are many, those that differ in a number once."""
    alike = list(dict.fromkeys(map(_alike, names)))
    shown = names if len(names) <= _SHOWN else alike
    more = len(shown) - _SHOWN
    names = [name.replace(_NUMBER, "*") for name in shown[:_SHOWN]]
    told = ", ".join(name or "(no scope)" for name in names)
    return told + (f" and {more} more" if more > 0 else "")


def _plain(value: Any) -> Any:
    """Returns a value as JSON knows it, named fields by their names."""
    if isinstance(value, Precision):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Error | Kept | Step):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
