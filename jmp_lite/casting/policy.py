"""Policies: the dtypes of parameters, computation and outputs, and their casts.

A policy is a value. It casts pytrees and changes nothing else.
"""

import dataclasses

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import cast_tree, dtype_name, parse_dtype, unknown_name
from jmp_lite.casting.types import Dtype, Tree


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, of computation and of outputs.

    A policy is frozen and hashable. Each dtype may be a dtype, a NumPy or JAX scalar
    type, or a name (``"bf16"``, ``"float32"``, ``"half"``). The policy stores it as a
    ``np.dtype``, so two spellings of one policy are equal.

    Attributes:
      param_dtype: the dtype of stored parameters.
      compute_dtype: the dtype of the forward and backward pass.
      output_dtype: the dtype of the results.

    Raises:
      ValueError: a dtype is unknown or not floating-point.

    Source: the policies of jmp 0.0.4, with which this class is compatible.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> policy = jmp.Policy("float32", "bfloat16", "float32")
      >>> print(policy)
      p=full,c=bf16,o=full
      >>> policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype
      dtype(bfloat16)
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            canonical = parse_dtype(getattr(self, field.name))
            object.__setattr__(self, field.name, canonical)

    def cast_to_param(self, tree: Tree) -> Tree:
        """Casts the floating-point arrays of a pytree to ``param_dtype``."""
        return cast_tree(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Casts the floating-point arrays of a pytree to ``compute_dtype``."""
        return cast_tree(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Casts the floating-point arrays of a pytree to ``output_dtype``."""
        return cast_tree(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns a copy of this policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        param, compute, output = map(dtype_name, dataclasses.astuple(self))
        return f"p={param},c={compute},o={output}"


# Keras's names: float32 variables, everything else in 16 bits.
_KERAS_POLICIES = {"mixed_bfloat16": "c=bfloat16", "mixed_float16": "c=float16"}

_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


def get_policy(text: str) -> Policy:
    """Reads a policy from text.

    Args:
      text: one of three forms.

        - One dtype for all three parts: ``"float16"``, ``"half"``, ``"full"``.
        - Parts by key: ``"params=float32,compute=float16,output=float32"``, or in short
          ``"p=f32, c=f16, o=f32"``. As in jmp, params default to float32, compute
          defaults to params, and output defaults to compute.
        - Keras's ``"mixed_bfloat16"`` or ``"mixed_float16"``.

    Returns:
      The policy. ``get_policy(str(policy)) == policy`` holds for every policy.

    Raises:
      ValueError: a key or a dtype is unknown, or a key is given twice.
      TypeError: ``text`` is not a string.

    Example:
      >>> import jmp_lite as jmp
      >>> print(jmp.get_policy("c=bf16"))
      p=full,c=bf16,o=bf16
      >>> jmp.get_policy("mixed_float16").compute_dtype
      dtype('float16')
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Expected a policy as text, got {type(text).__name__}.")
    spelled = _KERAS_POLICIES.get(text.strip(), text)
    if "=" not in spelled:
        if spelled.strip().startswith("mixed"):
            raise unknown_name("policy", spelled, _KERAS_POLICIES)
        dtype = _parse_part(spelled, text)
        return Policy(dtype, dtype, dtype)
    parts = _parse_parts(spelled)
    param = parts.get("param_dtype", np.dtype(np.float32))
    compute = parts.get("compute_dtype", param)
    return Policy(param, compute, parts.get("output_dtype", compute))


def _parse_parts(text: str) -> dict[str, Dtype]:
    parts: dict[str, Dtype] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(
                f"Expected key=dtype, got {part.strip()!r} in the policy {text!r}."
            )
        if key not in _KEYS:
            raise _name_policy(unknown_name("key", key, _KEYS), text)
        if _KEYS[key] in parts:
            raise ValueError(f"{_KEYS[key]} is given twice in the policy {text!r}.")
        parts[_KEYS[key]] = _parse_part(value, text)
    return parts


def _parse_part(value: str, text: str) -> Dtype:
    try:
        return parse_dtype(value.strip())
    except ValueError as error:
        raise _name_policy(error, text) from None


def _name_policy(error: ValueError, text: str) -> ValueError:
    return ValueError(f"{error} (In the policy {text!r}.)")
