"""Reads and writes the fields of rules as JSON; it reads Ascend's operator lists, too.

``Rules`` checks the fields.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jmp_lite.autocasting.rules.match import AnyPrecision
from jmp_lite.casting.dtypes import unknown_name
from jmp_lite.ops import LOWERABLE, Precision, ops_of

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


def fields_for_json(
    fields: Mapping[str, Any], write: Callable[[AnyPrecision], str | dict[str, Any]]
) -> dict[str, Any]:
    """Returns the fields of rules as objects of JSON.

    Args:
      fields: the fields, by name.
      write: returns an object of JSON for a precision.
    """
    dtype = fields["compute_dtype"]  # A string for the half dtype of the device.
    return {
        "compute_dtype": dtype if isinstance(dtype, str) else np.dtype(dtype).name,
        "ops": {op: write(precision) for op, precision in fields["ops"]},
        "default": write(fields["default"]),
        "scopes": [[pattern, write(p)] for pattern, p in fields["scopes"]],
        "carries": [list(carry) for carry in fields["carries"]],
        "passes": list(fields["passes"]),
    }


def fields_in_json(text: str, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of the rules in a JSON text; see ``Rules.from_json``.

    Args:
      text: the JSON text.
      names: the names of the fields of ``Rules``.
    """
    if not isinstance(text, str | bytes | bytearray):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = " Pass json.dumps of it." if isinstance(text, dict) else ""
        raise ValueError(
            f"Expected rules as the text of JSON, got {type(text).__name__}.{hint}"
        )
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"Expected rules as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"Expected rules as a JSON object, got {type(data).__name__}.")
    if data and all(_is_ascend(entry) for entry in data.values()):
        return _from_ascend(data)
    return _from_fields(data, names)


def _is_ascend(entry: object) -> bool:
    """Whether an entry of a JSON object is in Ascend's format."""
    return isinstance(entry, dict) and "precision_reduce" in entry


def _from_ascend(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for Ascend's operator lists."""
    # They start from float16, and no op has a precision of its own.
    ops = dict.fromkeys(LOWERABLE - ops_of(Precision.FOLLOW), Precision.FOLLOW)
    scopes = list[tuple[str, Precision]]()
    without_counterpart = list[str]()
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
            scopes.append((op.removeprefix("scope:"), precision))
        else:
            ops[op] = precision
    if without_counterpart:
        warnings.warn(
            "These operators have no counterpart in JAX and are ignored: "
            f"{', '.join(without_counterpart)}.",
            stacklevel=4,
        )
    return {"compute_dtype": "float16", "ops": tuple(ops.items()), "scopes": scopes}


def _from_fields(data: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that ``Rules.to_json`` writes."""
    for name in data:
        if name not in names:
            raise unknown_name("field of rules", name, names)
    ops = data.get("ops", {})
    if not isinstance(ops, dict):
        raise ValueError(f"Expected ops as a JSON object, got {type(ops).__name__}.")
    fields: dict[str, Any] = {**data, "ops": tuple(ops.items())}
    for name in ("scopes", "carries"):
        pairs = data.get(name, [])
        is_list = isinstance(pairs, list)
        if not (is_list and all(isinstance(p, list) and len(p) == 2 for p in pairs)):
            raise ValueError(
                f"Expected {name} as a list of pairs [pattern, "
                f"precision], got {pairs!r}."
            )
        fields[name] = tuple(map(tuple, pairs))
    return fields
