"""Gradients of nnx modules under a loss scale, and steps that change nothing."""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import is_array, is_inexact
from jmp_lite.casting.types import (
    Array,
    Dtype,
    Leaf,
    LossFn,
    Path,
    PyTree,
    Tree,
)
from jmp_lite.flax.nnx_autocast import (
    Args,
    FunctionOfStates,
    Result,
    check_model,
    is_mutable,
)
from jmp_lite.scaling import backward_rules
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale
from jmp_lite.scaling.skipping import LossScalingState, select_tree
from jmp_lite.scaling.value_and_grad import build_value_and_grad, check_argnums


def value_and_grad(
    fun: Callable[Args, Result],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale,
    grad_dtype: DTypeLike = "float32",
) -> Callable[Args, tuple[Result, PyTree]]:
    """Returns a function that computes ``fun`` and its gradient under a loss scale.

    It works like ``jmp_lite.value_and_grad``, through ``flax.nnx.value_and_grad``. The
    loss is scaled before the backward pass, and the gradients are unscaled in float32
    after it. Changes that ``fun`` makes in a module are kept.

    Args:
      fun: a function that returns a scalar loss, or ``(loss, aux)`` with ``has_aux``.
      argnums: which arguments to differentiate: numbers, or a ``nnx.DiffState``.
      has_aux: whether ``fun`` returns ``(loss, aux)``.
      loss_scale: the scale of this step, such as
        ``get_loss_scale(optimizer.opt_state)``.
      grad_dtype: the dtype of the gradients: ``"float32"`` or ``"bfloat16"``.

    Returns:
      A function of ``fun``'s arguments that returns ``(loss, grads)``, or
      ``((loss, aux), grads)`` with ``has_aux``. ``grads`` is the result of
      ``nnx.value_and_grad``, in ``grad_dtype``.

    Raises:
      TypeError: ``loss_scale`` is missing, or not a ``LossScale``; ``fun`` does not
        return a pair although ``has_aux`` is True; or, in Flax's tree mode, an argument
        to differentiate holds counts or keys.
      ValueError: ``grad_dtype`` is another dtype.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> @jmp.nnx.autocast(compute_dtype="float16")
      ... def loss_fn(model, x):
      ...     return model(x).sum()
      >>> scale = jmp.StaticLossScale(1024)
      >>> grad_fn = jmp.nnx.value_and_grad(loss_fn, loss_scale=scale)
      >>> loss, grads = grad_fn(model, jnp.ones((8, 2)))
      >>> grads.bias[...]
      Array([8.], dtype=float32)
    """
    check_argnums(argnums)
    transform = functools.partial(nnx.value_and_grad, argnums=argnums)
    found = build_value_and_grad(
        transform, fun, loss_scale, has_aux, grad_dtype, _with_true_cotangents
    )
    # Flax reads its mode at the transformation of a function, not at its call.
    is_graph = nnx.set_graph_mode.current_value()
    if is_graph and nnx.set_graph_updates.current_value():
        return found

    @functools.wraps(fun)
    def value_and_grad_fun(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Result, PyTree]:
        _check_differentiable(args, argnums)
        return found(*args, **kwargs)

    return value_and_grad_fun


def _with_true_cotangents(fun: LossFn, loss_scale: LossScale) -> LossFn:
    """Like ``backward_rules.with_true_cotangents``, for functions of modules."""
    if isinstance(loss_scale, NoOpLossScale):
        return fun
    lifted = FunctionOfStates(fun)
    of_arrays = backward_rules.with_true_cotangents(fun, loss_scale)
    of_states = backward_rules.with_true_cotangents(lifted.of_states, loss_scale)

    @functools.wraps(fun)
    def unscaling(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # The function inside of nnx.autocast takes the states of modules already.
        if any(map(_is_state, jax.tree.leaves((args, kwargs), is_leaf=_is_state))):
            return of_arrays(*args, **kwargs)
        with lifted.states(args, kwargs) as states:
            return lifted.write_back(of_states(states))

    return unscaling


def _is_state(node: PyTree) -> bool:
    return isinstance(node, nnx.extract.NodeStates)


def _check_differentiable(
    args: tuple[PyTree, ...],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState],
) -> None:
    """Raises if Flax's tree mode would differentiate a count or a key."""
    for i in argnums if isinstance(argnums, tuple | list) else (argnums,):
        given = args[i] if isinstance(i, int) and i < len(args) else None
        for path, leaf in jax.tree.leaves_with_path(given):
            if is_array(leaf) and not is_inexact(leaf):
                raise TypeError(
                    f"Argument {i} holds {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)}, which has no gradient. In Flax's "
                    "tree mode, every array of an argument is differentiated. Split "
                    "the model by graphdef, params, rest = nnx.split(model, "
                    "nnx.Param, ...). Differentiate a function of params and rest "
                    "that calls nnx.merge(graphdef, params, rest): its changes in "
                    "rest change the model."
                )


@contextlib.contextmanager
def restore_if_skipped(model: PyTree, optimizer: nnx.Optimizer[Any]) -> Generator[None]:
    """Restores the statistics of a model if the optimizer skips the step.

    ``loss_scaling`` and ``skip_nonfinite`` keep the parameters if a gradient is not
    finite. But the forward pass of that step has already changed the model: one batch
    with a NaN would leave NaN in the averages of BatchNorm.

    If a gradient is not finite, the variables of the model return to their values at
    the start of the ``with`` block, bit for bit. Two kinds of variables are not
    restored: those of a type that the optimizer updates, and random number state
    (``nnx.RngState``), which continues.

    The block may change the structure of the model, as ``Module.sow`` and ``nnx.pop``
    do. A structure cannot depend on a traced value, so it is the same whether the step
    is skipped or not: new variables stay, with their new values, and popped ones stay
    away. Inside of a variable, each array with its old place, shape and dtype returns
    to its old value.

    Args:
      model: a module, or a tuple, list or dictionary of modules, such as a generator
        and a discriminator that one loss runs.
      optimizer: the optimizer that the block updates, with ``loss_scaling`` or
        ``skip_nonfinite`` in it. If it contains several, all gradients have to be
        finite.

    Returns:
      A context manager, for use inside or outside of ``nnx.jit``.

    Raises:
      TypeError: ``model`` contains something other than nnx modules, or ``optimizer``
        is not an ``nnx.Optimizer``.
      ValueError: the optimizer never skips a step.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> import optax
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> transformation = jmp.skip_nonfinite(optax.sgd(0.1))
      >>> optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
      >>> nan = jnp.full((4, 2), jnp.nan)
      >>> with jmp.nnx.restore_if_skipped(model, optimizer):
      ...     grads = nnx.grad(lambda model: model(nan).sum())(model)
      ...     _ = optimizer.update(model, grads)
      >>> model.mean[...]
      Array([0., 0.], dtype=float32)
    """
    models = jax.tree.leaves(model, is_leaf=is_mutable) or [model]
    for each in models:
        check_model(each)
    if not isinstance(optimizer, nnx.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected an nnx.Optimizer, got {type(optimizer).__name__}.")
    _grads_finite(optimizer)  # Raises if it never skips a step.
    goes_on = nnx.Any(optimizer.wrt, nnx.RngState)
    before = _variables_by_place(models, goes_on)
    # The block may put another variable in the place of one, or move one.
    old_of = {id(variable): variable.get_value() for variable in before.values()}
    old_at = {place: old_of[id(variable)] for place, variable in before.items()}
    yield
    is_finite = _grads_finite(optimizer)
    for place, variable in _variables_by_place(models, goes_on).items():
        new = variable.get_value()
        old = old_of.get(id(variable), old_at.get(place, new))
        variable.set_value(_restored(is_finite, new, old))


def _variables_by_place(
    models: list[nnx.Module], excluded: Callable[[Path, nnx.Variable[PyTree]], bool]
) -> dict[tuple[int, Path], nnx.Variable[PyTree]]:
    """Returns the variables of models, except some, by model and path."""
    return {
        (number, path): variable
        for number, model in enumerate(models)
        for path, variable in nnx.iter_graph(model, graph=True)
        if isinstance(variable, nnx.Variable) and not excluded(path, variable)
    }


def _restored(is_finite: Array, new: Tree, old: PyTree) -> Tree:
    """Returns ``new``; on a skipped step, with the arrays of ``old`` that fit it."""
    before = dict(jax.tree.leaves_with_path(old))

    def restore(path: Path, leaf: Leaf) -> Leaf:
        was = before.get(path, leaf)
        is_alike = _shape_and_dtype(leaf) == _shape_and_dtype(was) is not None
        return select_tree(is_finite, leaf, was) if is_alike else leaf

    return jax.tree.map_with_path(restore, new)


def _shape_and_dtype(leaf: Leaf) -> tuple[tuple[int, ...], Dtype] | None:
    """Returns None for a leaf that is neither an array nor a number."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = jnp.asarray(leaf)
    return (leaf.shape, leaf.dtype) if is_array(leaf) else None


def _grads_finite(optimizer: nnx.Optimizer[Any]) -> Array:
    """Returns whether the gradients of the optimizer's last step were finite."""

    def is_state(node: PyTree) -> TypeGuard[LossScalingState]:
        return isinstance(node, LossScalingState)

    leaves = jax.tree.leaves(optimizer.opt_state, is_leaf=is_state)
    # Each array is in a Flax variable.
    checks = jax.tree.leaves([x.grads_finite for x in leaves if is_state(x)])
    if not checks:
        raise ValueError(
            "Expected an nnx.Optimizer that skips steps: wrap its transformation in "
            "loss_scaling(...) or skip_nonfinite(...)."
        )
    return functools.reduce(jnp.logical_and, checks)
