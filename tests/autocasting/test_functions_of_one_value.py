"""Functions of one 16-bit value: norms and activations, found by their form."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled, mostly_slow, one_of_each, relative_error
from jax import lax
from programs import W, X

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import as_full, full_precision
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain


# Their names are not those of norms: under jit they are the names of scopes.
def ln(x):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * SCALE + SHIFT


def fast_ln(x):
    mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
    return (x - mean) * (SCALE / jnp.sqrt(square - mean**2 + 1e-6)) + SHIFT


def gn(x):
    groups = x.reshape(len(x), 2, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / groups.std(-1, keepdims=True)
    return normal.reshape(x.shape) * SCALE


SCALE, SHIFT = jnp.linspace(0.5, 1.5, 8), jnp.linspace(-0.2, 0.2, 8)
FUNCTIONS = {
    "layer norm": ln,
    "fast layer norm": fast_ln,
    "group norm": gn,
    "rms norm": lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True)) * SCALE,
    "l2 norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "scaled by a parameter": lambda x: x * jnp.exp(SHIFT),
    "gate": lambda x: x * jax.nn.softmax(x),
    "standardize": jax.nn.standardize,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "log sigmoid": jax.nn.log_sigmoid,
}
WRAPS = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}


def stream(function, x):
    """A function between two products, beside another branch."""
    return jnp.maximum(function(x @ W) + x @ W.T, 0) @ W


@pytest.mark.parametrize(
    ("function", "wrap"),
    mostly_slow(itertools.product(FUNCTIONS, WRAPS), one_of_each(FUNCTIONS, WRAPS)),
)
def test_the_result_of_a_function_of_one_value_is_16_bit(function, wrap):
    fun = lambda x: stream(WRAPS[wrap](FUNCTIONS[function]), x)
    rows = explain(fun)(X).rows
    added, largest = [r for r in rows if r.op in ("add", "max")][-2:]
    assert (added.precision, largest.precision) == ("bfloat16", "bfloat16")
    assert "one_function" in {row.code for row in rows}
    plain = lambda x: stream(FUNCTIONS[function], x)
    np.testing.assert_array_equal(autocast(fun)(X), autocast(plain)(X))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_one_value_is_float32_inside_and_close_to_float32(function):
    loss = lambda x: (stream(FUNCTIONS[function], x) ** 2).mean()
    actual, expected = (
        compiled(jax.value_and_grad(f), X) for f in (autocast(loss), loss)
    )
    assert relative_error(actual, expected) < 0.03
    rows = explain(lambda x: FUNCTIONS[function](x @ W) @ W)(X).rows
    sums = [r.precision for r in rows if r.code in ("sum", "amplifying")]
    assert set(sums) == {"float32"}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_norm_without_a_name_gives_the_same_bits_as_one_with_a_name(wrap):
    norm = WRAPS[wrap](ln)

    def named(x):
        with jax.named_scope("layer_norm"):
            return norm(x)

    results = [
        compiled(autocast(lambda x, f=f: stream(f, x)), X) for f in (norm, named)
    ]
    np.testing.assert_array_equal(*results)


def test_norms_of_flax_are_found_whatever_their_name():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i, norm in enumerate((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
                options = {"num_groups": 2} if norm is nn.GroupNorm else {}
                h = nn.Dense(8)(x)
                x = x + nn.relu(norm(name=f"ln_{i}", **options)(h))
            h = nn.BatchNorm(use_running_average=False, name="bn_init")(nn.Dense(8)(x))
            return nn.Dense(8)(nn.relu(h) + x)

    params = Net().init(jax.random.key(0), X)
    fun = lambda p, x: Net().apply(p, x, mutable=["batch_stats"])
    rows = explain(fun)(params, X).rows
    statistics = {r.precision for r in rows if r.op in ("reduce_sum", "rsqrt")}
    assert statistics == {"float32"}
    activations = {r.precision for r in rows if r.op == "max" and "relu" in r.scope}
    assert activations == {"bfloat16"}


def test_a_result_that_is_demanded_in_float32_is_float32():
    rows = explain(lambda x: ln(x @ W))(X).rows
    assert {r.precision for r in rows if r.op != "dot_general"} == {"float32"}

    def running(x):
        h = ln(x @ W)
        return h @ W, h.mean(0)  # Another reads it: 16 bits, but for the mean's sum.

    rows = explain(running)(X).rows
    assert rows[-1].precision == "float32"


def test_the_result_of_a_branch_that_is_demanded_in_float32_is_float32():
    def fun(x):
        return lax.cond(x[0, 0] > 0, ln, lambda h: h * 2, x @ W)

    jaxpr = jax.make_jaxpr(autocast(fun))(X)
    (cond,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    assert [str(var.aval.dtype) for var in cond.outvars] == ["float32"]
    relu = lambda x: jax.nn.relu(ln(x @ W)).sum()
    rows = explain(relu)(X).rows
    assert {r.precision for r in rows if r.op != "dot_general"} == {"float32"}


def test_a_value_that_a_product_reads_too_enters_and_leaves_a_branch_in_float32():
    def inside(h):
        h = ln(h)
        return h, h @ W

    def fun(x):
        h = ln(x @ W)
        total = lax.cond(x[0, 0] > 0, jnp.sum, jnp.max, h)
        normed, low = lax.cond(x[0, 0] > 0, inside, lambda h: (h, h), x @ W.T)
        return h @ W, total, normed.sum(), low @ W

    jaxpr = jax.make_jaxpr(autocast(fun))(X)
    entering, leaving = (e for e in jaxpr.eqns if e.primitive.name == "cond")
    assert [str(v.aval.dtype) for v in entering.invars[1:]] == ["float32"]
    dtypes = [str(var.aval.dtype) for var in leaving.outvars]
    assert dtypes == ["float32", "bfloat16"]


def precision_of_last(fun, op="tanh", rules="mixed"):
    return [r.precision for r in explain(fun, rules)(X).rows if r.op == op][-1]


def test_a_function_of_two_values_is_float32():
    two = lambda x: jnp.tanh(jnp.exp(x @ W) * (x @ W.T)) @ W
    assert precision_of_last(two) == "float32"
    # Functions that are complete join each other in 16 bits.
    sums = lambda x: jnp.tanh(ln(x @ W) + ln(x @ W.T)) @ W
    assert precision_of_last(sums) == "bfloat16"
    # A function whose parts are not joined again is no function of one value.
    assert precision_of_last(lambda x: jnp.tanh(jnp.exp(x @ W)) @ W) == "float32"


def test_float32_on_purpose_is_no_part_of_a_function():
    positions = lambda x: jnp.tanh(x @ W + jnp.exp(jnp.arange(8.0))) @ W
    assert precision_of_last(positions) == "float32"
    marked = lambda x: jnp.tanh((x @ W) * as_full(SCALE)) @ W
    assert precision_of_last(marked) == "float32"

    def scoped(x):
        h = x @ W
        with full_precision():
            norm = jnp.exp(h)
        return jnp.tanh(h * norm) @ W

    assert precision_of_last(scoped) == "float32"
    softplus = lambda x: jnp.tanh(ln(x @ W) + x @ W.T) @ W
    assert precision_of_last(softplus, rules="torch") == "float32"
    assert precision_of_last(softplus, rules=get_rules("mixed").full("exp", "sub")) == (
        "float32"
    )


@pytest.mark.parametrize("rules", ["O1", "O2", "O3"])
def test_other_presets_do_not_find_functions_of_one_value(rules):
    expected = {"O1": "float32", "O2": "bfloat16", "O3": "bfloat16"}[rules]
    fun = lambda x: jnp.tanh(ln(x @ W) + x @ W.T) @ W
    assert precision_of_last(fun, rules=rules) == expected


def test_functions_of_one_value_are_found_in_loops_and_branches():
    def layers(x, stack):
        step = lambda h, w: (h + ln(jnp.tanh(h @ w)), jax.nn.softplus(h @ w))
        h, others = lax.scan(step, x, stack)
        return h @ W, others @ W

    rows = explain(layers)(X, jnp.stack([W, W.T])).rows
    carries = [r.precision for r in rows if r.op == "scan"]
    assert carries == ["bfloat16"]
    jaxpr = jax.make_jaxpr(autocast(layers))(X, jnp.stack([W, W.T]))
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert {str(v.aval.dtype) for v in scan.outvars} == {"bfloat16"}

    def branches(x):
        h = x @ W
        h = lax.cond(x[0, 0] > 0, ln, jnp.tanh, h)
        return jnp.tanh(h + x @ W.T) @ W

    assert precision_of_last(branches) == "bfloat16"
    args = X, jnp.stack([W, W.T])
    actual, expected = (compiled(f, *args) for f in (autocast(layers), layers))
    assert relative_error(actual, expected) < 0.03


def test_a_function_of_one_value_may_extend_into_calls_and_past_them():
    centre = jax.jit(lambda x, mean: x - mean)
    scale = jax.jit(lambda centred, variance: centred * lax.rsqrt(variance))

    def norm(x):
        centred = centre(x, jax.jit(jnp.mean)(x))
        return jax.jit(lambda y: y + SHIFT)(scale(centred, (centred**2).mean()))

    def plain(x):
        centred = x - x.mean()
        return centred * lax.rsqrt((centred**2).mean()) + SHIFT

    results = [autocast(lambda x, f=f: stream(f, x))(X) for f in (norm, plain)]
    np.testing.assert_array_equal(*results)
    assert precision_of_last(lambda x: stream(norm, x), "max") == "bfloat16"
    # The same function of other values: another conversion.
    mixed = lambda x: jnp.tanh(centre(x @ W, (x @ W.T).sum())) @ W
    assert precision_of_last(mixed) == "float32"
    both = lambda x: stream(norm, x) + mixed(x)
    assert precision_of_last(both) == "float32"


def test_a_value_and_what_is_made_of_it_may_come_from_one_call():
    call = jax.jit(lambda x: (x @ W, jnp.log1p((x @ W).sum())))
    one = jax.jit(lambda x: (lambda h: (h, jnp.log1p(h.sum())))(x @ W))
    fun = lambda of: lambda x: jnp.tanh((lambda h, s: h * s + x @ W.T)(*of(x))) @ W
    assert precision_of_last(fun(one)) == "bfloat16"
    assert precision_of_last(fun(call)) == "float32"  # Two products.
    plain = lambda x: (lambda h: (h, jnp.log1p(h.sum())))(x @ W)
    np.testing.assert_array_equal(autocast(fun(one))(X), autocast(fun(plain))(X))
