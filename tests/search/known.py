"""Kinds of programs that break law 7, why they stay so, and what a user does."""

from typing import NamedTuple

import jmp_lite as jmp
from search.law import breach
from search.programs import Program


class Kind(NamedTuple):
    """A kind of programs.

    Attributes:
      reason: why they lose more, and why that stays.
      remedy: rules under which they keep the law. They tell the kind.
    """

    reason: str
    remedy: jmp.Rules


MIXED = jmp.get_rules("mixed")
KINDS = (
    Kind(
        "A sum of two arrays, such as the stream of a network, is 16-bit, although a "
        "norm or a maximum subtracts most of it. In float32 it would move more bytes "
        "in every residual network.",
        MIXED.full("add"),
    ),
)


def kind_of(program: Program) -> Kind | None:
    """Returns the kind of a program that breaks the law; None if it is a new one."""
    return next((kind for kind in KINDS if not breach(program, kind.remedy)), None)
