"""What one matrix product costs in calls of this library's Python, from plan to bind.

    python -m benchmarks.calls

It counts the calls of Python functions of the package while eleven products
are planned and run, and subtracts those of ten products. JAX's own calls, and the
trace of the function, do not count.
"""

import collections
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.run import Runner

PACKAGE = str(pathlib.Path(jmp.__file__).parent)
PRODUCTS = 10


def calls_of(n: int) -> collections.Counter[tuple[str, str]]:
    """Returns the calls, by file and function, for a program of n products."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(n):
            x = x @ w
        return x

    x, w = jnp.full((2, 4), 0.5), jnp.full((4, 4), 0.5)
    traced = jax.make_jaxpr(program)(x, w)
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

    jax.make_jaxpr(run)(x, w)  # Memories of types and paths.
    sys.setprofile(count)
    try:
        jax.make_jaxpr(lambda *arrays: run(*arrays))(x, w)
    finally:
        sys.setprofile(None)
    return found


def calls_of_one_product() -> dict[tuple[str, str], int]:
    """Returns the calls that one more product makes, by file and function."""
    more, fewer = calls_of(PRODUCTS + 1), calls_of(PRODUCTS)
    return {key: more[key] - fewer[key] for key in more if more[key] > fewer[key]}


def main() -> None:
    """Prints the calls of one product, by file."""
    found = calls_of_one_product()
    files = collections.Counter[str]()
    for (file, _), n in found.items():
        files[file] += n
    for file, n in files.most_common():
        names = [f"{name} {k}" for (f, name), k in found.items() if f == file]
        print(f"{n:5} {file}: {', '.join(names)}")
    print(f"{sum(files.values()):5} calls in {len(files)} files")


if __name__ == "__main__":
    main()
