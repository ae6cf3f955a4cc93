# %% [markdown]
# # 2. Loss scaling
#
# **Why does float16 need a loss scale, and who chooses it?**
#
# float16 begins at 6e-8: a gradient below that is zero. The loss is multiplied by a
# scale before it is differentiated, so that gradients are larger while they are in
# float16, and divided by it after. Too small a scale, and gradients vanish; too large,
# and they overflow. Nobody knows the right one in advance, and it changes.

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
# A mean divides all gradients by what it is taken over, and a loss that is one of
# several often has a small weight. Here it is 1e-5, as if it were the mean over the
# pixels of an image. `numerics_report` tells which share of the gradients would not
# fit.

# %%
small_loss_fn = functools.partial(loss_fn, weight=1e-5)
exact = jax.grad(small_loss_fn)(params, *batch)
print(jmp.numerics_report(exact, "float16"))

# %% [markdown]
# How many of them survive the backward pass in float16, without a scale and with one?
# `StaticLossScale(1)` is no scale.


# %%
def gradients(scale):
    low_loss_fn = jmp.autocast(small_loss_fn, compute_dtype="float16")
    return jmp.grad(low_loss_fn, jmp.StaticLossScale(scale))(params, *batch)


def error(grads):
    off = optax.tree.norm(optax.tree.sub(grads, exact))
    return float(off / optax.tree.norm(exact))


scales = [2.0**i for i in range(0, 49, 4)]
errors = [error(gradients(scale)) for scale in scales]
for scale, e in zip(scales, errors, strict=True):
    print(f"2**{np.log2(scale):<3.0f} error of the gradient {e:.1e}")
assert errors[0] > 10 * min(errors)
assert not np.isfinite(errors[-1])

# %%
suggested = jmp.suggest_loss_scale(exact)
print(suggested)

# %% [markdown]
# On the left, how large the gradients of the first layer are, and where float16 ends;
# with a scale they move to the right. On the right, the error of the gradient by scale:
# a valley, with vanishing on one side and overflow on the other.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
sizes = np.abs(np.asarray(exact[0])).ravel()
sizes = sizes[sizes > 0]
bins = np.logspace(-12, 2, 57)
left.hist(sizes, bins, color="0.75", label="without a scale")
left.hist(sizes * 2.0**15, bins, histtype="step", color="C0", lw=2, label="scale 2**15")
smallest = float(jnp.finfo("float16").smallest_subnormal)
left.axvline(smallest, color="k", ls="--", label="float16 begins")
left.set(xscale="log", xlabel="size of a gradient", ylabel="how many")
left.legend()
finite = np.where(np.isfinite(errors), errors, np.nan)
right.loglog(scales, finite, "o-", color="C0")
for scale, e in zip(scales, errors, strict=True):
    if not np.isfinite(e):
        right.axvline(scale, color="C1", ls=":", label="infinite or NaN")
right.set(xlabel="loss scale", ylabel="relative error of the gradient")
handles, names = right.get_legend_handles_labels()
right.legend(handles[:1], names[:1])
plt.show()

# %% [markdown]
# ## A scale that finds its level
#
# `loss_scaling(optimizer)` holds a `DynamicLossScale` in the optimizer's state. It
# doubles after `period` finite steps in a row, halves when a gradient is infinite or
# NaN, and such a step is skipped: nothing of the optimizer's state moves. To see all of
# that in a few steps, the period here is 20, and the scale starts much too high. The
# loss has its full weight.

# %%
low_loss_fn = jmp.autocast(loss_fn, compute_dtype="float16")
optimizer = jmp.loss_scaling(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)),
    jmp.DynamicLossScale(2.0**24, period=20, max_loss_scale=2.0**26),
)


def train_step(carry, rows):
    params, opt_state = carry
    loss_scale = jmp.get_loss_scale(opt_state)
    grad_fn = jmp.value_and_grad(low_loss_fn, loss_scale)
    loss, grads = grad_fn(params, images[rows], labels[rows])
    updates, opt_state = optimizer.update(grads, opt_state, params)
    told = loss, loss_scale.loss_scale, opt_state.grads_finite
    return (optax.apply_updates(params, updates), opt_state), told


rows = np.random.default_rng(0).integers(0, 1500, (300, 128))
start = params, optimizer.init(params)
(trained, opt_state), told = jax.jit(lambda c, r: jax.lax.scan(train_step, c, r))(
    start, rows
)
losses, level, finite = map(np.asarray, told)
print("steps skipped:", int(opt_state.skipped), " the scale at the end:", level[-1])
jmp.check_loss_scale(opt_state)
assert finite[-1]
assert int(opt_state.skipped) == (~finite).sum() > 0

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
steps = np.arange(len(losses))
left.semilogy(steps, losses, color="C0", lw=1, label="loss")
left.plot(steps[~finite], losses[~finite], "kx", label="skipped")
left.set(xlabel="step", ylabel="cross-entropy")
left.legend()
right.semilogy(steps, level, color="C0", base=2, label="loss scale")
right.plot(steps[~finite], level[~finite], "kx", label="skipped")
right.set(xlabel="step", ylabel="loss scale")
right.legend()
plt.show()

# %% [markdown]
# The loss is the loss, and its curve shows no sign of the scale: the value is never
# scaled where you see it, and neither are the gradients. The scale climbs until a step
# overflows, steps back, and tries again.
#
# ## What a skipped step skips
#
# The moments of Adam, its count, the parameters: all of it is what it was, bit for bit.

# %%
broken = jax.tree.map(lambda g: g.at[0, 0].set(jnp.inf), exact)
updates, after = optimizer.update(broken, opt_state, trained)
same = jax.tree.map(
    lambda a, b: bool((a == b).all()), after.inner_state, opt_state.inner_state
)
assert jax.tree.all(same)
assert not any(u.any() for u in jax.tree.leaves(updates))
print("scale before:", opt_state.loss_scale.loss_scale)
print("scale after: ", after.loss_scale.loss_scale)

# %% [markdown]
# In bfloat16 gradients have the range of float32, and no scale is needed.
# `default_loss_scale` knows: it is what `build_train_step` takes unless you say
# otherwise.

# %%
for dtype in ("float16", "bfloat16"):
    print(dtype, "->", jmp.default_loss_scale(dtype))

# %% [markdown]
# **Answer.** Because small gradients are zero in float16, and a scale moves them to
# where float16 has digits. Nobody has to choose it: `loss_scaling(optimizer)` starts
# high, halves when a step overflows (which is skipped, all of it), and doubles when
# nothing has for a while. What you see of losses and gradients is never scaled.
