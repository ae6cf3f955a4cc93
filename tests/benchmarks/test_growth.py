"""How the cost of autocast grows, beside code written by hand."""

import json

import pytest

from benchmarks import growth
from benchmarks.compiled import missing
from benchmarks.growth import Depth, Width, by_depth, depth_table, main, width_table

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_ratios_are_to_the_model_written_by_hand():
    text = depth_table([Depth("jit", 8, 100.0, 125.0, 200, 210)])
    cells = ["8", "jit", "125", "100", "1.25", "210", "200", "1.05"]
    assert text.splitlines()[1].split() == cells
    text = width_table([Width("scan", 64, 2.0, 1.0, 4.0, 5.0)])
    cells = ["64", "scan", "1.00", "2.00", "0.50", "5.00", "4.00", "1.25"]
    assert text.splitlines()[1].split() == cells


def test_a_loop_over_layers_does_not_grow_and_is_no_longer_than_by_hand():
    two, four = (by_depth("scan", depth, runs=1) for depth in (2, 4))
    assert two.lines == four.lines <= 1.1 * two.lines_by_hand
    assert min(two.mixed, two.by_hand) > 0


def test_the_tables_are_written_and_drawn(tmp_path):
    options = ["--layouts", "scan", "--depths", "1", "2", "--runs", "1", "--widths"]
    main([*options, "--json", str(tmp_path), "--picture", str(tmp_path)])
    written = json.loads((tmp_path / "growth.json").read_text())
    assert [row["depth"] for row in written["depths"]] == [1, 2]
    assert written["widths"] == []
    assert (tmp_path / "growth.png").stat().st_size > 10_000


@pytest.mark.targets
def test_widths_are_compiled_for_an_h100():
    if missing(growth.TARGET):
        pytest.skip(missing(growth.TARGET))
    found = growth.by_width("scan", 64)
    assert found.moved < found.moved_by_hand
    assert found.peak < found.peak_by_hand
