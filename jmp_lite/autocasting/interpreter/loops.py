"""Runs loops: each carry keeps one precision from step to step."""

import abc
from collections.abc import Sequence

import jax.numpy as jnp

from jmp_lite.autocasting.decide import carry
from jmp_lite.autocasting.decide.carry import Slot
from jmp_lite.autocasting.decide.decisions import DecisionRecord
from jmp_lite.autocasting.decide.facts import Kind, Origin, Readers, Spec, State
from jmp_lite.autocasting.decide.loop import Loop
from jmp_lite.autocasting.decide.readers import readers_of_carries
from jmp_lite.autocasting.interpreter import held_constants
from jmp_lite.autocasting.interpreter.conversion import (
    Converted,
    Converter,
    Site,
    origin_outside,
)
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.autocasting.passes import rematerialize, scan_weight_gradients
from jmp_lite.jaxprs import params
from jmp_lite.jaxprs.evaluate import CarryForms
from jmp_lite.jaxprs.types import Array, Dtype, Eqn, Function, Jaxpr


class LoopConverter(Converter, abc.ABC):
    """Converts loops."""

    def scan(self, eqn: Eqn, operands: Sequence[Value], site: Site) -> Sequence[Value]:
        """Runs a scan, with the passes over its body."""
        n_consts, _ = params.scan_counts(eqn)
        # A 16-bit value that every step reads is cast at each use, as a parameter is:
        # its gradient would add up in 16 bits over the steps.
        given = Spec(State.SOFT, Kind.GIVEN)
        consts = [
            self.cast_to_spec(value, given) if value.state is State.LOW else value
            for value in operands[:n_consts]
        ]
        return super().scan(eqn, [*consts, *operands[n_consts:]], site)

    def bind_scan(
        self, eqn: Eqn, operands: Sequence[Value], body: Converted
    ) -> Sequence[Array]:
        """Binds a scan, after the passes over its body."""
        arrays, jaxpr = self.unpack_all(operands, body.given), body.jaxpr
        n_consts, _ = params.scan_counts(eqn)
        if "rematerialize" in self.rules.passes:
            jaxpr = rematerialize.rematerialize(body.jaxpr, n_consts)
            self.passes["rematerialize"] += jaxpr is not body.jaxpr
        dtypes = [body.given[i].held for i in range(n_consts)]
        held = [i for i, dtype in enumerate(dtypes) if _is_float(dtype)]
        if not held:
            return self._scan_of(eqn, jaxpr)(*arrays)
        return held_constants.run_scan(eqn, arrays, jaxpr, held, self._scan_of)

    def _scan_of(self, eqn: Eqn, jaxpr: Jaxpr) -> Function:
        """Returns a function that runs a scan with another body."""
        if "scan_weight_gradients" in self.rules.passes:
            scan = scan_weight_gradients.rewritten(eqn, jaxpr)
            if scan is not None:
                self.passes["scan_weight_gradients"] += 1
                return scan
        return lambda *arrays: params.bind_scan(eqn, arrays, jaxpr)

    def site_of_test(self, site: Site) -> Site:
        """Returns the site of the condition of a while at a site."""
        return site._replace(readers=[Readers.OTHER])

    def carries(
        self, eqn: Eqn, operands: Sequence[Value], at: slice, site: Site
    ) -> CarryForms[Spec, Site, Converted]:
        """Returns the slots of a loop's carries, and their first specs.

        A carry with the slot FOLLOW starts low, and becomes float32 if the body makes
        it hard. A carry with the slot WRITTEN is low if the body writes low values into
        it, whatever its initial value is.
        """
        loop = Loop.read(eqn)
        n_carry, raised_by = len(loop.carries), dict[int, Origin]()
        slots = self.uses.carries(eqn, site.readers[:n_carry], site.path)
        given = list(map(self.form, operands[at]))
        readers = [*readers_of_carries(slots), *site.readers[n_carry:]]
        inside, kinds = site._replace(readers=readers), [slot for slot, _ in slots]
        specs = list(map(carry.first_spec, given, kinds))
        if Slot.WRITTEN in kinds:
            values = list(operands)
            trials = list(map(carry.trial_spec, specs, kinds))
            values[at] = self.converted(eqn, operands[at], trials)
            made = self.body(loop.body, values, inside).made
            specs = list(map(carry.spec_after_trial, specs, kinds, made))

        def next_forms(forms: Sequence[Spec], body: Converted) -> list[Spec]:
            found = list(forms)
            for i, (slot, made) in enumerate(zip(kinds, body.unforced, strict=False)):
                if carry.must_rise(slot, forms[i], made):
                    found[i] = carry.RAISED
                    raised_by[i] = origin_outside(body.origins[i], operands)
            return found

        def note(forms: Sequence[Spec]) -> None:
            for i, (slot, form) in enumerate(zip(slots, forms, strict=True)):
                if form.state is not None:
                    made = carry.final_decision(slot, form.state)
                    record = DecisionRecord(eqn, made, raised_by.get(i), i)
                    self.records.append(record)

        return CarryForms(specs, next_forms, inside, note)


def _is_float(dtype: Dtype | None) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
