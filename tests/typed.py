"""What a type checker knows of functions that the library returns.

Checked by ``make types``, never run.
"""

from typing import assert_type

import jax
import optax
from flax import nnx
from optax import GradientTransformationExtraArgs

import jmp_lite as jmp
import jmp_lite.nnx


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


def gradients_keep_the_arguments_and_the_loss(weights: jax.Array) -> None:
    scale = jmp.DynamicLossScale()
    step = jmp.value_and_grad(loss, loss_scale=scale)
    value, _ = step(weights, scale=2.0)
    assert_type(value, jax.Array)
    jmp.value_and_grad(loss, scale)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def with_aux(x: jax.Array, n: int = 2) -> tuple[jax.Array, str]:
        return x.sum() * n, "aux"

    both = jmp.value_and_grad(with_aux, has_aux=True, loss_scale=scale)
    (value, aux), _ = both(weights, n=3)
    assert_type(aux, str)
    _, alone = jmp.grad(with_aux, has_aux=True, loss_scale=scale)(weights)
    assert_type(alone, str)


def inspection_keeps_the_arguments(weights: jax.Array) -> None:
    compared = jmp.compare(loss)(weights, scale=1.0)
    assert_type(compared, jmp.results.Comparison)
    rules, report = jmp.tune(loss, tolerance=0.1)(weights, scale=1.0)
    assert_type(rules, jmp.Rules)
    assert_type(report, jmp.results.TuningReport)
    jmp.tune(loss, tolerance=0.1)(weights, size=1.0)  # pyright: ignore[reportCallIssue]


def wrappers_are_transformations(key: jax.Array) -> None:
    inner = optax.adam(1e-3)
    assert_type(jmp.loss_scaling(inner), GradientTransformationExtraArgs)
    assert_type(jmp.skip_nonfinite(inner), GradientTransformationExtraArgs)
    assert_type(jmp.master_weights(inner), GradientTransformationExtraArgs)
    assert_type(jmp.compensated(inner), GradientTransformationExtraArgs)
    assert_type(jmp.stochastic_rounding(inner, key), GradientTransformationExtraArgs)
    assert_type(
        jmp.low_precision_state(inner, key=key), GradientTransformationExtraArgs
    )
    # One inside of another, and around optax's own.
    jmp.loss_scaling(jmp.master_weights(optax.MultiSteps(inner, 2)))


def a_train_step_knows_its_batch(
    params: dict[str, jax.Array], batch: jax.Array
) -> None:
    def loss_fn(
        params: dict[str, jax.Array], model_state: None, batch: jax.Array, rng: None
    ) -> tuple[jax.Array, tuple[None, str]]:
        return (batch @ params["w"]).sum(), (model_state, "aux")

    init, step = jmp.build_train_step(loss_fn, optax.adam(1e-3))
    state = init(params)
    assert_type(state, jmp.states.TrainingState)
    state, metrics = step(state, batch)
    assert_type(state, jmp.states.TrainingState)
    assert_type(metrics["loss"], jax.Array)
    step(state, "a batch")  # pyright: ignore[reportArgumentType]

    def too_few(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return (batch @ params["w"]).sum()

    jmp.build_train_step(too_few, optax.adam(1e-3))  # pyright: ignore[reportArgumentType]


def a_module_keeps_its_class(net: nnx.Linear, x: jax.Array) -> None:
    low = jmp_lite.nnx.cast(net, "bfloat16")
    assert_type(low, nnx.Linear)
    assert_type(jmp_lite.nnx.to_float(net, "bfloat16"), nnx.Linear)
    assert_type(jmp_lite.nnx.scoped(net), nnx.Linear)

    def loss_fn(net: nnx.Linear, x: jax.Array) -> jax.Array:
        return net(x).sum()

    scale = jmp.NoOpLossScale()
    value, _ = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=scale)(net, x)
    assert_type(value, jax.Array)

    explained = jmp_lite.nnx.explain(loss_fn)(net, x)
    assert_type(explained, jmp.results.Explanation)
    (loss, stats) = jmp_lite.nnx.watch(loss_fn)(net, x)
    assert_type(loss, jax.Array)
    assert_type(stats, jmp.results.WatchedNumerics)
    assert_type(jmp_lite.nnx.compare(loss_fn)(net, x), jmp.results.Comparison)
    rules, _ = jmp_lite.nnx.tune(loss_fn, tolerance=0.1)(net, x)
    assert_type(rules, jmp.Rules)
    jmp_lite.nnx.watch(loss_fn)(net)  # pyright: ignore[reportCallIssue]
