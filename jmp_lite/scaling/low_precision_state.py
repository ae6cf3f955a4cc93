"""An optax wrapper that stores the state of an optimizer in 16 or 8 bits.

After autocast and ``master_weights``, the moments of Adam are the largest arrays of a
training: in float32, 8 of 16 bytes a parameter.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    dtype_names,
    is_16_bit,
    is_array,
    is_floating,
    parse_dtype,
    unknown_name,
    upcast_tree,
)
from jmp_lite.scaling.masters import CompensatedState, MasterWeightsState, check_key
from jmp_lite.scaling.rounding import noise
from jmp_lite.scaling.storage import SQUARES, Stored, restore, spacing_of, store
from jmp_lite.scaling.transforms import check_grads, strongly_typed, with_extra_args

SMALLEST = 4096
"""Arrays with fewer elements stay in float32: they take little memory."""


class LowPrecisionState(NamedTuple):
    """The state of ``low_precision_state``.

    Attributes:
      inner_state: the state of the wrapped transformation, with its large arrays in 16
        or 8 bits.
      key: the key of the next update for stochastic rounding; None for rounding to the
        nearest.
      scales: in 8 bits, one entry for each array of ``inner_state``: the scales of its
        rows, or None for an array that is not stored in 8 bits. In 16 bits, None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(5000))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: Any
    key: Any
    scales: Any


def low_precision_state(
    inner: Any, dtype: DTypeLike = "bfloat16", *, key: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments are stored in 16 or 8 bits.

    It stores the float32 arrays of the inner state that have the shape of a parameter
    and at least 4,096 elements. (With 8 bits, 16-bit arrays too.) ``inner`` receives
    them in float32, and the wrapper rounds the new ones.

    Memory for Adam: 4 bytes a parameter in 16 bits, just over 2 in 8 bits, 8 in
    float32.

    With ``key``, numbers are rounded stochastically, so they are correct on average,
    even if a moment changes by less than the spacing of the dtype. Without ``key``,
    numbers are rounded to the nearest. ``init`` refuses this for averages that would
    never change: a ``b2`` of 0.999 removes a thousandth of a number, and in bfloat16
    the next lower number is at least a 256th away.

    With 8 bits, each row of an array has a scale. A row is along the last axis, or
    along the longest axis if the last one is shorter than 128:

    - First moments are float8.
    - Arrays that do not depend on the sign of the gradient, such as averages of its
      squares, have a format of their own: no sign, 5 exponent bits, 3 mantissa bits. A
      square that is too small becomes the smallest number, not zero.
    - A row with a NaN or an infinity becomes NaN.

    Put it directly around the optimizer:
    ``loss_scaling(master_weights(low_precision_state(optax.adam(1e-3), key=key)))``.
    Masters, rounding errors, sums of gradients and copies of the parameters are never
    rounded. A saved state keeps its dtype and its key, or continues without a key.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients.
      dtype: ``"bfloat16"``; ``"float16"``, for first moments only; or
        ``"float8_e4m3fn"``, for first moments, with the format above for squares.
      key: a key of ``jax.random``, such as ``jax.random.key(0)``, or None.

    Returns:
      A transformation whose state is a ``LowPrecisionState``.

    Raises:
      TypeError: ``inner`` is not a transformation, ``key`` is not a key, or ``update``
        gets a pair ``(loss, grads)`` or a state that ``init`` did not return.
      ValueError: ``dtype`` is another one. Or, in ``init``: without ``key`` a moment
        would never change; float16 would store squares; or, in 8 bits, the optimizer
        needs more than gradients, so ``init`` cannot try it.

    Source: for parameters, Gupta et al., "Deep Learning with Limited Numerical
    Precision", 2015, and Zamirai et al., "Revisiting BFloat16 Training", 2020; for
    moments in 8 bits, Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
    2021.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> key = jax.random.key(0)
      >>> optimizer = jmp.low_precision_state(optax.rmsprop(0.1), key=key)
      >>> params = jnp.ones((64, 64))
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> state.inner_state[0].nu.dtype, updates.dtype
      (dtype(bfloat16), dtype('float32'))
    """
    inner, parsed = with_extra_args(inner), _parse(dtype)
    if key is not None:
        check_key(key)

    def init(params: Any) -> Any:
        state = strongly_typed(inner.init(params))
        shapes = {leaf.shape for leaf in jax.tree.leaves(params) if is_array(leaf)}
        leaves = _leaves(state)
        is_moment = [
            _is_large(x)
            and x.shape in shapes
            and parsed.itemsize < x.dtype.itemsize < 8
            for x in leaves
        ]
        formats: Sequence[Any] = [None] * len(leaves)
        if any(is_moment):
            formats = _formats(inner, params, is_moment, parsed, key is not None)
        stored = [
            Stored(x) if form is None else store(x.astype(jnp.float32), form)
            for x, form in zip(leaves, formats, strict=True)
        ]
        scales = None if parsed.itemsize == 2 else tuple(each.scale for each in stored)
        if scales is not None and not shapes:
            # optax calls init with placeholders instead of the parameters.
            scales = jnp.zeros(0)
        kept = key if key is None else jnp.array(key, copy=True)
        return LowPrecisionState(_with_leaves(state, stored), kept, scales)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is not None:
            check_grads(updates, params)
        if not isinstance(state, LowPrecisionState):
            raise TypeError(
                "Expected the LowPrecisionState that init returns, got "
                f"{type(state).__name__}: pass the state of this optimizer."
            )
        leaves, has_scales = _leaves(state.inner_state), isinstance(state.scales, tuple)
        scales = state.scales if has_scales else [None] * len(leaves)
        stored = list(map(Stored, leaves, scales))
        in_16_bits = state.scales is None
        is_low = [
            x.scale is not None
            or (in_16_bits and is_16_bit(x.numbers) and _is_large(x.numbers))
            for x in stored
        ]
        pairs = zip(stored, is_low, strict=True)
        full = [Stored(restore(x)) if low else x for x, low in pairs]
        steps, after = inner.update(
            upcast_tree(updates),
            _with_leaves(state.inner_state, full),
            params,
            **extra_args,
        )
        now, later = (None, None)
        if state.key is not None:
            now, later = jax.random.split(state.key)

        def stored_again(number: int, x: Any) -> Stored:
            if not is_low[number] or not is_floating(x):
                return Stored(x)
            by = None if now is None else noise(now, number, x.shape)
            return store(x.astype(jnp.float32), leaves[number].dtype, by)

        stored = [stored_again(i, x) for i, x in enumerate(_leaves(after))]
        scales = tuple(x.scale for x in stored) if has_scales else state.scales
        return steps, LowPrecisionState(_with_leaves(after, stored), later, scales)

    return optax.GradientTransformationExtraArgs(init, update)


_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def _parse(dtype: DTypeLike) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype not in dtype_names():
        raise unknown_name("dtype of a state", dtype, _DTYPES)
    parsed = parse_dtype(dtype)
    if parsed.name not in _DTYPES:
        raise ValueError(
            f"Expected one of {', '.join(_DTYPES)} for the state, got {parsed.name!r}."
        )
    return parsed


def _is_large(leaf: Any) -> bool:
    return is_array(leaf) and is_floating(leaf) and leaf.size >= SMALLEST


# ----------------------------------------------------------- the stored leaves


def _map(fun: Callable[[Any], Any], state: Any) -> Any:
    """Maps over a state, except masters, rounding errors and sums of gradients."""

    def at(node: Any) -> Any:
        name = _INNER_FIELDS.get(type(node))
        if name is None:
            return fun(node)
        return node._replace(**{name: _map(fun, getattr(node, name))})

    return jax.tree.map(at, state, is_leaf=lambda node: type(node) in _INNER_FIELDS)


def _leaves(state: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, state)
    return found


def _with_leaves(state: Any, stored: Iterable[Stored]) -> Any:
    """Returns a state with other arrays as its leaves."""
    each = iter(stored)
    return _map(lambda _: next(each).numbers, state)


_INNER_FIELDS = {
    MasterWeightsState: "inner_state",
    CompensatedState: "inner_state",
    optax.MultiStepsState: "inner_opt_state",
}
"""States whose other fields are never rounded."""


# ------------------------------------------------------------ formats of moments


class _Moment(NamedTuple):
    """The behavior of an array of the inner state in trial updates.

    Attributes:
      kept: the value that a one has after a step with zero gradients.
      power: the power of the gradient that the array grows with; None if it does not.
      is_unsigned: whether it is positive and does not depend on the gradient's sign.
      is_of_params: whether its initial value depends on the parameters.
    """

    kept: float
    power: int | None
    is_unsigned: bool
    is_of_params: bool


def _formats(
    inner: Any,
    params: Any,
    is_moment: Sequence[bool],
    dtype: np.dtype[Any],
    is_by_chance: bool,
) -> Sequence[Any]:
    """Returns the format of each array of the inner state; None for float32.

    Raises:
      ValueError: the dtype cannot store a moment.
    """
    is_8_bit = dtype.itemsize == 1
    try:
        moments = _tried(inner, params)
        if len(moments) != len(is_moment):
            raise ValueError(
                "the state of small parameters has another number of arrays"
            )
    except Exception as error:
        if is_8_bit:
            raise ValueError(
                "With 8 bits, init has to find the moments that are averages of "
                "squares. For this it tries the optimizer on small parameters, which "
                f"failed: use dtype='bfloat16'. The error was {type(error).__name__}: "
                f"{error}"
            ) from error
        return [dtype if each else None for each in is_moment]
    formats: list[Any] = []
    for is_stored, moment in zip(is_moment, moments, strict=True):
        if not is_stored or moment.is_of_params:
            formats.append(None)
            continue
        formats.append(SQUARES if is_8_bit and moment.is_unsigned else dtype)
        _check_moment(moment, formats[-1], dtype, is_by_chance)
    return formats


def _check_moment(
    moment: _Moment, stored_in: Any, dtype: np.dtype[Any], is_by_chance: bool
) -> None:
    if dtype == jnp.float16 and moment.power == 2:
        raise ValueError(
            "float16 cannot store averages of squared gradients: a gradient of 1e-4 "
            "has a square of 1e-8, below the smallest number of float16. Use "
            "dtype='bfloat16'."
        )
    spacing = spacing_of(stored_in)
    stands_still = 0 <= 1 - moment.kept <= spacing / 2 and moment.power is not None
    if stands_still and not is_by_chance:
        raise ValueError(
            f"A moment that keeps {moment.kept:.6g} of its value at each step would "
            f"never change in {dtype.name}: the change is less than half of the "
            f"spacing, which is {spacing:.3g} of the value. Use stochastic rounding: "
            "low_precision_state(..., key=jax.random.key(0))."
        )


def _tried(inner: Any, params: Any) -> list[_Moment]:
    """Tries an optimizer on small parameters and returns how its arrays behave."""

    def small(leaf: Any) -> Any:
        dtype = leaf.dtype if is_floating(leaf) else jnp.float32
        return jnp.ones((2,) * jnp.ndim(leaf), dtype)

    def numbers(state: Any) -> list[float]:
        leaves = _leaves(state)
        return [float(x.ravel()[0]) if _is_tried(x) else 0.0 for x in leaves]

    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        ones = jax.tree.map(small, params)
        fresh = inner.init(ones)

        def after(state: Any, gradient: float) -> list[float]:
            grads = jax.tree.map(lambda x: gradient * x, ones)
            return numbers(inner.update(grads, state, ones)[1])

        filled = _map(lambda x: jnp.ones_like(x) if _is_tried(x) else x, fresh)
        columns = (
            numbers(fresh),
            numbers(inner.init(jax.tree.map(lambda x: 2 * x, ones))),
            after(filled, 0.0),
            *(after(fresh, gradient) for gradient in (1.0, -1.0, 2.0)),
        )
    return [
        _Moment(
            kept,
            round(math.log2(abs(twice / once)))
            if once and twice and twice != once
            else None,
            once == minus and once > 0,
            start != of_others,
        )
        for start, of_others, kept, once, minus, twice in zip(*columns, strict=True)
    ]


def _is_tried(leaf: Any) -> bool:
    is_float = is_array(leaf) and is_floating(leaf)
    return is_float and leaf.ndim > 0 and leaf.size > 0
