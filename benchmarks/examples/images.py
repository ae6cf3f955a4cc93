"""Flax's examples of images: ImageNet, the autoencoder, Atari games."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.examples.shared import apply, floats, ints
from benchmarks.models import Model, cast_low, shapes_of


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
        return cast_low(x, self.dtype)


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
    images = floats(batch, size, size, 3)
    variables = shapes_of(module.init, jnp.zeros(images.shape))

    def loss(params: Any, batch: Any) -> Any:
        statistics, images, labels = batch
        variables = {"params": params, "batch_stats": statistics}
        logits, _ = module.apply(variables, images, mutable=["batch_stats"])
        hot = jax.nn.one_hot(labels, classes, dtype=jnp.float32)
        chosen = hot * jax.nn.log_softmax(logits.astype(jnp.float32))
        return jnp.mean(-jnp.sum(chosen, -1))

    inputs = (variables["batch_stats"], images, ints(batch))
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
    images, key = floats(batch, pixels), jax.ShapeDtypeStruct((2,), jnp.uint32)

    def loss(params: Any, batch: Any) -> Any:
        images, key = batch
        logits, mean, logvar = apply(module, params, images, key)
        on = jax.nn.log_sigmoid(logits.astype(jnp.float32))
        off = jnp.log(-jnp.expm1(on))
        entropy = -jnp.sum(images * on + (1.0 - images) * off, -1)
        apart = -0.5 * jnp.sum(1.0 + logvar - mean**2 - jnp.exp(logvar), -1)
        return jnp.mean(entropy) + jnp.mean(apart)

    params = shapes_of(lambda k: module.init(k, jnp.zeros(images.shape), k))
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
        policy, values = apply(module, params, frames)
        entropy = jnp.mean(jnp.sum(-jnp.exp(policy) * policy, -1))
        value_loss = jnp.mean(jnp.square(returns - values[:, 0]))
        after = jax.vmap(lambda row, action: row[action])(policy, taken)
        ratios = jnp.exp(after - before)
        advantages = (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)
        clipped = jnp.clip(ratios, 0.9, 1.1) * advantages
        gain = jnp.mean(jnp.minimum(ratios * advantages, clipped))
        return -gain + 0.5 * value_loss - 0.01 * entropy

    params = shapes_of(module.init, jnp.zeros(frames.shape, frames.dtype))
    each = floats(batch)
    return Model(loss, params, (frames, ints(batch), each, each, each))
