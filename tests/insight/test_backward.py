"""Sums inside of JAX's derivatives of single ops are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NEVER_LOW, compiled, live_equations, mostly_slow, relative_error
from jax import lax
from programs import KEY, W, X

from jmp_lite.autocasting.api import autocast

ROWS = jnp.array([0, 0, 1])


def positive(y):
    return jnp.abs(y) + 1.5


# Added before a maximum over windows: rounding must not make another one the winner.
APART = 10 * jax.random.permutation(jax.random.key(7), jnp.arange(32.0)).reshape(4, 8)


def window(op, start):
    return lambda y: (
        lax.reduce_window(y + APART, start, op, (2, 2), (2, 2), "VALID") / 100
    )


OPS = {
    "concatenate": lambda y: jnp.concatenate([y, y]),
    "pad": lambda y: jnp.pad(y, 2),
    "slice": lambda y: y[1:3],
    "dynamic_slice": lambda y: lax.dynamic_slice(y, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda y: lax.dynamic_update_slice(y, y[:1], (1, 0)),
    "rev": lambda y: y[::-1],
    "select_n": lambda y: jnp.where(y > 0, y, y[0]),
    "clamp": lambda y: jnp.clip(y, y[0], 1.0),
    "max": lambda y: jnp.maximum(y, y[0]),
    "min": lambda y: jnp.minimum(y, 0.0),
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "atan": jnp.arctan,
    "atan2": lambda y: jnp.arctan2(y, positive(y[0])),
    "acosh": lambda y: jnp.arccosh(positive(y)),
    "asinh": jnp.arcsinh,
    "sqrt": lambda y: jnp.sqrt(positive(y)),
    "cbrt": lambda y: jnp.cbrt(positive(y)),
    "integer_pow": lambda y: y**3 + positive(y) ** -2,
    "square": jnp.square,
    "div": lambda y: y / positive(y[0]),
    "rem": lambda y: jnp.fmod(y, 10 * positive(y)),
    "sort": lambda y: jnp.sort(y, 0),
    "sort by a key": lambda y: lax.sort((y, 2 * y), num_keys=1)[1],
    "argsort": lambda y: y[jnp.argsort(y[:, 0])],
    "top_k": lambda y: lax.top_k(y, 2)[0],
    "cummax": lambda y: lax.cummax(y, 0),
    "cummin": lambda y: lax.cummin(y, 0),
    "reduce_max": lambda y: y.max(0),
    "reduce_min": lambda y: y.min(0),
    "reduce_window_max": window(lax.max, -np.inf),
    "reduce_window_min": window(lax.min, np.inf),
    "gather": lambda y: y[ROWS],
    "take_along_axis": lambda y: jnp.take_along_axis(y, jnp.array([[0, 1]] * 4), 1),
    "scatter": lambda y: y.at[0].set(y[1]),
    "scatter-max": lambda y: y.at[ROWS].max(y[:3]),
    "scatter-min": lambda y: y.at[ROWS].min(y[:3]),
    "scatter-add": lambda y: y.at[ROWS].add(y[:3]),
    "tile": lambda y: jnp.tile(y, (2, 1)),
    "repeat": lambda y: jnp.repeat(y, 2, 0),
    "broadcast": lambda y: jnp.broadcast_to(y[0], (3, 8)),
    "axes of size 1": lambda y: y[:, None] * y[None],
    "median": lambda y: jnp.median(y, 0),
    "quantile": lambda y: jnp.quantile(y, 0.3, axis=0),
    "polynomial": lambda y: jnp.polyval(y[:, 0], y),
    "interpolation": lambda y: jnp.interp(y.ravel(), jnp.arange(4.0), y[:, 0]),
    "outer product": lambda y: jnp.outer(y[0], y[0]),
    "associative scan": lambda y: lax.associative_scan(jnp.multiply, y),
    "hypot": lambda y: jnp.hypot(positive(y), y[0]),
    "mean": lambda y: y - y.mean(0),
    "convolve": lambda y: jnp.convolve(y[0], y[1]),
    "fft": lambda y: jnp.abs(jnp.fft.rfft(y)),
    "cumsum": jnp.cumsum,
    "standardize": jax.nn.standardize,
    "normal cdf": jax.scipy.stats.norm.cdf,
    "exact gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "one branch": lambda y: lax.cond(
        y[0, 0] > 0, lambda y: y[ROWS], lambda y: y[:3], y
    ),
    "remat": jax.checkpoint(lambda y: y[ROWS]),
    "inside of jit": jax.jit(lambda y: y.max(0)),
    "inside of vmap": lambda y: jax.vmap(lambda a: a + y[0])(y),
    **{
        f.__name__: f
        for f in (
            *(jax.nn.elu, jax.nn.celu, jax.nn.mish, jax.nn.log_sigmoid, jax.nn.glu),
            *(jax.nn.squareplus, jax.nn.leaky_relu, jax.nn.soft_sign, jax.nn.relu6),
        )
    },
}


def test_a_scatter_and_its_derivative_round_nothing():
    """Odd numbers up to 255 fit 16 bits, and the sum of two of them may not."""
    a, b, ct = (
        2.0 * jax.random.randint(key, (rows, 8), -128, 128).astype(float) + 1
        for key, rows in zip(jax.random.split(KEY, 3), (4, 3, 4), strict=True)
    )
    # A row that is written twice has one of the two numbers.
    eye = jnp.eye(8)
    fun = lambda a, b: (a @ eye).at[ROWS].set(b @ eye) @ eye
    low = autocast(fun)
    for apply in (
        lambda f: f(a, b),
        lambda f: jax.vjp(f, a, b)[1](ct),
        lambda f: jax.jvp(f, (a, b), (a[::-1], b[::-1])),
    ):
        results = compiled(lambda apply=apply: (apply(low), apply(fun)))
        jax.tree.map(np.testing.assert_array_equal, *results)
    (scatter,) = (e for e in live_equations(low, a, b) if e.primitive.name == "scatter")
    assert str(scatter.outvars[0].aval.dtype) == "bfloat16"


# Each kind of derivative: sums, selections, factors that are functions, and loops.
QUICK = (
    *("concatenate", "pad", "dynamic_update_slice", "select_n", "clamp", "tanh"),
    *("logistic", "erf", "atan2", "integer_pow", "div", "sort", "top_k", "cummax"),
    *("reduce_max", "reduce_window_max", "gather", "scatter", "scatter-add"),
    *("broadcast", "associative scan", "mean", "fft", "cumsum", "standardize"),
    *("one branch", "remat", "inside of vmap", "elu", "mish"),
)


@pytest.mark.parametrize("name", mostly_slow(OPS, QUICK))
def test_no_derivative_adds_up_or_takes_an_exponential_in_16_bits(name):
    def loss(x):
        y = jnp.tanh(OPS[name](x @ W) * 1.01)
        return jnp.sum(jnp.stack([y.reshape(-1)] * 2, -1) @ W[:2])

    low = autocast(loss)
    for fun in (
        jax.grad(low),
        lambda x: jax.jvp(low, (x,), (x,)),
        autocast(jax.grad(loss)),
    ):
        for eqn in live_equations(fun, X):
            if eqn.primitive.name in NEVER_LOW | {"sin", "cos"}:
                dtypes = {str(var.aval.dtype) for var in eqn.outvars}
                # The derivative of a scatter adds zeros to the number written last.
                is_exact = (name, eqn.primitive.name) == ("scatter", "scatter-add")
                assert is_exact or "bfloat16" not in dtypes, eqn
    both = jax.grad(low), jax.grad(loss)
    actual, expected = compiled(lambda x: [grad(x) for grad in both], X)
    assert relative_error(actual, expected) < 0.06
