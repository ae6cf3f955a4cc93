"""The format ``wide``: 16-bit operands and a float32 result."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    compiled,
    equations,
    mostly_slow,
    one_of_each,
    products,
    relative_error,
)
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.formats.table import FORMATS

MIXED = jmp.get_rules("mixed")
WIDE = MIXED.wide("dot_general")
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (16, 8))
W = jax.random.normal(KEYS[1], (8, 8)) / 8**0.5
HEAD = jax.random.normal(KEYS[2], (8, 24)) * 2
LABELS = jax.random.randint(KEYS[3], (16,), 0, 24)
LOW, WIDENED = ("bfloat16",) * 3, ("bfloat16", "bfloat16", "float32")


def logits_of(x, w, head):
    hidden = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return hidden @ head


def loss(x, w, head):
    logits = logits_of(x, w, head)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, LABELS))


def eqns_of(fun, *args):
    return list(equations(jax.make_jaxpr(fun)(*args).jaxpr))


def formats_of(fun, rules, *args):
    rows = jmp.explain(fun, rules)(*args).rows
    return [row.number_format for row in rows if row.flops]


@pytest.mark.parametrize(
    "rules",
    [WIDE, MIXED.product("wide"), MIXED.scope("head", "wide")],
    ids=["op", "product", "scope"],
)
def test_logits_are_float32_and_all_operands_have_16_bits(rules):
    low = jmp.autocast(loss, rules)
    assert formats_of(loss, rules, X, W, HEAD) == ["low", "wide"]
    assert products(eqns_of(low, X, W, HEAD)) == {LOW: 1, WIDENED: 1}
    gradient = eqns_of(jax.grad(low, (0, 1, 2)), X, W, HEAD)
    assert products(gradient) == {LOW: 5, WIDENED: 1}
    pinned = [e for e in gradient if "BF16_BF16_F32" in str(e.params.get("precision"))]
    assert len(pinned) == 6


def test_logits_are_those_of_rounded_operands_added_up_in_float32():
    rounded = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)
    found = compiled(jmp.autocast(lambda x, head: x @ head, WIDE), X, HEAD)
    np.testing.assert_allclose(found, rounded(X) @ rounded(HEAD), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_closer_to_float32_than_with_16_bit_logits():
    head = 6 * HEAD
    exact, low, wide = (
        compiled(jax.grad(fun, (0, 1, 2)), X, W, head)
        for fun in (loss, jmp.autocast(loss), jmp.autocast(loss, WIDE))
    )
    assert relative_error(wide[2], exact[2]) < 0.75 * relative_error(low[2], exact[2])
    assert [g.dtype for g in wide] == [jnp.float32] * 3


def test_a_product_that_a_16_bit_op_reads_stays_low_and_explain_shows_why():
    def fun(x, w):
        h = x @ w
        return h @ w, jnp.sum(h)

    explanation = jmp.explain(fun, WIDE)(X, W)
    first, second = (row for row in explanation.rows if row.flops)
    assert (first.number_format, second.number_format) == ("low", "wide")
    assert first.reason == "LOW, not wide: an op that takes 16 bits reads it"
    assert first.code == "wide_read_in_16_bits"
    assert str(explanation).count("bfloat16, wide") == 1
    assert [lint.name for lint in explanation.lints] == []


def test_explain_counts_the_bytes_of_float32_logits():
    for rules, share in ((MIXED, 0.5), (WIDE, 1.0)):
        rows = jmp.explain(logits_of, rules)(X, W, HEAD).rows
        assert rows[-1].op == "dot_general"
        assert rows[-1].bytes_run == share * rows[-1].bytes_traced


def test_json_names_wide():
    rules = MIXED.wide("dot_general").scope("head", "wide")
    assert jmp.Rules.from_json(rules.to_json()) == rules
    assert '"dot_general": "wide"' in rules.to_json()
    assert rules.precision_of("dot_general") is FORMATS["wide"]


def test_other_ops_cannot_be_wide():
    message = "'conv_general_dilated' cannot be WIDE: expected 'dot_general'. It is a"
    with pytest.raises(ValueError, match=message):
        MIXED.wide("conv_general_dilated")
    with pytest.raises(ValueError, match="'exp' cannot be WIDE"):
        MIXED.wide("exp")
    with pytest.raises(TypeError, match=r"rules.wide\('dot_general'\), got \['dot"):
        MIXED.wide(["dot_general"])


def scanned(x, w, head):
    def chunk(total, rows):
        logits = logits_of(rows, w, head)
        return total + jnp.sum(jax.nn.logsumexp(logits, -1)), None

    return lax.scan(chunk, 0.0, x.reshape(4, 4, 8))[0]


def mapped(x, w, head):
    rows = jax.vmap(logits_of, (0, None, None))(x, w, head)
    return jnp.sum(jax.nn.log_softmax(rows)[:, 0])


MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
PROGRAMS = {
    "plain": loss,
    "jit": jax.jit(loss),
    "remat": jax.checkpoint(loss),
    "scan": scanned,
    "vmap": mapped,
    "vmap of weights": lambda x, w, head: jnp.sum(
        jax.vmap(lambda w, head: jax.nn.logsumexp(logits_of(x, w, head), -1))(
            jnp.stack([w, w.T]), jnp.stack([head, -head])
        )
    ),
    "cond": lambda x, w, head: lax.cond(x[0, 0] > 9, mapped, loss, x, w, head),
    "shard_map": jax.shard_map(
        lambda x, w, head: lax.pmean(mapped(x, w, head), "data"),
        mesh=MESH,
        in_specs=(P("data"), P(), P()),
        out_specs=P(),
    ),
}


@pytest.mark.parametrize(
    "name", mostly_slow(PROGRAMS, ("remat", "scan", "vmap of weights", "shard_map"))
)
def test_derivatives_of_any_order_are_close_to_float32(name):
    fun = PROGRAMS[name]
    low = jmp.autocast(fun, WIDE)
    assert WIDENED in products(eqns_of(low, X, W, HEAD))

    def derivatives(f):
        def of_weights(w, head):
            grad = jax.grad(lambda *ws: f(X, *ws), (0, 1))
            slope = lambda *ws: sum(jnp.sum(g**2) for g in grad(*ws))
            _, tangent = jax.jvp(lambda *ws: f(X, *ws), (w, head), (w.T, head))
            return grad(w, head), tangent, jax.grad(slope, (0, 1))(w, head)

        return compiled(of_weights, W, HEAD)

    pairs = zip(derivatives(low), derivatives(fun), strict=True)
    assert all(relative_error(found, exact) < 0.05 for found, exact in pairs)


def test_wide_products_work_in_float16_and_with_16_bit_parameters():
    rules = jmp.get_rules("mixed").wide("dot_general")
    half = jmp.autocast(loss, rules, compute_dtype="float16")
    assert products(eqns_of(half, X, W, HEAD)) == {
        ("float16",) * 3: 1,
        ("float16", "float16", "float32"): 1,
    }
    args = [a.astype("bfloat16") for a in (X, W, HEAD)]
    low = jmp.autocast(loss, WIDE)
    found = eqns_of(jax.grad(low, (1, 2)), *args)
    assert products(found) == {LOW: 4, WIDENED: 1}


def test_only_operands_with_a_tangent_cost_a_product():
    low = jmp.autocast(lambda x, head: jnp.sum(jnp.exp(x @ head)), WIDE)
    assert sum(products(eqns_of(jax.grad(low, 1), X, HEAD)).values()) == 2
    jvp = lambda head: jax.jvp(lambda h: low(X, h), (head,), (head,))
    assert sum(products(eqns_of(jvp, HEAD)).values()) == 2


def test_tune_keeps_wide_beside_the_format_that_it_searches_for():
    rules = jmp.Rules().product(jmp.Float8(smallest=0)).scope("head", "wide")
    x, w, head = jnp.tile(X, (1, 2)), jnp.tile(W, (2, 2)), jnp.tile(HEAD, (2, 2))

    def fun(x, w, head):
        return jax.nn.logsumexp(logits_of(x, w, head), -1)

    args, quiet = (x, w, head), lambda line: None
    assert formats_of(fun, rules, *args) == ["float8", "wide"]
    _, report = jmp.tune(fun, rules, tolerance=1.0, progress=quiet)(*args)
    error = report.error.largest
    found = jmp.tune(fun, rules, tolerance=error / 2, progress=quiet)(*args)
    assert formats_of(fun, found.rules, *args) == ["low", "wide"]


DIMS = ("ij,jk->ik", "bij,bjk->bik", "ij,kj->ki")
AXES = ((0, None), (None, 0), (1, 2), (2, None))


@pytest.mark.parametrize(
    ("dims", "axes"),
    mostly_slow(itertools.product(DIMS, AXES), one_of_each(DIMS, AXES)),
)
def test_a_wide_product_can_be_mapped_over_any_axes(dims, axes):
    lhs, rhs = dims.split("->")[0].split(",")
    sizes = {"i": 3, "j": 4, "k": 5, "b": 2}
    keys = jax.random.split(jax.random.key(7))
    args = []
    for key, names, axis in zip(keys, (lhs, rhs), axes, strict=True):
        shape = [sizes[name] for name in names]
        if axis is not None:
            shape.insert(axis, 6)
        args.append(jax.random.normal(key, shape))

    def results(rules):
        fun = jmp.autocast(lambda a, b: jnp.tanh(jnp.einsum(dims, a, b)), rules)
        mapped = jax.vmap(fun, axes)
        grad = jax.grad(lambda *args: jnp.sum(mapped(*args) ** 2), (0, 1))
        return lambda *args: (mapped(*args), grad(*args))

    exact, wide = results("O0"), results(WIDE)
    assert {*products(eqns_of(wide, *args))} == {LOW, WIDENED}
    pairs = zip(compiled(wide, *args), compiled(exact, *args), strict=True)
    for found, expected in pairs:
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.shape == b.shape, found, expected)
        )
        assert relative_error(found, expected) < 0.02


@pytest.mark.parametrize("dims", ["ji,ajb->iab", "ajb,ji->iab"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_cpu_multiplies_any_axes(dims, is_jitted):
    shapes = {"ji": (4, 4), "ajb": (3, 4, 5)}
    args = [jnp.ones(shapes[names]) for names in dims.split("->")[0].split(",")]
    fun = lambda a, b: jnp.exp(jnp.einsum(dims, a, b) / 4)
    low = jmp.autocast(fun, WIDE)
    assert formats_of(fun, WIDE, *args) == ["wide"]
    np.testing.assert_allclose(
        (jax.jit(low) if is_jitted else low)(*args), fun(*args), rtol=1e-5
    )
