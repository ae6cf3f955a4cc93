import functools
import importlib
import inspect
import pkgutil
import textwrap
import traceback
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_optimizer import OPTIMIZERS, lenient, param
from helpers import live_equations, products, relative_error
from jax import export
from jax.sharding import PartitionSpec as P
from optax import contrib

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
    params, model_state = PARAMS, start()
    average = lenient(optax.ema(0.9, debias=True))
    averages = average.init(params)
    chex.assert_trees_all_equal(state.ema, params)
    opt_state = optimizer.init(params)
    for i in range(5):
        state, metrics = jax.jit(step)(state, X)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        rng = jax.random.fold_in(key, i)
        (loss, (model_state, _)), grads = grad_fn(params, model_state, X, rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema, averages = average.update(params, averages)
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
    final, metrics = step(after, X)
    assert metrics["grads_finite"]
    assert int(final.step) == 2


def test_the_scale_backs_off_where_gradients_overflow_and_not_where_the_loss_is_bad():
    scale = jmp.DynamicLossScale(period=3, hysteresis=2)
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.0), "O0", loss_scale=scale)
    step = jax.jit(step)
    state, _ = step(init(PARAMS, start()), X)
    before = jmp.get_loss_scale(state)
    for _ in range(22):
        state, metrics = step(state, bad_gradient(X))
    assert int(metrics["skipped"]) == int(state.opt_state.consecutive_skipped) == 22
    chex.assert_trees_all_equal(jmp.get_loss_scale(state), before)
    # A finite loss of about 1e35, which overflows when it is scaled.
    for expected in (2.0**15, 2.0**14, 2.0**13):
        state, metrics = step(state, 1e18 * X)
        assert jnp.isfinite(metrics["loss"])
        assert not metrics["grads_finite"]
        assert float(jmp.get_loss_scale(state).loss_scale) == expected


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
def test_a_step_is_traced_once_donated_and_works_in_strict_promotion(promotion):
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


def test_a_step_is_a_scan_body():
    init, step = jmp.build_train_step(
        loss_fn, lenient(optax.adam(0.1)), loss_scale=jmp.DynamicLossScale()
    )
    state = init(PARAMS, start(), jax.random.key(0))
    after, metrics = jax.lax.scan(step, state, jnp.stack([X, bad_gradient(X), X]))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    np.testing.assert_array_equal(metrics["grads_finite"], [True, False, True])


def test_a_step_without_a_scale_skips_overflows_too():
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1))
    state = init(PARAMS, start())
    after, metrics = step(state, bad_gradient(X))
    chex.assert_trees_all_equal(after.params, PARAMS)
    assert float(metrics["loss_scale"]) == 1.0


def test_bad_arguments_are_an_error_when_they_are_passed():
    build = functools.partial(jmp.build_train_step, loss_fn)
    with pytest.raises(TypeError, match="Did you mean adam"):
        build(optax.adam)
    with pytest.raises(TypeError, match="Expected a LossScale, got float"):
        build(optax.sgd(0.1), loss_scale=128.0)
    with pytest.raises(ValueError, match=r"decay in \[0, 1\) for ema, got 1"):
        build(optax.sgd(0.1), ema=1.0)
    with pytest.raises(ValueError, match=r"decay in \[0, 1\) for ema, got '0.9'"):
        build(optax.sgd(0.1), ema="0.9")
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(ValueError, match=f"of at least 1 for .*, got {bad!r}\\."):
            build(optax.sgd(0.1), accumulate=bad)
    with pytest.raises(ValueError, match=r"got 2\.0: pass 2\."):
        build(optax.sgd(0.1), accumulate=2.0)
    with pytest.raises(TypeError, match=r"batch_axes to be an axis.* got 'x' in \['x'"):
        build(optax.sgd(0.1), batch_axes=["x", None])
    with pytest.raises(ValueError, match="Did you mean 'mixed'"):
        build(optax.sgd(0.1), "mixd")
    with pytest.raises(ValueError, match="compute_dtype"):
        build(optax.sgd(0.1), "float16")
    with pytest.raises(TypeError, match="Expected a function, got dict"):
        jmp.build_train_step(PARAMS, optax.sgd(0.1))
    init, _ = build(optax.chain(jmp.loss_scaling(optax.sgd(0.1))))
    with pytest.raises(ValueError, match="already carries a loss scale"):
        init(PARAMS)
    init, step = build(optax.sgd(0.1))
    with pytest.raises(
        TypeError, match="the TrainingState that init returns, got dict"
    ):
        step(PARAMS, X)
    with pytest.raises(TypeError, match=r"got 0: pass jax\.random\.key\(0\)"):
        init(PARAMS, None, 0)
    with pytest.raises(TypeError, match=r"one key .* got key<fry>\[2\]"):
        init(PARAMS, None, jax.random.split(jax.random.key(0)))
    assert init(PARAMS, None, jax.random.PRNGKey(0)).rng.dtype == np.uint32


def test_a_loss_function_of_other_arguments_is_an_error_before_it_is_called():
    def loss(params, batch):
        raise AssertionError("called")

    with pytest.raises(
        TypeError, match=r"(?s)loss_fn\(params, model_state, batch, rng\).*got loss\("
    ):
        jmp.build_train_step(loss, optax.sgd(0.1))
    jmp.build_train_step(lambda *args: args, optax.sgd(0.1))
    closed_over = functools.partial(lambda scale, params, *others: others, 2.0)
    jmp.build_train_step(closed_over, optax.sgd(0.1))


def needs_a_key(params, model_state, batch, rng):
    return jnp.sum(params["w"]) * jax.random.uniform(rng), (None, None)


def test_a_missing_key_is_an_error_that_shows_where_to_pass_one():
    init, step = jmp.build_train_step(needs_a_key, optax.sgd(0.1))
    with pytest.raises(TypeError) as error:
        step(init(PARAMS), X)
    text = "".join(traceback.format_exception(error.value))
    assert "init(params, model_state, jax.random.key(0))" in text


@pytest.mark.parametrize(
    ("leaf", "got"),
    [(jnp.arange(3), r"int32\[3\]"), (jax.random.key(0), "key<fry>"), ("a", "'a'")],
)
def test_a_parameter_that_has_no_gradient_is_an_error_that_names_its_path(leaf, got):
    init, _ = jmp.build_train_step(loss_fn, optax.adam(0.1))
    with pytest.raises(TypeError, match=rf"(?s)got {got}.*params\['n'\].*model state"):
        init({**PARAMS, "n": leaf})


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
def test_a_model_state_that_changes_its_type_is_an_error(start, fragment):
    fun = lambda params, *_: (params["w"].sum(), ({"mean": jnp.ones(4)}, None))
    init, step = jmp.build_train_step(fun, optax.sgd(0.1))
    with pytest.raises(TypeError, match=fragment):
        step(init(PARAMS, start), X)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (1.0, r"a float\."),
        (jnp.float32(1), r"a float32 array\."),
        ((jnp.float32(1), None), r"a tuple of 2 \(a float32 array, None\)\."),
        ((1.0, {"a": 1, "b": 2}), r"a tuple of 2 \(a float, a dict\)\."),
        ([1.0, {}, jnp.arange(2)], r"a list of 3 \(.*, a dict, an int32 array\)\."),
    ],
)
def test_a_loss_function_with_other_results_is_an_error_that_shows_them(result, words):
    init, step = jmp.build_train_step(lambda *args: result, optax.sgd(0.1))
    with pytest.raises(
        TypeError, match=rf"\(loss, \(model_state, aux\)\).*got {words}"
    ):
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


# ----------------------------------------------------- what optimizers are given


def plateau():
    return optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau())


def backtracking():
    search = optax.scale_by_backtracking_linesearch(5, store_grad=True)
    return optax.chain(optax.sgd(1.0), search)


def opaque_sam():
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.1))
    return contrib.sam(optax.sgd(0.1), adversary, opaque_mode=True)


ASKING = {
    **{name: OPTIMIZERS[name].make for name in ("polyak_sgd", "contrib.momo")},
    "contrib.reduce_on_plateau": plateau,
}
"""Optimizers that ask for the loss."""

OPAQUE = "contrib.sam, opaque"
EVALUATING = {
    "contrib.sophia": OPTIMIZERS["contrib.sophia"].make,
    "scale_by_backtracking_linesearch": backtracking,
    OPAQUE: opaque_sam,
    "lbfgs": lambda: optax.lbfgs(0.5),
}
"""Optimizers that ask for a function that makes the loss, or its gradient."""


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_is_traced_with_every_optimizer_of_optax():
    makers = {name: case.make for name, case in OPTIMIZERS.items()} | ASKING
    for make in (makers[name] for name in makers if name not in EVALUATING):
        init, step = jmp.build_train_step(
            loss_fn, make(), compute_dtype="float16", accumulate=2
        )
        state = jax.eval_shape(init, PARAMS, start(), jax.random.key(0))
        after, _ = jax.eval_shape(step, state, X)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", [*map(param, ASKING)])
def test_optimizers_that_ask_for_more_than_gradients_get_it(name):
    init, step = jmp.build_train_step(loss_fn, ASKING[name](), compute_dtype="float16")
    state = init(PARAMS, start())
    step = jax.jit(step)
    _, skipped = step(state, bad_gradient(X))
    assert not skipped["grads_finite"]
    state, first = step(state, X)
    for _ in range(3):
        state, last = step(state, X)
    assert last["loss"] < first["loss"]
    assert int(last["skipped"]) == 0


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", EVALUATING)
def test_optimizers_that_evaluate_the_loss_are_refused_with_what_to_write(name):
    optimizer = EVALUATING[name]()
    init, step = jmp.build_train_step(loss_fn, optimizer, compute_dtype="float16")
    with pytest.raises(TypeError, match="evaluates the loss") as caught:
        step(init(PARAMS, start()), X)
    # The lines of the message, as they stand.
    lines = str(caught.value).splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("  ")))
    tx = jmp.loss_scaling(optimizer, jmp.DynamicLossScale(2.0**10))
    names = {"jmp_lite": jmp, "tx": tx, "batch": X, "params": PARAMS}
    names |= {
        "state": tx.init(PARAMS),
        "loss": lambda p, x: loss_fn(p, start(), x, None)[0],
    }
    if "contrib." in name:
        own = lines[-1].removeprefix("grad_fn is ").removesuffix(".")
        code = code.replace("value_fn=fun", f"grad_fn={own}, obj_fn=fun")
    if name == OPAQUE:
        code = code.replace("value=value, grad=grads, ", "").replace(", obj_fn=fun", "")
    exec(code, names)
    moved = optax.apply_updates(PARAMS, names["updates"])
    assert jmp.all_finite(moved)
    assert int(names["state"].skipped) == 0
    assert not jnp.array_equal(moved["w"], PARAMS["w"])


def parabola(params, model_state, batch, rng):
    """Its gradient is ``batch * (w - 0.05)``, and its curvature is ``batch``."""
    y = (params["w"] - 0.05) @ jnp.full(3, 2.0) / 2
    return 0.5 * jnp.sum(batch * y**2), (model_state, None)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n for n in {**OPTIMIZERS, **ASKING} if "contrib." in n and n not in EVALUATING],
)
def test_with_an_overflow_at_any_of_ten_steps_all_numbers_stay_finite(name):
    make = {**{n: c.make for n, c in OPTIMIZERS.items()}, **ASKING}[name]
    init, step = jmp.build_train_step(parabola, make(), compute_dtype="float16")
    start = init({"w": jnp.full((2, 3), 0.1)}, None, jax.random.key(0))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=0)
    def run(batches):
        state, metrics = jax.lax.scan(step, start, batches)
        return state.params, metrics["skipped"][-1]

    overflow = jnp.eye(10)[:, :, None] * 6e4
    params, skipped = run(0.5 + jnp.broadcast_to(overflow, (10, 10, 2)))
    assert jmp.all_finite(params)
    assert np.all(skipped >= 1)


# ------------------------------------------------------------------------ exporting


STATES = [
    value
    for name, value in sorted(vars(jmp.states).items())
    if name.endswith("State") and inspect.isclass(value)
]


def test_all_state_classes_of_the_package_are_public():
    """The next test checks all of them for this reason."""
    found = set()
    for _, name, _ in pkgutil.walk_packages(jmp.__path__, "jmp_lite."):
        if not name.endswith(("__main__", ".linen", ".nnx", ".plots")):
            found |= {
                value
                for attribute, value in vars(importlib.import_module(name)).items()
                if attribute.endswith("State")
                and inspect.isclass(value)
                and value.__module__.startswith("jmp_lite")
                and not attribute.startswith("_")
            }
    assert {state for state in found if hasattr(state, "_fields")} == set(STATES)


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_a_name_in_exported_programs(state):
    name = f"another.{state.__name__}"
    with pytest.raises(ValueError, match=rf"(?i)duplicate .*{state.__name__}"):
        export.register_namedtuple_serialization(state, serialized_name=name)


@pytest.mark.parametrize(
    "scale",
    [
        jmp.DynamicLossScale(2.0**10, period=3, hysteresis=2),
        jmp.StaticLossScale(8),
        jmp.NoOpLossScale(),
    ],
)
def test_an_exported_step_is_written_read_and_run(scale):
    pytest.importorskip("flatbuffers")
    # The states of optax have no names in exported programs: this optimizer has none.
    keep = lambda grads, state, params=None: (grads, state)
    optimizer = optax.GradientTransformation(lambda _: None, keep)
    init, step = jmp.build_train_step(loss_fn, optimizer, loss_scale=scale, ema=0.9)
    state = init(PARAMS, start(), jax.random.key(0))
    step = jax.jit(step)
    written = export.export(step)(state, X).serialize()
    found = export.deserialize(bytearray(written)).call(state, X)
    expected = step(state, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    chex.assert_trees_all_equal(found, expected)


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


@pytest.mark.parametrize(
    ("compute", "kind"),
    [
        ("float16", jmp.DynamicLossScale),
        (jnp.bfloat16, jmp.NoOpLossScale),
        ("half", jmp.NoOpLossScale),
    ],
)
def test_compute_dtype_is_that_of_the_products_and_chooses_the_loss_scale(
    compute, kind
):
    params, batch = mlp_start()
    init, step = jmp.build_train_step(
        mlp_loss, optax.sgd(0.1), "O1", compute_dtype=compute
    )
    state = init(params)
    assert type(jmp.get_loss_scale(state)) is kind
    low = "float16" if compute == "float16" else "bfloat16"
    assert set(products(live_equations(step, state, batch))) == {(low,) * 3}
    with pytest.raises(ValueError, match="float16"):
        jmp.build_train_step(mlp_loss, optax.sgd(0.1), compute_dtype="flaot16")


def test_float16_without_a_loss_scale_is_a_warning():
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
    chex.assert_trees_all_close(*states, rtol=1e-5, atol=1e-6)


def test_model_state_goes_from_one_micro_batch_to_the_next():
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), "O0", accumulate=2)
    state, metrics = jax.jit(step)(init(PARAMS, start(), jax.random.key(0)), X)
    assert int(state.model_state["seen"]) == 2
    means = [float(X[::2].mean()), float(X[1::2].mean())]
    expected = 0.9 * 0.1 * means[0] + 0.1 * means[1]
    assert float(state.model_state["mean"]) == pytest.approx(expected)
    expected = jnp.stack([X[::2] @ PARAMS["w"], X[1::2] @ PARAMS["w"]])
    chex.assert_trees_all_close(metrics["aux"]["y"], expected, rtol=1e-6)


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
    first, ones, steps = 512, 64, 65
    assert float(metrics["grad_norm"]) == pytest.approx((first + ones) / steps)


def gradients_given():
    """Returns an optimizer whose state is the gradients that it was given."""

    def update(grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), grads

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params), update
    )


@pytest.mark.parametrize("times", [1, 4])
def test_gradients_in_bfloat16_are_averages_in_float32_that_are_rounded_once(times):
    found = {}
    for dtype in ("float32", "bfloat16"):
        init, step = jmp.build_train_step(
            loss_fn, gradients_given(), "O0", accumulate=times, grad_dtype=dtype
        )
        state, metrics = jax.jit(step)(init(PARAMS, start()), X)
        found[dtype] = state.opt_state.inner_state["w"]
        assert found[dtype].dtype == jnp.float32, "the optimizer computes in float32"
        assert metrics["grad_norm"].dtype == jnp.float32
    rounded = found["float32"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found["bfloat16"], rounded)
    assert np.any(found["float32"] != rounded)


def test_a_step_with_gradients_in_bfloat16_skips_and_learns():
    init, step = jmp.build_train_step(
        loss_fn,
        lenient(optax.adam(0.1)),
        compute_dtype="float16",
        grad_dtype="bfloat16",
    )
    state = init(PARAMS, start())
    skipped, metrics = step(state, bad_gradient(X))
    chex.assert_trees_all_equal(skipped.params, state.params)
    assert not metrics["grads_finite"]
    losses = [0.0] * 100
    for i in range(100):
        state, metrics = jax.jit(step)(state, X)
        losses[i] = float(metrics["loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_scalars_keys_and_other_leaves_reach_every_micro_batch():
    def fun(params, model_state, batch, rng):
        assert batch["name"] == "a"
        loss = jnp.mean((batch["x"] @ params["w"]) ** 2) * batch["weight"]
        return loss, (model_state, batch["nothing"])

    init, step = jmp.build_train_step(fun, optax.sgd(0.1), "O0", accumulate=2)
    texts = np.array(["a", "b", "c"])
    batch = {"x": X, "weight": jnp.float32(2), "name": "a", "nothing": None, "t": texts}
    _, metrics = step(init(PARAMS), batch)
    whole = fun(PARAMS, None, batch, None)[0]
    assert float(metrics["loss"]) == pytest.approx(float(whole))


def test_a_batch_that_cannot_be_split_is_an_error():
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), accumulate=5)
    params, batch = mlp_start()
    with pytest.raises(ValueError, match=r"accumulate=5 .*\(32, 8\) at batch\[0\]"):
        step(init(params), batch)


def weighted_loss(params, model_state, batch, rng):
    y = jnp.sum(batch["x"] @ params["w"], 0)
    return jnp.sum(y * batch["class_weights"]), (model_state, None)


def weighted_start():
    batch = {"x": jnp.arange(24.0).reshape(8, 3) / 24, "class_weights": jnp.arange(4.0)}
    return {"w": jnp.ones((3, 4))}, batch


def test_arrays_of_different_batch_sizes_are_an_error_with_a_remedy():
    init, step = jmp.build_train_step(weighted_loss, optax.sgd(0.1), accumulate=2)
    params, batch = weighted_start()
    with pytest.raises(
        ValueError,
        match=r"(?s)got 4 at batch\['class_weights'\] and 8 at batch\['x'\].*None.*"
        r"batch_axes=\{'x': 0, 'class_weights': None\}",
    ):
        step(init(params), batch)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_batch_axes_select_the_arrays_to_split_and_their_axes(axis):
    params, batch = weighted_start()

    def fun(params, model_state, batch, rng):
        batch = {**batch, "x": jnp.moveaxis(batch["x"], axis, 0)}
        return weighted_loss(params, model_state, batch, rng)

    moved = {**batch, "x": jnp.moveaxis(batch["x"], 0, axis)}
    init, step = jmp.build_train_step(
        fun,
        optax.sgd(0.1),
        "O0",
        accumulate=2,
        batch_axes={"x": axis, "class_weights": None},
    )
    _, metrics = step(init(params), moved)
    # The loss is a sum over rows: each half has one half of it.
    whole = weighted_loss(params, None, batch, None)[0] / 2
    assert float(metrics["loss"]) == pytest.approx(float(whole))


@pytest.mark.parametrize(
    ("axes", "fragment"),
    [
        ({"x": 0}, r"a prefix of the batch, got \{'x': 0\}"),
        (
            {"x": 2, "class_weights": None},
            r"array at batch\['x'\] has .* no axis 2 to split",
        ),
    ],
)
def test_batch_axes_that_do_not_fit_the_batch_are_an_error(axes, fragment):
    params, batch = weighted_start()
    init, step = jmp.build_train_step(
        weighted_loss, optax.sgd(0.1), accumulate=2, batch_axes=axes
    )
    with pytest.raises(ValueError, match=fragment):
        step(init(params), batch)


def test_a_model_state_that_changes_its_type_in_a_micro_batch_is_an_error():
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
    )
    before = init(PARAMS, start(), jax.random.key(0))
    after, metrics = step(before, bad_gradient(X))
    assert not metrics["grads_finite"]
    chex.assert_trees_all_equal(after.params, before.params)
    final, metrics = step(after, X)
    assert metrics["grads_finite"]
    mean = float(final.model_state["mean"])
    assert mean == pytest.approx(0.1 * float(X.mean()), rel=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_splits_its_part_of_a_batch_into_micro_batches(mesh, check_vma):
    def fun(params, model_state, batch, rng):
        loss, (model_state, _) = loss_fn(params, model_state, batch, rng)
        return loss, (model_state, None)

    options = {"loss_fn": fun, "optimizer": optax.sgd(0.1), "rules": "O0"}
    init, step = build_on(mesh, check_vma, accumulate=2, **options)
    state, metrics = step(init(PARAMS, start()), X)
    one_init, one_step = jmp.build_train_step(**options)
    alone, expected = one_step(one_init(PARAMS, start()), X)
    chex.assert_trees_all_close(state.params, alone.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(metrics["loss"], expected["loss"], rtol=1e-5)
    assert int(state.model_state["seen"]) == 2
    means = [0.5 * float(X[i].mean() + X[i + 2].mean()) for i in (0, 1)]
    mean = 0.9 * 0.1 * means[0] + 0.1 * means[1]
    assert float(state.model_state["mean"]) == pytest.approx(mean, rel=1e-5)


def test_an_axis_that_is_not_mapped_is_an_error_with_a_remedy():
    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), axis_name="data")
    with pytest.raises(
        NameError, match=r"axis_name='data' is not .*shard_map.*leave axis_name out"
    ):
        jax.jit(step)(init(PARAMS, start()), X)


def test_a_step_can_be_mapped_over_an_axis_of_vmap():
    params, (x, y) = mlp_start()
    init, step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), "O0", axis_name="data")
    parts = (x.reshape(4, 8, 8), y.reshape(4, 8, 1))
    mapped = jax.vmap(step, (None, 0), axis_name="data")
    state, _ = jax.jit(mapped)(init(params), parts)
    _, one_step = jmp.build_train_step(mlp_loss, optax.sgd(0.1), "O0")
    alone, _ = jax.jit(one_step)(init(params), (x, y))
    first = jax.tree.map(lambda leaf: leaf[0], state.params)
    chex.assert_trees_all_close(first, alone.params, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------- frozen parameters

BASE = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8), "out": jnp.ones((8, 8)) / 8}
ADAPTED = {
    "base": jmp.cast_tree(BASE, "bfloat16"),
    "lora": {"a": jnp.linspace(-1, 1, 16).reshape(8, 2), "b": jnp.zeros((2, 8))},
}


def adapted_loss(params, model_state, batch, rng):
    base, lora = params["base"], params["lora"]
    h = jnp.tanh(batch @ (base["w"] + lora["a"] @ lora["b"]))
    return jnp.mean((h @ base["out"] - 1) ** 2), (model_state, None)


def partitioned(trained):
    labels = {"base": "frozen", "lora": "trained"}
    return optax.partition({"trained": trained, "frozen": optax.set_to_zero()}, labels)


FREEZING = {
    "partition": partitioned(optax.adam(1e-2)),
    "after clipping": optax.chain(
        optax.clip_by_global_norm(1.0), partitioned(optax.adam(1e-2))
    ),
    "masked": optax.chain(
        optax.adam(1e-2),
        optax.masked(optax.set_to_zero(), {"base": True, "lora": False}),
    ),
    "with masters": partitioned(jmp.compensated(optax.adam(1e-2))),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_have_no_gradient_and_no_warning(
    name, accumulate, standard_promotion
):
    batch = jnp.linspace(-1, 1, 32).reshape(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init, step = jmp.build_train_step(
            adapted_loss, FREEZING[name], accumulate=accumulate
        )
        start = init(ADAPTED)
        state, metrics = jax.jit(step)(start, batch)
    chex.assert_trees_all_equal(state.params["base"], ADAPTED["base"])
    assert jnp.any(state.params["lora"]["b"] != 0)

    def exact_loss(lora):
        params = {"base": jmp.cast_to_full(ADAPTED["base"]), "lora": lora}
        return adapted_loss(params, None, batch, None)[0]

    norm = optax.tree.norm(jax.grad(exact_loss)(ADAPTED["lora"]))
    assert relative_error(metrics["grad_norm"], norm) < 0.02
    # The backward pass has only the products that the adapters need.
    found = live_equations(step, start, batch)
    forward, backward = 3, 4
    assert sum(products(found).values()) == forward + backward
    sums = [eqn for eqn in found if eqn.primitive.name == "scan"]
    assert bool(sums) == (accumulate > 1)
    assert all((8, 8) not in [v.aval.shape for v in eqn.outvars] for eqn in sums)


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_keep_the_sign_of_a_zero(name, standard_promotion):
    init, step = jmp.build_train_step(adapted_loss, FREEZING[name], ema=0.9)
    params = {**ADAPTED, "base": {**BASE, "w": BASE["w"].at[0].set(-0.0)}}
    state, _ = jax.jit(step)(init(params), jnp.ones((4, 8)))
    assert jnp.all(jnp.signbit(state.params["base"]["w"][0]))


def spikes(**seen):
    """Returns an optimizer that records the extra arguments of its steps."""

    def update(grads, state, params=None, *, loss, grad_norm, limit, **others):
        seen.update(others)
        is_spike = loss > limit * jnp.ones([])
        updates = jax.tree.map(lambda g: jnp.where(is_spike, 0.0, -g), grads)
        return updates, (loss, grad_norm)

    zeros = jnp.zeros([]), jnp.zeros([])
    return optax.GradientTransformationExtraArgs(lambda params: zeros, update)


@pytest.mark.parametrize("wrap", [lambda opt: opt, lambda opt: optax.chain(opt)])
def test_the_optimizer_receives_the_loss_the_norm_and_the_caller_s_arguments(wrap):
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((params["w"] - batch) ** 2), (model_state, None)

    init, step = jmp.build_train_step(loss_fn, wrap(spikes()), "mixed")
    start = init({"w": jnp.zeros(4)})
    step = jax.jit(step)
    state, metrics = step(start, jnp.ones(4), limit=2.0)
    inner = jax.tree.leaves(state.opt_state.inner_state)
    np.testing.assert_allclose(inner, [metrics["loss"], metrics["grad_norm"]])
    assert jnp.all(state.params["w"] != 0)
    state, _ = step(start, jnp.ones(4), limit=0.5)
    assert jnp.all(state.params["w"] == 0)


def test_arguments_that_an_optimizer_does_not_take_are_errors():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(params["w"] ** 2), (model_state, None)

    def update(updates, state, params=None, *, limit=None):
        return updates, state

    named = optax.GradientTransformationExtraArgs(lambda params: (), update)
    init, step = jmp.build_train_step(loss_fn, named)
    step(init({"w": jnp.ones(4)}), None, limit=1.0)
    with pytest.raises(TypeError, match=r"no argument limits.* has .*limit"):
        step(init({"w": jnp.ones(4)}), None, limits=1.0)
    with pytest.raises(TypeError, match="The step itself passes loss"):
        step(init({"w": jnp.ones(4)}), None, loss=1.0)


def test_parameters_whose_updates_are_their_gradients_are_not_frozen(
    standard_promotion,
):
    """``optax.masked`` returns gradients as the updates of parameters that it skips."""
    passing = optax.masked(optax.sgd(0.1), {"base": False, "lora": True})
    init, step = jmp.build_train_step(adapted_loss, passing)
    with pytest.warns(UserWarning, match=r"16 bits \(bfloat16 at params\['base'\]"):
        state = init(ADAPTED)
    state, _ = step(state, jnp.ones((4, 8)))
    assert jnp.any(state.params["base"]["out"] != ADAPTED["base"]["out"])


def test_a_parameter_whose_update_depends_on_a_branch_is_trained():
    def update(grads, state, params=None):
        up = lambda g: jax.lax.cond(
            g.sum() > 0, lambda: -jnp.ones(4), lambda: jnp.ones(4)
        )
        return jax.tree.map(up, grads), state

    branching = optax.GradientTransformation(lambda params: (), update)
    optimizer = optax.chain(branching, optax.masked(optax.identity(), {"w": True}))
    init, step = jmp.build_train_step(
        lambda params, s, x, r: (jnp.sum(params["w"]) * x, (s, None)), optimizer
    )
    state, metrics = step(init({"w": jnp.ones(4)}), 1.0)
    np.testing.assert_array_equal(state.params["w"], 0)
    assert metrics["grad_norm"] == 2


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.99999])
def test_a_moving_average_starts_with_the_first_step_and_not_with_random_parameters(
    decay,
):
    def drift(params, model_state, batch, rng):
        return -jnp.sum(params["w"]), (model_state, None)

    init, step = jmp.build_train_step(drift, optax.sgd(1.0), ema=decay)
    state = init({"w": jnp.float32(1000)})
    for _ in range(4):
        state, _ = step(state, None)
    weights = np.float64(decay) ** np.arange(3, -1, -1)
    expected = np.average(np.arange(1001, 1005), weights=weights)
    np.testing.assert_allclose(state.ema["w"], expected, rtol=1e-6)


def two_sets_of_points(params, model_state, batch, rng):
    inner, boundary = (
        jnp.mean(jnp.tanh(batch[name] @ params["w"]) ** 2)
        for name in ("inner", "boundary")
    )
    return inner + 10 * boundary, (model_state, None)


def test_arrays_of_several_sizes_are_split_along_an_axis_of_their_own():
    rng = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32)
        for name, rows in (("inner", 12), ("boundary", 4))
    }
    states = []
    for options in ({}, {"accumulate": 4, "batch_axes": {"inner": 0, "boundary": 0}}):
        init, step = jmp.build_train_step(
            two_sets_of_points, optax.sgd(0.1), "O0", **options
        )
        state, metrics = step(init(PARAMS), batch)
        states.append((state.params, metrics["loss"], metrics["grad_norm"]))
    chex.assert_trees_all_close(*states, rtol=1e-5)
    init, step = jmp.build_train_step(two_sets_of_points, optax.sgd(0.1), accumulate=4)
    with pytest.raises(
        ValueError, match=r"got 4 at batch\['boundary'\] and 12 at.*own "
    ):
        step(init(PARAMS), batch)


@pytest.mark.parametrize("draw", [jax.random.split, jax.random.normal])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_needs_a_key_and_gets_none_is_told_where_to_give_it(
    draw, accumulate
):
    def loss_fn(params, model_state, batch, rng):
        draw(rng)
        return jnp.mean(batch), (model_state, {})

    init, step = jmp.build_train_step(loss_fn, optax.sgd(0.1), accumulate=accumulate)
    with pytest.raises(TypeError) as caught:
        step(init({"w": jnp.ones(3)}), jnp.ones((4, 3)))
    # In the message itself: pytest's own match reads notes, too.
    assert str(caught.value).startswith("rng is None in loss_fn")
    assert "init(params, model_state, jax.random.key(0))" in str(caught.value)


def pulled_to_one(params, model_state, batch, rng):
    return jnp.mean((params - batch) ** 2) / 2, (model_state, None)


MULTI_STEPS = {
    "alone": lambda inner: optax.MultiSteps(inner, 3),
    "in a chain": lambda inner: optax.chain(
        optax.clip(10.0), optax.MultiSteps(inner, 3).gradient_transformation()
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", MULTI_STEPS)
def test_an_average_moves_when_parameters_do(name):
    optimizer = MULTI_STEPS[name](optax.sgd(0.5))
    init, step = jmp.build_train_step(pulled_to_one, optimizer, "O0", ema=0.5)
    state = init(jnp.zeros(1))
    averages = []
    for _ in range(7):
        state, _ = jax.jit(step)(state, jnp.ones(1))
        averages.append(float(state.ema[0]))
    # Parameters after updates: 0.5, 0.75. Their weights: 1/3 and 2/3.
    second = pytest.approx((0.5 + 2 * 0.75) / 3)
    assert averages == [0, 0, 0.5, 0.5, 0.5, second, second]


@pytest.mark.usefixtures("standard_promotion")
def test_an_overflow_in_a_micro_batch_moves_no_average():
    init, step = jmp.build_train_step(
        pulled_to_one, optax.MultiSteps(optax.sgd(0.5), 2), "O0", ema=0.5
    )
    state = init(jnp.zeros(1))
    for batch in (1, np.inf, 1, np.nan, 1):
        state, metrics = jax.jit(step)(state, jnp.full(1, batch, jnp.float32))
    assert int(metrics["skipped"]) == 2
    assert (float(state.params[0]), float(state.ema[0])) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (optax.chain(optax.sgd(0.5), optax.apply_every(3)), "optax.apply_every"),
        (
            optax.partition(
                {
                    name: optax.MultiSteps(optax.sgd(0.5), k).gradient_transformation()
                    for name, k in (("a", 2), ("b", 3))
                },
                {"a": "a", "b": "b"},
            ),
            "several optax.MultiSteps",
        ),
    ],
)
def test_an_average_of_unknown_steps_is_an_error(optimizer, what):
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    init, _ = jmp.build_train_step(pulled_to_one, optimizer, "O0", ema=0.5)
    with pytest.raises(ValueError, match=f"{what} does not say which do"):
        init(params)
    jmp.build_train_step(pulled_to_one, optimizer, "O0")[0](params)
