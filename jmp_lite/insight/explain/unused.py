"""Finds the rules of a user that match nothing in the function."""

import difflib
import re
from collections.abc import Iterable, Sequence

from jmp_lite.autocasting.rules.presets import PRESETS
from jmp_lite.autocasting.rules.rules import NORM_LAYERS, Rules
from jmp_lite.insight.explain.rows import Row
from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Jaxpr


def unused(rules: Rules, rows: Sequence[Row], jaxpr: Jaxpr) -> Iterable[str]:
    """Yields a message for each rule of the user that decides nothing."""
    scopes = [pattern for pattern, _ in rules.scopes if pattern != NORM_LAYERS[0]]
    yield from _unmatched("scope", scopes, (row.scope for row in rows))
    carries = [pattern for pattern, _ in rules.carries]
    yield from _unmatched("carry", carries, _loops(jaxpr) if carries else ())
    of_presets = {pair for preset in PRESETS.values() for pair in preset.ops}
    ops = list(dict.fromkeys(row.op for row in rows))
    for pair in rules.ops:
        if pair not in of_presets and pair[0] not in ops:
            yield f"op {pair[0]!r} matches nothing.{nearest(pair[0], ops)}"


def _unmatched(
    kind: str, patterns: Sequence[str], paths: Iterable[str]
) -> Iterable[str]:
    """Yields a message for each pattern that matches no path, or comes too late."""
    paths = list(dict.fromkeys(paths))
    names = list(dict.fromkeys(name for path in paths for name in path.split("/")))
    for i, pattern in enumerate(patterns):
        matched = [path for path in paths if re.search(pattern, path)]
        before = [
            [other for other in patterns[:i] if re.search(other, path)]
            for path in matched
        ]
        if not matched:
            yield f"{kind} {pattern!r} matches nothing.{nearest(pattern, names)}"
        elif all(before):
            yield f"{kind} {pattern!r} has no effect: {before[0][0]!r} comes first."


def _loops(jaxpr: Jaxpr) -> Iterable[str]:
    """Yields the paths of loops."""
    for eqn, path in equations(jaxpr):
        if params.op_of(eqn) in ("scan", "while"):
            yield path


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a question that suggests the nearest names, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
