"""Selects parts of a model by class or by a regular expression."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

Selector: TypeAlias = type | str | tuple[type | str | None, ...] | None
"""None for all, a class, a regular expression, or a tuple of these."""


def as_tuple(selector: Any) -> tuple[Any, ...]:
    """Returns the parts of a selector."""
    return selector if isinstance(selector, tuple) else (selector,)


def check_selector(selector: object) -> None:
    """Raises if a selector is not valid.

    Args:
      selector: None, a class, a regular expression, or a tuple of these.

    Raises:
      TypeError: the selector has another type.
      ValueError: a string in it is not a regular expression.
    """
    for one in as_tuple(selector):
        if isinstance(one, str):
            try:
                re.compile(one)
            except re.error as error:
                raise ValueError(
                    f"Expected a regular expression, got {one!r}: {error}."
                ) from error
        elif one is not None and not isinstance(one, type):
            raise TypeError(
                "Expected a class, a regular expression for a path, or a tuple of "
                f"these, got {type(one).__name__}: {one!r}."
            )


def is_selected(selector: Selector, path: str, item: object) -> bool:
    """Returns whether a selector matches an item at a path.

    Args:
      selector: as for ``check_selector``.
      path: names, joined by slashes. A regular expression may match any part of it.
      item: the object at the path.

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


def nothing_selected(selector: Selector, items: Iterable[tuple[str, object]]) -> str:
    """Returns an error message with the nearest names and the valid paths.

    Args:
      selector: the selector that matched nothing.
      items: the valid paths, each with its object.
    """
    found = [(path, type(item).__name__) for path, item in items]
    names = list(dict.fromkeys(name for pair in found for name in pair if name))
    given = [
        one if isinstance(one, str) else getattr(one, "__name__", str(one))
        for one in as_tuple(selector)
    ]
    near = [
        match
        for one in given
        for match in difflib.get_close_matches(one, names, n=2, cutoff=0.4)
    ]
    nearest = " or ".join(map(repr, dict.fromkeys(near)))
    hint = f" Did you mean {nearest}?" if near else ""
    there = ", ".join(f"{path} ({name})" for path, name in found[:12] if path)
    more = ", ..." if len(found) > 12 else ""
    return f"{selector!r} selects nothing.{hint} There is: {there}{more}."
