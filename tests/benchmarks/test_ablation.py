"""What is lost without a rule or a feature: the lints."""

import json

import pytest

from benchmarks.ablation import lints
from benchmarks.tables import RESULTS


def test_the_counts_are_of_all_programs():
    results = json.loads((RESULTS / "lints.json").read_text())
    assert results["read"] > 200
    assert results["failed"] == 0
    hits = [lints.Hits(**row) for row in results["hits"]]
    assert all(hit.programs for hit in hits)
    counts = [hit.programs for hit in hits]
    assert counts == sorted(counts, reverse=True)
    assert lints.table(hits).splitlines()[1].split()[:4] == [
        "no",
        "loss",
        "scale",
        "232",
    ]


@pytest.mark.slow
def test_programs_are_read_and_their_lints_counted(monkeypatch):
    every = [*lints._programs()]
    assert len(every) == 238
    few = [pair for pair in every if pair[0] in ("InfoNCE", "ArcFace")]
    monkeypatch.setattr(lints, "_programs", lambda: iter(few))
    hits, read, failed = lints.measure()
    assert (read, failed) == (2, 0)
    assert lints.Hits("no loss scale", 2, "InfoNCE") in hits
