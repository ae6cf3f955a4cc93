"""Which parts of a model are meant: by class, or by a regular expression."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

Selector = Any
"""None for all, a class, a regular expression, or a tuple of which any will do."""


def check_selector(selector: Selector) -> None:
    """Raises where a selector is of another kind, or no regular expression.

    Args:
      selector: None, a class, a regular expression, or a tuple of those.

    Raises:
      TypeError: it is something else.
      ValueError: a text in it is no regular expression.
    """
    for one in selector if isinstance(selector, tuple) else (selector,):
        if isinstance(one, str):
            try:
                re.compile(one)
            except re.error as error:
                raise ValueError(
                    f"Expected a regular expression, got {one!r}: {error}."
                ) from error
        elif one is not None and not isinstance(one, type):
            raise TypeError(
                "Expected a class, a regular expression in a path, or a tuple of such, "
                f"got {type(one).__name__}: {one!r}."
            )


def is_selected(selector: Selector, path: str, item: Any) -> bool:
    """Returns whether a selector means an item at a path.

    Args:
      selector: as ``check_selector`` takes it.
      path: names, joined by slashes; the expression may match any part of it.
      item: what is there.

    Example:
      >>> is_selected("head|router", "decoder/head", object())
      True
      >>> is_selected((int, "^encoder"), "decoder/head", 1.5)
      False
    """
    if selector is None:
        return True
    if isinstance(selector, tuple):
        return any(is_selected(one, path, item) for one in selector)
    if isinstance(selector, str):
        return re.search(selector, path) is not None
    return isinstance(item, selector)


def nothing_selected(selector: Selector, items: Iterable[tuple[str, Any]]) -> str:
    """Returns a message that says what was looked for, and what there is.

    Args:
      selector: what selected nothing.
      items: the paths that there are, and what is at each.
    """
    found = [(path, type(item).__name__) for path, item in items]
    names = list(dict.fromkeys(name for pair in found for name in pair if name))
    wanted = [
        one if isinstance(one, str) else getattr(one, "__name__", str(one))
        for one in (selector if isinstance(selector, tuple) else (selector,))
    ]
    near = [
        match
        for one in wanted
        for match in difflib.get_close_matches(one, names, n=2, cutoff=0.4)
    ]
    nearest = " or ".join(map(repr, dict.fromkeys(near)))
    hint = f" Did you mean {nearest}?" if near else ""
    there = ", ".join(f"{path} ({name})" for path, name in found[:12] if path)
    more = ", ..." if len(found) > 12 else ""
    return f"Nothing is selected by {selector!r}.{hint} There is: {there}{more}."
