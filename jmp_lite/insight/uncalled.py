"""The functions that tools return: what they print before they are called."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

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
