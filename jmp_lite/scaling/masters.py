"""Optax transformations for parameters that are 16 bits themselves.

The law of this file: what an update is too small to change in 16 bits is not lost. The
wrapped optimizer sees parameters that have the digits, and the 16-bit ones follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import is_16_bit, is_floating, parse_dtype, upcast_tree
from jmp_lite.scaling.transforms import (
    OfNarrowParams,
    strongly_typed,
    with_extra_args,
)


class MasterWeightsState(NamedTuple):
    """The state of ``master_weights``.

    Attributes:
      masters: the parameters as they are trained, in float32.
      inner_state: the state of the wrapped transformation, of the masters.

    Example:
      >>> state = master_weights(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.masters.dtype
      dtype('float32')
    """

    masters: Any
    inner_state: Any


def master_weights(
    inner: Any, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it trains float32 copies of 16-bit parameters.

    The copies, the masters, live in the state. After ``optax.apply_updates`` each
    parameter is its master, rounded once: nothing that an update adds is lost, however
    small it is beside the parameter. Memory: 4 bytes for each parameter, beside its 2;
    as much as float32 parameters of which a 16-bit copy is kept.

    It stands inside of ``loss_scaling`` or around it, which skips all the same.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and the masters.
      dtype: the dtype of the masters.

    Returns:
      A transformation whose state is a ``MasterWeightsState``. ``init`` takes the
      parameters: in float32, which are then the masters exactly, or rounded already.
      ``update`` needs the parameters. The updates are in ``dtype``: to be added by
      ``optax.apply_updates``, under JAX's standard dtype promotion.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: ``dtype`` is unknown, or ``update`` is not given the parameters.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; MXNet's
    ``multi_precision=True``.

    Example:
      >>> optimizer = master_weights(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> with jax.numpy_dtype_promotion("standard"):  # JAX's own default.
      ...     for _ in range(4):  # One such step rounds away in bfloat16.
      ...         updates, state = optimizer.update(jnp.full(1, -(2.0**-9)), state, w)
      ...         w = optax.apply_updates(w, updates)
      >>> w, state.masters
      (Array([1.00781], dtype=bfloat16), Array([1.0078125], dtype=float32))
    """
    inner, parsed = with_extra_args(inner), parse_dtype(dtype)

    def cast(leaf: Any) -> Any:
        # Copied, because parameters and state may both be donated.
        return jnp.array(leaf, parsed, copy=True) if is_floating(leaf) else leaf

    def init(params: Any) -> Any:
        masters = jax.tree.map(cast, params)
        return MasterWeightsState(masters, strongly_typed(inner.init(masters)))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_params(params, "master_weights")
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, state.masters, **extra_args
        )
        masters = optax.apply_updates(state.masters, steps)

        # What lies between is exact in float32, but for the largest of steps.
        def to_master(master: Any, param: Any) -> Any:
            return master - jnp.asarray(param).astype(master.dtype)

        moved = jax.tree.map(to_master, masters, params)
        return moved, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------ with less than a master


class CompensatedState(NamedTuple):
    """The state of ``compensated``.

    Attributes:
      rest: what rounding has kept from each 16-bit parameter, in its dtype; an
        ``optax.MaskedNode`` for any other.
      inner_state: the state of the wrapped transformation.

    Example:
      >>> state = compensated(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.rest.dtype
      dtype(bfloat16)
    """

    rest: Any
    inner_state: Any


def compensated(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters remember what rounding took.

    Kahan's sum: what an update adds and the parameter cannot hold is kept in 16 bits
    more, and added next time. Memory: 2 bytes for each parameter beside its 2, where
    ``master_weights`` takes 4. Parameter and rest have the digits of both: 16 bits of a
    mantissa in bfloat16, 22 in float16.

    It stands right inside of ``loss_scaling`` or around it. What stands between them
    (``optax.chain``) would hand parameters on in float32.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients, and the parameters with their
        rests in float32.

    Returns:
      A transformation whose state is a ``CompensatedState``. ``update`` needs the
      parameters. The updates are in float32: to be added by ``optax.apply_updates``,
      under JAX's standard dtype promotion. Parameters of 32 bits are left to ``inner``.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: in ``init``, no parameter has 16 bits; ``update`` is not given them.

    Source: Kahan, "Further remarks on reducing truncation errors", 1965; for training,
    Zamirai et al., "Revisiting BFloat16 Training", 2020.

    Example:
      >>> optimizer = compensated(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> with jax.numpy_dtype_promotion("standard"):  # JAX's own default.
      ...     for _ in range(4):  # One such step rounds away in bfloat16.
      ...         updates, state = optimizer.update(jnp.full(1, -(2.0**-9)), state, w)
      ...         w = optax.apply_updates(w, updates)
      >>> w
      Array([1.00781], dtype=bfloat16)
    """
    inner = with_extra_args(inner)

    def init(params: Any) -> Any:
        _check_16_bit(params, "compensated")
        rest = jax.tree.map(
            lambda p: jnp.zeros_like(p) if is_16_bit(p) else optax.MaskedNode(), params
        )
        return CompensatedState(rest, strongly_typed(inner.init(upcast_tree(params))))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_params(params, "compensated")
        whole = jax.tree.map(
            lambda p, r: _full(p) + _full(r) if is_16_bit(p) else p, params, state.rest
        )
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, whole, **extra_args
        )

        def add(param: Any, rest: Any, step: Any, whole: Any) -> Any:
            if not is_16_bit(param):
                return step, rest
            total = whole + step
            moved = _nearest(total, param.dtype) - _full(param)
            # The new parameter, as optax.apply_updates makes it of this: XLA makes it
            # once for both. On a TPU it would else make two kernels of all of it.
            rounded = _full((_full(param) + moved).astype(param.dtype))
            left = jnp.where(jnp.isfinite(rounded), total - rounded, 0)
            return moved, _nearest(left, param.dtype).astype(param.dtype)

        leaves, treedef = jax.tree.flatten(params)
        others = map(treedef.flatten_up_to, (state.rest, steps, whole))
        pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
        moved, rest = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return moved, CompensatedState(rest, inner_state)

    return OfNarrowParams(init, update)


class StochasticRoundingState(NamedTuple):
    """The state of ``stochastic_rounding``.

    Attributes:
      key: the key of the next update.
      inner_state: the state of the wrapped transformation.

    Example:
      >>> optimizer = stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
      >>> optimizer.init(jnp.ones(1, jnp.bfloat16)).key.shape
      ()
    """

    key: Any
    inner_state: Any


def stochastic_rounding(inner: Any, key: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters are rounded up or down by chance.

    Up with the probability of what is above the lower neighbour, so that the parameter
    is right on average, however small an update is. No memory but for a key; the noise
    is that of one rounding a step.

    It stands right inside of ``loss_scaling`` or around it. What stands between them
    (``optax.chain``) would hand parameters on in float32. What a skipped step does not
    move is not rounded either.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and parameters.
      key: a key of ``jax.random``.

    Returns:
      A transformation whose state is a ``StochasticRoundingState``. ``update`` needs
      the parameters. The updates are in float32: to be added by
      ``optax.apply_updates``, under JAX's standard dtype promotion. Parameters of 32
      bits are left to ``inner``.

    Raises:
      TypeError: ``inner`` is no transformation.
      ValueError: in ``init``, no parameter has 16 bits; ``update`` is not given them.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Example:
      >>> optimizer = stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> w = jnp.ones(1000, jnp.bfloat16)
      >>> small = jnp.full(1000, -(2.0**-9))  # A quarter of what lies between.
      >>> updates, _ = optimizer.update(small, optimizer.init(w), w)
      >>> 200 < int(jnp.sum(updates > 0)) < 300
      True
    """
    inner = with_extra_args(inner)

    def init(params: Any) -> Any:
        _check_16_bit(params, "stochastic_rounding")
        inner_state = strongly_typed(inner.init(upcast_tree(params)))
        return StochasticRoundingState(jnp.array(key, copy=True), inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_params(params, "stochastic_rounding")
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, upcast_tree(params), **extra_args
        )
        now, later = jax.random.split(state.key)
        treedef = jax.tree.structure(params)
        numbers = treedef.unflatten(range(treedef.num_leaves))

        def add(param: Any, step: Any, number: int) -> Any:
            if not is_16_bit(param):
                return step
            total = _full(param) + step
            noise = jax.random.uniform(jax.random.fold_in(now, number), param.shape)
            return _by_chance(total, param.dtype, noise) - _full(param)

        moved = jax.tree.map(add, params, steps, numbers)
        return moved, StochasticRoundingState(later, inner_state)

    return OfNarrowParams(init, update)


def _full(leaf: Any) -> Any:
    return leaf.astype(jnp.float32)


def _check_16_bit(params: Any, name: str) -> None:
    leaves = jax.tree.leaves(params)
    if leaves and not any(map(is_16_bit, leaves)):
        raise ValueError(
            f"{name} is for parameters of 16 bits, and was given none. Causes: (a) "
            "they have 32: cast them with cast_tree; (b) an optax.chain stands between "
            "it and loss_scaling, and hands them on in float32: put the chain inside, "
            f"as in loss_scaling({name}(optax.chain(...)))."
        )


def _check_params(params: Any, name: str) -> None:
    if params is None:
        raise ValueError(
            f"{name} needs the parameters: optimizer.update(grads, opt_state, params)."
        )


# Rounded by arithmetic: XLA elides a cast to 16 bits and back.


def _spacing(x: Any, dtype: Any) -> Any:
    """Returns how far the numbers of a dtype lie apart where ``x`` is, in float32."""
    info = jnp.finfo(dtype)
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    smallest = max(float(info.smallest_subnormal), 2.0**-126)
    return jnp.maximum(power * jnp.float32(2.0**-info.nmant), jnp.float32(smallest))


def _nearest(x: Any, dtype: Any) -> Any:
    """Returns the numbers of a dtype that are nearest, in float32."""
    spacing = _spacing(x, dtype)
    steps = jax.lax.round(x / spacing, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.isfinite(x), steps * spacing, x)


def _by_chance(x: Any, dtype: Any, noise: Any) -> Any:
    """Returns one of the two neighbours in a dtype, in float32.

    Args:
      x: float32 numbers.
      dtype: the dtype.
      noise: uniform in [0, 1).
    """
    spacing = _spacing(x, dtype)
    steps = x / spacing
    below = jnp.floor(steps)
    up = (noise < steps - below).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), (below + up) * spacing, x)
