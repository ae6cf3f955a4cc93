"""``autocast``: a function, run op by op in the precision that the rules say.

The law of this file: decide, then do. The function is traced in float32, so whatever is
valid for it stays valid; then each equation gets a ``Decision`` and is bound again in
that precision.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting import compat, decisions, loops
from jmp_lite.autocasting.decisions import Decision, Run, Told, ToldInside
from jmp_lite.autocasting.demand import Demands, Readers, union
from jmp_lite.autocasting.higher_order import HANDLERS, Call, start
from jmp_lite.autocasting.regions import Regions
from jmp_lite.autocasting.rules import (
    AUTOCAST_SCOPE,
    BROADCASTING,
    DTYPE_PARAMS,
    MOVING,
    PASSING,
    Precision,
    Rules,
    Said,
    get_rules,
)
from jmp_lite.autocasting.values import Kind, State, Value
from jmp_lite.casting.dtypes import is_traceable, parse_dtype

# ------------------------------------------------------------------------- autocast


def autocast(
    fun: Callable[..., Any] | None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Any:
    """Returns ``fun`` run op by op in mixed precision.

    Matrix products and convolutions run in the compute dtype, delicate ops in float32,
    and the rest in the precision of what they are given. The signature, the structure,
    the shapes and the dtypes of the results are those of ``fun``; only values that were
    float32 are ever changed.

    Args:
      fun: any function of pytrees that JAX can trace. Arrays are traced; every other
        argument reaches it as it is.
      rules: a preset's name (``"mixed"``, ``"O0"`` to ``"O3"``, ``"torch"``, ...) or a
        ``Rules``.
      compute_dtype: the dtype of low ops instead of the rules' own; ``"half"`` asks the
        device, when the function is called.

    Returns:
      The function; without ``fun`` a decorator.

    Raises:
      ValueError: there is no such preset or dtype.

    Example:
      >>> low = autocast(lambda x, w: jnp.tanh(x @ w))
      >>> x, w = jnp.ones((2, 4)), jnp.full((4, 4), 0.1)
      >>> low(x, w).dtype
      dtype('float32')
      >>> "bf16[2,4] = dot_general" in str(jax.make_jaxpr(low)(x, w))
      True
    """
    if fun is None:
        return functools.partial(autocast, rules=rules, compute_dtype=compute_dtype)
    check_function(fun)
    chosen = choose_rules(rules, compute_dtype)

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        final = chosen()
        with jax.named_scope(AUTOCAST_SCOPE):
            if final.is_identity:
                return fun(*args, **kwargs)
            return run(Walk(final), fun, args, kwargs)

    return autocast_fun


def check_function(fun: Any) -> None:
    """Raises where something else stands in the place of a function."""
    if callable(fun):
        return
    hint = f" Rules have a name: rules={fun!r}." if isinstance(fun, str | Rules) else ""
    raise TypeError(f"Expected a function, got {type(fun).__name__}: {fun!r}.{hint}")


def choose_rules(rules: Any, compute_dtype: DTypeLike | None) -> Callable[[], Rules]:
    """Checks what a user has chosen, and returns what gives the rules at a call.

    Not before, because ``"half"`` has to ask the device.
    """
    chosen = get_rules(rules) if isinstance(rules, str) else rules
    if not isinstance(chosen, Rules):
        raise TypeError(
            "Expected the name of a preset or a Rules, got "
            f"{type(chosen).__name__}: {chosen!r}."
        )
    if compute_dtype is None:
        return lambda: chosen
    if compute_dtype != "half":
        parse_dtype(compute_dtype)
    return lambda: dataclasses.replace(chosen, compute_dtype=compute_dtype)


def run(walk: "Walk", fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Traces a function, walks along it, and returns its results as it would."""
    _refuse_mutable_graphs(fun, args, kwargs)
    of_arrays, arrays = function_of_arrays(fun, args, kwargs)
    traced, out_shape = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    parts = compat.parts(traced)
    values = [
        walk.given(var, array, "an argument")
        for var, array in zip(parts.invars, arrays, strict=True)
    ]
    outside = [Readers.OUTPUT] * len(parts.outvars)
    results = [
        compat.as_typed(walk.full(value), var.aval)
        for value, var in zip(
            walk.run(traced, values, outside, ""), parts.outvars, strict=True
        )
    ]
    return jax.tree.unflatten(jax.tree.structure(out_shape), results)


def function_of_arrays(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns ``fun`` as a function of the arrays among its arguments, and those.

    Every other argument reaches it as it is.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [is_traceable(leaf) for leaf in leaves]

    def of_arrays(*arrays: Any) -> Any:
        given = iter(arrays)
        merged = [
            next(given) if yes else leaf
            for leaf, yes in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return fun(*args, **kwargs)

    of_arrays.__name__ = getattr(fun, "__name__", "autocast")
    return of_arrays, [x for x, yes in zip(leaves, is_array, strict=True) if yes]


def _refuse_mutable_graphs(fun: Any, args: Any, kwargs: Any) -> None:
    """Raises where an nnx module would lose its updates: a trace works on a copy."""
    kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    if kind is None:
        return
    given = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, kind))
    places = {
        "an argument": given,
        "something that its function captures": _captured(fun),
    }
    for where, found in places.items():
        for module in filter(lambda x: isinstance(x, kind), found):
            raise TypeError(
                f"autocast got an nnx object, a {type(module).__name__}, as {where}. "
                "What is changed in it (batch statistics, counts of random numbers) "
                "would be lost. Use jmp_lite.nnx.autocast, with the object as an "
                "argument, which writes changes back; or nnx.split it, and give "
                "autocast a function of its state."
            )


def _captured(fun: Any) -> list[Any]:
    """Returns a function, its owner, and what it holds, as far as can be seen."""
    found = [fun, getattr(fun, "__self__", None)]
    if isinstance(fun, functools.partial):
        found += [*fun.args, *fun.keywords.values(), *_captured(fun.func)]
    for cell in getattr(fun, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # An empty cell.
            found.append(cell.cell_contents)
    return found


# ------------------------------------------------------------------------- the walk


class Walk:
    """Runs jaxprs under rules; one for each call of an autocast function.

    Args:
      rules: what decides.

    Attributes:
      told: what was decided, in order.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.low_dtype = np.dtype(rules.compute_dtype)
        self.demands = Demands(rules)
        self.memo: dict[Any, Any] = {}
        self.told: list[Told | ToldInside] = []

    @contextlib.contextmanager
    def telling(self) -> Generator[list[Told | ToldInside]]:
        """Yields the list of what is decided inside, apart from what was before."""
        outer, self.told = self.told, []
        try:
            yield self.told
        finally:
            self.told = outer

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        outside: Sequence[Readers],
        path: str,
        region: str | None = None,
    ) -> list[Value]:
        """Runs a jaxpr.

        Args:
          jaxpr: a jaxpr, closed or open.
          values: what stands for its inputs.
          outside: the readers of its outputs.
          path: the scopes that it stands in.
          region: the ``FULL_INSIDE`` scope that it is called from, if any.
        """
        parts = compat.parts(jaxpr)
        readers = self.demands.inside(jaxpr, outside)
        env: dict[Any, Value] = {}
        for var, const in zip(parts.constvars, parts.consts, strict=True):
            env[var] = self.constant(var, const)
        env.update(zip(parts.invars, values, strict=True))
        places = [compat.join(path, *compat.scopes(eqn)) for eqn in parts.eqns]
        inside = [self.rules.region_in(place) for place in places]
        regions = Regions(self, parts, inside, readers, outside)
        starts = loops.unrolled(parts)

        def read(atom: Any, region: str | None) -> Value:
            if compat.is_literal(atom):
                return self.literal(atom)
            if env[atom].region not in (None, region):
                env[atom] = regions.leave(atom, env[atom])
            return env[atom]

        for eqn, where, here in zip(parts.eqns, places, inside, strict=True):
            wanted = [readers[var] or Readers.OUTPUT for var in eqn.outvars]
            with compat.context_of(eqn):
                operands = [read(atom, here) for atom in eqn.invars]
                if here:
                    operands = regions.enter(operands)
                if id(eqn) in starts:
                    call, loop = Call(eqn, operands, wanted, where), starts[id(eqn)]
                    last = [readers[v] or Readers.OUTPUT for v in loop.last.outvars]
                    operands = start(self, loop, call, last)
                results = self.equation(eqn, operands, wanted, where)
            is_from_low = any(value.is_from_low for value in operands)
            for var, result in zip(eqn.outvars, results, strict=True):
                if here and result.state is not None:
                    result.region, result.is_from_low = here, is_from_low
                env[var] = result
        return [read(atom, region) for atom in parts.outvars]

    def equation(
        self,
        eqn: Any,
        operands: Sequence[Value],
        wanted: Sequence[Readers],
        path: str,
    ) -> list[Value]:
        """Decides and runs one equation."""
        op = eqn.primitive.name
        if op in HANDLERS:
            return HANDLERS[op](self, Call(eqn, operands, wanted, path))
        if op == "convert_element_type":
            return [self.converted(eqn, operands[0], path)]
        if op in PASSING:
            arrays = compat.bind(eqn, [value.array for value in operands])
            return [
                dataclasses.replace(value, array=array, cast=None, raised=None)
                for array, value in zip(arrays, operands, strict=True)
            ]
        decision = self.decision(eqn, operands, wanted, path)
        origin = None
        if decision.leader is not None:
            float32 = [value for value in operands if value.state is not None]
            origin = float32[decision.leader].origin
        self.told.append(Told(eqn, decision, origin))
        return self.perform(eqn, operands, decision, eqn if origin is None else origin)

    def decision(
        self,
        eqn: Any,
        operands: Sequence[Value],
        wanted: Sequence[Readers],
        path: str,
    ) -> Decision:
        """Returns the decision for an equation without a jaxpr of its own."""
        atoms = (*eqn.invars, *eqn.outvars)
        if not any(map(compat.is_float32, atoms)):
            return decisions.NOT_FLOAT32
        if not compat.has_only_axis_effects(eqn):
            return decisions.HAS_EFFECTS
        if self._is_mixed_by_the_user(eqn):
            return decisions.MIXED_BY_THE_USER
        states = [(v.state, v.kind) for v in operands if v.state is not None]
        readers = union(wanted)
        if not any(map(compat.is_float32, eqn.outvars)):
            readers |= Readers.OTHER
        said = self.said_of(eqn, path)
        has_positions = any(kind is Kind.INTEGER for _, kind in states)
        if has_positions and _is_outer_product(eqn):
            said = Said(Precision.FULL, "it scales positions, and sums nothing up")
        return decisions.decide(eqn.primitive.name, said, states, readers)

    def _is_mixed_by_the_user(self, eqn: Any) -> bool:
        """Whether an op is given other floats than float32.

        Those of the compute dtype are welcome beside float32 ones.
        """
        others = [
            compat.dtype_of(atom)
            for atom in eqn.invars
            if compat.is_float(atom) and not compat.is_float32(atom)
        ]
        if not others:
            return False
        has_float32 = any(map(compat.is_float32, eqn.invars))
        return not has_float32 or any(dtype != self.low_dtype for dtype in others)

    def said_of(self, eqn: Any, path: str) -> Said:
        """Returns what the rules say of an equation where it stands, and why."""
        said = self.rules.said_of(eqn.primitive.name, path)
        if said.precision is Precision.LOW and _asks_for_float32(eqn):
            return Said(Precision.FULL, "it asks for the highest precision")
        return said

    def precision(self, eqn: Any, path: str) -> Precision:
        """Returns what the rules say of an equation where it stands."""
        return self.said_of(eqn, path).precision

    def said_inside(self, jaxpr: Any, path: str) -> tuple[Any, ...]:
        """Returns what the scope rules say at each place inside of a jaxpr.

        All that a path decides: a block that stands in many places is converted once
        where they say the same.
        """
        key = (id(jaxpr), "paths")
        if key not in self.memo:
            self.memo[key] = (jaxpr, tuple(dict.fromkeys(_paths_inside(jaxpr))))
        paths = self.memo[key][1]
        places = [f"{path}/{inner}" for inner in paths]
        return tuple(
            (self.rules.precision_in(place), self.rules.carry_in(place))
            for place in places
        )

    def perform(
        self, eqn: Any, operands: Sequence[Value], decision: Decision, origin: Any
    ) -> list[Value]:
        """Binds an equation as it was decided."""
        op = eqn.primitive.name
        kind = _kind_of_result(op, operands)
        if decision.run is Run.LOW:
            arrays = self._in_low(eqn, operands)
        elif decision.run is Run.FULL and decision.state is State.LOW:
            arrays = self._in_full_then_low(eqn, operands)
        else:
            arrays = compat.bind(eqn, [self.full(value) for value in operands])
        return [
            self._value(var, array, decision.state, kind, origin)
            for var, array in zip(eqn.outvars, arrays, strict=True)
        ]

    def _in_full_then_low(self, eqn: Any, operands: Sequence[Value]) -> list[Any]:
        saturates = any(value.saturates for value in operands)

        def in_full(*full: Any) -> list[Any]:
            return [
                self.cast(array, saturates) if compat.is_float32(var) else array
                for var, array in zip(eqn.outvars, compat.bind(eqn, full), strict=True)
            ]

        if eqn.primitive.name in MOVING:
            return in_full(*map(self.full, operands))

        def from_held(*held: Any) -> list[Any]:
            return in_full(
                *(
                    self.full(Value(array, value.state))
                    for array, value in zip(held, operands, strict=True)
                )
            )

        # What it was given waits for the backward pass in 16 bits.
        again = jax.checkpoint(from_held, prevent_cse=False)
        return again(*(value.array for value in operands))

    def _in_low(self, eqn: Any, operands: Sequence[Value]) -> list[Any]:
        op, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        arrays: list[Any] = []
        for value in operands:
            is_number = value.kind in (Kind.LITERAL, Kind.EXACT)
            is_spread = op in BROADCASTING and not is_number
            if value.state is not None and is_spread and value.array.shape != shape:
                # In float32, and cast after: JAX's transpose of it is a sum.
                full = _spread(self.full(value), shape)
                arrays.append(self.cast(full, value.saturates))
            else:
                arrays.append(self.low(value))
        if op in _SCATTERS:
            return [_scatter(eqn, arrays)]
        changed = {
            name: self.low_dtype if is_dtype else None
            for name, is_dtype in DTYPE_PARAMS.items()
            if eqn.params.get(name) is not None
        }
        return compat.bind(eqn, arrays, **changed)

    def _value(
        self, var: Any, array: Any, state: State | None, kind: Kind, origin: Any
    ) -> Value:
        if not compat.is_float32(var):
            return Value(array, None, kind)
        is_low = array.dtype == self.low_dtype
        if is_low != (state is State.LOW):  # An op that has a result of its own mind.
            state = State.LOW if is_low else State.HARD
        return Value(array, state, kind, origin=origin)

    # What a value is, and its two dtypes.

    def given(self, var: Any, array: Any, origin: str) -> Value:
        """Returns an argument or a constant."""
        state = State.SOFT if compat.is_float32(var) else None
        return Value(array, state, Kind.GIVEN, origin=origin)

    def constant(self, var: Any, array: Any) -> Value:
        """Returns a constant; one with elements too large for 16 bits is HARD."""
        value = self.given(var, array, "a constant")
        if value.state is State.SOFT and not compat.is_tracer(array):
            numbers = np.asarray(array)
            with np.errstate(over="ignore"):
                low = numbers.astype(self.low_dtype).astype(np.float32)
            if np.any(np.isfinite(numbers) & ~np.isfinite(low)):
                value.state = State.HARD
                value.origin = "a constant too large for 16 bits"
        return value

    def literal(self, atom: Any) -> Value:
        """Returns a number in the program; one that 16 bits cannot tell is HARD."""
        is_real = jnp.issubdtype(compat.dtype_of(atom), jnp.floating)
        is_real |= compat.is_integer(atom)
        fits = not is_real or _fits(np.float32(atom.val), self.low_dtype)
        if not compat.is_float32(atom):
            # One that does not fit is judged here for what it may be converted to.
            kind = Kind.LITERAL if fits else Kind.COMPUTED
            return Value(compat.as_array(atom.val), None, kind)
        number = np.float32(atom.val)
        if number in _ENDS:
            return Value(number, State.HARD, Kind.END, origin="the end of the range")
        state = State.SOFT if fits else State.HARD
        is_exact = fits and np.float32(number.astype(self.low_dtype)) == number
        kind = Kind.EXACT if is_exact else Kind.LITERAL
        return Value(number, state, kind, origin=f"the number {number}")

    def converted(self, eqn: Any, value: Value, path: str) -> Value:
        """Returns the result of a cast that the user wrote, or JAX for them."""
        (var,), atom = eqn.outvars, eqn.invars[0]
        if not compat.is_float32(var):
            if value.state is State.LOW and var.aval.dtype == self.low_dtype:
                return Value(value.array)
            (array,) = compat.bind(eqn, [self.full(value)])
            return Value(array, None, value.kind)
        if value.state is State.LOW:
            return value
        is_low = getattr(value.array, "dtype", None) == self.low_dtype
        if is_low and self.rules.precision_in(path) is Precision.LOW:
            return Value(value.array, State.LOW, origin=eqn)
        (array,) = compat.bind(eqn, [value.array])
        if value.state is not None:
            return Value(array, value.state, value.kind, origin=value.origin)
        state = self._state_of_upcast(atom, value)
        is_counted = compat.is_integer(atom) and state is State.HARD
        kind = Kind.INTEGER if is_counted else value.kind
        return Value(array, state, kind, origin=eqn)

    def _state_of_upcast(self, atom: Any, value: Value) -> State:
        dtype = compat.dtype_of(atom)
        if dtype == np.bool_:
            return State.SOFT
        is_number = value.kind in (Kind.LITERAL, Kind.EXACT)
        if is_number and np.ndim(value.array) == 0:
            return State.SOFT
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return State.SOFT if is_float and value.kind is Kind.GIVEN else State.HARD

    def full(self, value: Value) -> Any:
        """Returns a value as it was traced."""
        if value.state is not State.LOW:
            return value.array
        if value.raised is None:  # Once: the gradients of its uses add up in float32.
            value.raised = value.array.astype(jnp.float32)
        return value.raised

    def low(self, value: Value) -> Any:
        """Returns a float32 value in the compute dtype, and any other as it is."""
        if value.state is None or value.state is State.LOW:
            return value.array
        if value.kind is not Kind.COMPUTED:
            return self.cast(value.array, value.saturates)
        if value.cast is None:  # Once for all uses: each would be kept for backward.
            value.cast = self.cast(value.array)
        return value.cast

    def cast(self, array: Any, saturates: bool = False) -> Any:
        """Returns an array in the compute dtype."""
        if saturates:
            ends = jnp.finfo(self.low_dtype)
            array = lax.clamp(np.float32(ends.min), array, np.float32(ends.max))
        return compat.as_array(array).astype(self.low_dtype)


def _paths_inside(jaxpr: Any) -> Iterator[str]:
    for eqn in compat.parts(jaxpr).eqns:
        here = "/".join(compat.scopes(eqn))
        yield here
        for inner in compat.inner_jaxprs(eqn):
            prefix = f"{here}/{eqn.params.get('name', '')}"
            yield from (f"{prefix}/{path}" for path in _paths_inside(inner))


_ENDS = frozenset(map(np.float32, (jnp.finfo("float32").min, jnp.finfo("float32").max)))


def _fits(number: np.float32, dtype: Any) -> bool:
    """Whether a number does not overflow, vanish, or become one in a dtype."""
    with np.errstate(over="ignore"):
        low = np.float32(number.astype(dtype))
    if not np.isfinite(number):
        return True
    return bool(
        np.isfinite(low) and (low != 0 or number == 0) and (low != 1 or number == 1)
    )


def _is_outer_product(eqn: Any) -> bool:
    """Whether each number of a matrix product is one product: positions by rates."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def _asks_for_float32(eqn: Any) -> bool:
    """Whether a matrix product asks for more than every other one here gets."""
    if eqn.params.get("preferred_element_type") not in (None, np.dtype("float32")):
        return True
    asked, usual = eqn.params.get("precision"), compat.ambient_precision()
    if isinstance(asked, tuple):
        return lax.Precision.HIGHEST in asked and usual is not lax.Precision.HIGHEST
    return asked not in (None, usual)  # An algorithm.


def _kind_of_result(op: str, operands: Sequence[Value]) -> Kind:
    kinds = {value.kind for value in operands}
    if op == "iota":
        return Kind.INTEGER
    if Kind.COMPUTED in kinds or not kinds:
        return Kind.COMPUTED
    if op not in MOVING and not (op in _SCALING and Kind.INTEGER in kinds):
        return Kind.COMPUTED
    for kind in (Kind.INTEGER, Kind.GIVEN, Kind.END, Kind.LITERAL):
        if kind in kinds:
            return kind
    return Kind.EXACT


_SCALING = frozenset(["add", "sub", "mul", "div", "neg"])


def _spread(array: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts a scalar, or the axes of size 1, to a shape."""
    dims = range(len(shape)) if jnp.ndim(array) else ()
    return lax.broadcast_in_dim(array, shape, tuple(dims))


_SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
}


def _scatter(eqn: Any, arrays: Sequence[Any]) -> Any:
    """Builds a scatter anew: its combiner is typed."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    params = {name: eqn.params[name] for name in names}
    return _SCATTERS[eqn.primitive.name](*arrays, **params)
