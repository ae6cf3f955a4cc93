"""Follows the values of a traced function to their origins, for lints."""

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jmp_lite import ops
from jmp_lite.jaxprs import params, products, structure
from jmp_lite.jaxprs.dataflow import ForwardAnywhere
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr

Parts = TypeVar("Parts", bound=tuple[Any, ...])


class _UnionAnalysis(ForwardAnywhere[Parts]):
    """Follows values whose facts are tuples of sets and flags.

    Attributes:
      found: the equations, by their id, that a lint may name, by the name of the lint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Mapping[str, set[int]] = defaultdict(set)

    def join(self, one: Parts, other: Parts) -> Parts:
        """Returns the fact of a value that is one of two: each set of either."""
        if one == other:
            return one
        return type(one)(*(a | b for a, b in zip(one, other, strict=True)))

    def of_results(self, jaxpr: Jaxpr) -> list[Parts]:
        """Returns the facts of the results of a program, whose inputs are unknown."""
        n_inputs = len(structure.parts(jaxpr).invars)
        return self.outputs(jaxpr, [self.nothing()] * n_inputs)


def closely_read(jaxpr: Jaxpr) -> Mapping[str, set[int]]:
    """Returns the equations whose result is read by what needs its digits.

    They are the ids of products by the name of a lint: ``"low phase"`` for those that a
    sin or cos reads, ``"cancellation"`` for those in a difference that a square root or
    a pick reads, ``"low range"`` for those in a difference of products that a quotient
    divides by, ``"low lookup"`` for those with integers, and ``"residue"`` for those
    of whose difference a result consists, or of which a loop adds what is left to the
    state that the product reads. ``"amplified rounding"`` has the ids of the sums and
    differences that a root, a logarithm, a step or a quotient reads.
    """
    readers, residues = _Readers(), _Residues()
    readers.of_results(jaxpr)
    for result in residues.of_results(jaxpr):
        residues.found["residue"].update(result.residues)
    return {**readers.found, **residues.found}


def addends_in(jaxpr: Jaxpr, inputs: Collection[int]) -> Mapping[int, set[int]]:
    """Returns the operands that are inputs of a program, for each sum, by its id.

    Such an operand is an input, or a part of one, and is added to a value that is not
    made from it.

    Args:
      jaxpr: the program.
      inputs: the numbers of the inputs that count.
    """
    if not inputs:
        return {}
    given = [
        _Origin(frozenset([i]), i) if i in inputs else _Origin()
        for i in range(len(structure.parts(jaxpr).invars))
    ]
    analysis = _Addends()
    analysis.outputs(jaxpr, given)
    return analysis.added


class _Origin(NamedTuple):
    """The origin of a value.

    Attributes:
      arguments: the arguments that it is computed from.
      moved: the argument that it is equal to, or a part of.
    """

    arguments: frozenset[int] = frozenset()
    moved: int | None = None


class _Addends(ForwardAnywhere[_Origin]):
    """Follows arguments to the sums in which they are addends."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[int, set[int]] = {}

    def nothing(self) -> _Origin:
        """A number comes from no argument."""
        return _Origin()

    def join(self, one: _Origin, other: _Origin) -> _Origin:
        """Returns the origin of a value that is one of two."""
        moved = one.moved if one.moved == other.moved else None
        return _Origin(one.arguments | other.arguments, moved)

    def transfer(
        self, eqn: Eqn, facts: Sequence[_Origin], path: str
    ) -> Sequence[_Origin]:
        """Returns the origins of the results of an op."""
        del path
        if params.op_of(eqn) in ops.ADDING:
            pairs = zip(facts, facts[::-1], strict=True)
            # In a loop, the first pass over the body finds the most addends: later the
            # carry contains them.
            found = {
                i
                for i, (mine, other) in enumerate(pairs)
                if mine.moved is not None and mine.moved not in other.arguments
            }
            self.added.setdefault(id(eqn), set()).update(found)
        arguments = frozenset[int]().union(*(fact.arguments for fact in facts))
        moves = params.op_of(eqn) in _MOVING_ONCE
        moved = facts[0].moved if moves else None
        return [_Origin(arguments, moved)] * len(eqn.outvars)


_MOVING_ONCE = ops.MOVING - ops.ADDED_UP


class _Terms(NamedTuple):
    """What moves, sums, scalings and roundings combine into a value.

    Attributes:
      products: the matrix products, by id of the equation.
      differing: the products that are a term of a difference or a sum whose other term
        contains a sum or another product.
      near: the products that are a term of a difference of products.
      differences: the sums and differences of two values, not summed over an axis.
      is_sum: whether it contains a sum over an axis.
      is_integer: whether it is made from integers only.
    """

    products: frozenset[int] = frozenset()
    differing: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    differences: frozenset[int] = frozenset()
    is_sum: bool = False
    is_integer: bool = False


class _Readers(_UnionAnalysis[_Terms]):
    """Follows products and differences to readers that need more than 16 bits."""

    def nothing(self) -> _Terms:
        """A number or an argument has no terms."""
        return _Terms()

    def transfer(
        self, eqn: Eqn, facts: Sequence[_Terms], path: str
    ) -> Sequence[_Terms]:
        """Returns the terms of the results of an op, and records what it reads."""
        del path
        op = params.op_of(eqn)
        joint = functools.reduce(self.join, facts, _Terms())
        if op in ops.POSITIONAL:
            self.found["low phase"].update(joint.products)
        if op in ops.PICKING or op in ops.ROOTS:
            self.found["cancellation"].update(joint.differing)
        if op == "div":
            self.found["low range"].update(facts[1].near)
        if op in _AMPLIFYING_ANY:
            for fact in facts[op in ops.AMPLIFYING_DIVISORS :]:
                self.found["amplified rounding"].update(fact.differences)
        return [self._result(eqn, op, facts, joint)] * len(eqn.outvars)

    def _result(
        self, eqn: Eqn, op: str, facts: Sequence[_Terms], joint: _Terms
    ) -> _Terms:
        """Returns the terms of a result, given those of each operand and their join."""
        if op in PRODUCTS:
            if any(fact.is_integer for fact in facts[:2]):
                self.found["low lookup"].add(id(eqn))
            return _Terms(products=frozenset([id(eqn)]))
        if op == "convert_element_type" and structure.is_float32(eqn.outvars[0]):
            is_integer = structure.is_integer(eqn.invars[0])
            if is_integer or structure.dtype_of(eqn.invars[0]) == np.bool_:
                return _Terms(is_integer=is_integer)
        if op == "iota":
            return _Terms(is_integer=True)
        if op not in _KEEPING_TERMS:
            return _Terms()
        differing, near = joint.differing, joint.near
        differences = frozenset() if op in ops.SUMMING else joint.differences
        if op in ops.ADDING:
            one, other = facts
            differences |= {id(eqn)}
            if op == "sub" and one.products and other.products:
                near |= joint.products
            # The difference of a value and its own mean does not cancel.
            is_apart = one.products.isdisjoint(other.products)
            is_of_both = all(fact.is_sum or fact.products for fact in facts)
            if joint.products and is_apart and is_of_both:
                differing |= joint.products
        return joint._replace(
            differing=differing,
            near=near if op != "mul" else frozenset(),  # A square is a variance.
            differences=differences,
            is_sum=joint.is_sum or op == "reduce_sum",
            is_integer=joint.is_integer
            and all(
                fact.is_integer or structure.is_literal(atom)
                for fact, atom in zip(facts, eqn.invars, strict=True)
            ),
        )


_CHOOSING = ops.SELECTING - ops.DISCERNING - ops.COMPARING

_KEEPING_TERMS = ops.KEEPING_DIGITS | ops.BOUNDING | _CHOOSING


_AMPLIFYING_ANY = ops.AMPLIFYING - ops.AMPLIFYING_LARGE
"""Ops that also amplify the rounding error of a small difference."""


class _Left(NamedTuple):
    """What is left of products that are subtracted.

    Attributes:
      products: the products that a value is, possibly moved or scaled.
      residues: the products that were subtracted from other values.
      of_carry: whether it is computed from a carry of the loop around it.
    """

    products: frozenset[int] = frozenset()
    residues: frozenset[int] = frozenset()
    of_carry: bool = False


class _Residues(_UnionAnalysis[_Left]):
    """Follows the difference of a value and a product to states and results."""

    def nothing(self) -> _Left:
        """A number or an argument is no product."""
        return _Left()

    def loop_facts(
        self, loop: params.Loop, operands: Sequence[_Left], path: str
    ) -> Sequence[_Left]:
        """Returns what is left in the results of a loop."""
        given = [_Left()] * len(operands)
        given[loop.carries] = [_Left(of_carry=True)] * loop.n_carry
        found = super().loop_facts(loop, given, path)
        for result in found[: loop.n_carry]:
            self.found["residue"].update(result.residues)
        return [result._replace(of_carry=False) for result in found]

    def transfer(self, eqn: Eqn, facts: Sequence[_Left], path: str) -> Sequence[_Left]:
        """Returns what is left in the results of an op."""
        del path
        op = params.op_of(eqn)
        joint = functools.reduce(self.join, facts, _Left())
        multiplies = products.contracts_nothing(eqn)
        if op in PRODUCTS and not multiplies:
            return [_Left(frozenset([id(eqn)]), of_carry=joint.of_carry)]
        keeps = op in ops.KEEPING_DIGITS and op not in ops.SUMMING
        if not (multiplies or keeps):
            return [_Left(of_carry=joint.of_carry)] * len(eqn.outvars)
        if op == "sub":
            one, other = facts
            # A step that subtracts from its own state changes it by little.
            is_number = structure.is_literal(eqn.invars[0])
            is_apart = not (one.of_carry or is_number)
            if other.products and not one.products and is_apart:
                joint = joint._replace(residues=joint.residues | other.products)
        return [joint] * len(eqn.outvars)
