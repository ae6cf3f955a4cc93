# %% [markdown]
# # 1. Autocast
#
# **What does one line, `autocast`, do to a transformer?**
#
# This is a small transformer in plain JAX and float32. It has an embedding, two blocks
# of attention and MLP, and a loss. `jax.named_scope` names the parts. The code does not
# mention precision, and it stays as it is.

# %%
import collections
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
        with jax.named_scope("softmax"):
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
#
# `autocast` returns a function with the signature of `loss_fn`, whose loss and
# gradients are float32. By hand, the shortest way to 16 bits is to cast all parameters.
# Then every operation runs in bfloat16, the norms, the softmax and the loss too.
#
# `explain` lists in which precision each equation runs under autocast, and why. It runs
# nothing: shapes are enough for its arguments.
#
# (The compiler options save compile time, and make XLA keep every rounding of the
# program. The last option is for jaxlib 0.12, which accumulates some products in
# bfloat16 on CPUs: see docs/troubleshooting.md.)

# %%
low_loss_fn = jmp.autocast(loss_fn)
by_hand_fn = lambda params, tokens: loss_fn(jmp.cast_tree(params, "bfloat16"), tokens)
explained = jmp.explain(loss_fn)(params, tokens)
OPTIONS = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_cpu_experimental_ynn_fusion_type": "",
}


@functools.cache
def loss_and_grads(fun):
    run = jax.jit(jax.value_and_grad(fun), compiler_options=OPTIONS)
    return run(params, tokens)


def distance(tree, other):
    """The size of a difference, relative to the second one."""
    squares = lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))
    far = squares(jax.tree.map(jnp.subtract, tree, other))
    return float(jnp.sqrt(far / squares(other)))


def errors(low_loss_fn):
    """How far the loss and the gradients are from float32's."""
    pairs = zip(loss_and_grads(low_loss_fn), loss_and_grads(loss_fn), strict=True)
    return [distance(*pair) for pair in pairs]


PARTS = {  # The last one that is in the scope of an equation.
    "embedding": "embedding",
    "block": "residual sums",
    "attention": "attention",
    "softmax": "its softmax",
    "mlp": "MLP",
    "head": "head",
    "LayerNorm": "norms",
    "loss": "loss",
}
by_hand, by_autocast = errors(by_hand_fn), errors(low_loss_fn)
counts = collections.Counter()
for row in explained.rows:
    parts = [part for part in PARTS if re.search(rf"(^|/){part}", row.scope)]
    counts[parts[-1], row.precision] += 1

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
dtypes = ("bfloat16", "float32")
found = np.array([[counts[part, dtype] for part in PARTS] for dtype in dtypes])
low, full = 100 * found / found.sum(0)
left.barh(list(PARTS.values()), low, color="C0", label="bfloat16")
left.barh(list(PARTS.values()), full, left=low, color="0.75", label="float32")
left.invert_yaxis()
left.set(
    title="Precision of each part under autocast",
    xlabel="share of its equations, %",
    ylabel="part of the model",
    xlim=(0, 100),
)
left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
right.barh([-0.2, 0.8], by_hand, 0.4, color="0.4", label="all in bfloat16, by hand")
right.barh([0.2, 1.2], by_autocast, 0.4, color="C0", label="autocast to bfloat16")
right.invert_yaxis()
right.set_yticks([0, 1], ["loss", "gradients"])
right.set(
    title="How far the results are from float32's",
    xlabel="relative error",
    xscale="log",
    xlim=(1e-5, 1),
)
right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
plt.show()

# %% [markdown]
# Matrix products, and what follows them, run in bfloat16. Norms, the softmax and the
# loss run in float32. (Equations without a float32 number are left out.) So the error
# of the loss is a tenth of that by hand, or less. The gradients differ from float32's
# by a few parts in a thousand, because bfloat16 rounds the operands of all matrix
# products. These are nearly all of the work:

# %%
print(f"loss in float32:         {loss_and_grads(loss_fn)[0]:.6f}")
print(f"all in bfloat16 by hand: {loss_and_grads(by_hand_fn)[0]:.6f}")
print(f"autocast to bfloat16:    {loss_and_grads(low_loss_fn)[0]:.6f}\n")
print(explained.summary())
assert by_autocast[0] < by_hand[0] / 10
assert by_autocast[1] < min(2e-2, by_hand[1])
dtypes = {x.dtype.name for x in jax.tree.leaves(loss_and_grads(low_loss_fn))}
assert dtypes == {"float32"}
assert explained.share_low("dot_general") == 1

# %% [markdown]
# ## What autocast decides
#
# This table lists all reasons, with the number of equations and some of their
# operations.

# %%
by_reason = {}
for row in explained.rows:
    by_reason.setdefault(row.code, []).append(row)
for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
    ops = ", ".join(list(dict.fromkeys(row.op for row in rows))[:4])
    print(f"{len(rows):4}  {reason:<19}{rows[0].precision:<11}{ops}")

# %% [markdown]
# Three things decide (docs/semantics.md has the details):
#
# - The class of an operation. Matrix products are `LOW`: autocast casts their operands.
#   Sums, exponentials and logarithms are `FULL`. Other arithmetic follows its operands.
# - The states of its operands: 16-bit (`LOW`), float32 on purpose (`HARD`), or float32
#   because nothing has decided (`SOFT`). `HARD` wins over `LOW`, and `LOW` over `SOFT`.
# - The readers of its result. What only float32 operations read is float32.
#
# ## Line by line
#
# Each row of an explanation names its line of code. This function prints a line, and
# below it the decisions about that line. A place such as `In[1]:39` is the number of a
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
# The bias is a float32 parameter, and ordinary promotion would make the sum float32.
# But a parameter is `SOFT`: the sum follows the product, and so does the gelu. Inside
# of the gelu, tanh is float32: near -1, `1 + tanh` would have no digits left.

# %%
show(explained, "block_0/attention", "weights")
inside = [row for row in explained.rows if re.search("LayerNorm|softmax", row.scope)]
assert {row.precision for row in inside} == {"float32"}
assert explained.dtype_of(scope=r"block_\d$", op="add") == "bfloat16"

# %% [markdown]
# The exponential and the sum are `FULL`. The subtraction of the maximum reads a 16-bit
# product, and still runs in float32, because only the exponential reads its result. So
# no rule for softmax is needed. The next product casts the probabilities. Log-softmax
# is float32 for the same reasons.
#
# A norm subtracts a mean and sums squares, so it runs in float32 inside. Its result is
# 16-bit because its input is. So the residual stream is bfloat16 between the blocks.
#
# ## A residual stream that becomes float32
#
# `HARD` wins over `LOW`. If a value that is float32 on purpose joins the stream, the
# stream is float32 up to the next product. Here a gain damps the MLP where the stream
# is already large. `explain` reports the place, the cost and a remedy. The remedy is
# `as_low`, which declares that 16 bits are enough for a value.


# %%
def block_with_gain(p, x, mark=lambda gain: gain):
    x = x + attention(p["attention"], layer_norm(p["norm_1"], x))
    gain = mark(jnp.exp(-jnp.square(x).mean(-1, keepdims=True)))
    return x + mlp(p["mlp"], layer_norm(p["norm_2"], x)) * gain


def explain_with(block):
    return jmp.explain(functools.partial(loss_fn, block=block))(params, tokens)


widened = explain_with(block_with_gain)
show(widened, "block_0$", "gain")
for lint in widened.lints:
    print(f"\n{lint.name} in {lint.scope}:\n{lint.message}.\n{lint.remedy}.\n")
mended = explain_with(functools.partial(block_with_gain, mark=jmp.as_low))
show(mended, "block_0$", "* gain")
assert [lint.name for lint in widened.lints] == ["widened stream"]
assert not mended.lints

# %% [markdown]
# ## Other decisions
#
# `Rules` are values: each edit returns new ones. A rule for an operation, such as
# `mixed.full("tanh")`, applies everywhere. A rule for a scope applies where its pattern
# is found in a path. `diff` compares two explanations of a function.

# %%
mixed = jmp.get_rules("mixed")
rules = mixed.scope("block_0/mlp", "full")
print(explained.diff(jmp.explain(loss_fn, rules)(params, tokens)))

# %% [markdown]
# Marks do the same in the code. Without autocast they have no effect.
# `full_precision` marks a function: everything in it runs in float32. `as_full` marks a
# value: it is `HARD`, and so is a sum that it joins.
#
# Presets are sets of rules. Everything above is `"mixed"`, the default. `"O1"` lowers
# matrix products only, and `"O3"` everything, with sums, norms and the loss.
#
# With `backward=True`, `explain` covers the backward pass too, and counts the bytes of
# the activations that are saved for it. They are relative to float32 in this table:


# %%
def marked_block(p, x, mark=lambda x: x, mlp=mlp):
    x = mark(x) + attention(p["attention"], layer_norm(p["norm_1"], x))
    return mark(x) + mlp(p["mlp"], layer_norm(p["norm_2"], x))


full_stream = functools.partial(marked_block, mark=jmp.as_full)
full_mlp = functools.partial(marked_block, mlp=jmp.full_precision(mlp))
found = {}
print(f"{'':<22}        in 16 bits       bytes of      relative errors")
print(f"{'':<22} products  equations  activations      loss  gradients")
for name, fun, rules in (
    ("O1", loss_fn, jmp.get_rules("O1")),
    ("mixed", loss_fn, mixed),
    ("O3", loss_fn, jmp.get_rules("O3")),
    ("mixed, float16", loss_fn, jmp.get_rules("mixed", "float16")),
    ("full_precision(mlp)", functools.partial(loss_fn, block=full_mlp), mixed),
    ("as_full(x)", functools.partial(loss_fn, block=full_stream), mixed),
):
    of_both = jmp.explain(fun, rules, backward=True)(params, tokens)
    saved = of_both.totals.kept_run / of_both.totals.kept_traced
    of_loss, of_grads = errors(jmp.autocast(fun, rules))
    found[name] = saved, of_grads
    shares = f"{of_both.share_low('dot_general'):9.0%}{of_both.share_low():11.0%}"
    print(f"{name:<22}{shares}{saved:13.0%}{of_loss:10.1e}{of_grads:11.1e}")
assert found["mixed"][0] < found["O1"][0] < 1
assert max(found, key=lambda name: found[name][1]) == "O3"
assert found["mixed, float16"][1] < found["mixed"][1] / 4
assert found["full_precision(mlp)"][1] < found["mixed"][1]

# %% [markdown]
# `"mixed"` saves a third of the bytes. `"O1"` saves a tenth, because its activations
# are float32 between two products. `"O3"` rounds the loss as well.
#
# float16 rounds eight times finer than bfloat16, and its range is wide enough for the
# values of this model. The next notebook asks what its range does to gradients.
#
# `full_precision` around the MLP lowers the error of the gradients, at a high price: a
# third of the products leave 16 bits, and most of the gain in memory is lost. A float32
# stream changes little, because the products cause most of the error.
#
# ## What autocast cannot see
#
# What a sine reads is float32 back to the products. The products themselves stay
# 16-bit, and a turn is 6.28 at any size of the angle: an angle of 200 with three digits
# has none after the point. The preset `"O1"` has the same error. `explain` reports it.


# %%
def angles(w, x):
    return 50 * (jnp.tanh(x @ w) @ w)


def waves(w, x, angles=angles):
    return jnp.sin(angles(w, x)) @ w


careful_waves = functools.partial(waves, angles=jmp.full_precision(angles))
w, x = normal(16, 16), 8 * normal(64, 16)


def error_of(fun):
    return distance(jax.jit(fun, compiler_options=OPTIONS)(w, x), waves(w, x))


print(f"relative error:      {error_of(jmp.autocast(waves)):.1e}")
print(f'preset "O1":         {error_of(jmp.autocast(waves, "O1")):.1e}')
print(f"with full_precision: {error_of(jmp.autocast(careful_waves)):.1e}\n")
for lint in jmp.explain(waves)(w, x).lints:
    print(f"{lint.name}: {lint.message}.\n{lint.remedy}.")
assert error_of(jmp.autocast(waves)) > 10 * error_of(jmp.autocast(careful_waves))

# %% [markdown]
# A cast of a float32 value to float32 leaves no trace either (notebook 6).
#
# ## Layers in a loop
#
# Deep models put their blocks into a `scan`. Autocast converts its body, and decides
# the precision of its carry: in a stack of layers the carry is 16-bit. The decisions
# about the body are those about a single block, operation by operation.


# %%
def scanned(blocks, x, block):
    step = lambda x, p: (block(p, x), None)
    with jax.named_scope("blocks"):
        return jax.lax.scan(step, x, blocks)[0]


scanned_fn = functools.partial(loss_fn, layers=scanned)
blocks = jax.tree.map(lambda *arrays: jnp.stack(arrays), *params["blocks"])
stacked = {**params, "blocks": blocks}
in_a_loop = jmp.explain(scanned_fn)(stacked, tokens)
print(*(f"scan: {r.precision}, {r.reason}" for r in in_a_loop.rows if r.op == "scan"))


def decisions(explained, scope):
    rows = (row for row in explained.rows if f"{scope}/" in row.scope)
    return [(row.op, row.precision) for row in rows if row.op != "scan"]


assert decisions(in_a_loop, "blocks") == decisions(explained, "block_1")
low_loss = jax.jit(jmp.autocast(scanned_fn), compiler_options=OPTIONS)(stacked, tokens)
print(f"loss: relative error {distance(low_loss, loss_and_grads(loss_fn)[0]):.0e}")

# %% [markdown]
# **Answer.** One line runs the matrix products of a transformer in 16 bits, and what
# follows them: biases, activations, the residual stream. Softmax, norms and the loss
# stay in float32, with no rule for this model.
#
# `explain` shows each decision with its line, and reports doubtful ones. Rules and
# marks change them. Autocast cannot know that a product needs all digits of its
# operands: `full_precision` declares it.
