import contextlib
import functools
import types

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from flax import errors, nnx
from helpers import live_equations, products, relative_error

import jmp_lite
import jmp_lite.nnx
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.mutables import noting_captures, refusing_modules

X = jax.random.normal(jax.random.key(0), (16, 8))
LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3
LOW_NAME, FULL_NAME = "bfloat16", "float32"


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


class LinenBlock(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.Dense(8, name="fc")(x)
        return flax.linen.BatchNorm(use_running_average=False, name="bn")(x)


class Bridged(nnx.Module):
    """A module that takes each of its attributes for a variable, among others."""

    def __init__(self, rngs):
        inner = nnx.bridge.ToNNX(LinenBlock(), rngs=rngs)
        self.inner = nnx.bridge.lazy_init(inner, X)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.inner(x, mutable=["batch_stats"]))


class Named(nnx.Module):
    """A base class that wants a name of its subclasses, and knows its attributes."""

    def __init_subclass__(cls, *, name, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.name = name

    def __setattr__(self, attribute, value):
        assert attribute in {"fc", "_pytree__state"}, attribute
        super().__setattr__(attribute, value)


class NamedLinear(Named, name="linear"):
    def __init__(self, rngs):
        self.fc = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
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


def with_respect_to_params(transform, fun):
    """Takes a gradient as both of Flax's modes can: of a part of the state."""

    def of_model(model, *args):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def of_states(params, rest, *args):
            return fun(nnx.merge(graphdef, params, rest), *args)

        return transform(of_states)(params, rest, *args)

    return of_model


# Gradients of modules that contain counts need Flax's graph mode.
WRAPS = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "jit of grad": lambda f: nnx.jit(with_respect_to_params(nnx.grad, f)),
    "jit of grad of graphs": lambda f: nnx.compat.jit(nnx.compat.grad(f)),
    "jit of grad of remat": lambda f: nnx.compat.jit(
        nnx.compat.grad(nnx.compat.remat(f))
    ),
}


@pytest.fixture(params=[True, False], ids=["graph mode", "tree mode"])
def mode(request):
    with nnx.set_graph_mode(request.param), nnx.set_graph_updates(request.param):
        yield


@pytest.fixture
def graph_mode():
    with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
        yield


@pytest.fixture
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.mark.parametrize("wrap", WRAPS)
def test_statistics_and_counts_are_those_of_float32(wrap):
    full, low = make_net(), make_net()
    expected = WRAPS[wrap](loss_fn)(full, X)
    actual = WRAPS[wrap](jmp_lite.nnx.autocast(loss_fn))(low, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        nnx.to_pure_dict(nnx.state(low)), nnx.to_pure_dict(nnx.state(full))
    )
    # Values without a low operand are equal bit for bit; the others within rounding.
    np.testing.assert_array_equal(low.blocks[0].bn.mean[...], full.blocks[0].bn.mean)
    np.testing.assert_array_equal(low.blocks[0].bn.var[...], full.blocks[0].bn.var)
    assert np.any(low.blocks[0].bn.mean[...] != make_net().blocks[0].bn.mean[...])
    np.testing.assert_allclose(
        low.blocks[1].bn.var[...], full.blocks[1].bn.var[...], rtol=1e-3
    )
    assert int(low.blocks[0].dropout.rngs.count[...]) == 1
    assert relative_error(numbers(actual), numbers(expected)) < 0.1


def test_the_module_of_the_caller_keeps_its_classes_and_attributes():
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
    assert square.precision == "float32"
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


@pytest.mark.usefixtures("mode")
def test_a_training_step_learns_as_in_float32():
    def train(loss_fn):
        model = make_net()
        optimizer = nnx.Optimizer(model, lenient(optax.adam(1e-2)), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            value_and_grad = with_respect_to_params(nnx.value_and_grad, loss_fn)
            loss, grads = value_and_grad(model, x)
            optimizer.update(model, grads)
            return loss

        return [float(step(model, optimizer, X)) for _ in range(30)]

    full, low = train(loss_fn), train(jmp_lite.nnx.autocast(loss_fn))
    assert low[-1] < full[0] / 4
    assert abs(low[-1] - full[-1]) < 0.2 * full[0]


@pytest.mark.usefixtures("mode")
def test_steps_share_one_trace_and_keep_the_structure_of_the_module():
    model, traces = make_net(), []
    optimizer = jmp_lite.loss_scaling(lenient(optax.adam(1e-2)))
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    before = nnx.graphdef((model, optimizer))

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(1)
        loss_scale = jmp_lite.get_loss_scale(optimizer.opt_state)
        low_loss_fn = jmp_lite.nnx.autocast(loss_fn, compute_dtype="float16")
        transform = functools.partial(
            jmp_lite.nnx.value_and_grad, loss_scale=loss_scale
        )
        _, grads = with_respect_to_params(transform, low_loss_fn)(model, x)
        optimizer.update(model, grads)

    for _ in range(3):
        step(model, optimizer, X)
    assert len(traces) == 1
    assert int(model.blocks[0].dropout.rngs.count[...]) == 3
    assert nnx.graphdef((model, optimizer)) == before
    jmp_lite.nnx.explain(loss_fn)(model, X)
    jmp_lite.nnx.scoped(model)
    assert nnx.graphdef((model, optimizer)) == before


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
def test_the_transforms_of_the_core_reject_modules_whose_updates_they_would_lose(wrap):
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
    for fun in (lambda x: model(x), lambda x: {"model": model}["model"](x)):
        with pytest.raises(errors.TraceContextError) as caught:
            jmp_lite.nnx.autocast(fun)(X)
        notes = " ".join(caught.value.__notes__)
        assert notes.count("jmp_lite.nnx.autocast and pass the module as an arg") == 1
    held = types.SimpleNamespace(model=model)
    for wrap in (autocast, jmp_lite.explain, lambda f: autocast(f, "O0")):
        with pytest.raises(errors.TraceContextError) as caught:
            wrap(lambda x: held.model(x))(X)
        assert any("jmp_lite.nnx.autocast" in note for note in caught.value.__notes__)
    model.eval()
    assert jmp_lite.nnx.autocast(lambda x: model(x))(X).dtype == np.float32
    assert autocast(lambda x: held.model(x))(X).dtype == np.float32


def test_only_flax_s_errors_about_captured_modules_get_a_note():
    with pytest.raises(ValueError, match="mine") as caught, noting_captures():
        raise ValueError("mine")
    assert not hasattr(caught.value, "__notes__")
    nested = contextlib.ExitStack()
    for _ in range(2):
        nested.enter_context(noting_captures())
    with pytest.raises(errors.TraceContextError) as twice, nested:
        raise errors.TraceContextError("Cannot mutate")
    assert len(twice.value.__notes__) == 1


def test_functions_that_cannot_write_changes_back_reject_modules():
    fun = refusing_modules(lambda *args, **kwargs: len(args) + len(kwargs), "this.one")
    assert fun(X, x={"a": X}, state=nnx.state(make_net())) == 3
    for call in (
        lambda: fun(make_net(), X),
        lambda: fun(X, models={"a": [make_net()]}),
    ):
        with pytest.raises(TypeError, match=r"an nnx object, a Net, as an arg.*this\."):
            call()


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(
    ("wrap", "jit"),
    [
        (lambda f: f, nnx.jit),
        (autocast, lambda f: f),  # Op by op, which takes long.
        (autocast, nnx.jit),
        (lambda f: autocast(f, "O0"), nnx.jit),
        (jmp_lite.nnx.autocast, nnx.jit),
        (lambda f: lambda *args: jmp_lite.watch(f)(*args)[0], nnx.jit),
    ],
)
def test_a_function_of_a_module_s_state_changes_its_variables(wrap, jit):
    model = make_net()
    graphdef, state = nnx.split(model)

    def apply(state, x):
        return nnx.merge(graphdef, state)(x)

    jit(lambda state, x: wrap(apply)(state, x))(state, X)
    assert int(model.blocks[0].dropout.rngs.count[...]) == 1
    assert np.any(model.blocks[0].bn.mean[...] != 0)


def test_a_function_of_a_module_s_state_may_return_the_new_one():
    model = make_net()
    graphdef, state = nnx.split(model)

    @jax.jit
    @autocast
    def apply(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model, nnx.RngCount, nnx.BatchStat)

    nnx.update(model, *apply(state, X)[1])
    assert int(model.blocks[0].dropout.rngs.count[...]) == 1
    assert np.any(model.blocks[0].bn.mean[...] != 0)


@pytest.mark.usefixtures("tree_mode")
def test_in_tree_mode_a_gradient_of_counts_is_an_error_with_an_alternative():
    fun = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=jmp_lite.StaticLossScale(2))
    with pytest.raises(
        TypeError, match=r"Argument 0 holds uint32 .*nnx\.split"
    ) as caught:
        fun(make_net(), X)
    assert "blocks" in str(caught.value)
    loss, grads = jmp_lite.nnx.value_and_grad(
        lambda x, model: model(x).sum(), loss_scale=jmp_lite.StaticLossScale(2)
    )(X, make_net())
    assert (loss.shape, grads.shape) == ((), X.shape)


def test_bad_rules_are_an_error_when_the_function_is_made():
    with pytest.raises(ValueError, match=r"Unknown preset 'mixde'.*'mixed'"):
        jmp_lite.nnx.autocast(loss_fn, "mixde")
    with pytest.raises(TypeError, match="Expected the name of a preset or a Rules"):
        jmp_lite.nnx.autocast(loss_fn, 3)


# ------------------------------------------------------------------ parts in 16 bits


class Deep(nnx.Module):
    """Modules of all kinds: in lists, shared, with statistics and random numbers."""

    def __init__(self, rngs):
        self.blocks = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.ln1 = nnx.LayerNorm(8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.tied = self.blocks[0]
        self.scale = nnx.Param(jnp.ones(()))
        self.steps = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.steps[...] += 1
        for block in self.blocks:
            x = x + block(self.ln1(x))
        x = self.dropout(self.batch_norm(self.tied(x)))
        return self.head(x) * self.scale


def deep():
    return Deep(nnx.Rngs(0))


# Modules with shared parts are graphs in each mode of Flax.
split, state_of = nnx.compat.split, nnx.compat.state


def assert_same(actual, expected):
    def numbers(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    chex.assert_trees_all_equal(*(jax.tree.map(numbers, t) for t in (actual, expected)))


def dots(model, x=X):
    graphdef, state = split(model)
    eqns = live_equations(lambda state: nnx.merge(graphdef, state)(x), state)
    return [
        str(eqn.outvars[0].aval.dtype)
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]


@pytest.mark.parametrize(
    ("where", "lows"),
    [
        (None, [0, 1, 2, 3]),
        ("head", [3]),
        ("blocks/1", [1]),
        ("blocks", [0, 1, 2]),
        (nnx.Linear, [0, 1, 2, 3]),
        (("head", "blocks/1"), [1, 3]),
    ],
)
@pytest.mark.usefixtures("mode")
def test_parts_of_a_module_compute_in_a_dtype_and_parameters_stay(where, lows):
    with jax.numpy_dtype_promotion("standard"):
        model = deep()
        before = state_of(model)
        assert jmp_lite.nnx.to_float(model, "bfloat16", where) is model
        assert dots(model) == [LOW_NAME if i in lows else FULL_NAME for i in range(4)]
        assert_same(before, state_of(model))


def test_keep_none_keeps_no_other_part_and_all_parts_are_an_error():
    for keep in (None, ()):
        low = jmp_lite.nnx.cast(deep(), "bfloat16", keep=keep)
        assert low.head.kernel[...].dtype == LOW_NAME
    norms = nnx.Sequential(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    assert jmp_lite.nnx.cast(norms, "bfloat16").layers[0].scale.dtype == FULL_NAME
    for keep in ("", (None,)):
        with pytest.raises(ValueError, match="selects every parameter"):
            jmp_lite.nnx.cast(deep(), "bfloat16", keep=keep)


def test_a_selector_that_selects_nothing_is_an_error_that_lists_the_parts():
    model = deep()
    with pytest.raises(ValueError, match=r"'haed' selects nothing.*mean 'head'"):
        jmp_lite.nnx.to_float(model, "bfloat16", "haed")
    with pytest.raises(ValueError, match=r"There is: .*blocks/0 \(Linear\)"):
        jmp_lite.nnx.cast(model, "bfloat16", keep=nnx.Conv)
    with pytest.raises(ValueError, match=r"no attribute 'dtype': dropout"):
        jmp_lite.nnx.to_float(model, "bfloat16", nnx.Dropout)
    for call in (jmp_lite.nnx.cast, jmp_lite.nnx.to_float):
        with pytest.raises(TypeError, match="Expected an nnx module, got Dense"):
            call(flax.linen.Dense(3), "bfloat16")
        with pytest.raises(ValueError, match="Unknown dtype 'bf61'"):
            call(model, "bf61")
        with pytest.raises(TypeError, match="a class, a regular expression"):
            call(model, "bfloat16", 3)
    assert set(dots(model)) == {FULL_NAME}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_are_cast_and_norms_statistics_counts_and_keys_are_kept(dtype):
    model = deep()
    before = jax.tree.map(jnp.copy, state_of(model))
    low = jmp_lite.nnx.cast(model, dtype)
    assert type(low) is Deep
    kernels = [low.blocks[0].kernel, low.blocks[1].bias, low.head.kernel, low.scale]
    assert {str(v[...].dtype) for v in kernels} == {dtype}
    kept = [low.ln1.scale, low.batch_norm.mean, low.batch_norm.bias]
    assert {str(v[...].dtype) for v in kept} == {"float32"}
    assert low.steps[...].dtype == jnp.int32
    assert low.tied is low.blocks[0], "what was shared is shared"
    assert_same(before, state_of(model))
    with jax.numpy_dtype_promotion("standard"):
        low(X)
    assert (int(low.steps[...]), int(model.steps[...])) == (1, 0)
    assert float(jnp.abs(low.batch_norm.mean[...]).sum()) > 0
    assert float(jnp.abs(model.batch_norm.mean[...]).sum()) == 0


def test_more_can_be_kept_by_class_or_path():
    low = jmp_lite.nnx.cast(deep(), "bfloat16", keep=("head", "blocks/1"))
    found = {path: set(summary) for path, summary in jmp_lite.nnx.dtype_summary(low)}
    assert found["head (Linear)"] == {"float32"}
    assert found["blocks/0 (Linear)"] == {"bfloat16"}
    assert found["blocks/1 (Linear)"] == {"float32"}
    assert found["(Deep)"] == {"bfloat16", "int32"}


@pytest.mark.usefixtures("graph_mode")  # A DiffState, and a base that is shared.
def test_a_frozen_16_bit_base_keeps_its_float32_adapters_and_trains_them():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(8, 8, rngs=rngs)
            self.lora = nnx.LoRA(8, 2, 8, base_module=self.base, rngs=rngs)

        def __call__(self, x):
            return self.lora(x)

    for keep in (nnx.LoRAParam, "lora", "lora_[ab]$"):
        low = jmp_lite.nnx.cast(Adapted(nnx.Rngs(0)), "bfloat16", keep=keep)
        assert low.base.kernel[...].dtype == LOW_NAME
        assert low.lora.lora_a[...].dtype == FULL_NAME
    with pytest.raises(ValueError, match="selects every parameter"):  # The base, too.
        jmp_lite.nnx.cast(Adapted(nnx.Rngs(0)), "bfloat16", keep=nnx.LoRA)

    optimizer = nnx.Optimizer(low, lenient(optax.adam(1e-2)), wrt=nnx.LoRAParam)
    base, target = jnp.copy(low.base.kernel[...]), jnp.ones((16, 8))

    @nnx.jit
    def step(model, optimizer):
        @jmp_lite.nnx.autocast
        def loss_fn(model):
            return jnp.mean((model(X) - target) ** 2)

        diff = nnx.DiffState(0, nnx.LoRAParam)
        with jax.numpy_dtype_promotion("standard"):
            loss, grads = nnx.value_and_grad(loss_fn, argnums=diff)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(low, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_equal(low.base.kernel[...], base)
    assert low.lora.lora_a[...].dtype == FULL_NAME


def test_a_summary_counts_each_variable_once_and_prints_a_table():
    model = deep()
    rows = jmp_lite.nnx.dtype_summary(model)
    total = sum(row.summary.total.bytes for row in rows)
    leaves = jax.tree.leaves(state_of(model))
    assert total == sum(x.size * x.dtype.itemsize for x in leaves)
    lines = str(rows).splitlines()
    assert lines[0].split() == ["module", "dtype", "elements", "bytes"]
    assert any(line.split()[:3] == ["head", "(Linear)", "float32"] for line in lines)
    assert str(jmp_lite.nnx.dtype_summary(nnx.Sequential())).startswith("module")


# --------------------------------------------------------------------------- scoped


def test_a_view_has_scopes_and_the_variables_of_the_module_itself():
    model = deep()
    view = jmp_lite.nnx.scoped(model)
    assert isinstance(view, Deep)
    assert isinstance(view.blocks[0], nnx.Linear)
    assert view.head.kernel is model.head.kernel
    assert jax.tree.structure(state_of(view)) == jax.tree.structure(state_of(model))
    assert type(model.head) is nnx.Linear, "the module has not changed"
    view(X)
    assert int(model.steps[...]) == 1

    graphdef, state = split(view)
    apply = lambda state, x: nnx.merge(graphdef, state)(x)
    rows = jmp_lite.explain(apply, get_rules("mixed").scope("head", "full"))(
        state, X
    ).rows
    found = {row.scope: row.precision for row in rows if row.op == "dot_general"}
    assert found["Deep/head/Linear"] == "float32"
    assert found["Deep/blocks/1/Linear"] == "bfloat16"
    norms = [row for row in rows if row.op == "rsqrt"]
    assert {row.precision for row in norms} == {"float32"}
    assert {row.scope for row in norms} >= {"Deep/ln1/LayerNorm"}


def test_a_view_goes_through_nnx_transforms_and_its_own_autocast():
    model = deep()
    view = jmp_lite.nnx.scoped(model)
    expected = nnx.compat.jit(lambda m, x: m(x))(view, X)
    assert int(model.steps[...]) == 1
    grads = nnx.compat.grad(lambda m: m(X).sum())(view)
    assert jax.tree.leaves(grads)
    out = jmp_lite.nnx.autocast(view)(X)
    assert out.shape == expected.shape
    assert type(view.head).__name__ == "Linear"
    restored = deep()
    nnx.update(restored, state_of(view))
    assert_same(state_of(restored), state_of(model))
    again = jmp_lite.nnx.scoped(view)
    assert type(again.head) is type(view.head)


@pytest.mark.parametrize(
    ("make", "scopes"),
    [
        (Bridged, {"Bridged/inner/ToNNX/LinenBlock/fc", "Bridged/head/Linear"}),
        (NamedLinear, {"fc/Linear"}),  # A class that has no subclass has no scope.
    ],
)
def test_modules_that_refuse_attributes_or_subclasses_run_and_are_left_as_they_are(
    make, scopes
):
    model, expected = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    low = jmp_lite.nnx.autocast(model)(X)
    chex.assert_trees_all_close(low, expected(X), atol=0.03)
    statistics, expected_ones = (nnx.state(m, nnx.BatchStat) for m in (model, expected))
    chex.assert_trees_all_close(statistics, expected_ones, atol=0.03)
    rows = jmp_lite.nnx.explain(model)(X).rows
    assert {row.scope for row in rows if row.op == "dot_general"} == scopes
    assert max(jmp_lite.nnx.compare(model)(X).errors.values()) < 0.03
    watched, _ = jmp_lite.nnx.watch(model)(X)
    chex.assert_trees_all_close(watched, model(X), atol=1e-5)
    for (_, after), (_, before) in zip(
        nnx.iter_modules(model), nnx.iter_modules(make(nnx.Rngs(0))), strict=True
    ):
        assert type(after) is type(before)
        assert set(vars(after)) == set(vars(before))
