# %% [markdown]
# # 6. Flax linen
#
# **How does one layer of a linen model get a precision of its own?**
#
# The model is a small classifier of scikit-learn's handwritten digits. It trains in
# float16. Its last layer, which computes the logits, is to stay in float32.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jmp_lite as jmp
import jmp_lite.linen

digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target
train, test = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def batches(steps):
    """Returns random batches, the same ones at each call."""
    chosen = np.random.default_rng(0).integers(0, 1500, (steps, 64))
    return zip(train[0][chosen], train[1][chosen], strict=True)


class Classifier(nn.Module):
    head_dtype: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(10, dtype=self.head_dtype)(x)


model = Classifier()
variables = jax.jit(model.init)(jax.random.key(0), train[0])

# %% [markdown]
# ## What goes wrong
#
# A linen layer has an argument `dtype`. With `dtype="float32"` you would expect the
# last layer to run in float32. Under autocast the argument has no effect: autocast
# traces the model in float32, where a cast to float32 leaves no trace.


# %%
def some_rows(explained):
    """Returns some rows: the products, and an operation of each layer in between."""
    chosen = ("dot_general", "rsqrt", "tanh")
    rows = [row for row in explained.rows if row.op in chosen]
    return "\n".join(f"{r.scope:22} {r.op:12} {r.precision}" for r in rows)


rules = jmp.get_rules("mixed", "float16")
by_argument = jmp.explain(Classifier("float32").apply, rules)(variables, train[0])
print(some_rows(by_argument))
assert by_argument.dtype_of(scope="Dense_1", op="dot_general") == "float16"

# %% [markdown]
# ## A rule for a layer
#
# linen puts the path of each module on the scopes of its operations, such as
# `Classifier/Dense_1`. A rule names a path by a regular expression. `explain` shows
# what the rule changes before anything runs.

# %%
exact_head = rules.scope("Dense_1", "full")
before = jmp.explain(model.apply, rules)(variables, train[0])
after = jmp.explain(model.apply, exact_head)(variables, train[0])
print(f"{some_rows(after)}\n\n{before.diff(after)}")
assert after.dtype_of(scope="Dense_1", op="dot_general") == "float32"
assert after.dtype_of(scope="Dense_0", op="dot_general") == "float16"

# %% [markdown]
# Only that product changes. The norm and the gelu are float32 inside in both cases.
#
# `explain` reports a pattern that matches nothing. linen counts from zero:

# %%
unused = jmp.explain(model.apply, rules.scope("Dense_2", "full"))(variables, train[0])
print(*unused.unused)

# %% [markdown]
# The picture shows the error that each layer adds: how far its result is from one that
# is computed in float64 from the same input.


# %%
def errors(model, rules):
    """Returns the relative error that each dense layer adds."""

    @jmp.autocast(rules=rules)
    def run(variables, x):
        seen = {}

        def record(next_fun, args, kwargs, context):
            result = next_fun(*args, **kwargs)
            if isinstance(context.module, nn.Dense):
                seen[context.module.name] = *args, result
            return result

        with nn.intercept_methods(record):
            model.apply(variables, x)
        return seen

    found = []
    for name, (x, result) in jax.jit(run)(variables, train[0]).items():
        layer = variables["params"][name]
        exact = np.float64(x) @ np.float64(layer["kernel"]) + layer["bias"]
        found.append(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    return found


ways = {
    "nothing: all float16": errors(model, rules),
    'dtype="float32"': errors(Classifier("float32"), rules),
    'rules.scope("Dense_1", "full")': errors(model, exact_head),
}
fig, ax = plt.subplots(figsize=(10, 3), layout="constrained")
for i, (name, found) in enumerate(ways.items()):
    ax.barh(np.arange(2) + 0.25 * (i - 1), found, 0.25, color=f"C{i}", label=name)
ax.invert_yaxis()
ax.set_yticks([0, 1], ["Dense_0", "Dense_1"])
ax.set(
    title="Error that each layer adds",
    xlabel="relative error",
    ylabel="layer",
    xscale="log",
    xlim=(1e-8, 1),
)
ax.legend(title="Dense_1 is to be float32 by", loc="center right")
plt.show()
low, by_argument, by_rule = ways.values()
assert by_argument == low
assert by_rule[0] == low[0]
assert by_rule[1] < 1e-6 < 1e-4 < low[1]

# %% [markdown]
# ## Training with the rule
#
# `autocast` goes around the loss. In float16 a loss scale is needed. `loss_scaling`
# keeps it in the optimizer state, so Flax's `TrainState` carries it.


# %%
@jmp.autocast(rules=exact_head)
def loss_fn(params, x, y):
    return cross_entropy(model.apply(params, x), y).mean()


@jax.jit
def train_step(state, x, y):
    loss_scale = jmp.get_loss_scale(state.opt_state)
    loss, grads = jmp.value_and_grad(loss_fn, loss_scale=loss_scale)(state.params, x, y)
    return state.apply_gradients(grads=grads), loss


state = TrainState.create(
    apply_fn=model.apply, params=variables, tx=jmp.loss_scaling(optax.adam(3e-3))
)
losses = []
for x, y in batches(150):
    state, loss = train_step(state, x, y)
    losses.append(float(loss))
right = jnp.mean(model.apply(state.params, test[0]).argmax(-1) == test[1])
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}, right on test: {right:.0%}")
print(f"steps skipped: {state.opt_state.skipped}")
assert losses[-1] < 0.2
assert right > 0.85

# %% [markdown]
# ## Batch statistics and dropout
#
# `build_train_step` makes the same step from a loss function and rules. It also takes
# care of other state. The loss function receives the batch statistics and returns new
# ones. Dropout receives a key for each step. A skipped step changes none of them.


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


init, step = jmp.build_train_step(noisy_loss, optax.adam(3e-3), exact_head)
step = jax.jit(step, donate_argnums=0)
keys = jax.random.split(jax.random.key(1), 3)
first = jax.jit(noisy.init)({"params": keys[0], "dropout": keys[1]}, train[0])
training = init(first["params"], first["batch_stats"], keys[2])
for batch in batches(150):
    training, metrics = step(training, batch)
print(f"""\
loss {metrics["loss"]:.2f}, skipped {metrics["skipped"]}; batch statistics:
{jmp.dtype_summary(training.model_state)}""")
assert metrics["loss"] < 0.2

# %% [markdown]
# ## Without autocast
#
# Without `autocast`, the argument `dtype` works as linen documents it. `to_float` sets
# it from outside, for one layer, for a class of layers, or for all paths that match a
# pattern. The model keeps its parameters. Here one layer alone runs in float16:

# %%
low = jmp_lite.linen.to_float(model, "float16", "Dense_0")
_, seen = low.apply(state.params, train[0], capture_intermediates=True)
for name, out in seen["intermediates"].items():
    print(f"{name:12}", jax.tree.leaves(out)[0].dtype)
assert jax.tree.leaves(seen["intermediates"]["Dense_0"])[0].dtype == jnp.float16

# %% [markdown]
# **Answer.** By a rule for its path: `rules.scope("Dense_1", "full")`. The rules go to
# `autocast` or to `build_train_step`, and `explain` shows their effect. The argument
# `dtype="float32"` of a layer has no effect under autocast. Without autocast `dtype`
# works, and `to_float` sets it.
