"""Gradients, and the tools that look into a function, for functions of nnx modules.

Each works like the function of the same name in ``jmp_lite``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.dtypes import is_array, is_inexact
from jmp_lite.casting.types import LossFn
from jmp_lite.flax.nnx_autocast import Args, FunctionOfStates, Result
from jmp_lite.insight import comparison, explanation
from jmp_lite.insight import tune as search
from jmp_lite.insight import watch as watching
from jmp_lite.insight.backward import ArgNums
from jmp_lite.insight.comparison import Comparison
from jmp_lite.insight.explanation import Explanation
from jmp_lite.insight.measured import Tuned
from jmp_lite.insight.tables import Uncalled
from jmp_lite.insight.watch import WatchedNumerics
from jmp_lite.jaxprs.trace import argument_name
from jmp_lite.jaxprs.types import Function, PyTree
from jmp_lite.scaling import backward_rules
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale
from jmp_lite.scaling.value_and_grad import build_value_and_grad, check_argnums


class _Results(NamedTuple):
    """The result of a function, and the variables of modules that it changes.

    Its fields name the results that ``compare`` and ``tune`` report.
    """

    out: PyTree
    changed: dict[str, PyTree]


def _reading(tool: Function, fun: Function, rules: Any, **options: Any) -> Function:
    """Returns what a tool returns for a function of modules, and changes no module."""
    lifted = FunctionOfStates(fun)

    def of_states(*args: PyTree, **kwargs: PyTree) -> PyTree:
        out, states = lifted.of_states((args, kwargs))
        given = set(map(id, jax.tree.leaves((args, kwargs))))
        changed = {
            argument_name(path): leaf
            for path, leaf in jax.tree.leaves_with_path(states)
            if id(leaf) not in given
        }
        return _Results(out, changed) if changed else out

    looked = tool(of_states, rules, **options)

    def read(*args: Any, **kwargs: Any) -> Any:
        with lifted.states(args, kwargs) as (positional, named):
            return looked(*positional, **named)

    needed = f"tolerance={options['tolerance']}" if "tolerance" in options else ""
    return Uncalled(tool.__name__, lifted.fun, read, needed)


def explain(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
    argnums: ArgNums = None,
) -> Callable[Args, Explanation]:
    """Returns a function that explains what ``autocast(fun, rules)`` does.

    It works like ``jmp_lite.explain``. It computes nothing and changes no module.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: the dtype of low ops; None uses the dtype of the rules.
      backward: whether to explain the backward pass too.
      argnums: which arguments it differentiates; None for all floats in modules and
        other arguments. A module that is ``fun``, or whose method it is, is number 0.

    Returns:
      A function of ``fun``'s arguments that returns an ``Explanation``.

    Raises:
      ValueError: the preset or the dtype is unknown.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> dot, *_ = jmp_lite.nnx.explain(model)(jnp.ones((2, 4))).rows
      >>> dot.scope, dot.op, dot.precision
      ('Linear', 'dot_general', 'bfloat16')
    """
    return _reading(
        explanation.explain,
        fun,
        rules,
        compute_dtype=compute_dtype,
        backward=backward,
        argnums=argnums,
    )


def compare(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
    backward: bool = False,
    argnums: ArgNums = None,
    elements: int = comparison.ELEMENTS,
) -> Callable[Args, Comparison]:
    """Returns a function that compares ``autocast(fun, rules)`` with float32.

    It works like ``jmp_lite.compare``, and changes no module. What ``fun`` changes in a
    module, such as batch statistics, is compared like a result.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the name of a preset or a ``Rules``.
      compute_dtype: a dtype that replaces the compute dtype of the rules.
      backward: whether to compare the backward pass too.
      argnums: see ``explain``.
      elements: see ``jmp_lite.compare``.

    Returns:
      A function of ``fun``'s arguments that returns a ``Comparison``.

    Raises:
      ValueError: see ``jmp_lite.compare``.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> x = jnp.linspace(-1, 1, 8).reshape(2, 4)
      >>> errors = jmp_lite.nnx.compare(model)(x).errors
      >>> list(errors), 0 < errors["result"] < 0.01
      (['result'], True)
    """
    return _reading(
        comparison.compare,
        fun,
        rules,
        compute_dtype=compute_dtype,
        backward=backward,
        argnums=argnums,
        elements=elements,
    )


def tune(
    fun: Callable[Args, PyTree],
    rules: Rules | str = "mixed",
    *,
    tolerance: float,
    compute_dtype: DTypeLike | None = None,
    argnums: ArgNums = None,
    progress: Callable[[str], None] | None = search.print_to_stderr,
) -> Callable[Args, Tuned]:
    """Returns a function that finds rules with the fewest float32 ops, on a sample.

    It works like ``jmp_lite.tune``, and changes no module. What ``fun`` changes in a
    module, such as batch statistics, is measured like a result.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      rules: the initial rules: the name of a preset or a ``Rules``.
      tolerance: the largest tolerated relative error of each result and gradient.
      compute_dtype: a dtype that replaces the compute dtype of the rules.
      argnums: see ``explain``.
      progress: a function that receives a line of text at each step; None for none.

    Returns:
      A function of ``fun``'s arguments that returns ``(rules, report)``.

    Raises:
      TypeError: see ``jmp_lite.tune``.
      ValueError: see ``jmp_lite.tune``.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite.nnx
      >>> model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
      >>> quiet = lambda line: None
      >>> tuned = jmp_lite.nnx.tune(model, tolerance=0.1, progress=quiet)
      >>> rules, report = tuned(jnp.linspace(-1, 1, 8).reshape(2, 4))
      >>> report.kept
      ()
    """
    return _reading(
        search.tune,
        fun,
        rules,
        tolerance=tolerance,
        compute_dtype=compute_dtype,
        argnums=argnums,
        progress=progress,
    )


def watch(
    fun: Callable[Args, Result],
    dtype: DTypeLike = "float16",
    elements: int | None = None,
) -> Callable[Args, tuple[Result, WatchedNumerics]]:
    """Returns a function that also counts the numbers which each op of ``fun`` makes.

    It works like ``jmp_lite.watch``. What ``fun`` changes in a module changes, as
    without ``watch``. To watch the backward pass, too, watch the gradient:
    ``watch(nnx.value_and_grad(autocast(loss_fn)))(model, x)``.

    Args:
      fun: a function of pytrees and modules, a module, or a method of a module.
      dtype: see ``jmp_lite.watch``.
      elements: see ``jmp_lite.watch``.

    Returns:
      A function of ``fun``'s arguments that returns ``(fun(...), stats)``.

    Raises:
      ValueError: see ``jmp_lite.watch``.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import jmp_lite.nnx
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> loss_fn = lambda model, x: jnp.log(model(x) - 10).sum()
      >>> grad_fn = nnx.value_and_grad(loss_fn)
      >>> _, stats = jmp.nnx.watch(grad_fn)(model, jnp.ones((4, 2)))
      >>> jmp.first_nonfinite(stats).op
      'log'
    """
    lifted = FunctionOfStates(fun)
    watched_states = watching.watch(lifted.of_states, dtype, elements)

    def watched(
        *args: Args.args, **kwargs: Args.kwargs
    ) -> tuple[Result, WatchedNumerics]:
        with lifted.states(args, kwargs) as states:
            after, stats = watched_states(states)
            return lifted.write_back(after), stats

    return Uncalled("watch", lifted.fun, watched)


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
        # The tree mode would differentiate a count or a key, too.
        for i in argnums if isinstance(argnums, tuple | list) else (argnums,):
            given = args[i] if isinstance(i, int) and i < len(args) else None
            for path, leaf in jax.tree.leaves_with_path(given):
                if is_array(leaf) and not is_inexact(leaf):
                    place = f"{leaf.dtype} at {jax.tree_util.keystr(path)}"
                    raise TypeError(f"Argument {i} holds {place}, {_NO_GRADIENT}")
        return found(*args, **kwargs)

    return value_and_grad_fun


_NO_GRADIENT = (
    "which has no gradient. In Flax's tree mode, every array of an argument is "
    "differentiated. Split the model by graphdef, params, rest = nnx.split(model, "
    "nnx.Param, ...). Differentiate a function of params and rest that calls "
    "nnx.merge(graphdef, params, rest): its changes in rest change the model."
)


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
