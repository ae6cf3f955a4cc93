"""The benchmark of number formats for moments."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import optimizer_peers
from benchmarks.moments import (
    E4M3,
    FORMATS,
    Compiled,
    Row,
    by_rows,
    compiled_table,
    dynamic_map,
    in_blocks,
    main,
    table,
    update_error,
)

X = jnp.abs(jnp.sin(jnp.arange(2.0 * 512))).reshape(2, 512) + 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_restores_what_it_stored_nearly(name):
    for form in FORMATS[name]:
        bits = jnp.full(X.shape, 2**31, jnp.uint32)
        stored = form.store(X, bits, form.scale(X))
        assert sum(x.nbytes for x in stored) < 1.1 * X.size
        np.testing.assert_allclose(form.restore(stored, X.shape), X, rtol=0.15)


def test_blocks_have_a_scale_each():
    rows = by_rows(E4M3)
    assert [form.scale(X).size for form in (rows, in_blocks(rows))] == [2, 4]


def test_the_dynamic_map_is_as_bitsandbytes_describes_it():
    for is_signed in (True, False):
        numbers = dynamic_map(is_signed)
        assert len(numbers) == 256
        assert numbers[-1] == 1
        assert 0 in numbers
    assert numbers.min() == 0
    assert dynamic_map(True)[0] == pytest.approx(-0.9930, abs=1e-4)


def test_squares_that_become_zero_show_in_the_error_of_the_update(standard_promotion):
    exact = FORMATS["float8 and 5+3 bits, rows"]
    assert 0 < update_error(*exact, 150) < 0.3
    assert update_error(*FORMATS["float8 for both, rows"], 150) > 10


def test_measured_numbers_are_written_and_shown(
    tmp_path, monkeypatch, capsys, standard_promotion
):
    names = [next(iter(FORMATS))]
    monkeypatch.setattr("benchmarks.moments.FORMATS", {n: FORMATS[n] for n in names})
    main(["--targets", "--steps", "120", "--json", str(tmp_path)])
    (row,) = json.loads((tmp_path / "moments.json").read_text())["formats"]
    assert names[0] in capsys.readouterr().out
    assert 0.01 < row["first"] < 0.3
    assert "22.00" in table([Row("a", 0.1, 0.2, {"h100": 22.0})])


def test_the_table_of_thirty_arrays_shows_ratios_to_the_optimizer_alone():
    rows = [
        Compiled("adamw alone", "one", 0.8, 32, 7.0),
        Compiled("bfloat16", "one", 2.0, 35, 5.0),
    ]
    *_, last = compiled_table(rows).splitlines()
    assert last.split() == ["bfloat16", "one", "2.0", "s", "2.5x", "35", "5.00"]


@pytest.mark.parametrize("name", ["jmp_lite, 16 bits", "jmp_lite, 8 bits"])
def test_steps_of_small_gradients_are_as_long_as_optax_s(name, standard_promotion):
    found = optimizer_peers.distances(name, n_steps=200)
    np.testing.assert_allclose(found, 1, atol=0.02)
