"""Programs for which 16 bits are wrong, and the remedy that the documentation names."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp


@jax.custom_jvp
def with_rows_for_tangents(x):
    return jnp.tanh(x)


@with_rows_for_tangents.defjvp
def _jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.tanh(x), jnp.stack([t, t])  # An auxiliary value: one row too many.


@pytest.mark.parametrize("wrap", [lambda f: f, jmp.autocast])
def test_jax_refuses_rules_that_return_tangents_of_another_shape(wrap):
    fun = wrap(lambda x: with_rows_for_tangents(x).sum())
    assert jnp.isfinite(fun(jnp.ones(3)))
    with pytest.raises((TypeError, ValueError), match="shape"):
        jax.jvp(fun, (jnp.ones(3),), (jnp.ones(3),))


def forward_laplacian(fun, x):
    """Returns the sum of second derivatives, all of them in one forward pass."""

    def second(direction):
        first = lambda x: jax.jvp(fun, (x,), (direction,))[1]
        return jax.jvp(first, (x,), (direction,))[1]

    return jax.vmap(second)(jnp.eye(x.size)).sum()


def test_a_forward_laplacian_leaves_the_range_of_float16_and_not_that_of_bfloat16():
    x, w = jnp.array([0.5, 0.25, 0.125]), jnp.eye(3) + 0.5
    charges = jnp.ones(3)

    def potential(x):  # Of charges at a small distance from the electron.
        return ((charges / (x @ w - 0.6)) @ w).sum()

    laplacian = lambda x: forward_laplacian(potential, x)
    expected = laplacian(x)
    half = jmp.autocast(laplacian, compute_dtype="float16")
    assert not jnp.isfinite(half(x))
    assert jnp.isfinite(jmp.autocast(laplacian)(x))
    remedy = jmp.get_rules("mixed", "float16").scope("laplacian", "full")
    marked = jmp.autocast(jax.named_scope("laplacian")(laplacian), remedy)
    assert abs(marked(x) / expected - 1) < 1e-5


def test_a_difference_of_large_determinants_needs_float32():
    keys = jax.random.split(jax.random.key(1))
    electrons, w = jax.random.normal(keys[0], (2, 6, 8)), jnp.eye(8) + 0.1
    electrons = electrons.at[1].set(electrons[0] + 1e-3 * electrons[1])

    def wave_function(w, electrons):
        with jax.named_scope("orbitals"):
            orbitals = jnp.tanh(electrons @ w) @ w[:, :6]
        one, other = jnp.linalg.det(orbitals)
        return one - other  # Antisymmetric: large terms that nearly cancel.

    expected = wave_function(w, electrons)
    wrong = jmp.autocast(wave_function, "O1")(w, electrons)
    assert abs(wrong / expected - 1) > 0.1
    rules = jmp.get_rules("mixed").scope("orbitals", "full")
    right = jmp.autocast(wave_function, rules)(w, electrons)
    assert abs(right / expected - 1) < 1e-3
