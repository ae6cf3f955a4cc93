"""The table of what one GPU took for steps, from a run by hand before `benchmarks.gpu`.

`results/h200.json` has two runs, and rows of a script that had no time for more. Of a
case that both runs have, the second one counts.
"""

import statistics
from collections.abc import Mapping
from typing import Any

NAMES = {
    "float32 default": "TF32",
    "tf32": "TF32",
    "bfloat16 by hand": "by hand",
    "bfloat16, autocast": "mixed",
}
PROGRAMS = {
    "LSTM, 1024 wide": "LSTM, 1024 wide, 64 x 256",
    "4 blocks unrolled, 768 wide": "4 blocks, 768 wide, 16 x 1024, 50,304 tokens",
    "24 blocks, scan, 1024 wide": "24 blocks in a scan, 1024 wide, 4 x 1024",
    "24 blocks, scan, 2048 wide": "24 blocks in a scan, 2048 wide, 4 x 1024",
    "two MLP blocks, 4096 wide": "two MLP blocks, 4096 wide, 8192 rows",
    "attention, 2048 long": "attention, 2048 long",
    "adamw, 126M in 30 leaves": "adamw, 126 million parameters in 30 leaves",
}


def cases(results: Mapping[str, Any], program: str) -> dict[str, tuple[float, float]]:
    """Returns milliseconds and gigabytes of each case of a program."""
    found: dict[str, tuple[float, float]] = {}
    for run in ("first run (default flags)", "second run"):
        for name, row in results[run].get(program, {}).items():
            # Without cuBLAS's products, the form that float8 had then was 16-bit.
            if "float8" not in name or "cublas" in name:
                found[NAMES.get(name, name)] = row["ms"], row["GB"]
    for row in results["benchmarks.gpu rows"]:
        if row["model"] == program and row["variant"] in NAMES:
            ms = statistics.median(row["milliseconds"])
            found[NAMES[row["variant"]]] = ms, row["memory"] / 1e9
    return found


def table(results: Mapping[str, Any]) -> str:
    """Returns the cases of each program as text, relative to code by hand."""
    lines = [results["device"].partition(" (")[0] + ", a step of adamw"]
    lines += [f"{'':44}{'ms':>8}{'/ by hand':>11}{'peak GB':>9}"]
    for program, title in PROGRAMS.items():
        found = cases(results, program)
        # What each is compared with: code by hand, of cuBLAS where that is there.
        bases = [found[n] for n in ("by hand", "xla, float32", "adamw") if n in found]
        own = found.get("by hand, cublas", bases[0] if bases else None)
        lines.append(title)
        for name, (ms, gigabytes) in found.items():
            base = own if own and "cublas" in name else (bases or [own])[0]
            ratio = "" if base is None else f"{ms / base[0]:.2f}"
            label = name.replace("cublas", "cuBLAS").replace("xla", "XLA")
            lines.append(f"  {label:42}{ms:>8.2f}{ratio:>11}{gigabytes:>9.2f}")
    return "\n".join(lines)


def short_table(results: Mapping[str, Any]) -> str:
    """Returns one row for each program that also ran with its precision by hand."""
    lines = [
        f"{'a step of adamw, ' + results['device'].partition(' (')[0]:42}"
        f"{'ms':>8}{'by hand':>9}{'ratio':>7}{'GB':>8}{'by hand':>9}"
    ]
    for program, title in PROGRAMS.items():
        found = cases(results, program)
        names = ["mixed"] if {"mixed", "by hand"} <= {*found} else []
        names += ["float8, cublas"] if "float8, cublas" in found else []
        if names and "mixed" not in found:
            names = ["mixed, cublas"]
        for name in names:
            suffix = ", cublas" if "cublas" in name else ""
            ms, gigabytes = found[name]
            base, base_gigabytes = found[f"by hand{suffix}"]
            label = title.split(" wide")[0] + " wide"
            label += ", float8" if "float8" in name else ""
            lines.append(
                f"{label:42}{ms:>8.2f}{base:>9.2f}{ms / base:>7.2f}"
                f"{gigabytes:>8.2f}{base_gigabytes:>9.2f}"
            )
    return "\n".join(lines)
