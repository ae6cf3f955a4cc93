#!/usr/bin/env bash
# In the float8 formats without a negative zero, NaN is sorted before all numbers.
#
# jnp.sort puts NaN last, as NumPy does. The formats float8_e4m3fnuz, float8_e5m2fnuz
# and float8_e4m3b11fnuz have one NaN, which is 0x80: its sign bit is set. The program
# sorts 1, NaN and -1.
#
# Guess before the first run: -1, 1, NaN, as in float8_e4m3fn.
# Seen (jax 0.10.2 and 0.12.0.1, CPU): NaN, -1, 1, and argsort ranks NaN as the least.
# XLA sorts floats with all negative ones first, NaN too; JAX gives each NaN a positive
# sign before. These formats have no such NaN.
#
# It installs jax in a temporary folder, and fails if what it prints is no longer so.
# usage: bash findings/not_a_number_sorts_first_in_float8.sh
set -euo pipefail
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("0.10.2" if sys.version_info < (3, 12) else "0.12.0.1")')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  "jax==$version" "jaxlib==$version"
cat >"$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

print("jax", jax.__version__)
last = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
for name in (*last, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"):
    dtype = getattr(ml_dtypes, name, name)
    x = jnp.asarray(np.array([1, np.nan, -1], np.float32).astype(dtype))
    found = np.asarray(jax.jit(jnp.sort)(x)).astype(np.float32)
    order = np.asarray(jax.jit(jnp.argsort)(x)).tolist()
    print(f"{name}: {found.tolist()}, argsort {order}")
    is_first = name not in last
    expected = [np.nan, -1, 1] if is_first else [-1, 1, np.nan]
    assert np.array_equal(found, expected, equal_nan=True), "no longer so"
    assert order == ([1, 2, 0] if is_first else [2, 0, 1]), "no longer so"
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
