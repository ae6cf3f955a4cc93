"""float16 ends at 65504: what is finite in float32 has a finite gradient in 16 bits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, compiled, mostly_slow, one_of_each, relative_error
from jax import lax
from programs import W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain


def cubic_gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


FUNCTIONS = {
    **{
        name: getattr(jax.nn, name)
        for name in (
            *("relu", "relu6", "sigmoid", "softplus", "sparse_plus", "sparse_sigmoid"),
            *("silu", "mish", "log_sigmoid", "leaky_relu", "hard_sigmoid", "hard_silu"),
            *("hard_tanh", "elu", "celu", "selu", "gelu", "squareplus", "soft_sign"),
        )
    },
    **{
        name: getattr(lax, name)
        for name in (
            *("neg", "abs", "sign", "floor", "ceil", "round", "tanh", "logistic"),
            *("erf", "erfc", "sin", "cos", "atan", "asinh", "cbrt"),
        )
    },
    "gelu by erf": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by products": cubic_gelu,
    "cube": lambda x: jnp.tanh(x**3),
    "fifth power": lambda x: jnp.tanh(x * x * x * x * x),
    "square": lambda x: jnp.square(x) / (1 + jnp.square(x)),
    "squared relu": lambda x: jnp.tanh(jax.nn.relu(x) ** 2),
    "rational": lambda x: 1 / (1 + x**2),
    "reciprocal": lambda x: jnp.reciprocal(1 + x * x),
    "normalized": lambda x: x / jnp.sqrt(1 + x**2),
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "bell": lambda x: jnp.exp(-(x**2)),
    "root": lambda x: jnp.sqrt(jnp.abs(x) + 1e-3),
    "acosh": lambda x: jnp.arccosh(1.5 + jnp.abs(x)),
    "angle": lambda x: jnp.arctan2(x, 1 + jnp.abs(x)),
    "remainder": lambda x: lax.rem(x, 1 + jnp.abs(x)),
    "power": lambda x: (1 + jnp.abs(x)) ** -0.7,
}

# The last factor of two is left out: there, x + x itself has no finite result.
SIZES = np.geomspace(6e-8, 32000, 60)
NUMBERS = np.concatenate([-SIZES, [0], SIZES]).astype("float16").astype("float32")


def between_products(function):
    """A function of 16-bit numbers, each beside a one, between products."""
    one = jnp.eye(2)
    return lambda x: function(jnp.stack([x, jnp.ones_like(x)], 1) @ one) @ one


def gradient(fun):
    return lambda x: jax.grad(lambda x: fun(x).sum())(x)


QUICK = (
    *("silu", "mish", "elu", "selu", "gelu", "squareplus", "soft_sign", "tanh", "erf"),
    *("asinh", "cbrt", "gelu by products", "cube", "fifth power", "square", "rational"),
    *("squared relu", "normalized", "bell", "root", "acosh", "angle", "remainder"),
    "power",
)
WAYS = ("grad(autocast(f))", "autocast(grad(f))")


@pytest.mark.parametrize(
    ("name", "way"),
    mostly_slow(itertools.product(FUNCTIONS, WAYS), one_of_each(QUICK, WAYS)),
)
def test_a_function_of_one_number_has_a_finite_gradient_in_float16(name, way):
    fun = between_products(FUNCTIONS[name])
    cast = lambda f: autocast(f, compute_dtype="float16")
    low = gradient(cast(fun)) if way.startswith("grad") else cast(gradient(fun))
    value, actual, expected = compiled(
        lambda x: (cast(fun)(x), low(x), gradient(fun)(x)), NUMBERS
    )
    assert np.isfinite(value).all()
    # At 0 a cube root has an infinite derivative.
    fits = np.abs(expected) < np.finfo("float16").max
    assert fits.sum() >= len(NUMBERS) - 2
    assert np.isfinite(actual[fits]).all()


DIVISIONS = {
    "quotient": lambda a, b: a / b,
    "reciprocal": lambda a, b: a * jnp.reciprocal(b),
    "negative power": lambda a, b: a * b**-1,
    "power": lambda a, b: a * b**-1.0,
    "softsign": lambda a, b: a / (1 + jnp.abs(b)),
    "normalized": lambda a, b: a * b / jnp.sqrt(1 + b**2),
}


DIVISORS = (1e-3, 3e-3, 1.0, 300.0, 2000.0)


@pytest.mark.parametrize(
    ("name", "size"),
    mostly_slow(
        itertools.product(DIVISIONS, DIVISORS), one_of_each(DIVISIONS, DIVISORS)
    ),
)
def test_the_derivative_of_a_quotient_is_right_for_large_and_small_divisors(name, size):
    """JAX computes it with ``b**-2``, which leaves the range of float16."""
    divide = DIVISIONS[name]

    def loss(a, b):
        # Both are results of products, and so is the reader.
        return (divide(a @ W, b * (jnp.abs(X) @ jnp.eye(8) + 1)) @ W).sum()

    numerator = X * min(size, 1.0)
    actual, expected = (
        compiled(jax.grad(f, (0, 1)), numerator, jnp.float32(size))
        for f in (autocast(loss, compute_dtype="float16"), loss)
    )
    # A gradient below 6e-8 is zero without a loss scale.
    for one, other in zip(actual, expected, strict=True):
        if np.linalg.norm(other) > 1e-3:
            assert relative_error(one, other) < 0.02


def softmax_by_hand(x, size):
    weights = jnp.exp(size * jnp.tanh(x @ W))
    return (weights / weights.sum(-1, keepdims=True)) @ W


def weight_norm(x, size):
    weights = size * W
    return jnp.tanh(x @ (weights / jnp.linalg.norm(weights, axis=0))) @ W


def attention_with_a_normaliser(x, size):
    queries, keys = (jax.nn.elu(x @ w) + 1 for w in (W, W.T))
    total = size * (queries @ keys.sum(0)[:, None])
    return ((queries @ (keys.T @ x)) * size / total) @ W


def root_mean_square(x, size):
    h = size * (x @ W)
    return (h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-12)) @ W


def sum_by_hand(x, size):
    h = size * (1 + jnp.abs(x @ W))
    return (h / h.sum(-1, keepdims=True)) @ W


NORMALISATIONS = (
    *(softmax_by_hand, weight_norm, attention_with_a_normaliser),
    *(root_mean_square, sum_by_hand),
)
NORMALISED = (2e-3, 1.0, 400.0)


@pytest.mark.parametrize(
    ("fun", "size"),
    mostly_slow(
        itertools.product(NORMALISATIONS, NORMALISED),
        one_of_each(NORMALISATIONS, NORMALISED),
    ),
)
def test_a_normalisation_is_right_for_large_and_small_numbers_in_float16(fun, size):
    size = min(size, 8.0) if fun is softmax_by_hand else size
    loss = lambda x: (fun(x, size) * jnp.cos(X)).sum()
    actual, expected = (
        compiled(jax.grad(f), X)
        for f in (autocast(loss, compute_dtype="float16"), loss)
    )
    assert relative_error(actual, expected) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quotient_is_float32_inside_and_16_bit_outside(dtype):
    fun = lambda x, w: ((x @ w) / (x @ w.T)) @ w
    (row,) = (r for r in explain(fun, compute_dtype=dtype)(X, W).rows if r.op == "div")
    assert (row.precision, row.code) == ("float32", "follows")
    made = jax.make_jaxpr(autocast(fun, compute_dtype=dtype))(X, W)
    assert str(made.eqns[-1].invars[0].aval.dtype) == dtype
    # A division by a number is a scaling.
    fun = lambda x, w: ((x @ w) / 3) @ w
    (row,) = (r for r in explain(fun, compute_dtype=dtype)(X, W).rows if r.op == "div")
    assert row.precision == dtype


def test_a_quotient_keeps_no_float32_operand_for_the_backward_pass():
    """A softmax under ``O2`` divides float32 numbers, and its result is 16-bit."""
    fun = lambda x: jax.nn.softmax(x @ W) @ W
    rows = explain(fun, "O2")(X).rows
    assert [r.precision for r in rows if r.op == "div"] == ["bfloat16"]


def test_powers_are_float32_inside_in_float16_only():
    def fun(x):
        h = x @ W
        return (jnp.tanh(h * h * h) + h**2) @ W

    for dtype, expected in (("float16", "float32"), ("bfloat16", "bfloat16")):
        rows = explain(fun, compute_dtype=dtype)(X).rows
        powers = {r.precision for r in rows if r.op in ("mul", "integer_pow")}
        assert powers == {expected}
        made = jax.make_jaxpr(autocast(fun, compute_dtype=dtype))(X)
        assert str(made.eqns[-1].invars[0].aval.dtype) == dtype


def test_a_negative_power_is_a_reciprocal_unless_a_rule_names_powers():
    fun = lambda x: ((x @ W) ** -2) @ W
    row = next(r for r in explain(fun)(X).rows if r.op == "integer_pow")
    assert (row.precision, row.code) == ("float32", "amplifying")
    low = get_rules("mixed").low("integer_pow")
    row = next(r for r in explain(fun, low)(X).rows if r.op == "integer_pow")
    assert (row.precision, row.code) == ("bfloat16", "op")
