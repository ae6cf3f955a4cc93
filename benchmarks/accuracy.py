"""What precision costs in accuracy: two models, trained on real data, over seeds.

A residual network with BatchNorm reads handwritten digits (scikit-learn ships them), a
small transformer writes Python (the text of the standard library), each in float32, by
the presets in bfloat16 and float16, with float8 products, and with gradients and
moments in fewer bits. It prints the loss and the accuracy on data that was not trained
on, mean and deviation over the seeds, and whether a loss is above float32's by more
than two deviations of float32's own seeds.
Nothing is downloaded; the text, and with it the losses, depends on the version of
Python.

    .venv/bin/python -m benchmarks.accuracy --json benchmarks/results
    .venv/bin/python -m benchmarks.accuracy --quick
"""

import argparse
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import Progress

import jmp_lite as jmp
import jmp_lite.nnx
from benchmarks.models import ResNet
from benchmarks.report import stamp, write
from examples.demo import load_digits, order_of_images
from jmp_lite.autocasting.rules.rules import is_identity


class Variant(NamedTuple):
    """A precision to train in.

    Attributes:
      rules: those of the loss.
      grad_dtype: the dtype of the gradients.
      moments: the dtype that the optimizer's moments are stored in.
    """

    rules: jmp.Rules
    grad_dtype: str = "float32"
    moments: str = "float32"

    def optimizer(self, schedule: Any) -> Any:
        """Returns adamw that stores its moments so."""
        adamw = optax.adamw(schedule)
        if self.moments == "float32":
            return adamw
        return jmp.low_precision_state(adamw, self.moments, key=jax.random.key(0))


PRESETS = ("mixed", "O1", "O2", "O3")
VARIANTS: Mapping[str, Variant] = {
    "float32": Variant(jmp.get_rules("O0")),
    **{
        f"{dtype}, {preset}": Variant(jmp.get_rules(preset, dtype))
        for dtype in ("bfloat16", "float16")
        for preset in PRESETS
    },
    # Of every product, however small: the networks here are.
    "float8": Variant(jmp.get_rules("mixed").product(jmp.Float8(smallest=0))),
    # Of bfloat16, mixed.
    "16-bit gradients": Variant(jmp.get_rules("mixed"), "bfloat16"),
    "16-bit moments": Variant(jmp.get_rules("mixed"), moments="bfloat16"),
    "8-bit moments": Variant(jmp.get_rules("mixed"), moments="float8_e4m3fn"),
    "8 bits, gradients 16": Variant(
        jmp.get_rules("mixed"), "bfloat16", "float8_e4m3fn"
    ),
}


class Trained(NamedTuple):
    """One training.

    Attributes:
      model: what was trained.
      variant: in which precision.
      seed: of parameters and of the order of the data.
      loss: on the test data, in float32.
      accuracy: likewise.
      skipped: how many steps overflowed.
      epochs: loss and accuracy on the test data after each epoch; empty where the
        batches are drawn at random.
    """

    model: str
    variant: str
    seed: int
    loss: float
    accuracy: float
    skipped: int
    epochs: Sequence[tuple[float, float]] = ()


class Trainer(NamedTuple):
    """How one model is trained in one precision.

    Attributes:
      start: from a seed to what is trained.
      batches: from a seed to the batches, in order.
      step: from what is trained and a batch to what is trained.
      evaluate: from what is trained to the loss and the accuracy on the test data.
      skipped: from what is trained to how many steps overflowed.
      epoch: the steps of one epoch; None where the batches are drawn at random.
    """

    start: Callable[[int], Any]
    batches: Callable[[int], Iterator[Any]]
    step: Callable[[Any, Any], Any]
    evaluate: Callable[[Any], tuple[Any, Any]]
    skipped: Callable[[Any], int]
    epoch: int | None = None


def _loss_and_accuracy(logits: Any, labels: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


# ---------------------------------------------------------------------------- digits


@functools.cache
def _initialized(model: ResNet) -> Callable[[int], Any]:
    """Returns what makes variables, the same in whatever precision they are trained."""
    images = jnp.zeros((1, *load_digits()[0][0].shape[1:]))
    return jax.jit(lambda seed: model.init(jax.random.key(seed), images))


def digits(variant: Variant, steps: int) -> Trainer:
    """Returns a residual network of linen, trained by ``build_train_step``."""
    rules = variant.rules
    (images, labels), (test_images, test_labels) = load_digits()
    # With the 0.99 of Flax the averages lag behind in so few steps, which the test
    # losses would show above all else. It spares O3, whose averages in bfloat16 then
    # fall short (tests/flax/test_linen.py).
    model = ResNet(widths=(8, 16, 32), momentum=0.9)
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    per_epoch = len(images) // 64

    def loss_fn(params: Any, batch_stats: Any, batch: Any, rng: Any) -> Any:
        del rng
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, images, mutable=["batch_stats"])
        return _loss_and_accuracy(logits, labels)[0], (new["batch_stats"], None)

    optimizer = variant.optimizer(schedule)
    init, step = jmp.build_train_step(
        loss_fn, optimizer, rules, grad_dtype=variant.grad_dtype
    )
    jitted = jax.jit(step, donate_argnums=0)

    def start(seed: int) -> jmp.states.TrainingState:
        variables = _initialized(model)(seed)
        return init(variables["params"], variables["batch_stats"])

    def batches(seed: int) -> Iterator[Any]:
        order = order_of_images(len(images), -(-steps // per_epoch), seed)
        for rows in order[:steps]:
            yield images[rows], labels[rows]

    @jax.jit
    def evaluate(state: jmp.states.TrainingState) -> tuple[Any, Any]:
        @jmp.autocast(rules=rules)
        def predict(params: Any, batch_stats: Any) -> Any:
            variables = {"params": params, "batch_stats": batch_stats}
            return model.apply(variables, test_images, train=False)

        logits = predict(state.params, state.model_state)
        return _loss_and_accuracy(logits, test_labels)

    return Trainer(
        start=start,
        batches=batches,
        step=lambda state, batch: jitted(state, batch)[0],
        evaluate=evaluate,
        skipped=lambda state: int(state.opt_state.skipped),
        epoch=per_epoch,
    )


# ------------------------------------------------------------------------------ text

CONTEXT, WIDTH, CHARACTERS = 32, 64, 128
MODULES = (
    *("argparse", "ast", "asyncio.tasks", "bdb", "calendar", "codecs", "configparser"),
    *(
        "csv",
        "dataclasses",
        "datetime",
        "difflib",
        "email.message",
        "enum",
        "fractions",
    ),
    *("functools", "gettext", "heapq", "http.client", "inspect", "json.decoder"),
    *("logging.__init__", "mailbox", "optparse", "pickle", "random", "smtplib"),
    *("statistics", "subprocess", "tarfile", "textwrap", "threading", "traceback"),
    *("typing", "unittest.mock", "zipfile"),
)
TEST_MODULES = ("shutil", "tempfile", "urllib.parse")


class Block(nnx.Module):
    """A pre-norm transformer block, causal."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List(nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Returns activations of the shape of ``x``."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Writer(nnx.Module):
    """A language model of characters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(CHARACTERS, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        """Returns logits of the next characters, ``[batch, length, CHARACTERS]``."""
        x = self.embed(tokens) + self.positions(jnp.arange(CONTEXT))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


@functools.cache
def read_text(modules: Sequence[str]) -> np.ndarray:
    """Returns the characters of modules of the standard library, as numbers."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = [
        (library / (name.replace(".", "/") + ".py")).read_bytes() for name in modules
    ]
    return np.minimum(np.frombuffer(b"".join(texts), np.uint8), CHARACTERS - 1)


def text(variant: Variant, steps: int) -> Trainer:
    """Returns a transformer of nnx, trained by ``nnx.Optimizer``."""
    rules = variant.rules
    written, unseen = read_text(MODULES), read_text(TEST_MODULES)
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps)
    dtype = "float32" if is_identity(rules) else rules.compute_dtype
    scale = jmp.default_loss_scale(dtype)

    def loss_fn(model: Writer, tokens: Any) -> Any:
        return _loss_and_accuracy(model(tokens[:, :-1]), tokens[:, 1:])

    low_loss_fn = jmp_lite.nnx.autocast(loss_fn, rules)

    # One for all seeds.
    optimizer = jmp.loss_scaling(variant.optimizer(schedule), scale)

    def make(seed: Any) -> tuple[Writer, nnx.Optimizer[Any]]:
        model = Writer(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(lambda: make(0)))

    def windows(of: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
        at = rng.integers(0, len(of) - CONTEXT, count)
        return of[at[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)

    def batches(seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        return (windows(written, rng, 16) for _ in range(steps))

    # As nnx.jit, which would also go through all modules at every step.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: nnx.State, tokens: Any) -> nnx.State:
        model, optimizer = nnx.merge(graph, state)
        loss_scale = jmp.get_loss_scale(optimizer.opt_state)
        grad_fn = jmp_lite.nnx.value_and_grad(
            low_loss_fn,
            loss_scale=loss_scale,
            has_aux=True,
            grad_dtype=variant.grad_dtype,
        )
        _, grads = grad_fn(model, tokens)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    @jax.jit
    def evaluate(state: nnx.State, tokens: Any) -> tuple[Any, Any]:
        model, _ = nnx.merge(graph, state)
        logits = jmp_lite.nnx.autocast(model, rules)(tokens[:, :-1])
        return _loss_and_accuracy(logits, tokens[:, 1:])

    tests = windows(unseen, np.random.default_rng(0), 512)
    return Trainer(
        start=lambda seed: nnx.state(make(seed)),
        batches=batches,
        step=step,
        evaluate=lambda state: evaluate(state, tests),
        skipped=lambda state: int(nnx.merge(graph, state)[1].opt_state.skipped[...]),
    )


# ------------------------------------------------------------------------------ runs

MODELS: Mapping[str, Callable[[Variant, int], Trainer]] = {
    "digits": digits,
    "text": text,
}
STEPS = {"digits": 220, "text": 500}
QUICK = ("bfloat16, mixed", "float16, mixed")
"""What is trained in a hurry: to compile a variant takes longer than to train it."""


def train_all(
    models: Sequence[str],
    variants: Sequence[str],
    seeds: int,
    steps: Mapping[str, int] = STEPS,
) -> list[Trained]:
    """Trains each model in each precision from each seed, and shows how far it is."""
    trained: list[Trained] = []
    with Progress(console=Console(stderr=True)) as bar:
        total = len(variants) * seeds * sum(steps[model] for model in models)
        task = bar.add_task("", total=total)
        for model in models:
            for variant in variants:
                trainer = MODELS[model](VARIANTS[variant], steps[model])
                for seed in range(seeds):
                    bar.update(task, description=f"{model}, {variant}, seed {seed}")
                    state = trainer.start(seed)
                    epochs: list[tuple[float, float]] = []
                    for count, batch in enumerate(trainer.batches(seed), start=1):
                        state = trainer.step(state, batch)
                        bar.advance(task)
                        if trainer.epoch and count % trainer.epoch == 0:
                            epochs.append(_evaluated(trainer, state))
                    loss, accuracy = _evaluated(trainer, state)
                    skipped = trainer.skipped(state)
                    row = Trained(model, variant, seed, loss, accuracy, skipped, epochs)
                    trained.append(row)
    return trained


def _evaluated(trainer: Trainer, state: Any) -> tuple[float, float]:
    loss, accuracy = trainer.evaluate(state)
    return float(loss), float(accuracy)


class Summary(NamedTuple):
    """The trainings of one model in one precision.

    Attributes:
      model: what was trained.
      variant: in which precision.
      loss: the mean over the seeds.
      loss_deviation: the standard deviation over the seeds.
      accuracy: the mean over the seeds.
      accuracy_deviation: the standard deviation over the seeds.
      skipped: the steps that were skipped, in the mean.
      noise: how many of float32's standard deviations the loss is above float32's.
    """

    model: str
    variant: str
    loss: float
    loss_deviation: float
    accuracy: float
    accuracy_deviation: float
    skipped: float
    noise: float


WITHIN = 2.0
"""A loss that is fewer of float32's deviations above its mean is as good."""


def summarize(trained: Sequence[Trained]) -> list[Summary]:
    """Returns means and deviations over the seeds, beside those of float32."""

    def told(rows: Sequence[Trained], name: str) -> tuple[float, float]:
        values = np.array([getattr(row, name) for row in rows])
        with np.errstate(invalid="ignore"):  # A training may have come to infinity.
            return float(values.mean()), float(values.std(ddof=1))

    groups: dict[tuple[str, str], list[Trained]] = {}
    for row in trained:
        groups.setdefault(row[:2], []).append(row)
    found: list[Summary] = []
    for (model, variant), rows in groups.items():
        mean, deviation = told(rows, "loss")
        full_mean, full_deviation = told(groups[model, "float32"], "loss")
        skipped, _ = told(rows, "skipped")
        noise = (mean - full_mean) / max(full_deviation, 1e-12)
        accuracy = told(rows, "accuracy")
        found.append(
            Summary(model, variant, mean, deviation, *accuracy, skipped, noise)
        )
    return found


def table(summaries: Sequence[Summary]) -> str:
    """Returns them as text."""
    lines: list[str] = []
    for i, row in enumerate(summaries):
        if not i or summaries[i - 1].model != row.model:
            lines.append(
                f"\n{row.model:24}{'test loss':>18}{'test accuracy':>18}{'skipped':>9}"
                f"{'deviations':>12}"
            )
        verdict = "" if row.noise <= WITHIN else "  worse than float32's seeds"
        lines.append(
            f"  {row.variant:22}{row.loss:>9.4f} ± {row.loss_deviation:.4f}"
            f"{row.accuracy:>9.2%} ± {row.accuracy_deviation:>6.2%}"
            f"{row.skipped:>9.1f}{row.noise:>+12.1f}{verdict}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the table, and writes it as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.accuracy")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few of all: two minutes")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error("a deviation needs two seeds or more")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    asked = options.variants or (QUICK if options.quick else VARIANTS)
    variants = list(dict.fromkeys(["float32", *asked]))
    steps = {k: n // 10 for k, n in STEPS.items()} if options.quick else STEPS
    seeds = min(options.seeds, 2) if options.quick else options.seeds
    trained = train_all(options.models, variants, seeds, steps)
    found = summarize(trained)
    print(table(found))
    told = stamp(seeds=seeds, steps={model: steps[model] for model in options.models})
    print(f"\n{told}")
    write(options.json, "accuracy", told, rows=trained)


if __name__ == "__main__":
    main()
