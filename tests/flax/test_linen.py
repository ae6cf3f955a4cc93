"""Linen modules of which parts compute in 16 bits, and scales in Flax's checkpoints."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import lenient
from flax import errors, serialization
from flax.training.train_state import TrainState
from helpers import initialized, live_equations, products

import jmp_lite as jmp
import jmp_lite.linen

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(0), (4, 8))
LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3


class Mlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.gelu(nn.Dense(self.width, name="up")(x)))


class Net(nn.Module):
    """Modules of all kinds: inline, from setup, given, in a list, twice called."""

    head: nn.Module
    depth: int = 2

    def setup(self):
        self.blocks = [Mlp(8) for _ in range(self.depth)]
        self.norm = nn.LayerNorm()

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)

    def decode(self, h):
        return self.head(h) + self.head(-h)


def dots(module, params, *before, x=X, **options):
    eqns = live_equations(lambda p: module.apply(p, *before, x, **options), params)
    return [
        tuple(str(v.aval.dtype) for v in (*eqn.invars[:2], eqn.outvars[0]))
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]


@pytest.fixture
def net():
    return Net(nn.Dense(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_of_a_module_computes_in_a_dtype_and_parameters_stay(net, dtype):
    low = jmp_lite.linen.to_float(net, dtype)
    params = low.init(jax.random.key(1), X)
    expected = net.init(jax.random.key(1), X)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert set(dots(low, params)) == {(dtype,) * 3}
    assert set(dots(net, params)) == {FULL}
    np.testing.assert_allclose(
        low.apply(params, X).astype("float32"), net.apply(params, X), atol=0.1
    )


@pytest.mark.parametrize(
    ("where", "lows"),
    [
        ("head", [4, 5]),
        ("blocks_1", [2, 3]),
        ("blocks_0/up", [0]),
        ("up$", [0, 2]),
        (Mlp, [0, 1, 2, 3]),
        (nn.Dense, [0, 1, 2, 3, 4, 5]),
        (("head", "blocks_0/Dense"), [1, 4, 5]),
    ],
)
def test_parts_are_selected_by_class_or_path(net, where, lows):
    low = jmp_lite.linen.to_float(net, "bfloat16", where)
    params = initialized(net, X)
    assert dots(low, params) == [LOW if i in lows else FULL for i in range(6)]
    # The module that it was made of has not changed.
    assert set(dots(net, params)) == {FULL}


def test_one_layer_is_a_module_like_any_other(net):
    low = jmp_lite.linen.to_float(nn.Dense(3, name="last"), jnp.bfloat16)
    assert isinstance(low, nn.Dense)
    assert (type(low).__name__, low.name, low.features) == ("Dense", "last", 3)
    inside = Net(jmp_lite.linen.to_float(nn.Dense(3), "bfloat16"))
    params = initialized(net, X)
    assert dots(inside, params) == [FULL] * 4 + [LOW] * 2
    nested = jmp_lite.linen.to_float(inside, "float16", "blocks")
    assert dots(nested, params) == [("float16",) * 3] * 4 + [LOW] * 2


def test_other_methods_and_transforms_work_too(net):
    low = jmp_lite.linen.to_float(net, "bfloat16", "blocks")
    params = initialized(net, X)
    assert dots(low, params, method="encode") == [LOW] * 4
    assert dots(low, params, method=low.decode) == [FULL] * 2
    assert dots(low, params, method=net.encode) == [LOW] * 4
    assert dots(low, params, method=Net.decode) == [FULL] * 2
    bound = low.bind(params)
    assert bound.encode(X).dtype == low.apply(params, X, method="encode").dtype
    grads = jax.jit(jax.grad(lambda p: low.apply(p, X).astype("float32").sum()))(params)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}
    remat = nn.remat(Mlp)(8)
    low = jmp_lite.linen.to_float(remat, "bfloat16")
    assert dots(low, initialized(remat, X)) == [LOW] * 2
    again = jmp_lite.linen.to_float(net, "bfloat16", "blocks")
    assert type(again) is type(jmp_lite.linen.to_float(net, "bfloat16", "blocks"))
    assert again == jmp_lite.linen.to_float(net, "bfloat16", "blocks")


class Helpful(nn.Module):
    width: int = 3

    def double(self):
        return 2 * self.width

    @staticmethod
    def add(a, b):
        return a + b

    @nn.compact
    def __call__(self, x):
        return self.add(nn.Dense(self.double())(x), 1)


def test_methods_that_need_no_variables_work_on_an_unbound_module():
    low = jmp_lite.linen.to_float(Helpful(), "bfloat16")
    assert low.double() == 6
    assert low.add(1, 2) == 3
    out, _ = low.init_with_output(jax.random.key(0), X)
    assert (out.shape, out.dtype) == ((4, 6), jnp.bfloat16)
    with pytest.raises(errors.CallCompactUnboundModuleError):
        low(X)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.SimpleCell])
def test_a_cell_makes_its_carry_before_it_has_parameters(cell):
    low = jmp_lite.linen.to_float(cell(4), "bfloat16")
    carry = low.initialize_carry(jax.random.key(0), (2, 8))
    expected = cell(4).initialize_carry(jax.random.key(0), (2, 8))
    jax.tree.map(np.testing.assert_array_equal, carry, expected)
    params = low.init(jax.random.key(1), carry, X[:2])
    assert {dtype for dot in dots(low, params, carry, x=X[:2]) for dtype in dot} == {
        "bfloat16"
    }


@pytest.mark.parametrize("where", [None, nn.Dense, (nn.SpectralNorm, nn.WeightNorm)])
@pytest.mark.parametrize("norm", [nn.SpectralNorm, nn.WeightNorm])
def test_norms_of_weights_keep_their_parameters_in_float32(norm, where):
    module = norm(nn.Dense(3))
    options = {"update_stats": True} if norm is nn.SpectralNorm else {}
    low = jmp_lite.linen.to_float(module, "bfloat16", where)
    variables = low.init(jax.random.key(0), X, **options)
    expected = module.init(jax.random.key(0), X, **options)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    out, _ = low.apply(variables, X, **options, mutable=["batch_stats"])
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_module_survives_pickle(copied):
    low = jmp_lite.linen.to_float(Helpful(), "float16")
    twice = jmp_lite.linen.to_float(low, "bfloat16", nn.Dense)
    for module in (low, twice):
        again = copied(module)
        assert again == module
        assert type(again) is type(module)
        params = again.init(jax.random.key(0), X)
        assert again.apply(params, X).dtype == module.apply(params, X).dtype
        assert again.apply(params, X).dtype != jnp.float32


@pytest.mark.parametrize(
    "method",
    [
        "encode",
        Net.encode,
        lambda module, x: module.encode(x),
        lambda module, x: module.blocks[0](x),
        "head",
    ],
    ids=["a name", "of the class", "a function", "of a part", "the name of a part"],
)
def test_a_method_that_is_applied_instead_of_a_call_computes_in_the_dtype_too(
    net, method
):
    params = initialized(net, X)
    low = jmp_lite.linen.to_float(net, "bfloat16")
    assert set(dots(low, params, method=method)) == {LOW}
    assert set(dots(net, params, method=method)) == {FULL}
    out, _ = jax.eval_shape(
        lambda x: low.init_with_output(jax.random.key(0), x, method=method), X
    )
    assert out.dtype == LOW[0]


def test_statistics_and_random_numbers_are_those_of_the_module():
    class WithState(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
            return nn.Dropout(0.5, deterministic=False)(x)

    low = jmp_lite.linen.to_float(WithState(), "bfloat16", nn.Dense)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = low.init(rngs, X)
    _, updated = low.apply(
        variables, X, rngs={"dropout": rngs["dropout"]}, mutable=["batch_stats"]
    )
    kinds = {str(x.dtype) for x in jax.tree.leaves(updated)}
    assert kinds == {"float32"}


def test_a_selector_that_selects_nothing_is_an_error_at_the_call(net):
    params = initialized(net, X)

    def lowered(where):
        return jmp_lite.linen.to_float(net, "bfloat16", where)

    with pytest.raises(ValueError, match=r"'haed' selects nothing.*mean 'head'"):
        lowered("haed").apply(params, X)
    with pytest.raises(ValueError, match=r"There is: .*blocks_0/up \(Dense\)"):
        lowered(nn.Conv).init(jax.random.key(0), X)

    class NoDtype(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("w", nn.initializers.ones, ())

    low = jmp_lite.linen.to_float(NoDtype(), "bfloat16")
    with pytest.raises(ValueError, match="without a field 'dtype'"):
        low.init(jax.random.key(0), X)


class Auxiliary(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
        return nn.LayerNorm()(nn.Dense(4, kernel_init=init)(x))


class WithAuxiliary(nn.Module):
    @nn.compact
    def __call__(self, x, is_training=False):
        aux = Auxiliary(name="aux")
        x = nn.Dense(4)(x)
        return aux(x) if is_training else x


@pytest.mark.parametrize("where", ["aux", "^aux$", "Norm"])
def test_a_call_may_leave_out_the_selected_part(where):
    low = jmp_lite.linen.to_float(WithAuxiliary(), "bfloat16", where)
    variables = low.init(jax.random.key(0), X, True)
    assert low.apply(variables, X).dtype == np.float32
    assert low.apply(variables, X, True).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="selects nothing"):
        low.init(jax.random.key(0), X)  # Then it would have no parameters.
    wrong = jmp_lite.linen.to_float(WithAuxiliary(), "bfloat16", ("auxx", "haed"))
    with pytest.raises(ValueError, match=r"selects nothing.* There is: Dense_0"):
        wrong.apply(variables, X)


def test_a_call_without_a_module_of_the_selected_class_warns_at_its_line():
    low = jmp_lite.linen.to_float(WithAuxiliary(), "bfloat16", nn.LayerNorm)
    variables = low.init(jax.random.key(0), X, True)
    assert low.apply(variables, X, True).dtype == jnp.bfloat16
    with pytest.warns(
        UserWarning, match=r"In this call, .*LayerNorm'> selects"
    ) as seen:
        low.apply(variables, X)
    assert seen[0].filename == __file__


def test_a_part_made_in_a_compact_method_is_an_error_that_says_what_to_do():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jmp_lite.linen.to_float(nn.Dense(3), "bfloat16")(x)

    with pytest.raises(ValueError, match=r"'Dense_0' of Net.*where='Dense_0'.*setup"):
        Net().init(jax.random.key(0), X)


def test_a_part_made_in_setup_computes_in_the_dtype_under_its_name():
    class Net(nn.Module):
        def setup(self):
            self.part = jmp_lite.linen.to_float(nn.Dense(3), "bfloat16")

        def __call__(self, x):
            return self.part(x)

    variables = Net().init(jax.random.key(0), X)
    assert [*variables["params"]] == ["part"]
    assert Net().apply(variables, X).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((lambda x: x, "bfloat16"), TypeError, "Expected a linen module, got function"),
        ((nn.Dense(3), "bf61"), ValueError, "Unknown dtype 'bf61'"),
        ((nn.Dense(3), "bf16", 3), TypeError, "a class, a regular expression"),
        ((nn.Dense(3), "bf16", "("), ValueError, "Expected a regular expression"),
    ],
)
def test_bad_arguments_are_an_error_when_they_are_passed(args, error, message):
    with pytest.raises(error, match=message):
        jmp_lite.linen.to_float(*args)


# --------------------------------------------------------------------- checkpoints


SCALES = [
    jmp.NoOpLossScale(),
    jmp.StaticLossScale(128),
    jmp.DynamicLossScale(2.0**9, counter=3, period=7),
    jmp.DynamicLossScale(2.0**9, hysteresis=2, overflows=1),
]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(e).dtype
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_scales_go_through_flax_s_serialization_bit_for_bit(scale):
    fresh = jax.tree.map(jnp.zeros_like, scale)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(scale))
    assert_same(restored, scale)
    adjusted = (restored.adjust(False), scale.adjust(False))
    assert_same(*adjusted)


def test_a_train_state_in_mid_run_is_restored_bit_for_bit_and_goes_on_alike():
    module = Mlp(8)
    loss_fn = jmp.autocast(
        lambda params, x: jnp.mean(module.apply(params, x) ** 2),
        compute_dtype="float16",
    )
    optimizer = jmp.loss_scaling(
        lenient(optax.adam(0.05)), jmp.DynamicLossScale(2.0**20, period=3)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        scale = jmp.get_loss_scale(state.opt_state)
        _, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(state.params, x)
        return state.apply_gradients(grads=grads)

    def start():
        params = module.init(jax.random.key(0), X)
        return TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)

    state = start()
    for _ in range(8):
        state = step(state, X)
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(start(), saved)
    assert_same(restored.opt_state, state.opt_state)
    assert_same(step(restored, X), step(state, X))


def test_the_state_of_build_train_step_is_restored_too():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params["w"]) ** 2), (model_state, None)

    rules = jmp.get_rules("mixed", "float16")
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), rules, ema=0.9)
    state = init({"w": jnp.ones((8, 2))}, {"n": jnp.int32(3)})
    for _ in range(3):
        state, _ = step(state, X)
    fresh = init({"w": jnp.zeros((8, 2))}, {"n": jnp.int32(0)})
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    assert_same(restored, state)
    assert_same(step(restored, X)[0], step(state, X)[0])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_scales_of_several_seeds_go_through_flax_s_serialization(scale):
    states = jax.vmap(jmp.loss_scaling(optax.sgd(0.1), scale).init)(jnp.ones((3, 2)))
    zeros = jax.tree.map(jnp.zeros_like, states)
    restored = serialization.from_bytes(zeros, serialization.to_bytes(states))
    assert_same(restored, states)


def test_a_checkpoint_without_hysteresis_starts_to_count_overflows():
    saved = serialization.to_bytes(jmp.DynamicLossScale(2.0**9, counter=3))
    restored = serialization.from_bytes(jmp.DynamicLossScale(hysteresis=2), saved)
    assert_same(restored, jmp.DynamicLossScale(2.0**9, counter=3, hysteresis=2))


def test_a_checkpoint_of_another_loss_scale_is_an_error():
    saved = serialization.to_state_dict(jmp.DynamicLossScale())
    hysteresis = serialization.to_state_dict(jmp.DynamicLossScale(hysteresis=2))
    with pytest.raises(ValueError, match="another loss scale"):
        serialization.from_state_dict(jmp.DynamicLossScale(), hysteresis)
    with pytest.raises(ValueError, match=r"no state, got counter, loss_scale"):
        serialization.from_state_dict(jmp.StaticLossScale(8), saved)


def test_products_of_low_parts_stay_low_under_autocast(net):
    low = jmp_lite.linen.to_float(net, "bfloat16", "head")
    params = initialized(net, X)
    eqns = live_equations(lambda p: jmp.autocast(low.apply)(p, X), params)
    assert set(products(eqns)) == {LOW}


def variance_after_300_steps(rules, momentum):
    norm = nn.BatchNorm(use_running_average=False, momentum=momentum)
    images = 2 + 1.7 * np.random.default_rng(0).standard_normal((4, 64, 8))
    images = images.astype(np.float32)
    variables = norm.init(jax.random.key(0), images[0])

    @jax.jit
    @jmp.autocast(rules=rules)
    def step(averages, x):
        state = {"params": variables["params"], "batch_stats": averages}
        return norm.apply(state, x, mutable=["batch_stats"])[1]["batch_stats"]

    averages = variables["batch_stats"]
    for i in range(300):
        averages = step(averages, images[i % 4])
    return float(averages["var"].mean())


def test_averages_in_bfloat16_fall_short_where_a_step_adds_a_hundredth():
    """Under O3, which runs them low. Other presets run them in float32."""
    mixed, low = jmp.get_rules("mixed"), jmp.get_rules("O3", "bfloat16")
    expected = {
        m: variance_after_300_steps(jmp.get_rules("O0"), m) for m in (0.9, 0.99)
    }
    assert variance_after_300_steps(low, 0.99) < 0.9 * expected[0.99]
    assert variance_after_300_steps(low, 0.9) == pytest.approx(expected[0.9], rel=0.05)
    assert variance_after_300_steps(mixed, 0.99) == pytest.approx(
        expected[0.99], rel=0.01
    )
