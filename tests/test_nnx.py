import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from optimizers import lenient
from test_autocasting_interpreter import (
    live_equations,
    products,
    relative_error,
)

import jmp_lite.nnx
from jmp_lite.autocasting.interpreter import autocast
from jmp_lite.autocasting.rules import get_rules

X = jax.random.normal(jax.random.key(0), (16, 8))
LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.bn = nnx.BatchNorm(width, rngs=rngs)
        self.fc = nnx.Linear(width, width, rngs=rngs)
        self.ln1 = nnx.LayerNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.ln1(self.fc(self.bn(x)))))

    def features(self, x):
        return self.fc(x)


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net():
    return Net(8, nnx.Rngs(0))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def numbers(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


WRAPS = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "grad": nnx.grad,
    "jit of grad": lambda f: nnx.jit(nnx.grad(f)),
    "grad of remat": lambda f: nnx.grad(nnx.remat(f)),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_statistics_and_counts_are_those_of_float32(wrap):
    full, low = make_net(), make_net()
    expected = WRAPS[wrap](loss_fn)(full, X)
    actual = WRAPS[wrap](jmp_lite.nnx.autocast(loss_fn))(low, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        nnx.to_pure_dict(nnx.state(low)), nnx.to_pure_dict(nnx.state(full))
    )
    # What nothing low has entered is float32's, bit for bit; the rest within rounding.
    np.testing.assert_array_equal(low.blocks[0].bn.mean[...], full.blocks[0].bn.mean)
    np.testing.assert_array_equal(low.blocks[0].bn.var[...], full.blocks[0].bn.var)
    assert np.any(low.blocks[0].bn.mean[...] != make_net().blocks[0].bn.mean[...])
    np.testing.assert_allclose(
        low.blocks[1].bn.var[...], full.blocks[1].bn.var[...], rtol=1e-3
    )
    assert int(low.blocks[0].dropout.rngs.count[...]) == 1
    assert relative_error(numbers(actual), numbers(expected)) < 0.1


def test_the_object_outside_stays_what_it_was():
    model = make_net()
    before = {path: type(m) for path, m in nnx.iter_modules(model)}
    names = sorted(vars(model.blocks[0]))
    jmp_lite.nnx.autocast(loss_fn)(model, X)
    assert {path: type(m) for path, m in nnx.iter_modules(model)} == before
    assert sorted(vars(model.blocks[0])) == names
    nnx.update(model, nnx.state(make_net()))


def test_all_products_are_low_and_norms_are_found_by_their_class():
    graphdef, state = nnx.split(make_net())

    def fun(state, x):
        return jmp_lite.nnx.autocast(loss_fn)(nnx.merge(graphdef, state), x)

    eqns = live_equations(fun, state, X)
    assert set(products(eqns)) == {LOW}
    roots = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "rsqrt"]
    assert set(map(str, roots)) == {"float32"}
    stack = {str(eqn.source_info.name_stack) for eqn in eqns}
    assert "__autocast__/Net/blocks/1/ln1/LayerNorm" in stack
    rows = jmp_lite.nnx.explain(make_net())(X).rows
    (square, *_) = (r for r in rows if "ln1" in r.scope and r.op == "square")
    assert square.reason.startswith("FULL_INSIDE: scope rule")
    relu = [
        r.precision for r in rows if r.op == "max" and r.scope == "Net/blocks/0/relu"
    ]
    assert relu == ["bfloat16"]


def test_a_path_works_in_a_scope_rule_also_inside_nnx_transforms():
    def model_in_jit(model, x):
        return nnx.jit(nnx.remat(lambda m, x: m(x)))(model, x)

    rules = get_rules("mixed").scope("blocks/1/fc", "full")
    for fun in (loss_fn, model_in_jit):
        rows = jmp_lite.nnx.explain(fun, rules)(make_net(), X).rows
        dots = {r.scope.split("Net/")[1]: r for r in rows if r.op == "dot_general"}
        assert [dots[path].precision for path in sorted(dots)] == [
            *("bfloat16", "float32", "bfloat16"),
        ]


def test_autocast_inside_of_autocast_leaves_scopes_and_classes_alone():
    model = make_net()
    inner = jmp_lite.nnx.autocast(lambda m, x: m(x), "O0")
    outer = jmp_lite.nnx.autocast(lambda m, x: inner(m, x) + m(x))
    for _ in range(2):
        assert outer(model, X).shape == (16, 3)
    assert type(model) is Net
    assert type(model.blocks[1].ln1) is nnx.LayerNorm


@pytest.mark.parametrize(
    "make",
    [
        lambda model: jmp_lite.nnx.autocast(model),
        lambda model: jmp_lite.nnx.autocast(model.__call__),
        lambda model: functools.partial(jmp_lite.nnx.autocast()(Net.__call__), model),
    ],
)
def test_modules_and_their_methods_are_functions(make):
    model = make_net()
    assert make(model)(X).dtype == np.float32
    assert int(model.blocks[0].dropout.rngs.count[...]) == 1
    features = jmp_lite.nnx.autocast(model.blocks[0].features)
    assert (features.__name__, features(X).shape) == ("features", (16, 8))


def test_a_training_step_learns_as_in_float32():
    def train(loss_fn):
        model = make_net()
        optimizer = nnx.Optimizer(model, lenient(optax.adam(1e-2)), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)
            return loss

        return [float(step(model, optimizer, X)) for _ in range(30)]

    full, low = train(loss_fn), train(jmp_lite.nnx.autocast(loss_fn))
    assert low[-1] < full[0] / 4
    assert abs(low[-1] - full[-1]) < 0.2 * full[0]


def test_structure_may_change_and_modules_may_be_returned():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.calls[...] += 1
            self.seen = nnx.Variable(x.sum())
            return x

    model = Counting()
    same, out, nothing = jmp_lite.nnx.autocast(lambda m, *, x: (m, m(x), None))(
        model, x=X
    )
    assert same is model
    assert nothing is None
    assert int(model.calls[...]) == 1
    np.testing.assert_array_equal(model.seen[...], out.sum())


@pytest.mark.parametrize("wrap", [autocast, lambda f: jax.jit(autocast(f))])
def test_the_core_refuses_what_would_lose_its_updates(wrap):
    model = make_net()
    for call in (
        lambda: wrap(loss_fn)(model, X),
        lambda: wrap(lambda models, x: models["a"](x))({"a": model}, X),
        lambda: wrap(lambda x: model(x))(X),
        lambda: wrap(model.__call__)(X),
        lambda: wrap(functools.partial(loss_fn, model))(X),
    ):
        with pytest.raises(TypeError, match=r"an nnx object, a Net.*jmp_lite\.nnx\.au"):
            call()
    graphdef, state = nnx.split(model)
    fun = wrap(lambda state, x: nnx.merge(graphdef, state)(x))
    assert fun(state, X).dtype == np.float32


def test_a_module_that_is_changed_has_to_be_an_argument():
    model = make_net()
    with pytest.raises(errors.TraceContextError) as caught:
        jmp_lite.nnx.autocast(lambda x: model(x))(X)
    assert any("has to be one of its arguments" in n for n in caught.value.__notes__)
    model.eval()
    assert jmp_lite.nnx.autocast(lambda x: model(x))(X).dtype == np.float32


def test_bad_rules_are_refused_when_the_function_is_made():
    with pytest.raises(ValueError, match=r"Unknown preset 'mixde'.*'mixed'"):
        jmp_lite.nnx.autocast(loss_fn, "mixde")
    with pytest.raises(TypeError, match="Expected the name of a preset or a Rules"):
        jmp_lite.nnx.autocast(loss_fn, 3)
