"""The cost of skipping in programs that a compiler makes for an accelerator."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from every_optimizer import lenient

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, missing
from benchmarks.loss_scaling import (
    GRADIENT_BYTES,
    OF_OPTAX,
    PEERS,
    TRAINED,
    WAYS,
    by_optimizer,
    compile_step,
    main,
    times_table,
    training,
)

ADAMW = lenient(optax.adamw(1e-3))


@pytest.fixture(params=TARGETS)
def target(request):
    if missing(request.param):
        pytest.skip(missing(request.param))
    return request.param


def compile_update(target, optimizer, n_params=1):
    return compile_step(target, by_optimizer(optimizer), n_params)


def arrays_moved(program, n_params=1):
    return program.bytes_moved / GRADIENT_BYTES / n_params


@pytest.mark.targets
def test_loss_scaling_reads_the_gradients_once_more_and_keeps_nothing(target):
    plain = compile_update(target, ADAMW)
    scaled = compile_update(target, jmp.loss_scaling(ADAMW))
    assert arrays_moved(plain) == pytest.approx(7.0, abs=0.001)
    assert arrays_moved(scaled) == pytest.approx(8.0, abs=0.001)
    assert scaled.temporaries < 0.01 * GRADIENT_BYTES


@pytest.mark.targets
def test_skipping_without_a_scale_costs_the_same(target):
    program = compile_update(target, jmp.skip_nonfinite(ADAMW))
    assert arrays_moved(program) == pytest.approx(8.0, abs=0.001)
    assert program.temporaries < 0.01 * GRADIENT_BYTES


@pytest.mark.targets
def test_small_kernels_are_shared():
    """Each costs a launch: the counts share one, the scale and its counter another."""
    if missing("h100"):
        pytest.skip(missing("h100"))
    assert compile_update("h100", ADAMW).kernels == 3
    assert compile_update("h100", jmp.skip_nonfinite(ADAMW)).kernels == 7
    scaled = jmp.loss_scaling(ADAMW)
    kernels = [compile_update("h100", scaled, n).kernels for n in (1, 2, 3)]
    one_array, another = 9, 3  # Two to check another array, and one to update it.
    assert kernels == [one_array, one_array + another, one_array + 2 * another]


@pytest.mark.targets
def test_the_cost_per_parameter_does_not_grow_with_their_number(target):
    program = compile_update(target, jmp.loss_scaling(ADAMW), n_params=3)
    assert arrays_moved(program, 3) == pytest.approx(8.0, abs=0.001)
    assert program.temporaries < 0.01 * GRADIENT_BYTES


@pytest.mark.targets
def test_the_measurement_includes_the_cost_of_a_branch(target):
    """The counterexample: a branch around the whole step moves and holds more."""
    inner = ADAMW

    def update(grads, state, params):
        return jax.lax.cond(
            jmp.all_finite(grads),
            lambda: inner.update(grads, state, params),
            lambda: (jax.tree.map(jnp.zeros_like, grads), state),
        )

    branching = optax.GradientTransformationExtraArgs(inner.init, update)
    program = compile_update(target, branching)
    if target == "v5e":  # The GPU compiler turns this branch into a selection.
        assert arrays_moved(program) > 10
        assert program.temporaries > 0.9 * GRADIENT_BYTES
    else:
        assert arrays_moved(program) == pytest.approx(8.0, abs=0.001)


WITHOUT_SCALE = ("jmp_lite.skip_nonfinite", "optax.apply_if_finite")


@pytest.mark.targets
@pytest.mark.parametrize("name", WAYS)
def test_no_peer_moves_less_or_launches_less(name, target):
    if importlib.util.find_spec(PEERS.get(name, "optax")) is None:
        pytest.skip(f"{PEERS[name]} is not installed")
    if name != "plain":
        with jax.numpy_dtype_promotion("standard"):
            program = compile_step(target, WAYS[name]())
        assert arrays_moved(program) > 7.999
        least = 7 if name in WITHOUT_SCALE else 8
        assert target != "h100" or program.kernels >= least


# The bytes of a parameter with its state and gradient; those that a step moves, on an
# H100 and a v5e.
BYTES = {
    ("float32", "32 bits"): (16, 28, 28),
    ("float32", "16 bits"): (12, 20, 20),
    ("float32", "8 bits"): (10, 22, 26),
    ("float32, with loss_scaling", "32 bits"): (16, 32, 32),
    ("float32, with loss_scaling", "16 bits"): (12, 24, 24),
    ("float32, with loss_scaling", "8 bits"): (10, 26, 29),
    ("float32, 16-bit gradients", "32 bits"): (14, 26, 26),
    ("float32, 16-bit gradients", "16 bits"): (10, 18, 18),
    ("float32, 16-bit gradients", "8 bits"): (8, 18, 20),
    ("bfloat16, master_weights", "32 bits"): (16, 30, 30),
    ("bfloat16, master_weights", "16 bits"): (12, 22, 22),
    ("bfloat16, master_weights", "8 bits"): (10, 22, 24),
    ("bfloat16, compensated", "32 bits"): (14, 26, 26),
    ("bfloat16, compensated", "16 bits"): (10, 18, 18),
    ("bfloat16, compensated", "8 bits"): (8, 18, 20),
    ("bfloat16, stochastic_rounding", "32 bits"): (12, 22, 22),
    ("bfloat16, stochastic_rounding", "16 bits"): (8, 14, 14),
    ("bfloat16, stochastic_rounding", "8 bits"): (6, 14, 16),
    ("bfloat16, nothing else", OF_OPTAX): (8, 14, 14),
}


@pytest.mark.targets
@pytest.mark.parametrize("names", BYTES, ids=": ".join)
def test_a_step_moves_its_state_once_and_needs_no_temporaries(names, target):
    with jax.numpy_dtype_promotion("standard"):
        row = training(*names, [target])
    there, *moved = BYTES[names]
    assert row.held + row.gradient == pytest.approx(there, abs=0.01)
    assert row.moved[target] == pytest.approx(moved[TARGETS.index(target)], abs=0.02)
    assert row.temporary[target] < 0.02


def test_every_way_is_measured_once_and_shown_beside_the_plain_step(tmp_path, capsys):
    with jax.numpy_dtype_promotion("standard"):
        main(
            ["--targets", "--width", "8", "--runs", "3", "--json", str(tmp_path)],
        )
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "loss_scaling.json").read_text())
    assert {"plain", "jmp_lite.loss_scaling"} <= set(written["step_ms"]) <= set(WAYS)
    assert all(len(times) == 3 for times in written["step_ms"].values())
    assert written["device"] in out
    assert list(BYTES) == TRAINED


def test_times_are_shown_as_ratios_of_medians():
    text = times_table({"plain": [1.0, 2.0, 9.0], "x": [3.0, 4.0, 5.0]})
    assert text.splitlines()[2].split() == ["x", "4.00", "3.00-5.00", "2.00"]
