#!/usr/bin/env bash
# The largest number of float4_e2m1fn, 6, becomes the largest integer of any integer dtype.
#
# float4_e2m1fn has the numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. All that
# are integers fit every dtype of the program, which casts them to it.
#
# Guess before the first run: 6 and -6, as NumPy has them.
# Seen (jax 0.10.2 and 0.12.0.1, CPU): 6 is 7 in int4, 127 in int8 and 2147483647 in
# int32; -6 is the smallest integer. In the body of a scan both are right, and so is a
# cast through float32. It is as if XLA, which saturates, had cast the ends of the
# integer's range to float4 before it compares: there they are 6 and -6.
#
# It installs jax in a temporary folder, and fails if what it prints is no longer so.
# usage: bash findings/six_in_float4_becomes_the_largest_integer.sh
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
numbers = np.array([1, 2, 3, 4, 6, -4, -6], np.float32)
x = jnp.asarray(numbers.astype(ml_dtypes.float4_e2m1fn))
for name in ("int4", "int8", "int16", "int32"):
    expected = numbers.astype(name).astype(int).tolist()
    alone = jax.jit(lambda x: x.astype(name))(x)
    _, in_a_loop = jax.jit(
        lambda x: jax.lax.scan(lambda carry, one: (carry, one.astype(name)), 0, x)
    )(x)
    by_float32 = jax.jit(lambda x: x.astype(jnp.float32).astype(name))(x)
    found = [np.asarray(y).astype(int).tolist() for y in (alone, in_a_loop, by_float32)]
    print(f"{name}: {found[0]}, in a scan {found[1]}")
    ends = [int(jnp.iinfo(name).max), int(jnp.iinfo(name).min)]
    assert found[0] == [1, 2, 3, 4, ends[0], -4, ends[1]], "no longer so"
    assert found[1] == found[2] == expected, "no longer so"
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
