"""Measures whether a program keeps in "mixed" what it keeps in "O1".

Programs run op by op, so each result is rounded as the program says: a compiled program
on a CPU leaves out roundings to 16 bits, and takes seconds to compile.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

import jmp_lite as jmp
from jmp_lite.jaxprs.params import loop_of
from search.programs import Args, Program, draw_args

LIMITS = {"bfloat16": 0.005, "float16": 0.001}
DRAWS = 16


class Errors(NamedTuple):
    """The errors of a program: that of its value, or of its worst gradient.

    Attributes:
      mixed: under "mixed".
      o1: under "O1".
      full: in float32, without autocast. If it is large, the program is no measure.
    """

    mixed: float
    o1: float
    full: float

    def breaks(self, dtype: str) -> bool:
        """Whether the errors break the law. An O1 that is far off keeps nothing."""
        is_measure = self.full < 1e-3 and self.o1 < 1 / 3
        return is_measure and not self.mixed <= 3 * self.o1 + LIMITS[dtype]


def breach(program: Program, rules: str | jmp.Rules = "mixed") -> dict[str, Errors]:
    """Returns the errors of a program that break the law, by dtype.

    Where a step of a relu, a sort or an absolute value flips, an error is large by
    chance. So one that breaks the law is measured again, as a median of many draws; in
    float16 with the loss scale that suits the program best.

    Args:
      program: the program.
      rules: what is compared with "O1".
    """
    first = errors(program, 0, LIMITS, rules)
    suspects = [dtype for dtype, each in first.items() if each.breaks(dtype)]
    found = {}
    for dtype in suspects:
        scales = (1.0, 2.0**8, 2.0**16) if dtype == "float16" else (1.0,)
        typical = [_median(program, dtype, rules, scale) for scale in scales]
        if all(each.breaks(dtype) for each in typical):
            found[dtype] = typical[0]
    return found


def _median(
    program: Program, dtype: str, rules: str | jmp.Rules, scale: float
) -> Errors:
    seeds = range(1, DRAWS + 1)
    drawn = [errors(program, seed, [dtype], rules, scale) for seed in seeds]
    rows = [each[dtype] for each in drawn if each]
    return Errors(*map(float, np.median(rows or [(0, 0, 0)], 0)))


def errors(
    program: Program,
    seed: int,
    dtypes: Iterable[str],
    rules: str | jmp.Rules = "mixed",
    scale: float = 1.0,
) -> dict[str, Errors]:
    """Returns the errors of a program, by dtype; none if it has no finite gradient.

    Args:
      program: the program.
      seed: the seed of its arguments.
      dtypes: the compute dtypes.
      rules: what is compared with "O1".
      scale: the loss scale.
    """
    args = draw_args(seed)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype("float64"), args)
        exact = _derived(program, wide, 1.0)
    used = [i for i, each in enumerate(exact) if np.any(each)]
    if not all(np.isfinite(exact[i]).all() for i in used) or len(used) < 2:
        return {}

    def error(fun: Callable[[Args], jax.Array]) -> float:
        found = _derived(fun, args, scale)
        return max(_distance(found[i], exact[i]) for i in used)

    full = error(program)
    return {
        dtype: Errors(
            *(
                error(jmp.autocast(program, each, compute_dtype=dtype))
                for each in (rules, "O1")
            ),
            full,
        )
        for dtype in dtypes
    }


def _derived(
    fun: Callable[[Args], jax.Array], args: Args, scale: float
) -> list[np.ndarray]:
    """Returns the value, and the gradients of all arguments but the target."""
    scaled = lambda args: fun(args) * scale
    traced = jax.make_jaxpr(jax.value_and_grad(scaled))(args)
    found = run_by_op(traced.jaxpr, traced.consts, jax.tree.leaves(args))
    return [np.asarray(each) / scale for each in found[:-1]]


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("inf")
    difference = found.astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def run_by_op(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, whose loops and calls run op by op."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]
    for eqn in jaxpr.eqns:
        run = _RUN.get(eqn.primitive.name, _bound)
        env.update(zip(eqn.outvars, run(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _bound(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    found = eqn.primitive.bind(*operands, **eqn.params)
    return found if eqn.primitive.multiple_results else [found]


def _called(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    inside = next(eqn.params[name] for name in names if name in eqn.params)
    consts = getattr(inside, "consts", ())
    return run_by_op(getattr(inside, "jaxpr", inside), consts, operands)


def _scanned(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    p = eqn.params
    loop = loop_of(eqn)
    body, n, m = loop.body, loop.n_consts, loop.carries.stop
    carry, steps, length = operands[n:m], [], p["length"]
    order = range(length)[::-1] if p["reverse"] else range(length)
    rows = [np.asarray(operand) for operand in operands[m:]]
    for i in order:
        of_step = [*operands[:n], *carry, *(array[i] for array in rows)]
        found = run_by_op(body.jaxpr, body.consts, of_step)
        carry = found[: m - n]
        steps.append(found[m - n :])
    if p["reverse"]:
        steps.reverse()
    stacked = [
        np.stack([np.asarray(a) for a in each]) for each in zip(*steps, strict=True)
    ]
    return [*carry, *stacked]


def _while(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    state, of_cond, of_body = operands[m:], operands[:n], operands[n:m]
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    while run_by_op(cond.jaxpr, cond.consts, [*of_cond, *state])[0]:
        state = run_by_op(body.jaxpr, body.consts, [*of_body, *state])
    return state


_CALLS = "jit pjit closed_call checkpoint remat remat2 custom_jvp_call custom_vjp_call"
_RUN = {
    **dict.fromkeys(_CALLS.split(), _called),
    "scan": _scanned,
    "while": _while,
}
