#!/usr/bin/env bash
# safetensors saves a transposed array of NumPy with its numbers in another order.
#
# A transposed array is a view: its numbers lie in memory column by column. An array of JAX
# that a device holds column by column becomes such an array, too.
#
# Expected: the array that was saved, as by version 0.7.0.
# Seen (safetensors 0.8.0, numpy 2.4): the right shape and dtype, the numbers of the memory
# row by row, and no error. A copy, np.ascontiguousarray(x), is saved right.
#
# It installs both versions in a temporary folder, and fails if what it prints is no longer
# so.
# usage: bash findings/transposed_arrays_in_safetensors.sh
set -euo pipefail
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PY'
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

x = np.arange(6, dtype=np.float32).reshape(2, 3).T
same = []
for array in (x, np.ascontiguousarray(x)):
    save_file({"x": array}, sys.argv[1])
    same.append(bool(np.array_equal(load_file(sys.argv[1])["x"], x)))
print(*same)
PY
for version in 0.7.0 0.8.0; do
  "$python" -m venv "$folder/$version"
  "$folder/$version/bin/python" -m pip install --quiet --disable-pip-version-check \
    "safetensors==$version" "numpy<2.5"
done
old=$("$folder/0.7.0/bin/python" "$folder/program.py" "$folder/x")
new=$("$folder/0.8.0/bin/python" "$folder/program.py" "$folder/x")
echo "a transposed array and a copy of it come back: expected True True"
echo "seen: safetensors 0.7.0 $old, safetensors 0.8.0 $new"
[ "$old" = "True True" ] && [ "$new" = "False True" ]
