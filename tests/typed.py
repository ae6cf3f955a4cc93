"""What a type checker knows of functions that the library returns.

Checked by ``make types``, never run.
"""

from typing import assert_type

import jax

import jmp_lite as jmp


def loss(weights: jax.Array, *, scale: float) -> jax.Array:
    return (weights * scale).sum()


def signatures_stay(weights: jax.Array) -> None:
    low = jmp.autocast(loss)
    assert_type(low(weights, scale=1.0), jax.Array)
    low(weights, size=1.0)  # pyright: ignore[reportCallIssue]

    @jmp.autocast(rules="O2", compute_dtype="float16")
    def decorated(x: jax.Array, n: int = 2) -> tuple[jax.Array, int]:
        return x @ x, n

    assert_type(decorated(weights, 3), tuple[jax.Array, int])
    decorated(weights, "three")  # pyright: ignore[reportArgumentType]

    marked = jmp.full_precision(loss)
    assert_type(marked(weights, scale=2.0), jax.Array)
    assert_type(jmp.explain(loss)(weights, scale=2.0), jmp.results.Explanation)
    graded = jmp.value_and_grad(loss, loss_scale=jmp.StaticLossScale(2.0))
    graded(weights, scale=2.0)
    graded(weights, size=2.0)  # pyright: ignore[reportCallIssue]
    jmp.grad(loss, loss_scale=jmp.NoOpLossScale())(weights, scale=2.0)
    value, stats = jmp.watch(loss)(weights, scale=2.0)
    assert_type(value, jax.Array)
    assert_type(stats.rows[0].op, str)
