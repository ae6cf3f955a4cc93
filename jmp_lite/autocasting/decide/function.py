"""Recognizes functions of one 16-bit value that are computed in float32.

A LayerNorm or a softplus reads a 16-bit value, computes in float32, and reads the value
again. Its result is 16 bits, as the value is; what it computes inside is float32.
"""

from collections.abc import Iterable, Sequence

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import Facts, Kind, Lineage, State
from jmp_lite.autocasting.rules.match import RuleSource
from jmp_lite.ops import INSIDE_OF_FUNCTIONS


def is_one_function(operands: Sequence[Facts]) -> bool:
    """Whether an op with these operands is part of a function of one 16-bit value.

    In a norm or a softplus, a float32 value is computed from a 16-bit one, and an op
    reads both. That op is part of the function, and so are ops on its result. The
    16-bit value itself is float32 and undecided if an op amplifies its error.

    Example: a LayerNorm of a 16-bit ``x`` that no scope names. The roots of a value
    are the 16-bit values that it is a function of::

        m = mean(x)          FULL: float32, root x
        d = sub x m          reads x (16-bit) and m (float32): one function of x, so
                             float32 and rejoined, although an operand is 16-bit
        v = mean(square(d))  FULL: float32, root x
        r = rsqrt(v + eps)   FULL: float32, root x
        n = mul d r          an operand is rejoined: still one function, float32
        y = mul n g          g is a parameter, which has no roots: float32, rejoined
        z = dot_general y w  a product reads y in 16 bits

    Without the rule, ``d`` would follow ``x``, and lose the digits of the mean. In a
    softplus, ``max(x, 0) + log1p(exp(-abs(x)))``, the sum reads ``max(x, 0)``, which is
    16-bit with root x, and the logarithm, which is float32 with root x: one function of
    x. A sum of functions of two 16-bit values is no such function: it is 16-bit.

    Args:
      operands: the operands that were traced in float32.
    """
    computed = [
        o
        for o in operands
        if o.kind is not Kind.END
        and (o.state is not State.SOFT or o.lineage.roots != frozenset())
    ]
    states = {o.state for o in computed}
    is_joined = len(states) > 1 or any(o.lineage.is_rejoined for o in computed)
    return is_joined and bool(roots_of(computed))


def is_inside_function(op: str, operands: Sequence[Facts]) -> bool:
    """Whether an op that reads parts of a function is a part of it, too.

    Its arithmetic is, and what reads the 16-bit value again. An activation that reads
    the result of a norm is not.

    Args:
      op: the name of the op.
      operands: the operands that were traced in float32.
    """
    may_be = op in INSIDE_OF_FUNCTIONS or any(o.state is State.LOW for o in operands)
    return may_be and is_one_function(operands)


def roots_of(operands: Iterable[Facts]) -> frozenset[object] | None:
    """Returns the only 16-bit value that operands are functions of, or an empty set.

    None if there are several, or if an operand is float32 for other reasons.
    """
    found = frozenset[object]()
    for operand in operands:
        if operand.lineage.roots is None:
            return None
        found |= operand.lineage.roots
    return found if len(found) <= 1 else None


def lineage_of(decision: Decision, floats: Sequence[Facts]) -> Lineage | None:
    """Returns the lineage of the float32 results of an equation.

    Args:
      decision: the decision for the equation.
      floats: its operands that were traced in float32.
    """
    if decision.run is Run.PASS:  # A cast to float32, or a barrier of several values.
        return floats[0].lineage if decision.leader else None
    roots, match = roots_of(floats), decision.match
    if decision.state is State.SOFT:
        return Lineage(roots) if decision.reason in _TRACKED else None
    if roots is None:
        return None
    if decision.reason is Reason.ONE_FUNCTION:
        return Lineage(roots, is_rejoined=True)
    is_tracked = decision.reason in _TRACKED or (
        decision.reason is Reason.RULE
        and (match and match.source, decision.run) in _TRACKED_RULES
    )
    return Lineage(roots) if is_tracked else None


_TRACKED = (
    Reason.FOLLOWS,
    Reason.ROUNDS_NOTHING,
    Reason.READ_IN_FLOAT32,
    Reason.AMPLIFIED,
    Reason.UNDECIDED,
)

_TRACKED_RULES = ((RuleSource.TABLE, Run.FULL), (RuleSource.DEFAULT, Run.LOW))
