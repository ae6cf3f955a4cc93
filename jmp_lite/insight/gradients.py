"""Differentiates a traced function, for the tools that look at its backward pass."""

import contextlib
import copy
import functools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.trace import argument_name, arrays_in
from jmp_lite.jaxprs.types import Array, Function, Jaxpr, PyTree, Var

ArgNums = int | Sequence[int] | None
"""Positional arguments, by number, as in ``jax.grad``; None for all arguments."""


def check_argnums(argnums: object, backward: bool = True) -> None:
    """Raises an error for what cannot be the numbers of arguments.

    Args:
      argnums: the numbers.
      backward: whether anything is differentiated.
    """
    if argnums is None:
        return
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(
                "Expected the numbers of positional arguments as argnums, as in "
                f"jax.grad, got {argnums!r}."
            )
    if not backward:
        raise ValueError(
            "argnums chooses the arguments to differentiate: pass backward=True, too."
        )


class Arguments(NamedTuple):
    """The arrays among the arguments of a function.

    Attributes:
      names: their names, such as ``args[0]['w']``.
      owners: the numbers of the positional arguments that they belong to; None for
        keyword arguments.
      argnums: the arguments to differentiate; None for all.
    """

    names: Sequence[str]
    owners: Sequence[int | None]
    argnums: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: ArgNums = None
    ) -> "Arguments":
        """Returns the arrays of a call.

        Raises:
          ValueError: there is no argument of a number.
        """
        paths = [path for path, _ in arrays_in(args, kwargs)]
        owners = [None if p[0].idx else p[1].idx for p in paths]
        names = list(map(argument_name, paths))
        if argnums is None:
            return cls(names, owners)
        numbers = [argnums] if isinstance(argnums, int | np.integer) else argnums
        for number in numbers:
            if not -len(args) <= number < len(args):
                raise ValueError(
                    f"Expected argnums below {len(args)}, the number of positional "
                    f"arguments, got {argnums!r}."
                )
        return cls(names, owners, tuple(int(n) % len(args) for n in numbers))

    def is_differentiated(self, number: int) -> bool:
        """Whether an array is differentiated, if it is one of floats."""
        return self.argnums is None or self.owners[number] in self.argnums


class Differentiable:
    """A traced function, and which of its arguments and results are differentiated.

    Args:
      traced: its jaxpr.
      treedef: the tree structure of its results.
      arguments: its arguments.
      written: its jaxpr with the types that its arguments and results have, if it was
        traced with other ones.

    Attributes:
      traced: its jaxpr.
      types: the types of its results.
      names_of_results: the names of its results, such as ``result['loss']``.
      names_of_gradients: the names of its gradients.
      avals: the types of its arguments.
      floats: the arguments to differentiate.
      losses: the results to differentiate. A scalar result that is alone, or first in a
        tuple, is the loss. Otherwise all floating-point results are differentiated.
    """

    def __init__(
        self,
        traced: Jaxpr,
        treedef: PyTree,
        arguments: Arguments,
        written: Jaxpr | None = None,
    ) -> None:
        parts = structure.parts(traced if written is None else written)
        self.traced = traced
        self.types = [var.aval for var in parts.outvars]
        self.avals = [var.aval for var in parts.invars]
        self._arguments = arguments
        self.floats = [
            i for i in floats_in(parts.invars) if arguments.is_differentiated(i)
        ]
        self.losses = _losses_in(parts.outvars, treedef)
        self._of_losses = [parts.outvars[i].aval for i in self.losses]
        results = jax.tree.unflatten(treedef, range(len(parts.outvars)))
        paths = [path for path, _ in jax.tree.leaves_with_path(results)]
        self.names_of_results = [f"result{jax.tree_util.keystr(p)}" for p in paths]
        self.names_of_gradients = [
            f"gradient of {arguments.names[i]}" for i in self.floats
        ]

    def check(self) -> None:
        """Raises a ValueError for a function without a gradient."""
        argnums = self._arguments.argnums
        if argnums is not None and not self.floats:
            raise ValueError(
                "There is no backward pass: the arguments of argnums="
                f"{argnums} have no floating-point array."
            )
        for found, what in ((self.floats, "argument"), (self.losses, "result")):
            if not found:
                raise ValueError(
                    "There is no backward pass: the function has no floating-point "
                    f"{what}. Leave backward out."
                )

    @contextlib.contextmanager
    def advised(self) -> Generator[None]:
        """Adds to an error of differentiation which argument to leave out."""
        try:
            yield
        except Exception as error:
            owners = {self._arguments.owners[i] for i in self.floats}
            able = sorted(k for k in owners if k is not None and self._is_able(k))
            unable = [
                name.removeprefix("gradient of ")
                for i, name in zip(self.floats, self.names_of_gradients, strict=True)
                if self._arguments.owners[i] not in able
            ]
            if self._arguments.argnums is not None or not able or not unable:
                raise
            numbers = able[0] if len(able) == 1 else tuple(able)
            raise ValueError(
                f"The function has no derivative with respect to {unable[0]}: "
                f"{str(error).splitlines()[0]} Without argnums, all floating-point "
                "arguments are differentiated. Name those that training "
                f"differentiates: argnums={numbers}."
            ) from error

    def _is_able(self, number: int) -> bool:
        """Whether the function has a derivative with respect to one argument."""
        alone = copy.copy(self)
        alone.floats = [i for i in self.floats if self._arguments.owners[i] == number]
        run = alone.with_gradients(functools.partial(structure.evaluate, self.traced))
        with contextlib.suppress(Exception):
            jax.make_jaxpr(run)(*self.avals)
            return True
        return False

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
        types, generator = self._of_losses, np.random.default_rng(0)
        cotangents = [
            jnp.asarray(generator.standard_normal(x.shape)).astype(x.dtype)
            for x in types
        ]
        if len(types) == 1 and not types[0].shape:  # A loss.
            cotangents = [jnp.ones((), types[0].dtype)]

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
