"""What float8 products change in programs compiled for accelerators, beside 16 bits.

Prints ratios of the preset "float8" to "mixed": for transformers on an H100, a B200 and
a TPU v5e; by the width of the model, and by the length of its sequences, of which
attention has no float8 products; for layers split over eight devices; and beside
block-scaled products (mxfp8). Exact: no clock, no device. Then it trains a small
character transformer for 1,000 steps in float32, "mixed" and "float8", from the same
seeds, and prints the gaps of their losses and the errors of their first gradients.

    make targets && .venv/bin/python -m benchmarks.float8 --json benchmarks/results
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_lite as jmp
from benchmarks import accuracy, collectives, models
from benchmarks.autocast import fill
from benchmarks.compiled import Program, compile_for, missing
from benchmarks.report import stamp, write
from jmp_lite.formats.float8 import Scaled, apart, quantize_operand
from jmp_lite.jaxprs.dots import bilinear_dot

EVERY_SIZE = accuracy.VARIANTS["float8"].rules
TOKENS = 8192
STACK = "24 in a scan, remat"
E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")


class Compared(NamedTuple):
    """The gradient of a model, in float8 and in 16 bits.

    Attributes:
      model: its layout and depth.
      target: what it is compiled for.
      width: of its layers.
      length: of a sequence; all sequences have 8,192 tokens together.
      smallest: the least harmonic mean of a float8 product's sizes.
      roofline: the least time, as a ratio of float8 to 16 bits.
      moved: the same of the bytes that are moved.
      peak: the same of the memory that is held at most.
      kernels: the same of the number of kernels.
      products: how many products run in float8.
      raised: how many instructions cast float8 to a wider dtype; 0 if every product has
        a float8 kernel.
    """

    model: str
    target: str
    width: int
    length: int
    smallest: float
    roofline: float
    moved: float
    peak: float
    kernels: float
    products: int
    raised: int


class Recipe(NamedTuple):
    """The gradient of MLP blocks of width 2,048 under one recipe.

    Attributes:
      recipe: "mixed", "float8", "mxfp8" or "float8, weights first".
      target: what it is compiled for.
      gigabytes: what is moved.
      milliseconds: the least time.
      peak: what is held at most, in gigabytes.
      kernels: how many run.
      products: how many products run in float8.
    """

    recipe: str
    target: str
    gigabytes: float
    milliseconds: float
    peak: float
    kernels: int
    products: int


class Sent(NamedTuple):
    """A train step of two MLP blocks of width 2,048 on eight H100s.

    Attributes:
      layout: how the work is split.
      rules: the preset.
      milliseconds: the least time of what a device computes.
      megabytes: what goes through collectives, by dtype.
    """

    layout: str
    rules: str
    milliseconds: float
    megabytes: dict[str, float]


def float8_products(program: Program) -> int:
    """Returns how many products of a program run in float8."""
    return sum(n for dtypes, n in program.matmuls.items() if dtypes.startswith("f8"))


def raised(program: Program) -> int:
    """Returns how many instructions of a program cast float8 to a wider dtype."""
    found = 0
    for computation in program.module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "convert":
                operand = computation.instructions[instruction.operands[0]]
                dtypes = operand.arrays[0].dtype, instruction.arrays[0].dtype
                found += dtypes[0].startswith("f8") and not dtypes[1].startswith("f8")
    return found


def compile_model(
    rules: jmp.Rules | str,
    layout: str = "scan",
    depth: int = 4,
    width: int = 2048,
    length: int = 1024,
    target: str = "h100",
) -> Program:
    """Compiles the gradient of a transformer with heads of 128, of 8,192 tokens."""
    model = models.transformer(
        layout=layout,
        depth=depth,
        width=width,
        heads=max(width // 128, 1),
        batch=(TOKENS // length, length),
    )
    gradient = jax.grad(jmp.autocast(model.loss, rules))
    return compile_for(target, gradient, model.params, model.batch)


def compare(
    layout: str = "scan",
    depth: int = 4,
    width: int = 2048,
    length: int = 1024,
    target: str = "h100",
    rules: jmp.Rules | None = None,
) -> Compared:
    """Returns what float8 changes in the gradient of a transformer."""
    rules = rules or jmp.get_rules("float8")
    size = (layout, depth, width, length, target)
    ours, mixed = (compile_model(each, *size) for each in (rules, "mixed"))
    return Compared(
        f"{depth} blocks, {layout}",
        target,
        width,
        length,
        rules.float8_format.smallest,
        ours.roofline_seconds / mixed.roofline_seconds,
        ours.bytes_moved / mixed.bytes_moved,
        ours.peak_memory / mixed.peak_memory,
        ours.kernels / mixed.kernels,
        float8_products(ours),
        raised(ours),
    )


MODELS: Sequence[dict[str, Any]] = (
    {"depth": 24},
    {"depth": 24, "layout": "scan + remat"},
    {"width": 4096},
    {"layout": "unrolled"},
    {"width": 768},
    {"target": "b200"},
    {"target": "v5e"},
)


def mlp(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Returns the loss of residual MLP blocks with one kind of product."""

    def loss(blocks: Any, head: Any, x: Any) -> Any:
        for up, down in blocks:
            x = x + product(jax.nn.gelu(product(x, up)), down)
        return jnp.mean((x @ head.astype(x.dtype)).astype(jnp.float32) ** 2)

    return loss


def stack(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Returns the loss of residual MLP blocks in a loop, which keeps only its carry."""

    @jax.checkpoint
    def block(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + product(jax.nn.gelu(product(x, up)), down), None

    def loss(blocks: Any, head: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(block, x, blocks)
        return jnp.mean((x @ head.astype(x.dtype)).astype(jnp.float32) ** 2)

    return loss


def stack_quantized_first(blocks: Any, head: Any, x: Any) -> Any:
    """Returns the loss of ``stack`` with weights quantized before the loop."""
    quantize = jax.vmap(lambda w: quantize_operand(w, E4M3))
    operands = jax.tree.map(lambda w: quantize(w.astype(jnp.bfloat16)), blocks)

    def product(x: Any, weight: Any) -> Any:
        lhs = apart(quantize_operand(x, E4M3), weight)
        axes = ((1,), (0,)), ((), ())
        return bilinear_dot(lhs, weight, Scaled(E4M3, E4M3, E5M2), axes)

    return stack(product)(operands, head, x.astype(jnp.bfloat16))


def _in_blocks(x: Any, w: Any) -> Any:
    """Returns a product whose operands have a scale for each 32 numbers."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    return jax.nn.scaled_dot_general(
        x.astype(jnp.bfloat16),
        w.astype(jnp.bfloat16),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
        configs=[config] * 3,
    )


RECIPES = {
    "mixed": jmp.autocast(mlp(jnp.dot)),
    "float8": jmp.autocast(mlp(jnp.dot), "float8"),
    "mxfp8": mlp(_in_blocks),
}
STACKED = {
    "mixed": jmp.autocast(stack(jnp.dot)),
    "float8": jmp.autocast(stack(jnp.dot), "float8"),
    "float8, weights first": stack_quantized_first,
}


def measure_recipe(recipe: str, target: str, width: int = 2048) -> Recipe:
    """Compiles two MLP blocks that are written out."""
    weights = [_mlp_block(width)] * 2
    return _measured(recipe, RECIPES[recipe], target, weights, width)


def measure_stacked(recipe: str, width: int = 2048, depth: int = 24) -> Recipe:
    """Compiles MLP blocks in a scan for an H100."""
    weights = _mlp_block(width, (depth,))
    return _measured(recipe, STACKED[recipe], "h100", weights, width)


def _mlp_block(width: int, depth: tuple[int, ...] = ()) -> Any:
    shapes = (width, 4 * width), (4 * width, width)
    return tuple(jax.ShapeDtypeStruct((*depth, *s), jnp.float32) for s in shapes)


def _measured(
    recipe: str, loss: Callable[..., Any], target: str, weights: Any, width: int
) -> Recipe:
    head = jax.ShapeDtypeStruct((width, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((TOKENS, width), jnp.float32)
    program = compile_for(target, jax.grad(loss, (0, 1)), weights, head, x)
    return Recipe(
        recipe,
        target,
        program.bytes_moved / 1e9,
        1e3 * program.roofline_seconds,
        program.peak_memory / 1e9,
        program.kernels,
        float8_products(program),
    )


def measure_sent(layout: str, rules: str) -> Sent:
    """Compiles a train step for eight H100s."""
    size = {"width": 2048, "depth": 2, "rows": 4096}
    program = collectives.compile_step("h100", layout, rules, **size)
    sent = {dtype: n / 1e6 for dtype, n in program.collectives.items() if n > 1e6}
    return Sent(layout, rules, 1e3 * program.roofline_seconds, sent)


# ---------------------------------------------------------------------------- accuracy


class Trained(NamedTuple):
    """One training of a character transformer of two blocks.

    Attributes:
      width: of its blocks.
      rules: the preset, or "float32".
      seed: of the parameters and of the data.
      error: of the gradient before the first step, relative to float32's by norms.
      loss: on the training data, the mean of the last 200 steps.
    """

    width: int
    rules: str
    seed: int
    error: float
    loss: float


ACCURACY_RULES = {
    "float32": jmp.get_rules("O0"),
    "mixed": "mixed",
    "float8": EVERY_SIZE,
}
STEPS = 1000
_LAST = 200


class Task(NamedTuple):
    """A character transformer to train.

    Attributes:
      width: of its blocks.
      context: how many characters it reads.
      rate: the largest learning rate.
    """

    width: int
    context: int
    rate: float


TASKS = (Task(accuracy.WIDTH, accuracy.CONTEXT, 1e-2), Task(128, 64, 3e-3))


def train(task: Task, seed: int, steps: int = STEPS) -> list[Trained]:
    """Trains one character transformer under each of the rules."""
    text = accuracy.read_text(accuracy.MODULES)
    model = models.transformer(
        depth=2,
        width=task.width,
        heads=4,
        vocabulary=accuracy.CHARACTERS,
        batch=(16, task.context),
        ahead=1,
    )
    params = jax.tree.map_with_path(_as_flax_starts, fill(model.params, seed))
    rng = np.random.default_rng(seed)
    length = task.context + 1
    at = rng.integers(0, len(text) - length, (steps, 16, 1)) + np.arange(length)
    batches = jnp.asarray(text[at], jnp.int32)
    schedule = optax.warmup_cosine_decay_schedule(0, task.rate, steps // 10, steps)
    optimizer = optax.adamw(schedule)

    def run(rules: jmp.Rules | str) -> tuple[Any, Any]:
        loss_and_grad = jax.value_and_grad(jmp.autocast(model.loss, rules))

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            loss, grads = loss_and_grad(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        start = params, optimizer.init(params)
        _, losses = jax.lax.scan(step, start, batches)
        return loss_and_grad(params, batches[0])[1], losses

    found = {
        name: jax.jit(run, static_argnums=0)(r) for name, r in ACCURACY_RULES.items()
    }
    full, _ = found["float32"]
    size = optax.tree.norm(full)
    return [
        Trained(
            task.width,
            name,
            seed,
            float(optax.tree.norm(optax.tree.sub(grads, full)) / size),
            float(losses[-_LAST:].mean()),
        )
        for name, (grads, losses) in found.items()
    ]


def _as_flax_starts(path: Any, leaf: jax.Array) -> jax.Array:
    """Returns a parameter: of a norm or a bias what Flax starts from."""
    start = {"bias": jnp.zeros_like, "scale": jnp.ones_like}
    return start.get(path[-1].key, lambda leaf: leaf)(leaf) if path else leaf


def trained_table(rows: Sequence[Trained]) -> str:
    """Returns losses, seed by seed, and how far they are from float32's, as text."""
    full = {row[:1] + row[2:3]: row.loss for row in rows if row.rules == "float32"}
    seeds = "".join(
        f"{f'seed {row.seed}':>17}" for row in rows if row[:2] == rows[0][:2]
    )
    lines = [
        f"{'':18}{'gradient':>9}",
        f"{'training loss':18}{'error':>9}{seeds}{'mean gap':>10}",
    ]
    for width, name in dict.fromkeys(row[:2] for row in rows):
        own = [row for row in rows if row[:2] == (width, name)]
        gaps = [row.loss - full[width, row.seed] for row in own]
        cells = "".join(
            f"{row.loss:>8.4f} {gap:>+8.4f}" for row, gap in zip(own, gaps, strict=True)
        )
        error, what = np.mean([row.error for row in own]), f"width {width}, {name}"
        lines.append(f"{what:18}{error:>9.4f}{cells}{np.mean(gaps):>+10.4f}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ tables


def models_table(rows: Sequence[Compared]) -> str:
    """Returns ratios of float8 to 16 bits as text.

    What all rows share is in a line above them.
    """
    names = ("target", "width", "length", "smallest")
    shared = {
        name: getattr(rows[0], name)
        for name in names
        if len({getattr(row, name) for row in rows}) == 1
    }
    own = [name for name in names if name not in shared]
    above = ", ".join(f"{name} {value}" for name, value in shared.items())
    head = "".join(f"{name:>{len(name) + 2}}" for name in own)
    lines = [*([f"{above}:"] if above else [])]
    lines.append(
        f"{'float8 / mixed':23}{head}{'roofline':>10}{'bytes':>7}{'peak':>6}"
        f"{'kernels':>9}{'float8':>8}{'raised':>8}"
    )
    for row in rows:
        cells = "".join(f"{getattr(row, name):>{len(name) + 2}}" for name in own)
        lines.append(
            f"{row.model:23}{cells}{row.roofline:>10.2f}{row.moved:>7.2f}"
            f"{row.peak:>6.2f}{row.kernels:>9.2f}{row.products:>8}{row.raised:>8}"
        )
    return "\n".join(lines)


def recipes_table(rows: Sequence[Recipe], blocks: str = "two MLP blocks") -> str:
    """Returns what recipes cost as text."""
    lines = [
        f"{blocks:25}{'target':>7}{'GB moved':>10}{'ms':>8}{'GB held':>9}{'kernels':>9}"
        f"{'float8':>8}"
    ]
    lines += [
        f"{row.recipe:25}{row.target:>7}{row.gigabytes:>10.2f}{row.milliseconds:>8.2f}"
        f"{row.peak:>9.2f}{row.kernels:>9}{row.products:>8}"
        for row in rows
    ]
    return "\n".join(lines)


def sent_table(rows: Sequence[Sent]) -> str:
    """Returns what devices send each other as text."""
    lines = [f"{'eight H100s':28}{'rules':>8}{'ms':>7}  MB through collectives"]
    for row in rows:
        sent = ", ".join(f"{n:.0f} {dtype}" for dtype, n in row.megabytes.items())
        lines.append(f"{row.layout:28}{row.rules:>8}{row.milliseconds:>7.2f}  {sent}")
    return "\n".join(lines)


def draw(
    widths: Sequence[Compared], lengths: Sequence[Compared], path: pathlib.Path
) -> None:
    """Draws ratios over the width and over the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    drawn = {
        "roofline": ("roofline", "black", "o"),
        "moved": ("bytes moved", "#2f7fc1", "s"),
        "peak": ("peak memory", "#e08a1e", "^"),
    }
    titles = ("by width, 1,024 tokens in a sequence", "by length, width 2,048")
    pairs = zip(panels, (widths, lengths), ("width", "length"), titles, strict=True)
    for axes, rows, x, title in pairs:
        at = [getattr(row, x) for row in rows]
        for name, (label, color, marker) in drawn.items():
            values = [getattr(row, name) for row in rows]
            axes.plot(at, values, color=color, marker=marker, label=label)
        axes.axhline(1, color="grey", lw=0.8, ls=":")
        axes.set(xlabel=x, title=title, xscale="log")
        axes.set_xticks(at, [f"{n:,}" for n in at])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("float8 / mixed, H100")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles, trains and prints the tables; writes JSON and a picture if asked to."""
    parser = argparse.ArgumentParser("python -m benchmarks.float8")
    widths = [512, 768, 1024, 1536, 2048, 4096]
    parser.add_argument("--widths", nargs="*", type=int, default=widths)
    lengths = [512, 1024, 2048, 4096, 8192]
    parser.add_argument("--lengths", nargs="*", type=int, default=lengths)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    parser.add_argument("--picture", type=pathlib.Path, help="folder to draw to")
    options = parser.parse_args(argv)
    if missing("h100"):
        raise SystemExit(missing("h100"))
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    compared = [
        compare(**size) for size in MODELS if not missing(size.get("target", "h100"))
    ]
    print(models_table(compared), flush=True)
    wide = [compare(width=n, rules=EVERY_SIZE) for n in options.widths]
    print("\n" + models_table(wide), flush=True)
    long = [compare(length=n) for n in options.lengths]
    print("\n" + models_table(long), flush=True)
    recipes = [measure_recipe(name, at) for at in ("h100", "b200") for name in RECIPES]
    print("\n" + recipes_table(recipes), flush=True)
    stacked = [measure_stacked(name) for name in STACKED]
    print("\n" + recipes_table(stacked, STACK), flush=True)
    sent = [
        measure_sent(layout, rules)
        for layout in collectives.LAYOUTS
        for rules in ("mixed", "float8")
    ]
    print("\n" + sent_table(sent), flush=True)
    trained = [
        row
        for task in TASKS
        for seed in range(options.seeds)
        for row in train(task, seed, options.steps)
    ]
    print("\n" + trained_table(trained))
    write(
        options.json,
        "float8",
        stamp(target="h100", steps=options.steps),
        models=compared,
        widths=wide,
        lengths=long,
        recipes=recipes,
        stacked=stacked,
        sent=sent,
        trained=trained,
    )
    if options.picture:
        options.picture.mkdir(parents=True, exist_ok=True)
        draw(wide, long, options.picture / "float8.png")


if __name__ == "__main__":
    main()
