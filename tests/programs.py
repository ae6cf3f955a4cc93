"""Programs of many kinds, and the transforms they go through: data for the battery."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import initialized, mostly_slow
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
B = jax.random.normal(jax.random.key(2), (8,)) / 3
LAYERS = jnp.stack([W, -W, W.T])


def mlp(x, w, b):
    return jax.nn.gelu(x @ w + b) @ w


def relu_net(x, w, b):
    return jax.nn.relu(x @ w + b) @ w - jax.nn.silu(x @ w)


def softmax_attention(x, w):
    scores = (x @ w) @ x.T / np.sqrt(8)
    mask = jnp.tril(jnp.ones((4, 4), bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ x


def masked_with_the_end_of_the_range(x, w):
    mask = jnp.arange(4)[:, None] > 0
    scores = jnp.where(mask, x @ w, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores) @ w


def cross_entropy(x, w):
    log_probabilities = jax.nn.log_softmax(x @ w)
    return -jnp.mean(log_probabilities[:, 0]) + jax.nn.logsumexp(x @ w)


def variance(x, w):
    y = x @ w
    return (y - y.mean()) / jnp.sqrt(jnp.var(y, axis=0) + 1e-6)


def positions(x, w):
    angles = jnp.arange(300.0, 304.0)[:, None] * jnp.ones(8)
    return (x + jnp.sin(angles)) @ w


def convolution(x, w):
    image, kernel = x.reshape(1, 4, 4, 2), w.reshape(2, 2, 2, 8)
    y = lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y).sum((1, 2)) @ w


def pooling(x, w):
    image = (x @ w).reshape(1, 4, 4, 2)
    pooled = nn.max_pool(image, (2, 2), (1, 1))
    window = (1, 2, 2, 1)
    total = lax.reduce_window(pooled, 0.0, lax.add, window, (1, 1, 1, 1), "VALID")
    return total.reshape(-1, 2) @ w[:2]


def gathers_and_scatters(x, w):
    y = x @ w
    rows = y[jnp.array([0, 0, 3, 1])] @ w
    sums = jax.ops.segment_max(rows, jnp.array([0, 0, 1, 1]), 2) @ w
    return jnp.sort(y, axis=0) @ w, sums, jnp.tile(y, (2, 1)) @ w, y.at[1].set(0.0) @ w


def smooth_functions(x, w):
    y = x @ w
    exact = jax.nn.gelu(y, approximate=False) + jnp.arcsinh(y) + jnp.arccosh(2 + y**2)
    return exact @ w / (1 + y.max(0) - y.min(0))


def additive_mask(x, w):
    mask = jnp.arange(4)[:, None] > jnp.arange(4)
    bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(x @ x.T + bias) @ x @ w


def embedding(x, w):
    rows = jnp.take(w, jnp.array([1, 1, 3, 0]), axis=0)
    return (rows + x) @ w


def reused_weight(x, w):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x


def scanned_layers(x, layers):
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0] @ layers[0]


def scanned_layers_with_an_auxiliary_loss(x, layers):
    def body(carry, w):
        h, loss = carry
        return (h + jnp.tanh(h @ w), loss + jnp.mean(h**2)), None

    (h, loss), _ = lax.scan(body, (x, jnp.float32(0)), layers)
    return h @ layers[0], loss


def recurrent(x, w):
    return lax.scan(lambda h, x: (jnp.tanh(x @ w + h @ w), h.sum()), x[0], x)


def running_sum(x, w):
    return lax.scan(lambda total, x: (total + x @ w, total), x[0] @ w, x)[0]


def reversed_recurrence(x, w):
    step = lambda h, x: (jnp.tanh(h @ w + x), h.sum())
    return lax.scan(step, x[0], x, reverse=True)


def for_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)


def branches(x, w):
    return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.sin(x), x)


def switch(x, w):
    return lax.switch(1, [lambda x: x @ w, lambda x: x * 2, lambda x: jnp.exp(x)], x)


rematerialized = jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w) @ w)


def nested_jits(x, w):
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    return jax.jit(lambda x, w: inner(inner(x, w), w))(x, w)


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    y = jnp.tanh(x @ w)
    return y, (x, w, y)


def _backward(residuals, g):
    x, w, y = residuals
    d = 2 * g * (1 - y * y)
    return d @ w.T, x.T @ d


doubled_gradient.defvjp(_forward, _backward)


def custom_vjp(x, w):
    return doubled_gradient(x @ w, w)


def custom_vjp_in_a_scan(x, w):
    return lax.scan(lambda h, _: (doubled_gradient(h, w), None), x, length=3)[0]


@jax.custom_jvp
def tripled_tangent(x):
    return jnp.tanh(x)


@tripled_tangent.defjvp
def _tripled_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    y = tripled_tangent(x)
    return y, 3 * t * (1 - y * y)


def custom_jvp(x, w):
    return tripled_tangent(x @ w) @ w


def sharded(x, w):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P()
    )
    def mean(x, w):
        return lax.psum(jnp.tanh(x @ w).sum(0), "data")

    return mean(x, w)


def einsum_and_friends(x, w):
    y = jnp.einsum("ij,kj->ik", x, w)
    return jnp.concatenate([y, x]).reshape(-1, 4).T[:, ::-1], jnp.sort(y), y.max(0)


def cumulative(x, w):
    return jnp.cumsum(x @ w, axis=0) @ w, jnp.cumprod(1 + 0.1 * x, axis=0)


def integers_and_booleans(x, w):
    y = x @ w
    return jnp.where(y > 0, y, 0), jnp.argmax(y, axis=1), (y > 0).sum()


class Block(nn.Module):
    dtype: object = None  # Of a model whose precision is written by hand.

    @nn.compact
    def __call__(self, x):
        options = {"dtype": self.dtype}
        h = nn.LayerNorm(**options)(x)
        width = x.shape[-1]
        h = nn.Dense(width, **options)(nn.gelu(nn.Dense(2 * width, **options)(h)))
        x = x if self.dtype is None else x.astype(self.dtype)
        return nn.RMSNorm(**options)(x + h)


BLOCK = Block()
BLOCK_PARAMS = initialized(BLOCK, X)
LSTM = nn.RNN(nn.LSTMCell(8))
LSTM_PARAMS = initialized(LSTM, X[None])
ATTENTION = nn.MultiHeadDotProductAttention(num_heads=2)
ATTENTION_PARAMS = initialized(ATTENTION, X[None], X[None])

PROGRAMS = {
    **{
        fun.__name__: (fun, (X, W))
        for fun in (
            *(softmax_attention, masked_with_the_end_of_the_range, cross_entropy),
            *(pooling, gathers_and_scatters, smooth_functions, additive_mask),
            *(variance, positions, convolution, embedding, reused_weight, recurrent),
            *(running_sum, for_loop, branches, switch, nested_jits, custom_vjp),
            *(custom_vjp_in_a_scan, custom_jvp, sharded, einsum_and_friends),
            *(cumulative, integers_and_booleans, reversed_recurrence),
        )
    },
    "mlp": (mlp, (X, W, B)),
    "relu_net": (relu_net, (X, W, B)),
    "rematerialized": (rematerialized, (X, W)),
    "scanned_layers": (scanned_layers, (X, LAYERS)),
    "scanned_layers_with_an_auxiliary_loss": (
        scanned_layers_with_an_auxiliary_loss,
        (X, LAYERS),
    ),
    "a linen block": (lambda x, p: BLOCK.apply(p, x), (X, BLOCK_PARAMS)),
    "a linen LSTM": (lambda x, p: LSTM.apply(p, x), (X[None], LSTM_PARAMS)),
    "linen attention": (
        lambda x, p: ATTENTION.apply(p, x, x),
        # Small matrices would be float32.
        (jnp.tile(X, (3, 1))[None], ATTENTION_PARAMS),
    ),
}
# Each kind of op, of loop and of derivative rule.
QUICK = (
    *("softmax_attention", "convolution", "gathers_and_scatters", "embedding"),
    *("recurrent", "branches", "custom_vjp_in_a_scan", "custom_jvp", "sharded"),
    *("cumulative", "rematerialized", "scanned_layers_with_an_auxiliary_loss"),
    "a linen block",
)
each_program = pytest.mark.parametrize("name", mostly_slow(PROGRAMS, QUICK))


def total(tree):
    """A scalar of all floating results, in which none outweighs the others."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype == jnp.float32]
    return sum(jnp.mean(jnp.sin(leaf)) for leaf in leaves)


def gradient(fun):
    return lambda *args: jax.grad(lambda args: total(fun(*args)), allow_int=True)(args)


def tangent(fun):
    return lambda *args: jax.jvp(fun, args, jax.tree.map(jnp.ones_like, args))


def mapped(fun):
    def call(x, *rest):
        return jax.vmap(fun, in_axes=(0, *(None for _ in rest)))(
            jnp.stack([x, x / 2]), *rest
        )

    return call


def scanned(fun):
    return lambda *args: lax.scan(lambda c, _: (c, fun(*args)), 0, length=2)[1]


# What has a custom vjp rule has no forward mode.
REVERSE_ONLY = {"custom_vjp", "custom_vjp_in_a_scan"}
FORWARD = {"jvp"}

TRANSFORMS = {
    "eager": lambda fun: fun,
    "jit": jax.jit,
    "grad": gradient,
    "jvp": tangent,
    "vmap": mapped,
    "grad of vmap": lambda fun: gradient(mapped(fun)),
    "scan": scanned,
    "grad of scan": lambda fun: gradient(scanned(fun)),
    "remat": lambda fun: gradient(jax.checkpoint(fun)),
    "linearize": lambda fun: lambda *args: jax.linearize(fun, *args)[0],
}


@functools.cache
def in_float32(name, transform):
    """Returns the results of a program as it is, under a transform."""
    fun, args = PROGRAMS[name]
    return jax.jit(TRANSFORMS[transform](fun))(*args)


@functools.cache
def traced(name, transform):
    """Returns the jaxpr of a program as it is, and the types of its results."""
    fun, args = PROGRAMS[name]
    return jax.make_jaxpr(TRANSFORMS[transform](fun), return_shape=True)(*args)


# ------------------------------------------- programs that say how precise they are


def marked(x, w):
    """Every kind of mark, around ops that a rule would decide otherwise."""
    with jmp.low_precision():
        y = jnp.exp(jnp.matmul(x, w, precision="highest")) + jnp.arange(8.0)
        y = lax.optimization_barrier(y) @ w.astype("float16").astype(np.float32)
    with jmp.full_precision():
        z = jnp.tanh(lax.optimization_barrier(y) @ w)
        with jmp.low_precision():
            z = z @ w
    return jmp.as_low(jnp.exp(z)) + y @ w, jmp.as_full(y) * z


def marked_loops(x, layers):
    def step(h, w):
        h, total = h
        h = jnp.tanh(h @ w)
        return (h, total + h.sum()), h

    with jmp.low_precision():
        (h, total), _ = lax.scan(step, (x, jnp.float32(0)), layers)
    with jmp.full_precision():
        g = lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ layers[0]), h)
    return h @ layers[0], total, g @ layers[0]


def partly_jitted(x, layers):
    block = jax.jit(lambda x, w: x + jnp.tanh(x @ w))
    x = block(x, layers[0])
    x = x + jnp.tanh(x @ layers[1])
    with jax.named_scope("last"):
        x = block(block(x, layers[2]), layers[0])
    return x @ layers[0]


def scoped_loops(x, layers):
    def two(x, layers):
        for name in ("layers", "solver"):
            with jax.named_scope(name):
                x = lax.scan(lambda h, w: (h + jnp.tanh(h @ w), h), x, layers)[0]
            x = x @ layers[0]
        return x

    with jax.named_scope("outer"):
        return two(x, layers), jax.jit(two)(x, layers).sum()


DECIDED = {
    "marked": (marked, (X, W)),
    "marked_loops": (marked_loops, (X, LAYERS)),
    "partly_jitted": (partly_jitted, (X, LAYERS)),
    "scoped_loops": (scoped_loops, (X, LAYERS)),
}
"""Programs with marks, partial jits and named scopes."""

MIXED = jmp.get_rules("mixed")
RULES_WITH_PATHS = {
    "a full scope": MIXED.scope("last|solver", "full"),
    "a low scope": MIXED.scope("last|solver", "low"),
    "a full carry": MIXED.carry("solver", "full"),
    "a carry that follows": MIXED.carry("layers", "follow"),
    "no pass": jmp.Rules(passes=()),
}
"""Rules that decide by path."""
