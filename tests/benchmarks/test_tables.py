"""The figures that the texts show are those that the benchmarks wrote down."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.autocast import Row
from benchmarks.loss_scaling import Skipping
from benchmarks.report import WIDTH, joined, stamp, write

ROW = Row("h100", "m", "by hand", 4.0, 2.0, 7, 1.0, 1.0, 0.1, 0.0, 10.0, 100)
SKIPPING = [Skipping("plain", "h100", 7.0, 0.0, 3)]


@pytest.mark.parametrize("path", tables.TEXTS, ids=lambda path: path.name)
def test_the_tables_of_a_text_show_the_committed_measurements(path):
    text = path.read_text()
    assert "<!-- table: " in text or "<!-- sentences: " in text
    assert tables.filled(text) == text


def test_every_table_is_shown_and_no_text_shows_it_twice():
    texts = [path.read_text() for path in tables.TEXTS]
    for name in tables.TABLES:
        marker = f"<!-- table: {name} -->\n```text\n"
        if name == "summary":
            marker = "<!-- sentences: summary -->\n- "
        assert {1} <= {text.count(marker) for text in texts} <= {0, 1}, name


@pytest.mark.parametrize("name", tables.TABLES)
def test_no_table_is_too_wide_for_a_page(name):
    longest = max(map(len, tables.table(name).splitlines()))
    assert longest <= (91 if name == "insight.explained" else WIDTH)


def test_names_after_each_other_are_split_where_a_line_ends():
    assert joined(["a", "b"], "of ") == "of a, b"
    assert joined([]) == ""
    long = joined(["x" * 50, "y" * 50, "z"], "1: ").splitlines()
    assert long == ["1: " + "x" * 50 + ",", "y" * 50 + ", z"]


def test_a_table_is_put_below_its_comment(tmp_path):
    write(tmp_path, "loss_scaling", stamp(), skipping=SKIPPING)
    text = "a\n<!-- table: loss_scaling.skipping -->\n```text\nold\n```\nb\n"
    filled = tables.filled(text, tmp_path)
    assert filled.startswith(text.partition("old")[0])
    assert "plain" in filled
    assert "7.00" in filled
    assert "old" not in filled
    assert filled.endswith("\n```\nb\n")
    assert tables.filled(filled, tmp_path) == filled


def test_figures_come_with_their_date_and_versions(tmp_path):
    stamped = stamp()
    write(tmp_path, "loss_scaling", stamped, skipping=SKIPPING)
    last = tables.table("loss_scaling.skipping", tmp_path).split("\n\n")[-1]
    assert last.startswith(stamped["date"])
    assert f"jax {stamped['versions']['jax']}" in last


def test_ratios_are_to_the_model_by_hand():
    mixed = ROW._replace(variant="mixed", moved=2.0, peak=3.0, error=0.05, trace=15.0)
    lines = tables.against_hand([ROW, mixed]).splitlines()
    assert lines[1].split() == ["m", "h100", "0.50", "1.50", "1.00", "0.50", "1.50"]
    assert len(lines) == 2


def test_the_summary_is_four_sentences_with_the_figures_of_the_tables():
    text = " ".join(tables.table("summary").split())
    _, gain, by_hand, scaling, accuracy = f" {text}".split(" - ")
    shown = tables.table("steps").split("\n\n")[0]
    cells = {line[:29].strip(): line[29:].split() for line in shown.splitlines()}
    low, tf32 = cells["bfloat16, autocast"], cells["float32 default"]
    time = float(low[0]) / float(tf32[0])
    assert f"{time:.2f} of the time and {low[4]} of the memory" in gain
    rows = tables.table("autocast.mixed").split("\n\n")[0].splitlines()[1:]
    ratios = [(line[28:].split()[1], line[:28].strip()) for line in rows]
    for ratio, name in (min(ratios), max(ratios)):
        assert f"{ratio} times for `{name}`" in by_hand
    scaled, unscaled = cells["float16, with loss scaling"], cells["float16, autocast"]
    # Not from the cells, which have two digits.
    steps = json.loads((tables.RESULTS / "steps.json").read_text())["rows"]
    exact = {r["variant"]: r["roofline"] for r in steps if r["model"] in shown}
    ratio = exact["float16, with loss scaling"] / exact["float16, autocast"]
    assert f"adds {100 * (ratio - 1):.1f} % to the time" in scaling
    kernels = int(unscaled[-1])
    assert f"{int(scaled[-1]) - kernels} small kernels to {kernels}" in scaling
    trained = re.findall("16, mixed .*", tables.table("accuracy"))
    above = max(float(line.split()[-1]) for line in trained)
    assert f"at most {above:.1f} standard deviations above" in accuracy


def test_sentences_are_put_between_their_comments():
    text = "a\n<!-- sentences: summary -->\nold\n<!-- end -->\n```text\nb\n```\n"
    head, _, tail = tables.filled(text).partition(tables.table("summary"))
    assert head == "a\n<!-- sentences: summary -->\n"
    assert tail == "\n<!-- end -->\n```text\nb\n```\n"


def test_the_advice_for_a_chip_is_what_was_calculated_for_it():
    """From the ratios to 16 bits at both widths to the words of the guide."""
    names = {"h100": "H100", "b200": "B200", "v5e": "TPU v5e", "v6e": "TPU v6e"}
    names["tpu7x"] = "TPU v7x"
    text = (tables.ROOT / "docs" / "formats.md").read_text()
    guide = {
        cells[1].split(",")[0].strip(): [
            cell.split(":")[0].strip() for cell in cells[4:7]
        ]
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) == 8
    }
    rows = tables.table("formats.chips").split("\n\n")[0].splitlines()[1:]
    ratios = {}
    for row in rows:
        chip, cells = row[:12].strip(), row[12:].split()
        if chip in names:
            ratios.setdefault(chip, []).append([float(cell) for cell in cells[-3:]])
    assert set(ratios) == set(names)
    for chip, (narrow, wide) in ratios.items():
        expected = []
        for at_2048, at_4096 in zip(narrow, wide, strict=True):
            if at_4096 > 1:
                words = "no gain"
            elif at_4096 > 0.9:
                words = "gains little at width 4,096"
            elif at_4096 == min(wide):
                words = "gains most"
            else:
                words = "gains" if at_2048 < 0.9 else "gains at width 4,096"
            expected.append(words)
        if chip == "h100":  # The clock refuted int8 there.
            expected[2] = "no"
        assert guide[names[chip]] == expected, chip


def test_the_short_table_of_the_clock_has_six_rows_of_the_long_one():
    short, long = (
        tables.table(name).split("\n\n")[0] for name in ("h200.short", "h200")
    )
    rows = [line[42:].split() for line in short.splitlines()[1:]]
    assert len(rows) == 6
    cells = [line.split() for line in long.splitlines()]
    for ms, by_hand, ratio, gigabytes, own in rows:
        assert [ms, ratio, gigabytes] in [row[-3:] for row in cells]
        assert [by_hand, "1.00", own] in [row[-3:] for row in cells]


def test_a_table_that_needs_a_gpu_shows_that_it_was_not_measured(tmp_path):
    assert tables.table("gpu", tmp_path) == "Not measured on a device yet."
    with pytest.raises(FileNotFoundError, match="insight"):
        tables.table("insight.watched", tmp_path)


def test_without_a_folder_nothing_is_written(tmp_path):
    write(None, "loss_scaling", stamp(), skipping=SKIPPING)
    write(tmp_path / "new", "loss_scaling", {"a": 1}, skipping=SKIPPING)
    written = json.loads((tmp_path / "new" / "loss_scaling.json").read_text())
    assert written == {"a": 1, "skipping": [SKIPPING[0]._asdict()]}
