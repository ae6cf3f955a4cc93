"""Casts 16-bit values to float32 once, outside of the calls that read them.

The gradients of all uses of such a value then add up in float32.
"""

from jmp_lite.jaxprs import params, structure, trace
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, Var


def is_upcast(eqn: Eqn) -> bool:
    """Whether an equation casts a 16-bit variable to float32."""
    if params.op_of(eqn) != "convert_element_type":
        return False
    (atom,), (var,) = eqn.invars, eqn.outvars
    is_low = structure.is_float(atom) and not structure.is_literal(atom)
    return (
        is_low and structure.is_float32(var) and structure.dtype_of(atom).itemsize == 2
    )


def find_upcast_inputs(jaxpr: Jaxpr) -> frozenset[int]:
    """Returns the 16-bit inputs of a jaxpr that are only cast to float32."""
    parts = structure.parts(jaxpr)
    # For example, the logits ``y`` of ``logsumexp(y) - take_along_axis(y, labels)``:
    # both functions are jit-compiled calls that cast it.
    upcast = {eqn.invars[0] for eqn in parts.eqns if is_upcast(eqn)}
    read = {
        atom
        for eqn in parts.eqns
        for atom in eqn.invars
        if not structure.is_literal(atom) and not is_upcast(eqn)
    }
    read.update(atom for atom in parts.outvars if not structure.is_literal(atom))
    return frozenset(
        i for i, var in enumerate(parts.invars) if var in upcast and var not in read
    )


def upcast_inputs(jaxpr: Jaxpr, upcast: frozenset[int]) -> Jaxpr:
    """Returns a jaxpr that takes some of its inputs in float32."""
    if not upcast:
        return jaxpr
    parts = structure.parts(jaxpr)
    given = {parts.invars[i] for i in upcast}

    def steps(env: dict[Var, Array]) -> None:
        for eqn in parts.eqns:
            if is_upcast(eqn) and eqn.invars[0] in given:
                env[eqn.outvars[0]] = env[eqn.invars[0]]
            else:
                trace.run_equations([eqn], env)

    avals = [
        structure.retyped(var.aval, "float32")
        if var in given
        else structure.type_of(var)
        for var in parts.invars
    ]
    return trace.retraced(jaxpr, avals, steps)
