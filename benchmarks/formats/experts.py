"""What the experts of a mixture cost: a batch in each format, and groups in 16 bits.

The gradient of a residual MLP of 8 experts, compiled for each chip.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jmp_lite as jmp
from benchmarks.compiled import compile_for, is_gpu
from benchmarks.formats.chips import FORMATS

CHIPS = ("h100", "tpu7x", "v5e")
EXPERTS = 8
SIZES = ((1024, 2048), (4096, 4096))
"""How many rows each expert has, and its width."""

GROUPS = "groups, mixed"
VARIANTS = (*FORMATS, GROUPS)

Product = Callable[[Any, Any], Any]


class Mixture(NamedTuple):
    """The gradient of experts.

    Attributes:
      chip: what it is compiled for.
      rows: how many rows each expert has, in the mean.
      width: of the experts.
      variant: one of ``VARIANTS``: the format of a batch, or ``GROUPS``.
      cost: milliseconds that a GPU takes at least; for a TPU, millions of cycles that
        its compiler estimates, without those of its kernels for groups.
      kernels: how many kernels for groups are not counted.
    """

    chip: str
    rows: int
    width: int
    variant: str
    cost: float
    kernels: int


def _loss(product: Product) -> Callable[[Any, Any], Any]:
    def loss(weights: Any, x: Any) -> Any:
        up, down = weights
        return jnp.mean((x + product(jax.nn.gelu(product(x, up)), down)) ** 2)

    return loss


def _batched(x: Any, w: Any) -> Any:
    return jnp.einsum("ebk,ekn->ebn", x, w)


def measure_mixture(
    chip: str, rows: int, width: int, variant: str, experts: int = EXPERTS
) -> Mixture:
    """Compiles the gradient of experts."""
    shapes = (experts, width, 4 * width), (experts, 4 * width, width)
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    of_rows = (experts * rows,) if variant == GROUPS else (experts, rows)
    arrays = (weights, jax.ShapeDtypeStruct((*of_rows, width), jnp.float32))
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)

    def loss(weights: Any, x: Any, sizes: Any) -> Any:
        if variant == GROUPS:
            product = lambda x, w: lax.ragged_dot(x, w, sizes)
            return jmp.autocast(_loss(product))(weights, x)
        return jmp.autocast(_loss(_batched), _in_scope(variant))(weights, x)

    program = compile_for(chip, jax.grad(loss, (0, 1)), *arrays, sizes)
    cost = program.roofline_seconds * 1e3 if is_gpu(chip) else program.cycles / 1e6
    kernels = program.opaque.get("tpu_custom_call", 0)
    return Mixture(chip, rows, width, variant, cost, kernels)


def _in_scope(name: str) -> jmp.Rules:
    """Returns rules for all products, also for those that float32 ops alone read."""
    rules = FORMATS[name]
    if name == "mixed":
        return rules
    return rules.scope("", rules.precision_of("dot_general"))


def mixtures_table(rows: Sequence[Mixture]) -> str:
    """Returns what experts cost, relative to a batch in 16 bits, as text."""
    found = {row[:4]: row for row in rows}
    sizes = [*dict.fromkeys(row[:3] for row in rows)]
    head = "".join(f"{chip:>8}" for chip, _, _ in sizes)
    widths = "".join(f"{width:>8}" for _, _, width in sizes)
    lines = [f"{'8 experts':20}{head}", f"{'width':20}{widths}"]
    for variant in dict.fromkeys(row.variant for row in rows):
        cells = ""
        for size in sizes:
            row = found[*size, variant]
            ratio = row.cost / found[*size, "mixed"].cost
            cells += f"{ratio:>7.2f}{'*' if row.kernels else ' '}"
        name = variant if variant == GROUPS else f"batch, {variant}"
        lines.append(f"{name:20}{cells}".rstrip())
    return "\n".join(lines)
