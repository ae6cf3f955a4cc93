"""Runs a program as it was planned: it casts, binds, and asks no question."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jmp_lite.autocasting import custom_functions
from jmp_lite.autocasting.binding import Casts, Value, evaluate
from jmp_lite.autocasting.decide.decisions import Plan, Run, Step, run_alike
from jmp_lite.autocasting.decide.facts import Facts, Spec, State
from jmp_lite.autocasting.decide.values import as_float32
from jmp_lite.autocasting.passes import (
    gradient_sums,
    rematerialize,
    scan_weight_gradients,
)
from jmp_lite.autocasting.plan import Planner
from jmp_lite.jaxprs import params, sharding, source, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Function, Jaxpr, Var


@dataclasses.dataclass(frozen=True)
class Converted:
    """A jaxpr that runs as planned.

    Attributes:
      jaxpr: the jaxpr, traced anew for the dtypes of its plan: its casts are equations,
        and nothing in it is to be decided.
      input_specs: the specs of its inputs, to which the caller casts.
    """

    jaxpr: Jaxpr
    input_specs: Sequence[Spec]


class Runner:
    """Runs plans; one for each call of an autocast function.

    JAX does not check a jaxpr that is bound to operands of other dtypes. So each jaxpr
    inside of an equation is traced again for exactly the dtypes of its operands.

    Args:
      planner: plans the derivatives that JAX traces after the program has run.
      casts: the class that casts values.
    """

    def __init__(self, planner: Planner, casts: type[Casts] = Casts) -> None:
        self.planner = planner
        self.casts = casts(planner.lookup.low_dtype)
        self._known: dict[Plan, Converted] = {}

    def function(
        self, plan: Plan, arrays: Sequence[Array], types: Sequence[Aval] = ()
    ) -> list[Array]:
        """Returns the results of a traced function.

        Args:
          plan: its plan.
          arrays: its arguments.
          types: the types of its results; by default their traced types.
        """
        results = self.run(plan, arrays)
        # A derivative rule in a remembered jaxpr refers to this object: a cycle, which
        # would keep the captured arrays alive.
        self._known = {}
        self.planner.forget()
        types = types or [var.aval for var in plan.parts.outvars]
        return [
            structure.as_typed(self.casts.typed(value, aval), aval)
            for value, aval in zip(results, types, strict=True)
        ]

    def run(self, plan: Plan, arrays: Sequence[Array]) -> list[Value]:
        """Returns the results of a jaxpr.

        Args:
          plan: its plan.
          arrays: its arguments.
        """
        frame = _Frame(self.casts, plan, arrays)
        for step in plan.steps:
            with source.context_of(step.eqn):
                results = self._step(step, frame.operands(step))
            frame.known.update(zip(step.eqn.outvars, results, strict=True))
        return list(map(frame.read, plan.parts.outvars, plan.results))

    def _step(self, step: Step, operands: Sequence[Value]) -> list[Value]:
        """Runs an equation, and returns its results."""
        if step.decision is None:
            arrays = self._enter(step, operands)
        elif _passes_on(step):
            # It is one value, which is cast once for the readers of both.
            (value,), (facts,) = operands, step.results
            if step.raised:
                return [Value(self.casts.full(value), facts)]
            is_same = value.facts is facts
            return [value if is_same else dataclasses.replace(value, facts=facts)]
        else:
            arrays = evaluate(self.casts, step.eqn, step.decision, operands)
        return [
            Value(
                sharding.cast(array, jnp.float32) if i in step.raised else array, facts
            )
            for i, (array, facts) in enumerate(zip(arrays, step.results, strict=True))
        ]

    def arrays(self, values: Sequence[Value], specs: Sequence[Spec]) -> list[Array]:
        """Returns the arrays of values, cast to specs."""
        return list(map(self.casts.as_spec, values, specs))

    # ------------------------------------------------------- equations with jaxprs

    def _enter(self, step: Step, operands: Sequence[Value]) -> Sequence[Array]:
        """Runs an equation that contains jaxprs with plans."""
        eqn, op = step.eqn, params.op_of(step.eqn)
        if op in params.CUSTOM:
            return custom_functions.run(self, step, operands)
        if op == "shard_map":
            return self._shard_map(step, operands)
        bodies = list(map(self.converted, step.inside))
        if op == "cond":
            (which, *others), specs = operands, bodies[0].input_specs
            arrays = [which.array, *self.arrays(others, specs)]
            return params.bind_cond(eqn, arrays, [body.jaxpr for body in bodies])
        if op == "while":
            test, body = bodies
            n_test = params.loop_of(eqn).n_cond
            # The condition reads the carries as the body leaves them.
            specs = [*test.input_specs[:n_test], *body.input_specs]
            arrays = self.arrays(operands, specs)
            return params.bind_while(eqn, arrays, test.jaxpr, body.jaxpr)
        (body,) = bodies
        arrays = self.arrays(operands, body.input_specs)
        if op == "scan":
            return self._scan(eqn, arrays, body)
        if op in params.REMAT:
            return params.bind_remat(eqn, arrays, body.jaxpr, self.planner.saved)
        return params.bind_call(eqn, arrays, body.jaxpr)

    def _shard_map(self, step: Step, operands: Sequence[Value]) -> Sequence[Array]:
        """Runs the function of each device, mapped again."""
        call, (plan,) = sharding.shard_map_of(step.eqn), step.inside

        def run(*arrays: Array) -> list[Array]:
            return self.arrays(self.run(plan, arrays), plan.result_specs)

        mapped = call.map(run, call.in_specs, call.out_specs)
        return mapped(*self.arrays(operands, plan.input_specs))

    def _scan(self, eqn: Eqn, arrays: Sequence[Array], body: Converted) -> list[Array]:
        """Binds a scan, after the passes over its body."""
        passes, jaxpr = self.planner.passes, body.jaxpr
        n_consts = params.loop_of(eqn).n_consts
        if "rematerialize" in passes:
            jaxpr = rematerialize.rematerialize(body.jaxpr, n_consts)
            passes["rematerialize"] += jaxpr is not body.jaxpr
        dtypes = [spec.stored for spec in body.input_specs[:n_consts]]
        # Weights in bfloat16 that each step reads. Those in int8 have no gradients.
        stored = [
            i
            for i, dtype in enumerate(dtypes)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        ]
        if not stored:
            return self._scan_of(eqn, jaxpr)(*arrays)
        return gradient_sums.run_scan(eqn, arrays, jaxpr, stored, self._scan_of)

    def _scan_of(self, eqn: Eqn, jaxpr: Jaxpr) -> Function:
        """Returns a function that runs a scan with another body."""
        passes = self.planner.passes
        if "scan_weight_gradients" in passes:
            scan = scan_weight_gradients.rewritten(eqn, jaxpr)
            if scan is not None:
                passes["scan_weight_gradients"] += 1
                return scan
        return lambda *arrays: params.bind_scan(eqn, arrays, jaxpr)

    # ---------------------------------------------------------------- jaxprs inside

    def converted(self, plan: Plan) -> Converted:
        """Returns a jaxpr that runs as planned, traced once for each plan."""
        if plan not in self._known:
            self._known[plan] = self._convert(plan)
        return self._known[plan]

    def _convert(self, plan: Plan) -> Converted:
        def run(*arrays: Array) -> list[Array]:
            return self.arrays(self.run(plan, arrays), plan.result_specs)

        avals = [
            structure.type_of(var)
            if spec.state is None
            else structure.retyped(var.aval, spec.dtype(self.casts.low_dtype))
            for var, spec in zip(plan.parts.invars, plan.input_specs, strict=True)
        ]
        new = Converted(structure.trace(run, avals, plan.jaxpr), plan.input_specs)
        # Only a call of a jit-compiled function has a name. A loop casts its constants
        # in each step, so that their gradients add up in float32.
        if not plan.name or "upcasts" not in self.planner.passes:
            return new
        new = self._upcast_outside(new)
        # A checkpoint would save an upcast input in float32.
        ops = (params.op_of(eqn) for eqn, _ in equations(plan.jaxpr))
        return new if any(op in params.REMAT for op in ops) else self._alike(plan, new)

    def _upcast_outside(self, new: Converted) -> Converted:
        """Returns a jaxpr whose caller casts some inputs to float32.

        These are the inputs that the jaxpr only casts to float32.
        """
        # The upcast is outside, once, so the gradients of all uses add up in float32.
        are_low = {
            i for i, spec in enumerate(new.input_specs) if spec.state is State.LOW
        }
        # Not an argument in 16 bits: moves and products inside read its own array.
        upcast = gradient_sums.find_upcast_inputs(new.jaxpr) & are_low
        self.planner.passes["upcasts"] += bool(upcast)
        specs = [
            Spec(State.SOFT, spec.kind) if i in upcast else spec
            for i, spec in enumerate(new.input_specs)
        ]
        return Converted(gradient_sums.upcast_inputs(new.jaxpr, upcast), specs)

    def _alike(self, plan: Plan, new: Converted) -> Converted:
        """Returns the jaxpr of an earlier plan that is equivalent, else the new one.

        The first block of a stack has a float32 input, and the others have 16-bit
        inputs. If each equation runs alike in both, the caller casts the input of the
        others to float32, and JAX lowers all blocks as one function.
        """
        for other in plan.others.values():
            if other not in self._known:
                continue
            old = self._known[other]
            are_upcast = all(
                (mine.state, its.state) == (State.LOW, State.SOFT)
                # A parameter is cast at each use, so that its gradients add up in
                # float32.
                and mine.kind.is_cast_once
                and its.kind.is_cast_once
                and its.stored is None
                for mine, its in zip(plan.input_specs, other.input_specs, strict=True)
                if mine != its
            )
            is_same = other.result_specs == plan.result_specs and run_alike(other, plan)
            if are_upcast and is_same:
                return old
        return new


def _passes_on(step: Step) -> bool:
    """Whether a cast to float32 leaves a 16-bit value as it is."""
    is_cast = params.op_of(step.eqn) == "convert_element_type"
    passes = step.decision is not None and step.decision.run is Run.PASS
    return is_cast and passes and step.operands[0].is_narrow


class _Frame:
    """The values of one jaxpr while it runs.

    Args:
      casts: casts values.
      plan: the plan of the jaxpr.
      arrays: its arguments.

    Attributes:
      known: the values, by variable.
    """

    def __init__(self, casts: Casts, plan: Plan, arrays: Sequence[Array]) -> None:
        parts = plan.parts
        self._casts = casts
        self.known: dict[Var, Value] = {}
        consts = map(Value, parts.consts, plan.constants)
        self.known.update(zip(parts.constvars, consts, strict=True))
        inputs = map(Value, arrays, plan.inputs)
        self.known.update(zip(parts.invars, inputs, strict=True))
        # Values that have left a function of one 16-bit value, by their new states.
        self._left: dict[tuple[Var, State | None], Value] = {}

    def operands(self, step: Step) -> list[Value]:
        """Returns the operands of an equation, as it reads them."""
        return list(map(self.read, step.eqn.invars, step.operands))

    def read(self, atom: Var, facts: Facts) -> Value:
        """Returns a value as it is read.

        A value that leaves a function of one 16-bit value is cast once.
        """
        if structure.is_literal(atom):
            number = atom.val if facts.state is None else as_float32(atom.val)
            return Value(structure.as_array(number), facts)
        value, key = self.known[atom], (atom, facts.state)
        if value.facts is facts:
            return value
        if key not in self._left:
            self._left[key] = Value(self._casts.as_spec(value, facts.spec), facts)
        return self._left[key]
