"""Modules of nnx that run their parts in scopes named by their paths.

The scope stands in the class that a module has for the time of a call, never in its
attributes: some modules forbid unknown ones, and ``nnx.bridge.ToNNX`` takes each for a
variable.
"""

import functools
import types
from typing import Any, TypeGuard, TypeVar

import jax
from flax import nnx

from jmp_lite.casting.types import Leaf, Path, PyTree

Model = TypeVar("Model", bound=nnx.Module)
_DEPTH = "_jmp_lite_depth"


def scoped(model: Model) -> Model:
    """Returns a view of a module whose parts run in scopes named by their paths.

    ``jmp_lite.nnx.autocast`` adds these scopes itself. Use ``scoped`` for other readers
    of scopes: ``jmp_lite.autocast`` of a function of the module's state, or a profiler.
    The view shares the variables of the module and has the same state. Each part is an
    instance of its original class.

    Args:
      model: a module.

    Returns:
      The view.

    Raises:
      TypeError: ``model`` is not an nnx module.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
      >>> graphdef, state = nnx.split(jmp.nnx.scoped(model))
      >>> apply = lambda state, x: nnx.merge(graphdef, state)(x)
      >>> row = jmp.explain(apply)(state, jnp.ones((1, 4))).rows[0]
      >>> row.scope, row.precision
      ('Sequential/layers/0/Linear', 'bfloat16')
    """
    check_model(model)
    view = nnx.clone(model, variables=False, graph=True)
    add_scopes(view)
    return view


def add_scopes(tree: PyTree) -> int:
    """Makes each module of a pytree call its ops in the scope of its path.

    Returns:
      A number for ``remove_scopes``. Modules that already have scopes keep them.
    """
    modules = [inner for module in _modules(tree) for _, inner in modules_of(module)]
    depth = 1 + max((_depth(inner) for inner in modules), default=0)
    for module in _modules(tree):
        inside = modules_of(module)
        paths = {p: m for p, m in inside if callable(m) and _has_subclasses(type(m))}
        for path, inner in paths.items():
            if _depth(inner):
                continue
            parents = (path[:n] for n in reversed(range(len(path))))
            parent = next((p for p in parents if p in paths), ())
            # A module without submodules adds its class, such as LayerNorm.
            is_leaf = all(m is inner for _, m in modules_of(inner))
            name = (type(inner).__name__,) if is_leaf or not path else ()
            scope = "/".join(map(str, (*path[len(parent) :], *name)))
            _become(inner, _scoped_class(type(inner), scope, depth))
    return depth


def remove_scopes(tree: PyTree, depth: int) -> None:
    """Restores the class of all modules that ``add_scopes`` has changed."""
    for module in _modules(tree):
        for _, inner in modules_of(module):
            if _depth(inner) == depth:
                _become(inner, type(inner).__base__)


def _depth(module: nnx.Module) -> int:
    """Returns the depth at which a module has got its scope; 0 for a module without."""
    return getattr(type(module), _DEPTH, 0)


def _become(module: nnx.Module, cls: type | None) -> None:
    # Without nnx, which would list `__class__` among the module's attributes. The
    # module would then be a new one for `nnx.jit`, which would compile it again.
    object.__setattr__(module, "__class__", cls)


def _modules(tree: PyTree) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=is_mutable)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def modules_of(module: nnx.Module) -> list[tuple[Path, nnx.Module]]:
    """Returns a module and its submodules, each with its path."""
    return list(nnx.iter_modules(module, graph=True))


@functools.cache
def _scoped_class(cls: type, scope: str, depth: int) -> type:
    """Returns a subclass whose instances run their calls in a scope."""

    @functools.wraps(cls.__call__)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return cls.__call__(self, *args, **kwargs)

    def body(namespace: dict[str, Any]) -> None:
        namespace.update({"__call__": call, _DEPTH: depth})
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__)

    return types.new_class(cls.__name__, (cls,), exec_body=body)


@functools.cache
def _has_subclasses(cls: type) -> bool:
    """Whether a class accepts a subclass; some require arguments for one."""
    try:
        types.new_class(cls.__name__, (cls,))
    except TypeError:
        return False
    return True


def check_model(model: object) -> None:
    """Raises a TypeError for an object that is not an nnx module."""
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"Expected an nnx module, got {type(model).__name__}. For linen modules "
            "use jmp_lite.linen."
        )


def is_mutable(leaf: Leaf) -> TypeGuard[nnx.Pytree | nnx.Variable[PyTree]]:
    """Whether an object is an nnx module or a variable, which a function may change."""
    return isinstance(leaf, nnx.Pytree | nnx.Variable)
