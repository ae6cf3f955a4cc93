"""Traces a function with float32 in place of its 16-bit arguments.

A function of 16-bit arguments traces to ops in 16 bits, and autocast changes only what
was traced in float32. So it is traced a second time, as a function of float32. Its
arguments stay what they are, in 16 bits, and each is cast where an op needs float32.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax import lax

from jmp_lite.autocasting.decide.equation import runs_low
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.autocasting.decide.special_ops import raises_precision
from jmp_lite.autocasting.rules.match import LOW_SCOPE
from jmp_lite.autocasting.rules.rules import Rules, is_identity
from jmp_lite.jaxprs import custom_rules, params, sharding, structure
from jmp_lite.jaxprs.dataflow import equations
from jmp_lite.jaxprs.trace import Traced, trace_function
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Function, Jaxpr, PyTree
from jmp_lite.ops import Precision


class Program(NamedTuple):
    """A function as autocast reads it.

    Attributes:
      jaxpr: its jaxpr. Some 16-bit arguments may be float32 in it.
      arrays: its arguments.
      treedef: the structure of its results.
      as_written: the jaxpr of the function itself.
      is_unchanged: whether the rules change nothing in it.
      traces_full: whether 16-bit arguments are to be traced in float32.
      held: the dtypes of the arguments that are float32 in the jaxpr alone, by number:
        ``{0: bfloat16}`` if the first argument is in bfloat16.
      error: why the function was not traced with float32 arguments, or None.
    """

    jaxpr: Jaxpr
    arrays: list[Array]
    treedef: PyTree
    as_written: Jaxpr
    is_unchanged: bool
    traces_full: bool
    held: Mapping[int, Dtype]
    error: str | None = None

    @property
    def types(self) -> list[Aval]:
        """The types of the results that the function itself returns."""
        return [var.aval for var in structure.parts(self.as_written).outvars]

    @property
    def avals(self) -> list[Aval]:
        """The types of its arguments."""
        return list(map(structure.type_of, structure.parts(self.as_written).invars))

    def types_with_float32_loss(self) -> list[Aval]:
        """Returns the types of the results, with a 16-bit loss as float32.

        A scalar that is alone, or first in a tuple, is the loss.
        """
        types = self.types
        if not types or not is_narrow(types[0]) or types[0].shape:
            return types
        # The cotangent of a float16 loss would be the loss scale: infinite above 2**15.
        traced = structure.parts(self.jaxpr).outvars[0].aval
        return [traced, *types[1:]]

    def evaluate_in_float32(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns the results, computed in the dtypes of the jaxpr."""
        given = [
            sharding.cast(array, np.float32) if i in self.held else array
            for i, array in enumerate(arrays)
        ]
        results = structure.evaluate(self.jaxpr, given)
        return [
            lax.convert_element_type(result, aval.dtype) if is_narrow(aval) else result
            for result, aval in zip(results, self.types, strict=True)
        ]


def read_function(fun: Function, args: PyTree, kwargs: PyTree, rules: Rules) -> Program:
    """Traces a function for autocast.

    Args:
      fun: a function of pytrees.
      args: its positional arguments.
      kwargs: its keyword arguments.
      rules: the rules. If their default is ``KEEP``, arguments are traced as they are.

    Raises:
      TypeError: an argument, or what ``fun`` captures, is an nnx module.
    """
    traced = trace_function(fun, args, kwargs)
    parts = structure.parts(traced.jaxpr)
    narrow = {
        i: structure.dtype_of(var)
        for i, var in enumerate(parts.invars)
        if is_narrow(var.aval)
    }
    # Narrow arguments are traced again in float32, in which more may run low.
    may_change = narrow and not is_identity(rules)
    is_unchanged = not may_change and changes_nothing(rules, traced.jaxpr)
    # "O0" keeps everything: an exponential of a bfloat16 argument is in bfloat16.
    traces_full = not is_unchanged and rules.default is not Precision.KEEP
    held = narrow if traces_full else {}
    program = Program(
        traced.jaxpr,
        traced.arrays,
        traced.treedef,
        traced.jaxpr,
        is_unchanged,
        traces_full,
        held,
    )
    return _trace_full(program, traced) if held else program


def is_narrow(aval: Aval) -> bool:
    """Whether a type is that of an array of bfloat16 or float16."""
    return structure.is_of_numbers(aval) and aval.dtype in _NARROW


_NARROW = (np.dtype("bfloat16"), np.dtype("float16"))


def _trace_full(program: Program, traced: Traced) -> Program:
    """Traces a function with float32 in place of the arguments that are to be held.

    If the function is not valid for float32 arguments, the program has the error.
    """
    as_it_is = program._replace(held={})
    types = [
        structure.retyped(aval, np.float32) if i in program.held else aval
        for i, aval in enumerate(program.avals)
    ]
    try:
        wide, treedef = traced.again(types)
    except Exception as error:  # It may be valid for 16 bits alone.
        message = f"{type(error).__name__}: {error}".split("\n")[0]
        return as_it_is._replace(error=message)
    # For example, ``{"a" if x.dtype == bfloat16 else "z": x}``.
    if treedef != traced.treedef:
        return as_it_is._replace(error="its results have another structure")
    afters = [var.aval for var in structure.parts(wide).outvars]
    for before, after in zip(program.types, afters, strict=True):
        # ``bitcast_convert_type(x, uint16)`` has another shape for float32, and float16
        # in place of bfloat16 is infinite for 2e5.
        if not _is_alike(before, after):
            message = f"a result is {after} instead of {before}"
            return as_it_is._replace(error=message)
    return program._replace(jaxpr=wide)


def _is_alike(before: Aval, after: Aval) -> bool:
    """Whether a type differs from another at most in float32 in place of 16 bits."""
    if is_narrow(before) and getattr(after, "dtype", None) == np.float32:
        before = structure.retyped(before, after.dtype)
    return getattr(before, "shape", None) == getattr(after, "shape", None) and (
        getattr(before, "dtype", None) == getattr(after, "dtype", None)
    )


# ------------------------------------------------------- programs that do not change


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
    # Its carries become 16-bit, even if no op inside does.
    if op in ("scan", "while") and rules.carry(path) == "follow":
        return True
    if not any(map(structure.is_float32, (*eqn.invars, *eqn.outvars))):
        return False
    # A scope for LOW casts the result of a cast from integers, too.
    if op == "convert_element_type":
        match = rules.scope(path)
        return match is not None and match.precision.lowers
    # A spectral method whose products ask for ``"highest"`` is traced as it is: it took
    # two to three times as long to trace.
    return runs_low(rules, eqn, path) or raises_precision(rules, eqn, path)
