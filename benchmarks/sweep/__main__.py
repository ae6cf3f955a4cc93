"""Runs programs of many kinds in mixed precision, and prints how exact they are.

python -m benchmarks.sweep                # All.
python -m benchmarks.sweep NeRF SAC       # Those whose names contain one of these.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence

import jax

from benchmarks.report import stamp, write
from benchmarks.sweep import known, tables
from benchmarks.sweep.collection import chosen
from benchmarks.sweep.measure import SEEDS, Row, flags, measure, rows_of


def joined_rows(folder: pathlib.Path | None, rows: Sequence[Row]) -> list[Row]:
    """Returns rows, and those of other programs that a folder has, in order.

    So one program can be measured anew.
    """
    path = (folder or pathlib.Path()) / "sweep.json"
    before: list[Row] = []
    if folder is not None and path.exists():
        before = rows_of(json.loads(path.read_text())["programs"])
    new = {row.program for row in rows}
    order = [entry.name for _, entry in chosen()]
    joined = [*(row for row in before if row.program not in new), *rows]
    known = [row for row in joined if row.program in order]
    return sorted(known, key=lambda row: order.index(row.program))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table and the flagged rows, and writes them where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.sweep")
    parser.add_argument("patterns", nargs="*", help="of names; all by default")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for field, entry in chosen(options.patterns):
        start = time.perf_counter()
        found = measure(field, entry)
        jax.clear_caches()
        rows += found
        errors = " ".join(f"{row.mixed.all:.4f}" for row in found)
        marks = ", ".join(f"{dtype} {why}" for (_, dtype), why in flags(found).items())
        seconds = time.perf_counter() - start
        print(f"{entry.name}: {errors} {seconds:.1f} s {marks}", flush=True)
    rows = joined_rows(options.json, rows)
    write(options.json, "sweep", stamp(seeds=len(SEEDS)), programs=rows)
    print(f"\n{tables.programs_table(rows)}\n")
    print(tables.flagged_lines(rows, known.FLAGGED))


if __name__ == "__main__":
    main()
