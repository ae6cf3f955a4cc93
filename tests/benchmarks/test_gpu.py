"""The script for a machine with a GPU runs on a CPU too, all of it and small."""

import json
import re

import jax
import pytest

from benchmarks import gpu, steps
from benchmarks.compiled import H100, missing

pytestmark = pytest.mark.usefixtures("standard_promotion")


TINY = ["--tiny", "--rounds", "2", "--steps", "1"]
TRANSFORMER, RESNET, LSTM = gpu.MODELS


def run(tmp_path, *options):
    gpu.main([*TINY, "--json", str(tmp_path), *options])
    return json.loads((tmp_path / "gpu.json").read_text())


def test_every_variant_of_a_model_trains_and_has_a_row(tmp_path, capsys):
    written = run(tmp_path, "--models", LSTM)
    out = capsys.readouterr().out
    assert [row["variant"] for row in written["rows"]] == list(gpu.VARIANTS)
    for row in written["rows"]:
        assert row["variant"] in out
        assert row["is_finite"]
        assert len(row["milliseconds"]) == 2
        assert row["memory"] > 0
        assert row["flops"] == written["rows"][0]["flops"] > 0
    assert written["device"] in out
    assert set(written["ceilings"]["flops"]) == set(gpu.PRODUCTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", [RESNET, TRANSFORMER])
def test_the_other_models_train_too(tmp_path, monkeypatch, model):
    names = (gpu.BASE, "bfloat16 by hand", "float16, autocast")
    monkeypatch.setattr(gpu, "VARIANTS", {name: gpu.VARIANTS[name] for name in names})
    written = run(tmp_path, "--models", model)
    assert [row["variant"] for row in written["rows"]] == list(names)
    assert all(row["is_finite"] for row in written["rows"])


@pytest.mark.slow
def test_a_model_or_a_variant_that_fails_leaves_the_others(
    tmp_path, monkeypatch, capsys
):
    def fails(*args, **kwargs):
        raise RuntimeError("out of memory")

    broken = gpu.TINY[TRANSFORMER]._replace(make=fails)
    monkeypatch.setitem(gpu.TINY, TRANSFORMER, broken)
    of_variant = gpu.VARIANTS["bfloat16 by hand"]._replace(loss=fails)
    monkeypatch.setitem(gpu.VARIANTS, "bfloat16 by hand", of_variant)
    written = run(tmp_path, "--models", TRANSFORMER, LSTM)
    names = [row["variant"] for row in written["rows"]]
    assert names == [name for name in gpu.VARIANTS if name != "bfloat16 by hand"]
    assert {row["model"] for row in written["rows"]} == {LSTM}
    assert "out of memory" in capsys.readouterr().err


def test_without_time_nothing_is_measured(tmp_path):
    assert run(tmp_path, "--models", LSTM, "--minutes", "0")["rows"] == []


def test_the_variants_are_what_their_names_say():
    for name, variant in gpu.VARIANTS.items():
        step, *shapes = gpu.step_and_shapes(variant, gpu.TINY[LSTM], 2)
        text = str(jax.make_jaxpr(step)(*shapes))
        dtype = {"b": "bf16", "f": "f16"}[name[0]] if "16" in name else "f32"
        products = [line for line in text.splitlines() if "= dot_general" in line]
        assert products
        assert any(f":{dtype}[" in line for line in products), name
        low = any(":bf16[" in line or ":f16[" in line for line in products)
        assert low == (dtype != "f32")
        assert ("HIGHEST" in text) == (name == "float32 highest")
        assert bool(re.search(r"= lt \w+ inf", text)) == variant.is_scaled


def test_the_largest_batch_fills_the_memory(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000}

    monkeypatch.setattr(gpu.jax, "devices", lambda: [Device()])
    assert gpu.largest_batch(small=140, large=180, batch=4) == 90  # 100 + 10 each.
    assert gpu.largest_batch(small=140, large=140, batch=4) is None


def test_ceilings_replace_those_of_the_data_sheet():
    flops = {name: float(i) for i, name in enumerate(gpu.PRODUCTS, 1)}
    target = gpu.Ceilings(flops, 7.0).target()
    assert target.bandwidth == 7.0
    assert target.flops["f32", "highest"] == 1.0
    assert target.flops["bf16", "default"] == 3.0
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
