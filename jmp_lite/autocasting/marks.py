"""Marks: the precision that a user requests for part of a function.

A mark is a scope with a reserved name. Every transformation keeps the scopes of
equations, so the mark also applies to the backward pass. Outside of autocast a mark has
no effect.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar, overload

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.match import AS_WRITTEN_SCOPE, FULL_SCOPE, LOW_SCOPE
from jmp_lite.casting.dtypes import cast_tree, is_floating, parse_dtype, upcast_tree
from jmp_lite.casting.types import Leaf
from jmp_lite.jaxprs.types import Function, PyTree

Tree = TypeVar("Tree")
Args = ParamSpec("Args")
Result = TypeVar("Result")


@overload
def full_precision(fun: Callable[Args, Result]) -> Callable[Args, Result]: ...


@overload
def full_precision(fun: None = None) -> AbstractContextManager[None]: ...


def full_precision(
    fun: Function | None = None,
) -> Function | AbstractContextManager[None]:
    """Marks part of a function as float32 under autocast.

    The ops inside run in float32, and the results stay float32. Use
    ``@full_precision`` on a function, or ``with full_precision():`` around a block.

    Args:
      fun: the function to mark.

    Returns:
      The function; without ``fun``, a context manager.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> @jmp.full_precision
      ... def product(x):
      ...     return x @ x
      >>> row, *_ = jmp.explain(product)(jnp.ones((2, 2))).rows
      >>> row.op, row.precision
      ('dot_general', 'float32')
    """
    return _mark_region(FULL_SCOPE, fun)


@overload
def low_precision(fun: Callable[Args, Result]) -> Callable[Args, Result]: ...


@overload
def low_precision(fun: None = None) -> AbstractContextManager[None]: ...


def low_precision(
    fun: Function | None = None,
) -> Function | AbstractContextManager[None]:
    """Marks part of a function as 16-bit under autocast.

    Every op inside that has a 16-bit form runs in the compute dtype. Use
    ``@low_precision`` on a function, or ``with low_precision():`` around a block.

    Args:
      fun: the function to mark.

    Returns:
      The function; without ``fun``, a context manager.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> @jmp.low_precision
      ... def exponential(x):
      ...     return jnp.exp(x)
      >>> row, *_ = jmp.explain(exponential)(jnp.ones(2)).rows
      >>> row.op, row.precision
      ('exp', 'bfloat16')
    """
    return _mark_region(LOW_SCOPE, fun)


def _mark_region(
    scope: str, fun: Function | None
) -> Function | AbstractContextManager[None]:
    if fun is None:
        return jax.named_scope(scope)

    @functools.wraps(fun)
    def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(scope):
            return fun(*args, **kwargs)

    return marked


def as_full(tree: Tree) -> Tree:
    """Marks values as deliberate float32: arithmetic on them runs in float32.

    A matrix product still casts them to 16 bits. Use ``as_full`` instead of
    ``x.astype(jnp.float32)``, which leaves no equation in a function that is traced in
    float32.

    Args:
      tree: a pytree; its floating-point arrays are marked.

    Returns:
      The same pytree.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> fun = lambda x, w, time: jnp.tanh(x @ w + jmp.as_full(time)) @ w
      >>> x, w = jnp.ones((2, 2)), jnp.ones((2, 2))
      >>> jmp.explain(fun)(x, w, x).dtype_of(op="tanh")
      'float32'
    """
    return _mark_values(tree, FULL_SCOPE)


def as_low(tree: Tree) -> Tree:
    """Marks values as 16-bit, such as the result of a float32 op.

    An op that reads them no longer runs in float32 because of them.

    Args:
      tree: a pytree; its floating-point arrays are marked.

    Returns:
      The same pytree.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> fun = lambda x, w: jnp.tanh(x @ w + jmp.as_low(jnp.exp(w))) @ w
      >>> x, w = jnp.ones((2, 2)), jnp.ones((2, 2))
      >>> jmp.explain(fun)(x, w).dtype_of(op="tanh")
      'bfloat16'
    """
    return _mark_values(tree, LOW_SCOPE)


def low_call(
    fun: Callable[Args, Result], dtype: DTypeLike = "bfloat16"
) -> Callable[Args, Result]:
    """Returns a function that calls a kernel with 16-bit arguments.

    It is for kernels that accept 16 bits only, such as a fused attention. The code of
    the kernel runs as written, under every preset.

    Args:
      fun: the kernel.
      dtype: the dtype of its floating-point arguments.

    Returns:
      A function with floating-point results. They are float32 outside of autocast.
      Under autocast they are in its compute dtype, which may differ from ``dtype``.

    Raises:
      ValueError: ``dtype`` is unknown or not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> def kernel(x):
      ...     print(x.dtype)
      ...     return jnp.sin(x)
      >>> jmp.low_call(kernel)(jnp.ones(1)).dtype
      bfloat16
      dtype('float32')
    """
    parse_dtype(dtype)

    @functools.wraps(fun)
    def low_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = cast_tree((args, kwargs), dtype)
        # A fused attention casts inside, and takes 16 bits alone: nothing in it is
        # decided.
        with jax.named_scope(AS_WRITTEN_SCOPE):
            results = fun(*args, **kwargs)
        with jax.named_scope(LOW_SCOPE):
            # Outside of autocast a float32 program goes on. Under autocast this cast is
            # LOW: it has the compute dtype, whichever 16 bits the kernel returns.
            return upcast_tree(results)

    return low_fun


def _mark_values(tree: Tree, scope: str) -> Tree:
    def mark(leaf: Leaf) -> Leaf:
        # A scope alone leaves no equation around a value. ``checkpoint_name`` does, and
        # changes no number.
        return checkpoint_name(leaf, scope) if is_floating(leaf) else leaf

    with jax.named_scope(scope):
        return jax.tree.map(mark, tree)
