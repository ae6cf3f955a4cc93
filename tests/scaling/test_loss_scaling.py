import dataclasses
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.scaling.skipping import judged

PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
GOOD = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(2, 4.0)}
BAD = {"w": jnp.full((2, 2), jnp.nan), "b": jnp.full(2, 4.0)}


def run(optimizer, *steps, params=PARAMS, **extra_args):
    """Takes one update per gradient, and returns parameters and the last state."""
    state = optimizer.init(params)
    for grads in steps:
        updates, state = optimizer.update(grads, state, params, **extra_args)
        params = optax.apply_updates(params, updates)
    return params, state


def scale_of(state):
    return float(jmp.get_loss_scale(state).loss_scale)


def test_the_first_step_is_the_first_that_the_scale_counts():
    optimizer = jmp.loss_scaling(optax.sgd(0.1), jmp.DynamicLossScale(8.0, period=2))
    scales = [scale_of(run(optimizer, *[GOOD] * n)[1]) for n in range(4)]
    assert scales == [8, 8, 16, 16]


# ----------------------------------------------------------------- in optax's chains


def sgd_with_schedule():
    return optax.sgd(optax.linear_schedule(1.0, 0.0, 4), momentum=0.9)


def wrap(inner):
    return jmp.loss_scaling(lenient(inner))


ADAM = lenient(optax.adam(0.1))
COMPOSITIONS = {
    "around a chain": lambda w: w(
        optax.chain(optax.clip_by_global_norm(1.0), sgd_with_schedule())
    ),
    "first in a chain": lambda w: optax.chain(
        w(optax.clip_by_global_norm(1.0)), sgd_with_schedule()
    ),
    "last in a chain": lambda w: optax.chain(
        optax.clip_by_global_norm(1.0), w(sgd_with_schedule())
    ),
    "around masked": lambda w: w(
        optax.masked(sgd_with_schedule(), {"w": True, "b": False})
    ),
    "inside masked": lambda w: optax.masked(
        w(sgd_with_schedule()), {"w": True, "b": False}
    ),
    "around partition": lambda w: w(
        optax.partition(
            {"one": optax.sgd(0.1), "two": ADAM},
            {"w": "one", "b": "two"},
        )
    ),
    "inside partition": lambda w: optax.partition(
        {"one": w(optax.sgd(0.1)), "two": ADAM},
        {"w": "one", "b": "two"},
    ),
    "around inject_hyperparams": lambda w: w(
        optax.inject_hyperparams(optax.adam)(
            learning_rate=optax.linear_schedule(1.0, 0.0, 4)
        )
    ),
    "inside inject_hyperparams": lambda w: lenient(
        optax.inject_hyperparams(lambda learning_rate: w(optax.adam(learning_rate)))(
            learning_rate=optax.linear_schedule(1.0, 0.0, 4)
        )
    ),
    "around apply_if_finite": lambda w: w(optax.apply_if_finite(optax.adam(0.1), 3)),
    "inside apply_if_finite": lambda w: optax.apply_if_finite(w(optax.adam(0.1)), 3),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_finite_steps_of_a_composition_are_the_bare_one_s(name):
    compose = COMPOSITIONS[name]
    params, state = run(compose(wrap), GOOD, GOOD, GOOD)
    expected, _ = run(compose(lenient), GOOD, GOOD, GOOD)
    chex.assert_trees_all_equal(params, expected)
    assert scale_of(state) == 2.0**15


@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if "around" in name])
def test_around_a_composition_a_skipped_step_changes_nothing(name):
    optimizer = COMPOSITIONS[name](wrap)
    params, state = run(optimizer, GOOD, BAD, GOOD)
    expected, expected_state = run(optimizer, GOOD, GOOD)
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state.inner_state, expected_state.inner_state)
    assert scale_of(state) == 2.0**14


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_is_a_scan_carry(name):
    optimizer = COMPOSITIONS[name](wrap)
    state = optimizer.init(PARAMS)

    def step(state, _):
        return optimizer.update(GOOD, state, PARAMS)[1], None

    after, _ = jax.lax.scan(step, state, length=3)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_one_scale_is_enough():
    twice = jmp.loss_scaling(optax.chain(jmp.loss_scaling(optax.sgd(0.1))))
    with pytest.raises(ValueError, match="applied twice"):
        twice.init({"w": jnp.ones(2)})
    skipping = jmp.loss_scaling(jmp.skip_nonfinite(optax.sgd(0.1)))
    assert int(skipping.init({"w": jnp.ones(2)}).skipped) == 0


def test_integer_parameters_are_named_as_the_cause(standard_promotion):
    optimizer, params = jmp.loss_scaling(optax.adam(0.1)), {"n": jnp.ones(2, jnp.int32)}
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"mu\['n'\].*exclude it with optax.masked"):
        jax.eval_shape(optimizer.update, params, state, params)


def test_clipping_sees_true_gradients_wherever_it_stands():
    clip, sgd = optax.clip_by_global_norm(0.5), optax.sgd(1.0)
    expected, _ = run(optax.chain(clip, sgd), GOOD)
    for optimizer in (
        jmp.loss_scaling(optax.chain(clip, sgd)),
        optax.chain(clip, jmp.loss_scaling(sgd)),
        optax.chain(jmp.loss_scaling(clip), sgd),
    ):
        params, _ = run(optimizer, GOOD)
        chex.assert_trees_all_equal(params, expected)


def test_inside_masked_and_partition_a_wrapper_judges_its_own_leaves_alone():
    masked = COMPOSITIONS["inside masked"](wrap)
    _, state = run(masked, {**GOOD, "b": jnp.full(2, jnp.inf)})
    assert scale_of(state) == 2.0**15
    _, state = run(masked, BAD)
    assert scale_of(state) == 2.0**14


def test_a_skipped_step_changes_no_bit_of_a_parameter():
    params = {
        "zeros": jnp.float32([-0.0, 0.0]),
        "complex": jnp.asarray(-jnp.complex64(0)),
        "bfloat16": -jnp.zeros(1, "bfloat16"),
    }
    grads = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan, p.dtype), params)
    optimizer = jmp.loss_scaling(optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):
        after, _ = run(optimizer, grads, params=params)
    for name, before in params.items():
        assert after[name].dtype == before.dtype
        assert np.asarray(after[name]).tobytes() == np.asarray(before).tobytes()


def test_apply_if_finite_around_loss_scaling_hides_overflows_until_it_gives_up():
    optimizer = COMPOSITIONS["inside apply_if_finite"](wrap)
    params, state = run(optimizer, BAD, BAD, BAD)
    assert scale_of(state) == 2.0**15
    params, state = run(optimizer, BAD, BAD, BAD, BAD)
    assert scale_of(state) == 2.0**14
    chex.assert_trees_all_equal(params, PARAMS)


def test_around_a_measurement_loss_scaling_returns_the_measured_number():
    """Its update is a scalar, not a tree like the parameters."""
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    optimizer = wrap(optax.measure_with_ema(optax.tree.norm, 0.9))
    norm, state = optimizer.update(params, optimizer.init(params), params)
    assert float(norm) == pytest.approx(5**0.5)
    bad = {**params, "w": jnp.array([1.0, jnp.inf, 1.0])}
    _, skipped = optimizer.update(bad, state, params)
    chex.assert_trees_all_equal(skipped.inner_state, state.inner_state)
    with pytest.raises(TypeError, match=r"no gradient at \['b'\]"):
        optimizer.update({"w": params["w"]}, state, params)


def test_around_lookahead_loss_scaling_accepts_its_pairs_of_parameters():
    optimizer = wrap(optax.lookahead(optax.sgd(0.1), 2, 0.5))
    params = optax.LookaheadParams.init_synced(PARAMS)
    state = optimizer.init(params)
    updates, state = optimizer.update(BAD, state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    _, state = optimizer.update(GOOD, state, params)
    assert (int(state.skipped), scale_of(state)) == (1, 2.0**14)


def test_update_works_without_parameters_where_the_inner_optimizer_does():
    optimizer = jmp.loss_scaling(optax.sgd(1.0))
    updates, _ = optimizer.update(GOOD, optimizer.init(PARAMS))
    chex.assert_trees_all_equal(updates["b"], -GOOD["b"])


@pytest.mark.parametrize("tree", [{}, (), None, {"a": None}])
def test_empty_trees_are_fine(tree):
    optimizer = wrap(optax.adam(0.1))
    updates, state = optimizer.update(tree, optimizer.init(tree), tree)
    assert jax.tree.leaves(updates) == []
    assert state.grads_finite


# ------------------------------------------------------------------------ MultiSteps


@pytest.mark.usefixtures("standard_promotion")
def test_around_multi_steps_an_overflowed_micro_batch_is_left_out_of_its_window():
    multi_steps = optax.MultiSteps(optax.sgd(0.1), 2)
    optimizer = jmp.loss_scaling(multi_steps)
    params, state = run(optimizer, GOOD, BAD, GOOD)
    expected, _ = run(multi_steps, GOOD, GOOD)
    chex.assert_trees_all_equal(params, expected)
    assert int(state.inner_state.gradient_step) == 1
    assert int(state.skipped) == 1


@pytest.mark.usefixtures("standard_promotion")
def test_a_multi_steps_object_gets_the_extra_arguments():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    optimizer = jmp.loss_scaling(optax.MultiSteps(inner, 1))
    params, _ = run(optimizer, GOOD, value=jnp.float32(2.0))
    chex.assert_trees_all_close(params["b"], 2 * GOOD["b"])


@pytest.mark.usefixtures("standard_promotion")
def test_inside_multi_steps_optax_keeps_the_nan_for_ever():
    """A reason to put the wrapper around: this is the behaviour of optax, not ours."""
    optimizer = optax.MultiSteps(jmp.loss_scaling(optax.sgd(0.1)), 2)
    params, state = run(optimizer, BAD, *[GOOD] * 9)
    assert not jmp.all_finite(state.acc_grads)
    chex.assert_trees_all_equal(params, PARAMS)


# ------------------------------------------------------------------- extra arguments


def test_extra_arguments_reach_the_inner_optimizer_and_only_one_that_takes_them():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    # Any names: these two are names of parameters of this library.
    arguments = dict(value=1.5, function=len, inner=2, grads_finite=4)
    optimizer = jmp.loss_scaling(inner)
    optimizer.update(GOOD, optimizer.init(PARAMS), PARAMS, **arguments)
    assert seen["value"] == 1.5
    # The optimizer gets the function in a wrapper that notes whether it is called.
    assert seen["function"].__wrapped__ is len
    assert seen["function"]("abc") == 3
    run(jmp.loss_scaling(optax.sgd(0.1)), GOOD, value=1.5)


def test_on_an_overflow_the_inner_optimizer_gets_only_finite_numbers():
    seen = []

    def update(updates, state, params=None, *, value, n):
        seen.append((updates, value, n))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    run(jmp.loss_scaling(inner), BAD, value=jnp.float32(jnp.nan), n=3)
    assert jmp.all_finite(seen)
    assert seen[0][2] == 3


# ------------------------------------------------------------- states, types, shapes


def test_a_state_whose_dtype_or_weak_type_changes_keeps_its_first_type():
    def update(updates, state, params=None):
        doubled = state["half"].astype(jnp.float32) * 2
        return updates, {"half": doubled, "weak": 2.0, "n": 1}

    inner = optax.GradientTransformation(
        lambda _: {"half": jnp.ones(2, jnp.bfloat16), "weak": 1.0, "n": 0}, update
    )
    optimizer = jmp.loss_scaling(inner)
    _, state = run(optimizer, GOOD)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(PARAMS))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(state.inner_state["half"], [2, 2])


def test_an_inner_state_that_changes_its_structure_is_a_clear_type_error():
    monitored = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"structure of its state.*optax\.monitor"):
        run(jmp.loss_scaling(monitored), GOOD)


def test_an_inner_state_that_changes_its_shape_is_a_clear_type_error():
    inner = optax.GradientTransformation(
        lambda _: {"m": jnp.ones(2)}, lambda u, s, p=None: (u, {"m": jnp.ones(3)})
    )
    with pytest.raises(
        TypeError, match=r"at \['m'\] from float32\[2\] to float32\[3\]"
    ):
        run(jmp.loss_scaling(inner), GOOD)


@pytest.mark.parametrize(
    ("before", "after", "fragment"),
    [
        (0, 0.5, r"at \['m'\] from int32\[\] to float32\[\]"),
        (0.5, 1j, r"from float32\[\] to complex64\[\]"),
        (jnp.array(True), 1, r"from bool\[\] to int32\[\]"),
    ],
)
def test_an_inner_state_that_changes_its_kind_of_number_is_an_error(
    before, after, fragment
):
    inner = optax.GradientTransformation(
        lambda _: {"m": before}, lambda u, s, p=None: (u, {"m": jnp.asarray(after)})
    )
    with pytest.raises(TypeError, match=fragment):
        run(jmp.loss_scaling(inner), GOOD)


def test_a_python_number_may_be_put_into_the_state():
    """As optax's guide does to change a learning rate."""
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = wrap(inner)
    state = optimizer.init(PARAMS)
    state.inner_state.hyperparams["learning_rate"] = 0.5
    updates, after = optimizer.update(GOOD, state, PARAMS)
    chex.assert_trees_all_equal(updates["b"], -0.5 * GOOD["b"])
    assert after.inner_state.hyperparams["learning_rate"].dtype == np.float32
    updates, again = optimizer.update(BAD, after, PARAMS)
    chex.assert_trees_all_equal(again.inner_state, after.inner_state)


def test_an_explicit_moment_dtype_stays():
    optimizer = wrap(optax.adam(0.1, mu_dtype="bfloat16"))
    _, state = run(optimizer, jmp.cast_tree(GOOD, "f16"), params=PARAMS)
    assert state.inner_state[0].mu["w"].dtype == jnp.bfloat16
    assert state.inner_state[0].nu["w"].dtype == np.float32


def test_a_state_may_be_donated_and_the_wrapper_used_again():
    scale = jmp.DynamicLossScale(jnp.float32(8.0))
    optimizer = jmp.loss_scaling(lenient(optax.adam(0.1)), scale)
    step = jax.jit(
        lambda state, grads: optimizer.update(grads, state, PARAMS), donate_argnums=0
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers")
        for _ in range(2):
            state = optimizer.init(PARAMS)
            for grads in (GOOD, BAD):
                _, state = step(state, grads)
            assert scale_of(state) == 4.0
    assert float(scale.loss_scale) == 8.0


def test_one_trace_for_finite_and_overflowed_steps():
    optimizer, traces = wrap(optax.adam(0.1)), []

    @jax.jit
    def step(state, grads):
        traces.append(None)
        return optimizer.update(grads, state, PARAMS)[1]

    state = optimizer.init(PARAMS)
    for i in range(100):
        state = step(state, BAD if i % 9 == 0 else GOOD)
    assert len(traces) == 1
    assert int(state.skipped) == 12


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_the_result_does_not_depend_on_the_promotion_mode(promotion):
    def train():
        optimizer = jmp.loss_scaling(optax.sgd(0.1), jmp.DynamicLossScale(period=2))
        params, state = jmp.cast_tree(PARAMS, "bf16"), None
        state = optimizer.init(params)
        history = []
        for x in (1.0, jnp.nan, 2.0, 3.0):
            loss = lambda p, x=x: jnp.sum(p["w"] ** 2) * jnp.bfloat16(x) + p["b"].sum()
            scale = jmp.get_loss_scale(state)
            value, grads = jmp.value_and_grad(loss, loss_scale=scale)(params)
            updates, state = optimizer.update(grads, state, params)
            history.append((value, updates, state))
        return history

    with jax.numpy_dtype_promotion("standard"):
        expected = train()
    with jax.numpy_dtype_promotion(promotion):
        chex.assert_trees_all_equal(train(), expected)
        chex.assert_trees_all_equal_dtypes(train(), expected)


# ------------------------------------------------------------------- reading a state


def test_get_loss_scale_finds_the_scale_wherever_it_is():
    for compose in COMPOSITIONS.values():
        state = compose(wrap).init(PARAMS)
        assert isinstance(jmp.get_loss_scale(state), jmp.DynamicLossScale)
    skipping = jmp.skip_nonfinite(optax.adam(0.1)).init(PARAMS)
    assert jmp.get_loss_scale(skipping) == jmp.NoOpLossScale()


def test_optax_tree_get_finds_the_scale_too():
    state = optax.chain(optax.clip(1.0), wrap(optax.adam(0.1))).init(PARAMS)
    assert float(optax.tree.get(state, "loss_scale").loss_scale) == 2.0**15


def test_a_state_without_a_scale_is_an_error_that_lists_its_leaves():
    state = {"opt": optax.adam(0.1).init(PARAMS), "step": 0}
    with pytest.raises(ValueError, match=r"\['opt'\]\[0\]\.mu\['w'\].*loss_scaling"):
        jmp.get_loss_scale(state)
    with pytest.raises(ValueError, match="a tree without leaves"):
        jmp.get_loss_scale(None)


def test_a_state_with_two_scales_is_an_error_that_lists_them():
    two = optax.partition(
        {"one": wrap(optax.sgd(0.1)), "two": jmp.skip_nonfinite(optax.sgd(0.1))},
        {"w": "one", "b": "two"},
    ).init(PARAMS)
    with pytest.raises(
        ValueError, match=r"(?s)found 2.*\['one'\].*Dynamic.*\['two'\].*NoOp"
    ):
        jmp.get_loss_scale(two)
    state = wrap(optax.sgd(0.1)).init(PARAMS)
    nested = state._replace(inner_state=(state,))
    with pytest.raises(ValueError, match=r"(?s)the root.*\.inner_state\[0\]"):
        jmp.get_loss_scale(nested)


def test_set_loss_scale_replaces_the_scale_wherever_it_is_and_nothing_else():
    for compose in COMPOSITIONS.values():
        optimizer = compose(wrap)
        _, state = run(optimizer, GOOD)
        lower = dataclasses.replace(jmp.get_loss_scale(state), loss_scale=4.0)
        lowered = jmp.set_loss_scale(state, lower)
        chex.assert_trees_all_equal_shapes_and_dtypes(lowered, state)
        assert scale_of(lowered) == 4.0
        restored = jmp.set_loss_scale(lowered, jmp.get_loss_scale(state))
        chex.assert_trees_all_equal(restored, state)
    other_kind = jmp.set_loss_scale(state, jmp.StaticLossScale(8.0))
    assert jmp.get_loss_scale(other_kind) == jmp.StaticLossScale(8.0)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_set_loss_scale_reaches_every_state_of_a_stack(hysteresis):
    scale = jmp.DynamicLossScale(16.0, hysteresis=hysteresis)
    optimizer = jmp.loss_scaling(optax.sgd(0.1), scale)
    states = jax.vmap(optimizer.init)(jnp.ones((3, 2)))
    found = jmp.get_loss_scale(states)
    each = jmp.DynamicLossScale(8.0, hysteresis=hysteresis)
    for lower, expected in (
        (each, [8, 8, 8]),
        (dataclasses.replace(found, loss_scale=8.0), [8, 8, 8]),
        (dataclasses.replace(found, loss_scale=jnp.array([4.0, 2, 8])), [4, 2, 8]),
    ):
        changed = jmp.set_loss_scale(states, lower)
        chex.assert_trees_all_equal_shapes_and_dtypes(changed, states)
        scales = jmp.get_loss_scale(changed).loss_scale
        np.testing.assert_array_equal(scales, expected)
        grads = jnp.full((3, 2), jnp.inf)
        _, after = jax.vmap(optimizer.update)(grads, changed)
        halved = 2 if hysteresis == 1 else 1
        scales = jmp.get_loss_scale(after).loss_scale
        np.testing.assert_array_equal(scales, np.array(expected) / halved)
    static = jmp.set_loss_scale(states, jmp.StaticLossScale(8.0))
    assert jmp.get_loss_scale(static) == jmp.StaticLossScale(8.0)


def test_set_loss_scale_has_the_errors_of_get_loss_scale():
    scale = jmp.DynamicLossScale()
    with pytest.raises(ValueError, match="No LossScalingState"):
        jmp.set_loss_scale(optax.sgd(0.1).init(PARAMS), scale)
    nested = optax.chain(wrap(optax.sgd(0.1)), wrap(optax.sgd(0.1))).init(PARAMS)
    with pytest.raises(ValueError, match="found 2"):
        jmp.set_loss_scale(nested, scale)
    with pytest.raises(TypeError, match="Expected a LossScale, got float"):
        jmp.set_loss_scale(wrap(optax.sgd(0.1)).init(PARAMS), 8.0)


def test_a_scale_that_was_set_may_be_donated():
    optimizer = wrap(optax.sgd(0.1))
    scale = jmp.DynamicLossScale(jnp.float32(8.0))
    state = jmp.set_loss_scale(optimizer.init(PARAMS), scale)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers")
        jax.jit(lambda s: optimizer.update(BAD, s, PARAMS)[1], donate_argnums=0)(state)
    assert float(scale.loss_scale) == 8.0


def test_check_loss_scale_raises_when_too_many_steps_in_a_row_were_skipped():
    optimizer = optax.chain(wrap(optax.sgd(0.1)))
    _, state = run(optimizer, BAD, GOOD, BAD, BAD, BAD)
    jmp.check_loss_scale(state, max_consecutive_skips=3)
    with pytest.raises(jmp.LossScaleError, match=r"last 3 steps.*in all: 4.*\[0\]"):
        jmp.check_loss_scale(state, max_consecutive_skips=2)
    assert issubclass(jmp.LossScaleError, ValueError)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        jmp.check_loss_scale(state, max_consecutive_skips=-1)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(jmp.check_loss_scale)(state)
    with pytest.raises(ValueError, match="No LossScalingState"):
        jmp.check_loss_scale(optax.sgd(0.1).init(PARAMS))


def test_check_loss_scale_names_the_cause_that_the_scale_shows():
    def message(loss_scale, *steps, around=lambda state: state):
        _, state = run(jmp.loss_scaling(optax.sgd(0.1), loss_scale), *steps)
        with pytest.raises(jmp.LossScaleError) as error:
            jmp.check_loss_scale(around(state), len(steps) - 1)
        return str(error.value)

    assert "(a) parameters or inputs" in message(jmp.DynamicLossScale(8.0), BAD)
    assert "(a) parameters or inputs" in message(jmp.NoOpLossScale(), BAD)
    static = message(jmp.StaticLossScale(8.0), BAD)
    assert "(a) a StaticLossScale never backs off: lower it" in static
    assert "(b) parameters or inputs" in static
    # One loss and two optimizers, a scale each: that of the loss stays where it is.
    _, of_the_loss = run(jmp.loss_scaling(optax.sgd(0.1)), GOOD)
    found = message(
        jmp.DynamicLossScale(2.0),
        *[BAD] * 3,
        around=lambda state: {"one": of_the_loss, "two": state},
    )
    assert "at ['two'], and its loss scale is 1.0" in found
    assert "(a) this scale is at its minimum" in found
    assert "another scale may multiply the loss (others here: ['one'])" in found
    assert "one loss_scaling around optax.partition" in found


@pytest.mark.usefixtures("standard_promotion")
def test_check_loss_scale_counts_the_first_overflow_inside_of_multi_steps():
    wrong = optax.MultiSteps(jmp.loss_scaling(optax.sgd(0.1)), 4)
    _, state = run(wrong, GOOD)
    jmp.check_loss_scale({"opt": state})
    _, state = run(wrong, GOOD, BAD)
    with pytest.raises(
        jmp.LossScaleError, match=r"at \['opt'\].*loss_scaling\(optax\.MultiSteps\("
    ):
        jmp.check_loss_scale({"opt": state})
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(jmp.check_loss_scale)(state)
    _, state = run(jmp.loss_scaling(optax.MultiSteps(optax.sgd(0.1), 4)), GOOD, BAD)
    jmp.check_loss_scale(state)


ZERO = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}


def test_check_loss_scale_names_a_loss_that_was_differentiated_without_its_scale():
    optimizer = optax.chain(wrap(optax.sgd(0.1)))
    _, state = run(optimizer, GOOD, ZERO, ZERO, ZERO)
    assert int(state[0].consecutive_zero) == 3
    jmp.check_loss_scale(state, max_consecutive_skips=3)
    with pytest.raises(jmp.LossScaleError, match=r"last 3 steps were zero.*jax\.grad"):
        jmp.check_loss_scale(state, max_consecutive_skips=2)
    for steps, n in (((ZERO, GOOD), 0), ((ZERO, BAD), 0), ((ZERO, ZERO, BAD, ZERO), 1)):
        assert int(run(optimizer, *steps)[1][0].consecutive_zero) == n
    # Without a scale, zeros may be right: of a hinge loss, for example.
    _, state = run(jmp.skip_nonfinite(optax.sgd(0.1)), ZERO, ZERO)
    jmp.check_loss_scale(state, max_consecutive_skips=1)


def test_a_float16_loss_and_plain_jax_grad_are_found_by_check_loss_scale():
    optimizer = jmp.loss_scaling(optax.sgd(1e-3))

    @jmp.autocast(compute_dtype="float16")
    def loss_fn(w, x):
        return 1e-6 * jnp.mean(x @ w)

    w, x = jnp.ones((8, 8)), jnp.full((8, 8), 1e-3)
    state = optimizer.init(w)
    for _ in range(3):
        _, state = optimizer.update(jax.grad(loss_fn)(w, x), state, w)
    with pytest.raises(jmp.LossScaleError, match="differentiated without its scale"):
        jmp.check_loss_scale(state, 2)
    state = optimizer.init(w)
    for _ in range(3):
        grad_fn = jmp.grad(loss_fn, loss_scale=jmp.get_loss_scale(state))
        _, state = optimizer.update(grad_fn(w, x), state, w)
    jmp.check_loss_scale(state, 2)


def test_check_loss_scale_finds_apply_if_finite_around_it_at_the_first_overflow():
    around = optax.apply_if_finite(wrap(optax.sgd(0.1)), 3)
    inside = wrap(optax.apply_if_finite(optax.sgd(0.1), 3))
    jmp.check_loss_scale(run(around, GOOD)[1])
    jmp.check_loss_scale(run(inside, GOOD, BAD)[1])
    with pytest.raises(jmp.LossScaleError, match=r"overflow \(1 so far\).*never backs"):
        jmp.check_loss_scale(run(around, GOOD, BAD)[1])


DTYPES = ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_dtype_are_judged_by_their_largest_number(dtype):
    largest = float(jnp.finfo(dtype).max)
    for number, expected in (
        (0.0, (True, True)),
        (-0.0, (True, True)),
        (float(jnp.finfo(dtype).tiny), (True, False)),
        (-largest, (True, False)),
        (jnp.nan, (False, False)),
        (-jnp.inf, (False, False)),
    ):
        grads = {"w": jnp.zeros(3), "v": jnp.zeros((2, 2), dtype).at[1, 0].set(number)}
        assert tuple(map(bool, judged(grads))) == expected
    if dtype == "complex64":
        both = jnp.full(2, complex(largest, -largest), dtype)
        assert bool(judged(both).finite), "its absolute value would be an infinity"


def test_trees_without_numbers_are_finite_and_have_no_zero_gradients():
    for tree in ({}, None, jnp.zeros(2, jnp.int32), ["name"]):
        assert tuple(map(bool, judged(tree))) == (True, False)


def test_a_loss_scale_can_be_formatted():
    _, state = run(jmp.loss_scaling(optax.sgd(0.1)), GOOD)
    scale = jmp.get_loss_scale(state)
    assert f"{scale:.0f} {scale:.1e}" == "32768 3.3e+04"
    assert f"{scale}" == str(scale)
    assert f"{jmp.NoOpLossScale():.1f}" == "1.0"


@pytest.mark.usefixtures("standard_promotion")
def test_one_scale_around_a_partition_serves_one_loss_and_two_optimizers():
    """The pattern of the docstring: an overflow anywhere skips both and backs off."""
    labels = {"w": "slow", "b": "fast"}
    optimizer = jmp.loss_scaling(
        optax.partition({"slow": optax.sgd(1e-4), "fast": optax.adam(1e-3)}, labels)
    )
    for name in PARAMS:
        bad = {**GOOD, name: jnp.full_like(GOOD[name], jnp.inf)}
        params, state = run(optimizer, bad)
        chex.assert_trees_all_equal(params, PARAMS)
        assert scale_of(state) == 2.0**14


# --------------------------------------------------------------------- without skips


@pytest.mark.parametrize("scale", [jmp.StaticLossScale(8.0), jmp.NoOpLossScale()])
def test_without_skips_overflowed_gradients_are_applied_and_counted(scale):
    bare = lenient(optax.adam(0.1))
    optimizer = jmp.loss_scaling(bare, scale, skip=False)
    bad = {"w": jnp.full((2, 2), 3.0).at[0, 0].set(jnp.inf), "b": jnp.full(2, 4.0)}
    params, state = run(optimizer, GOOD, bad, GOOD)
    expected, inner_state = run(bare, GOOD, bad, GOOD)
    chex.assert_trees_all_equal(params, expected)
    chex.assert_trees_all_equal(state.inner_state, inner_state)
    assert np.isnan(params["w"][0, 0])
    assert bool(jnp.all(params["b"] != PARAMS["b"]))
    assert state.loss_scale == scale
    assert (int(state.skipped), int(state.consecutive_skipped)) == (1, 0)
    assert not run(optimizer, bad)[1].grads_finite
    chex.assert_trees_all_equal_shapes_and_dtypes(state, optimizer.init(PARAMS))


@pytest.mark.parametrize("scale", [None, jmp.DynamicLossScale()])
def test_without_skips_a_scale_that_changes_is_an_error(scale):
    with pytest.raises(
        ValueError, match=r"skip=False, got DynamicLossScale.*StaticLossScale\("
    ):
        jmp.loss_scaling(optax.sgd(0.1), scale, skip=False)


# -------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("grads", "fragment"),
    [
        ((jnp.ones([]), GOOD), r"got a pair.*loss, grads = value_and_grad"),
        ((GOOD, "aux"), r"got a pair.*loss, grads = value_and_grad"),
        ({"w": GOOD["w"]}, r"no gradient at \['b'\]: differentiate.*\nGradients: "),
        ({**GOOD, "c": jnp.ones(1)}, r"no parameter at \['c'\]"),
        ([GOOD["w"]], r"no gradient at \['b'\], \['w'\] and no parameter at \[0\]"),
    ],
)
def test_gradients_of_another_structure_are_an_error_that_names_the_place(
    grads, fragment
):
    for inner in (optax.sgd(0.1), optax.adam(0.1)):
        optimizer = wrap(inner)
        with pytest.raises(TypeError, match=fragment):
            optimizer.update(grads, optimizer.init(PARAMS), PARAMS)


def test_gradients_may_be_none_for_leaves_that_are_not_trained():
    params = {**PARAMS, "activation": jnp.tanh}
    grads = {**GOOD, "activation": None}
    optimizer = jmp.loss_scaling(optax.sgd(1.0))
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), params)
    chex.assert_trees_all_equal(updates["b"], -GOOD["b"])


def test_an_extra_argument_that_is_missing_is_named():
    optimizer = wrap(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    state = optimizer.init(PARAMS)
    with pytest.raises(TypeError, match="keyword-only argument: 'value'") as caught:
        optimizer.update(GOOD, state, PARAMS)
    assert any("params, value=loss)" in note for note in caught.value.__notes__)
    optimizer.update(GOOD, state, PARAMS, value=jnp.float32(1.0))


def test_an_axis_that_is_not_mapped_is_named():
    optimizer = jmp.skip_nonfinite(optax.sgd(0.1), axis_name="data")
    state = optimizer.init(PARAMS)
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(
            NameError, match=r"axis_name='data'.*not a mapped.*jit alone, leave"
        ):
            update(GOOD, state, PARAMS)


@pytest.mark.parametrize(
    ("inner", "fragment"),
    [
        (optax.adam, r"got adam\. Did you mean adam\(\.\.\.\)"),
        (optax.MultiSteps, r"Did you mean MultiSteps\(\.\.\.\)"),
        (None, "got NoneType"),
        (0.1, "got float"),
    ],
)
def test_an_argument_that_is_no_transformation_is_an_error_when_it_is_passed(
    inner, fragment
):
    with pytest.raises(TypeError, match=fragment):
        jmp.loss_scaling(inner)


class Unregistered(jmp.LossScale):
    def scale(self, tree):
        return tree

    unscale = scale

    def adjust(self, grads_finite):
        return self


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        (128.0, r"got float.*StaticLossScale\(128\.0\)"),
        (jmp.DynamicLossScale, r"did you mean DynamicLossScale\(\)\?"),
        (Unregistered(), "Unregistered is not registered as a pytree"),
    ],
)
def test_a_wrong_loss_scale_is_an_error(bad, fragment):
    with pytest.raises(TypeError, match=fragment):
        jmp.loss_scaling(optax.sgd(0.1), bad)


def test_a_wrong_state_is_an_error():
    optimizer = wrap(optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"Expected the LossScalingState.*got dict"):
        optimizer.update(GOOD, {"inner_state": ()}, PARAMS)


# ------------------------------------------------------------- two networks, devices


def test_two_losses_with_two_optimizers_have_a_scale_each():
    generator = jmp.loss_scaling(optax.sgd(0.1), jmp.DynamicLossScale(2.0**4, period=2))
    critic = jmp.loss_scaling(optax.sgd(0.1), jmp.DynamicLossScale(2.0**30))

    def losses(g, c, x):
        fake = g * x
        return c * fake, (c * x - 1) ** 2 - c * fake

    def step(g, c, g_state, c_state, x):
        _, g_grads = jmp.value_and_grad(
            lambda g: losses(g, c, x)[0], loss_scale=jmp.get_loss_scale(g_state)
        )(g)
        _, c_grads = jmp.value_and_grad(
            lambda c: losses(g, c, x)[1].astype(jnp.float16),
            loss_scale=jmp.get_loss_scale(c_state),
        )(c)
        g_update, g_state = generator.update(g_grads, g_state, g)
        c_update, c_state = critic.update(c_grads, c_state, c)
        return g + g_update, c + c_update, g_state, c_state

    g, c = jnp.float32(1.0), jnp.float32(0.5)
    g_state, c_state = generator.init(g), critic.init(c)
    for _ in range(4):
        g, c, g_state, c_state = jax.jit(step)(g, c, g_state, c_state, jnp.float32(2))
    assert (scale_of(g_state), int(g_state.skipped)) == (2.0**6, 0)
    assert (scale_of(c_state), int(c_state.skipped)) == (2.0**26, 4)
    assert c == 0.5


def test_sharded_parameters_stay_sharded_and_all_skip():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    split = NamedSharding(mesh, P("data"))
    params = jax.device_put(PARAMS, split)
    optimizer = wrap(optax.adam(0.1))
    state = jax.jit(optimizer.init)(params)
    one_shard_bad = {**GOOD, "b": jnp.array([1.0, jnp.inf])}
    step = jax.jit(optimizer.update)
    for grads, skipped in ((GOOD, 0), (one_shard_bad, 1)):
        updates, state = step(jax.device_put(grads, split), state, params)
        assert int(state.skipped) == skipped
        assert bool(updates["w"].any()) == (skipped == 0)
        assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(split, 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_one_shard_s_overflow_makes_all_replicas_skip(check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params = {"w": jnp.ones(2)}
    optimizers = {
        name: jmp.loss_scaling(optax.sgd(0.1), axis_name=name)
        for name in ("data", None)
    }

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    def skips(params, x):
        grads = {"w": x[0]}
        found = {}
        for name, optimizer in optimizers.items():
            updates, state = optimizer.update(grads, optimizer.init(params), params)
            found[str(name)] = ~state.grads_finite[None], (updates["w"] == 0)[None]
        return found

    x = jnp.array([[1.0, 2.0], [jnp.inf, 1.0]])
    found = jax.jit(skips)(params, x)
    np.testing.assert_array_equal(found["data"][0], [True, True])
    np.testing.assert_array_equal(found["data"][1], [[True, True], [True, True]])
    np.testing.assert_array_equal(found["None"][0], [False, True])


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_gradients_are_zero_if_those_of_all_devices_are(check_vma):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    optimizer = jmp.loss_scaling(optax.sgd(0.1), axis_name="data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def count(params, x):
        _, state = optimizer.update({"w": x[0]}, optimizer.init(params), params)
        return state.consecutive_zero

    params = {"w": jnp.ones(2)}
    assert int(count(params, jnp.array([[0.0, 0.0], [0.0, 1.0]]))) == 0
    assert int(count(params, jnp.zeros((2, 2)))) == 1


# ------------------------- what an optimizer computes by itself overflows by itself


@pytest.mark.usefixtures("standard_promotion")
def test_an_overflow_in_what_an_optimizer_computes_by_itself_skips_the_step():
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    sam = optax.contrib.sam(optax.sgd(1e-6), adversary, opaque_mode=True)
    tx = jmp.loss_scaling(sam, jmp.DynamicLossScale())
    params = {"w": jnp.full((2, 3), 0.1)}
    # The gradient is 0.15 * batch, or 0.27 after SAM's step.
    fine, bad = jnp.full(2, 0.5), jnp.full(2, 10.0)

    @jax.jit
    def step(params, state, batch):
        @functools.partial(jmp.autocast, compute_dtype="float16")
        def fun(params):
            y = (params["w"] - 0.05) @ jnp.full(3, 2.0) / 2
            return 0.5 * jnp.sum(batch * y**2)

        def gradient(params, i=0):
            return jmp.grad(fun, loss_scale=state.loss_scale)(params)

        grads = gradient(params)
        updates, state = tx.update(grads, state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), state, grads

    state = tx.init(params)
    for batch, is_fine in ((fine, True), (bad, False), (fine, True)):
        before = params
        params, state, grads = step(params, state, batch)
        assert jmp.all_finite((params, state, grads))
        assert bool(state.grads_finite) is is_fine
        assert jnp.array_equal(params["w"], before["w"]) is not is_fine


def test_an_error_says_what_the_caller_meant():
    for scale in (1024.0, 2):
        with pytest.raises(TypeError, match=rf"pass StaticLossScale\({scale}\) or"):
            jmp.loss_scaling(optax.sgd(0.1), scale)
    with pytest.raises(TypeError, match="Pass the transformation itself first"):
        jmp.loss_scaling(jmp.DynamicLossScale(), optax.sgd(0.1))
    of_two = jmp.value_and_grad(lambda w: (w, w), loss_scale=jmp.NoOpLossScale())
    with pytest.raises(TypeError, match="tuple of 2: pass has_aux=True"):
        of_two(jnp.float32(1))
