"""Which 8 bits to store the moments of Adam in.

For each format: how far Adam's update is from float32's after many steps, rounded by
chance, and the bytes that a step of adamw moves for a parameter in the program that
XLA compiles for an H100 and a TPU v5e. Gradients are noise around a mean, of sizes that
differ by powers of ten within a row and between rows; halfway they become five times
smaller.

And what moments in few bits cost to compile, for an H100: thirty arrays, of one shape
and of many.

    .venv/bin/python -m benchmarks.moments --json benchmarks/results
"""

import argparse
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, Program, compile_for, missing
from benchmarks.loss_scaling import SHAPE, by_optimizer, compile_step
from benchmarks.report import stamp, write
from jmp_lite.optimizers import storage
from jmp_lite.optimizers.rounding import draw_words, random_bits
from jmp_lite.optimizers.storage import SQUARES, Stored

BLOCK = 256
E4M3 = np.dtype("float8_e4m3fn")


class Format(NamedTuple):
    """How an array is stored.

    Attributes:
      scale: from an array to its scales.
      store: from an array, random bits and scales to what is stored.
      restore: back to an array of a shape.
    """

    scale: Callable[[Any], Any]
    store: Callable[[Any, Any, Any], Any]
    restore: Callable[[Any, tuple[int, ...]], Any]


def by_rows(dtype: Any) -> Format:
    """The format of ``low_precision_state``."""
    return Format(
        lambda x: storage.row_scales(x, dtype),
        lambda x, bits, scale: storage.store(x, dtype, bits, scale),
        lambda stored, _: storage.restore(Stored(*stored)),
    )


def in_blocks(inner: Format) -> Format:
    """A format of which each block of a row has a scale."""

    def blocks(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], -1, BLOCK)

    def store(x: Any, bits: Any, scale: Any) -> Any:
        numbers, scale = inner.store(blocks(x), blocks(bits), scale)
        return numbers.reshape(x.shape), scale

    def restore(stored: Any, shape: tuple[int, ...]) -> Any:
        numbers, scale = stored
        blocked = blocks(numbers)
        return inner.restore((blocked, scale), blocked.shape).reshape(shape)

    return Format(lambda x: inner.scale(blocks(x)), store, restore)


def as_roots(inner: Format) -> Format:
    """A format that stores square roots."""
    return Format(
        lambda x: inner.scale(jnp.sqrt(x)),
        lambda x, bits, scale: inner.store(jnp.sqrt(x), bits, scale),
        lambda stored, shape: jnp.square(inner.restore(stored, shape)),
    )


def by_map(numbers: np.ndarray) -> Format:
    """A format of 256 numbers, of which the largest is 1."""

    def scale_of(x: Any) -> Any:
        largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        return jnp.where(largest == 0, 1.0, largest)

    def store(x: Any, bits: Any, scale: Any) -> Any:
        table, ratio = jnp.asarray(numbers), x / scale
        above = jnp.clip(jnp.searchsorted(table, ratio), 1, len(numbers) - 1)
        low, high = table[above - 1], table[above]
        noise = (bits >> 8).astype(jnp.float32) * 2.0**-24
        is_up = noise < (ratio - low) / (high - low)
        return jnp.where(is_up, above, above - 1).astype(jnp.uint8), scale

    def restore(stored: Any, _: tuple[int, ...]) -> Any:
        codes, scale = stored
        return jnp.asarray(numbers)[codes] * scale

    return Format(scale_of, store, restore)


def dynamic_map(is_signed: bool) -> np.ndarray:
    """Returns bitsandbytes' "dynamic tree" numbers, after Dettmers et al., 2021.

    A number has a power of ten, written as leading zeros, and the bits that are left
    divide what lies between that power and the next one.
    """
    bits = 6 if is_signed else 7
    decades = [np.linspace(0.1, 1, 2 ** (bits - zeros) + 1) for zeros in range(7)]
    middles = [(edges[:-1] + edges[1:]) / 2 for edges in decades]
    numbers = np.concatenate([10.0**-i * each for i, each in enumerate(middles)])
    below = -numbers if is_signed else numbers[:0]
    return np.unique([*below, 0.0, *numbers, 1.0]).astype(np.float32)


FORMATS: Mapping[str, tuple[Format, Format]] = {
    "float8 and 5+3 bits, rows": (by_rows(E4M3), by_rows(SQUARES)),
    "float8 and 5+3 bits, blocks": (
        in_blocks(by_rows(E4M3)),
        in_blocks(by_rows(SQUARES)),
    ),
    "the same, roots of squares": (
        in_blocks(by_rows(E4M3)),
        as_roots(in_blocks(by_rows(SQUARES))),
    ),
    "float8 for both, rows": (by_rows(E4M3), by_rows(E4M3)),
    "dynamic map, blocks": (
        in_blocks(by_map(dynamic_map(True))),
        in_blocks(by_map(dynamic_map(False))),
    ),
    "dynamic map, roots": (
        in_blocks(by_map(dynamic_map(True))),
        as_roots(in_blocks(by_map(dynamic_map(False)))),
    ),
}
"""Of first moments, and of squares."""


class Row(NamedTuple):
    """What a format comes to.

    Attributes:
      format: its name.
      first: the error of Adam's update where first moments alone are stored so.
      squares: the same of second moments.
      moved: bytes that a step of adamw moves for a parameter, by target.
    """

    format: str
    first: float
    squares: float
    moved: Mapping[str, float]


def transformation(first: Format, squares: Format) -> Any:
    """Returns adamw that stores its moments so."""
    inner, key = optax.adamw(1e-3), jax.random.key(0)

    def update(grads: Any, state: Any, params: Any) -> Any:
        key, (mu, nu), (adam, *rest) = state
        now, later = jax.random.split(key)
        leaves, structure = jax.tree.flatten(grads)
        of = lambda form, stored: structure.unflatten(
            form.restore(x, g.shape) for x, g in zip(stored, leaves, strict=True)
        )
        full = adam._replace(mu=of(first, mu), nu=of(squares, nu))
        steps, (adam, *rest) = inner.update(grads, (full, *rest), params)
        return steps, (later, _stored(first, squares, adam, now), (_bare(adam), *rest))

    def init(params: Any) -> Any:
        adam, *rest = inner.init(params)
        return key, _stored(first, squares, adam, key), (_bare(adam), *rest)

    return optax.GradientTransformation(init, update)


def _bare(adam: Any) -> Any:
    return adam._replace(mu=None, nu=None)


def _stored(first: Format, squares: Format, adam: Any, key: Any) -> Any:
    words = draw_words(key)
    moments = [(first, adam.mu), (squares, adam.nu)]
    pairs = [(form, jax.tree.leaves(tree)) for form, tree in moments]
    # All scales first, as in ``low_precision_state``.
    scales = lax.optimization_barrier(
        [[form.scale(x) for x in leaves] for form, leaves in pairs]
    )
    return [
        [
            form.store(x, random_bits(words, 2 * i + n, x), scale)
            for i, (x, scale) in enumerate(zip(leaves, scales[n], strict=True))
        ]
        for n, (form, leaves) in enumerate(pairs)
    ]


def moved(first: Format, squares: Format, target: str) -> float:
    """Returns the bytes that a step moves for a parameter."""
    way = by_optimizer(transformation(first, squares))
    return compile_step(target, way).bytes_moved / (SHAPE[0] * SHAPE[1])


# -------------------------------------------------------------------------- accuracy

_IN_FLOAT32 = Format(lambda x: None, lambda x, bits, scale: x, lambda stored, _: stored)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def update_error(first: Format, squares: Format, steps: int) -> Any:
    """Returns the mean relative error of Adam's updates, after a hundred steps."""
    keys = jax.random.split(jax.random.key(1), 4)
    shape = (16, 4096)
    sizes = jnp.exp(1.5 * jax.random.normal(keys[0], shape))
    sizes *= jnp.repeat(jnp.exp(jax.random.normal(keys[1], (16, 16))), BLOCK, axis=1)
    mean = 0.3 * sizes * jax.random.normal(keys[2], shape)
    optimizer = optax.scale_by_adam()

    def one(carry: Any, i: Any) -> Any:
        exact, low = carry
        key = jax.random.fold_in(keys[3], i)
        grads = mean + sizes * jax.random.normal(key, shape)
        grads *= jnp.where(i < steps // 2, 1.0, 0.2)
        expected, exact = optimizer.update(grads, exact)
        count, mu, nu = low
        full = exact._replace(
            count=count,
            mu=first.restore(mu, shape),
            nu=squares.restore(nu, shape),
        )
        found, full = optimizer.update(grads, full)
        low = (full.count, *_pair(first, squares, full, key))
        off = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
        return (exact, low), off

    start = optimizer.init(jnp.zeros(shape))
    low = (start.count, *_pair(first, squares, start, keys[3]))
    _, errors = lax.scan(one, (start, low), jnp.arange(steps))
    return jnp.mean(errors[100:])


def _pair(first: Format, squares: Format, adam: Any, key: Any) -> Any:
    mu, nu = adam.mu, adam.nu
    words = draw_words(key)
    bits = [random_bits(words, number, mu) for number in (1, 2)]
    return (
        first.store(mu, bits[0], first.scale(mu)),
        squares.store(nu, bits[1], squares.scale(nu)),
    )


def measure(name: str, targets: Sequence[str], steps: int) -> Row:
    """Measures a format."""
    first, squares = FORMATS[name]
    return Row(
        name,
        float(update_error(first, _IN_FLOAT32, steps)),
        float(update_error(_IN_FLOAT32, squares, steps)),
        {target: moved(first, squares, target) for target in targets},
    )


# ----------------------------------------------------------------------- thirty arrays

STATES = (None, "bfloat16", "float8_e4m3fn")
"""The dtypes of moments; None for the optimizer alone."""

THIRTY: Mapping[str, list[tuple[int, int]]] = {
    "one": [(1024, 4096)] * 30,
    "many": [(1024 + 8 * i, 4096 - 16 * i) for i in range(30)],
}
"""Shapes of the parameters."""


class Compiled(NamedTuple):
    """A step of adamw on thirty arrays.

    Attributes:
      state: the dtype of moments.
      shapes: whether the arrays have one shape or many.
      seconds: to compile it.
      kernels: how many it launches.
      arrays: how many float32 numbers it moves for each parameter.
    """

    state: str
    shapes: str
    seconds: float
    kernels: int
    arrays: float


def compile_thirty(state: str | None, shapes: str) -> Program:
    """Compiles a step of adamw on thirty arrays for an H100."""
    optimizer: Any = optax.adamw(1e-3)
    if state is not None:
        key = jax.random.key(0)
        optimizer = jmp.low_precision_state(optimizer, state, key=key)
    way = by_optimizer(optimizer)
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in THIRTY[shapes]]
    before = jax.eval_shape(way.init, params)
    return compile_for("h100", way.step, params, before, params, donate_argnums=(0, 1))


def measure_thirty(state: str | None, shapes: str) -> Compiled:
    """Measures a step, and the seconds that compiling takes here."""
    start = time.perf_counter()
    program = compile_thirty(state, shapes)
    seconds = time.perf_counter() - start
    arrays = program.bytes_moved / sum(4 * rows * n for rows, n in THIRTY[shapes])
    name = "adamw alone" if state is None else state
    return Compiled(name, shapes, seconds, program.kernels, arrays)


def compiled_table(rows: Sequence[Compiled]) -> str:
    """Returns what thirty arrays cost, as text."""
    alone = {row.shapes: row.seconds for row in rows if row.state == "adamw alone"}
    lines = [
        f"{'thirty arrays':16}{'shapes':>7}{'compile':>13}{'kernels':>9}{'moved':>7}"
    ]
    lines += [
        f"{row.state:16}{row.shapes:>7}{row.seconds:>6.1f} s"
        f"{row.seconds / alone[row.shapes]:>5.1f}x{row.kernels:>9}{row.arrays:>7.2f}"
        for row in rows
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------- main


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text."""
    lines = [
        f"{'error of the update, by':32}{'first':>8}{'squares':>12}   bytes moved",
        f"{'':52}" + "".join(f"{target:>8}" for target in rows[0].moved),
    ]
    lines += [
        f"{row.format:32}{row.first:>8.1%}{row.squares:>12.1%}"
        + "".join(f"{count:>8.2f}" for count in row.moved.values())
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.moments")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    for target in options.targets:
        if missing(target):
            raise SystemExit(missing(target))
    rows = [measure(name, options.targets, options.steps) for name in FORMATS]
    print(table(rows))
    compiled = []
    if "h100" in options.targets:
        compile_thirty(None, "one")  # Starts the compiler.
        compiled = [measure_thirty(*each) for each in itertools.product(STATES, THIRTY)]
        print("\n" + compiled_table(compiled))
    about = stamp(steps=options.steps)
    write(options.json, "moments", about, formats=rows, compiled=compiled)


if __name__ == "__main__":
    main()
