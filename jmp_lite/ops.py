"""The op table: the precision of every known primitive, by group, with the reason.

A primitive is known by its name only, and this module imports nothing of JAX. The names
are those of jax 0.10.2 and 0.12.0. An op in no group is ``KEEP``.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Precision(enum.Enum):
    """The precision of an op, or of all ops in a scope.

    - ``LOW``: the op runs in the compute dtype, and its result has this dtype.
    - ``FULL``: the op runs in float32. Its result is deliberate float32: an op that
      follows it runs in float32, too.
    - ``FOLLOW``: the op runs in the precision of its operands.
    - ``WIDEST``: like ``FOLLOW``, but any float32 operand makes the op float32, as in
      ordinary type promotion.
    - ``KEEP``: the op runs in the dtypes of the trace.
    - ``FULL_INSIDE``: for scopes, such as norm layers. All ops run in float32. A result
      is low again if a low value entered the scope.
    - ``FLOAT8``: for matrix products. Operands are quantized to 8 bits, and the result
      is in the compute dtype. A product that does not qualify is ``LOW``; see
      ``Float8``.

    Example:
      >>> import jmp_lite as jmp
      >>> rules = jmp.get_rules("mixed")
      >>> rules.precision_of("dot_general"), rules.compute_dtype
      (Precision.LOW, dtype(bfloat16))
    """

    LOW = "low"
    FULL = "full"
    FOLLOW = "follow"
    WIDEST = "widest"
    KEEP = "keep"
    FULL_INSIDE = "full_inside"
    FLOAT8 = "float8"

    @property
    def lowers(self) -> bool:
        """Whether results are always in the compute dtype."""
        return self in (Precision.LOW, Precision.FLOAT8)

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


class Group(NamedTuple):
    """A group of similar ops.

    Attributes:
      id: its name, for code.
      precision: the precision of its ops, if no rule changes it.
      reason: the reason for the precision, in words.
      ops: the names of the primitives.
      has_low_form: whether the ops can run in 16 bits.
    """

    id: str
    precision: Precision
    reason: str
    ops: frozenset[str]
    has_low_form: bool = True


def _group(
    name: str, precision: Precision, reason: str, ops: str, low: bool = True
) -> Group:
    return Group(name, precision, reason, frozenset(ops.split()), low)


GROUPS: tuple[Group, ...] = (
    _group(
        "product",
        Precision.LOW,
        "matrix product or convolution",
        "dot_general ragged_dot_general conv_general_dilated",
    ),
    _group(
        "amplifying",
        Precision.FULL,
        "amplifies errors, or overflows",
        """exp exp2 expm1 log log1p log2 pow rsqrt reciprocal erf_inv acos asin atanh
        cosh sinh tan""",
    ),
    _group(
        "special",
        Precision.FULL,
        "special function of sums and exponentials",
        """lgamma digamma polygamma zeta igamma igammac igamma_grad_a
        regularized_incomplete_beta bessel_i0e bessel_i1e""",
    ),
    _group(
        "sum",
        Precision.FULL,
        "rounding errors add up in a sum",
        """reduce_sum cumsum cumlogsumexp reduce_window_sum scatter-add scatter-sub
        select_and_scatter_add select_and_gather_add""",
    ),
    _group(
        "factors",
        Precision.FULL,
        "a product of many factors overflows",
        "reduce_prod cumprod scatter-mul",
    ),
    _group(
        "device_sum",
        Precision.FULL,
        "rounding errors add up in a sum over devices",
        """psum psum_start psum_done psum_invariant psum_invariant_start unreduced_psum
        unreduced_psum_start reduce_scatter reduce_scatter_start reduce_scatter_done
        unreduced_reduce_scatter unreduced_reduce_scatter_start""",
    ),
    _group(
        "linear_algebra",
        Precision.FULL,
        "linear algebra has no 16-bit form",
        """cholesky cholesky_update eig eigh svd qr geqrf geqp3 householder_product
        ormqr lu triangular_solve tridiagonal tridiagonal_solve hessenberg schur
        symmetric_product""",
        low=False,
    ),
    _group(
        "fourier",
        Precision.FULL,
        "a Fourier transform has no 16-bit form",
        "fft",
        False,
    ),
    _group(
        "arithmetic",
        Precision.FOLLOW,
        "arithmetic",
        """add add_any sub mul div rem neg abs sign floor ceil round square integer_pow
        sqrt cbrt one_minus_square polynomial""",
    ),
    _group(
        "bounded",
        Precision.FOLLOW,
        "bounded or smooth",
        "tanh logistic erf erfc sin cos atan atan2 acosh asinh",
    ),
    _group(
        "choosing",
        Precision.FOLLOW,
        "exact: selects or compares",
        """max min clamp select_n reduce_max reduce_min reduce_window_max
        reduce_window_min cummax cummin argmax argmin sort top_k approx_top_k eq ne lt
        le gt ge eq_to lt_to le_to is_finite scatter-min scatter-max""",
    ),
    _group(
        "moving",
        Precision.FOLLOW,
        "exact: moves data",
        """reshape transpose broadcast_in_dim broadcast_to squeeze slice
        dynamic_slice dynamic_update_slice gather scatter rev pad split tile unstack
        stack concatenate copy stop_gradient name xla_metadata_value
        optimization_barrier zeros_like tie pin unpin""",
    ),
    _group(
        "sending",
        Precision.FOLLOW,
        "exact: moves data between devices or memories",
        """sharding_constraint layout_constraint reshard relayout mesh_cast device_put
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
        "typed",
        Precision.KEEP,
        "depends on the bits or the dtype of its operands",
        """convert_element_type bitcast_convert_type reduce_precision nextafter complex
        real imag conj iota empty empty2 to_edtype from_edtype and or not xor
        shift_left shift_right_arithmetic shift_right_logical population_count clz
        mulhi reduce_and reduce_or reduce_xor""",
        low=False,
    ),
    _group(
        "function",
        Precision.KEEP,
        "contains a function, traced for its operands' dtypes",
        """reduce reduce_window select_and_scatter custom_linear_solve linear_call
        custom_partitioning custom_lin composite call jaxpr_call run_state run_scoped
        stage call_hi_primitive call_hi_primitive_linearized call_exported
        custom_jvp_call_jaxpr remat_opt core_map mpmd_map fused_call""",
        low=False,
    ),
    _group(
        "kernel",
        Precision.KEEP,
        "a kernel or a callback, written for the traced dtypes",
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
        "xla_step",
        Precision.KEEP,
        "an internal step of XLA",
        """thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done
        thunky.async_start thunky.call_jax thunky.call_thunky_nested
        thunky.collective_group thunky.collective_permute thunky.cond thunky.copy
        thunky.custom_call thunky.inline_constant thunky.memset thunky.memzero
        thunky.ptx_kernel thunky.reduce_scatter thunky.while""",
        low=False,
    ),
    _group(
        "random",
        Precision.KEEP,
        "random bits depend on the dtype",
        """random_bits random_seed random_split random_fold_in random_wrap
        random_unwrap random_clone random_gamma random_gamma_grad rng_bit_generator
        rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape""",
        low=False,
    ),
    _group(
        "sparse",
        Precision.KEEP,
        "an op of a sparse format",
        """bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
        bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense
        bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
        coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense
        csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense""",
        low=False,
    ),
    _group(
        "machinery",
        Precision.KEEP,
        "has side effects, or is internal to JAX",
        """empty_ref new_ref get swap addupdate masked_load masked_swap freeze free_ref
        accum_grad_in_ref get_global box_get box_set new_box new_log log_read
        log_extend check shape_assertion after_all create_token axis_index program_id
        num_programs dim_as_value dimension_size platform_index semaphore_read
        semaphore_signal semaphore_wait delay unreachable dce_sink create_linear
        program_order multiple_of lu_pivots_to_permutation shard_alike""",
        low=False,
    ),
)

# A handler converts these; the ops inside are decided one by one.
HIGHER_ORDER = frozenset(
    {
        *("jit", "scan", "while", "cond", "checkpoint", "remat", "remat2"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "shard_map"),
        *("closed_call", "eval_jaxpr", "compute_on", "xla_metadata_call"),
    }
)


def _ops_in(*ids: str) -> frozenset[str]:
    return frozenset(op for group in GROUPS if group.id in ids for op in group.ops)


MOVING = _ops_in("moving", "sending")
"""Each element of the result is an element of an operand, independent of the values."""

SELECTING = _ops_in("moving", "sending", "choosing")
"""Their results are elements of operands, or comparisons."""

EXACT = SELECTING | {"neg", "abs"}
"""These round nothing."""

_DEAR = {"sort", "top_k", "approx_top_k", "gather", "scatter", "cummax", "cummin"}

_LIGHT = _ops_in("arithmetic", "bounded", "moving", "choosing")

_ADDS = frozenset(["add", "add_any", "sub", "neg", "reduce_sum"])

LINEAR = MOVING | _ADDS | {"convert_element_type"}
"""Their derivative does not need their operands."""

CHEAP = (
    LINEAR | _LIGHT | {"exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt"}
) - (_DEAR | _ops_in("sending"))
"""Ops of one pass over memory, which are cheap to recompute."""

ADDING = frozenset(["add", "sub", "add_any"])
"""Sums of two operands."""

PICKING = frozenset(["argmax", "argmin", "top_k", "approx_top_k"])
"""They return the index of the largest number, even if another one is close."""

COMPARING = frozenset(["lt", "le", "gt", "ge", "eq", "ne"])
"""Comparisons of two operands."""

DISCERNING = COMPARING | PICKING | {"is_finite"}
"""Their results change if 16 bits round two numbers to one, or one to infinity."""

INSIDE_OF_FUNCTIONS = _ops_in("arithmetic", "moving")
"""The ops of norms besides sums and roots: scales, shifts, reshapes."""

SOLVING = _ops_in("linear_algebra") | {"custom_linear_solve"}
"""Factorizations and solvers, in which digits cancel."""

KEEPING_DIGITS = (MOVING | ADDING).union(
    ("mul", "div", "neg", "round", "floor", "ceil", "clamp", "select_n"),
    ("reduce_sum", "cumsum", "convert_element_type"),
)
"""Moves, sums, scalings, roundings: if a reader needs their digits, it needs those of
their operands."""

PASSING = frozenset(["optimization_barrier"])
"""Each result is one operand: their precisions are not joined."""

ADDED_UP = frozenset(
    [
        *("broadcast_in_dim", "broadcast_to", "tile", "gather", "sort", "top_k"),
        *("approx_top_k", "reduce_max", "reduce_min", "cummax", "cummin"),
        *("reduce_window_max", "reduce_window_min"),
        *("scatter-min", "scatter-max", "all_gather", "all_gather_invariant"),
        *("all_gather_start", "all_gather_reduced", "all_gather_reduced_start"),
        *("pvary", "pbroadcast", "pbroadcast_start"),
        *("erf", "erfc", "asinh", "acosh", "polynomial", "atan", "atan2", "cbrt"),
    ]
)
"""JAX's derivative of these adds up, or takes an exp, a square or a reciprocal, in
their dtype: they run in float32, and their result is cast. So does a quotient."""

POSITIONAL = frozenset(["sin", "cos"])
"""These run in float32, because operands may be positions; results are bounded."""

AMPLIFYING = _ops_in("amplifying", "special", "factors") | {
    *("sqrt", "cbrt", "acosh", "round", "floor", "ceil", "rem", "div"),
}
"""A rounding error of an operand becomes at least eight times as large in the result.

The error is relative to the number, or to 1 if the number is smaller: it may be a
difference of larger ones. (sin and cos are positional. For sign, as for a comparison,
only the side of zero counts.)
"""

AMPLIFYING_DIVISORS = frozenset(["div"])
"""These amplify an error of their second operand only."""

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
"""These broadcast scalars and axes of size 1 to the other operands."""

_GROUP_OF: Mapping[str, Group] = MappingProxyType(
    {op: group for group in GROUPS for op in group.ops}
)

EDITABLE = [op for op, group in _GROUP_OF.items() if group.precision != Precision.KEEP]


def group_of(op: str) -> Group | None:
    """Returns the group of an op; None for an unknown op."""
    return _GROUP_OF.get(op)
