# %% [markdown]
# # 3. Finding the NaN
#
# **A float16 training ends in NaN. What is the smallest change that repairs it?**
#
# This is a network for handwritten digits: residual blocks whose activation is a
# square, as in some language models, and a norm before the head. The pixels are
# scikit-learn's numbers from 0 to 16, without any scaling. In float32 the training
# succeeds.
#
# (The arrays are small, so compile time dominates. XLA skips most optimizations here.)

# %%
import itertools
import linecache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp

jax.config.update("jax_disable_most_optimizations", True)
WIDTH, HIDDEN, BATCH, STEPS, SEEDS = 32, 64, 128, 200, 5


def block(p, h):
    hidden = h @ p["up"]
    squares = jnp.maximum(hidden, 0) ** 2
    return h + squares @ p["down"] / 8


def forward(params, x):
    with jax.named_scope("embed"):
        h = x @ params["embed"]
    for i, p in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}"):
            h = block(p, h)
    with jax.named_scope("rms_norm"):
        h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)
    with jax.named_scope("head"):
        return h @ params["head"]


def loss_fn(params, x, y):
    logits = forward(params, x)
    with jax.named_scope("loss"):
        likely = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(likely, y[:, None], -1).mean()


# %%
def start_of(seed):
    generator = np.random.default_rng(seed)

    def normal(n, m, gain=1.0):
        values = generator.standard_normal((n, m)) * (gain / n) ** 0.5
        return jnp.asarray(values, jnp.float32)

    def new_block():
        return {"up": normal(WIDTH, HIDDEN, gain=2.0), "down": normal(HIDDEN, WIDTH)}

    embed, blocks = normal(64, WIDTH), [new_block(), new_block()]
    return {"embed": embed, "blocks": blocks, "head": normal(WIDTH, 10)}


def rows_of(seed):
    generator = np.random.default_rng(seed)
    return [generator.choice(1500, BATCH, replace=False) for _ in range(STEPS)]


digits = load_digits()
images, labels = jnp.asarray(digits.data, jnp.float32), jnp.asarray(digits.target)
starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(start_of, range(SEEDS)))
rows = jnp.asarray([rows_of(seed) for seed in range(SEEDS)])

# %% [markdown]
# ## What goes wrong
#
# Five seeds train at once, each with its own parameters and batches. The loop keeps the
# parameters before each step, so that a step can be run again.


# %%
def train(loss_fn, optimizer):
    """Returns the parameters before each step, the losses, and the last states."""

    def step(carry, chosen):
        params, state = carry
        loss_scale = jmp.get_loss_scale(state)
        grad_fn = jmp.value_and_grad(loss_fn, loss_scale=loss_scale)
        loss, grads = grad_fn(params, images[chosen], labels[chosen])
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (params, loss)

    def one(start, rows):
        carry = start, optimizer.init(start)
        (last, state), (before, losses) = jax.lax.scan(step, carry, rows)
        append = lambda steps, end: jnp.concatenate([steps, end[None]])
        return jax.tree.map(append, before, last), losses, state

    history, losses, state = jax.jit(jax.vmap(one))(starts, rows)
    return history, np.asarray(losses), state


def params_at(history, seed, step):
    return jax.tree.map(lambda array: array[seed, step], history)


def batch_at(seed, step):
    return images[rows[seed, step]], labels[rows[seed, step]]


# Adam without a loss scale: `skip=False` lets every step through.
plain = jmp.loss_scaling(optax.adam(3e-3), jmp.NoOpLossScale(), skip=False)
history, losses, _ = train(loss_fn, plain)
low_loss_fn = jmp.autocast(loss_fn, compute_dtype="float16")
low_history, low_losses, _ = train(low_loss_fn, plain)
first_bad = [
    int(np.argmin(np.isfinite(each))) if not np.isfinite(each).all() else None
    for each in low_losses
]
print("float32 is finite to the end:", bool(np.isfinite(losses).all()))
print("float16, first step that is not finite, by seed:", first_bad)
broken = first_bad[0]
assert np.isfinite(losses).all()
assert 10 < broken < STEPS
assert not np.isfinite(low_losses[0, broken + 1 :]).any()

# %% [markdown]
# Three seeds of five end in NaN. Many steps go well. Then one bad step makes the
# parameters NaN, and they stay NaN. The following cells look for the cause in seed 0.
#
# ## Before anything runs
#
# `explain` needs shapes only. It shows what runs in float16, and what looks doubtful:

# %%
params, batch = params_at(low_history, 0, broken), batch_at(0, broken)
explained = jmp.explain(loss_fn, compute_dtype="float16", backward=True)(params, *batch)
print(explained.summary())
assert "no loss scale" in [lint.name for lint in explained.lints]

# %% [markdown]
# The first hint is about speed. The second one is a fault: there is no loss scale. A
# later section returns to it. But shapes do not show which value will be too large. For
# that, the function has to run.
#
# ## Where the NaN begins
#
# The gradients of the step that failed do not help, because all of them are NaN:

# %%
grads = jax.device_get(jax.jit(jax.grad(low_loss_fn))(params, *batch))
print(jmp.numerics.nonfinite_report(grads))

# %% [markdown]
# `watch` returns statistics of every operation beside the result of a function. It
# works under `jit`. `first_nonfinite` returns the first operation that turned finite
# operands into an infinity or a NaN. Each row knows its line of code. The logits are
# enough here:


# %%
def code(row):
    """The line of code that a row comes from."""
    file, _, line = row.source.rpartition(" ")[0].rpartition(":")
    return linecache.getline(file, int(line)).strip()


def place(row):
    """The innermost scope of a row."""
    return row.scope.rpartition("/")[-1]


low_forward = jmp.autocast(forward, compute_dtype="float16")
logits, stats = jax.jit(jmp.watch(low_forward))(params, batch[0])
first = jmp.first_nonfinite(stats)
print(f"it begins in {place(first)}, {first.op}:")
print(f"    {code(first)}")
print(f"infinite: {first.inf} of {first.elements} values")
print(f"the largest of the others: {first.max_abs:.0f}")
assert place(first) == "block_1"
assert "squares @" in code(first)

# %% [markdown]
# It is the cast of the squares in the last block. Autocast squares in float32, but the
# product needs float16 operands, and the largest float16 number is 65504. One of 8,192
# squares is larger: one hidden unit, for one digit. The next rows show what follows
# from it:


# %%
def line_of(row):
    return f"{row.inf:4} inf{row.nan:4} NaN  {place(row):<9} {row.op:<12} {code(row)}"


lines = []
bad = [row for row in stats.rows if row.inf or row.nan]
for before, row in itertools.pairwise([None, *bad]):
    if before is None or (row.inf, row.nan) != (before.inf, before.nan):
        lines.append(line_of(row))
print("\n".join(lines))

# %% [markdown]
# A product spreads the infinity over a row. The norm divides infinity by infinity. All
# logits of that digit are NaN, and so is the mean of all losses.
#
# The overflow builds up over many steps. `watch` does not need float16 to show it. The
# next cell watches the gradient of the float32 loss, backward pass included, and asks
# which values float16 could not represent.

# %%
watched = jax.jit(jmp.watch(jax.grad(loss_fn), "float16"))
overflowing = set()
print("step  largest square in block_1: median of the seeds, and largest")
for step in range(0, STEPS, 40):
    largest = []
    for seed in range(SEEDS):
        _, stats = watched(params_at(history, seed, step), *batch_at(seed, step))
        overflowing |= {place(row) for row in stats.rows if row.overflow}
        squares = [row for row in stats.rows if row.op == "integer_pow"]
        largest += [max(r.max_abs for r in squares if place(r) == "block_1")]
    print(f"{step:4}{np.median(largest):31.0f}{max(largest):15.0f}")
print("scopes with values beyond 65504:", *sorted(overflowing))
assert max(largest) > 65504
assert {"block_1", "rms_norm"} <= overflowing

# %% [markdown]
# The norm squares its input too. Autocast runs norms in float32, so that they do not
# overflow.
#
# ## A loss scale alone does not help
#
# `loss_scaling` skips each step whose gradients are not finite, so the parameters stay
# finite. It also halves the scale, as if the scaled gradients had been too large. But
# here the forward pass overflows, which no scale changes:

# %%
scaling = jmp.loss_scaling(optax.adam(3e-3))
_, _, state = train(low_loss_fn, scaling)
print("seed  skipped of 200  loss scale at the end")
for seed, (skipped, scale) in enumerate(
    zip(state.skipped, state.loss_scale.loss_scale, strict=True)
):
    print(f"{seed:4}{skipped:16}  2**{np.log2(scale):.0f}")
assert state.skipped[0] > 10

# %% [markdown]
# ## By hand
#
# We know the block. A rule keeps it in float32. Then the gradients of the failed step
# are finite:

# %%
float16 = jmp.get_rules("mixed", "float16")
by_hand = float16.scope("^block_1$", "full")
mended_loss_fn = jmp.autocast(loss_fn, by_hand)


@jax.jit
def gradients(params, batch, loss_scale):
    return jmp.grad(mended_loss_fn, loss_scale=loss_scale)(params, *batch)


no_scale = jmp.DynamicLossScale(1.0)
found = jax.device_get(gradients(params, batch, no_scale))
report = jmp.numerics.nonfinite_report(found)
print(report)
assert not report

# %% [markdown]
# ## The gradients
#
# There is still the warning about the loss scale. These are the gradients at the end of
# the float32 training, and the share that float16 loses.

# %%
last = params_at(history, 0, STEPS)
grads = jax.jit(jax.grad(loss_fn))(last, *batch)
print(jmp.numerics.numerics_report(grads, "float16"))

# %% [markdown]
# Many gradients lie where float16 has fewer digits (subnormal), and few vanish. But
# each is a sum over the batch, and the terms are smaller. The watched gradient shows
# the products in between. Most results of these would be zero:

# %%
_, stats = watched(last, *batch)
products = [row for row in stats.rows if row.op == "dot_general"]
vanish = [row for row in products if row.underflow > 0.5]
for row in vanish:
    print(f"{row.underflow:4.0%}  {place(row):<8} {code(row)}")
assert {place(row) for row in vanish} == {"block_0", "block_1"}

# %% [markdown]
# The network predicts nearly all of its digits, so their losses have tiny gradients:
# most of them are below 6e-8.
#
# Does it matter? With the rule from above nothing overflows, so the float16 gradients
# can be compared with float32's along the training:

# %%
exact_gradients = jax.jit(jax.grad(loss_fn))


def flat(grads):
    return np.concatenate([np.ravel(array) for array in jax.tree.leaves(grads)])


def error(seed, step, loss_scale):
    point = params_at(history, seed, step), batch_at(seed, min(step, STEPS - 1))
    exact = flat(exact_gradients(point[0], *point[1]))
    far = flat(gradients(*point, loss_scale)) - exact
    return np.linalg.norm(far) / np.linalg.norm(exact)


print("error of the float16 gradients, in the median of the seeds")
print("step  no loss scale  loss scale 2**15")
for step in range(0, STEPS + 1, 50):
    without, scaled = (
        np.median([error(seed, step, loss_scale) for seed in range(SEEDS)])
        for loss_scale in (no_scale, jmp.DynamicLossScale(2.0**15))
    )
    print(f"{step:4}{without:15.4f}{scaled:18.4f}")
assert without > 0.03 > scaled

# %% [markdown]
# This is the second fault, and it causes no NaN. The smaller the loss, the larger is
# the part of the gradient that is missing. With a scale, the error is that of float16
# rounding.
#
# ## What `tune` finds
#
# `tune` repairs the first fault without knowing its cause. Its arguments are a
# function, a sample (the batch that failed), and a tolerance for the error. It tries
# rules, and compares results and gradients with float32. It returns the rules that keep
# the fewest equations in float32.


# %%
def logits_of_batch(params):
    return forward(params, batch[0])


search = jmp.tune(logits_of_batch, float16, tolerance=0.05, progress=lambda line: None)
tuned, report = search(params)
print(report)
assert tuned == by_hand

# %% [markdown]
# These are exactly the rules that we wrote by hand. The table lists what it tried to
# run in float16: operations and groups of scopes, then single scopes.

# %%
print(report.table())

# %% [markdown]
# ## Training again
#
# Both trainings have a loss scale. One uses the rules that `tune` found. The other
# removes the cause of the large values: it divides the pixels by 16.


# %%
def loss_of_scaled_pixels(params, x, y):
    return loss_fn(params, x / 16, y)


@jax.jit
@jax.vmap
def accuracy(params, divisor):
    logits = forward(params, images[1500:] / divisor)
    return jnp.mean(jnp.argmax(logits, -1) == labels[1500:])


def result(name, history, losses, divisor):
    last = jax.tree.map(lambda array: array[:, -1], history)
    right = np.median(accuracy(last, jnp.full(SEEDS, divisor)))
    return f"{name:<14}{np.median(losses[:, -20:].mean(1)):8.4f}{right:10.1%}"


print(f"{'':<14}    loss  test set  skipped  16-bit equations")
print(result("float32", history, losses, 1.0))
again = {}
for name, fun, rules, divisor in (
    ("tuned", loss_fn, tuned, 1.0),
    ("scaled pixels", loss_of_scaled_pixels, float16, 16.0),
):
    ends, again[name], state = train(jmp.autocast(fun, rules), scaling)
    jmp.check_loss_scale(state)
    share = jmp.explain(fun, rules)(params, *batch).share_low()
    end = result(name, ends, again[name], divisor)
    print(f"{end}{state.skipped.sum():9}{share:18.0%}")
    assert np.isfinite(again[name]).all()

# %%
WINDOW = 10
fig, ax = plt.subplots(figsize=(10, 4), layout="constrained")
for name, found, style in (
    ("float32", losses, {"color": "0.7", "lw": 4}),
    ("float16, tuned rules", again["tuned"], {"color": "C0", "ls": "--"}),
    ("float16, scaled pixels", again["scaled pixels"], {"color": "C1", "ls": ":"}),
    ("float16, nothing changed: seed 0", low_losses[:1], {"color": "C3", "lw": 1}),
):
    means = [np.convolve(row, np.ones(WINDOW) / WINDOW, "valid") for row in found]
    at = np.arange(WINDOW, STEPS + 1)
    ax.semilogy(at, np.median(means, 0), label=name, **style)
    low, high = np.min(means, 0), np.max(means, 0)
    ax.fill_between(at, low, high, color=style["color"], alpha=0.2, lw=0)
for seed, step in enumerate(first_bad):
    if step is not None:
        ax.axvline(step, color="C3", lw=1, ls=":")
        ax.annotate(f" NaN, seed {seed}", (step, 2.0), color="C3")
ax.set(
    title="Loss of trainings in float16: median and range of five seeds",
    xlabel="step",
    ylabel=f"loss, mean of {WINDOW} steps",
    xlim=(0, STEPS),
)
ax.legend(loc="lower left")
plt.show()

# %% [markdown]
# All five seeds train to the end in both ways. With the tuned rules, float16 follows
# float32, and one of the two blocks stays in float32. With scaled pixels both blocks
# are float16. But the training itself changes: at this learning rate it is slower.
#
# **Answer.** The smallest change is one rule, which keeps the last block in float32.
# `watch` and `first_nonfinite` find the line, where the squares of that block become
# float16, from one failed step under `jit`. `tune` finds the rule.
#
# A loss scale does not repair this fault. It repairs a second one, which causes no NaN:
# gradients below 6e-8. `explain` warns of it before anything runs, and
# `numerics_report` and `watch` measure it.
