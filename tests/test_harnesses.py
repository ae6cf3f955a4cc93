"""JAX's own test harnesses, which its wheel holds, under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.internal_test_util import test_harnesses as jax_harnesses

import jmp_lite as jmp

HARNESSES = {
    harness.fullname: harness
    # JAX makes some of sets: in order, so that all workers agree.
    for harness in sorted(jax_harnesses.all_harnesses, key=str)
    if harness.dtype == np.float32 and harness.filter(jax.default_backend())
}
ONE_OF_EACH_GROUP = {h.group_name: name for name, h in reversed(HARNESSES.items())}

PRODUCTS = {"dot_general": 0.01, "conv_general_dilated": 0.01}
"""What autocast lowers of arguments in float32; all else is float32's, bit for bit."""

# By group, of arguments in 16 bits.
TOLERANCE = {"pow": 0.06, "round": 0.05, "floor": 0.05, "ceil": 0.05}
TOLERANCE |= {"convert_element_type": 0.05, "custom_linear_solve": 0.05}
# If arguments are rounded, their results are others: near a pole, of another sign, of
# another pick, of a matrix that is no longer positive definite.
UNSTABLE = {
    *("tan", "lgamma", "digamma", "eig", "eigh", "svd", "approx_top_k"),
    "cholesky",
}


@pytest.fixture(autouse=True)
def promotion(standard_promotion):
    """Harnesses are written for JAX's own promotion."""


def assert_same_types(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.weak_type == other.weak_type


def assert_near(actual, expected, tolerance):
    """Asserts that numbers are finite where float32's are, and near to those."""
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        one, other = (np.asarray(x).astype(np.complex128) for x in (one, other))
        is_finite = np.isfinite(other)
        assert np.all(np.isfinite(one[is_finite]))
        if not tolerance:
            np.testing.assert_array_equal(one, other)
        elif is_finite.any():
            error = np.linalg.norm(one[is_finite] - other[is_finite])
            assert error <= tolerance * np.linalg.norm(other[is_finite])


@pytest.mark.parametrize("name", ONE_OF_EACH_GROUP.values())
def test_one_op_of_each_kind_keeps_its_types(name):
    harness = HARNESSES[name]
    args = harness.dyn_args_maker(np.random.RandomState(0))
    both = jmp.autocast(harness.dyn_fun), harness.dyn_fun
    assert_same_types(*(jax.eval_shape(fun, *args) for fun in both))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ONE_OF_EACH_GROUP.values()
        else pytest.param(name, marks=pytest.mark.daily)
        for name in HARNESSES
    ],
)
def test_an_op_keeps_its_types_and_values(name):
    harness = HARNESSES[name]
    args = harness.dyn_args_maker(np.random.RandomState(0))

    def of_low(*args):
        return harness.dyn_fun(*jax.tree.map(jmp.as_low, args))

    @jax.jit
    def run(*args):
        funs = harness.dyn_fun, jmp.autocast(harness.dyn_fun), jmp.autocast(of_low)
        return [fun(*args) for fun in funs]

    expected, actual, rounded = run(*args)
    assert_same_types(actual, expected)
    assert_near(actual, expected, PRODUCTS.get(harness.group_name, 0))
    assert_same_types(rounded, expected)
    if harness.group_name not in UNSTABLE:
        assert_near(rounded, expected, TOLERANCE.get(harness.group_name, 0.02))
