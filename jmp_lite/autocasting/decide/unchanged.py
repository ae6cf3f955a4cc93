"""Decides whether rules leave a whole program as traced."""

from jmp_lite.autocasting.decide.equation import runs_low
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.product import raises_precision
from jmp_lite.autocasting.rules.rules import Rules, is_identity
from jmp_lite.autocasting.rules.scopes import LOW_SCOPE
from jmp_lite.jaxprs import custom_rules, params, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.types import Eqn, Jaxpr


def changes_nothing(rules: Rules, jaxpr: Jaxpr) -> bool:
    """Whether rules leave a whole program as traced.

    This is so if no equation may run low, for example because each product asks for the
    highest precision, or because all numbers are integers. A product that the user
    keeps in float32 gets the highest precision, which is a change.

    Args:
      rules: the rules.
      jaxpr: the program.
    """
    if is_identity(rules):
        # Marks win. One for float32 changes nothing here.
        paths = (path for _, path in equations(jaxpr))
        return not any(LOW_SCOPE in path.split("/") for path in paths)
    lookup = RuleLookup(rules)
    return not any(_may_change(lookup, eqn, path) for eqn, path in equations(jaxpr))


def _may_change(rules: RuleLookup, eqn: Eqn, path: str) -> bool:
    """Whether an equation may run low, or a product more precisely than traced.

    The equations inside of it do not count.
    """
    op = params.op_of(eqn)
    if op in params.CUSTOM:
        # A rule, which is traced later, may contain products. JAX's own contain none.
        return not custom_rules.are_of_jax(eqn)
    if op in ("scan", "while") and rules.carry(path) == "follow":
        return True
    if not any(map(structure.is_float32, (*eqn.invars, *eqn.outvars))):
        return False
    if op == "convert_element_type":
        match = rules.scope(path)
        return match is not None and match.precision.lowers
    return runs_low(rules, eqn, path) or raises_precision(rules, eqn, path)
