"""The training of 16-bit parameters in each wrapper, and the warning about it."""

import json
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import jmp_lite as jmp
from benchmarks.tables import RESULTS
from benchmarks.wrapped_training import OPTIMIZERS, WRAPPERS, Row, main, measure

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
def test_mechanize_trains_with_a_wrapper_that_adds_no_noise():
    loss = measure("mechanize(sgd)").loss
    assert loss["stochastic"] > 3 * loss["float32"]
    for kind in WRAPPERS.keys() - {"stochastic"}:
        assert loss[kind] == pytest.approx(loss["float32"], rel=0.05), kind


def test_the_results_have_one_kind_that_does_not_train():
    results = json.loads((RESULTS / "wrapped_training.json").read_text())
    rows = [Row(**row) for row in results["rows"]]
    assert [row.optimizer for row in rows] == [*OPTIMIZERS]
    bad = [
        (row.optimizer, kind)
        for row in rows
        for kind, loss in row.loss.items()
        if loss > 2 * row.loss["float32"] + 0.01
    ]
    assert bad == [("mechanize(sgd)", "stochastic"), ("mechanize(adam)", "stochastic")]


def test_losses_are_written_and_shown(tmp_path, capsys):
    main(["--optimizers", "sgd", "--steps", "3", "--json", str(tmp_path)])
    (row,) = json.loads((tmp_path / "wrapped_training.json").read_text())["rows"]
    assert list(row["loss"]) == list(WRAPPERS)
    assert "sgd" in capsys.readouterr().out


WARNED = {
    "mechanize": ("MechanicState", lambda: contrib.mechanize(optax.sgd(0.1))),
    "dog, chained": (
        "DoGState",
        lambda: optax.chain(optax.clip(1.0), contrib.dog(1.0)),
    ),
    "dowg": ("DoWGState", lambda: contrib.dowg(1.0)),
    "by distance": (
        "ScaleByDistanceOverGradientsState",
        lambda: optax.scale_by_distance_over_gradients(),
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_stochastic_rounding_warns_of_optimizers_that_measure_distances(name):
    state, make = WARNED[name]
    params = jnp.ones(4, "bfloat16")
    optimizer = jmp.stochastic_rounding(make(), jax.random.key(0))
    with pytest.warns(
        UserWarning, match=rf"\({state}\).*jmp_lite\.compensated"
    ) as all_:
        optimizer.init(params)
    assert len(all_) == 1
    assert all_[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.compensated(make()).init(params)
        for other in ("adam", "prodigy", "dadapt_adamw", "cocob"):
            jmp.stochastic_rounding(OPTIMIZERS[other](), jax.random.key(0)).init(params)
