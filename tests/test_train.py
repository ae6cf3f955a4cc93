import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import OPTIMIZERS, lenient

import jmp_lite as jmp

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 3)}
X = jnp.arange(12.0).reshape(4, 3) / 6


def loss_fn(params, model_state, batch, rng):
    """A loss whose model state counts and averages what it sees, as BatchNorm does."""
    noise = 0.0 if rng is None else 0.1 * jax.random.normal(rng)
    y = batch @ params["w"]
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch)
    new_state = {"mean": mean, "seen": model_state["seen"] + 1}
    return jnp.mean((y - 1 + noise) ** 2), (new_state, {"y": y})


def start():
    return {"mean": jnp.float32(0), "seen": jnp.int32(0)}


def test_finite_steps_are_those_written_by_hand():
    optimizer = lenient(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    init, step = jmp.build_train_step(
        loss_fn, optimizer, loss_scale=jmp.DynamicLossScale(period=2), ema=0.9
    )
    key = jax.random.key(0)
    state = init(PARAMS, start(), key)
    params, model_state, ema = PARAMS, start(), PARAMS
    opt_state = optimizer.init(params)
    for i in range(5):
        state, metrics = jax.jit(step)(state, X)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        rng = jax.random.fold_in(key, i)
        (loss, (model_state, _)), grads = grad_fn(params, model_state, X, rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: 0.9 * e + (1 - 0.9) * p, ema, params)
        chex.assert_trees_all_close(metrics["loss"], loss, rtol=1e-6)
        chex.assert_trees_all_close(metrics["grad_norm"], optax.tree.norm(grads))
        chex.assert_trees_all_close(state.params, params, rtol=1e-6)
        chex.assert_trees_all_close(state.model_state, model_state, rtol=1e-6)
        chex.assert_trees_all_close(state.ema, ema, rtol=1e-6)
    assert (int(state.step), int(metrics["skipped"])) == (5, 0)
    assert float(metrics["loss_scale"]) == 2.0**17
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**17


def bad_gradient(x):
    return x.at[0, 0].set(jnp.inf)


def bad_loss_with_good_gradients(params, model_state, batch, rng):
    loss, aux = loss_fn(params, model_state, jnp.nan_to_num(batch, posinf=0.0), rng)
    return loss + jax.lax.stop_gradient(0 * jnp.sum(batch)), aux


@pytest.mark.parametrize("fun", [loss_fn, bad_loss_with_good_gradients])
def test_a_skipped_step_changes_no_state_bit_for_bit(fun):
    init, step = jmp.build_train_step(
        fun,
        lenient(optax.adam(optax.linear_schedule(0.1, 0.0, 10))),
        loss_scale=jmp.DynamicLossScale(),
        ema=0.99,
    )
    step = jax.jit(step)
    before, _ = step(init(PARAMS, start(), jax.random.key(1)), X)
    after, metrics = step(before, bad_gradient(X))
    for name in ("params", "model_state", "ema", "step"):
        chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))
    chex.assert_trees_all_equal(
        after.opt_state.inner_state, before.opt_state.inner_state
    )
    assert not metrics["grads_finite"]
    assert (int(metrics["skipped"]), int(after.step)) == (1, 1)
    assert float(after.opt_state.loss_scale.loss_scale) == 2.0**14
    final, metrics = step(after, X)
    assert metrics["grads_finite"]
    assert int(final.step) == 2


def test_the_step_after_a_skipped_one_draws_new_random_numbers():
    def fun(params, model_state, batch, rng):
        drawn = jax.random.uniform(rng)
        return jnp.sum(params["w"] * batch), (model_state, drawn)

    init, step = jmp.build_train_step(fun, optax.sgd(0.1))
    state = init(PARAMS, rng=jax.random.key(0))
    drawn = []
    for x in (1.0, jnp.nan, 1.0):
        state, metrics = step(state, x)
        drawn.append(float(metrics["aux"]))
    assert len(set(drawn)) == 3


def test_16_bit_parameters_are_rounded_once_and_ema_stays_float32():
    # Just past the middle between 1 and its neighbour: an update that was rounded to
    # bfloat16 before the sum would be the middle itself, and round to 1.
    init, step = jmp.build_train_step(
        lambda params, s, x, r: (jnp.sum(params["w"]) * x, (s, None)),
        optax.sgd(2.0**-9 + 2.0**-20),
        ema=0.99,
    )
    state, _ = step(init({"w": jnp.ones(2, jnp.bfloat16)}), jnp.bfloat16(1))
    assert state.params["w"].dtype == jnp.bfloat16
    assert float(state.params["w"][0]) == 1 - 2.0**-8
    assert state.ema["w"].dtype == np.float32


@pytest.mark.parametrize("promotion", ["standard", "strict"])
def test_it_is_traced_once_donated_and_works_in_strict_promotion(promotion):
    traces = []

    def counted(*args):
        traces.append(None)
        return loss_fn(*args)

    with jax.numpy_dtype_promotion(promotion):
        init, step = jmp.build_train_step(
            counted, optax.sgd(0.1), loss_scale=jmp.DynamicLossScale(), ema=0.5
        )
        step = jax.jit(step, donate_argnums=0)
        state = init({"w": jnp.array([1.0, 2.0, 3.0])}, {"mean": 0.0, "seen": 0}, None)
        for i in range(6):
            state, _ = step(state, X if i % 3 else bad_gradient(X))
    assert len(traces) == 1
    assert int(state.step) == 4


def test_it_is_a_scan_body():
    init, step = jmp.build_train_step(
        loss_fn, lenient(optax.adam(0.1)), loss_scale=jmp.DynamicLossScale()
    )
    state = init(PARAMS, start(), jax.random.key(0))
    after, metrics = jax.lax.scan(step, state, jnp.stack([X, bad_gradient(X), X]))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    np.testing.assert_array_equal(metrics["grads_finite"], [True, False, True])


def test_without_a_scale_it_skips_all_the_same():
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1))
    state = init(PARAMS, start())
    after, metrics = step(state, bad_gradient(X))
    chex.assert_trees_all_equal(after.params, PARAMS)
    assert float(metrics["loss_scale"]) == 1.0


def test_bad_input_is_refused_at_the_door():
    build = functools.partial(jmp.build_train_step, loss_fn)
    with pytest.raises(TypeError, match="Did you mean adam"):
        build(optax.adam)
    with pytest.raises(TypeError, match="Expected a LossScale, got float"):
        build(optax.sgd(0.1), loss_scale=128.0)
    with pytest.raises(ValueError, match=r"decay in \[0, 1\) for ema, got 1"):
        build(optax.sgd(0.1), ema=1.0)
    init, _ = build(optax.chain(jmp.loss_scaling(optax.sgd(0.1))))
    with pytest.raises(ValueError, match="carries a loss scale already"):
        init(PARAMS)
    init, step = build(optax.sgd(0.1))
    with pytest.raises(TypeError, match="Expected the TrainingState of init, got dict"):
        step(PARAMS, X)


@pytest.mark.parametrize(
    ("start", "fragment"),
    [
        (None, r"(?s)model_state\)\.\nGiven: .*None.*'mean'"),
        (
            {"mean": jnp.ones(4, jnp.float16)},
            r"float16\[4\] at \.model_state\['mean'\]",
        ),
        ({"mean": jnp.ones(3)}, r"float32\[3\] at \.model_state\['mean'\]"),
    ],
)
def test_a_model_state_that_changes_its_type_is_refused(start, fragment):
    fun = lambda params, *_: (params["w"].sum(), ({"mean": jnp.ones(4)}, None))
    init, step = jmp.build_train_step(fun, optax.sgd(0.1))
    with pytest.raises(TypeError, match=fragment):
        step(init(PARAMS, start), X)


@pytest.mark.parametrize(
    "result", [1.0, (1.0, None), (1.0, {"a": 1, "b": 2}), (1.0, {}, None)]
)
def test_a_loss_function_that_returns_something_else_is_told_what(result):
    init, step = jmp.build_train_step(lambda *args: result, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"\(loss, \(model_state, aux\)\).*got PyTree"):
        step(init(PARAMS), X)


@pytest.mark.parametrize("name", ["contrib.prodigy", "contrib.dog", "adam"])
def test_a_fresh_state_shares_no_buffer_and_may_be_donated(name):
    optimizer = lenient(OPTIMIZERS[name].make())
    init, step = jmp.build_train_step(loss_fn, optimizer, ema=0.9)
    step = jax.jit(step, donate_argnums=0)
    model_state, key = start(), jax.random.key(0)
    for _ in range(2):
        state, _ = step(init(PARAMS, model_state, key), X)
    assert jmp.all_finite((PARAMS, model_state, state.params))
    jax.random.uniform(key)


@pytest.mark.parametrize("name", ["polyak_sgd", "contrib.momo"])
def test_optimizers_that_ask_for_the_loss_get_it(name):
    init, step = jmp.build_train_step(loss_fn, lenient(OPTIMIZERS[name].make()))
    state, first = step(init(PARAMS, start()), X)
    for _ in range(3):
        state, last = step(state, X)
    assert last["loss"] < first["loss"]
