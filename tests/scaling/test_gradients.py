import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_lite as jmp
import jmp_lite.nnx

SCALES = [jmp.NoOpLossScale(), jmp.StaticLossScale(64), jmp.DynamicLossScale(2.0**10)]
each_scale = pytest.mark.parametrize(
    "scale", SCALES, ids=lambda scale: type(scale).__name__
)


def loss_fn(params, x, *, power=2):
    return jnp.mean((x @ params["w"] + params["b"]) ** power)


def problem(dtype=jnp.float32):
    params = {"w": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(3, 2)}
    params["b"] = jnp.zeros(2, dtype)
    return params, jnp.linspace(0, 1, 12, dtype=dtype).reshape(4, 3)


@each_scale
def test_value_and_gradients_are_those_of_the_plain_function(scale):
    params, x = problem()
    value, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(params, x, power=4)
    expected_value, expected = jax.value_and_grad(loss_fn)(params, x, power=4)
    assert value == expected_value
    jax.tree.map(np.testing.assert_array_equal, grads, expected)


@each_scale
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_value_keeps_its_dtype_and_gradients_are_float32(scale, dtype):
    params, x = problem(dtype)
    value, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(params, x)
    assert value.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
    assert value == loss_fn(params, x)


@each_scale
def test_gradients_in_bfloat16_are_those_of_float32_rounded_once(scale):
    params, x = problem()
    params["z"] = jnp.ones(2, jnp.complex64)
    fun = lambda params, x: loss_fn(params, x) + jnp.sum(jnp.abs(params["z"]) ** 2)
    full = jmp.grad(fun, loss_scale=scale)(params, x)
    low = jmp.grad(fun, loss_scale=scale, grad_dtype="bfloat16")(params, x)
    for name in ("w", "b"):
        assert low[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(low[name], full[name].astype(jnp.bfloat16))
    assert low["z"].dtype == jnp.complex64
    value, of_both = jmp.value_and_grad(fun, loss_scale=scale, grad_dtype=jnp.bfloat16)(
        params, x
    )
    assert value == fun(params, x)
    np.testing.assert_array_equal(of_both["w"], low["w"])


def test_gradients_of_a_module_in_bfloat16():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    loss_of = lambda model, x: jnp.mean(model(x) ** 2)
    get = functools.partial(jmp.nnx.value_and_grad, loss_of, loss_scale=SCALES[1])
    _, full = get()(model, jnp.ones((4, 2)))
    _, low = get(grad_dtype="bfloat16")(model, jnp.ones((4, 2)))
    expected = full.kernel[...].astype(jnp.bfloat16)
    np.testing.assert_array_equal(low.kernel[...], expected)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float16", "below 6e-08 would become zero.*'bfloat16'"),
        ("float8_e5m2", "got 'float8_e5m2'"),
    ],
)
def test_gradients_in_other_dtypes_are_an_error(dtype, words):
    with pytest.raises(ValueError, match=words):
        jmp.grad(loss_fn, loss_scale=SCALES[0], grad_dtype=dtype)
    with pytest.raises(ValueError, match=words):
        jmp.build_train_step(lambda *args: args, optax.sgd(0.1), grad_dtype=dtype)


def test_a_gradient_that_underflows_float16_is_recovered():
    def tiny(w):
        return (w * jnp.float16(2.0**-14) * jnp.float16(2.0**-14)).sum()

    w = jnp.ones(2, jnp.float16)
    assert not jmp.grad(tiny, loss_scale=jmp.NoOpLossScale())(w).any()
    grads = jmp.grad(tiny, loss_scale=jmp.DynamicLossScale())(w)
    np.testing.assert_array_equal(grads, np.full(2, 2.0**-28, np.float32))


def test_gradients_are_unscaled_by_the_scale_that_was_used():
    """Growing and overflowing steps give the plain gradients as well."""
    params, x = problem()
    expected = jax.grad(loss_fn)(params, x)
    scale = jmp.DynamicLossScale(4.0, period=1)
    for finite in [True, False, True, True]:
        value, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(params, x)
        assert value == loss_fn(params, x)
        jax.tree.map(np.testing.assert_array_equal, grads, expected)
        scale = scale.adjust(finite)


def test_an_overflowing_scale_leaves_the_value_alone():
    loss = lambda w: jnp.float16(3.0) * w
    value, grads = jmp.value_and_grad(loss, loss_scale=jmp.DynamicLossScale(2.0**20))(
        jnp.float16(1.0)
    )
    assert value == 3.0
    assert not jnp.isfinite(grads)


@each_scale
def test_aux_comes_back_as_it_is(scale):
    def fun(w):
        return (w**2).sum(), {"count": 3, "w": w, "text": "aux"}

    w = jnp.ones(2, jnp.bfloat16)
    (value, aux), grads = jmp.value_and_grad(fun, loss_scale=scale, has_aux=True)(w)
    assert aux["count"] == 3
    assert aux["text"] == "aux"
    assert aux["w"].dtype == jnp.bfloat16
    grads_alone, aux_alone = jmp.grad(fun, loss_scale=scale, has_aux=True)(w)
    np.testing.assert_array_equal(grads, grads_alone)
    assert aux_alone["count"] == 3
    assert value.dtype == jnp.bfloat16


@each_scale
def test_argnums_follow_jax(scale):
    fun = lambda a, b, c: a * b * c["x"]
    args = (2.0, 3.0, {"x": jnp.array(4.0)})
    for argnums in (1, (0, 2), [0, 1], -1):
        _, grads = jmp.value_and_grad(fun, argnums, loss_scale=scale)(*args)
        expected = jax.grad(fun, argnums)(*args)
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_allclose, grads, expected)


@each_scale
def test_value_and_grad_works_under_jit_vmap_scan_and_remat(scale):
    fun = jax.checkpoint(lambda w, x: jnp.tanh(w * x).sum())
    w, xs = jnp.float32(0.5), jnp.arange(3.0)
    expected = jax.vmap(jax.grad(fun), (None, 0))(w, xs)
    grad = jmp.grad(fun, loss_scale=scale)
    np.testing.assert_array_equal(jax.vmap(grad, (None, 0))(w, xs), expected)
    _, scanned = jax.lax.scan(lambda c, x: (c, jax.jit(grad)(w, x)), 0, xs)
    np.testing.assert_allclose(scanned, expected, rtol=1e-6)


def test_integer_and_complex_arguments_follow_jax():
    scale = jmp.StaticLossScale(4)
    tree = {"w": jnp.ones(2), "n": jnp.arange(2)}
    fun = lambda t: (t["w"] * t["n"].astype(jnp.float32)).sum()
    grads = jmp.grad(fun, loss_scale=scale, allow_int=True)(tree)
    assert grads["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(grads["w"], [0.0, 1.0])
    z = jnp.complex64(1 + 2j)
    np.testing.assert_allclose(
        jmp.grad(lambda z: z * z, loss_scale=scale, holomorphic=True)(z),
        jax.grad(lambda z: z * z, holomorphic=True)(z),
    )


@each_scale
def test_leaves_without_a_derivative_may_stand_beside_arrays(scale):
    """As in an Equinox module: functions, names, counters, settings."""
    rest = {"f": jnp.tanh, "name": "net", "n": jnp.arange(2), "p": 0.5, "on": True}
    tree = {"w": jnp.float32([1.0, 2.0]), "np": np.float32(3), "none": None, **rest}

    def fun(tree, x, *, power):
        assert all(tree[name] is rest[name] for name in rest)
        assert tree["none"] is None
        return (tree["f"](tree["w"]) * tree["np"] * x**power).sum(), tree["name"]

    (value, aux), grads = jmp.value_and_grad(fun, loss_scale=scale, has_aux=True)(
        tree, jnp.float32(2.0), power=2
    )
    w = tree["w"]
    expected_value, expected = jax.value_and_grad(lambda w: (jnp.tanh(w) * 12).sum())(w)
    assert aux == "net"
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert {name for name, grad in grads.items() if grad is not None} == {"w", "np"}
    assert grads["w"].dtype == grads["np"].dtype == np.float32
    np.testing.assert_allclose(grads["w"], expected, rtol=1e-6)
    # Several arguments, one of them all arrays.
    both, _ = jmp.grad(fun, (1, 0), loss_scale=scale, has_aux=True)(
        tree, jnp.float32(2), power=2
    )
    np.testing.assert_allclose(both[0], value, rtol=1e-6)
    assert jax.tree.structure(both[1]) == jax.tree.structure(grads)


def test_arguments_without_any_array_to_differentiate_get_jax_s_errors():
    scale = SCALES[1]
    for bad in (3, jnp.arange(2), {"n": jnp.arange(2)}, "text", {"f": jnp.tanh}):
        with pytest.raises(TypeError) as expected:
            jax.grad(lambda x: 1.0)(bad)
        with pytest.raises(TypeError) as actual:
            jmp.grad(lambda x: 1.0, loss_scale=scale)(bad)
        assert str(actual.value).splitlines()[0] == str(expected.value).splitlines()[0]
    with pytest.raises((TypeError, ValueError), match="argnums"):
        jmp.grad(lambda x: x, loss_scale=scale, argnums=3)(1.0)
    with pytest.raises(TypeError, match="as an integer"):
        jmp.grad(lambda x: x, loss_scale=scale, argnums="x")


def test_the_function_keeps_its_name():
    assert jmp.value_and_grad(loss_fn, loss_scale=SCALES[0]).__name__ == "loss_fn"
    assert jmp.grad(loss_fn, loss_scale=SCALES[0]).__name__ == "loss_fn"
    partial = functools.partial(loss_fn, power=2)
    assert jmp.grad(partial, loss_scale=SCALES[0])(*problem()) is not None


@pytest.mark.parametrize("bad", [128.0, None, jmp.StaticLossScale, jnp.float32(2)])
def test_an_argument_that_is_no_loss_scale_is_an_error_that_shows_one(bad):
    with pytest.raises(TypeError, match=r"Expected a LossScale.*StaticLossScale\("):
        jmp.value_and_grad(loss_fn, loss_scale=bad)


def test_a_missing_aux_is_named():
    with pytest.raises(TypeError, match=r"pair \(loss, aux\).*got .*Tracer"):
        jmp.grad(lambda x: x, loss_scale=SCALES[0], has_aux=True)(1.0)
    with pytest.raises(TypeError, match=r"pair \(loss, aux\).*got tuple of 3"):
        jmp.grad(lambda x: (x, 1, 2), loss_scale=SCALES[0], has_aux=True)(1.0)
    grads, aux = jmp.grad(lambda x: [x, 1], loss_scale=SCALES[0], has_aux=True)(1.0)
    assert (float(grads), aux) == (1.0, 1)


def test_a_loss_that_is_no_scalar_gets_jax_s_error():
    with pytest.raises(TypeError, match="scalar-output"):
        jmp.grad(lambda x: x, loss_scale=SCALES[1])(jnp.ones(2))


@pytest.mark.parametrize("clip", [optax.identity(), optax.clip_by_global_norm(0.5)])
def test_training_follows_the_bare_optimizer_s_trajectory(clip):
    """Under SGD, which unlike Adam shows any factor left in the gradients."""
    params, x = problem()
    bare = optax.chain(clip, optax.sgd(0.1))
    scaled = jmp.loss_scaling(bare, jmp.DynamicLossScale(2.0**8, period=2))
    bare_params, bare_state = params, bare.init(params)
    state = scaled.init(params)
    for _ in range(10):
        grads = jax.grad(loss_fn)(bare_params, x)
        updates, bare_state = bare.update(grads, bare_state, bare_params)
        bare_params = optax.apply_updates(bare_params, updates)

        grads = jmp.grad(loss_fn, loss_scale=jmp.get_loss_scale(state))(params, x)
        updates, state = scaled.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(np.testing.assert_array_equal, params, bare_params)
    assert float(jmp.get_loss_scale(state).loss_scale) == 2.0**13


@pytest.mark.parametrize(
    "transform", [jmp.value_and_grad, jmp.grad, jmp_lite.nnx.value_and_grad]
)
def test_a_scale_in_place_of_argnums_is_an_error_that_names_the_argument(transform):
    with pytest.raises(TypeError, match=r"got a StaticLossScale: pass it as loss_sc"):
        transform(loss_fn, SCALES[1], loss_scale=SCALES[1])
    with pytest.raises(TypeError, match="loss_scale"):
        transform(loss_fn)


@pytest.mark.parametrize("transform", [jmp.value_and_grad, jmp.grad])
def test_an_nnx_module_is_an_error_because_its_changes_would_be_lost(transform):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    scale = jmp.StaticLossScale(2.0)
    wrapped = transform(lambda model, x: model(x).sum(), loss_scale=scale)
    with pytest.raises(TypeError, match=r"Linear.*jmp_lite\.nnx\.value_and_grad"):
        wrapped(model, jnp.ones((3, 2)))


def test_beside_a_function_the_arrays_alone_have_gradients():
    """As in Equinox, whose modules have Python floats for settings."""
    params = {"w": jnp.ones(2), "rate": 0.5, "n": jnp.arange(2), "f": jnp.tanh}

    def fun(params):
        return jnp.sum(params["f"](params["w"])) * params["rate"]

    grads = jmp.grad(fun, loss_scale=SCALES[1])(params)
    assert grads["rate"] is grads["f"] is grads["n"] is None
    grads = jmp.grad(fun, loss_scale=SCALES[1], allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["rate"] is grads["f"] is None
    np.testing.assert_allclose(grads["w"], 0.5 * (1 - np.tanh(1) ** 2), rtol=1e-6)
