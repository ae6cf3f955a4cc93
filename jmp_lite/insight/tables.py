"""What reports share: text tables, places in a program, and results before a call."""

import functools
import html
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from jmp_lite.jaxprs import source
from jmp_lite.jaxprs.types import Eqn

RowGroups = Sequence[tuple[str, Sequence[Sequence[str]]]]
"""Rows of cells, in groups with a title."""


def text_table(
    headers: Sequence[str], groups: RowGroups, right: Sequence[int] = ()
) -> str:
    """Returns a table as text with aligned columns.

    Args:
      headers: the titles of the columns.
      groups: pairs of a title (which may be empty) and the rows after it.
      right: the columns that are aligned to the right.
    """
    groups = [
        (_join_lines(title), [[*map(_join_lines, row)] for row in group])
        for title, group in groups
    ]
    rows = [row for _, group in groups for row in group]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(["", *padded]).rstrip()

    lines = [line(headers)]
    for title, group in groups:
        lines += [title] if title else []
        lines += map(line, group)
    return "\n".join(lines)


def _join_lines(text: str) -> str:
    return " ".join(text.splitlines())


def html_table(headers: Sequence[str], groups: RowGroups) -> str:
    """Returns a table as HTML."""

    def row(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    lines = ["<table>", row(headers, "th")]
    for title, group in groups:
        if title:
            span = f'<tr><th colspan="{len(headers)}">{html.escape(title)}</th></tr>'
            lines.append(span)
        lines += [row(cells, "td") for cells in group]
    return "\n".join([*lines, "</table>"])


def count(number: float) -> str:
    """Returns a number of bytes or operations, abbreviated: ``"1.5 M"``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} "


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


Args = ParamSpec("Args")
Result = TypeVar("Result")


class Uncalled(Generic[Args, Result]):
    """A function that a tool returns; it prints what it is, and how to call it.

    Args:
      tool: the name of the tool.
      fun: the user's function, whose name and signature it has.
      call: the function that runs the tool.
      options: arguments that the tool needs beside the function, as code.

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.explain(lambda x: x @ x)
      <explain of <lambda>: call it with arguments, explain(<lambda>)(x)>
    """

    def __init__(
        self,
        tool: str,
        fun: Callable[..., Any],
        call: Callable[Args, Result],
        options: str = "",
    ) -> None:
        functools.update_wrapper(self, fun)
        self._tool, self._call, self._options = tool, call, options

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """Runs the tool."""
        return self._call(*args, **kwargs)

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Result]:
        """Binds a method, as a function does."""
        return self if owner is None else types.MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        """Explains an attribute of the result that is looked for before the call."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self!r} has no attribute {name!r} before the call.")

    def __repr__(self) -> str:
        name = getattr(self, "__name__", "a function")
        try:
            named = ", ".join(inspect.signature(self).parameters)
        except ValueError:  # Written in C.
            named = "..."
        given = ", ".join(filter(None, (name, self._options)))
        call = f"{self._tool}({given})({named})"
        return f"<{self._tool} of {name}: call it with arguments, {call}>"
