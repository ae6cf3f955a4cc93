"""What functions return: explanations, comparisons, reports and summaries.

Public names only: each is defined beside the function that returns it.
"""

from jmp_lite.casting.dtypes import DtypeSummary, DtypeTotals
from jmp_lite.insight.compare.comparison import Comparison, OpError
from jmp_lite.insight.explain.difference import Difference
from jmp_lite.insight.explain.explanation import Explanation
from jmp_lite.insight.explain.lints import Lint
from jmp_lite.insight.explain.rows import Row, Totals
from jmp_lite.insight.report import (
    LeafNumerics,
    NonfiniteReport,
    NumericsReport,
    SuggestedLossScale,
)
from jmp_lite.insight.tune.measure import Error
from jmp_lite.insight.tune.report import Kept, Step, Tuned, TuningReport
from jmp_lite.insight.watch.watch import OpNumerics, WatchedNumerics

__all__ = [
    "Comparison",
    "Difference",
    "DtypeSummary",
    "DtypeTotals",
    "Error",
    "Explanation",
    "Kept",
    "LeafNumerics",
    "Lint",
    "NonfiniteReport",
    "NumericsReport",
    "OpError",
    "OpNumerics",
    "Row",
    "Step",
    "SuggestedLossScale",
    "Totals",
    "Tuned",
    "TuningReport",
    "WatchedNumerics",
]
