"""Gradients under a loss scale.

A scaled gradient exists in this module only. Its functions return true gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    is_array,
    is_floating,
    is_inexact,
    is_number,
    parse_dtype,
    upcast_tree,
)
from jmp_lite.casting.losses import with_float32_loss
from jmp_lite.casting.types import Dtype, Leaf, LossFn, PyTree, Scalar, Tree
from jmp_lite.mutables import check_function, refusing_modules
from jmp_lite.scaling import backward_rules
from jmp_lite.scaling.loss_scale import LossScale, check_is_loss_scale

Args = ParamSpec("Args")
Result = TypeVar("Result")
Aux = TypeVar("Aux")


def value_and_grad(
    fun: Callable[Args, Result],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale,
    holomorphic: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike = "float32",
) -> Callable[Args, tuple[Result, PyTree]]:
    """Returns a function that computes ``fun`` and its gradient under a loss scale.

    It multiplies the loss by the scale before the backward pass, and divides the
    gradients by the scale after it, both in float32. Callers never see a scaled number:
    the value is the unscaled loss, and the gradients are those of ``fun``.

    Args:
      fun: a function that returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      argnums: which positional argument or arguments to differentiate.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      loss_scale: the scale of this step, such as ``get_loss_scale(opt_state)``.
      holomorphic: as in ``jax.value_and_grad``.
      allow_int: as in ``jax.value_and_grad``.
      grad_dtype: the dtype of the gradients: ``"float32"`` or ``"bfloat16"``. bfloat16
        halves the memory for the gradients of float32 parameters. They are unscaled in
        float32 and rounded once.

    Returns:
      A function of ``fun``'s arguments, keyword arguments too. It returns
      ``(loss, grads)``, or ``((loss, aux), grads)`` with ``has_aux``.

      ``loss`` has the dtype that ``fun`` gave it; the loss of an ``autocast`` function
      of 16-bit parameters is float32 (not that of a ``jit`` around it). ``grads`` has
      the structure and shapes of the arguments. Real gradients of 32 bits or fewer are
      in ``grad_dtype``, under ``NoOpLossScale`` too. Other gradients have the dtype of
      their argument.

      The differentiated arguments may also hold leaves that JAX cannot differentiate,
      such as the functions in an Equinox module. Then only their real and complex
      arrays are differentiated, as in ``equinox.filter_value_and_grad`` (and their
      integers, with ``allow_int``). The gradient of any other leaf is None, that of a
      Python float too.

    Raises:
      TypeError: ``fun`` is not a function; ``loss_scale`` is missing, or not a
        ``LossScale``; ``fun`` does not return a pair although ``has_aux`` is True; or
        an argument is an nnx module, whose changes would be lost.
      ValueError: ``grad_dtype`` is another dtype.

    Source: steps 3 to 6 of MindSpore's mixed-precision training;
    ``jax.value_and_grad``; ``equinox.filter_value_and_grad``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> loss_fn = lambda w: (w * jnp.float16(1e-4)).sum()
      >>> w = jnp.ones(2, jnp.float16)
      >>> scale = jmp.StaticLossScale(2.0**10)
      >>> loss, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(w)
      >>> loss.dtype, grads.dtype
      (dtype('float16'), dtype('float32'))
    """
    check_argnums(argnums)
    transform = functools.partial(
        _value_and_grad_of_arrays,
        argnums=argnums,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )
    found = build_value_and_grad(transform, fun, loss_scale, has_aux, grad_dtype)
    return refusing_modules(found, "jmp_lite.nnx.value_and_grad")


def check_argnums(argnums: object) -> None:
    """Raises a TypeError for a loss scale in place of ``argnums``."""
    if isinstance(argnums, LossScale):
        raise TypeError(
            "Expected the numbers of arguments as argnums, as in jax.value_and_grad, "
            f"got a {type(argnums).__name__}: pass it as loss_scale=..."
        )


def build_value_and_grad(
    transform: Callable[..., LossFn],
    fun: Callable[Args, Result],
    loss_scale: LossScale,
    has_aux: bool,
    grad_dtype: DTypeLike,
    with_true_cotangents: Callable[..., LossFn] = backward_rules.with_true_cotangents,
) -> Callable[Args, tuple[Result, PyTree]]:
    """Returns ``value_and_grad`` built on a given transformation.

    Args:
      transform: the transformation that differentiates, called with a function and
        ``has_aux=True``.
      fun: see ``value_and_grad``.
      loss_scale: see ``value_and_grad``.
      has_aux: see ``value_and_grad``.
      grad_dtype: see ``value_and_grad``.
      with_true_cotangents: ``backward_rules.with_true_cotangents``, for the arguments
        of ``fun``.
    """
    check_function(fun)
    check_is_loss_scale(loss_scale)
    dtype = parse_grad_dtype(grad_dtype)

    @functools.wraps(fun)  # nnx reads keywords from the signature.
    def scaled_fun(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Scalar, tuple[Scalar, PyTree]]:
        prepare = functools.partial(with_true_cotangents, loss_scale=loss_scale)
        loss_fn = with_float32_loss(fun, prepare)
        value, aux = _call(loss_fn, has_aux, args, kwargs)
        return loss_scale.scale(value), (value, aux)

    scaled_value_and_grad = transform(scaled_fun, has_aux=True)

    @functools.wraps(fun)
    def value_and_grad_fun(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[PyTree, PyTree]:
        (_, (value, aux)), scaled_grads = scaled_value_and_grad(*args, **kwargs)
        grads = rounded_gradients(loss_scale.unscale(scaled_grads), dtype)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_fun


def parse_grad_dtype(dtype: DTypeLike) -> Dtype:
    """Returns the dtype for the argument ``grad_dtype``.

    Raises:
      ValueError: it is neither float32 nor bfloat16.
    """
    parsed = parse_dtype(dtype)
    if parsed == jnp.float16:
        raise ValueError(
            "Gradients in float16 would have no loss scale, and those below "
            f"{jnp.finfo(parsed).smallest_subnormal:.0e} would become zero: use "
            "grad_dtype='bfloat16'."
        )
    if parsed not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"Expected 'float32' or 'bfloat16' for grad_dtype, got {parsed.name!r}."
        )
    return parsed


def rounded_gradients(grads: Tree, dtype: Dtype) -> Tree:
    """Casts the real gradients of 32 bits or fewer to a dtype."""

    def rounded(leaf: Leaf) -> Leaf:
        is_wide = not is_floating(leaf) or jnp.finfo(leaf.dtype).bits > 32
        return leaf if is_wide else leaf.astype(dtype)

    return jax.tree.map(rounded, upcast_tree(grads))


@overload
def grad(
    fun: Callable[Args, tuple[PyTree, Aux]],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    loss_scale: LossScale,
    holomorphic: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike = "float32",
) -> Callable[Args, tuple[PyTree, Aux]]: ...


@overload
def grad(
    fun: Callable[Args, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale,
    holomorphic: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike = "float32",
) -> Callable[Args, PyTree]: ...


def grad(
    fun: Callable[Args, PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale,
    holomorphic: bool = False,
    allow_int: bool = False,
    grad_dtype: DTypeLike = "float32",
) -> Callable[Args, PyTree]:
    """Returns a function that computes the gradient of ``fun`` under a loss scale.

    It is ``value_and_grad`` without the value.

    Args:
      fun: see ``value_and_grad``.
      argnums: see ``value_and_grad``.
      has_aux: see ``value_and_grad``.
      loss_scale: see ``value_and_grad``.
      holomorphic: see ``value_and_grad``.
      allow_int: see ``value_and_grad``.
      grad_dtype: see ``value_and_grad``.

    Returns:
      A function that returns ``grads``, or ``(grads, aux)`` with ``has_aux``.

    Raises:
      TypeError: see ``value_and_grad``.
      ValueError: see ``value_and_grad``.

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.grad(lambda x: x**2, loss_scale=jmp.StaticLossScale(1024))(3.0)
      Array(6., dtype=float32)
    """
    value_and_grad_fun = value_and_grad(
        fun,
        argnums,
        has_aux,
        loss_scale=loss_scale,
        holomorphic=holomorphic,
        allow_int=allow_int,
        grad_dtype=grad_dtype,
    )

    @functools.wraps(fun)
    def grad_fun(*args: Args.args, **kwargs: Args.kwargs) -> PyTree:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def _value_and_grad_of_arrays(
    fun: LossFn,
    *,
    argnums: int | Sequence[int],
    allow_int: bool,
    **options: bool,
) -> LossFn:
    """Like ``jax.value_and_grad``, for arguments with leaves that are not arrays."""
    differentiate = functools.partial(
        jax.value_and_grad, argnums=argnums, allow_int=allow_int, **options
    )
    of_all = differentiate(fun)
    nums = tuple(argnums) if isinstance(argnums, Sequence) else (int(argnums),)

    def has_derivative(leaf: Leaf) -> bool:
        is_bool = isinstance(leaf, bool) or (is_array(leaf) and leaf.dtype == jnp.bool_)
        is_discrete = is_bool or is_number(leaf, jnp.integer)
        return is_inexact(leaf) or (allow_int and is_discrete)

    def value_and_grad_fun(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        # Others go to JAX unchanged, which raises its own errors.
        is_valid = all(-len(args) <= i < len(args) for i in nums)
        leaves = jax.tree.leaves([args[i] for i in nums]) if is_valid else []
        if all(map(has_derivative, leaves)) or not any(
            is_array(leaf) and is_inexact(leaf) for leaf in leaves
        ):
            return of_all(*args, **kwargs)

        def or_none(leaf: Leaf) -> Leaf:
            return leaf if is_array(leaf) and has_derivative(leaf) else None

        def fun_of_arrays(*given: PyTree, **kwargs: PyTree) -> PyTree:
            whole = list(given)
            for i in nums:
                whole[i] = filled_in(given[i], args[i])
            return fun(*whole, **kwargs)

        given = list(args)
        for i in nums:
            given[i] = jax.tree.map(or_none, args[i])
        return differentiate(fun_of_arrays)(*given, **kwargs)

    return value_and_grad_fun


def filled_in(arrays: PyTree, whole: Tree) -> Tree:
    """Returns a tree of arrays with each None replaced by the leaf of another tree."""
    return jax.tree.map(
        lambda array, leaf: leaf if array is None else array,
        arrays,
        whole,
        is_leaf=lambda node: node is None,
    )


def _call(
    fun: LossFn, has_aux: bool, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[Scalar, PyTree]:
    """Returns ``(loss, aux)`` of a call; ``aux`` is None without ``has_aux``."""
    result = fun(*args, **kwargs)
    if not has_aux:
        if isinstance(result, tuple | list):
            raise TypeError(
                f"Expected fun to return a scalar loss, got a {type(result).__name__} "
                f"of {len(result)}: pass has_aux=True for a pair (loss, aux)."
            )
        return result, None
    if not isinstance(result, tuple | list) or len(result) != 2:
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise TypeError(
            "Expected fun to return a pair (loss, aux) because has_aux=True, got "
            f"{type(result).__name__}{size}."
        )
    return result[0], result[1]
