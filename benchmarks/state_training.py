"""Whether optimizers train as well if their state takes 16 or 8 bits.

It trains a linear layer with each optimizer, behind each of the transformations that
often stand before one, with the state in float32 and in each dtype of
``low_precision_state``. The table has the last loss, divided by that of float32 state.

    .venv/bin/python -m benchmarks.state_training --json benchmarks/results
"""

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import contrib

import jmp_lite as jmp
from benchmarks.report import stamp, write

STEPS = 500
SHAPE = (64, 128)
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")

BEFORE: Mapping[str, Callable[[], Any]] = {
    "nothing": optax.identity,
    "clip": lambda: optax.clip_by_global_norm(1.0),
    "L2 penalty": lambda: optax.add_decayed_weights(1e-3),
    "noise": lambda: optax.add_noise(1e-4, 0.55, key=jax.random.key(1)),
    "centralize": optax.centralize,
}
"""Transformations that run before the optimizer."""

OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": lambda rate: optax.lion(lambda step: 0.1 * rate(step)),
    "rmsprop": lambda rate: optax.rmsprop(rate, momentum=0.9),
    "adafactor": lambda rate: optax.adafactor(rate, momentum=0.9),
    "muon": contrib.muon,
}
"""From a schedule of the learning rate."""


class Row(NamedTuple):
    """A training with the state in a dtype.

    Attributes:
      before: the transformation before the optimizer.
      optimizer: its name.
      float32: the last loss with the state in float32.
      loss: the last loss by dtype; None if ``init`` refuses the dtype.
    """

    before: str
    optimizer: str
    float32: float
    loss: Mapping[str, float | None]


def optimizer_of(before: str, name: str, steps: int = STEPS) -> Any:
    """Returns an optimizer behind a transformation."""
    rate = optax.cosine_decay_schedule(2e-2, steps)
    return optax.chain(BEFORE[before](), OPTIMIZERS[name](rate))


def trained(optimizer: Any, steps: int = STEPS, factor: float = 1.0) -> float:
    """Returns the loss after training.

    Args:
      optimizer: the optimizer.
      steps: how many steps it takes.
      factor: multiplies the loss, and so the gradients.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    teacher, start = (jax.random.normal(key, SHAPE) for key in keys[:2])
    # Each row has gradients of sizes over two powers of ten.
    sizes = 0.1 * jnp.logspace(-2, 0, SHAPE[1])

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean((x @ (params - teacher * sizes)) ** 2)

    def step(carry: Any, key: Any) -> Any:
        params, state = carry
        x = jax.random.normal(key, (256, SHAPE[0]))
        grads = jax.grad(lambda params: factor * loss_fn(params, x))(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        each = jax.random.split(keys[2], steps)
        (params, _), _ = lax.scan(step, (params, state), each)
        return loss_fn(params, jax.random.normal(keys[3], (256, SHAPE[0])))

    params = start * sizes
    return float(run(params, optimizer.init(params)))


def measure(before: str, name: str, steps: int = STEPS) -> Row:
    """Trains with the state in float32 and in each dtype."""
    optimizer = optimizer_of(before, name, steps)

    def loss(dtype: str) -> float | None:
        low = jmp.low_precision_state(optimizer, dtype, key=jax.random.key(2))
        try:
            return trained(low, steps)
        except ValueError:
            return None

    return Row(
        before,
        name,
        trained(optimizer, steps),
        {dtype: loss(dtype) for dtype in DTYPES},
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text."""
    head = "".join(f"{dtype:>15}" for dtype in DTYPES)
    lines = [f"{'loss, relative to float32 state':33}{'float32':>9}{head}"]
    for row in rows:
        cells = (
            "refused" if loss is None else f"{loss / row.float32:.2f}"
            for loss in row.loss.values()
        )
        lines.append(
            f"{row.before + ', ' + row.optimizer:33}{row.float32:>9.1e}"
            + "".join(f"{cell:>15}" for cell in cells)
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.state_training")
    parser.add_argument("--before", nargs="*", choices=BEFORE, default=[*BEFORE])
    parser.add_argument(
        "--optimizers", nargs="*", choices=OPTIMIZERS, default=[*OPTIMIZERS]
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    rows = [
        measure(before, name, options.steps)
        for name in options.optimizers
        for before in options.before
    ]
    print(table(rows))
    write(options.json, "state_training", stamp(steps=options.steps), rows=rows)


if __name__ == "__main__":
    main()
