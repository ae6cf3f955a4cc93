"""Law 7 for programs that nobody wrote: what "O1" keeps, "mixed" keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_lite as jmp
from search import __main__ as search
from search import known, law
from search.programs import Program, draw_args, run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_program_breaks_the_law(seed):
    """50 programs each; ``make search N=10000`` draws more."""
    assert search.run(50, seed) == 0


DOTS = ("dot", 0, 1.0), ("dot", 1, 1.0)
NORM = Program("error", (DOTS[0], ("add", 20.0), ("layer norm",), DOTS[1]), 1.0)


def test_a_breach_is_found(monkeypatch):
    assert not law.breach(NORM)
    real = jmp.autocast

    def lower(fun, rules, **options):
        return real(fun, "O3" if rules == "mixed" else rules, **options)

    monkeypatch.setattr(law.jmp, "autocast", lower)
    assert law.breach(NORM)["bfloat16"].breaks("bfloat16")
    monkeypatch.setattr(law, "DRAWS", 1)
    monkeypatch.setattr(known, "KINDS", ())
    assert search.run(6, 0, shows_all=True) > 0


def test_a_stream_that_a_norm_shifts_is_a_known_kind():
    stream = ("sum", (("add", 100.0),), (("tanh",),)), ("layer norm",)
    program = Program("error", (DOTS[0], *stream, DOTS[1]), 1.0)
    kind = known.kind_of(program)
    assert kind
    assert kind.reason.startswith("A sum of two arrays")
    assert law.breach(program)


def test_a_program_run_by_op_is_that_program():
    steps = (
        ("layers", (("tanh",),)),
        ("recurrent", (("gelu",),)),
        ("while", (("sin",),)),
    )
    program = Program(
        "cross entropy", (*steps, ("associative", *[(("sin",),)] * 2)), 1.0
    )
    args = draw_args(0)
    traced = jax.make_jaxpr(jax.value_and_grad(program))(args)
    found = law.run_by_op(traced.jaxpr, traced.consts, jax.tree.leaves(args))
    expected = jax.tree.leaves(jax.jit(jax.value_and_grad(program))(args))
    for actual, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-4, atol=1e-6)


def test_a_step_means_what_its_name_says():
    args = draw_args(0)
    block = (("dot", 0, 2.0), ("add", 5.0), ("tanh",), ("residual", 0.5, (("abs",),)))
    h = jnp.tanh(args.x @ (2 * args.weights[0]) + 5)
    np.testing.assert_allclose(run(block, args.x, args), h + 0.5 * abs(h), rtol=1e-6)
