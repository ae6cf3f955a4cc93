"""Runs branches and loops: cond, scan, while, and unrolled loops."""

from collections.abc import Sequence
from typing import Any

from jmp_lite.autocasting.decide import readers as uses
from jmp_lite.autocasting.decide.decisions import DecisionRecord, RecordsInside
from jmp_lite.autocasting.decide.equation import (
    Slot,
    carry_settled,
    decide_to_keep,
)
from jmp_lite.autocasting.decide.facts import Kind, Readers, Spec, State
from jmp_lite.autocasting.decide.loop import Loop, classify
from jmp_lite.autocasting.interpreter.conversion import (
    Call,
    Converted,
    Walk,
    arrays_of,
    as_specs,
    as_values,
    convert,
    join_all,
    keep,
    origin_outside,
    results_of_call,
)
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.passes import rematerialize, scan_weight_gradients
from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.types import Eqn


def run_cond(walk: Walk, call: Call) -> list[Value]:
    """Runs the branches of a cond, and joins their results."""
    eqn, (index, *operands), result_readers, path = call

    traced = params.branches_of(eqn)
    branches = [convert(walk, each, operands, result_readers, path) for each in traced]
    joined = join_all([branch.specs for branch in branches])
    forced = dict(enumerate(joined))
    branches = [
        branch
        if branch.specs == joined
        else convert(walk, each, operands, result_readers, path, forced=forced)
        for each, branch in zip(traced, branches, strict=True)
    ]
    jaxprs = [branch.jaxpr for branch in branches]
    arrays = params.bind_cond(eqn, [index.array, *arrays_of(operands)], jaxprs)
    inner = call._replace(operands=operands)
    first, *_ = [results_of_call(walk, inner, arrays, branch) for branch in branches]
    return first


def run_scan(walk: Walk, call: Call) -> list[Value]:
    """Runs a scan, with the passes over its body."""
    eqn, operands, loop = call.eqn, list(call.operands), Loop.of_scan(call.eqn)
    n_consts, _ = params.scan_counts(eqn)
    operands[:n_consts] = [_invariant(walk, v) for v in operands[:n_consts]]
    turned, inside = _settled(walk, call._replace(operands=operands), loop)
    body, given = inside.jaxpr, arrays_of(turned.operands)
    if "rematerialize" in walk.rules.passes:
        body = rematerialize.rematerialize(inside.jaxpr, n_consts)
        walk.note_pass("rematerialize", body is not inside.jaxpr)
    scan = scan_weight_gradients.rewritten(eqn, body)
    if scan is None or "scan_weight_gradients" not in walk.rules.passes:
        arrays = params.bind_scan(eqn, given, body)
    else:
        walk.note_pass("scan_weight_gradients", True)
        arrays = scan(*given)
    return results_of_call(walk, turned, arrays, inside, params.trips(eqn))


def _settled(walk: Walk, call: Call, loop: Loop) -> tuple[Call, Converted]:
    """Returns a loop's converted body, and the call with its carries in their dtypes.

    A carry with the slot FOLLOW starts low, and is raised if the body makes it hard. A
    carry with the slot WRITTEN is low if the body writes low values into it, whatever
    its initial value is.
    """
    eqn, operands, result_readers, path = call
    numbers, n_carry = list(loop.carries), len(loop.carries)
    at = slice(numbers[0], numbers[0] + n_carry) if numbers else slice(0)
    is_read = uses.are_read(result_readers[:n_carry])
    carries = classify(walk.at, loop, is_read, path)
    readers = [*uses.of_carries(carries), *result_readers[n_carry:]]
    specs = [
        _carry(value, slot is not Slot.FULL)
        for value, (slot, _) in zip(operands[at], carries, strict=True)
    ]
    written = [i for i, (s, _) in enumerate(carries) if s is Slot.WRITTEN]
    if written:
        undecided = list(operands)
        soft = [
            (State.SOFT, Kind.COMPUTED) if i in written else spec
            for i, spec in enumerate(specs)
        ]
        undecided[at] = _recast(walk, operands[at], soft, eqn)
        found = convert(walk, loop.body, undecided, readers, path)
        for i in written:
            is_low = found.specs[i][0] is State.LOW
            specs[i] = _carry(operands[at][i], is_low)
    raised_by: dict[int, Any] = {}
    while True:
        values = list(operands)
        values[at] = _recast(walk, operands[at], specs, eqn)
        forced = dict(enumerate(specs))
        inside = convert(walk, loop.body, values, readers, path, forced=forced)
        raised = [
            i
            for i, (slot, _) in enumerate(carries)
            if slot in (Slot.FOLLOW, Slot.WRITTEN)
            and (specs[i][0], inside.made[i][0]) == (State.LOW, State.HARD)
        ]
        if not raised:
            break
        for i in raised:
            specs[i] = _carry(operands[at][i], False)
            raised_by[i] = origin_outside(inside.origins[i], values)
    for i, (carry, (state, _)) in enumerate(zip(carries, specs, strict=False)):
        if state is not None:
            decision = carry_settled(carry, state)
            walk.record(DecisionRecord(eqn, decision, raised_by.get(i), i))
    return call._replace(operands=values), inside


def run_while(walk: Walk, call: Call) -> list[Value]:
    """Runs a while; as traced if its condition depends on a float."""
    eqn, operands, path = call.eqn, call.operands, call.path
    if decision := decide_to_keep(walk.at, eqn, path):
        return keep(walk, call, decision)
    cond, _, n_cond, n_body = params.while_parts(eqn)
    loop = Loop.of_while(eqn)
    turned, step = _settled(walk, call._replace(operands=operands[n_cond:]), loop)
    of_cond = [*operands[:n_cond], *turned.operands[n_body:]]
    test = convert(walk, cond, of_cond, [Readers.OTHER], path)
    given = arrays_of([*operands[:n_cond], *turned.operands])
    arrays = params.bind_while(eqn, given, test.jaxpr, step.jaxpr)
    origins = [value.origin for value in of_cond]
    walk.record(RecordsInside(eqn, test.records, origins, None))
    return results_of_call(walk, turned, arrays, step, None)


def _invariant(walk: Walk, value: Value) -> Value:
    """Returns a value that every step of a loop reads: float32, cast at each use.

    Otherwise its gradient would add up in 16 bits over the steps.
    """
    if value.state is not State.LOW:
        return value
    return Value(walk.casts.full(value), State.SOFT, Kind.GIVEN, origin=value.origin)


def _carry(value: Value, is_low: bool) -> Spec:
    if value.state is None:
        return None, Kind.COMPUTED
    return (State.LOW if is_low else State.HARD), Kind.COMPUTED


def _recast(
    walk: Walk, values: Sequence[Value], specs: Sequence[Spec], loop: Eqn
) -> list[Value]:
    """Returns values cast to their specs; the loop is the origin of a changed value."""
    origins = [
        value.origin if value.state is spec[0] else loop
        for value, spec in zip(values, specs, strict=True)
    ]
    return as_values(as_specs(walk, values, specs), specs, origins)
