"""Plants faults in copies of the package, and counts those that the quick tests catch.

The faults are chosen by a seed, and made by rules: a condition is negated, a precision
is another one, a comparison turns round, a number is one larger, a call is left out.
For each, the quickest tests that run its function are run, until one fails.

    make mutants                        # 300 faults; Python 3.12 or newer
    make mutants ARGS="--room scaling --n 20 --seed 1"

A fault that all of them pass stands in ``survivors.txt`` with a reason, or is an error.
"""

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "jmp_lite"
SURVIVORS = pathlib.Path(__file__).parent / "survivors.txt"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", "_build", "dist"
)
QUICK = ("-m", "not (slow or targets or benchmarks)", "tests")
MOST_TESTS, MOST_SECONDS = 80, 240
"""The quickest tests of a function are run, so many and so long."""

PRECISIONS = {"LOW": "FULL", "FULL": "LOW", "SOFT": "HARD", "HARD": "SOFT"}
_OTHERWISE = {
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.And: ast.Or,
    ast.Add: ast.Sub,
    ast.Mult: ast.Add,
    ast.BitAnd: ast.BitOr,
}
OTHERWISE = _OTHERWISE | {new: old for old, new in _OTHERWISE.items()}


class Fault(NamedTuple):
    """A fault.

    Attributes:
      path: the file, below ``jmp_lite``.
      place: the function, as its ``__qualname__``.
      number: the number of the node in the function, in the order of ``ast.walk``.
      text: what is changed, in words.
    """

    path: str
    place: str
    number: int
    text: str

    @property
    def room(self) -> str:
        """The room of the package that the file is in."""
        return self.path.split("/")[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.path}:{self.place}: {self.text}"


# --------------------------------------------------------------------------- the rules


def changed(node: ast.AST) -> tuple[ast.AST, str] | None:
    """Returns a part of a node, and code in its place; None if no rule applies."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return node, "pass"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHERWISE:
        new.ops[0] = OTHERWISE[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in OTHERWISE:
        new.op = OTHERWISE[type(node.op)]()
    elif isinstance(node, ast.Attribute) and node.attr in PRECISIONS:
        new.attr = PRECISIONS[node.attr]
        return node, ast.unparse(new)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        is_bool = isinstance(node.value, bool)
        return node, str(not node.value if is_bool else node.value + 1)
    else:
        return None
    return node, f"({ast.unparse(new)})"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields each function of a module, with its ``__qualname__``."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef):
            if not any("overload" in ast.unparse(d) for d in node.decorator_list):
                yield f"{prefix}{node.name}", node
            inner = f"{prefix}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            inner = f"{prefix}{node.name}."
        yield from functions(node, inner)


def own_nodes(function: ast.AST) -> list[ast.AST]:
    """Returns the nodes of a function, without those of functions inside of it."""
    found, waiting = [], list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _LEFT_ALONE):
            continue
        found.append(node)
        waiting += ast.iter_child_nodes(node)
    return found


_LEFT_ALONE = (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr)
"""Functions inside of functions have faults of their own; texts have none."""


def all_faults(path: pathlib.Path) -> Iterator[Fault]:
    """Yields every fault that the rules make in a file."""
    name = str(path.relative_to(PACKAGE))
    for place, function in functions(ast.parse(path.read_text())):
        for number, node in enumerate(own_nodes(function)):
            if (found := changed(node)) is not None:
                before = ast.unparse(found[0])
                yield Fault(
                    name, place, number, f"{_short(before)} -> {_short(found[1])}"
                )


def _short(code: str) -> str:
    first = code.splitlines()[0]
    return first if len(first) < 60 else f"{first[:57]}..."


def planted(fault: Fault, source: str) -> str:
    """Returns the source of a file with a fault; all else stays as it is written."""
    (function,) = (
        node for place, node in functions(ast.parse(source)) if place == fault.place
    )
    old, new = changed(own_nodes(function)[fault.number])
    lines = source.encode().splitlines(keepends=True)
    first, last = old.lineno - 1, old.end_lineno - 1
    before = lines[first][: old.col_offset]
    after = lines[last][old.end_col_offset :]
    lines[first : last + 1] = [before + new.encode() + after]
    return b"".join(lines).decode()


def choose(n: int, seed: int, room: str) -> list[Fault]:
    """Returns faults: as many of each room as it has code that rules apply to."""
    every = [f for path in sorted(PACKAGE.rglob("*.py")) for f in all_faults(path)]
    every = [fault for fault in every if not room or fault.room == room]
    return random.Random(seed).sample(every, min(n, len(every)))


# --------------------------------------------------------------------------- the tests


def run_tests(folder: pathlib.Path, selected: Sequence[str], limit: float) -> bool:
    """Returns whether all tests pass in a copy of the tree."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", *selected)
    path = os.pathsep.join([str(folder), str(folder / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return False  # A loop runs for ever.
    return done.returncode == 0


def recorded(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns the tests that run each function, the quickest first."""
    plugin = ("-p", "mutations.record", "--record", str(folder / "recorded"))
    run_tests(folder, [*plugin, "-n", "auto", "--maxfail=1000", *QUICK], 7200)
    tests: dict[str, list[str]] = {}
    known: dict[str, tuple[float, list[str]]] = {}
    for path in folder.glob("recorded.gw*"):
        known |= json.loads(path.read_text())
    for test in sorted(known, key=lambda test: known[test][0]):
        for function in known[test][1]:
            tests.setdefault(function, []).append(test)
    return tests


def survives(fault: Fault, folder: pathlib.Path, tests: Sequence[str]) -> bool:
    """Returns whether the tests of its function pass with a fault in it."""
    path = folder / "jmp_lite" / fault.path
    code = path.read_text()
    path.write_text(planted(fault, code))
    try:
        chosen = tests[:MOST_TESTS]
        return not chosen or run_tests(folder, ["-n", "0", *chosen], MOST_SECONDS)
    finally:
        path.write_text(code)


def main() -> int:
    """Runs the faults; returns 1 if one survives that is not known to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", default="")
    parser.add_argument("--recorded", type=pathlib.Path, help="tests by function, kept")
    options = parser.parse_args()
    faults = choose(options.n, options.seed, options.room)
    lines = SURVIVORS.read_text().splitlines()
    known = dict(line.split(" | ", 1) for line in lines)
    if gone := known.keys() - set(map(str, choose(10**9, 0, ""))):
        parser.error(f"{SURVIVORS.name} lists faults of older code: {sorted(gone)}")
    with tempfile.TemporaryDirectory() as scratch:
        folders: queue.Queue[pathlib.Path] = queue.Queue()
        for i in range(os.cpu_count() or 1):
            folder = pathlib.Path(scratch) / str(i)
            shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
            folders.put(folder)
        if options.recorded and options.recorded.exists():
            tests = json.loads(options.recorded.read_text())
        else:
            tests = recorded(pathlib.Path(scratch) / "0")
            if options.recorded:
                options.recorded.write_text(json.dumps(tests))

        def run(fault: Fault) -> tuple[bool, float]:
            folder, start = folders.get(), time.monotonic()
            try:
                of_function = tests.get(f"{fault.path}:{fault.place}", [])
                return survives(fault, folder, of_function), time.monotonic() - start
            finally:
                folders.put(folder)

        new = 0
        with concurrent.futures.ThreadPoolExecutor(folders.qsize()) as pool:
            for fault, (alive, seconds) in zip(
                faults, pool.map(run, faults), strict=True
            ):
                is_new = alive and str(fault) not in known
                new += is_new
                verdict = (
                    ("SURVIVED" if is_new else "known   ") if alive else "caught  "
                )
                print(f"{verdict} {seconds:4.0f} s  {fault}", flush=True)
    print(f"{len(faults)} faults, {new} survive that are not in {SURVIVORS.name}")
    return int(new > 0)


if __name__ == "__main__":
    sys.exit(main())
