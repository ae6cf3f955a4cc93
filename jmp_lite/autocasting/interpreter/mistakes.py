"""Warns of mistakes that a traced function shows, and that change its results."""

import re
from collections.abc import Iterable

from jmp_lite.autocasting.rules.rules import NORM_LAYERS, Rules
from jmp_lite.casting.dtypes import nearest_name
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Jaxpr


def warn_of_unmatched_scopes(rules: Rules, jaxpr: Jaxpr, name: str) -> None:
    """Warns of each scope rule of the user that matches no path of a function."""
    patterns = [pattern for pattern, _ in rules.scopes if pattern != NORM_LAYERS[0]]
    if not patterns:
        return
    paths = {path for _, path in equations(jaxpr)}
    names = sorted({part for path in paths for part in path.split("/")})
    for pattern in unmatched(patterns, paths):
        near = nearest_name(pattern, names)
        source.warn(
            f"The scope rule {pattern!r} matches nothing in {name}, so it has no "
            f"effect there.{f' Did you mean {near!r}?' if near else ''} "
            "print(jmp_lite.explain(fun, rules)(...)) shows the paths.",
        )


def unmatched(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Returns the patterns that ``re.search`` finds in no path."""
    paths = set(paths)
    return [
        pattern
        for pattern in patterns
        if not any(re.search(pattern, path) for path in paths)
    ]


def warn_of_second_scale(jaxpr: Jaxpr) -> None:
    """Warns of a loss that a function scales, and its caller again.

    A function that divides by the scale, too, has gradients of its own inside.
    """
    ops = {
        params.op_of(eqn)
        for eqn, path in equations(jaxpr)
        if LOSS_SCALE_SCOPE in path.split("/")
    }
    if "mul" in ops and "div" not in ops:
        source.warn(
            "The loss is scaled twice: the function multiplies it by a loss scale, and "
            "value_and_grad or build_train_step multiplies it again, so the gradients "
            "are too large by one scale. Return the loss without a scale.",
        )


def has_float16_product(jaxpr: Jaxpr) -> bool:
    """Whether a function computes a matrix product in float16."""
    return any(
        params.op_of(eqn) in params.PRODUCTS
        and any(structure.dtype_of(var) == "float16" for var in eqn.outvars)
        for eqn, _ in equations(jaxpr)
    )
