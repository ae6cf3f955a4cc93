"""A rule that names an op, or a place, has the effect that it names.

Each op of the table that rules may lower runs in a program in which it would run
otherwise: it reads the result of a matrix product, and a matrix product or a float32 op
reads its result.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from test_ops import installed_primitives

from jmp_lite import ops
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import full_precision, low_precision
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.insight.explanation import explain
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import equations

X = jnp.linspace(0.1, 0.9, 32).reshape(4, 8)
W = jnp.eye(8) * 0.9 + 0.01
ROWS = jnp.array([0, 1])

UNARY = """
exp exp2 expm1 cosh sinh log log1p rsqrt erf_inv acos asin tan atanh lgamma digamma
bessel_i0e bessel_i1e neg abs floor ceil round sign sqrt cbrt square sin cos erf erfc
atan asinh tanh logistic is_finite stop_gradient optimization_barrier
"""
BINARY = """
add sub mul div rem pow max min atan2 eq ne lt le gt ge zeta igamma igammac
igamma_grad_a
"""


def pool(init, combine):
    return lambda h: lax.reduce_window(h, init, combine, (2, 2), (1, 1), "SAME")


def with_reversed(op):
    return lambda h: op(h, h[::-1])


def largest(h):
    return pool(-jnp.inf, lax.max)(h)


PROGRAMS = {
    **{name: getattr(lax, name) for name in UNARY.split()},
    **{name: with_reversed(getattr(lax, name)) for name in BINARY.split()},
    "conv_general_dilated": lambda h: lax.conv(
        h[None, None], h[None, None, :2, :2], (1, 1), "SAME"
    )[0, 0],
    "ragged_dot_general": lambda h: lax.ragged_dot(
        h, jnp.stack([h[:, :4], h[:, 4:]]).reshape(2, 8, 2), jnp.array([2, 2])
    ),
    "dot_general": lambda h: h @ h.T,
    "acosh": lambda h: lax.acosh(h + 1.5),
    "polygamma": lambda h: lax.polygamma(jnp.ones_like(h), h),
    "regularized_incomplete_beta": lambda h: lax.betainc(h, h, h),
    "integer_pow": lambda h: lax.integer_pow(h, 3),
    "reduce_sum": lambda h: h.sum(0),
    "reduce_prod": lambda h: h.prod(0),
    "reduce_max": lambda h: h.max(0),
    "reduce_min": lambda h: h.min(0),
    "cumsum": lax.cumsum,
    "cumlogsumexp": lax.cumlogsumexp,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "reduce_window_sum": pool(0.0, lax.add),
    "reduce_window_max": largest,
    "reduce_window_min": pool(jnp.inf, lax.min),
    "select_and_scatter_add": jax.grad(lambda h: (largest(h) ** 2).sum()),
    "scatter": lambda h: h.at[ROWS].set(h[:2]),
    "scatter-add": lambda h: h.at[ROWS].add(h[:2]),
    "scatter-sub": lambda h: h.at[ROWS].subtract(h[:2]),
    "scatter-mul": lambda h: h.at[ROWS].multiply(h[:2]),
    "scatter-min": lambda h: h.at[ROWS].min(h[:2]),
    "scatter-max": lambda h: h.at[ROWS].max(h[:2]),
    "add_any": lambda h: jax.vjp(lambda h: (h, h), h)[1]((h, h))[0],
    "clamp": lambda h: lax.clamp(0.2, h, 0.7),
    "select_n": lambda h: jnp.where(jnp.arange(8) > 3, h, h[::-1]),
    "argmax": lambda h: jnp.argmax(h, 0),
    "argmin": lambda h: jnp.argmin(h, 0),
    "top_k": lambda h: lax.top_k(h, 8)[0],
    "approx_top_k": lambda h: lax.approx_max_k(h, 8)[0],
    "sort": lax.sort,
    "reshape": lambda h: h.reshape(8, 4),
    "transpose": lambda h: h.T,
    "squeeze": lambda h: lax.squeeze(h[None], (0,)),
    "rev": lambda h: lax.rev(h, (0,)),
    "broadcast_in_dim": lambda h: lax.broadcast_in_dim(h, (2, 4, 8), (1, 2))[0],
    "tile": lambda h: jnp.tile(h, (2, 1)),
    "copy": jnp.copy,
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (ROWS[0], 0), (2, 8)),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice(h, h[:2], (ROWS[0], 0)),
    "gather": lambda h: h[ROWS],
    "slice": lambda h: h[:2],
    "pad": lambda h: jnp.pad(h, ((1, 1), (0, 0))),
    "split": lambda h: jnp.split(h, 2)[0],
    "concatenate": lambda h: jnp.concatenate([h, h]),
    "name": lambda h: jax.ad_checkpoint.checkpoint_name(h, "h"),
    "stack": lambda h: jnp.stack([h, h]),
    "unstack": lambda h: jnp.unstack(h[:, None])[0],
    "sharding_constraint": lambda h: lax.with_sharding_constraint(
        h, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
    "device_put": lambda h: jax.device_put(h, jax.devices()[0]),
}


ROWS_OF_DEVICES = PartitionSpec("i")


def on_devices(fun, out_specs=ROWS_OF_DEVICES, **options):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": ROWS_OF_DEVICES, "out_specs": out_specs}
    return jax.shard_map(fun, mesh=mesh, **specs, **options)


COLLECTIVES = {
    "psum": (lambda h: lax.psum(h, "i"), PartitionSpec()),
    "pmax": (lambda h: lax.pmax(h, "i"), PartitionSpec()),
    "pmin": (lambda h: lax.pmin(h, "i"), PartitionSpec()),
    "all_gather": (lambda h: lax.all_gather(h, "i", tiled=True),),
    "ppermute": (lambda h: lax.ppermute(h, "i", [(0, 0)]),),
    "all_to_all": (lambda h: lax.all_to_all(h, "i", 0, 0, tiled=True),),
    "reduce_scatter": (lambda h: lax.psum_scatter(h, "i", tiled=True),),
    "pbroadcast": (lambda h: lax.pbroadcast(h, "i", 0),),
}
for name, program in COLLECTIVES.items():
    PROGRAMS[name] = on_devices(*program)
    PROGRAMS[f"{name}, unchecked"] = on_devices(*program, check_vma=False)

OF_NEWER_JAX = {
    "log2": jnp.log2,
    "one_minus_square": jax.grad(lambda h: jnp.tanh(h).sum()),
    "polynomial": lambda h: jnp.polyval(jnp.ones(3), h),
}
PRIMITIVES = installed_primitives()
# In order: every process of a parallel run has to collect the same tests.
PROGRAMS |= {name: fun for name, fun in OF_NEWER_JAX.items() if name in PRIMITIVES}

# A small change of the operand may be a large one of their results.
STEEP = {"floor", "ceil", "round", "zeta"}
NEEDS_ACCELERATOR = {"pbroadcast", "pbroadcast, unchecked"}

# JAX makes them of other functions, or in other places than a function of one array.
WITHOUT_PROGRAM = """
broadcast_to zeros_like reciprocal select_and_gather_add eq_to le_to lt_to tie pin unpin
psend precv preduced pvary ragged_all_to_all relayout reshard mesh_cast
global_array_to_host_local_array host_local_array_to_global_array layout_constraint
with_memory_space_constraint xla_metadata_value reduced_vary_cast reduced_vary_cast_p
vary_unreduced_cast vary_unreduced_cast_p
"""


def read_by(reader, fun):
    """Returns a program: a product, ``fun`` in a scope, and what reads its result."""

    def program(x, w):
        h = x @ w
        with jax.named_scope("here"):
            y = fun(h)
        if not jnp.issubdtype(y.dtype, jnp.floating):
            return y
        return jnp.exp(y) if reader == "exp" else y @ jnp.ones((y.shape[-1], 3))

    return program


def dtypes_of(fun, op):
    """Returns the dtypes of the float operands and results of an op in the scope."""
    return {
        structure.dtype_of(atom).name
        for eqn, path in equations(jax.make_jaxpr(fun)(X, W))
        if ops.base_of(params.op_of(eqn)) == op and "here" in path
        for atom in (*eqn.invars, *eqn.outvars)
        if structure.is_float(atom)
    }


@pytest.mark.parametrize("reader", ["product", "exp"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_low_and_full_by_name_and_by_scope(name, reader):
    program, op = read_by(reader, PROGRAMS[name]), name.removesuffix(", unchecked")
    for precision, expected in (("low", "bfloat16"), ("full", "float32")):
        named = getattr(get_rules("mixed"), precision)(op)
        scoped = get_rules("mixed").scope("here", precision)
        for rules in (named, scoped):
            assert dtypes_of(autocast(program, rules), op) == {expected}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_follows_has_the_precision_of_its_operands(name):
    program, op = read_by("product", PROGRAMS[name]), name.removesuffix(", unchecked")
    rules = get_rules("mixed").follow(op)
    if op == "dot_general":  # Then both operands are undecided.
        rules = get_rules("mixed")
    for chosen in (rules, get_rules("mixed").scope("here", "follow")):
        assert dtypes_of(autocast(program, chosen), op) == {"bfloat16"}
    in_float32 = rules.full("dot_general", op)
    if op != "dot_general":
        in_float32 = rules.full("dot_general")
    assert dtypes_of(autocast(program, in_float32), op) == {"float32"}


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - STEEP - NEEDS_ACCELERATOR))
def test_a_lowered_op_has_the_value_and_a_gradient_that_compiles(name):
    program = read_by("product", PROGRAMS[name])
    low = autocast(program, get_rules("mixed").scope("here", "low"))
    expected, actual = (jax.jit(f)(X, W) for f in (program, low))
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return
    error = jnp.abs(actual - expected).max() / jnp.abs(expected).max()
    assert error < 0.03
    try:
        jax.grad(lambda x: program(x, W).sum())(X)
    except (NotImplementedError, ValueError, TypeError):
        return  # JAX has no derivative of it.
    gradient = jax.jit(jax.grad(lambda x: low(x, W).sum()))(X)
    assert gradient.dtype == jnp.float32
    assert jnp.isfinite(gradient).all()


def test_every_op_that_rules_lower_and_users_call_has_a_program():
    tested = {ops.base_of(name.removesuffix(", unchecked")) for name in PROGRAMS}
    known = set(map(ops.base_of, ops.LOWERABLE & PRIMITIVES))
    assert tested <= known
    assert known - tested <= set(WITHOUT_PROGRAM.split())


# --------------------------------------------------------------- what a rule is above


def test_a_mark_lowers_and_raises_every_op():
    low = autocast(lambda x, w: low_precision(jax.nn.gelu)(x @ w) @ w)
    ops_inside = explain(lambda x, w: low_precision(jax.nn.gelu)(x @ w) @ w)(X, W).rows
    assert {row.precision for row in ops_inside} == {"bfloat16"}
    assert "erf" not in dtypes_of(low, "erf")
    full = explain(lambda x, w: full_precision(jnp.sort)(x @ w) @ w)(X, W)
    assert full.dtype_of(op="sort") == "float32"


@pytest.mark.parametrize("choose", ["name", "scope", "mark"])
def test_a_product_that_asks_for_highest_is_low_if_a_rule_says_so(choose):
    def program(x, w):
        with jax.named_scope("here"):
            return jnp.dot(x, w, precision="highest").astype(jnp.int32)

    rules = get_rules("mixed")
    assert dtypes_of_product(autocast(program, rules)) == "float32"
    if choose == "mark":
        program = low_precision(program)
    else:
        rules = rules.low("dot_general") if choose == "name" else rules
        rules = rules.scope("here", "low") if choose == "scope" else rules
    assert dtypes_of_product(autocast(program, rules)) == "bfloat16"


def dtypes_of_product(fun):
    (eqn,) = [
        eqn
        for eqn, _ in equations(jax.make_jaxpr(fun)(X, W))
        if params.op_of(eqn) == "dot_general"
    ]
    return structure.dtype_of(eqn.invars[0]).name


def test_a_preset_that_names_a_format_leaves_highest_alone():
    program = lambda x, w: jnp.dot(x, w, precision="highest")
    for preset in ("float8", "int8", "O1", "O3"):
        assert dtypes_of_product(autocast(program, preset)) == "float32"


def test_ops_that_ascend_leaves_to_follow_keep_what_the_table_knows_of_them():
    rules = Rules.from_json('{"MatMul": {"precision_reduce": {"flag": "true"}}}')
    assert rules.precision_of("div") is ops.Precision.FOLLOW
    program = lambda x, w: (x @ w / (x @ w)) @ w
    (row,) = [row for row in explain(program, rules)(X, W).rows if row.op == "div"]
    assert row.reason.startswith("float32 for its derivative, then cast")
