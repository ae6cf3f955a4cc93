"""Runs programs that others wrote under autocast, and prints what it makes of them.

Their packages are those of the dependency group ``thirdparty``.

    python -m benchmarks.thirdparty                  # All: about an hour on two cores.
    python -m benchmarks.thirdparty --programs GPT-2 "ring attention"
    python -m benchmarks.thirdparty --only settings  # On another version of JAX, too.
"""

import argparse
import json
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.report import stamp, write
from benchmarks.thirdparty import (
    attention,
    methods,
    networks,
    science,
    settings,
    structured,
    tables,
)
from benchmarks.thirdparty.measure import DTYPES, Trained, measure, train
from benchmarks.thirdparty.program import Entry

ENTRIES: Sequence[Entry] = (
    *networks.ENTRIES,
    *attention.ENTRIES,
    *methods.ENTRIES,
    *structured.ENTRIES,
    *science.ENTRIES,
)
PARTS = ("measured", "trained", "settings")


def chosen(names: Sequence[str]) -> list[Entry]:
    """Returns the entries of some names, in the order of the collection.

    Args:
      names: of programs; all if there are none.

    Raises:
      SystemExit: there is no such program.
    """
    known = [entry.name for entry in ENTRIES]
    if unknown := set(names) - set(known):
        raise SystemExit(f"No such program: {', '.join(unknown)}. There are {known}.")
    return [entry for entry in ENTRIES if not names or entry.name in names]


def _each(entries: Sequence[Entry], run: Callable[[Entry], list[Any]]) -> list[Any]:
    """Returns what comes of each program, and prints it as it comes.

    One that does not run in float32 is named, and the others are run.
    """
    found: list[Any] = []
    for entry in entries:
        try:
            rows = run(entry)
        except Exception as error:  # In float32: it is no matter of autocast.
            print(f"{entry.name}, in float32: {type(error).__name__}: {error}")
            continue
        for row in rows:
            print(row, flush=True)
        found += rows
        jax.clear_caches()
    return found


def _trained(entry: Entry, steps: int) -> list[Trained]:
    if entry.make().learning_rate is None:
        return []
    return [train(entry, dtype, steps) for dtype in DTYPES]


def _joined(
    folder: pathlib.Path | None, name: str, table: str, rows: Sequence[Any]
) -> list[Any]:
    """Returns rows, and those that were written for other programs or versions of JAX.

    So one program can be measured anew.
    """
    path = (folder or pathlib.Path()) / f"{name}.json"
    if folder is None or not path.exists() or not rows:
        return [*rows]
    kind, new = type(rows[0]), {_key(row) for row in rows}
    before = [kind(**row) for row in json.loads(path.read_text())[table]]
    order = [entry.name for entry in ENTRIES]
    joined = [*(row for row in before if _key(row) not in new), *rows]
    known = [row for row in joined if row.program in order]
    return sorted(known, key=lambda row: (_key(row)[0], order.index(row.program)))


def _key(row: Any) -> tuple[str, str]:
    return getattr(row, "jax", ""), row.program


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, trains and tries; prints tables, and writes them where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.thirdparty")
    parser.add_argument(
        "--programs", nargs="*", default=[], help="all if none is named"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=3, help="of each trace")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    entries = chosen(options.programs)
    if "measured" in options.only:
        rows: list[Any] = _each(entries, lambda e: measure(e, runs=options.runs))
        rows = _joined(options.json, "thirdparty", "measured", rows)
        written = stamp(runs=options.runs)
        write(options.json, "thirdparty", written, measured=rows)
        print(f"\n{tables.measured_table(rows)}\n\n{tables.packages_of(rows)}")
    if "trained" in options.only:
        rows = _each(entries, lambda e: _trained(e, options.steps))
        rows = _joined(options.json, "thirdparty_trained", "trained", rows)
        written = stamp(steps=options.steps)
        write(options.json, "thirdparty_trained", written, trained=rows)
        print(f"\n{tables.trained_table(rows)}")
    if "settings" in options.only:
        rows = _each(chosen(options.programs or settings.PROGRAMS), settings.try_all)
        rows = _joined(options.json, "settings", "tried", rows)
        write(options.json, "settings", stamp(), tried=rows)
        print(f"\n{tables.settings_table(rows)}")


if __name__ == "__main__":
    # Rings and shards are of eight devices.
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.filterwarnings("ignore")  # Of packages that are about to change.
    main()
