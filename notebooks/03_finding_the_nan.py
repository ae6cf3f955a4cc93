# %% [markdown]
# # 3. Finding the NaN
#
# **A training in float16 ends in NaN. Which line is it, and what is the least that has
# to change?**
#
# A network for handwritten digits: residual blocks whose activation is a square, as in
# some language models, and a norm before the head. The pixels are the numbers 0 to 16
# that scikit-learn gives out; nobody has scaled them. float32 does not mind. (Little of
# this notebook's time goes into computing, so that the compiler is told not to try
# hard.)

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
import jmp_lite.plots

jax.config.update("jax_disable_most_optimizations", True)
WIDTH, HIDDEN, BATCH, STEPS = 32, 64, 128, 200


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


generator = np.random.default_rng(0)


def normal(n, m, gain=1.0):
    values = generator.standard_normal((n, m)) * (gain / n) ** 0.5
    return jnp.asarray(values, jnp.float32)


def new_block():
    return {"up": normal(WIDTH, HIDDEN, gain=2.0), "down": normal(HIDDEN, WIDTH)}


start = {
    "embed": normal(64, WIDTH),
    "blocks": [new_block(), new_block()],
    "head": normal(WIDTH, 10),
}
digits = load_digits()
images, labels = digits.data.astype(np.float32), digits.target
train_set, test_set = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
generator = np.random.default_rng(0)
chosen = [generator.choice(1500, BATCH, replace=False) for _ in range(STEPS)]
batches = [tuple(array[rows] for array in train_set) for rows in chosen]

# %% [markdown]
# ## The symptom
#
# The loop is an ordinary one. It keeps the parameters before each step, so that a step
# can be looked at again.


# %%
def train(loss_fn, optimizer=None):
    """Returns the parameters before each step, the losses, and the last state."""
    optimizer = optimizer or optax.adam(3e-3)

    @jax.jit
    def step(params, state, x, y):
        is_scaled = isinstance(state, jmp.LossScalingState)
        loss_scale = jmp.get_loss_scale(state) if is_scaled else jmp.NoOpLossScale()
        loss, grads = jmp.value_and_grad(loss_fn, loss_scale)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    history, losses, state = [start], [], optimizer.init(start)
    for batch in batches:
        params, state, loss = step(history[-1], state, *batch)
        history.append(params)
        losses.append(loss)
    return history, np.asarray(losses), state


history, losses, _ = train(loss_fn)
low_loss_fn = jmp.autocast(loss_fn, compute_dtype="float16")
low_history, low_losses, _ = train(low_loss_fn)
broken = int(np.argmin(np.isfinite(low_losses)))
print(f"float16 is NaN or infinite from step {broken} on, of {STEPS}")


def draw_losses(curves):
    axes = plt.figure(figsize=(10, 3.5), layout="constrained").subplots()
    for (name, losses), style in zip(
        curves.items(), ("-", "--", ":", "-."), strict=False
    ):
        smooth = np.convolve(losses, np.ones(10) / 10, "valid")
        axes.semilogy(smooth, style, label=name)
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", xlim=(0, STEPS))
    axes.legend()
    return axes


axes = draw_losses({"float32": losses, "float16": low_losses})
axes.axvline(broken, color="0.5", lw=1)
axes.annotate(" NaN from here on", (broken, 1.0), color="0.3")
plt.show()
assert np.isfinite(losses).all()
assert 10 < broken < STEPS
assert not np.isfinite(low_losses[broken + 1 :]).any()

# %% [markdown]
# Many steps go well, on float32's curve, and then all is lost: one bad step makes the
# parameters NaN, and they stay so.
#
# ## Before anything runs
#
# `explain` needs no numbers. It tells what runs in float16, and what is worth a second
# look:

# %%
told = jmp.explain(loss_fn, compute_dtype="float16", backward=True)(start, *batches[0])
print(told.summary())
assert "no loss scale" in [lint.name for lint in told.lints]

# %% [markdown]
# It has seen one fault: there is no loss scale. That will come back. But the numbers in
# a network are not written in its code, so that nothing here can say which one of them
# is going to be too large. For this the function has to run.
#
# ## Where it begins
#
# The gradients of the step that failed are of little help. All of them are NaN:

# %%
params, batch = low_history[broken], batches[broken]
grads = jax.device_get(jax.jit(jax.grad(low_loss_fn))(params, *batch))
print(jmp.nonfinite_report(grads))

# %% [markdown]
# `watch` returns, beside what a function returns, the numbers of all its operations,
# counted under `jit`. `first_nonfinite` is the first that made something infinite or
# NaN of finite numbers. A row knows its line. The logits will do:


# %%
def code(row):
    """The line of code that a row comes from."""
    file, _, line = row.source.rpartition(" ")[0].rpartition(":")
    return linecache.getline(file, int(line)).strip()


def place(row):
    """The innermost scope that a row stands in."""
    return row.scope.rpartition("/")[-1]


low_forward = jmp.autocast(forward, compute_dtype="float16")
logits, stats = jax.jit(jmp.watch(low_forward))(params, batch[0])
first = jmp.first_nonfinite(stats)
print(f"it begins in {place(first)}, {first.op}:")
print(f"    {code(first)}")
print(f"infinite: {first.inf} of {first.elements} numbers")
print(f"the largest of the others: {first.max_abs:.0f}")
assert place(first) == "block_1"
assert "** 2" in code(first)

# %% [markdown]
# The squares of the last block. float16 ends at 65504, and one number in thousands is
# beyond: one hidden unit, for one digit. What comes of it is told by the rows that
# follow:


# %%
def line_of(row):
    return f"{row.inf:4} inf{row.nan:4} NaN  {place(row):<9} {row.op:<12} {code(row)}"


lines = []
rows = [row for row in stats.rows if row.inf or row.nan]
for before, row in itertools.pairwise([None, *rows]):
    if before is None or (row.inf, row.nan) != (before.inf, before.nan):
        lines.append(line_of(row))
print("\n".join(lines))

# %% [markdown]
# A product makes a row of infinities of it, the norm divides infinity by infinity, all
# logits of that digit are NaN, and so is the mean of all losses.
#
# It has been coming. `watch` sees the backward pass too, and does not need float16:
# this watches the gradient of the float32 loss, and asks of its numbers which of them
# float16 could not hold. The squares of the last block grow from the first step on:

# %%
watched = jax.jit(jmp.watch(jax.grad(loss_fn), "float16"))
steps = sorted({broken, *range(0, STEPS, 20)})
rows_at = {step: watched(history[step], *batch)[1].rows for step in steps}


def is_square(row):
    return row.op == first.op and code(row) == code(first)


_, axes = plt.subplots(figsize=(10, 3.5), layout="constrained")
for i, style in enumerate(("-o", "--s")):
    name = f"block_{i}"
    squares = [
        max(row.max_abs for row in rows if is_square(row) and name in row.scope)
        for rows in rows_at.values()
    ]
    axes.semilogy(steps, squares, style, label=name, ms=4)
axes.axhline(65504, color="0.5", lw=1)
axes.annotate("largest float16", (0, 65504 * 1.1), color="0.3")
axes.axvline(broken, color="0.5", lw=1)
axes.annotate(" NaN in float16 from here on", (broken, 3e3), color="0.3")
axes.set(xlabel="step of the float32 training", ylabel="largest square")
axes.legend()
plt.show()
overflowing = {place(r) for rows in rows_at.values() for r in rows if r.overflow}
print("would overflow:", *sorted(overflowing))
assert overflowing == {"block_1", "rms_norm"}

# %% [markdown]
# (The norm squares its input as well. Autocast keeps norms in float32, whatever they
# are given.)
#
# ## What does not help
#
# A loss scale, by itself. `loss_scaling` skips each step whose gradients are not
# finite, so that the parameters stay whole. But it was made for gradients that are too
# large, and halves the scale each time. Here it is the forward pass that overflows, and
# no scale is small enough. In the end it is 1, which is none:

# %%
_, skipping_losses, state = train(low_loss_fn, jmp.loss_scaling(optax.adam(3e-3)))
scale = float(state.loss_scale.loss_scale)
print(f"{state.skipped} of {STEPS} steps skipped; the loss scale is {scale:.0f}")

# %% [markdown]
# ## By hand
#
# We know the block. A rule keeps it in float32 inside, and hands on float16:

# %%
float16 = jmp.get_rules("mixed", "float16")
by_hand = float16.scope("^block_1$", "full_inside")
low_loss_fn = jmp.autocast(loss_fn, by_hand)


@jax.jit
def gradients(params, loss_scale):
    return jmp.grad(low_loss_fn, loss_scale)(params, *batch)


no_scale = jmp.DynamicLossScale(1.0)
print(jmp.nonfinite_report(jax.device_get(gradients(params, no_scale))))
assert not jmp.nonfinite_report(jax.device_get(gradients(params, no_scale)))

# %% [markdown]
# ## The gradients
#
# Is that all? Remember the lint. Here are the gradients at the end of the float32
# training, and what of them float16 would lose.

# %%
grads = jax.jit(jax.grad(loss_fn))(history[-1], *batch)
print(jmp.numerics_report(grads, "float16"))

# %%
jmp_lite.plots.magnitudes(grads)

# %% [markdown]
# They lie at the lower end of float16, where it holds numbers with fewer digits (thin).
# Few of them vanish. But they are sums over a batch. What are they sums of? The rows of
# the watched gradient know. Of these products most of the results would be zero:

# %%
_, stats = watched(history[-1], *batch)
products = [row for row in stats.rows if row.op == "dot_general"]
vanish = [row for row in products if row.underflow > 0.5]
for row in vanish:
    print(f"{row.underflow:4.0%}  {place(row):<8} {code(row)}")
assert {place(row) for row in vanish} == {"block_0", "block_1"}

# %% [markdown]
# The network has learned nearly all of its digits, and what their losses say to the
# activations is mostly below 6e-8. `suggest_loss_scale` looks at the gradients, and
# names the largest power of two that leaves them finite, with some headroom:

# %%
suggested = jmp.suggest_loss_scale(grads)
print(f"loss scale 2**{int(np.log2(suggested.loss_scale))}")

# %% [markdown]
# Does it matter? With the rule from above, nothing overflows. This compares the float16
# gradients with float32's along the training.

# %%
scales = {
    "no loss scale": no_scale,
    "loss scale 2**15": jmp.DynamicLossScale(2.0**15),
    "suggested": jmp.DynamicLossScale(suggested.loss_scale),
}
exact_gradients = jax.jit(jax.grad(loss_fn))


def flat(grads):
    return np.concatenate([np.ravel(array) for array in jax.tree.leaves(grads)])


steps = range(0, STEPS + 1, 25)
errors = {name: [] for name in scales}
for step in steps:
    exact = flat(exact_gradients(history[step], *batch))
    for name, loss_scale in scales.items():
        far = flat(gradients(history[step], loss_scale)) - exact
        errors[name].append(np.linalg.norm(far) / np.linalg.norm(exact))

fig, axes = plt.subplots(figsize=(10, 3.5), layout="constrained")
for (name, found), style in zip(errors.items(), ("-o", "--s", ":^"), strict=True):
    axes.semilogy(steps, found, style, label=name, ms=4)
axes.set(xlabel="step", ylabel="relative error of the gradient")
axes.legend()
plt.show()
assert errors["no loss scale"][-1] > 0.05 > errors["loss scale 2**15"][-1]

# %% [markdown]
# That was the second fault, and it makes no NaN. The smaller the loss, the more of the
# gradient is missing, and nobody is told. With a scale the error is what float16
# rounds. (Where the line of the suggested scale has gaps, gradients were infinite: what
# is right at the end is too large for the beginning. `loss_scaling` changes its scale
# as it goes along.)
#
# ## What `tune` finds
#
# Now forget what we know. `tune` is given the network, a sample (the batch that broke
# the training), and an error that we tolerate. It tries rules, measures results and
# gradients against float32, and returns those that keep the fewest equations in
# float32.


# %%
def logits_of_batch(params):
    return forward(params, batch[0])


tried = []
tuned = jmp.tune(logits_of_batch, (params,), 0.05, float16, progress=tried.append)
print(f"{len(tried)} tried")
print(tuned.report)
assert tuned == by_hand

# %% [markdown]
# These are the rules that we wrote by hand, to the letter. What it has tried on the way
# shows where it looked: operations, then blocks one by one, then kinds of layers.

# %%
print(tuned.report.table())

# %% [markdown]
# ## Training again
#
# With a loss scale, and by one of two cures: by the rules that `tune` has found; or at
# the root of it all, which is pixels that nobody has scaled.


# %%
def loss_of_scaled_pixels(params, x, y):
    return loss_fn(params, x / 16, y)


def accuracy(params, divisor):
    logits = jax.jit(forward)(params, test_set[0] / divisor)
    return np.mean(np.argmax(logits, -1) == test_set[1])


lines = [f"{'':<14}   loss  test set  skipped  loss scale  16-bit equations"]
end = f"{losses[-20:].mean():.4f}{accuracy(history[-1], 1):10.1%}"
lines.append(f"{'float32':<14} {end}")
curves = {"float32": losses}
for name, fun, rules, divisor in (
    ("tuned", loss_fn, tuned, 1),
    ("scaled pixels", loss_of_scaled_pixels, float16, 16),
):
    optimizer = jmp.loss_scaling(optax.adam(3e-3))
    found, curves[name], state = train(jmp.autocast(fun, rules), optimizer)
    jmp.check_loss_scale(state)
    end = f"{curves[name][-20:].mean():.4f}{accuracy(found[-1], divisor):10.1%}"
    scale = int(np.log2(float(state.loss_scale.loss_scale)))
    share = jmp.explain(fun, rules)(start, *batch).share_low()
    lines.append(f"{name:<14} {end}{state.skipped:9}{f'2**{scale}':>12}{share:18.0%}")
    assert np.isfinite(curves[name]).all()
print("\n".join(lines))
draw_losses(curves)
plt.show()

# %% [markdown]
# Both train to the end. The tuned rules are on float32's curve, and keep one block of
# two in float32. Scaled pixels leave all blocks in float16, and change what is learned,
# not only how it rounds: here more slowly, at the same learning rate.
#
# **Answer.** The line is the square in the last block: `watch` and `first_nonfinite`
# say so, under `jit`, from one step that failed. The least that has to change is that
# this block stays in float32, and `tune` finds it by itself. A second fault was there
# that makes no NaN: gradients below 6e-8. `explain` had warned of it before anything
# ran, `numerics_report` and `watch` show how much is lost, and a loss scale cures it.
# It cures nothing else.
