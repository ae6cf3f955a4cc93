"""What libraries that save arrays do to the arrays of training states.

Each kind of array is saved and loaded again by each library, alone and on the CPU. The
table has what comes back. Beside the test packages it needs those of a group:

    pip install --group checkpoints
    python -m benchmarks.saved_arrays --json benchmarks/results
"""

import argparse
import importlib
import io
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import stamp, write

_SHAPE = (48, 64)


def _numbers(dtype: str) -> Any:
    size = 4000 if dtype.startswith("int") else 40
    return jnp.asarray(np.random.default_rng(0).normal(size=_SHAPE) * size, dtype)


def _column_by_column(array: Any) -> Any:
    layout = importlib.import_module("jax.experimental.layout")
    by_columns = layout.Layout(major_to_minor=(1, 0))
    return jax.device_put(array, layout.Format(by_columns, array.sharding))


ARRAYS: Mapping[str, Callable[[], Any]] = {
    "float32": lambda: _numbers("float32"),
    "float16": lambda: _numbers("float16"),
    "bfloat16": lambda: _numbers("bfloat16"),
    "e4m3fn": lambda: _numbers("float8_e4m3fn"),
    "e5m2": lambda: _numbers("float8_e5m2"),
    "int16": lambda: _numbers("int16"),
    "key": lambda: jax.random.PRNGKey(123_456_789),
    "typed": lambda: jax.random.key(123_456_789),
    "columns": lambda: _column_by_column(_numbers("float32")),
}
"""The kinds of arrays.

Keys are raw ones and typed ones; ``columns`` lies column by column in the memory.
"""


def _of_pickle(array: Any, path: pathlib.Path) -> Any:
    path.write_bytes(pickle.dumps(array))
    return pickle.loads(path.read_bytes())  # It is our own.


def _of_orbax(array: Any, path: pathlib.Path, dtype: str | None = None) -> Any:
    ocp = importlib.import_module("orbax.checkpoint")
    tree = {"x": array}
    args = {"x": ocp.SaveArgs(dtype=None if dtype is None else jnp.dtype(dtype))}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree, save_args=args)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restore = ocp.checkpoint_utils.construct_restore_args(like)
        return checkpointer.restore(path, item=like, restore_args=restore)["x"]


def _of_flax(array: Any, path: pathlib.Path) -> Any:
    serialization = importlib.import_module("flax.serialization")
    path.write_bytes(serialization.to_bytes({"x": array}))
    return serialization.from_bytes({"x": array}, path.read_bytes())["x"]


def _of_equinox(array: Any, path: pathlib.Path) -> Any:
    eqx = importlib.import_module("equinox")
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, array)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, array)


def _of_savez(array: Any, path: pathlib.Path) -> Any:
    np.savez(path, x=array)
    return np.load(path.with_suffix(".npz"))["x"]


def _of_safetensors(front: str) -> Callable[[Any, pathlib.Path], Any]:
    def of(array: Any, path: pathlib.Path) -> Any:
        module = importlib.import_module(f"safetensors.{front}")
        module.save_file({"x": array if front == "flax" else np.asarray(array)}, path)
        return module.load_file(path)["x"]

    return of


def _of_h5py(array: Any, path: pathlib.Path) -> Any:
    h5py = importlib.import_module("h5py")
    with h5py.File(path, "w") as file:
        file["x"] = np.asarray(array)
    with h5py.File(path) as file:
        return file["x"][...]


def _of_zarr(array: Any, path: pathlib.Path) -> Any:
    zarr = importlib.import_module("zarr")
    zarr.save(path, np.asarray(array))
    return zarr.load(path)


def _of_parquet(array: Any, path: pathlib.Path) -> Any:
    pa, pq = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    pq.write_table(pa.table({"x": np.asarray(array).ravel()}), path)
    return pq.read_table(path)["x"].to_numpy().reshape(np.shape(array))


LIBRARIES: Mapping[str, tuple[str | None, Callable[[Any, pathlib.Path], Any]]] = {
    "pickle": (None, _of_pickle),
    "orbax": ("orbax-checkpoint", _of_orbax),
    "orbax-bfloat16": (
        "orbax-checkpoint",
        lambda array, path: _of_orbax(array, path, "bfloat16"),
    ),
    "flax": ("flax", _of_flax),
    "equinox": ("equinox", _of_equinox),
    "np.savez": ("numpy", _of_savez),
    "safetensors.numpy": ("safetensors", _of_safetensors("numpy")),
    "safetensors.flax": ("safetensors", _of_safetensors("flax")),
    "h5py": ("h5py", _of_h5py),
    "zarr": ("zarr", _of_zarr),
    "parquet": ("pyarrow", _of_parquet),
}
"""The package that a library's version is of, and a function that saves and loads."""


class Row(NamedTuple):
    """A library.

    Attributes:
      library: its name, with its version.
      comes_back: what comes back, for each of ``ARRAYS``.
    """

    library: str
    comes_back: Mapping[str, str]


def judged(before: Any, after: Any) -> str:
    """Says in a word what became of an array."""
    if jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
        if not jnp.issubdtype(after.dtype, jax.dtypes.prng_key):
            return "raw"
        before, after = map(jax.random.key_data, (before, after))
    before, after = map(np.asarray, (before, after))
    if after.dtype.type is np.void:
        return "bytes"
    if before.dtype != after.dtype:
        return after.dtype.name
    same = before.shape == after.shape and before.tobytes() == after.tobytes()
    return "same" if same else "other"


def measure(name: str) -> Row:
    """Saves and loads each kind of array with one of ``LIBRARIES``."""
    package, save_and_load = LIBRARIES[name]
    found = dict[str, str]()
    for kind, make in ARRAYS.items():
        array = make()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "saved"
            try:
                found[kind] = judged(array, save_and_load(array, path))
            except Exception:
                found[kind] = "error"
    version = f" {metadata.version(package)}" if package else ""
    return Row(name + version, found)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text."""

    def line(name: str, cells: Sequence[str]) -> str:
        pairs = zip(ARRAYS, cells, strict=True)
        return f"{name:23}" + "".join(
            f"{cell:>{max(len(kind), 5) + 1}}" for kind, cell in pairs
        )

    lines = [line("", [*ARRAYS])]
    for row in rows:
        lines.append(line(row.library, [row.comes_back[kind] for kind in ARRAYS]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Saves and loads, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.saved_arrays")
    parser.add_argument(
        "--libraries", nargs="*", choices=LIBRARIES, default=[*LIBRARIES]
    )
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    rows = [measure(name) for name in options.libraries]
    print(table(rows))
    write(options.json, "saved_arrays", stamp(), rows=rows)


if __name__ == "__main__":
    main()
