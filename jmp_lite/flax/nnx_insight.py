"""The tools that look into a function, for functions of nnx modules.

Each works like the function of the same name in ``jmp_lite``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.flax.nnx_autocast import FunctionOfStates
from jmp_lite.insight import comparison, explanation
from jmp_lite.insight import tune as search
from jmp_lite.insight import watch as watching
from jmp_lite.insight.comparison import Comparison
from jmp_lite.insight.explanation import Explanation
from jmp_lite.insight.gradients import ArgNums
from jmp_lite.insight.measured import Tuned
from jmp_lite.insight.tables import Uncalled
from jmp_lite.insight.watch import WatchedNumerics
from jmp_lite.jaxprs.trace import argument_name
from jmp_lite.jaxprs.types import Function, PyTree

Args = ParamSpec("Args")
Result = TypeVar("Result")


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

    def tool(fun: Function) -> Function:
        return explanation.explain(
            fun,
            rules,
            compute_dtype=compute_dtype,
            backward=backward,
            argnums=argnums,
        )

    return _reading("explain", fun, tool)


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

    def tool(fun: Function) -> Function:
        return comparison.compare(
            fun,
            rules,
            compute_dtype=compute_dtype,
            backward=backward,
            argnums=argnums,
            elements=elements,
        )

    return _reading("compare", fun, tool)


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

    def tool(fun: Function) -> Function:
        return search.tune(
            fun,
            rules,
            tolerance=tolerance,
            compute_dtype=compute_dtype,
            argnums=argnums,
            progress=progress,
        )

    return _reading("tune", fun, tool, f"tolerance={tolerance}")


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


class _Results(NamedTuple):
    """The result of a function, and the variables of modules that it changes."""

    out: PyTree
    changed: dict[str, PyTree]


def _reading(
    name: str, fun: Function, tool: Callable[[Function], Function], options: str = ""
) -> Function:
    """Returns what a tool returns for a function, which changes no module.

    Args:
      name: the name of the tool.
      fun: a function of pytrees and modules, a module, or a method of a module.
      tool: the tool, for functions of pytrees.
      options: see ``Uncalled``.
    """
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

    looked = tool(of_states)

    def read(*args: Any, **kwargs: Any) -> Any:
        with lifted.states(args, kwargs) as (positional, named):
            return looked(*positional, **named)

    return Uncalled(name, lifted.fun, read, options)
