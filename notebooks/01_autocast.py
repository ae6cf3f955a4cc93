# %% [markdown]
# # 1. Autocast
#
# **What does one line, `autocast`, do to a transformer?**
#
# Here is a small one, in plain JAX and in float32: an embedding, two blocks of
# attention and MLP, each behind a norm, and a loss. It names its parts by
# `jax.named_scope`. It knows nothing of precision, and will not have to.

# %%
import functools
import linecache
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jmp_lite as jmp

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 96, 64, 4, 32, 8


def layer_norm(p, x):
    with jax.named_scope("LayerNorm"):
        centered = x - x.mean(-1, keepdims=True)
        variance = (centered**2).mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(variance + 1e-6) * p["scale"]


def attention(p, x):
    with jax.named_scope("attention"):
        heads = (x @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1)
        q, k, v = jnp.split(heads, 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        scores = scores / (WIDTH // HEADS) ** 0.5
        is_past = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        scores = jnp.where(is_past, scores, -jnp.inf)
        weights = jax.nn.softmax(scores)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return mixed.reshape(x.shape) @ p["out"]


def mlp(p, x):
    with jax.named_scope("mlp"):
        h = x @ p["up"]
        h = h + p["up_bias"]
        h = jax.nn.gelu(h)
        return h @ p["down"]


def block(p, x):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x))


def layers(blocks, x, block):
    for i, p in enumerate(blocks):
        with jax.named_scope(f"block_{i}"):
            x = block(p, x)
    return x


def loss_fn(params, tokens, block=block, layers=layers):
    with jax.named_scope("embedding"):
        x = params["embedding"][tokens[:, :-1]] + params["positions"]
    x = layers(params["blocks"], x, block)
    with jax.named_scope("head"):
        logits = layer_norm(params["norm"], x) @ params["head"]
    with jax.named_scope("loss"):
        likely = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(likely, tokens[:, 1:, None], -1).mean()


# %%
generator = np.random.default_rng(0)


def normal(*shape):
    values = generator.standard_normal(shape) / shape[0] ** 0.5
    return jnp.asarray(values, jnp.float32)


def new_block():
    return {
        "norm_1": {"scale": jnp.ones(WIDTH)},
        "attention": {"qkv": normal(WIDTH, 3 * WIDTH), "out": normal(WIDTH, WIDTH)},
        "norm_2": {"scale": jnp.ones(WIDTH)},
        "mlp": {
            "up": normal(WIDTH, 4 * WIDTH),
            "up_bias": jnp.zeros(4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        },
    }


params = {
    "embedding": 10 * normal(VOCABULARY, WIDTH),
    "positions": normal(LENGTH, WIDTH),
    "blocks": [new_block(), new_block()],
    "norm": {"scale": jnp.ones(WIDTH)},
    "head": normal(WIDTH, VOCABULARY),
}
tokens = jnp.asarray(generator.integers(VOCABULARY, size=(BATCH, LENGTH + 1)))

# %% [markdown]
# ## One line

# %%
low_loss_fn = jmp.autocast(loss_fn)

# %% [markdown]
# It has the signature of `loss_fn`, and what it returns is float32: the loss, and the
# gradients. They differ from float32's by what bfloat16 rounds, which is a few parts in
# a thousand. (The options ask the compiler for little work, and to leave no rounding
# out. The last one is against jaxlib 0.12, which adds some products up in bfloat16 on
# CPUs: see docs/troubleshooting.md.)


# %%
def distance(tree, other):
    """The size of a difference, relative to the second one."""
    squares = lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))
    far = squares(jax.tree.map(jnp.subtract, tree, other))
    return float(jnp.sqrt(far / squares(other)))


OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_cpu_experimental_ynn_fusion_type": "",
}


@functools.cache
def loss_and_grads(fun):
    run = jax.jit(jax.value_and_grad(fun), compiler_options=OPTIONS)
    return run(params, tokens)


def errors(low_loss_fn):
    """How far the loss and the gradients are from float32's."""
    pairs = zip(loss_and_grads(low_loss_fn), loss_and_grads(loss_fn), strict=True)
    return [distance(*pair) for pair in pairs]


of_loss, of_grads = errors(low_loss_fn)
print(f"loss: relative error {of_loss:.0e}")
print(f"gradients: relative error {of_grads:.1e}")
assert of_loss < 1e-3
assert of_grads < 2e-2
dtypes = {x.dtype.name for x in jax.tree.leaves(loss_and_grads(low_loss_fn))}
assert dtypes == {"float32"}

# %% [markdown]
# ## What it has decided
#
# `explain` tells what runs in which precision, before anything runs: shapes would do
# for `params` and `tokens`. It is short where a program is long; blocks that differ in
# a number are told once.

# %%
told = jmp.explain(loss_fn)(params, tokens)
print(told)
assert told.share_low("dot_general") == 1

# %% [markdown]
# All matrix products run in bfloat16, and with them all of the work that is worth
# counting. Most of the equations still run in float32. Each of them has a reason. Here
# are all reasons that there are, how many equations have each one, and some of their
# operations.

# %%
by_reason = {}
for row in told.rows:
    by_reason.setdefault(row.code, []).append(row)
for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
    ops = ", ".join(list(dict.fromkeys(row.op for row in rows))[:4])
    print(f"{len(rows):4}  {reason:<19}{rows[0].precision:<11}{ops}")

# %% [markdown]
# This is how to read it. Each operation has a class:
#
# - `LOW`: matrix products. Their operands are cast.
# - `FULL`: sums, exponentials, logarithms. They run in float32, and what they make is
#   float32 on purpose.
# - `FOLLOW`: all other arithmetic. It follows its operands.
# - `KEEP`: what is not known, or depends on bits. It runs as it was written, and so
#   does all in which nothing is float32: here the tokens and the mask.
# - `FULL_INSIDE` is for scopes. Norm layers are such, by their name.
#
# What an operation follows is the state of its operands. `LOW`: held in 16 bits.
# `HARD`: float32 on purpose, which wins over `LOW`. `SOFT`: float32 because nobody has
# decided yet, which gives way to both. "Undecided" in the table are those that met
# nothing but parameters and numbers, which are `SOFT`.
#
# ## Line by line
#
# A row of an explanation knows the line that it comes from. This prints lines with what
# was decided of them.


# %%
def code(row):
    """The line of code that a row comes from."""
    file, _, line = row.source.rpartition(" ")[0].rpartition(":")
    return linecache.getline(file, int(line)).strip()


def show(told, scope, wanted=""):
    """Prints what was decided in a scope, below the code that it was decided of."""
    line = None
    for row in told.rows:
        if not re.search(scope, row.scope) or wanted not in code(row):
            continue
        if code(row) != line:
            line = code(row)
            print(line)
        reason = re.sub(r" at \S+$", "", row.reason)
        print(f"    {row.precision:<10} {row.op:<17} {reason}")


show(told, "block_0/mlp$")
assert told.precision_of(scope="block_0/mlp$", op="add") == "bfloat16"

# %% [markdown]
# The product is `LOW`. The bias is a float32 parameter, and with ordinary promotion the
# sum would be float32 from here on. But a parameter is `SOFT`: the sum follows the
# product, and so does all of the gelu. The stream stays in 16 bits up to the next
# product.
#
# ### The softmax

# %%
show(told, "block_0/attention", "scores")
assert told.precision_of(scope="block_0/attention$", op="exp") == "float32"
assert told.precision_of(scope="block_0/attention$", op="sub") == "float32"

# %% [markdown]
# `exp` and the sum are `FULL`. The division by the root of the width, the mask and the
# shift by the maximum are `FOLLOW`, and what they follow is a product in 16 bits. Yet
# they run in float32: all that reads them is float32 anyway, so it would do no good to
# round before. This is demand: autocast asks who reads each value before it decides. So
# the shift is exact, with no rule for softmax.
#
# The probabilities are float32 too. The product that reads them casts them:

# %%
show(told, "block_0/attention", "mixed")

# %% [markdown]
# ### The norm, and the stream
#
# A norm is float32 inside, and hands on 16 bits if 16 bits came in. It needs that: it
# subtracts a mean and adds squares up. Between the blocks, the sum that is the residual
# stream is in bfloat16.

# %%
inside = {row.precision for row in told.rows if "LayerNorm" in row.scope}
assert inside == {"float32"}
show(told, "block_0$")
show(told, "block_1$")

# %% [markdown]
# ### The loss
#
# All of it is float32, and the logits are rounded once, by the product that makes them.

# %%
show(told, "loss", "likely = ")

# %% [markdown]
# ## What widens the stream
#
# `HARD` wins. If a value that is float32 on purpose joins the stream, all that follows
# is float32, up to the next product. Somebody damps what the MLP adds where the stream
# is large already:


# %%
def with_gain(p, x):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    gain = jnp.exp(-jnp.square(x).mean(-1, keepdims=True))
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x)) * gain


gained_fn = functools.partial(loss_fn, block=with_gain)
widened = jmp.explain(gained_fn)(params, tokens)
show(widened, "block_0$")
for lint in widened.lints:
    message = re.sub(r" at \S+", "", lint.message)
    print(f"\n{lint.name}, in {lint.scope}:\n{message}.\n{lint.remedy}.")
assert [lint.name for lint in widened.lints] == ["widened stream"]

# %% [markdown]
# The stream has become float32 behind the block, because of a gain whose digits do not
# matter. `explain` looks for this by itself. It names the place, how much is float32
# since, and a remedy: `as_low` says of a value that 16 bits are enough. (The `name`
# that is followed then is the mark.)


# %%
def with_low_gain(p, x):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    gain = jmp.as_low(jnp.exp(-jnp.square(x).mean(-1, keepdims=True)))
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x)) * gain


mended = jmp.explain(functools.partial(loss_fn, block=with_low_gain))(params, tokens)
show(mended, "block_0$")
print(f"\nlints: {len(mended.lints)}")
assert not mended.lints

# %% [markdown]
# ## To say it otherwise
#
# Rules are values, and each edit makes new ones. `diff` compares two explanations of a
# function. Here the activation of the MLP is to be float32: its `tanh` becomes `FULL`.
# (The last column is the file and the line; Jupyter gives each cell a number for a
# file's name.)

# %%
mixed = jmp.get_rules("mixed")
print(told.diff(jmp.explain(loss_fn, mixed.full("tanh"))(params, tokens)))

# %% [markdown]
# A rule for an operation holds wherever that is. A rule for a scope holds where the
# pattern is found in a path; `"full_inside"` hands on 16 bits again, as a norm does.

# %%
rules = mixed.scope("block_0/mlp", "full_inside")
print(told.diff(jmp.explain(loss_fn, rules)(params, tokens)))

# %% [markdown]
# A pattern that matches nothing is named, and not passed over:

# %%
print(jmp.explain(loss_fn, mixed.scope("blok_0", "full"))(params, tokens).summary())

# %% [markdown]
# In the code the same is said by marks. Outside of autocast they mean nothing.
# `full_precision` marks a part of a function; `as_full` marks a value, and what is
# added to it is float32. This keeps the residual stream in float32, as many do by hand:


# %%
def with_full_stream(p, x):
    x = jmp.as_full(x) + attention(p["attention"], layer_norm(p["norm_1"], x))
    return jmp.as_full(x) + mlp(p["mlp"], layer_norm(p["norm_2"], x))


def with_full_mlp(p, x):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    return x + jmp.full_precision(mlp)(p["mlp"], layer_norm(p["norm_2"], x))


full_stream_fn = functools.partial(loss_fn, block=with_full_stream)
full_mlp_fn = functools.partial(loss_fn, block=with_full_mlp)
show(jmp.explain(full_stream_fn)(params, tokens), "block_0$")

# %% [markdown]
# What do these buy, and what do they cost? With `backward=True`, `explain` tells the
# backward pass too, and how many bytes of activations wait for it.


# %%
def costs(fun, rules):
    """What is low of the equations, what is kept, and how far the gradients are."""
    told = jmp.explain(fun, rules, backward=True)(params, tokens)
    kept = told.totals.kept_run / told.totals.kept_traced
    low_fn = low_loss_fn if (fun, rules) == (loss_fn, mixed) else None
    of_loss, of_grads = errors(low_fn or jmp.autocast(fun, rules))
    products = told.share_low("dot_general")
    return products, told.share_low(), kept, of_loss, of_grads


def table(measured):
    lines = [f"{'':<24}    in 16 bits:         bytes         errors of"]
    lines.append(f"{'':<24}  products  equations   kept      loss  gradients")
    for name, (products, share, kept, *found) in measured.items():
        shares = f"{products:10.0%}{share:11.0%}{kept:7.0%}"
        lines.append(f"{name:<24}{shares}{found[0]:10.1e}{found[1]:11.1e}")
    print("\n".join(lines))


tried = {
    "mixed": costs(loss_fn, mixed),
    "full_precision(mlp)": costs(full_mlp_fn, mixed),
    "as_full(x)": costs(full_stream_fn, mixed),
}
table(tried)
assert tried["full_precision(mlp)"][-1] < tried["mixed"][-1]

# %% [markdown]
# Most of the gradients' error is that of the products, which remains where the stream
# is in float32. `full_precision` around the MLP takes more of it away, and is dear: it
# takes a third of the products out of 16 bits, and most of what was saved in bytes.
#
# ## Presets
#
# A preset is rules, too. `"mixed"` is what the above shows. `"O1"` lowers matrix
# products alone; `"torch"` does as PyTorch does; `"O2"` lowers all that is not
# delicate; `"O3"` lowers everything, sums, norms and the loss with it. `"O0"` lowers
# nothing, and is float32.

# %%
presets = ("O1", "torch", "mixed", "O2", "O3")
measured = {name: costs(loss_fn, jmp.get_rules(name)) for name in presets}
in_float16 = costs(loss_fn, jmp.get_rules("mixed", "float16"))
table({**measured, "mixed, float16": in_float16})
assert max(presets, key=lambda name: measured[name][-1]) == "O3"
assert measured["mixed"][2] < measured["O1"][2] < 1
assert in_float16[-1] < measured["mixed"][-1] / 4

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for place, (marker, what) in enumerate((("o", "gradients"), ("s", "loss")), -2):
    found = [measured[name][-1 - (place == -1)] for name in presets]
    left.semilogy(presets, found, marker, label=what, ms=8)
left.set(ylabel="relative error, in bfloat16")
left.grid(axis="y", alpha=0.3)
left.legend()
for place, hatch, what in (
    (1, "", "equations in 16 bits"),
    (2, "///", "bytes kept for the backward pass"),
):
    where = [i + 0.4 * place - 0.6 for i in range(len(presets))]
    shares = [100 * measured[name][place] for name in presets]
    right.bar(where, shares, 0.4, hatch=hatch, edgecolor="white", label=what)
right.set(ylabel="% of all equations; of float32's bytes", ylim=(0, 140))
right.set_xticks(range(len(presets)), presets)
right.legend(loc="upper left")
plt.show()

# %% [markdown]
# The more runs in 16 bits, the larger the gradients' error, and `"O3"` rounds the loss
# as well. `"mixed"` keeps a third less for the backward pass than float32, where `"O1"`
# and `"torch"` keep a tenth less: there, what lies between two products is held in
# float32. float16 rounds eight times finer than bfloat16, and its range is enough for
# this model. (Whether it is enough for gradients is what loss scales are about, in the
# next notebook.)
#
# ## What it cannot see
#
# **A cast to float32.** Autocast traces the function in float32, and there
# `x.astype(jnp.float32)` does nothing and leaves no trace. Whoever wants the stream in
# float32 and writes it so gets what he would have got without:


# %%
def with_astype(p, x):
    x = x.astype(jnp.float32)
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    x = x.astype(jnp.float32)
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x))


cast = jmp.explain(functools.partial(loss_fn, block=with_astype))(params, tokens)
marked = jmp.explain(full_stream_fn)(params, tokens)
by_cast, by_mark = (x.precision_of(r"block_\d$", "add") for x in (cast, marked))
print(f"the stream: {by_cast} by astype, {by_mark} by as_full")
assert cast.totals.equations == told.totals.equations
assert (by_cast, by_mark) == ("bfloat16", "float32")

# %% [markdown]
# `as_full` is the cure, as above.
#
# **That the digits of an input matter.** An argument is `SOFT`, and rounded to 16 bits
# if it is added to a 16-bit value. That is right for a bias, and wrong for a phase of
# many turns. `explain` names such inputs, where they are arguments by themselves.


# %%
def waves(w, x, phase):
    return jnp.sin(jnp.tanh(x @ w) @ w + phase) @ w


def careful_waves(w, x, phase):
    return waves(w, x, jmp.as_full(phase))


w, x = normal(16, 16), 8 * normal(64, 16)
phase = jnp.asarray(generator.uniform(0, 100, (64, 16)), jnp.float32)
for lint in jmp.explain(waves)(w, x, phase).lints:
    print(f"{lint.name}: {lint.message}.\n{lint.remedy}.")

# %%
of = {}
for name, fun, rules in (
    ("mixed", waves, "mixed"),
    ("mixed, as_full", careful_waves, "mixed"),
    ("torch", waves, "torch"),
):
    run = jax.jit(jmp.autocast(fun, rules), compiler_options=OPTIONS)
    of[name] = distance(run(w, x, phase), waves(w, x, phase))
print("\n".join(f"{name:<15} error {error:.1e}" for name, error in of.items()))
assert of["mixed"] > 10 * of["mixed, as_full"]

# %% [markdown]
# ## Layers in a loop
#
# Deep models put their blocks into a `scan`. Autocast goes into it, and decides of the
# carry too: in a stack of layers it is 16 bits, from step to step.


# %%
def scanned(blocks, x, block):
    def step(x, p):
        return block(p, x), None

    with jax.named_scope("blocks"):
        return jax.lax.scan(step, x, blocks)[0]


scanned_fn = functools.partial(loss_fn, layers=scanned)
stacked = {
    **params,
    "blocks": jax.tree.map(lambda *arrays: jnp.stack(arrays), *params["blocks"]),
}
in_a_loop = jmp.explain(scanned_fn)(stacked, tokens)
print(in_a_loop.summary())
for row in in_a_loop.rows:
    if row.op in ("scan", "dot_general"):
        reason = re.sub(r" at \S+$", "", row.reason)
        print(f"{row.times} x {row.op:<12} {row.precision:<9} {reason}")


# %%
def inside(told, scope):
    rows = (row for row in told.rows if f"{scope}/" in row.scope)
    return [(row.op, row.precision) for row in rows if row.op != "scan"]


assert inside(in_a_loop, "blocks") == inside(told, "block_1")
low_loss = jax.jit(jmp.autocast(scanned_fn), compiler_options=OPTIONS)(stacked, tokens)
print(f"loss: relative error {distance(low_loss, loss_and_grads(loss_fn)[0]):.0e}")

# %% [markdown]
# The body is decided as a block that is written out is, operation by operation, and is
# lowered once for all of them.
#
# **Answer.** One line runs the matrix products of a transformer in 16 bits, and what
# follows them: biases, activations, the residual stream. Softmax, norms and the loss
# stay in float32, without a rule for any model: by the class of the operation, by the
# state of what it is given, and by who reads its result. `explain` tells which of these
# it was, line by line, and what is worth a second look; rules and marks overrule it.
# What it cannot see is what the code does not say: that a float32 value matters to its
# last digit.
