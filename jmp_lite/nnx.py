"""Flax nnx glue: modules under autocast, and modules with parameters in 16 bits.

Under autocast a module is split into its state, merged inside, and its changes are
written back to the object outside, as ``nnx.jit`` does it. Modules are traversed as
graphs, in Flax's tree mode too, because parts of a model may share variables.
"""

import contextlib
import functools
import re
import types
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.autocasting.explain.explanation import Explanation
from jmp_lite.autocasting.explain.explanation import explain as core_explain
from jmp_lite.autocasting.interpreter import api, validation
from jmp_lite.autocasting.rules.rules import NORM_LAYERS, Rules
from jmp_lite.casting.dtypes import (
    DtypeSummary,
    cast_tree,
    is_array,
    is_inexact,
    parse_dtype,
)
from jmp_lite.casting.dtypes import dtype_summary as core_dtype_summary
from jmp_lite.scaling import gradients
from jmp_lite.scaling.loss_scale import LossScale, select_tree
from jmp_lite.scaling.transforms import LossScalingState
from jmp_lite.selectors import Selector, check_selector, is_selected, nothing_selected

Model = TypeVar("Model")
_Params = ParamSpec("_Params")
Result = TypeVar("Result")

_SCOPE = "_jmp_lite_scope"


@overload
def autocast(
    fun: Callable[_Params, Result],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[_Params, Result]: ...


@overload
def autocast(
    fun: None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[[Callable[_Params, Result]], Callable[_Params, Result]]: ...


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
      >>> model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      >>> autocast(model)(jnp.ones((2, 4))).dtype
      dtype('float32')
      >>> bool(abs(model.mean[0] - 0.01) < 1e-6)  # 0.99 * 0 + 0.01 * 1
      True
    """
    if fun is None:
        return functools.partial(autocast, rules=rules, compute_dtype=compute_dtype)
    validation.check_function(fun)
    chosen = validation.choose_rules(rules, compute_dtype)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)

    @functools.wraps(called)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(lifted):
            states = nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted)
            after = api.autocast(lifted, chosen())(states)
            _, out = nnx.from_tree(after, ctxtag=lifted, is_inner=False)
        return out

    return autocast_fun


def explain(
    fun: Callable[_Params, Any],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
) -> Callable[_Params, Explanation]:
    """Returns a function that explains what ``autocast(fun, rules)`` does.

    As ``jmp_lite.explain``. It runs nothing, and changes nothing in a module.

    Args:
      fun: a function of pytrees and modules, a module, or a method of one.
      rules: a preset's name or a ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own.
      backward: whether to explain the backward pass too, of all floats in modules and
        the other arguments.

    Returns:
      A function of ``fun``'s arguments that returns an ``Explanation``.

    Raises:
      ValueError: there is no such preset or dtype.

    Example:
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> dot, *_ = explain(model)(jnp.ones((2, 4))).rows
      >>> dot.scope, dot.op, dot.precision
      ('Linear', 'dot_general', 'bfloat16')
    """
    validation.check_function(fun)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)

    def loss_first(states: Any) -> Any:
        after, out = lifted(states)
        return out, after

    explain_states = core_explain(
        loss_first, rules, compute_dtype=compute_dtype, backward=backward
    )

    @functools.wraps(called)
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with nnx.update_context(lifted):
            return explain_states(nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted))

    return explained


def value_and_grad(
    fun: Callable[_Params, Any],
    loss_scale: LossScale,
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    grad_dtype: DTypeLike = "float32",
) -> Callable[_Params, tuple[Any, Any]]:
    """Returns a function that evaluates ``fun`` and its gradient under a loss scale.

    As ``jmp_lite.value_and_grad``, by ``flax.nnx.value_and_grad``: the loss is scaled
    before the backward pass, the gradients are unscaled after, in float32, and what
    ``fun`` changes in a module is changed.

    Args:
      fun: a function that returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      loss_scale: the scale of this step, such as
        ``get_loss_scale(optimizer.opt_state)``.
      argnums: which arguments to differentiate: numbers, or a ``nnx.DiffState``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      grad_dtype: the dtype of the gradients: ``"float32"``, or ``"bfloat16"``.

    Returns:
      A function of ``fun``'s arguments that returns ``(loss, grads)``, or ``((loss,
      aux), grads)`` with ``has_aux``; ``grads`` is what ``nnx.value_and_grad`` returns,
      in ``grad_dtype``.

    Raises:
      TypeError: ``loss_scale`` is not a ``LossScale``; ``fun`` does not return a pair
        though ``has_aux`` says so; or, in Flax's tree mode, an argument to
        differentiate holds counts or keys.
      ValueError: ``grad_dtype`` is another dtype.

    Example:
      >>> import jmp_lite
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> loss_fn = autocast(lambda model, x: model(x).sum(), compute_dtype="float16")
      >>> scale = jmp_lite.StaticLossScale(1024)
      >>> loss, grads = value_and_grad(loss_fn, scale)(model, jnp.ones((8, 2)))
      >>> grads.bias[...]
      Array([8.], dtype=float32)
    """
    transform = functools.partial(nnx.value_and_grad, argnums=argnums)
    found = gradients.under_scale(transform, fun, loss_scale, has_aux, grad_dtype)
    # Flax reads its mode when a function is transformed, not when it is called.
    is_graph = nnx.set_graph_mode.current_value()
    if is_graph and nnx.set_graph_updates.current_value():
        return found

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _check_differentiable(args, argnums)
        return found(*args, **kwargs)

    return value_and_grad_fun


def _check_differentiable(args: tuple[Any, ...], argnums: Any) -> None:
    """Raises where Flax's tree mode would take the gradient of a count or a key."""
    for i in argnums if isinstance(argnums, tuple | list) else (argnums,):
        given = args[i] if isinstance(i, int) and i < len(args) else None
        for path, leaf in jax.tree.leaves_with_path(given):
            if is_array(leaf) and not is_inexact(leaf):
                raise TypeError(
                    f"Argument {i} holds {leaf.dtype} at {jax.tree_util.keystr(path)}, "
                    "which has no gradient; in Flax's tree mode the gradient is of all "
                    "that an argument holds. Use graphdef, params, rest = nnx.split("
                    "model, nnx.Param, ...) and a function of params and rest, which "
                    "merges them by nnx.merge(graphdef, params, rest): its changes in "
                    "rest are changes in the model."
                )


@contextlib.contextmanager
def restore_if_skipped(model: Any, optimizer: nnx.Optimizer[Any]) -> Generator[None]:
    """Restores the statistics of a model where the optimizer skips the step.

    ``loss_scaling`` and ``skip_nonfinite`` leave the parameters as they are where a
    gradient is not finite. The forward pass of that step has changed the model before:
    one batch with a NaN in it would leave NaN in the averages of BatchNorm for ever. At
    the end of the ``with`` block all variables of the model get back what they held at
    its start, bit for bit, if a gradient was not finite. But for two kinds: those that
    the optimizer updates, and those of random numbers (``nnx.RngState``), which go on.

    Args:
      model: a module.
      optimizer: the optimizer that is updated in the block, with ``loss_scaling`` or
        ``skip_nonfinite`` in it; of several, all gradients have to be finite.

    Returns:
      A context manager, in and outside of ``nnx.jit``.

    Raises:
      TypeError: ``model`` is no nnx module, or ``optimizer`` no ``nnx.Optimizer``.
      ValueError: the optimizer never skips a step.

    Example:
      >>> import jmp_lite, optax
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> optimizer = jmp_lite.skip_nonfinite(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
      >>> with restore_if_skipped(model, optimizer):
      ...     grads = nnx.grad(lambda m: m(jnp.full((4, 2), jnp.nan)).sum())(model)
      ...     _ = optimizer.update(model, grads)
      >>> model.mean[...]
      Array([0., 0.], dtype=float32)
    """
    _check_model(model)
    if not isinstance(optimizer, nnx.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected an nnx.Optimizer, got {type(optimizer).__name__}.")
    _grads_finite(optimizer)  # Raises where it never skips a step.
    goes_on = nnx.Any(optimizer.wrt, nnx.RngState)
    before = [
        (variable, variable.get_value())
        for path, variable in nnx.iter_graph(model, graph=True)
        if isinstance(variable, nnx.Variable) and not goes_on(path, variable)
    ]
    yield
    is_finite = _grads_finite(optimizer)
    for variable, old in before:
        variable.set_value(select_tree(is_finite, variable.get_value(), old))


def _grads_finite(optimizer: nnx.Optimizer[Any]) -> jax.Array:
    """Returns whether the gradients of the optimizer's last step were finite."""

    def is_state(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=is_state)
    # A variable of Flax stands for each array.
    checks = jax.tree.leaves([x.grads_finite for x in leaves if is_state(x)])
    if not checks:
        raise ValueError(
            "Expected an nnx.Optimizer that skips steps: there is neither "
            "loss_scaling(...) nor skip_nonfinite(...) around what it is made of."
        )
    return functools.reduce(jnp.logical_and, checks)


def _of_states(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fun`` from the states of its arguments to theirs and its result's."""

    def of_states(states: Any) -> Any:
        args, kwargs = nnx.from_tree(states, ctxtag=of_states, is_inner=True)
        depth = _scope((args, kwargs))
        out = fun(*args, **kwargs)
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


# --------------------------------------------------------------- parts in 16 bits


def to_float(model: Model, dtype: DTypeLike, where: Selector = None) -> Model:
    """Has a module, or parts of it, compute in a dtype.

    What has an attribute ``dtype`` gets this one: it casts its inputs and its
    parameters to it. Parameters stay as they are. Everything inside of a part that is
    selected computes in the dtype too. The module itself is changed, as by
    ``model.eval()``.

    Args:
      model: a module.
      dtype: a floating dtype or its name.
      where: which parts: a class of modules; a regular expression in the path of a
        module inside of this one (``"blocks/0/linear"``); a tuple of such; None for
        all.

    Returns:
      The module.

    Raises:
      TypeError: ``model`` is no nnx module, or ``where`` is of another kind.
      ValueError: there is no such dtype, or nothing is selected that has a dtype.

    Source: MindSpore's ``cell.to_float``; Haiku's ``mixed_precision.set_policy``.

    Example:
      >>> model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in "ab"))
      >>> to_float(model, "bfloat16", "layers/1")(jnp.ones((1, 4))).dtype
      dtype(bfloat16)
    """
    parsed, parts = parse_dtype(dtype), _selected(model, where)
    with_dtype = [part for _, part in parts if hasattr(part, "dtype")]
    if not with_dtype:
        names = ", ".join(f"{path} ({type(part).__name__})" for path, part in parts)
        raise ValueError(f"What is selected has no attribute 'dtype': {names}.")
    for part in with_dtype:
        part.dtype = parsed.type
    return model


def cast(model: Model, dtype: DTypeLike, keep: Selector = ()) -> Model:
    """Returns a module whose parameters are cast, but for those of norm layers.

    Statistics of BatchNorm, caches, RNG state and all that is no floating parameter
    stay as they are, and so do modules whose path or class is a norm layer's
    (``LayerNorm``, ``batch_norm``, ...). What several modules share they still share.

    Args:
      model: a module.
      dtype: a floating dtype or its name.
      keep: what else to keep: a class of modules, with all that is in them; a class of
        variables (``nnx.LoRAParam``); a regular expression in the path of a variable
        (``"head"``, ``"bias$"``); or a tuple of such.

    Returns:
      A module of the same class, with variables of its own. The one given is as it was.

    Raises:
      TypeError: ``model`` is no nnx module, or ``keep`` is of another kind.
      ValueError: there is no such dtype, or ``keep`` selects nothing.

    Source: MXNet's ``net.cast``, which keeps what its batch norms hold.

    Example:
      >>> rngs = nnx.Rngs(0)
      >>> layers = nnx.Linear(4, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
      >>> low = cast(nnx.Sequential(*layers), "bfloat16")
      >>> low.layers[0].kernel.dtype, low.layers[1].scale.dtype
      (dtype(bfloat16), dtype('float32'))
    """
    _check_model(model)
    check_selector(keep)
    parsed, changed = parse_dtype(dtype), nnx.clone(model, graph=True)
    is_norm = re.compile(NORM_LAYERS[0])
    modules = _paths(changed)
    classes = keep if isinstance(keep, tuple) else (keep,)
    classes = tuple(one for one in classes if isinstance(one, type))
    selected = [module for _, module in modules if isinstance(module, classes)]
    norms = [m for path, m in modules if is_norm.search(f"{path}/{type(m).__name__}")]
    kept = {id(v) for module in (*selected, *norms) for v in _variables(module)}
    variables = [
        ("/".join(map(str, path)), node)
        for path, node in nnx.iter_graph(changed, graph=True)
        if isinstance(node, nnx.Variable)
    ]
    named = {id(v) for path, v in variables if is_selected(keep, path, v)}
    if keep != () and not selected and not named:
        raise ValueError(nothing_selected(keep, (*modules, *variables)))
    for _, variable in variables:
        if isinstance(variable, nnx.Param) and id(variable) not in kept | named:
            variable.set_value(cast_tree(variable.get_value(), parsed))
    return changed


def scoped(model: Model) -> Model:
    """Returns a view of a module whose parts call their ops in the scope of their path.

    As ``jmp_lite.nnx.autocast`` does it by itself, for everything else that reads
    scopes: ``jmp_lite.autocast`` of a function of the module's state, a profile. The
    view has the variables of the module itself, the same state, and each part is an
    instance of its class.

    Args:
      model: a module.

    Returns:
      The view.

    Raises:
      TypeError: ``model`` is no nnx module.

    Example:
      >>> import jmp_lite
      >>> model = scoped(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
      >>> graphdef, state = nnx.split(model)
      >>> apply = lambda state, x: nnx.merge(graphdef, state)(x)
      >>> jmp_lite.explain(apply)(state, jnp.ones((1, 4))).rows[0].scope
      'Sequential/layers/0/Linear'
    """
    _check_model(model)
    view = nnx.clone(model, variables=False, graph=True)
    _scope(view)
    return view


class ModuleDtypes(NamedTuple):
    """What one module holds.

    Attributes:
      path: its path, and its class behind it.
      summary: its own variables by dtype, without those of modules inside of it.
    """

    path: str
    summary: DtypeSummary


class ModelDtypes(tuple[ModuleDtypes, ...]):
    """What the modules of a model hold, one entry for each; prints as a table."""

    def __str__(self) -> str:
        """Returns a table: a row for each dtype of each module."""
        width = max([len("module"), *(len(row.path) for row in self)])
        lines = [f"{'module':{width}}  {'dtype':12}{'elements':>12}{'bytes':>14}"]
        lines += [
            f"{row.path:{width}}  {name:12}{totals.elements:>12,}{totals.bytes:>14,}"
            for row in self
            for name, totals in row.summary.items()
        ]
        return "\n".join(lines)


def dtype_summary(model: Any) -> ModelDtypes:
    """Counts the variables of each module of a model by dtype.

    Args:
      model: a module.

    Returns:
      A tuple with one entry for each module that holds variables itself; a
      variable that several share is counted where it is met first.

    Raises:
      TypeError: ``model`` is no nnx module.

    Source: MXNet's ``net.summary``.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
      >>> print(dtype_summary(cast(model, "bfloat16")))
      module             dtype           elements         bytes
      layers/0 (Linear)  bfloat16              10            20
    """
    _check_model(model)
    seen: set[int] = set()
    rows: list[ModuleDtypes] = []
    # Those inside come first, so that what is left is a module's own.
    for path, module in sorted(_paths(model), key=_depth, reverse=True):
        own = [v for v in _variables(module) if id(v) not in seen]
        seen.update(map(id, own))
        if own:
            summary = core_dtype_summary([v.get_value() for v in own])
            name = f"({type(module).__name__})"
            rows.append(ModuleDtypes(" ".join(filter(None, (path, name))), summary))
    return ModelDtypes(sorted(rows, key=lambda row: row.path))


def _depth(pair: tuple[str, Any]) -> int:
    path, _ = pair
    return len(path.split("/")) if path else 0


def _check_model(model: Any) -> None:
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"Expected an nnx module, got {type(model).__name__}. (jmp_lite.linen is "
            "for those of linen.)"
        )


def _paths(model: Any) -> list[tuple[str, Any]]:
    """Returns all modules of a model, each with its path."""
    return [("/".join(map(str, path)), m) for path, m in _iter_modules(model)]


def _variables(module: Any) -> list[nnx.Variable[Any]]:
    return [
        v for _, v in nnx.iter_graph(module, graph=True) if isinstance(v, nnx.Variable)
    ]


def _selected(model: Any, where: Selector) -> list[tuple[str, Any]]:
    """Returns the modules that a selector means, and those inside of them."""
    _check_model(model)
    check_selector(where)
    parts = _paths(model)
    found = [m for path, m in parts if is_selected(where, path, m)]
    if not found:
        raise ValueError(nothing_selected(where, parts))
    inside = {id(inner) for module in found for _, inner in _iter_modules(module)}
    return [(path, m) for path, m in parts if id(m) in inside]


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
            # A module without submodules adds its class, such as LayerNorm.
            is_leaf = all(m is inner for _, m in _iter_modules(inner))
            name = (type(inner).__name__,) if is_leaf or not path else ()
            scope = "/".join(map(str, (*path[len(parent) :], *name)))
            setattr(inner, _SCOPE, (depth, scope))
            _become(inner, _scoped_class(type(inner)))
    return depth


def _unscope(tree: Any, depth: int) -> None:
    """Gives all modules that ``_scope`` has changed their own class back."""
    for module in _modules(tree):
        for _, inner in _iter_modules(module):
            if getattr(inner, _SCOPE, (None,))[0] == depth:
                _become(inner, type(inner).__base__)
                delattr(inner, _SCOPE)


def _become(module: Any, cls: Any) -> None:
    # Past nnx, which would list `__class__` among the module's attributes for ever: it
    # would then be another module to `nnx.jit`, and be traced and compiled again.
    object.__setattr__(module, "__class__", cls)


def _modules(tree: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_mutable)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _iter_modules(module: Any) -> list[tuple[Any, Any]]:
    """Returns a module and all that it holds, each with its path."""
    return list(nnx.iter_modules(module, graph=True))


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
