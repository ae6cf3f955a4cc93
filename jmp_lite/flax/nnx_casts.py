"""Parts of nnx modules, chosen and cast to 16 bits."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import DtypeSummary, cast_tree, parse_dtype
from jmp_lite.casting.dtypes import dtype_summary as core_dtype_summary
from jmp_lite.casting.types import PyTree
from jmp_lite.flax.nnx_autocast import Model, check_model, modules_of

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
    given = [
        one if isinstance(one, str) else getattr(one, "__name__", str(one))
        for one in as_tuple(selector)
    ]
    near = [
        match
        for one in given
        for match in difflib.get_close_matches(one, names, n=2, cutoff=0.4)
    ]
    nearest = " or ".join(map(repr, dict.fromkeys(near)))
    hint = f" Did you mean {nearest}?" if near else ""
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
    parsed, parts = parse_dtype(dtype), _selected(model, where)
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
        {id(v) for m in parts for v in _variables(m)} for parts in (norms, selected)
    )
    variables = [
        ("/".join(map(str, path)), node)
        for path, node in nnx.iter_graph(changed, graph=True)
        if isinstance(node, nnx.Variable)
    ]
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
    for path, module in sorted(_paths(model), key=_depth, reverse=True):
        own = [v for v in _variables(module) if id(v) not in seen]
        seen.update(map(id, own))
        if own:
            summary = core_dtype_summary([v.get_value() for v in own])
            name = f"({type(module).__name__})"
            rows.append(ModuleDtypes(" ".join(filter(None, (path, name))), summary))
    return ModelDtypes(sorted(rows, key=lambda row: row.path))


def _depth(pair: tuple[str, nnx.Module]) -> int:
    path, _ = pair
    return len(path.split("/")) if path else 0


def _paths(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Returns all modules of a model, each with its path."""
    return [("/".join(map(str, path)), m) for path, m in modules_of(model)]


def _variables(module: nnx.Module) -> list[nnx.Variable[PyTree]]:
    return [
        v for _, v in nnx.iter_graph(module, graph=True) if isinstance(v, nnx.Variable)
    ]


def _selected(model: nnx.Module, where: Selector) -> list[tuple[str, nnx.Module]]:
    """Returns the modules that a selector matches, and their submodules."""
    check_model(model)
    check_selector(where)
    parts = _paths(model)
    found = [m for path, m in parts if is_selected(where, path, m)]
    if not found:
        raise ValueError(nothing_selected(where, parts))
    inside = {id(inner) for module in found for _, inner in modules_of(module)}
    return [(path, m) for path, m in parts if id(m) in inside]
