"""What eight H100s send each other under number formats."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from benchmarks import collectives
from benchmarks.compiled import Program, compile_for
from benchmarks.formats.chips import FORMATS

SCAN = "FSDP, scan"
CONSTRAINED = "FSDP, scan, constrained"
CASES = (
    *((layout, name) for layout in collectives.LAYOUTS for name in ("mixed", "float8")),
    *((collectives.LAYOUTS[-1], name) for name in ("float8_rows", "int8")),
    *((layout, name) for layout in (SCAN, CONSTRAINED) for name in FORMATS),
)


class Sent(NamedTuple):
    """A step of MLP blocks of width 2,048 on eight H100s.

    Attributes:
      layout: how the work is split. ``SCAN`` and ``CONSTRAINED`` are the gradient of
        six blocks in a loop, with ``jax.checkpoint``; the others are a train step of
        two blocks that are written out.
      rules: the format.
      milliseconds: the least time of what a device computes.
      peak: gigabytes that a device holds at most.
      megabytes: what goes through collectives, by dtype.
    """

    layout: str
    rules: str
    milliseconds: float
    peak: float
    megabytes: dict[str, float]


def compile_scan(
    rules: jmp.Rules | str,
    is_constrained: bool,
    width: int = 2048,
    depth: int = 6,
    rows: int = 32768,
) -> Program:
    """Compiles the gradient of blocks in a loop, whose weights are split by rows.

    Args:
      rules: those of the loss.
      is_constrained: whether the function says that its activations are split by rows.
      width: of the blocks.
      depth: how many there are.
      rows: of the batch, on all devices together.
    """
    mesh = collectives.mesh_of("h100")
    by_rows = NamedSharding(mesh, P("data"))
    of_weights = NamedSharding(mesh, P(None, "data"))

    @jax.checkpoint
    def block(x: Any, weights: Any) -> tuple[Any, None]:
        if is_constrained:
            x = jax.lax.with_sharding_constraint(x, by_rows)
        up, down = weights
        return x + jax.nn.gelu(x @ up) @ down, None

    def loss(weights: Any, head: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(block, x, weights)
        return jnp.mean((x @ head) ** 2)

    def array(*shape: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    weights = (
        array(depth, width, 4 * width, sharding=of_weights),
        array(depth, 4 * width, width, sharding=of_weights),
    )
    x = array(rows, width, sharding=by_rows)
    gradient = jax.grad(jmp.autocast(loss, rules))
    head = array(width, 256, sharding=NamedSharding(mesh, P()))
    return compile_for("h100", gradient, weights, head, x, out_shardings=of_weights)


def measure_sent(layout: str, rules: str) -> Sent:
    """Compiles a step for eight H100s."""
    if layout in (SCAN, CONSTRAINED):
        program = compile_scan(FORMATS[rules], layout == CONSTRAINED)
    else:
        size = {"width": 2048, "depth": 2, "rows": 4096}
        program = collectives.compile_step("h100", layout, FORMATS[rules], **size)
    sent = {dtype: n / 1e6 for dtype, n in program.collectives.items() if n > 1e6}
    peak = program.peak_memory / 1e9
    return Sent(layout, rules, 1e3 * program.roofline_seconds, peak, sent)


def sent_table(rows: Sequence[Sent]) -> str:
    """Returns what devices send each other as text."""
    lines = [f"{'eight H100s':25}{'rules':>12}{'ms':>6}{'MB':>6}  of them"]
    for row in rows:
        parts = ", ".join(f"{n:.0f} {dtype}" for dtype, n in row.megabytes.items())
        lines.append(
            f"{row.layout:25}{row.rules:>12}{row.milliseconds:>6.2f}"
            f"{sum(row.megabytes.values()):>6.0f}  {parts}"
        )
    return "\n".join(lines)
