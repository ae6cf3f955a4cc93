"""Trains a LeNet on handwritten digits in float32, bfloat16 and float16.

    make demo
    python examples/demo.py --epochs 5 --seed 1 --out somewhere

It needs ``pip install '.[demo]'``. The network and its loss are written once, for
float32. ``autocast`` changes their precision, and ``loss_scaling`` keeps the gradients
of float16 in range.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from rich import progress
from rich.console import Console
from rich.table import Table
from sklearn import datasets

import jmp_lite as jmp

BATCH_SIZE = 64
TEST_SIZE = 449  # A quarter of the images.
PEAK_LEARNING_RATE = 3e-3
WINDOW = 20
"""Each printed or plotted loss is the mean of this many steps in a row."""

# float16 starts far too high and grows often, so that one short training shows the
# scale back off, grow again and settle.
LOSS_SCALES: dict[str, jmp.LossScale] = {
    "float32": jmp.NoOpLossScale(),
    "bfloat16": jmp.NoOpLossScale(),
    "float16": jmp.DynamicLossScale(2.0**24, period=50),
}


# ------------------------------------------------------------------------- the training


class LeNet(nn.Module):
    """The network, whose code does not mention a precision."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Returns the logits of images."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


class Run(NamedTuple):
    """The results of one training; ``losses`` and later fields have a row per step."""

    precision: str
    share_low: float
    test_accuracy: float
    final_loss_scale: float
    param_bytes: int
    kept_bytes: int
    losses: np.ndarray
    loss_scales: np.ndarray
    grads_finite: np.ndarray

    @property
    def is_scaled(self) -> bool:
        """Whether the run had a loss scale."""
        return bool(np.any(self.loss_scales != 1))


def train_all(epochs: int, seed: int) -> list[Run]:
    """Trains once per precision, with the same seed and the same order of images."""
    # On stderr, because it shows times. stdout depends on the seed only.
    with progress.Progress(
        progress.TextColumn("{task.description:<8}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("steps"),
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        return [
            train(precision, loss_scale, epochs, seed, bar.track)
            for precision, loss_scale in LOSS_SCALES.items()
        ]


def train(
    precision: str,
    loss_scale: jmp.LossScale,
    epochs: int,
    seed: int,
    track: Callable[..., Iterable[Any]],
) -> Run:
    """Trains once; ``track`` iterates over the batches and shows the progress."""
    (images, labels), (test_images, test_labels) = load_digits()
    batches = order_of_images(len(images), epochs, seed)
    model = LeNet()
    forward = in_precision(model.apply, precision)

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        logits = forward(params, images)  # In float32, like the rest of the loss.
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    schedule = optax.cosine_decay_schedule(PEAK_LEARNING_RATE, len(batches))
    optimizer = jmp.loss_scaling(optax.adam(schedule), loss_scale)
    step = make_step(loss_fn, optimizer)
    params = model.init(jax.random.key(seed), images[:1])
    opt_state = optimizer.init(params)

    history: list[Any] = []
    # A Python loop: on a CPU, XLA's convolutions are slow in a lax.scan.
    for batch in track(batches, description=precision):
        params, opt_state, metrics = step(
            params, opt_state, images[batch], labels[batch]
        )
        history.append(jax.device_get(metrics))

    losses, loss_scales, grads_finite = map(np.stack, zip(*history, strict=True))
    logits = jax.device_get(jax.jit(forward)(params, test_images))
    one_batch = images[:BATCH_SIZE], labels[:BATCH_SIZE]
    return Run(
        precision=precision,
        share_low=share_in_16_bits(jax.value_and_grad(loss_fn), params, *one_batch),
        test_accuracy=float(np.mean(logits.argmax(axis=-1) == test_labels)),
        final_loss_scale=float(jmp.get_loss_scale(opt_state).loss_scale),
        param_bytes=jmp.dtype_summary(params).total.bytes,
        kept_bytes=bytes_kept(loss_fn, params, *one_batch),
        losses=losses,
        loss_scales=loss_scales,
        grads_finite=grads_finite,
    )


def load_digits() -> tuple[Any, Any]:
    """Returns ``(images, labels)`` for training and for testing, always the same.

    Images are float32 of shape ``(n, 8, 8, 1)`` in [0, 1], labels int32 of ``(n,)``.
    """
    digits: Any = datasets.load_digits()
    # Shuffled, because the file is sorted: 0, 1, 2, ..., 9, 0, 1, 2, ...
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order, :, :, None].astype(np.float32) / 16
    labels = digits.target[order].astype(np.int32)
    to_train, to_test = slice(TEST_SIZE, None), slice(TEST_SIZE)
    return (images[to_train], labels[to_train]), (images[to_test], labels[to_test])


def order_of_images(n_images: int, epochs: int, seed: int) -> np.ndarray:
    """Returns indices of shape ``(steps, BATCH_SIZE)``, shuffled in each epoch."""
    rng = np.random.default_rng(seed)
    n_used = n_images - n_images % BATCH_SIZE
    order = [rng.permutation(n_images)[:n_used] for _ in range(epochs)]
    return np.reshape(order, (-1, BATCH_SIZE))


def in_precision(forward: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Returns ``forward`` computing in ``dtype``, with float32 results."""
    return forward if dtype == "float32" else jmp.autocast(forward, compute_dtype=dtype)


def make_step(loss_fn: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Returns the training step, which also returns its loss and loss scale."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
        scale = jmp.get_loss_scale(opt_state)
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale=scale)(
            params, images, labels
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, (loss, scale.loss_scale, opt_state.grads_finite)

    return step


def share_in_16_bits(fun: Callable[..., Any], *args: Any) -> float:
    """Returns the share of matrix products and convolutions that run in 16 bits."""
    products = jmp.explain(fun, "O0")(*args).totals.products
    low = sum(n for dtype, n in products.items() if dtype in ("bfloat16", "float16"))
    return low / sum(products.values())


def bytes_kept(loss_fn: Callable[..., Any], params: Any, *batch: Any) -> int:
    """Returns the bytes of the backward pass's residuals, without computing them.

    They are the residuals of ``jax.vjp``, each counted once. Parameters and the batch
    do not count, because they exist anyway. Arrays made from them, such as weights cast
    to 16 bits, do count. (XLA may recompute a residual instead of saving it.)
    """

    def residuals(params: Any, batch: Any) -> list[Any]:
        _, backward = jax.vjp(lambda params: loss_fn(params, *batch), params)
        arguments = set(map(id, jax.tree.leaves((params, batch))))
        # The function that vjp returns is a pytree: its leaves are the residuals.
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        return [leaf for name, leaf in kept.items() if name not in arguments]

    return jmp.dtype_summary(jax.eval_shape(residuals, params, batch)).total.bytes


# ------------------------------------------------------------------------ what it shows


COLUMNS: dict[str, Callable[[Run], str]] = {
    "precision": lambda run: run.precision,
    "16-bit products": lambda run: f"{run.share_low:.0%}",
    "test accuracy": lambda run: f"{run.test_accuracy:.2%}",
    "final loss": lambda run: f"{running_mean(run.losses)[-1]:.5f}",
    "steps skipped": lambda run: f"{np.sum(~run.grads_finite)}",
    "final loss scale": lambda run: (
        f"2**{np.log2(run.final_loss_scale):g}" if run.is_scaled else "none"
    ),
    "param kB": lambda run: f"{run.param_bytes / 1e3:,.0f}",
    "saved kB": lambda run: f"{run.kept_bytes / 1e3:,.0f}",
}


def show(runs: Sequence[Run], seed: int, picture: pathlib.Path) -> None:
    """Prints the table of trainings from one seed, and draws the picture."""
    table = Table(
        title=f"LeNet on handwritten digits: {len(runs[0].losses)} steps, seed {seed}",
        caption="16-bit products: share of matmuls and convs, backward ones too\n"
        f"final loss: mean of the last {WINDOW} steps\n"
        f"saved: residuals of the backward pass for {BATCH_SIZE} images\n"
        "last digits vary between machines and versions",
    )
    for header in COLUMNS:
        justify = "left" if header == "precision" else "right"
        table.add_column(header.replace(" ", "\n"), justify=justify)
    for run in runs:
        table.add_row(*(cell(run) for cell in COLUMNS.values()))
    Console().print(table)

    print("\nWhat autocast to float16 does with the loss and its gradient:")
    print(explain_loss(seed).summary())
    draw(runs, picture)
    print(f"Losses and loss scale, step by step: {picture}")


def explain_loss(seed: int) -> jmp.results.Explanation:
    """Explains the scaled loss of one batch under autocast to float16."""
    (images, labels), _ = load_digits()
    model = LeNet()
    params = model.init(jax.random.key(seed), images[:1])

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        logits: Any = model.apply(params, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return LOSS_SCALES["float16"].scale(losses.mean())

    explained = jmp.explain(loss_fn, compute_dtype="float16", backward=True)
    return explained(params, images[:BATCH_SIZE], labels[:BATCH_SIZE])


def draw(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Draws the losses and, for each run with one, the loss scale over the steps."""
    # Not with pyplot: Agg draws a standalone figure without a screen.
    figure = Figure(figsize=(8, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.set_title("LeNet on handwritten digits")
    upper.set(yscale="log", ylabel=f"loss (mean of {WINDOW} steps)")
    lower.set(ylabel="loss scale", xlabel="step")
    lower.set_yscale("log", base=2)

    # From wide and light to thin and dark, because the curves overlap.
    styles = (("#f0b040", "-", 5.0), ("#2f7fc1", "--", 2.5), ("black", ":", 1.5))
    for run, (color, line, width) in zip(runs, styles, strict=True):
        means, name = running_mean(run.losses), run.precision
        steps = np.arange(WINDOW - 1, len(run.losses))
        upper.plot(steps, means, line, color=color, lw=width, label=name)
        if not run.is_scaled:
            continue
        skipped = np.flatnonzero(~run.grads_finite)
        lower.plot(run.loss_scales, drawstyle="steps-mid", color=color, label=name)
        lower.plot(skipped, run.loss_scales[skipped], "rx", label="skipped step")
    for axes in (upper, lower):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def running_mean(losses: np.ndarray) -> np.ndarray:
    """Returns the means of ``WINDOW`` losses in a row."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), mode="valid")


# --------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and draws the picture.

    Args:
      argv: the arguments of the command line; None for those of this process.

    Raises:
      SystemExit: the arguments are not valid (code 2), or ask for help (code 0).
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    picture = options.out / "demo.png"
    try:  # Now, not when all the work is done.
        options.out.mkdir(parents=True, exist_ok=True)
        picture.open("ab").close()
    except OSError as error:
        parser.error(f"argument --out: {error.strerror}: {error.filename}")
    show(train_all(options.epochs, options.seed), options.seed, picture)


_ABOUT = """\
Trains a LeNet on the 1,797 handwritten digits of scikit-learn, three times from the
same seed: in float32, bfloat16 and float16. Prints a table of the three trainings and
what autocast does with the float16 loss, and draws the losses and the loss scale. Takes
about a minute on two cores. The last digits vary between machines and versions.
"""


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=_ABOUT, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    positive = functools.partial(whole_number, at_least=1)
    about = "number of passes over the images"
    add("--epochs", metavar="N", type=positive, default=20, help=about)
    about = "seed of the parameters and of the order of images"
    add("--seed", metavar="S", type=whole_number, default=0, help=about)
    about = "folder for the picture"
    add("--out", metavar="DIR", type=pathlib.Path, default="demo_out", help=about)
    return parser


def whole_number(text: str, at_least: int = 0) -> int:
    """Reads a whole number that fits an int32."""
    if text.isdecimal() and at_least <= int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected a whole number from {at_least} to 2**31 - 1, got {text!r}"
    )


if __name__ == "__main__":
    main()
