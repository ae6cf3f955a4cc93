"""States that a checkpoint changed: other containers, other dtypes."""

import dataclasses
import functools
import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("standard_promotion")  # For adam.

KEY = jax.random.key(0)
PARAMS = jax.random.normal(jax.random.key(1), (64, 128)) / 3
GRADS = jax.random.normal(jax.random.key(2), (64, 128))
MOMENTUM = optax.sgd(0.1, momentum=0.9)
LOW = {
    "float16": jmp.low_precision_state(MOMENTUM, "float16", key=KEY),
    "float8_e4m3fn": jmp.low_precision_state(optax.adam(0.1), "float8_e4m3fn", key=KEY),
    "bfloat16": jmp.low_precision_state(optax.adam(0.1), key=KEY),
}


def plain(node):
    """Returns a state as dicts and lists, as a restore without a template does."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {name: plain(value) for name, value in node._asdict().items()}
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        return {name: plain(getattr(node, name)) for name in names}
    return list(map(plain, node)) if isinstance(node, tuple | list) else node


def trained(optimizer, state, n_steps=5):
    params = PARAMS
    for _ in range(n_steps):
        updates, state = optimizer.update(1e-3 * GRADS, state, params)
        params = jmp.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_scales_may_be_a_list(dtype):
    optimizer = LOW[dtype]
    state = optimizer.init(PARAMS)
    expected, _ = trained(optimizer, state)
    restored = state._replace(scales=plain(state.scales))
    actual, after = trained(optimizer, restored)
    np.testing.assert_array_equal(actual, expected)
    assert isinstance(after.scales[dtype], tuple)


def test_scales_of_another_length_are_an_error():
    state = LOW["float16"].init(PARAMS)
    short = state._replace(scales={"float16": [*state.scales["float16"], None]})
    with pytest.raises(TypeError, match=r"scales of 1 arrays, .* got 2 entries"):
        LOW["float16"].update(GRADS, short, PARAMS)


MAKERS = {
    **LOW,
    "bfloat16 parameters": jmp.compensated(optax.adam(0.1)),
    "float16 parameters": jmp.compensated(optax.adam(0.1)),
    "mixed parameters": jmp.compensated(optax.adam(0.1)),
}


def state_of(name):
    """Returns the state of an optimizer, and its parameters."""
    params = {"a": PARAMS, "b": PARAMS}
    if name.endswith("parameters"):
        dtypes = {"mixed": ("bfloat16", "float16")}
        dtype = name.removesuffix(" parameters")
        each = dtypes.get(dtype, (dtype, dtype))
        params = {
            key: x.astype(to) for (key, x), to in zip(params.items(), each, strict=True)
        }
    return MAKERS[name].init(params), params


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pair
        for pair in itertools.permutations(MAKERS, 2)
        if pair[0].endswith("parameters") == pair[1].endswith("parameters")
    ],
)
def test_no_state_is_restored_into_that_of_another_dtype(name, other, tmp_path):
    """Orbax casts to the dtypes of its template, without a word."""
    (state, _), (template, _) = map(state_of, (name, other))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: state))
        chex.assert_trees_all_equal(again, state)
        with pytest.raises(ValueError, match="structure"):
            checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: template))


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("other", ["bfloat16", "float32", "float8_e5m2"])
@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn"])
def test_moments_that_were_cast_after_they_were_saved_are_an_error(
    name, other, is_jitted
):
    optimizer, state = LOW[name], LOW[name].init(PARAMS)
    moments = jax.tree.map(
        lambda x: x.astype(other) if x.dtype == name else x, state.inner_state
    )
    cast = state._replace(inner_state=moments)
    update = jax.jit(optimizer.update) if is_jitted else optimizer.update
    with pytest.raises(TypeError, match=rf"moments in {name}.*eval_shape.*convert_s"):
        update(GRADS, cast, PARAMS)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_remainder_that_was_cast_after_it_was_saved_is_an_error(is_jitted):
    state, params = state_of("bfloat16 parameters")
    errors = jax.tree.map(lambda x: x.astype("bfloat16"), state.remainder)
    optimizer = MAKERS["bfloat16 parameters"]
    update = jax.jit(optimizer.update) if is_jitted else optimizer.update
    for remainder in (errors, {"float16": state.remainder["bfloat16"]}, {}):
        with pytest.raises(
            TypeError, match=r"remainder of int16 .* \['a'\], got .*convert_state"
        ):
            update(params, state._replace(remainder=remainder), params)


STATES = {
    **LOW,
    "master_weights": jmp.master_weights(optax.adam(0.1)),
    "compensated": jmp.compensated(optax.adam(0.1)),
    "stochastic_rounding": jmp.stochastic_rounding(optax.adam(0.1), KEY),
    "loss_scaling": jmp.loss_scaling(optax.adam(0.1)),
}


def params_for(name):
    is_of_params = name in ("master_weights", "compensated", "stochastic_rounding")
    return PARAMS.astype(jnp.bfloat16) if is_of_params else PARAMS


@pytest.mark.parametrize("name", STATES)
def test_a_state_without_its_class_is_an_error_that_names_the_template(name):
    optimizer, params = STATES[name], params_for(name)
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"got dict.*jax\.eval_shape\(optimizer\.init"):
        optimizer.update(GRADS, plain(state), params)


@pytest.mark.parametrize("name", STATES)
def test_an_inner_state_without_its_class_has_a_note_that_names_the_template(name):
    # Directly inside, and not in a chain.
    optimizer = {
        "float16": lambda: jmp.low_precision_state(optax.trace(0.9), "float16", key=KEY)
    }.get(name, lambda: STATES[name])()
    params = params_for(name)
    state = optimizer.init(params)
    lost = state._replace(inner_state=plain(state.inner_state))
    with pytest.raises(AttributeError) as error:
        optimizer.update(GRADS, lost, params)
    assert any("jax.eval_shape(optimizer.init" in n for n in error.value.__notes__)


def injected(wrap, **options):
    """Returns an optimizer with hyperparameters in its state, around a wrapper."""

    def make(learning_rate, b2):
        return wrap(optax.adam(learning_rate, b2=b2))

    return optax.inject_hyperparams(make, **options)(learning_rate=1e-3, b2=0.999)


AROUND = {
    "loss_scaling": jmp.loss_scaling,
    "a train step": lambda optimizer: types.SimpleNamespace(
        init=jmp.build_train_step(
            lambda params, state, batch, rng: (0.0, (state, None)), optimizer
        )[0]
    ),
    "low_precision_state": functools.partial(jmp.low_precision_state, key=KEY),
}
WRAPPERS = {
    "master_weights": jmp.master_weights,
    "compensated": jmp.compensated,
    "stochastic_rounding": functools.partial(jmp.stochastic_rounding, key=KEY),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", WRAPPERS)
def test_hyperparameters_in_16_bits_are_an_error_with_a_remedy(name, around):
    """A b2 of 0.999 would be 1, and the first step NaN."""
    params = PARAMS.astype(jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"'(b2|learning_rate)' is bfloat16: .*float32"
    ):
        AROUND[around](injected(WRAPPERS[name])).init(params)
    # Both remedies.
    exact = injected(WRAPPERS[name], hyperparam_dtype=jnp.float32)
    AROUND[around](exact).init(params)
    inside = WRAPPERS[name](
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3, b2=0.999)
    )
    state = inside.init(params)
    assert float(state.inner_state.hyperparams["b2"]) == np.float32(0.999)
    updates, _ = inside.update(GRADS, state, params)
    assert jmp.all_finite(updates)


def test_a_loss_scale_without_its_class_is_an_error():
    optimizer = STATES["loss_scaling"]
    state = optimizer.init(PARAMS)
    lost = state._replace(loss_scale=plain(state.loss_scale))
    with pytest.raises(
        TypeError, match=r"LossScale in the state, got dict.*eval_shape"
    ):
        optimizer.update(GRADS, lost, PARAMS)


def test_a_train_state_says_what_lost_its_class():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((params * batch) ** 2), (model_state, None)

    init, step = jmp.build_train_step(loss_fn, optax.adam(0.1))
    state = init(PARAMS)
    lost = state._replace(opt_state=plain(state.opt_state))
    with pytest.raises(TypeError, match="opt_state that init returns, got dict"):
        step(lost, GRADS)
