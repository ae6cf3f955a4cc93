"""An optax wrapper that stores the state of an optimizer in 16 or 8 bits.

After autocast and ``master_weights``, the moments of Adam are the largest arrays of a
training: in float32, 8 of 16 bytes a parameter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    dtype_names,
    is_16_bit,
    is_array,
    parse_dtype,
    refuse_raw_bytes,
    type_of,
    unknown_name,
    upcast_tree,
)
from jmp_lite.casting.types import Array, Dtype, Key, Leaf, Optimizer, PyTree
from jmp_lite.optimizers.moments import Moment, choose_formats, is_large, known_moments
from jmp_lite.optimizers.rounding import check_key, draw_words
from jmp_lite.optimizers.storage import (
    SQUARES,
    Stored,
    is_stored,
    restore,
    store_again,
    store_nearest,
)
from jmp_lite.scaling.wrapping import (
    CONVERT,
    check_same_structure,
    initial_state,
    params_for_init,
    params_for_update,
    with_extra_args,
    wrapper,
)

Scales: TypeAlias = dict[str, tuple[Array | None, ...]] | Array | None


class LowPrecisionState(NamedTuple):
    """The state of ``low_precision_state``.

    Attributes:
      inner_state: the state of the wrapped transformation, with its large arrays in 16
        or 8 bits.
      key: the key of the next update for stochastic rounding; None for rounding to the
        nearest.
      scales: the name of the dtype, and one entry for each array of ``inner_state``:
        the scales of its rows, or None for an array without scales. In bfloat16, None.
        The name is a part of the structure, so that no checkpoint is restored into a
        state of another dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.low_precision_state(optax.sgd(0.1, momentum=0.9))
      >>> state = optimizer.init(jnp.ones(5000))
      >>> state.inner_state[0].trace.dtype
      dtype(bfloat16)
    """

    inner_state: PyTree
    key: Key | None
    scales: Scales


def low_precision_state(
    inner: Optimizer,
    dtype: DTypeLike = "bfloat16",
    *,
    key: Key | None = None,
    fields: Mapping[str, str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments are stored in 16 or 8 bits.

    It stores averages of gradients and of their squares that have the shape of a
    parameter and at least 4,096 elements. (With 8 bits, 16-bit arrays too.) ``inner``
    receives them in float32, and the wrapper rounds the new ones.

    Memory for Adam: 4 bytes a parameter in 16 bits, just over 2 in 8 bits, 8 in
    float32.

    With ``key``, numbers are rounded stochastically, so they are correct on average,
    even if a moment changes by less than the spacing of the dtype. Without ``key``,
    numbers are rounded to the nearest. ``init`` refuses this for averages that would
    lose more than a tenth of a constant gradient: a ``b2`` of 0.999 removes a
    thousandth of a number, and in bfloat16 the next lower number is at least a 256th
    away.

    With float16 and 8 bits, each row of an array has a scale. A row is along the last
    axis, or along the longest axis if the last one is shorter than 128. A row with a
    NaN, or an average of gradients with an infinity, becomes NaN. In 8 bits:

    - First moments are float8.
    - Averages of squares, which updates are divided by, have a format of their own: no
      sign, 5 exponent bits, 3 mantissa bits. A square that is too small becomes the
      smallest number, not zero.

    A table names the arrays in the states of optax. Arrays that need their digits stay
    in float32: parameters, sums of gradients, the moments of
    ``optax.rmsprop(centered=True)``, whose difference counts, and others. For other
    optimizers, ``fields`` names the arrays. An array that neither names stays in
    float32, and ``init`` warns.

    Put it directly around the optimizer:
    ``loss_scaling(master_weights(low_precision_state(optax.adam(1e-3), key=key)))``. A
    saved state keeps its dtype and its key, or continues without a key.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients, and parameters in
        float32 unless a wrapper inside of it rounds them.
      dtype: ``"bfloat16"``; ``"float16"``, for first moments only; or
        ``"float8_e4m3fn"``, for first moments, with the format above for squares.
      key: a key of ``jax.random``, such as ``jax.random.key(0)``, or None.
      fields: for optimizers that are not optax's, what their arrays are, by the name of
        the field or of the key of a dictionary: ``"average"`` of gradients;
        ``"squares"``, or other positive arrays that updates are divided by; or
        ``"exact"`` for float32.

    Returns:
      A transformation whose state is a ``LowPrecisionState``.

    Raises:
      TypeError: ``inner`` is not a transformation, ``key`` is not a key, or ``update``
        gets a pair ``(loss, grads)`` or a state that ``init`` did not return. Or
        ``inner`` changes the structure of its state, as ``optax.monitor`` does; or a
        state in float16 or 8 bits is differentiated.
      ValueError: ``dtype`` is another one, or a kind in ``fields``. Or, in ``init``:
        without ``key`` a moment would stop too early, or the optimizer needs more than
        gradients to show that; or float16 would store squares.

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
    for kind in (fields or {}).values():
        if kind not in _KINDS:
            raise unknown_name("kind of a field", str(kind), [*_KINDS])
    moments = {name: Moment[kind.upper()] for name, kind in (fields or {}).items()}
    if key is not None:
        check_key(key)

    def init(params: PyTree) -> PyTree:
        refuse_raw_bytes(params)
        params = params_for_init(inner, params)
        state = initial_state(inner, params)
        leaves, structure = jax.tree.flatten(state)
        formats = choose_formats(inner, params, state, parsed, key is not None, moments)
        is_scaled = parsed != jnp.bfloat16

        stored = [
            x if form is None else store_nearest(x, form, is_scaled)
            for x, form in zip(leaves, formats, strict=True)
        ]
        scales = {parsed.name: ()} if is_scaled else None
        if is_scaled and not any(map(is_array, jax.tree.leaves(params))):
            # optax calls init with placeholders instead of the parameters.
            scales = jnp.zeros(0)
        kept = key if key is None else jnp.array(key, copy=True)
        return packed(structure.unflatten(stored), kept, scales)

    def update(
        updates: PyTree, state: LowPrecisionState, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, LowPrecisionState]:
        stored = unpacked(state)
        before = jax.tree.map(
            lambda x: restore(x) if is_stored(x) else x, stored, is_leaf=is_stored
        )
        seen = params_for_update(before, params)
        steps, after = inner.update(upcast_tree(updates), before, seen, **extra_args)
        check_same_structure(before, after, "its new arrays cannot be stored")
        words, later = None, None
        if state.key is not None:
            now, later = jax.random.split(state.key)
            words = draw_words(now)

        return steps, packed(store_again(after, stored, words), later, state.scales)

    return wrapper("low_precision_state", LowPrecisionState, init, update)


_KINDS = ("average", "squares", "exact")
"""Names of moments, in lower case."""
_STATE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def _parse(dtype: DTypeLike) -> Dtype:
    if isinstance(dtype, str) and dtype not in dtype_names():
        raise unknown_name("dtype of a state", dtype, _STATE_DTYPES)
    parsed = parse_dtype(dtype)
    if parsed.name not in _STATE_DTYPES:
        raise ValueError(
            f"Expected one of {', '.join(_STATE_DTYPES)} for the state, got "
            f"{parsed.name!r}."
        )
    return parsed


def unpacked(state: LowPrecisionState) -> PyTree:
    """Returns the inner state, with a ``Stored`` for each array of 16 or 8 bits."""
    leaves, structure = jax.tree.flatten(state.inner_state)
    moments = jax.tree.leaves(known_moments(state.inner_state))
    scales: Sequence[Array | None] = [None] * len(leaves)
    if isinstance(state.scales, dict):
        # A checkpoint that was restored without its classes has a list.
        ((name, scales),) = state.scales.items()
        _check_scales(name, scales, leaves)

    def one(leaf: Leaf, moment: Moment, scale: Array | None) -> Leaf:
        is_half = state.scales is None and is_16_bit(leaf) and is_large(leaf)
        is_low = scale is not None or (is_half and moment != Moment.EXACT)
        return Stored(leaf, scale) if is_low else leaf

    return structure.unflatten(map(one, leaves, moments, scales))


def _check_scales(
    name: str, scales: Sequence[Array | None], leaves: Sequence[Leaf]
) -> None:
    """Raises a TypeError for scales that are not those of the leaves of a state."""
    if len(scales) != len(leaves):
        raise TypeError(
            f"Expected scales of {len(leaves)} arrays, as init makes them, got "
            f"{len(scales)} entries in state.scales."
        )
    stored = [x for x, scale in zip(leaves, scales, strict=True) if scale is not None]
    cast = [x for x in stored if x.dtype not in (name, SQUARES)]
    if cast:
        raise TypeError(
            f"Expected moments in {name}, of which state.scales are, got "
            f"{type_of(cast[0])}: the state was cast after it was saved. Restore it "
            "into the structure of the optimizer that made it, jax.eval_shape("
            f"old_optimizer.init, params); then {CONVERT}."
        )


def packed(inner_state: PyTree, key: Key | None, scales: Scales) -> LowPrecisionState:
    """Returns the state for an inner state.

    Args:
      inner_state: the inner state, with a ``Stored`` for some of its arrays.
      key: the key of the next update.
      scales: those of a state that has scales if the result has.
    """
    leaves, structure = jax.tree.flatten(inner_state, is_leaf=is_stored)
    stored = [x if is_stored(x) else Stored(x) for x in leaves]
    if isinstance(scales, dict):
        scales = {name: tuple(x.scale for x in stored) for name in scales}
    numbers = structure.unflatten([x.numbers for x in stored])
    return LowPrecisionState(numbers, key, scales)
