"""An optax wrapper that rounds 16-bit parameters stochastically."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_lite.casting.dtypes import is_16_bit, upcast_tree
from jmp_lite.casting.types import Key, Leaf, Optimizer, Path, PyTree
from jmp_lite.jaxprs.primitives import straight_through
from jmp_lite.optimizers.rounding import (
    check_16_bit,
    check_key,
    draw_words,
    grid_of,
    random_bits,
    round_by_chance,
    to_float32,
    update_to,
)
from jmp_lite.scaling.wrapping import initial_state, with_extra_args, wrapper


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

    key: Key
    inner_state: PyTree

    def _rounded_parameters(self) -> set[Path] | None:
        """Returns None: it rounds all 16-bit parameters, and its state lists none."""
        return None


def stochastic_rounding(
    inner: Optimizer, key: Key
) -> optax.GradientTransformationExtraArgs:
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

    Warns:
      UserWarning: in ``init``, ``inner`` measures how far parameters are from where
        they started (``optax.contrib.mechanize``, ``dog``, ``dowg``). It takes the
        noise for distance: use ``compensated`` or ``master_weights``.

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

    def init(params: PyTree) -> StochasticRoundingState:
        check_16_bit(params, "stochastic_rounding")
        inner_state = initial_state(inner, upcast_tree(params))
        _warn_of_distances(inner_state)
        return StochasticRoundingState(jnp.array(key, copy=True), inner_state)

    def update(
        updates: PyTree,
        state: StochasticRoundingState,
        params: PyTree,
        **extra_args: Any,
    ) -> tuple[PyTree, StochasticRoundingState]:
        check_16_bit(params, "stochastic_rounding")
        steps, inner_state = inner.update(
            upcast_tree(updates), state.inner_state, upcast_tree(params), **extra_args
        )
        now, later = jax.random.split(state.key)
        treedef = jax.tree.structure(params)
        numbers = treedef.unflatten(range(treedef.num_leaves))
        words = draw_words(now)

        def add(param: Leaf, step: Leaf, number: int) -> Leaf:
            if step is None or not is_16_bit(param):
                return step
            by = random_bits(words, number, param)
            goal = to_float32(to_float32(param) + step)
            rounded = round_by_chance(goal, grid_of(param.dtype), by)
            return update_to(straight_through(rounded, goal), param)

        moved = jax.tree.map(add, params, steps, numbers)
        return moved, StochasticRoundingState(later, inner_state)

    return wrapper(
        "stochastic_rounding", StochasticRoundingState, init, update, needs_params=True
    )


_MEASURE_DISTANCES = (
    "DoGState",
    "DoWGState",
    "MechanicState",
    "ScaleByDistanceOverGradientsState",
)
"""States of optax's optimizers that measure how far parameters moved.

``prodigy`` and ``dadapt_adamw`` measure it by products with gradients, in which the
noise averages out.
"""


def _warn_of_distances(state: PyTree) -> None:
    def measures(node: PyTree) -> bool:
        return type(node).__name__ in _MEASURE_DISTANCES

    found = filter(measures, jax.tree.leaves(state, is_leaf=measures))
    for name in sorted({type(node).__name__ for node in found}):
        warnings.warn(
            f"The optimizer measures how far parameters are from their start ({name}), "
            "and takes the noise of stochastic_rounding for distance. Use "
            "jmp_lite.compensated or jmp_lite.master_weights instead.",
            UserWarning,
            stacklevel=3,
        )
