"""The models of Flax's examples, small, under autocast."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from benchmarks.autocast import fill, gradient_error
from benchmarks.examples import EXAMPLES


@pytest.fixture(params=EXAMPLES)
def example(request):
    return EXAMPLES[request.param]


def test_gradients_under_autocast_are_finite_and_float32(example):
    make, small = example
    model = make(None, **small)
    params, batch = fill((model.params, model.batch), seed=0)
    gradients = jax.jit(jax.grad(jmp.autocast(model.loss)))(params, batch)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32
        assert bool(jnp.all(jnp.isfinite(leaf)))


@pytest.mark.usefixtures("standard_promotion")  # Flax's own, by hand.
def test_gradients_under_autocast_are_nearly_as_exact_as_by_hand(example):
    make, small = example
    errors = [gradient_error(make, v, small, seeds=7) for v in ("mixed", "by hand")]
    assert 0 < errors[0] <= 1.3 * errors[1]


@pytest.mark.usefixtures("standard_promotion")
def test_parameters_have_the_same_shapes_in_both(example):
    make, small = example
    exact, by_hand = make(None, **small), make(jnp.bfloat16, **small)
    leaves = [jax.tree.leaves_with_path(model.params) for model in (exact, by_hand)]
    assert [(path, leaf.shape) for path, leaf in leaves[0]] == [
        (path, leaf.shape) for path, leaf in leaves[1]
    ]
    assert {leaf.dtype for _, leaf in leaves[0] + leaves[1]} == {jnp.dtype("float32")}
