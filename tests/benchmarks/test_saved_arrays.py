"""What libraries do to the arrays of training states."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.saved_arrays import ARRAYS, LIBRARIES, judged, main, measure
from benchmarks.tables import RESULTS

TESTED = ("pickle", "orbax", "flax", "equinox", "np.savez")
"""Those of which the test packages have the library."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_the_table_is_what_this_version_does(name):
    results = json.loads((RESULTS / "saved_arrays.json").read_text())
    rows = {row["library"].split(" ")[0]: row["comes_back"] for row in results["rows"]}
    assert measure(name).comes_back == rows[name]


def test_all_libraries_are_in_the_table():
    results = json.loads((RESULTS / "saved_arrays.json").read_text())
    assert len(results["rows"]) == len(LIBRARIES)
    for row, name in zip(results["rows"], LIBRARIES, strict=True):
        assert row["library"].startswith(name)
        assert list(row["comes_back"]) == list(ARRAYS)


def test_what_comes_back_is_judged_by_dtype_shape_and_bits():
    x = jnp.linspace(0, 1, 8).astype("bfloat16")
    assert judged(x, np.asarray(x)) == "same"
    assert judged(x, np.asarray(x)[::-1]) == "other"
    assert judged(x, x.reshape(2, 4)) == "other"
    assert judged(x, np.asarray(x).view("V2")) == "bytes"
    assert judged(x, x.astype("float32")) == "float32"
    assert judged(-0.0 * x, 0.0 * x) == "other"
    key = jax.random.key(0)
    assert judged(key, jax.random.key(0)) == "same"
    assert judged(key, jax.random.key(1)) == "other"
    assert judged(key, jax.random.key_data(key)) == "raw"


def test_bits_without_a_dtype_get_it_back_as_the_docs_say(tmp_path):
    x = np.asarray(jnp.linspace(0, 1, 8).astype("bfloat16"))
    np.savez(tmp_path / "x.npz", x=x)
    again = np.load(tmp_path / "x.npz")["x"].view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(again, x)


def test_rows_are_written_and_shown(tmp_path, capsys):
    main(["--libraries", "pickle", "--json", str(tmp_path)])
    (row,) = json.loads((tmp_path / "saved_arrays.json").read_text())["rows"]
    assert set(row["comes_back"].values()) == {"same"}
    assert "pickle" in capsys.readouterr().out
