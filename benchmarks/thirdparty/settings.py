"""The same programs under the settings and the transformations that users have.

Each one is tried with the program as it is, and then under autocast. Where it fails in
float32 too, nothing is asked of autocast.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

import jmp_lite as jmp
from benchmarks.thirdparty.measure import relative_error
from benchmarks.thirdparty.program import Entry, Loss, Program

NOT_IN_FLOAT32 = "not in float32"
NOT_HERE = "not in this version"
PROGRAMS = (
    "CTC",
    "S5",
    "MAML",
    "linen's layers",
    "nnx's layers",
    "Equinox transformer",
)
"""The programs that are tried: what they import is what the tests import."""


class Tried(NamedTuple):
    """A program under one setting.

    Attributes:
      program: its name.
      setting: the name of the setting.
      outcome: ``"yes"``; ``NOT_IN_FLOAT32``; ``NOT_HERE``; otherwise what went wrong.
      jax: the version of JAX.
    """

    program: str
    setting: str
    outcome: str
    jax: str = jax.__version__


def try_all(entry: Entry) -> list[Tried]:
    """Tries a program under all settings that this version of JAX has."""
    program = entry.make()
    low = program._replace(loss=jmp.autocast(program.loss))
    usual = relative_error(
        *(_gradient(p.loss)(p.params, p.batch) for p in (low, program))
    )
    return [
        Tried(entry.name, name, _outcome(run, program, low, usual))
        for name, run in SETTINGS.items()
    ]


def _outcome(
    run: Callable[[Program], Any], program: Program, low: Program, usual: float
) -> str:
    """Returns ``"yes"`` if the error is no larger than without the setting."""
    try:
        expected = run(program)
    except _NotHereError:
        return NOT_HERE
    except Exception:  # Whatever it is, the program itself does not bear it.
        return NOT_IN_FLOAT32
    try:
        error = relative_error(run(low), expected)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}".split("\n")[0]
    return "yes" if error <= 1.5 * usual + 0.005 else f"off by {error:.2g}"


def _gradient(loss: Loss) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda *args: loss(*args)[0]))


# -------------------------------------------------------------------------- settings


def _ahead_of_time(program: Program) -> Any:
    lowered = _gradient(program.loss).lower(program.params, program.batch)
    return lowered.compile()(program.params, program.batch)


def _exported(program: Program) -> Any:
    fun, params, batch = _of_leaves(program)
    made = export.export(jax.jit(jax.grad(fun)))(params, batch)
    return export.deserialize(made.serialize()).call(params, batch)


def _exported_with_its_gradient(program: Program) -> Any:
    fun, params, batch = _of_leaves(program)
    made = export.export(jax.jit(fun))(params, batch)
    again = export.deserialize(made.serialize(vjp_order=1))
    return jax.grad(again.call)(params, batch)


def _exported_for_any_batch(program: Program) -> Any:
    fun, params, batch = _of_leaves(program)
    if len({x.shape[0] for x in batch if x.ndim}) != 1:
        raise ValueError("There is no one leading axis, which is the batch.")
    (symbol,) = export.symbolic_shape("n")

    def shape(leaf: Any) -> Any:
        rest = (symbol, *leaf.shape[1:]) if leaf.ndim else leaf.shape
        return jax.ShapeDtypeStruct(rest, leaf.dtype)

    made = export.export(jax.jit(jax.grad(fun)))(params, [shape(x) for x in batch])
    return export.deserialize(made.serialize()).call(params, batch)


def _of_leaves(program: Program) -> tuple[Callable[..., Any], list[Any], list[Any]]:
    """Returns the loss of lists of arrays: trees of modules cannot be serialized."""
    params, of_params = jax.tree.flatten(program.params)
    batch, of_batch = jax.tree.flatten(program.batch)

    def loss(params: list[Any], batch: list[Any]) -> Any:
        return program.loss(of_params.unflatten(params), of_batch.unflatten(batch))[0]

    return loss, params, batch


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


class _NotHereError(Exception):
    """This version has no such setting."""


def _with_flag(name: str) -> Callable[[Program], Any]:
    def run(program: Program) -> Any:
        if not hasattr(jax.config, name):
            raise _NotHereError
        before = getattr(jax.config, name)
        jax.config.update(name, True)
        try:
            return _gradient(program.loss)(program.params, program.batch)
        finally:
            jax.config.update(name, before)

    return run


def _in_tree_mode(program: Program) -> Any:
    """Flax's modules as trees, as those of nnx will be."""
    from flax import nnx

    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        return _gradient(program.loss)(program.params, program.batch)


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
    "Flax's tree mode": _in_tree_mode,
    **{
        name: _with_flag(name)
        for name in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
    },
}
"""How a gradient is computed, by the name of the setting."""
