"""Programs for single cases of decisions: without it, each is decided otherwise."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
LAYERS = jnp.stack([W, -W, W.T])

gather = functools.partial(lax.all_gather, axis_name="d", tiled=True)


def state_with_resets(xs, is_kept):
    def step(h, now):
        gate, kept, x = now
        h = gate * jnp.where(kept, h, 0) + x
        return h, h

    start, gates = jnp.zeros(8), jax.nn.sigmoid(xs @ W)
    return lax.scan(step, start, (gates, is_kept, xs))[1] @ W


def layers_with_biases(biases, h):
    def step(h, now):
        w, b = now
        return h + b + jnp.tanh(h @ w), None

    return lax.scan(step, h, (LAYERS, biases))[0] @ W


def reversible_network(one, other):
    def step(streams, w):
        one, other = streams
        one = one + jnp.tanh(other @ w)
        return (one, other + jnp.tanh(one @ w)), None

    return sum(lax.scan(step, (one, other), LAYERS)[0]) @ W


def convolution_of_a_black_and_white_image(image, kernel):
    binary = (image > 0).astype(jnp.float32)
    return lax.conv_general_dilated(binary, kernel, (1, 1), "SAME")


def low_draw(key):
    return jmp.as_low(jax.random.normal(key, (4, 8))) @ W


def sine_of_summed_products(x):
    return jnp.sin(jnp.sum(x @ W, 0)) @ W


def of_one_device(fun):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P()), "out_specs": P()}
    return jax.shard_map(fun, mesh=mesh, **specs, check_vma=False)


@of_one_device
def lookup_in_a_gathered_table(table, ids):
    return jax.nn.one_hot(ids, 8) @ gather(table)


@of_one_device
def norm_of_gathered_rows(rows, w):
    h = gather(rows @ w + 0.5)
    h -= jnp.mean(h, -1, keepdims=True)
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-5) @ w


PROGRAMS = {
    # Errors of a gate add up over the steps.
    state_with_resets: (X, X[:, 0] > 0, "logistic", ["float32"]),
    layers_with_biases: (jnp.ones((3, 8)), X, "scan", ["bfloat16"]),
    reversible_network: (X, X + 1, "scan", ["bfloat16", "bfloat16"]),
    convolution_of_a_black_and_white_image: (
        *(jnp.ones((1, 1, 8, 8)), jnp.ones((2, 1, 3, 3))),
        *("conv_general_dilated", ["bfloat16"]),
    ),
    low_draw: (jax.random.key(0), "name", ["bfloat16"]),
    # The second product reads the sine.
    sine_of_summed_products: (X, "dot_general", ["float32", "bfloat16"]),
    lookup_in_a_gathered_table: (W, jnp.arange(4), "all_gather", ["float32"]),
    norm_of_gathered_rows: (X, W, "all_gather", ["bfloat16"]),
}


@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_this_program_is_decided_by_a_case_of_its_own(fun):
    *args, op, expected = PROGRAMS[fun]
    rows = jmp.explain(fun)(*args).rows
    assert [row.precision for row in rows if row.op == op] == expected
