"""The README runs as it is shown, each block by itself."""

import json
import pathlib
import re
import runpy

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_block(contents):
    """Runs the one block with some contents by itself, and returns its names."""
    names = {"__name__": "readme"}
    exec(compile(block_with(contents), "README.md", "exec"), names)
    return names


def block_with(contents):
    """Returns the one block with some contents."""
    (block,) = (block for block in BLOCKS if contents in block)
    return block


def test_the_list_of_gains_is_that_of_the_table():
    (table,) = re.findall(
        r"<!-- table: h200.short -->\n```text\n(.*?)```", README, re.S
    )
    rows = [line[42:].split() for line in table.splitlines()[1:7]]
    lstm, *transformers, mlp, _ = [[float(cell) for cell in row] for row in rows]
    assert f"an LSTM is {lstm[1] / lstm[0]:.1f} times as fast" in README
    assert all(0.95 < row[2] < 1.02 for row in transformers)
    less = [1 - row[3] / row[4] for row in transformers]
    assert [round(1 / share) for share in (min(less), max(less))] == [7, 5]
    assert "a seventh to a fifth less memory" in README
    assert f"MLP blocks ({100 * (mlp[2] - 1):.0f} % slower above)" in README


def gradients():
    path = ROOT / "benchmarks" / "results" / "autocast.json"
    return json.loads(path.read_text())["rows"]


def test_small_models_trace_as_much_longer_as_the_readme_says():
    traced = {
        (row["model"], row["target"], row["variant"]): row["trace"]
        for row in gradients()
    }
    ratios = [
        trace / traced[model, target, "by hand"]
        for (model, target, variant), trace in traced.items()
        if variant == "mixed"
    ]
    assert f"trace up to {max(ratios):.1f} times as long" in README


def test_the_program_by_hand_does_what_autocast_does():
    by_hand, own = run_block("# by hand"), run_block("@jmp.autocast\n")
    assert by_hand["loss"].dtype == jnp.float32
    assert jnp.allclose(by_hand["loss"], own["loss"], rtol=1e-2)
    shapes = [jax.tree.map(jnp.shape, names["grads"]) for names in (by_hand, own)]
    assert shapes[0] == shapes[1]


def test_bfloat16_takes_one_decorator(capsys):
    names = run_block("@jmp.autocast\n")
    shown = re.findall(r"^print.*  # (.*)", block_with("@jmp.autocast\n"), re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
    assert names["loss"].dtype == names["grads"]["up"].dtype == jnp.float32
    fun = names["loss_fn"].__wrapped__
    explanation = jmp.explain(fun)(names["w"], names["x"])
    assert explanation.totals.products == {"bfloat16": 2}


def test_the_float16_step_holds_a_scale_and_moves_the_weights():
    names = run_block("def train_step")
    assert int(names["opt_state"].skipped) == 0
    assert bool(jnp.all(names["w"] < 0.1))
    changed = re.findall(r"^(.*?) +# changed$", README, re.MULTILINE)
    assert len(changed) == 4


def test_a_train_state_of_flax_holds_the_scale():
    state = run_block("TrainState")["state"]
    assert int(state.step) == 1
    assert jmp.get_loss_scale(state.opt_state).loss_scale == 2**15


def test_what_others_take_is_one_line():
    (line,) = re.findall("- Equinox: `(.*?)`", README)
    model = eqx.nn.MLP(8, 1, 32, 2, key=jax.random.key(0))
    names = {"eqx": eqx, "jmp": jmp}
    names["loss_fn"] = lambda model: jax.vmap(model)(jnp.ones((4, 8))).mean()
    _, grads = eval(line, names)(model)
    assert grads.layers[0].weight.dtype == jnp.float32
    assert "pass `axis_name` to `loss_scaling`" in README
    assert jmp.loss_scaling(optax.sgd(1.0), axis_name="data")


def test_a_product_stays_float32_under_full_precision_alone():
    def marked(x, w):
        return jnp.sum(jmp.as_full(x) @ w + jmp.as_full(x))

    def under(x, w):
        with jmp.full_precision():
            return jnp.sum(x @ w + x)

    assert "`with jmp.full_precision():`" in README
    args = jnp.ones((4, 8)), jnp.ones((8, 8))
    of_marked, of_under = (jmp.explain(fun)(*args) for fun in (marked, under))
    assert of_marked.totals.products == {"bfloat16": 1}
    assert of_marked.dtype_of(op="add") == "float32"
    assert of_under.totals.products == {"float32": 1}


def test_the_training_step_of_the_first_page_trains(capsys):
    result = runpy.run_path(str(ROOT / "docs" / "training_step.py"))
    losses = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(losses) == 6
    assert float(losses[-1]) < 0.01 * float(losses[0])
    assert list(jmp.dtype_summary(result["params"])) == ["float32"]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:\s]+)[)\s#]", README))
def test_every_file_that_is_linked_exists(link):
    assert (ROOT / link).exists()
