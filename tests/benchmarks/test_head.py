"""The benchmark of the head of a language model, by loss and by format."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import head
from benchmarks.compiled import missing
from benchmarks.head import Accuracy, OfLoss, OfModel, OfTail

pytestmark = [pytest.mark.benchmarks, pytest.mark.usefixtures("standard_promotion")]


def test_tables_show_the_numbers_that_were_measured():
    loss = OfLoss("optax", 1, 4.0, 5.0, 3.0, 2.0, 1.0)
    cells = ["optax", "1", "4.00", "5.00", "3.00", "0.75", "0.50"]
    assert head.losses_table([loss]).splitlines()[-1].split() == cells
    assert head.losses_table([loss._replace(found=0)]).split()[-6] == "optax"
    hand = OfModel("h100", "optax", "by hand", 4.0, 2.0, 8.0)
    mixed = hand._replace(variant="mixed", moved=3.0, roofline=1.0, peak=4.0)
    lines = head.models_table([hand, mixed, hand._replace(target="v5e")]).splitlines()
    assert lines[2].split() == [
        "mixed",
        "3.00",
        "(0.75)",
        "1.00",
        "(0.50)",
        "4.00",
        "(0.50)",
    ]
    assert [line.split(",")[0] for line in lines if "GB peak" in line] == ["optax"] * 2
    (cells,) = head.accuracy_table([Accuracy("wide", 0.01, 1, 2)]).splitlines()[1:]
    assert cells.split() == ["wide", "0.0100", "1.00", "2.00"]
    tail = OfTail("mlp", "add", 1.05, 1.0, 1e-3, 2e-3, 0.01, 0.02)
    cells = head.tails_table([tail]).splitlines()[-1].split()
    assert cells == ["mlp", "1.05", "1.00", "1e-03", "2e-03", "0.0100", "0.0200", "add"]


def test_float32_logits_have_a_smaller_error():
    mixed, wide = head.accuracies(1, rows=128, width=32, vocabulary=256)
    assert (mixed.variant, wide.variant) == ("mixed", "wide")
    assert 0 < wide.error < 0.7 * mixed.error < 0.05


ENTROPIES = [
    name
    for name in head.LOSSES
    if not any(word in name for word in ("q[", "z-loss", "smoothed", "focal", "poly"))
]


@pytest.mark.parametrize("name", ENTROPIES)
def test_each_loss_is_the_cross_entropy(name):
    logits = jnp.log(jnp.arange(1.0, 25).reshape(2, 3, 4))
    labels = jnp.array([[0, 1, 2], [3, 2, 1]])
    shares = [[1 / 10, 6 / 26, 11 / 42], [16 / 58, 19 / 74, 22 / 90]]
    losses = head.LOSSES[name](logits, labels)
    np.testing.assert_allclose(losses, -np.log(shares), rtol=1e-5)


@pytest.mark.targets
def test_the_pass_saves_bytes_where_it_finds_a_gather(tmp_path, monkeypatch):
    for target in ("h100", "v5e"):
        if missing(target):
            pytest.skip(missing(target))
    found = head.of_loss("optax, integer labels", (4, 256), 64, 4096)
    assert found.found == 1
    assert found.moved < 0.75 * found.hand < 0.76 * found.without
    same = head.of_loss("one_hot (Flax, Keras)", (4, 256), 64, 4096)
    assert (same.found, same.moved) == (0, same.without)
    monkeypatch.setattr(head, "OF_MODEL", head.OF_MODEL[:1])
    options = ["--tiny", "--seeds", "1", "--targets", "h100"]
    options += ["--losses", "focal loss", "--tails", "--json", str(tmp_path)]
    head.main(options)
    written = json.loads((tmp_path / "head.json").read_text())
    assert [row["loss"] for row in written["losses"]] == ["focal loss"]
    assert len(written["models"]) == 1 + len(head.RULES)
