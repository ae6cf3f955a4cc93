#!/usr/bin/env bash
# How the slope of tanh is written decides whether XLA writes float32 arrays to memory.
#
# Six layers tanh(x @ w + b), products in bfloat16, the sum and tanh in float32. The
# derivative rule computes the slope from the operand of tanh, in one of three forms
# that are equal: 4 e / (1 + e)**2 with e = exp(-2 |x|), the product of two logistic
# functions, and 1 / cosh(x)**2 with two exponentials.
#
# Guess before the first run: the compiled gradient is the same but for arithmetic. All
# forms are cheap functions of one 16-bit product, and fuse with what reads them.
# Seen (jax 0.10.2 and 0.12.0.1, an H100 by name, default flags, no GPU needed): with one
# exponential, XLA writes one float32 array of activations. With two, or with two logistic
# functions, it writes seven, one more in each layer.
#
# It installs jax and its compiler for CUDA in a temporary folder, and fails if what it
# prints is no longer so.  usage: bash findings/two_exponentials_in_a_slope.sh
set -euo pipefail
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("0.10.2" if sys.version_info < (3, 12) else "0.12.0.1")')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "jax[cuda12-local]==$version" nvidia-cuda-nvcc-cu12
cat >"$folder/program.py" <<'PY'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def one_exponential(x):
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


def two_logistics(x):
    return 4 * jax.lax.logistic(2 * x) * jax.lax.logistic(-2 * x)


def two_exponentials(x):
    return 4 / (jnp.exp(x) + jnp.exp(-x)) ** 2


def gradient(slope):
    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defjvp(lambda xs, ts: (tanh(*xs), ts[0] * slope(xs[0])))

    def loss(params, x):
        low = x.astype(jnp.bfloat16)
        for w, b in params:
            h = low @ w.astype(jnp.bfloat16)
            low = tanh(h.astype(jnp.float32) + b).astype(jnp.bfloat16)
        return jnp.mean(low.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)


topology = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x1", target_config=H100
)
place = SingleDeviceSharding(topology.devices[0])
array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
layers = [(array(1024, 1024), array(1024))] * 6
found = {}
for slope in (one_exponential, two_logistics, two_exponentials):
    compiled = jax.jit(gradient(slope)).lower(layers, array(8192, 1024)).compile(
        {"xla_gpu_autotune_level": 0}
    )
    entry = compiled.as_text().split("ENTRY", 1)[1]
    results = re.findall(r"= (.*?) (?:fusion|custom-call|copy)\(", entry)
    found[slope.__name__] = sum(r.count("f32[8192,1024]") for r in results)
    print(f"{slope.__name__}: {found[slope.__name__]} float32 arrays of activations")
print("jax", jax.__version__)
one, *others = found.values()
assert one == 1 and others == [7, 7], "this has changed"
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
