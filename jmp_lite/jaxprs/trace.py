"""Makes a jaxpr of a user's function, and refuses what cannot be traced."""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax._src import api_util

from jmp_lite.casting.dtypes import is_traceable
from jmp_lite.casting.types import Leaf, Path
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Function, Jaxpr, PyTree, Var
from jmp_lite.mutables import is_module, noting_captures, refuse_modules


class Traced(NamedTuple):
    """A traced function.

    Attributes:
      jaxpr: its jaxpr.
      arrays: its arrays, the arguments of the jaxpr.
      treedef: the structure of its results.
      again: traces the function again, for arrays of other types, and returns the
        jaxpr and the structure of the results.
    """

    jaxpr: Jaxpr
    arrays: list[Array]
    treedef: PyTree
    again: Callable[[Sequence[Aval]], tuple[Jaxpr, PyTree]]


def trace_function(fun: Function, args: PyTree, kwargs: PyTree) -> Traced:
    """Traces a function.

    Arguments that are not arrays reach ``fun`` unchanged.

    Raises:
      TypeError: an argument, or what ``fun`` captures, is an nnx module.
    """
    _refuse_mutable_graphs(fun, args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    structures: list[PyTree] = []

    def flat(*arrays: Array) -> list[Array]:
        given = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            given[i] = array
        args, kwargs = jax.tree.unflatten(treedef, given)
        # Not from the shapes of the results: a user's pytree node may refuse shapes.
        results, made = jax.tree.flatten(fun(*args, **kwargs))
        structures.append(made)
        return results

    # JAX's errors name the traced function: that of the user, and not this one.
    flat.__name__ = getattr(fun, "__name__", type(fun).__name__)
    # For JAX's errors: "depends on the value of the argument batch['image']".
    info = api_util.debug_info("jmp_lite", fun, args, kwargs)
    if len(names := info.arg_names or ()) == len(leaves):
        info = info._replace(arg_names=tuple(names[i] for i in places))
        flat.__fun_debug_info__ = info  # pyright: ignore[reportFunctionMemberAccess]
    arrays = [leaves[i] for i in places]
    # Flax raises for a module that is captured, and does not say what to write.
    with noting_captures():
        jaxpr = jax.make_jaxpr(flat)(*arrays)

    def again(types: Sequence[Aval]) -> tuple[Jaxpr, PyTree]:
        return structure.trace(flat, types, jaxpr), structures[-1]

    return Traced(jaxpr, arrays, structures[-1], again)


def arrays_in(args: PyTree, kwargs: PyTree) -> list[tuple[Path, Array]]:
    """Returns the arrays among the arguments of a function, each with its path."""
    leaves, _ = jax.tree.flatten_with_path((args, kwargs))
    return [(path, leaf) for path, leaf in leaves if is_traceable(leaf)]


def refuse_shapes(args: PyTree, kwargs: PyTree, name: str) -> None:
    """Raises a TypeError for a ``ShapeDtypeStruct`` among arguments.

    Args:
      args: the arguments of a function.
      kwargs: its keyword arguments.
      name: the name of the tool, which runs the function.
    """

    def is_shape(leaf: Leaf) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    if not any(map(is_shape, jax.tree.leaves((args, kwargs)))):
        return  # Paths take time.
    for path, leaf in arrays_in(args, kwargs):
        if is_shape(leaf):
            raise TypeError(
                f"Expected arrays, because {name} runs the function, got a "
                f"ShapeDtypeStruct at {argument_name(path)}. For shapes use "
                "jmp_lite.explain, or jax.eval_shape of the result."
            )


def argument_names(args: PyTree, kwargs: PyTree) -> list[str]:
    """Returns the names of the arrays among arguments, such as ``args[0]['w']``."""
    return [argument_name(path) for path, _ in arrays_in(args, kwargs)]


def argument_name(path: Path) -> str:
    """Returns the name of an array in ``(args, kwargs)``, such as ``args[0]['w']``.

    A module of nnx is a tree of variables here, which adds parts without a meaning.
    """
    place, *inside = path
    name = ("args", "kwargs")[place.idx] + jax.tree_util.keystr(tuple(inside))
    return re.sub(r"\.states\[\d+\]", "", name).removesuffix(".value")


def _refuse_mutable_graphs(fun: Function, args: PyTree, kwargs: PyTree) -> None:
    """Raises for an nnx module, whose changes a trace would lose."""
    places = {
        "an argument": jax.tree.leaves((args, kwargs), is_leaf=is_module),
        "the function itself or an object that it captures": _captured(fun),
    }
    for place, found in places.items():
        refuse_modules(found, place, _IN_NNX)


_IN_NNX = "jmp_lite.nnx.autocast, explain, watch, compare or tune"


def _captured(fun: Leaf) -> list[Leaf]:
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


# ---------------------------------- jaxprs whose equations run in another way


def retraced(
    jaxpr: Jaxpr, avals: Sequence[Aval], steps: Callable[[dict[Var, Array]], None]
) -> Jaxpr:
    """Returns a closed jaxpr, traced again with its equations run in another way.

    Args:
      jaxpr: the jaxpr.
      avals: the types of its inputs, which may be new ones.
      steps: takes the inputs by variable, and adds the results.
    """
    old = structure.parts(jaxpr)

    def run(*arrays: Array) -> list[Array]:
        env = dict(zip(old.constvars, old.consts, strict=True))
        env.update(zip(old.invars, arrays, strict=True))
        steps(env)
        return [read(env, atom) for atom in old.outvars]

    return structure.trace(run, avals, jaxpr)


def run_equations(eqns: Sequence[Eqn], env: dict[Var, Array]) -> None:
    """Runs equations, and adds their results by variable."""
    for eqn in eqns:
        with source.context_of(eqn):
            results = params.bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: dict[Var, Array], atom: Var) -> Array:
    """Returns the value of an atom, given values by variable."""
    return structure.as_array(atom.val) if structure.is_literal(atom) else env[atom]
