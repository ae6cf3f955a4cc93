"""Which number format gains how much on which chip."""

import json

import pytest

from benchmarks import formats
from benchmarks.compiled import missing
from benchmarks.formats import OnChip


@pytest.mark.benchmarks
def test_the_table_has_ratios_to_16_bits():
    rows = [
        OnChip(chip, 64, name, cost, 1.0, 1.0)
        for chip in ("h100", "v5e")
        for name, cost in zip(formats.FORMATS, (4.0, 2.0, 3.0, 1.0), strict=True)
    ]
    h100, v5e = formats.table(rows).splitlines()[1:]
    assert h100.split() == ["h100", "64", "4.0", "ms", "0.50", "0.75", "0.25"]
    assert v5e.split() == ["v5e", "64", "4.0", "M", "cycles", "0.50", "0.75", "0.25"]


@pytest.mark.targets
def test_chips_of_two_kinds_are_compiled_for_in_one_process(tmp_path):
    for chip in ("h100", "v6e"):
        if missing(chip):
            pytest.skip(missing(chip))
    options = ["--chips", "h100", "v6e", "--widths", "256", "--tokens", "256"]
    formats.main([*options, "--json", str(tmp_path)])
    rows = json.loads((tmp_path / "formats.json").read_text())["rows"]
    assert [row["number_format"] for row in rows] == [*formats.FORMATS] * 2
    assert all(row["cost"] > 0 for row in rows)


@pytest.mark.targets
def test_int8_products_take_fewer_cycles_on_a_v5e():
    """At width 4,096, with all that rounds the operands; not at 2,048."""
    if missing("v5e"):
        pytest.skip(missing("v5e"))
    low, int8 = (formats.measure("v5e", 4096, name) for name in ("mixed", "int8"))
    assert int8.cost < 0.75 * low.cost


@pytest.mark.targets
@pytest.mark.parametrize("name", ["int8", "float8_rows"])
def test_every_product_of_a_block_has_a_kernel_of_8_bits_on_an_h100(name):
    if missing("h100"):
        pytest.skip(missing("h100"))
    program = formats.compile_gradient("h100", 256, name, 256)
    short = "s8" if name == "int8" else "f8"
    eight = sum(n for kind, n in program.matmuls.items() if kind.startswith(short))
    # All but those of the head, and no gradient of the input.
    assert (eight, sum(program.matmuls.values())) == (11, 14)
