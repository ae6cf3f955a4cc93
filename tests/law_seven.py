"""Programs in which an elementwise rounding costs digits that ``"O1"`` keeps.

A script: it prints the error of each program, its value or its worst gradient, under
``"mixed"`` and under ``"O1"``, as JSON. It runs in a process of its own, because XLA
reads its flags once: with excess precision a CPU leaves out roundings of a program.
"""

import json
import os

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_lite as jmp

normal = jax.random.normal
KEYS = jax.random.split(jax.random.key(0), 9)
X = normal(KEYS[0], (12, 16))
W, T, U, GATE, INTO = (normal(key, (16, 16)) / 4 for key in KEYS[1:6])
V = normal(KEYS[6], (16,)) / 4
STEPS = normal(KEYS[7], (1024, 16))
TABLE = jnp.linspace(-3, 3, 64)


def squared(y):
    return jnp.mean(y**2)


def normed(h):
    centred = h - h.mean(-1, keepdims=True)
    return centred / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)


# ------------------------------------------------------------------ gates near 1


def scanned(a, b, v):
    step = lambda h, ab: (ab[0] * h + ab[1],) * 2
    return squared(lax.scan(step, jnp.zeros(16), (a, b))[1] @ v)


def gates(gate, into, v):
    return scanned(jax.nn.sigmoid(STEPS @ gate + 6), STEPS @ into, v)


def divided(gate, into, v):
    decay = 1 + 0.01 * jax.nn.sigmoid(STEPS @ gate)
    step = lambda h, ab: (h / ab[0] + ab[1],) * 2
    states = lax.scan(step, jnp.zeros(16), (decay, STEPS @ into))[1]
    return squared(states @ v)


def decays(gate, into, v):
    return scanned(1 - 0.01 * jax.nn.sigmoid(STEPS @ gate), STEPS @ into, v)


def gates_in_a_jit(gate, into, v):
    return jax.jit(gates)(gate, into, v)


def gates_inside(gate, into, v):
    def step(h, x):
        h = jax.nn.sigmoid(x @ gate + 6) * h + x @ into
        return h, h

    return squared(lax.scan(step, jnp.zeros(16), STEPS)[1] @ v)


def associative(gate, into, v):
    join = lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1])
    pairs = jax.nn.sigmoid(STEPS @ gate + 6), STEPS @ into
    return squared(lax.associative_scan(join, pairs)[1] @ v)


def factors(n):
    rows = jnp.concatenate([STEPS, STEPS[::-1]])[:n]
    return lambda gate, into, v: squared(
        lax.associative_scan(jnp.multiply, 1 + 0.01 * (rows @ gate)) @ v
    )


# --------------------------------------- saturation, differences, ties, and phases


def gru(w, t, u):
    h = jnp.zeros_like(X)
    for _ in range(4):
        z = jax.nn.sigmoid(X @ w + h @ t + 3)
        h = z * h + (1 - z) * jnp.tanh(X @ u)
    return h @ u


def residual(w, t, u):
    x = X + 5
    return ((x + 0.01 * (x @ w)) - x) @ u


def negative_multiple(w, t, u):
    h = 0.1 * (X @ w)
    return (h + -1 * jnp.tanh(h)) @ u


def stacked(w, t, u):
    h = X + 5
    start = h
    for _ in range(6):
        h = h + 0.02 * jnp.tanh(h @ w)
    return (h - start) @ u


def inner_optimizer(w, t, u):
    for _ in range(8):
        w = w - 0.1 * jax.grad(lambda w: squared(jnp.tanh(X @ w) - X))(w)
    return X @ w @ u


def average(w, t, u):
    mean, h = jnp.zeros_like(X), X
    for _ in range(8):
        h = jnp.tanh(h @ w)
        mean = 0.9 * mean + 0.1 * h
    return mean @ u


def fourier_beside_a_product(w, t, u):
    h = X @ w
    waves = jnp.concatenate([jnp.sin(8 * h), jnp.cos(8 * h)], -1)
    return waves @ jnp.concatenate([u, t]) + h @ t


def one_minus_in_shard_map(w, t, u):
    """There, JAX makes the 1 vary over devices: it is no literal."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "d")
    rows, whole = jax.P("d"), jax.P()
    fun = lambda x, t, u: (1 - jax.nn.sigmoid(2 * jnp.abs(x) @ jnp.abs(t))) @ u
    fun = jax.shard_map(fun, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    return fun(X, t, u)


def of(change, add=0.0):
    """Returns a program: a product, something added, a change, and a product."""
    return lambda w, t, u: change(X @ w + add) @ u


def biased(change, add):
    """Returns the same with a bias, which is an argument, in place of the number."""
    return lambda w, t, u: change(X @ w + add * (1 + t[0])) @ u


def large(change, scale):
    """Returns a change of products that are all far from 0, on one side of it."""
    return lambda w, t, u: change(scale * jnp.abs(X) @ jnp.abs(w)) @ u


def snake(a):
    return of(lambda h: h + jnp.sin(a * h) ** 2 / a)


MATRICES = {
    "tanh near 1": of(jnp.tanh, 5),
    "tanh near 1, of a bias": biased(jnp.tanh, 5),
    "1 - sigmoid": lambda w, t, u: ((1 - jax.nn.sigmoid(4 + X @ t)) * X) @ u,
    "1 - sigmoid in shard_map": one_minus_in_shard_map,
    "gelu": of(jax.nn.gelu, -3),
    "gelu of a bias": biased(jax.nn.gelu, -4),
    "hard swish": biased(lambda h: h * jax.nn.relu6(h + 3) / 6, -3),
    "tanh of large products": large(jnp.tanh, 3),
    "sigmoid of large products": large(jax.nn.sigmoid, 3),
    "gelu of large products": large(jax.nn.gelu, -3),
    "softsign of large products": large(jax.nn.soft_sign, -5),
    "tanh before a norm": of(lambda h: normed(jnp.tanh(h)), 4),
    "gru": gru,
    "norm of a shift of 5": of(normed, 5),
    "norm of a shift of 20": of(normed, 20),
    "norm of a shift of 100": of(normed, 100),
    "norm of a bias of 100": biased(normed, 100),
    "residual": residual,
    "a negative multiple": negative_multiple,
    "a stack": stacked,
    "less the largest": of(lambda h: jnp.tanh(h - h.max(-1, keepdims=True)), 20),
    "maximum of neighbours": of(lambda h: jnp.maximum(h, jnp.roll(h, 1, -1)), 2),
    "where larger": of(lambda h: jnp.where(h > jnp.roll(h, 1, -1), h, 0), 2),
    "sort": of(jnp.sort, 2),
    "phases": of(lambda h: jnp.sin(50 * h) * h),
    "snake 5": snake(5),
    "snake 20": snake(20),
    "fourier": fourier_beside_a_product,
    "interp": of(lambda h: jnp.interp(h, TABLE, jnp.sin(9 * TABLE)) * h),
    "inner optimizer": inner_optimizer,
    "average": average,
}

# ----------------------------------------------------------- one value, two upcasts


def hyperbolic(norm):
    def loss(w):
        h = X @ w
        n = norm(h)[:, None]
        p = h * jnp.tanh(n / 2) / n
        return jnp.mean(jnp.log(1 - jnp.sum(p * p, -1)) + n[:, 0])

    return loss


def guarded(h):
    safe = jnp.where(jnp.any(h != 0, -1, keepdims=True), h, 1.0)
    return jnp.sqrt(jnp.sum(safe * safe, -1))


def second_derivative(w):
    return squared(jax.grad(lambda z: jax.nn.gelu(4 * (z @ w)).sum())(X) @ U)


PROGRAMS = {
    **{
        fun.__name__: (fun, (GATE, INTO, V))
        for fun in (gates, gates_in_a_jit, gates_inside, decays, divided, associative)
    },
    "64 factors": (factors(64), (GATE, INTO, V)),
    "2048 factors": (factors(2048), (GATE, INTO, V)),
    **{
        name: (lambda w, t, u, f=fun: squared(f(w, t, u)), (W, T, U))
        for name, fun in MATRICES.items()
    },
    "safe_norm": (hyperbolic(lambda h: optax.safe_norm(h, 1e-6, axis=-1)), (W,)),
    "a guarded norm": (hyperbolic(guarded), (W,)),
    "a guard in a jit": (hyperbolic(jax.jit(guarded)), (W,)),
    "second derivative": (second_derivative, (W,)),
}

LIMITS = {"bfloat16": 0.005, "float16": 0.001}


def error(found, exact):
    found, exact = (np.asarray(array, np.float64) for array in (found, exact))
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - exact) / (np.linalg.norm(exact) + 1e-30))


def worst(fun, args, exact):
    """Returns the error of the value, or of the worst gradient."""
    return max(map(error, jax.tree.leaves(derived(fun, args)), exact))


def derived(fun, args):
    return jax.jit(jax.value_and_grad(fun, tuple(range(len(args)))))(*args)


def errors(name):
    """Returns the errors of a program: by dtype, of "mixed" and of "O1"."""
    fun, args = PROGRAMS[name]
    exact = jax.tree.leaves(derived(fun, args))
    return {
        dtype: [
            worst(jmp.autocast(fun, rules, compute_dtype=dtype), args, exact)
            for rules in ("mixed", "O1")
        ]
        for dtype in LIMITS
    }


if __name__ == "__main__":
    print(json.dumps({name: errors(name) for name in PROGRAMS}))
