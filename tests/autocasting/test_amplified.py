"""One op that amplifies rounding errors is enough for a float32 operand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    compiled,
    live_equations,
    mostly_slow,
    one_of_each,
    products,
    relative_error,
)
from jax import lax
from programs import W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain
from jmp_lite.ops import AMPLIFYING

# ------------------------------------------------------------------- the list of ops

UNARY = {
    **{
        name: getattr(lax, name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log1p", "rsqrt", "erf_inv", "acos"),
            *("asin", "atanh", "cosh", "sinh", "tan", "lgamma", "digamma", "neg"),
            *("abs", "floor", "ceil", "round", "square", "sqrt", "cbrt", "tanh"),
            *("logistic", "erf", "erfc", "atan", "acosh", "asinh"),
        )
    },
    "reciprocal": lambda x: 1 / x,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
}


@pytest.mark.parametrize("op", UNARY)
def test_the_list_of_amplifying_ops_is_what_a_measurement_finds(op):
    sizes = np.geomspace(1e-6, 80, 500)
    numbers = np.concatenate([-sizes, sizes, 1 - sizes, sizes - 1])
    half_ulp = 2.0**-9 * np.maximum(1, np.abs(numbers))
    with jax.enable_x64():
        exact, *others = (
            np.asarray(UNARY[op](jnp.asarray(numbers + sign * half_ulp)))
            for sign in (0, 1, -1)
        )
    with np.errstate(invalid="ignore"):
        errors = np.abs(np.stack(others) - exact) / np.maximum(1, np.abs(exact))
    # An operand outside of the domain is the worst error of all.
    errors = np.where(np.isnan(errors), np.inf, errors)[:, np.isfinite(exact)]
    assert (errors.max() / 2.0**-9 >= 8) == (op in AMPLIFYING)


# -------------------------------------------------------------------------- programs

WIDE = 3 * jax.random.normal(jax.random.key(0), (64, 64)) / 8
DATA = jax.random.normal(jax.random.key(1), (128, 64))


def gated_unit(w, x):
    gate = jax.nn.sigmoid(x @ w)
    entropy = gate * jnp.log(gate) + (1 - gate) * jnp.log(1 - gate)
    return ((gate * x) @ w).mean() - 0.01 * entropy.mean()


def linear_recurrence(w, x):
    decay = jax.nn.sigmoid(x @ w + 4)
    return (((jnp.sqrt(1 - decay**2) * x + decay * x) @ w) ** 2).mean()


def squashed_gaussian(w, x):
    action = jnp.tanh(x @ w)
    log_probability = -jnp.log(1 - action**2 + 1e-6)
    return (action @ w).mean() + 0.1 * log_probability.mean()


def stick_breaking(w, x):
    stop = jax.nn.sigmoid(x @ w)
    remaining = jnp.cumsum(jnp.log(1 - stop), -1) - jnp.log(1 - stop)
    return (((stop * jnp.exp(remaining)) @ w) ** 2).mean() + (stop @ w).mean()


def clipped_probability(w, x):
    p = jnp.clip(jax.nn.sigmoid(2 * (x @ w)), 1e-4, 1 - 1e-4)
    return -jnp.log(1 - p).mean() + (p @ w).mean()


def normal_tails(w, x):
    p = 0.5 * (1 + lax.erf(x @ w))
    return -jnp.log(1 - p + 1e-6).mean() + (p @ w).mean()


def hazards(w, x):
    hazard = 0.1 * jax.nn.sigmoid(x @ w)
    return jnp.cumprod(1 - hazard, -1).mean() + (hazard @ w).mean()


def quantized_codes(w, x):
    z = 3.5 * jnp.tanh(x @ w)
    codes = z + lax.stop_gradient(jnp.round(z) - z)
    return ((codes @ w) ** 2).mean()


def floored_places(w, x):
    places = 8 * jax.nn.sigmoid(x @ w)
    weights = places - lax.stop_gradient(jnp.floor(places))
    rows = w[places.astype(jnp.int32)[..., 0]]
    return ((weights @ w) ** 2).mean() + (rows * x).mean() + (places @ w).mean()


PROGRAMS = {
    fun.__name__: fun
    for fun in (
        *(gated_unit, linear_recurrence, squashed_gaussian, stick_breaking),
        *(clipped_probability, normal_tails, hazards, quantized_codes, floored_places),
    )
}
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda f: lambda *args: lax.cond(True, f, f, *args),
    "scan": lambda f: (
        lambda *args: lax.scan(lambda total, _: (total + f(*args), None), 0.0, None, 1)[
            0
        ]
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_amplified_value_is_as_exact_as_if_all_but_products_were_float32(name):
    fun = PROGRAMS[name]
    expected, mixed, level_1 = (
        compiled(jax.value_and_grad(f), WIDE, DATA)
        for f in (fun, autocast(fun), autocast(fun, "O1"))
    )
    for actual, bound, exact in zip(mixed, level_1, expected, strict=True):
        assert relative_error(actual, exact) <= 1.5 * relative_error(bound, exact)
    # And the products are 16-bit.
    made = products(live_equations(jax.grad(autocast(fun)), WIDE, DATA))
    assert set(made) == {("bfloat16",) * 3}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_amplified_value_is_float32_in_every_wrapper(wrap, dtype):
    loss = WRAPS[wrap](squashed_gaussian)
    value, grads = compiled(
        jax.value_and_grad(autocast(loss, compute_dtype=dtype)), WIDE, DATA
    )
    expected = compiled(jax.value_and_grad(squashed_gaussian), WIDE, DATA)
    assert relative_error(value, expected[0]) < 2e-3
    assert relative_error(grads, expected[1]) < 0.02


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(PROGRAMS, DTYPES), one_of_each(PROGRAMS, DTYPES)),
)
def test_a_jit_around_a_program_or_a_part_changes_no_bit(name, dtype, monkeypatch):
    cast = lambda f: autocast(f, compute_dtype=dtype)
    fun = PROGRAMS[name]
    expected, whole = compiled(
        lambda *args: (cast(fun)(*args), cast(jax.jit(fun))(*args)), WIDE, DATA
    )
    for part in (jax.nn.sigmoid, jnp.tanh, jnp.log, jnp.sqrt, lax.erf, jnp.round):
        place = {"sigmoid": jax.nn, "erf": lax}.get(part.__name__, jnp)
        monkeypatch.setattr(place, part.__name__, jax.jit(lambda x, f=part: f(x)))
    parts = compiled(cast(lambda *args: fun(*args)), WIDE, DATA)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(parts, expected)


def test_a_value_that_enters_or_leaves_a_function_keeps_its_digits():
    """The value is made in one jit function, and its logarithm in another."""
    gate, amount = jax.jit(jax.nn.sigmoid), jax.jit(lambda g: jnp.log(1 - g))

    def loss(w, x):
        g = gate(x @ w)
        return ((g * x) @ w).mean() - amount(g).mean()

    actual, expected = (
        compiled(jax.value_and_grad(f), WIDE, DATA) for f in (autocast(loss), loss)
    )
    assert relative_error(actual, expected) < 0.01


def test_the_derivative_rule_of_a_function_keeps_the_digits_of_its_result():
    @jax.custom_jvp
    def gate(x):
        return jax.nn.sigmoid(x)

    gate.defjvps(lambda tangent, g, x: tangent * g * (1 - g))

    def loss(w, x):
        g = gate(x @ w)
        return ((g * x) @ w).mean() - jnp.log(1 - g).mean()

    actual, expected = (
        compiled(jax.value_and_grad(f), WIDE, DATA) for f in (autocast(loss), loss)
    )
    assert relative_error(actual, expected) < 0.01


def test_beside_an_amplified_value_the_stream_stays_16_bit():
    def fun(x):
        gate = jax.nn.sigmoid(x @ W)
        stream = jnp.maximum(gate * (x @ W), 0)
        return stream @ W, jnp.log(1 - gate).sum()

    rows = {row.op: row for row in explain(fun)(X).rows}
    assert (rows["logistic"].precision, rows["logistic"].code) == (
        "float32",
        "amplified",
    )
    assert (rows["sub"].precision, rows["log"].precision) == ("float32", "float32")
    assert (rows["mul"].precision, rows["max"].precision) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("way", ["plain", "jit", "remat"])
def test_a_softplus_of_a_shifted_product_widens_nothing(way):
    """The sum that a softplus takes the exp of is float32, and its result 16-bit."""
    softplus = WRAPS[way](jax.nn.softplus)

    def fun(x):
        return jnp.maximum(softplus(x @ W + W[0]) + x @ W.T, 0) @ W

    rows = explain(fun)(X).rows
    added, largest = [r for r in rows if r.op in ("add", "max")][-2:]
    assert (added.precision, largest.precision) == ("bfloat16", "bfloat16")
    assert "amplified" in {row.code for row in rows}


def test_a_function_of_one_value_leaves_with_its_digits_for_an_amplifying_reader():
    def normal(h):
        return h * lax.rsqrt((h * h).mean(-1, keepdims=True))

    def fun(w, x):
        places = 64 * lax.cond(x[0, 0] < 9, normal, normal, x @ w)
        return ((places - jnp.floor(places)) ** 2).mean() + (places @ w).mean()

    mixed, level_1, expected = (
        compiled(f, WIDE, DATA) for f in (autocast(fun), autocast(fun, "O1"), fun)
    )
    assert abs(mixed - expected) <= 2 * abs(level_1 - expected)


def test_a_quotient_amplifies_its_divisor_only():
    def fun(x):
        above, below = 1 + x @ W, 2 + jnp.abs(x @ W.T)
        return (above / below) @ W, above @ W, below @ W

    rows = [r for r in explain(fun)(X).rows if r.op == "add"]
    assert [r.precision for r in rows] == ["bfloat16", "float32"]


def test_a_move_of_16_bit_numbers_stays_16_bit_though_its_reader_amplifies():
    def fun(x):
        h = (x @ W).reshape(-1)
        return jnp.exp(h).sum(), h.reshape(x.shape[0], -1) @ W

    rows = {row.op: row for row in explain(fun)(X).rows}
    assert rows["reshape"].precision == "bfloat16"


@pytest.mark.parametrize("preset", ["O2", "torch", "O3"])
def test_in_other_presets_amplifying_readers_raise_only_ops_that_no_rule_names(preset):
    """In ``O2`` ops follow by default, in ``torch`` a float32 value would widen all."""
    rows = {row.op: row for row in explain(gated_unit, preset)(WIDE, DATA).rows}
    expected = "float32" if preset == "O2" else "bfloat16"
    assert rows["logistic"].precision == expected


def test_a_rule_decides_an_op_though_its_reader_amplifies():
    rules = get_rules("mixed").low("logistic")
    rows = {row.op: row for row in explain(gated_unit, rules)(WIDE, DATA).rows}
    assert rows["logistic"].precision == "bfloat16"
