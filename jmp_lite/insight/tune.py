"""``tune``: finds the rules with the fewest float32 ops for a tolerated error.

The search drops a rule, and returns rules, only if it has measured the remaining rules
and tolerates their error.
"""

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.match import AnyPrecision, in_json_or_name, name_of
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules, Scope, requested_formats
from jmp_lite.insight import candidates, measured
from jmp_lite.insight.backward import ArgNums, check_argnums
from jmp_lite.insight.candidates import Rule, Units, is_searched, rules_with
from jmp_lite.insight.explanation import explain
from jmp_lite.insight.measured import Error, Kept, Sample, Step, Tuned, in_words
from jmp_lite.insight.rows import Row, is_decided_inside, times_or_once
from jmp_lite.insight.tables import Uncalled
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
    chosen = choose_rules(rules, compute_dtype)
    is_number = isinstance(tolerance, int | float | np.floating | np.integer)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or isinstance(tolerance, bool) or not 0 < tolerance < math.inf:
        raise ValueError(
            "Expected a positive number for tolerance, such as 1e-2, got "
            f"{tolerance!r}."
        )
    tolerated = float(tolerance)

    def tuned(*args: Args.args, **kwargs: Args.kwargs) -> Tuned:
        sample = Sample(fun, args, kwargs, argnums)
        rows = explain(fun, "O0")(*args, **kwargs).rows
        if n_decided := sum(map(is_decided_inside, rows)):
            raise ValueError(
                f"An inner autocast already decides {n_decided} equations of this "
                "function, so rules do not reach them. Tune the inner function: "
                "fun.__wrapped__."
            )
        return _run(_Trials(sample, tolerated, progress), chosen())

    return Uncalled("tune", fun, tuned, f"tolerance={tolerated}")


class _Trials:
    """The errors of rules on a sample, each measured once, and the steps so far."""

    def __init__(
        self, sample: Sample, tolerance: float, progress: Callable[[str], None] | None
    ) -> None:
        self.sample, self.tolerance = sample, tolerance
        self.steps: list[Step] = []
        self._progress = progress or (lambda _: None)
        self._errors: dict[Rules, Error] = {}
        self._most = 0

    def announce(self, n_more: int) -> None:
        """Reports how many trials may follow."""
        self._most = len(self._errors) + n_more
        self._progress(
            f"tune: at most {n_more} trials follow; each compiles and runs the "
            "function and its gradient"
        )

    def error(self, rules: Rules, kept: Iterable[Rule] = ()) -> Error:
        """Returns the error under some rules, with more rules for float32."""
        rules = rules_with(rules, kept)
        if rules not in self._errors:
            error = Error(0.0, 0.0, "")
            for options in measured.WAYS_TO_COMPILE:
                error = error.joined(self.sample.error(rules, options))
                if error.largest > self.tolerance:
                    break
            self._errors[rules] = error
            most = f" of at most {self._most}" if self._most else ""
            n = len(self._errors)
            self._progress(f"tune: {n}{most} tried, error {in_words(error)}")
        return self._errors[rules]

    def is_enough(self, rules: Rules, kept: Iterable[Rule] = ()) -> bool:
        """Whether the error under some rules is tolerated."""
        return self.error(rules, kept).largest <= self.tolerance

    def lowers(
        self,
        group: Sequence[str],
        rules: Rules,
        kept: Sequence[Rule],
        precision: AnyPrecision = Precision.LOW,
    ) -> bool:
        """Notes a step that lowers some units; returns whether it is tolerated."""
        error, is_tolerated = self.error(rules, kept), self.is_enough(rules, kept)
        self.steps.append(Step(tuple(group), error, is_tolerated, precision))
        return is_tolerated

    def growth(self, rules: Rules) -> Mapping[tuple[str, str], float]:
        """Returns the growth of errors under some rules, by scope and op.

        The scope of a recomputed op is that of its first computation.
        """
        found: dict[tuple[str, str], float] = {}
        for row in self.sample.comparison(rules).rows:
            key = row.scope.replace("rematted_computation/", ""), row.op
            found[key] = max(row.error_out - row.error_in, found.get(key, 0.0))
        return found

    def rows(self, rules: Rules, kept: Iterable[Rule] = ()) -> Sequence[Row]:
        """Returns how each equation runs under some rules."""
        explained = explain(self.sample.fun, rules_with(rules, kept))
        return explained(*self.sample.args, **self.sample.kwargs).rows


def _run(trials: _Trials, start: Rules) -> Tuned:
    """Returns the result of a search from initial rules."""
    before = trials.error(start)
    base, kept, left_out = start, list[Rule](), list[Kept]()
    if not trials.is_enough(start):
        precision = _searched_format(trials, start)
        from_low = start if precision is None else candidates.without_formats(start)
        trials.announce(_most_trials(trials, start, from_low))
        is_enough = trials.is_enough(from_low)
        kept = [] if is_enough else _Search(trials, from_low).kept()
        if precision is not None:
            products = _ProductSearch(trials, start, kept, precision)
            base, left_out = products.found(), products.left_out()
    in_float32 = [Kept(*one, trials.error(base, _without(kept, one))) for one in kept]
    report = measured.TuningReport(
        tolerance=trials.tolerance,
        error=trials.error(base, kept),
        error_before=before,
        kept=(*in_float32, *left_out),
        steps=tuple(trials.steps),
        not_judged=trials.sample.not_judged,
    )
    return Tuned(rules_with(base, kept), report)


def _most_trials(trials: _Trials, start: Rules, from_low: Rules) -> int:
    """Returns how many trials a search may take after that of the initial rules.

    ``from_low`` are these without a number format of fewer digits.
    """
    rows = trials.rows(from_low)
    sizes = [len(units.costs) for units in candidates.ways_to_keep(rows, from_low)]
    # Halves of halves are a binary tree over the units, after a start that doubles.
    # Then each rule may be dropped, and is measured once without it.
    in_float32 = sum(2 * n + n.bit_length() + n for n in sizes) + max(sizes) + 4
    if start == from_low:
        return in_float32
    scopes = {row.scope for row in trials.rows(start) if row.op in PRODUCTS}
    # The same tree over the products, each group of them once more, and then the error
    # with those that stay low.
    return in_float32 + 4 * len(scopes) + 2


class _Search:
    """The search for the ops that stay in float32, beside some initial rules."""

    def __init__(self, trials: _Trials, start: Rules) -> None:
        self._trials, self._start = trials, start

    def _is_enough(self, kept: Sequence[Rule]) -> bool:
        return self._trials.is_enough(self._start, kept)

    def kept(self) -> list[Rule]:
        """Returns the fewest rules whose error is tolerated."""
        everything = [Rule("scope", "", Precision.FULL)]
        if not self._is_enough(everything):
            error = self._trials.error(self._start, everything)
            raise ValueError(
                f"The tolerance of {self._trials.tolerance:.2g} is out of reach: with "
                f"everything in float32 the error is {in_words(error)}, relative to "
                "products in the highest precision. Two causes remain: (a) marks in "
                "the function (as_low, low_precision, low_call); (b) float32 products "
                "that the device rounds (jax_default_matmul_precision)."
            )
        growth = self._trials.growth(self._start)
        found: list[list[Rule]] = []
        for way in candidates.ways_to_keep(self._trials.rows(self._start), self._start):
            kept = self._suspects(way, growth)
            if self._is_enough(way.rules(kept)):
                found.append(self._smallest(way, kept))
        return min(map(self._needed, [*found, everything]), key=self._in_float32)

    def _smallest(self, units: Units, kept: set[str]) -> list[Rule]:
        """Returns rules for the units to keep among some that suffice."""

        def lowers(group: Sequence[str]) -> bool:
            fewer = units.rules(kept.difference(group))
            is_tolerated = self._trials.lowers(group, self._start, fewer)
            if is_tolerated:
                kept.difference_update(group)
            return is_tolerated

        units.lower(units.ordered(kept), lowers)
        return units.rules(kept)

    def _suspects(
        self, units: Units, growth: Mapping[tuple[str, str], float]
    ) -> set[str]:
        """Returns units that suffice, starting with those in which errors grow most.

        Each trial doubles their number, up to all units.
        """
        ordered = units.by_growth(growth)
        n = 1
        while n < len(ordered) and not self._is_enough(units.rules(ordered[:n])):
            n *= 2
        return set(ordered[:n])

    def _needed(self, kept: list[Rule]) -> list[Rule]:
        """Drops rules that are not needed."""
        for rule in list(kept):
            fewer = _without(kept, rule)
            is_less = self._in_float32(fewer) < self._in_float32(kept)
            kept = fewer if is_less and self._is_enough(fewer) else kept
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


def _searched_format(trials: _Trials, rules: Rules) -> AnyPrecision | None:
    """Returns the number format that rules request; None if no product has it."""
    requested = list(filter(is_searched, requested_formats(rules)))
    if len(requested) > 1:
        names = ", ".join(str(in_json_or_name(one)) for one in requested)
        raise ValueError(
            "tune searches for the products of one number format at a time, and the "
            f"rules request {names}. Leave all but one out of the rules."
        )
    rows = trials.rows(rules) if requested else ()
    return next((one for one in requested if any(_products_in(one, rows))), None)


def _products_in(precision: AnyPrecision, rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.number_format == name_of(precision)]


class _ProductSearch:
    """The search for the products that tolerate a number format.

    With the rules for float32 (``kept``), and without the format, the error is
    tolerated.
    """

    def __init__(
        self, trials: _Trials, start: Rules, kept: list[Rule], precision: AnyPrecision
    ) -> None:
        self._trials, self._start = trials, start
        self._kept, self._precision = kept, precision
        rows = self._products(start)
        self._ops = sorted({row.op for row in rows})
        asked = Counter(row.scope for row in rows)
        by_name = self._rules_with_scopes([("", precision)])
        named = Counter(row.scope for row in self._products(by_name))
        others = [s for s in {**asked, **named} if asked[s] != named[s]]
        self._units = candidates.scopes_of_products(rows, precision, others)
        self._has_names = all(scope in self._units.costs for scope in asked)
        self._given: set[str] = set()

    def found(self) -> Rules:
        """Returns rules with most products in the format."""
        if not self._units.costs and self._has_names:
            # The kept rules include all products.
            return candidates.without_formats(self._start)
        if self._lowers(self._ops, self._start):
            self._given, self._has_names = set(self._units.costs), True
            return self._start
        if self._units.costs:
            self._units.lower(list(self._units.costs), self._gave)
        # A group may be tolerated now, although it was not before.
        for group in self._left_out().values():
            rules = self._rules({*self._given, *group})
            if self._trials.is_enough(rules, self._kept):
                self._gave(group)
        return self._rules(self._given)

    def left_out(self) -> list[Kept]:
        """Returns the products without the format, with the errors if they had it."""
        left = [
            ("scope", pattern, self._rules({*self._given, *group}))
            for pattern, group in self._left_out().items()
        ]
        left += [("op", op, self._start) for op in self._ops if not self._has_names]
        return [
            Kept(kind, name, Precision.LOW, self._trials.error(rules, self._kept))
            for kind, name, rules in left
        ]

    def _left_out(self) -> dict[str, list[str]]:
        """Returns the scopes without the format, by their patterns."""
        left = [scope for scope in self._units.costs if scope not in self._given]
        patterns = [rule.name for rule in self._units.rules(left)]
        return {pattern: self._units.matched(pattern) for pattern in patterns}

    def _gave(self, group: Sequence[str]) -> bool:
        """Gives the products of some scopes the format if the error is tolerated."""
        more = {*self._given, *group}
        is_tolerated = self._lowers(group, self._rules(more))
        if is_tolerated:
            self._given = more
        return is_tolerated

    def _lowers(self, group: Sequence[str], rules: Rules) -> bool:
        return self._trials.lowers(group, rules, self._kept, self._precision)

    def _products(self, rules: Rules) -> list[Row]:
        """Returns the products that have the format under some rules."""
        return _products_in(self._precision, self._trials.rows(rules, self._kept))

    def _rules(self, given: Collection[str]) -> Rules:
        """Returns rules that give the products of these scopes the format."""
        if self._has_names and len(given) == len(self._units.costs):
            return self._start
        rules = self._units.rules(given)
        return self._rules_with_scopes([(one.name, one.precision) for one in rules])

    def _rules_with_scopes(self, scopes: Sequence[Scope]) -> Rules:
        """Returns rules that request the format in these scopes only.

        The scopes take the place of the first scope that does, or follow the user's
        scopes.
        """
        found = [is_searched(precision) for _, precision in self._start.scopes]
        before = found.index(True) if True in found else len(found)
        rules = candidates.without_formats(self._start)
        placed = (*rules.scopes[:before], *scopes, *rules.scopes[before:])
        return dataclasses.replace(rules, scopes=placed)
