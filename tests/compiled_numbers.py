"""Computes on the CPU what a program computes that was compiled for another device.

XLA's passes for a GPU or a TPU may remove a rounding that a program asks for, or add in
float32 what is written in 16 bits. Their result is text, and the CPU runs it as it is
written: fusions as calls, and with all of its roundings.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib import _hlo, _jax, xla_client

from benchmarks.compiled import compile_for

_NOTES = re.compile(
    r", (metadata|frontend_attributes|backend_config|sharding|control-predecessors"
    r"|used_scoped_memory_configs|cross_program_prefetch_index)=\S.*"
)
_FUSION = re.compile(r"\bfusion\((.*?)\), kind=\w+,.*calls=")
_TILES = re.compile(r"\{([\d,]*):[^}]*\}")
_COPY = re.compile(r"\((\S+), [^()]*\) copy-start\(")
_TYPE = re.compile(r"(%[\w.\-]+) = (\w+)\[")
_BITCAST = re.compile(r"(ROOT |)(%[\w.\-]+) = (\w+)(\[\S+) bitcast\((%[\w.\-]+)\)")


def run_compiled_for(target: str, fun: Any, *args: Any) -> list[jax.Array]:
    """Returns the leaves of a function's result, as a target's program has them.

    Args:
      target: what the function is compiled for, see ``benchmarks.compiled``.
      fun: a function of elementwise ops, reductions and random numbers. A program with
        products calls the target's own kernels.
      *args: pytrees of arrays and keys.
    """
    text = as_plain_hlo(compile_for(target, fun, *args).text)
    proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    program = _jax.mlir.xla_computation_to_mlir_module(_hlo.XlaComputation(proto))
    options = xla_client.CompileOptions()
    options.env_option_overrides = [("xla_allow_excess_precision", False)]
    cpu = jax.devices("cpu")[0]
    executable = cpu.client.compile_and_load(program, _jax.DeviceList((cpu,)), options)
    buffers = [jax.device_put(leaf, cpu) for leaf in as_arrays(args)]
    results = executable.execute_sharded(buffers)
    return [of_one for (of_one,) in results.disassemble_into_single_device_arrays()]


def as_arrays(tree: Any) -> list[jax.Array]:
    """Returns the leaves of a pytree, and the numbers of its keys."""
    return [
        jax.random.key_data(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for leaf in jax.tree.leaves(tree)
    ]


def as_plain_hlo(text: str) -> str:
    """Returns an optimised program without what only its own compiler knows."""
    text = _NOTES.sub("", text)
    text = _FUSION.sub(r"call(\1), to_apply=", text)
    text = _TILES.sub(r"{\1}", text).replace("]{}", "]")
    text = _COPY.sub(r"\1 copy(", text).replace("copy-done(", "copy(")
    dtypes = dict(_TYPE.findall(text))

    def spelled_out(line: re.Match[str]) -> str:
        root, name, dtype, shape, operand = line.groups()
        before = dtypes[operand]
        reshaped = f"{before}{shape} reshape({operand})"
        if before == dtype:
            return f"{root}{name} = {reshaped}"
        converted = f"{dtype}{shape} bitcast-convert({name}.reshaped)"
        return f"{name}.reshaped = {reshaped}\n{root}{name} = {converted}"

    return _BITCAST.sub(spelled_out, text)
