"""One model with a planted fault: each tool names it, by scope and by line."""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import initialized

import jmp_lite as jmp
from jmp_lite.numerics import nonfinite_report, numerics_report, suggest_loss_scale

HERE = pathlib.Path(__file__)
TOKENS = jnp.arange(16).reshape(2, 8)


class Block(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(16)(nn.LayerNorm()(x))
        if self.fault == "overflow":
            h = jnp.exp(200 * h)  # planted: overflow
            h = h / (1 + jnp.mean(h))
        if self.fault == "vanish":
            h = h * 1e-9  # planted: vanish
        return x + nn.Dense(16)(nn.gelu(h))


class Model(nn.Module):
    fault: str = ""
    at: int = 1

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 16)(tokens)  # One width: few shapes to compile ops for.
        if self.fault == "widen":
            rates = jnp.exp(-jnp.arange(16.0) / 4)
            angles = jnp.arange(8.0)[:, None] * rates
            x = nn.Dense(16)(x) + angles  # planted: widen
        for i in range(3):
            x = Block(self.fault if i == self.at else "")(x)
        return nn.Dense(16)(nn.LayerNorm()(x))


def loss_of(fault):
    model = Model(fault)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        picked = jnp.take_along_axis(logits, tokens[..., None], -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked[..., 0])

    return loss, initialized(model, TOKENS)


def line_of(fault):
    lines = HERE.read_text().splitlines()
    (found,) = (
        i for i, at in enumerate(lines, 1) if at.endswith(f"# planted: {fault}")
    )
    return f"{HERE.name}:{found} "


def check_an_overflow(fun, params):
    out, stats = fun(params, TOKENS)
    assert nonfinite_report(out)
    first = jmp.first_nonfinite(stats)
    assert (first.op, first.scope.split("/")[:2]) == ("exp", ["Model", "Block_1"])
    assert line_of("overflow") in first.source


@pytest.mark.slow
def test_an_overflow_is_found_by_watch_in_its_block():
    loss, params = loss_of("overflow")
    check_an_overflow(jax.jit(jmp.watch(loss)), params)


@pytest.mark.slow
def test_an_overflow_is_found_by_watch_of_the_gradient_in_its_block():
    """Op by op: under jit, XLA compiles some thousand small sums for a minute."""
    loss, params = loss_of("overflow")
    check_an_overflow(jmp.watch(jax.grad(loss)), params)
    check_an_overflow(jmp.watch(loss), params)
    sound, params = loss_of("")
    assert jmp.first_nonfinite(jmp.watch(sound)(params, TOKENS)[1]) is None


@pytest.mark.slow
def test_gradients_that_vanish_in_float16_are_found_by_the_report_and_by_watch():
    loss, params = loss_of("vanish")
    grads, stats = jmp.watch(jax.grad(loss), "float16")(params, TOKENS)
    lost = {
        row.path
        for row in numerics_report(grads, "float16").rows
        if row.underflow > 0.9
    }
    block = "['params']['Block_1']"
    assert {path for path in lost if block in path} == lost
    assert f"{block}['Dense_0']['kernel']" in lost
    vanishing = [row for row in stats.rows if row.underflow > 0.9]
    assert vanishing
    assert all("Block_1" in row.scope for row in vanishing)
    assert any(line_of("vanish") in row.source for row in vanishing)
    found = suggest_loss_scale(grads)
    assert found.lost > 0
    assert found.rescued > 0.5
    scaled = jax.tree.map(lambda g: g * found.loss_scale, grads)
    share = np.mean([r.overflow for r in numerics_report(scaled, "float16").rows])
    assert share == 0


def test_an_op_that_widens_the_stream_is_named_by_explain():
    loss, params = loss_of("widen")
    (lint,) = (
        lint
        for lint in jmp.explain(loss)(params, TOKENS).lints
        if lint.name == "widened stream"
    )
    assert line_of("widen") in lint.source
    assert lint.scope == "Model"
    assert "as_low" in lint.remedy
    sound, params = loss_of("")
    lints = jmp.explain(sound, backward=True)(params, TOKENS).lints
    assert [lint.name for lint in lints] == []


def test_a_misspelt_pattern_is_named_by_explain():
    loss, params = loss_of("")
    rules = jmp.get_rules("mixed").scope("Blokc_1", "full")
    explanation = jmp.explain(loss, rules)(params, TOKENS)
    (unused,) = explanation.unused
    assert unused.startswith("scope 'Blokc_1' matches nothing. Did you mean 'Block_1'")
    assert explanation.dtype_of("Block_1/LayerNorm", "reduce_sum") == "float32"
    assert jmp.explain(loss)(params, TOKENS).diff(explanation).changed == ()


@pytest.mark.slow
def test_an_op_that_has_to_be_float32_is_found_by_tune_in_its_block():
    loss, params = loss_of("vanish")
    rules = jmp.get_rules("mixed", "float16")
    with jax.numpy_dtype_promotion("standard"):
        found = jmp.tune(loss, rules, tolerance=0.05, progress=lambda line: None)(
            params, TOKENS
        )
    assert found.report.kept
    for kind, name, _, without in found.report.kept:
        assert kind == "scope"
        assert name.startswith("^Model/Block_1")
        assert without.gradients == pytest.approx(1)
        assert "['Block_1']" in without.worst
    assert found.report.error.largest < 0.05
