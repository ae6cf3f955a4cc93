"""One handler per primitive that holds a jaxpr: it is converted and bound again.

The law of this file: a jaxpr is converted for exactly the dtypes that it will be bound
to, because JAX does not check them. What has no handler here is kept as traced.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jmp_lite.autocasting import compat, demand, islands, loops, raises, weights
from jmp_lite.autocasting.decisions import Decision, Run, Told, ToldInside
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


class Converted(NamedTuple):
    """A jaxpr in mixed precision.

    Attributes:
      jaxpr: the jaxpr, closed.
      specs: what its results are.
      origins: where they come from, as ``Value.origin`` says it inside of the jaxpr.
      told: what was decided in it.
      raised: the inputs that it takes in float32 although they are low, because all
        that it does with them is to raise them.
    """

    jaxpr: Any
    specs: tuple[Spec, ...]
    origins: Sequence[Any]
    told: Sequence[Any]
    raised: frozenset[int] = frozenset()


def convert(
    walk: Walk,
    jaxpr: Any,
    operands: Sequence[Value],
    wanted: Sequence[Readers],
    path: str,
    name: str = "",
    forced: tuple[Spec, ...] | None = None,
) -> Converted:
    """Returns a jaxpr in mixed precision.

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
    inside, region = compat.join(path, name), walk.rules.region_in(path)
    states = tuple(value.spec for value in operands)
    said = walk.said_inside(jaxpr, inside)
    wanted = tuple(Readers.OTHER if r & Readers.OTHER else r for r in wanted)
    key = (id(jaxpr), states, wanted, said, region is None, forced)
    if key not in walk.memo:
        found: list[Spec] = []
        origins: list[Any] = []

        def run(*arrays: Any) -> list[Any]:
            values = _values(arrays, states, range(len(arrays)))
            results = walk.run(jaxpr, values, wanted, inside, region)
            found[:] = forced or [value.spec for value in results]
            origins[:] = [value.origin for value in results]
            return _as_specs(walk, results, found)

        avals = [
            compat.retyped(var.aval, walk.low_dtype) if state is State.LOW else var.aval
            for var, (state, _) in zip(compat.parts(jaxpr).invars, states, strict=True)
        ]
        with walk.telling() as told:
            low = compat.trace(run, avals, jaxpr)
        # Outside they are raised once, and the gradients of all uses add up in float32.
        are_low = {i for i, (state, _) in enumerate(states) if state is State.LOW}
        raised = raises.only_raised(low) & are_low if name else frozenset()
        low = raises.with_raised(low, raised)
        # The jaxpr is kept with the answer, so that its id stays its own.
        known = Converted(low, tuple(found), origins, told, raised)
        walk.memo[key] = (jaxpr, known)
    return walk.memo[key][1]


def _values(
    arrays: Sequence[Any], specs: Sequence[Spec], origins: Sequence[Any] | None = None
) -> list[Value]:
    return [
        Value(array, state, kind, origin=origin)
        for array, (state, kind), origin in zip(
            arrays, specs, origins or [None] * len(specs), strict=True
        )
    ]


def _results(
    walk: Walk,
    call: Call,
    arrays: Sequence[Any],
    converted: Converted,
    times: int | None = 1,
) -> list[Value]:
    """Returns the results of an equation, and notes what was decided inside of it."""
    origins = [value.origin for value in call.operands]
    walk.told.append(ToldInside(call.eqn, converted.told, origins, times))
    outside = [_outside(origin, call.operands) for origin in converted.origins]
    return _values(arrays, converted.specs, outside)


def _outside(origin: Any, operands: Sequence[Value]) -> Any:
    """Returns where a value comes from that inside is the number of an input."""
    return operands[origin].origin if isinstance(origin, int) else origin


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


def _kept(walk: Walk, call: Call, reason: str) -> list[Value]:
    decision = Decision(Run.AS_TRACED, State.HARD, f"KEEP: {reason}")
    walk.told.append(Told(call.eqn, decision))
    arrays = compat.bind(call.eqn, [walk.full(value) for value in call.operands])
    return [
        Value(array, State.HARD if compat.is_float32(var) else None, origin=call.eqn)
        for var, array in zip(call.eqn.outvars, arrays, strict=True)
    ]


# ------------------------------------------------------------ calls and branches


def _jit(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    name = eqn.params["name"]
    inside = convert(walk, eqn.params["jaxpr"], operands, wanted, path, name)
    arrays = [
        walk.full(value) if i in inside.raised else value.array
        for i, value in enumerate(operands)
    ]
    results = compat.bind(eqn, arrays, jaxpr=inside.jaxpr)
    return _results(walk, call, results, inside)


def _remat(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    inside = convert(walk, compat.called(eqn), operands, wanted, path)
    arrays = compat.bind_remat(eqn, _arrays(operands), inside.jaxpr)
    return _results(walk, call, arrays, inside)


def _wrapped(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    name = compat.WRAPPERS[compat.op_of(eqn)]
    inside = convert(walk, eqn.params[name], operands, wanted, path)
    arrays = compat.bind(eqn, _arrays(operands), **{name: inside.jaxpr})
    return _results(walk, call, arrays, inside)


def _cond(walk: Walk, call: Call) -> list[Value]:
    eqn, (index, *operands), wanted, path = call

    def all_branches(forced: tuple[Spec, ...] | None = None) -> list[Converted]:
        return [
            convert(walk, branch, operands, wanted, path, forced=forced)
            for branch in eqn.params["branches"]
        ]

    branches = all_branches()
    joined = _join_all([branch.specs for branch in branches])
    if any(branch.specs != joined for branch in branches):
        branches = all_branches(joined)
    jaxprs = tuple(branch.jaxpr for branch in branches)
    arrays = compat.bind(eqn, [index.array, *_arrays(operands)], branches=jaxprs)
    inner = call._replace(operands=operands)
    first, *_ = [_results(walk, inner, arrays, branch) for branch in branches]
    return first


def _shard_map(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    jaxpr, region = eqn.params["jaxpr"], walk.rules.region_in(path)
    states, found = [value.spec for value in operands], list[Value]()
    with walk.telling() as told:

        def run(*arrays: Any) -> list[Any]:
            values = _values(arrays, states, range(len(arrays)))
            found[:] = walk.run(jaxpr, values, wanted, path, region)
            return _arrays(found)

        mapped = jax.shard_map(run, **compat.shard_map_arguments(eqn))
        arrays = mapped(*_arrays(operands))
    specs, origins = (tuple(v.spec for v in found), [v.origin for v in found])
    return _results(walk, call, arrays, Converted(None, specs, origins, told))


# ------------------------------------------------------------------------- loops


def start(
    walk: Walk, unrolled: loops.Unrolled, call: Call, last_wanted: Sequence[Readers]
) -> list[Value]:
    """Returns the operands of the first call of a loop that is written out.

    A carry starts low, if that is how it goes on: all calls are then lowered as one.
    """
    loop, operands = unrolled.loop, list(call.operands)
    is_read = demand.are_read([last_wanted[k] for k in loop.carries.values()])
    carries = loops.classify(walk.rules, walk.precision, loop, is_read, call.path)
    name = call.eqn.params.get("name", "")
    low = {
        i: k
        for (i, k), (slot, _) in zip(loop.carries.items(), carries, strict=True)
        if slot is not loops.Slot.FULL and operands[i].state is State.SOFT
    }
    while low:
        for i in low:
            array = walk.low(call.operands[i])
            operands[i] = Value(array, State.LOW, origin=call.operands[i].origin)
        found = convert(walk, loop.body, operands, call.wanted, call.path, name)
        hard = [i for i, k in low.items() if found.specs[k][0] is not State.LOW]
        if not hard:
            break
        for i in hard:
            del low[i]
            operands[i] = call.operands[i]
    return operands


def _scan(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, loop = call.eqn, list(call.operands), loops.Loop.of_scan(call.eqn)
    n_consts, _ = compat.scan_counts(eqn)
    operands[:n_consts] = [_invariant(walk, v) for v in operands[:n_consts]]
    turned, inside = _settled(walk, call._replace(operands=operands), loop)
    low_body = islands.rematerialize(inside.jaxpr, n_consts)
    arrays = weights.run_scan(eqn, low_body, _arrays(turned.operands))
    return _results(walk, turned, arrays, inside, eqn.params["length"])


def _settled(walk: Walk, call: Call, loop: loops.Loop) -> tuple[Call, Converted]:
    """Returns a loop's body, and the call of it with its carries as the body has them.

    A carry that may follow starts low, and is raised where the body makes it hard. One
    that is written into is low if what is written is, whatever it starts from.
    """
    eqn, operands, wanted, path = call
    numbers, n_carry = list(loop.carries), len(loop.carries)
    at = slice(numbers[0], numbers[0] + n_carry) if numbers else slice(0)
    is_read = demand.are_read(wanted[:n_carry])
    carries = loops.classify(walk.rules, walk.precision, loop, is_read, path)
    readers = [*demand.of_carries(carries), *wanted[n_carry:]]
    specs = [
        _carry(value, slot is not loops.Slot.FULL)
        for value, (slot, _) in zip(operands[at], carries, strict=True)
    ]
    written = [i for i, (s, _) in enumerate(carries) if s is loops.Slot.WRITTEN]
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
        found = convert(walk, loop.body, values, readers, path)
        raised = [
            i
            for i, (slot, _) in enumerate(carries)
            if slot in (loops.Slot.FOLLOW, loops.Slot.WRITTEN)
            and (specs[i][0], found.specs[i][0]) == (State.LOW, State.HARD)
        ]
        if not raised:
            break
        for i in raised:
            specs[i] = _carry(operands[at][i], False)
            raised_by[i] = _outside(found.origins[i], values)
    forced, inside = (*specs, *found.specs[n_carry:]), found
    if forced != found.specs:
        inside = convert(walk, loop.body, values, readers, path, forced=forced)
    for i, (_, reason) in enumerate(carries):
        _tell_carry(walk, call, i, reason, specs[i][0], raised_by.get(i))
    return call._replace(operands=values), inside


def _tell_carry(
    walk: Walk, call: Call, i: int, reason: str, state: State | None, raised_by: Any
) -> None:
    if state is None:
        return
    run = Run.LOW if state is State.LOW else Run.FULL
    told = f"carry {i}: {reason}"
    if raised_by is not None:
        told += ", but its body makes it float32"
    walk.told.append(Told(call.eqn, Decision(run, state, told), raised_by, i))


def _while(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, path = call.eqn, call.operands, call.path
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if loops.is_kept(walk.rules, eqn, path):
        return _kept(walk, call, "a float decides when it ends")
    loop = loops.Loop.of_while(eqn)
    turned, step = _settled(walk, call._replace(operands=operands[n_cond:]), loop)
    of_cond = [*operands[:n_cond], *turned.operands[n_body:]]
    test = convert(walk, eqn.params["cond_jaxpr"], of_cond, [Readers.OTHER], path)
    arrays = compat.bind(
        eqn,
        _arrays([*operands[:n_cond], *turned.operands]),
        cond_jaxpr=test.jaxpr,
        body_jaxpr=step.jaxpr,
    )
    _results(walk, call._replace(operands=of_cond), [None], test, None)
    return _results(walk, turned, arrays, step, None)


def _invariant(walk: Walk, value: Value) -> Value:
    """Returns what a loop reads at every step: float32, cast at each use.

    Otherwise its gradient would add up in 16 bits over the steps.
    """
    if value.state is not State.LOW:
        return value
    return Value(walk.full(value), State.SOFT, Kind.GIVEN, origin=value.origin)


def _carry(value: Value, is_low: bool) -> Spec:
    if value.state is None:
        return None, Kind.COMPUTED
    return (State.LOW if is_low else State.HARD), Kind.COMPUTED


def _recast(
    walk: Walk, values: Sequence[Value], specs: Sequence[Spec], loop: Any
) -> list[Value]:
    """Returns values as the specs say; the loop is the origin of what changes."""
    origins = [
        value.origin if value.state is spec[0] else loop
        for value, spec in zip(values, specs, strict=True)
    ]
    return _values(_as_specs(walk, values, specs), specs, origins)


# ---------------------------------------------------------- custom derivative rules


def _custom_jvp(walk: Walk, call: Call) -> list[Value]:
    eqn, operands, wanted, path = call
    jaxpr = compat.called(eqn)
    if "_custom_root" in compat.name_of(jaxpr):
        return _kept(walk, call, "a root is found to a tolerance")
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
            values = _values(arrays, [*states, *tangents])
            out = _follow(walk, jvp, values, avals, jaxpr, path)
            return [_out(walk, o, s) for o, s in zip(out, 2 * specs, strict=True)]

        return low_fun, low_jvp

    with walk.telling():  # It was told already.
        arrays = compat.bind_custom(eqn, _arrays(operands), replace)
    return _results(walk, call, arrays, inside)


def _custom_vjp(walk: Walk, call: Call) -> list[Value]:
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

            values = _values(args[::2], states)
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
            return arrays + _as_specs(walk, results, specs)

        def low_bwd(*args: Any) -> Any:
            held = compat.forwarded_residuals(eqn, len(computed))
            fresh = iter(computed)
            kept = [next(fresh) if i is None else states[i] for i in held]
            given = [*kept, *((s, Kind.COMPUTED) for s, _ in specs)]
            # Python numbers are not traced, because bwd may branch on them.
            is_array = [spec is not None for spec in given]
            arrays = [arg for arg, yes in zip(args, is_array, strict=True) if yes]
            values = _values(arrays, [spec for spec in given if spec is not None])
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

    with walk.telling():  # It was told already.
        arrays = compat.bind_custom(eqn, _arrays(operands), replace)
    return _results(walk, call, arrays, inside)


def _custom_vmap(walk: Walk, call: Call) -> list[Value]:
    """Binds a function with a rule for ``vmap``, which is low inside too."""
    eqn, operands, wanted, path = call
    jaxpr, states = compat.called(eqn), [value.spec for value in operands]
    inside = convert(walk, jaxpr, operands, wanted, path)

    def low_rule(batched: Callable[..., Any], *arrays: Any) -> list[Any]:
        values = _values(arrays, states)
        types = [_type_as_traced(value) for value in values]
        out = _follow(walk, batched, values, types, jaxpr, path)
        return _as_specs(walk, out, inside.specs)

    arrays = compat.bind_custom_vmap(eqn, _arrays(operands), inside.jaxpr, low_rule)
    return _results(walk, call, arrays, inside)


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
    region = walk.rules.region_in(path)
    results = iter(walk.run(jaxpr, [values[i] for i in live], readers, path, region))
    return [next(results) if item is None else item for item in others]


def _out(walk: Walk, item: Any, spec: Spec) -> Any:
    if isinstance(item, Value):
        return _as_spec(walk, item, spec)
    if _is_any_zero(item) and spec[0] is State.LOW:
        return type(item)(compat.retyped(item.aval, walk.low_dtype))
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


HANDLERS: Mapping[str, Callable[[Walk, Call], list[Value]]] = MappingProxyType(
    {
        "jit": _jit,
        **dict.fromkeys(compat.REMAT, _remat),
        **dict.fromkeys(compat.WRAPPERS, _wrapped),
        "cond": _cond,
        "shard_map": _shard_map,
        "scan": _scan,
        "while": _while,
        "custom_jvp_call": _custom_jvp,
        "custom_vjp_call": _custom_vjp,
        "custom_vmap_call": _custom_vmap,
    }
)
