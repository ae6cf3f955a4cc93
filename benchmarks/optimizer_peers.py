"""Optimizer state in 8 bits, of several libraries.

For a step of adamw on thirty arrays: the bytes of state for a parameter, what a step
moves on an H100 and takes to compile, and how large it is beside optax's own after many
steps with a constant gradient. The peers are flashoptim-jax and rollfast, and rollfast
needs Python 3.12:

    pip install --group optimizers
    python -m benchmarks.optimizer_peers --json benchmarks/results
"""

import argparse
import importlib
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks.compiled import compile_for
from benchmarks.moments import THIRTY
from benchmarks.report import stamp, write

GRADIENTS = (1e-2, 1e-5, 1e-8)
_SHAPE = (64, 4096)
_RATE = 1e-3


class Step(NamedTuple):
    """An optimizer.

    Attributes:
      init: from parameters to its state.
      step: from parameters, state and gradients to new parameters and state.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], Any]


def _of_optax(optimizer: Any) -> Step:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Step(optimizer.init, step)


def _low(dtype: str) -> Step:
    inner = optax.adamw(_RATE, weight_decay=0)
    return _of_optax(jmp.low_precision_state(inner, dtype, key=jax.random.key(0)))


def _flash() -> Step:
    peer = importlib.import_module("flashoptim_jax")
    # Its fused kernels are for a device that is there.
    options = {"master_weight_bits": None, "fused": False}
    made = peer.flash_adamw(_RATE, weight_decay=0.0, **options)
    return Step(made.init, made.step)


def _rollfast(**options: Any) -> Step:
    peer = importlib.import_module("rollfast")
    return _of_optax(peer.adamw8(_RATE, weight_decay=0.0, **options))


OPTIMIZERS: Mapping[str, Callable[[], Step]] = {
    "optax.adamw": lambda: _of_optax(optax.adamw(_RATE, weight_decay=0)),
    "jmp_lite, 16 bits": lambda: _low("bfloat16"),
    "jmp_lite, 8 bits": lambda: _low("float8_e4m3fn"),
    "flashoptim-jax, flash_adamw": _flash,
    "rollfast, adamw8": _rollfast,
    "rollfast, adamw8, stochastic": lambda: _rollfast(
        stochastic_rounding=True, key=jax.random.key(0)
    ),
}


class Peer(NamedTuple):
    """What an optimizer's state comes to.

    Attributes:
      optimizer: its name.
      state: bytes of state for a parameter.
      moved: bytes that a step moves for a parameter, on an H100.
      kernels: how many it launches for thirty arrays.
      seconds: to compile that step.
      steps: how far parameters move in all steps, relative to optax's adamw, for each
        of ``GRADIENTS``.
    """

    optimizer: str
    state: float
    moved: float
    kernels: int
    seconds: float
    steps: tuple[float, ...]


def _distance(step: Step, gradient: float, n_steps: int) -> float:
    """Returns how far parameters move on average."""
    rng = np.random.default_rng(0)
    signs = jnp.asarray(np.sign(rng.normal(size=_SHAPE)), jnp.float32)
    params = {"w": jnp.zeros(_SHAPE)}

    def one(carry: Any, _: Any) -> Any:
        return step.step(*carry, {"w": gradient * signs}), None

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        (params, _), _ = jax.lax.scan(one, (params, state), length=n_steps)
        return jnp.mean(jnp.abs(params["w"]))

    return float(run(params, step.init(params)))


def distances(name: str, n_steps: int = 500) -> tuple[float, ...]:
    """Returns how far parameters move beside optax's adamw, for each gradient."""
    step, usual = OPTIMIZERS[name](), OPTIMIZERS["optax.adamw"]()
    return tuple(
        _distance(step, gradient, n_steps) / _distance(usual, gradient, n_steps)
        for gradient in GRADIENTS
    )


def measure(name: str) -> Peer:
    """Measures one of ``OPTIMIZERS``."""
    step = OPTIMIZERS[name]()
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in THIRTY["one"]]
    size = sum(param.size for param in params)
    state = jax.eval_shape(step.init, params)
    start = time.perf_counter()
    program = compile_for(
        "h100", step.step, params, state, params, donate_argnums=(0, 1)
    )
    seconds = time.perf_counter() - start
    return Peer(
        name,
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / size,
        program.bytes_moved / size,
        program.kernels,
        seconds,
        distances(name),
    )


def peers_table(rows: Sequence[Peer]) -> str:
    """Returns the rows as text."""
    heads = "".join(f"{f'g = {gradient:.0e}':>11}" for gradient in GRADIENTS)
    alone = next((row.seconds for row in rows if row.optimizer == "optax.adamw"), None)
    lines = [f"{'thirty arrays':30}{'state':>6}{'moved':>7}{'compile':>8}{heads}"]
    for row in rows:
        ratio = "" if alone is None else f"{row.seconds / alone:.1f}x"
        steps = "".join(f"{step:>11.2f}" for step in row.steps)
        lines.append(
            f"{row.optimizer:30}{row.state:>6.2f}{row.moved:>7.2f}{ratio:>8}{steps}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it as JSON on request."""
    parser = argparse.ArgumentParser("python -m benchmarks.optimizer_peers")
    parser.add_argument("--only", nargs="*", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # For optax's adam.
    rows = [measure(name) for name in options.only]
    print(peers_table(rows))
    write(options.json, "optimizer_peers", stamp(), peers=rows)


if __name__ == "__main__":
    main()
