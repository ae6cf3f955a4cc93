"""Converts parameters and the state of their optimizer to another precision.

An old state is split into two parts: the state of the optimizer inside of this
library's wrappers, and all digits of its parameters. The new state is built from these
two parts. So every combination of wrappers converts to every other.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    cast_tree,
    is_array,
    is_floating,
    is_number,
    place_of,
    type_of,
    upcast_tree,
)
from jmp_lite.casting.types import AnyArray, Leaf, Optimizer, Path, PyTree, Tree
from jmp_lite.optimizers.compensated import (
    CompensatedState,
    add_remainder,
    remainder_dtype,
)
from jmp_lite.optimizers.low_precision_state import LowPrecisionState, packed, unpacked
from jmp_lite.optimizers.master_weights import (
    MasterWeightsState,
    check_narrower,
    is_narrower,
    master_of,
    rounded_to,
)
from jmp_lite.optimizers.rounding import check_16_bit_as_before, is_left_out, split
from jmp_lite.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_lite.optimizers.storage import is_stored, restore, store_nearest
from jmp_lite.scaling.skipping import LossScalingState
from jmp_lite.scaling.wrapping import copied, kind_of, strongly_typed, with_extra_args


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
    params = jax.tree.map(_as_array, params)
    full = _restore_digits(old_state, params)
    goal: PyTree = params if dtype is None else cast_tree(params, dtype, where)
    try:
        new_state = strongly_typed(optimizer.init(goal))
    except ValueError as error:
        error.add_note(
            "convert_state calls init with the new parameters. To cast them, pass "
            "dtype, as in convert_state(opt_state, optimizer, params, 'bfloat16')."
        )
        raise
    old_inner, new_inner = _remove_wrappers(old_state), _remove_wrappers(new_state)
    _check_same_optimizer(old_inner, new_inner)
    full = _limit_digits(new_state, full)

    def rounded(goal: Leaf, full: Leaf) -> Leaf:
        if not is_floating(goal) or not is_narrower(goal, full):
            return _copied(full, goal)
        return rounded_to(full, goal.dtype).astype(goal.dtype)

    new_params = jax.tree.map(rounded, goal, full)
    values = map(
        _converted,
        jax.tree.leaves(old_inner, is_leaf=is_stored),
        jax.tree.leaves(new_inner, is_leaf=is_stored),
    )
    return new_params, _wrapped(old_state, new_state, values, full, new_params)


# ---------------------------------------------------------------- digits of parameters


def _restore_digits(old_state: PyTree, params: Tree) -> Tree:
    """Returns the parameters as the old optimizer sees them, in 32 bits or more."""

    def of_master(_: Path, master: Leaf, full: Leaf, param: Leaf) -> Leaf:
        return master_of(param, _as_array(master)) if is_floating(param) else full

    def of_remainder(path: Path, remainder: AnyArray, _: Leaf, param: Leaf) -> Leaf:
        check_16_bit_as_before(path, param)
        if remainder.dtype != remainder_dtype(param):
            raise TypeError(
                f"The remainder {type_of(remainder)} at {place_of(path)} belongs to a "
                f"parameter of another dtype than {type_of(param)}: pass the "
                "parameters of the old state, without casting them."
            )
        return add_remainder(param, _as_array(remainder))

    full = upcast_tree(params)
    for state in _wrappers(old_state):
        if isinstance(state, MasterWeightsState):
            advice = "Pass the parameters of the old state, without casting them."
            full = _zipped(of_master, state.masters, full, params)
            check_narrower(params, state.masters, advice)
        elif isinstance(state, CompensatedState):
            for part in state.remainder.values():
                full = _zipped(of_remainder, part, full, params)
    return full


def _limit_digits(new_state: PyTree, full: Tree) -> Tree:
    """Returns parameters with as many digits as the new state can hold."""
    for state in _wrappers(new_state):
        if isinstance(state, MasterWeightsState):
            full = _zipped(
                lambda _, master, x: x.astype(master.dtype) if is_floating(x) else x,
                *(state.masters, full),
            )
        elif isinstance(state, CompensatedState):
            for part in state.remainder.values():
                full = _zipped(lambda _, __, x: x.astype(jnp.float32), part, full)
    return full


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


# --------------------------------------------------------------- wrappers in the state

# All have a field ``inner_state``, the state of the wrapped optimizer.
WrapperState: TypeAlias = (
    LossScalingState
    | MasterWeightsState
    | CompensatedState
    | StochasticRoundingState
    | LowPrecisionState
)


def _is_wrapper_state(node: PyTree) -> TypeGuard[WrapperState]:
    """Whether a node of a pytree is the state of one of the wrappers."""
    return isinstance(node, WrapperState)


def _wrappers(state: PyTree) -> Iterator[WrapperState]:
    """Yields the states of wrappers, from the outside in."""
    for node in jax.tree.leaves(state, is_leaf=_is_wrapper_state):
        if _is_wrapper_state(node):
            yield node
            yield from _wrappers(node.inner_state)


def _inner_state_of(state: WrapperState) -> PyTree:
    """Returns the inner state, with a ``Stored`` for each array of 16 or 8 bits."""
    is_low = isinstance(state, LowPrecisionState)
    return unpacked(state) if is_low else state.inner_state


def _is_node(node: PyTree) -> bool:
    """Whether a node of a pytree is the state of a wrapper, or a stored array."""
    return _is_wrapper_state(node) or is_stored(node)


def _remove_wrappers(state: PyTree) -> PyTree:
    """Returns a state with each wrapper's state replaced by its inner state.

    An array that ``low_precision_state`` stores is a ``Stored``.
    """

    def replace(node: PyTree) -> PyTree:
        is_wrapper = _is_wrapper_state(node)
        return _remove_wrappers(_inner_state_of(node)) if is_wrapper else node

    return jax.tree.map(replace, state, is_leaf=_is_node)


def _converted(old: Leaf, new: Leaf) -> Leaf:
    """Returns an array of the old state in the format of the new one."""
    formats = [
        (each.numbers.dtype, each.scale is not None) if is_stored(each) else None
        for each in (old, new)
    ]
    if is_stored(old) and formats[0] == formats[1]:
        return copied(old)
    full = restore(old) if is_stored(old) else old
    if formats[1] is not None:
        return store_nearest(_as_array(full), *formats[1])
    return _copied(full, new) if is_array(new) else new


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

    def former_of(kind: type[WrapperState]) -> Iterator[Any]:
        """Returns the old state for each new one of a kind; None if numbers differ."""
        old, new = (
            [state for state in _wrappers(tree) if isinstance(state, kind)]
            for tree in (old_state, new_state)
        )
        return iter(old if len(old) == len(new) else [None] * len(new))

    # What contains more than an inner state and digits of parameters.
    kinds = (LossScalingState, StochasticRoundingState, LowPrecisionState)
    former = {kind: former_of(kind) for kind in kinds}

    def wrap(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda node: (
                convert_wrapper(node) if _is_wrapper_state(node) else next(values)
            ),
            tree,
            is_leaf=_is_node,
        )

    def convert_wrapper(new: WrapperState) -> WrapperState:
        if isinstance(new, MasterWeightsState):
            check_narrower(params, new.masters, _CAST)
            masters = _zipped(
                lambda _, master, __, full: _copied(full, master),
                *(new.masters, new.masters, full),
            )
            return MasterWeightsState(masters, wrap(new.inner_state))
        if isinstance(new, CompensatedState):
            remainder = {
                name: _zipped(
                    lambda _, __, ___, param, full: split(full, param.dtype)[1],
                    *(part, part, params, full),
                )
                for name, part in new.remainder.items()
            }
            return CompensatedState(remainder, wrap(new.inner_state))
        old = next(former[type(new)])
        inner_state = wrap(_inner_state_of(new))
        if isinstance(new, LowPrecisionState):
            return packed(inner_state, _key(old, new), new.scales)
        if isinstance(new, StochasticRoundingState):
            return StochasticRoundingState(_key(old, new), inner_state)
        return _keep_counts(old, new)._replace(inner_state=inner_state)

    return wrap(new_state)


_CAST = "To cast them, pass dtype, such as 'bfloat16'."


def _keep_counts(
    old: LossScalingState | None, new: LossScalingState
) -> LossScalingState:
    """Returns a new state that counts on, and keeps a scale of the same settings."""
    if old is None:
        return new
    scales = old.loss_scale, new.loss_scale
    is_same_scale = jax.tree.structure(scales[0]) == jax.tree.structure(scales[1])
    kept = old._replace(loss_scale=scales[0 if is_same_scale else 1], inner_state=None)
    return copied(kept)


def _key(
    old: StochasticRoundingState | LowPrecisionState | None,
    new: StochasticRoundingState | LowPrecisionState,
) -> Any:
    """Returns the old key if it has the type of the new one, else the new one."""
    keys = [None if state is None else state.key for state in (old, new)]
    types = [(key.dtype, key.shape) for key in keys if is_array(key)]
    is_kept = len(types) == 2 and types[0] == types[1]
    return copied(keys[0]) if is_kept else keys[1]


# --------------------------------------------------------- whether optimizers are alike


def _check_same_optimizer(old: PyTree, new: PyTree) -> None:
    """Raises a TypeError for states that differ in more than dtypes.

    Args:
      old: the old state, without wrappers.
      new: the new one.
    """
    found = _difference(old, new, ())
    if found is None:
        return
    path, came, expected = found
    raise TypeError(
        f"The old state is that of another optimizer. At {place_of(path)} it has "
        f"{came}, and that of the new optimizer has {expected}. (The wrappers of "
        "jmp_lite are left out.) Causes: (a) the optimizer inside of the wrappers "
        "differs in more than numbers: take the same one; (b) a checkpoint was "
        "restored without the structure of its optimizer: restore it into the old "
        "optimizer's init(params); (c) params are not those of the old state."
    )


def _difference(old: PyTree, new: PyTree, path: Path) -> tuple[Path, str, str] | None:
    """Returns the first path at which two states differ, and what each has there."""
    (old_parts, old_type), (new_parts, new_type) = map(_parts, (old, new))
    is_leaf = old_type == new_type == _LEAF
    if old_type != new_type or (is_leaf and _kind(old) != _kind(new)):
        return path, _name(old), _name(new)
    if is_leaf:
        return None
    pairs = zip(old_parts, new_parts, strict=True)
    differences = (_difference(a, b, (*path, *key)) for (key, a), (_, b) in pairs)
    return next(filter(None, differences), None)


_LEAF = jax.tree.structure(0)


def _parts(node: PyTree) -> tuple[list[tuple[Path, PyTree]], Any]:
    """Returns the children of a node with their keys, and the type of the node."""
    if is_stored(node):
        node = node.numbers
    return jax.tree_util.tree_flatten_with_path(node, lambda child: child is not node)


def _kind(leaf: Leaf) -> tuple[DTypeLike, tuple[int, ...]] | None:
    """Returns a key that is equal for two leaves if one can replace the other."""
    if is_stored(leaf):
        return jnp.floating, leaf.numbers.shape
    if not is_array(leaf) and not is_number(leaf):
        return None
    return kind_of(_as_array(leaf))


def _name(node: PyTree) -> str:
    parts, kind = _parts(node)
    if kind == _LEAF:
        return type_of(parts[0][1])
    keys = ", ".join(jax.tree_util.keystr(path) for path, _ in parts)
    return f"{type(node).__name__}({keys})"


def _as_array(leaf: Leaf) -> Leaf:
    """Returns a number, such as one of NumPy, as an array of JAX."""
    return jnp.asarray(leaf) if is_number(leaf) else leaf


def _copied(leaf: Leaf, like: Leaf) -> Leaf:
    """Returns a copy of an array, in the dtype of another one."""
    is_cast = is_number(like) and is_number(leaf)
    return jnp.array(leaf, like.dtype, copy=True) if is_cast else copied(leaf)
