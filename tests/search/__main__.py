"""Draws many programs, and prints the simplest one that breaks law 7.

python -m search 10000 --seed 0           # In the folder of the tests.
python -m search 10000 --seed 0 --all     # Each of them as it is drawn.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings

from search import known
from search.law import breach
from search.programs import Program, programs


def run(n: int, start: int, *, shows_all: bool = False) -> int:
    """Draws programs, and returns how many break the law outside of the known kinds.

    Args:
      n: how many to draw.
      start: the seed.
      shows_all: whether to print each breach and go on. If not, the first one is
        simplified, and raises an AssertionError.
    """
    phases = [Phase.generate] if shows_all else [Phase.generate, Phase.shrink]
    found = drawn = 0

    @seed(start)
    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(programs())
    def check(program: Program) -> None:
        nonlocal found, drawn
        drawn += 1
        if drawn % 250 == 0:
            jax.clear_caches()  # Each program leaves its traces.
        broken = breach(program)
        kind = known.kind_of(program) if broken else None
        if not broken or (kind and not shows_all):
            return
        found += kind is None
        errors = {name: f"{e.mixed:.2%}, O1 {e.o1:.2%}" for name, e in broken.items()}
        text = f"{program!r}\n  mixed {errors}, known: {kind and kind.reason}"
        if not shows_all:
            raise AssertionError(text)
        print(text, flush=True)

    check()
    print(f"{drawn} programs with seed {start}: {found} new kinds", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the search, and returns an exit status."""
    parser = argparse.ArgumentParser("python -m search", description=__doc__)
    parser.add_argument("n", type=int, help="how many programs to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="go on after a breach")
    options = parser.parse_args(argv)
    return int(run(options.n, options.seed, shows_all=options.all) > 0)


if __name__ == "__main__":
    sys.exit(main())
