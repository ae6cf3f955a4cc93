"""Traces a jaxpr again, with its equations run in another way."""

from collections.abc import Callable, Sequence

from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Array, Aval, Eqn, Jaxpr, Var


def retraced(
    jaxpr: Jaxpr, avals: Sequence[Aval], steps: Callable[[dict[Var, Array]], None]
) -> Jaxpr:
    """Returns a closed jaxpr, traced again with its equations run in another way.

    Args:
      jaxpr: the jaxpr.
      avals: the types of its inputs, which may be new ones.
      steps: takes the inputs by variable, and adds the results.
    """
    old = structure.parts(jaxpr)

    def run(*arrays: Array) -> list[Array]:
        env = dict(zip(old.constvars, old.consts, strict=True))
        env.update(zip(old.invars, arrays, strict=True))
        steps(env)
        return [read(env, atom) for atom in old.outvars]

    return structure.trace(run, avals, jaxpr)


def run_equations(eqns: Sequence[Eqn], env: dict[Var, Array]) -> None:
    """Runs equations, and adds their results by variable."""
    for eqn in eqns:
        with source.context_of(eqn):
            results = params.bind(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: dict[Var, Array], atom: Var) -> Array:
    """Returns the value of an atom, given values by variable."""
    return structure.as_array(atom.val) if structure.is_literal(atom) else env[atom]
