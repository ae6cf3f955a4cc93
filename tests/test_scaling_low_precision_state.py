"""Optimizer state in 16 bits: what is stored, what is not, and that nothing is lost."""

import functools
import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS, each_optimizer, lenient

import jmp_lite as jmp
from benchmarks.compiled import TARGETS
from benchmarks.loss_scaling import by_optimizer, compile_step
from jmp_lite.scaling.rounding import nearest
from jmp_lite.scaling.transforms import strongly_typed

KEY = jax.random.key(0)
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (64, 128)),
    "b": jnp.ones(128),
    "deep": jax.random.normal(jax.random.key(2), (2, 64, 64)),
}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p), PARAMS)


def adam(**options):
    return lenient(optax.adam(1e-2, **options))


def low(inner, key=KEY, **options):
    return jmp.low_precision_state(inner, key=key, **options)


def run(optimizer, params=PARAMS, grads=GRADS, steps=1, state=None):
    state = optimizer.init(params) if state is None else state
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def assert_same_bits(actual, expected):
    chex.assert_trees_all_equal_structs(actual, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, e = map(jax.random.key_data, (a, e))
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


# ---------------------------------------------------------------------- every optimizer


@each_optimizer
def test_large_arrays_of_parameters_are_stored_and_what_they_are_is_float32_s(name):
    case = OPTIMIZERS[name]
    bare = lenient(case.make())
    optimizer, extra_args = low(bare), case.extra_args(PARAMS, GRADS)
    full, state = strongly_typed(bare.init(PARAMS)), optimizer.init(PARAMS)
    chex.assert_trees_all_equal_structs(state.inner_state, full)
    shapes = {PARAMS["w"].shape, PARAMS["deep"].shape}
    for a, e in zip(*map(jax.tree.leaves, (state.inner_state, full)), strict=True):
        is_stored = e.shape in shapes and e.dtype == jnp.float32
        assert a.dtype == (jnp.bfloat16 if is_stored else e.dtype)
    step, bare_step = (
        jax.jit(functools.partial(each.update, **extra_args))
        for each in (optimizer, bare)
    )
    before = dtypes(state)
    for _ in range(2):
        # From what is stored, it does what the optimizer itself does.
        full = jax.tree.map(
            lambda a, e: a if a.dtype == e.dtype else a.astype(e.dtype),
            state.inner_state,
            full,
        )
        updates, state = step(GRADS, state, PARAMS)
        expected, full = bare_step(GRADS, full, PARAMS)
        # One that keeps 16 bits itself is given its state in float32.
        rtol = 0.02 if "bfloat16" in name else 1e-4
        chex.assert_trees_all_close(updates, expected, rtol=rtol, atol=1e-6)
        assert dtypes(state) == before
        pairs = zip(*map(jax.tree.leaves, (state.inner_state, full)), strict=True)
        for a, e in pairs:
            if a.dtype == jnp.bfloat16:
                a, e = (np.asarray(x, np.float64) for x in (a, e))
                assert np.all(np.abs(a - e) <= 2.0**-7 * np.abs(e) + 1e-37)
    assert step._cache_size() == 1


# ---------------------------------------------------------------------------- by chance


def test_an_average_that_would_stand_still_moves_by_chance_and_is_refused_without():
    decay = 0.999
    stored = jnp.full(5000, 1.0)
    for _ in range(100):
        stored = nearest(decay * stored, jnp.bfloat16)
    assert np.all(stored == 1.0)  # So it would stand still.
    params = jnp.ones(5000)
    optimizer = low(lenient(optax.rmsprop(0.1, decay=decay)))
    state = optimizer.init(params)
    one = jax.tree.map(lambda x: jnp.ones_like(x), state.inner_state)
    state = state._replace(inner_state=one)
    _, state = run(optimizer, params, jnp.zeros(5000), 100, state)
    (nu,) = (x for x in jax.tree.leaves(state.inner_state) if x.dtype == jnp.bfloat16)
    assert abs(float(jnp.mean(nu.astype(jnp.float32))) - decay**100) < 0.002
    with pytest.raises(ValueError, match=r"keeps 0.999 of itself.*key=jax.random.key"):
        low(adam(), key=None).init(PARAMS)
    low(adam(b2=0.95), key=None).init(PARAMS)
    low(adam(b2=0.999), key=None).init({"b": PARAMS["b"]})  # Nothing is stored.


def test_arrays_of_one_shape_are_rounded_by_chances_of_their_own():
    twice = {"a": PARAMS["w"], "b": PARAMS["w"]}
    grads = {"a": GRADS["w"], "b": GRADS["w"]}
    _, state = run(low(lenient(optax.sgd(0.1, momentum=0.9))), twice, grads, 3)
    a, b = (x for x in jax.tree.leaves(state.inner_state) if x.dtype == jnp.bfloat16)
    assert not np.array_equal(a, b)


def test_float16_is_refused_for_averages_of_squares_in_words():
    for key in (None, KEY):
        with pytest.raises(ValueError, match=r"squared gradients.*'bfloat16'"):
            low(adam(b2=0.9), key=key, dtype="float16").init(PARAMS)
    momentum = low(lenient(optax.sgd(0.1, momentum=0.9)), key=None, dtype="float16")
    _, state = run(momentum, steps=2)
    assert sum(x.dtype == jnp.float16 for x in jax.tree.leaves(state)) == 2


# ------------------------------------------------------------------------------ nesting


LABELS = {"w": "low", "b": "full", "deep": "low"}
IS_LOW = {"w": True, "b": False, "deep": True}
NESTED = {
    "inside": lambda: jmp.loss_scaling(low(adam())),
    "around": lambda: low(jmp.loss_scaling(adam())),
    "chain": lambda: jmp.loss_scaling(optax.chain(optax.clip(1.0), low(adam()))),
    "MultiSteps": lambda: jmp.loss_scaling(low(optax.MultiSteps(adam(), 2))),
    "masked": lambda: jmp.loss_scaling(optax.masked(low(adam()), IS_LOW)),
    "partition": lambda: jmp.loss_scaling(
        optax.partition({"low": low(adam()), "full": adam()}, LABELS)
    ),
    "inject_hyperparams": lambda: jmp.loss_scaling(
        low(lenient(optax.inject_hyperparams(optax.adam)(1e-2)))
    ),
}


@pytest.mark.parametrize("place", NESTED)
def test_a_skipped_step_leaves_every_stored_bit(place):
    optimizer = NESTED[place]()
    params, state = run(optimizer, steps=3)
    bad = {**GRADS, "b": GRADS["b"].at[3].set(jnp.nan)}
    after, skipped = run(optimizer, params, bad, 1, state)
    assert_same_bits(after, params)
    stored = [
        [x for x in jax.tree.leaves(tree) if x.dtype == jnp.bfloat16]
        for tree in (skipped, state)
    ]
    assert len(stored[0]) == 4
    assert_same_bits(*stored)
    assert float(jmp.get_loss_scale(skipped).loss_scale) == 2.0**14


@pytest.mark.parametrize("name", ["master_weights", "compensated"])
def test_masters_and_rests_keep_their_digits_on_either_side(name):
    wrap = getattr(jmp, name)
    params = jmp.cast_tree(PARAMS, "bfloat16")
    expected, full = run(wrap(adam()), params, steps=4)
    for optimizer in (wrap(low(adam())), low(wrap(adam()))):
        trained, state = run(optimizer, params, steps=4)
        chex.assert_trees_all_close(
            *map(jmp.cast_to_full, (trained, expected)), atol=0.02
        )
        # Around it, the state of the wrapper is one level further in.
        ours = state.inner_state if isinstance(state, jmp.LowPrecisionState) else state
        assert dtypes(ours[0]) == dtypes(full[0])
        stored = ours.inner_state
        stored = getattr(stored, "inner_state", stored)[0]
        assert [x.name for x in dtypes(stored.nu)] == [
            "float32",
            "bfloat16",
            "bfloat16",
        ]


def test_sums_of_gradients_over_steps_are_float32():
    state = low(optax.MultiSteps(adam(), 4)).init(PARAMS).inner_state
    assert set(dtypes(state.acc_grads)) == {np.dtype("float32")}
    assert "bfloat16" in [x.name for x in dtypes(state.inner_opt_state)]


def test_a_train_step_takes_it_and_learns():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params["w"] - 1) ** 2), (model_state, None)

    batch = jax.random.normal(KEY, (16, 64))
    losses = {}
    for name, optimizer in {"low": low(adam()), "full": adam()}.items():
        init, step = jmp.build_train_step(loss_fn, optimizer)
        with jax.numpy_dtype_promotion("standard"):
            state = init({"w": PARAMS["w"]}, None, KEY)
            for _ in range(20):
                state, metrics = step(state, batch)
        losses[name] = float(metrics["loss"])
    assert losses["low"] == pytest.approx(losses["full"], rel=0.02)


# ------------------------------------------------------------------- where state goes


def test_the_state_is_saved_and_restored_bit_for_bit():
    optimizer = low(adam(), key=jax.random.PRNGKey(3))
    params, state = run(optimizer, steps=2)
    blank = optimizer.init(PARAMS)
    for restored in (
        pickle.loads(pickle.dumps(jax.device_get(state))),
        flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state)),
    ):
        restored = jax.tree.map(jnp.asarray, restored)
        assert_same_bits(restored, state)
        resumed = run(optimizer, params, GRADS, 2, restored)
        assert_same_bits(resumed, run(optimizer, params, GRADS, 2, state))


def test_what_is_stored_lies_where_its_parameter_lies():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, P("d"))
    params, grads = (
        {"w": jax.device_put(tree["w"], sharded)} for tree in (PARAMS, GRADS)
    )
    optimizer = low(adam())
    state = jax.jit(optimizer.init)(params)
    _, state = jax.jit(optimizer.update)(grads, state, params)
    stored = [x for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
    assert [x.sharding.spec for x in stored] == [P("d"), P("d")]
    _, alone = run(optimizer, {"w": PARAMS["w"]}, {"w": GRADS["w"]})
    chex.assert_trees_all_close(stored[0], alone.inner_state[0].mu["w"], rtol=0.01)


def test_the_parts_of_parameters_in_the_state_are_found_by_optax():
    optimizer = low(adam())
    state = optimizer.init(PARAMS)
    moved = optax.tree.map_params(
        optimizer, lambda x, p: x + jnp.asarray(1, x.dtype), state, PARAMS
    )
    assert dtypes(moved) == dtypes(state)
    moments = moved.inner_state[0]
    assert np.all(moments.mu["w"] == 1)
    assert np.all(moments.nu["b"] == 1)
    assert moments.count == 0


def test_donated_state_is_used_in_place_and_traced_once():
    optimizer = low(adam())
    step = jax.jit(optimizer.update, donate_argnums=(1,))
    state = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = step(GRADS, state, PARAMS)
    assert step._cache_size() == 1


def test_an_empty_tree_and_integers_pass():
    optimizer = low(lenient(optax.sgd(0.1, momentum=0.9)))
    assert optimizer.update({}, optimizer.init({}), {})[0] == {}
    assert optimizer.init({"n": jnp.arange(3)}).key is not None


# ------------------------------------------------------------------------- at the door


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: low(adam(), dtype="float32"), ValueError, "16 bits.*'float32'"),
        (lambda: low(adam(), dtype="float8_e4m3fn"), ValueError, "16 bits"),
        (lambda: low(optax.adam), TypeError, r"Did you mean adam\(...\)"),
        (lambda: low(adam(), key=3), TypeError, r"jax.random.key\(3\)"),
        (
            lambda: low(adam()).update((1.0, GRADS), low(adam()).init(PARAMS), PARAMS),
            TypeError,
            "loss",
        ),
    ],
)
def test_bad_input_is_refused_at_the_door(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --------------------------------------------------------------------------------- cost

MOVED = {
    "plain": ("float32", 20, lambda inner: inner),
    "loss_scaling": ("float32", 24, jmp.loss_scaling),
    "compensated": ("bfloat16", 18, jmp.compensated),
    "master_weights": ("bfloat16", 22, jmp.master_weights),
}


@pytest.mark.targets
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MOVED)
def test_a_step_moves_half_of_the_moments_and_holds_nothing_else(name, target):
    dtype, expected, wrap = MOVED[name]
    optimizer = wrap(jmp.low_precision_state(optax.adamw(1e-3), key=KEY))
    with jax.numpy_dtype_promotion("standard"):
        program = compile_step(target, by_optimizer(optimizer), dtype=dtype)
    n = 8192 * 8192
    assert program.bytes_moved / n == pytest.approx(expected, abs=0.01)
    assert program.temporaries / n < 0.02
