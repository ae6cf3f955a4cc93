"""What MLP blocks cost under one recipe or another for products in 8 bits.

Beside float8 there are block-scaled products (mxfp8), and weights that are quantized
before a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.compiled import compile_for
from benchmarks.formats.transformers import TOKENS, float8_products
from jmp_lite.formats.float8 import Scaled, quantize_operand
from jmp_lite.jaxprs.bilinear import bilinear
from jmp_lite.jaxprs.products import Dimensions

STACK = "24 in a scan, remat"
E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")


class Recipe(NamedTuple):
    """The gradient of MLP blocks of width 2,048 under one recipe.

    Attributes:
      recipe: "mixed", "float8", "mxfp8" or "float8, weights first".
      target: what it is compiled for.
      gigabytes: what is moved.
      milliseconds: the least time.
      peak: what is held at most, in gigabytes.
      kernels: how many run.
      products: how many products run in float8.
    """

    recipe: str
    target: str
    gigabytes: float
    milliseconds: float
    peak: float
    kernels: int
    products: int


def mlp(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Returns the loss of residual MLP blocks with one kind of product."""

    def loss(blocks: Any, head: Any, x: Any) -> Any:
        for up, down in blocks:
            x = x + product(jax.nn.gelu(product(x, up)), down)
        return jnp.mean((x @ head.astype(x.dtype)).astype(jnp.float32) ** 2)

    return loss


def stack(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Returns the loss of residual MLP blocks in a loop, which keeps only its carry."""

    @jax.checkpoint
    def block(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + product(jax.nn.gelu(product(x, up)), down), None

    def loss(blocks: Any, head: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(block, x, blocks)
        return jnp.mean((x @ head.astype(x.dtype)).astype(jnp.float32) ** 2)

    return loss


def stack_quantized_first(blocks: Any, head: Any, x: Any) -> Any:
    """Returns the loss of ``stack`` with weights quantized before the loop."""
    quantize = jax.vmap(lambda w: quantize_operand(w, E4M3))
    operands = jax.tree.map(lambda w: quantize(w.astype(jnp.bfloat16)), blocks)

    def product(x: Any, weight: Any) -> Any:
        lhs = quantize_operand(x, E4M3)
        axes = Dimensions(((1,), (0,)), ((), ()))
        return bilinear(lhs, weight, Scaled(E4M3, E4M3, E5M2), axes)

    return stack(product)(operands, head, x.astype(jnp.bfloat16))


def _in_blocks(x: Any, w: Any) -> Any:
    """Returns a product whose operands have a scale for each 32 numbers."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    return jax.nn.scaled_dot_general(
        x.astype(jnp.bfloat16),
        w.astype(jnp.bfloat16),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
        configs=[config] * 3,
    )


RECIPES = {
    "mixed": jmp.autocast(mlp(jnp.dot)),
    "float8": jmp.autocast(mlp(jnp.dot), "float8"),
    "mxfp8": mlp(_in_blocks),
}
STACKED = {
    "mixed": jmp.autocast(stack(jnp.dot)),
    "float8": jmp.autocast(stack(jnp.dot), "float8"),
    "float8, weights first": stack_quantized_first,
}


def measure_recipe(recipe: str, target: str, width: int = 2048) -> Recipe:
    """Compiles two MLP blocks that are written out."""
    weights = [_mlp_block(width)] * 2
    return _measured(recipe, RECIPES[recipe], target, weights, width)


def measure_stacked(recipe: str, width: int = 2048, depth: int = 24) -> Recipe:
    """Compiles MLP blocks in a scan for an H100."""
    weights = _mlp_block(width, (depth,))
    return _measured(recipe, STACKED[recipe], "h100", weights, width)


def _mlp_block(width: int, depth: tuple[int, ...] = ()) -> Any:
    shapes = (width, 4 * width), (4 * width, width)
    return tuple(jax.ShapeDtypeStruct((*depth, *s), jnp.float32) for s in shapes)


def _measured(
    recipe: str, loss: Callable[..., Any], target: str, weights: Any, width: int
) -> Recipe:
    head = jax.ShapeDtypeStruct((width, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((TOKENS, width), jnp.float32)
    program = compile_for(target, jax.grad(loss, (0, 1)), weights, head, x)
    return Recipe(
        recipe,
        target,
        program.bytes_moved / 1e9,
        1e3 * program.roofline_seconds,
        program.peak_memory / 1e9,
        program.kernels,
        float8_products(program),
    )


def recipes_table(rows: Sequence[Recipe], blocks: str = "two MLP blocks") -> str:
    """Returns what recipes cost as text."""
    lines = [
        f"{blocks:25}{'target':>7}{'GB moved':>10}{'ms':>8}{'GB held':>9}{'kernels':>9}"
        f"{'float8':>8}"
    ]
    lines += [
        f"{row.recipe:25}{row.target:>7}{row.gigabytes:>10.2f}{row.milliseconds:>8.2f}"
        f"{row.peak:>9.2f}{row.kernels:>9}{row.products:>8}"
        for row in rows
    ]
    return "\n".join(lines)
