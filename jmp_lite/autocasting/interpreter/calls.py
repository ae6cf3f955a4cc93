"""Runs equations that call one jaxpr: jit, remat, shard_map and similar."""

import jax

from jmp_lite.autocasting.decide.facts import Input, Origin, Spec
from jmp_lite.autocasting.interpreter.conversion import (
    Call,
    Converted,
    Walk,
    arrays_of,
    as_values,
    convert,
    leave_functions,
    results_of_call,
)
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.rules.rules import requested_formats
from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.types import Array


def run_jit(walk: Walk, call: Call) -> list[Value]:
    """Runs a jit-compiled function, which keeps its name and is lowered once."""
    eqn, operands, result_readers, path = call
    name = params.call_name(eqn)
    body = params.body_of(eqn)
    inside = convert(walk, body, operands, result_readers, path, name, is_call=True)
    arrays = [
        walk.casts.full(value) if i in inside.raised else value.array
        for i, value in enumerate(operands)
    ]
    results = params.bind_call(eqn, arrays, inside.jaxpr)
    return results_of_call(walk, call, results, inside)


def run_remat(walk: Walk, call: Call) -> list[Value]:
    """Runs a rematerialized function with its own policy.

    What the number formats of products name is saved too, such as float8's scales: one
    number for each operand.
    """
    eqn, operands, result_readers, path = call
    inside = convert(
        walk, params.body_of(eqn), operands, result_readers, path, is_call=True
    )
    saved = [name for one in requested_formats(walk.rules) for name in one.saved]
    arrays = params.bind_remat(eqn, arrays_of(operands), inside.jaxpr, saved)
    return results_of_call(walk, call, arrays, inside)


def run_wrapped(walk: Walk, call: Call) -> list[Value]:
    """Runs an op that only calls its jaxpr."""
    eqn, operands, result_readers, path = call
    inside = convert(
        walk, params.body_of(eqn), operands, result_readers, path, is_call=True
    )
    arrays = params.bind_call(eqn, arrays_of(operands), inside.jaxpr)
    return results_of_call(walk, call, arrays, inside)


def run_shard_map(walk: Walk, call: Call) -> list[Value]:
    """Runs the function of each device, bound again through ``jax.shard_map``."""
    eqn, operands, result_readers, path = call
    jaxpr, region = params.body_of(eqn), walk.at.region(path)
    states = [value.spec for value in operands]
    specs: list[Spec] = []
    origins: list[Origin] = []
    with walk.recording() as records:

        def run(*arrays: Array) -> list[Array]:
            values = as_values(arrays, states, [Input(i) for i in range(len(arrays))])
            results = walk.run(jaxpr, values, result_readers, path, region)
            found = leave_functions(walk, results, result_readers)
            # Not the values, whose tracers end with this trace.
            specs[:] = [value.spec for value in found]
            origins[:] = [value.origin for value in found]
            return arrays_of(found)

        mapped = jax.shard_map(run, **params.shard_map_arguments(eqn))
        arrays = mapped(*arrays_of(operands))
    as_made = tuple(specs)
    inside = Converted(jaxpr, as_made, as_made, origins, records)
    return results_of_call(walk, call, arrays, inside)
