"""Pictures of the magnitudes of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_lite import plots
from jmp_lite.casting.quantize import scale_for

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
    mesh, *_ = upper.collections
    shares = np.asarray(mesh.get_array())
    lows = mesh.get_coordinates()[0, :-1, 0]
    expected = np.zeros_like(shares)
    expected[0, lows == -30] = 0.5
    expected[0, lows == 0] = 0.25
    expected[1, lows == 1] = 0.5
    np.testing.assert_array_equal(shares, expected)


@pytest.mark.parametrize("dtype", plots.DTYPES)
def test_a_dtype_s_range_is_that_of_the_dtype(dtype):
    """Of 8 bits that of the array with the largest number, under its scale."""
    lower = plots.magnitudes(GRADS, [dtype]).axes[1]
    info, is_scaled = jnp.finfo(dtype), "float8" in dtype
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(GRADS))
    scale = float(scale_for(jnp.float32(largest), dtype)) if is_scaled else 1.0
    subnormal, normal = (np.exp2(line.get_xdata()) for line in lower.get_lines())
    np.testing.assert_allclose(
        subnormal, [scale * float(info.smallest_subnormal), scale * float(info.tiny)]
    )
    np.testing.assert_allclose(
        normal, [scale * float(info.tiny), scale * float(info.max)]
    )
    assert labels(lower) == [f"{dtype}, scaled" if is_scaled else dtype]
    assert lower.get_xlabel() == "log2 of the size"


def test_in_the_row_of_an_array_a_mark_shows_where_its_scale_ends():
    arrays = {"a": jnp.ones(3), "b": jnp.full(3, 2.0**20), "c": jnp.zeros(2)}
    upper = plots.magnitudes(arrays, ["bfloat16", "float8_e4m3fn"]).axes[0]
    _, marks = upper.collections
    assert marks.get_label() == "float8_e4m3fn"
    assert upper.get_legend().get_title().get_text() == "all digits from"
    # 2**-8 brings 1 up to 256, and the smallest number with all digits is 2**-6. Zeros
    # have no mark.
    expected = [[(-14, -0.5), (-14, 0.5)], [(6, 0.5), (6, 1.5)]]
    np.testing.assert_array_equal(marks.get_segments(), expected)
    upper = plots.magnitudes(arrays, ["bfloat16"]).axes[0]
    assert len(upper.collections) == 1
    assert upper.get_legend() is None


def test_numbers_beyond_float32_are_drawn_above_float8():
    array = np.array([1e300, 1.0])
    lower = plots.magnitudes(array, ["float8_e5m2"]).axes[1]
    (subnormal, normal) = (line.get_xdata() for line in lower.get_lines())
    # The largest scale is 2**113.
    np.testing.assert_allclose(subnormal, [97, 99])
    np.testing.assert_allclose(normal, [99, 113 + np.log2(57344)])


def test_a_single_array_and_one_of_one_size_are_drawn(tmp_path):
    figure = plots.magnitudes(np.full((2, 3), 0.5))
    assert labels(figure.axes[0]) == ["all"]
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("tree", [{}, {"w": jnp.zeros(3)}, jnp.array([jnp.nan]), 3])
def test_a_tree_without_numbers_to_draw_is_an_error(tree):
    with pytest.raises(
        ValueError, match="Expected a number that is finite and nonzero"
    ):
        plots.magnitudes(tree)


def test_an_unknown_dtype_is_an_error_that_names_the_nearest_one():
    with pytest.raises(ValueError, match="Did you mean 'float16'"):
        plots.magnitudes(GRADS, ["float61"])


def test_tracers_are_an_error():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda x: plots.magnitudes(x) and x)(jnp.ones(2))
