"""``Rules``: the precision of each op, scope and loop carry.

A ``Rules`` is a value: every edit returns a new one. This file traces nothing and binds
nothing.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import jax
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.match import (
    AnyPrecision,
    format_of,
    in_json,
    match_scope,
    name_of,
    parse_precision,
)
from jmp_lite.autocasting.rules.serialization import fields_for_json, fields_in_json
from jmp_lite.casting.dtypes import hint_for, parse_dtype, unknown_name
from jmp_lite.formats.float8 import Float8
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.formats.own import Format
from jmp_lite.formats.table import FORMATS
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Dtype
from jmp_lite.ops import (
    EDITABLE,
    LOWERABLE,
    Precision,
    base_of,
    ops_of,
    record_of,
)

Item = TypeVar("Item")

_BY_TABLE = {
    precision: ops_of(precision) & LOWERABLE
    for precision in (Precision.LOW, Precision.FULL, Precision.FOLLOW)
}

Scope = tuple[str, AnyPrecision]
Carry = tuple[str, str]
PASSES = ("labels", "rematerialize", "scan_weight_gradients", "upcasts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The precision of each op, scope and loop carry. A frozen, hashable value.

    Attributes:
      compute_dtype: the dtype of low ops, a ``np.dtype`` of 16 bits, or float32, which
        lowers nothing. ``"half"`` selects the dtype of the device at each call, see
        ``half_dtype``.
      ops: pairs ``(op, Precision)``, sorted, for ops whose precision differs from the
        op table.
      default: the precision of ops that follow their operands according to the op
        table. Even with ``LOW``, values on which no matrix product depends stay in
        float32.
      scopes: pairs ``(pattern, Precision)``, in order. The first pattern that
        ``re.search`` finds in the path of an op decides, before ``ops``.
      carries: pairs ``(pattern, "follow" | "full")``, in order, for the carries of
        loops.
      passes: the rewrites of converted programs. They change no result of the
        function, and a gradient by its rounding only.

        - ``"labels"``: the derivative of a gather that takes one element of each row,
          such as the label's log-probability, is a selection and no scatter.
        - ``"rematerialize"``: a scan recomputes cheap ops between products in the
          backward pass.
        - ``"scan_weight_gradients"``: the gradient of a weight that a scan uses in
          every step becomes one product after the scan.
        - ``"upcasts"``: an input that a jit-compiled call only casts to float32 is cast
          outside of the call. A call that decides alike for float32 and 16-bit inputs
          is lowered once.

    Raises:
      ValueError: an op, a precision, a dtype, a pattern or a pass is unknown.

    Example:
      >>> import jmp_lite as jmp
      >>> rules = jmp.get_rules("mixed").full("tanh").scope("head", "full")
      >>> rules.precision_of("tanh"), rules.precision_of("dot_general")
      (Precision.FULL, Precision.LOW)
      >>> rules.precision_in("LM/head/Dense_0"), rules.compute_dtype
      (Precision.FULL, dtype(bfloat16))
    """

    compute_dtype: DTypeLike = "bfloat16"
    ops: tuple[tuple[str, AnyPrecision], ...] = ()
    default: AnyPrecision = Precision.FOLLOW
    scopes: tuple[Scope, ...] = ()
    carries: tuple[Carry, ...] = ()
    passes: tuple[str, ...] = PASSES

    def __post_init__(self) -> None:
        pairs = _check_pairs(self.ops, "ops", ("exp", "low"))
        ops = {op: _check_op(op, parse_precision(p)) for op, p in pairs}
        scopes = _check_pairs(self.scopes, "scopes", ("head", "full"))
        carries = _check_pairs(self.carries, "carries", ("decoder", "full"))
        canonical = {
            "compute_dtype": _check_compute_dtype(self.compute_dtype),
            "ops": tuple(sorted(ops.items())),
            "default": _check_default(parse_precision(self.default)),
            "scopes": tuple(map(_check_scope, scopes)),
            "carries": tuple(map(_check_carry, carries)),
            "passes": _check_passes(self.passes),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)

    def low(self, *ops: str) -> "Rules":
        """Returns rules in which these ops are ``LOW``.

        Args:
          *ops: names of JAX primitives, such as ``"exp"``.
        """
        return self._with_ops(ops, Precision.LOW)

    def full(self, *ops: str) -> "Rules":
        """Returns rules in which these ops are ``FULL``.

        Args:
          *ops: names of JAX primitives, such as ``"tanh"``.
        """
        return self._with_ops(ops, Precision.FULL)

    def follow(self, *ops: str) -> "Rules":
        """Returns rules in which these ops ``FOLLOW`` their operands.

        Args:
          *ops: names of JAX primitives, such as ``"exp"``.
        """
        return self._with_ops(ops, Precision.FOLLOW)

    def widest(self, *ops: str) -> "Rules":
        """Returns rules in which these ops run in their ``WIDEST`` operand's dtype.

        Args:
          *ops: names of JAX primitives, such as ``"add"``.
        """
        return self._with_ops(ops, Precision.WIDEST)

    def keep(self, *ops: str) -> "Rules":
        """Returns rules in which these ops ``KEEP`` the dtypes of the trace.

        Args:
          *ops: names of JAX primitives, such as ``"exp"``.
        """
        return self._with_ops(ops, Precision.KEEP)

    def float8(self, *ops: str) -> "Rules":
        """Returns rules in which these matrix products are in ``"float8"``.

        For other options, see ``product``.

        Args:
          *ops: ``"dot_general"``, or ``"ragged_dot_general"``, the products of groups.
        """
        return self._with_ops(ops, FORMATS["float8"])

    def wide(self, *ops: str) -> "Rules":
        """Returns rules in which these matrix products have a float32 result.

        Their operands are in the compute dtype, and so are all operands of their
        derivatives. It applies to the products that float32 ops alone read, such as the
        logits of a loss. Others stay ``LOW``.

        Args:
          *ops: ``"dot_general"``, the only op with this form.

        Example:
          >>> import jax.numpy as jnp
          >>> import jmp_lite as jmp
          >>> rules = jmp.get_rules("mixed").wide("dot_general")
          >>> explained = jmp.explain(lambda x, w: jnp.exp(x @ w @ w), rules)
          >>> rows = explained(jnp.ones((2, 8)), jnp.ones((8, 8))).rows
          >>> [row.number_format for row in rows if row.op == "dot_general"]
          ['low', 'wide']
        """
        return self._with_ops(ops, FORMATS["wide"])

    def product(self, precision: AnyPrecision | Float8 | Format | str) -> "Rules":
        """Returns rules in which all matrix products have a precision.

        Args:
          precision: a ``Precision``, a number format, or the name of one. A number
            format, ``"float8"`` or ``Float8(smallest=1000)``, applies to the products
            that have it.

        Raises:
          ValueError: the precision is unknown.

        Example:
          >>> import jmp_lite as jmp
          >>> jmp.get_rules("mixed").product("float8") == jmp.get_rules("float8")
          True
        """
        precision = parse_precision(precision)
        requested = format_of(precision)
        return self._with_ops(requested.ops if requested else PRODUCTS, precision)

    def scope(
        self, pattern: str, precision: AnyPrecision | Float8 | Format | str
    ) -> "Rules":
        """Returns rules with one more scope, after the others.

        Args:
          pattern: a regular expression. ``re.search`` looks for it in the path of an
            op, such as ``"LM/Block_0/LayerNorm_0"``.
          precision: a ``Precision``, a number format, or the name of one. A number
            format, ``"float8"`` or ``Float8(sums="promoted")``, applies to matrix
            products only. Other ops in the scope ignore the rule.

        Raises:
          ValueError: the pattern is not a regular expression, or the precision is
            unknown.
        """
        return self._with(scopes=(*self.scopes, (pattern, parse_precision(precision))))

    def carry(self, pattern: str, precision: str) -> "Rules":
        """Returns rules with one more carry rule, after the others.

        Args:
          pattern: a regular expression. ``re.search`` looks for it in the path of a
            loop.
          precision: ``"follow"`` or ``"full"``. With ``"follow"`` a carry is low,
            unless the result of a step is float32 on purpose; a ``while`` loop with a
            float in its condition is converted too. With ``"full"`` it is float32.

        Raises:
          ValueError: the pattern is not a regular expression, or the precision is
            unknown.
        """
        return self._with(carries=(*self.carries, (pattern, precision)))

    def without_pass(self, name: str) -> "Rules":
        """Returns rules without one pass.

        Args:
          name: a name in ``passes``.

        Raises:
          ValueError: the pass is unknown.
        """
        _check_pass(name)
        return self._with(passes=tuple(one for one in self.passes if one != name))

    def precision_of(self, op: str) -> AnyPrecision:
        """Returns the ``Precision`` of an op outside of all scopes."""
        known = record_of(_check_name(op))
        if known is None:
            return Precision.KEEP
        follows = known.precision is Precision.FOLLOW
        of_table = self.default if follows else known.precision
        # JAX makes variants, such as ``psum_invariant``, of the op that a rule names.
        return self._ops.get(op, self._ops.get(base_of(op), of_table))

    def precision_in(self, path: str) -> AnyPrecision | None:
        """Returns the ``Precision`` of a scope, or None if no pattern matches it."""
        if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"Expected the path of an op, such as 'LM/head', got {path!r}."
            )
        match = match_scope(self.scopes, path)
        return match.precision if match else None

    def to_json(self) -> str:
        """Returns these rules as JSON, for ``Rules.from_json``.

        Raises:
          ValueError: a number format of the rules is your own.
        """
        return json.dumps(fields_for_json(fields_of(self), in_json), indent=2)

    @staticmethod
    def from_json(text: str) -> "Rules":
        """Reads rules from JSON: the text of ``to_json``, or Ascend's operator lists.

        Ascend's text is ``{"MatMul": {"precision_reduce": {"flag": "true"}}}``. "true"
        means ``LOW`` and "false" means ``FULL``. Every other op follows its operands,
        sums and matrix products too. The compute dtype is float16, as on Ascend. An
        operator of Ascend that is a layer becomes a scope. One warning lists the
        operators without a counterpart in JAX.

        Args:
          text: the JSON text.

        Raises:
          ValueError: the text is not JSON, or does not describe rules.

        Source: Ascend CANN, "modify_mixlist"; MindSpore's precision modes.

        Example:
          >>> import jmp_lite as jmp
          >>> rules = jmp.get_rules("mixed").full("tanh")
          >>> jmp.Rules.from_json(rules.to_json()) == rules
          True
          >>> ascend = '{"MatMul": {"precision_reduce": {"flag": "true"}}}'
          >>> jmp.Rules.from_json(ascend).compute_dtype
          dtype('float16')
        """
        names = [field.name for field in dataclasses.fields(Rules)]
        return Rules(**fields_in_json(text, names))

    def _with_ops(self, ops: Iterable[str], precision: AnyPrecision) -> "Rules":
        for op in ops:
            if not isinstance(op, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                example = "'exp', 'log'"
                if requested := format_of(precision):
                    example = ", ".join(map(repr, requested.ops))
                raise TypeError(
                    "Expected the names of ops as arguments, such as "
                    f"rules.{name_of(precision)}({example}), got {op!r}."
                )
        changed = {**self._ops, **dict.fromkeys(ops, precision)}
        return self._with(ops=tuple(changed.items()))

    def _with(self, **changes: Any) -> "Rules":
        """Returns plain ``Rules`` with some fields changed."""
        return Rules(**{**fields_of(self), **changes})

    @functools.cached_property
    def _ops(self) -> Mapping[str, AnyPrecision]:
        return dict(self.ops)


def is_identity(rules: Rules) -> bool:
    """Whether every op keeps its own precision."""
    of_user = {precision for _, precision in (*rules.ops, *rules.scopes)}
    return not any(p.lowers for p in of_user) and not _leaves_ops(rules, Precision.LOW)


def asks_for_low(rules: Rules, op: str, path: str) -> bool:
    """Returns whether the user's rules lower an op at a path, not the op table alone.

    A mark, a scope or an op rule may, or rules without any ``FULL`` op.
    """
    if rules.precision_in(path) is not None:
        return rules.precision_in(path) is Precision.LOW
    if (op, Precision.LOW) in rules.ops:
        return True
    named_full = {name for name, p in rules.ops if p is Precision.FULL}
    return not named_full & LOWERABLE and not _leaves_ops(rules, Precision.FULL)


def _leaves_ops(rules: Rules, precision: Precision) -> bool:
    """Whether lowerable ops that no rule names have a precision."""
    named = {op for op, _ in rules.ops}
    follow = rules.default is precision and not _BY_TABLE[Precision.FOLLOW] <= named
    return follow or not _BY_TABLE[precision] <= named


def requested_formats(rules: Rules) -> list[NumberFormat]:
    """Returns the number formats that rules request, each once."""
    precisions = [precision for _, precision in (*rules.ops, *rules.scopes)]
    return [*dict.fromkeys(filter(None, map(format_of, precisions)))]


def fields_of(rules: Rules) -> dict[str, Any]:
    """Returns the fields of rules, by name."""
    return {f.name: getattr(rules, f.name) for f in dataclasses.fields(Rules)}


def _check_op(op: str, precision: AnyPrecision) -> AnyPrecision:
    known, requested = record_of(_check_name(op)), format_of(precision)
    name = name_of(precision).upper()
    if known is None:
        raise _unknown_op(op)
    if known.is_higher_order:
        raise ValueError(
            f"{op!r} contains other ops, which are decided one by one: give a "
            "precision to those ops, or to a scope."
        )
    if requested is not None and op not in requested.ops:
        accepted = " or ".join(map(repr, requested.ops))
        message = f"{op!r} cannot be {name}: expected {accepted}. "
        raise ValueError((message + requested.why_these_ops).rstrip())
    is_kept = known.precision is Precision.KEEP and precision is not Precision.KEEP
    if is_kept or (known.is_float32_only and precision is Precision.LOW):
        raise ValueError(
            f"{op!r} cannot be {name}: {known.reason}. It stays {known.precision.name}."
        )
    return precision


def _check_default(precision: AnyPrecision) -> AnyPrecision:
    if format_of(precision) is not None:
        raise ValueError(
            f"{name_of(precision).upper()} is for matrix products only, see "
            "Rules.product: choose another default."
        )
    return precision


def _unknown_op(op: str) -> ValueError:
    near = _CALLED_OTHERWISE.get(op)
    # ``softmax`` and ``gelu`` are no primitives.
    if near is None and hasattr(jax.nn, op):
        return ValueError(
            f"{op!r} is a function of several ops. Put jax.named_scope around its "
            "call, and use rules.scope(pattern, precision)."
        )
    hint = f" Did you mean {near!r}?" if near else hint_for(op, sorted(EDITABLE))
    return ValueError(
        f"Unknown op {op!r}.{hint} Ops have the names of JAX's primitives; "
        "jmp_lite.explain(fun)(*args) lists those of your function."
    )


# JAX's names of ops, by common names.
_CALLED_OTHERWISE = {
    **dict.fromkeys(("matmul", "dot", "einsum", "linear", "dense"), "dot_general"),
    **dict.fromkeys(("conv", "conv2d", "convolution"), "conv_general_dilated"),
    "sum": "reduce_sum",
    "mean": "reduce_sum",
    "prod": "reduce_prod",
    "sigmoid": "logistic",
    "where": "select_n",
    "power": "pow",
    "softmax": "exp",
    "maximum": "max",
    "minimum": "min",
    "relu": "max",
    "add_n": "add_any",
    "multiply": "mul",
    "divide": "div",
    "subtract": "sub",
    "take": "gather",
    "psum_scatter": "reduce_scatter",
    "all_reduce": "psum",
}


def _check_name(op: str) -> str:
    """Returns the name of an op; raises a ValueError for anything else."""
    if not isinstance(op, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"Expected the name of an op, such as 'exp', got {op!r}.")
    return op


HALF_OF_DEVICE = "half"


def _check_compute_dtype(dtype: DTypeLike) -> "Dtype | str":
    if isinstance(dtype, str) and dtype == HALF_OF_DEVICE:
        return HALF_OF_DEVICE
    parsed = parse_dtype(dtype)
    # Float32 is useful to see what the passes do without any rounding.
    if parsed.itemsize not in (2, 4):
        hint = " For float8 products use the preset 'float8'."
        raise ValueError(
            "Expected a compute dtype of 16 bits, bfloat16 or float16 (or float32, "
            f"which lowers nothing), got {parsed.name}."
            + (hint if parsed.itemsize == 1 else "")
        )
    return parsed


def _check_pairs(pairs: Any, field: str, example: tuple[str, str]) -> Any:
    """Returns the pairs of a field; raises a ValueError for anything else."""
    is_list = isinstance(pairs, tuple | list)
    for pair in cast("tuple[Any, ...]", pairs if is_list else [pairs]):
        if not (is_list and isinstance(pair, tuple | list) and len(pair) == 2):
            raise ValueError(
                f"Expected {field} as a tuple of pairs, such as {(example,)!r}, got "
                f"{pairs!r}."
            )
    return pairs


def _check_scope(scope: Scope) -> Scope:
    pattern, precision = scope
    return check_pattern(pattern), parse_precision(precision)


def _check_carry(carry: Carry) -> Carry:
    pattern, precision = carry
    if precision not in ("follow", "full"):
        raise unknown_name("precision of a carry", str(precision), ["follow", "full"])
    return check_pattern(pattern), precision


def _check_passes(passes: object) -> tuple[str, ...]:
    if not isinstance(passes, tuple | list):
        raise ValueError(
            f"Expected passes as a tuple of names, such as {PASSES[-1:]!r}, got "
            f"{passes!r}."
        )
    return tuple(map(_check_pass, cast("tuple[str, ...]", passes)))


def _check_pass(name: str) -> str:
    if name not in PASSES:
        raise unknown_name("pass", str(name), PASSES)
    return name


def check_pattern(pattern: str) -> str:
    """Returns a pattern; raises a ValueError if it is not a regular expression."""
    # JSON has no compiled patterns.
    if isinstance(cast(object, pattern), re.Pattern):
        raise ValueError(
            f"Expected a regular expression as a string, got {pattern!r}: write flags "
            "into it, such as '(?i)head'."
        )
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"Expected a regular expression, got {pattern!r}: {error}."
        ) from None
    return pattern
