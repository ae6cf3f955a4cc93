# %% [markdown]
# # 8. Fine-tuning
#
# **Can a pretrained float32 model be fine-tuned in float16?**
#
# A small classifier of handwritten digits is trained in float32. Then the task changes
# a little: the digits are turned by 20 degrees. The model is a module of Flax nnx.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from scipy import ndimage
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.nnx

SEEDS, STEPS, EVERY = 5, 800, 100
digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
turned = ndimage.rotate(images.reshape(-1, 8, 8), 20, (1, 2), reshape=False, order=1)
turned = turned.reshape(-1, 64)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.norm(self.hidden(x))))


def loss_of(net, x, y):
    return cross_entropy(net(x), y).mean()


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
def float32_steps(carry, x, y):
    net, optimizer = carry
    loss, grads = nnx.value_and_grad(loss_of)(net, x, y)
    optimizer.update(net, grads)
    return carry, loss


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
def float16_steps(carry, x, y):
    net, optimizer = carry
    low_loss = jmp_lite.nnx.autocast(loss_of, compute_dtype="float16")
    loss_scale = jmp.get_loss_scale(optimizer.opt_state)
    with jmp_lite.nnx.restore_if_skipped(net, optimizer):
        grad_fn = jmp_lite.nnx.value_and_grad(low_loss, loss_scale=loss_scale)
        loss, grads = grad_fn(net, x, y)
        optimizer.update(net, grads)
    return carry, loss


@nnx.jit
def in_eval_mode(net, x, y):
    logits = net(x)
    return cross_entropy(logits, y).mean(), jnp.mean(logits.argmax(-1) == y)


def evaluate(net, images):
    """Returns the loss and the accuracy on the test digits."""
    net.eval()
    loss, right = in_eval_mode(net, images[1500:], labels[1500:])
    net.train()
    return float(loss), float(right)


def batches(seed, images, steps):
    rows = np.random.default_rng(seed).integers(0, 1500, (steps, 64))
    return images[rows], labels[rows]


# %% [markdown]
# ## The pretrained models
#
# There are five of them, one for each seed.


# %%
def pretrain(seed):
    net = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(net, optax.adam(3e-3), wrt=nnx.Param)
    float32_steps((net, optimizer), *batches(seed, images, 100))
    return net


pretrained = [pretrain(seed) for seed in range(SEEDS)]
upright = np.median([evaluate(net, images)[1] for net in pretrained])
before = np.median([evaluate(net, turned)[1] for net in pretrained])
print(f"right on upright digits: {upright:.0%}, on turned ones: {before:.0%}")
assert upright > 0.85 > 0.75 > before

# %% [markdown]
# `jmp_lite.nnx.cast` returns a copy with float16 parameters. The norm stays in float32,
# its statistics and its parameters.

# %%
small = [jmp_lite.nnx.cast(net, "float16") for net in pretrained]
print(jmp_lite.nnx.dtype_summary(small[0]))
assert small[0].norm.scale.dtype == small[0].norm.mean.dtype == jnp.float32

# %% [markdown]
# ## What goes wrong
#
# Fine-tuning has a small learning rate: here it falls from 1e-4 to zero. More and more
# updates are too small for a float16 parameter, and are rounded away. A loss scale does
# not help, because it protects gradients only.

# %%
adam = optax.adam(optax.cosine_decay_schedule(1e-4, STEPS))


def fine_tune(nets, optimizer, steps):
    """Returns the test losses on the way, by seed, and the accuracies in the end."""
    curves, rights = [], []
    for seed, start in enumerate(nets):
        net = nnx.clone(start)
        state = nnx.Optimizer(net, optimizer, wrt=nnx.Param)
        xs, ys = batches(100 + seed, turned, STEPS)
        curve = [evaluate(net, turned)[0]]
        for i in range(0, STEPS, EVERY):
            steps((net, state), xs[i : i + EVERY], ys[i : i + EVERY])
            curve.append(evaluate(net, turned)[0])
        curves.append(curve)
        rights.append(evaluate(net, turned)[1])
        jax.block_until_ready(nnx.state(net))
    return np.array(curves), np.array(rights)


def show(name, curves, rights):
    end = f"loss {np.median(curves[:, -1]):.3f}, right {np.median(rights):.1%}"
    print(f"{name:33} {end}")


runs = {
    "float32": fine_tune(pretrained, adam, float32_steps),
    "float16, loss_scaling": fine_tune(small, jmp.loss_scaling(adam), float16_steps),
}
for name, run in runs.items():
    show(name, *run)

# %% [markdown]
# ## What works
#
# `master_weights` keeps a float32 copy of each parameter in the optimizer state. The
# model has float16 parameters, and small updates add up in the copy.

# %%
with_masters = jmp.loss_scaling(jmp.master_weights(adam))
name = "float16, ... and master_weights"
runs[name] = fine_tune(small, with_masters, float16_steps)
show(name, *runs[name])

fig, ax = plt.subplots(figsize=(10, 3.8), layout="constrained")
at = np.arange(0, STEPS + 1, EVERY)
styles = [{"color": "0.7", "lw": 4}, {"ls": ":"}, {"ls": "--"}]
for (name, (curves, _)), style in zip(runs.items(), styles, strict=True):
    (line,) = ax.plot(at, np.median(curves, 0), label=name, **style)
    low, high = curves.min(0), curves.max(0)
    ax.fill_between(at, low, high, color=line.get_color(), alpha=0.15, lw=0)
ax.set(
    title="Fine-tuning on turned digits: median and range of five seeds",
    xlabel="step of fine-tuning",
    ylabel="loss on turned test digits",
)
ax.legend()
plt.show()
reached = {name: np.median(curves[:, -1]) for name, (curves, _) in runs.items()}
exact, plain, masters = reached.values()
assert abs(masters / exact - 1) < 0.01
assert plain > 1.05 * exact

# %% [markdown]
# With masters, the loss follows that of float32.
#
# **Answer.** Yes. `jmp_lite.nnx.cast` makes the float16 model, `loss_scaling` keeps
# small gradients, and `master_weights` keeps small updates. Without `master_weights`
# the loss stops falling too early. Notebook 5 compares wrappers that need less memory.
