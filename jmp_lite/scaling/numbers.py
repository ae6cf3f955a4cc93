"""Checks the numbers and booleans that loss scales are made of."""

import warnings

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_lite.casting.dtypes import is_array
from jmp_lite.casting.type_of import type_of
from jmp_lite.casting.types import Array, Leaf, Scalar, TypedScalar

LARGEST_SCALE = 2.0**126
"""The largest loss scale. The reciprocal of a larger one is a subnormal float32 number,
which accelerators replace by zero."""


def is_selectable(leaf: Leaf) -> bool:
    """Whether a leaf is an array or a number."""
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def boolean_scalar(pred: ArrayLike) -> Array:
    """Returns a boolean scalar.

    Raises:
      AssertionError: the argument is not a boolean scalar.
    """
    # jmp raises AssertionError, and code written for jmp catches it.
    if not is_selectable(pred):
        raise AssertionError(f"expected boolean scalar, got {type(pred).__name__}")
    array = jnp.asarray(pred)
    if array.ndim != 0 or array.dtype != jnp.bool_:
        raise AssertionError(f"expected boolean scalar, got {type_of(array)}")
    return array


def as_number(
    value: Scalar,
    dtype: type[np.float32] | type[np.int32],
    name: str,
    stack: tuple[int, ...] | None,
) -> TypedScalar:
    """Returns a strongly typed number: on the host if it was a host number.

    A loss scale that is made at import then starts no backend.

    Args:
      value: a number, or an array of the shape ``stack``.
      dtype: the dtype of the result.
      name: the name of the argument.
      stack: the shape of the result; None allows any.
    """
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.asarray(value).astype(dtype)[()]
    else:
        try:
            array = jnp.asarray(value).astype(dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected a number for {name}, got {value!r}.") from error
    if stack is None or array.shape == stack:
        return array
    if array.ndim != 0:
        expected = f"a scalar {name}"
        if stack:
            expected = f"a {name} of the counter's shape {stack}"
        raise ValueError(f"Expected {expected}, got the shape {array.shape}.")
    return jnp.broadcast_to(array, stack)


def number_on_host(value: Scalar, name: str) -> float:
    """Returns a number whose value is known; otherwise raises a TypeError."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Expected a concrete number for {name}, got {value!r}. Only the "
            "loss_scale of a DynamicLossScale changes during training."
        ) from error


def as_whole_number(value: Scalar, name: str, at_least: int) -> int:
    """Returns a whole number; raises a ValueError for any other."""
    number = number_on_host(value, name)
    if not at_least <= number < 2**31 or number != int(number):
        raise ValueError(
            f"Expected a whole number from {at_least} to 2**31 - 1 for {name}, got "
            f"{value}."
        )
    return int(number)


def as_counter(
    value: Scalar, name: str, stack: tuple[int, ...] | None = None
) -> TypedScalar:
    """Returns an int32 number, or an array of them; see ``as_number``."""
    if isinstance(value, bool | int | float):
        value = as_whole_number(value, name, at_least=0)
    return as_number(value, np.int32, name, stack)


def warn_if_not_floating(value: Scalar, name: str) -> None:
    """Warns of a number without a fraction, as jmp does."""
    try:
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        return  # Not a number: the conversion raises an error.
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"Expected a real number for {name}, got {value!r}.")
    if not jnp.issubdtype(dtype, jnp.floating):
        is_known = isinstance(value, int | np.integer)
        cure = f"{name}={float(value)}" if is_known else "a float"
        # The level of the line that makes the scale.
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}: pass {cure}.",
            stacklevel=3,
        )
