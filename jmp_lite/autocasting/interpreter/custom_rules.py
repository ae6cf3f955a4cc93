"""Functions with derivative or batching rules of their own.

The function and its rules are converted inside, and see the dtypes that they were
traced with.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp_lite.autocasting.interpreter.conversion import (
    Call,
    Walk,
    arrays_of,
    as_spec,
    as_specs,
    as_values,
    convert,
    keep,
    results_of_call,
)
from jmp_lite.autocasting.interpreter.decide import decide_to_keep
from jmp_lite.autocasting.interpreter.values import Kind, Readers, Spec, State, Value
from jmp_lite.autocasting.jaxprs import compat


def run_custom_jvp(walk: Walk, call: Call) -> list[Value]:
    """Binds a function with a ``jvp`` rule, both converted inside."""
    eqn, operands, wanted, path = call
    jaxpr = compat.called(eqn)
    if decision := decide_to_keep(walk.at, eqn, path):
        return keep(walk, call, decision)
    states = [value.spec for value in operands]
    inside = convert(walk, jaxpr, operands, wanted, path)
    specs = inside.specs

    def replace(fun: Callable[..., Any], jvp: Callable[..., Any]) -> Any:
        del fun  # It evaluates the jaxpr.

        def low_fun(*arrays: Any) -> list[Any]:
            return compat.evaluate(inside.jaxpr, arrays)

        def low_jvp(*arrays: Any) -> list[Any]:
            tangents = [(state, Kind.COMPUTED) for state, _ in states]
            avals = 2 * [var.aval for var in compat.parts(jaxpr).invars]
            values = as_values(arrays, [*states, *tangents])
            out = _follow(walk, jvp, values, avals, jaxpr, path)
            return [_out(walk, o, s) for o, s in zip(out, 2 * specs, strict=True)]

        return low_fun, low_jvp

    with walk.recording():  # It is recorded already.
        arrays = compat.bind_custom(eqn, arrays_of(operands), replace)
    return results_of_call(walk, call, arrays, inside)


def run_custom_vjp(walk: Walk, call: Call) -> list[Value]:
    """Binds it to what its operands are held in; each function is low inside.

    What waits for the backward pass waits in the dtype that it has there.
    """
    eqn, operands, wanted, path = call
    jaxpr = compat.called(eqn)
    avals = [var.aval for var in compat.parts(jaxpr).invars]
    states = tuple(value.spec for value in operands)
    inside = convert(walk, jaxpr, operands, wanted, path)
    specs = inside.specs
    n_out = len(specs)
    # Of each residual that is no operand: what it is, or None for a number.
    computed: list[Spec | None] = []

    def replace(fun: Any, fwd: Any, bwd: Any) -> Any:
        del fun  # It evaluates the jaxpr.

        def low_fun(*arrays: Any) -> list[Any]:
            return compat.evaluate(inside.jaxpr, arrays)

        def low_fwd(*args: Any) -> list[Any]:
            # Each operand is followed by whether it is differentiated.
            def flat(*arrays: Any) -> Any:
                pairs = zip(arrays, args[1::2], strict=True)
                out = fwd(*(item for pair in pairs for item in pair))
                n_kept = len(out) - n_out
                return [*map(_boxed, out[:n_kept]), *out[n_kept:]]

            values = as_values(args[::2], states)
            out = _follow(walk, flat, values, avals, jaxpr, path, wanted)
            kept, results = out[: len(out) - n_out], out[len(out) - n_out :]
            is_value = [isinstance(v, Value) for v in kept]
            computed[:] = [
                (v.state, Kind.COMPUTED) if yes else None
                for v, yes in zip(kept, is_value, strict=True)
            ]
            arrays = [
                v.array if yes else v.number
                for v, yes in zip(kept, is_value, strict=True)
            ]
            return arrays + as_specs(walk, results, specs)

        def low_bwd(*args: Any) -> Any:
            held = compat.forwarded_residuals(eqn, len(computed))
            fresh = iter(computed)
            kept = [next(fresh) if i is None else states[i] for i in held]
            given = [*kept, *((s, Kind.COMPUTED) for s, _ in specs)]
            # Python numbers are not traced, because bwd may branch on them.
            is_array = [spec is not None for spec in given]
            arrays = [arg for arg, yes in zip(args, is_array, strict=True) if yes]
            values = as_values(arrays, [spec for spec in given if spec is not None])
            structure: list[Any] = []

            def flat(*arrays: Any) -> list[Any]:
                left = iter(arrays)
                every = [
                    next(left) if yes else arg
                    for arg, yes in zip(args, is_array, strict=True)
                ]
                leaves, tree = jax.tree.flatten(bwd(*every), _is_any_zero)
                structure[:] = [tree]
                return leaves

            types = [_type_as_traced(value) for value in values]
            grads = _follow(walk, flat, values, types, jaxpr, path)
            # JAX puts what it tells of a backward pass behind the gradients.
            grads[: len(states)] = [
                _out(walk, grad, spec)
                for grad, spec in zip(grads[: len(states)], states, strict=True)
            ]
            rest = [v.array if isinstance(v, Value) else v for v in grads]
            return jax.tree.unflatten(structure[0], rest)

        return low_fun, low_fwd, low_bwd

    with walk.recording():  # It is recorded already.
        arrays = compat.bind_custom(eqn, arrays_of(operands), replace)
    return results_of_call(walk, call, arrays, inside)


def run_custom_vmap(walk: Walk, call: Call) -> list[Value]:
    """Binds a function with a rule for ``vmap``, which is low inside too."""
    eqn, operands, wanted, path = call
    jaxpr, states = compat.called(eqn), [value.spec for value in operands]
    inside = convert(walk, jaxpr, operands, wanted, path)

    def low_rule(batched: Callable[..., Any], *arrays: Any) -> list[Any]:
        values = as_values(arrays, states)
        types = [_type_as_traced(value) for value in values]
        out = _follow(walk, batched, values, types, jaxpr, path)
        return as_specs(walk, out, inside.specs)

    arrays = compat.bind_custom_vmap(eqn, arrays_of(operands), inside.jaxpr, low_rule)
    return results_of_call(walk, call, arrays, inside)


def _type_as_traced(value: Value) -> Any:
    aval = value.array.aval if _is_zero(value.array) else jax.typeof(value.array)
    return aval if value.state is None else compat.retyped(aval, "float32")


def _follow(
    walk: Walk,
    fun: Callable[..., Any],
    values: Sequence[Value],
    avals: Sequence[Any],
    like: Any,
    path: str,
    wanted: Sequence[Readers] = (),
) -> list[Any]:
    """Runs a function of a derivative rule under the rules.

    It is traced with the types it was written for, then walked. Symbolic zeros and
    whatever is no array reach it, and leave it, as they are.

    Args:
      walk: the walk that comes to it.
      fun: takes arrays and symbolic zeros, and returns a list.
      values: what it is called on.
      avals: the types that it was written for.
      like: the jaxpr that it belongs to.
      path: the scopes that it stands in.
      wanted: the readers of its last results; anything may read those before.

    Returns:
      A ``Value`` for each array that ``fun`` returns, everything else as it came.
    """
    live = [i for i, value in enumerate(values) if not _is_zero(value.array)]
    others: list[Any] = []

    def traced(*arrays: Any) -> list[Any]:
        full = [
            type(value.array)(compat.retyped(value.array.aval, aval.dtype))
            if _is_zero(value.array)
            else None
            for value, aval in zip(values, avals, strict=True)
        ]
        for i, array in zip(live, arrays, strict=True):
            full[i] = array
        out = list(fun(*full))
        others[:] = [None if _is_array(item) else item for item in out]
        return [item for item in out if _is_array(item)]

    jaxpr = compat.trace(traced, [avals[i] for i in live], like)
    n_before = len(compat.parts(jaxpr).outvars) - len(wanted)
    readers = [*[Readers.OTHER] * n_before, *wanted]
    region = walk.at.region(path)
    results = iter(walk.run(jaxpr, [values[i] for i in live], readers, path, region))
    return [next(results) if item is None else item for item in others]


def _out(walk: Walk, item: Any, spec: Spec) -> Any:
    if isinstance(item, Value):
        return as_spec(walk, item, spec)
    if _is_any_zero(item) and spec[0] is State.LOW:
        return type(item)(compat.retyped(item.aval, walk.casts.low_dtype))
    return item


class _PythonNumber(NamedTuple):
    """A Python number among residuals, on which the backward function may branch."""

    number: Any


def _boxed(item: Any) -> Any:
    is_number = isinstance(item, bool | int | float | complex)
    return _PythonNumber(item) if is_number else item


def _is_any_zero(item: Any) -> bool:
    return type(item).__name__ in ("SymbolicZero", "Zero")


def _is_zero(array: Any) -> bool:
    return type(array).__name__ == "SymbolicZero"


def _is_array(item: Any) -> bool:
    """Whether an item is an array or a typed number, and no symbolic zero."""
    return hasattr(item, "dtype") and not _is_any_zero(item)
