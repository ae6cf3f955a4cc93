"""What devices send each other in a train step, in programs compiled for eight of them.

Prints, for each target and each way to split the work, how many bytes go through
collectives, and in which dtypes; and what an embedding table costs that is split over
the devices. Exact: no clock, no device.

    make targets && .venv/bin/python -m benchmarks.collectives
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_lite as jmp
from benchmarks import models
from benchmarks.compiled import TARGETS, Program, compile_for, devices, missing

DEVICES = 8
TOPOLOGIES = {"h100": "1x1x8", "v5e": "v5e:2x4"}
LANGUAGE_MODEL = {"width": 1024, "heads": 8, "vocabulary": 8192, "batch": (64, 512)}
LAYOUTS = ("data parallel, shard_map", "data parallel, jit", "FSDP, jit")


def compile_step(
    target: str,
    layout: str,
    rules: jmp.Rules | str,
    width: int = 1024,
    depth: int = 4,
    rows: int = 512,
) -> Program:
    """Compiles a train step of a residual network for eight devices.

    Args:
      target: one of `compiled.TARGETS`.
      layout: one of `LAYOUTS`. Batches are split in all; parameters and the optimizer's
        state in FSDP, while the others have all of them on each device.
      rules: those of the step.
      width: of the network.
      depth: how many blocks it has.
      rows: of the batch of each device.
    """
    mesh = mesh_of(target)
    by_hand = "shard_map" in layout
    init, step = jmp.build_train_step(
        _loss, optax.adamw(1e-3), rules, axis_name="data" if by_hand else None
    )
    state = jax.eval_shape(init, _params(width, depth))
    batch = [jax.ShapeDtypeStruct((DEVICES * rows, width), jnp.float32)] * 2
    state = _split(state, mesh, _rows if layout.startswith("FSDP") else _everywhere)
    batch = _split(batch, mesh, _rows)
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    options: dict[str, Any] = {"donate_argnums": 0}
    if by_hand:
        specs = (P(), P("data"))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    else:
        options["out_shardings"] = where, None
    return compile_for(target, step, state, batch, **options)


LOOKUPS = ("by hand", "mixed", "mixed, as_low")


def compile_language_model(target: str, variant: str, **options: Any) -> Program:
    """Compiles the gradient of a transformer, all of whose parameters are split.

    Args:
      target: one of `compiled.TARGETS`.
      variant: one of `LOOKUPS`. By hand the table is cast before the lookup, as
        ``flax.linen.Embed(dtype=...)`` does it.
      **options: those of `models.transformer`.
    """
    model = models.transformer(
        jnp.bfloat16 if variant == "by hand" else None, **options
    )

    def loss(params: Any, tokens: Any) -> Any:
        table = params["embed"]
        if variant == "by hand":
            table = table.astype(jnp.bfloat16)
        elif variant == "mixed, as_low":
            table = jmp.as_low(table)
        return model.loss({**params, "embed": table}, tokens)

    mesh = mesh_of(target)
    params, tokens = (_split(x, mesh, _rows) for x in (model.params, model.batch))
    where = jax.tree.map(lambda leaf: leaf.sharding, params)
    fun = jax.grad(loss if variant == "by hand" else jmp.autocast(loss))
    return compile_for(target, fun, params, tokens, out_shardings=where)


HEADS = ("rows", "vocabulary")
WITHOUT_LABELS = jmp.get_rules("mixed").without_pass("labels")


def compile_head(
    target: str,
    split: str,
    rules: jmp.Rules | str,
    rows: int = 8192,
    width: int = 1024,
    vocabulary: int = 32768,
) -> Program:
    """Compiles the gradient of the head of a language model for eight devices.

    Args:
      target: one of `compiled.TARGETS`.
      split: one of `HEADS`: what is split over the devices.
      rules: those of the loss.
      rows: the number of tokens.
      width: of the model.
      vocabulary: how many tokens there are to choose from.
    """
    mesh, is_rows = mesh_of(target), split == "rows"

    def loss(head: Any, hidden: Any, labels: Any) -> Any:
        logits = jnp.tanh(hidden) @ head
        chosen = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    of_head = P() if is_rows else P(None, "data")
    of_rows = P("data") if is_rows else P()
    head, hidden, labels = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((width, vocabulary), jnp.float32, of_head),
            ((rows, width), jnp.float32, of_rows),
            ((rows,), jnp.int32, of_rows),
        )
    )
    grad = jax.grad(jmp.autocast(loss, rules), (0, 1))
    where = head.sharding, hidden.sharding
    return compile_for(target, grad, head, hidden, labels, out_shardings=where)


FOUR = {"h100": "1x1x4", "v5e": "v5e:2x2"}
_MIXED = jmp.get_rules("mixed")
GATHERS: dict[str, jmp.Rules | None] = {
    "float32": None,
    "by hand": None,
    "mixed": _MIXED,
    'low("reduce_scatter")': _MIXED.low("reduce_scatter"),
}


def compile_gathers(
    target: str, variant: str, width: int = 1024, depth: int = 4, rows: int = 512
) -> Program:
    """Compiles the gradient of a network that gathers its weights, for four devices.

    Args:
      target: one of `compiled.TARGETS`.
      variant: one of `GATHERS`. By hand each weight is cast before it is gathered.
      width: of the network.
      depth: how many layers it has.
      rows: of the batch of each device.
    """

    def loss(parts: Any, x: Any) -> Any:
        h = x.astype(jnp.bfloat16) if variant == "by hand" else x
        for part in parts:
            part = part.astype(h.dtype)
            h = jax.nn.relu(h @ jax.lax.all_gather(part, "data", tiled=True))
        return jax.lax.pmean(jnp.mean(h.astype(jnp.float32) ** 2), "data")

    mesh = mesh_of(target, FOUR)
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P()}
    mapped = jax.shard_map(loss, mesh=mesh, **specs)
    rules = GATHERS[variant]
    fun = mapped if rules is None else jmp.autocast(mapped, rules)
    parts = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * depth
    x = jax.ShapeDtypeStruct((mesh.size * rows, width), jnp.float32)
    parts, x = _split((parts, x), mesh, _rows)
    where = jax.tree.map(lambda leaf: leaf.sharding, parts)
    return compile_for(target, jax.grad(fun), parts, x, out_shardings=where)


SUMS = ("mixed", 'low("psum")')


def compile_sums(
    target: str, variant: str, width: int = 1024, depth: int = 4, rows: int = 512
) -> Program:
    """Compiles the gradient of a network that each of four devices has as a whole.

    Args:
      target: one of `compiled.TARGETS`.
      variant: one of `SUMS`.
      width: of the network.
      depth: how many layers it has.
      rows: of the batch of each device.
    """

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jax.nn.relu(x @ weight)
        return jax.lax.pmean(jnp.mean(x**2), "data")

    mesh = mesh_of(target, FOUR)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    mapped = jax.shard_map(loss, mesh=mesh, **specs)
    rules = _MIXED if variant == "mixed" else _MIXED.low("psum")
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * depth
    x = jax.ShapeDtypeStruct((mesh.size * rows, width), jnp.float32)
    weights, x = _split(weights, mesh, _everywhere), _split(x, mesh, _rows)
    where = jax.tree.map(lambda leaf: leaf.sharding, weights)
    fun = jax.grad(jmp.autocast(mapped, rules))
    return compile_for(target, fun, weights, x, out_shardings=where)


def mesh_of(target: str, topologies: Mapping[str, str] = TOPOLOGIES) -> Mesh:
    """Returns the devices of a target, in one row."""
    every = np.array(devices(target, topologies[target]))
    return Mesh(every, ("data",), axis_types=(AxisType.Auto,))


def _params(width: int, depth: int) -> Any:
    def weight(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        "up": weight(width, 4 * width),
        "bias": weight(4 * width),
        "down": weight(4 * width, width),
    }
    return {"blocks": [block] * depth, "head": weight(width, width)}


def _loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    h, y = batch
    for block in params["blocks"]:
        h = h + jax.nn.gelu(h @ block["up"] + block["bias"]) @ block["down"]
    return jnp.mean((h @ params["head"] - y) ** 2), (model_state, None)


def _everywhere(leaf: Any) -> P:
    del leaf
    return P()


def _rows(leaf: Any) -> P:
    return P("data") if leaf.ndim and leaf.shape[0] % DEVICES == 0 else P()


def _split(tree: Any, mesh: Mesh, spec_of: Callable[[Any], P]) -> Any:
    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def main() -> None:
    """Prints the table."""
    print(f"An adamw step on {DEVICES} devices, jax {jax.__version__}")
    print(f"{'':26}{'target':>8}{'rules':>8}  MB through collectives")
    for target in TARGETS:
        if missing(target):
            print(missing(target))
            continue
        for layout in LAYOUTS:
            for rules in ("O0", "mixed"):
                sent = _megabytes(compile_step(target, layout, rules))
                print(f"{layout:26}{target:>8}{rules:>8}  {sent}")
    print("\nThe gradient of four layers in shard_map on 4 devices")
    print(f"{'':34}{'target':>8}  MB through collectives")
    for target in TARGETS:
        for variant in GATHERS if not missing(target) else ():
            sent = _megabytes(compile_gathers(target, variant))
            print(f"{'gathered, ' + variant:34}{target:>8}  {sent}")
        for variant in SUMS if not missing(target) else ():
            sent = _megabytes(compile_sums(target, variant))
            print(f"{'copied, ' + variant:34}{target:>8}  {sent}")
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    print(f"\nThe gradient of a transformer of 4 blocks in FSDP on {DEVICES} devices")
    print(f"{'':26}{'target':>8}{'GB moved':>10}  MB through collectives")
    for target in TARGETS:
        for variant in LOOKUPS if not missing(target) else ():
            program = compile_language_model(target, variant, **LANGUAGE_MODEL)
            moved = program.bytes_moved / 1e9
            print(f"{variant:26}{target:>8}{moved:>10.3f}  {_megabytes(program)}")

    print(f"\nThe gradient of a head on {DEVICES} devices, by what is split")
    for target in TARGETS:
        for split in HEADS if not missing(target) else ():
            for name, rules in (("mixed", "mixed"), ("without labels", WITHOUT_LABELS)):
                program = compile_head(target, split, rules)
                title, moved = f"{split}, {name}", program.bytes_moved / 1e9
                print(f"{title:26}{target:>8}{moved:>10.3f}  {_megabytes(program)}")


def _megabytes(program: Program) -> str:
    """Returns what goes through collectives, by dtype, the largest first."""
    sent = sorted(program.collectives.items(), key=lambda item: -item[1])
    # But for counts and flags.
    return ", ".join(f"{n / 1e6:.1f} {dtype}" for dtype, n in sent if n > 1e4)


if __name__ == "__main__":
    main()
