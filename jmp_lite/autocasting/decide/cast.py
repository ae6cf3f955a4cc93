"""Decides existing casts, which the user or JAX has written."""

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.decisions import Decision, Operand, Reason, Run
from jmp_lite.autocasting.decide.facts import Kind, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Eqn
from jmp_lite.ops import Precision


def decide_cast(rules: RuleLookup, eqn: Eqn, operand: Operand, path: str) -> Decision:
    """Decides an existing cast, which the user or JAX has written."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not structure.is_float32(var):
        is_float32 = structure.is_float32(atom)
        reason = Reason.CAST_TO_OTHER if is_float32 else Reason.NOT_FLOAT32
        return Decision(Run.AS_TRACED, None, reason)
    match = rules.scope(path)
    precision = match.precision if match else None
    if precision is Precision.LOW:
        return Decision(Run.LOW, State.LOW, Reason.RULE, match=match)
    if precision is Precision.FULL:
        return Decision(Run.FULL, State.HARD, Reason.RULE, match=match)
    if operand.state is not None:
        return Decision(Run.PASS, operand.state, Reason.CAST_OF_FLOAT32, leader=operand)
    if structure.dtype_of(atom) == np.bool_:
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_NUMBER)
    if operand.kind in (Kind.LITERAL, Kind.EXACT) and not operand.shape:
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_NUMBER)
    is_given = operand.kind is Kind.GIVEN
    if is_given and jnp.issubdtype(structure.dtype_of(atom), jnp.floating):
        return Decision(Run.FULL, State.SOFT, Reason.CAST_OF_GIVEN)
    return Decision(Run.FULL, State.HARD, Reason.CAST_OF_COMPUTED)
