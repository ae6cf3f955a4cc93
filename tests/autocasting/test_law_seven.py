"""Law 7: what "O1" keeps, "mixed" keeps."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import law_seven
import numpy as np
import pytest
from helpers import live_equations_of

import jmp_lite as jmp

SCRIPT = pathlib.Path(law_seven.__file__)


@functools.cache
def errors():
    """Returns the errors of all programs, without excess precision."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", law_seven.LIMITS)
@pytest.mark.parametrize("name", law_seven.PROGRAMS)
def test_errors_are_at_most_three_times_those_of_o1(name, dtype):
    mixed, o1 = errors()[name][dtype]
    assert mixed <= 3 * o1 + law_seven.LIMITS[dtype]


QUICK = ["gates", "residual", "a stack", "phases", "safe_norm", "tanh near 1"]
QUICK += ["1 - sigmoid", "gelu of a bias", "norm of a bias of 100", "hard swish"]
QUICK += ["1 - sigmoid in shard_map", "a negative multiple"]
QUICK += ["tanh of large products", "sigmoid of large products"]


@pytest.mark.parametrize("name", QUICK)
def test_so_they_are_as_users_run_them(name):
    for dtype, (mixed, o1) in law_seven.errors(name).items():
        assert mixed <= 3 * o1 + law_seven.LIMITS[dtype]


# ---------------------------------------------- slopes of tanh and logistic functions

FUNCTIONS = {"tanh": jnp.tanh, "logistic": jax.nn.sigmoid}


def between_products(name):
    """Returns the function as autocast runs it, of the mean of equal numbers."""
    halves = jnp.full((2, 2), 0.5)  # Numbers of few digits pass it as they are.

    def fun(x):
        return (FUNCTIONS[name](jnp.full((1, 2), x) @ halves) @ halves)[0, 0]

    return jmp.autocast(fun)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_slope_is_that_of_the_operand(name):
    traced = jax.make_jaxpr(jax.grad(between_products(name)))(jnp.float32(0.5))
    assert "exp" in {eqn.primitive.name for eqn in live_equations_of(traced)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("x", [0.0, 0.5, -2.0, 5.0, -20.0])
def test_derivatives_of_all_orders_are_those_of_jax(name, x):
    actual, expected, x = between_products(name), FUNCTIONS[name], jnp.float32(x)
    for order in range(4):
        with jax.enable_x64():
            exact = expected(jnp.float64(x))
        np.testing.assert_allclose(
            actual(x), exact, rtol=0.01 * 2**order, atol=1e-7, err_msg=str(order)
        )
        actual, expected = jax.grad(actual), jax.grad(expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("x", [-1e4, -200.0, 200.0, 1e4])
def test_slopes_of_large_numbers_are_finite(name, x):
    actual = between_products(name)
    for _ in range(4):
        actual = jax.grad(actual)
        assert actual(jnp.float32(x)) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_16_bit_operand_is_saved_and_no_float32(name):
    fun = jmp.autocast(lambda x, w: FUNCTIONS[name](x @ w) @ w)
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    saved = jax.tree.leaves(jax.vjp(fun, x, w)[1])
    assert {str(each.dtype) for each in saved} == {"bfloat16"}
    # The operands of both products, the operand of the function, and the weight again.
    assert sum(each.size for each in saved) <= 3 * x.size + 2 * w.size
