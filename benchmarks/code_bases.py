"""Models with the structure of known code bases, beside their own 16-bit recipes.

Each loss is written once. With ``low="bfloat16"`` it casts what the code base casts, in
the same places; without, it is the float32 program that autocast converts.

    python -m benchmarks.code_bases --json benchmarks/results
    python -m benchmarks.code_bases MaxText     # One, and nothing is written.

Sizes are small: errors depend on the structure, not on the width.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp
from benchmarks.report import stamp, write
from benchmarks.sweep.measure import SEEDS, errors_of, in_float32, share_low
from benchmarks.sweep.program import Random, cross_entropy

LOW = "bfloat16"


class CodeBase(NamedTuple):
    """A model with the structure of a code base.

    Attributes:
      name: of the code base.
      model: what the model is.
      recipe: what the code base casts; empty if it runs in float32 alone.
      loss: a function of ``low``, ``params`` and ``data`` that returns a number.
      make: a function of ``Random`` that returns ``params`` and ``data``.
      careful: rules for a program that 16 bits are wrong for; None for the others.
    """

    name: str
    model: str
    recipe: str
    loss: Callable[..., jax.Array]
    make: Callable[[Random], tuple[Any, Any]]
    careful: jmp.Rules | None = None


class Row(NamedTuple):
    """Errors of the gradients of one model, against float32.

    Attributes:
      name: of the code base.
      model: what the model is.
      casts: what its own recipe casts.
      recipe: the error of this recipe; None if it has none.
      mixed: that of ``"mixed"`` in bfloat16.
      o1: that of ``"O1"`` in bfloat16.
      float16: that of ``"mixed"`` in float16, under a loss scale.
      careful: that of ``"mixed"`` with its careful rules; None if it has none.
      share: of the work of products, what ``"mixed"`` runs in 16 bits.
    """

    name: str
    model: str
    casts: str
    recipe: float | None
    mixed: float
    o1: float
    float16: float
    careful: float | None
    share: float


# ----------------------------------------------------------------------------- parts


def _cast(low: str | None, tree: Any) -> Any:
    return tree if low is None else jmp.cast_tree(tree, low)


def _dense(low: str | None, layer: Any, x: jax.Array) -> jax.Array:
    """Casts the input and the parameters, as a layer with a ``dtype`` does."""
    x, (w, b) = _cast(low, (x, layer))
    return x @ w + b


def _norm(x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Layer norm in a dtype, float32 by default; its result has that of ``x``."""
    wide = x.astype(dtype)
    centered = wide - jnp.mean(wide, -1, keepdims=True)
    variance = jnp.mean(centered * centered, -1, keepdims=True)
    return (centered * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """RMS norm in float32, as ``_norm``."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def _heads(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], n, -1)


def _waves(positions: jax.Array, n: int, longest: float) -> jax.Array:
    """Sines and cosines of positions: ``[..., n]``."""
    periods = np.float32(longest) ** (np.arange(n // 2, dtype=np.float32) / (n // 2))
    angles = positions[..., None] / periods
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


# --------------------------------------------------------------------------- models


def _pairs(low: str | None, params: Any, data: Any) -> jax.Array:
    """Triangle products, attention with a bias of pairs, gated layers, a distogram."""
    pair, labels = data
    params = _cast(low, params)
    x = _dense(None, params["embed"], _cast(low, pair))
    for block in params["blocks"]:
        y = _norm(x)
        left, right = (
            jax.nn.sigmoid(_dense(None, block[f"{side} gate"], y))
            * _dense(None, block[side], y)
            for side in ("left", "right")
        )
        product = _norm(jnp.einsum("ikc,jkc->ijc", left, right))
        gate = jax.nn.sigmoid(_dense(None, block["gate"], y))
        x = x + gate * _dense(None, block["out"], product)

        y = _norm(x)
        q, k, v = (_heads(_dense(None, block[name], y), 4) for name in "qkv")
        # Its attention takes logits and bias in float32.
        logits = jnp.einsum(
            "rqhc,rkhc->rhqk", q, k, preferred_element_type=jnp.float32
        ) / np.sqrt(q.shape[-1])
        bias = jnp.transpose(_dense(None, block["bias"], y), (2, 0, 1))
        weights = jax.nn.softmax(logits + bias.astype(jnp.float32)).astype(v.dtype)
        mixed = jnp.einsum("rhqk,rkhc->rqhc", weights, v).reshape(x.shape)
        gate = jax.nn.sigmoid(_dense(None, block["attention gate"], y))
        x = x + _dense(None, block["attended"], mixed * gate)

        gate, up = jnp.split(_dense(None, block["up"], _norm(x)), 2, -1)
        x = x + _dense(None, block["down"], jax.nn.swish(gate) * up)
    half = _dense(None, params["head"], x)
    logits = (half + jnp.swapaxes(half, 0, 1)).astype(jnp.float32)
    return cross_entropy(logits, labels)


def _make_pairs(r: Random) -> Any:
    c = 32
    square = (*("left", "right", "left gate", "right gate", "gate", "out"), *"qkv")
    square = (*square, "attention gate", "attended")

    def block() -> Any:
        layers = {name: _layer(r, c, c) for name in square}
        wide = {"bias": _layer(r, c, 4), "up": _layer(r, c, 4 * c)}
        return layers | wide | {"down": _layer(r, 2 * c, c)}

    params = {"embed": _layer(r, 8, c), "blocks": [block() for _ in range(2)]}
    params["head"] = _layer(r, c, 16)
    return params, (r.normal(12, 12, 8), r.integers(16, 12, 12))


def _layer(r: Random, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    return r.layers(n, m)[0]


def _diffusion_transformer(low: str | None, params: Any, data: Any) -> jax.Array:
    """Flow matching on patches; time and class change scales and shifts of norms."""
    patches, noise, t, labels = data
    wide_t = t[:, None, None]
    x = _dense(low, params["patch"], (1 - wide_t) * noise + wide_t * patches)
    x = _cast(low, x + params["positions"])
    hidden = jax.nn.silu(_dense(low, params["time"][0], _cast(low, _waves(t, 32, 1e4))))
    # The second layer of the time has no dtype in its code: it runs in float32.
    c = _dense(None, params["time"][1], hidden) + params["labels"][labels]
    for block in params["blocks"]:
        changes = _dense(low, block["changes"], jax.nn.silu(c))
        shift, scale, gate, shift_2, scale_2, gate_2 = jnp.split(changes[:, None], 6, 2)
        y = _norm(x) * (1 + scale) + shift
        q, k, v = (_heads(_dense(low, block[name], y), 4) for name in "qkv")
        logits = jnp.einsum("bqhc,bkhc->bhqk", q / q.shape[-1], k)
        weights = jax.nn.softmax(logits.astype(jnp.float32))
        mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, v.astype(jnp.float32))
        x = x + gate * _dense(low, block["attended"], mixed.reshape(x.shape))
        y = _norm(x) * (1 + scale_2) + shift_2
        y = jax.nn.gelu(_dense(low, block["up"], y))
        x = x + gate_2 * _dense(low, block["down"], y)
    scale, shift = jnp.split(_dense(low, params["changes"], jax.nn.silu(c)), 2, -1)
    x = _norm(x) * (1 + scale[:, None]) + shift[:, None]
    velocity = _dense(low, params["out"], x)
    return jnp.mean((velocity - (patches - noise)) ** 2)


def _make_diffusion_transformer(r: Random) -> Any:
    c = 32

    def block() -> Any:
        layers = {name: _layer(r, c, c) for name in (*"qkv", "attended")}
        layers |= {"changes": _layer(r, c, 6 * c), "up": _layer(r, c, 4 * c)}
        return layers | {"down": _layer(r, 4 * c, c)}

    params = {
        "patch": _layer(r, 12, c),
        "positions": r.normal(16, c),
        "time": [_layer(r, 32, c), _layer(r, c, c)],
        "labels": r.normal(10, c, scale=0.5),
        "blocks": [block() for _ in range(2)],
        "changes": _layer(r, c, 2 * c),
        "out": _layer(r, c, 12),
    }
    data = r.normal(4, 16, 12), r.normal(4, 16, 12), r.uniform(4), r.integers(10, 4)
    return params, data


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of ``[batch, length, heads, size]``, in float32."""
    n = x.shape[-1] // 2
    timescale = np.float32(1e4) ** (np.arange(n, dtype=np.float32) / n)
    angles = (jnp.arange(x.shape[1])[:, None] / timescale)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _flow_policy(low: str | None, params: Any, data: Any) -> jax.Array:
    """Two sets of weights, one attention: a prefix and noisy actions of a robot."""
    tokens, actions, noise, t = data
    wide_t = t[:, None, None]
    noisy = wide_t * noise + (1 - wide_t) * actions
    time = jnp.broadcast_to(_waves(t * 250, 32, 1e3)[:, None], (*noisy.shape[:2], 32))
    # What is around the transformer runs in float32.
    both = jnp.concatenate([_dense(None, params["in"], noisy), time], -1)
    hidden = jax.nn.swish(_dense(None, params["time"][0], both))
    suffix = _dense(None, params["time"][1], hidden)
    xs = [_cast(low, params["tokens"][tokens] * 4), _cast(low, suffix)]
    n = xs[0].shape[1]
    length = n + xs[1].shape[1]
    sees = np.arange(length)[None] < np.where(np.arange(length) < n, n, length)[:, None]
    for block in params["blocks"]:
        ys = [_rms_norm(e["norm"], x) for e, x in zip(block, xs, strict=True)]
        q, k, v = (
            _heads(
                jnp.concatenate(
                    [y @ _cast(low, e[m]) for e, y in zip(block, ys, strict=True)], 1
                ),
                4,
            )
            for m in "qkv"
        )
        logits = jnp.einsum(
            "bqhc,bkhc->bhqk",
            _rotated(q) * q.shape[-1] ** -0.5,
            _rotated(k),
            preferred_element_type=jnp.float32,
        )
        weights = jax.nn.softmax(jnp.where(sees, logits, -2e38)).astype(v.dtype)
        mixed = jnp.einsum("bhqk,bkhc->bqhc", weights, v)
        mixed = jnp.split(mixed.reshape(*mixed.shape[:2], -1), [n], 1)
        for i, (e, y) in enumerate(zip(block, mixed, strict=True)):
            x = xs[i] + y @ _cast(low, e["attended"])
            y = _rms_norm(e["second norm"], x)
            gate = jax.nn.gelu(y @ _cast(low, e["gate"])) * (y @ _cast(low, e["up"]))
            xs[i] = x + gate @ _cast(low, e["down"])
    out = _rms_norm(params["norm"], xs[1]).astype(jnp.float32)
    return jnp.mean((_dense(None, params["out"], out) - (noise - actions)) ** 2)


def _make_flow_policy(r: Random) -> Any:
    c = 32

    def expert() -> Any:
        square = {name: r.kernel(c, c) for name in (*"qkv", "attended")}
        wide = {name: r.kernel(c, 2 * c) for name in ("gate", "up")}
        norms = {name: 1 + r.normal(c, scale=0.1) for name in ("norm", "second norm")}
        return square | wide | norms | {"down": r.kernel(2 * c, c)}

    params = {
        "tokens": r.normal(64, c, scale=0.25),
        "in": _layer(r, 7, c),
        "time": r.layers(2 * c, c, c),
        "blocks": [[expert(), expert()] for _ in range(2)],
        "norm": 1 + r.normal(c, scale=0.1),
        "out": _layer(r, c, 7),
    }
    data = r.integers(64, 4, 12), r.normal(4, 8, 7), r.normal(4, 8, 7), r.uniform(4)
    return params, data


def _mesh_network(low: str | None, params: Any, data: Any) -> jax.Array:
    """Messages on the edges of a mesh; even its loss is in bfloat16."""
    params, (nodes, edges, senders, receivers, targets) = _cast(low, (params, data))

    def layers(two: Any, *xs: jax.Array) -> jax.Array:
        hidden = _dense(None, two[0], jnp.concatenate(xs, -1))
        out = _dense(None, two[1], jax.nn.swish(hidden))
        return _norm(out, out.dtype)  # Haiku's norms have the dtype of their input.

    x, e = layers(params["nodes"], nodes), layers(params["edges"], edges)
    for block in params["blocks"]:
        message = layers(block["edges"], e, x[senders], x[receivers])
        total = jax.ops.segment_sum(message, receivers, len(nodes))
        x, e = x + layers(block["nodes"], x, total), e + message
    out = _dense(
        None, params["out"][1], jax.nn.swish(_dense(None, params["out"][0], x))
    )
    return jnp.mean((out - targets) ** 2).astype(jnp.float32)


def _make_mesh_network(r: Random) -> Any:
    c, n, m = 32, 48, 192
    blocks = [
        {"edges": r.layers(3 * c, c, c), "nodes": r.layers(2 * c, c, c)}
        for _ in range(4)
    ]
    params = {"nodes": r.layers(6, c, c), "edges": r.layers(4, c, c), "blocks": blocks}
    params["out"] = r.layers(c, c, 6)
    ends = r.integers(n, m), r.integers(n, m)
    return params, (r.normal(n, 6), r.normal(m, 4), *ends, r.normal(n, 6))


def _spectral_model(low: str | None, params: Any, data: Any) -> jax.Array:
    """Steps between a grid and harmonics, all transforms at HIGHEST, and a network."""
    del low  # The code base has no 16-bit recipe.
    start, target = data
    highest = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    angles = 2 * np.pi * np.arange(32)[:, None] * np.arange(1, 9)[None] / 32
    basis = np.concatenate([np.cos(angles), np.sin(angles)], 1) / 4
    basis = np.float32(basis)
    waves = np.tile(np.arange(1, 9, dtype=np.float32), 2)

    def step(spectrum: jax.Array, _: None) -> tuple[jax.Array, None]:
        grid = highest(spectrum, basis.T)  # [levels, longitudes]
        cosines, sines = jnp.split(spectrum, 2, -1)
        turned = jnp.concatenate([sines, -cosines], -1) * waves
        slope = highest(turned, basis.T)
        column = jnp.concatenate([grid, slope]).T  # The network sees one column.
        hidden = jax.nn.silu(_dense(None, params[0], column))
        hidden = hidden + jax.nn.silu(_dense(None, params[1], hidden))
        tendency = _dense(None, params[2], hidden).T - grid * slope
        damped = spectrum * jnp.exp(-1e-3 * waves**2)
        return damped + 0.05 * highest(tendency, basis), None

    end, _ = jax.lax.scan(step, start, None, length=8)
    return jnp.mean((end - target) ** 2)


def _make_spectral_model(r: Random) -> Any:
    layers = r.layers(16, 32, 32, 8)
    return layers, (r.normal(8, 16, scale=0.5), r.normal(8, 16, scale=0.5))


def _world_model(low: str | None, params: Any, data: Any) -> jax.Array:
    """A recurrent state with categorical samples; its carry is in bfloat16."""
    tokens, actions, gumbel = data
    n, classes = 8, 8

    def layer(name: str, x: jax.Array) -> jax.Array:
        w, b, scale = params[name]
        return jax.nn.gelu(_rms_norm(scale, _dense(low, (w, b), x)))

    def log_probs(logits: jax.Array) -> jax.Array:
        probs = jax.nn.softmax(_heads(logits, n).astype(jnp.float32))
        return jnp.log(0.99 * probs + 0.01 / classes)

    def step(carry: Any, now: Any) -> Any:
        deter, stoch = carry
        token, action, noise = now
        action = action / jax.lax.stop_gradient(jnp.maximum(1, jnp.abs(action)))
        parts = layer("deter", deter), layer("stoch", stoch), layer("action", action)
        gates = _dense(
            low, params["gates"], layer("joined", jnp.concatenate(parts, -1))
        )
        reset, new, update = jnp.split(gates, 3, -1)
        new = jnp.tanh(jax.nn.sigmoid(reset) * new)
        update = jax.nn.sigmoid(update - 1)
        deter = update * new + (1 - update) * deter
        seen = layer("seen", jnp.concatenate([deter, token], -1))
        logits = _dense(low, params["posterior"], seen)
        logp = log_probs(logits)
        picked = jax.nn.one_hot(jnp.argmax(logp + noise, -1), classes)
        probs = jnp.exp(logp)
        sample = jax.lax.stop_gradient(picked - probs) + probs  # Straight through.
        stoch = sample.reshape(len(deter), -1).astype(deter.dtype)
        return (deter, stoch), (deter, stoch, logits)

    batch = tokens.shape[1]
    carry = jnp.zeros((batch, 64)), jnp.zeros((batch, n * classes))
    scanned = *_cast(low, (tokens, actions)), gumbel
    _, (deter, stoch, post) = jax.lax.scan(step, _cast(low, carry), scanned)
    prior = log_probs(_dense(low, params["prior"], layer("guess", deter)))
    post = log_probs(post)
    kl = jnp.sum(jnp.exp(post) * (post - prior), (-2, -1))
    rebuilt = _dense(low, params["decoder"], jnp.concatenate([deter, stoch], -1))
    error = jnp.sum((rebuilt.astype(jnp.float32) - tokens) ** 2, -1)
    return jnp.mean(jnp.maximum(kl, 1) + error)


def _make_world_model(r: Random) -> Any:
    sizes = {
        "deter": (64, 32),
        "stoch": (64, 32),
        "action": (4, 32),
        "joined": (96, 64),
    }
    sizes |= {"seen": (80, 32), "guess": (64, 32)}
    params: dict[str, Any] = {
        name: (*_layer(r, *size), 1 + r.normal(size[1], scale=0.1))
        for name, size in sizes.items()
    }
    dense = {"gates": (64, 192), "posterior": (32, 64), "prior": (32, 64)}
    dense["decoder"] = (128, 16)
    params |= {name: _layer(r, *size) for name, size in dense.items()}
    gumbel = np.float32(-np.log(-np.log(r.uniform(8, 4, 8, 8, low=0.01, high=0.99))))
    return params, (r.normal(8, 4, 16), r.normal(8, 4, 4), gumbel)


def _experts(low: str | None, params: Any, data: Any) -> jax.Array:
    """A decoder's block: two of eight experts for each token."""
    tokens, labels = data
    x = _cast(low, params["embed"])[tokens]
    for block in params["blocks"]:
        y = _rms_norm(block["norm"], x)
        q, k, v = (_heads(y @ _cast(low, block[name]), 4) for name in "qkv")
        logits = jnp.einsum("bqhc,bkhc->bhqk", _rotated(q), _rotated(k))
        logits = logits / np.sqrt(q.shape[-1])
        mask = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e9).astype(jnp.float32))
        mixed = jnp.einsum("bhqk,bkhc->bqhc", weights.astype(v.dtype), v)
        x = x + mixed.reshape(x.shape) @ _cast(low, block["attended"])

        y = _rms_norm(block["second norm"], x)
        gates, chosen = jax.lax.top_k(y @ _cast(low, block["router"]), 2)
        # The weights of the experts and their sum are in float32.
        gates = jax.nn.softmax(gates.astype(jnp.float32))
        spread = jnp.sum(jax.nn.one_hot(chosen, 8) * gates[..., None], -2)
        gate = jnp.einsum("btc,ecd->bted", y, _cast(low, block["gate"]))
        up = jnp.einsum("btc,ecd->bted", y, _cast(low, block["up"]))
        inner = jax.nn.silu(gate) * up
        out = jnp.einsum("bted,edc->btec", inner, _cast(low, block["down"]))
        summed = jnp.einsum("btec,bte->btc", out.astype(jnp.float32), spread)
        x = x + summed.astype(x.dtype)
    logits = _rms_norm(params["norm"], x) @ _cast(low, params["head"])
    return cross_entropy(logits.astype(jnp.float32), labels)


def _make_experts(r: Random) -> Any:
    c = 32

    def block() -> Any:
        square = {name: r.kernel(c, c) for name in (*"qkv", "attended")}
        norms = {name: 1 + r.normal(c, scale=0.1) for name in ("norm", "second norm")}
        wide = {name: r.normal(8, c, 48, scale=c**-0.5) for name in ("gate", "up")}
        down = {"down": r.normal(8, 48, c, scale=48**-0.5)}
        return square | norms | wide | down | {"router": r.kernel(c, 8)}

    params = {"embed": r.normal(64, c), "blocks": [block() for _ in range(2)]}
    params |= {"norm": 1 + r.normal(c, scale=0.1), "head": r.kernel(c, 64)}
    return params, (r.integers(64, 4, 16), r.integers(64, 4, 16))


def _log_wave(params: Any, positions: jax.Array) -> jax.Array:
    """Logarithm of a wave function's size: attention, orbitals, determinants."""
    atoms = np.float32([[0, 0, 0], [0, 0, 2]])
    r = positions[:, None] - atoms
    distances = jnp.sqrt(jnp.sum(r**2, -1, keepdims=True))
    features = jnp.concatenate([r, distances], -1).reshape(len(positions), -1)
    h = _dense(None, params["embed"], features)
    for block in params["blocks"]:
        q, k, v = (_heads(h @ block[name], 4) for name in "qkv")
        logits = jnp.einsum("qhc,khc->hqk", q, k) / np.sqrt(q.shape[-1])
        mixed = jnp.einsum("hqk,khc->qhc", jax.nn.softmax(logits), v)
        h = h + _dense(None, block["attended"], mixed.reshape(h.shape))
        h = h + jnp.tanh(_dense(None, block["hidden"], h))
    orbitals = _heads(_dense(None, params["orbitals"], h), 4)
    orbitals = orbitals * jnp.exp(-distances.sum(1, keepdims=True))
    signs, logs = jnp.linalg.slogdet(jnp.moveaxis(orbitals, 1, 0))
    largest = jax.lax.stop_gradient(jnp.max(logs))
    return largest + jnp.log(jnp.abs(jnp.sum(signs * jnp.exp(logs - largest))))


def _energy(params: Any, positions: jax.Array) -> jax.Array:
    """Local energy: half the Laplacian by forward over reverse, and the potential."""
    flat = positions.reshape(-1)
    slope = jax.grad(lambda x: _log_wave(params, x.reshape(positions.shape)))

    def second(i: jax.Array) -> jax.Array:
        return jax.jvp(slope, (flat,), (jax.nn.one_hot(i, len(flat)),))[1][i]

    with jax.named_scope("laplacian"):
        kinetic = jnp.sum(jax.lax.map(second, jnp.arange(len(flat))))
        kinetic = -0.5 * (kinetic + jnp.sum(slope(flat) ** 2))
    atoms = np.float32([[0, 0, 0], [0, 0, 2]])
    near = jnp.linalg.norm(positions[:, None] - atoms, axis=-1)
    first, second_ = np.triu_indices(len(positions), 1)
    apart = jnp.linalg.norm(positions[first] - positions[second_], axis=-1)
    return kinetic - 2 * jnp.sum(1 / near) + jnp.sum(1 / apart)


def _wave_function(low: str | None, params: Any, data: Any) -> jax.Array:
    """Its gradient is that of the energy: local energies times slopes of the wave."""
    del low  # The code base has no 16-bit recipe.
    energies = jax.vmap(functools.partial(_energy, params))(data)
    middle = jnp.median(energies)
    far = 5 * jnp.mean(jnp.abs(energies - middle))
    energies = jnp.clip(energies, middle - far, middle + far)  # As the code base does.
    energies = jax.lax.stop_gradient(energies - jnp.mean(energies))
    logs = jax.vmap(functools.partial(_log_wave, params))(data)
    return 2 * jnp.mean(energies * logs)


def _make_wave_function(r: Random) -> Any:
    c = 16
    blocks = [
        {name: r.kernel(c, c) for name in "qkv"}
        | {name: _layer(r, c, c) for name in ("attended", "hidden")}
        for _ in range(2)
    ]
    params = {"embed": _layer(r, 8, c), "blocks": blocks}
    params["orbitals"] = _layer(r, c, 16)
    positions = r.normal(64, 4, 3)
    log_wave = jax.jit(jax.vmap(_log_wave, (None, 0)))
    for _ in range(100):  # Metropolis: positions as likely as the square of the wave.
        moved = positions + r.normal(64, 4, 3, scale=0.3)
        ratio = np.exp(2 * (log_wave(params, moved) - log_wave(params, positions)))
        positions = np.where((r.uniform(64) < ratio)[:, None, None], moved, positions)
    return params, positions


CODE_BASES: Sequence[CodeBase] = (
    CodeBase(
        *("AlphaFold 3", "pair-bias attention"),
        "parameters and activations; norms, logits of attention in float32",
        *(_pairs, _make_pairs),
    ),
    CodeBase(
        *("shortcut-models", "diffusion transformer"),
        "layers; time's last layer, softmax in float32",
        *(_diffusion_transformer, _make_diffusion_transformer),
    ),
    CodeBase(
        *("openpi", "flow-matching policy"),
        "the transformer; norms, logits, actions' layers in float32",
        *(_flow_policy, _make_flow_policy),
    ),
    CodeBase(
        *("GraphCast", "weather on a mesh"),
        "all, with norms and loss",
        *(_mesh_network, _make_mesh_network),
    ),
    CodeBase(
        *("NeuralGCM", "spectral weather"),
        *("", _spectral_model, _make_spectral_model),
    ),
    CodeBase(
        *("DreamerV3", "world model"),
        "layers, the carry; norms, distributions in float32",
        *(_world_model, _make_world_model),
    ),
    CodeBase(
        *("MaxText", "mixture of experts"),
        "layers, the router; norms, experts' weights and sum in float32",
        *(_experts, _make_experts),
    ),
    CodeBase(
        *("FermiNet", "neural wave function"),
        *("", _wave_function, _make_wave_function),
        jmp.get_rules("mixed").scope("laplacian", "full"),
    ),
)


# -------------------------------------------------------------------------- measures


def measure(base: CodeBase) -> Row:
    """Returns the errors of a model: medians over the seeds of the sweep."""
    inputs = [base.make(Random(seed)) for seed in SEEDS]
    full = functools.partial(base.loss, None)
    expected = in_float32(full, inputs)

    def error(loss: Callable[..., Any], dtype: str = LOW) -> float:
        return errors_of(loss, inputs, dtype, expected).all

    recipe, careful = None, None
    if base.recipe:
        recipe = error(functools.partial(base.loss, LOW))
    if base.careful is not None:
        careful = error(jmp.autocast(full, base.careful))
    return Row(
        base.name,
        base.model,
        base.recipe,
        recipe,
        error(jmp.autocast(full)),
        error(jmp.autocast(full, "O1")),
        error(jmp.autocast(full, compute_dtype="float16"), "float16"),
        careful,
        share_low(full, LOW, inputs[0]) or 0.0,
    )


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text: errors of gradients in percent."""
    lines = [
        f"{'':38}{'their':>8}{'':24}{'16-bit':>8}",
        f"{'code base, model':38}{'bfloat16':>8}{'mixed':>8}{'O1':>7}"
        f"{'float16':>9}{'share':>8}",
    ]
    for row in rows:
        own = "none" if row.recipe is None else f"{row.recipe:.2%}"
        lines.append(
            f"{f'{row.name}, {row.model}':38}{own:>8}{row.mixed:>8.2%}{row.o1:>7.2%}"
            f"{row.float16:>9.2%}{row.share:>8.0%}"
        )
        if row.casts:
            lines.append(f"  {row.casts}")
        if row.careful is not None:
            lines.append(f"{'  its Laplacian in float32':38}{'':8}{row.careful:>8.2%}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.code_bases")
    names = [base.name for base in CODE_BASES]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    chosen = [
        one for one in CODE_BASES if not options.names or one.name in options.names
    ]
    rows = [measure(one) for one in chosen]
    print(table(rows))
    if not options.names:
        write(options.json, "code_bases", stamp(seeds=len(SEEDS)), rows=rows)


if __name__ == "__main__":
    main()
