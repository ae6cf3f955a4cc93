"""Whether optimizers of all kinds train 16-bit parameters in each wrapper.

It trains two layers on a teacher's numbers, for 1,000 steps. Some optimizers choose
their learning rate themselves, by how far the parameters are from where they started.

    .venv/bin/python -m benchmarks.wrapped_training --json benchmarks/results
"""

import argparse
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import contrib

import jmp_lite as jmp
from benchmarks.report import stamp, write

STEPS = 1000

OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(3e-3),
    "sgd": lambda: optax.sgd(0.1),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(3e-3),
    "momo": contrib.momo,
    "cocob": contrib.cocob,
    "prodigy": contrib.prodigy,
    "dadapt_adamw": contrib.dadapt_adamw,
    "mechanize(sgd)": lambda: contrib.mechanize(optax.sgd(0.1)),
    "mechanize(adam)": lambda: contrib.mechanize(optax.adam(3e-3)),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
}

WRAPPERS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "float32": ("float32", lambda inner: inner),
    "masters": ("bfloat16", jmp.master_weights),
    "compensated": ("bfloat16", jmp.compensated),
    "in float16": ("float16", jmp.compensated),
    "stochastic": (
        "bfloat16",
        lambda inner: jmp.stochastic_rounding(inner, jax.random.key(7)),
    ),
}
"""The dtype of the parameters, and the wrapper."""


class Row(NamedTuple):
    """An optimizer.

    Attributes:
      optimizer: its name.
      loss: the last loss by wrapper.
    """

    optimizer: str
    loss: Mapping[str, float]


def trained(optimizer: Any, dtype: str, steps: int = STEPS) -> float:
    """Returns the loss after training parameters of a dtype."""
    optimizer = optax.with_extra_args_support(optimizer)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 32))
    y = jnp.tanh(x @ jax.random.normal(keys[1], (32, 8)))

    def loss_fn(params: Any) -> Any:
        full = jmp.cast_to_full(params)
        return jnp.mean((jnp.tanh(x @ full["a"]) @ full["b"] - y) ** 2)

    def step(carry: Any, _: Any) -> Any:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jmp.cast_to_full(grads)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return (jmp.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        (params, _), _ = lax.scan(step, (params, state), length=steps)
        return loss_fn(params)

    params = {
        "a": jax.random.normal(keys[2], (32, 64)) / 6,
        "b": jax.random.normal(keys[3], (64, 8)) / 8,
    }
    params = jmp.cast_tree(params, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # That of stochastic_rounding.
        state = optimizer.init(params)
    return float(run(params, state))


def measure(name: str, steps: int = STEPS) -> Row:
    """Trains with one of ``OPTIMIZERS`` in each of ``WRAPPERS``."""
    return Row(
        name,
        {
            kind: trained(wrap(OPTIMIZERS[name]()), dtype, steps)
            for kind, (dtype, wrap) in WRAPPERS.items()
        },
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text."""
    head = "".join(f"{kind:>13}" for kind in WRAPPERS)
    lines = [f"{'last loss':20}{head}"]
    for row in rows:
        cells = "".join(f"{row.loss[kind]:>13.4f}" for kind in WRAPPERS)
        lines.append(f"{row.optimizer:20}{cells}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.wrapped_training")
    parser.add_argument(
        "--optimizers", nargs="*", choices=OPTIMIZERS, default=[*OPTIMIZERS]
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    rows = [measure(name, options.steps) for name in options.optimizers]
    print(table(rows))
    write(options.json, "wrapped_training", stamp(steps=options.steps), rows=rows)


if __name__ == "__main__":
    main()
