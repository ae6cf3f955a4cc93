"""Numbers that are stored in parts keep all of them, in programs for GPUs and TPUs.

A compiler may take ``x - f32(bf16(x))`` for zero, or add 16-bit numbers without
rounding. These tests compute what the compilers' own programs compute.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_numbers import as_arrays, run_compiled_for

import jmp_lite as jmp
from benchmarks.compiled import missing

TARGETS = ("h100", "v5e", "tpu7x")
pytestmark = [
    pytest.mark.targets,
    pytest.mark.usefixtures("standard_promotion"),  # Adam needs it.
    *(
        pytest.mark.skipif(missing(target) is not None, reason=str(missing(target)))
        for target in ("h100", "v5e")
    ),
]

SGD, ADAM, KEY = optax.sgd(0.1), optax.adam(0.1), jax.random.key(0)
OPTIMIZERS = {
    "masters": (jmp.master_weights(SGD), True),
    "compensated": (jmp.compensated(SGD), True),
    "stochastic rounding": (jmp.stochastic_rounding(SGD, KEY), True),
    "16-bit moments": (jmp.low_precision_state(ADAM, "bfloat16", key=KEY), False),
    "8-bit moments": (jmp.low_precision_state(ADAM, "float8_e4m3fn", key=KEY), False),
}
CASES = [
    (name, dtype)
    for name, (_, is_for_16_bits) in OPTIMIZERS.items()
    for dtype in (("bfloat16", "float16") if is_for_16_bits else ("float32",))
]


@functools.cache
def numbers(shape=(4096,)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(4096,), (64, 512)], ids=str)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_step_stores_what_it_stores_without_a_compiler(name, dtype, shape, target):
    optimizer, _ = OPTIMIZERS[name]
    params = numbers(shape).astype(dtype)
    # Far smaller than a unit in the last place of bfloat16.
    grads = numbers(shape) * 1e-3
    state = optimizer.init(params)

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jmp.apply_updates(params, updates), state

    with jax.disable_jit():
        expected = as_arrays(step(params, state, grads))
    actual = run_compiled_for(target, step, params, state, grads)
    assert [each.dtype for each in actual] == [each.dtype for each in expected]
    for one, other in zip(actual, expected, strict=True):
        # The last digit of Adam's square root and of a sum is each program's own.
        atol = 1e-6 if one.dtype == jnp.float32 and dtype == "float32" else 0
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=0, atol=atol
        )


def split_by_hand(x):
    upper = x.astype(jnp.bfloat16)
    return (x - upper.astype(jnp.float32)).astype(jnp.bfloat16)


def error_of_a_sum(a, b):
    total = a + b
    other = total - a
    return (a - (total - other)) + (b - other)


def test_splits_by_hand_are_lost_which_these_programs_show():
    """So the tests above can fail."""
    x = numbers()
    a, b = (each.astype(jnp.bfloat16) for each in (x, x[::-1]))
    lost = {
        target: [
            not run_compiled_for(target, fun, *args)[0].any()
            for fun, args in ((split_by_hand, (x,)), (error_of_a_sum, (a, b)))
        ]
        for target in TARGETS
    }
    assert lost == {
        "h100": [True, False],
        "v5e": [False, True],
        "tpu7x": [False, False],
    }
