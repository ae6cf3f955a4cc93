"""The README runs as it is shown, each block by itself."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import pytest

import jmp_lite as jmp

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run_block(contents):
    """Runs the one block with some contents by itself, and returns its names."""
    (block,) = (block for block in BLOCKS if contents in block)
    names = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_readme_is_short():
    assert len(README.splitlines()) < 220


def test_bfloat16_takes_one_decorator():
    names = run_block("@jmp.autocast\n")
    assert names["loss"].dtype == names["grads"]["up"].dtype == jnp.float32
    fun = names["loss_fn"].__wrapped__
    explanation = jmp.explain(fun)(names["w"], jnp.ones((4, 8)))
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
    grads = run_block("eqx.nn.MLP")["grads"]
    assert grads.layers[0].weight.dtype == jnp.float32
    restored = run_block("checkpointer")["state"]
    assert jmp.get_loss_scale(restored).loss_scale == 2**15
    names = run_block("make_mesh")
    assert names["x"].sharding.num_devices == jax.device_count() > 1
    assert names["grads"].dtype == jnp.float32


@pytest.mark.slow
def test_the_readme_shows_the_totals_that_explain_prints(capsys):
    names = run_block("jmp.explain")
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
