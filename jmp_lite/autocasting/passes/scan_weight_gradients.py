"""Computes the gradient of a weight that all steps of a loop read, in one product.

JAX adds up the gradient of such a weight step by step, and reads and writes all of it
at each step. This pass stacks the other operand of the product, and the gradient of the
product. One product of both stacks, after the loop, is the sum. It adds up in float32,
like all products, and is rounded once. The pass applies if the weight is larger than
the stacked arrays of a step, as in a recurrent network. Results do not change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp_lite.jaxprs import params, products, sharding, source, structure, trace
from jmp_lite.jaxprs.dataflow import readers_of
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, Var
from jmp_lite.ops import MOVING_OR_CASTING


class _WeightProduct(NamedTuple):
    """A product with a weight.

    Attributes:
      eqn: the product.
      side: the number of the operand that is the weight.
      consts: the numbers of the constants that the weight is made of.
      total: the sum that is the only reader of the product, or else the product. The
        tangent of the product is added to this variable.
    """

    eqn: Eqn
    side: int
    consts: frozenset[int]
    total: Var

    @property
    def weight(self) -> Var:
        """The variable of the weight."""
        return self.eqn.invars[self.side]

    @property
    def other(self) -> Var:
        """The variable of the other operand."""
        return self.eqn.invars[1 - self.side]


class _ScanBody(NamedTuple):
    """The body of a loop, and its products with weights.

    Attributes:
      eqn: the scan.
      parts: its jaxpr.
      moves: the equations that make weights from constants.
      uses: the products.
    """

    eqn: Eqn
    parts: structure.Parts
    moves: Sequence[Eqn]
    uses: Sequence[_WeightProduct]


def rewritten(eqn: Eqn, jaxpr: Jaxpr) -> Callable[..., list[Array]] | None:
    """Returns a function that runs a scan; None if it has no such weight.

    Args:
      eqn: the scan.
      jaxpr: the body to run, a closed jaxpr.

    Returns:
      A function of the constants, the initial carries and the sliced arrays. Its
      derivative adds up the gradients of weights after the loop.
    """
    body = _find_products(eqn, jaxpr)
    # A ``custom_jvp`` has no effects: a loop with a callback keeps JAX's gradient.
    if not body.uses or structure.effects_of(jaxpr):
        return None

    def plain(*arrays: Array) -> list[Array]:
        # A weight that each step would cast is cast once, before the loop.
        is_cast = any(use.weight not in body.parts.invars for use in body.uses)
        if not is_cast or products.is_at_most(params.scan_length(eqn), 1):
            return params.bind_scan(eqn, arrays, jaxpr)
        n_consts = params.loop_of(eqn).n_consts
        weights = _weights(body, body.uses, arrays[:n_consts])
        fixed = _fix_weights(body.uses, weights)
        return _scan(_drop_weights(body), fixed, {}, [], arrays)[0]

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
    ) -> tuple[list[Array], list[Array]]:
        return _linearized(body, primals, tangents)

    run = jax.custom_jvp(plain)
    run.defjvp(jvp, symbolic_zeros=True)
    return run


class Moved(NamedTuple):
    """The values that the body of a loop makes from constants by casts and moves.

    Attributes:
      eqns: the equations that make them.
      made_of: the numbers of the constants in each variable.
    """

    eqns: Sequence[Eqn]
    made_of: Mapping[Var, frozenset[int]]


def moved_constants(parts: structure.Parts, n_consts: int) -> Moved:
    """Finds values that are only cast and moved, and do not become larger."""
    made_of = {var: frozenset([i]) for i, var in enumerate(parts.invars[:n_consts])}
    eqns: list[Eqn] = []
    for eqn in parts.eqns:
        atoms = [atom for atom in eqn.invars if not structure.is_literal(atom)]
        if not atoms or not all(atom in made_of for atom in atoms):
            continue
        is_move = params.op_of(eqn) in MOVING_OR_CASTING
        if is_move and products.is_at_most(_n_bytes(eqn.outvars[:1]), _n_bytes(atoms)):
            union = frozenset[int]().union(*(made_of[atom] for atom in atoms))
            made_of[eqn.outvars[0]] = union
            eqns.append(eqn)
    return Moved(eqns, made_of)


def _n_bytes(atoms: Sequence[Var]) -> int:
    return sum(atom.aval.size * structure.dtype_of(atom).itemsize for atom in atoms)


def _find_products(eqn: Eqn, jaxpr: Jaxpr) -> _ScanBody:
    """Finds the products whose weights are larger than the arrays to stack."""
    parts = structure.parts(jaxpr)
    n_consts = params.loop_of(eqn).n_consts
    moves, made_of = moved_constants(parts, n_consts)
    readers = readers_of(parts)
    uses = [
        _WeightProduct(step, side, made_of[step.invars[side]], _sum_of(step, readers))
        for step in parts.eqns
        if params.op_of(step) == "dot_general"
        for side in (0, 1)
        if step.invars[side] in made_of and step.invars[1 - side] not in made_of
    ]
    return _ScanBody(eqn, parts, moves, [use for use in uses if _is_worth_it(use)])


def _is_worth_it(use: _WeightProduct) -> bool:
    # A layer that is used again on a large batch moves less if its gradient is added up
    # in the loop. A size may be symbolic (``jax.export``): unknown is no.
    stacked = use.other.aval.size + use.eqn.outvars[0].aval.size
    return products.is_at_most(1, stacked) and products.is_at_most(
        stacked, use.weight.aval.size
    )


def _sum_of(product: Eqn, readers: Mapping[Var, list[Eqn | None]]) -> Var:
    """Returns the sum that is the only reader of a product, or else the product."""
    (var,) = product.outvars
    while True:
        reader, *others = readers.get(var, [None])
        # ``h @ w + x @ u + b``: one stack of gradients serves all products of a sum.
        if others or reader is None or params.op_of(reader) not in ("add", "add_any"):
            return var
        (result,) = reader.outvars
        if (result.aval.shape, result.aval.dtype) != (var.aval.shape, var.aval.dtype):
            return var
        var = result


def _linearized(
    body: _ScanBody, primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
) -> tuple[list[Array], list[Array]]:
    """Returns the results of a loop and their tangents.

    The tangents of the products are computed for all steps at once. Their transpose is
    the one product that computes the gradient of a weight.
    """
    n_consts = params.loop_of(body.eqn).n_consts
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    # A frozen weight stacks nothing, and costs no product.
    consts = [i for i in moved if i < n_consts]
    uses = [use for use in body.uses if use.consts & {*consts}]
    others = list(dict.fromkeys(use.other for use in uses))
    sums = list(dict.fromkeys(use.total for use in uses))

    def weights(*arrays: Array) -> list[Array]:
        every = [*primals[:n_consts]]
        for i, array in zip(consts, arrays, strict=True):
            every[i] = array
        return _weights(body, uses, every)

    fixed_weights, directions = jax.jvp(
        weights, [primals[i] for i in consts], [tangents[i] for i in consts]
    )
    fixed = _fix_weights(uses, fixed_weights)

    def shifted(
        shifts: Sequence[Array], *arrays: Array
    ) -> tuple[list[Array], list[Array]]:
        every = [*primals]
        for i, array in zip(moved, arrays, strict=True):
            every[i] = array
        return _scan(body, fixed, dict(zip(sums, shifts, strict=True)), others, every)

    length = params.scan_length(body.eqn)
    # On an Explicit mesh the stacks are sharded as what they are added to.
    zeros = [sharding.zeros(var.aval, length) for var in sums]
    results, linear, stacks = jax.linearize(
        shifted, zeros, *(primals[i] for i in moved), has_aux=True
    )
    shifts: dict[Var, Array] = {}
    for use, direction in zip(uses, directions, strict=True):
        shift = _products(use, stacks[others.index(use.other)], direction)
        shifts[use.total] = shifts[use.total] + shift if use.total in shifts else shift
    out = linear([shifts[var] for var in sums], *(tangents[i] for i in moved))
    return results, out


def _weights(
    body: _ScanBody, uses: Sequence[_WeightProduct], consts: Sequence[Array]
) -> list[Array]:
    """Returns the weights of products, given the constants of the loop."""
    env = dict(zip(body.parts.invars[: len(consts)], consts, strict=True))
    wanted = {use.weight for use in uses}
    needed: list[Eqn] = []
    for eqn in reversed(body.moves):
        if not wanted.isdisjoint(eqn.outvars):
            needed.append(eqn)
            wanted.update(a for a in eqn.invars if not structure.is_literal(a))
    trace.run_equations(needed[::-1], env)
    return [env[use.weight] for use in uses]


def _drop_weights(body: _ScanBody) -> _ScanBody:
    """Returns a body without the equations that make weights and nothing else."""
    of_weights = {(use.eqn, use.weight) for use in body.uses}
    readers, dropped = readers_of(body.parts), set[Eqn]()
    for eqn in reversed(body.moves):
        pairs = [(reader, var) for var in eqn.outvars for reader in readers[var]]
        if all(
            reader is not None and (reader in dropped or (reader, var) in of_weights)
            for reader, var in pairs
        ):
            dropped.add(eqn)
    eqns = [eqn for eqn in body.parts.eqns if eqn not in dropped]
    return body._replace(parts=body.parts._replace(eqns=eqns))


def _fix_weights(
    uses: Sequence[_WeightProduct], weights: Sequence[Array]
) -> dict[Eqn, tuple[int, Array]]:
    """Returns the side and the weight of each product, by its equation."""
    pairs = zip(uses, weights, strict=True)
    return {use.eqn: (use.side, weight) for use, weight in pairs}


def _products(use: _WeightProduct, stack: Array, direction: Array) -> Array:
    """Returns the products of stacked operands and one weight, for all steps."""
    contracted, batch = products.dot_dimensions(use.eqn)
    # Axes with a sharding in their types cannot be merged.
    if not any(batch) and not sharding.is_sharded(stack):
        return _one_product(use, stack, direction, *contracted)

    def product(other: Array) -> Array:
        pair = (direction, other) if use.side == 0 else (other, direction)
        return params.bind(use.eqn, pair)[0]

    return jax.vmap(product)(stack)


def _one_product(
    use: _WeightProduct, stack: Array, direction: Array, *contracted: Sequence[int]
) -> Array:
    """Returns these products as one product of two matrices.

    Its transpose contracts one axis. With two axes, XLA for CPUs may add up in 16 bits
    (jax 0.12).
    """
    of_weight, of_other = contracted if use.side == 0 else contracted[::-1]
    n_contracted = len(of_weight)
    of_other = [axis + 1 for axis in of_other]
    last = range(stack.ndim - n_contracted, stack.ndim)
    rows = jnp.moveaxis(stack, of_other, last)
    columns = jnp.moveaxis(direction, of_weight, range(n_contracted))
    free = rows.shape[: stack.ndim - n_contracted], columns.shape[n_contracted:]
    size = math.prod(columns.shape[:n_contracted])
    matrices = (rows.reshape(-1, size), columns.reshape(size, -1))
    flat = params.bind_flat_dot(use.eqn, matrices)
    out = flat.reshape(*free[0], *free[1])
    if use.side == 1:
        return out
    # The weight is the left operand, so its axes come first, after the axis of steps.
    n_free = len(free[1])
    return jnp.moveaxis(out, range(-n_free, 0), range(1, 1 + n_free))


def _scan(
    body: _ScanBody,
    fixed: Mapping[Eqn, tuple[int, Array]],
    shifts: Mapping[Var, Array],
    others: Sequence[Var],
    arrays: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """Runs a loop with fixed weights and sums that can be shifted.

    Args:
      body: the body.
      fixed: the side and the weight of each product, by its equation.
      shifts: for each shifted sum, a stacked array with its tangent.
      others: the variables to stack.
      arrays: the operands of the scan.

    Returns:
      The results of the loop, and the stacked arrays.
    """
    parts = body.parts
    loop = params.loop_of(body.eqn)
    consts, start = arrays[: loop.n_consts], arrays[loop.carries]

    def step(
        carry: Sequence[Array], now: tuple[Sequence[Array], Sequence[Array]]
    ) -> tuple[list[Array], tuple[list[Array], list[Array]]]:
        sliced, shifts_now = now
        shift = dict(zip(shifts, shifts_now, strict=True))
        env = dict(zip(parts.constvars, parts.consts, strict=True))
        env.update(zip(parts.invars, [*consts, *carry, *sliced], strict=True))
        for eqn in parts.eqns:
            if eqn in fixed:
                side, weight = fixed[eqn]
                other = env[eqn.invars[1 - side]]
                pair = [other, weight] if side else [weight, other]
                with source.context_of(eqn):
                    (env[eqn.outvars[0]],) = params.bind(eqn, pair)
            else:
                trace.run_equations([eqn], env)
            for var in eqn.outvars:
                if var in shift:
                    env[var] = _add_tangent(env[var], shift[var])
        out = [trace.read(env, atom) for atom in parts.outvars]
        stacks = out[loop.n_carry :], [env[var] for var in others]
        return out[: loop.n_carry], stacks

    last, (stacked, kept) = lax.scan(
        step,
        list(start),
        (list(arrays[loop.carries.stop :]), list(shifts.values())),
        **params.scan_options(body.eqn),
    )
    return [*last, *stacked], kept


@jax.custom_jvp
def _add_tangent(value: Array, shift: Array) -> Array:
    """Returns a value whose tangent is the sum of its own and that of a shift."""
    del shift
    return value


_add_tangent.defjvps(
    lambda tangent, *_: tangent,
    lambda tangent, *_: tangent,
)
