"""Counts the programs in which each lint of ``explain`` finds something.

The programs are those of the sweep and those that others wrote (``make thirdparty``),
in both 16-bit dtypes, with their gradients:

    python -m benchmarks.ablation.lints --json benchmarks/results
"""

import argparse
import functools
import pathlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

import jmp_lite as jmp
from benchmarks.report import stamp, write
from benchmarks.sweep.collection import chosen
from benchmarks.sweep.measure import DTYPES
from benchmarks.sweep.program import Products, Random
from benchmarks.thirdparty.__main__ import ENTRIES

Loss = Callable[..., Any]


class Hits(NamedTuple):
    """A lint.

    Attributes:
      lint: its name.
      programs: in how many programs it finds something.
      one: one of them.
    """

    lint: str
    programs: int
    one: str


def _programs() -> Iterator[tuple[str, Callable[[], tuple[Loss, Sequence[Any]]]]]:
    """Yields the name of each program, and a function that makes its loss."""
    for _, entry in chosen():

        def swept(entry: Any = entry) -> tuple[Loss, Sequence[Any]]:
            program = entry.program()
            loss = functools.partial(program.loss, Products())
            return loss, program.make(Random(0))

        yield entry.name, swept
    for entry in ENTRIES:

        def written(entry: Any = entry) -> tuple[Loss, Sequence[Any]]:
            program = entry.make()
            return lambda *args: program.loss(*args)[0], (program.params, program.batch)

        yield entry.name, written


def measure() -> tuple[list[Hits], int, int]:
    """Returns the hits, how many programs were read, and how many could not be."""
    found: dict[str, list[str]] = {}
    read = failed = 0
    for name, make in _programs():
        try:
            loss, args = make()
            names = set[str]()
            for dtype in DTYPES:
                for fun in (loss, jax.value_and_grad(loss)):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        explanation = jmp.explain(fun, compute_dtype=dtype)(*args)
                    names |= {lint.name for lint in explanation.lints}
        except Exception as error:
            print(f"{name}: {type(error).__name__}", flush=True)
            failed += 1
            continue
        read += 1
        for lint in names:
            found.setdefault(lint, []).append(name)
    counts = Counter({lint: len(programs) for lint, programs in found.items()})
    hits = [Hits(lint, n, found[lint][0]) for lint, n in counts.most_common()]
    return hits, read, failed


def table(hits: Sequence[Hits]) -> str:
    """Returns the hits as text."""
    lines = [f"{'lint':24}{'programs':>8}  one of them"]
    lines += [f"{hit.lint:24}{hit.programs:>8}  {hit.one}" for hit in hits]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Counts, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.ablation.lints")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    hits, read, failed = measure()
    print(table(hits))
    print(f"{read} programs; {failed} could not be made here")
    write(options.json, "lints", stamp(read=read, failed=failed), hits=hits)


if __name__ == "__main__":
    main()
