"""Finds the ops that make small roundings of their operands large.

- A difference of two functions of one value keeps what the functions differ in.
- A norm subtracts the mean of a value from it, and with it what was added to all.
- A value that a loop multiplies into its state counts as often as there are steps, and
  so does a factor of the nested products into which an associative scan unrolls.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmp_lite.autocasting.decide.facts import Mark
from jmp_lite.jaxprs import params, structure
from jmp_lite.jaxprs.dataflow import Forward
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var
from jmp_lite.ops import ADDING, CUTTING, LINEAR, MOVING, SUMMING


class Ancestors(NamedTuple):
    """What a value is computed from, without a matrix product in between.

    Attributes:
      roots: the results of products, the inputs and the constants; one bit for each. It
        has nothing to do with the roots of a ``Lineage``, which are 16-bit values: this
        analysis comes before any decision.
      reduced: those of which it is a sum, a mean or a maximum.
      is_state: whether it is a carry of a loop, moved, scaled or added to.
      is_slice: whether it is a slice of a value, possibly moved.
      depth: how many products of slices of one value are nested in it, at most 3.
      is_negative: whether it is a negative multiple, so that adding it subtracts.
    """

    roots: int = 0
    reduced: int = 0
    is_state: bool = False
    is_slice: bool = False
    depth: int = 0
    is_negative: bool = False


class Ancestry(Forward[Ancestors]):
    """Follows values forward through jaxprs, and marks ops.

    Example, in which ``p`` is the result of a product::

        r = add x (mul p 0.01)   roots: x, p
        d = sub r x              DIFFERENCE: both are functions of x
        m = reduce_sum r         roots: x, p, both reduced
        c = sub r m              SHIFT: r has lost what c keeps, if rounded to 16 bits
        q = dot_general d w      a root of its own

    Args:
      marks: the marks of equations, to which it adds.
    """

    def __init__(self, marks: dict[Eqn, Mark]) -> None:
        self._marks = marks
        self._jaxprs = set[Jaxpr]()
        self._bits: dict[object, int] = {}

    def read(self, jaxpr: Jaxpr, path: str) -> None:
        """Marks the ops of a jaxpr and of those inside of it, once."""
        if jaxpr not in self._jaxprs:
            invars = structure.parts(jaxpr).invars
            self.outputs(jaxpr, [self._root(var) for var in invars], path)

    def outputs(
        self, jaxpr: Jaxpr, inputs: Sequence[Ancestors], path: str = ""
    ) -> list[Ancestors]:
        """Returns the facts of the outputs of a jaxpr; see ``Forward``."""
        self._jaxprs.add(jaxpr)
        return super().outputs(jaxpr, inputs, path)

    def _root(self, *key: object) -> Ancestors:
        bit = self._bits.setdefault(key, len(self._bits))
        return Ancestors(roots=1 << bit)

    def nothing(self) -> Ancestors:
        """A number has no ancestors."""
        return Ancestors()

    def constant(self, var: Var) -> Ancestors:
        """An array that a jaxpr captures is a root."""
        return self._root(var)

    def join(self, one: Ancestors, other: Ancestors) -> Ancestors:
        """Returns the ancestors of a value that is one of two, or of both."""
        return Ancestors(
            one.roots | other.roots,
            one.reduced | other.reduced,
            one.is_state or other.is_state,
            depth=max(one.depth, other.depth),
        )

    def loop_facts(
        self, loop: params.Loop, operands: Sequence[Ancestors], path: str
    ) -> Sequence[Ancestors]:
        """Returns the ancestors of a loop's results; its carries are states."""
        found = list(operands)
        carries = structure.parts(loop.body).invars[loop.carries]
        for i, var in enumerate(carries, loop.n_consts):
            if structure.is_float32(var):
                found[i] = self._root(loop.body, i)._replace(is_state=True)
        results = super().loop_facts(loop, found, path)
        # After the loop, the last value is multiplied once and not at each step.
        return [fact._replace(is_state=False) for fact in results]

    def transfer(
        self, eqn: Eqn, facts: Sequence[Ancestors], path: str
    ) -> Sequence[Ancestors]:
        """Returns the ancestors of the results of an op, and marks it."""
        op = params.op_of(eqn)
        if op in PRODUCTS:
            # A product rounds its result: a difference of two products, as in distances
            # by ``x**2 + y**2 - 2xy``, has lost its digits already. A lint names it.
            return [self._root(eqn)]
        if not any(fact.roots for fact in facts):
            return [Ancestors()] * len(eqn.outvars)
        joined = functools.reduce(self.join, facts)
        is_ratio = op in ("mul", "div")
        if (op in ADDING or is_ratio) and structure.is_float32(eqn.outvars[0]):
            self._mark(eqn, op, facts)
        if op in CUTTING:
            return self._slices(eqn, facts[0])
        # A maximum counts, too: ``tanh(h - max(h))`` cancels what was added to ``h``.
        is_sum = op in SUMMING or op.startswith("reduce_")
        is_move = op in MOVING and len(eqn.invars) == 1
        is_product = op == "mul" and _are_slices(facts)
        # A mask may reset the state first: ``g * where(m, h, 0) + x``.
        stays_state = op in LINEAR or is_ratio or op == "select_n"
        result = Ancestors(
            joined.roots,
            joined.roots if is_sum else joined.reduced,
            joined.is_state and stays_state,
            is_move and facts[0].is_slice,
            # A product in a loop would have no fixed point without a bound.
            min(joined.depth + is_product, 3),
            _is_negative(eqn, op, facts),
        )
        return [result] * len(eqn.outvars)

    def _slices(self, eqn: Eqn, whole: Ancestors) -> list[Ancestors]:
        """Returns the ancestors of slices of a value.

        Disjoint halves, as in a gated unit or a rotary embedding, share no number.
        """
        pairs = zip(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, strict=True)
        # Other sizes than integers are symbols.
        are_parts = any(type(n) is type(m) is int and 2 * n <= m for n, m in pairs)
        known = whole._replace(is_slice=True)
        return [
            known._replace(roots=self._root(eqn, i).roots) if are_parts else known
            for i in range(len(eqn.outvars))
        ]

    def _mark(self, eqn: Eqn, op: str, facts: Sequence[Ancestors]) -> None:
        one, other = facts
        if op in ADDING:
            shared = one.roots & other.roots
            is_shift = not shared & ~(one.reduced | other.reduced)
            # Not only literals: ``shard_map`` broadcasts the 1 of ``1 - sigmoid(h)``.
            # Without this mark its gradient lost 20 %, and 0.5 % under "O1".
            if not (one.roots and other.roots):
                self._add(eqn, Mark.NUMBER)
            # ``h + (-1) * tanh(h)`` is a difference: it lost 11 %, and 0.5 % under
            # "O1".
            elif shared and (one.is_negative != other.is_negative) != (op == "sub"):
                self._add(eqn, Mark.SHIFT if is_shift else Mark.DIFFERENCE)
            return
        # ``associative_scan`` of gates multiplies products of slices.
        is_nested = _are_slices(facts) and max(one.depth, other.depth) > 1
        # The errors of a gate near 1 add up over the steps: after 1,024 steps the loss
        # was 15 % off, and gradients 49 %.
        if one.is_state != other.is_state or (op == "mul" and is_nested):
            self._add(eqn, Mark.FACTOR)

    def _add(self, eqn: Eqn, mark: Mark) -> None:
        self._marks[eqn] = self._marks.get(eqn, Mark.NONE) | mark


def _are_slices(facts: Sequence[Ancestors]) -> bool:
    return all(fact.is_slice for fact in facts)


def _is_negative(eqn: Eqn, op: str, facts: Sequence[Ancestors]) -> bool:
    """Whether the result of an op is negated, as ``-0.1 * f(h)`` in ``h - 0.1 * f(h)``.

    A factor whose sign is not known counts as positive.
    """
    if op in ("mul", "div"):
        return functools.reduce(operator.ne, map(_has_minus, eqn.invars, facts))
    follows = op in MOVING or op in SUMMING or op == "convert_element_type"
    return facts[0].is_negative if follows else op == "neg"


def _has_minus(atom: Var, fact: Ancestors) -> bool:
    is_number = structure.is_literal(atom)
    return bool(np.all(np.less(atom.val, 0))) if is_number else fact.is_negative
