#!/usr/bin/env bash
# A small negative number becomes NaN in a float8 format without a negative zero, but
# only in a loop.
#
# The formats float8_e4m3fnuz, float8_e5m2fnuz and float8_e4m3b11fnuz have one zero. The
# bits of a negative zero (0x80) are their NaN. The program converts -2**-30 to each, in
# one step of jax.lax.scan and without a loop.
#
# Guess before the first run: 0, as ml_dtypes and NumPy have it, in both.
# Seen (jax 0.10.2 and 0.12.0.1, default flags, CPU): 0 without a loop, and NaN in one.
# The conversion rounds to a zero and keeps the sign. Two code generators of XLA differ:
# fused ops have one, and the body of this loop the other.
#
# It installs jax in a temporary folder, and fails if what it prints is no longer so.
# usage: bash findings/nan_of_small_negatives_in_a_loop.sh
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


def rounded(x, dtype):
    return x.astype(dtype).astype(jnp.float32)


print("jax", jax.__version__)
x = jnp.full((8, 8), -(2.0**-30), jnp.float32)
found = {}
for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"):
    dtype = getattr(ml_dtypes, name)
    expected = np.asarray(x).astype(dtype).astype(np.float32)
    alone = jax.jit(lambda x: rounded(x, dtype))(x)
    _, in_a_loop = jax.jit(
        lambda x: jax.lax.scan(lambda carry, row: (carry, row.astype(dtype)), 0, x)
    )(x)
    found[name] = [
        float(np.asarray(each, np.float32)[0, 0])
        for each in (expected, alone, in_a_loop)
    ]
    print(f"{name}: NumPy {found[name][0]}, alone {found[name][1]}, scan {found[name][2]}")
for by_numpy, alone, in_a_loop in found.values():
    assert by_numpy == alone == 0 and np.isnan(in_a_loop), "no longer so"
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
