"""Ops that need float32 for what their operands are: lookups, powers, exponentials.

Each program is compared with itself in float32. Those that O1 loses, too, are here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import live_equations, relative_error
from jax import lax

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("standard_promotion")

normal = jax.random.normal
KEYS = jax.random.split(jax.random.key(0), 12)
X = normal(KEYS[0], (12, 16))
W, U = (normal(key, (16, 16)) / 4 for key in KEYS[1:3])
KINDS = jax.random.randint(KEYS[3], (50,), 0, 3)
ENERGIES = jnp.array([-1.03e4, -2.71e4, -13.6])


def error(fun, *args, rules="mixed", **options):
    """Returns the error of a compiled function, relative to float32."""
    low = jmp.autocast(fun, rules, **options)
    return relative_error(jax.jit(low)(*args), jax.jit(fun)(*args))


def codes(fun, *args, rules="mixed", **options):
    """Returns the reasons for which products run as they do, in order."""
    rows = jmp.explain(fun, rules, **options)(*args).rows
    return [row.code for row in rows if row.op in ("dot_general", "conv")]


def products(fun, *args):
    """Returns the products of a function."""
    names = ("dot_general", "conv_general_dilated")
    return [e for e in live_equations(fun, *args) if e.primitive.name in names]


def are_low(fun, *args, **options):
    rows = jmp.explain(fun, **options)(*args).rows
    return {row.precision for row in rows if row.op == "dot_general"}


# ------------------------------------------------------- products of zeros and ones


def looked_up(kinds, energies):
    return jax.nn.one_hot(kinds, 3) @ energies


def compared(kinds, energies):
    return (kinds[:, None] == jnp.arange(3)).astype("float32") @ energies


def of_a_mask(kinds, energies):
    return jnp.where(kinds[:, None] == jnp.arange(3), 1.0, 0.0) @ energies


def moved(kinds, energies):
    return energies @ jax.nn.one_hot(kinds, 3).reshape(5, 10, 3)[:, ::-1].T[:, :, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fun", [looked_up, compared, of_a_mask, moved])
def test_a_table_is_looked_up_in_float32_for_float32_readers(fun, dtype):
    for rules in ("mixed", "O1", "O2"):
        for program in (fun, lambda *args: fun(*args).sum(), jax.jit(fun)):
            assert (
                error(program, KINDS, ENERGIES, rules=rules, compute_dtype=dtype) == 0
            )
    assert codes(fun, KINDS, ENERGIES) == ["lookup"]
    gradient = lambda energies: jax.grad(lambda e: (fun(KINDS, e) ** 2).sum())(energies)
    low = lambda e: (jmp.autocast(fun, compute_dtype=dtype)(KINDS, e) ** 2).sum()
    np.testing.assert_allclose(jax.grad(low)(ENERGIES), gradient(ENERGIES), rtol=1e-6)


def test_one_large_entry_leaves_the_other_rows_finite_in_float16():
    table = jnp.array([1.0, 2.0, 70_000.0])
    low = jmp.autocast(looked_up, compute_dtype="float16")
    np.testing.assert_array_equal(low(jnp.arange(3), table), table)


def test_a_lookup_that_16_bit_ops_read_stays_low():
    embedded = lambda kinds, table, w: jnp.tanh(jax.nn.one_hot(kinds, 16) @ table) @ w
    assert codes(embedded, KINDS, W, U) == ["product", "product"]
    # So does a product of activations, which have 16 bits already.
    mixed = lambda x, w: jnp.tril(jnp.ones((12, 12))) @ jnp.tanh(x @ w)
    assert codes(mixed, X, W) == ["product", "product"]


def test_a_rule_of_the_user_lowers_a_lookup():
    rules = jmp.get_rules("mixed").low("dot_general")
    assert codes(looked_up, KINDS, ENERGIES, rules=rules) == ["op"]


def positions(mask):
    ones = jnp.ones((len(mask), len(mask)))
    return jnp.tril(ones) @ mask.astype("float32")


COUNTS = {
    "returned": positions,
    "compared": lambda mask: (positions(mask) <= 1000).sum(),
    "a cast": lambda mask: (positions(mask) - 1).astype("int32"),
    "a logarithm": lambda mask: jnp.log1p(positions(mask)),
    "a sum and a product": lambda mask: (
        (positions(mask) > 300).astype("float32").sum()
        + (positions(mask)[:16] @ W).sum() * 1e-30
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_exact_although_their_operands_are_16_bit(name):
    mask, fun = normal(KEYS[4], (1500,)) > -2, COUNTS[name]
    assert error(fun, mask) == 0
    first = products(jmp.autocast(fun), mask)[0]
    assert {str(atom.aval.dtype) for atom in first.invars} == {"bfloat16"}
    assert str(first.outvars[0].aval.dtype) == "float32"
    assert "lookup" in codes(fun, mask)


# ------------------------------------------------------ chains that end in indices

CAMERAS = normal(KEYS[5], (3, 3, 3))
POINTS = 1000 * normal(KEYS[6], (3, 200))


def pixels(cameras, points):
    for camera in cameras:
        points = camera @ points
    return jnp.floor(points).astype("int32")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_products_before_an_index_are_float32(n, dtype):
    assert error(pixels, CAMERAS[:n], POINTS, compute_dtype=dtype) == 0
    scaled = lambda cameras, points: pixels(0.5 * cameras, points + 1.0)
    assert error(scaled, CAMERAS[:n], POINTS, compute_dtype=dtype) == 0


def test_all_products_before_a_solver_are_float32():
    solved = lambda x, w: jnp.linalg.solve((x @ w) @ (x @ w).T + jnp.eye(12), x)
    assert codes(solved, X, W)[:3] == ["digits"] * 3


# --------------------------------------------------------------- powers of one matrix

TURN = jnp.linalg.qr(normal(KEYS[7], (8, 8)))[0]
CHAIN = jax.nn.softmax(2 * normal(KEYS[8], (8, 8)))
V = normal(KEYS[9], (8,))


def koopman(n):
    return lambda a, x: lax.scan(lambda x, _: (a @ x, None), x, length=n)[0]


def covariance(a, p):
    step = lambda p, _: (a @ p @ a.T + 0.01 * jnp.eye(8), None)
    return lax.scan(step, p, length=200)[0]


def power_iteration(a, x):
    def step(x, _):
        y = a @ x
        return y / jnp.linalg.norm(y), jnp.sum(x * y)

    return lax.scan(step, x, length=100)


def until(a, x):
    counted = lambda state: (state[0] + 1, state[1] @ a)
    return lax.while_loop(lambda state: state[0] < 100, counted, (0, x))[1]


def inside_a_jit(a, x):
    return lax.fori_loop(0, 200, lambda _, x: jax.jit(jnp.matmul)(x, a), x)


def two_carries(a, x):
    step = lambda pair, _: ((pair[1], a @ pair[0] - 0.1 * pair[1]), None)
    return lax.scan(step, (x, x), length=100)[0]


LOOPS = {
    "Koopman, 20 steps": (koopman(20), 0.99 * TURN, V),
    "Koopman, 200 steps": (koopman(200), 0.999 * TURN, V),
    "Koopman, 1,000 steps": (koopman(1000), TURN, V),
    "a Markov chain": (inside_a_jit, CHAIN, jnp.ones(8) / 8),
    "a covariance": (covariance, 0.99 * TURN, jnp.eye(8)),
    "a power iteration": (power_iteration, TURN * jnp.arange(1.0, 9) @ TURN.T, V),
    "a while": (until, 0.99 * TURN, V),
    "two carries": (two_carries, 0.9 * TURN, V),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_powers_of_one_matrix_are_float32(name, dtype):
    fun, *args = LOOPS[name]
    assert error(fun, *args, compute_dtype=dtype) < 1e-5
    assert set(codes(fun, *args)) == {"digits"}
    if name != "a while":
        loss = lambda *args: sum((y**2).sum() for y in jax.tree.leaves(fun(*args)))
        gradient = jax.grad(jmp.autocast(loss, compute_dtype=dtype))(*args)
        assert relative_error(gradient, jax.grad(loss)(*args)) < 1e-4


def test_in_16_bits_their_error_grows_with_the_steps():
    rules = jmp.get_rules("mixed").low("dot_general")
    errors = [error(koopman(n), TURN, V, rules=rules) for n in (20, 1000)]
    assert 0.005 < errors[0] < 0.05
    assert errors[1] > 0.5


def test_the_matrix_is_computed_in_float32_too():
    fun = lambda w, u, x: koopman(20)(w @ u / 16, x)
    assert error(fun, W, U, X[0]) < 1e-5
    assert codes(fun, W, U, X[0]) == ["digits", "digits"]


LEARNED = {
    "a recurrent net": lambda h, x: jnp.tanh(h @ W + x),
    "a learned input": lambda h, x: h @ W + x @ U,
    "a norm": lambda h, x: (lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True))(
        h @ W
    ),
    "a gate": lambda h, x: (h @ W) * jax.nn.sigmoid(x),
    "a matrix that changes": lambda h, x: h @ (W * x[:16]),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_loop_with_more_than_one_matrix_in_it_stays_low(name):
    step = LEARNED[name]
    xs = jnp.stack([jnp.tile(X, (2, 1))[:16]] * 3)
    fun = lambda h, xs: lax.scan(lambda h, x: (step(h, x), None), h, xs)[0] @ W
    assert are_low(fun, jnp.zeros((16, 16)), xs) == {"bfloat16"}


@pytest.mark.parametrize("start", [jnp.zeros, jnp.ones])
def test_a_carry_that_starts_as_zeros_or_ones_is_no_table_index(start):
    def fun(xs):
        step = lambda h, x: (jnp.tanh(h @ W + x), None)
        return lax.scan(step, start((12, 16)), xs)[0]

    assert codes(fun, jnp.stack([X] * 3), rules="O1") == ["product"]
    assert codes(jax.jit(fun), jnp.stack([X] * 3)) == ["product"]


# ------------------------------------------------------------- exponentials in float16

PEAKS = 4.0 * jnp.arange(8.0)
A, B = normal(KEYS[10], (6, 8)) + PEAKS, normal(KEYS[11], (8, 6)) - PEAKS[:, None]


def log_matmul_exp(a, b):
    return jnp.log(jnp.exp(a) @ jnp.exp(b))


def with_maxima(a, b):
    tops = a.max(-1, keepdims=True), b.max(0)
    return jnp.log(jnp.exp(a - tops[0]) @ jnp.exp(b - tops[1])) + tops[0] + tops[1]


def attention_by_exp(a, b):
    q, k, v = jnp.exp(a / 2), jnp.exp(a[::-1] / 2), b.T
    return (q @ (k.T @ v)) / (q @ k.sum(0))[:, None]


def forward_algorithm(a, b):
    def step(alpha, _):
        top = alpha.max()
        return jnp.log(jnp.exp(alpha - top) @ jnp.exp(a[:, :6])) + top, alpha

    return lax.scan(step, b[0], length=5)


@pytest.mark.parametrize(
    "fun", [log_matmul_exp, with_maxima, attention_by_exp, forward_algorithm]
)
def test_a_product_of_exponentials_is_float32_in_float16_alone(fun):
    assert error(fun, A, B, compute_dtype="float16") < 1e-5
    assert set(codes(fun, A, B, compute_dtype="float16")) == {"spread"}
    assert set(codes(fun, A, B)) == {"product"}
    assert np.isfinite(error(fun, A, B))


def flash(q, v):
    scores = q @ q.T
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ v) / weights.sum(-1, keepdims=True)


def attention_and_norm(q, v):
    h = jax.nn.softmax(q @ q.T) @ v
    return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def elu_and_norm(q, v):
    h = jax.nn.elu(q) @ q.T @ v
    return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("fun", [flash, attention_and_norm, elu_and_norm])
def test_other_exponentials_leave_products_low_in_float16(fun):
    both = lambda q, v: fun(q, v) @ W
    assert are_low(both, X, X, compute_dtype="float16") == {"float16"}


# ------------------------------------------------- float32 products that are float32


def floored(x, w):
    return jnp.floor(x @ w).astype("int32")


def full(x, w):
    with jmp.full_precision():
        return x @ w


def named(x, w):
    with jax.named_scope("here"):
        return x @ w


KEPT = {
    "a cast to integers": (floored, "mixed"),
    "a solver": (lambda x, w: jnp.linalg.inv(w @ w), "mixed"),
    "a phase": (lambda x, w: jnp.sin(x @ w), "mixed"),
    "a lookup": (lambda x, w: jax.nn.one_hot(jnp.arange(4), 16) @ w, "mixed"),
    "a power": (lambda x, w: koopman(3)(w, x[0]), "mixed"),
    "full_precision": (full, "mixed"),
    "a mark alone": (full, "O1"),
    "an op rule": (lambda x, w: x @ w, jmp.get_rules("mixed").full("dot_general")),
    "a scope": (named, jmp.get_rules("mixed").scope("here", "full")),
    "a convolution": (
        lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME"),
        jmp.get_rules("mixed").full("conv_general_dilated"),
    ),
}


def precisions(fun, *args):
    return {str(e.params["precision"]) for e in products(fun, *args)}


@pytest.mark.parametrize("name", KEPT)
def test_a_product_that_is_kept_for_its_digits_has_the_highest_precision(name):
    fun, rules = KEPT[name]
    low = jmp.autocast(fun, rules)
    highest = str((lax.Precision.HIGHEST,) * 2)
    assert precisions(low, X, W) == {highest}
    if name not in ("a cast to integers", "a lookup"):
        total = lambda x, w: jnp.sum(low(x, w))
        assert precisions(jax.grad(total, (0, 1)), X, W) == {highest}
    rows = jmp.explain(fun, rules)(X, W).rows
    kept = [row for row in rows if row.flops and row.code != "inside"]
    assert all(row.reason.endswith(", in the highest precision") for row in kept)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_lowered_program_asks_for_it(platform):
    for fun, rules in [KEPT["a cast to integers"], KEPT["full_precision"]]:
        traced = jax.jit(jmp.autocast(fun, rules)).trace(X, W)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "precision = [HIGHEST, HIGHEST]" in text


def test_a_precision_that_the_user_has_set_wins():
    def asked(x, w):
        with jmp.full_precision():
            return jnp.matmul(x, w, precision="default")

    assert precisions(jmp.autocast(asked), X, W) == {str((lax.Precision.DEFAULT,) * 2)}
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions(jmp.autocast(full), X, W) == {str((lax.Precision.HIGH,) * 2)}
        assert precisions(jmp.autocast(floored), X, W) == {
            str((lax.Precision.HIGH,) * 2)
        }


def test_low_products_and_programs_without_autocast_are_as_they_were():
    assert "HIGHEST" not in str(jax.make_jaxpr(jmp.autocast(jnp.matmul))(X, W))
    assert precisions(jmp.autocast(full, "O0"), X, W) == {"None"}


def test_a_scope_or_a_mark_wins_over_a_precision_in_the_program():
    def of_a_kernel(x, w):
        with jax.named_scope("kernel"):
            return lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision="highest")

    assert are_low(of_a_kernel, X, W) == {"float32"}
    rules = jmp.get_rules("mixed").scope("kernel", "low")
    assert are_low(of_a_kernel, X, W, rules=rules) == {"bfloat16"}

    def marked(x, w):
        with jmp.low_precision():
            return of_a_kernel(x, w)

    assert are_low(marked, X, W) == {"bfloat16"}


# ------------------------------------------------------------------ random numbers

DRAWS = {
    "normal": jax.random.normal,
    "uniform": functools.partial(jax.random.uniform, minval=-2.0, maxval=3.0),
    "exponential": jax.random.exponential,
    "gumbel": jax.random.gumbel,
    "laplace": jax.random.laplace,
    "logistic": jax.random.logistic,
    "cauchy": jax.random.cauchy,
    "rademacher": lambda key, shape: jax.random.rademacher(key, shape, "float32"),
    "truncated normal": lambda key, shape: jax.random.truncated_normal(
        key, -2, 2, shape
    ),
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 1e-3, shape).astype(
        "float32"
    ),
    "orthogonal": lambda key, shape: jax.random.orthogonal(key, 8),
    "of a raw key": lambda key, shape: jax.random.normal(
        jax.random.key_data(key), shape
    ),
    "in a loop": lambda key, shape: lax.scan(
        lambda key, _: (jax.random.split(key)[0], jax.random.normal(key, shape)),
        key,
        length=2,
    )[1],
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("rules", ["mixed", "O1", "O2", "O3", "force_fp16"])
def test_random_numbers_are_those_without_autocast(name, rules):
    draw = functools.partial(DRAWS[name], shape=(20_000,))
    low = jax.jit(jmp.autocast(draw, rules))(KEYS[0])
    np.testing.assert_array_equal(low, jax.jit(draw)(KEYS[0]))


def test_a_draw_is_cast_once():
    noisy = lambda key, x, w: (x @ w + 0.1 * jax.random.normal(key, (12, 16))) @ w
    eqns = live_equations(jmp.autocast(noisy), KEYS[0], X, W)
    casts = [e for e in eqns if e.primitive.name == "convert_element_type"]
    assert len(casts) <= 5  # x, w, the draw, and a cast of the result.
    assert are_low(noisy, KEYS[0], X, W) == {"bfloat16"}
    assert error(noisy, KEYS[0], X, W) < 0.02


def test_what_is_computed_with_a_draw_and_an_argument_follows_the_rules():
    sample = lambda key, mean, std: mean @ W + std * jax.random.normal(key, std.shape)
    rows = jmp.explain(sample, "O3")(KEYS[0], X, jnp.ones((12, 16))).rows
    assert [row.precision for row in rows if not row.scope][-2:] == ["bfloat16"] * 2


def test_a_function_of_random_numbers_and_of_others_follows_the_rules():
    scaled = jax.jit(lambda x: x * 3.0)
    first = lambda key, x: (scaled(jax.random.normal(key, (12, 16))), scaled(x @ W) @ W)
    last = lambda key, x: (scaled(x @ W) @ W, scaled(jax.random.normal(key, (12, 16))))
    for fun in (first, last):
        rows = jmp.explain(fun, "O3")(KEYS[0], X).rows
        found = [row.precision for row in rows if row.scope == "<lambda>"]
        assert found == ["bfloat16"] * 2


# -------------------------------------- derivative rules with optimize_remat


def layer(optimize):
    @jax.custom_vjp
    def run(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        y = jnp.tanh(x @ w)
        return y, (x, w, y)

    def backward(residuals, g):
        x, w, y = residuals
        g = g * (1 - y * y)
        return g @ w.T, x.T @ g

    run.defvjp(forward, backward, optimize_remat=optimize)
    return run


def two_layers(optimize, wrap=lambda fun: fun):
    run = layer(optimize)
    inside = wrap(lambda x, w: run(run(x, w), w))
    return lambda x, w: jnp.mean((inside(x, w) @ w) ** 2)


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.checkpoint, jax.jit])
def test_a_rule_with_optimize_remat_runs_as_one_without(wrap):
    (one, two) = (
        jax.grad(jmp.autocast(two_layers(optimize, wrap)), (0, 1))
        for optimize in (True, False)
    )
    dtypes = [
        sorted(str(e.invars[0].aval.dtype) for e in products(f, X, W))
        for f in (one, two)
    ]
    assert dtypes[0] == dtypes[1]
    assert set(dtypes[0]) == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, jax.jit(one)(X, W), jax.jit(two)(X, W))


def test_it_runs_under_vmap_and_in_a_scan_and_in_the_tools():
    loss = two_layers(True)
    rows = lambda fun: jax.vmap(jax.grad(fun), (0, None))(X[:, None], W)
    assert relative_error(rows(jmp.autocast(loss)), rows(loss)) < 0.05
    run = layer(True)
    scanned = lambda x, w: jnp.sum(
        lax.scan(lambda h, _: (run(h, w), None), x, length=3)[0] ** 2
    )
    low = jax.grad(jmp.autocast(scanned), (0, 1))(X, W)
    assert relative_error(low, jax.grad(scanned, (0, 1))(X, W)) < 0.05
    outside = jmp.autocast(jax.grad(loss, (0, 1)))(X, W)
    assert relative_error(outside, jax.grad(loss, (0, 1))(X, W)) < 0.05
    assert "dot_general" in str(jmp.compare(loss)(X, W))
    assert jmp.explain(loss, backward=True)(X, W).totals.products == {"bfloat16": 9}
    (watched, _) = jmp.watch(jax.grad(loss))(X, W)
    np.testing.assert_allclose(watched, jax.grad(loss)(X, W), rtol=1e-5)


# ----------------------------------------------------------- batches of small matrices


@pytest.mark.parametrize(
    ("shapes", "is_small"),
    [
        (((64, 3, 3), (64, 3, 3)), True),
        (((64, 7, 7), (64, 7, 7)), True),
        (((64, 3, 16), (64, 16, 3)), True),
        (((64, 8, 8), (64, 8, 8)), False),
        (((64, 3, 64), (64, 64, 64)), False),
        (((64, 3, 3), (64, 3, 1)), False),  # With a vector.
        (((3, 3), (3, 3)), False),  # No batch.
    ],
)
def test_batches_of_small_products_are_float32(shapes, is_small):
    a, b = (jnp.ones(shape) for shape in shapes)

    def chained(a, b):
        h = jnp.tanh(a @ b)
        return h.reshape(len(h), -1) @ jnp.full((h[0].size, 8), 0.5)

    rows = [r for r in jmp.explain(chained)(a, b).rows if r.op == "dot_general"]
    assert (rows[0].code == "small") == is_small
    assert rows[0].precision == ("float32" if is_small else "bfloat16")
    assert rows[1].precision == "bfloat16"
    for rules in (jmp.get_rules("mixed").low("dot_general"), "O3"):
        rows = [r for r in jmp.explain(chained, rules)(a, b).rows if r.flops]
        assert {row.precision for row in rows} == {"bfloat16"}
