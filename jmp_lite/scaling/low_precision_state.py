"""An optax transformation that stores the state of another one in 16 bits.

After autocast and ``master_weights``, the moments of Adam are the largest arrays of a
training: 8 of 16 bytes a parameter in float32.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import is_array, is_floating, parse_dtype, upcast_tree
from jmp_lite.scaling.masters import CompensatedState, MasterWeightsState, check_key
from jmp_lite.scaling.rounding import by_chance, nearest, noise
from jmp_lite.scaling.transforms import check_grads, strongly_typed, with_extra_args

SMALLEST = 4096
"""Arrays of fewer elements stay in float32: they cost next to nothing."""


class LowPrecisionState(NamedTuple):
    """The state of ``low_precision_state``.

    Attributes:
      inner_state: the state of the wrapped transformation, with its large arrays in 16
        bits.
      key: the key of the next update, where it rounds by chance; None where it rounds
        to the nearest.

    Example:
      >>> optimizer = low_precision_state(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(5000))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: Any
    key: Any


def low_precision_state(
    inner: Any, dtype: DTypeLike = "bfloat16", *, key: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments are stored in 16 bits.

    What is stored: the float32 arrays of the inner state that have the shape of a
    parameter and at least 4,096 elements. ``inner`` is given them in float32, and what
    it makes of them is rounded. Memory: 4 bytes a parameter for Adam, where it is 8.

    With ``key`` they are rounded up or down by chance, up with the probability of what
    is above the lower neighbour: an average that moves by less than the spacing of the
    dtype still moves as it should, on average. Without it they are rounded to the
    nearest, which is refused for averages that would stand still: in bfloat16, a
    ``b2`` of 0.999 takes a thousandth off a number, and the next number below it is at
    least a 256th of it away.

    Put it directly around the optimizer whose moments are meant:
    ``loss_scaling(master_weights(low_precision_state(optax.adam(1e-3), key=key)))``.
    Around them it leaves masters, rests and sums of gradients as they are.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients.
      dtype: ``"bfloat16"``; or ``"float16"``, for first moments alone.
      key: a key of ``jax.random``, such as ``jax.random.key(0)``, or None.

    Returns:
      A transformation whose state is a ``LowPrecisionState``.

    Raises:
      TypeError: ``inner`` is no transformation or ``key`` no key, or ``update`` is
        given a pair ``(loss, grads)``.
      ValueError: ``dtype`` has not 16 bits; or, in ``init``, a moment would stand still
        without ``key``, or is one of squares in float16.

    Source: for parameters, Gupta et al., "Deep Learning with Limited Numerical
    Precision", 2015, and Zamirai et al., "Revisiting BFloat16 Training", 2020.

    Example:
      >>> optimizer = low_precision_state(optax.rmsprop(0.1), key=jax.random.key(0))
      >>> params = jnp.ones((64, 64))
      >>> updates, state = optimizer.update(params, optimizer.init(params), params)
      >>> state.inner_state[0].nu.dtype, updates.dtype
      (dtype(bfloat16), dtype('float32'))
    """
    inner, parsed = with_extra_args(inner), parse_dtype(dtype)
    if jnp.finfo(parsed).bits != 16:
        raise ValueError(
            f"Expected a dtype of 16 bits for the state, got {parsed.name!r}: take "
            "'bfloat16'."
        )
    if key is not None:
        check_key(key)

    def init(params: Any) -> Any:
        state = strongly_typed(inner.init(params))
        shapes = {leaf.shape for leaf in jax.tree.leaves(params) if is_array(leaf)}

        def is_stored(leaf: Any) -> bool:
            is_full = _is_large(leaf) and leaf.dtype == jnp.float32
            return is_full and leaf.shape in shapes

        if any(map(is_stored, _leaves(state))):
            _check_moments(inner, params, parsed, key is not None)
        stored = _map(lambda x: x.astype(parsed) if is_stored(x) else x, state)
        return LowPrecisionState(
            stored, key if key is None else jnp.array(key, copy=True)
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is not None:
            check_grads(updates, params)
        is_stored = lambda x: _is_large(x) and x.dtype == parsed
        full = _map(
            lambda x: x.astype(jnp.float32) if is_stored(x) else x, state.inner_state
        )
        steps, full = inner.update(upcast_tree(updates), full, params, **extra_args)
        now, later = (None, None) if key is None else jax.random.split(state.key)
        number = iter(range(len(jax.tree.leaves(state.inner_state))))

        def store(before: Any, after: Any) -> Any:
            if not is_stored(before) or not is_floating(after):
                return after
            after = after.astype(jnp.float32)
            if now is None:
                return nearest(after, parsed).astype(parsed)
            by = noise(now, next(number), after.shape)
            return by_chance(after, parsed, by).astype(parsed)

        return steps, LowPrecisionState(_map(store, state.inner_state, full), later)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_large(leaf: Any) -> bool:
    return is_array(leaf) and leaf.size >= SMALLEST


# --------------------------------------------------------------- what is not a moment


def _map(fun: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Maps over all of a state but masters, rests and sums of gradients."""

    def at(node: Any, *same: Any) -> Any:
        name = _inner_field(node)
        if name is None:
            return fun(node, *same)
        inner = _map(fun, *(getattr(one, name) for one in (node, *same)))
        return (same[-1] if same else node)._replace(**{name: inner})

    return jax.tree.map(at, state, *others, is_leaf=_is_wrapper)


def _leaves(state: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, state)
    return found


_INNER_FIELDS = {
    MasterWeightsState: "inner_state",
    CompensatedState: "inner_state",
    optax.MultiStepsState: "inner_opt_state",
}
"""States whose other fields keep their digits."""


def _inner_field(node: Any) -> str | None:
    return _INNER_FIELDS.get(type(node))


def _is_wrapper(node: Any) -> bool:
    return _inner_field(node) is not None


# ------------------------------------------------------------------ what 16 bits bear


def _check_moments(inner: Any, params: Any, dtype: Any, is_by_chance: bool) -> None:
    """Raises a ValueError for moments that a dtype cannot store.

    The optimizer is tried on small parameters: how it weakens a moment where the
    gradient is zero, and how a moment grows with the gradient.
    """
    try:
        decays, powers = _tried(inner, params)
    except Exception:
        return  # It needs more than gradients, so it cannot be tried.
    if dtype == jnp.float16 and 2 in powers:
        raise ValueError(
            "float16 cannot store averages of squared gradients: a gradient of 1e-4 "
            "has a square of 1e-8, below the smallest number of float16. Take "
            "dtype='bfloat16'."
        )
    half = float(jnp.finfo(dtype).eps) / 2
    still = [decay for decay in decays if 0 < 1 - decay <= half]
    if still and not is_by_chance:
        raise ValueError(
            f"An average that keeps {max(still):.6g} of itself at each step stands "
            f"still in {dtype.name}, rounded to the nearest: what a step takes off is "
            f"less than half of what lies between two numbers ({2 * half:.3g} of "
            "them). Round by chance: low_precision_state(..., key=jax.random.key(0))."
        )


def _tried(inner: Any, params: Any) -> tuple[set[float], set[int]]:
    """Returns how moments weaken at a step, and their powers of the gradient."""

    def small(leaf: Any) -> Any:
        return jnp.ones((2,) * jnp.ndim(leaf), jnp.float32)

    with jax.ensure_compile_time_eval():
        ones = jax.tree.map(small, params)
        fresh = inner.init(ones)

        def after(fill: float | None, gradient: float) -> list[float]:
            state = fresh if fill is None else _map(lambda x: _filled(x, fill), fresh)
            grads = jax.tree.map(lambda x: gradient * x, ones)
            _, state = inner.update(grads, state, ones)
            return [float(x.ravel()[0]) for x in _leaves(state) if _is_moment(x)]

        kept, once, twice = after(1.0, 0.0), after(None, 1.0), after(None, 2.0)
    powers = {
        round(math.log2(b / a)) for a, b in zip(once, twice, strict=True) if a and b > 0
    }
    return set(kept), powers


def _is_moment(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype == jnp.float32 and leaf.ndim > 0


def _filled(leaf: Any, number: float) -> Any:
    return jnp.full_like(leaf, number) if _is_moment(leaf) else leaf
