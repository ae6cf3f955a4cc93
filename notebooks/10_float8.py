# %% [markdown]
# # 10. Float8
#
# **Which of my products can be float8?**
#
# Float8 halves the bytes that a matrix product reads, and a GPU computes twice as many
# products in a second. But a float8 number has only three bits of mantissa. Most
# products tolerate that, and some do not. The code of a network does not show which.
#
# This notebook finds them in a network for handwritten digits. One of its blocks has an
# outlier: a channel whose values are a hundred thousand times larger than the others.
# Nothing here needs a GPU: a CPU computes the same numbers, without the gain in speed.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from aqt.jax.v2 import config as aqt_config
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.plots

# Jupyter shows figures that pyplot did not make only once pyplot has a backend.
plt.switch_backend(plt.get_backend())
WIDTH, BATCH, STEPS, SEEDS = 64, 128, 300, 5
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


def start_of(seed):
    generator = np.random.default_rng(seed)

    def normal(n, m):
        return jnp.asarray(generator.standard_normal((n, m)) / n**0.5, jnp.float32)

    def new_block():
        up, down = normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH)
        return {"up": up, "down": down, "shift": jnp.zeros(WIDTH)}

    params = {name: new_block() for name in BLOCKS}
    params |= {"embed": normal(64, WIDTH), "head": normal(WIDTH, 10)}
    # The outlier: one channel of one block is shifted, and its weights are small.
    params["block_2"]["shift"] = params["block_2"]["shift"].at[7].set(3e5)
    params["block_2"]["up"] = params["block_2"]["up"].at[7].multiply(1e-5)
    return params


digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target, jnp.int32)
rows = np.random.default_rng(0).integers(0, len(images), (SEEDS, STEPS, BATCH))
start = start_of(0)
x, y = images[rows[0, 0]], labels[rows[0, 0]]

# %% [markdown]
# ## What the preset chooses
#
# `explain` shows it without running anything. Here no product becomes float8, because
# all of them are small:

# %%
explanation = jmp.explain(loss_fn, "float8")(start, x, y)
print("products:", explanation.totals.products)
for lint in explanation.lints:
    print("lint:", lint)
assert explanation.totals.products == {"bfloat16": 10}

# %% [markdown]
# This small network is an example of a large one. So `smallest=0` lifts the limit on
# the size. The head stays in 16 bits for two reasons: its width of 10 is not a multiple
# of 16, and only float32 operations read its result.

# %%
rules = jmp.get_rules("mixed").product(jmp.Float8(smallest=0))
explanation = jmp.explain(loss_fn, rules)(start, x, y)
for row in explanation.rows:
    if row.op == "dot_general":
        print(f"{row.scope:9}{row.precision:15}{row.reason}")
assert explanation.totals.products == {"float8_e4m3fn": 9, "bfloat16": 1}

# %% [markdown]
# ## What goes wrong
#
# Float8 makes the gradients less accurate, those of one block much more than the
# others:


# %%
@functools.cache
def grads_of(rules):
    return jax.jit(jax.grad(jmp.autocast(loss_fn, rules)))(start, x, y)


def errors_of(rules):
    """Returns the relative errors of the gradients, by block."""
    low, full = grads_of(rules), grads_of("O0")

    def error(name):
        off = optax.tree.norm(optax.tree.sub(low[name], full[name]))
        return float(off / optax.tree.norm(full[name]))

    return {name: error(name) for name in BLOCKS}


def show_errors(name, rules):
    print(f"{name:14}", "  ".join(f"{k} {v:.3f}" for k, v in errors_of(rules).items()))


show_errors("mixed", "mixed")
show_errors("float8", rules)
assert errors_of(rules)["block_2"] > 0.3

# %% [markdown]
# ## Why
#
# A float8 product divides each operand by one scale, so that its largest value just
# fits. With that scale, small values vanish. `numerics_report` and `magnitudes` take
# the scale into account. These are the inputs of the blocks:


# %%
def inputs(params, x):
    """Returns the left operand of each block's first product."""
    found, h = {}, x @ params["embed"]
    for name in BLOCKS:
        found[name] = h - params[name]["shift"]
        h = block(params[name], h)
    return found


operands = jax.jit(inputs)(start, x)
report = jmp.numerics.numerics_report(operands, "float8_e4m3fn")
print("block     values that vanish  that lose digits")
for row in report.rows:
    print(f"{row.path[2:-2]:10}{row.underflow:18.1%}{row.subnormal:18.1%}")
lost = {row.path: row.underflow + row.subnormal for row in report.rows}
assert max(lost, key=lost.get) == "['block_2']"

# %%
figure = jmp_lite.plots.magnitudes(operands, ["bfloat16", "float8_e4m3fn"])
figure.suptitle("Sizes of the blocks' inputs, above the range of each format")
figure.axes[0].set_ylabel("operand")
figure.axes[1].set_ylabel("format")
figure

# %% [markdown]
# In `block_2` nearly all values vanish beside the one large channel.
#
# ## What works
#
# `tune` finds the most products that can be float8 within a tolerance. It measures the
# errors of the result and of all gradients on a sample.

# %%
search = jmp.tune(loss_fn, rules, tolerance=0.25, progress=lambda line: None)
tuned, report = search(start, x, y)
print(report)
products = jmp.explain(loss_fn, tuned)(start, x, y)
for row in products.rows:
    if row.op == "dot_general":
        print(f"{row.scope:10}{row.precision}")
show_errors("float8, tuned", tuned)
assert products.dtype_of("block_2", "dot_general") == "bfloat16"
assert products.dtype_of("block_1", "dot_general") == "float8_e4m3fn"

# %% [markdown]
# `block_2` stays in bfloat16, and its gradients are as accurate as the others.
#
# ## The products of another library
#
# A format can also be a function of yours, or of another library. `jmp.Format` takes
# any function with the signature of `jax.lax.dot_general`. This one is from
# [AQT](https://github.com/google/aqt): int8 operands, forward and backward. The network
# knows nothing of it.


# %%
def aqt_product(lhs, rhs, dimension_numbers, **options):
    config = aqt_config.fully_quantized(
        fwd_bits=8, bwd_bits=8, use_stochastic_rounding=False
    )
    return aqt_config.set_context(config, None, None)(lhs, rhs, dimension_numbers)


aqt_rules = jmp.get_rules("mixed").product(jmp.Format("aqt", aqt_product))
int8_rules = jmp.get_rules("mixed").product(jmp.get_format("int8", smallest=0))
for row in jmp.explain(loss_fn, aqt_rules)(start, x, y).rows:
    if row.op == "dot_general" and row.scope == "block_0":
        print(f"{row.scope:10}{row.precision:10}{row.number_format}")
show_errors("int8 of AQT", aqt_rules)
show_errors("int8", int8_rules)
both = zip(errors_of(aqt_rules).values(), errors_of(int8_rules).values(), strict=True)
assert all(abs(theirs - ours) < 0.02 for theirs, ours in both)

# %% [markdown]
# The format `"int8"` of jmp_lite also has one scale for each row, and the same errors.
# They are larger than those of float8. An int8 number has no exponent, so that an
# outlier costs its row more digits.
#
# ## Training
#
# Does the error of the gradients matter in training? Five seeds answer it:


# %%
def train(rules):
    """Returns the losses of five seeds."""
    optimizer = optax.adam(1e-3)
    loss_and_grad = jax.value_and_grad(jmp.autocast(loss_fn, rules))

    def step(state, row):
        params, opt_state = state
        loss, grads = loss_and_grad(params, images[row], labels[row])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def one(start, rows):
        return jax.lax.scan(step, (start, optimizer.init(start)), rows)[1]

    # The arrays are small: a lower level saves more time than it costs.
    options = {"xla_backend_optimization_level": 1}
    run = jax.jit(jax.vmap(one), compiler_options=options)
    return np.asarray(run(starts, rows))


starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(start_of, range(SEEDS)))
curves = {
    "float32": train("O0"),
    "mixed": train("mixed"),
    "float8": train(rules),
    "float8, tuned": train(tuned),
}
print(f"{'':14}first 10 steps   last 50: median loss of five seeds")
ends = {}
for name, losses in curves.items():
    first, ends[name] = (
        np.median(part.mean(1)) for part in (losses[:, :10], losses[:, -50:])
    )
    print(f"{name:14}{first:14.2f}{ends[name]:10.4f}")
assert max(ends.values()) - min(ends.values()) < 0.02

# %% [markdown]
# All four reach the same loss, even with the inaccurate block: the other blocks do its
# work. (In every precision the first losses are large, because Adam's first steps
# change the weights of the outlier too much.)
#
# **Answer.** A product can be float8 if it is large, has a weight as an operand, and a
# later product reads its result. The preset `"float8"` chooses these, and `explain`
# gives the reason for each of the others.
#
# The preset does not know operands with outliers. `numerics_report` shows them, and
# `tune` finds the products whose error is too large. Whether float8 is faster depends
# on the width, the number of tokens and the GPU: see docs/float8.md.
