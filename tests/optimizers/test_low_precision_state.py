"""Optimizer state in 16 and 8 bits: what is stored, and that nothing else is lost."""

import functools
import inspect
import itertools
import pickle
from typing import Any, NamedTuple

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import OPTIMIZERS, each_optimizer, lenient
from helpers import mostly_slow, one_of_each
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib
from optax.contrib import COCOBState

import jmp_lite as jmp
from jmp_lite.optimizers.moments import MOMENTS, Moment, known_moments
from jmp_lite.optimizers.rounding import grid_of, round_to_nearest
from jmp_lite.optimizers.storage import (
    SQUARES,
    Stored,
    restore,
    row_scales,
    spacing_of,
    store,
)
from jmp_lite.scaling.wrapping import strongly_typed

KEY = jax.random.key(0)
PARAMS = {
    "w": jax.random.normal(jax.random.key(1), (64, 128)),
    "b": jnp.ones(128),
    "deep": jax.random.normal(jax.random.key(2), (2, 64, 64)),
}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p), PARAMS)


def store_rows(x, dtype, random_bits=None):
    return store(x, dtype, random_bits, row_scales(x, dtype))


DTYPES = ("bfloat16", "float8_e4m3fn")


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


def in_float32(state):
    """Returns the inner state as the optimizer is given it, and what is stored."""
    leaves, structure = jax.tree.flatten(state.inner_state)
    (scales,) = (state.scales or {"": [None] * len(leaves)}).values()
    is_low = [
        scale is not None or (state.scales is None and x.dtype == jnp.bfloat16)
        for x, scale in zip(leaves, scales, strict=True)
    ]
    full = [
        restore(Stored(x, scale)) if low else x
        for x, scale, low in zip(leaves, scales, is_low, strict=True)
    ]
    return jax.tree.unflatten(structure, full), is_low


KEPT_IN_FLOAT32 = {
    **{f"contrib.{name}": {"z"} for name in ("schedule_free", "schedule_free_sgd")},
    "contrib.cocob": {*COCOBState._fields},
    "contrib.dadapt_adamw": {"grad_sum"},
    "contrib.dog": {"init_params"},
    "contrib.dowg": {"init_params"},
    "contrib.madgrad": {"grad_sum_sq", "s", "x0"},
    "contrib.mechanize": {"x0"},
    "contrib.prodigy": {"grad_sum", "params0"},
    "contrib.sam": {"cache"},
    "contrib.schedule_free_adamw": {"z"},
    "contrib.sophia": {"nu"},
    "lbfgs": {"params", "updates", "grad"},
    "rprop": {"step_sizes", "prev_updates"},
}
"""The fields of an optimizer that hold no averages, or some that need their digits."""


@each_optimizer
def test_large_moments_are_stored_in_16_bits_and_agree_with_float32(name):
    case = OPTIMIZERS[name]
    bare = lenient(case.make())
    extra_args = case.extra_args(PARAMS, GRADS)
    fresh = strongly_typed(bare.init(PARAMS))
    shapes = {PARAMS["w"].shape, PARAMS["deep"].shape}

    def is_stored(path, x, dtype):
        names = {getattr(part, "name", None) for part in path}
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        is_wider = is_float and x.dtype.itemsize > jnp.dtype(dtype).itemsize
        is_exact = names & KEPT_IN_FLOAT32.get(name, set())
        return x.shape in shapes and is_wider and not is_exact

    bare_step = jax.jit(functools.partial(bare.update, **extra_args))
    for dtype in DTYPES:
        pairs = jax.tree.leaves_with_path(fresh)
        is_moment = [is_stored(*pair, dtype) for pair in pairs]
        optimizer = low(bare, key=jax.random.PRNGKey(3), dtype=dtype)
        skipping = jmp.skip_nonfinite(optimizer)
        scaled = skipping.init(PARAMS)
        state = scaled.inner_state
        chex.assert_trees_all_equal_structs(state.inner_state, fresh)
        full, is_low = in_float32(state)
        own = "bfloat16" in name
        assert own or is_low == is_moment, "or it keeps 16 bits itself"
        traces = []

        def update(*args, skipping=skipping, traces=traces):
            traces.append(None)
            return skipping.update(*args, **extra_args)

        step = jax.jit(update)
        before = dtypes(scaled)
        for _ in range(2):
            # From the stored moments, a step is that of the optimizer itself.
            updates, scaled = step(GRADS, scaled, PARAMS)
            given = jax.tree.map(
                lambda a, e: a.astype(e.dtype) if a.dtype != e.dtype else a, full, fresh
            )
            expected, after = bare_step(GRADS, given, PARAMS)
            rtol = 0.02 if own else 1e-4  # It is given its state in float32.
            chex.assert_trees_all_close(updates, expected, rtol=rtol, atol=1e-6)
            assert dtypes(scaled) == before
            full, is_low = in_float32(scaled.inner_state)
            leaves = jax.tree.leaves(scaled.inner_state.inner_state)
            leaves = [*map(jax.tree.leaves, (full, after)), leaves]
            for a, e, x, is_rounded in zip(*leaves, is_low, strict=True):
                if is_rounded:
                    largest = np.max(np.abs(e))
                    a, e = (np.asarray(x, np.float64) for x in (a, e))
                    rtol = spacing_of(x.dtype) * (1 + 1e-5) + own * 2.0**-8
                    np.testing.assert_allclose(a, e, rtol, 2.0**-16 * largest)
        # A step that is skipped, from a state that was saved, leaves all its bits.
        restored = pickle.loads(pickle.dumps(jax.device_get(scaled)))
        bad = {**GRADS, "b": GRADS["b"].at[3].set(jnp.nan)}
        _, skipped = step(bad, jax.tree.map(jnp.asarray, restored), PARAMS)
        assert_same_bits(skipped.inner_state, scaled.inner_state)
        assert len(traces) == 1


# ---------------------------------------------------------------------------- by chance


@pytest.mark.slow
def test_an_average_that_would_stall_needs_a_key_and_moves_with_one():
    decay = 0.999
    stored = jnp.full(5000, 1.0)
    for _ in range(100):
        stored = round_to_nearest(decay * stored, grid_of(jnp.bfloat16))
    assert np.all(stored == 1.0)  # Rounded to nearest, it stalls.
    params = jnp.ones(5000)
    optimizer = low(lenient(optax.rmsprop(0.1, decay=decay)))
    state = optimizer.init(params)
    one = jax.tree.map(lambda x: jnp.ones_like(x), state.inner_state)
    state = state._replace(inner_state=one)
    _, state = run(optimizer, params, jnp.zeros(5000), 100, state)
    (nu,) = (x for x in jax.tree.leaves(state.inner_state) if x.dtype == jnp.bfloat16)
    assert abs(float(jnp.mean(nu.astype(jnp.float32))) - decay**100) < 0.002
    with pytest.raises(
        ValueError, match=r"keeps 0.999 of its value.*key=jax.random.key"
    ):
        low(adam(), key=None).init(PARAMS)
    low(adam(b2=0.95), key=None).init(PARAMS)
    low(adam(b2=0.999), key=None).init({"b": PARAMS["b"]})  # Nothing is stored.


def test_arrays_of_one_shape_are_rounded_by_chances_of_their_own():
    twice = {"a": PARAMS["w"], "b": PARAMS["w"]}
    grads = {"a": GRADS["w"], "b": GRADS["w"]}
    _, state = run(low(lenient(optax.sgd(0.1, momentum=0.9))), twice, grads, 3)
    a, b = (x for x in jax.tree.leaves(state.inner_state) if x.dtype == jnp.bfloat16)
    assert not np.array_equal(a, b)


def test_float16_for_averages_of_squares_is_an_error_with_a_reason():
    for key in (None, KEY):
        with pytest.raises(ValueError, match=r"squared gradients.*'bfloat16'"):
            low(adam(b2=0.9), key=key, dtype="float16").init(PARAMS)
    momentum = low(lenient(optax.sgd(0.1, momentum=0.9)), dtype="float16")
    _, state = run(momentum, steps=2)
    assert sum(x.dtype == jnp.float16 for x in jax.tree.leaves(state)) == 2


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("inner", [optax.lion(1.0), optax.ema(0.9, debias=False)])
def test_small_gradients_are_not_lost_in_float16(inner, key):
    tiny = jax.tree.map(lambda g: jnp.full_like(g, 2e-7), GRADS)
    assert np.all(round_to_nearest(0.1 * tiny["w"], grid_of(jnp.float16)) == 0)
    _, state = run(low(lenient(inner), key, dtype="float16"), PARAMS, tiny, 40)
    scales = state.scales["float16"]
    pairs = zip(jax.tree.leaves(state.inner_state), scales, strict=True)
    means = [
        float(jnp.mean(restore(Stored(x, scale))))
        for x, scale in pairs
        if scale is not None
    ]
    _, exact = run(lenient(inner), PARAMS, tiny, 40)
    expected = float(jax.tree.leaves(exact)[-1][0, 0])
    np.testing.assert_allclose(means, [expected] * 2, rtol=0.05)


def test_16_bit_moments_of_optax_s_own_keep_their_dtype_and_their_values():
    own = lenient(optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float16))
    _, state = run(low(own), steps=2)
    _, expected = run(own, steps=2)
    assert state.scales is None
    chex.assert_trees_all_equal_dtypes(state.inner_state, expected)
    chex.assert_trees_all_close(
        *map(jmp.cast_to_full, (state.inner_state, expected)), rtol=2e-3, atol=1e-6
    )


# ------------------------------------------------- what the arrays of a state are


def needs_a_value(inner):
    """The same optimizer, which cannot be tried with gradients alone."""

    def update(grads, state, params=None, *, value):
        del value
        return inner.update(grads, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


class OwnState(NamedTuple):
    """The state of an optimizer that is not optax's."""

    mine: Any
    others: Any = ()


def own(step, start=jnp.zeros_like, inner=None):
    """An optimizer with ``mine = step(mine, gradient, parameter)``."""

    def init(params):
        others = () if inner is None else inner.init(params)
        return OwnState(jax.tree.map(start, params), others)

    def update(grads, state, params=None):
        mine, others = jax.tree.map(step, state.mine, grads, params), state.others
        if inner is not None:
            grads, others = inner.update(grads, others, params)
        return grads, OwnState(mine, others)

    return optax.GradientTransformation(init, update)


def centralized(inner):
    return optax.chain(optax.centralize(), inner)


def clipped(inner):
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def noisy(inner):
    return optax.chain(optax.add_noise(0.1, 0.55, key=jax.random.key(0)), inner)


def penalized(inner):
    return optax.chain(optax.add_decayed_weights(1e-2), inner)


BEFORE = (centralized, clipped, noisy, penalized)
"""Transformations before an optimizer."""


def stored_dtypes(optimizer, params=PARAMS):
    """Returns the names of the dtypes of the large arrays of a fresh state."""
    leaves = jax.tree.leaves(optimizer.init(params).inner_state)
    return [x.dtype.name for x in leaves if x.size >= 4096]


@pytest.mark.parametrize("before", mostly_slow(BEFORE, (centralized, penalized)))
def test_transformations_before_adam_do_not_hide_its_moments(before):
    slow, fast = (before(adam(b2=b2)) for b2 in (0.999, 0.95))
    with pytest.raises(ValueError, match=r"keeps 0.999 of its value"):
        low(slow, key=None).init(PARAMS)
    low(fast, key=None).init(PARAMS)
    with pytest.raises(ValueError, match="cannot store averages of squared"):
        low(slow, dtype="float16").init(PARAMS)
    for inner in (slow, needs_a_value(slow)):
        names = stored_dtypes(low(inner, dtype="float8_e4m3fn"))
        assert names == ["float8_e4m3fn"] * 2 + ["uint8"] * 2


OWN = {
    "average": (own(lambda m, g, p: 0.9 * m + 0.1 * g), "float8_e4m3fn"),
    "squares": (own(lambda m, g, p: 0.9 * m + 0.1 * g**2), "uint8"),
    "exact": (own(lambda m, g, p: m + g), "float32"),
}


@pytest.mark.parametrize("before", [lambda inner: inner, *BEFORE])
@pytest.mark.parametrize("kind", OWN)
def test_arrays_of_an_own_optimizer_are_what_their_field_is_named(kind, before):
    inner, dtype = OWN[kind]
    optimizer = low(before(inner), dtype="float8_e4m3fn", fields={"mine": kind})
    assert stored_dtypes(optimizer) == [dtype] * 2
    _, state = run(optimizer)
    assert {dtype} <= {x.dtype.name for x in jax.tree.leaves(state.inner_state)}


def test_keys_of_dictionaries_are_named_too_and_what_the_table_knows_stays():
    def init(params):
        return {"m": jax.tree.map(jnp.zeros_like, params)}, adam().init(params)

    inner = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    named = {"m": "average", "mu": "exact", "nu": "average"}
    names = stored_dtypes(low(inner, dtype="float8_e4m3fn", fields=named))
    assert names == ["float8_e4m3fn"] * 4 + ["uint8"] * 2


def test_an_unknown_array_stays_float32_and_init_warns():
    unknown = own(lambda m, g, p: 0.9 * m + 0.1 * g, inner=adam())
    for dtype, others in (("bfloat16", ["bfloat16"] * 4), ("float8_e4m3fn", None)):
        with pytest.warns(UserWarning, match=r"inner_state.mine\['w'\] in.*fields="):
            names = stored_dtypes(low(unknown, dtype=dtype))
        others = others or ["float8_e4m3fn"] * 2 + ["uint8"] * 2
        assert names == ["float32"] * 2 + others


def test_an_unknown_kind_of_field_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"kind of a field 'averages'.*'average'"):
        low(adam(), fields={"m": "averages"})


def test_without_a_key_decays_have_to_be_seen():
    with pytest.raises(ValueError, match=r"raises TypeError.*'value'.*key=jax.random"):
        low(needs_a_value(adam()), key=None).init(PARAMS)
    # No step of the first ones moves the moments.
    with pytest.raises(ValueError, match=r"never change.*key=jax.random"):
        low(optax.MultiSteps(adam(), 4), key=None).init(PARAMS)
    for hidden in (needs_a_value(adam()), optax.MultiSteps(adam(), 4)):
        assert "bfloat16" in stored_dtypes(low(hidden))
    decay = own(lambda m, g, p: 0.5 * m + 0.5 * g)
    average = low(decay, key=None, fields={"mine": "average"})
    assert stored_dtypes(average) == ["bfloat16"] * 2


def test_masters_around_an_optimizer_that_cannot_be_tried_are_float32():
    params = jmp.cast_tree(PARAMS, "bfloat16")
    state = low(jmp.master_weights(needs_a_value(adam()))).init(params).inner_state
    assert set(dtypes(state.masters)) == {np.dtype("float32")}
    assert state.inner_state[0].nu["w"].dtype == jnp.bfloat16


COPIES = {
    "apply_every": (lambda: optax.apply_every(4), "grad_acc"),
    "dog": (contrib.dog, "init_params"),
    "mechanize": (lambda: contrib.mechanize(adam()), "x0"),
    "prodigy": (contrib.prodigy, "params0"),
    "rmsprop, centered": (lambda: optax.rmsprop(0.1, centered=True), "nu"),
    "schedule_free": (lambda: contrib.schedule_free_adamw(1e-2), "z"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_sums_are_float32_though_the_optimizer_cannot_be_tried(name):
    make, field = COPIES[name]
    for dtype in DTYPES:
        state = low(needs_a_value(lenient(make())), dtype=dtype).init(PARAMS)
        exact = optax.tree.get_all_with_path(state.inner_state, field)
        assert exact
        for _, tree in exact:
            chex.assert_trees_all_equal_dtypes(tree, PARAMS)


def large_arrays(inner):
    """Returns, for each array like a parameter, its number and what the table says."""
    state = inner.init(PARAMS)
    shapes = {x.shape for x in PARAMS.values()}
    pairs = zip(*map(jax.tree.leaves, (state, known_moments(state))), strict=True)
    return {i: moment for i, (x, moment) in enumerate(pairs) if x.shape in shapes}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_array_of_an_optimizer_is_in_the_table(name):
    """If a new optimizer fails here, add its state to ``moments.MOMENTS``."""
    known = large_arrays(lenient(OPTIMIZERS[name].make()))
    assert Moment.UNKNOWN not in known.values()


def test_each_field_of_the_table_is_one_of_the_class():
    found = {}
    for module in (optax, optax.contrib, optax._src, jmp):
        for part in (module, *vars(module).values()):
            if inspect.ismodule(part):
                found |= {n: v for n, v in vars(part).items() if n in MOMENTS}
    assert len(found) > 0.9 * len(MOMENTS)
    for name, cls in found.items():
        assert set(MOMENTS[name]) <= set(cls._fields)


def test_optax_monitor_is_an_error_with_a_reason():
    watched = optax.chain(optax.monitor({"norm": optax.tree.norm}), adam())
    optimizer = low(watched)
    with pytest.raises(TypeError, match=r"changes the structure.*optax.monitor"):
        optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)


# ------------------------------------------------------------------------------- 8 bits

E4M3 = np.dtype("float8_e4m3fn")
ROWS = jax.random.normal(jax.random.key(3), (64, 256)) ** 5


def test_moments_are_float8_squares_have_no_sign_and_each_row_has_a_scale():
    state = low(adam(), dtype="float8_e4m3fn").init(PARAMS)
    moments = state.inner_state[0]
    assert [x.name for x in dtypes(moments.mu)] == ["float32", *["float8_e4m3fn"] * 2]
    assert [x.name for x in dtypes(moments.nu)] == ["float32", "uint8", "uint8"]
    assert moments.nu["w"].shape == PARAMS["w"].shape
    shapes = [None if x is None else x.shape for x in state.scales["float8_e4m3fn"]]
    assert shapes == [None, *[None, (2, 64, 1), (64, 1)] * 2]
    held = sum(x.nbytes for x in jax.tree.leaves(jax.tree.map(jnp.asarray, state[0])))
    small = 2 * 4 * PARAMS["b"].size
    assert held < 2 * (PARAMS["w"].size + PARAMS["deep"].size) + small + 16
    tall = low(adam(), dtype="float8_e4m3fn").init(jnp.ones((5000, 3)))
    scales = tall.scales["float8_e4m3fn"]
    assert scales[1].shape == (1, 3), "along the longest axis"


@pytest.mark.parametrize("dtype", [E4M3, SQUARES])
def test_numbers_stored_in_8_bits_are_within_their_spacing(dtype):
    x = jnp.abs(ROWS) if dtype == SQUARES else ROWS
    x = x.at[0].set(0).at[1].multiply(1e-20).at[2].multiply(1e20)
    largest = np.max(np.abs(x), axis=1, keepdims=True)
    for random_bits, share in ((None, 0.5), (jax.random.bits(KEY, x.shape), 1.0)):
        stored = store_rows(x, dtype, random_bits)
        assert stored.numbers.dtype == dtype
        assert stored.numbers.shape == x.shape
        off = np.abs(restore(stored) - x)
        assert np.all(off <= share * 2.0**-3 * np.abs(x) + 2.0**-16 * largest)
        assert np.all(restore(stored)[0] == 0)
    again = store_rows(restore(store_rows(x, dtype)), dtype)
    assert_same_bits(restore(again), restore(store_rows(x, dtype)))


def test_moments_of_16_bit_parameters_are_stored_in_8_bits_too():
    params = jmp.cast_tree(PARAMS, "bfloat16")
    optimizer = low(adam(), dtype="float8_e4m3fn")
    trained, state = run(optimizer, params, GRADS, 3)
    moments = state.inner_state[0]
    assert [x.name for x in dtypes(moments.mu)][1:] == ["float8_e4m3fn"] * 2
    expected, _ = run(optimizer, PARAMS, GRADS, 3)
    chex.assert_trees_all_close(jmp.cast_to_full(trained), expected, atol=0.05)


def test_each_code_of_a_square_is_a_number_of_its_own():
    codes = jnp.arange(256, dtype=jnp.uint8)
    numbers = restore(Stored(codes, jnp.ones(1)))
    assert numbers[0] == 0
    assert np.all(np.diff(numbers) > 0)
    assert_same_bits(store_rows(numbers, SQUARES).numbers, codes)


def test_a_square_that_is_not_zero_is_never_stored_as_zero():
    x = jnp.float32([1.0, 0.0, 1e-30, 1e-12])
    for random_bits in (None, jnp.zeros(4, jnp.uint32)):
        full = restore(store_rows(x, SQUARES, random_bits))
        np.testing.assert_array_less(0, full[jnp.array([0, 2, 3])])
        assert full[1] == 0
        assert full[2] < 2.0**-30


@pytest.mark.parametrize("dtype", [E4M3, SQUARES])
def test_a_row_that_is_not_finite_is_nan_and_no_other_one(dtype):
    for bad in (jnp.nan, jnp.inf):
        if dtype == SQUARES and bad == jnp.inf:
            continue  # It is stored as the largest number.
        x = jnp.abs(ROWS).at[3, 5].set(bad)
        for random_bits in (None, jax.random.bits(KEY, x.shape)):
            full = restore(store_rows(x, dtype, random_bits))
            assert np.all(np.isnan(full[3]))
            assert np.all(np.isfinite(np.delete(full, 3, axis=0)))


def test_gradients_of_a_row_are_accurate_to_a_ratio_of_ten_thousand_in_8_bits():
    ratios = 10.0 ** jnp.arange(8.0)
    grads = jnp.tile(jnp.repeat(1 / ratios, 16), (64, 1))
    means = {}
    for name, inner in {"low": low(adam(), dtype=E4M3), "full": adam()}.items():
        params, _ = run(inner, jnp.zeros_like(grads), grads, 10)
        means[name] = jnp.mean(params.reshape(64, 8, 16), axis=(0, 2))
    found = means["low"] / means["full"]
    np.testing.assert_allclose(found[:5], 1, rtol=0.05)
    assert 0.1 < found[6] < 0.2


def test_a_gradient_whose_square_is_infinite_leaves_all_moments_finite():
    """In float32 state, one number is infinite, and its parameter stands still."""
    optimizer = low(adam(), dtype="float8_e4m3fn")
    params, state = run(optimizer, steps=3)
    huge = {**GRADS, "w": GRADS["w"].at[3, 5].set(1e20)}
    params, state = run(optimizer, params, huge, 1, state)
    params, state = run(optimizer, params, GRADS, 2, state)
    assert jmp.all_finite((params, in_float32(state)[0]))


@pytest.mark.parametrize("dtype", [E4M3, SQUARES])
def test_numbers_are_stored_in_8_bits_without_a_bias(dtype):
    x = jnp.float32([[0.3, 1.7, 0.0123, 1.0]])
    all_bits = jax.random.bits(KEY, (4096, *x.shape))
    full = jax.vmap(lambda random_bits: restore(store_rows(x, dtype, random_bits)))(
        all_bits
    )
    np.testing.assert_allclose(np.mean(full, axis=0), x, rtol=4e-3)


def test_8_bits_without_a_key_are_an_error_for_arrays_that_would_lose_updates():
    """An average over ten steps ends a quarter below a constant gradient."""
    stored, average = (
        jnp.zeros(5000),
        lambda x: restore(store_rows(0.9 * x + 0.1, E4M3)),
    )
    stored = jax.lax.fori_loop(0, 200, lambda _, x: average(x), stored)
    assert float(stored[0]) == pytest.approx(0.75, abs=0.02)
    momentum = lambda decay: lenient(optax.sgd(0.1, momentum=decay))
    make = functools.partial(low, key=None, dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"0.9 of.*38% short of a constant gradient"):
        make(momentum(0.9)).init(PARAMS)
    for inner in (momentum(0.95), adam(b1=0.1), lenient(optax.adagrad(0.1))):
        with pytest.raises(ValueError, match=r"never change in float8_e4m3fn.*0.125"):
            make(inner).init(PARAMS)
    make(lenient(optax.optimistic_gradient_descent(0.1))).init(PARAMS)


def test_adafactor_without_a_key_is_an_error_since_its_decay_tends_to_one():
    with pytest.raises(ValueError, match=r"keeps 1 of its value.*never change"):
        low(lenient(optax.adafactor(0.1)), key=None).init(PARAMS)
    low(lenient(optax.adafactor(0.1))).init(PARAMS)


# ------------------------------------------------------------------------------ nesting


LABELS = {"w": "low", "b": "full", "deep": "low"}
IS_LOW = {"w": True, "b": False, "deep": True}
NESTED = {
    "inside": lambda low: jmp.loss_scaling(low(adam())),
    "around": lambda low: low(jmp.loss_scaling(adam())),
    "chain": lambda low: jmp.loss_scaling(optax.chain(optax.clip(1.0), low(adam()))),
    "MultiSteps": lambda low: jmp.loss_scaling(low(optax.MultiSteps(adam(), 2))),
    "masked": lambda low: jmp.loss_scaling(optax.masked(low(adam()), IS_LOW)),
    "partition": lambda low: jmp.loss_scaling(
        optax.partition({"low": low(adam()), "full": adam()}, LABELS)
    ),
    "inject_hyperparams": lambda low: jmp.loss_scaling(
        low(lenient(optax.inject_hyperparams(optax.adam)(1e-2)))
    ),
}


@pytest.mark.parametrize(
    ("place", "dtype"),
    mostly_slow(itertools.product(NESTED, DTYPES), one_of_each(NESTED, DTYPES)),
)
def test_a_skipped_step_leaves_every_stored_bit(place, dtype):
    optimizer = NESTED[place](functools.partial(low, dtype=dtype))
    params, state = run(optimizer, steps=3)
    bad = {**GRADS, "b": GRADS["b"].at[3].set(jnp.nan)}
    after, skipped = run(optimizer, params, bad, 1, state)
    assert_same_bits(after, params)
    stored = [
        [x for x in jax.tree.leaves(tree) if x.dtype.itemsize < 4 and x.size >= 4096]
        for tree in (skipped, state)
    ]
    assert len(stored[0]) == 4
    assert_same_bits(*stored)
    assert float(jmp.get_loss_scale(skipped).loss_scale) == 2.0**14


AROUND = ("master_weights", "compensated")


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(AROUND, DTYPES), one_of_each(AROUND, DTYPES)),
)
def test_masters_and_remainders_keep_their_digits_around_and_inside(name, dtype):
    wrap = getattr(jmp, name)
    params = jmp.cast_tree(PARAMS, "bfloat16")
    expected, full = run(wrap(adam()), params, steps=4)
    small = functools.partial(low, dtype=dtype)
    for optimizer in (wrap(small(adam())), small(wrap(adam()))):
        trained, state = run(optimizer, params, steps=4)
        chex.assert_trees_all_close(
            *map(jmp.cast_to_full, (trained, expected)), atol=0.02
        )
        # Around it, the state of the wrapper is one level further in.
        ours = (
            state.inner_state
            if isinstance(state, jmp.states.LowPrecisionState)
            else state
        )
        assert dtypes(ours[0]) == dtypes(full[0])
        stored = ours.inner_state
        stored = getattr(stored, "inner_state", stored)[0]
        of_squares = "bfloat16" if dtype == "bfloat16" else "uint8"
        names = [x.name for x in dtypes(stored.nu)]
        assert names == ["float32", of_squares, of_squares]


def test_sums_of_gradients_over_steps_are_float32():
    state = low(optax.MultiSteps(adam(), 4)).init(PARAMS).inner_state
    assert set(dtypes(state.acc_grads)) == {np.dtype("float32")}
    assert "bfloat16" in [x.name for x in dtypes(state.inner_opt_state)]


def test_a_train_step_with_low_precision_state_learns():
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_is_saved_and_restored_bit_for_bit(dtype):
    optimizer = low(adam(), key=jax.random.PRNGKey(3), dtype=dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")])
def test_stored_moments_have_the_sharding_of_their_parameters(spec, dtype):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, spec)
    params, grads = (
        {"w": jax.device_put(tree["w"], sharded)} for tree in (PARAMS, GRADS)
    )
    optimizer = low(adam(), dtype=dtype)
    state = jax.jit(optimizer.init)(params)
    _, state = jax.jit(optimizer.update)(grads, state, params)
    stored = [x for x in jax.tree.leaves(state) if x.size >= 4096]
    assert [x.sharding.spec for x in stored] == [spec, spec]
    _, alone = run(optimizer, {"w": PARAMS["w"]}, {"w": GRADS["w"]})
    (full, _), (expected, _) = map(in_float32, (state, alone))
    rtol = spacing_of(stored[0].dtype)
    chex.assert_trees_all_close(full[0].mu, expected[0].mu, rtol=rtol, atol=1e-4)
    if state.scales:  # The scale of a row is on both devices if the row is.
        chex.assert_trees_all_equal(state.scales, alone.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_parameters_in_the_state_are_found_by_optax(dtype):
    optimizer = low(adam(), dtype=dtype)
    state = optimizer.init(PARAMS)
    moved = optax.tree.map_params(
        optimizer, lambda x, p: jnp.ones_like(x), state, PARAMS
    )
    chex.assert_trees_all_equal(moved.scales, state.scales)
    assert dtypes(moved) == dtypes(state)
    moments = moved.inner_state[0]
    assert np.all(moments.mu["w"] == 1)
    assert np.all(moments.nu["b"] == 1)
    assert moments.count == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_donated_state_is_used_in_place_and_traced_once(dtype):
    optimizer, traces = low(adam(), dtype=dtype), []

    def update(*args):
        traces.append(args)
        return optimizer.update(*args)

    step = jax.jit(update, donate_argnums=(1,))
    state = first = optimizer.init(PARAMS)
    for _ in range(3):
        _, state = step(GRADS, state, PARAMS)
    assert len(traces) == 1
    assert {x.is_deleted() for x in jax.tree.leaves(first)} == {True}


def test_a_state_stays_in_the_dtype_that_it_was_stored_in():
    """A run that goes on with another setting uses the state that it was saved with."""
    states = {dtype: low(adam(), dtype=dtype).init(PARAMS) for dtype in DTYPES}
    for dtype, other in (DTYPES, DTYPES[::-1]):
        _, state = run(low(adam(), dtype=dtype), state=states[other])
        _, expected = run(low(adam(), dtype=other), state=states[other])
        assert_same_bits(state, expected)


def test_a_state_decides_whether_it_is_rounded_by_chance():
    momentum = lenient(optax.sgd(0.1, momentum=0.9))
    with_key, without = low(momentum), low(momentum, key=None)
    for optimizer, other in ((with_key, without), (without, with_key)):
        _, state = run(other, state=optimizer.init(PARAMS))
        _, expected = run(optimizer, state=optimizer.init(PARAMS))
        assert_same_bits(state, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_tree_and_integers_pass(dtype):
    optimizer = low(lenient(optax.sgd(0.1, momentum=0.9)), dtype=dtype)
    assert optimizer.update({}, optimizer.init({}), {})[0] == {}
    assert optimizer.init({"n": jnp.arange(3)}).key is not None


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: low(adam(), dtype="float32"), ValueError, "bfloat16.*got 'float32'"),
        (lambda: low(adam(), dtype="float8"), ValueError, "Unknown.*float8_e4m3fn"),
        (lambda: low(optax.adam), TypeError, r"Did you mean adam\(...\)"),
        (
            lambda: low(adam()).update(GRADS, adam().init(PARAMS), PARAMS),
            TypeError,
            "LowPrecisionState that low_precision_state makes in init, got tuple",
        ),
        (lambda: low(adam(), key=3), TypeError, r"jax.random.key\(3\)"),
        (
            lambda: low(adam()).update((1.0, GRADS), low(adam()).init(PARAMS), PARAMS),
            TypeError,
            "loss",
        ),
    ],
)
def test_bad_arguments_are_an_error_when_they_are_passed(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --------------------------------------------------------------- 16-bit parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stored", DTYPES)
def test_the_state_of_16_bit_parameters_is_that_of_float32_parameters(stored, dtype):
    """Otherwise ``init`` and ``update`` would differ, and no scan could carry it."""
    optimizer = low(adam(), dtype=stored)
    params = jmp.cast_tree(PARAMS, dtype)
    full = jmp.cast_to_full(params)
    expected = run(optimizer, full)[1]
    state = run(optimizer, params)[1]
    assert_same_bits(state, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(optimizer.init(params), state)


def test_around_master_weights_it_leaves_16_bit_parameters_to_them():
    optimizer = low(jmp.master_weights(adam()))
    params, state = run(optimizer, jmp.cast_tree(PARAMS, "bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert {*dtypes(state.inner_state.masters)} == {np.dtype("float32")}


def sum_after(size, dtype):
    """Returns the sum of parameters after three steps with gradients of a size."""
    grads = jax.tree.map(lambda g: size * g, GRADS)
    inner = lenient(optax.sgd(0.1, momentum=0.5))
    optimizer = inner if dtype is None else low(inner, dtype=dtype)
    params, _ = run(optimizer, grads=grads, steps=3)
    return jnp.sum(params["w"])


def test_the_derivative_of_a_moment_in_bfloat16_is_that_of_float32():
    derivative = jax.grad(sum_after)(1e-3, "bfloat16")
    assert float(derivative) == pytest.approx(
        float(jax.grad(sum_after)(1e-3, None)), rel=0.02
    )


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_state_with_scales_that_is_differentiated_is_an_error(dtype):
    def after(rate):
        inner = lenient(optax.sgd(rate, momentum=0.9))
        return jnp.sum(run(low(inner, dtype=dtype), steps=3)[0]["w"])

    # These moments do not depend on the rate.
    assert abs(jax.grad(after)(0.1)) > 1
    with pytest.raises(TypeError, match=r"8 bits has no derivative, .* float32\["):
        jax.grad(sum_after)(1.0, dtype)
