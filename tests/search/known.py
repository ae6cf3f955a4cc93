"""Kinds of programs that break law 7, and why they stay so."""

from typing import NamedTuple

from search.programs import Program, names


class Kind(NamedTuple):
    """A kind of programs.

    Attributes:
      reason: why they lose more, and why that stays.
      steps: the names of steps that programs of this kind have, all of them.
    """

    reason: str
    steps: frozenset[str]


KINDS: tuple[Kind, ...] = ()


def kind_of(program: Program) -> Kind | None:
    """Returns the kind of a program that breaks the law; None if it is a new one."""
    steps = names(program.block)
    return next((kind for kind in KINDS if kind.steps <= steps), None)
