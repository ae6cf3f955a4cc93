"""A run that is stopped and resumed has the same bits as one that is not stopped."""

import pathlib
import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from every_optimizer import lenient
from flax import nnx, serialization

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx

RUN = pathlib.Path(__file__).parents[1] / "resumable_run.py"


def run(path, steps, moments, kill_after=None):
    """Runs the script; kills it, without warning, once it has printed a step."""
    command = [sys.executable, str(RUN), str(path), str(steps), moments]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            printed.append(int(line))
            if printed[-1] == kill_after:
                process.kill()
    return printed, process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["bfloat16", "float8_e4m3fn"])
def test_a_run_that_is_killed_resumes_exactly(tmp_path, moments):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, 12, moments) == (list(range(12)), 0)
    first, status = run(killed, 12, moments, kill_after=5)
    assert status == -9
    second, status = run(killed, 12, moments)
    assert status == 0
    # It may have finished one step more than it printed.
    assert second[0] in (first[-1] + 1, first[-1] + 2)
    assert second[-1] == 11
    assert killed.read_bytes() == whole.read_bytes()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, e = map(jax.random.key_data, (a, e))
        np.testing.assert_array_equal(a, e)


def mse(params, model_state, batch, rng):
    return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2), (model_state, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("scale", "moments"),
    [
        pytest.param(jmp.NoOpLossScale(), "bfloat16", marks=pytest.mark.slow),
        pytest.param(jmp.StaticLossScale(128), None, marks=pytest.mark.slow),
        (jmp.DynamicLossScale(2.0**20, period=3, hysteresis=2), "float8_e4m3fn"),
    ],
    ids=["none", "static", "dynamic"],
)
def test_orbax_restores_a_training_state_bit_for_bit(tmp_path, scale, moments):
    rules = jmp.get_rules("mixed", "bfloat16")
    optimizer = lenient(optax.adam(0.1))
    if moments is not None:
        key = jax.random.key(4)
        optimizer = jmp.low_precision_state(optimizer, moments, key=key)
    init, eager_step = jmp.build_train_step(
        mse, optimizer, rules, loss_scale=scale, ema=0.9
    )
    step = jax.jit(eager_step)
    x = jax.random.normal(jax.random.key(1), (4, 8))
    state = init({"w": jnp.ones((8, 512))}, {"n": jnp.int32(3)}, jax.random.key(2))
    for _ in range(4):
        state, _ = step(state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert_same(restored, state)
    assert_same(step(restored, x)[0], step(state, x)[0])


def test_raw_random_keys_are_saved_where_typed_ones_are_not(tmp_path):
    w = jnp.ones((8, 1024), jnp.bfloat16)

    def start(key):
        inner = jmp.low_precision_state(lenient(optax.adam(0.1)), key=key)
        optimizer = jmp.loss_scaling(jmp.stochastic_rounding(inner, key))
        return optimizer.update(w, optimizer.init(w), w)[1]

    def through_flax(state, like):
        return serialization.from_bytes(like, serialization.to_bytes(state))

    def through_equinox(state, like):
        eqx.tree_serialise_leaves(tmp_path / "state", state)
        return eqx.tree_deserialise_leaves(tmp_path / "state", like)

    state, like = start(jax.random.PRNGKey(1)), start(jax.random.PRNGKey(2))
    for through in (through_flax, through_equinox):
        assert_same(through(state, like), state)
        with pytest.raises(Exception, match=r"PRNGKey dtype|at leaf with path"):
            through(start(jax.random.key(1)), like)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_without_hysteresis_is_restored_into_a_scale_with_it(tmp_path):
    w = jnp.ones(2)
    plain, patient = (
        jmp.loss_scaling(optax.sgd(0.1), jmp.DynamicLossScale(8.0, hysteresis=n))
        for n in (1, 2)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", plain.init(w))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", patient.init(w))
    scales = []
    for _ in range(3):
        _, state = patient.update(w * jnp.inf, state, w)
        scales.append(float(jmp.get_loss_scale(state).loss_scale))
    assert scales == [8, 4, 2]
    expected = patient.init(w)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, expected)
    assert not any(x.weak_type for x in jax.tree.leaves(state))


@pytest.mark.filterwarnings("ignore")
def test_orbax_restores_an_nnx_model_and_its_optimizer(tmp_path):
    x = jax.random.normal(jax.random.key(1), (4, 8))

    def start(seed):
        model = nnx.Linear(8, 2, rngs=nnx.Rngs(seed))
        optimizer = jmp.loss_scaling(lenient(optax.adam(0.1)), jmp.DynamicLossScale())
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @jmp_lite.nnx.autocast
    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    def train(model, optimizer):
        scale = jmp.get_loss_scale(optimizer.opt_state)
        grads = nnx.grad(lambda model: scale.scale(loss_fn(model, x)))(model)
        optimizer.update(model, scale.unscale(grads))

    model, optimizer = start(0)
    for _ in range(3):
        train(model, optimizer)
    saved = nnx.state((model, optimizer))
    others = start(1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(others))
        nnx.update(others, checkpointer.restore(tmp_path / "state", abstract))
    assert_same(nnx.state(others), saved)
    for each in (others, (model, optimizer)):
        train(*each)
    assert_same(nnx.state(others), nnx.state((model, optimizer)))
