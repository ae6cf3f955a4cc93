"""``autocast``: traces a function, plans it, and runs the plan."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Never, ParamSpec, TypeAlias, TypeVar, overload

import jax
from jax.typing import DTypeLike

from jmp_lite.autocasting.arguments import read_function
from jmp_lite.autocasting.binding import Casts
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.rules.match import AUTOCAST_SCOPE, unused_scopes
from jmp_lite.autocasting.rules.presets import check_convertible, choose_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.autocasting.run import Runner
from jmp_lite.casting.dtypes import hint_for, refuse_unknown
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE, Prepare, set_float32_loss
from jmp_lite.jaxprs import params, products, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.trace import refuse_shapes
from jmp_lite.jaxprs.types import Array, Aval, Function, Jaxpr, PyTree
from jmp_lite.mutables import returning_changes, write_changes

Args = ParamSpec("Args")

Result = TypeVar("Result")

Check: TypeAlias = Callable[[Jaxpr], None]
"""Looks at a traced function, and may raise an error or warn."""


class Decorator(functools.partial[Function]):
    """``autocast`` without a function: a decorator, and no context manager."""

    def __enter__(self) -> Never:
        """Raises a TypeError: what is traced inside of a block is not a function."""
        raise TypeError(
            "autocast is not a context manager: JAX traces functions, so it takes one. "
            "Decorate it, as in @jmp_lite.autocast above def loss_fn(...), or write "
            "jmp_lite.autocast(loss_fn)(...) in place of the block."
        )

    def __exit__(self, *exception: object) -> None:
        """Never runs; ``with`` looks for it before it enters."""


_NAMES_ELSEWHERE = {
    # PyTorch, Paddle, Apex, MindSpore.
    **dict.fromkeys(("dtype", "amp_dtype", "cast_dtype"), "compute_dtype"),
    **dict.fromkeys(("level", "amp_level", "opt_level"), "rules"),
    "enabled": 'rules="O0"',
}


def check_keywords(unknown: Iterable[str]) -> None:
    """Raises a TypeError for a keyword argument that ``autocast`` does not have."""
    known = ("fun", "rules", "compute_dtype")
    refuse_unknown("autocast", unknown, known, _NAMES_ELSEWHERE)


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
      **unknown: an argument of another library: an error that names this one's.

    Returns:
      The function; without ``fun``, a decorator.

    Raises:
      ValueError: the preset or the dtype is unknown.
      TypeError: ``fun`` is not a function, ``rules`` has another type, or an argument
        is unknown. In a call: an argument is an nnx module; use
        ``jmp_lite.nnx.autocast``.

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
    check_keywords(unknown)
    if fun is None:
        return Decorator(autocast, rules=rules, compute_dtype=compute_dtype)
    check_convertible(fun)
    chosen = choose_rules(rules, compute_dtype)

    return build_autocast(fun, chosen)


def build_autocast(
    fun: Function, chosen: Callable[[], Rules], check: Check | None = None
) -> Function:
    """Returns ``autocast`` of a function.

    Args:
      fun: the function.
      chosen: returns the rules of a call.
      check: receives the traced function, at each call.
    """

    @functools.wraps(fun)
    def autocast_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with jax.named_scope(AUTOCAST_SCOPE):
            return _run(chosen(), fun, args, kwargs, check)

    def prepared(prepare: Prepare) -> Function:
        inner = prepare(fun)

        @functools.wraps(fun)
        def variant(*args: PyTree, **kwargs: PyTree) -> PyTree:
            with jax.named_scope(AUTOCAST_SCOPE):
                return _run(chosen(), inner, args, kwargs, check, is_loss=True)

        return variant

    set_float32_loss(autocast_fun, prepared)
    return autocast_fun


def _run(
    rules: Rules,
    fun: Function,
    args: PyTree,
    kwargs: PyTree,
    check: Check | None,
    is_loss: bool = False,
) -> PyTree:
    """Traces a function, plans it, runs it, and returns its results in their structure.

    Args:
      rules: the rules.
      fun: the function.
      args: its arguments.
      kwargs: its keyword arguments.
      check: see ``build_autocast``.
      is_loss: whether the caller scales the first result, a loss, and differentiates.
    """
    refuse_shapes(args, kwargs, "autocast")
    program = read_function(returning_changes(fun), args, kwargs, rules)
    name = getattr(fun, "__name__", type(fun).__name__)
    warn_of_unmatched_scopes(rules, program.jaxpr, name)
    if check is not None:
        check(program.jaxpr)
    types = program.types
    if is_loss:
        warn_of_second_scale(program.jaxpr)
        # ``value_and_grad`` multiplies the loss by its scale, which float16 cannot
        # hold.
        types = program.types_with_float32_loss()
    if program.is_unchanged:
        evaluated = structure.evaluate(program.jaxpr, program.arrays)
        results = list(map(structure.as_typed, evaluated, types))
    else:
        results = run_function(rules, program.jaxpr, program.arrays, types)
    out, changes = jax.tree.unflatten(program.treedef, results)
    write_changes(args, kwargs, changes)
    return out


def run_function(
    rules: Rules,
    traced: Jaxpr,
    arrays: Sequence[Array],
    types: Sequence[Aval] = (),
    casts: type[Casts] = Casts,
) -> list[Array]:
    """Plans a traced function, runs it, and returns its results.

    Args:
      rules: the rules, with the compute dtype of a device.
      traced: its jaxpr, closed.
      arrays: its arguments. Some that were traced in float32 may have 16 bits.
      types: the types of its results; by default their traced types.
      casts: the class that casts values.
    """
    planner = Planner(rules)
    plan = planner.function(traced, list(map(structure.type_of_value, arrays)))
    return Runner(planner, casts).function(plan, arrays, types)


# ------------------------------------------------------------------------ mistakes


def warn_of_unmatched_scopes(rules: Rules, jaxpr: Jaxpr, name: str) -> None:
    """Warns of each scope rule of the user that matches no path of a function."""
    if not rules.scopes:
        return
    ops = [(path, params.op_of(eqn)) for eqn, path in equations(jaxpr)]
    names = sorted({part for path, _ in ops for part in path.split("/")})
    for pattern, earlier in unused_scopes(rules.scopes, ops):
        if earlier is None:
            source.warn(
                f"The scope rule {pattern!r} matches nothing in {name}, so it has no "
                f"effect there.{hint_for(pattern, names)} "
                "print(jmp_lite.explain(fun, rules)(...)) shows the paths.",
            )


def warn_of_second_scale(jaxpr: Jaxpr) -> None:
    """Warns of a loss that a function scales, and its caller again.

    A function that divides by the scale, too, has gradients of its own inside.
    """
    ops = {
        params.op_of(eqn)
        for eqn, path in equations(jaxpr)
        if LOSS_SCALE_SCOPE in path.split("/")
    }
    # A penalty of gradients, as in WGAN-GP, scales and divides inside of the loss.
    if "mul" in ops and "div" not in ops:
        source.warn(
            "The loss is scaled twice: the function multiplies it by a loss scale, and "
            "value_and_grad or build_train_step multiplies it again, so the gradients "
            "are too large by one scale. Return the loss without a scale.",
        )


def has_float16_product(jaxpr: Jaxpr) -> bool:
    """Whether a function computes a matrix product in float16."""
    return any(
        params.op_of(eqn) in products.PRODUCTS
        and any(structure.dtype_of(var) == "float16" for var in eqn.outvars)
        for eqn, _ in equations(jaxpr)
    )
