"""What XLA makes of Flax's modules for float8, beside jmp_lite's presets.

The gradient of two residual MLP blocks of Flax (width 4,096, 8,192 rows), compiled for
an H100 with XLA's default flags.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

import jmp_lite as jmp
from benchmarks.compiled import compile_for
from benchmarks.formats.transformers import float8_products


class Compiled(NamedTuple):
    """A gradient as compiled.

    Attributes:
      variant: how its products are made.
      products: how many matrix products it has.
      in_float8: how many of them XLA makes in float8.
      milliseconds: the least time.
      gigabytes: what is moved.
    """

    variant: str
    products: int
    in_float8: int
    milliseconds: float
    gigabytes: float


class Blocks(nn.Module):
    """Two residual MLP blocks.

    Attributes:
      width: of the blocks.
      options: of all dense layers.
    """

    width: int
    options: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the result of the blocks for rows of this width."""
        options = self.options or {}
        for _ in range(2):
            wide = nn.Dense(4 * self.width, use_bias=False, **options)(x)
            x = x + nn.Dense(self.width, use_bias=False, **options)(nn.gelu(wide))
        return x


_LOW = {"dtype": jnp.bfloat16}
_ALL = jmp.get_rules("mixed").scope("Dense", "float8")
VARIANTS = {
    "Flax, bfloat16": (_LOW, None),
    "Flax, Fp8DotGeneralOp": ({**_LOW, "dot_general_cls": nn.Fp8DotGeneralOp}, None),
    "Flax, Fp8DirectDotGeneralOp": (
        {**_LOW, "dot_general_cls": nn.Fp8DirectDotGeneralOp},
        None,
    ),
    'jmp_lite, "float8"': ({}, "float8"),
    "jmp_lite, float8 for all": ({}, _ALL),
}
"""The options of dense layers, and jmp_lite's rules."""


def measure(variant: str, width: int = 4096, rows: int = 8192) -> Compiled:
    """Compiles the gradient of one of ``VARIANTS``."""
    options, rules = VARIANTS[variant]
    net = Blocks(width, options)
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(net.apply(variables, x).astype(jnp.float32) ** 2)

    fun = jmp.autocast(loss, rules) if rules else loss
    program = compile_for("h100", jax.grad(fun), variables, x)
    return Compiled(
        variant,
        sum(program.matmuls.values()),
        float8_products(program),
        1e3 * program.roofline_seconds,
        program.bytes_moved / 1e9,
    )


def compiled_table(rows: Sequence[Compiled]) -> str:
    """Returns counts of products, and costs, as text."""
    lines = [f"{'h100':30}{'products':>9}{'float8':>8}{'ms':>7}{'GB moved':>10}"]
    lines += [
        f"{row.variant:30}{row.products:>9}{row.in_float8:>8}{row.milliseconds:>7.2f}"
        f"{row.gigabytes:>10.2f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    print(compiled_table([measure(variant) for variant in VARIANTS]))
