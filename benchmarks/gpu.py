"""What autocast, loss scaling and number formats gain on one NVIDIA GPU.

Parts, the most telling first: the ceilings of the device (products of large matrices in
each precision, copies), steps of an optimizer alone, then whole training steps of
models in several precisions. The cases of a part are compiled at the same time, and
their steps take turns: the clock of a GPU falls under load. Each part has a limit of
its own; all of them fit into eight minutes. A row is printed when it is measured, and
the JSON is written after each part. Beside each time stands the least that the compiled
program takes at the ceilings that were measured. It needs Python with jax, flax, optax
and chex, and no network:

    python3 -m benchmarks.gpu --json benchmarks/results
    python3 -m benchmarks.gpu --parts mlp --profile mlp
    JAX_PLATFORMS=cpu python3 -m benchmarks.gpu --tiny
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.profiler import ProfileData

import jmp_lite as jmp
from benchmarks.autocast import fill
from benchmarks.compiled import H100, Program, Target, read, seconds_of
from benchmarks.loss_scaling import by_dynamic_scale, by_optimizer
from benchmarks.report import device_name, stamp, write
from benchmarks.training_steps import (
    FORMATS,
    MODELS,
    TINY,
    VARIANTS,
    Size,
    Variant,
    make_optimizer,
    mlp_blocks,
    step_and_shapes,
    transformer,
)

# ---------------------------------------------------------------------------- ceilings

# Of products: the dtype of the operands, and the precision that is asked for.
PRODUCTS = {
    "bfloat16": ("bfloat16", "default"),
    "float16": ("float16", "default"),
    "float32 (TF32)": ("float32", "default"),
    "float32 highest": ("float32", "highest"),
    "float8, fast sums": ("float8_e4m3fn", "default"),
    "float8": ("float8_e4m3fn", "highest"),
    "int8": ("int8", "default"),
}
_SHORT = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8",
    "int8": "s8",
}
_RESULTS = {"int8": "int32", "float8_e4m3fn": "bfloat16"}


class Ceilings(NamedTuple):
    """What the device does at most.

    Attributes:
      flops: operations of matrix products a second, by precision; those that the device
        does not have are missing.
      bandwidth: bytes that copies read and write in a second.
    """

    flops: Mapping[str, float]
    bandwidth: float

    def target(self) -> Target:
        """Returns the device as programs see it."""
        rates = {
            (_SHORT[dtype], precision): self.flops[name]
            for name, (dtype, precision) in PRODUCTS.items()
            if name in self.flops
        }
        return dataclasses.replace(
            H100, bandwidth=self.bandwidth, flops={**H100.flops, **rates}
        )


def ceilings(width: int, runs: int) -> Ceilings:
    """Measures products of matrices of a width, and copies of four of them."""
    flops: dict[str, float] = {}
    for name, (dtype, precision) in PRODUCTS.items():
        with _telling_failures(name):
            # Not ones: a device that has nothing to do for them may run faster.
            a = (8 * jax.random.normal(jax.random.key(0), (width, width))).astype(dtype)
            product = jax.jit(
                functools.partial(
                    lax.dot,
                    precision=precision,
                    preferred_element_type=_RESULTS.get(dtype, dtype),
                )
            )
            seconds = _best_seconds(lambda p=product, a=a: p(a, a), runs)
            flops[name] = 2 * width**3 / seconds
    x = jnp.ones((4, width, width), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return Ceilings(flops, 2 * x.nbytes / _best_seconds(lambda: copy(x), runs))


def _best_seconds(run: Callable[[], Any], runs: int) -> float:
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


# ------------------------------------------------------------------------------- parts

CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""XLA's options for products of cuBLAS alone."""


class Case(NamedTuple):
    """A step to measure.

    Attributes:
      step: from a state and a batch to a new state and a number.
      state: makes the state, of arrays that are on the device.
      batch: the shapes of the batch.
      options: XLA's, beside the defaults.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Callable[[], Any]
    batch: Any
    options: Mapping[str, Any]


class Part(NamedTuple):
    """Cases that take turns.

    Attributes:
      seconds: its limit.
      cases: from whether sizes are for a CPU to the cases, by name.
    """

    seconds: float
    cases: Callable[[bool], Mapping[str, Case]]


def training(
    size: Size, names: Sequence[str], options: Mapping[str, Any] | None = None
) -> dict[str, Case]:
    """Returns the training steps of a model in some variants."""
    cases = {}
    for name in names:
        variant = {**VARIANTS, **FORMATS}[name]
        step, params, _, batch = step_and_shapes(variant, size, size.batch)

        def joined(state: Any, batch: Any, step: Any = step) -> tuple[Any, Any]:
            *state, value = step(*state, batch)
            return tuple(state), value

        def start(params: Any = params, variant: Variant = variant) -> Any:
            made = jax.jit(lambda: fill(params, 0))()
            return made, make_optimizer(variant).init(made)

        cases[name] = Case(joined, start, batch, options or {})
    return cases


BY_HAND, MIXED, TF32 = "bfloat16 by hand", "bfloat16, autocast", "float32 default"


def _optimizers(is_tiny: bool) -> dict[str, Case]:
    shapes = [(1024 + 8 * i, 4096 - 16 * i) for i in range(30)]
    if is_tiny:
        shapes = [(64, 128), (128, 64)]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    key = jax.random.key(0)
    ways = {
        "adamw": by_optimizer(optax.adamw(1e-4)),
        "loss_scaling": by_optimizer(jmp.loss_scaling(optax.adamw(1e-4))),
        "as Flax's DynamicScale": by_dynamic_scale(optax.adamw(1e-4)),
        "apply_if_finite": by_optimizer(optax.apply_if_finite(optax.adamw(1e-4), 5)),
        **{
            f"moments in {dtype}": by_optimizer(
                jmp.low_precision_state(optax.adamw(1e-4), dtype, key=key)
            )
            for dtype in ("bfloat16", "float8_e4m3fn")
        },
    }

    def case(way: Any) -> Case:
        def step(state: Any, grads: Any) -> tuple[Any, Any]:
            params, opt_state = way.step(*state, grads)
            return (params, opt_state), params[0][0, 0]

        def start() -> Any:
            made = jax.jit(lambda: fill(params, 0))()
            return made, way.init(made)

        return Case(step, start, params, {})

    return {name: case(way) for name, way in ways.items()}


def _mlp(is_tiny: bool) -> dict[str, Case]:
    width, rows = (16, 32) if is_tiny else (4096, 8192)
    size = Size(functools.partial(mlp_blocks, width=width), rows)
    found = training(size, (BY_HAND, MIXED, "float8", TF32))
    of_cublas = training(size, (BY_HAND, MIXED, "float8"), {} if is_tiny else CUBLAS)
    found.update({f"{name}, cuBLAS": case for name, case in of_cublas.items()})
    # Last: XLA tries their many small kernels for minutes.
    return found | training(size, ("int8", "float8_rows"))


def _scan(width: int, names: Sequence[str], is_tiny: bool) -> dict[str, Case]:
    sizes = {"width": width, "heads": width // 128, "depth": 24, "length": 1024}
    if is_tiny:
        sizes = {"width": 16, "heads": 2, "depth": 2, "length": 8, "vocabulary": 32}
    make = functools.partial(transformer, layout="scan", **sizes)
    return training(Size(make, 2 if is_tiny else 4), names)


def _attention(is_tiny: bool) -> dict[str, Case]:
    shape = (1, 8, 2, 8) if is_tiny else (8, 2048, 16, 64)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)

    def case(attention: Callable[..., Any]) -> Case:
        def loss(q: Any, batch: Any) -> Any:
            k, v = batch
            return jnp.mean(attention(q, k, v, is_causal=True) ** 2)

        def step(q: Any, batch: Any) -> tuple[Any, Any]:
            value, grad = jax.value_and_grad(jmp.autocast(loss))(q, batch)
            return q - grad, value

        return Case(step, jax.jit(lambda: fill(x, 0)), (x, x), {})

    attention = jax.nn.dot_product_attention
    own = "xla" if is_tiny else "cudnn"
    of_cudnn = jmp.low_call(functools.partial(attention, implementation=own))
    return {
        "XLA, mixed": case(functools.partial(attention, implementation="xla")),
        "cuDNN, low_call": case(of_cudnn),
        "XLA, float32": case(
            jmp.full_precision(functools.partial(attention, implementation="xla"))
        ),
    }


def _of_model(name: str, *variants: str) -> Callable[[bool], dict[str, Case]]:
    return lambda is_tiny: training((TINY if is_tiny else MODELS)[name], variants)


def _vocabulary(is_tiny: bool) -> dict[str, Case]:
    if is_tiny:
        return training(TINY["transformer (GPT-2 small)"], (BY_HAND, MIXED))
    return training(Size(transformer, 16), (BY_HAND, MIXED))


PARTS: Mapping[str, Part] = {
    "optimizers": Part(60, _optimizers),
    "mlp": Part(90, _mlp),
    "scan 1024": Part(
        60, functools.partial(_scan, 1024, (BY_HAND, MIXED, "float8", "O1", TF32))
    ),
    "scan 2048": Part(70, functools.partial(_scan, 2048, (BY_HAND, MIXED, "float8"))),
    "lstm": Part(
        50,
        _of_model(
            "LSTM, 1024 wide", BY_HAND, MIXED, "float16, with loss scaling", TF32
        ),
    ),
    "vocabulary": Part(40, _vocabulary),
    "attention": Part(30, _attention),
    "resnet": Part(50, _of_model("ResNet-50, 224 x 224", BY_HAND, MIXED)),
}
"""Together with the ceilings, half a minute, eight minutes."""


# --------------------------------------------------------------------------- measuring


class Measured(NamedTuple):
    """What a step is measured to be.

    Attributes:
      part: the name of the part.
      case: the name of the case.
      milliseconds: of each round of steps, the mean of a step.
      memory: bytes that the compiled step needs.
      compiling: seconds of compiling, beside the other cases of the part.
      roofline: milliseconds that the compiled step takes at least; None where the
        program cannot be read.
      is_finite: whether the last number was.
    """

    part: str
    case: str
    milliseconds: tuple[float, ...]
    memory: int
    compiling: float
    roofline: float | None
    is_finite: bool

    @property
    def median(self) -> float:
        """The median of the milliseconds."""
        return statistics.median(self.milliseconds)


class Compiled(NamedTuple):
    """A compiled step, and the seconds that it took to compile."""

    step: jax.stages.Compiled
    seconds: float


def compile_case(case: Case) -> Compiled:
    """Compiles a step for the device at hand."""
    start = time.perf_counter()
    state = jax.eval_shape(case.state)
    jitted = jax.jit(case.step, donate_argnums=0)
    compiled = jitted.lower(state, case.batch).compile(dict(case.options))
    return Compiled(compiled, time.perf_counter() - start)


@contextlib.contextmanager
def compiling(cases: Mapping[str, Case]) -> Iterator[dict[str, Future[Compiled]]]:
    """Compiles all cases at the same time; at the end it waits for none of them."""
    pool = ThreadPoolExecutor(len(cases))
    try:
        yield {name: pool.submit(compile_case, case) for name, case in cases.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def measure(
    part: str, cases: Mapping[str, Case], device: Ceilings, settings: "Settings"
) -> list[Measured]:
    """Measures the cases of a part; what fails or is too late is left out."""
    rows: list[Measured] = []
    # Not a state for each case, where they are alike: two may not fit.
    states: dict[Any, Any] = {}
    running: dict[str, tuple[Compiled, Any, Any, int]] = {}
    with compiling(cases) as futures:
        for name, future in futures.items():
            with _telling_failures(name):
                until = settings.until - settings.reserve
                compiled = future.result(max(until - time.perf_counter(), 0))
                case = cases[name]
                kind = str(jax.eval_shape(case.state))
                if kind not in states:
                    states[kind] = case.state()
                batch = jax.jit(lambda case=case: fill(case.batch, 1))()
                seconds = 0.0
                for _ in range(2):  # The second one meets the buffers of the first.
                    start = time.perf_counter()
                    states[kind], value = compiled.step(states[kind], batch)
                    jax.block_until_ready(value)
                    seconds = time.perf_counter() - start
                steps = max(1, math.ceil(settings.round_seconds / seconds))
                running[name] = compiled, kind, batch, steps
    times: dict[str, list[float]] = {name: [] for name in running}
    values: dict[str, Any] = {}
    for _ in range(settings.rounds):
        for name, (compiled, kind, batch, steps) in running.items():
            with _telling_failures(name):
                start = time.perf_counter()
                for _ in range(steps):
                    states[kind], values[name] = compiled.step(states[kind], batch)
                jax.block_until_ready(values[name])
                times[name].append((time.perf_counter() - start) / steps * 1e3)
        if time.perf_counter() > settings.until:
            break
    for name, (compiled, *_) in running.items():
        if times[name]:
            program = read(compiled.step, "h100")
            rows.append(
                Measured(
                    part=part,
                    case=name,
                    milliseconds=tuple(times[name]),
                    memory=program.peak_memory,
                    compiling=compiled.seconds,
                    roofline=roofline(program, device),
                    is_finite=bool(jnp.isfinite(values[name])),
                )
            )
            print(line(rows[-1], rows[0]), flush=True)
    return rows


class Settings(NamedTuple):
    """How a part is measured.

    Attributes:
      until: when to be done, by ``time.perf_counter``.
      reserve: seconds before that when nothing is compiled any more.
      rounds: how often the cases take turns.
      round_seconds: how long a turn takes at least.
    """

    until: float
    reserve: float = 15.0
    rounds: int = 5
    round_seconds: float = 0.25


@contextlib.contextmanager
def _telling_failures(what: str) -> Iterator[None]:
    """Prints what fails inside: the others are still worth knowing."""
    try:
        yield
    except TimeoutError:
        print(f"  {what}: left out, there is no time", file=sys.stderr)
    except Exception:
        print(f"  {what} failed:", file=sys.stderr)
        traceback.print_exc()


def roofline(program: Program, device: Ceilings) -> float | None:
    """Returns the least milliseconds of a program; None where it cannot be read."""
    with _telling_failures("reading a program"):  # The text of another compiler.
        return program.roofline_on(device.target()) * 1e3
    return None


# --------------------------------------------------------------------------- profiling


class Timed(NamedTuple):
    """A kernel, measured.

    Attributes:
      name: of the kernel.
      milliseconds: in one step, all its runs.
      least: the least that they take at the ceilings; None for one that the compiled
        program does not name.
    """

    name: str
    milliseconds: float
    least: float | None

    @property
    def lost(self) -> float:
        """Milliseconds above the least."""
        return self.milliseconds - (self.least or 0.0)


def profile(case: Case, device: Ceilings, steps: int = 3) -> list[Timed]:
    """Returns the kernels of a step, those that lose most first."""
    compiled = compile_case(case).step
    state, batch = case.state(), jax.jit(lambda: fill(case.batch, 1))()
    state, _ = jax.block_until_ready(compiled(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, value = compiled(state, batch)
            jax.block_until_ready(value)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        spent = _nanoseconds(ProfileData.from_file(str(path)))
    least: Counter[str] = Counter()
    with _telling_failures("reading a program"):
        for row in read(compiled, "h100").rows:
            least[row.name] += row.trips * seconds_of(device.target(), row) * 1e3
    rows = [
        Timed(name, ns / steps / 1e6, least.get(name)) for name, ns in spent.items()
    ]
    return sorted(rows, key=lambda row: -row.lost)


def _nanoseconds(data: ProfileData) -> Counter[str]:
    """Returns the time of each instruction of a trace, in all its runs."""
    spent: Counter[str] = Counter()
    for plane in data.planes:
        for event in (event for lane in plane.lines for event in lane.events):
            names = {key: value for key, value in event.stats if key == "hlo_op"}
            if names:
                spent[str(names["hlo_op"])] += event.duration_ns
    return spent


def profile_table(rows: Sequence[Timed], count: int = 15) -> str:
    """Returns the kernels that lose most as text."""
    total = sum(row.milliseconds for row in rows)
    lines = [f"{'ms':>9}{'least':>9}{'lost':>9}  kernel ({total:.3f} ms in all)"]
    for row in rows[:count]:
        least = "" if row.least is None else f"{row.least:.3f}"
        lines.append(f"{row.milliseconds:>9.3f}{least:>9}{row.lost:>9.3f}  {row.name}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ tables


def ceilings_table(found: Ceilings) -> str:
    """Returns the ceilings as text."""
    lines = [f"{name:17}{f / 1e12:8.1f} Tflop/s" for name, f in found.flops.items()]
    return "\n".join([*lines, f"{'copies':17}{found.bandwidth / 1e9:8.0f} GB/s"])


HEADING = f"{'':28}" + "".join(
    f"{name:>{width}}"
    for name, width in zip(
        ("ms/step", "spread", "/ first", "least", "GB", "s comp."),
        (9, 7, 8, 9, 7, 8),
        strict=True,
    )
)


def line(row: Measured, first: Measured) -> str:
    """Returns a row as text, beside the first one of its part."""
    spread = (max(row.milliseconds) - min(row.milliseconds)) / row.median
    least = "" if row.roofline is None else f"{row.roofline:.2f}"
    note = "" if row.is_finite else "  not finite"
    return (
        f"  {row.case:26}{row.median:>9.2f}{spread:>7.0%}"
        f"{row.median / first.median:>8.2f}{least:>9}{row.memory / 1e9:>7.2f}"
        f"{row.compiling:>8.1f}{note}"
    )


def table(rows: Sequence[Measured]) -> str:
    """Returns the rows of all parts as text."""
    lines = [HEADING]
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        lines += [part, *(line(row, own[0]) for row in own)]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python3 -m benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--profile", choices=PARTS, help="a part: time its kernels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    # Flax promotes by itself.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    told = stamp(rounds=options.rounds, tiny=options.tiny)
    told["device"] = device_name()
    print(f"{told['device']}, jax {jax.__version__}")
    found = ceilings(64 if options.tiny else 8192, 2 if options.tiny else 20)
    print(ceilings_table(found), flush=True)
    told["ceilings"] = found._asdict()
    rows: list[Measured] = []
    print(HEADING)
    for name in options.parts:
        print(name, flush=True)
        with _telling_failures(name):
            part = PARTS[name]
            settings = Settings(
                time.perf_counter() + part.seconds,
                rounds=options.rounds,
                round_seconds=0.001 if options.tiny else 0.25,
            )
            rows += measure(name, part.cases(options.tiny), found, settings)
        # Now: what follows may take too long.
        write(options.json, "gpu", told, rows=rows)
    if options.profile:
        for name, case in PARTS[options.profile].cases(options.tiny).items():
            with _telling_failures(name):
                print(f"\n{options.profile}: {name}")
                print(profile_table(profile(case, found)), flush=True)


if __name__ == "__main__":
    main()
