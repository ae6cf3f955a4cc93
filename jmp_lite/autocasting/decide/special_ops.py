"""Decides the ops that have rules of their own.

- Matrix products: which are float32, and which number format the others have. (How a
  product in a format runs, its algorithm too, is part of the format.)
- Existing casts, which the user or JAX has written.
- Moves of numbers between devices, where each byte costs time. Such a move changes no
  bit. So the values that 16-bit products alone read are cast before they are sent, and
  not after. The derivative of some of these ops is a sum over devices. It is float32,
  unless a rule lowers the op that adds up.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite.autocasting.decide.decisions import Decision, Reason, Run
from jmp_lite.autocasting.decide.facts import Facts, Kind, Mark, Readers, State
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.match import RuleMatch, RuleSource, format_of
from jmp_lite.autocasting.rules.rules import asks_for_low
from jmp_lite.formats.number_format import Product
from jmp_lite.formats.table import FORMATS
from jmp_lite.jaxprs import params, products, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype, Eqn
from jmp_lite.ops import (
    ADDED_UP,
    ADDING_UP_BACKWARD,
    SENDING,
    Precision,
    base_of,
)


def decide_product(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Facts],
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
    asked, op = products.product_params(eqn), rules.op_decided_as(eqn, path)
    if asked is None or op not in PRODUCTS:
        return None
    match = rules.match(op, path)
    # Under ``low_precision`` a product is 16-bit, whatever reads it.
    if not match.precision.lowers or match.source is RuleSource.MARK:
        return None
    is_named = match.is_explicit and match.precision is Precision.LOW
    # A rule that names products or their place wins over ``precision="highest"``; a
    # preset that requests a format, such as "float8", names none.
    if _asks_for_float32(asked) and not (is_named or match.source is RuleSource.SCOPE):
        return Decision(Run.FULL, State.HARD, Reason.HIGHEST_PRECISION)
    reason = _reason_of(rules, eqn, operands, readers, path) or demanded_by(readers)
    # Under "O3" everything is low, phases of coordinates too.
    if reason is None or asks_for_low(rules.rules, op, path):
        return None
    are_binary = (Mark.BINARY_LEFT | Mark.BINARY_RIGHT) in rules.mark(eqn)
    if reason is Reason.LOOKUP and are_binary:
        # It counts. Zeros and ones have 16 bits, and fewer.
        return Decision(
            Run.LOW, _state_of(readers), reason, match=match, requested=FORMATS["wide"]
        )
    # The phases of given coordinates need their digits. Those of a hidden layer have
    # the error of its inputs anyway.
    if reason is Reason.PHASE and any(o.kind is Kind.COMPUTED for o in operands):
        return None
    return Decision(Run.FULL, _state_of(readers), reason)


def _state_of(readers: Readers) -> State:
    """Returns the state of a float32 product.

    What else reads it may be a stream of 16 bits, which it must not widen.
    """
    return State.SOFT if readers & Readers.OTHER else State.HARD


def _reason_of(
    rules: RuleLookup,
    eqn: Eqn,
    operands: Sequence[Facts],
    readers: Readers,
    path: str,
) -> Reason | None:
    """Returns why a product is float32 for what its operands are, or None."""
    marks = rules.mark(eqn)
    is_binary = [mark in marks for mark in (Mark.BINARY_LEFT, Mark.BINARY_RIGHT)]
    # A triangle of ones times a mask counts: bfloat16 cannot count past 256.
    if all(is_binary) and readers.need_digits:
        return Reason.LOOKUP
    # ``one_hot(ids) @ energies`` is read by a loss: an energy of 70,000 would be
    # infinite in float16.
    if any(is_binary) and readers.demand_float32:
        tables = [o for o, yes in zip(operands, is_binary, strict=False) if not yes]
        # Given, or float32 on purpose; not one that 16 bits hold.
        kinds = (Kind.GIVEN, Kind.SCALED, Kind.INTEGER)
        if all(
            o.state is State.HARD or (o.state is State.SOFT and o.kind in kinds)
            for o in tables
        ):
            return Reason.LOOKUP
    # The error of each step is multiplied by the next: see ``decide/contents.py``.
    if Mark.POWER in marks:
        return Reason.DIGITS
    # For cost alone, so that a rule decides otherwise.
    if _is_small(eqn) and not rules.match(params.op_of(eqn), path).is_explicit:
        return Reason.SMALL
    # bfloat16 has the exponents of float32.
    is_spread = Mark.SPREAD in marks and rules.is_narrow
    return Reason.SPREAD if is_spread else None


def _is_small(eqn: Eqn) -> bool:
    """Whether a product is a batch of products of small matrices, such as rotations.

    In 16 bits XLA pads each matrix to 8 x 8 on a GPU, by kernels of their own (jax
    0.10 and 0.12). It fuses a product with a vector with what is around it.
    """
    if params.op_of(eqn) != "dot_general":
        return False
    batch = [eqn.invars[0].aval.shape[i] for i in products.dot_dimensions(eqn)[1][0]]
    if all(size == 1 for size in batch):  # It is one product.
        return False
    sizes = products.product_sizes(eqn)
    is_known = all(isinstance(n, int) for n in sizes)
    return is_known and 1 not in sizes and math.prod(sizes) <= 7**3


def has_raised_precision(eqn: Eqn, decision: Decision) -> bool:
    """Whether a product has the highest precision although it requests none.

    At the default precision an accelerator rounds the operands of a float32 product: to
    bfloat16 on a TPU, to 11 bits on a GPU. One that is float32 for its digits has the
    highest, unless the user has set a precision.
    """
    if decision.run is not Run.FULL or products.precision_of(eqn) is not None:
        return False
    match = decision.match
    return decision.reason in _FOR_DIGITS or (match is not None and match.is_explicit)


def decided_precision(eqn: Eqn, decision: Decision) -> lax.PrecisionLike:
    """Returns the precision of a product in float32."""
    if has_raised_precision(eqn, decision):
        return (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    return products.precision_of(eqn)


def raises_precision(rules: RuleLookup, eqn: Eqn, path: str) -> bool:
    """Whether the user keeps a product in float32 that sets no precision."""
    op = params.op_of(eqn)
    if op not in PRODUCTS or products.precision_of(eqn) is not None:
        return False
    match = rules.match(op, path)
    return match.is_explicit and match.precision is Precision.FULL


# Not SMALL: such products are float32 for their cost.
_FOR_DIGITS = frozenset(
    {
        Reason.DIGITS,
        Reason.PHASE,
        Reason.LOOKUP,
        Reason.SPREAD,
    }
)


def demanded_by(readers: Readers) -> Reason | None:
    """Returns why the readers of a product demand float32; None if they do not."""
    is_phase = readers & (Readers.PHASE | Readers.LOW_PHASE)
    # A Gram matrix that another product reads, too, is 16-bit. A phase of coordinates
    # keeps its digits.
    if readers & Readers.OTHER:
        return Reason.PHASE if is_phase else None
    if readers & Readers.DIGITS:
        return Reason.DIGITS
    return Reason.PHASE if is_phase else None


def _asks_for_float32(product: products.ProductParams) -> bool:
    """Whether a matrix product requests more than the ambient precision."""
    # Under x64, a program may ask for a result in float64, which NumPy says is equal to
    # None.
    dtype = product.result_dtype
    if dtype is not None and dtype != np.float32:
        return True
    # With ``jax_default_matmul_precision``, JAX writes the setting into each product of
    # the trace. A setting of the whole program must not switch autocast off.
    asked, usual = product.precision, products.ambient_precision()
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
    operands: Sequence[Facts],
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
    requested = format_of(match.precision)
    if requested is None:
        return None
    weights = tuple(facts.is_weight for facts in operands)
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


# ------------------------------------------------------------------- existing casts


def decide_cast(rules: RuleLookup, eqn: Eqn, operand: Facts, path: str) -> Decision:
    """Decides an existing cast, which the user or JAX has written."""
    (atom,), (var,) = eqn.invars, eqn.outvars
    # The user casts to 16 bits or to integers.
    if not structure.is_float32(var):
        return Decision(Run.AS_TRACED, None, Reason.NOT_FLOAT32)
    match, dtype = rules.scope(path), structure.dtype_of(atom)
    precision = match.precision if match else None
    if precision is Precision.LOW:
        return Decision(Run.LOW, State.LOW, Reason.RULE, match=match)
    if precision is Precision.FULL:
        return Decision(Run.FULL, State.HARD, Reason.RULE, match=match)
    # An array that is stored in few bits stays so until an op reads its numbers.
    stored = dtype if is_exact_in(dtype, rules.low_dtype) else None
    # JAX casts from weak to strong float32: no cast that the user has written.
    if operand.state is not None:
        return Decision(Run.PASS, operand.state, Reason.PASSES_ON, leader=operand)
    # ``mask.astype(float32) * h`` must not widen ``h``.
    if dtype == np.bool_:
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED, stored=stored)
    # ``where(mask, h, 0)`` and ``clip(h, -2, 2)`` cast an integer of the program.
    if operand.kind in (Kind.LITERAL, Kind.EXACT) and not operand.shape:
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED)
    # Flax casts each 16-bit bias to the dtype of the input. As float32 on purpose, they
    # kept 131 kB of float32 residuals, where float32 parameters keep 0.5 kB.
    if operand.kind is Kind.GIVEN and jnp.issubdtype(dtype, jnp.floating):
        return Decision(Run.FULL, State.SOFT, Reason.UNDECIDED, stored=stored)
    # Counts and positions: bfloat16 cannot count past 256.
    return Decision(Run.FULL, State.HARD, Reason.CAST, stored=stored)


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
    # A NaN is not equal to itself.
    exact = exact[np.isfinite(exact)]
    with np.errstate(over="ignore"):
        return bool(np.all(exact == exact.astype(low).astype(np.float32)))


# ------------------------------------------------ moves of numbers between devices


def decide_collective(
    rules: RuleLookup,
    op: str,
    match: RuleMatch,
    operands: Sequence[Facts],
    readers: Readers,
    path: str,
) -> Decision | None:
    """Decides that an op sends 16 bits; else returns None.

    Example, of parameters that are split over devices, in ``shard_map``::

        w = all_gather part    part is a float32 parameter, and only the product reads
        y = dot_general x w    w: cast, then gathered. The gradient of part is added up
                               over the devices in float32
        n = all_gather scale   a norm reads the scale in float32: gathered in float32

    Args:
      rules: the rules, by path.
      op: the name of the op.
      match: the rule that decides it.
      operands: its operands that were traced in float32.
      readers: the readers of its results.
      path: its path.
    """
    # A rule may name, and lower, the sum that is the derivative of the op.
    adds_up = ADDING_UP_BACKWARD.get(base_of(op))
    of_sum = rules.match(adds_up, path) if adds_up else None
    lowers_sum = (
        of_sum is not None and of_sum.is_explicit and of_sum.precision is Precision.LOW
    )
    # ``pvary`` moves nothing: it runs in 16 bits if its derivative, a ``psum``, is to.
    if op not in SENDING and not lowers_sum:
        return None
    if match.is_explicit or match.precision not in (Precision.FOLLOW, Precision.LOW):
        return None
    # JAX transposes the ops of a rule one by one, so the sum would be 16-bit.
    is_transposed = bool(readers & Readers.TRANSPOSED) and op in ADDED_UP
    if is_transposed or readers.demand_float32 or not operands:
        return None
    # On four H100s, FSDP written by hand moved 25.2 MB in place of 33.6; 16.8 with a
    # rule that lowers ``reduce_scatter``, too.
    is_low = any(o.state is State.LOW for o in operands)
    if not (is_low or readers.take_16_bits or match.precision is Precision.LOW):
        return None
    # A parameter stays one: no op runs in 16 bits because it was sent in 16 bits.
    is_soft = all(o.state is State.SOFT for o in operands)
    return Decision(
        Run.FULL if is_soft else Run.LOW,
        State.SOFT if is_soft else State.LOW,
        Reason.MOVES_16_BITS,
        stored=rules.low_dtype,
        lowers_sum=lowers_sum,
    )
