"""The script for a machine with a GPU runs on a CPU too, all of it and small."""

import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu, steps, training_steps
from benchmarks.compiled import H100, missing

pytestmark = pytest.mark.usefixtures("standard_promotion")

LSTM = "LSTM, 1024 wide"
EVERY_PART = ["--parts", *gpu.PARTS]


def run(tmp_path, *options):
    gpu.main(["--tiny", "--rounds", "2", "--json", str(tmp_path), *options])
    return json.loads((tmp_path / "gpu.json").read_text())


def test_a_part_has_a_row_for_each_case_and_a_profile(tmp_path, capsys):
    options = ["--parts", "attention", "--profile", "attention"]
    written = run(tmp_path, *options)
    out = capsys.readouterr().out
    names = list(gpu.PARTS["attention"].cases(True))
    assert [row["case"] for row in written["rows"]] == names
    for row in written["rows"]:
        assert row["case"] in out
        assert row["is_finite"]
        assert len(row["milliseconds"]) == 2
        assert row["memory"] > 0
        assert row["compiling"] > 0
    assert written["device"] in out
    assert set(written["ceilings"]["flops"]) == set(gpu.PRODUCTS)
    kernels = re.findall(r"^ +[\d.]+ +([\d.]+) +-?[\d.]+  [\w.]+$", out, re.MULTILINE)
    assert any(float(least) > 0 for least in kernels)


@pytest.mark.slow
def test_every_part_runs(tmp_path):
    written = run(tmp_path, *EVERY_PART)
    found = [(row["part"], row["case"]) for row in written["rows"]]
    expected = [(n, case) for n, part in gpu.PARTS.items() for case in part.cases(True)]
    assert found == expected
    assert all(row["is_finite"] for row in written["rows"])


def test_all_parts_take_eight_minutes_at_most():
    # The ceilings take half a minute.
    assert sum(part.seconds for part in gpu.PARTS.values()) + 30 <= 8 * 60


def test_a_case_that_fails_or_is_too_late_leaves_the_others(capsys):
    def fails(state, batch):
        raise RuntimeError("out of memory")

    def slow(state, batch):
        time.sleep(3)  # While it is traced.
        return state + batch, state[0]

    array = jax.ShapeDtypeStruct((4,), jnp.float32)
    steps = {"good": lambda state, batch: (state + batch, state[0])}
    steps |= {"bad": fails, "late": slow}
    cases = {
        name: gpu.Case(step, lambda: jnp.ones(4), array, {})
        for name, step in steps.items()
    }
    settings = gpu.Settings(time.perf_counter() + 2, 0.5, 2, 0.001)
    device = gpu.Ceilings({"bfloat16": 1e12}, 1e12)
    (row,) = gpu.measure("a part", cases, device, settings)
    assert row.case == "good"
    err = capsys.readouterr().err
    assert "out of memory" in err
    assert "late: left out" in err


def test_the_variants_are_what_their_names_say():
    for name, variant in training_steps.VARIANTS.items():
        size = training_steps.TINY[LSTM]
        step, *shapes = training_steps.step_and_shapes(variant, size, 2)
        text = str(jax.make_jaxpr(step)(*shapes))
        dtype = {"b": "bf16", "f": "f16"}[name[0]] if "16" in name else "f32"
        products = [line for line in text.splitlines() if "= dot_general" in line]
        assert products
        assert any(f":{dtype}[" in line for line in products), name
        low = any(":bf16[" in line or ":f16[" in line for line in products)
        assert low == (dtype != "f32")
        assert ("HIGHEST" in text) == (name == "float32 highest")
        assert bool(re.search(r"= lt \w+ inf", text)) == variant.is_scaled


def test_the_formats_at_full_size_are_in_the_programs():
    for name in ("float8", "float8_rows", "int8"):
        case = gpu.PARTS["mlp"].cases(False)[name]
        state = jax.eval_shape(case.state)
        text = str(jax.make_jaxpr(case.step)(state, case.batch))
        assert {"float8": "f8_e4m3fn", "int8": "int8"}.get(
            name, "float8_e4m3fn"
        ) in text


def test_ceilings_replace_those_of_the_data_sheet():
    flops = {name: float(i) for i, name in enumerate(gpu.PRODUCTS, 1)}
    target = gpu.Ceilings(flops, 7.0).target()
    assert target.bandwidth == 7.0
    assert target.flops["bf16", "default"] == 1.0
    assert target.flops["f8", "highest"] == 6.0
    assert target.flops["f64", "default"] == H100.flops["f64", "default"]


@pytest.mark.targets
def test_steps_are_predicted_for_an_h100(tmp_path, capsys):
    if missing(steps.TARGET):
        pytest.skip(missing(steps.TARGET))
    variants = ["float32 highest", "float32 default", "bfloat16, autocast"]
    options = ["--tiny", "--models", LSTM, "--variants", *variants]
    steps.main([*options, "--json", str(tmp_path)])
    written = json.loads((tmp_path / "steps.json").read_text())
    assert [row["variant"] for row in written["rows"]] == variants
    assert all(row["roofline"] > 0 for row in written["rows"])
    assert LSTM in capsys.readouterr().out
