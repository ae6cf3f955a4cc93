"""Calls in the habit of other libraries, and mistakes that a trace shows."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
import jmp_lite.nnx

X = jnp.ones((8, 8))
SCALE = jmp.StaticLossScale(1024.0)
TOOLS = {
    "explain": jmp.explain,
    "compare": jmp.compare,
    "watch": jmp.watch,
    "tune": functools.partial(jmp.tune, tolerance=0.1),
}


def product(w, x):
    return x @ w


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


# ---------------------------------------------------------- calls as in other libraries


def enter(make):
    with make():
        pass


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        (lambda: enter(jmp.autocast), r"not a context manager.*@jmp_lite\.autocast"),
        (lambda: enter(jmp.nnx.autocast), r"not a context manager"),
        (
            lambda: enter(lambda: jmp.autocast(dtype="bfloat16")),
            r"no argument 'dtype': did you mean compute_dtype\?",
        ),
        (lambda: jmp.autocast(product, enabled=False), r'mean rules="O0"\?'),
        (lambda: jmp.nnx.autocast(product, level="O1"), r"'level': did you mean rules"),
        (lambda: jmp.autocast(product, compute_dtyp="half"), r"mean compute_dtype\?"),
        (lambda: jmp.autocast("cuda"), r"got str: 'cuda'\. Leave the device out"),
        (lambda: jmp.autocast(nn.Dense(4)), r"got Dense of Flax linen.*model\.apply"),
        (lambda: jmp.autocast(nn.Dense), r"got Dense of Flax linen.*model\.apply"),
        (lambda: jmp.watch(nn.Dense(4)), r"got Dense of Flax linen.*model\.apply"),
        (lambda: jmp.nnx.autocast(nnx.Linear), r"got Linear of Flax nnx.*nnx\.Rngs"),
        (lambda: jmp.nnx.watch(nnx.Linear), r"got Linear of Flax nnx.*nnx\.Rngs"),
        (
            lambda: jmp.autocast(product, jmp.get_policy("mixed_float16")),
            r'got Policy.*compute_dtype="float16"',
        ),
        (lambda: jmp.explain(product, X), r"to the result: explain\(fun\)\(x\)"),
        (lambda: jmp.autocast(product, None), r"got NoneType: None\. Leave it out"),
        (lambda: jmp.autocast(np.ones(3)), "Expected a function, got ndarray"),
        (lambda: jmp.nnx.explain(np.ones(3)), "Expected a function, got ndarray"),
        (lambda: jmp.grad(3, loss_scale=SCALE), "Expected a function, got int"),
        (
            lambda: jmp.nnx.value_and_grad(np.ones(3), loss_scale=SCALE),
            "Expected a function, got ndarray",
        ),
        (
            lambda: jmp.watch(product)(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X),
            r"jmp_lite\.nnx\.autocast, explain, watch, compare or tune",
        ),
    ],
)
def test_a_call_as_in_another_library_is_an_error_that_says_what_to_write(
    call, fragment
):
    with pytest.raises(TypeError, match=fragment):
        call()


def test_linen_s_apply_and_modules_that_are_functions_are_accepted():
    model = nn.Dense(4)
    variables = model.init(jax.random.key(0), X)
    assert jmp.autocast(model.apply)(variables, X).shape == (8, 4)
    assert jmp.nnx.autocast(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))(X).shape == (8, 4)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("mixed_bf16", "mixed_bfloat16"), ("mixed_f16", "mixed_float16")],
)
def test_a_misspelt_policy_of_keras_gets_the_right_suggestion(name, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        jmp.get_policy(name)


@pytest.mark.parametrize(("given", "meant"), [(0, "0.0"), (jnp.int32(2), "a float")])
def test_a_whole_number_in_place_of_a_float_gets_a_warning_with_the_float(given, meant):
    cure = rf"pass (min_loss_scale={meant}|{meant})\."
    with pytest.warns(UserWarning, match=cure):
        jmp.DynamicLossScale(min_loss_scale=given)


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_is_not_called_yet_prints_how_to_call_it(name):
    looked = TOOLS[name](product)
    options = ", tolerance=0.1" if name == "tune" else ""
    call = f"{name}(product{options})(w, x)"
    assert repr(looked) == f"<{name} of product: call it with arguments, {call}>"
    assert looked.__name__ == "product"
    with pytest.raises(AttributeError, match=r"call it.*no attribute 'rows' before"):
        _ = looked.rows
    assert "(...)" in repr(TOOLS[name](jax.tree_util.Partial(max)))


def test_a_tool_of_a_method_is_a_method():
    class Model:
        @jmp.explain
        def apply(self, x):
            return x @ x

    assert Model().apply(X).dtype_of() == "bfloat16"


# ------------------------------------------------------ mistakes that a trace shows


def test_a_scope_rule_that_matches_nothing_warns_and_names_the_function():
    rules = jmp.get_rules("mixed").scope("haed", "full").scope("loss", "full")

    def model(w, x):
        with jax.named_scope("head"):
            y = x @ w
        with jax.named_scope("loss"):
            return jnp.sum(y)

    with pytest.warns(
        UserWarning, match="'haed' matches nothing in model.*'head'"
    ) as caught:
        jmp.autocast(model, rules)(X, X)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="'haed'") as caught:
        jax.jit(jax.grad(jmp.autocast(model, rules)))(X, X)
    assert [warning.filename for warning in caught] == [__file__]
    jmp.autocast(model, jmp.get_rules("mixed").scope("loss", "full"))(X, X)
    inside = jax.jit(jax.named_call(product, name="inner"))
    jmp.autocast(inside, jmp.get_rules("mixed").scope("inner", "full"))(X, X)


def scaled_inside(w, x):
    return SCALE.scale(loss_fn(w, x))


def penalized(w, x):
    """A loss with a gradient of its own, which is scaled and unscaled inside."""
    slope = jmp.grad(lambda x: loss_fn(w, x), loss_scale=SCALE)(x)
    return loss_fn(w, x) + jnp.sum(slope**2)


def test_a_loss_that_is_scaled_twice_warns():
    low = jmp.autocast(scaled_inside, compute_dtype="float16")
    with pytest.warns(UserWarning, match="scaled twice.*too large") as caught:
        jmp.value_and_grad(low, loss_scale=SCALE)(X, X)
    assert [warning.filename for warning in caught] == [__file__]
    jax.value_and_grad(low)(X, X)  # By hand: scaled once.
    for right in (loss_fn, penalized):
        low = jmp.autocast(right, compute_dtype="float16")
        jmp.value_and_grad(low, loss_scale=SCALE)(X, X)


def in_train_step(loss):
    return lambda params, state, batch, rng: (loss(params, batch), (state, None))


def by_hand(w, x):
    return jnp.mean((x.astype("float16") @ w.astype("float16")) ** 2).astype("float32")


@pytest.mark.parametrize(
    "loss",
    [jmp.autocast(loss_fn, compute_dtype="float16"), by_hand],
    ids=["autocast", "by hand"],
)
def test_a_train_step_warns_of_a_float16_loss_that_it_does_not_scale(loss):
    whole = jmp.autocast(in_train_step(loss_fn), compute_dtype="float16")
    for each in (in_train_step(loss), whole):
        init, step = jmp.build_train_step(each, optax.sgd(0.1))
        with pytest.warns(UserWarning, match="float16 by itself") as caught:
            step(init(X), X)
        assert [warning.filename for warning in caught] == [__file__]
    for options in (
        {"compute_dtype": "float16"},
        {"loss_scale": jmp.DynamicLossScale()},
        {"loss_scale": jmp.NoOpLossScale()},
    ):
        init, step = jmp.build_train_step(
            in_train_step(loss), optax.sgd(0.1), **options
        )
        step(init(X), X)


def test_a_train_step_accepts_a_loss_that_is_in_bfloat16_by_itself():
    init, step = jmp.build_train_step(
        in_train_step(jmp.autocast(loss_fn)), optax.sgd(0.1)
    )
    step(init(X), X)


@pytest.mark.parametrize("tool", [jmp.autocast, *TOOLS.values()])
def test_an_error_of_jax_names_the_function_of_the_user_and_its_argument(tool):
    def positive(batch, label, *, scale):
        return batch["image"] if batch["image"].sum() > 0 else batch["mask"]

    batch = {"id": "a", "image": jnp.ones(3), "mask": jnp.ones(3)}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        tool(positive)(batch, "b", scale=2.0)
    message = str(caught.value)
    assert f"function positive at {__file__}" in message
    assert "the argument batch['image']" in message


def test_a_shape_in_place_of_an_array_is_an_error_that_names_what_takes_shapes():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(TypeError, match=r"got a ShapeDtypeStruct at args\[0\]\['w'\]"):
        jmp.autocast(lambda params, x: x @ params["w"])({"w": shape}, X)
    assert jax.eval_shape(jmp.autocast(product), shape, shape).shape == (8, 8)
