"""A run goes on in another precision, with the digits and the moments that it had."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from every_optimizer import OPTIMIZERS, each_in_turn, loss_fn, make_params
from flax import serialization
from helpers import mostly_slow, one_of_each
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
import jmp_lite.linen  # registers the states with flax.serialization
from jmp_lite.optimizers.rounding import join, split
from jmp_lite.optimizers.storage import Stored, restore, store_nearest

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.PRNGKey(7)  # A raw key, which Flax can save.

# XLA would round an optimizer's step differently in two programs.
unfused = functools.partial(
    jax.jit, compiler_options={"xla_disable_hlo_passes": "fusion"}
)


def make_large_params():
    w = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64) + 1 / 3
    return {"w": w, "b": jnp.linspace(0.1, 0.3, 3)}


def bits(tree):
    """Returns the leaves as integers, so that NaN and zeros compare by their bits."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]
    return [np.asarray(x).view(f"uint{8 * x.dtype.itemsize}") for x in leaves]


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
    for a, e in zip(*map(bits, (actual, expected)), strict=True):
        np.testing.assert_array_equal(a, e)


# ------------------------------------------------------------------ the forms of a run


@dataclasses.dataclass(frozen=True)
class Form:
    """A precision of a run, and what its state means, by hand.

    Attributes:
      dtype: the dtype of the parameters.
      wrap: wraps the optimizer.
      digits: the parameters with all their digits, from parameters and state.
      inner: the state of the optimizer in float32, from the state.
      kept: what digits become when the form begins to hold them.
      stored: what a moment becomes.
    """

    dtype: str
    wrap: Callable[[Any], Any]
    digits: Callable[[Any, Any], Any]
    inner: Callable[[Any], Any]
    kept: Callable[[Any], Any] = lambda x: x
    stored: Callable[[Any, str], Any] = lambda x, name: x


def full(params, state):
    return jax.tree.map(jnp.float32, params)


def joined(params, state):
    (remainder,) = state.remainder.values()
    return jax.tree.map(join, params, remainder)


def in_compensated_float16(x):
    return join(*split(x, np.dtype("float16")))


def large_in_bfloat16(x, name):
    return x.astype("bfloat16").astype("float32") if x.size >= 4096 else x


def large_in_8_bits(x, name):
    dtype = "uint8" if name == "nu" else "float8_e4m3fn"
    return restore(store_nearest(x, np.dtype(dtype), True)) if x.size >= 4096 else x


def low_inner(state):
    """The leaves of adam's state are count, mu of b and w, nu of b and w."""
    leaves, structure = jax.tree.flatten(state.inner_state)
    (scales,) = (state.scales or {"": [None] * len(leaves)}).values()
    found = [
        x if x.dtype in ("int32", "float32") else restore(Stored(x, scale))
        for x, scale in zip(leaves, scales, strict=True)
    ]
    return structure.unflatten(found)


def stochastic(opt):
    return jmp.stochastic_rounding(opt, KEY)


def low(dtype):
    return lambda opt: jmp.low_precision_state(opt, dtype, key=KEY)


def bfloat16_of(x):
    return split(x, np.dtype("bfloat16"))[0].astype("float32")


FORMS = {
    "float32": Form("float32", lambda opt: opt, full, lambda s: s),
    "loss_scaling": Form("float32", jmp.loss_scaling, full, lambda s: s.inner_state),
    "skip_nonfinite": Form(
        "float32", jmp.skip_nonfinite, full, lambda s: s.inner_state
    ),
    "master_weights, bfloat16": Form(
        "bfloat16",
        jmp.master_weights,
        lambda p, s: s.masters,
        lambda s: s.inner_state,
    ),
    "master_weights, float16, scaled": Form(
        "float16",
        lambda opt: jmp.loss_scaling(jmp.master_weights(opt)),
        lambda p, s: s.inner_state.masters,
        lambda s: s.inner_state.inner_state,
    ),
    "compensated, bfloat16": Form(
        "bfloat16", jmp.compensated, joined, lambda s: s.inner_state
    ),
    "compensated, float16": Form(
        "float16",
        jmp.compensated,
        joined,
        lambda s: s.inner_state,
        kept=in_compensated_float16,
    ),
    "stochastic_rounding": Form(
        "bfloat16", stochastic, full, lambda s: s.inner_state, kept=bfloat16_of
    ),
    "moments in bfloat16": Form(
        "float32", low("bfloat16"), full, low_inner, stored=large_in_bfloat16
    ),
    "all, in 8 bits": Form(
        "bfloat16",
        lambda opt: jmp.skip_nonfinite(jmp.compensated(low("float8_e4m3fn")(opt))),
        lambda p, s: joined(p, s.inner_state),
        lambda s: low_inner(s.inner_state.inner_state),
        stored=large_in_8_bits,
    ),
}


def adam():
    return optax.adam(1e-2)


def step(optimizer, params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return jmp.apply_updates(params, updates), state


def some_grads(i):
    return jax.tree.map(lambda x: jnp.sin(x * (i + 3)), make_large_params())


def run(form, steps=3):
    """Returns parameters and state after some steps."""
    optimizer = form.wrap(adam())
    params = jmp.cast_tree(make_large_params(), form.dtype)
    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(optimizer, params, state, some_grads(i))
    return params, state


def assert_form(name, params, state):
    """Checks dtypes: those that a run in this form has."""
    form = FORMS[name]
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(form.dtype)}
    fresh = form.wrap(adam()).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    for a, b in zip(*map(jax.tree.leaves, (state, fresh)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)


@functools.cache
def converted_to_all(before):
    """Returns a run and its conversions to each form."""
    old = FORMS[before]

    @jax.jit
    def convert():
        params, state = run(old)
        return (params, state), {
            name: jmp.convert_state(state, new.wrap(adam()), params, new.dtype)
            for name, new in FORMS.items()
        }

    return convert()


def exact_values(old, new, params, state):
    """Returns digits and moments of a run in an old form, as a new one keeps them."""
    digits, moments = old.digits(params, state), old.inner(state)
    if new.stored is not old.stored:
        moments = jax.tree.map_with_path(
            lambda path, x: new.stored(x, path[1].name), moments
        )
    return jax.tree.map(new.kept, digits), moments


@pytest.mark.parametrize(
    "before",
    mostly_slow(
        FORMS, ("float32", "master_weights, float16, scaled", "all, in 8 bits")
    ),
)
def test_every_form_goes_on_in_every_other_from_its_exact_values(before):
    run_so_far, converted = converted_to_all(before)
    for name, (params, state) in converted.items():
        new = FORMS[name]
        assert_form(name, params, state)
        exact = exact_values(FORMS[before], new, *run_so_far)
        assert_same_bits((new.digits(params, state), new.inner(state)), exact)
        if new.dtype == "bfloat16":
            rounded = jax.tree.map(bfloat16_of, exact[0])
            assert_same_bits(jmp.cast_to_full(params), rounded)


@pytest.mark.slow
@pytest.mark.parametrize("before", FORMS)
def test_one_more_step_is_that_of_the_optimizer_alone_from_these_values(before):
    run_so_far, converted = converted_to_all(before)
    exact = {
        name: exact_values(FORMS[before], new, *run_so_far)
        for name, new in FORMS.items()
    }

    @unfused
    def step_all(converted, exact):
        grads = some_grads(5)
        return {
            name: (
                step(new.wrap(adam()), *converted[name], grads),
                step(adam(), *exact[name], grads),
            )
            for name, new in FORMS.items()
        }

    for name, (found, (masters, moments)) in step_all(converted, exact).items():
        new = FORMS[name]
        if name != "stochastic_rounding":
            assert_same_bits(new.digits(*found), jax.tree.map(new.kept, masters))
        if new.stored is FORMS["float32"].stored:
            assert_same_bits(new.inner(found[1]), moments)


# If a state holds all digits of another one, converting it back restores them.
HOLDS = {
    "float32": ("loss_scaling", "master_weights, bfloat16", "compensated, bfloat16"),
    "loss_scaling": ("skip_nonfinite", "master_weights, float16, scaled"),
    "master_weights, bfloat16": ("compensated, bfloat16", "float32"),
    "compensated, bfloat16": ("float32", "master_weights, bfloat16"),
    # In float32, a tie no longer shows which neighbor was the parameter.
    "compensated, float16": ("compensated, float16",),
    "stochastic_rounding": ("stochastic_rounding", "float32", "compensated, bfloat16"),
    "all, in 8 bits": ("all, in 8 bits",),
}


@pytest.mark.parametrize("name", HOLDS)
def test_the_way_there_and_back_changes_no_bit(name):
    form = FORMS[name]

    @jax.jit
    def there_and_back():
        found = [run(form)]
        for other in HOLDS[name]:
            there, params = FORMS[other], found[0][0]
            low, state = jmp.convert_state(
                found[0][1], there.wrap(adam()), params, there.dtype
            )
            found.append(jmp.convert_state(state, form.wrap(adam()), low, form.dtype))
        return found

    (params, state), *others = there_and_back()
    for new_params, new_state in others:
        assert_same_bits(new_params, params)
        assert_same_bits(form.inner(new_state), form.inner(state))
        assert_same_bits(form.digits(new_params, new_state), form.digits(params, state))


@pytest.mark.parametrize(
    ("name", "wrapper"), each_in_turn(("compensated",), ("master_weights",))
)
def test_every_optimizer_goes_on_in_16_bits_and_comes_back(name, wrapper):
    case = OPTIMIZERS[name]
    plain = optax.with_extra_args_support(case.make())
    low = getattr(jmp, wrapper)(case.make())

    def step(optimizer, params, state, masters):
        grads = jax.grad(loss_fn)(masters)
        args = case.extra_args(masters, grads)
        updates, state = optimizer.update(grads, state, params, **args)
        return jmp.apply_updates(params, updates), state

    @unfused
    def train():
        params = make_params()
        state = plain.init(params)
        for _ in range(2):
            params, state = step(plain, params, state, params)
        half, half_state = jmp.convert_state(state, low, params, "bfloat16")
        back = jmp.convert_state(half_state, plain, half, "float32")
        half, half_state = step(low, half, half_state, params)
        later = jmp.convert_state(half_state, plain, half, "float32")
        return (params, state), back, step(plain, params, state, params), later

    before, back, expected, later = train()
    for pair in ((back, before), (later, expected)):
        assert_same_bits(*(jax.tree.map(jnp.asarray, tree) for tree in pair))


# ----------------------------------------------------------- scales, counts and keys


def overflow(optimizer, params, state, times=3):
    """Returns the state after some overflows."""
    infinite = jax.tree.map(lambda x: x * jnp.inf, params)
    for _ in range(times):
        _, state = optimizer.update(infinite, state, params)
    return state


PARAMS = {"w": jnp.linspace(0.5, 1, 4)}


def test_float16_becomes_bfloat16_and_the_counts_of_skipped_steps_stay():
    scaled, plain = jmp.loss_scaling(adam()), jmp.skip_nonfinite(adam())
    old = overflow(scaled, PARAMS, scaled.init(PARAMS))
    params, state = jmp.convert_state(old, plain, PARAMS)
    assert_same_bits(params, PARAMS)
    assert state.loss_scale == jmp.NoOpLossScale()
    assert (int(state.skipped), int(state.consecutive_skipped)) == (3, 3)
    assert not state.grads_finite
    _, back = jmp.convert_state(state, scaled, params)
    assert float(jmp.get_loss_scale(back).loss_scale) == 2.0**15  # It starts again.
    assert int(back.skipped) == 3
    _, none = jmp.convert_state(old, adam(), PARAMS)
    _, again = jmp.convert_state(none, scaled, PARAMS)
    assert (int(again.skipped), bool(again.grads_finite)) == (0, True)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (jmp.DynamicLossScale(2.0**20), 2.0**12),  # The same settings.
        (jmp.DynamicLossScale(2.0**10, period=5), 2.0**10),
        (jmp.DynamicLossScale(2.0**10, hysteresis=2), 2.0**10),
        (jmp.StaticLossScale(128), 128),
    ],
)
def test_a_loss_scale_goes_on_in_one_of_the_same_settings(scale, factor):
    old = jmp.loss_scaling(adam())
    new = jmp.loss_scaling(jmp.master_weights(adam()), scale)
    state = overflow(old, PARAMS, old.init(PARAMS))
    _, state = jmp.convert_state(state, new, PARAMS, "float16")
    assert float(jmp.get_loss_scale(state).loss_scale) == factor


def test_random_keys_go_on_where_both_optimizers_have_the_wrapper():
    def both(seed, key=jax.random.key):
        inner = jmp.low_precision_state(adam(), key=key(seed))
        return jmp.stochastic_rounding(inner, key(seed + 1))

    low = jmp.cast_tree(PARAMS, "bfloat16")
    state = both(0).init(low)
    _, state = both(0).update(low, state, low)
    _, same = jmp.convert_state(state, both(5), low)
    assert_same_bits((same.key, same.inner_state.key), (state.key, state[1].key))
    only = jmp.stochastic_rounding(adam(), jax.random.key(9))
    _, rounded = jmp.convert_state(state, only, low)
    assert_same_bits(rounded.key, state.key)
    _, again = jmp.convert_state(rounded, both(5), low)
    assert_same_bits((again.key, again[1].key), (state.key, jax.random.key(5)))
    raw = both(5, jax.random.PRNGKey)  # A key of another type starts again.
    _, state = jmp.convert_state(state, raw, low)
    assert_same_bits(state.key, jax.random.PRNGKey(6))
    without = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9))
    with_key = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9), key=KEY)
    _, state = jmp.convert_state(with_key.init(PARAMS), without, PARAMS)
    assert state.key is None


# --------------------------------------------------- in the transformations of optax


def frozen(inner):
    labels = {"w": "trained", "b": "frozen"}
    return optax.partition({"trained": inner, "frozen": optax.set_to_zero()}, labels)


def each_apart(wrap):
    def of(inner):
        parts = {name: wrap(inner) for name in ("w", "b")}
        return optax.partition(parts, {"w": "w", "b": "b"})

    return of


NESTED = {
    "chain": lambda wrap: lambda opt: optax.chain(optax.clip(1.0), wrap(opt)),
    "masked": lambda wrap: (
        lambda opt: optax.chain(
            optax.masked(wrap(opt), {"w": True, "b": False}), optax.scale(0.5)
        )
    ),
    "partition": lambda wrap: lambda opt: frozen(wrap(opt)),
    "in each part": each_apart,
    "around partition": lambda wrap: lambda opt: wrap(frozen(opt)),
    "MultiSteps": lambda wrap: lambda opt: optax.MultiSteps(wrap(opt), 2),
    "around MultiSteps": lambda wrap: lambda opt: wrap(optax.MultiSteps(opt, 2)),
    "inject_hyperparams": lambda wrap: (
        lambda opt: optax.inject_hyperparams(
            lambda learning_rate: wrap(optax.adam(learning_rate))
        )(learning_rate=optax.linear_schedule(0.1, 0.2, 9))
    ),
}


WITH_ALL_DIGITS = (jmp.compensated, jmp.master_weights)


@pytest.mark.parametrize(
    ("name", "wrap"),
    mostly_slow(
        itertools.product(NESTED, WITH_ALL_DIGITS),
        one_of_each(
            ("partition", "in each part", "around MultiSteps", "inject_hyperparams"),
            WITH_ALL_DIGITS,
        ),
    ),
)
def test_wrappers_are_found_inside_and_around_the_transformations_of_optax(name, wrap):
    nest = NESTED[name]
    plain, low = (nest(by)(adam()) for by in (lambda opt: opt, wrap))
    is_w_alone = name in ("masked", "partition")
    where = (lambda path, leaf: "w" in str(path[0])) if is_w_alone else None

    @unfused
    def train():
        params = make_params()
        state = plain.init(params)
        for _ in range(3):
            params, state = step(plain, params, state, jax.grad(loss_fn)(params))
        half = jmp.convert_state(state, low, params, "bfloat16", where=where)
        grads = jax.grad(loss_fn)(params)
        after = step(low, *half, grads)
        back = jmp.convert_state(half[1], plain, half[0], "float32")
        return (params, state), half, after, back, step(plain, params, state, grads)

    before, (half, _), (params, state), back, expected = train()
    assert half["w"].dtype == jnp.bfloat16
    assert half["b"].dtype == ("float32" if is_w_alone else "bfloat16")
    assert_same_bits(back, jax.tree.map(jnp.asarray, before))
    later, _ = jmp.convert_state(state, plain, params, "float32")
    if name in ("chain", "in each part", "around partition", "around MultiSteps"):
        assert_same_bits(later, expected[0])  # Transformations around it get 16 bits.


def test_float32_masters_of_a_part_that_no_wrapper_has_are_rounded():
    """Parameters that the wrapper leaves out keep their moments where they fit."""
    params = make_params()
    low = frozen(jmp.compensated(adam()))
    state = frozen(adam()).init(params)
    half, state = jmp.convert_state(state, low, params, "bfloat16")
    again, _ = jmp.convert_state(state, frozen(adam()), half, "float32")
    assert_same_bits(again["w"], params["w"])
    assert_same_bits(again["b"], params["b"].astype("bfloat16").astype("float32"))


@pytest.mark.parametrize("wrap", [jmp.master_weights, jmp.compensated])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_functions_that_read_a_state_get_it_with_all_digits(wrap, dtype):
    bare = optax.contrib.schedule_free_adamw(1e-2)
    optimizer = jmp.loss_scaling(wrap(bare))
    params = jmp.cast_tree(make_params(), dtype)
    exact, state = jmp.cast_to_full(params), optimizer.init(params)
    exact_state = bare.init(exact)
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: jnp.sin((i + 3) * x), make_params())
        params, state = step(optimizer, params, state, grads)
        exact, exact_state = step(bare, exact, exact_state, grads)
    full, inner = jmp.convert_state(state, bare, params, "float32")
    evaluated = optax.contrib.schedule_free_eval_params(inner, full)
    expected = optax.contrib.schedule_free_eval_params(exact_state, exact)
    chex.assert_trees_all_close(evaluated, expected, rtol=1e-6, atol=1e-7)


def test_a_part_in_float32_may_have_masters_of_its_own():
    params, optimizer = make_params(), each_apart(jmp.master_weights)(adam())
    new, state = jmp.convert_state(
        each_apart(lambda opt: opt)(adam()).init(params),
        optimizer,
        params,
        "bfloat16",
        where=lambda path, leaf: path[0].key == "w",
    )
    assert (new["w"].dtype, new["b"].dtype) == ("bfloat16", "float32")
    after = step(optimizer, new, state, params)
    plain = each_apart(lambda opt: opt)(adam())
    back, _ = jmp.convert_state(after[1], plain, after[0], "float32")
    expected, _ = step(plain, params, plain.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, back, expected)


def test_masters_in_float64_are_taken_over_with_all_their_digits():
    with jax.enable_x64(True):
        exact = {"w": jnp.linspace(0.5, 1, 7, dtype="float64")}
        wide = jmp.master_weights(adam(), "float64")
        low, state = jmp.convert_state(adam().init(exact), wide, exact, "bfloat16")
        assert_same_bits(state.masters, exact)
        new, rounded = jmp.convert_state(state, jmp.compensated(adam()), low)
        narrow = exact["w"].astype("float32")
        assert_same_bits(join(new["w"], rounded.remainder["bfloat16"]["w"]), narrow)
        back, _ = jmp.convert_state(state, adam(), low, "float64")
        assert_same_bits(back, exact)


@pytest.mark.parametrize(
    ("dtype", "to"), [("float64", "float32"), ("float32", "float64")]
)
@pytest.mark.parametrize("low_dtype", ["bfloat16", "float16"])
def test_masters_of_another_width_stay_at_the_next_step(dtype, to, low_dtype):
    """Parameters are rounded as the wrapper rounds its masters, ties too."""
    with jax.enable_x64(True):
        ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
        exact = {"w": jnp.asarray([*ties, *(x - 2.0**-40 for x in ties)], dtype)}
        optimizer = jmp.master_weights(adam(), to)
        low, state = jmp.convert_state(adam().init(exact), optimizer, exact, low_dtype)
        masters = jmp.cast_tree(exact, to)
        assert_same_bits(state.masters, masters)
        zeros = jax.tree.map(jnp.zeros_like, masters)
        _, state = optimizer.update(zeros, state, low)
        assert_same_bits(state.masters, masters)


def test_a_state_inside_of_lookahead_is_an_error_with_a_remedy():
    lookahead = [
        optax.lookahead(opt, 5, 0.5) for opt in (adam(), jmp.compensated(adam()))
    ]
    params = optax.LookaheadParams.init_synced(make_params())
    low = jmp.cast_tree(params, "bfloat16")
    state = lookahead[1].init(low)
    with pytest.raises(TypeError, match=r"optax.lookahead does: convert the state"):
        jmp.convert_state(state, lookahead[0], low, "float32")
    with pytest.raises(TypeError, match=r"optax.lookahead does: convert the state"):
        jmp.convert_state(lookahead[0].init(params), lookahead[1], params, "bfloat16")
    fast, inner = jmp.convert_state(state.fast_state, adam(), low.fast, "float32")
    assert_same_bits(fast, jmp.cast_to_full(low.fast))
    assert_same_bits(inner, adam().init(fast))


# -------------------------------------------------------------------- as any function


def test_the_results_share_no_memory_with_the_arguments():
    for name in ("float32", "compensated, bfloat16", "all, in 8 bits"):
        form = FORMS[name]
        params, state = jax.jit(lambda form=form: run(form, 1))()
        new = jmp.convert_state(state, form.wrap(adam()), params)
        expected = [np.array(x) for x in jax.tree.leaves(new)]
        for x in jax.tree.leaves((params, state)):
            x.delete()
        for x, e in zip(jax.tree.leaves(new), expected, strict=True):
            np.testing.assert_array_equal(x, e)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)]
        assert len(set(pointers)) == len(pointers)


def test_parameters_and_masters_of_32_bits_are_two_arrays():
    params = {"w": jnp.ones(64), "b": jnp.ones(3)}
    optimizer = jmp.master_weights(adam())
    new, state = jmp.convert_state(
        adam().init(params),
        optimizer,
        params,
        "bfloat16",
        where=lambda path, leaf: leaf.ndim and leaf.size > 3,
    )
    assert (new["w"].dtype, new["b"].dtype) == ("bfloat16", "float32")
    pointers = [x["b"].unsafe_buffer_pointer() for x in (params, new, state.masters)]
    assert len(set(pointers)) == 3


def test_arrays_stay_on_their_devices():
    mesh = jax.make_mesh((2,), ("data",))
    sharded = NamedSharding(mesh, P("data"))
    params = {"w": jax.device_put(jnp.linspace(-1, 1, 8192).reshape(64, 128), sharded)}
    state = adam().init(params)
    inner = jmp.low_precision_state(adam(), "float8_e4m3fn", key=KEY)
    optimizer = jmp.skip_nonfinite(jmp.compensated(inner))
    low, new = jmp.convert_state(state, optimizer, params, "bfloat16")
    moments = new.inner_state.inner_state.inner_state[0]
    remainder = new.inner_state.remainder
    for x in jax.tree.leaves((low, remainder, moments.mu, moments.nu)):
        assert x.sharding.is_equivalent_to(sharded, 2)
    full, back = jmp.convert_state(new, adam(), low, "float32")
    for x in jax.tree.leaves((full, back[0].mu, back[0].nu)):
        assert x.sharding.is_equivalent_to(sharded, 2)
    optimizer = jmp.master_weights(adam())
    low, new = jmp.convert_state(state, optimizer, params, "float16")
    for x in jax.tree.leaves((low, new.masters, new.inner_state[0].mu)):
        assert x.sharding.is_equivalent_to(sharded, 2)


def test_states_that_vmap_has_stacked_are_converted_at_once():
    optimizer = jmp.loss_scaling(jmp.compensated(adam()))
    params = {"w": jnp.linspace(-1, 1, 12).reshape(2, 6)}

    def convert(params):
        return jmp.convert_state(adam().init(params), optimizer, params, "bfloat16")

    stacked = jax.vmap(convert)(params)
    singles = [convert({"w": w}) for w in params["w"]]
    assert_same_bits(stacked, jax.tree.map(lambda *x: jnp.stack(x), *singles))


def test_a_converted_state_compiles_a_step_once():
    optimizer = jmp.loss_scaling(jmp.compensated(adam()))
    traces = []

    @jax.jit
    def train(params, state):
        traces.append(1)
        return step(optimizer, params, state, jax.tree.map(jnp.float32, params))

    new = jmp.convert_state(adam().init(PARAMS), optimizer, PARAMS, "bfloat16")
    assert not any(x.weak_type for x in jax.tree.leaves(new))
    train(*train(*new))
    assert len(traces) == 1


@pytest.mark.filterwarnings("ignore")
def test_states_from_checkpoints_of_orbax_and_flax_are_converted(tmp_path):
    params, state = jax.jit(lambda: run(FORMS["all, in 8 bits"]))()
    new = FORMS["loss_scaling"].wrap(adam())
    expected = jmp.convert_state(state, new, params, "float32")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
        restored = checkpointer.restore(tmp_path / "state", abstract)
        bare = checkpointer.restore(tmp_path / "state")
    found = jmp.convert_state(restored[1], new, restored[0], "float32")
    assert_same_bits(found, expected)
    with pytest.raises(TypeError, match=r"restored without the structure"):
        jmp.convert_state(bare[1], new, params, "float32")
    blank = jax.tree.map(jnp.zeros_like, (params, state))
    restored = serialization.from_bytes(blank, serialization.to_bytes((params, state)))
    assert isinstance(restored[0]["w"], np.ndarray)
    found = jmp.convert_state(restored[1], new, restored[0], "float32")
    assert_same_bits(found, expected)


# ----------------------------------------------------------------------------- errors

LOW = jmp.cast_tree(PARAMS, "bfloat16")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (optax.sgd(0.1), adam(), r"At \[0\] it has EmptyState\(\).*ScaleByAdamState"),
        (
            optax.yogi(0.1),
            optax.adabelief(0.1),
            r"At \[0\] it has ScaleByAdamState\(.count, .mu, .nu\), and that of the "
            r"new optimizer has ScaleByBeliefState\(.count",
        ),
        (
            adam(),
            optax.chain(adam(), optax.trace(0.9)),
            r"At \[0\] it has ScaleByAdamState.*that of the new optimizer has tuple",
        ),
        (
            optax.sgd(0.1, momentum=0.9),
            optax.chain(optax.trace(0.9), optax.identity(), optax.identity()),
            r"At the root it has tuple\(\[0\], \[1\]\).*tuple\(\[0\], \[1\], \[2\]\)",
        ),
    ],
)
@pytest.mark.parametrize("wrap", [lambda opt: opt, jmp.compensated])
def test_the_state_of_another_optimizer_is_an_error_that_names_the_difference(
    old, new, words, wrap
):
    with pytest.raises(TypeError, match=words):
        jmp.convert_state(jmp.skip_nonfinite(old).init(LOW), wrap(new), LOW)


def test_a_state_of_other_parameters_is_an_error_that_names_the_shape_of_a_moment():
    state = adam().init({"w": jnp.ones(5)})
    with pytest.raises(TypeError, match=r"At \[0\].mu\['w'\] it has float32\[5\], and"):
        jmp.convert_state(state, jmp.compensated(adam()), LOW)
    state = adam().init({"v": jnp.ones(4)})
    with pytest.raises(TypeError, match=r"\[0\].mu it has dict\(\['v'\]\).*\['w'\]"):
        jmp.convert_state(state, jmp.compensated(adam()), LOW)
    state = jmp.master_weights(adam()).init({"v": LOW["w"]})
    with pytest.raises(TypeError, match=r"another structure than params"):
        jmp.convert_state(state, adam(), LOW)


def test_parameters_that_were_cast_before_are_an_error():
    cast = jmp.cast_tree(PARAMS, "float16")
    for wrap in (jmp.compensated, jmp.master_weights):
        state = wrap(adam()).init(LOW)
        with pytest.raises((TypeError, ValueError), match=r"16-bit|narrower"):
            jmp.convert_state(state, adam(), PARAMS)
    state = jmp.compensated(adam()).init(LOW)
    with pytest.raises(TypeError, match=r"int16\[4\] at \['w'\].*without casting"):
        jmp.convert_state(state, adam(), cast)


def test_wrappers_for_16_bits_require_a_dtype_and_so_does_where():
    for wrap in (
        jmp.compensated,
        jmp.master_weights,
        FORMS["stochastic_rounding"].wrap,
    ):
        with pytest.raises(ValueError, match=r"narrower|16-bit") as error:
            jmp.convert_state(adam().init(PARAMS), wrap(adam()), PARAMS)
        notes = getattr(error.value, "__notes__", [])
        assert "pass dtype" in "".join([str(error.value), *notes])
    with pytest.raises(ValueError, match="Expected a dtype"):
        jmp.convert_state(
            adam().init(PARAMS), adam(), PARAMS, where=lambda path, leaf: True
        )


WRAPPERS = {
    "loss_scaling": (jmp.loss_scaling, "LossScalingState"),
    "master_weights": (jmp.master_weights, "MasterWeightsState"),
    "compensated": (jmp.compensated, "CompensatedState"),
    "stochastic_rounding": (
        FORMS["stochastic_rounding"].wrap,
        "StochasticRoundingState",
    ),
    "low_precision_state": (low("bfloat16"), "LowPrecisionState"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_names_the_state_that_came_and_how_to_convert_it(name):
    wrap, expected = WRAPPERS[name]
    optimizer = wrap(adam())
    others = [by for other, (by, _) in WRAPPERS.items() if other != name]
    for by in (lambda opt: opt, *others):
        old = by(adam()).init(LOW)
        words = (
            rf"Expected the {expected} that {name} makes in init, got "
            rf"{type(old).__name__}.*params, opt_state = jmp_lite.convert_state\("
            r"opt_state, optimizer, params\)"
        )
        with pytest.raises(TypeError, match=words):
            optimizer.update(LOW, old, LOW)
        with pytest.raises(TypeError, match=words):
            jmp.skip_nonfinite(optimizer).update(
                LOW, jmp.skip_nonfinite(by(adam())).init(LOW), LOW
            )
        params, state = jmp.convert_state(old, optimizer, LOW)
        optimizer.update(params, state, params)
