"""``compress_residuals``: saves residuals for the backward pass in 16 bits.

The forward pass does not change. Its jaxpr shows which residuals are compressed; they
are cast back before the backward pass runs. The results of cheap ops are recomputed
instead of saved.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_lite.autocasting.interpreter.validation import (
    check_function,
    function_of_arrays,
)
from jmp_lite.autocasting.passes import rematerialize
from jmp_lite.autocasting.rules.rules import FULL_SCOPE
from jmp_lite.casting.dtypes import is_inexact, parse_dtype
from jmp_lite.jaxprs import params, source, structure
from jmp_lite.jaxprs.types import Array, Eqn, Jaxpr, PyTree, Var

Params = ParamSpec("Params")
Result = TypeVar("Result")


def compress_residuals(
    fun: Callable[Params, Result], dtype: DTypeLike | None = None
) -> Callable[Params, Result]:
    """Returns ``fun`` with a backward pass whose residuals are saved in 16 bits.

    Use it for the body of a loop over layers, which stacks the residuals of all layers:
    ``lax.scan(compress_residuals(block), x, layers)``. Around a whole loss or in
    straight-line code it does not help and may cost: there XLA recomputes values freely
    and drops the rounding.

    The results of ``fun`` do not change by a bit. A residual is saved in 16 bits if it
    is a computed float32 value. Exceptions:

    - Arguments, constants and captured arrays stay in float32.
    - Values computed under ``full_precision`` stay in float32. A backward pass that
      subtracts nearly equal values (a variance at a large mean) needs their digits.
    - Results of cheap ops (a softmax, a norm, a gelu) are recomputed from their
      operands.

    Values out of range become the largest finite number. The function composes with
    ``autocast`` (which may be inside of it) and with ``jax.checkpoint``. It supports
    reverse mode only: ``jvp`` and ``jacfwd`` raise an error.

    Args:
      fun: a function of pytrees that JAX can differentiate.
      dtype: the dtype of saved residuals; None means bfloat16, which has the range of
        float32.

    Returns:
      The function, with the same signature.

    Raises:
      ValueError: ``dtype`` is unknown or not floating-point.
      TypeError: ``fun`` is not a function; or, in a call, JAX differentiates it in
        forward mode.

    Source: ActNN (Chen et al., 2021) and GACT (Liu et al., 2022) compress residuals in
    PyTorch, to fewer bits.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite as jmp
      >>> layer = jmp.compress_residuals(lambda x, w: jnp.tanh(x @ w))
      >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
      >>> _, backward = jax.vjp(layer, x, w)
      >>> sorted({str(saved.dtype) for saved in jax.tree.leaves(backward)})
      ['bfloat16', 'float32']
    """
    check_function(fun)
    low_dtype = parse_dtype("bfloat16" if dtype is None else dtype)

    @functools.wraps(fun)
    def compressed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        of_arrays, arrays = function_of_arrays(fun, args, kwargs)
        traced, out = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        # Captured arrays become arguments, because they need gradients.
        hoisted, consts = structure.with_consts_as_inputs(traced)
        hoisted = rematerialize.rematerialize(hoisted, kept=FULL_SCOPE)
        try:
            results = _compressed(hoisted, low_dtype)(*consts, *arrays)
        except TypeError as error:  # The trace has succeeded, so only this can fail.
            raise TypeError(
                "compress_residuals supports reverse mode only (grad, vjp, jacrev), "
                "but JAX differentiates the function in forward mode (jvp, jacfwd, "
                "hessian). Differentiate the original function there."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return compressed


def _compressed(traced: Jaxpr, low_dtype: Any) -> Callable[..., list[Array]]:
    """Returns a jaxpr as a differentiable function of its constants and inputs."""
    run = jax.custom_vjp(lambda *inputs: structure.evaluate(traced, inputs))
    put_together: list[Callable[[Sequence[Array], Any], Any]] = []

    def forward(*inputs: Any) -> PyTree:
        def differentiated(*inputs: Any) -> PyTree:
            floats = [x for x in inputs if is_inexact(x)]

            def of_floats(*floats: Any) -> PyTree:
                given = iter(floats)
                full = [next(given) if is_inexact(x) else x for x in inputs]
                return structure.evaluate(traced, full)

            return jax.vjp(of_floats, *floats)

        # As one jaxpr, which shows the origin of each residual.
        both, shape = jax.make_jaxpr(differentiated, return_shape=True)(*inputs)
        results, backward = jax.tree.unflatten(
            jax.tree.structure(shape), structure.evaluate(both, inputs)
        )
        kept, treedef = jax.tree.flatten(backward)
        is_low = list(_are_compressible(both))[len(results) :]
        dtypes = [x.dtype for x in kept]
        low = [
            _saturate(x, low_dtype) if yes else x
            for x, yes in zip(kept, is_low, strict=True)
        ]
        is_float = [is_inexact(x) for x in inputs]

        def backward_of(low: Sequence[Array], cotangents: PyTree) -> PyTree:
            full = [
                x.astype(dtype) if yes else x
                for x, dtype, yes in zip(low, dtypes, is_low, strict=True)
            ]
            grads = iter(jax.tree.unflatten(treedef, full)(cotangents))
            return tuple(next(grads) if yes else None for yes in is_float)

        # JAX runs this before the backward pass.
        put_together[:] = [backward_of]
        return results, low

    def backward(low: Any, cotangents: PyTree) -> PyTree:
        return put_together[0](low, cotangents)

    run.defvjp(forward, backward)
    return run


def _saturate(x: Any, dtype: Any) -> PyTree:
    ends = jnp.finfo(dtype)
    low, high = (jnp.asarray(end, x.dtype) for end in (ends.min, ends.max))
    return jax.lax.clamp(low, x, high).astype(dtype)


def _are_compressible(jaxpr: Jaxpr) -> Iterator[bool]:
    """Yields, for each result of a jaxpr, whether it is a computed float32 value."""
    parts = structure.parts(jaxpr)
    maker = {var: eqn for eqn in parts.eqns for var in eqn.outvars}
    for atom in parts.outvars:
        eqn = None if structure.is_literal(atom) else maker.get(atom)
        is_marked = eqn is not None and FULL_SCOPE in _scopes_of(eqn, atom)
        yield structure.is_float32(atom) and eqn is not None and not is_marked


def _scopes_of(eqn: Eqn, atom: Var) -> Sequence[str]:
    """Returns the scopes in which a result of an equation was computed."""
    here = list(source.scopes(eqn))
    for jaxpr in params.inner_jaxprs(eqn):
        parts = structure.parts(jaxpr)
        if len(parts.outvars) == len(eqn.outvars):
            inner = parts.outvars[eqn.outvars.index(atom)]
            for made in parts.eqns:
                if inner in made.outvars:
                    here += _scopes_of(made, inner)
    return here
