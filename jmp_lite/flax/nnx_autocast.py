"""``jmp_lite.nnx.autocast``: functions of nnx modules in mixed precision."""

import functools
from collections.abc import Callable
from typing import Never, ParamSpec, TypeVar, overload

from jax.typing import DTypeLike

from jmp_lite.autocasting.interpreter import api
from jmp_lite.autocasting.rules.presets import choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.losses import set_float32_loss, with_float32_loss
from jmp_lite.flax.nnx_write_back import FunctionOfStates
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
    lifted = FunctionOfStates(fun)
    chosen = choose_rules(rules, compute_dtype)

    def run_on_states(run: Callable[[Function], Function]) -> Function:
        @functools.wraps(lifted.fun)
        def autocast_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with lifted.states(args, kwargs) as states:
                low = run(api.autocast(lifted.of_states, chosen()))
                return lifted.write_back(low(states))

        return autocast_fun

    autocast_fun = run_on_states(lambda low: low)
    set_float32_loss(
        autocast_fun,
        lambda prepare: run_on_states(lambda low: with_float32_loss(low, prepare)),
    )
    return autocast_fun
