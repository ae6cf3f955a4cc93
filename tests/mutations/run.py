"""Plants faults in copies of the package, and counts those that the quick tests catch.

For each fault the test that is known to catch it is run. If that test passes, all quick
tests are run. ``make mutants`` runs every fault, ``make mutants ARGS=scaling`` those of
one room, and ``make mutants ARGS="scaling --find"`` lists every test that catches them.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", "_build", "dist"
)
QUICK = (
    *("-m", "not (slow or targets or benchmarks)", "tests", "jmp_lite"),
    # It looks for the code that a fault replaces.
    *("--deselect", "tests/test_layout.py::test_each_fault_can_be_planted"),
)
TIME_LIMIT = 1800  # Seconds: with a fault, a loop may run for ever.


class Outcome(NamedTuple):
    """The outcome of the tests with a fault.

    Attributes:
      fault: the fault.
      failed: the tests that fail with it.
      note: what else there is to say.
      seconds: how long the tests took.
    """

    fault: Fault
    failed: Sequence[str]
    note: str
    seconds: float


def main() -> int:
    """Runs the faults, prints a line for each, and the sums by room."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="in the path or effect")
    parser.add_argument("--find", action="store_true", help="run all quick tests")
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if re.search(options.pattern, f"{fault.path} {fault.does}")
    ]
    for fault in chosen:
        fault.planted((ROOT / "jmp_lite" / fault.path).read_text())
    print(f"{len(chosen)} faults", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        return run_all(chosen, options.find, pathlib.Path(scratch))


def run_all(faults: Sequence[Fault], find: bool, scratch: pathlib.Path) -> int:
    """Runs the faults on as many copies of the tree as there are processors."""
    folders: queue.Queue[pathlib.Path] = queue.Queue()
    for i in range(os.cpu_count() or 1):
        folder = scratch / str(i)
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        folders.put(folder)

    def run(fault: Fault) -> Outcome:
        folder = folders.get()
        try:
            return outcome_of(fault, folder, find)
        finally:
            folders.put(folder)

    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(folders.qsize()) as pool:
        # Without a fault, the tests that catch one pass.
        named = sorted({f"tests/{fault.caught_by}" for fault in faults})
        failed, note = run_tests(scratch / "0", named, ())
        if failed or note:
            print(f"Without any fault: {', '.join(failed)} {note}")
            return 1
        for outcome in pool.map(run, faults):
            outcomes.append(outcome)
            report(outcome, find)
    return summarize(outcomes)


def outcome_of(fault: Fault, folder: pathlib.Path, find: bool) -> Outcome:
    """Runs tests on a copy of the tree with a fault in it."""
    path = folder / "jmp_lite" / fault.path
    code, start = path.read_text(), time.monotonic()
    path.write_text(fault.planted(code))
    try:
        if find:
            failed, note = run_tests(folder, QUICK, ())
        else:
            failed, note = run_tests(folder, [f"tests/{fault.caught_by}"])
            if not failed:
                failed, note = run_tests(folder, QUICK)
                note = note or "not by the test that is named"
    finally:
        path.write_text(code)
    return Outcome(fault, failed, note, time.monotonic() - start)


def run_tests(
    folder: pathlib.Path, selected: Sequence[str], options: Sequence[str] = ("-x",)
) -> tuple[list[str], str]:
    """Returns the tests that fail in a copy of the tree, and what else went wrong."""
    command = (sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", *options)
    try:
        done = subprocess.run(
            (*command, *selected),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return ["(the tests do not end)"], ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if not failed and done.returncode:
        return failed, f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
    return failed, ""


def report(outcome: Outcome, find: bool) -> None:
    """Prints a line about a fault, and the tests that catch it if that is news."""
    verdict = "caught  " if outcome.failed else "SURVIVED"
    fault = outcome.fault
    print(f"{verdict} {outcome.seconds:4.0f} s  {fault.path}: {fault.does}", flush=True)
    for line in (*(outcome.failed if find or outcome.note else ()), outcome.note):
        if line:
            print(f"             {line}", flush=True)


def summarize(outcomes: Sequence[Outcome]) -> int:
    """Prints how many faults of each room were caught; returns the exit code."""
    print("\nroom         caught  survived")
    rooms = dict.fromkeys(outcome.fault.room for outcome in outcomes)
    for room in rooms:
        caught = [bool(o.failed) for o in outcomes if o.fault.room == room]
        print(f"{room:12} {sum(caught):6} {len(caught) - sum(caught):9}")
    survived = sum(not outcome.failed for outcome in outcomes)
    print(f"{'all':12} {len(outcomes) - survived:6} {survived:9}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
