"""The example that trains on handwritten digits."""

import contextlib
import io
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import image

from examples import demo


@pytest.fixture(scope="module", autouse=True)
def standard_promotion():
    # optax's adam divides a Python float by an int32, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def plain_terminal():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.delenv("FORCE_COLOR", raising=False)
        yield


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--epochs", "0"], "--epochs: .* from 1 to .*, got '0'"),
        (["--epochs", "two"], "--epochs: expected a whole number.*'two'"),
        (["--seed", "-1"], "--seed: .* from 0 to .*, got '-1'"),
        (["--seed", str(2**31)], "--seed: expected a whole number"),
        (["--out", __file__], "--out: File exists: .*test_demo.py"),
    ],
)
def test_bad_arguments_exit_with_2_and_a_message(argv, fragment, capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(argv)
    assert error.value.code == 2
    assert re.search(fragment, capsys.readouterr().err)


def test_help_describes_what_the_demo_does(capsys):
    with pytest.raises(SystemExit) as error:
        demo.main(["--help"])
    assert error.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for fragment in (
        "1,797 handwritten digits",
        "last digits vary",
        "order of images (default: 0)",
    ):
        assert fragment in text


class Demo(NamedTuple):
    """The output of the demo on stdout and stderr, its picture, and its trainings."""

    stdout: str
    stderr: str
    picture: pathlib.Path
    runs: list


@pytest.fixture(scope="module")
def quick_demo(tmp_path_factory):
    """The demo of one epoch."""
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        runs = demo.train_all(epochs=1, seed=3)
        demo.show(runs, 3, picture)
    return Demo(stdout.getvalue(), stderr.getvalue(), picture, runs)


@pytest.fixture
def runs(quick_demo):
    return quick_demo.runs


def cells_of(table, precision):
    lines = table.splitlines()
    (line,) = (line for line in lines if f" {precision} " in line and line[0] in "│|")
    return re.split(r"\s*[│|]\s*", line)[1:-1]


@pytest.mark.slow
def test_the_demo_prints_a_table_with_a_row_per_precision(quick_demo):
    table = quick_demo.stdout
    headers = table[: table.index(" float32 ")]
    for word in " ".join(demo.COLUMNS).split():
        assert re.search(rf"\b{word}\b", headers)
    for precision in ("float32", "bfloat16", "float16"):
        assert len(cells_of(table, precision)) == len(demo.COLUMNS)
    assert "…" not in table
    assert "last digits vary between machines and versions" in table


@pytest.mark.slow
def test_the_same_seed_prints_the_same_results(quick_demo, tmp_path, capsys):
    out = tmp_path / "not" / "there yet"
    demo.main(["--epochs", "1", "--seed", "3", "--out", str(out)])
    again = capsys.readouterr().out.splitlines()
    assert again[:-1] == quick_demo.stdout.splitlines()[:-1]
    assert [path.name for path in out.iterdir()] == ["demo.png"]


@pytest.mark.slow
def test_the_progress_of_every_run_is_on_stderr_alone(quick_demo):
    stdout, stderr = quick_demo.stdout, quick_demo.stderr
    steps = len(quick_demo.runs[0].losses)
    assert stderr.count(f"{steps}/{steps} steps") == 3
    assert "steps 0:" not in stdout


@pytest.mark.slow
def test_the_demo_draws_a_picture_and_prints_its_path(quick_demo):
    stdout, picture = quick_demo.stdout, quick_demo.picture
    assert f"Losses and loss scale, step by step: {picture}\n" in stdout
    assert "What autocast to float16 does with the loss and its gradient:" in stdout
    assert "\nproducts: 12 float16\n" in stdout
    page = (pathlib.Path(__file__).parent.parent / "docs" / "demo.md").read_text()
    (shown,) = re.findall(r"```text\n(equations: .*?)lint: ", page, re.DOTALL)
    (place,) = re.findall(r"^lint: .*?:\d+, in ", page, re.MULTILINE)
    assert place in stdout
    products, work = re.findall(r"^(?:products|work): .*", shown, re.MULTILINE)
    assert f"{products}\n{work}\n" in stdout
    if jax.__version__ == "0.10.2":  # Another version may trace other equations.
        assert shown in stdout
    assert "(100%)\ncasts: " in stdout
    assert "no loss scale" not in stdout
    pixels = image.imread(picture)
    assert pixels.ndim == 3
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 50


@pytest.mark.slow
def test_only_float16_is_scaled_and_backs_off_from_a_scale_that_overflows(runs):
    float32, bfloat16, float16 = runs
    for run in (float32, bfloat16):
        assert not run.is_scaled
        assert run.grads_finite.all()
        assert demo.COLUMNS["final loss scale"](run) == "none"
    assert float16.is_scaled
    assert float16.loss_scales[0] == 2**24
    assert not float16.grads_finite[0]
    assert float16.grads_finite[-1]
    assert float16.final_loss_scale < 2**20
    after = np.where(float16.grads_finite, float16.loss_scales, float16.loss_scales / 2)
    np.testing.assert_array_equal(float16.loss_scales[1:], after[:-1])


@pytest.mark.slow
def test_the_runs_start_alike_and_differ_by_rounding_alone(runs):
    float32, bfloat16, float16 = runs
    assert all(run.losses.dtype == np.float32 for run in runs)
    assert float32.losses[0] == pytest.approx(bfloat16.losses[0], rel=1e-2)
    assert float32.losses[0] == pytest.approx(float16.losses[0], rel=1e-3)
    assert float32.losses[0] != bfloat16.losses[0] != float16.losses[0]


@pytest.mark.slow
def test_parameters_stay_float32_and_activations_take_less(runs):
    float32, bfloat16, float16 = runs
    assert float32.param_bytes == bfloat16.param_bytes == float16.param_bytes
    assert bfloat16.kept_bytes == float16.kept_bytes
    assert 0.5 < float16.kept_bytes / float32.kept_bytes < 0.65


def test_training_and_test_images_are_disjoint_and_always_the_same():
    (images, labels), (test_images, test_labels) = demo.load_digits()
    assert len(images) + len(test_images) == 1797
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    assert images.shape[1:] == test_images.shape[1:] == (8, 8, 1)
    assert images.min() == 0
    assert images.max() == 1
    assert set(labels) == set(test_labels) == set(range(10))
    (again, _), _ = demo.load_digits()
    np.testing.assert_array_equal(images, again)


def test_every_epoch_takes_no_image_twice_and_another_order():
    order = demo.order_of_images(130, epochs=2, seed=0)
    assert order.shape == (4, demo.BATCH_SIZE)
    first, second = order.reshape(2, -1)
    assert len(set(first)) == len(set(second)) == 128
    assert (first != second).any()
    np.testing.assert_array_equal(order, demo.order_of_images(130, epochs=2, seed=0))
    assert (order != demo.order_of_images(130, epochs=2, seed=1)).any()


@pytest.mark.parametrize("dtype", demo.LOSS_SCALES)
def test_a_forward_function_multiplies_in_its_precision_between_float32(dtype):
    def forward(params, images):
        return images @ params["w"]

    args = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
    low = demo.in_precision(forward, dtype)
    assert low(*args).dtype == jnp.float32
    (dot,) = (
        eqn
        for eqn in jax.make_jaxpr(low)(*args).eqns
        if eqn.primitive.name == "dot_general"
    )
    assert [v.aval.dtype for v in (*dot.invars, *dot.outvars)] == [dtype] * 3
    share = demo.share_in_16_bits(jax.value_and_grad(lambda *a: low(*a).sum()), *args)
    assert share == (dtype != "float32")


def test_bytes_kept_are_the_residuals_but_for_parameters_and_batch():
    def loss_fn(params, images):
        return jnp.sin(images @ params).sum()

    def loss_fn_in_16_bits(params, images):
        low = loss_fn(params.astype(jnp.bfloat16), images.astype(jnp.bfloat16))
        return low.astype(jnp.float32)

    params, images = jnp.ones((3, 2)), jnp.ones((5, 3))
    # By hand: the cosine of 5 x 2 numbers; in 16 bits the cast images as well.
    assert demo.bytes_kept(loss_fn, params, images) == 4 * 5 * 2
    assert demo.bytes_kept(loss_fn_in_16_bits, params, images) == 2 * (5 * 2 + 5 * 3)


@pytest.mark.slow
def test_the_three_precisions_reach_the_same_accuracy(tmp_path, capsys):
    demo.main(["--out", str(tmp_path)])
    table = capsys.readouterr().out
    accuracies = [
        float(cells_of(table, precision)[2].rstrip("%"))
        for precision in demo.LOSS_SCALES
    ]
    assert min(accuracies) > 97
    assert max(accuracies) - min(accuracies) <= 1
    shares = [cells_of(table, precision)[1] for precision in demo.LOSS_SCALES]
    assert shares == ["0%", "100%", "100%"]
    assert int(cells_of(table, "float16")[4]) > 0
