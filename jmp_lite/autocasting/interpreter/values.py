"""What stands for a traced value while its function runs in another precision."""

import dataclasses
import enum
from typing import Any, NamedTuple, TypeAlias

from jmp_lite.autocasting.jaxprs.types import Array, Eqn


class State(enum.IntEnum):
    """What a float32 value is held in, and why; where values join, the largest wins.

    ``SOFT``: float32, because nobody has decided. ``LOW``: the compute dtype. ``HARD``:
    float32 on purpose.
    """

    SOFT = 0
    LOW = 1
    HARD = 2


class Kind(enum.Enum):
    """Where a value comes from.

    ``GIVEN``: an argument or a constant, perhaps moved: it is cast at each use, so that
    the gradients of its uses add up in float32. ``LITERAL``: a number in the program.
    ``EXACT``: one that 16 bits hold as it is, such as 0, 0.5 or -inf. ``INTEGER``: from
    integers, such as positions, perhaps scaled or shifted. ``END``: the end of
    float32's range, which as a branch of a selection means the end of whatever range
    there is.
    """

    COMPUTED = "computed"
    GIVEN = "given"
    LITERAL = "literal"
    EXACT = "exact"
    INTEGER = "integer"
    END = "end"


class Readers(enum.IntFlag):
    """What kinds of readers a value has; a value that nobody reads has ``OUTPUT``.

    ``FULL``: ops that run in float32, and ops that follow if their own results are
    demanded in float32. ``OUTPUT``: outputs of the function. ``OTHER``: ops that take
    16 bits, such as matrix products. The other kinds need digits that a product loses
    in 16 bits. ``INTEGER_CAST``: casts to integers. ``SOLVER``: factorizations and
    solvers. ``PHASE``: sines and cosines. ``LOW_PHASE``: a sine or a cosine whose
    result is not demanded in float32.
    """

    NOBODY = 0
    FULL = 1
    OUTPUT = 2
    OTHER = 4
    INTEGER_CAST = 8
    SOLVER = 16
    PHASE = 32
    LOW_PHASE = 64

    @property
    def want_float32(self) -> bool:
        """Whether no reader would rather have the value in 16 bits."""
        return not self & (Readers.OTHER | Readers.LOW_PHASE)

    @property
    def in_general(self) -> "Readers":
        """The same readers as ``FULL`` or ``OTHER``, without the kinds of digits."""
        if not self.want_float32:
            return Readers.OTHER
        digits = self & (Readers.INTEGER_CAST | Readers.SOLVER | Readers.PHASE)
        return (self & ~digits) | Readers.FULL if digits else self

    @property
    def in_float32(self) -> "Readers":
        """What a float32 sum is as a reader, if these read its result."""
        digits = self & (Readers.INTEGER_CAST | Readers.SOLVER | Readers.PHASE)
        if self & Readers.LOW_PHASE:
            digits |= Readers.PHASE
        return digits | Readers.FULL


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of the program, as the origin of a value.

    Attributes:
      value: the number; of an array constant one that does not fit 16 bits.
      is_element: whether it is an element of an array constant.
    """

    value: float
    is_element: bool = False


class Argument(NamedTuple):
    """An argument of the function, as the origin of a value.

    Attributes:
      path: where it is in the tree of arguments; nothing where that is not known.
    """

    path: str = ""


class Constant(NamedTuple):
    """An array that the function captures, as the origin of a value."""


class RangeEnd(NamedTuple):
    """The largest or the smallest float32, as the origin of a value."""


class Input(NamedTuple):
    """An input of the jaxpr that a value is in, as its origin inside of that."""

    number: int


Origin: TypeAlias = Eqn | Argument | Constant | Number | RangeEnd | Input | None
"""What made a value what it is held in; an equation may be a loop, for its carries."""


class Lineage(NamedTuple):
    """What a value is a function of, beside parameters and numbers.

    Attributes:
      roots: the 16-bit values; None if it is float32 for other reasons too.
      is_rejoined: whether the value is float32, and its only root was an operand again
        on the way to it, as the input of a norm is beside its mean. Then the value is
        part of one function, whose result is 16 bits.
    """

    roots: frozenset[object] | None = None
    is_rejoined: bool = False


class InputRoot(NamedTuple):
    """A root of an input of the jaxpr that a value is in; equal ones are one value."""

    number: int


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """What stands for a traced value.

    Attributes:
      array: the array, in the compute dtype where ``state`` is LOW.
      state: None for what was not traced in float32.
      kind: where it comes from.
      region: the ``FULL_INSIDE`` scope that computed it, if one did.
      is_from_low: whether something low that entered that scope is in it.
      cast: the array in the compute dtype, once a use has asked for it.
      raised: the array in float32, likewise, where ``state`` is LOW.
      quantized: the array as an operand of a float8 product, likewise.
      origin: what made it what it is held in.
      lineage: what it is a function of; None for what its state says alone.
      root: the object that represents it in the lineages of other values, made on first
        use. It holds no array: a converted jaxpr keeps lineages.
    """

    array: Array
    state: State | None = None
    kind: Kind = Kind.COMPUTED
    region: str | None = None
    is_from_low: bool = False
    cast: Any = None
    raised: Any = None
    quantized: Any = None
    origin: Origin = None
    lineage: Lineage | None = None
    root: object = None

    @property
    def roots(self) -> frozenset[object] | None:
        """The roots of its lineage; a 16-bit value without one is a root."""
        if self.state is State.SOFT:
            return frozenset()
        if self.lineage is not None:
            return self.lineage.roots
        if self.state is not State.LOW:
            return None
        self.root = self.root or object()
        return frozenset([self.root])

    @property
    def is_rejoined(self) -> bool:
        """Whether it is part of a function of one 16-bit value; see ``Lineage``."""
        return self.lineage is not None and self.lineage.is_rejoined

    @property
    def saturates(self) -> bool:
        """Whether it is a number of the program that 16 bits may not reach.

        In 16 bits it is then the largest there is, and not infinite.
        """
        is_large = self.state is State.HARD and self.kind is Kind.LITERAL
        return is_large or self.kind in (Kind.END, Kind.INTEGER)

    @property
    def is_number(self) -> bool:
        """Whether it is a number of the program."""
        return self.kind in (Kind.LITERAL, Kind.EXACT)

    @property
    def spec(self) -> "Spec":
        """All but the numbers."""
        return self.state, self.kind


Spec = tuple[State | None, Kind]
