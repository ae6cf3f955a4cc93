"""Plots of numbers with matplotlib, which only this module imports.

Each function draws a report on the host, and returns the figure.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jmp_lite.casting.dtypes import is_floating, parse_dtype
from jmp_lite.casting.quantize import scale_for
from jmp_lite.casting.types import Path, PyTree

__all__ = ["magnitudes"]

DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_MARGIN = 24
"""Powers of two that the plot shows beyond the numbers: more than float8 has."""


def magnitudes(tree: PyTree, dtypes: Sequence[DTypeLike] = DTYPES) -> Figure:
    """Plots how large the numbers of a pytree are, and the ranges of dtypes.

    The upper plot has one row for each array: the darker a cell, the more numbers of
    the array have that size. The lower plot has one bar for each dtype: wide where the
    dtype has all its digits, thin where it has fewer (subnormal numbers).

    Float8 products divide each array by a scale before they round it, so 8-bit formats
    are drawn with scales. A mark in the row of an array shows the smallest number that
    keeps all its digits under the scale of that array. The bar of the lower plot is
    that of the array with the largest number.

    Args:
      tree: gradients, activations or parameters: concrete arrays. Real floating-point
        arrays are drawn.
      dtypes: the floating-point dtypes to draw.

    Returns:
      A figure. Save it with ``figure.savefig("gradients.png")``.

    Raises:
      ValueError: no number is finite and nonzero, or a dtype is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite.plots
      >>> grads = {"w": jnp.array([1e-9, 1.0]), "b": jnp.zeros(2)}
      >>> figure = jmp_lite.plots.magnitudes(grads)
      >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
      ['b: 100% zero', 'w']
      >>> [label.get_text() for label in figure.axes[1].get_yticklabels()][1:3]
      ['bfloat16', 'float8_e4m3fn, scaled']
    """
    named = {np.dtype(d).name: jnp.finfo(d) for d in map(parse_dtype, dtypes)}
    sizes = {
        _name(path): np.abs(np.asarray(leaf, np.float64)).ravel()
        for path, leaf in jax.tree.leaves_with_path(jax.device_get(tree))
        if is_floating(leaf) and leaf.size
    }
    exponents = {
        name: np.log2(array[np.isfinite(array) & (array > 0)])
        for name, array in sizes.items()
    }
    found = np.concatenate([np.zeros(0), *exponents.values()])
    if not found.size:
        raise ValueError(
            "Expected a number that is finite and nonzero, got none in the pytree."
        )
    edges = np.arange(math.floor(found.min()), math.floor(found.max()) + 2)
    counts = [np.histogram(array, edges)[0] for array in exponents.values()]
    shares = np.array(
        [row / array.size for row, array in zip(counts, sizes.values(), strict=True)]
    )

    n_rows, n_dtypes = len(sizes), len(named)
    size = (9, 2 + 0.22 * n_rows + 0.3 * n_dtypes)
    figure = Figure(figsize=size, layout="constrained")
    upper, lower = figure.subplots(
        2, 1, sharex=True, height_ratios=(0.22 * n_rows + 0.3, 0.3 * n_dtypes + 0.3)
    )
    rows = np.arange(n_rows + 1) - 0.5
    mesh = upper.pcolormesh(edges, rows, shares, cmap="Greys", vmin=0)
    figure.colorbar(mesh, ax=upper, label="share of the numbers")
    upper.set_yticks(range(n_rows), [_label(*item) for item in sizes.items()])
    upper.invert_yaxis()

    largest = {
        i: float(np.exp2(row.max()))
        for i, row in enumerate(exponents.values())
        if row.size
    }
    scaled = {name: info for name, info in named.items() if info.bits == 8}
    for (name, info), style in zip(scaled.items(), itertools.cycle(_STYLES)):
        scales = np.array([_scale(size, name) for size in largest.values()])
        normal, at = np.log2(scales * float(info.tiny)), np.array(list(largest))
        upper.vlines(normal, at - 0.5, at + 0.5, "tab:red", style, label=name)
    if scaled:
        upper.legend(
            title="all digits from", fontsize="small", loc="lower left", ncols=2
        ).set_bbox_to_anchor((0, 1))

    _draw_ranges(lower, named, max(largest.values()))
    lower.set_xlim(edges[0] - _MARGIN, edges[-1] + _MARGIN)
    for axes in (upper, lower):
        axes.grid(axis="x", alpha=0.3)
    return figure


_STYLES = ("-", ":", "--", "-.")


def _draw_ranges(axes: Axes, dtypes: Mapping[str, np.finfo], largest: float) -> None:
    """Draws a bar for the range of each dtype; that of 8 bits has a scale.

    Args:
      axes: the axes to draw on.
      dtypes: what ``jax.numpy.finfo`` returns for each dtype.
      largest: the largest number that the scale of an 8-bit dtype has to reach.
    """
    labels: list[str] = []
    for i, (name, info) in enumerate(dtypes.items()):
        is_scaled = info.bits == 8
        scale = _scale(largest, name) if is_scaled else 1.0
        smallest, normal, end = (
            math.log2(scale * float(end))
            for end in (info.smallest_subnormal, info.tiny, info.max)
        )
        axes.plot((smallest, normal), (i, i), color="black", lw=2)
        axes.plot((normal, end), (i, i), color="black", lw=8, solid_capstyle="butt")
        labels.append(f"{name}, scaled" if is_scaled else name)
    axes.set_yticks(range(len(labels)), labels)
    axes.set(ylim=(len(labels) - 0.5, -0.5), xlabel="log2 of the size")


def _scale(largest: float, dtype: str) -> float:
    # No scale exceeds that of the largest float32.
    end = float(jnp.finfo(jnp.float32).max)
    with jax.ensure_compile_time_eval():
        return float(scale_for(jnp.float32(min(largest, end)), dtype))


def _name(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "all"


def _label(name: str, array: np.ndarray) -> str:
    """Returns the name of an array with the shares that the plot cannot show."""
    is_hidden = {"zero": array == 0, "not finite": ~np.isfinite(array)}
    texts = [f"{h.mean():.0%} {what}" for what, h in is_hidden.items() if h.any()]
    return f"{name}: {', '.join(texts)}" if texts else name
