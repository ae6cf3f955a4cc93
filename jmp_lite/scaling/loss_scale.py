"""Loss scales: factors that move gradients into the range of a narrow float format.

A scale is a strongly typed float32 scalar. Scaling and unscaling run in float32 or a
wider dtype, whatever the input dtype. A scale is a value: ``adjust`` returns the next
one. Only real and complex numbers are scaled.
"""

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Never, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_inexact,
    nearest_name,
    needs_loss_scale,
    parse_dtype,
)

Tree = TypeVar("Tree")
AxisName = Any

# --------------------------------------------------------------------- loss scales


class LossScale(abc.ABC):
    """The base class of loss scales: scale a loss, unscale gradients, adjust the scale.

    To write your own loss scale, subclass this class and register the subclass as a
    pytree. Its leaves are the numbers that change during training.

    Source: jmp 0.0.4.

    Example:
      >>> import jmp_lite as jmp
      >>> scale = jmp.DynamicLossScale()
      >>> isinstance(scale, jmp.LossScale), scale.loss_scale.dtype
      (True, dtype('float32'))
    """

    loss_scale: Any
    """The factor, a float32 scalar."""

    @abc.abstractmethod
    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves of a pytree by the scale, in float32."""

    @abc.abstractmethod
    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves of a pytree by the scale, in float32."""

    @abc.abstractmethod
    def adjust(self, grads_finite: ArrayLike) -> "LossScale":
        """Returns the scale of the next step.

        Args:
          grads_finite: whether the gradients of this step were finite, a boolean
            scalar.
        """


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(LossScale):
    """No loss scaling, for bfloat16 and float32: trees are returned unchanged.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> grads = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> jmp.NoOpLossScale().unscale(grads)["w"].dtype
      dtype(bfloat16)
    """

    loss_scale: ClassVar[np.float32] = np.float32(1)  # pyright: ignore[reportIncompatibleVariableOverride]

    def scale(self, tree: Tree) -> Tree:
        """Returns ``tree`` itself."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Returns ``tree`` itself."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """Returns this scale."""
        _boolean_scalar(grads_finite)
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A loss scale that never changes, such as the 128 of MXNet and MindSpore.

    Attributes:
      loss_scale: the factor, a positive number. With a power of two, scaling is exact.
        The factor is part of the pytree structure: a new factor causes a new trace.

    Raises:
      ValueError: the factor is negative, infinite or NaN; or, when used, zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.StaticLossScale(128).scale(jnp.float16(3.0))
      Array(384., dtype=float32)
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        factor = np.float32(_host_number(self.loss_scale, "loss_scale"))
        if factor < 0 or not math.isfinite(factor):
            raise ValueError(f"Expected a finite, positive loss_scale, got {factor}.")
        object.__setattr__(self, "loss_scale", factor)

    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves by the scale and returns float32."""
        return _scale(tree, self._positive())

    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves by the scale and returns float32."""
        return _unscale(tree, self._positive())

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """Returns this scale."""
        _boolean_scalar(grads_finite)
        return self

    def _positive(self) -> np.float32:
        if self.loss_scale == 0:
            raise ValueError(
                "Expected a positive loss_scale, got 0, which makes "
                "every gradient zero."
            )
        return self.loss_scale


_NAMES_ELSEWHERE = {
    # PyTorch's GradScaler, DeepSpeed, Flax and Keras, MindSpore, Paddle.
    **dict.fromkeys(
        ("init_scale", "initial_scale", "init_loss_scale", "init_loss_scaling"),
        "loss_scale",
    ),
    **dict.fromkeys(("growth_factor", "scale_factor", "incr_ratio"), "factor"),
    "decr_ratio": "backoff_factor",
    **dict.fromkeys(
        (
            *("growth_interval", "scale_window", "loss_scale_window"),
            *("dynamic_growth_steps", "incr_every_n_steps"),
        ),
        "period",
    ),
    **dict.fromkeys(("backoff_interval", "decr_every_n_nan_or_inf"), "hysteresis"),
    **dict.fromkeys(("min_scale", "minimum_scale"), "min_loss_scale"),
    "max_scale": "max_loss_scale",
}


@dataclasses.dataclass(frozen=True, init=False)
class DynamicLossScale(LossScale):
    """A loss scale that grows while gradients are finite and shrinks on an overflow.

    The scale grows on exactly the ``period``-th finite step in a row. It backs off on a
    non-finite step. Its leaves are strongly typed float32 and int32 scalars, so a step
    that takes and returns it compiles once. ``vmap`` may stack several scales into one,
    whose leaves are arrays of one shape; call its methods inside of ``vmap``.

    Attributes:
      loss_scale: the current factor. A start value outside of the bounds moves inside
        them at its next change.
      counter: the number of finite steps in a row since the last change.
      period: the number of finite steps in a row after which the scale grows.
      factor: the factor of growth and, without ``backoff_factor``, of backoff. With 2,
        the scale stays a power of two, so scaling changes exponents only.
      min_loss_scale: the lower bound of backoff.
      max_loss_scale: the upper bound of growth.
      hysteresis: the number of non-finite steps in a row before the scale backs off.
        Each further one backs off too. A finite step resets the count.
      overflows: the number of non-finite steps in a row, up to ``hysteresis``. It is
        None, and not a leaf, if ``hysteresis`` is 1.
      backoff_factor: the factor of backoff, in (0, 1). None means ``1 / factor``.

    Raises:
      ValueError: a number is out of range.
      TypeError: an argument is unknown. The message suggests the right name, also for
        the names of PyTorch's ``GradScaler`` and other libraries.

    Source: jmp 0.0.4 (names and order of the arguments); Micikevicius et al., "Mixed
    Precision Training", 2017; hysteresis as in Megatron-LM and DeepSpeed.

    Example:
      >>> import jmp_lite as jmp
      >>> scale = jmp.DynamicLossScale(period=2)
      >>> scale = scale.adjust(False)
      >>> scale.loss_scale
      Array(16384., dtype=float32)
      >>> scale.adjust(True).adjust(True).loss_scale
      Array(32768., dtype=float32)
    """

    loss_scale: Any
    counter: Any
    period: int
    factor: float
    min_loss_scale: float
    max_loss_scale: float
    hysteresis: int
    overflows: Any
    backoff_factor: float | None

    def __init__(
        self,
        loss_scale: Any = 2.0**15,
        counter: Any = 0,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
        overflows: Any = None,
        backoff_factor: float | None = None,
        **unknown: Never,
    ) -> None:
        self._refuse_unknown(unknown)
        _warn_if_not_floating(loss_scale, "loss_scale")
        _warn_if_not_floating(min_loss_scale, "min_loss_scale")
        # A scale that vmap has stacked: all of its numbers have the counter's shape.
        counter = _counter(counter, "counter")
        stack = counter.shape
        hysteresis = _whole_number(hysteresis, "hysteresis", at_least=1)
        if hysteresis == 1:
            overflows = None
        else:
            before = 0 if overflows is None else overflows
            overflows = _counter(before, "overflows", stack)
        if backoff_factor is not None:
            backoff_factor = _host_number(backoff_factor, "backoff_factor")
        vars(self).update(
            loss_scale=_number(loss_scale, np.float32, "loss_scale", stack),
            counter=counter,
            period=_whole_number(period, "period", at_least=1),
            factor=_host_number(factor, "factor"),
            min_loss_scale=_host_number(min_loss_scale, "min_loss_scale"),
            max_loss_scale=_host_number(max_loss_scale, "max_loss_scale"),
            hysteresis=hysteresis,
            overflows=overflows,
            backoff_factor=backoff_factor,
        )
        self._check_ranges()

    def _refuse_unknown(self, arguments: Iterable[str]) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        for name in arguments:
            meant = _NAMES_ELSEWHERE.get(name) or nearest_name(name, known)
            raise TypeError(
                f"DynamicLossScale has no argument {name!r}"
                + (f": did you mean {meant}?" if meant else ".")
                + f" Its arguments are {', '.join(known)}."
            )

    def _check_ranges(self) -> None:
        low, high = self.min_loss_scale, self.max_loss_scale
        largest = float(_FLOAT32.max)
        if not 1 < self.factor <= largest:
            raise ValueError(f"Expected a finite factor above 1, got {self.factor}.")
        if self.backoff_factor is not None and not 0 < self.backoff_factor < 1:
            raise ValueError(
                "Expected a backoff_factor between 0 and 1, which the scale is "
                f"multiplied by, got {self.backoff_factor}."
            )
        if not 0 <= low <= high <= largest:
            raise ValueError(
                "Expected 0 <= min_loss_scale <= max_loss_scale, finite in float32, "
                f"got min_loss_scale={low} and max_loss_scale={high}."
            )
        try:
            start = np.asarray(self.loss_scale)
        except jax.errors.TracerArrayConversionError:
            return  # A tracer, whose value is unknown.
        if not np.all((start > 0) & np.isfinite(start)):
            raise ValueError(f"Expected a finite, positive loss_scale, got {start}.")

    def scale(self, tree: Tree) -> Tree:
        """Multiplies the floating-point leaves by the scale and returns float32."""
        return _scale(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divides the floating-point leaves by the scale and returns float32."""
        return _unscale(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """Returns the scale of the next step.

        Args:
          grads_finite: a boolean scalar, such as ``all_finite(grads)``.

        Raises:
          AssertionError: ``grads_finite`` is not a boolean scalar.
        """
        finite = _boolean_scalar(grads_finite)
        loss_scale = jnp.asarray(self.loss_scale)
        counter = jnp.where(finite, jnp.asarray(self.counter) + 1, 0)
        counter = jnp.where(counter >= self.period, 0, counter)
        overflows, backs_off = self._count_overflow(finite)

        # The scale could not grow from zero again.
        floor = max(self.min_loss_scale, float(_FLOAT32.tiny))
        grown = jnp.minimum(loss_scale * self.factor, self.max_loss_scale)
        lower = (
            loss_scale / self.factor
            if self.backoff_factor is None
            else loss_scale * self.backoff_factor
        )
        shrunk = jnp.maximum(lower, floor)
        # After a finite step, the new counter is 0 at the end of a period. Reading the
        # new value lets a GPU compute the counter and the scale in one kernel.
        return self._with_leaves(
            jnp.where(
                finite,
                jnp.where(counter == 0, grown, loss_scale),
                jnp.where(backs_off, shrunk, loss_scale),
            ),
            counter,
            overflows,
        )

    def _count_overflow(self, finite: jax.Array) -> tuple[Any, jax.Array | bool]:
        """Returns the overflows in a row, and whether the scale backs off."""
        if self.hysteresis == 1:
            return None, True
        # A checkpoint of a scale without hysteresis has no such number.
        none = jnp.zeros_like(jnp.asarray(self.counter))
        before = none if self.overflows is None else jnp.asarray(self.overflows)
        more = jnp.minimum(before + 1, self.hysteresis)
        overflows = jnp.where(finite, 0, more)
        return overflows, overflows >= self.hysteresis

    def _with_leaves(self, *leaves: Any) -> "DynamicLossScale":
        return _unflatten_dynamic(_flatten_dynamic(self)[1], leaves)


_FLOAT32 = np.finfo(np.float32)
_DYNAMIC_LEAVES = ("loss_scale", "counter", "overflows")
_DYNAMIC_STATIC = tuple(
    field.name
    for field in dataclasses.fields(DynamicLossScale)
    if field.name not in _DYNAMIC_LEAVES
)


def _flatten_dynamic(scale: DynamicLossScale) -> tuple[tuple[Any, ...], Any]:
    return (
        tuple(getattr(scale, name) for name in _DYNAMIC_LEAVES),
        tuple(getattr(scale, name) for name in _DYNAMIC_STATIC),
    )


def _flatten_dynamic_with_keys(scale: DynamicLossScale) -> tuple[Any, Any]:
    leaves, static = _flatten_dynamic(scale)
    keys = map(jax.tree_util.GetAttrKey, _DYNAMIC_LEAVES)
    return tuple(zip(keys, leaves, strict=True)), static


def _unflatten_dynamic(static: Any, leaves: Any) -> DynamicLossScale:
    # Not through __init__: JAX and its libraries also use shapes, shardings and bare
    # objects as leaves, which must stay unchanged.
    scale = object.__new__(DynamicLossScale)
    vars(scale).update(zip(_DYNAMIC_LEAVES, leaves, strict=True))
    vars(scale).update(zip(_DYNAMIC_STATIC, static, strict=True))
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale, _flatten_dynamic_with_keys, _unflatten_dynamic, _flatten_dynamic
)


def default_loss_scale(compute_dtype: DTypeLike) -> LossScale:
    """Returns the loss scale that a compute dtype needs.

    Args:
      compute_dtype: a floating-point dtype or its name.

    Returns:
      ``DynamicLossScale()`` if the dtype has fewer exponents than float32 (float16,
      float8). ``NoOpLossScale()`` otherwise (bfloat16, float32, float64).

    Raises:
      ValueError: ``compute_dtype`` is unknown or not floating-point.

    Example:
      >>> import jmp_lite as jmp
      >>> jmp.default_loss_scale("bfloat16")
      NoOpLossScale()
      >>> jmp.default_loss_scale("float16").loss_scale
      np.float32(32768.0)
    """
    dtype = parse_dtype(compute_dtype)
    return DynamicLossScale() if needs_loss_scale(dtype) else NoOpLossScale()


def check_is_loss_scale(loss_scale: Any) -> None:
    """Raises a TypeError for an object that is not a ``LossScale`` or not a pytree."""
    if not isinstance(loss_scale, LossScale):
        if isinstance(loss_scale, type):
            name = loss_scale.__name__
            raise TypeError(
                f"Expected a LossScale, got the class {name}: did you mean {name}()?"
            )
        raise TypeError(
            f"Expected a LossScale, got {type(loss_scale).__name__}: pass "
            "get_loss_scale(opt_state), StaticLossScale(128.0) or DynamicLossScale()."
        )
    if any(leaf is loss_scale for leaf in jax.tree.leaves(loss_scale)):
        raise TypeError(
            f"{type(loss_scale).__name__} is not registered as a pytree: use "
            "jax.tree_util.register_dataclass."
        )


# ------------------------------------------------------------------ finite, select


def all_finite(tree: Any, axis_name: AxisName | None = None) -> jax.Array:
    """Returns whether every number in a pytree is finite.

    Args:
      tree: a pytree. Its real and complex arrays and its Python floats are checked.
        Other leaves count as finite, and so does an empty tree.
      axis_name: a mapped axis or several. The result then covers all devices or batch
        elements of these axes.

    Returns:
      A boolean scalar.

    Raises:
      NameError: ``axis_name`` is not a mapped axis here.

    Source: jmp 0.0.4. MindSpore and Megatron-LM also decide over all devices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.all_finite({"w": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    checks = (
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if is_inexact(leaf)
    )
    finite = functools.reduce(jnp.logical_and, checks, jnp.array(True))
    if axis_name is None:
        return finite
    try:
        return lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call this inside "
            "jax.shard_map over that axis, or inside jax.vmap or jax.pmap with that "
            "axis_name. Under jit alone, leave axis_name out: jit sees whole arrays, "
            "even if they are sharded."
        ) from error


def select_tree(pred: ArrayLike, a: Tree, b: Tree) -> Tree:
    """Returns ``a`` if ``pred`` is true, else ``b``.

    Args:
      pred: a boolean scalar.
      a: a pytree.
      b: a pytree of the same structure, shapes and dtypes. Leaves that are neither
        arrays nor numbers must be equal in both.

    Returns:
      A pytree like ``a`` and ``b``.

    Raises:
      AssertionError: ``pred`` is not a boolean scalar.
      TypeError: two leaves differ in shape or dtype. The message names the leaf.

    Source: jmp 0.0.4.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> old, new = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
      >>> jmp.select_tree(jnp.array(False), new, old)
      {'w': Array([0.], dtype=float32)}
    """
    pred = _boolean_scalar(pred)
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, pred), a, b)


def _select_leaf(pred: jax.Array, path: Any, a: Any, b: Any) -> Any:
    if a is b:
        return a
    if not (_is_selectable(a) and _is_selectable(b)):
        if type(a) is type(b) and a == b:
            return a
        raise TypeError(_differ(path, repr(a), repr(b)))
    a, b = (leaf if is_array(leaf) else jnp.asarray(leaf) for leaf in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        raise TypeError(_differ(path, type_of(a), type_of(b)))
    if a.dtype == jax.dtypes.float0:
        return a
    if is_16_bit(a):
        # XLA for a TPU does not fuse a 16-bit selection with the rounding before it.
        full = (leaf.astype(jnp.float32) for leaf in (a, b))
        return lax.select(pred, *full).astype(a.dtype)
    return lax.select(pred, jnp.asarray(a), jnp.asarray(b))


def type_of(leaf: Any) -> str:
    """Returns the dtype and the shape of an array as text: ``float32[2, 3]``."""
    if not is_array(leaf):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _is_selectable(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _differ(path: Any, a: str, b: str) -> str:
    where = jax.tree_util.keystr(path) or "the root"
    return (
        f"Cannot select between {a} and {b} at {where}: expected the same shape and "
        "dtype in both trees; cast one of them."
    )


# ------------------------------------------------------------------------- helpers


def _scale(tree: Tree, loss_scale: Any) -> Tree:
    with jax.named_scope("loss_scale"):  # A profile and explain find it by that name.
        return _map_inexact(jnp.multiply, tree, loss_scale)


def _unscale(tree: Tree, loss_scale: Any) -> Tree:
    # A division, not a product with the reciprocal: it is exact whenever the product
    # is, and rounds once for a scale that is not a power of two.
    with jax.named_scope("loss_scale"):
        return _map_inexact(jnp.divide, tree, loss_scale)


def _map_inexact(
    op: Callable[[jax.Array, jax.Array], jax.Array], tree: Tree, loss_scale: Any
) -> Tree:
    """Applies ``op(leaf, loss_scale)`` to real and complex leaves, in >= 32 bits."""

    def apply(leaf: Any) -> Any:
        if not is_inexact(leaf):
            return leaf
        array = jnp.asarray(leaf)
        if jnp.iscomplexobj(array):
            # Each part by itself: inf + 0j times a complex factor would be NaN in both.
            return lax.complex(apply(array.real), apply(array.imag))
        width = max(jnp.finfo(array.dtype).bits, 32)
        dtype = np.dtype(f"float{width}")
        return op(array.astype(dtype), jnp.asarray(loss_scale).astype(dtype))

    return jax.tree.map(apply, tree)


def _boolean_scalar(pred: Any) -> jax.Array:
    # jmp raises AssertionError, and code written for jmp catches it.
    if not _is_selectable(pred):
        raise AssertionError(f"expected boolean scalar, got {type(pred).__name__}")
    array = jnp.asarray(pred)
    if array.ndim != 0 or array.dtype != jnp.bool_:
        raise AssertionError(f"expected boolean scalar, got {type_of(array)}")
    return array


def _number(value: Any, dtype: Any, name: str, stack: tuple[int, ...] | None) -> Any:
    """Returns a strongly typed number: on the host if it was a host number.

    A loss scale that is made at import then starts no backend.

    Args:
      value: a number, or an array of the shape ``stack``.
      dtype: the dtype of the result.
      name: the name of the argument.
      stack: the shape of the result; None allows any.
    """
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.asarray(value).astype(dtype)[()]
    else:
        try:
            array = jnp.asarray(value).astype(dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected a number for {name}, got {value!r}.") from error
    if stack is None or array.shape == stack:
        return array
    if array.ndim != 0:
        expected = f"a scalar {name}"
        if stack:
            expected = f"a {name} of the counter's shape {stack}"
        raise ValueError(f"Expected {expected}, got the shape {array.shape}.")
    return jnp.broadcast_to(array, stack)


def _host_number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected a concrete number for {name}, got {value!r}. Only the "
            "loss_scale of a DynamicLossScale changes during training."
        ) from error


def _whole_number(value: Any, name: str, at_least: int) -> int:
    number = _host_number(value, name)
    if not at_least <= number < 2**31 or number != int(number):
        raise ValueError(
            f"Expected a whole number from {at_least} to 2**31 - 1 for {name}, got "
            f"{value}."
        )
    return int(number)


def _counter(value: Any, name: str, stack: tuple[int, ...] | None = None) -> Any:
    if isinstance(value, bool | int | float):
        value = _whole_number(value, name, at_least=0)
    return _number(value, np.int32, name, stack)


def _warn_if_not_floating(value: Any, name: str) -> None:
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        return  # Not a number: the conversion raises an error.
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"Expected a real number for {name}, got {value!r}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        # The level of the line that makes the scale.
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}: pass a float, such as "
            "2.0**15.",
            stacklevel=3,
        )
