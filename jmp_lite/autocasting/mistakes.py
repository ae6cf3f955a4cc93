"""Warns of mistakes that a traced function shows, and that change its results."""

from jmp_lite.autocasting.rules.rules import Rules
from jmp_lite.autocasting.rules.scopes import unused_scopes
from jmp_lite.casting.dtypes import hint_for
from jmp_lite.casting.losses import LOSS_SCALE_SCOPE
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Jaxpr


def warn_of_unmatched_scopes(rules: Rules, jaxpr: Jaxpr, name: str) -> None:
    """Warns of each scope rule of the user that matches no path of a function."""
    if not rules.scopes:
        return
    ops = [(path, params.op_of(eqn)) for eqn, path in equations(jaxpr)]
    names = sorted({part for path, _ in ops for part in path.split("/")})
    for pattern, earlier in unused_scopes(rules.scopes, ops):
        if earlier is None:
            source.warn(
                f"The scope rule {pattern!r} matches nothing in {name}, so it has no "
                f"effect there.{hint_for(pattern, names)} "
                "print(jmp_lite.explain(fun, rules)(...)) shows the paths.",
            )


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
