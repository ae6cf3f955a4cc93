# %% [markdown]
# # 7. Flax nnx
#
# **How does an nnx module keep its state correct in mixed precision?**
#
# An nnx module is an object that changes: a batch norm updates its running statistics
# when it is called. The model is a small classifier of scikit-learn's handwritten
# digits. It trains in float16.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.nnx

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
STEPS, BAD, EVERY = 150, 75, 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(bad=None):
    """Returns random batches, the same ones at each call, of which one may be bad."""
    chosen = np.random.default_rng(0).integers(0, 1500, (STEPS, 64))
    xs, ys = train[0][chosen], train[1][chosen]
    if bad is not None:
        xs[bad, 5, 20] = 1e6
    return list(zip(xs, ys, strict=True))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.norm(self.hidden(x))))


def new_optimizer(net):
    return nnx.Optimizer(net, jmp.loss_scaling(optax.adam(3e-3)), wrt=nnx.Param)


# %% [markdown]
# ## Changes to the module
#
# **What goes wrong.** `jmp.autocast` traces a function of arrays. A module that changes
# inside of it would lose its changes, so `jmp.autocast` refuses it:

# %%
net = Net(nnx.Rngs(0))
try:
    jmp.autocast(lambda net, x: net(x))(net, train[0])
except TypeError as error:
    print(error)

# %% [markdown]
# **What works.** `jmp_lite.nnx.autocast` writes all changes back to the module.
# `jmp_lite.nnx.value_and_grad` is `nnx.value_and_grad` with a loss scale.
# `nnx.Optimizer` takes an optimizer with `loss_scaling`, whose state holds the scale.


# %%
@nnx.jit
def train_step(net, optimizer, x, y):
    @jmp_lite.nnx.autocast(compute_dtype="float16")
    def loss_fn(net):
        return cross_entropy(net(x), y).mean()

    loss_scale = jmp.get_loss_scale(optimizer.opt_state)
    loss, grads = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=loss_scale)(net)
    optimizer.update(net, grads)
    return loss


@nnx.jit
def accuracy(net, x, y):
    return jnp.mean(net(x).argmax(-1) == y)


def right_on_test(net):
    net.eval()  # The batch norm uses its running statistics.
    right = float(accuracy(net, *test))
    net.train()
    return right


def train_net(step, batches):
    """Trains a module; returns it, its optimizer, the losses, and test accuracies."""
    net = Net(nnx.Rngs(0))
    optimizer, losses, rights = new_optimizer(net), [], []
    for i, (x, y) in enumerate(batches):
        losses.append(float(step(net, optimizer, x, y)))
        if i % EVERY == 0:
            rights.append(right_on_test(net))
    return net, optimizer, losses, rights


def report(net, optimizer, rights):
    mean = np.asarray(net.norm.mean[...])
    skipped = optimizer.opt_state.skipped[...]
    print(f"right on test: {rights[-1]:.0%}, steps skipped: {skipped}")
    print(f"running means: {mean[:3].round(2)}, ..., {mean.dtype}")


net, optimizer, losses, good_rights = train_net(train_step, batches())
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
report(net, optimizer, good_rights)
assert losses[-1] < 0.2
assert good_rights[-1] > 0.85
assert np.abs(np.asarray(net.norm.mean[...])).max() > 0.1  # They started at 0.

# %% [markdown]
# ## A skipped step
#
# **What goes wrong.** One batch in the middle has a pixel of 1e6, which is infinite in
# float16. The optimizer skips the step, and the parameters stay as they were. But the
# batch norm has already seen the batch:

# %%
net, optimizer, losses, wrong_rights = train_net(train_step, batches(BAD))
print(f"loss of the last step: {losses[-1]:.2f}")
report(net, optimizer, wrong_rights)
assert losses[-1] < 0.2
assert jmp.all_finite(nnx.state(net, nnx.Param))
assert wrong_rights[-1] < 0.5

# %% [markdown]
# The running statistics are infinite, and stay so. The parameters are finite, and the
# training loss does not show the fault: in training, a batch norm uses the statistics
# of the batch.
#
# **What works.** If the optimizer skips the step, `restore_if_skipped` restores the
# running statistics:


# %%
@nnx.jit
def safe_step(net, optimizer, x, y):
    @jmp_lite.nnx.autocast(compute_dtype="float16")
    def loss_fn(net):
        return cross_entropy(net(x), y).mean()

    loss_scale = jmp.get_loss_scale(optimizer.opt_state)
    with jmp_lite.nnx.restore_if_skipped(net, optimizer):
        loss, grads = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale=loss_scale)(net)
        optimizer.update(net, grads)
    return loss


net, optimizer, losses, right_rights = train_net(safe_step, batches(BAD))
report(net, optimizer, right_rights)
before = np.asarray(net.norm.mean[...])
safe_step(net, optimizer, *batches(BAD)[BAD])
assert (before == np.asarray(net.norm.mean[...])).all()
assert right_rights[-1] > 0.85

# %%
fig, ax = plt.subplots(figsize=(10, 3.6), layout="constrained")
at = np.arange(1, STEPS + 1, EVERY)
for name, rights, style in (
    ("no bad batch", good_rights, {"color": "0.7", "lw": 4}),
    ("restore_if_skipped", right_rights, {"color": "C0", "ls": "--"}),
    ("skipped step alone", wrong_rights, {"color": "C3"}),
):
    ax.plot(at, 100 * np.array(rights), label=name, **style)
ax.axvline(BAD + 1, color="k", lw=1, ls=":")
ax.annotate(" bad batch", (BAD + 1, 40))
ax.set(
    title="A bad batch and the running statistics of a batch norm",
    xlabel="step",
    ylabel="right on test digits, %",
    xlim=(0, STEPS),
    ylim=(0, 100),
)
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# bfloat16 does not need a loss scale. There `jmp.skip_nonfinite` around the optimizer
# skips such steps, and `restore_if_skipped` works with it too.
#
# ## Rules by module path
#
# `jmp_lite.nnx.autocast` puts the paths of modules on the scopes of their operations.
# So a rule names a layer as it does for linen (notebook 6):

# %%
rules = jmp.get_rules("mixed", "float16").scope("head", "full")
explained = jmp_lite.nnx.explain(net, rules)(test[0])
for row in explained.rows:
    if row.op in ("dot_general", "rsqrt", "tanh"):
        print(f"{row.scope:22} {row.op:12} {row.precision}")
assert explained.dtype_of(scope="head", op="dot_general") == "float32"

# %% [markdown]
# **Answer.** `jmp_lite.nnx.autocast` writes the changes of a module back, in float32.
# `jmp_lite.nnx.restore_if_skipped` undoes them when the optimizer skips a step. Without
# it, one bad batch stays in the running statistics for ever.
