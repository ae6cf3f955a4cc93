# %% [markdown]
# # 9. Many devices
#
# **What changes in a training step when it runs on several devices, and what happens
# when one of them overflows?**
#
# JAX can pretend that a CPU is several devices. Here it is eight, which has to be said
# before anything runs. Nothing that follows is about CPUs.

# %%
import collections
import math
import re

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
# A small classifier of handwritten digits, and its step in float16. Nothing in it
# speaks of devices.

# %%
digits, by_chance = load_digits(), np.random.default_rng(0)
chosen = by_chance.integers(0, 1797, (30, 256))
images, labels = (digits.data / 16).astype("float32")[chosen], digits.target[chosen]
sizes = {"w1": (64, 256), "w2": (256, 256), "w3": (256, 10)}
params = {
    name: jnp.asarray(by_chance.normal(size=size) / size[0] ** 0.5, "float32")
    for name, size in sizes.items()
}


def loss_fn(params, model_state, batch, rng):
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
# With the batch split over the devices and everything else copied to all of them, `jit`
# trains data parallel. With parameters and optimizer state split too, each array along
# its first axis, it is FSDP. There is one program, whose gradients are those of the
# whole batch, and one decision to skip or not.


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
    """Returns a step, a state to start from, and the mesh."""
    places = where(mesh, jax.eval_shape(init, params))
    start = jax.device_put(init(params), places)
    return jax.jit(step, out_shardings=(places, None)), start, mesh


def run(some_step, state, mesh):
    """Trains on all batches, each of them split; returns the losses and the end."""
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
lines = ["Adam's first moments by FSDP:"]
for name, moment in moments.items():
    part = moment.addressable_shards[0].data.shape
    lines += [f"  {name} {moment.shape}, of which a device holds {part}"]
    assert part[0] == moment.shape[0] // 8
print("\n".join(lines))

# %% [markdown]
# ## By `shard_map`, with `axis_name`
#
# Here each device runs the step on its part of the batch. `axis_name` averages over the
# devices what has to be averaged, in float32, and has all of them skip together.

# %%
_, step_of_a_part = jmp.build_train_step(loss_fn, optimizer, rules, axis_name="data")
mapped = jax.shard_map(
    step_of_a_part,
    mesh=eight,
    in_specs=(P(), P("data")),
    out_specs=(P(), P()),
)
_, start, _ = by_jit(eight, copied)
ways["data parallel, shard_map"] = jax.jit(mapped), start, eight
runs["data parallel, shard_map"] = run(*ways["data parallel, shard_map"])

# %% [markdown]
# ## The same results, within rounding
#
# What differs is the order of sums, and the precision of those over the devices. The
# last row, in float32, says how far float16 itself moves the loss: further.

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
# The compiled programs tell what the devices send to each other. By `jit` it is
# float16: parameters are gathered after they are cast, and gradients are added up in
# the precision in which products return them, as in code written by hand. By
# `axis_name` it is float32, and twice the bytes.

# %%
lines = [f"{'numbers through collectives':28}    float16    float32"]
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
# One pixel in the part of device 5 is 1e6, which float16 does not have. All devices
# skip: no copy of a parameter moves. The loss itself is not finite, which a smaller
# loss scale would not change: all copies of the scale stay.

# %%
x, y = images[0].copy(), labels[0]
x[5 * 32 + 7, 20] = 1e6
planted = jax.device_put((x, y), split(eight, (x, y)))


def copies(leaf):
    """Returns what each device holds."""
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
# In a `shard_map` of your own, give `axis_name` to `loss_scaling`, too. Gradients that
# are averaged over all devices are infinite on all of them; but where each device keeps
# a part of the parameters, and so sees a part of the gradients, it would decide for
# itself. Here device 5 alone sees an infinity:


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
# ## What a device holds
#
# Parameters and optimizer state, in bytes on one device: copied to all, it is the same
# however many there are. Split, it becomes less with each.

# %%
counts = [1, 2, 4, 8]


def bytes_on_a_device(where, n):
    mesh, state = mesh_of(n), init(params)
    placed = jax.device_put(state, where(mesh, state))
    held = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data.nbytes, placed)
    weights = sum(jax.tree.leaves(held.params))
    return weights, sum(jax.tree.leaves(held)) - weights


fig, ax = plt.subplots(figsize=(10, 3.5), layout="constrained")
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
ax.set(xlabel="devices", ylabel="kB on each device", ylim=(0, 1150))
ax.set_xticks(range(4), counts)
fig.legend(loc="outside right upper")
plt.show()
assert held["copied"][3].sum() == held["copied"][0].sum()
assert held["split"][3].sum() < held["copied"][3].sum() / 7.9

# %% [markdown]
# ## On a cluster
#
# The steps stay as they are. Each process says once that it is one of several, before
# anything else; the mesh then holds the devices of all of them, and a batch is put
# together from what each process has loaded:
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
# **Answer.** Nothing in the step changes under `jit`: the shardings of the state and of
# the batch say whether it is data parallel or FSDP. In `shard_map` the step is told the
# name of the axis. Results are those of one device within rounding, and where one
# device overflows, all skip.
