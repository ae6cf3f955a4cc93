"""``autocast``: a function, run op by op in the precision that the rules say.

The law of this file: decide, then do. The function is traced in float32, so whatever is
valid for it stays valid; then each equation gets a ``Decision`` and is bound again in
that precision.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_lite.autocasting import compat, decisions, loops
from jmp_lite.autocasting.casts import Casts
from jmp_lite.autocasting.decisions import Decision, Operand, Told, ToldInside
from jmp_lite.autocasting.demand import Demands, Readers, union
from jmp_lite.autocasting.door import (
    check_function,
    choose_rules,
    function_of_arrays,
    refuse_mutable_graphs,
)
from jmp_lite.autocasting.equations import converted, perform
from jmp_lite.autocasting.higher_order import HANDLERS, Call, start
from jmp_lite.autocasting.regions import Regions
from jmp_lite.autocasting.rules import (
    AUTOCAST_SCOPE,
    LOW_SCOPE,
    PASSING,
    Precision,
    Rules,
    Said,
    asks_for_low,
)
from jmp_lite.autocasting.values import Kind, Value
from jmp_lite.casting.mutables import (
    noting_captures,
    returning_changes,
    write_changes,
)

# ------------------------------------------------------------------------- autocast

Params = ParamSpec("Params")
Result = TypeVar("Result")


@overload
def autocast(
    fun: Callable[Params, Result],
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[Params, Result]: ...


@overload
def autocast(
    fun: None = None,
    rules: Rules | str = "mixed",
    *,
    compute_dtype: DTypeLike | None = None,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]: ...


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
      >>> import jax.numpy as jnp
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
        with jax.named_scope(AUTOCAST_SCOPE):
            return run(Walk(chosen()), fun, args, kwargs)

    return autocast_fun


def run(walk: "Walk", fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Traces a function, walks along it, and returns its results as it would."""
    traced, arrays, treedef = trace(returning_changes(fun), args, kwargs)
    if walk.rules.is_identity and not _is_marked_low(traced):
        results = compat.evaluate(traced, arrays)
    else:
        results = walk_along(walk, traced, arrays)
    out, changes = jax.tree.unflatten(treedef, results)
    write_changes(args, kwargs, changes)
    return out


def _is_marked_low(traced: Any) -> bool:
    """Whether the user has marked something that no rule of a preset lowers."""
    return any(LOW_SCOPE in path.split("/") for path in _paths_inside(traced))


def trace(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Returns a function's jaxpr, its arrays, and the structure of its results."""
    refuse_mutable_graphs(fun, args, kwargs)
    of_arrays, arrays = function_of_arrays(fun, args, kwargs)
    structures: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        # Not from the shapes of the results: a node of a user's may refuse those.
        leaves, structure = jax.tree.flatten(of_arrays(*arrays))
        structures.append(structure)
        return leaves

    flat.__name__ = of_arrays.__name__
    with noting_captures():
        traced = jax.make_jaxpr(flat)(*arrays)
    return traced, arrays, structures[-1]


def walk_along(walk: "Walk", traced: Any, arrays: Sequence[Any]) -> list[Any]:
    """Walks along a jaxpr, and returns its results as they were traced."""
    parts = compat.parts(traced)
    values = [
        walk.given(var, array, "an argument")
        for var, array in zip(parts.invars, arrays, strict=True)
    ]
    outside = [Readers.OUTPUT] * len(parts.outvars)
    results = walk.run(traced, values, outside, "")
    walk.results = list(map(_operand, results))
    return [
        compat.as_typed(walk.full(value), var.aval)
        for value, var in zip(results, parts.outvars, strict=True)
    ]


def _operand(value: Value) -> Operand:
    return Operand(value.state, value.kind, value.origin, np.shape(value.array))


# ------------------------------------------------------------------------- the walk


class Walk(Casts):
    """Runs jaxprs under rules; one for each call of an autocast function.

    Args:
      rules: what decides.

    Attributes:
      told: what was decided, in order.
      results: what stood for the results of the function, once all was run.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules.compute_dtype)
        self.rules = rules
        self.demands = Demands(rules)
        self.memo: dict[Any, Any] = {}
        self.told: list[Told | ToldInside] = []
        self.results: list[Operand] = []

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
        op = compat.op_of(eqn)
        if op in HANDLERS:
            return HANDLERS[op](self, Call(eqn, operands, wanted, path))
        if op == "convert_element_type":
            is_low = self.rules.precision_in(path) is Precision.LOW
            return [converted(self, eqn, operands[0], is_low)]
        if op in PASSING:
            arrays = compat.bind(eqn, [value.array for value in operands])
            return [
                dataclasses.replace(value, array=array, cast=None, raised=None)
                for array, value in zip(arrays, operands, strict=True)
            ]
        decision = self.decision(eqn, operands, wanted, path)
        given = tuple(_operand(v) for v in operands if v.state is not None)
        origin = None if decision.leader is None else given[decision.leader].origin
        self.told.append(Told(eqn, decision, origin, operands=given))
        made_by = eqn if origin is None else origin
        return perform(self, eqn, operands, decision, made_by)

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
        op = compat.op_of(eqn)
        is_by_position = has_positions and _is_outer_product(eqn)
        if is_by_position and not asks_for_low(self.rules, op, path):
            said = Said(Precision.FULL, "it scales positions, and sums nothing up")
        return decisions.decide(op, said, states, readers)

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
        said = self.rules.said_of(compat.op_of(eqn), path)
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


def _paths_inside(jaxpr: Any) -> Iterator[str]:
    for eqn in compat.parts(jaxpr).eqns:
        here = "/".join(compat.scopes(eqn))
        yield here
        for inner in compat.inner_jaxprs(eqn):
            prefix = f"{here}/{eqn.params.get('name', '')}"
            yield from (f"{prefix}/{path}" for path in _paths_inside(inner))


def _is_outer_product(eqn: Any) -> bool:
    """Whether each number of a matrix product is one product: positions by rates."""
    if compat.op_of(eqn) != "dot_general":
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
    return asked not in (None, usual, *_IN_16_BITS)  # An algorithm.


_IN_16_BITS = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.BF16_BF16_BF16,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.DotAlgorithmPreset.F16_F16_F16,
)
