"""The models that are measured, each with a twin whose precision is written by hand.

A model is made with ``dtype=None`` (as its author would write it, in float32) or with a
16-bit dtype (Flax's own ``dtype=``, casts where a careful author puts them). Parameters
are float32 in both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


class Model(NamedTuple):
    """A loss to differentiate, and the shapes of its arguments.

    Attributes:
      loss: from parameters and a batch to a scalar.
      params: the shapes of the parameters.
      batch: the shapes of the batch.
    """

    loss: Callable[..., Any]
    params: Any
    batch: Any


def shapes_of(init: Callable[..., Any], *args: Any) -> Any:
    """Returns the shapes of what ``init`` makes of a key and arguments."""
    return jax.eval_shape(lambda: init(jax.random.key(0), *args))


def cast_low(x: Any, dtype: Any) -> Any:
    """Returns ``x`` in a dtype, or as it is where that is None."""
    return x if dtype is None else x.astype(dtype)


# ----------------------------------------------------------------------- transformers


class Block(nn.Module):
    """A pre-norm transformer block, causal, without dropout."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        options: dict[str, Any] = {"dtype": self.dtype}
        batch, length, width = x.shape
        h = nn.LayerNorm(**options)(x)
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            nn.Dense(width, name=name, **options)(h).reshape(split) for name in "qkv"
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / split[-1] ** 0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + nn.Dense(width, name="o", **options)(h.reshape(x.shape))
        h = nn.LayerNorm(**options)(x)
        h = nn.gelu(nn.Dense(4 * width, name="up", **options)(h))
        return x + nn.Dense(width, name="down", **options)(h)


LAYOUTS = ("unrolled", "jit", "scan", "remat", "scan + remat")


def transformer(
    dtype: Any = None,
    layout: str = "unrolled",
    depth: int = 4,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50304,
    batch: tuple[int, int] = (16, 1024),
    wrap: Callable[..., Any] = lambda block: block,
    ahead: int = 0,
    loss: Callable[[Any, Any], Any] | None = None,
    mean: bool = True,
) -> Model:
    """Returns a language model.

    Args:
      dtype: the dtype that its precision is written in by hand; None for float32.
      layout: one of ``LAYOUTS``.
      depth: how many blocks it has.
      width: of the blocks.
      heads: how many of them share the width.
      vocabulary: how many tokens there are.
      batch: sequences, and the length of each.
      wrap: put around each block.
      ahead: how many places after a token the one stands that it predicts. What is
        compiled alone predicts the token itself, which costs the same.
      loss: from float32 logits and labels to the loss of each token; by default the
        logits' logsumexp without the label's.
      mean: whether the mean of all tokens is returned.
    """
    of_logits = loss or _cross_entropy
    block = Block(heads, dtype)
    norm = nn.LayerNorm(dtype=dtype)
    x = jax.ShapeDtypeStruct((*batch, width), jnp.float32)

    def init(key: Any) -> Any:
        embed, head, *keys = jax.random.split(key, depth + 2)
        blocks = [block.init(k, jnp.zeros(x.shape)) for k in keys]
        if "scan" in layout:
            blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        normal = jax.random.normal
        return {
            "embed": normal(embed, (vocabulary, width)) * 0.02,
            "positions": normal(embed, (batch[1], width)) * 0.02,
            "blocks": blocks,
            "norm": norm.init(head, jnp.zeros(x.shape)),
            "head": normal(head, (width, vocabulary)) * 0.02,
        }

    apply = wrap(lambda p, x: block.apply(p, x))
    if "jit" in layout:
        apply = jax.jit(apply)
    if "remat" in layout:
        apply = jax.checkpoint(apply)

    def of_tokens(params: Any, tokens: Any) -> Any:
        given, labels = (
            (tokens[:, :-ahead], tokens[:, ahead:]) if ahead else [tokens] * 2
        )
        x = params["embed"][given] + params["positions"]
        x = cast_low(x, dtype)
        if "scan" in layout:
            x, _ = lax.scan(lambda x, p: (apply(p, x), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = apply(p, x)
        x = norm.apply(params["norm"], x)
        with jax.named_scope("head"):
            logits = cast_low(x, dtype) @ cast_low(params["head"], dtype)
        losses = of_logits(logits.astype(jnp.float32), labels)
        return jnp.mean(losses) if mean else losses

    tokens = jax.ShapeDtypeStruct((batch[0], batch[1] + ahead), jnp.int32)
    return Model(of_tokens, shapes_of(init), tokens)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


# ------------------------------------------------------------------------ other kinds


class ResNet(nn.Module):
    """A small residual network with BatchNorm, for small images."""

    dtype: Any = None
    widths: tuple[int, ...] = (64, 128, 256)
    momentum: float = 0.99

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        """Returns logits."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=self.momentum,
            dtype=self.dtype,
        )
        x = nn.relu(norm()(conv(self.widths[0], (3, 3))(x)))
        for i, width in enumerate(self.widths):
            for j in range(2):
                strides = (2, 2) if i and not j else (1, 1)
                h = nn.relu(norm()(conv(width, (3, 3), strides)(x)))
                h = norm()(conv(width, (3, 3))(h))
                if x.shape != h.shape:
                    x = norm()(conv(width, (1, 1), strides)(x))
                x = nn.relu(x + h)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


def resnet(dtype: Any = None, batch: int = 256) -> Model:
    """Returns an image classifier; its batch statistics are computed and dropped."""
    return _classifier(ResNet(dtype), batch, 32)


def _classifier(module: nn.Module, batch: int, size: int) -> Model:
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def loss(variables: Any, batch: Any) -> Any:
        images, labels = batch
        logits, _ = module.apply(variables, images, mutable=["batch_stats"])
        logits = logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[:, None], -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen[:, 0])

    return Model(
        loss, shapes_of(module.init, jnp.zeros(images.shape)), (images, labels)
    )


class Bottleneck(nn.Module):
    """A block of a deep residual network."""

    width: int
    strides: tuple[int, int] = (1, 1)
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns activations of four times the width."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=False, dtype=self.dtype
        )
        h = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        h = nn.relu(norm()(conv(self.width, (3, 3), self.strides)(h)))
        h = norm()(conv(4 * self.width, (1, 1))(h))
        if x.shape != h.shape:
            x = norm()(conv(4 * self.width, (1, 1), self.strides)(x))
        return nn.relu(x + h)


class ResNet50(nn.Module):
    """A deep residual network for large images, as He et al. (2015) made it."""

    dtype: Any = None
    width: int = 64
    stages: tuple[int, ...] = (3, 4, 6, 3)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns logits."""
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                strides = (2, 2) if i and not j else (1, 1)
                x = Bottleneck(self.width * 2**i, strides, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def resnet50(
    dtype: Any = None,
    batch: int = 256,
    size: int = 224,
    width: int = 64,
    stages: tuple[int, ...] = (3, 4, 6, 3),
) -> Model:
    """Returns an image classifier; its batch statistics are computed and dropped."""
    return _classifier(ResNet50(dtype, width, stages), batch, size)


def lstm(
    dtype: Any = None, width: int = 1024, batch: tuple[int, int] = (64, 256)
) -> Model:
    """Returns an LSTM over a sequence; by hand its cell alone is float32."""
    x = jax.ShapeDtypeStruct((*batch, width), jnp.float32)

    def init(key: Any) -> Any:
        keys = jax.random.split(key)
        shape = (width, 4 * width)
        w, u = (jax.random.normal(k, shape) / width**0.5 for k in keys)
        return {"w": w, "u": u, "b": jnp.zeros(4 * width)}

    def loss(params: Any, x: Any) -> Any:
        low = jax.tree.map(lambda p: cast_low(p, dtype), params)

        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            gates = cast_low(x, dtype) @ low["w"] + h @ low["u"] + low["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            i, f, g, o = (
                op(gate).astype(c.dtype)
                for op, gate in (
                    *((jax.nn.sigmoid, i), (jax.nn.sigmoid, f)),
                    *((jnp.tanh, g), (jax.nn.sigmoid, o)),
                )
            )
            c = f * c + i * g
            h = cast_low(o * jnp.tanh(c), dtype)
            return (h, c), h

        zeros = jnp.zeros((batch[0], width))
        _, hs = lax.scan(step, (cast_low(zeros, dtype), zeros), x.swapaxes(0, 1))
        return jnp.mean(hs.astype(jnp.float32) ** 2)

    return Model(loss, shapes_of(init), x)


def mlp(dtype: Any = None, width: int = 4096, batch: int = 4096) -> Model:
    """Returns a stack of dense layers."""
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)

    def init(key: Any) -> Any:
        normal = functools.partial(jax.random.normal, shape=(width, width))
        return [
            (normal(k) / width**0.5, jnp.zeros(width)) for k in jax.random.split(key, 4)
        ]

    def loss(params: Any, x: Any) -> Any:
        x = cast_low(x, dtype)
        for w, b in params:
            x = jax.nn.relu(x @ cast_low(w, dtype) + cast_low(b, dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return Model(loss, shapes_of(init), x)


class NnxNet(nnx.Module):
    """Dense layers and norms, in nnx."""

    def __init__(self, width: int, dtype: Any, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.layers = nnx.List(nnx.Linear(width, width, **options) for _ in range(3))
        self.norms = nnx.List(nnx.LayerNorm(width, **options) for _ in range(3))

    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nnx.gelu(layer(norm(x)))
        return x


def nnx_model(dtype: Any = None, width: int = 2048, batch: int = 8192) -> Model:
    """Returns a residual network in nnx, as a function of its state."""
    net = nnx.eval_shape(lambda: NnxNet(width, dtype, nnx.Rngs(0)))
    graphdef, state = nnx.split(net)

    def loss(params: Any, x: Any) -> Any:
        out = nnx.merge(graphdef, params)(cast_low(x, dtype))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return Model(loss, state, jax.ShapeDtypeStruct((batch, width), jnp.float32))
