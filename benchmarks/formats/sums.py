"""How an H100 adds float8 products up, emulated bit for bit.

The public package mmaemu computes what cuBLAS's kernels of an H100 PCIe compute, which
its author compared with one. It needs PyTorch, so it is a dependency group of its own:

    pip install --group sums
    python -m benchmarks.formats.sums --json benchmarks/results
"""

import argparse
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.report import stamp, write

E4M3 = jnp.float8_e4m3fn


class Sums(NamedTuple):
    """The error of products in float8.

    Attributes:
      operands: what is multiplied.
      terms: how many products a result adds up.
      mean: the mean of these products over their root mean square.
      rounding: the error by the rounding of operands to float8, relative by norms.
      fast: the error by fast sums, relative to exact ones of the same operands.
      promoted: that by promoted sums.
      too_small: by how much fast sums are nearer to zero than exact ones, on average.
    """

    operands: str
    terms: int
    mean: float
    rounding: float
    fast: float
    promoted: float
    too_small: float


def measure(operands: str, lhs: np.ndarray, rhs: np.ndarray) -> Sums:
    """Returns the errors of a product of matrices."""
    lhs, rhs = (_in_range(each.astype(np.float64)) for each in (lhs, rhs))
    numbers = [each.astype(E4M3).astype(np.float64) for each in (lhs, rhs)]
    exact, rounded = lhs @ rhs, numbers[0] @ numbers[1]
    fast, promoted = (_on_an_h100(*numbers, is_fast=fast) for fast in (True, False))
    products = lhs[:, :, None] * rhs[None]
    return Sums(
        operands,
        lhs.shape[1],
        float(np.abs(products.mean()) / np.sqrt((products**2).mean())),
        _error(rounded, exact),
        _error(fast, rounded),
        _error(promoted, rounded),
        float(1 - np.abs(fast).sum() / np.abs(rounded).sum()),
    )


def _in_range(array: np.ndarray) -> np.ndarray:
    """Returns an array times a power of two that brings it into e4m3's range."""
    return array * 2.0 ** np.floor(np.log2(448 / np.abs(array).max()))


def _on_an_h100(lhs: np.ndarray, rhs: np.ndarray, *, is_fast: bool) -> np.ndarray:
    import mmaemu
    import torch

    one = torch.ones(())
    codes = [
        torch.tensor(np.ascontiguousarray(each)).to(torch.float8_e4m3fn)
        for each in (lhs, rhs.T)
    ]
    left, right = codes
    result = mmaemu.scaled_mm(
        left,
        right.t(),
        one,
        one,
        out_dtype=torch.float32,
        use_fast_accum=is_fast,
        profile="hopper",
        splitk=1,
    )
    return result.double().numpy()


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
}


def operands_of_a_layer(
    activation: Callable[[Any], Any], steps: int, width: int = 4096
) -> tuple[np.ndarray, np.ndarray]:
    """Trains a network of two hidden layers, and returns the second one's operands.

    Args:
      activation: of both layers.
      steps: how many of Adam.
      width: of both layers.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(128, 64)), jnp.float32)
    y = jnp.sin(3 * x[:, :8])
    sizes = (64, width, width, 8)
    params = [
        jnp.asarray(rng.normal(size=pair) / np.sqrt(pair[0]), jnp.float32)
        for pair in itertools.pairwise(sizes)
    ]

    def hidden(params: Any) -> Any:
        return activation(x @ params[0])

    def loss(params: Any) -> Any:
        second = activation(hidden(params) @ params[1])
        return jnp.mean((second @ params[2] - y) ** 2)

    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return np.asarray(hidden(params))[:32], np.asarray(params[1])[:, :64]


def measure_all(terms: Sequence[int], steps: int) -> list[Sums]:
    """Measures random products, and layers before and after training."""
    rng = np.random.default_rng(0)
    kinds: Mapping[str, Callable[[tuple[int, int]], np.ndarray]] = {
        "uniform, 0 to 1": rng.random,
        "normal": rng.standard_normal,
    }
    rows = [
        measure(name, draw((16, n)), draw((n, 16)))
        for name, draw in kinds.items()
        for n in terms
    ]
    for name, activation in ACTIVATIONS.items():
        for n in (0, steps):
            what = f"{name}, {n} steps"
            rows.append(measure(what, *operands_of_a_layer(activation, n)))
    return rows


def sums_table(rows: Sequence[Sums]) -> str:
    """Returns errors as text, in percent."""
    lines = [
        f"{'errors in percent':20}{'terms':>7}{'K mean / rms':>14}{'rounding':>10}"
        f"{'fast':>8}{'promoted':>10}{'too small':>11}"
    ]
    for row in rows:
        errors = row.rounding, row.fast, row.promoted, row.too_small
        cells = (
            f"{100 * error:>{width}.2f}"
            for error, width in zip(errors, (10, 8, 10, 11), strict=True)
        )
        lines.append(
            f"{row.operands:20}{row.terms:>7}{row.terms * row.mean:>14.0f}"
            + "".join(cells)
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and writes it as JSON on request."""
    parser = argparse.ArgumentParser("python -m benchmarks.formats.sums")
    lengths = [1024, 4096, 16384, 65536]
    parser.add_argument("--terms", nargs="*", type=int, default=lengths)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # For optax's adam.
    rows = measure_all(options.terms, options.steps)
    print(sums_table(rows))
    write(options.json, "sums", stamp(), sums=rows)


if __name__ == "__main__":
    main()
