"""What the head of a language model costs: its logits, its loss and their derivative.

For each loss: what the gradient of a head moves and holds on an H100, written by hand,
and under autocast with and without the pass `labels`. For a whole model, on an H100 and
a TPU v5e: the same with float32 logits (the format `wide`), and how accurate they are.
For other models, what the float32 ops behind the last product cost. Errors are computed
on a CPU. Exact: no clock, no device.

    .venv/bin/python -m benchmarks.head --json benchmarks/results
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks import autocast, models
from benchmarks.compiled import TARGETS, compile_for, missing
from benchmarks.report import stamp, write

VOCABULARY = 50257
Loss = Callable[[Any, Any], Any]


# ------------------------------------------------------------------------------ losses


def _at(rows: Any, labels: Any) -> Any:
    return jnp.take_along_axis(rows, labels[..., None], -1)[..., 0]


def _with_log_softmax(logits: Any, labels: Any) -> Any:
    return -_at(jax.nn.log_softmax(logits), labels)


def _with_logsumexp(logits: Any, labels: Any) -> Any:
    return jax.nn.logsumexp(logits, -1) - _at(logits, labels)


def _with_z_loss(logits: Any, labels: Any) -> Any:
    total = jax.nn.logsumexp(logits, -1)
    return total - _at(logits, labels) + 1e-4 * total**2


def _smoothed(logits: Any, labels: Any) -> Any:
    rows = jax.nn.log_softmax(logits)
    return -0.9 * _at(rows, labels) - 0.1 * jnp.mean(rows, -1)


def _focal(logits: Any, labels: Any) -> Any:
    found = _at(jax.nn.log_softmax(logits), labels)
    return -((1 - jnp.exp(found)) ** 2) * found


def _log_of_softmax(logits: Any, labels: Any) -> Any:
    return -jnp.log(_at(jax.nn.softmax(logits), labels))


def _by_hand_with_maximum(logits: Any, labels: Any) -> Any:
    logits -= jnp.max(logits, -1, keepdims=True)
    return jnp.log(jnp.sum(jnp.exp(logits), -1)) - _at(logits, labels)


def _one_hot(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def _poly(logits: Any, labels: Any) -> Any:
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.losses.poly_loss_cross_entropy(logits, hot)


def _safe(logits: Any, labels: Any) -> Any:
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return optax.losses.safe_softmax_cross_entropy(logits, hot)


def _actions(values: Any, actions: Any) -> Any:
    rows = values.reshape(-1, values.shape[-1])
    chosen = rows[jnp.arange(len(rows)), actions.reshape(-1)]
    return (chosen - 1) ** 2


def _mapped(values: Any, actions: Any) -> Any:
    rows = jax.nn.log_softmax(values)
    return -jax.vmap(jax.vmap(lambda row, action: row[action]))(rows, actions)


def _in_chunks(logits: Any, labels: Any) -> Any:
    return jax.lax.map(lambda chunk: _with_log_softmax(*chunk), (logits, labels))


LOSSES: Mapping[str, Loss] = {
    "optax, integer labels": optax.softmax_cross_entropy_with_integer_labels,
    "log_softmax, take_along_axis": _with_log_softmax,
    "logsumexp, take_along_axis": _with_logsumexp,
    "the same with a z-loss": _with_z_loss,
    "smoothed labels": _smoothed,
    "focal loss": _focal,
    "log of softmax": _log_of_softmax,
    "differentiated maximum": _by_hand_with_maximum,
    "in chunks (lax.map)": _in_chunks,
    "q[arange(n), actions]": _actions,
    "vmap of log_probs[action]": _mapped,
    "one_hot (Flax, Keras)": _one_hot,
    "one_hot, optax poly loss": _poly,
    "one_hot, optax safe": _safe,
}
"""Losses of logits and integer labels, of the labels' shape."""


class OfLoss(NamedTuple):
    """The gradient of a head with some loss, compiled for an H100.

    Attributes:
      loss: the name of the loss.
      found: how many gathers the pass `labels` has changed.
      hand: gigabytes that it moves, written by hand in bfloat16.
      without: the same under autocast without the pass.
      moved: the same with the pass.
      peak_hand: gigabytes that it holds at most, by hand.
      peak: the same under autocast.
    """

    loss: str
    found: int
    hand: float
    without: float
    moved: float
    peak_hand: float
    peak: float


MIXED = jmp.get_rules("mixed")


def of_loss(
    name: str,
    tokens: tuple[int, int] = (8, 1024),
    width: int = 768,
    vocabulary: int = VOCABULARY,
) -> OfLoss:
    """Compiles the gradient of a head with a loss, in three ways."""
    shapes = ((width, vocabulary), (*tokens, width))
    head, hidden = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    labels = jax.ShapeDtypeStruct(tokens, jnp.int32)

    def loss(head: Any, hidden: Any, labels: Any, dtype: Any = None) -> Any:
        hidden, head = (models.cast_low(x, dtype) for x in (jnp.tanh(hidden), head))
        return jnp.mean(LOSSES[name]((hidden @ head).astype(jnp.float32), labels))

    functions = (
        functools.partial(loss, dtype=jnp.bfloat16),
        jmp.autocast(loss, MIXED.without_pass("labels")),
        jmp.autocast(loss),
    )
    hand, without, mixed = (
        compile_for("h100", jax.grad(fun, (0, 1)), head, hidden, labels)
        for fun in functions
    )
    return OfLoss(
        loss=name,
        found=jmp.explain(loss)(head, hidden, labels).passes.get("labels", 0),
        hand=hand.bytes_moved / 1e9,
        without=without.bytes_moved / 1e9,
        moved=mixed.bytes_moved / 1e9,
        peak_hand=hand.peak_memory / 1e9,
        peak=mixed.peak_memory / 1e9,
    )


# ------------------------------------------------------------------------- whole models


class OfModel(NamedTuple):
    """The gradient of a language model, with its head in some format.

    Attributes:
      target: what it is compiled for.
      loss: the name of the loss.
      variant: how the head is written or which rules it has.
      moved: gigabytes that it moves.
      roofline: milliseconds that it takes at least.
      peak: gigabytes that it holds at most.
    """

    target: str
    loss: str
    variant: str
    moved: float
    roofline: float
    peak: float


RULES: Mapping[str, jmp.Rules] = {
    "mixed, without labels": MIXED.without_pass("labels"),
    "mixed": MIXED,
    "wide, without labels": MIXED.without_pass("labels").scope("head", "wide"),
    "wide": MIXED.scope("head", "wide"),
}
OF_MODEL = ("optax, integer labels", "log_softmax, take_along_axis")


def of_model(target: str, loss: str, **options: Any) -> list[OfModel]:
    """Compiles the gradient of a language model by hand, and under each of `RULES`."""
    options = {"vocabulary": VOCABULARY, "batch": (8, 1024), **options}
    hand, model = (
        models.transformer(dtype, loss=LOSSES[loss], **options)
        for dtype in (jnp.bfloat16, None)
    )
    functions = {
        "by hand": hand.loss,
        **{name: jmp.autocast(model.loss, rules) for name, rules in RULES.items()},
    }
    rows: list[OfModel] = []
    for variant, fun in functions.items():
        program = compile_for(target, jax.grad(fun), model.params, model.batch)
        row = OfModel(
            target=target,
            loss=loss,
            variant=variant,
            moved=program.bytes_moved / 1e9,
            roofline=program.roofline_seconds * 1e3,
            peak=program.peak_memory / 1e9,
        )
        rows.append(row)
    return rows


class Accuracy(NamedTuple):
    """How accurate logits are, against float32's.

    Attributes:
      variant: the rules of the head.
      error: relative error of the gradient of the head's weights, at logits of standard
        deviation 16, median over seeds.
      tokens: percent of tokens whose most likely successor is another one, in a model
        of random weights, mean over seeds.
      tokens_of_head: the same if the head alone is in mixed precision.
    """

    variant: str
    error: float
    tokens: float
    tokens_of_head: float


EXACT = {"xla_allow_excess_precision": False}
"""Else XLA for CPUs drops the rounding of logits to 16 bits."""


def accuracies(
    seeds: int = 5, rows: int = 2048, width: int = 256, vocabulary: int = 8192
) -> list[Accuracy]:
    """Computes the errors of 16-bit and of float32 logits."""
    found: list[Accuracy] = []
    size = {"width": width, "heads": 4, "vocabulary": vocabulary, "batch": (8, 64)}
    for variant in ("mixed", "wide"):
        each = [
            (
                gradient_error(RULES[variant], seed, rows, width, vocabulary),
                other_tokens(RULES[variant], seed, size),
                other_tokens_of_head(RULES[variant], seed, rows, width, vocabulary),
            )
            for seed in range(seeds)
        ]
        errors, whole, alone = zip(*each, strict=True)
        row = Accuracy(
            variant,
            statistics.median(errors),
            statistics.mean(whole),
            statistics.mean(alone),
        )
        found.append(row)
    return found


def gradient_error(
    rules: jmp.Rules, seed: int, rows: int, width: int, vocabulary: int
) -> float:
    """Returns the relative error of the gradient of a head's weights."""
    hidden, head, labels = _head(seed, rows, width, vocabulary, deviation=16.0)

    def loss(head: Any, hidden: Any) -> Any:
        with jax.named_scope("head"):
            logits = hidden @ head
        return jnp.mean(_with_logsumexp(logits, labels))

    exact, low = (
        _run(jax.grad(fun), head, hidden) for fun in (loss, jmp.autocast(loss, rules))
    )
    return float(jnp.linalg.norm(low - exact) / jnp.linalg.norm(exact))


def other_tokens_of_head(
    rules: jmp.Rules, seed: int, rows: int, width: int, vocabulary: int
) -> float:
    """Returns the percent of rows whose largest logit is another one."""
    hidden, head, _ = _head(seed, rows, width, vocabulary, deviation=1.0)

    def logits(head: Any, hidden: Any) -> Any:
        with jax.named_scope("head"):
            return hidden @ head

    return _percent_of_others(logits, rules, head, hidden)


def other_tokens(rules: jmp.Rules, seed: int, size: Mapping[str, Any]) -> float:
    """Returns the percent of tokens whose most likely successor is another one."""
    model = models.transformer(loss=lambda logits, _: logits, mean=False, **size)
    keys = jax.random.split(jax.random.key(seed))
    params = jax.tree.map(
        lambda leaf: jax.random.normal(keys[0], leaf.shape) / leaf.shape[0] ** 0.5,
        model.params,
    )
    tokens = jax.random.randint(keys[1], model.batch.shape, 0, size["vocabulary"])
    return _percent_of_others(model.loss, rules, params, tokens)


def _percent_of_others(fun: Any, rules: jmp.Rules, *args: Any) -> float:
    exact, low = (
        jnp.argmax(_run(f, *args), -1) for f in (fun, jmp.autocast(fun, rules))
    )
    return 100 * float(jnp.mean(exact != low))


def _head(
    seed: int, rows: int, width: int, vocabulary: int, deviation: float
) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden = jax.random.normal(keys[0], (rows, width))
    head = deviation * jax.random.normal(keys[1], (width, vocabulary)) / width**0.5
    return hidden, head, jax.random.randint(keys[2], (rows,), 0, vocabulary)


def _run(fun: Any, *args: Any) -> Any:
    return jax.jit(fun, compiler_options=EXACT)(*args)


# ----------------------------------------------------------------------- float32 tails


class OfTail(NamedTuple):
    """A model, and what its float32 tail costs and spares.

    Attributes:
      model: the name of the model in `benchmarks.autocast`.
      ops: the ops of the tail that are lowered for comparison.
      moved: bytes that the gradient moves on an H100, relative to code by hand.
      moved_low: the same with these ops in 16 bits.
      loss: relative error of the loss of a small model, median over seeds.
      loss_low: the same with these ops in 16 bits.
      error: relative error of its gradient, median over seeds.
      error_low: the same with these ops in 16 bits.
    """

    model: str
    ops: str
    moved: float
    moved_low: float
    loss: float
    loss_low: float
    error: float
    error_low: float


TAILS: Mapping[str, Sequence[str]] = {
    "mlp": ("add", "max", "square"),
    "nnx": ("add", "mul", "tanh", "square"),
    "flax gemma": ("tanh",),
}


def of_tail(name: str, seeds: int) -> OfTail:
    """Compiles a model, and computes the errors of a small one."""
    make, small = autocast.MODELS[name]
    rules = MIXED.low(*TAILS[name])
    hand = make(jnp.bfloat16)
    model, small_model = make(None), make(None, **small)
    moved = [
        compile_for("h100", jax.grad(fun), hand.params, hand.batch).bytes_moved
        for fun in (
            hand.loss,
            jmp.autocast(model.loss),
            jmp.autocast(model.loss, rules),
        )
    ]

    def errors(rules: jmp.Rules) -> list[float]:
        """Returns the errors of the loss and of its gradient."""
        found: list[tuple[float, float]] = []
        functions = small_model.loss, jmp.autocast(small_model.loss, rules)
        for seed in range(seeds):
            given = autocast.fill((small_model.params, small_model.batch), seed)
            exact, low = (_run(jax.value_and_grad(fun), *given) for fun in functions)
            of_loss, of_gradient = map(_relative_error, low, exact)
            found.append((of_loss, of_gradient))
        return [statistics.median(each) for each in zip(*found, strict=True)]

    (loss, error), (loss_low, error_low) = errors(MIXED), errors(rules)
    return OfTail(
        model=name,
        ops=", ".join(TAILS[name]),
        moved=moved[1] / moved[0],
        moved_low=moved[2] / moved[0],
        loss=loss,
        loss_low=loss_low,
        error=error,
        error_low=error_low,
    )


def _relative_error(tree: Any, exact: Any) -> float:
    total = lambda tree: sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree))
    off = total(jax.tree.map(jnp.subtract, tree, exact))
    return (off / total(exact)) ** 0.5


# ------------------------------------------------------------------------------ tables


def tails_table(rows: Sequence[OfTail]) -> str:
    """Returns models with their tails in float32, and in 16 bits, as text."""
    lines = [
        f"{'':12}{'bytes / by hand':>16}{'error: loss':>18}{'gradient':>18}"
        "  in 16 bits",
        f"{'tail in':12}{'float32':>8}{'16 bits':>8}"
        + f"{'float32':>9}{'16 bits':>9}" * 2,
    ]
    lines += [
        f"{row.model:12}{row.moved:>8.2f}{row.moved_low:>8.2f}{row.loss:>9.0e}"
        f"{row.loss_low:>9.0e}{row.error:>9.4f}{row.error_low:>9.4f}  {row.ops}"
        for row in rows
    ]
    return "\n".join(lines)


def losses_table(rows: Sequence[OfLoss]) -> str:
    """Returns the gradients of heads as text."""
    lines = [
        f"{'gradient of a head, GB moved':30}{'found':>7}{'by hand':>9}"
        f"{'without':>9}{'mixed':>8}{'/ by hand':>11}{'peak':>7}"
    ]
    lines += [
        f"{row.loss:30}{row.found or '':>7}{row.hand:>9.2f}"
        f"{row.without:>9.2f}{row.moved:>8.2f}{row.moved / row.hand:>11.2f}"
        f"{row.peak / row.peak_hand:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def models_table(rows: Sequence[OfModel]) -> str:
    """Returns the gradients of language models as text, with ratios to by hand."""
    lines: list[str] = []
    hand = {(r.target, r.loss): r for r in rows if r.variant == "by hand"}
    for i, row in enumerate(rows):
        base = hand[row.target, row.loss]
        if not i or rows[i - 1][:2] != row[:2]:
            title = f"{row.loss}, {row.target}"
            lines += [
                *([""] if lines else []),
                f"{title:38}{'GB moved':>15}{'ms roofline':>15}{'GB peak':>14}",
            ]
        lines.append(
            f"  {row.variant:36}{row.moved:>8.2f} ({row.moved / base.moved:.2f})"
            f"{row.roofline:>8.2f} ({row.roofline / base.roofline:.2f})"
            f"{row.peak:>7.2f} ({row.peak / base.peak:.2f})"
        )
    return "\n".join(lines)


def accuracy_table(rows: Sequence[Accuracy]) -> str:
    """Returns the errors of logits as text."""
    lines = [
        f"{'logits':10}{'gradient error of the head':>28}{'other tokens, %':>18}"
        f"{'of the head alone':>19}"
    ]
    lines += [
        f"{row.variant:10}{row.error:>28.4f}{row.tokens:>18.2f}"
        f"{row.tokens_of_head:>19.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and computes, prints the tables, and writes them as JSON on request."""
    parser = argparse.ArgumentParser("python -m benchmarks.head")
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=[*LOSSES])
    parser.add_argument("--tails", nargs="*", choices=TAILS, default=[*TAILS])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    for target in options.targets:
        if missing(target):
            raise SystemExit(missing(target))
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    small: dict[str, Any] = {"vocabulary": 512, "width": 64} if options.tiny else {}
    of_small = {**small, "heads": 2, "batch": (2, 64)} if options.tiny else {}
    errors = accuracies(options.seeds, **({"rows": 64, **small}))
    print(accuracy_table(errors) + "\n", flush=True)
    of_models = [
        row
        for target in options.targets
        for loss in OF_MODEL
        for row in of_model(target, loss, **of_small)
    ]
    print(models_table(of_models) + "\n", flush=True)
    of_tails = [of_tail(name, options.seeds) for name in options.tails]
    print(tails_table(of_tails) + "\n", flush=True)
    of_losses = [of_loss(name, **small) for name in options.losses]
    print(losses_table(of_losses))
    about = stamp(seeds=options.seeds, tiny=options.tiny)
    tables = {"accuracy": errors, "models": of_models, "losses": of_losses}
    write(options.json, "head", about, **tables, tails=of_tails)


if __name__ == "__main__":
    main()
