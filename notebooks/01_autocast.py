# %% [markdown]
# # 1. Autocast
#
# **What does one line, `autocast`, do to a transformer?**
#
# This is a small transformer in plain JAX and float32. It has an embedding, two blocks
# of attention and MLP, and a loss. `jax.named_scope` names the parts. The code does not
# mention precision, and it stays as it is.

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
# ## What goes wrong by hand
#
# The shortest way to 16 bits is to cast all parameters. Then every operation runs in
# bfloat16: the matrix products, but also the norms, the softmax and the loss. The
# relative errors below are those of the loss and of its gradients, compared with
# float32.
#
# (The compiler options save compile time, and make XLA keep every rounding of the
# program. The last option is for jaxlib 0.12, which accumulates some products in
# bfloat16 on CPUs: see docs/troubleshooting.md.)


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


def all_in_bfloat16(params, tokens):
    return loss_fn(jmp.cast_tree(params, "bfloat16"), tokens)


by_hand = errors(all_in_bfloat16)
print(f"float32:  loss {loss_and_grads(loss_fn)[0]:.6f}")
print(f"bfloat16: loss {loss_and_grads(all_in_bfloat16)[0]:.6f}")
print(f"relative errors: loss {by_hand[0]:.0e}, gradients {by_hand[1]:.1e}")
assert loss_and_grads(all_in_bfloat16)[0].dtype == jnp.bfloat16

# %% [markdown]
# The loss has only two or three correct digits.
#
# ## One line

# %%
low_loss_fn = jmp.autocast(loss_fn)

# %% [markdown]
# `low_loss_fn` has the signature of `loss_fn`. Its loss and its gradients are float32.
# bfloat16 rounds the operands of matrix products, so the gradients differ from
# float32's by a few parts in a thousand.

# %%
of_loss, of_grads = errors(low_loss_fn)
print(f"autocast: loss {loss_and_grads(low_loss_fn)[0]:.6f}")
print(f"relative errors: loss {of_loss:.0e}, gradients {of_grads:.1e}")
assert of_loss < 1e-3 < by_hand[0]
assert of_grads < min(2e-2, by_hand[1])
dtypes = {x.dtype.name for x in jax.tree.leaves(loss_and_grads(low_loss_fn))}
assert dtypes == {"float32"}

# %% [markdown]
# ## What autocast decides
#
# `explain` lists the precision of each equation. It runs nothing: shapes are enough for
# `params` and `tokens`. For a long program, it adds up the equations of a scope. Blocks
# that differ only in a number share one entry, such as `block_*`.

# %%
explained = jmp.explain(loss_fn)(params, tokens)
print(explained)
assert explained.share_low("dot_general") == 1

# %% [markdown]
# All matrix products run in bfloat16, and they are nearly all of the work. Most of the
# other equations run in float32, each for a reason. This table lists all reasons, with
# the number of equations and some of their operations.

# %%
by_reason = {}
for row in explained.rows:
    by_reason.setdefault(row.code, []).append(row)
for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
    ops = ", ".join(list(dict.fromkeys(row.op for row in rows))[:4])
    print(f"{len(rows):4}  {reason:<19}{rows[0].precision:<11}{ops}")

# %% [markdown]
# Each operation has a class:
#
# - `LOW`: matrix products. Autocast casts their operands to the compute dtype.
# - `FULL`: sums, exponentials, logarithms. They run in float32, and their results are
#   float32 on purpose.
# - `FOLLOW`: all other arithmetic. It follows its operands.
# - `KEEP`: random bits, kernels, callbacks, unknown operations. They run as written.
#
# Operations without a float32 operand or result also run as written. Here they compute
# indices and the mask.
#
# A `FOLLOW` operation looks at the state of its operands:
#
# - `LOW`: held in 16 bits.
# - `HARD`: float32 on purpose. It wins over `LOW`.
# - `SOFT`: float32 because nothing has decided yet, such as a parameter or a literal.
#   It yields to both.
#
# The "undecided" equations read only `SOFT` values.
#
# ## Line by line
#
# Each row of an explanation names its line of code. This function prints a line, and
# below it the decisions about that line. A place such as `In[1]:37` is the number of a
# cell and a line in it.


# %%
def code(row):
    """The line of code that a row comes from."""
    file, _, line = row.source.rpartition(" ")[0].rpartition(":")
    return linecache.getline(file, int(line)).strip()


def show(explained, scope, wanted=""):
    """Prints the lines of code in a scope, each with its decisions."""
    line = None
    for row in explained.rows:
        if not re.search(scope, row.scope) or wanted not in code(row):
            continue
        if code(row) != line:
            line = code(row)
            print(line)
        print(f"    {row.precision:<10} {row.op:<17} {row.reason}")


show(explained, "block_0/mlp$")
assert explained.dtype_of(scope="block_0/mlp$", op="integer_pow") == "bfloat16"

# %% [markdown]
# The product is `LOW`. The bias is a float32 parameter, and ordinary promotion would
# make the sum float32. But a parameter is `SOFT`: the sum follows the product, and so
# does the gelu. The activations stay in 16 bits up to the next product. Inside of the
# gelu, tanh is float32: near -1, `1 + tanh` would have no digits left.
#
# ### The softmax

# %%
show(explained, "block_0/attention", "scores")
assert explained.dtype_of(scope="block_0/attention$", op="exp") == "float32"
assert explained.dtype_of(scope="block_0/attention$", op="sub") == "float32"

# %% [markdown]
# The exponential and the sum are `FULL`. The subtraction of the maximum is `FOLLOW`,
# and its operands come from a 16-bit product. It still runs in float32, because only
# the exponential reads its result, and that reads float32. Rounding before would lose
# digits and save nothing.
#
# This is demand: autocast looks at the readers of each value before it decides. So the
# shift by the maximum is exact, and no rule for softmax is needed.
#
# The probabilities are float32 too. The next product casts them:

# %%
show(explained, "block_0/attention", "mixed")

# %% [markdown]
# ### The norm and the residual stream
#
# A norm subtracts a mean and sums squares, so it runs in float32 inside. Its result is
# 16-bit because its input is. Between the blocks, the residual stream is bfloat16.

# %%
inside = {row.precision for row in explained.rows if "LayerNorm" in row.scope}
assert inside == {"float32"}
show(explained, "block_0$")
show(explained, "block_1$")

# %% [markdown]
# ### The loss
#
# The loss runs in float32. The logits are rounded once, by the product that computes
# them.

# %%
show(explained, "loss", "likely = ")

# %% [markdown]
# ## A residual stream that becomes float32
#
# `HARD` wins over `LOW`. If a value that is float32 on purpose joins the stream, the
# stream is float32 up to the next product. Here a gain damps the MLP where the stream
# is already large:


# %%
def with_gain(p, x):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    gain = jnp.exp(-jnp.square(x).mean(-1, keepdims=True))
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x)) * gain


gained_fn = functools.partial(loss_fn, block=with_gain)
widened = jmp.explain(gained_fn)(params, tokens)
show(widened, "block_0$")
for lint in widened.lints:
    print(f"\n{lint.name} in {lint.scope}:\n{lint.message}.\n{lint.remedy}.")
assert [lint.name for lint in widened.lints] == ["widened stream"]

# %% [markdown]
# The digits of the gain do not matter, but they make the stream float32. `explain`
# reports this: it names the place, the cost and a remedy. The remedy is `as_low`, which
# declares that 16 bits are enough for a value.


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
# ## Other decisions
#
# `Rules` are values: each edit returns new ones. `diff` compares two explanations of a
# function. Here the `tanh` in the gelu of the MLP becomes `FULL`.

# %%
mixed = jmp.get_rules("mixed")
print(explained.diff(jmp.explain(loss_fn, mixed.full("tanh"))(params, tokens)))

# %% [markdown]
# A rule for an operation applies everywhere. A rule for a scope applies where its
# pattern is found in a path.

# %%
rules = mixed.scope("block_0/mlp", "full")
print(explained.diff(jmp.explain(loss_fn, rules)(params, tokens)))

# %% [markdown]
# `explain` reports a pattern that matches nothing:

# %%
print(jmp.explain(loss_fn, mixed.scope("blok_0", "full"))(params, tokens).summary())

# %% [markdown]
# Marks do the same in the code. Without autocast they have no effect.
#
# - `full_precision` marks a function: everything in it runs in float32.
# - `as_full` marks a value: it is `HARD`, and so is a sum that it joins.
#
# With `as_full` the residual stream stays in float32, as many models have it by hand:


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
# What do these marks improve, and what do they cost? With `backward=True`, `explain`
# covers the backward pass too, and counts the bytes of saved activations.


# %%
def costs(fun, rules):
    """The shares in 16 bits, the bytes of activations, and the errors."""
    explained = jmp.explain(fun, rules, backward=True)(params, tokens)
    saved = explained.totals.kept_run / explained.totals.kept_traced
    low_fn = low_loss_fn if (fun, rules) == (loss_fn, mixed) else None
    of_loss, of_grads = errors(low_fn or jmp.autocast(fun, rules))
    products = explained.share_low("dot_general")
    return products, explained.share_low(), saved, of_loss, of_grads


def table(measured):
    lines = [f"{'':<22}        in 16 bits       bytes of      relative errors"]
    lines.append(f"{'':<22} products  equations  activations      loss  gradients")
    for name, (products, share, saved, *found) in measured.items():
        shares = f"{products:9.0%}{share:11.0%}{saved:13.0%}"
        lines.append(f"{name:<22}{shares}{found[0]:10.1e}{found[1]:11.1e}")
    print("\n".join(lines))


tried = {
    "mixed": costs(loss_fn, mixed),
    "full_precision(mlp)": costs(full_mlp_fn, mixed),
    "as_full(x)": costs(full_stream_fn, mixed),
}
table(tried)
assert tried["full_precision(mlp)"][-1] < tried["mixed"][-1]

# %% [markdown]
# The bytes of activations are those saved for the backward pass, relative to float32.
#
# A float32 stream changes little: the products cause most of the error of the
# gradients. `full_precision` around the MLP lowers it, at a high price. A third of the
# products leave 16 bits, and most of the gain in memory is lost.
#
# ## Presets
#
# A preset is a set of rules. Everything above is `"mixed"`, the default.
#
# - `"O0"` runs everything in float32.
# - `"O1"` lowers matrix products only.
# - `"torch"` follows PyTorch's lists.
# - `"O2"` lowers everything but `FULL` operations and norms.
# - `"O3"` lowers everything, and with it sums, norms and the loss.

# %%
presets = ("O1", "torch", "mixed", "O2", "O3")
measured = {name: costs(loss_fn, jmp.get_rules(name)) for name in presets}
in_float16 = costs(loss_fn, jmp.get_rules("mixed", "float16"))
table({**measured, "mixed, float16": in_float16})
assert max(presets, key=lambda name: measured[name][-1]) == "O3"
assert measured["mixed"][2] < measured["O1"][2] < 1
assert in_float16[-1] < measured["mixed"][-1] / 4

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for marker, what, place in (("o", "gradients", -1), ("s", "loss", -2)):
    found = [measured[name][place] for name in presets]
    left.semilogy(presets, found, marker, label=what, ms=8)
left.set(
    title="Errors by preset, in bfloat16", xlabel="preset", ylabel="relative error"
)
left.grid(axis="y", alpha=0.3)
left.legend()
for shift, hatch, what, place in (
    (-0.2, "", "equations in 16 bits, of all", 1),
    (0.2, "///", "bytes of activations, of float32's", 2),
):
    where = [i + shift for i in range(len(presets))]
    shares = [100 * measured[name][place] for name in presets]
    right.bar(where, shares, 0.4, hatch=hatch, edgecolor="white", label=what)
right.set(
    title="Equations in 16 bits and bytes of activations",
    xlabel="preset",
    ylabel="%",
    ylim=(0, 130),
)
right.set_xticks(range(len(presets)), presets)
right.legend(loc="upper left")
plt.show()

# %% [markdown]
# The more equations run in 16 bits, the larger is the error of the gradients. `"O3"`
# rounds the loss as well.
#
# `"mixed"` saves a third of the bytes of activations. `"O1"` and `"torch"` save a
# tenth, because their activations are float32 between two products.
#
# float16 rounds eight times finer than bfloat16, and its range is wide enough for the
# values of this model. Whether it is wide enough for gradients is the subject of the
# next notebook.
#
# ## What autocast cannot see
#
# **A cast to float32.** Autocast traces the function in float32. There
# `x.astype(jnp.float32)` does nothing and leaves no trace in the program. A residual
# stream that is meant to be float32 stays in 16 bits:


# %%
def with_astype(p, x):
    x = x.astype(jnp.float32)
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    x = x.astype(jnp.float32)
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x))


cast = jmp.explain(functools.partial(loss_fn, block=with_astype))(params, tokens)
print("the stream by astype: ", cast.dtype_of(r"block_\d$", "add"))
assert cast.totals.equations == explained.totals.equations

# %% [markdown]
# `as_full` is visible to autocast:

# %%
marked = jmp.explain(full_stream_fn)(params, tokens)
print("the stream by as_full:", marked.dtype_of(r"block_\d$", "add"))
assert cast.dtype_of(r"block_\d$", "add") == "bfloat16"
assert marked.dtype_of(r"block_\d$", "add") == "float32"

# %% [markdown]
# **Angles of many turns.** What a sine reads is float32 back to the products. The
# products themselves stay 16-bit, and a turn is 6.28 at any size of the angle: an angle
# of 200 with three digits has none after the point. The preset `"O1"` has the same
# error. `explain` reports it.


# %%
def angles(w, x):
    return 50 * (jnp.tanh(x @ w) @ w)


def waves(w, x):
    return jnp.sin(angles(w, x)) @ w


w, x = normal(16, 16), 8 * normal(64, 16)
exact = waves(w, x)


def error_of(fun):
    return distance(jax.jit(fun, compiler_options=OPTIONS)(w, x), exact)


print(f"relative error: {error_of(jmp.autocast(waves)):.1e}")
print(f'preset "O1":    {error_of(jmp.autocast(waves, "O1")):.1e}\n')
for lint in jmp.explain(waves)(w, x).lints:
    print(f"{lint.name}: {lint.message}.\n{lint.remedy}.")

# %% [markdown]
# The remedy is the mark of a function.


# %%
def careful_waves(w, x):
    return jnp.sin(jmp.full_precision(angles)(w, x)) @ w


print(f"with full_precision: {error_of(jmp.autocast(careful_waves)):.1e}")
assert error_of(jmp.autocast(waves)) > 10 * error_of(jmp.autocast(careful_waves))

# %% [markdown]
# ## Layers in a loop
#
# Deep models put their blocks into a `scan`. Autocast converts its body, and decides
# the precision of its carry: in a stack of layers the carry is 16-bit.


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
        print(f"{row.times} x {row.op:<12} {row.precision:<9} {row.reason}")


# %%
def inside(explained, scope):
    rows = (row for row in explained.rows if f"{scope}/" in row.scope)
    return [(row.op, row.precision) for row in rows if row.op != "scan"]


assert inside(in_a_loop, "blocks") == inside(explained, "block_1")
low_loss = jax.jit(jmp.autocast(scanned_fn), compiler_options=OPTIONS)(stacked, tokens)
print(f"loss: relative error {distance(low_loss, loss_and_grads(loss_fn)[0]):.0e}")

# %% [markdown]
# The decisions about the body are those about a single block, operation by operation.
# All steps share one compiled body.
#
# **Answer.** One line runs the matrix products of a transformer in 16 bits, and what
# follows them: biases, activations, the residual stream. Softmax, norms and the loss
# stay in float32, with no rule for this model. Three things decide: the class of an
# operation, the state of its operands, and the readers of its result.
#
# `explain` shows each decision with its line, and reports doubtful ones. Rules and
# marks change them. Autocast cannot know that a product needs all digits of its
# operands: `full_precision` declares it.
