"""Keeps gradients of 16-bit values in float32 where they are added up.

A call that only casts an input to float32 gets it in float32: the gradients of all uses
of the value then add up in float32.

JAX adds up the gradient of a constant of a scan, step by step, in the dtype of the
constant. So the derivative of a scan on 16-bit constants is that of the same scan on
float32 constants, which each step casts.
"""

from collections.abc import Callable, Sequence

import jax
from jax.custom_derivatives import SymbolicZero

from jmp_lite.jaxprs import params, sharding, structure, trace
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, Var

# ------------------------------------------------------------------- inputs of calls


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


# ------------------------------------------------------------------ constants of scans


def run_scan(
    eqn: Eqn,
    arrays: Sequence[Array],
    jaxpr: Jaxpr,
    narrow: Sequence[int],
    scan_of: Callable[[Eqn, Jaxpr], Function],
) -> list[Array]:
    """Runs a scan.

    Args:
      eqn: the scan.
      arrays: its operands.
      jaxpr: its body, for these operands.
      narrow: the numbers of its constants of 16 bits.
      scan_of: returns a function that runs the scan with another body.
    """
    # The gradient of a bfloat16 weight over 2,000 steps of a recurrent network was more
    # than 4 % wrong as JAX adds it up.
    wide = scan_of(eqn, _add_casts(jaxpr, narrow))

    def upcast(arrays: Sequence[Array | SymbolicZero]) -> list[Array | SymbolicZero]:
        return [
            sharding.cast(array, "float32")
            if i in narrow and not isinstance(array, SymbolicZero)
            else array
            for i, array in enumerate(arrays)
        ]

    if structure.effects_of(jaxpr):  # A function with a rule of its own has none.
        return wide(*upcast(arrays))

    @jax.custom_jvp
    def run(*arrays: Array) -> list[Array]:
        # Without a derivative the weights are read in 16 bits: no float32 copy of them.
        return params.bind_scan(eqn, arrays, jaxpr)

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
    ) -> tuple[list[Array], list[Array]]:
        at, along = upcast(primals), upcast(tangents)
        # A frozen weight has a symbolic zero: no step computes its tangent.
        moved = [i for i, t in enumerate(along) if not isinstance(t, SymbolicZero)]

        def run_moved(*arrays: Array) -> list[Array]:
            every = list(at)
            for i, array in zip(moved, arrays, strict=True):
                every[i] = array
            return wide(*every)

        return jax.jvp(run_moved, [at[i] for i in moved], [along[i] for i in moved])

    run.defjvp(jvp, symbolic_zeros=True)
    return run(*arrays)


def _add_casts(jaxpr: Jaxpr, narrow: Sequence[int]) -> Jaxpr:
    """Returns a body that takes some constants in float32, and casts them."""
    parts = structure.parts(jaxpr)
    invars = [parts.invars[i] for i in narrow]

    def steps(env: dict[Var, Array]) -> None:
        for var in invars:
            env[var] = sharding.cast(env[var], structure.dtype_of(var))
        trace.run_equations(parts.eqns, env)

    avals = [
        structure.retyped(var.aval, "float32")
        if i in narrow
        else structure.type_of(var)
        for i, var in enumerate(parts.invars)
    ]
    return trace.retraced(jaxpr, avals, steps)
