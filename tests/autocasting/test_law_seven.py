"""Law 7: what "O1" keeps, "mixed" keeps."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import law_seven
import pytest

SCRIPT = pathlib.Path(law_seven.__file__)


@functools.cache
def errors():
    """Returns the errors of all programs, without excess precision."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", law_seven.LIMITS)
@pytest.mark.parametrize(
    "name", [name for name in law_seven.PROGRAMS if name not in law_seven.SHIFTS]
)
def test_errors_are_at_most_three_times_those_of_o1(name, dtype):
    mixed, o1 = errors()[name][dtype]
    assert mixed <= 3 * o1 + law_seven.LIMITS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", law_seven.SHIFTS)
def test_shifts_are_known_to_lose_more(name):
    """Not yet mended: a program that no longer breaks the law leaves this list."""
    broken = [
        mixed > 3 * o1 + law_seven.LIMITS[dtype]
        for dtype, (mixed, o1) in errors()[name].items()
    ]
    assert any(broken)


QUICK = ["gates", "residual", "a stack", "phases", "safe_norm"]


@pytest.mark.parametrize("name", QUICK)
def test_so_they_are_as_users_run_them(name):
    for dtype, (mixed, o1) in law_seven.errors(name).items():
        assert mixed <= 3 * o1 + law_seven.LIMITS[dtype]
