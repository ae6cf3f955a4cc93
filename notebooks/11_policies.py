# %% [markdown]
# # 11. Policies
#
# **Which numbers does a policy cast?**
#
# A policy names three dtypes: of the parameters, of the computation, and of the result.
# It is a value. Its methods are pure functions over pytrees. `import jmp_lite as jmp`
# runs programs that were written for jmp.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jmp_lite as jmp

policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
policy

# %% [markdown]
# There are short names, and the names of Keras. Two spellings of one policy are equal.

# %%
assert jmp.get_policy("p=f32,c=bf16,o=f32") == policy
print(policy)
print(jmp.get_policy("mixed_bfloat16"))

# %% [markdown]
# ## What goes wrong by hand
#
# The parameters of a model often share a tree with other arrays: a step count, a mask,
# a random key, an empty slot.

# %%
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "embed": jax.random.normal(keys[0], (1000, 64)),
    "dense": {"w": jax.random.normal(keys[1], (64, 256)) / 8, "b": jnp.zeros(256)},
    "norm": {"scale": jnp.ones(256)},
    "step": jnp.asarray(1001),
    "mask": jnp.ones(256, bool),
    "key": keys[2],
    "unused": None,
}
print(jmp.dtype_summary(params))

# %% [markdown]
# `astype` on all of them changes the step count, and fails on the key:

# %%
print("step 1001 becomes", params["step"].astype("bfloat16"))
try:
    jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
except Exception as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## What a policy casts
#
# A policy casts floating arrays and nothing else:

# %%
low = policy.cast_to_compute(params)
print(jmp.dtype_summary(low))
assert low["step"].dtype == jnp.int32
assert low["step"] == 1001
assert low["unused"] is None

# %% [markdown]
# `cast_tree` is the function below the policies. A predicate leaves some arrays out,
# such as those of norms:


# %%
def is_outside_norms(path, leaf):
    return "norm" not in jax.tree_util.keystr(path)


kept = jmp.cast_tree(params, "bfloat16", where=is_outside_norms)
print("dense:", kept["dense"]["w"].dtype, " norm:", kept["norm"]["scale"].dtype)

# %% [markdown]
# ## What a cast costs and saves
#
# A cast to 16 bits halves the bytes, and loses digits. bfloat16 has the range of
# float32, and two to three digits. float16 has three to four digits. Its range ends at
# 65504, and its smallest number is 6e-8.

# %%
dtypes = ("float32", "bfloat16", "float16")
octaves = 2.0 ** np.arange(-34, 21)
x = np.outer(octaves, np.linspace(1, 2, 999, endpoint=False)).astype("float32")
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for dtype, style in (("bfloat16", "-"), ("float16", ":")):
    rounded = jnp.asarray(x).astype(dtype).astype("float32")
    error = jnp.minimum(jnp.abs(rounded - x) / x, 1)  # 1: zero, or infinite.
    left.plot(octaves, error.max(1), style, lw=2, label=dtype)
left.set_xscale("log", base=2)
left.set_yscale("log", base=2)
left.set(
    title="Largest rounding error between x and 2x",
    xlabel="x",
    ylabel="relative error",
)
left.legend(loc="upper center")
floats = jmp.cast_tree(params, "float32")
sizes = [jmp.dtype_summary(jmp.cast_tree(floats, d))[d].bytes / 1e3 for d in dtypes]
right.barh(dtypes[::-1], sizes[::-1], color="0.6")
right.set(title="Bytes of the parameters", xlabel="kB", ylabel="dtype")
plt.show()

# %% [markdown]
# An error of 1 means that the number became zero or infinite. Loss scaling (notebook 2)
# keeps gradients away from the lower end of float16. bfloat16 does not need it.
#
# ## A policy around a function
#
# A policy casts the arguments of a function and its result. It has no influence on
# what lies in between: everything runs in 16 bits. This function ends with a norm,
# whose sum of squares overflows float16:


# %%
def forward(params, tokens):
    h = params["embed"][tokens]
    h = 100 * (h @ params["dense"]["w"] + params["dense"]["b"])
    return h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * params["norm"]["scale"]


half = jmp.get_policy("params=float32,compute=float16,output=float32")


@jax.jit
def by_policy(params, tokens):
    params = half.cast_to_compute(params)
    return half.cast_to_output(forward(params, tokens))


tokens = jnp.arange(0, 960, 8)
exact = forward(params, tokens)


def report(name, out):
    error = jnp.linalg.norm(out - exact) / jnp.linalg.norm(exact)
    zeros = jnp.mean(out == 0)
    print(f"{name:10} relative error {error:.1e}, results that are zero: {zeros:.0%}")


report("policy", by_policy(params, tokens))
assert not jnp.allclose(by_policy(params, tokens), exact, rtol=0.1)

# %% [markdown]
# `autocast` decides for each operation. It runs the product in float16 and the norm in
# float32:

# %%
by_autocast = jax.jit(jmp.autocast(forward, compute_dtype="float16"))(params, tokens)
report("autocast", by_autocast)
print(jmp.explain(forward, compute_dtype="float16")(params, tokens))
assert jnp.linalg.norm(by_autocast - exact) < 1e-2 * jnp.linalg.norm(exact)

# %% [markdown]
# **Answer.** A policy casts the floating arrays of a tree: parameters and arguments
# before a function, and results after it. It leaves integers, masks and keys alone. It
# does not decide what happens inside the function: there everything is 16-bit.
# `autocast` decides for each operation (notebook 1).
