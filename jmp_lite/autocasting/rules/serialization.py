"""Reads rules from JSON: the library's own format, and Ascend's operator lists."""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import Any

from jmp_lite.autocasting.rules.presets import (
    ALL_FOLLOW,
)
from jmp_lite.autocasting.rules.rules import (
    Rules,
)
from jmp_lite.casting.dtypes import unknown_name
from jmp_lite.ops import Precision

# JAX's ops by the names of Ascend's operators. A layer is many ops in JAX, so its name
# becomes a scope.
ASCEND_OPS = {
    "MatMul": "dot_general",
    "MatMulV2": "dot_general",
    "MatMulV3": "dot_general",
    "BatchMatMul": "dot_general",
    "BatchMatMulV2": "dot_general",
    "Conv2D": "conv_general_dilated",
    "Conv3D": "conv_general_dilated",
    "DepthwiseConv2D": "conv_general_dilated",
    "Add": "add",
    "AddV2": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "RealDiv": "div",
    "Maximum": "max",
    "Minimum": "min",
    "Exp": "exp",
    "Expm1": "expm1",
    "Log": "log",
    "Log1p": "log1p",
    "Pow": "pow",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Square": "square",
    "Tanh": "tanh",
    "Sigmoid": "logistic",
    "Erf": "erf",
    "Sin": "sin",
    "Cos": "cos",
    "ReduceSum": "reduce_sum",
    "ReduceSumD": "reduce_sum",
    "ReduceProd": "reduce_prod",
    "ReduceMax": "reduce_max",
    "ReduceMin": "reduce_min",
    "Cumsum": "cumsum",
    "Select": "select_n",
    "Concat": "concatenate",
    "ConcatD": "concatenate",
    "Transpose": "transpose",
    "GatherV2": "gather",
    "BiasAdd": "add",
    "ReduceMean": "reduce_sum",
    "ReduceMeanD": "reduce_sum",
    "MaxPool": "reduce_window_max",
    "MaxPoolV2": "reduce_window_max",
    "AvgPool": "reduce_window_sum",
    "Relu": "scope:(^|/)relu(/|$)",
    "Gelu": "scope:gelu",
    "BatchNorm": "scope:BatchNorm",
    "LayerNorm": "scope:LayerNorm",
    "SoftmaxV2": "scope:(?<!log_)softmax",
    "LogSoftmaxV2": "scope:log_softmax",
    "DynamicRNN": "scope:RNN|LSTM|GRU",
    "DynamicGRUV2": "scope:GRU",
}


def read_rules(text: str) -> Rules:
    """Returns the rules in a JSON text; see ``Rules.from_json``."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Expected rules as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"Expected rules as a JSON object, got {type(data).__name__}.")
    if data and all(_is_ascend(entry) for entry in data.values()):
        return _from_ascend(data)
    return _from_fields(data)


def _is_ascend(entry: Any) -> bool:
    """Whether an entry of a JSON object is in Ascend's format."""
    return isinstance(entry, dict) and "precision_reduce" in entry


def _from_ascend(data: Mapping[str, Any]) -> Rules:
    """Returns the rules for Ascend's operator lists."""
    rules, without_counterpart = ALL_FOLLOW, list[str]()
    for operator, entry in data.items():
        flag = entry["precision_reduce"]
        flag = flag.get("flag") if isinstance(flag, dict) else flag
        if flag not in ("true", "false"):
            raise ValueError(
                f'Expected the flag "true" or "false" for {operator!r}, got {flag!r}.'
            )
        precision = Precision.LOW if flag == "true" else Precision.FULL
        op = ASCEND_OPS.get(operator)
        if op is None:
            without_counterpart.append(operator)
        elif op.startswith("scope:"):
            rules = rules.scope(op.removeprefix("scope:"), precision)
        else:
            rules = dataclasses.replace(rules, ops=(*rules.ops, (op, precision)))
    if without_counterpart:
        warnings.warn(
            "These operators have no counterpart in JAX and are ignored: "
            f"{', '.join(without_counterpart)}.",
            stacklevel=4,
        )
    return rules


def _from_fields(data: Mapping[str, Any]) -> Rules:
    """Returns the rules for the fields that ``Rules.to_json`` writes."""
    names = [field.name for field in dataclasses.fields(Rules)]
    for name in data:
        if name not in names:
            raise unknown_name("field of rules", name, names)
    ops = data.get("ops", {})
    if not isinstance(ops, dict):
        raise ValueError(f"Expected ops as a JSON object, got {type(ops).__name__}.")
    fields: dict[str, Any] = {**data, "ops": tuple(ops.items())}
    for name in ("scopes", "carries"):
        pairs = data.get(name, [])
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                f"Expected {name} as a list of pairs [pattern, "
                f"precision], got {pairs!r}."
            )
        fields[name] = tuple(map(tuple, pairs))
    return Rules(**fields)
