"""Likelihoods, filters and regressions."""

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


def clipped_sigmoid() -> Program:
    """Binary cross entropy of a clipped sigmoid, which a product reads too."""

    def loss(p, params, data):
        x, y, aim = data
        q = jax.nn.sigmoid(mlp(p, params["net"], x))
        q = jnp.clip(q, 1e-7, 1 - 1e-7)
        entropy = -jnp.mean(y * jnp.log(q) + (1 - y) * jnp.log(1 - q))
        return entropy + jnp.mean((p.dot(q, params["mix"]) - aim) ** 2)

    def make(r):
        net = r.layers(16, 64, 8)
        net[-1] = (4 * net[-1][0], net[-1][1])
        x = r.normal(128, 16)
        y = np.float32(x[:, :8] + 0.3 * r.normal(128, 8) > 0)
        return {"net": net, "mix": r.kernel(8, 4)}, (x, y, r.normal(128, 4))

    return Program(loss, make)


def probit() -> Program:
    """Probabilities by erf, with logarithms of both sides, read by a product too."""

    def loss(p, params, data):
        x, y, aim = data
        z = mlp(p, params["net"], x)
        q = 0.5 * (1 + jax.lax.erf(z / np.sqrt(2).astype(z.dtype)))
        q = jnp.clip(q, 1e-6, 1 - 1e-6)
        fit = -jnp.mean(y * jnp.log(q) + (1 - y) * jnp.log(1 - q))
        return fit + jnp.mean((p.dot(q, params["mix"]) - aim) ** 2)

    def make(r):
        net = r.layers(16, 64, 8)
        net[-1] = (1.5 * net[-1][0], net[-1][1])
        x = r.normal(128, 16)
        y = np.float32(x[:, :8] + 0.3 * r.normal(128, 8) > 0)
        return {"net": net, "mix": r.kernel(8, 4)}, (x, y, r.normal(128, 4))

    return Program(loss, make)


def survival() -> Program:
    """Hazards of 20 intervals; survival is the product of what is left."""

    def loss(p, params, data):
        x, ends, died, aim = data
        hazards = jax.nn.sigmoid(3 * mlp(p, params["net"], x) - 2)
        alive = jnp.cumprod(1 - hazards, -1)
        before = jnp.concatenate([jnp.ones_like(alive[:, :1]), alive[:, :-1]], -1)
        at = lambda u: jnp.take_along_axis(u, ends[:, None], -1)[:, 0]
        likelihood = jnp.where(died, at(before) * at(hazards), at(alive))
        cost = p.dot(hazards, params["cost"])[:, 0]
        return -jnp.mean(jnp.log(likelihood + 1e-9)) + 0.1 * jnp.mean((cost - aim) ** 2)

    def make(r):
        params = {"net": r.layers(16, 64, 20), "cost": r.kernel(20, 1)}
        data = (r.integers(20, 128), r.integers(2, 128) == 1, r.normal(128))
        return params, (r.normal(128, 16), *data)

    return Program(loss, make)


def cox() -> Program:
    """Partial likelihood of proportional hazards."""

    def loss(p, params, data):
        x, died = data  # In the order of falling times.
        risk = mlp(p, params, x)[:, 0]
        return -jnp.mean(died * (risk - jax.lax.cumlogsumexp(risk)))

    def make(r):
        return r.layers(16, 64, 1), (r.normal(128, 16), np.float32(r.integers(2, 128)))

    return Program(loss, make)


def poisson() -> Program:
    """Counts with a rate by exp and an exposure."""

    def loss(p, params, data):
        x, exposure, counts = data
        log_rate = mlp(p, params, x, jnp.tanh)[:, 0] + jnp.log(exposure)
        return jnp.mean(jnp.exp(log_rate) - counts * log_rate)

    def make(r):
        exposure = r.uniform(128, low=1, high=100)
        counts = np.float32(np.random.default_rng(0).poisson(exposure))
        return r.layers(8, 64, 1), (r.normal(128, 8), exposure, counts)

    return Program(loss, make)


def negative_binomial() -> Program:
    """Counts of more variance, by lgamma."""

    def loss(p, params, data):
        x, counts = data
        out = mlp(p, params, x, jnp.tanh)
        mean, total = jax.nn.softplus(out[:, 0] + 3), jax.nn.softplus(out[:, 1]) + 1e-3
        lgamma = jax.lax.lgamma
        logp = lgamma(counts + total) - lgamma(total) - lgamma(counts + 1)
        logp = logp + total * jnp.log(total / (total + mean))
        return -jnp.mean(logp + counts * jnp.log(mean / (total + mean)))

    def make(r):
        counts = np.float32(np.random.default_rng(0).negative_binomial(2, 0.3, 128))
        return r.layers(8, 64, 2), (r.normal(128, 8), counts)

    return Program(loss, make)


def beta_regression() -> Program:
    """Shares by a beta distribution, by lgamma."""

    def loss(p, params, data):
        x, y = data
        a, b = jnp.split(jax.nn.softplus(mlp(p, params, x, jnp.tanh)) + 0.5, 2, -1)
        norm = jax.lax.lgamma(a) + jax.lax.lgamma(b) - jax.lax.lgamma(a + b)
        return jnp.mean(norm - (a - 1) * jnp.log(y) - (b - 1) * jnp.log1p(-y))

    def make(r):
        return r.layers(8, 64, 4), (
            r.normal(128, 8),
            r.uniform(128, 2, low=0.02, high=0.98),
        )

    return Program(loss, make)


def evidential() -> Program:
    """A Dirichlet distribution of classes, with its divergence from uniform."""

    def loss(p, params, data):
        x, labels = data
        alpha = jax.nn.softplus(mlp(p, params, x)) + 1
        aim = jax.nn.one_hot(labels, 5, dtype=x.dtype)
        total = alpha.sum(-1, keepdims=True)
        fit = jnp.sum(aim * (jnp.log(total) - jnp.log(alpha)), -1)
        rest = aim + (1 - aim) * alpha
        gone = rest.sum(-1)
        lgamma, digamma = jax.lax.lgamma, jax.lax.digamma
        kl = (
            lgamma(gone)
            - np.float32(np.log(24.0)).astype(gone.dtype)
            - lgamma(rest).sum(-1)
        )
        kl = kl + jnp.sum((rest - 1) * (digamma(rest) - digamma(gone)[:, None]), -1)
        return jnp.mean(fit + 0.1 * kl)

    def make(r):
        return r.layers(16, 64, 5), (r.normal(64, 16), r.integers(5, 64))

    return Program(loss, make)


def ordinal() -> Program:
    """Ordered classes as differences of sigmoids at rising thresholds."""

    def loss(p, params, data):
        x, grades = data
        score = mlp(p, params["net"], x, jnp.tanh)
        steps = jax.nn.softplus(params["steps"])
        cuts = params["first"] + jnp.concatenate(
            [jnp.zeros(1, steps.dtype), jnp.cumsum(steps)]
        )
        below = jax.nn.sigmoid(cuts - score)
        ends = jnp.zeros_like(score)
        q = jnp.diff(jnp.concatenate([ends, below, ends + 1], -1), axis=-1)
        right = jnp.take_along_axis(q, grades[:, None], -1)
        return -jnp.mean(jnp.log(jnp.maximum(right, 1e-9)))

    def make(r):
        params = {
            "net": r.layers(8, 64, 1),
            "steps": r.normal(4),
            "first": r.normal() - 1,
        }
        return params, (r.normal(128, 8), r.integers(6, 128))

    return Program(loss, make)


def quantiles() -> Program:
    """Nine quantiles by a pinball loss, of targets near 100."""

    def loss(p, params, data):
        x, y = data
        taus = jnp.arange(1, 10) / 10
        error = y[:, None] - (100 + 10 * mlp(p, params, x, jnp.tanh))
        return jnp.mean(jnp.maximum(taus * error, (taus - 1) * error))

    def make(r):
        x = r.normal(128, 8)
        return r.layers(8, 64, 9), (x, 100 + 10 * x[:, 0] + 5 * r.normal(128))

    return Program(loss, make)


def robust_regression() -> Program:
    """Targets near 100 with outliers, by a Student's t distribution."""

    def loss(p, params, data):
        x, y = data
        out = mlp(p, params, x, jnp.tanh)
        mean, scale = 100 + 10 * out[:, 0], jax.nn.softplus(out[:, 1]) + 0.1
        z = (y - mean) / scale
        return jnp.mean(2.5 * jnp.log1p(z * z / 4) + jnp.log(scale))

    def make(r):
        x = r.normal(128, 8)
        noise = r.normal(128) / r.uniform(128, low=0.1)
        return r.layers(8, 64, 2), (x, 100 + 10 * x[:, 0] + noise)

    return Program(loss, make)


def kalman() -> Program:
    """A Kalman filter of four states with a learned transition."""

    def loss(p, params, data):
        noise = jnp.exp(params["noise"])
        eye = jnp.eye(4, dtype=data.dtype)

        def step(carry, seen):
            mean, cov = carry
            f, h = params["move"], params["see"]
            mean = p.dot(f, mean)
            cov = p.dot(p.dot(f, cov), f.T) + noise[0] * eye
            s = p.dot(p.dot(h, cov), h.T) + noise[1] * jnp.eye(2, dtype=data.dtype)
            error = seen - p.dot(h, mean)
            gain = jnp.linalg.solve(s, p.dot(h, cov)).T
            det = s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0]
            cost = 0.5 * (jnp.log(det) + jnp.sum(error * jnp.linalg.solve(s, error)))
            return (mean + p.dot(gain, error), cov - p.dot(p.dot(gain, h), cov)), cost

        def one(series):
            start = (jnp.zeros(4, data.dtype), eye)
            return jax.lax.scan(step, start, series)[1].mean()

        return jnp.mean(jax.vmap(one)(data))

    def make(r):
        move = np.float32(np.eye(4) + 0.2 * np.eye(4, k=2))
        params = {
            "move": move + r.normal(4, 4, scale=0.02),
            "see": np.eye(2, 4, dtype=np.float32) + r.normal(2, 4, scale=0.05),
            "noise": np.float32([-3, -1]),
        }
        return params, np.cumsum(0.3 * r.normal(8, 20, 2), 1) + 0.5 * r.normal(8, 20, 2)

    return Program(loss, make)


def gaussian_process() -> Program:
    """The marginal likelihood of a kernel of a network's features."""

    def loss(p, params, data):
        x, y = data
        z = mlp(p, params["net"], x, jnp.tanh)
        d2 = jnp.sum((z[:, None] - z[None]) ** 2, -1)
        kernel = jnp.exp(2 * params["height"] - d2 / 2)
        kernel = kernel + jnp.exp(params["noise"]) * jnp.eye(len(x), dtype=x.dtype)
        root = jnp.linalg.cholesky(kernel)
        white = jax.scipy.linalg.solve_triangular(root, y, lower=True)
        return (0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diagonal(root)))) / len(x)

    def make(r):
        x = r.normal(48, 4)
        params = {
            "net": r.layers(4, 32, 4),
            "height": r.normal() * 0,
            "noise": r.normal() * 0 - 3,
        }
        return params, (x, np.sin(2 * x[:, 0]) + 0.1 * r.normal(48))

    return Program(loss, make)


def particle_filter() -> Program:
    """64 particles, weighted in logarithms and mixed by soft weights."""

    def loss(p, params, data):
        seen, noise, start = data

        def step(carry, now):
            particles, logw = carry
            y, eps = now
            particles = particles + 0.2 * mlp(p, params["move"], particles, jnp.tanh)
            particles = particles + jnp.exp(params["spread"]) * eps
            error = y - p.dot(particles, params["see"])
            logw = logw - 2 * jnp.sum(error**2, -1)
            total = jax.nn.logsumexp(logw)
            w = jnp.exp(logw - total)
            mean = p.dot(w[None], particles)
            return (0.8 * particles + 0.2 * mean, 0.5 * (logw - total)), total

        zero = jnp.full(64, -np.log(64), start.dtype)
        _, totals = jax.lax.scan(step, (start, zero), (seen, noise))
        return -jnp.mean(totals)

    def make(r):
        params = {
            "move": r.layers(4, 32, 4),
            "spread": r.normal(4, scale=0.1) - 1,
            "see": r.kernel(4, 2),
        }
        return params, (r.normal(16, 2), r.normal(16, 64, 4), r.normal(64, 4))

    return Program(loss, make)


def bayes_by_backprop() -> Program:
    """Normal weights, sampled, with their divergence from a prior."""

    def loss(p, params, data):
        x, y, noise = data
        weights = jax.tree.map(
            lambda m, s, e: m + jax.nn.softplus(s) * e,
            params["mean"],
            params["spread"],
            noise,
        )
        found = mlp(p, weights, x, jnp.tanh)[:, 0]
        fit = -normal_log_prob(y, found, -1.0).sum()
        pairs = zip(
            *(jax.tree.leaves(params[k]) for k in ("mean", "spread")), strict=True
        )
        kl = sum(
            jnp.sum(
                (jax.nn.softplus(s) ** 2 + m * m - 1) / 2 - jnp.log(jax.nn.softplus(s))
            )
            for m, s in pairs
        )
        return (fit + kl) / len(x)

    def make(r):
        mean = r.layers(4, 32, 1)
        spread = jax.tree.map(lambda w: r.normal(*w.shape, scale=0.1) - 3, mean)
        noise = jax.tree.map(lambda w: r.normal(*w.shape), mean)
        x = r.normal(128, 4)
        params = {"mean": mean, "spread": spread}
        return params, (x, np.sin(2 * x[:, 0]) + 0.3 * r.normal(128), noise)

    return Program(loss, make)


def canonical_correlation() -> Program:
    """Deep CCA: correlations of two networks' features, by Cholesky factors."""

    def loss(p, params, data):
        a, b = (mlp(p, net, x, jnp.tanh) for net, x in zip(params, data, strict=True))
        a, b = a - a.mean(0), b - b.mean(0)
        eye = 1e-2 * jnp.eye(a.shape[1], dtype=a.dtype)
        cov = lambda u, v: p.dot(u.T, v) / len(u)
        la, lb = (
            jnp.linalg.cholesky(cov(a, a) + eye),
            jnp.linalg.cholesky(cov(b, b) + eye),
        )
        solve = lambda root, m: jax.scipy.linalg.solve_triangular(root, m, lower=True)
        t = solve(lb, solve(la, cov(a, b)).T)
        return -jnp.sum(t**2)

    def make(r):
        z = r.normal(128, 4)
        data = tuple(z @ r.normal(4, 8) + 0.5 * r.normal(128, 8) for _ in range(2))
        return [r.layers(8, 32, 4) for _ in range(2)], data

    return Program(loss, make)


def stick_breaking_mixture() -> Program:
    """A mixture's weights by breaking a stick, from a network."""

    def loss(p, params, data):
        x, y = data
        h = jnp.tanh(dense(p, params["in"], x))
        v = jax.nn.sigmoid(dense(p, params["sticks"], h))
        left = jnp.cumprod(1 - v, -1)
        weights = v * jnp.concatenate([jnp.ones_like(v[:, :1]), left[:, :-1]], -1)
        means = p.dot(v, params["means"])
        logp = normal_log_prob(y[:, None], means, 0.0)
        return -jnp.mean(jnp.log(jnp.sum(weights * jnp.exp(logp), -1) + 1e-9))

    def make(r):
        w, b = r.layers(32, 8)[0]
        params = {
            "in": r.layers(8, 32)[0],
            "sticks": (3 * w, b),
            "means": r.normal(8, 8),
        }
        return params, (r.normal(128, 8), r.normal(128))

    return Program(loss, make)


ENTRIES = (
    Entry("clipped sigmoid", clipped_sigmoid),
    Entry("probit by erf", probit),
    Entry("survival hazards", survival),
    Entry("Cox", cox),
    Entry("Poisson", poisson),
    Entry("negative binomial", negative_binomial),
    Entry("beta regression", beta_regression),
    Entry("evidential classifier", evidential),
    Entry("ordinal regression", ordinal),
    Entry("quantile regression", quantiles),
    Entry("Student's t, near 100", robust_regression),
    Entry("Kalman filter", kalman),
    Entry("Gaussian process", gaussian_process),
    Entry("particle filter", particle_filter),
    Entry("Bayes by backprop", bayes_by_backprop),
    Entry("deep CCA", canonical_correlation),
    Entry("stick-breaking mixture", stick_breaking_mixture),
)
