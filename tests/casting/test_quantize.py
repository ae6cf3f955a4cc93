"""Arrays in float8: scales, and what comes back."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jmp_lite as jmp
from jmp_lite.casting.quantize import dequantize, quantize, scale_for

FORMATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
FORMATS += ["float8_e4m3b11fnuz"]
scale_of = jax.jit(scale_for, static_argnums=1)


@given(largest=st.floats(2.0**-80, 2.0**120, width=32), dtype=st.sampled_from(FORMATS))
def test_a_scale_is_the_least_power_of_two_that_brings_numbers_into_the_format(
    largest, dtype
):
    scale = float(scale_of(jnp.float32(largest), dtype))
    end = float(jnp.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    # A division in float32 may round up to the end.
    assert largest / scale <= end * (1 + 2.0**-20)
    assert largest / scale > end / 2


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("largest", "expected"),
    [(0.0, 1.0), (1e-33, 2.0**-100), (np.inf, np.nan), (np.nan, np.nan)],
)
def test_zeros_tiny_numbers_infinities_and_nans_have_scales(largest, expected, dtype):
    np.testing.assert_equal(float(scale_of(jnp.float32(largest), dtype)), expected)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of", ["bfloat16", "float32"])
def test_numbers_are_divided_by_the_scale_and_rounded_to_nearest(dtype, of):
    array = (jax.random.normal(jax.random.key(0), (16, 3, 5)) * 1000).astype(of)
    numbers, scale = jax.jit(quantize, static_argnums=1)(array, dtype)
    assert (numbers.dtype, numbers.shape, scale.dtype) == (dtype, (16, 3, 5), "float32")
    expected = np.asarray(array, np.float32) / float(scale)
    expected = expected.astype(getattr(ml_dtypes, dtype)).astype(np.float32)
    np.testing.assert_array_equal(numbers.astype(jnp.float32), expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_that_the_format_has_come_back_bit_for_bit(dtype):
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    every = np.asarray(every, np.float32)
    numbers = jnp.asarray(every[np.isfinite(every)], jnp.bfloat16)
    for factor in (1, 2.0**40, 2.0**-60):
        back = dequantize(quantize(numbers * factor, dtype), jnp.bfloat16)
        np.testing.assert_array_equal(back, numbers * factor)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_infinities_and_nans_are_never_clipped(bad):
    array = jnp.array([1.0, bad, 2.0])
    assert not np.isfinite(dequantize(quantize(array, FORMATS[0]), "float32")).any()


@pytest.mark.parametrize(
    ("largest", "loses", "vanishes"),
    [(np.nextafter(np.float32(1.75), 2), 14_336, 229_376), (1.75, 28_672, 458_752)],
)
def test_small_numbers_lose_digits_and_vanish_at_the_ratios_that_the_docs_name(
    largest, loses, vanishes
):
    def stored(number):
        array = jnp.array([largest, number], jnp.float32)
        return float(dequantize(quantize(array, jnp.float8_e4m3fn), jnp.float32)[1])

    least, zero = largest // 0.25 * 0.25 / loses, largest // 0.25 * 0.25 / vanishes
    assert stored(1.125 * least) == 1.125 * least
    assert stored(1.125 * least / 2) != 1.125 * least / 2
    assert stored(1.01 * zero) > 0 == stored(zero)


@pytest.mark.parametrize("dtype", FORMATS)
def test_small_negative_numbers_are_no_nan_in_a_loop(dtype):
    """XLA for CPUs makes NaN of them, where a format has no negative zero."""
    largest = float(jnp.finfo(dtype).max)
    numbers = jnp.asarray([-largest, *-(2.0 ** -np.arange(40.0)), -0.0], jnp.float32)

    def step(carry, row):
        quantized = quantize(row, dtype)
        return carry, (quantized.numbers, dequantize(quantized, jnp.float32))

    _, (_, found) = jax.jit(lambda x: lax.scan(step, 0, x))(jnp.stack([numbers] * 3))
    expected = np.asarray(numbers).astype(getattr(ml_dtypes, dtype))
    for row in found:
        np.testing.assert_array_equal(row, expected.astype(np.float32))


def test_an_array_may_be_empty_or_a_scalar():
    assert quantize(jnp.zeros((0, 4)), FORMATS[0]).numbers.shape == (0, 4)
    assert float(quantize(jnp.float32(3), FORMATS[0]).scale) == 2.0**-7


BLOCKS = [((256, 256), (128, 128)), ((256, 300), (128, 128)), ((5, 7, 4), (2, 7, 3))]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("shape", "block"), BLOCKS)
def test_each_block_is_quantized_as_an_array_of_its_own(shape, block, dtype):
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-6, 6, shape[:1] + (1,) * (len(shape) - 1))
    array = np.float32(rng.normal(size=shape) * sizes)
    numbers, scale = jmp.formats.quantize(jnp.asarray(array), dtype, block)
    stored = jmp.formats.Quantized(numbers, scale)
    again = jmp.formats.dequantize(stored, "float32", block)
    numbers = np.asarray(numbers)
    starts = [range(0, n, size) for n, size in zip(shape, block, strict=True)]
    assert scale.shape == tuple(map(len, starts))
    for corner in itertools.product(*starts):
        part = tuple(slice(i, i + size) for i, size in zip(corner, block, strict=True))
        one = quantize(jnp.asarray(array[part]), dtype)
        np.testing.assert_array_equal(*map(np.float32, (numbers[part], one.numbers)))
        expected = dequantize(one, "float32")
        np.testing.assert_array_equal(again[part], expected)


@pytest.mark.parametrize("rows", [(), (1, 1), (256, 1), (1, 300), (2, 3)], ids=str)
def test_arrays_that_others_stored_are_their_numbers_times_their_scales(rows):
    """One scale, one for each row, or one for each block; no powers of two."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(256, 300)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.float32(rng.uniform(0.1, 2, rows))
    block = (128, 128) if rows == (2, 3) else None
    each = np.kron(scale, np.ones(block))[:, :300] if block else scale
    exact = np.float32(weight) * np.float32(each)
    stored = jmp.formats.Quantized(jnp.asarray(weight), scale)
    full = jmp.formats.dequantize(stored, "float32", block)
    np.testing.assert_array_equal(full, exact)
    low = jmp.formats.dequantize(stored, "bfloat16", block)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(low), exact, rtol=2.0**-7)


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((2, 3), None, r"pass the sizes .* block=\(128, 128\)"),
        ((2, 3), (64, 128), r"Expected a scale of shape \(4, 3\)"),
        ((3,), None, "Expected a scale with 2 axes"),
    ],
)
def test_scales_that_do_not_fit_are_errors(shape, block, message):
    numbers = jnp.ones((256, 300), "float8_e4m3fn")
    stored = jmp.formats.Quantized(numbers, jnp.ones(shape))
    with pytest.raises(ValueError, match=message):
        jmp.formats.dequantize(stored, "float32", block)


@pytest.mark.parametrize("block", [(128,), (0, 128), (128, 128, 1)])
def test_blocks_that_are_none_are_an_error(block):
    with pytest.raises(ValueError, match=re.escape(f"got block={block}")):
        jmp.formats.quantize(jnp.ones((256, 256)), block=block)


def test_a_cast_beyond_the_range_is_what_the_docs_say():
    x = jnp.float32([464, 465, 61_440, 61_441, 1e-8])
    cast = [np.float32(jmp.cast_tree(x, f"float8_{f}")) for f in ("e4m3fn", "e5m2")]
    np.testing.assert_array_equal(cast[0], [448, *[np.nan] * 3, 0])
    np.testing.assert_array_equal(cast[1], [448, 448, np.inf, np.inf, 0])
