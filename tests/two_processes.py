"""One of several processes that train together; in one of them a batch overflows.

python tests/two_processes.py ADDRESS PROCESSES PROCESS
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp


def loss_fn(params, model_state, batch, rng):
    return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2), (model_state, None)


def main(address, processes, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, process)
    mesh = jax.make_mesh(
        (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    rules = jmp.get_rules("mixed", "float16")
    scale = jmp.DynamicLossScale(2.0**10)
    init, step = jmp.build_train_step(
        loss_fn, optax.sgd(0.1), rules, loss_scale=scale, axis_name="data"
    )
    step = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    )
    with jax.set_mesh(mesh):
        state = jax.jit(init)({"w": jnp.ones((8, 2)) / 8})
        for i in range(3):
            mine = np.full((4, 8), 0.1 * (1 + process), np.float32)
            if i == 1 and process == processes - 1:
                mine[0, 0] = np.inf
            batch = jax.make_array_from_process_local_data(
                NamedSharding(mesh, P("data")), mine
            )
            state, metrics = step(state, batch)
            record = {
                "finite": bool(metrics["grads_finite"]),
                "scale": float(metrics["loss_scale"]),
                "loss": float(metrics["loss"]),
                "step": int(state.step),
                "w": np.asarray(state.params["w"]).tolist(),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
