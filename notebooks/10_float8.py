# %% [markdown]
# # 10. Float8
#
# **Which of my products can be float8?**
#
# Float8 halves what a matrix product reads, and doubles what a GPU multiplies in a
# second. A number keeps three bits of its mantissa. Most products bear that. Some do
# not, and a network does not say which. This notebook finds them in a network for
# handwritten digits, one of whose blocks has an outlier: a channel whose numbers are
# a hundred thousand times larger than the others.
#
# Nothing here needs a GPU: the numbers are the same on a CPU, only not faster.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.plots

plt.switch_backend(plt.get_backend())  # So that the first figure is shown.
WIDTH, BATCH, STEPS = 64, 128, 300
BLOCKS = [f"block_{i}" for i in range(4)]


def block(p, h):
    hidden = jax.nn.gelu((h - p["shift"]) @ p["up"])
    return h + hidden @ p["down"] / 4


def forward(params, x):
    with jax.named_scope("embed"):
        h = x @ params["embed"]
    for name in BLOCKS:
        with jax.named_scope(name):
            h = block(params[name], h)
    with jax.named_scope("head"):
        return h @ params["head"]


def loss_fn(params, x, y):
    logits = forward(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean()


generator = np.random.default_rng(0)


def normal(n, m):
    return jnp.asarray(generator.standard_normal((n, m)) / n**0.5, jnp.float32)


def new_block():
    up, down = normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)
    return {"up": up, "down": down, "shift": jnp.zeros(WIDTH)}


start = {name: new_block() for name in BLOCKS}
start |= {"embed": normal(64, WIDTH), "head": normal(WIDTH, 10)}
# The outlier: one channel of one block stands apart, and its weights are small.
start["block_2"]["shift"] = start["block_2"]["shift"].at[7].set(3e5)
start["block_2"]["up"] = start["block_2"]["up"].at[7].multiply(1e-5)

digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target, jnp.int32)
rows = generator.integers(0, len(images), (STEPS, BATCH))
x, y = images[rows[0]], labels[rows[0]]

# %% [markdown]
# ## What would be float8
#
# `explain` shows it without running anything. Here it shows that nothing is: float8 is
# for large products.

# %%
explanation = jmp.explain(loss_fn, "float8")(start, x, y)
print(explanation.table(depth=1))
for lint in explanation.lints:
    print("look at", lint)
assert explanation.totals.products == {"bfloat16": 10}

# %% [markdown]
# The sample stands for a network of a useful size: `smallest=0` has every product in
# float8 that can be. Two are left in 16 bits. The head is the last product: its result
# is read in float32. And its width, 10, is no multiple of 16.

# %%
rules = dataclasses.replace(
    jmp.get_rules("float8"), float8_format=jmp.Float8(smallest=0)
)
explanation = jmp.explain(loss_fn, rules)(start, x, y)
for row in explanation.rows:
    if row.op == "dot_general":
        print(f"{row.scope:10}{row.precision:15}{row.reason}")
assert explanation.totals.products == {"float8_e4m3fn": 9, "bfloat16": 1}

# %% [markdown]
# ## What the numbers say
#
# An operand is divided by one scale, so that its largest number just fits. What is
# then smaller than the smallest number of the format vanishes. `numerics_report` and
# the picture take the scale into account. This is what the blocks read:


# %%
def inputs(params, x):
    """Returns the left operand of each block's first product."""
    found, h = {}, x @ params["embed"]
    for name in BLOCKS:
        found[name] = h - params[name]["shift"]
        h = block(params[name], h)
    return found


operands = jax.jit(inputs)(start, x)
report = jmp.numerics_report(operands, "float8_e4m3fn")
print(report)
lost = {row.path: row.underflow + row.subnormal for row in report.rows}
assert max(lost, key=lost.get) == "['block_2']"
jmp_lite.plots.magnitudes(operands, ["bfloat16", "float8_e4m3fn"])

# %% [markdown]
# In `block_2` nearly all numbers vanish beside the one large channel. That costs the
# gradient:


# %%
def error_of(rules):
    """Returns how far the gradients are from float32's, relative, by block."""
    low = jax.jit(jax.grad(jmp.autocast(loss_fn, rules)))(start, x, y)
    full = jax.jit(jax.grad(loss_fn))(start, x, y)

    def error(name):
        off = optax.tree.norm(optax.tree.sub(low[name], full[name]))
        return float(off / optax.tree.norm(full[name]))

    return {name: error(name) for name in BLOCKS}


for name, errors in (("mixed", error_of("mixed")), ("float8", error_of(rules))):
    print(f"{name:7}", "  ".join(f"{k} {v:.3f}" for k, v in errors.items()))
assert error_of(rules)["block_2"] > 0.3

# %% [markdown]
# ## Asking
#
# `tune` finds the most products in float8 whose error is within a tolerance, on a
# sample. It measures results and all gradients:

# %%
tuned = jmp.tune(loss_fn, (start, x, y), 0.25, rules, progress=lambda line: None)
print(tuned.report)
print("scopes:", tuned.scopes)
products = jmp.explain(loss_fn, tuned)(start, x, y)
for row in products.rows:
    if row.op == "dot_general":
        print(f"{row.scope:10}{row.precision}")
assert products.precision_of("block_2", "dot_general") == "bfloat16"
assert products.precision_of("block_1", "dot_general") == "float8_e4m3fn"

# %% [markdown]
# ## Training


# %%
def train(rules):
    """Returns the losses of a training."""
    optimizer = optax.adam(1e-3)
    loss_and_grad = jax.value_and_grad(jmp.autocast(loss_fn, rules))

    def step(state, row):
        params, opt_state = state
        loss, grads = loss_and_grad(params, images[row], labels[row])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    run = jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), rows))
    return np.asarray(run()[1])


curves = {
    "float32": train("O0"),
    "mixed": train("mixed"),
    "float8": train(rules),
    "float8, tuned": train(tuned),
}
axes = plt.figure(figsize=(9, 3.5), layout="constrained").subplots()
for (name, losses), style in zip(curves.items(), ("-", "--", ":", "-."), strict=True):
    axes.semilogy(losses.reshape(-1, 10).mean(1), style, label=name)
axes.set(xlabel="tens of steps", ylabel="loss", title="Digits, one seed")
axes.legend()
plt.show()
for name, losses in curves.items():
    print(f"{name:15}{losses[-50:].mean():.4f}")
ends = [losses[-50:].mean() for losses in curves.values()]
assert max(ends) - min(ends) < 0.02

# %% [markdown]
# All four learn alike, the one with the lossy block too: the others do its work. An
# error of a gradient is not an error of a training.
#
# **Answer.** Those that are large, have a weight, and whose results a later product
# reads: the preset `"float8"` chooses them, and `explain` says why it leaves the others
# out. What it cannot know is which operands have outliers. `numerics_report` shows
# them, and `tune` finds on a sample which products they spoil. Whether float8 pays is
# another question, of the width, of the length of sequences and of the GPU: see
# docs/float8.md.
