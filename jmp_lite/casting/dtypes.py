"""Names and ranges of floating-point dtypes, casts of pytrees, and policies of casts.

A cast changes floating-point arrays only. Integers, booleans, PRNG keys, complex
numbers, Python scalars, ``None`` and arbitrary objects pass through.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_lite.casting.types import Array, Dtype, Leaf, Path, PyTree, Tree

_SHORT_NAMES = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("f16", "float16"),
    "float32": ("full", "f32", "float32"),
    "float64": ("f64", "float64"),
}

dtype_to_names: Mapping[type[np.generic], tuple[str, ...]] = MappingProxyType(
    {
        np.dtype(getattr(jnp, name)).type: _SHORT_NAMES.get(name, (name,))
        for name in (*_SHORT_NAMES, *filter(re.compile("float[48]_").match, dir(jnp)))
    }
)
"""The names of each floating-point dtype of JAX; ``str(policy)`` prints the first."""

_NAME_TO_DTYPE = {
    name: np.dtype(dtype) for dtype, names in dtype_to_names.items() for name in names
} | {"fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}

# ----------------------------------------------------------------- names and dtypes


def parse_dtype(dtype: DTypeLike | None) -> Dtype:
    """Returns the floating-point dtype for a name or a dtype-like object.

    Args:
      dtype: a name in ``dtype_to_names``; ``"half"``, which calls ``half_dtype()``; a
        ``np.dtype``; or a scalar type such as ``jnp.bfloat16``.

    Raises:
      ValueError: the name is unknown, or the dtype is not floating-point.
    """
    if isinstance(dtype, str):
        if dtype == "half":
            return np.dtype(half_dtype())
        if dtype not in _NAME_TO_DTYPE:
            raise unknown_name("dtype", dtype, [*_NAME_TO_DTYPE, "half"])
        return _NAME_TO_DTYPE[dtype]
    # NumPy accepts more: it reads None as float64, for example.
    parsed = np.dtype(dtype).type if isinstance(dtype, type | np.dtype) else None
    if parsed not in dtype_to_names:
        raise ValueError(
            f"Expected a floating-point dtype or the name of one, got {dtype!r}."
        )
    return np.dtype(parsed)


def dtype_names() -> Iterable[str]:
    """Returns the names that ``parse_dtype`` reads."""
    return _NAME_TO_DTYPE


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the name that ``parse_dtype`` reads back: ``bf16``, ``f16``, ``full``."""
    dtype = np.dtype(dtype)
    return dtype_to_names.get(dtype.type, (dtype.name,))[0]


def unknown_name(kind: str, got: str, accepted: Iterable[str]) -> ValueError:
    """Returns an error that lists the accepted names and suggests the nearest one."""
    accepted = list(accepted)
    return ValueError(
        f"Unknown {kind} {got!r}.{hint_for(got, accepted)} Expected one of "
        f"{', '.join(accepted)}."
    )


def nearest_name(got: str, accepted: Sequence[str]) -> str | None:
    """Returns the accepted name nearest to a typo: ``"tanh"`` for ``"tahn"``."""
    begun = [name for name in accepted if len(got) > 3 and name.startswith(got)]
    letters = sorted(got.lower())
    swapped = [name for name in accepted if sorted(name.lower()) == letters]
    near = begun or swapped or difflib.get_close_matches(got, accepted, n=1, cutoff=0.5)
    return near[0] if near else None


def hint_for(got: str, accepted: Iterable[str]) -> str:
    """Returns a question that suggests the nearest name, or nothing."""
    near = nearest_name(got, list(accepted))
    return f" Did you mean {near!r}?" if near else ""


def refuse_unknown(
    function: str,
    got: Iterable[str],
    known: Iterable[str],
    elsewhere: Mapping[str, str],
) -> None:
    """Raises a TypeError for an unknown keyword argument, and suggests the right one.

    Args:
      function: the name of the function.
      got: the names of the unknown arguments.
      known: the names of its arguments.
      elsewhere: the names of arguments in other libraries, and what they are here.
    """
    known = list(known)
    for name in got:
        meant = elsewhere.get(name) or nearest_name(name, known)
        raise TypeError(
            f"{function} has no argument {name!r}"
            + (f": did you mean {meant}?" if meant else ".")
            + f" Its arguments are {', '.join(known)}."
        )


def half_dtype() -> type[Any]:
    """Returns the 16-bit dtype that the default device computes in.

    It is bfloat16 on TPUs, CPUs, AMD GPUs, and NVIDIA GPUs of compute capability 8.0 or
    higher. It is float16 on older NVIDIA GPUs. The function asks the device at each
    call, never at import. (jmp 0.0.4 returned float16 on everything but TPUs.)

    Returns:
      ``jnp.bfloat16`` or ``jnp.float16``. Both also construct scalars.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.half_dtype() in (jnp.bfloat16, jnp.float16)
      True
    """
    return explain_half_dtype(default_device())[0]


class Device(Protocol):
    """A device of JAX."""

    @property
    def platform(self) -> str:
        """The kind of device, such as ``"gpu"``."""
        ...


def explain_half_dtype(device: Device) -> tuple[type[Any], str]:
    """Returns the half dtype of a device, and the reason in words."""
    if device.platform != "gpu":
        return jnp.bfloat16, f"{device.platform} devices compute in bfloat16"
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.split(".")[0]
    if not major.isdecimal():  # AMD names an architecture here: gfx90a, gfx942.
        return jnp.bfloat16, f"{capability or 'this'} GPU computes in bfloat16"
    if int(major) >= 8:
        return jnp.bfloat16, f"compute capability {capability} is at least 8.0"
    return jnp.float16, f"compute capability {capability} is below 8.0"


def default_device() -> Device:
    """Returns the default device of JAX."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default or jax.local_devices()[0]


def needs_loss_scale(dtype: DTypeLike) -> bool:
    """Whether a dtype has fewer exponents than float32, so that gradients can vanish.

    bfloat16 has float32's exponents. float16 and the float8 formats have fewer.
    """
    return jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp


# ------------------------------------------------------------------------- casting


def cast_tree(
    tree: Tree,
    dtype: DTypeLike,
    where: Callable[[Path, Leaf], bool] | None = None,
) -> Tree:
    """Casts the floating-point arrays of a pytree to a dtype.

    Args:
      tree: a pytree. Its floating-point leaves may be NumPy arrays and scalars, JAX
        arrays, tracers, or ``ShapeDtypeStruct`` objects, of any shape. Each leaf keeps
        its type. All other leaves are returned unchanged.
      dtype: a floating-point dtype or its name (``"bfloat16"``, ``"bf16"``,
        ``"half"``, ...). A number beyond a float8 dtype becomes infinity where the
        dtype has one, and else NaN (in ``float8_e4m3fn`` beyond 464):
        ``jmp_lite.formats.quantize`` has a scale.
      where: a function ``where(path, leaf) -> bool``. A leaf for which it returns False
        is not cast. ``path`` is a JAX key path: ``jax.tree_util.keystr(path)`` is its
        text. None casts every floating-point leaf.

    Returns:
      A pytree of the same structure and shapes.

    Raises:
      TypeError: a leaf consists of bytes without a dtype, as from ``np.load``.
      ValueError: ``dtype`` is unknown or not floating-point.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> params = {"dense": jnp.ones((2, 2)), "norm": jnp.ones(2), "step": 3}
      >>> low = jmp.cast_tree(params, "bfloat16")
      >>> low["dense"].dtype, low["norm"].dtype, low["step"]
      (dtype(bfloat16), dtype(bfloat16), 3)
      >>> def not_norm(path, leaf):
      ...     return "norm" not in jax.tree_util.keystr(path)
      >>> jmp.cast_tree(params, "bfloat16", where=not_norm)["norm"].dtype
      dtype('float32')
    """
    target = parse_dtype(dtype)
    refuse_raw_bytes(tree)

    def cast(path: Path, leaf: Leaf) -> Leaf:
        if not is_floating(leaf) or (where is not None and not where(path, leaf)):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=target, weak_type=False)
        return leaf.astype(target, copy=False)

    return jax.tree_util.tree_map_with_path(cast, tree)


def cast_to_full(tree: Tree) -> Tree:
    """Casts the floating-point arrays of a pytree to float32.

    Args:
      tree: a pytree, as for ``cast_tree``.

    Returns:
      A pytree of the same structure and shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> tree = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)}
      >>> full = jmp.cast_to_full(tree)
      >>> full["w"].dtype, full["n"].dtype
      (dtype('float32'), dtype('int32'))
    """
    return cast_tree(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Casts the floating-point arrays of a pytree to ``half_dtype()``.

    Args:
      tree: a pytree, as for ``cast_tree``.

    Returns:
      A pytree of the same structure and shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.cast_to_half(jnp.ones(2)).dtype == jmp.half_dtype()
      True
    """
    return cast_tree(tree, half_dtype())


def upcast_tree(tree: Tree) -> Tree:
    """Casts floating-point arrays of 16 bits or fewer to float32."""
    return cast_tree(
        tree, jnp.float32, where=lambda _, leaf: jnp.finfo(leaf.dtype).bits < 32
    )


def is_array(leaf: Leaf) -> TypeGuard[Array]:
    """Whether a leaf is an array or a ``ShapeDtypeStruct``. Python scalars are not."""
    return isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)


def type_of(leaf: Leaf) -> str:
    """Returns the dtype and the shape of an array as text: ``float32[2, 3]``."""
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf)


def place_of(path: Path) -> str:
    """Returns a key path as text, for messages."""
    return jax.tree_util.keystr(path) or "the root"


def refuse_raw_bytes(tree: PyTree) -> None:
    """Raises a TypeError for bytes without a dtype.

    ``np.load`` returns them for arrays that were saved in bfloat16 or float8.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_raw = isinstance(leaf, np.ndarray | np.generic) and (
            leaf.dtype.type is np.void and leaf.dtype.names is None
        )
        if is_raw:
            name = "bfloat16" if leaf.dtype.itemsize == 2 else "float8_e4m3fn"
            raise TypeError(
                f"Expected numbers, got bytes without a dtype ({type_of(leaf)}) at "
                f"{place_of(path)}. NumPy's files lose the names of bfloat16 and "
                "float8. Give the array the dtype that it was saved in: "
                f"array.view(ml_dtypes.{name})."
            )


def is_traceable(leaf: Leaf) -> bool:
    """Whether a leaf is an array that JAX can compute with. Arrays of text are not."""
    if isinstance(leaf, jax.Array):
        return True
    if not is_array(leaf):
        return False
    # ``extended`` are keys, also those of a ShapeDtypeStruct.
    kinds = jnp.number, np.bool_, jax.dtypes.extended
    return any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def is_floating(leaf: Leaf) -> TypeGuard[Array]:
    """Whether a leaf is a real floating-point array, or the shape of one."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_number(leaf: Leaf, kind: DTypeLike = jnp.number) -> bool:
    """Whether a leaf is an array or a Python scalar with numbers of a kind.

    PRNG keys, booleans, ``float0`` arrays and ``ShapeDtypeStruct`` objects are not.
    """
    if isinstance(leaf, int | float | complex):
        return jnp.issubdtype(type(leaf), kind)
    return (
        is_array(leaf)
        and not isinstance(leaf, jax.ShapeDtypeStruct)
        and jnp.issubdtype(leaf.dtype, kind)
    )


def is_16_bit(leaf: Leaf) -> TypeGuard[Array]:
    """Whether a leaf is a real floating-point array of 16 bits."""
    return is_floating(leaf) and leaf.dtype.itemsize == 2


def is_inexact(leaf: Leaf) -> bool:
    """Whether a leaf is an array or a Python scalar of real or complex floats."""
    return is_number(leaf, jnp.inexact)


# ----------------------------------------------------------------------- policies


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
    **dict.fromkeys(("p", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
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
    parts: dict[str, Dtype] = {}
    for part in spelled.split(","):
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
    param = parts.get("param_dtype", np.dtype(np.float32))
    compute = parts.get("compute_dtype", param)
    return Policy(param, compute, parts.get("output_dtype", compute))


def _parse_part(value: str, text: str) -> Dtype:
    try:
        return parse_dtype(value.strip())
    except ValueError as error:
        raise _name_policy(error, text) from None


def _name_policy(error: ValueError, text: str) -> ValueError:
    return ValueError(f"{error} (In the policy {text!r}.)")


# ---------------------------------------------------------------------- summaries


class DtypeTotals(NamedTuple):
    """The totals of one dtype in a pytree.

    Attributes:
      leaves: the number of arrays.
      elements: the number of their elements.
      bytes: their size in bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> jmp.dtype_summary(jnp.ones((2, 3)))["float32"]
      DtypeTotals(leaves=1, elements=6, bytes=24)
    """

    leaves: int
    elements: int
    bytes: int


class DtypeSummary(dict[str, DtypeTotals]):
    """A mapping from the name of a dtype to its ``DtypeTotals``; prints as a table.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> summary = jmp.dtype_summary({"w": jnp.ones(2), "n": jnp.arange(3)})
      >>> list(summary), summary.total.bytes
      (['int32', 'float32'], 20)
    """

    @property
    def total(self) -> DtypeTotals:
        """The totals over all dtypes, as ``DtypeTotals``."""
        return _sum_totals(self.values())

    def __str__(self) -> str:
        rows = [*self.items(), ("total", self.total)]
        lines = [f"{'dtype':<14} {'leaves':>8} {'elements':>16} {'bytes':>16}"]
        lines += [
            f"{name:<14} {t.leaves:>8,} {t.elements:>16,} {t.bytes:>16,}"
            for name, t in rows
        ]
        return "\n".join(lines)

    __repr__ = __str__


def dtype_summary(tree: PyTree) -> DtypeSummary:
    """Counts the arrays of a pytree by dtype.

    Args:
      tree: a pytree. Arrays, tracers and ``ShapeDtypeStruct`` objects of every dtype
        count, PRNG keys too. Other leaves are ignored.

    Returns:
      A ``DtypeSummary``: the totals by the name of the dtype, the most bytes first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> tree = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4), "n": 0}
      >>> summary = jmp.dtype_summary(tree)
      >>> summary["bfloat16"].bytes, summary.total.elements
      (32, 20)
      >>> print(summary)
      dtype            leaves         elements            bytes
      bfloat16              1               16               32
      float32               1                4               16
      total                 2               20               48
    """
    totals: dict[str, DtypeTotals] = {}
    for leaf in filter(is_array, jax.tree.leaves(tree)):
        name, size = str(leaf.dtype), math.prod(leaf.shape)
        one = DtypeTotals(1, size, size * leaf.dtype.itemsize)
        totals[name] = _sum_totals([totals[name], one]) if name in totals else one
    return DtypeSummary(
        sorted(totals.items(), key=lambda item: (-item[1].bytes, item[0]))
    )


def _sum_totals(totals: Iterable[DtypeTotals]) -> DtypeTotals:
    return DtypeTotals(*map(sum, zip((0, 0, 0), *totals, strict=True)))
