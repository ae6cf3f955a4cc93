"""What is worth a second look in what autocast does with a function.

The law of this file: a lint points to a place and says what to do there. Each is a
function from what was seen to lints, and all stand in one table.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.decisions import MIXED_BY_THE_USER, Operand, Run
from jmp_lite.autocasting.rows import Seen, short, told_origin
from jmp_lite.autocasting.rules import ADDING, AUTOCAST_SCOPE, NORM_LAYERS, Rules
from jmp_lite.autocasting.tables import count
from jmp_lite.autocasting.values import Kind, State


@dataclasses.dataclass(frozen=True)
class Lint:
    """Something worth a second look.

    Attributes:
      name: of the kind of thing, such as ``"widened stream"``.
      message: what is there.
      remedy: what to do about it.
      scope: the path that it stands in.
      source: where it stands in the code: file, line and function.
    """

    name: str
    message: str
    remedy: str
    scope: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.scope, short(self.source))))
        return f"{place}: {self.message}. {self.remedy}."


class Looked(NamedTuple):
    """What lints look at.

    Attributes:
      seen: the rows of the forward pass, and what they were made of.
      results: what stood for the results.
      rules: the rules.
      has_gradients: whether anything is differentiated.
    """

    seen: Sequence[Seen]
    results: Sequence[Operand]
    rules: Rules
    has_gradients: bool


def find_lints(looked: Looked) -> tuple[Lint, ...]:
    """Returns the lints of a function; those that are alike once, with their number."""
    like: dict[Any, list[Lint]] = {}
    for check in _CHECKS:
        for lint in check(looked):
            # Blocks that differ in a number alone are alike.
            scope = re.sub(r"\d+", "", lint.scope)
            like.setdefault((lint.name, lint.source, scope), []).append(lint)
    return tuple(map(_counted, like.values()))


def _counted(same: Sequence[Lint]) -> Lint:
    first, more = same[0], len({lint.scope for lint in same}) - 1
    if not more:
        return first
    return dataclasses.replace(first, message=f"{first.message} (and {more} like it)")


def _at(seen: Seen, name: str, message: str, remedy: str) -> Lint:
    return Lint(name, message, remedy, seen.row.scope, seen.row.source)


def _follows_float32(seen: Seen) -> bool:
    decision = seen.told.decision
    return decision.run is Run.FULL and decision.leader is not None


def _has_low(seen: Seen) -> bool:
    return any(o.state is State.LOW for o in seen.told.operands)


def _widened_stream(looked: Looked) -> Iterator[Lint]:
    """A float32 value joins a 16-bit one, and what follows is float32 up to a cast."""
    first: dict[int, Seen] = {}
    after: dict[int, list[Seen]] = {}
    is_cast_back: set[int] = set()
    for seen in looked.seen:
        told = seen.told
        if told.result is None and _follows_float32(seen):
            name = id(told.origin)
            if _has_low(seen) and not isinstance(told.origin, str):
                first.setdefault(name, seen)
            if name in first:
                after.setdefault(name, []).append(seen)
        # A norm, too, hands on 16 bits.
        is_norm = told.decision.reason.startswith("FULL_INSIDE")
        if told.decision.run is Run.LOW or is_norm:
            hard = (o for o in told.operands if o.state is State.HARD)
            is_cast_back.update(id(o.origin) for o in hard)
    for name, seen in first.items():
        if name not in is_cast_back:  # The tail of a loss: it ends in float32.
            continue
        rows = [one.row for one in after[name]]
        size = sum(row.bytes_run * (row.times or 1) for row in rows)
        ops = f"{len(rows)} op" + "s" * (len(rows) > 1)
        yield _at(
            seen,
            "widened stream",
            f"{told_origin(seen.told.origin)} is float32 and joins a 16-bit value "
            f"here: {ops} and {count(size)}B after it are float32",
            "jmp_lite.as_low on it, if its digits do not matter from here on",
        )


def _float32_input(looked: Looked) -> Iterator[Lint]:
    """An argument is added to a 16-bit value, element by element."""
    for seen in looked.seen:
        told = seen.told
        if seen.row.op not in ADDING or told.decision.run is not Run.LOW:
            continue
        if not _has_low(seen):
            continue
        shape = told.eqn.outvars[0].aval.shape
        for operand in told.operands:
            is_given = (operand.state, operand.origin) == (State.SOFT, "an argument")
            if is_given and operand.shape == shape and len(shape) > 1:
                yield _at(
                    seen,
                    "float32 input",
                    "a float32 input is rounded to 16 bits, to be added to a value of "
                    "16 bits",
                    "jmp_lite.as_full on it, if all its digits matter (coordinates, "
                    "times)",
                )


def _float32_carry(looked: Looked) -> Iterator[Lint]:
    """A carry of what may be a stack of layers is float32."""
    for seen in looked.seen:
        told = seen.told
        if told.result is None or told.decision.run is not Run.FULL:
            continue
        if "a result:" in told.decision.reason:
            yield _at(
                seen,
                "float32 carry",
                told.decision.reason,
                'rules.carry(scope, "follow"), if it is a state that layers hand on',
            )
        elif told.origin is not None:
            yield _at(
                seen,
                "float32 carry",
                seen.row.reason,
                "jmp_lite.as_low on what makes it float32, if its digits do not matter",
            )


def _asked_for_float32(looked: Looked) -> Iterator[Lint]:
    for seen in looked.seen:
        if "it asks for the highest precision" in seen.told.decision.reason:
            yield _at(
                seen,
                "float32 product",
                "a matrix product asks for a precision, and is left in float32",
                "Leave precision= out, if 16 bits will do",
            )


def _off_tensor_cores(looked: Looked) -> Iterator[Lint]:
    for seen in looked.seen:
        if seen.told.decision.run is not Run.LOW:
            continue
        sizes = compat.product_sizes(seen.told.eqn)
        odd = [n for n in sizes if n > 8 and n % 8]
        if odd:
            yield _at(
                seen,
                "tensor cores",
                f"a product of sizes {' x '.join(map(str, sizes))} is no multiple of 8 "
                f"in {', '.join(map(str, dict.fromkeys(odd)))}",
                "Tensor cores want multiples of 8: pad, or choose another width",
            )


def _opaque(looked: Looked) -> Iterator[Lint]:
    for seen in looked.seen:
        decision = seen.told.decision
        is_kept = decision.reason.startswith("KEEP") and decision.run is Run.AS_TRACED
        is_by_choice = AUTOCAST_SCOPE in seen.row.scope or decision is MIXED_BY_THE_USER
        if is_kept and not is_by_choice and _has_low(seen):
            yield _at(
                seen,
                "opaque op",
                f"{seen.row.op} is run as it was traced, so that 16-bit values are "
                "raised for it",
                "jmp_lite.low_call, if it accepts 16 bits",
            )


def _literal(looked: Looked) -> Iterator[Lint]:
    for seen in looked.seen:
        if not (_follows_float32(seen) and _has_low(seen)):
            continue
        for operand in seen.told.operands:
            is_number = operand.kind is Kind.LITERAL or "constant too large" in str(
                operand.origin
            )
            if operand.state is State.HARD and is_number:
                dtype = np.dtype(looked.rules.compute_dtype).name
                yield _at(
                    seen,
                    "literal out of range",
                    f"{operand.origin} does not fit {dtype}, and makes this float32",
                    "For a mask, jnp.finfo(x.dtype).min or jnp.where(m, x, -jnp.inf)",
                )


def _low_result(looked: Looked) -> Iterator[Lint]:
    for i, result in enumerate(looked.results):
        if result.state is not State.LOW or result.shape:
            continue
        made_by = result.origin
        source = "" if isinstance(made_by, str | None) else compat.source(made_by)
        yield Lint(
            "low result",
            f"result {i}, a scalar such as a loss, is computed in 16 bits",
            "jmp_lite.full_precision around what computes it",
            source=source,
        )


def _no_loss_scale(looked: Looked) -> Iterator[Lint]:
    is_float16 = any(seen.row.precision == "float16" for seen in looked.seen)
    is_scaled = any("loss_scale" in seen.row.scope for seen in looked.seen)
    if is_float16 and looked.has_gradients and not is_scaled:
        yield Lint(
            "no loss scale",
            "float16 without a loss scale: gradients below 6e-8 vanish",
            "jmp_lite.value_and_grad and jmp_lite.loss_scaling, if it has none outside",
            scope="all of it",
        )


def _low_norm(looked: Looked) -> Iterator[Lint]:
    """A norm that adds up in 16 bits."""
    pattern = NORM_LAYERS[0]
    for seen in looked.seen:
        is_sum = seen.row.op in ("reduce_sum", "rsqrt")
        is_low = seen.told.decision.run is Run.LOW
        if is_sum and is_low and re.search(pattern, seen.row.scope):
            yield _at(
                seen,
                "low norm",
                f"{seen.row.scope} computes its statistics in 16 bits",
                "The preset 'mixed' or 'O2', or rules.scope(..., \"full\")",
            )


_CHECKS: Sequence[Callable[[Looked], Iterator[Lint]]] = (
    _widened_stream,
    _float32_input,
    _float32_carry,
    _asked_for_float32,
    _off_tensor_cores,
    _opaque,
    _literal,
    _low_result,
    _no_loss_scale,
    _low_norm,
)
