"""Types of parameters, gradients and losses, as annotations."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
import optax

Tree = TypeVar("Tree")
"""A pytree; a function that returns it keeps its structure."""

PyTree: TypeAlias = Any
"""A pytree of any structure, such as parameters, gradients and updates."""
Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps
"""An optimizer, as users pass it."""
OptimizerExtraArgs: TypeAlias = optax.GradientTransformationExtraArgs | optax.MultiSteps
"""An optimizer whose ``update`` accepts extra arguments."""
Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, or any other object."""
Path: TypeAlias = tuple[Any, ...]
"""The path of a leaf or a node in a pytree, as keys."""
Array: TypeAlias = jax.Array
"""An array, or a tracer of one."""
AnyArray: TypeAlias = jax.Array | np.ndarray[Any, Any]
"""An array of JAX, a tracer of one, or an array of NumPy."""
Scalar: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.generic | float | int | bool
"""A number: an array without axes, or one of Python."""
TypedScalar: TypeAlias = jax.Array | np.ndarray[Any, Any] | np.number[Any]
"""A number with a dtype: an array without axes, or a scalar of NumPy."""
Key: TypeAlias = jax.Array
"""A key of ``jax.random``."""
Dtype: TypeAlias = np.dtype[Any]
AxisName: TypeAlias = Any
"""The name of a mapped axis, or several names. JAX accepts any hashable object."""
LossFn: TypeAlias = Callable[..., Any]
"""A function that returns a loss, or a loss and more."""
