"""What a skipped step costs: an adamw step in the programs compiled for accelerators.

Prints, for each way to skip and each target, how many gradient-sized arrays the program
moves from scaled gradients to new parameters, how many it holds beside its arguments,
and how many kernels it runs. Exact: no clock, no device.

    make targets && .venv/bin/python -m benchmarks.loss_scaling
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, Program, compile_for, missing

SHAPE = (8192, 8192)
GRADIENT_BYTES = 4 * SHAPE[0] * SHAPE[1]

VARIANTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: optax.adamw(1e-3),
    "jmp.loss_scaling": lambda: jmp.loss_scaling(optax.adamw(1e-3)),
    "jmp.skip_nonfinite": lambda: jmp.skip_nonfinite(optax.adamw(1e-3)),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(1e-3), 5),
}


def compile_update(target: str, optimizer: Any, n_params: int = 1) -> Program:
    """Compiles all from scaled gradients to new parameters, in place.

    Args:
      target: one of `compiled.TARGETS`.
      optimizer: any optax transformation; gradients are unscaled where it carries a
        loss scale.
      n_params: how many parameters of `SHAPE` there are.
    """
    leaf = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    params = {f"w{i}": leaf for i in range(n_params)}
    opt_state = jax.eval_shape(optimizer.init, params)

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        if isinstance(opt_state, jmp.LossScalingState):
            grads = jmp.get_loss_scale(opt_state).unscale(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return compile_for(target, update, params, opt_state, params, donate_argnums=(0, 1))


def main() -> None:
    """Prints the table."""
    parameters = SHAPE[0] * SHAPE[1]
    print(f"An adamw step on {parameters:,} parameters, jax {jax.__version__}")
    print(f"{'':24}{'target':>8}{'arrays moved':>14}{'temporaries':>13}{'kernels':>9}")
    for target in TARGETS:
        if missing(target):
            print(missing(target))
            continue
        for name, make in VARIANTS.items():
            program = compile_update(target, make())
            moved = program.bytes_moved / GRADIENT_BYTES
            held = program.temporaries / GRADIENT_BYTES
            print(f"{name:24}{target:>8}{moved:14.2f}{held:13.2f}{program.kernels:9}")


if __name__ == "__main__":
    main()
