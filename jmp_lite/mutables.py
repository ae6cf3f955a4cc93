"""Handles Flax modules: those in place of functions, and those of nnx that change.

A trace changes a copy of an nnx module. This file does not import Flax: if no one has
imported Flax, there are no such modules.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import jax

Args = ParamSpec("Args")
Result = TypeVar("Result")
Tree = TypeVar("Tree")

_CAPTURED = (
    "The function changes an nnx module that is not one of its arguments. Wrap the "
    "function in jmp_lite.nnx.autocast and pass the module as an argument: its "
    "changes are then written back."
)


class Variable(Protocol):
    """A variable of nnx."""

    def update_from_state(self, variable_state: "Variable") -> None:
        """Takes over the value of another variable."""
        ...


def is_module(x: object) -> bool:
    """Whether an object is an nnx object: a module, an optimizer, or ``nnx.Rngs``."""
    return isinstance(x, _flax_kind("nnx", "Pytree"))


def _flax_kind(module: str, name: str) -> Any:
    """Returns a class of Flax; no class if no one has imported Flax."""
    return getattr(sys.modules.get(f"flax.{module}"), name, ())


def flax_class(x: object) -> str | None:
    """Returns which of Flax's APIs an object is a class or a module of, or None.

    A module of nnx can be called, so None is returned for it. A module of linen has no
    variables, so it cannot be called by itself.
    """
    kind = x if isinstance(x, type) else type(x)
    is_class = kind is x
    for api, base, refused in (("linen", "Module", True), ("nnx", "Pytree", is_class)):
        if refused and issubclass(kind, _flax_kind(api, base)):
            return api
    return None


def check_function(fun: object, hint: str = "") -> None:
    """Raises a TypeError, which ends with a hint, if an object is not a function."""
    if api := flax_class(fun):
        name = getattr(fun, "__name__", type(fun).__name__)
        cure = "a module of it, such as model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))"
        if api == "linen":
            cure = "the method that runs it with variables, model.apply"
        raise TypeError(
            f"Expected a function, got {name} of Flax {api}. Pass {cure}, or a "
            "function that calls it."
        )
    if not callable(fun):
        raise TypeError(
            f"Expected a function, got {type(fun).__name__}: {fun!r}.{hint}"
        )


def refuse_modules(found: Iterable[object], place: str, instead: str) -> None:
    """Raises for an nnx object, whose changes a trace would lose.

    Args:
      found: objects.
      place: their role, such as "an argument".
      instead: the name of the function that writes changes back.

    Raises:
      TypeError: one of them is an nnx object.
    """
    for module in filter(is_module, found):
        raise TypeError(
            f"Got an nnx object, a {type(module).__name__}, as {place}. Its changes "
            "(batch statistics, counts of random numbers) would be lost. Use "
            f"{instead} with the object as an argument, which writes its changes back. "
            "Or use nnx.split and a function of the state that returns the new state."
        )


def refusing_modules(
    fun: Callable[Args, Result], instead: str
) -> Callable[Args, Result]:
    """Returns ``fun`` with a check that no argument contains an nnx object.

    Args:
      fun: a function of pytrees.
      instead: as in ``refuse_modules``.
    """

    @functools.wraps(fun)
    def checked(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        given = jax.tree.leaves((args, kwargs), is_leaf=is_module)
        refuse_modules(given, "an argument", instead)
        return fun(*args, **kwargs)

    return checked


def returning_changes(
    fun: Callable[Args, Result],
) -> Callable[Args, tuple[Result, list[Variable | None]]]:
    """Returns ``fun`` with the nnx variables that it changes as an extra result.

    A trace changes copies of nnx variables, such as those in the state of a module.

    Args:
      fun: a function of pytrees.

    Returns:
      A function that returns ``(fun(...), changes)``. For each variable in the
      arguments, in order, ``changes`` holds the variable if it changed, else None.
    """

    @functools.wraps(fun)
    def changing(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Result, list[Variable | None]]:
        variables = _variables_in((args, kwargs))
        before = [jax.tree.flatten(variable) for variable in variables]
        out = fun(*args, **kwargs)
        changes: list[Variable | None] = []
        for variable, (leaves, structure) in zip(variables, before, strict=True):
            new, new_structure = jax.tree.flatten(variable)
            # By identity: a trace has no values to compare.
            is_same = new_structure == structure and all(map(operator.is_, new, leaves))
            changes.append(None if is_same else variable)
        return out, changes

    return changing


def write_changes(
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    changes: Sequence[Variable | None],
) -> None:
    """Writes the changes that ``returning_changes`` found to the original variables."""
    for variable, new in zip(_variables_in((args, kwargs)), changes, strict=True):
        if new is not None:
            variable.update_from_state(new)


def values_in(tree: Tree) -> Tree:
    """Returns a pytree with the present value of each nnx variable in its place."""

    def value(node: Any) -> Any:
        return node.get_value() if _is_variable(node) else node

    return jax.tree.map(value, tree, is_leaf=_is_variable)


def stored_like(value: Any, like: Any) -> Any:
    """Returns a value in a variable of nnx, if another value is in one."""
    return type(like)(value) if _is_variable(like) else value


def _variables_in(tree: object) -> list[Variable]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_variable)
    return list(filter(_is_variable, leaves))


def _is_variable(x: object) -> bool:
    return isinstance(x, _flax_kind("nnx", "Variable"))


@contextlib.contextmanager
def noting_captures() -> Generator[None]:
    """Adds a remedy to Flax's error about a module that a function captures."""
    try:
        yield
    except Exception as error:
        is_meant = isinstance(error, _flax_kind("errors", "TraceContextError"))
        if is_meant and _CAPTURED not in getattr(error, "__notes__", ()):
            error.add_note(_CAPTURED)
        raise
