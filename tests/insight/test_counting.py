"""What runs watch and compare enters the same equations, and changes no result."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mostly_slow
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import PROGRAMS, W, X

import jmp_lite as jmp
from jmp_lite.autocasting.plan import Planner
from jmp_lite.autocasting.rules.presets import get_rules
from jmp_lite.insight.comparer import Comparer, Twin
from jmp_lite.insight.rows import records_of
from jmp_lite.insight.watcher import FlaggedValue, Watcher
from jmp_lite.jaxprs import params
from jmp_lite.ops import HIGHER_ORDER


@jax.custom_batching.custom_vmap
def scaled(x):
    return jnp.sin(x) * 2


@scaled.def_vmap
def scaled_rule(axis_size, is_batched, x):
    return jnp.sin(x) * 2, True


@jax.custom_jvp
def doubled(x):
    return jnp.exp(x) * 2


@doubled.defjvp
def doubled_rule(primals, tangents):
    return doubled(*primals), 2 * tangents[0]


MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
ON_TWO_DEVICES = functools.partial(jax.shard_map, mesh=MESH, in_specs=P("data"))

MORE = {
    "custom_vmap": (lambda x: scaled(x @ W), (X,)),
    "custom_jvp of a loop": (
        lambda x: doubled(lax.fori_loop(0, 2, lambda i, c: c @ W, x)),
        (X,),
    ),
    "a sum over devices": (
        ON_TWO_DEVICES(lambda x: lax.psum(jnp.tanh(x @ W), "data"), out_specs=P()),
        (X,),
    ),
    "a branch on each device": (
        ON_TWO_DEVICES(
            lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x @ W, x),
            out_specs=P("data"),
        ),
        (X,),
    ),
}


def visiting(kind):
    """Returns a tool that notes the equations that it runs, and their list."""
    seen = []

    class Visitor(kind):
        def equation(self, eqn, operands, site):
            seen.append(eqn)
            return super().equation(eqn, operands, site)

    return Visitor, seen


def decisions_of(plan):
    for step in plan.steps:
        yield from (record.eqn for record in records_of(step))
        for inside in step.inside:
            yield from decisions_of(inside)


@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_all_tools_enter_the_same_equations(name, monkeypatch):
    fun, args = {**PROGRAMS, **MORE}[name]
    arrays, structure = jax.tree.flatten(args)
    traced = jax.make_jaxpr(lambda *xs: fun(*jax.tree.unflatten(structure, xs)))(
        *arrays
    )
    watcher, watched = visiting(Watcher)
    monkeypatch.setattr(
        watcher, "inner", lambda self: watcher(np.dtype("float16"), None, self.graph)
    )
    tool = watcher(np.dtype("float16"))
    jax.eval_shape(
        lambda *xs: tool.run(traced, list(map(FlaggedValue, xs))) and None,
        *arrays,
    )
    comparer, compared = visiting(Comparer)
    monkeypatch.setattr(comparer, "inner", lambda self: comparer(64))
    other = comparer(64)
    jax.eval_shape(lambda *xs: other.run(traced, list(map(Twin, xs))) and None, *arrays)
    plan = Planner(get_rules("O1")).function(traced, list(map(jax.typeof, arrays)))
    by_tool = [{id(eqn) for eqn in eqns} for eqns in (watched, compared)]
    assert by_tool[0] == by_tool[1]
    decided = list(decisions_of(plan))
    # A loop has a decision for each carry, and a cast that does nothing has none.
    others = {params.op_of(e) for e in decided if id(e) not in by_tool[0]}
    assert others <= HIGHER_ORDER
    left = by_tool[0] - {id(eqn) for eqn in decided}
    passed = {params.op_of(e) for e in watched if id(e) in left}
    assert passed <= {"convert_element_type", "optimization_barrier"}


# A program for several devices takes long op by op.
WRAPPED = [*itertools.product((lambda f: f, jax.jit), MORE)]
ON_ONE_DEVICE = ("custom_vmap", "custom_jvp of a loop")


@pytest.mark.parametrize(
    ("wrap", "name"),
    mostly_slow(
        WRAPPED, [w for w in WRAPPED if w[0] is jax.jit or w[1] in ON_ONE_DEVICE]
    ),
)
def test_a_watched_function_keeps_its_results_and_derivatives(name, wrap):
    fun, args = MORE[name]
    watched = lambda *args: jmp.watch(fun)(*args)[0]
    np.testing.assert_allclose(wrap(watched)(*args), wrap(fun)(*args), rtol=1e-5)
    if name == "custom_vmap":  # JAX has no reverse mode for it.
        return
    grads = [
        wrap(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)))(*args) for f in (fun, watched)
    ]
    np.testing.assert_allclose(grads[0], grads[1], rtol=1e-4)


def test_all_devices_are_counted_and_one_that_fails_is_reported():
    fun = ON_TWO_DEVICES(lambda x: jnp.sin(jnp.log(x)), out_specs=P("data"))
    x = jnp.ones((4, 8)).at[3, 0].set(-1).at[0, :2].set(0)
    _, stats = jax.jit(jmp.watch(fun))(x)
    log, sine = stats.rows
    assert (log.op, log.elements, log.nan, log.inf) == ("log", 32, 1, 2)
    assert (sine.elements, sine.nan, sine.inf) == (32, 3, 0)
    assert (log.is_first, sine.is_first) == (True, False)
    _, stats = jax.jit(jmp.watch(lambda x: jnp.sin(fun(x))))(x)
    assert [row.is_first for row in stats.rows] == [True, False, False]


def test_the_ops_of_all_devices_are_compared():
    fun = ON_TWO_DEVICES(lambda x: jnp.tanh(x @ W) - 1, out_specs=P("data"))
    alone = jax.jit(jmp.compare(lambda x: jnp.tanh(x @ W) - 1))(X)
    rows = jax.jit(jmp.compare(fun))(X).rows
    assert [row.op for row in rows] == [row.op for row in alone.rows]
    for row, other in zip(rows, alone.rows, strict=True):
        assert row.error_out == pytest.approx(other.error_out, rel=0.2)


def test_a_function_with_a_rule_for_vmap_is_watched_inside_and_keeps_the_rule():
    _, stats = jmp.watch(scaled)(X)
    assert [row.op for row in stats.rows] == ["sin", "mul"]
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: jmp.watch(scaled)(x)[0]))(X)
    assert "sin" in str(jaxpr)
    values = jax.vmap(lambda x: jmp.watch(scaled)(x)[0])(X)
    np.testing.assert_allclose(values, jnp.sin(X) * 2, rtol=1e-6)
