"""Every optimizer of optax with what its update needs: data for table-driven tests."""

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import mostly_slow
from optax import contrib


def loss_fn(params):
    return 0.5 + jnp.sum(params["w"] ** 2) + jnp.sum((params["b"] - 2) ** 2)


def make_params(dtype=jnp.float32):
    w = jnp.linspace(-1, 1, 12, dtype=dtype).reshape(4, 3)
    return {"w": w, "b": jnp.ones(3, dtype)}


def no_extra_args(params, grads):
    return {}


def loss_value(params, grads):
    return {"value": loss_fn(params)}


def line_search(params, grads):
    return {"value": loss_fn(params), "grad": grads, "value_fn": loss_fn}


def hessian_function(params, grads):
    return {"obj_fn": loss_fn}


def lenient(optimizer):
    """The same optimizer, whose own code runs in standard dtype promotion.

    Optax mixes int32 counters with floats, which the strict promotion of the suite
    forbids; what wraps this runs strictly.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(*args, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(*args, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer.

    Attributes:
      make: builds it.
      extra_args: what ``update`` takes beside params, from params and gradients.
      debug_nans: when the bare optimizer runs under ``jax_debug_nans``: "always",
        "jitted" (run op by op it divides 0 by 0 and drops the result) or "never" (it
        writes NaN as a constant).
    """

    make: Callable[[], Any]
    extra_args: Callable[[Any, Any], dict[str, Any]] = no_extra_args
    debug_nans: str = "always"


# The learning rate is all that these need.
ALIASES = [
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw"),
    *("adamw", "adan", "amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw"),
    *("novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
]
CONTRIB = [
    *("acprop", "ademamix", "adopt", "galore", "madgrad", "muon"),
    "simplified_ademamix",
]


def deprecated_optimistic_adam():
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return optax.optimistic_adam(1e-2, optimism=0.1)


OPTIMIZERS = {
    **{name: Case(lambda name=name: getattr(optax, name)(1e-2)) for name in ALIASES},
    **{
        f"contrib.{name}": Case(lambda name=name: getattr(contrib, name)(1e-2))
        for name in CONTRIB
    },
    "sgd, momentum": Case(lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "adamw, schedule": Case(lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "adam, bfloat16 mu": Case(lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16)),
    "optimistic_adam": Case(deprecated_optimistic_adam),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0))),
    "add_noise": Case(lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(1))),
    "lbfgs": Case(lambda: optax.lbfgs(1e-2), line_search, debug_nans="jitted"),
    "polyak_sgd": Case(lambda: optax.polyak_sgd(1e-2), loss_value),
    "contrib.cocob": Case(contrib.cocob),
    "contrib.dadapt_adamw": Case(contrib.dadapt_adamw),
    "contrib.dog": Case(contrib.dog),
    "contrib.dowg": Case(contrib.dowg),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.sgd(1e-2))),
    "contrib.momo": Case(lambda: contrib.momo(1e-2), loss_value),
    "contrib.momo_adam": Case(lambda: contrib.momo_adam(1e-2), loss_value),
    "contrib.prodigy": Case(contrib.prodigy),
    "contrib.sam": Case(
        lambda: contrib.sam(
            optax.sgd(1e-2), optax.chain(contrib.normalize(), optax.sgd(0.1))
        )
    ),
    "contrib.schedule_free": Case(
        lambda: contrib.schedule_free(optax.sgd(1e-2), 1e-2), debug_nans="never"
    ),
    "contrib.schedule_free_adamw": Case(
        lambda: contrib.schedule_free_adamw(1e-2), debug_nans="never"
    ),
    "contrib.schedule_free_sgd": Case(
        lambda: contrib.schedule_free_sgd(1e-2), debug_nans="never"
    ),
    "contrib.sophia": Case(lambda: contrib.sophia(1e-2), hessian_function),
}

# Each kind of state and of extra argument, but for random keys and for the line search
# of lbfgs, which take seconds to compile.
QUICK = (
    *("adam", "adamw, schedule", "adam, bfloat16 mu", "adafactor", "lion", "sgd"),
    *("rprop", "polyak_sgd", "contrib.muon", "contrib.sam", "contrib.sophia"),
    "contrib.schedule_free_adamw",
)
MARKED = {p.id: p for p in mostly_slow(OPTIMIZERS, QUICK)}


def param(name, *values):
    """Returns the parameters of a test of one optimizer: slow if the table's is."""
    marks = MARKED[name].marks if name in MARKED else ()
    return pytest.param(name, *values, marks=marks, id="-".join([name, *values]))


each_optimizer = pytest.mark.parametrize("name", [*map(param, OPTIMIZERS)])


def each_in_turn(*ways):
    """Returns the parameters of a test: each optimizer once, the ways in turn."""
    return [
        param(name, *way)
        for name, way in zip(OPTIMIZERS, itertools.cycle(ways), strict=False)
    ]
