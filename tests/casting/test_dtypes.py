import types

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from jmp_lite.casting.dtypes import (
    dtype_name,
    dtype_to_names,
    explain_half_dtype,
    nearest_name,
    needs_loss_scale,
    parse_dtype,
    upcast_tree,
)

FLOATS = [np.dtype(dtype) for dtype in dtype_to_names]


# ----------------------------------------------------------------- names and dtypes


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("bf16", jnp.bfloat16),
        ("bfloat16", jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (np.dtype("bfloat16"), jnp.bfloat16),
        ("f16", np.float16),
        ("full", np.float32),
        (np.float32, np.float32),
        (np.dtype(">f4"), np.float32),
        (float, np.float64),
        ("f64", np.float64),
        ("float8_e5m2", jnp.float8_e5m2),
    ],
)
def test_every_spelling_of_a_dtype_gives_the_same_dtype_object(spelling, dtype):
    parsed = parse_dtype(spelling)
    assert isinstance(parsed, np.dtype)
    assert parsed == np.dtype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_name_of_every_dtype_reads_back(dtype):
    assert parse_dtype(dtype_name(dtype)) == dtype


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        ("bfloat", "Unknown dtype 'bfloat'.*Did you mean 'bfloat16'"),
        ("qqq", r"Unknown dtype 'qqq'\. Expected one of bf16, bfloat16"),
        ("int32", "Unknown dtype 'int32'"),
        (np.int32, "Expected a floating-point dtype.*int32"),
        (np.complex64, "Expected a floating-point dtype.*complex64"),
        (None, "Expected a floating-point dtype.*None"),
        (object(), "Expected a floating-point dtype.*object"),
        ({"w": np.ones(1)}, "Expected a floating-point dtype.*'w'"),
        (np.ones(1, np.float32), "Expected a floating-point dtype.*array"),
        (np.longdouble, "Expected a floating-point dtype.*longdouble"),
    ],
)
def test_a_dtype_that_is_not_floating_is_an_error_that_names_it(bad, fragment):
    with pytest.raises(ValueError, match=fragment):
        parse_dtype(bad)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (dict(platform="cpu"), jnp.bfloat16, "cpu"),
        (dict(platform="tpu"), jnp.bfloat16, "tpu"),
        (dict(platform="gpu", compute_capability="9.0"), jnp.bfloat16, "9.0"),
        (dict(platform="gpu", compute_capability="8.0"), jnp.bfloat16, "8.0"),
        (dict(platform="gpu", compute_capability="10.0"), jnp.bfloat16, "10.0"),
        (dict(platform="gpu", compute_capability="7.5"), jnp.float16, "below"),
        (dict(platform="gpu", compute_capability="gfx90a"), jnp.bfloat16, "gfx90a"),
        (dict(platform="gpu"), jnp.bfloat16, "GPU"),
    ],
)
def test_the_half_dtype_is_what_the_device_computes_in(device, dtype, reason):
    found, why = explain_half_dtype(types.SimpleNamespace(**device))
    assert found == dtype
    assert reason in why


@pytest.mark.parametrize("default", [None, "cpu", lambda: jax.devices()[1]])
def test_half_dtype_is_that_of_the_default_device(default):
    device = default() if callable(default) else default
    with jax.default_device(device):
        assert jmp.half_dtype() == jnp.bfloat16


def test_half_dtype_makes_scalars_as_jmp_code_expects():
    assert jmp.half_dtype()(2**15).dtype == jmp.half_dtype()


def test_only_formats_with_fewer_exponents_than_float32_need_a_loss_scale():
    need = {str(dtype) for dtype in FLOATS if needs_loss_scale(dtype)}
    assert "float16" in need
    assert "float8_e5m2" in need
    assert need.isdisjoint({"bfloat16", "float32", "float64"})


# -------------------------------------------------------------------------- casting


def everything():
    return {
        "f32": jnp.ones(3),
        "bf16": jnp.ones(3, jnp.bfloat16),
        "numpy": np.ones((2, 2), np.float32),
        "numpy_scalar": np.float32(1.5),
        "shape": jax.ShapeDtypeStruct((4,), jnp.float32),
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "old_key": jax.random.PRNGKey(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "python": 1.5,
        "text": "name",
        "none": None,
        "object": print,
        "empty": {},
    }


def test_cast_tree_changes_floating_arrays_and_nothing_else():
    tree = everything()
    cast = jmp.cast_tree(tree, "float16")
    chex.assert_trees_all_equal_structs(tree, cast)
    for name in ("f32", "bf16", "numpy", "numpy_scalar", "shape"):
        assert cast[name].dtype == np.float16, name
        assert cast[name].shape == tree[name].shape
    assert isinstance(cast["numpy"], np.ndarray)
    assert isinstance(cast["shape"], jax.ShapeDtypeStruct)
    for name in set(tree) - {"f32", "bf16", "numpy", "numpy_scalar", "shape"}:
        assert cast[name] is tree[name] or name == "empty", name


def test_cast_tree_casts_the_floats_that_where_selects_and_calls_it_for_no_others():
    asked = []

    def where(path, leaf):
        asked.append(leaf.dtype)
        return "norm" not in jax.tree_util.keystr(path)

    tree = {"dense": jnp.ones(2), "norm": {"scale": jnp.ones(2)}, "step": jnp.array(1)}
    cast = jmp.cast_tree(tree, jnp.bfloat16, where=where)
    assert cast["dense"].dtype == jnp.bfloat16
    assert cast["norm"]["scale"] is tree["norm"]["scale"]
    assert asked == [np.float32, np.float32]


@pytest.mark.parametrize("tree", [None, (), {}, [], {"a": None}, 3, "text"])
def test_trees_without_floats_come_back_as_they_are(tree):
    assert jmp.cast_tree(tree, "bf16") == tree
    assert jmp.cast_to_half(tree) == tree


def test_a_shape_keeps_its_sharding_when_it_is_cast():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding, weak_type=True)
    cast = jmp.cast_tree(shape, "bf16")
    assert (cast.dtype, cast.sharding, cast.weak_type) == (
        jnp.bfloat16,
        sharding,
        False,
    )


def test_a_weakly_typed_float32_becomes_strong():
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert not jmp.cast_to_full(weak).weak_type


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.eval_shape])
def test_casts_work_on_tracers(transform):
    x = jnp.ones((2, 3))
    if transform is jax.eval_shape:
        out = jax.eval_shape(jmp.cast_to_half, x)
    else:
        out = transform(jmp.cast_to_half)(x)
    assert (out.dtype, out.shape) == (jmp.half_dtype(), (2, 3))


def test_the_cotangent_of_a_cast_has_the_argument_s_dtype():
    grads = jax.grad(lambda x: jmp.cast_tree(x, "bf16").astype("float32").sum())(
        jnp.ones(2)
    )
    assert grads.dtype == np.float32


@hypothesis.given(
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.recursive(
        st.sampled_from(["float16", "bfloat16", "float32", "int32"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)
def test_casting_twice_is_casting_once(dtype, dtypes):
    tree = jax.tree.map(lambda name: np.ones(2, jnp.dtype(name)), dtypes)
    once = jmp.cast_tree(tree, dtype)
    chex.assert_trees_all_equal_shapes_and_dtypes(once, jmp.cast_tree(once, dtype))
    chex.assert_trees_all_equal(once, jmp.cast_tree(once, dtype))
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(once), strict=True):
        floating = jnp.issubdtype(before.dtype, jnp.floating)
        assert after.dtype == (jnp.dtype(dtype) if floating else before.dtype)


def test_upcast_tree_raises_narrow_floats_and_leaves_wide_ones():
    tree = {
        "f8": jnp.ones(1, jnp.float8_e5m2),
        "bf16": jnp.ones(1, jnp.bfloat16),
        "f64": np.ones(1, np.float64),
        "int8": jnp.ones(1, jnp.int8),
    }
    dtypes = {name: str(leaf.dtype) for name, leaf in upcast_tree(tree).items()}
    assert dtypes == {
        "f8": "float32",
        "bf16": "float32",
        "f64": "float64",
        "int8": "int8",
    }


# ------------------------------------------------------------------------- summaries


def test_dtype_summary_counts_arrays_of_every_kind():
    summary = jmp.dtype_summary(everything())
    sizes = [3, 4, 1, 4]  # Of f32, numpy, numpy_scalar and shape.
    assert summary["float32"] == (len(sizes), sum(sizes), 4 * sum(sizes))
    assert summary["bfloat16"].bytes == 6
    assert summary["key<fry>"].leaves == 1
    assert summary.total.leaves == sum(row.leaves for row in summary.values())


def test_dtype_summary_puts_the_most_bytes_first_and_prints_a_table():
    tree = {"a": jnp.ones(1000), "b": jnp.ones(1000, jnp.bfloat16)}
    lines = str(jmp.dtype_summary(tree)).splitlines()
    assert [line.split()[0] for line in lines] == [
        "dtype",
        "float32",
        "bfloat16",
        "total",
    ]
    assert lines[-1].split() == ["total", "2", "2,000", "6,000"]


def test_dtype_summary_of_nothing_is_empty():
    assert jmp.dtype_summary({"a": None}) == {}
    assert jmp.dtype_summary(()).total == (0, 0, 0)


def test_a_name_that_begins_as_the_typo_is_nearest():
    assert nearest_name("float8", ("float16", "float8_e4m3fn")) == "float8_e4m3fn"
    assert (
        nearest_name("conv", ("cos", "conv_general_dilated")) == "conv_general_dilated"
    )
    assert nearest_name("tahn", ("tan", "tanh")) == "tanh"
