"""Ops with a jaxpr inside: their rules are kept, and each op inside is decided."""

import collections
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TOLERANCE, compiled, live_equations, ops, products, relative_error
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import compute_on, scheduling_groups
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import full_precision
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.jaxprs.products import contracts_nothing

LOW, FULL = ("bfloat16",) * 3, ("float32",) * 3


def kept(fun, *args):
    """Returns the bytes of the residuals by dtype, without the arguments."""
    _, backward = jax.vjp(fun, *args)
    given = set(map(id, jax.tree.leaves(args)))
    found = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in given}
    total = dict.fromkeys(("float32", "bfloat16"), 0)
    for x in found.values():
        total[str(x.dtype)] = total.get(str(x.dtype), 0) + x.nbytes
    return total


def summing(eqns):
    """Leaves out products that contract nothing, which are multiplications."""
    return [eqn for eqn in eqns if not contracts_nothing(eqn)]


# -------------------------------------------------------------------- custom rules


@jax.custom_vjp
def layer(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y, None, 3)


def _backward(residuals, g):
    x, w, y, _, three = residuals
    # Strict: JAX would refuse to mix what is not float32 here.
    assert x.dtype == w.dtype == y.dtype == g.dtype == jnp.float32
    d = (three - 1) * lax.mul(g, lax.sub(jnp.ones_like(y), lax.mul(y, y)))
    return d @ w.T, x.T @ d


layer.defvjp(_forward, _backward)


def plain_layer(x, w):
    return jnp.tanh(x @ w)


NESTS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: (
        lambda x, w: lax.scan(lambda h, _: (f(h, w), None), x, length=3)[0]
    ),
    "cond": lambda f: lambda x, w: lax.cond(x.sum() > 9, lambda x, w: x, f, x, w),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
    "inside of another": lambda f: _wrapped(f),
}


def _wrapped(f):
    """A rule around a rule."""
    outer = jax.custom_vjp(lambda x, w: f(x, w))
    outer.defvjp(lambda x, w: jax.vjp(f, x, w), lambda vjp, g: vjp(g))
    return outer


@pytest.mark.parametrize(
    ("nest", "dtype", "run"),
    [
        ("plain", "bfloat16", lambda f: f),
        ("plain", "float16", jax.jit),
        *((nest, "bfloat16", jax.jit) for nest in NESTS),
    ],
)
def test_a_custom_vjp_rule_is_kept_and_low_inside(nest, dtype, run):
    fun = NESTS[nest](layer)
    loss = lambda f: lambda x, w: jnp.sum(f(x @ w, w) ** 2)
    low, full = autocast(loss(fun), compute_dtype=dtype), loss(fun)
    actual, expected = (run(jax.grad(f, (0, 1)))(X, W) for f in (low, full))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    # The rule differs from the true derivative by a factor of two.
    true = compiled(jax.grad(loss(NESTS[nest](plain_layer)), (0, 1)), X, W)
    assert relative_error(actual, true) > 0.2
    eqns = live_equations(jax.grad(low, (0, 1)), X, W)
    assert set(products(summing(eqns))) == {(dtype,) * 3}


def test_low_residuals_of_a_custom_rule_are_kept_in_16_bits():
    def layers(f):
        step = lambda h, _: (f(h, W), None)
        return lambda x: jnp.sum(lax.scan(step, x, length=20)[0] @ W)

    with_rule, without = (kept(autocast(layers(f)), X) for f in (layer, plain_layer))
    traced = kept(layers(layer), X)
    assert with_rule["float32"] <= without["float32"] + W.nbytes
    assert with_rule["float32"] + with_rule["bfloat16"] < 0.6 * traced["float32"]


@pytest.mark.skipif(
    jax.config.jax_custom_vjp3 and not hasattr(jax.config, "jax_custom_jvp3"),
    reason="jax 0.10 hands the static arguments wrapped to such a rule",
)
def test_a_custom_vjp_rule_gets_symbolic_zeros_static_arguments_and_integers():
    seen = []

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def power(n, x, index, y):
        return (x @ W) ** n * index.astype(x.dtype), jnp.sum(y)

    def forward(n, x, index, y):
        seen.append((x.perturbed, y.perturbed))
        return power(n, x.value, index.value, y.value), (x.value, index.value)

    def backward(n, residuals, cotangents):
        x, index = residuals
        g, g_sum = cotangents
        seen.append(isinstance(g_sum, SymbolicZero))
        d = n * (x @ W) ** (n - 1) * index.astype(x.dtype) * g
        return d @ W.T, None, jnp.zeros((3,))

    power.defvjp(forward, backward, symbolic_zeros=True)
    loss = lambda x: jnp.sum(power(3, x, jnp.array(2), jnp.ones(3))[0])
    actual, expected = jax.grad(autocast(loss))(X), jax.grad(loss)(X)
    assert relative_error(actual, expected) < 0.03
    assert set(seen) == {(True, False), True}


def test_numbers_among_the_residuals_reach_the_backward_function_as_they_are():
    @jax.custom_vjp
    def fun(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        return fun(x, w), (x, w, True, 3, 0.5, None)

    def backward(residuals, g):
        x, w, flag, index, half, nothing = residuals
        assert nothing is None
        assert flag is True  # Equinox branches on such a flag.
        d = g * range(5)[index] * half
        return d @ w.T, x.T @ d

    fun.defvjp(forward, backward)
    loss = lambda f: lambda x, w: jnp.sum(f(x @ w, w))
    for nest in NESTS.values():
        low, full = autocast(loss(nest(fun))), loss(nest(fun))
        actual, expected = (jax.jit(jax.grad(f, (0, 1)))(X, W) for f in (low, full))
        assert relative_error(actual, expected) < 0.03
        eqns = live_equations(jax.grad(low, (0, 1)), X, W)
        assert set(products(summing(eqns))) == {LOW}


@pytest.mark.parametrize("symbolic_zeros", [False, True])
def test_a_custom_jvp_rule_may_be_given_a_key(symbolic_zeros):
    @jax.custom_jvp
    def noisy(x, key):
        return x @ x * jax.random.normal(key, x.shape)

    @functools.partial(noisy.defjvp, symbolic_zeros=symbolic_zeros)
    def _(primals, tangents):
        (x, key), (dx, _) = primals, tangents
        noise = jax.random.normal(key, x.shape)
        return x @ x * noise, (dx @ x + x @ dx) * noise

    def gradient(f):
        return jax.grad(lambda x: f(x, jax.random.key(0)).sum())(W)

    assert relative_error(gradient(autocast(noisy)), gradient(noisy)) < 0.02


def test_a_custom_jvp_rule_is_kept_with_symbolic_zeros_and_static_arguments():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
    def f(x, y, n):
        return jnp.tanh(x @ W) * y**n

    def rule(n, primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        assert isinstance(dy, SymbolicZero)
        out = f(x, y, n)
        return out, 3 * (dx @ W) * (1 - out**2)

    f.defjvp(rule, symbolic_zeros=True)
    for transform in (
        lambda g: jax.grad(lambda x: jnp.sum(g(x))),
        lambda g: lambda x: jax.jvp(g, (x,), (x,)),
        lambda g: jax.grad(lambda x: jnp.sum(jax.checkpoint(g)(x))),
        lambda g: jax.grad(lambda x: jnp.sum(jax.vmap(g)(x))),
    ):
        run = lambda x: f(x, jnp.float32(0.5), 2)
        actual, expected = transform(autocast(run))(X), transform(run)(X)
        assert relative_error(actual, expected) < 0.03


def test_rules_in_rules_are_converted_once():
    asked = []

    class Counting(Rules):
        def precision_of(self, op):
            asked.append(op)
            return super().precision_of(op)

    def around(f):
        outer = jax.custom_jvp(lambda x, w: f(x, w))
        outer.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
        return outer

    deep = functools.reduce(lambda f, _: around(f), range(8), plain_layer)
    times = []
    for fun in (around(plain_layer), deep):
        asked.clear()
        jax.make_jaxpr(autocast(fun, Counting()))(X, W)
        times.append(asked.count("dot_general"))
    assert times[0] == times[1] > 0


# -------------------------------------------------------------- calls of other kinds


@pytest.fixture
def newest_rules():
    """``custom_vjp`` as JAX's next one, which binds another op."""
    before = jax.config.jax_custom_vjp3
    jax.config.update("jax_custom_vjp3", True)
    yield
    jax.config.update("jax_custom_vjp3", before)


@pytest.mark.usefixtures("newest_rules")
def test_a_rule_may_be_mapped_inside_of_an_inner_autocast():
    """JAX 0.10 makes an op of it that cannot be hashed."""
    rule = jax.custom_vjp(lambda x: jnp.tanh(x @ W))
    rule.defvjp(lambda x: (rule(x), x), lambda x, g: (g @ W.T * x,))
    mapped = lambda x: jnp.sum(jax.vmap(autocast(rule))(x))
    actual = jax.value_and_grad(autocast(mapped))(X)
    expected = jax.value_and_grad(mapped)(X)
    assert relative_error(actual, expected) < TOLERANCE["bfloat16"]


@pytest.mark.usefixtures("newest_rules")
def test_a_mapped_rule_gets_zeros_for_cotangents_that_are_not_needed():
    rule = jax.custom_vjp(lambda x: (x @ W, x))

    def backward(x, cotangents):
        assert isinstance(cotangents[1], SymbolicZero)
        return (cotangents[0] @ W.T * x,)

    forward = lambda x: ((x.value @ W, x.value), x.value)
    rule.defvjp(forward, backward, symbolic_zeros=True)
    loss = lambda x: jnp.sum(jax.vmap(lambda row: rule(row)[0])(x))
    actual, expected = jax.grad(autocast(loss))(X), jax.grad(loss)(X)
    assert relative_error(actual, expected) < TOLERANCE["bfloat16"]


@pytest.mark.usefixtures("newest_rules")
def test_an_optimized_checkpoint_computes_the_function_and_not_its_forward_rule():
    rule = jax.custom_vjp(lambda x: 2 * x)
    rule.defvjp(lambda x: (3 * x, x), lambda x, g: (g * x,), optimize_remat=True)
    loss = lambda x: jnp.sum(jax.checkpoint(rule)(x))
    actual = jax.value_and_grad(autocast(loss))(X)
    expected = jax.value_and_grad(loss)(X)
    chex.assert_trees_all_close(expected[0], jnp.sum(2 * X), rtol=1e-6)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def test_a_rule_for_vmap_is_kept_and_low_inside():
    @jax.custom_batching.custom_vmap
    def fun(x, w):
        return jnp.tanh(x @ w)

    @fun.def_vmap
    def rule(size, is_batched, x, w):
        assert size == 2
        assert is_batched == [True, False]
        assert x.dtype == w.dtype == np.float32
        return 2 * jnp.tanh(x @ w), True

    def outer(x):
        return fun(x @ W, W) @ W

    xs = jnp.stack([X, -X])
    for low, full, given in (
        (autocast(outer), outer, X),
        (jax.vmap(autocast(outer)), jax.vmap(outer), xs),
        (autocast(jax.vmap(outer)), jax.vmap(outer), xs),
    ):
        assert products(live_equations(low, given)) == {LOW: 3}
        assert relative_error(low(given), full(given)) < 0.03


def in_a_group(fun):
    return scheduling_groups.scheduling_group("a group")(fun)


def on_the_device(fun):
    # On jax 0.10, the placement of a call has another name.
    wrap = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    space = jax.memory.Space.Device
    return wrap(fun, compute_type="device", out_memory_spaces=space)


@pytest.mark.parametrize("wrap", [in_a_group, on_the_device])
def test_inside_of_a_call_that_groups_or_places_ops_each_op_is_decided(wrap):
    fun = lambda x: jnp.sum(wrap(lambda x, w: jnp.tanh(x @ w))(x @ W, W) @ W)
    for run in (lambda f: f, jax.value_and_grad):
        found = products(live_equations(run(autocast(fun)), X))
        assert set(found) == {LOW}
        assert found == collections.Counter(
            {LOW: sum(products(live_equations(run(fun), X)).values())}
        )


# ------------------------------------------------------------------ kept as traced


def test_callbacks_get_the_dtypes_that_they_were_traced_with():
    seen = []

    def look(x):
        seen.append(x.dtype)
        return x

    def callback(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(look, shape, x @ W, vmap_method="sequential") @ W

    autocast(callback)(X)
    assert seen == [np.float32]

    def shown(x):
        jax.debug.callback(look, x @ W)
        jax.debug.callback(look, x @ W, ordered=True)
        return x @ W

    jax.jit(autocast(shown))(X)
    jax.effects_barrier()
    assert seen == [np.float32] * 3


def test_a_pallas_kernel_gets_the_dtypes_that_it_was_traced_with():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        assert x.dtype == out.dtype == np.float32
        out[...] = x[...] * 2

    def fun(x):
        y = x @ W
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return pallas.pallas_call(kernel, shape, interpret=True)(y) @ W

    found = products(live_equations(autocast(fun), X))
    assert found == {LOW: 2}
    assert relative_error(autocast(fun)(X), fun(X)) < 0.03


def test_a_branch_for_each_platform_is_converted():
    def fun(x):
        default = lambda x: jnp.tanh(x @ W)
        return lax.platform_dependent(x, cpu=lambda x: x @ W, default=default) @ W

    assert set(products(live_equations(autocast(fun), X))) == {LOW}
    assert relative_error(autocast(fun)(X), fun(X)) < 0.03


def test_branches_that_end_differently_are_joined():
    def fun(i, x):
        return lax.switch(i, [jnp.exp, lambda x: x @ W, lambda x: x], x) @ W

    for i in range(3):
        actual, expected = autocast(fun)(i, X), fun(i, X)
        assert relative_error(actual, expected) < 0.03
    batched = jax.vmap(autocast(fun), (0, None))(jnp.arange(3), X)
    assert relative_error(batched, jax.vmap(fun, (0, None))(jnp.arange(3), X)) < 0.03


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_jitted_call_takes_arguments_that_have_16_bits_themselves(dtype):
    block = jax.jit(lambda x, h, w: x @ w + h.astype(np.float32))

    def fun(x, h, w):
        low = h.astype("bfloat16")
        return jnp.sum(block(block(x, low, w), low, w) ** 2)

    for run in (lambda f: f, jax.jit):
        actual, expected = (
            run(jax.value_and_grad(f, (0, 1, 2)))(X, X, W)
            for f in (autocast(fun, compute_dtype=dtype), fun)
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        assert relative_error(actual, expected) < TOLERANCE[dtype]


def test_the_policy_of_a_rematerialized_function_is_kept():
    policies = jax.checkpoint_policies

    def block(x):
        h = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ W), "h")
        return jax.nn.sigmoid(h) @ W

    for policy in (policies.nothing_saveable, policies.save_only_these_names("h")):
        plain = lambda x, p=policy: jnp.sum(jax.checkpoint(block, policy=p)(x))
        loss = autocast(plain)
        low, full = (
            [x.shape for x in jax.tree.leaves(jax.vjp(f, X)[1]) if x.dtype == dtype]
            for f, dtype in ((loss, "bfloat16"), (plain, "float32"))
        )
        # JAX itself keeps as many, and the operands from which it computes them again.
        assert len(low) == full.count(X.shape) - 1
        grads = jax.grad(loss)(X), jax.grad(lambda x: jnp.sum(block(x)))(X)
        assert relative_error(*grads) < 0.03


def test_a_jitted_checkpoint_keeps_its_input_in_16_bits():
    """Blocks are lowered as one only where that costs no memory."""
    block = jax.jit(jax.checkpoint(lambda h: h + jnp.tanh(h @ W)))
    fun = lambda x: block(block(block(x * 1.5))) @ W
    mixed = get_rules("mixed")
    alone = autocast(fun, mixed.without_pass("upcasts"))
    assert kept(autocast(fun, mixed), X) == kept(alone, X)


# --------------------------------------------------------------------- many devices


MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))


def reduced(x, w):
    """Collectives of every kind."""
    h = jnp.tanh(x @ w)
    everyone = lax.all_gather(h, "data", tiled=True)
    neighbour = lax.ppermute(h, "data", [(0, 1), (1, 0)])
    mean = lax.pmean(h @ w, "data")
    return lax.psum((everyone @ w).sum(0), "data") + mean.sum(0), neighbour @ w


@pytest.mark.parametrize("check_vma", [True, False])
def test_autocast_inside_and_outside_of_shard_map(check_vma):
    def mapped(fun):
        return jax.shard_map(
            fun,
            mesh=MESH,
            in_specs=(P("data"), P()),
            out_specs=(P(), P("data")),
            check_vma=check_vma,
        )

    expected = jax.jit(mapped(reduced))(X, W)
    for fun in (mapped(autocast(reduced)), autocast(mapped(reduced))):
        actual = jax.jit(fun)(X, W)
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        assert relative_error(actual, expected) < 0.03
        eqns = live_equations(fun, X, W)
        assert set(products(eqns)) == {LOW}
        assert {
            str(e.outvars[0].aval.dtype) for e in eqns if "psum" in e.primitive.name
        } == {"float32"}
    if not check_vma:
        return
    loss = lambda f: lambda x, w: jnp.sum(f(x, w)[0] ** 2)
    both = [
        jax.jit(jax.grad(loss(f), (0, 1)))(X, W)
        for f in (autocast(mapped(reduced)), mapped(reduced))
    ]
    assert relative_error(*both) < 0.05
    eqns = live_equations(jax.grad(loss(autocast(mapped(reduced)))), X, W)
    low = [
        e.primitive.name
        for e in eqns
        if any(name in e.primitive.name for name in ("psum", "reduce_scatter"))
        and "bfloat16" in str(e.outvars[0].aval)
    ]
    assert low == []


@pytest.mark.parametrize("mapping", [jax.vmap, jax.pmap])
def test_functions_mapped_with_named_axes_keep_their_values(mapping):
    x = jnp.stack([X, -X / 2])
    index = lambda: lax.axis_index("i").astype(np.float32)
    fun = lambda x: lax.psum(jnp.tanh(x @ W), "i") + index()
    actual, expected = (mapping(f, axis_name="i")(x) for f in (autocast(fun), fun))
    assert relative_error(actual, expected) < 0.03


def test_sharding_constraints_stay_where_they_are():
    spec = NamedSharding(MESH, P("data"))

    def fun(x):
        h = lax.with_sharding_constraint(x @ W, spec)
        return lax.with_sharding_constraint(jnp.tanh(h) @ W, spec)

    out = jax.jit(autocast(fun))(X)
    assert out.sharding.is_equivalent_to(spec, 2)
    assert ops(autocast(fun), X)["sharding_constraint"] == {"bfloat16", "float32"}
    assert relative_error(out, fun(X)) < 0.03


def test_explicitly_sharded_arrays_stay_sharded():
    with jax.set_mesh(EXPLICIT):
        x = jax.device_put(X, P("data"))
        w = jax.device_put(W, P())

        def fun(x, w):
            h = jnp.tanh(x @ w)
            assert jax.typeof(h).sharding.spec == P("data", None)
            return jnp.where(h > 0, h @ w, 0.0)

        actual, expected = jax.jit(autocast(fun))(x, w), jax.jit(fun)(x, w)
        assert jax.typeof(actual) == jax.typeof(expected)
        assert relative_error(actual, expected) < 0.03
        loss = lambda f: lambda w: f(x, w).sum()
        grads = [jax.jit(jax.grad(loss(f)))(w) for f in (autocast(fun), fun)]
        assert relative_error(*grads) < 0.03


# --------------------------------------------------------------- settings of JAX


def test_other_widths_than_float32_stay_as_they_are_in_x64():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64) / 3

        def fun(x, low):
            return x @ x, jnp.sin(x) * low.astype(x.dtype), low @ low

        args = x, x.astype(np.float32)
        actual, expected = autocast(fun)(*args), fun(*args)
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_array_equal(actual[1], expected[1])
        assert products(live_equations(autocast(fun), *args)) == {
            LOW: 1,
            ("float64",) * 3: 1,
        }


def test_a_product_of_float32_with_a_result_in_float64_is_float64():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float32) / 3
        fun = lambda x: jnp.sin(lax.dot(x, x, preferred_element_type=jnp.float64))
        actual, expected = autocast(fun)(x), fun(x)
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        np.testing.assert_array_equal(actual, expected)


def test_numbers_that_only_64_bits_reach_raise_no_warning():
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = jnp.ones((2, 2), np.float64)
        fun = lambda x: jnp.exp(x @ x) * 1e300
        np.testing.assert_array_equal(autocast(fun)(x), fun(x))


def test_integer_and_boolean_gradients_pass():
    fun = lambda n, x: jnp.sum(x[n] @ W)
    n = jnp.array([1, 1])
    actual, expected = (
        jax.grad(f, (0, 1), allow_int=True)(n, X) for f in (autocast(fun), fun)
    )
    assert actual[0].dtype == expected[0].dtype
    assert relative_error(actual[1], expected[1]) < 0.03


def test_a_mark_holds_inside_of_derivative_rules():
    marked = full_precision(plain_layer)
    rule = _wrapped(marked)
    fun = lambda x: jnp.sum(rule(x, W))
    assert set(products(live_equations(jax.grad(autocast(fun)), X))) == {FULL}


def test_a_block_that_is_called_in_two_scopes_is_decided_in_each():
    block = jax.jit(lambda x: x @ W)

    def fun(x):
        with jax.named_scope("head"):
            first = block(x)
        return first + block(x)

    rules = get_rules("mixed").scope("head", "full")
    assert products(live_equations(autocast(fun, rules), X)) == {FULL: 1, LOW: 1}


def test_a_value_that_one_branch_computes_in_float32_on_purpose_stays_float32():
    def fun(x):
        return jnp.tanh(lax.cond(x.sum() > 0, jnp.exp, lambda x: x @ W, x)) @ W

    assert ops(autocast(fun), X)["tanh"] == {"float32"}


def test_a_root_is_found_to_as_many_digits_as_in_float32():
    def fun(x):
        return lax.custom_root(
            lambda v: v - jnp.tanh(v @ W) / 4 - x[0],
            x[0],
            lambda f, v: lax.fori_loop(0, 40, lambda _, v: v - f(v), v),
            lambda g, y: y,
        )

    assert relative_error(autocast(fun)(X), fun(X)) < 1e-5
