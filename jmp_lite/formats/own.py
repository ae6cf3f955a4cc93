"""Number formats that users write."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp_lite.formats.number_format import (
    INTEGERS,
    QUALIFIES,
    NumberFormat,
    Product,
    Verdict,
    are_floats,
    check_option,
)
from jmp_lite.formats.table import FORMATS
from jmp_lite.jaxprs import products, sharding
from jmp_lite.jaxprs.types import Array, Dtype, Function
from jmp_lite.ops import Precision


@dataclasses.dataclass(frozen=True)
class Format:
    """Your own number format: a function in place of ``lax.dot_general``.

    Rules take it for all matrix products (``rules.product(format)``) or for those in a
    scope (``rules.scope(pattern, format)``).

    Attributes:
      name: its name, which ``explain`` shows.
      dot_general: a function with the signature of ``lax.dot_general``: two operands
        and dimension numbers; ``precision`` and ``preferred_element_type`` by keyword,
        and ``out_sharding`` if the product requests one. Flax's ``dot_general=``, AQT
        and Qwix have such functions. Autocast does not convert what is inside, and
        keeps its derivative rules.
      operands: the dtype of its operands: ``"low"`` for the compute dtype, or
        ``"float32"``.
      result: the dtype to which its result is cast: ``"low"`` or ``"float32"``.

    Raises:
      TypeError: ``dot_general`` is not a function.
      ValueError: a dtype is neither ``"low"`` nor ``"float32"``; the name is empty or
        that of a format of this library; in a call, the result has another shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax import lax
      >>> import jmp_lite as jmp
      >>> def coarse(lhs, rhs, dimensions, precision=None, preferred_element_type=None):
      ...     lhs = lax.reduce_precision(lhs, exponent_bits=8, mantissa_bits=3)
      ...     return lax.dot_general(lhs, rhs, dimensions)
      >>> rules = jmp.get_rules("mixed").product(jmp.Format("coarse", coarse))
      >>> x = jnp.ones((8, 8))
      >>> jmp.explain(lambda x: x @ x, rules)(x).rows[0].number_format
      'coarse'
    """

    name: str
    dot_general: Function
    operands: str = "low"
    result: str = "low"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                "Expected the name of a format as letters, digits and underscores, got "
                f"{self.name!r}."
            )
        # Rules name formats and precisions by one kind of word: "wide", "low", ...
        if self.name.lower() in {*FORMATS, *(one.value for one in Precision)}:
            raise ValueError(f"{self.name!r} is taken by this library: choose another.")
        if not callable(self.dot_general):
            raise TypeError(
                "Expected dot_general as a function with the signature of "
                f"lax.dot_general, got {self.dot_general!r}."
            )
        # Rules are frozen, hashable values, and a format is a part of them.
        try:
            hash(self.dot_general)
        except TypeError:
            raise TypeError(
                "Expected dot_general as a function that can be hashed, since rules "
                f"can, got {self.dot_general!r}."
            ) from None
        for field in ("operands", "result"):
            check_option(f"dtype for {field}", getattr(self, field), ["low", "float32"])


@dataclasses.dataclass(frozen=True)
class OwnFormat(NumberFormat):
    """The record of a ``Format``.

    Attributes:
      own: the format.
    """

    own: Format

    ops = ("dot_general",)
    why_these_ops = "Its function has the signature of lax.dot_general."

    def __repr__(self) -> str:
        return repr(self.own)

    @property
    def takes_float32(self) -> bool:
        """Whether its operands are float32."""
        return self.own.operands == "float32"

    @property
    def returns_float32(self) -> bool:
        """Whether its results are float32."""
        return self.own.result == "float32"

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        return np.dtype("float32") if self.takes_float32 else low

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies: its operands are floats."""
        del is_last, is_named
        return QUALIFIES if are_floats(product.eqn) else INTEGERS

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the result of the user's function."""
        del bound
        dtype = np.dtype("float32") if self.returns_float32 else product.dtype
        options = products.dot_options(product.eqn, dtype)
        dimensions = products.dot_dimensions(product.eqn)
        result = self.own.dot_general(*operands, dimensions, **options)
        expected = product.eqn.outvars[0].aval.shape
        if getattr(result, "shape", None) != expected:
            raise ValueError(
                f"Expected the format {self.name!r} to return an array of shape "
                f"{expected}, as lax.dot_general does, got "
                f"{getattr(result, 'shape', result)}."
            )
        return sharding.cast(result, dtype)
