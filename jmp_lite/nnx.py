"""Flax nnx under autocast: its modules change, and their changes are kept.

The law of this file: a module goes in as its state, is put together inside, and what
became of it is written back to the very object outside, as ``nnx.jit`` does it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
from flax import errors, nnx
from jax.typing import DTypeLike

from jmp_lite.autocasting import door, interpreter
from jmp_lite.autocasting.explain import Explanation
from jmp_lite.autocasting.explain import explain as core_explain
from jmp_lite.autocasting.rules import Rules

_SCOPE = "_jmp_lite_scope"


def autocast(
    fun: Callable[..., Any] | None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Any:
    """Returns ``fun`` run op by op in mixed precision, where nnx modules are arguments.

    As ``jmp_lite.autocast``. What ``fun`` changes in a module that it is given (batch
    statistics, counts of random numbers, caches) is changed in that module, in float32.
    The path of each module is the scope of its ops: ``"Net/blocks/0/norm/LayerNorm"``
    is a module ``net.blocks[0].norm`` of the class ``LayerNorm``, called by those that
    it is in.

    Args:
      fun: a function of pytrees and modules, a module, or a method of one.
      rules: a preset's name or a ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own.

    Returns:
      The function; without ``fun`` a decorator.

    Raises:
      ValueError: there is no such preset or dtype.
      flax.errors.TraceContextError: ``fun`` changes a module that is no argument of it.

    Example:
      >>> import jax.numpy as jnp
      >>> model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      >>> autocast(model)(jnp.ones((2, 4))).dtype
      dtype('float32')
      >>> bool(abs(model.mean[0] - 0.01) < 1e-6)  # 0.99 * 0 + 0.01 * 1
      True
    """
    if fun is None:
        return functools.partial(autocast, rules=rules, compute_dtype=compute_dtype)
    door.check_function(fun)
    chosen = door.choose_rules(rules, compute_dtype)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)

    @functools.wraps(called)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(lifted):
            states = nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted)
            after = interpreter.autocast(lifted, chosen())(states)
            _, out = nnx.from_tree(after, ctxtag=lifted, is_inner=False)
        return out

    return autocast_fun


def explain(
    fun: Callable[..., Any],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[..., Explanation]:
    """Returns a function that tells what ``autocast(fun, rules)`` does.

    As ``jmp_lite.explain``. It runs nothing, and changes nothing in a module.

    Args:
      fun: a function of pytrees and modules, a module, or a method of one.
      rules: a preset's name or a ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own.

    Returns:
      A function of ``fun``'s arguments that returns an ``Explanation``.

    Raises:
      ValueError: there is no such preset or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> dot, *_ = explain(model)(jnp.ones((2, 4))).rows
      >>> dot.scope, dot.op, dot.precision
      ('Linear', 'dot_general', 'bfloat16')
    """
    door.check_function(fun)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)
    told = core_explain(lifted, rules, compute_dtype=compute_dtype)

    @functools.wraps(called)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with nnx.update_context(lifted):
            return told(nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted))

    return explained


def _of_states(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fun`` from the states of its arguments to theirs and its result's."""

    def of_states(states: Any) -> Any:
        args, kwargs = nnx.from_tree(states, ctxtag=of_states, is_inner=True)
        depth = _scope((args, kwargs))
        try:
            out = fun(*args, **kwargs)
        except errors.TraceContextError as error:
            error.add_note(
                "jmp_lite.nnx.autocast: a module that the function changes has to be "
                "one of its arguments."
            )
            raise
        inputs = jax.tree.map(_if_mutable, (args, kwargs), is_leaf=_is_mutable)
        _unscope((inputs, out), depth)
        return nnx.to_tree((inputs, out), ctxtag=of_states)

    return of_states


def _unbound(fun: Any) -> tuple[Any, ...]:
    """Returns a function and, if it is a module or a method of one, the module."""
    owner = fun if isinstance(fun, nnx.Pytree) else getattr(fun, "__self__", None)
    if not isinstance(owner, nnx.Pytree):
        return (fun,)
    method = type(owner).__call__ if fun is owner else fun

    # By its name, so that it is found in whatever class the module has inside.
    @functools.wraps(method)
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, method.__name__)(*args, **kwargs)

    return call, owner


def _is_mutable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree | nnx.Variable)


def _if_mutable(leaf: Any) -> Any:
    return leaf if _is_mutable(leaf) else None


# --------------------------------------------------------------------------- scopes


def _scope(tree: Any) -> int:
    """Has each module of a pytree call its ops in the scope of its path.

    Returns:
      A number for ``_unscope``: modules that have scopes already keep them.
    """
    modules = [inner for module in _modules(tree) for _, inner in _iter_modules(module)]
    depth = 1 + max((getattr(m, _SCOPE, (0,))[0] for m in modules), default=0)
    for module in _modules(tree):
        paths = {path: m for path, m in _iter_modules(module) if callable(m)}
        for path, inner in paths.items():
            if hasattr(inner, _SCOPE):
                continue
            parents = (path[:n] for n in reversed(range(len(path))))
            parent = next((p for p in parents if p in paths), ())
            # What holds no other module adds its class, such as LayerNorm.
            is_leaf = all(m is inner for _, m in _iter_modules(inner))
            name = (type(inner).__name__,) if is_leaf or not path else ()
            scope = "/".join(map(str, (*path[len(parent) :], *name)))
            setattr(inner, _SCOPE, (depth, scope))
            inner.__class__ = _scoped_class(type(inner))
    return depth


def _unscope(tree: Any, depth: int) -> None:
    """Gives all modules that ``_scope`` has changed their own class back."""
    for module in _modules(tree):
        for _, inner in _iter_modules(module):
            if getattr(inner, _SCOPE, (None,))[0] == depth:
                inner.__class__ = type(inner).__base__
                delattr(inner, _SCOPE)


def _modules(tree: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_mutable)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _iter_modules(module: Any) -> list[tuple[Any, Any]]:
    """Returns a module and all that it holds, each with its path."""
    return list(nnx.iter_modules(module))


@functools.cache
def _scoped_class(cls: type) -> type:
    """Returns a subclass that is called in the scope that its instance names."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(getattr(self, _SCOPE)[1]):
            return cls.__call__(self, *args, **kwargs)

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(__call__=call)
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__)

    return types.new_class(cls.__name__, (cls,), exec_body=body)
