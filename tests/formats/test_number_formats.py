"""A number format of products is one file in ``jmp_lite/formats``, and one entry."""

import copy
import pickle
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from jax import lax

import jmp_lite as jmp
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.rules.presets import PRESETS
from jmp_lite.autocasting.rules.rules import is_identity
from jmp_lite.formats import number_format
from jmp_lite.formats.table import FORMATS

ADDITION = '''
@dataclasses.dataclass(frozen=True)
class Toy(NumberFormat):
    """Operands of ten bits: a sign, five bits of exponent, four of mantissa."""

    def judge(self, product, is_last, is_named):
        is_of_vectors = 1 in products.product_sizes(product.eqn)
        return Verdict(False, "vector") if is_of_vectors else QUALIFIES

    def words(self, code, eqn):
        return "an operand is a vector"

    def round(self, array):
        return lax.reduce_precision(array, exponent_bits=5, mantissa_bits=4)
'''
"""A format's file."""

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (24, 16))
W = jax.random.normal(KEYS[1], (16, 16)) / 4
WEIGHTS = jnp.stack([W, W.T, W[::-1]])


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(number_format, "Toy", None, raising=False)
    exec(ADDITION, vars(number_format))
    monkeypatch.setitem(FORMATS, "toy", number_format.Toy("toy"))
    return FORMATS["toy"]


@pytest.fixture
def rules():
    return jmp.get_rules("mixed").product("toy")


def net(x, w):
    with jax.named_scope("mlp"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return x @ w


def products(fun, rules, *args):
    rows = jmp.explain(fun, rules)(*args).rows
    return [row for row in rows if row.op == "dot_general"]


def formats_of(fun, rules, *args):
    return [row.number_format for row in products(fun, rules, *args)]


# ------------------------------------------------------------------------------- rules


def test_a_format_is_requested_by_op_and_by_scope_and_by_the_record_itself(toy, rules):
    mixed = jmp.get_rules("mixed")
    assert rules.precision_of("dot_general") is toy
    assert rules == mixed.product(toy)
    assert formats_of(net, rules, X, W) == ["toy", "toy"]
    for name in ("toy", "TOY", toy):
        scoped = mixed.scope("mlp", name)
        assert formats_of(net, scoped, X, W) == ["toy", "low"]
        assert RuleLookup(scoped).match("dot_general", "mlp").precision is toy
        assert (
            RuleLookup(scoped).match("exp", "mlp").precision is jmp.ops.Precision.FULL
        )
    assert formats_of(net, rules.scope("head", "low"), X, W) == ["toy", "low"]
    both = mixed.scope("mlp", "toy").product("float8")
    assert formats_of(net, both, X, W) == ["toy", "low"]
    assert not is_identity(jmp.Rules().keep("dot_general").scope("", "toy"))


def test_all_products_have_the_format_and_no_other_op_may(rules):
    def convolved(x, w):
        images, kernels = x.reshape(1, 4, 12, 8), w.reshape(4, 4, 4, 4)
        return lax.conv(images, kernels, (1, 1), "SAME")

    def grouped(x, w):
        return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([8, 16]))

    for fun in (net, convolved, grouped):
        rows = jmp.explain(fun, rules)(X, W).rows
        assert {row.number_format for row in rows if row.flops} == {"toy"}
        low, found = (jmp.autocast(fun, each)(X, W) for each in ("mixed", rules))
        assert 1e-3 < np.linalg.norm(found - low) / np.linalg.norm(low) < 0.1
    with pytest.raises(ValueError, match=r"'tanh' cannot be TOY: expected 'conv.*'\.$"):
        jmp.Rules(ops=(("tanh", "toy"),))
    with pytest.raises(ValueError, match="TOY is for matrix products only"):
        jmp.Rules(default="toy")
    with pytest.raises(
        ValueError, match=r"Unknown precision 'toi'.*Did you mean 'toy'"
    ):
        jmp.Rules().scope("", "toi")


@pytest.mark.parametrize("preset", PRESETS)
def test_rules_with_a_format_travel_as_json_and_as_pickles(preset):
    changed = jmp.get_rules(preset).product("toy").scope("head", "toy")
    for again in (
        jmp.Rules.from_json(changed.to_json()),
        pickle.loads(pickle.dumps(changed)),
        copy.deepcopy(changed),
    ):
        assert again == changed
        assert hash(again) == hash(changed)
        assert repr(again) == repr(changed)
    assert "('head', Toy(name='toy'))" in repr(changed)
    untouched = jmp.get_rules(preset)
    assert jmp.Rules.from_json(untouched.to_json()) == untouched


def test_product_takes_every_precision_of_an_op():
    mixed = jmp.get_rules("mixed")
    assert mixed.product("float8") == mixed.float8("dot_general", "ragged_dot_general")
    named = ("conv_general_dilated", "dot_general", "ragged_dot_general")
    assert mixed.product(jmp.ops.Precision.FULL) == mixed.full(*named)
    with pytest.raises(ValueError, match=r"'full_inside' is gone.*use 'full'"):
        mixed.product("full_inside")


# ------------------------------------------------------------------------ what it runs


def rounded(array):
    """Returns the ten-bit numbers nearest to an array, by NumPy."""
    array = np.asarray(jnp.asarray(array, jnp.bfloat16), np.float32)
    mantissa, exponent = np.frexp(array)
    return np.ldexp(np.round(mantissa * 32) / 32, exponent)


def test_operands_are_rounded_and_the_product_is_otherwise_low(rules):
    def product(x, w):
        return x @ w

    found = jmp.autocast(product, rules)(X, W)
    exact = rounded(X) @ rounded(W)
    np.testing.assert_allclose(found, exact, rtol=2**-8, atol=1e-3)
    assert np.abs(found - X @ W).max() > 0.01

    def ops(rules):
        run = jax.make_jaxpr(jmp.autocast(net, rules))(X, W)
        return Counter(eqn.primitive.name for eqn in equations(run.jaxpr))

    more = Counter({"reduce_precision": 4})
    assert ops(rules) == ops("mixed") + more
    assert "BF16_BF16_F32" in str(jax.make_jaxpr(jmp.autocast(net, rules))(X, W))


def test_an_operand_of_several_products_is_rounded_once(rules):
    def three(x, w):
        h = jnp.tanh(x)
        return (h @ w + h @ (2 * w) + h @ w) @ w.T

    run = jax.make_jaxpr(jmp.autocast(three, rules))(X, W)
    ops = Counter(eqn.primitive.name for eqn in equations(run.jaxpr))
    # Two activations, a weight at each of its three uses, and twice the weight.
    assert ops["reduce_precision"] == 6


PROGRAMS = {
    "plain": lambda x, ws: net(x, ws[0]),
    "jit": lambda x, ws: jax.jit(net)(jax.jit(net)(x, ws[0]), ws[0]),
    "scan": lambda x, ws: lax.scan(lambda h, w: (net(h, w), None), x, ws)[0],
    "remat": lambda x, ws: jax.checkpoint(net)(x, ws[0]),
    "a branch": lambda x, ws: lax.cond(x[0, 0] > 9, jnp.dot, net, x, ws[1]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_rounded_operands(name, rules):
    def loss(x, ws):
        return jnp.sum(PROGRAMS[name](x, ws) ** 2)

    def gradient(fun):
        leaves = jax.jit(jax.grad(fun, (0, 1)))(X, WEIGHTS)
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    exact, low = gradient(loss), gradient(jmp.autocast(loss))
    found = gradient(jmp.autocast(loss, rules))
    error = lambda g: np.linalg.norm(g - exact) / np.linalg.norm(exact)
    assert 2 * error(low) < error(found) < 0.1


# ------------------------------------------------------------------------------ insight


def test_explain_shows_the_format_of_each_product_and_why_others_have_none(rules):
    def fun(x, w):
        return net(x, w) @ w[0]

    explanation = jmp.explain(fun, rules)(X, W)
    shown = [
        (row.precision, row.number_format, row.code, row.reason)
        for row in explanation.rows
        if row.op == "dot_general"
    ]
    by_rule = ("bfloat16", "toy", "op", "TOY: op rule 'dot_general'")
    refused = ("bfloat16", "low", "toy_vector", "LOW, not toy: an operand is a vector")
    assert shown == [by_rule, by_rule, refused]
    assert str(explanation).count("bfloat16, toy") == 2
    assert "an operand is a vector" in explanation.table()
    assert [lint.name for lint in explanation.lints] == []
    (row, _) = products(net, jmp.get_rules("mixed").scope("mlp", "toy"), X, W)
    assert row.reason == "TOY: scope rule 'mlp'"


def test_a_lint_reports_that_no_product_has_the_format(rules):
    (lint,) = jmp.explain(lambda x, w: x @ w[0], rules)(X, W).lints
    assert lint.name == "no toy product"
    assert "none of 1 products runs in toy (most common reason: vector)" in str(lint)


def test_compare_undoes_a_format_on_the_lane_of_float32(rules):
    comparison = jmp.compare(net, rules)(X, W)
    low = jmp.compare(net)(X, W)
    assert comparison.errors["result"] > 2 * low.errors["result"] > 0


def test_tune_finds_the_products_that_tolerate_a_format(rules):
    quiet = lambda line: None
    _, report = jmp.tune(net, rules, tolerance=1.0, progress=quiet)(X, W)
    error = report.error.largest
    found = jmp.tune(net, rules, tolerance=error / 2, progress=quiet)(X, W)
    assert formats_of(net, found.rules, X, W) != ["toy", "toy"]
    assert {step.precision for step in found.report.steps} == {
        rules.precision_of("dot_general")
    }
    assert str(found.report.table()).rstrip().endswith(("toy", "too large"))
    assert jmp.Rules.from_json(found.rules.to_json()) == found.rules
    assert '"precision": "toy"' in found.report.to_json()


def test_tune_searches_one_format_at_a_time(rules):
    both = rules.scope("mlp", jmp.Float8(smallest=0))
    with pytest.raises(ValueError, match=r"one number format at a time.*toy, .*float8"):
        jmp.tune(net, both, tolerance=1e-3, progress=lambda line: None)(X, W)
