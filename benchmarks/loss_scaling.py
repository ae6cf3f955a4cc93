"""What loss scaling costs: a full adamw step, beside its peers.

For each way to skip a step that overflowed, in the program that XLA compiles for an
H100 and a TPU v5e, from scaled gradients to new parameters, state and scale: gradient-
sized arrays moved, gradient-sized arrays held beside arguments and results, kernels.
Then for each way to train 16-bit parameters the bytes that one parameter needs and
moves. Those are exact: no clock, no device. Step times are those of the device at hand,
medians of runs that take turns, as ratios to the plain step.

    .venv/bin/python -m benchmarks.loss_scaling --json benchmarks/results
"""

import argparse
import importlib
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_lite as jmp
from benchmarks.compiled import TARGETS, Program, compile_for, missing
from benchmarks.report import device_name, stamp, write

SHAPE = (8192, 8192)
GRADIENT_BYTES = 4 * SHAPE[0] * SHAPE[1]
SCALE = 2.0**15


class Way(NamedTuple):
    """A way to make an optimizer's step out of gradients.

    Attributes:
      init: from parameters to what the step carries along beside them.
      step: from parameters, that, and gradients to new parameters and new state.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def by_optimizer(optimizer: Any) -> Way:
    """A step of an optimizer, which carries the loss scale along if there is one."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        if isinstance(state, jmp.states.LossScalingState):
            grads = jmp.get_loss_scale(state).unscale(grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Way(optimizer.init, step)


def by_jmp(optimizer: Any) -> Way:
    """A step as the jmp package's README writes it."""
    peer = importlib.import_module("jmp")

    def init(params: Any) -> Any:
        # Its numbers: jit's description of the object itself is one that it refuses.
        return optimizer.init(params), (jnp.float32(SCALE), jnp.int32(0))

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        opt_state, numbers = state
        loss_scale = peer.DynamicLossScale(*numbers)
        grads = loss_scale.unscale(grads)
        is_finite = peer.all_finite(grads)
        loss_scale = loss_scale.adjust(is_finite)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        chosen = peer.select_tree(
            is_finite, (new_params, new_state), (params, opt_state)
        )
        numbers = loss_scale.loss_scale, loss_scale.counter
        return chosen[0], (chosen[1], numbers)

    return Way(init, step)


def by_dynamic_scale(optimizer: Any) -> Way:
    """A step as Flax's DynamicScale and its ImageNet example write it."""
    from flax.training.dynamic_scale import DynamicScale

    def init(params: Any) -> Any:
        return optimizer.init(params), DynamicScale(scale=SCALE)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        opt_state, scale = state

        def loss(params: Any) -> Any:  # Of these gradients, which it then scales.
            products = jax.tree.map(lambda p, g: jnp.sum(p * g), params, grads)
            return sum(jax.tree.leaves(products))

        scale, is_finite, _, grads = scale.value_and_grad(loss)(params)
        updates, new_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        chosen = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (new_params, new_state),
            (params, opt_state),
        )
        return chosen[0], (chosen[1], scale)

    return Way(init, step)


def by_mpx(optimizer: Any) -> Way:
    """A step as mpx's filter_grad and optimizer_update make it."""
    peer = importlib.import_module("mpx")

    def init(params: Any) -> Any:
        scale = peer.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1))
        return optimizer.init(params), scale

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        opt_state, scale = state
        is_finite = peer.all_finite(grads)
        scale = scale.adjust(is_finite)
        grads = scale.unscale(grads)
        params, opt_state = peer.optimizer_update(
            params, optimizer, opt_state, grads, is_finite
        )
        return params, (opt_state, scale)

    return Way(init, step)


def _adamw() -> Any:
    return optax.adamw(1e-3)


WAYS: Mapping[str, Callable[[], Way]] = {
    "plain": lambda: by_optimizer(_adamw()),
    "jmp_lite.loss_scaling": lambda: by_optimizer(jmp.loss_scaling(_adamw())),
    "jmp_lite.skip_nonfinite": lambda: by_optimizer(jmp.skip_nonfinite(_adamw())),
    "jmp, by hand": lambda: by_jmp(_adamw()),
    "DynamicScale and where": lambda: by_dynamic_scale(_adamw()),
    "mpx": lambda: by_mpx(_adamw()),
    "optax.apply_if_finite": lambda: by_optimizer(optax.apply_if_finite(_adamw(), 5)),
}
PEERS = {"jmp, by hand": "jmp", "DynamicScale and where": "flax", "mpx": "mpx"}


class Kind(NamedTuple):
    """A kind of parameters.

    Attributes:
      dtype: theirs.
      grad_dtype: that of their gradients.
      wrap: what wraps adamw, which may store its moments in fewer bits.
    """

    dtype: str
    grad_dtype: str
    wrap: Callable[[Any], Any]


PARAMETERS: Mapping[str, Kind] = {
    "float32": Kind("float32", "float32", lambda inner: inner),
    "float32, with loss_scaling": Kind("float32", "float32", jmp.loss_scaling),
    "float32, 16-bit gradients": Kind("float32", "bfloat16", lambda inner: inner),
    "bfloat16, master_weights": Kind("bfloat16", "bfloat16", jmp.master_weights),
    "bfloat16, compensated": Kind("bfloat16", "bfloat16", jmp.compensated),
    "bfloat16, stochastic_rounding": Kind(
        "bfloat16",
        "bfloat16",
        lambda inner: jmp.stochastic_rounding(inner, jax.random.key(0)),
    ),
    "bfloat16, nothing else": Kind("bfloat16", "bfloat16", lambda inner: inner),
}
MOMENTS: Mapping[str, Callable[[Any], Any]] = {
    "32 bits": lambda inner: inner,
    "16 bits": lambda inner: jmp.low_precision_state(inner, key=jax.random.key(0)),
    "8 bits": lambda inner: jmp.low_precision_state(
        inner, "float8_e4m3fn", key=jax.random.key(0)
    ),
}
OF_OPTAX = "16, of optax"
"""The moments that optax makes of 16-bit parameters."""
TRAINED = [
    (parameters, moments)
    for parameters in PARAMETERS
    for moments in ([OF_OPTAX] if "nothing" in parameters else MOMENTS)
]


def shapes(n_params: int, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of some parameters of `SHAPE`."""
    leaf = jax.ShapeDtypeStruct(SHAPE, dtype)
    return {f"w{i}": leaf for i in range(n_params)}


def compile_step(
    target: str,
    way: Way,
    n_params: int = 1,
    dtype: str = "float32",
    grad_dtype: str | None = None,
) -> Program:
    """Compiles all from scaled gradients to new parameters, in place.

    Args:
      target: one of `compiled.TARGETS`.
      way: how the step is made.
      n_params: how many parameters of `SHAPE` there are.
      dtype: of the parameters.
      grad_dtype: of the gradients; as the parameters, if it is None.
    """
    params, grads = shapes(n_params, dtype), shapes(n_params, grad_dtype or dtype)
    state = jax.eval_shape(way.init, params)
    return compile_for(target, way.step, params, state, grads, donate_argnums=(0, 1))


# --------------------------------------------------------------------------- measuring


class Skipping(NamedTuple):
    """What a way to skip costs.

    Attributes:
      way: its name.
      target: what its step is compiled for.
      moved: gradient-sized arrays that the step moves.
      held: gradient-sized arrays that it holds beside its arguments and results.
      kernels: how many kernels it runs.
    """

    way: str
    target: str
    moved: float
    held: float
    kernels: int


class Training(NamedTuple):
    """What training a kind of parameters costs.

    Attributes:
      parameters: the dtype of the parameters, and what wraps adamw.
      moments: how its moments are stored.
      held: bytes of memory for a parameter: itself and the optimizer's state.
      gradient: bytes of memory for its gradient.
      moved: bytes that a step moves for a parameter, its gradient included, by target.
      temporary: bytes that a step needs besides, by target.
    """

    parameters: str
    moments: str
    held: float
    gradient: float
    moved: Mapping[str, float]
    temporary: Mapping[str, float]


def skipping(name: str, target: str) -> Skipping:
    """Measures a way to skip."""
    program = compile_step(target, WAYS[name]())
    moved = program.bytes_moved / GRADIENT_BYTES
    held = program.temporaries / GRADIENT_BYTES
    return Skipping(name, target, moved, held, program.kernels)


def training(parameters: str, moments: str, targets: Sequence[str]) -> Training:
    """Measures a way to train parameters."""
    kind = PARAMETERS[parameters]
    store = MOMENTS.get(moments, lambda inner: inner)
    way = by_optimizer(kind.wrap(store(_adamw())))
    # Of gradients in float32, in which an optimizer computes.
    in_float32 = way._replace(
        step=lambda params, state, grads: way.step(
            params, state, grads if moments == OF_OPTAX else jmp.cast_to_full(grads)
        )
    )
    params = shapes(1, kind.dtype)
    summary = jmp.dtype_summary((params, jax.eval_shape(way.init, params)))
    programs = {
        target: compile_step(
            target, in_float32, dtype=kind.dtype, grad_dtype=kind.grad_dtype
        )
        for target in targets
    }
    n = SHAPE[0] * SHAPE[1]
    return Training(
        parameters,
        moments,
        summary.total.bytes / n,
        jnp.dtype(kind.grad_dtype).itemsize,
        {target: program.bytes_moved / n for target, program in programs.items()},
        {target: program.temporaries / n for target, program in programs.items()},
    )


def step_times(names: Sequence[str], width: int, runs: int) -> dict[str, list[float]]:
    """Returns the milliseconds of steps on the device at hand, which take turns."""
    arrays = {f"w{i}": jnp.ones((width, width)) for i in range(4)}
    grads = jax.tree.map(lambda x: 1e-3 * x, arrays)
    steps, states = {}, {}
    for name in names:
        way = WAYS[name]()
        params = jax.tree.map(jnp.copy, arrays)
        state = jax.tree.map(jnp.array, way.init(params))
        steps[name] = jax.jit(way.step, donate_argnums=(0, 1))
        states[name] = jax.block_until_ready(steps[name](params, state, grads))
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs):
        for name in names:
            start = time.perf_counter()
            states[name] = jax.block_until_ready(steps[name](*states[name], grads))
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


# ------------------------------------------------------------------------------ tables


def skipping_table(rows: Sequence[Skipping]) -> str:
    """Returns what skipping costs, as text."""
    lines = [f"{'':26}{'target':>7}{'arrays moved':>14}{'held':>7}{'kernels':>9}"]
    lines += [
        f"{r.way:26}{r.target:>7}{r.moved:>14.2f}{r.held:>7.2f}{r.kernels:>9}"
        for r in rows
    ]
    return "\n".join(lines)


def training_table(rows: Sequence[Training]) -> str:
    """Returns what training some parameters costs, as text."""
    targets = list(rows[0].moved)
    moved = "".join(f"{target:>8}" for target in targets)
    lines = [
        f"{'bytes of memory for a parameter':46}{'with its':>10}   a step moves",
        f"{'parameters':31}{'moments':>15}{'gradient':>10}{moved}",
    ]
    lines += [
        f"{r.parameters:31}{r.moments:>15}{r.held + r.gradient:>10.2f}"
        + "".join(f"{r.moved[target]:>8.2f}" for target in targets)
        for r in sorted(rows, key=lambda r: -r.held - r.gradient)
    ]
    return "\n".join(lines)


def times_table(times: Mapping[str, Sequence[float]]) -> str:
    """Returns how long steps take, as text: the median, and where half of them lie."""
    plain = statistics.median(times["plain"])
    lines = [f"{'step time':26}{'ms':>8}{'quartiles':>16}{'/ plain':>9}"]
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4)
        spread = f"{low:.2f}-{high:.2f}"
        lines.append(f"{name:26}{middle:>8.2f}{spread:>16}{middle / plain:>9.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the tables, and writes them as JSON where that is wanted."""
    parser = argparse.ArgumentParser("python -m benchmarks.loss_scaling")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--width", type=int, default=1024, help="of the steps timed")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    options = parser.parse_args(argv)
    for target in options.targets:
        if missing(target):
            raise SystemExit(missing(target))
    names = list(WAYS)
    for name, package in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: its rows are left out")
            names.remove(name)
    told = stamp(shape=SHAPE, width=options.width, runs=options.runs)
    told["device"] = device_name()

    skipped = [skipping(name, target) for target in options.targets for name in names]
    print(f"An adamw step on {SHAPE[0] * SHAPE[1]:,} parameters")
    print(skipping_table(skipped), flush=True)
    trained = [training(*names, options.targets) for names in TRAINED]
    print("\n" + training_table(trained), flush=True)
    times = step_times(names, options.width, options.runs)
    print(f"\n{4 * options.width**2:,} parameters on {told['device']}")
    print(times_table(times))
    told["step_ms"] = times
    write(options.json, "loss_scaling", told, skipping=skipped, training=trained)


if __name__ == "__main__":
    main()
