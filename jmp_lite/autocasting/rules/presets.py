"""The presets: rules with names."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.rules import (
    HALF_OF_DEVICE,
    Rules,
)
from jmp_lite.casting.dtypes import (
    Device,
    Policy,
    default_device,
    dtype_names,
    parse_dtype,
    unknown_name,
)
from jmp_lite.jaxprs import source
from jmp_lite.mutables import check_function
from jmp_lite.ops import LOWERABLE, POWERS, Precision, ops_of


def get_rules(name: str, compute_dtype: DTypeLike | None = None) -> Rules:
    """Returns the rules of a preset.

    Args:
      name: one of these names.

        - ``"mixed"``: products in 16 bits, sensitive ops in float32.
        - ``"float8"``: ``"mixed"`` with matrix products in float8, see ``Float8``.
        - ``"int8"``: ``"mixed"`` with matrix products in int8, for a TPU v5e.
        - ``"O0"`` to ``"O3"``: MindSpore's levels.
        - ``"torch"``: PyTorch's op lists.
        - Ascend's modes ``"must_keep_origin_dtype"``, ``"allow_fp32_to_fp16"``,
          ``"allow_mix_precision"`` and ``"force_fp16"``.
      compute_dtype: the dtype of low ops. None uses the preset's own: bfloat16, or
        float16 if Ascend's name says so.

    Raises:
      ValueError: the preset or the dtype is unknown.

    Source: MindSpore ``amp.auto_mixed_precision``; PyTorch's autocast op lists;
    Ascend's precision modes.

    Example:
      >>> import jmp_lite as jmp
      >>> o1, mixed = jmp.get_rules("O1"), jmp.get_rules("mixed")
      >>> o1.precision_of("add"), mixed.precision_of("add"), mixed.compute_dtype
      (Precision.FULL, Precision.FOLLOW, dtype(bfloat16))
    """
    is_name = isinstance(name, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_name or name not in PRESETS:
        if is_name and name in (HALF_OF_DEVICE, *dtype_names()):
            raise ValueError(
                f"Expected the name of a preset, such as 'mixed', got the dtype "
                f"{name!r}. Pass compute_dtype={name!r}, or get_rules('mixed', "
                f"{name!r})."
            )
        raise unknown_name("preset", str(name), PRESETS)
    rules = PRESETS[name]
    if compute_dtype is None:
        return rules
    return dataclasses.replace(rules, compute_dtype=compute_dtype)


def check_convertible(fun: object) -> None:
    """Raises a TypeError for what is not a function, with a hint for rules."""
    hint = ""
    if isinstance(fun, str | Rules):
        is_dtype = isinstance(fun, str) and fun in dtype_names()
        keyword = "compute_dtype" if is_dtype else "rules"
        hint = f" Pass {keyword} by keyword: {keyword}={fun!r}."
    if isinstance(fun, str) and fun in _DEVICES:
        hint = " Leave the device out: autocast takes a function, wherever it runs."
    check_function(fun, hint)


_DEVICES = ("cuda", "cpu", "gpu", "tpu", "xla")
"""What PyTorch's autocast begins with."""


def choose_rules(rules: object, compute_dtype: DTypeLike | None) -> Callable[[], Rules]:
    """Checks the rules, and returns a function that returns them for a call.

    ``"half"`` depends on the device, which is known only at the call.
    """
    chosen = get_rules(rules) if isinstance(rules, str) else rules
    if not isinstance(chosen, Rules):
        hint = " Pass arguments of the function to the result: explain(fun)(x)."
        if chosen is None:
            hint = " Leave it out for 'mixed'."
        if isinstance(chosen, type | np.dtype):
            hint = " Pass a dtype as compute_dtype=..."
        if isinstance(chosen, Policy):
            hint = (
                " A policy casts whole trees, rules decide op by op. Pass its dtype as "
                f'compute_dtype="{np.dtype(chosen.compute_dtype)}".'
            )
        raise TypeError(
            "Expected the name of a preset or a Rules, got "
            f"{type(chosen).__name__}: {textwrap.shorten(repr(chosen), 80)}.{hint}"
        )
    if compute_dtype is not None:
        chosen = dataclasses.replace(chosen, compute_dtype=compute_dtype)
    return functools.partial(_on_this_device, chosen)


def _on_this_device(rules: Rules) -> Rules:
    """Returns rules with the compute dtype of the default device for ``"half"``."""
    if isinstance(rules.compute_dtype, str):  # To NumPy, "half" is float16.
        rules = dataclasses.replace(rules, compute_dtype=parse_dtype(HALF_OF_DEVICE))
    elif rules.compute_dtype == np.float16:
        warn_of_emulation(default_device())
    return rules


def warn_of_emulation(device: Device) -> None:
    """Warns if a device emulates float16, as TPUs do."""
    if device.platform == "tpu":
        source.warn(
            "A TPU emulates float16: a product has the digits of bfloat16, for more "
            "instructions, and a loss scale is needed. Use "
            'compute_dtype="bfloat16".'
        )


_MIXED = Rules()
_O0 = Rules(default=Precision.KEEP).keep(*ops_of(Precision.LOW, Precision.FULL))

# By name: with the default alone, values that only float32 ops read stay in float32.
_O3 = Rules(default=Precision.LOW).low(*LOWERABLE - ops_of(Precision.LOW))
_MATMULS = ("dot_general", "ragged_dot_general")

PRESETS: Mapping[str, Rules] = MappingProxyType(
    {
        "mixed": _MIXED,
        "float8": _MIXED.product("float8"),
        "int8": _MIXED.product("int8"),
        "O0": _O0,
        # MindSpore's white list: its operands are cast, and its result is cast back.
        "O1": Rules(default=Precision.FULL),
        "O2": Rules(default=Precision.LOW),
        "O3": _O3,
        # PyTorch's pow is integer_pow in JAX if the exponent is an integer.
        "torch": Rules(default=Precision.WIDEST).full(*POWERS),
        "must_keep_origin_dtype": _O0,
        "allow_fp32_to_fp16": Rules(
            compute_dtype="float16", default=Precision.FULL
        ).full(*_MATMULS),
        "allow_mix_precision": _MIXED,
        "force_fp16": dataclasses.replace(_O3, compute_dtype="float16"),
    }
)
