"""The same programs under the settings and the transformations that users have.

Each one is tried with the program as it is, and then under autocast. Where it fails in
float32 too, nothing is asked of autocast.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jmp_lite as jmp
from benchmarks.thirdparty.program import Entry, Loss, Program

NOT_IN_FLOAT32 = "not in float32"


class Tried(NamedTuple):
    """A program under one setting.

    Attributes:
      program: its name.
      setting: the name of the setting.
      outcome: ``"yes"``; ``NOT_IN_FLOAT32``; otherwise what went wrong.
    """

    program: str
    setting: str
    outcome: str


def try_all(entry: Entry) -> list[Tried]:
    """Tries a program under all settings that this version of JAX has."""
    program = entry.make()
    low = program._replace(loss=jmp.autocast(program.loss))
    expected = _gradient(low.loss)(low.params, low.batch)
    found: list[Tried] = []
    for name, run in SETTINGS.items():
        try:
            run(program)
        except Exception:  # Whatever it is, the program itself does not bear it.
            found.append(Tried(entry.name, name, NOT_IN_FLOAT32))
            continue
        try:
            outcome = _compared(run(low), expected)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".split("\n")[0]
        found.append(Tried(entry.name, name, outcome))
    return found


def _gradient(loss: Loss) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda *args: loss(*args)[0]))


def _compared(found: Any, expected: Any) -> str:
    """Returns ``"yes"`` if gradients differ by no more than 16 bits do."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [[np.asarray(x, np.float64) for x in pair] for pair in pairs]
    off = sum(float(np.sum((a - b) ** 2)) for a, b in wide)
    size = sum(float(np.sum(b**2)) for _, b in wide)
    return "yes" if off <= 0.03**2 * size else f"off by {(off / size) ** 0.5:.2g}"


# -------------------------------------------------------------------------- settings


def _ahead_of_time(program: Program) -> Any:
    lowered = _gradient(program.loss).lower(program.params, program.batch)
    return lowered.compile()(program.params, program.batch)


def _exported(program: Program) -> Any:
    made = export.export(_gradient(program.loss))(program.params, program.batch)
    again = export.deserialize(made.serialize())
    return again.call(program.params, program.batch)


def _exported_with_its_gradient(program: Program) -> Any:
    value = jax.jit(lambda *args: program.loss(*args)[0])
    made = export.export(value)(program.params, program.batch)
    again = export.deserialize(made.serialize(vjp_order=1))
    return jax.grad(again.call)(program.params, program.batch)


def _exported_for_any_batch(program: Program) -> Any:
    sizes = {x.shape[0] for x in jax.tree.leaves(program.batch) if x.ndim}
    if len(sizes) != 1:
        raise ValueError("There is no one leading axis, which is the batch.")
    (symbol,) = export.symbolic_shape("n")

    def shape(leaf: Any) -> Any:
        rest = (symbol, *leaf.shape[1:]) if leaf.ndim else leaf.shape
        return jax.ShapeDtypeStruct(rest, leaf.dtype)

    batch = jax.tree.map(shape, program.batch)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.params
    )
    made = export.export(_gradient(program.loss))(params, batch)
    return export.deserialize(made.serialize()).call(program.params, program.batch)


def _in(context: Callable[[], Any]) -> Callable[[Program], Any]:
    def run(program: Program) -> Any:
        with context():
            return _gradient(program.loss)(program.params, program.batch)

    return run


def _offloaded(program: Program) -> Any:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    light = jax.checkpoint(lambda *args: program.loss(*args)[0], policy=policy)
    return jax.jit(jax.grad(light))(program.params, program.batch)


def _under_a_vmap_rule(program: Program) -> Any:
    """The loss of two copies of the batch, whose rule for vmap maps over them."""

    @jax.custom_batching.custom_vmap
    def loss(batch: Any) -> Any:
        return program.loss(params, batch)[0]

    @loss.def_vmap
    def _(size: int, is_mapped: Any, batch: Any) -> Any:
        del size, is_mapped
        return jax.lax.map(lambda one: program.loss(params, one)[0], batch), True

    params = program.params
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), program.batch)
    jax.jit(jax.vmap(loss))(twice)
    return _gradient(program.loss)(program.params, program.batch)


def _with_flags(*names: str) -> Callable[[Program], Any]:
    def run(program: Program) -> Any:
        before = {name: getattr(jax.config, name) for name in names}
        for name in names:
            jax.config.update(name, True)
        try:
            return _gradient(program.loss)(program.params, program.batch)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)

    return run


SETTINGS: Mapping[str, Callable[[Program], Any]] = {
    "compiled ahead of time": _ahead_of_time,
    "jax.export": _exported,
    "jax.export of the loss, gradient after": _exported_with_its_gradient,
    "jax.export, symbolic batch": _exported_for_any_batch,
    "jax_debug_nans": _in(lambda: jax.debug_nans(True)),
    "strict promotion": _in(lambda: jax.numpy_dtype_promotion("strict")),
    "x64": _in(lambda: jax.enable_x64(True)),
    "checkpoint that offloads": _offloaded,
    "custom_vmap": _under_a_vmap_rule,
    "jax_remat3, jax_custom_vjp3, jax_custom_jvp3": _with_flags(
        "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3"
    ),
}
"""How a gradient is computed, by the name of the setting."""
