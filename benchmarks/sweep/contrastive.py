"""Embeddings: contrastive losses, margins, distillation."""

import jax
import jax.numpy as jnp

from benchmarks.sweep.program import (
    Entry,
    Program,
    cross_entropy,
    layer_norm,
    mlp,
    unit,
)


def _two_views(r, *sizes):
    x = r.normal(64, sizes[0])
    views = (
        x + r.normal(64, sizes[0], scale=0.3),
        x + r.normal(64, sizes[0], scale=0.3),
    )
    return r.layers(*sizes), views


def info_nce() -> Program:
    """Two views of a batch attract each other; all other pairs repel."""

    def loss(p, params, data):
        a, b = (unit(mlp(p, params["net"], x)) for x in data)
        logits = p.dot(a, b.T) / jnp.exp(params["temperature"])
        labels = jnp.arange(len(logits))
        return cross_entropy(logits, labels) + cross_entropy(logits.T, labels)

    def make(r):
        net, views = _two_views(r, 32, 64, 32)
        return {"net": net, "temperature": r.normal() * 0 - 2.66}, views

    return Program(loss, make)


def siglip() -> Program:
    """Every pair of two views is classified by a sigmoid of its own."""

    def loss(p, params, data):
        a, b = (unit(mlp(p, params["net"], x)) for x in data)
        logits = jnp.exp(params["scale"]) * p.dot(a, b.T) + params["bias"]
        signs = 2 * jnp.eye(len(logits)) - 1
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), -1))

    def make(r):
        net, views = _two_views(r, 32, 64, 32)
        return {
            "net": net,
            "scale": r.normal() * 0 + 2.3,
            "bias": r.normal() - 10,
        }, views

    return Program(loss, make)


def arcface() -> Program:
    """A margin is added to the angle between an embedding and its class."""

    def loss(p, params, data):
        x, labels = data
        cosines = p.dot(unit(mlp(p, params["net"], x)), unit(params["classes"]).T)
        angles = jnp.arccos(jnp.clip(cosines, -1 + 1e-6, 1 - 1e-6))
        margins = 0.5 * jax.nn.one_hot(labels, 10, dtype=angles.dtype)
        return cross_entropy(30 * jnp.cos(angles + margins), labels)

    def make(r):
        params = {"net": r.layers(32, 64, 32), "classes": r.normal(10, 32)}
        return params, (r.normal(64, 32), r.integers(10, 64))

    return Program(loss, make)


def barlow_twins() -> Program:
    """The correlations of two views' features become the identity."""

    def loss(p, params, data):
        a, b = (mlp(p, params, x) for x in data)
        a, b = ((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5) for z in (a, b))
        c = p.dot(a.T, b) / len(a)
        on = jnp.sum((1 - jnp.diagonal(c)) ** 2)
        return on + 5e-3 * (jnp.sum(c**2) - jnp.sum(jnp.diagonal(c) ** 2))

    return Program(loss, lambda r: _two_views(r, 32, 64, 32))


def vicreg() -> Program:
    """Views are equal, features vary, and features are not correlated."""

    def loss(p, params, data):
        a, b = (mlp(p, params, x) for x in data)
        total = 25 * jnp.mean((a - b) ** 2)
        for z in (a, b):
            z = z - z.mean(0)
            total += 25 * jnp.mean(jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4)))
            c = p.dot(z.T, z) / (len(z) - 1)
            total += jnp.sum((c * (1 - jnp.eye(len(c)))) ** 2) / len(c)
        return total

    return Program(loss, lambda r: _two_views(r, 32, 64, 32))


def hard_triplets() -> Program:
    """The farthest positive must be nearer than the nearest negative."""

    def loss(p, params, data):
        x, labels = data
        z = unit(mlp(p, params, x))
        squares = jnp.sum(z * z, -1)
        d2 = squares[:, None] + squares[None] - 2 * p.dot(z, z.T)
        same = labels[:, None] == labels[None]
        itself = jnp.eye(len(x), dtype=bool)
        distances = jnp.sqrt(jnp.where(itself, 1.0, jnp.maximum(d2, 1e-6)))
        far = jnp.max(jnp.where(same & ~itself, distances, -jnp.inf), 1)
        near = jnp.min(jnp.where(same, jnp.inf, distances), 1)
        return jnp.mean(jax.nn.relu(far - near + 0.2))

    def make(r):
        labels = r.integers(8, 64)
        x = r.normal(8, 32)[labels] + r.normal(64, 32)
        labels[:16] = [*range(8)] * 2  # Each class has a pair.
        return r.layers(32, 64, 32), (x, labels)

    return Program(loss, make)


def supervised_contrastive() -> Program:
    """All examples of a class attract each other."""

    def loss(p, params, data):
        x, labels = data
        z = unit(mlp(p, params, x))
        logits = p.dot(z, z.T) / 0.1
        itself = jnp.eye(len(x), dtype=bool)
        logp = jax.nn.log_softmax(jnp.where(itself, -1e9, logits))
        same = (labels[:, None] == labels[None]) & ~itself
        return -jnp.mean(jnp.sum(jnp.where(same, logp, 0), 1) / (same.sum(1) + 1e-6))

    def make(r):
        return r.layers(32, 64, 32), (r.normal(64, 32), r.integers(4, 64))

    return Program(loss, make)


def prototypes() -> Program:
    """Queries are classified by distances to class means of a support set."""

    def loss(p, params, data):
        support, queries, labels = data
        means = mlp(p, params, support).mean(1)
        z = mlp(p, params, queries)
        distances = jnp.sum((z[:, None] - means[None]) ** 2, -1)
        return cross_entropy(-distances, labels)

    def make(r):
        centres, labels = r.normal(5, 1, 32), r.integers(5, 40)
        support = centres + 0.5 * r.normal(5, 4, 32)
        queries = centres[labels, 0] + 0.5 * r.normal(40, 32)
        return r.layers(32, 64, 16), (support, queries, labels)

    return Program(loss, make)


def byol() -> Program:
    """A predictor of one view meets a target network of the other view."""

    def loss(p, params, data):
        target, a, b = data
        total = 0.0
        for x, y in ((a, b), (b, a)):
            predicted = unit(mlp(p, params["predictor"], mlp(p, params["net"], x)))
            aim = jax.lax.stop_gradient(unit(mlp(p, target, y)))
            total += jnp.mean(2 - 2 * jnp.sum(predicted * aim, -1))
        return total

    def make(r):
        net, (a, b) = _two_views(r, 32, 64, 32)
        target = [(w + r.normal(*w.shape, scale=0.01), b) for w, b in net]
        return {"net": net, "predictor": r.layers(32, 64, 32)}, (target, a, b)

    return Program(loss, make)


def dino() -> Program:
    """A student follows a teacher's sharpened and centred distribution."""

    def loss(p, params, data):
        teacher, centre, a, b = data
        logp = jax.nn.log_softmax(mlp(p, params, a, jax.nn.gelu) / 0.1)
        aim = jax.nn.softmax((mlp(p, teacher, b, jax.nn.gelu) - centre) / 0.04)
        return -jnp.mean(jnp.sum(jax.lax.stop_gradient(aim) * logp, -1))

    def make(r):
        net, (a, b) = _two_views(r, 32, 64, 64)
        return net, (r.layers(32, 64, 64), r.normal(64, scale=0.1), a, b)

    return Program(loss, make)


def distillation() -> Program:
    """A student has labels, and a teacher's logits at a temperature."""

    def loss(p, params, data):
        x, labels, teacher = data
        logits = mlp(p, params, x)
        soft = jax.nn.softmax(teacher / 4)
        kl = jnp.sum(soft * (jnp.log(soft) - jax.nn.log_softmax(logits / 4)), -1)
        return cross_entropy(logits, labels) + 16 * jnp.mean(kl)

    def make(r):
        data = (r.normal(64, 32), r.integers(10, 64), 3 * r.normal(64, 10))
        return r.layers(32, 64, 64, 10), data

    return Program(loss, make)


def focal() -> Program:
    """Easy examples of rare classes weigh less."""

    def loss(p, params, data):
        x, labels = data
        q = jax.nn.sigmoid(mlp(p, params, x)[:, 0])
        right = jnp.where(labels == 1, q, 1 - q)
        return -jnp.mean((1 - right) ** 2 * jnp.log(right))

    def make(r):
        net = r.layers(32, 64, 64, 1)
        net[-1] = (3 * net[-1][0], net[-1][1] - 2)
        return net, (r.normal(128, 32), r.integers(10, 128) // 9)

    return Program(loss, make)


def mean_discrepancy() -> Program:
    """Two domains have the same features, by a kernel."""

    def loss(p, params, data):
        z = layer_norm(mlp(p, params, jnp.concatenate(data)))
        squares = jnp.sum(z * z, -1)
        d2 = jax.nn.relu(squares[:, None] + squares[None] - 2 * p.dot(z, z.T))
        k = sum(jnp.exp(-d2 / (2 * s * s)) for s in (1.0, 4.0, 16.0))
        n = len(data[0])
        return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()

    def make(r):
        return r.layers(32, 64, 16), (r.normal(48, 32), r.normal(48, 32) + 0.5)

    return Program(loss, make)


ENTRIES = (
    Entry("InfoNCE", info_nce),
    Entry("SigLIP", siglip),
    Entry("ArcFace", arcface),
    Entry("Barlow Twins", barlow_twins),
    Entry("VICReg", vicreg),
    Entry("triplets, hard mining", hard_triplets),
    Entry("supervised contrastive", supervised_contrastive),
    Entry("prototypical network", prototypes),
    Entry("BYOL", byol),
    Entry("DINO", dino),
    Entry("knowledge distillation", distillation),
    Entry("focal loss", focal),
    Entry("mean discrepancy", mean_discrepancy),
)
