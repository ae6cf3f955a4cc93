"""Functions of nnx modules under autocast.

A module is split into its state and merged inside of the trace. Its changes are written
back to the original object, as in ``nnx.jit``. Modules are traversed as graphs, in
Flax's tree mode too, because parts of a model may share variables.
"""

import functools
from collections.abc import Callable
from typing import Any, Never, ParamSpec, TypeVar, overload

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.autocasting.interpreter import api
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.losses import set_float32_loss, with_float32_loss
from jmp_lite.casting.types import Leaf
from jmp_lite.flax.nnx_scopes import add_scopes, is_mutable, remove_scopes
from jmp_lite.jaxprs.types import Function, PyTree

Result = TypeVar("Result")
Args = ParamSpec("Args")


@overload
def autocast(
    fun: Callable[Args, Result],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[Args, Result]: ...


@overload
def autocast(
    fun: None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]: ...


def autocast(
    fun: Function | None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    **unknown: Never,
) -> Function:
    """Returns ``fun`` in mixed precision, for functions of nnx modules.

    It works like ``jmp_lite.autocast``. If ``fun`` changes a module that it receives
    (batch statistics, counts of random numbers, caches), that module changes, in
    float32.

    The path of a module is the scope of its ops. An example is
    ``"Net/blocks/0/norm/LayerNorm"``: the module ``net.blocks[0].norm`` of the class
    ``LayerNorm``, as called by the modules around it.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      **unknown: an argument of another library: an error that names this one's.

    Returns:
      The function; without ``fun``, a decorator.

    Raises:
      ValueError: the preset or the dtype is unknown.
      TypeError: ``fun`` is not a function, or an argument is unknown.
      flax.errors.TraceContextError: ``fun`` changes a module that is not an argument.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      >>> jmp_lite.nnx.autocast(model)(jnp.ones((2, 4))).dtype
      dtype('float32')
      >>> bool(abs(model.mean[0] - 0.01) < 1e-6)  # 0.99 * 0 + 0.01 * 1
      True
    """
    api.check_keywords(unknown)
    if fun is None:
        return api.Decorator(autocast, rules=rules, compute_dtype=compute_dtype)
    check_convertible(fun)
    chosen = choose_rules(rules, compute_dtype)
    called, *bound = unbind(fun)
    lifted = lift_to_states(called)

    def run_on_states(run: Callable[[Function], Function]) -> Function:
        @functools.wraps(called)
        def autocast_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with nnx.update_context(lifted):
                states = nnx.to_tree(((*bound, *args), kwargs), ctxtag=lifted)
                after = run(api.autocast(lifted, chosen()))(states)
                out, _ = nnx.from_tree(after, ctxtag=lifted, is_inner=False)
            return out

        return autocast_fun

    autocast_fun = run_on_states(lambda low: low)
    set_float32_loss(autocast_fun, run_on_states(with_float32_loss))
    return autocast_fun


def lift_to_states(fun: Function) -> Callable[[PyTree], PyTree]:
    """Returns ``fun`` as a function of states that returns the changed states, too.

    Its argument is ``nnx.to_tree((args, kwargs))``, and its result a pair: the results
    of ``fun``, and the states of its arguments.
    """

    def lifted_fun(states: PyTree) -> PyTree:
        args, kwargs = nnx.from_tree(states, ctxtag=lifted_fun, is_inner=True)
        depth = add_scopes((args, kwargs))
        out = fun(*args, **kwargs)
        inputs = jax.tree.map(_keep_mutable, (args, kwargs), is_leaf=is_mutable)
        remove_scopes((inputs, out), depth)
        return nnx.to_tree((out, inputs), ctxtag=lifted_fun)

    return lifted_fun


def unbind(fun: Function) -> tuple[Function] | tuple[Function, nnx.Pytree]:
    """Returns a function and, for a module or a bound method, the module."""
    owner = fun if isinstance(fun, nnx.Pytree) else getattr(fun, "__self__", None)
    if not isinstance(owner, nnx.Pytree):
        return (fun,)
    method = type(owner).__call__ if fun is owner else fun

    # By name: inside of the trace the module may have another class.
    @functools.wraps(method)
    def call(owner: nnx.Pytree, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, method.__name__)(*args, **kwargs)

    return call, owner


def _keep_mutable(leaf: Leaf) -> nnx.Pytree | nnx.Variable[PyTree] | None:
    return leaf if is_mutable(leaf) else None
