# %% [markdown]
# # 9. Many devices
#
# **What changes in a training step when it runs on several devices?**
#
# JAX can treat a CPU as several devices. This notebook uses eight. The number has to be
# set before JAX runs anything. Nothing else in it is specific to CPUs.

# %%
import collections
import math
import re
import warnings

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jmp_lite as jmp

jax.config.update("jax_platforms", "cpu")  # Where there is a GPU, too.
jax.config.update("jax_num_cpu_devices", 8)
print(jax.device_count(), "devices")

# %% [markdown]
# This is a small classifier of handwritten digits, and its step in float16. The code
# does not mention devices.

# %%
digits, rng = load_digits(), np.random.default_rng(0)
chosen = rng.integers(0, 1797, (30, 256))
images, labels = (digits.data / 16).astype("float32")[chosen], digits.target[chosen]
sizes = {"w1": (64, 256), "w2": (256, 256), "w3": (256, 10)}
params = {
    name: jnp.asarray(rng.normal(size=size) / size[0] ** 0.5, "float32")
    for name, size in sizes.items()
}


def loss_fn(params, model_state, batch, key):
    x, y = batch
    h = jax.nn.relu(x @ params["w1"])
    h = jax.nn.relu(h @ params["w2"])
    losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["w3"], y)
    return losses.mean(), (model_state, None)


rules = jmp.get_rules("mixed", "float16")
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
init, step = jmp.build_train_step(loss_fn, optimizer, rules)
init = jax.jit(init)

# %% [markdown]
# ## Under `jit`, shardings decide
#
# - **Data parallel:** the batch is split over the devices, and everything else is
#   copied to each of them.
# - **FSDP:** parameters and optimizer state are split too, each array along its first
#   axis.
#
# In both cases `jit` makes one program. Its gradients are those of the whole batch, and
# it decides once whether to skip.


# %%
def mesh_of(n):
    auto = (AxisType.Auto,)
    return jax.make_mesh((n,), ("data",), axis_types=auto, devices=jax.devices()[:n])


def copied(mesh, tree):
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P()), tree)


def split(mesh, tree):
    def rows(leaf):
        is_even = jnp.ndim(leaf) > 0 and leaf.shape[0] % mesh.size == 0
        return NamedSharding(mesh, P("data") if is_even else P())

    return jax.tree.map(rows, tree)


def by_jit(mesh, where, step=step):
    """Returns a jit-compiled step, a first state, and the mesh."""
    places = where(mesh, jax.eval_shape(init, params))
    start = jax.device_put(init(params), places)
    return jax.jit(step, out_shardings=(places, None)), start, mesh


def run(some_step, state, mesh):
    """Trains on all batches; returns the losses and the last state."""
    losses = []
    for batch in zip(images, labels, strict=True):
        batch = jax.device_put(batch, split(mesh, batch))
        state, metrics = some_step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


eight = mesh_of(8)
ways = {
    "one device": by_jit(mesh_of(1), copied),
    "data parallel, jit": by_jit(eight, copied),
    "FSDP, jit": by_jit(eight, split),
}
runs = {name: run(*way) for name, way in ways.items()}
moments = runs["FSDP, jit"][1].opt_state.inner_state[1][0].mu
lines = ["Adam's first moments under FSDP:"]
for name, moment in moments.items():
    part = moment.addressable_shards[0].data.shape
    lines += [f"  {name} {moment.shape}, on each device {part}"]
    assert part[0] == moment.shape[0] // 8
print("\n".join(lines))

# %% [markdown]
# ## In `shard_map`, `axis_name` decides
#
# Inside of `shard_map` each device runs the step on its part of the batch.
#
# **What goes wrong.** With the same step, each device would compute gradients of its
# own part, and the copies of the parameters would drift apart. The library warns, and
# JAX refuses the program:

# %%
specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
_, start, _ = by_jit(eight, copied)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    try:
        run(jax.jit(jax.shard_map(step, mesh=eight, **specs)), start, eight)
    except ValueError as error:
        print(seen[0].message, *str(error).split("\n\n")[:3], sep="\n")

# %% [markdown]
# **What works.** With `axis_name` the step averages over the devices, in float32:
# gradients, loss and model state. If one device has to skip, all of them skip.

# %%
_, step_of_a_part = jmp.build_train_step(loss_fn, optimizer, rules, axis_name="data")
mapped = jax.jit(jax.shard_map(step_of_a_part, mesh=eight, **specs))
ways["data parallel, shard_map"] = mapped, start, eight
runs["data parallel, shard_map"] = run(*ways["data parallel, shard_map"])

# %% [markdown]
# ## The same results, within rounding
#
# The trainings differ in the order of sums, and in the precision of sums over devices.
# For comparison, the last row trains in float32. The difference between float16 and
# float32 is larger than that between one device and eight.

# %%
_, exact_step = jmp.build_train_step(
    loss_fn, optimizer, "O0", loss_scale=jmp.DynamicLossScale()
)
runs["float32, one device"] = run(*by_jit(mesh_of(1), copied, exact_step))
reference = runs["one device"][0]
apart = {name: np.abs(run[0] - reference).max() for name, run in runs.items()}
lines = [f"{'':26} first loss   last loss  largest difference"]
lines += [
    f"{name:26}{losses[0]:11.4f}{losses[-1]:12.4f}{apart[name]:20.1e}"
    for name, (losses, _) in runs.items()
]
print("\n".join(lines))
assert apart["float32, one device"] == max(apart.values()) < 2e-3

# %% [markdown]
# The compiled programs show what the devices send to each other. Under `jit` it is
# float16: XLA gathers parameters after the cast, and adds gradients in the precision of
# the products, as in code written by hand. With `axis_name` it is float32, and twice
# the bytes.

# %%
lines = [f"{'numbers sent by collectives':28}    float16    float32"]
for name, (some_step, start, mesh) in list(ways.items())[1:]:
    batch = jax.device_put((images[0], labels[0]), split(mesh, (images[0], labels[0])))
    sent = collections.Counter()
    for line in some_step.lower(start, batch).compile().as_text().splitlines():
        if found := re.search(r" = (.*) all-(reduce|gather)\(", line):
            for dtype, shape in re.findall(r"(f\d+)\[([\d,]*)\]", found[1]):
                sent[dtype] += math.prod(int(n) for n in shape.split(",") if n)
    lines += [f"{name:28}{sent['f16']:11,}{sent['f32']:11,}"]
print("\n".join(lines))

# %% [markdown]
# ## One device overflows
#
# One pixel in the part of device 5 is 1e6, which is infinite in float16. All devices
# skip: no copy of a parameter changes. The loss itself is not finite, and a smaller
# loss scale would not change that. So all copies of the scale keep their value.

# %%
x, y = images[0].copy(), labels[0]
x[5 * 32 + 7, 20] = 1e6
planted = jax.device_put((x, y), split(eight, (x, y)))


def copies(leaf):
    """Returns the copy on each device."""
    return np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])


lines = ["                            the loss scale on each device"]
for name, (some_step, start, _) in list(ways.items())[1:]:
    state, metrics = some_step(start, planted)
    before, after = (jax.tree.map(copies, each.params) for each in (start, state))
    assert all((before[k] == after[k]).all() for k in params)
    assert not metrics["grads_finite"]
    scales = copies(state.opt_state.loss_scale.loss_scale)
    assert (scales == 2**15).all()
    lines += [f"{name:26}{scales}"]
print("\n".join(lines))

# %% [markdown]
# ## A step of your own in `shard_map`
#
# `loss_scaling` takes `axis_name` too. If each device holds a part of the parameters,
# each sees a part of the gradients. Here device 5 alone sees an infinity. Without
# `axis_name` it skips alone, and the devices no longer agree on the step. With
# `axis_name` they all skip:


# %%
def skipped_by_device(axis_name):
    of_a_part = jmp.loss_scaling(optax.sgd(0.1), axis_name=axis_name)

    def update(grads, w):
        _, state = of_a_part.update(grads, of_a_part.init(w), w)
        return state.skipped[None]

    both = {"in_specs": P("data"), "out_specs": P("data")}
    w = jnp.ones(64)
    return jax.jit(jax.shard_map(update, mesh=eight, **both))(w.at[41].set(jnp.inf), w)


alone, together = skipped_by_device(None), skipped_by_device("data")
print(f"""\
steps skipped by each device
without axis_name: {alone}
with axis_name:    {together}""")
assert alone.sum() == 1
assert together.sum() == 8

# %% [markdown]
# ## Memory on a device
#
# The picture shows the bytes of parameters and optimizer state on one device. If they
# are split, each device holds fewer bytes the more devices there are.

# %%
counts = [1, 2, 4, 8]


def bytes_on_a_device(where, n):
    mesh, state = mesh_of(n), init(params)
    placed = jax.device_put(state, where(mesh, state))
    held = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data.nbytes, placed)
    weights = sum(jax.tree.leaves(held.params))
    return weights, sum(jax.tree.leaves(held)) - weights


fig, ax = plt.subplots(figsize=(10, 3.8), layout="constrained")
held = {}
for name, where, shift, hatch in (
    ("copied", copied, -0.2, ""),
    ("split", split, 0.2, "//"),
):
    held[name] = np.array([bytes_on_a_device(where, n) for n in counts]) / 1e3
    weights, rest = held[name].T
    at, style = np.arange(4) + shift, {"width": 0.38, "ec": "black", "hatch": hatch}
    ax.bar(at, rest, bottom=weights, color="w", label=f"optimizer, {name}", **style)
    ax.bar(at, weights, color="0.6", label=f"parameters, {name}", **style)
    for x, total in zip(at, weights + rest, strict=True):
        ax.annotate(f"{total:.0f}", (x, total + 10), ha="center")
ax.set(
    title="Parameters and optimizer state on each device",
    xlabel="number of devices",
    ylabel="kB on each device",
    ylim=(0, 1150),
)
ax.set_xticks(range(4), counts)
fig.legend(loc="outside right upper")
plt.show()
assert held["copied"][3].sum() == held["copied"][0].sum()
assert held["split"][3].sum() < held["copied"][3].sum() / 7.9

# %% [markdown]
# ## On a cluster
#
# The steps stay as they are. Each process first calls `jax.distributed.initialize()`.
# The mesh then contains the devices of all processes. Each process loads a part of the
# batch:
#
# ```python
# jax.distributed.initialize()
# mesh = jax.make_mesh(
#     (jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)
# )
# batch = jax.make_array_from_process_local_data(
#     NamedSharding(mesh, P("data")), local_batch
# )
# ```
#
# **Answer.** Under `jit` nothing changes in the step. The shardings of the state and of
# the batch select data parallel or FSDP. In `shard_map` the step needs the name of the
# axis. The results are those of one device within rounding. If one device overflows,
# all devices skip the step.
