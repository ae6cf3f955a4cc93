"""What the README shows is what runs."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_lite as jmp

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(autouse=True)
def standard_promotion():
    # Optax itself mixes int32 counters with floats, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        yield


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


def test_every_public_name_stands_in_the_table():
    (table,) = re.findall(r"\| room \| names \|.*?\n\n", README, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", table))
    missing = set(jmp.__all__) - named - {"DtypeSummary", "DtypeTotals"}
    assert missing == set()
    assert named - set(jmp.__all__) == {"casting", "scaling", "train"}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_file_that_is_linked_exists(link):
    assert (ROOT / link).exists()
