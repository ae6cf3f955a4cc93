"""Programs whose gradient in ``mixed`` is worse than in both other ways, and why."""

from collections.abc import Mapping

FLAGGED: Mapping[tuple[str, str], str] = {}
"""(program, dtype) -> the cause."""
