"""Checks a function, rules and arguments before anything is traced."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.dtypes import dtype_names, is_traceable
from jmp_lite.casting.mutables import is_module, refuse_modules
from jmp_lite.jaxprs.types import Array, Function, PyTree


def check_function(fun: Function) -> None:
    """Raises a TypeError for an object that is not a function."""
    if callable(fun):
        return
    hint = ""
    if isinstance(fun, str | Rules):
        keyword = "compute_dtype" if fun in dtype_names() else "rules"
        hint = f" Pass {keyword} by keyword: {keyword}={fun!r}."
    raise TypeError(f"Expected a function, got {type(fun).__name__}: {fun!r}.{hint}")


def choose_rules(rules: object, compute_dtype: DTypeLike | None) -> Callable[[], Rules]:
    """Checks the rules, and returns a function that returns them for a call.

    ``"half"`` depends on the device, which is known only at the call.
    """
    chosen = get_rules(rules) if isinstance(rules, str) else rules
    if not isinstance(chosen, Rules):
        hint = ""
        if isinstance(chosen, type | np.dtype):
            hint = " Pass a dtype as compute_dtype=..."
        raise TypeError(
            "Expected the name of a preset or a Rules, got "
            f"{type(chosen).__name__}: {chosen!r}.{hint}"
        )
    if compute_dtype is not None:
        chosen = dataclasses.replace(chosen, compute_dtype=compute_dtype)
    return chosen.on_this_device


def function_of_arrays(
    fun: Function, args: PyTree, kwargs: PyTree
) -> tuple[Function, list[Any]]:
    """Returns ``fun`` as a function of the arrays in its arguments, and these arrays.

    Other arguments reach it unchanged.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [is_traceable(leaf) for leaf in leaves]

    def of_arrays(*arrays: Array) -> PyTree:
        given = iter(arrays)
        merged = [
            next(given) if yes else leaf
            for leaf, yes in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return fun(*args, **kwargs)

    of_arrays.__name__ = getattr(fun, "__name__", "autocast")
    return of_arrays, [x for x, yes in zip(leaves, is_array, strict=True) if yes]


def refuse_mutable_graphs(fun: Function, args: PyTree, kwargs: PyTree) -> None:
    """Raises for an nnx module, whose changes a trace would lose."""
    places = {
        "an argument": jax.tree.leaves((args, kwargs), is_leaf=is_module),
        "the function itself or an object that it captures": _captured(fun),
    }
    for place, found in places.items():
        refuse_modules(found, place, "jmp_lite.nnx.autocast or jmp_lite.nnx.explain")


def _captured(fun: PyTree) -> list[PyTree]:
    """Returns a function, its owner, and the objects that it visibly captures."""
    found = [fun, getattr(fun, "__self__", None)]
    if isinstance(fun, functools.partial):
        found += [*fun.args, *fun.keywords.values(), *_captured(fun.func)]
    elif hasattr(fun, "__wrapped__"):
        found += _captured(fun.__wrapped__)
    for cell in getattr(fun, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # An empty cell.
            found.append(cell.cell_contents)
    return found
