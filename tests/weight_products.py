"""Programs of products with weights, and derivatives, for tests of number formats."""

import jax
import jax.numpy as jnp
from helpers import one_of_each
from jax import lax

import jmp_lite as jmp

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (32, 48))
W = jax.random.normal(KEYS[1], (48, 64)) / 7
V = jax.random.normal(KEYS[2], (64, 48)) / 8
LAYERS = jnp.stack([W[:, :48], W[:, 16:], V[:48]])


def net(x, w, v):
    return jnp.tanh(x @ w) @ v


def block(x, w, v):
    """A product whose result a later product reads, and one that a norm reads."""
    return jnp.sum(jnp.tanh(net(x, w, v) @ w) ** 2)


def layers(x, ws):
    """A stack of layers, and a head that is no later product's operand."""
    body = lambda h, w: (jnp.tanh(h @ w), None)
    return jnp.sum((lax.scan(body, x, ws)[0] @ ws[0]) ** 2)


def again(policy):
    def fun(x, ws):
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None), policy=policy)
        return jnp.sum((lax.scan(body, x, ws)[0] @ ws[0]) ** 2)

    return fun


def written_out(x, ws):
    for w in ws:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return jnp.sum((x @ ws[0]) ** 2)


def branching(x, ws):
    h = lax.cond(x[0, 0] > 9, lambda w: x @ w, lambda w: jnp.tanh(x @ w), ws[0])
    return jnp.sum((h @ ws[1]) ** 2)


def looping(x, ws):
    """A while loop has no derivative backward, and one forward."""
    body = lambda i, h: jnp.tanh(h @ ws[i])
    n = jnp.where(x[0, 0] > 9, 1, 2)
    return jnp.sum((lax.fori_loop(0, n, body, x) @ ws[0]) ** 2)


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -1, 1),))


def with_a_custom_rule(x, ws):
    return jnp.sum((clipped(jnp.tanh(clipped(x @ ws[0]) @ ws[1])) @ ws[2]) ** 2)


def mapped_inside(x, ws):
    one = lambda row: jnp.tanh(jnp.tanh(row @ ws[0]) @ ws[1])
    return jnp.sum((jax.vmap(one)(x) @ ws[2]) ** 2)


PROGRAMS = {
    "a scan": layers,
    "remat in a scan": again(None),
    "remat, products kept": again(jax.checkpoint_policies.dots_saveable),
    "remat, all kept": again(jax.checkpoint_policies.everything_saveable),
    "remat, written out": written_out,
    "a branch": branching,
    "a custom rule": with_a_custom_rule,
    "vmap inside": mapped_inside,
}
SMALL = X @ W[:, :48] / 4
DIRECTION = jax.random.normal(KEYS[3], SMALL.shape)

TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jvp": lambda f: lambda x, ws: jax.jvp(f, (x, ws), (DIRECTION, ws)),
    "vmap of grad": lambda f: jax.vmap(
        lambda x, ws: jax.grad(f, 1)(x, ws), in_axes=(0, None)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, ws: jnp.sum(jax.vmap(f, in_axes=(0, None))(x, ws)), 1
    ),
    "forward over reverse": lambda f: (
        lambda x, ws: jax.jvp(lambda x: jax.grad(f, 1)(x, ws), (x,), (DIRECTION,))
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda x, ws: jnp.sum(jax.grad(f, 1)(x, ws) ** 2)
    ),
    "linearize": lambda f: lambda x, ws: jax.linearize(f, x, ws)[1](DIRECTION, ws),
}
# Backwards, because the last two are not defined with each other.
SOME_DERIVATIVES = one_of_each(PROGRAMS, [*TRANSFORMS][::-1])
"""Each program and each transform at least once."""


def not_defined(program, transform):
    """Returns why a derivative of a program is not defined; None if it is."""
    if "custom rule" in program and transform in ("jvp", "linearize"):
        return "custom_vjp has no forward mode, and JAX says so"
    if "custom rule" in program and "over" in transform:
        return "the derivative of a clipped gradient is not continuous"
    return None


# ----------------------------------------------------- products in float8, in all forms


def in_float8(fun):
    """Returns a function with products of every size in float8."""
    rules = jmp.get_rules("mixed").product(jmp.Float8(smallest=0))
    return jmp.autocast(fun, rules)


def mlp_blocks(weights, x):
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean((x @ weights[0][0]) ** 2)


def blocks_in_a_scan(weights, x):
    @jax.checkpoint
    def layer(x, weights):
        up, down = weights
        return x + jax.nn.gelu(x @ up) @ down, None

    x, _ = lax.scan(layer, x, weights)
    return jnp.mean((x @ weights[0][0]) ** 2)


def a_batch(weights, x):
    (up, down), *_ = weights
    h = jnp.einsum("ebk,ekn->ebn", jnp.stack([x, 2 * x]), jnp.stack([up, down]))
    return jnp.mean((jnp.tanh(h) @ down @ up) ** 2)


MANY_FORMS = {
    "blocks": in_float8(mlp_blocks),
    "scan": in_float8(blocks_in_a_scan),
    "batch": in_float8(a_batch),
    # Each example has a scale, and the gradient adds up over examples.
    "vmap": lambda weights, x: jnp.mean(
        jax.vmap(in_float8(mlp_blocks), (None, 0))(
            weights, x.reshape(2, -1, *x.shape[1:])
        )
    ),
}


def gradient_and_shapes(name, rows, width, depth=2):
    """Returns the gradient of a program, and the shapes of its arguments."""
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    weights = [(square, square)] * depth
    if name == "scan":
        stacked = jax.ShapeDtypeStruct((depth, width, width), jnp.float32)
        weights = stacked, stacked
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return jax.grad(MANY_FORMS[name], (0, 1)), (weights, x)
