"""Marks: what a user writes into a function about the precision of a part of it.

A mark is a scope with a reserved name, so it travels with the equations through every
transform and reaches those of the backward pass. Outside of autocast a mark means
nothing.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jmp_lite.autocasting.jaxprs.types import Function, PyTree
from jmp_lite.autocasting.rules.rules import AS_WRITTEN_SCOPE, FULL_SCOPE, LOW_SCOPE
from jmp_lite.casting.dtypes import cast_tree, is_floating, parse_dtype, upcast_tree

Tree = TypeVar("Tree")
Params = ParamSpec("Params")
Result = TypeVar("Result")


@overload
def full_precision(fun: Callable[Params, Result]) -> Callable[Params, Result]: ...


@overload
def full_precision(fun: None = None) -> PyTree: ...


def full_precision(fun: Function | None = None) -> PyTree:
    """Marks a part of a function: float32 inside, and what leaves stays float32.

    ``@full_precision`` over a function, or ``with full_precision():`` around a block.

    Args:
      fun: the function to mark.

    Returns:
      The function; without one, a context manager.

    Example:
      >>> import jax.numpy as jnp
      >>> @full_precision
      ... def loss(x):
      ...     return jnp.mean((x - 1) ** 2)
      >>> with full_precision():
      ...     print(loss(jnp.ones(2)))
      0.0
    """
    return _region(FULL_SCOPE, fun)


@overload
def low_precision(fun: Callable[Params, Result]) -> Callable[Params, Result]: ...


@overload
def low_precision(fun: None = None) -> PyTree: ...


def low_precision(fun: Function | None = None) -> PyTree:
    """Marks a part of a function: 16 bits inside, for every op that has such a form.

    ``@low_precision`` over a function, or ``with low_precision():`` around a block.

    Args:
      fun: the function to mark.

    Returns:
      The function; without one, a context manager.

    Example:
      >>> import jax.numpy as jnp
      >>> with low_precision():
      ...     print(jnp.exp(jnp.zeros(2)).dtype)  # Outside of autocast it does nothing.
      float32
    """
    return _region(LOW_SCOPE, fun)


def _region(scope: str, fun: Function | None) -> PyTree:
    if fun is None:
        return jax.named_scope(scope)

    @functools.wraps(fun)
    def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(scope):
            return fun(*args, **kwargs)

    return marked


def as_full(tree: Tree) -> Tree:
    """Says of values that their digits matter: what is added to them is float32.

    In place of ``x.astype(jnp.float32)``, which leaves no trace in a function that is
    traced in float32.

    Args:
      tree: a pytree; its floating-point arrays are marked.

    Returns:
      The same tree.

    Example:
      >>> import jax.numpy as jnp
      >>> as_full(jnp.ones(1))
      Array([1.], dtype=float32)
    """
    return _marked(tree, FULL_SCOPE)


def as_low(tree: Tree) -> Tree:
    """Says of values that 16 bits are enough, where they come from a float32 op.

    Args:
      tree: a pytree; its floating-point arrays are marked.

    Returns:
      The same tree.

    Example:
      >>> import jax.numpy as jnp
      >>> as_low(jnp.ones(1))
      Array([1.], dtype=float32)
    """
    return _marked(tree, LOW_SCOPE)


def low_call(
    fun: Callable[Params, Result], dtype: DTypeLike = "bfloat16"
) -> Callable[Params, Result]:
    """Returns a function that calls a kernel which takes 16 bits only.

    What the kernel does itself is run as it was written, under every preset.

    Args:
      fun: the kernel, such as a fused attention.
      dtype: the dtype that its floating arguments are given in.

    Returns:
      A function whose floating results are float32 outside of autocast, and under
      autocast in its compute dtype, which may be another one.

    Raises:
      ValueError: ``dtype`` is unknown or not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> low_call(jnp.sin)(jnp.ones(1)).dtype
      dtype('float32')
    """
    parse_dtype(dtype)

    @functools.wraps(fun)
    def low_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = cast_tree((args, kwargs), dtype)
        with jax.named_scope(AS_WRITTEN_SCOPE):
            results = fun(*args, **kwargs)
        with jax.named_scope(LOW_SCOPE):
            return upcast_tree(results)

    return low_fun


def _marked(tree: Tree, scope: str) -> Tree:
    def mark(leaf: PyTree) -> PyTree:
        return checkpoint_name(leaf, scope) if is_floating(leaf) else leaf

    with jax.named_scope(scope):
        return jax.tree.map(mark, tree)
