"""Plans how a program runs: a decision for each equation, before anything runs.

A plan is made in three passes over a jaxpr. ``contents`` and ``ancestry`` follow values
forward, and mark ops. ``readers`` goes backward, and finds what the readers of each
value need. ``Walk`` goes forward again, and decides. A plan depends on types, and on no
numbers but those that stand in the program.

Example, for ``jnp.exp(x @ w)`` under the preset "mixed"::

    given      x, w                  arguments: undecided, cast where 16 bits are needed
    backward   y: OUTPUT             exp reads it in float32, so exp(y) is demanded
    walk       y = dot_general x w   LOW: x and w are cast; y is 16-bit
               z = exp y             FULL: y is cast to float32; z is deliberate float32
"""

from collections import Counter
from collections.abc import Sequence

from jmp_lite.autocasting.decide import values
from jmp_lite.autocasting.decide.decisions import Plan, Site
from jmp_lite.autocasting.decide.facts import (
    Facts,
    Input,
    Readers,
    Spec,
    enter_call,
    enter_others,
    leave_others,
)
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.readers import UseAnalysis
from jmp_lite.autocasting.decide.values import leave_functions
from jmp_lite.autocasting.passes.labels import LabelGathers
from jmp_lite.autocasting.rules.rules import Rules, requested_formats
from jmp_lite.autocasting.walk import Walk
from jmp_lite.jaxprs import source, structure
from jmp_lite.jaxprs.types import Aval, Jaxpr


class Planner:
    """Plans jaxprs; one for each call of an autocast function.

    Args:
      rules: the rules, with the compute dtype of a device.

    Attributes:
      rules: the rules.
      lookup: the rules, by path.
      uses: the readers of each value.
      labels: replaces the gathers of labels.
      passes: the passes over jaxprs, with the number of loops, calls or gathers that
        each has changed.
      saved: the names of values that a checkpoint saves in addition to its policy, such
        as the scales of float8: one number for each operand.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.passes = Counter(dict.fromkeys(rules.passes, 0))
        # Computed again in a checkpoint, a scale of float8 is a pass over its array.
        requested = requested_formats(rules)
        names = [name for one in requested for name in one.saved]
        self.saved = names if requested else None
        self.forget()

    def forget(self) -> None:
        """Forgets all jaxprs."""
        self.lookup = RuleLookup(self.rules)
        self.uses = UseAnalysis(self.lookup)
        self.labels = LabelGathers()
        self._known: dict[object, dict[object, Plan]] = {}

    def function(
        self, traced: Jaxpr, types: Sequence[Aval], paths: Sequence[str] = ()
    ) -> Plan:
        """Returns the plan of a traced function.

        Args:
          traced: its jaxpr, closed.
          types: the types of its arguments. Some that were traced in float32 may have
            16 bits.
          paths: the path of each argument.
        """
        parts = structure.parts(traced)
        paths = paths or [""] * len(types)
        inputs = list(map(values.of_argument, parts.invars, types, paths))
        return self.plan(
            traced, inputs, Site("", [Readers.OUTPUT] * len(parts.outvars))
        )

    def plan(self, jaxpr: Jaxpr, inputs: Sequence[Facts], site: Site) -> Plan:
        """Returns the plan of a jaxpr.

        Args:
          jaxpr: the jaxpr, closed.
          inputs: the facts of its inputs.
          site: its site.
        """
        return Walk(self, jaxpr, inputs, site).plan()

    def body(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Facts],
        site: Site,
        required: Sequence[Spec] = (),
        name: str | None = None,
    ) -> Plan:
        """Returns the plan of a jaxpr inside of an equation.

        A jaxpr with the same rules, operands and readers is planned once, so a block
        that is called many times is lowered once. A function of one 16-bit value may
        extend across a mere call. For example, a norm calls ``jnp.var``, which is a
        ``jit``.

        Args:
          jaxpr: the jaxpr.
          operands: the facts of its operands.
          site: the site of the equation.
          required: the specs of its first results.
          name: the name of a mere call; None for any other equation.
        """
        path, is_call = source.join(site.path, name or ""), name is not None
        # Lowering shares one function for each jaxpr object: 24 jit-compiled blocks
        # were lowered to 10 functions with this memory, and to 173 without.
        readers = tuple(self.uses.readers_of_outputs(jaxpr, site.readers))
        # Of the path, what the rules say at it. With whole paths no two blocks would be
        # equal.
        rules = self.lookup.rules_inside(jaxpr, path)
        key = jaxpr, readers, rules, site.is_in_rule, tuple(required)
        known = self._known.setdefault(key, {})
        # Inside of a loop or a branch a value may be another one than outside: it is a
        # root of its own there.
        enter = enter_call if is_call else enter_others
        facts_inside = tuple(facts.spec for facts in operands), enter(operands)
        if facts_inside not in known:
            inputs = [
                Facts.of(spec, Input(i), (), lineage)
                for i, (spec, lineage) in enumerate(zip(*facts_inside, strict=True))
            ]
            there = Site(path, readers, site.is_in_rule)
            plan = self.plan(jaxpr, inputs, there)
            results = plan.results
            if is_call:
                plan.lineages = [r.lineage if r.has_lineage else None for r in results]
            else:
                # A norm in a branch or a layer of a scan ends there, in 16 bits. One in
                # a mere call may go on behind it, as ``jnp.var`` in a norm does.
                plan.results = results = leave_functions(results, readers)
                plan.lineages = leave_others(results)
            specs = [facts.spec for facts in results]
            plan.result_specs = [*required, *specs[len(required) :]]
            plan.name, plan.others = name or "", known
            known[facts_inside] = plan
        return known[facts_inside]
