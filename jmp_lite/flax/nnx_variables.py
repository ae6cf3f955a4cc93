"""The variables of nnx modules: chosen, cast to 16 bits, counted and restored."""

import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.casting import dtypes
from jmp_lite.casting.dtypes import DtypeSummary, cast_tree, parse_dtype
from jmp_lite.casting.types import Array, Leaf, Path, PyTree
from jmp_lite.flax.nnx_autocast import Model, check_model, is_mutable, modules_of
from jmp_lite.scaling.skipping import LossScalingState, select_tree
from jmp_lite.scaling.wrapping import nodes_of

# It does not match a block or a cell that is named after its norm.
_NORM = re.compile(r"(?i)(layer|rms|group|batch|instance)_?norm(s|alization)?(?![a-z])")

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
    given = [getattr(one, "__name__", str(one)) for one in as_tuple(selector)]
    close = [difflib.get_close_matches(one, names, n=2, cutoff=0.4) for one in given]
    near = dict.fromkeys(name for some in close for name in some)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    there = ", ".join(f"{path} ({name})" for path, name in found[:12] if path)
    more = ", ..." if len(found) > 12 else ""
    return f"{selector!r} selects nothing.{hint} There is: {there}{more}."


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
    parsed = parse_dtype(dtype)
    check_model(model)
    check_selector(where)
    parts = _paths(model)
    found = [m for path, m in parts if is_selected(where, path, m)]
    if not found:
        raise ValueError(nothing_selected(where, parts))
    inside = {id(inner) for module in found for _, inner in modules_of(module)}
    parts = [(path, m) for path, m in parts if id(m) in inside]
    with_dtype: list[Any] = [part for _, part in parts if hasattr(part, "dtype")]
    if not with_dtype:
        names = ", ".join(f"{path} ({type(part).__name__})" for path, part in parts)
        raise ValueError(f"The selected parts have no attribute 'dtype': {names}.")
    for part in with_dtype:
        part.dtype = parsed.type
    return model


def cast(model: Model, dtype: DTypeLike, keep: Selector = None) -> Model:
    """Returns a copy of a module with its parameters cast, except those of norm layers.

    Only floating-point parameters are cast. BatchNorm statistics, caches and random
    number state keep their dtypes. So do modules whose path or class names a norm layer
    (``LayerNorm``, ``batch_norm``, ...). Shared variables stay shared.

    Args:
      model: a module.
      dtype: a floating-point dtype or its name.
      keep: other parts that are not cast: a class of modules, with everything in them;
        a class of variables (``nnx.LoRAParam``); a regular expression for the path of a
        variable (``"head"``, ``"bias$"``); a tuple of these; or None for no others.

    Returns:
      A module of the same class, with new variables. ``model`` does not change.

    Raises:
      TypeError: ``model`` is not an nnx module, or ``keep`` has another type.
      ValueError: the dtype is unknown, or ``keep`` selects nothing, or all parameters.

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
    check_model(model)
    keep = () if keep is None else keep
    check_selector(keep)
    parsed, changed = parse_dtype(dtype), nnx.clone(model, graph=True)
    modules = _paths(changed)
    classes = tuple(one for one in as_tuple(keep) if isinstance(one, type))
    selected = [module for _, module in modules if isinstance(module, classes)]
    norms = [m for path, m in modules if _NORM.search(f"{path}/{type(m).__name__}")]
    of_norms, named = (
        {id(v) for m in parts for _, v in _variables(m)} for parts in (norms, selected)
    )
    variables = [("/".join(map(str, path)), v) for path, v in _variables(changed)]
    named |= {id(v) for path, v in variables if is_selected(keep, path, v)}
    if keep != () and not selected and not named:
        raise ValueError(nothing_selected(keep, (*modules, *variables)))
    params = [v for _, v in variables if isinstance(v, nnx.Param)]
    if params and all(id(v) in named for v in params):
        raise ValueError(
            f"keep={keep!r} selects every parameter, so there is nothing to cast: "
            "select fewer, or leave the call out."
        )
    for variable in params:
        if id(variable) not in of_norms | named:
            variable.set_value(cast_tree(variable.get_value(), parsed))
    return changed


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


def dtype_summary(model: nnx.Module) -> ModelDtypes:
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
    check_model(model)
    seen: set[int] = set()
    rows: list[ModuleDtypes] = []
    # Submodules come first, so that the rest is a module's own.
    for path, module in sorted(modules_of(model), key=lambda found: -len(found[0])):
        own = [v for _, v in _variables(module) if id(v) not in seen]
        seen.update(map(id, own))
        if own:
            name = f"{'/'.join(map(str, path))} ({type(module).__name__})".lstrip()
            summary = dtypes.dtype_summary([v.get_value() for v in own])
            rows.append(ModuleDtypes(name, summary))
    return ModelDtypes(sorted(rows, key=lambda row: row.path))


def _paths(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Returns all modules of a model, each with its path."""
    return [("/".join(map(str, path)), m) for path, m in modules_of(model)]


def _variables(model: nnx.Module) -> list[tuple[Path, nnx.Variable[PyTree]]]:
    """Returns all variables of a model, each with its path."""
    nodes = nnx.iter_graph(model, graph=True)
    return [(path, node) for path, node in nodes if isinstance(node, nnx.Variable)]


@contextlib.contextmanager
def restore_if_skipped(model: PyTree, optimizer: nnx.Optimizer[Any]) -> Generator[None]:
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
    models = jax.tree.leaves(model, is_leaf=is_mutable) or [model]
    for each in models:
        check_model(each)
    if not isinstance(optimizer, nnx.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected an nnx.Optimizer, got {type(optimizer).__name__}.")
    _grads_finite(optimizer)  # Raises if it never skips a step.
    goes_on = nnx.Any(optimizer.wrt, nnx.RngState)
    before = _variables_by_place(models, goes_on)
    # The block may put another variable in the place of one, or move one.
    old_of = {id(variable): variable.get_value() for variable in before.values()}
    old_at = {place: old_of[id(variable)] for place, variable in before.items()}
    yield
    is_finite = _grads_finite(optimizer)
    for place, variable in _variables_by_place(models, goes_on).items():
        new = variable.get_value()
        old = old_of.get(id(variable), old_at.get(place, new))
        arrays = dict(jax.tree.leaves_with_path(old))

        def restored(path: Path, leaf: Leaf, was: PyTree = arrays) -> Leaf:
            like = was.get(path, leaf)
            try:
                return select_tree(is_finite, leaf, like)
            except TypeError:  # They differ in shape or dtype, or are no arrays.
                return leaf

        variable.set_value(jax.tree.map_with_path(restored, new))


def _variables_by_place(
    models: list[nnx.Module], excluded: Callable[[Path, nnx.Variable[PyTree]], bool]
) -> dict[tuple[int, Path], nnx.Variable[PyTree]]:
    """Returns the variables of models, except some, by model and path."""
    return {
        (number, path): variable
        for number, model in enumerate(models)
        for path, variable in _variables(model)
        if not excluded(path, variable)
    }


def _grads_finite(optimizer: nnx.Optimizer[Any]) -> Array:
    """Returns whether the gradients of the optimizer's last step were finite."""
    states = nodes_of(optimizer.opt_state, LossScalingState)
    # Each array is in a Flax variable.
    checks = jax.tree.leaves([state.grads_finite for _, state in states])
    if not checks:
        raise ValueError(
            "Expected an nnx.Optimizer that skips steps: wrap its transformation in "
            "loss_scaling(...) or skip_nonfinite(...)."
        )
    return functools.reduce(jnp.logical_and, checks)
