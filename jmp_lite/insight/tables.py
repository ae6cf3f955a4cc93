"""Formats tables for a terminal and for a notebook."""

import html
from collections.abc import Sequence

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
