"""Follows the values of a traced function to their origins, for lints."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

    The inputs of the program are unknown.
    """

    def join(self, one: Parts, other: Parts) -> Parts:
        """Returns the fact of a value that is one of two: each set of either."""
        if one == other:
            return one
        return type(one)(*(a | b for a, b in zip(one, other, strict=True)))

    def follow(self, jaxpr: Jaxpr) -> None:
        """Follows the values of a whole program."""
        self.outputs(jaxpr, [self.nothing()] * len(structure.parts(jaxpr).invars))


class ArgumentOrigin(NamedTuple):
    """The origin of a value.

    Attributes:
      arguments: the arguments that it is computed from.
      moved: the argument that it is equal to, or a part of.
    """

    arguments: frozenset[int] = frozenset()
    moved: int | None = None


class Addends(ForwardAnywhere[ArgumentOrigin]):
    """Follows arguments to the sums in which they are addends.

    Attributes:
      added: for each sum, by id, the operands that are arguments (or parts of one) and
        are added to a value that is not made from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[int, set[int]] = {}

    def nothing(self) -> ArgumentOrigin:
        """A number comes from no argument."""
        return ArgumentOrigin()

    def join(self, one: ArgumentOrigin, other: ArgumentOrigin) -> ArgumentOrigin:
        """Returns the origin of a value that is one of two."""
        moved = one.moved if one.moved == other.moved else None
        return ArgumentOrigin(one.arguments | other.arguments, moved)

    def transfer(
        self, eqn: Eqn, facts: Sequence[ArgumentOrigin], path: str
    ) -> Sequence[ArgumentOrigin]:
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
        return [ArgumentOrigin(arguments, moved)] * len(eqn.outvars)


_MOVING_ONCE = ops.MOVING - ops.ADDED_UP


class ValueParts(NamedTuple):
    """The parts that moves, sums, scalings and roundings combine into a value.

    Attributes:
      products: the matrix products, by id of the equation.
      differing: the products that are a term of a difference or a sum whose other term
        contains a sum or another product.
      near: the products that are a term of a difference of products.
      is_sum: whether it contains a sum over an axis.
      is_integer: whether it is made from integers only.
    """

    products: frozenset[int] = frozenset()
    differing: frozenset[int] = frozenset()
    near: frozenset[int] = frozenset()
    is_sum: bool = False
    is_integer: bool = False


class ProductReaders(_UnionAnalysis[ValueParts]):
    """Follows matrix products to readers that need more than 16 bits.

    Attributes:
      found: the products, by id of the equation, by the name of a lint:
        ``"low phase"`` for those that a sin or cos reads, ``"cancellation"`` for those
        in a difference that a square root or a pick reads, ``"low range"`` for those
        in a difference of products that a quotient divides by, and ``"low lookup"`` for
        products with integers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Mapping[str, set[int]] = defaultdict(set)

    def nothing(self) -> ValueParts:
        """A number or an argument contains no product."""
        return ValueParts()

    def transfer(
        self, eqn: Eqn, facts: Sequence[ValueParts], path: str
    ) -> Sequence[ValueParts]:
        """Returns the parts of the results of an op, and records its products."""
        del path
        op = params.op_of(eqn)
        joint = functools.reduce(self.join, facts) if facts else ValueParts()
        if op in ops.POSITIONAL:
            self.found["low phase"].update(joint.products)
        if op in ops.PICKING or op in ops.ROOTS:
            self.found["cancellation"].update(joint.differing)
        if op == "div":
            self.found["low range"].update(facts[1].near)
        return [self._result(eqn, op, facts, joint)] * len(eqn.outvars)

    def _result(
        self, eqn: Eqn, op: str, facts: Sequence[ValueParts], joint: ValueParts
    ) -> ValueParts:
        """Returns the parts of a result, given those of each operand and their join."""
        if op in PRODUCTS:
            if any(fact.is_integer for fact in facts[:2]):
                self.found["low lookup"].add(id(eqn))
            return ValueParts(products=frozenset([id(eqn)]))
        if op == "convert_element_type" and structure.is_float32(eqn.outvars[0]):
            is_integer = structure.is_integer(eqn.invars[0])
            if is_integer or structure.dtype_of(eqn.invars[0]) == np.bool_:
                return ValueParts(is_integer=is_integer)
        if op == "iota":
            return ValueParts(is_integer=True)
        if op not in _KEEPING_TERMS:
            return ValueParts()
        differing, near = joint.differing, joint.near
        if op in ops.ADDING:
            one, other = facts
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
            is_sum=joint.is_sum or op == "reduce_sum",
            is_integer=joint.is_integer
            and all(
                fact.is_integer or structure.is_literal(atom)
                for fact, atom in zip(facts, eqn.invars, strict=True)
            ),
        )


_CHOOSING = ops.SELECTING - ops.DISCERNING - ops.COMPARING

_KEEPING_TERMS = ops.KEEPING_DIGITS | ops.BOUNDING | _CHOOSING


class Left(NamedTuple):
    """What is left of products that are subtracted.

    Attributes:
      products: the products that a value is, possibly moved or scaled.
      residues: the products that were subtracted from other values.
      of_carry: whether it is computed from a carry of the loop around it.
    """

    products: frozenset[int] = frozenset()
    residues: frozenset[int] = frozenset()
    of_carry: bool = False


class Residues(_UnionAnalysis[Left]):
    """Follows the difference of a value and a product to states and results.

    Attributes:
      found: the products, by id of the equation, of whose difference a result consists,
        or of which a loop adds what is left to the state that the product reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def follow(self, jaxpr: Jaxpr) -> None:
        """Follows the values of a whole program."""
        inputs = [Left()] * len(structure.parts(jaxpr).invars)
        for result in self.outputs(jaxpr, inputs):
            self.found |= result.residues

    def nothing(self) -> Left:
        """A number or an argument is no product."""
        return Left()

    def loop_facts(
        self, loop: params.Loop, operands: Sequence[Left], path: str
    ) -> Sequence[Left]:
        """Returns what is left in the results of a loop."""
        given = [Left()] * len(operands)
        given[loop.carries] = [Left(of_carry=True)] * loop.n_carry
        found = super().loop_facts(loop, given, path)
        for result in found[: loop.n_carry]:
            self.found |= result.residues
        return [result._replace(of_carry=False) for result in found]

    def transfer(self, eqn: Eqn, facts: Sequence[Left], path: str) -> Sequence[Left]:
        """Returns what is left in the results of an op."""
        del path
        op = params.op_of(eqn)
        joint = functools.reduce(self.join, facts, Left())
        multiplies = products.contracts_nothing(eqn)
        if op in PRODUCTS and not multiplies:
            return [Left(frozenset([id(eqn)]), of_carry=joint.of_carry)]
        keeps = op in ops.KEEPING_DIGITS and op not in ops.SUMMING
        if not (multiplies or keeps):
            return [Left(of_carry=joint.of_carry)] * len(eqn.outvars)
        if op == "sub":
            one, other = facts
            # A step that subtracts from its own state changes it by little.
            is_number = structure.is_literal(eqn.invars[0])
            is_apart = not (one.of_carry or is_number)
            if other.products and not one.products and is_apart:
                joint = joint._replace(residues=joint.residues | other.products)
        return [joint] * len(eqn.outvars)


class Differences(ForwardAnywhere[frozenset[int]]):
    """Follows differences to ops that amplify their rounding error.

    A fact is the differences that a value is made of, by id of the equation.

    Attributes:
      amplified: the differences that a root, a logarithm, a step or a quotient reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.amplified: set[int] = set()

    def follow(self, jaxpr: Jaxpr) -> None:
        """Follows the values of a whole program."""
        self.outputs(jaxpr, [frozenset()] * len(structure.parts(jaxpr).invars))

    def nothing(self) -> frozenset[int]:
        """A number is not a difference."""
        return frozenset()

    def join(self, one: frozenset[int], other: frozenset[int]) -> frozenset[int]:
        """Returns the differences in a value that is one of two."""
        return one | other

    def transfer(
        self, eqn: Eqn, facts: Sequence[frozenset[int]], path: str
    ) -> Sequence[frozenset[int]]:
        """Returns the differences in the results of an op, and records its own."""
        del path
        op = params.op_of(eqn)
        if op in _AMPLIFYING_ANY:
            for fact in facts[op in ops.AMPLIFYING_DIVISORS :]:
                self.amplified |= fact
        found = frozenset[int]()
        if op in _KEEPING_DIFFERENCES:
            found = found.union(*facts)
        if op in ops.ADDING:
            found |= {id(eqn)}
        return [found] * len(eqn.outvars)


_AMPLIFYING_ANY = ops.AMPLIFYING - ops.AMPLIFYING_LARGE
"""Ops that also amplify the rounding error of a small difference."""

_KEEPING_DIFFERENCES = _KEEPING_TERMS - ops.SUMMING
