"""The op table: one record for each known primitive, with all that is known of it.

To change the class of an op, or to add a primitive, edit ``_TABLE``, and nothing else.
The sets of names below it are views of the records.

A primitive is known by its name only, and this module imports nothing of JAX. The names
are those of jax 0.10.2 and 0.12.0. An op without a record is ``KEEP``.
"""

import enum
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

# For users. The other names are for the rest of the package.
__all__ = ["Precision"]


class Precision(enum.Enum):
    """The precision of an op, or of all ops in a scope.

    - ``LOW``: the op runs in the compute dtype, and its result has this dtype.
    - ``FULL``: the op runs in float32. Its result is deliberate float32: an op that
      follows it runs in float32, too.
    - ``FOLLOW``: the op runs in the precision of its operands.
    - ``WIDEST``: like ``FOLLOW``, but any float32 operand makes the op float32, as in
      ordinary type promotion.
    - ``KEEP``: the op runs in the dtypes of the trace.

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

    @property
    def lowers(self) -> bool:
        """Whether results are always in the compute dtype."""
        return self is Precision.LOW

    def __repr__(self) -> str:
        return f"Precision.{self.name}"


class Op(NamedTuple):
    """What is known of an op.

    An error is relative to the number, or to 1 for a number below 1, which may be a
    difference of larger ones.

    Attributes:
      name: the name of the primitive.
      group: the name of its group of similar ops, for code.
      precision: its precision, if no rule changes it.
      reason: the reason for the precision, in words.
      is_float32_only: it has no 16-bit form, and no rule lowers it.
      is_higher_order: a handler converts it, and the ops inside are decided one by one.
      moves: each element of its result is an element of an operand, independent of the
        values.
      sends: it moves elements between devices.
      selects: its results are elements of operands, or comparisons.
      takes_slices: it takes slices of its first operand, and the others are indices.
      cuts: its results are slices of its first operand.
      passes: each result is one of its operands, in the precision of that operand.
      is_exact: it rounds nothing.
      keeps_numbers: its result has the numbers of its operand, all of them and no
        others.
      keeps_errors: the relative error of its result is that of its operand.
      keeps_digits: it moves, adds, scales or rounds, so a demand for the digits of its
        result is one for the digits of its operands.
      adds: it adds or subtracts two operands.
      sums: it adds up elements of an operand.
      scales: its result is a sum or a multiple of its operands, or of their elements.
      bounds: it limits a number, or drops its sign.
      broadcasts: it broadcasts scalars and axes of size 1 to the other operands.
      compares: it compares two operands.
      orders: its result depends on which of two numbers is larger.
      picks: it returns the index of the largest number, even if another one is close.
      discerns: its result changes if 16 bits round two numbers to one, or one to
        infinity.
      amplifies: an error of an operand may become at least eight times as large in the
        result.
      amplifies_divisor: it amplifies an error of its second operand only.
      amplifies_large: it amplifies the errors of large operands only.
      spreads: its results are of many sizes, from very small to very large.
      saturates: its derivative amplifies the error of a shift of its operand.
      bends: a factor of its operands is no power of that factor in its result.
      is_positional: it runs in float32, because an operand may be a position or a
        phase, and it bounds its result, which may be 16-bit.
      is_root: it is a root, or a power that may be one.
      is_power: it multiplies a number by itself, a fixed number of times.
      solves: it is a factorization or a solver, in which digits cancel.
      holds_solver: a function inside it may be a solver, which needs float32.
      is_in_norms: norms consist of such ops: sums, roots, scales, shifts, reshapes.
      is_linear: its derivative does not need its operands.
      is_cheap: it is one pass over memory, and cheap to recompute.
      adds_up_backward: JAX's derivative of it contains a sum, an exp, a square or a
        reciprocal in the dtype of the op, so the op runs in float32, and its result is
        cast to 16 bits.
    """

    name: str
    group: str
    precision: Precision
    reason: str
    is_float32_only: bool = False
    is_higher_order: bool = False
    moves: bool = False
    sends: bool = False
    selects: bool = False
    takes_slices: bool = False
    cuts: bool = False
    passes: bool = False
    is_exact: bool = False
    keeps_numbers: bool = False
    keeps_errors: bool = False
    keeps_digits: bool = False
    adds: bool = False
    sums: bool = False
    scales: bool = False
    bounds: bool = False
    broadcasts: bool = False
    compares: bool = False
    orders: bool = False
    picks: bool = False
    discerns: bool = False
    amplifies: bool = False
    amplifies_divisor: bool = False
    amplifies_large: bool = False
    spreads: bool = False
    saturates: bool = False
    bends: bool = False
    is_positional: bool = False
    is_root: bool = False
    is_power: bool = False
    solves: bool = False
    holds_solver: bool = False
    is_in_norms: bool = False
    is_linear: bool = False
    is_cheap: bool = False
    adds_up_backward: bool = False


def _read(table: str) -> Iterator[Op]:
    """Yields the records in a table.

    Args:
      table: blocks of lines, one for each group. The first line is the group, the
        precision of its ops, and the reason for it. Each other line is names of ops,
        and after a colon the fields that are true of them. ``all`` stands for all ops
        below it in the block.
    """
    for block in table.strip().split("\n\n"):
        header, *lines = block.splitlines()
        group, precision, reason = header.split(" | ")
        shared: list[str] = []
        for line in lines:
            names, _, fields = line.partition(":")
            if names.split() == ["all"]:
                shared = fields.split()
                continue
            true = dict.fromkeys((*shared, *fields.split()), True)
            for name in names.split():
                yield Op(name, group, Precision[precision], reason, **true)


_TABLE = """
product | LOW | matrix product or convolution
    dot_general ragged_dot_general conv_general_dilated

amplifying | FULL | amplifies errors, or overflows
    all: amplifies
    exp exp2: amplifies_large spreads bends is_cheap
    expm1: amplifies_large bends is_cheap
    cosh sinh: amplifies_large bends
    log log1p log2: bends is_cheap
    rsqrt: is_root is_in_norms is_cheap
    pow: is_root is_in_norms broadcasts bends
    erf_inv acos asin atanh tan: bends
    reciprocal

special | FULL | special function of sums and exponentials
    all: amplifies bends
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a
    regularized_incomplete_beta bessel_i0e bessel_i1e

sum | FULL | rounding errors add up in a sum
    all: sums
    reduce_sum: scales keeps_digits is_linear is_in_norms is_cheap
    cumsum: scales keeps_digits
    cumlogsumexp: bends
    reduce_window_sum scatter-add scatter-sub select_and_scatter_add
    select_and_gather_add

factors | FULL | a product of many factors overflows
    all: amplifies bends
    reduce_prod cumprod scatter-mul

device_sum | FULL | rounding errors add up in a sum over devices
    psum psum_invariant: is_in_norms
    psum_start psum_done psum_invariant_start unreduced_psum
    unreduced_psum_start reduce_scatter reduce_scatter_start reduce_scatter_done
    unreduced_reduce_scatter unreduced_reduce_scatter_start

linear_algebra | FULL | linear algebra has no 16-bit form
    all: solves is_float32_only
    cholesky cholesky_update eig eigh svd qr geqrf geqp3 householder_product ormqr lu
    triangular_solve tridiagonal tridiagonal_solve hessenberg schur symmetric_product

fourier | FULL | a Fourier transform has no 16-bit form
    all: is_float32_only
    fft

arithmetic | FOLLOW | arithmetic
    all: is_in_norms is_cheap
    add sub: adds scales keeps_digits is_linear broadcasts
    add_any: adds scales keeps_digits is_linear
    mul: scales keeps_digits broadcasts
    div: scales keeps_digits broadcasts amplifies amplifies_divisor
    neg: scales keeps_digits keeps_errors is_exact is_linear
    abs: bounds keeps_errors is_exact
    round floor ceil: keeps_digits amplifies bends
    rem: amplifies broadcasts bends
    sqrt: amplifies is_root
    cbrt: amplifies adds_up_backward
    square integer_pow: is_power
    polynomial: adds_up_backward
    one_minus_square: bends
    sign

bounded | FOLLOW | bounded or smooth
    all: is_cheap bends
    sin cos: is_positional amplifies
    erf: adds_up_backward saturates
    erfc atan asinh: adds_up_backward
    atan2: adds_up_backward broadcasts
    acosh: adds_up_backward amplifies
    tanh logistic: saturates

choosing | FOLLOW | exact: selects or compares
    all: selects is_exact
    max min: bounds broadcasts is_cheap orders
    clamp select_n: keeps_digits broadcasts is_cheap
    eq ne lt le gt ge: compares discerns is_cheap
    eq_to lt_to le_to: is_cheap
    is_finite: discerns is_cheap
    argmax argmin: picks discerns is_cheap
    top_k approx_top_k: picks discerns adds_up_backward
    sort cummax cummin: adds_up_backward orders
    reduce_max reduce_min reduce_window_max: adds_up_backward is_cheap
    reduce_window_min scatter-min scatter-max: adds_up_backward is_cheap

moving | FOLLOW | exact: moves data
    all: moves selects is_exact keeps_digits is_linear is_in_norms
    reshape transpose squeeze rev: keeps_numbers keeps_errors is_cheap
    broadcast_in_dim: keeps_numbers keeps_errors adds_up_backward is_cheap
    broadcast_to tile: adds_up_backward is_cheap
    copy stop_gradient: keeps_errors is_cheap
    optimization_barrier: passes keeps_errors is_cheap
    dynamic_slice: takes_slices is_cheap cuts
    gather: takes_slices adds_up_backward
    slice split: is_cheap cuts
    dynamic_update_slice pad unstack stack concatenate: is_cheap
    name xla_metadata_value zeros_like tie pin unpin: is_cheap
    scatter

sending | FOLLOW | exact: moves data between devices or memories
    all: moves selects is_exact keeps_digits is_linear
    pvary: keeps_numbers keeps_errors adds_up_backward
    sharding_constraint: keeps_errors
    all_gather all_gather_invariant all_gather_reduced: sends adds_up_backward
    pbroadcast: sends adds_up_backward
    all_to_all ppermute: sends
    all_gather_start all_gather_reduced_start pbroadcast_start: adds_up_backward
    all_gather_done pbroadcast_done pbroadcast_dynamic layout_constraint reshard
    relayout mesh_cast device_put with_memory_space_constraint all_to_all_start
    all_to_all_done ppermute_start ppermute_done pmax pmin
    unreduced_pmax unreduced_pmin ragged_all_to_all psend precv reduced_vary_cast
    reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p preduced
    global_array_to_host_local_array host_local_array_to_global_array

typed | KEEP | depends on the bits or the dtype of its operands
    convert_element_type: keeps_digits keeps_errors is_linear is_cheap
    real imag reduce_precision straight_through: keeps_errors
    nextafter: broadcasts bends
    bitcast_convert_type: bends
    complex conj iota empty empty2 to_edtype from_edtype and or not
    xor shift_left shift_right_arithmetic shift_right_logical population_count clz mulhi
    reduce_and reduce_or reduce_xor

function | KEEP | contains a function, traced for its operands' dtypes
    custom_linear_solve: solves holds_solver
    linear_call: holds_solver
    reduce reduce_window select_and_scatter custom_partitioning custom_lin composite
    call jaxpr_call run_state run_scoped stage call_hi_primitive
    call_hi_primitive_linearized call_exported custom_jvp_call_jaxpr core_map
    mpmd_map fused_call

higher_order | KEEP | contains ops, which are decided one by one
    all: is_higher_order
    jit scan while cond checkpoint remat2 custom_jvp_call custom_vjp_call
    custom_vmap_call remat_opt shard_map closed_call eval_jaxpr compute_on
    xla_metadata_call

kernel | KEEP | a kernel or a callback, written for the traced dtypes
    pallas_call ffi_call pure_callback io_callback debug_callback debug_print
    buffer_callback tpu_custom_call inspect_sharding scaled_matmul scaled_matmul_wrapper
    scaled_dot cudnn_fusion dot_product_attention_fwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper rnn_fwd rnn_bwd

xla_step | KEEP | an internal step of XLA
    thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done
    thunky.async_start thunky.call_jax thunky.call_thunky_nested thunky.collective_group
    thunky.collective_permute thunky.cond thunky.copy thunky.custom_call
    thunky.inline_constant thunky.memset thunky.memzero thunky.ptx_kernel
    thunky.reduce_scatter thunky.while

random | KEEP | random bits depend on the dtype
    random_bits random_seed random_split random_fold_in random_wrap random_unwrap
    random_clone random_gamma random_gamma_grad rng_bit_generator rng_uniform
    threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape

sparse | KEEP | an op of a sparse format
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat
    coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec
    csr_spmm csr_spmv csr_todense spsolve todense

machinery | KEEP | has side effects, or is internal to JAX
    empty_ref new_ref get swap addupdate masked_load masked_swap freeze free_ref
    accum_grad_in_ref get_global box_get box_set new_box new_log log_read log_extend
    check shape_assertion after_all create_token axis_index program_id num_programs
    dim_as_value dimension_size platform_index semaphore_read semaphore_signal
    semaphore_wait delay unreachable dce_sink create_linear program_order multiple_of
    lu_pivots_to_permutation shard_alike
"""

OPS: tuple[Op, ...] = tuple(_read(_TABLE))

_BY_NAME = {op.name: op for op in OPS}


def record_of(op: str) -> Op | None:
    """Returns the record of an op; None for an unknown op."""
    return _BY_NAME.get(op)


def base_of(op: str) -> str:
    """Returns the op that a variant is a variant of; any other op is its own.

    JAX turns ``psum`` into ``psum_invariant``, and ``all_gather`` into a start and an
    end. A rule for the op that users call is one for its variants.
    """
    base = _VARIANT.sub("", op)
    return base if base in _BY_NAME else op


_VARIANT = re.compile(r"^unreduced_|(_invariant|_reduced|_dynamic|_start|_done)+$")


def ops_of(*precisions: Precision) -> frozenset[str]:
    """Returns the ops that have one of these precisions if no rule changes it."""
    return frozenset(op.name for op in OPS if op.precision in precisions)


def _ops_that(field: str) -> frozenset[str]:
    return frozenset(op.name for op in OPS if getattr(op, field))


EDITABLE = frozenset(_BY_NAME) - ops_of(Precision.KEEP)
"""The ops whose precision rules may change."""

LOWERABLE = EDITABLE - _ops_that("is_float32_only")
"""The ops that rules may lower."""

# The fields of ``Op``, as sets of names.
HIGHER_ORDER = _ops_that("is_higher_order")
MOVING = _ops_that("moves")
SENDING = _ops_that("sends")
SELECTING = _ops_that("selects")
TAKING_SLICES = _ops_that("takes_slices")
CUTTING = _ops_that("cuts")
PASSING = _ops_that("passes")
EXACT = _ops_that("is_exact")
KEEPING_NUMBERS = _ops_that("keeps_numbers")
KEEPING_ERRORS = _ops_that("keeps_errors")
KEEPING_DIGITS = _ops_that("keeps_digits")
ADDING = _ops_that("adds")
SUMMING = _ops_that("sums")
SCALING = _ops_that("scales")
BOUNDING = _ops_that("bounds")
BROADCASTING = _ops_that("broadcasts")
COMPARING = _ops_that("compares")
ORDERING = _ops_that("orders")
PICKING = _ops_that("picks")
DISCERNING = _ops_that("discerns")
AMPLIFYING = _ops_that("amplifies")
AMPLIFYING_DIVISORS = _ops_that("amplifies_divisor")
AMPLIFYING_LARGE = _ops_that("amplifies_large")
SPREADING = _ops_that("spreads")
SATURATING = _ops_that("saturates")
BENDING = _ops_that("bends")
POSITIONAL = _ops_that("is_positional")
ROOTS = _ops_that("is_root")
POWERS = _ops_that("is_power")
SOLVING = _ops_that("solves")
HOLDING_SOLVERS = _ops_that("holds_solver")
INSIDE_OF_FUNCTIONS = _ops_that("is_in_norms")
LINEAR = _ops_that("is_linear")
RANDOM = frozenset(op.name for op in OPS if op.group == "random")
CHEAP = _ops_that("is_cheap")
ADDED_UP = _ops_that("adds_up_backward")

ADDING_UP_BACKWARD: Mapping[str, str] = MappingProxyType(
    {"all_gather": "reduce_scatter", "pvary": "psum", "pbroadcast": "psum"}
)
"""Ops whose derivative is a sum over devices, with the op that adds it up."""

MOVING_OR_CASTING = MOVING | {"convert_element_type"}
