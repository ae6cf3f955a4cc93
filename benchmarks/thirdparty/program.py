"""What there is to know of a program to run it in three precisions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jmp_lite as jmp

Loss = Callable[[Any, Any], tuple[jax.Array, Any]]
"""``loss(params, batch) -> (number, what no precision may change)``."""


class Program(NamedTuple):
    """A program in float32: a loss, and what it is given.

    Attributes:
      loss: a function of ``params`` and ``batch``. It returns a number, and integers
        that no precision may change: counts of iterations, random bits, indices. Those
        are ``()`` where there are none.
      params: what the gradient is taken of.
      batch: what else it is given.
      by_hand: returns the same loss in the 16-bit option that the library itself has,
        for a dtype; None where it has none.
      learning_rate: of the steps of Adam that are trained, where the task is to learn
        something; None where it is not.
      rules: what the default rules become for it; as they are, if it is None.
    """

    loss: Loss
    params: Any
    batch: Any
    by_hand: Callable[[DTypeLike], Loss] | None = None
    learning_rate: float | None = None
    rules: Callable[[jmp.Rules], jmp.Rules] | None = None


class Entry(NamedTuple):
    """A program of the collection.

    Attributes:
      name: what it is, in a few words.
      packages: the distributions on PyPI that wrote it; none if it is written out here.
      make: makes it. What it imports is imported here, for a program alone needs it.
    """

    name: str
    packages: Sequence[str]
    make: Callable[[], Program]


def cast_by_hand(loss: Loss, dtype: DTypeLike) -> Loss:
    """Returns a loss whose floating parameters and batch are cast to a dtype first."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32
        return leaf.astype(dtype) if is_float else leaf

    def low(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        value, exact = loss(*jax.tree.map(cast, (params, batch)))
        return value.astype(jnp.float32), exact

    return low
