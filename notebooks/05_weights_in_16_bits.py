# %% [markdown]
# # 5. Weights and moments in 16 bits
#
# **What do I lose with parameters and optimizer moments in 16 bits?**
#
# Under autocast parameters are float32, and each use casts them. They may be stored in
# 16 bits instead, to save memory or to send fewer bytes between devices. A model
# computes with them as with float32 ones: its sums, its exponentials and its loss are
# float32. What may be lost are the updates. Optimizer
# moments may be stored in fewer bits too. The model is a small network on
# scikit-learn's handwritten digits, and it computes in bfloat16.

# %%
import functools
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, "float32"), jnp.asarray(digits.target)
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
STEPS, EVERY, SEEDS = 1000, 20, 5
# The arrays are small: a lower level saves more time than it costs.
OPTIONS = {"xla_backend_optimization_level": 1}


def init_params(key):
    keys = jax.random.split(key)
    return {
        "w1": jax.random.normal(keys[0], (64, 128)) / 8,
        "w2": jax.random.normal(keys[1], (128, 10)) / 128**0.5,
    }


def logits(params, x):
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]


def loss_fn(params, model_state, batch, rng):
    x, y = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y)
    return losses.mean(), (model_state, None)


# %% [markdown]
# ## What goes wrong
#
# bfloat16 has 8 bits of mantissa: after 1 comes 1 + 1/128. An update of 1/1024 is
# rounded away, however often it comes:

# %%
w = jnp.ones((), "bfloat16")
for _ in range(100):
    w = w + jnp.bfloat16(1 / 1024)
print(f"100 updates of 1/1024: 1 becomes {w}, not {1 + 100 / 1024}")
assert w == 1

# %% [markdown]
# The same happens in training, once the learning rate is small. `train_all` trains five
# seeds for 1000 steps of Adam, with a learning rate that falls to zero.

# %%
adam = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adam(optax.cosine_decay_schedule(1e-3, STEPS)),
)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=OPTIONS)
@functools.partial(jax.vmap, in_axes=(None, None, 0))
def train_all(optimizer_of, dtype, seed):
    """Trains a seed; returns its last state, and its losses on all training images."""
    start, order, key = jax.random.split(jax.random.key(seed), 3)
    init, step = jmp.build_train_step(loss_fn, optimizer_of(key))
    state = init(jmp.cast_tree(init_params(start), dtype))

    def one(state, rows):
        return step(state, (train[0][rows], train[1][rows]))[0], None

    def some(state, rows):
        state, _ = jax.lax.scan(one, state, rows)
        loss, _ = loss_fn(jmp.cast_tree(state.params, "float32"), None, train, None)
        return state, loss

    rows = jax.random.randint(order, (STEPS // EVERY, EVERY, 64), 0, 1500)
    return jax.lax.scan(some, state, rows)


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    runs = {
        "float32": train_all(lambda key: adam, "float32", jnp.arange(SEEDS)),
        "plain bfloat16": train_all(lambda key: adam, "bfloat16", jnp.arange(SEEDS)),
    }
for name, (_, losses) in runs.items():
    print(f"{name:15} loss {np.median(losses[:, -1]):.3f}")
print(*{f"\n{warning.message}" for warning in caught})
final = {name: float(np.median(losses[:, -1])) for name, (_, losses) in runs.items()}
assert final["plain bfloat16"] > 1.5 * final["float32"]

# %% [markdown]
# Plain bfloat16 stalls. `build_train_step` has warned of it. Its message names three
# wrappers that save small updates from rounding:
#
# - `master_weights` keeps a float32 copy of each parameter.
# - `compensated` keeps the 16 bits that a bfloat16 parameter lacks. Parameter and
#   state together are the float32 number.
# - `stochastic_rounding` keeps no copy. It rounds up or down at random, and the mean is
#   exact.
#
# ## The same updates with a wrapper
#
# A single run with stochastic rounding looks biased, because its errors are random. So
# the picture shows the median of 1,001 runs, and a band that contains 80 % of them.


# %%
def add_often(optimizer):
    """Returns a parameter after each of 100 updates of 1/1024."""

    def one(carry, _):
        w, opt_state = carry
        updates, opt_state = optimizer.update(jnp.full(1, -1 / 1024), opt_state, w)
        w = jmp.apply_updates(w, updates)
        return (w, opt_state), w[0]

    w = jnp.ones(1, "bfloat16")
    return jax.lax.scan(one, (w, optimizer.init(w)), None, 100)[1].astype("float32")


sgd = optax.sgd(1.0)
curves = {
    "plain bfloat16": add_often(sgd),
    "master_weights": add_often(jmp.master_weights(sgd)),
    "compensated": add_often(jmp.compensated(sgd)),
}
rounded = jax.vmap(lambda key: add_often(jmp.stochastic_rounding(sgd, key)))(
    jax.random.split(jax.random.key(2), 1001)
)
at = np.arange(1, 101)
fig, ax = plt.subplots(figsize=(10, 3.8), layout="constrained")
ax.plot(at, 1 + at / 1024, color="0.7", lw=4, label="exact")
for (name, curve), style in zip(curves.items(), (":", "-", "--"), strict=True):
    ax.step(at, curve, style, label=name)
ax.step(at, np.median(rounded, 0), "C3-.", label="stochastic_rounding, median")
low, high = np.quantile(rounded, (0.1, 0.9), 0)
ax.fill_between(at, low, high, step="pre", color="C3", alpha=0.15, lw=0)
ax.set(
    title="A bfloat16 parameter under updates of 1/1024",
    xlabel="update",
    ylabel="parameter",
)
ax.legend()
plt.show()
mean = float(rounded[:, -1].mean())
print(
    f"mean of stochastic rounding in the end: {mean:.4f}, exact: {1 + 100 / 1024:.4f}"
)
assert abs(mean - 1 - 100 / 1024) < 0.005
assert curves["master_weights"][-1] == curves["compensated"][-1] == 1.1015625

# %% [markdown]
# ## Training with a wrapper

# %%
wrappers = {
    "master_weights": lambda key: jmp.master_weights(adam),
    "compensated": lambda key: jmp.compensated(adam),
    "stochastic_rounding": lambda key: jmp.stochastic_rounding(adam, key),
}
runs |= {
    name: train_all(wrap, "bfloat16", jnp.arange(SEEDS))
    for name, wrap in wrappers.items()
}


def bytes_of(tree):
    return jmp.dtype_summary(tree).total.bytes / (64 * 128 + 128 * 10) / SEEDS


@jax.jit
@jax.vmap
def accuracy(params):
    found = logits(jmp.cast_tree(params, "float32"), test[0]).argmax(-1)
    return jnp.mean(found == test[1])


def show_table(runs):
    print(f"{'':24}    bytes a parameter           median of five seeds")
    print(f"{'':24}itself  optimizer state  sum    loss  right on test")
    for name, (state, losses) in runs.items():
        itself, kept = bytes_of(state.params), bytes_of(state.opt_state)
        loss, right = np.median(losses[:, -1]), np.median(accuracy(state.params))
        print(
            f"{name:24}{itself:6.1f}{kept:17.1f}{itself + kept:5.1f}"
            f"{loss:8.3f}{right:15.1%}"
        )


show_table(runs)

# %%
fig, ax = plt.subplots(figsize=(10, 3.8), layout="constrained")
at = np.arange(1, STEPS // EVERY + 1) * EVERY
for (name, (_, losses)), style in zip(
    runs.items(), ("-", ":", "-", "--", "-."), strict=True
):
    is_exact = name == "float32"
    look = {"color": "0.7", "lw": 4} if is_exact else {"ls": style}
    (line,) = ax.semilogy(at, np.median(losses, 0), label=name, **look)
    low, high = np.asarray(losses).min(0), np.asarray(losses).max(0)
    ax.fill_between(at, low, high, color=line.get_color(), alpha=0.15, lw=0)
ax.set(
    title="Parameters in bfloat16: median and range of five seeds",
    xlabel="step",
    ylabel="loss on all training images",
)
ax.legend()
plt.show()
final = {name: float(np.median(losses[:, -1])) for name, (_, losses) in runs.items()}
assert all(abs(final[name] / final["float32"] - 1) < 0.02 for name in wrappers)

# %% [markdown]
# With each wrapper the loss is that of float32. (The accuracy on 297 test images hides
# the difference: digits are too easy.)
#
# Masters do not save memory: 2 + 4 bytes are more than the 4 of a float32 parameter.
# They are for models whose parameters have to be 16-bit. `compensated` has
# the accuracy of masters for 2 + 2 bytes. `stochastic_rounding` takes 2 bytes, and adds
# noise. The first picture shows the noise. In the second one it is too small to see.
#
# ## Moments: what goes wrong
#
# Adam keeps two moments, 8 bytes a parameter. Without a gradient, its second moment
# loses a thousandth at each step. In bfloat16 the next smaller number is at least a
# 256th away, so rounding to the nearest number restores the old value. The moment
# cannot shrink. `low_precision_state` refuses this:

# %%
try:
    jmp.low_precision_state(adam).init(init_params(jax.random.key(0)))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Moments: what works
#
# With a key, `low_precision_state` uses stochastic rounding. The picture shows the
# second moments of 4,096 parameters. Their gradient is 1 for 1000 steps and 0 for 1000
# more. Rounding to the nearest number is written by hand for comparison.


# %%
def second_moments(optimizer, round_state=lambda state: state):
    """Returns second moments after each 20th step: their median, 10 % and 90 %."""
    w = jnp.zeros((64, 64))

    def one(state, step):
        grads = jnp.full_like(w, step < 1000)
        _, state = optimizer.update(grads, state, w)
        return round_state(state), None

    def some(state, steps):
        state, _ = jax.lax.scan(one, state, steps)
        moments = optax.tree.get(state, "nu").astype("float32")
        return state, jnp.quantile(moments, jnp.array([0.5, 0.1, 0.9]))

    steps = jnp.arange(2000).reshape(-1, EVERY)
    run = jax.jit(lambda: jax.lax.scan(some, optimizer.init(w), steps)[1])
    return np.asarray(run()).T


def to_nearest(state):
    return jmp.cast_tree(jmp.cast_tree(state, "bfloat16"), "float32")


plain = optax.scale_by_adam()
stored = jmp.low_precision_state(plain, key=jax.random.key(3))
at = np.arange(EVERY, 2001, EVERY)
exact = second_moments(plain)[0]
nearest = second_moments(plain, to_nearest)[0]
median, low, high = second_moments(stored)
fig, ax = plt.subplots(figsize=(10, 3.8), layout="constrained")
ax.plot(at, exact, color="0.7", lw=4, label="float32")
ax.plot(at, nearest, "C0:", label="bfloat16, nearest")
ax.plot(at, median, "C3-.", label="bfloat16, stochastic rounding, median")
ax.fill_between(at, low, high, color="C3", alpha=0.15, lw=0)
ax.set(
    title="Adam's second moment: gradients of 1, and of 0 from step 1000 on",
    xlabel="step",
    ylabel="second moment",
)
ax.legend()
plt.show()
assert nearest[-1] == nearest[49] < 0.6 * exact[49]
assert abs(median / exact - 1)[5:].max() < 0.05

# %% [markdown]
# The band contains 80 % of the 4,096 moments.
#
# `low_precision_state` also stores moments in 8 bits, with a scale for each row. Arrays
# of fewer than 4,096 numbers stay in float32: here the second matrix. The table has
# float32 parameters, and in the last row the fewest bytes of all:

# %%
lean = {
    "16-bit moments": (
        lambda key: jmp.low_precision_state(adam, key=key),
        "float32",
    ),
    "8-bit moments": (
        lambda key: jmp.low_precision_state(adam, "float8_e4m3fn", key=key),
        "float32",
    ),
    "8 bits, bfloat16 weights": (
        lambda key: jmp.stochastic_rounding(
            jmp.low_precision_state(adam, "float8_e4m3fn", key=key),
            jax.random.fold_in(key, 1),
        ),
        "bfloat16",
    ),
}
lean = {name: train_all(*way, jnp.arange(SEEDS)) for name, way in lean.items()}
show_table({"float32": runs["float32"], **lean})
ends = [float(np.median(losses[:, -1])) for _, losses in lean.values()]
assert all(abs(end / final["float32"] - 1) < 0.05 for end in ends)

# %% [markdown]
# **Answer.** With plain 16-bit parameters you lose every update below half of the
# distance to the next number, and training stalls. With a wrapper, this training loses
# nothing: its loss is that of float32.
#
# | wrapper | bytes a parameter | error |
# |---|---|---|
# | `master_weights` | 2 + 4 for a float32 copy | none: updates are float32 |
# | `compensated` | 2 + 2 for the other half of the float32 number | as with masters |
# | `stochastic_rounding` | 2 | none on average; noise |
# | `low_precision_state` | 4 for Adam's moments, not 8 | none on average; noise |
# | the same in 8 bits | 2 for Adam's moments, not 8 | none on average; more noise |
#
# They nest: `loss_scaling` outermost, then a wrapper for parameters, then
# `low_precision_state`, then the optimizer. If nothing requires 16-bit parameters,
# float32 parameters under autocast are the simplest choice: 4 bytes, and no wrapper.
