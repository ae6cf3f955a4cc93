"""Pictures show what is in the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite import plots

GRADS = {
    "dense": {"kernel": jnp.array([2.0**-30, 2.0**-30, 1.0, 0.0])},
    "head": jnp.array([jnp.nan, 3.0], jnp.bfloat16),
    "step": jnp.arange(3),
}


def labels(axes):
    return [text.get_text() for text in axes.get_yticklabels()]


def test_each_array_of_floats_is_a_row_with_what_cannot_be_drawn_beside_it():
    upper = plots.magnitudes(GRADS).axes[0]
    assert labels(upper) == ["dense/kernel: 25% zero", "head: 50% not finite"]


def test_the_shares_stand_where_the_numbers_are():
    upper = plots.magnitudes(GRADS).axes[0]
    (mesh,) = upper.collections
    shares = np.asarray(mesh.get_array())
    lows = mesh.get_coordinates()[0, :-1, 0]
    expected = np.zeros_like(shares)
    expected[0, lows == -30] = 0.5
    expected[0, lows == 0] = 0.25
    expected[1, lows == 1] = 0.5
    np.testing.assert_array_equal(shares, expected)


@pytest.mark.parametrize("dtype", plots.DTYPES)
def test_a_dtype_s_range_is_that_of_the_dtype(dtype):
    lower = plots.magnitudes(GRADS, [dtype]).axes[1]
    info = jnp.finfo(dtype)
    subnormal, normal = (np.exp2(line.get_xdata()) for line in lower.get_lines())
    np.testing.assert_allclose(
        subnormal, [float(info.smallest_subnormal), float(info.tiny)]
    )
    np.testing.assert_allclose(normal, [float(info.tiny), float(info.max)])
    assert labels(lower) == [dtype]
    assert lower.get_xlabel() == "log2 of the size"


def test_a_single_array_and_one_of_one_size_are_drawn(tmp_path):
    figure = plots.magnitudes(np.full((2, 3), 0.5))
    assert labels(figure.axes[0]) == ["all"]
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("tree", [{}, {"w": jnp.zeros(3)}, jnp.array([jnp.nan]), 3])
def test_nothing_to_draw_is_refused(tree):
    with pytest.raises(ValueError, match="no number that is finite and not zero"):
        plots.magnitudes(tree)


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'float16'"):
        plots.magnitudes(GRADS, ["float61"])


def test_it_refuses_tracers():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: plots.magnitudes(x) and x)(jnp.ones(2))
