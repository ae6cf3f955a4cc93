"""Backward rules that clip or normalise their cotangent, under a loss scale."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import relative_error
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
import jmp_lite.nnx
from jmp_lite.autocasting.passes import homogeneity

X = jax.random.normal(jax.random.key(0), (8, 16))
W = jax.random.normal(jax.random.key(1), (16, 16)) / 4
BOUND = 1e-3
SCALE = jmp.DynamicLossScale(2.0**15)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clip_gradient(x, bound):
    return x


clip_gradient.defvjp(
    lambda x, bound: (x, None),
    lambda bound, _, g: (jnp.clip(g, -bound, bound),),
)


def with_rule(bwd):
    """Returns ``x * w`` with a backward rule, of ``(x, w)`` and the cotangent."""

    @jax.custom_vjp
    def product(x, w):
        return x * w

    product.defvjp(lambda x, w: (x * w, (x, w)), bwd)
    return product


# ----------------------------------------------------------- which rules are concerned

SQUARE = 4 * W[:4, :4]


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def added_up(g):
    step = lambda carry, x: (carry + x, carry)
    return lax.scan(step, jnp.zeros(4), g)[1]


PROPORTIONAL = {
    "a product": lambda r, g: (g * r[1], g * r[0]),
    "reversal": lambda r, g: (-g, 0 * g),
    "straight through": lambda r, g: (jnp.where(abs(r[0]) < 1, g, 0.0), None),
    "matrix products": lambda r, g: (g @ r[1].T, r[0].T @ g),
    "softmax": lambda r, g: (
        (p := jax.nn.softmax(r[0])) * (g - jnp.sum(g * p, -1, keepdims=True)),
        g,
    ),
    "no gradient": lambda r, g: (jnp.zeros_like(g), None),
    "a cast": lambda r, g: (g.astype(jnp.bfloat16).astype(jnp.float32), g),
    "positive parts": lambda r, g: (jax.nn.relu(g), g),
    "a unit vector times its norm": lambda r, g: (g / norm(g) * norm(g), g),
    "eight bits with a scale": lambda r, g: (
        jnp.round(g / jnp.max(abs(g)) * 127) * jnp.max(abs(g)) / 127,
        g,
    ),
    "sign times root of square": lambda r, g: (jnp.sign(g) * jnp.sqrt(g * g), g),
    "a loop": lambda r, g: (added_up(g), g),
    "a branch of a residual": lambda r, g: (
        lax.cond(r[0][0, 0] > 0, lambda g: g, lambda g: 2 * g, g),
        g,
    ),
    "sorted": lambda r, g: (jnp.sort(g), g[::-1]),
    "taken": lambda r, g: (g[jnp.array([1, 0, 2, 3])], g),
    "a while": lambda r, g: (
        lax.fori_loop(0, r[0][0, 0].astype(int), lambda i, s: s + g, jnp.zeros_like(g)),
        g,
    ),
}

OTHERS = {
    "clip": ("max", lambda r, g: (jnp.clip(g, -0.1, 0.1), g)),
    "sign": ("sign", lambda r, g: (jnp.sign(g), g)),
    "a unit vector": ("div", lambda r, g: (g / norm(g), g)),
    "a norm that is not zero": ("add", lambda r, g: (g / (norm(g) + 1), g)),
    "clip by norm": ("min", lambda r, g: (g * jnp.minimum(1, 1 / norm(g)), g)),
    "no outliers": ("gt", lambda r, g: (jnp.where(abs(g) > 1, 0, g), g)),
    "a penalty": ("add", lambda r, g: (g + 0.1 * r[0], g)),
    "tanh": ("tanh", lambda r, g: (jnp.tanh(g), g)),
    "a square": ("mul", lambda r, g: (g * g, g)),
    "a constant": ("broadcast_in_dim", lambda r, g: (jnp.ones_like(g), g)),
    "a branch": (
        "gt",
        lambda r, g: (lax.cond(g[0, 0] > 1, lambda g: g, lambda g: 2 * g, g), g),
    ),
    "optax": (
        "lt",
        lambda r, g: (optax.clip_by_global_norm(1.0).update(g, ())[0], g),
    ),
    "rounded": ("round", lambda r, g: (jnp.round(g), g)),
    "integers": (
        "convert_element_type",
        lambda r, g: (g.astype(int).astype(jnp.float32), g),
    ),
}


def culprit_of(bwd):
    jaxpr = jax.make_jaxpr(with_rule(bwd))(SQUARE, SQUARE)
    (eqn,) = jaxpr.eqns
    return homogeneity.culprit_of(eqn)


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_rules_that_return_multiples_of_their_cotangent_are_not_accused(name):
    rule = PROPORTIONAL[name]
    assert culprit_of(rule) is None
    product = with_rule(rule)
    loss = lambda x, w: jnp.sum(jnp.sin(product(x, w)))
    plain, scaled = (
        jax.make_jaxpr(jmp.grad(loss, loss_scale=scale))(SQUARE, SQUARE)
        for scale in (jmp.StaticLossScale(1), SCALE)
    )
    assert len(plain.eqns) == len(scaled.eqns)
    exact = jax.grad(loss, (0, 1))(SQUARE, SQUARE)
    found = jmp.grad(loss, (0, 1), loss_scale=SCALE)(SQUARE, SQUARE)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_rule_is_found_and_gets_its_true_cotangent(name):
    op, rule = OTHERS[name]
    culprit = culprit_of(rule)
    assert culprit is not None
    assert culprit.primitive.name == op
    product = with_rule(rule)
    loss = lambda x, w: jnp.sum(jnp.sin(product(x, w)))
    exact = jax.grad(loss, (0, 1))(SQUARE, SQUARE)
    found = jmp.grad(loss, (0, 1), loss_scale=SCALE)(SQUARE, SQUARE)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- where rules may stand


def loss_of(w, x):
    return jnp.mean((clip_gradient(jnp.tanh(x @ w), BOUND) @ w) ** 2)


def looped(w, x):
    step = lambda h, _: (clip_gradient(jnp.tanh(h @ w), BOUND), None)
    return jnp.mean((lax.scan(step, x, None, length=3)[0] @ w) ** 2)


def over_devices(w, x):
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    local = lambda w, x: lax.pmean(loss_of(w, x), "d")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())(w, x)


FORMS = {
    "plain": loss_of,
    "jit": jax.jit(loss_of),
    "scan": looped,
    "remat": jax.checkpoint(loss_of),
    "cond": lambda w, x: lax.cond(x[0, 0] > -9, loss_of, lambda w, x: 0.0, w, x),
    "switch": lambda w, x: lax.switch(jnp.int32(1), [loss_of, looped], w, x),
    "vmap": lambda w, x: jnp.mean(jax.vmap(loss_of, (None, 0))(w, x[:, None])),
    "shard_map": over_devices,
    "jit of remat of scan": jax.jit(jax.checkpoint(looped)),
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_are_those_without_a_loss_scale(name):
    loss = FORMS[name]
    exact = jax.grad(loss)(W, X)
    by_hand = jax.grad(lambda w: SCALE.scale(loss(w, X)))(W) / 2.0**15
    assert relative_error(by_hand, exact) > 0.05, "the scale matters"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in (lambda fun: fun, jax.jit):
            found = run(lambda s, w, x: jmp.grad(loss, loss_scale=s)(w, x))(SCALE, W, X)
            assert relative_error(found, exact) < 1e-5
        low = jmp.autocast(loss, compute_dtype="float16")
        found = jax.jit(lambda s: jmp.grad(low, loss_scale=s)(W, X))(SCALE)
        assert relative_error(found, exact) < 0.005


def test_small_cotangents_do_not_vanish_before_such_a_rule():
    """Unscaled in float16, they would be below its smallest number."""
    loss = jmp.autocast(
        lambda w: 1e-9 * jnp.sum(clip_gradient(X @ w, 1.0) * X), compute_dtype="float16"
    )
    found = jmp.grad(loss, loss_scale=SCALE)(W)
    assert relative_error(found, 1e-9 * X.T @ X) < 0.01


@pytest.mark.parametrize("wrap", [lambda fun: fun, jmp.nnx.autocast])
def test_nnx_modules(wrap):
    model = nnx.Sequential(
        nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    )
    graphdef, state = nnx.split(model)
    loss = lambda m, x: jnp.mean(clip_gradient(jnp.tanh(m(x)), BOUND) ** 2)
    exact = nnx.grad(loss)(nnx.merge(graphdef, state), X)
    if wrap is jmp.nnx.autocast:
        loss = wrap(loss, compute_dtype="float16")
    _, found = jmp.nnx.value_and_grad(loss, loss_scale=SCALE)(model, X)
    kernel = found["layers"][0]["kernel"][...]
    assert relative_error(kernel, exact["layers"][0]["kernel"][...]) < 0.01
    assert jnp.any(model.layers[1].mean[...] != 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_train_step_in_float16_clips_what_it_should(accumulate):
    def loss_fn(params, model_state, batch, rng):
        return looped(params["w"], batch), (model_state, {"steps": 3})

    def train(dtype):
        init, step = jmp.build_train_step(
            loss_fn, optax.sgd(0.3), compute_dtype=dtype, accumulate=accumulate
        )
        state, step = init({"w": W, "frozen": W}), jax.jit(step)
        for _ in range(5):
            state, metrics = step(state, X)
        return state.params["w"] - W, metrics["loss"]

    moved, loss = train("float16")
    expected, exact = train("float32")
    assert relative_error(moved, expected) < 0.02
    assert relative_error(loss, exact) < 0.01


# ----------------------------------------------------------------- what stays as it is


def test_a_loss_may_branch_on_numbers_and_return_anything_beside_the_loss():
    class Name:
        pass

    name = Name()

    def loss_fn(w):
        loss = loss_of(w, X)
        return (loss if loss > 0 else -loss), {"name": name, "n": 3}

    (_, aux), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=SCALE)(W)
    assert aux == {"name": name, "n": 3}
    assert grads.shape == W.shape

    def traced(w):
        def with_aux(w):
            return loss_of(w, X), {"name": name, "n": 3, "mean": jnp.mean(w)}

        grad_fn = jmp.grad(with_aux, has_aux=True, loss_scale=SCALE)
        grads, aux = grad_fn(w)
        assert aux["name"] is name
        assert type(aux["n"]) is int
        return grads, aux["mean"]

    found, mean = jax.jit(traced)(W)
    np.testing.assert_allclose(mean, jnp.mean(W), rtol=1e-6)
    assert relative_error(found, jax.grad(loss_of)(W, X)) < 1e-5


def test_the_loss_function_is_traced_once():
    calls = []

    def loss_fn(w):
        calls.append(w)
        return loss_of(w, X)

    jax.jit(lambda s, w: jmp.grad(loss_fn, loss_scale=s)(w))(SCALE, W)
    assert len(calls) == 1


def test_an_error_of_the_loss_function_is_its_own():
    def loss_fn(w):
        raise KeyError("my own")

    with pytest.raises(KeyError, match="my own"):
        jmp.grad(loss_fn, loss_scale=SCALE)(W)


def test_a_rule_inside_of_another_derivative_rule_warns_with_its_name_and_line():
    @jax.custom_jvp
    def outer(w):
        return loss_of(w, X)

    outer.defjvp(
        lambda primals, tangents: jax.jvp(lambda w: loss_of(w, X), primals, tangents)
    )
    with pytest.warns(UserWarning, match=r"clip_gradient .*max at .*test_backward_rul"):
        jmp.grad(outer, loss_scale=SCALE)(W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.grad(outer, loss_scale=jmp.NoOpLossScale())(W)


def test_explain_lists_such_a_rule():
    (lint,) = (
        lint
        for lint in jmp.explain(looped, compute_dtype="float16", backward=True)(
            W, X
        ).lints
        if lint.name == "backward rule"
    )
    assert "clip_gradient" in lint.message
    assert "test_backward_rules.py" in lint.source
    for options in ({"compute_dtype": "bfloat16"}, {"backward": False}):
        chosen = {"compute_dtype": "float16", "backward": True, **options}
        lints = jmp.explain(looped, **chosen)(W, X).lints
        assert "backward rule" not in {lint.name for lint in lints}
