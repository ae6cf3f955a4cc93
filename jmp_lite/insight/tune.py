"""``tune``: finds the rules with the fewest float32 ops for a tolerated error.

The search drops a rule, and returns rules, only if it has measured the remaining rules
and tolerates their error.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import ParamSpec

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.insight.candidates import Rule, Units, rules_with, ways_to_keep
from jmp_lite.insight.explanation import explain
from jmp_lite.insight.gradients import ArgNums, check_argnums
from jmp_lite.insight.measured import Kept, Sample, Tuned, TuningReport, in_words
from jmp_lite.insight.rows import is_decided_inside, times_or_once
from jmp_lite.insight.tables import Uncalled
from jmp_lite.insight.trials import (
    ProductSearch,
    Trials,
    searched_format,
    without_formats,
)
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import PyTree
from jmp_lite.mutables import check_function
from jmp_lite.ops import Precision

Args = ParamSpec("Args")


def print_to_stderr(line: str) -> None:
    """Prints a line beside the results of a program."""
    print(line, file=sys.stderr, flush=True)


def tune(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    tolerance: float,
    compute_dtype: DTypeLike | None = None,
    argnums: ArgNums = None,
    progress: Callable[[str], None] | None = print_to_stderr,
) -> Callable[Args, Tuned]:
    """Returns a function that finds rules with the fewest float32 ops, on a sample.

    The function takes the arguments of ``fun``, the sample, and returns the rules whose
    error on it is tolerated.

    It may raise ops that the given rules run low. It never lowers an op that they do
    not. To search further down, start from ``"O2"`` or ``"O3"``.

    The search starts with everything in float32. It lowers the more expensive half of
    the ops, then the more expensive half of the rest, and so on, as long as it
    tolerates the error. It does this with ops, with blocks and with kinds of layers,
    and returns the rules with the fewest float32 equations. Each trial compiles and
    runs the function and its gradient; after the first one, ``progress`` says how many
    may follow. On the same machine, the search is deterministic.

    From ``"float8"``, it first finds the float32 ops, with all products in 16 bits.
    Then it tries products in float8, the more expensive half first. The other products
    stay in 16 bits. The rules name the scopes of products in float8. A scope cannot be
    named if ``"float8"`` leaves one of its products in 16 bits because only float32 ops
    read it (logits). Its other products are in float8 only if all products of the
    function are. If k of n scopes do not tolerate float8, this takes some k * log2(n)
    more steps.

    The search measures the gradients of a scalar result (or of a scalar at the start of
    a tuple of results), otherwise of a fixed random combination of all results. It does
    not scale the loss. If training does, scale it in ``fun``; otherwise a gradient that
    vanishes in float16 counts as an error. For a function that is used for inference
    only, apply ``jax.lax.stop_gradient`` inside.

    Args:
      fun: a function of pytrees that JAX can trace and differentiate. Each call
        receives the same arguments, so pass random keys as arguments.
      rules: the initial rules: the name of a preset or a ``Rules``.
      tolerance: the largest tolerated relative error of each result and gradient, by
        norms. The reference is float32 with products in the highest precision.
      compute_dtype: a dtype that replaces the compute dtype of the rules.
      argnums: which positional arguments are differentiated, as in ``jax.grad``; None
        for all floating-point arguments.
      progress: a function that receives a line of text at each step; None for none.

    Returns:
      A function with the arguments of ``fun``, which have to be concrete. It returns a
      pair, ``(rules, report)``. The report shows the error that each kept scope or op
      avoids.

    Raises:
      TypeError: ``fun`` or ``progress`` is not a function; the returned function raises
        it for tracers.
      ValueError: the tolerance is not a positive number, or there is no such preset or
        dtype. The returned function raises it if float32 itself exceeds the tolerance;
        if the function is already autocast; or if, on this sample, a float32 result is
        NaN or there is nothing to compare.

    Source: the search is delta debugging (Zeller and Hildebrandt, 2002), which
    Precimonious (Rubio-Gonzalez et al., 2013) brought to floating-point precision.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> def fun(x):
      ...     for name, offset in (("robust", 0), ("sensitive", 300)):
      ...         with jax.named_scope(name):
      ...             x = jnp.tanh((x + offset) @ x - offset * x.sum(0))
      ...     return x @ x
      >>> x = jnp.linspace(-1, 1, 16).reshape(4, 4)
      >>> quiet = lambda line: None
      >>> rules, report = jmp.tune(fun, tolerance=0.02, progress=quiet)(x)
      >>> [(kept.kind, kept.name) for kept in report.kept]
      [('scope', '^sensitive$')]
      >>> rules.compute_dtype
      dtype(bfloat16)
    """
    check_convertible(fun)
    check_argnums(argnums)
    if progress is not None:
        check_function(progress, " Pass print, for example, or None for no lines.")
    chosen, tolerated = choose_rules(rules, compute_dtype), _positive(tolerance)

    def tuned(*args: Args.args, **kwargs: Args.kwargs) -> Tuned:
        sample = Sample(fun, args, kwargs, argnums)
        _check_not_autocast(sample)
        return _run(Trials(sample, tolerated, progress), chosen())

    return Uncalled("tune", fun, tuned, f"tolerance={tolerated}")


def _run(trials: Trials, start: Rules) -> Tuned:
    """Returns the result of a search from initial rules."""
    before = trials.error(start)
    base, kept, left_out = start, list[Rule](), list[Kept]()
    if not trials.is_enough(start):
        precision = searched_format(trials, start)
        from_low = start if precision is None else without_formats(start)
        trials.announce(_most_trials(trials, start, from_low))
        search = _Search(trials, from_low)
        kept = [] if search.is_enough(()) else search.kept()
        if precision is not None:
            products = ProductSearch(trials, start, kept, precision)
            base, left_out = products.found(), products.left_out()
    in_float32 = [Kept(*one, trials.error(base, _without(kept, one))) for one in kept]
    report = TuningReport(
        tolerance=trials.tolerance,
        error=trials.error(base, kept),
        error_before=before,
        kept=(*in_float32, *left_out),
        steps=tuple(trials.steps),
        not_judged=trials.sample.not_judged,
    )
    return Tuned(rules_with(base, kept), report)


def _most_trials(trials: Trials, start: Rules, from_low: Rules) -> int:
    """Returns how many trials a search may take after that of the initial rules.

    Args:
      trials: the measurements.
      start: the initial rules.
      from_low: the same without a number format of fewer digits.
    """
    rows = trials.rows(from_low)
    sizes = [len(units.costs) for units in ways_to_keep(rows, from_low)]
    # Halves of halves are a binary tree over the units, after a start that doubles.
    # Then each rule may be dropped, and is measured once without it.
    in_float32 = sum(2 * n + n.bit_length() + n for n in sizes) + max(sizes) + 4
    if start == from_low:
        return in_float32
    scopes = {row.scope for row in trials.rows(start) if row.op in PRODUCTS}
    # The same tree over the products, each group of them once more, and then the error
    # with those that stay low.
    return in_float32 + 4 * len(scopes) + 2


def _positive(tolerance: object) -> float:
    is_number = isinstance(tolerance, int | float | np.floating | np.integer)
    if not is_number or isinstance(tolerance, bool) or not 0 < tolerance < math.inf:
        raise ValueError(
            "Expected a positive number for tolerance, such as 1e-2, got "
            f"{tolerance!r}."
        )
    return float(tolerance)


def _check_not_autocast(sample: Sample) -> None:
    rows = explain(sample.fun, "O0")(*sample.args, **sample.kwargs).rows
    decided = sum(map(is_decided_inside, rows))
    if decided:
        raise ValueError(
            f"An inner autocast already decides {decided} equations of this function, "
            "so rules do not reach them. Tune the inner function: fun.__wrapped__."
        )


class _Search:
    """The search for the ops that stay in float32.

    Args:
      trials: the measurements.
      start: the initial rules.
    """

    def __init__(self, trials: Trials, start: Rules) -> None:
        self._trials = trials
        self._start = start

    def is_enough(self, kept: Sequence[Rule]) -> bool:
        """Whether the error of the initial rules with some more is tolerated."""
        return self._trials.is_enough(self._start, kept)

    def kept(self) -> list[Rule]:
        """Returns the fewest rules whose error is tolerated."""
        everything = [Rule("scope", "", Precision.FULL)]
        if not self.is_enough(everything):
            error = self._trials.error(self._start, everything)
            raise ValueError(
                f"The tolerance of {self._trials.tolerance:.2g} is out of reach: with "
                f"everything in float32 the error is {in_words(error)}, relative to "
                "products in the highest precision. Two causes remain: (a) marks in "
                "the function (as_low, low_precision, low_call); (b) float32 products "
                "that the device rounds (jax_default_matmul_precision)."
            )
        ways = ways_to_keep(self._trials.rows(self._start), self._start)
        found = [rules for way in ways if (rules := self._smallest(way)) is not None]
        return min(map(self._needed, [*found, everything]), key=self._in_float32)

    def _smallest(self, units: Units) -> list[Rule] | None:
        """Returns rules for the units to keep; None if all units do not suffice."""
        kept = self._suspects(units)
        if kept is None:
            return None

        def lowers(group: Sequence[str]) -> bool:
            fewer = units.rules(kept.difference(group))
            is_tolerated = self._trials.lowers(group, self._start, fewer)
            if is_tolerated:
                kept.difference_update(group)
            return is_tolerated

        units.lower(units.ordered(kept), lowers)
        return units.rules(kept)

    def _suspects(self, units: Units) -> set[str] | None:
        """Returns units that suffice, starting with those in which errors grow most.

        Each trial doubles their number. None if even all units do not suffice.
        """
        ordered = units.by_growth(self._trials.growth(self._start))
        n = 1
        while n < len(ordered) and not self.is_enough(units.rules(ordered[:n])):
            n *= 2
        kept = set(ordered[:n])
        return kept if self.is_enough(units.rules(kept)) else None

    def _needed(self, kept: list[Rule]) -> list[Rule]:
        """Drops rules that are not needed."""
        for rule in list(kept):
            fewer = _without(kept, rule)
            is_less = self._in_float32(fewer) < self._in_float32(kept)
            kept = fewer if is_less and self.is_enough(fewer) else kept
        return kept

    def _in_float32(self, kept: Sequence[Rule]) -> tuple[int, ...]:
        """Returns the amount of float32: equations, then products, then rules."""
        explained = self._trials.rows(self._start, kept)
        rows = [row for row in explained if row.precision == "float32"]
        equations = sum(times_or_once(row.times) for row in rows)
        flops = sum(times_or_once(row.times) * row.flops for row in rows)
        return equations, flops, len(kept)


def _without(kept: Sequence[Rule], rule: Rule) -> list[Rule]:
    return [one for one in kept if one != rule]
