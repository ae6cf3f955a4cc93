"""A plan is data: it prints, and CONTRIBUTING.md shows how three of them are made."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import mostly_slow
from programs import PROGRAMS, QUICK, W, X, total

import jmp_lite as jmp
from jmp_lite.autocasting.decide.facts import State
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.run import Runner

CONTRIBUTING = pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md"


def plan(fun, *args, rules="mixed"):
    traced = jax.make_jaxpr(fun)(*args)
    return Planner(jmp.get_rules(rules)).function(traced, list(map(jax.typeof, args)))


def test_contributing_shows_the_plans_of_its_programs(capsys):
    text = CONTRIBUTING.read_text()
    shown = re.findall(
        r"```python\n(.*?)```\n\n(?:```text\n(.*?)```)?", text, re.DOTALL
    )
    assert len(shown) == 3
    names = {}
    for block, output in shown:
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
        assert capsys.readouterr().out == output


def test_a_plan_knows_types_alone_and_binds_nothing():
    def fun(x):
        return jnp.exp(x @ x)

    x = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    traced = jax.make_jaxpr(fun)(x)
    found = Planner(jmp.get_rules("mixed")).function(traced, [jax.typeof(x)])
    product, exp = found.steps
    assert [facts.state for facts in product.operands] == [State.SOFT, State.SOFT]
    assert product.results[0].state is State.LOW
    assert exp.results[0].state is State.HARD


def test_a_block_that_is_called_often_has_one_plan():
    @jax.jit
    def block(x, w):
        return jnp.tanh(x @ w)

    def fun(x, w):
        for _ in range(4):
            x = block(x, w)
        return x

    x, w = jnp.ones((2, 4)), jnp.full((4, 4), 0.5)
    first, *others, last = [step.inside[0] for step in plan(fun, x, w).steps]
    assert others[0] is others[1]
    # Its operand is an argument, and the last one returns the result of the function.
    assert len({first, *others, last}) == 3


def tanh_of_a_power(x, w):
    """In float16 the power is float32, and so is the slope of what reads it."""
    h = x @ w
    return jnp.tanh(h * h * h * h * h) @ w


EVERY = {**PROGRAMS, "tanh of a power": (tanh_of_a_power, (X, W))}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rules", ["mixed", "O1", "O2", "O3", "float8", "torch"])
@pytest.mark.parametrize("name", mostly_slow(EVERY, [*QUICK, "tanh of a power"]))
def test_every_value_has_the_dtype_that_was_planned(monkeypatch, name, rules, dtype):
    fun, args = EVERY[name]
    run, values = Runner._step, []

    def step(self, planned, operands):
        results = run(self, planned, operands)
        assert all(map(lambda v, f: v.facts is f, results, planned.results))
        values.extend(results)
        return results

    monkeypatch.setattr(Runner, "_step", step)
    gradient = jax.grad(lambda *args: total(fun(*args)))
    for each in (fun, gradient):
        jax.make_jaxpr(jmp.autocast(each, rules, compute_dtype=dtype))(*args)
    floats = [value for value in values if value.facts.state is not None]
    assert floats
    for value in floats:
        assert value.array.dtype == value.facts.spec.dtype(jnp.dtype(dtype))
