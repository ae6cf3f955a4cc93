#!/usr/bin/env bash
# A product of numbers that were rounded to float8 and back is no float8 product.
#
# The recipe: x8 = (x / scale).astype(float8); dot(x8.astype(bfloat16) * scale, ...).
# Flax's Fp8DotGeneralOp has this form, of which XLA for GPUs makes a float8 kernel of
# cuBLAS.
#
# Guess before the first run: with XLA's default flags the compiled program for an H100
# has a float8 kernel, or at least the rounding to float8.
# Seen (jax 0.10.2 and 0.12.0.1, no GPU needed): neither. XLA makes a Triton product
# before it looks for float8, and then drops the casts through float8: not one float8
# number is left, and the result has the digits of bfloat16. Without Triton's products
# there is one. A product of float8 operands is float8 under both settings.
#
# It installs jax and its compiler for CUDA in a temporary folder, and fails if what it
# prints is no longer so.  usage: bash findings/float8_by_dequantised_operands.sh
set -euo pipefail
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("0.10.2" if sys.version_info < (3, 12) else "0.12.0.1")')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "jax[cuda12-local]==$version" nvidia-cuda-nvcc-cu12
cat >"$folder/program.py" <<'PY'
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
FLOAT8 = jnp.float8_e4m3fn


def quantize(x):
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(x)) / 448)))
    return (x / scale).astype(FLOAT8), scale


def dequantized_operands(x, w):
    (x, a), (w, b) = quantize(x), quantize(w)
    return (x.astype(jnp.bfloat16) * a) @ (w.astype(jnp.bfloat16) * b)


def float8_operands(x, w):
    (x, a), (w, b) = quantize(x), quantize(w)
    return jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16) * a * b


topology = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x1", target_config=H100
)
place = SingleDeviceSharding(topology.devices[0])
array = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=place)
found = {}
for fun in (dequantized_operands, float8_operands):
    for flags in ({}, {"xla_gpu_enable_triton_gemm": False}):
        options = {"xla_gpu_autotune_level": 0, **flags}
        text = jax.jit(fun).lower(array, array).compile(options).as_text()
        name = fun.__name__, "no Triton products" if flags else "default flags"
        found[name] = "f8e4m3" in text
        print(*name, "float8 numbers" if found[name] else "no float8", sep=": ")
print("jax", jax.__version__)
assert list(found.values()) == [False, True, True, True], "this has changed"
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
