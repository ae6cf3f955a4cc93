"""Where no op changes its precision, ``autocast`` returns the function's own trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_lite as jmp

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
COUNTS = jnp.arange(32).reshape(4, 8)


def spectral(w, x):
    """A step of a spectral method: transforms, and products that ask for digits."""
    modes = jnp.fft.rfft(x) * jnp.exp(-jnp.arange(5.0)).astype(jnp.complex64)
    h = jnp.fft.irfft(modes, n=8)
    return jax.nn.relu(jnp.dot(h, w, precision="highest")).sum()


def integers(w, x):
    del w, x  # Float arguments that nothing reads.
    return lax.scan(lambda c, row: (c + row, c @ row), COUNTS[0], COUNTS)


def without_products(w, x):
    return jax.nn.logsumexp(jnp.tanh(w)) + x.sum()


def labels(w, x):
    return jnp.take_along_axis(x, COUNTS[:, :1] % 8, axis=1).mean() + w.sum()


@jax.custom_vjp
def clipped(x):
    return jnp.dot(x, x.T, precision="highest")


clipped.defvjp(
    lambda x: (clipped(x), x),
    lambda x, g: (jnp.clip(g, -1, 1) @ x,),
)

UNCHANGED = [spectral, integers, without_products, labels]


@pytest.mark.parametrize("fun", UNCHANGED, ids=lambda fun: fun.__name__)
def test_the_jaxpr_is_that_of_the_function(fun):
    expected, actual = (str(jax.make_jaxpr(f)(W, X)) for f in (fun, jmp.autocast(fun)))
    assert actual == expected


def test_so_is_that_of_a_function_under_autocast():
    fun = jmp.autocast(lambda w, x: jnp.tanh(x @ w) @ w)
    expected, actual = (str(jax.make_jaxpr(f)(W, X)) for f in (fun, jmp.autocast(fun)))
    assert actual == expected


@pytest.mark.parametrize("fun", UNCHANGED, ids=lambda fun: fun.__name__)
def test_explain_says_that_nothing_changes(fun):
    explanation = jmp.explain(fun)(W, X)
    assert "bfloat16" not in {row.precision for row in explanation.rows}
    assert not explanation.passes


def test_the_function_is_called_once():
    calls = []
    jax.make_jaxpr(jmp.autocast(lambda w, x: calls.append(0) or spectral(w, x)))(W, X)
    assert len(calls) == 1


CHANGED = {
    "a product": lambda w, x: x @ w,
    "a product in a loop": lambda w, x: lax.fori_loop(
        0, 3, lambda i, x: jnp.tanh(x @ w), x
    ),
    "a product of a rule for the derivative": lambda w, x: clipped(x) + 0 * w.sum(),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_program_with_something_to_lower_is_lowered(name):
    fun = CHANGED[name]
    loss = lambda w, x: fun(w, x).sum()
    gradients = [
        str(jax.make_jaxpr(jax.grad(f, 1))(W, X)) for f in (loss, jmp.autocast(loss))
    ]
    assert "bf16" not in gradients[0]
    assert "bf16" in gradients[1]


LOWERED_BY_RULES = {
    "an op": jmp.get_rules("mixed").low("tanh"),
    "a scope": jmp.get_rules("mixed").scope("here", "low"),
    "a carry": jmp.get_rules("mixed").carry("", "follow"),
}


@pytest.mark.parametrize("name", LOWERED_BY_RULES)
def test_what_rules_lower_is_lowered(name):
    def fun(x):
        with jax.named_scope("here"):
            x = jnp.tanh(x)
        return lax.scan(lambda c, _: (-c, None), x, length=2)[0]

    low = jmp.autocast(fun, LOWERED_BY_RULES[name])
    assert "bf16" in str(jax.make_jaxpr(low)(X))


def test_marks_and_arguments_in_16_bits_are_something_to_do():
    marked = jmp.autocast(lambda x: jmp.as_low(x) + 1)
    assert "bf16" in str(jax.make_jaxpr(marked)(X))
    low = jmp.autocast(lambda x: jnp.exp(x).sum())
    jaxpr = str(jax.make_jaxpr(low)(X.astype(jnp.bfloat16)))
    assert "f32[4,8] = exp" in jaxpr


def test_values_and_gradients_are_the_function_s_bit_for_bit():
    for argument in (0, 1):
        expected, actual = (
            jax.value_and_grad(f, argument)(W, X)
            for f in (spectral, jmp.autocast(spectral))
        )
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_array_equal(one, other)


INTEGER_PRODUCTS = {
    "dot": lambda a: lax.dot(a, a.T, preferred_element_type=jnp.float32),
    "convolution": lambda a: lax.conv(
        a[None, None],
        a[None, None, :3, :3],
        (1, 1),
        "SAME",
        preferred_element_type=jnp.float32,
    ),
}


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("name", INTEGER_PRODUCTS)
def test_products_of_integers_stay_as_traced(name, dtype, compute_dtype):
    a = jnp.full((8, 1024), 100, dtype)
    fun = lambda a: INTEGER_PRODUCTS[name](a) * 1e-4
    low = jmp.autocast(fun, compute_dtype=compute_dtype)
    np.testing.assert_array_equal(low(a), fun(a))
    assert str(jax.make_jaxpr(low)(a)) == str(jax.make_jaxpr(fun)(a))
    # Beside something to lower, too.
    beside = lambda a, w: (fun(a).sum() + (w @ w).sum(), fun(a))
    _, expected = beside(a, W)
    _, actual = jmp.autocast(beside, compute_dtype=compute_dtype)(a, W)
    np.testing.assert_array_equal(actual, expected)
    rows = jmp.explain(beside)(a, W).rows
    assert {r.code for r in rows if r.precision == "as traced"} >= {"not_float32"}


@pytest.mark.parametrize("primal", [jnp.sin, lambda x: jnp.sin(x)])
def test_a_rule_of_the_user_for_a_function_of_jax_is_lowered(primal):
    with_rule = jax.custom_vjp(primal)
    with_rule.defvjp(lambda x: (primal(x), x), lambda x, g: ((g @ x.T) @ x,))
    loss = jmp.autocast(lambda x: with_rule(x).sum())
    assert "bf16[4,4] = dot_general" in str(jax.make_jaxpr(jax.grad(loss))(X))
