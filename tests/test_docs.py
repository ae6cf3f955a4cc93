"""The code of the guides runs as it is shown, and does what their text promises."""

import ast
import dataclasses
import inspect
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from jmp_lite.optimizers.rounding import join

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PACKAGE = pathlib.Path(jmp.__file__).parent


def run_blocks(name):
    """Runs the blocks of a guide in order, in one namespace, and returns it."""
    text = (DOCS / name).read_text()
    names = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, name, "exec"), names)
    return names


GUIDES = sorted(
    path for path in DOCS.glob("*.md") if "```{include}" not in path.read_text()
)
"""The pages, without those that show a file from elsewhere."""


def n_words(*paths):
    """Returns the number of words of files, as `wc -w` counts them."""
    return sum(len(path.read_text().split()) for path in paths)


def test_the_documentation_is_short():
    pages = [*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")]
    assert n_words(*pages) <= 28_000
    assert n_words(DOCS / "pitfalls.md") <= 1_500
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_page_begins_with_its_question_and_a_program(page):
    title, question, rest = page.read_text().split("\n\n", 2)
    assert title.startswith("# ")
    assert re.match(r"\*\*[^*]*\?\*\* ", question)
    before, _, _ = rest.partition("```")
    assert len((question + before).split()) <= 110


@pytest.mark.parametrize(
    "page", ["comparison", "compatibility", "formats", "performance", "pitfalls"]
)
def test_the_short_programs_run(page, standard_promotion):
    assert run_blocks(f"{page}.md")


@pytest.fixture
def flax_guide(capsys):
    with jax.numpy_dtype_promotion("standard"):  # As a user runs it.
        names = run_blocks("flax.md")
    return names, capsys.readouterr().out


@pytest.mark.slow
def test_the_flax_guide_runs_and_its_models_learn(flax_guide):
    names, printed = flax_guide
    assert float(names["loss"]) < 0.2
    assert float(names["metrics"]["loss"]) < 0.2
    assert float(names["nnx_loss"]) < 0.2
    assert names["float16_losses"][-1] < 0.9 * names["float16_losses"][0]
    assert names["tuned_losses"][-1] < 0.9 * names["tuned_losses"][0]
    assert float(names["noisy_metrics"]["loss"]) < 0.3
    assert names["noisy_metrics"]["aux"].shape == (64, 1)
    assert names["heads"] == {"float32"}
    assert (names["out"].dtype, names["low_out"].dtype) == (jnp.float32, jnp.bfloat16)
    leaves = [jax.tree.leaves(names[name]) for name in ("restored", "state")]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
    assert max(map(float, names["tuned"].values())) < 0.2
    modules = {"Net/layer/Linear", "Net/norm/BatchNorm", "Net/head/Linear"}
    assert modules <= names["scopes"]
    assert modules <= names["scopes_of_state"]
    assert names["net"].head.dtype == jnp.float32
    assert names["lora_losses"][-1] < 0.7 * names["lora_losses"][0]
    assert float(names["accumulated_loss"]) < 0.2
    adapted = names["adapted_training"].params
    dtypes = {
        (names["is_base"](path, leaf), leaf.dtype.name)
        for path, leaf in jax.tree.leaves_with_path(adapted)
    }
    assert dtypes == {(True, "bfloat16"), (False, "float32")}
    batch = names["x"], names["y"]
    first_loss, _ = names["adapted_loss"](names["pretrained"], None, batch, None)
    assert names["adapted_metrics"]["loss"] < 0.7 * first_loss
    assert names["found"].op == "div"
    assert "(dropping_loss)" in names["found"].source
    assert jmp.get_loss_scale(names["scaled"].opt_state).loss_scale == 2**10
    check_batch_statistics(names["state"], names["keep_if_skipped"])
    assert re.search(r"layer \(Linear\) +bfloat16", printed)
    assert re.search(r"norm \(BatchNorm\) +float32", printed)


def check_batch_statistics(state, keep_if_skipped):
    class WithStatistics(TrainState):
        batch_stats: object = None

    old = WithStatistics.create(
        apply_fn=None, params=state.params, tx=state.tx, batch_stats=jnp.ones(2)
    )
    for gradient, kept in ((1.0, 0.0), (jnp.inf, 1.0)):
        grads = jax.tree.map(lambda x, g=gradient: x + g, state.params)
        with jax.numpy_dtype_promotion("standard"):  # As a user runs it.
            new = old.apply_gradients(grads=grads, batch_stats=jnp.zeros(2))
        assert (keep_if_skipped(new, old).batch_stats == jnp.full(2, kept)).all()


@pytest.mark.slow
def test_the_first_steps_train_and_build_train_step_keeps_an_average(
    standard_promotion,
):
    names = run_blocks("get_started.md")
    assert float(names["loss"]) < 0.1
    assert int(names["opt_state"].skipped) == 0
    assert names["state"].ema["w1"].dtype == jnp.float32
    assert float(names["metrics"]["loss"]) < 0.1


@pytest.mark.slow
def test_each_recipe_does_what_its_text_promises(standard_promotion, capsys):
    names = run_blocks("recipes.md")
    of_adapters = [names["adapted_metrics"]["loss"], names["own_loss"]]
    assert of_adapters[0] == pytest.approx(float(of_adapters[1]), rel=0.05)
    report = capsys.readouterr().out
    (shown,) = re.findall(
        r"```text\n(error .*?)```", (DOCS / "recipes.md").read_text(), re.DOTALL
    )
    if jax.__version__ == "0.10.2":  # Another version may measure other errors.
        assert shown in report
    assert ["scope", "^block_1$", "FULL"] in [
        line.split()[:3] for line in report.splitlines()
    ]
    assert len(names["products"]) > 20
    assert "100% of the products" in report
    check_kernels(names)
    assert len(names["log"]) == 20
    assert names["log"][-1]["loss"] < names["log"][0]["loss"]
    assert re.findall(r"step (\d+): loss", report) == ["0", "10"]
    check_average_over_micro_batches(names)
    check_muon(names)


def relative_error(found, exact):
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def check_kernels(names):
    x, mask = names["x"], names["mask"]
    layer = nn.MultiHeadDotProductAttention(4)
    exact = layer.apply(names["variables"], x, mask=mask)
    assert 0 < relative_error(names["attended"], exact) < 0.02
    layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    assert 0 < relative_error(names["nnx_attended"], layer(x, mask=mask)) < 0.02
    a, b = (jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2))
    product = jmp.autocast(names["fused"])(a, b)
    assert 0 < relative_error(product, jax.nn.relu(a @ b)) < 0.02


def check_average_over_micro_batches(names):
    params, opt_state, ema, average = names["carried"]
    batch, multi_steps = (names["tokens"], names["labels"]), names["multi_steps"]
    high = dataclasses.replace(jmp.get_loss_scale(opt_state), loss_scale=2.0**24)
    skipping = jmp.set_loss_scale(opt_state, high)
    _, skipped, same, after = names["averaged_step"](
        params, skipping, ema, average, batch
    )
    assert int(skipped.skipped) == 1
    assert multi_steps.has_updated(skipped.inner_state)
    assert after.count == average.count
    jax.tree.map(np.testing.assert_array_equal, same, ema)


def check_muon(names):
    losses, params = names["muon_losses"], names["params"]
    assert losses["bfloat16"] == pytest.approx(float(losses["float32"]), rel=1e-2)
    grads = jax.grad(names["loss_fn"])(*names["args"])
    moments = [
        optimizer.update(grads, optimizer.init(params), params)[1]
        for optimizer in (names["muon"], names["low_muon"])
    ]
    jax.tree.map(np.testing.assert_array_equal, *moments)
    update = jmp.explain(names["muon"].update, "O1")
    products = update(grads, names["muon"].init(params), params).totals.products
    assert set(products) == {"bfloat16"}


@pytest.mark.slow
def test_models_of_equinox_learn_in_16_bits(standard_promotion):
    names = run_blocks("equinox.md")
    assert float(names["loss"]) < 0.2
    assert float(names["float16_value"]) < 0.1
    for pair in (("restored", "model"), ("restored_state", "scaled_state")):
        leaves = [jax.tree.leaves(names[name]) for name in pair]
        jax.tree.map(np.testing.assert_array_equal, *leaves)


@pytest.mark.slow
def test_a_training_resumes_from_its_checkpoint_bit_for_bit(
    standard_promotion, tmp_path
):
    names = run_blocks("checkpoints.md")
    assert int(names["resumed"].step) == 20
    for name in ("resumed", "restored", "again"):
        leaves = [jax.tree.leaves(names[each]) for each in (name, "whole")]
        jax.tree.map(np.testing.assert_array_equal, *leaves)
    batch_at = names["batch_at"]
    names["batch_at"] = lambda i: (batch_at(i)[0] * (jnp.inf if i == 7 else 1), 0.0)
    whole = names["train"](tmp_path / "whole", steps=12)
    names["train"](tmp_path / "parts", steps=9)
    resumed = names["train"](tmp_path / "parts", steps=12)
    assert int(resumed.opt_state.skipped) == 1
    leaves = [jax.tree.leaves(state) for state in (whole, resumed)]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
    leaves = [jax.tree.leaves(names[name]) for name in ("updated", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *leaves)
    assert jmp.get_loss_scale(names["new_state"]).loss_scale == 2**15
    assert names["gradient"]["w1"].dtype == jnp.float32
    assert float(jnp.max(jnp.abs(names["gradient"]["w1"]))) > 0


def test_the_guide_to_devices_runs_on_as_many_as_there_are():
    with jax.numpy_dtype_promotion("standard"):
        names = run_blocks("devices.md")
    assert jax.device_count() == len(names["mesh"].devices.ravel()) > 1
    for state in (names["sharded"], names["replicated"]):
        assert int(state.step) == 20
        assert state.params["w1"].dtype == jnp.float32
    assert names["sharded"].params["w1"].sharding.spec == P("data")
    first, last = names["losses"][0], names["losses"][-1]
    assert last < 0.5 * first
    assert last == pytest.approx(float(names["metrics"]["loss"]), rel=0.02)


@pytest.mark.slow
def test_the_inference_guide_writes_the_same_text_token_by_token_and_in_a_loop():
    with jax.numpy_dtype_promotion("standard"):
        names = run_blocks("inference.md")
    jmp, end = names["jmp"], names["END"]
    assert {str(x.dtype) for x in jax.tree.leaves(names["cache"])} == {
        "bfloat16",
        "int32",
    }
    served, generated = names["tokens"], names["generated"]
    ended = np.asarray(generated == end)
    steps = int(np.max(np.argmax(ended, axis=1)))  # Where the last of them ends.
    assert 0 < steps < names["LENGTH"] - 1
    np.testing.assert_array_equal(served[:, : steps + 1], generated[:, : steps + 1])
    assert np.all(ended[:, steps + 1 :])
    traced = inspect.unwrap(names["generate"])
    given = names["params"], names["cache"], names["first"]
    with jax.numpy_dtype_promotion("standard"):
        rows = jmp.explain(traced)(*given).rows
    carries = [row for row in rows if row.op == "while" and row.precision == "bfloat16"]
    assert len(carries) == 4
    (shown,) = re.findall("`(carry 2: .*?)`", (DOCS / "inference.md").read_text())
    assert shown in {row.reason for row in carries}


def test_the_examples_beside_those_of_other_libraries_run(standard_promotion):
    names = run_blocks("coming_from.md")
    assert int(names["opt_state"].skipped) == 0
    assert int(names["state"].step) == 1
    assert names["low_params"]["w1"].dtype == jnp.float16
    scale = names["jmp"].get_loss_scale(names["mnist_state"])
    assert (float(scale.loss_scale), int(scale.counter)) == (2.0**11, 10)


def test_the_page_on_semantics_explains_its_layer(capsys):
    explanation = run_blocks("semantics.md")["explanation"]
    held = "traced in float32, held in bfloat16: args[0]['embed'], and 1 more"
    assert held in capsys.readouterr().out
    assert held in (DOCS / "semantics.md").read_text()
    assert explanation.dtype_of(op="dot_general") == "bfloat16"


def test_the_page_on_loss_scaling_runs_and_skips_as_described(
    standard_promotion, capsys
):
    names = run_blocks("loss_scaling.md")
    printed = capsys.readouterr().out
    vanished, left = re.findall(r"(\d+)% of the gradients are zero", printed)
    assert (int(vanished) > 50, left) == (True, "0")
    assert vanished == "61" or jax.__version__ != "0.10.2"  # As the page says.
    first = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    assert not bool(names["new_state"].grads_finite)
    assert float(jmp.get_loss_scale(names["new_state"]).loss_scale) == 2.0**7
    assert int(names["opt_state"].skipped) == 0
    assert float(names["loss"]) < 0.5 * names["loss_fn"](first, names["x"])
    assert "optax.MultiSteps is around loss_scaling" in printed
    assert names["with_inner_scale"] < 0.01 < 0.1 < names["without"]
    # The inner scale is above the outer one.
    high, low = jmp.StaticLossScale(2.0**20), jmp.StaticLossScale(1)
    assert names["error_of_gradient"](low, high) > 0.1
    differences = names["differences"]
    assert 4 * differences["float16"] < differences["bfloat16"]


def test_errors_about_arguments_of_other_libraries_are_those_that_the_page_lists(
    standard_promotion,
):
    text = (DOCS / "loss_scaling.md").read_text()
    (table,) = re.findall(
        r"arguments of `DynamicLossScale`:\n\n(.*?)\n\n", text, re.DOTALL
    )
    rows = [re.findall(r"`(\w+)`", line) for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [
        *("loss_scale", "period", "factor", "backoff_factor", "hysteresis")
    ]
    for ours, *others in rows:
        for other in {*others} - {ours}:
            with pytest.raises(TypeError, match=f"did you mean {ours}"):
                jmp.DynamicLossScale(**{other: 2})


@pytest.mark.slow
def test_a_run_changes_its_precision_four_times_and_learns_on(
    standard_promotion, capsys
):
    names = run_blocks("changing_precision.md")
    losses = [float(names[f"{n}_loss"]) for n in ("first", "second", "third", "fourth")]
    assert losses == sorted(losses, reverse=True)
    assert int(names["low_state"].inner_state.inner_state[0].count) == 120
    assert int(names["opt_state"].inner_state.inner_state[0].count) == 160
    assert names["low_params"]["w1"].dtype == jnp.bfloat16
    assert names["restored_state"].inner_state[0].mu["w1"].dtype == jnp.float32
    joined = join(
        names["low_params"]["w1"], names["low_state"][1].remainder["bfloat16"]["w1"]
    )
    np.testing.assert_array_equal(names["restored"]["w1"], joined)
    assert int(names["state"].step) == 2
    assert names["state"].params["w1"].dtype == jnp.bfloat16
    assert names["model"].kernel[...].dtype == jnp.bfloat16
    assert "At [0] it has ScaleByAdamState(.count, .mu, .nu)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_on_memory_runs_and_stores_moments_in_8_bits(standard_promotion):
    names = run_blocks("memory.md")
    moments = names["state"].opt_state.inner_state.inner_state[0]
    assert (moments.mu["w1"].dtype.name, moments.nu["w1"].dtype.name) == (
        "float8_e4m3fn",
        "uint8",
    )
    assert float(names["metrics"]["loss"]) < 0.5
    assert names["small"].params["table"].dtype == jnp.bfloat16
    assert abs(float(names["of_step"]["loss"]) / float(names["exact"]) - 1) < 0.01


@pytest.mark.slow
def test_the_tools_of_the_troubleshooting_page_find_the_mistakes(
    standard_promotion, capsys
):
    names = run_blocks("troubleshooting.md")
    found = names["jmp"].first_nonfinite(names["stats"])
    assert (found.op, found.inf > 0) == ("dot_general", True)
    printed = capsys.readouterr().out
    assert "dot_general" in printed
    assert "lint: " in printed  # What widened the stream, with a remedy.
    assert "as_low" in printed


def test_the_first_page_runs(standard_promotion):
    names = run_blocks("index.md")
    assert names["grads"]["w1"].dtype == jnp.float32


def test_with_the_option_products_are_added_up_in_float32_on_a_cpu():
    text = (DOCS / "troubleshooting.md").read_text()
    [options] = re.findall(r"compiler_options=({.*?})", text)
    batch, g = np.random.default_rng(0).standard_normal((2, 8, 128, 64), np.float32)

    def gradient(dtype, **options):
        x, y, w = (jnp.asarray(a, dtype) for a in (batch, g, np.ones((64, 64))))
        pull = jax.jit(lambda x, y, w: jax.vjp(lambda w: x @ w, w)[1](y)[0], **options)
        exact = jnp.einsum("btd,bte->de", x, y, preferred_element_type=jnp.float32)
        far = np.asarray(pull(x, y, w), np.float32) - np.asarray(exact)
        return np.linalg.norm(far) / np.linalg.norm(exact)

    assert gradient(jnp.float32) < 1e-5
    assert gradient(jnp.float16) < 1e-3
    assert gradient(jnp.bfloat16, compiler_options=ast.literal_eval(options)) < 3e-3


def first_column(page, header):
    """Returns what a table has in backticks in its first column."""
    text = (DOCS / page).read_text()
    (table,) = re.findall(rf"\| {header} \|.*\n\|-.*\n((?:\|.*\n)*)", text)
    rows = table.splitlines()
    return [name for row in rows for name in re.findall("`(.*?)`", row.split("|")[1])]


def test_the_table_of_lints_has_the_lints_of_explain():
    source = (PACKAGE / "insight" / "lints.py").read_text()
    maker = r"(?:int|_of_readers)\("
    named = re.findall(maker + r'\s*(?:\w+(?:\[0\])?,\s*)?"([a-z0-9 -]+)"', source)
    listed = first_column("troubleshooting.md", "lint")
    assert sorted(listed) == sorted(set(named))


def test_the_table_of_warnings_has_words_of_the_warnings():
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    source = "".join(texts.values())
    warnings = first_column("troubleshooting.md", "warning")
    del texts[PACKAGE / "jaxprs" / "source.py"]  # It passes the warnings of others on.
    calls = re.findall(r"(?:warnings|source)\.warn\(", "".join(texts.values()))
    assert len(warnings) == len(calls)
    for words in warnings:
        assert words in source


LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?(?:\s+\"(\w+)\")?\)")


@pytest.mark.parametrize("guide", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_file_and_test_that_a_guide_links_exists(guide):
    for link, name in LINK.findall((DOCS / guide).read_text()):
        assert (DOCS / link).exists(), link
        assert not name or f"def {name}(" in (DOCS / link).read_text(), name


def test_the_guide_to_float8_shows_the_output_of_explain(capsys):
    names = run_blocks("float8.md")
    reason = names["rows"][0].reason
    assert f"# {reason}\n" in (DOCS / "float8.md").read_text()
    explanation = names["explanation"]
    assert explanation.totals.products == {
        "float8_e4m3fn": 4,
        "float8_e5m2": 8,
        "bfloat16": 3,
    }
    assert explanation.lints == ()
    assert "float8_e5m2" in capsys.readouterr().out
