"""Arrays that are stored in 8 bits or fewer, which a program casts to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, relative_error
from jax import lax

import jmp_lite as jmp
from jmp_lite.autocasting.decide.special_ops import is_exact_in

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (8, 16))
NORMAL = jax.random.normal(KEYS[1], (16, 16))
DTYPES = ["bool", "int8", "uint8", "int4", "float8_e4m3fn", "float8_e5m2"]
FLOATS = [name for name in DTYPES if "float" in name]


def stored(dtype):
    if dtype == "bool":
        return NORMAL > 0
    return (NORMAL * (1 if "float" in dtype else 3)).astype(dtype)


def casts(fun, *args):
    """Returns from which dtype to which each cast of a program is, and its clamps."""
    found = []
    for eqn in equations(jax.make_jaxpr(fun)(*args)):
        if eqn.primitive.name == "convert_element_type":
            found.append(
                (str(eqn.invars[0].aval.dtype), str(eqn.outvars[0].aval.dtype))
            )
        elif eqn.primitive.name == "clamp":
            found.append("clamp")
    return found


def product(x, w):
    return jnp.tanh(x) @ w.astype("float32")


def in_a_jit(x, w):
    return jax.jit(product)(x, w)


def cast_in_a_jit(x, w):
    return jnp.tanh(x) @ jax.jit(lambda w: w.astype("float32"))(w)


def moved(x, w):
    return jnp.tanh(x) @ w.astype("float32").T[::-1].reshape(4, 4, 16).reshape(16, 16)


def broadcast(x, w):
    many = jnp.broadcast_to(w.astype("float32"), (3, 16, 16))
    return jnp.einsum("bi,nij->nbj", jnp.tanh(x), many)


def gathered(x, w):
    return jnp.tanh(x) @ jnp.take(
        w.astype("float32"), jnp.arange(16)[::-1], 0, mode="clip"
    )


def layers(x, w):
    stack = jnp.stack([w] * 3)
    step = lambda h, w: (jnp.tanh(h @ w.astype("float32") / 16), None)
    return lax.scan(step, x, stack)[0]


def constant_in_a_loop(x, w):
    step = lambda h, _: (jnp.tanh(h @ w.astype("float32") / 16), None)
    return lax.scan(step, x, length=3)[0]


PROGRAMS = [product, in_a_jit, cast_in_a_jit, moved, broadcast, gathered, layers]
PROGRAMS += [constant_in_a_loop]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fun", PROGRAMS)
def test_a_product_reads_its_source_with_one_cast(fun, dtype):
    w = stored(dtype)
    for compute_dtype in ("bfloat16", "float16"):
        low = jmp.autocast(fun, compute_dtype=compute_dtype)
        found = casts(low, X, w)
        assert (dtype, compute_dtype) in found
        assert (dtype, "float32") not in found
        assert "clamp" not in found
        assert relative_error(low(X, w), fun(X, w)) < 0.02
    total = lambda fun: lambda x: jnp.sum(fun(x, w))
    low, full = (jax.grad(total(f))(X) for f in (jmp.autocast(fun), fun))
    assert relative_error(low, full) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float32_op_reads_it_in_float32(dtype):
    both = lambda x, w: product(x, w) + jnp.exp(-(w.astype("float32") ** 2))[:8]
    assert relative_error(
        jmp.autocast(both)(X, stored(dtype)), both(X, stored(dtype))
    ) < (0.02)
    returned = lambda w: w.astype("float32")
    w = stored(dtype)
    np.testing.assert_array_equal(jmp.autocast(returned)(w), w.astype("float32"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gradient_has_the_dtype_of_the_array_and_adds_up_before_it_is_rounded(dtype):
    w = stored(dtype)

    def uses(x, w):
        w = w.astype("float32")
        return jnp.sum(x @ w) + jnp.sum(jnp.tanh(x @ w)) + jnp.sum(w**2)

    low, full = (jax.grad(f, 1)(X, w) for f in (jmp.autocast(uses), uses))
    assert low.dtype == w.dtype
    exact = jax.grad(uses, 1)(X, w.astype("float32"))
    errors = [relative_error(g.astype("float32"), exact) for g in (low, full)]
    assert errors[0] < 1.2 * errors[1]


def test_integers_of_16_bits_and_more_are_float32_as_before():
    fun = lambda x, w: jnp.tanh(x) @ w.astype("float32")
    for dtype in ("int16", "int32"):
        assert (dtype, "float32") in casts(jmp.autocast(fun), X, stored(dtype))


def test_numbers_that_the_compute_dtype_lacks_are_cast_to_float32_first():
    assert is_exact_in(np.dtype(jnp.float8_e5m2), np.dtype("float16"))
    e8m0 = getattr(jnp, "float8_e8m0fnu", None)
    if e8m0 is not None:
        assert not is_exact_in(np.dtype(e8m0), np.dtype("float16"))
    for name in ("int8", "uint8", "int4", "float8_e4m3fn", "float8_e4m3b11fnuz"):
        for low in ("bfloat16", "float16"):
            assert is_exact_in(jnp.dtype(name), jnp.dtype(low))


def test_a_full_scope_casts_to_float32():
    def fun(x, w):
        with jmp.full_precision():
            return jnp.tanh(x) @ w.astype("float32")

    assert ("int8", "float32") in casts(jmp.autocast(fun), X, stored("int8"))


def test_explain_names_the_cast():
    explanation = jmp.explain(product)(X, stored("int8"))
    (row,) = (r for r in explanation.rows if r.op == "convert_element_type")
    assert row.bytes_run == 256
    assert explanation.dtype_of(op="dot_general") == "bfloat16"


def test_a_mask_costs_one_cast_in_arithmetic_too():
    fun = lambda x, mask: ((x @ NORMAL) * mask.astype("float32")) @ NORMAL
    mask = jnp.ones((8, 16), bool)
    assert ("bool", "bfloat16") in casts(jmp.autocast(fun), X, mask)
