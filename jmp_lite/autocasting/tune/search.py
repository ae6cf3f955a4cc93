"""``tune``: the fewest float32 ops for a tolerated error, found on a sample.

A rule is dropped, and rules are returned, only if the remaining rules were measured
themselves, and their error is tolerated.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jmp_lite.autocasting.explain.explanation import explain
from jmp_lite.autocasting.explain.rows import Row, counted, is_decided_inside
from jmp_lite.autocasting.interpreter.validation import check_function, choose_rules
from jmp_lite.autocasting.jaxprs.types import Function
from jmp_lite.autocasting.rules.precision import Precision
from jmp_lite.autocasting.rules.rules import Rules, fields_of
from jmp_lite.autocasting.tune.candidates import (
    Rule,
    Units,
    rules_with,
    ways_to_keep,
)
from jmp_lite.autocasting.tune.float8 import Float8Search, has_float8, without_float8
from jmp_lite.autocasting.tune.measure import Error, Sample, Trials, in_words
from jmp_lite.autocasting.tune.report import Kept, Step, TunedRules, TuningReport


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tune(
    fun: Function,
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

    From ``"float8"``, the same search first finds what is float32, with all products in
    16 bits. Then the dearer half of the products, its dearer half, and so on, is in
    float8 as long as the error is tolerated; the others stay in 16 bits. The rules name
    the scopes of the products in float8. A scope in which ``"float8"`` leaves a product
    in 16 bits because float32 reads it, such as logits, cannot be named: its other
    products are in float8 only if all products of the function are. If k of n scopes
    cannot bear float8, that takes some k * log2(n) more steps.

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
      Rules, with a ``report`` of what each kept scope or op contributes: kept in
      float32, or kept out of float8.

    Raises:
      TypeError: ``args`` is no tuple of concrete arguments.
      ValueError: not even float32 is within the tolerance; the function is autocast
        already; on this sample something is NaN in float32, or nothing is there to
        compare.

    Example:
      >>> import jax
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
    start = Rules(**fields_of(choose_rules(rules, None)()))
    tolerance = _positive(tolerance)
    sample = Sample(fun, args)
    _check_not_autocast(sample)
    return _found(Trials(sample, tolerance, progress), start)


def _found(trials: Trials, start: Rules) -> TunedRules:
    """Returns what a search from some rules finds."""
    before = trials.error(start)
    base, kept, not_float8 = start, list[Rule](), list[Kept]()
    steps: list[Step] = []
    if not trials.is_enough(start):
        asks_for_float8 = has_float8(trials, start)
        search = _Search(trials, without_float8(start) if asks_for_float8 else start)
        kept = [] if search.is_enough(()) else search.kept()
        steps += search.steps
        if asks_for_float8:
            products = Float8Search(trials, start, kept)
            base, not_float8 = products.found(), products.left_out()
            steps += products.steps
    rules = rules_with(base, kept)
    without = (trials.error(rules_with(base, _without(kept, one))) for one in kept)
    in_float32 = [Kept(*one, error) for one, error in zip(kept, without, strict=True)]
    report = TuningReport(
        tolerance=trials.tolerance,
        error=trials.error(rules),
        error_before=before,
        kept=(*in_float32, *not_float8),
        steps=tuple(steps),
        not_judged=trials.sample.not_judged,
    )
    return TunedRules(**fields_of(rules), report=report)


def _positive(tolerance: Any) -> float:
    is_number = isinstance(tolerance, int | float | np.floating | np.integer)
    if not is_number or isinstance(tolerance, bool) or not 0 < tolerance < math.inf:
        raise ValueError(
            f"Expected the tolerance as a positive number, such as 1e-2, got "
            f"{tolerance!r}."
        )
    return float(tolerance)


def _check_not_autocast(sample: Sample) -> None:
    rows = explain(sample.fun, "O0")(*sample.args).rows
    decided = sum(map(is_decided_inside, rows))
    if decided:
        raise ValueError(
            f"An inner autocast has decided {decided} of the function's equations: no "
            "rule changes them, and there is no float32 to compare with. Tune the "
            "function that it was given (fun.__wrapped__)."
        )


class _Search:
    """The search for what has to stay in float32.

    Args:
      trials: what measures.
      start: the rules that it starts from.

    Attributes:
      steps: what was tried to lower.
    """

    def __init__(self, trials: Trials, start: Rules) -> None:
        self.steps: list[Step] = []
        self._trials = trials
        self._start = start

    def error(self, kept: Iterable[Rule]) -> Error:
        """Returns the error of the rules with some more."""
        return self._trials.error(rules_with(self._start, kept))

    def is_enough(self, kept: Iterable[Rule]) -> bool:
        """Whether the error of the rules with some more is tolerated."""
        return self._trials.is_enough(rules_with(self._start, kept))

    def kept(self) -> list[Rule]:
        """Returns the fewest rules that are enough."""
        everything = [Rule("scope", "", Precision.FULL)]
        if not self.is_enough(everything):
            raise ValueError(
                f"The tolerance of {self._trials.tolerance:.2g} is out of reach. "
                f"With all in float32 the error is {in_words(self.error(everything))}, "
                "against products in the highest precision. What stays low is marked "
                "in the function (as_low, low_precision, low_call), or is what the "
                "device makes of float32 products (jax_default_matmul_precision)."
            )
        ways = ways_to_keep(self._explained(()), self._start)
        found = [rules for way in ways if (rules := self._smallest(way)) is not None]
        return min(map(self._weakened, [*found, everything]), key=self._in_float32)

    def _smallest(self, units: Units) -> list[Rule] | None:
        """Returns rules for the units that have to be kept; None if all are too few."""
        kept = self._suspects(units)
        if kept is None:
            return None
        queue = [units.ordered(kept)]
        while queue:
            group = queue.pop()
            fewer = kept - set(group)
            if self._tried(group, units.rules(fewer)):
                kept = fewer
            elif len(group) > 1:
                queue += reversed(units.parts(group))
        return units.rules(kept)

    def _suspects(self, units: Units) -> set[str] | None:
        """Returns units that are enough: those in which errors grow most, first.

        Twice as many are tried each time. None if all units are too few.
        """
        ordered = units.by_growth(self._trials.growth(self._start))
        n = 1
        while n < len(ordered) and not self.is_enough(units.rules(ordered[:n])):
            n *= 2
        kept = set(ordered[:n])
        return kept if self.is_enough(units.rules(kept)) else None

    def _weakened(self, kept: list[Rule]) -> list[Rule]:
        """Drops what is not needed after all, and keeps the rest inside alone."""
        for rule in list(kept):
            weaker = [_without(kept, rule)]
            if rule.kind == "scope":
                inside = rule._replace(precision=Precision.FULL_INSIDE)
                weaker.append([inside if one == rule else one for one in kept])
            fits = (w for w in weaker if self._in_float32(w) < self._in_float32(kept))
            kept = next(filter(self.is_enough, fits), kept)
        return kept

    def _tried(self, group: Sequence[str], kept: Sequence[Rule]) -> bool:
        step = Step(tuple(group), self.error(kept), self.is_enough(kept))
        self.steps.append(step)
        return step.is_tolerated

    def _explained(self, kept: Iterable[Rule]) -> Sequence[Row]:
        return self._trials.rows(rules_with(self._start, kept))

    def _in_float32(self, kept: Sequence[Rule]) -> tuple[int, ...]:
        """Returns how much runs in float32: equations, then products, then rules."""
        rows = [r for r in self._explained(kept) if r.precision == "float32"]
        equations = sum(counted(row.times) for row in rows)
        flops = sum(counted(row.times) * row.flops for row in rows)
        return equations, flops, len(kept)


def _without(kept: Sequence[Rule], rule: Rule) -> list[Rule]:
    return [one for one in kept if one != rule]
