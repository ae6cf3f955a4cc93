"""The benchmark of optimizer state in few bits trains with what it names."""

import json

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

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_state_in_few_bits_trains_as_well_as_in_float32():
    row = measure("clip", "adam", steps=100)
    losses = dict(row.loss)
    assert losses.pop("float16") is None
    assert losses.keys() == {"bfloat16", "float8_e4m3fn"}
    for loss in losses.values():
        assert loss == pytest.approx(row.float32, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", BEFORE)
def test_no_dtype_ends_with_twice_the_loss_of_float32_state(before, name):
    row = measure(before, name)
    for dtype, loss in row.loss.items():
        # A centred gradient has no part along ones. Muon makes all singular values
        # alike, and so enlarges the rounding error of this part.
        is_enlarged = (before, name) == ("centralize", "muon") and dtype != "float16"
        assert loss is None or (loss < 2 * row.float32) != is_enlarged


def test_the_loss_falls_as_far_with_small_gradients():
    optimizer = optimizer_of("nothing", "adam", 60)
    assert trained(optimizer, 60, 2.0**-4) == pytest.approx(
        trained(optimizer, 60), rel=1e-2
    )


def test_what_is_trained_is_written_and_shown(tmp_path, capsys):
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
