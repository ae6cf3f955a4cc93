"""What a large channel costs in each format.

One channel of the input is larger than the others, and its row of the weight smaller by
as much, as in trained transformers: without rounding, the result stays the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks.formats.chips import FORMATS

FACTORS = (1, 10, 30, 100, 1000)


class Outlier(NamedTuple):
    """The error of the gradient of an MLP in one format.

    Attributes:
      number_format: the format of its products.
      factor: how many times larger one channel is.
      error: relative to float32's gradient, by norms.
    """

    number_format: str
    factor: int
    error: float


def measure_outliers(number_format: str, width: int = 512) -> list[Outlier]:
    """Measures an MLP of two products under one of ``FORMATS``."""
    rng = np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(rng.normal(size=shape) / divisor, jnp.float32)
        for shape, divisor in (
            ((256, width), 1),
            ((width, width), width**0.5),
            ((width, width), width**0.5),
        )
    )

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        up, down = weights
        hidden = jnp.tanh(jax.nn.gelu(x @ up) @ down)
        return jnp.mean((hidden @ down) ** 2)  # This product stays in 16 bits.

    def errors(factor: int) -> float:
        args = [up.at[0].divide(factor), down], x.at[:, 0].multiply(factor)
        exact, rounded = (
            jax.grad(jmp.autocast(loss, rules), 1)(*args)
            for rules in (jmp.get_rules("O0"), FORMATS[number_format])
        )
        difference = optax.tree.norm(rounded - exact)
        return float(difference / optax.tree.norm(exact))

    return [Outlier(number_format, factor, errors(factor)) for factor in FACTORS]


def outliers_table(rows: Sequence[Outlier]) -> str:
    """Returns errors as text."""
    heads = "".join(f"{f'x {factor:,}':>10}" for factor in FACTORS)
    lines = [f"{'one channel':14}{heads}"]
    for name in dict.fromkeys(row.number_format for row in rows):
        own = "".join(f"{r.error:>10.4f}" for r in rows if r.number_format == name)
        lines.append(f"{name:14}{own}")
    return "\n".join(lines)
