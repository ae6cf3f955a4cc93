"""The benchmark of the costs of ``explain``, ``watch`` and ``compare``."""

import json

import jax
import pytest

from benchmarks.compiled import missing
from benchmarks.insight import (
    Compared,
    Explained,
    Watched,
    compared_table,
    explained_table,
    main,
    watched,
    watched_table,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_the_cost_of_explain_is_shown_as_ratios_to_tracing():
    row = Explained("m", 10.0, 20.0, 30.0, 20.0, 40.0, 60.0)
    line = explained_table([row]).splitlines()[1]
    assert line.split() == ["m", "30", "3.00", "1.50", "60", "3.00", "1.50"]


def test_the_cost_of_watch_is_shown_as_ratios_to_the_plain_function():
    row = Watched("h100", "m", None, 7, 1.5, 1.25, 3.0, 2.0)
    line = watched_table([row]).splitlines()[1]
    assert line.split() == ["m,", "h100", "all", "7", "1.50", "1.25", "3.00", "2.00"]


def test_the_cost_of_compare_is_shown_as_ratios_to_mixed_precision():
    row = Compared("h100", "m", 7, 2.5, 1.25, 3.0, 1.3)
    line = compared_table([row]).splitlines()[1]
    assert line.split() == ["m,", "h100", "7", "2.50", "1.25", "3.00", "1.30"]


def test_explaining_is_measured_beside_tracing(tmp_path, capsys):
    options = ["--runs", "1", "--explained", "mlp", "--watched", "--compared", "--json"]
    main([*options, str(tmp_path)])
    assert "mlp" in capsys.readouterr().out
    written = json.loads((tmp_path / "insight.json").read_text())
    (row,) = written["explained"]
    assert all(row[name] > 0 for name in Explained._fields if name != "model")
    assert written["watched"] == []
    assert written["versions"]["jax"] == jax.__version__


@pytest.mark.targets
def test_watching_costs_more_kernels_and_little_memory(tmp_path):
    if missing("h100"):
        pytest.skip(missing("h100"))
    options = ["--runs", "1", "--explained", "--watched", "mlp", "--targets", "h100"]
    main([*options, "--compared", "mlp", "--json", str(tmp_path)])
    written = json.loads((tmp_path / "insight.json").read_text())
    (row, sampled), (both,) = written["watched"], written["compared"]
    assert 1 < sampled["moved"] < 1.2
    assert sampled["kernels"] < 4
    assert row["ops"] > 30
    assert 1 < row["moved"] < 1.3
    assert 1 < row["kernels"] < 4
    assert 1 < row["roofline"] < 1.3
    assert row["peak"] < 1.2
    assert 1 + both["float32"] < both["moved"] < 4


@pytest.mark.targets
def test_the_small_arrays_of_a_loop_are_counted_in_few_kernels():
    if missing("h100"):
        pytest.skip(missing("h100"))
    rows = list(watched("lstm", "h100"))
    assert rows
    for row in rows:
        assert row.ops > 50
        assert 1 < row.moved < 1.5
        assert 1 < row.kernels < 4
