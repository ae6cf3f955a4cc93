"""Flax's examples of transformers: lm1b and WMT."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from benchmarks.examples.shared import apply, ints, smoothed_cross_entropy
from benchmarks.models import Model, cast_low, shapes_of


def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns embeddings of positions, of shape (1, length, width)."""
    half = width // 2
    rates = np.exp(np.arange(half) * -(math.log(1e4) / max(1, half - 1)))
    angles = np.arange(length)[:, None] * rates
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    return table.astype(np.float32)[None]


class AddPositionEmbs(nn.Module):
    """Adds sinusoids that are no parameters."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns embeddings of the shape of ``x``."""
        return x + jnp.asarray(sinusoids(*x.shape[1:]))


class MlpBlock(nn.Module):
    """Two dense layers."""

    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        h = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(h)


class TransformerBlock(nn.Module):
    """A pre-norm block: attention to itself, perhaps to another sequence, an MLP."""

    heads: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Any, mask: Any, encoded: Any = None, encoded_mask: Any = None
    ) -> Any:
        """Returns activations of the shape of ``x``."""
        attention = functools.partial(
            nn.MultiHeadDotProductAttention,
            num_heads=self.heads,
            use_bias=False,
            deterministic=True,
            dtype=self.dtype,
        )
        x = x + attention()(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
        if encoded is not None:
            h = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + attention()(h, encoded, mask=encoded_mask)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        return x + MlpBlock(self.hidden, self.dtype)(h)


def shift_right(tokens: Any) -> Any:
    """Returns tokens one later, after one of padding."""
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


class Stack(nn.Module):
    """Blocks over embedded tokens, with a norm after them."""

    blocks: str
    norm: str
    positions: str
    depth: int
    heads: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, *others: Any) -> Any:
        """Returns activations of the shape of ``x``; the others go to every block."""
        x = cast_low(AddPositionEmbs(name=self.positions)(x), self.dtype)
        for i in range(self.depth):
            block = TransformerBlock(
                self.heads, self.hidden, self.dtype, name=f"{self.blocks}_{i}"
            )
            x = block(x, *others)
        return nn.LayerNorm(dtype=self.dtype, name=self.norm)(x)


def _decoder(**options: Any) -> Stack:
    names = ("encoderdecoderblock", "encoderdecoder_norm", "posembed_output")
    return Stack(*names, **options)


def _logits_via_embedding(y: Any, embed: nn.Embed, dtype: Any) -> Any:
    """The product is of 16 bits by hand, though the examples themselves write float32.

    Their float32 product moves more, beside which every other way would look good.
    """
    return y @ cast_low(embed.embedding, dtype).T / y.shape[-1] ** 0.5


class TransformerLM(nn.Module):
    """The language model of the LM1B example."""

    depth: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    shared: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Returns the logits of each token from those before it."""
        kind = self.dtype or jnp.float32
        mask = nn.combine_masks(
            nn.make_attention_mask(tokens > 0, tokens > 0, dtype=kind),
            nn.make_causal_mask(tokens, dtype=kind),
        )
        init = nn.initializers.normal(1.0)
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=init, name="Embed_0"
        )
        sizes: dict[str, Any] = {"depth": self.depth, "heads": self.heads}
        stack = _decoder(**sizes, hidden=self.hidden, dtype=self.dtype, name="decoder")
        y = stack(embed(shift_right(tokens)), mask)
        if self.shared:
            return _logits_via_embedding(y, embed, self.dtype)
        return nn.Dense(self.vocabulary, dtype=self.dtype, name="logitdense")(y)


def lm1b(
    dtype: Any = None,
    depth: int = 4,
    width: int = 1024,
    heads: int = 16,
    hidden: int = 4096,
    vocabulary: int = 8192,
    batch: tuple[int, int] = (16, 512),
    shared: bool = True,
) -> Model:
    """Returns a decoder-only language model; ``shared`` ties its logits."""
    module = TransformerLM(depth, width, heads, hidden, vocabulary, shared, dtype)

    def loss(params: Any, tokens: Any) -> Any:
        return smoothed_cross_entropy(apply(module, params, tokens), tokens)

    tokens = ints(*batch)
    params = shapes_of(module.init, jnp.zeros(tokens.shape, tokens.dtype))
    return Model(loss, params, tokens)


class Transformer(nn.Module):
    """The translator of the WMT example."""

    depth: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any, targets: Any) -> Any:
        """Returns the logits of each target from the inputs and targets before it."""
        kind = self.dtype or jnp.float32
        mask = functools.partial(nn.make_attention_mask, dtype=kind)
        init = nn.initializers.normal(1.0)
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=init, name="shared_embedding"
        )
        options: dict[str, Any] = {
            "depth": self.depth,
            "heads": self.heads,
            "hidden": self.hidden,
            "dtype": self.dtype,
        }
        names = ("encoderblock", "encoder_norm", "posembed_input")
        encoder = Stack(*names, **options, name="encoder")
        encoded = encoder(embed(inputs), mask(inputs > 0, inputs > 0))
        y = _decoder(**options, name="decoder")(
            embed(shift_right(targets)),
            nn.combine_masks(
                mask(targets > 0, targets > 0),
                nn.make_causal_mask(targets, dtype=kind),
            ),
            encoded,
            mask(targets > 0, inputs > 0),
        )
        return _logits_via_embedding(y, embed, self.dtype)


def wmt(
    dtype: Any = None,
    depth: int = 2,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    vocabulary: int = 8192,
    batch: tuple[int, int] = (16, 256),
) -> Model:
    """Returns an encoder and a decoder that attends to it, with one embedding."""
    module = Transformer(depth, width, heads, hidden, vocabulary, dtype)

    def loss(params: Any, pairs: Any) -> Any:
        inputs, targets = pairs
        return smoothed_cross_entropy(apply(module, params, inputs, targets), targets)

    tokens = ints(*batch)
    zeros = jnp.zeros(tokens.shape, tokens.dtype)
    return Model(loss, shapes_of(module.init, zeros, zeros), (tokens, tokens))
