"""Finds backward rules that a loss scale would change.

Under a loss scale a backward rule receives its cotangent times the scale. If the rule
returns its results times the scale then, dividing the gradients by the scale undoes it.
Rules of linear functions do, and so do selects by other values and ``g * norm(g) /
norm(g)``. Rules that clip a cotangent, take its sign or normalise it do not.

The degree of a value is the power of the scale that it is multiplied by: 1 for a
cotangent, 0 for a residual, -1 for ``1 / norm(g)``. A sum of values of different
degrees has none.
"""

import contextlib
import math
from collections.abc import Sequence

import jax
import numpy as np

from jmp_lite import ops
from jmp_lite.jaxprs import params, products, source, structure
from jmp_lite.jaxprs.dataflow import Forward
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, Var

Degree = float | None
"""A power of the scale; None for a zero, which has any; ``NO_DEGREE`` for none."""

NO_DEGREE = math.inf

# The result has the degree of the floating-point operands, which have to agree.
_JOINING = ops.LINEAR | ops.SELECTING | ops.SUMMING | ops.KEEPING_ERRORS
_PRODUCTS = products.PRODUCTS | {"mul"}
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3, "reciprocal": -1.0}
_OF_DEGREE_0 = ops.DISCERNING | {"sign"}


class Degrees(Forward[Degree]):
    """Follows degrees through a backward pass.

    Attributes:
      culprit: the first equation whose result has no degree.
    """

    def __init__(self) -> None:
        self.culprit: Eqn | None = None

    def nothing(self) -> Degree:
        """A constant does not depend on the scale."""
        return 0.0

    def literal(self, atom: Var) -> Degree:
        """Zero and infinity times a scale are themselves."""
        number = np.asarray(atom.val if structure.is_literal(atom) else 0)
        is_any = np.issubdtype(number.dtype, np.number) and bool(
            np.all((number == 0) | np.isinf(number))
        )
        # ``where(abs(x) < 1, g, 0)``, a straight-through rule, has the degree of ``g``.
        return None if is_any else 0.0

    def join(self, one: Degree, other: Degree) -> Degree:
        """Returns the degree of a sum."""
        if one is None or other is None:
            return other if one is None else one
        return one if one == other else NO_DEGREE

    def equation_facts(
        self, eqn: Eqn, operands: Sequence[Degree], path: str
    ) -> Sequence[Degree]:
        """Returns the degrees of an equation's results."""
        results = super().equation_facts(eqn, operands, path)
        # A branch that depends on the scale may return anything: ``cond(g > 1, ...)``.
        is_free = params.op_of(eqn) == "cond" and operands[0] == NO_DEGREE
        results = [NO_DEGREE] * len(results) if is_free else results
        if NO_DEGREE in results and NO_DEGREE not in operands and not self.culprit:
            self.culprit = eqn
        return results

    def transfer(
        self, eqn: Eqn, facts: Sequence[Degree], path: str
    ) -> Sequence[Degree]:
        """Returns the degrees of the results of an op."""
        del path
        return [self._degree(eqn, facts)] * len(eqn.outvars)

    def _degree(self, eqn: Eqn, facts: Sequence[Degree]) -> Degree:
        op = params.op_of(eqn)
        if NO_DEGREE in facts:
            return NO_DEGREE
        floats = [
            fact
            for atom, fact in zip(eqn.invars, facts, strict=True)
            if structure.is_float(atom)
        ]
        joined = self._joined(floats)
        is_integer = op == "convert_element_type" and not structure.is_float(
            eqn.outvars[0]
        )
        # ``tanh(g)`` and ``round(g)``; but ``round(127 * g / max(g))``, as for int8,
        # has degree 0 before and after.
        if op in ops.BENDING or is_integer:
            return 0.0 if joined in (None, 0.0) else NO_DEGREE
        # ``sign(g)`` is the same for any scale; ``g > 1`` is not, if 1 has degree 0.
        if op in _OF_DEGREE_0:
            return NO_DEGREE if joined == NO_DEGREE else 0.0
        if op in _JOINING:
            return joined
        # ``g * g`` has degree 2, and so ``sqrt(g * g)`` has 1.
        if op in _PRODUCTS:
            return None if None in floats else sum(fact or 0.0 for fact in floats)
        # ``g / norm(g)``, a unit vector, has degree 0.
        if op == "div":
            above, below = floats
            return None if above is None else above - (below or 0.0)
        if op in _POWERS or op == "integer_pow":
            power = _POWERS[op] if op in _POWERS else float(params.exponent_of(eqn))
            return None if joined is None else joined * power
        # A kernel that is not known is trusted: it is linear in its cotangents.
        return max((fact for fact in floats if fact is not None), default=None)

    def _joined(self, facts: Sequence[Degree]) -> Degree:
        joined: Degree = None
        for fact in facts:
            joined = self.join(joined, fact)
        return joined


def culprit_of(eqn: Eqn) -> Eqn | None:
    """Returns what keeps a ``custom_vjp_call`` from being linear under a loss scale.

    Returns:
      The equation of its backward rule; None if the rule returns multiples of its
      cotangent.
    """
    numbers = [i for i, atom in enumerate(eqn.invars) if structure.is_float(atom)]
    results = [i for i, atom in enumerate(eqn.outvars) if structure.is_float(atom)]
    avals = [atom.aval for atom in eqn.invars]
    of_results = [_cotangent_type(eqn.outvars[i].aval) for i in results]

    def backward(*arrays: Array) -> list[Array]:
        operands, cotangents = arrays[: len(avals)], arrays[len(avals) :]

        def of_floats(*floats: Array) -> list[Array]:
            given = list(operands)
            for i, array in zip(numbers, floats, strict=True):
                given[i] = array
            out = params.bind(eqn, given)
            return [out[i] for i in results]

        _, back = jax.vjp(of_floats, *(operands[i] for i in numbers))
        return list(back(list(cotangents)))

    # A rule that nobody differentiates may be one that cannot run.
    with contextlib.suppress(Exception):
        jaxpr = structure.trace(backward, [*avals, *of_results], params.body_of(eqn))
        return culprit_in(jaxpr, len(avals))
    return None


def _cotangent_type(aval: Aval) -> Aval:
    name = "to_ct_aval" if hasattr(aval, "to_ct_aval") else "to_tangent_aval"
    return getattr(aval, name)()


def culprit_in(jaxpr: Jaxpr, n_given: int) -> Eqn | None:
    """Returns the equation that keeps a backward pass from being linear.

    Args:
      jaxpr: from other values and from cotangents to gradients.
      n_given: the number of other values.
    """
    degrees = Degrees()
    parts = structure.parts(jaxpr)
    n_cotangents = len(parts.invars) - n_given
    found = degrees.outputs(jaxpr, [0.0] * n_given + [1.0] * n_cotangents)
    for degree, atom in zip(found, parts.outvars, strict=True):
        if structure.is_float(atom) and degree not in (None, 1.0):
            made_by = [e for e in parts.eqns if atom in e.outvars]
            return degrees.culprit or (made_by or parts.eqns)[-1]
    return None


def describe(eqn: Eqn, culprit: Eqn) -> str:
    """Returns what a backward rule does to its cotangent, in words.

    Args:
      eqn: the ``custom_vjp_call``.
      culprit: the equation of its rule that ``culprit_of`` returns.
    """
    name = structure.name_of(params.body_of(eqn))
    place = source.source(culprit)
    at = f" at {place}" if place else ""
    return (
        f"the backward rule of {name} is not proportional to its cotangent (see "
        f"{params.op_of(culprit)}{at})"
    )
