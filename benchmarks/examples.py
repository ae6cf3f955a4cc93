"""The models of Flax's examples, each with a twin whose precision is written by hand.

They are made as in `benchmarks.models`: with ``dtype=None`` as their authors write them
in float32, or with a 16-bit dtype that goes to Flax's own ``dtype=``, with casts where
a careful author puts them. The layers have the names of the examples. There is no
dropout. Tokens of 0 are padding.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks.models import Model


def _shapes(init: Callable[..., Any], *args: Any) -> Any:
    return jax.eval_shape(lambda: init(jax.random.key(0), *args))


def _apply(module: nn.Module, *args: Any) -> Any:
    return module.apply(*args)


def _low(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.astype(dtype)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def smoothed_cross_entropy(logits: Any, targets: Any, smoothing: float = 0.1) -> Any:
    """Returns the mean over targets that are no padding, zero where it is least."""
    classes = logits.shape[-1]
    on, off = 1.0 - smoothing, smoothing / (classes - 1)
    least = -(on * math.log(on) + (classes - 1) * off * math.log(off + 1e-20))
    hot = targets[..., None] == jnp.arange(classes)
    wanted = jnp.where(hot, jnp.float32(on), jnp.float32(off))
    logits = logits.astype(jnp.float32)
    each = -jnp.sum(wanted * jax.nn.log_softmax(logits), -1) - least
    weights = (targets > 0).astype(jnp.float32)
    return jnp.sum(each * weights) / jnp.sum(weights)


# ------------------------------------------------------------------------------ images


class BottleneckResNetBlock(nn.Module):
    """A block of three convolutions, whose last norm starts as zero."""

    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns activations of four times the filters."""
        h = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
        h = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(h)))
        h = self.conv(4 * self.filters, (1, 1))(h)
        h = self.norm(scale_init=nn.initializers.zeros_init())(h)
        if x.shape != h.shape:
            shape = (4 * self.filters, (1, 1), self.strides)
            x = self.conv(*shape, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return nn.relu(x + h)


class ImageNetResNet(nn.Module):
    """The residual network of the ImageNet example."""

    stages: Sequence[int]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns logits."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=False,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        padding = [(3, 3), (3, 3)]
        x = conv(self.width, (7, 7), (2, 2), padding=padding, name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                strides = (2, 2) if i and not j else (1, 1)
                x = BottleneckResNetBlock(self.width * 2**i, conv, norm, strides)(x)
        x = nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))
        return _low(x, self.dtype)


def imagenet_resnet(
    dtype: Any = None,
    size: int = 112,
    batch: int = 32,
    stages: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    classes: int = 1000,
) -> Model:
    """Returns a ResNet-50, whose batch statistics come with the batch."""
    module = ImageNetResNet(tuple(stages), width, classes, dtype)
    images = _floats(batch, size, size, 3)
    variables = _shapes(module.init, jnp.zeros(images.shape))

    def loss(params: Any, batch: Any) -> Any:
        statistics, images, labels = batch
        variables = {"params": params, "batch_stats": statistics}
        logits, _ = module.apply(variables, images, mutable=["batch_stats"])
        hot = jax.nn.one_hot(labels, classes, dtype=jnp.float32)
        chosen = hot * jax.nn.log_softmax(logits.astype(jnp.float32))
        return jnp.mean(-jnp.sum(chosen, -1))

    inputs = (variables["batch_stats"], images, _ints(batch))
    return Model(loss, variables["params"], inputs)


class Encoder(nn.Module):
    """From pixels to the mean and the log-variance of a code."""

    hidden: int
    latents: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns both."""
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name="fc1")(x))
        mean = nn.Dense(self.latents, dtype=self.dtype, name="fc2_mean")(x)
        logvar = nn.Dense(self.latents, dtype=self.dtype, name="fc2_logvar")(x)
        return mean, logvar


class Decoder(nn.Module):
    """From a code to the logits of pixels."""

    hidden: int
    pixels: int
    dtype: Any = None

    @nn.compact
    def __call__(self, z: Any) -> Any:
        """Returns logits."""
        z = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, name="fc1")(z))
        return nn.Dense(self.pixels, dtype=self.dtype, name="fc2")(z)


class VAE(nn.Module):
    """A variational autoencoder; by hand, its code is drawn in float32."""

    hidden: int
    latents: int
    pixels: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, key: Any) -> Any:
        """Returns logits, means and log-variances, the last two in float32."""
        encoder = Encoder(self.hidden, self.latents, self.dtype, name="encoder")
        mean, logvar = (part.astype(jnp.float32) for part in encoder(x))
        noise = jax.random.normal(key, mean.shape, jnp.float32)
        z = mean + jnp.exp(0.5 * logvar) * noise
        decoder = Decoder(self.hidden, self.pixels, self.dtype, name="decoder")
        return decoder(z), mean, logvar


def vae(
    dtype: Any = None,
    hidden: int = 4096,
    latents: int = 128,
    pixels: int = 784,
    batch: int = 4096,
) -> Model:
    """Returns a variational autoencoder; the batch has the key of its noise."""
    module = VAE(hidden, latents, pixels, dtype)
    images, key = _floats(batch, pixels), jax.ShapeDtypeStruct((2,), jnp.uint32)

    def loss(params: Any, batch: Any) -> Any:
        images, key = batch
        logits, mean, logvar = _apply(module, params, images, key)
        on = jax.nn.log_sigmoid(logits.astype(jnp.float32))
        off = jnp.log(-jnp.expm1(on))
        entropy = -jnp.sum(images * on + (1.0 - images) * off, -1)
        apart = -0.5 * jnp.sum(1.0 + logvar - mean**2 - jnp.exp(logvar), -1)
        return jnp.mean(entropy) + jnp.mean(apart)

    params = _shapes(lambda k: module.init(k, jnp.zeros(images.shape), k))
    return Model(loss, params, (images, key))


class ActorCritic(nn.Module):
    """Convolutions over frames of a game, to a policy and a value."""

    width: int
    hidden: int
    actions: int
    dtype: Any = None

    @nn.compact
    def __call__(self, frames: Any) -> Any:
        """Returns logarithms of probabilities, and values."""
        options: dict[str, Any] = {"dtype": self.dtype}
        x = frames.astype(self.dtype or jnp.float32) / 255.0
        w = self.width
        x = nn.relu(nn.Conv(w, (8, 8), (4, 4), name="conv1", **options)(x))
        x = nn.relu(nn.Conv(2 * w, (4, 4), (2, 2), name="conv2", **options)(x))
        x = nn.relu(nn.Conv(2 * w, (3, 3), (1, 1), name="conv3", **options)(x))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(self.hidden, name="hidden", **options)(x))
        logits = nn.Dense(self.actions, name="logits", **options)(x)
        value = nn.Dense(1, name="value", **options)(x)
        policy = jax.nn.log_softmax(logits.astype(jnp.float32))
        return policy, value.astype(jnp.float32)


def ppo(
    dtype: Any = None,
    batch: int = 1024,
    size: int = 84,
    width: int = 32,
    hidden: int = 512,
    actions: int = 18,
) -> Model:
    """Returns an actor-critic with the clipped loss of PPO."""
    module = ActorCritic(width, hidden, actions, dtype)
    frames = jax.ShapeDtypeStruct((batch, size, size, 4), jnp.uint8)

    def loss(params: Any, batch: Any) -> Any:
        frames, taken, before, returns, advantages = batch
        policy, values = _apply(module, params, frames)
        entropy = jnp.mean(jnp.sum(-jnp.exp(policy) * policy, -1))
        value_loss = jnp.mean(jnp.square(returns - values[:, 0]))
        after = jax.vmap(lambda row, action: row[action])(policy, taken)
        ratios = jnp.exp(after - before)
        advantages = (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)
        clipped = jnp.clip(ratios, 0.9, 1.1) * advantages
        gain = jnp.mean(jnp.minimum(ratios * advantages, clipped))
        return -gain + 0.5 * value_loss - 0.01 * entropy

    params = _shapes(module.init, jnp.zeros(frames.shape, frames.dtype))
    each = _floats(batch)
    return Model(loss, params, (frames, _ints(batch), each, each, each))


# ------------------------------------------------------------------------ transformers


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
        x = _low(AddPositionEmbs(name=self.positions)(x), self.dtype)
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
    return y @ _low(embed.embedding, dtype).T / y.shape[-1] ** 0.5


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
        return smoothed_cross_entropy(_apply(module, params, tokens), tokens)

    tokens = _ints(*batch)
    params = _shapes(module.init, jnp.zeros(tokens.shape, tokens.dtype))
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
        return smoothed_cross_entropy(_apply(module, params, inputs, targets), targets)

    tokens = _ints(*batch)
    zeros = jnp.zeros(tokens.shape, tokens.dtype)
    return Model(loss, _shapes(module.init, zeros, zeros), (tokens, tokens))


# ------------------------------------------------------------------------------- Gemma


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
            _low(w[...], self.dtype)
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
        gating = _low(self.gating_einsum[...], self.dtype)
        gate = jax.nn.gelu(jnp.dot(x, gating[0]))
        return jnp.dot(gate * jnp.dot(x, gating[1]), _low(self.linear[...], self.dtype))


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
        x = _low(embedding[tokens], self.dtype) * embedding.shape[-1] ** 0.5
        for layer in self.layers:
            x = layer(x, positions, mask)
        logits = jnp.dot(self.final_norm(x), _low(embedding, self.dtype).T)
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

    return Model(loss, state, (_ints(*batch), _ints(*batch)))


# ------------------------------------------------------------------- recurrent networks

END = 1  # The token that ends a sequence of seq2seq.


def lengths_to_end(tokens: Any) -> Any:
    """Returns how many tokens there are to the first that ends a sequence, with it."""
    ends = tokens == END
    first = jnp.argmax(ends, axis=-1)
    return jnp.where(jnp.any(ends, axis=-1), first + 1, tokens.shape[-1])


class DecoderLSTMCell(nn.RNNCellBase):
    """A step of the decoder, from a token before to the logits of the next one."""

    hidden: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, carry: Any, inputs: Any) -> Any:
        """Returns the new carry, and logits."""
        cell = nn.LSTMCell(self.hidden, dtype=self.dtype)
        carry, y = cell(carry, inputs)
        dense = nn.Dense(self.vocabulary, dtype=self.dtype, name="projection")
        return carry, dense(y)

    @property
    def num_feature_axes(self) -> int:
        """Vectors go in."""
        return 1


class Seq2seq(nn.Module):
    """The encoder and decoder of the example that learns to add."""

    hidden: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any, lengths: Any, targets: Any) -> Any:
        """Returns logits, each from the true tokens before it."""
        cell = nn.LSTMCell(self.hidden, dtype=self.dtype)
        encoder = nn.RNN(cell, return_carry=True, name="encoder")
        state, _ = encoder(inputs, seq_lengths=lengths)
        cell = DecoderLSTMCell(self.hidden, self.vocabulary, self.dtype)
        return nn.RNN(cell, name="decoder")(targets, initial_carry=state)


def seq2seq(
    dtype: Any = None,
    hidden: int = 1024,
    batch: int = 256,
    length: int = 64,
    vocabulary: int = 16,
) -> Model:
    """Returns an encoder and a decoder of one LSTM each, fed with one-hot tokens."""
    module = Seq2seq(hidden, vocabulary, dtype)

    def loss(params: Any, pairs: Any) -> Any:
        queries, answers = pairs
        labels, lengths = answers[:, 1:], lengths_to_end(answers[:, 1:])
        hot = functools.partial(
            jax.nn.one_hot, num_classes=vocabulary, dtype=jnp.float32
        )
        ends = lengths_to_end(queries)
        logits = _apply(module, params, hot(queries), ends, hot(answers[:, :-1]))
        chosen = jax.nn.log_softmax(logits.astype(jnp.float32)) * hot(labels)
        mask = jnp.arange(labels.shape[-1]) < lengths[:, None]
        return -jnp.mean(jnp.sum(chosen, -1) * mask.astype(jnp.float32))

    queries, answers = _ints(batch, length), _ints(batch, length + 1)
    hot = jnp.zeros((batch, length, vocabulary))
    params = _shapes(module.init, hot, jnp.zeros(batch, jnp.int32), hot)
    return Model(loss, params, (queries, answers))


class KeysOnlyMlpAttention(nn.Module):
    """Weights over a sequence that depend on its keys alone."""

    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, keys: Any, mask: Any) -> Any:
        """Returns weights of the shape of the mask; by hand their sum is float32."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        energy = jnp.tanh(dense(self.hidden, name="keys")(keys))
        scores = dense(1, name="energy")(energy)[..., 0].astype(jnp.float32)
        scores = jnp.where(mask, scores, -jnp.inf)
        return _low(jax.nn.softmax(scores), self.dtype)


class AttentionClassifier(nn.Module):
    """A weighted mean of a sequence, and an MLP."""

    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, encoded: Any, mask: Any) -> Any:
        """Returns one logit a sequence."""
        attention = KeysOnlyMlpAttention(
            self.hidden, self.dtype, name="keys_only_mlp_attention"
        )
        weights = attention(encoded, mask)
        context = (weights[:, None] @ encoded)[:, 0]
        h = jnp.tanh(nn.Dense(self.hidden, dtype=self.dtype)(context))
        return nn.Dense(1, dtype=self.dtype)(h)


class TextClassifier(nn.Module):
    """The classifier of sentences of the SST-2 example."""

    vocabulary: int
    embedding: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Any, lengths: Any) -> Any:
        """Returns one logit a sentence."""
        x = nn.Embed(self.vocabulary, self.embedding, name="embedder")(tokens)
        cell = functools.partial(nn.OptimizedLSTMCell, self.hidden, dtype=self.dtype)
        both = nn.Bidirectional(nn.RNN(cell()), nn.RNN(cell()), name="encoder")
        encoded = both(_low(x, self.dtype), seq_lengths=lengths)
        mask = jnp.arange(tokens.shape[-1]) < lengths[:, None]
        classifier = AttentionClassifier(
            self.hidden, self.dtype, name="attention_classifier"
        )
        return classifier(_low(encoded, self.dtype), mask)


def sst2(
    dtype: Any = None,
    hidden: int = 1024,
    embedding: int = 512,
    batch: int = 128,
    length: int = 64,
    vocabulary: int = 8192,
) -> Model:
    """Returns a classifier of sentences, two LSTMs with attention over both."""
    module = TextClassifier(vocabulary, embedding, hidden, dtype)

    def loss(params: Any, batch: Any) -> Any:
        tokens, lengths, labels = batch
        logits = _apply(module, params, tokens, jnp.maximum(lengths, 1))[:, 0]
        logits = logits.astype(jnp.float32)
        linear = jnp.where(logits >= 0, logits, 0.0) - logits * labels
        return jnp.mean(linear + jnp.log1p(jnp.exp(-jnp.abs(logits))))

    tokens, lengths = _ints(batch, length), _ints(batch)
    zeros = (jnp.zeros(tokens.shape, jnp.int32), jnp.zeros(batch, jnp.int32))
    params = _shapes(module.init, *zeros)
    return Model(loss, params, (tokens, lengths, _floats(batch)))


# At full size, to be compiled, and as small, to be run on a CPU.
EXAMPLES: Mapping[str, tuple[Callable[..., Model], dict[str, Any]]] = {
    "imagenet": (
        imagenet_resnet,
        {"size": 32, "batch": 8, "stages": (1, 1), "width": 8, "classes": 10},
    ),
    "lm1b": (
        lm1b,
        {
            "depth": 2,
            "width": 32,
            "heads": 8,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (2, 16),
        },
    ),
    "wmt": (
        wmt,
        {
            "depth": 1,
            "width": 32,
            "heads": 8,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (2, 16),
        },
    ),
    "gemma": (
        gemma,
        {
            "depth": 2,
            "width": 64,
            "heads": 4,
            "groups": 2,
            "head": 16,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (4, 32),
        },
    ),
    "seq2seq": (seq2seq, {"hidden": 32, "batch": 8, "length": 12}),
    "sst2": (
        sst2,
        {"hidden": 32, "embedding": 16, "batch": 8, "length": 12, "vocabulary": 64},
    ),
    "vae": (vae, {"hidden": 64, "latents": 8, "pixels": 49, "batch": 32}),
    "ppo": (ppo, {"batch": 16, "size": 36, "width": 8, "hidden": 32}),
}
