"""Decides existing casts, which the user or JAX has written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import Facts, Kind, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.jaxprs import structure
from jmp_lite.jaxprs.types import Dtype, Eqn
from jmp_lite.ops import Precision


def decide_cast(rules: RuleLookup, eqn: Eqn, operand: Facts, path: str) -> Decision:
    """Decides an existing cast, which the user or JAX has written."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    if not structure.is_float32(var):
        return Decision(Run.AS_TRACED, None, Reason.NOT_FLOAT32)
    match, dtype = rules.scope(path), structure.dtype_of(atom)
    precision = match.precision if match else None
    if precision is Precision.LOW:
        return Decision(Run.LOW, State.LOW, Reason.RULE, match=match)
    if precision is Precision.FULL:
        return Decision(Run.FULL, State.HARD, Reason.RULE, match=match)
    # An array that is stored in few bits stays so until an op reads its numbers.
    held = dtype if is_exact_in(dtype, rules.low_dtype) else None
    if operand.state is not None:
        return Decision(Run.PASS, operand.state, Reason.PASSES_ON, leader=operand)
    if dtype == np.bool_:
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED, held=held)
    if operand.kind in (Kind.LITERAL, Kind.EXACT) and not operand.shape:
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED)
    if operand.kind is Kind.GIVEN and jnp.issubdtype(dtype, jnp.floating):
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED, held=held)
    return Decision(Run.FULL, State.HARD, Reason.CAST, held=held)


@functools.cache
def is_exact_in(dtype: Dtype, low: Dtype) -> bool:
    """Whether a dtype has 8 bits or fewer, and a 16-bit dtype has all its numbers."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype.itemsize > 1:
        return False
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        numbers = np.arange(jnp.iinfo(dtype).min, jnp.iinfo(dtype).max + 1)
    else:
        numbers = np.arange(256, dtype=np.uint8).view(dtype)
    exact = numbers.astype(np.float32)
    exact = exact[np.isfinite(exact)]
    with np.errstate(over="ignore"):
        return bool(np.all(exact == exact.astype(low).astype(np.float32)))
