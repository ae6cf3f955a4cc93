"""``Rules``: which precision each op, scope and loop carry gets.

A rule is a value: every edit of a ``Rules`` returns a new one. Nothing here traces or
binds.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.op_table import (
    EDITABLE,
    FLOAT8_OPS,
    GROUPS,
    HIGHER_ORDER,
    group_of,
)
from jmp_lite.autocasting.rules.precision import (
    Float8,
    Precision,
    RuleMatch,
    RuleSource,
    parse_precision,
)
from jmp_lite.casting.dtypes import nearest_name, parse_dtype, unknown_name

AUTOCAST_SCOPE = "__autocast__"

FULL_SCOPE = "__full_precision__"

LOW_SCOPE = "__low_precision__"

AS_WRITTEN_SCOPE = "__low_call__"

_MARKS: Mapping[str, Precision] = MappingProxyType(
    {
        AUTOCAST_SCOPE: Precision.KEEP,
        FULL_SCOPE: Precision.FULL,
        LOW_SCOPE: Precision.LOW,
        AS_WRITTEN_SCOPE: Precision.KEEP,
    }
)
"""Reserved names of scopes, which come before all others, the innermost first."""


def of_the_user(path: str) -> str:
    """Returns a path without the name under which autocast itself binds."""
    return "/".join(name for name in path.split("/") if name != AUTOCAST_SCOPE)


Scope = tuple[str, Precision]

Carry = tuple[str, str]

PASSES = ("rematerialize", "scan_weight_gradients", "upcasts")

NORM_LAYERS: Scope = (
    # Not a block or a cell that is called after its norm.
    r"(?i)(layer|rms|group|batch|instance)_?norm(s|alization)?(?![a-z])",
    Precision.FULL_INSIDE,
)


_FLOAT8 = Float8()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Which precision each op, scope and loop carry gets. Frozen, hashable, a value.

    Attributes:
      compute_dtype: the dtype that low ops run in, a ``np.dtype``: of 16 bits, or
        float32, which lowers nothing. Or ``"half"``: the device is asked when a
        function is called, see ``on_this_device``.
      ops: ``(op, Precision)`` for each op whose precision is not the table's, sorted.
      default: the precision of the ops that the table says follow their operands. Even
        where it is ``LOW``, what no matrix product depends on is float32.
      scopes: ``(pattern, Precision)`` in order. The first pattern that ``re.search``
        finds in the path of an op decides, before the op's own precision.
      carries: ``(pattern, "follow" | "full")`` in order, for the carries of loops.
      passes: the rewrites that autocast makes of what it has converted, which change no
        result. ``"rematerialize"``: cheap ops between products in a scan are computed
        again in the backward pass. ``"scan_weight_gradients"``: the gradient of a
        weight of a scan is one product after it. ``"upcasts"``: an input that a jitted
        call only raises to float32 is raised outside of it, and a call that decides
        alike for float32 and 16-bit inputs is lowered once.
      float8_format: the formats of products that are ``FLOAT8``, and which qualify.

    Raises:
      ValueError: an op, a precision, a dtype, a pattern or a pass is unknown.

    Example:
      >>> from jmp_lite import get_rules
      >>> rules = get_rules("mixed").full("tanh").scope("head", "full")
      >>> rules.precision_of("tanh"), rules.precision_of("dot_general")
      (Precision.FULL, Precision.LOW)
      >>> rules.precision_in("LM/head/Dense_0")
      Precision.FULL
    """

    compute_dtype: DTypeLike = "bfloat16"
    ops: tuple[tuple[str, Precision], ...] = ()
    default: Precision = Precision.FOLLOW
    scopes: tuple[Scope, ...] = ()
    carries: tuple[Carry, ...] = ()
    passes: tuple[str, ...] = PASSES
    float8_format: Float8 = _FLOAT8

    def __post_init__(self) -> None:
        ops = {op: _check_op(op, parse_precision(p)) for op, p in self.ops}
        canonical = {
            "compute_dtype": _check_compute_dtype(self.compute_dtype),
            "ops": tuple(sorted(ops.items())),
            "default": _check_default(parse_precision(self.default)),
            "scopes": tuple(map(_check_scope, self.scopes)),
            "carries": tuple(map(_check_carry, self.carries)),
            "passes": _check_passes(self.passes),
            "float8_format": _check_float8(self.float8_format),
        }
        for name, value in canonical.items():
            object.__setattr__(self, name, value)

    def low(self, *ops: str) -> "Rules":
        """Returns rules in which these ops are ``LOW``."""
        return self._with_ops(ops, Precision.LOW)

    def full(self, *ops: str) -> "Rules":
        """Returns rules in which these ops are ``FULL``."""
        return self._with_ops(ops, Precision.FULL)

    def follow(self, *ops: str) -> "Rules":
        """Returns rules in which these ops ``FOLLOW`` their operands."""
        return self._with_ops(ops, Precision.FOLLOW)

    def widest(self, *ops: str) -> "Rules":
        """Returns rules in which these ops run in their ``WIDEST`` operand's dtype."""
        return self._with_ops(ops, Precision.WIDEST)

    def keep(self, *ops: str) -> "Rules":
        """Returns rules in which these ops ``KEEP`` the dtypes they were traced in."""
        return self._with_ops(ops, Precision.KEEP)

    def float8(self, *ops: str) -> "Rules":
        """Returns rules in which these matrix products are ``FLOAT8``.

        Args:
          *ops: ``"dot_general"``, of which there are matrix products alone.
        """
        return self._with_ops(ops, Precision.FLOAT8)

    def scope(self, pattern: str, precision: "Precision | str") -> "Rules":
        """Returns rules with one more scope, behind yours and before the preset's.

        Args:
          pattern: a regular expression that is searched in the path of an op, such as
            ``"LM/Block_0/LayerNorm_0"``.
          precision: a ``Precision`` or its name. ``"float8"`` is for the matrix
            products in the scope; other ops in it are decided as if it did not match.
        """
        mine = [scope for scope in self.scopes if scope != NORM_LAYERS]
        preset = [scope for scope in self.scopes if scope == NORM_LAYERS]
        new = (pattern, parse_precision(precision))
        return self._with(scopes=(*mine, new, *preset))

    def carry(self, pattern: str, precision: str) -> "Rules":
        """Returns rules with one more carry rule, behind the earlier ones.

        Args:
          pattern: a regular expression, searched in the path of a loop.
          precision: ``"follow"`` (low if its start or its result is; a ``while`` that
            a float ends is converted too) or ``"full"``.
        """
        return self._with(carries=(*self.carries, (pattern, precision)))

    def without_pass(self, name: str) -> "Rules":
        """Returns rules with one pass fewer; see ``passes`` for their names."""
        _check_pass(name)
        return self._with(passes=tuple(one for one in self.passes if one != name))

    def precision_of(self, op: str) -> Precision:
        """Returns the precision of an op outside of all scopes."""
        group = group_of(op)
        if group is None:
            return Precision.KEEP
        follows = group.precision is Precision.FOLLOW
        return self._ops.get(op, self.default if follows else group.precision)

    def precision_in(self, path: str) -> Precision | None:
        """Returns the precision of all ops in a scope; None where no pattern says."""
        match = self.match_scope(path)
        return match.precision if match else None

    def match(self, op: str, path: str) -> RuleMatch:
        """Returns the rule that decides of an op where it stands.

        What is decided by a kernel, by bits or by effects, no scope changes.
        """
        group = group_of(op)
        if group is None:
            return RuleMatch(Precision.KEEP, RuleSource.UNKNOWN, op)
        of_table = RuleMatch(group.precision, RuleSource.TABLE, group.id)
        if group.precision is Precision.KEEP:
            return of_table
        match = self.match_scope(path, op)
        if match and (group.has_low_form or match.precision is not Precision.LOW):
            return match
        precision = self.precision_of(op)
        if op in self._ops:
            return RuleMatch(precision, RuleSource.OP, op)
        if precision is not group.precision:
            return RuleMatch(precision, RuleSource.DEFAULT, op)
        return of_table

    def match_scope(self, path: str, op: str = "") -> RuleMatch | None:
        """Returns the mark or the scope rule that holds in a path.

        Args:
          path: the path.
          op: of one op; without it, of all ops there.
        """
        for name in reversed(path.split("/")):
            if name in _MARKS:
                return RuleMatch(_MARKS[name], RuleSource.MARK, name)
        for pattern, precision in self.scopes:
            is_of_others = precision is Precision.FLOAT8 and op not in FLOAT8_OPS
            if not is_of_others and re.search(pattern, path):
                return RuleMatch(precision, RuleSource.SCOPE, pattern)
        return None

    def region_in(self, path: str) -> str | None:
        """Returns the path of the ``FULL_INSIDE`` scope that a path is in, or None."""
        match = self.match_scope(path)
        if match is None or match.precision is not Precision.FULL_INSIDE:
            return None
        found = re.search(match.name, path)
        # A pattern may end with the slash behind a name, or with the end of the path.
        end = path.find("/", max(found.end() - 1, 0)) if found else -1
        return path if end < 0 else path[:end]

    def carry_in(self, path: str) -> str | None:
        """Returns ``"follow"`` or ``"full"`` for the carries of a loop, or None."""
        return _first_match(self.carries, path)

    def on_this_device(self) -> "Rules":
        """Returns rules of which the compute dtype is that of the default device.

        They are these rules themselves, unless the compute dtype is ``"half"``.
        """
        if not isinstance(self.compute_dtype, str):  # To NumPy, "half" is float16.
            return self
        return dataclasses.replace(self, compute_dtype=parse_dtype(HALF_OF_DEVICE))

    @property
    def is_identity(self) -> bool:
        """Whether no op is run in any other precision than its own."""
        changing = {Precision.LOW, Precision.FLOAT8, Precision.FULL_INSIDE}
        of_user = {precision for _, precision in (*self.ops, *self.scopes)}
        table = {self.precision_of(op) for group in GROUPS for op in group.ops}
        return not changing & (of_user | table)

    @property
    def asks_for_float8(self) -> bool:
        """Whether some product may run in float8."""
        of_user = (precision for _, precision in (*self.ops, *self.scopes))
        return Precision.FLOAT8 in of_user

    def to_json(self) -> str:
        """Returns these rules as JSON, which ``Rules.from_json`` reads back."""
        return json.dumps(
            {
                "compute_dtype": _name_of(self.compute_dtype),
                "ops": {op: precision.value for op, precision in self.ops},
                "default": self.default.value,
                "scopes": [[pattern, p.value] for pattern, p in self.scopes],
                "carries": [list(carry) for carry in self.carries],
                "passes": list(self.passes),
                "float8_format": dataclasses.asdict(self.float8_format),
            },
            indent=2,
        )

    @staticmethod
    def from_json(text: str) -> "Rules":
        """Reads rules from JSON: ``to_json``'s, or Ascend's operator lists.

        Ascend's is ``{"MatMul": {"precision_reduce": {"flag": "true"}}}``: "true" is
        ``LOW``, "false" ``FULL``, and every op that is not listed follows its operands,
        sums and matrix products too. The compute dtype is Ascend's, float16. A layer of
        Ascend's becomes a scope. Operators that have no counterpart in JAX are named in
        one warning.

        Args:
          text: the JSON text.

        Raises:
          ValueError: the text is no JSON, or says something that rules cannot.

        Source: Ascend CANN, "modify_mixlist"; MindSpore's precision modes.
        """
        # It makes rules, so that it imports this module.
        from jmp_lite.autocasting.rules.serialization import read_rules

        return read_rules(text)

    def _with_ops(self, ops: Iterable[str], precision: Precision) -> "Rules":
        changed = {**self._ops, **dict.fromkeys(ops, precision)}
        return self._with(ops=tuple(changed.items()))

    def _with(self, **changes: Any) -> "Rules":
        """Returns rules, and nothing more than rules, with something changed."""
        return Rules(**{**fields_of(self), **changes})

    @functools.cached_property
    def _ops(self) -> Mapping[str, Precision]:
        return dict(self.ops)


def asks_for_low(rules: Rules, op: str, path: str) -> bool:
    """Returns whether more than the table of ops lowers an op where it stands.

    A mark, a scope, the name of the op, or that nothing at all is ``FULL``.
    """
    if rules.precision_in(path) is not None:
        return rules.precision_in(path) is Precision.LOW
    lowerable = (op for g in GROUPS if g.has_low_form for op in g.ops)
    is_named = (op, Precision.LOW) in rules.ops
    return is_named or Precision.FULL not in map(rules.precision_of, lowerable)


def fields_of(rules: Rules) -> dict[str, Any]:
    """Returns all that rules say, by name."""
    return {f.name: getattr(rules, f.name) for f in dataclasses.fields(Rules)}


def _first_match(rules: Iterable[tuple[str, Any]], path: str) -> Any:
    return next((value for pattern, value in rules if re.search(pattern, path)), None)


def _check_op(op: str, precision: Precision) -> Precision:
    group = group_of(op)
    if op in HIGHER_ORDER:
        raise ValueError(
            f"{op!r} is entered, and what it holds is decided op by op: name those "
            "ops, or a scope."
        )
    if group is None:
        raise _unknown_op(op)
    if precision is Precision.FULL_INSIDE:
        raise ValueError(f"FULL_INSIDE is for scopes; expected another one for {op!r}.")
    if precision is Precision.FLOAT8 and op not in FLOAT8_OPS:
        raise ValueError(
            f"{op!r} cannot be FLOAT8: expected {' or '.join(map(repr, FLOAT8_OPS))}. "
            "Convolutions and ragged products have no float8 kernels that XLA calls."
        )
    cannot = not group.has_low_form and precision is Precision.LOW
    if cannot or (
        group.precision is Precision.KEEP and precision is not Precision.KEEP
    ):
        raise ValueError(
            f"{op!r} cannot be {precision.name}, because: {group.reason}. It stays "
            f"{group.precision.name}."
        )
    return precision


def _check_default(precision: Precision) -> Precision:
    if precision in (Precision.FULL_INSIDE, Precision.FLOAT8):
        raise ValueError(
            f"{precision.name} is for {_IS_FOR[precision]}; expected another default."
        )
    return precision


_IS_FOR = {
    Precision.FULL_INSIDE: "scopes",
    Precision.FLOAT8: "matrix products, see Rules.float8",
}


def _unknown_op(op: str) -> ValueError:
    near = _CALLED_OTHERWISE.get(op) or nearest_name(op, sorted(EDITABLE))
    hint = f" Did you mean {near!r}?" if near else ""
    return ValueError(
        f"Unknown op {op!r}.{hint} Ops have the names of JAX's primitives, which "
        "jmp_lite.explain(fun)(*args) lists."
    )


# What users call ops, by JAX's names of them.
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
}

HALF_OF_DEVICE = "half"


def _check_compute_dtype(dtype: DTypeLike) -> "np.dtype[Any] | str":
    if isinstance(dtype, str) and dtype == HALF_OF_DEVICE:
        return HALF_OF_DEVICE
    parsed = parse_dtype(dtype)
    if parsed.itemsize not in (2, 4):
        raise ValueError(
            "Expected a compute dtype of 16 bits, bfloat16 or float16 (or float32, "
            f"which lowers nothing), got {parsed.name}."
        )
    return parsed


def _name_of(dtype: DTypeLike) -> str:
    return HALF_OF_DEVICE if isinstance(dtype, str) else np.dtype(dtype).name


def _check_float8(given: Any) -> Float8:
    if isinstance(given, Mapping):  # From JSON.
        names = [field.name for field in dataclasses.fields(Float8)]
        for name in cast("Mapping[str, Any]", given):
            if name not in names:
                raise unknown_name("field of float8_format", str(name), names)
        return Float8(**given)
    if not isinstance(given, Float8):
        raise ValueError(
            f"Expected float8_format as jmp_lite.Float8(...), got {given!r}."
        )
    return given


def _check_scope(scope: Scope) -> Scope:
    pattern, precision = scope
    return check_pattern(pattern), parse_precision(precision)


def _check_carry(carry: Carry) -> Carry:
    pattern, precision = carry
    if precision not in ("follow", "full"):
        raise unknown_name("precision of a carry", str(precision), ["follow", "full"])
    return check_pattern(pattern), precision


def _check_passes(passes: Any) -> tuple[str, ...]:
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
    """Returns a pattern; raises a ValueError if it is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"Expected a regular expression, got {pattern!r}: {error}."
        ) from None
    return pattern
