"""Runs a scan on constants of 16 bits, whose gradients add up in float32.

JAX adds up the gradient of a constant, step by step, in the dtype of the constant. So
the derivative is that of the same scan on float32 constants, which each step casts.
"""

from collections.abc import Callable, Sequence

import jax
from jax.custom_derivatives import SymbolicZero

from jmp_lite.jaxprs import params, sharding, structure, trace
from jmp_lite.jaxprs.types import Array, Eqn, Function, Jaxpr, Var


def run_scan(
    eqn: Eqn,
    arrays: Sequence[Array],
    jaxpr: Jaxpr,
    held: Sequence[int],
    scan_of: Callable[[Eqn, Jaxpr], Function],
) -> list[Array]:
    """Runs a scan.

    Args:
      eqn: the scan.
      arrays: its operands.
      jaxpr: its body, for these operands.
      held: the numbers of its constants of 16 bits.
      scan_of: returns a function that runs the scan with another body.
    """
    # The gradient of a bfloat16 weight over 2,000 steps of a recurrent network was more
    # than 4 % wrong as JAX adds it up.
    wide = scan_of(eqn, _add_casts(jaxpr, held))

    def upcast(arrays: Sequence[Array | SymbolicZero]) -> list[Array | SymbolicZero]:
        return [
            sharding.cast(array, "float32")
            if i in held and not isinstance(array, SymbolicZero)
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


def _add_casts(jaxpr: Jaxpr, held: Sequence[int]) -> Jaxpr:
    """Returns a body that takes some constants in float32, and casts them."""
    parts = structure.parts(jaxpr)
    invars = [parts.invars[i] for i in held]

    def steps(env: dict[Var, Array]) -> None:
        for var in invars:
            env[var] = sharding.cast(env[var], structure.dtype_of(var))
        trace.run_equations(parts.eqns, env)

    avals = [
        structure.retyped(var.aval, "float32") if i in held else structure.type_of(var)
        for i, var in enumerate(parts.invars)
    ]
    return trace.retraced(jaxpr, avals, steps)
