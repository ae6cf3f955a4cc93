"""Where float32 is demanded: the tail of a program, and products that need digits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiled, mostly_slow, one_of_each, relative_error
from jax import lax

from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.marks import as_full, as_low
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.explanation import explain

# ------------------------------------------------------------------ the tail of a loss

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (256, 32))
PARAMS = {"w": jax.random.normal(KEYS[1], (32, 1)) / 6, "b": jnp.full((1,), 100.0)}
Y = X @ PARAMS["w"] + PARAMS["b"] + jax.random.normal(KEYS[2], (256, 1)) / 4


def huber(e):
    return jnp.where(jnp.abs(e) < 1, 0.5 * e * e, jnp.abs(e) - 0.5).mean()


ERRORS = {
    "to the second power": lambda e: (e**2).mean(),
    "square": lambda e: jnp.square(e).mean(),
    "times itself": lambda e: (e * e).mean(),
    "absolute": lambda e: jnp.abs(e).mean(),
    "huber": huber,
    "hinge": lambda e: jnp.maximum(0, 1 - e).mean(),
    "root of the mean": lambda e: jnp.sqrt((e**2).mean()),
    "many ops": lambda e: (jnp.tanh(e.reshape(16, 16).T * 0.5)[::-1] ** 2).mean(),
}
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda p, x, y: jax.vmap(f, (None, 0, 0))(p, x, y).mean(),
    "scan": lambda f: (
        lambda p, x, y: lax.scan(lambda c, xy: (c, f(p, *xy)), 0, (x, y))[1].mean()
    ),
}


@pytest.mark.parametrize(
    ("error", "wrap"),
    mostly_slow(itertools.product(ERRORS, WRAPS), one_of_each(ERRORS, WRAPS)),
)
def test_a_loss_on_large_targets_is_as_close_as_under_o1(error, wrap):
    def loss(params, x, y):
        return ERRORS[error](x @ params["w"] + params["b"] - y)

    fun, args = WRAPS[wrap](loss), (PARAMS, X, Y)
    if wrap in ("vmap", "scan"):
        args = PARAMS, jnp.stack([X, -X]), jnp.stack([Y, 2 * PARAMS["b"] - Y])
    step = lambda rules: jax.value_and_grad(autocast(fun, rules))
    exact = compiled(jax.value_and_grad(fun), *args)
    expected = compiled(step("O1"), *args)
    for rules in ("mixed", "O2"):
        actual = compiled(step(rules), *args)
        assert abs(actual[0] / exact[0] - 1) < 0.01
        np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4)
        assert relative_error(actual[1], expected[1]) < 0.01


def test_an_op_that_no_product_depends_on_is_float32_however_long_the_chain():
    def fun(x, w):
        h = jnp.tanh(x @ w)  # A product reads it.
        out = h @ w
        for _ in range(20):
            out = jnp.tanh(out * 1.5 + 0.25)
        return out

    rows = explain(fun)(X[:, :8], jnp.eye(8)).rows
    precisions = [row.precision for row in rows if row.op != "dot_general"]
    assert precisions == ["bfloat16"] + ["float32"] * 60
    assert {row.code for row in rows[2:] if row.op != "dot_general"} == {
        "read_in_float32"
    }


@pytest.mark.parametrize("pick", [lambda x: x > 0.5, jnp.argmax, jnp.argsort])
def test_values_that_are_compared_or_picked_from_are_float32(pick):
    fun = lambda x, w, b: pick((x @ w + b).ravel())
    rows = {row.op: row for row in explain(fun)(X, X.T, X[0, 0]).rows}
    assert rows["add"].precision == "float32"


def test_a_value_that_a_product_reads_too_is_low():
    def fun(x, w):
        h = jnp.tanh(x @ w)
        return h @ w, (h**2).mean(), h > 0.5

    rows = explain(fun)(X[:, :8], jnp.eye(8)).rows
    assert next(row for row in rows if row.op == "tanh").precision == "bfloat16"


@pytest.mark.parametrize(
    ("scale", "dtype", "precision"),
    [
        (lambda h: h / 8.0, "bfloat16", "bfloat16"),
        (lambda h: 0.25 * h, "bfloat16", "bfloat16"),
        (lambda h: h / 8.0, "float16", "float32"),
        (lambda h: h * 1.5, "bfloat16", "float32"),
        (lambda h: 8.0 / h, "bfloat16", "float32"),
    ],
)
def test_a_scale_by_a_power_of_two_rounds_nothing(scale, dtype, precision):
    fun = lambda x, w: jax.nn.softmax(scale(x @ w))
    rows = explain(fun, compute_dtype=dtype)(X, X.T).rows
    assert rows[1].op in ("mul", "div")
    assert rows[1].precision == precision
    marked = lambda x, w: jax.nn.softmax(as_full(x @ w) / 8.0)
    np.testing.assert_array_equal(
        autocast(lambda x, w: jax.nn.softmax((x @ w) / 8.0))(X, X.T),
        autocast(marked)(X, X.T),
    )


def test_o3_and_rules_that_name_an_op_lower_tails():
    fun = lambda x, w: ((x @ w) * 1.5) ** 2
    of = lambda rules: {r.op: r.precision for r in explain(fun, rules)(X, X.T).rows}
    assert of("O2")["mul"] == of("mixed")["mul"] == "float32"
    assert of("O3")["mul"] == "bfloat16"
    assert of(get_rules("mixed").low("mul"))["mul"] == "bfloat16"
    marked = lambda x, w: as_low((x @ w) * 1.5) ** 2
    assert explain(marked)(X, X.T).rows[-1].precision == "float32"


# ------------------------------------------------------- products that need digits


def lookup(table, ids):
    return (jax.nn.one_hot(ids, len(table)) @ table).astype(jnp.int32)


def rounded(table, ids):
    found = jnp.round(jax.nn.one_hot(ids, len(table)) @ table * 2 / 2)
    return found.reshape(-1, 4).T.astype(jnp.int32)


def places(table, ids):
    """Places in the queues of experts, of a mask and a triangle of ones."""
    del table
    mask = jax.nn.one_hot(ids % 2, 2)
    n = len(ids)
    return (jnp.tril(jnp.ones((n, n)), -1) @ mask * mask).sum(-1).astype(jnp.int32)


def gram(x):
    x = x - x.mean(0)
    return x.T @ x / len(x) + 1e-4 * jnp.eye(x.shape[1])


def squared(x):
    return jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)) @ jnp.eye(len(x))


NEST = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda f: lambda *a: lax.cond(True, f, f, *a),
}


each_nest = pytest.mark.parametrize("nest", mostly_slow(NEST, ("plain", "cond")))


@each_nest
@pytest.mark.parametrize("fun", [lookup, rounded, places])
def test_integers_by_way_of_products_are_exact(fun, nest):
    ids = jnp.arange(1000) * 7 % 1000
    table = 7 * jnp.arange(1000.0)
    expected = jax.jit(fun)(table, ids)
    np.testing.assert_array_equal(autocast(NEST[nest](fun))(table, ids), expected)
    several = jax.vmap(autocast(fun), (None, 0))(table, ids[None])
    np.testing.assert_array_equal(several[0], expected)


@each_nest
@pytest.mark.parametrize(
    "read",
    [
        lambda a: jnp.linalg.cholesky(a),
        lambda a: jnp.linalg.solve(a, a[0]),
        lambda a: jnp.linalg.inv(a),
        lambda a: jnp.linalg.eigvalsh((a + a.T) / 2),
        lambda a: jnp.linalg.slogdet(a)[1],
        lambda a: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), a[0]),
    ],
)
def test_factorizations_and_solvers_read_float32_products(read, nest):
    # Columns that are nearly the same.
    x = X[:, :1] + 0.05 * X[:, :16]
    fun = NEST[nest](lambda x: read(gram(x)))
    expected = jax.jit(fun)(x)
    assert jnp.isfinite(expected).all()
    np.testing.assert_allclose(jax.jit(autocast(fun))(x), expected, rtol=1e-3)
    rows = [row for row in explain(fun)(x).rows if row.code == "digits"]
    assert {(r.op, r.precision) for r in rows} == {("dot_general", "float32")}


@pytest.mark.parametrize("nest", NEST)
@pytest.mark.parametrize("wave", [jnp.sin, jnp.cos])
def test_phases_of_given_coordinates_are_float32(wave, nest):
    def fun(coordinates, rates, w):
        phases = 2 * jnp.pi * (coordinates @ rates)
        return wave(phases + 0.5) @ w

    fun = NEST[nest](fun)
    args = 50 * X[:, :2], 10 * X[:2], X[0, :, None]
    actual, expected = jax.jit(autocast(fun))(*args), jax.jit(fun)(*args)
    assert relative_error(actual, expected) < 0.01
    precisions = [
        r.precision for r in explain(fun)(*args).rows if r.op == "dot_general"
    ]
    assert set(precisions) == {"float32", "bfloat16"}
    # Of what is 16-bit anyway, the product is too.
    hidden = lambda x, w: wave(jnp.tanh(x @ w) @ w) @ w
    rows = explain(hidden)(X, X[:32]).rows
    assert {r.precision for r in rows if r.op == "dot_general"} == {"bfloat16"}


@pytest.mark.parametrize("nest", NEST)
def test_phases_of_scaled_coordinates_and_computed_frequencies_are_float32(nest):
    def fun(coordinates, rates, w):
        centred = (coordinates - coordinates.mean(0)) / 2
        frequencies = rates * jnp.exp2(jnp.arange(rates.shape[1], dtype=jnp.float32))
        return jnp.sin(centred @ frequencies) @ w

    def by_table(coordinates, rates, w):
        table = jnp.exp2(lax.broadcasted_iota(jnp.float32, rates.shape, 1) / 8)
        return jnp.sin(coordinates @ table) @ w

    args = 50 * X[:, :2], X[:2], X[0, :, None]
    for each in (fun, by_table):
        actual, expected = (
            jax.jit(f)(*args) for f in (autocast(NEST[nest](each)), each)
        )
        assert relative_error(actual, expected) < 0.01


def test_the_hidden_layers_of_a_siren_are_16_bit():
    """The phases of the first layer are of coordinates, those of others of sines."""

    def siren(coordinates, first, hidden, last):
        h = jnp.sin(30 * (coordinates @ first))
        for w in hidden:
            h = jnp.sin(30 * (h @ w))
        return h @ last

    for rules in ("mixed", "O1"):
        args = X[:, :2], X[:2] / 8, [X[:32] / 80, X[:32] / 90], X[:32, :1]
        rows = explain(siren, rules)(*args).rows
        found = [row.precision for row in rows if row.op == "dot_general"]
        assert found == ["float32", "bfloat16", "bfloat16", "bfloat16"]
        gradients = (
            compiled(jax.grad(lambda *a, f=f: (f(*a) ** 2).mean(), (1, 2, 3)), *args)
            for f in (autocast(siren, rules), siren)
        )
        assert relative_error(*gradients) < 0.05


def test_a_product_that_another_product_reads_too_is_low():
    def fun(x):
        a = gram(x)
        return jnp.linalg.cholesky(a), a @ x.T

    rows = [r for r in explain(fun)(X).rows if r.op == "dot_general"]
    assert {row.precision for row in rows} == {"bfloat16"}


def test_a_product_is_low_where_another_op_than_a_scaling_follows():
    through = lambda x: jnp.tanh(x @ x.T).astype(jnp.int32)
    rows = [r for r in explain(through)(X).rows if r.op in ("dot_general", "tanh")]
    assert [row.precision for row in rows] == ["bfloat16", "float32"]


def test_returning_what_is_computed_anyway_changes_no_decision_of_a_product():
    fun = lambda x: jnp.linalg.cholesky(gram(x))
    more = lambda x: (fun(x), gram(x), (x.T @ x).sum())
    np.testing.assert_array_equal(autocast(more)(X)[0], autocast(fun)(X))


@pytest.mark.parametrize("rules", ["mixed", "O1", "O2"])
def test_a_rule_that_names_products_decides_them(rules):
    low = get_rules(rules).low("dot_general")
    rows = explain(lambda x: jnp.linalg.cholesky(gram(x)), low)(X).rows
    assert [r.precision for r in rows if r.op == "dot_general"] == ["bfloat16"]


@pytest.mark.parametrize(
    ("rules", "precision"),
    [("mixed", "bfloat16"), ("O1", "float32"), ("O3", "bfloat16")],
)
def test_a_product_that_contracts_nothing_is_a_multiplication(rules, precision):
    def outer(x, w):
        h = x @ w
        return jnp.einsum("bi,bj->bij", h, h).reshape(len(x), -1) @ jnp.ones((64, 4))

    rows = explain(outer, rules)(X, X[:32, :8]).rows
    (row,) = (r for r in rows if r.op == "dot_general" and "8,8]" in r.shapes[0])
    assert row.precision == precision
    alone = lambda a, b: jnp.tanh(a[:, None] @ b[None]) @ jnp.ones((3, 2))
    rows = explain(alone)(jnp.ones(5), jnp.ones(3)).rows
    assert [r.precision for r in rows if r.op == "dot_general"] == [
        "float32",
        "bfloat16",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_multiplication_may_have_operands_of_two_dtypes(dtype):
    def fun(x, w):
        h = x @ w
        column = h[:, :1].astype(dtype)
        outer = lax.dot(column, h[:1], preferred_element_type=jnp.float32)
        return jnp.tanh(outer) @ w

    actual, expected = (compiled(f, X, X.T[:, :32]) for f in (autocast(fun), fun))
    assert actual.dtype == expected.dtype
    assert relative_error(actual, expected) < 0.05


@pytest.mark.parametrize(
    "read",
    [
        lambda y: jnp.abs(jnp.fft.rfft(y)),
        lambda y: jnp.abs(jnp.fft.fft2(y)),
        lambda y: jnp.abs(y * jnp.exp(1j * jnp.arange(y.shape[-1]))),
        lambda y: jnp.abs(lax.complex(y, y)),
    ],
)
def test_values_that_become_complex_are_float32(read):
    """Complex numbers have no 16-bit form, so their readers demand float32."""

    def loss(x, w):
        y = jnp.tanh(x @ w) @ w + x
        return jnp.log1p(read(y)).sum()

    args = X, X[:32] / 6
    with jax.numpy_dtype_promotion("standard"):
        rows = explain(loss)(*args).rows
        assert next(r for r in rows if r.op == "add").precision == "float32"
        mixed, level_1, expected = (
            compiled(jax.grad(f, 1), *args)
            for f in (autocast(loss), autocast(loss, "O1"), loss)
        )
    bound = relative_error(level_1, expected)
    assert relative_error(mixed, expected) <= 1.5 * bound
