"""The calls that one product makes, from plan to bind: a number that only falls."""

import sys

import pytest

from benchmarks import tracing


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="A comprehension is no call since 3.12."
)
def test_a_product_makes_no_more_calls_than_before():
    found = tracing.calls_of_one_product()
    assert 0 < sum(found.values()) <= 275
    assert len({file for file, _ in found}) <= 21
    assert found["autocasting/walk.py", "_equation"] == 1


def test_each_way_of_tracing_takes_time():
    assert min(tracing.times(rounds=1).values()) > 0
