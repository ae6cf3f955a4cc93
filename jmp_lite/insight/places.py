"""The places of equations and programs, and how they are shown."""

import re
import sys
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

    def enter(self, eqn: Eqn, trips: int | None) -> "Place":
        """Returns the place of a program that an equation runs."""
        return Place(
            path=source.path_of(eqn, self.path),
            source=source.source(eqn, self.source),
            times=self.times and trips and self.times * trips,
            is_backward=self.is_backward or source.is_transposed(eqn),
        )


TOP = Place()


def short(source: str) -> str:
    """Returns the file and the line of a source, such as ``"model.py:12"``.

    In a notebook it is the number of the cell and the line, such as ``"In[3]:12"``.
    """
    file, colon, line = source.rpartition(" ")[0].rpartition(":")
    return f"{_cell(file) or file.rpartition('/')[-1]}{colon}{line}"


def _cell(file: str) -> str:
    """Returns the name of the notebook cell that a file holds; else nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    label_and_name = cell_of and cell_of(file)
    if label_and_name:
        return label_and_name[1]
    # IPython before version 8 has no such function, but numbers the files.
    numbered = re.search(r"ipython-input-(\d+)-", file)
    return f"In[{numbered[1]}]" if numbered else ""
