"""The README runs as it is shown, each block by itself."""

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


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 190


def test_the_gain_on_the_first_screen_is_that_of_the_results():
    pattern = r"([\d.]+) of the\s+time and ([\d.]+) of the\s+memory"
    first_screen, calculated = README[:500], README.partition("## What it costs")[2]
    assert re.findall(pattern, first_screen) == re.findall(pattern, calculated) != []


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


def test_each_framework_runs_by_itself():
    state = run_block("TrainState")["state"]
    assert int(state.step) == 1
    assert jmp.get_loss_scale(state.opt_state).loss_scale == 2**15
    model = run_block("nnx.Optimizer")["model"]
    assert float(jnp.max(jnp.abs(model.layers[1].mean[...]))) > 0  # It is updated.


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


@pytest.mark.slow
def test_the_readme_shows_the_totals_that_explain_prints(capsys):
    names = run_block("jmp.first_nonfinite")
    printed = capsys.readouterr().out
    shown = re.findall(r"```text\n(equations: .*?)```", README, re.DOTALL)
    assert names["stats"].rows
    if jax.__version__ == "0.10.2":  # Another version may trace other equations.
        assert printed.endswith(f"{shown[0]}None\n")
    for line in ("products: ", "work: "):
        (total,) = re.findall(f"^{line}.*", *shown, re.MULTILINE)
        assert total in printed


def test_the_training_step_of_the_first_page_trains(capsys):
    result = runpy.run_path(str(ROOT / "docs" / "training_step.py"))
    losses = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(losses) == 6
    assert float(losses[-1]) < 0.01 * float(losses[0])
    assert list(jmp.dtype_summary(result["params"])) == ["float32"]


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:\s]+)[)\s#]", README))
def test_every_file_that_is_linked_exists(link):
    assert (ROOT / link).exists()


def test_each_feature_in_the_comparison_links_to_a_test():
    (table,) = re.findall(r"## Compared with others\n(.*?)\n## ", README, re.DOTALL)
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    header, features = 2, 6
    assert len(rows) == header + features
    for cell in rows[2:]:
        file, name = re.search(r'\]\((\S+) "(\w+)"\)', cell).groups()
        assert f"def {name}(" in (ROOT / file).read_text(), cell
