"""16-bit parameters with float32 masters, remainders or stochastic rounding."""

import functools
import itertools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import (
    OPTIMIZERS,
    QUICK,
    each_in_turn,
    lenient,
    loss_fn,
    make_params,
)
from helpers import DAILY, mostly_slow, one_of_each
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, compile_for, missing
from jmp_lite.optimizers.rounding import join, split

pytestmark = pytest.mark.usefixtures("standard_promotion")


def assert_follow(params, masters):
    def same(param, master):
        assert master.dtype == np.float32
        np.testing.assert_array_equal(param, master.astype(param.dtype))

    jax.tree.map(same, params, masters)


DTYPES = ("bfloat16", "float16")
SCALE = jmp.StaticLossScale(1024.0)


def rounded(masters, dtype):
    """Returns masters as parameters."""
    return jax.tree.map(lambda x: split(x, np.dtype(dtype))[0], masters)


@pytest.mark.parametrize(("name", "dtype"), each_in_turn(("bfloat16",), ("float16",)))
def test_parameters_are_their_masters_rounded_under_every_optimizer(name, dtype):
    """And masters are those of the optimizer by itself, in float32."""
    case = OPTIMIZERS[name]
    optimizer, plain = jmp.master_weights(case.make()), case.make()
    plain = optax.with_extra_args_support(plain)

    def step(is_fresh, carry, _):
        params, state, masters, plain_state = carry
        fresh = rounded(state.masters, dtype)
        params = jax.tree.map(lambda *x: jnp.where(is_fresh, *x), fresh, params)
        grads = jax.tree.map(jnp.float32, jax.grad(loss_fn)(fresh))
        args = case.extra_args(state.masters, grads)
        updates, state = optimizer.update(grads, state, params, **args)
        params = optax.apply_updates(params, updates)
        updates, plain_state = plain.update(grads, plain_state, masters, **args)
        masters = optax.apply_updates(masters, updates)
        return (params, state, masters, plain_state), (params, state.masters, masters)

    @jax.jit
    def train(is_fresh):
        masters = make_params()
        params = rounded(masters, dtype)
        carry = params, optimizer.init(masters), masters, plain.init(masters)
        step_if = functools.partial(step, is_fresh)
        return jax.lax.scan(step_if, carry, length=1000)[1]

    params, masters, expected = train(False)
    for param, master in zip(*map(jax.tree.leaves, (params, masters)), strict=True):
        assert param.dtype == dtype
        follows = map(np.float32, (param, rounded(master, dtype)))
        # CPUs flush smaller differences.
        np.testing.assert_allclose(*follows, rtol=0, atol=2.0**-126)
    # Later, XLA's order of sums shows, which differs from program to program.
    first = lambda tree: jax.tree.map(lambda x: x[:3], tree)
    chex.assert_trees_all_equal(first(masters), first(expected))
    # No update of the wrapper passes for a change from outside.
    _, of_fresh, _ = train(True)
    chex.assert_trees_all_equal(masters, of_fresh)


def test_updates_that_are_too_small_for_16_bits_are_not_lost():
    optimizer = jmp.master_weights(optax.sgd(1.0))
    masters, params = jnp.ones(2), jnp.ones(2, jnp.bfloat16)
    state = optimizer.init(masters)
    step = jax.jit(optimizer.update)
    for _ in range(512):
        updates, state = step(jnp.full(2, -(2.0**-12)), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params, jnp.full(2, 1.125, jnp.bfloat16))


# The exponents of numbers of ordinary size, of subnormals and of large numbers.
CENTERS = {"bfloat16": (0, -76, 90), "float16": (0, -22, 4)}


@functools.cache
def followed(dtype):
    """Returns a compiled function that trains by given steps, and shows them all."""
    optimizer = jmp.master_weights(optax.sgd(-1.0))

    def step(carry, step):
        params, state = carry
        updates, state = optimizer.update(step, state, params)
        new = optax.apply_updates(params, updates)
        return (new, state), (new, state.masters)

    def train(start, steps):
        carry = start.astype(dtype), optimizer.init(start)
        return jax.lax.scan(step, carry, steps)[1]

    return jax.jit(train)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(st.integers(0, 2**31), st.integers(1, 14), st.integers(0, 2))
@hypothesis.settings(max_examples=25)
def test_parameters_stay_their_masters_rounded_whatever_the_steps(
    dtype, seed, width, center
):
    """Steps of every size beside numbers of every size, past the end of float16.

    Masters are sums of steps: no update passes for a change from outside.
    """
    rng = np.random.default_rng(seed)
    exponents = CENTERS[dtype][center] + rng.uniform(-width, width, (9, 512))
    sizes = 2.0**exponents * rng.choice([-1, 1], (9, 512))
    sizes[rng.random((9, 512)) < 0.1] *= 2.0**6  # Some leave the range.
    largest = float(jnp.finfo(dtype).max)
    start, steps = np.float32(sizes[0]).clip(-largest, largest), np.float32(sizes[1:])
    steps[-3] *= rng.choice([0, 1], 512)
    # Some nearly vanish.
    sums = functools.reduce(np.add, steps[:4], start)
    shrunk = np.float32(sums * 2.0 ** -rng.uniform(8, 24, 512))
    steps[4] = np.where(rng.random(512) < 0.1, shrunk - sums, steps[4])
    params, masters = map(np.asarray, followed(dtype)(start, steps))
    expected = rounded(masters, dtype)
    np.testing.assert_array_equal(params, expected)
    sums = np.stack([*itertools.accumulate(steps, initial=start)])
    np.testing.assert_array_equal(masters, sums[1:])


def test_a_parameter_stays_at_the_largest_number_while_its_master_is_beyond_it():
    optimizer = jmp.master_weights(optax.sgd(1.0))
    params = jnp.float16([60000, -60000, 1, -0.0])
    state = optimizer.init(params)
    seen = []
    for grads in ([-1e5, 1e5, jnp.inf, 0], [1e5, -1e5, 1, 0], [0, 0, jnp.nan, 0]):
        updates, state = optimizer.update(jnp.float32(grads), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.float32(params))
    np.testing.assert_array_equal(seen[0], [65504, -65504, -np.inf, 0])
    np.testing.assert_array_equal(seen[1], [60000, -60000, -np.inf, 0])
    np.testing.assert_array_equal(seen[2], [60000, -60000, np.nan, 0])
    assert np.all(np.signbit([x[3] for x in seen]))


def test_float32_parameters_are_trained_as_without_masters():
    """Bit for bit, also after somebody has changed them."""
    inner = optax.adam(0.3)
    rng = np.random.default_rng(0)
    full = {"w": jnp.float32(rng.standard_normal(4096)), "low": jnp.ones(2, "bfloat16")}
    optimizer = jmp.master_weights(inner)
    plain = jmp.cast_to_full(full)
    state, plain_state = optimizer.init(full), inner.init(plain)
    for i in range(3):
        grads = {"w": jnp.float32(rng.standard_normal(4096)), "low": jnp.ones(2)}
        updates, state = optimizer.update(grads, state, full)
        full = optax.apply_updates(full, updates)
        updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
        np.testing.assert_array_equal(full["w"], plain["w"])
        chex.assert_trees_all_equal(state.masters, plain)
        if i == 1:
            full["w"] = plain["w"] = jnp.clip(plain["w"], -1, 1)


def test_masters_in_16_bits_are_an_error():
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(
            ValueError, match=rf"at least 32 bits, got.*{dtype}.*compen"
        ):
            jmp.master_weights(optax.sgd(0.1), dtype)
    with jax.enable_x64(True):
        optimizer = jmp.master_weights(optax.sgd(1.0), "float64")
        params = jnp.float32([1.0])
        updates, state = optimizer.update(
            jnp.float32([2.0**-30]), optimizer.init(params), params
        )
        assert state.masters.dtype == np.float64
        assert float(state.masters[0]) == 1 - 2.0**-30
        np.testing.assert_array_equal(optax.apply_updates(params, updates), params)


def test_masters_start_from_float32_or_from__rounded_parameters():
    optimizer = jmp.master_weights(optax.sgd(0.1))
    w = jnp.float32([0.1, 1 / 3])
    np.testing.assert_array_equal(optimizer.init(w).masters, w)
    low = w.astype("float16")
    np.testing.assert_array_equal(optimizer.init(low).masters, low.astype("float32"))


CHANGES = {
    "loaded weights": lambda params, step: params if step else 5 + 0 * params,
    "clipping": lambda params, step: jnp.clip(params, -0.5, 0.75),
    "a projection": lambda params, step: params.at[:32].divide(
        jnp.linalg.norm(params[:32].astype("float32")).astype(params.dtype)
    ),
    "a pruning mask": lambda params, step: params.at[::2].set(0),
    "a power of two and its lower neighbour": lambda params, step: (
        params.at[0].set(1).at[1].set(1 - jnp.finfo(params.dtype).epsneg)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_was_changed_between_steps_is_the_new_master(change, dtype):
    """Number by number: a master whose parameter has not changed keeps its digits."""
    optimizer = jmp.master_weights(optax.sgd(1.0))
    masters = np.linspace(-1, 1, 64, dtype=np.float32)
    params = jnp.asarray(masters).astype(dtype)
    state = optimizer.init(masters)
    rng = np.random.default_rng(0)
    kept = 0
    for i in range(8):
        changed = CHANGES[change](params, i)
        is_same = np.asarray(changed == params)
        masters = np.where(is_same, masters, np.float32(changed))
        kept += is_same.sum()
        params = changed
        grads = np.float32(2.0 ** rng.uniform(-12, -5, 64) * rng.choice([-1, 1], 64))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        masters = masters - grads
        np.testing.assert_array_equal(state.masters, masters)
        np.testing.assert_array_equal(params, jnp.asarray(masters).astype(dtype))
    assert 0 < kept < 8 * 64


@pytest.mark.parametrize("name", ["master_weights", "compensated"])
def test_weights_that_are_loaded_after_init_are_trained(name):
    optimizer = ROUNDING[name](optax.sgd(0.5))
    state = optimizer.init(jnp.ones(2, "bfloat16"))
    loaded = jnp.full(2, 5, "bfloat16")
    updates, _ = optimizer.update(jnp.ones(2), state, loaded)
    np.testing.assert_array_equal(optax.apply_updates(loaded, updates), [4.5, 4.5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["master_weights", "compensated"])
def test_lookahead_s_sync_reaches_its_fast_parameters(name, dtype):
    optimizer = optax.lookahead(ROUNDING[name](optax.sgd(1.0)), 2, 0.5)
    pair = optax.LookaheadParams.init_synced(jnp.full(2, 8, dtype))
    state = optimizer.init(pair)
    seen = []
    for _ in range(4):
        updates, state = optimizer.update(jnp.ones(2), state, pair)
        pair = optax.apply_updates(pair, updates)
        seen.append(float(pair.fast[0]))
    assert seen == [7, 7, 6, 6]  # Half of the way from 8 to 6, then from 7 to 5.


@pytest.mark.parametrize("change", [0.0, 1e-3, -2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_parameter_leaves_its_rounding_error_behind(dtype, change):
    """A rounding error of 100 would be far from the error of a smaller number."""
    optimizer = jmp.compensated(optax.sgd(1.0))
    params = jnp.full(64, 100, dtype)
    state = optimizer.init(params)
    grads = jnp.linspace(-0.03, 0.03, 64)
    updates, state = optimizer.update(grads, state, params)
    assert np.ptp(np.float32(state.remainder[dtype].view("int16"))) > 2**12
    changed = jnp.full(64, change, dtype)
    updates, state = optimizer.update(jnp.zeros(64), state, changed)
    np.testing.assert_array_equal(optax.apply_updates(changed, updates), changed)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: jmp.loss_scaling(jmp.master_weights(inner)),
        lambda inner: jmp.master_weights(jmp.loss_scaling(inner)),
        lambda inner: jmp.skip_nonfinite(
            optax.chain(optax.clip_by_global_norm(1.0), jmp.master_weights(inner))
        ),
    ],
)
def test_an_overflow_moves_neither_masters_nor_parameters(wrap):
    optimizer = wrap(lenient(optax.adam(0.1)))
    params = jmp.cast_tree(make_params(), "float16")
    state = optimizer.init(make_params())

    def masters_in(state):
        leaves = jax.tree.leaves_with_path(state)
        return [x for path, x in leaves if ".masters" in jax.tree_util.keystr(path)]

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(4):
        grads = jax.tree.map(jnp.ones_like, params)
        if i == 2:
            grads["w"] = grads["w"].at[0, 0].set(jnp.nan)
        before = params, masters_in(state)
        params, state = step(params, state, grads)
        if i == 2:
            chex.assert_trees_all_equal(before, (params, masters_in(state)))
        assert_follow(jax.tree.leaves(params), masters_in(state))
    assert jmp.all_finite(params)


def test_masters_lie_where_their_parameters_lie():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    params = jax.device_put(jnp.ones((4, 8), jnp.bfloat16), rows)
    optimizer = jmp.master_weights(lenient(optax.adam(0.1)))
    state = jax.jit(optimizer.init)(params)
    assert state.masters.sharding.is_equivalent_to(rows, 2)
    updates, state = jax.jit(optimizer.update)(params, state, params)
    assert state.masters.sharding.is_equivalent_to(rows, 2)
    assert updates.sharding.is_equivalent_to(rows, 2)


def test_leaves_that_are_not_floating_pass_and_masters_are_copies():
    optimizer = jmp.master_weights(
        optax.masked(optax.sgd(0.1), {"w": True, "n": False})
    )
    params = {"w": jnp.ones(2), "n": jnp.int32([3])}
    state = optimizer.init(params)
    assert state.masters["w"] is not params["w"]
    params["w"] = params["w"].astype("bfloat16")
    grads = {"w": jnp.ones(2), "n": jnp.int32([0])}
    updates, state = optimizer.update(grads, state, params)
    assert state.masters["n"].dtype == jnp.int32
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["n"], [3])
    assert jmp.master_weights(optax.sgd(0.1)).init({}).masters == {}


def test_build_train_step_trains_16_bit_parameters_by_their_masters():
    def fun(params, model_state, batch, rng):
        return jnp.sum(params["w"].astype(jnp.float32) * batch), (model_state, None)

    init, step = jmp.build_train_step(fun, jmp.master_weights(optax.sgd(2.0**-12)))
    state = init({"w": jnp.ones(2, jnp.bfloat16)})
    for _ in range(128):
        state, _ = jax.jit(step)(state, jnp.float32(-1))
    np.testing.assert_array_equal(state.params["w"], jnp.full(2, 1.03125))
    assert_follow(state.params, state.opt_state.inner_state.masters)


@pytest.mark.parametrize(
    "wrap",
    [
        jmp.master_weights,
        jmp.compensated,
        lambda inner: jmp.stochastic_rounding(inner, jax.random.key(0)),
    ],
)
def test_build_train_step_trains_16_bit_parameters_and_warns_if_no_wrapper_is_given(
    wrap,
):
    def fun(params, model_state, batch, rng):
        return jnp.mean((params["w"].astype(jnp.float32) - batch) ** 2), (None, None)

    params = {"w": jnp.ones(64, jnp.bfloat16)}
    init, step = jmp.build_train_step(fun, wrap(optax.sgd(0.05)), ema=0.9)
    state = init(params)
    for _ in range(50):
        state, metrics = jax.jit(step)(state, jnp.float32(1.3))
    assert float(metrics["loss"]) < 0.09 * 0.9 ** (2 * 40 / 64)
    assert state.params["w"].dtype == jnp.bfloat16
    skipped, _ = jax.jit(step)(state, jnp.float32(np.nan))
    chex.assert_trees_all_equal(skipped.params, state.params)
    chex.assert_trees_all_equal(
        skipped.opt_state.inner_state, state.opt_state.inner_state
    )
    init, _ = jmp.build_train_step(fun, optax.sgd(0.05))
    with pytest.warns(UserWarning, match=r"bfloat16 at params\['w'\]\): an update"):
        init(params)
    init(jmp.cast_to_full(params))


def test_bad_arguments_are_an_error_when_they_are_passed():
    with pytest.raises(TypeError, match="Did you mean adam"):
        jmp.master_weights(optax.adam)
    with pytest.raises(ValueError, match="Unknown dtype 'flaot32'"):
        jmp.master_weights(optax.sgd(0.1), "flaot32")
    optimizer = jmp.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))


# ------------------------------------------------------------ with less than a master


def exact_numbers(dtype):
    """All finite numbers of a 16-bit dtype, in float32."""
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = np.asarray(jax.lax.bitcast_convert_type(bits, dtype)).astype(np.float32)
    return numbers[np.isfinite(numbers)]


@pytest.mark.parametrize(
    ("dtype", "is_jitted"),
    mostly_slow(
        itertools.product(DTYPES, (False, True)),
        [("bfloat16", False), *((dtype, True) for dtype in DTYPES)],
    ),
)
def test_rounding_by_arithmetic_gives_the_numbers_of_a_cast(dtype, is_jitted):
    """A parameter of zero becomes its update, rounded. A tie moves away or up."""
    optimizer = jmp.compensated(optax.sgd(1.0))

    def rounded(x):
        zeros = jnp.zeros(x.shape, dtype)
        return optimizer.update(-x, optimizer.init(zeros), zeros)[0]

    rounded = jax.jit(rounded) if is_jitted else rounded
    exact = exact_numbers(dtype)
    exact = exact[(np.abs(exact) > 1e-35) | (exact == 0)]  # CPUs flush what is smaller.
    np.testing.assert_array_equal(rounded(exact), exact)
    scale = 2.0 ** np.random.default_rng(0).uniform(-14, 15, 100_000)
    x = np.float32(scale * np.random.default_rng(1).choice([-1, 1], 100_000))
    ties = exact[1:] / 2 + exact[:-1] / 2
    x = np.concatenate([x, ties[np.isfinite(ties)]])
    towards = np.float32(np.inf) * (np.sign(x) if dtype == "bfloat16" else 1)
    moved = np.where(np.isin(x, ties), np.nextafter(x, towards), x)
    cast = np.asarray(jnp.asarray(moved).astype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(rounded(x), cast)
    ends = np.float32([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(rounded(ends), ends)


@functools.cache
def jitted(dtype):
    return jax.jit(lambda x: split(x, np.dtype(dtype))), jax.jit(join)


def check_split(bits, dtype):
    """By comparison with the neighbors of each number, in float64."""
    bits = np.asarray(bits, np.uint32)
    x = bits.view(np.float32)
    split, join = jitted(dtype)
    param, remainder = split(x)
    is_bfloat16 = dtype == "bfloat16"
    assert remainder.dtype == ("int16" if is_bfloat16 else "uint16")
    joined, again = np.asarray(join(param, remainder)), split(join(param, remainder))
    with np.errstate(invalid="ignore"):  # NumPy warns about some NaNs.
        wide = np.float32(param)
    for each in (wide, joined):
        np.testing.assert_array_equal(np.isnan(each), np.isnan(x))
        np.testing.assert_array_equal(each[np.isinf(x)], x[np.isinf(x)])
    is_number = ~np.isnan(x)
    for one, other in zip(again, (param, remainder), strict=True):
        pair = (np.asarray(each).view(np.uint16)[is_number] for each in (one, other))
        np.testing.assert_array_equal(*pair)

    # The largest number stands for those beyond it.
    largest = float(jnp.finfo(dtype).max)
    end = largest + 2.0 ** (119 if is_bfloat16 else 4)
    is_beyond = np.isfinite(x) & (np.abs(x) >= end)
    last = np.copysign(np.nextafter(np.float32(end), np.float32(0)), x)
    expected = np.where(is_beyond, last, x)
    is_exact = is_number if is_bfloat16 else is_number & (np.abs(x) >= 2.0**-17)
    is_exact |= x == 0
    is_same = joined.view(np.uint32) == expected.view(np.uint32)
    assert np.all(is_same[is_exact])
    others = is_number & ~is_exact
    assert np.all(np.abs(np.float64(joined[others]) - x[others]) <= 2.0**-40)

    # Half of the way to the neighbor below, and to that above.
    numbers = np.sort(exact_numbers(dtype).astype(np.float64))
    ends = [[-end * 2 + largest], numbers, [end * 2 - largest]]
    numbers = np.unique(np.concatenate(ends))
    is_finite = np.isfinite(x)
    number = np.float64(np.asarray(param)[is_finite])
    exact = np.float64(expected[is_finite])
    index = np.searchsorted(numbers, number)
    below, above = (number + numbers[index - 1]) / 2, (number + numbers[index + 1]) / 2
    is_nearest = (below <= exact) & (exact <= above)
    assert np.all(is_nearest), (exact[~is_nearest], number[~is_nearest])
    sign = np.sign(number) if is_bfloat16 else 1
    assert not np.any(exact == np.where(sign > 0, above, below))


# Zeros and subnormals, the smallest normal numbers, 1, the largest numbers and
# infinities, and NaNs.
EXPONENTS = {
    "bfloat16": (0, 1, 127, 254, 255),
    "float16": (0, 102, 103, 110, 112, 113, 127, 142, 255),
}


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(dtype, exponent) for dtype in DTYPES for exponent in EXPONENTS[dtype]],
)
def test_a_number_and_its_remainder_are_the_number_of_all_of_an_exponent(
    dtype, exponent
):
    step = 1 if exponent in EXPONENTS["bfloat16"] else 2**3 + 1
    bits = np.uint32(exponent << 23) + np.arange(0, 2**23, step, dtype=np.uint32)
    check_split(bits, dtype)
    check_split(bits[:: 2**7 + 1] | np.uint32(1 << 31), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_and_the_ends_of_each_spacing_are_split(dtype):
    """All numbers of the dtype, the ties between them, and the numbers beside these."""
    exact = exact_numbers(dtype)
    exact = np.sort(exact[(np.abs(exact) > 1e-35) | (exact == 0)])
    with np.errstate(over="ignore"):
        ties = exact[1:] / 2 + exact[:-1] / 2
    x = np.concatenate([exact, ties])
    bits = x.view(np.uint32)
    check_split(np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@hypothesis.given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9))
def test_a_number_and_its_remainder_are_the_number_whatever_its_bits(dtype, bits):
    check_split(np.resize(bits, 16), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_remainder_of_another_number_does_not_change_the_parameter(dtype):
    """Each 16-bit number with remainders of all sizes and signs."""
    upper = np.repeat(np.arange(2**16, dtype=np.uint16), 8)
    params = jax.lax.bitcast_convert_type(upper, dtype)
    sizes = np.int16([-(2**15), -(2**14), -1, 0, 1, 2**14, 2**15 - 8, 2**15 - 1])
    lower = np.tile(sizes, 2**16)
    lower = lower if dtype == "bfloat16" else lower.view(np.uint16)
    split, join = jitted(dtype)
    again, _ = split(join(params, lower))
    np.testing.assert_array_equal(*map(np.float32, (again, params)))
    # Beside a negative zero of float16, a remainder is a number of its own.
    is_zero = np.float32(params) == 0
    kept = (~is_zero | (lower == 0)) & ~np.isnan(np.float32(params))
    np.testing.assert_array_equal(*(np.signbit(x)[kept] for x in (again, params)))


# In a fused kernel, XLA may round a product and a sum once, in one program of two.
unfused = functools.partial(
    jax.jit, compiler_options={"xla_disable_hlo_passes": "fusion"}
)


@pytest.mark.parametrize(
    ("name", "dtype", "steps"),
    [
        *((name, dtype, 50) for name, dtype in itertools.product(QUICK, DTYPES)),
        *(
            pytest.param(
                *(name, "bfloat16", 1000),
                marks=pytest.mark.slow if name in QUICK else DAILY,
            )
            for name in OPTIMIZERS
        ),
        # Later, an optimizer magnifies the digits that float16 lacks near zero. Noise
        # leaves the range.
        *(
            pytest.param(name, "float16", 50, marks=DAILY)
            for name in sorted(OPTIMIZERS.keys() - {*QUICK, "add_noise"})
        ),
    ],
)
def test_compensated_trains_as_its_masters_under_every_optimizer(name, dtype, steps):
    """Bit for bit in bfloat16, and in float16 but for its last digits near zero."""
    case = OPTIMIZERS[name]

    def step(optimizer, carry, _):
        params, state, masters = carry
        grads = jax.tree.map(jnp.float32, jax.grad(loss_fn)(params))
        args = case.extra_args(masters, grads)
        updates, state = optimizer.update(grads, state, params, **args)
        params = optax.apply_updates(params, updates)
        if isinstance(state, jmp.states.CompensatedState):
            masters = jax.tree.map(join, params, state.remainder[dtype])
        else:
            masters = jax.tree.map(followed_by, state.masters, params)
        return (params, state, masters), (params, masters)

    def followed_by(master, param):
        """Returns the parameter where no update reaches the rounded master."""
        is_rounded = split(master, np.dtype(dtype))[0] == param
        return jnp.where(is_rounded, master, param.astype("float32"))

    @unfused
    def train(params):
        def by(optimizer):
            carry = params, optimizer.init(params), jmp.cast_to_full(params)
            step_by = functools.partial(step, optimizer)
            return jax.lax.scan(step_by, carry, length=steps)

        inner = case.make()
        return by(jmp.compensated(inner)), by(jmp.master_weights(inner))

    params = jmp.cast_tree(make_params(), dtype)
    ((last, *_), found), (_, expected) = train(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(last, params)
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # CPUs flush smaller differences, and an optimizer may magnify one.
        atol = 2.0**-124 if dtype == "bfloat16" else 1e-7
        np.testing.assert_allclose(*map(np.float32, pair), rtol=0, atol=atol)


def test_a_parameter_that_misses_its_master_is_the_new_master():
    """Near the smallest normal number, where a CPU flushes the update to zero."""
    unit = 2.0**-132  # The spacing of bfloat16 at the parameter, and twice that below.
    params = jnp.full(4, 1.25 * 2.0**-125, "bfloat16")
    optimizer = jmp.compensated(optax.sgd(1.0))
    state = optimizer.init(params)
    remainder = jnp.full(4, int(0.45 * 2**16), jnp.int16)
    state = state._replace(remainder={"bfloat16": remainder})
    updates, after = optimizer.update(jnp.full(4, 2.0**-126), state, params)
    new = optax.apply_updates(params, updates)
    goal = np.float32(float(params[0]) + int(0.45 * 2**16) / 2**16 * unit - 2.0**-126)
    assert np.float32(join(new, after.remainder["bfloat16"])[0]) in (
        goal,
        np.float32(new[0]),
    )


def test_a_tie_that_a_cast_rounded_to_even_keeps_its_master():
    masters = jnp.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    params = masters.astype("bfloat16")
    optimizer = jmp.master_weights(optax.sgd(1.0))
    updates, state = optimizer.update(jnp.zeros(3), optimizer.init(masters), params)
    np.testing.assert_array_equal(state.masters, masters)
    away = jnp.float32([1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7])
    np.testing.assert_array_equal(optax.apply_updates(params, updates), away)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("float32", "bfloat16", r"int16 for bfloat16.*\['w'\], got none"),
        ("bfloat16", "float16", r"uint16 for float16.*\['w'\], got int16\[2\] for b"),
        (
            "bfloat16",
            "float32",
            r"16-bit parameter at \['w'\].*convert_state cast them",
        ),
    ],
)
def test_parameters_that_were_cast_after_init_are_an_error_with_a_remedy(
    before, after, words
):
    optimizer = jmp.compensated(optax.adam(0.1))
    params = {"w": jnp.ones(2, before), "half": jnp.ones(2, "bfloat16")}
    state = optimizer.init(params)
    params["w"] = params["w"].astype(after)
    with pytest.raises(TypeError, match=words):
        optimizer.update(params, state, params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compensated_parameter_has_the_digits_of_both(dtype):
    """Against the same sum in float64."""
    optimizer = jmp.compensated(optax.sgd(1.0))
    params = jnp.full(64, 0.75, dtype)
    state = optimizer.init(params)
    exact = np.full(64, 0.75)
    rng = np.random.default_rng(0)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    steps = 400
    for _ in range(steps):
        grads = np.float32(rng.uniform(-1, 1, 64) * 2.0**-10)
        params, state = step(params, state, grads)
        exact -= grads
    whole = np.float64(join(params, state.remainder[dtype]))
    # One rounding of the rest at each step, and they wander.
    assert np.max(np.abs(whole - exact)) < steps**0.5 * 2.0**-22
    rounding = float(jnp.finfo(dtype).eps) / 2
    assert np.max(np.abs(np.float64(params) - exact)) <= rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_far_below_a_parameter_s_spacing_are_not_lost(dtype):
    """20,000 steps of 2e-8 from 0.02, where float16 has a spacing of 1.5e-5."""

    def train(wrap):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jnp.full(2, -2e-8), state, params)
            return (jmp.apply_updates(params, updates), state), None

        optimizer, params = wrap(optax.sgd(1.0)), jnp.full(2, 0.02, dtype)
        carry = params, optimizer.init(params)
        return jax.jit(lambda: jax.lax.scan(step, carry, length=20_000))()[0]

    params, state = train(jmp.compensated)
    expected, of_masters = train(jmp.master_weights)
    np.testing.assert_array_equal(params, expected)
    joined = join(params, state.remainder[dtype])
    np.testing.assert_array_equal(joined, of_masters.masters)
    assert abs(float(joined[0]) - float(jnp.asarray(0.02, dtype)) - 4e-4) < 1e-5


def test_mechanize_trains_float16_parameters():
    """Its first steps are 1e-8 of the learning rate."""
    rng = np.random.default_rng(0)
    x, w = np.float32(rng.normal(size=(64, 8))), np.float32(rng.normal(size=8))

    def mean_square(params):
        return jnp.mean((x @ params.astype("float32") - x @ w) ** 2)

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(mean_square)(params)
        updates, state = optimizer.update(grads, state, params)
        return (jmp.apply_updates(params, updates), state), loss

    optimizer = jmp.compensated(optax.contrib.mechanize(optax.sgd(0.1)))
    params = jnp.full(8, 0.5, "float16")
    carry = params, optimizer.init(params)
    losses = jax.jit(lambda: jax.lax.scan(step, carry, length=600))()[1]
    assert losses[-1] < losses[0] / 500


@pytest.mark.parametrize("name", ["adam", "sgd, momentum", "lion", "contrib.momo"])
def test_compensated_training_is_near_to_that_of_float32(name):
    case = OPTIMIZERS[name]

    def train(optimizer, params):
        optimizer = optax.with_extra_args_support(optimizer)
        state = optimizer.init(params)

        @jax.jit
        def step(params, state):
            grads = jax.tree.map(jnp.float32, jax.grad(loss_fn)(params))
            args = case.extra_args(params, grads)
            updates, state = optimizer.update(grads, state, params, **args)
            return optax.apply_updates(params, updates), state

        for _ in range(200):
            params, state = step(params, state)
        return float(loss_fn(jax.tree.map(jnp.float32, params)))

    low = jmp.cast_tree(make_params(), "bfloat16")
    full, kept = (
        train(case.make(), make_params()),
        train(jmp.compensated(case.make()), low),
    )
    assert kept == pytest.approx(full, rel=0.03)


NARROW = {
    "compensated": jmp.compensated,
    "stochastic_rounding": functools.partial(
        jmp.stochastic_rounding, key=jax.random.key(0)
    ),
}


# Compensated parameters in bfloat16 follow their masters, see above.
WAYS = [*itertools.product(NARROW, DTYPES)][1:]


@pytest.mark.filterwarnings("ignore:The optimizer measures")
@pytest.mark.parametrize(
    ("name", "wrap", "dtype"),
    [*each_in_turn(*WAYS), *(("sgd, momentum", *way) for way in WAYS)],
)
def test_each_step_is_the_optimizer_s_rounded_once_under_every_optimizer(
    name, wrap, dtype
):
    """Against the bare optimizer, step by step, on the exact numbers of the state."""
    case = OPTIMIZERS[name]
    bare = optax.with_extra_args_support(case.make())
    optimizer = jmp.loss_scaling(NARROW[wrap](case.make()))
    params = jmp.cast_tree(make_params(), dtype)
    state, bare_state = optimizer.init(params), bare.init(jmp.cast_to_full(params))
    start = jax.tree.map(jnp.zeros_like, state)
    for _ in range(3):
        whole = jmp.cast_to_full(params)
        if wrap == "compensated":
            whole = jax.tree.map(join, params, state.inner_state.remainder[dtype])
        grads = jax.tree.map(jnp.float32, jax.grad(loss_fn)(params))
        args = case.extra_args(whole, grads)
        updates, bare_state = bare.update(grads, bare_state, whole, **args)
        expected = optax.apply_updates(whole, updates)
        updates, state = optimizer.update(grads, state, params, **args)
        params = optax.apply_updates(params, updates)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
        chex.assert_trees_all_equal_shapes_and_dtypes(state, start)
        for key, exact in expected.items():
            exact, found = np.float64(exact), np.float64(params[key])
            eps = float(jnp.finfo(dtype).eps)
            unit = eps * np.abs(exact) + 1e-7
            if wrap == "compensated":
                remainder = state.inner_state.remainder[dtype][key]
                joined = np.float64(join(params[key], remainder))
                assert np.all(np.abs(found - exact) <= unit / 2)
                np.testing.assert_allclose(joined, exact, rtol=1e-6, atol=2e-7)
            else:
                assert np.all(np.abs(found - exact) < unit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("start", [1.0, -0.3, 3e-5])
def test_stochastic_rounding_is_right_on_average_and_rounds_to_a_neighbour(
    dtype, start
):
    n = 1 << 16
    w = jnp.full(n, start, dtype)
    up = jnp.nextafter(w[0], jnp.asarray(np.sign(start) * np.inf, dtype))
    spacing = abs(float(up) - float(w[0]))
    optimizer = jmp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    state = optimizer.init(w)
    grads = jnp.full(n, -0.3 * spacing)
    updates, after = jax.jit(optimizer.update)(grads, state, w)
    new = np.float64(optax.apply_updates(w, updates))
    target = float(w[0]) + 0.3 * spacing
    assert set(np.round((new - float(w[0])) / spacing, 3)) == {0.0, 1.0}
    # Within four standard deviations of the mean of so many coins.
    deviation = spacing * (0.3 * 0.7 / n) ** 0.5
    assert abs(new.mean() - target) < 4 * deviation
    again, _ = optimizer.update(grads, after, w)
    assert not bool(jnp.all(updates == again)), "each step draws anew"
    same, _ = optimizer.update(grads, state, w)
    np.testing.assert_array_equal(updates, same)


def test_parameters_of_one_shape_are_rounded_by_chances_of_their_own():
    params = {name: jnp.ones(256, jnp.bfloat16) for name in "ab"}
    optimizer = jmp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert np.any(updates["a"] != updates["b"])


@pytest.mark.parametrize(
    "wrap",
    [jmp.compensated, lambda inner: jmp.stochastic_rounding(inner, jax.random.key(0))],
)
def test_a_skipped_step_moves_nothing_in_16_bits_either(wrap):
    inner = lenient(optax.adam(0.1))
    for optimizer in (wrap(jmp.loss_scaling(inner)), jmp.loss_scaling(wrap(inner))):
        check_a_skipped_step(optimizer)


def check_a_skipped_step(optimizer):
    params = jmp.cast_tree(make_params(), "bfloat16")
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ones = jax.tree.map(jnp.ones_like, params)
    params, state = step(params, state, ones)
    bad = {**ones, "b": ones["b"].at[0].set(jnp.inf)}
    after, skipped = step(params, state, bad)
    chex.assert_trees_all_equal(after, params)
    if hasattr(state, "remainder"):
        chex.assert_trees_all_equal(skipped.remainder, state.remainder)
    if hasattr(state, "key"):  # What stands outside draws all the same.
        skipped = skipped._replace(key=state.key)
    if isinstance(state, jmp.states.LossScalingState):
        chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    else:
        chex.assert_trees_all_equal(
            skipped.inner_state.inner_state, state.inner_state.inner_state
        )


@pytest.mark.parametrize(
    "wrap",
    [jmp.compensated, lambda inner: jmp.stochastic_rounding(inner, jax.random.key(0))],
)
def test_other_parameters_are_left_to_the_optimizer(wrap):
    params = {"low": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2)}
    optimizer = wrap(optax.sgd(2.0**-12))
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    assert float(updates["full"][0]) == -(2.0**-12)
    updates, _ = optimizer.update(grads, state, params)
    assert wrap(optax.sgd(0.1)).init({}) is not None
    full = {"full": jnp.ones(2)}
    for wide in (optimizer, jmp.loss_scaling(optax.chain(optimizer))):
        with pytest.raises(ValueError, match=r"got only float32\[2\].*cast_tree"):
            wide.init(full)
    with pytest.raises(ValueError, match=r"a wrapper around it casts"):
        jmp.master_weights(optimizer).init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(grads, state)
    with pytest.raises(TypeError, match="Did you mean adam"):
        wrap(optax.adam)


ROUNDING = {"master_weights": jmp.master_weights, **NARROW}
PARTS = {
    "chain": lambda w, a: optax.chain(optax.clip(1.0), w(a), optax.identity()),
    "masked": lambda w, a: optax.masked(w(a), {"w": True, "b": False, "full": False}),
    "masked, none of 16 bits": lambda w, a: optax.chain(
        optax.masked(w(a), {"w": False, "b": False, "full": True}),
        optax.masked(w(a), {"w": False, "b": False, "full": False}),
        optax.masked(w(a), {"w": True, "b": True, "full": False}),
    ),
    "partition": lambda w, a: optax.partition(
        {"w": w(a), "b": a, "full": a}, {"w": "w", "b": "b", "full": "full"}
    ),
    "partition, each": lambda w, a: optax.partition(
        {"w": w(a), "b": w(a), "full": w(a), "none": w(a)},
        {"w": "w", "b": "b", "full": "full"},
    ),
    "MultiSteps": lambda w, a: optax.MultiSteps(w(a), 1),
    "inject_hyperparams": lambda w, a: optax.inject_hyperparams(
        lambda learning_rate: w(optax.adam(learning_rate))
    )(learning_rate=0.01),
}


@pytest.mark.parametrize(
    ("name", "place"),
    mostly_slow(itertools.product(ROUNDING, PARTS), one_of_each(ROUNDING, PARTS)),
)
def test_inside_of_loss_scaling_a_part_of_the_parameters_may_be_chosen(name, place):
    params = {
        "w": jnp.float32([1.0, 0.3, -2.0]).astype("bfloat16"),
        "b": jnp.ones(2, "bfloat16"),
        "full": jnp.ones(2),
    }
    compose = PARTS[place]
    optimizer = jmp.loss_scaling(compose(ROUNDING[name], optax.adam(0.01)))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)
    after, new_state = step(params, state, grads)
    chex.assert_trees_all_equal_shapes_and_dtypes((after, new_state), (params, state))
    # By hand: that wrapper around Adam, of that parameter alone.
    alone = ROUNDING[name](optax.adam(0.01))
    updates, _ = alone.update(grads["w"], alone.init(params["w"]), params["w"])
    if name != "stochastic_rounding":  # Which draws by the number of the leaf.
        chex.assert_trees_all_equal(
            after["w"], optax.apply_updates(params["w"], updates)
        )
    assert bool(jnp.all(after["w"] != params["w"])) or name == "stochastic_rounding"
    bad = {**grads, "b": jnp.full(2, jnp.inf)}
    skipped, bad_state = step(after, new_state, bad)
    chex.assert_trees_all_equal(skipped, after)
    chex.assert_trees_all_equal(bad_state.inner_state, new_state.inner_state)
    # A moment in 16 bits would stall.
    if name != "stochastic_rounding":
        moments = [nu for _, nu in optax.tree.get_all_with_path(state, "nu")]
        dtypes = {str(x.dtype) for x in jax.tree.leaves(moments)}
        assert dtypes == {"float32"}


@pytest.mark.parametrize("name", ROUNDING)
def test_inside_of_loss_scaling_multi_steps_accumulates_before_it_rounds(name):
    params = jnp.ones(4, "bfloat16")
    optimizer = jmp.loss_scaling(optax.MultiSteps(ROUNDING[name](optax.sgd(1.0)), 2))
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for grads, expected in ((0.25, 1.0), (np.inf, 1.0), (0.75, 0.5)):
        updates, state = step(jnp.full(4, grads), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(params, jnp.full(4, expected, "bfloat16"))
    assert int(state.skipped) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NARROW)
def test_a_number_beyond_the_range_becomes_the_largest_number(name, dtype):
    largest = float(jnp.finfo(dtype).max)
    unit = largest - float(
        jnp.nextafter(jnp.asarray(largest, dtype), jnp.zeros([], dtype))
    )
    params = jnp.full(200, largest, dtype).at[::2].multiply(-1)
    optimizer = NARROW[name](optax.sgd(-1.0))
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for part in (0.25, 0.99):
        updates, _ = step(
            np.float32(params) * np.float32(part * unit / largest), state, params
        )
        np.testing.assert_array_equal(optax.apply_updates(params, updates), params)
    updates, _ = step(jnp.full(200, jnp.nan), state, params)
    assert bool(jnp.all(jnp.isnan(optax.apply_updates(params, updates))))


@pytest.mark.parametrize("name", [None, *ROUNDING])
def test_a_skipped_step_keeps_the_sign_of_a_zero(name):
    wrap = ROUNDING.get(name, lambda inner: inner)
    params = jnp.zeros(2, "float16" if name else "float32").at[0].multiply(-1)
    assert np.signbit(params)[0], "there is one to keep"
    for optimizer in (
        jmp.loss_scaling(wrap(optax.sgd(0.1))),
        wrap(jmp.skip_nonfinite(optax.sgd(0.1))),
    ):
        grads = jnp.full(2, jnp.inf, params.dtype)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        after = optax.apply_updates(params, updates)
        assert after.dtype == params.dtype
        np.testing.assert_array_equal(np.signbit(after), [True, False])


@pytest.mark.parametrize(
    "bad", [0, 1.5, None, jnp.int32(0), jax.random.split(jax.random.key(0))]
)
def test_an_argument_that_is_no_key_is_an_error_that_shows_one(bad):
    with pytest.raises(TypeError, match=r"Expected one key.*jax\.random\.key\(0\)"):
        jmp.stochastic_rounding(optax.sgd(0.1), bad)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert jmp.stochastic_rounding(optax.sgd(0.1), key)


@pytest.mark.parametrize("name", ROUNDING)
def test_a_pair_of_loss_and_gradients_is_an_error(name):
    optimizer, params = ROUNDING[name](optax.sgd(0.1)), {"w": jnp.ones(2, "bfloat16")}
    with pytest.raises(TypeError, match=r"got a pair.*loss, grads = value_and_grad"):
        optimizer.update((jnp.ones([]), params), optimizer.init(params), params)


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (jmp.master_weights, 6),
        (jmp.compensated, 4),
        (lambda inner: jmp.stochastic_rounding(inner, jax.random.key(0)), 2),
    ],
)
def test_a_parameter_takes_as_many_bytes_as_the_readme_says(wrap, expected):
    n = 1 << 16
    params = jnp.ones(n, jnp.bfloat16)
    arrays = jax.tree.leaves((params, wrap(optax.sgd(0.1)).init(params)))
    assert sum(x.size * x.dtype.itemsize for x in arrays) // n == expected


# The gradient is read; the parameter and the state are read and written.
MOVED = {
    "master_weights": (jmp.master_weights, 2 + 2 * 2 + 2 * 4, "shift-right-logical"),
    "compensated": (jmp.compensated, 2 + 2 * 2 + 2 * 2, "shift-right-logical"),
    "stochastic_rounding": (NARROW["stochastic_rounding"], 2 + 2 * 2, "shift-left"),
}


@pytest.mark.targets
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MOVED)
def test_the_compiler_keeps_the_rounding_and_moves_no_more_than_it_must(name, target):
    if missing(target):
        pytest.skip(missing(target))
    wrap, expected, rounding = MOVED[name]
    optimizer = wrap(optax.sgd(0.1))
    n = 1 << 24
    low = jax.ShapeDtypeStruct((n,), jnp.bfloat16)
    state = jax.eval_shape(optimizer.init, low)

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    program = compile_for(target, step, low, state, low)
    assert re.search(rf"\[{n}\]\S* {rounding}\(", program.text)
    assert program.bytes_moved / n == pytest.approx(expected, rel=0.01)


# ------------------------------------------------------------ through the updates


def trained(wrap, dtype, rate, start):
    """Returns parameters after three steps of a quadratic loss, in float32."""
    optimizer = wrap(optax.sgd(rate, momentum=0.5))
    params = start.astype(dtype)
    state = optimizer.init(params)
    for _ in range(3):
        grads = params.astype(jnp.float32) + 1
        updates, state = optimizer.update(grads, state, params)
        params = jmp.apply_updates(params, updates)
    return params.astype(jnp.float32)


WRAPPERS = {
    **{name: make for name, (make, _, _) in MOVED.items()},
    "low_precision_state": functools.partial(
        jmp.low_precision_state, key=jax.random.key(0)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_derivatives_by_rate_and_start_are_those_of_float32(name, dtype):
    """Rounding has the derivative of a cast, where a parameter is zero as well."""
    start, rate = jnp.tile(jnp.array([0.0, 1.0, -2.0, 0.5]), 1024), jnp.float32(0.1)
    tangents = (jnp.ones_like(start), jnp.float32(1))

    def derivatives(wrap, dtype):
        fun = functools.partial(trained, wrap, dtype)
        return [
            jax.jvp(lambda start: fun(rate, start), (start,), tangents[:1])[1],
            jax.jvp(lambda rate: fun(rate, start), (rate,), tangents[1:])[1],
        ]

    low = derivatives(WRAPPERS[name], dtype)
    for got, expected in zip(low, derivatives(lambda x: x, "float32"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_go_back_through_a_scan_of_steps(name, dtype):
    """In jit and vmap, under a loss scale, and once more for second derivatives."""

    def loss(rate, wrap, dtype):
        optimizer = jmp.loss_scaling(wrap(optax.sgd(rate, momentum=0.5)), SCALE)
        params = jnp.linspace(-1, 1, 4096).astype(dtype)

        def step(carry, _):
            params, state = carry
            grads = params.astype(jnp.float32) + 1
            updates, state = optimizer.update(grads, state, params)
            return (jmp.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, length=3)
        return jnp.sum(params.astype(jnp.float32) ** 2)

    def derivatives(*args):
        first = jax.grad(loss)
        rates = jnp.array([0.05, 0.1])
        second = jax.jvp(lambda rate: first(rate, *args), (rates[1],), (1.0,))[1]
        return [*jax.vmap(lambda rate: first(rate, *args))(rates), second]

    low = jax.jit(lambda: derivatives(WRAPPERS[name], dtype))()
    expected = jax.jit(lambda: derivatives(lambda inner: inner, "float32"))()
    np.testing.assert_allclose(low, expected, rtol=0.05)


@pytest.mark.parametrize("name", MOVED)
def test_parameters_in_shard_map_have_derivatives(name):
    def loss(rate, start):
        return jnp.mean(trained(MOVED[name][0], "bfloat16", rate, start) ** 2)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    of_a_part = jax.grad(lambda start: loss(0.1, start))
    split = jax.shard_map(of_a_part, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    start = jnp.linspace(-1, 1, 64)
    expected = 2 * jax.grad(lambda start: loss(0.1, start))(start)
    np.testing.assert_allclose(split(start), expected, rtol=0.1, atol=1e-3)


def test_noise_of_each_device_makes_parameters_of_each_device():
    optimizer = jmp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
    params = jnp.ones(64, jnp.bfloat16)
    grads = jnp.full(64, 2.0**-9)

    def step(keys):
        state = optimizer.init(params)._replace(key=keys[0])
        return optimizer.update(grads, state, params)[0]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(1))
    with pytest.raises(ValueError, match=r"varying|replicat"):
        jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P())(keys)
    split = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    first, second = jnp.split(split(keys), 2)
    assert jnp.any(first != second)


# ---------------------------------------------------------------- other gradients


@pytest.mark.parametrize("name", MOVED)
def test_a_gradient_that_is_none_leaves_its_parameter_as_it_is(name):
    """As ``jmp.value_and_grad`` returns it for an integer."""
    params = {
        "w": jnp.ones(3, jnp.bfloat16),
        "frozen": jnp.ones(2, jnp.bfloat16),
        "n": jnp.arange(2),
    }
    optimizer = MOVED[name][0](optax.sgd(0.1))
    grads = {"w": jnp.ones(3), "frozen": jnp.ones(2), "n": None}
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    params = jmp.apply_updates(params, updates)
    grads["frozen"] = None
    updates, after = optimizer.update(grads, state, params)
    moved = jmp.apply_updates(params, updates)
    assert jnp.all(moved["w"] < params["w"])
    for leaf in ("frozen", "n"):
        assert updates[leaf] is None
        np.testing.assert_array_equal(moved[leaf], params[leaf])
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    if name != "stochastic_rounding":  # The first field has masters or remainders.
        both = state, after
        kept = [x[0] if name == "master_weights" else x[0]["bfloat16"] for x in both]
        assert jnp.any(kept[1]["frozen"] != params["frozen"])
        np.testing.assert_array_equal(kept[1]["frozen"], kept[0]["frozen"])
        assert jnp.any(kept[1]["w"] != kept[0]["w"])


@pytest.mark.parametrize("name", MOVED)
def test_float64_gradients_change_no_shape_and_no_dtype(name):
    with jax.enable_x64(True):
        params = jnp.ones(3, jnp.bfloat16)
        optimizer = MOVED[name][0](optax.sgd(0.25))
        state = optimizer.init(params)
        updates, after = optimizer.update(jnp.ones(3, jnp.float64), state, params)
        assert (updates.shape, updates.dtype) == ((3,), np.float32)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        np.testing.assert_array_equal(jmp.apply_updates(params, updates), 0.75)


def test_parameters_in_8_bits_follow_their_masters():
    params = jnp.array([1.0, -3.0], jnp.float8_e4m3fn)
    optimizer = jmp.master_weights(optax.sgd(0.1))
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jnp.ones(2), state, params)
        params = jmp.apply_updates(params, updates)
    np.testing.assert_allclose(state.masters, [0.7, -3.3], rtol=1e-6)
    assert params.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(
        params.astype(np.float32), state.masters.astype(params.dtype).astype(np.float32)
    )
