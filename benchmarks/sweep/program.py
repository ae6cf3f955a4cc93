"""What a program of the sweep is, and the products by which it runs by hand."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


class Products(NamedTuple):
    """Matrix products and convolutions of a program.

    Attributes:
      dtype: the dtype of the operands and of the result, which is cast back; None
        leaves the products as they are. The sum inside is in float32.
    """

    dtype: DTypeLike | None = None

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns ``a @ b``."""
        return self._run(jnp.matmul, a, b)

    def einsum(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns ``einsum(spec, a, b)``."""
        return self._run(lambda a, b: jnp.einsum(spec, a, b), a, b)

    def conv(
        self,
        x: jax.Array,
        w: jax.Array,
        stride: int = 1,
        padding: str = "SAME",
        groups: int = 1,
        dilation: int = 1,
    ) -> jax.Array:
        """Returns a convolution.

        Args:
          x: ``[batch, width, channels]`` or ``[batch, height, width, channels]``.
          w: ``[width, in, out]`` or ``[height, width, in, out]``.
          stride: of the window.
          padding: ``"SAME"`` or ``"VALID"``.
          groups: of the channels.
          dilation: of the kernel.
        """
        n = x.ndim - 2
        numbers = ("NWC", "WIO", "NWC") if n == 1 else ("NHWC", "HWIO", "NHWC")

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x,
                w,
                (stride,) * n,
                padding,
                rhs_dilation=(dilation,) * n,
                dimension_numbers=numbers,
                feature_group_count=groups,
            )

        return self._run(run, x, w)

    def _run(self, fun: Callable[..., Any], a: jax.Array, b: jax.Array) -> jax.Array:
        if self.dtype is None:
            return fun(a, b)
        return fun(a.astype(self.dtype), b.astype(self.dtype)).astype(a.dtype)


class Random:
    """Makes synthetic numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Returns normal numbers."""
        return np.float32(scale * self._rng.standard_normal(shape))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Returns numbers between two bounds."""
        return np.float32(self._rng.uniform(low, high, shape))

    def integers(self, n: int, *shape: int) -> np.ndarray:
        """Returns integers below ``n``."""
        return np.int32(self._rng.integers(0, n, shape))

    def kernel(self, *shape: int) -> np.ndarray:
        """Returns a weight whose last axis is that of the outputs."""
        return self.normal(*shape, scale=float(np.prod(shape[:-1])) ** -0.5)

    def layers(self, *sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns weights and small biases of dense layers."""
        return [
            (self.kernel(n, m), self.normal(m, scale=0.1))
            for n, m in itertools.pairwise(sizes)
        ]


class Program(NamedTuple):
    """A program in float32.

    Attributes:
      loss: a function of ``products``, ``params`` and ``data`` that returns a number.
      make: a function of ``Random`` that returns ``params`` and ``data``.
    """

    loss: Callable[[Products, Any, Any], jax.Array]
    make: Callable[[Random], tuple[Any, Any]]


class Entry(NamedTuple):
    """A program and its name."""

    name: str
    program: Callable[[], Program]


# ----------------------------------------------------------------------------- parts


def dense(p: Products, layer: Sequence[Any], x: jax.Array) -> jax.Array:
    """Returns ``x @ w + b``."""
    w, b = layer
    return p.dot(x, w) + b


def mlp(
    p: Products,
    layers: Sequence[Any],
    x: jax.Array,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
) -> jax.Array:
    """Returns dense layers of ``x``, with an activation between two."""
    for layer in layers[:-1]:
        x = activation(dense(p, layer, x))
    return dense(p, layers[-1], x)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors of length one along the last axis."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def layer_norm(x: jax.Array) -> jax.Array:
    """Returns ``x`` with mean zero and variance one along the last axis."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy of integer labels."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))


def normal_log_prob(x: jax.Array, mean: Any, log_std: Any) -> jax.Array:
    """Returns log densities of normal distributions."""
    z = (x - mean) * jnp.exp(-log_std)
    return -0.5 * z * z - log_std - 0.5 * np.log(2 * np.pi)
