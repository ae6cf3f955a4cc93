"""Names and ranges of floating dtypes, and casts of pytrees.

Only floating-point arrays change their dtype. Integers, booleans, PRNG keys, complex
numbers, Python scalars, ``None`` and arbitrary objects pass through.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Tree = TypeVar("Tree")
KeyPath = tuple[Any, ...]

_SHORT_NAMES = {
    "bfloat16": ("bf16", "bfloat16"),
    "float16": ("f16", "float16"),
    "float32": ("full", "f32", "float32"),
    "float64": ("f64", "float64"),
}

dtype_to_names: Mapping[Any, tuple[str, ...]] = MappingProxyType(
    {
        np.dtype(getattr(jnp, name)).type: _SHORT_NAMES.get(name, (name,))
        for name in (*_SHORT_NAMES, *filter(re.compile("float[48]_").match, dir(jnp)))
    }
)
"""JAX's floating dtypes and the names of each, the one ``str(policy)`` prints first."""

_NAME_TO_DTYPE = {
    name: np.dtype(dtype) for dtype, names in dtype_to_names.items() for name in names
}

# ----------------------------------------------------------------- names and dtypes


def parse_dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    """Returns the floating dtype that a name or a dtype-like object stands for.

    Args:
      dtype: a name of ``dtype_to_names``, ``"half"`` (``half_dtype()``, asked of the
        device now), a ``np.dtype``, or a scalar type such as ``jnp.bfloat16``.

    Raises:
      ValueError: the name is unknown, or the dtype is not a floating one.
    """
    if isinstance(dtype, str):
        if dtype == "half":
            return np.dtype(half_dtype())
        if dtype not in _NAME_TO_DTYPE:
            raise unknown_name("dtype", dtype, [*_NAME_TO_DTYPE, "half"])
        return _NAME_TO_DTYPE[dtype]
    # Not whatever NumPy takes for a dtype: it reads None as float64, and more.
    parsed = np.dtype(dtype).type if isinstance(dtype, type | np.dtype) else None
    if parsed not in dtype_to_names:
        raise ValueError(
            f"Expected a floating dtype or the name of one, got {dtype!r}."
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
    """Returns an error that names the word nearest to ``got`` and the accepted ones."""
    accepted = list(accepted)
    near = nearest_name(got, accepted)
    hint = f" Did you mean {near!r}?" if near else ""
    return ValueError(
        f"Unknown {kind} {got!r}.{hint} Expected one of {', '.join(accepted)}."
    )


def nearest_name(got: str, accepted: Sequence[str]) -> str | None:
    """Returns the accepted word that was probably meant: ``"tanh"`` for ``"tahn"``."""
    letters = sorted(got.lower())
    swapped = [name for name in accepted if sorted(name.lower()) == letters]
    near = swapped or difflib.get_close_matches(got, accepted, n=1, cutoff=0.5)
    return near[0] if near else None


def half_dtype() -> Any:
    """Returns the 16-bit dtype that the default device computes in.

    bfloat16 on TPUs, on CPUs, on AMD GPUs and on NVIDIA GPUs of compute capability 8.0
    and above; float16 on older NVIDIA GPUs. The device is asked when this is called,
    never at import. (jmp 0.0.4 returned float16 everywhere but on TPUs.)

    Returns:
      ``jnp.bfloat16`` or ``jnp.float16``, which are also constructors of scalars.

    Example:
      >>> half_dtype() in (jnp.bfloat16, jnp.float16)
      True
    """
    return explain_half_dtype(_default_device())[0]


def explain_half_dtype(device: Any) -> tuple[Any, str]:
    """Returns the half dtype of a device and, in words, why it is that one."""
    if device.platform != "gpu":
        return jnp.bfloat16, f"{device.platform} devices compute in bfloat16"
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.split(".")[0]
    if not major.isdecimal():  # AMD names an architecture here: gfx90a, gfx942.
        return jnp.bfloat16, f"{capability or 'this'} GPU computes in bfloat16"
    if int(major) >= 8:
        return jnp.bfloat16, f"compute capability {capability} is at least 8.0"
    return jnp.float16, f"compute capability {capability} is below 8.0"


def _default_device() -> Any:
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default or jax.local_devices()[0]


def needs_loss_scale(dtype: DTypeLike) -> bool:
    """Whether gradients in ``dtype`` vanish that float32 could hold.

    bfloat16 has float32's exponents, float16 and the float8 formats have fewer.
    """
    return jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp


# ------------------------------------------------------------------------- casting


def cast_tree(
    tree: Tree,
    dtype: DTypeLike,
    where: Callable[[KeyPath, Any], bool] | None = None,
) -> Tree:
    """Casts the floating-point arrays of a pytree.

    Args:
      tree: a pytree of any shape. Its floating leaves may be NumPy arrays and scalars,
        JAX arrays, tracers and ``ShapeDtypeStruct`` objects, each of which stays what
        it is. All other leaves are returned as they are.
      dtype: a floating dtype or its name (``"bfloat16"``, ``"bf16"``, ``"half"``, ...).
      where: ``where(path, leaf) -> bool`` is asked for every floating leaf and keeps it
        out of the cast where it answers False. ``path`` is a JAX key path, for
        ``jax.tree_util.keystr``.

    Returns:
      A pytree of the same structure and shapes.

    Raises:
      ValueError: ``dtype`` is unknown or not floating.

    Example:
      >>> params = {"dense": jnp.ones((2, 2)), "norm": jnp.ones(2), "step": 3}
      >>> low = cast_tree(params, "bfloat16")
      >>> low["dense"].dtype, low["norm"].dtype, low["step"]
      (dtype(bfloat16), dtype(bfloat16), 3)
      >>> def not_norm(path, leaf):
      ...     return "norm" not in jax.tree_util.keystr(path)
      >>> cast_tree(params, "bfloat16", where=not_norm)["norm"].dtype
      dtype('float32')
    """
    target = parse_dtype(dtype)

    def cast(path: KeyPath, leaf: Any) -> Any:
        wanted = is_floating(leaf) and (where is None or where(path, leaf))
        return _cast_leaf(leaf, target) if wanted else leaf

    return jax.tree_util.tree_map_with_path(cast, tree)


def cast_to_full(tree: Tree) -> Tree:
    """Casts the floating-point arrays of a pytree to float32.

    Example:
      >>> cast_to_full({"w": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2)})["w"].dtype
      dtype('float32')
    """
    return cast_tree(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Casts the floating-point arrays of a pytree to ``half_dtype()``.

    Example:
      >>> cast_to_half(jnp.ones(2)).dtype == half_dtype()
      True
    """
    return cast_tree(tree, half_dtype())


def upcast_tree(tree: Tree) -> Tree:
    """Casts the arrays of 16 bits and fewer to float32 and leaves wider ones alone."""

    def upcast(leaf: Any) -> Any:
        narrow = is_floating(leaf) and jnp.finfo(leaf.dtype).bits < 32
        return _cast_leaf(leaf, np.dtype(np.float32)) if narrow else leaf

    return jax.tree.map(upcast, tree)


def is_array(leaf: Any) -> TypeGuard[Any]:
    """Whether a leaf is an array or the shape of one (Python scalars are neither)."""
    return isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)


def is_traceable(leaf: Any) -> bool:
    """Whether a leaf is an array that JAX can compute with: not one of text."""
    if not is_array(leaf) or isinstance(leaf, jax.Array):
        return is_array(leaf)
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_


def is_floating(leaf: Any) -> TypeGuard[Any]:
    """Whether a leaf is an array of real floating-point numbers, or its shape."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_number(leaf: Any, kind: Any = jnp.number) -> TypeGuard[Any]:
    """Whether a leaf holds numbers of a kind: an array, or a Python scalar.

    PRNG keys, booleans, ``float0`` and mere shapes are no numbers.
    """
    if isinstance(leaf, int | float | complex):
        return jnp.issubdtype(type(leaf), kind)
    return (
        is_array(leaf)
        and not isinstance(leaf, jax.ShapeDtypeStruct)
        and jnp.issubdtype(leaf.dtype, kind)
    )


def is_16_bit(leaf: Any) -> TypeGuard[Any]:
    """Whether a leaf is an array of real floats of 16 bits."""
    return is_floating(leaf) and leaf.dtype.itemsize == 2


def is_inexact(leaf: Any) -> TypeGuard[Any]:
    """Whether a leaf holds real or complex numbers: an array, or a Python scalar."""
    return is_number(leaf, jnp.inexact)


def _cast_leaf(leaf: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    if isinstance(leaf, jax.Array):
        return leaf.astype(dtype)
    return leaf.astype(dtype, copy=False)


# --------------------------------------------------------------------- what is where


class DtypeTotals(NamedTuple):
    """How much of a pytree has one dtype: ``leaves``, ``elements`` and ``bytes``.

    Example:
      >>> dtype_summary(jnp.ones((2, 3)))["float32"]
      DtypeTotals(leaves=1, elements=6, bytes=24)
    """

    leaves: int
    elements: int
    bytes: int


class DtypeSummary(dict[str, DtypeTotals]):
    """A mapping from a dtype's name to its ``DtypeTotals``; prints as a table.

    Example:
      >>> dtype_summary({"w": jnp.ones(2), "n": jnp.arange(3)}).total.bytes
      20
    """

    @property
    def total(self) -> DtypeTotals:
        """The sums over all dtypes."""
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


def dtype_summary(tree: Any) -> DtypeSummary:
    """Counts the arrays of a pytree by dtype.

    Args:
      tree: a pytree; arrays, tracers and ``ShapeDtypeStruct`` objects count, whatever
        their dtype (PRNG keys too), and all else is passed over.

    Returns:
      Totals by name of the dtype, most bytes first.

    Example:
      >>> tree = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones(4), "n": 0}
      >>> summary = dtype_summary(tree)
      >>> summary["bfloat16"].bytes, summary.total.elements
      (32, 20)
      >>> print(summary)
      dtype            leaves         elements            bytes
      bfloat16              1               16               32
      float32               1                4               16
      total                 2               20               48
    """
    found: dict[str, list[DtypeTotals]] = {}
    for leaf in filter(is_array, jax.tree.leaves(tree)):
        size = math.prod(leaf.shape)
        one = DtypeTotals(1, size, size * leaf.dtype.itemsize)
        found.setdefault(str(leaf.dtype), []).append(one)
    totals = {name: _sum_totals(parts) for name, parts in found.items()}
    return DtypeSummary(
        sorted(totals.items(), key=lambda item: (-item[1].bytes, item[0]))
    )


def _sum_totals(totals: Iterable[DtypeTotals]) -> DtypeTotals:
    leaves, elements, n_bytes = (
        sum(column) for column in zip((0, 0, 0), *totals, strict=True)
    )
    return DtypeTotals(leaves, elements, n_bytes)
