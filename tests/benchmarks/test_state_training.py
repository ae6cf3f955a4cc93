"""The benchmark of trainings with optimizer state in few bits."""

import itertools
import json
import pathlib

import pytest

from benchmarks.state_training import (
    BEFORE,
    DTYPES,
    OPTIMIZERS,
    Row,
    main,
    measure,
    optimizer_of,
    table,
    trained,
)

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_state_in_few_bits_trains_as_well_as_in_float32():
    row = measure("clip", "adam", steps=100)
    losses = dict(row.loss)
    assert losses.pop("float16") is None
    assert losses.keys() == {"bfloat16", "float8_e4m3fn"}
    for loss in losses.values():
        assert loss == pytest.approx(row.float32, rel=0.2)


def bad(row):
    """Returns the dtypes that end with twice the loss of float32 state."""
    return {
        dtype
        for dtype, loss in row.loss.items()
        if loss is not None and not loss < 2 * row.float32
    }


# Each optimizer, and each transformation before one. All pairs are in the results.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("clip", "adam"),
        ("L2 penalty", "adamw"),
        ("noise", "lion"),
        ("nothing", "rmsprop"),
        ("centralize", "adafactor"),
        ("clip", "muon"),
    ],
)
def test_no_dtype_ends_with_twice_the_loss_of_float32_state(before, name):
    assert not bad(measure(before, name))


def test_the_results_have_all_pairs_and_one_that_trains_worse():
    results = json.loads((RESULTS / "state_training.json").read_text())
    rows = {(row["before"], row["optimizer"]): Row(**row) for row in results["rows"]}
    assert set(rows) == set(itertools.product(BEFORE, OPTIMIZERS))
    # A centred gradient has no part along ones. Muon makes all singular values alike,
    # and so enlarges the rounding error of this part.
    enlarged = {("centralize", "muon"): {"bfloat16", "float8_e4m3fn"}}
    assert {pair: bad(row) for pair, row in rows.items() if bad(row)} == enlarged


def test_the_loss_falls_as_far_with_small_gradients():
    optimizer = optimizer_of("nothing", "adam", 60)
    assert trained(optimizer, 60, 2.0**-4) == pytest.approx(
        trained(optimizer, 60), rel=1e-2
    )


def test_losses_are_written_and_shown(tmp_path, capsys):
    options = ["--before", "nothing", "--optimizers", "lion", "--steps", "3"]
    main([*options, "--json", str(tmp_path)])
    (row,) = json.loads((tmp_path / "state_training.json").read_text())["rows"]
    assert list(row["loss"]) == list(DTYPES)
    assert "nothing, lion" in capsys.readouterr().out
    refused = Row("clip", "adam", 1e-3, {"bfloat16": 2e-3, "float16": None})
    assert table([refused]).splitlines()[1].split()[2:] == [
        "1.0e-03",
        "2.00",
        "refused",
    ]
