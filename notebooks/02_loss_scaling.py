# %% [markdown]
# # 2. Loss scaling
#
# **Which loss scale does float16 need?**
#
# The smallest number of float16 is 6e-8, or 2**-24: a smaller gradient becomes zero.
# Loss scaling multiplies the loss by a scale before it is differentiated, and divides
# the gradients by it afterwards. So gradients are larger while they are float16. If the
# scale is too small, they vanish. If it is too large, they overflow.
#
# The model is a small network for scikit-learn's handwritten digits. It is trained with
# a loss of weight 1, and with one of weight 1e-6, as a mean over a million pixels has.

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
STEPS, EVERY, SEEDS = 300, 10, 5
WEIGHTS = {"1": 1.0, "1e-6": 1e-6}


def init(key, sizes=(64, 128, 128, 10)):
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes, sizes[1:], strict=False)
    return [jax.random.normal(k, (m, n)) * (2 / m) ** 0.5 for k, m, n in pairs]


def loss_fn(params, rows, weight):
    h = images[rows]
    for w in params[:-1]:
        h = jax.nn.relu(h @ w)
    logits = h @ params[-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows])
    return weight * losses.mean()


low_loss_fn = jmp.autocast(loss_fn, compute_dtype="float16")

# %% [markdown]
# ## The scales that work, and one that adapts
#
# The scale of this training adapts. After `period` finite steps in a row, it doubles.
# If a gradient is infinite or NaN, it halves, and the step is skipped. It starts at
# 2**15. The default period is 2,000 steps. Here it is 20, so that 300 steps show
# everything.
#
# The picture compares it with all powers of two. In every tenth step, a scale *works*
# if the error of the float16 gradients is less than twice the smallest error.


# %%
# The arrays are small: a lower level saves more time than it costs.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 1}
)
@functools.partial(jax.vmap, in_axes=(None, None, None, 0))
def train(loss_fn, loss_scale, weight, key):
    """Trains a seed; returns the last state, and what is seen on the way."""
    # Adam divides by a root plus eps, which is to be below the smallest root.
    optimizer = jmp.loss_scaling(optax.adam(3e-3, eps=1e-16), loss_scale)

    def one(carry, rows):
        params, state = carry
        scale = jmp.get_loss_scale(state)
        grad_fn = jmp.value_and_grad(loss_fn, loss_scale=scale)
        loss, grads = grad_fn(params, rows, weight)
        updates, state = optimizer.update(grads, state, params)
        seen = loss / weight, scale.loss_scale, state.grads_finite
        return (optax.apply_updates(params, updates), state), seen

    def some(carry, rows):
        after, seen = jax.lax.scan(one, carry, rows)
        return after, ((carry[0], rows[0]), *seen)

    first, order = jax.random.split(key)
    rows = jax.random.randint(order, (STEPS // EVERY, EVERY, 128), 0, 1500)
    carry = init(first), optimizer.init(init(first))
    (_, state), (points, *seen) = jax.lax.scan(some, carry, rows)
    return state, points, *(values.ravel() for values in seen)


def error(params, rows, weight, scale):
    """The relative error of float16 gradients under a loss scale."""
    exact = jax.grad(loss_fn)(params, rows, weight)
    scale = jmp.DynamicLossScale(scale, max_loss_scale=2.0**60)
    grads = jmp.grad(low_loss_fn, loss_scale=scale)(params, rows, weight)
    return optax.tree.norm(optax.tree.sub(grads, exact)) / optax.tree.norm(exact)


@jax.jit
def errors_by_step_and_scale(points, weight):
    of_point = lambda point: jax.vmap(lambda s: error(*point, weight, s))(SCALES)
    return jax.lax.map(of_point, points)


SCALES = 2.0 ** jnp.arange(49)
seeds = jax.random.split(jax.random.key(0), SEEDS)
adaptive = jmp.DynamicLossScale(period=20)
runs = {
    weight: train(low_loss_fn, adaptive, weight, seeds) for weight in WEIGHTS.values()
}
errors, ends = {}, {}
for weight, (_, points, *_) in runs.items():
    of_seed_0 = jax.tree.map(lambda array: array[0], points)
    found = np.asarray(errors_by_step_and_scale(of_seed_0, weight))
    errors[weight] = np.where(np.isfinite(found), found, np.inf)
    works = errors[weight] < 2 * errors[weight].min(1, keepdims=True)
    ends[weight] = np.array([np.flatnonzero(row)[[0, -1]] for row in works]).T
    assert (works.sum(1) == 1 + np.diff(ends[weight], axis=0)).all()  # No gaps.

# %%
fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
at = np.arange(1, STEPS + 1)
for ax, (name, weight) in zip(axes, WEIGHTS.items(), strict=True):
    *_, scales, finite = (np.asarray(of_seeds[0]) for of_seeds in runs[weight][2:])
    low, high = np.repeat(2.0 ** ends[weight], EVERY, 1)
    ax.fill_between(
        at, low, high, color="C0", alpha=0.2, lw=0, label="scales that work"
    )
    ax.plot(at, scales, color="C0", label="scale that adapts")
    ax.plot(at[~finite], scales[~finite], "kx", label="skipped step")
    ax.text(150, 2.0**46, "gradients are infinite or NaN", ha="center", va="center")
    ax.set(title=f"Loss of weight {name}, seed 0", xlabel="step", xlim=(1, STEPS))
axes[0].set_yscale("log", base=2)
axes[0].set(ylabel="loss scale", ylim=(1, 2.0**49))
axes[0].legend(loc="lower right")
axes[1].text(150, 2.0**6, "gradients vanish", ha="center", va="center")
plt.show()

# %% [markdown]
# Each scale from a wide range works. But where the range lies depends on the loss: that
# of the small weight lies a million times higher. And it rises while the loss falls,
# because the gradients become smaller. The scale that adapts stays inside of both
# ranges. With weight 1 it climbs until a step overflows, which is then skipped. With
# weight 1e-6 it climbs to 2**24, its default bound.

# %%
for name, weight in WEIGHTS.items():
    low, high = ends[weight]
    first, last = (f"2**{low[i]} to 2**{high[i]}" for i in (0, -1))
    print(f"weight {name}: {first} in the first step, {last} in step 291")
    *_, scales, finite = (np.asarray(of_seeds[0]) for of_seeds in runs[weight][2:])
    powers = np.log2(scales[::EVERY])
    assert ((low <= powers) & (powers <= high) | ~finite[::EVERY]).all()
    assert high[-1] - high[0] >= 4
assert scales[-1] == 2.0**24
assert (ends[1e-6][1] - ends[1.0][1] >= 19).all()

# %% [markdown]
# ## Gradients that vanish
#
# `numerics_report` shows which share of gradients would not fit float16: underflow
# means zero, and subnormal means that digits are missing. These are the gradients of
# the first step, with the small weight:

# %%
params, rows = jax.tree.map(lambda array: array[0, 0], runs[1e-6][1])
exact = jax.grad(loss_fn)(params, rows, 1e-6)
print(jmp.numerics.numerics_report(exact, "float16"))
print()
for power in range(0, 43, 6):
    print(f"scale 2**{power:<3} error of the gradients {errors[1e-6][0, power]:.1e}")

# %% [markdown]
# Without a scale nearly nothing is left. With too large a scale the gradients are
# infinite or NaN. `suggest_loss_scale` returns a large scale that leaves some headroom:

# %%
suggested = jmp.numerics.suggest_loss_scale(exact)
print(f"suggested: 2**{np.log2(suggested.loss_scale):.0f}")
print(f"of the gradients but zeros, {suggested.lost:.0%} vanish without a scale")
print(f"of these, it rescues {suggested.rescued:.0%}")

# %% [markdown]
# ## Fixed scales
#
# `loss_scaling` takes fixed scales too. This is what five seeds reach with them, each
# with its own parameters and batches.

# %%
ways = {
    "float32": (loss_fn, jmp.NoOpLossScale()),
    "float16, no scale": (low_loss_fn, jmp.NoOpLossScale()),
    "float16, fixed 2**15": (low_loss_fn, jmp.StaticLossScale(2.0**15)),
    "float16, fixed 2**24": (low_loss_fn, jmp.StaticLossScale(2.0**24)),
    "float16, adaptive": (low_loss_fn, adaptive),
}
reached, states = {}, {}
print(" " * 22 + "".join(f"{f'weight {name}':>24}" for name in WEIGHTS))
print(" " * 22 + f"{'loss':>12}{'skipped':>12}" * 2)
for name, way in ways.items():
    line = f"{name:<22}"
    for weight in WEIGHTS.values():
        state, _, losses, *_ = train(*way, weight, seeds)
        reached[name, weight] = np.median(np.asarray(losses)[:, -20:].mean(1))
        states[name, weight] = state
        line += f"{reached[name, weight]:12.4f}{state.skipped.sum():12}"
    print(line)

# %% [markdown]
# The loss is the mean of the last 20 steps, without its weight: the median of the
# seeds. Steps are skipped in all seeds together, of 1,500.
#
# Without a scale, nothing is learned with the small weight. With 2**24, nothing is
# learned with weight 1, because each step overflows and is skipped. 2**15 suits both
# losses here. The one that adapts starts there, and suits them without any knowledge of
# the loss. With weight 1 it skips a few steps, and its loss is a little higher. With
# its default period it tries a larger scale a hundredth as often.
#
# The loss that you see is not scaled, and neither are the gradients.
# `check_loss_scale` raises an error if training has stopped:

# %%
for weight in WEIGHTS.values():
    exact_loss = reached["float32", weight]
    assert abs(reached["float16, adaptive", weight] / exact_loss - 1) < 0.25
    assert abs(reached["float16, fixed 2**15", weight] / exact_loss - 1) < 0.1
    jmp.check_loss_scale(states["float16, adaptive", weight])
assert reached["float16, no scale", 1e-6] > 2 < reached["float16, fixed 2**24", 1.0]
assert (states["float16, fixed 2**24", 1.0].skipped == STEPS).all()
try:
    jmp.check_loss_scale(states["float16, fixed 2**24", 1.0])
except jmp.LossScaleError as raised:
    print(str(raised).partition(". ")[0])

# %% [markdown]
# ## A skipped step changes the scale only
#
# The parameters, Adam's moments and Adam's count stay as they were, bit for bit. This
# step has an infinite gradient:

# %%
optimizer = jmp.loss_scaling(optax.adam(3e-3))
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
# **Answer.** float16 needs a scale from a range that depends on the loss, on its
# weight, and on the step. `loss_scaling(optimizer)` finds it: it halves the scale when
# a step overflows, skips that step, and doubles the scale after many finite steps. A
# fixed scale suits you if you know the range. The losses and gradients that you see are
# not scaled.
