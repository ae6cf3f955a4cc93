# %% [markdown]
# # 4. The optax chain
#
# **With a loss scale, does the order of clipping, a schedule and accumulation matter?**
#
# Each of these is an optax transformation around another one, and so is `loss_scaling`.
# For each one, this notebook first shows an order that fails. The model is a small
# network on scikit-learn's handwritten digits.

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
images, labels = jnp.asarray(digits.data / 16, "float32"), jnp.asarray(digits.target)
train = images[:1500], labels[:1500]


def init_params(key):
    keys = jax.random.split(key)
    return {
        "w1": jax.random.normal(keys[0], (64, 128)) / 8,
        "w2": jax.random.normal(keys[1], (128, 10)) / 128**0.5,
    }


def loss_fn(params, x, y):
    logits = jax.nn.relu(x @ params["w1"]) @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


params = init_params(jax.random.key(0))
loss_float16 = jmp.autocast(loss_fn, compute_dtype="float16")

# %% [markdown]
# ## Clipping
#
# **What goes wrong.** By hand, the loss is multiplied by a scale and differentiated.
# Clipping comes next, and then the division by the scale. Clipping sees scaled
# gradients, whose norm says nothing about the model:

# %%
clip = optax.clip_by_global_norm(0.5)


def clipped_norm(grads):
    clipped, _ = clip.update(grads, clip.init(params))
    return optax.tree.norm(clipped)


@jax.jit
def by_hand(params, scale):
    grads = jax.grad(lambda p: scale * loss_float16(p, *train))(params)
    return optax.tree.norm(grads), clipped_norm(grads) / scale


true_norm = optax.tree.norm(jax.jit(jax.grad(loss_fn))(params, *train))
print(f"norm of the float32 gradients: {true_norm:.3f}, to be clipped to 0.5\n")
print("loss scale     norm   clipped, then unscaled")
for power in (5, 10, 15):
    norm, clipped = by_hand(params, 2.0**power)
    print(f"2**{power:<2}{norm:15.0f}{clipped:25.1e}")
    assert clipped < 0.05

# %% [markdown]
# Nearly all of the gradient is lost, and more of it with a larger scale.
#
# **What works.** `jmp.value_and_grad` multiplies the loss by the scale, and divides the
# gradients by it before it returns them. Everything behind it sees true gradients:


# %%
@jax.jit
def by_value_and_grad(params, loss_scale):
    _, grads = jmp.value_and_grad(loss_float16, loss_scale=loss_scale)(params, *train)
    return optax.tree.norm(grads), clipped_norm(grads)


print("loss scale     norm   clipped")
for power in (5, 10, 15):
    norm, clipped = by_value_and_grad(params, jmp.DynamicLossScale(2.0**power))
    print(f"2**{power:<2}{norm:15.3f}{clipped:10.3f}")
    assert abs(norm - true_norm) < 0.01 * true_norm
    assert abs(clipped - 0.5) < 1e-3

# %% [markdown]
# ## A schedule
#
# One pixel of batch 3 is 1e6, which is infinite in float16. The step must not change
# the model.
#
# **What goes wrong.** By hand, zeros replace the gradients that are not finite. But
# Adam does not skip a step of zeros: its momentum moves the parameters, its moments
# decay, and its count and that of the schedule go on.

# %%
schedule = optax.warmup_cosine_decay_schedule(1e-3, 3e-3, 4, 100)
chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


def update_by_hand(grads, opt_state, params):
    finite = jmp.all_finite(grads)
    grads = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
    return *chain.update(grads, opt_state, params), finite


def show_steps(init, update, loss_scale_of):
    """Prints a few steps of a training; returns the state before and after step 3."""

    @jax.jit
    def train_step(params, opt_state, x, y):
        grad_fn = jmp.value_and_grad(loss_float16, loss_scale=loss_scale_of(opt_state))
        updates, opt_state, finite = update(grad_fn(params, x, y)[1], opt_state, params)
        moved = optax.tree.norm(updates)
        return optax.apply_updates(params, updates), opt_state, finite, moved

    print("step  finite  counts of Adam and schedule  norm of the update")
    state, kept = (params, init(params)), None
    for step in range(6):
        x, y = images[step * 64 : (step + 1) * 64], labels[step * 64 : (step + 1) * 64]
        if step == 3:
            x = x.at[5, 20].set(1e6)
        before = state[1]
        *state, finite, moved = train_step(*state, x, y)
        counts = [int(n) for _, n in optax.tree.get_all_with_path(state[1], "count")]
        print(f"{step:4}  {bool(finite)!s:6}{counts!s:>29}{moved:20.4f}")
        if step == 3:
            kept = before, state[1], float(moved)
    return kept


fixed = jmp.StaticLossScale(2.0**15)
*_, moved = show_steps(chain.init, update_by_hand, lambda opt_state: fixed)
assert moved > 0.01

# %% [markdown]
# **What works.** `loss_scaling` goes around the whole chain. If a gradient is not
# finite, it returns zero updates, and all state inside stays as it was: Adam's moments
# and both counts.

# %%
optimizer = jmp.loss_scaling(chain)


def update(grads, opt_state, params):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return updates, opt_state, opt_state.grads_finite


before, after, moved = show_steps(optimizer.init, update, jmp.get_loss_scale)
same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
assert all(jax.tree.leaves(same.inner_state))  # Bit for bit.
assert moved == 0

# %% [markdown]
# The counts are those after the step. Step 4 gets the learning rate that step 3 would
# have had.
#
# ## Accumulation
#
# `optax.MultiSteps(optimizer, 4)` adds up the gradients of four small batches (often
# called micro-batches), and then updates once.
#
# **What goes wrong.** With `loss_scaling` *inside* of `MultiSteps`, an overflow enters
# the accumulator before anything checks it. optax clears the accumulator by a
# multiplication with zero. Zero times infinity is NaN, and stays NaN.

# %%
adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
wrong = optax.MultiSteps(jmp.loss_scaling(adam), 4)
right = jmp.loss_scaling(optax.MultiSteps(adam, 4))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0))
def run(optimizer, key):
    """Trains one seed on 200 micro-batches; batch 10 overflows."""
    first, order = jax.random.split(key)
    rows = jax.random.randint(order, (200, 64), 0, 1500)
    xs, ys = images[rows].at[10, 5, 20].set(1e6), labels[rows]

    def one(carry, batch):
        params, opt_state = carry
        scale = jmp.get_loss_scale(opt_state)
        _, grads = jmp.value_and_grad(loss_float16, loss_scale=scale)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss_fn(params, *train), scale.loss_scale)

    start = init_params(first)
    (_, opt_state), seen = jax.lax.scan(one, (start, optimizer.init(start)), (xs, ys))
    return opt_state, seen


seeds = jax.random.split(jax.random.key(1), 5)
wrong_state, (wrong_losses, wrong_scales) = run(wrong, seeds)
skipped = optax.tree.get(wrong_state, "skipped")
print("updates skipped of 50, by seed:", skipped)
print(f"median loss: {np.median(wrong_losses[:, 0]):.2f} at first, ", end="")
print(f"{np.median(wrong_losses[:, -1]):.2f} in the end")
assert (skipped == 48).all()  # All updates but the first two.
assert (wrong_losses[:, -1] == wrong_losses[:, 20]).all()

# %% [markdown]
# Training has stopped, although neither the loss nor a parameter is NaN. Two signs show
# it: the loss scale falls to 1, and `check_loss_scale` raises an error.

# %%
one_seed = jax.tree.map(lambda leaf: leaf[0], wrong_state)
try:
    jmp.check_loss_scale(one_seed, max_consecutive_skips=20)
except jmp.LossScaleError as error:
    print(error)

# %% [markdown]
# **What works.** With `loss_scaling` around `MultiSteps`, only the micro-batch that
# overflows is dropped. The next one takes its place.

# %%
right_state, (right_losses, right_scales) = run(right, seeds)
print("micro-batches skipped of 200, by seed:", right_state.skipped)
jmp.check_loss_scale(right_state)
assert (right_state.skipped == 1).all()

fig, (left, second) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
at = np.arange(1, 201)
for name, losses, scales, style in (
    ("MultiSteps(loss_scaling(...))", wrong_losses, wrong_scales, "--"),
    ("loss_scaling(MultiSteps(...))", right_losses, right_scales, "-"),
):
    (line,) = left.plot(at, np.median(losses, 0), style, label=name)
    low, high = losses.min(0), losses.max(0)
    left.fill_between(at, low, high, color=line.get_color(), alpha=0.2, lw=0)
    assert (scales == scales[0]).all()  # All seeds overflow at the same batch alone.
    second.step(at, scales[0], style, label=name)
left.set(
    title="Loss: median and range of five seeds",
    xlabel="micro-batch",
    ylabel="loss on all training images",
)
second.set_yscale("log", base=2)
second.set(title="Loss scale of all seeds", xlabel="micro-batch", ylabel="loss scale")
second.legend(loc="center right")
plt.show()

# %% [markdown]
# ## Accumulation inside of a step
#
# `build_train_step(accumulate=4)` splits a large batch into four parts and adds their
# gradients up inside of one step. `MultiSteps` keeps its accumulator in the optimizer
# state, which takes 4 bytes a parameter. `accumulate` needs it only while the step
# runs. Without an overflow both do the same:


# %%
def loss_with_state(params, model_state, batch, rng):
    return loss_fn(params, *batch), (model_state, None)


init, step = jmp.build_train_step(
    loss_with_state, adam, jmp.get_rules("mixed", "float16"), accumulate=4
)
many = jax.jit(right.update)
order = jax.random.randint(jax.random.key(2), (50, 256), 0, 1500)
training, step = init(params), jax.jit(step)
by_multi, opt_state = params, right.init(params)
grad_fn = jax.jit(jmp.value_and_grad(loss_float16, loss_scale=fixed))
for rows in order:
    training, _ = step(training, (images[rows], labels[rows]))
    for i in range(4):
        part = rows[i::4]  # The i-th part has every fourth row, from the i-th on.
        _, grads = grad_fn(by_multi, images[part], labels[part])
        updates, opt_state = many(grads, opt_state, by_multi)
        by_multi = optax.apply_updates(by_multi, updates)


def bytes_of(tree):
    size = jmp.dtype_summary(params).total.elements
    return jmp.dtype_summary(tree).total.bytes / size


apart = max(float(jnp.abs(by_multi[k] - training.params[k]).max()) for k in params)
moved = max(float(jnp.abs(by_multi[k] - params[k]).max()) for k in params)
print(f"""\
50 updates move parameters by up to {moved:.3f}
largest difference between the two ways: {apart:.1e}
optimizer state with accumulate=4:  {bytes_of(training.opt_state):.1f} bytes a parameter
optimizer state with MultiSteps(4): {bytes_of(opt_state):.1f} bytes a parameter""")
assert apart < 0.01 * moved

# %% [markdown]
# They differ when a micro-batch overflows. `loss_scaling(MultiSteps(...))` drops that
# micro-batch. `accumulate` decides once for all four, and drops the step.
#
# **Answer.** Yes, in one respect: `loss_scaling` has to be outermost.
#
# ```python
# optimizer = jmp.loss_scaling(
#     optax.MultiSteps(
#         optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)), 4
#     )
# )
# ```
#
# The transformations inside see true gradients, because `jmp.value_and_grad` has
# divided by the scale. They see finite gradients only, because `loss_scaling` skips all
# other steps. So their order is that of a float32 training.
