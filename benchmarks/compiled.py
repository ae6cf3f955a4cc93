"""What XLA makes of a function for an H100 and a TPU v5e, where there is neither.

It compiles with XLA's default flags, as users do, but that no device is there to time
kernels on: a real GPU chooses among several kernels for a product.

The law: a figure is read from the program that the real compiler made, never from a
clock. The compilers are deterministic, so a test may pin every figure.

    program = compile_for("h100", step, params, opt_state, grads)
    program.bytes_moved, program.peak_memory, program.matmuls
    print(program)

It needs the dependency group `targets` (`missing` says what of it is not there), and
JAX itself must run on the CPU: `JAX_PLATFORMS=cpu`.
"""

import dataclasses
import functools
import importlib.util
import mmap
import os
import pathlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.hlo import Module, parse
from benchmarks.kernels import Kernel, Matmul, executed, unknown_loops


@dataclass(frozen=True)
class Target:
    """A device, as its compiler and its data sheet describe it."""

    topology: str  # the smallest: one H100, one host of v5e
    needs: tuple[tuple[str, ...], ...]  # modules or programs; one of each tuple
    compiler_options: Mapping[str, Any]
    bandwidth: float  # bytes per second
    flops: Mapping[tuple[str, str], float]  # by dtype and precision, per second
    gpu: str = ""  # XLA's description of a GPU, where it is one


# XLA's description of an H100 SXM5, which it asks the driver for where there is one.
_H100_GPU = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  cuda_compute_capability { major: 9 }
  dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


# The same of a B200, from its data sheet; what XLA reads of the older one stays.
_B200_GPU = (
    _H100_GPU.replace("core_count: 132", "core_count: 148")
    .replace("bandwidth: 3352320000000", "bandwidth: 8000000000000")
    .replace("l2_cache_size: 52428800", "l2_cache_size: 132644864")
    .replace("clock_rate_ghz: 1.98", "clock_rate_ghz: 1.965")
    .replace("device_memory_size: 84929347584", "device_memory_size: 191514017792")
    .replace("major: 9 }", "major: 10 }")
    .replace("NVIDIA H100 80GB HBM3", "NVIDIA B200")
)

H100 = Target(
    topology="1x1x1",
    needs=(
        ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
        ("nvidia.cuda_nvcc", "nvidia.cu13", "ptxas"),
    ),
    # XLA's default flags, but that nothing is there to time kernels on.
    compiler_options={"xla_gpu_autotune_level": 0},
    bandwidth=3352.32e9,
    # SXM, dense. XLA asks cuBLAS for TF32 unless a float32 dot says "highest".
    flops={
        ("f8", "default"): 1979e12,
        ("s8", "default"): 1979e12,
        ("bf16", "default"): 989e12,
        ("f16", "default"): 989e12,
        ("f32", "default"): 494e12,
        ("f32", "highest"): 67e12,
        ("f64", "default"): 67e12,
    },
    gpu=_H100_GPU,
)
_B200 = Target(
    topology="1x1x1",
    needs=H100.needs,
    compiler_options=H100.compiler_options,
    bandwidth=8000e9,
    # Dense, of one GPU of a DGX B200.
    flops={
        ("f8", "default"): 4500e12,
        ("s8", "default"): 4500e12,
        ("bf16", "default"): 2250e12,
        ("f16", "default"): 2250e12,
        ("f32", "default"): 1125e12,
        ("f32", "highest"): 75e12,
        ("f64", "default"): 37e12,
    },
    gpu=_B200_GPU,
)
# Its products are calls of cuBLAS. With the default flags XLA writes kernels for them.
_H100_CUBLAS = dataclasses.replace(
    H100,
    compiler_options={**H100.compiler_options, "xla_gpu_enable_triton_gemm": False},
)
_V5E = Target(
    topology="v5e:2x2",
    needs=(("libtpu",),),
    compiler_options={},
    bandwidth=819e9,
    # One matrix unit, for bfloat16. A float32 dot is one pass of rounded operands by
    # default, three for "high", six for "highest". A float8 dot first
    # converts its operands to bfloat16.
    flops={
        ("f8", "default"): 197e12,
        ("s8", "default"): 394e12,
        ("bf16", "default"): 197e12,
        ("f16", "default"): 197e12,
        ("f32", "default"): 197e12,
        ("f32", "high"): 197e12 / 3,
        ("f32", "highest"): 197e12 / 6,
    },
)
# From their data sheets, for one chip.
_V6E = Target(
    topology="v6e:2x2",
    needs=_V5E.needs,
    compiler_options={},
    bandwidth=1640e9,
    flops=_V5E.flops
    | {
        ("f8", "default"): 918e12,
        ("s8", "default"): 1836e12,
        ("bf16", "default"): 918e12,
        ("f16", "default"): 918e12,
        ("f32", "default"): 918e12,
        ("f32", "high"): 918e12 / 3,
        ("f32", "highest"): 918e12 / 6,
    },
)
_TPU7X = Target(
    topology="tpu7x:2x2x1",
    needs=_V5E.needs,
    compiler_options={},
    bandwidth=7380e9,
    flops={
        ("f8", "default"): 4614e12,
        ("s8", "default"): 4614e12,
        ("bf16", "default"): 2307e12,
        ("f16", "default"): 2307e12,
        ("f32", "default"): 2307e12,
        ("f32", "high"): 2307e12 / 3,
        ("f32", "highest"): 2307e12 / 6,
    },
)
_TARGETS = {
    "h100": H100,
    "h100 cublas": _H100_CUBLAS,
    "v5e": _V5E,
    "b200": _B200,
    "v6e": _V6E,
    "tpu7x": _TPU7X,
}
TARGETS = ("h100", "v5e")
"""Those that every table has a column of; others are compiled for where named."""


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_NO_ESTIMATE = 10**12


@dataclass(frozen=True)
class Program:
    """A compiled program and its figures, of one run on one device.

    The fields are what the compiler says that it allocates. The properties are read
    from the text: what the kernels do, in all trips of all loops. A loop in
    `unknown_loops` counts as one trip, a conditional as its branch that moves most
    bytes.
    """

    target: str
    text: str = field(repr=False)  # the optimised HLO, without source lines
    arguments: int  # bytes of the arguments
    outputs: int  # bytes of the results
    aliased: int  # bytes of results that lie in donated arguments
    temporaries: int  # bytes allocated for everything else, cuBLAS's scratch included

    @functools.cached_property
    def module(self) -> Module:
        """The parsed text."""
        return parse(self.text)

    @functools.cached_property
    def rows(self) -> tuple[Kernel, ...]:
        """The kernels that run, in their order, each with its trips."""
        return executed(self.module)

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """The loops whose number of trips depends on values."""
        return unknown_loops(self.module)

    @property
    def cycles(self) -> int:
        """The cycles of all instructions, as the compiler for TPUs estimates them.

        It has no estimate of a few instructions, and writes a huge number instead.
        Those count as nothing.
        """
        found = map(int, _CYCLES.findall(self.text))
        return sum(cycles for cycles in found if cycles < _NO_ESTIMATE)

    @property
    def peak_memory(self) -> int:
        """Bytes of device memory that a run needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels read and write."""
        return sum(row.bytes_moved for row in self.rows)

    @property
    def kernels(self) -> int:
        """How many kernels run."""
        return sum(row.trips for row in self.rows)

    @property
    def matmuls(self) -> dict[str, int]:
        """How many dots and convolutions run, by the dtypes that they run in.

        "bf16" multiplies and returns bfloat16, "bf16->f32" returns float32,
        "bf16xf32" multiplies the one with the other.
        """
        return dict(self._sum(lambda matmul: 1))

    @property
    def matmul_flops(self) -> dict[str, int]:
        """Their floating point operations, two a multiplication, by the same keys."""
        return dict(self._sum(lambda matmul: matmul.flops))

    @property
    def opaque(self) -> dict[str, int]:
        """Kernels whose products cannot be read and are in no figure, by target.

        Their operands and results are counted. XLA's TPU compiler writes such kernels
        itself: an attention may become one.
        """
        total: Counter[str] = Counter()
        for row in self.rows:
            if row.is_custom_call and not row.matmuls:
                total[row.kind] += row.trips
        return dict(total)

    @property
    def collectives(self) -> dict[str, int]:
        """Bytes that go through collectives, by dtype."""
        total: Counter[str] = Counter()
        for row in self.rows:
            for dtype, size in row.collectives:
                total[dtype] += row.trips * size
        return dict(total)

    @property
    def roofline_seconds(self) -> float:
        """The least time: each kernel waits for its bytes or its products.

        Other arithmetic, launches and the network between devices take no time.
        """
        return self.roofline_on(_TARGETS[self.target])

    def roofline_on(self, target: Target) -> float:
        """The same on another device, in seconds."""
        return sum(row.trips * seconds_of(target, row) for row in self.rows)

    def largest(self, count: int = 10) -> list[Kernel]:
        """The kernels that move most bytes."""
        return sorted(self.rows, key=lambda row: -row.bytes_moved)[:count]

    def table(self, count: int = 10) -> str:
        """The figures, and the kernels that move most bytes."""
        collectives, opaque = self.collectives.items(), self.opaque.items()
        lines = [
            f"{self.target}: {_size(self.bytes_moved)} moved by {self.kernels} kernels,"
            f" at least {1e3 * self.roofline_seconds:.3f} ms",
            f"peak {_size(self.peak_memory)}: arguments {_size(self.arguments)},"
            f" outputs {_size(self.outputs)}, aliased {_size(self.aliased)},"
            f" temporaries {_size(self.temporaries)}",
            *(
                f"{self.matmuls[dtypes]} matmuls {dtypes}, {flops / 1e9:.1f} Gflop"
                for dtypes, flops in self.matmul_flops.items()
            ),
            *(f"{_size(n)} {dtype} in collectives" for dtype, n in collectives),
            *(f"{number} calls of {kind} are not read" for kind, number in opaque),
            *(f"{loop} counts as one trip" for loop in self.unknown_loops),
            f"{'moved':>10} {'trips':>6}  {'dtype':10} {'kind':20} kernel",
        ]
        for row in self.largest(count):
            lines.append(
                f"{_size(row.bytes_moved):>10} {row.trips:>6}  {row.dtype:10.10}"
                f" {row.kind:20.20} {row.name}  {row.op_name}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _sum(self, count: Callable[[Matmul], int]) -> Counter[str]:
        total: Counter[str] = Counter()
        for row in self.rows:
            for matmul in row.matmuls:
                total[matmul.dtypes] += row.trips * count(matmul)
        return total


def missing(target: str) -> str | None:
    """What is not installed that compiling for the target needs, or None."""
    for names in _target(target).needs:
        if not any(_is_installed(name) for name in names):
            return f"no compiler for {target}: no {' or '.join(names)} is installed"
    return None


def is_gpu(target: str) -> bool:
    """Whether a target is a GPU."""
    return bool(_target(target).gpu)


def compile_for(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    **jit_options: Any,
) -> Program:
    """Compiles a function for a device that need not be there.

    Args:
      target: one of `TARGETS`.
      fun: any function that `jax.jit` takes.
      *args: its arguments, of which only shapes and dtypes count: trees of arrays,
        `jax.ShapeDtypeStruct`s, PRNG keys and Python numbers. A `ShapeDtypeStruct`
        with a sharding over `devices(target, ...)` keeps it, all else lies on the
        first device.
      static_argnums: as for `jax.jit`.
      **jit_options: other options of `jax.jit`, for instance `donate_argnums`.

    Returns:
      The program and its figures.

    Raises:
      ValueError: if there is no such target.
      RuntimeError: if its compiler is not installed.
    """
    one_device = SingleDeviceSharding(devices(target)[0])
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    static = tuple(number % len(args) for number in numbers)
    dynamic = {i: arg for i, arg in enumerate(args) if i not in static}
    placed = jax.tree.map(lambda leaf: _place(leaf, one_device), dynamic)
    if not jax.tree.leaves(placed):
        jit_options.setdefault("out_shardings", one_device)  # no argument says where
    jitted = jax.jit(fun, static_argnums=static, **jit_options)
    lowered = jitted.lower(*(placed.get(i, arg) for i, arg in enumerate(args)))
    compiled = lowered.compile(dict(_target(target).compiler_options))
    return read(compiled, target)


def read(compiled: jax.stages.Compiled, target: str) -> Program:
    """Returns the figures of a program that is compiled already.

    Args:
      compiled: what `jax.jit(...).lower(...).compile()` returns.
      target: what it is compiled for, or the one of `TARGETS` that is nearest.
    """
    memory = compiled.memory_analysis()
    return Program(
        target=target,
        text=_SOURCES.sub("", compiled.as_text()),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
    )


@functools.cache
def devices(target: str, topology: str | None = None) -> tuple[jax.Device, ...]:
    """The devices to compile for, to make a mesh of.

    Args:
      target: one of `TARGETS`.
      topology: one host or one GPU unless given: `"v5e:4x4"` for sixteen chips,
        `"1x1x8"` (slices, hosts, GPUs of a host) for eight H100s.
    """
    reason = missing(target)
    if reason:
        raise RuntimeError(reason)
    topology = topology or _target(target).topology
    gpu = _target(target).gpu
    gpu = gpu and (xlas_own(gpu) or gpu)
    if not gpu:
        _prepare_libtpu()
        found = topologies.get_topology_desc(topology, platform="tpu")
    else:
        try:
            found = topologies.get_topology_desc(
                target, platform="cuda", topology=topology, target_config=gpu
            )
        except NotImplementedError as error:
            raise RuntimeError(
                "the CUDA plug-in gave up because it found no driver: tell JAX to run"
                " on the CPU (JAX_PLATFORMS=cpu) before it starts, and it will compile"
            ) from error
    return tuple(found.devices)


@functools.cache
def xlas_own(gpu: str) -> str:
    """Returns XLA's own description of a GPU.

    The plug-in of jax 0.12 carries some as text, and that of 0.10 none.

    Args:
      gpu: a description of ours, that ends with the name of the GPU.

    Returns:
      The text; "" if the plug-in has none.
    """
    end = gpu.strip().splitlines()[-1].encode() + b"\n"
    for name in ("xla_cuda12", "xla_cuda13"):
        spec = importlib.util.find_spec(f"jax_plugins.{name}")
        for folder in spec.submodule_search_locations or () if spec else ():
            path = pathlib.Path(folder, "xla_cuda_plugin.so")
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found,
            ):
                at = found.find(end)
                if at >= 0:
                    start = found.rfind(b"gpu_device_info {", 0, at)
                    return found[start : at + len(end)].decode()
    return ""


# Where each instruction was written: else moving a line would change the program.
_SOURCES = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*\n?"
    r"| ?stack_frame_id=\d+",
    re.MULTILINE,
)


def _prepare_libtpu() -> None:
    """Tells libtpu what it would ask a TPU's host, before it is loaded.

    Set here and not at import, so that only a process that compiles for a TPU has
    them, and never over what somebody has set.
    """
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # Two processes may compile at once: no chip is taken.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": "disabled",  # else files in the temporary directory
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _target(name: str) -> Target:
    if name not in _TARGETS:
        raise ValueError(f"no target {name!r}: there are {', '.join(_TARGETS)}")
    return _TARGETS[name]


def _is_installed(name: str) -> bool:
    if shutil.which(name):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _place(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding or sharding
    else:
        leaf = jax.eval_shape(lambda x: x, leaf)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
    )


def seconds_of(target: Target, row: Kernel) -> float:
    """The roofline of one run of one kernel."""
    moving = (row.bytes_read + row.bytes_written) / target.bandwidth
    return max(moving, sum(m.flops / _peak(target, m) for m in row.matmuls))


def _peak(target: Target, matmul: Matmul) -> float:
    """Operations a second, in the slowest of the operands' dtypes."""
    return min(_rate(target, dtype, matmul.precision) for dtype in matmul.operands)


def _rate(target: Target, dtype: str, precision: str) -> float:
    name = "f8" if dtype.startswith("f8") else dtype
    slowest = min(target.flops.values())
    default = target.flops.get((name, "default"), slowest)
    return target.flops.get((name, precision), default)


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
