"""How much worse a small training ends in a number format.

Trains a character transformer for 1,000 steps in float32, in 16 bits and in the formats
of 8 bits, from the same seeds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks import accuracy, models
from benchmarks.autocast import fill
from benchmarks.formats.chips import FORMATS, MIXED


class Trained(NamedTuple):
    """One training of a character transformer of two blocks.

    Attributes:
      width: of its blocks.
      rules: the preset, or "float32".
      seed: of the parameters and of the data.
      error: of the gradient before the first step, relative to float32's by norms.
      loss: on the training data, the mean of the last 200 steps.
    """

    width: int
    rules: str
    seed: int
    error: float
    loss: float


_B11 = "e4m3b11fnuz"
_OTHER_FORMATS = {
    "float8, b11": jmp.Float8(forward=_B11, backward=_B11, smallest=0),
    "float8, b11, e5m2": jmp.Float8(forward=_B11, backward="e5m2", smallest=0),
    "float8_rows, e5m2": jmp.get_format(
        "float8_rows", smallest=0, backward="float8_e5m2"
    ),
}
"""Formats of operands and of cotangents that are no preset's on an H100."""

ACCURACY_RULES = {
    "float32": jmp.get_rules("O0"),
    **FORMATS,
    **{name: MIXED.product(one) for name, one in _OTHER_FORMATS.items()},
}
STEPS = 1000
_LAST = 200


class Task(NamedTuple):
    """A character transformer to train.

    Attributes:
      width: of its blocks.
      context: how many characters it reads.
      rate: the largest learning rate.
    """

    width: int
    context: int
    rate: float


TASKS = (Task(accuracy.WIDTH, accuracy.CONTEXT, 1e-2), Task(128, 64, 3e-3))


def train(task: Task, seed: int, steps: int = STEPS) -> list[Trained]:
    """Trains one character transformer under each of the rules."""
    text = accuracy.read_text(accuracy.MODULES)
    model = models.transformer(
        depth=2,
        width=task.width,
        heads=4,
        vocabulary=accuracy.CHARACTERS,
        batch=(16, task.context),
        ahead=1,
    )
    params = jax.tree.map_with_path(_as_flax_starts, fill(model.params, seed))
    rng = np.random.default_rng(seed)
    length = task.context + 1
    at = rng.integers(0, len(text) - length, (steps, 16, 1)) + np.arange(length)
    batches = jnp.asarray(text[at], jnp.int32)
    schedule = optax.warmup_cosine_decay_schedule(0, task.rate, steps // 10, steps)
    optimizer = optax.adamw(schedule)

    def run(rules: jmp.Rules | str) -> tuple[Any, Any]:
        loss_and_grad = jax.value_and_grad(jmp.autocast(model.loss, rules))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = loss_and_grad(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        start = params, optimizer.init(params)
        _, losses = jax.lax.scan(step, start, batches)
        return loss_and_grad(params, batches[0])[1], losses

    found = {
        name: jax.jit(run, static_argnums=0)(r) for name, r in ACCURACY_RULES.items()
    }
    full, _ = found["float32"]
    size = optax.tree.norm(full)
    return [
        Trained(
            task.width,
            name,
            seed,
            float(optax.tree.norm(optax.tree.sub(grads, full)) / size),
            float(losses[-_LAST:].mean()),
        )
        for name, (grads, losses) in found.items()
    ]


def _as_flax_starts(path: Any, leaf: jax.Array) -> jax.Array:
    """Returns a parameter: of a norm or a bias what Flax starts from."""
    start = {"bias": jnp.zeros_like, "scale": jnp.ones_like}
    return start.get(path[-1].key, lambda leaf: leaf)(leaf) if path else leaf


def trained_table(rows: Sequence[Trained]) -> str:
    """Returns losses, and how far they are from float32's of the same seed, as text."""
    full = {row[:1] + row[2:3]: row.loss for row in rows if row.rules == "float32"}
    seeds = dict.fromkeys(row.seed for row in rows)
    head = "".join(f"{f'seed {seed}':>8}" for seed in seeds)
    lines = [
        f"{'':23}{'gradient':>8}{'training':>9}  loss minus that of float32",
        f"{'width':5}{'':18}{'error':>8}{'loss':>9}{head}{'mean':>8}",
    ]
    for width, name in dict.fromkeys(row[:2] for row in rows):
        own = [row for row in rows if row[:2] == (width, name)]
        gaps = [row.loss - full[width, row.seed] for row in own]
        cells = "".join(f"{gap:>+8.4f}" for gap in (*gaps, np.mean(gaps)))
        error, loss = (np.mean([row[i] for row in own]) for i in (3, 4))
        lines.append(f"{width:>4} {name:18}{error:>8.4f}{loss:>9.4f}{cells}")
    return "\n".join(lines)
