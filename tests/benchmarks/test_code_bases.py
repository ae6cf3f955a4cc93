"""Models with the structure of code bases: their recipes cast what they say."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp
from benchmarks import code_bases, tables
from benchmarks.code_bases import CODE_BASES, LOW, Row, measure
from benchmarks.sweep.measure import in_float32
from benchmarks.sweep.program import Random

pytestmark = pytest.mark.usefixtures("standard_promotion")

MEASURED = {
    row["name"]: Row(**row)
    for row in json.loads((tables.RESULTS / "code_bases.json").read_text())["rows"]
}
BY_NAME = {base.name: base for base in CODE_BASES}
each = pytest.mark.parametrize("base", CODE_BASES, ids=lambda base: base.name)


def product_dtypes(fun, *args):
    """Returns the dtypes of the operands of all products, in loops too."""
    found = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                found.add(str(eqn.invars[0].aval.dtype))
            for sub in jax.tree.leaves(
                [*eqn.params.values()],
                is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns"),
            ):
                if hasattr(sub, "jaxpr") or hasattr(sub, "eqns"):
                    visit(getattr(sub, "jaxpr", sub))

    visit(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


@each
def test_without_a_recipe_a_model_is_float32(base):
    args = base.make(Random(0))
    loss = functools.partial(base.loss, None)
    assert product_dtypes(loss, *args) == {"float32"}
    value, gradient = in_float32(loss, [args])[0]
    assert jnp.isfinite(value)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


@each
def test_a_recipe_runs_products_in_16_bits_and_returns_float32(base):
    args = base.make(Random(0))
    loss = functools.partial(base.loss, LOW)
    assert (LOW in product_dtypes(loss, *args)) == bool(base.recipe)
    assert jax.eval_shape(loss, *args).dtype == "float32"


@each
def test_the_table_has_a_row_of_each_model(base):
    row = MEASURED[base.name]
    assert (row.model, row.casts) == (base.model, base.recipe)
    assert (row.recipe is None) == (not base.recipe)
    assert (row.careful is None) == (base.careful is None)


@each
def test_mixed_is_at_most_half_as_far_again_as_a_recipe(base):
    # Rounding alone makes such a difference; more would be a rule that is wrong.
    row = MEASURED[base.name]
    if row.recipe is not None:
        assert row.mixed <= 1.5 * row.recipe
        assert row.mixed <= 3 * row.o1 + 0.005
    else:
        assert row.share < 1


def test_the_network_of_a_spectral_model_is_all_that_is_low():
    base = BY_NAME["NeuralGCM"]
    args = base.make(Random(0))
    rows = jmp.explain(functools.partial(base.loss, None))(*args).rows
    products = [row for row in rows if row.op == "dot_general"]
    assert sum(row.times for row in products if row.precision == "bfloat16") == 3 * 8


def test_a_measurement_is_that_of_the_table():
    row, known = measure(BY_NAME["openpi"]), MEASURED["openpi"]
    assert (row.name, row.share) == (known.name, known.share)
    for name in ("recipe", "mixed", "o1", "float16"):
        assert getattr(row, name) == pytest.approx(getattr(known, name), rel=0.3), name


def test_a_name_measures_one_model_and_writes_nothing(tmp_path, capsys):
    code_bases.main(["NeuralGCM", "--json", str(tmp_path)])
    assert "NeuralGCM, spectral weather" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
