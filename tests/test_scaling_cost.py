"""What skipping costs in the program that a real compiler makes for an accelerator."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizers import lenient

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, missing
from benchmarks.loss_scaling import GRADIENT_BYTES, compile_update

pytestmark = pytest.mark.targets

ADAMW = lenient(optax.adamw(1e-3))


@pytest.fixture(params=TARGETS)
def target(request):
    if missing(request.param):
        pytest.skip(missing(request.param))
    return request.param


def arrays_moved(program, n_params=1):
    return program.bytes_moved / GRADIENT_BYTES / n_params


def test_loss_scaling_reads_the_gradients_once_more_and_keeps_nothing(target):
    plain = compile_update(target, ADAMW)
    scaled = compile_update(target, jmp.loss_scaling(ADAMW))
    assert arrays_moved(plain) == pytest.approx(7.0, abs=0.001)
    assert arrays_moved(scaled) == pytest.approx(8.0, abs=0.001)
    assert scaled.temporaries < 0.01 * GRADIENT_BYTES


def test_skipping_without_a_scale_costs_the_same(target):
    program = compile_update(target, jmp.skip_nonfinite(ADAMW))
    assert arrays_moved(program) == pytest.approx(8.0, abs=0.001)
    assert program.temporaries < 0.01 * GRADIENT_BYTES


def test_the_cost_per_parameter_does_not_grow_with_their_number(target):
    program = compile_update(target, jmp.loss_scaling(ADAMW), n_params=3)
    assert arrays_moved(program, 3) == pytest.approx(8.0, abs=0.001)
    assert program.temporaries < 0.01 * GRADIENT_BYTES


def test_the_measure_sees_what_a_branch_costs(target):
    """The twin that fails: a branch around the whole step moves and holds more."""
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
