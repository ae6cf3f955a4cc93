"""What functions return: explanations, comparisons, reports and summaries.

Public names only: each is defined beside the function that returns it.
"""

from jmp_lite.casting.dtypes import DtypeSummary, DtypeTotals
from jmp_lite.insight.comparison import Comparison, OpError
from jmp_lite.insight.explanation import Explanation
from jmp_lite.insight.lints import Lint
from jmp_lite.insight.measured import Error, Kept, Step, Tuned, TuningReport
from jmp_lite.insight.report import (
    LeafNumerics,
    NonfiniteReport,
    NumericsReport,
    SuggestedLossScale,
)
from jmp_lite.insight.rows import Row
from jmp_lite.insight.summaries import Difference, Totals
from jmp_lite.insight.watch import OpNumerics, WatchedNumerics

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
