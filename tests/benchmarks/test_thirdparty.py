"""The programs that others wrote: those whose packages the tests have."""

import json
import math

import jax.numpy as jnp
import pytest

from benchmarks.thirdparty import settings, tables
from benchmarks.thirdparty.__main__ import ENTRIES, chosen, main
from benchmarks.thirdparty.measure import Row, Trained, measure, train
from benchmarks.thirdparty.parts import layers, mlp, normal
from benchmarks.thirdparty.program import Entry, Program, cast_by_hand

pytestmark = pytest.mark.usefixtures("standard_promotion")


def regression():
    """A network of two layers, and the number of its rows."""

    def loss(params, batch):
        x, y = batch
        return ((mlp(params, x) - y) ** 2).mean(), jnp.arange(3)

    x = normal(0, 32, 8)
    return Program(loss, layers(1, 8, 16, 2), (x, x[:, :2]), learning_rate=1e-2)


SMALL = Entry("regression", ["optax"], regression)


def test_there_are_thirty_programs_of_fifteen_packages_each_with_its_own_name():
    names = [entry.name for entry in ENTRIES]
    packages = {package for entry in ENTRIES for package in entry.packages}
    assert len(names) == len(set(names)) >= 30
    assert len(packages) >= 15


def test_a_program_is_measured_in_both_dtypes():
    rows = measure(SMALL, runs=1)
    assert [row.dtype for row in rows] == ["bfloat16", "float16"]
    for row, bound in zip(rows, (0.02, 0.003), strict=True):
        assert (row.failure, row.is_finite, row.is_exact) == ("", True, True)
        assert 0 < row.error < bound
        assert 0 < row.by_hand < bound
        assert row.share == 1
        assert row.trace > 0
    assert [row.scale for row in rows] == [1.0, 2.0**15]


def test_a_failure_under_autocast_is_a_row_and_one_in_float32_is_an_error():
    def entry(loss):
        return Entry("e", [], lambda: Program(loss, normal(0, 4), normal(1, 4)))

    def broken(params, batch):
        raise TypeError("no such shape")

    fine = entry(lambda params, batch: ((params * batch).sum(), ()))
    (row,) = measure(fine, ["bfloat16"], runs=1)
    assert (row.failure, row.share) == ("", None)
    (row,) = measure(fine, ["int8"], runs=1)
    assert row.failure.startswith("ValueError: ")
    with pytest.raises(TypeError, match="no such shape"):
        measure(entry(broken), runs=1)
    with pytest.raises(ValueError, match="not finite in float32"):
        measure(entry(lambda params, batch: (params.sum() * math.nan, ())), runs=1)


def test_by_hand_casts_floats_alone():
    seen = {}

    def loss(params, batch):
        seen.update(params=params.dtype, batch=[x.dtype for x in batch])
        return params.sum(), ()

    value, _ = cast_by_hand(loss, "float16")(
        normal(0, 4), (normal(1, 4), jnp.arange(3))
    )
    assert (seen["params"], seen["batch"]) == ("float16", ["float16", "int32"])
    assert value.dtype == "float32"


def test_training_is_beside_float32_from_the_same_start():
    for dtype in ("bfloat16", "float16"):
        row = train(SMALL, dtype, steps=30)
        assert row.exact < 0.5 * row.start
        assert abs(row.low - row.exact) < 0.05 * row.start


def test_a_program_is_tried_under_every_setting():
    tried = settings.try_all(SMALL)
    assert [one.setting for one in tried] == list(settings.SETTINGS)
    outcomes = {one.outcome for one in tried}
    assert outcomes <= {"yes", settings.NOT_HERE}
    assert "yes" in outcomes


def test_tables_show_each_program_below_its_packages():
    good = Row(
        "p", "a 1.0, b 2.0", "bfloat16", "", True, 0.004, 0.5, True, 0.9, 1.5, True
    )
    rows = [good, good._replace(dtype="float16", error=0.2, by_hand=None, scale=512.0)]
    packages, line = tables.measured_table(rows).splitlines()[2:]
    assert packages == "a, b"
    assert line.split() == (
        ["p", "yes", "90%", "0.40", "50*", "20", "fails", "512", "1.5x"]
    )
    long = [row._replace(program="p" * 40) for row in rows]
    assert tables.measured_table(long).splitlines()[3:] == [
        "  " + "p" * 40,
        line.replace("p", " "),
    ]
    assert tables.packages_of(rows) == "a 1.0, b 2.0"
    bad = [good._replace(is_exact=False), rows[1]._replace(failure="TypeError: no")]
    table = tables.measured_table(bad)
    assert table.splitlines()[3].split()[1] == "no"
    assert "p: bfloat16: other integers than in float32" in table
    assert "p: float16: TypeError: no" in table
    assert tables.programs_list(rows) == "a, b\n  p"
    assert tables.programs_list(bad) == "a, b\n  p*"
    summary = [line.split() for line in tables.summary_table(rows).splitlines()]
    assert " ".join(summary[0][:-2]) == "1 programs, 1 of them of 2 packages"
    assert [line[-2:] for line in summary[1:]] == (
        [["1", "1"], ["0.40%", "20.00%"], ["1", "0"], ["1", "0"]]
    )
    trained = [Trained("p", d, 2.0, 1.0, low) for d, low in (("bfloat16", 1.1),)]
    assert tables.trained_table(trained).splitlines()[1].split() == (
        ["p", "2.0000", "1.0000", "1.1000", "-"]
    )
    tried = [
        settings.Tried("p", "x64", "yes", "1.0"),
        settings.Tried("p", "x64", settings.NOT_IN_FLOAT32, "2.0"),
    ]
    lines = tables.settings_table(tried).splitlines()
    assert [line.split() for line in lines] == (
        [["jax", "1.0", "p"], ["x64", "yes"], [], ["jax", "2.0", "p"], ["x64", "-"]]
    )
    of_two_words = [one._replace(program="a p") for one in tried]
    above, below = tables.settings_table(of_two_words).splitlines()[:2]
    assert above.split() == ["a"]
    assert below.split() == ["jax", "1.0", "p"]
    assert below.index("p") == above.index("a")


def test_an_unknown_program_is_an_error_that_names_it():
    with pytest.raises(SystemExit, match="No such program: GPT-5"):
        chosen(["GPT-5"])


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys):
    names = ["Hopfield network", "CTC"]
    run = ["--programs", *names, "--runs", "1", "--steps", "5", "--json", str(tmp_path)]
    main([*run, "--only", "measured", "trained"])
    printed = capsys.readouterr().out
    measured = json.loads((tmp_path / "thirdparty.json").read_text())["measured"]
    assert [row["program"] for row in measured] == ["CTC", "CTC", *[names[0]] * 2]
    trained = json.loads((tmp_path / "thirdparty_trained.json").read_text())["trained"]
    assert [row["program"] for row in trained] == ["CTC", "CTC"]
    assert "optax" in printed
    # One program is measured anew; the other's rows stay.
    main(["--programs", "CTC", *run[3:], "--only", "measured"])
    again = json.loads((tmp_path / "thirdparty.json").read_text())["measured"]
    assert [row["program"] for row in again] == [row["program"] for row in measured]
    assert again[2:] == measured[2:]


@pytest.mark.slow
@pytest.mark.parametrize("name", settings.PROGRAMS)
def test_programs_of_other_packages_run_with_small_errors(name):
    (entry,) = chosen([name])
    (row,) = measure(entry, ["bfloat16"], runs=1)
    assert (row.failure, row.is_finite, row.is_exact) == ("", True, True)
    assert row.error < 0.07
    if row.by_hand is not None and math.isfinite(row.by_hand):
        assert row.error < 1.6 * row.by_hand
    assert row.share > 0.1
