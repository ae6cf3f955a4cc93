"""Flax nnx: modules under autocast, and modules with parameters in 16 bits.

Under autocast, a module is split into its state and merged inside of the trace. Its
changes are written back to the original object, as in ``nnx.jit``. Modules are
traversed as graphs, in Flax's tree mode too, because parts of a model may share
variables.
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

from jmp_lite.autocasting.interpreter import api
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import NORM_LAYERS, Rules
from jmp_lite.casting.dtypes import (
    DtypeSummary,
    cast_tree,
    is_array,
    is_inexact,
    parse_dtype,
)
from jmp_lite.casting.dtypes import dtype_summary as core_dtype_summary
from jmp_lite.casting.losses import set_float32_loss, with_float32_loss
from jmp_lite.insight.explain.explanation import Explanation
from jmp_lite.insight.explain.explanation import explain as core_explain
from jmp_lite.scaling import gradients
from jmp_lite.scaling.finite import select_tree
from jmp_lite.scaling.loss_scale import LossScale
from jmp_lite.scaling.state import LossScalingState
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

    Returns:
      The function; without ``fun``, a decorator.

    Raises:
      ValueError: the preset or the dtype is unknown.
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
    if fun is None:
        return functools.partial(autocast, rules=rules, compute_dtype=compute_dtype)
    check_convertible(fun)
    chosen = choose_rules(rules, compute_dtype)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)

    def with_states(run: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(called)
        def autocast_fun(*args: Any, **kwargs: Any) -> Any:
            with nnx.update_context(lifted):
                states = nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted)
                after = run(api.autocast(lifted, chosen()))(states)
                out, _ = nnx.from_tree(after, ctxtag=lifted, is_inner=False)
            return out

        return autocast_fun

    autocast_fun = with_states(lambda low: low)
    set_float32_loss(autocast_fun, with_states(with_float32_loss))
    return autocast_fun


def explain(
    fun: Callable[_Params, Any],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
) -> Callable[_Params, Explanation]:
    """Returns a function that explains what ``autocast(fun, rules)`` does.

    It works like ``jmp_lite.explain``. It computes nothing and changes no module.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      backward: whether to explain the backward pass too, with respect to all floats in
        modules and other arguments.

    Returns:
      A function of ``fun``'s arguments that returns an ``Explanation``.

    Raises:
      ValueError: the preset or the dtype is unknown.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> dot, *_ = jmp_lite.nnx.explain(model)(jnp.ones((2, 4))).rows
      >>> dot.scope, dot.op, dot.precision
      ('Linear', 'dot_general', 'bfloat16')
    """
    check_convertible(fun)
    called, *bound = _unbound(fun)
    lifted = _of_states(called)

    explain_states = core_explain(
        lifted, rules, compute_dtype=compute_dtype, backward=backward
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
    """Returns a function that computes ``fun`` and its gradient under a loss scale.

    It works like ``jmp_lite.value_and_grad``, through ``flax.nnx.value_and_grad``. The
    loss is scaled before the backward pass, and the gradients are unscaled in float32
    after it. Changes that ``fun`` makes in a module are kept.

    Args:
      fun: a function that returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      loss_scale: the scale of this step, such as
        ``get_loss_scale(optimizer.opt_state)``.
      argnums: which arguments to differentiate: numbers, or a ``nnx.DiffState``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      grad_dtype: the dtype of the gradients: ``"float32"`` or ``"bfloat16"``.

    Returns:
      A function of ``fun``'s arguments that returns ``(loss, grads)``, or
      ``((loss, aux), grads)`` with ``has_aux``. ``grads`` is the result of
      ``nnx.value_and_grad``, in ``grad_dtype``.

    Raises:
      TypeError: ``loss_scale`` is not a ``LossScale``; ``fun`` does not return a pair
        although ``has_aux`` is True; or, in Flax's tree mode, an argument to
        differentiate holds counts or keys.
      ValueError: ``grad_dtype`` is another dtype.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> @jmp.nnx.autocast(compute_dtype="float16")
      ... def loss_fn(model, x):
      ...     return model(x).sum()
      >>> grad_fn = jmp.nnx.value_and_grad(loss_fn, jmp.StaticLossScale(1024))
      >>> loss, grads = grad_fn(model, jnp.ones((8, 2)))
      >>> grads.bias[...]
      Array([8.], dtype=float32)
    """
    transform = functools.partial(nnx.value_and_grad, argnums=argnums)
    found = gradients.under_scale(transform, fun, loss_scale, has_aux, grad_dtype)
    # Flax reads its mode at the transformation of a function, not at its call.
    is_graph = nnx.set_graph_mode.current_value()
    if is_graph and nnx.set_graph_updates.current_value():
        return found

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _check_differentiable(args, argnums)
        return found(*args, **kwargs)

    return value_and_grad_fun


def _check_differentiable(args: tuple[Any, ...], argnums: Any) -> None:
    """Raises if Flax's tree mode would differentiate a count or a key."""
    for i in argnums if isinstance(argnums, tuple | list) else (argnums,):
        given = args[i] if isinstance(i, int) and i < len(args) else None
        for path, leaf in jax.tree.leaves_with_path(given):
            if is_array(leaf) and not is_inexact(leaf):
                raise TypeError(
                    f"Argument {i} holds {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)}, which has no gradient. In Flax's "
                    "tree mode, every array of an argument is differentiated. Split "
                    "the model by graphdef, params, rest = nnx.split(model, "
                    "nnx.Param, ...). Differentiate a function of params and rest "
                    "that calls nnx.merge(graphdef, params, rest): its changes in "
                    "rest change the model."
                )


@contextlib.contextmanager
def restore_if_skipped(model: Any, optimizer: nnx.Optimizer[Any]) -> Generator[None]:
    """Restores the statistics of a model if the optimizer skips the step.

    ``loss_scaling`` and ``skip_nonfinite`` keep the parameters if a gradient is not
    finite. But the forward pass of that step has already changed the model: one batch
    with a NaN would leave NaN in the averages of BatchNorm.

    If a gradient is not finite, the variables of the model return to their values at
    the start of the ``with`` block, bit for bit. Two kinds of variables are not
    restored: those of a type that the optimizer updates, and random number state
    (``nnx.RngState``), which continues.

    The block may change the structure of the model, as ``Module.sow`` and ``nnx.pop``
    do. A structure cannot depend on a traced value, so it is the same whether the step
    is skipped or not: new variables stay, with their new values, and popped ones stay
    away. Inside of a variable, each array with its old place, shape and dtype returns
    to its old value.

    Args:
      model: a module, or a tuple, list or dictionary of modules, such as a generator
        and a discriminator that one loss runs.
      optimizer: the optimizer that the block updates, with ``loss_scaling`` or
        ``skip_nonfinite`` in it. If it contains several, all gradients have to be
        finite.

    Returns:
      A context manager, for use inside or outside of ``nnx.jit``.

    Raises:
      TypeError: ``model`` contains something other than nnx modules, or ``optimizer``
        is not an ``nnx.Optimizer``.
      ValueError: the optimizer never skips a step.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> import optax
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> transformation = jmp.skip_nonfinite(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
      >>> nan = jnp.full((4, 2), jnp.nan)
      >>> with jmp.nnx.restore_if_skipped(model, optimizer):
      ...     grads = nnx.grad(lambda model: model(nan).sum())(model)
      ...     _ = optimizer.update(model, grads)
      >>> model.mean[...]
      Array([0., 0.], dtype=float32)
    """
    models = jax.tree.leaves(model, is_leaf=_is_mutable) or [model]
    for each in models:
        _check_model(each)
    if not isinstance(optimizer, nnx.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected an nnx.Optimizer, got {type(optimizer).__name__}.")
    _grads_finite(optimizer)  # Raises if it never skips a step.
    goes_on = nnx.Any(optimizer.wrt, nnx.RngState)
    before = _places(models, goes_on)
    # The block may put another variable in the place of one, or move one.
    old_of = {id(variable): variable.get_value() for variable in before.values()}
    old_at = {place: old_of[id(variable)] for place, variable in before.items()}
    yield
    is_finite = _grads_finite(optimizer)
    for place, variable in _places(models, goes_on).items():
        new = variable.get_value()
        old = old_of.get(id(variable), old_at.get(place, new))
        variable.set_value(_restored(is_finite, new, old))


def _places(models: list[Any], without: Any) -> dict[Any, nnx.Variable[Any]]:
    """Returns the variables of models, except some, by model and path."""
    return {
        (number, path): variable
        for number, model in enumerate(models)
        for path, variable in nnx.iter_graph(model, graph=True)
        if isinstance(variable, nnx.Variable) and not without(path, variable)
    }


def _restored(is_finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns ``new``; on a skipped step, with the arrays of ``old`` that fit it."""
    before = dict(jax.tree.leaves_with_path(old))

    def restore(path: Any, leaf: Any) -> Any:
        was = before.get(path, leaf)
        is_alike = _shape_and_dtype(leaf) == _shape_and_dtype(was) is not None
        return select_tree(is_finite, leaf, was) if is_alike else leaf

    return jax.tree.map_with_path(restore, new)


def _shape_and_dtype(leaf: Any) -> Any:
    """Returns None for a leaf that is neither an array nor a number."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = jnp.asarray(leaf)
    return (leaf.shape, leaf.dtype) if is_array(leaf) else None


def _grads_finite(optimizer: nnx.Optimizer[Any]) -> jax.Array:
    """Returns whether the gradients of the optimizer's last step were finite."""

    def is_state(node: Any) -> bool:
        return isinstance(node, LossScalingState)

    leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=is_state)
    # Each array is in a Flax variable.
    checks = jax.tree.leaves([x.grads_finite for x in leaves if is_state(x)])
    if not checks:
        raise ValueError(
            "Expected an nnx.Optimizer that skips steps: wrap its transformation in "
            "loss_scaling(...) or skip_nonfinite(...)."
        )
    return functools.reduce(jnp.logical_and, checks)


def _of_states(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fun`` as a function of states that returns the changed states, too."""

    def of_states(states: Any) -> Any:
        args, kwargs = nnx.from_tree(states, ctxtag=of_states, is_inner=True)
        depth = _scope((args, kwargs))
        out = fun(*args, **kwargs)
        inputs = jax.tree.map(_if_mutable, (args, kwargs), is_leaf=_is_mutable)
        _unscope((inputs, out), depth)
        return nnx.to_tree((out, inputs), ctxtag=of_states)

    return of_states


def _unbound(fun: Any) -> tuple[Any, ...]:
    """Returns a function and, for a module or a bound method, the module."""
    owner = fun if isinstance(fun, nnx.Pytree) else getattr(fun, "__self__", None)
    if not isinstance(owner, nnx.Pytree):
        return (fun,)
    method = type(owner).__call__ if fun is owner else fun

    # By name: inside of the trace the module may have another class.
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
    """Makes a module, or parts of it, compute in a dtype.

    It sets the attribute ``dtype`` of each selected module that has one. Such a module
    casts its inputs and parameters to this dtype. Everything inside of a selected
    module computes in the dtype too. Stored parameters do not change. The function
    changes ``model`` itself, as ``model.eval()`` does.

    Args:
      model: a module.
      dtype: a floating-point dtype or its name.
      where: the parts: a class of modules; a regular expression for the path of a
        submodule (``"blocks/0/linear"``); a tuple of both; None for all.

    Returns:
      The module.

    Raises:
      TypeError: ``model`` is not an nnx module, or ``where`` has another type.
      ValueError: the dtype is unknown, or ``where`` selects nothing that has a dtype.

    Source: MindSpore's ``cell.to_float``; Haiku's ``mixed_precision.set_policy``.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in "ab"))
      >>> low = jmp_lite.nnx.to_float(model, "bfloat16", "layers/1")
      >>> low(jnp.ones((1, 4))).dtype
      dtype(bfloat16)
    """
    parsed, parts = parse_dtype(dtype), _selected(model, where)
    with_dtype = [part for _, part in parts if hasattr(part, "dtype")]
    if not with_dtype:
        names = ", ".join(f"{path} ({type(part).__name__})" for path, part in parts)
        raise ValueError(f"The selected parts have no attribute 'dtype': {names}.")
    for part in with_dtype:
        part.dtype = parsed.type
    return model


def cast(model: Model, dtype: DTypeLike, keep: Selector = ()) -> Model:
    """Returns a copy of a module with its parameters cast, except those of norm layers.

    Only floating-point parameters are cast. BatchNorm statistics, caches and random
    number state keep their dtypes. So do modules whose path or class names a norm layer
    (``LayerNorm``, ``batch_norm``, ...). Shared variables stay shared.

    Args:
      model: a module.
      dtype: a floating-point dtype or its name.
      keep: other parts that are not cast: a class of modules, with everything in them;
        a class of variables (``nnx.LoRAParam``); a regular expression for the path of a
        variable (``"head"``, ``"bias$"``); or a tuple of these.

    Returns:
      A module of the same class, with new variables. ``model`` does not change.

    Raises:
      TypeError: ``model`` is not an nnx module, or ``keep`` has another type.
      ValueError: the dtype is unknown, or ``keep`` selects nothing.

    Source: MXNet's ``net.cast``, which does not cast batch norms.

    Example:
      >>> from flax import nnx
      >>> import jmp_lite.nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = nnx.Linear(4, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)
      >>> low = jmp_lite.nnx.cast(nnx.Sequential(*layers), "bfloat16")
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
    """Returns a view of a module whose parts run in scopes named by their paths.

    ``jmp_lite.nnx.autocast`` adds these scopes itself. Use ``scoped`` for other readers
    of
    scopes: ``jmp_lite.autocast`` of a function of the module's state, or a profiler.
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
    _check_model(model)
    view = nnx.clone(model, variables=False, graph=True)
    _scope(view)
    return view


class ModuleDtypes(NamedTuple):
    """The variables of one module.

    Attributes:
      path: the path of the module, followed by its class in parentheses.
      summary: its own variables by dtype, without those of submodules.

    Example:
      >>> from flax import nnx
      >>> import jmp_lite.nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
      >>> row = jmp_lite.nnx.dtype_summary(model)[0]
      >>> row.path, row.summary["float32"].elements
      ('layers/0 (Linear)', 10)
    """

    path: str
    summary: DtypeSummary


class ModelDtypes(tuple[ModuleDtypes, ...]):
    """One ``ModuleDtypes`` for each module of a model; prints as a table.

    Example:
      >>> from flax import nnx
      >>> import jmp_lite.nnx
      >>> print(jmp_lite.nnx.dtype_summary(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
      module    dtype           elements         bytes
      (Linear)  float32               10            40
    """

    def __str__(self) -> str:
        """Returns a table with a row for each dtype of each module."""
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
      A tuple with one entry for each module that has variables of its own. A shared
      variable counts where it occurs first.

    Raises:
      TypeError: ``model`` is not an nnx module.

    Source: MXNet's ``net.summary``.

    Example:
      >>> from flax import nnx
      >>> import jmp_lite.nnx
      >>> model = nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
      >>> low = jmp_lite.nnx.cast(model, "bfloat16")
      >>> print(jmp_lite.nnx.dtype_summary(low))
      module             dtype           elements         bytes
      layers/0 (Linear)  bfloat16              10            20
    """
    _check_model(model)
    seen: set[int] = set()
    rows: list[ModuleDtypes] = []
    # Submodules come first, so that the rest is a module's own.
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
            f"Expected an nnx module, got {type(model).__name__}. For linen modules "
            "use jmp_lite.linen."
        )


def _paths(model: Any) -> list[tuple[str, Any]]:
    """Returns all modules of a model, each with its path."""
    return [("/".join(map(str, path)), m) for path, m in _iter_modules(model)]


def _variables(module: Any) -> list[nnx.Variable[Any]]:
    return [
        v for _, v in nnx.iter_graph(module, graph=True) if isinstance(v, nnx.Variable)
    ]


def _selected(model: Any, where: Selector) -> list[tuple[str, Any]]:
    """Returns the modules that a selector matches, and their submodules."""
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
    """Makes each module of a pytree call its ops in the scope of its path.

    Returns:
      A number for ``_unscope``. Modules that already have scopes keep them.
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
    """Restores the class of all modules that ``_scope`` has changed."""
    for module in _modules(tree):
        for _, inner in _iter_modules(module):
            if getattr(inner, _SCOPE, (None,))[0] == depth:
                _become(inner, type(inner).__base__)
                delattr(inner, _SCOPE)


def _become(module: Any, cls: Any) -> None:
    # Without nnx, which would list `__class__` among the module's attributes. The
    # module would then be a new one for `nnx.jit`, which would compile it again.
    object.__setattr__(module, "__class__", cls)


def _modules(tree: Any) -> list[nnx.Module]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_mutable)
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def _iter_modules(module: Any) -> list[tuple[Any, Any]]:
    """Returns a module and its submodules, each with its path."""
    return list(nnx.iter_modules(module, graph=True))


@functools.cache
def _scoped_class(cls: type) -> type:
    """Returns a subclass that runs its calls in the scope of its instance."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(getattr(self, _SCOPE)[1]):
            return cls.__call__(self, *args, **kwargs)

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(__call__=call)
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__)

    return types.new_class(cls.__name__, (cls,), exec_body=body)
