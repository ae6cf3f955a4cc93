"""The cost of an equation: sizes and operations of products, and sizes of arrays."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_lite.jaxprs.params import (
    PRODUCTS,
    conv_axes,
    dot_dimensions,
    inserted_zeros,
    op_of,
    ragged_axes,
)
from jmp_lite.jaxprs.structure import dtype_of
from jmp_lite.jaxprs.types import Eqn


def product_sizes(eqn: Eqn) -> tuple[Any, ...]:
    """Returns the sizes M, N and K of a matrix product.

    For a convolution it returns the numbers of channels, and for other ops nothing. A
    size may be symbolic.
    """
    if op_of(eqn) not in PRODUCTS:
        return ()
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    if op_of(eqn) == "conv_general_dilated":
        channels_out, channels_in, *_ = (rhs[i] for i in conv_axes(eqn).rhs_spec)
        return channels_in, channels_out
    (summed, of_rhs), (batch, of_rhs_batch) = dot_dimensions(eqn)
    is_ragged = op_of(eqn) == "ragged_dot_general"
    groups = ragged_axes(eqn).rhs_group_dimensions if is_ragged else ()
    rest = [
        math.prod(n for i, n in enumerate(shape) if i not in bound)
        for shape, bound in (
            (lhs, {*summed, *batch}),
            (rhs, {*of_rhs, *of_rhs_batch, *groups}),
        )
    ]
    return *rest, math.prod(lhs[i] for i in summed)


def product_flops(eqn: Eqn) -> int:
    """Returns the operations of a matrix product, two for each multiplication."""
    if op_of(eqn) not in PRODUCTS:
        return 0
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    n_times = 1
    if op_of(eqn) == "conv_general_dilated":
        summed = [n for i, n in enumerate(rhs) if i != conv_axes(eqn).rhs_spec[0]]
        # The derivative of a stride inserts zeros, which are not work.
        n_times = math.prod(inserted_zeros(eqn))
    else:
        (axes, _), _ = dot_dimensions(eqn)
        summed = [lhs[i] for i in axes]
        if op_of(eqn) == "ragged_dot_general" and {*axes} & {
            *ragged_axes(eqn).lhs_ragged_dimensions
        }:
            # Each group contracts its own rows.
            n_times = known_size(eqn.invars[2].aval.shape[-1:])
    (out,) = eqn.outvars
    # A complex multiplication is four real ones, and two more sums.
    each = 8 if jnp.issubdtype(dtype_of(out), jnp.complexfloating) else 2
    return each * known_size(out.aval.shape) * known_size(summed) // max(n_times, 1)


def is_at_most(one: Any, other: Any) -> bool:
    """Whether a size is at most another; False if a symbolic size leaves it open."""
    try:
        return one <= other
    except jax.errors.InconclusiveDimensionOperation:
        return False


def known_size(shape: Iterable[object]) -> int:
    """Returns the number of elements of an array; a symbolic size counts as one."""
    return math.prod(n for n in shape if isinstance(n, int))
