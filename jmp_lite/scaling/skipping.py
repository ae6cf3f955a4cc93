"""The wrapper that skips steps: whether gradients are finite, and what a step keeps."""

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import (
    is_16_bit,
    is_array,
    is_inexact,
    place_of,
    refuse_raw_bytes,
    type_of,
    upcast_tree,
)
from jmp_lite.casting.types import (
    Array,
    AxisName,
    Leaf,
    Optimizer,
    OptimizerExtraArgs,
    Path,
    PyTree,
    Tree,
)
from jmp_lite.scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    boolean_scalar,
    check_is_loss_scale,
    is_selectable,
)
from jmp_lite.scaling.wrapping import (
    check_classes,
    copied,
    initial_state,
    nodes_of,
    params_for_init,
    update_inner,
    with_extra_args,
    wrapper,
)


def all_finite(tree: PyTree, axis_name: AxisName | None = None) -> Array:
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
      TypeError: a leaf consists of bytes without a dtype, as from ``np.load``.

    Source: jmp 0.0.4. MindSpore and Megatron-LM also decide over all devices.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.all_finite({"w": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])})
      Array(False, dtype=bool)
    """
    refuse_raw_bytes(tree)
    checks = (
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if is_inexact(leaf)
    )
    finite = functools.reduce(jnp.logical_and, checks, jnp.array(True))
    if axis_name is None:
        return finite
    with _naming_axes(axis_name):
        return lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)


@contextlib.contextmanager
def _naming_axes(axis_name: AxisName) -> Generator[None]:
    """Explains JAX's error about an axis that is not mapped."""
    try:
        yield
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} is not a mapped axis here. Call this inside "
            "jax.shard_map over that axis, or inside jax.vmap or jax.pmap with that "
            "axis_name. Under jit alone, leave axis_name out: jit sees whole arrays, "
            "even if they are sharded."
        ) from error


class Judged(NamedTuple):
    """What the gradients of a step are.

    Attributes:
      finite: whether every number is finite, a boolean scalar.
      zero: whether there are numbers, and all of them are zero, a boolean scalar.
    """

    finite: Array
    zero: Array


def judged(grads: PyTree, axis_name: AxisName | None = None) -> Judged:
    """Returns whether gradients are finite, and whether they are all zero.

    Both come from the size of the largest number, in one reduction.

    Args:
      grads: as for ``all_finite``.
      axis_name: as for ``all_finite``.

    Example:
      >>> import jax.numpy as jnp
      >>> [bool(x) for x in judged({"w": jnp.zeros(2), "b": jnp.array([0.0, 1.0])})]
      [True, False]
    """
    leaves = list(filter(is_inexact, jax.tree.leaves(grads)))
    if not leaves:
        return Judged(jnp.array(True), jnp.array(False))
    both = Judged(*_judge(leaves))
    if not axis_name:
        return both
    with _naming_axes(axis_name):
        counts = lax.pmin(jnp.stack(both).astype(jnp.int32), axis_name)
    return Judged(*counts.astype(jnp.bool_))


# Under jit, jax_debug_nans looks at the results alone, which are booleans.
@functools.partial(jax.jit, inline=True)
def _judge(leaves: Sequence[Leaf]) -> tuple[Array, Array]:
    is_wide = any(jnp.finfo(jnp.result_type(leaf)).bits > 32 for leaf in leaves)
    dtype = np.float64 if is_wide else np.float32
    # One comparison after all maxima, and each maximum beside its array: of the forms
    # that were tried, XLA for a GPU makes the fewest kernels of this one, as
    # benchmarks.steps counts them.
    sizes = (_largest_size(leaf).astype(dtype) for leaf in leaves)
    largest = functools.reduce(jnp.maximum, sizes)
    return largest < jnp.inf, largest == 0


def _largest_size(leaf: Leaf) -> Array:
    """Returns the size of the largest number; an infinity if there is a NaN.

    So the result depends on no backend's maximum of a NaN.
    """
    is_nan = jnp.isnan(leaf)
    if jnp.iscomplexobj(leaf):  # Its own size may be an infinity.
        sizes = jnp.maximum(jnp.abs(leaf.real), jnp.abs(leaf.imag))
    else:
        sizes = jnp.abs(leaf)
    return jnp.max(jnp.where(is_nan, jnp.inf, upcast_tree(sizes)), initial=0)


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
    pred = boolean_scalar(pred)
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, pred), a, b)


def _select_leaf(pred: Array, path: Path, a: Leaf, b: Leaf) -> Leaf:
    if a is b:
        return a
    if not (is_selectable(a) and is_selectable(b)):
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


def _differ(path: Path, a: str, b: str) -> str:
    where = place_of(path)
    return (
        f"Cannot select between {a} and {b} at {where}: expected the same shape and "
        "dtype in both trees; cast one of them."
    )


# -------------------------------------------------------------------------- the wrapper


class LossScalingState(NamedTuple):
    """The state of ``loss_scaling``.

    Attributes:
      loss_scale: the ``LossScale`` of the next step.
      inner_state: the state of the wrapped transformation.
      grads_finite: whether the last step's gradients were finite, a boolean scalar.
      skipped: the number of skipped steps, an int32 scalar. With ``skip=False`` it is
        the number of steps with non-finite gradients.
      consecutive_skipped: the number of skipped steps in a row up to now, an int32
        scalar.
      consecutive_zero: the number of steps in a row, up to now, whose gradients were
        all zero, an int32 scalar. ``check_loss_scale`` reads it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> state = jmp.loss_scaling(optax.sgd(0.1)).init(jnp.ones(1))
      >>> state.skipped.dtype, state.loss_scale.loss_scale.dtype
      (dtype('int32'), dtype('float32'))
    """

    loss_scale: LossScale
    inner_state: PyTree
    grads_finite: Array
    skipped: Array
    consecutive_skipped: Array
    consecutive_zero: Array


def find_states(tree: PyTree, prefix: Path = ()) -> list[tuple[Path, LossScalingState]]:
    """Returns each ``LossScalingState`` in a tree with its path, also nested ones.

    Args:
      tree: a pytree.
      prefix: the path of the tree.
    """
    found: list[tuple[Path, LossScalingState]] = []
    for path, state in nodes_of(tree, LossScalingState):
        inside = (*prefix, *path, jax.tree_util.GetAttrKey("inner_state"))
        found += [((*prefix, *path), state), *find_states(state.inner_state, inside)]
    return found


def loss_scaling(
    inner: Optimizer,
    loss_scale: LossScale | None = None,
    *,
    axis_name: AxisName | None = None,
    skip: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it carries a loss scale and skips overflowed steps.

    ``update`` takes true gradients: ``jmp_lite.value_and_grad`` scales and unscales. It
    checks them and adjusts the scale. If a gradient is not finite, the step is skipped:

    - The updates are -0.0, which changes no bit of a parameter.
    - The inner state stays unchanged, schedules included.
    - ``inner`` receives ones in place of the gradients, never a NaN or an infinity. Its
      results are dropped.

    If ``inner`` calls a function among its extra arguments, such as ``grad_fn``, the
    step is also skipped if its updates or its new state are not finite.

    Where to put it:

    - Wrap the whole chain, and wrap ``optax.MultiSteps``. Inside ``MultiSteps``, one
      overflow would stay in optax's accumulator forever.
    - Inside ``optax.partition`` or ``optax.masked``, a wrapper checks its own leaves
      only.
    - For one loss and two optimizers, put one ``loss_scaling`` around
      ``optax.partition``. With one wrapper around each optimizer, one state scales the
      loss, and an overflow in the other optimizer's gradients never lowers that scale::

        labels = {"encoder": "slow", "head": "fast"}
        optimizers = {"slow": optax.sgd(1e-4), "fast": optax.adam(1e-3)}
        optimizer = jmp.loss_scaling(optax.partition(optimizers, labels))

    Under ``jax_debug_nans`` the wrapper adds no error. Some optimizers raise one
    themselves: ``optax.lbfgs`` outside of jit, and ``optax.contrib.schedule_free``,
    which contains a constant NaN.

    Args:
      inner: an ``optax.GradientTransformation``, with or without extra arguments, or an
        ``optax.MultiSteps``.
      loss_scale: the initial scale; None means ``DynamicLossScale()``.
      axis_name: a mapped axis or several. All replicas on these axes skip together.
      skip: False also applies the updates of overflowed gradients, and counts them. It
        requires a scale that does not change, such as ``StaticLossScale``. (MindSpore
        calls it ``FixedLossScaleManager(drop_overflow_update=False)``.)

    Returns:
      A transformation whose state is a ``LossScalingState``. ``update`` takes gradients
      of any floating-point dtype, and passes extra arguments to ``inner``.

      16-bit gradients and parameters reach ``inner`` in float32, so its state and
      updates are those of float32 parameters. There is one exception: parameters stay
      in 16 bits if ``master_weights``, ``compensated`` or ``stochastic_rounding``
      inside rounds them.

    Raises:
      TypeError: ``inner`` is not a transformation, or ``loss_scale`` is not a
        ``LossScale``. In ``update``: ``inner`` changes the structure or a shape of its
        state, an extra argument is missing, or the gradients do not match the
        parameters.
      ValueError: ``skip`` is False with a scale that changes.
      NameError: in ``update``, ``axis_name`` is not a mapped axis.

    Source: Micikevicius et al., "Mixed Precision Training", 2017.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.loss_scaling(optax.sgd(0.5), jmp.DynamicLossScale(8.0))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> overflowed = {"w": jnp.array([1.0, jnp.inf])}
      >>> updates, state = optimizer.update(overflowed, state, params)
      >>> updates["w"], state.loss_scale.loss_scale, int(state.skipped)
      (Array([-0., -0.], dtype=float32), Array(4., dtype=float32), 1)
    """
    inner = with_extra_args(inner)
    if loss_scale is not None:
        check_is_loss_scale(loss_scale)
    if not skip and (loss_scale is None or jax.tree.leaves(loss_scale)):
        given = "DynamicLossScale" if loss_scale is None else type(loss_scale).__name__
        raise ValueError(
            "Expected a loss scale that does not change with skip=False, got "
            f"{given}, which would adjust to steps that are not skipped. Pass "
            "StaticLossScale(128.0) or NoOpLossScale(), or leave skip=False out."
        )

    def init(params: PyTree) -> PyTree:
        refuse_raw_bytes(params)
        start = DynamicLossScale() if loss_scale is None else loss_scale
        inner_state = initial_state(inner, params_for_init(inner, params))
        inside = [state.loss_scale for _, state in find_states(inner_state)]
        scaled = [each for each in inside if not isinstance(each, NoOpLossScale)]
        if scaled and not isinstance(start, NoOpLossScale):
            raise ValueError(
                "loss_scaling is applied twice: the wrapped optimizer already holds a "
                "loss scale. Remove one of the two wrappers."
            )
        return LossScalingState(
            loss_scale=copied(start),
            inner_state=inner_state,
            grads_finite=jnp.array(True),
            skipped=jnp.zeros([], jnp.int32),
            consecutive_skipped=jnp.zeros([], jnp.int32),
            consecutive_zero=jnp.zeros([], jnp.int32),
        )

    def update(
        updates: PyTree, state: LossScalingState, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, LossScalingState]:
        check_classes(state.loss_scale, "a LossScale in the state")
        refuse_raw_bytes(updates)
        refuse_raw_bytes(params)
        grads = judged(updates, axis_name)
        if skip:
            return update_if(
                grads, inner, updates, state, params, extra_args, axis_name=axis_name
            )
        new_updates, _, inner_state = update_inner(
            inner, updates, state.inner_state, params, extra_args
        )
        return new_updates, _state_after_step(state, grads, inner_state)

    return wrapper("loss_scaling", LossScalingState, init, update)


def skip_nonfinite(
    inner: Optimizer, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it skips steps with non-finite gradients.

    It is ``loss_scaling`` without a scale, for bfloat16 and float32. Unlike
    ``optax.apply_if_finite``, it never applies a NaN after too many skips. Call
    ``check_loss_scale`` to decide whether to stop.

    Args:
      inner: see ``loss_scaling``.
      axis_name: see ``loss_scaling``.

    Returns:
      A transformation whose state is a ``LossScalingState`` with ``NoOpLossScale()``.

    Raises:
      TypeError: see ``loss_scaling``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> import optax
      >>> optimizer = jmp.skip_nonfinite(optax.sgd(0.5))
      >>> state = optimizer.init(jnp.ones(1))
      >>> optimizer.update(jnp.array([jnp.nan]), state)[0]
      Array([-0.], dtype=float32)
    """
    return loss_scaling(inner, NoOpLossScale(), axis_name=axis_name)


def update_if(
    judged_grads: Judged,
    inner: OptimizerExtraArgs,
    updates: PyTree,
    state: LossScalingState,
    params: PyTree | None,
    extra_args: dict[str, Any],
    *,
    axis_name: AxisName | None = None,
) -> tuple[PyTree, LossScalingState]:
    """Runs ``inner.update`` and keeps its results only if they are finite.

    They are if the gradients are. An exception is an optimizer that calls a function
    among the extra arguments, such as ``grad_fn``: the result of the function may
    overflow, too. Then the decision includes the updates and the new inner state.

    It selects and does not branch. On accelerators, ``lax.cond`` moves more bytes and
    holds temporaries. It also refuses an inner transformation whose weak types change.
    """
    called: list[str] = []
    grads_finite = judged_grads.finite

    # Ones, not zeros: a normalizing optimizer would divide 0 by 0.
    def or_ones(leaf: Leaf) -> Leaf:
        is_float = is_inexact(leaf)
        return jnp.where(grads_finite, leaf, jnp.ones_like(leaf)) if is_float else leaf

    # -0.0 changes no bit of a parameter: -0.0 + 0.0 would be 0.0.
    def no_update(update: ArrayLike) -> Array:
        zeros = jnp.zeros_like(update)
        return -zeros if is_inexact(update) else zeros

    grads, extra_args = jax.tree.map(or_ones, (updates, extra_args))
    new_updates, inner_state, new_inner_state = update_inner(
        inner, grads, state.inner_state, params, _noting_calls(extra_args, called)
    )
    is_kept = grads_finite
    if called:
        # Without such a call the gradients decide, and this check would read all arrays
        # again.
        is_new = _stays_finite(inner_state, new_inner_state)
        is_kept &= all_finite((new_updates, is_new), axis_name)
    no_updates = jax.tree.map(no_update, new_updates)
    return select_tree(is_kept, new_updates, no_updates), _state_after_step(
        state,
        judged_grads._replace(finite=is_kept),
        inner_state=select_tree(is_kept, new_inner_state, inner_state),
    )


def _noting_calls(extra_args: dict[str, Any], called: list[str]) -> dict[str, Any]:
    """Returns extra arguments whose functions add their name to a list if called."""

    def noting(name: str, fun: PyTree) -> PyTree:
        if not callable(fun) or not jax.tree_util.treedef_is_leaf(
            jax.tree.structure(fun)
        ):
            return fun

        @functools.wraps(fun)  # optax's line searches read the signature.
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return fun(*args, **kwargs)

        return call

    return {name: noting(name, arg) for name, arg in extra_args.items()}


def _stays_finite(before: PyTree, after: PyTree) -> PyTree:
    """Returns numbers that are not finite where a state has lost a finite number.

    Some states start with an infinity, such as the best loss so far.
    """

    def lost(old: Leaf, new: Leaf) -> Array | None:
        if not (is_inexact(old) and is_inexact(new)):
            return None
        return jnp.where(jnp.isfinite(old), new, 0)

    return jax.tree.map(lost, before, after)


def _state_after_step(
    state: LossScalingState, grads: Judged, inner_state: PyTree
) -> LossScalingState:
    """Returns the state after a step."""
    consecutive_skipped = jnp.where(grads.finite, 0, state.consecutive_skipped + 1)
    # Each count is computed from the one before, so that a GPU computes all of them in
    # one kernel.
    skipped = state.skipped + jnp.minimum(consecutive_skipped, 1)
    is_zero = grads.zero & (skipped == state.skipped)
    return LossScalingState(
        loss_scale=state.loss_scale.adjust(grads.finite),
        inner_state=inner_state,
        grads_finite=grads.finite,
        skipped=skipped,
        consecutive_skipped=consecutive_skipped,
        consecutive_zero=jnp.where(is_zero, state.consecutive_zero + 1, 0),
    )
