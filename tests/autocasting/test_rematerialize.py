"""The residuals of loops, and the ops that their backward pass computes again."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from helpers import compiled, equations, live_equations, relative_error
from jax import lax
from programs import LAYERS, W, X

from jmp_lite.autocasting.api import autocast


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def attention(x, w):
    h = norm(x) @ w
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), h @ h.T, -1e9)
    return x + jax.nn.gelu(jax.nn.softmax(scores) @ h) @ w


def layers(x, stack):
    return lax.scan(lambda x, w: (attention(x, w), None), x, stack)[0] @ W


def stacked(fun, *args):
    """Returns the arrays that the first loop of a gradient stacks for the second."""
    grad = jax.grad(lambda *a: jnp.sum(fun(*a)), tuple(range(len(args))))
    (scan, *_) = (e for e in live_equations(grad, *args) if e.primitive.name == "scan")
    return [v.aval for v in scan.outvars if v.aval.shape[:1] == (3,)]


def size(avals):
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def test_a_loop_stacks_16_bits_alone_and_less_than_half_of_float32_s():
    low, full = stacked(autocast(layers), X, LAYERS), stacked(layers, X, LAYERS)
    assert {str(aval.dtype) for aval in low} == {"bfloat16"}
    assert size(low) < 0.5 * size(full)


def test_results_and_gradients_are_what_they_are_without_a_loop():
    def unrolled(x, stack):
        for w in stack:
            x = attention(x, w)
        return x @ W

    loop, plain = autocast(layers), autocast(unrolled)
    # The first layer of a loop starts low, as all others; all else is the same.
    assert relative_error(*(compiled(f, X, LAYERS) for f in (loop, layers))) < 0.03
    loss = lambda f: lambda x, s: jnp.sum(f(x, s) ** 2)
    expected, *both = (
        compiled(jax.grad(loss(f), (0, 1)), X, LAYERS) for f in (layers, loop, plain)
    )
    errors = [relative_error(grads, expected) for grads in both]
    assert errors[0] < 1.5 * errors[1] + 0.01


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_rematerialized_loops_compose_with_other_transforms(transform):
    fun = transform(autocast(layers))
    loss = lambda f: lambda x: jnp.sum(f(x, LAYERS) ** 2)
    for other in (jax.grad, jax.jacfwd):
        actual, expected = (compiled(other(loss(f)), X) for f in (fun, layers))
        assert relative_error(actual, expected) < 0.05
    mapped, expected = (
        compiled(jax.vmap(f, (0, None)), jnp.stack([X, -X]), LAYERS)
        for f in (fun, layers)
    )
    assert relative_error(mapped, expected) < 0.03


def test_matrix_products_are_not_computed_again():
    def dots(fun):
        grad = jax.grad(lambda x, s: jnp.sum(fun(x, s)), (0, 1))
        return sum(
            e.primitive.name == "dot_general" for e in live_equations(grad, X, LAYERS)
        )

    assert dots(autocast(layers)) == dots(layers)


def test_a_loop_that_only_sums_is_not_rematerialized():
    fun = lambda x: lax.scan(lambda c, x: (c + x, c), x[0], x)
    names = {
        e.primitive.name for e in equations(jax.make_jaxpr(autocast(fun))(X).jaxpr)
    }
    assert not names & {"checkpoint", "remat", "remat2"}


def test_a_low_value_that_a_call_only_raises_is_raised_before_the_call():
    """So that the gradients of all its uses add up in float32."""

    def loss(x):
        y = x @ W
        chosen = jnp.take_along_axis(y, jnp.zeros((4, 1), int), axis=-1)
        return jnp.sum(jax.nn.logsumexp(y, axis=-1) - chosen[:, 0])

    eqns = live_equations(jax.grad(autocast(loss)), X)
    sums = [e.outvars[0].aval for e in eqns if e.primitive.name == "add_any"]
    assert {str(aval.dtype) for aval in sums} == {"float32"}
    both = (compiled(jax.grad(f), X) for f in (autocast(loss), loss))
    assert relative_error(*both) < 0.02


def test_ops_are_taken_apart_for_the_gradient_once_and_leave_no_trace():
    """Under grad and jit, ops go through functions of jit, which must not be seen."""

    def model(x):
        for _ in range(3):
            x = jnp.tanh(x @ W) + x
        return jnp.sum(x)

    jaxpr = jax.make_jaxpr(jax.grad(autocast(model)))(X).jaxpr
    assert {e.primitive.name for e in jaxpr.eqns if "jit" in e.primitive.name} == set()
    text = jax.jit(jax.grad(autocast(model))).lower(X).as_text()
    assert text.count("func.func") == 1
    eager, jitted = jax.grad(autocast(model))(X), jax.jit(jax.grad(autocast(model)))(X)
    assert relative_error(eager, jitted) < 0.01


def test_a_low_value_that_two_float32_islands_raise_is_passed_between_them():
    """No other op reads it: the second island reads the value that the first raised."""

    def body(x, w):
        h = 2 * jnp.tanh(x @ w)
        k = jnp.exp(h).sum(0, keepdims=True) @ w
        return x + 0.01 * jnp.exp(0.01 * jnp.exp(h) - 0.1 * k) + 0.01 * jnp.sin(h), None

    fun = lambda x, stack: lax.scan(body, x, stack)[0] @ W
    loss = lambda f: lambda x: jnp.sum(f(x, LAYERS))
    both = (compiled(jax.grad(loss(f)), X) for f in (autocast(fun), fun))
    assert relative_error(*both) < 0.05


def test_arrays_that_a_function_closes_over_are_freed():
    def traced():
        array = jnp.ones((8, 8))
        inner = jax.jit(lambda x: jnp.tanh(x @ array))
        fun = lambda x: jnp.sum(lax.cond(x.sum() > 0, inner, inner, inner(x)))
        jax.make_jaxpr(jax.grad(autocast(fun)))(W)
        return weakref.ref(array)

    closed_over = traced()
    gc.collect()
    assert closed_over() is None
