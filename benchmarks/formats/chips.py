"""Which number format gains how much on which chip.

The gradient of two residual MLP blocks and a head, for 8,192 tokens, compiled for each
chip with each format, beside 16 bits. For GPUs it is the least time of the kernels, for
TPUs the cycles that the compiler estimates. An H100 stands here twice: with XLA's
default flags, and with the products of cuBLAS.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.compiled import Program, compile_for, is_gpu
from benchmarks.formats.recipes import mlp

CHIPS = ("h100", "h100 cublas", "b200", "v5e", "v6e", "tpu7x")
WIDTHS = (2048, 4096)
TOKENS = 8192
MIXED = jmp.get_rules("mixed")
FORMATS = {
    "mixed": MIXED,
    **{
        name: MIXED.product(jmp.get_format(name, smallest=0))
        for name in ("float8", "float8_rows", "int8")
    },
}


class Kind(NamedTuple):
    """A device by its name, as JAX gives it.

    Attributes:
      device_kind: its name.
      platform: what kind of device it is.
    """

    device_kind: str
    platform: str = "tpu"


KINDS = {
    "h100": Kind("NVIDIA H100", "gpu"),
    "v5e": Kind("TPU v5 lite"),
    "v6e": Kind("TPU v6 lite"),
    "tpu7x": Kind("TPU7x"),
}


class OnChip(NamedTuple):
    """A gradient on a chip.

    Attributes:
      chip: what it is compiled for.
      width: of the blocks.
      number_format: the format of the products of the blocks.
      cost: milliseconds that a GPU takes at least; for a TPU, millions of cycles that
        its compiler estimates.
      moved: gigabytes that it moves.
      peak: gigabytes that it holds at most.
    """

    chip: str
    width: int
    number_format: str
    cost: float
    moved: float
    peak: float


def compile_gradient(
    chip: str, width: int, name: str, tokens: int = TOKENS, blocks: int = 2
) -> Program:
    """Compiles the gradient of some blocks and a head with one format."""
    shapes = (width, 4 * width), (4 * width, width)
    block = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    head = jax.ShapeDtypeStruct((width, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    # Compiled for another device than the one that is here, so the device is named.
    formats = jmp.Float8(smallest=0).on(KINDS.get(chip, KINDS["h100"]))
    rules = MIXED.product(formats) if name == "float8" else FORMATS[name]
    loss = jmp.autocast(mlp(jnp.dot), rules)
    return compile_for(chip, jax.grad(loss, (0, 1)), [block] * blocks, head, x)


def measure(chip: str, width: int, name: str, tokens: int = TOKENS) -> OnChip:
    """Returns what the gradient costs with one format."""
    program = compile_gradient(chip, width, name, tokens)
    return OnChip(
        chip=chip,
        width=width,
        number_format=name,
        cost=program.roofline_seconds * 1e3 if is_gpu(chip) else program.cycles / 1e6,
        moved=program.bytes_moved / 1e9,
        peak=program.peak_memory / 1e9,
    )


def table(rows: Sequence[OnChip]) -> str:
    """Returns the cost of each format on each chip, relative to 16 bits, as text."""
    found = {(row.chip, row.width, row.number_format): row for row in rows}
    names = [name for name in FORMATS if name != "mixed"]
    head = "".join(f"{name:>13}" for name in names)
    lines = [f"{'chip':12}{'width':>6}{'16 bits':>18}{head}"]
    for chip, width in dict.fromkeys((row.chip, row.width) for row in rows):
        base = found[chip, width, "mixed"]
        unit = "ms" if is_gpu(chip) else "M cycles"
        ratios = "".join(
            f"{found[chip, width, name].cost / base.cost:>13.2f}" for name in names
        )
        lines.append(f"{chip:12}{width:>6}{base.cost:>9.1f} {unit:8}{ratios}")
    return "\n".join(lines)
