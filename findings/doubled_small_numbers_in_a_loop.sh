#!/usr/bin/env bash
# A loop that only reverses its rows changes float8_e5m2fnuz numbers on a CPU.
#
# lax.scan over an array that has each number of the dtype. A step reverses a row. The
# same without the loop keeps all bits.
#
# Guess before the first run: 0 numbers change. Nothing is computed.
# Seen (jax 0.12.0.1, CPU, default flags): the eight numbers from 3.05e-5 to 5.34e-5, the
# first above the subnormal ones, and their negatives, become 6.1e-5: up to twice as large.
# float8_e4m3fnuz and float8_e4m3b11fnuz keep theirs. jax 0.10.2 is right with its default
# flags, and wrong with --xla_cpu_use_fusion_emitters=false, there outside of a loop too.
#
# It installs jax in a temporary folder, and fails if what it prints is no longer so.
# usage: bash findings/doubled_small_numbers_in_a_loop.sh  (Python 3.12 or newer)
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "jax==0.12.0.1"
cat >"$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

counts = []
for name in ("float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e4m3b11fnuz"):
    bits = np.arange(256, dtype=np.uint8)
    numbers = bits[bits != 0x80].view(jnp.dtype(name))  # Without the NaN.
    rows = jnp.asarray(np.stack([numbers, numbers]))
    reverse = jax.jit(lambda x: jax.lax.scan(lambda c, row: (c, row[::-1]), 0, x)[1])
    found = np.float32(np.asarray(reverse(rows)))[:, ::-1]
    counts.append(int((found != np.float32(numbers)).sum() // 2))
print(*counts)
PY
found=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py")
echo "jax 0.12.0.1: numbers that change (e5m2fnuz, e4m3fnuz, e4m3b11fnuz): expected 0 0 0, seen $found"
[ "$found" = "8 0 0" ]
