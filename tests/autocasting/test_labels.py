"""The pass ``labels``: gathers of labels whose derivative is a selection."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled, live_equations, mostly_slow, relative_error
from jax import export, lax
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.autocasting.api import autocast
from jmp_lite.autocasting.rules.presets import get_rules

WITHOUT = get_rules("mixed").without_pass("labels")
# Integers, so that no sum depends on its order.
X = jax.random.randint(jax.random.key(0), (4, 5, 7), -2, 3).astype("float32")
W = jax.random.randint(jax.random.key(1), (7, 7), -1, 2).astype("float32")
LABELS = jax.random.randint(jax.random.key(2), (4, 5), 0, 7)
BEYOND = jnp.array([[-9, -8, -7, -1, 0], [6, 7, 8, 70, 3], [0] * 5, [6] * 5])
"""Labels of which some are out of range."""


def at(x, labels, **mode):
    """Returns the element of each row at its label."""
    return jnp.take_along_axis(x, labels[..., None], -1, **mode)[..., 0]


def scatters(fun, *args):
    """Counts the scatters in a gradient."""
    grad = jax.grad(lambda *a: jnp.sum(fun(*a) ** 2), (0, 1))
    return sum("scatter" in e.primitive.name for e in live_equations(grad, *args))


def assert_same(fun, *args):
    """Asserts that the pass changes no bit of results and derivatives."""

    def everything(rules):
        low = autocast(fun, rules)
        loss = lambda x, w: jnp.sum(low(x, w, *args[2:]) ** 2)
        slope = lambda x, w: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))
        return (
            low(*args),
            jax.grad(loss, (0, 1))(*args[:2]),
            jax.jvp(loss, args[:2], args[:2]),
            jax.grad(slope, (0, 1))(*args[:2]),
        )

    # Else XLA for CPUs leaves out some roundings.
    exact = {"xla_allow_excess_precision": False}
    run = jax.jit(everything, static_argnums=0, compiler_options=exact)
    (*new, second), (*old, other) = run(get_rules("mixed")), run(WITHOUT)
    jax.tree.map(np.testing.assert_array_equal, new, old)
    # The terms of a second derivative may be added in 16 bits, in any order.
    assert relative_error(second, other) < 0.01


ROWS, COLUMNS = jnp.arange(4)[:, None], np.arange(5)
FOUND = {
    "take_along_axis": lambda x, w, labels: at(x @ w, labels),
    "its mode clip": lambda x, w, _: at(x @ w, BEYOND, mode="clip"),
    "its mode fill": lambda x, w, _: at(x @ w, BEYOND, mode="fill", fill_value=2.0),
    "out of range": lambda x, w, _: jnp.nan_to_num(at(x @ w, BEYOND)),
    "promised": lambda x, w, labels: at(x @ w, labels, mode="promise_in_bounds"),
    "the first axis": lambda x, w, labels: jnp.take_along_axis(
        (x @ w).T, labels.T[None], 0
    ),
    "the axis between": lambda x, w, labels: jnp.take_along_axis(
        x @ w, labels[:, None, :1] % 5 + jnp.zeros((4, 1, 7), int), 1
    ),
    "mapped": lambda x, w, labels: jax.vmap(jax.vmap(lambda q, a: q[a]))(x @ w, labels),
    "indexed": lambda q, w, labels: (q @ w)[ROWS, COLUMNS, labels],
    "the label first": lambda q, w, labels: (q @ w).swapaxes(1, 2)[
        jnp.arange(4)[:, None], labels, jnp.arange(5)
    ],
    "the last of a sequence": lambda x, w, labels: (x @ w)[
        jnp.arange(4), labels[:, 0] % 5
    ],
    "jitted": jax.jit(lambda x, w, labels: at(jnp.square(x @ w), labels)),
    "recomputed": jax.checkpoint(lambda x, w, labels: at(x @ w, labels)),
    "optax": lambda x, w, labels: optax.softmax_cross_entropy_with_integer_labels(
        jnp.tile(x @ w, 2), labels
    ),
    "in chunks": lambda x, w, labels: lax.map(
        lambda chunk: at(jnp.square(chunk[0] @ w), chunk[1]), (x, labels)
    ),
    "a low stream": lambda x, w, labels: at(jnp.abs(x @ w), labels) @ jnp.ones((5, 5)),
}
# The last gather of optax's takes the one element of each row: nothing is spared.
SMALL = {"optax": 1}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        FOUND,
        [
            *("its mode fill", "the axis between", "indexed", "the label first"),
            *("recomputed", "optax", "in chunks", "a low stream"),
        ],
    ),
)
def test_a_loss_with_labels_has_no_scatter_in_its_derivative_and_the_same_bits(name):
    fun, args = FOUND[name], (X, W, LABELS)
    assert scatters(autocast(fun), *args) == SMALL.get(name, 0)
    assert scatters(autocast(fun, WITHOUT), *args) == 1 + SMALL.get(name, 0)
    assert_same(fun, *args)
    assert jmp.explain(fun)(*args).passes["labels"] == 1


NOT_FOUND = {
    "rows of a table": lambda x, w, labels: (x[0, 0] * w)[labels],
    "a take": lambda x, w, labels: jnp.take(x[0] @ w, labels % 5, 0),
    "one row": lambda x, w, labels: jnp.take((x[0] @ w) ** 2, labels[0, 0] % 5, 0),
    "several of each row": lambda x, w, labels: jnp.take_along_axis(
        x @ w, jnp.stack([labels] * 2, -1), -1
    ),
    "rows in another order": lambda x, w, labels: (x[0] @ w)[
        jnp.arange(5)[::-1], labels[0]
    ],
    "rows from the second": lambda x, w, labels: (x[0] @ w)[
        jnp.arange(1, 5), labels[0, 1:]
    ],
    "some of the rows": lambda x, w, labels: (x[0] @ w)[jnp.arange(3), labels[0, :3]],
    "a row in place of another": lambda x, w, labels: (x[0] @ w)[
        lax.select(labels[0] > 3, 0 * labels[0], jnp.arange(5)), labels[0]
    ],
    "a row twice": lambda x, w, labels: (x[0] @ w)[
        np.array([0, 1, 2, 3, 3]), labels[0]
    ],
    "labels beside rows": lambda x, w, labels: (x @ w)[
        jnp.arange(4), labels[:, 0] % 5, labels[:, 1]
    ],
    "labels of one row": lambda x, w, labels: jax.vmap(
        lambda label: (x[0, 0] @ w)[label]
    )(labels[0]),
    "one row for all labels": lambda x, w, labels: (x[0] @ w)[jnp.arange(1), labels[0]],
    "a count that wraps": lambda x, w, labels: jnp.tile(x[0] @ w, (60, 1))[
        jnp.arange(300).astype("uint8"), jnp.tile(labels[0], 60)
    ],
    "a constant that wraps": lambda x, w, labels: jnp.tile(x[0] @ w, (60, 1))[
        np.arange(300).astype("uint8"), jnp.tile(labels[0], 60)
    ],
    "a count that is rounded": lambda x, w, labels: jnp.tile(x[0] @ w, (60, 1))[
        jnp.arange(300.0).astype("bfloat16").astype(int), jnp.tile(labels[0], 60)
    ],
    "a window": lambda x, w, labels: jax.vmap(
        lambda q, a: lax.dynamic_slice(q, (a,), (2,))
    )(x[0] @ w, labels[0]),
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        NOT_FOUND,
        [
            *("rows of a table", "several of each row", "rows in another order"),
            *("a row in place of another", "a row twice", "one row for all labels"),
            *("a constant that wraps", "a window"),
        ],
    ),
)
def test_a_gather_that_may_read_an_element_twice_is_left_alone(name):
    fun, args = NOT_FOUND[name], (X, W, LABELS)
    assert scatters(autocast(fun), *args) == scatters(autocast(fun, WITHOUT), *args) > 0
    assert "labels" not in jmp.explain(fun)(*args).passes
    assert_same(fun, *args)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    axis=st.integers(0, 3),
    mode=st.sampled_from(["fill", "clip", "promise_in_bounds"]),
    dtype=st.sampled_from(["int8", "uint8", "int16", "int32", "uint32"]),
    seed=st.integers(0, 99),
)
def test_any_axis_mode_and_dtype_of_labels_has_the_derivative_of_a_gather(
    shape, axis, mode, dtype, seed
):
    axis %= len(shape)
    low, high = (0, shape[axis]) if mode == "promise_in_bounds" else (-6, 6)
    numbers = np.random.default_rng(seed).integers(low, high, shape)
    labels = np.take(numbers, [0], axis).astype(dtype)
    x = jax.random.normal(jax.random.key(seed), shape)

    def fun(x):
        return jnp.take_along_axis(jnp.sin(x), labels, axis, mode=mode)

    results = [
        jax.vjp(autocast(fun, rules), x) for rules in (get_rules("mixed"), WITHOUT)
    ]
    (new, pull), (old, pull_old) = results
    np.testing.assert_array_equal(new, old)
    (grad,), (expected,) = pull(jnp.cos(old)), pull_old(jnp.cos(old))
    np.testing.assert_array_equal(jnp.nan_to_num(grad), jnp.nan_to_num(expected))


def test_narrow_labels_index_more_rows_than_they_can_count():
    x = jax.random.normal(jax.random.key(0), (3, 300))
    labels = jnp.array([0, 200, 255], jnp.uint8)
    dimensions = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    for mode in ("clip", "fill"):
        # jnp.take_along_axis casts its indices, lax.gather does not.
        fun = lambda x, w, labels, mode=mode: lax.gather(
            x @ w, labels[:, None], dimensions, (1, 1), mode=mode
        )
        assert scatters(autocast(fun), x, jnp.eye(300), labels) == 0
        assert_same(fun, x, jnp.eye(300), labels)


def test_without_a_derivative_the_program_has_the_same_ops():
    fun = FOUND["jitted"]
    new, old = (
        jax.jit(autocast(fun, rules)).lower(X, W, LABELS).as_text()
        for rules in (get_rules("mixed"), WITHOUT)
    )
    ops_of = lambda text: re.findall(r"stablehlo\.\w+", text)
    assert "stablehlo.gather" in new
    assert sorted(ops_of(new)) == sorted(ops_of(old))


def test_a_loop_over_chunks_keeps_labels_and_no_masks():
    fun = autocast(FOUND["in chunks"])
    grad = jax.grad(lambda x, w: jnp.sum(fun(x, w, LABELS)), (0, 1))
    scans = [e for e in live_equations(grad, X, W) if e.primitive.name == "scan"]
    kept = [v.aval for scan in scans for v in scan.outvars]
    assert scans
    assert not [aval for aval in kept if aval.dtype == bool and aval.size >= X.size]


def test_mapping_over_labels_of_shared_rows_adds_up():
    plain = lambda x, labels: at(jnp.sin(x), labels)
    many = jnp.stack([LABELS, LABELS, 6 - LABELS])

    def gradient(fun):
        return jax.grad(lambda x: jnp.sum(jax.vmap(fun, (None, 0))(x, many) ** 2))(X)

    np.testing.assert_allclose(gradient(autocast(plain)), gradient(plain), rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (2, 1)], ids=str)
def test_derivatives_can_be_mapped_over_any_axes(axes):
    stacks = [X[..., None] * jnp.arange(1.0, 4), jnp.stack([LABELS] * 3, -1)]
    args = [
        (X if i == 0 else LABELS) if axis is None else jnp.moveaxis(stack, -1, axis)
        for i, (stack, axis) in enumerate(zip(stacks, axes, strict=True))
    ]

    def mapped(rules):
        fun = autocast(lambda x, y: at(jnp.sin(x), y), rules)
        grad = jax.grad(lambda x, y: jnp.sum(fun(x, y) ** 2))
        return jax.jit(jax.vmap(grad, axes))(*args)

    np.testing.assert_array_equal(mapped(get_rules("mixed")), mapped(WITHOUT))


def test_zero_rows_and_integer_rows_pass():
    fun = autocast(lambda x, w: at(x @ w, LABELS[:0]))
    grads = jax.grad(lambda x, w: jnp.sum(fun(x, w)), (0, 1))(X[:0], W)
    assert [grad.shape for grad in grads] == [(0, 5, 7), (7, 7)]
    ids = autocast(lambda x: at(jnp.round(x @ W).astype(int), LABELS))
    assert ids(X).dtype == jnp.int32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_rows_may_be_sharded(kind, spec):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x, labels = jnp.ones((4, 6, 7)) * W[0], LABELS[:, :4].repeat(2, 1)[:, :6]
        x, labels = (
            jax.device_put(a, jax.NamedSharding(mesh, spec)) for a in (x, labels)
        )

        def gradient(rules):
            fun = autocast(lambda x: at(jnp.sin(x), labels), rules)
            return jax.jit(jax.grad(lambda x: jnp.sum(fun(x) ** 2)))(x)

        grads = gradient(get_rules("mixed")), gradient(WITHOUT)
    np.testing.assert_array_equal(*grads)
    assert grads[0].sharding.is_equivalent_to(x.sharding, 3)


def test_each_device_of_a_shard_map_has_its_rows():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def loss(x, w, labels):
        return lax.pmean(-jnp.mean(at(jax.nn.log_softmax(x @ w), labels)), "data")

    specs = (P("data"), P(), P("data"))
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    assert scatters(autocast(mapped), X, W, LABELS) == 0
    assert_same(mapped, X, W, LABELS)


def test_an_index_out_of_range_is_still_an_error_for_checkify():
    fun = autocast(lambda x, w: at(x @ w, BEYOND))
    checked = checkify.checkify(fun, errors=checkify.index_checks)
    error, _ = checked(X, W)
    assert "out-of-bounds" in error.get()
    good = checkify.checkify(
        autocast(lambda x, w: at(x @ w, LABELS)), errors=checkify.index_checks
    )
    assert good(X, W)[0].get() is None


def test_a_batch_of_any_size_is_exported_with_its_gradient():
    n, vocabulary = export.symbolic_shape("n, v")

    @autocast
    def loss(x, labels):
        rows = jax.nn.log_softmax(x + jnp.vdot(W, W))
        return jnp.mean(jnp.take_along_axis(rows, labels[:, None], -1))

    args = (
        jax.ShapeDtypeStruct((n, vocabulary), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    exported = export.export(jax.jit(jax.grad(loss)))(*args)
    assert "scatter" not in exported.mlir_module()
    clipped = autocast(
        lambda x, labels: jnp.sum(
            jax.vmap(lambda r, i: r[i])(x + jnp.vdot(W, W), labels)
        )
    )
    again = export.export(jax.jit(jax.grad(clipped)))(*args)
    np.testing.assert_array_equal(
        again.call(X[0], LABELS[0] + 3), jax.grad(clipped)(X[0], LABELS[0] + 3)
    )
    x, labels = X[0], LABELS[0]
    np.testing.assert_allclose(
        exported.call(x, labels), jax.grad(loss)(x, labels), rtol=1e-6
    )


def test_functions_that_run_as_written_keep_their_gathers():
    kept = {
        "an inner autocast": autocast(FOUND["take_along_axis"], "O0"),
        "a kernel": jmp.low_call(FOUND["take_along_axis"]),
    }
    for fun in kept.values():
        assert scatters(autocast(fun), X, W, LABELS) == 1
    inner = autocast(FOUND["take_along_axis"])
    assert scatters(autocast(inner), X, W, LABELS) == 0


def test_a_block_that_is_called_twice_is_lowered_once():
    @jax.jit
    def block(h, labels):
        return jnp.tanh(h @ W), at(h @ W, labels)

    def model(x, labels):
        h, picked = block(x @ W, labels)
        h, more = block(h, labels)
        return picked + more + block(h, labels)[1]

    texts = [
        jax.jit(autocast(model, rules)).lower(X, LABELS).as_text()
        for rules in (get_rules("mixed"), WITHOUT)
    ]
    new, old = (text.count("func.func private @block") for text in texts)
    assert new == old < 3


def test_gradients_of_16_bit_tables_are_those_of_a_scatter():
    x, w = X.astype("bfloat16"), W.astype("bfloat16")
    fun = lambda x, w: at(x @ w, LABELS) + at(x, LABELS)

    def gradients(rules):
        low = autocast(fun, rules)
        return compiled(jax.grad(lambda *a: jnp.sum(low(*a) ** 2), (0, 1)), x, w)

    both = gradients(get_rules("mixed")), gradients(WITHOUT)
    jax.tree.map(np.testing.assert_array_equal, *both)


@functools.cache
def explained(rules):
    return jmp.explain(FOUND["optax"], rules)(X, W, LABELS)


def test_the_pass_changes_no_decision():
    new, old = explained(get_rules("mixed")), explained(WITHOUT)
    assert (new.passes["labels"], "labels" in old.passes) == (1, False)
    assert new.diff(old).changed == ()
    assert new.totals == old.totals


def test_a_count_along_the_axis_of_index_vectors_is_no_row():
    dimensions = lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def fun(x, labels):
        zeros = lax.broadcasted_iota(jnp.int32, (1, 1), 1)
        indices = lax.concatenate([zeros, labels[:, None]], 1)
        return lax.gather(jnp.sin(x), indices, dimensions, (1, 1))

    x, labels = X[0, :1], jnp.array([3])
    np.testing.assert_array_equal(autocast(fun)(x, labels), fun(x, labels))
