"""autocast for functions of nnx modules: scopes by path, and changes written back."""

import contextlib
import functools
import types
from collections.abc import Callable, Generator
from typing import Any, Never, ParamSpec, TypeGuard, TypeVar, overload

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.autocasting import api
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.losses import set_float32_loss, with_float32_loss
from jmp_lite.casting.types import Leaf, Path
from jmp_lite.jaxprs.types import Function, PyTree

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
    _add_scopes(view)
    return view


def _add_scopes(tree: PyTree) -> int:
    """Makes each module of a pytree call its ops in the scope of its path.

    Returns:
      A number for ``_remove_scopes``. Modules that already have scopes keep them.
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


def _remove_scopes(tree: PyTree, depth: int) -> None:
    """Restores the class of all modules that ``_add_scopes`` has changed."""
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
        self.fun, self._bound = fun, ()
        owner = fun if isinstance(fun, nnx.Pytree) else getattr(fun, "__self__", None)
        if isinstance(owner, nnx.Pytree):
            method = type(owner).__call__ if fun is owner else fun

            # By name: inside of the trace the module may have another class.
            @functools.wraps(method)
            def call(owner: nnx.Pytree, *args: Any, **kwargs: Any) -> Any:
                return getattr(owner, method.__name__)(*args, **kwargs)

            self.fun, self._bound = call, (owner,)

        def of_states(states: PyTree) -> PyTree:
            args, kwargs = nnx.from_tree(states, ctxtag=self, is_inner=True)
            depth = _add_scopes((args, kwargs))
            out = self.fun(*args, **kwargs)
            mutable = lambda leaf: leaf if is_mutable(leaf) else None
            inputs = jax.tree.map(mutable, (args, kwargs), is_leaf=is_mutable)
            _remove_scopes((inputs, out), depth)
            return nnx.to_tree((out, inputs), ctxtag=self)

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

    def write_back(self, after: PyTree) -> PyTree:
        """Writes states to the modules, in the context, and returns the results.

        Args:
          after: what ``of_states`` returns.
        """
        out, _ = nnx.from_tree(after, ctxtag=self, is_inner=False)
        return out


Result = TypeVar("Result")
Args = ParamSpec("Args")


@overload
def autocast(
    fun: Callable[Args, Result],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[Args, Result]: ...


@overload
def autocast(
    fun: None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]: ...


def autocast(
    fun: Function | None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    **unknown: Never,
) -> Function:
    """Returns ``fun`` in mixed precision, for functions of nnx modules.

    It works like ``jmp_lite.autocast``. If ``fun`` changes a module that it receives
    (batch statistics, counts of random numbers, caches), that module changes, in
    float32.

    The path of a module is the scope of its ops. An example is
    ``"Net/blocks/0/norm/LayerNorm"``: the module ``net.blocks[0].norm`` of the class
    ``LayerNorm``, as called by the modules around it.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      **unknown: an argument of another library: an error that names this one's.

    Returns:
      The function; without ``fun``, a decorator.

    Raises:
      ValueError: the preset or the dtype is unknown.
      TypeError: ``fun`` is not a function, or an argument is unknown.
      flax.errors.TraceContextError: ``fun`` changes a module that is not an argument.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      >>> jmp_lite.nnx.autocast(model)(jnp.ones((2, 4))).dtype
      dtype('float32')
      >>> bool(abs(model.mean[0] - 0.01) < 1e-6)  # 0.99 * 0 + 0.01 * 1
      True
    """
    api.check_keywords(unknown)
    if fun is None:
        return api.Decorator(autocast, rules=rules, compute_dtype=compute_dtype)
    lifted = FunctionOfStates(fun)
    chosen = choose_rules(rules, compute_dtype)

    def run_on_states(run: Callable[[Function], Function]) -> Function:
        @functools.wraps(lifted.fun)
        def autocast_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with lifted.states(args, kwargs) as states:
                low = run(api.autocast(lifted.of_states, chosen()))
                return lifted.write_back(low(states))

        return autocast_fun

    autocast_fun = run_on_states(lambda low: low)
    set_float32_loss(
        autocast_fun,
        lambda prepare: run_on_states(lambda low: with_float32_loss(low, prepare)),
    )
    return autocast_fun
