"""What is lost without each rule of the decisions."""

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from benchmarks.ablation import rules

X = jnp.full((8, 8), 0.3)


def traced(fun, rule):
    """Returns the gradient of a function without a rule, as text."""
    with rule.off():
        low = jmp.autocast(fun, rule.rules, compute_dtype="float16")
        return str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(low(x))))(X))


def everything(x):
    """Has something for most rules."""
    h = jnp.tanh(x @ x + 1)
    normed = (h - h.mean()) * jax.lax.rsqrt(h.var() + 1e-6)
    gate = jax.nn.sigmoid(normed @ x)
    y = jnp.log(1 - gate) @ x + gate @ x / (normed @ x)
    return (jnp.sin(y) @ x - 100) ** 2


@pytest.mark.parametrize("name", rules.RULES)
def test_a_rule_is_switched_off_and_on_again(name):
    on = rules.Rule("")
    before = traced(everything, on)
    traced(everything, rules.RULES[name])
    assert traced(everything, on) == before


@pytest.mark.parametrize("name", ["amplify", "slope", "tail"])
def test_without_a_rule_programs_change(name):
    is_equal = traced(everything, rules.RULES[name]) == traced(
        everything, rules.Rule("")
    )
    assert not is_equal


def test_rows_are_written_read_and_shown(tmp_path, capsys):
    options = ["--rules", "demanded product", "power", "--programs", "siren"]
    options += ["--drawn", "3", "--models", "--json", str(tmp_path)]
    rules.main(options)
    shown = capsys.readouterr().out
    (last,) = [line for line in shown.splitlines() if line.startswith("without")]
    assert "the sweep" in last
    rules.main([*options, "--rules", "power"])
    again = capsys.readouterr().out
    assert "demanded product" in again  # It is there, and not measured again.
