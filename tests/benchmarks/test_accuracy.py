"""The benchmark of accuracy: trainings, and their losses beside those of float32."""

import json

import jax
import numpy as np
import pytest

import jmp_lite as jmp
from benchmarks.accuracy import (
    PRESETS,
    TEST_MODULES,
    VARIANTS,
    Trained,
    main,
    read_text,
    summarize,
    table,
    train_all,
)
from jmp_lite.autocasting.rules.rules import is_identity

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_every_preset_is_trained_in_both_dtypes_beside_float32():
    float32, presets, others = 2, 2 * len(PRESETS), 4
    assert len(VARIANTS) == float32 + presets + others
    assert VARIANTS["float8"].rules == jmp.Rules().product(jmp.Float8(smallest=0))
    assert is_identity(VARIANTS["float32"].rules)
    assert VARIANTS["float16, O2"].rules.compute_dtype == np.float16
    state = VARIANTS["8-bit moments"].optimizer(1e-3).init(np.ones((64, 64), "f4"))
    assert state.inner_state[0].mu.dtype.name == "float8_e4m3fn"


def test_text_is_that_of_the_standard_library():
    text = bytes(read_text(TEST_MODULES))
    assert b"def copyfileobj(fsrc, fdst" in text
    assert max(text) < 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "steps", "by_chance"), [("digits", 20, 10), ("text", 40, 128)]
)
def test_a_training_learns_and_depends_on_its_seed_alone(model, steps, by_chance):
    with jax.numpy_dtype_promotion("standard"):
        some = train_all([model], ["float16, mixed"], 2, {model: steps})
        again = train_all([model], ["float16, mixed"], 1, {model: steps})
    assert some[0] == again[0]
    assert some[0].loss != some[1].loss
    assert all(row.accuracy > 2 / by_chance for row in some)
    assert [row.seed for row in some] == [0, 1]


def test_a_loss_is_compared_with_the_spread_of_float32_over_seeds():
    losses = {
        "float32": (1.0, 1.2, 1.4),
        "bfloat16, mixed": (1.5, 1.5, 1.5),
        "float16, O2": (1.7, 1.7, 1.7),
        "float16, O3": (1.0, 2.0, float("inf")),
    }
    rows = [
        Trained("text", variant, seed, loss, 0.5, seed)
        for variant, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    found = {row.variant: row for row in summarize(rows)}
    assert found["float32"].noise == pytest.approx(0)
    assert found["float32"].loss_deviation == pytest.approx(0.2)
    assert found["bfloat16, mixed"].noise == pytest.approx(1.5)
    assert found["bfloat16, mixed"].skipped == 1
    assert found["float16, O2"].noise == pytest.approx(2.5)
    lines = table([*found.values()]).splitlines()
    worse = [line[:18].strip() for line in lines if "worse than" in line]
    assert worse == ["float16, O2", "float16, O3"]


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    main(
        [
            *("--quick", "--models", "digits", "--variants", "bfloat16, mixed"),
            *("--seeds", "2", "--json", str(tmp_path)),
        ]
    )
    printed = capsys.readouterr().out
    assert "float32" in printed
    assert "bfloat16, mixed" in printed
    written = json.loads((tmp_path / "accuracy.json").read_text())
    assert (written["seeds"], list(written["steps"])) == (2, ["digits"])
    assert {row["variant"] for row in written["rows"]} == {"float32", "bfloat16, mixed"}
    assert {len(row["epochs"]) for row in written["rows"]} == {1}  # 21 steps of the 22.
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
