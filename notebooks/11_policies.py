# %% [markdown]
# # 11. Policies
#
# **Which numbers of a model are cast to 16 bits, where, and what does it save?**
#
# A policy names three dtypes: that in which parameters are kept, that in which a
# function computes, and that in which it returns. It is a value, and what it does are
# pure functions over trees of arrays.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import jmp_lite as jmp

policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
policy

# %% [markdown]
# Short names say the same, and so do the names that Keras has. Two spellings of one
# policy are equal.

# %%
assert jmp.get_policy("p=f32,c=bf16,o=f32") == policy
print(policy)
print(jmp.get_policy("mixed_bfloat16"))

# %% [markdown]
# ## What is cast
#
# Floating arrays, and nothing else. Here are the parameters of a small network, with
# what else one finds in such trees: a step count, a mask, a random key, and a hole.

# %%
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "embed": jax.random.normal(keys[0], (1000, 64)),
    "dense": {"w": jax.random.normal(keys[1], (64, 256)) / 8, "b": jnp.zeros(256)},
    "norm": {"scale": jnp.ones(256)},
    "step": jnp.asarray(0),
    "mask": jnp.ones(256, bool),
    "key": keys[2],
    "unused": None,
}
print(jmp.dtype_summary(params))

# %%
low = policy.cast_to_compute(params)
print(jmp.dtype_summary(low))
assert low["step"].dtype == jnp.int32
assert low["unused"] is None

# %% [markdown]
# `cast_tree` is the function below the policies. A predicate keeps some leaves out:
# norms, say. (MXNet's `net.cast` keeps its batch norms in float32.)


# %%
def is_no_norm(path, leaf):
    return "norm" not in jax.tree_util.keystr(path)


kept = jmp.cast_tree(params, "bfloat16", where=is_no_norm)
print(kept["dense"]["w"].dtype, kept["norm"]["scale"].dtype)

# %% [markdown]
# ## What it costs, and what it saves
#
# Half of the bytes, and fewer digits: bfloat16 has the range of float32 and two to
# three digits; float16 three to four, and a range that ends at 65504 and begins at
# 6e-8.

# %%
dtypes = ("float32", "bfloat16", "float16")
x = jnp.logspace(-10, 6, 400)
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for dtype, style in (("bfloat16", "-"), ("float16", ":")):
    rounded = x.astype(dtype).astype("float32")
    error = jnp.clip(jnp.abs(rounded - x) / x, 0, 1)  # 1: zero, or infinite.
    left.loglog(x, error, style, label=dtype)
left.set(xlabel="x", ylabel="relative error of x, rounded", ylim=(1e-6, 5))
left.legend()
floats = jmp.cast_tree(params, "float32")
sizes = [jmp.dtype_summary(jmp.cast_tree(floats, d))[d].bytes / 1e3 for d in dtypes]
right.barh(dtypes[::-1], sizes[::-1], color="0.6")
right.set(xlabel="kB of floating parameters")
plt.show()

# %% [markdown]
# An error of 1 is a number that became zero or infinite: float16 below 6e-8 and above
# 65504. That is what loss scaling (notebook 3) is for; bfloat16 needs none.
#
# ## A policy around a function
#
# This is how jmp is used: what goes in is cast, and what comes out. `import jmp_lite as
# jmp` runs programs that were written for it.


# %%
def forward(params, tokens):
    h = params["embed"][tokens]
    h = jnp.tanh(h @ params["dense"]["w"] + params["dense"]["b"])
    h = h - h.mean(-1, keepdims=True)
    return h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * params["norm"]["scale"]


@jax.jit
def by_policy(params, tokens):
    params = policy.cast_to_compute(params)
    return policy.cast_to_output(forward(params, tokens))


tokens = jnp.arange(0, 960, 8)
exact = forward(params, tokens)
error = jnp.linalg.norm(by_policy(params, tokens) - exact) / jnp.linalg.norm(exact)
print(f"relative error by the policy: {error:.1e}")

# %% [markdown]
# All of the function ran in bfloat16, the mean and the variance too. `autocast` casts
# no module but each operation by itself, and leaves those in float32:

# %%
by_autocast = jax.jit(jmp.autocast(forward))(params, tokens)
error = jnp.linalg.norm(by_autocast - exact) / jnp.linalg.norm(exact)
print(f"relative error by autocast:   {error:.1e}")
print(jmp.explain(forward)(params, tokens))

# %% [markdown]
# **Answer.** A policy casts the floating leaves of a tree, where you say so: at the
# door of a function and on the way out. It saves half of the bytes. What happens in
# between is in the hands of the function, and everything in it is in 16 bits; to
# decide for each operation is what `autocast` does, and the next notebook shows.
