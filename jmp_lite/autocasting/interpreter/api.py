"""``autocast``: traces a function, and interprets it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import jax
from jax.typing import DTypeLike

from jmp_lite.autocasting.interpreter.arguments import read_function
from jmp_lite.autocasting.interpreter.interpreter import Interpreter
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.autocasting.rules.scopes import AUTOCAST_SCOPE
from jmp_lite.casting.losses import set_float32_loss
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Function, PyTree
from jmp_lite.mutables import returning_changes, write_changes

Args = ParamSpec("Args")

Result = TypeVar("Result")


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
) -> Function:
    """Returns ``fun`` in mixed precision.

    Each op of ``fun`` gets a precision: matrix products and convolutions run in the
    compute dtype, numerically sensitive ops in float32, and other ops in the precision
    of their operands. The signature does not change, and neither do the structure,
    shapes and dtypes of the results. Only values that were float32 change their dtype
    inside. Arguments in bfloat16 or float16 count as float32: ``fun`` is traced a
    second time for them. They stay in 16 bits in memory.

    Args:
      fun: a function of pytrees that JAX can trace. Arrays are traced. Other arguments
        reach ``fun`` unchanged.
      rules: the name of a preset (``"mixed"``, ``"O0"`` to ``"O3"``, ``"torch"``, ...)
        or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules. ``"half"``
        selects bfloat16 or float16 for the current device, at each call.

    Returns:
      The function; without ``fun``, a decorator.

    Raises:
      ValueError: the preset or the dtype is unknown.
      TypeError: ``fun`` is not a function, or ``rules`` has another type. In a call: an
        argument is an nnx module; use ``jmp_lite.nnx.autocast``.

    Source: PyTorch's autocast and MindSpore's ``amp.auto_mixed_precision`` choose a
    precision for each op, too.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> low = jmp.autocast(lambda x, w: jnp.tanh(x @ w))
      >>> x, w = jnp.ones((2, 4)), jnp.full((4, 4), 0.1)
      >>> low(x, w).dtype
      dtype('float32')
      >>> "bf16[2,4] = dot_general" in str(jax.make_jaxpr(low)(x, w))
      True
    """
    if fun is None:
        return functools.partial(autocast, rules=rules, compute_dtype=compute_dtype)
    check_convertible(fun)
    chosen = choose_rules(rules, compute_dtype)

    @functools.wraps(fun)
    def autocast_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(AUTOCAST_SCOPE):
            return _run(Interpreter(chosen()), fun, args, kwargs)

    @functools.wraps(fun)
    def variant(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(AUTOCAST_SCOPE):
            return _run(Interpreter(chosen()), fun, args, kwargs, has_float32_loss=True)

    set_float32_loss(autocast_fun, variant)
    return autocast_fun


def _run(
    interpreter: Interpreter,
    fun: Function,
    args: PyTree,
    kwargs: PyTree,
    has_float32_loss: bool = False,
) -> PyTree:
    """Traces a function, interprets it, and returns its results in their structure."""
    program = read_function(returning_changes(fun), args, kwargs, interpreter.rules)
    types = program.types
    if has_float32_loss:
        types = program.types_with_float32_loss()
    if program.is_unchanged:
        evaluated = structure.evaluate(program.jaxpr, program.arrays)
        results = list(map(structure.as_typed, evaluated, types))
    else:
        results = interpreter.run_function(program.jaxpr, program.arrays, types=types)
    out, changes = jax.tree.unflatten(program.treedef, results)
    write_changes(args, kwargs, changes)
    return out
