"""Arguments of 16 bits: traced in float32, held in 16 bits."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    DTYPES,
    live_equations,
    mostly_slow,
    one_of_each,
    ops,
    products,
    relative_error,
)
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS, QUICK, W, X

import jmp_lite as jmp
import jmp_lite.nnx
from benchmarks.autocast import MODELS, fill
from jmp_lite import autocast

LOW = jnp.bfloat16
HIGH = {"xla_allow_excess_precision": False}


def is_float(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def cast(tree, dtype):
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if is_float(x) else jnp.asarray(x), tree
    )


def casts_of(eqns, shape):
    """Returns the casts of arrays of a shape: the dtypes before and after each."""
    return [
        (str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype))
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.shape == shape
    ]


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


# ---------------------------------------------------------------- the same as float32


each_program_in_16_bits = pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(PROGRAMS, DTYPES), one_of_each(QUICK, DTYPES)),
)


@each_program_in_16_bits
def test_a_result_is_the_rounded_result_of_float32_arguments(name, dtype):
    fun, args = PROGRAMS[name]
    args = cast(args, dtype)
    expected = jax.eval_shape(fun, *args)
    low = autocast(fun, compute_dtype=dtype)
    found, wide = jax.jit(lambda *args: (low(*args), low(*cast(args, "float32"))))(
        *args
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )
    rounded = jax.tree.map(lambda x, y: x.astype(y.dtype), wide, expected)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


@each_program_in_16_bits
def test_a_gradient_has_the_dtype_of_its_argument_and_float32s_accuracy(name, dtype):
    fun, args = PROGRAMS[name]
    args = cast(args, dtype)

    def loss(fun):
        def total(args):
            leaves = jax.tree.leaves(fun(*args))
            floats = [x.astype(jnp.float32) for x in leaves if is_float(x)]
            return sum(jnp.mean(jnp.sin(x)) for x in floats)

        return jax.grad(total, allow_int=True)

    low = autocast(fun, compute_dtype=dtype)
    wide = cast(args, "float32")
    run = jax.jit(
        lambda args, wide: (loss(low)(args), loss(low)(wide), loss(fun)(wide)),
        compiler_options=HIGH,
    )
    found, full, exact = run(args, wide)
    for x, of_full, e, arg in zip(
        *map(jax.tree.leaves, (found, full, exact, args)), strict=True
    ):
        if is_float(arg):
            assert x.dtype == arg.dtype
            rounding = float(jnp.finfo(dtype).eps)
            error = relative_error(of_full, e)
            assert relative_error(x.astype("float32"), e) < 2 * error + rounding


def test_a_loss_keeps_terms_that_are_small_against_a_16_bit_number():
    def loss(params, x, labels):
        logits = jnp.tanh(params["table"][x]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "table": jax.random.normal(keys[0], (16, 8), LOW),
        "out": jax.random.normal(keys[1], (8, 64), LOW),
    }
    x = jax.random.randint(keys[2], (32,), 0, 16)
    found = ops(autocast(loss), params, x, x)
    assert found["exp"] == found["log"] == {"float32"}
    exact = jax.jit(loss)(cast(params, "float32"), x, x)
    low = autocast(loss)
    assert low(params, x, x).dtype == LOW
    value, _ = jmp.value_and_grad(low, loss_scale=jmp.NoOpLossScale())(params, x, x)
    assert value.dtype == jnp.float32
    assert relative_error(value, exact) < 1e-3


# ------------------------------------------------------------------- it stays 16 bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_reads_16_bit_arguments_without_a_cast(dtype):
    x, w = X.astype(dtype), W.astype(dtype)
    fun = autocast(lambda x, w: x @ w, compute_dtype=dtype)
    eqns = live_equations(fun, x, w)
    assert [eqn.primitive.name for eqn in eqns] == ["dot_general"]
    assert products(eqns) == {(dtype,) * 3: 1}


MOVES = {
    "gather": lambda w: w[jnp.array([1, 1, 2])],
    "transpose": lambda w: w.T,
    "reshape": lambda w: w.reshape(4, 16),
    "slice": lambda w: w[2:4],
    "dynamic_slice": lambda w: lax.dynamic_slice(w, (1, 0), (2, 8)),
    "concatenate": lambda w: jnp.concatenate([w, w]),
    "pad": lambda w: jnp.pad(w, 1),
    "rev": lambda w: w[::-1],
    "split": lambda w: jnp.split(w, 2)[1],
    "roll": lambda w: jnp.roll(w, 1, axis=0),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_of_a_16_bit_argument_runs_in_16_bits_and_changes_no_bit(name):
    move, w = MOVES[name], W.astype(LOW)
    eqns = live_equations(autocast(move), w)
    floats = {
        str(v.aval.dtype)
        for e in eqns
        for v in (*e.invars, *e.outvars)
        if is_float(v.aval) and v.aval.shape
    }
    assert floats == {"bfloat16"}
    np.testing.assert_array_equal(autocast(move)(w), move(w))

    def product(w):
        moved = move(w)
        return moved @ moved.T

    rows = [r for r in jmp.explain(product)(w).rows if r.code == "moves_16_bits"]
    assert {(r.precision, r.reason) for r in rows} == {
        ("bfloat16", "moves or sends what has 16 bits or fewer")
    }
    eqns = live_equations(autocast(product), w)
    assert products(eqns) == {("bfloat16",) * 3: 1}
    # A float32 op casts the moved array, not the argument.
    sines = live_equations(autocast(lambda w: jnp.exp(move(w)).sum()), w)
    assert not casts_of(sines, w.shape) or move(w).shape == w.shape


def test_the_gradients_of_many_reads_add_up_in_float32():
    """A frequent token: its gradient would stop growing at 256 in bfloat16."""
    table, ids = jnp.ones((4, 8), LOW), jnp.zeros(1000, int)
    of_rows = jax.grad(autocast(lambda t: jnp.sum(t[ids], dtype=jnp.float32)))
    np.testing.assert_array_equal(of_rows(table)[0], 1000)
    bias = jnp.zeros(8, LOW)
    of_bias = jax.grad(autocast(lambda b: jnp.sum(jnp.ones((1000, 8)) + b)))
    np.testing.assert_array_equal(of_bias(bias), 1000)

    def steps(w):
        return lax.scan(lambda c, _: (c + w.sum(), None), 0.0, length=1000)[0]

    np.testing.assert_array_equal(jax.grad(autocast(steps))(bias), 1000)

    def many(w):
        return sum(jnp.sum(w * n, dtype=jnp.float32) for n in (256, *[1] * 40))

    np.testing.assert_array_equal(jax.grad(autocast(many))(bias), 296)

    def products(w):
        rows = [jnp.full((1, 8), n, "float32") for n in (256, *[1] * 40, 256)]
        return sum(jnp.sum(row @ w) for row in rows)

    np.testing.assert_array_equal(jax.grad(autocast(products))(table.T), 552)


def test_a_weight_of_a_loop_stays_16_bits_and_its_gradient_adds_up_in_float32():
    w, xs = (W / 3).astype(LOW), jax.random.normal(jax.random.key(0), (2000, 1, 8), LOW)

    def loss(w, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)
        return jnp.sum(h), jnp.sum(
            lax.scan(lambda c, x: (c + x @ w, None), xs[0], xs)[0]
        )

    total = lambda fun: lambda *args: sum(x.astype("float32") for x in fun(*args))
    scans = [
        e for e in live_equations(autocast(loss), w, xs) if e.primitive.name == "scan"
    ]
    assert [str(e.invars[0].aval.dtype) for e in scans] == ["bfloat16"] * 2
    found = jax.jit(jax.grad(total(autocast(loss))))(w, xs)
    exact = jax.jit(jax.grad(total(loss)))(*cast((w, xs), "float32"))
    assert found.dtype == LOW
    assert relative_error(found.astype("float32"), exact) < 0.02
    written = jax.jit(jax.grad(total(loss)))(w, xs)
    assert relative_error(written.astype("float32"), exact) > 0.04
    # Forward mode is float32's, too.
    _, along = jax.jvp(autocast(loss), (w, xs), (w, xs))
    _, expected = jax.jvp(loss, *[cast((w, xs), "float32")] * 2)
    assert relative_error(along[0].astype("float32"), expected[0]) < 0.02


def test_the_slices_of_a_stack_of_weights_stay_16_bits():
    stack = jnp.stack([W] * 5).astype(LOW)
    step = lambda x, w: (x + jnp.tanh(x @ w), None)
    loss = lambda stack, x: jnp.mean(lax.scan(step, x, stack)[0] @ stack[0])
    for fun in (autocast(loss), jax.grad(autocast(loss))):
        assert ("bfloat16", "float32") not in casts_of(
            live_equations(fun, stack, X), stack.shape
        )


def test_a_16_bit_argument_that_a_norm_layer_reads_is_cast_there():
    scale, x = jnp.ones(8, LOW), X.astype(LOW)
    norm = nn.LayerNorm()
    params = {"params": {"scale": scale, "bias": scale}}
    apply = lambda params, x: norm.apply(params, x @ x.T @ x)
    found = ops(autocast(apply), params, x)
    assert found["rsqrt"] == found["reduce_sum"] == {"float32"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_argument_of_the_other_16_bit_dtype_is_cast_at_its_use(dtype):
    """A frozen base in one dtype, computed in the other: low-rank adapters."""
    base = W.astype(DTYPES[dtype == DTYPES[0]])
    fun = autocast(
        lambda base, a, b, x: jnp.tanh(x @ (base + a @ b)) @ base, compute_dtype=dtype
    )
    eqns = live_equations(fun, base, W[:, :2], W[:2], X)
    assert set(products(eqns)) == {(dtype,) * 3}


def test_a_16_bit_cache_is_read_and_written_in_16_bits_in_a_while_loop():
    def decode(cache, x, w):
        def step(i, carry):
            cache, x = carry
            row = (x @ w)[:, None].astype(cache.dtype)
            cache = lax.dynamic_update_slice(cache, row, (0, i, 0))
            scores = jnp.einsum("bd,btd->bt", x, cache)
            return cache, jnp.einsum("bt,btd->bd", scores, cache)

        return lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[0], c[1])), (0, (cache, x))
        )[1]

    cache, x, w = jnp.zeros((4, 16, 8), LOW), X.astype(LOW), W.astype(LOW)
    eqns = live_equations(autocast(decode), cache, x, w)
    assert casts_of(eqns, cache.shape) == []
    found, expected = autocast(decode)(cache, x, w), decode(cache, x, w)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
        jnp.result_type, expected
    )


def sum_of_rows(total, xs):
    return lax.scan(lambda total, x: (total + x, None), total, xs)[0]


def table_of_sums(table, xs):
    """Each step reads a row, adds to it, and writes the next one."""
    step = lambda table, at: (table.at[at[0]].set(table[at[0] - 1] + at[1]), None)
    return lax.scan(step, table, (jnp.arange(1, len(xs)), xs[1:]))[0][-1]


@pytest.mark.parametrize("fun", [sum_of_rows, table_of_sums])
def test_a_sum_over_the_steps_of_a_loop_is_float32_though_it_starts_in_16_bits(fun):
    start = jnp.zeros((1001, 8) if fun is table_of_sums else 8, LOW)
    ones = jnp.ones((1001, 8))
    expected = 1000 if fun is table_of_sums else 1001
    exact = autocast(lambda start, xs: fun(start.astype("float32"), xs))
    np.testing.assert_array_equal(exact(start, ones), expected)


def test_an_effect_in_a_loop_changes_no_gradient():
    def loss(w, xs, effect):
        def step(h, x):
            effect()
            h = jnp.tanh(h * 0.1 + x @ w)
            return h, h.sum()

        return lax.scan(step, xs[0], xs)[1].sum()

    xs = jax.random.normal(jax.random.key(0), (500, 2, 8))
    quiet, loud = (
        jax.jit(jax.grad(functools.partial(autocast(loss), effect=effect)))(
            W.astype(LOW), xs
        )
        for effect in (lambda: None, lambda: jax.debug.callback(lambda: None))
    )
    assert relative_error(loud.astype("float32"), quiet.astype("float32")) < 1e-2


def test_a_number_in_place_of_rows_out_of_range_is_not_rounded():
    take = lambda table, i: jnp.take(
        table.astype("float32"), i, axis=0, mode="fill", fill_value=1e9
    )
    low = autocast(take, compute_dtype="float16")
    found = low(W.astype("float16"), jnp.array([1, 20]))
    np.testing.assert_array_equal(found[1], np.float32(1e9))


# ---------------------------------------------------- what is not such an argument


def test_a_cast_of_the_function_to_16_bits_stays():
    x, w = X.astype(LOW), W.astype(LOW)
    fun = lambda x, w: jnp.exp((x @ w).astype(LOW)).astype("float32")
    assert ops(autocast(fun), x, w)["exp"] == {"bfloat16"}


@pytest.mark.parametrize("rules", ["O0", jmp.Rules(default="keep")])
def test_rules_that_keep_everything_keep_16_bit_arguments(rules):
    fun = lambda x, w: jnp.exp(x @ w)
    x, w = X.astype(LOW), W.astype(LOW)
    expected = str(jax.make_jaxpr(fun)(x, w))
    assert (
        str(jax.make_jaxpr(autocast(fun, rules))(x, w)).split(".")[0]
        == (expected.split(".")[0])
    )
    assert jmp.explain(fun, rules)(x, w).held == {}


def test_a_function_that_accepts_only_16_bit_arguments_runs_as_it_is_traced():
    def fun(x, w):
        assert x.dtype == LOW
        return lax.add(x @ w, jnp.ones((4, 8), LOW))

    x, w = X.astype(LOW), W.astype(LOW)
    np.testing.assert_array_equal(autocast(fun)(x, w), fun(x, w))
    explanation = jmp.explain(fun)(x, w)
    (lint,) = (
        lint for lint in explanation.lints if lint.name == "arguments in 16 bits"
    )
    assert "AssertionError" in lint.message
    assert explanation.held == {}

    def bits(x):
        return lax.bitcast_convert_type(x, jnp.uint16)

    np.testing.assert_array_equal(autocast(bits)(x), bits(x))
    # The order of the leaves depends on the dtype.
    named = lambda x: {"a" if x.dtype == LOW else "z": x, "m": 2 * x}
    chex.assert_trees_all_equal(autocast(named)(x), named(x))


def test_the_errors_of_a_function_are_its_own():
    def fun(x):
        raise RuntimeError(f"no {x.dtype}")

    with pytest.raises(RuntimeError, match="no bfloat16"):
        autocast(fun)(X.astype(LOW))


def test_captured_arrays_of_16_bits_get_a_lint():
    captured = W.astype(LOW)
    fun = lambda x: jnp.exp(x @ captured) + jnp.exp(captured[0])
    (lint,) = (x for x in jmp.explain(fun)(X).lints if x.name == "captured in 16 bits")
    assert "bfloat16[8,8]" in lint.message
    assert "argument" in lint.remedy
    fun = lambda x, w: jnp.exp(x @ w) + jnp.bfloat16(2)
    lints = jmp.explain(fun)(X, captured).lints
    assert not [x for x in lints if x.name == "captured in 16 bits"]
    as_it_is = jmp.explain(lambda x: x @ captured, "O0")(X).lints
    assert not [x for x in as_it_is if x.name == "captured in 16 bits"]


@pytest.mark.parametrize("name", MOVES)
def test_a_cast_of_moved_constants_widens_nothing(name):
    """Such as ``table[ids].astype(float32)``, in which the table is captured."""
    table = W.astype(LOW)

    def fun(x, i):
        moved = MOVES[name](table)
        rows = moved[i] if name == "gather" else moved
        return jnp.abs(x @ W + rows[0, :1].astype(jnp.float32)) @ W

    found = ops(autocast(fun), X, jnp.array([2, 1]))
    assert found["abs"] == {"bfloat16"}


# ------------------------------------------------------------------ what explain says


def test_explain_names_the_arguments_that_are_held_in_16_bits():
    params = {"b": jnp.zeros(8, LOW), "w": W.astype("float16")}
    explanation = jmp.explain(lambda p, x: x @ p["w"] + p["b"])(params, X)
    assert explanation.held == {"args[0]['b']": "bfloat16", "args[0]['w']": "float16"}
    text = str(explanation)
    assert "arguments: traced in float32, held in bfloat16: args[0]['b']\n" in text
    assert '"held"' in explanation.to_json()
    assert "arguments: " not in str(jmp.explain(lambda x: x @ x.T)(X))


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_shows_of_16_bit_arguments_the_precisions_that_run(name):
    fun, args = PROGRAMS[name]
    args = cast(args, LOW)
    rows = [r for r in jmp.explain(fun)(*args).rows if r.op in ("dot_general", "exp")]
    eqns = live_equations(autocast(fun), *args)
    for op in ("dot_general", "exp"):
        shown = {row.precision for row in rows if row.op == op}
        ran = {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == op}
        assert shown == ran


# -------------------------------------------------------- losses, modules, devices


def test_every_float16_scale_fits_float16_parameters():
    """The cotangent of a float16 loss would be the scale: infinite above 2**15."""
    params, x = W.astype("float16"), X.astype("float16")
    loss = autocast(lambda w, x: jnp.mean(x @ w) * 1e-3, compute_dtype="float16")
    value, grads = jmp.value_and_grad(loss, loss_scale=jmp.StaticLossScale(2.0**20))(
        params, x
    )
    assert value.dtype == grads.dtype == jnp.float32
    assert jnp.isfinite(grads).all()
    (value, aux), _ = jmp.value_and_grad(
        autocast(lambda w, x: (jnp.mean(x @ w), x.sum())),
        loss_scale=jmp.NoOpLossScale(),
        has_aux=True,
    )(params, x)
    assert (value.dtype, aux.dtype) == (jnp.float32, jnp.float16)


def test_a_function_that_wraps_an_autocast_function_is_called_itself():
    inner = autocast(lambda w: jnp.mean(jnp.exp(w)))

    @functools.wraps(inner)
    def twice(w):
        return 2 * inner(w)

    w = jnp.zeros(3, LOW)
    value, grads = jmp.value_and_grad(twice, loss_scale=jmp.NoOpLossScale())(w)
    assert value == 2
    np.testing.assert_allclose(grads, 2 / 3, rtol=1e-2)


def test_a_method_returns_its_float32_loss_too():
    class Model:
        scale = 3.0

        @autocast
        def loss(self, w):
            return self.scale * jnp.mean(jnp.exp(w))

    w = jnp.linspace(0, 1, 3, dtype=LOW)
    value, _ = jmp.value_and_grad(Model().loss, loss_scale=jmp.NoOpLossScale())(w)
    exact = 3 * jnp.mean(jnp.exp(w.astype("float32")))
    assert value.dtype == jnp.float32
    assert relative_error(value, exact) < 1e-5


def test_nnx_and_linen_modules_with_16_bit_parameters_have_float32_losses():
    model = nnx.Linear(8, 4, param_dtype=LOW, rngs=nnx.Rngs(0))
    loss = jmp.nnx.autocast(lambda model, x: jnp.mean(jnp.exp(model(x))))
    x = X.astype(LOW)
    value, _ = jmp.nnx.value_and_grad(loss, loss_scale=jmp.NoOpLossScale())(model, x)
    assert value.dtype == jnp.float32
    exact = jnp.mean(jnp.exp(x.astype("float32") @ model.kernel[...].astype("float32")))
    assert relative_error(value, exact) < 1e-2
    assert loss(model, x).dtype == LOW
    held = jmp.nnx.explain(loss.__wrapped__)(model, x).held
    assert sorted(held.values()) == ["bfloat16"] * 3

    norm = nnx.BatchNorm(8, param_dtype=LOW, rngs=nnx.Rngs(0))
    jmp.nnx.autocast(lambda norm, x: norm(x))(norm, x)
    assert norm.mean[...].any()

    dense = nn.Dense(4, param_dtype=LOW)
    params = dense.init(jax.random.key(0), x)
    found = live_equations(autocast(dense.apply), params, x)
    assert products(found) == {("bfloat16",) * 3: 1}


def test_a_train_step_reports_the_float32_loss_of_16_bit_parameters():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean(jnp.exp(batch @ params)), (model_state, {})

    optimizer = jmp.compensated(optax.sgd(1e-3))
    init, step = jmp.build_train_step(loss_fn, optimizer)
    w, x = W.astype(LOW), X
    _, metrics = jax.jit(step)(init(w), x)
    exact = jnp.mean(jnp.exp(x @ w.astype("float32")))
    assert metrics["loss"].dtype == jnp.float32
    assert relative_error(metrics["loss"], exact) < 2e-3


def test_replicated_parameters_add_up_in_float32_over_devices():
    mesh = Mesh(np.array(jax.devices()[:1]), "d")
    for check_vma in (True, False):

        def mean(w, x, check_vma=check_vma):
            local = lambda w, x: lax.pmean(jnp.mean(x @ w), "d")
            specs = {"in_specs": (P(), P("d")), "out_specs": P()}
            return jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)(w, x)

        eqns = live_equations(jax.grad(autocast(mean)), W.astype(LOW), X)
        sums = [e for e in eqns if e.primitive.name in ("psum", "psum_invariant")]
        assert {str(v.aval.dtype) for e in sums for v in e.invars} == {"float32"}


def test_a_function_of_float32_arguments_is_traced_once_and_one_of_16_bits_twice():
    count = []

    def fun(x):
        count.append(x.dtype)
        return x @ x.T

    autocast(fun)(X)
    assert count == [jnp.float32]
    count.clear()
    autocast(fun)(X.astype(LOW))
    assert count == [LOW, jnp.float32]


@pytest.mark.slow
def test_a_transformer_with_16_bit_parameters_has_the_error_of_float32_ones():
    make, small = MODELS["transformer 4, unrolled"]
    model = make(None, **small)

    def gradients(params, wide, batch):
        low = autocast(model.loss)
        with_loss = jmp.value_and_grad(low, loss_scale=jmp.NoOpLossScale())
        return (
            with_loss(params, batch),
            with_loss(wide, batch),
            jax.value_and_grad(model.loss)(wide, batch),
        )

    run = jax.jit(gradients, compiler_options=HIGH)
    ratios = []
    for seed in range(3):
        params, batch = fill((model.params, model.batch), seed)
        params = cast(params, LOW)
        (loss, found), (_, full), (exact_loss, exact) = run(
            params, cast(params, "float32"), batch
        )
        flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        errors = [np.linalg.norm(flat(x) - flat(exact)) for x in (found, full)]
        ratios.append(errors[0] / errors[1])
        assert relative_error(loss, exact_loss) < 1e-2
    assert np.median(ratios) < 1.1


def test_a_result_of_another_16_bit_dtype_counts_as_another_type():
    """Float16 has less range: 2e5 would be infinite."""

    def branching(x):
        return (x if x.dtype == jnp.bfloat16 else x.astype(jnp.float16)) * 2000

    x = jnp.full(4, 100, jnp.bfloat16)
    low = jmp.autocast(branching)(x)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low, branching(x))
    assert not jmp.explain(branching)(x).held
