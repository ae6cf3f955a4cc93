#!/usr/bin/env bash
# A number beyond the range of a float6 format becomes zero, and not the largest number.
#
# float6_e2m3fn and float6_e3m2fn have no infinity and no NaN: numbers from -7.5 to 7.5,
# and from -28 to 28. ml_dtypes, from which JAX and NumPy have these dtypes, rounds what
# is larger to the largest number, and so does XLA for float4_e2m1fn. The program casts
# normal numbers whose standard deviation is half the largest number of a format.
#
# Guess before the first run: XLA and ml_dtypes cast alike, as they do for float4 and all
# kinds of float8.
# Seen (jax 0.12.0.1, CPU; 0.10.2 has no float6): all numbers that would round beyond the
# largest one are 0, here 3 to 4 % of them, and infinities too. A clip before the cast
# makes both alike.
#
# It installs jax in a temporary folder, and fails if what it prints is no longer so.
# It needs Python 3.12 or newer.
# usage: bash findings/large_numbers_become_zero_in_float6.sh
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0
cat >"$folder/program.py" <<'PY'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

print("jax", jax.__version__, "ml_dtypes", ml_dtypes.__version__)
normal = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
    dtype = getattr(ml_dtypes, name)
    largest = float(ml_dtypes.finfo(dtype).max)
    x = normal * largest / 2

    def by_xla(x):
        cast = jax.jit(lambda x: x.astype(dtype))(jnp.asarray(x))
        return np.asarray(cast).astype(np.float32)

    expected, found = x.astype(dtype).astype(np.float32), by_xla(x)
    differ = found != expected
    clipped = by_xla(np.clip(x, -largest, largest))
    print(
        f"{name}: {differ.mean():.2%} differ; twice the largest becomes "
        f"{by_xla(np.float32([2 * largest]))[0]}, by ml_dtypes {largest}"
    )
    is_float6 = name.startswith("float6")
    assert (differ.mean() > 0.01) == is_float6, "no longer so"
    assert np.all(found[differ] == 0) and np.all(abs(x[differ]) > largest)
    assert np.array_equal(clipped, expected)
PY
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/program.py"
