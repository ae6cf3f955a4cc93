"""Parametrised weights, inner loops and learned optimizers."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import Entry, Program, cross_entropy, dense, mlp


def _classifier(r, *sizes):
    return r.layers(*sizes), (r.normal(64, sizes[0]), r.integers(sizes[-1], 64))


def spectral_norm() -> Program:
    """Weights are divided by their largest singular value, by power iterations."""

    def loss(p, params, data):
        vectors, x, labels = data
        h = x
        for (w, b), u in zip(params, vectors, strict=True):
            fixed = jax.lax.stop_gradient(w)
            for _ in range(2):
                v = p.dot(fixed, u)
                v = v / (jnp.linalg.norm(v) + 1e-12)
                u = p.dot(v, fixed)
                u = u / (jnp.linalg.norm(u) + 1e-12)
            v, u = jax.lax.stop_gradient(v), jax.lax.stop_gradient(u)
            sigma = jnp.sum(p.dot(v, w) * u)
            h = jax.nn.silu(p.dot(h, w / sigma) + b)
        return cross_entropy(4 * h, labels)

    def make(r):
        net, data = _classifier(r, 32, 64, 64, 8)
        return net, ([r.normal(len(b)) for _, b in net], *data)

    return Program(loss, make)


def weight_norm() -> Program:
    """Each column of a weight has a length of its own parameter."""

    def loss(p, params, data):
        h, labels = data
        for v, g, b in params:
            w = g * v / jnp.sqrt(jnp.sum(v * v, 0))
            h = jax.nn.relu(p.dot(h, w) + b)
        return cross_entropy(2 * h, labels)

    def make(r):
        net, data = _classifier(r, 32, 64, 64, 8)
        params = [
            (0.05 * w * len(w) ** 0.5, 1 + r.normal(len(b), scale=0.1), b)
            for w, b in net
        ]
        return params, data

    return Program(loss, make)


def newton_schulz() -> Program:
    """Weights are made orthogonal by five iterations."""

    def loss(p, params, data):
        h, labels = data
        for w, b in params:
            x = w / (jnp.linalg.norm(w) + 1e-7)
            for _ in range(5):
                a = p.dot(x.T, x)
                x = 3.4445 * x + p.dot(x, -4.7750 * a + 2.0315 * p.dot(a, a))
            h = jnp.tanh(p.dot(h, x) + b)
        return cross_entropy(4 * h[:, :8], labels)

    def make(r):
        return r.layers(32, 32, 32), (r.normal(64, 32), r.integers(8, 64))

    return Program(loss, make)


def cayley() -> Program:
    """Orthogonal weights by Cayley's map, which solves a linear system."""

    def loss(p, params, data):
        h, labels = data
        for w in params["turns"]:
            skew = w - w.T
            eye = jnp.eye(len(w), dtype=w.dtype)
            h = jnp.tanh(2 * p.dot(h, jnp.linalg.solve(eye + skew, eye - skew)))
        return cross_entropy(dense(p, params["head"], h), labels)

    def make(r):
        params = {
            "turns": [r.kernel(16, 16) for _ in range(2)],
            "head": r.layers(16, 5)[0],
        }
        return params, (r.normal(64, 16), r.integers(5, 64))

    return Program(loss, make)


def sinkhorn() -> Program:
    """The transport between a network's points and others, in logarithms."""

    def loss(p, params, data):
        x, y = data
        z = mlp(p, params, x, jnp.tanh)
        costs = jnp.sum((z[:, None] - y[None]) ** 2, -1)
        f, g = jnp.zeros(len(z), z.dtype), jnp.zeros(len(y), z.dtype)
        eps = 0.1
        for _ in range(20):
            f = -eps * jax.nn.logsumexp((g - costs) / eps, axis=1) - eps * np.log(
                len(z)
            )
            g = -eps * jax.nn.logsumexp(
                (f[:, None] - costs) / eps, axis=0
            ) - eps * np.log(len(y))
        plan = jnp.exp((f[:, None] + g - costs) / eps)
        return jnp.sum(plan * costs)

    def make(r):
        return r.layers(4, 32, 2), (r.normal(32, 4), r.normal(32, 2))

    return Program(loss, make)


def sinkhorn_product() -> Program:
    """The same by products with a kernel and quotients."""

    def loss(p, params, data):
        x, y = data
        z = mlp(p, params, x, jnp.tanh)
        costs = jnp.sum((z[:, None] - y[None]) ** 2, -1)
        kernel = jnp.exp(-costs / 4)
        u = jnp.ones((len(z), 1), z.dtype)
        for _ in range(20):
            v = 1 / (len(y) * p.dot(kernel.T, u) + 1e-9)
            u = 1 / (len(z) * p.dot(kernel, v) + 1e-9)
        return jnp.sum(u * kernel * v[:, 0] * costs)

    def make(r):
        return r.layers(4, 32, 2), (r.normal(32, 4), r.normal(32, 2))

    return Program(loss, make)


def k_means() -> Program:
    """Five soft steps of k-means on a network's features."""

    def loss(p, params, data):
        z = mlp(p, params["net"], data, jnp.tanh)
        centres = params["centres"]
        for _ in range(5):
            d2 = jnp.sum(z * z, -1, keepdims=True) + jnp.sum(centres**2, -1)
            d2 = d2 - 2 * p.dot(z, centres.T)
            weights = jax.nn.softmax(-4 * d2)
            centres = p.dot(weights.T, z) / (weights.sum(0)[:, None] + 1e-6)
        return jnp.mean(jnp.sum(weights * d2, -1))

    def make(r):
        centres = r.normal(6, 16)
        x = centres[r.integers(6, 128)] + 0.4 * r.normal(128, 16)
        return {"net": r.layers(16, 32, 8), "centres": r.normal(6, 8, scale=0.5)}, x

    return Program(loss, make)


def hard_k_means() -> Program:
    """Distances to the nearest of learned centres, and a network's reconstruction."""

    def loss(p, params, data):
        z = mlp(p, params["encoder"], data)
        centres = params["centres"]
        d2 = jnp.sum(centres**2, -1) - 2 * p.dot(z, centres.T)
        near = centres[jnp.argmin(d2, -1)]
        through = z + jax.lax.stop_gradient(near - z)
        found = mlp(p, params["decoder"], through)
        fit = jnp.mean((found - data) ** 2)
        commit = jnp.mean((z - jax.lax.stop_gradient(near)) ** 2)
        return fit + jnp.mean((near - jax.lax.stop_gradient(z)) ** 2) + 0.25 * commit

    def make(r):
        params = {
            "encoder": r.layers(16, 32, 8),
            "centres": r.normal(16, 8),
            "decoder": r.layers(8, 32, 16),
        }
        return params, r.normal(128, 16)

    return Program(loss, make)


def quantised_training() -> Program:
    """Weights and activations are rounded to eight bits, straight through."""

    def rounded(x, scale):
        q = jnp.clip(x / scale, -127, 127)
        q = q + jax.lax.stop_gradient(jnp.round(q) - q)
        return q * scale

    def loss(p, params, data):
        h, labels = data
        for w, b in params:
            wide = jax.lax.stop_gradient(jnp.max(jnp.abs(w), 0)) / 126
            tall = jax.lax.stop_gradient(jnp.max(jnp.abs(h))) / 126
            h = jax.nn.relu(p.dot(rounded(h, tall), rounded(w, wide)) + b)
        return cross_entropy(2 * h, labels)

    return Program(loss, lambda r: _classifier(r, 32, 64, 64, 8))


def learned_steps() -> Program:
    """LSQ: four bits whose step sizes are learned."""

    def rounded(x, step, bound):
        grad = 1 / (x.size * bound) ** 0.5
        step = step * grad + jax.lax.stop_gradient(step * (1 - grad))
        q = jnp.clip(x / step, -bound, bound - 1)
        return (q + jax.lax.stop_gradient(jnp.round(q) - q)) * step

    def loss(p, params, data):
        h, labels = data
        for w, b, sw, sh in params:
            h = jax.nn.relu(p.dot(rounded(h, sh, 8), rounded(w, sw, 8)) + b)
        return cross_entropy(2 * h, labels)

    def make(r):
        net, data = _classifier(r, 32, 64, 64, 8)
        step = lambda x: np.float32(np.abs(x).mean() / 1.3)
        return [(w, b, step(w), np.float32(0.3)) for w, b in net], data

    return Program(loss, make)


def maml() -> Program:
    """Three inner steps on sine waves, differentiated."""

    def loss(p, params, data):
        def fit(weights, x, y):
            return jnp.mean((mlp(p, weights, x, jnp.tanh) - y) ** 2)

        def task(x, y):
            weights = params
            for _ in range(3):
                slopes = jax.grad(fit)(weights, x[:10], y[:10])
                weights = jax.tree.map(lambda w, s: w - 0.05 * s, weights, slopes)
            return fit(weights, x[10:], y[10:])

        return jnp.mean(jax.vmap(task)(*data))

    def make(r):
        x = r.uniform(8, 20, 1, low=-5, high=5)
        y = r.uniform(8, 1, 1, low=0.5, high=3) * np.sin(x + r.uniform(8, 1, 1, high=3))
        return r.layers(1, 32, 32, 1), (x, y)

    return Program(loss, make)


def equilibrium() -> Program:
    """Twenty fixed-point steps of one layer."""

    def loss(p, params, data):
        x, labels = data
        shift = dense(p, params["in"], x)
        z = jnp.zeros_like(shift)
        step = lambda z, _: (jnp.tanh(p.dot(z, params["inner"]) + shift), ())
        z, _ = jax.lax.scan(step, z, length=20)
        return cross_entropy(dense(p, params["out"], z), labels)

    def make(r):
        params = {
            "in": r.layers(16, 32)[0],
            "inner": 0.8 * r.kernel(32, 32),
            "out": r.layers(32, 5)[0],
        }
        return params, (r.normal(64, 16), r.integers(5, 64))

    return Program(loss, make)


def hypernetwork() -> Program:
    """One network makes the weights of another for each task."""

    def loss(p, params, data):
        tasks, x, y = data
        made = mlp(p, params, tasks, jnp.tanh)
        w0 = made[:, :64].reshape(-1, 2, 32)
        w1 = made[:, 64:].reshape(-1, 32, 1) / 32**0.5
        h = jnp.sin(p.einsum("tni,tij->tnj", x, w0))
        return jnp.mean((p.einsum("tnj,tjk->tnk", h, w1) - y) ** 2)

    def make(r):
        tasks, x = r.normal(8, 4), r.normal(8, 32, 2)
        y = np.sin(np.einsum("tni,ti->tn", x, tasks[:, :2]))[..., None]
        return r.layers(4, 32, 96), (tasks, x, np.float32(y))

    return Program(loss, make)


def learned_optimizer() -> Program:
    """A network's updates of a quadratic problem, unrolled for 15 steps."""

    def loss(p, params, data):
        matrix, aim = data

        def value(x):
            return 0.5 * jnp.mean(
                jnp.sum((p.einsum("bij,bj->bi", matrix, x) - aim) ** 2, -1)
            )

        def step(carry, _):
            x, m = carry
            slope = jax.grad(value)(x) * len(x)
            m = 0.9 * m + 0.1 * slope
            features = jnp.stack(
                [slope, m, jnp.sign(slope) * jnp.log1p(jnp.abs(slope))], -1
            )
            x = x - 0.1 * mlp(p, params, features, jnp.tanh)[..., 0]
            return (x, m), value(x)

        zero = jnp.zeros_like(aim)
        _, values = jax.lax.scan(step, (zero, zero), length=15)
        return jnp.mean(values)

    def make(r):
        return r.layers(3, 16, 1), (r.normal(8, 8, 8, scale=0.35), r.normal(8, 8))

    return Program(loss, make)


def newton_step() -> Program:
    """A network's features are fitted by ridge regression inside of the loss."""

    def loss(p, params, data):
        support, y, queries, aims = data
        a, b = (mlp(p, params["net"], x, jnp.tanh) for x in (support, queries))
        gram = p.dot(a.T, a) + jnp.exp(params["ridge"]) * jnp.eye(
            a.shape[1], dtype=a.dtype
        )
        weights = jnp.linalg.solve(gram, p.dot(a.T, y))
        return jnp.mean((p.dot(b, weights) - aims) ** 2)

    def make(r):
        x, w = r.normal(64, 8), r.normal(8, 2)
        y = np.tanh(x @ w)
        params = {"net": r.layers(8, 32, 16), "ridge": r.normal() * 0}
        return params, (x[:32], y[:32], x[32:], y[32:])

    return Program(loss, make)


def soft_sort() -> Program:
    """NeuralSort: a relaxed permutation puts a network's scores in order."""

    def loss(p, params, data):
        x, order = data
        scores = mlp(p, params, x)[..., 0]
        n = scores.shape[1]
        distances = jnp.abs(scores[:, :, None] - scores[:, None]).sum(-1)
        scale = n + 1 - 2 * jnp.arange(1, n + 1)
        logits = (scale[:, None] * scores[:, None] - distances[:, None]) / 0.5
        logp = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logp, order[..., None], -1))

    def make(r):
        x = r.normal(16, 8, 8)
        return r.layers(8, 32, 1), (x, np.int32(np.argsort(-x.sum(-1), -1)))

    return Program(loss, make)


ENTRIES = (
    Entry("spectral norm", spectral_norm),
    Entry("weight norm", weight_norm),
    Entry("Newton-Schulz", newton_schulz),
    Entry("Cayley map", cayley),
    Entry("Sinkhorn, in logarithms", sinkhorn),
    Entry("Sinkhorn, by products", sinkhorn_product),
    Entry("soft k-means", k_means),
    Entry("VQ, nearest code", hard_k_means),
    Entry("QAT, 8 bits", quantised_training),
    Entry("LSQ, 4 bits", learned_steps),
    Entry("MAML", maml),
    Entry("equilibrium, 20 steps", equilibrium),
    Entry("hypernetwork", hypernetwork),
    Entry("learned optimizer", learned_optimizer),
    Entry("ridge regression inside", newton_step),
    Entry("NeuralSort", soft_sort),
)
