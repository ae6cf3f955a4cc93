"""Reports on the numbers in a pytree: what is not finite, and what would be lost.

Public names only: they are defined in ``insight/report.py``.
"""

from jmp_lite.insight.report import (
    nonfinite_report,
    numerics_report,
    suggest_loss_scale,
)

__all__ = ["nonfinite_report", "numerics_report", "suggest_loss_scale"]
