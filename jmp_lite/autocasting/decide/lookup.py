"""Looks up the rules for a path, and searches each path once."""

import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.facts import Mark
from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource, match_scope
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs import params, products, source, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr
from jmp_lite.ops import LOWERABLE, Precision, base_of, record_of


class RuleLookup:
    """Looks rules up by path; searches each path once.

    Args:
      rules: the rules, with the compute dtype of a device.

    Attributes:
      rules: the rules.
      low_dtype: their compute dtype.
      is_narrow: whether its range is smaller than that of float32.
      match: ``match(op, path)`` returns the rule that decides an op at a path.
      scope: ``scope(path, op="")`` returns the mark or the scope rule, or None.
      carry: ``carry(path)`` returns the rule for the carries of a loop, or None.
      marks: the marks of the equations that were analysed.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.low_dtype = np.dtype(rules.compute_dtype)
        ends = jnp.finfo(self.low_dtype), jnp.finfo("float32")
        self.is_narrow = ends[0].maxexp < ends[1].maxexp
        self.marks: dict[Eqn, Mark] = {}
        # One search for each path. The functions hold no reference to this object, so
        # that it is freed as soon as nothing uses it.
        scope = functools.cache(functools.partial(match_scope, rules.scopes))
        named = frozenset(op for op, _ in rules.ops)
        self.scope = scope
        self.match = functools.cache(functools.partial(_match, rules, named, scope))
        self.carry = functools.cache(functools.partial(_carry, rules.carries))
        self._rules_inside: dict[tuple[Jaxpr, str], tuple[object, ...]] = {}
        self._paths: dict[Jaxpr, tuple[str, ...]] = {}
        self._equivalent: dict[Eqn, str] = {}

    def mark(self, eqn: Eqn) -> Mark:
        """Returns the marks of an equation."""
        return self.marks.get(eqn, Mark.NONE)

    def op_decided_as(self, eqn: Eqn, path: str) -> str:
        """Returns the op whose rules apply to an equation.

        A product that contracts no axis is a multiplication, ``x * x`` is a square, and
        a power with a negative exponent is a reciprocal, unless a rule names the op at
        its path.
        """
        op = params.op_of(eqn)
        if eqn not in self._equivalent:
            self._equivalent[eqn] = _equivalent_op(eqn, op)
        like = self._equivalent[eqn]
        # A rule for ``integer_pow`` is about powers, also those with a negative
        # exponent.
        if like != op and self.match(op, path).source is RuleSource.TABLE:
            return like
        return op

    def rules_inside(self, jaxpr: Jaxpr, path: str) -> tuple[object, ...]:
        """Returns the scope and carry rules at each path inside of a jaxpr.

        Nothing else depends on a path. So a block at many paths is planned once if
        the rules agree.
        """
        key = jaxpr, path
        if key not in self._rules_inside:
            places = [source.join(path, inner) for inner in self._paths_inside(jaxpr)]
            # A scope for a number format matches products alone.
            self._rules_inside[key] = tuple(
                (*(self.scope(place, op) for op in ("", *PRODUCTS)), self.carry(place))
                for place in places
            )
        return self._rules_inside[key]

    def _paths_inside(self, jaxpr: Jaxpr) -> tuple[str, ...]:
        """Returns the paths of all equations, found once for each jaxpr."""
        if jaxpr not in self._paths:
            found: dict[str, None] = {}
            for eqn in structure.parts(jaxpr).eqns:
                found[source.join(*source.scopes(eqn))] = None
                for inner in params.inner_jaxprs(eqn):
                    there = source.path_of(eqn, "")
                    for path in self._paths_inside(inner):
                        found[source.join(there, path)] = None
            self._paths[jaxpr] = tuple(found)
        return self._paths[jaxpr]


_MatchScope: TypeAlias = Callable[..., RuleMatch | None]
"""Returns the mark or the scope rule for a path, and for an op: ``match_scope``."""


def _match(
    rules: Rules, named: Collection[str], scope: _MatchScope, op: str, path: str
) -> RuleMatch:
    """Returns the rule that decides an op at a path.

    A scope does not change a kernel, an op on bits, or an op with side effects.
    """
    known = record_of(op)
    # A primitive of another package may be a kernel, written for the traced dtypes.
    if known is None:
        return RuleMatch(Precision.KEEP, RuleSource.UNKNOWN, op)
    of_table = RuleMatch(known.precision, RuleSource.TABLE, known.group)
    if known.precision is Precision.KEEP:
        return of_table
    match = scope(path, op)
    # A Cholesky factorization has no 16-bit form: under ``low_precision`` it is
    # float32.
    if match and (op in LOWERABLE or match.precision is not Precision.LOW):
        return match
    precision = rules.precision_of(op)
    # Inside of ``shard_map`` the user's ``psum`` is a ``psum_invariant``.
    if op in named or base_of(op) in named:
        return RuleMatch(precision, RuleSource.OP, op)
    if precision is not known.precision:
        return RuleMatch(precision, RuleSource.DEFAULT, op)
    return of_table


def _carry(carries: Iterable[tuple[str, str]], path: str) -> str | None:
    """Returns the rule for the carries of a loop: follow, full or None."""
    return next((rule for name, rule in carries if re.search(name, path)), None)


def _equivalent_op(eqn: Eqn, op: str) -> str:
    """Returns an equivalent op, such as ``square`` for ``x * x``; else its own op."""
    # ``einsum("i,j->ij", positions, rates)``: phases of a rotary embedding keep their
    # digits, as those of ``positions[:, None] * rates``.
    if op in PRODUCTS and products.contracts_nothing(eqn):
        return "mul"
    # In float16 a square is float32: 256 * 256 is infinite.
    if op == "mul" and eqn.invars[0] is eqn.invars[1]:
        return "square"
    # ``b**-2`` leaves the range of float16 for ``b`` above 250 and below 1/250.
    if op == "integer_pow" and params.exponent_of(eqn) < 0:
        return "reciprocal"
    return op
