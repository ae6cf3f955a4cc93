"""Finds the variant of a function that returns its loss in float32.

A function of 16-bit arguments may return its loss in 16 bits. Under ``autocast`` this
is the rounded value of a float32 loss, which a loss scale and a metric need. A caller
that scales the loss may also prepare the function itself, before ``autocast`` sees it.
"""

import types
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from jmp_lite.casting.types import LossFn

Prepare: TypeAlias = Callable[[LossFn], LossFn]
"""Returns a function that is called in the place of another one."""

LOSS_SCALE_SCOPE = "loss_scale"
"""The scope of the ops that scale losses and unscale gradients.

A profile shows it, and the tools find it.
"""

_NAME = "_with_float32_loss"


class _Variant(NamedTuple):
    original: weakref.ref[LossFn]
    prepared: Callable[[Prepare], LossFn]


def set_float32_loss(fun: LossFn, prepared: Callable[[Prepare], LossFn]) -> None:
    """Notes the variant of a function that returns its loss in float32.

    Args:
      fun: the function.
      prepared: returns its variant, whose original function is prepared.
    """
    setattr(fun, _NAME, _Variant(weakref.ref(fun), prepared))


def with_float32_loss(fun: LossFn, prepare: Prepare = lambda fun: fun) -> LossFn:
    """Returns the variant of a function that returns its loss in float32, or itself.

    Args:
      fun: the function.
      prepare: prepares it, or the function that ``autocast`` was given.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> loss_fn = jmp.autocast(lambda w: jnp.mean(jnp.exp(w)))
      >>> w = jnp.ones(3, "bfloat16")
      >>> loss_fn(w).dtype, with_float32_loss(loss_fn)(w).dtype
      (dtype(bfloat16), dtype('float32'))
    """
    # A function that wraps another one copies its attributes.
    found = getattr(fun, _NAME, None)
    owner = getattr(fun, "__self__", None)
    function = fun if owner is None else getattr(fun, "__func__", fun)
    if not isinstance(found, _Variant) or found.original() is not function:
        return prepare(fun)
    call = found.prepared(prepare)
    return call if owner is None else types.MethodType(call, owner)
