"""Graphs, sparse matrices and tables of features."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from benchmarks.sweep.program import Entry, Program, cross_entropy, dense, mlp


def _graph(r, nodes=48, edges=200):
    senders = np.concatenate([r.integers(nodes, edges), np.arange(nodes)])
    receivers = np.concatenate([r.integers(nodes, edges), np.arange(nodes)])
    return np.int32(senders), np.int32(receivers)


def graph_attention() -> Program:
    """GAT: a softmax over the neighbours of each node."""

    def loss(p, params, data):
        h, labels, senders, receivers = data
        n = len(h)
        for layer in params:
            z = p.dot(h, layer["w"])
            scores = p.dot(z, layer["from"])[senders] + p.dot(z, layer["to"])[receivers]
            scores = jax.nn.leaky_relu(scores, 0.2)
            top = jax.ops.segment_max(scores, receivers, n)[receivers]
            weights = jnp.exp(scores - jax.lax.stop_gradient(top))
            total = jax.ops.segment_sum(weights, receivers, n)[receivers]
            h = jax.ops.segment_sum(weights / total * z[senders], receivers, n)
            h = jax.nn.elu(h)
        return cross_entropy(h, labels)

    def make(r):
        def layer(n, m):
            return {
                "w": 2 * r.kernel(n, m),
                "from": r.kernel(m, 1),
                "to": r.kernel(m, 1),
            }

        return [layer(16, 32), layer(32, 5)], (
            r.normal(48, 16),
            r.integers(5, 48),
            *_graph(r),
        )

    return Program(loss, make)


def graph_convolution() -> Program:
    """GCN: normalised sums over neighbours."""

    def loss(p, params, data):
        h, labels, senders, receivers = data
        n = len(h)
        ones = jnp.ones((len(senders), 1), h.dtype)
        degree = jax.lax.rsqrt(jax.ops.segment_sum(ones, receivers, n))
        for i, layer in enumerate(params):
            z = dense(p, layer, h) * degree
            h = jax.ops.segment_sum(z[senders], receivers, n) * degree
            h = jax.nn.relu(h) if i == 0 else h
        return cross_entropy(h, labels)

    def make(r):
        return r.layers(16, 32, 5), (r.normal(48, 16), r.integers(5, 48), *_graph(r))

    return Program(loss, make)


def message_passing() -> Program:
    """Three rounds of messages by networks of edges and nodes, with a GRU's gate."""

    def loss(p, params, data):
        h, edges, aim, senders, receivers = data
        for _ in range(3):
            pairs = jnp.concatenate([h[senders], h[receivers], edges], -1)
            messages = mlp(p, params["edge"], pairs)
            total = jax.ops.segment_sum(messages, receivers, len(h))
            both = jnp.concatenate([h, total], -1)
            gate = jax.nn.sigmoid(dense(p, params["gate"], both))
            h = gate * h + (1 - gate) * jnp.tanh(dense(p, params["node"], both))
        return jnp.mean((mlp(p, params["head"], h.mean(0)) - aim) ** 2)

    def make(r):
        params = {
            "edge": r.layers(36, 32, 16),
            "gate": r.layers(32, 16)[0],
            "node": r.layers(32, 16)[0],
            "head": r.layers(16, 32, 4),
        }
        senders, receivers = _graph(r)
        edges = r.normal(len(senders), 4)
        return params, (r.normal(48, 16), edges, r.normal(4), senders, receivers)

    return Program(loss, make)


def sparse_products() -> Program:
    """A BCOO matrix times features, between dense layers."""

    def loss(p, params, data):
        values, indices, x, labels = data
        matrix = sparse.BCOO(
            (values * jnp.exp(params["scale"]), indices), shape=(48, 48)
        )
        h = jax.nn.relu(matrix @ dense(p, params["in"], x))
        return cross_entropy(matrix @ dense(p, params["out"], h), labels)

    def make(r):
        params = {
            "in": r.layers(16, 32)[0],
            "out": r.layers(32, 5)[0],
            "scale": r.normal(200, scale=0.1),
        }
        flat = np.random.default_rng(0).choice(48 * 48, 200, replace=False)
        indices = np.int32(np.stack([flat // 48, flat % 48], -1))
        return params, (
            r.uniform(200, high=0.5),
            indices,
            r.normal(48, 16),
            r.integers(5, 48),
        )

    return Program(loss, make)


def sparse_weights() -> Program:
    """A network whose first weight is a BCOO matrix of trained values."""

    def loss(p, params, data):
        indices, x, y = data
        w = sparse.BCOO((params["values"], indices), shape=(64, 64))
        h = jax.nn.relu((w @ x.T).T)
        return jnp.mean((mlp(p, params["net"], h) - y) ** 2)

    def make(r):
        flat = np.random.default_rng(0).choice(64 * 64, 512, replace=False)
        indices = np.int32(np.stack([flat // 64, flat % 64], -1))
        params = {"values": r.normal(512, scale=0.35), "net": r.layers(64, 32, 4)}
        return params, (indices, r.normal(64, 64), r.normal(64, 4))

    return Program(loss, make)


def matrix_factorisation() -> Program:
    """Ratings by factors and biases of users and items."""

    def loss(p, params, data):
        users, items, ratings = data
        u, v = params["users"][users], params["items"][items]
        found = 3.5 + params["user"][users] + params["item"][items]
        found = found + p.einsum("nd,nd->n", u, v)
        return jnp.mean((found - ratings) ** 2) + 1e-2 * jnp.mean(u**2 + v**2)

    def make(r):
        params = {
            "users": r.normal(100, 16, scale=0.3),
            "items": r.normal(80, 16, scale=0.3),
            "user": r.normal(100, scale=0.3),
            "item": r.normal(80, scale=0.3),
        }
        ratings = 1 + np.float32(r.integers(5, 400))
        return params, (r.integers(100, 400), r.integers(80, 400), ratings)

    return Program(loss, make)


def factorisation_machine() -> Program:
    """DeepFM: pairs of fields by a square of sums, beside a network."""

    def loss(p, params, data):
        fields, clicks = data
        v = params["factors"][fields]
        pairs = 0.5 * jnp.sum(v.sum(1) ** 2 - (v**2).sum(1), -1)
        deep = mlp(p, params["net"], v.reshape(len(v), -1))[:, 0]
        logits = params["linear"][fields].sum(1) + pairs + deep
        return jnp.mean(jax.nn.softplus(logits) - clicks * logits)

    def make(r):
        params = {
            "factors": r.normal(200, 8, scale=0.2),
            "linear": r.normal(200, scale=0.1),
            "net": r.layers(80, 32, 1),
        }
        return params, (r.integers(200, 128, 10), np.float32(r.integers(2, 128)))

    return Program(loss, make)


def ranking() -> Program:
    """Lists are ranked by a loss whose weights are changes of NDCG."""

    def loss(p, params, data):
        x, grades = data
        scores = mlp(p, params, x)[..., 0]
        ranks = jnp.argsort(jnp.argsort(-scores, -1), -1)
        discounts = 1 / jnp.log2(2.0 + ranks)
        gains = 2.0**grades - 1
        change = (gains[:, :, None] - gains[:, None]) * (
            discounts[:, :, None] - discounts[:, None]
        )
        pairs = jax.nn.softplus(-(scores[:, :, None] - scores[:, None]))
        better = grades[:, :, None] > grades[:, None]
        return jnp.mean(jnp.where(better, jnp.abs(change) * pairs, 0))

    def make(r):
        return r.layers(16, 32, 1), (
            r.normal(16, 10, 16),
            np.float32(r.integers(4, 16, 10)),
        )

    return Program(loss, make)


def poincare() -> Program:
    """Hyperbolic embeddings of a tree, by arcosh of distances."""

    def loss(p, params, data):
        a, b, negatives = data

        def distance(u, v):
            d2 = jnp.sum((u - v) ** 2, -1)
            u2, v2 = jnp.sum(u * u, -1), jnp.sum(v * v, -1)
            return jnp.arccosh(1 + 2 * d2 / ((1 - u2) * (1 - v2)) + 1e-6)

        z = mlp(p, params["net"], params["nodes"], jnp.tanh)
        z = jnp.tanh(z) / 5**0.5 * 0.98
        near = distance(z[a], z[b])
        far = distance(z[a][:, None], z[negatives])
        return jnp.mean(near + jax.nn.logsumexp(-far, axis=1))

    def make(r):
        params = {"nodes": r.normal(63, 16), "net": r.layers(16, 32, 5)}
        children = np.arange(1, 63)
        return params, (
            np.int32(children),
            np.int32((children - 1) // 2),
            r.integers(63, 62, 5),
        )

    return Program(loss, make)


ENTRIES = (
    Entry("GAT", graph_attention),
    Entry("GCN", graph_convolution),
    Entry("message passing", message_passing),
    Entry("BCOO, data", sparse_products),
    Entry("BCOO, weights", sparse_weights),
    Entry("matrix factorization", matrix_factorisation),
    Entry("DeepFM", factorisation_machine),
    Entry("LambdaRank", ranking),
    Entry("Poincare embeddings", poincare),
)
