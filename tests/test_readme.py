"""What the README shows is what runs."""

import pathlib
import re
import runpy

import flax
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp
from jmp_lite.__main__ import load_digits, make_lenet

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_training_step_is_the_file_and_trains(capsys):
    path = ROOT / "docs" / "training_step.py"
    code = path.read_text().split('"""', 2)[2].strip()
    assert code in README
    result = runpy.run_path(str(path))
    losses = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(losses) == 6
    assert float(losses[-1]) < 0.01 * float(losses[0])
    assert list(jmp.dtype_summary(result["params"])) == ["float32"]


def test_the_built_train_step_runs_as_shown():
    (block,) = (block for block in BLOCKS if "build_train_step" in block)
    names = {
        "jax": jax,
        "jmp": jmp,
        "optax": optax,
        "params": {"w": jnp.ones(2)},
        "model_state": {},
        "batch": jnp.ones(2),
    }
    body = "loss, aux = (params['w'] * batch).sum() ** 2, None"
    exec(block.replace("...  # compute", f"{body}  # compute"), names)
    assert int(names["state"].step) == 1
    assert bool(names["metrics"]["grads_finite"])


OLDEST = jax.__version__ == "0.10.2"
"""Another version may trace other equations for the same operations."""


def of_any_version(text):
    """Returns what an explanation says that depends on no version of JAX."""
    rows = set(re.findall(r"^ +\d+  (\w+) +(\w+)", text, re.MULTILINE))
    plumbing = {"broadcast_in_dim", "reshape", "stop_gradient", "squeeze"}
    sums = re.findall(r"^(?:products|work): .*", text, re.MULTILINE)
    return {row for row in rows if row[0] not in plumbing}, sums


def test_the_explanation_is_what_explain_prints():
    (block,) = (block for block in BLOCKS if "jmp.explain" in block)
    (shown,) = re.findall(r"```text\n(autocast to bfloat16: .*?)```", README, re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "jmp": jmp, "print": lambda *args: None}
    # Under the name of a file, so that its lines are told.
    exec(compile(block, "layer.py", "exec"), names)
    args = (names[name] for name in ("x", "w", "b"))
    told = str(jmp.explain(names["layer"])(*args))
    assert told.startswith("autocast to bfloat16: ")
    assert of_any_version(told) == of_any_version(shown)
    lines = [[line.split("  ") for line in text.splitlines()] for text in (told, shown)]
    assert lines[0] == lines[1] or not OLDEST


def test_the_explanation_of_the_demo_s_network_is_what_is_shown():
    (shown,) = re.findall(
        r"```text\n(autocast to float16: .*?)\n```", README, re.DOTALL
    )
    model, ((images, _), _) = make_lenet(), load_digits()
    variables = model.init(jax.random.key(0), images[:1])
    told = jmp.explain(model.apply, compute_dtype="float16")(variables, images[:64])
    assert told.share_low("dot_general") == 1
    assert of_any_version(str(told)) == of_any_version(shown)
    if OLDEST and flax.__version__ == "0.12.8":
        assert str(told).splitlines() == shown.splitlines()


def test_tune_finds_what_is_shown(capsys):
    (block,) = (block for block in BLOCKS if "jmp.tune" in block)
    (shown,) = re.findall(r"```text\n(error .*?)\n```", README, re.DOTALL)
    exec(block, {"jax": jax, "jnp": jnp, "jmp": jmp})
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert told == shown.splitlines() or not OLDEST
    assert [line.split()[:3] for line in told[3:]] == [
        line.split()[:3] for line in shown.splitlines()[3:]
    ]


def test_the_rules_and_marks_are_made_as_shown():
    (block,) = (block for block in BLOCKS if "full_precision" in block)
    names = {"jmp": jmp, "layer": jnp.tanh}
    exec(block, names)
    assert names["rules"].precision_of("tanh") is jmp.Precision.FULL
    assert names["low"](jnp.ones(2)).dtype == "float32"


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:\s]+)[)\s#]", README))
def test_every_file_that_is_linked_exists(link):
    assert (ROOT / link).exists()


def test_what_is_said_of_this_library_is_a_test():
    (table,) = re.findall(r"## Beside the others\n(.*?)\n## ", README, re.DOTALL)
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")]
    for cell in rows[2:]:
        file, name = re.search(r'\]\((\S+) "(\w+)"\)', cell).groups()
        assert f"def {name}(" in (ROOT / file).read_text(), cell
