"""Optax wrappers for parameters that are stored in 16 bits.

A small update is not lost: the wrapped optimizer sees parameters with all their digits,
and the 16-bit parameters follow.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_floating,
    parse_dtype,
    upcast_tree,
)
from jmp_lite.scaling.loss_scale import type_of
from jmp_lite.scaling.rounding import by_chance, grid_of, join, nearest, noise, split
from jmp_lite.scaling.states import (
    CONVERT,
    CompensatedState,
    MasterWeightsState,
    StochasticRoundingState,
    check_state,
)
from jmp_lite.scaling.transforms import check_grads, strongly_typed, with_extra_args


def master_weights(
    inner: Any, dtype: DTypeLike = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it trains float32 copies of 16-bit parameters.

    The state contains the copies, the masters. After ``jmp_lite.apply_updates`` each
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
    alone, beside others that are narrower.

    Put it inside of ``loss_scaling`` or around it; both skip the same steps.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients and the masters.
      dtype: the dtype of the masters, of at least 32 bits.

    Returns:
      A transformation whose state is a ``MasterWeightsState``.

      ``init`` takes the parameters: float32 ones, which become the masters, or rounded
      ones. ``update`` requires the parameters. Its updates are in ``dtype``, for
      ``jmp_lite.apply_updates``. (``optax.apply_updates`` does the same under JAX's
      standard dtype promotion. ``eqx.apply_updates`` makes parameters float32.)

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``.
      ValueError: ``dtype`` is unknown or narrower than 32 bits, or ``update`` gets no
        parameters, or none that is narrower than its master.

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
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(step, state, w)
      ...     w = jmp.apply_updates(w, updates)
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
        check_state(state, MasterWeightsState, "master_weights")
        _check_params(updates, params, "master_weights")
        _check_narrower(params, state.masters)
        masters = jax.tree.map(master_of, params, state.masters)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, masters, **extra_args
        )
        masters = optax.apply_updates(masters, steps)

        def to_master(master: Any, step: Any, param: Any) -> Any:
            if not is_narrower(param, master):
                return step
            return _update_to(rounded_to(master, param.dtype), param)

        moved = jax.tree.map(to_master, masters, steps, params)
        return moved, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# ------------------------------------------------------------ with less than a master


def compensated(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters keep the digits that they lack.

    The state stores 16 more bits of each parameter. For a bfloat16 parameter they are
    the lower half of a float32 number, the master. Parameter and remainder together
    are the master, bit for bit. It trains as under ``master_weights``, in 2 bytes a
    parameter less.

    A float16 parameter keeps its rounding error, which the next update adds again
    (Kahan summation): 22 mantissa bits, nearly those of float32.

    Memory: 2 bytes a parameter, in addition to the parameter's 2 bytes;
    ``master_weights`` takes 4. A parameter stops at the largest finite number, and a
    master just above it.

    You may change parameters between two steps: load weights, clip or project them, or
    apply a mask. The remainder of a bfloat16 parameter stays. It is never more than
    half a unit in the last place of the new parameter, and vanishes beside a zero. The
    rounding error of a float16 parameter is dropped if it is larger than that.

    Put it inside of ``loss_scaling`` or around it. If it is inside, a ``chain``,
    ``masked``, ``partition`` or ``MultiSteps`` of optax may be between the two. The
    other parts of such a chain then also see 16-bit parameters.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``. It sees float32 gradients, and the masters.

    Returns:
      A transformation whose state is a ``CompensatedState``. ``update`` requires the
      parameters. Its updates are in float32, for ``jmp_lite.apply_updates`` (see
      ``master_weights``). ``inner`` trains parameters of 32 bits as usual.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``update`` gets a pair
        ``(loss, grads)``, or a state that an older version saved.
      ValueError: ``update`` gets no parameters; or, in ``init``, no parameter has 16
        bits. (A part that ``optax.masked`` or ``optax.partition`` selects may have
        none.)

    Source: for bfloat16, Megatron-LM's ``store_param_remainders``; for float16, Kahan,
    "Further remarks on reducing truncation errors", 1965, and Zamirai et al.,
    "Revisiting BFloat16 Training", 2020.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.compensated(optax.sgd(1.0))
      >>> w = jnp.ones(1, jnp.bfloat16)
      >>> state = optimizer.init(w)
      >>> step = jnp.full(1, -(2.0**-9))  # One such step rounds away in bfloat16.
      >>> for _ in range(4):
      ...     updates, state = optimizer.update(step, state, w)
      ...     w = jmp.apply_updates(w, updates)
      >>> w
      Array([1.00781], dtype=bfloat16)
    """
    inner = with_extra_args(inner)

    def init(params: Any) -> Any:
        _check_16_bit(params, "compensated")
        remainder = jax.tree.map(_no_remainder, params)
        inner_state = strongly_typed(inner.init(upcast_tree(params)))
        return CompensatedState(remainder, inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_state(state, CompensatedState, "compensated")
        _check_params(updates, params, "compensated")
        _check_remainder(state.remainder, params)
        masters = jax.tree.map(with_remainder, params, state.remainder)
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, masters, **extra_args
        )

        def add(param: Any, remainder: Any, step: Any, master: Any) -> Any:
            if not is_16_bit(param):
                return step, remainder
            return _moved(param, master + step)

        leaves, treedef = jax.tree.flatten(params)
        others = map(treedef.flatten_up_to, (state.remainder, steps, masters))
        pairs = [add(*each) for each in zip(leaves, *others, strict=True)]
        moved, remainder = (
            treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1)
        )
        return moved, CompensatedState(remainder, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


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
      the parameters. Its updates are in float32, for ``jmp_lite.apply_updates`` (see
      ``master_weights``). ``inner`` trains parameters of 32 bits as usual.

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
        check_state(state, StochasticRoundingState, "stochastic_rounding")
        _check_params(updates, params, "stochastic_rounding")
        _check_16_bit(params, "stochastic_rounding")
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


def rounded_to(master: Any, dtype: Any) -> Any:
    """Rounds a master to the numbers of a parameter's dtype, in its own dtype."""
    if dtype == jnp.bfloat16 and master.dtype == jnp.float32:
        return _full(split(master)[0])
    return nearest(master, grid_of(dtype))


def master_of(param: Any, master: Any) -> Any:
    """Returns the master, or the parameter if it is not the master rounded."""
    if not is_narrower(param, master):
        return param
    wide = param.astype(master.dtype)
    off = wide - rounded_to(master, param.dtype)
    # A cast may have rounded a tie in the other direction.
    is_tie = nearest(master, grid_of(param.dtype)) == wide
    # No update removes a difference below the smallest normal number.
    return jnp.where((jnp.abs(off) <= _TINY) | is_tie, master, wide)


def _no_remainder(param: Any) -> Any:
    """Returns the remainder of a parameter that lacks nothing."""
    if not is_16_bit(param):
        return optax.MaskedNode()
    is_exact = param.dtype == jnp.bfloat16
    return jnp.zeros_like(param, jnp.int16 if is_exact else None)


def with_remainder(param: Any, remainder: Any) -> Any:
    """Returns the master of a 16-bit parameter, and any other parameter as it is.

    Args:
      param: the parameter.
      remainder: the lower half of the bits of its master, or its rounding error.
    """
    if not is_16_bit(param):
        return param
    if remainder.dtype == jnp.int16:
        return join(param, remainder)
    wide, error = _full(param), _full(remainder)
    # Adding a zero would change the sign of a zero.
    is_added = may_differ_by(error, param) & (error != 0)
    return jnp.where(is_added, wide + error, wide)


def may_differ_by(error: Any, param: Any) -> Any:
    """Whether float32 numbers round to a parameter that differs by an error."""
    wide = _full(param)
    # A little less, because a rounding error of half a unit is a tie.
    less = error * (1 - float(jnp.finfo(param.dtype).epsneg))
    return nearest(wide + less, grid_of(param.dtype)) == wide


def remainder_of(param: Any, master: Any) -> Any:
    """Returns the remainder of a 16-bit parameter, which is its master rounded."""
    if param.dtype == jnp.bfloat16:
        return split(master)[1]
    wide = _full(param)
    error = jnp.where(jnp.isfinite(wide), master - wide, 0)
    return nearest(error, grid_of(param.dtype)).astype(param.dtype)


def _moved(param: Any, master: Any) -> tuple[Any, Any]:
    """Returns the update of a 16-bit parameter to a master, and the new remainder."""
    if param.dtype == jnp.bfloat16:
        target, remainder = split(master)
        update = _update_to(_full(target), param)
        # The sum may miss the target, by a difference near the smallest normal number.
        # Another number with this remainder would be another master.
        is_target = _bits(_sum(param, update)) == _bits(target)
        # Selected as floats: a TPU runs two kernels for a step that selects integers.
        kept = jnp.where(is_target, remainder.astype(jnp.float32), 0)
        return update, kept.astype(jnp.int16)
    update = _update_to(nearest(master, grid_of(param.dtype)), param)
    return update, remainder_of(_sum(param, update), master)


def _sum(param: Any, update: Any) -> Any:
    """Adds as optax.apply_updates does, so that XLA computes the sum once for both.

    Otherwise a TPU would run two kernels.
    """
    return (_full(param) + update).astype(param.dtype)


def _bits(param: Any) -> Any:
    return lax.bitcast_convert_type(param, jnp.uint16)


def is_narrower(param: Any, master: Any) -> bool:
    """Whether both are floating-point arrays, and the first has fewer bits."""
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
    leaves, is_part = _whole_or_part(params)
    if leaves and not is_part and not any(map(is_16_bit, leaves)):
        raise ValueError(
            f"{name} is for 16-bit parameters, but got only {_types_of(leaves)}. "
            "Causes: (a) the parameters have 32 bits: cast them with cast_tree, or "
            "leave the wrapper out; (b) a wrapper around it casts them to float32: put "
            f"that wrapper inside, as in {name}(wrapper(...)); (c) {_NOT_ROUNDED}."
        )


def _check_narrower(params: Any, masters: Any) -> None:
    """Raises a ValueError if masters have nothing to follow them."""
    leaves, is_part = _whole_or_part(params)
    if not is_part:
        pairs = zip(leaves, jax.tree.leaves(masters), strict=False)
        check_any_narrower(
            list(pairs),
            f"Causes: (a) {_NOT_ROUNDED}; (b) the parameters have 32 bits: cast them "
            "with cast_tree, or leave the wrapper out.",
        )


def check_any_narrower(pairs: Sequence[tuple[Any, Any]], advice: str) -> None:
    """Raises a ValueError if there are parameters, and none has fewer bits.

    Args:
      pairs: the parameters, each with its master.
      advice: the end of the message.
    """
    floats = [param for param, _ in pairs if is_floating(param)]
    if floats and not any(is_narrower(*pair) for pair in pairs):
        raise ValueError(
            "master_weights is for parameters that are narrower than their masters, "
            f"but got only {_types_of(floats)}. {advice}"
        )


_NOT_ROUNDED = (
    "updates were added without a cast, as by eqx.apply_updates, so 16-bit parameters "
    "became float32: use jmp_lite.apply_updates(params, updates)"
)


def _whole_or_part(params: Any) -> tuple[list[Any], bool]:
    """Returns the leaves, and whether optax.masked or partition has selected them."""
    leaves = jax.tree.leaves(params, is_leaf=is_left_out)
    return leaves, any(map(is_left_out, leaves))


def is_left_out(node: Any) -> bool:
    """Whether a node stands for what optax.masked or optax.partition leaves out."""
    return isinstance(node, optax.MaskedNode)


def _types_of(leaves: list[Any]) -> str:
    return ", ".join(sorted({type_of(leaf) for leaf in leaves})[:3])


def _check_remainder(remainder: Any, params: Any) -> None:
    """Raises a TypeError for remainders of parameters of another dtype."""
    leaves, treedef = jax.tree.flatten_with_path(params)
    found = treedef.flatten_up_to(remainder)
    for (path, param), bits in zip(leaves, found, strict=True):
        if is_array(bits):
            check_16_bit_as_before(path, param)
        elif not is_16_bit(param):
            continue
        is_exact = param.dtype == jnp.bfloat16
        expected = jnp.dtype(jnp.int16 if is_exact else param.dtype)
        if not is_array(bits) or bits.dtype != expected:
            raise TypeError(
                f"Expected a remainder of {expected} for {type_of(param)} at "
                f"{jax.tree_util.keystr(path) or 'the root'}, got {type_of(bits)}. "
                "Causes: (a) an older version saved the state, with rounding errors: "
                f"{CONVERT}; (b) the parameters were cast to another dtype after init: "
                "let jmp_lite.convert_state cast them."
            )


def check_16_bit_as_before(path: Any, param: Any) -> None:
    """Raises a TypeError for a parameter that had 16 bits in ``init``."""
    if is_16_bit(param):
        return
    raise TypeError(
        "Expected a 16-bit parameter at "
        f"{jax.tree_util.keystr(path) or 'the root'}, as init got it, and got "
        f"{type_of(param)}. Causes: (a) {_NOT_ROUNDED}; (b) the parameters were cast "
        "after init: let jmp_lite.convert_state cast them, or call init with the new "
        "ones."
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
