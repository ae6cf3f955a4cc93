"""Recurrences, attention and dynamic programs over sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import (
    Entry,
    Program,
    cross_entropy,
    dense,
    layer_norm,
    mlp,
)

# ------------------------------------------------------------------------ recurrences


def lstm() -> Program:
    """A layer of LSTM, and a classifier of each state."""

    def loss(p, params, data):
        x, labels = data

        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(
                dense(p, params["cell"], jnp.concatenate([x, h], -1)), 4, -1
            )
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[1], 32), x.dtype)
        _, states = jax.lax.scan(step, (zero, zero), x)
        return cross_entropy(dense(p, params["head"], states), labels)

    def make(r):
        params = {"cell": r.layers(48, 128)[0], "head": r.layers(32, 8)[0]}
        return params, (r.normal(32, 16, 16), r.integers(8, 32, 16))

    return Program(loss, make)


def gru() -> Program:
    """A GRU predicts the next value of noisy waves."""

    def loss(p, params, data):
        def step(h, x):
            z, u = jnp.split(
                dense(p, params["gates"], jnp.concatenate([x, h], -1)), 2, -1
            )
            z, u = jax.nn.sigmoid(z), jax.nn.sigmoid(u)
            new = jnp.tanh(dense(p, params["new"], jnp.concatenate([x, u * h], -1)))
            h = z * h + (1 - z) * new
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros((16, 32), data.dtype), data[:-1])
        return jnp.mean((dense(p, params["head"], states) - data[1:]) ** 2)

    def make(r):
        params = {
            "gates": r.layers(34, 64)[0],
            "new": r.layers(34, 32)[0],
            "head": r.layers(32, 2)[0],
        }
        t = np.arange(32)[:, None, None]
        waves = np.sin(0.3 * t + r.uniform(16, 2, high=6)) + 0.1 * r.normal(32, 16, 2)
        return params, np.float32(waves)

    return Program(loss, make)


def echo_state() -> Program:
    """A fixed reservoir; its scale, its leak and the readout are fitted."""

    def loss(p, params, data):
        inner, outer, x, y = data
        leak = jax.nn.sigmoid(params["leak"])

        def step(h, x):
            pre = params["radius"] * p.dot(h, inner) + p.dot(x, outer)
            h = (1 - leak) * h + leak * jnp.tanh(pre)
            return h, h

        _, states = jax.lax.scan(step, jnp.zeros((8, 64), x.dtype), x)
        found = p.dot(states, params["out"])
        return jnp.mean((found - y) ** 2) + 1e-4 * jnp.sum(params["out"] ** 2)

    def make(r):
        params = {
            "radius": r.normal() * 0 + 0.9,
            "leak": r.normal(),
            "out": 0.3 * r.kernel(64, 1),
        }
        x = r.normal(40, 8, 1)
        y = np.concatenate([np.zeros((3, 8, 1), np.float32), x[:-3]])
        return params, (r.kernel(64, 64), r.normal(1, 64, scale=0.5), x, y)

    return Program(loss, make)


def selective_scan() -> Program:
    """Mamba: a diagonal recurrence whose step depends on the input."""

    def loss(p, params, data):
        x, labels = data
        h = p.dot(x, params["in"])
        h, gate = jnp.split(h, 2, -1)
        h = jax.nn.silu(h)
        dt = jax.nn.softplus(p.dot(h, params["dt"]) + params["bias"])
        b, c = jnp.split(p.dot(h, params["bc"]), 2, -1)
        decay = jnp.exp(-dt[..., None] * jnp.exp(params["log_a"]))
        push = (dt * h)[..., None] * b[..., None, :]

        def join(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = jax.lax.associative_scan(join, (decay, push), axis=1)
        y = jnp.sum(states * c[..., None, :], -1) + params["d"] * h
        return cross_entropy(p.dot(y * jax.nn.silu(gate), params["out"]), labels)

    def make(r):
        params = {
            "in": r.kernel(16, 64),
            "dt": 0.3 * r.kernel(32, 32),
            "bias": r.uniform(32, low=-5, high=-2),
            "bc": r.kernel(32, 16),
            "log_a": np.log(np.tile(np.arange(1, 9, dtype=np.float32), (32, 1))),
            "d": np.ones(32, np.float32),
            "out": r.kernel(32, 8),
        }
        return params, (r.normal(8, 32, 16), r.integers(8, 8, 32))

    return Program(loss, make)


def state_space() -> Program:
    """S4D: kernels of diagonal complex recurrences, applied by FFT."""

    def loss(p, params, data):
        x, labels = data
        n = x.shape[1]
        dt = jnp.exp(params["log_dt"])[:, None]
        a = jax.lax.complex(-jnp.exp(params["log_re"]), params["im"])
        powers = jnp.exp((a * dt)[..., None] * jnp.arange(n))
        c = jax.lax.complex(params["c"][0], params["c"][1])
        kernel = 2 * jnp.real(
            jnp.sum((c * (jnp.exp(a * dt) - 1) / a)[..., None] * powers, 1)
        )
        h = p.dot(x, params["in"])
        spectrum = jnp.fft.rfft(h, 2 * n, axis=1) * jnp.fft.rfft(kernel, 2 * n).T
        y = jnp.fft.irfft(spectrum, 2 * n, axis=1)[:, :n] + params["d"] * h
        h = h + dense(p, params["mix"], jax.nn.gelu(y))
        return cross_entropy(dense(p, params["out"], h.mean(1)), labels)

    def make(r):
        params = {
            "in": r.kernel(4, 16),
            "log_dt": r.uniform(16, low=-5, high=-2),
            "log_re": np.full((16, 8), np.log(0.5), np.float32),
            "im": np.tile(np.float32(np.pi * np.arange(8)), (16, 1)),
            "c": r.normal(2, 16, 8, scale=0.7),
            "d": r.normal(16),
            "mix": r.layers(16, 16)[0],
            "out": r.layers(16, 4)[0],
        }
        return params, (r.normal(16, 64, 4), r.integers(4, 16))

    return Program(loss, make)


def rg_lru() -> Program:
    """Griffin's gated recurrence: the input is scaled by ``sqrt(1 - a**2)``."""

    def loss(p, params, data):
        x, y = data
        gate = jax.nn.sigmoid(dense(p, params["gate"], x))
        decay = jax.nn.sigmoid(dense(p, params["decay"], x))
        pushes = jnp.sqrt(1 - decay**2) * gate * x

        def step(h, now):
            h = now[0] * h + now[1]
            return h, h

        zero = jnp.zeros_like(x[0])
        _, states = jax.lax.scan(step, zero, (decay, pushes))
        found = mlp(p, params["out"], jnp.concatenate([states, decay], -1))
        return jnp.mean((found - y) ** 2)

    def make(r):
        w, b = r.layers(16, 16)[0]
        params = {
            "gate": r.layers(16, 16)[0],
            "decay": (2 * w, b + 4),
            "out": r.layers(32, 32, 4),
        }
        return params, (r.normal(32, 8, 16), r.normal(32, 8, 4))

    return Program(loss, make)


def griffin() -> Program:
    """The same with decays in logarithms, as Griffin writes it."""

    def loss(p, params, data):
        x, y = data
        gate, reset = (
            jax.nn.sigmoid(dense(p, params[k], x)) for k in ("gate", "reset")
        )
        log_a = -8 * reset * jax.nn.softplus(params["decay"])
        a = jnp.exp(log_a)
        pushes = jnp.sqrt(-jnp.expm1(2 * log_a)) * gate * x

        def join(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = jax.lax.associative_scan(join, (a, pushes))
        return jnp.mean((mlp(p, params["out"], states, jax.nn.gelu) - y) ** 2)

    def make(r):
        params = {
            "gate": r.layers(16, 16)[0],
            "reset": r.layers(16, 16)[0],
            "decay": r.uniform(16, low=-9, high=-4),
            "out": r.layers(16, 32, 4),
        }
        return params, (r.normal(32, 8, 16), r.normal(32, 8, 4))

    return Program(loss, make)


# -------------------------------------------------------------------------- attention


def _heads(x, n=4):
    return x.reshape(*x.shape[:-1], n, -1)


def _attention_params(r, d=32, classes=8):
    return {
        "qkv": r.kernel(d, 3 * d),
        "out": r.kernel(d, d),
        "mlp": r.layers(d, 2 * d, d),
        "head": r.kernel(d, classes),
    }


def _attending(attend, changed=None):
    """Returns a program of one block with some attention, and a classifier."""

    def loss(p, params, data):
        x, labels = data
        qkv = jnp.split(p.dot(layer_norm(x), params["qkv"]), 3, -1)
        mixed = attend(p, params, *map(_heads, qkv))
        h = x + p.dot(mixed.reshape(x.shape), params["out"])
        h = h + mlp(p, params["mlp"], layer_norm(h), jax.nn.gelu)
        return cross_entropy(p.dot(layer_norm(h), params["head"]), labels)

    def make(r):
        params = _attention_params(r)
        if changed is not None:
            changed(r, params)
        return params, (r.normal(8, 24, 32), r.integers(8, 8, 24))

    return Program(loss, make)


def _causal(n):
    return jnp.tri(n, dtype=bool)


def rotary_attention() -> Program:
    """Causal attention over rotated queries and keys."""

    def turned(x):
        n, d = x.shape[1], x.shape[-1] // 2
        angles = jnp.arange(n)[:, None] * 100.0 ** (-jnp.arange(d) / d)
        sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(
            x.dtype
        )

    def attend(p, params, q, k, v):
        scores = p.einsum("bihd,bjhd->bhij", turned(q), turned(k)) / 8**0.5
        scores = jnp.where(_causal(q.shape[1]), scores, -1e9)
        return p.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)

    return _attending(attend)


def alibi_attention() -> Program:
    """Causal attention with a bias of the distance, by hand-written softmax."""

    def attend(p, params, q, k, v):
        n = q.shape[1]
        distances = jnp.arange(n)[:, None] - jnp.arange(n)
        slopes = 2.0 ** -jnp.arange(1.0, 5.0)[:, None, None]
        scores = p.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        scores = jnp.where(
            _causal(n), scores - (slopes * distances).astype(q.dtype), -1e9
        )
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        return p.einsum("bhij,bjhd->bihd", weights, v)

    return _attending(attend)


def linear_attention() -> Program:
    """Attention by positive features, with a normaliser."""

    def attend(p, params, q, k, v):
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        scores = p.einsum("bihd,bjhd->bhij", q, k) * _causal(q.shape[1])
        total = p.einsum("bihd,bihd->bhi", q, jnp.cumsum(k, 1))
        mixed = p.einsum("bhij,bjhd->bihd", scores, v)
        return mixed / jnp.swapaxes(total, 1, 2)[..., None]

    return _attending(attend)


def long_linear_attention() -> Program:
    """The same over sums of 256 keys that are not normalised."""

    def loss(p, params, data):
        x, y = data
        q, k, v = jnp.split(p.dot(x, params["qkv"]), 3, -1)
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        memory = p.einsum("bjd,bje->bde", k, v)
        total = p.dot(q, k.sum(1)[..., None])
        mixed = p.einsum("bid,bde->bie", q, memory) / total
        return jnp.mean((mlp(p, params["mlp"], mixed) - y) ** 2)

    def make(r):
        params = {"qkv": r.kernel(16, 96), "mlp": r.layers(32, 32, 4)}
        return params, (r.normal(4, 256, 16), r.normal(4, 256, 4))

    return Program(loss, make)


def stick_breaking_attention() -> Program:
    """Each key takes a part of the stick that nearer keys have left."""

    def attend(p, params, q, k, v):
        n = q.shape[1]
        before = jnp.tri(n, k=-1, dtype=bool)
        beta = jax.nn.sigmoid(2 * p.einsum("bihd,bjhd->bhij", q, k) / 8**0.5)
        left = jnp.where(before, jnp.log(1 - beta), 0)
        after = jnp.flip(jnp.cumsum(jnp.flip(left, -1), -1), -1) - left
        weights = jnp.where(before, beta * jnp.exp(after), 0)
        return p.einsum("bhij,bjhd->bihd", weights, v)

    return _attending(attend)


def sparsemax_attention() -> Program:
    """Attention with weights by projection onto the simplex."""

    def attend(p, params, q, k, v):
        scores = p.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        ordered = -jnp.sort(-scores, -1)
        n = jnp.arange(1, scores.shape[-1] + 1)
        sums = jnp.cumsum(ordered, -1)
        kept = jnp.sum(1 + n * ordered > sums, -1, keepdims=True)
        tau = (jnp.take_along_axis(sums, kept - 1, -1) - 1) / kept
        return p.einsum("bhij,bjhd->bihd", jax.nn.relu(scores - tau), v)

    return _attending(attend)


def retention() -> Program:
    """RetNet: decayed scores and a norm of each head."""

    def attend(p, params, q, k, v):
        n = q.shape[1]
        decay = 1 - 2.0 ** (-5 - jnp.arange(4.0))
        distances = jnp.maximum(jnp.arange(n)[:, None] - jnp.arange(n), 0)
        mask = _causal(n) * decay[:, None, None] ** distances
        scores = p.einsum("bihd,bjhd->bhij", q, k) / 8**0.5 * mask.astype(q.dtype)
        scores = scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), 1)
        return layer_norm(p.einsum("bhij,bjhd->bihd", scores, v))

    return _attending(attend)


def gated_delta_rule() -> Program:
    """A memory matrix that erases a key's value before it writes the new one."""

    def loss(p, params, data):
        x, y = data
        q, k, v = jnp.split(p.dot(x, params["qkv"]), 3, -1)
        k = k / jnp.sqrt(jnp.sum(k * k, -1, keepdims=True) + 1e-6)
        beta = jax.nn.sigmoid(dense(p, params["beta"], x))

        def step(memory, now):
            q, k, v, beta = now
            old = p.einsum("bde,bd->be", memory, k)
            memory = memory + p.einsum("bd,be->bde", k, beta * (v - old))
            return memory, p.einsum("bde,bd->be", memory, q)

        zero = jnp.zeros((8, 16, 16), x.dtype)
        _, mixed = jax.lax.scan(step, zero, (q, k, v, beta))
        return jnp.mean((mlp(p, params["out"], mixed) - y) ** 2)

    def make(r):
        params = {
            "qkv": r.kernel(16, 48),
            "beta": r.layers(16, 1)[0],
            "out": r.layers(16, 32, 4),
        }
        return params, (r.normal(32, 8, 16), r.normal(32, 8, 4))

    return Program(loss, make)


def low_rank_adapters() -> Program:
    """Only low-rank changes of frozen weights are trained."""

    def loss(p, params, data):
        weights, x, labels = data
        h = x
        for w, (a, b) in zip(weights, params, strict=True):
            h = jax.nn.gelu(p.dot(h, w) + 2 * p.dot(p.dot(h, a), b))
        return cross_entropy(h, labels)

    def make(r):
        params = [(r.kernel(64, 4), r.normal(4, 64, scale=0.05)) for _ in range(3)]
        weights = [1.4 * r.kernel(64, 64) for _ in range(3)]
        return params, (weights, r.normal(64, 64), r.integers(64, 64))

    return Program(loss, make)


def mixture_of_experts() -> Program:
    """Two of eight experts for each token, with losses of balance and of logits."""

    def loss(p, params, data):
        x, labels = data
        logits = p.dot(x, params["router"])
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
        gates = gates / gates.sum(-1, keepdims=True)
        weights = jnp.sum(
            jax.nn.one_hot(chosen, 8, dtype=x.dtype) * gates[..., None], 1
        )
        h = jax.nn.gelu(p.einsum("nd,edf->nef", x, params["in"]))
        y = p.einsum("nef,efd->ned", h, params["out"])
        y = x + jnp.sum(y * weights[..., None], 1)
        share = jnp.mean(weights > 0, 0) * jnp.mean(jax.nn.softmax(logits), 0)
        z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        loss = cross_entropy(p.dot(layer_norm(y), params["head"]), labels)
        return loss + 0.08 * share.sum() + 1e-3 * z

    def make(r):
        params = {
            "router": 2 * r.kernel(32, 8),
            "in": r.normal(8, 32, 32, scale=0.18),
            "out": r.normal(8, 32, 32, scale=0.18),
            "head": r.kernel(32, 8),
        }
        return params, (r.normal(64, 32), r.integers(8, 64))

    return Program(loss, make)


def gated_unit() -> Program:
    """A gate feeds a product, and an entropy with ``log(1 - g)``."""

    def loss(p, params, data):
        x, y = data
        g = jax.nn.sigmoid(dense(p, params["gate"], x))
        h = g * p.dot(x, params["value"])
        found = p.dot(h, params["out"]) + p.dot(g, params["skip"])
        entropy = -(g * jnp.log(g) + (1 - g) * jnp.log(1 - g))
        return jnp.mean((found - y) ** 2) - 0.1 * jnp.mean(entropy)

    def make(r):
        w, b = r.layers(32, 64)[0]
        params = {
            "gate": (2.5 * w, b),
            "value": r.kernel(32, 64),
            "out": r.kernel(64, 8),
            "skip": r.kernel(64, 8),
        }
        return params, (r.normal(64, 32), r.normal(64, 8))

    return Program(loss, make)


def gelu_network() -> Program:
    """A network with gelu by tanh whose pre-activations reach some hundreds."""

    def loss(p, params, data):
        x, y = data
        return jnp.mean((mlp(p, params, x, jax.nn.gelu) - y) ** 2)

    def make(r):
        return r.layers(32, 64, 64, 4), (60 * r.normal(64, 32), r.normal(64, 4))

    return Program(loss, make)


def word_vectors() -> Program:
    """Skip-grams with negative samples."""

    def loss(p, params, data):
        centres, contexts, negatives = data
        v = params["in"][centres]
        right = jnp.sum(v * params["out"][contexts], -1)
        wrong = p.einsum("nd,nkd->nk", v, params["out"][negatives])
        logp = jax.nn.log_sigmoid(right) + jax.nn.log_sigmoid(-wrong).sum(-1)
        return -jnp.mean(logp)

    def make(r):
        params = {
            "in": r.normal(200, 32, scale=0.3),
            "out": r.normal(200, 32, scale=0.3),
        }
        return params, (
            r.integers(200, 256),
            r.integers(200, 256),
            r.integers(200, 256, 5),
        )

    return Program(loss, make)


def hopfield() -> Program:
    """Two steps of a modern Hopfield network complete patterns."""

    def loss(p, params, data):
        x, aim = data
        for _ in range(2):
            scores = jnp.exp(params["beta"]) * p.dot(x, params["patterns"].T)
            x = p.dot(jax.nn.softmax(scores), params["patterns"])
        return jnp.mean((x - aim) ** 2)

    def make(r):
        params = {"patterns": r.normal(32, 16), "beta": r.normal() * 0 - 0.7}
        aim = params["patterns"][r.integers(32, 48)]
        return params, (aim + 0.5 * r.normal(48, 16), aim)

    return Program(loss, make)


# ------------------------------------------------------------------- dynamic programs


def _soft_max(*values):
    return jax.nn.logsumexp(jnp.stack(values), axis=0)


def smith_waterman() -> Program:
    """Soft local alignments of two sequences' embeddings, by anti-diagonals."""

    def loss(p, params, data):
        a, b, aim = data
        za, zb = (mlp(p, params["net"], x, jnp.tanh) for x in (a, b))
        scores = p.einsum("bid,bjd->ijb", za, zb) / 2 + params["bias"]
        gap = -jax.nn.softplus(params["gap"])

        def row(above, scores):
            def cell(carry, now):
                left, corner = carry
                over, score = now
                new = _soft_max(corner + score, over + gap, left + gap, 0 * score)
                return (new, over), new

            zero = jnp.zeros_like(scores[0])
            _, found = jax.lax.scan(cell, (zero, zero), (above, scores))
            return found, found

        _, table = jax.lax.scan(row, jnp.zeros_like(scores[0]), scores)
        best = jax.nn.logsumexp(table, axis=(0, 1))
        return jnp.mean((best - aim) ** 2)

    def make(r):
        params = {
            "net": r.layers(8, 32, 16),
            "bias": r.normal() - 1,
            "gap": r.normal() + 1,
        }
        a = r.normal(8, 12, 8)
        return params, (
            a,
            np.roll(a, 2, 1) + 0.3 * r.normal(8, 12, 8),
            20 + r.normal(8),
        )

    return Program(loss, make)


def time_warping() -> Program:
    """Soft dynamic time warping between predicted and given series."""

    def loss(p, params, data):
        x, y = data
        z = mlp(p, params, x, jnp.tanh)
        costs = jnp.transpose(jnp.sum((z[:, :, None] - y[:, None]) ** 2, -1), (1, 2, 0))

        def row(above, costs):
            def cell(carry, now):
                left, corner = carry
                over, cost = now
                new = cost - 0.1 * _soft_max(-corner / 0.1, -over / 0.1, -left / 0.1)
                return (new, over), new

            before = jnp.full_like(costs[0], 1e4)
            start = (before, above[0])
            _, found = jax.lax.scan(cell, start, (above[1:], costs))
            return jnp.concatenate([before[None], found]), ()

        first = jnp.full((costs.shape[1] + 1, costs.shape[2]), 1e4, costs.dtype)
        last, _ = jax.lax.scan(row, first.at[0].set(0), costs)
        return jnp.mean(last[-1])

    def make(r):
        t = np.linspace(0, 6, 12, dtype=np.float32)
        y = np.sin(t + r.uniform(8, 1))[..., None]
        x = np.concatenate(
            [np.sin(1.1 * t + r.uniform(8, 1))[..., None], y * 0 + t[:, None]], -1
        )
        return r.layers(2, 32, 1), (np.float32(x), np.float32(y))

    return Program(loss, make)


def conditional_random_field() -> Program:
    """Tags of a sequence by a linear chain."""

    def loss(p, params, data):
        x, tags = data
        scores = mlp(p, params["net"], x, jnp.tanh)
        moves = params["moves"]
        path = jnp.take_along_axis(scores, tags[..., None], -1)[..., 0].sum(0)
        path = path + moves[tags[:-1], tags[1:]].sum(0)

        def step(alpha, scores):
            return scores + jax.nn.logsumexp(alpha[:, :, None] + moves, axis=1), ()

        alpha, _ = jax.lax.scan(step, scores[0], scores[1:])
        return jnp.mean(jax.nn.logsumexp(alpha, -1) - path)

    def make(r):
        params = {"net": r.layers(16, 32, 6), "moves": r.normal(6, 6)}
        return params, (r.normal(20, 16, 16), r.integers(6, 20, 16))

    return Program(loss, make)


def hidden_markov() -> Program:
    """A hidden Markov model in probabilities that are scaled at each step."""

    def loss(p, params, data):
        moves = jax.nn.softmax(params["moves"])
        emits = jax.nn.softmax(params["emits"])

        def step(alpha, seen):
            alpha = p.dot(alpha, moves) * emits.T[seen]
            total = alpha.sum(-1, keepdims=True)
            return alpha / total, jnp.log(total[:, 0])

        start = jnp.broadcast_to(jax.nn.softmax(params["start"]), (16, 8))
        _, logs = jax.lax.scan(step, start, data)
        return -jnp.mean(logs)

    def make(r):
        params = {
            "moves": r.normal(8, 8),
            "emits": 2 * r.normal(8, 12),
            "start": r.normal(8),
        }
        return params, r.integers(12, 40, 16)

    return Program(loss, make)


def log_hidden_markov() -> Program:
    """A hidden Markov model in logarithms, with emissions by a network."""

    def loss(p, params, data):
        moves = jax.nn.log_softmax(params["moves"])
        logp = -0.5 * jnp.sum((data[..., None, :] - params["means"]) ** 2, -1)

        def step(alpha, logp):
            top = alpha.max(-1, keepdims=True)
            mixed = p.dot(jnp.exp(alpha - top), jnp.exp(moves))
            return jnp.log(mixed) + top + logp, ()

        alpha, _ = jax.lax.scan(step, logp[0], logp[1:])
        return -jnp.mean(jax.nn.logsumexp(alpha, -1)) / len(data)

    def make(r):
        params = {"moves": 2 * r.normal(8, 8), "means": 2 * r.normal(8, 4)}
        return params, params["means"][r.integers(8, 40, 16)] + r.normal(40, 16, 4)

    return Program(loss, make)


def transducer() -> Program:
    """RNN-T: all alignments of a joint network's outputs."""

    def loss(p, params, data):
        x, labels = data
        audio = mlp(p, params["audio"], x, jnp.tanh)
        text = jnp.concatenate([jnp.zeros((4, 1), int), labels], 1)
        text = p.dot(params["embed"][text], params["text"])
        joint = jnp.tanh(audio[:, :, None] + text[:, None])
        logp = jax.nn.log_softmax(dense(p, params["out"], joint))
        blank = jnp.moveaxis(logp[..., 0], 0, -1)
        emit = jnp.take_along_axis(logp[:, :, :-1], labels[:, None, :, None], -1)[
            ..., 0
        ]
        emit = jnp.moveaxis(emit, 0, -1)

        def along(start, emits):
            def cell(left, now):
                over, emitted = now
                new = _soft_max(over, left + emitted)
                return new, new

            _, rest = jax.lax.scan(cell, start[0], (start[1:], emits))
            return jnp.concatenate([start[:1], rest])

        first = jnp.full(blank.shape[1:], -1e4, blank.dtype).at[0].set(0)
        alpha = along(first, emit[0])

        def step(alpha, now):
            blanks, emits = now
            return along(alpha + blanks, emits), ()

        alpha, _ = jax.lax.scan(step, alpha, (blank[:-1], emit[1:]))
        return -jnp.mean(alpha[-1] + blank[-1, -1])

    def make(r):
        params = {
            "audio": r.layers(16, 32, 32),
            "embed": r.normal(10, 16),
            "text": r.kernel(16, 32),
            "out": r.layers(32, 10)[0],
        }
        return params, (r.normal(4, 16, 16), 1 + r.integers(9, 4, 6))

    return Program(loss, make)


def connectionist() -> Program:
    """CTC over frames of a network."""

    def loss(p, params, data):
        x, labels = data
        logp = jax.nn.log_softmax(mlp(p, params, x, jnp.tanh))
        states = jnp.zeros((labels.shape[0], 2 * labels.shape[1] + 1), labels.dtype)
        states = states.at[:, 1::2].set(labels)
        skips = (states[:, 2:] != states[:, :-2]) & (states[:, 2:] > 0)
        skips = jnp.pad(skips, ((0, 0), (2, 0)))
        frames = jnp.take_along_axis(logp, states[:, None], -1)
        low = -1e4

        def step(alpha, frame):
            one = jnp.pad(alpha, ((0, 0), (1, 0)), constant_values=low)[:, :-1]
            two = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=low)[:, :-2]
            return frame + _soft_max(alpha, one, jnp.where(skips, two, low)), ()

        frames = jnp.swapaxes(frames, 0, 1)
        first = jnp.where(jnp.arange(states.shape[1]) < 2, frames[0], low)
        alpha, _ = jax.lax.scan(step, first, frames[1:])
        return -jnp.mean(_soft_max(alpha[:, -1], alpha[:, -2]))

    def make(r):
        return r.layers(16, 64, 10), (r.normal(8, 24, 16), 1 + r.integers(9, 8, 6))

    return Program(loss, make)


ENTRIES = (
    Entry("LSTM", lstm),
    Entry("GRU", gru),
    Entry("echo state network", echo_state),
    Entry("S4D", state_space),
    Entry("Mamba's scan", selective_scan),
    Entry("RG-LRU", rg_lru),
    Entry("Griffin, in logarithms", griffin),
    Entry("gated delta rule", gated_delta_rule),
    Entry("rotary attention", rotary_attention),
    Entry("ALiBi, softmax by hand", alibi_attention),
    Entry("linear attention", linear_attention),
    Entry("linear attention, 256 keys", long_linear_attention),
    Entry("stick-breaking attention", stick_breaking_attention),
    Entry("sparsemax attention", sparsemax_attention),
    Entry("retention", retention),
    Entry("Hopfield network", hopfield),
    Entry("LoRA", low_rank_adapters),
    Entry("mixture of experts", mixture_of_experts),
    Entry("gated unit with entropy", gated_unit),
    Entry("gelu network, large inputs", gelu_network),
    Entry("word2vec", word_vectors),
    Entry("Smith-Waterman", smith_waterman),
    Entry("soft DTW", time_warping),
    Entry("CRF", conditional_random_field),
    Entry("HMM, scaled", hidden_markov),
    Entry("HMM, in logarithms", log_hidden_markov),
    Entry("RNN-T", transducer),
    Entry("CTC", connectionist),
)
