"""What is known of a value: its precision, its origin, and who reads it."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np

from jmp_lite.jaxprs.types import Dtype, Eqn


class State(enum.IntEnum):
    """The precision of a float32 value; where values join, the largest wins."""

    # Float32, not decided yet: a bias, which must not widen the stream it is added to.
    SOFT = 0
    # The compute dtype.
    LOW = 1
    # Deliberate float32: a sum, a count, a number that 16 bits make infinite.
    HARD = 2


class Kind(enum.Enum):
    """The kind of a value."""

    COMPUTED = "computed"
    # An argument or a constant, possibly moved. It is cast at each use, so that the
    # gradients of its uses add up in float32: the gradient of a weight that 2,048 steps
    # read was 41 % wrong with one cast, 0.17 % with a cast at each use.
    GIVEN = "given"
    # Scalings and sums of given values, or any function of numbers alone: coordinates
    # less their mean, or a table of frequencies ``2**arange(n)``.
    SCALED = "scaled"
    # A number in the program.
    LITERAL = "literal"
    # A number that 16 bits represent exactly, such as 0, 0.5 or -inf.
    EXACT = "exact"
    # Computed from integers, such as positions, possibly scaled or shifted.
    INTEGER = "integer"
    # The largest or smallest float32, as ``finfo(x.dtype).min`` in a mask. As a branch
    # of a selection it means the end of the range of any dtype.
    END = "end"

    @property
    def is_cast_once(self) -> bool:
        """Whether all uses share one cast. It is the result of an op, and no move."""
        return self in (Kind.COMPUTED, Kind.SCALED)


class Readers(enum.IntFlag):
    """The kinds of readers of a value; an unread value has ``OUTPUT``.

    ``DIGITS``, ``PHASE`` and ``LOW_PHASE`` need digits that a product loses in 16 bits.
    One ``AMPLIFIER`` is enough: the value is then computed in float32, whatever else
    reads it. ``FACTOR``, ``SHIFTER`` and ``COMPLEMENT`` are weaker, and end at a sum of
    two arrays, such as the stream of a network: in float32 each residual network would
    move more bytes.
    """

    NOBODY = 0
    # Ops that run in float32, and ops that follow if their own results are demanded in
    # float32.
    FULL = 1
    # Outputs of the function. A hidden state that a product reads, too, stays 16-bit:
    # to return one more value may change no other result.
    OUTPUT = 2
    # Ops that take 16 bits, such as matrix products.
    OTHER = 4
    # Casts to integers, factorizations and solvers.
    DIGITS = 8
    # A sine or a cosine, as of Fourier features.
    PHASE = 32
    # One whose result is not demanded in float32, as in a hidden layer of a SIREN.
    LOW_PHASE = 64
    # Ops that amplify a rounding error of the value, directly or through ops that
    # follow: the logarithm in ``log(1 - gate)``.
    AMPLIFIER = 128
    # Readers whose results an earlier rounding of the value to 16 bits changes: all but
    # low products of it, or of a move of it. A weight without one is gathered in 16
    # bits (FSDP).
    EARLIER = 256
    # The op is part of a ``custom_jvp`` rule, so JAX transposes it as it is bound.
    TRANSPOSED = 512
    # Ops that multiply the value into a product of many. Gates near 1, in 16 bits, made
    # gradients 49 % wrong after 1,024 steps.
    FACTOR = 1024
    # Ops that amplify the error which an addition of a number or a bias makes, and no
    # other: ``tanh(h + 5)``, whose slope is small.
    SHIFTER = 2048
    # Also that of a bounded function near its bound, as in ``1 - g``.
    COMPLEMENT = 4096

    @property
    def demand_float32(self) -> bool:
        """Whether all readers demand float32."""
        return not self & _LOW_READERS

    @property
    def need_digits(self) -> bool:
        """Whether a reader needs all digits of a count."""
        needing = Readers.FULL | Readers.AMPLIFIER | Readers.DIGITS
        return self.demand_float32 or bool(self & needing)

    @property
    def amplify(self) -> bool:
        """Whether a reader amplifies a rounding error of the value."""
        return bool(self & _AMPLIFIERS)

    @property
    def amplify_shifts(self) -> bool:
        """Whether a reader amplifies the error that an added bias makes."""
        return bool(self & _SHIFTS)

    @property
    def without_shifts(self) -> "Readers":
        """These readers, without the demands of the weakest amplifiers."""
        return self & ~_SHIFTS

    @property
    def deciding(self) -> "Readers":
        """These readers, without those that change no decision given the others."""
        # A plan is remembered by them. With fewer different ones, more calls of a block
        # have one plan, and are lowered as one function.
        if not self & Readers.OTHER:
            return self | Readers.EARLIER
        return self & (_LOW_READERS | Readers.PHASE | _AMPLIFIERS | Readers.EARLIER)

    @property
    def take_16_bits(self) -> bool:
        """Whether each of them casts the value to 16 bits, or a move of it."""
        return self == Readers.OTHER

    @property
    def generalized(self) -> "Readers":
        """These readers as ``FULL`` or ``OTHER``, without those that need digits."""
        # In ``tanh(x @ w).astype(int)`` the tanh needs digits. Those of the product are
        # not its own: it is 16-bit.
        if not self.demand_float32:
            return Readers.OTHER | (self & (_AMPLIFIERS | Readers.EARLIER))
        digits = self & _DIGIT_READERS
        return (self & ~digits) | Readers.FULL if digits else self

    @property
    def full_reader(self) -> "Readers":
        """The kind of reader that a float32 op is, if these readers read its result."""
        digits = self & _DIGIT_READERS
        # In ``sin(sum(x @ w)) @ u`` a product reads the sine. The sum is float32, and
        # wants the digits of the phases.
        if self & Readers.LOW_PHASE:
            digits |= Readers.PHASE
        return digits | Readers.FULL


_SHIFTS = Readers.SHIFTER | Readers.COMPLEMENT
_AMPLIFIERS = Readers.AMPLIFIER | Readers.FACTOR | _SHIFTS
_LOW_READERS = Readers.OTHER | Readers.LOW_PHASE
_DIGIT_READERS = Readers.DIGITS | Readers.PHASE


class Mark(enum.Flag):
    """What an op does, seen from where its operands come from.

    It is a property of an equation, found before its decision, and independent of the
    precision marks of a user (``autocasting/marks.py``).
    """

    NONE = 0

    # What it does to the digits of its operands.

    # It adds a number, or an array that depends on no argument: ``1 - g``.
    NUMBER = enum.auto()
    # It subtracts functions of one value: ``(x + 0.01 * f(x)) - x``.
    DIFFERENCE = enum.auto()
    # It subtracts a mean or a maximum of a value from it, which cancels what was added
    # to all elements: a norm of ``h + 100``.
    SHIFT = enum.auto()
    # It multiplies a value into a state, or into a product of many: a gate of RG-LRU.
    FACTOR = enum.auto()

    # What a product is.

    # One whose first, or second operand is zeros and ones: ``one_hot(ids) @ table``.
    BINARY_LEFT = enum.auto()
    BINARY_RIGHT = enum.auto()
    # A step of a loop that computes a power of a matrix: a Koopman operator.
    POWER = enum.auto()
    # One of exponentials, read by a logarithm, a root or a quotient.
    SPREAD = enum.auto()

    # It computes random numbers from random bits and numbers alone.
    RANDOM = enum.auto()


@dataclasses.dataclass(frozen=True)
class NumberOrigin:
    """A number of the program, as the origin of a value.

    Attributes:
      value: the number; for an array constant, an element that does not fit 16 bits.
      is_element: whether it is an element of an array constant.
    """

    value: float
    is_element: bool = False


class Argument(NamedTuple):
    """An argument of the function, as the origin of a value.

    Attributes:
      path: its path in the tree of arguments; empty if unknown.
    """

    path: str = ""


class Constant(NamedTuple):
    """An array that the function captures, as the origin of a value."""


class RangeEnd(NamedTuple):
    """The largest or the smallest float32, as the origin of a value."""


class Input(NamedTuple):
    """An input of the value's jaxpr, as its origin inside of that jaxpr."""

    number: int


Origin: TypeAlias = Eqn | Argument | Constant | NumberOrigin | RangeEnd | Input | None
"""The origin of a value's state; for the carry of a loop it is the loop."""


def is_equation(origin: Origin) -> TypeGuard[Eqn]:
    """Whether an origin is an equation."""
    return origin is not None and not isinstance(origin, _OTHER_ORIGINS)


_OTHER_ORIGINS = (Argument, Input, Constant, NumberOrigin, RangeEnd)


class Lineage(NamedTuple):
    """What a value is a function of, apart from parameters and numbers.

    Attributes:
      roots: the 16-bit values, each as an object or an ``InputRoot``: for a product
        the product itself, for ``mean(h)`` of a 16-bit ``h`` that of ``h``. Empty for a
        parameter, and what is computed from parameters and numbers alone. None if it is
        float32 for other reasons too.
      is_rejoined: whether the value is float32, and an op on the way to it reads its
        only root next to a value that is computed from this root. For example, a norm
        subtracts the mean of ``x`` from ``x``. Then the value is part of one function
        of the root, whose result is 16-bit.
    """

    roots: frozenset[object] | None = None
    is_rejoined: bool = False


class InputRoot(NamedTuple):
    """An input of the value's jaxpr as a root; equal ones are one value."""

    number: int


def is_from_16_bits(state: State | None, roots: frozenset[object] | None) -> bool:
    """Whether a value is 16-bit, or would be but for a reader that amplifies errors.

    Args:
      state: its state.
      roots: the 16-bit values that it is a function of; see ``Lineage``.
    """
    return state is State.LOW or (state is State.SOFT and bool(roots))


class Spec(NamedTuple):
    """The facts of a value on which a jaxpr that it enters depends.

    Attributes:
      state: its state; None if it was not traced in float32.
      kind: its kind.
      stored: the dtype that it has although it was traced in float32 and its state is
        not LOW, or None. It is an argument of 16 bits, or an array of 8 bits or fewer
        that the program casts to float32, possibly moved. Examples: a bfloat16
        parameter, and its transpose, are stored in bfloat16; ``w.astype("float32")`` of
        int8 weights is stored in int8. A float32 parameter and the result of a product
        have none.
    """

    state: State | None
    kind: Kind = Kind.COMPUTED
    stored: Dtype | None = None

    def dtype(self, low_dtype: Dtype) -> Dtype:
        """Returns the dtype of a value that was traced in float32.

        Args:
          low_dtype: the compute dtype.
        """
        is_low = self.state is State.LOW
        return low_dtype if is_low else self.stored or np.dtype("float32")


class Facts(NamedTuple):
    """All that is known of a value before the program runs.

    Attributes:
      state: its state; None if it was not traced in float32.
      kind: its kind.
      stored: the dtype that it has although its state is not LOW; see ``Spec``.
      origin: the origin of its state.
      shape: its shape.
      lineage: its lineage.
      is_shared: whether more than two equations read a stored value, or several one of
        8 bits that has gradients. Then the gradients add up in float32: the value is
        cast to float32 once, for all of them.
    """

    state: State | None
    kind: Kind = Kind.COMPUTED
    stored: Dtype | None = None
    origin: Origin = None
    shape: tuple[int, ...] = ()
    lineage: Lineage = Lineage()
    is_shared: bool = False

    @classmethod
    def of(
        cls,
        spec: Spec,
        origin: Origin = None,
        shape: tuple[int, ...] = (),
        lineage: Lineage | None = None,
    ) -> "Facts":
        """Returns the facts of a value; without a lineage, the state determines it."""
        return cls(
            *spec, origin, shape, lineage or _OF_STATES.get(spec.state) or _new()
        )

    @property
    def spec(self) -> Spec:
        """What a jaxpr that it enters depends on."""
        return Spec(*self[:3])

    @property
    def roots(self) -> frozenset[object] | None:
        """The roots of its lineage."""
        return self.lineage.roots

    @property
    def has_lineage(self) -> bool:
        """Whether it may be a function of 16-bit values, unlike a parameter."""
        if self.state is State.SOFT:
            return self.roots != frozenset()
        return self.state is not None

    @property
    def is_weight(self) -> bool:
        """Whether it is a float32 argument or constant, or a slice of one."""
        return self.state is not None and self.kind is Kind.GIVEN

    @property
    def is_narrow(self) -> bool:
        """Whether it was traced in float32, and its array has 16 bits or fewer."""
        return self.state is State.LOW or self.stored is not None

    @property
    def saturates(self) -> bool:
        """Whether it is a number of the program that may be out of range in 16 bits.

        In 16 bits it becomes the largest finite number, not an infinity.
        """
        # A mask of -1e9 would be -inf in float16, and the softmax of a row of -inf NaN.
        is_large = self.state is State.HARD and self.kind is Kind.LITERAL
        return is_large or self.kind in (Kind.END, Kind.INTEGER)

    @property
    def is_number(self) -> bool:
        """Whether it is a number of the program."""
        return self.kind in (Kind.LITERAL, Kind.EXACT)


# Deliberate float32 is a part of no function of one 16-bit value: in
# ``tanh(x @ w + exp(arange(8)))`` the sum and the tanh are float32.
_OF_STATES = {None: Lineage(), State.HARD: Lineage(), State.SOFT: Lineage(frozenset())}


def _new() -> Lineage:
    """Returns the lineage of a new 16-bit value, which is a root itself."""
    return Lineage(frozenset([object()]))


# Lineages of values that enter a jaxpr inside of an equation, or leave it. Inside they
# have numbers, so that the plan of a jaxpr does not depend on the values of one call.


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


def join_specs(specs: Sequence[Spec]) -> Spec:
    """Returns the spec of a value that has one of several specs."""
    states = [spec.state for spec in specs if spec.state is not None]
    kinds = {spec.kind for spec in specs}
    dtypes = {spec.stored for spec in specs}
    # In ``cond(p, exp, lambda x: x @ w, x)`` one branch is float32 on purpose, so HARD,
    # the largest state, wins.
    kind = kinds.pop() if len(kinds) == 1 else Kind.COMPUTED
    stored = dtypes.pop() if len(dtypes) == 1 else None
    return Spec(max(states, default=None), kind, stored)


def origin_outside(origin: Origin, origins: Sequence[Origin]) -> Origin:
    """Returns an origin outside of a jaxpr whose inputs have these origins."""
    return origins[origin.number] if isinstance(origin, Input) else origin
