"""Generative models: flows, diffusion, scores, quantisers, adversaries."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import (
    Entry,
    Program,
    dense,
    mlp,
    normal_log_prob,
)


def ffjord() -> Program:
    """A continuous flow with Hutchinson's estimate of the trace, eight RK4 steps."""

    def loss(p, params, data):
        x, noise = data

        def field(z, t):
            times = jnp.broadcast_to(t, (*z.shape[:-1], 1))
            return mlp(p, params, jnp.concatenate([z, times], -1), jnp.tanh)

        def rates(state, t):
            dz, pushed = jax.jvp(lambda z: field(z, t), (state[0],), (noise,))
            return dz, -jnp.sum(pushed * noise, -1)

        def step(state, t):
            h = 1 / 8
            k1 = rates(state, t)
            k2 = rates(jax.tree.map(lambda s, k: s + h / 2 * k, state, k1), t + h / 2)
            k3 = rates(jax.tree.map(lambda s, k: s + h / 2 * k, state, k2), t + h / 2)
            k4 = rates(jax.tree.map(lambda s, k: s + h * k, state, k3), t + h)
            new = jax.tree.map(
                lambda s, a, b, c, d: s + h / 6 * (a + 2 * b + 2 * c + d),
                *(state, k1, k2, k3, k4),
            )
            return new, ()

        start = (x, jnp.zeros(len(x), x.dtype))
        (z, change), _ = jax.lax.scan(step, start, jnp.arange(8) / 8)
        return -jnp.mean(normal_log_prob(z, 0.0, 0.0).sum(-1) - change)

    def make(r):
        return r.layers(5, 32, 32, 4), (r.normal(64, 4), r.normal(64, 4))

    return Program(loss, make)


def glow() -> Program:
    """Activation norms, invertible 1x1 convolutions, affine couplings of images."""

    def loss(p, params, data):
        x, log_det = data, 0.0
        pixels = x.shape[1] * x.shape[2]
        for block in params:
            log_scale, shift = block["actnorm"]
            x = (x + shift) * jnp.exp(log_scale)
            log_det += pixels * jnp.sum(log_scale)
            x = p.conv(x, block["mix"][None, None])
            log_det += pixels * jnp.linalg.slogdet(block["mix"])[1]
            a, b = jnp.split(x, 2, -1)
            h = jax.nn.relu(p.conv(a, block["in"]))
            h = p.conv(h, block["out"]) + block["bias"]
            scale, shift = jnp.split(h, 2, -1)
            s = jax.nn.sigmoid(scale + 2)
            x = jnp.concatenate([a, (b + shift) * s], -1)
            log_det += jnp.sum(jnp.log(s), (1, 2, 3))
        density = normal_log_prob(x, 0.0, 0.0).sum((1, 2, 3)) + log_det
        return -jnp.mean(density) / np.prod(x.shape[1:])

    def make(r):
        def block():
            mix, _ = np.linalg.qr(r.normal(4, 4))
            return {
                "actnorm": (r.normal(4, scale=0.1), r.normal(4, scale=0.1)),
                "mix": np.float32(mix),
                "in": r.kernel(3, 3, 2, 32),
                "out": 0.3 * r.kernel(3, 3, 32, 4),
                "bias": r.normal(4, scale=0.1),
            }

        return [block() for _ in range(4)], r.normal(16, 8, 8, 4)

    return Program(loss, make)


def _embedded(t, n):
    angles = t[:, None] * jnp.exp(-jnp.arange(n) * (jnp.log(1e4) / n))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def ddpm() -> Program:
    """A network predicts the noise in an image at one of 1,000 times."""

    def loss(p, params, data):
        x, noise, t = data
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000, dtype=x.dtype))[t]
        kept = kept[:, None, None, None]
        noisy = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
        times = mlp(p, params["time"], _embedded(t.astype(x.dtype), 16), jax.nn.silu)
        h = jax.nn.silu(p.conv(noisy, params["in"]) + times[:, None, None])
        h = h + jax.nn.silu(p.conv(h, params["mid"]))
        return jnp.mean((p.conv(h, params["out"]) - noise) ** 2)

    def make(r):
        params = {
            "time": r.layers(32, 64, 16),
            "in": r.kernel(3, 3, 3, 16),
            "mid": r.kernel(3, 3, 16, 16),
            "out": r.kernel(3, 3, 16, 3),
        }
        data = (r.normal(16, 8, 8, 3), r.normal(16, 8, 8, 3), r.integers(1000, 16))
        return params, data

    return Program(loss, make)


def edm() -> Program:
    """A preconditioned denoiser, for noise from 0.002 to 80."""

    def loss(p, params, data):
        x, noise, z = data
        sigma = jnp.exp(1.2 * z - 1.2)[:, None]
        total = sigma**2 + 0.25
        noisy = x + sigma * noise
        times = _embedded(jnp.log(sigma[:, 0]) / 4, 8)
        inputs = jnp.concatenate([noisy / jnp.sqrt(total), times], -1)
        raw = mlp(p, params, inputs, jax.nn.silu)
        found = 0.25 / total * noisy + sigma * 0.5 / jnp.sqrt(total) * raw
        weight = total / (sigma * 0.5) ** 2
        return jnp.mean(weight * (found - x) ** 2)

    def make(r):
        data = (0.5 * r.normal(64, 16), r.normal(64, 16), 2 * r.normal(64))
        return r.layers(32, 64, 64, 16), data

    return Program(loss, make)


def flow_matching() -> Program:
    """A network predicts the velocity of straight paths from noise to data."""

    def loss(p, params, data):
        x, noise, t = data
        t = t[:, None]
        at = (1 - t) * noise + t * x
        found = mlp(p, params, jnp.concatenate([at, t], -1), jax.nn.silu)
        return jnp.mean((found - (x - noise)) ** 2)

    def make(r):
        data = (3 + r.normal(64, 16), r.normal(64, 16), r.uniform(64))
        return r.layers(17, 64, 64, 16), data

    return Program(loss, make)


def sliced_scores() -> Program:
    """The score of an energy, with the trace of its Jacobian along random slices."""

    def loss(p, params, data):
        x, slices = data

        def energy(x):
            return jnp.sum(mlp(p, params, x, jax.nn.softplus))

        scores, pushed = jax.jvp(jax.grad(energy), (x,), (slices,))
        trace = jnp.sum(slices * pushed, -1)
        return jnp.mean(trace + 0.5 * jnp.sum(scores * slices, -1) ** 2)

    def make(r):
        return r.layers(8, 64, 64, 1), (r.normal(64, 8), r.normal(64, 8))

    return Program(loss, make)


def denoising_scores() -> Program:
    """Scores at ten levels of noise, weighted."""

    def loss(p, params, data):
        x, noise, level = data
        sigma = jnp.exp(jnp.linspace(2.0, -4.0, 10, dtype=x.dtype))[level][:, None]
        found = mlp(p, params, x + sigma * noise, jax.nn.elu) / sigma
        return 0.5 * jnp.mean(jnp.sum((sigma * found + noise) ** 2, -1))

    def make(r):
        return r.layers(8, 64, 64, 8), (
            r.normal(64, 8),
            r.normal(64, 8),
            r.integers(10, 64),
        )

    return Program(loss, make)


def svgd() -> Program:
    """Particles of a Bayesian network's weights move by a kernel."""

    def loss(p, params, data):
        x, y = data

        def log_density(particle):
            found = mlp(p, particle, x, jnp.tanh)[:, 0]
            prior = sum(jnp.sum(w * w) for w in jax.tree.leaves(particle))
            return -5 * jnp.sum((found - y) ** 2) - 0.5 * prior

        def flat(tree):
            return jnp.concatenate(
                [w.reshape(len(w), -1) for w in jax.tree.leaves(tree)], 1
            )

        scores = jax.vmap(jax.grad(log_density))(params)
        at, slopes = flat(params), flat(scores)
        d2 = jnp.sum((at[:, None] - at[None]) ** 2, -1)
        kernel = jnp.exp(-d2 / jax.lax.stop_gradient(jnp.median(d2) + 1e-6))
        moved = p.dot(kernel, slopes) / len(at)
        return jnp.sum(moved**2) / at.size

    def make(r):
        particles = [r.layers(4, 16, 1) for _ in range(8)]
        params = jax.tree.map(lambda *w: np.stack(w), *particles)
        return params, (r.normal(32, 4), r.normal(32))

    return Program(loss, make)


def gumbel_vq() -> Program:
    """Codes of a codebook are chosen by a relaxed sample."""

    def loss(p, params, data):
        x, gumbel = data
        logits = mlp(p, params["encoder"], x)
        soft = jax.nn.softmax((logits + gumbel) / 0.5)
        decoded = mlp(p, params["decoder"], p.dot(soft, params["codes"]))
        q = jax.nn.softmax(logits)
        kl = jnp.sum(q * (jnp.log(q + 1e-10) + np.log(q.shape[-1])), -1)
        return jnp.mean((decoded - x) ** 2) + 0.1 * jnp.mean(kl)

    def make(r):
        params = {
            "encoder": r.layers(16, 64, 32),
            "codes": r.normal(32, 8),
            "decoder": r.layers(8, 64, 16),
        }
        gumbel = -np.log(-np.log(r.uniform(64, 32, low=1e-6)))
        return params, (r.normal(64, 16), gumbel)

    return Program(loss, make)


def fsq() -> Program:
    """Each of six numbers is rounded to one of a few levels."""

    def loss(p, params, data):
        z = mlp(p, params["encoder"], data)
        levels = jnp.array([8, 8, 8, 5, 5, 5], z.dtype)
        half = (levels - 1) * (1 - 1e-3) / 2
        offset = jnp.where(levels % 2 == 1, 0.0, 0.5)
        z = jnp.tanh(z + jnp.arctanh(offset / half)) * half - offset
        rounded = z + jax.lax.stop_gradient(jnp.round(z) - z)
        found = mlp(p, params["decoder"], rounded / (levels // 2))
        return jnp.mean((found - data) ** 2)

    def make(r):
        params = {"encoder": r.layers(16, 64, 6), "decoder": r.layers(6, 64, 16)}
        return params, r.normal(128, 16)

    return Program(loss, make)


def vae() -> Program:
    """A Gaussian code and Bernoulli pixels."""

    def loss(p, params, data):
        x, noise = data
        mean, log_var = jnp.split(mlp(p, params["encoder"], x, jnp.tanh), 2, -1)
        z = mean + jnp.exp(0.5 * log_var) * noise
        logits = mlp(p, params["decoder"], z, jnp.tanh)
        pixels = jnp.sum(jax.nn.softplus(logits) - x * logits, -1)
        kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
        return jnp.mean(pixels + kl)

    def make(r):
        params = {"encoder": r.layers(64, 64, 16), "decoder": r.layers(8, 64, 64)}
        x = np.float32(r.uniform(64, 64) < 0.3)
        return params, (x, r.normal(64, 8))

    return Program(loss, make)


def iwae() -> Program:
    """A tighter bound of eight samples of the code."""

    def loss(p, params, data):
        x, noise = data
        mean, log_std = jnp.split(mlp(p, params["encoder"], x, jnp.tanh), 2, -1)
        z = mean + jnp.exp(log_std) * noise
        logits = mlp(p, params["decoder"], z, jnp.tanh)
        pixels = jnp.sum(x * logits - jax.nn.softplus(logits), -1)
        prior = normal_log_prob(z, 0.0, 0.0).sum(-1)
        posterior = normal_log_prob(z, mean, log_std).sum(-1)
        weights = pixels + prior - posterior
        return -jnp.mean(jax.nn.logsumexp(weights, axis=0) - np.log(len(noise)))

    def make(r):
        params = {"encoder": r.layers(64, 64, 16), "decoder": r.layers(8, 64, 64)}
        x = np.float32(r.uniform(32, 64) < 0.3)
        return params, (x, r.normal(8, 32, 8))

    return Program(loss, make)


def wasserstein_gan() -> Program:
    """A critic with a penalty of the length of its gradient."""

    def loss(p, params, data):
        real, z, mixed = data
        fake = mlp(p, params["generator"], z)

        def critic(x):
            return mlp(p, params["critic"], x, jax.nn.leaky_relu)[..., 0]

        between = mixed * real + (1 - mixed) * fake
        slopes = jax.grad(lambda x: critic(x).sum())(between)
        lengths = jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12)
        penalty = 10 * jnp.mean((lengths - 1) ** 2)
        return critic(fake).mean() - critic(real).mean() + penalty

    def make(r):
        params = {"generator": r.layers(8, 64, 16), "critic": r.layers(16, 64, 64, 1)}
        return params, (r.normal(64, 16) + 1, r.normal(64, 8), r.uniform(64, 1))

    return Program(loss, make)


def hinge_gan() -> Program:
    """A discriminator with hinge losses, and its generator."""

    def loss(p, params, data):
        real, z = data
        fake = mlp(p, params["generator"], z)
        score = lambda x: mlp(p, params["critic"], x, jax.nn.leaky_relu)
        right = jnp.mean(jax.nn.relu(1 - score(real)))
        wrong = jnp.mean(jax.nn.relu(1 + score(fake)))
        return right + wrong - jnp.mean(score(fake))

    def make(r):
        params = {"generator": r.layers(8, 64, 16), "critic": r.layers(16, 64, 64, 1)}
        return params, (r.normal(64, 16) + 1, r.normal(64, 8))

    return Program(loss, make)


def pixel_cnn() -> Program:
    """Masked convolutions, and mixtures of discretised logistic distributions."""

    def loss(p, params, data):
        x = data  # In [-1, 1].
        mask = np.ones((5, 5, 1, 1), np.float32)
        mask[2, 2:] = 0
        mask[3:] = 0
        h = jax.nn.elu(p.conv(x, params["in"] * mask))
        inner = mask.copy()
        inner[2, 2] = 1
        h = h + jax.nn.elu(p.conv(h, params["mid"] * inner))
        weights, means, log_scales = jnp.split(p.conv(h, params["out"]), 3, -1)
        inverse = jnp.exp(-jnp.maximum(log_scales - 1, -7.0))
        upper = jax.nn.sigmoid(inverse * (x - means + 1 / 255))
        lower = jax.nn.sigmoid(inverse * (x - means - 1 / 255))
        logp = jnp.log(jnp.maximum(upper - lower, 1e-12))
        return -jnp.mean(jax.nn.logsumexp(logp + jax.nn.log_softmax(weights), -1))

    def make(r):
        params = {
            "in": r.kernel(5, 5, 1, 16),
            "mid": r.kernel(5, 5, 16, 16),
            "out": r.kernel(1, 1, 16, 9),
        }
        return params, np.round(r.uniform(8, 12, 12, 1) * 255) / np.float32(127.5) - 1

    return Program(loss, make)


def spline_flow() -> Program:
    """Couplings of monotone rational quadratic splines."""

    def loss(p, params, data):
        x, log_det = data, 0.0
        for i, net in enumerate(params):
            a, b = (x[:, :4], x[:, 4:]) if i % 2 else (x[:, 4:], x[:, :4])
            knots = mlp(p, net, a, jnp.tanh).reshape(len(x), 4, 3 * 8)
            b, change = _spline(b, *jnp.split(knots, 3, -1))
            x = jnp.concatenate([b, a] if i % 2 else [a, b], -1)
            log_det += change.sum(-1)
        return -jnp.mean(normal_log_prob(x, 0.0, 0.0).sum(-1) + log_det)

    def make(r):
        nets = [r.layers(4, 32, 96) for _ in range(2)]
        return nets, r.normal(64, 8).clip(-2.9, 2.9)

    return Program(loss, make)


def _spline(x, widths, heights, slopes):
    """Returns a spline of ``x`` in [-3, 3], and the logarithm of its slope."""
    widths = 6 * (1e-3 + (1 - 8e-3) * jax.nn.softmax(widths))
    heights = 6 * (1e-3 + (1 - 8e-3) * jax.nn.softmax(heights))
    slopes = 1e-3 + jax.nn.softplus(slopes)
    slopes = jnp.concatenate([jnp.ones_like(slopes[..., :1]), slopes], -1)
    right, top = jnp.cumsum(widths, -1) - 3, jnp.cumsum(heights, -1) - 3
    bin_ = jnp.sum(x[..., None] >= right[..., :-1], -1)[..., None]

    def at(array, i=bin_):
        return jnp.take_along_axis(array, i, -1)[..., 0]

    w, h, s = at(widths), at(heights), at(heights) / at(widths)
    t = (x - (at(right) - w)) / w
    d0, d1 = at(slopes), at(slopes, bin_ + 1)
    below = s + (d1 + d0 - 2 * s) * t * (1 - t)
    y = at(top) - h + h * (s * t**2 + d0 * t * (1 - t)) / below
    slope = s**2 * (d1 * t**2 + 2 * s * t * (1 - t) + d0 * (1 - t) ** 2) / below**2
    return y, jnp.log(slope)


def real_nvp() -> Program:
    """Affine couplings with scales by tanh."""

    def loss(p, params, data):
        x, log_det = data, 0.0
        for net in params:
            a, b = jnp.split(x, 2, -1)
            raw, shift = jnp.split(mlp(p, net, a), 2, -1)
            log_scale = 2 * jnp.tanh(raw / 2)
            b = b * jnp.exp(log_scale) + shift
            log_det += log_scale.sum(-1)
            x = jnp.concatenate([b, a], -1)
        return -jnp.mean(normal_log_prob(x, 0.0, 0.0).sum(-1) + log_det)

    def make(r):
        return [r.layers(4, 64, 8) for _ in range(4)], r.normal(64, 8)

    return Program(loss, make)


def energy_model() -> Program:
    """Langevin steps make negatives of an energy."""

    def loss(p, params, data):
        x, start, noise = data

        def energy(x):
            return mlp(p, params, x, jax.nn.silu)[..., 0]

        def step(y, eps):
            return y - 0.05 * jax.grad(lambda y: energy(y).sum())(y) + 0.1 * eps, ()

        y, _ = jax.lax.scan(step, start, noise)
        real, fake = energy(x), energy(jax.lax.stop_gradient(y))
        return real.mean() - fake.mean() + 0.1 * jnp.mean(real**2 + fake**2)

    def make(r):
        return r.layers(8, 64, 64, 1), (
            r.normal(64, 8),
            r.normal(64, 8),
            r.normal(10, 64, 8),
        )

    return Program(loss, make)


def mixture_density() -> Program:
    """A network predicts a mixture of eight normal distributions."""

    def loss(p, params, data):
        x, y = data
        out = mlp(p, params, x, jnp.tanh)
        logits, means, log_stds = jnp.split(out, 3, -1)
        logp = normal_log_prob(y[:, None], means, log_stds)
        return -jnp.mean(jax.nn.logsumexp(jax.nn.log_softmax(logits) + logp, -1))

    def make(r):
        x = r.normal(128, 4)
        y = np.sin(3 * x[:, 0]) + 0.1 * r.normal(128)
        return r.layers(4, 64, 64, 24), (x, y)

    return Program(loss, make)


def masked_autoencoder() -> Program:
    """A masked autoregressive flow of one hidden layer."""

    def loss(p, params, data):
        n, hidden = 8, 64
        degrees = np.arange(hidden) % (n - 1)
        first = np.float32(np.arange(n)[:, None] <= degrees[None])
        last = np.float32(degrees[:, None] < np.arange(n)[None])
        (w0, b0), (w1, b1), (w2, b2) = params
        h = jnp.tanh(dense(p, (w0 * first, b0), data))
        means, log_stds = dense(p, (w1 * last, b1), h), dense(p, (w2 * last, b2), h)
        return -jnp.mean(normal_log_prob(data, means, log_stds).sum(-1))

    def make(r):
        return r.layers(8, 64) + r.layers(64, 8) + r.layers(64, 8), r.normal(64, 8)

    return Program(loss, make)


ENTRIES = (
    Entry("FFJORD", ffjord),
    Entry("Glow", glow),
    Entry("RealNVP, tanh scales", real_nvp),
    Entry("spline flow", spline_flow),
    Entry("autoregressive flow", masked_autoencoder),
    Entry("DDPM", ddpm),
    Entry("EDM", edm),
    Entry("flow matching", flow_matching),
    Entry("sliced score matching", sliced_scores),
    Entry("denoising scores", denoising_scores),
    Entry("SVGD", svgd),
    Entry("energy-based model", energy_model),
    Entry("Gumbel VQ", gumbel_vq),
    Entry("FSQ", fsq),
    Entry("VAE", vae),
    Entry("IWAE", iwae),
    Entry("WGAN, gradient penalty", wasserstein_gan),
    Entry("hinge GAN", hinge_gan),
    Entry("PixelCNN", pixel_cnn),
    Entry("mixture density network", mixture_density),
)
