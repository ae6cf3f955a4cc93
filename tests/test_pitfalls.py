"""What the page of pitfalls says of other packages is still so.

A test here runs JAX, optax, Flax or NumPy alone. If one fails, the pitfall is gone:
take its line out of `docs/pitfalls.md`.
"""

import io
import pathlib
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import mesh_of
from benchmarks.compiled import compile_for, missing

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pitfalls.md"
KEY = jax.random.key(0)
HALF = jnp.bfloat16
ONES = np.ones(1000, np.float32)
ZEROS = np.zeros(1000, np.int32)


def ones(dtype=HALF):
    return jnp.asarray(ONES, dtype)


def as_float32(x):
    return np.asarray(x).astype(np.float32)


# ----------------------------------------------------------------------------- the page


def lines_of_the_page():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    return [row for row in rows if not row.startswith("| what happens")]


def test_each_line_links_a_test_or_a_script_and_each_test_has_a_line():
    pattern = re.compile(r"\]\((\.\./\S+?)(?: \"(\w+)\")?\)")
    links = [pattern.findall(row) for row in lines_of_the_page()]
    assert all(links)
    named = [name for found in links for _, name in found if name]
    linked = set(named)
    assert len(named) == len(linked)
    text = pathlib.Path(__file__).read_text()
    tests = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    own = {"test_each_line_links_a_test_or_a_script_and_each_test_has_a_line"}
    assert linked == tests - own
    scripts = {file for found in links for file, _ in found if "/findings/" in file}
    assert scripts == {
        f"../findings/{path.name}" for path in ROOT.glob("findings/*.sh")
    }


# ----------------------------------------------------------------------- random numbers


def test_normal_numbers_in_bfloat16_are_128_with_a_negative_mean():
    drawn = as_float32(jax.random.normal(KEY, (100_000,), HALF))
    assert len(np.unique(drawn)) <= 128
    assert drawn.mean() < -0.005
    assert drawn.max() < 2.6
    exact = as_float32(jax.random.normal(KEY, (100_000,)))
    assert abs(exact.mean()) < 0.005
    assert exact.max() > 4


def test_initialisers_in_bfloat16_shift_the_sums_of_a_wide_layer():
    init = jax.nn.initializers.lecun_normal()
    low, exact = (as_float32(init(KEY, (4096, 512), d)) for d in (HALF, jnp.float32))
    assert low.sum(0).mean() < -0.7
    assert abs(exact.sum(0).mean()) < 0.2
    assert 0.9 < exact.sum(0).std() < 1.1


def test_tokens_from_bfloat16_logits_are_the_first_ones():
    draw = lambda d: jax.random.categorical(KEY, jnp.zeros(50_257, d), shape=(100,))
    assert draw(HALF).max() < 5_000
    assert draw(jnp.float32).max() > 45_000


def test_a_rare_event_in_bfloat16_is_not_rare():
    happens = jax.random.bernoulli(KEY, jnp.asarray(1e-5, HALF), (100_000,))
    assert 0.005 < happens.mean() < 0.01
    assert jax.random.bernoulli(KEY, jnp.float32(1e-5), (100_000,)).mean() < 1e-4


def test_an_unbounded_truncated_normal_in_bfloat16_has_huge_numbers():
    drawn = jax.random.truncated_normal(KEY, -jnp.inf, jnp.inf, (100_000,), HALF)
    assert 0.005 < float((drawn < -1e38).mean()) < 0.01


# --------------------------------------------------------------------------------- sums


def test_scatter_adds_in_bfloat16_stop_at_256():
    assert jnp.zeros(1, HALF).at[ZEROS].add(1)[0] == 256
    assert jax.ops.segment_sum(ones(), ZEROS, 1)[0] == 256
    assert jax.grad(lambda table: table[ZEROS].sum())(jnp.ones(2, HALF))[0] == 256
    assert ones().sum() == 1000


def test_average_pooling_in_bfloat16_loses_three_quarters_of_a_large_window():
    pooled = nn.avg_pool(jnp.ones((1, 32, 32, 1), HALF), (32, 32))
    assert float(pooled.ravel()[0]) == 0.25


def test_a_loop_in_bfloat16_adds_up_to_256_and_so_does_its_gradient():
    one, zero = jnp.asarray(1, HALF), jnp.asarray(0, HALF)
    assert lax.fori_loop(0, 1000, lambda i, total: total + one, zero) == 256
    total = lambda w: lax.scan(lambda c, x: (c + w * x, None), zero, ones())[0]
    assert jax.grad(total)(one) == 256


def test_numpy_sums_of_bfloat16_stop_at_256():
    x = np.ones(1000, ml_dtypes.bfloat16)
    assert (float(x.sum()), float(x.mean())) == (256, 0.255859375)


def test_float8_sums_stop_early_and_a_softmax_is_nan():
    assert jnp.ones(16, jnp.float8_e5m2).sum() == 8
    assert np.isnan(as_float32(jax.nn.softmax(jnp.ones(16, jnp.float8_e4m3fn)))).all()


def test_norms_of_float16_gradients_overflow_or_vanish():
    clip = optax.clip_by_global_norm(1.0)
    large, small = jnp.full(100, 300, jnp.float16), jnp.full(100, 1e-4, jnp.float16)
    assert jnp.isinf(optax.tree.norm(large))
    assert (clip.update(large, clip.init(large))[0] == 0).all()
    assert optax.tree.norm(small) == 0
    assert jnp.isinf(jnp.linalg.norm(large))


# ------------------------------------------------------------------------------- values


def test_standardize_in_bfloat16_is_far_from_a_deviation_of_one():
    x = 100 + jax.random.normal(KEY, (10_000,))
    assert 0.9 < as_float32(jax.nn.standardize(x)).std() < 1.1
    assert as_float32(jax.nn.standardize(x.astype(HALF))).std() > 100


def test_positions_in_bfloat16_repeat_and_powers_of_two_are_not_exact():
    assert len(np.unique(as_float32(jnp.arange(1000, dtype=HALF)))) < 600
    assert float(jnp.exp2(jnp.asarray(10, HALF))) == 1000


def test_a_float32_scalar_of_numpy_widens_a_bfloat16_array():
    assert (ones() * np.float32(2)).dtype == jnp.float32
    assert (ones() * 2.0).dtype == HALF


def test_zeros_of_e8m0_are_nan():
    assert np.isnan(as_float32(jnp.zeros(2, jnp.float8_e8m0fnu))).all()


def test_the_largest_e8m0_number_is_nan():
    x = jnp.array([1, 2, 4], "float8_e8m0fnu")
    assert np.isnan(as_float32(jnp.max(x)))
    assert jnp.max(x.astype("float32")) == 4


# --------------------------------------------------------------------------- optimizers


def steps(optimizer, params, gradients):
    """Returns the last update, and the state after it."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
    return updates, state


def test_adam_of_float16_gradients_steps_too_far():
    params, gradient = np.ones(4, np.float32), np.full(4, 1e-3, np.float32)
    exact, low = (
        steps(optax.adam(1e-3), jnp.asarray(params), [jnp.asarray(gradient, dtype)])[0]
        for dtype in (jnp.float32, jnp.float16)
    )
    np.testing.assert_allclose(exact, -1e-3, rtol=1e-3)
    assert (low < -10).all()
    assert jnp.isfinite(low).all()


def test_a_second_moment_in_bfloat16_does_not_decay():
    nus = {}
    for dtype in (jnp.float32, HALF):
        gradients = [jnp.ones(4, dtype), *[jnp.zeros(4, dtype)] * 1000]
        state = steps(optax.adam(1e-3), jnp.ones(4, dtype), gradients)[1]
        nus[dtype] = float(state[0].nu[0])
    assert nus[jnp.float32] < 0.0004
    assert nus[HALF] > 0.0009


def test_averages_in_bfloat16_stop_at_a_half():
    average = optax.ema(0.999, debias=False)
    one = jnp.ones(1, HALF)

    def step(_, carry):
        state, target = carry
        return average.update(one, state)[1], optax.incremental_update(
            one, target, 1e-3
        )

    begin = average.init(one), jnp.zeros(1, HALF)
    state, target = lax.fori_loop(0, 10_000, step, begin)
    assert (float(state.ema[0]), float(target[0])) == (0.5, 0.5)


def test_injected_hyperparameters_of_bfloat16_parameters_make_a_nan():
    optimizer = optax.inject_hyperparams(optax.adam)(1e-3)
    params = jnp.ones(4, HALF)
    updates, state = steps(optimizer, params, [jnp.full(4, 1e-2, HALF)])
    assert state.hyperparams["b2"] == 1
    assert jnp.isnan(updates).all()


def test_a_small_update_of_a_bfloat16_parameter_is_lost():
    params = jnp.ones(4, HALF)
    assert (optax.apply_updates(params, jnp.full(4, -1e-3, HALF)) == params).all()


# ------------------------------------------------------------------------------ devices


@pytest.mark.targets
def test_products_on_a_tpu_are_bfloat16_ones_unless_they_ask_for_more():
    if missing("v5e"):
        pytest.skip(missing("v5e"))

    def cycles(dtype, precision=None):
        x = jax.ShapeDtypeStruct((2048, 2048), dtype)
        product = lambda x, y: jnp.matmul(x, y, precision=precision)
        return compile_for("v5e", product, x, x).cycles

    least = cycles(HALF)
    assert cycles(jnp.float32) < 1.1 * least
    assert cycles(jnp.float32, "highest") > 5 * least
    assert cycles(jnp.float16) < 1.1 * least
    assert cycles(jnp.float16, "highest") > 2.5 * least


@pytest.mark.targets
def test_a_float32_sum_over_tpus_that_is_cast_at_once_is_one_in_bfloat16():
    if missing("v5e"):
        pytest.skip(missing("v5e"))
    mesh = mesh_of("v5e")
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8 * 512, 1024), HALF, sharding=split)

    def sent(keep):
        fun = lambda x: keep(lax.psum(x.astype(jnp.float32), "data")).astype(x.dtype)
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P())
        return compile_for("v5e", mapped, x).collectives

    assert "f32" not in sent(lambda total: total)
    assert "f32" in sent(lambda total: lax.reduce_precision(total, 8, 23))


# -------------------------------------------------------------------------------- files


def saved_and_loaded(x):
    file = io.BytesIO()
    np.save(file, x)
    file.seek(0)
    return np.load(file)


def test_numpy_files_forget_bfloat16_and_refuse_e5m2():
    loaded = saved_and_loaded(np.ones(2, ml_dtypes.bfloat16))
    assert loaded.dtype == np.dtype("V2")
    assert (loaded.view(ml_dtypes.bfloat16) == 1).all()
    with pytest.raises(ValueError, match="f1"):
        saved_and_loaded(np.ones(2, ml_dtypes.float8_e5m2))


def test_numpy_does_not_sort_bfloat16_with_a_nan():
    x = np.array([3, np.nan, 1, 2], ml_dtypes.bfloat16)
    assert float(np.sort(x)[0]) == 3
    assert float(np.sort(x.astype(np.float32))[0]) == 1


def test_orbax_casts_to_the_template_without_a_word(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"a": jnp.full(2, 1 / 3)})
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "saved", {"a": jnp.ones(2, HALF)})
    assert found["a"].dtype == HALF


def test_equinox_writes_float8_and_cannot_read_it():
    x, file = jnp.ones(2, jnp.float8_e4m3fn), io.BytesIO()
    eqx.tree_serialise_leaves(file, x)
    file.seek(0)
    with pytest.raises(RuntimeError, match="changed type"):
        eqx.tree_deserialise_leaves(file, x)
