"""Training steps to measure or to compile: models, each trained in several ways."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks import models
from benchmarks.formats.recipes import mlp

Make = Callable[..., models.Model]


class Variant(NamedTuple):
    """A way to train.

    Attributes:
      loss: from what makes a model to its loss.
      precision: the precision that products ask for.
      is_scaled: whether it trains under a loss scale.
      grad_dtype: the dtype of the gradients.
      moments: the dtype that the optimizer's moments are stored in.
    """

    loss: Callable[[Make], Any]
    precision: str = "default"
    is_scaled: bool = False
    grad_dtype: str = "float32"
    moments: str = "float32"


def _by_policy(make: Make) -> Any:
    """The loss of cast parameters and a cast batch, as users of jmp write it."""
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    loss = make(None).loss

    def in_policy(params: Any, batch: Any) -> Any:
        return policy.cast_to_output(loss(*policy.cast_to_compute((params, batch))))

    return in_policy


def _by_autocast(dtype: str, rules: jmp.Rules | str = "mixed") -> Callable[[Make], Any]:
    return lambda make: jmp.autocast(make(None).loss, rules, compute_dtype=dtype)


def _by_format(name: str) -> Callable[[Make], Any]:
    return _by_autocast("bfloat16", jmp.get_rules("mixed").product(name))


def _as_it_is(make: Make) -> Any:
    return make(None).loss


# What matters most first: there may be no time for all of them.
VARIANTS: Mapping[str, Variant] = {
    "float32 highest": Variant(_as_it_is, "highest"),
    "bfloat16 by hand": Variant(lambda make: make(jnp.bfloat16).loss),
    "bfloat16, autocast": Variant(_by_autocast("bfloat16")),
    "float16, with loss scaling": Variant(_by_autocast("float16"), is_scaled=True),
    "float16, autocast": Variant(_by_autocast("float16")),
    "float32 default": Variant(_as_it_is),
    "bfloat16, jmp's policy": Variant(_by_policy),
    "bfloat16, 16-bit gradients": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16"
    ),
    "bfloat16, 16-bit moments": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16", moments="bfloat16"
    ),
    "bfloat16, 8-bit moments": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16", moments="float8_e4m3fn"
    ),
}
LEAN = (
    "bfloat16, 16-bit gradients",
    "bfloat16, 16-bit moments",
    "bfloat16, 8-bit moments",
)
"""Those that need less memory for gradients and moments."""
BASE = "float32 highest"
FORMATS: Mapping[str, Variant] = {
    "O1": Variant(_by_autocast("bfloat16", "O1")),
    **{name: Variant(_by_format(name)) for name in ("float8", "float8_rows", "int8")},
}
"""Another preset, and other number formats of products."""


class Size(NamedTuple):
    """A model to train: what makes it for a batch, and how many make a batch."""

    make: Callable[..., models.Model]
    batch: int


def transformer(dtype: Any, batch: int, length: int = 1024, **size: Any) -> Any:
    """Returns a transformer for a batch of sequences of a length."""
    return models.transformer(dtype, batch=(batch, length), **size)


def mlp_blocks(dtype: Any, batch: int, width: int = 4096) -> models.Model:
    """Returns two residual MLP blocks and a head, for some rows."""
    of_blocks = mlp(lambda x, w: x @ models.cast_low(w, dtype))

    def loss(params: Any, x: Any) -> Any:
        return of_blocks(*params, models.cast_low(x, dtype))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = array(width, 4 * width), array(4 * width, width)
    return models.Model(loss, ([block] * 2, array(width, 256)), array(batch, width))


def _lstm(dtype: Any, batch: int, length: int = 256, **size: Any) -> Any:
    return models.lstm(dtype, batch=(batch, length), **size)


MODELS: Mapping[str, Size] = {
    "transformer (GPT-2 small)": Size(functools.partial(transformer, depth=12), 8),
    "ResNet-50, 224 x 224": Size(models.resnet50, 128),
    "LSTM, 1024 wide": Size(_lstm, 64),
}
TINY: Mapping[str, Size] = {
    "transformer (GPT-2 small)": Size(
        functools.partial(
            transformer, depth=1, width=16, heads=2, vocabulary=32, length=8
        ),
        2,
    ),
    "ResNet-50, 224 x 224": Size(
        functools.partial(models.resnet50, size=32, width=4, stages=(1, 1)), 2
    ),
    "LSTM, 1024 wide": Size(functools.partial(_lstm, width=8, length=4), 2),
}


def make_optimizer(variant: Variant) -> Any:
    """Returns the optimizer of a variant."""
    optimizer = optax.adamw(1e-4)
    if variant.moments != "float32":
        key = jax.random.key(0)
        optimizer = jmp.low_precision_state(optimizer, variant.moments, key=key)
    return jmp.loss_scaling(optimizer) if variant.is_scaled else optimizer


def make_step(variant: Variant, make: Make) -> Callable[..., Any]:
    """Returns the training step of a variant."""
    loss, optimizer = variant.loss(make), make_optimizer(variant)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.default_matmul_precision(variant.precision):
            scale = jmp.NoOpLossScale()
            if variant.is_scaled:
                scale = jmp.get_loss_scale(opt_state)
            grad_fn = jmp.value_and_grad(
                loss, loss_scale=scale, grad_dtype=variant.grad_dtype
            )
            value, grads = grad_fn(params, batch)
        grads = jmp.cast_to_full(grads)  # The optimizer computes in float32.
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def step_and_shapes(variant: Variant, size: Size, batch: int) -> tuple[Any, ...]:
    """Returns the training step of a variant, and the shapes of its arguments."""
    make = functools.partial(size.make, batch=batch)
    model = make(None)
    opt_state = jax.eval_shape(make_optimizer(variant).init, model.params)
    return make_step(variant, make), model.params, opt_state, model.batch
