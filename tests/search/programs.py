"""Small programs as data: a grammar from which they are drawn, and what each one means.

A program is a loss and a block. A block is a tuple of steps; a step is a name, numbers,
and blocks inside of it. Each step maps an array to one of the same shape::

    ("square", (("dot", 0, 1.0), ("add", 5.0), ("tanh",), ("dot", 1, 1.0)))

is ``mean((tanh(x @ w[0] + 5) @ w[1]) ** 2)``. The last number of ``dot`` scales the
weight.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

Step: TypeAlias = tuple[Any, ...]
Block: TypeAlias = tuple[Step, ...]

ROWS, WIDTH = 8, 16
SCALES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3)


class Args(NamedTuple):
    """The arguments of a program.

    Attributes:
      x: the input.
      weights: three square matrices.
      biases: two vectors.
      gains: two vectors near 1.
      target: what the loss compares with.
    """

    x: jax.Array
    weights: tuple[jax.Array, ...]
    biases: tuple[jax.Array, ...]
    gains: tuple[jax.Array, ...]
    target: jax.Array


class Program(NamedTuple):
    """A program, and the scale of its input."""

    loss: str
    block: Block
    scale: float

    def __call__(self, args: Args) -> jax.Array:
        """Returns the loss."""
        return _LOSSES[self.loss](run(self.block, args.x * self.scale, args), args)


def draw_args(seed: int) -> Args:
    """Returns arguments of ordinary size."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape, "float32")
    return Args(
        normal(keys[0], ROWS, WIDTH),
        tuple(normal(keys[1], 3, WIDTH, WIDTH) / 4),
        tuple(biases := normal(keys[2], 2, WIDTH)),
        tuple(1 + biases[::-1] / 4),
        normal(keys[3], ROWS, WIDTH),
    )


def run(block: Block, h: jax.Array, args: Args) -> jax.Array:
    """Returns the result of a block."""
    for name, *parts in block:
        if name in _UNARY:
            h = _UNARY[name](h)
            continue
        inner = [functools.partial(run, p) if _is_block(p) else p for p in parts]
        h = _STEPS[name](h, args, *inner)
    return h


def names(block: Block) -> set[str]:
    """Returns the names of all steps in a block, and in blocks inside of it."""
    found = {step[0] for step in block}
    for _, *parts in block:
        found.update(*(names(part) for part in parts if _is_block(part)))
    return found


def _is_block(part: Any) -> bool:
    return isinstance(part, tuple)


# ------------------------------------------------------------------ steps of one value


def _normed(h: jax.Array, guard: float) -> jax.Array:
    centred = h - h.mean(-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + guard)


def _unit(h: jax.Array) -> jax.Array:
    return h / jnp.sqrt(jnp.sum(h * h, -1, keepdims=True) + 1e-6)


def _guarded(h: jax.Array) -> jax.Array:
    is_zero = jnp.all(h == 0, -1, keepdims=True)
    norm = jnp.sqrt(jnp.sum(jnp.where(is_zero, 1, h) ** 2, -1, keepdims=True))
    return h * jnp.tanh(norm / 8) / norm


def _attended(h: jax.Array) -> jax.Array:
    scores = jnp.einsum("qd,kd->qk", h, h) / 4
    lower = jnp.tril(jnp.ones_like(scores))
    return jax.nn.softmax(jnp.where(lower > 0, scores, -1e9)) @ h


def _one_hot(h: jax.Array) -> jax.Array:
    return jax.nn.one_hot(jnp.argmax(h, -1), WIDTH, dtype=h.dtype)


def _ranked(h: jax.Array) -> jax.Array:
    """Scales rows by how many positive ones are among them and before them."""
    is_positive = (h > 0).astype(h.dtype)
    counts = jnp.tril(jnp.ones((len(h), len(h)), h.dtype)) @ is_positive
    return h * counts / len(h)


def _noisy(h: jax.Array) -> jax.Array:
    return h + 0.1 * jax.random.normal(jax.random.key(1), h.shape, h.dtype)


_UNARY: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "one minus sigmoid": lambda h: 1 - jax.nn.sigmoid(h),
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "softsign": jax.nn.soft_sign,
    "sin": jnp.sin,
    "erf": lax.erf,
    "exp": lambda h: jnp.exp(jnp.clip(h, -8, 8)),
    "log": lambda h: jnp.log(jnp.abs(h) + 1e-3),
    "sqrt": lambda h: jnp.sqrt(jnp.abs(h) + 1e-3),
    "abs": jnp.abs,
    "square": jnp.square,
    "reciprocal": lambda h: 1 / (1 + h * h),
    "clip": lambda h: jnp.clip(h, -1, 1),
    "round": lambda h: h + lax.stop_gradient(jnp.round(h) - h),
    "layer norm": lambda h: _normed(h, 1e-6),
    "rms norm": lambda h: h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6),
    "norm without a guard": lambda h: _normed(h, 0),
    "unit": _unit,
    "guarded": _guarded,
    "softmax": jax.nn.softmax,
    "less the largest": lambda h: h - h.max(-1, keepdims=True),
    "less the mean": lambda h: h - h.mean(0),
    "sort": lambda h: jnp.sort(h, -1),
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "roll": lambda h: jnp.roll(h, 1, -1),
    "difference": lambda h: h - jnp.roll(h, 1, -1),
    "larger": lambda h: jnp.maximum(h, jnp.roll(h, 1, -1)),
    "where larger": lambda h: jnp.where(h > jnp.roll(h, 1, -1), h, 0),
    "glu": lambda h: h * jax.nn.sigmoid(jnp.roll(h, 8, -1)),
    "attention": _attended,
    "one-hot": _one_hot,
    "ranked": _ranked,
    "noisy": _noisy,
    "triangular": lambda h: jnp.tril(jnp.ones((len(h), len(h)), h.dtype)) @ h,
}

# ------------------------------------------------- steps with numbers, weights, blocks

Inner: TypeAlias = Callable[[jax.Array, Args], jax.Array]


def _custom_jvp(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    function = jax.custom_jvp(inner)
    function.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
    return function(h, args)


def _custom_vjp(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    """A function whose backward pass computes it again."""
    function = jax.custom_vjp(inner)
    function.defvjp(
        lambda *given: (inner(*given), given),
        lambda given, cotangent: jax.vjp(inner, *given)[1](cotangent),
    )
    return function(h, args)


def _mapped(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    if len(h) % 2:
        return inner(h, args)
    halves = h.reshape(2, -1, WIDTH)
    return jax.vmap(lambda h: inner(h, args))(halves).reshape(h.shape)


def _layers(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    step = lambda h, w: (inner(h, args) @ w, None)
    return lax.scan(step, h, jnp.stack(args.weights))[0]


def _recurrent(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = inner(state @ args.weights[2] + row, args)
        return state, state[0]

    return lax.scan(step, jnp.zeros_like(h[:1]), h)[1]


def _decayed(h: jax.Array, args: Args, gate: Inner, inner: Inner) -> jax.Array:
    """The last states of a linear recurrence of many steps."""

    def step(state: jax.Array, pair: tuple[jax.Array, jax.Array]) -> Any:
        state = pair[0] * state + pair[1]
        return state, state

    pairs = jax.nn.sigmoid(gate(h, args) + 4), inner(h, args)
    pairs = jax.tree.map(lambda rows: jnp.tile(rows, (8, 1)), pairs)
    return lax.scan(step, jnp.zeros_like(h[0]), pairs)[1][-len(h) :]


def _associative(h: jax.Array, args: Args, gate: Inner, inner: Inner) -> jax.Array:
    join = lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1])
    pairs = jax.nn.sigmoid(gate(h, args) + 4), inner(h, args)
    return lax.associative_scan(join, pairs)[1]


def _while(h: jax.Array, args: Args, inner: Inner) -> jax.Array:
    """A fixed point, as a constant, beside a function that is differentiated."""
    body = lambda s: (s[0] + 1, jnp.tanh(inner(s[1], args)))
    start = (0, lax.stop_gradient(h))
    fixed = lax.while_loop(lambda s: s[0] < 4, body, start)[1]
    return inner(h, args) + lax.stop_gradient(fixed)


def _unrolled(h: jax.Array, args: Args, n: int, inner: Inner) -> jax.Array:
    for _ in range(n):
        h = inner(h, args)
    return h


def _mixture(h: jax.Array, args: Args, gate: Inner, inner: Inner) -> jax.Array:
    z = jax.nn.sigmoid(gate(h, args))
    return z * h + (1 - z) * inner(h, args)


def _looked_up(h: jax.Array, args: Args, i: int) -> jax.Array:
    """Adds rows of a table, of which some are large."""
    table = args.weights[i] * jnp.exp(3 * args.biases[0])[:, None]
    return h + _one_hot(h) @ table


def _spread(h: jax.Array, args: Args, i: int) -> jax.Array:
    """A product of exponentials, and its logarithm."""
    return jnp.log(jnp.exp(jnp.clip(h, -8, 8)) @ jnp.exp(20 * args.weights[i]))


def _power(h: jax.Array, args: Args, i: int, n: int) -> jax.Array:
    return lax.fori_loop(0, n, lambda _, h: h @ args.weights[i], h)


def _repeated(h: jax.Array, args: Args, n: int, inner: Inner) -> jax.Array:
    return lax.fori_loop(0, n, lambda _, h: inner(h, args), h)


_STEPS: Mapping[str, Callable[..., jax.Array]] = {
    "add": lambda h, args, c: h + c,
    "times": lambda h, args, c: h * c,
    "dot": lambda h, args, i, c: h @ (c * args.weights[i]),
    "dot twice": lambda h, args, i, j: h @ args.weights[i] @ args.weights[j],
    "lookup": _looked_up,
    "log of exponentials": _spread,
    "power": _power,
    "bias": lambda h, args, i, c: h + c * args.biases[i],
    "shift": lambda h, args, i, c: h + c * (1 + args.biases[i] / 8),
    "gain": lambda h, args, i: h * args.gains[i],
    "residual": lambda h, args, c, f: h + c * f(h, args),
    "minus": lambda h, args, f: f(h, args) - h,
    "of both": lambda h, args, f, g: f(h, args) * g(h, args),
    "sum": lambda h, args, f, g: f(h, args) + g(h, args),
    "gate": lambda h, args, f: h * jax.nn.sigmoid(f(h, args)),
    "mixture": _mixture,
    "ratio": lambda h, args, f: h / (1 + jnp.abs(f(h, args))),
    "choice": lambda h, args, f: jnp.where(h > 0, f(h, args), h),
    "larger of both": lambda h, args, f: jnp.maximum(h, f(h, args)),
    "jit": lambda h, args, f: jax.jit(f)(h, args),
    "remat": lambda h, args, f: jax.checkpoint(f)(h, args),
    "vmap": _mapped,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "repeated": _repeated,
    "unrolled": _unrolled,
    "layers": _layers,
    "recurrent": _recurrent,
    "decayed": _decayed,
    "associative": _associative,
    "while": _while,
}


def _labels(args: Args) -> jax.Array:
    return jnp.argmax(args.target, -1)


_LOSSES: Mapping[str, Callable[[jax.Array, Args], jax.Array]] = {
    "square": lambda h, args: jnp.mean(h**2),
    "error": lambda h, args: jnp.mean((h - args.target) ** 2),
    "absolute": lambda h, args: jnp.mean(jnp.abs(h - args.target)),
    "inner product": lambda h, args: jnp.mean(h * args.target),
    "cross entropy": lambda h, args: jnp.mean(
        jax.nn.logsumexp(h, -1)
        - jnp.take_along_axis(h, _labels(args)[:, None], -1)[:, 0]
    ),
    "log of a sum": lambda h, args: jnp.mean(jnp.log(jnp.sum(h * h, -1) + 1e-6)),
}

# ------------------------------------------------------------------------- the grammar

_INDEX = st.integers(0, 2)
_NUMBER = st.sampled_from([-6.0, -3.0, -1.0, -0.1, 0.01, 0.5, 2.0, 5.0, 20.0, 100.0])
_FACTOR = st.sampled_from([-1.0, 1e-3, 0.01, 0.1, 0.5, 3.0, 20.0])
_SIZE = st.sampled_from([0.1, 1.0, 1.0, 1.0, 3.0])
_DOT = st.tuples(st.just("dot"), _INDEX, _SIZE)


def _with(name: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), *parts)


_SIMPLE = st.one_of(
    _DOT,
    st.sampled_from(sorted(_UNARY)).map(lambda name: (name,)),
    _with("add", _NUMBER),
    _with("times", _FACTOR),
    _with("bias", st.integers(0, 1), _SIZE),
    _with("shift", st.integers(0, 1), _NUMBER),
    _with("gain", st.integers(0, 1)),
    _with("dot twice", _INDEX, _INDEX),
    _with("lookup", _INDEX),
    _with("log of exponentials", _INDEX),
    _with("power", _INDEX, st.integers(5, 20)),
)


def _blocks(steps: st.SearchStrategy[Step], most: int = 4) -> st.SearchStrategy[Block]:
    return st.lists(steps, min_size=1, max_size=most).map(tuple)


def _nested(inner: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    block, short = _blocks(inner, 3), _blocks(inner, 2)
    dotted = short.flatmap(lambda b: st.just(b) | _DOT.map(lambda dot: (dot, *b)))
    one = ["minus", "gate", "ratio", "choice", "larger of both", "jit", "remat"]
    one += ["vmap", "custom_jvp", "custom_vjp", "layers", "recurrent", "while"]
    two = ["of both", "sum", "mixture", "decayed", "associative"]
    return st.one_of(
        inner,
        st.sampled_from(one).flatmap(lambda name: _with(name, dotted)),
        st.sampled_from(two).flatmap(lambda name: _with(name, dotted, dotted)),
        _with("residual", _FACTOR, dotted),
        _with("repeated", st.integers(2, 4), block),
        _with("unrolled", st.integers(2, 3), dotted),
    )


_STEP = _nested(_nested(_SIMPLE) | _SIMPLE)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draws a program that begins and ends with a product, most of the time."""
    first = draw(st.sampled_from([(), (("dot", 0, 1.0),), (("dot", 0, 1.0),)]))
    last = draw(st.sampled_from([(), (("dot", 1, 1.0),), (("dot", 1, 1.0),)]))
    block = (*first, *draw(_blocks(_STEP)), *last)
    loss = draw(st.sampled_from(sorted(_LOSSES)))
    return Program(loss, block, draw(st.sampled_from(SCALES)))
