# %% [markdown]
# # 4. The optax chain
#
# **Clipping, schedules, accumulation, parameters of 16 bits: in which order do the
# parts stand, what does each cost in bytes, and what does it buy in accuracy?**
#
# Every part here is an optax transformation that wraps another one. The model is a
# small network on scikit-learn's handwritten digits.

# %%
import functools
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import jmp_lite as jmp

digits = load_digits()
images, labels = jnp.asarray(digits.data / 16, "float32"), jnp.asarray(digits.target)
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])

keys = jax.random.split(jax.random.key(0), 2)
params = {
    "w1": jax.random.normal(keys[0], (64, 128)) / 8,
    "w2": jax.random.normal(keys[1], (128, 10)) / 128**0.5,
}


def logits(params, x):
    return jax.nn.relu(x @ params["w1"]) @ params["w2"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


loss_float16 = jmp.autocast(loss_fn, compute_dtype="float16")

# %% [markdown]
# ## Clipping sees true gradients
#
# In float16 the loss is multiplied by a scale before it is differentiated. Whoever
# clips what comes out of that clips a number that says nothing of the model.
# `jmp.value_and_grad` divides by the scale again before anybody sees a gradient. So the
# clipping below does not notice the scale. The same by hand, unscaled after clipping,
# loses nearly all of the gradient.

# %%
clip = optax.clip_by_global_norm(0.5)


@jax.jit
def norms(params, loss_scale):
    _, grads = jmp.value_and_grad(loss_float16, loss_scale)(params, *train)
    scaled = loss_scale.scale(grads)
    results = []
    for tree in (grads, scaled):
        clipped, _ = clip.update(tree, clip.init(params))
        results += [optax.tree.norm(tree), optax.tree.norm(clipped)]
    return *results[:3], results[3] / loss_scale.loss_scale


true_norm = optax.tree.norm(jax.jit(jax.grad(loss_fn))(params, *train))
lines = [
    f"norm of the float32 gradients: {true_norm:.3f}, to be clipped to 0.5",
    "             by jmp.value_and_grad    by hand, scaled",
    "loss scale      norm      clipped        norm   clipped, then unscaled",
]
for power in (5, 10, 15):
    norm, clipped, scaled, by_hand = norms(params, jmp.DynamicLossScale(2.0**power))
    lines += [f"2**{power:<2}{norm:16.3f}{clipped:13.3f}{scaled:12.0f}{by_hand:25.1e}"]
    assert abs(norm - true_norm) < 0.01 * true_norm
    assert abs(clipped - 0.5) < 1e-3
    assert by_hand < 0.1 * clipped
print("\n".join(lines))

# %% [markdown]
# ## A skipped step leaves the schedule alone
#
# `loss_scaling` stands around the whole chain. Where a gradient is not finite it
# returns zero updates, and everything inside of it stays as it was: Adam's moments, and
# both counts, that of Adam and that of the schedule. Here one pixel of batch 3 is 1e6,
# which float16 does not have.

# %%
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, 100)
optimizer = jmp.loss_scaling(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
)


@jax.jit
def train_step(params, opt_state, x, y):
    scale = jmp.get_loss_scale(opt_state)
    _, grads = jmp.value_and_grad(loss_float16, scale)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, optax.tree.norm(updates)


def counts_of(opt_state):
    return [int(n) for _, n in optax.tree.get_all_with_path(opt_state, "count")]


state = params, optimizer.init(params)
lines = ["step  finite  loss scale  counts  learning rate  norm of the update"]
for step in range(8):
    x, y = images[step * 64 : (step + 1) * 64], labels[step * 64 : (step + 1) * 64]
    if step == 3:
        x = x.at[5, 20].set(1e6)
    old = state[1]
    *state, moved = train_step(*state, x, y)
    scale, finite = jmp.get_loss_scale(state[1]), bool(state[1].grads_finite)
    counts, rate = counts_of(state[1]), schedule(counts_of(old)[-1])
    lines += [
        f"{step:4}  {finite!s:6}{scale.loss_scale:12.0f}  {counts}{rate:14.2e}"
        f"{moved:16.4f}"
    ]
    if step == 3:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), old, state[1])
        assert all(jax.tree.leaves(same.inner_state))  # Bit for bit.
        assert moved == 0
        assert counts == [3, 3]
print("\n".join(lines))

# %% [markdown]
# The counts are those after the step. Batch 4 gets the learning rate that batch 3 would
# have had. (The first update is zero because the warm-up starts at zero.)
#
# ## Accumulation
#
# Two ways to make one large batch of four small ones. `optax.MultiSteps` is called once
# for each small batch, and its accumulator is part of the state: 4 bytes a parameter.
# `build_train_step(accumulate=4)` splits a large batch inside of one step, and holds
# its sum only while that runs. Without an overflow they do the same.

# %%
chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
many = jmp.loss_scaling(optax.MultiSteps(chain, 4))


@functools.partial(jax.jit, static_argnums=0)
def run(optimizer, params, xs, ys):
    """Trains on all batches; returns the end, and losses and scales on the way."""

    def one(carry, batch):
        params, opt_state = carry
        scale = jmp.get_loss_scale(opt_state)
        _, grads = jmp.value_and_grad(loss_float16, scale)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss_fn(params, *train), scale.loss_scale)

    return jax.lax.scan(one, (params, optimizer.init(params)), (xs, ys))


def loss_with_state(params, model_state, batch, rng):
    return loss_fn(params, *batch), (model_state, None)


init, step = jmp.build_train_step(
    loss_with_state, chain, jmp.get_rules("mixed", "float16"), accumulate=4
)
order = jax.random.randint(jax.random.key(1), (200, 64), 0, 1500)
xs, ys = images[order], labels[order]
training, step = init(params), jax.jit(step)
# The i-th micro-batch has every fourth row from the i-th on.
for rows in order.reshape(50, 4, 64).swapaxes(1, 2).reshape(50, 256):
    training, _ = step(training, (images[rows], labels[rows]))
(by_multi, opt_state), _ = run(many, params, xs, ys)

size = jmp.dtype_summary(params).total.elements


def bytes_of(tree):
    return jmp.dtype_summary(tree).total.bytes / size


apart = max(float(jnp.abs(by_multi[k] - training.params[k]).max()) for k in params)
moved = max(float(jnp.abs(by_multi[k] - params[k]).max()) for k in params)
print(f"""\
50 updates, each of 4 small batches, move parameters by up to {moved:.3f}
largest difference between the two ways: {apart:.1e}
state with accumulate=4:  {bytes_of(training.opt_state):.1f} bytes a parameter
state with MultiSteps(4): {bytes_of(opt_state):.1f} bytes a parameter""")
assert apart < 0.01 * moved

# %% [markdown]
# They differ when a small batch overflows. `loss_scaling` around `MultiSteps` drops
# that one alone, and the next takes its place; with `accumulate` there is one decision
# for all four.
#
# ## A wrong order
#
# `loss_scaling` *inside* of `MultiSteps` looks alike. But now the overflow is added to
# the accumulator before anybody looks, and optax clears the accumulator by multiplying
# with zero: zero times infinity is NaN, and stays so. Small batch 10 overflows:

# %%
wrong = optax.MultiSteps(jmp.loss_scaling(chain), 4)
xs = xs.at[10, 5, 20].set(1e6)
lines = []
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for name, each, style in (
    ("loss_scaling(MultiSteps(...))", many, "-"),
    ("MultiSteps(loss_scaling(...))", wrong, "--"),
):
    (_, opt_state), (losses, scales) = run(each, params, xs, ys)
    left.plot(losses, style, label=name)
    right.semilogy(scales, style, base=2, label=name)
    skipped = optax.tree.get(opt_state, "skipped")
    lines += [f"{name}: skipped {skipped}, loss {losses[0]:.2f} to {losses[-1]:.2f}"]
left.set(xlabel="small batches", ylabel="loss on all training images")
right.set(xlabel="small batches", ylabel="loss scale")
left.legend()
plt.show()
print("\n".join(lines))
assert skipped == 48  # All updates but the first two.
assert losses[-1] == losses[20]

# %% [markdown]
# Nothing is trained any more, and neither the loss nor a parameter is NaN. A scale that
# sinks to 1 tells, and so does `check_loss_scale`, which finds the count in the state:

# %%
try:
    jmp.check_loss_scale(opt_state, max_consecutive_skips=20)
except jmp.LossScaleError as error:
    print(str(error).split(" Likely")[0])

# %% [markdown]
# ## Parameters of 16 bits
#
# Under autocast parameters are float32 and cast where they are used. Parameters that
# are 16 bits themselves, to be sent, gathered or served as such, have a problem: an
# update that is less than half of the distance to the next bfloat16 number is rounded
# away, however often it comes. Here 1/1024 is added a hundred times to 1; the next
# number after 1 is 1 + 1/128.

# %%
wrappers = {
    "plain bfloat16": lambda inner: inner,
    "master_weights": jmp.master_weights,
    "compensated": jmp.compensated,
    "stochastic_rounding": lambda inner: jmp.stochastic_rounding(
        inner, jax.random.key(2)
    ),
}
styles = dict(zip(wrappers, [":", "-", "--", "-."], strict=True))


def add_often(optimizer, w):
    def one(carry, _):
        w, opt_state = carry
        updates, opt_state = optimizer.update(jnp.full(1, -1 / 1024), opt_state, w)
        w = optax.apply_updates(w, updates)
        return (w, opt_state), w

    return jax.lax.scan(one, (w, optimizer.init(w)), None, 100)[1].astype("float32")


ends = {}
fig, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
ax.plot([0, 99], [1 + 1 / 1024, 1 + 100 / 1024], color="0.7", lw=4, label="exact")
for name, wrap in wrappers.items():
    values = add_often(wrap(optax.sgd(1.0)), jnp.ones(1, "bfloat16"))
    ax.step(range(100), values[:, 0], styles[name], label=name)
    ends[name] = float(values[-1, 0])
ax.set(xlabel="updates of 1/1024", ylabel="the parameter")
ax.legend()
plt.show()
assert ends["plain bfloat16"] == 1
assert ends["master_weights"] == ends["compensated"] == 1.09375  # 1.09766, rounded.

# %% [markdown]
# The same in training: 1000 steps of Adam with a learning rate that falls to zero, all
# computed in bfloat16. `build_train_step` wraps the optimizer and warns where nothing
# remembers what is rounded away; the warning is caught and printed here.

# %%
STEPS = 1000
adam = optax.chain(clip, optax.adam(optax.cosine_decay_schedule(1e-3, STEPS)))
order = jax.random.randint(jax.random.key(3), (STEPS // 20, 20, 128), 0, 1500)
exact_loss = jax.jit(lambda params: loss_fn(params, *train))
lines = []


def train_all(optimizer, params):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init, step = jmp.build_train_step(loss_with_state, optimizer)
        state = init(params)
    lines.extend(f"{warning.message}\n" for warning in caught)

    @jax.jit
    def twenty(state, order):
        def one(state, chosen):
            return step(state, (train[0][chosen], train[1][chosen]))[0], None

        return jax.lax.scan(one, state, order)[0]

    losses = []
    for part in order:
        state = twenty(state, part)
        losses.append(float(exact_loss(jmp.cast_tree(state.params, "float32"))))
    return state, losses


def kept_by(state):
    """What a wrapper keeps itself, without the state of the optimizer in it."""
    is_wrapper = isinstance(state, tuple) and hasattr(state, "inner_state")
    return state._replace(inner_state=None) if is_wrapper else None


low_params = jmp.cast_tree(params, "bfloat16")
runs = {"float32": train_all(adam, params)}
runs |= {name: train_all(wrap(adam), low_params) for name, wrap in wrappers.items()}


def row_of(name, state, losses):
    inner = state.opt_state.inner_state
    whole = bytes_of(state.params), bytes_of(kept_by(inner)), bytes_of(inner)
    itself, wrapper, own = *whole[:2], whole[2] - whole[1]
    final = jmp.cast_tree(state.params, "float32")
    right = jnp.mean(logits(final, test[0]).argmax(-1) == test[1])
    return (
        f"{name:20}{itself:7.1f}{wrapper:9.1f}{own:6.1f}{itself + whole[2]:8.1f}"
        f"{losses[-1]:7.3f}{right:15.1%}"
    )


title = "bytes a parameter    itself  wrapper  Adam  in all   loss  right on test"
lines += [title, *(row_of(name, *run) for name, run in runs.items())]
print("\n".join(lines))

# %%
fig, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
steps = jnp.arange(1, STEPS // 20 + 1) * 20
ax.semilogy(steps, runs["float32"][1], color="0.7", lw=4, label="float32")
for name in wrappers:
    ax.semilogy(steps, runs[name][1], styles[name], label=name)
ax.set(xlabel="steps", ylabel="loss on all training images")
ax.legend()
plt.show()
reached = {name: float(losses[-1]) for name, (_, losses) in runs.items()}
assert reached["plain bfloat16"] > 2 * reached["float32"]
others = [name for name in wrappers if name != "plain bfloat16"]
assert all(abs(reached[name] / reached["float32"] - 1) < 0.02 for name in others)

# %% [markdown]
# Plain bfloat16 stalls when the updates become small beside the parameters. The other
# three end where float32 does. (297 test images are too few, and digits too easy, to
# show it; the loss shows it.)
#
# Masters save nothing in all: 2 + 4 bytes are more than the 4 of a float32 parameter.
# They are for models whose parameters have to be 16 bits, and are float32 training in
# all but the rounding of what the model reads. `compensated` has the digits of two
# 16-bit numbers for the bytes of one float32 number. `stochastic_rounding` keeps
# nothing but a key, and pays with noise: the first of the two plots shows it, and in
# the second it is too small to be seen.
#
# They stand inside of `loss_scaling` or around it, alone or as the last part of a
# chain.

# %%
jmp.loss_scaling(jmp.compensated(adam)).init(low_params)
jmp.compensated(jmp.loss_scaling(adam)).init(low_params)
chain = optax.chain(clip, jmp.compensated(optax.adam(1e-3)))
state = jmp.loss_scaling(chain).init(low_params)

# %% [markdown]
# ## Moments in 16 and 8 bits
#
# What is left is Adam's: 8 bytes a parameter. `low_precision_state` stores its moments
# in 16 bits, or in 8 bits with a scale for each row, and rounds them by chance. (To the
# nearest the second moment would never shrink: a step takes a thousandth off it, and
# its neighbours are at least a 256th away. Without a key that is refused.) Arrays of
# fewer than 4,096 numbers stay float32: here that is the second matrix.

# %%
try:
    jmp.low_precision_state(adam).init(params)
except ValueError as error:
    print(error)

key = jax.random.key(5)
low_moments = {
    bits: jmp.low_precision_state(adam, dtype, key=key)
    for bits, dtype in ((16, "bfloat16"), (8, "float8_e4m3fn"))
}
lines = []
lean = {
    f"{bits}-bit moments": train_all(optimizer, params)
    for bits, optimizer in low_moments.items()
}
lean["both: least memory"] = train_all(
    jmp.stochastic_rounding(low_moments[8], jax.random.key(2)), low_params
)
lines += [title, *(row_of(name, *run) for name, run in lean.items())]
print("\n".join(lines))
ends = {name: losses[-1] for name, (_, losses) in lean.items()}
assert all(abs(end / reached["float32"] - 1) < 0.05 for end in ends.values())

# %% [markdown]
# **Answer.** From the outside to the inside: `loss_scaling`, then what remembers the
# digits of 16-bit parameters, then `MultiSteps`, then `low_precision_state`, then
# clipping and the optimizer with its schedule.
#
# | part | bytes a parameter | for |
# |---|---|---|
# | `loss_scaling` | 0 | float16: what is inside sees true and finite gradients |
# | `optax.MultiSteps` | 4 | small batches one by one; an overflow drops one of them |
# | `accumulate=` | 0 between steps | one batch in parts; an overflow drops all of it |
# | `master_weights` | 4 beside 2 | 16-bit parameters, and float32's digits |
# | `compensated` | 2 beside 2 | the same at the price of float32 parameters |
# | `stochastic_rounding` | 0 beside 2 | the least memory; one rounding's noise a step |
# | `low_precision_state` | 4 or 2 for 8 | Adam's moments in 16 or 8 bits |
#
# Where nothing forces parameters to be 16 bits, float32 parameters under autocast are
# the simplest: 4 bytes, and no wrapper.
