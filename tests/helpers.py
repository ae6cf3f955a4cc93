"""What several test files use: dtypes read from jaxprs, and results compared."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

DTYPES = ["bfloat16", "float16"]
TOLERANCE = {"bfloat16": 0.06, "float16": 0.015}
"""How far results in 16 bits may be from float32's, by ``relative_error``."""

MATRIX_PRODUCTS = ("dot_general", "conv_general_dilated")
NEVER_LOW = frozenset(
    [
        *("exp", "exp2", "expm1", "log", "log1p", "rsqrt", "pow", "erf_inv"),
        *("reduce_sum", "cumsum", "cumprod", "reduce_prod", "cumlogsumexp"),
        *("reduce_window_sum", "scatter-add", "select_and_scatter_add", "psum"),
        *("reduce_scatter", "select_and_gather_add"),
    ]
)
"""Ops that the preset ``mixed`` runs in float32."""


# ------------------------------------------------------------------ quick parameters

DAILY = (pytest.mark.slow, pytest.mark.daily)
"""The marks of parameters that neither ``make test`` nor CI runs."""


def mostly_slow(values, quick):
    """Returns the parameters of a test, of which only a few are quick.

    Args:
      values: names, or tuples with a name for each argument.
      quick: those that ``make test`` and CI run; the others are for ``make slow``.
    """
    values, quick = list(values), set(quick)
    if unknown := quick.difference(values):
        raise ValueError(f"Not among the parameters: {unknown}")
    return [
        pytest.param(
            *(names := value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else DAILY,
            id="-".join(getattr(each, "__name__", str(each)) for each in names),
        )
        for value in values
    ]


def one_of_each(*axes):
    """Returns combinations in which each value of each axis is at least once."""
    longest = max(map(len, axes))
    in_turn = (itertools.islice(itertools.cycle(axis), longest) for axis in axes)
    return list(zip(*in_turn, strict=True))


# ------------------------------------------------------------------- reading jaxprs


def params_of(eqn):
    """Returns the parameters of an equation, of JAX's newest kind too."""
    if "_prim" not in eqn.params:
        return eqn.params
    params = eqn.params["_prim"].params
    return {name: getattr(param, "jaxpr", param) for name, param in params.items()}


def equations(jaxpr):
    """Yields every equation that does something, in all jaxprs."""
    for eqn in jaxpr.eqns:
        if "_prim" not in eqn.params:
            yield eqn
        for name, param in params_of(eqn).items():
            if name == "update_jaxpr":  # How a scatter combines: not a program.
                continue
            for inner in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def live_equations(fun, *args):
    """Returns the equations of a function of which anything is read."""
    return live_equations_of(jax.make_jaxpr(fun)(*args))


def live_equations_of(closed):
    """Returns the equations of a closed jaxpr of which anything is read."""
    live, _ = partial_eval.dce_jaxpr(
        getattr(closed, "jaxpr", closed), [True] * len(closed.out_avals), True
    )
    return list(equations(live))


def products(eqns):
    """Counts matrix products by the dtypes of their operands and their result."""
    return collections.Counter(
        tuple(str(v.aval.dtype) for v in (*eqn.invars[:2], eqn.outvars[0]))
        for eqn in eqns
        if eqn.primitive.name in MATRIX_PRODUCTS
    )


def ops(fun, *args):
    """Returns the dtypes of the results of each op, by its name."""
    found = collections.defaultdict(set)
    for eqn in live_equations(fun, *args):
        for var in eqn.outvars:
            found[eqn.primitive.name].add(str(var.aval.dtype))
    return found


# ------------------------------------------------------------------------ parameters


def initialized(module, *args):
    """Returns variables of a linen module: random kernels, scales of one, else zeros.

    Not the module's own: those are computed op by op, each compiled, for seconds.
    """
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        if jax.tree_util.keystr(path).endswith("['scale']"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if leaf.ndim < 2:
            return jnp.zeros(leaf.shape, leaf.dtype)
        fan_in = np.prod(leaf.shape[:-1])
        numbers = rng.standard_normal(leaf.shape, np.float32) / fan_in**0.5
        return jnp.asarray(numbers, leaf.dtype)

    shapes = jax.eval_shape(module.init, jax.random.key(0), *args)
    return jax.tree.map_with_path(fill, shapes)


# ------------------------------------------------------------------ comparing results


def compiled(fun, *args):
    """Returns the results of a program that is compiled to round wherever it says."""
    options = {"xla_allow_excess_precision": False}
    return jax.jit(fun, compiler_options=options)(*args)


def floats(tree):
    """Returns the float32 arrays of a pytree."""
    return [x for x in jax.tree.leaves(tree) if x.dtype == np.float32]


def relative_error(actual, expected):
    """Returns ``|actual - expected| / |expected|``, by norms over all leaves."""
    actual, expected = (
        np.concatenate(
            [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)]
        )
        for t in (actual, expected)
    )
    return np.linalg.norm(actual - expected) / (np.linalg.norm(expected) + 1e-12)
