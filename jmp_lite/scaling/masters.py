"""Optax wrappers for parameters that are stored in 16 bits.

A small update is not lost: the wrapped optimizer sees parameters with all their digits,
and the 16-bit parameters follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_floating,
    parse_dtype,
    upcast_tree,
)
from jmp_lite.scaling.loss_scale import type_of
from jmp_lite.scaling.rounding import by_chance, grid_of, nearest, noise
from jmp_lite.scaling.transforms import check_grads, strongly_typed, with_extra_args


class MasterWeightsState(NamedTuple):
    """The state of ``master_weights``.

    Attributes:
      masters: the float32 parameters that the optimizer trains.
      inner_state: the state of the wrapped transformation, for the masters.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.master_weights(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.masters.dtype
      dtype('float32')
    """

    masters: Any
    inner_state: Any

    def _kept_in_16_bits(self) -> Any:
        return self.masters


def master_weights(
    inner: Any, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it trains float32 copies of 16-bit parameters.

    The state contains the copies, the masters. After ``optax.apply_updates`` each
    parameter is its master, rounded once. No update is lost, however small it is beside
    the parameter.

    Memory: 4 bytes a parameter, in addition to the parameter's 2 bytes. Float32
    parameters with a 16-bit copy take the same.

    Three cases differ from plain rounding:

    - While a finite master is out of the parameter's range, the parameter is the
      largest finite number. A non-finite master stays visible in the parameter. No
      update repairs a parameter that is infinite from the start.
    - Differences below 2**-126 are not corrected.
    - A parameter that becomes zero loses the sign of the zero.

    You may change parameters between two steps: load weights, clip or project them, or
    apply a mask. A parameter that is not its master rounded is the new master. An
    element that did not change keeps its master, with all its digits.

    Parameters as wide as the masters, such as float32 ones, are trained as by ``inner``
    alone.

    Put it inside of ``loss_scaling`` or around it; both skip the same steps.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and the masters.
      dtype: the dtype of the masters, of at least 32 bits.

    Returns:
      A transformation whose state is a ``MasterWeightsState``.

      ``init`` takes the parameters: float32 ones, which become the masters, or rounded
      ones. ``update`` requires the parameters. Its updates are in ``dtype``, for
      ``optax.apply_updates`` under JAX's standard dtype promotion. Under strict
      promotion that sum raises JAX's ``TypePromotionError``: put
      ``with jax.numpy_dtype_promotion("standard"):`` around it.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``.
      ValueError: ``dtype`` is unknown or narrower than 32 bits, or ``update`` gets no
        parameters.

    Source: Micikevicius et al., "Mixed Precision Training", 2017; MXNet's
    ``multi_precision=True``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.master_weights(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> step = jnp.full(1, -(2.0**-9))  # One such step rounds away in bfloat16.
      >>> with jax.numpy_dtype_promotion("standard"):  # JAX's own default.
      ...     for _ in range(4):
      ...         updates, state = optimizer.update(step, state, w)
      ...         w = optax.apply_updates(w, updates)
      >>> w, state.masters
      (Array([1.00781], dtype=bfloat16), Array([1.0078125], dtype=float32))
    """
    inner, parsed = with_extra_args(inner), parse_dtype(dtype)
    if jnp.finfo(parsed).bits < 32:
        raise ValueError(
            f"Expected masters of at least 32 bits, got dtype={parsed.name!r}: "
            "narrower masters lose the digits that they should keep. Leave dtype "
            "out, or use compensated, which stores 16 more bits of each parameter."
        )

    def cast(leaf: Any) -> Any:
        if is_floating(leaf) and jnp.finfo(leaf.dtype).bits > jnp.finfo(parsed).bits:
            return jnp.array(leaf, copy=True)
        # A copy, because parameters and state may both be donated.
        return jnp.array(leaf, parsed, copy=True) if is_floating(leaf) else leaf

    def init(params: Any) -> Any:
        masters = jax.tree.map(cast, params)
        return MasterWeightsState(masters, strongly_typed(inner.init(masters)))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_params(updates, params, "master_weights")
        masters = jax.tree.map(_master_of, params, state.masters)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, masters, **extra_args
        )
        masters = optax.apply_updates(masters, steps)

        def to_master(master: Any, step: Any, param: Any) -> Any:
            if not _is_narrower(param, master):
                return step
            return _update_to(nearest(master, grid_of(param.dtype)), param)

        moved = jax.tree.map(to_master, masters, steps, params)
        return moved, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------ with less than a master


class CompensatedState(NamedTuple):
    """The state of ``compensated``.

    Attributes:
      rest: the rounding error of each 16-bit parameter, in the parameter's dtype; an
        ``optax.MaskedNode`` for any other parameter.
      inner_state: the state of the wrapped transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.compensated(optax.sgd(0.1)).init(jnp.ones(1, jnp.bfloat16))
      >>> state.rest.dtype
      dtype(bfloat16)
    """

    rest: Any
    inner_state: Any

    def _kept_in_16_bits(self) -> Any:
        return self.rest


def compensated(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters carry their rounding error (Kahan).

    The state stores the rounding error of each parameter in 16 bits, and the next
    update adds it again.

    Memory: 2 bytes a parameter, in addition to the parameter's 2 bytes;
    ``master_weights`` takes 4. Parameter and rounding error together have the digits of
    both: 16 mantissa bits in bfloat16, 22 in float16. Both stop at the largest finite
    number.

    You may change parameters between two steps, as under ``master_weights``. An old
    rounding error is dropped if it is larger than half a unit in the last place of the
    new parameter.

    Put it inside of ``loss_scaling`` or around it. If it is inside, a ``chain``,
    ``masked``, ``partition`` or ``MultiSteps`` of optax may be between the two. The
    other parts of such a chain then also see 16-bit parameters.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients, and float32 sums of parameters
        and their rounding errors.

    Returns:
      A transformation whose state is a ``CompensatedState``. ``update`` requires the
      parameters. Its updates are in float32, for ``optax.apply_updates`` under JAX's
      standard dtype promotion (see ``master_weights``). ``inner`` trains parameters of
      32 bits as usual.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``.
      ValueError: ``update`` gets no parameters; or, in ``init``, no parameter has 16
        bits. (A part that ``optax.masked`` or ``optax.partition`` selects may have
        none.)

    Source: Kahan, "Further remarks on reducing truncation errors", 1965; for training,
    Zamirai et al., "Revisiting BFloat16 Training", 2020.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.compensated(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> step = jnp.full(1, -(2.0**-9))  # One such step rounds away in bfloat16.
      >>> with jax.numpy_dtype_promotion("standard"):  # JAX's own default.
      ...     for _ in range(4):
      ...         updates, state = optimizer.update(step, state, w)
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
        _check_params(updates, params, "compensated")
        whole = jax.tree.map(_with_rest, params, state.rest)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, whole, **extra_args
        )

        def add(param: Any, rest: Any, step: Any, whole: Any) -> Any:
            if not is_16_bit(param):
                return step, rest
            total = whole + step
            moved = _update_to(nearest(total, grid_of(param.dtype)), param)
            # The new parameter, computed as in optax.apply_updates: XLA computes it
            # once for both. Otherwise a TPU would run two kernels.
            rounded = _full((_full(param) + moved).astype(param.dtype))
            left = jnp.where(jnp.isfinite(rounded), total - rounded, 0)
            return moved, nearest(left, grid_of(param.dtype)).astype(param.dtype)

        leaves, treedef = jax.tree.flatten(params)
        others = map(treedef.flatten_up_to, (state.rest, steps, whole))
        pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
        moved, rest = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
        return moved, CompensatedState(rest, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class StochasticRoundingState(NamedTuple):
    """The state of ``stochastic_rounding``.

    Attributes:
      key: the key of the next update.
      inner_state: the state of the wrapped transformation.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
      >>> optimizer.init(jnp.ones(1, jnp.bfloat16)).key.dtype
      key<fry>
    """

    key: Any
    inner_state: Any

    def _kept_in_16_bits(self) -> None:
        return None  # Unknown here, so all of them.


def stochastic_rounding(inner: Any, key: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters are rounded stochastically.

    The probability of rounding up is the distance from the lower neighbor, divided by
    the spacing. A parameter is therefore correct on average, however small an update
    is. The noise is that of one rounding per step. A finite number out of the
    parameter's range becomes the largest finite number.

    Memory: one key.

    Put it inside of ``loss_scaling`` or around it. If it is inside, a ``chain``,
    ``masked``, ``partition`` or ``MultiSteps`` of optax may be between the two. The
    other parts then also see 16-bit parameters. A skipped step rounds nothing.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and parameters.
      key: a key of ``jax.random``, such as ``jax.random.key(0)``.

    Returns:
      A transformation whose state is a ``StochasticRoundingState``. ``update`` requires
      the parameters. Its updates are in float32, for ``optax.apply_updates`` under
      JAX's standard dtype promotion (see ``master_weights``). ``inner`` trains
      parameters of 32 bits as usual.

    Raises:
      TypeError: ``inner`` is not a transformation, ``key`` is not a key, or ``update``
        gets a pair ``(loss, grads)``.
      ValueError: ``update`` gets no parameters; or, in ``init``, no parameter has 16
        bits. (A part that ``optax.masked`` or ``optax.partition`` selects may have
        none.)

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> w = jnp.ones(1000, jnp.bfloat16)
      >>> grads = jnp.full(1000, -(2.0**-9))  # A quarter of the spacing above 1.
      >>> updates, _ = optimizer.update(grads, optimizer.init(w), w)
      >>> 200 < int(jnp.sum(updates > 0)) < 300
      True
      >>> updates.dtype
      dtype('float32')
    """
    inner = with_extra_args(inner)
    check_key(key)

    def init(params: Any) -> Any:
        _check_16_bit(params, "stochastic_rounding")
        inner_state = strongly_typed(inner.init(upcast_tree(params)))
        return StochasticRoundingState(jnp.array(key, copy=True), inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        _check_params(updates, params, "stochastic_rounding")
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, upcast_tree(params), **extra_args
        )
        now, later = jax.random.split(state.key)
        treedef = jax.tree.structure(params)
        numbers = treedef.unflatten(range(treedef.num_leaves))

        def add(param: Any, step: Any, number: int) -> Any:
            if not is_16_bit(param):
                return step
            by = noise(now, number, param.shape)
            moved = by_chance(_full(param) + step, grid_of(param.dtype), by)
            return _update_to(moved, param)

        moved = jax.tree.map(add, params, steps, numbers)
        return moved, StochasticRoundingState(later, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


_TINY = float(jnp.finfo(jnp.float32).tiny)


def _full(leaf: Any) -> Any:
    return leaf.astype(jnp.float32)


def _master_of(param: Any, master: Any) -> Any:
    """Returns the master, or the parameter if it is not the master rounded."""
    if not _is_narrower(param, master):
        return param
    wide = param.astype(master.dtype)
    off = wide - nearest(master, grid_of(param.dtype))
    # No update removes a difference below the smallest normal number.
    return jnp.where(jnp.abs(off) <= _TINY, master, wide)


def _with_rest(param: Any, rest: Any) -> Any:
    """Returns a parameter with its rounding error, or alone if the error is not its."""
    if not is_16_bit(param):
        return param
    wide, rest = _full(param), _full(rest)
    # A little less, because a rounding error of half a unit is a tie.
    less = rest * (1 - float(jnp.finfo(param.dtype).epsneg))
    is_its_own = nearest(wide + less, grid_of(param.dtype)) == wide
    # Adding a zero would change the sign of a zero.
    return jnp.where(is_its_own & (rest != 0), wide + rest, wide)


def _is_narrower(param: Any, master: Any) -> bool:
    is_pair = is_floating(param) and is_floating(master)
    return is_pair and jnp.finfo(param.dtype).bits < jnp.finfo(master.dtype).bits


def _update_to(target: Any, param: Any) -> Any:
    """Returns the update that turns a parameter into ``target``.

    Args:
      target: numbers of the parameter's dtype, in float32 or wider.
      param: the parameter. The sum of parameter and update is the target, or rounds to
        it.
    """
    before = param.astype(target.dtype)
    # The update is the target itself if that is not finite, or the parameter is zero.
    is_sum = (before == 0) | ~jnp.isfinite(target)
    return jnp.where(is_sum, target, target - before)


def _check_16_bit(params: Any, name: str) -> None:
    def is_left_out(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    leaves = jax.tree.leaves(params, is_leaf=is_left_out)
    is_part = any(map(is_left_out, leaves))  # Selected by optax.masked or partition.
    if leaves and not is_part and not any(map(is_16_bit, leaves)):
        raise ValueError(
            f"{name} is for 16-bit parameters, but got only "
            f"{', '.join(sorted({type_of(leaf) for leaf in leaves})[:3])}. Causes: "
            "(a) the parameters have 32 bits: cast them with cast_tree, or leave the "
            "wrapper out; (b) a wrapper around it casts them to float32: put that "
            f"wrapper inside, as in {name}(wrapper(...))."
        )


def _check_params(updates: Any, params: Any, name: str) -> None:
    if params is None:
        raise ValueError(
            f"{name} needs the parameters: call optimizer.update(grads, opt_state, "
            "params)."
        )
    check_grads(updates, params)


def check_key(key: Any) -> None:
    """Raises a TypeError for an object that is not one key of ``jax.random``."""
    is_typed = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not is_raw and not (is_typed and key.ndim == 0):
        hint = key if isinstance(key, int) else 0
        raise TypeError(
            f"Expected one key of jax.random, got {type_of(key)}: pass "
            f"jax.random.key({hint})."
        )
