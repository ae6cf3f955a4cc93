"""Tools differentiate the arguments that training differentiates."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jmp_lite as jmp
import jmp_lite.nnx


def ended_by_a_number(params, x, padding):
    """A loss that has no derivative with respect to its last argument."""
    half = lambda s: s / 2
    rest = lax.while_loop(lambda s: jnp.sum(s) > 1, half, padding)
    return jnp.mean((x @ params["w"] + rest) ** 2)


def with_a_callback(params, x, padding):
    padding = jax.pure_callback(lambda y: y, jax.typeof(padding), padding)
    return jnp.mean((x @ params["w"] + padding) ** 2)


ARGUMENTS = {"w": jnp.eye(8) / 3}, jnp.linspace(-1, 1, 32).reshape(4, 8), jnp.ones(8)
TOOLS = {
    "explain": functools.partial(jmp.explain, backward=True),
    "compare": functools.partial(jmp.compare, backward=True),
    "tune": functools.partial(jmp.tune, tolerance=0.1, progress=None),
}


@pytest.mark.parametrize("fun", [ended_by_a_number, with_a_callback])
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_names_the_argument_without_a_derivative_and_takes_argnums(name, fun):
    tool = TOOLS[name]
    with pytest.raises(
        ValueError, match=r"no derivative with respect to args\[2\].*argnums=\(0, 1\)"
    ) as caught:
        tool(fun)(*ARGUMENTS)
    assert caught.value.__cause__ is not None
    for argnums in (0, (0, 1), [-3]):
        tool(fun, argnums=argnums)(*ARGUMENTS)


def test_only_the_gradients_that_training_computes_are_counted():
    def products(argnums=None):
        loss = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        found = jmp.explain(loss, backward=True, argnums=argnums)(*ARGUMENTS[:2])
        return sum(found.totals.products.values())

    assert [products(), products((0, 1)), products(0), products(1)] == [3, 3, 2, 2]
    errors = jmp.compare(ended_by_a_number, backward=True, argnums=0)(*ARGUMENTS).errors
    assert list(errors) == ["result", "gradient of args[0]['w']"]


@pytest.mark.parametrize(
    ("argnums", "error", "words"),
    [
        ("params", TypeError, "numbers of positional arguments"),
        (True, TypeError, "got True"),
        ((0, 1.5), TypeError, "as in jax.grad"),
        (3, ValueError, "argnums below 3"),
        (-4, ValueError, "argnums below 3"),
    ],
)
def test_wrong_argnums_are_refused(argnums, error, words):
    for tool in TOOLS.values():
        with pytest.raises(error, match=words):
            tool(ended_by_a_number, argnums=argnums)(*ARGUMENTS)


def test_argnums_without_a_gradient_are_refused():
    for tool in (jmp.explain, jmp.compare):
        with pytest.raises(ValueError, match="pass backward=True"):
            tool(ended_by_a_number, argnums=0)
    fun = lambda w, n: jnp.sum(w) * n
    with pytest.raises(ValueError, match=r"arguments of argnums=\(1,\) have no float"):
        jmp.explain(fun, backward=True, argnums=1)(jnp.ones(3), 2)


def test_a_module_of_nnx_is_an_argument_by_number():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)
    x = ARGUMENTS[1]

    def products(fun, *args, argnums=None):
        found = jmp.nnx.explain(fun, backward=True, argnums=argnums)(*args)
        return sum(found.totals.products.values())

    assert [products(loss, model, x, argnums=n) for n in (None, 0, 1)] == [3, 2, 2]
    assert products(model, x, argnums=0) == 2, "the module itself is number 0"
    errors = jmp.nnx.compare(loss, backward=True, argnums=0)(model, x).errors
    assert not any("args[1]" in name for name in errors)
    jmp.nnx.tune(loss, tolerance=0.1, argnums=0, progress=None)(model, x)
