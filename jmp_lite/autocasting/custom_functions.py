"""Runs functions with derivative or batching rules of their own.

The function and its rules run as planned inside. They see the dtypes of their traces.
JAX traces a rule after the program has run, so it is planned then.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from jmp_lite.autocasting.binding import Value
from jmp_lite.autocasting.decide.decisions import Plan, Site, Step
from jmp_lite.autocasting.decide.facts import Facts, Kind, Readers, Spec
from jmp_lite.casting.types import Leaf
from jmp_lite.jaxprs import custom_rules, params, structure
from jmp_lite.jaxprs.types import (
    Array,
    Aval,
    Function,
    Jaxpr,
    PyTree,
    Tangent,
)

if TYPE_CHECKING:
    from jmp_lite.autocasting.run import Runner


def run(runner: "Runner", step: Step, operands: Sequence[Value]) -> list[Array]:
    """Binds a function with rules of its own, which run as planned inside.

    Args:
      runner: runs plans.
      step: the plan of the equation.
      operands: its operands.
    """
    (plan,) = step.inside
    arrays = runner.arrays(operands, plan.input_specs)
    binds = {
        "custom_jvp_call": _bind_jvp,
        "custom_vjp_call": _bind_vjp,
        "custom_vmap_call": _bind_vmap,
        "remat_opt": _bind_remat_opt,
    }
    return binds[params.op_of(step.eqn)](runner, step, plan, arrays)


def _bind_jvp(
    runner: "Runner", step: Step, plan: Plan, arrays: Sequence[Array]
) -> list[Array]:
    """Binds a function with a ``jvp`` rule."""
    inside, specs = runner.converted(plan), plan.result_specs

    def replace(fun: Function, jvp: Function) -> tuple[Function, Function]:
        del fun  # It evaluates the jaxpr.

        def low_fun(*arrays: Array) -> list[Array]:
            return structure.evaluate(inside.jaxpr, arrays)

        # What reads a tangent is not known: ``_Rule`` expects such results first.
        def tangents_first(*arrays: Array) -> list[Tangent]:
            out = jvp(*arrays)
            return [*out[len(specs) :], *out[: len(specs)]]

        def low_jvp(*arrays: Array) -> list[Array]:
            tangents = [spec._replace(kind=Kind.COMPUTED) for spec in plan.input_specs]
            types = list(map(structure.type_of, plan.parts.invars))
            avals = [*types, *(aval.to_tangent_aval() for aval in types)]
            # The results have the readers that they have without the derivative.
            site = step.site._replace(is_in_rule=True)
            rule = _Rule(tangents_first, avals, plan.jaxpr, site)
            out = rule.run(runner, arrays, [*plan.input_specs, *tangents])
            out = [
                _cast_result(runner, o, s)
                for o, s in zip(out, 2 * [*specs], strict=True)
            ]
            return [*out[len(specs) :], *out[: len(specs)]]

        return low_fun, low_jvp

    return custom_rules.bind_custom(step.eqn, arrays, replace)


def _bind_vjp(
    runner: "Runner", step: Step, plan: Plan, arrays: Sequence[Array]
) -> list[Array]:
    """Binds a ``custom_vjp`` to its operands, with its functions converted."""

    def replace(
        fun: Function, fwd: Function, bwd: Function
    ) -> tuple[Function, Function, Function]:
        del fun  # It evaluates the jaxpr.
        return _LowVjp(runner, step, plan, fwd, bwd).functions()

    return custom_rules.bind_custom(step.eqn, arrays, replace)


class _LowVjp:
    """The three functions of a custom_vjp in mixed precision.

    Residuals are saved in the dtype that they have in the forward pass.

    Args:
      runner: runs plans.
      step: the plan of the equation.
      plan: that of its function.
      fwd: the user's forward function.
      bwd: the user's backward function.
    """

    def __init__(
        self, runner: "Runner", step: Step, plan: Plan, fwd: Function, bwd: Function
    ) -> None:
        self._runner = runner
        self._eqn = step.eqn
        # JAX transposes neither of them.
        self._site = step.site._replace(is_in_rule=False)
        self._plan = plan
        self._inside = runner.converted(plan).jaxpr
        self._fwd = fwd
        self._bwd = bwd
        # For each residual that is not an operand: its spec, or None for a number.
        self._computed: list[Spec | None] = []

    def functions(self) -> tuple[Function, Function, Function]:
        """Returns the function, its forward function and its backward function."""
        return self._function, self._forward, self._backward

    def _function(self, *arrays: Array) -> list[Array]:
        return structure.evaluate(self._inside, arrays)

    def _forward(self, *args: Leaf) -> list[Array]:
        """Runs ``fwd`` on operands, each followed by whether it is differentiated."""
        n_out = len(self._plan.result_specs)

        def flat(*arrays: Array) -> list[Leaf]:
            pairs = zip(arrays, args[1::2], strict=True)
            out = self._fwd(*(item for pair in pairs for item in pair))
            n_kept = len(out) - n_out
            # Equinox branches on a flag among the residuals, which a trace would hide.
            kept = [
                _PythonNumber(item) if isinstance(item, _NUMBERS) else item
                for item in out[:n_kept]
            ]
            return [*kept, *out[n_kept:]]

        avals = list(map(structure.type_of, self._plan.parts.invars))
        rule = _Rule(flat, avals, self._plan.jaxpr, self._site)
        out = rule.run(self._runner, args[::2], self._plan.input_specs)
        kept, results = out[: len(out) - n_out], out[len(out) - n_out :]
        self._computed = [
            one.facts.spec._replace(kind=Kind.COMPUTED)
            if isinstance(one, Value)
            else None
            for one in kept
        ]
        arrays = [one.array if isinstance(one, Value) else one.number for one in kept]
        return arrays + self._runner.arrays(results, self._plan.result_specs)

    def _backward(self, *args: Leaf) -> PyTree:
        """Runs ``bwd`` on residuals and cotangents."""
        forwarded = custom_rules.forwarded_residuals(self._eqn, len(self._computed))
        fresh, operands = iter(self._computed), self._plan.input_specs
        # A residual that is an operand has the operand's dtype: JAX passes it on.
        kept = [next(fresh) if i is None else operands[i] for i in forwarded]
        cotangents = [
            spec._replace(kind=Kind.COMPUTED) for spec in self._plan.result_specs
        ]
        # Python numbers are not traced, because bwd may branch on them.
        pairs = list(zip(args, [*kept, *cotangents], strict=True))
        arrays = [arg for arg, spec in pairs if spec is not None]
        specs = [spec for _, spec in pairs if spec is not None]
        trees: list[PyTree] = []

        def flat(*arrays: Array) -> list[Array]:
            left = iter(arrays)
            every = [arg if spec is None else next(left) for arg, spec in pairs]
            leaves, tree = jax.tree.flatten(self._bwd(*every), structure.is_zero)
            trees[:] = [tree]
            return leaves

        types = list(map(_type_as_traced, arrays, specs))
        # What reads a gradient is not known.
        site = self._site._replace(readers=())
        rule = _Rule(flat, types, self._plan.jaxpr, site)
        grads = rule.run(self._runner, arrays, specs)
        # JAX appends the logs of a backward pass to the gradients.
        grads[: len(operands)] = [
            _cast_result(self._runner, grad, spec)
            for grad, spec in zip(grads, operands, strict=False)
        ]
        rest = [v.array if isinstance(v, Value) else v for v in grads]
        return jax.tree.unflatten(trees[0], rest)


def _bind_vmap(
    runner: "Runner", step: Step, plan: Plan, arrays: Sequence[Array]
) -> list[Array]:
    """Binds a function with a rule for ``vmap``."""

    def low_rule(batched: Function, *arrays: Array) -> list[Array]:
        types = list(map(_type_as_traced, arrays, plan.input_specs))
        site = step.site._replace(readers=())  # Its results may have any readers.
        out = _Rule(batched, types, plan.jaxpr, site).run(
            runner, arrays, plan.input_specs
        )
        return runner.arrays(out, plan.result_specs)

    inside = runner.converted(plan).jaxpr
    return custom_rules.bind_custom_vmap(step.eqn, arrays, inside, low_rule)


def _bind_remat_opt(
    runner: "Runner", step: Step, plan: Plan, arrays: Sequence[Array]
) -> list[Array]:
    """Binds the forward function of a ``custom_vjp`` with ``optimize_remat``."""

    def replace(function: Jaxpr, n_consts: int, n_residuals: int) -> Jaxpr:
        site = step.site._replace(readers=step.site.readers[n_residuals:])
        specs, operands = plan.result_specs[n_residuals:], step.operands[n_consts:]
        body = runner.planner.body(function, operands, site, specs)
        return runner.converted(body).jaxpr

    inside = runner.converted(plan).jaxpr
    return custom_rules.bind_remat_opt(step.eqn, arrays, inside, replace)


def _type_as_traced(array: Array, spec: Spec) -> Aval:
    aval = structure.type_of_value(array)
    return aval if spec.state is None else structure.retyped(aval, "float32")


class _Rule(NamedTuple):
    """A function of a derivative or batching rule.

    Attributes:
      fun: a function of arrays and symbolic zeros that returns a list.
      avals: the types for which it was written.
      like: the jaxpr that it belongs to.
      site: its site, with the readers of its last results; the results before may have
        any readers.
    """

    fun: Function
    avals: Sequence[Aval]
    like: Jaxpr
    site: Site

    def run(
        self, runner: "Runner", arrays: Sequence[Array], specs: Sequence[Spec]
    ) -> list[Leaf]:
        """Traces the function with its types, and runs it as planned.

        Symbolic zeros and items that are not arrays pass unchanged, in both directions.

        Args:
          runner: runs plans.
          arrays: its arguments.
          specs: their specs.

        Returns:
          A ``Value`` for each array that the function returns; other items unchanged.
        """
        are_zeros = list(map(structure.is_symbolic_zero, arrays))
        # A rule with ``symbolic_zeros=True`` asks whether an argument is such a zero.
        live = [i for i, is_zero in enumerate(are_zeros) if not is_zero]
        others: list[Leaf] = []

        def traced(*arrays_of_live: Array) -> list[Array]:
            full = [
                type(array)(structure.retyped(array.aval, aval.dtype))
                if is_zero
                else None
                for array, aval, is_zero in zip(
                    arrays, self.avals, are_zeros, strict=True
                )
            ]
            for i, array in zip(live, arrays_of_live, strict=True):
                full[i] = array
            out = list(self.fun(*full))
            others[:] = [None if _is_array(item) else item for item in out]
            return [item for item in out if _is_array(item)]

        jaxpr = structure.trace(traced, [self.avals[i] for i in live], self.like)
        n_before = len(structure.parts(jaxpr).outvars) - len(self.site.readers)
        readers = [*[Readers.OTHER] * n_before, *self.site.readers]
        inputs = [Facts.of(specs[i]) for i in live]
        plan = runner.planner.plan(jaxpr, inputs, self.site._replace(readers=readers))
        results = iter(runner.run(plan, [arrays[i] for i in live]))
        return [next(results) if item is None else item for item in others]


def _cast_result(runner: "Runner", item: Leaf, spec: Spec) -> Leaf:
    if isinstance(item, Value):
        return runner.casts.as_spec(item, spec)
    if not structure.is_zero(item) or spec.state is None:
        return item
    dtype = spec.dtype(runner.casts.low_dtype)
    return type(item)(structure.retyped(item.aval, dtype))


_NUMBERS = bool | int | float | complex


class _PythonNumber(NamedTuple):
    """A Python number among residuals, on which the backward function may branch."""

    number: complex


def _is_array(item: Leaf) -> bool:
    """Whether an item is an array or a typed number, not a symbolic zero."""
    if structure.is_tracer(item):  # Of any type: some have no dtype.
        return True
    return hasattr(item, "dtype") and not structure.is_zero(item)
