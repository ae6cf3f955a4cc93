"""Differentiates a traced function, for the tools that look at its backward pass."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Array, Aval, Function, Jaxpr, PyTree, Var


class Differentiable:
    """A traced function, and which of its arguments and results are differentiated.

    Args:
      traced: its jaxpr.
      treedef: the tree structure of its results.
      arguments: the names of its arguments.
      written: its jaxpr with the types that its arguments and results have, if it was
        traced with other ones.

    Attributes:
      traced: its jaxpr.
      types: the types of its results.
      names_of_results: the names of its results, such as ``result['loss']``.
      names_of_gradients: the names of its gradients, if its arguments have names.
      avals: the types of its arguments.
      floats: the arguments to differentiate.
      losses: the results to differentiate. A scalar result that is alone, or first in a
        tuple, is the loss. Otherwise all floating-point results are differentiated.
    """

    def __init__(
        self,
        traced: Jaxpr,
        treedef: PyTree,
        arguments: Sequence[str] = (),
        written: Jaxpr | None = None,
    ) -> None:
        parts = structure.parts(traced if written is None else written)
        self.traced = traced
        self.types = [var.aval for var in parts.outvars]
        self.avals = [var.aval for var in parts.invars]
        self.floats = floats_in(parts.invars)
        self.losses = _losses_in(parts.outvars, treedef)
        self._of_losses = [parts.outvars[i].aval for i in self.losses]
        results = jax.tree.unflatten(treedef, range(len(parts.outvars)))
        paths = [path for path, _ in jax.tree.leaves_with_path(results)]
        self.names_of_results = [f"result{jax.tree_util.keystr(p)}" for p in paths]
        named = [arguments[i] for i in self.floats] if arguments else []
        self.names_of_gradients = [f"gradient of {name}" for name in named]

    def check(self) -> None:
        """Raises a ValueError for a function without a gradient."""
        for found, what in ((self.floats, "argument"), (self.losses, "result")):
            if not found:
                raise ValueError(
                    "There is no backward pass: the function has no floating-point "
                    f"{what}. Leave backward out."
                )

    def differentiated(
        self, fun: Function, arrays: Sequence[Array]
    ) -> tuple[list[Array], Function, list[Array]]:
        """Returns the losses of the function, its backward pass, and its results.

        Args:
          fun: runs the function, or one with the same arguments and results, on a
            list of arrays.
          arrays: its arguments.
        """

        def fun_of_floats(*given: Array) -> tuple[list[Array], list[Array]]:
            merged = list(arrays)
            for i, array in zip(self.floats, given, strict=True):
                merged[i] = array
            results = fun(merged)
            return [results[i] for i in self.losses], results

        return jax.vjp(fun_of_floats, *(arrays[i] for i in self.floats), has_aux=True)

    def with_gradients(self, fun: Function) -> Function:
        """Returns a function of arrays that returns gradients after its results.

        These are the gradients of the loss. Without a loss, they are those of a fixed
        random combination of all results.

        Args:
          fun: as in ``differentiated``.
        """
        cotangents = _cotangents_of(self._of_losses)

        def run(*arrays: Array) -> list[Array]:
            _, back, results = self.differentiated(fun, arrays)
            return [*results, *back(cotangents)]

        return run


def floats_in(atoms: Sequence[Var]) -> list[int]:
    """Returns which inputs or results of a program are real or complex floats."""
    return [i for i, atom in enumerate(atoms) if structure.is_float(atom)]


def _losses_in(results: Sequence[Var], treedef: PyTree) -> list[int]:
    floats = floats_in(results)
    first: PyTree = jax.tree.unflatten(treedef, range(len(results)))
    while isinstance(first, tuple) and first:
        first = first[0]
    if isinstance(first, int) and first in floats and not results[first].aval.shape:
        return [first]
    return floats


def _cotangents_of(losses: Sequence[Aval]) -> list[Array]:
    if len(losses) == 1 and not losses[0].shape:
        return [jnp.ones((), losses[0].dtype)]
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.standard_normal(x.shape)).astype(x.dtype) for x in losses
    ]
