"""Walks through a jaxpr, and decides how each equation runs.

The walk goes forward. It knows the facts of the operands of each equation, decides, and
finds the facts of the results. Loops are walked to a fixed point.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jmp_lite.autocasting.decide import values
from jmp_lite.autocasting.decide.decisions import (
    Carry,
    Decision,
    Plan,
    Run,
    Site,
    Step,
)
from jmp_lite.autocasting.decide.equation import decide, decide_to_keep
from jmp_lite.autocasting.decide.facts import (
    Facts,
    Kind,
    Lineage,
    Origin,
    Readers,
    Spec,
    State,
    join_specs,
    leave_call,
    origin_outside,
)
from jmp_lite.autocasting.decide.loops import Slot, carry_spec
from jmp_lite.autocasting.decide.readers import (
    readers_of_carries,
    readers_of_floats,
    readers_of_results,
)
from jmp_lite.autocasting.decide.values import is_inside_function, leave_functions
from jmp_lite.jaxprs import params, sharding, source, structure
from jmp_lite.jaxprs.products import PRODUCTS
from jmp_lite.jaxprs.types import Eqn, Jaxpr, Var
from jmp_lite.ops import HIGHER_ORDER, PASSING, Precision

if TYPE_CHECKING:
    from jmp_lite.autocasting.plan import Planner


class Walk:
    """Walks through one jaxpr.

    Args:
      planner: plans the jaxprs inside.
      jaxpr: the jaxpr.
      inputs: the facts of its inputs.
      site: its site.
    """

    def __init__(
        self, planner: "Planner", jaxpr: Jaxpr, inputs: Sequence[Facts], site: Site
    ) -> None:
        self._planner = planner
        self._jaxpr = jaxpr
        self._site = site
        self._low_dtype = planner.lookup.low_dtype
        self._parts = structure.parts(jaxpr)
        # Before the plan, so that it decides the gathers that run.
        if "labels" in planner.passes:
            self._parts = self._replace_label_gathers()
        # The readers are those of the jaxpr before the pass, which keeps all variables.
        self._readers = planner.uses.variables(jaxpr, site.readers, site.path)
        self._steps: list[Step] = []
        # Results of functions of one 16-bit value, as ops outside of these read them.
        self._left: dict[Var, Facts] = {}
        self._inputs = [
            self._shared(var, facts._replace(shape=structure.shape_of(var.aval)))
            for var, facts in zip(self._parts.invars, inputs, strict=True)
        ]
        parts = self._parts
        self._constants = [
            values.of_constant(var, array, self._low_dtype)
            for var, array in zip(parts.constvars, parts.consts, strict=True)
        ]
        known = [*parts.constvars, *parts.invars]
        self._known = dict(zip(known, [*self._constants, *self._inputs], strict=True))

    def plan(self) -> Plan:
        """Returns the plan of the jaxpr."""
        for eqn in self._parts.eqns:
            path = source.join(self._site.path, *source.scopes(eqn))
            of_results = [self._readers[var] for var in eqn.outvars]
            site = self._site._replace(
                path=path, readers=readers_of_results(eqn, of_results)
            )
            step = self._step(eqn, self._operands(eqn, site), site)
            results = list(map(self._shared, eqn.outvars, step.results))
            pairs = enumerate(zip(eqn.outvars, results, strict=True))
            raised = frozenset(i for i, pair in pairs if self._is_raised(*pair))
            for i in raised:
                value, spec = results[i], Spec(State.HARD, results[i].kind)
                lineage = Lineage(value.roots)
                results[i] = Facts.of(spec, value.origin, value.shape, lineage)
            step = step._replace(results=results, raised=raised)
            self._steps.append(step)
            self._known.update(zip(eqn.outvars, step.results, strict=True))
        results = list(map(self._read, self._parts.outvars))
        return Plan(
            self._jaxpr,
            self._parts,
            self._inputs,
            self._constants,
            self._steps,
            results,
        )

    def _replace_label_gathers(self) -> structure.Parts:
        at, labels = self._planner.lookup, self._planner.labels

        def is_kept(eqn: Eqn) -> bool:
            path = source.join(self._site.path, *source.scopes(eqn))
            # In a kernel (``low_call``) and in an inner autocast everything runs as
            # written.
            return at.match("gather", path).precision is Precision.KEEP

        before = labels.n_replaced
        parts = labels.replaced(self._parts, is_kept)
        self._planner.passes["labels"] += labels.n_replaced - before
        return parts

    # ---------------------------------------------------------------------- values

    def _read(self, atom: Var) -> Facts:
        if structure.is_literal(atom):
            return values.of_literal(atom, self._low_dtype)
        return self._known[atom]

    @functools.cached_property
    def _n_readers(self) -> Counter[Var]:
        atoms = (atom for eqn in self._parts.eqns for atom in eqn.invars)
        return Counter(atom for atom in atoms if not structure.is_literal(atom))

    def _shared(self, var: Var, facts: Facts) -> Facts:
        """Returns the facts of a value, of which a stored one may be shared."""
        if facts.stored is None:
            return facts
        n, is_stored = self._n_readers[var], facts.stored.itemsize < 2
        is_read_twice = n > 1 and not self._readers[var].take_16_bits
        # Weights in int8 are cast at each use: they have no gradient to add up.
        has_gradient = jnp.issubdtype(facts.stored, jnp.floating)
        # Added up in bfloat16, the gradient of a parameter that 42 products read stops
        # at 256. With two reads, each gradient is rounded once.
        is_shared = is_read_twice and has_gradient if is_stored else n > 2
        return facts._replace(is_shared=is_shared)

    def _is_raised(self, var: Var, facts: Facts) -> bool:
        """Whether several float32 ops, and no others, read a 16-bit value.

        In ``h / norm(where(h != 0, h, 1))`` each would upcast it, or a choice of it.
        The gradients of the upcasts would be rounded before they are added. Where they
        cancel, little would be left. So the value itself is cast to float32, once.
        """
        # Upcast at two places, a value got a gradient that was 304 % wrong.
        if facts.state is not State.LOW or self._n_readers[var] < 2:
            return False
        return self._readers[var].demand_float32

    def _operands(self, eqn: Eqn, site: Site) -> list[Facts]:
        """Returns the operands of an equation, as it reads them.

        An op may end functions of one 16-bit value. The results of such functions have
        16 bits there, even if the op is float32. Otherwise the result of a norm that a
        product and a loss read would be stored twice, in 16 bits and in float32.
        """
        operands = list(map(self._read, eqn.invars))
        if not any(value.lineage.is_rejoined for value in operands):
            return operands
        op = params.op_of(eqn)
        # A branch or a loop is planned for what it is given: a norm's result enters it
        # in 16 bits, or in float32 if all that reads it inside wants float32.
        if op in _CUSTOM_OR_CONTROL:
            uses = self._planner.uses
            of_operands = uses.equation_facts(eqn, site.readers, self._site.path)
            return leave_functions(operands, of_operands)
        floats = [value for value in operands if value.state is not None]
        # A 16-bit op casts it by itself.
        is_low = not readers_of_floats(eqn, site.readers).demand_float32
        if is_low or op in _READ_AS_THEY_ARE or is_inside_function(op, floats):
            return operands
        for i, atom in enumerate(eqn.invars):
            if operands[i].lineage.is_rejoined:
                # One cast for all of its readers: as two values it would be stored
                # twice.
                if atom not in self._left:
                    readers = [self._readers[atom]]
                    (self._left[atom],) = leave_functions([operands[i]], readers)
                operands[i] = self._left[atom]
        return operands

    # ------------------------------------------------------------------- equations

    def _step(self, eqn: Eqn, operands: list[Facts], site: Site) -> Step:
        """Returns how an equation of any kind runs."""
        if decision := decide_to_keep(self._planner.lookup, eqn, site.path):
            return self._decided(eqn, operands, site, decision)
        op = params.op_of(eqn)
        if params.is_call(eqn):
            name = params.call_name(eqn)
            return self._only_body(eqn, operands, site, name)
        # Its rules are planned when JAX traces them, after the program has run.
        if op in params.CUSTOM:
            return self._only_body(eqn, operands, site)
        if op not in params.CONTROL:
            return self._equation(eqn, operands, site)
        others = {
            "cond": self._cond,
            "scan": self._loop,
            "while": self._loop,
            "shard_map": self._shard_map,
        }
        return others[op](eqn, operands, site)

    def _equation(self, eqn: Eqn, operands: list[Facts], site: Site) -> Step:
        """Decides an equation in which no jaxpr is planned."""
        readers = readers_of_floats(eqn, site.readers)
        if site.is_in_rule:
            readers |= Readers.TRANSPOSED
        decision = decide(self._planner.lookup, eqn, operands, readers, site.path)
        return self._decided(eqn, operands, site, decision)

    def _decided(
        self, eqn: Eqn, operands: Sequence[Facts], site: Site, decision: Decision
    ) -> Step:
        results = values.of_results(eqn, operands, decision, self._low_dtype)
        return Step(eqn, site, operands, results, decision=decision)

    def _entered(
        self,
        eqn: Eqn,
        operands: Sequence[Facts],
        site: Site,
        bodies: Sequence[tuple[Plan, Sequence[Facts]]],
        number: int = 0,
        carries: Sequence[Carry] = (),
    ) -> Step:
        """Returns how an equation runs, given the plans of its jaxprs.

        Args:
          eqn: the equation.
          operands: its operands.
          site: its site.
          bodies: the plans of the jaxprs inside, each with its operands.
          number: the number of the jaxpr whose results are those of the equation.
          carries: the carries of a loop.
        """
        origins = [[facts.origin for facts in values] for _, values in bodies]
        plan, values = bodies[number]
        lineages = leave_call(plan.lineages, values)
        results = [
            Facts.of(
                spec,
                origin_outside(inside.origin, origins[number]),
                structure.shape_of(var.aval),
                lineage,
            )
            for var, spec, inside, lineage in zip(
                eqn.outvars, plan.result_specs, plan.results, lineages, strict=True
            )
        ]
        plans = [plan for plan, _ in bodies]
        return Step(
            *(eqn, site, operands, results),
            inside=plans,
            origins=origins,
            carries=carries,
        )

    def _only_body(
        self, eqn: Eqn, operands: Sequence[Facts], site: Site, name: str | None = None
    ) -> Step:
        body = self._planner.body(params.body_of(eqn), operands, site, name=name)
        return self._entered(eqn, operands, site, [(body, operands)])

    def _shard_map(self, eqn: Eqn, operands: list[Facts], site: Site) -> Step:
        """Plans the function of each device."""
        call = sharding.shard_map_of(eqn)
        # The gradient of a parameter adds up over the devices in the dtype that it has.
        of_body = [
            _as_spec(facts, facts.spec._replace(stored=None))
            if facts.stored is not None and call.adds_up_gradient(i)
            else facts
            for i, facts in enumerate(operands)
        ]
        body = self._planner.body(params.body_of(eqn), of_body, site)
        return self._entered(eqn, operands, site, [(body, of_body)])

    def _cond(self, eqn: Eqn, operands: list[Facts], site: Site) -> Step:
        """Plans the branches of a cond, and joins their results."""
        _, *others = operands
        traced, planner = params.branches_of(eqn), self._planner
        # In ``switch(i, [exp, lambda x: x @ w, lambda x: x], x)`` the first branch ends
        # in float32 on purpose: the others are planned again, with a cast at their end.
        branches = [planner.body(branch, others, site) for branch in traced]
        rows = [branch.result_specs for branch in branches]
        joined = list(map(join_specs, zip(*rows, strict=True)))
        branches = [
            branch
            if branch.result_specs == joined
            else planner.body(jaxpr, others, site, joined)
            for branch, jaxpr in zip(branches, traced, strict=True)
        ]
        return self._entered(eqn, operands, site, [(one, others) for one in branches])

    def _loop(self, eqn: Eqn, operands: list[Facts], site: Site) -> Step:
        """Plans the body of a loop, and the condition of a while."""
        loop = params.loop_of(eqn)
        of_test, of_body = operands[: loop.n_cond], operands[loop.n_cond :]
        if loop.cond is None:
            # A 16-bit value that every step reads, such as the input of an equilibrium
            # model, is cast at each use, as a parameter is: its gradient would add up
            # in 16 bits over the steps.
            for i, facts in enumerate(of_body[: loop.n_consts]):
                if facts.state is State.LOW:
                    of_body[i] = _as_spec(facts, Spec(State.SOFT, Kind.GIVEN))
        step, carries = self._settle(eqn, loop, of_body, site)
        if loop.cond is None:
            return self._entered(
                eqn, operands, site, [(step, of_body)], carries=carries
            )
        of_test += of_body[loop.carries]
        # A predicate is a boolean: nobody demands float32 of it.
        there = site._replace(readers=[Readers.OTHER])
        test = self._planner.body(loop.cond, of_test, there)
        bodies = [(test, of_test), (step, of_body)]
        return self._entered(eqn, operands, site, bodies, 1, carries)

    def _settle(
        self, eqn: Eqn, loop: params.Loop, operands: list[Facts], site: Site
    ) -> tuple[Plan, list[Carry]]:
        """Returns the plan of a loop's body, for which each carry keeps its spec.

        The body is planned again until no carry rises, since one may raise another.

        Example: in an LSTM, ``h`` is read by products alone. Its slot is LOW, so it
        never rises, even if a step returns float32. The cell ``c`` is a state: its slot
        is FULL, and it starts in float32. In a stack of blocks, ``x`` has the slot
        FOLLOW. It starts low. If a step returns ``x + as_full(f(x))``, its result is
        deliberate float32: ``x`` rises, and the body is planned for a float32 ``x``.

        Args:
          eqn: the equation.
          loop: its parts.
          operands: the operands of the body; the carries change their specs.
          site: its site.
        """
        planner, at, n_carry = self._planner, loop.carries, loop.n_carry
        raised_by = dict[int, Origin]()
        slots = planner.uses.carries(eqn, site.readers[:n_carry], site.path)
        readers = [*readers_of_carries(slots), *site.readers[n_carry:]]
        inside, kinds = site._replace(readers=readers), [slot for slot, _ in slots]
        first, as_carry = operands[at], functools.partial(_as_spec, loop=eqn)
        specs = [
            carry_spec(facts.spec, kind is not Slot.FULL)
            for facts, kind in zip(first, kinds, strict=True)
        ]
        written = [
            i
            for i, kind in enumerate(kinds)
            if kind is Slot.WRITTEN and specs[i].state is not None
        ]
        if written:  # They are low if the body writes low values into undecided ones.
            for i in written:
                specs[i] = Spec(State.SOFT)
            operands[at] = map(as_carry, first, specs)
            once = planner.body(loop.body, operands, inside).result_specs
            for i in written:
                specs[i] = carry_spec(specs[i], once[i].state is State.LOW)
        # Each round raises a carry, and none falls: at most as many rounds as carries.
        while True:
            operands[at] = map(as_carry, first, specs)
            body = planner.body(loop.body, operands, inside, specs)
            rising = [
                i
                for i, kind in enumerate(kinds)
                if kind in (Slot.FOLLOW, Slot.WRITTEN)
                and specs[i].state is State.LOW
                and body.results[i].state is State.HARD
            ]
            if not rising:
                break
            for i in rising:
                specs[i] = Spec(State.HARD)
                origins = [facts.origin for facts in operands]
                raised_by[i] = origin_outside(body.results[i].origin, origins)
        carries: list[Carry] = []
        for i, ((_, reason), spec) in enumerate(zip(slots, specs, strict=True)):
            if spec.state is not None:
                run = Run.LOW if spec.state is State.LOW else Run.FULL
                decision = Decision(run, spec.state, reason)
                carries.append(Carry(i, decision, raised_by.get(i)))
        return body, carries


def _as_spec(facts: Facts, spec: Spec, loop: Eqn | None = None) -> Facts:
    """Returns a value cast to a spec, without its lineage.

    Args:
      facts: the facts of the value.
      spec: the spec.
      loop: the loop whose carry it is; the origin of the value if its state changes.
    """
    changes = loop is not None and spec.state is not facts.state
    return Facts.of(spec, loop if changes else facts.origin, facts.shape)


_CUSTOM_OR_CONTROL = frozenset([*params.CUSTOM, *params.CONTROL])

_READ_AS_THEY_ARE = HIGHER_ORDER | PASSING | PRODUCTS | {"convert_element_type"}
"""Ops that end no function: calls, and ops that cast their operands themselves."""
