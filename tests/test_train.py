import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import live_equations, products, relative_error
from jax.sharding import PartitionSpec as P
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
    scale = jmp.DynamicLossScale(period=2)
    init, step = jmp.build_train_step(
        loss_fn, optimizer, "O0", loss_scale=scale, ema=0.9
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


@pytest.mark.filterwarnings("ignore:Parameters have 16 bits")
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
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"to be 1 or more, got {bad!r}"):
            build(optax.sgd(0.1), accumulate=bad)
    with pytest.raises(ValueError, match="Did you mean 'mixed'"):
        build(optax.sgd(0.1), "mixd")
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


# ---------------------------------------------------------------------------- rules


def mlp_loss(params, model_state, batch, rng):
    x, y = batch
    h = jnp.tanh(x @ params["w1"])
    if rng is not None:
        h = h * jax.random.bernoulli(rng, 0.9, h.shape) / 0.9
    return jnp.mean((h @ params["w2"] - y) ** 2), (model_state, None)


def mlp_start():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((8, 16), (16, 1), (32, 8), (32, 1))
    w1, w2, x, y = map(jax.random.normal, keys, shapes)
    return {"w1": w1 / 3, "w2": w2 / 4}, (x, y)


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ("mixed", "bfloat16"),
        ("O0", "float32"),
        ("O1", "bfloat16"),
        ("O2", "bfloat16"),
        ("O3", "bfloat16"),
        (jmp.get_rules("mixed", "float16"), "float16"),
        (jmp.get_rules("mixed").full("dot_general"), "float32"),
    ],
)
def test_the_loss_is_computed_as_the_rules_say_and_the_rest_in_float32(rules, dtype):
    params, batch = mlp_start()
    init, step = jmp.build_train_step(mlp_loss, lenient(optax.adam(1e-2)), rules)
    state = init(params)
    found = products(live_equations(step, state, batch))
    assert set(found) == {(dtype,) * 3}
    after, metrics = jax.jit(step)(state, batch)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {np.dtype("float32")}
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    for _ in range(20):
        after, last = jax.jit(step)(after, batch)
    assert last["loss"] < 0.7 * metrics["loss"]


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        ("float16", jmp.DynamicLossScale),
        ("bfloat16", jmp.NoOpLossScale),
        ("float32", jmp.NoOpLossScale),
    ],
)
def test_the_loss_scale_is_what_the_compute_dtype_needs(compute, kind):
    params, batch = mlp_start()
    rules = jmp.get_rules("mixed", compute)
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), rules)
    assert type(jmp.get_loss_scale(init(params))) is kind
    init, _ = jmp.build_train_step(mlp_loss, optax.sgd(0.1), "O0")
    assert type(jmp.get_loss_scale(init(params))) is jmp.NoOpLossScale
    asked = jmp.StaticLossScale(8)
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), rules, loss_scale=asked)
    assert float(jax.jit(step)(init(params), batch)[1]["loss_scale"]) == 8


def test_float16_without_a_loss_scale_is_warned_of():
    params, _ = mlp_start()

    def start(compute):
        rules = jmp.get_rules("mixed", compute)
        scale = jmp.NoOpLossScale()
        init, _ = jmp.build_train_step(
            mlp_loss, optax.sgd(0.1), rules, loss_scale=scale
        )
        return init(params)

    with pytest.warns(UserWarning, match=r"float16 without a loss scale.*6\.0e-08"):
        start("float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start("bfloat16")


# --------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("times", [2, 4])
def test_micro_batches_give_the_step_of_the_whole_batch(times):
    params, batch = mlp_start()
    states = []
    for accumulate in (1, times):
        init, step = jmp.build_train_step(
            mlp_loss,
            lenient(optax.adam(1e-2)),
            "O0",
            accumulate=accumulate,
            ema=0.9,
        )
        state = init(params)
        for _ in range(3):
            state, metrics = jax.jit(step)(state, batch)
        states.append((state.params, state.ema, metrics["loss"], metrics["grad_norm"]))
    chex.assert_trees_all_close(*states, rtol=1e-5)


def test_model_state_goes_from_one_micro_batch_to_the_next():
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), "O0", accumulate=2)
    state, metrics = jax.jit(step)(init(PARAMS, start(), jax.random.key(0)), X)
    assert int(state.model_state["seen"]) == 2
    means = [float(X[:2].mean()), float(X[2:].mean())]
    expected = 0.9 * 0.1 * means[0] + 0.1 * means[1]
    assert float(state.model_state["mean"]) == pytest.approx(expected)
    assert metrics["aux"]["y"].shape == (2, 2)


def test_each_micro_batch_draws_its_own_random_numbers():
    def fun(params, model_state, batch, rng):
        drawn = jax.random.uniform(rng)
        return jnp.sum(params["w"]) * jnp.mean(batch), (model_state, drawn)

    init, step = jmp.build_train_step(fun, optax.sgd(0.1), accumulate=4)
    state = init(PARAMS, rng=jax.random.key(0))
    state, first = step(state, X)
    _, second = step(state, X)
    drawn = np.concatenate([first["aux"], second["aux"]])
    assert len(set(drawn.tolist())) == 8


def test_one_micro_batch_that_overflows_skips_the_whole_window():
    init, step = jmp.build_train_step(
        loss_fn, optax.sgd(0.1), loss_scale=jmp.DynamicLossScale(), accumulate=4
    )
    before = init(PARAMS, start(), jax.random.key(0))
    for i in range(4):
        after, metrics = jax.jit(step)(before, X.at[i, 0].set(jnp.inf))
        assert not metrics["grads_finite"]
        for name in ("params", "model_state", "step"):
            chex.assert_trees_all_equal(getattr(after, name), getattr(before, name))


@pytest.mark.filterwarnings("ignore:Parameters have 16 bits")
def test_gradients_of_16_bit_parameters_are_added_up_in_float32():
    """Ones beside a first gradient of 512: in bfloat16 they would all be lost."""

    def fun(params, model_state, batch, rng):
        return jnp.sum(params["w"] * batch.astype(params["w"].dtype)), (None, None)

    init, step = jmp.build_train_step(fun, optax.sgd(1.0), accumulate=65)
    batch = jnp.ones((65, 1)).at[0].set(512.0)
    _, metrics = step(init({"w": jnp.zeros(1, jnp.bfloat16)}), batch)
    assert float(metrics["grad_norm"]) == pytest.approx((512 + 64) / 65)


def test_what_is_no_array_with_an_axis_reaches_every_micro_batch():
    def fun(params, model_state, batch, rng):
        assert batch["name"] == "a"
        loss = jnp.mean((batch["x"] @ params["w"]) ** 2) * batch["weight"]
        return loss, (model_state, batch["nothing"])

    init, step = jmp.build_train_step(fun, optax.sgd(0.1), "O0", accumulate=2)
    batch = {"x": X, "weight": jnp.float32(2), "name": "a", "nothing": None}
    _, metrics = step(init(PARAMS), batch)
    whole = fun(PARAMS, None, batch, None)[0]
    assert float(metrics["loss"]) == pytest.approx(float(whole))


def test_a_batch_that_cannot_be_split_is_refused():
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), accumulate=5)
    params, batch = mlp_start()
    with pytest.raises(ValueError, match=r"accumulate=5, got \(32, 8\) at batch\[0\]"):
        step(init(params), batch)


def test_a_model_state_that_changes_its_type_is_refused_in_a_micro_batch_too():
    fun = lambda params, *_: (params["w"].sum(), ({"mean": jnp.ones(4)}, None))
    init, step = jmp.build_train_step(fun, optax.sgd(0.1), accumulate=2)
    with pytest.raises(TypeError, match=r"float32\[4\] at \.model_state\['mean'\]"):
        step(init(PARAMS, {"mean": jnp.ones(3)}), X)


# --------------------------------------------------------------------- many devices


def build_on(mesh, check_vma, **options):
    init, step = jmp.build_train_step(axis_name="data", **options)
    return init, jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
    )


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rules", ["O0", "mixed"])
def test_devices_that_split_a_batch_take_one_step(mesh, check_vma, rules):
    params, batch = mlp_start()
    options = {"loss_fn": mlp_loss, "optimizer": lenient(optax.adam(1e-2))}
    init, step = build_on(mesh, check_vma, rules=rules, **options)
    state = init(params)
    one_init, one_step = jmp.build_train_step(**options, rules="O0")
    alone = one_init(params)
    for _ in range(3):
        state, metrics = step(state, batch)
        alone, expected = one_step(alone, batch)
    tolerance = 1e-5 if rules == "O0" else 0.05
    chex.assert_trees_all_close(metrics["loss"], expected["loss"], rtol=tolerance)
    moved, moved_alone = (
        jax.tree.map(jnp.subtract, s.params, params) for s in (state, alone)
    )
    assert relative_error(moved, moved_alone) < (1e-4 if rules == "O0" else 0.1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_skip_where_one_overflows_and_statistics_are_averaged(
    mesh, check_vma
):
    def fun(params, model_state, batch, rng):
        loss, (model_state, _) = loss_fn(params, model_state, batch, rng)
        return loss, (model_state, None)

    init, step = build_on(
        mesh,
        check_vma,
        loss_fn=fun,
        optimizer=optax.sgd(0.1),
        loss_scale=jmp.DynamicLossScale(),
        accumulate=1,
    )
    before = init(PARAMS, start(), jax.random.key(0))
    after, metrics = step(before, bad_gradient(X))
    assert not metrics["grads_finite"]
    chex.assert_trees_all_equal(after.params, before.params)
    final, metrics = step(after, X)
    assert metrics["grads_finite"]
    mean = float(final.model_state["mean"])
    assert mean == pytest.approx(0.1 * float(X.mean()), rel=1e-5)


def test_it_is_mapped_over_an_axis_of_vmap():
    params, (x, y) = mlp_start()
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), "O0", axis_name="data")
    parts = (x.reshape(4, 8, 8), y.reshape(4, 8, 1))
    mapped = jax.vmap(step, (None, 0), axis_name="data")
    state, _ = jax.jit(mapped)(init(params), parts)
    _, one_step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), "O0")
    alone, _ = jax.jit(one_step)(init(params), (x, y))
    first = jax.tree.map(lambda leaf: leaf[0], state.params)
    chex.assert_trees_all_close(first, alone.params, rtol=1e-5)
