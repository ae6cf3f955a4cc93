"""Runs functions with derivative or batching rules of their own.

The function and its rules are converted inside. They see the dtypes of their traces.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jmp_lite.autocasting.decide.facts import Kind, Readers, Spec
from jmp_lite.autocasting.interpreter.conversion import Converted, Converter, Site
from jmp_lite.autocasting.interpreter.values import Value
from jmp_lite.casting.types import Leaf
from jmp_lite.jaxprs import custom_rules, params, structure
from jmp_lite.jaxprs.types import (
    Array,
    Aval,
    Eqn,
    Function,
    Jaxpr,
    PyTree,
    Tangent,
)


def run(
    converter: Converter, eqn: Eqn, operands: Sequence[Value], site: Site
) -> list[Value]:
    """Binds a function with rules of its own, all converted inside.

    Args:
      converter: converts the jaxprs inside.
      eqn: the equation.
      operands: its operands.
      site: its site.
    """
    inside = converter.body(params.body_of(eqn), operands, site)
    binds = {
        "custom_jvp_call": _bind_jvp,
        "custom_vjp_call": _bind_vjp,
        "custom_vmap_call": _bind_vmap,
        "remat_opt": _bind_remat_opt,
    }
    with converter.recording():  # It is recorded already.
        arrays = binds[params.op_of(eqn)](converter, eqn, operands, site, inside)
    return converter.collect_results(eqn, [(inside, operands)], arrays)


def _bind_jvp(
    converter: Converter,
    eqn: Eqn,
    operands: Sequence[Value],
    site: Site,
    inside: Converted,
) -> list[Array]:
    """Binds a function with a ``jvp`` rule."""
    jaxpr, states, specs = params.body_of(eqn), inside.given, inside.made

    def replace(fun: Function, jvp: Function) -> tuple[Function, Function]:
        del fun  # It evaluates the jaxpr.

        def low_fun(*arrays: Array) -> list[Array]:
            return structure.evaluate(inside.jaxpr, arrays)

        def tangents_first(*arrays: Array) -> list[Tangent]:
            out = jvp(*arrays)
            return [*out[len(specs) :], *out[: len(specs)]]

        def low_jvp(*arrays: Array) -> list[Array]:
            tangents = [spec._replace(kind=Kind.COMPUTED) for spec in states]
            types = list(map(structure.type_of, structure.parts(jaxpr).invars))
            avals = [*types, *(aval.to_tangent_aval() for aval in types)]
            values = converter.pack_all(arrays, [*states, *tangents])
            # The results have the readers that they have without the derivative.
            with converter.rule():
                out = _follow(converter, tangents_first, values, avals, jaxpr, site)
            out = [
                _cast_result(converter, o, s)
                for o, s in zip(out, 2 * specs, strict=True)
            ]
            return [*out[len(specs) :], *out[: len(specs)]]

        return low_fun, low_jvp

    arrays = converter.unpack_all(operands, inside.given)
    return custom_rules.bind_custom(eqn, arrays, replace)


def _bind_vjp(
    converter: Converter,
    eqn: Eqn,
    operands: Sequence[Value],
    site: Site,
    inside: Converted,
) -> list[Array]:
    """Binds a ``custom_vjp`` to its operands, with its functions converted."""

    def replace(
        fun: Function, fwd: Function, bwd: Function
    ) -> tuple[Function, Function, Function]:
        del fun  # It evaluates the jaxpr.
        return _LowVjp(converter, eqn, site, inside, fwd, bwd).functions()

    arrays = converter.unpack_all(operands, inside.given)
    return custom_rules.bind_custom(eqn, arrays, replace)


class _LowVjp:
    """The three functions of a custom_vjp in mixed precision.

    Residuals are saved in the dtype that they have in the forward pass.

    Args:
      converter: converts the jaxprs inside.
      eqn: the equation.
      site: its site.
      inside: its function, converted.
      fwd: the user's forward function.
      bwd: the user's backward function.
    """

    def __init__(
        self,
        converter: Converter,
        eqn: Eqn,
        site: Site,
        inside: Converted,
        fwd: Function,
        bwd: Function,
    ) -> None:
        self._converter = converter
        self._eqn = eqn
        self._site = site
        self._inside = inside
        self._fwd = fwd
        self._bwd = bwd
        self._jaxpr = params.body_of(eqn)
        # For each residual that is not an operand: its spec, or None for a number.
        self._computed: list[Spec | None] = []

    def functions(self) -> tuple[Function, Function, Function]:
        """Returns the function, its forward function and its backward function."""
        return self._function, self._forward, self._backward

    def _function(self, *arrays: Array) -> list[Array]:
        return structure.evaluate(self._inside.jaxpr, arrays)

    def _forward(self, *args: Leaf) -> list[Array]:
        """Runs ``fwd`` on operands, each followed by whether it is differentiated."""
        n_out = len(self._inside.made)

        def flat(*arrays: Array) -> list[Leaf]:
            pairs = zip(arrays, args[1::2], strict=True)
            out = self._fwd(*(item for pair in pairs for item in pair))
            n_kept = len(out) - n_out
            return [*map(_boxed, out[:n_kept]), *out[n_kept:]]

        values = self._converter.pack_all(args[::2], self._inside.given)
        avals = list(map(structure.type_of, structure.parts(self._jaxpr).invars))
        out = self._follow(flat, values, avals, self._site.readers)
        kept, results = out[: len(out) - n_out], out[len(out) - n_out :]
        self._computed = [
            one.spec._replace(kind=Kind.COMPUTED) if isinstance(one, Value) else None
            for one in kept
        ]
        arrays = [one.array if isinstance(one, Value) else one.number for one in kept]
        return arrays + self._converter.unpack_all(results, self._inside.made)

    def _backward(self, *args: Leaf) -> PyTree:
        """Runs ``bwd`` on residuals and cotangents."""
        forwarded = custom_rules.forwarded_residuals(self._eqn, len(self._computed))
        fresh = iter(self._computed)
        operands = self._inside.given
        kept = [next(fresh) if i is None else operands[i] for i in forwarded]
        made = [spec._replace(kind=Kind.COMPUTED) for spec in self._inside.made]
        given = [*kept, *made]
        # Python numbers are not traced, because bwd may branch on them.
        is_array = [spec is not None for spec in given]
        arrays = [arg for arg, yes in zip(args, is_array, strict=True) if yes]
        specs = [spec for spec in given if spec is not None]
        values = self._converter.pack_all(arrays, specs)
        trees: list[PyTree] = []

        def flat(*arrays: Array) -> list[Array]:
            left = iter(arrays)
            every = [
                next(left) if yes else arg
                for arg, yes in zip(args, is_array, strict=True)
            ]
            leaves, tree = jax.tree.flatten(self._bwd(*every), structure.is_zero)
            trees[:] = [tree]
            return leaves

        grads = self._follow(flat, values, list(map(_type_as_traced, values)))
        # JAX appends the logs of a backward pass to the gradients.
        grads[: len(operands)] = [
            _cast_result(self._converter, grad, spec)
            for grad, spec in zip(grads, operands, strict=False)
        ]
        rest = [v.array if isinstance(v, Value) else v for v in grads]
        return jax.tree.unflatten(trees[0], rest)

    def _follow(
        self,
        fun: Function,
        values: Sequence[Value],
        avals: Sequence[Aval],
        readers: Sequence[Readers] = (),
    ) -> list[Leaf]:
        site = self._site._replace(readers=readers)
        return _follow(self._converter, fun, values, avals, self._jaxpr, site)


def _bind_vmap(
    converter: Converter,
    eqn: Eqn,
    operands: Sequence[Value],
    site: Site,
    inside: Converted,
) -> list[Array]:
    """Binds a function with a rule for ``vmap``."""
    jaxpr = params.body_of(eqn)

    def low_rule(batched: Function, *arrays: Array) -> list[Array]:
        values = converter.pack_all(arrays, inside.given)
        types = [_type_as_traced(value) for value in values]
        any_readers = site._replace(readers=())
        out = _follow(converter, batched, values, types, jaxpr, any_readers)
        return converter.unpack_all(out, inside.made)

    arrays = converter.unpack_all(operands, inside.given)
    return custom_rules.bind_custom_vmap(eqn, arrays, inside.jaxpr, low_rule)


def _bind_remat_opt(
    converter: Converter,
    eqn: Eqn,
    operands: Sequence[Value],
    site: Site,
    inside: Converted,
) -> list[Array]:
    """Binds the forward function of a ``custom_vjp`` with ``optimize_remat``."""

    def replace(function: Jaxpr, n_consts: int, n_residuals: int) -> Jaxpr:
        # JAX asks for it after this trace, whose arrays are gone. Their types remain.
        there = site._replace(readers=site.readers[n_residuals:])
        made = inside.made[n_residuals:]
        return converter.body(function, operands[n_consts:], there, made).jaxpr

    arrays = converter.unpack_all(operands, inside.given)
    return custom_rules.bind_remat_opt(eqn, arrays, inside.jaxpr, replace)


def _type_as_traced(value: Value) -> Aval:
    aval = structure.type_of_value(value.array)
    return aval if value.state is None else structure.retyped(aval, "float32")


def _follow(
    converter: Converter,
    fun: Function,
    values: Sequence[Value],
    avals: Sequence[Aval],
    like: Jaxpr,
    site: Site,
) -> list[Leaf]:
    """Runs a function of a derivative rule under the rules.

    It is traced with its original types and then interpreted. Symbolic zeros and items
    that are not arrays pass unchanged, in both directions.

    Args:
      converter: converts the jaxprs inside.
      fun: a function of arrays and symbolic zeros that returns a list.
      values: its arguments.
      avals: its original types.
      like: the jaxpr that it belongs to.
      site: its site, with the readers of its last results; the results before may have
        any readers.

    Returns:
      A ``Value`` for each array that ``fun`` returns; other items unchanged.
    """
    live = [
        i
        for i, value in enumerate(values)
        if not structure.is_symbolic_zero(value.array)
    ]
    others: list[Leaf] = []

    def traced(*arrays: Array) -> list[Array]:
        full = [
            type(value.array)(structure.retyped(value.array.aval, aval.dtype))
            if structure.is_symbolic_zero(value.array)
            else None
            for value, aval in zip(values, avals, strict=True)
        ]
        for i, array in zip(live, arrays, strict=True):
            full[i] = array
        out = list(fun(*full))
        others[:] = [None if _is_array(item) else item for item in out]
        return [item for item in out if _is_array(item)]

    jaxpr = structure.trace(traced, [avals[i] for i in live], like)
    n_before = len(structure.parts(jaxpr).outvars) - len(site.readers)
    inner = site._replace(readers=[*[Readers.OTHER] * n_before, *site.readers])
    results = iter(converter.run(jaxpr, [values[i] for i in live], inner))
    return [next(results) if item is None else item for item in others]


def _cast_result(converter: Converter, item: Leaf, spec: Spec) -> Leaf:
    if isinstance(item, Value):
        return converter.unpack(item, spec)[0]
    if not structure.is_zero(item) or spec.state is None:
        return item
    dtype = spec.dtype(converter.casts.low_dtype)
    return type(item)(structure.retyped(item.aval, dtype))


class _PythonNumber(NamedTuple):
    """A Python number among residuals, on which the backward function may branch."""

    number: complex


def _boxed(item: Leaf) -> Leaf:
    is_number = isinstance(item, bool | int | float | complex)
    return _PythonNumber(item) if is_number else item


def _is_array(item: Leaf) -> bool:
    """Whether an item is an array or a typed number, not a symbolic zero."""
    if structure.is_tracer(item):  # Of any type: some have no dtype.
        return True
    return hasattr(item, "dtype") and not structure.is_zero(item)
