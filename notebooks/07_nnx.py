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
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.nnx

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(steps):
    """Returns random batches, the same ones at each call."""
    chosen = np.random.default_rng(0).integers(0, 1500, (steps, 64))
    return zip(train[0][chosen], train[1][chosen], strict=True)


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


def train_net(step):
    """Returns a trained module, its optimizer, and the losses."""
    net = Net(nnx.Rngs(0))
    optimizer = new_optimizer(net)
    losses = [float(step(net, optimizer, x, y)) for x, y in batches(150)]
    return net, optimizer, losses


@nnx.jit
def accuracy(net, x, y):
    return jnp.mean(net(x).argmax(-1) == y)


def report(net, optimizer):
    net.eval()  # The batch norm uses its running statistics.
    right = float(accuracy(net, *test))
    net.train()
    mean = np.asarray(net.norm.mean[...])
    skipped = optimizer.opt_state.skipped[...]
    print(f"right on test: {right:.0%}, steps skipped: {skipped}")
    print(f"running means: {mean[:3].round(2)}, ..., {mean.dtype}")
    return right


net, optimizer, losses = train_net(train_step)
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
right = report(net, optimizer)
assert losses[-1] < 0.2
assert right > 0.85
assert np.abs(np.asarray(net.norm.mean[...])).max() > 0.1  # They started at 0.

# %% [markdown]
# ## A skipped step
#
# **What goes wrong.** One batch has a pixel of 1e6, which is infinite in float16. The
# optimizer skips the step, and the parameters stay as they were. But the batch norm has
# already seen the batch:

# %%
x, y = (array.copy() for array in next(batches(1)))
x[5, 20] = 1e6
train_step(net, optimizer, x, y)
right = report(net, optimizer)
assert jmp.all_finite(nnx.state(net, nnx.Param))
assert right < 0.5

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


net, optimizer, _ = train_net(safe_step)
before = np.asarray(net.norm.mean[...])
safe_step(net, optimizer, x, y)
right = report(net, optimizer)
assert (before == np.asarray(net.norm.mean[...])).all()
assert right > 0.85

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
