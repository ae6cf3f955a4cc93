"""Tries rules on a sample: measures the error of each once, and notes the steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from jmp_lite.autocasting.rules.match import AnyPrecision
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.insight.explain.explanation import explain
from jmp_lite.insight.explain.rows import Row
from jmp_lite.insight.tune.candidates import Rule, rules_with
from jmp_lite.insight.tune.measure import WAYS_TO_COMPILE, Error, Sample, in_words
from jmp_lite.insight.tune.report import Step
from jmp_lite.ops import Precision


class Trials:
    """The errors of rules on a sample, each measured once.

    Args:
      sample: the function and its arguments.
      tolerance: the largest tolerated error.
      progress: a function that receives a line at each new measurement, or None.

    Attributes:
      sample: the function and its arguments.
      tolerance: the largest tolerated error.
      steps: the steps so far.
    """

    def __init__(
        self,
        sample: Sample,
        tolerance: float,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.sample, self.tolerance = sample, tolerance
        self.steps: list[Step] = []
        self._progress = progress or (lambda _: None)
        self._errors: dict[Rules, Error] = {}
        self._most = 0
        self._growth: Mapping[tuple[str, str], float] | None = None

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
            for options in WAYS_TO_COMPILE:
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
        if self._growth is None:
            found: dict[tuple[str, str], float] = {}
            for row in self.sample.comparison(rules).rows:
                key = row.scope.replace(_AGAIN, ""), row.op
                found[key] = max(row.error_out - row.error_in, found.get(key, 0.0))
            self._growth = found
        return self._growth

    def rows(self, rules: Rules, kept: Iterable[Rule] = ()) -> Sequence[Row]:
        """Returns how each equation runs under some rules."""
        explained = explain(self.sample.fun, rules_with(rules, kept))
        return explained(*self.sample.args, **self.sample.kwargs).rows


_AGAIN = "rematted_computation/"
