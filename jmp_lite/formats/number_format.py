"""A number format of matrix products: which products have it, and how they run.

A format is a record, an instance of ``NumberFormat``. To add one, write a file with a
subclass, and an entry in ``table.FORMATS``; nothing else in the package has to change.
Rules then request it by its name, for all products (``rules.product("float8")``) or for
those in a scope (``rules.scope("mlp", "float8")``).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax

from jmp_lite.casting.dtypes import unknown_name
from jmp_lite.jaxprs import params, products, structure
from jmp_lite.jaxprs.bilinear import ProductOperand
from jmp_lite.jaxprs.types import Array, Dtype, Eqn


class Product(NamedTuple):
    """A product that runs low.

    Attributes:
      eqn: its equation.
      dtype: the compute dtype.
      weights: for each operand, whether it is a weight: an argument, a constant, or a
        slice of one.
    """

    eqn: Eqn
    dtype: Dtype
    weights: tuple[bool, ...]


class Verdict(NamedTuple):
    """Whether a product qualifies for a format, and why.

    Attributes:
      qualifies: whether it does; one that does not is ``low``.
      code: the reason; ``NumberFormat.words`` has its words. Empty if the rule alone
        decides.
    """

    qualifies: bool = True
    code: str = ""


class Advice(NamedTuple):
    """The lint of ``explain`` for the products with some verdict.

    Attributes:
      lint: the name of the lint.
      remedy: how to solve the problem.
      message: the problem; empty for the words of the verdict.
      is_for_scopes: whether it is only for products that a scope rule names.
    """

    lint: str
    remedy: str
    message: str = ""
    is_for_scopes: bool = False


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """A number format of matrix products.

    This class itself is ``low``: operands and result are in the compute dtype, and
    every product qualifies. A subclass changes some of its methods.

    Attributes:
      name: its name in rules, and in ``explain``.
      lowers: whether products read their operands in 16 bits or fewer, as
        ``Precision.lowers``.
      ops: the products that rules can request it for.
      why_these_ops: a sentence on other ops, for the error message.
      has_fewer_digits: whether operands lose digits that the compute dtype has.
        ``tune`` finds the products that tolerate such a format.
      saved: the ``checkpoint_name`` of values that ``jax.checkpoint`` saves in addition
        to its policy.

    Example:
      >>> class Coarse(NumberFormat):
      ...     def round(self, array):
      ...         return lax.reduce_precision(array, exponent_bits=5, mantissa_bits=4)
      >>> Coarse("coarse").judge(Product(None, None, ()), True, False).qualifies
      True
    """

    name: str
    lowers: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]] = tuple(sorted(products.PRODUCTS))
    why_these_ops: ClassVar[str] = ""
    has_fewer_digits: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ()

    @property
    def takes_float32(self) -> bool:
        """Whether ``round`` gets operands in float32, and not in the compute dtype."""
        return False

    @property
    def returns_float32(self) -> bool:
        """Whether its results are float32, and not in the compute dtype."""
        return False

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands, which ``explain`` shows.

        Args:
          low: the compute dtype.
        """
        return low

    # A decision is data: a code, which ``explain`` and its lints translate into words.
    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies.

        Args:
          product: the product, an op in ``ops``.
          is_last: whether only float32 ops read its result, as for logits.
          is_named: whether a scope rule requests the format, not an op rule.
        """
        del product, is_last, is_named
        return QUALIFIES

    def words(self, code: str, eqn: Eqn) -> str:
        """Returns the code of a verdict in words, a clause without a full stop."""
        del eqn
        return code.replace("_", " ")

    def advice(self, code: str) -> Advice | None:
        """Returns the lint for products with the code of a verdict, or None."""
        del code
        return None

    def round(self, array: Array) -> Array | ProductOperand:
        """Returns an operand of a product, from an array in the compute dtype.

        A computed array is rounded once for all products that read it.
        """
        return array

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product, in the compute dtype or in float32.

        Args:
          product: the product.
          operands: its two operands, as ``round`` returns them, then any others.
          bound: see ``params.bind``.
        """
        (result,) = params.bind_in(
            product.eqn, operands, product.dtype, algorithm(product), bound
        )
        return result


def check_option(kind: str, value: str, accepted: Sequence[str]) -> None:
    """Raises a ValueError for the value of an option that is not accepted."""
    if value not in accepted:
        raise unknown_name(kind, str(value), accepted)


def are_floats(eqn: Eqn) -> bool:
    """Whether both operands of a product are floats."""
    return all(map(structure.is_float, eqn.invars[:2]))


LOW = NumberFormat("low")
"""The format of low products for which rules request no other."""

QUALIFIES = Verdict()

INTEGERS = Verdict(False, "an_operand_has_integers")


def algorithm(product: Product) -> lax.DotAlgorithmPreset | None:
    """Returns the algorithm of a product of 16-bit operands; None for the default."""
    # Without one the compiler chooses the dtype of the sum: a TPU v7x sums in bfloat16.
    # No algorithm for float16 runs on every platform.
    is_pinned = product.dtype == jnp.bfloat16 and _is_of_matrices(product.eqn)
    return lax.DotAlgorithmPreset.BF16_BF16_F32 if is_pinned else None


def _is_of_matrices(eqn: Eqn) -> bool:
    """Whether a product is one of matrices, or a batch of matrix-vector products."""
    if params.op_of(eqn) != "dot_general":
        return False
    *sides, summed = products.product_sizes(eqn)
    # XLA aborts on some products with an algorithm, three batch axes and a contracted
    # size of 1 (jax 0.12 too). The derivative of a product with a vector has such a
    # size.
    if summed == 1 or all(side == 1 for side in sides):
        return False
    _, (batch, _) = products.dot_dimensions(eqn)
    n_copies = math.prod(eqn.invars[0].aval.shape[i] for i in batch)
    are_vectors = any(side == 1 for side in sides)
    # XLA for CPUs fuses the product of a vector with the ops that make its matrix, and
    # that fusion accepts no algorithm (jax 0.10).
    return not are_vectors or (n_copies != 1 and len(batch) < 3)
