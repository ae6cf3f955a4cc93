import dataclasses
import functools
import warnings

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp

SCALES = [jmp.NoOpLossScale(), jmp.StaticLossScale(128), jmp.DynamicLossScale()]
POWERS = st.integers(0, 30).map(lambda exponent: 2.0**exponent)


def leaves_of(scale):
    return {name: getattr(scale, name) for name in ("loss_scale", "counter")}


# -------------------------------------------------------------- how a scale changes


@dataclasses.dataclass
class Reference:
    """The dynamic loss scale in plain Python."""

    loss_scale: float
    period: int
    factor: float
    min_loss_scale: float
    max_loss_scale: float
    hysteresis: int
    finite_in_a_row: int = 0
    overflows_in_a_row: int = 0

    def adjust(self, finite):
        self.finite_in_a_row = self.finite_in_a_row + 1 if finite else 0
        self.overflows_in_a_row = 0 if finite else self.overflows_in_a_row + 1
        if self.finite_in_a_row == self.period:
            self.finite_in_a_row = 0
            self.loss_scale = min(self.loss_scale * self.factor, self.max_loss_scale)
        elif self.overflows_in_a_row >= self.hysteresis:
            self.loss_scale = max(self.loss_scale / self.factor, self.min_loss_scale)


@functools.cache
def jitted_adjust():
    return jax.jit(lambda scale, finite: scale.adjust(finite))


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    start=POWERS,
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 4, 8]),
    bounds=st.tuples(st.integers(0, 10), st.integers(11, 24)),
    hysteresis=st.integers(1, 3),
    steps=st.lists(st.booleans(), max_size=30),
)
def test_a_dynamic_scale_follows_the_plain_python_reference(
    start, period, factor, bounds, hysteresis, steps
):
    low, high = (2.0**exponent for exponent in bounds)
    numbers = dict(period=period, factor=factor, hysteresis=hysteresis)
    numbers |= dict(min_loss_scale=low, max_loss_scale=high)
    reference = Reference(start, **numbers)
    scale = jmp.DynamicLossScale(start, **numbers)
    for finite in steps:
        reference.adjust(finite)
        scale = jitted_adjust()(scale, finite)
        assert float(scale.loss_scale) == reference.loss_scale
        assert int(scale.counter) == reference.finite_in_a_row


def test_a_scale_grows_on_exactly_the_period_th_finite_step_in_a_row():
    scale = jmp.DynamicLossScale(8.0, period=3)
    seen = []
    for finite in [True, True, False, True, True, True, True]:
        scale = scale.adjust(finite)
        seen.append(float(scale.loss_scale))
    assert seen == [8, 8, 4, 4, 4, 8, 8]


def test_hysteresis_tolerates_overflows_and_a_finite_step_refills_it():
    scale = jmp.DynamicLossScale(64.0, hysteresis=2)
    seen = []
    for finite in [False, True, False, False, False, True, False]:
        scale = scale.adjust(finite)
        seen.append(float(scale.loss_scale))
    assert seen == [64, 64, 64, 32, 16, 16, 16]


def test_a_scale_never_reaches_zero_or_infinity():
    scale = jmp.DynamicLossScale(2.0, min_loss_scale=0.0, period=1, factor=2.0**40)
    for _ in range(8):
        scale = scale.adjust(False)
    assert float(scale.loss_scale) > 0
    for _ in range(8):
        scale = scale.adjust(True)
    assert float(scale.loss_scale) == 2.0**24
    scale = jmp.DynamicLossScale(2.0**126, max_loss_scale=2.0**126, period=1)
    assert float(scale.adjust(True).loss_scale) == 2.0**126


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_scan_and_a_jitted_loop_trace_once_and_keep_their_dtypes(hysteresis):
    traces = []

    @jax.jit
    def step(scale, x):
        traces.append(None)
        grads = scale.unscale(scale.scale(x.astype(jnp.float16)))
        return scale.adjust(jmp.all_finite(grads)), grads

    scale = jmp.DynamicLossScale(hysteresis=hysteresis)
    shapes = jax.eval_shape(lambda: scale)
    for i in range(100):
        scale, _ = step(scale, jnp.full(2, jnp.inf if i % 7 == 0 else 1.0))
    assert len(traces) == 1
    chex.assert_trees_all_equal_shapes_and_dtypes(scale, shapes)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(scale))

    scale, _ = jax.lax.scan(
        lambda scale, finite: (scale.adjust(finite), None),
        jmp.DynamicLossScale(hysteresis=hysteresis),
        jnp.arange(100) % 7 > 0,
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(scale, shapes)


def test_a_fresh_scale_may_be_donated_again_and_again():
    step = jax.jit(lambda scale: scale.adjust(True), donate_argnums=0)
    for _ in range(2):
        with warnings.catch_warnings():
            # Some backends cannot use a donated scalar, and warn.
            warnings.filterwarnings("ignore", message="Some donated buffers")
            assert int(step(step(jmp.DynamicLossScale())).counter) == 2


def test_a_scale_can_be_mapped_over_seeds():
    scales = jax.vmap(lambda s: jmp.DynamicLossScale(s))(jnp.array([2.0, 64.0]))
    scales = jax.vmap(lambda scale, ok: scale.adjust(ok))(scales, jnp.array([0, 1]) > 0)
    np.testing.assert_array_equal(scales.loss_scale, [1.0, 64.0])


# ------------------------------------------------------------------ a scale as value


@hypothesis.given(
    st.builds(
        jmp.DynamicLossScale,
        loss_scale=POWERS,
        counter=st.integers(0, 10),
        period=st.integers(1, 5000),
        factor=st.sampled_from([2, 3.0]),
        min_loss_scale=st.sampled_from([0.25, 1.0]),
        max_loss_scale=st.sampled_from([2.0**20, 2.0**24]),
        hysteresis=st.integers(1, 3),
    )
)
def test_flattening_loses_no_field(scale):
    leaves, treedef = jax.tree.flatten(scale)
    again = jax.tree.unflatten(treedef, leaves)
    assert again == scale
    assert dataclasses.asdict(again) == dataclasses.asdict(scale)
    assert len(leaves) == (2 if scale.hysteresis == 1 else 3)
    moved = jax.tree.map(lambda x: x, jitted_adjust()(scale, False))
    assert moved.min_loss_scale == scale.min_loss_scale
    assert moved.max_loss_scale == scale.max_loss_scale


@pytest.mark.parametrize(
    "leaf", [object(), None, jax.ShapeDtypeStruct((), jnp.float32), "spec"]
)
def test_tree_map_may_replace_the_fields_of_a_scale_by_any_object(leaf):
    scale = jax.tree.map(lambda _: leaf, jmp.DynamicLossScale())
    assert scale.loss_scale is leaf


def test_leaves_are_named_in_key_paths():
    paths, _ = jax.tree_util.tree_flatten_with_path(jmp.DynamicLossScale(hysteresis=2))
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    assert names == [".loss_scale", ".counter", ".overflows"]


@pytest.mark.parametrize(
    "start",
    [2.0**15, np.float16(2), jnp.float16(4), jnp.asarray(8.0), np.float64(16), 2.0],
)
def test_every_kind_of_number_becomes_a_strong_float32(start):
    scale = jmp.DynamicLossScale(start)
    assert scale.loss_scale.dtype == np.float32
    assert not getattr(scale.loss_scale, "weak_type", False)
    assert float(scale.loss_scale) == float(start)
    assert scale.counter.dtype == np.int32


def test_a_static_scale_is_part_of_the_structure():
    assert jax.tree.leaves(jmp.StaticLossScale(0)) == []
    assert jmp.StaticLossScale(8) == jmp.StaticLossScale(np.float16(8))
    assert jax.tree.structure(jmp.StaticLossScale(8)) != jax.tree.structure(
        jmp.StaticLossScale(4)
    )


def test_no_op_behaves_as_in_jmp_s_documentation():
    scale, tree = jmp.NoOpLossScale(), {"w": jnp.ones(1)}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.array(True)) is scale
    assert scale.loss_scale == 1


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
def test_every_scale_is_a_loss_scale_and_shows_what_it_is(scale):
    assert isinstance(scale, jmp.LossScale)
    assert repr(scale).startswith(type(scale).__name__)


def test_a_loss_scale_of_one_s_own_needs_all_three_methods():
    class Half(jmp.LossScale):
        def scale(self, tree):
            return tree

    with pytest.raises(TypeError, match=r"abstract.*adjust"):
        Half()


@pytest.mark.parametrize(
    ("numbers", "fragment"),
    [
        (dict(loss_scale=0.0), r"positive loss_scale up to 2\*\*126, got 0"),
        (dict(loss_scale=-2.0), "got -2"),
        (dict(loss_scale=np.inf), "got inf"),
        (dict(loss_scale=np.nan), "got nan"),
        (dict(loss_scale=np.ones(2)), r"scalar loss_scale, got the shape \(2,\)"),
        (
            dict(loss_scale=np.ones(2), counter=np.zeros(3)),
            r"a loss_scale of the counter's shape \(3,\), got the shape \(2,\)",
        ),
        (dict(loss_scale=np.float32([1, 0]), counter=np.zeros(2)), "got .1. 0."),
        (dict(period=0), "from 1 to .* for period.*got 0"),
        (dict(period=2.5), "from 1 to .* for period.*got 2.5"),
        (dict(factor=1), "factor above 1, got 1"),
        (dict(factor=0.5), "factor above 1, got 0.5"),
        (dict(hysteresis=0), "from 1 to .* for hysteresis.*got 0"),
        (dict(min_loss_scale=-1.0), "min_loss_scale=-1"),
        (dict(min_loss_scale=4.0, max_loss_scale=2.0), "max_loss_scale=2"),
        (dict(max_loss_scale=np.inf), "max_loss_scale=inf"),
        (dict(max_loss_scale=1e300), "max_loss_scale=1e.300"),
        (dict(max_loss_scale=2.0**127), r"<= 2\*\*126, got.*max_loss_scale=1.7"),
        (dict(loss_scale=2.0**127), r"up to 2\*\*126, got 1.7"),
        (dict(loss_scale=jnp.float32(0)), "positive loss_scale.*got 0"),
        (dict(loss_scale=jnp.float32(np.nan)), "positive loss_scale.*got nan"),
        (dict(period=np.inf), r"2\*\*31 - 1 for period, got inf"),
        (dict(period=2**40), r"2\*\*31 - 1 for period, got 1099511627776"),
        (dict(factor=np.inf), "finite factor above 1, got inf"),
        (dict(backoff_factor=1), "backoff_factor between 0 and 1.*got 1"),
        (dict(backoff_factor=0), "backoff_factor between 0 and 1.*got 0"),
        (dict(backoff_factor=2.0), "backoff_factor between 0 and 1.*got 2"),
        (dict(backoff_factor=np.nan), "backoff_factor between 0 and 1.*got nan"),
        (dict(counter=-5), "from 0 to .* for counter.*got -5"),
        (dict(counter=1.7), "from 0 to .* for counter.*got 1.7"),
    ],
)
def test_numbers_out_of_range_are_an_error_that_names_the_field(numbers, fragment):
    with pytest.raises(ValueError, match=fragment):
        jmp.DynamicLossScale(**numbers)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("init_scale", "loss_scale"),
        ("init_loss_scale", "loss_scale"),
        ("growth_factor", "factor"),
        ("scale_factor", "factor"),
        ("growth_interval", "period"),
        ("scale_window", "period"),
        ("backoff_interval", "hysteresis"),
        ("minimum_scale", "min_loss_scale"),
        ("back_off_factor", "backoff_factor"),
        ("peroid", "period"),
    ],
)
def test_a_name_of_another_library_is_an_error_that_names_ours(name, meant):
    with pytest.raises(TypeError, match=rf"'{name}': did you mean {meant}\? Its"):
        jmp.DynamicLossScale(**{name: 2.0})


def test_an_unknown_name_is_an_error_that_lists_the_arguments():
    with pytest.raises(TypeError, match=r"no argument 'xyz'\. Its arguments are"):
        jmp.DynamicLossScale(xyz=1)


def test_backing_off_may_be_slower_than_growing():
    scale = jmp.DynamicLossScale(64.0, period=1, factor=4, backoff_factor=0.75)
    assert float(scale.adjust(True).loss_scale) == 256
    assert float(scale.adjust(False).loss_scale) == 48
    again = jax.tree.unflatten(*reversed(jax.tree.flatten(scale)))
    assert again == scale
    assert again.backoff_factor == 0.75
    assert dataclasses.replace(scale, loss_scale=8.0).backoff_factor == 0.75
    lowest = jmp.DynamicLossScale(1.0, backoff_factor=0.5).adjust(False)
    assert float(lowest.loss_scale) == 1.0
    default = jmp.DynamicLossScale(64.0, factor=4).adjust(False)
    assert float(default.loss_scale) == 16
    with pytest.raises(TypeError, match="number for backoff_factor"):
        jmp.DynamicLossScale(backoff_factor="slow")


def test_a_field_that_is_no_number_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="number for period"):
        jmp.DynamicLossScale(period="often")
    for bad in ("big", None, {}, 1j):
        with pytest.raises(TypeError, match="number for loss_scale, got"):
            jmp.DynamicLossScale(bad)
    with pytest.raises(TypeError, match="number for counter, got None"):
        jmp.DynamicLossScale(counter=None)
    with pytest.raises(TypeError, match=r"number for loss_scale.*DynamicLossScale"):
        jax.jit(lambda s: jmp.StaticLossScale(s).scale(1.0))(2.0)
    with pytest.raises(ValueError, match=r"positive loss_scale.*got nan"):
        jmp.StaticLossScale(np.nan)
    with pytest.raises(ValueError, match=r"up to 2\*\*126, got 1.7"):
        jmp.StaticLossScale(2.0**127)


def test_a_static_scale_of_zero_is_an_error_where_it_is_used():
    with pytest.raises(ValueError, match="makes every gradient zero"):
        jmp.StaticLossScale(0).scale(jnp.ones(1))


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
@pytest.mark.parametrize("value", [1, np.int32(1), np.array(1, np.int64)])
def test_an_integer_scale_warns_at_the_caller_s_line(name, value):
    with pytest.warns(UserWarning, match=f"Expected floating type for {name}") as seen:
        jmp.DynamicLossScale(**{name: value})
    assert seen[0].filename == __file__


# --------------------------------------------------------------- scaling, unscaling


@pytest.mark.parametrize("scale", SCALES[1:], ids=lambda scale: type(scale).__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2", "float32"])
def test_scaling_and_unscaling_happen_in_float32(scale, dtype):
    tree = {"x": jnp.array([3.0, -0.5], dtype)}
    scaled = scale.scale(tree)
    assert scaled["x"].dtype == np.float32
    expected = np.array([3.0, -0.5], np.float32) * np.float32(scale.loss_scale)
    np.testing.assert_array_equal(scaled["x"], expected)
    unscaled = scale.unscale(scaled)
    assert unscaled["x"].dtype == np.float32
    np.testing.assert_array_equal(unscaled["x"], [3.0, -0.5])


def test_a_float16_loss_stays_finite_under_the_default_scale():
    scaled = jmp.DynamicLossScale().scale(jnp.float16(3.0))
    assert float(scaled) == 3.0 * 2**15


def test_a_float16_gradient_below_its_subnormals_is_recovered():
    true_gradient = 1e-8
    scale = jmp.DynamicLossScale()
    in_float16 = jnp.float16(true_gradient * 2**15)
    assert jnp.float16(true_gradient) == 0
    np.testing.assert_allclose(scale.unscale(in_float16), true_gradient, rtol=1e-3)


def test_wide_and_complex_numbers_keep_their_width():
    scale = jmp.StaticLossScale(4)
    z = jnp.array([1 + 2j, jnp.inf + 0j], jnp.complex64)
    scaled = scale.scale(z)
    assert scaled.dtype == np.complex64
    np.testing.assert_array_equal(scaled, np.array([4 + 8j, np.inf + 0j]))
    np.testing.assert_array_equal(scale.unscale(scaled), z)
    with jax.enable_x64(True):
        assert scale.scale(jnp.ones(1, jnp.float64)).dtype == np.float64
        assert scale.unscale(jnp.ones(1, jnp.complex128)).dtype == np.complex128


def test_leaves_that_are_no_real_numbers_pass_through_a_scale():
    tree = {
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "text": "name",
        "none": None,
        "python": 3,
        "shape": jax.ShapeDtypeStruct((), jnp.float32),
    }
    for scale in SCALES:
        for out in (scale.scale(tree), scale.unscale(tree)):
            assert all(out[name] is tree[name] for name in tree)


def test_a_python_float_is_scaled():
    assert float(jmp.StaticLossScale(4).scale(2.5)) == 10.0


@hypothesis.given(
    st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100),
    st.integers(0, 24),
)
def test_a_power_of_two_scales_exactly(x, exponent):
    scale = jmp.StaticLossScale(2.0**exponent)
    again = float(scale.unscale(scale.scale(jnp.float32(x))))
    # The CPU backend flushes subnormals to zero, with a scale or without.
    assert again == x or abs(x) < jnp.finfo(jnp.float32).tiny


# ------------------------------------------------------------------- finite, select


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_one_bad_number_anywhere_is_found(bad, dtype):
    good = {"a": jnp.ones((2, 2), dtype), "b": [jnp.zeros(3)]}
    assert jmp.all_finite(good)
    worse = {**good, "a": good["a"].at[1, 1].set(bad)}
    assert not jmp.all_finite(worse)
    assert not jax.jit(jmp.all_finite)(worse)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        (),
        jnp.arange(3),
        jax.random.key(0),
        {"n": None, "s": "inf", "f": np.zeros(1, jax.dtypes.float0)},
        jnp.zeros((0, 3)),
        jax.ShapeDtypeStruct((1,), jnp.float32),
    ],
)
def test_a_tree_without_real_numbers_is_finite(tree):
    finite = jmp.all_finite(tree)
    assert finite.dtype == np.bool_
    assert finite.shape == ()
    assert finite


def test_python_numbers_are_checked_too():
    assert not jmp.all_finite({"loss": float("nan")})
    assert jmp.all_finite([1, 2.0, True])


def test_all_finite_agrees_over_a_mapped_axis():
    x = jnp.array([[1.0], [jnp.inf], [2.0]])
    alone = jax.vmap(jmp.all_finite)(x)
    together = jax.vmap(lambda x: jmp.all_finite(x, "i"), axis_name="i")(x)
    np.testing.assert_array_equal(alone, [True, False, True])
    np.testing.assert_array_equal(together, [False, False, False])


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_selects_arrays_keys_and_numbers(pred):
    a = {"x": jnp.ones(2), "k": jax.random.key(1), "n": 1, "s": "same", "o": None}
    b = {"x": jnp.zeros(2), "k": jax.random.key(2), "n": 2, "s": "same", "o": None}
    out = jmp.select_tree(jnp.array(pred), a, b)
    chosen = a if pred else b
    np.testing.assert_array_equal(out["x"], chosen["x"])
    assert out["x"].dtype == np.float32
    assert jnp.all(jax.random.key_data(out["k"]) == jax.random.key_data(chosen["k"]))
    assert int(out["n"]) == chosen["n"]
    assert out["s"] == "same"


@pytest.mark.parametrize(
    ("a", "b", "fragment"),
    [
        (jnp.ones(1), jnp.ones(1, jnp.bfloat16), r"float32\[1\] and bfloat16\[1\]"),
        (jnp.ones(1), jnp.ones(2), r"float32\[1\] and float32\[2\]"),
        ("one", "two", "'one' and 'two'"),
        (jnp.ones(1), "two", "'two'"),
    ],
)
def test_select_tree_names_the_place_where_leaves_differ(a, b, fragment):
    with pytest.raises(TypeError, match=rf"{fragment} at \['w'\]"):
        jmp.select_tree(True, {"w": a}, {"w": b})


@pytest.mark.parametrize("pred", [jnp.ones([1]), jnp.ones([]), jnp.array([True]), None])
def test_a_predicate_that_is_no_boolean_scalar_is_an_assertion_error(pred):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jmp.select_tree(pred, None, None)
    for scale in SCALES:
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            scale.adjust(pred)


@pytest.mark.parametrize(
    ("dtype", "scale_type"),
    [
        ("float16", jmp.DynamicLossScale),
        ("float8_e4m3fn", jmp.DynamicLossScale),
        ("bfloat16", jmp.NoOpLossScale),
        (jnp.float32, jmp.NoOpLossScale),
        ("float64", jmp.NoOpLossScale),
    ],
)
def test_the_default_scale_follows_from_the_dtype_s_range(dtype, scale_type):
    assert type(jmp.default_loss_scale(dtype)) is scale_type
    with pytest.raises(ValueError, match="Did you mean 'float16'"):
        jmp.default_loss_scale("flaot16")
