"""Runs JAX's own tests with autocast around their transforms.

``make jax-tests JAX=/path/to/checkout`` needs a checkout of JAX's repository at the
installed version, of which the folders ``tests`` and ``jax/_src`` are enough. Each file
runs in a process of its own: with ``"O0"`` forced through the interpreter, and with
``"mixed"``. A test that fails then runs as it is (``plain``), and with a trace in
autocast's place (``control``). If it passes both, autocast is the cause.

The file ``known.toml`` lists such tests with a reason. Any other makes this script
fail, and so does a listed test that passes.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
MODES = ("O0", "mixed")
FILES = (
    *("api", "batching", "checkify", "custom_api", "custom_linear_solve"),
    *("custom_root", "export", "hijax", "jet", "lax_autodiff", "lax_control_flow"),
    *("lax_vmap", "linalg", "mutable_array", "nn", "ode", "pjit", "python_callback"),
    *("random", "scaled_dot", "shard_map", "sparse", "state"),
)
SECONDS = 3600
"""How long the tests of one file may take in one mode."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_GENERATED_CASES": "3",
    "JAX_SKIP_SLOW_TESTS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE))),
}
DIFFERS = re.compile(
    r"Mismatched elements|Not equal to|not almost equal|Arrays are not"
)
TYPES = re.compile(r"dtype|float32 != |weak_type|ShapedArray")


class Failure(NamedTuple):
    """A failure of a test.

    Attributes:
      message: its message.
      where: the line of this library that it comes from; else the test's.
    """

    message: str
    where: str

    @property
    def cause(self) -> str:
        """Its cause in general: values, types, another claim, or a crash."""
        kind = self.message.split("\n")[0].split(":")[0]
        if DIFFERS.search(self.message):
            return "values"
        if kind in ("AssertionError", "assert") or self.message.startswith("assert"):
            return "types" if TYPES.search(self.message) else "claims"
        return "crashes"


class Run(NamedTuple):
    """The results of the tests of a file in one mode.

    Attributes:
      passed: the number of tests that passed.
      failed: the failures, by test.
    """

    passed: int
    failed: Mapping[str, Failure]


class Additional(NamedTuple):
    """The tests of a file that fail because of autocast, by mode.

    Attributes:
      name: the file.
      passed: the number of tests that passed, by mode.
      failed: the failures, by mode and test.
    """

    name: str
    passed: Mapping[str, int]
    failed: Mapping[str, Mapping[str, Failure]]


class Reason(NamedTuple):
    """A reason for failures that are no fault of this library.

    Attributes:
      code: its name.
      why: one sentence.
      tests: the tests, by mode.
    """

    code: str
    why: str
    tests: Mapping[str, Sequence[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the files, and prints what fails in addition, by cause."""
    options = parsed(arguments)
    reasons = read_reasons(options.known, version_of_jax())
    note_version(options.checkout)
    found: list[Additional] = []
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        runs = [
            pool.submit(additional, options.checkout, name, options.modes)
            for name in options.files
        ]
        for run in concurrent.futures.as_completed(runs):
            found.append(run.result())
            print_counts(found[-1])
            if options.json:
                everything = [one._asdict() for one in found]
                options.json.write_text(json.dumps(everything, indent=1))
    return summarize(found, reasons, options)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path, help="of JAX's repository")
    parser.add_argument("files", nargs="*", help="such as api; without any, all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--known", type=pathlib.Path, default=HERE / "known.toml")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all failures")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    options.files = [name.removesuffix("_test.py") for name in options.files or FILES]
    for name in options.files:
        if not test_file(options.checkout, name).exists():
            parser.error(
                f"Expected a checkout of JAX's repository with tests/{name}_test.py, "
                f"got {options.checkout}."
            )
    return options


def test_file(checkout: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file of tests."""
    return checkout / "tests" / f"{name}_test.py"


def version_of_jax() -> str:
    """Returns the minor version of the installed JAX, such as 0.10."""
    code = "import jax; print(*jax.__version_info__[:2], sep='.')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def note_version(checkout: pathlib.Path) -> None:
    """Prints a note if the checkout is of another version than the installed JAX."""
    path, installed = checkout / "jax" / "version.py", version_of_jax()
    found = path.exists() and re.search(r'_version = "(\d+\.\d+)', path.read_text())
    if found and found[1] != installed:
        print(f"The checkout is JAX {found[1]}, and JAX {installed} is installed.")


# --------------------------------------------------------------------------- the runs


def additional(checkout: pathlib.Path, name: str, modes: Sequence[str]) -> Additional:
    """Runs a file in the modes, and runs failed tests again without autocast."""
    runs = {mode: run(checkout, name, mode) for mode in modes}
    suspects = sorted({test for one in runs.values() for test in one.failed})
    # A file that cannot be imported has no tests, in no mode.
    whole = [test for test in suspects if test == f"{name}_test.py"]
    for mode in ("plain", "control"):
        if suspects != whole:
            other = run(checkout, name, mode, suspects)
            suspects = [t for t in suspects if t not in other.failed or t in whole]
    failed = {
        mode: {test: one.failed[test] for test in suspects if test in one.failed}
        for mode, one in runs.items()
    }
    return Additional(name, {mode: one.passed for mode, one in runs.items()}, failed)


def run(checkout: pathlib.Path, name: str, mode: str, tests: Iterable[str] = ()) -> Run:
    """Runs a file of tests, or some of them, in one mode."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes, only = (pathlib.Path(scratch) / file for file in ("out", "only"))
        outcomes.touch()
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--noconftest"),
            *("-p", "plugin", "-p", "no:cacheprovider", "-c", os.devnull),
            *(f"--rootdir={checkout}", f"--mode={mode}", f"--outcomes={outcomes}"),
        ]
        if tests:
            only.write_text("\n".join(tests))
            command.append(f"--only={only}")
        note = _run([*command, str(test_file(checkout, name))], scratch)
        return read_outcomes(name, outcomes, note)


def _run(command: Sequence[str], folder: str) -> str:
    """Runs a command, and returns how it ended if its tests did not end."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"It takes more than {SECONDS} seconds."
    if done.returncode in (0, 1):
        return ""
    return f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"


def read_outcomes(name: str, path: pathlib.Path, note: str) -> Run:
    """Returns the outcomes that the plugin wrote.

    Args:
      name: the file of tests.
      path: the file of outcomes.
      note: how the process ended, if its tests did not end.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    outcomes: dict[str, str] = {}
    failed: dict[str, Failure] = {}
    for line in lines:
        test = line["test"]
        if line["outcome"] == "failed":
            failed.setdefault(test, Failure(line["message"], line["where"]))
        outcomes[test] = line["outcome"]
    for test, outcome in outcomes.items():
        if outcome == "began":
            failed[test] = Failure(note, "")
    if note and not failed:
        failed[f"{name}_test.py"] = Failure(note, "")
    passed = [t for t, outcome in outcomes.items() if outcome == "passed"]
    return Run(len(set(passed) - set(failed)), failed)


# ------------------------------------------------------------------------ the reasons


def read_reasons(path: pathlib.Path, version: str) -> list[Reason]:
    """Returns the known reasons, with the tests of a version of JAX."""
    return [
        Reason(code, entry["why"], entry.get(version, {}))
        for code, entry in tomllib.loads(path.read_text()).items()
    ]


def print_counts(found: Additional) -> None:
    """Prints the line of a file."""
    counts = [
        f"{mode}: {found.passed[mode]} pass, {len(failed)} fail by autocast"
        for mode, failed in found.failed.items()
    ]
    print(f"{found.name:20} {'; '.join(counts)}", flush=True)


def summarize(
    found: Sequence[Additional],
    reasons: Sequence[Reason],
    options: argparse.Namespace,
) -> int:
    """Prints the failures by reason and by cause; returns the exit code."""
    ran = {f"{one.name}_test.py" for one in found}
    failed = {
        (mode, test): failure
        for one in found
        for mode, failures in one.failed.items()
        for test, failure in failures.items()
    }
    print("\nKnown reasons:")
    passes: list[tuple[str, str, str]] = []
    for code, why, tests in reasons:
        listed = [
            (mode, test)
            for mode in options.modes
            for test in tests.get(mode, ())
            if test.split("::")[0] in ran
        ]
        passes += [(code, *one) for one in listed if one not in failed]
        count = sum(failed.pop(one, None) is not None for one in listed)
        print(f"{count:5}  {code}: {why}")
    print_new(failed)
    for code, mode, test in passes:
        print(f"passes, but is listed as {code!r}: {test} ({mode})")
    print(f"\n{len(failed)} without a reason, {len(passes)} that pass and are listed")
    return 1 if failed or passes else 0


def print_new(failed: Mapping[tuple[str, str], Failure]) -> None:
    """Prints failures without a reason, by cause and then by message and place."""
    groups: dict[tuple[str, str, str], list[str]] = collections.defaultdict(list)
    for (mode, test), failure in failed.items():
        first = " ".join(failure.message.split())[:160]
        groups[failure.cause, failure.where, first].append(f"{test} ({mode})")
    for cause in ("crashes", "types", "values", "claims"):
        mine = {key: tests for key, tests in groups.items() if key[0] == cause}
        print(f"\n{cause}: {sum(map(len, mine.values()))} without a reason")
        for (_, where, message), tests in sorted(mine.items()):
            print(f"  {message}\n    at {where}")
            for test in tests:
                print(f"      {test}")


if __name__ == "__main__":
    sys.exit(main())
