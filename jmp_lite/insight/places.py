"""The place of a program inside of another."""

from typing import NamedTuple

from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.types import Eqn


class Place(NamedTuple):
    """The place of a program inside of another.

    Attributes:
      path: the scopes around it.
      source: the line of user code that calls it.
      times: how often it runs; None if unknown.
      is_backward: whether it belongs to a backward pass.
    """

    path: str = ""
    source: str = ""
    times: int | None = 1
    is_backward: bool = False

    def inside(self, eqn: Eqn, trips: int | None) -> "Place":
        """Returns the place of a program that an equation runs."""
        return Place(
            path=source.path_of(eqn, self.path),
            source=source.source(eqn, self.source),
            times=self.times and trips and self.times * trips,
            is_backward=self.is_backward or source.is_transposed(eqn),
        )


TOP = Place()
