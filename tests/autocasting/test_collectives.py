"""What devices send each other in 16 bits, and what they add up in float32."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import equations

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
LAYERS = jnp.stack([W, -W, W.T])
MIXED = jmp.get_rules("mixed")

gather = functools.partial(lax.all_gather, axis_name="d", tiled=True)


ROWS = P("d")


def on_devices(fun, *specs, out=ROWS, check_vma=True):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    options = {"in_specs": specs, "out_specs": out, "check_vma": check_vma}
    return jax.shard_map(fun, mesh=mesh, **options)


def sent(fun, *args):
    """Counts the collectives of a function, by op and by dtype."""
    names = ("all_gather", "reduce_scatter", "psum", "ppermute", "all_to_all")
    return collections.Counter(
        (op.removesuffix("_invariant"), structure.dtype_of(eqn.outvars[0]).name)
        for eqn, _ in equations(jax.make_jaxpr(fun)(*args))
        if (op := params.op_of(eqn)).startswith(names) and eqn.outvars[0].aval.shape
    )


def multiplied(w, x):
    return jnp.tanh(x @ gather(w)) @ gather(w)


def in_a_jit(w, x):
    return jax.jit(lambda w, x: x @ w)(gather(w), x)


def gathered_in_a_jit(w, x):
    return jax.jit(lambda w, x: x @ gather(w))(w, x)


def moved(w, x):
    return x @ gather(w).T.reshape(8, 8)[:, :4]


def rematerialized(w, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ gather(w)))(w, x)


def scanned(layers, x):
    def layer(h, w):
        return jnp.tanh(h @ gather(w)), None

    return lax.scan(layer, x, layers)[0]


def of_a_batch(w, x):
    return jax.vmap(lambda x: x @ gather(w))(x)


READ_BY_PRODUCTS = [
    *(multiplied, in_a_jit, gathered_in_a_jit, moved, rematerialized, of_a_batch),
    scanned,
]


def program(fun, check_vma=True):
    first = LAYERS if fun is scanned else W
    specs = (P(None, "d") if fun is scanned else P("d"), P("d"))
    mapped = on_devices(fun, *specs, check_vma=check_vma)
    loss = lambda w, x, f=mapped: jnp.mean(f(w, x) ** 2)
    return mapped, loss, (first, X)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("fun", READ_BY_PRODUCTS, ids=lambda fun: fun.__name__)
def test_a_weight_that_products_read_is_gathered_in_16_bits(fun, check_vma):
    mapped, loss, args = program(fun, check_vma)
    found = sent(jmp.autocast(mapped), *args)
    assert {key for key, n in found.items() if n} == {("all_gather", "bfloat16")}
    of_gradient = sent(jax.grad(jmp.autocast(loss)), *args)
    assert ("all_gather", "float32") not in of_gradient
    assert ("reduce_scatter", "bfloat16") not in of_gradient
    assert of_gradient["reduce_scatter", "float32"] == found["all_gather", "bfloat16"]


@pytest.mark.parametrize("fun", READ_BY_PRODUCTS, ids=lambda fun: fun.__name__)
def test_nothing_changes_but_the_bytes(fun):
    _, loss, args = program(fun)
    results = [
        jax.jit(jax.value_and_grad(jmp.autocast(loss, rules)))(*args)
        for rules in (MIXED, MIXED.full("all_gather"))
    ]
    np.testing.assert_array_equal(*(value for value, _ in results))
    for sent_low, sent_full in zip(*(grad for _, grad in results), strict=True):
        np.testing.assert_array_equal(sent_low, sent_full)


def test_the_gradient_inside_of_autocast_gathers_in_16_bits_too():
    _, loss, args = program(moved)
    found = sent(jmp.autocast(jax.value_and_grad(loss)), *args)
    assert found["all_gather", "bfloat16"] == 1
    assert found["reduce_scatter", "float32"] == 1
    assert not found["all_gather", "float32"] + found["reduce_scatter", "bfloat16"]


OTHER_READERS = {
    "a norm": lambda w, x: x @ (gather(w) / jnp.linalg.norm(gather(w))),
    "a scale before the product": lambda w, x: x @ (gather(w) * 0.3),
    "a sum beside the product": lambda w, x: x @ (v := gather(w)) + v.sum(),
    "phases of coordinates": lambda w, x: jnp.sin(x @ gather(w)) @ jnp.ones((8, 2)),
    "indices": lambda w, x: (x @ gather(w)).astype(jnp.int32),
    "the result": lambda w, x: (x @ (v := gather(w)), v),
    "highest": lambda w, x: jnp.dot(x, gather(w), precision="highest"),
}


@pytest.mark.parametrize("name", OTHER_READERS)
def test_a_value_that_anything_else_reads_is_sent_in_float32(name):
    mapped = on_devices(OTHER_READERS[name], P("d"), P())
    found = sent(jmp.autocast(mapped), W, X)
    assert set(found) == {("all_gather", "float32")}


def test_activations_of_16_bits_are_sent_in_16_bits():
    def fun(w, x):
        h = jnp.tanh(x @ w)
        h = lax.ppermute(gather(h), "d", [(0, 0)])
        return jnp.tanh(lax.all_to_all(h, "d", 0, 0, tiled=True) + 1) @ w

    mapped = on_devices(fun, P(), P("d"))
    kinds = {"all_gather", "ppermute", "all_to_all"}
    found = sent(jmp.autocast(mapped), W, X)
    assert set(found) == {(op, "bfloat16") for op in kinds}
    loss = jmp.autocast(lambda w, x: mapped(w, x).sum())
    found = sent(jax.grad(loss), W, X)
    assert found["reduce_scatter", "float32"] == 1
    assert not found["reduce_scatter", "bfloat16"]


def test_a_norm_behind_a_collective_does_not_widen_what_is_sent():
    def fun(w, x):
        h = gather(x @ w + w[0])
        return (h - h.mean(-1, keepdims=True)) @ w

    mapped = on_devices(fun, P(), P("d"))
    assert set(sent(jmp.autocast(mapped), W, X)) == {("all_gather", "bfloat16")}


def test_float32_that_a_product_alone_reads_is_sent_in_16_bits():
    fun = lambda w, x: gather(jax.nn.softmax(x @ w)) @ w
    mapped = on_devices(fun, P(), P("d"))
    assert set(sent(jmp.autocast(mapped), W, X)) == {("all_gather", "bfloat16")}


def test_o1_sends_float32_and_o2_sends_16_bits():
    mapped, _, args = program(multiplied)
    for preset, dtype in (("O1", "float32"), ("O2", "bfloat16"), ("O3", "bfloat16")):
        found = sent(jmp.autocast(mapped, preset), *args)
        assert set(found) == {("all_gather", dtype)}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_rule_lowers_the_sum_over_devices_that_is_a_gradient(check_vma):
    _, loss, args = program(multiplied, check_vma)
    rules = MIXED.low("reduce_scatter")
    found = sent(jax.grad(jmp.autocast(loss, rules)), *args)
    assert found["reduce_scatter", "bfloat16"] == 2
    assert not found["reduce_scatter", "float32"]
    inside = sent(jmp.autocast(jax.grad(loss), rules), *args)
    assert set(inside) == {("all_gather", "bfloat16"), ("reduce_scatter", "bfloat16")}


def test_a_rule_lowers_the_sum_of_the_gradients_of_copies():
    mapped = on_devices(
        lambda w, x: lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "d"),
        P(),
        P("d"),
        out=P(),
    )
    for rules, dtype in ((MIXED, "float32"), (MIXED.low("psum"), "bfloat16")):
        for fun in (
            jax.grad(jmp.autocast(mapped, rules)),
            jmp.autocast(jax.grad(mapped), rules),
        ):
            assert set(sent(fun, W, X)) == {("psum", dtype)}
    value, gradient = jax.value_and_grad(jmp.autocast(mapped, rules))(W, X)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(value, mapped(W, X), rtol=0.02)


def test_a_mark_sends_16_bits_and_sums_float32():
    fun = lambda w, x: x @ (gather(jmp.as_low(w)) * 0.3)
    mapped = on_devices(fun, P("d"), P())
    found = sent(jax.grad(jmp.autocast(lambda w, x: mapped(w, x).sum())), W, X)
    assert found["all_gather", "bfloat16"] == 1
    assert found["reduce_scatter", "float32"] == 1


def test_explain_says_why_a_collective_sends_16_bits():
    mapped, _, args = program(multiplied)
    row, *_ = [row for row in jmp.explain(mapped)(*args).rows if row.op == "all_gather"]
    assert (row.precision, row.code) == ("bfloat16", "moves_16_bits")
    assert "sends what has 16 bits" in row.reason


def test_a_rule_that_gathers_its_tangent_adds_up_in_float32():
    gathered = jax.custom_jvp(gather)
    gathered.defjvp(lambda p, t: (gather(*p), gather(*t)))
    mapped = on_devices(lambda w, x: x @ gathered(w), P("d"), P())
    loss = jmp.autocast(lambda w, x: mapped(w, x).mean())
    found = sent(jax.grad(loss), W, X)
    assert found["reduce_scatter", "float32"] == 1
    assert not found["reduce_scatter", "bfloat16"]
