"""Gives gathers of labels a cheaper derivative.

A loss takes one number of each row of log-probabilities or logits, at the label of the
row. The derivative of this gather is a scatter into an array of zeros, as large as all
logits in float32, which XLA for GPUs writes and reads again. The gathers that this pass
replaces return the same numbers. Their derivative is a selection, which XLA fuses with
the derivative of the softmax.

The pass applies to each gather that can read no element twice. A lookup of the rows of
a table can, and is left alone. If no derivative is taken, nothing changes.
"""

from collections.abc import Callable

from jmp_lite.jaxprs import gathers, params, structure
from jmp_lite.jaxprs.types import Eqn


class LabelGathers:
    """Replaces gathers in jaxprs, each one once.

    Attributes:
      n_replaced: the number of gathers that were replaced.
    """

    def __init__(self) -> None:
        self._known: dict[Eqn, Eqn | None] = {}
        self.n_replaced = 0

    def replaced(
        self, parts: structure.Parts, is_kept: Callable[[Eqn], bool]
    ) -> structure.Parts:
        """Returns the parts of a jaxpr with some gathers replaced.

        Args:
          parts: the parts.
          is_kept: whether an equation runs as traced.
        """
        found = [eqn for eqn in parts.eqns if params.op_of(eqn) == "gather"]
        if not found:
            return parts
        definitions = gathers.Definitions(parts)
        new = {
            eqn: self._selecting(eqn, definitions) for eqn in found if not is_kept(eqn)
        }
        return parts._replace(eqns=[new.get(eqn) or eqn for eqn in parts.eqns])

    def _selecting(self, eqn: Eqn, definitions: gathers.Definitions) -> Eqn | None:
        # An equation is the key of decisions, so a block that is called twice gets one
        # new gather: two would be lowered as two functions.
        if eqn not in self._known:
            made = gathers.selecting(eqn, definitions)
            self.n_replaced += made is not None
            self._known[eqn] = made
        return self._known[eqn]
