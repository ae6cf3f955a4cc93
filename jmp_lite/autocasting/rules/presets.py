"""The presets: rules with names."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jax.typing import DTypeLike

from jmp_lite.autocasting.rules.rules import (
    HALF_OF_DEVICE,
    NORM_LAYERS,
    Rules,
)
from jmp_lite.casting.dtypes import dtype_names, unknown_name
from jmp_lite.ops import (
    GROUPS,
    Precision,
)


def get_rules(name: str, compute_dtype: DTypeLike | None = None) -> Rules:
    """Returns the rules of a preset.

    Args:
      name: one of these names.

        - ``"mixed"``: products in 16 bits, sensitive ops in float32.
        - ``"float8"``: ``"mixed"`` with matrix products in float8, see ``Float8``.
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
    if name not in PRESETS:
        if name in (HALF_OF_DEVICE, *dtype_names()):
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


def _ops_that_are(*precisions: Precision) -> list[str]:
    return [op for group in GROUPS if group.precision in precisions for op in group.ops]


_MIXED = Rules(scopes=(NORM_LAYERS,))

_O0 = Rules(default=Precision.KEEP).keep(*_ops_that_are(Precision.LOW, Precision.FULL))

# By name: with the default alone, values that only float32 ops read stay in float32.
_O3 = Rules(default=Precision.LOW).low(
    *(
        op
        for group in GROUPS
        if group.precision in (Precision.FULL, Precision.FOLLOW) and group.has_low_form
        for op in group.ops
    )
)

_MATMULS = ("dot_general", "ragged_dot_general")

# The start of Ascend's lists: float16, and no op has a precision of its own.
ALL_FOLLOW = Rules(compute_dtype="float16").follow(
    *(
        op
        for group in GROUPS
        if group.precision is not Precision.KEEP and group.has_low_form
        for op in group.ops
    )
)

PRESETS: Mapping[str, Rules] = MappingProxyType(
    {
        "mixed": _MIXED,
        "float8": _MIXED.product("float8"),
        "O0": _O0,
        "O1": Rules(default=Precision.FULL),
        "O2": Rules(default=Precision.LOW, scopes=(NORM_LAYERS,)),
        "O3": _O3,
        # PyTorch's pow is integer_pow in JAX if the exponent is an integer.
        "torch": Rules(default=Precision.WIDEST).full("integer_pow", "square"),
        "must_keep_origin_dtype": _O0,
        "allow_fp32_to_fp16": Rules(
            compute_dtype="float16", default=Precision.FULL
        ).full(*_MATMULS),
        "allow_mix_precision": _MIXED,
        "force_fp16": dataclasses.replace(_O3, compute_dtype="float16"),
    }
)
