"""What a walk has told, and what it has built, as rows and as sums.

The law of this file: a row says what one equation does; it judges nothing. What the
forward pass does is read from the very ``Decision``s that the interpreter has taken,
what the backward pass does from the program that JAX makes of it.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_lite.autocasting import compat
from jmp_lite.autocasting.decisions import Decision, Run, Told, ToldInside
from jmp_lite.autocasting.rules import AUTOCAST_SCOPE, HIGHER_ORDER, PRODUCTS
from jmp_lite.autocasting.values import State


class Row(NamedTuple):
    """How one equation of a function runs.

    Attributes:
      scope: the path that it stands in, such as ``"LM/Block_0/Dense_0"``.
      op: the name of its primitive; for a carry of a loop that of the loop.
      precision: the dtype that it runs in: ``"bfloat16"``, ``"float16"``,
        ``"float32"`` or another; ``"as traced"`` where nothing in it is a float.
      reason: why, in words.
      source: where it stands in the code: file, line and function.
      shapes: what its results were traced as, such as ``"float32[4,8]"``; in the
        backward pass what they are.
      times: how often it is run; None inside of a ``while`` loop.
      bytes_traced: of its results, as they were traced.
      bytes_run: of its results, as they are held.
      flops: operations of a matrix product, two for each multiplication; else 0.
      is_backward: whether it belongs to the backward pass.
    """

    scope: str
    op: str
    precision: str
    reason: str
    source: str
    shapes: tuple[str, ...]
    times: int | None
    bytes_traced: int
    bytes_run: int
    flops: int = 0
    is_backward: bool = False


class Seen(NamedTuple):
    """A row, and what it was made of.

    Attributes:
      row: the row.
      told: what was told of the equation; its origins are equations, words or None.
    """

    row: Row
    told: Told


# --------------------------------------------------------------- of the forward pass


def seen_in(told: Sequence[Told | ToldInside], low: np.dtype[Any]) -> Iterator[Seen]:
    """Yields the rows of what was told of a function, in the order in which it runs."""
    return _Seeing(low).along(told, "", [], 1)


class _Seeing:
    """Makes rows; of what is called often most is made once.

    Args:
      low: the compute dtype.
    """

    def __init__(self, low: np.dtype[Any]) -> None:
        self._low = low
        self._rows: dict[int, Row] = {}
        self._places: dict[int, str] = {}

    def along(
        self,
        told: Sequence[Told | ToldInside],
        path: str,
        origins: Sequence[Any],
        times: int | None,
    ) -> Iterator[Seen]:
        """Yields the rows of what was told along one jaxpr.

        Args:
          told: what was told.
          path: the scopes that the jaxpr stands in.
          origins: where its inputs come from.
          times: how often it is run.
        """

        def outside(origin: Any) -> Any:
            return origins[origin] if isinstance(origin, int) else origin

        for item in told:
            if isinstance(item, ToldInside):
                given = [outside(origin) for origin in item.origins]
                more = times and item.times and times * item.times
                inner = compat.path_of(item.eqn, path)
                yield from self.along(item.told, inner, given, more)
                continue
            if id(item) not in self._rows:
                self._rows[id(item)] = _row(item, self._low)
            row = self._rows[id(item)]
            operands = tuple(
                o._replace(origin=outside(o.origin)) for o in item.operands
            )
            there = item._replace(origin=outside(item.origin), operands=operands)
            yield Seen(self._in_place(row, there, path, times), there)
            if item.decision.run is Run.AS_TRACED:
                yield from self._kept(there, path, times)

    def _kept(self, told: Told, path: str, times: int | None) -> Iterator[Seen]:
        """Yields the rows of what an equation holds that is run as it was traced."""
        reason = f"inside of {told.eqn.primitive.name}, which is run as traced"
        kept = dataclasses.replace(told.decision, reason=reason)
        inner_path = compat.path_of(told.eqn, path)
        for jaxpr in compat.inner_jaxprs(told.eqn):
            for eqn in compat.parts(jaxpr).eqns:
                inner = Told(eqn, kept)
                row = _row(inner, self._low)
                yield Seen(self._in_place(row, inner, inner_path, times), inner)
                yield from self._kept(inner, inner_path, times)

    def _in_place(self, row: Row, told: Told, path: str, times: int | None) -> Row:
        """Returns a row that stands in a path, with what decided it from outside."""
        reason, origin = row.reason, told.origin
        if origin is not None:
            if id(origin) not in self._places:
                self._places[id(origin)] = told_origin(origin)
            reason = f"{reason}: {self._places[id(origin)]}"
        scope = compat.join(path, row.scope)
        return row._replace(scope=scope, reason=reason, times=times)


def _row(told: Told, low: np.dtype[Any]) -> Row:
    """Returns a row that knows nothing of what its equation stands in."""
    eqn, decision = told.eqn, told.decision
    results = eqn.outvars if told.result is None else [eqn.outvars[told.result]]
    is_low = decision.state is State.LOW
    return Row(
        scope=compat.join(*compat.scopes(eqn)),
        op=eqn.primitive.name,
        precision=_precision(eqn, decision, low),
        reason=decision.reason,
        source=compat.source(eqn),
        shapes=tuple(var.aval.str_short() for var in results),
        times=1,
        bytes_traced=sum(map(_bytes, results)),
        bytes_run=sum(_bytes(var, low if is_low else None) for var in results),
        flops=compat.product_flops(eqn),
    )


def _precision(eqn: Any, decision: Decision, low: np.dtype[Any]) -> str:
    return low.name if decision.run is Run.LOW else precision_as_traced(eqn)


def precision_as_traced(eqn: Any) -> str:
    """Returns the widest float of an equation; of a product that of its operands."""
    atoms = eqn.invars[:2] if eqn.primitive.name in PRODUCTS else ()
    atoms = atoms or (*eqn.invars, *eqn.outvars)
    floats = [compat.dtype_of(atom) for atom in atoms if compat.is_float(atom)]
    return max(floats, key=lambda d: d.itemsize).name if floats else "as traced"


def _bytes(var: Any, low: np.dtype[Any] | None = None) -> int:
    """Returns the bytes of a variable, of a float32 one in another dtype."""
    dtype = low if low is not None and compat.is_float32(var) else compat.dtype_of(var)
    return math.prod(getattr(var.aval, "shape", ())) * getattr(dtype, "itemsize", 0)


def told_origin(origin: Any) -> str:
    """Returns what made a value what it is held in, in words."""
    if isinstance(origin, str):
        return origin
    place = short(compat.source(origin))
    return origin.primitive.name + (place and f" at {place}")


def short(source: str) -> str:
    """Returns a source without its folder and function."""
    return source.split(" ")[0].rpartition("/")[-1]


# --------------------------------------------------------------- of the backward pass


class Backward(NamedTuple):
    """The backward pass of a function.

    Attributes:
      jaxpr: from what was kept and from cotangents to gradients.
      kept: bytes that wait for it, but for the arguments, which are there anyway.
    """

    jaxpr: Any
    kept: int


def backward_of(forward: Any) -> Backward:
    """Returns the backward pass of a program, nothing of it being run.

    Raises:
      ValueError: nothing that it is given or returns is a float.
    """
    avals = [var.aval for var in compat.parts(forward).invars]
    floats = [i for i, aval in enumerate(avals) if _is_float(aval)]

    def differentiated(*arrays: Any) -> Any:
        def of_floats(*given: Any) -> Any:
            merged = list(arrays)
            for i, array in zip(floats, given, strict=True):
                merged[i] = array
            return compat.evaluate(forward, merged)

        return jax.vjp(of_floats, *(arrays[i] for i in floats))

    traced, (out, back) = jax.make_jaxpr(differentiated, return_shape=True)(*avals)
    cotangents = [leaf for leaf in jax.tree.leaves(out) if _is_float(leaf)]
    if not floats or not cotangents:
        raise ValueError(
            "There is no backward pass: no float among the arguments, or none among "
            "the results."
        )

    def backward(back: Any, cotangents: Any) -> Any:
        given = iter(cotangents)
        full = [
            next(given) if _is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf in jax.tree.leaves(out)
        ]
        return back(jax.tree.unflatten(jax.tree.structure(out), full))

    parts = compat.parts(traced)
    n_out = len(jax.tree.leaves(out))
    there = {*parts.invars, *parts.constvars}
    waiting = {v for v in parts.outvars[n_out:] if not compat.is_literal(v)} - there
    jaxpr = jax.make_jaxpr(backward)(back, cotangents)
    return Backward(jaxpr, sum(map(_bytes, waiting)))


def _is_float(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, np.inexact)


def rows_of_backward(jaxpr: Any, low: np.dtype[Any]) -> Iterator[Row]:
    """Yields the rows of a backward pass, as it runs."""
    for eqn, path, times in equations(jaxpr):
        if eqn.primitive.name in (*HIGHER_ORDER, "convert_element_type"):
            continue
        run = [_bytes(var) for var in eqn.outvars]
        traced = [
            n * 4 // low.itemsize if compat.dtype_of(var) == low else n
            for n, var in zip(run, eqn.outvars, strict=True)
        ]
        yield Row(
            scope=path,
            op=eqn.primitive.name,
            precision=precision_as_traced(eqn),
            reason="backward: it runs in what it is given",
            source=compat.source(eqn),
            shapes=tuple(var.aval.str_short() for var in eqn.outvars),
            times=times,
            bytes_traced=sum(traced),
            bytes_run=sum(run),
            flops=compat.product_flops(eqn),
            is_backward=True,
        )


def equations(
    jaxpr: Any, path: str = "", times: int | None = 1
) -> Iterator[tuple[Any, str, int | None]]:
    """Yields the equations of a program that do something, their paths and trips."""
    for eqn in compat.live_equations(jaxpr):
        here = compat.join(path, *compat.scopes(eqn))
        yield eqn, here.replace(f"{AUTOCAST_SCOPE}/", ""), times
        if eqn.primitive.name in HIGHER_ORDER:
            once = compat.trips(eqn)
            more = times and once and times * once
            for inner in compat.inner_jaxprs(eqn):
                yield from equations(inner, compat.path_of(eqn, path), more)


# ----------------------------------------------------------------------------- totals


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over a function. What is in a loop of unknown length counts once.

    Attributes:
      equations: how many equations there are, by precision.
      products: how many matrix products and convolutions, by precision.
      flops: the operations of those in all trips of all loops, by precision.
      casts: how many casts between float32 and the compute dtype autocast adds, in all
        trips of all loops.
      cast_bytes: the bytes that they read and write, if nothing is fused.
      kept_traced: the bytes that wait for the backward pass without autocast; None
        where that was not asked for.
      kept_run: the same with autocast.
    """

    equations: Mapping[str, int]
    products: Mapping[str, int]
    flops: Mapping[str, int]
    casts: int
    cast_bytes: int
    kept_traced: int | None = None
    kept_run: int | None = None


def totals_of(
    rows: Iterable[Row], casts: Sequence[int], kept: Sequence[int] | None
) -> Totals:
    """Sums rows up.

    Args:
      rows: the rows.
      casts: how many were added, and their bytes.
      kept: bytes that wait for the backward pass, as traced and as run.
    """
    equations, products, flops = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        equations[row.precision] += 1
        if row.op in PRODUCTS:
            products[row.precision] += 1
            flops[row.precision] += row.flops * (row.times or 1)
    number, n_bytes = casts
    kept_traced, kept_run = kept or (None, None)
    return Totals(
        dict(equations),
        dict(products),
        dict(flops),
        casts=max(number, 0),
        cast_bytes=max(n_bytes, 0),
        kept_traced=kept_traced,
        kept_run=kept_run,
    )


def casts_in(jaxpr: Any, low: np.dtype[Any]) -> tuple[int, int]:
    """Counts the casts between float32 and a dtype, and the bytes that they move."""
    number = n_bytes = 0
    for eqn, _, times in equations(jaxpr):
        if eqn.primitive.name != "convert_element_type":
            continue
        ends = {compat.dtype_of(eqn.invars[0]), compat.dtype_of(eqn.outvars[0])}
        if ends == {np.dtype("float32"), low}:
            size = math.prod(eqn.outvars[0].aval.shape)
            number += times or 1
            n_bytes += (times or 1) * size * (4 + low.itemsize)
    return number, n_bytes
