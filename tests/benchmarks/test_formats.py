"""The costs of number formats in compiled programs, and the losses of trainings."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from benchmarks.compiled import compile_for, missing
from benchmarks.formats import __main__ as every
from benchmarks.formats import (
    chips,
    experts,
    flax_modules,
    outliers,
    recipes,
    training,
    transformers,
    wire,
)
from benchmarks.formats.chips import OnChip
from benchmarks.formats.experts import Mixture
from benchmarks.formats.training import Task, Trained
from benchmarks.formats.transformers import Compared
from benchmarks.formats.wire import Sent

pytestmark = pytest.mark.usefixtures("standard_promotion")

COMPARED = Compared("4 blocks, scan", "h100", 64, 32, 2000, 0.9, 0.8, 0.7, 1.5, 0.75)


@pytest.mark.benchmarks
def test_the_table_of_chips_has_ratios_to_16_bits():
    rows = [
        OnChip(chip, 64, name, cost, 1.0, 1.0)
        for chip in ("h100", "v5e")
        for name, cost in zip(chips.FORMATS, (4.0, 2.0, 3.0, 1.0), strict=True)
    ]
    h100, v5e = chips.table(rows).splitlines()[1:]
    assert h100.split() == ["h100", "64", "4.0", "ms", "0.50", "0.75", "0.25"]
    assert v5e.split() == ["v5e", "64", "4.0", "M", "cycles", "0.50", "0.75", "0.25"]


@pytest.mark.benchmarks
def test_tables_show_the_numbers_that_were_measured():
    wider = COMPARED._replace(width=128)
    shared, _, cells, _ = transformers.models_table([COMPARED, wider]).splitlines()
    assert shared == "target h100, length 32, smallest 2000:"
    ratios = ("0.90", "0.80", "0.70", "1.50")
    assert cells.split()[3:] == ["64", *ratios, "75%"]
    sent = Sent("FSDP", "float8", 1.5, 0.25, {"bf16": 10.0, "f8e4m3fn": 5.0})
    (_, line) = wire.sent_table([sent]).splitlines()
    assert line.split()[-6:] == ["1.50", "15", "10", "bf16,", "5", "f8e4m3fn"]


@pytest.mark.benchmarks
def test_experts_are_relative_to_a_batch_in_16_bits():
    rows = [
        Mixture(chip, 8, 16, variant, cost, 2 * (chip == "v5e" and cost > 4))
        for chip in ("h100", "v5e")
        for variant, cost in zip(experts.VARIANTS, (2, 1, 3, 4, 8), strict=True)
    ]
    lines = experts.mixtures_table(rows).splitlines()
    assert lines[0].split() == ["8", "experts", "h100", "v5e"]
    assert lines[1].split() == ["width", "16", "16"]
    assert lines[3].split() == ["batch,", "float8", "0.50", "0.50"]
    assert lines[-1].split() == ["groups,", "mixed", "4.00", "4.00*"]


@pytest.mark.targets
def test_groups_take_longer_than_a_batch_of_the_same_rows_on_an_h100():
    if missing("h100"):
        pytest.skip(missing("h100"))
    batch, groups = (
        experts.measure_mixture("h100", 256, 256, variant)
        for variant in ("mixed", "groups, mixed")
    )
    # XLA multiplies all rows with the weights of all groups.
    assert groups.cost > 2 * batch.cost


@pytest.mark.targets
def test_groups_compile_for_a_tpu_in_float16_only_if_they_are_float32():
    """This is a limit of libtpu for jax 0.10; the page on formats mentions it."""
    if missing("v5e"):
        pytest.skip(missing("v5e"))
    shapes = (512, 256), (4, 256, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def product(x, w, sizes):
        return jax.lax.ragged_dot(jnp.tanh(x), w, sizes)

    rules = jmp.get_rules("mixed", "float16")
    with pytest.raises(Exception, match="Mosaic failed to compile"):
        compile_for("v5e", jmp.autocast(product, rules), *arrays, sizes)
    in_full = rules.full("ragged_dot_general")
    compile_for("v5e", jmp.autocast(product, in_full), *arrays, sizes)


@pytest.mark.targets
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
def test_one_of_flaxs_modules_is_float8_with_the_default_flags():
    if missing("h100"):
        pytest.skip(missing("h100"))
    found = [
        flax_modules.measure(variant, width=2048, rows=4096)
        for variant in flax_modules.VARIANTS
    ]
    assert {row.products for row in found} == {11}
    assert [row.in_float8 for row in found] == [0, 0, 11, 8, 11]


@pytest.mark.benchmarks
def test_a_large_channel_costs_digits_in_int8_alone():
    errors = {
        name: [row.error for row in outliers.measure_outliers(name, width=64)]
        for name in ("mixed", "float8", "int8")
    }
    for name in ("mixed", "float8"):
        np.testing.assert_allclose(errors[name], errors[name][0], rtol=0.1)
    assert errors["mixed"][0] < errors["int8"][0] < errors["float8"][0] / 2
    assert errors["int8"][0] < errors["int8"][2] < errors["int8"][4]
    assert errors["int8"][4] > 5 * errors["float8"][4]


@pytest.mark.benchmarks
def test_gaps_are_to_float32_of_the_same_seed():
    rows = [
        Trained(64, "float32", 0, 0.0, 2.0),
        Trained(64, "float32", 1, 0.0, 3.0),
        Trained(64, "float8", 0, 0.1, 2.5),
        Trained(64, "float8", 1, 0.3, 3.1),
    ]
    cells = training.trained_table(rows).splitlines()[-1].split()
    assert cells == [
        *("64", "float8", "0.2000", "2.8000"),
        *("+0.5000", "+0.1000", "+0.3000"),
    ]


@pytest.mark.slow
def test_a_small_training_has_small_errors():
    rows = {row.rules: row for row in training.train(Task(32, 16, 1e-2), 0, steps=20)}
    assert rows["float32"].error == 0
    assert rows["mixed"].error < rows["int8"].error < rows["float8"].error < 0.2
    # Powers of two as scales change a digit only where numbers are too small.
    by_rows = rows["float8_rows, e5m2"].error
    assert by_rows == pytest.approx(rows["float8"].error, rel=0.05)
    assert rows["float8_rows"].error < by_rows
    for row in rows.values():
        assert row.loss == pytest.approx(rows["float32"].loss, abs=0.1)


@pytest.mark.targets
def test_the_tables_are_written_and_drawn(tmp_path, monkeypatch):
    for chip in ("h100", "v6e"):
        if missing(chip):
            pytest.skip(missing(chip))
    monkeypatch.setattr(transformers, "MODELS", ())
    monkeypatch.setattr(recipes, "RECIPES", {"mixed": recipes.RECIPES["mixed"]})
    monkeypatch.setattr(recipes, "STACKED", {})
    monkeypatch.setattr(training, "TASKS", (Task(32, 16, 1e-2),))
    monkeypatch.setattr(wire, "CASES", ())
    monkeypatch.setattr(experts, "CHIPS", ())
    monkeypatch.setattr(flax_modules, "VARIANTS", {})
    monkeypatch.setattr(outliers, "FACTORS", (1,))
    # Chips of two kinds, in one process.
    small = ["--chips", "h100", "v6e", "--sizes", "256", "--tokens", "256"]
    options = ["--widths", "128", "--lengths", "--seeds", "1", "--steps", "10"]
    out = ["--json", str(tmp_path), "--picture", str(tmp_path)]
    every.main([*small, *options, *out])
    written = json.loads((tmp_path / "formats.json").read_text())
    assert [row["width"] for row in written["widths"]] == [128]
    assert 0 < written["widths"][0]["share"] < 1
    assert (tmp_path / "float8.png").stat().st_size > 10_000
    assert [row["number_format"] for row in written["chips"]] == [*chips.FORMATS] * 2
    assert all(row["cost"] > 0 for row in written["chips"])


@pytest.mark.targets
@pytest.mark.parametrize(
    ("chip", "width", "name", "bound"),
    [
        ("v5e", 4096, "int8", 0.64),
        ("v5e", 4096, "float8", 0.64),
        ("tpu7x", 2048, "float8", 0.61),
    ],
)
def test_8_bits_take_fewer_cycles_on_a_tpu(chip, width, name, bound):
    """With all that rounds the operands; at twice the width a v7x takes 0.42."""
    if missing(chip):
        pytest.skip(missing(chip))
    low, rounded = (
        chips.compile_gradient(chip, width, each, blocks=1) for each in ("mixed", name)
    )
    assert rounded.cycles < bound * low.cycles


@pytest.mark.targets
@pytest.mark.parametrize("name", ["int8", "float8_rows"])
def test_every_product_of_a_block_has_a_kernel_of_8_bits_on_an_h100(name):
    if missing("h100"):
        pytest.skip(missing("h100"))
    program = chips.compile_gradient("h100", 256, name, 256)
    short = "s8" if name == "int8" else "f8"
    eight = sum(n for kind, n in program.matmuls.items() if kind.startswith(short))
    # All but those of the head, and no gradient of the input.
    assert (eight, sum(program.matmuls.values())) == (11, 14)


@pytest.mark.targets
def test_block_scaled_products_have_kernels_on_a_b200_and_none_on_an_h100():
    if missing("b200"):
        pytest.skip(missing("b200"))
    of_b200, of_h100 = (recipes.measure_recipe("mxfp8", at) for at in ("b200", "h100"))
    assert (of_b200.products, of_h100.products) == (11, 0)
    assert of_b200.milliseconds < recipes.measure_recipe("mixed", "b200").milliseconds


@pytest.mark.targets
def test_the_recipe_for_mxfp8_multiplies_blocks_on_a_b200(monkeypatch):
    if missing("b200"):
        pytest.skip(missing("b200"))
    text = (pathlib.Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    names = {"jax": jax, "jnp": jnp, "jmp": jmp}
    exec(re.search(r"```python\n(def mxfp8.*?)```", text, re.DOTALL)[1], names)
    loss = jmp.autocast(recipes.mlp(jnp.dot), names["in_blocks"])
    monkeypatch.setitem(recipes.RECIPES, "recipe", loss)
    found = recipes.measure_recipe("recipe", "b200")
    assert found.products == 14
    mixed = recipes.measure_recipe("mixed", "b200")
    assert found.milliseconds / mixed.milliseconds == pytest.approx(0.87, abs=0.02)


@pytest.mark.targets
@pytest.mark.parametrize("name", ["float8", "float8_rows"])
def test_split_weights_travel_in_one_byte_in_both_passes(name):
    if missing("h100"):
        pytest.skip(missing("h100"))
    size = {"width": 512, "depth": 2, "rows": 8192}
    program = wire.compile_scan(chips.FORMATS[name], True, **size)
    n_weights = 2 * 2 * 512 * 2048
    sent = program.collectives
    # Gathered forward, and again backward; ``up`` twice there (jax 0.10).
    assert sent["f8e4m3fn"] == pytest.approx(2.5 * n_weights, rel=0.3)
    # The gradients of the weights.
    assert sent["bf16"] == pytest.approx(2 * n_weights, rel=0.1)
