"""Values: traced arrays together with their precision while a function runs."""

import dataclasses

from jmp_lite.autocasting.decide.facts import Kind, Lineage, Origin, Spec, State
from jmp_lite.formats.number_format import NumberFormat
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.types import Array, Dtype


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A traced value with its precision.

    Attributes:
      array: the array, in the compute dtype if ``state`` is LOW.
      state: its state; None if it was not traced in float32.
      kind: its kind.
      held: the dtype of the array, of 16 bits or fewer, although ``state`` is not LOW,
        or None; see ``Spec``.
      cast: the array in the compute dtype, after the first use that needs it.
      upcast: an array of 16 bits in float32, after the first use that needs it.
      is_shared: whether more than two equations read a held value, or several one of 8
        bits that has gradients. Then they add up in float32.
      rounded: the array as an operand of products, by their number formats, after the
        first such use.
      origin: the origin of its state.
      lineage: its lineage; None if the state determines it.
      root: the object that represents it in the lineages of other values, made on first
        use. It holds no array, because a converted jaxpr keeps lineages.
    """

    array: Array
    state: State | None = None
    kind: Kind = Kind.COMPUTED
    held: Dtype | None = None
    cast: Array | None = None
    upcast: Array | None = None
    is_shared: bool = False
    rounded: dict[NumberFormat, Array | ProductOperand] = dataclasses.field(
        default_factory=dict
    )
    origin: Origin = None
    lineage: Lineage | None = None
    root: object = None

    @property
    def roots(self) -> frozenset[object] | None:
        """The roots of its lineage; without one, a 16-bit value is a root itself."""
        if self.lineage is not None:
            return self.lineage.roots
        if self.state is State.SOFT:
            return frozenset()
        if self.state is not State.LOW:
            return None
        self.root = self.root or object()
        return frozenset([self.root])

    @property
    def is_narrow(self) -> bool:
        """Whether it was traced in float32, and its array has 16 bits or fewer."""
        return self.state is State.LOW or self.held is not None

    @property
    def has_lineage(self) -> bool:
        """Whether it may be a function of 16-bit values, unlike a parameter."""
        if self.state is State.SOFT:
            return self.roots != frozenset()
        return self.state is not None

    @property
    def is_rejoined(self) -> bool:
        """Whether it is part of a function of one 16-bit value; see ``Lineage``."""
        return self.lineage is not None and self.lineage.is_rejoined

    @property
    def saturates(self) -> bool:
        """Whether it is a number of the program that may be out of range in 16 bits.

        In 16 bits it becomes the largest finite number, not an infinity.
        """
        is_large = self.state is State.HARD and self.kind is Kind.LITERAL
        return is_large or self.kind in (Kind.END, Kind.INTEGER)

    @property
    def is_number(self) -> bool:
        """Whether it is a number of the program."""
        return self.kind in (Kind.LITERAL, Kind.EXACT)

    @property
    def spec(self) -> Spec:
        """What is known of it, without the array."""
        return Spec(self.state, self.kind, self.held)
