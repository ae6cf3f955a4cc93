"""Flax's example of Gemma, in nnx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from benchmarks.examples.shared import ints, smoothed_cross_entropy
from benchmarks.models import Model, cast_low


def apply_rope(x: Any, positions: Any, longest: float = 1e4) -> Any:
    """Returns queries or keys whose halves are turned by angles that positions give."""
    half = x.shape[-1] // 2
    steps = 2.0 * jnp.arange(half, dtype=jnp.float32) / x.shape[-1]
    angles = positions[..., None].astype(jnp.float32) / longest**steps
    sin, cos = (f(angles)[:, :, None, :] for f in (jnp.sin, jnp.cos))
    first, second = (part.astype(jnp.float32) for part in jnp.split(x, 2, axis=-1))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _normal(rngs: nnx.Rngs, *shape: int) -> Any:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


class RMSNorm(nnx.Module):
    """A norm without mean, whose scale is what is added to one; inside in float32."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape and dtype of ``x``."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * lax.rsqrt(mean + 1e-6) * (1.0 + self.scale[...])).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with fewer keys than queries, or as many."""

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        head: int,
        soft_cap: float | None,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.soft_cap, self.dtype, self.groups = soft_cap, dtype, groups
        self.q_einsum = _normal(rngs, heads, width, head)
        self.kv_einsum = _normal(rngs, 2, groups, width, head)
        self.attn_vec_einsum = _normal(rngs, heads, head, width)

    def __call__(self, x: Any, positions: Any, mask: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        q_weight, kv_weight, out_weight = (
            cast_low(w[...], self.dtype)
            for w in (self.q_einsum, self.kv_einsum, self.attn_vec_einsum)
        )
        queries = jnp.einsum("BTD,NDH->BTNH", x, q_weight)
        keys, values = jnp.einsum("BSD,CKDH->CBSKH", x, kv_weight)
        queries = apply_rope(queries, positions) * queries.shape[-1] ** -0.5
        keys = apply_rope(keys, positions)
        batch, length, heads, head = queries.shape
        grouped = (batch, length, self.groups, heads // self.groups, head)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", queries.reshape(grouped), keys)
        if self.soft_cap is not None:
            logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
        least = jnp.asarray(-2.3819763e38, logits.dtype)
        logits = jnp.where(mask[:, :, None, None, :], logits, least)
        weights = jax.nn.softmax(logits, axis=-1).astype(keys.dtype)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", weights, values)
        return jnp.einsum("BTNH,NHD->BTD", encoded.reshape(queries.shape), out_weight)


class FeedForward(nnx.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = dtype
        self.gating_einsum = _normal(rngs, 2, width, hidden)
        self.linear = _normal(rngs, hidden, width)

    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        gating = cast_low(self.gating_einsum[...], self.dtype)
        gate = jax.nn.gelu(jnp.dot(x, gating[0]))
        return jnp.dot(
            gate * jnp.dot(x, gating[1]), cast_low(self.linear[...], self.dtype)
        )


class GemmaBlock(nnx.Module):
    """Attention and a gated MLP, with norms before and after both."""

    def __init__(
        self, width: int, hidden: int, dtype: Any, rngs: nnx.Rngs, **attention: Any
    ) -> None:
        self.pre_attention_norm = RMSNorm(width)
        self.attn = Attention(width, dtype=dtype, rngs=rngs, **attention)
        self.post_attention_norm = RMSNorm(width)
        self.pre_ffw_norm = RMSNorm(width)
        self.mlp = FeedForward(width, hidden, dtype, rngs)
        self.post_ffw_norm = RMSNorm(width)

    def __call__(self, x: Any, positions: Any, mask: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        h = self.attn(self.pre_attention_norm(x), positions, mask)
        x = x + self.post_attention_norm(h)
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class Gemma(nnx.Module):
    """The decoder of the Gemma example."""

    def __init__(
        self,
        depth: int,
        width: int,
        vocabulary: int,
        final_cap: float | None,
        dtype: Any,
        rngs: nnx.Rngs,
        **block: Any,
    ) -> None:
        self.final_cap, self.dtype = final_cap, dtype
        self.input_embedding = _normal(rngs, vocabulary, width)
        self.layers = nnx.List(
            GemmaBlock(width, dtype=dtype, rngs=rngs, **block) for _ in range(depth)
        )
        self.final_norm = RMSNorm(width)

    def __call__(self, tokens: Any) -> Any:
        """Returns the logits of the tokens that follow."""
        real = tokens > 0
        positions = jnp.cumsum(real, axis=-1) - 1
        positions = jnp.maximum(positions, 0)
        causal = jnp.tril(jnp.ones((tokens.shape[-1],) * 2, bool))
        mask = causal & real[:, None, :]
        embedding = self.input_embedding[...]
        x = cast_low(embedding[tokens], self.dtype) * embedding.shape[-1] ** 0.5
        for layer in self.layers:
            x = layer(x, positions, mask)
        logits = jnp.dot(self.final_norm(x), cast_low(embedding, self.dtype).T)
        if self.final_cap is not None:
            logits = jnp.tanh(logits / self.final_cap) * self.final_cap
        return logits


def gemma(
    dtype: Any = None,
    depth: int = 4,
    width: int = 1024,
    heads: int = 8,
    groups: int = 2,
    head: int = 128,
    hidden: int = 4096,
    vocabulary: int = 8192,
    batch: tuple[int, int] = (8, 512),
    soft_cap: float | None = 50.0,
    final_cap: float | None = 30.0,
) -> Model:
    """Returns a Gemma of ``groups`` keys for its ``heads``, as a function of state."""

    def make() -> Gemma:
        sizes: dict[str, Any] = {
            "depth": depth,
            "width": width,
            "heads": heads,
            "groups": groups,
            "head": head,
            "hidden": hidden,
            "vocabulary": vocabulary,
            "soft_cap": soft_cap,
            "final_cap": final_cap,
        }
        return Gemma(**sizes, dtype=dtype, rngs=nnx.Rngs(0))

    graphdef, state = nnx.split(nnx.eval_shape(make))

    def loss(params: Any, batch: Any) -> Any:
        inputs, targets = batch
        logits = nnx.merge(graphdef, params)(inputs)
        return smoothed_cross_entropy(logits, targets, smoothing=0.0)

    return Model(loss, state, (ints(*batch), ints(*batch)))
