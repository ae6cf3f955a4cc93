"""Differentiates a traced function, for the tools that look at its backward pass."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.jaxprs.types import Array, Aval, Function, PyTree


def losses_of(avals: Sequence[Aval], treedef: PyTree) -> list[int]:
    """Returns the results that are differentiated.

    A scalar result that is alone, or first in a tuple, is the loss. Otherwise all
    floating-point results are differentiated.
    """
    first: PyTree = jax.tree.unflatten(treedef, range(len(avals)))
    while isinstance(first, tuple) and first:
        first = first[0]
    if isinstance(first, int) and is_float(avals[first]) and not avals[first].shape:
        return [first]
    return [i for i, aval in enumerate(avals) if is_float(aval)]


def is_float(aval: Aval) -> bool:
    """Whether a type is that of a floating-point array."""
    return jnp.issubdtype(aval.dtype, np.inexact)


def with_gradients(
    fun: Function,
    arrays: Sequence[Array],
    floats: Sequence[int],
    losses: Sequence[int],
    cotangents: Sequence[Array],
) -> list[Array]:
    """Returns the results of a function of arrays, followed by its gradients.

    Args:
      fun: the function; it returns a list of arrays.
      arrays: its arguments.
      floats: the arguments to differentiate.
      losses: the results to differentiate.
      cotangents: the cotangents of these results.
    """
    _, back, results = differentiated(fun, arrays, floats, losses)
    return [*results, *back(list(cotangents))]


def differentiated(
    fun: Function,
    arrays: Sequence[Array],
    floats: Sequence[int],
    losses: Sequence[int],
) -> tuple[list[Array], Function, list[Array]]:
    """Returns the losses of a function of arrays, its backward pass, and its results.

    Args:
      fun: the function; it returns a list of arrays.
      arrays: its arguments.
      floats: the arguments to differentiate.
      losses: the results to differentiate.
    """

    def of_floats(*given: Array) -> PyTree:
        merged = list(arrays)
        for i, array in zip(floats, given, strict=True):
            merged[i] = array
        results = fun(*merged)
        return [results[i] for i in losses], results

    return jax.vjp(of_floats, *(arrays[i] for i in floats), has_aux=True)


def check_backward(floats: Sequence[int], losses: Sequence[int]) -> None:
    """Raises a ValueError for a program without a gradient."""
    for found, what in ((floats, "argument"), (losses, "result")):
        if not found:
            raise ValueError(
                "There is no backward pass: the function has no floating-point "
                f"{what}. Leave backward out."
            )


def cotangents_of(losses: Sequence[Aval]) -> list[Array]:
    """Returns what gradients are taken of: the loss, or a mixture of all results."""
    if len(losses) == 1 and not losses[0].shape:
        return [jnp.ones((), losses[0].dtype)]
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.standard_normal(x.shape)).astype(x.dtype) for x in losses
    ]
