"""The place of an equation: its scopes, and the line of the user's code."""

import contextlib
import functools
import inspect
import os
import pathlib
import re
import warnings
from collections.abc import Generator
from typing import Any

from jax._src.source_info_util import user_frames
from jax.extend import source_info_util

from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.types import Eqn


def scopes(eqn: Eqn) -> tuple[str, ...]:
    """Returns the names of the scopes of an equation, the outermost first."""
    return _names(eqn.source_info.name_stack.stack)


@functools.lru_cache(maxsize=4096)
def _names(stack: tuple[object, ...]) -> tuple[str, ...]:
    # The stack has the transformations, too: ``jvp``, ``transpose``, ``vmap``.
    return tuple(item.name for item in stack if isinstance(item, _ScopeItem))


def is_transposed(eqn: Eqn) -> bool:
    """Returns whether an equation belongs to a backward pass."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(item, "name", "") == "transpose" for item in stack)


def source(eqn: Eqn, caller: str = "") -> str:
    """Returns the line of an equation in the user's code: file, line, (function).

    Args:
      eqn: the equation.
      caller: the source of the equation that contains it, if there is one. A function
        that a package has wrapped in ``jit``, as most of ``jax.numpy`` is, does not
        know its caller.

    Returns:
      The innermost line of the user's code, else the caller's line, else a line of an
      installed package; an empty string if there is no line.
    """
    own, of_a_package = _sources(eqn.source_info.traceback)
    return own or caller or of_a_package


def line_in_package(eqn: Eqn) -> str:
    """Returns the line of an installed package that the user's line calls, or nothing.

    Its file begins with the package: ``"optax/_src/loss.py:12 (mse)"``.
    """
    _, of_a_package = _sources(eqn.source_info.traceback)
    return _PACKAGES.split(of_a_package)[-1]


@functools.lru_cache(maxsize=4096)
def _sources(traceback: Any) -> tuple[str, str]:
    """Returns the innermost line of the user's code, and that of installed packages."""
    of_a_package = ""
    for frame in user_frames(traceback):
        # Autocast calls the user's function: its own frames are between the user's.
        if frame.file_name.startswith(_THIS_LIBRARY):
            continue
        place = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if not _PACKAGES.search(frame.file_name):
            return place, of_a_package
        of_a_package = of_a_package or place
    return "", of_a_package


_THIS_LIBRARY = os.path.join(pathlib.Path(__file__).parents[1], "")


_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def warn(message: str) -> None:
    """Warns at the line of the user's code that is being run or traced."""
    # ``warnings.warn`` has ``skip_file_prefixes`` since Python 3.12.
    level, frame = 1, inspect.currentframe()
    while frame and not _is_of_user(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_of_user(file: str) -> bool:
    return not (file.startswith(_THIS_LIBRARY) or _PACKAGES.search(file))


# JAX does not export the class.
_ScopeItem = type(source_info_util.new_name_stack("a").stack[0])


def join(*names: str) -> str:
    """Joins names that are not empty to a path."""
    return "/".join(filter(None, names))


def path_of(eqn: Eqn, path: str) -> str:
    """Returns the path of an equation in a jaxpr at a path.

    For a call with a name, it is the path of the equations inside.
    """
    return join(path, *scopes(eqn), params.call_name(eqn))


@contextlib.contextmanager
def context_of(eqn: Eqn) -> Generator[None]:
    """Gives the ops of a block the source line, scopes and settings of an equation."""
    # The stack of an equation is relative to its jaxpr.
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    with (
        source_info_util.user_context(traceback, name_stack=name_stack),
        # ``jax.default_matmul_precision`` and others, as they were where the op was
        # traced.
        eqn.ctx.manager,
    ):
        yield
