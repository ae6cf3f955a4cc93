"""Counts the numbers of several arrays at once, when the first count is read."""

from typing import Any

import numpy as np

from jmp_lite.insight.statistics import counted_together


class Counter:
    """Counts the numbers of arrays: all arrays added since the last count together.

    Args:
      dtype: the dtype that shares are given for.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._added: list[Counted] = []

    def add(self, array: Any) -> "Counted":
        """Adds an array; its counts are computed when they are read."""
        counted = Counted(array, self)
        self._added.append(counted)
        return counted

    def count(self) -> None:
        """Counts the arrays that have been added."""
        each = counted_together([x.array for x in self._added], self._dtype)
        for one, counts in zip(self._added, each, strict=True):
            one.known = counts
        self._added.clear()


class Counted:
    """The numbers of an array.

    Args:
      array: the array.
      counter: the counter that it was added to.
    """

    def __init__(self, array: Any, counter: Counter) -> None:
        self.array = array
        self.known: dict[str, Any] | None = None
        self._counter = counter

    @property
    def counts(self) -> dict[str, Any]:
        """The counts."""
        if self.known is None:
            self._counter.count()
        assert self.known is not None
        return self.known
