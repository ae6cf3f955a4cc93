"""A function run as it is, with the numbers of all its ops counted beside it.

The law of this file: results and derivatives are those of the function; what is counted
is taken from where it is, and adds up over the steps of loops.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting import compat
from jmp_lite.casting.counting import added, counted, nothing
from jmp_lite.casting.dtypes import is_floating


class Op(NamedTuple):
    """An op, and where it stands."""

    scope: str
    op: str
    source: str


class Watcher:
    """Runs jaxprs and counts the numbers of all results.

    Args:
      dtype: what the numbers might be held in.

    Attributes:
      ops: what was run, in order.
      counts: the counts of each.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self.ops: list[Op] = []
        self.counts: list[dict[str, Any]] = []

    def run(self, jaxpr: Any, arrays: Sequence[Any], path: str) -> list[Any]:
        """Returns the results of a jaxpr."""
        parts = compat.parts(jaxpr)
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, arrays, strict=True))
        for eqn in parts.eqns:
            operands = [compat.read(env, atom) for atom in eqn.invars]
            with compat.context_of(eqn):
                results = self._equation(eqn, operands, path)
            env.update(zip(eqn.outvars, results, strict=True))
        return [compat.read(env, atom) for atom in parts.outvars]

    def _equation(self, eqn: Any, operands: Sequence[Any], path: str) -> list[Any]:
        name, inside = eqn.primitive.name, compat.path_of(eqn, path)
        if name in compat.CALLS:
            return self.run(eqn.params["jaxpr"], operands, inside)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            # Its own derivative is kept; what is inside is run once more, to be seen.
            seen = [lax.stop_gradient(array) for array in operands]
            self.run(eqn.params["call_jaxpr"], seen, inside)
            return compat.bind_custom(eqn, list(operands), lambda *funs: funs)
        if name == "scan":
            return self._scan(eqn, operands, inside)
        if name == "while":
            return self._while(eqn, operands, inside)
        if name == "cond":
            return self._cond(eqn, operands, inside)
        results = compat.bind(eqn, operands)
        self._note(eqn, operands, results, path)
        return results

    def _note(
        self, eqn: Any, operands: Sequence[Any], results: Sequence[Any], path: str
    ) -> None:
        floats = [lax.stop_gradient(x) for x in results if _is_counted(x)]
        if not floats:
            return
        counts = functools.reduce(
            added, [counted(array, self._dtype) for array in floats]
        )
        given = [jnp.all(jnp.isfinite(x)) for x in operands if _is_counted(x)]
        was_finite = functools.reduce(jnp.logical_and, given, jnp.array(True))
        is_broken = counts["nan"] + counts["inf"] > 0
        counts["is_first"] = (is_broken & was_finite).astype(jnp.float32)
        counts["elements"] = jnp.float32(sum(array.size for array in floats))
        scope = compat.join(path, *compat.scopes(eqn))
        self.ops.append(Op(scope, eqn.primitive.name, compat.source(eqn)))
        self.counts.append(counts)

    def _inside(
        self, jaxpr: Any, arrays: Sequence[Any], path: str
    ) -> tuple[list[Any], list[dict[str, Any]], list[Op]]:
        """Returns the results of a jaxpr and what was counted, not yet noted."""
        inner = Watcher(self._dtype)
        return inner.run(jaxpr, arrays, path), inner.counts, inner.ops

    def _ops_of(self, jaxpr: Any, path: str) -> list[Op]:
        avals = [var.aval for var in compat.parts(jaxpr).invars]
        found: list[Op] = []

        def look(*arrays: Any) -> Any:
            results, _, ops = self._inside(jaxpr, arrays, path)
            found[:] = ops
            return results

        jax.make_jaxpr(look)(*avals)
        return found

    def _scan(self, eqn: Any, operands: Sequence[Any], path: str) -> list[Any]:
        n_consts, n_carry = compat.scan_counts(eqn)
        body, consts = eqn.params["jaxpr"], operands[:n_consts]
        ops = self._ops_of(body, path)

        def step(carry: Any, xs: Any) -> Any:
            arrays, counts = carry
            results, new, _ = self._inside(body, [*consts, *arrays, *xs], path)
            total = [added(a, b) for a, b in zip(counts, new, strict=True)]
            return (results[:n_carry], total), results[n_carry:]

        (carry, counts), ys = lax.scan(
            step,
            (list(operands[n_consts : n_consts + n_carry]), [nothing() for _ in ops]),
            list(operands[n_consts + n_carry :]),
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
        )
        self.ops += ops
        self.counts += counts
        return [*carry, *ys]

    def _while(self, eqn: Any, operands: Sequence[Any], path: str) -> list[Any]:
        params, n_cond = eqn.params, eqn.params["cond_nconsts"]
        n_consts = n_cond + params["body_nconsts"]
        body, consts = params["body_jaxpr"], operands[n_cond:n_consts]
        ops = self._ops_of(body, path)

        def goes_on(carry: Any) -> Any:
            given = [*operands[:n_cond], *carry[0]]
            return compat.evaluate(params["cond_jaxpr"], given)[0]

        def step(carry: Any) -> Any:
            arrays, counts = carry
            results, new, _ = self._inside(body, [*consts, *arrays], path)
            return results, [added(a, b) for a, b in zip(counts, new, strict=True)]

        start = (list(operands[n_consts:]), [nothing() for _ in ops])
        results, counts = lax.while_loop(goes_on, step, start)
        self.ops += ops
        self.counts += counts
        return results

    def _cond(self, eqn: Any, operands: Sequence[Any], path: str) -> list[Any]:
        index, *given = operands
        branches = eqn.params["branches"]
        of_branches = [self._ops_of(branch, path) for branch in branches]

        def taking(i: int) -> Callable[..., Any]:
            def branch(*arrays: Any) -> Any:
                results, counts, _ = self._inside(branches[i], arrays, path)
                others = [[nothing() for _ in ops] for ops in of_branches]
                others[i] = counts
                return results, [one for counts in others for one in counts]

            return branch

        chosen = [taking(i) for i in range(len(branches))]
        results, counts = lax.switch(index, chosen, *given)
        self.ops += [op for ops in of_branches for op in ops]
        self.counts += counts
        return results


def _is_counted(array: Any) -> bool:
    return is_floating(array) and not isinstance(array, jax.ShapeDtypeStruct)
