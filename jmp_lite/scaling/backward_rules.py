"""Hands true cotangents to backward rules that a loss scale would change.

A ``custom_vjp`` may clip its cotangent, take its sign or normalise it, as gradient
clipping inside a network does. Under a loss scale the cotangent is 2**15 times too
large, and clipped where it should not be. So the cotangent is divided by the scale
before such a rule, and its results are multiplied with the scale after it, in float32.
Other rules run as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_lite.autocasting.marks import as_full
from jmp_lite.autocasting.passes import homogeneity
from jmp_lite.casting.dtypes import is_traceable
from jmp_lite.casting.types import PyTree
from jmp_lite.jaxprs import params, sharding, source, structure, trace
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr
from jmp_lite.mutables import returning_changes, write_changes
from jmp_lite.scaling.loss_scale import LossScale, NoOpLossScale


def with_true_cotangents(fun: Function, loss_scale: LossScale) -> Function:
    """Returns a function whose backward rules do not notice a loss scale.

    Args:
      fun: a function of pytrees, whose loss is scaled.
      loss_scale: the scale.
    """
    if isinstance(loss_scale, NoOpLossScale):
        return fun

    @functools.wraps(fun)
    def unscaling(*args: PyTree, **kwargs: PyTree) -> PyTree:
        changing = returning_changes(fun)
        made: list[Any] = []

        def arrays_of(*args: PyTree, **kwargs: PyTree) -> list[Array]:
            results, treedef = jax.tree.flatten(changing(*args, **kwargs))
            others = [None if is_traceable(leaf) else leaf for leaf in results]
            made[:] = [treedef, others]
            return list(filter(is_traceable, results))

        try:
            traced = trace.trace_function(arrays_of, args, kwargs)
        except Exception:
            # Outside of jit it may branch on numbers. An error of its own comes again.
            return fun(*args, **kwargs)
        out = iter(_Unscaling(loss_scale).run(traced.jaxpr, traced.arrays))
        treedef, others = made
        results = [next(out) if other is None else other for other in others]
        result, changes = jax.tree.unflatten(treedef, results)
        write_changes(args, kwargs, changes)
        return result

    return unscaling


class _Unscaling:
    """Runs a jaxpr with cotangents unscaled where a rule needs it.

    Args:
      loss_scale: the scale.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self._scale = loss_scale
        # Jaxprs and equations are compared by identity.
        self._has_culprit = functools.cache(self._look_for_culprit)
        self._culprit = functools.cache(homogeneity.culprit_of)

    def run(self, jaxpr: Jaxpr, arrays: Sequence[Array]) -> list[Array]:
        """Returns the results of a closed jaxpr."""
        if not self._has_culprit(jaxpr):
            return structure.evaluate(jaxpr, arrays)
        parts = structure.parts(jaxpr)
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, arrays, strict=True))

        for eqn in parts.eqns:
            with source.context_of(eqn):
                operands = [trace.read(env, atom) for atom in eqn.invars]
                results = self._equation(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return [trace.read(env, atom) for atom in parts.outvars]

    def _look_for_culprit(self, jaxpr: Jaxpr) -> bool:
        return any(map(self._is_concerned, structure.parts(jaxpr).eqns))

    def _is_concerned(self, eqn: Eqn) -> bool:
        if params.op_of(eqn) == "custom_vjp_call":
            return self._culprit(eqn) is not None
        if params.op_of(eqn) == "shard_map":  # A rule may need its axes.
            inside = equations(params.body_of(eqn))
            return any(params.op_of(one) == "custom_vjp_call" for one, _ in inside)
        return any(map(self._has_culprit, params.inner_jaxprs(eqn)))

    def _equation(self, eqn: Eqn, operands: list[Array]) -> Sequence[Array]:
        if not self._is_concerned(eqn):
            return params.bind(eqn, operands)
        op = params.op_of(eqn)
        if op == "custom_vjp_call":
            scaled = [self._passed(_scaled_back, x) for x in operands]
            results = params.bind(eqn, scaled)
            return [self._passed(_unscaled_back, x) for x in results]
        if op in params.REMAT:
            inner = params.body_of(eqn)
            types = list(map(structure.type_of_value, operands))
            run = self._function(inner)
            return params.bind_remat(eqn, operands, structure.trace(run, types, inner))
        if params.is_call(eqn):
            return self.run(params.body_of(eqn), operands)
        if op == "cond":
            branches = [*map(self._function, params.branches_of(eqn))]
            return lax.switch(operands[0], branches, *operands[1:])
        if op == "scan":
            return self._scan(eqn, operands)
        if op == "shard_map":
            return self._shard_map(eqn, operands)
        if op != "while":  # It has no derivative in reverse.
            self._warn(eqn)
        return params.bind(eqn, operands)

    def _passed(self, fun: Callable[[Array, LossScale], Array], x: Array) -> Array:
        """Returns an array with another cotangent; one of integers has none."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        # Marked: float16 has no room for the true cotangent under autocast.
        return fun(as_full(x) if x.dtype == jnp.float32 else x, self._scale)

    def _function(self, jaxpr: Jaxpr) -> Callable[..., list[Array]]:
        return lambda *arrays: self.run(jaxpr, arrays)

    def _scan(self, eqn: Eqn, operands: list[Array]) -> list[Array]:
        loop = params.loop_of(eqn)
        consts, xs = operands[: loop.n_consts], operands[loop.carries.stop :]

        def step(
            carry: list[Array], xs: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            out = self.run(loop.body, [*consts, *carry, *xs])
            return out[: loop.n_carry], out[loop.n_carry :]

        options = params.scan_options(eqn)
        carry, ys = lax.scan(step, operands[loop.carries], xs, **options)
        return [*carry, *ys]

    def _shard_map(self, eqn: Eqn, operands: list[Array]) -> list[Array]:
        call, body = sharding.shard_map_of(eqn), params.body_of(eqn)
        numbers, treedef = jax.tree.flatten(self._scale)

        def run(*arrays: Array) -> list[Array]:
            inside = treedef.unflatten(arrays[: len(numbers)])
            return _Unscaling(inside).run(body, arrays[len(numbers) :])

        specs = (*[jax.P()] * len(numbers), *call.in_specs)
        return call.map(run, specs, call.out_specs)(*numbers, *operands)

    def _warn(self, eqn: Eqn) -> None:
        """Warns of a rule in an op that cannot run in another way."""
        for inner in params.inner_jaxprs(eqn):
            for each in structure.parts(inner).eqns:
                if not self._is_concerned(each):
                    continue
                if params.op_of(each) != "custom_vjp_call":
                    self._warn(each)
                    continue
                rule = homogeneity.describe(each, self._culprit(each) or each)
                source.warn(
                    f"The gradient is wrong under a loss scale: {rule}, and receives "
                    "its cotangent times the scale, inside of an op that has a "
                    "derivative rule, too. Divide the cotangent by the scale in the "
                    "rule, or call the function outside of that op."
                )


@jax.custom_vjp
def _scaled_back(x: Array, loss_scale: LossScale) -> Array:
    """Returns ``x``; its cotangent is multiplied by the scale."""
    del loss_scale
    return x


@jax.custom_vjp
def _unscaled_back(x: Array, loss_scale: LossScale) -> Array:
    """Returns ``x``; its cotangent is divided by the scale."""
    del loss_scale
    return x


def _forward(x: Array, loss_scale: LossScale) -> tuple[Array, LossScale]:
    return x, loss_scale


_scaled_back.defvjp(_forward, lambda scale, g: (scale.scale(g).astype(g.dtype), None))
_unscaled_back.defvjp(
    _forward, lambda scale, g: (scale.unscale(g).astype(g.dtype), None)
)
