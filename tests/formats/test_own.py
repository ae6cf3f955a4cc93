"""Your own number format: a function in place of ``lax.dot_general``."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, mostly_slow, relative_error
from jax import lax
from weight_products import LAYERS, PROGRAMS, SMALL, V, W, X, net

import jmp_lite as jmp
from jmp_lite.formats.table import FORMATS

MIXED = jmp.get_rules("mixed")


def coarse(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None):
    """Multiplies operands of a few bits."""
    assert precision is None
    lhs, rhs = (lax.reduce_precision(x, 8, 3) for x in (lhs, rhs))
    return lax.dot_general(
        lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
    )


class _Unhashable:
    __hash__ = None

    def __call__(self, *args, **kwargs):
        return coarse(*args, **kwargs)


COARSE = jmp.Format("coarse", coarse)
RULES = MIXED.product(COARSE)


def rows_of(fun, rules, *args):
    rows = jmp.explain(fun, rules)(*args).rows
    return [row for row in rows if row.op == "dot_general"]


def test_an_own_format_is_for_all_products_or_for_a_scope_and_explain_shows_it():
    for rules, found in (
        (RULES, ["coarse", "coarse"]),
        (MIXED.scope("first", COARSE), ["coarse", "low"]),
    ):

        def fun(x, w, v):
            with jax.named_scope("first"):
                x = jnp.tanh(x @ w)
            return x @ v

        rows = rows_of(fun, rules, X, W, V)
        assert [row.number_format for row in rows] == found
        assert {row.precision for row in rows} == {"bfloat16"}
        text = str(jmp.explain(fun, rules)(X, W, V))
        assert text.count("bfloat16, coarse") == found.count("coarse")
        assert "COARSE: " in text
        low, own = (jax.jit(jmp.autocast(fun, r))(X, W, V) for r in ("mixed", rules))
        assert 0.01 < relative_error(own, low) < 0.1


def seen_by(**options):
    """Returns the operands and the result that a format sees."""
    seen = []

    def recording(lhs, rhs, *args, preferred_element_type, **kwargs):
        seen.append((lhs.dtype.name, rhs.dtype.name, preferred_element_type.name))
        return lax.dot_general(lhs, rhs, *args, **kwargs)

    rules = MIXED.product(jmp.Format("recording", recording, **options))
    row = rows_of(lambda x, w: jnp.exp(x @ w), rules, X, W)[0]
    return seen[0], row.precision, row.bytes_run / row.bytes_traced


def test_operands_and_the_result_are_low_unless_the_format_requests_float32():
    low, full = "bfloat16", "float32"
    assert seen_by() == ((low, low, low), low, 0.5)
    assert seen_by(operands="float32") == ((full, full, low), full, 0.5)
    assert seen_by(result="float32") == ((low, low, full), low, 1.0)
    both = seen_by(operands="float32", result="float32")
    assert both == ((full, full, full), full, 1.0)


def test_a_result_is_cast_to_the_dtype_that_the_format_names():
    exact = lambda lhs, rhs, dims, **_: lax.dot_general(
        lhs.astype("float32"), rhs.astype("float32"), dims
    )
    for result in ("low", "float32"):
        rules = MIXED.product(jmp.Format("exact", exact, result=result))
        out = jax.jit(jmp.autocast(lambda x, w: x @ w, rules))(X, W)
        is_rounded = bool(jnp.all(out == out.astype("bfloat16").astype("float32")))
        assert is_rounded == (result == "low")


def test_a_function_with_a_derivative_rule_keeps_it_and_is_not_converted_inside():
    @jax.custom_vjp
    def product(lhs, rhs):
        return jnp.sum(jnp.exp(lhs[:, :, None] + 0 * rhs[None]), 1)

    def forward(lhs, rhs):
        return product(lhs, rhs), (lhs, rhs)

    def backward(residuals, _):
        return jax.tree.map(lambda x: jnp.full_like(x, 7), residuals)

    product.defvjp(forward, backward)

    def own(lhs, rhs, *_, **__):
        return product(lhs, rhs)

    low = jmp.autocast(lambda x, w: x @ w, MIXED.product(jmp.Format("own", own)))
    eqns = list(equations(jax.make_jaxpr(low)(X, W).jaxpr))
    (exp,) = (e for e in eqns if e.primitive.name == "exp")
    assert exp.outvars[0].aval.dtype == jnp.bfloat16
    grads = jax.grad(lambda *args: jnp.sum(low(*args)), (0, 1))(X, W)
    assert all(np.all(grad == 7) for grad in grads)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        PROGRAMS, ("a scan", "remat, written out", "a branch", "a custom rule")
    ),
)
def test_gradients_flow_through_an_own_format_in_every_program(name):
    fun = PROGRAMS[name]
    exact, own = (
        jax.jit(jax.grad(f, (0, 1)))(SMALL, LAYERS)
        for f in (fun, jmp.autocast(fun, RULES))
    )
    assert relative_error(own, exact) < 0.2
    mapped = jax.vmap(jmp.autocast(fun, RULES), (0, None))(
        jnp.stack([SMALL] * 2), LAYERS
    )
    np.testing.assert_allclose(*mapped, rtol=1e-5)


def test_a_rule_gives_an_own_format_to_a_model_without_changing_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(48, name="head")(nn.gelu(nn.Dense(64, name="up")(x)))

    params = Model().init(jax.random.key(0), X)
    rules = MIXED.scope("up", COARSE)
    rows = rows_of(Model().apply, rules, params, X)
    assert [(row.scope, row.number_format) for row in rows] == [
        ("Model/up", "coarse"),
        ("Model/head", "low"),
    ]
    theirs = nn.Dense(64, dot_general=coarse, dtype="bfloat16", name="up")
    own = jmp.autocast(lambda p, x: nn.Dense(64, name="up").apply(p, x), RULES)
    up = {"params": params["params"]["up"]}
    with jax.numpy_dtype_promotion("standard"):
        expected = theirs.apply(up, X)
    np.testing.assert_allclose(own(up, X), expected, rtol=0.02, atol=0.02)


def test_rules_with_an_own_format_are_values_and_cannot_be_written_as_json():
    assert hash(RULES) == hash(MIXED.product(jmp.Format("coarse", coarse)))
    assert MIXED.product(jmp.Format("coarse", coarse)) == RULES
    assert MIXED.product(jmp.Format("coarse", lax.dot_general)) != RULES
    message = r"'coarse' cannot be written as JSON.*rules.scope\(pattern, format\)"
    for rules in (RULES, MIXED.scope("mlp", COARSE)):
        with pytest.raises(ValueError, match=message):
            rules.to_json()


def test_marks_and_rules_for_scopes_come_before_an_own_format():
    def fun(x, w, v):
        with jmp.full_precision():
            x = jnp.tanh(x @ w)
        with jax.named_scope("low"):
            return x @ v

    rows = rows_of(fun, RULES.scope("low", "low"), X, W, V)
    assert [row.precision for row in rows] == ["float32", "bfloat16"]
    assert [row.number_format for row in rows] == ["", "low"]
    assert rows_of(jmp.autocast(net, "O0"), RULES, X, W, V)[0].number_format == ""


def test_compare_and_tune_accept_an_own_format():
    comparison = jmp.compare(net, RULES)(X, W, V)
    assert comparison.errors["result"] > 2 * jmp.compare(net)(X, W, V).errors["result"]
    quiet = lambda line: None
    _, report = jmp.tune(net, RULES, tolerance=1.0, progress=quiet)(X, W, V)
    error = report.error.largest
    found = jmp.tune(net, RULES, tolerance=error / 4, progress=quiet)(X, W, V)
    formats = [row.number_format for row in rows_of(net, found.rules, X, W, V)]
    assert formats == ["low", "low"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jmp.Format("", coarse), ValueError, "letters, digits and underscor"),
        (lambda: jmp.Format("a b", coarse), ValueError, "got 'a b'"),
        (lambda: jmp.Format("int8", coarse), ValueError, "taken by this library"),
        (lambda: jmp.Format("full", coarse), ValueError, "taken by this library"),
        (lambda: jmp.Format("own", "aqt"), TypeError, "a function.*got 'aqt'"),
        (lambda: jmp.Format("own", coarse, "half"), ValueError, "one of low, float32"),
        (lambda: jmp.Format("own", coarse, result="f32"), ValueError, "for result 'f3"),
        (lambda: MIXED._with_ops(["exp"], COARSE), ValueError, "'exp' cannot be COAR"),
        (lambda: jmp.get_format("int7"), ValueError, "'int7'.*Did you mean 'int8'"),
        (
            lambda: jmp.get_format("int8", smalest=0),
            ValueError,
            "option of int8 'smalest'.*'smallest'",
        ),
        (lambda: jmp.get_format("coarse"), ValueError, "Unknown format 'coarse'"),
        (lambda: jmp.get_format(["int8"]), ValueError, "Did you mean 'int8'"),
        (lambda: jmp.get_format("wide", small=3), ValueError, "'wide' has no options"),
        (lambda: jmp.Format("own", _Unhashable()), TypeError, "that can be hashed"),
        (
            lambda: jmp.get_format("int8", smallest="all"),
            ValueError,
            "at least 0 for smallest, got 'all'",
        ),
        (
            lambda: jmp.get_format("float8_rows", backward="int8"),
            ValueError,
            "backward dtype of float8_rows 'int8'.*float8_e5m2",
        ),
        (
            lambda: jmp.get_format("int8", forward="int4"),
            ValueError,
            "forward dtype of int8 'int4'",
        ),
    ],
)
def test_a_bad_format_is_an_error_that_shows_what_to_write(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("bad", [lambda *a, **k: jnp.ones(3), lambda *a, **k: None])
def test_a_result_of_another_shape_is_an_error_that_names_the_format(bad):
    rules = MIXED.product(jmp.Format("bad", bad))
    with pytest.raises(ValueError, match=r"format 'bad' to return.*\(32, 64\)"):
        jmp.autocast(lambda x, w: x @ w, rules)(X, W)


def test_the_name_of_an_own_format_is_no_precision_of_a_rule():
    assert "coarse" not in FORMATS
    with pytest.raises(ValueError, match="Unknown precision 'coarse'"):
        MIXED.scope("mlp", "coarse")


def test_a_bare_function_is_an_error_that_shows_how_to_make_a_format():
    for use in (MIXED.product, lambda fun: MIXED.scope("mlp", fun)):
        with pytest.raises(ValueError, match=r'Format\("name", dot_general=function\)'):
            use(coarse)


def test_an_own_format_gets_the_sharding_of_its_result():
    kind = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    spec = jax.P("data", None)

    def fun(x, w):
        return jnp.einsum("bi,io->bo", x, w, out_sharding=spec)

    rules = MIXED.product(jmp.Format("own", lax.dot_general))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(None, "data")))
        w = jax.device_put(W, jax.NamedSharding(mesh, jax.P("data", None)))
        results = [jax.jit(jmp.autocast(fun, r))(x, w) for r in ("mixed", rules)]
    assert results[1].sharding.spec == spec
    np.testing.assert_allclose(*results, rtol=0.02, atol=0.02)


def aqt_product():
    config = pytest.importorskip("aqt.jax.v2.config")

    def product(lhs, rhs, dimension_numbers, **_):
        every = config.fully_quantized(
            fwd_bits=8, bwd_bits=8, use_stochastic_rounding=False
        )
        return config.set_context(every, None, None)(lhs, rhs, dimension_numbers)

    return product


def qwix_product():
    qwix = pytest.importorskip("qwix._src.core.dot_general_qt")
    names = ("lhs_qtype", "rhs_qtype", "dlhs_grad_qtype", "drhs_grad_qtype")
    config = qwix.DotGeneralQtConfig(**dict.fromkeys(names, jnp.int8))
    return lambda lhs, rhs, dims, **_: qwix.dot_general_qt(lhs, rhs, dims, config)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", [aqt_product, qwix_product])
def test_a_rule_runs_products_of_other_libraries_in_a_model_without_changing_it(make):
    """With aqtp 0.9.0 and qwix 0.1.8, for example."""
    rules = MIXED.product(jmp.Format("theirs", make()))
    low, loss = jmp.autocast(net, rules), lambda f: lambda *a: jnp.sum(f(*a) ** 2)
    exact, found = (jax.jit(jax.grad(loss(f), (0, 1, 2)))(X, W, V) for f in (net, low))
    assert relative_error(found, exact) < 0.05
    eqns = equations(jax.make_jaxpr(jax.grad(loss(low), (0, 1, 2)))(X, W, V).jaxpr)
    dtypes = [
        {var.aval.dtype.name for var in eqn.invars[:2]}
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert dtypes.count({"int8"}) == 6


def test_an_explanation_with_your_own_format_is_written_in_json_by_name():
    rules = MIXED.product(COARSE).scope("mlp", jmp.get_format("int8", smallest=0))
    text = jmp.explain(lambda x, w: x @ w, rules)(X, W).to_json()
    written = json.loads(text)["rules"]
    assert written["ops"]["dot_general"] == "coarse"
    assert ["mlp", {"format": "int8", "smallest": 0}] in written["scopes"]


def test_the_smallest_size_may_be_a_number_of_numpy():
    rules = jmp.Rules().product(jmp.Float8(smallest=np.float32(0)))
    rules = rules.scope("mlp", jmp.get_format("int8", smallest=np.int64(3)))
    assert jmp.Rules.from_json(rules.to_json()) == rules
    with pytest.raises(
        ValueError, match=r"at least 0 for smallest, got np.float32\(-1"
    ):
        jmp.Float8(smallest=np.float32(-1))
