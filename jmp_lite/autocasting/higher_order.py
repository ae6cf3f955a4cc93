"""One handler per primitive that holds a jaxpr: it is converted and bound again.

The law of this file: a jaxpr is converted for exactly the dtypes that it will be bound
to, because JAX does not check them. What has no handler here is kept as traced.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jmp_lite.autocasting import compat, loops
from jmp_lite.autocasting.demand import Readers
from jmp_lite.autocasting.values import Kind, Spec, State, Value

Walk = Any  # The interpreter's, which imports this file.


class Call(NamedTuple):
    """An equation that holds a jaxpr, and where and on what it is met.

    Attributes:
      eqn: the equation.
      operands: what stands for its operands.
      wanted: the readers of its results.
      path: the scopes that it stands in.
    """

    eqn: Any
    operands: Sequence[Value]
    wanted: Sequence[Readers]
    path: str


# --------------------------------------------------------------------- conversion


def convert(
    walk: Walk,
    jaxpr: Any,
    operands: Sequence[Value],
    wanted: Sequence[Readers],
    path: str,
    name: str = "",
    forced: tuple[Spec, ...] | None = None,
) -> tuple[Any, tuple[Spec, ...]]:
    """Returns a closed jaxpr in mixed precision and what its results are.

    The same jaxpr under the same rules, operands and readers is converted once, so that
    a block which is called many times is lowered once.

    Args:
      walk: the walk that comes to it.
      jaxpr: the jaxpr, closed or open.
      operands: what it will be bound to.
      wanted: the readers of its results.
      path: the scopes that the equation stands in which holds it.
      name: the scope that it is itself, if it has a name.
      forced: what its results have to be; None for what they become.
    """
    inside, region = join(path, name), walk.rules.region_in(path)
    states = tuple(value.spec for value in operands)
    said = walk.said_inside(jaxpr, inside)
    key = (id(jaxpr), states, tuple(wanted), said, region is None, forced)
    if key not in walk.memo:
        found: list[Spec] = []

        def run(*arrays: Any) -> list[Any]:
            values = _values(arrays, states)
            results = walk.run(jaxpr, values, wanted, inside, region)
            found[:] = forced or [value.spec for value in results]
            return _as_specs(walk, results, found)

        avals = [
            compat.retyped(var.aval, walk.low_dtype) if state is State.LOW else var.aval
            for var, (state, _) in zip(compat.parts(jaxpr).invars, states, strict=True)
        ]
        converted = compat.trace(run, avals, jaxpr)
        # The jaxpr is kept with the answer, so that its id stays its own.
        walk.memo[key] = (jaxpr, converted, tuple(found))
    return walk.memo[key][1:]


def join(*names: str) -> str:
    """Returns a path of those names that there are."""
    return "/".join(filter(None, names))


def _values(arrays: Sequence[Any], specs: Sequence[Spec]) -> list[Value]:
    return [Value(array, *spec) for array, spec in zip(arrays, specs, strict=True)]


def _arrays(operands: Sequence[Value]) -> list[Any]:
    return [value.array for value in operands]


def _as_spec(walk: Walk, value: Value, spec: Spec) -> Any:
    return walk.low(value) if spec[0] is State.LOW else walk.full(value)


def _as_specs(walk: Walk, values: Sequence[Value], specs: Sequence[Spec]) -> list[Any]:
    return [_as_spec(walk, v, spec) for v, spec in zip(values, specs, strict=True)]


def _join_all(rows: Sequence[Sequence[Spec]]) -> tuple[Spec, ...]:
    return tuple(_join(column) for column in zip(*rows, strict=True))


def _join(specs: Sequence[Spec]) -> Spec:
    states = [state for state, _ in specs if state is not None]
    kinds = {kind for _, kind in specs}
    return max(states, default=None), kinds.pop() if len(kinds) == 1 else Kind.COMPUTED


def _kept(walk: Walk, call: Call) -> list[Value]:
    arrays = compat.bind(call.eqn, [walk.full(value) for value in call.operands])
    return [
        Value(array, State.HARD if compat.is_float32(var) else None)
        for var, array in zip(call.eqn.outvars, arrays, strict=True)
    ]


# ------------------------------------------------------------ calls and branches


def _jit(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    name = eqn.params["name"]
    jaxpr, specs = convert(walk, eqn.params["jaxpr"], operands, wanted, path, name)
    return _values(compat.bind(eqn, _arrays(operands), jaxpr=jaxpr), specs)


def _remat(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    jaxpr, specs = convert(walk, eqn.params["jaxpr"], operands, wanted, path)
    jaxpr = compat.without_consts(jaxpr)
    return _values(compat.bind(eqn, _arrays(operands), jaxpr=jaxpr), specs)


def _cond(walk: Walk, call: Call) -> list[Value]:
    eqn, (index, *operands), wanted, path = call

    def all_branches(forced: tuple[Spec, ...] | None = None) -> list[Any]:
        return [
            convert(walk, branch, operands, wanted, path, forced=forced)
            for branch in eqn.params["branches"]
        ]

    joined = _join_all([specs for _, specs in all_branches()])
    branches = tuple(jaxpr for jaxpr, _ in all_branches(joined))
    arrays = compat.bind(eqn, [index.array, *_arrays(operands)], branches=branches)
    return _values(arrays, joined)


def _shard_map(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    jaxpr, region = eqn.params["jaxpr"], walk.rules.region_in(path)
    states, found = [value.spec for value in operands], list[Spec]()

    def run(*arrays: Any) -> list[Any]:
        results = walk.run(jaxpr, _values(arrays, states), wanted, path, region)
        found[:] = [value.spec for value in results]
        return _arrays(results)

    mapped = jax.shard_map(run, **compat.shard_map_arguments(eqn))
    return _values(mapped(*_arrays(operands)), found)


# ------------------------------------------------------------------------- loops


def _scan(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    body = eqn.params["jaxpr"]
    n_consts, n_carry = compat.scan_counts(eqn)
    carries = slice(n_consts, n_consts + n_carry)
    # What the next step reads of a carry, anything may.
    readers = [*[Readers.OTHER] * n_carry, *wanted[n_carry:]]
    last_is_read = [not one.want_float32 for one in wanted[:n_carry]]
    slots = loops.classify(
        walk.rules, walk.precision, body, n_consts, last_is_read, path
    )
    specs = [
        _carry(value, slot is not loops.Slot.FULL)
        for value, slot in zip(operands[carries], slots, strict=True)
    ]
    while True:
        values = list(operands)
        values[carries] = _recast(walk, operands[carries], specs)
        _, found = convert(walk, body, values, readers, path)
        raised = [
            _raised(spec, slot, result)
            for spec, slot, result in zip(specs, slots, found[:n_carry], strict=True)
        ]
        if raised == specs:
            break
        specs = raised
    forced = (*specs, *found[n_carry:])
    jaxpr, _ = convert(walk, body, values, readers, path, forced=forced)
    return _values(compat.bind(eqn, _arrays(values), jaxpr=jaxpr), forced)


def _while(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, _, path = call
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if loops.ends_by_a_float(cond, n_cond, body, n_body):
        return _kept(walk, call)
    start = operands[n_cond + n_body :]
    specs = [_carry(value, False) for value in start]
    carry = _recast(walk, start, specs)
    of_cond, of_body = operands[:n_cond], operands[n_cond : n_cond + n_body]
    others = [Readers.OTHER] * len(carry)
    test, _ = convert(walk, cond, [*of_cond, *carry], [Readers.OTHER], path)
    step, _ = convert(walk, body, [*of_body, *carry], others, path, forced=tuple(specs))
    arrays = _arrays([*of_cond, *of_body, *carry])
    return _values(compat.bind(eqn, arrays, cond_jaxpr=test, body_jaxpr=step), specs)


def _carry(value: Value, is_low: bool) -> Spec:
    if value.state is None:
        return None, Kind.COMPUTED
    return (State.LOW if is_low else State.HARD), Kind.COMPUTED


def _raised(spec: Spec, slot: loops.Slot, result: Spec) -> Spec:
    """Returns what a carry is, given what the body makes of it."""
    is_hard = slot is loops.Slot.FOLLOW and result[0] is State.HARD
    return (State.HARD, Kind.COMPUTED) if is_hard else spec


def _recast(walk: Walk, values: Sequence[Value], specs: Sequence[Spec]) -> list[Value]:
    return _values(_as_specs(walk, values, specs), specs)


# ---------------------------------------------------------- custom derivative rules


def _custom_jvp(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    jaxpr, region = eqn.params["call_jaxpr"], walk.rules.region_in(path)
    if "_custom_root" in compat.name_of(jaxpr):
        return _kept(walk, call)
    states = [value.spec for value in operands]
    specs = convert(walk, jaxpr, operands, wanted, path)[1]

    def replace(fun: Callable[..., Any], jvp: Callable[..., Any]) -> Any:
        del fun  # It evaluates the jaxpr.

        def low_fun(*arrays: Any) -> list[Any]:
            results = walk.run(jaxpr, _values(arrays, states), wanted, path, region)
            return _as_specs(walk, results, specs)

        def low_jvp(*arrays: Any) -> list[Any]:
            tangents = [(state, Kind.COMPUTED) for state, _ in states]
            avals = 2 * [var.aval for var in compat.parts(jaxpr).invars]
            values = _values(arrays, [*states, *tangents])
            out = _follow(walk, jvp, values, avals, jaxpr, path)
            return [_out(walk, o, s) for o, s in zip(out, 2 * specs, strict=True)]

        return low_fun, low_jvp

    return _values(compat.bind_custom(eqn, _arrays(operands), replace), specs)


def _custom_vjp(walk: Walk, call: Call) -> list[Value]:
    """Binds it to the dtypes it was traced with; its functions are low inside."""
    eqn, operands, _, path = call
    jaxpr = eqn.params["call_jaxpr"]
    avals = [var.aval for var in compat.parts(jaxpr).invars]
    states = [value.spec for value in operands]
    others = [Readers.OTHER] * len(eqn.outvars)
    specs = convert(walk, jaxpr, operands, others, path)[1]

    def entering(arrays: Sequence[Any]) -> list[Value]:
        """A low operand was raised to be bound: it loses nothing by going back."""
        full = _values(arrays, [(s and min(s, State.SOFT), k) for s, k in states])
        return _recast(walk, full, states)

    def replace(fun: Any, fwd: Any, bwd: Any) -> Any:
        def low_fun(*arrays: Any) -> list[Any]:
            out = _follow(walk, fun, entering(arrays), avals, jaxpr, path)
            return [_out(walk, o, (State.HARD, Kind.COMPUTED)) for o in out]

        def low_fwd(*args: Any) -> list[Any]:
            # Each operand is followed by whether it is differentiated.
            def called(*arrays: Any) -> Any:
                pairs = zip(arrays, args[1::2], strict=True)
                return fwd(*(item for pair in pairs for item in pair))

            out = _follow(walk, called, entering(args[::2]), avals, jaxpr, path)
            return [_out(walk, o, (State.HARD, Kind.COMPUTED)) for o in out]

        def low_bwd(*args: Any) -> Any:
            types = [a.aval if _is_zero(a) else jax.typeof(a) for a in args]
            values = [
                Value(a, State.SOFT if t.dtype == jax.numpy.float32 else None)
                for a, t in zip(args, types, strict=True)
            ]
            structure = list[Any]()

            def flat(*arrays: Any) -> list[Any]:
                leaves, tree = jax.tree.flatten(bwd(*arrays))
                structure[:] = [tree]
                return leaves

            out = _follow(walk, flat, values, types, jaxpr, path)
            full = [_out(walk, o, (State.HARD, Kind.COMPUTED)) for o in out]
            return jax.tree.unflatten(structure[0], full)

        return low_fun, low_fwd, low_bwd

    full = [walk.full(value) for value in operands]
    raised = _values(compat.bind_custom(eqn, full, replace), [(s, k) for s, k in specs])
    soft = [Value(v.array, v.state and State.SOFT, v.kind) for v in raised]
    return _recast(walk, soft, specs)


def _follow(
    walk: Walk,
    fun: Callable[..., Any],
    values: Sequence[Value],
    avals: Sequence[Any],
    like: Any,
    path: str,
) -> list[Any]:
    """Runs a function of a derivative rule under the rules.

    It is traced with the types it was written for, then walked. Symbolic zeros and
    whatever is no array reach it, and leave it, as they are.

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
        is_array = [isinstance(item, jax.Array) for item in out]
        others[:] = [
            None if yes else item for item, yes in zip(out, is_array, strict=True)
        ]
        return [item for item, yes in zip(out, is_array, strict=True) if yes]

    jaxpr = compat.trace(traced, [avals[i] for i in live], like)
    readers = [Readers.OTHER] * len(compat.parts(jaxpr).outvars)
    region = walk.rules.region_in(path)
    results = iter(walk.run(jaxpr, [values[i] for i in live], readers, path, region))
    return [next(results) if item is None else item for item in others]


def _out(walk: Walk, item: Any, spec: Spec) -> Any:
    if isinstance(item, Value):
        return _as_spec(walk, item, spec)
    if _is_zero(item) and spec[0] is State.LOW:
        return type(item)(compat.retyped(item.aval, walk.low_dtype))
    return item


def _is_zero(array: Any) -> bool:
    return type(array).__name__ == "SymbolicZero"


HANDLERS: Mapping[str, Callable[[Walk, Call], list[Value]]] = MappingProxyType(
    {
        "jit": _jit,
        "checkpoint": _remat,
        "remat": _remat,
        "remat2": _remat,
        "cond": _cond,
        "shard_map": _shard_map,
        "scan": _scan,
        "while": _while,
        "custom_jvp_call": _custom_jvp,
        "custom_vjp_call": _custom_vjp,
    }
)
