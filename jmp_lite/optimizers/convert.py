"""Converts parameters and the state of their optimizer to another precision.

An old state is split into two parts: the state of the optimizer inside of this
library's wrappers, and all digits of its parameters. The new state is built from these
two parts. So every combination of wrappers converts to every other.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import cast_tree, is_array, is_floating, upcast_tree
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import (
    AnyArray,
    Array,
    Leaf,
    Optimizer,
    Params,
    Path,
    PyTree,
    Tree,
)
from jmp_lite.optimizers.compensated import (
    CompensatedState,
    add_remainder,
    remainder_dtype,
)
from jmp_lite.optimizers.inner_state import (
    WrapperState,
    as_array,
    check_same_optimizer,
    converted,
    copied,
    inner_state_of,
    is_node,
    is_wrapper_state,
    leaves,
    named,
    remove_wrappers,
    wrappers,
)
from jmp_lite.optimizers.low_precision_state import LowPrecisionState, packed
from jmp_lite.optimizers.master_weights import (
    MasterWeightsState,
    check_any_narrower,
    is_narrower,
    master_of,
    rounded_to,
)
from jmp_lite.optimizers.parameters import check_16_bit_as_before, is_left_out
from jmp_lite.optimizers.rounding import split
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.scaling.state import LossScalingState
from jmp_lite.scaling.wrapping import strongly_typed, with_extra_args


def convert_state(
    old_state: PyTree,
    new_optimizer: Optimizer,
    params: Tree,
    dtype: DTypeLike | None = None,
    *,
    where: Callable[[Path, Leaf], bool] | None = None,
) -> tuple[Tree, PyTree]:
    """Converts parameters and the state of their optimizer to another precision.

    Use it to change precision in the middle of a run. The new optimizer is the old one
    in other wrappers: ``loss_scaling``, ``skip_nonfinite``, ``master_weights``,
    ``compensated``, ``stochastic_rounding`` and ``low_precision_state``, anywhere in an
    optax chain, or none.

    The new parameters and the new state continue the old ones:

    - **Digits of parameters.** ``master_weights`` and ``compensated`` start from all
      digits: those of float32 parameters, or those that the old state holds. Float32
      parameters get them back. Each new parameter of fewer bits is its master, rounded.
      A new optimizer without such a wrapper drops the digits that do not fit.
    - **The inner optimizer.** Moments, counts, schedules and injected hyperparameters
      stay. They take the dtypes of the new optimizer, and are rounded to the nearest
      where these have fewer bits. A stored moment of the same format keeps its bits.
    - **Loss scales.** A loss scale stays if both have one of the same class and
      settings. Otherwise the new one starts. Counts of skipped steps stay if both
      optimizers have ``loss_scaling`` or ``skip_nonfinite``, and else start at 0.
    - **Random keys.** The key of a wrapper stays if both optimizers have the wrapper.

    If several wrappers of one kind are in the state, as in ``optax.partition``, they
    correspond in order, if their numbers agree.

    It may be jit-compiled, and the old arguments may be donated: nothing in the results
    shares memory with them. Without jit, arrays keep their sharding.

    Args:
      old_state: the state of the old optimizer. Restore a checkpoint into the structure
        of the old optimizer's ``init`` first.
      new_optimizer: the new optimizer, or an ``optax.MultiSteps``.
      params: the parameters that belong to ``old_state``, in their old dtypes.
      dtype: the dtype of the new parameters; None keeps their dtypes.
      where: which parameters take ``dtype``, as in ``cast_tree``. The others keep their
        dtypes.

    Returns:
      ``(params, opt_state)``. The parameters have the structure and shapes of
      ``params``. The state has the types that ``new_optimizer.init`` returns, without
      weak types.

    Raises:
      TypeError: the two optimizers differ in more than wrappers and dtypes. The message
        names the first difference. Or a wrapper trains parameters of another structure
        than ``params``, as in ``optax.lookahead``. Or ``params`` are not those of the
        old state.
      ValueError: the wrappers of the new optimizer are for 16-bit parameters, and all
        parameters have 32 bits. Or ``where`` is given without ``dtype``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> params = {"w": jnp.full(2, 1 / 3)}
      >>> opt_state = optax.adam(0.1).init(params)
      >>> optimizer = jmp.skip_nonfinite(jmp.compensated(optax.adam(0.1)))
      >>> low, opt_state = jmp.convert_state(opt_state, optimizer, params, "bfloat16")
      >>> low["w"].dtype, opt_state.inner_state.remainder["bfloat16"]["w"].dtype
      (dtype(bfloat16), dtype('int16'))
      >>> again, _ = jmp.convert_state(opt_state, optax.adam(0.1), low, "float32")
      >>> bool(jnp.all(again["w"] == params["w"]))
      True
    """
    if where is not None and dtype is None:
        raise ValueError("Expected a dtype for the parameters that where selects.")
    optimizer = with_extra_args(new_optimizer)
    params = jax.tree.map(as_array, params)
    full = _restore_digits(old_state, params)
    goal = params if dtype is None else cast_tree(params, dtype, where)
    new_state = _start(optimizer, goal)
    old_inner, new_inner = remove_wrappers(old_state), remove_wrappers(new_state)
    check_same_optimizer(old_inner, new_inner)
    full = _limit_digits(new_state, full)
    new_params = jax.tree.map(_rounded, goal, full)
    values = map(converted, *map(leaves, (old_inner, new_inner)))
    return new_params, _wrapped(old_state, new_state, values, full, new_params)


def _start(optimizer: Optimizer, params: PyTree) -> PyTree:
    try:
        return strongly_typed(optimizer.init(params))
    except ValueError as error:
        error.add_note(
            "convert_state calls init with the new parameters. To cast them, pass "
            "dtype, as in convert_state(opt_state, optimizer, params, 'bfloat16')."
        )
        raise


def _restore_digits(old_state: PyTree, params: Tree) -> Tree:
    """Returns the parameters as the old optimizer sees them, in 32 bits or more."""
    full = upcast_tree(params)
    for state in wrappers(old_state):
        if isinstance(state, MasterWeightsState):
            advice = "Pass the parameters of the old state, without casting them."
            _check_narrower(state.masters, params, advice)
            full = _zipped(_read_master, state.masters, full, params)
        elif isinstance(state, CompensatedState):
            for part in state.remainder.values():
                full = _zipped(_read_remainder, part, full, params)
    return full


def _read_master(_: Path, master: Leaf, full: Leaf, param: Leaf) -> Leaf:
    return master_of(param, as_array(master)) if is_floating(param) else full


def _read_remainder(path: Path, remainder: AnyArray, _: Leaf, param: Leaf) -> Leaf:
    check_16_bit_as_before(path, param)
    if remainder.dtype != remainder_dtype(param):
        raise TypeError(
            f"The remainder {type_of(remainder)} at {named(path)} belongs to a "
            f"parameter of another dtype than {type_of(param)}: pass the parameters of "
            "the old state, without casting them."
        )
    return add_remainder(param, as_array(remainder))


def _limit_digits(new_state: PyTree, full: Tree) -> Tree:
    """Returns parameters with as many digits as the new state can hold."""
    for state in wrappers(new_state):
        if isinstance(state, MasterWeightsState):
            full = _zipped(
                lambda _, master, x: x.astype(master.dtype) if is_floating(x) else x,
                *(state.masters, full),
            )
        elif isinstance(state, CompensatedState):
            for part in state.remainder.values():
                full = _zipped(lambda _, __, x: x.astype(jnp.float32), part, full)
    return full


def _rounded(goal: Leaf, full: Leaf) -> Leaf:
    """Returns a new parameter: all digits of one, rounded to the dtype of another."""
    if not is_floating(goal) or not is_narrower(goal, full):
        return copied(full, goal)
    return rounded_to(full, goal.dtype).astype(goal.dtype)


def _check_narrower(masters: Params, params: PyTree, advice: str) -> None:
    """Raises a ValueError if all parameters have as many bits as their masters."""
    pairs: list[tuple[Leaf, Leaf]] = []
    _zipped(lambda _, master, param: pairs.append((param, master)), masters, params)
    if not any(map(is_left_out, jax.tree.leaves(masters, is_leaf=is_left_out))):
        check_any_narrower(pairs, advice)


def _wrapped(
    old_state: PyTree,
    new_state: PyTree,
    values: Iterator[Leaf],
    full: PyTree,
    params: PyTree,
) -> PyTree:
    """Returns the new state with the values of the old one.

    Args:
      old_state: the old state.
      new_state: the new state, as ``init`` made it.
      values: the leaves of the new inner state, in order.
      full: the new parameters with all their digits.
      params: the new parameters.
    """
    former = {kind: _paired(kind, old_state, new_state) for kind in _PAIRED_STATES}

    def wrap(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda node: (
                convert_wrapper(node) if is_wrapper_state(node) else next(values)
            ),
            tree,
            is_leaf=is_node,
        )

    def convert_wrapper(new: WrapperState) -> WrapperState:
        if isinstance(new, MasterWeightsState):
            _check_narrower(new.masters, params, _CAST)
            masters = _zipped(_new_master, new.masters, new.masters, full)
            return MasterWeightsState(masters, wrap(new.inner_state))
        if isinstance(new, CompensatedState):
            remainder = {
                name: _zipped(_new_remainder, part, part, params, full)
                for name, part in new.remainder.items()
            }
            return CompensatedState(remainder, wrap(new.inner_state))
        old = next(former[type(new)])
        inner_state = wrap(inner_state_of(new))
        if isinstance(new, LowPrecisionState):
            return packed(inner_state, _key(old, new), new)
        if isinstance(new, StochasticRoundingState):
            return StochasticRoundingState(_key(old, new), inner_state)
        return _keep_counts(old, new)._replace(inner_state=inner_state)

    return wrap(new_state)


_PAIRED_STATES = (LossScalingState, StochasticRoundingState, LowPrecisionState)
"""The states that contain more than an inner state and digits of parameters."""


_CAST = "To cast them, pass dtype, such as 'bfloat16'."


def _paired(
    kind: type[WrapperState], old_state: PyTree, new_state: PyTree
) -> Iterator[Any]:
    """Returns the old state for each new state of a kind; None if numbers differ."""
    old, new = (
        [state for state in wrappers(tree) if isinstance(state, kind)]
        for tree in (old_state, new_state)
    )
    return iter(old if len(old) == len(new) else [None] * len(new))


def _new_master(_: Path, master: Leaf, __: Leaf, full: Leaf) -> Leaf:
    return copied(full, master)


def _new_remainder(
    _: Path, remainder: Array, __: Array, param: AnyArray, full: AnyArray
) -> Array:
    return split(full, param.dtype)[1]


def _keep_counts(
    old: LossScalingState | None, new: LossScalingState
) -> LossScalingState:
    """Returns a new state that counts on, and keeps a scale of the same settings."""
    if old is None:
        return new
    scales = old.loss_scale, new.loss_scale
    is_same_scale = jax.tree.structure(scales[0]) == jax.tree.structure(scales[1])
    kept = old._replace(loss_scale=scales[0 if is_same_scale else 1], inner_state=None)
    return jax.tree.map(copied, kept)


def _key(
    old: StochasticRoundingState | LowPrecisionState | None,
    new: StochasticRoundingState | LowPrecisionState,
) -> Any:
    """Returns the old key if it has the type of the new one, else the new one."""
    keys = [None if state is None else state.key for state in (old, new)]
    types = [(key.dtype, key.shape) for key in keys if is_array(key)]
    is_kept = len(types) == 2 and types[0] == types[1]
    return copied(keys[0]) if is_kept else keys[1]


def _zipped(
    fun: Callable[..., Leaf], part: PyTree, first: Tree, *others: PyTree
) -> Tree:
    """Maps a function over the leaves of a wrapper's state for its parameters.

    Args:
      fun: takes the path of a parameter, its leaf in the wrapper's state, and its
        leaves in the trees.
      part: the tree of a wrapper's state, of the structure of the parameters. An
        ``optax.MaskedNode`` stands for parameters that the wrapper leaves out.
      first: a tree of parameters. It supplies the parameters that the wrapper leaves
        out.
      *others: more such trees.
    """

    def apply(path: Path, held: PyTree, *leaves: PyTree) -> PyTree:
        return leaves[0] if is_left_out(held) else fun(path, held, *leaves)

    try:
        return jax.tree.map_with_path(apply, part, first, *others, is_leaf=is_left_out)
    except ValueError as error:
        raise TypeError(
            "A wrapper holds digits of parameters of another structure than params. "
            "Causes: (a) params are not those of the state; (b) a transformation "
            "around the wrapper changes their structure, as optax.lookahead does: "
            "convert the state inside of it, with the parameters that it is for."
            f"\nThe wrapper's: {jax.tree.structure(part)}\nparams: "
            f"{jax.tree.structure(first)}"
        ) from error
