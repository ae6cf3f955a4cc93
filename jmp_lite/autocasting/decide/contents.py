"""Finds ops that need float32 for what their operands are, or run as traced.

- A product with zeros and ones looks numbers up, or counts.
- Steps of a loop that multiply by one matrix take a power of it.
- Exponentials are of many sizes, and so are products of them.
- Random numbers are made of random bits, by ops whose roundings would change them.
"""

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_lite.autocasting.decide.facts import Mark
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import Forward
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var
from jmp_lite.ops import (
    AMPLIFYING,
    AMPLIFYING_LARGE,
    LINEAR,
    MOVING,
    ORDERING,
    RANDOM,
    SCALING,
    SELECTING,
    SPREADING,
    TAKING_SLICES,
)


class Spread(enum.IntEnum):
    """How far the exponents of a value may be apart."""

    NONE = 0
    # A maximum.
    MAXIMUM = 1
    # A value less its maximum.
    SHIFTED = 2
    # An exponential of such a value, from 0 to 1.
    BOUNDED = 3
    # Another exponential: float16 ends at exp(11).
    WIDE = 4


class Content(NamedTuple):
    """What a value is.

    Attributes:
      is_number: whether it depends on no argument.
      is_random: whether it depends on random bits and numbers alone.
      is_binary: whether its elements are zeros and ones, as those of ``tril(ones)``.
      is_one_number: whether its elements are equal, as those of the norm by which a
        power iteration divides.
      is_learned: whether a product is on the way to it.
      varies: whether it differs in each step of the loop around it: a carry, a slice of
        ``xs``, and what is computed from them.
      spread: how far its exponents may be apart.
      products: products of exponentials from which it is computed without another
        product: of ``(exp(a) @ exp(b)).T`` the product before the move.
      powers: if it is a linear function of a carry of the loop around it: the products
        on the way, such as the two of ``a @ p @ a.T`` for the carry ``p``, and none for
        ``p`` itself. Else None.
    """

    is_number: bool = False
    is_random: bool = False
    is_binary: bool = False
    is_one_number: bool = False
    is_learned: bool = False
    varies: bool = False
    spread: Spread = Spread.NONE
    products: frozenset[Eqn] = frozenset()
    powers: frozenset[Eqn] | None = None


_NUMBER = Content(is_number=True)

_READING = AMPLIFYING - AMPLIFYING_LARGE
"""Logarithms, roots, quotients, and others whose result is wrong for infinities."""


class ContentAnalysis(Forward[Content]):
    """Follows values forward through jaxprs, and marks ops.

    Example, in which ``ids`` are integers, ``table`` an argument, ``A`` a matrix that
    the body of a loop reads, and ``h`` its carry::

        k = eq ids iota
        z = convert_element_type[float32] k   zeros and ones
        e = dot_general z table               BINARY_LEFT
        q = dot_general A h                   linear in the carry: POWER, if returned
        n = dot_general (exp a) (exp b)       of many sizes
        l = log n                             n is SPREAD

    Args:
      marks: the marks of equations, to which it adds.
    """

    def __init__(self, marks: dict[Eqn, Mark]) -> None:
        self._marks = marks
        self._jaxprs = set[Jaxpr]()
        self._operands_of: dict[Eqn, frozenset[Eqn]] = {}
        self._not: dict[Eqn, Mark] = {}
        self._known: dict[object, list[Content]] = {}

    def read(self, jaxpr: Jaxpr, path: str) -> None:
        """Marks the ops of a jaxpr and of those inside of it, once."""
        if jaxpr not in self._jaxprs:
            given = map(self.constant, structure.parts(jaxpr).invars)
            self.outputs(jaxpr, list(given), path)

    def outputs(
        self, jaxpr: Jaxpr, inputs: Sequence[Content], path: str = ""
    ) -> list[Content]:
        """Returns the content of the outputs of a jaxpr; see ``Forward``."""
        self._jaxprs.add(jaxpr)
        return super().outputs(jaxpr, inputs, path)

    def nothing(self) -> Content:
        """A number of the program."""
        return _NUMBER

    def constant(self, var: Var) -> Content:
        """Returns the content of an argument or a captured array."""
        # A mask of booleans is zeros and ones once it is cast to float32.
        return Content(is_binary=structure.dtype_of(var) == np.bool_)

    def literal(self, atom: Var) -> Content:
        """Returns the content of a number, which may be 0 or 1."""
        number: Any = atom.val if structure.is_literal(atom) else None
        return _NUMBER._replace(is_binary=number in (0, 1), is_one_number=True)

    def join(self, one: Content, other: Content) -> Content:
        """Returns the content of a value that is one of two."""
        ways = [each.powers for each in (one, other) if each.powers is not None]
        return Content(
            one.is_number and other.is_number,
            one.is_random and other.is_random,
            one.is_binary and other.is_binary,
            one.is_one_number and other.is_one_number,
            one.is_learned or other.is_learned,
            one.varies or other.varies,
            max(one.spread, other.spread),
            one.products | other.products,
            ways[0] | ways[1] if len(ways) == 2 else None,
        )

    def loop_facts(
        self, loop: params.Loop, operands: Sequence[Content], path: str
    ) -> Sequence[Content]:
        """Returns the contents of a loop's results; what differs by step varies."""
        n, at = loop.n_consts, loop.carries
        start = [
            fact._replace(varies=i >= n, powers=None) for i, fact in enumerate(operands)
        ]
        # When a step begins, each carry is itself, without a product on the way.
        start[at] = [fact._replace(powers=frozenset()) for fact in start[at]]
        results = super().loop_facts(loop, start, path)
        for fact in results[: loop.n_carry]:
            # A Koopman operator in bfloat16 is some percent off after 20 steps, and
            # more than 50 % after 1,000.
            for product in fact.powers or ():
                self._mark(product, Mark.POWER)
        varies = any(fact.varies for fact in operands)
        return [fact._replace(varies=varies, powers=None) for fact in results]

    def transfer(
        self, eqn: Eqn, facts: Sequence[Content], path: str
    ) -> Sequence[Content]:
        """Returns the content of the results of an op, and marks it."""
        op = params.op_of(eqn)
        # Division by a number is a scaling: it reads no exponential.
        if op in _READING and not facts[-1].is_number:
            for fact in facts:
                self._mark_spread(fact.products)
        if op in PRODUCTS:
            return [self._product(eqn, facts)]
        is_random = self._is_random(eqn, op, facts)
        types = [
            (structure.dtype_of(var) == np.bool_, _has_size_1(var))
            for var in eqn.outvars
        ]
        key = (op, *facts), is_random, *types
        if key not in self._known:
            self._known[key] = self._results(op, facts, is_random, types)
        return self._known[key]

    def _results(
        self,
        op: str,
        facts: Sequence[Content],
        is_random: bool,
        outvars: Sequence[tuple[bool, bool]],
    ) -> list[Content]:
        joined = functools.reduce(self.join, facts) if facts else _NUMBER
        is_linear = op in SCALING or op in MOVING
        are_binary = _are_binary(op, facts)
        result = joined._replace(
            is_random=is_random,
            spread=_spread(op, facts, joined),
            products=joined.products if is_linear else frozenset(),
            powers=_powers(op, facts),
        )
        return [
            result._replace(
                is_binary=is_bool or are_binary,
                is_one_number=has_size_1 or joined.is_one_number,
            )
            for is_bool, has_size_1 in outvars
        ]

    def _is_random(self, eqn: Eqn, op: str, facts: Sequence[Content]) -> bool:
        others = [i for i, f in enumerate(facts) if not (f.is_number or f.is_random)]
        if op in RANDOM:  # A key, and maybe parameters.
            return not any(structure.is_float(eqn.invars[i]) for i in others)
        is_random = not others and any(fact.is_random for fact in facts)
        # Numbers such as the limits of a draw become parts of it.
        is_number = not others and all(map(_has_size_1, eqn.outvars))
        # In 16 bits a uniform number may be rounded to 1: the normal made of it is
        # infinite.
        self._mark_if(is_random or is_number, eqn, Mark.RANDOM)
        return is_random

    def _product(self, eqn: Eqn, facts: Sequence[Content]) -> Content:
        """Returns the content of the result of a product, and marks it."""
        pair = facts[:2]
        for fact, mark in zip(pair, (Mark.BINARY_LEFT, Mark.BINARY_RIGHT), strict=True):
            # A convolution sums windows of a 0/1 image, and looks nothing up.
            is_binary = fact.is_binary and params.op_of(eqn) == "dot_general"
            self._mark_if(is_binary, eqn, mark)
        before = pair[0].products | pair[1].products
        # One bounded operand fits float16: ``exp(s - max(s)) @ v`` of a flash
        # attention.
        n_spread = sum(_N_SPREAD.get(fact.spread, 0) for fact in pair)
        is_spread = bool(before) or n_spread > 1
        if is_spread:
            self._operands_of[eqn] = before
        powers = _powers("dot_general", pair)
        return Content(
            is_number=all(fact.is_number for fact in facts),
            is_random=self._is_random(eqn, "dot_general", facts),
            is_learned=True,
            varies=any(fact.varies for fact in facts),
            products=frozenset([eqn]) if is_spread else frozenset(),
            powers=None if powers is None else powers | {eqn},
        )

    def _mark_spread(self, products: frozenset[Eqn]) -> None:
        """Marks products whose result is read by a logarithm, a root or a quotient."""
        for product in products:
            # In a loop, a product may be computed from itself.
            if Mark.SPREAD not in self._marks.get(product, Mark.NONE):
                self._mark(product, Mark.SPREAD)
                self._mark_spread(self._operands_of[product])

    def _mark_if(self, holds: bool, eqn: Eqn, mark: Mark) -> None:
        """Marks an op unless the mark does not hold for one of its uses.

        A function may be called with random numbers and with others, and a carry may
        start as zeros.
        """
        if holds and mark not in self._not.get(eqn, Mark.NONE):
            self._mark(eqn, mark)
        elif not holds:
            self._not[eqn] = self._not.get(eqn, Mark.NONE) | mark
            if eqn in self._marks:
                self._marks[eqn] &= ~mark

    def _mark(self, eqn: Eqn, mark: Mark) -> None:
        self._marks[eqn] = self._marks.get(eqn, Mark.NONE) | mark


_N_SPREAD = {Spread.BOUNDED: 1, Spread.WIDE: 2}
"""How much an operand adds to the spread of a product; 2 is too much for float16."""


def _has_size_1(var: Var) -> bool:
    return all(type(n) is int and n == 1 for n in structure.shape_of(var.aval))


def _are_binary(op: str, facts: Sequence[Content]) -> bool:
    """Whether the results of an op are zeros and ones."""
    if op in TAKING_SLICES:
        return facts[0].is_binary
    if op == "select_n":
        facts = facts[1:]
    is_kept = op in MOVING or op in ORDERING or op == "convert_element_type"
    is_kept |= op == "mul" or op == "select_n"
    return is_kept and all(fact.is_binary for fact in facts)


def _spread(op: str, facts: Sequence[Content], joined: Content) -> Spread:
    """Returns how far the exponents of the result of an op may be apart."""
    if op == "reduce_max":
        return Spread.MAXIMUM
    # What is left is at most 0, so its exponential is at most 1.
    if op == "sub" and facts[1].spread is Spread.MAXIMUM:
        return Spread.SHIFTED
    if op in SPREADING:
        is_shifted = facts[0].spread is Spread.SHIFTED
        return Spread.BOUNDED if is_shifted else Spread.WIDE
    # A quotient of exponentials, as in a softmax, is a share.
    is_share = op == "div" and facts[1].spread >= Spread.BOUNDED
    keeps = op in SCALING or op in SELECTING
    return joined.spread if keeps and not is_share else Spread.NONE


def _powers(op: str, facts: Sequence[Content]) -> frozenset[Eqn] | None:
    """Returns the products on the way from a carry, if the way is linear.

    A scale by one number, as in a power iteration, is linear enough: it changes all
    elements alike.
    """
    ways = [fact.powers for fact in facts if fact.powers is not None]
    others = [fact for fact in facts if fact.powers is None]
    if not ways:
        return None
    found = frozenset[Eqn]().union(*ways)
    if op in PRODUCTS:
        # ``h @ h`` is not linear in ``h``, and the weights of each step (``xs``) make
        # no power of one matrix.
        return found if len(ways) == 1 and not others[0].varies else None
    if op in ("mul", "div"):
        # A gate such as ``sigmoid(x)`` differs in each step and from element to
        # element.
        is_scaled = len(others) == 1 and (op == "mul" or others[0] is facts[1])
        is_fixed = is_scaled and (others[0].is_one_number or not others[0].varies)
        return found if is_fixed else None
    # In ``h @ w + x @ u`` what the steps add is learned: a recurrent network, in 16
    # bits. In ``a @ p @ a.T + 0.01 * eye`` it is not: a covariance, in float32.
    is_linear = op in LINEAR and not any(fact.is_learned for fact in others)
    return found if is_linear else None
