"""Draws the figures of the guides, each from data that this file computes or reads.

    JAX_PLATFORMS=cpu .venv/bin/python docs/figures.py

Where an op runs is what ``explain`` says of a transformer, so that a figure changes
where autocast does. A figure holds its data as JSON in its metadata: a test compares
them with what is computed anew.
"""

import argparse
import html
import itertools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import jmp_lite as jmp

HERE = pathlib.Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"

# The same figure is the same file, byte for byte.
STYLE = {
    "svg.hashsalt": "jmp_lite",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLORS = {"bfloat16": ("#d3e5f6", "#2b6cb0"), "float32": ("#fde3c8", "#b7501a")}
LINES = "#444444"

# ------------------------------------------------------------ a transformer to explain

WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 64, 4, 32, 2, 96
part = jax.named_scope


def layer_norm(params, x):
    """Returns normalized activations."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    normalized = (x - mean) * jax.lax.rsqrt(variance + 1e-6)
    return normalized * params["scale"] + params["bias"]


def block(params, x):
    """Returns the residual stream after a pre-norm block; each part has a scope."""
    with part("LayerNorm_0"):
        h = layer_norm(params["LayerNorm_0"], x)
    with part("qkv"):
        heads = (h @ params["qkv"]).reshape(*h.shape[:-1], HEADS, -1)
        q, k, v = jnp.split(heads, 3, -1)
    with part("scores"):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    with part("mask"):
        is_past = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        scores = jnp.where(is_past, scores / math.sqrt(WIDTH // HEADS), -jnp.inf)
    with part("softmax"):
        weights = jax.nn.softmax(scores)
    with part("values"):
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    with part("output"):
        y = mixed.reshape(x.shape) @ params["output"]
    with part("residual_0"):
        x = x + y
    with part("LayerNorm_1"):
        h = layer_norm(params["LayerNorm_1"], x)
    with part("up"):
        h = h @ params["up"] + params["up_bias"]
    with part("gelu"):
        h = jax.nn.gelu(h)
    with part("down"):
        h = h @ params["down"]
    with part("residual_1"):
        return x + h


def loss_fn(params, tokens):
    """Returns the loss of a language model of two blocks."""
    x = params["embedding"][tokens[:, :-1]]
    for i, block_params in enumerate(params["blocks"]):
        with part(f"block_{i}"):
            x = block(block_params, x)
    with part("LayerNorm_2"):
        x = layer_norm(params["LayerNorm_2"], x)
    with part("logits"):
        logits = x @ params["logits"]
    with part("loss"):
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def explain_transformer(rules="mixed"):
    """Returns what ``explain`` says of the transformer, as rows."""
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "output": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "up_bias": (4 * WIDTH,),
        "down": (4 * WIDTH, WIDTH),
    }
    norm = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    norms = {"LayerNorm_0": norm, "LayerNorm_1": norm}
    one = {**norms, **{name: jnp.ones(shape) for name, shape in shapes.items()}}
    params = {
        "embedding": jnp.ones((VOCABULARY, WIDTH)),
        "blocks": [one, one],
        "LayerNorm_2": norm,
        "logits": jnp.ones((WIDTH, VOCABULARY)),
    }
    tokens = jnp.zeros((BATCH, LENGTH + 1), jnp.int32)
    return jmp.explain(loss_fn, rules)(params, tokens).rows


PARTS = {
    "block_1/LayerNorm_0": "LayerNorm",
    "block_1/qkv": "q, k, v products",
    "block_1/scores": "q · k product",
    "block_1/mask": "scale and mask",
    "block_1/softmax": "softmax",
    "block_1/values": "weights · v product",
    "block_1/output": "output product",
    "block_1/residual_0": "residual add",
    "block_1/LayerNorm_1": "LayerNorm",
    "block_1/up": "up product and bias",
    "block_1/gelu": "GELU",  # Its power and its result; 1 + tanh is float32.
    "block_1/down": "down product",
    "block_1/residual_1": "residual add",
    "LayerNorm_2": "last LayerNorm",
    "logits": "logits product",
    "loss": "log-softmax and mean",
}
"""The scopes of the second block and of the head, and what the figure calls them."""


def precisions(rows, scope, ops=None):
    """Returns in which precisions the ops of a scope run, sorted.

    A broadcast is left out, since it computes nothing, and so is an op without floats.
    """
    return sorted(
        {
            row.precision
            for row in rows
            if row.scope == scope or row.scope.startswith(f"{scope}/")
            if row.op != "broadcast_in_dim" and row.precision in COLORS
            if ops is None or row.op in ops
        }
    )


def block_data():
    """Returns ``{scope: precision}``; every part of the block has one precision."""
    rows = explain_transformer()
    only = {"block_1/gelu": COLUMNS["GELU"][1]}
    data = {scope: precisions(rows, scope, only.get(scope)) for scope in PARTS}
    assert all(len(found) == 1 for found in data.values()), data
    return {scope: found[0] for scope, found in data.items()}


LEVELS = ("O0", "O1", "O2", "O3", "mixed")
COLUMNS = {
    "matrix\nproducts": ("block_1", ("dot_general",)),
    "LayerNorm": ("block_1/LayerNorm_1", ("sub", "reduce_sum", "rsqrt")),
    "softmax:\nexp, sum": ("block_1/softmax", ("exp", "reduce_sum")),
    "GELU": ("block_1/gelu", ("integer_pow",)),
    "residual\nadd": ("block_1/residual_0", None),
    "loss:\nlog, mean": ("loss", ("log", "reduce_sum")),
}
"""The columns of the table of levels: a scope, and which of its ops; None is all."""


def level_data():
    """Returns ``{level: {column: precision}}``."""
    data = {}
    for level in LEVELS:
        rows = explain_transformer(level)
        found = {name: precisions(rows, *which) for name, which in COLUMNS.items()}
        assert all(len(each) == 1 for each in found.values()), (level, found)
        data[level] = {name: each[0] for name, each in found.items()}
    return data


# ------------------------------------------------------------------------------ drawing


def canvas(width, height):
    """Returns a figure and axes in inches, the origin at the lower left."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, text, colors, **style):
    """Draws a box around the centre ``(x, y)``."""
    corner = (x - width / 2 + 0.05, y - height / 2 + 0.05)
    shape = FancyBboxPatch(
        corner,
        width - 0.1,
        height - 0.1,
        boxstyle="round,pad=0.05",
        facecolor=colors[0],
        edgecolor=colors[1],
        linewidth=1.2,
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", linespacing=1.35, **style)


def arrow(axes, start, end):
    """Draws an arrow from one point to another."""
    look = {"arrowstyle": "-|>", "color": LINES, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look)


def save(figure, path, data):
    """Writes a figure with its data; the same figure is written in the same bytes."""
    metadata = {"Date": None, "Creator": None, "Description": json.dumps(data)}
    if path.suffix == ".svg":
        figure.savefig(path, metadata=metadata)
    else:
        figure.savefig(path, dpi=150)


def data_of(path):
    """Returns the data that a figure holds."""
    [text] = re.findall(
        r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL
    )
    return json.loads(html.unescape(text))


# ---------------------------------------------------------------- the steps and levels

STEPS = (
    ("Parameters are float32.", "your model's init", "float32"),
    ("Matrix products get 16-bit operands.", "jmp.autocast", "bfloat16"),
    ("The loss is computed in float32.", "jmp.autocast", "float32"),
    ("The loss is multiplied by the loss scale.", "jmp.value_and_grad", "float32"),
    ("16-bit gradients are cast to float32.", "jmp.value_and_grad", "bfloat16"),
    ("Gradients are divided by the loss scale.", "jmp.value_and_grad", "float32"),
    ("Overflow: skip. Otherwise: update in float32.", "jmp.loss_scaling", "float32"),
)
"""MindSpore's steps of mixed precision, and what does each of them here."""


def draw_steps(data):
    """Returns the seven steps, and below them what each level runs in 16 bits."""
    figure, axes = canvas(6.4, 6.55)
    axes.text(0.1, 6.38, "A training step in float16", weight="bold", fontsize=11)
    axes.text(6.3, 6.38, "done by", weight="bold", fontsize=9, ha="right")
    y, x = 6.1, 2.4
    for number, (text, function, precision) in enumerate(data["steps"], start=1):
        axes.text(0.2, y, str(number), ha="center", va="center", weight="bold")
        box(axes, x, y, 3.9, 0.36, text, COLORS[precision])
        mono = {"family": "DejaVu Sans Mono"} if function.startswith("jmp") else {}
        axes.text(6.3, y, function, ha="right", va="center", fontsize=8.5, **mono)
        if number < len(STEPS):
            arrow(axes, (x, y - 0.18), (x, y - 0.32))
        y -= 0.5
    axes.text(0.1, 2.42, "Levels O0 to O3", weight="bold", fontsize=11)
    left, width, names = 1.3, 0.84, {"bfloat16": "16 bits"}
    for i, column in enumerate(COLUMNS):
        x = left + width * (i + 0.5)
        axes.text(x, 2.12, column, ha="center", va="center", fontsize=8)
    for j, (level, row) in enumerate(data["levels"].items()):
        y = 1.73 - 0.37 * j
        name = "mixed (default)" if level == "mixed" else level
        axes.text(left - 0.08, y, name, ha="right", va="center", fontsize=8.5)
        for i, precision in enumerate(row.values()):
            x, text = left + width * (i + 0.5), names.get(precision, precision)
            box(axes, x, y, width - 0.06, 0.31, text, COLORS[precision], fontsize=8)
    return figure


def steps_data():
    """Returns what the figure of steps and levels shows."""
    return {"steps": [list(step) for step in STEPS], "levels": level_data()}


# ---------------------------------------------------------------- the transformer block


def draw_block(data):
    """Returns the parts of a transformer block in the colour of their precision."""
    figure, axes = canvas(6.4, 5.25)
    top, gap, width, height = 4.35, 0.55, 1.62, 0.42
    scopes = list(data)
    columns = (
        ("Attention", 1.05, scopes[:8]),
        ("MLP", 3.2, scopes[8:13]),
        ("Head", 5.35, scopes[13:]),
    )
    line = {"color": LINES, "linewidth": 1, "solid_capstyle": "butt"}
    for title, x, members in columns:
        axes.text(x, top + 0.68, title, ha="center", weight="bold", fontsize=11)
        for i, scope in enumerate(members):
            y = top - gap * i
            text = f"{PARTS[scope]}\n{data[scope]}"
            box(axes, x, y, width, height, text, COLORS[data[scope]], fontsize=8)
            arrow(axes, (x, y + gap - height / 2), (x, y + height / 2))
    enter, branch = top + 0.5, top + height / 2 + 0.2
    axes.plot([1.05, 1.05], [enter, branch - 0.1], **line)
    for (_, x, members), (_, to, _) in itertools.pairwise(columns):
        # What the stream adds goes around the branch, and the sum to the next column.
        side, last = x - width / 2 - 0.13, top - gap * (len(members) - 1)
        axes.plot([x, side, side], [branch, branch, last], **line)
        arrow(axes, (side, last), (x - width / 2, last))
        out, middle = last - height / 2, (x + to) / 2 - 0.06
        axes.plot([x, x, middle, middle], [out, out - 0.12, out - 0.12, enter], **line)
        axes.plot([middle, to, to], [enter, enter, branch - 0.1], **line)
    return figure


# ---------------------------------------------------------------------------- accuracy

CURVES = {
    "float32": ("float32", "#b7501a", "-"),
    "bfloat16, mixed": ("bfloat16", "#2b6cb0", "--"),
    "float16, mixed": ("float16", "#3a7d44", ":"),
}
"""The variants of ``benchmarks.accuracy`` that are drawn, and how."""


def accuracy_data():
    """Returns ``{variant: {"loss": [seed][epoch], "accuracy": [seed][epoch]}}``."""
    rows = json.loads((RESULTS / "accuracy.json").read_text())["rows"]
    data = {}
    for variant in CURVES:
        found = [
            row["epochs"]
            for row in rows
            if (row["model"], row["variant"]) == ("digits", variant)
        ]
        loss, accuracy = np.round(np.moveaxis(np.array(found), -1, 0), 5).tolist()
        data[variant] = {"loss": loss, "accuracy": accuracy}
    return data


def draw_accuracy(data):
    """Returns loss and accuracy by epoch: means over seeds, bands to the extremes."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    titles = {"loss": "test loss", "accuracy": "test accuracy"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for variant, (label, color, dashes) in CURVES.items():
            curves = np.array(data[variant][name])
            epochs = np.arange(1, curves.shape[1] + 1)
            axes.plot(epochs, curves.mean(0), dashes, color=color, label=label, lw=1.8)
            band = (curves.min(0), curves.max(0))
            axes.fill_between(epochs, *band, color=color, alpha=0.15, lw=0)
        axes.set(title=title, xlabel="epoch", xticks=(1, *range(2, 11, 2)))
        axes.grid(alpha=0.25)
        if name == "loss":
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axes.set_yticks((0.05, 0.1, 0.2, 0.5, 1, 2))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        else:
            axes.set_ylim(0.9, 1)
            axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
            axes.legend(frameon=False, loc="lower right")
    return figure


FIGURES = {
    "training_steps": (steps_data, draw_steps),
    "transformer_block": (block_data, draw_block),
    "accuracy": (accuracy_data, draw_accuracy),
}


def main(argv=None):
    """Draws all figures into a folder."""
    parser = argparse.ArgumentParser("python docs/figures.py", description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, default=HERE)
    parser.add_argument("--suffix", default=".svg", choices=(".svg", ".png"))
    options = parser.parse_args(argv)
    with mpl.rc_context(STYLE):
        for name, (compute, draw) in FIGURES.items():
            data = compute()
            save(draw(data), options.folder / f"{name}{options.suffix}", data)


if __name__ == "__main__":
    main()
