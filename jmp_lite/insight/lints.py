"""Finds probable problems in what autocast does with a function.

A lint names a problem, its place and a remedy. Each check yields lints, and one table
lists all checks.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_lite.autocasting.arguments import Program, is_narrow
from jmp_lite.autocasting.decide.contents import ContentAnalysis
from jmp_lite.autocasting.decide.decisions import Reason, Run
from jmp_lite.autocasting.decide.facts import (
    Facts,
    Mark,
    NumberOrigin,
    State,
    is_equation,
    is_from_16_bits,
)
from jmp_lite.autocasting.decide.values import roots_of
from jmp_lite.autocasting.passes import homogeneity
from jmp_lite.autocasting.rules.match import FULL_SCOPE, RuleSource
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.formats.number_format import LOW, Verdict
from jmp_lite.insight.rows import (
    DecidedRow,
    bytes_of,
    is_decided_inside,
    origin_in_words,
    placed_equations,
    times_or_once,
)
from jmp_lite.insight.tables import count, short
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations, jaxprs
from jmp_lite.jaxprs.products import PRODUCTS, product_sizes
from jmp_lite.jaxprs.types import Dtype, Eqn
from jmp_lite.ops import (
    HIGHER_ORDER,
    HOLDING_SOLVERS,
    SOLVING,
    Precision,
    record_of,
)


@dataclasses.dataclass(frozen=True)
class Lint:
    """A probable problem in what autocast does with a function.

    Attributes:
      name: the kind of problem, such as ``"widened stream"``.
      message: the problem.
      remedy: how to solve it.
      scope: the path of the equation.
      source: the line of code of the equation: file, line and function.
      package: the line of an installed package that made the equation; empty if no
        package did.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> x, w = jnp.ones((8, 8)), jnp.ones((8, 9))
      >>> explanation = jmp.explain(lambda x, w: x @ w)(x, w)
      >>> for lint in explanation.lints:
      ...     print(lint.name, "|", lint.message)
      tensor cores | 9 is not a multiple of 8, in a product of sizes 8 x 9 x 8
    """

    name: str
    message: str
    remedy: str
    scope: str = ""
    source: str = ""
    package: str = ""

    def __str__(self) -> str:
        inside = self.package and f"in {self.package.rpartition(' ')[0]}"
        place = ", ".join(filter(None, (self.scope, short(self.source), inside)))
        text = ": ".join(filter(None, (place, self.message)))
        return f"{text}. {self.remedy}."


class LintInput(NamedTuple):
    """The input of a check.

    Attributes:
      decided: the rows of the forward pass, with their decisions. No user writes the
        equations of a backward pass, so they have no remedy.
      results: the results of the function, as operands.
      rules: the rules.
      has_gradients: whether the function is differentiated.
      program: the function as autocast reads it.
      added: for each sum, by id, the operands that are float32 arguments. Parameters
        are not data: they come in pytrees, and data comes as an array.
      closely_read: the equations, by id, whose result is read by what needs its digits,
        by the name of a lint.
    """

    decided: Sequence[DecidedRow]
    results: Sequence[Facts]
    rules: Rules
    has_gradients: bool
    program: Program
    added: Mapping[int, set[int]]
    closely_read: Mapping[str, set[int]]


class RowLint(NamedTuple):
    """A check of one equation at a time, with one text.

    Attributes:
      name: the kind of problem.
      applies: whether an equation has it.
      message: the problem.
      remedy: how to solve it.
    """

    name: str
    applies: Callable[[LintInput, DecidedRow], bool]
    message: str
    remedy: str

    def __call__(self, inputs: LintInput) -> Iterator[Lint]:
        """Yields a lint for each equation with the problem."""
        for decided in inputs.decided:
            if self.applies(inputs, decided):
                yield _make_lint(decided, self.name, self.message, self.remedy)


def find_lints(inputs: LintInput) -> tuple[Lint, ...]:
    """Returns the lints of a function; those that say the same become one."""
    like: dict[object, list[Lint]] = {}
    for check in _CHECKS:
        for lint in check(inputs):
            message = lint.message.replace(lint.scope, "")
            like.setdefault((lint.name, message, lint.remedy), []).append(lint)
    found: list[Lint] = []
    for same in like.values():
        more = len({(lint.scope, lint.source) for lint in same}) - 1
        like_it = f" (and {more} like it)" if more else ""
        found.append(dataclasses.replace(same[0], message=same[0].message + like_it))
    return tuple(found)


def _make_lint(decided: DecidedRow, name: str, message: str, remedy: str) -> Lint:
    row, package = decided.row, source.line_in_package(decided.eqn)
    is_same = package.rpartition(":")[0] in row.source
    return Lint(
        name, message, remedy, row.scope, row.source, "" if is_same else package
    )


def _follows_float32(decided: DecidedRow) -> bool:
    decision = decided.decision
    return decision.run is Run.FULL and decision.leader is not None


def _has_low(decided: DecidedRow) -> bool:
    return any(o.state is State.LOW for o in decided.operands)


def _widened_stream(inputs: LintInput) -> Iterator[Lint]:
    """A float32 value meets a 16-bit one, and later ops run in float32 up to a cast.

    If the float32 value is computed from the 16-bit one, both are part of one function
    that is deliberately float32: a norm, a softplus. The float32 carry of a loop has a
    row with its own reason.
    """
    after: dict[int, list[DecidedRow]] = {}
    is_cast_back: set[int] = set()
    for decided in inputs.decided:
        if decided.result is None and _follows_float32(decided):
            name = id(decided.origin)
            low = (is_from_16_bits(o.state, o.lineage.roots) for o in decided.operands)
            widens = any(low) and roots_of(decided.operands) is None
            origin = decided.origin
            # A number, or the carry of a loop, is float32 by choice.
            is_op = is_equation(origin) and params.op_of(origin) not in HIGHER_ORDER
            if name in after or (widens and is_op):
                after.setdefault(name, []).append(decided)
        if decided.decision.run is Run.LOW:
            wide = (o for o in decided.operands if o.state is State.HARD)
            is_cast_back.update(id(operand.origin) for operand in wide)
    for name, stream in after.items():
        rows = [decided.row for decided in stream]
        # The tail of a loss ends in float32, and a cast fuses with a single op.
        if name not in is_cast_back or len(rows) == 1:
            continue
        size = sum(row.bytes_run * times_or_once(row.times) for row in rows)
        yield _make_lint(
            stream[0],
            "widened stream",
            f"{stream[0].leader} is float32 and meets a 16-bit value here: {len(rows)} "
            f"ops ({count(size)}B) from here on run in float32",
            "Apply jmp_lite.as_low to it if 16 bits suffice from here on",
        )


def _adds_an_input(inputs: LintInput, decided: DecidedRow) -> bool:
    """Whether an argument follows the 16-bit value that it is added to."""
    decision = decided.decision
    if decision.run is not Run.LOW or decision.match or not _has_low(decided):
        return False
    shape = decided.eqn.outvars[0].aval.shape  # A bias is spread over the other axes.
    added = [decided.operands[i] for i in inputs.added.get(id(decided.eqn), ())]
    is_whole = [facts.state is State.SOFT and facts.shape == shape for facts in added]
    return len(shape) > 1 and any(is_whole)


_FLOAT32_INPUT = RowLint(
    "float32 input",
    _adds_an_input,
    "a float32 input is rounded to 16 bits before it is added to a 16-bit value",
    "Apply jmp_lite.as_full to it if all its digits matter (coordinates, times)",
)


def _float32_carry(inputs: LintInput) -> Iterator[Lint]:
    """A carry of a possible stack of layers is float32."""
    if inputs.rules.default is Precision.FULL:  # Everything but products is float32.
        return
    for decided in inputs.decided:
        if decided.result is None or decided.decision.run is not Run.FULL:
            continue
        if decided.decision.reason is Reason.CARRY_RESULT:
            remedy = 'Use rules.carry(scope, "follow") if layers pass it on'
        elif decided.origin is not None:
            remedy = "Apply jmp_lite.as_low to the named value if 16 bits suffice"
        else:
            continue
        if not _trains_or_filters(decided.eqn):
            yield _make_lint(
                decided, "float32 carry", f"float32 {decided.row.reason}", remedy
            )


def _trains_or_filters(loop: Eqn) -> bool:
    """Whether a loop computes a gradient, solves, or multiplies small matrices alone.

    A filter has a small state, which it solves for.
    """
    bodies = list(params.inner_jaxprs(loop))
    live = [eqn for body in bodies for eqn, _ in placed_equations(body)]
    eqns = [eqn for body in bodies for eqn, _ in equations(body)]
    solves = any(params.op_of(eqn) in SOLVING for eqn in eqns)
    if solves or any(map(source.is_transposed, live)):
        return True
    sizes = [product_sizes(e) for e in eqns if params.op_of(e) in PRODUCTS]
    return bool(sizes) and all(n < 8 for size in sizes for n in size)


_FLOAT32_PRODUCT = RowLint(
    "float32 product",
    lambda _, decided: decided.decision.reason is Reason.HIGHEST_PRECISION,
    "a matrix product requests a specific precision and runs in float32",
    "Leave precision= out if 16 bits suffice, or call it under jmp_lite.low_precision "
    "if a package sets it",
)


def _off_tensor_cores(inputs: LintInput) -> Iterator[Lint]:
    """Sizes of products that are no multiples of 8: one lint for each size."""
    with_size: dict[int, list[tuple[int, DecidedRow]]] = {}
    for decided in inputs.decided:
        if decided.row.op not in PRODUCTS or decided.decision.run is not Run.LOW:
            continue
        sizes = product_sizes(decided.eqn)
        if 1 in sizes:  # A vector product or a depthwise convolution: no tensor cores.
            continue
        # A symbolic size is unknown.
        known = [n for n in sizes if isinstance(n, int)]
        for size in dict.fromkeys(n for n in known if n > 8 and n % 8):
            with_size.setdefault(size, []).append((math.prod(known), decided))
    for size, products in with_size.items():
        _, largest = max(products, key=lambda pair: pair[0])
        sizes = " x ".join(map(str, product_sizes(largest.eqn)))
        many = len(products) > 1
        yield _make_lint(
            largest,
            "tensor cores",
            f"{size} is not a multiple of 8, in "
            + (f"{len(products)} products, the largest" if many else "a product")
            + f" of sizes {sizes}",
            "Tensor cores need multiples of 8: pad, or choose another width",
        )


def _unfit_for_format(inputs: LintInput) -> Iterator[Lint]:
    """A product has no requested number format, or has one that it should not have."""
    found: dict[str, Counter[Verdict]] = {}
    for decided in inputs.decided:
        decision = decided.decision
        requested, verdict = decision.requested, decision.verdict
        if requested == LOW:
            continue
        found.setdefault(requested.name, Counter())[verdict] += 1
        advice = requested.advice(verdict.code)
        is_named = decision.match and decision.match.source is RuleSource.SCOPE
        if advice and (is_named or not advice.is_for_scopes):
            message = advice.message or decided.row.reason
            yield _make_lint(decided, advice.lint, message, advice.remedy)
    for name, verdicts in found.items():
        if not any(verdict.qualifies for verdict in verdicts):
            most = verdicts.most_common(1)[0][0].code.replace("_", " ")
            yield Lint(
                f"no {name} product",
                f"none of {verdicts.total()} products runs in {name} (most common "
                f"reason: {most})",
                "Leave the rule out: the program is the same",
            )


def _of_readers(name: str, message: str, remedy: str) -> RowLint:
    """Returns the check of a 16-bit product whose reader needs more of its digits."""

    def applies(inputs: LintInput, decided: DecidedRow) -> bool:
        is_read = id(decided.eqn) in inputs.closely_read.get(name, ())
        return is_read and decided.decision.run is Run.LOW

    return RowLint(name, applies, message, remedy)


_LOST_DIGITS = (
    _of_readers(
        "low phase",
        "sin or cos reads the result of a 16-bit product",
        "Compute it under jmp_lite.full_precision if its angles are large",
    ),
    _of_readers(
        "cancellation",
        "a 16-bit product is a term of a difference that a root or a pick (argmax, "
        "top_k) reads",
        "Compute it under jmp_lite.full_precision, or sum squared differences",
    ),
    _of_readers(
        "low lookup",
        "a 16-bit product looks up integers, or averages them, and rounds those above "
        "256",
        "Use an index instead of the product, or jmp_lite.full_precision",
    ),
    _of_readers(
        "residue",
        "a 16-bit product is subtracted, and a state or the result reads what is left",
        "Compute it under jmp_lite.full_precision if both are close to each other",
    ),
    _of_readers(
        "low range",
        "a quotient divides by a difference of 16-bit products, which is 0 where they "
        "are close to each other",
        "Compute them under jmp_lite.full_precision, or divide by more",
    ),
)


# A rule or a mark lowers what autocast would not.
_AMPLIFIED_ROUNDING = RowLint(
    "amplified rounding",
    lambda inputs, decided: (
        decided.decision.state is State.LOW
        and id(decided.eqn) in inputs.closely_read.get("amplified rounding", ())
    ),
    "a logarithm, a root, a quotient or a step reads this 16-bit sum or difference, "
    "and amplifies its rounding error",
    "Compute it under jmp_lite.full_precision",
)


def _wide_work(inputs: LintInput) -> Iterator[Lint]:
    """Much of the work has a dtype that autocast leaves alone."""
    sizes = Counter[str]()
    for decided in inputs.decided:
        times = times_or_once(decided.row.times)
        for var in decided.eqn.outvars:
            if structure.is_of_numbers(var.aval):
                sizes[structure.dtype_of(var).name] += times * bytes_of(var)
    for name, remedy in _OF_WIDE_DTYPES.items():
        if sizes[name] > 0.1 * sizes.total():
            share = sizes[name] / sizes.total()
            yield Lint(
                "wide work",
                f"{share:.0%} of the bytes that ops compute are {name}, which autocast "
                "leaves as it is",
                remedy,
            )


_OF_WIDE_DTYPES = {
    "complex64": "Write real and imaginary parts as two arrays if 16 bits suffice",
    "complex128": "Cast to complex64 or to real parts, or leave jax_enable_x64 off",
    "float64": "Cast to float32, or leave jax_enable_x64 off: importing some packages "
    "turns it on",
}


def _low_sampling(inputs: LintInput) -> Iterator[Lint]:
    """Random numbers are made of 16 random bits, or fewer."""
    marks: dict[Eqn, Mark] = {}
    ContentAnalysis(marks).read(inputs.program.jaxpr, "")
    for eqn, place in placed_equations(inputs.program.jaxpr):
        if params.op_of(eqn) != "bitcast_convert_type":
            continue
        (var,) = eqn.outvars
        is_drawn = Mark.RANDOM in marks.get(eqn, Mark.NONE)
        if is_drawn and structure.is_float(var) and is_narrow(var.aval):
            yield Lint(
                "low sampling",
                f"random numbers are drawn in {structure.dtype_of(var).name}, so they "
                "have few values, and events below 1/256 have other probabilities",
                "Draw in float32 (dtype, logits or probabilities), and cast then",
                place.path,
                source.source(eqn, place.source),
            )


def _captured(inputs: LintInput) -> Iterator[Lint]:
    """The function captures a 16-bit array, so its readers run in 16 bits."""
    if not inputs.program.traces_full:
        return
    found = Counter[str]()
    for _, jaxpr in jaxprs(inputs.program.jaxpr):
        for var in structure.parts(jaxpr).constvars:
            if is_narrow(var.aval) and var.aval.shape:
                found[var.aval.str_short()] += 1
    for name, n in found.items():
        arrays = f"{n} arrays of type {name} are" if n > 1 else f"a {name} array is"
        yield Lint(
            "captured in 16 bits",
            f"{arrays} captured, so ops that read nothing else run in 16 bits",
            "Pass it as an argument, which is traced in float32 and held in 16 bits",
        )


def _traced_in_16_bits(inputs: LintInput) -> Iterator[Lint]:
    """The function is not valid for float32 arguments."""
    if inputs.program.error is not None:
        yield Lint(
            "arguments in 16 bits",
            "16-bit arguments are traced as they are, because the function fails for "
            f"float32 ones ({inputs.program.error})",
            "Write x.dtype in place of a fixed dtype, or use jmp_lite.low_call for a "
            "kernel",
        )


def _opaque(inputs: LintInput) -> Iterator[Lint]:
    """An op that runs as traced receives a 16-bit value, and could be converted.

    Such an op is a kernel, a loop whose condition depends on a float, or an unknown op.
    Ops without a 16-bit form do not count. The check also finds such ops with float32
    matrix products inside.
    """
    # The record of a whole loop has no operands.
    is_low: set[object] = set()
    known: set[int] = set()  # Equations inside of one that was checked.
    for decided in inputs.decided:
        eqn, decision = decided.eqn, decided.decision
        if decision.state is State.LOW:
            is_low.update(eqn.outvars)
        is_kept = decision.run is Run.AS_TRACED and decision.state is State.HARD
        is_by_choice = decision.reason is Reason.OTHER_FLOATS
        if not is_kept or is_by_choice or is_decided_inside(decided.row):
            continue
        if decided.row.op == "while":
            given = {atom for atom in eqn.invars if not structure.is_literal(atom)}
            is_cast, remedy = not given.isdisjoint(is_low), _FOR_A_LOOP
        else:
            returns_float32 = any(map(structure.is_float32, eqn.outvars))
            op = record_of(decided.row.op)
            is_kernel = op is None or op.group == "kernel" or op.is_higher_order
            is_cast = _has_low(decided) and returns_float32 and is_kernel
            remedy = _FOR_A_KERNEL if is_kernel else _FOR_A_FUNCTION
        inside = [e for j in params.inner_jaxprs(eqn) for e, _ in equations(j)]
        n_products = sum(
            params.op_of(e) in PRODUCTS and any(map(structure.is_float32, e.invars))
            for e in inside
        )
        is_inside = id(eqn) in known
        known.update(map(id, inside))
        needs_digits = is_inside or decided.row.op in HOLDING_SOLVERS
        runs = f"{decided.row.op} runs as traced"
        if is_cast:
            message = f"{runs}, so 16-bit operands are cast to float32 for it"
            yield _make_lint(decided, "opaque op", message, remedy)
        elif n_products and not needs_digits:
            many = f"{n_products} float32 matrix products"
            products = many if n_products > 1 else "a float32 matrix product"
            yield _make_lint(
                decided, "kept product", f"{runs}, with {products} inside", remedy
            )


_FOR_A_FUNCTION = "Apply jmp_lite.autocast to the function inside it if 16 bits suffice"

_FOR_A_KERNEL = "Call it through jmp_lite.low_call if it accepts 16 bits"

_FOR_A_LOOP = 'Use rules.carry(scope, "follow") if the loop also ends in 16 bits'


def _literal(inputs: LintInput) -> Iterator[Lint]:
    for decided in inputs.decided:
        if not (_follows_float32(decided) and _has_low(decided)):
            continue
        for operand in decided.operands:
            number = operand.origin  # For a marked number it is the mark.
            if operand.state is State.HARD and isinstance(number, NumberOrigin):
                what, remedy = _misfit(number, np.dtype(inputs.rules.compute_dtype))
                yield _make_lint(
                    decided,
                    "literal out of range",
                    f"{origin_in_words(number)} {what}, so this op runs in float32",
                    remedy,
                )


def _misfit(number: NumberOrigin, dtype: Dtype) -> tuple[str, str]:
    """Returns what a number becomes in 16 bits, and the remedy."""
    with np.errstate(over="ignore"):
        low = np.float32(number.value).astype(dtype)
    if low == 0:
        least = float(jnp.finfo(dtype).smallest_normal)
        return f"is 0 in {dtype.name}", f"Use {least:.1e} or more if it is an epsilon"
    if low == 1:
        remedy = "Apply jmp_lite.as_low to the result if 1 suffices"
        return f"is 1 in {dtype.name}", remedy
    remedy = "For a mask use jnp.finfo(x.dtype).min or jnp.where(m, x, -jnp.inf)"
    return f"does not fit {dtype.name}", remedy


def _no_loss_scale(inputs: LintInput) -> Iterator[Lint]:
    is_float16 = any(decided.row.precision == "float16" for decided in inputs.decided)
    is_scaled = any(LOSS_SCALE_SCOPE in one.row.scope for one in inputs.decided)
    if is_float16 and inputs.has_gradients and not is_scaled:
        yield Lint(
            "no loss scale",
            "float16 gradients without a loss scale: those below 6e-8 become zero",
            "Use jmp_lite.value_and_grad and jmp_lite.loss_scaling, unless the caller "
            "scales the loss",
        )


def _rule_of_scaled_cotangents(inputs: LintInput) -> Iterator[Lint]:
    """A backward rule that clips or normalises what a loss scale has multiplied."""
    if not inputs.has_gradients or inputs.rules.compute_dtype != np.float16:
        return
    for eqn, place in placed_equations(inputs.program.jaxpr):
        is_rule = params.op_of(eqn) == "custom_vjp_call"
        culprit = homogeneity.culprit_of(eqn) if is_rule else None
        if culprit is not None:
            yield Lint(
                "backward rule",
                f"under a loss scale, {homogeneity.describe(eqn, culprit)}",
                "jmp_lite.value_and_grad and build_train_step hand it the true "
                "cotangent. If you scale the loss by hand, divide the cotangent by the "
                "scale in the rule",
                place.path,
                source.source(eqn, place.source),
            )


def _useless_mark(inputs: LintInput) -> Iterator[Lint]:
    """Only low products read a value that as_full marks."""
    marked: dict[int, DecidedRow] = {}
    low = Counter[int]()
    reads = Counter[int](id(result.origin) for result in inputs.results)
    for decided in inputs.decided:
        match = decided.decision.match
        is_full = match is not None and match.name == FULL_SCOPE
        if is_full and decided.row.op == "name":
            marked[id(decided.eqn)] = decided
        is_low = decided.row.op in PRODUCTS and decided.decision.run is Run.LOW
        for operand in decided.operands:
            reads[id(operand.origin)] += 1
            low[id(operand.origin)] += is_low
    for name, decided in marked.items():
        if low[name] and low[name] == reads[name]:
            yield _make_lint(
                decided,
                "useless mark",
                "as_full marks a value that only 16-bit products read, which round it",
                "Compute the product under jmp_lite.full_precision",
            )


def _inner_autocast(inputs: LintInput) -> Iterator[Lint]:
    """The function is already autocast, so its decisions cannot be explained."""
    inside = [
        decided
        for decided in inputs.decided
        if decided.row.op != "convert_element_type" and is_decided_inside(decided.row)
    ]
    if inside:
        own = np.dtype(inputs.rules.compute_dtype).name
        dtypes = {one.row.precision for one in inside if one.row.op in PRODUCTS}
        others = ", ".join(sorted(dtypes - {own}))
        in_others = f", with products in {others} instead of {own}," if others else ""
        yield _make_lint(
            inside[0],
            "inner autocast",
            f"an inner autocast decides {len(inside)} equations{in_others} and hides "
            "its reasons",
            "Explain the inner function, fun.__wrapped__, with its rules",
        )


_CHECKS: Sequence[Callable[[LintInput], Iterator[Lint]]] = (
    _widened_stream,
    _FLOAT32_INPUT,
    _float32_carry,
    _FLOAT32_PRODUCT,
    _off_tensor_cores,
    _unfit_for_format,
    *_LOST_DIGITS,
    _wide_work,
    _low_sampling,
    _AMPLIFIED_ROUNDING,
    _opaque,
    _literal,
    _no_loss_scale,
    _rule_of_scaled_cotangents,
    _useless_mark,
    _inner_autocast,
    _captured,
    _traced_in_16_bits,
)
