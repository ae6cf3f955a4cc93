"""What autocast and loss scaling gain on one NVIDIA GPU: time, memory, larger batches.

First the ceilings of the device: products of large matrices in each precision, and
copies. Then whole training steps (adamw) of a transformer of GPT-2-small's size, a
ResNet-50 at 224 x 224 and an LSTM, on numbers made here, in every precision; steps of
all variants take turns, and medians are told. Beside each time stands the least that
its compiled program takes at those ceilings. It needs Python with jax, flax, optax and
chex, and no network:

    python3 -m benchmarks.gpu --json benchmarks/results
    JAX_PLATFORMS=cpu python3 -m benchmarks.gpu --tiny
"""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks import models
from benchmarks.autocast import fill
from benchmarks.compiled import H100, Program, Target, read
from benchmarks.report import device_name, stamp, write

# ---------------------------------------------------------------------------- ceilings

# Of products: the dtype of the operands, and the precision that is asked for.
PRODUCTS = {
    "float32 highest": ("float32", "highest"),
    "float32 (TF32)": ("float32", "default"),
    "bfloat16": ("bfloat16", "default"),
    "float16": ("float16", "default"),
}
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Ceilings(NamedTuple):
    """What the device does at most.

    Attributes:
      flops: operations of matrix products a second, by precision.
      bandwidth: bytes that copies read and write in a second.
    """

    flops: Mapping[str, float]
    bandwidth: float

    def target(self) -> Target:
        """Returns the device as programs see it."""
        rates = {
            (_SHORT[dtype], precision): self.flops[name]
            for name, (dtype, precision) in PRODUCTS.items()
        }
        return dataclasses.replace(
            H100, bandwidth=self.bandwidth, flops={**H100.flops, **rates}
        )


def ceilings(width: int, runs: int) -> Ceilings:
    """Measures products of matrices of a width, and copies of four of them."""
    flops = {}
    for name, (dtype, precision) in PRODUCTS.items():
        # Not ones: a device that has nothing to do for them may run faster.
        a = jax.random.normal(jax.random.key(0), (width, width)).astype(dtype)
        product = jax.jit(functools.partial(jnp.matmul, precision=precision))
        flops[name] = 2 * width**3 / _seconds(lambda p=product, a=a: p(a, a), runs)
    x = jnp.ones((4, width, width), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return Ceilings(flops, 2 * x.nbytes / _seconds(lambda: copy(x), runs))


def _seconds(run: Callable[[], Any], runs: int) -> float:
    """Returns the seconds of one of several runs, the best of three times."""
    jax.block_until_ready(run())
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(runs):
            result = run()  # They are not all held.
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / runs)
    return min(times)


# ---------------------------------------------------------------------------- variants

Make = Callable[..., models.Model]


class Variant(NamedTuple):
    """A way to train.

    Attributes:
      loss: from what makes a model to its loss.
      precision: the precision that products ask for.
      ceiling: the one of `PRODUCTS` that it is held against.
      is_scaled: whether it trains under a loss scale.
      grad_dtype: the dtype of the gradients.
      moments: the dtype that the optimizer's moments are stored in.
    """

    loss: Callable[[Make], Any]
    precision: str = "default"
    ceiling: str = "bfloat16"
    is_scaled: bool = False
    grad_dtype: str = "float32"
    moments: str = "float32"


def _by_policy(make: Make) -> Any:
    """The loss of cast parameters and a cast batch, as users of jmp write it."""
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    loss = make(None).loss

    def in_policy(params: Any, batch: Any) -> Any:
        return policy.cast_to_output(loss(*policy.cast_to_compute((params, batch))))

    return in_policy


def _by_autocast(dtype: str) -> Callable[[Make], Any]:
    return lambda make: jmp.autocast(make(None).loss, compute_dtype=dtype)


def _as_it_is(make: Make) -> Any:
    return make(None).loss


# What matters most first: there may be no time for all of them.
VARIANTS: Mapping[str, Variant] = {
    "float32 highest": Variant(_as_it_is, "highest", "float32 highest"),
    "bfloat16 by hand": Variant(lambda make: make(jnp.bfloat16).loss),
    "bfloat16, autocast": Variant(_by_autocast("bfloat16")),
    "float16, with loss scaling": Variant(
        _by_autocast("float16"), ceiling="float16", is_scaled=True
    ),
    "float16, autocast": Variant(_by_autocast("float16"), ceiling="float16"),
    "float32 default": Variant(_as_it_is, ceiling="float32 (TF32)"),
    "bfloat16, jmp's policy": Variant(_by_policy),
    "bfloat16, 16-bit gradients": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16"
    ),
    "bfloat16, 16-bit moments": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16", moments="bfloat16"
    ),
    "bfloat16, 8-bit moments": Variant(
        _by_autocast("bfloat16"), grad_dtype="bfloat16", moments="float8_e4m3fn"
    ),
}
LEAN = (
    "bfloat16, 16-bit gradients",
    "bfloat16, 16-bit moments",
    "bfloat16, 8-bit moments",
)
"""Those that need less memory for gradients and moments."""
BASE = "float32 highest"
BATCHES_OF = (
    "bfloat16, autocast",
    "float32 highest",
    "bfloat16 by hand",
    "float16, with loss scaling",
)
"""What the largest batch is told of: each is compiled once more for it."""


class Size(NamedTuple):
    """A model to train: what makes it for a batch, and how many make a batch."""

    make: Callable[..., models.Model]
    batch: int


def _transformer(dtype: Any, batch: int, length: int = 1024, **size: Any) -> Any:
    return models.transformer(dtype, batch=(batch, length), **size)


def _lstm(dtype: Any, batch: int, length: int = 256, **size: Any) -> Any:
    return models.lstm(dtype, batch=(batch, length), **size)


MODELS: Mapping[str, Size] = {
    "transformer (GPT-2 small)": Size(functools.partial(_transformer, depth=12), 8),
    "ResNet-50, 224 x 224": Size(models.resnet50, 128),
    "LSTM, 1024 wide": Size(_lstm, 64),
}
TINY: Mapping[str, Size] = {
    "transformer (GPT-2 small)": Size(
        functools.partial(
            _transformer, depth=1, width=16, heads=2, vocabulary=32, length=8
        ),
        2,
    ),
    "ResNet-50, 224 x 224": Size(
        functools.partial(models.resnet50, size=32, width=4, stages=(1, 1)), 2
    ),
    "LSTM, 1024 wide": Size(functools.partial(_lstm, width=8, length=4), 2),
}


# --------------------------------------------------------------------------- measuring


class Measured(NamedTuple):
    """What a training step is measured to be.

    Attributes:
      model: the name of the model.
      variant: how it is trained.
      milliseconds: of each round of steps, the mean of a step.
      flops: operations of its matrix products.
      ceiling: what part of the device's products a second they make.
      memory: bytes that the compiled step needs.
      roofline: milliseconds that the compiled step takes at least; None where the
        program cannot be read.
      largest: about the largest batch that fits, from what two batches need; None
        where there was no time, or the device does not say what it has.
      is_finite: whether the loss was, at the end.
    """

    model: str
    variant: str
    milliseconds: tuple[float, ...]
    flops: float
    ceiling: float
    memory: int
    roofline: float | None
    largest: int | None
    is_finite: bool

    @property
    def median(self) -> float:
        """The median of the milliseconds."""
        return statistics.median(self.milliseconds)


def make_optimizer(variant: Variant) -> Any:
    """Returns the optimizer of a variant."""
    optimizer = optax.adamw(1e-4)
    if variant.moments != "float32":
        key = jax.random.key(0)
        optimizer = jmp.low_precision_state(optimizer, variant.moments, key=key)
    return jmp.loss_scaling(optimizer) if variant.is_scaled else optimizer


def make_step(variant: Variant, make: Make) -> Callable[..., Any]:
    """Returns the training step of a variant."""
    loss, optimizer = variant.loss(make), make_optimizer(variant)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        with jax.default_matmul_precision(variant.precision):
            scale = jmp.NoOpLossScale()
            if variant.is_scaled:
                scale = jmp.get_loss_scale(opt_state)
            grad_fn = jmp.value_and_grad(
                loss, loss_scale=scale, grad_dtype=variant.grad_dtype
            )
            value, grads = grad_fn(params, batch)
        grads = jmp.cast_to_full(grads)  # The optimizer computes in float32.
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def step_and_shapes(variant: Variant, size: Size, batch: int) -> tuple[Any, ...]:
    """Returns the training step of a variant, and the shapes of its arguments."""
    make = functools.partial(size.make, batch=batch)
    model = make(None)
    opt_state = jax.eval_shape(make_optimizer(variant).init, model.params)
    return make_step(variant, make), model.params, opt_state, model.batch


def compile_step(variant: Variant, size: Size, batch: int) -> jax.stages.Compiled:
    """Compiles a training step for the device at hand."""
    step, *shapes = step_and_shapes(variant, size, batch)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()


def largest_batch(small: int, large: int, batch: int) -> int | None:
    """Returns the batch that fills the device, from what a batch and two of it need."""
    stats = jax.devices()[0].memory_stats() or {}
    slope = (large - small) / batch
    if "bytes_limit" not in stats or slope <= 0:
        return None
    return int((stats["bytes_limit"] - (small - slope * batch)) / slope)


def measure(
    name: str, size: Size, device: Ceilings, rounds: int, steps: int, until: float
) -> list[Measured]:
    """Measures one model in all variants; what fails or is too late is left out.

    Args:
      name: of the model.
      size: the model.
      device: what the device does at most.
      rounds: how often the variants take turns.
      steps: how many steps a turn has.
      until: when to be done, by ``time.perf_counter``. A part of that time is for
        compiling; what is left at the end is for larger batches.
    """
    start = time.perf_counter()
    model = size.make(None, batch=size.batch)
    params, batch = jax.jit(lambda: fill((model.params, model.batch), 0))()
    flops = flops_of(VARIANTS[BASE], size)
    compiled: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for variant_name, variant in VARIANTS.items():
        if time.perf_counter() > start + 0.7 * (until - start):
            print(f"  {variant_name}: left out, there is no time", file=sys.stderr)
            continue
        with _telling_failures(variant_name):
            step = compile_step(variant, size, size.batch)
            own = jax.tree.map(jnp.copy, params)
            state = own, jax.tree.map(jnp.array, make_optimizer(variant).init(own))
            for _ in range(2):  # The second one meets the buffers of the first.
                state = jax.block_until_ready(step(*state[:2], batch))
            states[variant_name], compiled[variant_name] = state, step
        seconds = time.perf_counter() - start
        print(f"  {seconds:5.0f} s  {variant_name}", file=sys.stderr)
    times: dict[str, list[float]] = {variant: [] for variant in compiled}
    for _ in range(rounds):
        for variant_name, step in compiled.items():
            with _telling_failures(variant_name):
                params, opt_state, _ = states[variant_name]
                begin = time.perf_counter()
                for _ in range(steps):
                    params, opt_state, value = step(params, opt_state, batch)
                jax.block_until_ready(value)
                each = (time.perf_counter() - begin) / steps
                states[variant_name] = params, opt_state, value
                times[variant_name].append(each * 1e3)
    losses = {variant: state[2] for variant, state in states.items()}
    states.clear()

    rows: list[Measured] = []
    for variant_name, each in times.items():
        if not each:
            continue
        program = read(compiled[variant_name], "h100")
        rate = flops / (statistics.median(each) / 1e3)
        row = Measured(
            model=name,
            variant=variant_name,
            milliseconds=tuple(each),
            flops=flops,
            ceiling=rate / device.flops[VARIANTS[variant_name].ceiling],
            memory=program.peak_memory,
            roofline=roofline(program, device),
            largest=None,
            is_finite=bool(jnp.isfinite(losses[variant_name])),
        )
        rows.append(row)
    for variant_name in BATCHES_OF:
        there = [row.variant for row in rows]
        if variant_name not in there or time.perf_counter() > until:
            continue
        with _telling_failures(variant_name):
            step = compile_step(VARIANTS[variant_name], size, 2 * size.batch)
            i, twice = there.index(variant_name), read(step, "h100").peak_memory
            largest = largest_batch(rows[i].memory, twice, size.batch)
            rows[i] = rows[i]._replace(largest=largest)
    return rows


@contextlib.contextmanager
def _telling_failures(what: str) -> Iterator[None]:
    """Prints what fails inside: the others are still worth knowing."""
    try:
        yield
    except Exception:
        print(f"  {what} failed:", file=sys.stderr)
        traceback.print_exc()


def flops_of(variant: Variant, size: Size) -> float:
    """Returns the operations of all matrix products of a training step."""
    make = functools.partial(size.make, batch=size.batch)
    model = make(None)
    told = jmp.explain(jax.grad(variant.loss(make)), "O0")(model.params, model.batch)
    return float(sum(told.totals.flops.values()))


def roofline(program: Program, device: Ceilings) -> float | None:
    """Returns the least milliseconds of a program; None where it cannot be read."""
    with _telling_failures("reading a program"):  # The text of another compiler.
        return program.roofline_on(device.target()) * 1e3
    return None


# ------------------------------------------------------------------------------ tables


def ceilings_table(found: Ceilings) -> str:
    """Returns the ceilings as text."""
    lines = [f"{name:17}{f / 1e12:8.1f} Tflop/s" for name, f in found.flops.items()]
    return "\n".join([*lines, f"{'copies':17}{found.bandwidth / 1e9:8.0f} GB/s"])


def table(rows: Sequence[Measured]) -> str:
    """Returns the rows of one model as text."""
    by_name = {row.variant: row for row in rows}
    lines = [
        f"{rows[0].model:28}{'ms/step':>8}{'spread':>7}{'speed-up':>9}{'ceiling':>8}"
        f"{'GB':>7}{'of f32':>7}{'roofline':>9}{'batch':>6}"
    ]
    for row in rows:
        base, f32 = by_name.get(BASE), by_name.get("float32 default")
        speed = f"{base.median / row.median:.2f}" if base else ""
        share = f"{row.memory / f32.memory:.2f}" if f32 else ""
        spread = (max(row.milliseconds) - min(row.milliseconds)) / row.median
        least = "" if row.roofline is None else f"{row.roofline:.2f}"
        note = "" if row.is_finite else "  loss not finite"
        lines.append(
            f"  {row.variant:26}{row.median:>8.2f}{spread:>7.0%}{speed:>9}"
            f"{row.ceiling:>8.0%}{row.memory / 1e9:>7.2f}{share:>7}{least:>9}"
            f"{row.largest or '':>6}{note}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python3 -m benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="in each round")
    parser.add_argument("--minutes", type=float, default=7.0, help="for all models")
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    # Flax promotes by itself.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    told = stamp(rounds=options.rounds, steps=options.steps, tiny=options.tiny)
    told["device"] = device_name()
    print(f"{told['device']}, jax {jax.__version__}")
    found = ceilings(64 if options.tiny else 8192, 2 if options.tiny else 20)
    print(ceilings_table(found), flush=True)
    told["ceilings"] = found._asdict()
    rows: list[Measured] = []
    sizes = TINY if options.tiny else MODELS
    end = time.perf_counter() + 60 * options.minutes
    for i, name in enumerate(options.models):
        print(name, file=sys.stderr, flush=True)
        now = time.perf_counter()
        until = now + (end - now) / (len(options.models) - i)
        with _telling_failures(name):
            measured = measure(
                name, sizes[name], found, options.rounds, options.steps, until
            )
            if measured:
                print("\n" + table(measured), flush=True)
            rows += measured
        # Now: what follows may take too long.
        write(options.json, "gpu", told, rows=rows)


if __name__ == "__main__":
    main()
