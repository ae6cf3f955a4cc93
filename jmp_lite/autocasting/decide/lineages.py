"""Lineages of values that enter a jaxpr inside of an equation, or leave it.

A lineage names 16-bit values. Inside of a jaxpr they have numbers, so that its plan
does not depend on the values of one call.
"""

from collections.abc import Sequence

from jmp_lite.autocasting.decide.facts import Facts, InputRoot, Lineage, State


def enter_call(operands: Sequence[Facts]) -> tuple[Lineage | None, ...]:
    """Returns the lineages of operands inside of a call, with ``InputRoot`` roots."""
    numbers: dict[object, InputRoot] = {}
    found: list[Lineage | None] = []
    for value in operands:
        if not value.has_lineage:
            found.append(None)
            continue
        for root in value.roots or ():
            numbers.setdefault(root, InputRoot(len(numbers)))
        roots = value.roots
        inside = roots and frozenset[object](numbers[root] for root in roots)
        found.append(Lineage(inside, value.lineage.is_rejoined))
    return tuple(found)


def enter_others(operands: Sequence[Facts]) -> tuple[Lineage | None, ...]:
    """Returns the lineages of operands inside of an equation that is not a mere call.

    Each 16-bit value is a root of its own there, and so is an undecided value that is
    computed from 16-bit values.
    """
    return tuple(
        _own_root(i) if value.state is State.SOFT and value.has_lineage else None
        for i, value in enumerate(operands)
    )


def leave_others(results: Sequence[Facts]) -> list[Lineage | None]:
    """Returns the lineages of results of an equation that is not a mere call."""
    # Inputs have the numbers from 0, so these are negative.
    return [
        _own_root(~i) if value.state is State.SOFT and value.has_lineage else None
        for i, value in enumerate(results)
    ]


def _own_root(number: int) -> Lineage:
    return Lineage(frozenset([InputRoot(number)]))


def leave_call(
    lineages: Sequence[Lineage | None], operands: Sequence[Facts]
) -> list[Lineage | None]:
    """Returns the lineages of a call's results outside of it."""
    known: dict[object, object] = {}
    for value, inside in zip(operands, enter_call(operands), strict=True):
        if inside is not None:
            known.update(zip(inside.roots or (), value.roots or (), strict=True))
    found: list[Lineage | None] = []
    for lineage in lineages:
        if lineage is not None and lineage.roots is not None:
            # Each call makes new 16-bit values inside.
            roots = [known.setdefault(root, object()) for root in lineage.roots]
            lineage = lineage._replace(roots=frozenset(roots))
        found.append(lineage)
    return found
