# %% [markdown]
# # 6. Flax
#
# **How is a model of linen or nnx trained in mixed precision, how does one layer get an
# exception, and can a float32 model be fine-tuned in float16?**
#
# The models are small classifiers of scikit-learn's handwritten digits.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from scipy import ndimage
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.linen
import jmp_lite.nnx

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(steps, images=train[0]):
    """Returns batches by chance, the same ones each time."""
    chosen = np.random.default_rng(0).integers(0, 1500, (steps, 64))
    return images[chosen], labels[chosen]


# %% [markdown]
# ## linen
#
# The model is written without a `dtype=`, and `autocast` goes around the loss. In
# float16 the loss wants a scale: `loss_scaling` keeps it in the optimizer's state, so
# that Flax's `TrainState` carries it, and `jmp.value_and_grad` applies it.


# %%
class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


model = Classifier()
state = TrainState.create(
    apply_fn=model.apply,
    params=jax.jit(model.init)(jax.random.key(0), train[0]),
    tx=jmp.loss_scaling(optax.adam(3e-3)),
)


@jmp.autocast(compute_dtype="float16")
def loss_fn(params, x, y):
    return cross_entropy(model.apply(params, x), y).mean()


@jax.jit
def train_step(state, x, y):
    loss_scale = jmp.get_loss_scale(state.opt_state)
    loss, grads = jmp.value_and_grad(loss_fn, loss_scale)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


losses = []
for x, y in zip(*batches(150), strict=True):
    state, loss = train_step(state, x, y)
    losses.append(float(loss))
right = jnp.mean(model.apply(state.params, test[0]).argmax(-1) == test[1])
scale, skipped = jmp.get_loss_scale(state.opt_state), state.opt_state.skipped
print(f"""\
loss {losses[0]:.2f} to {losses[-1]:.2f}, right on test: {right:.0%}
skipped: {skipped}, loss scale: {scale.loss_scale:.0f}""")
assert losses[-1] < 0.2
assert right > 0.85

# %% [markdown]
# `build_train_step` is the same step, and takes care of what else is state. The loss
# function gets batch statistics and returns the new ones; dropout gets a key for each
# step. A skipped step leaves all of it alone.


# %%
class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(64)(x))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=False)(nn.gelu(x)))


noisy = Noisy()


def noisy_loss(params, batch_stats, batch, rng):
    x, y = batch
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = noisy.apply(
        variables, x, mutable=["batch_stats"], rngs={"dropout": rng}
    )
    return cross_entropy(logits, y).mean(), (new["batch_stats"], None)


rules = jmp.get_rules("mixed", "float16")
init, step = jmp.build_train_step(noisy_loss, optax.adam(3e-3), rules)
step = jax.jit(step, donate_argnums=0)
keys = jax.random.split(jax.random.key(1), 3)
first = jax.jit(noisy.init)({"params": keys[0], "dropout": keys[1]}, train[0])
training = init(first["params"], first["batch_stats"], keys[2])
for batch in zip(*batches(150), strict=True):
    training, metrics = step(training, batch)
print(f"""\
loss {metrics["loss"]:.2f}, skipped {metrics["skipped"]}; batch statistics:
{jmp.dtype_summary(training.model_state)}""")
assert metrics["loss"] < 0.2

# %% [markdown]
# ## An exception for a layer
#
# linen puts the path of each module on the scopes of its operations, and a rule names
# them by a regular expression. Here the last layer is kept in float32, and `explain`
# tells, before anything runs, what that changes.

# %%
plain = jmp.get_rules("mixed", "float16")
exact_head = plain.scope("Dense_1", "full")
before = jmp.explain(model.apply, plain)(state.params, train[0])
after = jmp.explain(model.apply, exact_head)(state.params, train[0])


def some_rows(told):
    """Returns what runs in which precision: products, and one op of what is between."""
    rows = [row for row in told.rows if row.op in ("dot_general", "rsqrt", "tanh")]
    return "\n".join(f"{r.scope:22} {r.op:12} {r.precision}" for r in rows)


print(f"{some_rows(after)}\n\n{before.diff(after)}")
assert after.precision_of(scope="Dense_1", op="dot_general") == "float32"
assert after.precision_of(scope="Dense_0", op="dot_general") == "float16"

# %% [markdown]
# A pattern that matches nothing is not passed over in silence; linen counts from zero:

# %%
wrong = jmp.explain(model.apply, plain.scope("Dense_2", "full"))(state.params, x)
print(*wrong.unused)

# %% [markdown]
# Without `autocast`, `to_float` sets the `dtype` of one layer, of a class of layers, or
# of all that matches a pattern. The model stays the same, with the same parameters.

# %%
low = jmp_lite.linen.to_float(model, "float16", "Dense_0")
_, seen = low.apply(state.params, x, capture_intermediates=True)
outputs = {name: jax.tree.leaves(out)[0] for name, out in seen["intermediates"].items()}
print({name: str(output.dtype) for name, output in outputs.items()})
assert outputs["Dense_0"].dtype == jnp.float16

# %% [markdown]
# ## nnx
#
# An nnx module is an object that changes. `jmp_lite.nnx.autocast` writes the changes
# back, such as the statistics of a batch norm, and `jmp_lite.nnx.value_and_grad` is
# nnx's own with a loss scale. `nnx.Optimizer` takes the same optimizer as before.


# %%
class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.norm(self.hidden(x))))


@nnx.jit
def float16_step(net, optimizer, x, y):
    @jmp_lite.nnx.autocast(compute_dtype="float16")
    def loss_fn(net):
        return cross_entropy(net(x), y).mean()

    loss_scale = jmp.get_loss_scale(optimizer.opt_state)
    loss, grads = jmp_lite.nnx.value_and_grad(loss_fn, loss_scale)(net)
    optimizer.update(net, grads)
    return loss


net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, jmp.loss_scaling(optax.adam(3e-3)), wrt=nnx.Param)
losses = [
    float(float16_step(net, optimizer, x, y))
    for x, y in zip(*batches(150), strict=True)
]
mean = np.asarray(net.norm.mean[...])
print(f"""\
loss {losses[0]:.2f} to {losses[-1]:.2f}
means of the batch norm: {mean[:3].round(2)}, ..., {mean.dtype}""")
assert losses[-1] < 0.2
assert np.abs(mean).max() > 0.1  # They started at 0.

# %% [markdown]
# Paths of modules are scopes here too, so a rule may name `head`:

# %%
told = jmp_lite.nnx.explain(net, plain.scope("head", "full"))(x)
print(some_rows(told))
assert told.precision_of(scope="head") == "float32"

# %% [markdown]
# ## Fine-tuning a float32 model in float16
#
# First a model is trained in float32. Then the task changes a little: the digits are
# turned by 20 degrees. Many steps are one `nnx.scan`, which autocast goes through like
# any other code.

# %%
turned = ndimage.rotate(images.reshape(-1, 8, 8), 20, (1, 2), reshape=False, order=1)
turned = turned.reshape(-1, 64)


@nnx.jit
def float32_step(net, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda net: cross_entropy(net(x), y).mean())(net)
    optimizer.update(net, grads)
    return loss


def many(step):
    """Returns a step that takes many batches, one after the other."""

    @nnx.jit
    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
    def steps(carry, x, y):
        return carry, step(*carry, x, y)

    return steps


@nnx.jit
def in_eval_mode(net, x):
    logits = net(x)
    return cross_entropy(logits, test[1]).mean(), jnp.mean(logits.argmax(-1) == test[1])


def evaluate(net, images):
    net.eval()
    loss, right = in_eval_mode(net, images[1500:])
    net.train()
    return float(loss), float(right)


float32_steps, float16_steps = many(float32_step), many(float16_step)
pretrained = Net(nnx.Rngs(1))
optimizer = nnx.Optimizer(pretrained, optax.adam(3e-3), wrt=nnx.Param)
float32_steps((pretrained, optimizer), *batches(100))
on_upright, on_turned = (evaluate(pretrained, x)[1] for x in (images, turned))
print(f"right on upright digits: {on_upright:.0%}, on turned ones: {on_turned:.0%}")
assert on_upright > 0.85 > 0.65 > on_turned

# %% [markdown]
# `jmp_lite.nnx.cast` makes a model with float16 parameters of it. The norm stays in
# float32, its statistics and its parameters.

# %%
small = jmp_lite.nnx.cast(pretrained, "float16")
print(jmp_lite.nnx.dtype_summary(small))
assert small.norm.scale.dtype == small.norm.mean.dtype == jnp.float32

# %% [markdown]
# Three ways to go on, with a learning rate as small as fine-tuning has it: in float32;
# in float16 with a loss scale and float32 masters; and in float16 with a loss scale
# alone, where updates that are small beside a parameter are rounded away.

# %%
STEPS = 800
adam = optax.adam(optax.cosine_decay_schedule(1e-4, STEPS))
ways = {
    "float32": (pretrained, adam, float32_steps),
    "float16, loss_scaling and master_weights": (
        small,
        jmp.loss_scaling(jmp.master_weights(adam)),
        float16_steps,
    ),
    "float16, loss_scaling alone": (small, jmp.loss_scaling(adam), float16_steps),
}
xs, ys = batches(STEPS, turned)
styles = [{"color": "0.7", "lw": 4}, {"ls": "--"}, {"ls": ":"}]
reached, lines = [], []
fig, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
for (name, (start, optimizer, steps)), style in zip(ways.items(), styles, strict=True):
    tuned = nnx.clone(start)
    optimizer = nnx.Optimizer(tuned, optimizer, wrt=nnx.Param)
    curve = [evaluate(tuned, turned)[0]]
    for i in range(0, STEPS, 100):
        steps((tuned, optimizer), xs[i : i + 100], ys[i : i + 100])
        curve.append(evaluate(tuned, turned)[0])
    ax.plot(range(0, STEPS + 1, 100), curve, label=name, **style)
    loss, right = evaluate(tuned, turned)
    dtype = tuned.hidden.kernel.dtype
    lines += [f"{name:40}  {dtype!s:8}  loss {loss:.3f}, right {right:.1%}"]
    reached.append(loss)
ax.set(xlabel="steps of fine-tuning", ylabel="loss on turned test digits")
ax.legend()
plt.show()
print("\n".join(lines))
assert abs(reached[1] / reached[0] - 1) < 0.01
assert reached[2] > 1.05 * reached[0]

# %% [markdown]
# **Answer.** Leave the model as it is and put `autocast` around the loss; for float16
# put `loss_scaling` around the optimizer. linen's `TrainState` and `nnx.Optimizer`
# carry the scale, and `build_train_step` also takes care of batch statistics and keys.
# A layer gets an exception by its path: a rule, or `to_float` where there is no
# autocast. A float32 model is cast by `jmp_lite.nnx.cast` and goes on in float16 as it
# would in float32, if `master_weights` keeps what is rounded away.
