"""``jmp_lite.nnx.watch``, ``compare``, ``tune``, and the loss scale of an optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from flax import nnx
from helpers import relative_error

import jmp_lite as jmp
import jmp_lite.nnx

X = jax.random.normal(jax.random.key(0), (16, 8))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.dropout(self.norm(x))


def make_net():
    return Net(nnx.Rngs(0))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def numbers(model):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(nnx.state(model))
        if jnp.issubdtype(leaf.dtype, jnp.number)
    }


def assert_alike(model, other):
    jax.tree.map(np.testing.assert_array_equal, numbers(model), numbers(other))


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_a_watched_gradient_is_the_gradient_and_changes_the_module_as_it_does(wrap):
    watched, plain = make_net(), make_net()
    fun = nnx.grad(jmp.nnx.autocast(loss_fn))
    grads, stats = wrap(jmp.nnx.watch(fun))(watched, X)
    expected = wrap(fun)(plain, X)
    jax.tree.map(np.testing.assert_array_equal, grads, expected)
    assert_alike(watched, plain)
    assert int(watched.dropout.rngs.count[...]) == 1
    rows = [row for row in stats.rows if row.op == "dot_general"]
    assert len(rows) == 2 + 3, "two products, and their gradients but that of x"
    assert any("layers/1" in row.scope for row in rows)


def test_the_first_nan_of_a_backward_pass_with_dropout_is_found_in_one_line():
    model = make_net()
    model.norm.scale[...] = jnp.zeros(8)
    root = lambda model, x: jnp.sum(jnp.sqrt(jnp.abs(model(x))))
    _, stats = jmp.nnx.watch(nnx.grad(root))(model, X)
    assert jmp.first_nonfinite(stats) is not None


def test_a_module_and_a_method_are_watched_by_themselves():
    model = make_net()
    for fun in (model, model.__call__):
        out, stats = jmp.nnx.watch(fun, "bfloat16")(x=X)
        assert out.shape == X.shape
        assert stats.dtype == "bfloat16"


def test_compare_changes_no_module_and_names_its_variables():
    model, same = make_net(), make_net()
    compared = jmp.nnx.compare(loss_fn, backward=True)(model, X)
    assert_alike(model, same)
    errors = compared.errors
    assert 1e-6 < errors["result.out"] < 0.02
    changed = {name for name in errors if "changed" in name}
    assert changed == {
        f"result.changed[{name!r}]"
        for name in (
            "args[0]['dropout']['rngs']['count']",
            "args[0]['norm']['mean']",
            "args[0]['norm']['var']",
        )
    }
    kernel = "gradient of args[0]['layers'][1]['kernel']"
    full, low = (
        nnx.grad(fun)(make_net(), X)["layers"][1]["kernel"][...]
        for fun in (loss_fn, jmp.nnx.autocast(loss_fn))
    )
    assert errors[kernel] == pytest.approx(relative_error(low, full), rel=1)
    assert any("layers/0" in row.scope for row in compared.rows)


def test_compare_of_a_function_that_changes_nothing_names_its_result_as_the_core_does():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    found = jmp.nnx.compare(model)(X)
    assert list(found.errors) == ["result"]
    assert jmp.nnx.compare(model, "O0")(X).errors == {"result": 0.0}


def test_tune_finds_the_layer_that_needs_float32_and_changes_no_module():
    class Sensitive(nnx.Module):
        def __init__(self, rngs):
            self.robust = nnx.Linear(8, 8, rngs=rngs)
            self.sensitive = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            far = self.sensitive(x + 300) - self.sensitive(jnp.full_like(x, 300))
            return self.robust(jnp.tanh(far))

    model, lines = Sensitive(nnx.Rngs(0)), []
    before = numbers(model)
    tuned = jmp.nnx.tune(model, tolerance=0.02, progress=lines.append)
    rules, report = tuned(X)
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)
    assert lines
    assert report.error.largest <= 0.02 < report.error_before.largest
    assert jmp.nnx.explain(model, rules)(X).dtype_of("robust", "dot_general") == (
        "bfloat16"
    )


def test_the_loss_scale_of_an_nnx_optimizer_is_a_value():
    model = make_net()
    scaled = jmp.loss_scaling(lenient(optax.adam(1e-3)), jmp.DynamicLossScale(period=1))
    optimizer = nnx.Optimizer(model, scaled, wrt=nnx.Param)
    grad_fn = nnx.grad(jmp.nnx.autocast(loss_fn))
    scale = jmp.get_loss_scale(optimizer.opt_state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(scale))
    optimizer.update(model, grad_fn(model, X))
    assert f"{scale:.0f}" == "32768"
    assert f"{jmp.get_loss_scale(optimizer.opt_state):.0f}" == "65536"


@pytest.mark.parametrize("change", [{}, {"period": 3}])
def test_the_loss_scale_of_an_nnx_optimizer_can_be_set(change):
    model = make_net()
    scaled = jmp.loss_scaling(lenient(optax.adam(1e-3)), jmp.DynamicLossScale(period=1))
    optimizer = nnx.Optimizer(model, scaled, wrt=nnx.Param)
    grads = nnx.grad(loss_fn)(model, X)
    optimizer.update(model, grads)
    scale = jmp.get_loss_scale(optimizer.opt_state)
    lower = dataclasses.replace(scale, loss_scale=8.0, **change)
    optimizer.opt_state = jmp.set_loss_scale(optimizer.opt_state, lower)
    nnx.jit(lambda model, optimizer: optimizer.update(model, grads))(model, optimizer)
    expected = "8" if change else "16"
    assert f"{jmp.get_loss_scale(optimizer.opt_state):.0f}" == expected


def test_an_abstract_model_with_dropout_is_explained():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.dense(x))

    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    rows = jmp_lite.nnx.explain(model)(jax.ShapeDtypeStruct((2, 8), "float32")).rows
    assert [row.precision for row in rows if row.op == "dot_general"] == ["bfloat16"]
