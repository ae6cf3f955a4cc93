"""Functions of nnx modules as functions of states, whose changes are written back.

A module is split into its state and merged inside of the trace. Its changes are written
back to the original object, as in ``nnx.jit``. Modules are traversed as graphs, in
Flax's tree mode too, because parts of a model may share variables.
"""

import contextlib
import functools
from collections.abc import Generator
from typing import Any

import jax
from flax import nnx

from jmp_lite.autocasting.rules.presets import check_convertible
from jmp_lite.casting.types import Leaf
from jmp_lite.flax.nnx_scopes import add_scopes, is_mutable, remove_scopes
from jmp_lite.jaxprs.types import Function, PyTree


class FunctionOfStates:
    """A function of modules as a function of their states.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.

    Attributes:
      fun: the function, with the module of a method as its first argument.
      of_states: the function of ``states(args, kwargs)``. It returns the results, and
        the states after the call.

    Raises:
      TypeError: ``fun`` is not a function.
    """

    def __init__(self, fun: Function) -> None:
        check_convertible(fun)
        self.fun, *self._bound = _unbind(fun)

        def of_states(states: PyTree) -> PyTree:
            return self._run(states)

        # For messages. No more of it, so that no one takes it for a wrapped function.
        of_states.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        self.of_states = of_states

    @contextlib.contextmanager
    def states(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[tuple[tuple[PyTree, ...], dict[str, PyTree]]]:
        """Enters a context with the states of positional and of keyword arguments."""
        with nnx.update_context(self):
            yield nnx.to_tree(((*self._bound, *args), kwargs), ctxtag=self)

    def _run(self, states: PyTree) -> PyTree:
        args, kwargs = nnx.from_tree(states, ctxtag=self, is_inner=True)
        depth = add_scopes((args, kwargs))
        out = self.fun(*args, **kwargs)
        inputs = jax.tree.map(_keep_mutable, (args, kwargs), is_leaf=is_mutable)
        remove_scopes((inputs, out), depth)
        return nnx.to_tree((out, inputs), ctxtag=self)

    def write_back(self, after: PyTree) -> PyTree:
        """Writes states to the modules, in the context, and returns the results.

        Args:
          after: what ``of_states`` returns.
        """
        out, _ = nnx.from_tree(after, ctxtag=self, is_inner=False)
        return out


def _unbind(fun: Function) -> tuple[Function] | tuple[Function, nnx.Pytree]:
    """Returns a function and, for a module or a bound method, the module."""
    owner = fun if isinstance(fun, nnx.Pytree) else getattr(fun, "__self__", None)
    if not isinstance(owner, nnx.Pytree):
        return (fun,)
    method = type(owner).__call__ if fun is owner else fun

    # By name: inside of the trace the module may have another class.
    @functools.wraps(method)
    def call(owner: nnx.Pytree, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, method.__name__)(*args, **kwargs)

    return call, owner


def _keep_mutable(leaf: Leaf) -> nnx.Pytree | nnx.Variable[PyTree] | None:
    return leaf if is_mutable(leaf) else None
