"""What float8 products change in compiled programs, and in small trainings."""

import json

import pytest

from benchmarks import float8
from benchmarks.compiled import missing
from benchmarks.float8 import Compared, Sent, Task, Trained

pytestmark = pytest.mark.usefixtures("standard_promotion")

COMPARED = Compared("4 blocks, scan", "h100", 64, 32, 2000, 0.9, 0.8, 0.7, 1.5, 72, 1)


def test_tables_say_what_was_found():
    wider = COMPARED._replace(width=128)
    shared, _, cells, _ = float8.models_table([COMPARED, wider]).splitlines()
    assert shared == "target h100, length 32, smallest 2000:"
    ratios = ("0.90", "0.80", "0.70", "1.50")
    assert cells.split()[3:] == ["64", *ratios, "72", "1"]
    sent = Sent("FSDP", "float8", 1.5, {"bf16": 10.0, "f8e4m3fn": 5.0})
    assert float8.sent_table([sent]).endswith("1.50  10 bf16, 5 f8e4m3fn")


def test_gaps_are_to_float32_of_the_same_seed():
    rows = [
        Trained(64, "float32", 0, 0.0, 2.0),
        Trained(64, "float32", 1, 0.0, 3.0),
        Trained(64, "float8", 0, 0.1, 2.5),
        Trained(64, "float8", 1, 0.3, 3.1),
    ]
    cells = float8.trained_table(rows).splitlines()[-1].split()
    assert cells == [
        *("width", "64,", "float8", "0.2000"),
        *("2.5000", "+0.5000", "3.1000", "+0.1000", "+0.3000"),
    ]


@pytest.mark.slow
def test_a_small_training_has_small_errors():
    rows = {row.rules: row for row in float8.train(Task(32, 16, 1e-2), 0, steps=20)}
    assert rows["float32"].error == 0
    assert rows["mixed"].error < 0.02 < rows["float8"].error < 0.2
    assert rows["float8"].loss == pytest.approx(rows["float32"].loss, abs=0.1)


@pytest.mark.targets
def test_the_tables_are_written_and_drawn(tmp_path, monkeypatch):
    if missing("h100"):
        pytest.skip(missing("h100"))
    monkeypatch.setattr(float8, "MODELS", ())
    monkeypatch.setattr(float8, "RECIPES", {"mixed": float8.RECIPES["mixed"]})
    monkeypatch.setattr(float8, "STACKED", {})
    monkeypatch.setattr(float8, "TASKS", (Task(32, 16, 1e-2),))
    monkeypatch.setattr(float8.collectives, "LAYOUTS", ())
    options = ["--widths", "128", "--lengths", "--seeds", "1", "--steps", "10"]
    float8.main([*options, "--json", str(tmp_path), "--picture", str(tmp_path)])
    told = json.loads((tmp_path / "float8.json").read_text())
    assert [row["width"] for row in told["widths"]] == [128]
    assert told["widths"][0]["raised"] == 0
    assert (tmp_path / "float8.png").stat().st_size > 10_000
