"""Programs compiled for an H100 with the flags that users have, on each version of JAX.

CI runs these with the oldest and with the newest JAX. Bounds hold on both.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from weight_products import MANY_FORMS, gradient_and_shapes

import jmp_lite as jmp
from benchmarks import models, moments
from benchmarks.compiled import compile_for, missing
from benchmarks.formats import chips, transformers

pytestmark = [
    pytest.mark.targets,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.skipif(missing("h100") is not None, reason=str(missing("h100"))),
]
FLAGS = pytest.mark.parametrize("target", ["h100", "h100 cublas"])


def in_float8(products):
    """Returns the sum of counts of products in float8, by their dtypes."""
    return sum(n for name, n in products.items() if name.startswith(("f8", "float8")))


# ----------------------------------------------------------------------------- float8


@FLAGS
@pytest.mark.parametrize("name", MANY_FORMS)
def test_what_explain_shows_as_float8_is_float8(name, target):
    """XLA's products of Triton drop roundings to float8, but not float8 operands."""
    gradient, shapes = gradient_and_shapes(name, rows=4096, width=2048)
    program = compile_for(target, gradient, *shapes)
    totals = jmp.explain(gradient, "O0")(*shapes).totals
    assert in_float8(program.matmul_flops) == in_float8(totals.flops) > 0
    # In the loop there are two layers.
    n_trips = 2 if name == "scan" else 1
    assert in_float8(program.matmuls) == n_trips * in_float8(totals.products)


@FLAGS
def test_float8_takes_three_quarters_of_16_bits_at_most(target):
    cost = {
        name: chips.compile_gradient(target, 4096, name).roofline_seconds
        for name in ("mixed", "float8")
    }
    assert cost["float8"] < 0.75 * cost["mixed"]


@FLAGS
@pytest.mark.parametrize("layout", ["scan", "scan + remat"])
def test_float8_in_a_stack_of_blocks_moves_and_holds_little_more(layout, target):
    """Queries, keys and values are one product, where XLA merges them."""
    size = {"layout": layout, "depth": 8, "target": target}
    program, mixed = (
        transformers.compile_model(rules, **size) for rules in ("float8", "mixed")
    )
    # Four matrices of width x width, two of width x 4 width; three products each, and
    # with jax.checkpoint all but one of the forward pass again.
    width, tokens = 2048, transformers.TOKENS
    n_products = 3 * 12 + (0 if layout == "scan" else 8)
    flops = n_products * 2 * tokens * width**2 * size["depth"]
    assert in_float8(program.matmul_flops) == flops
    assert program.roofline_seconds < 0.86 * mixed.roofline_seconds
    assert program.bytes_moved < 1.05 * mixed.bytes_moved
    largest = 0.95 if layout == "scan" else 1.08
    assert program.peak_memory < largest * mixed.peak_memory


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_a_kernel_need_not_compute_a_gelu_and_keep_the_product(target):
    """XLA moves a gelu into the kernel of a product, and both are needed."""

    def loss(weights, x):
        def layer(x, weights):
            up, down = weights
            return x + jax.nn.gelu(x @ up) @ down, None

        x, _ = lax.scan(layer, x, weights)
        return jnp.mean((x @ weights[0][0]) ** 2)

    stack = jax.ShapeDtypeStruct((2, 2048, 2048), jnp.float32)
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    gradient = jax.grad(jmp.autocast(loss, "float8"))
    program = compile_for(target, gradient, (stack, stack), x)
    assert in_float8(program.matmuls) == 12


# ------------------------------------------------------------------ products in 16 bits


@pytest.mark.parametrize("layout", ["unrolled", "scan", "scan + remat"])
def test_there_are_no_more_products_than_in_code_by_hand(layout):
    """XLA of jax 0.11 computes a product twice that a loop also stacks."""
    if (0, 11) <= jax.__version_info__ < (0, 12):
        pytest.skip("docs/troubleshooting.md names the flag of XLA for jax 0.11")
    size = {"width": 256, "heads": 4, "vocabulary": 512, "batch": (4, 256), "depth": 3}

    def products(dtype, wrap):
        model = models.transformer(dtype, layout=layout, **size)
        gradient = jax.grad(wrap(model.loss))
        return compile_for("h100", gradient, model.params, model.batch)

    low = products(None, jmp.autocast)
    by_hand = products(jnp.bfloat16, lambda loss: loss)
    assert sum(low.matmuls.values()) == sum(by_hand.matmuls.values())
    assert low.bytes_moved <= 1.02 * by_hand.bytes_moved


# ------------------------------------------------------------------------------ moments


@pytest.mark.parametrize("shapes", moments.THIRTY)
@pytest.mark.parametrize(
    ("dtype", "arrays", "kernels", "times"),
    [("bfloat16", 5.0, 40, 4), ("float8_e4m3fn", 5.6, 130, 7)],
)
def test_moments_in_few_bits_compile_like_an_optimizer(
    dtype, arrays, kernels, times, shapes
):
    program, plain = (moments.compile_thirty(state, shapes) for state in (dtype, None))
    size = sum(4 * rows * columns for rows, columns in moments.THIRTY[shapes])
    assert program.bytes_moved / size <= arrays + 0.01
    assert program.kernels <= kernels
    # XLA's time grows with the text; threefry in each kernel made it 17 times as long.
    assert len(program.text) < times * len(plain.text)
