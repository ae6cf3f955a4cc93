"""Flax's own training states carry a loss scale without losing a bit of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from flax import nnx
from flax.training.train_state import TrainState

import jmp_lite as jmp
import jmp_lite.nnx

X, Y = jnp.linspace(-1, 1, 8).reshape(4, 2), jnp.linspace(0, 1, 4).reshape(4, 1)


def test_a_linen_train_state_skips_overflows_and_trains_in_float16():
    def loss_fn(params, x):
        low = jmp.cast_tree({"params": params, "x": x}, "float16")
        y = low["x"] @ low["params"]["w"]
        return jnp.mean((y.astype(jnp.float32) - Y) ** 2)

    optimizer = jmp.loss_scaling(
        lenient(optax.adam(0.05)), jmp.DynamicLossScale(2.0**20)
    )
    state = TrainState.create(
        apply_fn=None, params={"w": jnp.ones((2, 1))}, tx=optimizer
    )

    @jax.jit
    def step(state, x):
        scale = jmp.get_loss_scale(state.opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(40):
        state, loss = step(state, X)
        losses.append(float(loss))
    assert int(state.opt_state.skipped) > 0
    assert int(state.opt_state.inner_state[0].count) == 40 - int(
        state.opt_state.skipped
    )
    assert losses[-1] < 0.5 * losses[0]


def test_an_nnx_optimizer_holds_variables_where_the_leaves_were():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    scale = jmp.DynamicLossScale(8.0, period=2, hysteresis=2)
    optimizer = nnx.Optimizer(
        model, jmp.loss_scaling(optax.sgd(0.1), scale), wrt=nnx.Param
    )

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return jnp.mean((model(x) - Y) ** 2)

        scale = jmp.get_loss_scale(optimizer.opt_state)
        loss, grads = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=scale)(model)
        optimizer.update(model, grads)
        return loss

    first = step(model, optimizer, X)
    kernel = np.asarray(model.kernel[...])
    step(model, optimizer, X.at[0, 0].set(jnp.inf))
    np.testing.assert_array_equal(model.kernel[...], kernel)
    for _ in range(5):
        last = step(model, optimizer, X)
    assert last < first
    state = optimizer.opt_state
    found = jmp.get_loss_scale(state)
    assert (found.period, found.hysteresis) == (2, 2)
    assert float(found.scale(jnp.float32(1.0))) == 32.0
    assert int(jnp.asarray(state.skipped)) == 1
    jmp.check_loss_scale(state)


def test_nnx_gradients_are_unscaled_in_float32_and_its_modules_change():
    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=jnp.float16)
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls[...] += 1
            return self.layer(x.astype(jnp.float16))

    def loss_fn(net, x):
        out = net(x)
        return jnp.sum(out.astype(jnp.float32)) * 1e-9, out

    net, scale = Net(), jmp.StaticLossScale(2.0**20)
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):  # There are counts.
        fun = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=scale, has_aux=True)
    (loss, out), grads = fun(net, x=X)
    assert (loss.dtype, out.shape, int(net.calls[...])) == (np.float32, (4, 1), 1)
    assert grads["layer"]["bias"][...].dtype == np.float32
    # Without a scale they would vanish in float16.
    np.testing.assert_allclose(grads["layer"]["bias"][...], [4e-9], rtol=1e-3)
    plain, _ = nnx.compat.grad(loss_fn, has_aux=True)(net, X)
    assert float(plain["layer"]["bias"][...][0]) == 0
    with pytest.raises(TypeError, match=r"a pair \(loss, aux\) because has_aux=True"):
        jmp_lite.nnx.value_and_grad(lambda x: x.sum(), loss_scale=scale, has_aux=True)(
            X
        )
    with pytest.raises(TypeError, match="Expected a LossScale"):
        jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=1024.0)


class Normed(nnx.Module):
    """Statistics that a batch of NaN breaks, and random numbers that nobody reads."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        self.dropout(x)
        return self.norm(self.layer(x))


def trained(batches, optimizer):
    """Returns a model after some steps that restore it where they are skipped."""
    model = Normed(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        @jmp_lite.nnx.autocast(compute_dtype="float16")
        def loss_fn(params, rest):
            return jnp.mean((nnx.merge(graphdef, params, rest)(x) - Y) ** 2)

        loss_scale = jmp.get_loss_scale(optimizer.opt_state)
        with jmp_lite.nnx.restore_if_skipped(model, optimizer):
            value_and_grad = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=loss_scale)
            _, grads = value_and_grad(params, rest)
            optimizer.update(model, grads)

    for x in batches:
        step(model, optimizer, x)
    return model, optimizer


@pytest.mark.parametrize("is_graph", [True, False], ids=["graph mode", "tree mode"])
@pytest.mark.parametrize("wrap", [jmp.loss_scaling, jmp.skip_nonfinite])
def test_a_step_with_a_nan_leaves_no_trace_in_the_model(wrap, is_graph):
    bad, optimizer = (
        X.at[0, 0].set(jnp.nan),
        optax.chain(wrap(lenient(optax.adam(0.1)))),
    )
    with nnx.set_graph_mode(is_graph), nnx.set_graph_updates(is_graph):
        expected, _ = trained([X], optimizer)
        actual, state = trained([bad, X], optimizer)
        pairs = [nnx.state(m, nnx.Not(nnx.RngState)) for m in (actual, expected)]
    assert jax.tree.structure(pairs[0]) == jax.tree.structure(pairs[1])
    jax.tree.map(np.testing.assert_array_equal, *pairs)
    assert int(jnp.asarray(state.opt_state[0].skipped)) == 1
    assert int(actual.calls[...]) == 1
    assert np.any(actual.norm.mean[...] != 0), "a good step is not restored"
    counts = [int(m.dropout.rngs.count[...]) for m in (actual, expected)]
    assert counts == [2, 1], "random numbers go on"


class Sowing(nnx.Module):
    """A module whose calls add to a variable, make one and remove one."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.last = nnx.Cache(jnp.zeros(()))
        self.seen = nnx.Cache(jnp.zeros(1))

    def __call__(self, x):
        y = self.norm(self.layer(x))
        self.sow(nnx.Intermediate, "outputs", jnp.mean(y))
        self.last = nnx.Cache(jnp.max(y))  # Another one at the same place.
        self.seen.set_value(jnp.append(self.seen.get_value(), jnp.max(y)))
        if hasattr(self, "fresh"):
            del self.fresh
        else:
            self.fresh = nnx.Cache(jnp.min(y))
        return y


def sow(batches, is_jitted, does_pop):
    model = Sowing(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jmp.skip_nonfinite(optax.sgd(0.1)), wrt=nnx.Param)

    def step(model, optimizer, x):
        with jmp_lite.nnx.restore_if_skipped(model, optimizer):
            grads = nnx.grad(lambda model: jnp.mean((model(x) - Y) ** 2))(model)
            optimizer.update(model, grads)
            if does_pop:
                nnx.pop(model, nnx.Intermediate)

    for x in batches:
        (nnx.jit(step) if is_jitted else step)(model, optimizer, x)
    return model


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("does_pop", [False, True])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_skipped_step_restores_values_and_keeps_added_and_removed_variables(
    is_jitted, does_pop
):
    good, bad = (sow([X, x], is_jitted, does_pop) for x in (X + 1, X * jnp.nan))
    first = sow([X], is_jitted, does_pop)
    assert jax.tree.structure(nnx.state(good)) == jax.tree.structure(nnx.state(bad))
    assert not hasattr(good, "fresh")
    assert hasattr(first, "fresh")
    for of in (lambda m: m.norm.mean, lambda m: m.norm.var, lambda m: m.last):
        np.testing.assert_array_equal(of(bad)[...], of(first)[...])
        assert np.any(of(good)[...] != of(first)[...])
    # An array of another shape has no old value.
    assert good.seen.get_value().shape == bad.seen.get_value().shape == (3,)
    assert np.isnan(bad.seen.get_value()[2])
    if does_pop:
        assert not any(hasattr(model, "outputs") for model in (first, good, bad))
    else:
        (kept,), (again, new) = first.outputs.get_value(), bad.outputs.get_value()
        assert float(again) == float(kept)
        assert np.isnan(new)


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize(
    "collect", [lambda g, d: (g, d), lambda g, d: {"g": g, "d": d}]
)
def test_one_block_restores_all_modules_that_a_loss_runs(is_jitted, collect):
    generator, discriminator = (nnx.BatchNorm(2, rngs=nnx.Rngs(0)) for _ in "gd")
    transformation = jmp.skip_nonfinite(optax.sgd(0.1))
    optimizer = nnx.Optimizer(discriminator, transformation, wrt=nnx.Param)

    def step(generator, discriminator, optimizer, x):
        def loss_fn(discriminator, generator):
            return jnp.mean(discriminator(generator(x)))

        both = collect(generator, discriminator)
        with jmp_lite.nnx.restore_if_skipped(both, optimizer):
            grads = nnx.grad(loss_fn)(discriminator, generator)
            optimizer.update(discriminator, grads)

    step = nnx.jit(step) if is_jitted else step
    step(generator, discriminator, optimizer, X)
    before = [np.asarray(m.mean[...]) for m in (generator, discriminator)]
    step(generator, discriminator, optimizer, X * jnp.nan)
    after = [np.asarray(m.mean[...]) for m in (generator, discriminator)]
    np.testing.assert_array_equal(after, before)
    assert np.any(before[0] != 0)


def test_arguments_that_cannot_be_restored_are_an_error_before_the_step():
    model = Normed(nnx.Rngs(0))
    plain = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for args, error, message in (
        ((model, plain), ValueError, r"wrap .* loss_scaling\(...\) or skip_nonfinite"),
        ((model, optax.sgd(0.1)), TypeError, "Expected an nnx.Optimizer, got Gradient"),
        ((plain, model), TypeError, "Expected an nnx module, got Optimizer"),
        (((model, plain), plain), TypeError, "Expected an nnx module, got Optimizer"),
        (((), plain), TypeError, "Expected an nnx module, got tuple"),
    ):
        restored = jmp_lite.nnx.restore_if_skipped(*args)
        with pytest.raises(error, match=message), restored:
            raise AssertionError("the step has begun")
