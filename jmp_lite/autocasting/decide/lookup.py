"""Looks rules up by path, once for each path of an interpretation."""

import functools

import numpy as np

from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.params import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr


class RuleLookup:
    """Looks rules up by path; searches each path once.

    Args:
      rules: the rules, with the compute dtype of a device.

    Attributes:
      rules: the rules.
      low_dtype: their compute dtype.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.low_dtype = np.dtype(rules.compute_dtype)
        self._match = functools.cache(rules.match)
        self._scope = functools.cache(rules.match_scope)
        self._region = functools.cache(rules.region_in)
        self._carry = functools.cache(rules.carry_in)
        self._inside: dict[tuple[int, str], tuple[Jaxpr, tuple[object, ...]]] = {}
        self._paths: dict[int, tuple[Jaxpr, tuple[str, ...]]] = {}

    def op_decided_as(self, eqn: Eqn, path: str) -> str:
        """Returns the op whose rules apply to an equation.

        A product that contracts no axis is a multiplication, ``x * x`` is a square, and
        a power with a negative exponent is a reciprocal, unless a rule names the op at
        its path.
        """
        op = params.op_of(eqn)
        like = _like(eqn, op)
        if like != op and self.match(op, path).source is RuleSource.TABLE:
            return like
        return op

    def match(self, op: str, path: str) -> RuleMatch:
        """Returns the rule that decides an op at a path."""
        return self._match(op, path)

    def scope(self, path: str) -> RuleMatch | None:
        """Returns the mark or the scope rule that matches a path, or None."""
        return self._scope(path)

    def region(self, path: str) -> str | None:
        """Returns the path of the ``FULL_INSIDE`` scope around a path, or None."""
        return self._region(path)

    def carry(self, path: str) -> str | None:
        """Returns the rule for the carries of a loop: follow, full or None."""
        return self._carry(path)

    def inside(self, jaxpr: Jaxpr, path: str) -> tuple[object, ...]:
        """Returns the scope and carry rules at each path inside of a jaxpr.

        Nothing else depends on a path. So a block at many paths is converted once if
        the rules agree.
        """
        key = (id(jaxpr), path)
        if key not in self._inside:
            # The jaxpr is stored with the result, so that its id is not reused.
            places = [source.join(path, inner) for inner in self._paths_inside(jaxpr)]
            # A scope for a number format matches products alone.
            found = tuple(
                (*(self._scope(place, op) for op in ("", *PRODUCTS)), self.carry(place))
                for place in places
            )
            self._inside[key] = (jaxpr, found)
        return self._inside[key][1]

    def _paths_inside(self, jaxpr: Jaxpr) -> tuple[str, ...]:
        """Returns the paths of all equations, found once for each jaxpr."""
        if id(jaxpr) not in self._paths:
            found: dict[str, None] = {}
            for eqn in structure.parts(jaxpr).eqns:
                found[source.join(*source.scopes(eqn))] = None
                for inner in params.inner_jaxprs(eqn):
                    there = source.path_of(eqn, "")
                    for path in self._paths_inside(inner):
                        found[source.join(there, path)] = None
            self._paths[id(jaxpr)] = (jaxpr, tuple(found))
        return self._paths[id(jaxpr)][1]


def _like(eqn: Eqn, op: str) -> str:
    """Returns the op that an equation is, whatever the op is that it is written as."""
    if op in PRODUCTS and params.contracts_nothing(eqn):
        return "mul"
    if op == "mul" and eqn.invars[0] is eqn.invars[1]:
        return "square"
    if op == "integer_pow" and params.exponent_of(eqn) < 0:
        return "reciprocal"
    return op
