"""What all wrappers of an optimizer share: checks, and how the wrapped one runs."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_number,
    place_of,
    refuse_raw_bytes,
    type_of,
    upcast_tree,
)
from jmp_lite.casting.types import Array, Leaf, OptimizerExtraArgs, Path, PyTree, Tree

Node = TypeVar("Node")


def with_extra_args(inner: object) -> OptimizerExtraArgs:
    """Returns a transformation that accepts extra arguments.

    An error about a state of other types gets a note with its likely cause.
    """
    # Used unchanged: with_extra_args_support would treat it as a transformation without
    # extra arguments, and drop them.
    if isinstance(inner, optax.MultiSteps):
        return inner
    if not isinstance(inner, optax.GradientTransformation):
        name = getattr(inner, "__name__", type(inner).__name__)
        hint = (
            f" Did you mean {name}(...)?"
            if callable(inner)
            else " Pass the transformation itself first, such as optax.adam(1e-3)."
        )
        raise TypeError(f"Expected an optax.GradientTransformation, got {name}.{hint}")
    full = optax.with_extra_args_support(inner)

    @functools.wraps(full.update)  # Its signature tells what it asks for.
    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        try:
            return full.update(updates, state, params, **extra_args)
        except AttributeError as error:
            if isinstance(state, dict | list):
                error.add_note(f"A likely cause: {WITHOUT_CLASSES}.")
            raise

    return optax.GradientTransformationExtraArgs(full.init, update)


def nodes_of(tree: PyTree, kind: type[Node]) -> list[tuple[Path, Node]]:
    """Returns the outermost nodes of a class in a tree, with their paths."""

    def is_one(node: PyTree) -> bool:
        return isinstance(node, kind)

    found = jax.tree.leaves_with_path(tree, is_leaf=is_one)
    return [(path, node) for path, node in found if isinstance(node, kind)]


WITHOUT_CLASSES = (
    "a checkpoint was restored without the classes of its states, as dicts and lists: "
    "restore it into a template, such as jax.eval_shape(optimizer.init, params)"
)


def strongly_typed(state: Tree) -> Tree:
    """Removes weak types from the numbers of an initial state."""

    def strengthen(leaf: Leaf) -> Leaf:
        if not is_number(leaf):
            return leaf
        array = jnp.asarray(leaf)
        return array.astype(array.dtype)

    return jax.tree.map(strengthen, state)


def initial_state(inner: OptimizerExtraArgs, params: PyTree) -> PyTree:
    """Returns the initial state of a wrapped optimizer, without weak types.

    Raises:
      ValueError: it contains 16-bit hyperparameters.
    """
    state = strongly_typed(inner.init(params))

    def is_injected(node: PyTree) -> bool:
        return isinstance(getattr(node, "hyperparams", None), dict)

    for node in filter(is_injected, jax.tree.leaves(state, is_leaf=is_injected)):
        low = [name for name, x in node.hyperparams.items() if is_16_bit(x)]
        if low:
            raise ValueError(
                f"The hyperparameter {low[0]!r} is {node.hyperparams[low[0]].dtype}: "
                "optax.inject_hyperparams stores numbers in the dtype of the "
                "parameters, in which 0.999 may be 1. Put a wrapper for 16-bit "
                "parameters around it, as in "
                "master_weights(optax.inject_hyperparams(optax.adam)(...)), or pass "
                "inject_hyperparams(..., hyperparam_dtype=jnp.float32)."
            )
    return state


def check_same_structure(old_state: PyTree, new_state: PyTree, effect: str) -> None:
    """Raises a TypeError for an optimizer that changes the structure of its state."""
    old, new = map(jax.tree.structure, (old_state, new_state))
    if old != new:
        raise TypeError(
            "The wrapped optimizer changes the structure of its state in update (as "
            f"optax.monitor does), so {effect}. Wrap the optimizer without that part. "
            "If a gradient is None, as that of an integer, mask its parameter with "
            "optax.masked: optax.adam drops its moments."
            f"\nBefore: {old}\nAfter: {new}"
        )


def check_classes(node: PyTree, name: str) -> None:
    """Raises a TypeError for a dict or a list in place of a state of this library.

    Args:
      node: what should be an object of a class.
      name: what it should be, for the message.
    """
    if isinstance(node, dict | list):
        raise TypeError(
            f"Expected {name}, got {type(node).__name__}. A likely cause: "
            f"{WITHOUT_CLASSES}."
        )


def wrapper(
    name: str,
    kind: type,
    init: optax.TransformInitFn,
    update: Callable[..., tuple[PyTree, PyTree]],
    needs_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that checks what its ``update`` gets.

    Args:
      name: the name of the wrapper.
      kind: the class of its state.
      init: returns the state.
      update: takes the arguments after these checks.
      needs_params: whether ``update`` requires parameters.
    """

    def checked(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        refuse_raw_bytes(state)
        if not isinstance(state, kind):
            raise TypeError(
                f"Expected the {kind.__name__} that {name} makes in init, got "
                f"{type(state).__name__}. Causes: (a) the arguments have another "
                "order: call optimizer.update(grads, opt_state, params); (b) an "
                f"optimizer with other wrappers made the state: {CONVERT}; (c) "
                f"{WITHOUT_CLASSES}."
            )
        if params is None and needs_params:
            raise ValueError(
                f"{name} needs the parameters: call optimizer.update(grads, opt_state, "
                "params)."
            )
        expected, got = map(jax.tree.structure, (params, updates))
        is_pair = isinstance(updates, tuple) and len(updates) == 2
        # Without parameters, it is not known what is expected.
        parts = updates if is_pair and params is not None else ()
        if got != expected and expected in map(jax.tree.structure, parts):
            raise TypeError(
                "Expected gradients, got a pair (loss, grads), as value_and_grad "
                "returns it. Unpack it: loss, grads = value_and_grad(...)(...), then "
                "call optimizer.update(grads, opt_state, params)."
            )
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, checked)


CONVERT = (
    "convert it once, before the first update, with params, opt_state = "
    "jmp_lite.convert_state(opt_state, optimizer, params)"
)


def update_inner(
    inner: OptimizerExtraArgs,
    grads: PyTree,
    inner_state: PyTree,
    params: PyTree | None,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the updates, and the inner state before and after, of the same types."""
    # A user may have put a Python number into it, such as a new learning rate.
    inner_state = strongly_typed(inner_state)
    try:
        updates, new_inner_state = inner.update(
            upcast_tree(grads),
            inner_state,
            params_for_update(inner_state, params),
            **upcast_tree(extra_args),
        )
    except (TypeError, ValueError) as error:
        _check_structure(grads, grads, params, error)
        error.add_note(
            "This error comes from the wrapped optimizer. If it needs more than "
            "gradients, such as the loss, pass that to update: "
            "optimizer.update(grads, opt_state, params, value=loss)."
        )
        raise
    if jax.tree.structure(grads) != jax.tree.structure(params):
        _check_structure(updates, grads, params)
    check_same_structure(
        inner_state, new_inner_state, "a skipped step cannot keep the old one"
    )
    new = jax.tree.map_with_path(_cast_leaf_like, inner_state, new_inner_state)
    return updates, inner_state, new


def _check_structure(
    updates: PyTree,
    grads: PyTree,
    params: PyTree | None,
    cause: Exception | None = None,
) -> None:
    """Raises a TypeError for updates that do not match the parameters.

    Either the gradients or the updates match: the gradients of ``optax.lookahead`` are
    those of half of its parameters, and the update of ``optax.measure_with_ema`` is
    what it measures.
    """
    if params is None or jax.tree.structure(updates) == jax.tree.structure(params):
        return
    # A None in one tree may be anything in the other, as in Equinox.
    update_paths, param_paths = (
        {
            place_of(path)
            for path, _ in jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
        }
        for tree in (updates, params)
    )
    differ = [
        f"no {name} at {', '.join(sorted(paths)[:3])}"
        for name, paths in (
            ("gradient", param_paths - update_paths),
            ("parameter", update_paths - param_paths),
        )
        if paths
    ]
    if differ:
        raise TypeError(
            "Expected gradients with the structure of the parameters, but there is "
            f"{' and '.join(differ)}: differentiate with respect to all "
            f"parameters.\nGradients: {jax.tree.structure(grads)}\nParameters: "
            f"{jax.tree.structure(params)}"
        ) from cause


def params_for_init(inner: OptimizerExtraArgs, params: PyTree) -> PyTree:
    """Returns parameters as the inner optimizer sees them.

    It sees 16-bit parameters in float32, except those that a wrapper inside rounds. The
    wrapper's state names them, also inside of a chain or a mask.
    """
    if not any(map(is_16_bit, jax.tree.leaves(params))):
        return params
    kept: list[set[Path] | None] = []
    # Only the structure of the state is needed, so no numbers are computed.
    jax.eval_shape(lambda: kept.append(_kept_in_16_bits(inner.init(params))))
    return _upcast_others(kept[0], params)


def params_for_update(inner_state: PyTree, params: PyTree | None) -> PyTree | None:
    """Returns parameters as ``params_for_init`` does, given the inner state."""
    return _upcast_others(_kept_in_16_bits(inner_state), params)


def _upcast_others(kept: set[Path] | None, params: Tree) -> Tree:
    if kept is None:
        return params
    if not kept <= {path for path, _ in jax.tree.leaves_with_path(params)}:
        return params  # A wrapper in between has changed their structure.
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if path in kept else upcast_tree(leaf), params
    )


def _cast_leaf_like(path: Path, before: Leaf, after: Leaf) -> Leaf:
    if not is_array(before) or not (is_array(after) or is_number(after)):
        return after
    after = jnp.asarray(after)
    if kind_of(before) != kind_of(after):
        hint = (
            " If a parameter is an integer, exclude it with optax.masked: it has no "
            "gradient."
        )
        raise TypeError(
            f"The wrapped optimizer changes its state at {jax.tree_util.keystr(path)} "
            f"from {type_of(before)} to {type_of(after)} in update, so a skipped step "
            "cannot keep the old state. Its init has to return the types that its "
            "update returns."
            f"{hint if is_number(before, jnp.integer) else ''}"
        )
    return after if after.dtype == before.dtype else after.astype(before.dtype)


def kind_of(array: Array) -> tuple[DTypeLike, tuple[int, ...]]:
    """Returns a key that is equal for two arrays if one can be cast to the other."""
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    kind = next((kind for kind in kinds if is_number(array, kind)), array.dtype)
    return kind, array.shape


def copied(tree: Tree) -> Tree:
    """Copies arrays and numbers: one may be donated, and another used again."""

    def copy(leaf: Leaf) -> Leaf:
        is_copied = is_array(leaf) or is_number(leaf)
        return jnp.array(leaf, copy=True) if is_copied else leaf

    return jax.tree.map(copy, tree)


def _kept_in_16_bits(state: PyTree) -> set[Path] | None:
    """Returns the key paths of the parameters that wrappers in a state round.

    None means all of them.
    """
    found: set[Path] = set()
    for _, node in nodes_of(state, Rounding):
        rounded = node._rounded_parameters()  # pyright: ignore[reportPrivateUsage]
        if rounded is None:
            return None
        found |= rounded
    return found


@runtime_checkable
class Rounding(Protocol):
    """The state of a wrapper that rounds parameters, and sees them in 16 bits."""

    def _rounded_parameters(self) -> set[Path] | None:
        """Returns the key paths of the parameters that it rounds; None for all."""
        ...
