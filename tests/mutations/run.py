"""Plants faults in copies of the package, and counts those that the tests catch.

For each fault the test that is known to catch it is run; if that one passes, so are all
quick tests. ``make mutants`` runs it; ``make mutants ARGS="scaling --find"`` lists
every test that catches a fault of one room.
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
QUICK = ("-m", "not (slow or targets or benchmarks)", "tests", "jmp_lite")
TIME_LIMIT = 600  # Seconds: a fault may make a loop run for ever.


class Outcome(NamedTuple):
    """What the tests say of a fault.

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
        check(fault)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        folders: queue.Queue[pathlib.Path] = queue.Queue()
        for i in range(os.cpu_count() or 1):
            folder = pathlib.Path(scratch) / str(i)
            shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
            folders.put(folder)

        def run(fault: Fault) -> Outcome:
            folder = folders.get()
            try:
                return outcome_of(fault, folder, options.find)
            finally:
                folders.put(folder)

        with concurrent.futures.ThreadPoolExecutor(folders.qsize()) as pool:
            for outcome in pool.map(run, chosen):
                outcomes.append(outcome)
                report(outcome, options.find)
    return summarize(outcomes)


def check(fault: Fault) -> None:
    """Raises where a fault cannot be planted."""
    found = (ROOT / "jmp_lite" / fault.path).read_text().count(fault.old)
    if found != 1:
        raise ValueError(
            f"Expected the code of the fault {fault.does!r} once in {fault.path}, "
            f"found it {found} times: {fault.old!r}"
        )


def outcome_of(fault: Fault, folder: pathlib.Path, find: bool) -> Outcome:
    """Runs tests on a copy of the tree with a fault in it."""
    path = folder / "jmp_lite" / fault.path
    code, start = path.read_text(), time.monotonic()
    path.write_text(code.replace(fault.old, fault.new))
    try:
        named = [f"tests/{fault.caught_by}"] if fault.caught_by else []
        failed, note = (
            ([], "") if find else run_tests(folder, named) if named else ([], "")
        )
        if not failed and not note:
            failed, note = run_tests(folder, QUICK, () if find else ("-x",))
            if failed and not find:
                note = "not by the test that is named"
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
    if done.returncode not in (0, 1):
        return failed, f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
    return failed, ""


def report(outcome: Outcome, find: bool) -> None:
    """Prints a line about a fault, and the tests that catch it."""
    verdict = "caught  " if outcome.failed else "SURVIVED"
    fault = outcome.fault
    print(f"{verdict} {outcome.seconds:4.0f} s  {fault.path}: {fault.does}", flush=True)
    for name in outcome.failed if find else outcome.failed[:1] if outcome.note else ():
        print(f"             {name}", flush=True)
    if outcome.note:
        print(f"             {outcome.note}", flush=True)


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
