# %% [markdown]
# # 2. Loss scaling
#
# **Which loss scale does float16 need?**
#
# The smallest number of float16 is 6e-8, or 2**-24: a smaller gradient becomes zero.
# Loss scaling multiplies the loss by a scale before it is differentiated, and divides
# the gradients by it afterwards. So gradients are larger while they are float16. If the
# scale is too small, they vanish. If it is too large, they overflow.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp

digits = load_digits()
images = jnp.asarray(digits.data / 16, jnp.float32)
labels = jnp.asarray(digits.target)


def init(key, sizes=(64, 128, 128, 10)):
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [jax.random.normal(k, (m, n)) * (2 / m) ** 0.5 for k, m, n in pairs]


def loss_fn(params, images, labels, weight=1.0):
    h = images
    for w in params[:-1]:
        h = jax.nn.relu(h @ w)
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ params[-1], labels)
    return weight * losses.mean()


params = init(jax.random.key(0))
batch = images[:256], labels[:256]

# %% [markdown]
# ## Gradients that vanish
#
# A mean divides all gradients by the number of its terms. A loss that is one of several
# often has a small weight. Here the weight is 1e-5, as in a mean over the pixels of an
# image. `numerics_report` shows which share of the gradients would not fit float16:
# underflow means zero, and subnormal means that digits are missing.

# %%
small_loss_fn = functools.partial(loss_fn, weight=1e-5)
exact = jax.grad(small_loss_fn)(params, *batch)
print(jmp.numerics.numerics_report(exact, "float16"))

# %% [markdown]
# ## Fixed scales
#
# `jmp.grad` takes a loss scale, and returns true gradients: it has already divided by
# the scale. This is their error by scale, in float16. `StaticLossScale(1)` does not
# scale.


# %%
def gradients(scale):
    low_loss_fn = jmp.autocast(small_loss_fn, compute_dtype="float16")
    return jmp.grad(low_loss_fn, loss_scale=jmp.StaticLossScale(scale))(params, *batch)


def error(grads):
    off = optax.tree.norm(optax.tree.sub(grads, exact))
    return float(off / optax.tree.norm(exact))


powers = range(0, 49, 4)
errors = np.array([error(gradients(2.0**power)) for power in powers])
for power, e in zip(powers, errors, strict=True):
    print(f"scale 2**{power:<3} error of the gradients {e:.1e}")
assert errors[0] > 10 * min(errors)
assert not np.isfinite(errors[-1])

# %% [markdown]
# Scales between 2**12 and 2**32 suit these gradients. With a smaller scale they vanish.
# With a larger one they are infinite or NaN. `suggest_loss_scale` returns a large scale
# that leaves some headroom:

# %%
suggested = jmp.numerics.suggest_loss_scale(exact)
print(f"suggested: 2**{np.log2(suggested.loss_scale):.0f}")
print(f"of the gradients, {suggested.lost:.0%} vanish without a scale")
print(f"of these, it rescues {suggested.rescued:.0%}")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
sizes = np.abs(np.asarray(exact[0])).ravel()
sizes = sizes[sizes > 0]
bins = 2.0 ** np.arange(-42, 8)
left.hist(sizes, bins, color="0.75", label="without a scale")
left.hist(sizes * 2.0**15, bins, histtype="step", color="C0", lw=2, label="scale 2**15")
left.axvline(2.0**-24, color="k", ls="--", label="smallest float16")
left.set_xscale("log", base=2)
left.set(
    title="Gradients of the first layer",
    xlabel="size of a gradient",
    ylabel="number of gradients",
    ylim=(0, 1600),
)
left.legend(loc="upper right")
scales, is_finite = 2.0 ** np.array(powers), np.isfinite(errors)
right.loglog(scales[is_finite], errors[is_finite], "o-", color="C0")
right.set_xscale("log", base=2)
right.axvspan(scales[~is_finite][0], scales[-1], color="C1", alpha=0.3)
right.text(2.0**42, 0.05, "infinite\nor NaN", ha="center")
right.set(
    title="Error of float16 gradients",
    xlabel="loss scale",
    ylabel="relative error of the gradients",
)
plt.show()

# %% [markdown]
# On the left, a scale of 2**15 moves all gradients into the range of float16.
#
# ## A fixed scale fails in training
#
# A scale that suits one step may not suit the next: gradients shrink with the loss, and
# a rare batch has large ones. This scale of 2**24 suits the small weight. The loss now
# has its full weight, and the first step overflows:

# %%
low_loss_fn = jmp.autocast(loss_fn, compute_dtype="float16")
adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
grads = jmp.grad(low_loss_fn, loss_scale=jmp.StaticLossScale(2.0**24))(params, *batch)
updates, _ = adam.update(grads, adam.init(params), params)
lost = optax.apply_updates(params, updates)
print(jmp.numerics.nonfinite_report(lost))
assert not jmp.all_finite(lost)

# %% [markdown]
# From now on the parameters are NaN.
#
# ## A scale that adapts
#
# `loss_scaling(optimizer)` holds a `DynamicLossScale` in the optimizer state.
#
# - After `period` finite steps in a row, the scale doubles.
# - If a gradient is infinite or NaN, the scale halves, and the step is skipped.
#
# The default starts at 2**15, and its period is 2,000 steps. Here the period is 20 and
# the scale starts much too high, so that 300 steps show everything. Five seeds differ
# in their parameters and their batches.

# %%
optimizer = jmp.loss_scaling(
    adam, jmp.DynamicLossScale(2.0**24, period=20, max_loss_scale=2.0**26)
)


def train(loss_fn, optimizer):
    """Trains five seeds; returns the last states, and what each step returns."""

    def step(carry, rows):
        params, opt_state = carry
        loss_scale = jmp.get_loss_scale(opt_state)
        grad_fn = jmp.value_and_grad(loss_fn, loss_scale=loss_scale)
        loss, grads = grad_fn(params, images[rows], labels[rows])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        seen = loss, loss_scale.loss_scale, opt_state.grads_finite
        return (optax.apply_updates(params, updates), opt_state), seen

    def one(key):
        first, batches = jax.random.split(key)
        start = init(first)
        rows = jax.random.randint(batches, (300, 128), 0, 1500)
        (_, opt_state), seen = jax.lax.scan(step, (start, optimizer.init(start)), rows)
        return opt_state, seen

    # The arrays are small: a lower level saves more time than it costs.
    options = {"xla_backend_optimization_level": 1}
    run = jax.jit(jax.vmap(one), compiler_options=options)
    return run(jax.random.split(jax.random.key(0), 5))


_, (exact_losses, *_) = train(loss_fn, jmp.loss_scaling(adam, jmp.NoOpLossScale()))
_, (default_losses, *_) = train(low_loss_fn, jmp.loss_scaling(adam))
opt_states, seen = train(low_loss_fn, optimizer)
losses, scales, finite = map(np.asarray, seen)
skipped = np.asarray(opt_states.skipped)
print("steps skipped by each seed:", skipped)
print("loss scale at the end:", *(f"2**{p:.0f}" for p in np.log2(scales[:, -1])))
jmp.check_loss_scale(opt_states)
assert (skipped == (~finite).sum(1)).all()
assert (skipped > 0).all()

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
WINDOW = 10
steps = np.arange(WINDOW, 301)  # A mean of 10 steps exists from the 10th step on.
for name, values, style in (
    ("float32", exact_losses, {"color": "0.6", "lw": 4}),
    ("float16, default scale", default_losses, {"color": "C1", "ls": ":", "lw": 2}),
    ("float16, period 20", losses, {"color": "C0", "ls": "--"}),
):
    window = np.ones(WINDOW) / WINDOW
    means = np.array([np.convolve(row, window, "valid") for row in values])
    left.semilogy(steps, np.median(means, 0), label=name, **style)
    left.fill_between(
        steps, means.min(0), means.max(0), color=style["color"], alpha=0.2, lw=0
    )
left.set(
    title="Loss: median and range of five seeds",
    xlabel="step",
    ylabel="cross-entropy, mean of 10 steps",
)
left.legend()
seed = 0
at = np.arange(1, 301)
right.step(at, scales[seed], color="C0", label="loss scale")
right.plot(at[~finite[seed]], scales[seed][~finite[seed]], "kx", label="skipped step")
right.set_yscale("log", base=2)
right.set(title=f"Loss scale of seed {seed}", xlabel="step", ylabel="loss scale")
right.legend()
plt.show()

# %% [markdown]
# The loss that you see is not scaled, and neither are the gradients. With the default
# scale, the loss of float16 is that of float32. With a period of 20 it is a little
# behind, because 13 to 16 steps are skipped. On the right, the scale climbs until a
# step overflows, and halves.
#
# ## A skipped step changes the scale only
#
# The parameters, Adam's moments and Adam's count stay as they were, bit for bit. This
# step has an infinite gradient:

# %%
state = optimizer.init(params)
_, state = optimizer.update(exact, state, params)  # So that moments are not zero.
broken = jax.tree.map(lambda g: g.at[0, 0].set(jnp.inf), exact)
updates, after = optimizer.update(broken, state, params)
same = jax.tree.map(
    lambda a, b: bool((a == b).all()), after.inner_state, state.inner_state
)
assert jax.tree.all(same)
assert not any(u.any() for u in jax.tree.leaves(updates))
print(f"scale before: 2**{np.log2(state.loss_scale.loss_scale):.0f}")
print(f"scale after:  2**{np.log2(after.loss_scale.loss_scale):.0f}")

# %% [markdown]
# bfloat16 has the range of float32, so it needs no scale. `default_loss_scale` returns
# the scale that `build_train_step` uses for a dtype:

# %%
for dtype in ("float16", "bfloat16"):
    print(dtype, "->", type(jmp.default_loss_scale(dtype)).__name__)

# %% [markdown]
# **Answer.** float16 needs a scale that adapts: a fixed one is too small for some steps
# or too large for others. `loss_scaling(optimizer)` starts high. It halves the scale
# when a step overflows, skips that step, and doubles the scale after many finite steps.
# The losses and gradients that you see are not scaled.
