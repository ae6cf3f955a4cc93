"""Decides matrix products: which are float32, and which number format the others have.

How a product in a format runs, its algorithm too, is part of the format.
"""

from collections.abc import Sequence

import numpy as np
from jax import lax

from jmp_lite.autocasting.decide.decisions import Decision, Operand, Reason, Run
from jmp_lite.autocasting.decide.facts import Kind, Readers, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource
from jmp_lite.autocasting.rules.rules import asks_for_low, format_in
from jmp_lite.formats.number_format import Product
from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.params import PRODUCTS
from jmp_lite.jaxprs.types import Eqn
from jmp_lite.ops import Precision


def decide_product(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Operand],
    readers: Readers,
    path: str,
) -> Decision | None:
    """Decides a product that is float32 although its class is low; else returns None.

    Args:
      rules: the rules, by path.
      eqn: an equation.
      operands: its operands; empty if they are unknown.
      readers: the readers of its result.
      path: its path.
    """
    asked, op = params.product_params(eqn), rules.op_decided_as(eqn, path)
    if asked is None or op not in PRODUCTS:
        return None
    match = rules.match(op, path)
    if not match.precision.lowers or match.source is RuleSource.MARK:
        return None
    is_named = match.is_explicit and match.precision is Precision.LOW
    if _asks_for_float32(asked) and not (is_named or match.source is RuleSource.SCOPE):
        return Decision(Run.FULL, State.HARD, Reason.HIGHEST_PRECISION)
    reason = demanded_by(readers)
    if reason is None or asks_for_low(rules.rules, op, path):
        return None
    # The phases of given coordinates need their digits. Those of a hidden layer have
    # the error of its inputs anyway.
    if reason is Reason.PHASE and any(o.kind is Kind.COMPUTED for o in operands):
        return None
    # What else reads it may be a stream of 16 bits, which it must not widen.
    state = State.SOFT if readers & Readers.OTHER else State.HARD
    return Decision(Run.FULL, state, reason)


def demanded_by(readers: Readers) -> Reason | None:
    """Returns why the readers of a product demand float32; None if they do not."""
    is_phase = readers & (Readers.PHASE | Readers.LOW_PHASE)
    if readers & Readers.OTHER:
        return Reason.PHASE if is_phase else None
    if readers & Readers.INTEGER_CAST:
        return Reason.CAST_TO_INTEGERS
    if readers & Readers.SOLVER:
        return Reason.SOLVED
    return Reason.PHASE if is_phase else None


def _asks_for_float32(product: params.ProductParams) -> bool:
    """Whether a matrix product requests more than the ambient precision."""
    if product.result_dtype not in (None, np.dtype("float32")):
        return True
    asked, usual = product.precision, params.ambient_precision()
    if isinstance(asked, tuple):
        return lax.Precision.HIGHEST in asked and usual is not lax.Precision.HIGHEST
    return asked not in (None, usual, *_IN_16_BITS)  # An algorithm.


_IN_16_BITS = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.BF16_BF16_BF16,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.DotAlgorithmPreset.F16_F16_F16,
)


def decide_format(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Operand],
    readers: Readers,
    match: RuleMatch,
) -> Decision | None:
    """Decides a product whose rule requests a number format; else returns None.

    Args:
      rules: the rules, by path.
      eqn: an equation.
      operands: all its operands.
      readers: the readers of its result.
      match: the rule that decides it.
    """
    requested = format_in(rules.rules, match.precision)
    if requested is None:
        return None
    weights = tuple(o.state is not None and o.kind is Kind.GIVEN for o in operands)
    verdict = requested.judge(
        Product(eqn, rules.low_dtype, weights),
        is_last=readers.demand_float32,
        is_named=match.source is RuleSource.SCOPE,
    )
    is_wide = verdict.qualifies and requested.returns_float32
    return Decision(
        Run.LOW,
        State.HARD if is_wide else State.LOW,
        Reason.FORMAT if verdict.code else Reason.RULE,
        match=match,
        requested=requested,
        verdict=verdict,
    )
