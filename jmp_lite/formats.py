"""The number formats of matrix products: which products have one, and how they run.

A format is a record, an instance of ``NumberFormat``. To add one, write a subclass and
an entry in ``FORMATS``; nothing else in the package has to change. Rules then request
it by its name, for all products (``rules.product("float8")``) or for those in a scope
(``rules.scope("mlp", "float8")``).
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_lite import quantized_products, row_products
from jmp_lite.casting.dtypes import parse_dtype, unknown_name
from jmp_lite.casting.quantize import SCALE_NAME
from jmp_lite.jaxprs import cost, dots, params, sharding, structure, wide_dot
from jmp_lite.jaxprs.types import Array, Dtype, Eqn
from jmp_lite.ops import Precision


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
    ops: ClassVar[tuple[str, ...]] = tuple(sorted(params.PRODUCTS))
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

    def round(self, array: Array) -> Any:
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
            product.eqn, operands, product.dtype, _algorithm(product), bound
        )
        return result


def _are_floats(eqn: Eqn) -> bool:
    return all(map(structure.is_float, eqn.invars[:2]))


LOW = NumberFormat("low")
"""The format of low products for which rules request no other."""

QUALIFIES = Verdict()

_INTEGERS = Verdict(False, "an_operand_has_integers")


def _algorithm(product: Product) -> Any:
    """Returns the algorithm of a product of 16-bit operands; None for the default.

    Without one the compiler chooses the dtype of the sum; a TPU v7x chooses bfloat16.
    No algorithm for float16 runs on every platform.
    """
    is_pinned = product.dtype == jnp.bfloat16 and _is_of_matrices(product.eqn)
    return lax.DotAlgorithmPreset.BF16_BF16_F32 if is_pinned else None


def _is_of_matrices(eqn: Eqn) -> bool:
    """Whether a product is one of matrices, or a batch of matrix-vector products.

    XLA for CPUs fuses the product of a vector with the ops that make its matrix, and
    that fusion accepts no algorithm (jax 0.10). XLA also aborts on some products with
    an algorithm, three batch axes and a contracted size of 1 (jax 0.12 too). The
    derivative of a product with a vector has such a size.
    """
    if params.op_of(eqn) != "dot_general":
        return False
    *sides, summed = cost.product_sizes(eqn)
    if summed == 1 or all(side == 1 for side in sides):
        return False
    _, (batch, _) = params.dot_dimensions(eqn)
    n_copies = math.prod(eqn.invars[0].aval.shape[i] for i in batch)
    are_vectors = any(side == 1 for side in sides)
    return not are_vectors or (n_copies != 1 and len(batch) < 3)


# -------------------------------------------------------------------------------- wide


@dataclasses.dataclass(frozen=True)
class WideFormat(NumberFormat):
    """The format ``wide``: operands in the compute dtype, and a float32 result.

    It is for products that float32 ops alone read, such as the logits of a language
    model. The cotangent is cast to the compute dtype, so that all three products have
    16-bit operands.
    """

    ops = ("dot_general",)
    why_these_ops = (
        "It is a form of matrix products; XLA for GPUs runs a convolution with a "
        "float32 result in float32."
    )
    has_fewer_digits = False

    @property
    def returns_float32(self) -> bool:
        """Its results are float32."""
        return True

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies: only float32 ops read its result."""
        del is_named
        if not _are_floats(product.eqn):
            return _INTEGERS
        return QUALIFIES if is_last else Verdict(False, "read_in_16_bits")

    def words(self, code: str, eqn: Eqn) -> str:
        """Returns the code of a verdict in words."""
        if code == "read_in_16_bits":
            return "an op that takes 16 bits reads it"
        return super().words(code, eqn)

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product, in float32."""
        del bound
        return wide_dot.wide_dot(product.eqn, operands, _algorithm(product))


# ------------------------------------------------------------------------------ float8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8:
    """The formats of float8 matrix products, and the smallest product that qualifies.

    An operand is divided by a scale and rounded. The scale is a power of two that
    brings the operand's largest number near the largest number of the format. A product
    qualifies under these conditions:

    - The compute dtype is bfloat16.
    - One operand is a weight: an argument, a constant, or a slice of one in a scan.
    - It has no batch axes.
    - Its sizes are multiples of 16.
    - It is large enough, see ``smallest``.
    - An op that takes 16 bits reads its result. Logits and the result of a router are
      read only by float32 ops. (A scope rule for float8 includes these too.)

    Attributes:
      forward: the format of both operands: ``"e4m3fn"``, or ``"e4m3fnuz"`` on AMD's
        MI300.
      backward: the format of cotangents: ``"e5m2"``, ``"e5m2fnuz"``, or a format of
        ``forward``, with more digits and less range.
      smallest: the smallest harmonic mean of the sizes M, K and N. This mean measures
        the arithmetic of a product relative to the bytes that it reads and writes.
        Below it, quantization costs as much as the product gains: on an H100, some ten
        kernels for each weight.

    Raises:
      ValueError: a format is unknown, or matrix units do not multiply in it;
        ``smallest`` is negative or not a number.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; the scales are
    those of TransformerEngine's "current scaling" and torchao's "tensorwise".

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.Float8(smallest=0)
      Float8(forward='e4m3fn', backward='e5m2', smallest=0)
      >>> jmp.Float8().forward_dtype
      dtype(float8_e4m3fn)
    """

    forward: str = "e4m3fn"
    backward: str = "e5m2"
    smallest: float = 2000

    def __post_init__(self) -> None:
        _check_format("forward", self.forward, _FORWARD)
        _check_format("backward", self.backward, _BACKWARD)
        _check_smallest(self.smallest)

    @property
    def forward_dtype(self) -> np.dtype[Any]:
        """The dtype of operands, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.forward}")

    @property
    def backward_dtype(self) -> np.dtype[Any]:
        """The dtype of cotangents, a ``np.dtype``."""
        return parse_dtype(f"float8_{self.backward}")


_FORWARD = ("e4m3fn", "e4m3fnuz")

_BACKWARD = ("e5m2", "e5m2fnuz", *_FORWARD)


def _check_smallest(smallest: Any) -> None:
    is_number = isinstance(smallest, int | float) and smallest >= 0
    if not is_number or isinstance(smallest, bool):
        raise ValueError(
            f"Expected a number of at least 0 for smallest, got {smallest!r}."
        )


def _check_format(field: str, name: str, accepted: Sequence[str]) -> None:
    if name not in accepted:
        raise unknown_name(f"{field} format", str(name), accepted)


@dataclasses.dataclass(frozen=True)
class _EightBits(NumberFormat, abc.ABC):
    """A format of 8 bits for products of weights that are large enough.

    Attributes:
      takes_batches: whether a product may have batch axes.
      options_in_words: what makes its options, for a message.
    """

    ops = ("dot_general",)
    takes_batches: ClassVar[bool] = False
    options_in_words: ClassVar[str]

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the compute dtype has to be bfloat16."""
        return True

    @property
    @abc.abstractmethod
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies.

        ``Float8`` lists the conditions. A subclass may take other compute dtypes, and
        products with batch axes.
        """
        code = self._refusal(product)
        if code is None and is_last:
            # A scope names this product, while an op rule names all of them.
            if is_named:
                return Verdict(True, "though_read_in_float32")
            code = "read_in_float32"
        return QUALIFIES if code is None else Verdict(False, code)

    def _refusal(self, product: Product) -> str | None:
        if not _are_floats(product.eqn):
            return _INTEGERS.code
        if self.needs_bfloat16 and product.dtype != jnp.bfloat16:
            return "compute_dtype"
        if not any(product.weights):
            return "no_weight"
        _, (batch, _) = params.dot_dimensions(product.eqn)
        if batch and not self.takes_batches:
            return "batch"
        sizes = cost.product_sizes(product.eqn)
        if not all(map(_fits, sizes)):
            return "size"
        return "small" if _harmonic_mean(sizes) < self.smallest_mean else None

    def words(self, code: str, eqn: Eqn) -> str:
        """Returns the code of a verdict in words."""
        sizes = dict(zip("MNK", cost.product_sizes(eqn), strict=True))
        if code == "size":
            name, size = next(item for item in sizes.items() if not _fits(item[1]))
            verb = "is not" if isinstance(size, int) else "may not be"
            return f"{name} = {size} {verb} a multiple of 16"
        if code == "small":
            text = " x ".join(map(str, sizes.values()))
            mean = _harmonic_mean([*sizes.values()])
            return f"{text} is too small (harmonic mean {mean:.0f})"
        return _EIGHT_BIT_WORDS.get(code) or super().words(code, eqn)

    def advice(self, code: str) -> Advice | None:
        """Returns the lint for products with the code of a verdict, or None."""
        if code == "size":
            remedy = "needs multiples of 16: pad, or choose another width"
            return Advice(f"{self.name} sizes", f"{self.name.capitalize()} {remedy}")
        if code == "small":
            return Advice(
                f"small {self.name} product",
                "Leave it out of the scope, or lower "
                f"{self.options_in_words}smallest=...)",
                is_for_scopes=True,
            )
        if code == "though_read_in_float32":
            return Advice(
                f"last {self.name} product",
                f'Add rules.scope(..., "low") before the {self.name} scope',
                f"only float32 ops read the result of this {self.name} product "
                "(logits, for example)",
            )
        return None


_EIGHT_BIT_WORDS = {
    "compute_dtype": "the compute dtype is not bfloat16",
    "no_weight": "no operand is a weight",
    "batch": "the product has batch axes",
    "read_in_float32": "read only by float32 ops",
    "though_read_in_float32": "read only by float32 ops",
}


@dataclasses.dataclass(frozen=True)
class Float8Format(_EightBits):
    """The format ``float8``, with its options; see ``quantized_products``."""

    options: Float8 = Float8()

    why_these_ops = "XLA has no float8 kernels for convolutions and ragged products."
    saved = (SCALE_NAME,)
    options_in_words = "jmp_lite.Float8("

    @property
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""
        return self.options.smallest

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        return self.options.forward_dtype

    def round(self, array: Array) -> Any:
        """Returns an operand of a product, quantized."""
        forward = self.options.forward_dtype
        return quantized_products.quantize_operand(array, forward)

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product, whose cotangent is quantized too."""
        lhs, rhs = operands
        if product.weights[1]:
            lhs = quantized_products.apart(lhs, rhs)
        else:
            rhs = quantized_products.apart(rhs, lhs)
        return quantized_products.product(
            lhs,
            rhs,
            params.dot_dimensions(product.eqn),
            self.options.backward_dtype,
        )


def _fits(size: object) -> bool:
    """Whether matrix units accept a size in float8. False for a symbolic size."""
    return isinstance(size, int) and size > 0 and size % 16 == 0


def _harmonic_mean(sizes: Sequence[int]) -> float:
    """Returns the harmonic mean of sizes.

    For the sizes of a product, it is three times the multiplications divided by the
    elements of operands and result: the ratio of arithmetic to memory traffic.
    """
    return len(sizes) / sum(1 / size for size in sizes)


# -------------------------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class RowsFormat(_EightBits):
    """Operands of 8 bits with one scale for each row; see ``row_products``.

    Attributes:
      forward: the dtype of operands.
      backward: the dtype of cotangents.
      smallest: the smallest harmonic mean of the sizes M, K and N, see ``Float8``.
    """

    forward: str
    backward: str
    smallest: float

    why_these_ops = "Operands of convolutions and ragged products have no rows."
    takes_batches = True
    options_in_words = "jmp_lite.get_format(..., "

    def __post_init__(self) -> None:
        is_int8 = self.name == "int8"
        for field, accepted in (("forward", _FORWARD), ("backward", _BACKWARD)):
            names = ["int8"] if is_int8 else [f"float8_{each}" for each in accepted]
            if getattr(self, field) not in names:
                given = str(getattr(self, field))
                raise unknown_name(f"{field} dtype of {self.name}", given, names)
        _check_smallest(self.smallest)

    @property
    def smallest_mean(self) -> float:
        """The smallest harmonic mean of the sizes of a product that qualifies."""
        return self.smallest

    @property
    def needs_bfloat16(self) -> bool:
        """Whether the compute dtype has to be bfloat16."""
        return self.forward != "int8"

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        del low
        return np.dtype(self.forward)

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns the product; the products of its derivative are quantized too."""
        del bound
        forward, backward = np.dtype(self.forward), np.dtype(self.backward)
        form = row_products.ByRows(forward, forward, backward)
        return dots.bilinear_dot(product.eqn, operands, form)


# --------------------------------------------------------------------------------- own


@dataclasses.dataclass(frozen=True)
class Format(NumberFormat):
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

    dot_general: Callable[..., Any]
    operands: str = "low"
    result: str = "low"

    ops = ("dot_general",)
    why_these_ops = "Its function has the signature of lax.dot_general."

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                "Expected the name of a format as letters, digits and underscores, got "
                f"{self.name!r}."
            )
        if self.name.lower() in {*FORMATS, *(one.value for one in Precision)}:
            raise ValueError(f"{self.name!r} is taken by this library: choose another.")
        if not callable(self.dot_general):
            raise TypeError(
                "Expected dot_general as a function with the signature of "
                f"lax.dot_general, got {self.dot_general!r}."
            )
        try:
            hash(self.dot_general)
        except TypeError:
            raise TypeError(
                "Expected dot_general as a function that can be hashed, since rules "
                f"can, got {self.dot_general!r}."
            ) from None
        for field in ("operands", "result"):
            if getattr(self, field) not in ("low", "float32"):
                raise unknown_name(
                    f"dtype for {field}", str(getattr(self, field)), ["low", "float32"]
                )

    @property
    def takes_float32(self) -> bool:
        """Whether its operands are float32."""
        return self.operands == "float32"

    @property
    def returns_float32(self) -> bool:
        """Whether its results are float32."""
        return self.result == "float32"

    def dtype(self, low: Dtype) -> Dtype:
        """Returns the dtype of operands."""
        return np.dtype("float32") if self.takes_float32 else low

    def judge(self, product: Product, is_last: bool, is_named: bool) -> Verdict:
        """Returns whether a product qualifies: its operands are floats."""
        del is_last, is_named
        return QUALIFIES if _are_floats(product.eqn) else _INTEGERS

    def multiply(
        self, product: Product, operands: Sequence[Any], bound: set[object]
    ) -> Array:
        """Returns what the function makes of the operands."""
        del bound
        dtype = np.dtype("float32") if self.returns_float32 else product.dtype
        options = params.dot_options(product.eqn, dtype)
        dimensions = params.dot_dimensions(product.eqn)
        result = self.dot_general(*operands, dimensions, **options)
        expected = product.eqn.outvars[0].aval.shape
        if getattr(result, "shape", None) != expected:
            raise ValueError(
                f"Expected the format {self.name!r} to return an array of shape "
                f"{expected}, as lax.dot_general does, got "
                f"{getattr(result, 'shape', result)}."
            )
        return sharding.cast(result, dtype)


# ------------------------------------------------------------------------- all of them

FORMATS: dict[str, NumberFormat] = {
    "float8": Float8Format("float8"),
    # Below these sizes, quantization costs what the product gains: on an H100 for
    # float8, and on a TPU v5e for int8.
    "float8_rows": RowsFormat(
        "float8_rows", "float8_e4m3fn", "float8_e5m2", smallest=3000
    ),
    "int8": RowsFormat("int8", "int8", "int8", smallest=4000),
    "wide": WideFormat("wide"),
}
"""The formats that rules can request, by name."""


def get_format(name: str, **options: Any) -> NumberFormat:
    """Returns a number format of products with other options.

    Args:
      name: ``"int8"``, ``"float8_rows"``, ...
      **options: its options. Formats of 8 bits by rows have ``smallest``, the smallest
        harmonic mean of the sizes M, K and N of a product that qualifies.

    Raises:
      ValueError: the name or an option is unknown.

    Example:
      >>> import jmp_lite as jmp
      >>> small_too = jmp.get_format("int8", smallest=0)
      >>> rules = jmp.get_rules("mixed").scope("mlp", small_too)
      >>> jmp.Rules.from_json(rules.to_json()) == rules
      True
    """
    known = FORMATS.get(name)
    if known is None:
        raise unknown_name("format", str(name), FORMATS)
    if name == "float8":
        raise ValueError(
            "The options of float8 are part of the rules: "
            "Rules(float8_format=jmp_lite.Float8(...))."
        )
    names = [field.name for field in dataclasses.fields(known) if field.name != "name"]
    if options and not names:
        raise ValueError(f"The format {name!r} has no options, got {[*options]}.")
    for option in options:
        if option not in names:
            raise unknown_name(f"option of {name}", option, names)
    return dataclasses.replace(known, **options)
