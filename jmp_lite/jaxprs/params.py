"""Reads the parameters of equations, and binds equations with others.

``products.py``, ``sharding.py`` and the files with own primitives read a few others.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax

from jmp_lite.jaxprs import coming, primitives, structure
from jmp_lite.jaxprs.types import (
    Array,
    Dtype,
    Eqn,
    Function,
    Jaxpr,
    Primitive,
)

Item = TypeVar("Item")


def op_of(eqn: Eqn) -> str:
    """Returns the name of an equation's op, also under JAX's newest flags."""
    name = eqn.primitive.name
    return (
        coming.HIGH_OPS.get(coming.high_name(eqn), name)
        if name == coming.HIGH
        else name
    )


def checkpoint_name_of(eqn: Eqn) -> str:
    """Returns the ``checkpoint_name`` that an equation gives to a value; else empty."""
    if op_of(eqn) != "name":
        return ""
    params = eqn.params
    return (
        coming.unbatched(params["_prim"]).name if "_prim" in params else params["name"]
    )


def inner_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters."""
    if eqn.primitive.name == coming.HIGH:
        jaxpr = called_jaxpr(eqn)
        yield from () if jaxpr is None else (jaxpr,)
        return
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            # Of both classes of 0.10, open and closed. A ``cond`` has a tuple of
            # branches.
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


# JAX's primitive is ``remat2`` (0.10, 0.12). A high one is called ``checkpoint`` here.
REMAT = ("checkpoint", "remat2")


CALLS = ("jit", *REMAT)
"""Ops that users write and that only call their jaxpr."""


WRAPPERS = {
    # A scheduling group is an ``xla_metadata_call``.
    **dict.fromkeys(("compute_on", "xla_metadata_call"), "jaxpr"),
    # One op: a trace of 0.10 has ``closed_call``, and one of 0.12 ``eval_jaxpr``.
    **dict.fromkeys(("closed_call", "eval_jaxpr"), "call_jaxpr"),
}
"""Other ops that only call a jaxpr, with the parameter that contains it."""


MERE_CALLS = ("jit", "closed_call", "eval_jaxpr")
"""Ops whose jaxpr may run in their place."""


LOOPS = ("scan", "while")

# A ``switch`` and ``platform_dependent`` are a ``cond``; ``pmap`` is a ``shard_map``.
CONTROL = ("cond", *LOOPS, "shard_map")
"""Ops with branches, steps or devices."""

CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "remat_opt")
"""Ops that call a jaxpr, and have a derivative or a batching rule of their own.

``remat_opt`` is the forward function of ``defvjp(..., optimize_remat=True)``. Where no
residual is needed, JAX runs the function itself in its place.
"""

CALLED = {
    **dict.fromkeys(CALLS, "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
    "remat_opt": "fwd_jaxpr",
    **WRAPPERS,
}
"""All ops that only call a jaxpr, with the parameter that contains it."""

_MERELY_CALLED = frozenset([*CALLS, *WRAPPERS])


def called_jaxpr(eqn: Eqn) -> Jaxpr | None:
    """Returns the jaxpr that an equation only calls, or None."""
    op = op_of(eqn)
    if op not in CALLED:
        return None
    if eqn.primitive.name != coming.HIGH:
        return eqn.params[CALLED[op]]
    primitive = eqn.params["_prim"]
    if "jaxpr" in primitive.params:
        return primitive.params["jaxpr"]
    if "traced" in primitive.params:
        return primitive.params["traced"].jaxpr
    return coming.called_batched(
        coming.unbatched(primitive),
        tuple(coming.batchings(primitive)),
        tuple(primitive.in_avals_flat),
    )


def is_call(eqn: Eqn) -> bool:
    """Whether an equation only calls a jaxpr, without a rule of its own."""
    return op_of(eqn) in _MERELY_CALLED


def trips(eqn: Eqn) -> int | None:
    """Returns how often the jaxpr of an equation runs; None if unknown."""
    if op_of(eqn) == "while":
        return None
    return eqn.params["length"] if op_of(eqn) == "scan" else 1


def bind(
    eqn: Eqn,
    operands: Sequence[Array],
    bound: set[object] | None = None,
) -> list[Array]:
    """Binds an equation's primitive to other operands.

    Args:
      eqn: the equation.
      operands: the operands.
      bound: the ops that were bound before; this op is added. JAX differentiates a
        repeated op once.
    """
    return _bind(eqn, operands, bound)


def _bind(
    eqn: Eqn,
    operands: Sequence[Array],
    bound: set[object] | None = None,
    /,
    **changed: Any,
) -> list[Array]:
    if eqn.primitive.name == coming.HIGH and op_of(eqn) == "name":
        # Its primitive states the type of the value, which may have another dtype here.
        name = coming.unbatched(eqn.params["_prim"])
        return [type(name)(name.name, jax.typeof(operands[0]))(*operands)]
    params = {**eqn.params, **changed}
    run = functools.partial(_bind_primitive, eqn.primitive, tuple(params.items()))
    # Tracing and lowering 24 jit-compiled blocks took 1.47 times as long as by hand,
    # and 1.12 times with ops that are differentiated once.
    is_linearized = bound is not None and any(map(_is_being_linearized, operands))
    # An op that contains a jaxpr is not stored: it may capture arrays and tracers.
    is_plain = is_linearized and not eqn.effects and not [*inner_jaxprs(eqn)]
    if bound is not None and is_plain:
        with contextlib.suppress(TypeError):  # Its parameters cannot be hashed.
            op = (eqn.primitive, tuple(params.items()))
            dtypes = (getattr(array, "dtype", type(array)) for array in operands)
            key = (*op, *dtypes, *map(structure.shape_of, operands))
            # From the second use on: the first takes longer through a ``jit``.
            if key in bound:
                run = _one_op(*op)
            bound.add(key)
    out = run(*operands)
    return list(out) if eqn.primitive.multiple_results else [out]


def _bind_primitive(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], *operands: Array
) -> Any:
    return primitive.bind(*operands, **primitive.get_bind_params(dict(params)))


@functools.lru_cache(maxsize=4096)
def _one_op(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Function:
    """Returns an op as a ``jit`` function, which JAX inlines.

    For ``grad``, JAX analyses an op at every use. It analyses a jit function once,
    though that takes longer. So a model of equal layers is traced in less time. (The
    functions of ``jax.numpy`` are wrapped for the same reason.)
    """
    function = functools.partial(_bind_primitive, primitive, params)
    return jax.jit(function, inline=getattr(jax, "Inline", _Inline).JAX_EARLY)


class _Inline:
    JAX_EARLY = True  # Before 0.12.


def _is_being_linearized(operand: Any) -> bool:
    """Whether an operand is differentiated in reverse while another trace is active."""
    # By its name, because JAX does not export the class (0.10, 0.12).
    if type(operand).__name__ != "LinearizeTracer":
        return False
    # Outside of ``jit`` an op runs at once, and would be compiled as a function.
    return structure.is_tracer(operand.primal)


def bind_call(eqn: Eqn, operands: Sequence[Array], jaxpr: Jaxpr) -> list[Array]:
    """Binds an op that only calls a jaxpr to another closed jaxpr."""
    return _bind(eqn, operands, **{CALLED[op_of(eqn)]: jaxpr})


def bind_cond(
    eqn: Eqn, operands: Sequence[Array], branches: Sequence[Jaxpr]
) -> list[Array]:
    """Binds a cond to other closed branches."""
    return _bind(eqn, operands, branches=tuple(branches))


def bind_scan(eqn: Eqn, operands: Sequence[Array], jaxpr: Jaxpr) -> list[Array]:
    """Binds a scan to another closed body, with as many inputs of each kind."""
    return _bind(eqn, operands, jaxpr=jaxpr)


def bind_while(
    eqn: Eqn, operands: Sequence[Array], cond: Jaxpr, body: Jaxpr
) -> list[Array]:
    """Binds a while to other closed jaxprs, with as many inputs of each kind."""
    return _bind(eqn, operands, cond_jaxpr=cond, body_jaxpr=body)


def bind_in(
    eqn: Eqn,
    operands: Sequence[Array],
    dtype: Dtype | None,
    precision: lax.PrecisionLike = None,
    bound: set[object] | None = None,
) -> list[Array]:
    """Binds an op to operands of another dtype.

    Args:
      eqn: the equation.
      operands: the operands.
      dtype: the dtype of the result, if the equation states one; None keeps it.
      precision: the precision or algorithm of a product.
      bound: see ``bind``.
    """
    # ``mul`` has an ``out_dtype`` that JAX does not print.
    names = () if dtype is None else ("preferred_element_type", "out_dtype")
    changed: dict[str, Any] = {
        name: dtype for name in names if eqn.params.get(name) is not None
    }
    # Some algorithms are invalid for 16-bit operands, so a low product drops its own.
    if precision is not None or eqn.params.get("precision") is not None:
        changed["precision"] = precision
    return _bind(eqn, operands, bound, **changed)


def bind_flat_dot(eqn: Eqn, operands: Sequence[Array]) -> Array:
    """Binds a ``dot_general`` to two matrices."""
    (result,) = _bind(eqn, operands, dimension_numbers=(((1,), (0,)), ((), ())))
    return result


SCATTERS: dict[str, Function] = {
    "scatter-add": jax.lax.scatter_add,
    "scatter-sub": jax.lax.scatter_sub,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
}
"""Scatters with a combiner, which is traced for a dtype."""


def applies_function(eqn: Eqn) -> bool:
    """Whether an op applies a function to elements, as ``x.at[i].apply`` does.

    The function is traced for one dtype. Scatters with a known function, such as
    ``scatter-add``, are other ops.
    """
    # A plain ``x.at[i].set`` has none (0.10, 0.12).
    jaxpr = eqn.params.get("update_jaxpr") if op_of(eqn) == "scatter" else None
    return jaxpr is not None and bool(structure.parts(jaxpr).eqns)


def bind_scatter(eqn: Eqn, operands: Sequence[Array]) -> Array:
    """Binds a scatter to operands of another dtype, with a combiner of that dtype."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: eqn.params[name] for name in names}
    return SCATTERS[op_of(eqn)](*operands, **options)


def bind_remat(
    eqn: Eqn,
    operands: Sequence[Array],
    jaxpr: Jaxpr,
    saved: Sequence[str] | None = None,
) -> list[Array]:
    """Binds a rematerialized function to other operands, with another closed jaxpr.

    The constants of the jaxpr become operands.

    Args:
      eqn: the equation.
      operands: the operands.
      jaxpr: the jaxpr to run.
      saved: the names (``checkpoint_name``) of values that are saved in addition to its
        policy; None if the jaxpr has no primitive of this library.
    """
    # The jaxpr of a checkpoint is open: it has no place for constants.
    jaxpr, consts = structure.with_consts_as_inputs(jaxpr)
    operands = [*consts, *operands]
    if eqn.primitive.name == coming.HIGH:
        # Forward mode does not support policies that save by name (jax 0.12).
        high = eqn.params["_prim"]
        return list(type(high)(**{**high.params, "jaxpr": jaxpr})(*operands))
    changed: dict[str, Any] = {}
    # A policy such as ``dots_saveable`` does not know the products of this library.
    if saved or (saved is not None and eqn.params["policy"] is not None):
        changed["policy"] = _saving(saved, eqn.params["policy"])
    return _bind(eqn, operands, jaxpr=structure.open_jaxpr(jaxpr), **changed)


def _saving(names: Sequence[str], policy: Function | None) -> Function:
    """Returns a checkpoint policy that also saves the values of some names.

    JAX combines policies only if both answer yes or no; one that offloads does not.
    """
    policies = jax.checkpoint_policies
    is_named, others = policies.save_only_these_names(*names), policy

    def either(primitive: Primitive, *args: Any, **params: Any) -> Any:
        if is_named(primitive, *args, **params):
            return True
        known = primitives.taken_for(primitive)
        return False if others is None else others(known, *args, **params)

    return either


def body_of(eqn: Eqn) -> Jaxpr:
    """Returns the jaxpr of a scan, of a shard_map, or of a call."""
    inner = called_jaxpr(eqn)
    return eqn.params["jaxpr"] if inner is None else inner


def branches_of(eqn: Eqn) -> Sequence[Jaxpr]:
    """Returns the branches of a cond."""
    return eqn.params["branches"]


class Loop(NamedTuple):
    """A ``scan`` or a ``while``.

    Its operands are the constants of the condition, and those of the body. These are
    the constants of the body, the carries, and arrays of which each step has a slice.

    Attributes:
      body: the jaxpr of a step.
      n_consts: the number of constants of the body.
      n_carry: the number of carries, which are its first results.
      cond: the condition of a ``while``, which reads constants and the carries.
      n_cond: the number of its constants.
    """

    body: Jaxpr
    n_consts: int
    n_carry: int
    cond: Jaxpr | None = None
    n_cond: int = 0

    @property
    def carries(self) -> slice:
        """The positions of the carries among the operands of the body."""
        return slice(self.n_consts, self.n_consts + self.n_carry)


def loop_of(eqn: Eqn) -> Loop:
    """Returns a ``scan`` or a ``while`` as a loop."""
    params = eqn.params
    if op_of(eqn) == "while":
        names = ("body_nconsts", "cond_jaxpr", "cond_nconsts")
        n_consts, *of_cond = (params[name] for name in names)
        return Loop(params["body_jaxpr"], n_consts, len(eqn.outvars), *of_cond)
    # 0.11 has grouped these parameters of a scan in ``ft_in`` and ``ft_out``.
    if "num_consts" in params:
        return Loop(params["jaxpr"], params["num_consts"], params["num_carry"])
    consts, carry, _ = params["ft_in"].update(eqn.invars).unpack()
    return Loop(params["jaxpr"], len(list(consts)), len(list(carry)))


def scan_options(eqn: Eqn) -> dict[str, Any]:
    """Returns the length, the direction and the unrolling of a scan."""
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")}


def scan_length(eqn: Eqn) -> int:
    """Returns the number of steps of a scan."""
    return eqn.params["length"]


def exponent_of(eqn: Eqn) -> int:
    """Returns the exponent of an ``integer_pow``."""
    return eqn.params["y"]


def returned_items(eqn: Eqn, items: Sequence[Item]) -> list[Item]:
    """Returns the items of those operands that an ``optimization_barrier`` returns.

    Args:
      eqn: the equation.
      items: an item for each operand.
    """
    if len(eqn.outvars) == len(items):
        return list(items)
    # A reference is an operand, and no result (0.12).
    pairs = zip(items, eqn.invars, strict=True)
    return [item for item, atom in pairs if type(atom.aval).__name__ != "AbstractRef"]


def call_name(eqn: Eqn) -> str:
    """Returns the name of the jit-compiled function in an equation, or nothing."""
    return eqn.params["name"] if op_of(eqn) == "jit" else ""


def is_custom_root(eqn: Eqn) -> bool:
    """Whether a custom_jvp is JAX's own for a root."""
    # Its name is all that tells it from a user's ``custom_jvp`` (0.10, 0.12).
    return "_custom_root" in structure.name_of(body_of(eqn))


def has_only_axis_effects(eqn: Eqn) -> bool:
    """Whether an equation has no side effects except communication over named axes."""
    # On 0.10 such an equation states no effects of the jaxpr inside of it.
    inside = called_jaxpr(eqn) if eqn.primitive.name == coming.HIGH else None
    effects = eqn.effects | (
        set() if inside is None else structure.open_jaxpr(inside).effects
    )
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in effects)
