"""Which precision each op, each scope and each loop carry gets: data and lookups.

The law of this file: a rule is a value. Nothing here traces, binds or imports JAX's
internals; a primitive is known by its name alone. What each group of ops is and why
stands in ``GROUPS``; a preset is a ``Rules``, and every edit of one is a new one.
"""

import dataclasses
import enum
import functools
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    dtype_names,
    nearest_name,
    parse_dtype,
    unknown_name,
)


class Precision(enum.Enum):
    """How an op, or all that a scope holds, is run.

    ``LOW``: operands are cast to the compute dtype, and so is the result.
    ``FULL``: in float32; the result is float32 on purpose, and what follows stays so.
    ``FOLLOW``: in the precision that the operands already have.
    ``WIDEST``: as ``FOLLOW``, but any float32 operand widens: ordinary promotion.
    ``KEEP``: in the dtypes that were traced.
    ``FULL_INSIDE``: for scopes: float32 inside, and what leaves is low again if
    something low entered. What a norm layer is.
    """

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    WIDEST = "widest"
    KEEP = "keep"
    FULL_INSIDE = "full_inside"

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


class Said(NamedTuple):
    """What rules say of an op, and why in words."""

    precision: Precision
    reason: str


# ------------------------------------------------------------------ the table of ops


class Group(NamedTuple):
    """Ops of one kind: their precision and, in words, why it is that."""

    precision: Precision
    reason: str
    ops: frozenset[str]
    has_low_form: bool = True


def _group(precision: Precision, reason: str, ops: str, low: bool = True) -> Group:
    return Group(precision, reason, frozenset(ops.split()), low)


_MOVES = "exact: it moves numbers"
_SENDS = "exact: it moves numbers between devices or memories"
_CHOOSES = "exact: it chooses or compares"

# Seen in jax 0.10.2 and 0.12.0. An op that is in no group is KEEP.
GROUPS: tuple[Group, ...] = (
    _group(
        Precision.LOW,
        "a matrix product, which accumulates in float32",
        "dot_general ragged_dot_general conv_general_dilated",
    ),
    _group(
        Precision.FULL,
        "it makes errors larger, or overflows",
        """exp exp2 expm1 log log1p log2 pow rsqrt reciprocal erf_inv acos asin atanh
        cosh sinh tan""",
    ),
    _group(
        Precision.FULL,
        "a special function, computed from sums and exponentials",
        """lgamma digamma polygamma zeta igamma igammac igamma_grad_a
        regularized_incomplete_beta bessel_i0e bessel_i1e""",
    ),
    _group(
        Precision.FULL,
        "a sum, in which roundings add up",
        """reduce_sum cumsum cumlogsumexp reduce_window_sum scatter-add scatter-sub
        select_and_scatter_add select_and_gather_add""",
    ),
    _group(
        Precision.FULL,
        "a product of many factors, which overflows",
        "reduce_prod cumprod scatter-mul",
    ),
    _group(
        Precision.FULL,
        "a sum over devices",
        """psum psum_start psum_done psum_invariant psum_invariant_start unreduced_psum
        unreduced_psum_start reduce_scatter reduce_scatter_start reduce_scatter_done
        unreduced_reduce_scatter unreduced_reduce_scatter_start""",
    ),
    _group(
        Precision.FULL,
        "linear algebra, which has no 16-bit form",
        """cholesky cholesky_update eig eigh svd qr geqrf geqp3 householder_product
        ormqr lu triangular_solve tridiagonal tridiagonal_solve hessenberg schur
        symmetric_product""",
        low=False,
    ),
    _group(
        Precision.FULL, "a Fourier transform, which has no 16-bit form", "fft", False
    ),
    _group(
        Precision.FOLLOW,
        "arithmetic",
        """add add_any sub mul div rem neg abs sign floor ceil round square integer_pow
        sqrt cbrt one_minus_square polynomial""",
    ),
    _group(
        Precision.FOLLOW,
        "bounded, or as smooth as its argument",
        "tanh logistic erf erfc sin cos atan atan2 acosh asinh",
    ),
    _group(
        Precision.FOLLOW,
        _CHOOSES,
        """max min clamp select_n reduce_max reduce_min reduce_window_max
        reduce_window_min cummax cummin argmax argmin sort top_k approx_top_k eq ne lt
        le gt ge eq_to lt_to le_to is_finite scatter-min scatter-max""",
    ),
    _group(
        Precision.FOLLOW,
        _MOVES,
        """reshape transpose broadcast_in_dim broadcast_to squeeze slice
        dynamic_slice dynamic_update_slice gather scatter rev pad split tile unstack
        stack concatenate copy stop_gradient name xla_metadata_value
        optimization_barrier zeros_like tie pin unpin""",
    ),
    _group(
        Precision.FOLLOW,
        _SENDS,
        """sharding_constraint layout_constraint reshard relayout device_put
        with_memory_space_constraint all_gather all_gather_invariant all_gather_start
        all_gather_done all_gather_reduced all_gather_reduced_start all_to_all
        all_to_all_start all_to_all_done ppermute ppermute_start ppermute_done
        pbroadcast pbroadcast_start pbroadcast_done pbroadcast_dynamic pmax pmin
        unreduced_pmax unreduced_pmin pvary ragged_all_to_all psend precv
        reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast
        vary_unreduced_cast_p preduced global_array_to_host_local_array
        host_local_array_to_global_array""",
    ),
    _group(
        Precision.KEEP,
        "its result depends on the bits or the type of its operands",
        """convert_element_type bitcast_convert_type reduce_precision nextafter complex
        real imag conj iota empty empty2 to_edtype from_edtype and or not xor
        shift_left shift_right_arithmetic shift_right_logical population_count clz
        mulhi reduce_and reduce_or reduce_xor""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "it holds a function of its own, traced for its operands' types",
        """reduce reduce_window select_and_scatter custom_linear_solve linear_call
        custom_partitioning custom_lin composite call jaxpr_call run_state run_scoped
        stage call_hi_primitive call_hi_primitive_linearized call_exported
        custom_jvp_call_jaxpr remat_opt core_map mpmd_map fused_call""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "a kernel or a callback, written for the types that it was given",
        """pallas_call ffi_call pure_callback io_callback debug_callback debug_print
        buffer_callback tpu_custom_call inspect_sharding scaled_matmul
        scaled_matmul_wrapper scaled_dot
        cudnn_fusion dot_product_attention_fwd dot_product_attention_fwd_wrapper
        dot_product_attention_bwd dot_product_attention_bwd_wrapper
        dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
        rnn_fwd rnn_bwd""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "a step of XLA's own, as it was written",
        """thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done
        thunky.async_start thunky.call_jax thunky.call_thunky_nested
        thunky.collective_group thunky.collective_permute thunky.cond thunky.copy
        thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
        thunky.ptx_kernel thunky.reduce_scatter thunky.while""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "random bits are those of float32",
        """random_bits random_seed random_split random_fold_in random_wrap
        random_unwrap random_clone random_gamma random_gamma_grad rng_bit_generator
        rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "a sparse matrix's own op",
        """bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
        bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense
        bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
        coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense
        csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense""",
        low=False,
    ),
    _group(
        Precision.KEEP,
        "it has effects, or belongs to the machinery",
        """empty_ref new_ref get swap addupdate masked_load masked_swap freeze free_ref
        accum_grad_in_ref get_global box_get box_set new_box new_log log_read
        log_extend check shape_assertion after_all create_token axis_index program_id
        num_programs dim_as_value dimension_size platform_index semaphore_read
        semaphore_signal semaphore_wait delay unreachable dce_sink create_linear
        program_order multiple_of lu_pivots_to_permutation shard_alike""",
        low=False,
    ),
)

# Entered by a handler of their own, and decided op by op inside.
HIGHER_ORDER = frozenset(
    {
        *("jit", "scan", "while", "cond", "checkpoint", "remat", "remat2"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "shard_map"),
        *("closed_call", "eval_jaxpr", "compute_on", "xla_metadata_call"),
    }
)

# What follows refines single ops of the groups above.

PRODUCTS = frozenset(op for g in GROUPS if g.precision is Precision.LOW for op in g.ops)
"""Matrix products: what is low in every preset that lowers anything."""

MOVING = frozenset(op for g in GROUPS if g.reason in (_MOVES, _SENDS) for op in g.ops)
"""Each number of the result is a number of an operand, whatever those are."""

EXACT = MOVING.union(
    ("neg", "abs"), *(group.ops for group in GROUPS if group.reason == _CHOOSES)
)
"""These round nothing, so that demand looks through them."""

_DEAR = {"sort", "top_k", "approx_top_k", "gather", "scatter", "cummax", "cummin"}
_LIGHT = ("arithmetic", "bounded, or as smooth as its argument", _MOVES, _CHOOSES)
_ADDS = frozenset(["add", "add_any", "sub", "neg", "reduce_sum"])

LINEAR = MOVING | _ADDS | {"convert_element_type"}
"""Their derivative needs nothing of what they were given."""

CHEAP = (
    LINEAR.union(*(group.ops for group in GROUPS if group.reason in _LIGHT))
    | {"exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt"}
) - (_DEAR | {op for g in GROUPS if g.reason == _SENDS for op in g.ops})
"""Ops that one pass over memory computes: to run them again costs little."""

ADDING = frozenset(["add", "sub", "add_any"])
"""Sums of two: what they are given is added up in what reads their result."""

PICKING = frozenset(["argmax", "argmin", "top_k", "approx_top_k"])
"""Their integers say which number is the largest, however near the next one is."""

COMPARING = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
"""Comparisons of two."""

PASSING = frozenset(["optimization_barrier"])
"""Each result is an operand: their precisions are not joined."""

ADDED_UP = frozenset(
    [
        *("broadcast_in_dim", "broadcast_to", "tile", "gather", "sort", "top_k"),
        *("approx_top_k", "reduce_max", "reduce_min", "cummax", "cummin"),
        *("reduce_window_max", "reduce_window_min"),
        *("scatter-min", "scatter-max", "all_gather", "all_gather_invariant"),
        *("all_gather_start", "all_gather_reduced", "all_gather_reduced_start"),
        *("pvary", "pbroadcast", "pbroadcast_start"),
        *("erf", "erfc", "asinh", "acosh", "polynomial"),
    ]
)
"""JAX's derivative of these adds up, or takes an exp or an rsqrt, in their dtype: they
run in float32, and their result is cast."""

POSITIONAL = frozenset(["sin", "cos"])
"""In float32, because arguments may be positions; what comes out is bounded."""

BROADCASTING = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "rem",
        "max",
        "min",
        "pow",
        "atan2",
        "select_n",
        "clamp",
        "nextafter",
    ]
)
"""These spread scalars and axes of size 1 over the other operands."""

DTYPE_PARAMS: Mapping[str, bool] = MappingProxyType(
    {"preferred_element_type": True, "out_dtype": True, "precision": False}
)
"""Parameters that name a dtype, which low ops change (True) or drop (False)."""

AUTOCAST_SCOPE = "__autocast__"
FULL_SCOPE = "__full_precision__"
LOW_SCOPE = "__low_precision__"
AS_WRITTEN_SCOPE = "__low_call__"
_MARKS: Mapping[str, Said] = MappingProxyType(
    {
        AUTOCAST_SCOPE: Said(Precision.KEEP, "an inner autocast has decided it"),
        FULL_SCOPE: Said(Precision.FULL, "marked by full_precision or as_full"),
        LOW_SCOPE: Said(Precision.LOW, "marked by low_precision or as_low"),
        AS_WRITTEN_SCOPE: Said(Precision.KEEP, "inside of low_call, as it was written"),
    }
)
"""Reserved names of scopes, which come before all others, the innermost first."""


def of_the_user(path: str) -> str:
    """Returns a path without the name under which autocast itself binds."""
    return "/".join(name for name in path.split("/") if name != AUTOCAST_SCOPE)


_GROUP_OF: Mapping[str, Group] = MappingProxyType(
    {op: group for group in GROUPS for op in group.ops}
)


_EDITABLE = [op for op, group in _GROUP_OF.items() if group.precision != Precision.KEEP]


def group_of(op: str) -> Group | None:
    """Returns the group that an op is in; None if it is not known."""
    return _GROUP_OF.get(op)


# ----------------------------------------------------------------------------- rules

Scope = tuple[str, Precision]
Carry = tuple[str, str]

NORM_LAYERS: Scope = (
    # Not a block or a cell that is called after its norm.
    r"(?i)(layer|rms|group|batch|instance)_?norm(s|alization)?(?![a-z])",
    Precision.FULL_INSIDE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Which precision each op, scope and loop carry gets. Frozen, hashable, a value.

    Attributes:
      compute_dtype: the dtype that low ops run in, a ``np.dtype``: of 16 bits, or
        float32, which lowers nothing. Or ``"half"``: the device is asked when a
        function is called, see ``on_this_device``.
      ops: ``(op, Precision)`` for each op whose precision is not the table's, sorted.
      default: the precision of the ops that the table says follow their operands.
      scopes: ``(pattern, Precision)`` in order. The first pattern that ``re.search``
        finds in the path of an op decides, before the op's own precision.
      carries: ``(pattern, "follow" | "full")`` in order, for the carries of loops.

    Raises:
      ValueError: an op, a precision, a dtype or a pattern is none.

    Example:
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

    def __post_init__(self) -> None:
        ops = {op: _check_op(op, parse_precision(p)) for op, p in self.ops}
        canonical = {
            "compute_dtype": _check_compute_dtype(self.compute_dtype),
            "ops": tuple(sorted(ops.items())),
            "default": parse_precision(self.default),
            "scopes": tuple(map(_check_scope, self.scopes)),
            "carries": tuple(map(_check_carry, self.carries)),
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

    def scope(self, pattern: str, precision: "Precision | str") -> "Rules":
        """Returns rules with one more scope, behind yours and before the preset's.

        Args:
          pattern: a regular expression that is searched in the path of an op, such as
            ``"LM/Block_0/LayerNorm_0"``.
          precision: a ``Precision`` or its name.
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

    def precision_of(self, op: str) -> Precision:
        """Returns the precision of an op outside of all scopes."""
        group = group_of(op)
        if group is None:
            return Precision.KEEP
        follows = group.precision is Precision.FOLLOW
        return self._ops.get(op, self.default if follows else group.precision)

    def precision_in(self, path: str) -> Precision | None:
        """Returns the precision of all ops in a scope; None where no pattern says."""
        said = self._said_in(path)
        return said.precision if said else None

    def said_of(self, op: str, path: str) -> Said:
        """Returns the precision of an op where it stands, and why.

        What is decided by a kernel, by bits or by effects, no scope changes.
        """
        group = group_of(op)
        if group is None:
            return Said(Precision.KEEP, f"nothing is known of {op!r}")
        if group.precision is Precision.KEEP:
            return Said(Precision.KEEP, group.reason)
        said = self._said_in(path)
        if said and (group.has_low_form or said.precision is not Precision.LOW):
            return said
        precision = self.precision_of(op)
        if op in self._ops:
            return Said(precision, f"the rules say so of {op!r}")
        if precision is not group.precision:
            return Said(precision, "the rules' default")
        return Said(precision, group.reason)

    def _said_in(self, path: str) -> Said | None:
        for name in reversed(path.split("/")):
            if name in _MARKS:
                return _MARKS[name]
        for pattern, precision in self.scopes:
            if re.search(pattern, path):
                return Said(precision, f"scope rule {pattern!r}")
        return None

    def region_in(self, path: str) -> str | None:
        """Returns the path of the ``FULL_INSIDE`` scope that a path is in, or None."""
        if self.precision_in(path) is not Precision.FULL_INSIDE:
            return None
        pattern = next(p for p, _ in self.scopes if re.search(p, path))
        found = re.search(pattern, path)
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
        return dataclasses.replace(self, compute_dtype=parse_dtype(_HALF))

    @property
    def is_identity(self) -> bool:
        """Whether no op is run in any other precision than its own."""
        changing = {Precision.LOW, Precision.FULL_INSIDE}
        said = {precision for _, precision in (*self.ops, *self.scopes)}
        table = {self.precision_of(op) for group in GROUPS for op in group.ops}
        return not changing & (said | table)

    def to_json(self) -> str:
        """Returns these rules as JSON, which ``Rules.from_json`` reads back."""
        return json.dumps(
            {
                "compute_dtype": _name_of(self.compute_dtype),
                "ops": {op: precision.value for op, precision in self.ops},
                "default": self.default.value,
                "scopes": [[pattern, p.value] for pattern, p in self.scopes],
                "carries": [list(carry) for carry in self.carries],
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
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Expected rules as JSON: {error}.") from None
        if not isinstance(data, dict):
            raise ValueError(
                f"Expected rules as a JSON object, got {type(data).__name__}."
            )
        if data and all(_is_ascend(entry) for entry in data.values()):
            return _from_ascend(data)
        return _from_fields(data)

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


def parse_precision(precision: "Precision | str") -> Precision:
    """Returns the precision of a name, in any case."""
    if isinstance(precision, Precision):
        return precision
    names = {member.value: member for member in Precision}
    if str(precision).lower() not in names:
        raise unknown_name("precision", str(precision), names)
    return names[str(precision).lower()]


def _first_match(rules: Iterable[tuple[str, Any]], path: str) -> Any:
    return next((said for pattern, said in rules if re.search(pattern, path)), None)


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
    cannot = not group.has_low_form and precision is Precision.LOW
    if cannot or (
        group.precision is Precision.KEEP and precision is not Precision.KEEP
    ):
        raise ValueError(
            f"{op!r} cannot be {precision.name}, because: {group.reason}. It stays "
            f"{group.precision.name}."
        )
    return precision


def _unknown_op(op: str) -> ValueError:
    near = _CALLED_OTHERWISE.get(op) or nearest_name(op, sorted(_EDITABLE))
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

_HALF = "half"


def _check_compute_dtype(dtype: DTypeLike) -> "np.dtype[Any] | str":
    if isinstance(dtype, str) and dtype == _HALF:
        return _HALF
    parsed = parse_dtype(dtype)
    if parsed.itemsize not in (2, 4):
        raise ValueError(
            "Expected a compute dtype of 16 bits, bfloat16 or float16 (or float32, "
            f"which lowers nothing), got {parsed.name}."
        )
    return parsed


def _name_of(dtype: DTypeLike) -> str:
    return _HALF if isinstance(dtype, str) else np.dtype(dtype).name


def _check_scope(scope: Scope) -> Scope:
    pattern, precision = scope
    return _check_pattern(pattern), parse_precision(precision)


def _check_carry(carry: Carry) -> Carry:
    pattern, precision = carry
    if precision not in ("follow", "full"):
        raise unknown_name("precision of a carry", str(precision), ["follow", "full"])
    return _check_pattern(pattern), precision


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"Expected a regular expression, got {pattern!r}: {error}."
        ) from None
    return pattern


# -------------------------------------------------------------------------- presets


def get_rules(name: str, compute_dtype: DTypeLike | None = None) -> Rules:
    """Returns the rules of a preset.

    Args:
      name: ``"mixed"``, MindSpore's levels ``"O0"`` to ``"O3"``, ``"torch"``, or one of
        Ascend's modes ``"must_keep_origin_dtype"``, ``"allow_fp32_to_fp16"``,
        ``"allow_mix_precision"``, ``"force_fp16"``.
      compute_dtype: the dtype of low ops; None for the preset's own, which is bfloat16,
        or float16 where Ascend's name says so.

    Raises:
      ValueError: there is no such preset or dtype.

    Source: MindSpore ``amp.auto_mixed_precision``; PyTorch's autocast op lists;
    Ascend's precision modes.

    Example:
      >>> get_rules("O1").precision_of("add"), get_rules("mixed").precision_of("add")
      (Precision.FULL, Precision.FOLLOW)
    """
    if name not in PRESETS:
        if name in (_HALF, *dtype_names()):
            raise ValueError(
                f"Expected the name of a preset, such as 'mixed', got the dtype "
                f"{name!r}. Pass compute_dtype={name!r}, or get_rules('mixed', "
                f"{name!r})."
            )
        raise unknown_name("preset", str(name), PRESETS)
    rules = PRESETS[name]
    if compute_dtype is None:
        return rules
    return dataclasses.replace(rules, compute_dtype=compute_dtype)


def _ops_that_are(*precisions: Precision) -> list[str]:
    return [op for group in GROUPS if group.precision in precisions for op in group.ops]


_MIXED = Rules(scopes=(NORM_LAYERS,))
_O0 = Rules(default=Precision.KEEP).keep(*_ops_that_are(Precision.LOW, Precision.FULL))
_O3 = Rules(default=Precision.LOW).low(
    *(
        op
        for group in GROUPS
        if group.precision is Precision.FULL and group.has_low_form
        for op in group.ops
    )
)
_MATMULS = ("dot_general", "ragged_dot_general")
# What Ascend's lists edit: float16, in which no op has a precision of its own.
_ALL_FOLLOW = Rules(compute_dtype="float16").follow(
    *(
        op
        for group in GROUPS
        if group.precision is not Precision.KEEP and group.has_low_form
        for op in group.ops
    )
)

PRESETS: Mapping[str, Rules] = MappingProxyType(
    {
        "mixed": _MIXED,
        "O0": _O0,
        "O1": Rules(default=Precision.FULL),
        "O2": Rules(default=Precision.LOW, scopes=(NORM_LAYERS,)),
        "O3": _O3,
        # What PyTorch calls pow is integer_pow here where the exponent is an integer.
        "torch": Rules(default=Precision.WIDEST).full("integer_pow", "square"),
        "must_keep_origin_dtype": _O0,
        "allow_fp32_to_fp16": Rules(
            compute_dtype="float16", default=Precision.FULL
        ).full(*_MATMULS),
        "allow_mix_precision": _MIXED,
        "force_fp16": dataclasses.replace(_O3, compute_dtype="float16"),
    }
)


# ----------------------------------------------------------------------------- JSON

# Ascend's operators by the ops that JAX makes of them. A layer is many ops in JAX: its
# name becomes a scope.
ASCEND_OPS = {
    "MatMul": "dot_general",
    "MatMulV2": "dot_general",
    "MatMulV3": "dot_general",
    "BatchMatMul": "dot_general",
    "BatchMatMulV2": "dot_general",
    "Conv2D": "conv_general_dilated",
    "Conv3D": "conv_general_dilated",
    "DepthwiseConv2D": "conv_general_dilated",
    "Add": "add",
    "AddV2": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "RealDiv": "div",
    "Maximum": "max",
    "Minimum": "min",
    "Exp": "exp",
    "Expm1": "expm1",
    "Log": "log",
    "Log1p": "log1p",
    "Pow": "pow",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Square": "square",
    "Tanh": "tanh",
    "Sigmoid": "logistic",
    "Erf": "erf",
    "Sin": "sin",
    "Cos": "cos",
    "ReduceSum": "reduce_sum",
    "ReduceSumD": "reduce_sum",
    "ReduceProd": "reduce_prod",
    "ReduceMax": "reduce_max",
    "ReduceMin": "reduce_min",
    "Cumsum": "cumsum",
    "Select": "select_n",
    "Concat": "concatenate",
    "ConcatD": "concatenate",
    "Transpose": "transpose",
    "GatherV2": "gather",
    "BiasAdd": "add",
    "ReduceMean": "reduce_sum",
    "ReduceMeanD": "reduce_sum",
    "MaxPool": "reduce_window_max",
    "MaxPoolV2": "reduce_window_max",
    "AvgPool": "reduce_window_sum",
    "Relu": "scope:(^|/)relu(/|$)",
    "Gelu": "scope:gelu",
    "BatchNorm": "scope:BatchNorm",
    "LayerNorm": "scope:LayerNorm",
    "SoftmaxV2": "scope:(?<!log_)softmax",
    "LogSoftmaxV2": "scope:log_softmax",
    "DynamicRNN": "scope:RNN|LSTM|GRU",
    "DynamicGRUV2": "scope:GRU",
}


def _is_ascend(entry: Any) -> bool:
    return isinstance(entry, dict) and "precision_reduce" in entry


def _from_ascend(data: Mapping[str, Any]) -> Rules:
    rules, without_counterpart = _ALL_FOLLOW, list[str]()
    for operator, entry in data.items():
        flag = entry["precision_reduce"]
        flag = flag.get("flag") if isinstance(flag, dict) else flag
        if flag not in ("true", "false"):
            raise ValueError(
                f'Expected the flag "true" or "false" for {operator!r}, got {flag!r}.'
            )
        precision = Precision.LOW if flag == "true" else Precision.FULL
        op = ASCEND_OPS.get(operator)
        if op is None:
            without_counterpart.append(operator)
        elif op.startswith("scope:"):
            rules = rules.scope(op.removeprefix("scope:"), precision)
        else:
            rules = dataclasses.replace(rules, ops=(*rules.ops, (op, precision)))
    if without_counterpart:
        warnings.warn(
            "Operators without a counterpart in JAX, passed over: "
            f"{', '.join(without_counterpart)}.",
            stacklevel=3,
        )
    return rules


def _from_fields(data: Mapping[str, Any]) -> Rules:
    names = [field.name for field in dataclasses.fields(Rules)]
    for name in data:
        if name not in names:
            raise unknown_name("field of rules", name, names)
    ops = data.get("ops", {})
    if not isinstance(ops, dict):
        raise ValueError(f"Expected ops as a JSON object, got {type(ops).__name__}.")
    fields: dict[str, Any] = {**data, "ops": tuple(ops.items())}
    for name in ("scopes", "carries"):
        pairs = data.get(name, [])
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"Expected {name} as pairs [pattern, precision].")
        fields[name] = tuple(map(tuple, pairs))
    return Rules(**fields)
