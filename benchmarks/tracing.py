"""What autocast costs while JAX traces: the calls of one product, and the time.

    python -m benchmarks.tracing [--calls]

The calls are those of Python functions of the package while eleven products are planned
and run, less those of ten products. JAX's own calls, and the trace of the function, do
not count.

The times are of straight code of 480 equations: the least thread time (CPU time of one
thread) of some rounds, in each of which every way runs once.
"""

import argparse
import collections
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.run import Runner
from jmp_lite.jaxprs import structure

PACKAGE = str(pathlib.Path(jmp.__file__).parent)
PRODUCTS = 10
X, W = jnp.full((8, 16), 0.5), jnp.full((16, 16), 0.1)

# ------------------------------------------------------------------------------ calls


def calls_of(n: int) -> collections.Counter[tuple[str, str]]:
    """Returns the calls, by file and function, for a program of n products."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(n):
            x = x @ w
        return x

    traced = jax.make_jaxpr(program)(X, W)
    found: collections.Counter[tuple[str, str]] = collections.Counter()

    def count(frame: Any, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            place = str(pathlib.Path(file).relative_to(PACKAGE))
            found[place, frame.f_code.co_name] += 1

    def run(*arrays: jax.Array) -> list[jax.Array]:
        planner = Planner(jmp.get_rules("mixed"))
        plan = planner.function(traced, list(map(jax.typeof, arrays)))
        return Runner(planner).function(plan, arrays)

    jax.make_jaxpr(run)(X, W)  # Memories of types and paths.
    sys.setprofile(count)
    try:
        jax.make_jaxpr(lambda *arrays: run(*arrays))(X, W)
    finally:
        sys.setprofile(None)
    return found


def calls_of_one_product() -> dict[tuple[str, str], int]:
    """Returns the calls that one more product makes, by file and function."""
    more, fewer = calls_of(PRODUCTS + 1), calls_of(PRODUCTS)
    return {key: more[key] - fewer[key] for key in more if more[key] > fewer[key]}


# ------------------------------------------------------------------------------- time


def _straight(precision: str | None = None) -> Callable[..., jax.Array]:
    """Returns a new function, which JAX has not traced yet."""

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(120):
            x = jnp.sin(jnp.matmul(x, w, precision=precision)) + 0.5 * x
        return x

    return fun


def _again() -> object:
    traced = jax.make_jaxpr(_straight())(X, W)
    return jax.make_jaxpr(lambda *xs: structure.evaluate(traced, xs))(X, W)


def _planned() -> object:
    traced = jax.make_jaxpr(_straight())(X, W)
    types = [jax.typeof(X), jax.typeof(W)]
    return Planner(jmp.get_rules("mixed")).function(traced, types)


def _nothing() -> object:
    return jax.make_jaxpr(jmp.autocast(_straight("highest")))(X, W)


WAYS: Mapping[str, Callable[[], object]] = {
    "bare": lambda: jax.make_jaxpr(_straight())(X, W),
    "traced and bound again": _again,
    "traced and planned": _planned,
    "autocast": lambda: jax.make_jaxpr(jmp.autocast(_straight()))(X, W),
    "nothing to lower": _nothing,
    "explain": lambda: jmp.explain(_straight())(X, W),
}


def times(rounds: int = 12) -> dict[str, float]:
    """Returns the least milliseconds of each way."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            start = time.thread_time()
            way()
            found[name].append(time.thread_time() - start)
    return {name: 1e3 * min(each) for name, each in found.items()}


def main() -> None:
    """Prints the calls of one product, by file, and the times."""
    parser = argparse.ArgumentParser("python -m benchmarks.tracing")
    parser.add_argument("--calls", action="store_true", help="no times")
    options = parser.parse_args()
    found = calls_of_one_product()
    files = collections.Counter[str]()
    for (file, _), n in found.items():
        files[file] += n
    for file, n in files.most_common():
        names = [f"{name} {k}" for (f, name), k in found.items() if f == file]
        print(f"{n:5} {file}: {', '.join(names)}")
    print(f"{sum(files.values()):5} calls in {len(files)} files")
    if not options.calls:
        of_ways = times()
        for name, milliseconds in of_ways.items():
            ratio = milliseconds / of_ways["bare"]
            print(f"{name:24}{milliseconds:8.1f} ms{ratio:6.2f}")


if __name__ == "__main__":
    main()
